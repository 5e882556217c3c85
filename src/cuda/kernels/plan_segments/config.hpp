// plan_segments: arguments. Host- and device-includable.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"
#include "plan/forms.hpp"

namespace qla::cuda::segments {

struct Args {
  const void* cu_seqlens;            // [N + 1] or nullptr: N batch rows of `tokens` tokens
  int32_t index_dtype;               // QLA_INT32, QLA_INT64
  int32_t has_initial;               // an initial state is given ..
  const uint8_t* has_initial_state;  // .. for the sequences where this is not 0 (nullptr: for all)
  int64_t num_seqs;
  int64_t tokens;      // T of one batch row (packed: of all)
  int32_t slots;       // entries of chunk_table: B T / 64 + N, or those of a range ..
  int32_t first_slot;  // .. that begins here; all slots in items and tables are counted from it
  int32_t num_v_heads, v_parts;
  int32_t checkpoint_every_chunks;  // 0: no checkpoints
  PlanHeader* header;
  WorkItem* items;           // up to num_seqs * num_v_heads * v_parts of them; nullptr: only the chunk table and the header
  ChunkRecord* chunk_table;  // nullptr: not written
  // Sums of ghat that a kernel behind this one is to make, [slot][HV], for plan_few to mark as not there (kNoSum): cut_few reads
  // them while they are made, if anything is cut: if a sequence (in a range: its part) has more chunks than longest_whole.
  // nullptr: nobody does.
  float* sums;
  int64_t longest_whole;
  // Both forms in one call (plan_both_and_gates, at most kMostBothSeqs sequences): up to so many chunks of the longest sequence
  // all items go to the fused form's list (all of V), else to the lists above; what belongs to the other form gets none, and no
  // padding to zero. 0: one form.
  int64_t fused_chunks;
  PlanHeader* fused_header;
  WorkItem* fused_items;
  // .. with the two kernels in ranges, each with a part of every sequence (plan/ranges.hpp): a header, so many items and entries
  // of chunk_table for each, back to back. `slots` is still that of all.
  int32_t ranges;
  int32_t range_slots;
  int64_t range_items;
  // Balanced (balanced.cuh): in so many shares, 0: not. part_flags: of the border behind each; then where each begins in `items`,
  // as they are taken.
  int32_t balanced_shares;
  int32_t fused_ctas;  // the grid that takes the list
  int32_t* part_flags;
  int32_t range;                                // in the kernel: which one's tables are being made ..
  int32_t part_slot[qla::plan::kMostBothSeqs];  // .. and where each sequence's part begins in them
};

// A NaN that no arithmetic makes. Where a sum has those bits all the same it is as good as any other NaN, and read last.
inline constexpr uint32_t kNoSum = 0xffffffffu;

inline constexpr int kThreads = 512;
inline constexpr int kCachedSeqs = 1024;  // boundaries of so many sequences are searched in shared memory
inline constexpr int kFewSequences = 32;  // with no more, a lane knows one each (few.cuh, cut_few.cuh)
inline constexpr int kDirectSeqs = 32;    // with no more, and few items, chunk_intra makes the tables (boundaries.cuh)
inline constexpr int kBuckets = 128;      // of lengths, four an octave

}  // namespace qla::cuda::segments
