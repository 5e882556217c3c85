// What a forward call runs by, from shapes, policy and workspace alone: cuts, halves of V, ranges of chunks, and the counts that
// size its buffers. No CUDA types: src/api prints plans where there is no CUDA, too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/env.hpp"
#include "core/tensor_view.hpp"
#include "cuda/capabilities.hpp"
#include "cuda/workspace.hpp"
#include "plan/choose.hpp"
#include "plan/ranges.hpp"

namespace qla::cuda {

struct ForwardPlan {
  plan::Choice choice;
  ForwardCounts counts;
  size_t bytes = 0;  // of workspace
};

// Everything that a plan depends on; all of it is plain data, so that plans can be kept and compared by it.
struct PlanInput {
  plan::DeviceCosts costs;
  plan::Shape shape;
  plan::Policy policy;
  plan::Capabilities can;
  Problem problem;
  size_t both_bytes = 0;  // both forms in one call up to so much workspace
  bool saved = false;     // Abar and the vectors lie in the caller's memory
  bool exports = false;   // .. or are kept in the workspace, in the fused form, too
};

inline PlanInput plan_input(const qla_gdn_forward_args& args, const Problem& p, const plan::DeviceCosts& costs) {
  PlanInput in;
  in.costs = costs;
  in.shape = plan::shape_of(args, p);
  in.policy = plan::make_policy(args, p.dtype);
  in.can = forward_capabilities(args);
  in.problem = p;
  in.saved = present(args.saved);
  in.both_bytes = forward_workspace_limit();
  in.exports = exports_intra(args);
  const bool tables = outputs_of_intra(args);  // one table of all chunks, which is made by neither
  in.can.both = in.can.fused && p.varlen && !tables;
  in.can.balanced = in.can.fused && !tables;
  in.can.mixed = in.can.mixed && p.varlen;
  in.can.cut_fused = in.can.fused && !tables && !in.saved;
  return in;
}

inline constexpr int64_t kLeastRangeSlots = 16;

// A plan with ranges of so many slots.
inline ForwardPlan plan_ranges(const PlanInput& in, int64_t range_slots, bool cuts) {
  const int64_t all = in.problem.chunk_slots();
  plan::Shape shape = in.shape, bounds = in.shape;
  plan::Capabilities can = in.can;
  ForwardPlan result;
  ForwardCounts& counts = result.counts;
  counts.range_slots = all;
  if (range_slots < all) {
    counts.range_slots = range_slots;
    counts.ranges = plan::ceil_div(all, range_slots);
    // supposed: sequences of one length; bounded: every chunk of the range may be of another sequence, or all of one
    shape.total_tokens = std::min(in.shape.total_tokens, range_slots * plan::kChunkTokens);
    shape.num_seqs = std::clamp<int64_t>(plan::ceil_div(in.shape.num_seqs * range_slots, all), 1, in.shape.num_seqs);
    shape.equal_lengths =
        in.shape.equal_lengths || in.shape.num_seqs > 3;  // of many, one long sequence is unlikely (profiles_of)
    bounds.total_tokens = std::max<int64_t>(0, range_slots - in.shape.num_seqs) * plan::kChunkTokens;
    can.fused = can.both = can.balanced = can.mixed = can.cut_fused = false;
    can.segments = can.segments && cuts;
  }
  can.refined_units =
      segments::few_cut(in.problem.num_seqs, 0, counts.range_slots, in.problem.num_v_heads) ? segments::kFewUnits : 0;
  const plan::Choice& choice = result.choice = plan::choose(in.costs, shape, in.policy, can);
  counts.fused = choice.fused;
  counts.keeps = choice.fused && in.exports && !in.saved;
  counts.both = choice.fused_chunks > 0;
  counts.balanced_shares = choice.balanced ? in.costs.num_sms : 0;
  counts.items = plan::most_items(bounds, choice);
  counts.items += counts.balanced_shares;
  counts.v_parts = choice.value_splits;
  // Few heads need the pre-pass where warm-up serves the others: then it is short of CTAs, and halves of V finish sooner.
  counts.pre_v_parts = choice.rule.exact ? choice.value_splits : 2;
  counts.cut = choice.rule.segment_chunks > 0;
  counts.units = plan::most_units(bounds.total_tokens, bounds.num_seqs, choice.rule) * bounds.num_v_heads;
  counts.end_states = plan::most_end_states(bounds, choice);
  // A packing that may turn out whole has a list for that in any case: the pass over it waits for nothing that only a cut needs.
  const int64_t equal = plan::ceil_div(shape.total_tokens, std::max<int64_t>(shape.num_seqs, 1) * plan::kChunkTokens);
  if (can.mixed && counts.cut && !choice.fused && choice.uncut_splits == 0 && shape.num_seqs > 1 && !choice.rule.cuts(equal))
    result.choice.uncut_splits = choice.value_splits;
  if (choice.uncut_splits > 0 && counts.end_states == 0) result.choice.uncut_splits = 0;  // too short a call to cut anything
  if (choice.fused && counts.cut) counts.uncut_items = in.problem.num_seqs * in.problem.num_v_heads;
  if (choice.uncut_splits > 0) counts.uncut_items = in.problem.num_seqs * in.problem.num_v_heads * choice.uncut_splits;
  result.bytes = lay_out_forward(nullptr, in.problem, counts, in.saved).bytes;
  return result;
}

// Where segments have a length of their own for every call (batch-invariant, given by the caller) ranges would move the cuts.
inline bool may_range(const PlanInput& in) {
  return !in.policy.batch_invariant && in.policy.mode != QLA_CP_FIXED && in.problem.chunk_slots() > kLeastRangeSlots;
}

inline PlanInput one_form(const PlanInput& in) {
  PlanInput one = in;
  one.can.both = one.can.balanced = false;
  return one;
}
// Both forms where the two kernels take the chunks in a few ranges, a part of each sequence in every one (plan/ranges.hpp); the
// fused one takes them all.
inline constexpr int64_t kMostBothRanges = 4;
inline ForwardPlan both_in_ranges(const PlanInput& in, const plan::Choice& whole, int64_t ranges) {
  ForwardPlan result = plan_ranges(in, plan::part_slots(in.problem.chunk_slots(), in.problem.num_seqs, ranges), false);
  result.counts.ranges = ranges;
  result.choice.value_splits = whole.value_splits;  // the long packing's, whatever suits a range of equal ones
  result.counts.v_parts = whole.value_splits;
  result.counts.items = in.problem.num_seqs * in.problem.num_v_heads * result.counts.v_parts;
  result.choice.fused_chunks = whole.fused_chunks;
  result.choice.reason = whole.reason;
  result.choice.predicted_us = whole.predicted_us + plan::kLongWeight * plan::kRangeLaunches * static_cast<float>(ranges - 1);
  result.counts.both = true;
  result.bytes = lay_out_forward(nullptr, in.problem, result.counts, in.saved).bytes;
  return result;
}
// Of a workspace for all chunks at once: the best plan, and where it has both forms or items in parts, the best one without.
struct WholePlans {
  ForwardPlan best, one;
  bool differ = false;
};
// The fused form of cut sequences is not made for ranges.
inline bool too_large_a_cut(const PlanInput& in, const ForwardPlan& plan) {
  return plan.counts.fused && plan.counts.cut && plan.bytes > in.both_bytes;
}
inline WholePlans whole_plans(const PlanInput& in) {
  WholePlans plans;
  plans.best = plan_ranges(in, in.problem.chunk_slots(), true);
  bool too_large = too_large_a_cut(in, plans.best);
  if (in.policy.mode == QLA_CP_PLAN && plans.best.counts.fused && plans.best.counts.cut) {
    // The given length may be what was found when the best one was too large: then its form is the one of that search.
    PlanInput own = in;
    own.policy.mode = QLA_CP_AUTO, own.policy.fixed_chunks = own.policy.uncut_chunks = 0;
    too_large |= too_large_a_cut(own, plan_ranges(own, in.problem.chunk_slots(), true));
  }
  if (too_large) {
    PlanInput others = in;
    others.can.cut_fused = false;
    return whole_plans(others);
  }
  plans.differ = plans.best.counts.both || plans.best.counts.balanced_shares;
  plans.one = plans.differ ? plan_ranges(one_form(in), in.problem.chunk_slots(), true) : plans.best;
  if (!plans.best.counts.both || plans.best.bytes <= in.both_bytes) return plans;
  // One form of two kernels pays for its ranges, too, whatever the lengths.
  const int64_t alone = std::max<int64_t>(
      1, plan::ceil_div(static_cast<int64_t>(plans.one.bytes), static_cast<int64_t>(std::max<size_t>(1, in.both_bytes))));
  // What is right for all chunks at once may need more of them than a range has.
  const ForwardPlan part =
      alone > 1 ? plan_ranges(one_form(in), plan::ceil_div(in.problem.chunk_slots(), alone), true) : plans.one;
  const float one_us = part.choice.predicted_us * static_cast<float>(alone);
  // saved: what backward reuses lies by the slots of all chunks, those of these ranges by theirs
  for (int64_t ranges = 2; ranges <= kMostBothRanges && !in.saved; ++ranges) {
    const ForwardPlan both = both_in_ranges(in, plans.best.choice, ranges);
    if (both.choice.predicted_us >= one_us) break;
    if (both.bytes > in.both_bytes) continue;
    plans.best = both;
    return plans;
  }
  plans.best = plans.one;
  plans.differ = false;
  return plans;
}
inline ForwardPlan least_plan(const PlanInput& in, const WholePlans& whole) {
  if (!may_range(in)) return whole.one;
  const ForwardPlan least = plan_ranges(whole.differ ? one_form(in) : in, kLeastRangeSlots, false);
  return least.bytes < whole.one.bytes ? least : whole.one;
}

// The fewest ranges whose buffers fit, about equally long; where none do, the least plan.
inline ForwardPlan fitting_plan(const PlanInput& given, const WholePlans& whole, size_t bytes) {
  if (whole.best.bytes <= bytes) return whole.best;
  if (whole.one.bytes <= bytes || !may_range(given)) return whole.one;
  const PlanInput in = whole.differ ? one_form(given) : given;
  const int64_t all = in.problem.chunk_slots();
  const int64_t a_slot = in.problem.num_v_heads * (kTileBytes + (in.saved ? 0 : kTileBytes + int64_t{kVecFloats} * 4));
  const int64_t first = std::max<int64_t>(2, all * a_slot / std::max<int64_t>(1, static_cast<int64_t>(bytes)));
  for (int64_t ranges = first; plan::ceil_div(all, ranges) > kLeastRangeSlots; ranges += 1 + ranges / 16)
    for (const bool cuts : {true, false}) {
      const ForwardPlan plan = plan_ranges(in, plan::ceil_div(all, ranges), cuts);
      if (plan.bytes <= bytes) return plan;
      if (!plan.counts.cut) break;  // it was without cuts already
    }
  return least_plan(given, whole);
}

}  // namespace qla::cuda
