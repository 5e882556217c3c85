#include "support/case.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "reference/activations.hpp"
#include "support/watchdog.hpp"

namespace qla::test {

namespace gates {
namespace {
double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }
double logsigmoid(double x) { return -softplus(-x); }
}  // namespace
Gate soft() {
  return [](Random& r, const Where&) { return logsigmoid(r.normal()) / 16; };
}
Gate qwen() {
  return [](Random& r, const Where& w) {
    const double A = w.heads > 1 ? 16.0 * static_cast<double>(w.head) / static_cast<double>(w.heads - 1) : 0.0;
    return -A * softplus(0.5 * r.normal() + 1);
  };
}
Gate scaled(std::vector<double> A) {
  return [A](Random& r, const Where& w) { return -A[w.head % A.size()] * softplus(0.5 * r.normal() + 1); };
}
Gate zero() { return constant(0); }
Gate mix() {
  return [](Random& r, const Where&) {
    const double x = logsigmoid(r.uniform());
    return r.uniform() < 0.5 ? x : 0.0;
  };
}
Gate constant(double c) {
  return [c](Random&, const Where&) { return c; };
}
Gate cliff(int64_t token, double depth) {
  return [=](Random&, const Where& w) { return w.token == token ? depth : -0.01; };
}
Gate sometimes(double share, double value, Gate otherwise) {
  return [=](Random& r, const Where& w) { return r.uniform() < share ? value : otherwise(r, w); };
}
Gate logsigmoid_over(double divisor) {
  return [=](Random& r, const Where&) { return logsigmoid(r.uniform()) / divisor; };
}
}  // namespace gates

namespace {

void normalise(Numbers& x, int64_t width) {
  for (size_t row = 0; row < x.size(); row += width) {
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += x[row + i] * x[row + i];
    for (int64_t i = 0; i < width; ++i) x[row + i] /= std::sqrt(sum);
  }
}

void draw_keys(const Case& c, Sample& s, Random& random) {
  reference::Inputs& in = s.in;
  const int64_t H = c.H, K = c.K, tokens = s.tokens();
  in.q = random.normals(tokens * H * K, c.keys == Keys::kRaw3 ? 3 : 1);
  in.k = random.normals(tokens * H * K, c.keys == Keys::kRaw3 ? 3 : 1);
  if (c.keys == Keys::kRaw3) return;
  if (c.keys == Keys::kCorrelated || c.keys == Keys::kRepeated) {
    Numbers base = random.normals(H * K);
    normalise(base, K);
    for (int64_t i = 0; i < tokens * H * K; ++i) {
      const double fixed = base[i % (H * K)];
      in.k[i] = c.keys == Keys::kRepeated ? fixed : fixed + c.spread * in.k[i];
    }
    if (c.keys == Keys::kRepeated) in.q = in.k;
  }
  normalise(in.q, K);
  normalise(in.k, K);
}

double inner(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

std::string coordinate(const Sample& s, const Field& field, size_t i, size_t count) {
  std::ostringstream text;
  const reference::Inputs& in = s.in;
  const int64_t heads = field_heads(s, field);
  if (heads && s.tokens()) {
    const int64_t width = static_cast<int64_t>(count) / (s.tokens() * heads), row = static_cast<int64_t>(i) / width;
    const int64_t token = row / heads;
    text << "batch " << token / s.length << ", token " << token % s.length << " (chunk row " << token % 64 << "), head "
         << row % heads << ", column " << static_cast<int64_t>(i) % width;
  } else if (field.is_state) {
    const int64_t size = in.state_size(), at = static_cast<int64_t>(i);
    text << "sequence " << at / size / in.v_heads << ", head " << at / size % in.v_heads << ", k " << at % size / in.v_dim
         << ", v " << at % in.v_dim;
  } else {
    text << "head " << i;
  }
  return text.str();
}

// relative error by window of 64 tokens of the flat buffer
std::string by_window(const Sample& s, const Field& field, const Numbers& got, const Numbers& truth) {
  if (!field_heads(s, field) || s.tokens() == 0) return "";
  std::ostringstream text;
  const int64_t per_token = static_cast<int64_t>(truth.size()) / s.tokens();
  text << "; relative error by 64 tokens:";
  for (int64_t first = 0; first < s.tokens() && first < 64 * 12; first += 64) {
    double error = 0, size = 0;
    for (int64_t i = first * per_token; i < std::min(first + 64, s.tokens()) * per_token; ++i)
      error += (got[i] - truth[i]) * (got[i] - truth[i]), size += truth[i] * truth[i];
    text << ' ' << (size > 0 ? std::sqrt(error / size) : std::sqrt(error));
  }
  return text.str();
}

double largest_error(const Numbers& got, const Numbers& truth) {
  double error = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    const double e = std::fabs(got[i] - truth[i]);
    if (!(e <= error)) error = std::isnan(e) ? std::numeric_limits<double>::infinity() : e;
  }
  return error;
}

// tokens outside every sequence: exactly zero, in o and in every gradient
void expect_zero_padding(const Sample& s, const Field& field, const Numbers& got) {
  if (!field_heads(s, field) || s.tokens() == s.valid_tokens() || s.tokens() == 0) return;
  const int64_t per_token = static_cast<int64_t>(got.size()) / s.tokens();
  for (size_t i = s.valid_tokens() * per_token; i < got.size(); ++i)
    if (!(got[i] == 0.0)) {
      ADD_FAILURE() << field.name << ": expected 0 past the last sequence, got " << got[i] << " at "
                    << coordinate(s, field, i, got.size());
      return;
    }
}

// QLA_TEST_ERRORS names a file: one line `backend,test,tensor,relative error,limit` for each judged tensor
void record_error(const char* tensor, double relative, double limit) {
  static const char* const path = std::getenv("QLA_TEST_ERRORS");
  if (!path) return;
  const testing::TestInfo& info = *testing::UnitTest::GetInstance()->current_test_info();
  if (!info.value_param()) return;  // of no backend: the judge's own test, which plants errors
  const std::string test = info.name();
  const size_t backend = test.find_last_of("_/");
  std::ofstream(path, std::ios::app) << test.substr(backend + 1) << ',' << test.substr(0, backend) << ',' << tensor << ','
                                     << relative << ',' << limit << '\n';
}

// dA_log and ddt_bias: one number a head, the sum over its tokens. Their terms often cancel. Then the sum itself says nothing of
// how large an error is, and one emulator's error of it, a sum of roundings that cancel too, nothing of how large errors are:
// both are measured by what the sum would be with random signs where that is more (decision 0101).
bool is_sum_over_tokens(const Field& field) { return field.member == &Values::dA_log || field.member == &Values::ddt_bias; }

// By head, the root of the sum of the terms' squares: of a dg, or of errors of it. The terms of ddt_bias are dg, those of dA_log
// dg softplus(x) / softplus'(x), as log decay is -A softplus(x).
Numbers root_of_squares(const Sample& s, const Field& field, const Numbers& dg) {
  const reference::Inputs& in = s.in;
  Numbers squares(in.v_heads, 0.0);
  for (int64_t n = 0; n < s.num_seqs(); ++n)
    for (int64_t i = in.bos[n] * in.v_heads; i < in.eos[n] * in.v_heads; ++i) {
      const int64_t head = i % in.v_heads;
      const double x = in.g[i] + (in.dt_bias.empty() ? 0.0 : in.dt_bias[head]), slope = reference::sigmoid(x);
      const double term = dg[i] * (field.member == &Values::dA_log && slope > 0 ? reference::softplus(x) / slope : 1.0);
      squares[head] += term * term;
    }
  for (double& x : squares) x = std::sqrt(x);
  return squares;
}

// |x|, or for sums over tokens what random signs would give of the terms from dg where that is more
Numbers sizes_of(const Sample& s, const Field& field, const Numbers& x, const Numbers& dg) {
  Numbers sizes = is_sum_over_tokens(field) ? root_of_squares(s, field, dg) : Numbers(x.size(), 0.0);
  for (size_t i = 0; i < x.size(); ++i)
    if (!(std::fabs(x[i]) <= sizes[i])) sizes[i] = std::fabs(x[i]);
  return sizes;
}

Numbers minus(Numbers x, const Numbers& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] -= y[i];
  return x;
}

// |errors| / |sizes|
double ratio(const Numbers& errors, const Numbers& sizes) {
  const double size = std::sqrt(inner(sizes, sizes)), error = std::sqrt(inner(errors, errors));
  const double relative = size > 0 ? error / size : error;
  return std::isnan(relative) ? std::numeric_limits<double>::infinity() : relative;
}

void expect_field(const Case& c, const Sample& s, const Field& field, const Values& got_values, const Values& truth_values,
                  const std::vector<Values>& emulated, const Values& scale) {
  const Numbers &got = got_values.*field.member, &truth = truth_values.*field.member;
  ASSERT_EQ(got.size(), truth.size()) << field.name;
  if (truth.empty()) return;
  expect_zero_padding(s, field, got);
  const Numbers sizes = sizes_of(s, field, truth, truth_values.dg);
  const double size = largest(sizes), error = largest_error(got, truth);
  const int32_t out = field_dtype(s, field);
  double emulator_relative = 0, emulator_largest = 0;  // of the emulators' errors, the worse
  for (const Values& values : emulated) {
    const bool rounded = is_16_bit(s.g_dtype);  // dg alone is, not the sums' terms: of their errors nothing is known
    const Numbers d_terms = minus(rounded ? truth_values.dg : values.dg, truth_values.dg);
    const Numbers errors = sizes_of(s, field, minus(values.*field.member, truth), d_terms);
    emulator_relative = std::max(emulator_relative, ratio(errors, sizes));
    emulator_largest = std::max(emulator_largest, largest(errors));
  }
  const auto first_bad = [&](double limit) {
    std::ostringstream text;
    for (size_t i = 0; i < truth.size(); ++i)
      if (!(std::fabs(got[i] - truth[i]) <= limit)) {
        text << "; first bad: " << coordinate(s, field, i, truth.size()) << ": got " << got[i] << ", expected " << truth[i];
        break;
      }
    return text.str() + by_window(s, field, got, truth);
  };
  for (const std::string& name : c.near_zero)
    if (name ==
        field.name) {  // the truth is nearly 0: measured against what the tensor holds with independent keys (decision 0023)
      const double independent = largest(scale.*field.member);
      double limit = limits::kNearZero * independent;
      if (!emulated.empty()) {
        EXPECT_LE(emulator_largest, limits::kNearZeroEmulator * independent)
            << field.name << " (nearly zero): the emulator's own error; it would hide a fault";
        limit = std::max(limit, limits::kOfEmulator * emulator_largest);
      }
      EXPECT_LE(error, limit) << field.name << " (nearly zero)" << first_bad(limit);
      return;
    }
  if (size == 0) {
    EXPECT_LE(error, limits::kZero * std::max({largest(s.in.v), 1e-30})) << field.name << " (exactly zero)" << first_bad(0);
    return;
  }
  if (s.dtype != QLA_FLOAT64 && size < limits::kSmallest) {
    EXPECT_LE(error, limits::kSmallest) << field.name << " (below fp32's range)" << first_bad(limits::kSmallest);
    return;
  }
  double limit =
      limits::relative(s.dtype, field.is_gradient, c.hard) + limits::unit_roundoff(out) * (is_16_bit(out) && !is_16_bit(s.dtype));
  double largest_limit = limits::kLargest * limit * size;
  if (!emulated.empty()) {
    const double budget = field.is_gradient ? c.emulator.gradient : c.emulator.output;
    // fp16 operands underflow below 2^-24: of gradients as small as that nothing is known but that they stay as small
    const bool underflows = s.dtype == QLA_FLOAT16 && size < 0x1p-14;
    EXPECT_TRUE(emulator_relative <= budget || underflows)
        << emulator_relative << " > " << budget << ", " << field.name << ": the emulator's own error; it would hide a fault";
    limit = std::max(limit, limits::kOfEmulator * emulator_relative);
    largest_limit = limits::kOfEmulator * emulator_largest + 4e-6 * size;
  }
  const double relative = ratio(minus(got, truth), sizes);
  record_error(field.name, relative, limit);
  EXPECT_LE(relative, limit) << field.name << " relative L2" << first_bad(largest_limit);
  EXPECT_LE(error, largest_limit) << field.name << " largest error, entries up to " << size << first_bad(largest_limit);
  if (c.slope && field.is_state && !field.is_gradient) {
    const double slope = inner(got, truth) / inner(truth, truth) - 1;
    EXPECT_LE(std::fabs(slope), limits::kSlope) << field.name << " slope";
  }
  const int64_t heads = field_heads(s, field);
  if (c.per_head && heads > 1) {
    const int64_t width = static_cast<int64_t>(truth.size()) / (s.tokens() * heads);
    for (int64_t h = 0; h < heads; ++h) {
      const auto of_head = [&](const Numbers& all) {
        Numbers part;
        for (int64_t t = 0; t < s.valid_tokens(); ++t)
          for (int64_t x = 0; x < width; ++x) part.push_back(all[(t * heads + h) * width + x]);
        return part;
      };
      const Numbers mine = of_head(got), true_ones = of_head(truth);
      double head_limit = limit;
      for (const Values& values : emulated)
        head_limit = std::max(head_limit, limits::kOfEmulator * relative_error(of_head(values.*field.member), true_ones));
      EXPECT_LE(relative_error(mine, true_ones), head_limit) << field.name << " of head " << h;
    }
  }
}

}  // namespace

double relative_error(const Numbers& got, const Numbers& truth) {
  double error = 0, size = 0;
  for (size_t i = 0; i < truth.size(); ++i) error += (got[i] - truth[i]) * (got[i] - truth[i]), size += truth[i] * truth[i];
  const double relative = size > 0 ? std::sqrt(error / size) : std::sqrt(error);
  return std::isnan(relative) ? std::numeric_limits<double>::infinity() : relative;
}

double relative_error(const Sample& sample, const Field& field, const Values& got, const Values& truth) {
  return ratio(minus(got.*field.member, truth.*field.member), sizes_of(sample, field, truth.*field.member, truth.dg));
}

double largest(const Numbers& x) {
  double size = 0;
  for (const double value : x)
    if (std::fabs(value) > size) size = std::fabs(value);
  return size;
}

void expect_bitwise(const Numbers& got, const Numbers& expected, const char* what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < got.size(); ++i)
    if (std::memcmp(&got[i], &expected[i], sizeof(double)) != 0) {
      ADD_FAILURE() << what << ": not the same bits at element " << i << " of " << got.size() << ": " << got[i] << " and "
                    << expected[i];
      return;
    }
}

void expect_bitwise(const Values& got, const Values& expected, const char* what) {
  for (const Field& field : fields()) {
    SCOPED_TRACE(field.name);
    expect_bitwise(got.*field.member, expected.*field.member, what);
  }
}

Sample sample_of(const Case& c, int32_t dtype) {
  Sample s;
  int number = 0;
  for (const char* at = c.recipe; *at; ++at)
    if (*at >= '0' && *at <= '9') number = 10 * number + (*at - '0');
  Random random(1000 + number + c.seed);
  const bool real64 = dtype == QLA_FLOAT64;
  s.batch = c.B, s.length = c.T, s.cu = c.cu;
  s.dtype = dtype;
  s.g_dtype = real64 ? QLA_FLOAT64 : c.g_dtype;
  s.beta_dtype = real64 ? QLA_FLOAT64 : c.beta_dtype;
  s.state_dtype = real64 ? QLA_FLOAT64 : c.state_dtype;
  s.set_sequences();
  reference::Inputs& in = s.in;
  in.k_heads = c.H, in.v_heads = c.HV, in.k_dim = c.K, in.v_dim = c.V;
  s.default_scale = std::isnan(c.scale);
  in.scale = s.default_scale ? 1.0 / std::sqrt(static_cast<double>(c.K)) : c.scale;
  in.qk_l2norm = c.qk_l2norm, in.raw_gate = c.raw_gate, in.beta_sigmoid = c.beta_sigmoid, in.neg_eigval = c.neg_eigval;
  const int64_t tokens = s.tokens(), states = s.num_seqs() * c.HV * in.state_size();
  draw_keys(c, s, random);
  in.v = random.normals(tokens * c.HV * c.V);
  in.beta = random.normals(tokens * c.HV);
  if (!c.beta_sigmoid)
    for (double& x : in.beta) x = 1.0 / (1.0 + std::exp(-x));
  in.g.assign(tokens * c.HV, 0.0);
  for (int64_t n = 0; n < s.num_seqs(); ++n)
    for (int64_t t = in.bos[n]; t < in.eos[n]; ++t)
      for (int64_t h = 0; h < c.HV; ++h) in.g[t * c.HV + h] = c.gate(random, {t - in.bos[n], in.eos[n] - in.bos[n], h, c.HV});
  if (c.raw_gate) {
    for (double& x : in.g) x = 0.5 * random.normal();
    for (int64_t h = 0; h < c.HV; ++h) in.A_log.push_back(std::log(random.uniform(0.01, 16)));
    if (c.dt_bias) in.dt_bias.assign(c.HV, 1.0);
  }
  if (c.h0) in.initial_state = random.normals(states);
  if (c.d_o) in.d_o = random.normals(tokens * c.HV * c.V);
  if (c.dht) in.d_final_state = random.normals(states, 0.125);
  if (c.edit) c.edit(s, random);
  s.round_values();
  return s;
}

std::string not_on_cuda(const Case& c, int32_t dtype) {
  if (!is_16_bit(dtype)) return std::string(name_of(dtype)) + " tensors: the GPU serves bf16 and fp16";
  if (c.K != 128 || c.V != 128) return "K, V != 128: the GPU serves 128 x 128";
  for (const Options& call : c.calls)
    if (call.layout == Layout::kBackwards)
      return "falling addresses: the GPU's loads take rising strides that are multiples of 16 bytes";
  return "";
}

void expect_values(const Case& c, const Sample& sample, const Options& options, const Values& got, const Values& truth,
                   const std::vector<Values>& emulated) {
  const Values scale = c.near_zero_scale ? c.near_zero_scale(sample) : Values{};
  for (const Field& field : fields()) {
    if (field.is_gradient && !options.backward) continue;
    const std::string name = field.name;
    if (name == "final_state" && !options.final_state) continue;
    if (name == "dh0" && sample.in.initial_state.empty()) continue;
    if (name == "ddt_bias" && sample.in.dt_bias.empty()) continue;
    if (name == "dg" && sample.no_gate) continue;
    expect_field(c, sample, field, got, truth, emulated, scale);
  }
}

void run_case(const Backend& backend, const Case& c, int32_t dtype) {
  if (backend.on_device()) {
    const std::string reason = not_on_cuda(c, dtype);
    if (!reason.empty()) GTEST_SKIP() << reason;
  } else if (c.big) {
    GTEST_SKIP() << "device only: too long for a CPU, which runs the smaller case of the same recipe";
  }
  if (std::getenv("QLA_SANITIZED") && static_cast<double>(c.B) * c.T * c.HV * c.K * c.V > 1e8)
    GTEST_SKIP() << "sanitizers: long; the plain build runs it";
  const Sample sample = sample_of(c, dtype);
  bool backward = false;
  for (const Options& call : c.calls) backward |= call.backward && backend.serves_backward();
  const Values truth = truth_of(sample, backward);
  const std::vector<Values> emulated = emulations_of(sample, backward, backend.on_device());
  for (Options call : c.calls) {
    const bool forward_only = call.backward && !backend.serves_backward();  // a device whose backward kernels are not there yet
    call.backward &= !forward_only;
    SCOPED_TRACE(std::string(c.recipe) + " " + c.name + ", " + name_of(dtype) + ", " + backend.name() + ", call \"" + call.name +
                 "\"");
    Result result;
    {
      const Watchdog watchdog(60, std::string(c.recipe) + " " + c.name);
      result = run(backend, sample, call);
    }
    if (!result.ok()) {
      ADD_FAILURE() << result.where << ": status " << qla_status_name(result.status) << ": " << result.error;
      continue;
    }
    expect_values(c, sample, call, result.values, truth, emulated);
    if (c.extra && !forward_only) c.extra(sample, truth, result);
  }
}

}  // namespace qla::test
