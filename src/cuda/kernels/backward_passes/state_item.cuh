// State pass of one run of chunks, one value head, half of V: (F4) (F5) (F8) (F9) with S^T in registers. Writes S before each
// chunk and Delta, behind the warm-up. From S = I with V = 0 its last state is the transition M (C2).
#pragma once

#include "cuda/kernels/backward_passes/common.cuh"

namespace qla::cuda::backward_passes {

template <typename T>
__device__ __forceinline__ void state_item(const Params& p, const PassItem& it, uint32_t base, int part) {
  const Lane l;
  using Out = StateOutputs;
  float s[64];
  if (it.start == kFromCaller)
    read_caller(s, p.h0, it.sequence, it.v_head, part, l);
  else if (it.start == kFromBuffer)
    read_buffer(s, p.boundary, buffer_at(it.start_index, part, l));
  else
#pragma unroll
    for (int i = 0; i < 64; i++) {
      const int v = kHalf * part + fragment_row(l.warp, l.lane) + i / 2 % 2 * 8, k = fragment_col(l.lane) + i / 4 * 8 + i % 2;
      s[i] = it.start == kFromIdentity && v == k ? 1.f : 0.f;
    }
  Ring<kStateStages> ring;
  const Release release(base, l.lane);
  for (int c = 0; c < it.chunks; c++) {
    const int stored = c - it.warmup;  // chunks stored before this one; negative: nothing of this one is
    const uint32_t st = base + ring.stage * kStateStage, out = base + kStateOut, vec = st + kStateVec + l.lane % 4 * 8;
    const OutEdge<Out::kSnapshots> snapshot(base, kSnapshotBars, stored);
    const OutEdge<Out::kRows> rows(base, kOutRowBars, stored);
    ptx::mbarrier_wait(full_bar(base, ring.stage), ring.phase);
    if (c + 1 == it.chunks && it.last_rows < kRows) {
      zero_rows(st, 2, it.last_rows);
      zero_rows(st + kStateV, 1, it.last_rows);
      ptx::proxy_fence();
      ptx::named_sync(1, kProductThreads);
    }
    if (p.kinds == kStateOnly && c && (it.slot + c) % p.boundary_slots == 0)
      write_buffer(s, p.boundary, buffer_at((it.slot + c) / p.boundary_slots * p.num_v_heads + it.v_head, part, l));
    uint32_t sf[32];
    pack_operand<T>(sf, s);
    ptx::pin(sf);
    float acc[32], d[32];
    const uint64_t k_major = descriptor_k_major(st), k_rows = descriptor_mn_major(st, kPanel),
                   abar = descriptor_k_major_32(st + kStateA);
    auto product_k = [&](int k) { ptx::wgmma_rs<T, 0>(acc, sf + 4 * k, advance(k_major, k / 4 * kPanel + k % 4 * 32), k > 0); };
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) product_k(k);
    if (stored >= 0) {  // a product with its left operand in registers is issued when the one before begins: there is time
      const uint32_t to = out + stored % Out::kSnapshots * kSnapshotHalf;
      snapshot.wait_empty();
#pragma unroll
      for (int j = 0; j < 8; j++) ptx::stmatrix_x4(l.snapshot(to, j), sf[4 * j], sf[4 * j + 1], sf[4 * j + 2], sf[4 * j + 3]);
      snapshot.publish(l.lane);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 4; k < 8; k++) product_k(k);
    ptx::wgmma_commit();
    const float gamma_c = ptx::lds(st + kStateVec + (kVecGamma + 63) * 4);
#pragma unroll
    for (int i = 0; i < 64; i++) s[i] *= gamma_c;
    ptx::pin(s);
    uint32_t vt[16];
#pragma unroll
    for (int j = 0; j < 4; j++)
      ptx::ldmatrix_x4_trans(l.transposed(st + kStateV, j), vt[4 * j], vt[4 * j + 1], vt[4 * j + 2], vt[4 * j + 3]);
    if (it.start == kFromIdentity) {
#pragma unroll
      for (int j = 0; j < 16; j++) vt[j] = 0;
    }
    float2 gk[8], ge[8];
#pragma unroll
    for (int n = 0; n < 8; n++) gk[n] = ptx::lds2(vec + kVecK * 4 + n * 32);
    ptx::wgmma_wait();
    uint32_t rf[16];
#pragma unroll
    for (int n = 0; n < 8; n++) {  // (F4) R^T
      const float2 lo = unpack<T>(vt[2 * n]), hi = unpack<T>(vt[2 * n + 1]);
      rf[2 * n] = pack<T>(lo.x - gk[n].x * acc[4 * n], lo.y - gk[n].y * acc[4 * n + 1]);
      rf[2 * n + 1] = pack<T>(hi.x - gk[n].x * acc[4 * n + 2], hi.y - gk[n].y * acc[4 * n + 3]);
    }
#pragma unroll
    for (int n = 0; n < 8; n++) ge[n] = ptx::lds2(vec + kVecE * 4 + n * 32);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) ptx::wgmma_rs<T, 0>(d, rf + 4 * k, advance(abar, 2048 * k), k > 0);  // (F5) Delta^T
    ptx::wgmma_commit();
    ptx::wgmma_wait();
    uint32_t ef[16];
#pragma unroll
    for (int n = 0; n < 8; n++) {  // (F8) E^T
      ef[2 * n] = pack<T>(d[4 * n] * ge[n].x, d[4 * n + 1] * ge[n].y);
      ef[2 * n + 1] = pack<T>(d[4 * n + 2] * ge[n].x, d[4 * n + 3] * ge[n].y);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) ptx::wgmma_rs<T, 1>(s, ef + 4 * k, advance(k_rows, k * 2048), 1);  // (F9)
    ptx::wgmma_commit();
    if (stored >= 0) {
      uint32_t df[16];
      pack_operand<T>(df, d);
      rows.wait_empty();
      const uint32_t to = out + Out::kSnapshots * kSnapshotHalf + stored % Out::kRows * kPanel;
#pragma unroll
      for (int j = 0; j < 4; j++)
        ptx::stmatrix_x4_trans(l.transposed(to, j), df[4 * j], df[4 * j + 1], df[4 * j + 2], df[4 * j + 3]);
      rows.publish(l.lane);
    }
    ptx::wgmma_wait();
    release(kStageBars + kMostStages + ring.stage, l.lane);
    ring.advance();
  }
  if (it.end == kToBuffer) write_buffer(s, p.boundary, buffer_at(it.end_index, part, l));
  if (it.start == kFromIdentity) write_transposed(s, p.boundary, it.end_index + p.most_states, part, l);
}

template <typename T>
__device__ __forceinline__ void load_state_item(const Params& p, const Maps& maps, const PassItem& it, uint32_t base, int rank) {
  Ring<kStateStages> ring;
  const int token = int(it.token), batch = token / p.rows_per_batch, row = token % p.rows_per_batch;
  const bool has_v = it.start != kFromIdentity;
  for (int c = 0; c < it.chunks; c++) {
    const Source src{batch, row + c * kRows, it.slot + c, it.v_head};
    const uint32_t bar = full_bar(base, ring.stage), st = base + ring.stage * kStateStage;
    ptx::mbarrier_wait(empty_bar(base, ring.stage), ring.phase ^ 1);
    ptx::mbarrier_arrive_expect(bar, (has_v ? 3 : 2) * kPanel + kTileBytes + kVecBytesForward);
    load_vectors(p, src, st + kStateVec, rank, bar, kVecBytesForward);
    load_keys(p, src, st, &maps.k, rank, bar);
    load_tile(p, src, st + kStateA, rank, bar);
    if (has_v) ptx::tensor_load_4d(st + kStateV, &maps.v, kHalf * rank, src.head, src.token, src.batch, bar);
    ring.advance();
  }
}

// one thread of the store warp
__device__ __forceinline__ void store_state_item(const Params& p, const PassItem& it, uint32_t base, int part) {
  using Out = StateOutputs;
  for (int i = 0; i < it.chunks - it.warmup; i++) {
    const uint32_t out = base + kStateOut;
    const int64_t at = int64_t(it.slot + it.warmup + i - p.first_slot) * p.num_v_heads + it.v_head;
    const OutEdge<Out::kRows> rows(base, kOutRowBars, i);
    store_snapshot<Out>(p.state, at, part, base, out, i);
    rows.wait_full();
    ptx::bulk_store(p.delta + at * kDeltaBytes + part * kPanel, out + Out::kSnapshots * kSnapshotHalf + i % Out::kRows * kPanel,
                    kPanel);
    sent_rows<Out>(base, i);
  }
  ptx::bulk_wait();
}

}  // namespace qla::cuda::backward_passes
