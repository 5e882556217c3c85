// Segments on the CPU: warm-up, exact merge and off give the same numbers, for both directions; results do not depend on threads.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "cpu_problem.hpp"

namespace qla::cpu_test {
namespace {

Options cut_options(int32_t mode, double gate, double threshold) {
  Options s;
  s.tokens = 900, s.k_heads = 2, s.v_heads = 4, s.k_dim = 20, s.v_dim = 28;
  s.cp_mode = mode, s.cp_segment_chunks = mode == QLA_CP_FIXED ? 3 : 0, s.cp_threshold = threshold;
  s.gate = gate;
  return s;
}

void expect_right(const Options& s, double limit) {
  CpuRun run(s);
  run.forward();
  run.backward();
  for (const NamedError& e : errors_of(run)) EXPECT_LE(e.error, limit) << s.name << ": " << e.name;
}

TEST(CpuSegments, WarmupAndMerge) {
  for (const double gate : {0.0, 0.05, 0.5, 3.0})
    for (const double threshold : {NAN, -INFINITY})
      for (const bool with_states : {true, false}) {
        Options s = cut_options(QLA_CP_FIXED, gate, threshold);
        s.with_h0 = s.with_dht = with_states;
        s.name = "gate " + std::to_string(gate) + ", threshold " + std::to_string(threshold) + ", states " +
                 std::to_string(with_states);
        expect_right(s, 1e-5);
      }
}

TEST(CpuSegments, PackedMixedHeads) {
  Options s = cut_options(QLA_CP_FIXED, 0.3, NAN);
  s.cu = {0, 130, 130, 131, 720, 880}, s.tokens = 900;
  s.flags = QLA_FLAG_RAW_GATE | QLA_FLAG_QK_L2NORM | QLA_FLAG_STATE_V_FIRST | QLA_FLAG_BETA_SIGMOID;
  s.name = "packed";
  expect_right(s, 1e-5);
  s.dtype = s.gate_dtype = s.beta_dtype = s.state_dtype = QLA_FLOAT64;
  expect_right(s, 1e-6);  // A_log, dt_bias and their gradients are float32 here
}

TEST(CpuSegments, Float64) {
  for (const double gate : {0.0, 1.0}) {
    Options s = cut_options(QLA_CP_FIXED, gate, NAN);
    s.dtype = s.gate_dtype = s.beta_dtype = s.state_dtype = QLA_FLOAT64;
    expect_right(s, 1e-10);
  }
}

// Every dg of a sequence's first token is exactly 0 where it has no state, with and without cuts.
TEST(CpuSegments, FirstTokenGateGradientIsZero) {
  for (const int32_t mode : {QLA_CP_OFF, QLA_CP_FIXED}) {
    Options s = cut_options(mode, 0.5, NAN);
    s.with_h0 = false;
    s.cu = {0, 400, 401, 900};
    CpuRun run(s);
    run.backward();
    for (const int64_t token : {0, 400, 401})
      for (int64_t head = 0; head < s.v_heads; ++head) EXPECT_EQ(run.dg.get(token * s.v_heads + head), 0.0);
  }
}

std::vector<char> all_bytes(const CpuRun& r) {
  std::vector<char> all;
  for (const Tensor* t : {&r.o, &r.ht, &r.dq, &r.dk, &r.dv, &r.dg, &r.dbeta, &r.dh0})
    all.insert(all.end(), t->bytes.begin(), t->bytes.end());
  return all;
}

TEST(CpuThreads, SameBits) {
  for (const int32_t mode : {QLA_CP_OFF, QLA_CP_FIXED})
    for (const double threshold : {NAN, -INFINITY}) {
      Options s = cut_options(mode, 0.4, threshold);
      s.tokens = 1600, s.k_dim = 64, s.v_dim = 72, s.v_heads = 6;
      std::vector<char> first;
      for (const int threads : {1, 2, 3, 8}) {
        s.threads = threads;
        CpuRun run(s);
        run.forward();
        run.backward();
        if (threads == 1) first = all_bytes(run);
        EXPECT_EQ(std::memcmp(first.data(), all_bytes(run).data(), first.size()), 0) << threads << " threads, mode " << mode;
      }
    }
}

// A NaN reaches every later token of its value head and no other sequence, whatever the cuts.
TEST(CpuSegments, NanReachesLaterTokens) {
  for (const int32_t mode : {QLA_CP_OFF, QLA_CP_FIXED}) {
    Options s = cut_options(mode, 3.0, NAN);
    s.cu = {0, 100, 800, 900};
    CpuRun run(s);
    run.v.set((130 * s.v_heads + 1) * s.v_dim + 5, NAN);
    run.forward();
    for (int64_t token = 0; token < 900; ++token)
      for (int64_t head = 0; head < s.v_heads; ++head) {
        const double x = run.o.get((token * s.v_heads + head) * s.v_dim + 5);
        const bool later = token >= 130 && token < 800 && head == 1, same_chunk = token >= 100 && token < 164 && head == 1;
        if (later) {
          EXPECT_TRUE(std::isnan(x)) << token;
        } else if (!same_chunk) {
          EXPECT_FALSE(std::isnan(x)) << token << " head " << head;
        }
      }
  }
}

// A value that is not finite, far before the warm-ups behind it: cut and uncut runs lose the same elements, and what is left of
// the sums over tokens is the same.
TEST(CpuSegments, NotFiniteBeforeTheWarmup) {
  struct Place {
    Tensor CpuRun::*tensor;
    int64_t token;
    double value;
  };
  for (const Place& place : {Place{&CpuRun::v, 40, NAN}, Place{&CpuRun::v, 127, NAN}, Place{&CpuRun::k, 130, INFINITY},
                             Place{&CpuRun::d_o, 1400, NAN}, Place{&CpuRun::g, 300, NAN}, Place{&CpuRun::q, 700, NAN}})
    for (const bool with_states : {false, true}) {
      Options s = cut_options(QLA_CP_FIXED, 0, NAN);
      s.tokens = 1500, s.cp_segment_chunks = 2, s.with_h0 = s.with_dht = with_states;
      s.flags = QLA_FLAG_RAW_GATE;
      std::vector<CpuRun> runs;
      runs.reserve(2);  // tensors must not move
      for (const int32_t mode : {QLA_CP_OFF, QLA_CP_FIXED}) {
        s.cp_mode = mode, s.threads = mode == QLA_CP_OFF ? 1 : 3;
        runs.emplace_back(s);
        CpuRun& run = runs.back();
        for (int64_t i = 0; i < run.A_log.count(); ++i) run.A_log.set(i, 2.0);  // forgets within a chunk
        Tensor& t = run.*place.tensor;
        t.set(t.count() / s.tokens * place.token, place.value);  // the first head's
        run.forward();
        run.backward();
      }
      int64_t lost = 0;
      for (Tensor CpuRun::*t : {&CpuRun::o, &CpuRun::ht, &CpuRun::dq, &CpuRun::dk, &CpuRun::dv, &CpuRun::dg, &CpuRun::dbeta,
                                &CpuRun::dA_log, &CpuRun::ddt_bias})
        for (int64_t i = 0; i < (runs[0].*t).count(); ++i) {
          const double uncut = (runs[0].*t).get(i), cut = (runs[1].*t).get(i);
          lost += std::isnan(uncut);
          ASSERT_EQ(std::isfinite(uncut), std::isfinite(cut)) << "token " << place.token << ", element " << i;
          if (!std::isfinite(uncut)) continue;
          ASSERT_NEAR(uncut, cut, 1e-4 * (1 + std::fabs(uncut)));
        }
      EXPECT_GT(lost, 0);
    }
}

}  // namespace
}  // namespace qla::cpu_test
