// What qla_device_test_plan plans: boundaries, rule and gates of a call, and what the host says of them.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/kernels/plan_segments/cut.hpp"
#include "plan/beside.hpp"
#include "plan/choose.hpp"
#include "plan/forms.hpp"
#include "plan/ranges.hpp"
#include "qla/qla.h"

namespace qla::test {

using namespace qla::cuda;

struct Tables {
  std::vector<ChunkRecord> chunks;
  std::vector<WorkItem> items, pre_items;
  std::vector<MergeChain> chains;
  std::vector<uint8_t> transitions;
  PlanHeader header, pre_header;
  std::vector<uint8_t> heads;
  std::vector<int32_t> until;
};

struct Problem {
  std::vector<int64_t> cu;  // boundaries as given
  int64_t tokens = 0;
  int heads = 1, v_parts = 1, checkpoint_every = 0;
  bool wide = false;  // int64 boundaries
  bool initial = true;
  std::vector<uint8_t> has_initial;
  qla::plan::CutRule rule;
  std::vector<float> decay;                 // [slot][heads]
  int uncut_parts = 0;                      // a list of its own, in so many parts of V, for when nothing is cut; 0: one list
  bool beside = false;                      // cut_few runs beside what makes the sums of ghat
  bool rehearses = false;                   // .. and makes a cut of made-up ones first
  bool says_heads = false;                  // .. which stays as it is in any case; and a word on each head's boundaries
  int64_t fused_chunks = 0;                 // both forms: a second list for all of V ..
  int64_t parts = 1, part = 0;              // .. and the two kernels' tables in so many ranges, one of which is looked at
  int64_t first_slot = 0, range_slots = 0;  // a range of chunks (plan/ranges.hpp); 0: all
  int64_t all_slots() const { return tokens / 64 + int64_t(cu.size()) - 1; }
  int64_t slots() const {
    if (parts > 1) return qla::plan::part_slots(all_slots(), seqs(), parts);
    return range_slots ? std::min(range_slots, all_slots() - first_slot) : all_slots();
  }
  int64_t seqs() const { return int64_t(cu.size()) - 1; }
};
// What cut_items says of a range: whether anything in it is cut.
inline bool cuts_anything(const Problem& p) {
  for (int64_t n = 0; n < p.seqs(); n++) {
    const int64_t bos = std::clamp<int64_t>(p.cu[n], 0, p.tokens), eos = std::clamp<int64_t>(p.cu[n + 1], bos, p.tokens);
    const int32_t chunks = int32_t((eos - bos + 63) / 64);
    if (p.rule.cuts(qla::plan::run_in_range(bos / 64 + n, chunks, p.first_slot, p.slots()).chunks)) return true;
  }
  return false;
}
// The rule by which a range's sequences are cut, where each counts by itself.
inline qla::plan::CutRule rule_of(const Problem& p) {
  qla::plan::CutRule rule = qla::plan::rule_where_cut(p.rule);
  if (rule.balance == 0 && !cuts_anything(p)) rule.segment_chunks = 0;
  return rule;
}
// bound on merged boundaries
inline int64_t most_states(const Problem& p) {
  qla::plan::Shape shape;
  shape.total_tokens = p.tokens, shape.num_seqs = p.seqs(), shape.num_v_heads = p.heads;
  qla::plan::Choice choice;
  choice.rule = p.rule;
  return qla::plan::most_end_states(shape, choice);
}

// Whether cut_few makes the items, which alone knows of pieces and of segments of their own for heads that merge.
inline bool refines(const Problem& p) {
  return segments::few_cut(p.seqs(), qla::plan::most_units(p.tokens, p.seqs(), p.rule) * p.heads, p.all_slots(), p.heads);
}

// A cut with segments of their own for heads that merge, and pieces, where that is possible.
template <class Pick>
void refine(Problem& p, const Pick& pick) {
  qla::plan::CutRule& rule = p.rule;
  const qla::plan::CutRule before = rule;
  rule.balance = 1;
  if (pick(0, 2)) rule.merged_chunks = pick(std::max<int64_t>(1, rule.segment_chunks / 3), rule.segment_chunks);
  const int64_t most = std::min<int64_t>(6, (rule.merged_chunks ? rule.merged_chunks : rule.segment_chunks) / 2);
  if (most > 0 && pick(0, 2)) rule.pieces = int32_t(pick(1, most)), rule.first_pieces = int32_t(pick(1, most));
  if (!refines(p)) rule = before;
}

// What the host says of the boundaries as the kernel clamps them.
inline int64_t longest_chunks(const Problem& p) {
  int64_t longest = 0;
  for (size_t n = 0; n + 1 < p.cu.size(); n++) {
    const int64_t bos = std::clamp<int64_t>(p.cu[n], 0, p.tokens), eos = std::clamp<int64_t>(p.cu[n + 1], 0, p.tokens);
    longest = std::max(longest, (eos - bos + 63) / 64);
  }
  return longest;
}
inline bool good_boundaries(const Problem& p) {
  return p.cu.front() == 0 && p.cu.back() <= p.tokens && std::is_sorted(p.cu.begin(), p.cu.end());
}
inline bool takes_fused(const Problem& p) { return p.fused_chunks && qla::plan::takes_fused(longest_chunks(p), p.fused_chunks); }

}  // namespace qla::test
