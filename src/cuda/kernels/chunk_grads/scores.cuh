// What becomes of J (B5) and Z (B6) in a product warpgroup's accumulators: the 16-bit left operand, the column sums of Y' (B10)
// and what the crossing sums of Y (B11) are made of. All sums fp32, additions only, in a fixed order.
//
// sum_{i>=t, j<t} Y_ij by 16 x 16 blocks, t in block b, warp w holding rows 16 w ..:
//   blocks (w, kb) with kb < b < w lie whole inside: from their column sums; with w > b, kb = b: columns j < t of C_j = beta_j
//   (column sum of Y' below the block); with w = b, kb < b: rows i >= t of the row sums; the diagonal block (b, b) itself: row
//   prefixes, then column sums.
// The finisher puts these together.
#pragma once

#include "cuda/formats.hpp"
#include "cuda/kernels/chunk_grads/products.cuh"
#include "cuda/math/exp.cuh"
#include "cuda/math/warp.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/transpose.cuh"
#include "cuda/tile/pack.cuh"

namespace qla::cuda::chunk_grads {

// Lanes with this bit keep the upper half of x, the others the lower one, each summed with what the partner gives away.
template <int Keep, int Mask, int N>
__device__ __forceinline__ void halve(float (&x)[N], int lane) {
#pragma unroll
  for (int i = 0; i < Keep; i++) {
    const float low = x[i], high = x[i + Keep];
    x[i] = (lane & Mask ? high : low) + __shfl_xor_sync(~0u, lane & Mask ? low : high, Mask);
  }
}
// 16 column values of each lane (index 4 b + 2 n + c: column 16 b + 8 n + 2 (lane % 4) + c of 64) summed over the warp's rows,
// all at once: three exchanges one behind the other instead of three a block. Lane 4 r + q stores the columns 8 r + 2 q and + 1.
__device__ __forceinline__ void store_column_sums(float (&x)[16], uint32_t out, int lane) {
  halve<8, 16>(x, lane);
  halve<4, 8>(x, lane);
  halve<2, 4>(x, lane);
  ptx::sts2(out + (lane / 4 * 8 + lane % 4 * 2) * 4, x[0], x[1]);
}
// 4 column values of each lane (index 2 n + c: column 8 n + 2 (lane % 4) + c of 16) summed over the warp's rows: over the lanes
// that agree in lane % 4. Lanes 0-3, 8-11, 16-19, 24-27 store one column each.
__device__ __forceinline__ void store_column_sums(float (&x)[4], uint32_t out, int lane) {
  halve<2, 16>(x, lane);
  halve<1, 8>(x, lane);
  x[0] += __shfl_xor_sync(~0u, x[0], 4);
  if ((lane & 4) == 0) ptx::sts(out + (lane / 16 * 8 + lane % 4 * 2 + lane / 8 % 2) * 4, x[0]);
}

// Sums of one warpgroup for the finisher, floats from its base in a part stage.
inline constexpr int kSumColumn = 0;   // [4 warps][64] column sums of Y'; of warp w: columns below 16 w + 16
inline constexpr int kSumRow = 256;    // [64] row sums of Y left of the diagonal block
inline constexpr int kSumCross = 320;  // [64] crossing sums inside the diagonal blocks
static_assert(kSumFloats == 384);

struct ScoreColumns {  // of this lane: 2 x 2 columns of block kb
  float g[4], beta[4], rk[4];
  __device__ __forceinline__ ScoreColumns(uint32_t vec, int kb, int lane) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const uint32_t at = vec + (16 * kb + 8 * n + lane % 4 * 2) * 4;
      const float2 g2 = ptx::lds2(at + kVecG * 4), b2 = ptx::lds2(at + kVecBeta * 4), r2 = ptx::lds2(at + kVecRk * 4);
      g[2 * n] = g2.x, g[2 * n + 1] = g2.y;
      beta[2 * n] = b2.x, beta[2 * n + 1] = b2.y;
      rk[2 * n] = r2.x, rk[2 * n + 1] = r2.y;
    }
  }
};

// acc: J or dR Delta^T; pair: Q K^T or K K^T of the same places. row_factor: scale rq_i, or -rk_i.
//   tile      row_factor G acc beta_j rk_j   (dP or X, with both norms in it); of X, mirrored: X + X^T. The blocks of dP above
//   the diagonal are not written.
//   Y' = row_factor G acc rk_j pair, Y = Y' beta_j, of strictly lower places; dbeta counts the diagonal too where it is kept (not
//   mirrored).
// fp16: where a zero row of q meets a zero row of k under q-k normalisation, both norms are 1e3 and the factor may leave fp16's
// range; it multiplies rows of zeros only, and inf x 0 would be NaN. Elsewhere inf stays inf.
template <typename T>
__device__ __forceinline__ float in_range(float x, float pair) {
  if constexpr (std::is_same_v<T, __half>)
    return fabsf(x) > 65504.f && pair == 0.f ? 0.f : x;
  else
    return x;
}

template <typename T>
__device__ __forceinline__ void scores(const float (&acc)[32], const float (&pair)[32], uint32_t vec,
                                       const float (&row_factor)[2], int warp, int lane, bool mirror, uint32_t tile,
                                       uint32_t out) {
  const int row = 16 * warp + lane / 4;
  const float g_row[2] = {ptx::lds(vec + (kVecG + row) * 4), ptx::lds(vec + (kVecG + row + 8) * 4)};
  float left[2] = {0.f, 0.f};           // row sums over the blocks left of the diagonal one
  float diagonal[8], diagonal_pair[8];  // the warp's diagonal block of acc and pair: selected, so that its code is there once
#pragma unroll
  for (int i = 0; i < 8; i++) {
    diagonal[i] = warp < 2 ? (warp == 0 ? acc[i] : acc[8 + i]) : warp == 2 ? acc[16 + i] : acc[24 + i];
    diagonal_pair[i] = warp < 2 ? (warp == 0 ? pair[i] : pair[8 + i]) : warp == 2 ? pair[16 + i] : pair[24 + i];
  }
  const BlockRow rows(tile, 16 * warp, lane);
  const BlockColumn mirrored(tile, 16 * warp, lane);
  float columns[16];  // of Y', all blocks
#pragma unroll
  for (int i = 0; i < 16; i++) columns[i] = 0.f;
  // Off the diagonal block the gate has two factors: exp2(g_i - g_m) exp2(g_m - g_j), m the warp's first row. Where gates are not
  // positive both are at most 1, and where one underflows the product does; growth: docs/numerics.md, Gates.
  const float g_first = ptx::lds(vec + (kVecG + 16 * warp) * 4);
  const float r[2] = {row_factor[0] * exp2_approx(g_row[0] - g_first), row_factor[1] * exp2_approx(g_row[1] - g_first)};
#pragma unroll
  for (int kb = 0; kb < 3; kb++) {
    if (kb >= warp) break;
    const ScoreColumns c(vec, kb, lane);
    float near[4], weight[4];  // the column's factor, without and with beta
#pragma unroll
    for (int j = 0; j < 4; j++) near[j] = exp2_approx(g_first - c.g[j]) * c.rk[j], weight[j] = near[j] * c.beta[j];
    uint32_t operand[4];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int at = 8 * kb + 4 * n + 2 * h + e, j = 2 * n + e;
          x[e] = r[h] * acc[at];
          columns[4 * kb + j] += x[e] * pair[at];
          x[e] *= weight[j];
          left[h] += x[e] * pair[at];
        }
        operand[2 * n + h] =
            pack<T>(in_range<T>(x[0], pair[8 * kb + 4 * n + 2 * h]), in_range<T>(x[1], pair[8 * kb + 4 * n + 2 * h + 1]));
      }
#pragma unroll
    for (int j = 0; j < 4; j++) columns[4 * kb + j] *= near[j];
    ptx::stmatrix_x4(rows.block(kb), operand[0], operand[1], operand[2], operand[3]);
    if (mirror) ptx::stmatrix_x4_trans(mirrored.block(kb), operand[0], operand[1], operand[2], operand[3]);
  }
  left[0] = warp_sum<4>(left[0]);
  left[1] = warp_sum<4>(left[1]);
  if (lane % 4 == 0) {
    ptx::sts(out + (kSumRow + row) * 4, left[0]);
    ptx::sts(out + (kSumRow + row + 8) * 4, left[1]);
  }
  const ScoreColumns c(vec, warp, lane);
  float column[4] = {0.f, 0.f, 0.f, 0.f}, cross[4] = {0.f, 0.f, 0.f, 0.f},
        before[2] = {0.f, 0.f};  // before: sum of the row's Y in the 8 columns to the left
  uint32_t result[4];
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = lane / 4 + 8 * h, t = 8 * n + lane % 4 * 2;  // within the block
      float x[2], y[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int at = 4 * n + 2 * h + e, j = 2 * n + e;
        const bool inside = i >= t + e + int(mirror);
        const float gate = exp2_approx(inside ? g_row[h] - c.g[j] : -INFINITY);  // masked before exp
        x[e] = row_factor[h] * gate * (diagonal[at] * c.rk[j]);
        column[j] += x[e] * diagonal_pair[at];
        x[e] = inside ? x[e] * c.beta[j] : 0.f;  // +0, never -0: of X + X^T one is or-ed to the other
        y[e] = i > t + e ? x[e] * diagonal_pair[at] : 0.f;
      }
      result[2 * n + h] =
          pack<T>(in_range<T>(x[0], diagonal_pair[4 * n + 2 * h]), in_range<T>(x[1], diagonal_pair[4 * n + 2 * h + 1]));
      // B_it = sum_{j<t} Y_ij for this lane's two t: exclusive prefix over the quad, then over the two column blocks
      const float both = y[0] + y[1];
      const float o1 = __shfl_xor_sync(~0u, both, 1);
      const float two = both + o1;
      const float o2 = __shfl_xor_sync(~0u, two, 2);
      float prefix = lane & 1 ? o1 : 0.f;
      prefix += lane & 2 ? o2 : 0.f;
      const float b0 = before[h] + prefix, b1 = b0 + y[0];
      before[h] += two + o2;
      cross[2 * n] += i >= t ? b0 : 0.f;
      cross[2 * n + 1] += i >= t + 1 ? b1 : 0.f;
    }
  if (mirror) {
    result[2] = ptx::transpose_8x8(result[1]);
    result[0] |= ptx::transpose_8x8(result[0]);
    result[3] |= ptx::transpose_8x8(result[3]);
  }
  ptx::stmatrix_x4(rows.block(warp), result[0], result[1], result[2], result[3]);
  store_column_sums(cross, out + (kSumCross + 16 * warp) * 4, lane);
#pragma unroll
  for (int i = 0; i < 16; i++) columns[i] = i / 4 == warp ? column[i % 4] : columns[i];
  store_column_sums(columns, out + (kSumColumn + 64 * warp) * 4, lane);
}

// The finisher's share, columns t = 2 lane and + 1: crossing sums and column sums of Y' of one warpgroup, added to cross and
// column.
__device__ __forceinline__ void gather_sums(uint32_t in, const float2& beta, int lane, float (&cross)[2], float (&column)[2]) {
  const int b = lane / 8;
  float below[2] = {0.f, 0.f}, y2 = 0.f, y3 = 0.f;  // y: this lane's two columns of Y in rows 32 .., 48 ..
#pragma unroll
  for (int w = 0; w < 4; w++) {
    if (w < b) continue;
    const float2 x = ptx::lds2(in + (kSumColumn + 64 * w + 2 * lane) * 4);
    column[0] += x.x;
    column[1] += x.y;
    if (w > b) below[0] += x.x, below[1] += x.y;
    if (w == 2) y2 = beta.x * x.x + beta.y * x.y;
    if (w == 3) y3 = beta.x * x.x + beta.y * x.y;
  }
  const float c0 = beta.x * below[0], c1 = beta.y * below[1];
  const float2 r = ptx::lds2(in + (kSumRow + 2 * lane) * 4), inside = ptx::lds2(in + (kSumCross + 2 * lane) * 4);
  float prefix = c0 + c1, suffix = r.x + r.y;  // over the 8 lanes of the block
#pragma unroll
  for (int d = 1; d < 8; d *= 2) {
    const float lower = __shfl_up_sync(~0u, prefix, d, 8), upper = __shfl_down_sync(~0u, suffix, d, 8);
    if (lane % 8 >= d) prefix += lower;
    if (lane % 8 + d < 8) suffix += upper;
  }
  const float prefix_before = __shfl_up_sync(~0u, prefix, 1, 8), suffix_after = __shfl_down_sync(~0u, suffix, 1, 8);
  const float p0 = lane % 8 ? prefix_before : 0.f, s1 = r.y + (lane % 8 < 7 ? suffix_after : 0.f);
  // whole blocks: (2, 0) + (3, 0) for b = 1, (3, 0) + (3, 1) for b = 2, of the columns' sums over two rows of blocks and over one
  const float of_two = warp_sum<8>(y2 + y3), of_one = warp_sum<8>(y3);
  const float two0 = __shfl_sync(~0u, of_two, 0), one0 = __shfl_sync(~0u, of_one, 0), one1 = __shfl_sync(~0u, of_one, 8);
  const float whole = b == 1 ? two0 : b == 2 ? one0 + one1 : 0.f;
  cross[0] += (inside.x + p0) + ((r.x + s1) + whole);
  cross[1] += (inside.y + (p0 + c0)) + (s1 + whole);
}

}  // namespace qla::cuda::chunk_grads
