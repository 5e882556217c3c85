// The forward kernel's intra-chunk role (fused form): Abar (F3) and Pg (F6) of the next chunk by one warpgroup, beside the state
// roles. In the accumulators, transposed: acc[0..31] = (K K^T)[j][i], acc[32..63] = (K Q^T)[j][i]; warp w: j = 16 w + lane / 4 (+
// 8), i = 8 n + 2 (lane % 4) (+ 1).
#pragma once

#include "cuda/math/exp.cuh"
#include "cuda/math/tril_inverse.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "smem.cuh"

namespace qla::cuda {

// What the blocks of a chunk need, in few registers: everything else is an offset from them. `lane` is opaque to the compiler:
// addresses are made anew for every block; kept, they would cost registers that the role does not have.
template <class Cfg>
struct IntraChunk {
  uint32_t base, stage, walked;
  int lane;
  __device__ __forceinline__ uint32_t vec(int which) const { return stage + Cfg::kOffVec + which * 4; }
  __device__ __forceinline__ uint32_t abar() const { return base + Cfg::kOffPairs + (walked & 1) * 2 * kTileSmemBytes; }
  __device__ __forceinline__ uint32_t pg() const { return abar() + kTileSmemBytes; }
  __device__ __forceinline__ uint32_t ex() const { return base + Cfg::kOffExchange; }
  __device__ __forceinline__ uint32_t u() const { return ex() + tril::kExBytes; }
  __device__ __forceinline__ IntraChunk anew() const {
    IntraChunk x = *this;
    asm volatile("" : "+r"(x.lane));
    return x;
  }
};
inline constexpr int kIntraBarrier = 6;  // named barriers 6 .. 9

// e = G beta rk rk of block (b, w); its part of acc becomes the block of U
template <int B, int W, class X>
__device__ __forceinline__ void gate_block(float (&acc)[64], float (&e)[8], const X& x) {
  const uint32_t at = x.vec(16 * W) + x.lane / 4 * 4;
  const float2 cum = make_float2(ptx::lds(at + kVecCum * 4), ptx::lds(at + kVecCum * 4 + 32));
  const float2 row = make_float2(ptx::lds(at + kVecRow * 4), ptx::lds(at + kVecRow * 4 + 32));
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 i = ptx::lds2(x.vec(kVecCol + 16 * B + 8 * h) + x.lane % 4 * 8);
    e[4 * h] = exp2_approx(i.x - cum.x) * row.x;
    e[4 * h + 1] = exp2_approx(i.y - cum.x) * row.x;
    e[4 * h + 2] = exp2_approx(i.x - cum.y) * row.y;
    e[4 * h + 3] = exp2_approx(i.y - cum.y) * row.y;
#pragma unroll
    for (int n = 0; n < 4; n++) acc[8 * B + 4 * h + n] *= -e[4 * h + n];
  }
}
// (F6) block (b, w) of Pg
template <typename T, int B, int W, class X>
__device__ __forceinline__ void put_pg(float (&acc)[64], const float (&e)[8], const X& x) {
  const int r = x.lane / 4, t2 = x.lane % 4 * 2;
  float* p = acc + 32 + 8 * B;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 ratio = ptx::lds2(x.vec(kVecRatio + 16 * B + 8 * h) + t2 * 4);
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int i = 4 * h + n;
      p[i] *= e[i] * (n % 2 ? ratio.y : ratio.x);
      if (B == W) p[i] = r + i % 4 / 2 * 8 <= i / 4 * 8 + t2 + i % 2 ? p[i] : 0.f;  // a select: e may be inf above the diagonal
    }
  }
  tril::put_tile<T, true>(x.pg(), p, B, W, x.lane);
}
template <typename T, int B, int W, class X>
__device__ __forceinline__ void below_block(float (&acc)[64], const X& chunk) {
  const X x = chunk.anew();
  float e[8];
  gate_block<B, W>(acc, e, x);
  tril::put_u(x.ex(), acc + 8 * B, B, W, x.lane);
  put_pg<T, B, W>(acc, e, x);
}

// Gates, Pg and the diagonal inverses. Warps 2 and 3, which have fewer blocks, do the four substitutions, two at a time.
template <typename T, int W, class X, class Wait>
__device__ __forceinline__ void gates_and_diagonals(float (&acc)[64], const X& x, const Wait& wait_pair) {
  float e[8];
  gate_block<W, W>(acc, e, x);
  tril::put_u_diagonal(x.u(), acc + 8 * W, W, x.lane);
  if (W < 2) ptx::named_arrive(kIntraBarrier, 128);
  wait_pair();  // the tiles of two chunks ago have been used
  put_pg<T, W, W>(acc, e, x.anew());
  if constexpr (W == 0) below_block<T, 1, W>(acc, x);
  if constexpr (W < 2) below_block<T, 2, W>(acc, x);
  if constexpr (W < 3) below_block<T, 3, W>(acc, x);
  if constexpr (W >= 2) {
    ptx::named_sync(kIntraBarrier, 128);
    tril::diagonal_inverses<T, true>(x.abar(), x.ex(), x.u(), W - 2, x.lane);
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

// An operand did not fit fp16: the whole inverse again in fp32, products included. Rare, so slow and with few registers.
template <typename T, class X>
__device__ __forceinline__ void redo_guarded(const X& x, int tid) {
#pragma unroll 1
  for (int at = tid; at < 10 * 256; at += 128) {
    const int block = at / 256, b = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3, w = block - b * (b + 1) / 2;
    const int i = 16 * b + at / 16 % 16, j = 16 * w + at % 16;
    float sum = 0.f;
#pragma unroll 1
    for (int d = 0; d < 128 && j < i; d += 2) {
      const uint32_t panel = x.stage + d / 64 * 16384;
      const float2 ki = unpack<T>(__float_as_uint(ptx::lds(panel + swizzle_128(i * 128 + d % 64 * 2))));
      const float2 kj = unpack<T>(__float_as_uint(ptx::lds(panel + swizzle_128(j * 128 + d % 64 * 2))));
      sum = fmaf(ki.x, kj.x, fmaf(ki.y, kj.y, sum));
    }
    const float e =
        exp2_approx(ptx::lds(x.vec(kVecCol) + i * 4) - ptx::lds(x.vec(kVecCum) + j * 4)) * ptx::lds(x.vec(kVecRow) + j * 4);
    ptx::sts(x.ex() + tril::guarded_block(b, w) + (at / 16 % 16 * 16 + at % 16) * 4, j < i ? -e * sum : 0.f);
  }
  ptx::named_sync(kIntraBarrier, 128);
  tril::guarded_inverse_inline<T, true>(x.abar(), x.ex(), tid);
  ptx::named_sync(kIntraBarrier, 128);
#pragma unroll 1
  for (int i = tid; i < tril::kExBytes / 16; i += 128) ptx::sts4u(x.ex() + 16 * i, 0, 0, 0, 0);  // its standing zeros
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
__device__ __forceinline__ void intra_role(const ForwardSmem<Cfg>& sm, int warp) {
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  const auto pairs = sm.pairs();
  uint32_t walked = 0;  // chunks: gives stages and parities of all rings
  static_assert(Cfg::kItemSlots == 2);
  for (uint32_t taken = 0;; taken++) {  // items
    ptx::mbarrier_wait(items.full(taken & 1), taken >> 1 & 1);
    if (!slot::valid(sm.slot_address(taken & 1))) break;
    const uint32_t end = walked + slot::chunks(sm.slot_address(taken & 1));
    __syncwarp();
    if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(items.empty(taken & 1));
#pragma unroll 1
    for (; walked != end; walked++) {
      const uint32_t stage = sm.stage(walked % Cfg::kStages);
      ptx::mbarrier_wait(tiles.full(walked % Cfg::kStages), walked / Cfg::kStages & 1);
      const IntraChunk<Cfg> x{sm.base, stage, walked, thread_in_group() % 32};
      {
        float acc[64];
        key_products<T>(acc, stage);
        const auto wait_pair = [&] { ptx::mbarrier_wait(pairs.empty(walked & 1), (walked >> 1 & 1) ^ 1); };
        if (warp == 0)
          gates_and_diagonals<T, 0>(acc, x, wait_pair);
        else if (warp == 1)
          gates_and_diagonals<T, 1>(acc, x, wait_pair);
        else if (warp == 2)
          gates_and_diagonals<T, 2>(acc, x, wait_pair);
        else
          gates_and_diagonals<T, 3>(acc, x, wait_pair);
      }
      const bool poison = tril::off_diagonal_blocks<T, true>(x.abar(), x.ex(), warp, x.lane, kIntraBarrier + 2);
      ptx::proxy_fence();
      if (any_of_128(kIntraBarrier + 3, poison)) redo_guarded<T>(x, thread_in_group());
      if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(pairs.full(walked & 1));
    }
  }
}

}  // namespace qla::cuda
