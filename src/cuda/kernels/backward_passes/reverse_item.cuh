// Reverse pass of one run of chunks, one value head, half of V: (B1)-(B4) with dS^T in registers, from the highest chunk down.
// Writes dS+ of each chunk and dR = dV, behind the warm-up.
//   Products, in their order, and what the warps do meanwhile: K dS+ (dS+ is stored between its halves, dS decays, dO gets its
//   factors); Q^T dO, first half (dD); Abar^T dD; Q^T dO, second half (dR is packed); K^T dR (the next dO is read); dO^T Pg of
//   the chunk ahead (the dR of the chunk is stored, dS is packed).
#pragma once

#include "cuda/kernels/backward_passes/common.cuh"

namespace qla::cuda::backward_passes {

template <typename T>
__device__ __forceinline__ void reverse_item(const Params& p, const PassItem& it, uint32_t base, int part) {
  using Out = ReverseOutputs;
  const Lane l;
  float s[64];  // dS^T
  if (it.start == kFromCaller)
    read_caller(s, p.dht, it.sequence, it.v_head, part, l);
  else if (it.start == kFromBuffer)
    read_buffer(s, p.carry_in, buffer_at(it.start_index, part, l));
  else
#pragma unroll
    for (int i = 0; i < 64; i++) s[i] = 0.f;
  if (it.chunks > 0) {
    float pd[32];     // dO^T Pg of the chunk ahead
    uint32_t of[16];  // dO^T of the chunk ahead
    auto load_do = [&](uint32_t row, uint32_t(&f)[16]) {
#pragma unroll
      for (int j = 0; j < 4; j++)
        ptx::ldmatrix_x4_trans(l.transposed(row, j), f[4 * j], f[4 * j + 1], f[4 * j + 2], f[4 * j + 3]);
    };
    // Pg and Abar as rows of k: MN-major in the 32-byte swizzle, 16-column panels 2,048 bytes apart
    auto tile_rows = [](uint32_t tile) { return descriptor(tile, 2048, 256, 3); };  // k16 steps are 512 bytes apart
    auto product_p = [&](uint32_t tile) {
      const uint64_t pg = tile_rows(tile);
#pragma unroll
      for (int k = 0; k < 4; k++) ptx::wgmma_rs<T, 1>(pd, of + 4 * k, advance(pg, 512 * k), k > 0);
      ptx::wgmma_commit();
    };
    uint32_t sf[32];  // dS^T packed: nothing may be in flight where the loop closes (C7513), so packing ends the iteration
    auto pack_state = [&] {
      pack_operand<T>(sf, s);
      ptx::pin(sf);
    };
    Ring<kKeyStages> ring;
    Ring<kRowStages> rows;
    const Release release(base, l.lane);
    ptx::mbarrier_wait(full_bar(base, 0), 0);
    ptx::mbarrier_wait(row_full_bar(base, 0), 0);
    if (it.last_rows < kRows) {
      zero_rows(base, 2, it.last_rows);
      zero_rows(base + kKeyQ, 2, it.last_rows);
      zero_rows(base + kRowAt, 1, it.last_rows);
      ptx::proxy_fence();
      ptx::named_sync(1, kProductThreads);
      if (threadIdx.x == 0) ptx::mbarrier_arrive(tail_bar(base));
    }
    load_do(base + kRowAt, of);
    ptx::mbarrier_wait(pg_full_bar(base, 0), 0);
    ptx::wgmma_fence();
    product_p(base + kPgAt);
    pack_state();
    ptx::wgmma_wait();
    release(kPgBars + kPgTiles, l.lane);
    for (int i = 0; i < it.chunks; i++) {
      const int stored = i - it.warmup;  // chunks stored before this one; negative: nothing of this one is
      const uint32_t st = base + ring.stage * kKeyStage, row = base + kRowAt + rows.stage * kRowStage,
                     vec = st + kKeyVec + l.lane % 4 * 8;
      uint32_t og[16];  // kept from the product with Pg
#pragma unroll
      for (int n = 0; n < 16; n++) og[n] = of[n];
      float e[32];
      float2 g[8];
      const uint64_t k_major = descriptor_k_major(st), k_rows = descriptor_mn_major(st, kPanel),
                     q_rows = descriptor_mn_major(st + kKeyQ, kPanel), abar = tile_rows(row + kRowA);
      const auto product_k = [&](int k) {  // (B1)
        ptx::wgmma_rs<T, 0>(e, sf + 4 * k, advance(k_major, k / 4 * kPanel + k % 4 * 32), k > 0);
      };
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) product_k(k);
      if (stored >= 0) {  // dS+ leaves under these
        const OutEdge<Out::kSnapshots> snapshot(base, kSnapshotBars, stored);
        const uint32_t to = base + kReverseOut + stored % Out::kSnapshots * kSnapshotHalf;
        snapshot.wait_empty();
#pragma unroll
        for (int j = 0; j < 8; j++) ptx::stmatrix_x4(l.snapshot(to, j), sf[4 * j], sf[4 * j + 1], sf[4 * j + 2], sf[4 * j + 3]);
        snapshot.publish(l.lane);
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 4; k < 8; k++) product_k(k);
      ptx::wgmma_commit();
      const float gamma_c = ptx::lds(st + kKeyVec + (kVecGamma + 63) * 4);
      auto scale_do = [&](int half) {  // scale gamma dO^T
#pragma unroll
        for (int n = 4 * half; n < 4 * half + 4; n++) {
          const float2 c = ptx::lds2(vec + kVecQ * 4 + n * 32), lo = unpack<T>(og[2 * n]), hi = unpack<T>(og[2 * n + 1]);
          og[2 * n] = pack<T>(lo.x * c.x, lo.y * c.y);
          og[2 * n + 1] = pack<T>(hi.x * c.x, hi.y * c.y);
        }
        ptx::pin(og);
      };
#pragma unroll
      for (int j = 0; j < 64; j++) s[j] *= gamma_c;
      ptx::pin(s);
      scale_do(0);
#pragma unroll
      for (int n = 0; n < 8; n++) g[n] = ptx::lds2(vec + kVecE * 4 + n * 32);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; k++) ptx::wgmma_rs<T, 1>(s, og + 4 * k, advance(q_rows, k * 2048), 1);  // (B4), Q
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // dE
      uint32_t df[16];
#pragma unroll
      for (int n = 0; n < 8; n++) {  // (B2) times beta, which e_scale and the columns of Pg carry
        df[2 * n] = pack<T>(e[4 * n] * g[n].x + pd[4 * n], e[4 * n + 1] * g[n].y + pd[4 * n + 1]);
        df[2 * n + 1] = pack<T>(e[4 * n + 2] * g[n].x + pd[4 * n + 2], e[4 * n + 3] * g[n].y + pd[4 * n + 3]);
      }
      float r[32];
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) ptx::wgmma_rs<T, 1>(r, df + 4 * k, advance(abar, 512 * k), k > 0);  // (B3)
      ptx::wgmma_commit();
#pragma unroll
      for (int n = 0; n < 8; n++) g[n] = ptx::lds2(vec + kVecK * 4 + n * 32);
      scale_do(1);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 2; k < 4; k++) ptx::wgmma_rs<T, 1>(s, og + 4 * k, advance(q_rows, k * 2048), 1);
      ptx::wgmma_commit();
      const int stage = ring.stage, row_stage = rows.stage;
      const bool more = i + 1 < it.chunks;
      ring.advance();
      rows.advance();
      ptx::wgmma_wait<1>();  // dR
      uint32_t rf[16], ro[16];
#pragma unroll
      for (int n = 0; n < 8; n++) {
        // fused with a zero: a product and a change of sign would be two instructions
        rf[2 * n] = pack<T>(__fmaf_rn(-g[n].x, r[4 * n], 0.f), __fmaf_rn(-g[n].y, r[4 * n + 1], 0.f));
        rf[2 * n + 1] = pack<T>(__fmaf_rn(-g[n].x, r[4 * n + 2], 0.f), __fmaf_rn(-g[n].y, r[4 * n + 3], 0.f));
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) ptx::wgmma_rs<T, 1>(s, rf + 4 * k, advance(k_rows, k * 2048), 1);  // (B4), K
      ptx::wgmma_commit();
      release(kRowBars + kRowStages + row_stage, l.lane);
      const int tile = more ? (i + 1) % kPgTiles : i % kPgTiles;  // the last chunk multiplies its own once more
      if (more) ptx::mbarrier_wait(pg_full_bar(base, tile), (i + 1) / kPgTiles % 2);  // K, Q, dO, Abar of that chunk as well
      load_do(more ? base + kRowAt + rows.stage * kRowStage : row, of);
      ptx::wgmma_fence();
      product_p(base + kPgAt + tile * kTileSmemBytes);
      pack_operand<T>(ro, r);
      if (stored >= 0) {
        const OutEdge<Out::kRows> d_rows(base, kOutRowBars, stored);
        d_rows.wait_empty();
        const uint32_t to = base + kReverseOut + Out::kSnapshots * kSnapshotHalf + stored % Out::kRows * kPanel;
#pragma unroll
        for (int j = 0; j < 4; j++)
          ptx::stmatrix_x4_trans(l.transposed(to, j), ro[4 * j], ro[4 * j + 1], ro[4 * j + 2], ro[4 * j + 3]);
        d_rows.publish(l.lane);
      }
      ptx::wgmma_wait<1>();  // dS is final; the next chunk's dO^T Pg is still in flight
      release(kStageBars + kMostStages + stage, l.lane);
      pack_state();
      ptx::wgmma_wait();
      if (more) release(kPgBars + kPgTiles + tile, l.lane);  // the last one has been released
    }
  }
  if (it.end == kToCaller)
    write_caller(s, p.dh0, it.sequence, it.v_head, part, l, p.mask_dh0 && !it.initial);
  else if (it.end == kToBuffer)
    write_buffer(s, p.carry_out, buffer_at(it.end_index, part, l));
}

template <typename T>
__device__ __forceinline__ void load_reverse_item(const Params& p, const Maps& maps, const PassItem& it, uint32_t base,
                                                  int rank) {
  Ring<kKeyStages> ring;
  Ring<kRowStages> rows;
  const int token = int(it.token), batch = token / p.rows_per_batch, row = token % p.rows_per_batch;
  for (int c = it.chunks - 1; c >= 0; c--) {
    const Source src{batch, row + c * kRows, it.slot + c, it.v_head};
    const uint32_t bar = full_bar(base, ring.stage), st = base + ring.stage * kKeyStage;
    ptx::mbarrier_wait(empty_bar(base, ring.stage), ring.phase ^ 1);
    ptx::mbarrier_arrive_expect(bar, 4 * kPanel + kVecFloats * 4);
    load_vectors(p, src, st + kKeyVec, rank, bar, kVecFloats * 4);
    load_keys(p, src, st, &maps.k, rank, bar);
    load_keys(p, src, st + kKeyQ, &maps.q, rank, bar);
    ring.advance();
    const uint32_t row_bar = row_full_bar(base, rows.stage), row_st = base + kRowAt + rows.stage * kRowStage;
    ptx::mbarrier_wait(row_empty_bar(base, rows.stage), rows.phase ^ 1);
    ptx::mbarrier_arrive_expect(row_bar, kPanel + kTileBytes);
    ptx::tensor_load_4d(row_st, &maps.d_o, kHalf * rank, src.head, src.token, src.batch, row_bar);
    load_tile(p, src, row_st + kRowA, rank, row_bar);
    rows.advance();
  }
}

// The store warp. Rows of a tail chunk go to dV by ordinary stores: a box would overwrite the next sequence.
__device__ __forceinline__ void store_reverse_item(const Params& p, const Maps& maps, const PassItem& it, uint32_t base, int part,
                                                   int lane) {
  const int token = int(it.token), batch = token / p.rows_per_batch, row = token % p.rows_per_batch;
  using Out = ReverseOutputs;
  for (int i = 0; i < it.chunks - it.warmup; i++) {
    const int c = it.chunks - it.warmup - 1 - i, rows = c + 1 == it.chunks ? it.last_rows : kRows;
    const uint32_t out = base + kReverseOut, panel = out + Out::kSnapshots * kSnapshotHalf + i % Out::kRows * kPanel;
    const int64_t at = int64_t(it.slot + c - p.first_slot) * p.num_v_heads + it.v_head;
    const OutEdge<Out::kRows> d_rows(base, kOutRowBars, i);
    if (lane == 0) store_snapshot<Out>(p.d_state, at, part, base, out, i);
    d_rows.wait_full();
    if (rows < kRows) {
      uint16_t* dv = static_cast<uint16_t*>(p.dv) + batch * p.dv_stride_b + (row + c * kRows) * p.dv_stride_t +
                     it.v_head * p.dv_stride_h + kHalf * part;
      for (int n = lane; n < rows * 8; n += 32)
        *reinterpret_cast<uint4*>(dv + n / 8 * p.dv_stride_t + n % 8 * 8) =
            ptx::lds4u(panel + panel_address(n / 8, n % 8 * 8, kRows));
      __syncwarp();
    }
    if (lane == 0) {
      if (rows == kRows) ptx::tensor_store_4d(&maps.dv, kHalf * part, it.v_head, row + c * kRows, batch, panel);
      sent_rows<Out>(base, i);
    }
    __syncwarp();
  }
  if (lane == 0) ptx::bulk_wait();
}

}  // namespace qla::cuda::backward_passes
