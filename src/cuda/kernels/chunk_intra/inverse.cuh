// (F3) of one chunk and value head by one warp: A = (I + L)^-1, L = (G o K K^T) diag(beta) below the diagonal; ungated:
// diag(beta) (K K^T). Nothing but __syncwarp() between its steps.
//   1. the four 16 x 16 diagonal inverses T_b by substitution in fp32, a lane a row of two of them;
//   2. the blocks below by fp16 products with fp32 sums, row b of blocks after row b - 1:
//        A_bw^T = (sum over m = w .. b - 1 of A_mw^T U_bm^T) T_b^T,   U = -L,   A_ww = T_w.
//      A product's sum is the next one's left operand, and a block in the accumulator layout is the right operand of its own
//      transposed: everything but T stays in registers.
// Never powers of L: with correlated keys they overflow or cancel (the inverse is small where they are large). What does not fit
// fp16 (unnormalised keys, positive gates) turns up as large entries, inf or NaN in the blocks and is done again in fp32.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/chunk_intra/smem.hpp"
#include "cuda/math/exp.cuh"
#include "cuda/math/tril_inverse.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/pack.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda::intra {

// Diagonal blocks of U = -L^T while they wait for the substitution: 16 rows j of 16 floats, in every second pair of rows the
// halves swapped, so that stores of two rows' fragments meet no bank twice. A block's bytes, 8 modulo 32 floats, keep the four
// that a warp reads at once on different banks. They fit into the tile.
inline constexpr int kBlockU = 1024 + 32;
static_assert(4 * kBlockU <= kTileBytes);
constexpr int place_u(int j, int i) { return j * 64 + (i ^ (j / 2 % 2 * 8)) * 4; }

// A lane's place in a 16 x 16 block of 32-byte rows, for ldmatrix and stmatrix of a block as it is (tril::tile_lane: transposed).
__device__ __forceinline__ uint32_t plain_lane(uint32_t lane) { return swizzle_32(lane % 16 * 32 + lane / 16 * 16); }

struct HeadLane {
  uint32_t row, column;  // addresses in s_vec: of row lane / 4 (row + 8: 8 bytes further), and of this lane's four columns
  int lane;
  __device__ __forceinline__ HeadLane(uint32_t vec, int lane)
      : row(vec + lane / 8 * 16 + lane / 4 % 2 * 4), column(vec + lane % 4 * 16), lane(lane) {}
  // of vector `which`, block b
  __device__ __forceinline__ float2 rows(int which, int b) const {
    return make_float2(ptx::lds(row + (which + 16 * b) * 4), ptx::lds(row + (which + 16 * b) * 4 + 8));
  }
  __device__ __forceinline__ float4 columns(int which, int b) const { return ptx::lds4(column + (which + 16 * b) * 4); }
};

// The diagonal blocks of U, transposed: K K^T is symmetric, so its block [i][j] is read as [j][i].
template <bool Gated>
__device__ __forceinline__ void put_diagonal(const HeadLane& x, uint32_t fragment, uint32_t tile) {
  const int swap = x.lane / 8 % 2 * 32;  // of rows lane / 4 and lane / 4 + 8
  const uint32_t low = tile + x.lane / 4 * 64 + x.lane % 4 * 8 + swap, high = low + 32 - 2 * swap;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float4 k0[2], k1[2], i[2];
    float2 j[2], beta[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int b = 2 * half + n;
      k0[n] = ptx::lds4(fragment + fragment_block(b, b));
      k1[n] = ptx::lds4(fragment + fragment_block(b, b) + 512);
      i[n] = x.columns(Gated ? kHeadCum : kHeadBeta, b);
      if constexpr (Gated) j[n] = x.rows(kHeadCum, b), beta[n] = x.rows(kHeadBeta, b);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float2 e0 = make_float2(i[n].x, i[n].y), e1 = make_float2(i[n].z, i[n].w), e2 = e1;
      if constexpr (Gated) {
        e0 = make_float2(exp2_approx(i[n].x - j[n].x) * beta[n].x, exp2_approx(i[n].y - j[n].x) * beta[n].x);
        e1 = make_float2(exp2_approx(i[n].z - j[n].x) * beta[n].x, exp2_approx(i[n].w - j[n].x) * beta[n].x);
        e2 = make_float2(exp2_approx(i[n].z - j[n].y) * beta[n].y, exp2_approx(i[n].w - j[n].y) * beta[n].y);
      }
      const int block = (2 * half + n) * kBlockU;
      ptx::sts2(low + block, k0[n].x * -e0.x, k0[n].y * -e0.y);
      ptx::sts2(high + block, k1[n].x * -e1.x, k1[n].y * -e1.y);
      ptx::sts2(high + block + 512, k1[n].z * -e2.x, k1[n].w * -e2.y);
    }
  }
}

// Rows c and c + 8 of the inverse T of one diagonal block, c < 8: x_j = delta_jc + sum over m > j of U[j][m] x_m, U row by row
// from shared memory (a broadcast). Row c is 0 beyond column 7.
__device__ __forceinline__ void substitute_rows(float (&low)[8], float (&high)[16], uint32_t u, int c) {
  const float column = float(c);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    asm("set.eq.f32.f32 %0, %1, %2;" : "=f"(low[j]) : "f"(column), "f"(float(j)));
    high[j] = 0.f;
    high[j + 8] = low[j];
  }
#pragma unroll
  for (int m = 3; m >= 0; m--) {
#pragma unroll
    for (int q = 3; q > m; q--) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float4 l = ptx::lds4(u + place_u(4 * m + i, 4 * q));
        tril::take_four(high[4 * m + i], l, high + 4 * q);
        if (q < 2) tril::take_four(low[4 * m + i], l, low + 4 * q);
      }
    }
    const float4 r0 = ptx::lds4(u + place_u(4 * m, 4 * m));
    const float2 r1 = ptx::lds2(u + place_u(4 * m + 1, 4 * m + 2));
    const float r2 = ptx::lds(u + place_u(4 * m + 2, 4 * m + 3));
    tril::finish_four(high + 4 * m, r0, r1, r2);
    if (m < 2) tril::finish_four(low + 4 * m, r0, r1, r2);
  }
}

// block (B, W) of U in fp16; rows: this lane's two row factors of row block B
template <int B, int W>
__device__ __forceinline__ void gate_block(uint32_t (&u)[4], const HeadLane& x, uint32_t fragment, float2 rows) {
  const float4 k0 = ptx::lds4(fragment + fragment_block(B, W)), k1 = ptx::lds4(fragment + fragment_block(B, W) + 512);
  const float4 d = x.columns(head_column(B), W);
  u[0] = pack<__half>(k0.x * (rows.x * d.x), k0.y * (rows.x * d.y));
  u[1] = pack<__half>(k0.z * (rows.y * d.x), k0.w * (rows.y * d.y));
  u[2] = pack<__half>(k1.x * (rows.x * d.z), k1.y * (rows.x * d.w));
  u[3] = pack<__half>(k1.z * (rows.y * d.z), k1.w * (rows.y * d.w));
}

// z += a (the transposed of the block that m holds)
__device__ __forceinline__ void multiply(float (&z)[8], const uint32_t (&a)[4], const uint32_t (&m)[4]) {
  ptx::mma_m16n8k16<__half>(reinterpret_cast<float(&)[4]>(z[0]), a[0], a[1], a[2], a[3], m[0], m[2]);
  ptx::mma_m16n8k16<__half>(reinterpret_cast<float(&)[4]>(z[4]), a[0], a[1], a[2], a[3], m[1], m[3]);
}
__device__ __forceinline__ void pack_block(uint32_t (&a)[4], const float (&z)[8]) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = pack<__half>(z[2 * i], z[2 * i + 1]);
}
__device__ __forceinline__ void note_sizes(__half2& largest, const uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) largest = __hmax2_nan(largest, __habs2(reinterpret_cast<const __half2&>(a[i])));
}
// Keys and beta that shrink the state (beta |k|^2 <= 2) give entries of at most 2; much larger ones mean a growing recurrence, in
// which the operands' fp16 rounding grows along. An operand that overflowed poisons a whole row or column of a block.
inline constexpr float kLargestEntry = 8.f;

// Abar to the tile. Returns (the same in all lanes) whether it has to be done again in fp32.
template <typename T, bool Gated>
__device__ __forceinline__ bool head_inverse(uint32_t fragments, uint32_t vec, uint32_t tile, int lane) {
  constexpr bool kSame = std::is_same_v<T, __half>;  // the tile's type is the operands'
  const HeadLane x(vec, lane);
  const uint32_t fragment = fragments + lane * 16;
  put_diagonal<Gated>(x, fragment, tile);
  __syncwarp();
  const int c = lane % 8, b = lane / 8;
  float low[8], high[16];
  substitute_rows(low, high, tile + b * kBlockU, c);
  const uint32_t final = tile + panel_offset(b), row = swizzle_32(c * 32);
  const auto put = [&](auto type, uint32_t block) {  // row c + 8: 256 bytes further
    using P = decltype(type);
    ptx::sts4u(block + row, pack<P>(low[0], low[1]), pack<P>(low[2], low[3]), pack<P>(low[4], low[5]), pack<P>(low[6], low[7]));
    ptx::sts4u(block + (row ^ 16), 0, 0, 0, 0);
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const float* y = high + 8 * q;
      ptx::sts4u(block + 256 + (row ^ 16 * q), pack<P>(y[0], y[1]), pack<P>(y[2], y[3]), pack<P>(y[4], y[5]),
                 pack<P>(y[6], y[7]));
    }
  };
  uint32_t u[3][4], u10[4];
  gate_block<1, 0>(u10, x, fragment, x.rows(kHeadRow, 1));
  const float2 rows2 = x.rows(kHeadRow, 2);
  __syncwarp();
  put(__half(), kSame ? final : tile + 512 * b);
  gate_block<2, 0>(u[0], x, fragment, rows2);
  gate_block<2, 1>(u[1], x, fragment, rows2);
  __syncwarp();
  uint32_t left[3][4], right[3][4];  // T_0^T .. T_2^T; T_1 .. T_3
#pragma unroll
  for (int n = 0; n < 3; n++) {
    const uint32_t l = tile + tril::tile_lane(lane) + (kSame ? panel_offset(n) : 512 * n),
                   r = tile + plain_lane(lane) + (kSame ? panel_offset(n + 1) : 512 * (n + 1));
    ptx::ldmatrix_x4_trans(l, left[n][0], left[n][1], left[n][2], left[n][3]);
    ptx::ldmatrix_x4(r, right[n][0], right[n][1], right[n][2], right[n][3]);
  }
  if constexpr (!kSame) {
    __syncwarp();
    put(T(), final);
  }
  const uint32_t out = tile + tril::tile_lane(lane);
  __half2 largest = __half2half2(__ushort_as_half(0));
  uint32_t f[3][4], a10[4], a20[4], a21[4], last[4];
  const auto finish = [&](const uint32_t(&sum)[4], const uint32_t(&t_b)[4], uint32_t(&a)[4], int at) {
    float z[8] = {};
    multiply(z, sum, t_b);
    pack_block(a, z);
    note_sizes(largest, a);
    tril::store_block<T>(out + at, z);
  };
  {
    float z[8] = {};
    multiply(z, left[0], u10);
    pack_block(f[0], z);
    finish(f[0], right[0], a10, tril::tile_block<false>(1, 0));
  }
  {
    float z0[8] = {}, z1[8] = {};
    multiply(z1, left[1], u[1]);
    multiply(z0, left[0], u[0]);
    multiply(z0, a10, u[1]);
    pack_block(f[1], z1);
    pack_block(f[0], z0);
    finish(f[1], right[1], a21, tril::tile_block<false>(2, 1));
    finish(f[0], right[1], a20, tril::tile_block<false>(2, 0));
  }
  {
    const float2 rows = x.rows(kHeadRow, 3);
    gate_block<3, 0>(u[0], x, fragment, rows);
    gate_block<3, 1>(u[1], x, fragment, rows);
    gate_block<3, 2>(u[2], x, fragment, rows);
    float z0[8] = {}, z1[8] = {}, z2[8] = {};
    multiply(z2, left[2], u[2]);
    multiply(z1, left[1], u[1]);
    multiply(z0, left[0], u[0]);
    multiply(z1, a21, u[2]);
    multiply(z0, a10, u[1]);
    multiply(z0, a20, u[2]);
    pack_block(f[2], z2);
    pack_block(f[1], z1);
    pack_block(f[0], z0);
    finish(f[2], right[2], last, tril::tile_block<false>(3, 2));
    finish(f[1], right[2], last, tril::tile_block<false>(3, 1));
    finish(f[0], right[2], last, tril::tile_block<false>(3, 0));
  }
  const float2 size = __half22float2(largest);
  return __any_sync(~0u, !(size.x < kLargestEntry && size.y < kLargestEntry)) || ptx::lds(vec + kHeadGrows * 4) != 0.f;
}

// element (i, j), j <= i, in s_kk
__device__ __forceinline__ uint32_t fragment_element(int i, int j) {
  return fragment_block(i / 16, j / 16) + j / 8 % 2 * 512 + (i % 8 * 4 + j % 8 / 2) * 16 + (i / 8 % 2 * 2 + j % 2) * 4;
}
// All in fp32, by substitution: four columns at a time, eight lanes a column. Rare, so slow and small. x: 64 x 4 floats
template <typename T, bool Gated>
__device__ __noinline__ void guarded_head(uint32_t fragments, uint32_t vec, uint32_t tile, uint32_t x, int lane) {
  const int part = lane / 4, c = lane % 4;
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < 64; first += 4) {
    const int col = first + c, panel = first / 16;
#pragma unroll 1
    for (int i = 16 * panel; i < 64; i++) {
      const float c_i = ptx::lds(vec + ((Gated ? kHeadCum : kHeadBeta) + place(i)) * 4);
      float sum = 0.f;
#pragma unroll 2
      for (int m = first + part; m < i; m += 8) {
        float e = c_i;
        if constexpr (Gated)
          e = exp2_approx(c_i - ptx::lds(vec + (kHeadCum + place(m)) * 4)) * ptx::lds(vec + (kHeadBeta + place(m)) * 4);
        sum = fmaf(ptx::lds(fragments + fragment_element(i, m)) * -e, ptx::lds(x + (m * 4 + c) * 4), sum);
      }
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (i <= col) sum = i == col ? 1.f : 0.f;
      if (part == 0) {
        ptx::sts(x + (i * 4 + c) * 4, sum);
        const T value = from_float<T>(sum);
        asm volatile(
            "st.shared.b16 [%0], %1;" ::"r"(tile + panel_offset(panel) + swizzle_32((i - 16 * panel) * 32 + col % 16 * 2)),
            "h"(reinterpret_cast<const uint16_t&>(value))
            : "memory");
      }
      __syncwarp();
    }
  }
}

}  // namespace qla::cuda::intra
