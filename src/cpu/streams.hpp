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

// The walk of one segment of one value head to its end state before anything else runs: (C1)-(C3).
struct Prepass {
  int64_t sequence = 0, v_head = 0;
  int64_t begin = 0, end = 0;
  HeadStart forward, reverse;
  int64_t state_slot = -1;    // merged slot that takes the end state: S_ext, or the true one where the start is known
  int64_t reverse_slot = -1;  // the same of the reverse walk
  int64_t transition_slot = -1;
};

// (C1), (C3): merged[to] = M merged[from] + merged[to], or with M^T
struct Merge {
  int64_t from, to, transition;
  bool reverse;
};

// All streams of some sequences and heads. Without cuts: num_uncut streams, made on the fly, one a sequence and q/k head.
struct StreamPlan {
  int64_t num_uncut = 0;
  std::vector<Stream> cut;
  std::vector<HeadStart> starts;   // of the forward walk
  std::vector<HeadStart> reverse;  // of backward's reverse walk, same indices
  std::vector<Prepass> prepasses;
  std::vector<std::vector<Merge>> chains;  // each in walking order; chains are independent
  int64_t num_merged = 0, num_transitions = 0;

  int64_t size() const { return cut.empty() ? num_uncut : static_cast<int64_t>(cut.size()); }
};

}  // namespace qla::cpu
