// Device memory of one call: what forward keeps for backward, and the workspace. One function each, for the query and the run.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/formats.hpp"
#include "cuda/kernels/plan_segments/cut.hpp"
#include "plan/layout.hpp"

namespace qla::cuda {

// `saved`: opaque to the caller. By slot and value head: Abar (F3), the whole vector record, and the sum of ghat (C4) that
// backward's cuts look at.
struct Saved {
  uint8_t* abar;
  float* vec;
  float* decay;
  size_t bytes;
};
inline Saved lay_out_saved(void* base, int64_t slots, int64_t v_heads) {
  plan::Layout layout(base);
  Saved s;
  s.abar = layout.take<uint8_t>(slots * v_heads * kTileBytes);
  s.vec = layout.take<float>(slots * v_heads * kVecFloats);
  s.decay = layout.take<float>(slots * v_heads);
  s.bytes = layout.bytes();
  return s;
}
inline Saved lay_out_saved(void* base, const Problem& p) { return lay_out_saved(base, p.chunk_slots(), p.num_v_heads); }

struct ForwardBuffers {
  PlanHeader* header;
  WorkItem* items;
  ChunkRecord* chunk_table;
  uint8_t* pg;
  float* gates;              // the fused form's vectors, by slot and value head; where the call saves they are in what it saves
  int32_t* part_flags;       // balanced: of the borders, whose states lie in carry[0]
  PlanHeader* fused_header;  // of the fused form, where a call has both
  WorkItem* fused_items;
  PlanHeader* uncut_header;  // of a list for packings in which nothing is cut; fused: and for heads that should not have been
  WorkItem* uncut_items;
  // context parallelism
  PlanHeader* pre_header;
  WorkItem* pre_items;
  MergeChain* chains;
  uint8_t* transitions;
  uint8_t* heads;  // [sequence][HV] kHead*, where the main pass is fused
  int32_t* until;  // .. the slot up to which the pre-pass walks
  void* units;
  float* states;    // S_ext and start states, then M
  float* carry[2];  // [HV][V][K], from one range to the next; both forms: [N][HV][V][K]
  Saved saved;      // for one range; absent where the caller has memory for it
  size_t bytes;
};
struct ForwardCounts {
  int64_t range_slots = 0, ranges = 1;  // chunk slots at a time; all of them in one range
  int64_t items = 0;                    // bound on the work items of the main pass, in one range; the other counts, too
  int64_t v_parts = 1, pre_v_parts = 1;
  bool cut = false, fused = false;
  bool keeps = false;           // fused: Abar and the vectors, for outputs made of them
  int64_t balanced_shares = 0;  // fused: shares of a balanced list (plan/balance.hpp); 0: it is not
  bool both = false;            // both forms: items and v_parts are the two kernels'
  int64_t uncut_items = 0;      // of a list of its own for packings in which nothing is cut; 0: one list
  int64_t units = 0;            // bound on segments over all value heads
  int64_t end_states = 0;       // bound on merged boundaries
};
inline ForwardBuffers lay_out_forward(void* base, const Problem& p, const ForwardCounts& n, bool saved_given) {
  plan::Layout layout(base);
  ForwardBuffers b{};
  const int64_t tables = n.both ? n.ranges : 1;  // both forms: made for all ranges at once
  b.header = layout.take<PlanHeader>(tables);
  b.items = layout.take<WorkItem>(tables * n.items);
  b.chunk_table = layout.take<ChunkRecord>(tables * n.range_slots);
  const auto take_saved = [&] {
    void* inside = layout.take<uint8_t>(int64_t(lay_out_saved(nullptr, n.range_slots, p.num_v_heads).bytes));
    b.saved = lay_out_saved(inside, n.range_slots, p.num_v_heads);
  };
  if (n.fused) {  // Abar and Pg stay on chip
    if (n.keeps)
      take_saved();
    else if (!saved_given)
      b.gates = layout.take<float>(n.range_slots * p.num_v_heads * kFusedVecFloats);
    b.part_flags = layout.take<int32_t>(2 * n.balanced_shares);
    b.carry[0] = b.carry[1] = layout.take<float>(n.balanced_shares * kStateFloats);
  }
  if (n.fused && !n.cut) {
    b.bytes = layout.bytes();
    return b;
  }
  const int64_t pg_bytes = n.fused ? 0 : n.range_slots * p.num_v_heads * kTileBytes,
                gate_bytes =
                    n.both && !saved_given ? p.chunk_slots() * p.num_v_heads * kFusedVecFloats * int64_t{sizeof(float)} : 0;
  b.pg = layout.take<uint8_t>(std::max(pg_bytes, gate_bytes));
  if (n.both) {
    b.fused_header = layout.take<PlanHeader>(1);
    b.fused_items = layout.take<WorkItem>(p.num_seqs * p.num_v_heads);
    b.gates = reinterpret_cast<float*>(b.pg);  // one of them is written, the chosen form's
  }
  if (n.uncut_items) {
    b.uncut_header = layout.take<PlanHeader>(1);
    b.uncut_items = layout.take<WorkItem>(n.uncut_items);
  }
  if (n.cut) {
    b.pre_header = layout.take<PlanHeader>(1);
    b.pre_items = layout.take<WorkItem>(2 * n.end_states * n.pre_v_parts);
    b.chains = layout.take<MergeChain>(p.num_seqs * p.num_v_heads);
    b.transitions = layout.take<uint8_t>(n.end_states);
    if (n.fused) {
      b.heads = layout.take<uint8_t>(p.num_seqs * p.num_v_heads);
      b.until = layout.take<int32_t>(p.num_seqs * p.num_v_heads);
    }
    b.units = layout.take<uint8_t>(n.units * segments::kUnitBytes);
    b.states = layout.take<float>(2 * n.end_states * kStateFloats);
  }
  if (n.ranges > 1)
    for (float*& carry : b.carry) carry = layout.take<float>((n.both ? p.num_seqs : 1) * p.num_v_heads * kStateFloats);
  if (!saved_given) take_saved();
  b.bytes = layout.bytes();
  return b;
}

}  // namespace qla::cuda
