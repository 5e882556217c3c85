// wgmma with both operands in shared memory and A MN-major: rows of k, the 64 rows of D contiguous in them (transposed from
// wgmma_ss's A); B MN-major. N = 128.
#pragma once

#include "cuda/ptx/wgmma.cuh"

namespace qla::cuda::ptx {

#define QLA_WGMMA_MN128(TYPE)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" QLA_WGMMA_D128 \
               "}, "                                                                            \
               "%64, %65, 1, 1, 1, 1, 1;"                                                       \
               : QLA_WGMMA_OUT128(d)                                                            \
               : "l"(a), "l"(b))
// D += A B
template <typename T>
__device__ __forceinline__ void wgmma_mn(float (&d)[64], uint64_t a, uint64_t b) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    QLA_WGMMA_MN128("bf16");
  else
    QLA_WGMMA_MN128("f16");
}
#undef QLA_WGMMA_MN128

}  // namespace qla::cuda::ptx
