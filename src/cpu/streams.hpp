// The streams of a call: one segment of one sequence for one q/k head and its value heads, with where each value head's walk
// starts.
#pragma once

#include <cstdint>
#include <vector>

#include "qla/qla.h"

namespace qla::cpu {

// Where a value head's walk towards a segment begins and from what state.
struct HeadStart {
  int64_t warmup_tokens = 0;          // walked before (reverse: behind) the segment, outputs off
  int32_t start = QLA_START_INITIAL;  // INITIAL also where no state was given: then it is zero
  int64_t merged = -1;                // QLA_START_MERGED: slot of the merged state
};

struct Stream {
  int64_t sequence = 0, k_head = 0;
  int64_t begin = 0, end = 0;  // tokens of the sequence; begin is a multiple of 64
  bool first = true, last = true;
  int64_t starts = -1;  // index of its value heads' HeadStart in the plan; -1: all start at the sequence's start (end)
};

struct StreamPlan {
  int64_t num_uncut = 0;                           // where nothing is cut: streams, made on the fly, one a sequence and q/k head
  std::vector<Stream> cut;                         // else all streams
  std::vector<HeadStart> starts;                   // forward walk
  std::vector<HeadStart> reverse;                  // backward's reverse walk, same indices
  int64_t merged_forward = 0, merged_reverse = 0;  // states to be merged

  int64_t size() const { return cut.empty() ? num_uncut : static_cast<int64_t>(cut.size()); }
};

}  // namespace qla::cpu
