// The gate vectors of one chunk of one value head by one warp: a lane has rows 2 lane and 2 lane + 1. Computes (F0), (F1).
#pragma once

#include "cuda/kernels/chunk_gates/config.hpp"
#include "cuda/kernels/chunk_intra/gates.cuh"
#include "cuda/math/warp.cuh"

namespace qla::cuda::gates {

// raw gate (0 in rows past the end) times log2 e, and beta
__device__ __forceinline__ void write_vectors_of(float* record, float2 g, float2 beta, float scale, int lane) {
  const float through = warp_inclusive_sum(g.x + g.y, lane);
  const float c0 = through - g.y, c1 = through, last = __shfl_sync(~0u, through, 31);
  const float gamma0 = exp2_approx(c0), gamma1 = exp2_approx(c1);
  float2* out = reinterpret_cast<float2*>(record) + lane;
  out[kFusedCum / 2] = make_float2(c0, c1);
  out[kFusedBeta / 2] = beta;
  out[kFusedGamma / 2] = make_float2(gamma0, gamma1);
  out[kFusedQ / 2] = make_float2(scale * gamma0, scale * gamma1);
  out[kFusedE / 2] = make_float2(exp2_approx(last - c0) * beta.x, exp2_approx(last - c1) * beta.y);
}

__device__ __forceinline__ void load_head(const Args& a, int head, float& rate, float& bias) {
  if (!(a.flags & QLA_FLAG_RAW_GATE)) return;
  rate = expf(intra::load_element(a.a_log, head * a.a_log.stride[2]));
  if (a.dt_bias.data) bias = intra::load_element(a.dt_bias, head * a.dt_bias.stride[2]);
}
__device__ __forceinline__ float gate_of(const Args& a, uint32_t low, uint32_t high, float rate, float bias) {
  return intra::decode_gate(intra::decode(low, high, a.g.dtype, false), a.flags, rate, bias) * kLog2e;
}
__device__ __forceinline__ float beta_of(const Args& a, uint32_t low, uint32_t high) {
  return intra::decode_beta(intra::decode(low, high, a.beta.dtype, false), a.flags);
}

// Two neighbouring rows of gate and beta as they lie in memory: all asked for before one is looked at.
struct RowPair {
  uint32_t low[2], high[2];
};
struct RowPairs {
  RowPair g, beta;
};
template <typename Word>
__device__ __forceinline__ void load_pair_as(RowPair& to, const void* data, int64_t offset, int64_t stride, int count) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Word x = i < count ? static_cast<const Word*>(data)[offset + i * stride] : Word(0);
    to.low[i] = uint32_t(x);
    if constexpr (sizeof(Word) == 8) to.high[i] = uint32_t(uint64_t(x) >> 32);
  }
}
__device__ __forceinline__ void load_pair(RowPair& to, const intra::View& view, int64_t batch, int64_t row, int head, int count) {
  const int64_t offset = batch * view.stride[0] + row * view.stride[1] + head * view.stride[2];
  if (view.dtype == QLA_FLOAT32)
    load_pair_as<uint32_t>(to, view.data, offset, view.stride[1], count);
  else if (view.dtype == QLA_FLOAT64)
    load_pair_as<unsigned long long>(to, view.data, offset, view.stride[1], count);
  else
    load_pair_as<uint16_t>(to, view.data, offset, view.stride[1], count);
}
__device__ __forceinline__ void load_rows(RowPairs& to, const Args& a, int64_t batch, int64_t row, int head, int count) {
  to.g = {};
  if (a.g.data) load_pair(to.g, a.g, batch, row, head, count);
  load_pair(to.beta, a.beta, batch, row, head, count);
}
__device__ __forceinline__ float2 decode_gates(const RowPairs& x, const Args& a, float rate, float bias, int count) {
  const auto of = [&](int i) { return i < count ? gate_of(a, x.g.low[i], x.g.high[i], rate, bias) : 0.f; };
  return make_float2(of(0), of(1));
}
__device__ __forceinline__ float2 decode_betas(const RowPairs& x, const Args& a, int count) {
  const auto of = [&](int i) { return i < count ? beta_of(a, x.beta.low[i], x.beta.high[i]) : 0.f; };
  return make_float2(of(0), of(1));
}

}  // namespace qla::cuda::gates
