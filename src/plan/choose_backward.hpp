// A device's choice for backward: whether sequences are cut for its state and reverse pass, and how long segments are. From
// shapes alone, as choose.hpp does for forward.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/choose.hpp"

namespace qla::plan {

// Of the bytes that the two passes of a chunk move, what S_ext, M and dS_ext read again.
inline constexpr float kPrePassBytes = 0.6f;

inline constexpr int64_t kLeastPassChunks = 4;

// A cut that promises less than this share of the uncut time is within the model's error of a loss.
inline constexpr float kWorthACut = 0.97f;

// Items over a device's multiprocessors, longest first: equal ones take whole rounds while these are few, else the queue evens
// them out.
struct Load {
  float items = 0, total = 0, longest = 0;

  void add(float count, float each) {
    items += count, total += count * each;
    longest = std::max(longest, count > 0 ? each : 0.0f);
  }
  float makespan(float sms) const {
    if (items <= sms) return longest;
    const bool equal = total > 0.999f * items * longest;
    const float rounds = items / sms;
    if (equal && rounds <= 3.0f) return static_cast<float>(static_cast<int64_t>(rounds + 0.9999f)) * longest;
    return std::max(longest, total / sms + 0.3f * longest);
  }
};

// Microseconds of the two passes, whole launches (decision 0073). A pair of multiprocessors takes one item, half of V each.
inline float estimate_passes(const DeviceCosts& costs, const Shape& shape, const Policy& policy, const Profile& profile,
                             int64_t segment_chunks) {
  const float pairs = static_cast<float>(costs.num_sms) / 2, heads = static_cast<float>(shape.num_v_heads);
  const float exact_heads = policy.exact() ? heads : static_cast<float>(static_cast<int64_t>(heads * kAssumedExactShare + 0.5f));
  Load first, second;  // launches
  float first_chunks = 0, second_chunks = 0;
  int64_t longest_chain = 0;
  const auto add = [&](Load& load, float& chunks, float count, float length) {  // of both passes
    load.add(count, length * costs.pass_state + costs.pass_item);
    load.add(count, length * costs.reverse_half + costs.pass_item);
    chunks += count * length;
  };
  for (int32_t i = 0; i < profile.num_kinds; ++i) {
    const Profile::Kind& kind = profile.kinds[i];
    const int64_t pieces = segment_chunks > 0 ? std::max<int64_t>(1, ceil_div(kind.chunks, segment_chunks)) : 1;
    const float count = static_cast<float>(kind.count), length = static_cast<float>(ceil_div(kind.chunks, pieces));
    add(first, first_chunks, count * heads, length);  // each walk's own first segment
    if (pieces == 1) continue;
    const float later = static_cast<float>(pieces - 1), moved = count * exact_heads * (later - 1);
    add(first, first_chunks, count * (heads - exact_heads) * later, length + static_cast<float>(kAssumedWarmup));
    first.add(2 * moved, length * costs.pass_state + costs.pass_item);  // S_ext, M
    first.add(moved, length * costs.reverse_half + costs.pass_item);    // dS_ext
    first_chunks += kPrePassBytes * moved * length;
    add(second, second_chunks, count * exact_heads * later, length);
    if (exact_heads > 0) longest_chain = std::max(longest_chain, pieces - 2);
  }
  const float memory = costs.passes / static_cast<float>(costs.num_sms);
  float us = std::max(first.makespan(pairs), first_chunks * memory);
  if (segment_chunks > 0)
    us += std::max(second.makespan(pairs), second_chunks * memory) + static_cast<float>(longest_chain) * costs.pass_merge +
          costs.pass_cut;
  return us;
}

inline Choice choose_backward(const DeviceCosts& costs, const Shape& shape, const Policy& policy) {
  const Profiles profiles = profiles_of(shape);
  const int64_t total = shape.total_chunks();
  int64_t longest = 0;
  for (int32_t i = 0; i < profiles.count; ++i) longest = std::max(longest, profiles.all[i].kinds[0].chunks);
  int64_t best = 0;
  float best_us = 0;
  const auto consider = [&](int64_t segment_chunks) {
    float us = 0;
    for (int32_t i = 0; i < profiles.count; ++i)
      us += profiles.all[i].weight * estimate_passes(costs, shape, policy, profiles.all[i], segment_chunks);
    if (best_us == 0 || us < (best == 0 ? kWorthACut : 1.0f) * best_us) best = segment_chunks, best_us = us;
  };
  // A batch-invariant backward is not cut: whether it may be would depend on the workspace, so on what the call holds beside it.
  const bool cuts = shape.may_cut && policy.mode != QLA_CP_OFF && !policy.batch_invariant;
  const bool given = policy.mode == QLA_CP_FIXED || policy.mode == QLA_CP_PLAN;
  if (cuts && given) {
    consider(policy.fixed_chunks);
  } else {
    consider(0);
    for (const int64_t pieces : {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128}) {
      const int64_t length = ceil_div(total, pieces);
      if (!cuts || length < kLeastPassChunks || pieces * shape.num_v_heads > 2 * costs.num_sms) break;
      if (length < longest) consider(length);
    }
  }
  Choice choice;
  choice.value_splits = 2;
  choice.predicted_us = best_us + parallel_cost(costs, shape, {0, 2, false}, static_cast<float>(total), false);
  choice.rule = rule_for(policy, best);
  if (policy.mode == QLA_CP_PLAN) choice.rule.uncut_chunks = policy.uncut_chunks;
  choice.rule.max_warmup_chunks = std::max<int64_t>(kAssumedWarmup, best / 2);
  choice.reason = policy.mode == QLA_CP_OFF                              ? Reason::Off
                  : cuts && policy.mode == QLA_CP_FIXED                  ? Reason::Fixed
                  : cuts && policy.mode == QLA_CP_PLAN                   ? Reason::Repeated
                  : best > 0                                             ? Reason::Segments
                  : shape.seqs() * shape.num_v_heads * 4 > costs.num_sms ? Reason::CardFull
                                                                         : Reason::NothingToCut;
  return choice;
}

}  // namespace qla::plan
