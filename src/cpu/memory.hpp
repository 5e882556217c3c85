// Host memory of the backend: aligned for every vector width, OUT_OF_MEMORY in place of bad_alloc, not cleared.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <utility>

#include "core/status.hpp"

namespace qla::cpu {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t count) { resize(count); }
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() { std::free(data_); }

  // Contents are lost; memory is kept where it suffices.
  void resize(size_t count) {
    if (count <= size_) return;
    std::free(data_);
    size_ = 0;
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (!data_)
      throw Error(QLA_OUT_OF_MEMORY,
                  concat("host memory: expected ", bytes, " bytes, got none; free memory or use fewer threads"));
    size_ = count;
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

// Hands out 64-byte aligned pieces of one block; with a null base it only counts.
template <class T>
class Carver {
 public:
  explicit Carver(T* base) : base_(base) {}
  T* take(int64_t count) {
    T* piece = base_ ? base_ + used_ : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * (64 / static_cast<int64_t>(sizeof(T)));
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  T* base_;
  int64_t used_ = 0;
};

}  // namespace qla::cpu
