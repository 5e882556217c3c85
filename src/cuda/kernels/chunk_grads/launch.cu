#include "cuda/kernels/chunk_grads/launch.hpp"

#include <algorithm>

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/chunk_grads/kernel.cuh"

namespace qla::cuda::chunk_grads {

cudaError_t prepare() {
  const cudaError_t e =
      cudaFuncSetAttribute(chunk_grads_kernel<__nv_bfloat16>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
  return e != cudaSuccess
             ? e
             : cudaFuncSetAttribute(chunk_grads_kernel<__half>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
}

cudaError_t launch(const CUtensorMap& k, const CUtensorMap& q, const CUtensorMap& d_o, const CUtensorMap& d_v,
                   const CUtensorMap& dq, const CUtensorMap& dk, const Params& params, int32_t dtype, int multiprocessors,
                   cudaStream_t stream) {
  const int64_t items = int64_t(params.num_slots) * params.num_k_heads;
  if (items == 0) return cudaSuccess;
  const Maps maps{k, q, d_o, d_v, dq, dk};
  const dim3 grid(unsigned(std::min<int64_t>(items, multiprocessors)));
  const auto kernel = dtype == QLA_BFLOAT16 ? chunk_grads_kernel<__nv_bfloat16> : chunk_grads_kernel<__half>;
  return launch_dependent(kernel, grid, kThreads, sizeof(Smem), true, stream, maps, params);
}

}  // namespace qla::cuda::chunk_grads
