// The queue: longest items first, so that no long one starts last. A counting sort over a few buckets needs no comparison sort on
// the device; within a bucket items stay in the order they are found in: value heads of one query/key head adjacent, which then
// share its tiles in cache.
#pragma once

#include <cstdint>

#include "plan/hd.hpp"

namespace qla::plan {

inline constexpr int32_t kOrderBuckets = 32;

// 0 is first. `longest` bounds walked_chunks (of the call or of the rule: segment + warm-up).
QLA_HD inline int32_t order_bucket(int64_t walked_chunks, int64_t longest) {
  if (walked_chunks >= longest) return 0;
  const int64_t shorter = longest - walked_chunks;
  return static_cast<int32_t>(shorter / ((longest + kOrderBuckets - 1) / kOrderBuckets) < kOrderBuckets - 1
                                  ? shorter / ((longest + kOrderBuckets - 1) / kOrderBuckets)
                                  : kOrderBuckets - 1);
}

}  // namespace qla::plan
