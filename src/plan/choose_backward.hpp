// A device's choice for backward: whether sequences are cut for its state and reverse pass, and how long segments are. From
// shapes alone, as choose.hpp does for forward.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/choose.hpp"

namespace qla::plan {

// Of the bytes that the two passes of a chunk move, what S_ext, M and dS_ext read again.
inline constexpr float kPrePassBytes = 0.6f;

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
    load.add(count, length * costs.state_half + costs.item);
    load.add(count, length * costs.reverse_half + costs.item);
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
    first.add(2 * moved, length * costs.state_half + costs.item);  // S_ext, M
    first.add(moved, length * costs.reverse_half + costs.item);    // dS_ext
    first_chunks += kPrePassBytes * moved * length;
    add(second, second_chunks, count * exact_heads * later, length);
    if (exact_heads > 0) longest_chain = std::max(longest_chain, pieces - 2);
  }
  const float memory = costs.passes / static_cast<float>(costs.num_sms);
  float us = std::max(first.makespan(pairs), first_chunks * memory);
  if (segment_chunks > 0)
    us += std::max(second.makespan(pairs), second_chunks * memory) + static_cast<float>(longest_chain) * costs.merge + costs.cut;
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
      if (!cuts || length < kLeastSegmentChunks || pieces * shape.num_v_heads > 2 * costs.num_sms) break;
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

// Pg (F6) for the reverse pass: made by its own CTAs beside their products, or by a kernel of its own (decision 0076). The
// gradients have the same bits either way.
struct PgChoice {
  int32_t pairs = 0;  // of multiprocessors, for that kernel; 0: there is none
  int32_t made = 0;   // chunks at a walk's beginning that still make theirs: by then the kernel is done
  bool late = false;  // the passes begin beside it
};
// Microseconds: what Pg costs a chunk of the reverse chain; an item (a chunk of one q/k head) of the kernel on one
// multiprocessor, which two warpgroups share, and each of its value heads. A launch is intra_launch.
inline constexpr float kPgBeside = 0.2f, kPgItem = 0.2f, kPgHead = 0.17f;
// .. bytes a microsecond beside the passes, and alone
inline constexpr float kPgRateBeside = 2.0e6f, kPgRateAlone = 3.0e6f;
// of Pg's kernel in a cut call, what cut_passes takes anyway
inline constexpr float kPgBehindCut = 8.0f;
// The pairs that a kernel beside the passes needs, and a pair that is left idle: with fewer, memory bounds the passes soon.
inline constexpr float kLeastPgPairs = 8, kIdlePairs = 1;

// microseconds of the kernel
inline float pg_cost(const DeviceCosts& costs, const Shape& shape, float multiprocessors, float rate) {
  const float group = static_cast<float>(shape.group),
              items = static_cast<float>(shape.total_chunks() * std::max<int64_t>(1, shape.num_v_heads / shape.group));
  return costs.intra_launch + std::max((1.0f + items / multiprocessors) * (kPgItem + kPgHead * group),
                                       items * (32.0f + 6.0f * group) * 1024.0f / rate);
}

inline PgChoice choose_pg(const DeviceCosts& costs, const Shape& shape, const Policy& policy, const Choice& choice) {
  const float sms = static_cast<float>(costs.num_sms), pairs = sms / 2, heads = static_cast<float>(shape.num_v_heads);
  if (shape.total_tokens == 0 || shape.num_v_heads == 0) return {};
  if (choice.rule.segment_chunks == 0) {
    // Chains of reverse items, which all run at once, against the memory's rate.
    const float length = static_cast<float>(ceil_div(shape.total_chunks(), shape.seqs())),
                items = static_cast<float>(shape.seqs()) * heads, idle = pairs - 2 * items - kIdlePairs,
                memory = length * items * costs.passes / sms;
    if (idle < kLeastPgPairs || length * costs.reverse_half < memory) return {};
    const float made = pg_cost(costs, shape, 2 * idle, kPgRateBeside) / costs.reverse_half + 1.0f;
    if ((length - made) * kPgBeside < costs.intra_launch) return {};
    return {static_cast<int32_t>(idle), static_cast<int32_t>(made), true};
  }
  DeviceCosts without = costs;  // Pg beside the products
  without.reverse_half -= kPgBeside;
  const Profiles profiles = profiles_of(shape);
  float gain = 0;
  for (int32_t i = 0; i < profiles.count; ++i)
    gain += profiles.all[i].weight * (estimate_passes(costs, shape, policy, profiles.all[i], choice.rule.segment_chunks) -
                                      estimate_passes(without, shape, policy, profiles.all[i], choice.rule.segment_chunks));
  const float cost = std::max(costs.intra_launch, pg_cost(costs, shape, sms, kPgRateAlone) - kPgBehindCut);
  if (gain < cost) return {};
  return {static_cast<int32_t>(pairs - kIdlePairs), 0, false};  // cut_passes has room beside it
}

}  // namespace qla::plan
