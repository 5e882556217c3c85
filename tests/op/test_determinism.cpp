// The same bits: again, with other threads, in other company, on other shards.
#include <algorithm>
#include <thread>

#include "op/cases.hpp"
#include "support/op_test.hpp"

namespace qla::test {
namespace {

class Determinism : public OpTest {};
QLA_ON_EVERY_BACKEND(Determinism);

// value heads [from, to) with their q/k heads
Sample heads_of(const Sample& s, int64_t from, int64_t to) {
  Sample part = s;
  const reference::Inputs& in = s.in;
  const int64_t group = in.group();
  part.in.k_heads = (to - from) / group, part.in.v_heads = to - from;
  const auto pick = [](const Numbers& x, int64_t heads, int64_t width, int64_t first, int64_t last) {
    Numbers out;
    for (size_t row = 0; row < x.size(); row += heads * width)
      out.insert(out.end(), x.begin() + row + first * width, x.begin() + row + last * width);
    return out;
  };
  part.in.q = pick(in.q, in.k_heads, in.k_dim, from / group, to / group);
  part.in.k = pick(in.k, in.k_heads, in.k_dim, from / group, to / group);
  part.in.v = pick(in.v, in.v_heads, in.v_dim, from, to);
  part.in.d_o = pick(in.d_o, in.v_heads, in.v_dim, from, to);
  part.in.g = pick(in.g, in.v_heads, 1, from, to);
  part.in.beta = pick(in.beta, in.v_heads, 1, from, to);
  part.in.initial_state = pick(in.initial_state, in.v_heads, in.state_size(), from, to);
  part.in.d_final_state = pick(in.d_final_state, in.v_heads, in.state_size(), from, to);
  return part;
}

TEST_P(Determinism, BR68_repeats_with_two_inputs_in_turn) {
  for (const int32_t dtype : dtypes())
    for (const int64_t T : {1024, 1000}) {
      Case c{.recipe = "BR68", .name = "repeat", .T = T};
      c.K = c.V = head_size(32);
      const Sample a = sample_of(c, dtype);
      c.recipe = "BR1068";
      const Sample b = sample_of(c, dtype);
      const Values first = must_run(a).values, second = must_run(b).values;
      for (int repeat = 0; repeat < 20 && !HasFailure(); ++repeat) {
        expect_bitwise(must_run(a).values, first, "repeat of the first");
        expect_bitwise(must_run(b).values, second, "repeat of the second");
      }
      if (backend().serves_backward()) expect_values(c, a, {}, first, truth_of(a), emulations_of(a, true, backend().on_device()));
    }
}

TEST_P(Determinism, BR68_any_number_of_threads) {
  if (on_device()) GTEST_SKIP() << "threads are the CPU's";
  for (const bool forget : {true, false}) {
    Case c{.recipe = "BR68",
           .name = "threads",
           .T = 1500,
           .cu = {0, 3, 1400, 1500},
           .H = 1,
           .HV = 2,
           .K = 32,
           .V = 48,
           .gate = forget ? gates::soft() : gates::zero()};
    const Sample s = sample_of(c, kF32);
    for (Options options : {Options{}, uncut(), merged(2), fixed(3)}) {
      options.threads = 1;
      const Values one = must_run(s, options).values;
      for (const int32_t threads : {2, 3, 7}) {
        options.threads = threads;
        expect_bitwise(must_run(s, options).values, one, "other number of threads");
      }
    }
  }
}

TEST_P(Determinism, BR72_alone_and_in_company) {
  Case c{.recipe = "BR72", .name = "batch of 63", .H = 1, .HV = 2};
  c.K = c.V = head_size(32);
  Random random(2072);
  for (const size_t position : {0, 30, 61}) {
    std::vector<int64_t> lengths;
    for (size_t i = 0; i < 62; ++i) lengths.push_back(random.integer(1, 100));
    lengths.insert(lengths.begin() + position, 777);
    c.cu = {0};
    for (const int64_t length : lengths) c.cu.push_back(c.cu.back() + length);
    c.T = c.cu.back();
    const Sample packed = sample_of(c, plain_dtype()), alone = sequence_of(packed, static_cast<int64_t>(position));
    const Options invariant{.name = "batch invariant", .extra_flags = QLA_FLAG_BATCH_INVARIANT};
    const Values all = must_run(packed, invariant).values, one = must_run(alone, invariant).values;
    const int64_t bos = packed.in.bos[position], states = packed.in.v_heads * packed.in.state_size();
    for (const Field& field : fields()) {
      const Numbers &x = all.*field.member, &y = one.*field.member;
      if (y.empty()) continue;
      const int64_t width = field.is_state ? states : static_cast<int64_t>(y.size()) / 777,
                    from = field.is_state ? static_cast<int64_t>(position) : bos;
      expect_bitwise({x.begin() + from * width, x.begin() + from * width + static_cast<int64_t>(y.size())}, y, field.name);
    }
  }
}

TEST_P(Determinism, BR73_heads_on_one_or_on_many_shards) {
  if (on_device()) GTEST_SKIP() << "63 calls with 34,180 tokens, minutes of the host's: tests/python/test_sequences.py";
  Case c{.recipe = "BR73", .name = "shards", .H = 16, .HV = 16, .calls = {}};
  c.K = c.V = 8;
  c.cu = {0, 988, 5084, 6020, 10116};
  c.T = c.cu.back();
  const Sample s = sample_of(c, plain_dtype());
  for (const Options& plan : {uncut(), fixed(8), Options{}}) {
    Options options = plan;
    options.backward = false;
    const Values whole = must_run(s, options).values;
    for (const int64_t shard : {4, 1}) {
      Numbers o(whole.o.size());
      for (int64_t from = 0; from < 16; from += shard) {
        const Values part = must_run(heads_of(s, from, from + shard), options).values;
        const int64_t width = shard * c.V;
        for (int64_t t = 0; t < c.T; ++t) std::copy_n(part.o.begin() + t * width, width, o.begin() + (t * 16 + from) * c.V);
      }
      if (plan.cp_mode == QLA_CP_AUTO) {  // the plan may depend on the number of heads; the numbers hardly
        EXPECT_LE(relative_error(o, whole.o), 2e-3);
      } else {
        expect_bitwise(o, whole.o, plan.name.c_str());
      }
    }
  }
}

TEST_P(Determinism, BR74_group_sums_repeat) {
  Case c{.recipe = "BR74", .name = "group of 8", .T = 300, .H = 1, .HV = 8};
  c.K = c.V = head_size(32);
  const Sample s = sample_of(c, plain_dtype());
  const Values first = must_run(s).values;
  for (int repeat = 0; repeat < 10; ++repeat) expect_bitwise(must_run(s).values, first, "repeat");
}

TEST_P(Determinism, BR80_calls_from_several_threads) {
  std::vector<Sample> samples;
  std::vector<Values> alone, together(4);
  for (int i = 0; i < 4; ++i) {
    Case c{.recipe = "BR80", .name = "threads", .T = 200 + 31 * i};
    c.K = c.V = head_size(32);
    samples.push_back(sample_of(c, plain_dtype()));
    alone.push_back(must_run(samples.back()).values);
  }
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) callers.emplace_back([&, i] { together[i] = run(backend(), samples[i]).values; });
    for (std::thread& caller : callers) caller.join();
    for (int i = 0; i < 4; ++i) expect_bitwise(together[i], alone[i], "beside three others");
  }
}

TEST_P(Determinism, D10_backward_of_what_was_saved_or_recomputed) {
  Case c{.recipe = "D10", .name = "recompute", .T = 300, .keys = Keys::kRaw3, .qk_l2norm = true};
  c.K = c.V = head_size(32);
  const Sample s = sample_of(c, plain_dtype());
  const Values first = must_run(s).values;
  expect_bitwise(must_run(s).values, first, "again");
  const Values again = must_run(s, recomputed()).values;
  const double limit = is_16_bit(s.dtype) ? 2e-3 : 1e-6;
  for (const Field& field : fields()) EXPECT_LE(relative_error(again.*field.member, first.*field.member), limit) << field.name;
}

TEST_P(Determinism, D2_plans_of_extreme_lengths) {
  qla_gdn_forward_args args = {};
  args.struct_size = sizeof args;
  args.backend = backend().id(), args.device = backend().device();
  args.scale = args.cp_warmup_threshold = std::numeric_limits<double>::quiet_NaN();
  const std::vector<int64_t> cases[] = {{0, 0}, {0}, {1, 1 << 20, 1}, {int64_t{1} << 31, 1, 0}};
  for (const std::vector<int64_t>& lengths : cases) {
    int64_t T = 0, chunks = 0;
    for (const int64_t length : lengths) T += length, chunks += (length + 63) / 64;
    const auto tensor = [&](std::vector<int64_t> shape, int32_t dtype) {
      qla_tensor t = {&args, dtype, static_cast<int32_t>(shape.size()), {}, {}};
      int64_t stride = 1;
      for (size_t axis = shape.size(); axis-- > 0; stride *= shape[axis]) t.shape[axis] = shape[axis], t.stride[axis] = stride;
      return t;
    };
    args.q = args.k = tensor({1, T, 2, 128}, kBf16), args.v = args.o = tensor({1, T, 4, 128}, kBf16);
    args.g = args.beta = tensor({1, T, 4}, kF32);
    args.cu_seqlens = tensor({static_cast<int64_t>(lengths.size()) + 1}, QLA_INT64);
    qla_plan plan = {};
    plan.struct_size = sizeof plan;
    const qla_status status = qla_gdn_plan(&args, lengths.data(), static_cast<int64_t>(lengths.size()), nullptr, &plan);
    ASSERT_EQ(status, QLA_OK) << qla_last_error();
    EXPECT_EQ(plan.num_sequences, static_cast<int64_t>(lengths.size()));
    EXPECT_EQ(plan.total_chunks, chunks);
    EXPECT_GE(plan.workspace_bytes, 0);
  }
}

}  // namespace
}  // namespace qla::test
