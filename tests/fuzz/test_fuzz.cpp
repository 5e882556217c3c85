// Seeded fuzzing. Differential: random problems and options against the float64 recurrence, by the limits of the op suite.
// Metamorphic: changes of the question that must not change the answer. A failure prints the line that repeats it; QLA_FUZZ_SEED
// and QLA_FUZZ_CASES choose others.
#include <algorithm>
#include <cstdlib>
#include <tuple>

#include "fuzz/ledger.hpp"
#include "support/op_test.hpp"

namespace qla::test {
namespace {

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

class Fuzz : public OpTest {
 protected:
  // 16 bit and 128 x 128, also without a device where QLA_FUZZ_DEVICE is set: a seed is a device's problem there
  bool like_device() const { return on_device() || std::getenv("QLA_FUZZ_DEVICE"); }
  int32_t plain_dtype() const { return like_device() ? QLA_BFLOAT16 : QLA_FLOAT32; }
  int64_t head_size(int64_t on_cpu) const { return like_device() ? 128 : on_cpu; }

  // body(seed, random) for each seed of this run
  template <class Body>
  void for_seeds(uint64_t cases, Body body) {
    const std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
    const std::string plain = test.substr(0, test.find('/'));
    const uint64_t first = number_from("QLA_FUZZ_SEED", 1);
    cases = number_from("QLA_FUZZ_CASES", cases);
    for (uint64_t seed = first; seed < first + cases && !HasFatalFailure(); ++seed) {
      bool known = false;
      for (const KnownFailure& failure : ledger()) known |= plain == failure.test && seed == failure.seed;
      if (known) continue;
      const char* like = like_device() && !on_device() ? "QLA_FUZZ_DEVICE=1 " : "";
      SCOPED_TRACE(std::string("repeat with: ") + like + "QLA_FUZZ_CASES=1 QLA_FUZZ_SEED=" + std::to_string(seed) +
                   " QLA_TEST_BACKEND=" + backend().name() + " qla_test_fuzz --gtest_filter='*" + plain + "*'");
      Random random(seed * 7919 + 13);
      body(random);
    }
  }

  Case any_case(Random& r) const {
    Case c{.recipe = "FUZZ", .name = "case"};
    c.seed = static_cast<uint64_t>(r.integer(1, int64_t{1} << 40));
    const std::pair<int64_t, int64_t> heads[] = {{1, 1}, {1, 2}, {2, 2}, {2, 4}, {1, 3}, {2, 6}};
    std::tie(c.H, c.HV) = heads[r.integer(0, 5)];
    c.K = head_size(r.integer(1, 4) == 1 ? r.integer(1, 70) : 16 * r.integer(1, 4));
    c.V = head_size(r.integer(1, 4) == 1 ? r.integer(1, 70) : 16 * r.integer(1, 4));
    if (r.uniform() < 0.5) {
      c.B = r.integer(1, 3), c.T = r.integer(0, 200);
    } else {
      c.cu = {0};
      for (int64_t n = r.integer(1, 5); n > 0; --n) {
        const int64_t lengths[] = {0, 1, 63, 64, 65, r.integer(1, 30), r.integer(1, 300)};
        c.cu.push_back(c.cu.back() + lengths[r.integer(0, 6)]);
      }
      c.T = c.cu.back() + (r.uniform() < 0.3 ? r.integer(1, 70) : 0);
    }
    const double kind = r.uniform(), depth = r.uniform(0, 30);
    c.gate = kind < 0.3   ? gates::soft()
             : kind < 0.5 ? gates::qwen()
             : kind < 0.6 ? gates::zero()
             : kind < 0.7 ? gates::mix()
             : kind < 0.8 ? gates::constant(-depth)
             : kind < 0.9 ? gates::sometimes(0.1, -std::numeric_limits<double>::infinity(), gates::soft())
                          : gates::sometimes(0.3, 0.02, gates::soft());
    c.h0 = r.uniform() < 0.6, c.dht = r.uniform() < 0.6, c.d_o = r.uniform() < 0.9 || !c.dht;
    c.raw_gate = r.uniform() < 0.2, c.dt_bias = r.uniform() < 0.5;
    c.beta_sigmoid = r.uniform() < 0.3, c.neg_eigval = c.beta_sigmoid && r.uniform() < 0.5;
    if (r.uniform() < 0.3) c.keys = Keys::kRaw3, c.qk_l2norm = true;
    if (c.qk_l2norm && c.K == 1) c.K = 2;  // a normalised number is its sign: its gradient is what the norm's 1e-6 leaves of 0
    c.hard = c.neg_eigval;
    c.emulator = {2e-2, 4e-2};
    return c;
  }

  Options any_options(Random& r, const Case& c) const {
    Options options{.name = "fuzz"};
    const double cut = r.uniform();
    if (cut < 0.5) options.cp_mode = QLA_CP_FIXED, options.cp_segment_chunks = r.integer(1, 3);
    if (cut < 0.2) options.cp_threshold = -std::numeric_limits<double>::infinity();
    if (cut > 0.8) options.cp_mode = cut > 0.9 ? QLA_CP_OFF : QLA_CP_EXACT;
    options.threads = static_cast<int32_t>(r.integer(0, 3));
    if (r.uniform() < 0.4) options.extra_flags |= QLA_FLAG_STATE_V_FIRST;
    if (r.uniform() < 0.2) options.extra_flags |= QLA_FLAG_BATCH_INVARIANT;
    options.cu_dtype = r.uniform() < 0.5 ? QLA_INT32 : QLA_INT64;
    const Layout layouts[] = {Layout::kContiguous, Layout::kContiguous, Layout::kGapped,
                              Layout::kHeadMajor,  Layout::kFused,      Layout::kEverySecond};
    options.layout = layouts[r.integer(0, 5)];
    options.states = r.uniform() < 0.3 ? States::kPoolSlice : States::kContiguous;
    options.final_state = r.uniform() < 0.8 || c.dht;
    options.reuse_saved = r.uniform() < 0.5;
    return options;
  }

  // relative; 0 where both are nothing
  static double difference(const Numbers& x, const Numbers& y) {
    return std::max(largest(x), largest(y)) > 1e-20 ? relative_error(x, y) : 0.0;
  }
  static void expect_near(const Sample& s, const Values& got, const Values& expected, double limit, const char* what) {
    for (const Field& field : fields()) {
      const Numbers &x = got.*field.member, &y = expected.*field.member;
      ASSERT_EQ(x.size(), y.size()) << what << ": " << field.name;
      const bool nothing = std::max(largest(x), largest(y)) <= 1e-20;
      EXPECT_LE(nothing ? 0.0 : relative_error(s, field, got, expected), limit) << what << ": " << field.name;
    }
  }
};
QLA_ON_EVERY_BACKEND(Fuzz);

TEST_P(Fuzz, Differential) {
  for_seeds(150, [&](Random& r) {
    Case c = any_case(r);
    c.calls = {any_options(r, c), any_options(r, c)};
    const std::vector<int32_t> types =
        like_device() ? std::vector<int32_t>{QLA_BFLOAT16, QLA_FLOAT16}
                      : std::vector<int32_t>{QLA_FLOAT32, QLA_FLOAT32, QLA_FLOAT64, QLA_BFLOAT16, QLA_FLOAT16};
    expect_case(c, types[r.integer(0, static_cast<int64_t>(types.size()) - 1)]);
  });
}

TEST_P(Fuzz, PackedEqualsSeparate) {
  for_seeds(25, [&](Random& r) {
    Case c = any_case(r);
    const Sample s = sample_of(c, plain_dtype());
    const Options off{.name = "off", .cp_mode = QLA_CP_OFF};
    const Values whole = must_run(s, off).values;
    for (int64_t n = 0; n < s.num_seqs(); ++n) {
      const Values part = must_run(sequence_of(s, n), off).values;
      const int64_t states = s.in.v_heads * s.in.state_size();
      for (const Field& field : fields()) {
        const Numbers &x = whole.*field.member, &y = part.*field.member;
        if (x.empty() || (!field_heads(s, field) && !field.is_state)) continue;  // dA_log, ddt_bias: sums over all sequences
        const int64_t width = field.is_state ? states : static_cast<int64_t>(x.size()) / s.tokens();
        const int64_t from = field.is_state ? n : s.in.bos[n];
        expect_bitwise({x.begin() + from * width, x.begin() + from * width + static_cast<int64_t>(y.size())}, y, field.name);
      }
    }
  });
}

TEST_P(Fuzz, TwoHalvesEqualTheWhole) {
  for_seeds(25, [&](Random& r) {
    Case c = any_case(r);
    c.cu.clear(), c.B = 1, c.T = r.integer(2, 250), c.h0 = true;
    const Sample s = sample_of(c, plain_dtype());
    const Values whole = must_run(s).values;
    const int64_t cut = r.integer(1, c.T - 1);
    Sample first = tokens_of(s, 0, cut), second = tokens_of(s, cut, c.T);
    first.in.d_final_state.clear(), first.in.d_o.clear();
    second.in.initial_state = must_run(first, {.backward = false}).values.final_state;
    second.state_dtype = QLA_FLOAT32;
    const Values late = must_run(second).values;
    first = tokens_of(s, 0, cut);
    first.in.d_final_state = late.dh0;  // gradients flow back through the carried state
    const Values early = must_run(first).values;
    const double limit = is_16_bit(s.dtype) ? 1e-2 : c.hard ? 1e-4 : 2e-5;
    for (const Field& field : fields()) {
      const Numbers &x = early.*field.member, &y = late.*field.member, &z = whole.*field.member;
      if (z.empty() || !field_heads(s, field)) continue;
      Numbers joined = x;
      joined.insert(joined.end(), y.begin(), y.end());
      EXPECT_LE(difference(joined, z), limit) << field.name;
    }
    EXPECT_LE(relative_error(late.final_state, whole.final_state), limit);
    EXPECT_LE(difference(early.dh0, whole.dh0), limit) << "dh0";
  });
}

TEST_P(Fuzz, HeadsPermuted) {
  for_seeds(20, [&](Random& r) {
    Case c = any_case(r);
    c.H = 3, c.HV = 3 * r.integer(1, 2);
    const Sample s = sample_of(c, plain_dtype());
    const int64_t order[] = {2, 0, 1};  // q/k head j of the new problem is the old order[j]
    const auto shuffled = [&](const Numbers& x, int64_t outer, int64_t heads) {
      if (x.empty() || outer == 0) return x;
      Numbers out(x.size());
      const int64_t width = static_cast<int64_t>(x.size()) / (outer * heads), each = heads / 3;
      for (int64_t o = 0; o < outer; ++o)
        for (int64_t j = 0; j < 3; ++j)
          std::copy_n(x.begin() + (o * heads + order[j] * each) * width, each * width,
                      out.begin() + (o * heads + j * each) * width);
      return out;
    };
    const int64_t T = s.tokens(), N = s.num_seqs();
    Sample other = s;
    for (auto [member, outer, heads] : {std::tuple{&reference::Inputs::q, T, c.H},
                                        {&reference::Inputs::k, T, c.H},
                                        {&reference::Inputs::v, T, c.HV},
                                        {&reference::Inputs::g, T, c.HV},
                                        {&reference::Inputs::beta, T, c.HV},
                                        {&reference::Inputs::d_o, T, c.HV},
                                        {&reference::Inputs::initial_state, N, c.HV},
                                        {&reference::Inputs::d_final_state, N, c.HV},
                                        {&reference::Inputs::A_log, int64_t{1}, c.HV},
                                        {&reference::Inputs::dt_bias, int64_t{1}, c.HV}})
      other.in.*member = shuffled(s.in.*member, outer, heads);
    const Options off{.name = "off", .cp_mode = QLA_CP_OFF};
    const Values plain = must_run(s, off).values, got = must_run(other, off).values;
    for (const Field& field : fields()) {
      const int64_t heads = field_heads(s, field);
      const int64_t outer = heads ? T : field.is_state ? N : 1;
      expect_bitwise(got.*field.member, shuffled(plain.*field.member, outer, heads ? heads : c.HV), field.name);
    }
  });
}

TEST_P(Fuzz, GroupedHeadsEqualRepeatedKeys) {
  for_seeds(20, [&](Random& r) {
    Case c = any_case(r);
    c.H = 2, c.HV = 2 * r.integer(2, 3);
    const Sample s = sample_of(c, plain_dtype());
    Sample repeated = s;
    repeated.in.k_heads = c.HV;
    const int64_t group = c.HV / c.H;
    for (auto member : {&reference::Inputs::q, &reference::Inputs::k}) {
      Numbers wide;
      for (int64_t row = 0; row < s.tokens() * c.H; ++row)
        for (int64_t copy = 0; copy < group; ++copy)
          wide.insert(wide.end(), (s.in.*member).begin() + row * c.K, (s.in.*member).begin() + (row + 1) * c.K);
      repeated.in.*member = wide;
    }
    const Values grouped = must_run(s).values;
    Values single = must_run(repeated).values;
    for (auto member : {&Values::dq, &Values::dk}) {  // summed over the group
      Numbers sum((grouped.*member).size(), 0.0);
      for (size_t i = 0; i < (single.*member).size(); ++i) {
        const int64_t at = static_cast<int64_t>(i), row = at / c.K / c.HV, head = at / c.K % c.HV;
        sum[(row * c.H + head / group) * c.K + at % c.K] += (single.*member)[i];
      }
      single.*member = sum;
    }
    expect_near(s, grouped, single, is_16_bit(s.dtype) ? 1e-2 : 2e-6, "grouped and repeated");
  });
}

TEST_P(Fuzz, CutEqualsUncut) {
  for_seeds(40, [&](Random& r) {
    Case c = any_case(r);
    c.T = r.integer(65, 400), c.cu.clear(), c.B = 1;
    const Sample s = sample_of(c, plain_dtype());
    const Values uncut = must_run(s, {.name = "off", .cp_mode = QLA_CP_OFF}).values;
    const double limit = is_16_bit(s.dtype) ? 1e-2 : c.hard ? 1e-4 : 1e-5;
    Options cut{.name = "fixed", .cp_mode = QLA_CP_FIXED, .cp_segment_chunks = r.integer(1, 3)};
    expect_near(s, must_run(s, cut).values, uncut, limit, "warm-up or merge");
    cut.cp_threshold = -std::numeric_limits<double>::infinity();
    expect_near(s, must_run(s, cut).values, uncut, limit, "every cut merged");
  });
}

}  // namespace
}  // namespace qla::test
