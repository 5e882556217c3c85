// (F6) Pg diag(beta) of a chunk and value head out of - scale K Q^T in the accumulators, all heads in turn: warp w has the blocks
// (w, w) .. (3, w), transposed. Row i, column j <= i gets exp2(c_i - c_j) beta_j, outside the diagonal blocks as two factors,
// whose signs cancel.
#pragma once

#include "cuda/kernels/chunk_intra/inverse.cuh"

namespace qla::cuda::intra {

// q: an accumulator block; c_i of its columns, c_j and beta_j of its rows
template <typename T, bool Diagonal>
__device__ __forceinline__ void put_exact(const float* q, float4 c_i, float2 c_j, float2 beta_j, int lane, uint32_t at) {
  const float columns[4] = {c_i.x, c_i.y, c_i.z, c_i.w};
  const int r = lane / 4, t2 = lane % 4 * 2;
  float p[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int n = i / 4, h = i / 2 % 2;
    if (Diagonal && n < h) {
      p[i] = 0.f;
      continue;
    }
    p[i] = q[i] * -(exp2_approx(columns[2 * n + i % 2] - (h ? c_j.y : c_j.x)) * (h ? beta_j.y : beta_j.x));
    if (Diagonal && n == h) p[i] = r <= t2 + i % 2 ? p[i] : 0.f;  // a select: the gate may be inf above the diagonal
  }
  tril::store_block<T>(at, p);
}

// the warp's blocks of one head's tile
template <typename T>
__device__ __forceinline__ void head_scores(const float* acc, const float (&diagonal)[8], uint32_t vec, uint32_t tile, int warp,
                                            int lane) {
  const HeadLane x(vec, lane);
  const uint32_t out = tile + panel_offset(warp) - 512 * warp + tril::tile_lane(lane);  // block (b, warp): + 512 b
  const float2 c_j = x.rows(kHeadCum, warp), beta = x.rows(kHeadBeta, warp);
  const float4 c_i = x.columns(kHeadCum, warp);
  if (ptx::lds(vec + kHeadGrows * 4) == 0.f) {
    float4 a[3];
    float2 d[3];
#pragma unroll
    for (int b = 3; b > 0; b--) {
      if (b <= warp) break;
      a[b - 1] = x.columns(kHeadRow, b);
      d[b - 1] = x.rows(head_column(b), warp);
    }
#pragma unroll
    for (int b = 3; b > 0; b--) {
      if (b <= warp) break;
      const float* q = acc + 8 * b;
      const float4 i = a[b - 1];
      const float2 j = d[b - 1];
      const float p[8] = {q[0] * (j.x * i.x), q[1] * (j.x * i.y), q[2] * (j.y * i.x), q[3] * (j.y * i.y),
                          q[4] * (j.x * i.z), q[5] * (j.x * i.w), q[6] * (j.y * i.z), q[7] * (j.y * i.w)};
      tril::store_block<T>(out + 512 * b, p);
    }
  } else {
#pragma unroll
    for (int b = 3; b > 0; b--) {
      if (b <= warp) break;
      put_exact<T, false>(acc + 8 * b, x.columns(kHeadCum, b), c_j, beta, lane, out + 512 * b);
    }
  }
  put_exact<T, true>(diagonal, c_i, c_j, beta, lane, out + 512 * warp);
}

}  // namespace qla::cuda::intra
