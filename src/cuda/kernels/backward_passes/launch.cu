#include "cuda/kernels/backward_passes/launch.hpp"

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/backward_passes/kernel.cuh"

namespace qla::cuda::backward_passes {

cudaError_t prepare() {
  const cudaError_t e =
      cudaFuncSetAttribute(backward_passes_kernel<__nv_bfloat16>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  return e != cudaSuccess
             ? e
             : cudaFuncSetAttribute(backward_passes_kernel<__half>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
}

cudaError_t launch(const CUtensorMap& k, const CUtensorMap& q, const CUtensorMap& v, const CUtensorMap& d_o,
                   const CUtensorMap& dv, const Params& params, int32_t dtype, cudaStream_t stream) {
  if (params.num_items == 0) return cudaSuccess;
  const Maps maps{k, q, v, d_o, dv};
  const dim3 grid(unsigned(params.num_items) * kCluster * (params.kinds == kBoth && !params.cut_items ? 2 : 1));
  const auto kernel = dtype == QLA_BFLOAT16 ? backward_passes_kernel<__nv_bfloat16> : backward_passes_kernel<__half>;
  return launch_dependent(kernel, grid, kThreads, kSmemBytes, true, stream, maps, params);
}

}  // namespace qla::cuda::backward_passes
