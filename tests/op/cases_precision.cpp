// Part A: gradients and precision.
#include <gtest/gtest.h>

#include <cmath>

#include "op/cases.hpp"

namespace qla::test {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

void set_beta(Sample& s, double value) { s.in.beta.assign(s.in.beta.size(), value); }

// BR-21: v periodic in 16 tokens, beta = sigmoid(8) or 1
void periodic(Sample& s, double beta) {
  const int64_t per_token = s.in.v_heads * s.in.v_dim;
  for (size_t i = 16 * per_token; i < s.in.v.size(); ++i) s.in.v[i] = s.in.v[i - 16 * per_token];
  set_beta(s, beta);
}

// The same problem with independent keys: what "nearly zero" is measured against in BR-21.
Values with_independent_keys(const Sample& s) {
  Sample other = s;
  Random random(4021);
  for (Numbers* x : {&other.in.q, &other.in.k})
    for (size_t row = 0; row < x->size(); row += s.in.k_dim) {
      double sum = 0;
      for (int64_t i = 0; i < s.in.k_dim; ++i) {
        (*x)[row + i] = random.normal();
        sum += (*x)[row + i] * (*x)[row + i];
      }
      for (int64_t i = 0; i < s.in.k_dim; ++i) (*x)[row + i] = round_to((*x)[row + i] / std::sqrt(sum), s.dtype);
    }
  return truth_of(other);
}

void first_tokens_have_no_gate_gradient(const Sample& s, const Values& truth, const Result& result) {
  const double limit = 1e-6 * largest(truth.dg);
  for (const int64_t bos : s.in.bos)
    for (int64_t h = 0; h < s.in.v_heads; ++h)
      EXPECT_LE(std::fabs(result.values.dg[bos * s.in.v_heads + h]), limit) << "dg of the first token " << bos << ", head " << h;
}

void slices_of_32(const Sample& s, const Values& truth, const Result& result) {
  for (int64_t first = 0; first < s.in.v_dim; first += 32) {
    Numbers got, expected;
    for (int64_t i = 0; i < static_cast<int64_t>(truth.o.size()); ++i)
      if (i % s.in.v_dim >= first && i % s.in.v_dim < first + 32)
        got.push_back(result.values.o[i]), expected.push_back(truth.o[i]);
    EXPECT_LE(relative_error(got, expected), limits::relative(s.dtype, false, false)) << "o, value columns from " << first;
  }
}

void the_last_130_tokens(const Sample& s, const Values& truth, const Result& result) {
  const size_t from = (s.tokens() - 130) * s.in.v_heads * s.in.v_dim;
  const double error =
      relative_error({result.values.o.begin() + from, result.values.o.end()}, {truth.o.begin() + from, truth.o.end()});
  EXPECT_LE(error, limits::relative(s.dtype, false, false)) << "o of the last 130 tokens";
}

Case br11(const char* name, double factor) {
  return {.recipe = "BR11",
          .name = name,
          .T = 64,
          .edit =
              [factor](Sample& s, Random&) {
                for (int64_t i = 0; i < 32 * s.in.v_heads * s.in.v_dim; ++i) s.in.d_o[i] *= factor;
              },
          .extra =
              [](const Sample& s, const Values& truth, const Result& result) {
                const auto late = [&](const Numbers& x) { return Numbers(x.begin() + 32 * s.in.v_heads, x.end()); };
                EXPECT_LE(relative_error(late(result.values.dg), late(truth.dg)), is_16_bit(s.dtype) ? limits::kGradient16 : 1e-5)
                    << "dg of tokens 32-63";
              }};
}

}  // namespace

std::vector<Case> precision_cases() {
  std::vector<Case> table;
  const auto add = [&](Case c) { table.push_back(std::move(c)); };

  // BR-01 gate gradients under strong decay
  const std::vector<double> A = {0.5, 2, 8, 16};
  const auto log_A = [A](Sample& s, Random&) {
    for (size_t h = 0; h < A.size(); ++h) s.in.A_log[h] = std::log(A[h]);
  };
  add({.recipe = "BR01",
       .name = "gate outside",
       .dtypes = {kBf16, kFp16, kF32, kF64},
       .gate = gates::scaled(A),
       .calls = {{}, recomputed()},
       .per_head = true});
  add({.recipe = "BR01", .name = "gate outside packed", .cu = {0, 47, 128}, .gate = gates::scaled(A), .per_head = true});
  add({.recipe = "BR01",
       .name = "raw gate",
       .dtypes = {kBf16, kF32, kF64},
       .raw_gate = true,
       .edit = log_A,
       .calls = {{}, recomputed()}});
  add({.recipe = "BR01", .name = "raw gate packed", .cu = {0, 47, 128}, .raw_gate = true, .edit = log_A});
  // BR-02 no gate gradient at a sequence's first token
  add({.recipe = "BR02",
       .name = "first tokens",
       .cu = {0, 47, 64, 128},
       .gate = gates::scaled(A),
       .h0 = false,
       .extra = first_tokens_have_no_gate_gradient});
  add({.recipe = "BR02",
       .name = "zero initial state",
       .cu = {0, 47, 64, 128},
       .gate = gates::scaled(A),
       .edit = [](Sample& s, Random&) { s.in.initial_state.assign(s.in.initial_state.size(), 0.0); },
       .extra = first_tokens_have_no_gate_gradient});
  // BR-03, BR-04 buffers longer than the sequences (NaN past the end; zero there is part of every judgement)
  add({.recipe = "BR03", .name = "padding after 256", .T = 400, .cu = {0, 256}, .calls = {{}, uncut(), fixed(1)}});
  add({.recipe = "BR03", .name = "padding after 209", .T = 400, .cu = {0, 73, 209}, .calls = {{}, uncut(), fixed(1)}});
  add({.recipe = "BR03", .name = "padding after 385", .T = 400, .cu = {0, 211, 385}, .dtypes = {kBf16, kFp16, kF32, kF64}});
  add({.recipe = "BR04", .name = "whole chunks", .T = 400, .cu = {0, 256}, .gate = gates::qwen()});
  add({.recipe = "BR04", .name = "one short chunk", .T = 512, .cu = {0, 500}, .gate = gates::qwen()});
  add({.recipe = "BR04", .name = "two sequences", .T = 384, .cu = {0, 64, 320}, .gate = gates::qwen()});
  // BR-05 partial losses
  add({.recipe = "BR05",
       .name = "loss of o",
       .T = 200,
       .dtypes = {kBf16, kF32, kF64},
       .dht = false,
       .calls = {{}, no_final_state(), merged(1)}});
  add({.recipe = "BR05",
       .name = "loss of the final state",
       .T = 200,
       .dtypes = {kBf16, kF32, kF64},
       .d_o = false,
       .calls = {{}, merged(1)}});
  add({.recipe = "BR05", .name = "zero d_o", .T = 200, .edit = [](Sample& s, Random&) {
         s.in.d_o.assign(s.in.d_o.size(), 0.0);
       }});
  // BR-08 normalisation inside; zero rows
  add({.recipe = "BR08",
       .name = "norm",
       .T = 130,
       .dtypes = {kBf16, kFp16, kF32, kF64},
       .keys = Keys::kRaw3,
       .qk_l2norm = true,
       .edit =
           [](Sample& s, Random&) {
             std::fill_n(s.in.q.begin() + 7 * s.in.k_heads * s.in.k_dim, s.in.k_dim, 0.0);
             std::fill_n(s.in.k.begin() + 70 * s.in.k_heads * s.in.k_dim, s.in.k_dim, 0.0);
           },
       .calls = {{}, recomputed(), fixed(1)}});
  // .. where the GPU makes it all in one kernel, on nothing but the call's tensors
  add({.recipe = "BR08",
       .name = "norm, a short sequence for every multiprocessor",
       .T = 840,
       .cu = {0, 130, 194, 195, 320, 384, 580, 710, 840},
       .H = 8,
       .HV = 16,
       .dtypes = {kBf16, kFp16},
       .keys = Keys::kRaw3,
       .qk_l2norm = true,
       .calls = {{}, recomputed()}});
  // BR-09 scale, value tiles
  for (const double scale : {0.05, 1.0, 3.0})
    for (const int64_t heads : {2, 8, 64})
      add({.recipe = "BR09",
           .name = "scale " + std::to_string(scale) + " heads " + std::to_string(heads),
           .T = 192,
           .H = heads == 64 ? 16 : 2,
           .HV = heads,
           .dtypes = heads == 64 ? std::vector<int32_t>{kBf16} : std::vector<int32_t>{kBf16, kF32},
           .scale = scale,
           .extra = slices_of_32});
  // BR-11 small late terms of dg beside large early ones
  add(br11("early gradients 1e4 times", 1e4));
  add(br11("early gradients 1e8 times", 1e8));
  // BR-12 no gate at all
  add({.recipe = "BR12",
       .name = "no gate",
       .T = 130,
       .gate = gates::zero(),
       .edit = [](Sample& s, Random&) { s.no_gate = true, s.in.g.clear(); },
       .calls = {{}, uncut(), fixed(1)}});
  // BR-14 no decay
  add({.recipe = "BR14",
       .name = "zero",
       .T = 1024,
       .dtypes = {kBf16, kFp16, kF32},
       .gate = gates::zero(),
       .scale = 0.1,
       .per_head = true});
  add({.recipe = "BR14",
       .name = "mix",
       .T = 1024,
       .dtypes = {kBf16, kFp16, kF32, kF64},
       .gate = gates::mix(),
       .scale = 0.1,
       .calls = {{}, uncut(), merged(4), fixed(3)}});
  add({.recipe = "BR14",
       .name = "one head never forgets",
       .T = 1024,
       .gate = gates::qwen(),
       .scale = 0.1,
       .calls = {{}, fixed(2)},
       .per_head = true});
  // BR-15 rows past the end are NaN
  for (const int64_t T : {65, 75, 100, 127})
    add({.recipe = "BR15",
         .name = "T " + std::to_string(T),
         .B = 2,
         .T = T,
         .dtypes = {kBf16, kFp16, kF32},
         .gate = gates::qwen(),
         .calls = {laid_out("gapped", Layout::kGapped)}});
  // BR-16, BR-17 very strong decay
  for (const double g : {-12.0, -40.0})
    for (const int64_t T : {64, 200})
      add({.recipe = "BR16",
           .name = "gate " + std::to_string(-static_cast<int>(g)) + " T " + std::to_string(T),
           .T = T,
           .dtypes = {kBf16, kF32, kF64},
           .gate = gates::constant(g)});
  add({.recipe = "BR17",
       .name = "alpha 6.5e-12",
       .dtypes = {kBf16, kFp16, kF32, kF64},
       .gate = gates::constant(std::log(6.5e-12))});
  add({.recipe = "BR17", .name = "cliff in a chunk", .gate = gates::cliff(37, -100), .calls = {{}, fixed(1)}});
  add({.recipe = "BR17", .name = "cliff at a chunk's start", .T = 192, .gate = gates::cliff(64, -100), .calls = {{}, fixed(1)}});
  add({.recipe = "BR17",
       .name = "alpha 0 once",
       .T = 192,
       .dtypes = {kBf16, kFp16, kF32, kF64},
       .gate = gates::cliff(40, kMinusInf),
       .calls = {{}, fixed(1)}});
  add({.recipe = "BR17",
       .name = "alpha 0 at times",
       .T = 192,
       .gate = gates::sometimes(0.3, kMinusInf, gates::soft()),
       .calls = {{}, uncut(), fixed(1)}});
  add({.recipe = "BR17", .name = "alpha 0 always", .gate = gates::constant(kMinusInf)});
  // BR-20 correlated keys
  for (const double spread : {0.05, 0.3, 1.0})
    add({.recipe = "BR20",
         .name = "spread " + std::to_string(spread),
         .T = 1024,
         .dtypes = {kBf16, kFp16, kF32},
         .gate = gates::constant(-0.01),
         .keys = Keys::kCorrelated,
         .spread = spread,
         .edit = [](Sample& s, Random&) { set_beta(s, 0.98); },
         .calls = {{}, fixed(5)},
         .hard = true,
         .emulator = {1e-2, 2e-2}});
  // BR-21 one key for ever
  add({.recipe = "BR21",
       .name = "beta sigmoid 8",
       .T = 4096,
       .H = 1,
       .HV = 2,
       .dtypes = {kBf16, kFp16, kF32},
       .gate = gates::constant(-0.02),
       .keys = Keys::kRepeated,
       .edit = [](Sample& s, Random&) { periodic(s, 1 / (1 + std::exp(-8.0))); },
       .hard = true,
       .emulator = {2e-2, 3e-2},
       .near_zero = {"dg", "dh0"},
       .near_zero_scale = with_independent_keys});
  add({.recipe = "BR21",
       .name = "beta 1 no decay",
       .T = 4096,
       .H = 1,
       .HV = 2,
       .dtypes = {kBf16, kF32},
       .gate = gates::zero(),
       .keys = Keys::kRepeated,
       .edit = [](Sample& s, Random&) { periodic(s, 1.0); },
       .hard = true,
       .emulator = {3e-2, 6e-2},
       .near_zero = {"dg", "dh0"},
       .near_zero_scale = with_independent_keys});
  // BR-23 beta up to 2
  const auto double_beta = [](Sample& s, Random& r) {
    for (double& x : s.in.beta) x = 2 / (1 + std::exp(-2 * r.normal()));
  };
  for (const bool zero : {true, false})
    add({.recipe = "BR23",
         .name = zero ? "no decay" : "soft",
         .T = 512,
         .dtypes = {kBf16, kFp16, kF32, kF64},
         .gate = zero ? gates::zero() : gates::soft(),
         .edit = double_beta,
         .calls = {{}, merged(2)},
         .hard = true,
         .emulator = {1e-2, 2e-2}});
  for (const bool negative : {false, true})
    add({.recipe = "BR23",
         .name = negative ? "flag" : "sigmoid",
         .T = 256,
         .dtypes = {kBf16, kF32, kF64},
         .beta_sigmoid = true,
         .neg_eigval = negative,
         .edit = [](Sample& s, Random& r) { s.in.beta = r.normals(static_cast<int64_t>(s.in.beta.size()), 2); },
         .hard = true,
         .emulator = {1e-2, 2e-2}});
  // .. and beta |k|^2 up to 4: the state grows, and roundings with it, in cut and uncut calls alike (docs/numerics.md)
  add({.recipe = "BR23",
       .name = "longer keys",
       .T = 512,
       .dtypes = {kBf16, kFp16, kF32, kF64},
       .gate = gates::zero(),
       .edit =
           [](Sample& s, Random& r) {
             for (double& x : s.in.k) x *= 2;
             for (double& x : s.in.beta) x = r.uniform();
           },
       .calls = {{}, uncut(), merged(2), fixed(3)},
       .hard = true,
       .emulator = {2e-2, 2e-2}});
  // BR-25 types of g and beta
  for (const int32_t g : {kF32, kBf16, kFp16})
    for (const int32_t beta : {kF32, kBf16, kFp16})
      add({.recipe = "BR25",
           .name = std::string("g ") + name_of(g) + " beta " + name_of(beta),
           .T = 100,
           .g_dtype = g,
           .beta_dtype = beta,
           .gate = gates::logsigmoid_over(4)});
  // BR-26 a long memory; chained calls are in test_sequences.cpp
  add({.recipe = "BR26",
       .name = "one call",
       .T = 16384,
       .H = 1,
       .HV = 2,
       .gate = gates::constant(-1e-4),
       .calls = {forward_only({}), forward_only(merged(32)), forward_only(fixed(8))},
       .slope = true});
  // BR-29 the grid that every architecture must pass; T = 32768 on devices: tests/python/test_long.py
  for (const int64_t T : {32, 64, 96, 128, 1000, 4096})
    for (const bool h0 : {false, true})
      add({.recipe = "BR29",
           .name = "T " + std::to_string(T) + (h0 ? " h0" : ""),
           .T = T,
           .H = T < 1000 ? 2 : 1,
           .HV = T < 1000 ? 4 : 2,
           .dtypes = T == 4096 ? std::vector<int32_t>{kBf16} : std::vector<int32_t>{kBf16, kF32},
           .h0 = h0,
           .calls = {{}, v_first()}});
  // BR-30 decay near zero
  add({.recipe = "BR30",
       .name = "third at -30",
       .T = 256,
       .dtypes = {kBf16, kFp16, kF32, kF64},
       .gate = gates::sometimes(1.0 / 3, -30, gates::logsigmoid_over(1)),
       .per_head = true});
  add({.recipe = "BR30", .name = "raw gate", .T = 256, .raw_gate = true, .edit = [](Sample& s, Random& r) {
         for (double& x : s.in.g) x = r.uniform() < 1.0 / 3 ? 30 : -2 + r.normal();
         s.in.A_log.assign(s.in.A_log.size(), 0.0);
       }});
  // BR-31 transitions multiplied over a long sequence that never forgets; with heads of 128, and 131,072 tokens: test_long.py
  add({.recipe = "BR31",
       .name = "65536 tokens",
       .T = 65536,
       .H = 1,
       .HV = 2,
       .K = 24,
       .V = 24,
       .dtypes = {kF32},
       .gate = gates::zero(),
       .calls = {{}, uncut(), merged(128)}});
  add({.recipe = "BR31",
       .name = "gapped",
       .T = 4096,
       .H = 1,
       .HV = 2,
       .K = 32,
       .V = 32,
       .dtypes = {kF32},
       .gate = gates::zero(),
       .calls = {{.name = "gapped, merged", .cp_mode = QLA_CP_FIXED, .cp_segment_chunks = 4, .layout = Layout::kGapped}}});
  // BR-55 more tokens than 16 bits count; on devices: test_long.py
  for (const int64_t T : {65537, 131073})
    add({.recipe = "BR55",
         .name = std::to_string(T),
         .T = T,
         .H = 1,
         .HV = 1,
         .K = 16,
         .V = 16,
         .dtypes = {kF32},
         .gate = gates::constant(-0.01),
         .h0 = false,
         .dht = false,
         .calls = {forward_only({}), forward_only(merged(64)), forward_only(fixed(64))},
         .extra = the_last_130_tokens});
  return table;
}

}  // namespace qla::test
