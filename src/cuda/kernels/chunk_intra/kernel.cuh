// chunk_intra<T, WithPg, Gated> - the intra-chunk stage, which depends on no state.   Computes (F0)-(F3), (F6); Gated =
// false: (F2).
//   For every chunk and value head: Abar and Pg as tiles, the gate vectors (formats.hpp). The inverse is that of
//   I + (G o L) diag(beta) (gate inside), or of I + diag(beta) L for the ungated A.
//   grid: persistent, two CTAs a SM; an item = (chunk slot, up to four value heads of one q/k head): K [K;Q]^T once an item.
//
// Two warpgroups. The first one makes K [K;Q]^T and Pg (scores.cuh), straight from its accumulators, head by head; the lower
// blocks of K K^T go to shared memory as fp32 fragments. Each warp of the second one has a head for itself, heads in turn: gate
// vectors and record, then the inverse (inverse.cuh) from the fragments: four heads at a time, of one item or two.
//
// Barriers                        guards
//   kq (mbarrier, tx)             s_kq: loaded; without Q two of them, of items in turn
//   vectors [2] (mbarrier)        s_vec of an item: all heads' there. A warp writes its own place in it, so that only the scores
//   must
//                                 have let go of it: they have when the next item's fragments are there.
//   full [places] (mbarrier)      s_kk, s_norm of an item, and s_item of the one after the next: there
//   empty [places] (mbarrier)     .. its heads' inverses have let go of s_kk and s_norm
//   kScores (128), in turn        all products are done: s_kq is free, and tiles of s_pg, which the copies have read;
//                                 s_pg written;  with norms: s_norm;  with a tail: zeros
//
// Tail: rows past the end of a chunk are zeroed in s_kq before the products; beta = 0, raw gate = 0 there.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/kernels/chunk_intra/config.hpp"
#include "cuda/kernels/chunk_intra/gates.cuh"
#include "cuda/kernels/chunk_intra/inverse.cuh"
#include "cuda/kernels/chunk_intra/scores.cuh"
#include "cuda/kernels/chunk_intra/single_sequence.cuh"
#include "cuda/kernels/chunk_intra/smem.hpp"
#include "cuda/kernels/plan_segments/boundaries.cuh"
#include "cuda/math/exp.cuh"
#include "cuda/math/warp.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/fragment.cuh"

namespace qla::cuda::intra {

inline constexpr int kScores = 1;  // named barrier of the scores' warpgroup
// 8 bytes each
inline constexpr int kBarKq = kSmemBar, kBarVectors = kSmemBar + 16, kBarFull = kSmemBar + 32,
                     kBarEmpty = kBarFull + 8 * kMostPlaces;

struct Item {
  int64_t token;                                 // inside its batch row
  int rows, batch, slot, k_head, v_head, heads;  // heads = 0: no more items
};

// Items run slot by slot, in each q/k head by q/k head: (slot, rest) of the next one without a division. The last ones are dealt
// to all CTAs but the last.
struct Cursor {
  int slot, rest;
  __device__ __forceinline__ bool late(const Args& a) const {
    return slot > a.late_slot || (slot == a.late_slot && rest >= a.late_rest);
  }
  __device__ __forceinline__ void leave_out_last(const Args& a) {
    if (blockIdx.x == gridDim.x - 1 && late(a)) slot = a.slots;
  }
  __device__ __forceinline__ void advance(const Args& a) {
    const int per_slot = a.num_k_heads * a.parts, step_rest = a.step_rest - late(a);
    slot += a.step_slots;
    rest += step_rest;
    if (rest < 0) rest += per_slot, slot--;
    if (rest >= per_slot) rest -= per_slot, slot++;
    leave_out_last(a);
  }
  __device__ __forceinline__ void advance(const Args& a, int steps) {
    const int per_slot = a.num_k_heads * a.parts, to = rest + steps * a.step_rest, slots = to / per_slot;
    slot += steps * a.step_slots + slots;
    rest = to - slots * per_slot;
  }
};
__device__ __forceinline__ Item decode_item(const Args& a, Cursor at, int4 record) {
  const int k_head = a.parts == 1 ? at.rest : at.rest / a.parts, first = (at.rest - k_head * a.parts) * a.per;
  Item it;
  it.token = int64_t(uint32_t(record.x)) | int64_t(record.y) << 32;
  it.rows = record.z;
  it.batch = a.varlen ? 0 : record.w;
  it.token -= it.batch * a.tokens;
  it.slot = at.slot;
  it.k_head = k_head;
  it.v_head = k_head * a.group + first;
  it.heads = min(a.per, a.group - first);
  return it;
}

// one thread; place: 0, without Q of the item's parity
template <bool WithPg>
__device__ __forceinline__ void load_tiles(uint32_t smem, uint32_t place, const CUtensorMap& map_k, const CUtensorMap& map_q,
                                           const Item& it) {
  const uint32_t bar = smem + kBarKq + 8 * place;
  ptx::mbarrier_arrive_expect(bar, WithPg ? 32768 : 16384);
#pragma unroll
  for (int p = 0; p < 2; p++) {
    ptx::tensor_load_4d(smem + kSmemKq + p * 16384 + place * 8192, &map_k, 64 * p, it.k_head, int(it.token), it.batch, bar);
    if (WithPg) ptx::tensor_load_4d(smem + kSmemKq + p * 16384 + 8192, &map_q, 64 * p, it.k_head, int(it.token), it.batch, bar);
  }
}

// Gate and beta of a head on their way to its warp's part of s_raw: rows lane and lane + 32.
template <bool Gated>
__device__ __forceinline__ void load_gates(uint32_t raw, const Args& a, const Item& it, int head, int lane) {
  if (lane >= it.rows) return;
  const auto copy = [&](uint32_t slot, const View& x) {
    const int64_t at = it.batch * x.stride[0] + (it.token + lane) * x.stride[1] + (it.v_head + head) * x.stride[2];
    copy_element(slot, x, at);
    if (lane + 32 < it.rows) copy_element(slot + 256, x, at + 32 * x.stride[1]);
  };
  if (Gated && a.g.data) copy(raw + lane * 8, a.g);
  copy(raw + 512 + lane * 8, a.beta);
}
// rows 2 lane and 2 lane + 1 of a head
__device__ __forceinline__ float2 read_raw(uint32_t slots, const View& view, const Item& it, int head, int lane) {
  const uint4 x = ptx::lds4u(slots + lane * 16);
  const uint32_t row = uint32_t(it.token) + 2 * lane;
  const uint32_t parity = uint32_t(reinterpret_cast<uintptr_t>(view.data) >> 1) + it.batch * uint32_t(view.stride[0]) +
                          row * uint32_t(view.stride[1]) + (it.v_head + head) * uint32_t(view.stride[2]);
  return make_float2(decode(x.x, x.y, view.dtype, parity & 1),
                     decode(x.z, x.w, view.dtype, (parity + uint32_t(view.stride[1])) & 1));
}

// rows past the chunk's end: 0, whatever lay there
template <bool WithPg>
__device__ __noinline__ void zero_tail(uint32_t smem, int place, int rows, int tid) {
  for (int i = tid; i < 4 * 64 * 8; i += 128) {
    const int row = i / 8 % 64, tile = i / 512;
    if (row >= rows && (WithPg || tile % 2 == place))
      ptx::sts4u(smem + kSmemKq + tile * 8192 + row * 128 + i % 8 * 16, 0, 0, 0, 0);
  }
  ptx::proxy_fence();
  ptx::named_sync(kScores, 128);
}

// inverse norms of the rows of K, with Q of those of Q, too; a thread a row. Runs under the products.
template <typename T, bool WithPg>
__device__ __forceinline__ void norms(uint32_t tiles, uint32_t out, int tid) {
  const int row = tid % 64, which = tid / 64;
  if (which && !WithPg) return;
  float sum[4] = {};
#pragma unroll 2
  for (int i = 0; i < 16; i++) {
    const uint4 x = ptx::lds4u(tiles + i / 8 * 16384 + which * 8192 + swizzle_128(row * 128 + i % 8 * 16));
    const float2 f0 = unpack<T>(x.x), f1 = unpack<T>(x.y), f2 = unpack<T>(x.z), f3 = unpack<T>(x.w);
    sum[0] = fmaf(f0.x, f0.x, fmaf(f0.y, f0.y, sum[0]));
    sum[1] = fmaf(f1.x, f1.x, fmaf(f1.y, f1.y, sum[1]));
    sum[2] = fmaf(f2.x, f2.x, fmaf(f2.y, f2.y, sum[2]));
    sum[3] = fmaf(f3.x, f3.x, fmaf(f3.y, f3.y, sum[3]));
  }
  ptx::sts(out + which * 256 + row * 4, 1.f / sqrtf((sum[0] + sum[1]) + (sum[2] + sum[3]) + 1e-6f));
}

// (F0), (F1) and the head's vectors in shared memory; a warp a head, a lane rows 2 lane and 2 lane + 1
template <bool Gated>
__device__ __forceinline__ void gate_vectors(uint32_t raw, uint32_t vec, const Args& a, const Item& it, int head, int lane) {
  float2 beta = read_raw(raw + 512, a.beta, it, head, lane);
  const bool in0 = 2 * lane < it.rows, in1 = 2 * lane + 1 < it.rows;
  beta.x = in0 ? decode_beta(beta.x, a.flags) : 0.f;
  beta.y = in1 ? decode_beta(beta.y, a.flags) : 0.f;
  const uint32_t out = vec + place(2 * lane) * 4;
  ptx::sts2(out + kHeadBeta * 4, beta.x, beta.y);
  if constexpr (!Gated) {
    ptx::sts2(out + kHeadRow * 4, -beta.x, -beta.y);
#pragma unroll
    for (int b = 1; b < 4; b++)
      if (lane < 8 * b) ptx::sts2(out + head_column(b) * 4, 1.f, 1.f);
    if (lane == 0) ptx::sts(vec + kHeadGrows * 4, 0.f);
    return;
  }
  float2 g = make_float2(0.f, 0.f);
  if (a.g.data) g = read_raw(raw, a.g, it, head, lane);
  float rate = 1.f, bias = 0.f;
  if (a.flags & QLA_FLAG_RAW_GATE) {
    rate = expf(load_element(a.a_log, (it.v_head + head) * a.a_log.stride[2]));
    if (a.dt_bias.data) bias = load_element(a.dt_bias, (it.v_head + head) * a.dt_bias.stride[2]);
  }
  g.x = in0 ? decode_gate(g.x, a.flags, rate, bias) * kLog2e : 0.f;
  g.y = in1 ? decode_gate(g.y, a.flags, rate, bias) * kLog2e : 0.f;
  const float through = warp_inclusive_sum(g.x + g.y, lane);
  const float c0 = through - g.y, c1 = through;
  // Factors by a reference inside the row block: neither can overflow, and what one of them flushes to 0 counts for nothing,
  // where the gates of a whole chunk together grow by no more than 2^60.
  const bool grows = __any_sync(~0u, fmaxf(g.x, g.y) > 0.9375f);
  if (lane == 0) ptx::sts(vec + kHeadGrows * 4, grows ? 1.f : 0.f);
  ptx::sts2(out + kHeadCum * 4, c0, c1);
  const float ref = __shfl_sync(~0u, c0, lane & 24);
  ptx::sts2(out + kHeadRow * 4, -exp2_approx(c0 - ref), -exp2_approx(c1 - ref));
#pragma unroll
  for (int b = 1; b < 4; b++) {
    const float from = __shfl_sync(~0u, c0, 8 * b);
    if (lane < 8 * b) ptx::sts2(out + head_column(b) * 4, exp2_approx(from - c0) * beta.x, exp2_approx(from - c1) * beta.y);
  }
}

// .. and the head's record in memory; norm: rk, rq
__device__ __forceinline__ void put_record(uint32_t norm, uint32_t vec, const Args& a, const Item& it, int head, int lane) {
  const uint32_t at = vec + place(2 * lane) * 4;
  const float2 c = ptx::lds2(at + kHeadCum * 4), beta = ptx::lds2(at + kHeadBeta * 4);
  const float last = ptx::lds(vec + (kHeadCum + place(63)) * 4);
  float2 rk = make_float2(1.f, 1.f), rq = rk;
  if (a.flags & QLA_FLAG_QK_L2NORM) rk = ptx::lds2(norm + lane * 8), rq = ptx::lds2(norm + 256 + lane * 8);
  const float gamma0 = exp2_approx(c.x), gamma1 = exp2_approx(c.y);
  float2* record = reinterpret_cast<float2*>(a.vec + (int64_t(it.slot) * a.num_v_heads + it.v_head + head) * kVecFloats) + lane;
  record[kVecK / 2] = make_float2(gamma0 * rk.x, gamma1 * rk.y);
  record[kVecQ / 2] = make_float2(a.scale * gamma0 * rq.x, a.scale * gamma1 * rq.y);
  record[kVecE / 2] = make_float2(exp2_approx(last - c.x) * beta.x * rk.x, exp2_approx(last - c.y) * beta.y * rk.y);
  record[kVecGamma / 2] = make_float2(gamma0, gamma1);
  if (a.vec_backward) {
    record[kVecG / 2] = c;
    record[kVecBeta / 2] = beta;
    record[kVecRk / 2] = rk;
    record[kVecRq / 2] = rq;
  }
}

// (C4) a warp a head; |k|^2, normalised or not, are the diagonal of s_kk
__device__ __forceinline__ void put_decay(uint32_t fragments, uint32_t vec, const Args& a, const Item& it, int head, int lane) {
  const float2 beta = ptx::lds2(vec + (kHeadBeta + place(2 * lane)) * 4);
  const float through = ptx::lds(vec + (kHeadCum + place(63)) * 4);
  const float2 k2 = make_float2(ptx::lds(fragments + fragment_element(2 * lane, 2 * lane)),
                                ptx::lds(fragments + fragment_element(2 * lane + 1, 2 * lane + 1)));
  const float x = beta.x * k2.x, y = beta.y * k2.y;
  float growth = 0.f;
  if (__any_sync(~0u, !(x <= 2.f && y <= 2.f))) {
    growth = log2_approx(max_keep_nan(x - 1.f, 1.f)) + log2_approx(max_keep_nan(y - 1.f, 1.f));
    // inf - inf: a key that is not finite, with beta = 0 or not
    growth = warp_sum(growth + (k2.x - k2.x) + (k2.y - k2.y));
  }
  const float sum = (growth + through) * kLn2;
  if (lane == 0) ptx::store_relaxed(a.decay + int64_t(it.slot) * a.num_v_heads + it.v_head + head, sum);
}

// rows of the ungated A from the tile
template <typename T>
__device__ __forceinline__ void store_a_inv(const Args& a, const Item& it, int head, uint32_t tile, int lane) {
  T* out = static_cast<T*>(a.a_inv) + it.batch * a.a_inv_stride[0] + it.token * a.a_inv_stride[1] +
           (it.v_head + head) * a.a_inv_stride[2];
  for (int i = lane; i < it.rows * 64; i += 32) {
    const int row = i / 64, col = i % 64, panel = col / 16;
    uint16_t bits = 0;
    if (panel <= row / 16)
      asm volatile("ld.shared.b16 %0, [%1];"
                   : "=h"(bits)
                   : "r"(tile + panel_offset(panel) + swizzle_32((row - 16 * panel) * 32 + col % 16 * 2))
                   : "memory");
    reinterpret_cast<uint16_t*>(out)[row * a.a_inv_stride[1] + col * a.a_inv_stride[3]] = bits;
  }
}

// Which items are this CTA's. One thread walks: it takes items two ahead of the products, each item's record is on its way to
// shared memory while the one before is at work.
struct Walk {
  const Args& a;
  uint32_t s_record;
  Cursor at;
  int first_token, end_token;
  __device__ __forceinline__ int4 load(Cursor c) const {
    if (a.direct) return single_record(c.slot, first_token, end_token);
    if (a.ahead) ptx::grid_dependency_wait();
    return c.slot < a.slots ? reinterpret_cast<const int4*>(a.chunk_table)[c.slot] : int4{};
  }
  __device__ __forceinline__ void ask() const {
    if (a.direct || at.slot >= a.slots) return;
    if (a.ahead) ptx::grid_dependency_wait();
    ptx::cp_async<16>(s_record, a.chunk_table + at.slot);
  }
  // the next item that has rows, from `record` of the place to look at first
  __device__ __forceinline__ Item take(int4 record) {
    while (at.slot < a.slots && record.z == 0) {
      at.advance(a);
      record = load(at);
    }
    Item it{};
    if (at.slot < a.slots) it = decode_item(a, at, record);
    at.advance(a);
    return it;
  }
  __device__ __forceinline__ Item take_asked() {
    int4 record{};
    if (a.direct) {
      record = load(at);
    } else {
      ptx::cp_async_wait_all();
      const uint4 x = ptx::lds4u(s_record);
      record = make_int4(int(x.x), int(x.y), int(x.z), int(x.w));
    }
    const Item it = take(record);
    ask();
    return it;
  }
};

// .. where Args::until chooses: items with a head of which the chunk is asked for. A warp walks, its lanes look at the next 32
// items at once; what they found is used up before they look again.
struct ChosenWalk {
  const Args& a;
  Cursor next;         // of what nobody has looked at yet
  Cursor place{};      // this lane's
  int4 record{};       // .. and its chunk
  uint32_t found = 0;  // lanes whose items are still to be taken
  __device__ __forceinline__ bool wanted(const Item& it, int64_t sequence) const {
    const int32_t* until = a.until + sequence * a.num_v_heads + it.v_head;
    int32_t last = 0;
    for (int i = 0; i < it.heads; i++) last = max(last, until[i]);
    return it.slot < last;
  }
  __device__ __forceinline__ Item take(int lane) {
    while (found == 0) {
      if (next.slot >= a.slots) return Item{};
      place = next;
      place.advance(a, lane);
      record = place.slot < a.slots ? reinterpret_cast<const int4*>(a.chunk_table)[place.slot] : int4{};
      found = __ballot_sync(~0u, record.z != 0 && wanted(decode_item(a, place, record), record.w));
      next.advance(a, 32);
    }
    const int from = __ffs(int(found)) - 1;
    found &= found - 1;
    const auto of = [&](int x) { return __shfl_sync(~0u, x, from); };
    return decode_item(a, {of(place.slot), of(place.rest)}, make_int4(of(record.x), of(record.y), of(record.z), of(record.w)));
  }
};

// K [K;Q]^T (or K K^T alone) of all 128 features
template <typename T, int Regs>
__device__ __forceinline__ void scores_product(float (&acc)[Regs], uint32_t tiles) {
  const uint64_t k = descriptor_k_major(tiles);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint64_t at = advance(k, i / 4 * 16384 + i % 4 * 32);
    ptx::wgmma_ss<T, 0>(acc, at, at, i > 0);
  }
  ptx::wgmma_commit();
}
template <int Regs>
__device__ __forceinline__ void scale_by_norms(float (&acc)[Regs], uint32_t norm, int warp, int lane) {
  const float r0 = ptx::lds(norm + fragment_row(warp, lane) * 4), r1 = ptx::lds(norm + fragment_row(warp, lane) * 4 + 32);
#pragma unroll
  for (int n = 0; n < Regs / 4; n++) {
    const float2 c = ptx::lds2(norm + (8 * n + fragment_col(lane)) * 4);  // rk, then rq
    acc[4 * n] *= r0 * c.x;
    acc[4 * n + 1] *= r0 * c.y;
    acc[4 * n + 2] *= r1 * c.x;
    acc[4 * n + 3] *= r1 * c.y;
  }
}
// the lower blocks of K K^T
__device__ __forceinline__ void put_fragments(uint32_t out, const float* acc, int warp, int lane) {
  const uint32_t at = out + fragment_block(warp, 0) + lane * 16;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    if (w > warp) break;
    ptx::sts4(at + w * kFragmentBytes, acc[8 * w], acc[8 * w + 1], acc[8 * w + 2], acc[8 * w + 3]);
    ptx::sts4(at + w * kFragmentBytes + 512, acc[8 * w + 4], acc[8 * w + 5], acc[8 * w + 6], acc[8 * w + 7]);
  }
}

// One warp: its tile to global memory.
__device__ __forceinline__ void store_tile(uint8_t* out, uint32_t tile, int lane) {
  ptx::proxy_fence();
  __syncwarp();
  if (lane == 0) {
    ptx::bulk_store(out, tile, kTileBytes);
    ptx::bulk_commit();
  }
}
// .. and its tile may be written again
__device__ __forceinline__ void wait_for_tile(int lane) {
  if (lane == 0) ptx::bulk_wait_read();
  __syncwarp();
}

template <typename T, bool WithPg, bool MayChoose>
__device__ __forceinline__ void scores_role(const Args& a, Walk& walk, ChosenWalk& chosen, Item* s_item, uint32_t smem,
                                            const CUtensorMap& map_k, const CUtensorMap& map_q) {
  const int tid = threadIdx.x % 128, lane = tid % 32, warp = tid / 32;
  constexpr int kPlaces = places(WithPg);
  const uint32_t tiles = smem + kSmemPg;
  const bool normalise = a.flags & QLA_FLAG_QK_L2NORM;
  int first_warp = 0;                         // that has the item's first head
  if (a.early && a.plan.sums && warp == 1) {  // tiles are on their way
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
  }
#pragma unroll 1
  for (int n = 0;; n++) {
    const Item it = s_item[n % kItems];
    if (it.heads == 0) break;
    const uint32_t odd = n % 2, parity = n / 2 % 2, place = n % kPlaces, tile_place = WithPg ? 0 : odd;
    if (n >= kPlaces) ptx::mbarrier_wait(smem + kBarEmpty + place * 8, (n / kPlaces & 1) ^ 1);
    ptx::mbarrier_wait(smem + kBarKq + tile_place * 8, WithPg ? odd : parity);
    if (it.rows < 64) zero_tail<WithPg>(smem, tile_place, it.rows, tid);
    float acc[WithPg ? 64 : 32];
    const uint32_t kq = smem + kSmemKq + tile_place * 8192;
    scores_product<T>(acc, kq);
    if (MayChoose && a.until) {
      if (warp == 0) {
        const Item next = chosen.take(lane);
        if (lane == 0) s_item[(n + 2) % kItems] = next;
      }
    } else if (tid == 0) {
      s_item[(n + 2) % kItems] = walk.take_asked();
    }
    __syncwarp();
    const uint32_t norm = smem + kSmemNorm + place * 512;
    if (normalise) {
      norms<T, WithPg>(kq, norm, tid);
      ptx::named_sync(kScores, 128);
    }
    if (WithPg && lane == 0) ptx::bulk_wait_read();
    __syncwarp();
    ptx::wgmma_wait();
    ptx::named_sync(kScores, 128);
    if (tid == 0) {
      const Item& next = s_item[(n + (WithPg ? 1 : 2)) % kItems];
      if (next.heads) load_tiles<WithPg>(smem, tile_place, map_k, map_q, next);
    }
    if (normalise) scale_by_norms(acc, norm, warp, lane);
    put_fragments(smem + fragments(WithPg, place), acc, warp, lane);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(smem + kBarFull + place * 8);
    if constexpr (WithPg) {
      if (a.pg == nullptr) continue;
      float* p = acc + 32;
#pragma unroll
      for (int i = 0; i < 32; i++) p[i] *= -a.scale;
      float diagonal[8];
#pragma unroll
      for (int w = 0; w < 4; w++)
#pragma unroll
        for (int i = 0; i < 8; i++) diagonal[i] = w == 0 || w == warp ? p[8 * w + i] : diagonal[i];
      ptx::mbarrier_wait(smem + kBarVectors + odd * 8, parity);
      const uint32_t vec = smem + kSmemVec + odd * kHeads * kHeadFloats * 4;
      uint32_t tile = tiles;
#pragma unroll 1
      for (int head = 0; head < it.heads; head++, tile += kTileBytes, first_warp = (first_warp + 1) & 3)
        head_scores<T>(p, diagonal, vec + first_warp * kHeadFloats * 4, tile, warp, lane);
      ptx::proxy_fence();
      ptx::named_sync(kScores, 128);
      if (lane == 0 && warp < it.heads) {
        ptx::bulk_store(a.pg + (int64_t(it.slot) * a.num_v_heads + it.v_head + warp) * kTileBytes, tiles + warp * kTileBytes,
                        kTileBytes);
        ptx::bulk_commit();
      }
      __syncwarp();
    }
  }
}

template <typename T, bool WithPg, bool Gated>
__device__ __forceinline__ void inverse_role(const Args& a, const Item* s_item, uint32_t smem) {
  constexpr int kPlaces = places(WithPg);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t tile = smem + kSmemAbar + warp * kTileBytes, raw = smem + kSmemRaw + warp * 1024;
  int head = warp;  // of the item's heads this warp has this one; beyond its last: none
  if (head < s_item[0].heads) load_gates<Gated>(raw, a, s_item[0], head, lane);
#pragma unroll 1
  for (int n = 0;; n++) {
    const Item it = s_item[n % kItems];
    if (it.heads == 0) break;
    const bool mine = head < it.heads;
    const uint32_t odd = n % 2, place = n % kPlaces;
    const uint32_t vec = smem + kSmemVec + (odd * kHeads + warp) * kHeadFloats * 4;
    if (mine) {
      ptx::cp_async_wait_all();
      __syncwarp();
      gate_vectors<Gated>(raw, vec, a, it, head, lane);
    }
    __syncwarp();
    if (WithPg && a.pg && lane == 0) ptx::mbarrier_arrive(smem + kBarVectors + odd * 8);  // else nobody waits for it
    const int next = (head - it.heads) & 3;
    const Item& after = s_item[(n + 1) % kItems];
    if (next < after.heads) load_gates<Gated>(raw, a, after, next, lane);
    ptx::mbarrier_wait(smem + kBarFull + place * 8, n / kPlaces & 1);
    if (mine) {
      const uint32_t kk = smem + fragments(WithPg, place);
      if (Gated && a.vec) put_record(smem + kSmemNorm + place * 512, vec, a, it, head, lane);
      // Looked up, not held: 128 registers are all in use. The word is read only in calls that may spare the sums.
      if (Gated && a.decay && !(a.spares_sums && ptx::lds(smem + kSmemSums) == 0.f)) {
        // plan_few has marked all sums as missing. Heads go to the four warps in turn: a warp's first one is of these items.
        if (a.early && n < 4) ptx::grid_dependency_wait();
        put_decay(kk, vec, a, it, head, lane);
      }
      wait_for_tile(lane);
      if (head_inverse<T, Gated>(kk, vec, tile, lane)) [[unlikely]]
        guarded_head<T, Gated>(kk, vec, tile, smem + kSmemX + 1024 * warp, lane);
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(smem + kBarEmpty + place * 8);
    if (mine) {
      if constexpr (Gated)
        store_tile(a.abar + (int64_t(it.slot) * a.num_v_heads + it.v_head + head) * kTileBytes, tile, lane);
      else
        store_a_inv<T>(a, it, head, tile, lane);
      __syncwarp();
    }
    head = next;
  }
}

template <typename T, bool WithPg, bool Gated>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    chunk_intra(const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_q,
                const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t s_all[];
  const uint32_t smem = ptx::shared_address(s_all);
  Item* s_item = reinterpret_cast<Item*>(s_all + kSmemItem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      ptx::mbarrier_init(smem + kBarKq + 8 * i, 1);
      ptx::mbarrier_init(smem + kBarVectors + 8 * i, 4);
    }
    for (int i = 0; i < kMostPlaces; i++) {
      ptx::mbarrier_init(smem + kBarFull + 8 * i, 4);
      ptx::mbarrier_init(smem + kBarEmpty + 8 * i, 4);
    }
    ptx::mbarrier_init_fence();
    ptx::tensor_prefetch_map(&map_k);
    if (WithPg) ptx::tensor_prefetch_map(&map_q);
  }
  // Who reads the sums while they are made must not see what lay there before plan_few: it may begin when that is complete.
  if (a.makes_plan)
    ptx::begin_call();
  else if (!a.plan.sums)
    ptx::grid_dependency_launch();
  // Complete: the kernel before let this one begin when it had waited for whoever wrote it.
  if (a.asks && ptx::load_relaxed(&a.plan.header->num_items) == 0) {
    if (blockIdx.x == 0) ptx::grid_dependency_wait();  // it ends when all before it has ended
    return;
  }
  if (!a.early) ptx::grid_dependency_wait();
  if (!a.early && a.plan.sums) ptx::grid_dependency_launch();
  Walk walk{a,
            smem + kSmemRecord,
            {int(blockIdx.x) / (a.num_k_heads * a.parts), int(blockIdx.x) % (a.num_k_heads * a.parts)},
            0,
            int(a.tokens)};
  walk.at.leave_out_last(a);
  if (a.makes_plan && blockIdx.x == gridDim.x - 1) return segments::direct_tables(a.plan);
  int4 record{}, second{};
  bool cuts = true;
  if ((a.makes_plan || a.ahead) && threadIdx.x < 32) {
    Cursor after = walk.at;
    after.advance(a);
    const auto direct = segments::direct_records(a.plan, {walk.at.slot, after.slot});
    record = reinterpret_cast<const int4&>(direct.record[0]);
    second = reinterpret_cast<const int4&>(direct.record[1]);
    cuts = direct.cuts;
  }
  constexpr bool kMayChoose = !WithPg && Gated;
  ChosenWalk chosen{a, walk.at};
  if (kMayChoose && a.until) {
    if (threadIdx.x < 32) {
      const Item first = chosen.take(int(threadIdx.x)), second = chosen.take(int(threadIdx.x));
      if (threadIdx.x == 0) {
        s_item[0] = first, s_item[1] = second;
        if (first.heads) load_tiles<WithPg>(smem, 0, map_k, map_q, first);
        if (!WithPg && second.heads) load_tiles<WithPg>(smem, 1, map_k, map_q, second);
      }
    }
  } else if (threadIdx.x == 0) {
    if (!a.makes_plan && !a.ahead) {
      if (a.direct) single_sequence(a, walk.first_token, walk.end_token);
      Cursor after = walk.at;
      after.advance(a);
      record = walk.load(walk.at);
      second = walk.load(after);
    }
    const Cursor first = walk.at;
    s_item[0] = walk.take(record);
    if (s_item[0].heads) load_tiles<WithPg>(smem, 0, map_k, map_q, s_item[0]);
    if (a.makes_plan) walk.at.slot = a.slots;  // a CTA an item
    s_item[1] = walk.take(a.makes_plan || s_item[0].slot == first.slot ? second : walk.load(walk.at));
    if (!WithPg && s_item[1].heads) load_tiles<WithPg>(smem, 1, map_k, map_q, s_item[1]);
    walk.ask();
    ptx::sts(smem + kSmemSums, cuts || !a.spares_sums ? 1.f : 0.f);
  }
  __syncthreads();
  if (threadIdx.x < 128)
    scores_role<T, WithPg, kMayChoose>(a, walk, chosen, s_item, smem, map_k, map_q);
  else
    inverse_role<T, WithPg, Gated>(a, s_item, smem);
  ptx::bulk_wait();
  if (a.early) ptx::grid_dependency_wait();  // whoever waits for this kernel counts on all before it
}

}  // namespace qla::cuda::intra
