// chunk_intra<T, WithPg, Gated> - the intra-chunk stage, which depends on no state.   Computes (F0)-(F3), (F6); Gated =
// false: (F2).
//   For every chunk and value head: Abar and Pg as tiles, the gate vectors (formats.hpp). The inverse is that of
//   I + (G o L) diag(beta) (gate inside), or of I + diag(beta) L for the ungated A.
//   grid: persistent, three CTAs a SM; an item = (chunk slot, up to four value heads of one q/k head): K [K;Q]^T once an item.
//
// One warpgroup; all four warps do the same but for the inverse (tril_inverse.cuh). In the accumulators, transposed:
//   acc[0..31] = (K K^T)[j][i], acc[32..63] = scale (K Q^T)[j][i]; warp w: j = 16 w + lane / 4 (+ 8), i = 8 n + 2 (lane % 4) (+
//   1).
//
// Barriers                       guards
//   kq (mbarrier, tx)            s_kq: loaded
//   0 (CTA), at the item's start s_raw of this item; everything of the item before has been read
//   0 (CTA), after the products  s_kq and s_raw are free (next item's loads); s_vec, s_norm, s_item written
//   1                            s_u written; the tiles of the head before have left
//   2, 3                         s_ex written (4th stage's operand: 3)
//   4 (+ or)                     tiles written; or: somebody met an overflow
//
// Tail: rows past the end of a chunk are zeroed in s_kq before the products; beta = 0, raw gate = 0 there.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/kernels/chunk_intra/config.hpp"
#include "cuda/kernels/chunk_intra/gates.cuh"
#include "cuda/kernels/chunk_intra/single_sequence.cuh"
#include "cuda/kernels/plan_segments/boundaries.cuh"
#include "cuda/math/exp.cuh"
#include "cuda/math/tril_inverse.cuh"
#include "cuda/math/warp.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/fragment.cuh"

namespace qla::cuda::intra {

struct Item {
  int64_t token;  // inside its batch row
  int rows, batch, slot, rest, k_head, v_head, heads;
};

// Items run slot by slot, in each q/k head by q/k head: (slot, rest) of the next one without a division.
struct Cursor {
  int slot, rest;
  __device__ __forceinline__ void advance(const Args& a) {
    slot += a.step_slots;
    rest += a.step_rest;
    if (rest >= a.num_k_heads * a.parts) rest -= a.num_k_heads * a.parts, slot++;
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
  it.rest = at.rest;
  it.k_head = k_head;
  it.v_head = k_head * a.group + first;
  it.heads = min(a.per, a.group - first);
  return it;
}

// one thread
template <bool WithPg>
__device__ __forceinline__ void load_tiles(uint32_t smem, uint32_t bar, const CUtensorMap& map_k, const CUtensorMap& map_q,
                                           const Item& it) {
  ptx::mbarrier_arrive_expect(bar, WithPg ? 32768 : 16384);
#pragma unroll
  for (int p = 0; p < 2; p++) {
    ptx::tensor_load_4d(smem + kSmemKq + p * 16384, &map_k, 64 * p, it.k_head, int(it.token), it.batch, bar);
    if (WithPg) ptx::tensor_load_4d(smem + kSmemKq + p * 16384 + 8192, &map_q, 64 * p, it.k_head, int(it.token), it.batch, bar);
  }
}

// Gate and beta of an item on their way to s_raw: thread t has rows t / 4 and t / 4 + 32 of head t % 4.
template <bool Gated>
__device__ __forceinline__ void load_gates(uint32_t smem, const Args& a, const Item& it, int tid) {
  const int head = tid % 4, row = tid / 4;
  if (head >= it.heads) return;
  const int64_t token = it.token + row, h = it.v_head + head;
  const int64_t gate = it.batch * a.g.stride[0] + token * a.g.stride[1] + h * a.g.stride[2];
  const int64_t beta = it.batch * a.beta.stride[0] + token * a.beta.stride[1] + h * a.beta.stride[2];
  const uint32_t slot = smem + kSmemRaw + head * 1024 + row * 8;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (row + 32 * half >= it.rows) return;
    if (Gated && a.g.data) copy_element(slot + 256 * half, a.g, gate + 32 * half * a.g.stride[1]);
    copy_element(slot + 256 * half + 512, a.beta, beta + 32 * half * a.beta.stride[1]);
  }
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
__device__ __noinline__ void zero_tail(uint32_t smem, int rows, int tid) {
  for (int i = tid; i < 4 * 64 * 8; i += kThreads) {
    const int row = i / 8 % 64, tile = i / 512;
    if (row >= rows && (WithPg || tile % 2 == 0)) ptx::sts4u(smem + kSmemKq + tile * 8192 + row * 128 + i % 8 * 16, 0, 0, 0, 0);
  }
  ptx::proxy_fence();
}

// inverse norms of K and Q rows; a thread a row of one of them
template <typename T, bool WithPg>
__device__ __noinline__ void norms(uint32_t smem, int tid) {
  const int row = tid % 64, which = tid / 64;
  if (!WithPg && which) return;
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const uint4 x = ptx::lds4u(smem + kSmemKq + i / 8 * 16384 + which * 8192 + swizzle_128(row * 128 + i % 8 * 16));
    const float2 f0 = unpack<T>(x.x), f1 = unpack<T>(x.y), f2 = unpack<T>(x.z), f3 = unpack<T>(x.w);
    sum[0] = fmaf(f0.x, f0.x, fmaf(f0.y, f0.y, sum[0]));
    sum[1] = fmaf(f1.x, f1.x, fmaf(f1.y, f1.y, sum[1]));
    sum[2] = fmaf(f2.x, f2.x, fmaf(f2.y, f2.y, sum[2]));
    sum[3] = fmaf(f3.x, f3.x, fmaf(f3.y, f3.y, sum[3]));
  }
  ptx::sts(smem + kSmemNorm + which * 256 + row * 4, 1.f / sqrtf((sum[0] + sum[1]) + (sum[2] + sum[3]) + 1e-6f));
}

// (F0), (F1) and the vector record of one value head; a warp a head, a lane rows 2 lane and 2 lane + 1
template <bool Gated>
__device__ __forceinline__ void gate_vectors(uint32_t smem, const Args& a, const Item& it, int head, int lane) {
  float2 beta = read_raw(smem + kSmemRaw + head * 1024 + 512, a.beta, it, head, lane);
  const bool in0 = 2 * lane < it.rows, in1 = 2 * lane + 1 < it.rows;
  beta.x = in0 ? decode_beta(beta.x, a.flags) : 0.f;
  beta.y = in1 ? decode_beta(beta.y, a.flags) : 0.f;
  const uint32_t vec = smem + kSmemVec + head * 512 + lane * 8;
  if constexpr (!Gated) {
    ptx::sts2(vec + 256, beta.x, beta.y);
    return;
  }
  float2 g = make_float2(0.f, 0.f);
  if (a.g.data) g = read_raw(smem + kSmemRaw + head * 1024, a.g, it, head, lane);
  float rate = 1.f, bias = 0.f;
  if (a.flags & QLA_FLAG_RAW_GATE) {
    rate = expf(load_element(a.a_log, (it.v_head + head) * a.a_log.stride[2]));
    if (a.dt_bias.data) bias = load_element(a.dt_bias, (it.v_head + head) * a.dt_bias.stride[2]);
  }
  g.x = in0 ? decode_gate(g.x, a.flags, rate, bias) * kLog2e : 0.f;
  g.y = in1 ? decode_gate(g.y, a.flags, rate, bias) * kLog2e : 0.f;
  const float through = warp_inclusive_sum(g.x + g.y, lane);
  const float c0 = through - g.y, c1 = through, last = __shfl_sync(~0u, through, 31);
  ptx::sts2(vec, c0, c1);
  ptx::sts2(vec + 256, beta.x, beta.y);
  if (a.vec == nullptr) return;
  float2 rk = make_float2(1.f, 1.f), rq = rk;
  if (a.flags & QLA_FLAG_QK_L2NORM) {
    rk = ptx::lds2(smem + kSmemNorm + lane * 8);
    rq = ptx::lds2(smem + kSmemNorm + 256 + lane * 8);
  }
  const float gamma0 = exp2_approx(c0), gamma1 = exp2_approx(c1);
  float2* out = reinterpret_cast<float2*>(a.vec + (int64_t(it.slot) * a.num_v_heads + it.v_head + head) * kVecFloats) + lane;
  out[kVecK / 2] = make_float2(gamma0 * rk.x, gamma1 * rk.y);
  out[kVecQ / 2] = make_float2(a.scale * gamma0 * rq.x, a.scale * gamma1 * rq.y);
  out[kVecE / 2] = make_float2(exp2_approx(last - c0) * beta.x * rk.x, exp2_approx(last - c1) * beta.y * rk.y);
  out[kVecGamma / 2] = make_float2(gamma0, gamma1);
  if (a.vec_backward) {
    out[kVecG / 2] = make_float2(c0, c1);
    out[kVecBeta / 2] = beta;
    out[kVecRk / 2] = rk;
    out[kVecRq / 2] = rq;
  }
}

// |k_j|^2 of this warp's rows: the diagonal of K K^T, two elements of which every eighth lane or so holds
template <int Regs>
__device__ __forceinline__ void put_key_squares(uint32_t smem, const float (&acc)[Regs], bool normalise, int warp, int lane) {
  const int r = lane / 4;
  if (lane % 4 != r / 2) return;
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int w = 0; w < 4; w++) {  // a register index that the compiler knows
    if (w != warp) continue;
    low = r % 2 ? acc[8 * w + 1] : acc[8 * w];
    high = r % 2 ? acc[8 * w + 7] : acc[8 * w + 6];
  }
  if (normalise) {
    const float rk_low = ptx::lds(smem + kSmemNorm + (16 * warp + r) * 4),
                rk_high = ptx::lds(smem + kSmemNorm + (16 * warp + r + 8) * 4);
    low *= rk_low * rk_low;
    high *= rk_high * rk_high;
  }
  ptx::sts(smem + kSmemNorm + 512 + (16 * warp + r) * 4, low);
  ptx::sts(smem + kSmemNorm + 512 + (16 * warp + r + 8) * 4, high);
}
// (C4) a warp a head, after s_vec and the squares are written
__device__ __forceinline__ void put_decay(uint32_t smem, const Args& a, const Item& it, int head, int lane) {
  const float2 beta = ptx::lds2(smem + kSmemVec + head * 512 + 256 + lane * 8), k2 = ptx::lds2(smem + kSmemNorm + 512 + lane * 8);
  const float through = ptx::lds(smem + kSmemVec + head * 512 + 63 * 4);
  float growth = log2_approx(max_keep_nan(beta.x * k2.x - 1.f, 1.f)) + log2_approx(max_keep_nan(beta.y * k2.y - 1.f, 1.f));
  // inf - inf: a key that is not finite, with beta = 0 or not
  growth += (k2.x - k2.x) + (k2.y - k2.y);
  const float sum = (warp_sum(growth) + through) * kLn2;
  if (lane == 0) a.decay[int64_t(it.slot) * a.num_v_heads + it.v_head + head] = sum;
}

// What a head's stage needs besides the products. `lane` is opaque to the compiler: addresses are made anew for every head.
struct Head {
  uint32_t vec, smem;
  int lane;
};

// e = G beta (Gated) or beta of the column (ungated) of block (b, w), u = the block of U
template <int B, bool Gated, int Regs>
__device__ __forceinline__ void gate_block(const float (&acc)[Regs], float (&u)[8], float (&e)[8], const Head& x, float2 c_j,
                                           float2 beta_j) {
  const int t2 = x.lane % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float2 i = ptx::lds2(x.vec + (Gated ? 0 : 256) + (16 * B + 8 * h + t2) * 4);
    if constexpr (Gated) {
      e[4 * h] = exp2_approx(i.x - c_j.x) * beta_j.x;
      e[4 * h + 1] = exp2_approx(i.y - c_j.x) * beta_j.x;
      e[4 * h + 2] = exp2_approx(i.x - c_j.y) * beta_j.y;
      e[4 * h + 3] = exp2_approx(i.y - c_j.y) * beta_j.y;
    } else {
      e[4 * h] = e[4 * h + 2] = i.x;
      e[4 * h + 1] = e[4 * h + 3] = i.y;
    }
#pragma unroll
    for (int i8 = 0; i8 < 4; i8++) u[4 * h + i8] = acc[8 * B + 4 * h + i8] * -e[4 * h + i8];
  }
}
// (F6) block (b, w) of Pg diag(beta)
template <typename T, int B, int W>
__device__ __forceinline__ void put_pg(const float* acc, const float (&e)[8], const Head& x) {
  const int r = x.lane / 4, t2 = x.lane % 4 * 2;
  float p[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    p[i] = acc[8 * B + i] * e[i];
    if (B == W) p[i] = r + i % 4 / 2 * 8 <= i / 4 * 8 + t2 + i % 2 ? p[i] : 0.f;  // a select: e may be inf above the diagonal
  }
  tril::put_tile<T>(x.smem + kSmemPg, p, B, W, x.lane);
}
template <typename T, int B, int W, bool Gated, int Regs>
__device__ __forceinline__ void block(const float (&acc)[Regs], const Head& x, float2 c_j, float2 beta_j) {
  float u[8], e[8];
  gate_block<B, Gated>(acc, u, e, x, c_j, beta_j);
  tril::put_u(x.smem + kSmemEx, u, B, W, x.lane);
  if constexpr (Regs == 64) put_pg<T, B, W>(acc + 32, e, x);
}
template <int W, bool Gated>
__device__ __forceinline__ void row_gates(const Head& x, float2& c_j, float2& beta_j) {
  const uint32_t at = x.vec + (16 * W + x.lane / 4) * 4;
  if constexpr (Gated) c_j = make_float2(ptx::lds(at), ptx::lds(at + 32));
  beta_j = make_float2(ptx::lds(at + 256), ptx::lds(at + 256 + 32));
}

// Gates, Pg and the diagonal inverses, in two steps with a barrier between. Warps 2 and 3, which have fewer blocks, do the four
// substitutions, two at a time.
struct Diagonal {  // of a warp, from the first step to the second
  float2 c_j, beta_j;
  float e[8];
};
template <int W, bool Gated, int Regs>
__device__ __forceinline__ void gate_diagonal(const float (&acc)[Regs], const Head& x, Diagonal& d) {
  row_gates<W, Gated>(x, d.c_j, d.beta_j);
  float u[8];
  gate_block<W, Gated>(acc, u, d.e, x, d.c_j, d.beta_j);
  tril::put_u_diagonal(x.smem + kSmemU, u, W, x.lane);
}
template <typename T, int W, bool Gated, int Regs>
__device__ __forceinline__ void gate_rest(const float (&acc)[Regs], const Head& x, const Diagonal& d) {
  if constexpr (Regs == 64) put_pg<T, W, W>(acc + 32, d.e, x);
  if constexpr (W == 0) block<T, 1, W, Gated>(acc, x, d.c_j, d.beta_j);
  if constexpr (W < 2) block<T, 2, W, Gated>(acc, x, d.c_j, d.beta_j);
  if constexpr (W < 3) block<T, 3, W, Gated>(acc, x, d.c_j, d.beta_j);
  if constexpr (W >= 2) tril::diagonal_inverses<T>(x.smem + kSmemAbar, x.smem + kSmemEx, x.smem + kSmemU, W - 2, x.lane);
}
template <typename T, bool Gated, int Regs>
__device__ __forceinline__ void gate_and_diagonals(const float (&acc)[Regs], const Head& x, int warp) {
  Diagonal d{};
  if (warp == 0)
    gate_diagonal<0, Gated>(acc, x, d);
  else if (warp == 1)
    gate_diagonal<1, Gated>(acc, x, d);
  else if (warp == 2)
    gate_diagonal<2, Gated>(acc, x, d);
  else
    gate_diagonal<3, Gated>(acc, x, d);
  if (warp == 0 && x.lane == 0) ptx::bulk_wait_read();  // the tiles of the head before have left
  ptx::named_sync(1, kThreads);
  if (warp == 0)
    gate_rest<T, 0, Gated>(acc, x, d);
  else if (warp == 1)
    gate_rest<T, 1, Gated>(acc, x, d);
  else if (warp == 2)
    gate_rest<T, 2, Gated>(acc, x, d);
  else
    gate_rest<T, 3, Gated>(acc, x, d);
  ptx::proxy_fence();
  ptx::named_sync(2, kThreads);
}

template <int W, bool Gated, int Regs>
__device__ __forceinline__ void put_guarded(const float (&acc)[Regs], const Head& x) {
  float2 c_j{}, beta_j;
  row_gates<W, Gated>(x, c_j, beta_j);
  float e[8], u[8];
  const uint32_t mem = x.smem + kSmemEx;
  gate_block<W, Gated>(acc, u, e, x, c_j, beta_j);
  tril::put_u_guarded(mem, u, W, W, x.lane);
  if constexpr (W < 1) {
    gate_block<1, Gated>(acc, u, e, x, c_j, beta_j);
    tril::put_u_guarded(mem, u, 1, W, x.lane);
  }
  if constexpr (W < 2) {
    gate_block<2, Gated>(acc, u, e, x, c_j, beta_j);
    tril::put_u_guarded(mem, u, 2, W, x.lane);
  }
  if constexpr (W < 3) {
    gate_block<3, Gated>(acc, u, e, x, c_j, beta_j);
    tril::put_u_guarded(mem, u, 3, W, x.lane);
  }
}
// an operand did not fit fp16: the whole inverse again in fp32
template <typename T, bool Gated, int Regs>
__device__ __forceinline__ void redo_guarded(const float (&acc)[Regs], const Head& x, int warp, int tid) {
  if (warp == 0)
    put_guarded<0, Gated>(acc, x);
  else if (warp == 1)
    put_guarded<1, Gated>(acc, x);
  else if (warp == 2)
    put_guarded<2, Gated>(acc, x);
  else
    put_guarded<3, Gated>(acc, x);
  __syncthreads();
  tril::guarded_inverse<T>(x.smem + kSmemAbar, x.smem + kSmemEx, tid);
  __syncthreads();
  for (int i = tid; i < tril::kExBytes / 16; i += kThreads)
    ptx::sts4u(x.smem + kSmemEx + 16 * i, 0, 0, 0, 0);  // its standing zeros
  ptx::proxy_fence();
  __syncthreads();
}

// rows of the ungated A from the tile
template <typename T>
__device__ __forceinline__ void store_a_inv(const Args& a, const Item& it, int head, uint32_t tile, int tid) {
  T* out = static_cast<T*>(a.a_inv) + it.batch * a.a_inv_stride[0] + it.token * a.a_inv_stride[1] +
           (it.v_head + head) * a.a_inv_stride[2];
  for (int i = tid; i < it.rows * 64; i += kThreads) {
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

__device__ __forceinline__ bool sync_or(int barrier, bool mine) {
  uint32_t any;
  asm volatile("{.reg .pred p, q; setp.ne.b32 p, %1, 0; barrier.cta.red.or.aligned.pred q, %2, 128, p; selp.u32 %0, 1, 0, q;}"
               : "=r"(any)
               : "r"(int(mine)), "r"(barrier)
               : "memory");
  return any != 0;
}

template <typename T, bool WithPg, bool Gated>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    chunk_intra(const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_q,
                const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t s_all[];
  const uint32_t smem = ptx::shared_address(s_all), bar = smem + kSmemBar;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  if (tid == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::mbarrier_init_fence();
    ptx::tensor_prefetch_map(&map_k);
    if (WithPg) ptx::tensor_prefetch_map(&map_q);
  }
  for (int i = tid; i < tril::kExBytes / 16; i += kThreads) ptx::sts4u(smem + kSmemEx + 16 * i, 0, 0, 0, 0);
  ptx::proxy_fence();
  ptx::grid_dependency_launch();
  if (a.asks && ptx::load_after_plan(&a.plan.header->num_items) == 0) {
    if (blockIdx.x == 0) ptx::grid_dependency_wait();  // it ends when all before it has ended
    return;
  }
  if (!a.early) ptx::grid_dependency_wait();
  int first_token = 0, end_token = int(a.tokens);
  if (a.direct) single_sequence(a, first_token, end_token);
  __syncthreads();

  Cursor at{int(blockIdx.x) / (a.num_k_heads * a.parts), int(blockIdx.x) % (a.num_k_heads * a.parts)};
  int4 record{};
  auto load_record = [&] {
    if (at.slot >= a.slots) return;
    if (a.direct) {
      record = single_record(at.slot, first_token, end_token);
    } else {
      record = reinterpret_cast<const int4*>(a.chunk_table)[at.slot];
    }
  };
  auto skip_unused = [&] {  // to an item that has rows
    while (at.slot < a.slots && record.z == 0) {
      at.advance(a);
      load_record();
    }
    return at.slot < a.slots;
  };
  Item* s_item = reinterpret_cast<Item*>(s_all + kSmemItem);  // this and the next item: in shared memory, for the registers' sake
  const bool loader = tid == kThreads - 32;
  if (a.makes_plan) {
    if (blockIdx.x == gridDim.x - 1) return segments::direct_tables(a.plan);
    const ChunkRecord direct = segments::direct_record(a.plan, at.slot);
    record = reinterpret_cast<const int4&>(direct);
  } else {
    load_record();
  }
  bool more = skip_unused();
  if (more) {
    const Item first = decode_item(a, at, record);
    if (loader) {
      s_item[0] = first;
      load_tiles<WithPg>(smem, bar, map_k, map_q, first);
    }
    load_gates<Gated>(smem, a, first, tid);
  }
  uint32_t phase = 0;  // of the barrier, and which of s_item
  while (more) {
    ptx::cp_async_wait_all();
    __syncthreads();
    const Item it = s_item[phase];
    at = {it.slot, it.rest};
    at.advance(a);
    load_record();
    ptx::mbarrier_wait(bar, phase);
    phase ^= 1;
    if (it.rows < 64) {
      zero_tail<WithPg>(smem, it.rows, tid);
      __syncthreads();
    }
    const bool normalise = a.flags & QLA_FLAG_QK_L2NORM;
    if (normalise) {
      norms<T, WithPg>(smem, tid);
      __syncthreads();
    }
    float acc[WithPg ? 64 : 32];
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const uint64_t d = descriptor_k_major(smem + kSmemKq + k / 4 * 16384 + k % 4 * 32);
      ptx::wgmma_ss<T, 0>(acc, d, d, k > 0);
    }
    ptx::wgmma_commit();
    if (warp < it.heads) gate_vectors<Gated>(smem, a, it, warp, lane);  // under the products
    more = skip_unused();
    Item next{};
    if (more) next = decode_item(a, at, record);
    if (loader) s_item[phase] = next;
    ptx::wgmma_wait();
    if (a.decay) put_key_squares(smem, acc, normalise, warp, lane);
    __syncthreads();
    if (more) {
      if (loader) load_tiles<WithPg>(smem, bar, map_k, map_q, next);
      load_gates<Gated>(smem, a, next, tid);
    }
    if (a.decay && warp < it.heads) put_decay(smem, a, it, warp, lane);
    if (normalise) {
      const uint32_t norm = smem + kSmemNorm;
      const float rk0 = ptx::lds(norm + fragment_row(warp, lane) * 4), rk1 = ptx::lds(norm + fragment_row(warp, lane) * 4 + 32);
#pragma unroll
      for (int n = 0; n < (WithPg ? 16 : 8); n++) {
        const float2 r = ptx::lds2(norm + (8 * n + fragment_col(lane)) * 4);  // rk, then rq
        acc[4 * n] *= rk0 * r.x;
        acc[4 * n + 1] *= rk0 * r.y;
        acc[4 * n + 2] *= rk1 * r.x;
        acc[4 * n + 3] *= rk1 * r.y;
      }
    }
    if (WithPg) {
#pragma unroll
      for (int i = 32; i < (WithPg ? 64 : 32); i++) acc[i] *= a.scale;
    }
    int64_t out = (int64_t(it.slot) * a.num_v_heads + it.v_head) * kTileBytes;
    for (int head = 0; head < it.heads; head++) {
      int opaque = lane;
      asm volatile("" : "+r"(opaque));
      const Head x{smem + kSmemVec + head * 512, smem, opaque};
      gate_and_diagonals<T, Gated>(acc, x, warp);
      const bool poison = tril::off_diagonal_blocks<T>(smem + kSmemAbar, smem + kSmemEx, warp, tril::Lane(opaque), 3);
      ptx::proxy_fence();
      if (sync_or(4, poison)) [[unlikely]]
        redo_guarded<T, Gated>(acc, x, warp, tid);
      if constexpr (Gated) {
        if (tid == 0) {
          ptx::bulk_store(a.abar + out, smem + kSmemAbar, kTileBytes);
          if (WithPg && a.pg) ptx::bulk_store(a.pg + out, smem + kSmemPg, kTileBytes);
          ptx::bulk_commit();
          out += kTileBytes;
        }
      } else {
        store_a_inv<T>(a, it, head, smem + kSmemAbar, tid);
      }
    }
  }
  ptx::bulk_wait();
  if (a.early) ptx::grid_dependency_wait();  // whoever waits for this kernel counts on all before it
}

}  // namespace qla::cuda::intra
