// chunk_grads: the two warpgroups of products. Steps and their order: kernel.cuh.
#pragma once

#include "cuda/kernels/chunk_grads/products.cuh"
#include "cuda/kernels/chunk_grads/scores.cuh"
#include "cuda/kernels/chunk_grads/store.cuh"

namespace qla::cuda::chunk_grads {

// K, Q of the item are there; rows past the end become zero. 256 threads.
__device__ __forceinline__ void wait_kq(const Lane& w, uint32_t item, uint32_t mine, const Item& it, int thread) {
  ptx::mbarrier_wait(w.full(kKq0 + item % 2), item / 2 % 2);
  if (it.rows < kRows) {
    zero_rows(mine, it.rows, thread);
    ptx::named_sync(1, 256);
  }
}

// Both product roles, in one code: what differs is where things lie and that the key role has a second snapshot and a second
// product at the end. Two bodies, one for each, run a quarter slower: the instruction cache does not hold both.
template <typename T>
__device__ __forceinline__ void product_role(const Params& p, const Maps& maps, Lane w, const bool key) {
  const uint32_t s_m = w.base + offsetof(Smem, m), s_x = w.base + offsetof(Smem, x);
  ForeseenItem it(p);
  bool more = it.next(p);
  if (!more) return;
  float products[32];  // Q K^T or K K^T, the same for all value heads of an item
  auto next_products = [&](uint32_t item) {
    const uint32_t s_k = w.s_k(item), s_rows = s_k + (key ? 0 : kTile);
    if (more) wait_kq(w, item, s_rows, it, 32 * w.warp + w.lane);
    ptx::wgmma_fence();
    product_tokens<T>(products, s_rows, s_k);
    ptx::wgmma_commit();
  };
  next_products(0);
  ptx::wgmma_wait();
  for (uint32_t item = 0; more; item++) {
    const uint32_t s_k = w.s_k(item), s_q = s_k + kTile, s_rows = key ? s_k : s_q;
    float sum[64], norm[2];  // dQ or dK, and rq or rk of this lane's rows
#pragma unroll
    for (int i = 0; i < 64; i++) sum[i] = 0.f;
    for (int head = 0; head < p.group; head++, w.n++) {
      forget(w.lane);  // addresses and masks are made anew for every head: kept, they would cost registers
      const int row = 16 * w.warp + w.lane / 4, thread = 32 * w.warp + w.lane;
      const uint32_t vec = w.s_vec(), part = w.s_part(), s_delta = w.s_token(2), s_left = w.s_token(key ? 0 : 1);
      w.wait_full2(key ? kFirst0 : kToken0);
      if (it.rows < kRows) {
        zero_rows(s_left, it.rows, thread);
        ptx::named_sync(2 + key, 128);
      }
      // (B7) HQ | HK, then HE without its tail, then (B5) J | (B6) Z: each half of the features is absorbed under the next
      // product
      float h0[32], h1[32];
      // What is loaded from shared memory is loaded before a product is issued: behind its instructions a load waits until the
      // last of them has begun.
      const BlockRow own(s_rows, 16 * w.warp, w.lane);
      RowWords words(own, 0);
      product_snapshot<T>(h0, s_left, w.s_state(0), 0, w, kState0, true);
#pragma unroll 1
      for (int pass = 0; pass <= int(key); pass++) {
        const Pair pair = pass ? kDState0 : kState0;
        if (pass == 0) w.wait_full2(kVec0);
        float factor[2], dot[2] = {0.f, 0.f};
        load_rows(factor, vec, pass ? kVecE : key ? kVecK : kVecQ, row);
        load_rows(norm, vec, key ? kVecRk : kVecRq, row);
        if (key && pass == 0) factor[0] = -factor[0], factor[1] = -factor[1];
        product_snapshot<T>(h1, pass ? s_delta : s_left, pass ? w.s_d_state(0) : w.s_state(0), 1, w, pair, false);
        if (pass == 0) {
          w.wait_full2(kToken0);
          w.wait_empty2(kPart0);
        }
        ptx::wgmma_wait<1>();
        absorb<T>(sum, h0, 0, factor, words, dot);  // (B8), (B9)
        words.load(own, 1);
        if (pass < int(key)) {
          product_snapshot<T>(h0, s_delta, w.s_d_state(0), 0, w, kDState0, true);
        } else {
          ptx::wgmma_fence();
          product_tokens<T>(h0, s_left, s_delta);
          ptx::wgmma_commit();
        }
        ptx::wgmma_wait<1>();
        w.arrive(w.empty(pair));
        w.arrive(w.empty(pair + 1));
        absorb<T>(sum, h1, 1, factor, words, dot);
        words.load(own, 0);
        if (pass) {  // (B10) e' has no beta in it
          load_rows(factor, vec, kVecG, row);
          const float g_last = ptx::lds(vec + (kVecG + 63) * 4);
          factor[0] = exp2_approx(g_last - factor[0]) * norm[0];
          factor[1] = exp2_approx(g_last - factor[1]) * norm[1];
        }
        store_row_sums(part + (pass ? kXe : key ? kXaK : kXaQ) * 4, factor[0] * dot[0], factor[1] * dot[1], row, w.lane);
        ptx::wgmma_wait();  // none is in flight where the loop closes
      }
      const float sign = key ? -1.f : p.scale, factor[2] = {sign * norm[0], sign * norm[1]};
      if (thread == 0 && head == 0 && item > 0) {  // dQ, dK of the item before have left its K and Q
        ptx::bulk_wait_read();
        ptx::mbarrier_arrive(w.empty(kKq0 + (item - 1) % 2));
      }
      w.arrive(w.empty(kToken0 + w.n % 2));
      forget(w.lane);
      w.wait_empty(kM);  // M and X of the head before have been multiplied
      scores<T>(h0, products, vec, factor, w.warp, w.lane, key, key ? s_x : s_m, part + (key ? kXkey : kXquery) * 4);
      ptx::proxy_fence();
      w.arrive(w.full(key ? kX : kM));
      w.arrive(w.full(kPart0 + w.n % 2));
      w.arrive(w.empty(kVec0 + w.n % 2));
      forget(w.lane);
      w.wait_full(kM);
      if (!key) {
        ptx::wgmma_fence();
        product_square<T>(sum, s_m, s_k);  // (B8) dP K
        ptx::wgmma_commit();
        ptx::wgmma_wait();
      } else {
        w.wait_full(kX);
        ptx::wgmma_fence();
        product_square<T>(sum, s_x, s_k);             // (B9) (X + X^T) K
        product_square_transposed<T>(sum, s_m, s_q);  // (B9) dP^T Q
        ptx::wgmma_commit();
        ptx::wgmma_wait();
      }
      w.arrive(w.empty(kM));
    }
    forget(w.lane);
    if (p.qk_norm) unnormalise<T>(sum, s_rows, norm, w.warp, w.lane);
    const Item done = it;
    more = it.next(p);
    next_products(item + 1);  // of nothing in particular behind the last item
    const GradView& out = key ? p.dk : p.dq;
    ptx::named_sync(1, 256);  // K and Q of the item are no longer read: dQ, dK take their places
    if (done.rows == kRows && out.bulk) {
      stage_rows<T>(sum, s_rows, w.warp, w.lane);
      ptx::proxy_fence();
      ptx::named_sync(2 + key, 128);
      if (w.warp == 0 && w.lane == 0) Rows(p, done).store(key ? &maps.dk : &maps.dq, done.k_head(p), s_rows);
    } else {
      store_rows(out, done.token, done.rows, done.k_head(p), p.tokens, sum, w.warp, w.lane);
    }
    ptx::wgmma_wait();
  }
  if (w.warp == 0 && w.lane == 0) ptx::bulk_wait();
}

}  // namespace qla::cuda::chunk_grads
