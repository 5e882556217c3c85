// One step of a merge by a CTA of 512 threads, for 8 value rows of S^T: S^T'[v][k] = sum_i S^T[v][i] B[i][k] + ext (C1), (C3).
//   Warp w sums over i = 8 w .. 8 w + 7, lane l has k = 4 l .. 4 l + 3; the sixteen partial sums are added in a fixed order.
//   Value columns of S are independent, so a chain's 16 items (row groups) never meet.
#pragma once

#include <algorithm>
#include <cstdint>

namespace qla::cuda::merge_step {

inline constexpr int kWarps = 16, kThreads = 32 * kWarps, kRows = 8, kItems = 128 / kRows, kTerms = 128 / kWarps;
static_assert(kThreads * 2 == kRows * 128);  // a thread finishes two neighbouring sums

struct Shared {
  float state[kRows][128];
  float partial[kWarps][kRows][128];
};

// this warp's rows of B; all 512 threads together read its 64 KiB in order
__device__ __forceinline__ void load_transition(float4 (&m)[kTerms], const float* from, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kTerms; i++) m[i] = reinterpret_cast<const float4*>(from)[(warp * kTerms + i) * 32 + lane];
}
// this warp's share of the product, for all rows, to its partial sums
__device__ __forceinline__ void multiply(Shared& s, const float4 (&m)[kTerms], int warp, int lane) {
#pragma unroll
  for (int v = 0; v < kRows; v++) {
    float4 part = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kTerms; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(&s.state[v][warp * kTerms + i]);
      const float coefficient[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int q = 0; q < 4; q++) {
        part.x = fmaf(coefficient[q], m[i + q].x, part.x);
        part.y = fmaf(coefficient[q], m[i + q].y, part.y);
        part.z = fmaf(coefficient[q], m[i + q].z, part.z);
        part.w = fmaf(coefficient[q], m[i + q].w, part.w);
      }
    }
    *reinterpret_cast<float4*>(&s.partial[warp][v][4 * lane]) = part;
  }
}
// to ext, the partial sums of one row's columns col, col + 1
__device__ __forceinline__ void add_partials(float2& sum, const Shared& s, int row, int col) {
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    const float2 x = *reinterpret_cast<const float2*>(&s.partial[w][row][col]);
    sum.x += x.x;
    sum.y += x.y;
  }
}

// CTAs for a bound on the chains
inline unsigned grid(int64_t most_chains, int multiprocessors) {
  return unsigned(std::clamp<int64_t>(most_chains * kItems, 1, 2 * multiprocessors));
}

}  // namespace qla::cuda::merge_step
