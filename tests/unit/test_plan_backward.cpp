// plan/choose_backward: golden choices for an H200; never a cut where the policy forbids one; bounds on items and merges.
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "cuda/backward_workspace.hpp"
#include "cuda/capabilities.hpp"
#include "plan/choose_backward.hpp"
#include "unit/plan_rows.hpp"

namespace qla::plan {
namespace {

Shape backward_shape(int64_t tokens, int64_t seqs, int64_t k_heads, int64_t v_heads) {
  Shape shape = shape_of_row(tokens, seqs, k_heads, v_heads);
  shape.backward = true;
  return shape;
}

// Rows of the published grid. A change of the cost table changes these on purpose only.
TEST(ChooseBackward, GoldenH200) {
  const auto row = [](int64_t tokens, int64_t seqs, int64_t k_heads, int64_t v_heads) {
    return choose_backward(kH200, backward_shape(tokens, seqs, k_heads, v_heads), Policy{}).rule.segment_chunks;
  };
  EXPECT_EQ(row(32768, 1, 2, 4), 32);
  EXPECT_EQ(row(8192, 1, 2, 4), 16);
  EXPECT_EQ(row(32768, 1, 4, 8), 32);
  EXPECT_EQ(row(32768, 2, 4, 8), 32);
  EXPECT_EQ(row(32768, 4, 2, 4), 0);
  EXPECT_EQ(row(32768, 2, 8, 16), 0);
  EXPECT_EQ(row(32768, 1, 8, 16), 64);
  EXPECT_EQ(row(32768, 1, 16, 32), 0);
  EXPECT_EQ(row(32768, 8, 2, 4), 0);
  EXPECT_EQ(row(8192, 8, 2, 4), 0);
  EXPECT_EQ(row(32768, 4, 8, 16), 0);
  EXPECT_EQ(row(64, 1, 1, 1), 0);
  EXPECT_EQ(row(0, 1, 1, 1), 0);
  EXPECT_EQ(row(0, 0, 1, 1), 0);
}

TEST(ChooseBackward, Policies) {
  const Shape shape = backward_shape(32768, 1, 2, 4);
  Policy policy;
  policy.mode = QLA_CP_OFF;
  EXPECT_EQ(choose_backward(kH200, shape, policy).rule.segment_chunks, 0);
  policy.mode = QLA_CP_FIXED, policy.fixed_chunks = 5;
  EXPECT_EQ(choose_backward(kH200, shape, policy).rule.segment_chunks, 5);
  EXPECT_FALSE(choose_backward(kH200, shape, policy).rule.balance);
  policy.mode = QLA_CP_EXACT, policy.fixed_chunks = 0;
  EXPECT_GT(choose_backward(kH200, shape, policy).rule.segment_chunks, 0);
  EXPECT_TRUE(choose_backward(kH200, shape, policy).rule.exact);
  policy.batch_invariant = true;
  EXPECT_EQ(choose_backward(kH200, shape, policy).rule.segment_chunks, 0);
}

// What the fused forward keeps has no sums of gates (decision 0079): right for a backward that is cut, but each of its boundaries
// would be merged. So no shape may have both, whatever the constants are fitted to.
TEST(ChooseBackward, NeverCutBehindAFusedForwardThatKeeps) {
  int fused = 0, cut = 0;
  for (const int64_t group : {1, 2, 4})
    for (const int64_t heads : {1, 2, 4, 8, 12, 16, 24, 32, 48, 64})
      for (const int64_t seqs : {1, 2, 3, 4, 6, 8, 16})
        for (const int64_t tokens : {512, 2048, 4096, 6144, 8192, 16384, 24576, 32768, 65536, 131072})
          for (const bool dense : {false, true}) {
            if (heads % group) continue;
            Shape shape = shape_of_row(tokens, seqs, heads / group, heads);
            shape.equal_lengths = dense;
            shape.keeps = true;
            Capabilities can = cuda::kForwardCapabilities;
            can.both = !dense, can.balanced = true;
            const Choice forward = choose(kH200, shape, Policy{}, can);
            shape.keeps = false, shape.backward = true;
            const bool is_cut = choose_backward(kH200, shape, Policy{}).rule.segment_chunks > 0;
            const bool takes_fused = forward.fused || forward.fused_chunks > 0;
            EXPECT_FALSE(is_cut && takes_fused) << tokens << " tokens, " << seqs << " sequences, " << heads << " heads";
            fused += takes_fused, cut += is_cut;
          }
  EXPECT_GT(fused, 1000);  // both kinds are among them
  EXPECT_GT(cut, 50);
}

// Every segment of both walks and every merge has a place in what shapes alone make room for.
TEST(ChooseBackward, BoundsHoldForAnyLengthsAndGates) {
  std::mt19937_64 rng(7);
  const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); };
  for (int round = 0; round < 2000; ++round) {
    std::vector<int64_t> lens(static_cast<size_t>(pick(1, 12)));
    Shape shape;
    shape.equal_lengths = false;
    for (int64_t& l : lens) l = pick(0, 5) ? pick(0, 400) : pick(0, 60000), shape.total_tokens += l;
    shape.total_tokens += pick(0, 100);
    shape.num_seqs = static_cast<int64_t>(lens.size());
    shape.num_v_heads = pick(1, 32);
    shape.backward = true;
    Policy policy;
    policy.mode = static_cast<int32_t>(pick(QLA_CP_AUTO, QLA_CP_FIXED));
    policy.fixed_chunks = policy.mode == QLA_CP_FIXED ? pick(1, 20) : 0;
    const Choice choice = choose_backward(kH200, shape, policy);
    if (policy.mode != QLA_CP_FIXED && choice.rule.segment_chunks > 0) {
      ASSERT_LE(ceil_div(shape.total_chunks(), choice.rule.segment_chunks) * shape.num_v_heads,
                2 * kH200.num_sms + shape.num_v_heads);
    }
    const cuda::BackwardCut cut = cuda::cut_of(shape, choice);
    if (choice.rule.segment_chunks == 0) {
      ASSERT_EQ(cut.units, 0);
      continue;
    }
    int64_t first = 0, second = 0, segments = 0, boundaries = 0;
    for (const int64_t l : lens) {
      const Cut c = make_cut(chunks_of(l), choice.rule);
      segments += c.num_segments, boundaries += c.num_segments - 1;
      std::vector<int> transition(static_cast<size_t>(c.num_segments), 0);
      const float gate = 0.1f * static_cast<float>(pick(0, 30));
      for (const bool reverse : {false, true})
        for_each_segment(
            c, choice.rule, pick(0, 1), reverse, [&](int64_t) { return -gate; },
            [&](const Segment& s) {
              ++(s.start == QLA_START_MERGED ? second : first);
              if (!s.needs_transition) return;
              ++first;
              transition[static_cast<size_t>(s.index)] = 1;
            });
      for (const int t : transition) first += t;
    }
    ASSERT_LE(segments * shape.num_v_heads, cut.units);
    ASSERT_LE(boundaries * shape.num_v_heads, cut.end_states);
    ASSERT_LE(first * shape.num_v_heads, cut.first());
    ASSERT_LE(second * shape.num_v_heads, cut.second());
  }
}

}  // namespace
}  // namespace qla::plan
