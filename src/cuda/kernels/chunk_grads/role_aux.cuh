// chunk_grads: the single-warp roles: loads, <S, dS+>, and the finisher of dg and dbeta.
#pragma once

#include "cuda/kernels/backward_rows/padding.cuh"
#include "cuda/kernels/chunk_grads/products.cuh"
#include "cuda/kernels/chunk_grads/scores.cuh"
#include "cuda/kernels/chunk_grads/store.cuh"

namespace qla::cuda::chunk_grads {

// One thread. Stages are waited for in the order in which the products leave them: S and dS+ of the head before, then its tokens,
// which make room for two tiles of this head and one of the next. K and Q of the next item are asked for with that one.
__device__ __forceinline__ void load_role(const Params& p, const Maps& maps, Lane w) {
  const int heads = p.num_k_heads * p.group;
  uint32_t item = 0;
  // A turn is the rest of a head (not in the first turn) and the beginning of the next one.
  int64_t at = -1;
  int head = 0, g = 0;
  ForeseenItem it(p);
  if (!it.next(p)) return;
  Rows rows(p, it);
  while (true) {
    if (at >= 0) {
#pragma unroll 1
      for (int i = 0; i < 4; i++) {  // kState0, kState1, kDState0, kDState1
        const uint32_t full = w.full(kState0 + i);
        w.wait_empty(kState0 + i);
        ptx::mbarrier_arrive_expect(full, kTile);
        ptx::bulk_load(w.s_state(0) + i * kTile, (i < 2 ? p.state : p.d_state) + (at * 2 + i % 2) * kTile, kTile, full);
      }
      const uint32_t stage = w.n % 2, vec_full = w.full(kVec0 + stage), full = w.full(kToken0 + stage);
      w.wait_empty2(kVec0);
      ptx::mbarrier_arrive_expect(vec_full, kVecFloats * 4);
      ptx::bulk_load(w.s_vec(), p.vec + (int64_t(p.first_slot) * heads + at) * kVecFloats, kVecFloats * 4, vec_full);
      const uint32_t d_o = w.s_token(1), delta = w.s_token(2);
      w.n++;
      w.wait_empty2(kToken0);  // tiles of the head before
      ptx::mbarrier_arrive_expect(full, 2 * kTile);
      rows.load(d_o, &maps.d_o, head, full);
      ptx::bulk_load(delta, p.delta + at * kTile, kTile, full);
      if (++g == p.group) {
        if (!it.next(p)) return;
        g = 0;
        rows = Rows(p, it);
      }
    }
    head = it.k_head(p) * p.group + g;
    at = int64_t(it.slot(p) - p.first_slot) * heads + head;
    const uint32_t full = w.full(kFirst0 + w.n % 2);
    ptx::mbarrier_arrive_expect(full, kTile);
    rows.load(w.s_token(0), &maps.d_v, head, full);
    if (g == 0) {
      const uint32_t pair = kKq0 + item % 2, kq_full = w.full(pair);
      ptx::mbarrier_wait(w.empty(pair), item / 2 % 2 ^ 1);
      ptx::mbarrier_arrive_expect(kq_full, 2 * kTile);
#pragma unroll 1
      for (int i = 0; i < 2; i++) rows.load(w.s_k(item) + i * kTile, i ? &maps.q : &maps.k, it.k_head(p), kq_full);
      item++;
    }
  }
}

// <S, dS+> of a head: the two tiles lie alike, so their layout does not matter. By mma.sync, whose operands are the words as they
// are loaded: a lane's first and third one are in row lane / 4 of the left operand, the others in row 8 + lane / 4, and the same
// ones of the right tile in column lane / 4. The sums on these two diagonals are wanted, the others are not looked at. A sixth of
// the instructions that products of unpacked floats take. At the end the rows past the last sequence.
template <typename T>
__device__ __forceinline__ void dot_role(const Params& p, Lane w) {
  for (ForeseenItem it(p); it.next(p);)
    for (int head = 0; head < p.group; head++, w.n++) {
      float upper[4] = {0.f, 0.f, 0.f, 0.f}, lower[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
      for (int half = 0; half < 2; half++) {
        w.wait_full(kState0 + half);
        w.wait_full(kDState0 + half);
        const uint32_t at = (w.warp * 32 + w.lane) * 16, a = w.s_state(half) + at, b = w.s_d_state(half) + at;
#pragma unroll 2
        for (int i = 0; i < kTile; i += 1024) {
          const uint4 x = ptx::lds4u(a + i), y = ptx::lds4u(b + i);
          ptx::mma_m16n8k16<T>(upper, x.x, x.y, x.z, x.w, y.x, y.z);
          ptx::mma_m16n8k16<T>(lower, x.x, x.y, x.z, x.w, y.y, y.w);
        }
        w.arrive(w.empty(kState0 + half));
        w.arrive(w.empty(kDState0 + half));
      }
      const int row = w.lane / 4, column = w.lane % 4 * 2;
      const float total = warp_sum(row == column ? upper[0] + lower[2] : row == column + 1 ? upper[1] + lower[3] : 0.f);
      w.wait_empty2(kPart0);
      if (w.lane == 0) ptx::sts(w.s_part() + (kXdot + w.warp) * 4, total);
      w.arrive(w.full(kPart0 + w.n % 2));
    }
  if (p.padding.header != nullptr) backward_rows::zero_padding_rows(p.padding, w.warp, 2, w.lane);
}

// derivatives of the raw gate and of the beta logits, from the inputs as the caller gave them
struct GateRule {
  float a, bias;  // -exp(A_log), dt_bias
  __device__ __forceinline__ GateRule(const Params& p, int head) : a(0.f), bias(0.f) {
    if (p.raw_gate.data == nullptr) return;
    a = -expf(load_scalar(p.a_log, head * p.a_log.stride_h));
    if (p.dt_bias.data != nullptr) bias = load_scalar(p.dt_bias, head * p.dt_bias.stride_h);
  }
};

template <typename T>
__device__ __forceinline__ void finish_role(const Params& p, Lane w) {
  for (ForeseenItem it(p); it.next(p);) {
    const int64_t batch = uint32_t(it.token) / uint32_t(p.tokens), first = uint32_t(it.token) % uint32_t(p.tokens);
    for (int g = 0; g < p.group; g++, w.n++) {
      forget(w.lane);
      w.wait_full2(kVec0);
      w.wait_full2(kPart0);
      const uint32_t vec = w.s_vec() + w.lane * 8, part = w.s_part() + w.lane * 8;  // rows 2 lane and + 1
      const float2 beta = ptx::lds2(vec + kVecBeta * 4), aq = ptx::lds2(part + kXaQ * 4), ak = ptx::lds2(part + kXaK * 4),
                   e = ptx::lds2(part + kXe * 4);
      const float gamma_c = ptx::lds(w.s_vec() + (kVecGamma + 63) * 4);
      const float2 dots = ptx::lds2(w.s_part() + kXdot * 4);
      float dg[2] = {0.f, 0.f}, db[2] = {e.x, e.y};
#pragma unroll 1  // code that runs once a head costs more to fetch than to loop
      for (int sums = kXquery; sums <= kXkey; sums += kSumFloats) gather_sums(w.s_part() + sums * 4, beta, w.lane, dg, db);
      w.arrive(w.empty(kPart0 + w.n % 2));
      w.arrive(w.empty(kVec0 + w.n % 2));
      // (B11) suffix sums of a, exclusive prefix sums of e = beta e'
      const float a0 = aq.x + ak.x, a1 = aq.y + ak.y, e0 = beta.x * e.x, e1 = beta.y * e.y;
      const float after = __shfl_down_sync(~0u, warp_suffix_sum(a0 + a1, w.lane), 1);
      const float before = __shfl_up_sync(~0u, warp_inclusive_sum(e0 + e1, w.lane), 1);
      const float suffix = w.lane == 31 ? a1 : a1 + after, prefix = w.lane == 0 ? 0.f : before;
      const float whole = gamma_c * (dots.x + dots.y);
      dg[0] += (a0 + suffix) + prefix + whole;
      dg[1] += suffix + (prefix + e0) + whole;

      const int head = it.k_head(p) * p.group + g, heads = p.num_k_heads * p.group, t = 2 * w.lane;
      const GateRule rule(p, head);
      float share[2] = {0.f, 0.f};  // of dA_log, ddt_bias
#pragma unroll 1
      for (int c = 0; c < 2; c++) {
        if (t + c >= it.rows) break;
        float d_gate = c ? dg[1] : dg[0], d_beta = c ? db[1] : db[0];
        const int64_t row = first + t + c;
        if (p.raw_gate.data != nullptr) {  // log gate = a softplus(x), x = raw + bias
          const float x =
              load_scalar(p.raw_gate, batch * p.raw_gate.stride_b + row * p.raw_gate.stride_t + head * p.raw_gate.stride_h) +
              rule.bias;
          const float softplus = x > 20.f ? x : log1pf(expf(x));
          share[0] += d_gate * rule.a * softplus;
          d_gate *= rule.a / (1.f + expf(-x));
          share[1] += d_gate;
        }
        if (p.beta_logits.data != nullptr) {  // beta = beta_max sigmoid(x)
          const float x = load_scalar(
              p.beta_logits, batch * p.beta_logits.stride_b + row * p.beta_logits.stride_t + head * p.beta_logits.stride_h);
          const float near = expf(-fabsf(x));
          d_beta *= p.beta_max * near / ((1.f + near) * (1.f + near));
        }
        if (p.dg.data != nullptr) store_scalar(p.dg, batch * p.dg.stride_b + row * p.dg.stride_t + head * p.dg.stride_h, d_gate);
        if (p.dbeta.data != nullptr)
          store_scalar(p.dbeta, batch * p.dbeta.stride_b + row * p.dbeta.stride_t + head * p.dbeta.stride_h, d_beta);
      }
      if (p.gate_partials != nullptr) {
        const float da = warp_sum(share[0]), dbias = warp_sum(share[1]);
        if (w.lane == 0)
          *reinterpret_cast<float2*>(p.gate_partials + (int64_t(it.slot(p)) * heads + head) * 2) = make_float2(da, dbias);
      }
    }
  }
}

}  // namespace qla::cuda::chunk_grads
