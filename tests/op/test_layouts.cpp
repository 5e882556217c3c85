// Views, state layouts and integer widths must not change a bit; huge strides must not wrap.
#include <sys/mman.h>

#include <memory>

#include "op/cases.hpp"
#include "support/op_test.hpp"

namespace qla::test {
namespace {

class Layouts : public OpTest {
 protected:
  Sample small(const char* recipe, int32_t dtype, std::vector<int64_t> cu = {}) const {
    Case c{.recipe = recipe, .name = "layout", .B = cu.empty() ? 2 : 1, .T = cu.empty() ? 100 : cu.back() + 5, .cu = cu};
    c.K = head_size(64), c.V = head_size(32);
    return sample_of(c, dtype);
  }
};
QLA_ON_EVERY_BACKEND(Layouts);

TEST_P(Layouts, BR45_int32_and_int64_boundaries) {
  const Sample s = small("BR45", plain_dtype(), {0, 30, 30, 99});
  const Values first = must_run(s, {.cu_dtype = QLA_INT32}).values;
  for (int repeat = 0; repeat < 2; ++repeat) {  // alternating in one process
    expect_bitwise(must_run(s, {.cu_dtype = QLA_INT64}).values, first, "int64 boundaries");
    expect_bitwise(must_run(s, {.cu_dtype = QLA_INT32}).values, first, "int32 boundaries");
  }
}

TEST_P(Layouts, BR56_views_equal_contiguous_tensors) {
  for (const int32_t dtype : dtypes())
    for (const auto& cu : {std::vector<int64_t>{}, std::vector<int64_t>{0, 37, 130}}) {
      const Sample s = small("BR56", dtype, cu);
      const Values expected = must_run(s).values;
      for (const Layout layout :
           {Layout::kFused, Layout::kGapped, Layout::kHeadMajor, Layout::kEverySecond, Layout::kBackwards}) {
        if (on_device() && layout == Layout::kBackwards) continue;
        expect_bitwise(must_run(s, {.layout = layout}).values, expected, "a view");
      }
    }
}

TEST_P(Layouts, BR56_expanded_beta) {
  Sample s = small("BR56", plain_dtype());
  for (size_t i = 0; i < s.in.beta.size(); ++i) s.in.beta[i] = s.in.beta[i - i % s.in.v_heads];
  expect_bitwise(must_run(s, {.expanded_beta = true}).values, must_run(s).values, "beta with stride 0");
}

TEST_P(Layouts, BR57_states_of_a_pool) {
  const Sample s = small("BR57", plain_dtype());
  const Values expected = must_run(s).values;
  for (const States states : {States::kPoolSlice, States::kEveryThird})
    expect_bitwise(must_run(s, {.states = states}).values, expected, "state views");
}

TEST_P(Layouts, BR57_transposed_states_are_refused_with_the_reason) {
  const Sample s = small("BR57", plain_dtype());
  const Result result = run(backend(), s, {.states = States::kTransposed});
  EXPECT_NE(result.status, QLA_OK);
  EXPECT_NE(result.error.find("initial_state"), std::string::npos) << result.error;
}

TEST_P(Layouts, BR58_state_layouts_agree_bitwise) {
  for (const int32_t dtype : dtypes())
    for (const Options& cut : {Options{}, uncut(), fixed(1)}) {
      const Sample s = small("BR58", dtype, {0, 37, 200});
      Options turned = cut;
      turned.extra_flags = QLA_FLAG_STATE_V_FIRST;
      expect_bitwise(must_run(s, turned).values, must_run(s, cut).values, "V-first and K-first states");
    }
}

TEST_P(Layouts, BR58_chained_in_each_layout) {
  Case c{.recipe = "BR58", .name = "chain", .T = 200};
  c.K = head_size(64), c.V = head_size(32);
  const Sample s = sample_of(c, plain_dtype());
  const Values a = run_chained(backend(), s, {77, 123}), b = run_chained(backend(), s, {77, 123}, v_first());
  expect_bitwise(a.o, b.o, "o");
  expect_bitwise(a.final_state, b.final_state, "final_state");
  EXPECT_FALSE(a.o.empty());
}

TEST_P(Layouts, BR58_a_state_of_the_other_layout_is_refused) {
  if (on_device()) GTEST_SKIP() << "K = V = 128 on the device: the shapes are the same";
  const Sample s = small("BR58", plain_dtype());
  for (const uint32_t flags : {0u, static_cast<uint32_t>(QLA_FLAG_STATE_V_FIRST)}) {
    const Result result = run(backend(), s, {.extra_flags = flags, .edit_forward = [](qla_gdn_forward_args& args) {
                                               std::swap(args.initial_state.shape[2], args.initial_state.shape[3]);
                                               args.initial_state.stride[2] = args.initial_state.shape[3];
                                             }});
    EXPECT_EQ(result.status, QLA_INVALID_ARGUMENT);
    EXPECT_NE(result.error.find("initial_state"), std::string::npos) << result.error;
  }
}

TEST_P(Layouts, D8_expanded_d_o_equals_a_full_one) {
  Sample s = small("D8", plain_dtype());
  s.in.d_o.assign(s.in.d_o.size(), 1.0);
  expect_bitwise(must_run(s, {.expanded_d_o = true}).values, must_run(s).values, "d_o with stride 0");
}

// [1, T, heads, dim] with a token stride of 2^22 elements over memory that exists only where it is touched.
class Sparse {
 public:
  static constexpr int64_t kStride = int64_t{1} << 22;
  Sparse(int32_t dtype, int64_t tokens, int64_t heads, int64_t dim) : dtype_(dtype), tokens_(tokens), heads_(heads), dim_(dim) {
    bytes_ = static_cast<size_t>(tokens * kStride * size_of(dtype));
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Sparse() {
    if (there()) munmap(data_, bytes_);
  }
  bool there() const { return data_ != MAP_FAILED; }
  qla_tensor view() const { return {data_, dtype_, 4, {1, tokens_, heads_, dim_}, {tokens_ * kStride, kStride, dim_, 1}}; }
  void write(const Numbers& x) {
    for (int64_t t = 0; t < tokens_; ++t) store(at(t), dtype_, &x[t * heads_ * dim_], heads_ * dim_, 1);
  }
  Numbers read() const {
    Numbers x(tokens_ * heads_ * dim_);
    for (int64_t t = 0; t < tokens_; ++t) load(at(t), dtype_, &x[t * heads_ * dim_], heads_ * dim_, 1);
    return x;
  }

 private:
  char* at(int64_t token) const { return static_cast<char*>(data_) + token * kStride * size_of(dtype_); }
  int32_t dtype_;
  int64_t tokens_, heads_, dim_;
  size_t bytes_;
  void* data_;
};

TEST_P(Layouts, BR53_offsets_beyond_two_to_the_31) {
  if (on_device()) GTEST_SKIP() << "the device's case, real tensors of that size: tests/python/test_long.py";
  Case c{.recipe = "BR53", .name = "sparse", .T = 600, .H = 1, .HV = 2, .K = 16, .V = 32};  // 600 * 2^22 = 1.17 * 2^31
  const Sample s = sample_of(c, QLA_BFLOAT16);
  const Values expected = must_run(s).values;
  Sparse q(s.dtype, 600, 1, 16), k(s.dtype, 600, 1, 16), v(s.dtype, 600, 2, 32), o(s.dtype, 600, 2, 32), d_o(s.dtype, 600, 2, 32);
  Sparse dq(s.dtype, 600, 1, 16), dk(s.dtype, 600, 1, 16), dv(s.dtype, 600, 2, 32);
  for (const Sparse* tensor : {&q, &k, &v, &o, &d_o, &dq, &dk, &dv})
    if (!tensor->there()) GTEST_SKIP() << "no 40 GB of address space here";
  q.write(s.in.q), k.write(s.in.k), v.write(s.in.v), d_o.write(s.in.d_o);
  Options options;
  options.edit_forward = [&](qla_gdn_forward_args& args) {
    args.q = q.view(), args.k = k.view(), args.v = v.view(), args.o = o.view();
  };
  options.edit_backward = [&](qla_gdn_backward_args& args) {
    args.q = q.view(), args.k = k.view(), args.v = v.view(), args.d_o = d_o.view();
    args.dq = dq.view(), args.dk = dk.view(), args.dv = dv.view();
  };
  Values got = must_run(s, options).values;
  got.o = o.read(), got.dq = dq.read(), got.dk = dk.read(), got.dv = dv.read();
  expect_bitwise(got, expected, "token stride 2^22");
}

}  // namespace
}  // namespace qla::test
