// The CPU's choice: a function of shapes and policy alone, never of the number of threads, so that results do not depend on it
// either.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "plan/policy.hpp"

namespace qla::plan {

inline constexpr int64_t kCpuPieces = 16;            // independent pieces of work at which no more cuts pay
inline constexpr int64_t kCpuLeastSegment = 64;      // chunks: shorter ones spend too much on their warm-up
inline constexpr int64_t kCpuInvariantSegment = 64;  // batch-invariant: one length for every sequence
inline constexpr int64_t kCpuSliceColumns = 32;      // of V: what one core takes of a head where heads are few
inline constexpr int64_t kCpuWarmupShare = 32;       // of a segment: its warm-up is work that the uncut run does not have

// max_chunks: upper bound on the chunks of the longest sequence, from shapes (varlen: of T).
// Value slices come before cuts: they cost nothing extra but the shared intra-chunk stage. `slices` is what the backend cuts V
// into.
inline CutRule choose_cpu(const Policy& policy, int64_t num_seqs, int64_t num_v_heads, int64_t slices, int64_t total_chunks) {
  int64_t segment = 0;
  switch (policy.mode) {
    case QLA_CP_OFF:
      break;
    case QLA_CP_FIXED:
    case QLA_CP_PLAN:
      segment = policy.fixed_chunks;
      break;
    default:
      if (policy.batch_invariant) {
        segment = kCpuInvariantSegment;
      } else {
        const int64_t pieces = std::max<int64_t>(1, num_v_heads * std::max<int64_t>(1, slices));  // of one sequence
        const int64_t wanted = total_chunks * pieces / kCpuPieces;  // chunks a piece when all pieces are equal
        segment = num_seqs * pieces >= kCpuPieces ? 0 : std::max(kCpuLeastSegment, wanted);
      }
  }
  CutRule rule = rule_for(policy, segment);
  const bool by_itself = policy.mode == QLA_CP_AUTO || policy.mode == QLA_CP_PLAN;  // a repeated plan was
  if (by_itself) rule.max_warmup_chunks = segment / kCpuWarmupShare;
  // Few cores: a merge's two extra walks cost more than the cut gains, value slices and heads fill the cores. Exact and fixed
  // plans merge.
  rule.join = by_itself && !rule.exact;
  if (policy.mode == QLA_CP_PLAN) rule.uncut_chunks = policy.uncut_chunks;
  return rule;
}

inline CutRule choose_cpu(const Policy& policy, const Problem& problem) {
  return choose_cpu(policy, problem.num_seqs, problem.num_v_heads, ceil_div(problem.v_dim, kCpuSliceColumns),
                    ceil_div(problem.total_tokens(), kChunkTokens));
}

inline const char* cpu_reason_text(const Policy& policy, const CutRule& rule) {
  if (policy.mode == QLA_CP_OFF) return "cuts are off";
  if (policy.mode == QLA_CP_FIXED) return "segments of the given length";
  if (policy.mode == QLA_CP_PLAN) return "as the given plan";
  if (policy.batch_invariant) return "batch-invariant: one segment length for every call";
  if (rule.segment_chunks == 0) return "sequences and heads are work enough: no cut";
  return rule.join ? "few heads: long sequences are cut into segments where their gates forget"
                   : "few heads: long sequences are cut into segments";
}

}  // namespace qla::plan
