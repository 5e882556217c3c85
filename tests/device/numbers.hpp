// Numbers of a dtype in host memory of the device tests.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "qla/qla.h"

namespace qla::test {

inline uint16_t to_bits(double x, bool bf16) {
  uint16_t r;
  if (bf16) {
    __nv_bfloat16 b = __float2bfloat16(float(x));
    std::memcpy(&r, &b, 2);
  } else {
    __half b = __float2half(float(x));
    std::memcpy(&r, &b, 2);
  }
  return r;
}
inline double from_bits(uint16_t x, bool bf16) {
  if (bf16) {
    __nv_bfloat16 b;
    std::memcpy(&b, &x, 2);
    return __bfloat162float(b);
  }
  __half b;
  std::memcpy(&b, &x, 2);
  return __half2float(b);
}
inline double round16(double x, bool bf16) { return from_bits(to_bits(x, bf16), bf16); }

inline size_t dtype_size(int t) { return t == QLA_FLOAT64 ? 8 : t == QLA_FLOAT32 ? 4 : 2; }
inline void put(std::vector<uint8_t>& b, size_t i, int t, double x) {
  if (t == QLA_FLOAT64)
    std::memcpy(&b[i * 8], &x, 8);
  else if (t == QLA_FLOAT32) {
    float f = float(x);
    std::memcpy(&b[i * 4], &f, 4);
  } else {
    uint16_t u = to_bits(x, t == QLA_BFLOAT16);
    std::memcpy(&b[i * 2], &u, 2);
  }
}
inline double get(const std::vector<uint8_t>& b, size_t i, int t) {
  if (t == QLA_FLOAT64) {
    double x;
    std::memcpy(&x, &b[i * 8], 8);
    return x;
  }
  if (t == QLA_FLOAT32) {
    float x;
    std::memcpy(&x, &b[i * 4], 4);
    return x;
  }
  uint16_t u;
  std::memcpy(&u, &b[i * 2], 2);
  return from_bits(u, t == QLA_BFLOAT16);
}

}  // namespace qla::test
