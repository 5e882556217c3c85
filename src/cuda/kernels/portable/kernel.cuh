// gdn_forward_portable<T, Mma> - (F4)-(F9) for targets without wgmma and tensor copies: the same recurrence on another Mma
// policy,
//   plain loads and stores, one buffer. It shows that the recurrence is written once and runs everywhere; a pipelined body for a
//   target that counts is a kernel of its own.
//   grid: a CTA a (work item, half of V) in turn; four warps of 16 value columns each. Abar, Pg, vectors and items as forward's.
//   Not here: the fused form, snapshots and checkpoints.
#pragma once

#include "cuda/kernels/forward/launch.hpp"
#include "cuda/math/mma_sync.cuh"
#include "cuda/math/state_step.cuh"
#include "qla/qla.h"

namespace qla::cuda::portable {

inline constexpr int kThreads = 128;
// K and Q in two panels (K then Q in each), 64 columns of V, Abar and Pg under standing zeros, part A of the vectors
inline constexpr int kV = 32768, kA = kV + 8192, kP = kA + kTileSmemBytes, kVec = kP + kTileSmemBytes,
                     kSmemBytes = kVec + kVecBytesForward;

struct Place {  // of an item's tokens
  int64_t batch, token;
};

// 64 rows of `columns` 16-byte pieces a row, from a token-major view into swizzled rows of 128 bytes; rows from `rows` on are
// zeros
__device__ __forceinline__ void load_rows(uint32_t tile, const TokenView& x, const Place& at, int head, int col, int rows) {
  const char* from =
      static_cast<const char*>(x.data) + 2 * (at.batch * x.stride_b + at.token * x.stride_t + head * x.stride_h + col);
  for (int i = threadIdx.x; i < 64 * 8; i += kThreads) {
    const int row = i / 8, piece = i % 8;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < rows) value = *reinterpret_cast<const uint4*>(from + 2 * row * x.stride_t + 16 * piece);
    ptx::sts4u(tile + swizzle_128(row * 128 + piece * 16), value.x, value.y, value.z, value.w);
  }
}
__device__ __forceinline__ void load_tile(uint32_t tile, const uint8_t* from) {
  for (int i = threadIdx.x; i < kTileBytes / 16; i += kThreads) {
    const int w = i < 128 ? 0 : i < 224 ? 1 : i < 288 ? 2 : 3;
    const uint4 value = reinterpret_cast<const uint4*>(from)[i];
    ptx::sts4u(tile + 2560 * w + 16 * i - panel_offset(w), value.x, value.y, value.z, value.w);
  }
}

template <typename T, class Mma>
__global__ void __launch_bounds__(kThreads) gdn_forward_portable(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) uint8_t s_all[];
  const uint32_t smem = ptx::shared_address(s_all);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = p.num_v_heads / p.num_k_heads;
  for (int i = threadIdx.x; i < 2 * kTileSmemBytes / 16; i += kThreads) ptx::sts4u(smem + kA + 16 * i, 0, 0, 0, 0);

  if (p.output) {  // tokens after the last sequence
    const int64_t pieces = int64_t(p.num_v_heads) * 16;
    for (int64_t i = p.plan->end_token * pieces + blockIdx.x * kThreads + threadIdx.x; i < p.batch * p.tokens * pieces;
         i += gridDim.x * kThreads) {
      const int64_t token = i / pieces, batch = token / p.tokens, head = i % pieces / 16;
      char* o = static_cast<char*>(const_cast<void*>(p.o.data)) +
                2 * (batch * p.o.stride_b + (token - batch * p.tokens) * p.o.stride_t + head * p.o.stride_h);
      reinterpret_cast<uint4*>(o)[i % 16] = make_uint4(0, 0, 0, 0);
    }
  }

  const int halves = p.v_parts == 2 ? 1 : 2;
  for (int unit = blockIdx.x; unit < p.plan->num_items * halves; unit += gridDim.x) {
    const WorkItem item = p.items[unit / halves];
    const int v_col = item.v_part * 64 + unit % halves * 64, v0 = v_col + 16 * warp, head = item.v_head;
    int64_t state = item.sequence;
    if (p.state_indices)
      state = p.state_indices_dtype == QLA_INT64 ? static_cast<const int64_t*>(p.state_indices)[state]
                                                 : static_cast<const int32_t*>(p.state_indices)[state];
    const bool skipped = state < 0;  // its o is zero, its state stays
    int start = item.start;
    if (start == QLA_START_INITIAL &&
        (!p.initial_state.data || skipped || (p.has_initial_state && !p.has_initial_state[item.sequence])))
      start = QLA_START_ZERO;
    auto address = [&](const StateView& x, int64_t index) {
      const int64_t bytes = x.dtype == QLA_FLOAT64 ? 8 : x.dtype == QLA_FLOAT32 ? 4 : 2;
      return StateAddress{static_cast<char*>(x.data) + bytes * (index * x.stride_n + head * x.stride_h), x.dtype, x.stride_k,
                          x.stride_v};
    };
    float S[2][32];
    if (start == QLA_START_INITIAL) {
      load_state(S, address(p.initial_state, state), v0, lane);
    } else if (start == QLA_START_MERGED) {
      load_state(S, {const_cast<float*>(p.merged) + int64_t(item.start_index) * kStateFloats, QLA_FLOAT32, 1, 128}, v0, lane);
    } else {
#pragma unroll
      for (int i = 0; i < 64; i++) {
        const int v = v0 + lane / 4 + i % 4 / 2 * 8, k = i / 4 * 8 + lane % 4 * 2 + i % 2;
        S[i / 32][i % 32] = start == kStartIdentity && v == k ? 1.f : 0.f;
      }
    }
    Place at{item.token / p.tokens, 0};
    at.token = item.token - at.batch * p.tokens;
    for (int c = 0; c < item.chunks; c++, at.token += 64) {
      const int rows = c == item.chunks - 1 ? item.last_rows : 64;
      const int64_t record = (int64_t(item.slot) + c) * p.num_v_heads + head;
      __syncthreads();
      for (int panel = 0; panel < 2; panel++) {
        load_rows(smem + panel * 16384, p.k, at, head / group, 64 * panel, rows);
        if (p.output) load_rows(smem + panel * 16384 + 8192, p.q, at, head / group, 64 * panel, rows);
      }
      load_rows(smem + kV, p.v, at, head, v_col, start == kStartIdentity ? 0 : rows);
      load_tile(smem + kA, p.abar + record * kTileBytes);
      if (p.output) load_tile(smem + kP, p.pg + record * kTileBytes);
      for (int i = threadIdx.x; i < kVecBytesForward / 16; i += kThreads) {
        const float4 x = reinterpret_cast<const float4*>(p.vec + record * kVecFloats)[i];
        ptx::sts4(smem + kVec + 16 * i, x.x, x.y, x.z, x.w);
      }
      __syncthreads();
      const uint32_t vec = smem + kVec;
      uint32_t sf[32], vt[16], rf[16], df[16], ef[16];
      float ks[32], qs[32], delta[32];
      float2 scale[8];
      pack_state<T, 0>(sf, S[0]);
      pack_state<T, 1>(sf, S[1]);
      Mma::begin();
      Mma::template state_rows<16384>(ks, sf, smem);
      Mma::commit();
#pragma unroll
      for (int j = 0; j < 4; j++)
        load_transposed(*reinterpret_cast<uint32_t(*)[4]>(vt + 4 * j), smem + kV, 16 * j, 16 * warp, 64, lane);
      Mma::wait();
      load_columns(scale, vec_lane(vec, kVecK, lane));
      residual<T>(rf, vt, ks, scale);  // (F4)
      Mma::begin();
      Mma::template triangular<0>(delta, rf, smem + kA);  // (F5)
      if (p.output) Mma::template state_rows<16384>(qs, sf, smem + 8192);
      Mma::commit();
      Mma::wait();
      load_columns(scale, vec_lane(vec, kVecE, lane));
      scaled_operand<T>(ef, delta, scale);  // (F8)
      pack_operand<T>(df, delta);
      const float gamma_c = ptx::lds(vec + (kVecGamma + 63) * 4);
#pragma unroll
      for (int i = 0; i < 32; i++) S[0][i] *= gamma_c, S[1][i] *= gamma_c;
      if (p.output) scale_columns(qs, vec_lane(vec, kVecQ, lane));  // (F7) first term
      Mma::begin();
      Mma::template update<16384, 0>(S[0], ef, smem);  // (F9)
      Mma::template update<16384, 1>(S[1], ef, smem);
      if (p.output) Mma::template triangular<1>(qs, df, smem + kP);  // (F7) second term
      Mma::commit();
      Mma::wait();
      if (!p.output || c < item.warmup) continue;
      T* o = static_cast<T*>(const_cast<void*>(p.o.data)) + at.batch * p.o.stride_b + at.token * p.o.stride_t +
             head * p.o.stride_h + v0 + lane / 4;
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (token < rows) o[token * p.o.stride_t + i % 4 / 2 * 8] = from_float<T>(skipped ? 0.f : qs[i]);
      }
    }
    if (!p.output)
      store_state(S, {p.end_states + int64_t(item.start_index) * kStateFloats, QLA_FLOAT32, 1, 128}, v0, lane);
    else if (item.is_last && p.final_state.data && !skipped)
      store_state(S, address(p.final_state, state), v0, lane);
  }
}

}  // namespace qla::cuda::portable
