#include "cpu/view.hpp"

#include <cmath>

namespace qla::cpu {
namespace {

float half_to_float(uint16_t x) {
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  const float sign = x & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? std::nanf("") : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024.0f + static_cast<float>(mantissa), exponent - 25)
                          : std::ldexp(static_cast<float>(mantissa), -24));
}

uint16_t float_to_half(float f) {
  const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  if (std::isnan(f)) return static_cast<uint16_t>(sign | 0x7E00);
  const float magnitude = std::fabs(f);
  if (magnitude == 0) return sign;
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00);
  int exponent;
  std::frexp(magnitude, &exponent);                                  // magnitude < 2^exponent
  const int unit = std::max(exponent - 11, -24);                     // the last bit's weight
  const float units = std::nearbyint(std::ldexp(magnitude, -unit));  // to nearest even
  if (unit == -24 && units < 1024.0f) return static_cast<uint16_t>(sign | static_cast<uint16_t>(units));
  const uint16_t bits =
      static_cast<uint16_t>(((unit + 25) << 10) + static_cast<int>(units) - 1024);  // a carry moves into the exponent
  return static_cast<uint16_t>(sign | bits);
}

}  // namespace

double load_scalar(int32_t dtype, const void* at) {
  if (dtype == QLA_FLOAT64) {
    double x;
    std::memcpy(&x, at, 8);
    return x;
  }
  float f;
  if (dtype == QLA_FLOAT32) {
    std::memcpy(&f, at, 4);
    return f;
  }
  uint16_t half;
  std::memcpy(&half, at, 2);
  if (dtype == QLA_FLOAT16) return half_to_float(half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  std::memcpy(&f, &bits, 4);
  return f;
}

void store_scalar(int32_t dtype, void* at, double value) {
  const float f = static_cast<float>(value);
  if (dtype == QLA_FLOAT64) {
    std::memcpy(at, &value, 8);
  } else if (dtype == QLA_FLOAT32) {
    std::memcpy(at, &f, 4);
  } else if (dtype == QLA_FLOAT16) {
    const uint16_t half = float_to_half(f);
    std::memcpy(at, &half, 2);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint16_t half = static_cast<uint16_t>(std::isnan(f) ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    std::memcpy(at, &half, 2);
  }
}

int64_t load_integer(const qla_tensor& tensor, int64_t index) {
  const int64_t at = index * tensor.stride[0];
  switch (tensor.dtype) {
    case QLA_INT64:
      return static_cast<const int64_t*>(tensor.data)[at];
    case QLA_INT32:
      return static_cast<const int32_t*>(tensor.data)[at];
    default:
      return static_cast<const uint8_t*>(tensor.data)[at];
  }
}

}  // namespace qla::cpu
