// Shared memory and edges of the forward kernel's roles.
#pragma once

#include <cstddef>

#include "cuda/kernels/forward/config.hpp"
#include "cuda/kernels/forward/variants.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sync/ring.cuh"
#include "qla/qla.h"

namespace qla::cuda {

// A work item as its CTA sees it, in shared memory: WorkItem, completed by the load role.
struct ItemSlot {
  WorkItem item;        // chunks = 0 for a skipped sequence
  int32_t state_index;  // row of initial and final state
  int32_t skip_rows;    // rows of o to set to zero: a skipped sequence's
  int32_t row, batch;   // of the first token, in the maps' coordinates
  int32_t valid;        // 0: no more work
  int32_t first;        // the fused form: kFirst of a CTA's first item, kFirstByCopy if its initial state comes by a copy
  int32_t reserved[2];
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
QLA_SLOT_FIELD(first, first)
QLA_SLOT_FIELD(chunks, item.chunks)
QLA_SLOT_FIELD(warmup, item.warmup)
QLA_SLOT_FIELD(last_rows, item.last_rows)
QLA_SLOT_FIELD(v_head, item.v_head)
QLA_SLOT_FIELD(v_part, item.v_part)
QLA_SLOT_FIELD(start, item.start)
QLA_SLOT_FIELD(start_index, item.start_index)
QLA_SLOT_FIELD(is_last, item.is_last)
QLA_SLOT_FIELD(segment, item.segment)
QLA_SLOT_FIELD(first_chunk, item.first_chunk)
QLA_SLOT_FIELD(chunk_base, item.chunk_base)
QLA_SLOT_FIELD(checkpoint_base, item.checkpoint_base)
QLA_SLOT_FIELD(state_index, state_index)
QLA_SLOT_FIELD(sequence, item.sequence)
QLA_SLOT_FIELD(token, item.token)  // its low half
QLA_SLOT_FIELD(chunk_slot, item.slot)
QLA_SLOT_FIELD(skip_rows, skip_rows)
QLA_SLOT_FIELD(row, row)
QLA_SLOT_FIELD(batch, batch)
}  // namespace slot
#undef QLA_SLOT_FIELD

// A first item of one chunk without output, in slot 0 and stage 0 as they are, walked by all roles but the loading one. The code
// of a chunk is 8 KiB that no instruction cache holds in a chain of kernels: 4 to 6 us, while the load role is as slow with its
// own and then waits for memory.
__device__ __forceinline__ void rehearsal_item(ItemSlot& s) {
  s = ItemSlot{};
  s.item.chunks = s.item.warmup = 1;
  s.item.last_rows = 64;
  s.item.start = QLA_START_ZERO;
  s.item.start_index = -1;  // its end state goes nowhere
  s.valid = 1;
}

// What is the same in all lanes, so that the compiler knows it: what follows from it is then worked out once, in uniform
// registers.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __reduce_or_sync(~0u, x); }

// threadIdx.x read anew
__device__ __forceinline__ int thread_in_group() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x % 128;
}

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
};

}  // namespace qla::cuda
