// Inverse of a unit lower triangular 64 x 64 matrix by one warpgroup, exact to the rounding of its block products:
//   A = (I - U^T)^-1,  U strictly upper: U[j][i] = -(what row i of A takes from row j),  j < i.
// Everything is transposed: warp w holds rows j = 16 w .. 16 w + 15 of U and of A^T, as wgmma's accumulators have them.
//   1. the four 16 x 16 diagonal blocks T_b by substitution in fp32, one thread a column;
//   2. the blocks below by two levels of fp16 products with fp32 sums,
//        A10^T = (T0^T U01) T1^T,  A32^T = (T2^T U23) T3^T,  A[2:4,0:2]^T = (Ta^T U[0:2,2:4]) Tb^T,   Ta, Tb: the 32 x 32
//        inverses.
// Never powers of U: with correlated keys they overflow or cancel (the inverse is small where they are large). fp16 has the
// mantissa of tf32; what does not fit it (unnormalised keys, positive gates) turns up as large entries, inf or NaN in the
// products and is then done again in fp32 by guarded_inverse.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/formats.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/pack.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda::tril {

// ---- exchange memory (8 KiB, 1,024-byte aligned): two regions of 32 rows (n of a right operand) of 128 bytes (k), swizzled
//   P: U[0:2,2:4] in bytes 0-63, Tb^T in bytes 64-127 (rows 0-15, bytes 96-127 are standing zeros)
//   Q: U01 | U23 in rows 0-15 bytes 0-63; T0 in rows 16-31 bytes 0-31; T1 (rows 0-15) and T3 (rows 16-31) in bytes 64-95
inline constexpr int kExP = 0, kExQ = 4096, kExBytes = 8192;
// ---- diagonal blocks of U in fp32; the odd pitch of a block keeps two substitutions of one warp off each other's banks
inline constexpr int kPitchU = 20, kBlockU = (16 * kPitchU + 4) * 4;
static_assert(4 * kBlockU <= 6144);

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

template <typename T>
__device__ __forceinline__ void store_block(uint32_t at, const float* z) {
  ptx::stmatrix_x4_trans(at, pack<T>(z[0], z[1]), pack<T>(z[2], z[3]), pack<T>(z[4], z[5]), pack<T>(z[6], z[7]));
}
// z: a 16 x 16 accumulator block [j][i]; to rows i, columns j of block (b, w) of the tile
template <typename T, bool Spread = false>
__device__ __forceinline__ void put_tile(uint32_t tile, const float* z, int b, int w, int lane) {
  store_block<T>(tile + tile_block<Spread>(b, w) + tile_lane(lane), z);
}
// the same to rows n0 + i, k = k0 + j of an exchange region, in fp16
__device__ __forceinline__ void put_exchange(uint32_t region, const float* z, int n0, int k0, int lane) {
  store_block<__half>(region + 128 * n0 + (exchange_lane(lane) ^ 2 * k0), z);
}
// an off-diagonal block (b, w) of U, b > w, by warp w
__device__ __forceinline__ void put_u(uint32_t ex, const float* u, int b, int w, int lane) {
  if (b == 1)
    put_exchange(ex + kExQ, u, 0, 0, lane);
  else if (w == 2)
    put_exchange(ex + kExQ, u, 0, 16, lane);
  else
    put_exchange(ex + kExP, u, 16 * (b - 2), 16 * w, lane);
}
// the diagonal block of warp w, fp32
__device__ __forceinline__ void put_u_diagonal(uint32_t s_u, const float* u, int w, int lane) {
  const uint32_t at = s_u + w * kBlockU + (lane / 4 * kPitchU + lane % 4 * 2) * 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    ptx::sts2(at + 32 * h, u[4 * h], u[4 * h + 1]);
    ptx::sts2(at + (8 * kPitchU + 8 * h) * 4, u[4 * h + 2], u[4 * h + 3]);
  }
}

// Column c of (I - U^T)^-1 of one diagonal block, U row by row from shared memory (a broadcast); groups of four rows, so that
// four chains run at once.
__device__ __forceinline__ void substitute(float (&x)[16], uint32_t u, int c) {
  const float column = float(c);
#pragma unroll
  for (int j = 0; j < 16; j++) asm("set.eq.f32.f32 %0, %1, %2;" : "=f"(x[j]) : "f"(column), "f"(float(j)));  // one instruction
#pragma unroll
  for (int m = 3; m >= 0; m--) {
#pragma unroll
    for (int q = 3; q > m; q--) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float4 l = ptx::lds4(u + ((4 * m + i) * kPitchU + 4 * q) * 4);
        x[4 * m + i] += l.x * x[4 * q];
        x[4 * m + i] += l.y * x[4 * q + 1];
        x[4 * m + i] += l.z * x[4 * q + 2];
        x[4 * m + i] += l.w * x[4 * q + 3];
      }
    }
    const float4 r0 = ptx::lds4(u + (4 * m * kPitchU + 4 * m) * 4), r1 = ptx::lds4(u + ((4 * m + 1) * kPitchU + 4 * m) * 4),
                 r2 = ptx::lds4(u + ((4 * m + 2) * kPitchU + 4 * m) * 4);
    x[4 * m + 2] += r2.w * x[4 * m + 3];
    x[4 * m + 1] += r1.w * x[4 * m + 3];
    x[4 * m] += r0.w * x[4 * m + 3];
    x[4 * m + 1] += r1.z * x[4 * m + 2];
    x[4 * m] += r0.z * x[4 * m + 2];
    x[4 * m] += r0.y * x[4 * m + 1];
  }
}
// Two diagonal blocks, 2 half and 2 half + 1, by one warp: to the tile and as operands to the exchange regions.
template <typename T, bool Spread = false>
__device__ __forceinline__ void diagonal_inverses(uint32_t tile, uint32_t ex, uint32_t s_u, int half, int lane) {
  const int hi = lane / 16, c = lane % 16, b = 2 * half + hi;
  float t[16];
  substitute(t, s_u + b * kBlockU, c);
  // T0 and T1, or T2 and T3; T3 twice. The second half of a row of 32 bytes: ^ 16
  const uint32_t row = swizzle_128(c * 128 + 64);
  const uint32_t first = half == 0 ? ex + kExQ + (hi ? row : 2048 + (row ^ 64)) : ex + kExP + (hi ? 2048 + (row ^ 32) : row),
                 second = ex + kExQ + 2048 + row, diagonal = tile + tile_block<Spread>(b, b) + swizzle_32(c * 32);
#pragma unroll
  for (int q = 0; q < 2; q++) {
    const float* x = t + 8 * q;
    const uint32_t a0 = pack<__half>(x[0], x[1]), a1 = pack<__half>(x[2], x[3]), a2 = pack<__half>(x[4], x[5]),
                   a3 = pack<__half>(x[6], x[7]);
    ptx::sts4u(first ^ 16 * q, a0, a1, a2, a3);
    if (b == 3) ptx::sts4u(second ^ 16 * q, a0, a1, a2, a3);
    ptx::sts4u(diagonal ^ 16 * q, pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
  }
}

// What a thread's elements of the finished blocks, at most sixteen, may add up to. Keys and beta that shrink the state
// (beta |k|^2 <= 2) give entries of at most 2; much larger ones mean a growing recurrence, in which the operands' fp16 rounding
// grows along.
inline constexpr float kLargest = 64.f;
__device__ __forceinline__ float sum_of_sizes(const float* z) {
  return ((fabsf(z[0]) + fabsf(z[1])) + (fabsf(z[2]) + fabsf(z[3]))) +
         ((fabsf(z[4]) + fabsf(z[5])) + (fabsf(z[6]) + fabsf(z[7])));
}
// The off-diagonal blocks; all four warps, between two barriers of theirs (`barrier`: one more inside). Returns whether this
// thread met more than that, an inf or a NaN: an operand that overflowed poisons a whole row or column of a block that is looked
// at.
template <typename T, bool Spread = false>
__device__ __forceinline__ bool off_diagonal_blocks(uint32_t tile, uint32_t ex, int warp, const Lane& at, int barrier) {
  using ptx::wgmma_rs;
  const uint64_t p = descriptor_k_major(ex + kExP), q = descriptor_k_major(ex + kExQ);
  uint32_t ta[8], f[4];
  float z1[8], z2[16], z3[16], size = 0.f;
  const uint32_t from = warp == 0 ? at.exchange + kExQ + 2048 : (at.exchange ^ 64) + (warp == 1 ? kExQ : kExP);
  ptx::ldmatrix_x4_trans(ex + from, f[0], f[1], f[2], f[3]);  // T_warp^T (of warp 3: not used)
#pragma unroll
  for (int i = 0; i < 4; i++) {
    ta[i] = warp ? 0 : f[i];
    ta[4 + i] = warp ? f[i] : 0;
  }
  ptx::wgmma_fence();  // T0^T U01, T2^T U23
#pragma unroll
  for (int k = 0; k < 2; k++) wgmma_rs<__half, 0>(z1, ta + 4 * k, advance(q, 32 * k), k > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait();
#pragma unroll
  for (int i = 0; i < 4; i++) f[i] = pack<__half>(z1[2 * i], z1[2 * i + 1]);
  ptx::wgmma_fence();  // .. T1^T, T3^T
  wgmma_rs<__half, 0>(z2, f, advance(q, 64), 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t a10 = pack<__half>(z2[2 * i], z2[2 * i + 1]);
    ta[4 + i] = warp ? ta[4 + i] : a10;
  }
  ptx::wgmma_fence();  // Ta^T U[0:2,2:4]
#pragma unroll
  for (int k = 0; k < 2; k++) wgmma_rs<__half, 0>(z3, ta + 4 * k, advance(p, 32 * k), k > 0);
  ptx::wgmma_commit();
  if (warp == 0) {
    store_block<T>(tile + tile_block<Spread>(1, 0) + at.tile, z2);
    size = sum_of_sizes(z2);
  }
  if (warp == 2) {
    store_block<__half>(ex + kExP + 2048 + (at.exchange ^ 64), z2 + 8);
    ptx::proxy_fence();
    store_block<T>(tile + tile_block<Spread>(3, 2) + at.tile, z2 + 8);
    size = sum_of_sizes(z2 + 8);
  }
  ptx::wgmma_wait();
  ptx::named_sync(barrier, 128);
#pragma unroll
  for (int i = 0; i < 8; i++) ta[i] = pack<__half>(z3[2 * i], z3[2 * i + 1]);
  ptx::wgmma_fence();  // .. Tb^T
#pragma unroll
  for (int k = 0; k < 2; k++) wgmma_rs<__half, 0>(z2, ta + 4 * k, advance(p, 64 + 32 * k), k > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait();
  if (warp < 2) {
    store_block<T>(tile + tile_block<Spread>(2, warp) + at.tile, z2);
    store_block<T>(tile + tile_block<Spread>(3, warp) + at.tile, z2 + 8);
    size += sum_of_sizes(z2) + sum_of_sizes(z2 + 8);
  }
  return !(size < kLargest);
}

// ---- the guarded form: all in fp32. Needs 14 KiB: U's ten lower blocks [i][j], then 64 x 16 floats of the columns at work.
inline constexpr int kGuardedBytes = 14336;
__device__ __forceinline__ uint32_t guarded_block(int b, int w) { return (b * (b + 1) / 2 + w) * 1024; }
__device__ __forceinline__ void put_u_guarded(uint32_t mem, const float* u, int b, int w, int lane) {
  const int r = lane / 4, c = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 8; i++) ptx::sts(mem + guarded_block(b, w) + ((i / 4 * 8 + c + i % 2) * 16 + r + i % 4 / 2 * 8) * 4, u[i]);
}
// 16 columns at a time: eight lanes a column share each row's sum. The caller synchronises before and after.
template <typename T, bool Spread = false>
__device__ __forceinline__ void guarded_inverse_inline(uint32_t tile, uint32_t mem, int tid) {
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
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(tile + tile_block<Spread>(w, w) + swizzle_32(i * 32 + c * 2)),
                     "h"(reinterpret_cast<const uint16_t&>(value))
                     : "memory");
      }
      __syncwarp();
    }
  }
}

// A kernel that redistributes registers (setmaxnreg) inlines it: a function may use more than its role has.
template <typename T>
__device__ __noinline__ void guarded_inverse(uint32_t tile, uint32_t mem, int tid) {
  guarded_inverse_inline<T>(tile, mem, tid);
}

}  // namespace qla::cuda::tril
