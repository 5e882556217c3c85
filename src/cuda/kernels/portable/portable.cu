// The portable body for every target: compiled for 80, 90a, 100 and 120 by the target qla_kernels_other_targets, and run on
// whatever device there is by tests/device. Not part of libqla.
#include "cuda/kernels/portable/portable.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/kernels/portable/kernel.cuh"

namespace qla::cuda::portable {
namespace {

template <typename T>
cudaError_t start(const ForwardParams& params, int multiprocessors, cudaStream_t stream) {
  const auto kernel = gdn_forward_portable<T, MmaSync<T>>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (status != cudaSuccess) return status;
  const int ctas = std::max(1, std::min(params.max_items * (params.v_parts == 2 ? 1 : 2), 3 * multiprocessors));
  kernel<<<ctas, kThreads, kSmemBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch(const ForwardParams& params, int multiprocessors, cudaStream_t stream) {
  return params.dtype == QLA_BFLOAT16 ? start<__nv_bfloat16>(params, multiprocessors, stream)
                                      : start<__half>(params, multiprocessors, stream);
}

}  // namespace qla::cuda::portable
