// Forward in ranges of chunks: what lies in which range, and plans that stay under a workspace limit.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "cuda/forward_plan.hpp"
#include "plan/ranges.hpp"

namespace qla {
namespace {

TEST(Ranges, EveryChunkInOneRange) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> lengths(1 + random() % 12);
    int64_t tokens = random() % 3 == 0 ? random() % 200 : 0;  // padding
    for (int64_t& n : lengths) {
      n = random() % 4 == 0 ? int64_t(random() % 3) : int64_t(random() % 2000);
      tokens += n;
    }
    const int64_t slots = tokens / 64 + int64_t(lengths.size()), range_slots = 1 + int64_t(random()) % slots;
    const int64_t size = range_slots < 1 ? 1 : range_slots;
    std::vector<int> times_present(lengths.size(), 0);
    std::vector<int32_t> walked(lengths.size(), 0);
    for (int64_t first = 0; first < slots; first += size) {
      int crossing_in = 0, crossing_out = 0;
      int64_t bos = 0;
      for (size_t n = 0; n < lengths.size(); ++n) {
        const int64_t base = bos / 64 + int64_t(n);
        const auto chunks = static_cast<int32_t>((lengths[n] + 63) / 64);
        const plan::Run run = plan::run_in_range(base, chunks, first, size);
        bos += lengths[n];
        if (!run.present) continue;
        ++times_present[n];
        EXPECT_EQ(run.first, walked[n]);  // ranges in order continue where the last one ended
        EXPECT_GE(run.slot, 0);
        EXPECT_LE(run.slot + std::max(run.chunks, 1), size);
        EXPECT_EQ(first + run.slot, base + run.first);
        EXPECT_EQ(run.continued(), walked[n] > 0);
        walked[n] += run.chunks;
        EXPECT_EQ(run.goes_on, walked[n] < chunks);
        crossing_in += run.continued(), crossing_out += run.goes_on;
      }
      EXPECT_LE(crossing_in, 1);  // one carried state a value head is enough
      EXPECT_LE(crossing_out, 1);
    }
    for (size_t n = 0; n < lengths.size(); ++n) {
      EXPECT_EQ(walked[n], (lengths[n] + 63) / 64);
      if (lengths[n] == 0) {
        EXPECT_EQ(times_present[n], 1);
      }
    }
  }
}

TEST(Ranges, PartsOfASequence) {
  for (const int32_t chunks : {0, 1, 2, 3, 5, 64, 449, 1 << 25})
    for (const int32_t ranges : {2, 3, 4, 7}) {
      SCOPED_TRACE(std::to_string(chunks) + " chunks in " + std::to_string(ranges) + " ranges");
      int32_t walked = 0, present = 0, shortest = chunks, longest = 0, first_present = 0;
      for (int32_t range = 0; range < ranges; ++range) {
        const plan::Run run = plan::part_of_sequence(chunks, range, ranges);
        EXPECT_EQ(run.first, walked);
        EXPECT_EQ(run.continued(), walked > 0);
        walked += run.chunks;
        EXPECT_EQ(run.goes_on, walked < chunks);
        if (run.present) {
          if (present == 0) first_present = range;
          EXPECT_EQ(present, range - first_present);  // no range between two that hand a state over
        }
        EXPECT_EQ(run.present, chunks > 0 ? run.chunks > 0 : range == 0);
        present += run.present;
        shortest = std::min(shortest, run.chunks), longest = std::max(longest, run.chunks);
      }
      EXPECT_EQ(walked, chunks);
      EXPECT_EQ(present, std::clamp(chunks, 1, ranges));
      EXPECT_LE(longest - shortest, 1);  // so that part_slots() holds every range of every packing
    }
}

cuda::PlanInput input_of(int64_t tokens, int64_t sequences, int64_t k_heads, int64_t v_heads) {
  cuda::PlanInput in;
  in.costs = plan::kH200;
  in.problem.batch = 1, in.problem.tokens = tokens, in.problem.num_seqs = sequences;
  in.problem.num_k_heads = k_heads, in.problem.num_v_heads = v_heads, in.problem.k_dim = in.problem.v_dim = 128;
  in.problem.varlen = true, in.problem.dtype = QLA_BFLOAT16;
  in.shape.total_tokens = tokens, in.shape.num_seqs = sequences, in.shape.num_v_heads = v_heads;
  in.shape.group = v_heads / k_heads, in.shape.equal_lengths = false;
  in.can = cuda::kForwardCapabilities;
  in.can.fused = false;
  return in;
}

TEST(ForwardPlan, StaysUnderTheLimitWhateverT) {
  constexpr size_t kLimit = size_t{512} << 20;
  for (const int64_t tokens : {64, 32768, 100000, 1 << 20, 16 << 20})
    for (const int64_t sequences : {1, 2, 32, 1000})
      for (const int64_t heads : {2, 8, 32, 64}) {
        if (sequences > tokens) continue;
        const cuda::PlanInput in = input_of(tokens, sequences, heads / 2, heads);
        const cuda::WholePlans plans = cuda::whole_plans(in);
        const cuda::ForwardPlan &whole = plans.best, plan = cuda::fitting_plan(in, plans, kLimit);
        EXPECT_LE(plan.bytes, kLimit) << tokens << " " << sequences << " " << heads;
        if (whole.bytes <= kLimit) {
          EXPECT_EQ(plan.counts.ranges, 1);
        }
        EXPECT_GE(plan.counts.ranges * plan.counts.range_slots, in.problem.chunk_slots());
        EXPECT_LT((plan.counts.ranges - 1) * plan.counts.range_slots, in.problem.chunk_slots());
        // what a plan needs is enough for it
        EXPECT_LE(cuda::fitting_plan(in, plans, plan.bytes).bytes, plan.bytes);
        const cuda::ForwardPlan least = cuda::least_plan(in, plans);
        EXPECT_LE(least.bytes, plan.bytes);
        EXPECT_LE(cuda::fitting_plan(in, plans, least.bytes).bytes, least.bytes);
      }
}

TEST(ForwardPlan, FewRangesOfFewHeadsAreCut) {
  const cuda::PlanInput in = input_of(1 << 20, 1, 2, 8);
  const cuda::ForwardPlan plan = cuda::fitting_plan(in, cuda::whole_plans(in), size_t{512} << 20);
  EXPECT_GT(plan.counts.ranges, 1);
  EXPECT_TRUE(plan.counts.cut);  // eight heads alone would leave most of the card idle
}

TEST(ForwardPlan, CutsOfAFixedPlaceForbidRanges) {
  cuda::PlanInput in = input_of(1 << 20, 1, 8, 32);
  in.policy.batch_invariant = true;
  const cuda::WholePlans plans = cuda::whole_plans(in);
  const cuda::ForwardPlan& whole = plans.best;
  EXPECT_EQ(cuda::least_plan(in, plans).bytes, whole.bytes);
  EXPECT_EQ(cuda::fitting_plan(in, plans, 1).counts.ranges, 1);
}

// A plan that is repeated takes the form it had, also where a longer search found one that needs too much memory.
TEST(ForwardPlan, RepeatedInItsForm) {
  std::mt19937_64 random(3);
  int cut = 0, fused = 0, too_large = 0;
  for (int round = 0; round < 4000; ++round) {
    const int64_t heads = 1 + int64_t(random() % 40), sequences = 1 + int64_t(random() % 4);
    cuda::PlanInput in = input_of(1000 + int64_t(random() % 150000), sequences, heads, heads);
    in.can.fused = in.can.cut_fused = true;
    in.can.both = in.can.balanced = true;
    in.both_bytes = size_t{512} << 20;
    const cuda::ForwardPlan own = cuda::whole_plans(in).best;
    too_large += cuda::too_large_a_cut(in, cuda::plan_ranges(in, in.problem.chunk_slots(), true));
    if (!own.counts.cut) continue;
    cuda::PlanInput again = in;
    again.policy.mode = QLA_CP_PLAN;
    again.policy.fixed_chunks = own.choice.rule.segment_chunks, again.policy.uncut_chunks = own.choice.rule.uncut_chunks;
    const cuda::ForwardPlan repeated = cuda::whole_plans(again).best;
    EXPECT_EQ(repeated.counts.fused, own.counts.fused) << in.problem.tokens << " tokens, " << sequences << ", " << heads;
    EXPECT_EQ(repeated.choice.value_splits, own.choice.value_splits);
    EXPECT_EQ(repeated.choice.rule.merged_chunks, own.choice.rule.merged_chunks);
    EXPECT_EQ(repeated.choice.rule.pieces, own.choice.rule.pieces);
    EXPECT_EQ(repeated.choice.rule.first_pieces, own.choice.rule.first_pieces);
    ++cut, fused += own.counts.fused;
  }
  EXPECT_GT(cut, 500);
  EXPECT_GT(fused, 500);
  EXPECT_GT(too_large, 100);
}

// A balanced call has room for one more item, one state and two words a share; with less memory it is as without.
TEST(ForwardPlan, BalancedNeedsAStateAShare) {
  cuda::PlanInput in = input_of(4 * 2048, 4, 16, 48);
  in.can.fused = in.can.both = in.can.balanced = true;
  in.both_bytes = size_t{512} << 20;
  const cuda::WholePlans plans = cuda::whole_plans(in), of_one = cuda::whole_plans(cuda::one_form(in));
  const cuda::ForwardPlan &whole = plans.best, &one = of_one.best;
  EXPECT_EQ(plans.one.bytes, one.bytes);
  ASSERT_EQ(whole.counts.balanced_shares, in.costs.num_sms);
  EXPECT_TRUE(whole.counts.fused);
  EXPECT_EQ(whole.counts.items, 4 * 48 + in.costs.num_sms);
  EXPECT_EQ(one.counts.balanced_shares, 0);
  EXPECT_TRUE(one.counts.fused);
  EXPECT_LE(whole.bytes, one.bytes + size_t(in.costs.num_sms) * (4 * cuda::kStateFloats + 64 + 8) + 4096);
  EXPECT_EQ(cuda::fitting_plan(in, plans, whole.bytes).counts.balanced_shares, in.costs.num_sms);
  EXPECT_EQ(cuda::fitting_plan(in, plans, whole.bytes - 1).counts.balanced_shares, 0);
  EXPECT_EQ(cuda::least_plan(in, plans).bytes, one.bytes);
  EXPECT_EQ(cuda::lay_out_forward(nullptr, in.problem, whole.counts, false).bytes, whole.bytes);
}

// Both forms in one call need what the two kernels need, and a second list; where that is too much it is one form again.
TEST(ForwardPlan, BothFormsWithinTheLimit) {
  const auto input = [](int64_t tokens, int64_t heads) {
    cuda::PlanInput in = input_of(tokens, 2, 16, heads);
    in.can.fused = in.can.both = true;
    in.both_bytes = size_t{256} << 20;
    return in;
  };
  const cuda::PlanInput in = input(16384, 48);
  const cuda::WholePlans plans = cuda::whole_plans(in), of_one = cuda::whole_plans(cuda::one_form(in));
  const cuda::ForwardPlan &whole = plans.best, &one = of_one.best;
  EXPECT_EQ(plans.one.bytes, one.bytes);
  ASSERT_TRUE(whole.counts.both);
  EXPECT_FALSE(whole.counts.fused || whole.counts.cut);
  EXPECT_EQ(whole.counts.ranges, 1);
  EXPECT_EQ(whole.counts.items, 2 * 48 * 2);
  EXPECT_FALSE(one.counts.both);
  // the lists and the buffers lie side by side; gate vectors of the fused form in Pg's place
  std::vector<char> memory(1);
  char* const base = memory.data();
  const cuda::ForwardBuffers b = cuda::lay_out_forward(base, in.problem, whole.counts, false);
  EXPECT_EQ(b.bytes, whole.bytes);
  const auto at = [&](const void* p) { return static_cast<const char*>(p) - base; };
  EXPECT_GE(at(b.fused_items), at(b.fused_header) + int64_t(sizeof(cuda::PlanHeader)));
  EXPECT_GE(at(b.fused_header), at(b.pg) + in.problem.chunk_slots() * 48 * cuda::kTileBytes);
  EXPECT_GE(at(b.saved.abar), at(b.fused_items) + 2 * 48 * int64_t(sizeof(cuda::WorkItem)));
  EXPECT_EQ(at(b.gates), at(b.pg));
  // the least and whatever lies between are one form's
  EXPECT_EQ(cuda::least_plan(in, plans).bytes, cuda::least_plan(cuda::one_form(in), of_one).bytes);
  EXPECT_TRUE(cuda::fitting_plan(in, plans, whole.bytes).counts.both);
  const cuda::ForwardPlan less = cuda::fitting_plan(in, plans, whole.bytes - 1);
  EXPECT_FALSE(less.counts.both);
  EXPECT_LE(less.bytes, whole.bytes - 1);
  EXPECT_LE(cuda::fitting_plan(in, plans, one.bytes - 1).bytes, one.bytes - 1);
  // 303 and 404 MiB: the two kernels in two ranges, room for the gate vectors of all chunks
  for (const int64_t heads : {48, 64}) {
    SCOPED_TRACE(heads);
    const cuda::PlanInput large = input(32768, heads);
    const cuda::WholePlans of_large = cuda::whole_plans(large);
    const cuda::ForwardPlan& both = of_large.best;
    ASSERT_TRUE(both.counts.both);
    EXPECT_EQ(both.counts.ranges, 2);
    EXPECT_LE(both.bytes, large.both_bytes);
    EXPECT_EQ(both.choice.value_splits, 2);
    EXPECT_FALSE(both.counts.cut || both.counts.fused);
    const cuda::ForwardBuffers buffers = cuda::lay_out_forward(base, large.problem, both.counts, false);
    EXPECT_EQ(buffers.bytes, both.bytes);
    EXPECT_GE(at(buffers.fused_header), at(buffers.gates) + large.problem.chunk_slots() * heads * cuda::kFusedVecFloats * 4);
    EXPECT_TRUE(cuda::fitting_plan(large, of_large, both.bytes).counts.both);
    EXPECT_FALSE(cuda::fitting_plan(large, of_large, both.bytes - 1).counts.both);
    EXPECT_LT(cuda::least_plan(large, of_large).bytes, cuda::whole_plans(cuda::one_form(large)).best.bytes);
    cuda::PlanInput roomy = large;
    roomy.both_bytes = size_t{512} << 20;
    EXPECT_TRUE(cuda::whole_plans(roomy).best.counts.both);
    EXPECT_EQ(cuda::whole_plans(roomy).best.counts.ranges, 1);
  }
  // A range with a part of each sequence has slots of its own; `saved` has those of all chunks.
  for (const auto& [tokens, heads] :
       {std::pair<int64_t, int64_t>{65536, 64}, {131072, 64}, {65536, 96}, {32768, 48}, {16384, 48}}) {
    cuda::PlanInput saved = input(tokens, heads);
    saved.saved = true;
    const cuda::ForwardPlan plan = cuda::whole_plans(saved).best;
    EXPECT_FALSE(plan.counts.both && plan.counts.ranges > 1) << tokens << " " << heads;
  }
  // longer ones would take too many ranges
  for (const int64_t tokens : {131072, 1 << 20}) EXPECT_FALSE(cuda::whole_plans(input(tokens, 48)).best.counts.both) << tokens;
}

}  // namespace
}  // namespace qla
