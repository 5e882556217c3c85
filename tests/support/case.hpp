// What a row of the case table says, how its numbers are drawn, and how its results are judged.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "op/tolerances.hpp"
#include "support/call.hpp"

namespace qla::test {

struct Where {
  int64_t token, length;  // within the sequence, the sequence's tokens
  int64_t head, heads;
};
using Gate = std::function<double(Random&, const Where&)>;

namespace gates {
Gate soft();                         // logsigmoid(N(0,1)) / 16
Gate qwen();                         // -A softplus(0.5 N + 1); A from exactly 0 (first head) to exactly 16 (last)
Gate scaled(std::vector<double> A);  // the same with a list of A
Gate zero();
Gate mix();  // logsigmoid(U(0,1)), or 0 for half the tokens
Gate constant(double c);
Gate cliff(int64_t token, double depth);  // -0.01, and depth at one token
Gate sometimes(double share, double value, Gate otherwise);
Gate logsigmoid_over(double divisor);  // logsigmoid(U(0,1)) / divisor
}  // namespace gates

enum class Keys { kUnit, kRaw3 /* 3 N(0,1), for in-kernel normalisation */, kCorrelated, kRepeated /* one vector, q = k */ };

struct Case {
  const char* recipe;  // "BR01": first part of the test's name
  std::string name;
  int64_t B = 1, T = 128;
  std::vector<int64_t> cu = {};  // packed; T may be more than cu.back()
  int64_t H = 2, HV = 4, K = 128, V = 128;
  std::vector<int32_t> dtypes = {QLA_BFLOAT16, QLA_FLOAT32};
  int32_t g_dtype = QLA_FLOAT32, beta_dtype = QLA_FLOAT32, state_dtype = QLA_FLOAT32;  // float64 tensors take float64
  Gate gate = gates::soft();
  Keys keys = Keys::kUnit;
  double spread = 0.3;  // kCorrelated: of the keys around their head's base
  bool h0 = true, d_o = true, dht = true;
  double scale = std::numeric_limits<double>::quiet_NaN();  // NaN: K^-0.5
  bool qk_l2norm = false, raw_gate = false, dt_bias = true, beta_sigmoid = false, neg_eigval = false;
  std::function<void(Sample&, Random&)> edit = {};  // before rounding
  std::vector<Options> calls = {{}};                // each is compared with the same truth
  bool hard = false;                                // fp32 limit 1e-4
  bool per_head = false;                            // relative error of each head by itself
  bool slope = false;                               // slope of final_state within limits::kSlope
  limits::EmulatorBudget emulator = {};
  std::vector<std::string> near_zero = {};  // judged by the largest error, 1e-3 of near_zero_scale
  std::function<Values(const Sample&)> near_zero_scale = {};
  std::function<void(const Sample&, const Values& truth, const Result&)> extra = {};
  uint64_t seed = 0;  // added to the recipe's own
  bool big = false;   // runs on a device only: the CPU has a smaller twin
};

Sample sample_of(const Case& c, int32_t dtype);

// "" or why the CUDA backend does not serve this (the list of docs/testing.md)
std::string not_on_cuda(const Case& c, int32_t dtype);

// Judges a result against the truth; records GoogleTest failures that name tensor, measure, first bad coordinate and error by
// token window.
void expect_values(const Case& c, const Sample& sample, const Options& options, const Values& got, const Values& truth,
                   const std::vector<Values>& emulated);

// relL2 with its message; for tests outside the table
double relative_error(const Numbers& got, const Numbers& truth);
// .. by which a field is judged: sums over tokens (dA_log, ddt_bias) that cancel relative to the root of their terms' squares
double relative_error(const Sample& sample, const Field& field, const Values& got, const Values& truth);
double largest(const Numbers& x);
void expect_bitwise(const Numbers& got, const Numbers& expected, const char* what);
void expect_bitwise(const Values& got, const Values& expected, const char* what);

// Runs c in one dtype on one backend: draws, calls, judges. Skips (GoogleTest) what the backend does not serve.
void run_case(const Backend& backend, const Case& c, int32_t dtype);

const std::vector<Case>& case_table();  // cases_*.cpp; the numbers are those of recipes.txt

}  // namespace qla::test
