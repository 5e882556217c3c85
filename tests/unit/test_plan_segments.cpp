// plan/segments: golden cuts, the warm-up rule at its threshold, and a fuzz over lengths and gates: every chunk owned exactly
// once.
#include "plan/segments.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "plan/policy.hpp"

namespace qla::plan {
namespace {

CutRule rule_of(int64_t segment_chunks, float threshold = -10.0f) {
  CutRule rule;
  rule.segment_chunks = segment_chunks;
  rule.max_warmup_chunks = 2 * segment_chunks;
  rule.threshold = threshold;
  rule.balance = 0;
  return rule;
}

std::vector<Segment> segments(int64_t chunks, const CutRule& rule, const std::vector<float>& decay, bool has_initial = false,
                              bool reverse = false) {
  std::vector<Segment> all;
  for_each_segment(
      make_cut(chunks, rule), rule, has_initial, reverse, [&](int64_t c) { return decay.at(static_cast<size_t>(c)); },
      [&](const Segment& segment) { all.push_back(segment); });
  return all;
}

// "0+4 zero end | 4+4 warmup 3": first + length, start, warm-up, what a pre-pass must make.
std::string text(const std::vector<Segment>& all) {
  const char* starts[] = {"zero", "initial", "warmup", "merged"};
  std::string out;
  for (const Segment& s : all) {
    out += out.empty() ? "" : " | ";
    out += std::to_string(s.first_chunk) + "+" + std::to_string(s.num_chunks) + " " + starts[s.start];
    if (s.warmup_chunks) out += " " + std::to_string(s.warmup_chunks);
    if (s.needs_end_state) out += s.needs_transition ? " S,M" : " S";
    if (s.is_end) out += " end";
  }
  return out;
}

std::vector<float> constant(int64_t chunks, float decay) { return std::vector<float>(static_cast<size_t>(chunks), decay); }

TEST(Segments, GoldenForward) {
  EXPECT_EQ(text(segments(0, rule_of(4), {})), "0+0 zero end");
  EXPECT_EQ(text(segments(3, rule_of(4), constant(3, 0))), "0+3 zero end");
  EXPECT_EQ(text(segments(12, rule_of(0), constant(12, -3))), "0+12 zero end");
  // -3 a chunk: 4 chunks reach -10.  At the first boundary the warm-up begins at the sequence's start.
  EXPECT_EQ(text(segments(10, rule_of(4), constant(10, -3))), "0+4 zero | 4+4 zero 4 | 8+2 warmup 4 end");
  EXPECT_EQ(text(segments(10, rule_of(4), constant(10, -20))), "0+4 zero | 4+4 warmup 1 | 8+2 warmup 1 end");
  // Never forgets. Up to 8 = 2 * 4 chunks are walked again, from the start; farther on, merges: segment 1 starts from zero
  // itself, so its end state needs no transition; segment 2 starts merged, so it does.
  EXPECT_EQ(text(segments(16, rule_of(4), constant(16, 0))), "0+4 zero | 4+4 zero 4 | 8+4 zero 8 S | 12+4 merged end");
  CutRule exact = rule_of(4);
  exact.exact = 1;
  EXPECT_EQ(text(segments(14, exact, constant(14, -20))), "0+4 zero S | 4+4 merged S,M | 8+4 merged S,M | 12+2 merged end");
  CutRule join = rule_of(2);
  join.join = 1;
  EXPECT_EQ(text(segments(8, join, {0, 0, 0, 0, 0, -20, -20, -20})), "0+2 zero | 2+2 zero 2 | 4+2 zero 4 | 6+2 warmup 1 end");
  EXPECT_EQ(text(segments(10, join, {-1, 0, 0, 0, 0, 0, 0, 0, 0, -20})), "0+2 zero | 2+2 zero 2 | 4+6 zero 4 end");
}

TEST(Segments, GoldenReverse) {
  EXPECT_EQ(text(segments(10, rule_of(4), constant(10, -3), false, true)), "8+2 zero | 4+4 zero 2 | 0+4 warmup 4 end");
  CutRule exact = rule_of(4);
  exact.exact = 1;
  EXPECT_EQ(text(segments(14, exact, constant(14, 0), true, true)),
            "12+2 initial S | 8+4 merged S,M | 4+4 merged S,M | 0+4 merged end");
  CutRule join = rule_of(2);
  join.join = 1;
  EXPECT_EQ(text(segments(10, join, {-20, 0, 0, 0, 0, 0, 0, 0, 0, -1}, false, true)), "8+2 zero | 6+2 zero 2 | 0+6 zero 4 end");
}

// (C5): the least n with sum <= threshold, the threshold itself included.
TEST(Segments, WarmupAtTheThreshold) {
  std::vector<float> decay = constant(16, -1);
  decay[7] = -4, decay[6] = -6;
  EXPECT_EQ(segments(16, rule_of(8), decay)[1].warmup_chunks, 2);
  decay[6] = -5.999f;
  EXPECT_EQ(segments(16, rule_of(8), decay)[1].warmup_chunks, 3);
  decay[7] = -10.0f;
  EXPECT_EQ(segments(16, rule_of(8), decay)[1].warmup_chunks, 1);
  // Growth (unnormalised keys: ghat > 0) postpones the threshold.
  decay[7] = 8.0f, decay[6] = -17.0f, decay[5] = -1.0f;
  EXPECT_EQ(segments(16, rule_of(8), decay)[1].warmup_chunks, 3);
}

// A given state must lie in the warm-up or be forgotten by threshold - 30 over everything before the boundary.
TEST(Segments, InitialStatePrecondition) {
  EXPECT_EQ(text(segments(32, rule_of(8), constant(32, -3), true)),
            "0+8 initial | 8+8 initial 8 | 16+8 warmup 4 | 24+8 warmup 4 end");  // 16 * -3 <= -40, 8 * -3 is not
  EXPECT_EQ(text(segments(32, rule_of(8), constant(32, -2), true)),
            "0+8 initial | 8+8 initial 8 | 16+8 initial 16 | 24+8 warmup 5 end");
  CutRule brief = rule_of(8);
  brief.max_warmup_chunks = 6;
  EXPECT_EQ(text(segments(32, brief, constant(32, -2), true)),
            "0+8 initial S | 8+8 merged S,M | 16+8 merged | 24+8 warmup 5 end");
  EXPECT_EQ(text(segments(32, brief, constant(32, -2), false)), "0+8 zero | 8+8 warmup 5 | 16+8 warmup 5 | 24+8 warmup 5 end");
  // The same from the other end: d_final_state.
  EXPECT_EQ(text(segments(32, brief, constant(32, -2), true, true)),
            "24+8 initial S | 16+8 merged S,M | 8+8 merged | 0+8 warmup 5 end");
}

TEST(Segments, NotFiniteForbidsWarmup) {
  for (float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    std::vector<float> decay = constant(16, -20);
    decay[1] = bad;
    CutRule rule = rule_of(4);
    rule.max_warmup_chunks = 2;
    EXPECT_EQ(text(segments(16, rule, decay)), "0+4 zero S | 4+4 merged S,M | 8+4 merged S,M | 12+4 merged end");
  }
}

TEST(Segments, BalanceEvensOutLengths) {
  CutRule rule = rule_of(64);
  rule.balance = 1;
  for (int64_t chunks = 1; chunks < 1000; ++chunks) {
    const Cut cut = make_cut(chunks, rule);
    const int64_t count = ceil_div(chunks, 64);  // without balance
    ASSERT_EQ(cut.segment_chunks, ceil_div(chunks, count)) << chunks;
    ASSERT_LE(cut.num_segments, count) << chunks;
    ASSERT_EQ(cut.begin(cut.num_segments), chunks);
    ASSERT_LT(cut.begin(cut.num_segments - 1), chunks);
  }
  EXPECT_EQ(make_cut(65, rule).segment_chunks, 33);
}

TEST(Segments, ShortEnoughStaysWhole) {
  CutRule rule = rule_of(16);
  rule.uncut_chunks = 40;
  for (const int64_t chunks : {0, 16, 17, 40}) EXPECT_EQ(make_cut(chunks, rule).num_segments, 1) << chunks;
  EXPECT_EQ(make_cut(41, rule).num_segments, 3);
  rule.segment_chunks = 0;
  EXPECT_EQ(make_cut(41, rule).num_segments, 1);
}

TEST(Segments, HugeArithmetic) {
  const int64_t tokens = int64_t{1} << 31;
  EXPECT_EQ(chunks_of(tokens), int64_t{1} << 25);
  EXPECT_EQ(chunks_of(tokens + 1), (int64_t{1} << 25) + 1);
  CutRule rule = rule_of(1 << 20);
  const Cut cut = make_cut(chunks_of(tokens + 1), rule);
  EXPECT_EQ(cut.num_segments, 33);
  EXPECT_EQ(cut.begin(33) - cut.begin(32), 1);
  EXPECT_EQ(most_segments(0, 0, rule), 0);
  EXPECT_EQ(most_segments(tokens, 1000000, rule), 1000000 + ((int64_t{1} << 25) + 1000000) / (1 << 20));
  EXPECT_EQ(most_segments(int64_t{1} << 44, int64_t{1} << 40, rule_of(1)), (int64_t{1} << 40) * 2 + (int64_t{1} << 38));
}

TEST(Segments, DefaultThresholds) {
  qla_gdn_forward_args args{};
  args.cp_warmup_threshold = NAN;
  EXPECT_EQ(make_policy(args, QLA_BFLOAT16).threshold, -10.0f);
  EXPECT_EQ(make_policy(args, QLA_FLOAT32).threshold, -18.0f);
  EXPECT_EQ(make_policy(args, QLA_FLOAT64).threshold, -37.0f);
  args.cp_warmup_threshold = -INFINITY;
  EXPECT_TRUE(rule_for(make_policy(args, QLA_BFLOAT16), 8).exact);
}

// Random lengths, gates and rules, both directions.
TEST(Segments, FuzzEveryChunkOnce) {
  std::mt19937_64 random(11);
  const auto pick = [&](int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random); };
  int64_t starts[4] = {};
  for (int round = 0; round < 200000; ++round) {
    const int64_t chunks = pick(0, 3) ? pick(0, 40) : pick(0, 400);
    CutRule rule = rule_of(pick(0, 12));
    rule.uncut_chunks = pick(0, 3) ? 0 : pick(0, 60);
    rule.max_warmup_chunks = pick(0, 2 * rule.segment_chunks + 2);
    rule.exact = pick(0, 7) == 0;
    rule.join = pick(0, 3) == 0;
    rule.balance = pick(0, 1);
    const bool has_initial = pick(0, 1), reverse = pick(0, 1);
    std::vector<float> decay(static_cast<size_t>(chunks));
    const int64_t kind = pick(0, 3);
    for (float& d : decay)
      d = kind == 0   ? 0.0f
          : kind == 1 ? -3.2f
          : kind == 2 ? -0.1f * static_cast<float>(pick(0, 200))
                      : static_cast<float>(pick(-30, 5));
    if (chunks && pick(0, 20) == 0) decay[static_cast<size_t>(pick(0, chunks - 1))] = std::nanf("");
    const std::vector<Segment> all = segments(chunks, rule, decay, has_initial, reverse);
    SCOPED_TRACE(round);
    ASSERT_LE(static_cast<int64_t>(all.size()), most_segments(chunks * kChunkTokens, 1, rule));
    ASSERT_TRUE(rule.cuts(chunks) || all.size() == 1);
    ASSERT_EQ(rule.cuts(chunks), rule.segment_chunks > 0 && chunks > rule.segment_chunks && chunks > rule.uncut_chunks);
    ASSERT_FALSE(rule.cuts(rule.longest_whole()));
    ASSERT_TRUE(rule.segment_chunks == 0 || rule.cuts(rule.longest_whole() + 1));
    int64_t at = reverse ? chunks : 0;  // the walk's front
    for (size_t j = 0; j < all.size(); ++j) {
      const Segment& s = all[j];
      ++starts[s.start];
      ASSERT_EQ(reverse ? s.first_chunk + s.num_chunks : s.first_chunk, at);
      ASSERT_TRUE(s.num_chunks > 0 || (chunks == 0 && all.size() == 1));
      const int64_t before = reverse ? chunks - at : at;
      ASSERT_LE(s.warmup_chunks, before);
      ASSERT_LE(s.warmup_chunks, rule.max_warmup_chunks);
      ASSERT_EQ(s.is_end, j + 1 == all.size());
      const int32_t given = has_initial ? QLA_START_INITIAL : QLA_START_ZERO;
      if (s.start == QLA_START_ZERO || s.start == QLA_START_INITIAL) {
        ASSERT_EQ(s.start, given);
        ASSERT_EQ(s.warmup_chunks, before) << "a walk from the sequence's start begins there";
      }
      if (s.start == QLA_START_WARMUP) {
        double sum = 0, total = 0;
        for (int64_t n = 0; n < s.warmup_chunks; ++n) sum += decay.at(static_cast<size_t>(reverse ? at + n : at - 1 - n));
        for (int64_t n = 0; n < before; ++n) total += decay.at(static_cast<size_t>(reverse ? at + n : at - 1 - n));
        ASSERT_LE(sum, rule.threshold + 1e-3);
        ASSERT_TRUE(std::isfinite(total));
        if (has_initial) {
          ASSERT_LE(total, rule.threshold - kInitialMargin + 1e-2);
        }
        ASSERT_FALSE(rule.exact);
      }
      if (s.start == QLA_START_MERGED) {
        ASSERT_GT(j, 0u);
        ASSERT_FALSE(rule.join);
        ASSERT_TRUE(all[j - 1].needs_end_state);
      }
      ASSERT_EQ(s.needs_end_state, j + 1 < all.size() && all[j + 1].start == QLA_START_MERGED);
      ASSERT_EQ(s.needs_transition, s.needs_end_state && s.start == QLA_START_MERGED);
      at += reverse ? -s.num_chunks : s.num_chunks;
    }
    ASSERT_EQ(at, reverse ? 0 : chunks);
  }
  for (int64_t count : starts) EXPECT_GT(count, 1000);
}

}  // namespace
}  // namespace qla::plan
