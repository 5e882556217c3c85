// The CUDA forward: plan -> intra-chunk stage -> recurrence, three launches chained by programmatic dependent launch. Nothing
// here allocates, synchronises or asks the device anything; the first call on a device loads the kernels (qla_prepare does it
// ahead).
#include <algorithm>
#include <vector>

#include "core/backend.hpp"
#include "core/status.hpp"
#include "core/tensor_view.hpp"
#include "core/values.hpp"
#include "cuda/capabilities.hpp"
#include "cuda/device.hpp"
#include "cuda/kernels/chunk_export/launch.hpp"
#include "cuda/kernels/chunk_intra/launch.hpp"
#include "cuda/kernels/cp_merge/launch.hpp"
#include "cuda/kernels/forward/launch.hpp"
#include "cuda/kernels/plan_segments/cut.hpp"
#include "cuda/kernels/plan_segments/launch.hpp"
#include "cuda/tensor_map.hpp"
#include "cuda/views.hpp"
#include "cuda/workspace.hpp"
#include "plan/choose.hpp"

namespace qla::cuda {
namespace {

constexpr int64_t kMostSlots = int64_t(1) << 31;

struct Plan {
  plan::Shape shape;
  plan::Choice choice;
  ForwardCounts counts;
};
Plan make_plan(const qla_gdn_forward_args& args, const Problem& p, const Device& device) {
  Plan plan;
  plan.shape = plan::shape_of(args, p);
  plan.choice = plan::choose(plan::costs_for(device.multiprocessors, device.major), plan.shape, plan::make_policy(args, p.dtype),
                             forward_capabilities(args));
  plan.counts.fused = plan.choice.fused;
  plan.counts.items = plan::most_items(plan.shape, plan.choice);
  plan.counts.v_parts = plan.choice.value_splits;
  // Few heads need the pre-pass where warm-up serves the others: then it is short of CTAs, and halves of V finish sooner.
  plan.counts.pre_v_parts = plan.choice.rule.exact ? plan.choice.value_splits : 2;
  plan.counts.cut = plan.choice.rule.segment_chunks > 0;
  plan.counts.units = plan.counts.items / plan.choice.value_splits;
  plan.counts.end_states = plan::most_end_states(plan.shape, plan.choice);
  return plan;
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
  if (p.varlen) {
    std::vector<char> bytes = host_copy(args.cu_seqlens, stream);
    qla_tensor host = args.cu_seqlens;
    host.data = bytes.data();
    check_boundaries(host, p.tokens);
  }
  if (present(args.state_indices)) {
    std::vector<char> bytes = host_copy(args.state_indices, stream);
    qla_tensor host = args.state_indices;
    host.data = bytes.data();
    check_state_indices(host, args.initial_state.shape[0]);
  }
}

segments::Args plan_args(const qla_gdn_forward_args& args, const Problem& p, const ForwardBuffers& b, const Plan& plan) {
  segments::Args a = cuda::plan_args(args, p, plan.choice.value_splits);
  a.checkpoint_every_chunks = int32_t(args.checkpoint_every_n_tokens / kChunk);
  a.header = b.header;
  a.items = b.items;
  a.chunk_table = b.chunk_table;
  return a;
}

segments::CutArgs cut_args(const qla_gdn_forward_args& args, const Problem& p, const ForwardBuffers& b, const Plan& plan,
                           const Device& device) {
  segments::CutArgs a{};
  a.plan = plan_args(args, p, b, plan);
  a.rule = plan.choice.rule;
  a.decay = b.decay;
  const int64_t intra_ctas = p.chunk_slots() * p.num_k_heads * intra_parts(p, device);
  a.rehearse = intra_ctas <= 2 * device.multiprocessors || intra_ctas > int64_t(intra::kCtasPerSm) * device.multiprocessors;
  a.need_bases = present(args.h) || present(args.state_checkpoints);
  a.most_states = int32_t(plan.counts.end_states);
  a.most_units = int32_t(plan.counts.units);
  a.units = b.units;
  a.pre_v_parts = int32_t(plan.counts.pre_v_parts);
  a.pre_header = b.pre_header;
  a.pre_items = b.pre_items;
  a.chains = b.chains;
  a.transitions = b.transitions;
  return a;
}

intra::Args intra_args(const qla_gdn_forward_args& args, const Problem& p, const ForwardBuffers& b, const Device& device) {
  intra::Args a = cuda::intra_args(args, p, device);
  a.chunk_table = b.chunk_table;
  a.abar = b.saved.abar;
  a.pg = b.pg;
  a.vec = b.saved.vec;
  a.decay = b.decay;
  a.vec_backward = present(args.saved) || present(args.g_cumsum) || present(args.q_rnorm) || present(args.k_rnorm);
  return a;
}

ForwardParams forward_params(const qla_gdn_forward_args& args, const Problem& p, const ForwardBuffers& b, const Plan& plan) {
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
  f.max_items = int32_t(plan.counts.items);
  f.v_parts = plan.choice.value_splits;
  f.abar = b.saved.abar;
  f.pg = b.pg;
  f.vec = b.saved.vec;
  f.initial_state = state_view(args.initial_state, args.flags);
  f.final_state = state_view(present(args.state_indices) ? args.initial_state : args.final_state, args.flags);
  f.checkpoints = state_view(args.state_checkpoints, args.flags);
  f.h = state_view(args.h, args.flags);
  f.state_indices = args.state_indices.data;
  f.state_indices_dtype = args.state_indices.dtype;
  f.has_initial_state = static_cast<const uint8_t*>(args.has_initial_state.data);
  f.checkpoint_every_chunks = int32_t(args.checkpoint_every_n_tokens / kChunk);
  f.merged = b.states;
  f.fused = plan.choice.fused;
  if (f.fused) {
    if (present(args.g)) f.g = gate_view(args.g);
    f.beta = gate_view(args.beta);
    if (present(args.A_log)) f.a_log = head_view(args.A_log);
    if (present(args.dt_bias)) f.dt_bias = head_view(args.dt_bias);
    f.flags = args.flags;
    f.scale = float(p.scale);
  }
  f.dependent = true;
  return f;
}
// S_ext and M of the segments whose successor is merged
ForwardParams pre_pass_params(const ForwardParams& main, const ForwardBuffers& b, const Plan& plan) {
  ForwardParams f = main;
  f.output = false;
  f.plan = b.pre_header;
  f.items = b.pre_items;
  f.max_items = int32_t(2 * plan.counts.end_states * plan.counts.pre_v_parts);
  f.v_parts = int32_t(plan.counts.pre_v_parts);
  f.pg = nullptr;
  f.final_state = f.checkpoints = f.h = {};
  f.merged = nullptr;
  f.end_states = b.states;
  return f;
}

// a_gated, g_cumsum, norms, and the ungated A: between the intra-chunk stage and the recurrence
bool wants_export(const qla_gdn_forward_args& args) {
  return present(args.a_gated) || present(args.g_cumsum) || present(args.q_rnorm) || present(args.k_rnorm);
}
void export_outputs(const qla_gdn_forward_args& args, const Problem& p, const ForwardBuffers& b, const Device& device,
                    cudaStream_t stream) {
  chunk_export::Args e{};
  e.header = b.header;
  e.chunk_table = b.chunk_table;
  e.tokens = p.tokens;
  e.total_tokens = p.total_tokens();
  e.slots = int32_t(p.chunk_slots());
  e.varlen = p.varlen;
  e.num_k_heads = int32_t(p.num_k_heads);
  e.num_v_heads = int32_t(p.num_v_heads);
  e.abar = b.saved.abar;
  e.vec = b.saved.vec;
  e.a_gated = output_view(args.a_gated);
  e.g_cumsum = output_view(args.g_cumsum);
  e.q_rnorm = output_view(args.q_rnorm);
  e.k_rnorm = output_view(args.k_rnorm);
  check_cuda(chunk_export::launch(e, device.multiprocessors, true, stream), "chunk_export");
}
void export_ungated(const qla_gdn_forward_args& args, const Problem& p, const ForwardBuffers& b, const CUtensorMap& map_k,
                    const Device& device, cudaStream_t stream) {
  intra::Args a = intra_args(args, p, b, device);
  a.a_inv = args.a_inv.data;
  for (int i = 0; i < 4; i++) a.a_inv_stride[i] = args.a_inv.stride[i];
  check_cuda(intra::launch_ungated(p.dtype, map_k, a, device.multiprocessors, true, stream), "chunk_intra");
  check_cuda(
      chunk_export::launch_zero_padding(b.header, output_view(args.a_inv), p.total_tokens(), int32_t(p.num_v_heads), stream),
      "zero_padding");
}

}  // namespace

void forward_check(const qla_gdn_forward_args& args, const Problem& p) {
  const Device& device = device_of(args.device);
  QLA_SUPPORTED(device.served(), "device ", args.device, ": expected compute capability 9.0, got ", device.major, ".",
                device.minor, "; use CPU tensors or a Hopper GPU");
  QLA_SUPPORTED(p.dtype == QLA_BFLOAT16 || p.dtype == QLA_FLOAT16, "q: expected bfloat16 or float16 on CUDA, got ",
                dtype_name(p.dtype), "; cast q, k and v, or use CPU tensors");
  QLA_SUPPORTED(p.k_dim == 128 && p.v_dim == 128, "q, v: expected head sizes K = V = 128 on CUDA, got K = ", p.k_dim,
                ", V = ", p.v_dim, "; pad the heads to 128, or use CPU tensors");
  check_map(args.q, "q");
  check_map(args.k, "k");
  check_map(args.v, "v");
  check_map(args.o, "o");
  QLA_SUPPORTED(p.chunk_slots() < kMostSlots && p.tokens <= INT32_MAX,
                "q: expected fewer than 2^31 tokens a row and chunks in all, got ", p.total_tokens(), " tokens; split the call");
  QLA_SUPPORTED(p.num_seqs * p.num_v_heads < kMostSlots / 2, "cu_seqlens: expected sequences times value heads below 2^30, got ",
                p.num_seqs * p.num_v_heads, "; split the call");
}

size_t forward_workspace(const qla_gdn_forward_args& args, const Problem& p) {
  const Device& device = device_of(args.device);
  return lay_out_forward(nullptr, p, make_plan(args, p, device).counts, args.saved.data).bytes;
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
  const Plan plan = make_plan(args, p, device);
  const ForwardBuffers b = lay_out_forward(args.workspace, p, plan.counts, args.saved.data);

  // Items of an uncut run; where something is cut they are written anew behind the intra-chunk stage, which has the gates.
  check_cuda(segments::launch(plan_args(args, p, b, plan), device.multiprocessors, stream), "plan_segments");
  if (p.total_tokens() > 0 && !plan.choice.fused) {
    const bool bf16 = p.dtype == QLA_BFLOAT16;
    const CUtensorMap map_k = make_token_map(map_shape(args.k), bf16, "k"), map_q = make_token_map(map_shape(args.q), bf16, "q");
    check_cuda(intra::launch(p.dtype, map_k, map_q, intra_args(args, p, b, device), device.multiprocessors, true, stream),
               "chunk_intra");
    if (wants_export(args)) export_outputs(args, p, b, device, stream);
    if (present(args.a_inv)) export_ungated(args, p, b, map_k, device, stream);
  }
  const ForwardParams params = forward_params(args, p, b, plan);
  if (plan.counts.cut) {
    segments::CutArgs cut = cut_args(args, p, b, plan, device);
    check_cuda(segments::launch_cut(cut, stream), "cut_items");
    if (plan.counts.end_states > 0) {
      launch_forward(pre_pass_params(params, b, plan), device.multiprocessors, stream);
      const cp_merge::Args merge{b.pre_header, b.chains, b.transitions, b.states,
                                 b.states + plan.counts.end_states * kStateFloats};
      check_cuda(
          cp_merge::launch(merge, std::min(plan.counts.end_states, p.num_seqs * p.num_v_heads), device.multiprocessors, stream),
          "cp_merge");
    }
  }
  launch_forward(params, device.multiprocessors, stream);
}

}  // namespace qla::cuda
