// 16-bit element types: packing two floats into a register (round to nearest even) and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace qla::cuda {

// low half = a, high half = b
template <typename T>
__device__ __forceinline__ uint32_t pack(float a, float b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 r = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(r);
  } else {
    static_assert(std::is_same_v<T, __half>);
    const __half2 r = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(r);
  }
}
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
  } else {
    static_assert(std::is_same_v<T, __half>);
    return __half22float2(reinterpret_cast<const __half2&>(x));
  }
}
template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(x);
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else
    return T(x);
}
template <typename T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(x);
  else if constexpr (std::is_same_v<T, __half>)
    return __half2float(x);
  else
    return float(x);
}

}  // namespace qla::cuda
