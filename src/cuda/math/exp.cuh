// exp2 and log2 of the special function unit, and constants that turn natural logarithms into them.
#pragma once

namespace qla::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// 2^x, results below 2^-126 are 0; NaN stays NaN
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// max(x, floor), but NaN stays NaN: fmaxf would return the floor
__device__ __forceinline__ float max_keep_nan(float x, float floor) { return x < floor ? floor : x; }

}  // namespace qla::cuda
