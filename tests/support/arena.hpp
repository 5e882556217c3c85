// Tensors for one call, each inside a larger allocation: 4 KiB of 0xFF bytes (NaN in every float type) on both sides and in every
// gap. After the call nothing but the elements of outputs may have changed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/backend.hpp"

namespace qla::test {

struct Block {
  size_t bytes = 0;              // guards included
  std::vector<uint8_t> host;     // what was uploaded, then (after fetch) what came back
  std::vector<uint8_t> written;  // one flag a byte: an element of an output lies here
  void* device = nullptr;
  bool uploaded = false;
};

class Arena;

// A strided view in a block. Strides in elements; any sign. Element [0, 0, ..] is at `origin` elements after the block's first
// byte past the guard.
class TestTensor {
 public:
  TestTensor() = default;
  bool present() const { return block_ >= 0; }
  int64_t elements() const;
  const std::vector<int64_t>& shape() const { return shape_; }
  int32_t dtype() const { return dtype_; }
  qla_tensor view() const;
  void write(const std::vector<double>& values);  // row-major order; before the upload
  std::vector<double> read() const;               // after the fetch

 private:
  friend class Arena;
  template <class Visit>
  void each(Visit visit) const;
  Arena* arena_ = nullptr;
  int block_ = -1;
  int32_t dtype_ = 0;
  std::vector<int64_t> shape_, stride_;
  int64_t origin_ = 0;  // bytes into the block
};

enum class Role { kInput, kOutput };

class Arena {
 public:
  static constexpr size_t kGuard = 4096, kGuardBehind = 65536;  // behind: whole rows that a missing tail mask would write

  explicit Arena(const Backend& backend) : backend_(backend) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // strides empty: contiguous. An output's elements are poisoned with NaN.
  TestTensor tensor(Role role, int32_t dtype, std::vector<int64_t> shape, std::vector<int64_t> strides = {});
  // A view in a block that several tensors share: elements and origin counted in the view's dtype.
  int shared_block(size_t bytes);
  TestTensor view_in(int block, Role role, int32_t dtype, std::vector<int64_t> shape, std::vector<int64_t> strides,
                     int64_t origin);
  void* scratch(size_t bytes);  // guarded, NaN-filled, may be written at will

  void upload();        // blocks not uploaded yet; call when their inputs are written
  std::string fetch();  // copies back; "" or what was written that must not be
  void freeze();        // from now on nothing that exists may change: the outputs of forward are inputs of backward
  void make_output(const TestTensor& tensor);  // an input that the call updates in place

 private:
  friend class TestTensor;
  int new_block(size_t bytes);
  const Backend& backend_;
  std::vector<Block> blocks_;
};

}  // namespace qla::test
