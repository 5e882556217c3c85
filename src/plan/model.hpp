// The cost model: predicted microseconds of a call from lengths that are assumed (choose.hpp) or given (qla_gdn_plan).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "plan/costs.hpp"
#include "plan/policy.hpp"

namespace qla::plan {

inline constexpr int64_t kAssumedWarmup = 4;        // chunks, g = logsigmoid(N(0, 1)) / 16
inline constexpr int64_t kAssumedForgetting = 13;   // chunks until a given state, which may be e^30 larger, is forgotten, too
inline constexpr float kAssumedExactShare = 0.25f;  // of the value heads: a trained gate is 0 in about so many

inline int64_t assumed_exact_heads(int64_t heads) {
  return static_cast<int64_t>(static_cast<float>(heads) * kAssumedExactShare + 0.5f);
}

struct Shape {
  int64_t total_tokens = 0, num_seqs = 0, num_v_heads = 1, group = 1;
  bool equal_lengths = true;  // dense: every sequence has total_tokens / num_seqs tokens
  bool may_cut = true;        // false: a state pool is updated in place, or only one segment is possible
  bool backward = false;
  bool keeps = false;  // forward: what backward reuses

  int64_t seqs() const { return std::max<int64_t>(1, num_seqs); }
  int64_t total_chunks() const { return ceil_div(total_tokens, kChunkTokens); }
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
  if constexpr (requires { args.final_state; }) shape.keeps = args.saved.data != nullptr;
  if constexpr (requires { args.state_indices; }) shape.may_cut = args.state_indices.data == nullptr;
  return shape;
}

// How the host supposes that a call's tokens are shared out: up to two kinds of sequences.
struct Profile {
  struct Kind {
    int64_t count, chunks;
  } kinds[2];
  int32_t num_kinds;
  float weight;
};

struct Candidate {
  int64_t segment_chunks;  // 0: no cut
  int32_t splits;          // of V
  bool fused;
  int64_t uncut_chunks = 0;  // sequences of at most so many chunks stay whole
  bool balanced = false;     // fused: by McNaughton's rule (balance.hpp)
  int32_t uncut_splits = 0;  // of V where no sequence is cut, if others than splits
  // refinements of a cut (CutRule)
  int64_t merged_chunks = 0;
  int32_t pieces = 1, first_pieces = 1;
  bool even = true;  // CutRule::balance
  bool refined() const { return merged_chunks > 0 || pieces > 1 || first_pieces > 1; }
};

// Microseconds of a merge more than segments have boundaries, and of a piece's beginning and end.
inline constexpr float kMoreMerges = 1.47f, kPieceEnds = 1.32f;

// Microseconds until the late part of an item goes on where the early one ended.
inline constexpr float kHandOver = 4.0f;

// Microseconds that a call pays whose sequences turn out too short for a cut: 1 to 3 measured. The fused form walks its uncut
// list behind everything that only a cut needs, and pays a share of what a cut costs.
inline constexpr float kAsked = 2.5f, kAskedShareFused = 0.7f;

// Microseconds more with both forms in a call, over the form that is taken: -3 to 2 measured.
inline constexpr float kBothForms = 2.0f;
// .. where something is cut, for the pass over whole sequences that leaves.
inline constexpr float kUncutList = 0.5f;
// .. and for every range of chunks after the first one where the two kernels run: 41 to 48, for two launches and the ends of
// both.
inline constexpr float kRangeLaunches = 45.0f;

// .. that a chunk of the fused form takes where it leaves Abar and the vectors for backward: 0.05 to 0.1 measured.
inline constexpr float kKeptChunk = 0.08f;

// Of an item's beginning and end, what a segment pays, which has no state of the caller's to read or write on both sides.
inline constexpr float kSegmentEnds = 0.283f;

// A direct launch: the fused form with nothing before it, each CTA makes the gate vectors of its items. One round of items:
// sequences have at most kDirectChunks chunks in the mean; several: a multiprocessor has at most kDirectChunksOfRounds.
inline constexpr int64_t kDirectChunks = 40, kDirectChunksOfRounds = 72, kDirectSequences = 32, kDirectRounds = 4;
inline bool direct_launch(int64_t seqs, int64_t heads, int64_t slots, int64_t sms) {
  const int64_t items = seqs * heads;
  if (items <= sms) return slots <= kDirectChunks * seqs;
  return seqs <= kDirectSequences && items <= kDirectRounds * sms && slots * heads <= kDirectChunksOfRounds * sms;
}
// Microseconds that it saves: of one round where no sequence is longer than the mean may be, of several (3 to 4 measured).
inline constexpr float kDirectLaunch = 14.0f, kDirectRoundsLaunch = 3.5f;
inline float saved_by_direct_launch(const DeviceCosts& costs, const Shape& shape, const Candidate& c, int64_t longest_chunks) {
  if (!c.fused || c.balanced || c.segment_chunks > 0 || shape.total_tokens == 0 ||
      !direct_launch(shape.seqs(), shape.num_v_heads, shape.total_tokens / kChunkTokens + shape.seqs(), costs.num_sms))
    return 0.0f;
  if (shape.seqs() * shape.num_v_heads > costs.num_sms) return kDirectRoundsLaunch;
  return longest_chunks <= kDirectChunks ? kDirectLaunch : 0.0f;
}

// Rounds of items between which a long walk begins to heat the card, in the two kernels: 96 halves of 48 heads do, a little.
inline constexpr float kWarmFrom = 0.5f, kWarmTo = 0.9f;

// Index of a call's costs that depend on how many value heads share a query/key head.
inline int group_kind(const Shape& shape) { return shape.group >= 4 ? 0 : shape.group >= 2 ? 1 : 2; }

// Microseconds of one chunk of one item of the main pass, `items` of which run. A long walk on a full card meets its limit of
// power: the clock falls. share: chunks a multiprocessor.
inline float chunk_cost(const DeviceCosts& costs, const Shape& shape, const Candidate& c, float items, float share) {
  const float sms = static_cast<float>(costs.num_sms), rounds = items / sms,
              whole = static_cast<float>(static_cast<int64_t>(rounds));
  const bool card_full = items > sms;
  if (shape.backward) return (c.splits == 2 ? 1.0f : 1.6f) * (costs.reverse_half + (card_full ? costs.pass_state : 0.0f));
  const float limit = c.fused ? 0.1f : 0.19f;
  const float warm =
      c.fused ? static_cast<float>(rounds > 0.75f) : std::clamp((rounds - kWarmFrom) / (kWarmTo - kWarmFrom), 0.0f, 1.0f);
  const float power = 1.0f + limit * warm * std::min(1.0f, share / 128.0f);
  if (c.fused) {
    const float kept = shape.keeps ? kKeptChunk : 0.0f, quiet = costs.fused_quiet + kept;
    if (c.segment_chunks > 0) return costs.fused_cut * power;
    const float full = costs.fused[group_kind(shape)] * power + kept, rest = rounds - whole;
    if (rounds <= 0.75f) return quiet;
    if (c.balanced) return full;
    // a last round that leaves much of the card idle is a quiet one
    return rest > 0.0f && rest <= 0.75f && whole <= 3.0f ? (whole * full + quiet) / (whole + 1.0f) : full;
  }
  const float busy = std::min(1.0f, rounds);
  if (c.splits == 2) return (costs.main_half_quiet + busy * (costs.main_half - costs.main_half_quiet)) * power;
  return (costs.main_full_quiet + busy * (costs.main_full - costs.main_full_quiet)) * power;
}

// All that is no walk along the sequences. merging: share of the value heads that never forget.
inline float parallel_cost(const DeviceCosts& costs, const Shape& shape, const Candidate& c, float chunks, bool cut,
                           float merging = kAssumedExactShare) {
  const float share = chunks * static_cast<float>(shape.num_v_heads) / static_cast<float>(costs.num_sms);
  float us = costs.launches + (shape.num_seqs > 1 ? costs.packed : 0.0f) +
             (c.segment_chunks == 0 ? 0.0f
              : cut                 ? (c.fused ? costs.cut_fused : costs.cut)
              : c.fused             ? kAskedShareFused * costs.cut_fused
                                    : kAsked);
  if (c.fused && cut)
    us += share * costs.intra[group_kind(shape)] * merging;
  else if (c.fused)
    us -= costs.intra_launch;
  else
    us += share * costs.intra[group_kind(shape)];
  if (shape.backward) us += costs.intra_launch + share * costs.grads;
  return us;
}

// Equal items of a queue, and multiprocessors that are free at the same time.
struct EqualItems {
  float count, each;
};
struct FreeGroup {
  float free_at, count;
};

// Items by kinds, the longest first, each to the multiprocessor that is free first: a few steps a kind and round.
// groups: room for one more than kinds.
inline float makespan(const EqualItems* kinds, int32_t num_kinds, float sms, FreeGroup* groups) {
  constexpr float kMostRounds = 12;  // then the queue evens them out
  float items = 0, total = 0;
  for (int32_t i = 0; i < num_kinds; ++i) items += kinds[i].count, total += kinds[i].count * kinds[i].each;
  if (num_kinds == 0 || items <= sms) return num_kinds == 0 ? 0.0f : kinds[0].each;
  if (items > kMostRounds * sms) return std::max(kinds[0].each, total / sms + 0.3f * kinds[0].each);
  groups[0] = {0, sms};
  int32_t num_groups = 1;  // sorted; a kind splits one group at most
  for (int32_t kind = 0; kind < num_kinds; ++kind)
    for (float left = kinds[kind].count; left > 0;) {
      const float taken = std::min(left, groups[0].count), free_at = groups[0].free_at + kinds[kind].each;
      left -= taken;
      if (taken < groups[0].count)
        groups[0].count -= taken;
      else
        std::copy(groups + 1, groups + num_groups--, groups);
      int32_t at = num_groups;
      while (at > 0 && groups[at - 1].free_at > free_at) --at;
      if (at > 0 && groups[at - 1].free_at == free_at) {
        groups[at - 1].count += taken;
      } else {
        std::copy_backward(groups + at, groups + num_groups, groups + num_groups + 1);
        groups[at] = {free_at, taken}, ++num_groups;
      }
    }
  return groups[num_groups - 1].free_at;
}

// The few kinds of an estimate.
class Queue {
 public:
  void add(float count, float each) {
    if (count <= 0) return;
    for (int32_t i = 0; i < num_kinds_; ++i)
      if (kinds_[i].each == each) {
        kinds_[i].count += count;
        return;
      }
    if (num_kinds_ == kMostKinds) return;
    int32_t at = num_kinds_++;
    for (; at > 0 && kinds_[at - 1].each < each; --at) kinds_[at] = kinds_[at - 1];
    kinds_[at] = {count, each};
  }
  float makespan(float sms) const {
    FreeGroup groups[kMostKinds + 1];
    return plan::makespan(kinds_, num_kinds_, sms, groups);
  }

 private:
  static constexpr int32_t kMostKinds = 16;
  EqualItems kinds_[kMostKinds] = {};
  int32_t num_kinds_ = 0;
};

// Merges run beside the main pass, on 4 multiprocessors a chain: where the others take all items that wait for no merge, only
// merged segments wait, and these have no warm-up to walk. Nor have first segments, which may therefore begin late.
inline bool hides_merges(const DeviceCosts& costs, const Shape& shape, float splits, float chains, float free_items) {
  constexpr float kMergeSms = 4;
  return free_items - splits * static_cast<float>(shape.seqs() * shape.num_v_heads) <=
         static_cast<float>(costs.num_sms) - kMergeSms * chains;
}

inline float estimate(const DeviceCosts& costs, const Shape& shape, const Policy& policy, const Profile& profile, Candidate c) {
  if (c.uncut_splits > 0) {
    const bool whole = profile.kinds[0].chunks <= std::max(c.segment_chunks, c.uncut_chunks);  // the longest come first
    c.splits = whole ? c.uncut_splits : c.splits;
    c.uncut_splits = 0;
    return (whole ? 0.0f : kUncutList) + estimate(costs, shape, policy, profile, c);
  }
  const float sms = static_cast<float>(costs.num_sms), heads = static_cast<float>(shape.num_v_heads);
  const float splits = static_cast<float>(c.splits);
  const bool exact_only = policy.exact();
  const float exact_heads = exact_only ? heads : static_cast<float>(assumed_exact_heads(shape.num_v_heads));
  float items = 0, chunks = 0;
  // the longest come first: where they are cut, and segments need not be even, so are all that are longer than a segment
  const int64_t uncut = c.even || profile.kinds[0].chunks <= c.uncut_chunks ? c.uncut_chunks : 0;
  const auto pieces_of = [&](int64_t of) {
    return c.segment_chunks > 0 && of > uncut ? std::max<int64_t>(1, ceil_div(of, c.segment_chunks)) : 1;
  };
  const auto merging_pieces_of = [&](int64_t of) {
    const int64_t pieces = pieces_of(of);
    return pieces > 1 && c.merged_chunks > 0 ? ceil_div(of, c.merged_chunks) : pieces;
  };
  for (int32_t i = 0; i < profile.num_kinds; ++i) {
    const Profile::Kind& kind = profile.kinds[i];
    items += (static_cast<float>(kind.count * pieces_of(kind.chunks)) * (heads - exact_heads) +
              static_cast<float>(kind.count * merging_pieces_of(kind.chunks)) * exact_heads) *
             splits;
    chunks += static_cast<float>(kind.count * kind.chunks);
  }
  const float share = chunks * heads / sms;
  Queue main, pre;  // in microseconds
  float chains = 0, merged = 0, merges = 0;
  bool cut = false;
  for (int32_t i = 0; i < profile.num_kinds; ++i) {
    const int64_t pieces = merging_pieces_of(profile.kinds[i].chunks);
    if (pieces > 1) chains += static_cast<float>(profile.kinds[i].count) * exact_heads;
    merged += static_cast<float>(profile.kinds[i].count * (pieces - 1)) * exact_heads * splits;
  }
  const bool hidden = hides_merges(costs, shape, splits, chains, items - merged);
  for (int32_t i = 0; i < profile.num_kinds; ++i) {
    const Profile::Kind& kind = profile.kinds[i];
    const int64_t pieces = pieces_of(kind.chunks);
    cut |= pieces > 1;
    const float count = static_cast<float>(kind.count);
    // of one long sequence and short ones, the long one's items run on when the others have ended
    const bool outlives = c.fused && !c.balanced && c.segment_chunks == 0 && i == 0 && profile.num_kinds == 2;
    const float per_chunk = chunk_cost(costs, shape, c, outlives ? count * heads : items, share);
    const float ends = pieces == 1 ? costs.item : kSegmentEnds * costs.item;
    if (pieces == 1) {
      main.add(count * heads * splits, static_cast<float>(kind.chunks) * per_chunk + ends);
      continue;
    }
    const int64_t merging_pieces = merging_pieces_of(kind.chunks);
    const float later = static_cast<float>(pieces - 1), merging = static_cast<float>(merging_pieces - 1),
                of_segments = static_cast<float>(c.pieces), of_first = static_cast<float>(c.first_pieces),
                steps = of_first + of_segments * (merging - 1.0f);
    const float chain = later * costs.merge + std::max(0.0f, steps - later) * kMoreMerges, delay = hidden ? chain : 0.0f;
    // segments with the same number of chunks, but for the last one's rest where they are not even
    const auto chunks_each = [&](int64_t segments, int64_t most) { return c.even ? ceil_div(kind.chunks, segments) : most; };
    const auto in_last = [&](int64_t segments, int64_t each) {
      return static_cast<float>(c.even ? each : kind.chunks - (segments - 1) * each);
    };
    const int64_t each = chunks_each(pieces, c.segment_chunks),
                  merging_each = chunks_each(merging_pieces, c.merged_chunks > 0 ? c.merged_chunks : c.segment_chunks);
    const float length = static_cast<float>(each), merging_length = static_cast<float>(merging_each),
                warmup = static_cast<float>(kAssumedWarmup), exact = count * exact_heads * splits,
                forgetting = count * (heads - exact_heads) * splits;
    main.add(exact, merging_length * per_chunk + ends);
    main.add(exact * (merging - 1.0f), merging_length * per_chunk + ends + delay);
    main.add(exact, in_last(merging_pieces, merging_each) * per_chunk + ends + delay);
    main.add(forgetting, length * per_chunk + ends);
    main.add(forgetting * (later - 1.0f), (length + warmup) * per_chunk + ends);
    main.add(forgetting, (in_last(pieces, each) + warmup) * per_chunk + ends);
    // S_ext of all segments but the last, M of all but the first and the last; always in halves of V.
    const auto piece_us = [&](float walked, float of) {
      return walked / of * costs.state_half + (of > 1.0f ? kPieceEnds : 0.0f);
    };
    pre.add(count * exact_heads * 2.0f * (2.0f * of_first - 1.0f), piece_us(merging_length, of_first));
    pre.add(count * exact_heads * 4.0f * of_segments * (merging - 1.0f), piece_us(merging_length, of_segments));
    // The other heads' boundaries near the sequence's start are merged, too: the given state is still felt there.
    const auto early = static_cast<float>(std::min<int64_t>(pieces - 1, (kAssumedForgetting - 1) / c.segment_chunks));
    if (early > 0) pre.add(count * (heads - exact_heads) * 2.0f * (2.0f * early - 1.0f), length * costs.state_half);
    if (exact_heads > 0) merges = std::max(merges, chain);
  }
  if (c.balanced) {
    float longest = 0;
    for (int32_t i = 0; i < profile.num_kinds; ++i) longest = std::max(longest, static_cast<float>(profile.kinds[i].chunks));
    const float rounds = items / sms;
    return parallel_cost(costs, shape, c, chunks, cut, exact_heads / heads) +
           std::max(longest, share + 0.5f) * chunk_cost(costs, shape, c, items, share) + costs.item * rounds + kHandOver;
  }
  const float us = parallel_cost(costs, shape, c, chunks, cut, exact_heads / heads) + main.makespan(sms) + pre.makespan(sms) -
                   saved_by_direct_launch(costs, shape, c, profile.kinds[0].chunks) +
                   (cut ? costs.cut_item * items / splits : 0.0f) + (hidden ? 0.0f : merges);
  return us;
}

}  // namespace qla::plan
