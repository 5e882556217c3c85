// movmatrix: an 8 x 8 matrix of 16 bit, a word a lane as ldmatrix and mma.sync hold it, transposed; one warp
#pragma once

#include <cstdint>

namespace qla::cuda::ptx {

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace qla::cuda::ptx
