// Rounding to the 16-bit types, to nearest even, without help from the code under test.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace qla::reference {

inline float round_bf16(float x) {
  if (!std::isfinite(x)) return x;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}

inline float round_fp16(float x) {
  const float size = std::fabs(x);
  if (!(size < std::numeric_limits<float>::infinity())) return x;
  float rounded;
  if (size < 0x1p-14f) {
    rounded = (size + 0.5f) - 0.5f;  // subnormal halves are multiples of 2^-24, the spacing of floats just above 0.5
  } else {
    const uint32_t bits = std::bit_cast<uint32_t>(size);
    rounded = std::bit_cast<float>((bits + 0xFFFu + ((bits >> 13) & 1u)) & ~0x1FFFu);
    if (rounded > 65504.0f) rounded = std::numeric_limits<float>::infinity();
  }
  return std::copysign(rounded, x);
}

inline uint16_t bf16_bits(float x) {
  if (std::isnan(x)) return 0x7FC0;
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(round_bf16(x)) >> 16);
}
inline float bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t fp16_bits(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7E00;
  const float size = std::fabs(round_fp16(x));
  if (std::isinf(size)) return sign | 0x7C00;
  if (size < 0x1p-14f) return sign | static_cast<uint16_t>(size * 0x1p24f);
  const uint32_t bits = std::bit_cast<uint32_t>(size);
  return sign | static_cast<uint16_t>((bits >> 13) - (112u << 10));
}
inline float fp16_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  float size;
  if (exponent == 31)
    size = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  else
    size =
        exponent ? std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25) : std::ldexp(static_cast<float>(mantissa), -24);
  return bits & 0x8000 ? -size : size;
}

}  // namespace qla::reference
