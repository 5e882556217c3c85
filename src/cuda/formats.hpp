// Layouts in device memory that kernels hand to each other. Host- and device-includable; no CUDA types.
//
// Chunk slots: sequence n with first token bos (counted over the whole [B * T] buffer) owns slots bos / 64 + n + c for its chunks
// c = 0, 1, ..; these never collide and number at most B * T / 64 + N, so nothing needs a prefix sum over the lengths, and shapes
// alone size every buffer. The first slot after a sequence's last chunk and before the next one's first may be unused: its record
// has rows = 0.
//
// All [slot][value head] arrays: index = slot * num_v_heads + v_head. A forward whose workspace does not hold every slot takes
// them in ranges (plan/ranges.hpp): tables, items and workspace then count slots from the range's first one.
#pragma once

#include <cstdint>

namespace qla::cuda {

struct ChunkRecord {  // chunk_table[slot], written by the plan kernel
  int64_t token;      // first token, over [B * T]
  int32_t rows;       // 1..64; 0: unused slot
  int32_t sequence;
};
static_assert(sizeof(ChunkRecord) == 16);

// Abar (F3) and Pg (F6): lower 16 x 16 blocks only, 16-bit, four panels, one a k16 step: panel w holds rows 16 w .. 63 of columns
// 16 w .. 16 w + 15, 32 bytes a row, 32-byte swizzle (byte ^= (byte >> 7 & 1) << 4), panels back to back at 0, 2048, 3584, 4608.
// The consumer lays panel w at 2560 w of an 8-KiB tile whose other bytes are standing zeros and reads k16 step w as a 64-row
// right operand at 2048 w.
inline constexpr int kTileBytes = 5120;
inline constexpr int kTileSmemBytes = 8192;
constexpr int panel_offset(int w) { return w * 2048 - w * (w - 1) / 2 * 512; }
constexpr int panel_bytes(int w) { return 2048 - 512 * w; }

// Gate vectors of a chunk, float[64] each. Part A (1 KiB, what the recurrences load):
//   k_scale = gamma_i rk_i      on (KS)^T            (F4)      rk, rq = inverse norms, 1 without normalisation
//   q_scale = scale gamma_i rq_i on (QS)^T           (F7)
//   e_scale = tail_i beta_i rk_i on Delta            (F8)
//   gamma   = exp(g_i); gamma[63] is gamma_C of the chunk, also of a tail chunk (raw gate 0 in rows past the end)
// Part B (1 KiB, for backward): log2 of gamma (the cumsum in base 2, as exp2 takes it: converted to natural logarithms and back
// it would be rounded twice more), beta, rk, rq. Pg carries scale, rq_i (rows), rk_j beta_j (columns): O = q_scale (Q S) + Pg
// Delta. Abar carries rk_i rk_j beta_j inside the inverse.
inline constexpr int kVecK = 0, kVecQ = 64, kVecE = 128, kVecGamma = 192, kVecG = 256, kVecBeta = 320, kVecRk = 384, kVecRq = 448;
inline constexpr int kVecFloats = 512;         // one record: 2 KiB at vec[index]
inline constexpr int kVecBytesForward = 1024;  // part A

// The same for the fused forward, which makes Abar and Pg itself, by chunk_gates, float[64] each: scale gamma (on (QS)^T); tail
// beta (on Delta); gamma; cumulated log2 gate; beta. Where q and k are normalised the kernel multiplies norms into its copy and
// puts behind it rk, rq, and what rows i take of the gates: scale rq / rk, and the cumulated gate with log2 rk in it. A run of
// the record above: a call that saves makes it there, and the kernel stores what norms change.
inline constexpr int kFusedQ = 0, kFusedE = 64, kFusedGamma = 128, kFusedCum = 192, kFusedBeta = 256;
inline constexpr int kFusedVecFloats = 320;
inline constexpr int kFusedRk = 320, kFusedRq = 384, kFusedPgRows = 448, kFusedCumRows = 512;
inline constexpr int kFusedInRecord = kVecQ;  // where it begins there
static_assert(kFusedE + kFusedInRecord == kVecE && kFusedGamma + kFusedInRecord == kVecGamma &&
              kFusedCum + kFusedInRecord == kVecG && kFusedBeta + kFusedInRecord == kVecBeta &&
              kFusedRk + kFusedInRecord == kVecRk && kFusedRq + kFusedInRecord == kVecRq);

// One unit of work of a recurrence kernel (forward, state pass, reverse pass), written by the plan kernel: a segment of one value
// head, all of V or one half of it. Kernels walk `chunks` chunks from slot `slot` on (the reverse pass from the last one down).
struct WorkItem {
  int64_t token;      // first token of the first chunk walked, warm-up included, over [B * T]
  int32_t slot;       // its chunk slot; consecutive chunks of a sequence have consecutive slots
  int32_t chunks;     // chunks walked, warm-up included; 0: an empty sequence (only its final state is written)
  int32_t warmup;     // of these, walked first with output off
  int32_t last_rows;  // rows of the last chunk walked, 1..64
  int32_t sequence;
  int32_t v_head;
  int32_t v_part;           // 0 or 1: which 64 value columns with V-split; 0 otherwise
  int32_t start;            // QLA_START_*, kStartIdentity, kStartCarried
  int32_t start_index;      // QLA_START_MERGED: index into the merged start states (fp32 [V][K] of a head, written by cp_merge)
  int32_t is_last;          // kFinalState, kCarry or 0: where the end state goes
  int32_t segment;          // index of the segment in its sequence
  int32_t first_chunk;      // index in its sequence of the first chunk walked
  int32_t chunk_base;       // chunks of all earlier sequences: row of the h snapshots is chunk_base + chunk
  int32_t checkpoint_base;  // state checkpoints of all earlier sequences
};
static_assert(sizeof(WorkItem) == 64);

// Beside QLA_START_*: S = I and V = 0, the item that computes a segment's transition (C2). Items of the pre-pass (no output) use
// start_index as the index of the fp32 [V][K] buffer their end state goes to.
inline constexpr int32_t kStartIdentity = 4;
// .. and a sequence that goes on from the range of chunks before: its state, fp32 [HV][V][K]; only one sequence crosses a border.
inline constexpr int32_t kStartCarried = 5;
// WorkItem::is_last
inline constexpr int32_t kFinalState = 1;  // the sequence's last segment
inline constexpr int32_t kCarry = 2;       // the last one of this range, the sequence goes on: [HV][V][K] for the next

// Backward. Snapshots, 16 bit, a range of chunk slots: index = (slot - first slot of the range) * num_v_heads + v_head.
//   S before a chunk and dS+ after it: 32 KiB = two halves of V; each half is [64 v][128 features] in two 64-feature panels of 8
//   KiB, rows of
//     128 bytes, 128-byte swizzle: what the transposed recurrence has in its registers, and, read MN-major, the right operand of
//     dO S^T.
//   Delta: 16 KiB, [64 tokens][128 v] in two 64-column panels, as a tensor copy lays V; half h of V is panel h.
// dR = dV is read back from the [B, T, HV, 128] tensor dV.
inline constexpr int kSnapshotBytes = 32768, kDeltaBytes = 16384;

// One unit of work of backward_passes: a run of a sequence's chunks, one value head, walked forwards (the state pass) or from the
// highest chunk down (the reverse pass).
struct PassItem {
  int64_t token;      // first token of the lowest chunk walked, over [B * T]
  int32_t slot;       // its chunk slot
  int32_t chunks;     // walked, warm-up included; -1: nothing to do; 0: an empty sequence (dh0 = dht)
  int32_t warmup;     // of these, walked first with nothing stored
  int32_t last_rows;  // rows of the highest chunk walked, 1..64
  int32_t sequence;
  int32_t v_head;
  int32_t reverse;             // 0: state pass, 1: reverse pass
  int32_t start, start_index;  // kFrom*: where the walk's first state (or gradient of it) comes from
  int32_t end, end_index;      // kTo*: where the last one goes
  int32_t initial;             // 1: the sequence starts from the caller's state (else its dh0 is 0)
  int32_t reserved[2];
};
static_assert(sizeof(PassItem) == 64);
// Caller: h0 of the state pass, dht and dh0 of the reverse pass. Buffer: fp32 [index][V][K]. Identity: S = I and V = 0 (C2).
inline constexpr int32_t kFromZero = 0, kFromCaller = 1, kFromBuffer = 2, kFromIdentity = 3;
inline constexpr int32_t kToNowhere = 0, kToCaller = 1, kToBuffer = 2;

// Backward with sequences cut into segments: items that need no merge (the pre-pass among them) run first, merged ones after the
// merges.
struct PassCounts {
  int32_t first, second;  // items of the two launches
  int32_t chains;
  int32_t reserved;
};
// Merged boundaries of one (sequence, value head) and direction. Entry `base` holds the state there; (C1), (C3) make the `count`
// entries behind it (reverse: before it) from S_ext (dS_ext), which they hold, and M. M of the segment that ends at boundary e is
// entry e of the transitions, for both directions.
struct PassChain {
  int32_t base, count, reverse, reserved;
};

struct PlanHeader {  // first bytes of the plan buffer; items follow at a 256-byte boundary
  int32_t num_items;
  int32_t next_item;  // queue counter of a persistent grid; reset by the plan kernel
  int32_t num_merges;
  int32_t valid_tokens;  // 1: boundaries were in range; 0: clamped (never written outside the buffers)
  int64_t end_token;     // first token past the last sequence: rows from here on are written as zeros
  int32_t cut;           // of the pre-pass's header: whether any sequence is cut; there before the kernel behind cut_items begins
  int32_t distrusted;    // .. and whether the fused main pass distrusts the cut of any head
  int32_t reserved[8];
};
static_assert(sizeof(PlanHeader) == 64);

// Merged start states of one (sequence, value head): entries first .. first + count - 1 of the [V][K] fp32 buffers, one behind
// each merged boundary. Before the merge an entry holds S_ext; where transitions[entry] is set, (C1) with M (in the second half
// of the buffers) and the entry before makes it the start state, else it already is.
struct MergeChain {
  int32_t first, count;
};
inline constexpr int kStateFloats = 128 * 128;

// What cut_items says of each (sequence, value head) where the main pass is fused: one of its boundaries is not merged.
// What keys add to ghat (C4) no sum of gates knows. So the sums leave kGrowthRoom a chunk for it, and the main pass looks whether
// beta |k|^2 stays below kMostKeyStep, which bounds it by that; if not, the head is distrusted and walked again, uncut.
inline constexpr uint8_t kHeadForgets = 1, kHeadDistrusted = 2;
inline constexpr float kGrowthRoom = 0.1f, kMostKeyStep = 2.0f + kGrowthRoom / 64;

struct StateView {  // [n, HV, K, V] by strides in elements; data == nullptr: absent
  void* data = nullptr;
  int32_t dtype = 0;  // QLA_FLOAT64 .. QLA_FLOAT16
  int64_t stride_n = 0, stride_h = 0, stride_k = 0, stride_v = 0;
};

}  // namespace qla::cuda
