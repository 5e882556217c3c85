// Where a sequence is cut and where each segment's start state comes from: (C1)-(C5), one (sequence, value head) at a time.
// The CPU backend, the planning kernel and qla_gdn_plan all walk for_each_segment(), so that they cannot differ.
//
// decay(c) is the sum of ghat (C4) over chunk c of the sequence, in fp32:  ghat_t = raw_t + log max(1, beta_t |k_t|^2 - 1), raw_t
// floored (F0). A NaN anywhere in it (a caller stores NaN for a chunk whose inputs are not finite) forbids every warm-up behind
// it, so that NaN and inf reach all later tokens as in the recurrence; a caller that can see a non-finite initial state stores
// NaN for chunk 0.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plan/hd.hpp"
#include "qla/qla.h"

namespace qla::plan {

inline constexpr int64_t kChunkTokens = 64;
inline constexpr float kInitialMargin = 30.0f;  // a given state may be e^30 larger than what tokens write

QLA_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
QLA_HD constexpr int64_t chunks_of(int64_t tokens) { return ceil_div(tokens, kChunkTokens); }

// The cut of a whole call: plain data, passed to kernels by value. Made by plan/choose.hpp.
struct CutRule {
  int64_t segment_chunks = 0;     // most chunks a segment; 0: no cut
  int64_t uncut_chunks = 0;       // a sequence of at most so many stays whole, though longer than a segment
  int64_t max_warmup_chunks = 0;  // where more would be needed, the head counts as one that does not forget
  float threshold = -10.0f;       // (C5)
  int32_t exact = 0;              // 1: every cut is merged, the warm-up is never used
  int32_t join = 0;               // 1: a boundary that would need a merge is not cut at all
  int32_t balance = 1;            // 1: a sequence's segments are made about equally long; 0: all but the last have segment_chunks
  // A head whose last boundary is merged is cut into shorter segments, of at most so many chunks: it is walked three times, and
  // needs no warm-up. 0: like the others.
  int64_t merged_chunks = 0;
  // The pre-pass walks a segment in so many pieces, the sequence's first one (which has no transition before its second piece) in
  // first_pieces. Each is a merge more. Of segments with at least so many chunks.
  int32_t pieces = 1, first_pieces = 1;

  // chunks of the longest sequence that stays whole
  QLA_HD int64_t longest_whole() const {
    return segment_chunks <= 0 ? INT64_MAX : segment_chunks > uncut_chunks ? segment_chunks : uncut_chunks;
  }
  QLA_HD bool cuts(int64_t chunks) const { return chunks > longest_whole(); }
};

// Boundaries of one sequence: segment j owns chunks [j * segment_chunks, min((j + 1) * segment_chunks, chunks)).
// Int: int64_t, or int32_t in kernels, which have no chunks beyond it and pay for 64 bits.
template <typename Int>
struct BasicCut {
  Int chunks = 0, segment_chunks = 1, num_segments = 1;  // a sequence without chunks is one segment of none

  QLA_HD Int begin(Int segment) const { return segment < num_segments ? segment * segment_chunks : chunks; }
};
using Cut = BasicCut<int64_t>;

// merging: of a head that rule.merged_chunks holds for
template <typename Int>
QLA_HD BasicCut<Int> make_basic_cut(Int chunks, const CutRule& rule, bool merging = false) {
  BasicCut<Int> cut;
  cut.chunks = chunks;
  cut.segment_chunks = chunks > 0 ? chunks : 1;
  if (rule.cuts(chunks)) {
    // fewer than chunks
    const Int most = static_cast<Int>(merging && rule.merged_chunks > 0 ? rule.merged_chunks : rule.segment_chunks);
    using Unsigned = std::make_unsigned_t<Int>;
    const auto pieces_of = [&](Int length) {
      return static_cast<Int>((static_cast<Unsigned>(chunks) + static_cast<Unsigned>(length) - 1) /
                              static_cast<Unsigned>(length));
    };
    cut.segment_chunks = rule.balance ? pieces_of(pieces_of(most)) : most;
    cut.num_segments = pieces_of(cut.segment_chunks);
  }
  return cut;
}
QLA_HD inline Cut make_cut(int64_t chunks, const CutRule& rule) { return make_basic_cut<int64_t>(chunks, rule); }

struct Segment {
  int64_t first_chunk = 0, num_chunks = 0;  // owned: outputs are written for these
  int64_t warmup_chunks = 0;       // forward: walked just before first_chunk; reverse: just behind the last one; output off
  int64_t index = 0;               // in its sequence, in token order
  int32_t start = QLA_START_ZERO;  // of the walk (reverse: QLA_START_INITIAL is d_final_state)
  int32_t is_end = 0;              // the walk ends at the sequence's end (reverse: start): writes final_state (d_initial_state)
  int32_t needs_end_state =
      0;  // the next segment in walking order is merged: a pre-pass must walk this one to its end state (C1)
  int32_t needs_transition = 0;  // .. and, as its own start is merged too, for its transition M (C2)

  QLA_HD int64_t walked_chunks() const { return num_chunks + warmup_chunks; }
};

template <typename Int>
struct BasicStart {
  int32_t start;
  Int warmup_chunks;
};
using Start = BasicStart<int64_t>;

inline constexpr int kLoadsAhead = 8;  // under way at once, for the device

// value(0) + value(1) + ..., in this order
template <typename Int, typename Value>
QLA_HD float sum_in_order(Int count, Value value) {
  float sum = 0.0f;
  Int first = 0;
  QLA_ONE_LOOP
  for (; count - first >= kLoadsAhead; first += kLoadsAhead) {
    float next[kLoadsAhead];
    for (int i = 0; i < kLoadsAhead; ++i) next[i] = value(first + i);
    for (int i = 0; i < kLoadsAhead; ++i) sum += next[i];
  }
  QLA_ONE_LOOP
  for (; first < count; ++first) sum += value(first);
  return sum;
}

// (C4), (C5) at one boundary: `before` chunks lie before it in walking order, decay_back(n) is ghat of the n-th one back (1 = the
// nearest), total is the sum over all of them, has_initial whether a state was given at the walk's start.
template <typename Int, typename DecayBack>
QLA_HD BasicStart<Int> start_at(Int before, float total, bool has_initial, const CutRule& rule, DecayBack decay_back) {
  const bool finite = total - total == 0.0f;  // NaN and inf are not
  if (!rule.exact && finite) {
    const bool initial_forgotten = !has_initial || total <= rule.threshold - kInitialMargin;
    const Int most = before < rule.max_warmup_chunks ? before : static_cast<Int>(rule.max_warmup_chunks);
    const BasicStart<Int> from_start{has_initial ? QLA_START_INITIAL : QLA_START_ZERO, before};  // right whatever the gate
    if (!initial_forgotten) return before <= most ? from_start : BasicStart<Int>{QLA_START_MERGED, 0};
    float sum = 0.0f;
    QLA_ONE_LOOP
    for (Int first = 1; first <= most; first += kLoadsAhead) {
      float next[kLoadsAhead];
      for (int i = 0; i < kLoadsAhead; ++i) next[i] = first + i <= most ? decay_back(first + i) : 0.0f;
      for (int i = 0; i < kLoadsAhead && first + i <= most; ++i) {
        if (first + i == before) return from_start;
        sum += next[i];
        if (sum <= rule.threshold) return {QLA_START_WARMUP, first + i};
      }
    }
  }
  return {QLA_START_MERGED, 0};
}

// Sum of ghat over one segment of the cut. Sums of several segments are sums of these, in every backend.
template <typename Int, typename Decay>
QLA_HD float segment_decay(const BasicCut<Int>& cut, Int segment, Decay decay) {
  const Int begin = cut.begin(segment);
  return sum_in_order(cut.begin(segment + 1) - begin, [&](Int c) { return decay(begin + c); });
}

// The cut of one head of a sequence, in token order.
template <typename Decay>
QLA_HD Cut make_head_cut(int64_t chunks, const CutRule& rule, bool has_initial, Decay decay) {
  const Cut cut = make_cut(chunks, rule);
  if (rule.merged_chunks == 0 || cut.num_segments == 1) return cut;
  float total = 0.0f;
  for (int64_t segment = 0; segment + 1 < cut.num_segments; ++segment) total += segment_decay(cut, segment, decay);
  const int64_t last = cut.begin(cut.num_segments - 1);
  const Start start = start_at(last, total, has_initial, rule, [&](int64_t n) { return decay(last - n); });
  return start.start == QLA_START_MERGED ? make_basic_cut<int64_t>(chunks, rule, true) : cut;
}

// Pieces of a segment in the pre-pass, and where one begins, in chunks of the segment's own.
template <typename Int>
QLA_HD Int pieces_of_segment(const CutRule& rule, Int segment) {
  return segment == 0 ? rule.first_pieces : rule.pieces;
}
template <typename Int>
QLA_HD Int begin_of_piece(Int chunks, Int pieces, Int piece) {
  using Unsigned = std::make_unsigned_t<Int>;  // chunks times pieces below 2^31
  return static_cast<Int>(static_cast<Unsigned>(chunks * piece) / static_cast<Unsigned>(pieces));
}

// Calls emit(const Segment&) in walking order: token order, or from the last segment down with reverse (the reverse pass, (C3)).
// has_initial: an initial_state is used for this sequence; reverse: a d_final_state is given.
template <typename Decay, typename Emit>
QLA_HD void for_each_segment(const Cut& cut, const CutRule& rule, bool has_initial, bool reverse, Decay decay, Emit emit) {
  Segment pending;
  float total = 0.0f;
  for (int64_t walked = 0; walked < cut.num_segments; ++walked) {
    const int64_t index = reverse ? cut.num_segments - 1 - walked : walked;
    Segment next;
    next.index = index;
    next.first_chunk = cut.begin(index);
    next.num_chunks = cut.begin(index + 1) - next.first_chunk;
    next.start = has_initial ? QLA_START_INITIAL : QLA_START_ZERO;
    if (walked > 0) {
      const int64_t boundary = reverse ? cut.begin(index + 1) : next.first_chunk;
      const int64_t before = reverse ? cut.chunks - boundary : boundary;
      const Start start =
          start_at(before, total, has_initial, rule, [&](int64_t n) { return decay(reverse ? boundary + n - 1 : boundary - n); });
      if (rule.join && start.start == QLA_START_MERGED) {
        next.start = pending.start;
        next.warmup_chunks = pending.warmup_chunks;
        next.num_chunks += pending.num_chunks;
        if (!reverse) next.first_chunk = pending.first_chunk, next.index = pending.index;
      } else {
        next.start = start.start;
        next.warmup_chunks = start.warmup_chunks;
        pending.needs_end_state = next.start == QLA_START_MERGED;
        pending.needs_transition = pending.needs_end_state && pending.start == QLA_START_MERGED;
        emit(static_cast<const Segment&>(pending));
      }
    }
    // The last segment's sum is never looked at.
    if (walked + 1 < cut.num_segments) total += segment_decay(cut, index, decay);
    pending = next;
  }
  pending.is_end = 1;
  emit(static_cast<const Segment&>(pending));
}

// Most segments a value head can have, from shapes alone: chunks <= tokens / 64 + sequences over all sequences.
QLA_HD constexpr int64_t most_segments(int64_t total_tokens, int64_t num_seqs, const CutRule& rule) {
  const int64_t chunks = total_tokens / kChunkTokens + num_seqs;
  // A cut sequence of c > L chunks has at most ceil(c / L) < c / L + 1 segments, so all together at most chunks / L + sequences.
  const int64_t least = rule.merged_chunks > 0 ? rule.merged_chunks : rule.segment_chunks;
  return num_seqs + (least > 0 ? chunks / least : 0);
}

// .. and units that a planner looks at: both cuts of every head.
QLA_HD constexpr int64_t most_units(int64_t total_tokens, int64_t num_seqs, const CutRule& rule) {
  CutRule plain = rule;
  plain.merged_chunks = 0;
  const int64_t segments = most_segments(total_tokens, num_seqs, plain);
  return rule.merged_chunks > 0 ? segments + most_segments(total_tokens, num_seqs, rule) : segments;
}

}  // namespace qla::plan
