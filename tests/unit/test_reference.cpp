// The truth itself: hand check, adjoint against the complex step, chunk form against the recurrence, roundings.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "reference/chunk_form.hpp"
#include "reference/recurrence.hpp"
#include "reference/rounding.hpp"

namespace qla::reference {
namespace {

using Complex = std::complex<double>;

struct Options {
  std::vector<int64_t> lengths = {9};
  int64_t k_heads = 1, v_heads = 1, K = 5, V = 4;
  bool initial = true, end_gradient = true, norm = false, raw = false, sigmoid = false, negative = false, bias = true;
  double gate = 1.0;  // size of the log decay; negative: growth
  int minus_inf_every = 0;
  int64_t padding = 0;
};

Inputs make(const Options& opt, uint64_t seed = 7) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  const auto draw = [&](int64_t count) {
    std::vector<double> x(count);
    for (double& value : x) value = normal(random);
    return x;
  };
  Inputs in;
  for (const int64_t length : opt.lengths) {
    in.bos.push_back(in.tokens);
    in.eos.push_back(in.tokens += length);
  }
  in.tokens += opt.padding;
  in.k_heads = opt.k_heads, in.v_heads = opt.v_heads, in.k_dim = opt.K, in.v_dim = opt.V;
  in.scale = 0.3;
  in.qk_l2norm = opt.norm, in.raw_gate = opt.raw, in.beta_sigmoid = opt.sigmoid, in.neg_eigval = opt.negative;
  in.q = draw(in.tokens * in.k_heads * in.k_dim);
  in.k = draw(in.tokens * in.k_heads * in.k_dim);
  if (!opt.norm)  // keys of length about 1, or the recurrence explodes
    for (double& x : in.k) x /= std::sqrt(static_cast<double>(opt.K));
  in.v = draw(in.tokens * in.v_heads * in.v_dim);
  in.g = draw(in.tokens * in.v_heads);
  in.beta = draw(in.tokens * in.v_heads);
  if (!opt.raw)
    for (double& x : in.g) x = -opt.gate * std::fabs(x);
  if (!opt.sigmoid)
    for (double& x : in.beta) x = 1.0 / (1.0 + std::exp(-x));
  if (opt.minus_inf_every)
    for (size_t i = 0; i < in.g.size(); i += opt.minus_inf_every) in.g[i] = -std::numeric_limits<double>::infinity();
  const int64_t states = in.num_seqs() * in.v_heads * in.state_size();
  if (opt.initial) in.initial_state = draw(states);
  if (opt.raw) in.A_log = draw(in.v_heads);
  if (opt.raw && opt.bias) in.dt_bias = draw(in.v_heads);
  in.d_o = draw(in.tokens * in.v_heads * in.v_dim);
  if (opt.end_gradient) in.d_final_state = draw(states);
  return in;
}

InputsOf<Complex> complexify(const Inputs& in) {
  InputsOf<Complex> out;
  out.tokens = in.tokens, out.bos = in.bos, out.eos = in.eos;
  out.k_heads = in.k_heads, out.v_heads = in.v_heads, out.k_dim = in.k_dim, out.v_dim = in.v_dim;
  out.scale = in.scale;
  out.qk_l2norm = in.qk_l2norm, out.raw_gate = in.raw_gate, out.beta_sigmoid = in.beta_sigmoid, out.neg_eigval = in.neg_eigval;
  const auto copy = [](const std::vector<double>& x) { return std::vector<Complex>(x.begin(), x.end()); };
  out.q = copy(in.q), out.k = copy(in.k), out.v = copy(in.v), out.g = copy(in.g), out.beta = copy(in.beta);
  out.initial_state = copy(in.initial_state), out.A_log = copy(in.A_log), out.dt_bias = copy(in.dt_bias);
  out.has_initial = in.has_initial;
  return out;
}

double inner(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// d loss / d x along a random direction, by the complex step, must be <gradient, direction>.
void expect_adjoint(const Inputs& in) {
  const Gradients grads = recurrence_backward(in);
  std::mt19937_64 random(11);
  std::normal_distribution<double> normal;
  const double h = 1e-30;
  const auto along = [&](const char* name, std::vector<Complex> InputsOf<Complex>::*member, const std::vector<double>& gradient) {
    InputsOf<Complex> moved = complexify(in);
    std::vector<Complex>& x = moved.*member;
    if (x.empty()) return;
    ASSERT_EQ(x.size(), gradient.size()) << name;
    std::vector<double> direction(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      if (!std::isfinite(x[i].real())) continue;  // a gate of -inf stays there
      direction[i] = normal(random);
      x[i] += Complex(0, h * direction[i]);
    }
    const OutputsOf<Complex> out = recurrence_forward(moved);
    double slope = 0, size = 1e-12;
    for (size_t i = 0; i < out.o.size(); ++i) slope += in.d_o[i] * out.o[i].imag() / h;
    if (!in.d_final_state.empty())
      for (size_t i = 0; i < out.final_state.size(); ++i) slope += in.d_final_state[i] * out.final_state[i].imag() / h;
    for (size_t i = 0; i < direction.size(); ++i) size += std::fabs(gradient[i] * direction[i]);
    EXPECT_NEAR(slope, inner(gradient, direction), 1e-13 * size) << name;
  };
  using C = InputsOf<Complex>;
  along("q", &C::q, grads.dq);
  along("k", &C::k, grads.dk);
  along("v", &C::v, grads.dv);
  along("g", &C::g, grads.dg);
  along("beta", &C::beta, grads.dbeta);
  along("initial_state", &C::initial_state, grads.dh0);
  along("A_log", &C::A_log, grads.dA_log);
  along("dt_bias", &C::dt_bias, grads.ddt_bias);
}

TEST(Reference, HandCheckPinsTheOrderOfDecayAndCorrection) {
  Inputs in;
  in.tokens = 2, in.bos = {0}, in.eos = {2};
  in.q = in.k = {1, 1}, in.v = {4, 8}, in.beta = {0.5, 0.5};
  in.g = {std::log(0.5), std::log(0.5)};
  const Outputs out = recurrence_forward(in);
  EXPECT_DOUBLE_EQ(out.o[0], 2.0);
  EXPECT_DOUBLE_EQ(out.o[1], 4.5);
}

TEST(Reference, AdjointPlain) { expect_adjoint(make({})); }
TEST(Reference, AdjointGroupedHeadsPackedEmptyAndPadding) {
  expect_adjoint(make({.lengths = {5, 0, 1, 60}, .k_heads = 2, .v_heads = 6, .padding = 3}));
}
TEST(Reference, AdjointWithoutStates) { expect_adjoint(make({.initial = false, .end_gradient = false})); }
TEST(Reference, AdjointNorm) { expect_adjoint(make({.k_heads = 2, .v_heads = 4, .norm = true})); }
TEST(Reference, AdjointRawGate) { expect_adjoint(make({.v_heads = 3, .raw = true})); }
TEST(Reference, AdjointRawGateWithoutBias) { expect_adjoint(make({.v_heads = 3, .raw = true, .bias = false})); }
TEST(Reference, AdjointSigmoid) { expect_adjoint(make({.sigmoid = true})); }
TEST(Reference, AdjointNegativeEigenvalues) { expect_adjoint(make({.norm = true, .sigmoid = true, .negative = true})); }
TEST(Reference, AdjointGrowingGate) { expect_adjoint(make({.gate = -0.3})); }
TEST(Reference, AdjointMinusInfinity) { expect_adjoint(make({.lengths = {20}, .minus_inf_every = 7})); }

TEST(Reference, SequenceWithoutInitialStateStartsFromZero) {
  Inputs in = make({.lengths = {4, 4}});
  in.has_initial = {0, 1};
  Inputs zeroed = in;
  zeroed.has_initial.clear();
  std::fill_n(zeroed.initial_state.begin(), in.state_size(), 0.0);
  EXPECT_EQ(recurrence_forward(in).o, recurrence_forward(zeroed).o);
  const std::vector<double> dh0 = recurrence_backward(in).dh0;
  for (int64_t i = 0; i < in.state_size(); ++i) EXPECT_EQ(dh0[i], 0.0);
  expect_adjoint(in);
}

double relative(const std::vector<double>& x, const std::vector<double>& ref) {
  double error = 0, size = 0;
  EXPECT_EQ(x.size(), ref.size());
  for (size_t i = 0; i < ref.size(); ++i) error += (x[i] - ref[i]) * (x[i] - ref[i]), size += ref[i] * ref[i];
  return size > 0 ? std::sqrt(error / size) : std::sqrt(error);
}

void expect_same(const Inputs& in, Operand operand, double limit, int64_t chunk = 64) {
  const Outputs a = recurrence_forward(in), b = chunk_forward(in, operand, chunk);
  const Gradients c = recurrence_backward(in), d = chunk_backward(in, operand, chunk);
  EXPECT_LE(relative(b.o, a.o), limit) << "o";
  EXPECT_LE(relative(b.final_state, a.final_state), limit) << "final_state";
  EXPECT_LE(relative(d.dq, c.dq), limit) << "dq";
  EXPECT_LE(relative(d.dk, c.dk), limit) << "dk";
  EXPECT_LE(relative(d.dv, c.dv), limit) << "dv";
  EXPECT_LE(relative(d.dg, c.dg), limit) << "dg";
  EXPECT_LE(relative(d.dbeta, c.dbeta), limit) << "dbeta";
  EXPECT_LE(relative(d.dh0, c.dh0), limit) << "dh0";
  if (in.raw_gate) {
    EXPECT_LE(relative(d.dA_log, c.dA_log), limit) << "dA_log";
    EXPECT_LE(relative(d.ddt_bias, c.ddt_bias), limit) << "ddt_bias";
  }
}

TEST(ChunkForm, EqualsTheRecurrenceAt257) {
  expect_same(make({.lengths = {257}, .K = 16, .V = 12, .norm = true}), Operand::kExact, 1e-12);
}
TEST(ChunkForm, GroupedPackedEmptyPadding) {
  expect_same(make({.lengths = {130, 0, 64, 1}, .k_heads = 2, .v_heads = 6, .K = 8, .V = 12, .norm = true, .padding = 7}),
              Operand::kExact, 1e-12);
}
TEST(ChunkForm, SmallChunks) {
  expect_same(make({.lengths = {33, 48}, .K = 8, .V = 12, .norm = true, .raw = true, .sigmoid = true, .negative = true}),
              Operand::kExact, 1e-12, 16);
}
TEST(ChunkForm, StrongGates) {
  expect_same(make({.lengths = {130}, .K = 8, .V = 8, .norm = true, .gate = 40}), Operand::kExact, 1e-12);
}
TEST(ChunkForm, MinusInfinity) {
  expect_same(make({.lengths = {130}, .K = 8, .V = 8, .norm = true, .gate = 0.1, .minus_inf_every = 37}), Operand::kExact, 1e-12);
}
TEST(ChunkForm, GrowingGate) {
  expect_same(make({.lengths = {130}, .K = 8, .V = 8, .norm = true, .gate = -0.02}), Operand::kExact, 1e-12);
}
TEST(ChunkForm, EmulatorsErrIsThatOfTheirType) {
  const Inputs in = make({.lengths = {257}, .k_heads = 2, .v_heads = 4, .K = 64, .V = 64, .norm = true, .gate = 0.05});
  expect_same(in, Operand::kBf16, 1e-2);
  expect_same(in, Operand::kFp16, 1.3e-3);
  EXPECT_GT(relative(chunk_forward(in, Operand::kBf16).o, recurrence_forward(in).o), 1e-3);  // it does round
  EXPECT_GT(relative(chunk_forward(in, Operand::kFp16).o, recurrence_forward(in).o), 1e-4);
  const Outputs rows = chunk_forward(in, Operand::kFp16, 64, InverseOrder::kRows);  // another order, other roundings
  EXPECT_NE(rows.o, chunk_forward(in, Operand::kFp16).o);
  EXPECT_LT(relative(rows.o, recurrence_forward(in).o), 1e-3);
}
TEST(ChunkForm, PartsAreTheirDefinitions) {
  const Inputs in = make({.lengths = {70}, .K = 8, .V = 4, .norm = true});
  const ChunkParts parts = chunk_parts(in);
  double sum = 0;
  for (int64_t t = 0; t < 64; ++t) EXPECT_NEAR(parts.g_cumsum[t], sum += in.g[t], 1e-12);
  EXPECT_NEAR(parts.g_cumsum[64], in.g[64], 0);
  Inputs first = in;
  first.eos = {64};
  EXPECT_LE(relative({parts.h.begin() + in.state_size(), parts.h.end()}, recurrence_forward(first).final_state), 1e-12);
}

TEST(Rounding, Fp16) {
  EXPECT_EQ(round_fp16(1.0f + 0x1p-11f), 1.0f);              // a tie goes to even
  EXPECT_EQ(round_fp16(1.0f + 0x1.8p-10f), 1.0f + 0x1p-9f);  // and here up
  EXPECT_EQ(round_fp16(65519.0f), 65504.0f);
  EXPECT_EQ(round_fp16(-65520.0f), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(round_fp16(0x1.8p-24f), 0x1p-23f);
  EXPECT_EQ(round_fp16(0x1p-25f), 0.0f);
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const float value = fp16_value(static_cast<uint16_t>(bits));
    ASSERT_EQ(fp16_bits(value), bits);
    ASSERT_EQ(fp16_bits(-value), bits | 0x8000u);
  }
}
TEST(Rounding, Bf16) {
  EXPECT_EQ(round_bf16(1.0f + 0x1p-8f), 1.0f);
  EXPECT_EQ(round_bf16(1.0f + 0x1.8p-7f), 1.0f + 0x1p-6f);
  EXPECT_TRUE(std::isnan(bf16_value(bf16_bits(std::numeric_limits<float>::quiet_NaN()))));
  for (uint32_t bits = 0; bits < 0x7F80; ++bits) ASSERT_EQ(bf16_bits(bf16_value(static_cast<uint16_t>(bits))), bits);
}

}  // namespace
}  // namespace qla::reference
