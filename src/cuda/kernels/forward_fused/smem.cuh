// Shared memory and edges of the fused forward kernel's roles.
#pragma once

#include "cuda/kernels/forward/smem.cuh"
#include "cuda/kernels/forward_fused/config.hpp"
#include "cuda/kernels/forward_fused/variants.hpp"

namespace qla::cuda {

struct FusedSmem {
  using Cfg = FusedConfig;
  uint32_t base;
  __device__ __forceinline__ uint32_t stage(int s) const { return base + s * Cfg::kStageBytes; }
  __device__ __forceinline__ uint32_t v_stage(int s) const { return base + Cfg::kOffV + s * Cfg::kVBytes; }
  // the intra role's two tile pairs, Abar, then Pg
  __device__ __forceinline__ uint32_t pair(int p) const { return base + Cfg::kOffPairs + p * 2 * kTileSmemBytes; }
  __device__ __forceinline__ uint32_t exchange() const { return base + Cfg::kOffExchange; }
  __device__ __forceinline__ uint32_t slot_address(int s) const { return base + Cfg::kOffItems + s * Cfg::kItemBytes; }
  // barriers
  __device__ __forceinline__ uint32_t bar(int i) const { return base + Cfg::kOffBarriers + 8 * i; }
  __device__ __forceinline__ Edge<3> tiles() const { return {bar(0)}; }
  __device__ __forceinline__ Edge<3> values() const { return {bar(6)}; }
  __device__ __forceinline__ uint32_t raw_tiles(int s) const { return bar(12 + s); }
  __device__ __forceinline__ uint32_t raw_values(int s) const { return bar(15 + s); }
  __device__ __forceinline__ uint32_t out_full(int part, int s) const { return bar(18 + 3 * part + s); }
  __device__ __forceinline__ Edge<2> pairs() const { return {bar(24)}; }
  __device__ __forceinline__ Edge<2> items() const { return {bar(28)}; }
  __device__ __forceinline__ uint32_t normed(int s) const { return bar(33 + s); }  // with norms
  __device__ __forceinline__ uint32_t gates_ready() const { return bar(32); }      // of a direct launch
  __device__ __forceinline__ uint32_t first_gates() const { return bar(38); }      // its first chunks'
  // per tile pair: the inverse's products are in the tensor cores' line
  __device__ __forceinline__ uint32_t blocks_issued(int p) const { return bar(39 + p); }
  __device__ __forceinline__ uint32_t direct_sequence(int round) const { return base + Cfg::kOffDirect + 4 * round; }
  // a CTA's first initial state: half in the place of stage 2, half in that of its V and behind it
  __device__ __forceinline__ uint32_t first_state(int half) const { return half ? v_stage(2) : stage(2); }
  __device__ __forceinline__ uint32_t state_full() const { return bar(36); }
  __device__ __forceinline__ uint32_t state_taken() const { return bar(37); }
};
// ItemSlot::first
inline constexpr int32_t kFirst = 1, kFirstByCopy = 2;

__device__ __forceinline__ void put_field(uint32_t slot, size_t offset, int x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(slot + uint32_t(offset)), "r"(x) : "memory");
}

// A role's way through stages, tile pairs and item slots, in two registers.
struct FusedWalk {
  int stage = 0;
  // 0: parity of the round of stages; 1, 2: pair and parity of its round; 3, 4: item slot and parity of its round; 5: a mark of
  // the role's; 6 ..: chunks left
  uint32_t bits = 0;
  __device__ __forceinline__ uint32_t phase() const { return bits & 1; }
  __device__ __forceinline__ uint32_t pair() const { return bits >> 1 & 1; }
  __device__ __forceinline__ uint32_t pair_phase() const { return bits >> 2 & 1; }
  __device__ __forceinline__ uint32_t slot() const { return bits >> 3 & 1; }
  __device__ __forceinline__ uint32_t slot_phase() const { return bits >> 4 & 1; }
  static constexpr uint32_t kMark = 32, kChunk = 64;
  __device__ __forceinline__ void begin_item(int chunks) { bits |= uint32_t(chunks) * kChunk; }
  __device__ __forceinline__ int left() const { return int(bits / kChunk); }
  __device__ __forceinline__ bool more() const { return bits >= kChunk; }
  __device__ __forceinline__ bool last() const { return bits < 2 * kChunk; }
  __device__ __forceinline__ bool marked() const { return bits & kMark; }
  __device__ __forceinline__ void next_chunk() {
    bits = ((bits & ~6u) | ((bits + 2) & 6)) - kChunk;
    if (++stage == FusedConfig::kStages) stage = 0, bits ^= 1;
  }
  __device__ __forceinline__ void next_item() { bits = (bits & ~24u) | ((bits + 8) & 24); }
};
static_assert(FusedConfig::kStages == 3 && FusedConfig::kItemSlots == 2);

}  // namespace qla::cuda
