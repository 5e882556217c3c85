// The fused forward's intra-chunk role: Abar (F3) and Pg (F6) of a chunk by one warpgroup, ahead of the state roles. In the
// accumulators, transposed: acc[0..31] = (K K^T)[j][i], acc[32..63] = (K Q^T)[j][i]; warp w: j = 16 w + lane / 4 (+ 8),
// i = 8 n + 2 (lane % 4) (+ 1).
//
// The way to Abar is a chain of products and its length decides the kernel's speed, so warps 2 and 3, which have fewer blocks,
// invert the four diagonal blocks first and finish their blocks of Pg behind that; warps 0 and 1 gate the others meanwhile. The
// next chunk's K K^T runs between this one's block products, which leave the tensor cores idle (64 registers more, for all of
// K [K;Q]^T, are not there), its K Q^T when Abar has been handed over.
#pragma once

#include "cuda/kernels/forward_fused/smem.cuh"
#include "cuda/math/exp.cuh"
#include "cuda/math/tril_inverse.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace qla::cuda {

inline constexpr int kIntraBarrier = 6;  // named barriers 6 .. 10

// What is the same for all blocks of a warp and chunk.
struct IntraChunk {
  uint32_t vec, abar, ex;  // gate vectors, tile pair, exchange memory
  float scale;
  int lane;
  bool grows;         // cut: keys of this lane's rows may grow the state
  tril::Lane at;      // this lane's places, worked out once: the compiler would make them anew for every block
  float2 cum, beta;   // of this lane's rows j, j + 8
  float2 columns[2];  // cumulated gates of this lane's columns i of the next block to be gated
  __device__ __forceinline__ uint32_t pg() const { return abar + kTileSmemBytes; }
  __device__ __forceinline__ uint32_t u() const { return ex + tril::kExBytes; }
};
// (F6)'s blocks to the tile, U's to the exchange memory
template <typename T>
__device__ __forceinline__ void put_pg_block(const IntraChunk& x, const float* z, int b, int w) {
  tril::store_block<T>(x.pg() + tril::tile_block<true>(b, w) + x.at.tile, z);
}
template <int B>
__device__ __forceinline__ void put_u_block(const IntraChunk& x, const float* z, int w) {
  uint32_t at =
      x.ex + (B == 1 ? tril::kExQ : tril::kExP + 2048 * (B - 2)) + (B == 1 ? x.at.exchange : x.at.exchange ^ uint32_t(32 * w));
  if (B == 3 && w == 2) at = x.ex + tril::kExQ + (x.at.exchange ^ 32);
  tril::store_block<__half>(at, z);
}

template <bool Norm, class X>
__device__ __forceinline__ void load_gate_columns(X& x, int b) {
  const uint32_t at = x.vec + ((Norm ? kFusedCumRows : kFusedCum) + 16 * b) * 4 + x.lane % 4 * 8;
  x.columns[0] = ptx::lds2(at);
  x.columns[1] = ptx::lds2(at + 32);
}
// of a vector, this lane's four columns of block b: 2 (lane % 4), + 1, + 8, + 9
struct BlockColumns {
  float2 at[2];
  __device__ __forceinline__ BlockColumns(const IntraChunk& x, int which, int b)
      : at{ptx::lds2(x.vec + (which + 16 * b) * 4 + x.lane % 4 * 8),
           ptx::lds2(x.vec + (which + 16 * b) * 4 + x.lane % 4 * 8 + 32)} {}
  // .. of element i of an accumulator block
  __device__ __forceinline__ float of(int i) const { return i % 2 ? at[i / 4].y : at[i / 4].x; }
};

// Cut: keys may grow the state of the item's head (kMostKeyStep). All who say so write the same. The item's slot is still its
// own: the states are behind.
__device__ __forceinline__ void distrust(const FusedArgs& a, uint32_t item) {
  if (a.p.again || !a.p.heads) return;
  uint8_t* head = a.p.heads + int64_t(slot::sequence(item)) * a.p.num_v_heads + slot::v_head(item);
  const uint8_t bits = *head;
  if (!(bits & kHeadForgets)) return;
  *head = uint8_t(bits | kHeadDistrusted);
  a.p.cut_header->distrusted = 1;
}

// e = G diag(beta) of block (b, w), transposed; its part of K K^T becomes the block of U
template <bool Norm, int B>
__device__ __forceinline__ void fused_gate(float (&acc)[64], float (&e)[8], IntraChunk& x) {
  const float2 columns[2] = {x.columns[0], x.columns[1]};
  if constexpr (B < 3) load_gate_columns<Norm>(x, B + 1);
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
template <bool Norm, bool Cut, int W>
__device__ __forceinline__ void fused_diagonal(float (&acc)[64], float (&e)[8], IntraChunk& x) {
  const float2 low = x.columns[0], high = x.columns[1];
  if constexpr (W < 3) load_gate_columns<Norm>(x, W + 1);
  e[0] = exp2_approx(low.x - x.cum.x) * x.beta.x;
  e[1] = exp2_approx(low.y - x.cum.x) * x.beta.x;
  e[2] = e[3] = 0.f;
  e[4] = exp2_approx(high.x - x.cum.x) * x.beta.x;
  e[5] = exp2_approx(high.y - x.cum.x) * x.beta.x;
  e[6] = exp2_approx(high.x - x.cum.y) * x.beta.y;
  e[7] = exp2_approx(high.y - x.cum.y) * x.beta.y;
  const uint32_t at = x.u() + W * tril::kBlockU + (x.lane / 4 * tril::kPitchU + x.lane % 4 * 2) * 4;
  float* k = acc + 8 * W;
  if constexpr (Cut) {  // beta |k|^2
    const bool even = x.lane / 4 % 2 == 0;
    const float low_step = even ? k[0] * e[0] : k[1] * e[1], high_step = even ? k[6] * e[6] : k[7] * e[7];
    x.grows = x.lane / 8 == x.lane % 4 && !(low_step <= kMostKeyStep && high_step <= kMostKeyStep);
  }
  ptx::sts2(at, k[0] * -e[0], k[1] * -e[1]);
  ptx::sts2(at + 32, k[4] * -e[4], k[5] * -e[5]);
  ptx::sts2(at + (8 * tril::kPitchU + 8) * 4, k[6] * -e[6], k[7] * -e[7]);
}
// (F6) block (b, w) of Pg diag(beta)
template <typename T, bool Norm, int B, bool Diagonal>
__device__ __forceinline__ void fused_pg(const float (&acc)[64], const float (&e)[8], const IntraChunk& x, int w) {
  const int r = x.lane / 4, t2 = x.lane % 4 * 2;
  float p[8];
  if constexpr (Norm) {
    const BlockColumns rq(x, kFusedPgRows, B);
#pragma unroll
    for (int i = 0; i < 8; i++) p[i] = acc[32 + 8 * B + i] * (e[i] * rq.of(i));
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) p[i] = acc[32 + 8 * B + i] * (e[i] * x.scale);
  }
  if constexpr (Diagonal) {  // selects: e may be inf above the diagonal
    p[0] = r <= t2 ? p[0] : 0.f;
    p[1] = r <= t2 + 1 ? p[1] : 0.f;
    p[2] = p[3] = 0.f;
    p[6] = r <= t2 ? p[6] : 0.f;
    p[7] = r <= t2 + 1 ? p[7] : 0.f;
  }
  put_pg_block<T>(x, p, B, w);
}
template <typename T, bool Norm, int B>
__device__ __forceinline__ void fused_block(float (&acc)[64], float (&e)[8], IntraChunk& x, int w) {
  fused_gate<Norm, B>(acc, e, x);
  put_u_block<B>(x, acc + 8 * B, w);
  fused_pg<T, Norm, B, false>(acc, e, x, w);
}

// Warps share what code they can: all of it must stay in the instruction cache.
template <typename T, bool Norm, bool Cut>
__device__ __forceinline__ void gates_and_diagonals(float (&acc)[64], IntraChunk& x, int warp, uint32_t pair_empty,
                                                    uint32_t parity) {
  float e[8];
  if (warp < 2) {
    if (warp == 0)
      fused_diagonal<Norm, Cut, 0>(acc, e, x);
    else
      fused_diagonal<Norm, Cut, 1>(acc, e, x);
    ptx::named_arrive(kIntraBarrier, 128);
    ptx::mbarrier_wait(pair_empty, parity);  // the tiles of two chunks ago have been used
    if (warp == 0) {
      fused_pg<T, Norm, 0, true>(acc, e, x, 0);
      fused_block<T, Norm, 1>(acc, e, x, 0);
    } else {
      fused_pg<T, Norm, 1, true>(acc, e, x, 1);
    }
    fused_block<T, Norm, 2>(acc, e, x, warp);
  } else {
    if (warp == 2)
      fused_diagonal<Norm, Cut, 2>(acc, e, x);
    else
      fused_diagonal<Norm, Cut, 3>(acc, e, x);
    ptx::mbarrier_wait(pair_empty, parity);
    ptx::named_sync(kIntraBarrier, 128);
    tril::diagonal_inverses<T>(x.abar, x.ex, x.u(), warp - 2, x.lane);
    if (warp == 2)
      fused_pg<T, Norm, 2, true>(acc, e, x, 2);
    else
      fused_pg<T, Norm, 3, true>(acc, e, x, 3);
  }
  if (warp < 3) fused_block<T, Norm, 3>(acc, e, x, warp);
}

// An operand did not fit fp16: the whole inverse again in fp32, K K^T included. Rare, so slow and with few registers.
template <typename T, bool Norm>
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
    if constexpr (Norm) sum *= ptx::lds(x.vec + (kFusedRk + i) * 4);
    ptx::sts(x.ex + tril::guarded_block(b, w) + (at / 16 % 16 * 16 + at % 16) * 4, j < i ? -e * sum : 0.f);
  }
  ptx::named_sync(kIntraBarrier, 128);
  tril::guarded_inverse<T>(x.abar, x.ex, tid);
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

template <bool Norm>
__device__ __forceinline__ void load_gates(IntraChunk& x, int warp) {
  const uint32_t row = x.vec + (16 * warp + x.lane / 4) * 4;
  x.cum = make_float2(ptx::lds(row + kFusedCum * 4), ptx::lds(row + kFusedCum * 4 + 32));
  x.beta = make_float2(ptx::lds(row + kFusedBeta * 4), ptx::lds(row + kFusedBeta * 4 + 32));
  load_gate_columns<Norm>(x, warp);
}

// Inverse norms of a chunk's keys and queries. They go into its gate vectors, which then are gamma rk, scale gamma rq, tail beta
// rk; for this role beta rk, the cumulated gate of rows i with log2 rk in it, and scale rq / rk for Pg; for backward rq. |k|^2 is
// the diagonal of K K^T, which every fourth lane or so has two elements of; half a row of Q is a thread's. Without a branch: K
// Q^T is in flight over it. valid: there is such a chunk.
__device__ __forceinline__ void put_key_norms(const float (&acc)[64], uint32_t vec, int warp, int lane, bool valid) {
  const bool odd = lane & 4, owner = valid && lane % 4 == lane / 8;
  float low = odd ? acc[1] : acc[0], high = odd ? acc[7] : acc[6];
#pragma unroll
  for (int w = 1; w < 4; w++) {
    low = warp == w ? (odd ? acc[8 * w + 1] : acc[8 * w]) : low;
    high = warp == w ? (odd ? acc[8 * w + 7] : acc[8 * w + 6]) : high;
  }
  const float rk_low = rsqrtf(low + 1e-6f), rk_high = rsqrtf(high + 1e-6f);
  const uint32_t row = vec + (16 * warp + lane / 4) * 4;
  for (const int which : {kFusedGamma, kFusedE, kFusedBeta}) {
    const uint32_t at = row + which * 4;
    const float x = ptx::lds(at) * rk_low, y = ptx::lds(at + 32) * rk_high;
    ptx::sts_if(owner, at, x);
    ptx::sts_if(owner, at + 32, y);
  }
  const uint32_t cum = row + kFusedCum * 4, cum_rows = row + kFusedCumRows * 4;
  const float c_low = ptx::lds(cum) + log2_approx(rk_low), c_high = ptx::lds(cum + 32) + log2_approx(rk_high);
  ptx::sts_if(owner, cum_rows, c_low);
  ptx::sts_if(owner, cum_rows + 32, c_high);
  ptx::sts_if(owner, row + kFusedRk * 4, rk_low);
  ptx::sts_if(owner, row + kFusedRk * 4 + 32, rk_high);
}
template <typename T, bool Save>
__device__ __forceinline__ void put_query_norms(uint32_t stage, float scale, int tid, bool valid) {
  const int row = tid / 2, half = tid % 2;
  // the two halves in an order that keeps their banks apart
  const uint32_t q = stage + 8192 + half * FusedConfig::kPanelBytes + row * 128 + ((row % 8 ^ 4 * half) << 4);
  float even = 0.f, odd = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint4 x = ptx::lds4u(q ^ uint32_t(16 * i));
    for (const uint32_t two : {x.x, x.y, x.z, x.w}) {
      const float2 f = unpack<T>(two);
      even = fmaf(f.x, f.x, even);
      odd = fmaf(f.y, f.y, odd);
    }
  }
  float sum = even + odd;
  sum += __shfl_xor_sync(~0u, sum, 1);
  const float rq = rsqrtf(sum + 1e-6f);
  const uint32_t vec = stage + FusedConfig::kOffVec + row * 4;
  __syncwarp();  // the keys' norms of these rows are this warp's
  const float gamma = ptx::lds(vec + kFusedQ * 4) * rq, pg = __fdividef(scale * rq, ptx::lds(vec + kFusedRk * 4));
  ptx::sts_if(valid && half == 0, vec + kFusedQ * 4, gamma);
  ptx::sts_if(valid && half == 1, vec + kFusedPgRows * 4, pg);
  if constexpr (Save) ptx::sts_if(valid && half == 1, vec + kFusedRq * 4, rq);
}

// k16 steps From .. To - 1 of K K^T or K Q^T (Q's rows lie behind K's)
enum Scores { kKeyScores = 0, kQueryScores = 8192 };
template <typename T, int From, int To, Scores Which>
__device__ __forceinline__ void score_products(float (&acc)[64], uint64_t kq) {
  float(&d)[32] = reinterpret_cast<float(&)[32]>(acc[Which == kKeyScores ? 0 : 32]);
#pragma unroll
  for (int w = From; w < To; w++) {
    const uint64_t k = further(kq, w / 4 * FusedConfig::kPanelBytes + w % 4 * 32);
    ptx::wgmma_ss<T, 0>(d, k, further(k, Which), w > 0);
  }
  ptx::wgmma_commit();
}

// The inverse's off-diagonal blocks, by all four warps between two barriers of theirs (`barrier`: one more inside), with the next
// chunk's K K^T between its products, whose chain leaves the tensor cores idle; after it all products are done. Returns whether
// this thread met entries that are too large (kLargest), an inf or a NaN: an operand that overflowed poisons a whole row or
// column of a block that is looked at.
template <typename T, bool Norm>
__device__ __forceinline__ bool blocks_and_scores(float (&acc)[64], const IntraChunk& x, uint32_t next_stage, int warp,
                                                  const tril::Lane& at, int barrier) {
  const uint32_t tile = x.abar, ex = x.ex;
  const uint64_t next = descriptor_k_major(next_stage);
  using namespace tril;
  using ptx::wgmma_rs;
  const uint64_t p = descriptor_k_major(ex + kExP), q = descriptor_k_major(ex + kExQ);
  uint32_t ta[8], f[4];
  float z1[8], z2[16], z3[16], size = 0.f;
  const uint32_t from = warp == 0 ? at.exchange + kExQ + 2048 : (at.exchange ^ 64) + (warp == 1 ? kExQ : kExP);
  ptx::ldmatrix_x4_trans(ex + from, f[0], f[1], f[2], f[3]);  // T_warp^T (of warp 3: not used)
#pragma unroll
  for (int i = 0; i < 4; i++) {
    ta[i] = warp ? 0 : f[i];
    ta[4 + i] = warp ? f[i] : 0;
  }
  ptx::wgmma_fence();  // T0^T U01, T2^T U23
#pragma unroll
  for (int k = 0; k < 2; k++) wgmma_rs<__half, 0>(z1, ta + 4 * k, further(q, 32 * k), k > 0);
  ptx::wgmma_commit();
  score_products<T, 0, 2, kKeyScores>(acc, next);
  ptx::wgmma_wait<1>();
#pragma unroll
  for (int i = 0; i < 4; i++) f[i] = pack<__half>(z1[2 * i], z1[2 * i + 1]);
  ptx::wgmma_fence();  // .. T1^T, T3^T
  wgmma_rs<__half, 0>(z2, f, further(q, 64), 0);
  ptx::wgmma_commit();
  score_products<T, 2, 5, kKeyScores>(acc, next);
  ptx::wgmma_wait<1>();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t a10 = pack<__half>(z2[2 * i], z2[2 * i + 1]);
    ta[4 + i] = warp ? ta[4 + i] : a10;
  }
  if (warp == 0) {
    store_block<T>(tile + tile_block<true>(1, 0) + at.tile, z2);
    size = sum_of_sizes(z2);
  }
  if (warp == 2) {
    store_block<__half>(ex + kExP + 2048 + (at.exchange ^ 64), z2 + 8);
    store_block<T>(tile + tile_block<true>(3, 2) + at.tile, z2 + 8);
    size = sum_of_sizes(z2 + 8);
  }
  ptx::wgmma_fence();  // Ta^T U[0:2,2:4]
#pragma unroll
  for (int k = 0; k < 2; k++) wgmma_rs<__half, 0>(z3, ta + 4 * k, further(p, 32 * k), k > 0);
  ptx::wgmma_commit();
  score_products<T, 5, 8, kKeyScores>(acc, next);
  if (warp == 2) ptx::proxy_fence();
  ptx::wgmma_wait<1>();
  ptx::named_sync(barrier, 128);
#pragma unroll
  for (int i = 0; i < 8; i++) ta[i] = pack<__half>(z3[2 * i], z3[2 * i + 1]);
  ptx::wgmma_fence();  // .. Tb^T
#pragma unroll
  for (int k = 0; k < 2; k++) wgmma_rs<__half, 0>(z2, ta + 4 * k, further(p, 64 + 32 * k), k > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait();
  if (warp < 2) {
    store_block<T>(tile + tile_block<true>(2, warp) + at.tile, z2);
    store_block<T>(tile + tile_block<true>(3, warp) + at.tile, z2 + 8);
    size += sum_of_sizes(z2) + sum_of_sizes(z2 + 8);
  }
  return !(size < kLargest);
}

template <typename T, bool Norm, bool Save, bool Cut>
__device__ __forceinline__ void intra_role(const FusedArgs& a, const FusedSmem& sm) {
  tril::Lane at(threadIdx.x % 32);
  const auto tiles = sm.tiles();
  const auto pairs = sm.pairs();
  FusedWalk walk;
  float acc[64];
  bool alone = true;  // a CTA's first chunk does not wait for the second one's tiles, which come late in a direct launch
  for (;;) {
    if (!walk.more()) {
      ptx::mbarrier_wait(sm.items().full(walk.slot()), walk.slot_phase());
      if (!slot::valid(sm.slot_address(walk.slot()))) break;
      walk.begin_item(slot::chunks(sm.slot_address(walk.slot())));
      if (!Cut && a.direct && walk.more()) ptx::mbarrier_wait(sm.first_gates(), 0);
      __syncwarp();
      if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(sm.items().empty(walk.slot()));
      if (!walk.more()) {
        walk.next_item();
        continue;
      }
    }
    ptx::mbarrier_wait(tiles.full(walk.stage), walk.phase());
    {
      const uint32_t stage = uniform(sm.stage(walk.stage));
      const uint64_t kq = descriptor_k_major(stage);
      ptx::wgmma_fence();
      score_products<T, 0, 8, kKeyScores>(acc, kq);
      score_products<T, 0, 8, kQueryScores>(acc, kq);
      ptx::wgmma_wait();
      if constexpr (Norm) {
        const int tid = thread_in_group();
        put_key_norms(acc, stage + FusedConfig::kOffVec, int(uniform(tid / 32)), tid % 32, true);
        put_query_norms<T, Save>(stage, a.p.scale, tid, true);
      }
    }
#pragma unroll 1
    do {
      const uint32_t stage = uniform(sm.stage(walk.stage));
      const int warp = int(uniform(thread_in_group() / 32));
      asm volatile("" : "+r"(at.tile), "+r"(at.exchange));  // sums with them are not kept over a chunk
      int lane = threadIdx.x % 32;
      asm volatile("" : "+r"(lane));
      IntraChunk x{
          stage + FusedConfig::kOffVec, uniform(sm.pair(walk.pair())), sm.exchange(), a.p.scale, lane, false, at, {}, {}, {}};
      if constexpr (Norm) {
        ptx::named_sync(kIntraBarrier + 4, 128);
        if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(sm.normed(walk.stage));
      }
      load_gates<Norm>(x, warp);
      const uint32_t empty = pairs.empty(walk.pair()), parity = walk.pair_phase() ^ 1;
      gates_and_diagonals<T, Norm, Cut>(acc, x, warp, empty, parity);
      if (Cut && x.grows) [[unlikely]]
        distrust(a, sm.slot_address(walk.slot()));
      const int next = walk.stage + 1 == FusedConfig::kStages ? 0 : walk.stage + 1;
      // They are there or on their way: the pair was free, so the stage of two chunks ago is. Without a next chunk the products
      // are of whatever lies there, for nothing.
      alone = alone || walk.bits < 64;
      if (!alone) ptx::mbarrier_wait(tiles.full(next), walk.phase() ^ uint32_t(next == 0));
      ptx::proxy_fence();
      ptx::named_sync(kIntraBarrier + 1, 128);
      const uint32_t next_stage = uniform(sm.stage(next));
      const bool poison = blocks_and_scores<T, Norm>(acc, x, next_stage, warp, at, kIntraBarrier + 2);
      ptx::proxy_fence();
      if (any_of_128(kIntraBarrier + 3, poison)) [[unlikely]]
        redo_guarded<T, Norm>(x, stage, thread_in_group());
      if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(pairs.full(walk.pair()));
      ptx::wgmma_fence();
      score_products<T, 0, 8, kQueryScores>(acc, descriptor_k_major(next_stage));
      if constexpr (Norm) {
        put_key_norms(acc, next_stage + FusedConfig::kOffVec, warp, lane, !alone);
        put_query_norms<T, Save>(next_stage, a.p.scale, thread_in_group(), !alone);
      }
      ptx::wgmma_wait();
      walk.next_chunk();
    } while (!alone);
    alone = false;
    if (!walk.more()) walk.next_item();
  }
}

}  // namespace qla::cuda
