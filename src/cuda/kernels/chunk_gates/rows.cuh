// The gate vectors of one chunk of one value head by one warp: a lane has rows 2 lane and 2 lane + 1. Computes (F0), (F1).
#pragma once

#include "cuda/kernels/chunk_gates/config.hpp"
#include "cuda/kernels/chunk_intra/gates.cuh"
#include "cuda/math/warp.cuh"

namespace qla::cuda::gates {

// g: raw gate (0 in rows past the end) times log2 e. Returns gamma.
__device__ __forceinline__ float2 write_vectors_of(float* record, float2 g, float2 beta, float scale, int lane) {
  const float through = warp_inclusive_sum(g.x + g.y, lane);
  const float c0 = through - g.y, c1 = through, last = __shfl_sync(~0u, through, 31);
  const float gamma0 = exp2_approx(c0), gamma1 = exp2_approx(c1);
  float2* out = reinterpret_cast<float2*>(record) + lane;
  out[kFusedCum / 2] = make_float2(c0, c1);
  out[kFusedBeta / 2] = beta;
  out[kFusedGamma / 2] = make_float2(gamma0, gamma1);
  out[kFusedQ / 2] = make_float2(scale * gamma0, scale * gamma1);
  out[kFusedE / 2] = make_float2(exp2_approx(last - c0) * beta.x, exp2_approx(last - c1) * beta.y);
  return make_float2(gamma0, gamma1);
}
// The rest of a kept record (index: slot and value head), unless norms are still to come.
__device__ __forceinline__ void write_rest(const Args& a, int64_t index, float2 gamma, int lane) {
  if (lane == 0) a.decay[index] = 0.f;
  if (a.flags & QLA_FLAG_QK_L2NORM) return;
  float2* out = reinterpret_cast<float2*>(a.vec + index * kVecFloats) + lane;
  out[kVecK / 2] = gamma;
  out[kVecRk / 2] = out[kVecRq / 2] = make_float2(1.f, 1.f);
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

// Elements a stride apart as they lie in memory: all asked for before one is looked at. Those from count on are 0.
template <int N>
struct Raw {
  uint32_t low[N], high[N];
};
template <typename Word, int N>
__device__ __forceinline__ void load_raw_as(Raw<N>& raw, const void* data, int64_t offset, int64_t stride, int count) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const Word x = i < count ? static_cast<const Word*>(data)[offset + i * stride] : Word(0);
    raw.low[i] = uint32_t(x);
    if constexpr (sizeof(Word) == 8) raw.high[i] = uint32_t(uint64_t(x) >> 32);
  }
}
template <int N>
__device__ __forceinline__ void load_raw(Raw<N>& raw, const intra::View& view, int64_t offset, int64_t stride, int count) {
  if (view.dtype == QLA_FLOAT32)
    load_raw_as<uint32_t>(raw, view.data, offset, stride, count);
  else if (view.dtype == QLA_FLOAT64)
    load_raw_as<unsigned long long>(raw, view.data, offset, stride, count);
  else
    load_raw_as<uint16_t>(raw, view.data, offset, stride, count);
}

// Two neighbouring rows of one head.
struct RowPairs {
  Raw<2> g, beta;
};
__device__ __forceinline__ void load_rows(RowPairs& to, const Args& a, int64_t batch, int64_t row, int head, int count) {
  const auto load = [&](Raw<2>& raw, const intra::View& x) {
    load_raw(raw, x, batch * x.stride[0] + row * x.stride[1] + head * x.stride[2], x.stride[1], count);
  };
  to.g = {};
  if (a.g.data) load(to.g, a.g);
  load(to.beta, a.beta);
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
