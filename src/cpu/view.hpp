// The caller's tensors as the backend reads them, and the scalars among them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/kernels/table.hpp"
#include "qla/qla.h"

namespace qla::cpu {

inline int64_t element_size(int32_t dtype) {
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

double load_scalar(int32_t dtype, const void* at);  // any float dtype
void store_scalar(int32_t dtype, void* at, double value);
int64_t load_integer(const qla_tensor& tensor, int64_t index);  // of a 1-D int32, int64 or bool8 tensor

// Tokens of one head of a [B, T, heads, n] or [B, T, heads] tensor.
inline Rows token_rows(const qla_tensor& t, int64_t batch, int64_t token, int64_t head) {
  if (!t.data) return {nullptr, 0, t.dtype};
  const int64_t at = batch * t.stride[0] + token * t.stride[1] + head * t.stride[2];
  return {static_cast<char*>(t.data) + at * element_size(t.dtype), t.stride[1], t.dtype};
}

// One state of a [slots, HV, ., .] tensor.
inline Rows state_rows(const qla_tensor& t, int64_t slot, int64_t v_head) {
  if (!t.data) return {nullptr, 0, t.dtype};
  const int64_t at = slot * t.stride[0] + v_head * t.stride[1];
  return {static_cast<char*>(t.data) + at * element_size(t.dtype), t.stride[2], t.dtype};
}

inline char* row_address(const Rows& rows, int64_t row) {
  return static_cast<char*>(rows.data) + row * rows.stride * element_size(rows.dtype);
}
inline double load_at(const Rows& rows, int64_t row) { return load_scalar(rows.dtype, row_address(rows, row)); }
inline void store_at(const Rows& rows, int64_t row, double value) { store_scalar(rows.dtype, row_address(rows, row), value); }

// Zeroes `rows` rows of n elements: every float's zero is zero bytes.
inline void zero_rows(const Rows& dst, int64_t rows, int64_t n) {
  if (!dst.data) return;
  for (int64_t r = 0; r < rows; ++r) std::memset(row_address(dst, r), 0, static_cast<size_t>(n * element_size(dst.dtype)));
}

}  // namespace qla::cpu
