// The forward kernel's intra-chunk role (fused form): Abar (F3) and Pg (F6) of the next chunk by one warpgroup, beside the state
// roles. In the accumulators, transposed: acc[0..31] = (K K^T)[j][i], acc[32..63] = (K Q^T)[j][i]; warp w: j = 16 w + lane / 4 (+
// 8), i = 8 n + 2 (lane % 4) (+ 1).
#pragma once

#include "cuda/kernels/forward/smem.cuh"
#include "cuda/math/exp.cuh"
#include "cuda/math/tril_inverse.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace qla::cuda {

// What the blocks of a chunk need. `lane` is opaque to the compiler: addresses are made anew in every chunk; kept, they would
// cost the registers.
struct IntraChunk {
  uint32_t vec, pair, ex;
  int lane;
};
inline constexpr int kIntraBarrier = 6;  // named barriers 6 .. 9

__device__ __forceinline__ uint32_t intra_u(const IntraChunk& x) { return x.ex + tril::kExBytes; }

// e = G beta rk rk of block (b, w), u = the block of U
template <int B>
__device__ __forceinline__ void gate_block(const float (&acc)[64], float (&u)[8], float (&e)[8], const IntraChunk& x, float2 cum,
                                           float2 row) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 i = ptx::lds2(x.vec + (kVecCol + 16 * B + 8 * h + x.lane % 4 * 2) * 4);
    e[4 * h] = exp2_approx(i.x - cum.x) * row.x;
    e[4 * h + 1] = exp2_approx(i.y - cum.x) * row.x;
    e[4 * h + 2] = exp2_approx(i.x - cum.y) * row.y;
    e[4 * h + 3] = exp2_approx(i.y - cum.y) * row.y;
#pragma unroll
    for (int n = 0; n < 4; n++) u[4 * h + n] = acc[8 * B + 4 * h + n] * -e[4 * h + n];
  }
}
// (F6) block (b, w) of Pg
template <typename T, int B, int W>
__device__ __forceinline__ void put_pg(const float (&acc)[64], const float (&e)[8], const IntraChunk& x) {
  const int r = x.lane / 4, t2 = x.lane % 4 * 2;
  float p[8];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 ratio = ptx::lds2(x.vec + (kVecRatio + 16 * B + 8 * h + t2) * 4);
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int i = 4 * h + n;
      p[i] = acc[32 + 8 * B + i] * e[i] * (n % 2 ? ratio.y : ratio.x);
      if (B == W) p[i] = r + i % 4 / 2 * 8 <= i / 4 * 8 + t2 + i % 2 ? p[i] : 0.f;  // a select: e may be inf above the diagonal
    }
  }
  tril::put_tile<T, true>(x.pair + kTileSmemBytes, p, B, W, x.lane);
}
// the lane's addresses are made anew for every block: kept, they would cost registers that the role does not have
__device__ __forceinline__ IntraChunk anew(IntraChunk x) {
  asm volatile("" : "+r"(x.lane));
  return x;
}
template <typename T, int B, int W>
__device__ __forceinline__ void below_block(const float (&acc)[64], const IntraChunk& chunk, float2 cum, float2 row) {
  const IntraChunk x = anew(chunk);
  float u[8], e[8];
  gate_block<B>(acc, u, e, x, cum, row);
  tril::put_u(x.ex, u, B, W, x.lane);
  put_pg<T, B, W>(acc, e, x);
}

// Gates, Pg and the diagonal inverses. Warps 2 and 3, which have fewer blocks, do the four substitutions, two at a time.
template <typename T, int W>
__device__ __forceinline__ void gates_and_diagonals(const float (&acc)[64], const IntraChunk& x, uint32_t free_bar,
                                                    uint32_t free_phase) {
  const uint32_t at = x.vec + (16 * W + x.lane / 4) * 4;
  const float2 cum = make_float2(ptx::lds(at + kVecCum * 4), ptx::lds(at + kVecCum * 4 + 32)),
               row = make_float2(ptx::lds(at + kVecRow * 4), ptx::lds(at + kVecRow * 4 + 32));
  float e[8], u[8];
  gate_block<W>(acc, u, e, x, cum, row);
  tril::put_u_diagonal(intra_u(x), u, W, x.lane);
  if (W < 2) ptx::named_arrive(kIntraBarrier, 128);
  ptx::mbarrier_wait(free_bar, free_phase);  // the tiles of two chunks ago have been used
  put_pg<T, W, W>(acc, e, x);
  if constexpr (W == 0) below_block<T, 1, W>(acc, x, cum, row);
  if constexpr (W < 2) below_block<T, 2, W>(acc, x, cum, row);
  if constexpr (W < 3) below_block<T, 3, W>(acc, x, cum, row);
  if constexpr (W >= 2) {
    ptx::named_sync(kIntraBarrier, 128);
    tril::diagonal_inverses<T, true>(x.pair, x.ex, intra_u(x), W - 2, x.lane);
  }
  ptx::proxy_fence();
  ptx::named_sync(kIntraBarrier + 1, 128);
}

template <typename T>
__device__ __forceinline__ void key_products(float (&acc)[64], uint32_t stage) {
  ptx::wgmma_fence();
#pragma unroll
  for (int w = 0; w < 8; w++) {
    const uint64_t d = descriptor_k_major(stage + w / 4 * 16384 + w % 4 * 32);
    ptx::wgmma_ss<T, 0>(acc, d, d, w > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait();
}

// an operand did not fit fp16: the whole inverse again in fp32
template <typename T>
__device__ __forceinline__ void redo_guarded(uint32_t stage, uint32_t vec, uint32_t pair, uint32_t ex, int tid) {
  const int lane = tid % 32, warp = tid / 32;
  float acc[64];
  key_products<T>(acc, stage);
  const uint32_t at = vec + (16 * warp + lane / 4) * 4;
  const float2 cum = make_float2(ptx::lds(at + kVecCum * 4), ptx::lds(at + kVecCum * 4 + 32)),
               row = make_float2(ptx::lds(at + kVecRow * 4), ptx::lds(at + kVecRow * 4 + 32));
  const IntraChunk x{vec, pair, ex, lane};
  float e[8], u[8];
  gate_block<0>(acc, u, e, x, cum, row);
  if (warp <= 0) tril::put_u_guarded(ex, u, 0, warp, lane);
  gate_block<1>(acc, u, e, x, cum, row);
  if (warp <= 1) tril::put_u_guarded(ex, u, 1, warp, lane);
  gate_block<2>(acc, u, e, x, cum, row);
  if (warp <= 2) tril::put_u_guarded(ex, u, 2, warp, lane);
  gate_block<3>(acc, u, e, x, cum, row);
  tril::put_u_guarded(ex, u, 3, warp, lane);
  ptx::named_sync(kIntraBarrier, 128);
  tril::guarded_inverse_inline<T, true>(pair, ex, tid);
  ptx::named_sync(kIntraBarrier, 128);
  for (int i = tid; i < tril::kExBytes / 16; i += 128) ptx::sts4u(ex + 16 * i, 0, 0, 0, 0);  // its standing zeros
  ptx::proxy_fence();
  ptx::named_sync(kIntraBarrier, 128);
}

__device__ __forceinline__ bool any_of_128(int barrier, bool mine) {
  uint32_t any;
  asm volatile("{.reg .pred p, q; setp.ne.b32 p, %1, 0; barrier.cta.red.or.aligned.pred q, %2, 128, p; selp.u32 %0, 1, 0, q;}"
               : "=r"(any)
               : "r"(int(mine)), "r"(barrier)
               : "memory");
  return any != 0;
}

template <class Cfg, typename T>
__device__ __forceinline__ void intra_role(const ForwardSmem<Cfg>& sm, int tid) {
  const int lane = tid % 32, warp = tid / 32;
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  const auto pairs = sm.pairs();
  Ring<Cfg::kStages> ring;
  Ring<Cfg::kItemSlots> slots;
  Ring<2> pair;
  for (;;) {
    items.consumer_wait(slots);
    const ItemSlot& s = sm.slot(slots.stage);
    if (!s.valid) break;
    const int chunks = s.item.chunks;
    __syncwarp();
    if (lane == 0) items.release(slots);
    slots.advance();
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
      const uint32_t stage = sm.stage(ring.stage);
      tiles.consumer_wait(ring);
      int opaque = lane;
      asm volatile("" : "+r"(opaque));
      const IntraChunk x{stage + Cfg::kOffVec, sm.pair(pair.stage), sm.exchange(), opaque};
      {
        float acc[64];
        key_products<T>(acc, stage);
        const uint32_t free_bar = pairs.empty(pair.stage), free_phase = pair.phase ^ 1;
        if (warp == 0)
          gates_and_diagonals<T, 0>(acc, x, free_bar, free_phase);
        else if (warp == 1)
          gates_and_diagonals<T, 1>(acc, x, free_bar, free_phase);
        else if (warp == 2)
          gates_and_diagonals<T, 2>(acc, x, free_bar, free_phase);
        else
          gates_and_diagonals<T, 3>(acc, x, free_bar, free_phase);
      }
      const bool poison = tril::off_diagonal_blocks<T, true>(x.pair, x.ex, warp, opaque, kIntraBarrier + 2);
      ptx::proxy_fence();
      if (any_of_128(kIntraBarrier + 3, poison)) redo_guarded<T>(stage, x.vec, x.pair, x.ex, tid);
      if (lane == 0) ptx::mbarrier_arrive(pairs.full(pair.stage));
      pair.advance();
      ring.advance();
    }
  }
}

}  // namespace qla::cuda
