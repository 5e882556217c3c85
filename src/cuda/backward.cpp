// The CUDA backward: plan -> intra-chunk stage, unless forward kept what it makes -> for each range of chunks from the last to
// the first: state and reverse pass in one launch, then the chunks' gradients. One range where the workspace has room for every
// chunk's snapshots; else a pass ahead leaves the states at the ranges' starts. With one range, sequences may be cut into
// segments: then items from the gates -> passes that need no merge -> merges -> passes from merged states. Nothing here
// allocates, synchronises or asks the device anything; the first call on a device loads the kernels (qla_prepare does it ahead).
#include <algorithm>
#include <vector>

#include "core/backend.hpp"
#include "core/status.hpp"
#include "core/tensor_view.hpp"
#include "core/values.hpp"
#include "cuda/backward_workspace.hpp"
#include "cuda/capabilities.hpp"
#include "cuda/device.hpp"
#include "cuda/kernels/backward_passes/launch.hpp"
#include "cuda/kernels/backward_rows/launch.hpp"
#include "cuda/kernels/chunk_grads/launch.hpp"
#include "cuda/kernels/chunk_intra/launch.hpp"
#include "cuda/kernels/pass_merge/launch.hpp"
#include "cuda/kernels/plan_segments/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "cuda/views.hpp"

namespace qla::cuda {
namespace {

// a [B, T, heads, 128] tensor of our own
TokenMapShape own_shape(const void* data, const Problem& p) {
  TokenMapShape s;
  s.data = data;
  s.batch = p.batch;
  s.tokens = p.tokens;
  s.heads = p.num_v_heads;
  s.stride_h = 128;
  s.stride_t = p.num_v_heads * 128;
  s.stride_b = p.tokens * s.stride_t;
  return s;
}

bool expanded(const qla_tensor& t) {
  for (int i = 0; i < 3; i++)
    if (t.shape[i] > 1 && t.stride[i] <= 0) return true;
  return false;
}
// The queries look at strides alone: their caller may not have allocated anything yet (decision 0002). The run looks at base
// addresses, too.
enum class Look { Strides, Addresses };
const char* obstacle_of(const qla_tensor& t, Look look) {
  if (expanded(t)) return "a stride is not positive";
  TokenMapShape shape = map_shape(t);
  if (look == Look::Strides) shape.data = nullptr;
  return token_map_obstacle(shape);
}
// whether tensor copies can move this tensor as elements of q's type
bool addressable(const qla_tensor& t, const Problem& p, Look look) {
  return present(t) && t.dtype == p.dtype && last_contiguous(t) && *obstacle_of(t, look) == '\0';
}
void check_map(const qla_tensor& t, const char* name, Look look) {
  if (numel(t) == 0) return;
  const char* obstacle = obstacle_of(t, look);
  QLA_SUPPORTED(
      *obstacle == '\0', name,
      ": expected what tensor copies can address (base and strides multiples of 16 bytes, strides positive), got strides ",
      stride_string(t), ": ", obstacle, "; pass a contiguous copy");
}
void check_maps(const qla_gdn_backward_args& args, Look look) {
  check_map(args.q, "q", look);
  check_map(args.k, "k", look);
  check_map(args.v, "v", look);
}

bool wants_chunk_gradients(const qla_gdn_backward_args& a) {
  return present(a.dq) || present(a.dk) || present(a.dg) || present(a.dbeta) || present(a.dA_log) || present(a.ddt_bias);
}
BackwardNeeds needs_of(const qla_gdn_backward_args& args, const Problem& p, Look look) {
  BackwardNeeds n;
  n.copy_d_o = !addressable(args.d_o, p, look);
  n.scratch_dv = !addressable(args.dv, p, look);
  n.gate_partials = present(args.dA_log) || present(args.ddt_bias);
  if (present(args.saved)) n.saved = args.saved.data;
  return n;
}

chunk_grads::InputView input_view(const intra::View& v) {
  chunk_grads::InputView r;
  r.data = v.data;
  r.dtype = v.dtype;
  r.stride_b = v.stride[0];
  r.stride_t = v.stride[1];
  r.stride_h = v.stride[2];
  return r;
}
chunk_grads::GradView grad_view(const qla_tensor& t) {
  chunk_grads::GradView v;
  if (!present(t)) return v;
  v.data = t.data;
  v.dtype = t.dtype;
  v.vector = t.ndim == 4 && last_contiguous(t) && aligned_rows(t, 16);
  v.stride_b = t.stride[0];
  v.stride_t = t.stride[1];
  v.stride_h = t.stride[2];
  return v;
}
backward_rows::View rows_view(const qla_tensor& t) {
  backward_rows::View v;
  if (!present(t)) return v;
  v.data = t.data;
  v.dtype = t.dtype;
  v.heads = int32_t(t.shape[2]);
  v.width = t.ndim == 4 ? int32_t(t.shape[3]) : 1;
  for (int i = 0; i < 4; i++) v.stride[i] = i < t.ndim ? t.stride[i] : 1;
  return v;
}
backward_rows::View per_head_view(const qla_tensor& t) {
  backward_rows::View v;
  if (!present(t)) return v;
  v.data = t.data;
  v.dtype = t.dtype;
  v.stride[2] = t.stride[0];
  return v;
}
backward_rows::View own_view(void* data, const Problem& p) {
  backward_rows::View v;
  v.data = data;
  v.dtype = p.dtype;
  v.heads = int32_t(p.num_v_heads);
  v.width = 128;
  v.stride[2] = 128;
  v.stride[1] = p.num_v_heads * 128;
  v.stride[0] = p.tokens * v.stride[1];
  return v;
}
segments::Args plan_args(const qla_gdn_backward_args& args, const Problem& p, const BackwardBuffers& b) {
  segments::Args a = cuda::plan_args(args, p, 1);
  a.header = b.header;
  a.items = b.items;
  a.chunk_table = b.chunk_table;
  return a;
}

intra::Args intra_args(const qla_gdn_backward_args& args, const Problem& p, const BackwardBuffers& b, const Device& device,
                       bool cut) {
  intra::Args a = cuda::intra_args(args, p, p.chunk_slots(), device);
  a.chunk_table = b.chunk_table;
  a.abar = b.saved.abar;
  a.vec = b.saved.vec;
  a.vec_backward = 1;
  if (cut) a.decay = b.saved.decay;
  return a;
}

BackwardCut make_cut(const qla_gdn_backward_args& args, const Problem& p, const Device& device) {
  const plan::Shape shape = plan::shape_of(args, p);
  return cut_of(shape, plan::choose_backward(plan::device_costs(device.multiprocessors, device.major), shape,
                                             plan::make_policy(args, p.dtype)));
}

// Everything the launches of one call share.
struct Run {
  const qla_gdn_backward_args& args;
  const Problem& p;
  const Device& device;
  const BackwardBuffers& b;
  int64_t range_slots;
  BackwardCut cut;
  cudaStream_t stream;
  bool bf16;
  CUtensorMap k{}, q{}, v{}, d_o{}, dv{}, dq{}, dk{};
  TokenMapShape dv_shape{};
};

void copy_d_o(const Run& r) {
  backward_rows::CopyArgs c{};
  c.from = rows_view(r.args.d_o);
  c.to = own_view(r.b.d_o, r.p);
  c.batch = r.p.batch;
  c.tokens = r.p.tokens;
  check_cuda(backward_rows::launch_copy(c, r.stream), "copy_rows");
}

void make_maps(Run& r, const BackwardNeeds& needs) {
  r.k = make_token_map(map_shape(r.args.k), r.bf16, "k");
  r.q = make_token_map(map_shape(r.args.q), r.bf16, "q");
  r.v = make_token_map(map_shape(r.args.v), r.bf16, "v");
  r.d_o = make_token_map(needs.copy_d_o ? own_shape(r.b.d_o, r.p) : map_shape(r.args.d_o), r.bf16, "d_o");
  r.dv_shape = needs.scratch_dv ? own_shape(r.b.dv, r.p) : map_shape(r.args.dv);
  r.dv = make_token_map(r.dv_shape, r.bf16, "dv");
  if (addressable(r.args.dq, r.p, Look::Addresses)) r.dq = make_token_map(map_shape(r.args.dq), r.bf16, "dq");
  if (addressable(r.args.dk, r.p, Look::Addresses)) r.dk = make_token_map(map_shape(r.args.dk), r.bf16, "dk");
}

backward_passes::Params pass_params(const Run& r, int64_t first, int64_t end) {
  backward_passes::Params a{};
  a.items = r.b.items;
  a.num_items = int32_t(r.p.num_seqs * r.p.num_v_heads);
  a.first_slot = int32_t(first);
  a.end_slot = int32_t(end);
  a.num_k_heads = int32_t(r.p.num_k_heads);
  a.num_v_heads = int32_t(r.p.num_v_heads);
  a.rows_per_batch = int32_t(std::max<int64_t>(1, r.p.tokens));
  a.boundary_slots = int32_t(r.range_slots);
  a.scale = float(r.p.scale);
  a.mask_dh0 = present(r.args.has_initial_state);
  a.abar = r.b.saved.abar;
  a.vec = r.b.saved.vec;
  a.state = r.b.state;
  a.d_state = r.b.d_state;
  a.delta = r.b.delta;
  a.dv = const_cast<void*>(r.dv_shape.data);
  a.dv_stride_b = r.dv_shape.stride_b;
  a.dv_stride_t = r.dv_shape.stride_t;
  a.dv_stride_h = r.dv_shape.stride_h;
  a.h0 = state_view(r.args.initial_state, r.args.flags);
  a.dht = state_view(r.args.d_final_state, r.args.flags);
  a.dh0 = state_view(r.args.d_initial_state, r.args.flags);
  a.boundary = r.b.boundary;
  return a;
}
void launch_passes(const Run& r, const backward_passes::Params& a) {
  check_cuda(backward_passes::launch(r.k, r.q, r.v, r.d_o, r.dv, a, r.p.dtype, r.stream), "backward_passes");
}
void run_passes(const Run& r, int64_t first, int64_t end, int kinds, int parity) {
  backward_passes::Params a = pass_params(r, first, end);
  a.kinds = kinds;
  a.carry_in = r.b.carry[parity];
  a.carry_out = r.b.carry[1 - parity];
  launch_passes(r, a);
}

void run_cut_passes(const Run& r) {
  const int64_t states = r.cut.end_states * kStateFloats;
  segments::PassCutArgs c{};
  c.plan = plan_args(r.args, r.p, r.b);
  c.rule = r.cut.rule;
  c.decay = r.b.saved.decay;
  c.early = present(r.args.saved);
  c.has_final = present(r.args.d_final_state);
  c.wants_dh0 = present(r.args.d_initial_state);
  c.most_states = int32_t(r.cut.end_states);
  c.most_units = int32_t(r.cut.units);
  c.most_first = int32_t(r.cut.first());
  c.most_second = int32_t(r.cut.second());
  c.units = r.b.cut_units;
  c.counts = r.b.counts;
  c.first = r.b.first;
  c.second = r.b.second;
  c.chains = r.b.chains;
  check_cuda(segments::launch_cut_passes(c, r.stream), "cut_passes");
  backward_passes::Params a = pass_params(r, 0, r.p.chunk_slots());
  a.boundary = r.b.cut_states;
  a.most_states = c.most_states;
  a.carry_out = r.b.cut_states + 3 * states;
  a.carry_in = a.carry_out;
  a.cut_items = r.b.first;
  a.num_cut_items = &r.b.counts->first;
  a.num_items = c.most_first;
  launch_passes(r, a);
  if (states == 0) return;  // no sequence can be long enough for a cut
  const pass_merge::Args merge{
      r.b.counts, r.b.chains, {r.b.cut_states, a.carry_out}, {r.b.cut_states + states, r.b.cut_states + 2 * states}};
  check_cuda(pass_merge::launch(merge, std::min(2 * r.cut.end_states, 2 * r.p.num_seqs * r.p.num_v_heads),
                                r.device.multiprocessors, r.stream),
             "pass_merge");
  a.cut_items = r.b.second;
  a.num_cut_items = &r.b.counts->second;
  a.num_items = c.most_second;
  launch_passes(r, a);
}

backward_rows::PaddingArgs padding_args(const Run& r) {
  const qla_tensor* gradients[backward_rows::kMostViews] = {&r.args.dq, &r.args.dk, &r.args.dv, &r.args.dg, &r.args.dbeta};
  backward_rows::PaddingArgs a{};
  a.header = r.b.header;
  a.tokens = r.p.tokens;
  for (int i = 0; i < backward_rows::kMostViews; i++) a.views[i] = rows_view(*gradients[i]);
  return a;
}

// whether dV is copied to the caller's at the end, padding and all
bool copies_dv(const Run& r, const BackwardNeeds& needs) { return needs.scratch_dv && present(r.args.dv); }
// .. and whether chunk_grads, in its last launch, zeroes the padding: a launch less. Without a chunk it is not launched.
bool pads_inside(const Run& r, const BackwardNeeds& needs) {
  return r.p.varlen && r.p.chunk_slots() > 0 && wants_chunk_gradients(r.args) && !copies_dv(r, needs);
}

void run_chunk_grads(const Run& r, int64_t first, int64_t end, bool pad) {
  const uint32_t flags = r.args.flags;
  chunk_grads::Params a{};
  a.chunks = r.b.chunk_table;
  a.vec = r.b.saved.vec;
  a.state = r.b.state;
  a.d_state = r.b.d_state;
  a.delta = r.b.delta;
  a.first_slot = int32_t(first);
  a.num_slots = int32_t(end - first);
  a.num_k_heads = int32_t(r.p.num_k_heads);
  a.group = int32_t(r.p.group());
  a.rows_per_batch = a.tokens = int32_t(r.p.tokens);
  a.qk_norm = (flags & QLA_FLAG_QK_L2NORM) != 0;
  a.scale = float(r.p.scale);
  a.dq = grad_view(r.args.dq);
  a.dk = grad_view(r.args.dk);
  a.dq.bulk = addressable(r.args.dq, r.p, Look::Addresses);
  a.dk.bulk = addressable(r.args.dk, r.p, Look::Addresses);
  a.dg = grad_view(r.args.dg);
  a.dbeta = grad_view(r.args.dbeta);
  if (flags & QLA_FLAG_RAW_GATE) {
    a.raw_gate = input_view(gate_view(r.args.g));
    a.a_log = input_view(head_view(r.args.A_log));
    a.dt_bias = input_view(head_view(r.args.dt_bias));
  }
  if (flags & QLA_FLAG_BETA_SIGMOID) a.beta_logits = input_view(gate_view(r.args.beta));
  a.beta_max = flags & QLA_FLAG_NEG_EIGVAL ? 2.f : 1.f;
  a.gate_partials = r.b.gate_partials;
  if (pad) a.padding = padding_args(r);
  check_cuda(chunk_grads::launch(r.k, r.q, r.d_o, r.dv, r.dq, r.dk, a, r.p.dtype, r.device.multiprocessors, r.stream),
             "chunk_grads");
}

void finish(const Run& r, const BackwardNeeds& needs) {
  if (copies_dv(r, needs)) {
    backward_rows::CopyArgs c{};
    c.from = own_view(r.b.dv, r.p);
    c.to = rows_view(r.args.dv);
    c.batch = r.p.batch;
    c.tokens = r.p.tokens;
    check_cuda(backward_rows::launch_copy(c, r.stream), "copy_rows");
  }
  if (r.p.varlen && !pads_inside(r, needs))
    check_cuda(backward_rows::launch_padding(padding_args(r), r.device.multiprocessors, r.stream), "zero_padding");
}

void reduce_gate(const Run& r) {
  backward_rows::ReduceArgs a{};
  a.partials = r.b.gate_partials;
  a.chunks = r.b.chunk_table;
  a.slots = int32_t(r.p.chunk_slots());
  a.num_v_heads = int32_t(r.p.num_v_heads);
  a.d_a_log = per_head_view(r.args.dA_log);
  a.d_dt_bias = per_head_view(r.args.ddt_bias);
  check_cuda(backward_rows::launch_reduce(a, r.stream), "reduce_gate");
}

}  // namespace

void backward_check(const qla_gdn_backward_args& args, const Problem& p) {
  const Device& device = device_of(args.device);
  QLA_SUPPORTED(device.served(), "device ", args.device, ": expected compute capability 9.0, got ", device.major, ".",
                device.minor, "; use CPU tensors or a Hopper GPU");
  check_served(p);
  check_maps(args, Look::Strides);
  QLA_SUPPORTED(
      p.total_tokens() <= INT32_MAX && p.chunk_slots() * p.num_v_heads < int64_t(1) << 30 &&
          p.num_seqs * p.num_v_heads < int64_t(1) << 28,
      "q: expected fewer than 2^31 tokens, chunks times value heads below 2^30 and sequences times value heads below 2^28, got ",
      p.total_tokens(), " tokens, ", p.num_seqs, " sequences, ", p.num_v_heads, " value heads; split the call");
}

void backward_workspace(const qla_gdn_backward_args& args, const Problem& p, size_t* least, size_t* best) {
  const BackwardNeeds needs = needs_of(args, p, Look::Strides);
  *least = lay_out_backward(nullptr, p, needs, range_of(p, most_ranges(p)), {}).bytes;
  *best = lay_out_backward(nullptr, p, needs, range_of(p, 1), {}).bytes;
  *least = std::min(*least, *best);
  *best = lay_out_backward(nullptr, p, needs, range_of(p, 1), make_cut(args, p, device_of(args.device))).bytes;
}

void backward(const qla_gdn_backward_args& args, const Problem& p) {
  backward_check(args, p);
  const Device& device = device_of(args.device);
  const CurrentDevice current(args.device);
  prepare_kernels(device);
  if (p.num_v_heads == 0) return;
  check_maps(args, Look::Addresses);
  const BackwardNeeds needs = needs_of(args, p, Look::Addresses);
  const int64_t range_slots = choose_range(p, needs, args.workspace_bytes);
  QLA_CHECK(range_slots > 0, "workspace_bytes: expected what the workspace query says for these very tensors, got ",
            args.workspace_bytes, "; query with the strides and addresses of the call");
  // Cut sequences need room for what is merged, and all snapshots at once.
  BackwardCut cut = make_cut(args, p, device);
  if (lay_out_backward(nullptr, p, needs, range_of(p, 1), cut).bytes > args.workspace_bytes) cut = {};
  const BackwardBuffers b = lay_out_backward(args.workspace, p, needs, range_slots, cut);
  Run r{args, p, device, b, range_slots, cut, static_cast<cudaStream_t>(args.stream), p.dtype == QLA_BFLOAT16};

  if (p.validate_values && p.varlen) check_boundaries_in_memory(args.cu_seqlens, p.tokens, r.stream);
  const bool rows = p.total_tokens() > 0;
  const bool kept = needs.saved != nullptr;                        // by forward: there is no intra-chunk stage
  const bool inside = rows && !kept && direct_plan(p, 1, device);  // chunk_intra makes the tables
  if (!inside) check_cuda(segments::launch(plan_args(args, p, b), device.multiprocessors, r.stream), "plan_segments");
  if (rows) {
    make_maps(r, needs);
    if (!kept) {
      intra::Args intra = intra_args(args, p, b, device, cut.units > 0);
      if (inside) intra.plan = plan_args(args, p, b), intra.makes_plan = 1;
      check_cuda(intra::launch(p.dtype, r.k, r.q, intra, device.multiprocessors, !inside, r.stream), "chunk_intra");
    }
    if (needs.copy_d_o) copy_d_o(r);
  }
  const int64_t slots = p.chunk_slots(), ranges = num_ranges(p, range_slots);
  if (ranges > 1) run_passes(r, 0, slots, backward_passes::kStateOnly, 0);
  int parity = 0;
  for (int64_t range = ranges - 1; range >= 0; range--, parity ^= 1) {
    const int64_t first = range * range_slots, end = std::min(slots, first + range_slots);
    if (cut.units > 0)
      run_cut_passes(r);
    else
      run_passes(r, first, end, backward_passes::kBoth, parity);
    if (rows && wants_chunk_gradients(args)) run_chunk_grads(r, first, end, range == 0 && pads_inside(r, needs));
  }
  if (rows) finish(r, needs);
  if (needs.gate_partials) reduce_gate(r);
}

}  // namespace qla::cuda
