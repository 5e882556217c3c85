// What is refused, how, and that nothing was touched; dtype mixes in one process; the parts handed out for training.
#include <cmath>

#include "op/cases.hpp"
#include "reference/chunk_form.hpp"
#include "support/op_test.hpp"

namespace qla::test {
namespace {

class Arguments : public OpTest {
 protected:
  Sample packed_sample() const {
    Case c{.recipe = "BR44", .name = "boundaries", .T = 16, .cu = {0, 4, 8, 16}};
    c.K = c.V = head_size(16);
    return sample_of(c, plain_dtype());
  }
  // refused with the argument's name, outputs untouched (still NaN), and the next valid call works
  void expect_refused(const Sample& s, const Options& options, const std::string& argument,
                      qla_status status = QLA_INVALID_ARGUMENT) const {
    const Result result = run(backend(), s, options);
    EXPECT_EQ(result.status, status) << qla_status_name(result.status) << ": " << result.error;
    EXPECT_NE(result.error.find(argument), std::string::npos) << result.error;
    EXPECT_NE(result.where, "memory") << result.error;
    for (const double x : result.values.o) ASSERT_TRUE(std::isnan(x)) << "o was written";
    must_run(packed_sample());
  }
};
QLA_ON_EVERY_BACKEND(Arguments);

TEST_P(Arguments, BR44_boundaries_that_make_no_sense) {
  const Sample s = packed_sample();
  const std::vector<int64_t> wrong[] = {{0, 12, 8, 16}, {1, 4, 8, 16},  {0, 4, 8, 17},
                                        {0, 4, -8, 16}, {-1, 4, 8, 16}, {0, 4, 8, int64_t{1} << 40}};
  for (const std::vector<int64_t>& cu : wrong)
    for (const int32_t type : {QLA_INT32, QLA_INT64}) {
      if (type == QLA_INT32 && cu.back() > INT32_MAX) continue;
      Options options{.cu_dtype = type};
      options.cu_override = cu;
      if (on_device()) {  // values are not looked at without the flag; nothing outside the outputs may be written
        const Result result = run(backend(), s, options);
        EXPECT_NE(result.where, "memory") << result.error;
        options.extra_flags = QLA_FLAG_VALIDATE;
      }
      expect_refused(s, options, "cu_seqlens");
    }
}

TEST_P(Arguments, BR44_boundaries_of_a_wrong_kind) {
  const Sample s = packed_sample();
  const std::function<void(qla_tensor&)> wrong[] = {
      [](qla_tensor& cu) { cu.dtype = QLA_FLOAT32; }, [](qla_tensor& cu) { cu.ndim = 2, cu.shape[1] = 1, cu.stride[1] = 1; },
      [](qla_tensor& cu) { cu.shape[0] = 0; }, [](qla_tensor& cu) { cu.shape[0] = 1; }};
  for (const auto& spoil : wrong)
    expect_refused(s, {.edit_forward = [&](qla_gdn_forward_args& args) { spoil(args.cu_seqlens); }}, "");
  expect_refused(s, {.edit_forward = [](qla_gdn_forward_args& args) { args.initial_state.shape[0] = 2; }}, "initial_state");
  Case c{.recipe = "BR44", .name = "batch", .B = 2, .T = 8};
  c.K = c.V = head_size(16);
  const int32_t cu[] = {0, 8, 16};
  expect_refused(sample_of(c, plain_dtype()),
                 {.edit_forward =
                      [&](qla_gdn_forward_args& args) {
                        args.cu_seqlens = {const_cast<int32_t*>(cu), QLA_INT32, 1, {3}, {1}};
                      }},
                 "cu_seqlens");
}

TEST_P(Arguments, BR56_what_tensor_copies_cannot_address) {
  if (!on_device()) GTEST_SKIP() << "the CPU takes any address and stride";
  const Sample s = packed_sample();
  const std::pair<std::string, qla_tensor qla_gdn_forward_args::*> inputs[] = {
      {"q:", &qla_gdn_forward_args::q}, {"k:", &qla_gdn_forward_args::k}, {"v:", &qla_gdn_forward_args::v}};
  for (const auto& [name, input] : inputs) {
    const auto spoil = [&](int64_t bytes, int axis, int64_t elements) {
      return Options{.edit_forward = [=, at = input](qla_gdn_forward_args& args) {
        qla_tensor& t = args.*at;
        t.data = static_cast<char*>(t.data) + bytes;
        t.stride[axis] += elements;
      }};
    };
    expect_refused(s, spoil(2, 0, 0), name, QLA_NOT_SUPPORTED);
    for (const int axis : {1, 2}) expect_refused(s, spoil(0, axis, 4), name, QLA_NOT_SUPPORTED);  // 8 bytes
    expect_refused(s, spoil(0, 1, -4096), name, QLA_NOT_SUPPORTED);                               // tokens in falling addresses
  }
}

TEST_P(Arguments, BR48_heads_that_do_not_divide) {
  for (const auto& [H, HV] : {std::pair<int64_t, int64_t>{3, 4}, {4, 2}, {2, 3}}) {
    Case c{.recipe = "BR48", .name = "heads", .T = 8, .H = H, .HV = HV};
    c.K = c.V = head_size(16);
    expect_refused(sample_of(c, plain_dtype()), {}, "");
  }
}

TEST_P(Arguments, BR49_head_sizes_that_no_kernel_serves) {
  const std::pair<int64_t, int64_t> sizes[] = {{257, 16}, {16, 257}, {512, 512}, {96, 128}, {128, 64}};
  for (const auto& [K, V] : sizes) {
    if (!on_device() && K <= 256 && V <= 256) continue;
    Case c{.recipe = "BR49", .name = "size", .T = 8, .H = 1, .HV = 1, .K = K, .V = V};
    expect_refused(sample_of(c, plain_dtype()), {}, "", QLA_NOT_SUPPORTED);
  }
}

TEST_P(Arguments, BR50_refused_before_any_launch) {
  Case c{.recipe = "BR50", .name = "K 256 V 512", .T = 64, .H = 1, .HV = 1, .K = 256, .V = 512};
  expect_refused(sample_of(c, plain_dtype()), {}, "", QLA_NOT_SUPPORTED);
}

TEST_P(Arguments, BR62_scale_zero_is_zero_and_nan_is_the_default) {
  Case c{.recipe = "BR62", .name = "scale", .T = 70};
  c.K = c.V = head_size(64);
  Sample s = sample_of(c, plain_dtype());
  const Values by_default = must_run(s).values;
  s.default_scale = false;
  expect_bitwise(must_run(s).values, by_default, "scale K^-0.5 and the default");
  s.in.scale = 0;
  for (const double x : must_run(s).values.o) ASSERT_EQ(x, 0.0);
}

// One process, random mixes: nothing made for one combination serves another.
TEST_P(Arguments, BR67_random_mixes_in_one_process) {
  Random random(1067);
  const std::vector<int32_t> tensors =
      on_device() ? std::vector<int32_t>{kBf16, kFp16} : std::vector<int32_t>{kBf16, kFp16, kF32, kF64};
  const int32_t sides[] = {kF32, kBf16, kFp16};
  const std::pair<int64_t, int64_t> heads[] = {{1, 1}, {1, 4}, {2, 4}, {3, 3}};
  for (int call = 0; call < 60; ++call) {
    Case c{.recipe = "BR67", .name = "mix " + std::to_string(call), .T = random.integer(1, 150)};
    c.H = heads[call % 4].first, c.HV = heads[call % 4].second;
    c.K = head_size(16 * random.integer(1, 4)), c.V = head_size(16 * random.integer(1, 4));
    c.g_dtype = sides[random.integer(0, 2)], c.beta_dtype = sides[random.integer(0, 2)],
    c.state_dtype = sides[random.integer(0, 2)];
    c.h0 = random.uniform() < 0.5, c.dht = random.uniform() < 0.5;
    if (random.uniform() < 0.5) c.cu = {0, c.T / 3, c.T};
    Options options{.name = "mix"};
    if (random.uniform() < 0.5) options.extra_flags = QLA_FLAG_STATE_V_FIRST;
    if (random.uniform() < 0.5) options.cu_dtype = QLA_INT64;
    c.calls = {options};
    expect_case(c, tensors[random.integer(0, static_cast<int64_t>(tensors.size()) - 1)]);
  }
}

// What forward hands out for training and for the low-level functions is what its tag says.
TEST_P(Arguments, BR08_parts_and_snapshots) {
  for (const int32_t dtype : on_device() ? std::vector<int32_t>{kBf16, kFp16} : std::vector<int32_t>{kF32, kF64, kBf16}) {
    Case c{.recipe = "BR08", .name = "parts", .T = 200, .cu = {0, 70, 70, 190}};
    c.K = head_size(32), c.V = head_size(16);
    const Sample s = sample_of(c, dtype);
    const Result result = must_run(s, {.backward = false, .parts = true});
    const reference::ChunkParts parts = reference::chunk_parts(s.in);
    const double limit = is_16_bit(dtype) ? 5e-3 : limits::relative(dtype, false, false);
    EXPECT_LE(relative_error(result.g_cumsum, parts.g_cumsum), is_16_bit(dtype) ? 1e-6 : limit);
    EXPECT_LE(relative_error(result.h, parts.h), limit);
    // columns past a sequence's end mean nothing
    const auto valid = [&](const Numbers& x) {
      Numbers out;
      for (int64_t n = 0; n < s.num_seqs(); ++n)
        for (int64_t t = s.in.bos[n]; t < s.in.eos[n]; ++t)
          for (int64_t i = 0; i < s.in.v_heads; ++i)
            for (int64_t j = 0; j <= (t - s.in.bos[n]) % 64; ++j) out.push_back(x[(t * s.in.v_heads + i) * 64 + j]);
      return out;
    };
    EXPECT_LE(relative_error(valid(result.a_inv), valid(parts.a_inv)), limit);
    EXPECT_LE(relative_error(valid(result.a_gated), valid(parts.a_gated)), limit);
  }
}

TEST_P(Arguments, BR46_checkpoints_are_the_states_on_the_way) {
  Case c{.recipe = "BR46", .name = "checkpoints", .T = 400, .cu = {0, 130, 130, 390}};
  c.K = c.V = head_size(32);
  const Sample s = sample_of(c, plain_dtype());
  for (const uint32_t flags : {0u, static_cast<uint32_t>(QLA_FLAG_STATE_V_FIRST)}) {
    const Result result = run(backend(), s, {.extra_flags = flags, .backward = false, .checkpoint_every = 64});
    ASSERT_TRUE(result.ok()) << result.error;
    const int64_t size = s.in.v_heads * s.in.state_size();
    int64_t at = 0;
    for (const int64_t n : {0, 2})
      for (int64_t end = 64; end <= s.in.eos[n] - s.in.bos[n]; end += 64, ++at) {
        Sample part = tokens_of(sequence_of(s, n), 0, end);
        const Numbers truth = truth_of(part, false).final_state;
        const Numbers got(result.checkpoints.begin() + at * size, result.checkpoints.begin() + (at + 1) * size);
        EXPECT_LE(relative_error(got, truth), limits::relative(s.dtype, false, false)) << "sequence " << n << " after " << end;
      }
    EXPECT_EQ(at * size, static_cast<int64_t>(result.checkpoints.size()));
  }
}

}  // namespace
}  // namespace qla::test
