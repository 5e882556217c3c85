// gdn_forward - outputs and end state of one segment of one value head (all of V or half of it). Computes (F4)-(F9); Abar and Pg come from chunk_intra.
//   grid: persistent; CTA b takes work item b, then whatever the queue counter gives. Not here: gates, the inverse, where segments are cut.
//
// Roles      warps        regs  owns                          per chunk
//   load     0            24    the item queue                lane 0 issues tensor loads (K, Q, V) and bulk loads (tiles, gate vectors)
//   tail     1-3          24    rows past a sequence's end    zeroes them in a last chunk's tiles; o of skipped sequences and past the last one
//   state    4-7, 8-11    240   S^T rows (64 x 128 fp32 each) (KS)^T | (QS)^T in one chain; R (F4); Delta (F5); E (F8); S (F9); O (F7)
//   With V-split there is one state warpgroup and no setmaxnreg.
//
// Edges            from -> to             count               guards
//   full[stages]   load or tail -> state  1 (+ tx)            the stage's tiles
//   empty[stages]  state -> load          state warpgroups    the same; O of the stage has been read out by its store
//   tail[stages]   load -> tail           1 + tx              tiles of a last chunk with rows to zero; the tail role then completes full
//   item_full[2]   load -> state, tail    1                   a work item's slot
//   item_empty[2]  state, tail -> load    warpgroups + 3      the same
//   turn[2]        state -> state         256 (named)         the tensor cores at the first product: the two take turns
// Written by ordinary stores and read by wgmma or a tensor store: proxy fence in every writing thread before its arrive.
//
// SMEM, a stage    KiB         KiB of the variant without output
//   K, Q           32          16   K rows then Q rows in each of two 64-column panels
//   V              8 or 16     8 or 16   O takes its place
//   Abar, Pg       16          8    panels laid under standing zeros (formats.hpp)
//   vectors        1           1    k_scale, q_scale, e_scale, gamma
//   x 3 stages: 195 or 171      x 5 or 6: 205 or 198
//
// Tail: rows past the end in a sequence's last chunk belong to others or are padding (NaN perhaps): zeroed in K, Q, V before use; tiles and vectors come zeroed from
// chunk_intra. Its O rows are stored one by one.
#pragma once

#include "cuda/kernels/forward/config.hpp"
#include "cuda/kernels/forward/variants.hpp"
#include "cuda/math/state_step.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/sync/ring.cuh"
#include "qla/qla.h"

namespace qla::cuda {

// A work item as its CTA sees it, in shared memory: WorkItem, completed by the load role.
struct ItemSlot {
  WorkItem item;         // chunks = 0 for a skipped sequence
  int32_t state_index;   // row of initial and final state
  int32_t skip_rows;     // rows of o to set to zero: a skipped sequence's
  int32_t row, batch;    // of the first token, in the maps' coordinates
  int32_t valid;         // 0: no more work
  int32_t reserved[3];
};
static_assert(sizeof(ItemSlot) == 96);

template <class Cfg>
struct ForwardSmem {
  uint32_t base;
  uint8_t* generic;
  __device__ __forceinline__ uint32_t stage(int s) const { return base + s * Cfg::kStageBytes; }
  __device__ __forceinline__ Edge<Cfg::kStages> tiles() const { return {base + Cfg::kOffBarriers}; }
  __device__ __forceinline__ Edge<Cfg::kItemSlots> items() const { return {base + Cfg::kOffBarriers + 16 * Cfg::kStages}; }
  __device__ __forceinline__ uint32_t tail(int s) const { return base + Cfg::kOffBarriers + 16 * (Cfg::kStages + Cfg::kItemSlots) + 8 * s; }
  __device__ __forceinline__ ItemSlot& slot(int s) const { return *reinterpret_cast<ItemSlot*>(generic + Cfg::kOffItems + s * Cfg::kItemBytes); }
};

inline constexpr int kTailThreads = 96;

// ---- load role: one thread
__device__ __forceinline__ void fetch_item(const ForwardArgs& a, ItemSlot& s, int index) {
  s.valid = index < a.p.plan->num_items;
  if (!s.valid) return;
  WorkItem it = a.p.items[index];
  int64_t state = it.sequence;
  s.skip_rows = 0;
  if (a.p.state_indices) {
    state = a.p.state_indices_dtype == QLA_INT64 ? static_cast<const int64_t*>(a.p.state_indices)[it.sequence]
                                                 : static_cast<const int32_t*>(a.p.state_indices)[it.sequence];
    if (state < 0) {
      s.skip_rows = it.chunks > it.warmup ? (it.chunks - it.warmup - 1) * 64 + it.last_rows : 0;
      it.token += int64_t(it.warmup) * 64;
      it.chunks = it.warmup = 0;
      it.last_rows = 64;
      it.is_last = 0;
      it.start = QLA_START_ZERO;
    }
  }
  if (it.start == QLA_START_INITIAL && (!a.p.initial_state.data || (a.p.has_initial_state && !a.p.has_initial_state[it.sequence]))) it.start = QLA_START_ZERO;
  s.item = it;
  s.state_index = int32_t(state);
  s.batch = int32_t(it.token / a.row_tokens);
  s.row = int32_t(it.token - s.batch * a.row_tokens);
}

template <class Cfg>
__device__ __forceinline__ void load_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm) {
  Ring<Cfg::kStages> ring;
  Ring<Cfg::kItemSlots> slots;
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  const int group = a.p.num_v_heads / a.p.num_k_heads;
  for (int index = blockIdx.x;;) {
    items.producer_wait(slots);
    ItemSlot& s = sm.slot(slots.stage);
    fetch_item(a, s, index);
    ptx::mbarrier_arrive(items.full(slots.stage));
    if (!s.valid) break;
    slots.advance();
    const int chunks = s.item.chunks, v_head = s.item.v_head, k_head = v_head / group, batch = s.batch, v_col = s.item.v_part * 64;
    const bool has_v = s.item.start != kStartIdentity;
    int row = s.row;
    int64_t record = int64_t(s.item.slot) * a.p.num_v_heads + v_head;
    for (int c = 0; c < chunks; c++, row += 64, record += a.p.num_v_heads) {
      tiles.producer_wait(ring);
      const uint32_t st = sm.stage(ring.stage), bar = c == chunks - 1 && s.item.last_rows != 64 ? sm.tail(ring.stage) : tiles.full(ring.stage);
      ptx::mbarrier_arrive_expect(bar, Cfg::kLoadBytes - (has_v ? 0 : Cfg::kVBytes));
#pragma unroll
      for (int p = 0; p < 2; p++) {
        ptx::tensor_load_4d(st + p * Cfg::kPanelBytes, &a.k, 64 * p, k_head, row, batch, bar);
        if constexpr (Cfg::kOutput) ptx::tensor_load_4d(st + p * Cfg::kPanelBytes + 8192, &a.q, 64 * p, k_head, row, batch, bar);
      }
      ptx::bulk_load(st + Cfg::kOffVec, a.p.vec + record * kVecFloats, kVecBytesForward, bar);
      if (has_v) {
#pragma unroll
        for (int p = 0; p < Cfg::kParts; p++) ptx::tensor_load_4d(st + Cfg::kOffV + p * 8192, &a.v, v_col + 64 * p, v_head, row, batch, bar);
      }
#pragma unroll
      for (int w = 0; w < 4; w++) {
        ptx::bulk_load(st + Cfg::kOffA + 2560 * w, a.p.abar + record * kTileBytes + panel_offset(w), panel_bytes(w), bar);
        if constexpr (Cfg::kOutput) ptx::bulk_load(st + Cfg::kOffP + 2560 * w, a.p.pg + record * kTileBytes + panel_offset(w), panel_bytes(w), bar);
      }
      ring.advance();
    }
    index = gridDim.x + atomicAdd(&a.p.plan->next_item, 1);
  }
}

// ---- tail role: three warps
__device__ __forceinline__ void zero_output(const ForwardArgs& a, int batch, int row, int v_head, int col, int cols16, int lane, int lanes) {
  char* o = static_cast<char*>(const_cast<void*>(a.p.o.data)) + 2 * (batch * a.p.o.stride_b + row * a.p.o.stride_t + v_head * a.p.o.stride_h + col);
  for (int i = lane; i < cols16; i += lanes) *reinterpret_cast<uint4*>(o + 16 * i) = make_uint4(0, 0, 0, 0);
}

template <class Cfg>
__device__ __forceinline__ void tail_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm, int tid) {
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  if constexpr (Cfg::kOutput) {  // tokens after the last sequence
    const int64_t heads = a.p.num_v_heads, end = a.p.plan->end_token * heads, rows = a.p.batch * a.p.tokens * heads;
    for (int64_t r = end + blockIdx.x * 3 + tid / 32; r < rows; r += gridDim.x * 3) {
      const int64_t token = r / heads, batch = token / a.row_tokens;
      zero_output(a, int(batch), int(token - batch * a.row_tokens), int(r - token * heads), 0, 16, tid % 32, 32);
    }
  }
  Ring<Cfg::kItemSlots> slots;
  uint32_t walked = 0;  // chunks
  uint32_t phases = 0;  // parity of tail[stage], a bit each: it advances only in that stage's tails
  for (;;) {
    items.consumer_wait(slots);
    const ItemSlot& s = sm.slot(slots.stage);
    if (!s.valid) break;
    const int chunks = s.item.chunks, rows = s.item.last_rows;
    if constexpr (Cfg::kOutput) {
      for (int r = tid / 8; r < s.skip_rows; r += kTailThreads / 8) zero_output(a, s.batch, s.row + r, s.item.v_head, s.item.v_part * 64, 8 * Cfg::kParts, tid % 8, 8);
    }
    __syncwarp();
    if (tid % 32 == 0) items.release(slots);
    slots.advance();
    walked += chunks;
    if (chunks == 0 || rows == 64) continue;
    const int stage = (walked - 1) % Cfg::kStages;
    const uint32_t st = sm.stage(stage);
    ptx::mbarrier_wait(sm.tail(stage), phases >> stage & 1);
    phases ^= 1u << stage;
    // K (and Q) panels and V panels are all runs of 64 rows of 128 bytes
    constexpr int kRuns = (Cfg::kKqBytes + Cfg::kVBytes) / 8192;
    const int piece = (64 - rows) * 8;
    for (int i = tid; i < kRuns * piece; i += kTailThreads) ptx::sts4u(st + i / piece * 8192 + rows * 128 + i % piece * 16, 0, 0, 0, 0);
    ptx::proxy_fence();
    ptx::named_sync(1, kTailThreads);
    if (tid == 0) ptx::mbarrier_arrive(tiles.full(stage));
  }
}

// ---- state role
// O^T of this warpgroup's 64 value columns, already in V's place, to global memory: whole chunk by tensor store, a tail row by row
template <class Cfg>
__device__ __forceinline__ void store_output(const ForwardArgs& a, uint32_t tile, int col, int v_head, int row, int batch, int rows, int tid, int barrier) {
  ptx::proxy_fence();
  ptx::named_sync(barrier, 128);
  if (rows == 64) {
    if (tid == 0) {
      ptx::tensor_store_4d(&a.o, col, v_head, row, batch, tile);
      ptx::bulk_commit();
    }
  } else {
    char* o = static_cast<char*>(const_cast<void*>(a.p.o.data)) + 2 * (batch * a.p.o.stride_b + row * a.p.o.stride_t + v_head * a.p.o.stride_h + col);
#pragma unroll 1
    for (int r = tid / 8; r < rows; r += 16) *reinterpret_cast<uint4*>(o + 2 * r * a.p.o.stride_t + tid % 8 * 16) = ptx::lds4u(tile + swizzle_128(r * 128 + tid % 8 * 16));
    ptx::named_sync(barrier, 128);
  }
}

template <class Cfg, class Mma>
__device__ __forceinline__ void state_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm, int part) {
  using T = typename Mma::Element;
  const int tid = threadIdx.x % 128, lane = tid % 32, warp = tid / 32;
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  constexpr bool kTurns = Cfg::kParts == 2;
  auto take_turn = [&] { if (kTurns) ptx::named_sync(4 + part, 256); };
  auto pass_turn = [&] { if (kTurns) ptx::named_arrive(5 - part, 256); };
  const int sync_id = 2 + part;
  const uint32_t v_lane = transposed_lane(Cfg::kOffV + part * 8192, 0, warp * 16, 64, lane);  // this lane's row of V and O; 16 tokens further: + 2,048
  Ring<Cfg::kStages> ring;
  Ring<Cfg::kItemSlots> slots;
  int pending = -1;  // the stage walked last, not yet handed back
  auto hand_back = [&] {
    if (pending >= 0 && tid == 0) {
      ptx::bulk_wait_read();
      ptx::mbarrier_arrive(tiles.empty(pending));
    }
    pending = -1;
  };
  if (part == 1) pass_turn();
  float S[64];
  for (;;) {
    items.consumer_wait(slots);
    const ItemSlot& slot = sm.slot(slots.stage);
    if (!slot.valid) break;
    const int chunks = slot.item.chunks, warmup = slot.item.warmup, v_head = slot.item.v_head;
    const int v_col = slot.item.v_part * 64 + part * 64;                // of the warpgroup
    const bool zero_v = !Cfg::kOutput && slot.item.start == kStartIdentity;
    {
      const int start = slot.item.start, v0 = v_col + warp * 16;
      if (start == QLA_START_INITIAL) {
        const StateView& x = a.p.initial_state;
        const int64_t bytes = x.dtype == QLA_FLOAT64 ? 8 : x.dtype == QLA_FLOAT32 ? 4 : 2;
        load_state(S, {static_cast<char*>(x.data) + bytes * (slot.state_index * x.stride_n + v_head * x.stride_h), x.dtype, x.stride_k, x.stride_v}, v0, lane);
      } else if (start == QLA_START_MERGED) {
        load_state_as<float>(S, {const_cast<float*>(a.p.merged) + int64_t(slot.item.start_index) * 16384, QLA_FLOAT32, 1, 128}, v0, lane);
      } else {
#pragma unroll
        for (int i = 0; i < 64; i++) {
          const int v = v0 + lane / 4 + i % 4 / 2 * 8, k = i / 4 * 8 + lane % 4 * 2 + i % 2;
          S[i] = start == kStartIdentity && v == k ? 1.f : 0.f;
        }
      }
    }
    int row = slot.row;
#pragma unroll 1
    for (int c = 0;; c++, row += 64) {
      // S is the state before chunk c: snapshot, checkpoint, final state. One copy of the stores for all.
#pragma unroll 1
      for (int target = 0; target < 3; target++) {
        StateView x;
        int64_t index = 0;
        if (target == 0) {
          x = a.p.h;
          index = slot.item.chunk_base + slot.item.first_chunk + c;
          if (c < warmup || c == chunks) continue;
        } else if (target == 1) {
          x = a.p.checkpoints;
          const int done = slot.item.first_chunk + c;
          if (!x.data || c <= warmup || done % a.p.checkpoint_every_chunks != 0 || (c == chunks && slot.item.last_rows != 64)) continue;
          index = slot.item.checkpoint_base + done / a.p.checkpoint_every_chunks - 1;
        } else {
          if (c != chunks) continue;
          if (Cfg::kOutput) {
            x = a.p.final_state;
            if (!slot.item.is_last) continue;
            index = slot.state_index;
          } else {
            x = {a.p.end_states, QLA_FLOAT32, 16384, 0, 1, 128};
            index = slot.item.start_index;
          }
        }
        if (!x.data) continue;
        const int64_t bytes = x.dtype == QLA_FLOAT64 ? 8 : x.dtype == QLA_FLOAT32 ? 4 : 2;
        store_state(S, {static_cast<char*>(x.data) + bytes * (index * x.stride_n + v_head * x.stride_h), x.dtype, x.stride_k, x.stride_v}, v_col + warp * 16, lane);
      }
      if (c == chunks) break;

      const int rows = c == chunks - 1 ? slot.item.last_rows : 64;
      const uint32_t st = sm.stage(ring.stage), vec = st + Cfg::kOffVec;
      tiles.consumer_wait(ring);
      uint32_t sf[32];
      pack_operand<T>(sf, S);
      const float gamma_c = ptx::lds(vec + (kVecGamma + 63) * 4);
#pragma unroll
      for (int i = 0; i < 64; i++) S[i] *= gamma_c;  // (F9) before any product is issued
      float acc[Cfg::kOutput ? 64 : 32], delta[32], out[32];
      take_turn();
      Mma::begin();
      if constexpr (Cfg::kOutput) Mma::state_kq(acc, sf, st);
      else Mma::state_k(acc, sf, st);
      Mma::commit();
      uint32_t vt[16];
#pragma unroll
      for (int j = 0; j < 4; j++) ptx::ldmatrix_x4_trans(st + v_lane + 2048 * j, vt[4 * j], vt[4 * j + 1], vt[4 * j + 2], vt[4 * j + 3]);
      if (zero_v) {
#pragma unroll
        for (int i = 0; i < 16; i++) vt[i] = 0;
      }
      Mma::wait();
      pass_turn();
      uint32_t rf[16];
      residual<T>(rf, vt, acc, vec_lane(vec, kVecK, lane));  // (F4)
      Mma::begin();
      Mma::template triangular<0>(delta, rf, st + Cfg::kOffA);  // (F5) Delta^T = R^T Abar^T
      Mma::commit();
      float2 scale[8];
      if constexpr (Cfg::kOutput) {
        load_columns(scale, vec_lane(vec, kVecQ, lane));
#pragma unroll
        for (int n = 0; n < 8; n++) {  // (F7) first term
          out[4 * n] = acc[32 + 4 * n] * scale[n].x;
          out[4 * n + 1] = acc[33 + 4 * n] * scale[n].y;
          out[4 * n + 2] = acc[34 + 4 * n] * scale[n].x;
          out[4 * n + 3] = acc[35 + 4 * n] * scale[n].y;
        }
        ptx::pin(out);
      }
      load_columns(scale, vec_lane(vec, kVecE, lane));
      Mma::wait();
      uint32_t df[16], ef[16];
      tail_scaled<T>(ef, delta, scale);  // (F8)
      if constexpr (Cfg::kOutput) pack_operand<T>(df, delta);
      Mma::begin();
      Mma::template update<Cfg::kPanelBytes>(S, ef, st);                                       // (F9) S^T += E^T K
      if constexpr (Cfg::kOutput) Mma::template triangular<1>(out, df, st + Cfg::kOffP);       // (F7) O^T += Delta^T Pg^T
      Mma::commit();
      hand_back();  // the store of the chunk before has left its stage by now
      Mma::wait();
      if constexpr (Cfg::kOutput) {
        uint32_t of[16];
        pack_operand<T>(of, out);
        if (c >= warmup) {
#pragma unroll
          for (int j = 0; j < 4; j++) ptx::stmatrix_x4_trans(st + v_lane + 2048 * j, of[4 * j], of[4 * j + 1], of[4 * j + 2], of[4 * j + 3]);
          store_output<Cfg>(a, st + Cfg::kOffV + part * 8192, v_col, v_head, row, slot.batch, rows, tid, sync_id);
        } else {
          ptx::named_sync(sync_id, 128);
        }
      } else {
        ptx::named_sync(sync_id, 128);
      }
      pending = ring.stage;
      ring.advance();
    }
    hand_back();
    ptx::named_sync(sync_id, 128);
    if (tid == 0) items.release(slots);
    slots.advance();
  }
  if (part == 0) take_turn();
  ptx::bulk_wait();
}

template <class Cfg, class Mma>
__global__ void __launch_bounds__(Cfg::kThreads, 1) gdn_forward(const __grid_constant__ ForwardArgs a) {
  extern __shared__ uint8_t smem[];
  ForwardSmem<Cfg> sm;
  sm.base = (ptx::shared_address(smem) + 1023) & ~1023u;
  sm.generic = smem + (sm.base - ptx::shared_address(smem));
  if (threadIdx.x == 0) {
    sm.tiles().init(1, Cfg::kParts);
    sm.items().init(1, Cfg::kParts + 3);
    for (int s = 0; s < Cfg::kStages; s++) ptx::mbarrier_init(sm.tail(s), 1);
    ptx::mbarrier_init_fence();
  }
  // zeros that stay: what Abar's and Pg's panels leave free in their tiles
  constexpr int kTilePieces = (Cfg::kOffVec - Cfg::kOffA) / 16;
  for (int i = threadIdx.x; i < Cfg::kStages * kTilePieces; i += Cfg::kThreads) ptx::sts4u(sm.stage(i / kTilePieces) + Cfg::kOffA + i % kTilePieces * 16, 0, 0, 0, 0);
  ptx::proxy_fence();
  __syncthreads();
  ptx::grid_dependency_wait();
  if (threadIdx.x < 128) {
    if constexpr (Cfg::kParts == 2) ptx::setmaxnreg_dec<Cfg::kRegsLoad>();
    if (threadIdx.x == 0) load_role(a, sm);
    else if (threadIdx.x >= 32) tail_role(a, sm, threadIdx.x - 32);
  } else {
    if constexpr (Cfg::kParts == 2) ptx::setmaxnreg_inc<Cfg::kRegsState>();
    state_role<Cfg, Mma>(a, sm, threadIdx.x / 128 - 1);
  }
}

}  // namespace qla::cuda
