// What the caller asked of context parallelism, read off the arguments once; the choice made from it is in choose.hpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "plan/segments.hpp"
#include "qla/qla.h"

namespace qla::plan {

struct Policy {
  int32_t mode = QLA_CP_AUTO;
  int64_t fixed_chunks = 0;  // QLA_CP_FIXED, QLA_CP_PLAN
  int64_t uncut_chunks = 0;  // QLA_CP_PLAN
  float threshold = -10.0f;  // resolved: never NaN
  bool batch_invariant = false;

  bool exact() const {  // every cut is merged
    return mode == QLA_CP_EXACT || threshold == -std::numeric_limits<float>::infinity();
  }
};

inline float default_threshold(int32_t dtype) { return dtype == QLA_FLOAT64 ? -37.0f : dtype == QLA_FLOAT32 ? -18.0f : -10.0f; }

template <typename Args>  // qla_gdn_forward_args or qla_gdn_backward_args
Policy make_policy(const Args& args, int32_t dtype) {
  Policy policy;
  policy.mode = args.cp_mode;
  policy.fixed_chunks = args.cp_segment_chunks;
  policy.uncut_chunks = args.cp_uncut_chunks;
  policy.threshold =
      std::isnan(args.cp_warmup_threshold) ? default_threshold(dtype) : static_cast<float>(args.cp_warmup_threshold);
  policy.batch_invariant = (args.flags & QLA_FLAG_BATCH_INVARIANT) != 0;
  return policy;
}

// Everything of a CutRule but the segment length, which choose.hpp finds.
inline CutRule rule_for(const Policy& policy, int64_t segment_chunks) {
  CutRule rule;
  rule.segment_chunks = policy.mode == QLA_CP_OFF ? 0 : segment_chunks;
  rule.threshold = policy.threshold;
  rule.exact = policy.exact();
  rule.balance = policy.mode != QLA_CP_FIXED;
  // An exact segment is walked twice more (S_ext and M, no output): two of its own lengths of warm-up cost the same.
  rule.max_warmup_chunks = 2 * segment_chunks;
  return rule;
}

}  // namespace qla::plan
