// The fused forward's intra-chunk role: Abar (F3) and Pg (F6) of a chunk by one warpgroup, ahead of the state roles. In the
// accumulators, transposed: acc[0..31] = (K K^T)[j][i], acc[32..63] = (K Q^T)[j][i]; warp w: j = 16 w + lane / 4 (+ 8),
// i = 8 n + 2 (lane % 4) (+ 1).
//
// The way to Abar is a chain of products and its length decides the kernel's speed, so warps 2 and 3, which have fewer blocks,
// invert the four diagonal blocks first and finish their blocks of Pg behind that; warps 0 and 1 gate the others meanwhile.
#pragma once

#include "cuda/kernels/forward_fused/smem.cuh"
#include "cuda/math/exp.cuh"
#include "cuda/math/tril_inverse.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace qla::cuda {

inline constexpr int kIntraBarrier = 6;  // named barriers 6 .. 9

// What is the same for all blocks of a warp and chunk. `lane` is opaque to the compiler: addresses are made anew in every chunk;
// kept, they would cost registers that the role does not have.
struct IntraChunk {
  uint32_t vec, abar, ex;  // gate vectors, tile pair, exchange memory
  float scale;
  int lane;
  float2 cum, beta;   // of this lane's rows j, j + 8
  float2 columns[2];  // cumulated gates of this lane's columns i of the next block to be gated
  __device__ __forceinline__ uint32_t pg() const { return abar + kTileSmemBytes; }
  __device__ __forceinline__ uint32_t u() const { return ex + tril::kExBytes; }
};

template <class X>
__device__ __forceinline__ void load_gate_columns(X& x, int b) {
  const uint32_t at = x.vec + (kFusedCum + 16 * b) * 4 + x.lane % 4 * 8;
  x.columns[0] = ptx::lds2(at);
  x.columns[1] = ptx::lds2(at + 32);
}
// e = G diag(beta) of block (b, w), transposed; its part of K K^T becomes the block of U
template <int B>
__device__ __forceinline__ void fused_gate(float (&acc)[64], float (&e)[8], IntraChunk& x) {
  const float2 columns[2] = {x.columns[0], x.columns[1]};
  if constexpr (B < 3) load_gate_columns(x, B + 1);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 i = columns[h];
    e[4 * h] = exp2_approx(i.x - x.cum.x) * x.beta.x;
    e[4 * h + 1] = exp2_approx(i.y - x.cum.x) * x.beta.x;
    e[4 * h + 2] = exp2_approx(i.x - x.cum.y) * x.beta.y;
    e[4 * h + 3] = exp2_approx(i.y - x.cum.y) * x.beta.y;
#pragma unroll
    for (int n = 0; n < 4; n++) acc[8 * B + 4 * h + n] *= -e[4 * h + n];
  }
}
// .. of a diagonal block, whose rows j + 8 take nothing from columns i < 8
template <int W>
__device__ __forceinline__ void fused_diagonal(float (&acc)[64], float (&e)[8], IntraChunk& x) {
  const float2 low = x.columns[0], high = x.columns[1];
  if constexpr (W < 3) load_gate_columns(x, W + 1);
  e[0] = exp2_approx(low.x - x.cum.x) * x.beta.x;
  e[1] = exp2_approx(low.y - x.cum.x) * x.beta.x;
  e[2] = e[3] = 0.f;
  e[4] = exp2_approx(high.x - x.cum.x) * x.beta.x;
  e[5] = exp2_approx(high.y - x.cum.x) * x.beta.x;
  e[6] = exp2_approx(high.x - x.cum.y) * x.beta.y;
  e[7] = exp2_approx(high.y - x.cum.y) * x.beta.y;
  const uint32_t at = x.u() + W * tril::kBlockU + (x.lane / 4 * tril::kPitchU + x.lane % 4 * 2) * 4;
  const float* k = acc + 8 * W;
  ptx::sts2(at, k[0] * -e[0], k[1] * -e[1]);
  ptx::sts2(at + 32, k[4] * -e[4], k[5] * -e[5]);
  ptx::sts2(at + (8 * tril::kPitchU + 8) * 4, k[6] * -e[6], k[7] * -e[7]);
}
// (F6) block (b, w) of Pg diag(beta)
template <typename T, int B, int W>
__device__ __forceinline__ void fused_pg(const float (&acc)[64], const float (&e)[8], const IntraChunk& x) {
  const int r = x.lane / 4, t2 = x.lane % 4 * 2;
  float p[8];
#pragma unroll
  for (int i = 0; i < 8; i++) p[i] = acc[32 + 8 * B + i] * (e[i] * x.scale);
  if constexpr (B == W) {  // selects: e may be inf above the diagonal
    p[0] = r <= t2 ? p[0] : 0.f;
    p[1] = r <= t2 + 1 ? p[1] : 0.f;
    p[2] = p[3] = 0.f;
    p[6] = r <= t2 ? p[6] : 0.f;
    p[7] = r <= t2 + 1 ? p[7] : 0.f;
  }
  tril::put_tile<T, true>(x.pg(), p, B, W, x.lane);
}
template <typename T, int B, int W>
__device__ __forceinline__ void fused_block(float (&acc)[64], float (&e)[8], IntraChunk& x) {
  fused_gate<B>(acc, e, x);
  tril::put_u(x.ex, acc + 8 * B, B, W, x.lane);
  fused_pg<T, B, W>(acc, e, x);
}

template <typename T, int W>
__device__ __forceinline__ void gates_and_diagonals(float (&acc)[64], IntraChunk& x, uint32_t pair_empty, uint32_t parity) {
  float e[8];
  fused_diagonal<W>(acc, e, x);
  if constexpr (W < 2) {
    ptx::named_arrive(kIntraBarrier, 128);
    ptx::mbarrier_wait(pair_empty, parity);  // the tiles of two chunks ago have been used
    fused_pg<T, W, W>(acc, e, x);
    if constexpr (W == 0) fused_block<T, 1, W>(acc, e, x);
    fused_block<T, 2, W>(acc, e, x);
    fused_block<T, 3, W>(acc, e, x);
  } else {
    float e3[8];
    if constexpr (W == 2) {
      fused_gate<3>(acc, e3, x);
      tril::put_u(x.ex, acc + 24, 3, W, x.lane);
    }
    ptx::mbarrier_wait(pair_empty, parity);
    ptx::named_sync(kIntraBarrier, 128);
    tril::diagonal_inverses<T, true>(x.abar, x.ex, x.u(), W - 2, x.lane);
    fused_pg<T, W, W>(acc, e, x);
    if constexpr (W == 2) fused_pg<T, 3, W>(acc, e3, x);
  }
}

// An operand did not fit fp16: the whole inverse again in fp32, K K^T included. Rare, so slow and with few registers.
template <typename T>
__device__ __forceinline__ void redo_guarded(const IntraChunk& x, uint32_t keys, int tid) {
#pragma unroll 1
  for (int at = tid; at < 10 * 256; at += 128) {
    const int block = at / 256, b = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3, w = block - b * (b + 1) / 2;
    const int i = 16 * b + at / 16 % 16, j = 16 * w + at % 16;
    float sum = 0.f;
#pragma unroll 1
    for (int d = 0; d < 128 && j < i; d += 2) {
      const uint32_t panel = keys + d / 64 * FusedConfig::kPanelBytes;
      const float2 ki = unpack<T>(__float_as_uint(ptx::lds(panel + swizzle_128(i * 128 + d % 64 * 2))));
      const float2 kj = unpack<T>(__float_as_uint(ptx::lds(panel + swizzle_128(j * 128 + d % 64 * 2))));
      sum = fmaf(ki.x, kj.x, fmaf(ki.y, kj.y, sum));
    }
    const float e = exp2_approx(ptx::lds(x.vec + (kFusedCum + i) * 4) - ptx::lds(x.vec + (kFusedCum + j) * 4)) *
                    ptx::lds(x.vec + (kFusedBeta + j) * 4);
    ptx::sts(x.ex + tril::guarded_block(b, w) + (at / 16 % 16 * 16 + at % 16) * 4, j < i ? -e * sum : 0.f);
  }
  ptx::named_sync(kIntraBarrier, 128);
  tril::guarded_inverse_inline<T, true>(x.abar, x.ex, tid);
  ptx::named_sync(kIntraBarrier, 128);
#pragma unroll 1
  for (int i = tid; i < tril::kExBytes / 16; i += 128) ptx::sts4u(x.ex + 16 * i, 0, 0, 0, 0);  // its standing zeros
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

__device__ __forceinline__ void load_gates(IntraChunk& x, int warp) {
  const uint32_t row = x.vec + (16 * warp + x.lane / 4) * 4;
  x.cum = make_float2(ptx::lds(row + kFusedCum * 4), ptx::lds(row + kFusedCum * 4 + 32));
  x.beta = make_float2(ptx::lds(row + kFusedBeta * 4), ptx::lds(row + kFusedBeta * 4 + 32));
  load_gate_columns(x, warp);
}

template <typename T>
__device__ __forceinline__ void intra_role(const ForwardArgs& a, const FusedSmem& sm) {
  const int warp = threadIdx.x / 32 % 4;
  const auto tiles = sm.tiles();
  const auto pairs = sm.pairs();
  FusedWalk walk;
  for (;; walk.next_item()) {
    ptx::mbarrier_wait(sm.items().full(walk.slot()), walk.slot_phase());
    if (!slot::valid(sm.slot_address(walk.slot()))) break;
    walk.begin_item(slot::chunks(sm.slot_address(walk.slot())));
    __syncwarp();
    if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(sm.items().empty(walk.slot()));
#pragma unroll 1
    while (walk.more()) {
      const uint32_t stage = sm.stage(walk.stage);
      ptx::mbarrier_wait(tiles.full(walk.stage), walk.phase());
      int lane = threadIdx.x % 32;
      asm volatile("" : "+r"(lane));
      IntraChunk x{stage + FusedConfig::kOffVec, sm.pair(walk.pair()), sm.exchange(), a.p.scale, lane, {}, {}, {}};
      float acc[64];
      ptx::wgmma_fence();
#pragma unroll
      for (int w = 0; w < 8; w++) {
        const uint64_t d = descriptor_k_major(stage + w / 4 * FusedConfig::kPanelBytes + w % 4 * 32);
        ptx::wgmma_ss<T, 0>(acc, d, d, w > 0);
      }
      ptx::wgmma_commit();
      load_gates(x, warp);
      ptx::wgmma_wait();
      const uint32_t empty = pairs.empty(walk.pair()), parity = walk.pair_phase() ^ 1;
      if (warp == 0)
        gates_and_diagonals<T, 0>(acc, x, empty, parity);
      else if (warp == 1)
        gates_and_diagonals<T, 1>(acc, x, empty, parity);
      else if (warp == 2)
        gates_and_diagonals<T, 2>(acc, x, empty, parity);
      else
        gates_and_diagonals<T, 3>(acc, x, empty, parity);
      ptx::proxy_fence();
      ptx::named_sync(kIntraBarrier + 1, 128);
      const bool poison = tril::off_diagonal_blocks<T, true>(x.abar, x.ex, warp, lane, kIntraBarrier + 2);
      ptx::proxy_fence();
      if (any_of_128(kIntraBarrier + 3, poison)) [[unlikely]]
        redo_guarded<T>(x, stage, thread_in_group());
      if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(pairs.full(walk.pair()));
      walk.next_chunk();
    }
  }
}

}  // namespace qla::cuda
