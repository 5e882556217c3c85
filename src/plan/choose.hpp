// A device's choice among no cut, V-split and segments of several lengths, from shapes alone: boundaries and gates are read by
// the planning kernel, so one captured graph serves any of them. The cost model therefore assumes sequences of equal length and
// usual gates.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "plan/costs.hpp"
#include "plan/policy.hpp"

namespace qla::plan {

inline constexpr int64_t kLeastSegmentChunks = 4;
inline constexpr int64_t kAssumedWarmup = 4;            // chunks, g = logsigmoid(N(0, 1)) / 16
inline constexpr float kAssumedExactShare = 0.25f;      // of the value heads: a trained gate is 0 in about so many
inline constexpr int64_t kInvariantSegmentChunks = 64;  // batch-invariant: depends on nothing
inline constexpr int64_t kItemsPerSm = 4;               // no more segments than this: bounds the merges' workspace

struct Shape {
  int64_t total_tokens = 0, num_seqs = 0, num_v_heads = 1, group = 1;
  bool equal_lengths = true;  // dense: every sequence has total_tokens / num_seqs tokens
  bool may_cut = true;        // false: a state pool is updated in place, or only one segment is possible
  bool backward = false;
};

template <typename Args>  // of a validated call; the backends and qla_gdn_plan all begin here
Shape shape_of(const Args& args, const Problem& problem) {
  Shape shape;
  shape.total_tokens = problem.total_tokens();
  shape.num_seqs = problem.num_seqs;
  shape.num_v_heads = problem.num_v_heads;
  shape.group = problem.group();
  shape.equal_lengths = !problem.varlen;
  if constexpr (requires { args.d_o; }) shape.backward = true;
  if constexpr (requires { args.state_indices; }) shape.may_cut = args.state_indices.data == nullptr;
  return shape;
}

struct Capabilities {  // what the device's kernels can do
  bool fused = true, v_split = true, segments = true;
};

enum class Reason : int32_t { Off, Fixed, Invariant, CardFull, NothingToCut, ValueSplit, Segments, SegmentsAndSplit };

inline const char* reason_text(Reason reason) {
  switch (reason) {
    case Reason::Off:
      return "cuts are off";
    case Reason::Fixed:
      return "segments of the given length";
    case Reason::Invariant:
      return "batch-invariant: one segment length for every call";
    case Reason::CardFull:
      return "sequences and heads fill the device: no cut";
    case Reason::NothingToCut:
      return "too short to cut";
    case Reason::ValueSplit:
      return "two halves of V for each head fill the device better";
    case Reason::Segments:
      return "few heads: sequences are cut into segments";
    case Reason::SegmentsAndSplit:
      return "few heads: sequences are cut into segments, V into halves";
  }
  return "";
}

struct Choice {
  CutRule rule;
  int32_t value_splits = 1;  // 1 or 2 items a segment and head
  bool fused = false;
  float predicted_us = 0;  // of the assumed lengths and gates
  Reason reason = Reason::NothingToCut;
};

namespace detail {

inline float waves(float items, float sms) {  // a queue evens out what full waves do not: with many items the last one costs half
  const float whole = static_cast<float>(static_cast<int64_t>((items + sms - 1.0f) / sms));
  return whole < 3.0f ? whole : items / sms + 0.5f;
}

inline float chunk_cost(const DeviceCosts& costs, const Shape& shape, int32_t splits, bool fused, bool full_card) {
  if (shape.backward) return (splits == 2 ? 1.0f : 1.6f) * (costs.reverse_half + (full_card ? costs.state_half : 0.0f));
  if (fused) return costs.fused;
  if (splits == 2) return full_card ? costs.main_half : costs.main_half_quiet;
  return full_card ? costs.main_full : costs.main_full_quiet;
}

}  // namespace detail

// Predicted microseconds with `segments` equal pieces a sequence.
inline float estimate(const DeviceCosts& costs, const Shape& shape, const Policy& policy, int64_t segments, int32_t splits,
                      bool fused) {
  const float sms = static_cast<float>(costs.num_sms), heads = static_cast<float>(shape.num_v_heads);
  const float seqs = static_cast<float>(std::max<int64_t>(1, shape.num_seqs)), pieces = static_cast<float>(segments);
  const int64_t chunks = ceil_div(ceil_div(shape.total_tokens, std::max<int64_t>(1, shape.num_seqs)), kChunkTokens);
  const float length = static_cast<float>(ceil_div(chunks, segments));
  const float warmup = segments > 1 && policy.mode != QLA_CP_EXACT ? static_cast<float>(kAssumedWarmup) : 0.0f;
  const float items = seqs * heads * pieces * static_cast<float>(splits);
  const float per_chunk = detail::chunk_cost(costs, shape, splits, fused, items >= sms);

  float us = costs.fixed + costs.plan + detail::waves(items, sms) * (length + warmup) * per_chunk;
  if (!fused)
    us += costs.launch + seqs * static_cast<float>(chunks) * heads / sms *
                             costs.intra[shape.group >= 4   ? 0
                                         : shape.group >= 2 ? 1
                                                            : 2];
  if (shape.backward) us += costs.launch + seqs * static_cast<float>(chunks) * heads / sms * costs.grads;
  if (segments > 1) {
    const float exact_heads =
        policy.mode == QLA_CP_EXACT ? heads : static_cast<float>(static_cast<int64_t>(heads * kAssumedExactShare + 0.5f));
    // S_ext of all segments but the last (its own end state is never merged), M of all but the first and the last: the same
    // length again.
    const float walks = exact_heads * seqs * static_cast<float>(splits) * (2.0f * pieces - 3.0f);
    if (exact_heads > 0)
      us += 2 * costs.launch + detail::waves(walks, sms) * length * (splits == 2 ? costs.state_half : costs.state_full) +
            (pieces - 1) * costs.merge;
  }
  return us;
}

// Chunks a multiprocessor gets when all work is shared out evenly: what the longest sequence of an uneven packing should be cut
// to.
inline int64_t fair_share(const DeviceCosts& costs, const Shape& shape, int32_t splits) {
  const int64_t chunks = ceil_div(shape.total_tokens, kChunkTokens);
  return std::max<int64_t>(kLeastSegmentChunks, ceil_div(chunks * shape.num_v_heads * splits, costs.num_sms));
}

inline Choice choose(const DeviceCosts& costs, const Shape& shape, const Policy& policy, const Capabilities& can) {
  const int64_t seqs = std::max<int64_t>(1, shape.num_seqs);
  const int64_t chunks = ceil_div(ceil_div(shape.total_tokens, seqs), kChunkTokens);  // of a sequence, were they equal
  const bool cuts = shape.may_cut && can.segments && policy.mode != QLA_CP_OFF;
  const bool free_choice = cuts && policy.mode != QLA_CP_FIXED && !policy.batch_invariant;

  // Two or three packed sequences are often a long one and short ones, which the host cannot know: cut for the long one. Were
  // they equal this costs a few percent; uneven and uncut, the long one would take twice the time. More sequences even out by
  // themselves.
  if (free_choice && !shape.equal_lengths && (shape.num_seqs == 2 || shape.num_seqs == 3)) {
    Shape long_one = shape;
    long_one.num_seqs = 1;
    long_one.equal_lengths = true;
    const Choice choice = choose(costs, long_one, policy, can);
    if (choice.rule.segment_chunks > 0) return choice;
  }

  int64_t best_segments = 1;
  Choice best;
  const auto consider = [&](int64_t segments, int32_t splits, bool fused) {
    const float us = estimate(costs, shape, policy, segments, splits, fused);
    if (best.predicted_us != 0 && us >= best.predicted_us) return;
    best.predicted_us = us, best.value_splits = splits, best.fused = fused, best_segments = segments;
  };
  int64_t given_segments = 1;  // where the length is not ours to choose
  if (cuts && policy.mode == QLA_CP_FIXED)
    given_segments = std::max<int64_t>(1, ceil_div(chunks, policy.fixed_chunks));
  else if (cuts && policy.batch_invariant)
    given_segments = std::max<int64_t>(1, ceil_div(chunks, kInvariantSegmentChunks));
  for (int32_t splits = 1; splits <= (can.v_split ? 2 : 1); ++splits) {
    // Whether the fused kernel rounds as the two kernels do is nobody's promise: a batch-invariant call never uses it.
    if (splits == 1 && can.fused && given_segments == 1 && !shape.backward && !policy.batch_invariant) consider(1, 1, true);
    if (!free_choice) {
      consider(given_segments, splits, false);
      continue;
    }
    for (const int64_t segments : {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64}) {
      if (segments > 1 &&
          (chunks / segments < kLeastSegmentChunks || segments * seqs * shape.num_v_heads > kItemsPerSm * costs.num_sms))
        break;
      consider(segments, splits, false);
    }
  }

  int64_t segment_chunks = 0;
  if (!cuts) {
    best.reason = policy.mode == QLA_CP_OFF ? Reason::Off : Reason::NothingToCut;
  } else if (policy.mode == QLA_CP_FIXED) {
    segment_chunks = policy.fixed_chunks, best.reason = Reason::Fixed;
  } else if (policy.batch_invariant) {
    segment_chunks = kInvariantSegmentChunks, best.reason = Reason::Invariant;
  } else {
    segment_chunks = best_segments > 1 ? ceil_div(chunks, best_segments) : 0;
    // An uneven packing may hold one sequence with nearly all tokens: it is cut to an even share, where one sequence alone leaves
    // the device empty.
    // .. unless the sequences fill it if they are about equal: then that is what they are taken for.
    const bool may_be_uneven = !shape.equal_lengths && shape.num_seqs > 1 &&
                               shape.num_v_heads * best.value_splits * 3 <= costs.num_sms &&
                               seqs * shape.num_v_heads * 10 < costs.num_sms * 9;
    if (segment_chunks == 0 && may_be_uneven && chunks >= kLeastSegmentChunks) {
      segment_chunks = std::max(chunks, fair_share(costs, shape, best.value_splits));
    }
    best.reason = best_segments > 1        ? (best.value_splits == 2 ? Reason::SegmentsAndSplit : Reason::Segments)
                  : best.value_splits == 2 ? Reason::ValueSplit
                  : seqs * shape.num_v_heads * 2 > costs.num_sms ? Reason::CardFull
                                                                 : Reason::NothingToCut;
  }
  // A pre-pass and a warm-up read Abar from memory.
  if (segment_chunks > 0 && (!shape.equal_lengths || chunks > segment_chunks)) best.fused = false;
  best.rule = rule_for(policy, segment_chunks);
  // All segments run at once, so the longest walk counts: what more warm-up would cost here, a merge costs less.
  best.rule.max_warmup_chunks = std::max<int64_t>(kAssumedWarmup, segment_chunks / 2);
  return best;
}

// Bounds from shapes, for grids and workspace. Items: one a segment, value head and half of V.
inline int64_t most_items(const Shape& shape, const Choice& choice) {
  return most_segments(shape.total_tokens, shape.num_seqs, choice.rule) * shape.num_v_heads * choice.value_splits;
}

// Segments whose end state a merge may need: all but the last of every cut sequence, and a sequence of c chunks has at most (c -
// 1) / L of them.
inline int64_t most_end_states(const Shape& shape, const Choice& choice) {
  if (choice.rule.segment_chunks == 0 || choice.rule.join) return 0;
  const int64_t chunks = shape.total_tokens / kChunkTokens + shape.num_seqs;
  return chunks / choice.rule.segment_chunks * shape.num_v_heads;
}

}  // namespace qla::plan
