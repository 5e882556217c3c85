// Workspace layout: one function describes the buffers, and runs twice, for the size query (base NULL) and to carve the pointers.
//
//   struct Buffers { ChunkRecord* table; float* vec; size_t bytes; };
//   Buffers lay_out(void* base, const Problem& p) {
//     Layout layout(base);
//     Buffers b;
//     b.table = layout.take<ChunkRecord>(p.chunk_slots());
//     b.vec = layout.take<float>(p.chunk_slots() * p.num_v_heads * 512);
//     b.bytes = layout.bytes();
//     return b;
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/status.hpp"

namespace qla::plan {

class Layout {
 public:
  static constexpr size_t kAlignment = 256;

  explicit Layout(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  // Room for `count` objects at a multiple of 256 bytes; NULL while only measuring, and for none. Throws when the sum leaves
  // size_t.
  template <typename T>
  T* take(int64_t count) {
    if (count <= 0) return nullptr;
    size_t size = 0;
    const bool overflow = __builtin_mul_overflow(static_cast<size_t>(count), sizeof(T), &size) || size > kMost - kAlignment ||
                          bytes_ > kMost - kAlignment - size;
    QLA_CHECK(!overflow, "workspace: expected a size below 2^62 bytes, got more for these shapes; split the call");
    char* const address = base_ ? base_ + bytes_ : nullptr;
    bytes_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(address);
  }

  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kMost = size_t{1} << 62;
  char* base_;
  size_t bytes_ = 0;
};

}  // namespace qla::plan
