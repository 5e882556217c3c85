// Warp-wide sums in a fixed order: the same bits every time.
#pragma once

namespace qla::cuda {

// inclusive prefix sum over the lanes
__device__ __forceinline__ float warp_inclusive_sum(float x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float left = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += left;
  }
  return x;
}
// inclusive suffix sum
__device__ __forceinline__ float warp_suffix_sum(float x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float right = __shfl_down_sync(~0u, x, d);
    if (lane + d < 32) x += right;
  }
  return x;
}
// sum over groups of Lanes neighbouring lanes, in every lane
template <int Lanes = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = Lanes / 2; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

}  // namespace qla::cuda
