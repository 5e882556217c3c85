#include "cuda/kernels/forward/launch.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/status.hpp"
#include "cuda/kernels/forward/variants.hpp"
#include "cuda/kernels/forward_fused/config.hpp"
#include "cuda/kernels/forward_fused/variants.hpp"
#include "cuda/tensor_map.hpp"
#include "plan/model.hpp"

namespace qla::cuda {
namespace {
void check(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw Error(QLA_CUDA_ERROR, concat("gdn_forward: ", what, ": ", cudaGetErrorString(e)));
}
template <typename T>
void prepare_fused(const char* what) {
  for (cudaError_t e : {prepare_fused_type<T, false, false, false>(), prepare_fused_type<T, false, true, false>(),
                        prepare_fused_type<T, true, false, false>(), prepare_fused_type<T, true, true, false>(),
                        prepare_fused_type<T, false, false, true>(), prepare_fused_type<T, true, false, true>()})
    check(e, what);
}
}  // namespace

void prepare_forward() {
  check(prepare_forward_type<__nv_bfloat16>(), "attributes (bf16)");
  check(prepare_forward_type<__half>(), "attributes (fp16)");
  prepare_fused<__nv_bfloat16>("attributes (fused, bf16)");
  prepare_fused<__half>("attributes (fused, fp16)");
}

namespace {
ForwardArgs forward_args(const ForwardParams& p) {
  ForwardArgs args{};
  args.p = p;
  args.row_tokens = std::max<int64_t>(p.tokens, 1);
  if (p.batch * p.tokens == 0) return args;
  auto map = [&](const TokenView& x, int heads, const char* name, int box = 64) {
    return make_token_map({x.data, x.stride_b, x.stride_t, x.stride_h, p.batch, p.tokens, heads, box}, p.dtype == QLA_BFLOAT16,
                          name);
  };
  args.k = map(p.k, p.num_k_heads, "k");
  args.v = map(p.v, p.num_v_heads, "v");
  if (p.output) {
    args.q = map(p.q, p.num_k_heads, "q", p.fused ? 32 : 64);  // the fused form has Q's halves in places of their own
    args.o = map(p.o, p.num_v_heads, "o");
  }
  return args;
}
void check_launch(cudaError_t e, const ForwardParams& p, int grid) {
  check(e, concat("launch of ", grid, " CTAs, ", p.dtype == QLA_BFLOAT16 ? "bf16" : "fp16", p.fused ? ", fused" : "",
                  p.fused && p.cut ? ", cut" : "", p.saved_abar ? ", saving" : "", p.v_parts == 2 ? ", V split" : "",
                  p.output ? "" : ", no output")
               .c_str());
}
template <bool Norm, bool Save, bool Cut>
cudaError_t launch_fused_as(const FusedArgs& args, int grid, cudaStream_t stream) {
  return args.p.dtype == QLA_BFLOAT16 ? launch_fused_type<__nv_bfloat16, Norm, Save, Cut>(args, grid, stream)
                                      : launch_fused_type<__half, Norm, Save, Cut>(args, grid, stream);
}
template <bool Save, bool Cut>
cudaError_t launch_fused_of(const FusedArgs& args, int grid, cudaStream_t stream) {
  return args.p.normalise ? launch_fused_as<true, Save, Cut>(args, grid, stream)
                          : launch_fused_as<false, Save, Cut>(args, grid, stream);
}
cudaError_t launch_fused(FusedArgs args, int grid, cudaStream_t stream) {
  args.by_v_heads = divisor_of(args.p.num_v_heads);
  args.by_group = divisor_of(args.p.num_v_heads / args.p.num_k_heads);
  const StateView& x = args.p.initial_state;
  if (x.data) {
    const StateMapShape shape{
        x.data, x.stride_n, x.stride_h, args.p.num_states, args.p.num_v_heads, FusedConfig::state_pitch(x.stride_k == 1)};
    args.first_state = in_one_piece(x) && has_state_map(shape) ? kStateInOnePiece : kStateGiven;
    if (args.first_state == kStateInOnePiece) args.state = make_state_map(shape, "initial_state");
  }
  if (args.p.cut) return launch_fused_of<false, true>(args, grid, stream);
  return args.p.saved_abar ? launch_fused_of<true, false>(args, grid, stream) : launch_fused_of<false, false>(args, grid, stream);
}
}  // namespace

void launch_forward(const ForwardParams& p, int num_sms, cudaStream_t stream) {
  if (p.max_items == 0 && p.batch * p.tokens == 0) return;
  const ForwardArgs args = forward_args(p);
  const int grid = std::max(1, std::min(p.max_items, num_sms));
  const cudaError_t e = p.fused                   ? launch_fused({{args}, 0, 0, 0, 0, {}, {}, {}}, grid, stream)
                        : p.dtype == QLA_BFLOAT16 ? launch_forward_type<__nv_bfloat16>(args, grid, stream)
                                                  : launch_forward_type<__half>(args, grid, stream);
  check_launch(e, p, grid);
}

void launch_forward_direct(const ForwardParams& p, const segments::Args& plan, const gates::Args& gates, int num_sms,
                           cudaStream_t stream) {
  const bool plain = gates.g.data && gates.g.dtype == QLA_FLOAT32 && gates.beta.dtype == QLA_FLOAT32 &&
                     !(gates.flags & (QLA_FLAG_RAW_GATE | QLA_FLAG_BETA_SIGMOID));
  FusedArgs args{{forward_args(p)}, plain ? kDirectPlain : kDirect, 0, 0, 0, plan, gates, {}};
  static_assert(plan::kDirectRounds == FusedConfig::kDirectRounds);
  args.p.max_items = int(plan.num_seqs) * p.num_v_heads;
  const int grid = std::min(args.p.max_items, num_sms);
  check_launch(launch_fused(args, grid, stream), p, grid);
}

}  // namespace qla::cuda
