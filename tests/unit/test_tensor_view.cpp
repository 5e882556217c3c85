// core/tensor_view: overlap is decided exactly for views of one buffer, against a byte-by-byte oracle.
#include "core/tensor_view.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace qla {
namespace {

qla_tensor view(char* data, int32_t dtype, std::vector<int64_t> shape, std::vector<int64_t> stride) {
  qla_tensor t{};
  t.data = data;
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) t.shape[i] = shape[i], t.stride[i] = stride[i];
  return t;
}

std::vector<const char*> element_addresses(const qla_tensor& t) {
  std::vector<const char*> addresses{static_cast<const char*>(t.data)};
  for (int32_t axis = 0; axis < t.ndim; ++axis) {
    std::vector<const char*> next;
    for (const char* base : addresses)
      for (int64_t i = 0; i < t.shape[axis]; ++i) next.push_back(base + i * t.stride[axis] * dtype_size(t.dtype));
    addresses = next;
  }
  return addresses;
}

std::set<const char*> bytes(const qla_tensor& t) {
  std::set<const char*> all;
  for (const char* address : element_addresses(t))
    for (int64_t b = 0; b < dtype_size(t.dtype); ++b) all.insert(address + b);
  return all;
}

TEST(TensorView, InterleavedHeadsOfOneProjectionDoNotOverlap) {
  static char buffer[1 << 16];
  // [B=2, T=5, 3 x H=2 x K=8] fp32: q, k, v side by side in every token.
  const auto part = [&](int64_t index) { return view(buffer + index * 2 * 8 * 4, QLA_FLOAT32, {2, 5, 2, 8}, {240, 48, 8, 1}); };
  EXPECT_FALSE(overlapping(part(0), part(1)));
  EXPECT_FALSE(overlapping(part(2), part(0)));
  EXPECT_TRUE(overlapping(part(1), part(1)));
  EXPECT_TRUE(
      overlapping(part(0), view(buffer + 4 * 15, QLA_FLOAT32, {2, 5, 2, 8}, {240, 48, 8, 1})));  // one element into the next head
}

TEST(TensorView, PoolSlotsOfOneBuffer) {
  static char buffer[1 << 16];
  const qla_tensor even = view(buffer, QLA_BFLOAT16, {4, 2, 3, 8}, {96, 24, 8, 1});
  const qla_tensor odd = view(buffer + 48 * 2, QLA_BFLOAT16, {4, 2, 3, 8}, {96, 24, 8, 1});
  EXPECT_FALSE(overlapping(even, odd));
  EXPECT_TRUE(overlapping(even, view(buffer, QLA_UINT8, {8 * 96}, {1})));
}

TEST(TensorView, SelfOverlap) {
  char buffer[256];
  EXPECT_FALSE(self_overlapping(view(buffer, QLA_FLOAT32, {2, 3, 4}, {12, 4, 1})));
  EXPECT_FALSE(self_overlapping(view(buffer, QLA_FLOAT32, {4, 3, 2}, {1, 4, 12})));
  EXPECT_FALSE(self_overlapping(view(buffer, QLA_FLOAT32, {1, 3}, {0, 1})));  // the stride of a single row does not matter
  EXPECT_TRUE(self_overlapping(view(buffer, QLA_FLOAT32, {2, 3}, {0, 1})));
  EXPECT_TRUE(self_overlapping(view(buffer, QLA_FLOAT32, {2, 3}, {2, 1})));
}

TEST(TensorView, RandomViewsAgreeWithByteOracle) {
  std::mt19937 random(7);
  std::vector<char> buffer(1 << 14);
  const auto pick = [&](int least, int most) { return std::uniform_int_distribution<int>(least, most)(random); };
  int seen[2] = {0, 0};
  for (int round = 0; round < 3000; ++round) {
    qla_tensor pair[2];
    for (qla_tensor& t : pair) {
      std::vector<int64_t> shape, stride;
      for (int axis = pick(1, 4); axis > 0; --axis) shape.push_back(pick(1, 4)), stride.push_back(pick(-6, 12));
      const int32_t dtypes[] = {QLA_FLOAT64, QLA_FLOAT32, QLA_BFLOAT16, QLA_UINT8};
      t = view(buffer.data() + (1 << 13) + pick(-64, 64), dtypes[pick(0, 3)], shape, stride);
    }
    const std::set<const char*> a = bytes(pair[0]), b = bytes(pair[1]);
    bool shared = false;
    for (const char* address : a) shared |= b.count(address) != 0;
    ASSERT_EQ(overlapping(pair[0], pair[1]), shared) << "round " << round;
    ++seen[shared];
    for (const qla_tensor& t : pair) {  // one-sided: a view said to be free of self-overlap is
      const std::vector<const char*> addresses = element_addresses(t);
      if (!self_overlapping(t)) {
        ASSERT_EQ(std::set<const char*>(addresses.begin(), addresses.end()).size(), addresses.size()) << "round " << round;
      }
    }
  }
  EXPECT_GT(seen[0], 200);
  EXPECT_GT(seen[1], 200);
}

TEST(TensorView, SpanRefusesOverflow) {
  char buffer[8];
  ByteSpan span;
  EXPECT_FALSE(byte_span(view(buffer, QLA_FLOAT64, {1 << 20, 2}, {INT64_MAX / 4, 1}), &span));
  EXPECT_TRUE(byte_span(view(buffer, QLA_FLOAT64, {3, 2}, {-2, 1}), &span));
  EXPECT_EQ(span.begin, -32);
  EXPECT_EQ(span.end, 16);
  EXPECT_TRUE(byte_span(view(buffer, QLA_FLOAT64, {0, 2}, {INT64_MAX, INT64_MAX}), &span));
  EXPECT_EQ(span.end, 0);
}

TEST(TensorView, AlignedRowsLooksAtStridesOfRealAxesOnly) {
  alignas(16) char buffer[64];
  EXPECT_TRUE(aligned_rows(view(buffer, QLA_BFLOAT16, {1, 2, 8}, {3, 8, 1}), 16));
  EXPECT_FALSE(aligned_rows(view(buffer, QLA_BFLOAT16, {2, 2, 8}, {3, 8, 1}), 16));
  EXPECT_FALSE(aligned_rows(view(buffer + 2, QLA_BFLOAT16, {1, 1, 8}, {8, 8, 1}), 16));
}

}  // namespace
}  // namespace qla
