// Forward in ranges of chunk slots, for workspaces that do not hold every chunk: which part of a sequence lies in a range. The
// part is walked as a sequence of its own; where it goes on from the range before, or into the next, the state is handed over in
// fp32.
//
// Slots as in cuda/formats.hpp: chunk c of sequence n, whose first token is bos, has slot bos / 64 + n + c.
#pragma once

#include <cstdint>

#include "plan/hd.hpp"

namespace qla::plan {

struct Run {
  int32_t first = 0;   // index in its sequence of the first chunk in the range
  int32_t chunks = 0;  // in the range; 0 with present: an empty sequence
  int32_t slot = 0;    // of that chunk, counted from the range's first slot
  bool present = false;
  bool goes_on = false;  // chunks are left for the next range

  QLA_HD bool continued() const { return first > 0; }
};

// base: slot of the sequence's first chunk; slots: of the range. An empty sequence belongs to the range that has its slot.
QLA_HD inline Run run_in_range(int64_t base, int32_t chunks, int64_t first_slot, int64_t slots) {
  Run run;
  const int64_t before = first_slot > base ? first_slot - base : 0;  // chunks in earlier ranges
  const int64_t left = first_slot + slots - base;                    // chunks up to the range's end
  const int64_t through = chunks < left ? chunks : left;
  run.present = chunks > 0 ? through > before : base >= first_slot && left > 0;
  if (!run.present) return run;
  run.first = static_cast<int32_t>(before);
  run.chunks = static_cast<int32_t>(through - before);
  run.slot = static_cast<int32_t>(base + before - first_slot);
  run.goes_on = through < chunks;
  return run;
}

// A few long sequences instead: range r of R has the r-th part of each, so that long and short ones run side by side in every
// range, and a state is handed over for each. Slots of a range then count its chunks, sequence by sequence; `slot` is left 0. An
// empty sequence belongs to the first range. chunks (at most 2^25) times ranges: below 2^31.
QLA_HD inline Run part_of_sequence(int32_t chunks, int32_t range, int32_t ranges) {
  Run run;
  const auto all = static_cast<uint32_t>(chunks), of = static_cast<uint32_t>(ranges);
  // fewer chunks than ranges: one each, from the first range on (what is handed over lies there for the next range alone)
  const auto before = [&](uint32_t r) { return static_cast<int32_t>(all < of ? (r < all ? r : all) : all * r / of); };
  run.first = before(static_cast<uint32_t>(range));
  const int32_t end = before(static_cast<uint32_t>(range) + 1);
  run.chunks = end - run.first;
  run.present = chunks > 0 ? run.chunks > 0 : range == 0;
  run.goes_on = end < chunks;
  return run;
}
// .. and how many slots a range has at most
QLA_HD constexpr int64_t part_slots(int64_t all_slots, int64_t num_seqs, int64_t ranges) {
  return (all_slots + ranges - 1) / ranges + num_seqs;
}

}  // namespace qla::plan
