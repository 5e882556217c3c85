#include "support/arena.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "support/dtype.hpp"

namespace qla::test {

int64_t TestTensor::elements() const {
  int64_t count = 1;
  for (const int64_t extent : shape_) count *= extent;
  return count;
}

qla_tensor TestTensor::view() const {
  qla_tensor view = {};
  if (!present()) return view;
  view.data = static_cast<char*>(arena_->blocks_[block_].device) + origin_;
  view.dtype = dtype_;
  view.ndim = static_cast<int32_t>(shape_.size());
  for (size_t axis = 0; axis < shape_.size(); ++axis) view.shape[axis] = shape_[axis], view.stride[axis] = stride_[axis];
  return view;
}

template <class Visit>
void TestTensor::each(Visit visit) const {
  each_row(static_cast<int>(shape_.size()), shape_.data(), stride_.data(),
           [&](int64_t first, int64_t offset, int64_t count, int64_t stride) {
             visit(first, origin_ + offset * size_of(dtype_), count, stride);
           });
}

void TestTensor::write(const std::vector<double>& values) {
  uint8_t* host = arena_->blocks_[block_].host.data();
  each(
      [&](int64_t first, int64_t at, int64_t count, int64_t stride) { store(host + at, dtype_, &values[first], count, stride); });
}

std::vector<double> TestTensor::read() const {
  std::vector<double> values(elements());
  const uint8_t* host = arena_->blocks_[block_].host.data();
  each([&](int64_t first, int64_t at, int64_t count, int64_t stride) { load(host + at, dtype_, &values[first], count, stride); });
  return values;
}

Arena::~Arena() {
  for (Block& block : blocks_) backend_.release(block.device);
}

int Arena::new_block(size_t bytes) {
  Block block;
  block.bytes = bytes + kGuard + kGuardBehind;
  block.device = backend_.allocate(block.bytes);
  block.host.assign(block.bytes, 0xFF);
  block.written.assign(block.bytes, 0);
  blocks_.push_back(std::move(block));
  return static_cast<int>(blocks_.size()) - 1;
}

int Arena::shared_block(size_t bytes) { return new_block(bytes); }

TestTensor Arena::view_in(int block, Role role, int32_t dtype, std::vector<int64_t> shape, std::vector<int64_t> strides,
                          int64_t origin) {
  TestTensor tensor;
  tensor.arena_ = this;
  tensor.block_ = block;
  tensor.dtype_ = dtype;
  tensor.shape_ = std::move(shape);
  tensor.stride_ = std::move(strides);
  tensor.origin_ = static_cast<int64_t>(kGuard) + origin * size_of(dtype);
  if (role == Role::kOutput) make_output(tensor);
  return tensor;
}

void Arena::make_output(const TestTensor& tensor) {
  uint8_t* written = blocks_[tensor.block_].written.data();
  const int64_t bytes = size_of(tensor.dtype_);
  tensor.each([&](int64_t, int64_t at, int64_t count, int64_t stride) {
    if (stride == 1) {
      std::memset(written + at, 1, count * bytes);
    } else {
      for (int64_t i = 0; i < count; ++i) std::memset(written + at + i * stride * bytes, 1, bytes);
    }
  });
}

TestTensor Arena::tensor(Role role, int32_t dtype, std::vector<int64_t> shape, std::vector<int64_t> strides) {
  if (strides.empty()) {
    strides.assign(shape.size(), 1);
    for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
  }
  int64_t lowest = 0, highest = 0;  // offsets of the extreme elements
  bool empty = false;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    empty |= shape[axis] == 0;
    const int64_t reach = (shape[axis] - 1) * strides[axis];
    (reach < 0 ? lowest : highest) += reach;
  }
  const int block = new_block(empty ? 0 : (highest - lowest + 1) * size_of(dtype));
  return view_in(block, role, dtype, std::move(shape), std::move(strides), empty ? 0 : -lowest);
}

void* Arena::scratch(size_t bytes) {
  const int block = new_block(bytes);
  std::memset(blocks_[block].written.data() + kGuard, 1, bytes);
  upload();
  return static_cast<char*>(blocks_[block].device) + kGuard;
}

void Arena::upload() {
  for (Block& block : blocks_) {
    if (!block.uploaded) backend_.upload(block.device, block.host.data(), block.bytes);
    block.uploaded = true;
  }
}

void Arena::freeze() {
  for (Block& block : blocks_) std::fill(block.written.begin(), block.written.end(), 0);
}

std::string Arena::fetch() {
  backend_.synchronize();
  std::ostringstream complaint;
  for (size_t index = 0; index < blocks_.size(); ++index) {
    Block& block = blocks_[index];
    std::vector<uint8_t> now(block.bytes);
    backend_.download(now.data(), block.device, block.bytes);
    const bool same = std::memcmp(now.data(), block.host.data(), block.bytes) == 0;
    for (size_t i = same ? block.bytes : 0; i < block.bytes; ++i)
      if (now[i] != block.host[i] && !block.written[i]) {
        complaint << "memory that is not an output changed: block " << index << " of " << block.bytes - kGuard - kGuardBehind
                  << " bytes, byte " << static_cast<int64_t>(i) - static_cast<int64_t>(kGuard) << "; ";
        break;
      }
    block.host = std::move(now);
  }
  return complaint.str();
}

}  // namespace qla::test
