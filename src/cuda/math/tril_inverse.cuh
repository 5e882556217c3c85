// Inverse of a unit lower triangular 64 x 64 matrix by one warpgroup, exact to the rounding of its block products:
//   A = (I - U^T)^-1,  U strictly upper: U[j][i] = -(what row i of A takes from row j),  j < i.
// Everything is transposed: warp w holds rows j = 16 w .. 16 w + 15 of U and of A^T, as wgmma's accumulators have them.
//   1. the four 16 x 16 diagonal blocks T_b by substitution in fp32 (chunk_intra/inverse.cuh: substitute_rows,
//   forward_fused/intra_blocks.cuh:
//      invert_diagonals);
//   2. the blocks below by two levels of fp16 products with fp32 sums (forward_fused/role_intra.cuh: blocks_and_scores),
//        A10^T = (T0^T U01) T1^T,  A32^T = (T2^T U23) T3^T,  A[2:4,0:2]^T = (Ta^T U[0:2,2:4]) Tb^T,   Ta, Tb: the 32 x 32
//        inverses.
// Never powers of U: with correlated keys they overflow or cancel (the inverse is small where they are large). fp16 has the
// mantissa of tf32; what does not fit it (unnormalised keys, positive gates) turns up as large entries, inf or NaN in the
// products and is then done again in fp32 by guarded_inverse.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/formats.hpp"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/pack.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda::tril {

// ---- exchange memory (8 KiB, 1,024-byte aligned): two regions of 32 rows (n of a right operand) of 128 bytes (k), swizzled
//   P: U[0:2,2:4] in bytes 0-63, Tb^T in bytes 64-127 (rows 0-15, bytes 96-127 are standing zeros)
//   Q: U01 | U23 in rows 0-15 bytes 0-63; T0 in rows 16-31 bytes 0-31; T1 (rows 0-15) and T3 (rows 16-31) in bytes 64-95
inline constexpr int kExP = 0, kExQ = 4096, kExBytes = 8192;
// Where block (b, w) (rows 16 b, columns 16 w) of a tile begins, and in it a lane's address for stmatrix_x4_trans. Spread: the
// 8-KiB tile of the consumer, its upper blocks standing zeros; else the 5-KiB tile as it lies in memory (formats.hpp).
template <bool Spread>
__host__ __device__ __forceinline__ constexpr int tile_block(int b, int w) {
  return Spread ? w * 2048 + b * 512 : panel_offset(w) + (b - w) * 512;
}
__device__ __forceinline__ uint32_t tile_lane(uint32_t lane) {
  return swizzle_32((lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16);
}

// .. and for stmatrix_x4_trans of a block that begins at k = 0 in an exchange region; further ones: ^ 2 k
__device__ __forceinline__ uint32_t exchange_lane(uint32_t lane) {
  return swizzle_128((lane / 16 * 8 + lane % 8) * 128 + lane / 8 % 2 * 16);
}
// both, for who works them out once
struct Lane {
  uint32_t tile, exchange;
  __device__ __forceinline__ explicit Lane(uint32_t lane) : tile(tile_lane(lane)), exchange(exchange_lane(lane)) {}
};

// z: a 16 x 16 accumulator block [j][i]; to rows i, columns j of the block at `at`
template <typename T>
__device__ __forceinline__ void store_block(uint32_t at, const float* z) {
  ptx::stmatrix_x4_trans(at, pack<T>(z[0], z[1]), pack<T>(z[2], z[3]), pack<T>(z[4], z[5]), pack<T>(z[6], z[7]));
}

// Steps of a substitution in fp32: a row's sum takes four of the later rows, y, with their elements of U; and the four rows of a
// group, x, what is between them: row 0's elements 1 .. 3, row 1's 2 and 3, row 2's 3.
__device__ __forceinline__ void take_four(float& x, float4 u, const float* y) {
  x += u.x * y[0];
  x += u.y * y[1];
  x += u.z * y[2];
  x += u.w * y[3];
}
__device__ __forceinline__ void finish_four(float* x, float4 row0, float2 row1, float row2) {
  x[2] += row2 * x[3];
  x[1] += row1.y * x[3];
  x[0] += row0.w * x[3];
  x[1] += row1.x * x[2];
  x[0] += row0.z * x[2];
  x[0] += row0.y * x[1];
}
// What a thread's elements of the finished blocks, at most sixteen, may add up to. Keys and beta that shrink the state
// (beta |k|^2 <= 2) give entries of at most 2; much larger ones mean a growing recurrence, in which the operands' fp16 rounding
// grows along.
inline constexpr float kLargest = 64.f;
__device__ __forceinline__ float sum_of_sizes(const float* z) {
  return ((fabsf(z[0]) + fabsf(z[1])) + (fabsf(z[2]) + fabsf(z[3]))) +
         ((fabsf(z[4]) + fabsf(z[5])) + (fabsf(z[6]) + fabsf(z[7])));
}
// ---- the guarded form: all in fp32. Needs 14 KiB: U's ten lower blocks [i][j], then 64 x 16 floats of the columns at work.
__device__ __forceinline__ uint32_t guarded_block(int b, int w) { return (b * (b + 1) / 2 + w) * 1024; }
// 16 columns at a time: eight lanes a column share each row's sum. The caller synchronises before and after.
template <typename T>
__device__ __forceinline__ void guarded_inverse(uint32_t tile, uint32_t mem, int tid) {
  const int c = tid / 8, part = tid % 8;
  const uint32_t x = mem + 10240 + c * 4;  // x[row] at 64 row
  for (int w = 0; w < 4; w++) {
    for (int i = 0; i < 64 - 16 * w; i++) {
      float sum = 0.f;
      const int row = 16 * w + i;
      for (int m = part; m < i; m += 8) {
        const int col = 16 * w + m;
        sum = fmaf(ptx::lds(mem + guarded_block(row / 16, col / 16) + (row % 16 * 16 + col % 16) * 4), ptx::lds(x + 64 * m), sum);
      }
#pragma unroll
      for (int d = 4; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (i <= c) sum = i == c ? 1.f : 0.f;
      if (part == 0) {
        ptx::sts(x + 64 * i, sum);
        const T value = from_float<T>(sum);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(tile + tile_block<true>(w, w) + swizzle_32(i * 32 + c * 2)),
                     "h"(reinterpret_cast<const uint16_t&>(value))
                     : "memory");
      }
      __syncwarp();
    }
  }
}

}  // namespace qla::cuda::tril
