#include "cuda/kernels/forward/launch.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/status.hpp"
#include "cuda/kernels/forward/variants.hpp"
#include "cuda/kernels/forward_fused/variants.hpp"
#include "cuda/tensor_map.hpp"

namespace qla::cuda {
namespace {
void check(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw Error(QLA_CUDA_ERROR, concat("gdn_forward: ", what, ": ", cudaGetErrorString(e)));
}
}  // namespace

void prepare_forward() {
  check(prepare_forward_type<__nv_bfloat16>(), "attributes (bf16)");
  check(prepare_forward_type<__half>(), "attributes (fp16)");
  check(prepare_fused_type<__nv_bfloat16>(), "attributes (fused, bf16)");
  check(prepare_fused_type<__half>(), "attributes (fused, fp16)");
}

void launch_forward(const ForwardParams& p, int num_sms, cudaStream_t stream) {
  if (p.max_items == 0 && p.batch * p.tokens == 0) return;
  ForwardArgs args{};
  args.p = p;
  args.row_tokens = std::max<int64_t>(p.tokens, 1);
  const bool bf16 = p.dtype == QLA_BFLOAT16;
  auto map = [&](const TokenView& x, int heads, const char* name) {
    return make_token_map({x.data, x.stride_b, x.stride_t, x.stride_h, p.batch, p.tokens, heads}, bf16, name);
  };
  if (p.batch * p.tokens > 0) {
    args.k = map(p.k, p.num_k_heads, "k");
    args.v = map(p.v, p.num_v_heads, "v");
    if (p.output) {
      args.q = map(p.q, p.num_k_heads, "q");
      args.o = map(p.o, p.num_v_heads, "o");
    }
  }
  const int grid = std::max(1, std::min(p.max_items, num_sms));
  const cudaError_t e =
      p.fused ? bf16 ? launch_fused_type<__nv_bfloat16>(args, grid, stream) : launch_fused_type<__half>(args, grid, stream)
      : bf16 ? launch_forward_type<__nv_bfloat16>(args, grid, stream)
              : launch_forward_type<__half>(args, grid, stream);
  check(e, concat("launch of ", grid, " CTAs, ", bf16 ? "bf16" : "fp16", p.fused ? ", fused" : "",
                  p.v_parts == 2 ? ", V split" : "", p.output ? "" : ", no output")
               .c_str());
}

}  // namespace qla::cuda
