// The CUDA forward: plan -> intra-chunk stage -> recurrence, three launches chained by programmatic dependent launch, for all
// chunks or, where the workspace does not hold them, for one range of chunks after the other with the states carried in fp32.
// Nothing here allocates, synchronises or asks the device anything; the first call on a device loads the kernels (qla_prepare
// does it ahead).
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/backend.hpp"
#include "core/status.hpp"
#include "core/tensor_view.hpp"
#include "core/values.hpp"
#include "cuda/capabilities.hpp"
#include "cuda/device.hpp"
#include "cuda/forward_plan.hpp"
#include "cuda/kernels/chunk_export/launch.hpp"
#include "cuda/kernels/chunk_gates/config.hpp"
#include "cuda/kernels/chunk_intra/launch.hpp"
#include "cuda/kernels/cp_merge/launch.hpp"
#include "cuda/kernels/forward/launch.hpp"
#include "cuda/kernels/plan_segments/cut.hpp"
#include "cuda/kernels/plan_segments/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "cuda/views.hpp"
#include "cuda/workspace.hpp"

namespace qla::cuda {
namespace {

constexpr int64_t kMostSlots = int64_t(1) << 31;

// The plans that this thread's calls ran by last: a model repeats its shapes, and a search takes longer than all the rest here.
struct PlanMemo {
  static constexpr size_t kKey = 11;
  using Key = std::array<int64_t, kKey>;
  struct Entry {
    Key key{};
    bool used = false;
    PlanInput input;
    WholePlans whole;
    ForwardPlan fitting;
    size_t least = 0, fits = 0;  // fitting: found for so many bytes; 0: not asked yet
  };
  std::array<Entry, 16> entries;
  size_t oldest = 0, latest = 0;
};
PlanMemo::Key plan_key(const qla_gdn_forward_args& args, const Problem& p) {
  const plan::Capabilities can = forward_capabilities(args);
  int64_t threshold = 0;
  static_assert(sizeof threshold == sizeof args.cp_warmup_threshold);
  std::memcpy(&threshold, &args.cp_warmup_threshold, sizeof threshold);
  const int64_t bits = exports_intra(args) << 4 | outputs_of_intra(args) << 5 | p.varlen | present(args.saved) << 1 |
                       can.fused << 2 | present(args.state_indices) << 3 | can.mixed << 6 | int64_t(p.dtype) << 8 |
                       int64_t(args.cp_mode) << 16;
  return {args.device,
          p.batch,
          p.tokens,
          p.num_seqs,
          p.num_k_heads,
          p.num_v_heads,
          bits,
          int64_t(args.flags & QLA_FLAG_BATCH_INVARIANT),
          args.cp_segment_chunks,
          threshold,
          args.cp_uncut_chunks};
}
PlanMemo::Entry& planned(const qla_gdn_forward_args& args, const Problem& p, const Device& device) {
  static thread_local PlanMemo memo;
  const PlanMemo::Key key = plan_key(args, p);
  if (memo.entries[memo.latest].used && memo.entries[memo.latest].key == key) return memo.entries[memo.latest];
  for (memo.latest = 0; memo.latest < memo.entries.size(); memo.latest++)
    if (memo.entries[memo.latest].used && memo.entries[memo.latest].key == key) return memo.entries[memo.latest];
  memo.latest = memo.oldest;
  memo.oldest = (memo.oldest + 1) % memo.entries.size();
  PlanMemo::Entry& e = memo.entries[memo.latest];
  e.used = false;  // planning may throw
  e.input = plan_input(args, p, plan::device_costs(device.multiprocessors, device.major));
  e.whole = whole_plans(e.input);
  e.least = least_plan(e.input, e.whole).bytes;
  e.fits = 0;
  e.key = key;
  e.used = true;
  return e;
}
const ForwardPlan& plan_for(const qla_gdn_forward_args& args, const Problem& p, const Device& device) {
  PlanMemo::Entry& e = planned(args, p, device);
  if (e.whole.best.bytes <= args.workspace_bytes) return e.whole.best;
  if (e.fits != args.workspace_bytes) {
    e.fitting = fitting_plan(e.input, e.whole, args.workspace_bytes);
    e.fits = args.workspace_bytes;
  }
  return e.fitting;
}

void check_map(const qla_tensor& t, const char* name) {
  if (numel(t) == 0) return;
  const char* obstacle = token_map_obstacle(map_shape(t));
  QLA_SUPPORTED(
      *obstacle == '\0', name,
      ": expected what tensor copies can address (base and strides multiples of 16 bytes, strides positive), got strides ",
      stride_string(t), ": ", obstacle, "; pass a contiguous copy");
}

TokenView token_view(const qla_tensor& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }
chunk_export::Output output_view(const qla_tensor& t) {
  chunk_export::Output out{};
  out.data = t.data;
  for (int i = 0; i < 4; i++) out.stride[i] = i < t.ndim ? t.stride[i] : 1;
  return out;
}

void validate_values(const qla_gdn_forward_args& args, const Problem& p, cudaStream_t stream) {
  if (p.varlen) check_boundaries_in_memory(args.cu_seqlens, p.tokens, stream);
  if (present(args.state_indices)) {
    std::vector<char> bytes = host_copy(args.state_indices, stream);
    qla_tensor host = args.state_indices;
    host.data = bytes.data();
    check_state_indices(host, args.initial_state.shape[0]);
  }
}

// What the launches of one range of chunks share.
struct Run {
  const qla_gdn_forward_args& args;
  const Problem& p;
  const Device& device;
  const ForwardPlan& plan;
  ForwardBuffers b;
  cudaStream_t stream;
  int64_t first_slot = 0, slots = 0;
  int parity = 0;  // of the carried states
};

// Whether cut_few runs beside the intra-chunk stage, on sums that it makes meanwhile. (In the fused form they are there before.)
bool cuts_beside(const Run& r) {
  const ForwardCounts& counts = r.plan.counts;
  return counts.cut && !counts.fused && r.p.total_tokens() > 0 &&
         segments::few_cut(r.p.num_seqs, counts.units, r.slots, r.p.num_v_heads);
}

segments::Args plan_args(const Run& r) {
  segments::Args a = cuda::plan_args(r.args, r.p, r.plan.choice.value_splits);
  a.slots = int32_t(r.slots);
  a.first_slot = int32_t(r.first_slot);
  a.checkpoint_every_chunks = int32_t(r.args.checkpoint_every_n_tokens / kChunk);
  a.header = r.b.header;
  a.items = r.b.items;
  a.chunk_table = r.b.chunk_table;
  if (cuts_beside(r)) a.sums = r.b.saved.decay, a.longest_whole = r.plan.choice.rule.longest_whole();
  a.balanced_shares = int32_t(r.plan.counts.balanced_shares);
  a.fused_ctas = int32_t(std::min<int64_t>(r.plan.counts.items, r.device.multiprocessors));
  a.part_flags = r.b.part_flags;
  if (r.plan.counts.uncut_items) {
    a.v_parts = r.plan.choice.fused ? 1 : r.plan.choice.uncut_splits;
    a.header = r.b.uncut_header;
    a.items = r.b.uncut_items;
  }
  if (r.plan.counts.both) {
    a.fused_chunks = r.plan.choice.fused_chunks;
    a.fused_header = r.b.fused_header;
    a.fused_items = r.b.fused_items;
    a.ranges = int32_t(r.plan.counts.ranges);
    a.range_slots = int32_t(r.plan.counts.range_slots);
    a.range_items = r.plan.counts.items;
  }
  return a;
}

intra::Args intra_args(const Run& r) {
  const qla_gdn_forward_args& args = r.args;
  intra::Args a = cuda::intra_args(args, r.p, r.slots, r.device);
  a.chunk_table = r.b.chunk_table;
  a.plan = plan_args(r);
  a.asks = r.plan.counts.both;
  a.abar = r.b.saved.abar;
  a.pg = r.b.pg;
  a.vec = r.b.saved.vec;
  if (present(args.saved) || r.plan.counts.cut) a.decay = r.b.saved.decay;
  a.vec_backward = present(args.saved) || present(args.g_cumsum) || present(args.q_rnorm) || present(args.k_rnorm);
  return a;
}

segments::CutArgs cut_args(const Run& r) {
  const ForwardBuffers& b = r.b;
  const ForwardCounts& counts = r.plan.counts;
  segments::CutArgs a{};
  a.plan = plan_args(r);
  if (counts.uncut_items) {
    a.uncut_header = a.plan.header;
    a.plan.header = b.header;
    a.plan.items = b.items;
    a.plan.v_parts = r.plan.choice.value_splits;
  }
  a.rule = r.plan.choice.rule;
  a.decay = b.saved.decay;
  a.beside = cuts_beside(r);
  a.need_bases = present(r.args.h) || present(r.args.state_checkpoints);
  a.most_states = int32_t(counts.end_states);
  a.most_units = int32_t(counts.units);
  a.most_items = int32_t(counts.items / r.plan.choice.value_splits);
  a.units = b.units;
  a.pre_v_parts = int32_t(counts.pre_v_parts);
  a.pre_header = b.pre_header;
  a.pre_items = b.pre_items;
  a.chains = b.chains;
  a.transitions = b.transitions;
  a.heads = b.heads;
  a.until = b.until;
  return a;
}

// Whether the fused form leaves Abar and whole records, for backward or for outputs made of them.
bool fused_keeps(const Run& r) { return present(r.args.saved) || r.plan.counts.keeps; }
// .. of the heads that merge alone
intra::Args merging_args(const Run& r) {
  intra::Args a = intra_args(r);
  a.parts = a.group, a.per = 1;  // few of a group's heads have anything to do
  a.pg = nullptr;
  a.decay = nullptr;
  a.vec_backward = false;
  a.until = r.b.until;
  a.plan.header = r.b.pre_header;  // nothing cut: leaves at once
  a.asks = true;
  return a;
}

gates::Args gates_args(const Run& r) {
  gates::Args a{};
  a.tokens = r.p.tokens;
  a.varlen = r.p.varlen;
  a.num_v_heads = int32_t(r.p.num_v_heads);
  a.flags = r.args.flags;
  a.scale = float(r.p.scale);
  a.g = gate_view(r.args.g);
  a.beta = gate_view(r.args.beta);
  a.a_log = head_view(r.args.A_log);
  a.dt_bias = head_view(r.args.dt_bias);
  a.saves = fused_keeps(r);
  a.vec = a.saves ? r.b.saved.vec : r.b.gates;
  a.decay = a.saves || r.plan.counts.cut ? r.b.saved.decay : nullptr;
  return a;
}

void make_fused(ForwardParams& f, const Run& r) {
  f.fused = true;
  f.cut = r.plan.counts.cut;
  if (f.cut) f.heads = r.b.heads, f.cut_header = r.b.pre_header;
  if (fused_keeps(r)) {
    f.saved_abar = r.b.saved.abar;
    f.vec = f.saved_vec = r.b.saved.vec;
  } else {
    f.vec = r.b.gates;
  }
  f.scale = float(r.p.scale);
  f.normalise = r.args.flags & QLA_FLAG_QK_L2NORM;
}
ForwardParams forward_params(const Run& r) {
  const qla_gdn_forward_args& args = r.args;
  const Problem& p = r.p;
  const ForwardBuffers& b = r.b;
  ForwardParams f;
  f.dtype = p.dtype;
  f.batch = p.batch;
  f.tokens = p.tokens;
  f.num_k_heads = int32_t(p.num_k_heads);
  f.num_v_heads = int32_t(p.num_v_heads);
  f.q = token_view(args.q);
  f.k = token_view(args.k);
  f.v = token_view(args.v);
  f.o = token_view(args.o);
  f.plan = b.header;
  f.items = b.items;
  f.max_items = int32_t(r.plan.counts.items);
  f.v_parts = r.plan.choice.value_splits;
  f.rehearse = f.v_parts == 1;  // one state warpgroup fetches fast enough: 2 us lost
  f.abar = b.saved.abar;
  f.pg = b.pg;
  f.vec = b.saved.vec;
  f.initial_state = state_view(args.initial_state, args.flags);
  f.num_states = present(args.initial_state) ? args.initial_state.shape[0] : 0;
  f.final_state = state_view(present(args.state_indices) ? args.initial_state : args.final_state, args.flags);
  f.checkpoints = state_view(args.state_checkpoints, args.flags);
  f.h = state_view(args.h, args.flags);
  f.state_indices = args.state_indices.data;
  f.state_indices_dtype = args.state_indices.dtype;
  f.has_initial_state = static_cast<const uint8_t*>(args.has_initial_state.data);
  f.checkpoint_every_chunks = int32_t(args.checkpoint_every_n_tokens / kChunk);
  f.merged = b.states;
  f.carry_in = b.carry[r.parity];
  f.carry_out = b.carry[1 - r.parity];
  f.shares = int32_t(r.plan.counts.balanced_shares);
  f.part_flags = b.part_flags;
  f.carries_all = f.asks = r.plan.counts.both;
  if (r.plan.choice.fused) make_fused(f, r);
  f.dependent = true;
  return f;
}
// .. of the fused form where the call has both
ForwardParams fused_params(const ForwardParams& main, const Run& r) {
  ForwardParams f = main;
  make_fused(f, r);
  f.plan = r.b.fused_header;
  f.items = r.b.fused_items;
  f.max_items = int32_t(r.p.num_seqs * r.p.num_v_heads);
  f.v_parts = 1;
  f.carry_in = f.carry_out = nullptr;
  return f;
}
// .. of a packing in which nothing was cut, where that has a list of its own. Right behind cut_items: what only a cut needs can
// leave while it runs, and it leaves itself where something is cut. In the fused form it comes last: it takes the heads, too,
// whose cut the main pass distrusts, and waits for its word.
ForwardParams uncut_params(const ForwardParams& main, const Run& r) {
  ForwardParams f = main;
  f.plan = r.b.uncut_header;
  f.items = r.b.uncut_items;
  f.max_items = int32_t(r.plan.counts.uncut_items);
  if (f.fused) {
    f.again = true;
    f.asks = f.merging = false;
    return f;
  }
  f.v_parts = r.plan.choice.uncut_splits;
  f.rehearse = f.v_parts == 1;
  f.uncut = true;
  f.any_cut = &r.b.pre_header->cut;
  return f;
}
// S_ext and M of the segments whose successor is merged
ForwardParams pre_pass_params(const ForwardParams& main, const ForwardBuffers& b, const ForwardCounts& counts) {
  ForwardParams f = main;
  f.fused = f.cut = f.normalise = false;
  f.vec = b.saved.vec;
  f.output = false;
  f.plan = b.pre_header;
  f.items = b.pre_items;
  f.max_items = int32_t(2 * counts.end_states * counts.pre_v_parts);
  f.v_parts = int32_t(counts.pre_v_parts);
  f.rehearse = true;  // there is time for it before the cut is known
  f.asks = true;      // .. and what cut_items says at once is there before this kernel begins
  f.pg = nullptr;
  f.final_state = f.checkpoints = f.h = {};
  f.merged = nullptr;
  f.carry_out = nullptr;
  f.end_states = b.states;
  return f;
}

// a_gated, g_cumsum, norms, and the ungated A: between the intra-chunk stage and the recurrence, or behind the fused form
void export_outputs(const Run& r) {
  const qla_gdn_forward_args& args = r.args;
  const Problem& p = r.p;
  chunk_export::Args e{};
  e.header = r.b.header;
  e.chunk_table = r.b.chunk_table;
  e.tokens = p.tokens;
  e.total_tokens = p.total_tokens();
  e.slots = int32_t(r.slots);
  e.varlen = p.varlen;
  e.num_k_heads = int32_t(p.num_k_heads);
  e.num_v_heads = int32_t(p.num_v_heads);
  e.abar = r.b.saved.abar;
  e.vec = r.b.saved.vec;
  e.a_gated = output_view(args.a_gated);
  e.g_cumsum = output_view(args.g_cumsum);
  e.q_rnorm = output_view(args.q_rnorm);
  e.k_rnorm = output_view(args.k_rnorm);
  check_cuda(chunk_export::launch(e, r.device.multiprocessors, true, r.stream), "chunk_export");
}
void export_ungated(const Run& r, const CUtensorMap& map_k) {
  intra::Args a = intra_args(r);
  a.decay = nullptr;  // the gated stage's, which the cuts are still to read: this one has no gates to sum
  a.a_inv = r.args.a_inv.data;
  for (int i = 0; i < 4; i++) a.a_inv_stride[i] = r.args.a_inv.stride[i];
  check_cuda(intra::launch_ungated(r.p.dtype, map_k, a, r.device.multiprocessors, true, r.stream), "chunk_intra");
  check_cuda(chunk_export::launch_zero_padding(r.b.header, output_view(r.args.a_inv), r.p.total_tokens(),
                                               int32_t(r.p.num_v_heads), r.stream),
             "zero_padding");
}
void make_outputs(const Run& r, const CUtensorMap& map_k) {
  if (exports_intra(r.args)) export_outputs(r);
  if (present(r.args.a_inv)) export_ungated(r, map_k);
}

// Whether chunk_intra makes the tables: one launch less for small calls, where launches are what they cost.
bool plans_inside(const Run& r) {
  const ForwardCounts& counts = r.plan.counts;
  return !cuts_beside(r) && !counts.fused && !counts.both && counts.ranges == 1 && r.p.total_tokens() > 0 &&
         direct_plan(r.p, std::max<int64_t>(counts.v_parts, r.plan.choice.uncut_splits), r.device);
}

// Whether a fused call needs nothing from a kernel before it (plan::direct_launch). The gate vectors are made by the item's own
// CTA before its first chunk: not of long sequences, whose vectors the whole card makes sooner.
bool direct_fused(const Run& r) {
  const int64_t seqs = r.p.num_seqs, heads = r.p.num_v_heads;
  return r.plan.choice.fused && !r.plan.counts.cut && !r.plan.counts.balanced_shares && !outputs_of_intra(r.args) &&
         seqs * heads > 0 && r.p.total_tokens() > 0 &&
         plan::direct_launch(seqs, heads, r.p.chunk_slots(), r.device.multiprocessors);
}

// plan -> intra-chunk stage -> (cuts, pre-pass, merges) -> recurrence over one range of chunks
void run_range(const Run& r) {
  const ForwardCounts& counts = r.plan.counts;
  const int multiprocessors = r.device.multiprocessors;
  if (direct_fused(r)) {
    ForwardParams params = forward_params(r);
    launch_forward_direct(params, plan_args(r), gates_args(r), r.device.multiprocessors, r.stream);
    return;
  }
  const bool inside = plans_inside(r);
  bool rehearses = false;                                              // cut_few, beside chunk_intra
  const bool waits = !counts.cut && !counts.both && r.p.num_seqs > 1;  // each kernel, ahead of its first look at memory
  // Items of an uncut run; where something is cut they are written anew when the gates are known.
  if (counts.balanced_shares)
    check_cuda(segments::launch_balanced(plan_args(r), gates_args(r), r.stream, waits), "plan_balanced_and_gates");
  else if (counts.fused)
    check_cuda(segments::launch_with_gates(plan_args(r), gates_args(r), multiprocessors, r.stream, waits), "plan_and_gates");
  else if (!inside && !counts.both)
    check_cuda(segments::launch(plan_args(r), multiprocessors, r.stream, waits), "plan_segments");
  if (r.p.total_tokens() > 0 && !r.plan.choice.fused) {
    const bool bf16 = r.p.dtype == QLA_BFLOAT16;
    const CUtensorMap map_k = make_token_map(map_shape(r.args.k), bf16, "k"),
                      map_q = make_token_map(map_shape(r.args.q), bf16, "q");
    intra::Args intra = intra_args(r);
    intra.makes_plan = inside;
    intra.direct = !inside && r.p.num_seqs == 1 && counts.ranges == 1;
    intra.ahead = cuts_beside(r) && r.p.num_seqs > 1 && counts.ranges == 1;  // plan_few is launched in stream order
    rehearses = intra::grid_of(intra, multiprocessors).rehearses;
    check_cuda(intra::launch(r.p.dtype, map_k, map_q, intra, multiprocessors, !inside || waits, r.stream), "chunk_intra");
    make_outputs(r, map_k);
  }
  ForwardParams params = forward_params(r);
  if (counts.cut) {
    segments::CutArgs cut = cut_args(r);
    cut.rehearses = rehearses;
    check_cuda(segments::launch_cut(cut, r.stream), "cut_items");
    if (!counts.fused && counts.uncut_items > 0) launch_forward(uncut_params(params, r), multiprocessors, r.stream);
    if (counts.fused && r.p.total_tokens() > 0) {  // all that the pre-pass needs and the main pass makes for itself
      const CUtensorMap map_k = make_token_map(map_shape(r.args.k), r.p.dtype == QLA_BFLOAT16, "k");
      check_cuda(intra::launch(r.p.dtype, map_k, map_k, merging_args(r), multiprocessors, true, r.stream), "chunk_intra");
    }
    if (counts.end_states > 0) {
      launch_forward(pre_pass_params(params, r.b, counts), multiprocessors, r.stream);
      const bool lets_begin = !r.plan.choice.fused;  // and nothing is cut: the main pass leaves, or waits for itself
      const cp_merge::Args merge{r.b.pre_header,
                                 r.b.chains,
                                 r.b.transitions,
                                 r.b.states,
                                 reinterpret_cast<const uint8_t*>(r.b.states + counts.end_states * kStateFloats),
                                 lets_begin};
      check_cuda(cp_merge::launch(merge, std::min(counts.end_states, r.p.num_seqs * r.p.num_v_heads), multiprocessors, r.stream),
                 "cp_merge");
      params.merging = true;
      if (lets_begin && counts.uncut_items == 0) params.any_cut = &r.b.pre_header->cut;
    }
  }
  params.asks |= counts.uncut_items > 0;
  launch_forward(params, multiprocessors, r.stream);
  if (counts.fused && counts.uncut_items > 0) launch_forward(uncut_params(params, r), multiprocessors, r.stream);
  if (r.plan.choice.fused && outputs_of_intra(r.args) && r.p.total_tokens() > 0)
    make_outputs(r, make_token_map(map_shape(r.args.k), r.p.dtype == QLA_BFLOAT16, "k"));
}

// Both forms: one plan for all that follows, then the fused form. It comes first because what follows can leave while it runs:
// whoever has nothing to do needs no more than its header and a free place. r: of all slots.
void run_plan_and_fused(const Run& r) {
  check_cuda(segments::launch_with_gates(plan_args(r), gates_args(r), r.device.multiprocessors, r.stream), "plan_and_gates");
  launch_forward(fused_params(forward_params(r), r), r.device.multiprocessors, r.stream);
}

}  // namespace

void forward_check(const qla_gdn_forward_args& args, const Problem& p) {
  const Device& device = device_of(args.device);
  QLA_SUPPORTED(device.served(), "device ", args.device, ": expected compute capability 9.0, got ", device.major, ".",
                device.minor, "; use CPU tensors or a Hopper GPU");
  check_served(p);
  check_map(args.q, "q");
  check_map(args.k, "k");
  check_map(args.v, "v");
  check_map(args.o, "o");
  QLA_SUPPORTED(p.chunk_slots() < kMostSlots && p.tokens <= INT32_MAX,
                "q: expected fewer than 2^31 tokens a row and chunks in all, got ", p.total_tokens(), " tokens; split the call");
  QLA_SUPPORTED(p.num_seqs * p.num_v_heads < kMostSlots / 2, "cu_seqlens: expected sequences times value heads below 2^30, got ",
                p.num_seqs * p.num_v_heads, "; split the call");
}

void forward_workspace(const qla_gdn_forward_args& args, const Problem& p, size_t* least, size_t* best) {
  const PlanMemo::Entry& e = planned(args, p, device_of(args.device));
  *least = e.least;
  *best = e.whole.best.bytes;
}

size_t forward_saved(const Problem& p) { return lay_out_saved(nullptr, p).bytes; }

void forward(const qla_gdn_forward_args& args, const Problem& p) {
  forward_check(args, p);
  const Device& device = device_of(args.device);
  const CurrentDevice current(args.device);
  prepare_kernels(device);
  const auto stream = static_cast<cudaStream_t>(args.stream);
  if (p.validate_values) validate_values(args, p, stream);
  if (p.num_v_heads == 0) return;
  const ForwardPlan plan = plan_for(args, p, device);
  const bool saves = present(args.saved);
  Run r{args, p, device, plan, lay_out_forward(args.workspace, p, plan.counts, saves), stream};
  const Saved saved = lay_out_saved(args.saved.data, p);
  if (plan.counts.both) {
    if (saves) r.b.saved = saved;
    r.slots = p.chunk_slots();
    run_plan_and_fused(r);
  }
  for (int64_t range = 0; range < plan.counts.ranges; range++, r.parity ^= 1) {
    r.first_slot = range * plan.counts.range_slots;
    r.slots = std::min(plan.counts.range_slots, p.chunk_slots() - r.first_slot);
    if (saves) {
      r.b.saved.abar = saved.abar + r.first_slot * p.num_v_heads * kTileBytes;
      r.b.saved.vec = saved.vec + r.first_slot * p.num_v_heads * kVecFloats;
      r.b.saved.decay = saved.decay + r.first_slot * p.num_v_heads;
    }
    if (plan.counts.both) r.slots = plan.counts.range_slots;  // each has its tables, which count from 0
    run_range(r);
    if (plan.counts.both) r.b.header++, r.b.items += plan.counts.items, r.b.chunk_table += plan.counts.range_slots;
  }
}

}  // namespace qla::cuda
