// Pg (F6), 64 x 64 below the diagonal, from the accumulator of Q K^T: what a warp's blocks are multiplied by, and their packing.
// One code for those who make it (backward_passes, chunk_pg): the same bits.
#pragma once

#include "cuda/formats.hpp"
#include "cuda/math/exp.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/fragment.cuh"

namespace qla::cuda {

// This thread's two rows, of row block `warp`. vec: the vector record in shared memory, where its part A would lie
struct PgRows {
  float factor[2], g[2];
  __device__ __forceinline__ PgRows(uint32_t vec, float scale, int warp, int lane) {
    const int row = fragment_row(warp, lane);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      g[h] = ptx::lds(vec + (kVecG + row + 8 * h) * 4);
      factor[h] = ptx::lds(vec + (kVecRq + row + 8 * h) * 4) * scale;
    }
  }
  // .. and columns 16 kb .. : gates, beta, norms and scale, in the accumulator's order
  __device__ __forceinline__ void block(float* out, uint32_t vec, int kb, int lane) const {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const uint32_t at = vec + (16 * kb + 8 * n + fragment_col(lane)) * 4;
      const float2 c = ptx::lds2(at + kVecG * 4), beta = ptx::lds2(at + kVecBeta * 4), rk = ptx::lds2(at + kVecRk * 4);
      const float2 column = make_float2(rk.x * beta.x, rk.y * beta.y);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int e = 4 * n + 2 * h;
        out[e] = exp2_approx(g[h] - c.x) * (factor[h] * column.x);
        out[e + 1] = exp2_approx(g[h] - c.y) * (factor[h] * column.y);
      }
    }
  }
};

// a block's four 8 x 8 matrices in stmatrix's order
template <typename T>
__device__ __forceinline__ void pack_pg(uint32_t (&x)[4], const float* acc, const float* factor, bool diagonal, int lane) {
  if (!diagonal) {
#pragma unroll
    for (int i = 0, e = 0; i < 4; i++, e += 2) x[i] = pack<T>(acc[e] * factor[e], acc[e + 1] * factor[e + 1]);
  } else {
#pragma unroll
    for (int i = 0, e = 0; i < 4; i++, e += 2) {
      const int under = fragment_row(0, lane) + i % 2 * 8 - (i / 2 * 8 + fragment_col(lane));
      // a select: the gate may be inf above the diagonal
      x[i] = pack<T>(under >= 0 ? acc[e] * factor[e] : 0.f, under >= 1 ? acc[e + 1] * factor[e + 1] : 0.f);
    }
  }
}

}  // namespace qla::cuda
