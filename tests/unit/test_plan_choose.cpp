// plan/choose, layout: golden choices for an H200, and a fuzz of random packings: bounds from shapes hold for any
// boundaries and gates.
#include "plan/choose.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "plan/beside.hpp"
#include "plan/choose_cpu.hpp"
#include "plan/layout.hpp"
#include "unit/plan_rows.hpp"

namespace qla::plan {
namespace {

std::string text(const Choice& choice) {
  return "L" + std::to_string(choice.rule.segment_chunks) + (choice.value_splits == 2 ? " halves" : "") +
         (choice.fused ? " fused" : "");
}

// Rows of the published grid. A change of the cost table changes these on purpose only.
TEST(Choose, GoldenH200) {
  const auto row = [](int64_t tokens, int64_t seqs, int64_t k_heads, int64_t v_heads) {
    return text(choose(kH200, shape_of_row(tokens, seqs, k_heads, v_heads), Policy{}, Capabilities{}));
  };
  EXPECT_EQ(row(32768, 1, 2, 8), "L32");
  EXPECT_EQ(row(16384, 1, 2, 8), "L16");
  EXPECT_EQ(row(4096, 1, 2, 8), "L8 halves");
  EXPECT_EQ(row(2048, 1, 2, 8), "L5 halves");
  EXPECT_EQ(row(32768, 1, 4, 16), "L64");
  EXPECT_EQ(row(32768, 1, 8, 32), "L128");
  EXPECT_EQ(row(2048, 1, 8, 32), "L0 halves");
  EXPECT_EQ(row(32768, 1, 16, 64), "L0 halves");
  EXPECT_EQ(row(32768, 2, 2, 8), "L32");
  EXPECT_EQ(row(32768, 8, 16, 64), "L0 fused");
  EXPECT_EQ(row(32768, 4, 8, 32), "L0 fused");
  EXPECT_EQ(row(64, 1, 1, 1), "L0 fused");
  EXPECT_EQ(row(0, 1, 1, 1), "L0 fused");
  EXPECT_EQ(row(0, 0, 1, 1), "L0 fused");
}

// A value head for each query/key head: the intra-chunk stage is as much work as the recurrence, and is left to it.
TEST(Choose, CutInTheFusedForm) {
  Capabilities can;
  can.cut_fused = true;
  const auto row = [&](int64_t tokens, int64_t seqs, int64_t k_heads, int64_t v_heads, const Policy& policy = {}) {
    return text(choose(kH200, shape_of_row(tokens, seqs, k_heads, v_heads), policy, can));
  };
  EXPECT_EQ(row(32768, 1, 16, 16), "L64 fused");
  EXPECT_EQ(row(32768, 1, 32, 32), "L128 fused");
  EXPECT_EQ(row(8192, 1, 32, 32), "L32 fused");
  EXPECT_EQ(row(32768, 2, 16, 16), "L64 fused");
  EXPECT_EQ(row(4096, 1, 16, 16), "L8");  // 74 us, fused 78: so short that two kernels are level
  EXPECT_EQ(row(32768, 1, 4, 16), "L64");
  EXPECT_EQ(row(32768, 1, 16, 32), "L128");
  Policy policy;
  policy.batch_invariant = true;  // whatever is in the batch: not by a model of it
  EXPECT_EQ(row(32768, 1, 16, 16, policy).find("fused"), std::string::npos);
  policy = {};
  policy.mode = QLA_CP_PLAN;
  policy.fixed_chunks = 64;  // a plan is repeated in the form that it had
  EXPECT_EQ(row(32768, 1, 16, 16, policy), "L64 fused");
}

TEST(Choose, OnlyWhatTheKernelsCanDo) {
  for (int mask = 0; mask < 8; ++mask) {
    const Capabilities can{(mask & 1) != 0, (mask & 2) != 0, (mask & 4) != 0};
    for (int64_t tokens : {0, 1, 64, 4096, 32768, 1 << 20})
      for (int64_t heads : {1, 8, 64})
        for (int32_t mode = QLA_CP_AUTO; mode <= QLA_CP_PLAN; ++mode)
          for (bool invariant : {false, true}) {
            Policy policy;
            policy.mode = mode, policy.fixed_chunks = 3, policy.batch_invariant = invariant;
            Shape shape = shape_of_row(tokens, 1, 1, heads);
            const Choice choice = choose(kH200, shape, policy, can);
            EXPECT_TRUE(can.fused || !choice.fused);
            EXPECT_TRUE(can.v_split || choice.value_splits == 1);
            EXPECT_TRUE(can.segments || choice.rule.segment_chunks == 0);
            if (mode == QLA_CP_OFF) {
              EXPECT_EQ(choice.rule.segment_chunks, 0);
            }
            if ((mode == QLA_CP_FIXED || mode == QLA_CP_PLAN) && can.segments) {
              EXPECT_EQ(choice.rule.segment_chunks, 3);
            }
            if (invariant && can.segments && (mode == QLA_CP_AUTO || mode == QLA_CP_EXACT)) {
              EXPECT_EQ(choice.rule.segment_chunks, kInvariantSegmentChunks);
            }
            if (choice.fused) {
              EXPECT_EQ(choice.rule.segment_chunks == 0 || tokens <= choice.rule.segment_chunks * kChunkTokens, true);
            }
            EXPECT_EQ(choice.rule.exact != 0, mode == QLA_CP_EXACT);
            shape.may_cut = false;
            EXPECT_EQ(choose(kH200, shape, policy, can).rule.segment_chunks, 0);
          }
  }
}

TEST(Choose, UnknownDeviceHasPositiveCosts) {
  const DeviceCosts costs = costs_for(0, 12);
  EXPECT_EQ(costs.num_sms, 132);
  EXPECT_GT(costs.fused[0], kH200.fused[0]);
  EXPECT_EQ(costs_for(60, 9).fused[2], kH200.fused[2]);
  EXPECT_EQ(costs_for(60, 9).num_sms, 60);
}

TEST(Choose, CostsOfAFile) {
  const auto read = [](const char* text) {
    std::istringstream in(text);
    return read_costs(in, "costs.txt", kH200);
  };
  const DeviceCosts costs = read("# measured\n\nmain_full 2.5  # whole V\nintra_1 3e0\n cut 0\n");
  EXPECT_EQ(costs.main_full, 2.5f);
  EXPECT_EQ(costs.intra[2], 3.0f);
  EXPECT_EQ(costs.cut, 0.0f);
  EXPECT_EQ(costs.main_half, kH200.main_half);
  EXPECT_EQ(costs.num_sms, kH200.num_sms);
  for (const char* bad :
       {"main_ful 1", "main_full", "main_full one", "main_full 1 2", "main_full -1", "main_full nan", "main_full inf"}) {
    SCOPED_TRACE(bad);
    EXPECT_THROW(read(bad), Error);
  }
  // A prohibitive constant takes its plans out of the choice: how a sweep forces one of both.
  Capabilities can;
  can.fused = false;
  for (const int splits : {1, 2}) {
    const DeviceCosts forced = read(splits == 1 ? "main_half 1e6\nmain_half_quiet 1e6" : "main_full 1e6\nmain_full_quiet 1e6");
    for (const int64_t tokens : {1024, 8192, 65536})
      EXPECT_EQ(choose(forced, shape_of_row(tokens, 1, 2, 8), Policy{}, can).value_splits, splits);
  }
}

// What a packing may hold: equal sequences or one long one; the supposed chunks are about the real number, and weights add to 1.
TEST(Choose, ProfilesCoverThePacking) {
  for (int64_t seqs : {1, 2, 3, 4, 9, 1000}) {
    for (bool equal : {false, true}) {
      Shape shape = shape_of_row(32768, seqs, 1, 4);
      shape.equal_lengths = equal;
      const Profiles profiles = profiles_of(shape);
      float weights = 0;
      for (int32_t i = 0; i < profiles.count; ++i) {
        int64_t chunks = 0, count = 0;
        for (int32_t k = 0; k < profiles.all[i].num_kinds; ++k) {
          chunks += profiles.all[i].kinds[k].count * profiles.all[i].kinds[k].chunks;
          count += profiles.all[i].kinds[k].count;
        }
        EXPECT_EQ(count, seqs);
        EXPECT_GE(chunks, 512);
        EXPECT_LE(chunks, 512 + seqs);
        weights += profiles.all[i].weight;
      }
      EXPECT_FLOAT_EQ(weights, 1.0f);
      EXPECT_EQ(profiles.count, equal || seqs == 1 ? 1 : seqs == 2 ? 3 : 2);
    }
  }
}

// Two sequences of a packing may be equal or not, and the host cannot tell: what is cut if one is long stays whole if both are
// not.
TEST(Choose, APackingIsCutForALongSequenceAlone) {
  const auto packing = [](int64_t k_heads, int64_t v_heads) {
    Shape shape = shape_of_row(32768, 2, k_heads, v_heads);
    shape.equal_lengths = false;
    return shape;
  };
  Capabilities can;
  can.mixed = true;
  const Choice choice = choose(kH200, packing(16, 32), Policy{}, can);
  EXPECT_GT(choice.rule.segment_chunks, 0);
  EXPECT_EQ(choice.rule.balance, 0);  // of two: segments of one length, and the rests fill a multiprocessor together
  EXPECT_FALSE(choice.rule.cuts(256));
  EXPECT_TRUE(choice.rule.cuts(448));
  // few heads: equal ones gain by a cut, too
  EXPECT_TRUE(choose(kH200, packing(2, 8), Policy{}, Capabilities{}).rule.cuts(256));
  Policy policy;  // where a length is given it holds for all
  policy.mode = QLA_CP_FIXED, policy.fixed_chunks = 100;
  EXPECT_TRUE(choose(kH200, packing(16, 32), policy, Capabilities{}).rule.cuts(101));
  policy.mode = QLA_CP_AUTO, policy.batch_invariant = true;
  const CutRule invariant = choose(kH200, packing(16, 32), policy, can).rule;
  EXPECT_TRUE(invariant.cuts(kInvariantSegmentChunks + 1));
  EXPECT_EQ(invariant.balance, 1);  // as in every other batch
}

// Of two sequences the longest is supposed to have 3/4 or 7/8 of the tokens: a length that divides it leaves no rest.
TEST(Choose, LengthsThatDivideWhatIsSupposed) {
  Shape shape = shape_of_row(16384, 2, 8, 24);
  shape.equal_lengths = false;
  Capabilities can;
  can.mixed = true;
  EXPECT_EQ(choose(kH200, shape, Policy{}, can).rule.segment_chunks, 256 * 3 / 4 / 4);  // 206 us; 52, a fifth of all, 214
}

// What more than two equal sequences gain nothing by has to promise a lot: they pay for the question.
TEST(Choose, ManySequencesAskForMuchOnly) {
  for (const int64_t seqs : {4, 8})
    for (const int64_t heads : {8, 16, 24, 32}) {
      Shape shape = shape_of_row(32768, seqs, heads / 4, heads);
      shape.equal_lengths = false;
      const Choice choice = choose(kH200, shape, Policy{}, Capabilities{});
      EXPECT_TRUE(choice.rule.segment_chunks == 0 || choice.rule.cuts(512 / seqs)) << seqs << " " << heads;
    }
}

TEST(Choose, DirectLaunches) {
  EXPECT_TRUE(direct_launch(8, 16, 8 * 40, 132));  // one round
  EXPECT_FALSE(direct_launch(8, 16, 8 * 40 + 1, 132));
  EXPECT_TRUE(direct_launch(4, 48, 4 * 33, 132));  // several
  EXPECT_TRUE(direct_launch(1, 264, 36, 132));
  EXPECT_FALSE(direct_launch(1, 264, 37, 132));
  EXPECT_FALSE(direct_launch(33, 16, 33, 132));  // too many sequences
  EXPECT_FALSE(direct_launch(1, 4 * 132 + 1, 1, 132));
  const Candidate fused{0, 1, true};
  const auto saved = [&](int64_t tokens, int64_t seqs, int64_t heads, int64_t longest) {
    return saved_by_direct_launch(kH200, shape_of_row(tokens, seqs, heads, heads), fused, longest);
  };
  EXPECT_EQ(saved(8192, 8, 16, 16), kDirectLaunch);
  EXPECT_EQ(saved(8192, 8, 16, 100), 0.0f);  // its CTA makes all its vectors
  EXPECT_EQ(saved(8192, 4, 48, 32), kDirectRoundsLaunch);
  EXPECT_EQ(saved(32768, 4, 48, 128), 0.0f);
  EXPECT_EQ(saved(0, 1, 1, 0), 0.0f);
}

// Where the longest of two sequences stays whole both do, else every one that is longer than a segment is cut.
TEST(Choose, WholeBesideOthers) {
  CutRule rule;
  rule.segment_chunks = 100, rule.uncut_chunks = 250, rule.balance = 0;
  EXPECT_EQ(rule_beside(rule, 250).segment_chunks, 0);
  const CutRule cut = rule_beside(rule, 251);
  EXPECT_EQ(make_cut(251, cut).num_segments, 3);
  EXPECT_EQ(make_cut(251, cut).segment_chunks, 100);
  EXPECT_EQ(make_cut(101, cut).num_segments, 2);
  EXPECT_EQ(make_cut(100, cut).num_segments, 1);
  rule.balance = 1;  // each by itself
  for (const int64_t longest : {250, 251}) EXPECT_EQ(make_cut(250, rule_beside(rule, longest)).num_segments, 1);
  EXPECT_EQ(make_cut(251, rule_beside(rule, 300)).num_segments, 3);
}

Shape packing_of(int64_t tokens, int64_t seqs, int64_t k_heads, int64_t v_heads) {
  Shape shape = shape_of_row(tokens, seqs, k_heads, v_heads);
  shape.equal_lengths = false;
  return shape;
}
constexpr Capabilities kBoth{.fused = true, .v_split = true, .segments = true, .both = true};

// Equal sequences want the fused form, one long one halves of V: both are in the call, and the lengths decide.
TEST(Choose, BothFormsForTwoSequencesOfManyHeads) {
  for (const int64_t heads : {48, 64})
    for (const int64_t tokens : {8192, 16384, 32768}) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(heads) + " heads");
      const Shape shape = packing_of(tokens, 2, 16, heads);
      const int64_t total = shape.total_chunks();
      const Choice choice = choose(kH200, shape, Policy{}, kBoth), one = choose(kH200, shape, Policy{}, Capabilities{});
      ASSERT_GT(choice.fused_chunks, 0);
      EXPECT_EQ(choice.reason, Reason::BothForms);
      EXPECT_FALSE(choice.fused);
      EXPECT_EQ(choice.value_splits, 2);
      EXPECT_EQ(choice.rule.segment_chunks, 0);
      EXPECT_LT(choice.predicted_us, one.predicted_us);
      EXPECT_EQ(most_items(shape, choice), 2 * 2 * heads);
      EXPECT_TRUE(chosen_form(choice, total / 2).fused);
      EXPECT_EQ(chosen_form(choice, total / 2).value_splits, 1);
      // the uneven rows of the grid: 3/4 and 7/8 of the tokens
      for (const int64_t longest : {total * 3 / 4, total * 7 / 8, total}) {
        EXPECT_FALSE(chosen_form(choice, longest).fused) << longest;
        EXPECT_EQ(chosen_form(choice, longest).value_splits, 2) << longest;
      }
      EXPECT_FALSE(chosen_form(one, total).fused != one.fused);  // one form stays what it is
    }
}

TEST(Choose, BothFormsOnlyWhereAsked) {
  const Shape shape = packing_of(16384, 2, 16, 48);
  EXPECT_EQ(choose(kH200, shape, Policy{}, Capabilities{}).fused_chunks, 0);
  for (Capabilities can : {Capabilities{false, true, true, true}, Capabilities{true, false, true, true}})
    EXPECT_EQ(choose(kH200, shape, Policy{}, can).fused_chunks, 0);
  Policy policy;
  policy.batch_invariant = true;
  EXPECT_EQ(choose(kH200, shape, policy, kBoth).fused_chunks, 0);
  policy.batch_invariant = false, policy.mode = QLA_CP_FIXED, policy.fixed_chunks = 64;
  EXPECT_EQ(choose(kH200, shape, policy, kBoth).fused_chunks, 0);
  Shape other = shape;
  other.equal_lengths = true;
  EXPECT_EQ(choose(kH200, other, Policy{}, kBoth).fused_chunks, 0);
  other = shape, other.backward = true;
  EXPECT_EQ(choose(kH200, other, Policy{}, kBoth).fused_chunks, 0);
  for (const int64_t seqs : {1, 4, 8, 100})
    EXPECT_EQ(choose(kH200, packing_of(16384, seqs, 16, 48), Policy{}, kBoth).fused_chunks, 0);
  // short ones run as one direct launch
  EXPECT_EQ(choose(kH200, packing_of(2 * kDirectChunks * kChunkTokens, 2, 16, 48), Policy{}, kBoth).fused_chunks, 0);
  // all else is as without
  for (const int64_t heads : {1, 8, 16, 24, 32, 48, 64})
    for (const int64_t seqs : {1, 2, 3, 4})
      for (const int64_t tokens : {64, 2048, 8192, 32768}) {
        const Shape row = packing_of(tokens, seqs, heads >= 16 ? 16 : 1, heads);
        const Choice with = choose(kH200, row, Policy{}, kBoth), without = choose(kH200, row, Policy{}, Capabilities{});
        if (with.fused_chunks > 0) continue;
        EXPECT_EQ(text(with), text(without));
        EXPECT_EQ(with.rule.uncut_chunks, without.rule.uncut_chunks);
      }
}

// Items in two parts fill the last round, where it is worth it: 192 items of 132 multiprocessors, not 128 or 256.
TEST(Choose, BalancedWhereTheLastRoundIsHalfEmpty) {
  constexpr Capabilities kAll{.fused = true, .v_split = true, .segments = true, .balanced = true, .both = true};
  for (const int64_t seqs : {4, 8})
    for (const int64_t tokens : {1024, 2048, 8192})
      for (const int64_t heads : {16, 24, 32, 48, 64}) {
        SCOPED_TRACE(std::to_string(seqs) + " x " + std::to_string(tokens) + ", " + std::to_string(heads) + " heads");
        const Shape shape = packing_of(seqs * tokens, seqs, 8, heads);
        const Choice choice = choose(kH200, shape, Policy{}, kAll), without = choose(kH200, shape, Policy{}, kBoth);
        EXPECT_EQ(choice.balanced, seqs * heads == 192);
        if (!choice.balanced) {
          EXPECT_EQ(choice.fused, without.fused);
          continue;
        }
        EXPECT_EQ(choice.reason, Reason::Balanced);
        EXPECT_TRUE(choice.fused);
        EXPECT_EQ(choice.fused_chunks, 0);
        EXPECT_LT(choice.predicted_us, 0.97f * without.predicted_us);
      }
  Policy invariant;
  invariant.batch_invariant = true;
  EXPECT_FALSE(choose(kH200, packing_of(8 * 1024, 8, 8, 24), invariant, kAll).balanced);
  EXPECT_TRUE(choose(kH200, shape_of_row(8 * 1024, 8, 8, 24), Policy{}, kAll).balanced);  // dense
}

// Items by groups is items one by one.
TEST(Choose, QueueIsTheLongestFirst) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    const int sms = 1 + static_cast<int>(random() % 40);
    std::vector<float> items;
    Queue queue;
    for (int kind = 0; kind < 1 + static_cast<int>(random() % 5); ++kind) {
      const int count = static_cast<int>(random() % 60);
      const float each = static_cast<float>(1 + random() % 50);
      queue.add(static_cast<float>(count), each);
      items.insert(items.end(), static_cast<size_t>(count), each);
    }
    if (items.size() > 12 * static_cast<size_t>(sms)) continue;
    std::sort(items.rbegin(), items.rend());
    std::vector<float> free_at(static_cast<size_t>(sms), 0.0f);
    for (const float each : items) *std::min_element(free_at.begin(), free_at.end()) += each;
    EXPECT_EQ(queue.makespan(static_cast<float>(sms)), *std::max_element(free_at.begin(), free_at.end())) << round;
  }
}

// The model alone: a cut long sequence with few heads beats an uncut one, equal sequences on a full card are better left alone.
TEST(Choose, ModelOrdersTheObvious) {
  const Profile one{{{1, 512}, {0, 0}}, 1, 1.0f}, eight{{{8, 64}, {0, 0}}, 1, 1.0f};
  Shape shape = shape_of_row(32768, 1, 2, 8);
  EXPECT_LT(estimate(kH200, shape, {}, one, {32, 1, false}), 0.3f * estimate(kH200, shape, {}, one, {0, 1, false}));
  shape = shape_of_row(32768, 8, 16, 64);
  EXPECT_LT(estimate(kH200, shape, {}, eight, {0, 1, false}), estimate(kH200, shape, {}, eight, {32, 1, false}));
  EXPECT_LT(estimate(kH200, shape, {}, eight, {0, 1, true}), estimate(kH200, shape, {}, eight, {0, 1, false}));
}

// CPU plans are functions of shapes: there is no thread count to pass.
TEST(ChooseCpu, Golden) {
  EXPECT_EQ(choose_cpu(Policy{}, 1, 64, 1, 512).segment_chunks, 0);
  EXPECT_GT(choose_cpu(Policy{}, 1, 1, 1, 512).segment_chunks, 0);
  Policy policy;
  policy.mode = QLA_CP_OFF;
  EXPECT_EQ(choose_cpu(policy, 1, 1, 1, 512).segment_chunks, 0);
  policy.mode = QLA_CP_EXACT;
  EXPECT_FALSE(choose_cpu(policy, 1, 1, 1, 512).join);
  policy.mode = QLA_CP_FIXED, policy.fixed_chunks = 5;
  EXPECT_EQ(choose_cpu(policy, 9, 64, 1, 512).segment_chunks, 5);
  EXPECT_FALSE(choose_cpu(policy, 9, 64, 1, 512).balance);
}

TEST(WorkspaceLayout, QueryAndCarvingAgree) {
  struct Buffers {
    int64_t* table;
    float* vec;
    char* none;
    char* last;
    size_t bytes;
  };
  const auto lay_out = [](void* base) {
    Layout layout(base);
    Buffers b{layout.take<int64_t>(5), layout.take<float>(65), layout.take<char>(0), layout.take<char>(1), 0};
    b.bytes = layout.bytes();
    return b;
  };
  const Buffers query = lay_out(nullptr);
  EXPECT_EQ(query.bytes, 256u + 512u + 256u);
  EXPECT_EQ(query.table, nullptr);
  alignas(256) static char memory[1024];
  const Buffers carved = lay_out(memory);
  EXPECT_EQ(carved.bytes, query.bytes);
  EXPECT_EQ(reinterpret_cast<char*>(carved.table), memory);
  EXPECT_EQ(reinterpret_cast<char*>(carved.vec), memory + 256);
  EXPECT_EQ(carved.none, nullptr);
  EXPECT_EQ(carved.last, memory + 768);
  Layout huge;
  EXPECT_THROW(huge.take<double>(int64_t{1} << 61), Error);
  huge.take<char>(int64_t{1} << 61);
  EXPECT_THROW(huge.take<char>(int64_t{1} << 62), Error);
}

// Random packings: sums of what for_each_segment emits stay within the bounds that size grids and workspace, and tokens are
// covered once.
TEST(PlannerFuzz, BoundsFromShapesHold) {
  std::mt19937_64 random(5);
  const auto pick = [&](int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random); };
  int64_t tightest_items = INT64_MAX, tightest_states = INT64_MAX, cuts = 0, finer = 0, in_pieces = 0;
  const char* const given = std::getenv("QLA_FUZZ_ROUNDS");  // a million takes half a minute
  const int64_t rounds = given ? std::strtoll(given, nullptr, 10) : 20000;
  for (int64_t round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    const int64_t seqs = pick(0, 3) ? pick(1, 6) : pick(0, 300);
    std::vector<int64_t> lens(static_cast<size_t>(seqs));
    int64_t total = 0;
    for (int64_t& len : lens) {
      const int64_t kind = pick(0, 5);
      len = kind == 0   ? 0
            : kind == 1 ? 1
            : kind == 2 ? 64 * pick(0, 20)
            : kind == 3 ? 64 * pick(0, 20) + 1
            : kind == 4 ? pick(0, 300)
                        : pick(0, 20000);
      total += len;
    }
    Shape shape =
        shape_of_row(total + pick(0, 1) * pick(0, 200), seqs, 1, pick(1, 3) * pick(1, 24));  // padding behind the last boundary
    shape.equal_lengths = false;
    shape.backward = pick(0, 3) == 0;
    Policy policy;
    policy.mode = static_cast<int32_t>(pick(0, 4));
    policy.fixed_chunks = pick(1, 9);
    policy.uncut_chunks = policy.mode == QLA_CP_PLAN ? pick(0, 1) * pick(0, 60) : 0;
    policy.batch_invariant = pick(0, 3) == 0;
    Capabilities can{pick(0, 1) == 1, pick(0, 1) == 1, pick(0, 7) != 0, pick(0, 1) == 1};
    can.refined_units = shape.backward ? 0 : pick(0, 1) * 1024;
    can.cut_fused = can.fused && pick(0, 1);
    can.both = can.fused && pick(0, 1);
    can.mixed = pick(0, 1);
    Choice planned = choose(kH200, shape, policy, can);
    CutRule& rule = planned.rule;
    const bool as_planned = can.refined_units == 0 || rule.segment_chunks < 2 || !rule.balance || pick(0, 1);
    if (!as_planned) {  // any refinement
      if (pick(0, 2)) rule.merged_chunks = pick(ceil_div(rule.segment_chunks, 4), rule.segment_chunks);
      const int64_t most = std::min<int64_t>(6, (rule.merged_chunks ? rule.merged_chunks : rule.segment_chunks) / 2);
      if (most > 0) rule.pieces = static_cast<int32_t>(pick(1, most)), rule.first_pieces = static_cast<int32_t>(pick(1, most));
    }
    int64_t longest = 0;
    for (const int64_t len : lens) longest = std::max(longest, chunks_of(len));
    Choice choice = chosen_form(planned, longest);
    choice.rule = rule_beside(choice.rule, longest);
    ASSERT_GT(choice.predicted_us, 0.0f);
    const float gate = pick(0, 1) ? 0.0f : -0.5f * static_cast<float>(pick(0, 30));
    if (choice.fused && !can.cut_fused) {
      ASSERT_EQ(choice.rule.segment_chunks, 0) << "fused calls are never cut";
    }
    int64_t items = 0, end_states = 0, covered = 0, expected = 0;
    const bool pieces_of_reverse = rule.pieces > 1 || rule.first_pieces > 1;  // there are none: backward plans without
    const bool reverse = pick(0, 1) && !pieces_of_reverse, initial = pick(0, 1);
    for (const int64_t len : lens) {
      const auto decay = [&](int64_t) { return gate; };
      const Cut cut = make_head_cut(chunks_of(len), choice.rule, initial, decay);
      expected += cut.chunks;
      for_each_segment(cut, choice.rule, initial, reverse, decay, [&](const Segment& s) {
        ++items, covered += s.num_chunks;
        if (!s.needs_end_state) return;
        const int64_t pieces = pieces_of_segment(choice.rule, s.index);
        end_states += pieces, in_pieces += pieces > 1;
        ASSERT_GE(s.num_chunks, pieces) << "a piece without chunks";
      });
      cuts += cut.num_segments > 1;
      finer += cut.segment_chunks != make_cut(chunks_of(len), choice.rule).segment_chunks;
    }
    ASSERT_EQ(covered, expected);
    items *= shape.num_v_heads * choice.value_splits;
    end_states *= shape.num_v_heads;
    ASSERT_LE(items, most_items(shape, choice));
    ASSERT_LE(items, most_items(shape, planned));
    ASSERT_LE(end_states, most_end_states(shape, choice));
    tightest_items = std::min(tightest_items, most_items(shape, choice) - items);
    if (end_states) tightest_states = std::min(tightest_states, most_end_states(shape, choice) - end_states);
    const bool length_given = policy.mode == QLA_CP_FIXED || policy.mode == QLA_CP_PLAN;
    // what bounds the merges' workspace
    if (as_planned && !length_given && choice.rule.segment_chunks && !policy.batch_invariant) {
      ASSERT_LE(most_end_states(shape, choice), (kItemsPerSm + 1) * kH200.num_sms + shape.num_seqs * shape.num_v_heads);
    }
  }
  EXPECT_GT(cuts, 1000);
  EXPECT_GT(finer, 10);
  EXPECT_GT(in_pieces, 10);
  EXPECT_LE(tightest_items, 1);  // the bounds are not slack
  EXPECT_LE(tightest_states, 1);
}

}  // namespace
}  // namespace qla::plan
