// Shared memory and edges of the forward kernel's roles.
#pragma once

#include <cstddef>

#include "config.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sync/ring.cuh"
#include "qla/qla.h"
#include "variants.hpp"

namespace qla::cuda {

// Gate vectors of the fused form beside part A of formats.hpp, floats: cumsum (base 2) of the row; the same + log2 rk; beta rk;
// scale rq / rk
inline constexpr int kVecCum = 256, kVecCol = 320, kVecRow = 384, kVecRatio = 448;

// A work item as its CTA sees it, in shared memory: WorkItem, completed by the load role.
struct ItemSlot {
  WorkItem item;        // chunks = 0 for a skipped sequence
  int32_t state_index;  // row of initial and final state
  int32_t skip_rows;    // rows of o to set to zero: a skipped sequence's
  int32_t row, batch;   // of the first token, in the maps' coordinates
  int32_t valid;        // 0: no more work
  int32_t reserved[3];
};
static_assert(sizeof(ItemSlot) == 96);

// One field of a slot by shared address, read where it is used: the state role has no registers to keep an item in.
#define QLA_SLOT_FIELD(name, member)                                                                                 \
  __device__ __forceinline__ int name(uint32_t slot) {                                                               \
    int x;                                                                                                           \
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(slot + uint32_t(offsetof(ItemSlot, member))) : "memory"); \
    return x;                                                                                                        \
  }
namespace slot {
QLA_SLOT_FIELD(valid, valid)
QLA_SLOT_FIELD(chunks, item.chunks)
QLA_SLOT_FIELD(warmup, item.warmup)
QLA_SLOT_FIELD(last_rows, item.last_rows)
QLA_SLOT_FIELD(v_head, item.v_head)
QLA_SLOT_FIELD(v_part, item.v_part)
QLA_SLOT_FIELD(start, item.start)
QLA_SLOT_FIELD(start_index, item.start_index)
QLA_SLOT_FIELD(is_last, item.is_last)
QLA_SLOT_FIELD(first_chunk, item.first_chunk)
QLA_SLOT_FIELD(chunk_base, item.chunk_base)
QLA_SLOT_FIELD(checkpoint_base, item.checkpoint_base)
QLA_SLOT_FIELD(state_index, state_index)
QLA_SLOT_FIELD(skip_rows, skip_rows)
QLA_SLOT_FIELD(sequence, item.sequence)
QLA_SLOT_FIELD(chunk_slot, item.slot)
QLA_SLOT_FIELD(row, row)
QLA_SLOT_FIELD(batch, batch)
}  // namespace slot
#undef QLA_SLOT_FIELD

// threadIdx.x read anew
__device__ __forceinline__ int thread_in_group() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x % 128;
}

// A role's way through the stages. Lean: one counter, stage and parity by division; else two registers and no arithmetic in the
// loop.
template <class Cfg>
struct Walk {
  uint32_t chunks = 0;
  int at = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ int stage() const { return Cfg::kLean ? chunks % Cfg::kStages : at; }
  __device__ __forceinline__ uint32_t phase() const { return Cfg::kLean ? chunks / Cfg::kStages & 1 : parity; }
  __device__ __forceinline__ int stage_before() const {
    return Cfg::kLean ? (chunks - 1) % Cfg::kStages : at == 0 ? Cfg::kStages - 1 : at - 1;
  }
  __device__ __forceinline__ void advance() {
    if constexpr (Cfg::kLean) {
      chunks++;
    } else if (++at == Cfg::kStages) {
      at = 0;
      parity ^= 1;
    }
  }
};

template <class Cfg>
struct ForwardSmem {
  uint32_t base;
  uint8_t* generic;
  __device__ __forceinline__ uint32_t stage(int s) const { return base + s * Cfg::kStageBytes; }
  __device__ __forceinline__ Edge<Cfg::kStages> tiles() const { return {base + Cfg::kOffBarriers}; }
  __device__ __forceinline__ Edge<Cfg::kItemSlots> items() const { return {base + Cfg::kOffBarriers + 16 * Cfg::kStages}; }
  __device__ __forceinline__ uint32_t raw(int s) const {
    return base + Cfg::kOffBarriers + 16 * (Cfg::kStages + Cfg::kItemSlots) + 8 * s;
  }
  __device__ __forceinline__ ItemSlot& slot(int s) const {
    return *reinterpret_cast<ItemSlot*>(generic + Cfg::kOffItems + s * Cfg::kItemBytes);
  }
  __device__ __forceinline__ uint32_t slot_address(int s) const { return base + Cfg::kOffItems + s * Cfg::kItemBytes; }
  __device__ __forceinline__ uint32_t out_full(int part, int s) const {
    return base + Cfg::kOffBarriers + 24 * Cfg::kStages + 16 * Cfg::kItemSlots + 8 * (part * Cfg::kStages + s);
  }
  // Fused: the intra role's two tile pairs (Abar, then Pg), its edge to the state role, its exchange memory
  __device__ __forceinline__ uint32_t pair(int s) const { return base + Cfg::kOffPairs + s * 2 * kTileSmemBytes; }
  __device__ __forceinline__ Edge<2> pairs() const {
    return {base + Cfg::kOffBarriers + (24 + 8 * Cfg::kParts) * Cfg::kStages + 16 * Cfg::kItemSlots};
  }
  __device__ __forceinline__ uint32_t exchange() const { return base + Cfg::kOffExchange; }
};

}  // namespace qla::cuda
