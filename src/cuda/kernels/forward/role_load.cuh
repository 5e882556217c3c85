// The forward kernel's load role, and its helpers: rows past a sequence's end, zero outputs.
#pragma once

#include "cuda/kernels/forward/smem.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda {

// Helper warps: 1 .. kParts store O of one state warpgroup each (or idle, without output), the last one, 3, does what else there
// is.
inline constexpr int kHelperWarp = 3;

// ---- load role: one thread; waits: not all that it reads was there when this kernel began
__device__ __forceinline__ void fetch_item(const ForwardArgs& a, ItemSlot& s, int index) {
  WorkItem it{};
  if (index < a.p.max_items) {  // on its way together with the number of items
    const int4* from = reinterpret_cast<const int4*>(a.p.items + index);
#pragma unroll
    for (int w = 0; w < 4; w++) reinterpret_cast<int4*>(&it)[w] = __ldcg(from + w);
  }
  // Past L1: beside merges this grid has waited for nothing; what it reads was complete before the grid before it began.
  s.valid = index < ptx::load_relaxed(&a.p.plan->num_items);
  if (!s.valid) return;
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
  if (it.start == QLA_START_INITIAL &&
      (!a.p.initial_state.data || (a.p.has_initial_state && !a.p.has_initial_state[it.sequence])))
    it.start = QLA_START_ZERO;
  s.item = it;
  s.state_index = int32_t(state);
  s.batch = a.p.batch == 1 ? 0 : int32_t(it.token / a.row_tokens);
  s.row = int32_t(it.token - s.batch * a.row_tokens);
}

template <class Cfg>
__device__ __forceinline__ void load_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm, bool waits) {
  Ring<Cfg::kStages> ring;
  Ring<Cfg::kItemSlots> slots;
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  const int group = a.p.num_v_heads / a.p.num_k_heads;
  if (a.p.rehearse) {
    ring.advance();
    slots.advance();
  }
  if (waits) ptx::grid_dependency_wait();
  if constexpr (!Cfg::kOutput) ptx::grid_dependency_launch();
  for (int index = blockIdx.x;;) {
    items.producer_wait(slots);
    ItemSlot& s = sm.slot(slots.stage);
    fetch_item(a, s, index);
    ptx::mbarrier_arrive(items.full(slots.stage));
    if (!s.valid) break;
    slots.advance();
    const int chunks = s.item.chunks, v_head = s.item.v_head, k_head = v_head / group, batch = s.batch,
              v_col = s.item.v_part * 64;
    const bool has_v = s.item.start != kStartIdentity;
    int row = s.row;
    int64_t record = int64_t(s.item.slot) * a.p.num_v_heads + v_head;
    for (int c = 0; c < chunks; c++, row += 64, record += a.p.num_v_heads) {
      tiles.producer_wait(ring);
      const bool raw = c == chunks - 1 && s.item.last_rows != 64;
      const uint32_t st = sm.stage(ring.stage), bar = raw ? sm.raw(ring.stage) : tiles.full(ring.stage);
      ptx::mbarrier_arrive_expect(bar, Cfg::kLoadBytes - (has_v ? 0 : Cfg::kVBytes));
#pragma unroll
      for (int p = 0; p < 2; p++) {
        ptx::tensor_load_4d(st + p * Cfg::kPanelBytes, &a.k, 64 * p, k_head, row, batch, bar);
        if constexpr (Cfg::kOutput) ptx::tensor_load_4d(st + p * Cfg::kPanelBytes + 8192, &a.q, 64 * p, k_head, row, batch, bar);
      }
      ptx::bulk_load(st + Cfg::kOffVec, a.p.vec + record * kVecFloats, kVecBytesForward, bar);
      if (has_v) {
#pragma unroll
        for (int p = 0; p < Cfg::kParts; p++)
          ptx::tensor_load_4d(st + Cfg::kOffV + p * 8192, &a.v, v_col + 64 * p, v_head, row, batch, bar);
      }
#pragma unroll
      for (int w = 0; w < 4; w++) {
        ptx::bulk_load(st + Cfg::kOffA + 2560 * w, a.p.abar + record * kTileBytes + panel_offset(w), panel_bytes(w), bar);
        if constexpr (Cfg::kOutput)
          ptx::bulk_load(st + Cfg::kOffP + 2560 * w, a.p.pg + record * kTileBytes + panel_offset(w), panel_bytes(w), bar);
      }
      ring.advance();
    }
    index = gridDim.x + atomicAdd(&a.p.plan->next_item, 1);
  }
}

// ---- helpers
__device__ __forceinline__ void zero_output(const ForwardArgs& a, int batch, int row, int v_head, int col, int cols16, int lane,
                                            int lanes) {
  char* o = static_cast<char*>(const_cast<void*>(a.p.o.data)) +
            2 * (batch * a.p.o.stride_b + row * a.p.o.stride_t + v_head * a.p.o.stride_h + col);
  for (int i = lane; i < cols16; i += lanes) *reinterpret_cast<uint4*>(o + 16 * i) = make_uint4(0, 0, 0, 0);
}

// O^T of a state warpgroup's 64 value columns, in V's place, to global memory: a whole chunk by tensor store, a tail row by row.
// Then the stage is handed back.
template <class Cfg>
__device__ __forceinline__ void store_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm, int part, int lane) {
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  Ring<Cfg::kStages> ring;
  Ring<Cfg::kItemSlots> slots;
  for (;;) {
    items.consumer_wait(slots);
    const uint32_t item = sm.slot_address(slots.stage);
    if (!slot::valid(item)) break;
    const int chunks = slot::chunks(item), warmup = slot::warmup(item), v_head = slot::v_head(item), batch = slot::batch(item),
              col = slot::v_part(item) * 64 + part * 64;
    int row = slot::row(item);
#pragma unroll 1
    for (int c = 0; c < chunks; c++, row += 64) {
      ptx::mbarrier_wait(sm.out_full(part, ring.stage), ring.phase);
      __syncwarp();  // no lane still waits for this phase when lane 0 lets the stage's next one come: it would miss both
      const uint32_t tile = sm.stage(ring.stage) + Cfg::kOffV + part * 8192;
      const int rows = c == chunks - 1 ? slot::last_rows(item) : 64;
      if (c >= warmup && rows != 64) {
        char* o = static_cast<char*>(const_cast<void*>(a.p.o.data)) +
                  2 * (batch * a.p.o.stride_b + row * a.p.o.stride_t + v_head * a.p.o.stride_h + col);
#pragma unroll 1
        for (int r = lane / 8; r < rows; r += 4)
          *reinterpret_cast<uint4*>(o + 2 * r * a.p.o.stride_t + lane % 8 * 16) =
              ptx::lds4u(tile + swizzle_128(r * 128 + lane % 8 * 16));
        __syncwarp();
      }
      if (lane == 0) {
        if (c >= warmup && rows == 64) {
          ptx::tensor_store_4d(&a.o, col, v_head, row, batch, tile);
          ptx::bulk_commit();
          ptx::bulk_wait_read();
        }
        tiles.release(ring);
      }
      ring.advance();
    }
    __syncwarp();
    if (lane == 0) items.release(slots);
    slots.advance();
  }
  if (lane == 0) ptx::bulk_wait();
}

// rows past the chunk's end: K (and Q) panels and V panels are all runs of 64 rows of 128 bytes
template <class Cfg>
__device__ __forceinline__ void zero_rows(uint32_t stage, int rows, int lane) {
  constexpr int kRuns = (Cfg::kKqBytes + Cfg::kVBytes) / 8192;
  const int piece = (64 - rows) * 8;
  for (int i = lane; i < kRuns * piece; i += 32) ptx::sts4u(stage + i / piece * 8192 + rows * 128 + i % piece * 16, 0, 0, 0, 0);
  ptx::proxy_fence();
}

template <class Cfg>
__device__ __forceinline__ void helper_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm, int lane, bool waits) {
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  if constexpr (Cfg::kOutput) {  // tokens after the last sequence
    if (waits) ptx::grid_dependency_wait();
    const int64_t heads = a.p.num_v_heads, end = ptx::load_relaxed(&a.p.plan->end_token) * heads,
                  rows = a.p.batch * a.p.tokens * heads;
    for (int64_t r = end + blockIdx.x; r < rows; r += gridDim.x) {
      const int64_t token = r / heads, batch = token / a.row_tokens;
      zero_output(a, int(batch), int(token - batch * a.row_tokens), int(r - token * heads), 0, 16, lane, 32);
    }
  }
  Ring<Cfg::kItemSlots> slots;
  uint32_t walked = 0;  // chunks
  uint32_t phases = 0;  // parity of raw[stage], a bit each: it advances only in that stage's tails
  for (;;) {
    items.consumer_wait(slots);
    const ItemSlot& s = sm.slot(slots.stage);
    if (!s.valid) break;
    const int chunks = s.item.chunks, rows = s.item.last_rows;
    if constexpr (Cfg::kOutput) {
      for (int r = lane / 8; r < s.skip_rows; r += 4)
        zero_output(a, s.batch, s.row + r, s.item.v_head, s.item.v_part * 64, 8 * Cfg::kParts, lane % 8, 8);
    }
    __syncwarp();
    if (lane == 0) items.release(slots);
    slots.advance();
    walked += chunks;
    if (chunks == 0 || rows == 64) continue;
    const int stage = (walked - 1) % Cfg::kStages;
    ptx::mbarrier_wait(sm.raw(stage), phases >> stage & 1);
    phases ^= 1u << stage;
    zero_rows<Cfg>(sm.stage(stage), rows, lane);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(tiles.full(stage));
  }
}

}  // namespace qla::cuda
