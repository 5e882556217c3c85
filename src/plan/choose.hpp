// A device's choice among no cut, V-split and segments of several lengths, from shapes alone: boundaries and gates are read by
// the planning kernel, so one captured graph serves any of them. Lengths are therefore supposed (profiles), and so are gates.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "plan/balance.hpp"
#include "plan/costs.hpp"
#include "plan/forms.hpp"
#include "plan/model.hpp"
#include "plan/policy.hpp"

namespace qla::plan {

inline constexpr int64_t kLeastSegmentChunks = 5;
inline constexpr int64_t kInvariantSegmentChunks = 64;  // batch-invariant: depends on nothing
inline constexpr int64_t kItemsPerSm = 4;               // no more segments than this: bounds the merges' workspace

struct Capabilities {  // what the device's kernels can do
  bool fused = true, v_split = true, segments = true;
  bool balanced = false;      // the fused form's items in two parts each where that fills the last round
  bool mixed = false;         // all of V where a sequence is cut and halves where none is, in one call
  bool both = false;          // fused and two kernels in one call, the planning kernel gives all items to one of them
  int64_t refined_units = 0;  // cuts of their own for heads that merge, with at most so many segments over all heads
  bool cut_fused = false;     // the fused form of sequences that are cut
};

enum class Reason : int32_t {
  Off,
  Fixed,
  Repeated,
  Invariant,
  CardFull,
  NothingToCut,
  ValueSplit,
  Segments,
  SegmentsAndSplit,
  SegmentsOrSplit,
  BothForms,
  Balanced
};

inline const char* reason_text(Reason reason) {
  switch (reason) {
    case Reason::Off:
      return "cuts are off";
    case Reason::Fixed:
      return "segments of the given length";
    case Reason::Repeated:
      return "as the given plan";
    case Reason::Invariant:
      return "batch-invariant: one segment length for every call";
    case Reason::CardFull:
      return "sequences and heads fill the device: no cut";
    case Reason::NothingToCut:
      return "no cut would pay";
    case Reason::ValueSplit:
      return "two halves of V for each head fill the device better";
    case Reason::Segments:
      return "few heads: sequences are cut into segments";
    case Reason::SegmentsAndSplit:
      return "few heads: sequences are cut into segments, V into halves";
    case Reason::SegmentsOrSplit:
      return "few heads: a long sequence is cut into segments; where none is long, two halves of V: seen on the device";
    case Reason::Balanced:
      return "sequences and heads fill the device: no cut; items in two parts fill its last round";
    case Reason::BothForms:
      return "fused for about equal lengths, two halves of V for a long one: seen on the device";
  }
  return "";
}

struct Choice {
  CutRule rule;
  int32_t value_splits = 1;  // 1 or 2 items a segment and head
  bool fused = false;
  int32_t uncut_splits = 0;  // .. where no sequence of a packing turns out to be cut; 0: the same
  // 0: one form. Else both are in the call: fused for a packing whose longest sequence has at most so many chunks, and two
  // kernels with value_splits (2) else (forms.hpp).
  int64_t fused_chunks = 0;
  bool balanced = false;   // fused: some items in two parts, one after the other (balance.hpp)
  float predicted_us = 0;  // of the supposed lengths and gates
  Reason reason = Reason::NothingToCut;
};

inline constexpr int64_t kMostBalancedRounds = 8;  // then the queue evens them out

// Dense calls have equal sequences. A packing's lengths are unknown: equal, or one long sequence and short ones; with two or
// three sequences the second is half as likely (a wrong guess at equal ones costs more: decision 0056), more even out.
struct Profiles {
  Profile all[3];
  int32_t count = 0;
};

inline constexpr float kLongWeight = 0.6f;  // .. of two or three

inline Profiles profiles_of(const Shape& shape) {
  const int64_t seqs = shape.seqs(), total = shape.total_chunks(),
                each = ceil_div(ceil_div(shape.total_tokens, seqs), kChunkTokens);
  Profiles profiles;
  const bool uneven = !shape.equal_lengths && seqs > 1;
  const float long_weight = !uneven ? 0.0f : seqs <= 3 ? kLongWeight : 0.05f;
  profiles.all[profiles.count++] = {{{seqs, each}, {0, 0}}, 1, 1.0f - long_weight};
  const auto add_long = [&](int64_t longest, float weight) {
    profiles.all[profiles.count++] = {{{1, longest}, {seqs - 1, ceil_div(total - longest, seqs - 1)}}, 2, weight};
  };
  if (uneven && seqs == 2) {
    add_long(total * 3 / 4, 0.7f * long_weight);
    add_long(total * 7 / 8, 0.3f * long_weight);
  } else if (uneven) {
    add_long(seqs == 3 ? total * 7 / 8 : total / 2, long_weight);
  }
  return profiles;
}

inline constexpr float kSureOfACut = 0.9f;
inline constexpr float kSureOfARefinement = 0.99f;
// Refinements are looked at for the forms of so many lengths that are predicted this near to the best.
inline constexpr int32_t kRefinedLengths = 3;
inline constexpr float kWorthRefining = 1.05f;

// Bounds from shapes, for grids and workspace. Items: one a segment, value head and half of V.
inline int64_t most_items(const Shape& shape, const Choice& choice) {
  return most_segments(shape.total_tokens, shape.num_seqs, choice.rule) * shape.num_v_heads * choice.value_splits;
}

// End states that merges may need, of pieces of segments: of all segments but the last of every cut sequence, and a sequence of c
// chunks has at most (c - 1) / L of them.
inline int64_t most_end_states(const Shape& shape, const Choice& choice) {
  if (choice.rule.segment_chunks == 0 || choice.rule.join) return 0;
  const int64_t chunks = shape.total_tokens / kChunkTokens + shape.num_seqs;
  const CutRule& rule = choice.rule;
  const int64_t least = rule.merged_chunks > 0 ? rule.merged_chunks : rule.segment_chunks;
  const int64_t first = std::min(shape.num_seqs, chunks / least) * std::max(0, rule.first_pieces - rule.pieces);
  return (chunks / least * rule.pieces + first) * shape.num_v_heads;
}

inline CutRule refined_rule(const Policy& policy, const Candidate& candidate) {
  CutRule rule = rule_for(policy, candidate.segment_chunks);
  rule.merged_chunks = candidate.merged_chunks;
  rule.pieces = candidate.pieces, rule.first_pieces = candidate.first_pieces;
  if (!candidate.even) rule.balance = 0;
  return rule;
}

// Cuts with more to do for the pre-pass's multiprocessors: heads that merge in shorter segments, as many as one round of pre-pass
// and main pass takes, or the pre-pass's way to their ends in pieces. None of it where every head merges.
template <typename Consider>
void for_each_refinement(const DeviceCosts& costs, const Shape& shape, const Capabilities& can, const Policy& policy,
                         Candidate candidate, int64_t longest, Consider consider) {
  constexpr int64_t kPieceChunks = 8;
  constexpr int32_t kPieces[][2] = {{2, 1}, {2, 2}, {4, 2}, {1, 2}, {3, 2}, {3, 3}};
  const int64_t heads = shape.num_v_heads, merging = assumed_exact_heads(heads),
                segments = ceil_div(longest, candidate.segment_chunks);
  if (can.refined_units == 0 || merging == 0) return;
  const auto fits = [&] {
    Choice choice;
    choice.rule = refined_rule(policy, candidate);
    return most_units(shape.total_tokens, shape.num_seqs, choice.rule) * heads <= can.refined_units &&
           most_end_states(shape, choice) <= kItemsPerSm * costs.num_sms;
  };
  const int64_t in_pre_pass = (costs.num_sms / (2 * merging) + 3) / 2,
                rounds = ceil_div(heads * segments * candidate.splits, costs.num_sms),
                in_main_pass = (rounds * costs.num_sms / candidate.splits - (heads - merging) * segments) / merging;
  // Where a given state is felt beyond a segment, heads that forget have a merge each, too: no multiprocessor is left for more
  // items.
  const int64_t more = candidate.segment_chunks > kAssumedForgetting ? std::min(in_pre_pass, in_main_pass) : 0;
  if (more > segments) {
    candidate.merged_chunks = ceil_div(longest, more);
    if (candidate.merged_chunks >= kLeastSegmentChunks && fits()) consider(candidate);
    candidate.merged_chunks = 0;
  }
  for (const auto& [first, others] : kPieces) {
    if (candidate.segment_chunks < kPieceChunks * std::max(first, others)) continue;
    candidate.first_pieces = first, candidate.pieces = others;
    if (fits()) consider(candidate);
  }
}
inline constexpr int64_t kMostFusedCutSeqs = 4;  // more were not measured

// In a packing of two all segments have one length, and the rests together fill a multiprocessor's time: sequences of 448
// and 64 chunks in segments of 128 are three of 128 and two of 64. More sequences were not measured; a batch-invariant call's
// segments are the same in every batch.
inline bool even_segments(const Shape& shape) { return shape.equal_lengths || shape.num_seqs != 2; }

inline Choice choose(const DeviceCosts& costs, const Shape& shape, const Policy& policy, const Capabilities& can) {
  const Profiles profiles = profiles_of(shape);
  const int64_t total = shape.total_chunks();
  int64_t longest = 0;
  for (int32_t i = 0; i < profiles.count; ++i) longest = std::max(longest, profiles.all[i].kinds[0].chunks);

  const bool cuts = shape.may_cut && can.segments && policy.mode != QLA_CP_OFF;
  const bool repeats = cuts && policy.mode == QLA_CP_PLAN;
  int64_t given = 0;  // where the length is not ours to choose; 0 with free_choice or without cuts
  if (repeats || (cuts && policy.mode == QLA_CP_FIXED))
    given = policy.fixed_chunks;
  else if (cuts && policy.batch_invariant)
    given = kInvariantSegmentChunks;
  const bool free_choice = cuts && given == 0 && !repeats;
  const bool leaves_whole = free_choice || (repeats && !policy.batch_invariant);

  // Which profile a packing has is seen on the device, where a sequence too short for its cut to pay is left whole.
  const bool even = policy.batch_invariant || even_segments(shape);
  // known: where a whole one's time is kept, which depends on no length
  const auto better_whole = [&](const Profile& profile, Candidate candidate, float& us, float* known = nullptr) {
    candidate.even = even;
    us = estimate(costs, shape, policy, profile, candidate);
    if (!leaves_whole || candidate.segment_chunks == 0 || profiles.count == 1) return false;
    float whole = known != nullptr ? *known : 0.0f;
    if (whole == 0.0f) {
      candidate.uncut_chunks = total;
      whole = estimate(costs, shape, policy, profile, candidate);
      if (known != nullptr) *known = whole;
    }
    if (whole >= us) return false;
    us = whole;
    return true;
  };
  float whole_us[3][4] = {};  // of a profile and form
  Candidate best{0, 0, false}, best_uncut = best;
  float best_us = 0, best_uncut_us = 0;
  // The lengths whose best forms come out ahead, best first.
  struct Length {
    int64_t chunks = 0;
    float us = 0;
  };
  std::array<Length, kRefinedLengths> ahead;
  const auto rank = [&](Length found) {
    for (Length& one : ahead)
      if (one.chunks == found.chunks) {
        one.us = std::min(one.us, found.us);
        found.chunks = 0;
      }
    if (found.chunks > 0 && (ahead[kRefinedLengths - 1].chunks == 0 || found.us < ahead[kRefinedLengths - 1].us))
      ahead[kRefinedLengths - 1] = found;
    for (int32_t i = kRefinedLengths - 1; i > 0; --i)
      if (ahead[i].chunks > 0 && (ahead[i - 1].chunks == 0 || ahead[i].us < ahead[i - 1].us)) std::swap(ahead[i], ahead[i - 1]);
  };
  const auto consider = [&](Candidate candidate) {
    candidate.even = even;
    float us = 0, each = 0;
    const int32_t form = candidate.fused ? 0 : candidate.uncut_splits > 0 ? 3 : candidate.splits;
    for (int32_t i = 0; i < profiles.count; ++i)
      better_whole(profiles.all[i], candidate, each, &whole_us[i][form]), us += profiles.all[i].weight * each;
    if (candidate.refined()) us /= kSureOfARefinement;
    if (best.splits == 0 || us < best_us) best = candidate, best_us = us;
    if (candidate.segment_chunks == 0 && (best_uncut.splits == 0 || us < best_uncut_us))
      best_uncut = candidate, best_uncut_us = us;
    if (candidate.segment_chunks > 0 && !candidate.refined()) rank({candidate.segment_chunks, us});
    return us;
  };
  const bool mixes = can.mixed && can.v_split && leaves_whole && shape.num_seqs >= kLeastBothSeqs &&
                     shape.num_seqs <= kMostBothSeqs && profiles.count > 1 && !shape.backward;
  // Where value heads share a query/key head, chunk_intra's work is shared, too, and two kernels are as quick. Not for lengths
  // that a caller fixes, whose calls give the same bits however many heads they have.
  const bool fuses = can.fused && can.cut_fused && shape.group == 1 && shape.num_seqs <= kMostFusedCutSeqs &&
                     policy.mode != QLA_CP_FIXED && !shape.backward && !policy.batch_invariant;
  const auto for_each_form = [&](int64_t length, auto use) {
    for (int32_t splits = 1; splits <= (can.v_split ? 2 : 1); ++splits) use({length, splits, false});
    if (length == 0 || length >= longest) return;
    if (mixes) use({length, 1, false, 0, false, 2});
    // of many sequences a long one beside short ones is too rare for the others to pay for the question
    if (fuses && (shape.num_seqs <= 2 || length < profiles.all[0].kinds[0].chunks)) use({length, 1, true});
  };
  // The fused form keeps nothing in memory, which segments and backward need. Whether it rounds as the two kernels do is nobody's
  // promise: a batch-invariant call never uses it.
  if (can.fused && given == 0 && !shape.backward && !policy.batch_invariant) consider({0, 1, true});
  for_each_form(given, consider);
  for (const int64_t pieces : {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128}) {
    const int64_t length = ceil_div(total, pieces);
    if (!free_choice || length < kLeastSegmentChunks || pieces * shape.num_v_heads > kItemsPerSm * costs.num_sms) break;
    if (length < longest) for_each_form(length, consider);
  }
  // .. and where two sequences have segments of one length: those that the supposed lengths divide into, from the shortest on of
  // which one round holds all
  const int64_t filling = ceil_div(total * shape.num_v_heads, costs.num_sms);
  for (int32_t i = 1; free_choice && !even && filling >= kLeastSegmentChunks && i < profiles.count; ++i) {
    const int64_t supposed = profiles.all[i].kinds[0].chunks;
    for (int64_t pieces = 2; pieces * filling <= supposed; ++pieces)
      if (3 * supposed <= 4 * pieces * filling) for_each_form(ceil_div(supposed, pieces), consider);
  }

  // What is found for a length is the same whatever else was looked at: a plan that is repeated is refined as it was.
  const float unrefined_us = best_us;
  const std::array<Length, kRefinedLengths> lengths = ahead;
  for (const Length& length : lengths) {
    if (!leaves_whole || policy.exact() || length.chunks == 0 || length.us > kWorthRefining * unrefined_us) break;
    for_each_form(length.chunks, [&](const Candidate& form) {
      if (consider(form) <= kWorthRefining * length.us) for_each_refinement(costs, shape, can, policy, form, longest, consider);
    });
  }

  // Equal sequences that stay whole pay for the question whether anything is cut, and nobody has measured packings of three.
  float equal_us = 0;
  const bool equal_whole = best.segment_chunks >= profiles.all[0].kinds[0].chunks / 2 ||
                           (best.segment_chunks > 0 && better_whole(profiles.all[0], best, equal_us));
  const bool sure = !(free_choice && shape.num_seqs > 2 && equal_whole && best_us > kSureOfACut * best_uncut_us);
  if (!sure) best = best_uncut, best_us = best_uncut_us;

  // Up to which length a packing stays whole: that of equal sequences, then longer and longer ones beside shorter ones.
  if (repeats) best.uncut_chunks = policy.uncut_chunks;
  for (int64_t i = 0, ends = profiles.all[0].kinds[0].chunks; free_choice && i < 16 && ends < total;
       ++i, ends += ceil_div(total, 16)) {
    const int64_t others = std::max<int64_t>(1, shape.seqs() - 1);
    float us = 0;
    if (!better_whole({{{1, ends}, {others, ceil_div(total - ends, others)}}, 2, 1.0f}, best, us)) break;
    best.uncut_chunks = ends;
  }
  if (best.uncut_chunks > 0 && free_choice) {  // so no profile has its own choice
    best_us = 0;
    for (int32_t i = 0; i < profiles.count; ++i)
      best_us += profiles.all[i].weight * estimate(costs, shape, policy, profiles.all[i], best);
    if (best_uncut_us <= best_us) best = best_uncut, best_us = best_uncut_us;
  }

  // Both forms, uncut: each profile by its better one, at the price of the launches that find nothing.
  int64_t fused_chunks = 0;
  const Candidate fused{0, 1, true}, halves{0, 2, false};
  if (can.both && can.fused && can.v_split && given == 0 && policy.mode != QLA_CP_FIXED && !policy.batch_invariant &&
      !shape.backward && !shape.equal_lengths && shape.num_seqs >= kLeastBothSeqs && shape.num_seqs <= kMostBothSeqs &&
      total > kDirectChunks * shape.num_seqs) {
    float us = kBothForms;
    for (int32_t i = 0; i < profiles.count; ++i) {
      const Profile& profile = profiles.all[i];
      us += profile.weight *
            std::min(estimate(costs, shape, policy, profile, fused), estimate(costs, shape, policy, profile, halves));
    }
    if (us < best_us || (shape.num_seqs > 2 && kSureOfACut * us < best_us)) {
      const int64_t step = ceil_div(total, 64), others = shape.num_seqs - 1;
      for (int64_t ends = profiles.all[0].kinds[0].chunks; ends < total; ends += step) {
        const Profile one_longer{{{1, ends}, {others, ceil_div(total - ends, others)}}, 2, 1.0f};
        if (estimate(costs, shape, policy, one_longer, halves) < estimate(costs, shape, policy, one_longer, fused)) break;
        fused_chunks = ends;
      }
      if (fused_chunks > 0) best = halves, best_us = us;
    }
  }

  // The fused form with its last round filled, where that saves more than the model's word is good for.
  bool balanced = false;
  const int64_t items = shape.seqs() * shape.num_v_heads;
  if (can.balanced && can.fused && given == 0 && policy.mode != QLA_CP_FIXED && !policy.batch_invariant && !shape.backward &&
      items > costs.num_sms && items <= kMostBalancedRounds * costs.num_sms && shape.num_seqs <= kMostBalancedSeqs) {
    float us = 0;
    for (int32_t i = 0; i < profiles.count; ++i)
      us += profiles.all[i].weight * estimate(costs, shape, policy, profiles.all[i], {0, 1, true, 0, true});
    if (us < 0.97f * best_us) best = {0, 1, true, 0, true}, best_us = us, fused_chunks = 0, balanced = true;
  }

  Choice choice;
  choice.value_splits = best.splits;
  choice.uncut_splits = best.uncut_splits;
  choice.fused = best.fused;
  choice.fused_chunks = fused_chunks;
  choice.balanced = balanced;
  choice.predicted_us = best_us;
  if (policy.mode == QLA_CP_OFF && fused_chunks == 0)
    choice.reason = Reason::Off;
  else if (cuts && policy.mode == QLA_CP_FIXED)
    choice.reason = Reason::Fixed;
  else if (repeats)
    choice.reason = Reason::Repeated;
  else if (cuts && policy.batch_invariant)
    choice.reason = Reason::Invariant;
  else if (balanced)
    choice.reason = Reason::Balanced;
  else if (fused_chunks > 0)
    choice.reason = Reason::BothForms;
  else if (best.segment_chunks > 0)
    choice.reason = best.uncut_splits > 0 ? Reason::SegmentsOrSplit
                    : best.splits == 2    ? Reason::SegmentsAndSplit
                                          : Reason::Segments;
  else if (best.splits == 2)
    choice.reason = Reason::ValueSplit;
  else
    choice.reason = shape.seqs() * shape.num_v_heads * 2 > costs.num_sms ? Reason::CardFull : Reason::NothingToCut;
  choice.rule = refined_rule(policy, best);
  choice.rule.uncut_chunks = best.uncut_chunks;
  // All segments run at once, so the longest walk counts: what more warm-up would cost here, a merge costs less.
  choice.rule.max_warmup_chunks = std::max<int64_t>(kAssumedWarmup, best.segment_chunks / 2);
  return choice;
}

// What a packing with a longest sequence of so many chunks runs by.
inline Choice chosen_form(Choice choice, int64_t longest_chunks) {
  if (choice.fused_chunks > 0 && takes_fused(longest_chunks, choice.fused_chunks)) choice.fused = true, choice.value_splits = 1;
  if (choice.uncut_splits > 0 && !choice.rule.cuts(longest_chunks)) choice.value_splits = choice.uncut_splits;
  return choice;
}

}  // namespace qla::plan
