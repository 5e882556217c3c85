// Sequences: packing, isolation, state handed on, option products, training steps.
#include <cmath>

#include "op/cases.hpp"
#include "support/op_test.hpp"

namespace qla::test {
namespace {

class Sequences : public OpTest {};
QLA_ON_EVERY_BACKEND(Sequences);

TEST_P(Sequences, BR07_every_combination_of_options) {
  for (int bits = 0; bits < 32; ++bits) {
    Case c{.recipe = "BR07", .name = "options " + std::to_string(bits), .T = 130};
    c.K = c.V = head_size(32);
    c.h0 = bits & 1;
    if (bits & 2) c.cu = {0, 65, 65, 130};
    if (bits & 4) c.keys = Keys::kRaw3, c.qk_l2norm = true;
    const bool final_state = bits & 8;
    c.calls.clear();
    for (Options call : {Options{}, uncut(), merged(1), Options{.name = "exact", .cp_mode = QLA_CP_EXACT}}) {
      call.final_state = final_state;
      if (bits & 16) call.extra_flags |= QLA_FLAG_STATE_V_FIRST;
      c.calls.push_back(call);
    }
    expect_case(c, plain_dtype());
  }
}

// 300 steps of gradient descent on a one-layer toy: every gradient stays finite, and the loss falls.
TEST_P(Sequences, BR15_training_steps_stay_finite) {
  if (!backend().serves_backward()) GTEST_SKIP() << "no backward kernels on this device";
  Case c{.recipe = "BR15",
         .name = "toy",
         .T = 200,
         .keys = Keys::kRaw3,
         .h0 = false,
         .dht = false,
         .qk_l2norm = true,
         .raw_gate = true,
         .beta_sigmoid = true};
  c.K = c.V = head_size(16);
  Sample s = sample_of(c, plain_dtype());
  Random random(4015);
  const Numbers target = random.normals(static_cast<int64_t>(s.in.v.size()), 0.3);
  s.in.d_o.assign(target.size(), 0.0);
  double first = 0, last = 0;
  for (int step = 0; step < 300; ++step) {
    const Numbers o = must_run(s, {.backward = false}).values.o;
    ASSERT_EQ(o.size(), target.size());
    last = 0;
    for (size_t i = 0; i < o.size(); ++i) s.in.d_o[i] = o[i] - target[i], last += 0.5 * s.in.d_o[i] * s.in.d_o[i];
    if (step == 0) first = last;
    s.round_values();
    const Values grads = must_run(s).values;
    const std::pair<Numbers*, const Numbers*> moves[] = {{&s.in.q, &grads.dq},       {&s.in.k, &grads.dk},
                                                         {&s.in.v, &grads.dv},       {&s.in.g, &grads.dg},
                                                         {&s.in.beta, &grads.dbeta}, {&s.in.A_log, &grads.dA_log}};
    for (const auto& [x, dx] : moves) {
      ASSERT_EQ(x->size(), dx->size());
      for (size_t i = 0; i < x->size(); ++i) {
        ASSERT_TRUE(std::isfinite((*dx)[i])) << "step " << step;
        (*x)[i] -= 0.5 * (*dx)[i];
      }
    }
    s.round_values();
  }
  EXPECT_LT(last, first);
}

TEST_P(Sequences, BR26_sixteen_calls_with_the_state_passed_on) {
  Case c{.recipe = "BR26", .name = "chained", .T = 16384, .H = 1, .HV = 2, .gate = gates::constant(-1e-4)};
  c.K = c.V = head_size(64);
  const Sample s = sample_of(c, QLA_BFLOAT16);
  Options uncut_forward = uncut(), automatic;
  uncut_forward.backward = automatic.backward = false;
  // The calls meet at whole chunks and hand on what one call carries: the same bits.
  const Values whole = must_run(s, uncut_forward).values;
  const Values chained = run_chained(backend(), s, std::vector<int64_t>(16, 1024), uncut_forward);
  expect_bitwise(chained.o, whole.o, "o of sixteen calls");
  expect_bitwise(chained.final_state, whole.final_state, "final state of sixteen calls");
  // A device cuts the one call and not the sixteen (gates as weak as these: exact merges). Where operands are 16-bit the two
  // round apart and differ by more than the 2e-3 of a fp32 backend, each as near to the truth as the other: decision 0024.
  const Values cut = must_run(s, automatic).values;
  if (!on_device()) {
    EXPECT_LE(relative_error(chained.o, cut.o), 2e-3);
    EXPECT_LE(relative_error(chained.final_state, cut.final_state), 2e-3);
    return;
  }
  const Values truth = truth_of(s, false);
  const auto no_worse = [&](const Numbers& got, const Numbers& other, const Numbers& expected, const char* what) {
    const double mine = relative_error(got, expected), theirs = relative_error(other, expected);
    EXPECT_LE(mine, limits::kOutput16) << what;
    EXPECT_LE(mine, 1.1 * theirs) << what << ": cutting adds to the error";
    EXPECT_LE(relative_error(got, other), std::hypot(mine, theirs))
        << what << ": further apart than two errors of their own make it";
  };
  no_worse(cut.o, chained.o, truth.o, "o");
  no_worse(cut.final_state, chained.final_state, truth.final_state, "final state");
}

TEST_P(Sequences, BR41_fixed_lengths_equal_packed_ones) {
  for (const int64_t B : {1, 3})
    for (const int64_t T : {1500, 28, 65}) {
      Case c{.recipe = "BR41", .name = "dense", .B = B, .T = T, .H = 1, .HV = 2};
      c.K = c.V = head_size(32);
      const Sample dense = sample_of(c, plain_dtype());
      Sample packed = dense;
      packed.batch = 1, packed.length = B * T, packed.cu = {0};
      for (int64_t b = 0; b < B; ++b) packed.cu.push_back((b + 1) * T);
      packed.set_sequences();
      expect_bitwise(must_run(packed, uncut()).values, must_run(dense, uncut()).values, "packed and dense");
    }
}

TEST_P(Sequences, BR42_no_bit_of_one_sequence_depends_on_another) {
  const std::pair<int64_t, int64_t> lengths[] = {{37, 91}, {64, 64}, {1, 127}};
  for (const int32_t dtype : dtypes())
    for (const auto& [a, b] : lengths) {
      Case c{.recipe = "BR42", .name = "two", .T = a + b, .cu = {0, a, a + b}};
      c.K = c.V = head_size(64);
      const Sample s = sample_of(c, dtype);
      Sample other = s;
      for (Numbers* x : {&other.in.q, &other.in.k, &other.in.v, &other.in.g, &other.in.beta, &other.in.d_o})
        for (size_t i = 0; i < x->size() * a / (a + b); ++i) (*x)[i] = round_to((*x)[i] * 0.5, dtype);
      const Values one = must_run(s).values, two = must_run(other).values;
      for (const Field& field : fields()) {
        const Numbers &x = one.*field.member, &y = two.*field.member;
        if (x.empty()) continue;
        const size_t from = field.is_state ? x.size() / 2 : x.size() * a / (a + b);
        expect_bitwise({x.begin() + from, x.end()}, {y.begin() + from, y.end()}, field.name);
        EXPECT_NE(Numbers(x.begin(), x.begin() + from), Numbers(y.begin(), y.begin() + from))
            << field.name << " of the changed sequence";
      }
    }
}

// NaN in one sequence reaches no other, and none of its earlier chunks.
TEST_P(Sequences, BR42_nan_stays_in_its_sequence_and_after_its_chunk) {
  Case c{.recipe = "BR42", .name = "nan", .T = 300, .cu = {0, 40, 240, 300}};
  c.K = c.V = head_size(32);
  for (const Options& call : {Options{}, uncut(), merged(1), fixed(1)}) {
    const Sample clean = sample_of(c, plain_dtype());
    for (int which = 0; which < 4; ++which) {
      Sample s = clean;
      Numbers& x = which == 0 ? s.in.k : which == 1 ? s.in.v : which == 2 ? s.in.g : s.in.beta;
      const int64_t per_token = static_cast<int64_t>(x.size()) / s.tokens();
      x[150 * per_token] = std::numeric_limits<double>::quiet_NaN();  // row 46 of the second chunk of the sequence 40 .. 240
      Options forward = call;
      forward.backward = false;
      const Values got = must_run(s, forward).values, expected = must_run(clean, forward).values;
      const int64_t row = s.in.v_heads * s.in.v_dim;
      for (int64_t i = 0; i < static_cast<int64_t>(got.o.size()); ++i) {
        const int64_t token = i / row, head = i % row / s.in.v_dim;
        const bool before = token < 40 + 64, elsewhere = token >= 240, other_keys = head >= 2;
        ASSERT_TRUE(!(before || elsewhere || other_keys) || got.o[i] == expected.o[i])
            << call.name << ", input " << which << ", token " << token;
        const bool must = token >= 150 && token < 240 && head == 0 && which != 1;  // v: its own column only
        ASSERT_TRUE(!must || std::isnan(got.o[i])) << call.name << ", input " << which << ", token " << token;
      }
      const int64_t states = s.in.v_heads * s.in.state_size();
      for (int64_t i = 0; i < states; ++i) {
        ASSERT_EQ(got.final_state[i], expected.final_state[i]);
        ASSERT_EQ(got.final_state[2 * states + i], expected.final_state[2 * states + i]);
      }
      ASSERT_TRUE(std::isnan(got.final_state[states])) << call.name << ", input " << which;
    }
  }
}

TEST_P(Sequences, BR46_state_handed_on_between_calls) {
  for (const int32_t dtype : dtypes())
    for (const uint32_t flags : {0u, static_cast<uint32_t>(QLA_FLAG_STATE_V_FIRST)}) {
      Case c{.recipe = "BR46", .name = "chain", .T = 300};
      c.K = c.V = head_size(64);
      const Sample s = sample_of(c, dtype);
      const Values truth = truth_of(s, false);
      const double limit = limits::relative(dtype, false, false);
      const auto expect_chained = [&](const std::vector<int64_t>& lengths, Options options) {
        options.extra_flags = flags;
        const Values chained = run_chained(backend(), s, lengths, options);
        ASSERT_EQ(chained.o.size(), truth.o.size());
        EXPECT_LE(relative_error(chained.o, truth.o), limit) << lengths.size() << " calls, " << options.name;
        EXPECT_LE(relative_error(chained.final_state, truth.final_state), limit) << lengths.size() << " calls, " << options.name;
      };
      for (const Options& options : {Options{}, fixed(1), merged(1)})
        for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{300}, {100, 137, 63}}) expect_chained(lengths, options);
      expect_chained(std::vector<int64_t>(300, 1), {});
    }
}

TEST_P(Sequences, BR46_packed_with_other_split_points) {
  Case c{.recipe = "BR46", .name = "packed", .T = 300, .cu = {0, 120, 300}};
  c.K = c.V = head_size(64);
  const Sample s = sample_of(c, plain_dtype());
  const Values truth = truth_of(s, false);
  const int64_t splits[] = {50, 111};
  Numbers state = s.in.initial_state, o(truth.o.size());
  const int64_t row = s.in.v_heads * s.in.v_dim;
  for (int half = 0; half < 2; ++half) {  // two calls; each sequence is cut at its own point
    Sample part = s;
    part.cu = {0};
    std::vector<std::pair<int64_t, int64_t>> ranges;
    for (int n = 0; n < 2; ++n) {
      const int64_t from = s.in.bos[n] + (half ? splits[n] : 0), to = half ? s.in.eos[n] : s.in.bos[n] + splits[n];
      ranges.push_back({from, to});
      part.cu.push_back(part.cu.back() + to - from);
    }
    const auto gather = [&](const Numbers& x) {
      const int64_t width = static_cast<int64_t>(x.size()) / s.tokens();
      Numbers out;
      for (const auto& [from, to] : ranges) out.insert(out.end(), x.begin() + from * width, x.begin() + to * width);
      return out;
    };
    part.in.q = gather(s.in.q), part.in.k = gather(s.in.k), part.in.v = gather(s.in.v), part.in.g = gather(s.in.g),
    part.in.beta = gather(s.in.beta);
    part.in.d_o.clear(), part.in.d_final_state.clear();
    part.length = part.cu.back(), part.set_sequences();
    part.in.initial_state = state;
    const Values got = must_run(part, {.backward = false}).values;
    state = got.final_state;
    int64_t at = 0;
    for (const auto& [from, to] : ranges) {
      std::copy_n(got.o.begin() + at * row, (to - from) * row, o.begin() + from * row);
      at += to - from;
    }
  }
  const double limit = limits::relative(s.dtype, false, false);
  EXPECT_LE(relative_error(o, truth.o), limit);
  EXPECT_LE(relative_error(state, truth.final_state), limit);
}

TEST_P(Sequences, D6_one_token_equals_one_step) {
  Case c{.recipe = "D6", .name = "decode", .B = 3, .T = 1};
  const Sample s = sample_of(c, plain_dtype());
  const Values got = must_run(s).values;
  const reference::Inputs& in = s.in;
  for (int64_t b = 0; b < 3; ++b)  // by hand: S <- e^g S;  S <- S + beta k (v - S^T k)^T;  o = scale S^T q
    for (int64_t h = 0; h < in.v_heads; ++h) {
      const int64_t row = (b * in.k_heads + h / in.group()) * in.k_dim, at = b * in.v_heads + h;
      for (int64_t x = 0; x < in.v_dim; ++x) {
        double read = 0, o = 0;
        const auto old = [&](int64_t i) { return std::exp(in.g[at]) * in.initial_state[(at * in.k_dim + i) * in.v_dim + x]; };
        for (int64_t i = 0; i < in.k_dim; ++i) read += in.k[row + i] * old(i);
        for (int64_t i = 0; i < in.k_dim; ++i)
          o += in.scale * in.q[row + i] * (old(i) + in.beta[at] * in.k[row + i] * (in.v[at * in.v_dim + x] - read));
        ASSERT_NEAR(got.o[at * in.v_dim + x], o, is_16_bit(s.dtype) ? 2e-2 : 1e-5);
      }
    }
}

}  // namespace
}  // namespace qla::test
