// Questions asked of a qla_tensor. All of them expect a view whose ndim is in 1..4 unless they say otherwise.
#pragma once

#include <cstdint>
#include <string>

#include "core/dtype.hpp"
#include "qla/qla.h"

namespace qla {

inline bool present(const qla_tensor& t) { return t.data != nullptr; }

inline int64_t numel(const qla_tensor& t) {  // 1 for ndim == 0
  int64_t count = 1;
  for (int32_t i = 0; i < t.ndim; ++i) count *= t.shape[i];
  return count;
}

// A stride matters only where the axis has more than one element.
inline bool last_contiguous(const qla_tensor& t) { return t.shape[t.ndim - 1] <= 1 || t.stride[t.ndim - 1] == 1; }

inline bool contiguous(const qla_tensor& t) {
  int64_t expected = 1;
  for (int32_t i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] > 1 && t.stride[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

inline bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Base address and every stride of an axis with more than one element (the last excepted): what bulk copies need.
inline bool aligned_rows(const qla_tensor& t, int64_t bytes) {
  if (!aligned(t.data, static_cast<uintptr_t>(bytes))) return false;
  for (int32_t i = 0; i + 1 < t.ndim; ++i)
    if (t.shape[i] > 1 && t.stride[i] * dtype_size(t.dtype) % bytes != 0) return false;
  return true;
}

std::string shape_string(const qla_tensor& t);  // "[2, 128, 4, 64]"; safe for any ndim
std::string stride_string(const qla_tensor& t);

// Bytes the view touches, [begin, end), relative to its data pointer; false on overflow. A view without elements touches none.
struct ByteSpan {
  int64_t begin = 0, end = 0;
};
bool byte_span(const qla_tensor& t, ByteSpan* span);

// True when two different elements of the view may share memory: an axis whose stride is less than what the axes inside it cover.
bool self_overlapping(const qla_tensor& t);

// True when some byte belongs to both views. Decided exactly for views of one buffer (slices, permutations, interleaved heads);
// for contrived strides the search gives up after a fixed number of steps and answers false.
bool overlapping(const qla_tensor& a, const qla_tensor& b);

}  // namespace qla
