// backward_passes: sizes, the shared-memory map and what the launch is given. Host-includable.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"
#include "qla/qla.h"

namespace qla::cuda::backward_passes {

inline constexpr int kRows = 64, kDim = 128, kHalf = 64;  // tokens of a chunk; K = V; value columns of a CTA
inline constexpr int kCluster = 2;                        // the two halves of V
inline constexpr int kProductThreads = 128, kPgThreads = 128, kThreads = 384;
inline constexpr int kRegsProduct = 240, kRegsPg = 104, kRegsAux = 56;
static_assert(kRegsProduct + kRegsPg + kRegsAux <= 65536 / kThreads / 8 * 8 * 3,
              "setmaxnreg only redistributes what the launch reserved");

// Shared memory, bytes. State item: stages of K V Abar vec. Reverse item: stages of K Q vec (the whole record) a chunk further
// ahead than those of dO Abar, because Pg is made of them; tiles of Pg. Behind them the outputs: snapshots, rows (Delta or dR).
inline constexpr int kKiB = 1024;
inline constexpr int kPanel = 8 * kKiB;  // 64 tokens x 64 columns
inline constexpr int kSnapshotHalf = 16 * kKiB;
inline constexpr int kStateV = 16 * kKiB, kStateA = 24 * kKiB, kStateVec = 32 * kKiB, kStateStage = 33 * kKiB, kStateStages = 5;
inline constexpr int kStateOut = kStateStages * kStateStage;
inline constexpr int kKeyQ = 16 * kKiB, kKeyVec = 32 * kKiB, kKeyStage = 34 * kKiB, kKeyStages = 4;
inline constexpr int kRowA = 8 * kKiB, kRowStage = 16 * kKiB, kRowStages = 3;
inline constexpr int kRowAt = kKeyStages * kKeyStage, kPgAt = kRowAt + kRowStages * kRowStage, kPgTiles = 2,
                     kReverseOut = kPgAt + kPgTiles * kTileSmemBytes;
// output buffers of an item: snapshots, then rows
template <int Snapshots, int Rows>
struct Outputs {
  static constexpr int kSnapshots = Snapshots, kRows = Rows, kBytes = Snapshots * kSnapshotHalf + Rows * kPanel;
};
using StateOutputs = Outputs<2, 2>;
using ReverseOutputs = Outputs<1, 1>;
inline constexpr int kBars = 224 * kKiB, kSmemBytes = kBars + 256;
static_assert(kStateOut + StateOutputs::kBytes <= kBars && kReverseOut + ReverseOutputs::kBytes <= kBars &&
                  kSmemBytes <= 227 * kKiB,
              "shared memory");

using cuda::StateView;

struct Params {
  // Uncut: sequences x value heads, all of V (plan_segments); a cluster of each kind takes one. Cut: cluster i takes
  // cut_items[i].
  const WorkItem* items;
  const PassItem* cut_items;     // nullptr: uncut
  const int32_t* num_cut_items;  // how many of them there are; at most num_items
  int32_t num_items;
  int32_t kinds;                 // kBoth; kStateOnly: no reverse items, nothing stored but states at boundaries (uncut)
  int32_t first_slot, end_slot;  // the range of chunks of this launch; snapshots are indexed from first_slot on
  int32_t num_k_heads, num_v_heads;
  int32_t rows_per_batch;  // tokens of a batch row, as the tensor maps see it
  int32_t boundary_slots;  // ranges begin at multiples of this; kStateOnly: the states there go to boundary[slot / this]
  float scale;
  int32_t mask_dh0;     // dh0 of a sequence that does not start from the caller's state is 0
  const uint8_t* abar;  // [slot][HV][kTileBytes]
  const float* vec;     // [slot][HV][kVecFloats]
  uint8_t* state;       // snapshots (formats.hpp)
  uint8_t* d_state;
  uint8_t* delta;
  void* dv;  // 16 bit; rows of a tail chunk are written one by one
  int64_t dv_stride_b, dv_stride_t, dv_stride_h;
  StateView h0, dht, dh0;
  // fp32 [index][V][K], by PassItem::start_index and end_index. Uncut: [range][HV], states at the starts of ranges. Cut:
  // most_states states at merged boundaries, as many transitions, and these transposed.
  float* boundary;
  int32_t most_states;
  const float* carry_in;  // uncut: [HV], dS of the sequence that goes on after this range ..
  float* carry_out;       // .. and of the one that began before it. Cut: both are dS at merged boundaries
};
inline constexpr int kBoth = 0, kStateOnly = 1;

// Host- and device-callable in effect: plain arithmetic on a work item, clipped to the launch's range of slots.
inline
#ifdef __CUDACC__
    __host__ __device__
#endif
        PassItem
        make_item(const WorkItem& w, const Params& p, bool reverse) {
  const int32_t low = w.slot > p.first_slot ? w.slot : p.first_slot;
  const int32_t end = w.slot + w.chunks, high = end < p.end_slot ? end : p.end_slot;
  PassItem it;
  it.token = w.token + int64_t(low - w.slot) * kRows;
  it.slot = low;
  it.chunks = high > low ? high - low : w.chunks == 0 && w.slot >= p.first_slot && w.slot < p.end_slot ? 0 : -1;
  it.last_rows = high == end ? w.last_rows : kRows;
  it.sequence = w.sequence;
  it.v_head = w.v_head;
  it.reverse = reverse;
  it.initial = w.start == QLA_START_INITIAL;
  it.start_index = it.end_index = w.v_head;
  if (reverse) {
    it.warmup = 0;
    it.start = high < end ? kFromBuffer : p.dht.data ? kFromCaller : kFromZero;
    it.end = low > w.slot ? kToBuffer : p.dh0.data ? kToCaller : kToNowhere;
  } else {
    it.warmup = p.kinds == kStateOnly ? it.chunks : 0;
    it.start = low > w.slot ? kFromBuffer : it.initial ? kFromCaller : kFromZero;
    if (low > w.slot) it.start_index += low / p.boundary_slots * p.num_v_heads;
    it.end = kToNowhere;
  }
  return it;
}

}  // namespace qla::cuda::backward_passes
