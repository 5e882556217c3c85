// The forward kernel's load role, and its helpers: rows past a sequence's end, zero outputs, and in the fused form the gate
// vectors.
#pragma once

#include "cuda/kernels/chunk_intra/gates.cuh"
#include "cuda/math/exp.cuh"
#include "cuda/math/warp.cuh"
#include "cuda/tile/pack.cuh"
#include "cuda/tile/swizzle.cuh"
#include "smem.cuh"

namespace qla::cuda {

// Helper warps: 1 .. kParts store O of one state warpgroup each (or idle, without output), the last one, 3, does what else there
// is.
inline constexpr int kHelperWarp = 3;

// ---- load role: one thread
__device__ __forceinline__ void put_field(uint32_t slot, size_t offset, int x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(slot + uint32_t(offset)), "r"(x) : "memory");
}
__device__ __forceinline__ bool fetch_item(const ForwardArgs& a, uint32_t slot, int index) {
  const bool valid = index < a.p.plan->num_items;
  put_field(slot, offsetof(ItemSlot, valid), valid);
  if (!valid) return false;
  const uint4* from = reinterpret_cast<const uint4*>(a.p.items + index);
#pragma unroll 1
  for (int i = 0; i < 4; i++) {
    const uint4 x = from[i];
    ptx::sts4u(slot + 16 * i, x.x, x.y, x.z, x.w);
  }
  const int sequence = slot::sequence(slot);
  int64_t token = a.p.items[index].token;
  int state = sequence, skip_rows = 0;
  if (a.p.state_indices) {
    state = a.p.state_indices_dtype == QLA_INT64 ? int(static_cast<const int64_t*>(a.p.state_indices)[sequence])
                                                 : static_cast<const int32_t*>(a.p.state_indices)[sequence];
    if (state < 0) {
      const int written = slot::chunks(slot) - slot::warmup(slot);
      skip_rows = written > 0 ? (written - 1) * 64 + slot::last_rows(slot) : 0;
      token += int64_t(slot::warmup(slot)) * 64;
      put_field(slot, offsetof(ItemSlot, item.chunks), 0);
      put_field(slot, offsetof(ItemSlot, item.warmup), 0);
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
  put_field(slot, offsetof(ItemSlot, row), int(token - batch * a.row_tokens));
  return true;
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
    const uint32_t item = sm.slot_address(slots.stage);
    const bool valid = fetch_item(a, item, index);
    ptx::mbarrier_arrive(items.full(slots.stage));
    if (!valid) break;
    slots.advance();
    // kept in registers: between a stage's release and its loads nothing should take time
    const int v_head = slot::v_head(item), k_head = v_head / group, batch = slot::batch(item), v_col = slot::v_part(item) * 64;
    const bool has_tail = slot::last_rows(item) != 64, has_v = Cfg::kOutput || slot::start(item) != kStartIdentity;
    int64_t record = int64_t(slot::chunk_slot(item)) * a.p.num_v_heads + v_head;
    int row = slot::row(item);
#pragma unroll 1
    for (int left = slot::chunks(item); left > 0; left--, row += 64, record += a.p.num_v_heads) {
      tiles.producer_wait(ring);
      const uint32_t st = sm.stage(ring.stage),
                     bar = Cfg::kFused || (left == 1 && has_tail) ? sm.raw(ring.stage) : tiles.full(ring.stage);
      ptx::mbarrier_arrive_expect(bar, Cfg::kLoadBytes - (has_v ? 0 : Cfg::kVBytes));
#pragma unroll
      for (int p = 0; p < 2; p++) {
        ptx::tensor_load_4d(st + p * Cfg::kPanelBytes, &a.k, 64 * p, k_head, row, batch, bar);
        if constexpr (Cfg::kOutput) ptx::tensor_load_4d(st + p * Cfg::kPanelBytes + 8192, &a.q, 64 * p, k_head, row, batch, bar);
      }
      if (has_v) {
#pragma unroll
        for (int p = 0; p < Cfg::kParts; p++)
          ptx::tensor_load_4d(st + Cfg::kOffV + p * 8192, &a.v, v_col + 64 * p, v_head, row, batch, bar);
      }
      if constexpr (!Cfg::kFused) {
        ptx::bulk_load(st + Cfg::kOffVec, a.p.vec + record * kVecFloats, kVecBytesForward, bar);
#pragma unroll
        for (int w = 0; w < 4; w++) {
          ptx::bulk_load(st + Cfg::kOffA + 2560 * w, a.p.abar + record * kTileBytes + panel_offset(w), panel_bytes(w), bar);
          if constexpr (Cfg::kOutput)
            ptx::bulk_load(st + Cfg::kOffP + 2560 * w, a.p.pg + record * kTileBytes + panel_offset(w), panel_bytes(w), bar);
        }
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
#pragma unroll 1
  for (int i = lane; i < cols16; i += lanes) *reinterpret_cast<uint4*>(o + 16 * i) = make_uint4(0, 0, 0, 0);
}

// O^T of a state warpgroup's 64 value columns, in V's place, to global memory: a whole chunk by tensor store, a tail row by row.
// Then the stage is handed back.
__device__ __forceinline__ void store_rows(const ForwardArgs& a, uint32_t item, uint32_t tile, int c, int col, int rows,
                                           int lane) {
  const int64_t at = slot::batch(item) * a.p.o.stride_b + (slot::row(item) + 64 * c + lane / 8) * a.p.o.stride_t +
                     slot::v_head(item) * a.p.o.stride_h;
  char* o = static_cast<char*>(const_cast<void*>(a.p.o.data)) + 2 * (at + col) + lane % 8 * 16;
#pragma unroll 1
  for (int r = lane / 8; r < rows; r += 4, o += 8 * a.p.o.stride_t)
    *reinterpret_cast<uint4*>(o) = ptx::lds4u(tile + swizzle_128(r * 128 + lane % 8 * 16));
}
template <class Cfg>
__device__ __forceinline__ void store_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm, int part) {
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  Ring<Cfg::kStages> ring;
  Ring<Cfg::kItemSlots> slots;
  const int lane = threadIdx.x % 32;
  for (;;) {
    items.consumer_wait(slots);
    const uint32_t item = sm.slot_address(slots.stage);
    if (!slot::valid(item)) break;
#pragma unroll 1
    for (int c = 0; c < slot::chunks(item); c++) {
      const int col = slot::v_part(item) * 64 + part * 64, v_head = slot::v_head(item), batch = slot::batch(item),
                row = slot::row(item) + 64 * c;
      ptx::mbarrier_wait(sm.out_full(part, ring.stage), ring.phase);
      const uint32_t tile = sm.stage(ring.stage) + Cfg::kOffV + part * 8192;
      if (c >= slot::warmup(item)) {
        if (c == slot::chunks(item) - 1 && slot::last_rows(item) != 64) {
          store_rows(a, item, tile, c, col, slot::last_rows(item), lane);
        } else if (lane == 0) {
          ptx::tensor_store_4d(&a.o, col, v_head, row, batch, tile);
          ptx::bulk_commit();
          ptx::bulk_wait_read();
        }
        __syncwarp();
      }
      if (lane == 0) tiles.release(ring);
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
#pragma unroll 1
  for (int at = rows * 128 + lane * 16; at < 8192; at += 512)
#pragma unroll
    for (int run = 0; run < kRuns; run++) ptx::sts4u(stage + run * 8192 + at, 0, 0, 0, 0);
  ptx::proxy_fence();
}

// Fused: inverse norms of K and Q rows, to the places of two vectors that are written after they have been read.
template <typename T, class Cfg>
__device__ __forceinline__ void norms(uint32_t stage, int lane) {
#pragma unroll 1
  for (int i = lane; i < 128; i += 32) {
    const int row = i % 64, which = i / 64;
    float sum = 0.f;
#pragma unroll 1
    for (int p = 0; p < 16; p++) {
      const uint4 x = ptx::lds4u(stage + p / 8 * 16384 + which * 8192 + swizzle_128(row * 128 + p % 8 * 16));
      const float2 f0 = unpack<T>(x.x), f1 = unpack<T>(x.y), f2 = unpack<T>(x.z), f3 = unpack<T>(x.w);
      sum = fmaf(f0.x, f0.x, fmaf(f0.y, f0.y, fmaf(f1.x, f1.x, fmaf(f1.y, f1.y, sum))));
      sum = fmaf(f2.x, f2.x, fmaf(f2.y, f2.y, fmaf(f3.x, f3.x, fmaf(f3.y, f3.y, sum))));
    }
    ptx::sts(stage + Cfg::kOffVec + (which ? kVecRatio : kVecCol) * 4 + row * 4, 1.f / sqrtf(sum + 1e-6f));
  }
}

// Fused: gate and beta of a chunk on their way to shared memory, without passing through registers; a lane has rows 2 lane and 2
// lane + 1.
__device__ __forceinline__ void request_gates(const ForwardArgs& a, uint32_t item, uint32_t raw, int c) {
  const int lane = thread_in_group() % 32, end = slot::chunks(item) * 64 - 64 + slot::last_rows(item);
#pragma unroll 1
  for (int row = 64 * c + 2 * lane; row < min(end, 64 * c + 2 * lane + 2); row++) {
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      const intra::View& x = which ? a.p.beta : a.p.g;
      if (x.data)
        intra::copy_element(
            raw + which * 512 + row % 64 * 8, x,
            slot::batch(item) * x.stride[0] + (slot::row(item) + row) * x.stride[1] + slot::v_head(item) * x.stride[2]);
    }
  }
  ptx::cp_async_commit();
}
// two rows of them
__device__ __forceinline__ float2 read_gates(const intra::View& x, uint32_t item, uint32_t raw, int c) {
  const int lane = thread_in_group() % 32;
  const uint4 bits = ptx::lds4u(raw + lane * 16);
  const uint32_t stride = uint32_t(x.stride[1]);
  const uint32_t parity = uint32_t(reinterpret_cast<uintptr_t>(x.data) >> 1) + slot::batch(item) * uint32_t(x.stride[0]) +
                          (slot::row(item) + 64 * c + 2 * lane) * stride + slot::v_head(item) * uint32_t(x.stride[2]);
  return make_float2(intra::decode(bits.x, bits.y, x.dtype, parity & 1),
                     intra::decode(bits.z, bits.w, x.dtype, (parity + stride) & 1));
}
// (F0); rows past the end of the chunk: 0
__device__ __forceinline__ float decoded_gate(const ForwardArgs& a, uint32_t item, float x, bool inside) {
  if (!inside || !a.p.g.data) return 0.f;
  float rate = 1.f, bias = 0.f;
  if (a.p.flags & QLA_FLAG_RAW_GATE) {
    rate = expf(intra::load_element(a.p.a_log, slot::v_head(item) * a.p.a_log.stride[2]));
    if (a.p.dt_bias.data) bias = intra::load_element(a.p.dt_bias, slot::v_head(item) * a.p.dt_bias.stride[2]);
  }
  return intra::decode_gate(x, a.p.flags, rate, bias) * kLog2e;
}

// Fused: what a chunk needs before the other roles: gate vectors (F1), a lane has rows 2 lane and 2 lane + 1; its tail zeroed,
// norms. What needs no tile is done before the wait for them.
template <class Cfg, typename T>
__device__ __forceinline__ void prepare_chunks(const ForwardArgs& a, const ForwardSmem<Cfg>& sm, uint32_t item,
                                               uint32_t& walked) {
  const auto buffer = [&](int c) { return sm.base + Cfg::kOffRaw + (c & 1) * 1024; };
  if (slot::chunks(item) > 0) request_gates(a, item, buffer(0), 0);
#pragma unroll 1
  for (int c = 0; c < slot::chunks(item); c++, walked++) {
    if (c + 1 < slot::chunks(item))
      request_gates(a, item, buffer(c + 1), c + 1);
    else
      ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    const int lane = thread_in_group() % 32, rows = c < slot::chunks(item) - 1 ? 64 : slot::last_rows(item);
    float2 g = read_gates(a.p.g, item, buffer(c), c), beta = read_gates(a.p.beta, item, buffer(c) + 512, c);
    g.x = decoded_gate(a, item, g.x, 2 * lane < rows);
    g.y = decoded_gate(a, item, g.y, 2 * lane + 1 < rows);
    float beta0 = 2 * lane < rows ? intra::decode_beta(beta.x, a.p.flags) : 0.f;
    float beta1 = 2 * lane + 1 < rows ? intra::decode_beta(beta.y, a.p.flags) : 0.f;
    const float c1 = warp_inclusive_sum(g.x + g.y, lane), c0 = c1 - g.y;
    ptx::mbarrier_wait(sm.raw(walked % Cfg::kStages), walked / Cfg::kStages & 1);
    const uint32_t stage = sm.stage(walked % Cfg::kStages), vec = stage + Cfg::kOffVec + lane * 8;
    if (c == slot::chunks(item) - 1 && slot::last_rows(item) != 64) zero_rows<Cfg>(stage, slot::last_rows(item), lane);
    float2 rk = make_float2(1.f, 1.f), rq = rk, lk = make_float2(0.f, 0.f);
    if (a.p.flags & QLA_FLAG_QK_L2NORM) {
      __syncwarp();
      norms<T, Cfg>(stage, lane);
      __syncwarp();
      rk = ptx::lds2(vec + kVecCol * 4);
      rq = ptx::lds2(vec + kVecRatio * 4);
      lk = make_float2(log2_approx(rk.x), log2_approx(rk.y));
    }
    ptx::sts2(vec + kVecCum * 4, c0, c1);
    ptx::sts2(vec + kVecCol * 4, c0 + lk.x, c1 + lk.y);
    rq.x *= a.p.scale;
    rq.y *= a.p.scale;
    ptx::sts2(vec + kVecRatio * 4, __fdividef(rq.x, rk.x), __fdividef(rq.y, rk.y));
    beta0 *= rk.x;
    beta1 *= rk.y;
    ptx::sts2(vec + kVecRow * 4, beta0, beta1);
    const float last = __shfl_sync(~0u, c1, 31);
    ptx::sts2(vec + kVecE * 4, exp2_approx(last - c0) * beta0, exp2_approx(last - c1) * beta1);
    const float gamma0 = exp2_approx(c0), gamma1 = exp2_approx(c1);
    ptx::sts2(vec + kVecGamma * 4, gamma0, gamma1);
    ptx::sts2(vec + kVecK * 4, gamma0 * rk.x, gamma1 * rk.y);
    ptx::sts2(vec + kVecQ * 4, gamma0 * rq.x, gamma1 * rq.y);
    __syncwarp();
    if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(sm.tiles().full(walked % Cfg::kStages));
  }
}

template <class Cfg>
__device__ __forceinline__ void zero_after_end(const ForwardArgs& a, int lane) {  // tokens after the last sequence
  const int heads = a.p.num_v_heads;
  if (a.p.batch > 1) return;  // dense: there are none
#pragma unroll 1
  for (int token = int(a.p.plan->end_token) + blockIdx.x; token < a.p.tokens; token += gridDim.x)
#pragma unroll 1
    for (int h = 0; h < heads; h++) zero_output(a, 0, token, h, 0, 16, lane, 32);
}

template <class Cfg, typename T>
__device__ __forceinline__ void helper_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm) {
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  if constexpr (Cfg::kOutput) zero_after_end<Cfg>(a, thread_in_group() % 32);
  Ring<Cfg::kItemSlots> slots;
  uint32_t walked = 0;  // chunks
  uint32_t phases = 0;  // parity of raw[stage], a bit each: without the gates it advances only in that stage's tails
  for (;;) {
    items.consumer_wait(slots);
    const uint32_t item = sm.slot_address(slots.stage);
    if (!slot::valid(item)) break;
    if constexpr (Cfg::kOutput) {
      const int lane = thread_in_group() % 32;
#pragma unroll 1
      for (int r = lane / 8; r < slot::skip_rows(item); r += 4)
        zero_output(a, slot::batch(item), slot::row(item) + r, slot::v_head(item), slot::v_part(item) * 64, 8 * Cfg::kParts,
                    lane % 8, 8);
    }
    if constexpr (Cfg::kFused) {
      prepare_chunks<Cfg, T>(a, sm, item, walked);
    } else {
      const int rows = slot::last_rows(item);
      walked += slot::chunks(item);
      if (slot::chunks(item) > 0 && rows != 64) {
        const int stage = (walked - 1) % Cfg::kStages;
        ptx::mbarrier_wait(sm.raw(stage), phases >> stage & 1);
        phases ^= 1u << stage;
        zero_rows<Cfg>(sm.stage(stage), rows, thread_in_group() % 32);
        __syncwarp();
        if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(tiles.full(stage));
      }
    }
    __syncwarp();
    if (thread_in_group() % 32 == 0) items.release(slots);
    slots.advance();
  }
}

}  // namespace qla::cuda
