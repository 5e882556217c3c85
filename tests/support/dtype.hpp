// Numbers in and out of a tensor's bytes, with the reference's own rounding.
#pragma once

#include <cstdint>
#include <cstring>

#include "qla/qla.h"
#include "reference/rounding.hpp"

namespace qla::test {

inline int64_t size_of(int32_t dtype) {
  switch (dtype) {
    case QLA_FLOAT64:
    case QLA_INT64:
      return 8;
    case QLA_FLOAT32:
    case QLA_INT32:
      return 4;
    case QLA_BFLOAT16:
    case QLA_FLOAT16:
      return 2;
    default:
      return 1;
  }
}
inline const char* name_of(int32_t dtype) {
  static const char* const names[] = {"f64", "f32", "bf16", "f16", "i32", "i64", "bool", "u8"};
  return names[dtype];
}
inline bool is_16_bit(int32_t dtype) { return dtype == QLA_BFLOAT16 || dtype == QLA_FLOAT16; }

inline double round_to(double x, int32_t dtype) {
  switch (dtype) {
    case QLA_FLOAT64:
      return x;
    case QLA_BFLOAT16:
      return reference::round_bf16(static_cast<float>(x));
    case QLA_FLOAT16:
      return reference::round_fp16(static_cast<float>(x));
    default:
      return static_cast<float>(x);
  }
}

// One element as stored: encode and decode of each type, and rows of them.
template <class Raw, class Encode>
void store_row(void* to, int64_t stride, const double* x, int64_t count, Encode encode) {
  for (int64_t i = 0; i < count; ++i) {
    const Raw raw = encode(x[i]);
    std::memcpy(static_cast<char*>(to) + i * stride * static_cast<int64_t>(sizeof(Raw)), &raw, sizeof(Raw));
  }
}
template <class Raw, class Decode>
void load_row(const void* from, int64_t stride, double* x, int64_t count, Decode decode) {
  for (int64_t i = 0; i < count; ++i) {
    Raw raw;
    std::memcpy(&raw, static_cast<const char*>(from) + i * stride * static_cast<int64_t>(sizeof(Raw)), sizeof(Raw));
    x[i] = decode(raw);
  }
}

// `count` elements, `stride` elements apart
inline void store(void* to, int32_t dtype, const double* x, int64_t count, int64_t stride) {
  switch (dtype) {
    case QLA_FLOAT64:
      return store_row<double>(to, stride, x, count, [](double v) { return v; });
    case QLA_FLOAT32:
      return store_row<float>(to, stride, x, count, [](double v) { return static_cast<float>(v); });
    case QLA_BFLOAT16:
      return store_row<uint16_t>(to, stride, x, count, [](double v) { return reference::bf16_bits(static_cast<float>(v)); });
    case QLA_FLOAT16:
      return store_row<uint16_t>(to, stride, x, count, [](double v) { return reference::fp16_bits(static_cast<float>(v)); });
    case QLA_INT32:
      return store_row<int32_t>(to, stride, x, count, [](double v) { return static_cast<int32_t>(v); });
    case QLA_INT64:
      return store_row<int64_t>(to, stride, x, count, [](double v) { return static_cast<int64_t>(v); });
    default:
      return store_row<uint8_t>(to, stride, x, count, [](double v) { return static_cast<uint8_t>(v); });
  }
}
inline void load(const void* from, int32_t dtype, double* x, int64_t count, int64_t stride) {
  const auto as_is = [](auto raw) { return static_cast<double>(raw); };
  switch (dtype) {
    case QLA_FLOAT64:
      return load_row<double>(from, stride, x, count, as_is);
    case QLA_FLOAT32:
      return load_row<float>(from, stride, x, count, as_is);
    case QLA_BFLOAT16:
      return load_row<uint16_t>(from, stride, x, count, reference::bf16_value);
    case QLA_FLOAT16:
      return load_row<uint16_t>(from, stride, x, count, reference::fp16_value);
    case QLA_INT32:
      return load_row<int32_t>(from, stride, x, count, as_is);
    case QLA_INT64:
      return load_row<int64_t>(from, stride, x, count, as_is);
    default:
      return load_row<uint8_t>(from, stride, x, count, as_is);
  }
}

// visit(first element's number, offset in elements, count, stride) for each row along the last axis of a strided view
template <class Visit>
void each_row(int ndim, const int64_t* shape, const int64_t* strides, Visit visit) {
  int64_t index[4] = {0, 0, 0, 0}, rows = 1, offset = 0;
  for (int axis = 0; axis + 1 < ndim; ++axis) rows *= shape[axis];
  const int64_t count = ndim ? shape[ndim - 1] : 1, stride = ndim ? strides[ndim - 1] : 1;
  for (int64_t row = 0; count > 0 && row < rows; ++row) {
    visit(row * count, offset, count, stride);
    for (int axis = ndim - 2; axis >= 0; --axis) {
      offset += strides[axis];
      if (++index[axis] < shape[axis]) break;
      offset -= strides[axis] * shape[axis];
      index[axis] = 0;
    }
  }
}

}  // namespace qla::test
