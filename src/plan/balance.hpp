// More items than multiprocessors, but not many more: the last round leaves most of the card idle. McNaughton's rule evens that
// out where an item may be interrupted: lay all items on a tape and cut it into shares, one for each multiprocessor, of at least
// the longest item. An item across a border is in two parts: its first chunks are done early, at the start of the share behind
// the border, the others late, at the end of the share before it; so the two never overlap in time.
#pragma once

#include <cstdint>

#include "plan/hd.hpp"

namespace qla::plan {

inline constexpr int64_t kMostBalancedSeqs = 512;  // one CTA makes the list, a thread a sequence
inline constexpr int32_t kLeastPart = 2;           // chunks; what is handed over for less takes as long

// Chunks of a share, total: of all items.
QLA_HD constexpr int64_t balanced_share(int64_t total, int64_t longest, int64_t shares) {
  const int64_t even = (total + shares - 1) / shares, share = even > longest ? even : longest;
  return share > 1 ? share : 1;
}

struct Parts {
  int32_t early, late;  // chunks; early is 0 in an item that stays whole
  int32_t share;        // that has the late part or the whole item; the early part is in the next one
};
// Of an item that begins `at` chunks from the tape's start.
QLA_HD constexpr Parts parts_of_item(int64_t at, int32_t chunks, int64_t share) {
  const auto first = static_cast<int32_t>(at / share);
  const int64_t late = (static_cast<int64_t>(first) + 1) * share - at, early = chunks - late;
  if (early <= 0) return {0, chunks, first};
  if (late < kLeastPart) return {0, chunks, first + 1};
  if (early < kLeastPart) return {0, chunks, first};
  return {static_cast<int32_t>(early), static_cast<int32_t>(late), first};
}

}  // namespace qla::plan
