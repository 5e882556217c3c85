// Device memory of one backward call. One function for the query and the run.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/formats.hpp"
#include "cuda/kernels/plan_segments/cut.hpp"
#include "cuda/workspace.hpp"
#include "plan/choose_backward.hpp"
#include "plan/layout.hpp"

namespace qla::cuda {

struct BackwardNeeds {      // read off the arguments
  bool copy_d_o = false;    // tensor copies cannot address it, or there is none
  bool scratch_dv = false;  // the same for dv, or it is of another type
  bool gate_partials = false;
  void* saved = nullptr;  // what forward kept: the caller's
};

// Where sequences are cut into segments: the rule, and bounds from shapes.
struct BackwardCut {
  plan::CutRule rule;
  int64_t units = 0;                                        // segments over all value heads; 0: no cut
  int64_t end_states = 0;                                   // merged boundaries of each direction
  int64_t first() const { return 2 * units + end_states; }  // items: a pass of each segment (or its pre-pass), transitions
  int64_t second() const { return 2 * units; }
};
inline BackwardCut cut_of(const plan::Shape& shape, const plan::Choice& choice) {
  BackwardCut cut;
  if (choice.rule.segment_chunks == 0) return cut;
  cut.rule = choice.rule;
  cut.units = plan::most_segments(shape.total_tokens, shape.num_seqs, choice.rule) * shape.num_v_heads;
  cut.end_states = plan::most_end_states(shape, choice);
  return cut;
}

// The chunks are taken in ranges of `range_slots`, the last range first; snapshots are kept for one range only. More than one
// range also needs the states at the ranges' starts and the gradient that passes from one range to the one before it.
struct BackwardBuffers {
  PlanHeader* header;
  WorkItem* items;
  ChunkRecord* chunk_table;
  Saved saved;
  uint8_t *state, *d_state, *delta;  // of one range
  uint16_t *d_o, *dv;                // [B, T, HV, 128]
  float* gate_partials;              // [slots][HV][2]
  float* boundary;                   // [ranges][HV][V][K]
  float* carry[2];                   // [HV][V][K]
  // context parallelism; never with more than one range
  PassCounts* counts;
  PassItem *first, *second;
  PassChain* chains;
  void* cut_units;
  float* cut_states;  // [4][end_states][V][K]: states at merged boundaries, transitions in two layouts, gradients of states
  size_t bytes;
};

inline int64_t num_ranges(const Problem& p, int64_t range_slots) { return (p.chunk_slots() + range_slots - 1) / range_slots; }

inline BackwardBuffers lay_out_backward(void* base, const Problem& p, const BackwardNeeds& needs, int64_t range_slots,
                                        const BackwardCut& cut) {
  plan::Layout layout(base);
  BackwardBuffers b{};
  const int64_t heads = p.num_v_heads, slots = p.chunk_slots(), rows = p.total_tokens() * heads * 128, state = heads * 128 * 128;
  b.header = layout.take<PlanHeader>(1);
  b.items = layout.take<WorkItem>(p.num_seqs * heads);
  b.chunk_table = layout.take<ChunkRecord>(slots);
  if (needs.saved) {
    b.saved = lay_out_saved(needs.saved, p);
  } else {
    void* inside = layout.take<uint8_t>(int64_t(lay_out_saved(nullptr, p).bytes));
    b.saved = lay_out_saved(inside, p);
  }
  b.state = layout.take<uint8_t>(range_slots * heads * kSnapshotBytes);
  b.d_state = layout.take<uint8_t>(range_slots * heads * kSnapshotBytes);
  b.delta = layout.take<uint8_t>(range_slots * heads * kDeltaBytes);
  b.d_o = layout.take<uint16_t>(needs.copy_d_o ? rows : 0);
  b.dv = layout.take<uint16_t>(needs.scratch_dv ? rows : 0);
  b.gate_partials = layout.take<float>(needs.gate_partials ? slots * heads * 2 : 0);
  const int64_t ranges = num_ranges(p, range_slots);
  b.boundary = layout.take<float>(ranges > 1 ? ranges * state : 0);
  for (float*& carry : b.carry) carry = layout.take<float>(ranges > 1 ? state : 0);
  if (cut.units > 0) {
    b.counts = layout.take<PassCounts>(1);
    b.first = layout.take<PassItem>(cut.first());
    b.second = layout.take<PassItem>(cut.second());
    b.chains = layout.take<PassChain>(2 * cut.end_states);
    b.cut_units = layout.take<uint8_t>(cut.units * segments::kPassUnitBytes);
    b.cut_states = layout.take<float>(4 * cut.end_states * kStateFloats);
  }
  b.bytes = layout.bytes();
  return b;
}

// Fewest ranges whose buffers fit; 0: not even the least does. From one range on the sum falls with their number n as 80 KiB
// slots / n + 64 KiB n a value head, down to n = sqrt(1.25 slots): with more the boundary states outweigh what the snapshots
// save.
inline int64_t most_ranges(const Problem& p) {
  int64_t n = 1;
  while (4 * (n + 1) * (n + 1) <= 5 * p.chunk_slots()) n++;
  return std::min<int64_t>(n, 1024);
}
inline int64_t range_of(const Problem& p, int64_t ranges) {
  return std::max<int64_t>(1, (p.chunk_slots() + ranges - 1) / ranges);
}
inline int64_t choose_range(const Problem& p, const BackwardNeeds& needs, size_t bytes) {
  const int64_t most = most_ranges(p);
  for (int64_t n = 1; n <= most; n++)
    if (lay_out_backward(nullptr, p, needs, range_of(p, n), {}).bytes <= bytes) return range_of(p, n);
  return 0;
}

}  // namespace qla::cuda
