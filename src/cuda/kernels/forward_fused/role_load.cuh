// The fused forward's load warp and its helpers, in 24 registers: an item's fields are read where they are used, where that is
// once an item; what the load thread needs between a stage's release and its loads is in registers and advances by a stride.
#pragma once

#include "cuda/kernels/forward_fused/direct.cuh"
#include "cuda/kernels/forward_fused/smem.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda {

// ---- load: one thread
// An item's slot, completed by what only the device knows (as fetch_item() in forward/role_load.cuh). False: no more work.
template <bool Cut>
__device__ __forceinline__ bool fetch_fused_item(const FusedArgs& a, const FusedSmem& sm, uint32_t slot, int index) {
  if (index < a.p.max_items && (Cut || !a.direct)) {  // beside the load of num_items, and not through registers
    const uint4* from = reinterpret_cast<const uint4*>(a.p.items + index);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (Cut)  // beside merges this grid has waited for nothing
        ptx::cp_async_past_l1(slot + 16 * i, from + i);
      else
        ptx::cp_async<16>(slot + 16 * i, from + i);
    }
  }
  // Cut: past L1; the kernel before let this one begin when it had waited for the list.
  bool valid = !Cut && a.direct ? direct_place(index) < a.p.max_items
                                : index < (Cut ? ptx::load_relaxed(&a.p.plan->num_items) : a.p.plan->num_items);
  const bool some = Cut && a.p.again && a.p.cut_header->cut;
  if (some) valid = valid && a.p.cut_header->distrusted;
  put_field(slot, offsetof(ItemSlot, valid), valid);
  ptx::cp_async_wait_all();
  if (!valid) return false;
  if (!Cut && a.direct) put_direct_item(a, sm, slot, index);
  const int sequence = slot::sequence(slot);
  int state = sequence, skip_rows = 0;
  if (some && !(a.p.heads[int64_t(sequence) * a.p.num_v_heads + slot::v_head(slot)] & kHeadDistrusted)) {
    put_field(slot, offsetof(ItemSlot, item.chunks), 0);
    put_field(slot, offsetof(ItemSlot, item.is_last), 0);
    put_field(slot, offsetof(ItemSlot, item.start), QLA_START_ZERO);
  }
  if (a.p.state_indices) {
    state = a.p.state_indices_dtype == QLA_INT64 ? int(static_cast<const int64_t*>(a.p.state_indices)[sequence])
                                                 : static_cast<const int32_t*>(a.p.state_indices)[sequence];
    if (state < 0) {
      const int warmup = Cut ? slot::warmup(slot) : 0, own = slot::chunks(slot) - warmup;
      skip_rows = own > 0 ? (own - 1) * 64 + slot::last_rows(slot) : 0;
      if (Cut) put_field(slot, offsetof(ItemSlot, item.token), slot::token(slot) + 64 * warmup);
      put_field(slot, offsetof(ItemSlot, item.chunks), 0);
      put_field(slot, offsetof(ItemSlot, item.is_last), 0);
      put_field(slot, offsetof(ItemSlot, item.start), QLA_START_ZERO);
    }
  }
  if (slot::start(slot) == QLA_START_INITIAL &&
      (!a.p.initial_state.data || (a.p.has_initial_state && !a.p.has_initial_state[sequence])))
    put_field(slot, offsetof(ItemSlot, item.start), QLA_START_ZERO);
  const int batch = a.p.batch > 1 ? sequence : 0;  // dense input: a sequence is a batch row
  put_field(slot, offsetof(ItemSlot, state_index), state);
  put_field(slot, offsetof(ItemSlot, skip_rows), skip_rows);
  put_field(slot, offsetof(ItemSlot, batch), batch);
  put_field(slot, offsetof(ItemSlot, row), slot::token(slot) - batch * int(a.row_tokens));
  return true;
}

template <bool Save>
inline constexpr int kRecordFloats = Save ? kVecFloats : kFusedVecFloats;
template <bool Save>
__device__ __forceinline__ const float* first_record(const FusedArgs& a, uint32_t item) {
  return a.p.vec + (Save ? kFusedInRecord : 0) +
         (int64_t(slot::chunk_slot(item)) * a.p.num_v_heads + slot::v_head(item)) * kRecordFloats<Save>;
}
// The grid's size is read here and not kept.
__device__ __forceinline__ int next_index(const FusedArgs& a) {
  int grid;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(grid));
  return grid + atomicAdd(&a.p.plan->next_item, 1);
}
// Balanced: where the next share begins (plan_segments/balanced.cuh). The counter begins at minus the grid's size.
__device__ __forceinline__ int next_share(const FusedArgs& a) {
  for (;;) {
    const int share = next_index(a);
    if (share >= a.p.shares) return INT32_MAX;
    const int index = a.p.part_flags[a.p.shares + share];
    if (index != INT32_MAX) return index;
  }
}
// What a CTA asks for first. All begin at once, and memory would deliver last what each of them needs first: so the second chunk
// is not asked for before the first one is there, the third one, in whose place the initial state comes, not before that has been
// taken and the first Abar is there. In a direct launch the gate vectors are still being made; those of the first three chunks go
// straight to their stages.
// kBegun: the first item's slot is written, its first tiles are asked for.
enum LoadStep { kBegun = -1, kFirstChunk, kSecondChunk, kThirdChunk, kAnyChunk };
__device__ __forceinline__ const float* initial_state(const FusedArgs& a, uint32_t item) {
  const StateView& x = a.p.initial_state;
  return static_cast<const float*>(x.data) + slot::state_index(item) * x.stride_n + slot::v_head(item) * x.stride_h;
}
// The first item's comes by two copies, if it lies in one piece; behind the first tiles.
__device__ __forceinline__ void copy_first_state(const FusedArgs& a, const FusedSmem& sm, uint32_t item) {
  using Cfg = FusedConfig;
  ptx::mbarrier_arrive_expect(sm.state_full(), 2 * 64 * 4 * Cfg::state_pitch(a.p.initial_state.stride_k == 1));
#pragma unroll
  for (int half = 0; half < 2; half++)
    ptx::tensor_load_4d(sm.first_state(half), &a.state, 0, 64 * half, slot::v_head(item), slot::state_index(item),
                        sm.state_full());
}
// A direct launch's first item by the whole warp: its first tiles as soon as the boundaries are known, and its slot. None of the
// code is in the instruction cache, so there is little of it: a lane has a copy each.
__device__ __forceinline__ LoadStep begin_direct(const FusedArgs& a, const FusedSmem& sm, int lane) {
  const DirectItem item = direct_item(a, sm, 0);
  const DirectSpan span = direct_span(a, item.sequence);
  if (span.rows == 0) return kFirstChunk;
  const int batch = a.p.batch > 1 ? item.sequence : 0, row = span.bos - batch * int(a.row_tokens);
  const bool raw = span.rows < 64;
  const uint32_t tiles = raw ? sm.raw_tiles(0) : sm.tiles().full(0), values = raw ? sm.raw_values(0) : sm.values().full(0);
  if (lane == 0) {
    ptx::mbarrier_arrive_expect(tiles, FusedConfig::kKqBytes);
    ptx::mbarrier_arrive_expect(values, FusedConfig::kVBytes);
  }
  __syncwarp();
  const int which = lane / 2, p = lane % 2;  // K's panels, those of Q's first and second half, V's
  const CUtensorMap* map = which == 0 ? &a.k : which == 3 ? &a.v : &a.q;
  const uint32_t to = which == 3 ? sm.v_stage(0) + p * 8192
                                 : sm.stage(0) + p * FusedConfig::kPanelBytes +
                                       (which == 0   ? FusedConfig::kOffK
                                        : which == 1 ? 0
                                                     : FusedConfig::query_row(32));
  if (lane < 8)
    ptx::tensor_load_4d(to, map, 64 * p, which == 3 ? item.v_head : divided(item.v_head, a.by_group), row + (which == 2 ? 32 : 0),
                        batch, which == 3 ? values : tiles);
  if (lane == 0) {
    put_first_slot(a, sm.slot_address(0), item, span, batch, row);
    ptx::mbarrier_arrive(sm.items().full(0));
  }
  return kBegun;
}
template <bool Save, bool Cut>
__device__ __forceinline__ void fused_load_role(const FusedArgs& a, const FusedSmem& sm, int step) {
  using Cfg = FusedConfig;
  const auto tiles = sm.tiles();
  const auto values = sm.values();
  int s = 0;
  uint32_t phase = 1;  // of the empty barriers: the first round passes
  uint32_t taken = 0;
  for (int index = !Cut && a.p.shares ? next_share(a) : !Cut && a.direct ? 0 : blockIdx.x;;) {  // direct: of the CTA's
    const uint32_t item = sm.slot_address(taken & 1);
    if (Cut || step != kBegun) {
      ptx::mbarrier_wait(sm.items().empty(taken & 1), (taken >> 1 & 1) ^ 1);
      const bool valid = fetch_fused_item<Cut>(a, sm, item, index);
      const bool whole = valid && slot::start(item) == QLA_START_INITIAL && a.first_state == kStateInOnePiece;
      put_field(item, offsetof(ItemSlot, first), taken > 0 ? 0 : whole && slot::chunks(item) > 0 ? kFirstByCopy : kFirst);
      if (taken > 0 && whole)
        ptx::bulk_prefetch(initial_state(a, item), 4 * kStateFloats);  // the states load it themselves, some chunks from now
      ptx::mbarrier_arrive(sm.items().full(taken & 1));
      if (!valid) break;
    }
    taken++;
    const int v_head = slot::v_head(item), k_head = divided(v_head, a.by_group), batch = slot::batch(item);
    const float* record = first_record<Save>(a, item);
    int row = slot::row(item);
#pragma unroll 1
    for (int left = slot::chunks(item); left > 0; left--) {
      const bool raw = left == 1 && slot::last_rows(item) != 64;
      const bool quiet = Cut && left > slot::chunks(item) - slot::warmup(item);
      if (step == kSecondChunk) ptx::mbarrier_wait(tiles.full(0), 0);
      if (step == kSecondChunk && slot::first(sm.slot_address(0)) == kFirstByCopy) ptx::mbarrier_wait(sm.state_full(), 0);
      if (step == kThirdChunk) {
        // cut: not where nothing was copied, a merged start is late (the CTA's first item is in slot 0, or all had done with it)
        if (!Cut || slot::first(sm.slot_address(0)) == kFirstByCopy) ptx::mbarrier_wait(sm.state_taken(), 0);
        ptx::mbarrier_wait(sm.pairs().full(0), 0);
      }
      const bool by_states = !Cut && a.direct && taken == 1 && step <= kThirdChunk;
      if (!Cut && a.direct && !by_states) ptx::mbarrier_wait(sm.gates_ready(), 0);
      // Begun: not a wait that would pass at once, either. All others may have done with the stage before this thread is here,
      // and then what it looks for has come and gone.
      if (Cut || step != kBegun) {
        ptx::mbarrier_wait(tiles.empty(s), phase);
        const uint32_t st = sm.stage(s), bar = raw ? sm.raw_tiles(s) : tiles.full(s);
        ptx::mbarrier_arrive_expect(bar, (quiet ? Cfg::kKqBytes / 2 : Cfg::kKqBytes) + (by_states ? 0 : 4 * kFusedVecFloats));
#pragma unroll
        for (int p = 0; p < 2; p++) {
          const uint32_t panel = st + p * Cfg::kPanelBytes;
          ptx::tensor_load_4d(panel + Cfg::kOffK, &a.k, 64 * p, k_head, row, batch, bar);
          if (quiet) continue;
          ptx::tensor_load_4d(panel, &a.q, 64 * p, k_head, row, batch, bar);
          ptx::tensor_load_4d(panel + Cfg::query_row(32), &a.q, 64 * p, k_head, row + 32, batch, bar);
        }
        if (!by_states) ptx::bulk_load(st + Cfg::kOffVec, record, 4 * kFusedVecFloats, bar);
      }
      if (Cut || step != kBegun) {
        ptx::mbarrier_wait(values.empty(s), phase);
        const uint32_t v = sm.v_stage(s), bar = raw ? sm.raw_values(s) : values.full(s);
        ptx::mbarrier_arrive_expect(bar, Cfg::kVBytes);
#pragma unroll
        for (int p = 0; p < 2; p++) ptx::tensor_load_4d(v + p * 8192, &a.v, 64 * p, v_head, row, batch, bar);
      }
      if (step <= kFirstChunk && slot::first(item) == kFirstByCopy) {
        if (!Cut && a.direct) ptx::mbarrier_wait(sm.first_gates(), 0);  // raw gates are few bytes: not behind these
        copy_first_state(a, sm, item);
      }
      row += 64;
      record += a.p.num_v_heads * kRecordFloats<Save>;
      if (++s == Cfg::kStages) s = 0, phase ^= 1;
      step = min((Cut ? step : max(step, int(kFirstChunk))) + 1, int(kAnyChunk));
    }
    if (!Cut && a.p.shares) {
      index = slot::segment(item);
      if (index == INT32_MAX) index = next_share(a);
    } else {
      index = !Cut && a.direct ? int(taken) : next_index(a);
    }
  }
  if (!a.p.asks) ptx::grid_dependency_launch();  // a call that comes next sets itself up, and waits
}

// ---- store: O^T of a state warpgroup's 64 value columns, in V's place, to global memory: a whole chunk by tensor store, a tail
// row by row. Then V's stage is handed back.
__device__ __forceinline__ void store_tail(const ForwardArgs& a, uint32_t item, uint32_t tile, int row, int col, int lane) {
  const int64_t at = slot::batch(item) * a.p.o.stride_b + (row + lane / 8) * a.p.o.stride_t + slot::v_head(item) * a.p.o.stride_h;
  char* o = static_cast<char*>(const_cast<void*>(a.p.o.data)) + 2 * (at + col) + lane % 8 * 16;
#pragma unroll 1
  for (int r = lane / 8; r < slot::last_rows(item); r += 4, o += 8 * a.p.o.stride_t)
    *reinterpret_cast<uint4*>(o) = ptx::lds4u(tile + swizzle_128(r * 128 + lane % 8 * 16));
}
// What backward reads of the chunk at hand, before its O: Abar's panels by the first store warp; by the second, where norms have
// changed them, the vectors. Pair and stage are handed back when they have been read, long before the states are done with them.
template <bool Norm>
__device__ __forceinline__ void save_chunk(const ForwardArgs& a, const FusedSmem& sm, const FusedWalk& walk, int part) {
  ptx::mbarrier_wait(sm.pairs().full(walk.pair()), walk.pair_phase());
  const uint32_t item = sm.slot_address(walk.slot());
  const int64_t index = int64_t(slot::chunk_slot(item) + slot::chunks(item) - walk.left()) * a.p.num_v_heads + slot::v_head(item);
  if (part == 0) {
    uint8_t* to = a.p.saved_abar + index * kTileBytes;
    const uint32_t tile = sm.pair(walk.pair());
#pragma unroll
    for (int w = 0; w < 4; w++) ptx::bulk_store(to + panel_offset(w), tile + 2560 * w, panel_bytes(w));
  } else {
    float* to = a.p.saved_vec + index * kVecFloats;
    const uint32_t vec = sm.stage(walk.stage) + FusedConfig::kOffVec;
    ptx::bulk_store(to + kVecK, vec + kFusedGamma * 4, 256);
    ptx::bulk_store(to + kVecQ, vec + kFusedQ * 4, 512);
    ptx::bulk_store(to + kVecRk, vec + kFusedRk * 4, 512);
  }
  ptx::bulk_commit();
  ptx::bulk_wait_read();
  if (part != 0) ptx::mbarrier_arrive(sm.tiles().empty(walk.stage));
  ptx::mbarrier_arrive(sm.pairs().empty(walk.pair()));  // of the vectors, too: else `full` could pass by twice while they wait
}
template <bool Norm, bool Save, bool Cut>
__device__ __forceinline__ void fused_store_role(const ForwardArgs& a, const FusedSmem& sm, int part) {
  const auto values = sm.values();
  const int lane = threadIdx.x % 32;
  FusedWalk walk;
  for (;; walk.next_item()) {
    ptx::mbarrier_wait(sm.items().full(walk.slot()), walk.slot_phase());
    if (!slot::valid(sm.slot_address(walk.slot()))) break;
    int row = slot::row(sm.slot_address(walk.slot()));
#pragma unroll 1
    for (walk.begin_item(slot::chunks(sm.slot_address(walk.slot()))); walk.more(); walk.next_chunk(), row += 64) {
      const uint32_t item = sm.slot_address(walk.slot());
      const int s = walk.stage, v_head = slot::v_head(item), batch = slot::batch(item);
      if constexpr (Save)
        if (lane == 0 && (Norm || part == 0)) save_chunk<Norm>(a, sm, walk, part);
      ptx::mbarrier_wait(sm.out_full(part, s), walk.phase());
      __syncwarp();  // no lane still waits for this phase when lane 0 lets the stage's next one come: it would miss both
      const uint32_t tile = sm.v_stage(s) + part * 8192;
      if (Cut && walk.left() > slot::chunks(item) - slot::warmup(item)) {
        // no output
      } else if (walk.last() && slot::last_rows(item) != 64) {
        store_tail(a, item, tile, row, part * 64, lane);
        __syncwarp();
      } else if (lane == 0) {
        ptx::tensor_store_4d(&a.o, part * 64, v_head, row, batch, tile);
        ptx::bulk_commit();
        ptx::bulk_wait_read();
      }
      if (lane == 0) ptx::mbarrier_arrive(values.empty(s));
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(sm.items().empty(walk.slot()));
  }
  if (lane == 0) ptx::bulk_wait();
}

// ---- helper: rows past a sequence's end, zero outputs
__device__ __forceinline__ void zero_row(const ForwardArgs& a, int batch, int row, int v_head, int lane, int lanes) {
  char* o = static_cast<char*>(const_cast<void*>(a.p.o.data)) +
            2 * (batch * a.p.o.stride_b + row * a.p.o.stride_t + v_head * a.p.o.stride_h);
#pragma unroll 1
  for (int i = lane; i < 16; i += lanes) *reinterpret_cast<uint4*>(o + 16 * i) = make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void zero_rows(uint32_t tile, int from, int to, int lane) {
#pragma unroll 1
  for (int at = from * 128 + lane * 16; at < to * 128; at += 512) ptx::sts4u(tile + at, 0, 0, 0, 0);
}
// .. of K and Q, then of V
__device__ __forceinline__ void zero_tiles_from(uint32_t stage, int rows, int lane) {
#pragma unroll 1
  for (int p = 0; p < 2; p++, stage += FusedConfig::kPanelBytes) {
    zero_rows(stage, rows, 32, lane);
    zero_rows(stage + FusedConfig::kOffK, rows, 64, lane);
    zero_rows(stage + FusedConfig::query_row(32), max(rows - 32, 0), 32, lane);
  }
}
__device__ __forceinline__ void zero_values_from(uint32_t stage, int rows, int lane) {
#pragma unroll 1
  for (int p = 0; p < 2; p++) zero_rows(stage + 8192 * p, rows, 64, lane);
}
template <bool Cut>
__device__ __forceinline__ void fused_helper_role(const FusedArgs& a, const FusedSmem& sm) {
  const int lane = threadIdx.x % 32;
  if (a.p.batch == 1) {  // tokens after the last sequence; dense input has none
    const int end = Cut        ? a.p.again && a.p.cut_header->cut ? int(a.p.tokens) : int(ptx::load_relaxed(&a.p.plan->end_token))
                           : a.direct ? int(segments::boundary(a.plan, a.plan.num_seqs))
                               : int(a.p.plan->end_token);
#pragma unroll 1
    for (int token = end + blockIdx.x; token < a.p.tokens; token += gridDim.x)
#pragma unroll 1
      for (int h = 0; h < a.p.num_v_heads; h++) zero_row(a, 0, token, h, lane, 32);
  }
  uint32_t walked = 0;  // chunks
  uint32_t phases = 0;  // parity of raw_tiles[stage] and raw_values[stage], a bit each: it advances only in that stage's tails
  for (uint32_t taken = 0;; taken++) {
    ptx::mbarrier_wait(sm.items().full(taken & 1), taken >> 1 & 1);
    const uint32_t item = sm.slot_address(taken & 1);
    if (!slot::valid(item)) break;
#pragma unroll 1
    for (int r = lane / 8; r < slot::skip_rows(item); r += 4)
      zero_row(a, slot::batch(item), slot::row(item) + r, slot::v_head(item), lane % 8, 8);
    walked += slot::chunks(item);
    const int rows = slot::last_rows(item);
    if (slot::chunks(item) > 0 && rows != 64) {
      const int s = int((walked - 1) % uint32_t(FusedConfig::kStages));
      ptx::mbarrier_wait(sm.raw_tiles(s), phases >> s & 1);
      zero_tiles_from(sm.stage(s), rows, lane);
      ptx::mbarrier_wait(sm.raw_values(s), phases >> s & 1);
      zero_values_from(sm.v_stage(s), rows, lane);
      phases ^= 1u << s;
      ptx::proxy_fence();
      __syncwarp();
      if (lane == 0) {
        ptx::mbarrier_arrive(sm.tiles().full(s));
        ptx::mbarrier_arrive(sm.values().full(s));
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(sm.items().empty(taken & 1));
  }
}

}  // namespace qla::cuda
