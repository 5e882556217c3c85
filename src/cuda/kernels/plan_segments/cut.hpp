// cut_items, cut_few, cut_passes: arguments. Host- and device-includable.
#pragma once

#include "cuda/kernels/plan_segments/config.hpp"
#include "plan/segments.hpp"

namespace qla::cuda::segments {

inline constexpr int kUnitBytes = 12;
inline constexpr int kFewUnits = 1024;  // segments over all heads
inline constexpr int64_t kStagedBytes = 160 * 1024;

// Whether cut_few makes the items, or cut_items, which leaves out the rule's refinements (merged_chunks, pieces).
inline bool few_cut(int64_t seqs, int64_t units, int64_t slots, int64_t heads) {
  return seqs <= kFewSequences && units <= kFewUnits && slots * heads * int64_t{sizeof(float)} <= kStagedBytes;
}

struct CutArgs {
  Args plan;  // boundaries, sizes, header and items of the main pass
  // plan_segments' header, where its list is not the main pass's: that one has the items if anything is cut, else this one. Then
  // `plan`'s header is written here alone. With `heads` this list stays as it is.
  PlanHeader* uncut_header;
  qla::plan::CutRule rule;
  const float* decay;  // [slot][HV] of chunk_intra
  int32_t staged;      // 1: decay fits in shared memory
  // 1 (cut_few): decay is made by the kernel before, while this one reads it; all were kNoSum until plan_few was complete. What
  // is launched next may begin at once.
  int32_t beside;
  int32_t rehearses;    // .. with time for a rehearsal
  int32_t need_bases;   // 1: chunk_base and checkpoint_base are used
  int32_t most_states;  // entries of S_ext; those of M follow
  int32_t most_units;   // bound on segments over all heads, those of both cuts
  int32_t most_items;   // .. of the main pass, in each part of V
  void* units;          // scratch, kUnitBytes each; unused where few
  int32_t pre_v_parts;  // V-split of the pre-pass
  PlanHeader* pre_header;
  WorkItem* pre_items;
  MergeChain* chains;
  uint8_t* transitions;  // [most_states]
  uint8_t* heads;        // [sequence][HV] kHead*; nullptr: not asked
  int32_t* until;        // .. the pre-pass walks slots before this one, for whoever makes Abar for it alone
};

// Backward: both passes of every segment.
inline constexpr int kPassUnitBytes = 12;

struct PassCutArgs {
  Args plan;  // boundaries and sizes
  qla::plan::CutRule rule;
  const float* decay;   // [slot][HV] of chunk_intra
  int32_t staged;       // 1: decay fits in shared memory
  int32_t early;        // 1: decay is there when it starts; it waits for the kernels before it when it has done its work
  int32_t has_final;    // d_final_state is given
  int32_t wants_dh0;    // d_initial_state is asked for
  int32_t most_states;  // merged boundaries of each direction; as many transitions follow in the buffer of the states
  int32_t most_units;   // bound on segments over all heads
  int32_t most_first, most_second;  // bounds on the items of the two launches
  void* units;                      // scratch, kPassUnitBytes each; unused where few
  PassCounts* counts;
  PassItem *first, *second;
  PassChain* chains;  // 2 most_states
};

}  // namespace qla::cuda::segments
