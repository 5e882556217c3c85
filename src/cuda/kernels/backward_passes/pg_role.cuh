// Pg (F6) of each chunk of a reverse item, made where it is used: by a warpgroup of its own, up to two chunks ahead of the
// products. The CTAs of a cluster make a whole tile in turn, for both: Q K^T and what it is multiplied by stand in the way of the
// products, on the tensor cores and otherwise. Half a tile each would put the other CTA into every chunk's path; so only the
// first chunk's is made by both.
#pragma once

#include "cuda/kernels/backward_passes/common.cuh"
#include "cuda/math/exp.cuh"

namespace qla::cuda::backward_passes {

template <typename T>
__device__ __forceinline__ void pg_role(const Params& p, const PassItem& it, uint32_t base, int rank) {
  // a warp's number known to be the same in all its lanes: else descriptors go through ordinary registers
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, int(threadIdx.x / 32 % 4), 0), row = fragment_row(warp, lane),
            col = fragment_col(lane);
  // the four 8 x 8 matrices of a 16 x 16 block for stmatrix: rows of 32 bytes, 32-byte swizzle
  const int to_row = 16 * warp + lane / 8 % 2 * 8 + lane % 8;
  const uint32_t to = base + kPgAt + 32 * to_row + ((lane / 16 ^ (to_row >> 2 & 1)) << 4);
  Ring<kKeyStages> ring;
  Ring<kRowStages> rows;
  const auto arrive = [&](int tile, bool sent) {
    ptx::mbarrier_wait(row_full_bar(base, rows.stage), rows.phase);  // the products wait for one barrier a chunk
    __syncwarp();
    if (lane == 0) {
      if (sent && warp == 0)
        ptx::mbarrier_arrive_expect(pg_full_bar(base, tile), kTileSmemBytes);
      else
        ptx::mbarrier_arrive(pg_full_bar(base, tile));
    }
    ring.advance();
    rows.advance();
  };
  for (int i = 0; i < it.chunks; i++) {
    const uint32_t st = base + ring.stage * kKeyStage, vec = st + kKeyVec;
    const int tile = i % kPgTiles;
    const uint32_t empty = pg_empty_bar(base, tile), parity = i / kPgTiles % 2 ^ 1;
    ptx::mbarrier_wait(full_bar(base, ring.stage), ring.phase);
    if (i == 0 && it.last_rows < kRows) ptx::mbarrier_wait(tail_bar(base), 0);  // rows past the end are zero now
    if (i > 0 && i % kCluster != rank) {                                        // the other CTA sends it
      ptx::mbarrier_wait(empty, parity);
      arrive(tile, true);
      continue;
    }
    const uint64_t q = descriptor_k_major(st + kKeyQ), key = descriptor_k_major(st);
    float acc[32];
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int at = k / 4 * kPanel + k % 4 * 32;
      ptx::wgmma_ss<T, 0>(acc, advance(q, at), advance(key, at), k > 0);
    }
    ptx::wgmma_commit();
    float row_factor[2], g_row[2], factor[32];  // what the products are multiplied by, made while they run
#pragma unroll
    for (int h = 0; h < 2; h++) {
      g_row[h] = ptx::lds(vec + (kVecG + row + 8 * h) * 4);
      row_factor[h] = ptx::lds(vec + (kVecRq + row + 8 * h) * 4) * p.scale;
    }
#pragma unroll
    for (int kb = 0; kb < 4; kb++) {
      if (kb > warp) break;  // blocks above the diagonal stay zero
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const uint32_t at = vec + (16 * kb + 8 * n + col) * 4;
        const float2 g = ptx::lds2(at + kVecG * 4), beta = ptx::lds2(at + kVecBeta * 4), rk = ptx::lds2(at + kVecRk * 4);
        const float2 column = make_float2(rk.x * beta.x, rk.y * beta.y);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int e = 8 * kb + 4 * n + 2 * h;
          factor[e] = exp2_approx(g_row[h] - g.x) * (row_factor[h] * column.x);
          factor[e + 1] = exp2_approx(g_row[h] - g.y) * (row_factor[h] * column.y);
        }
      }
    }
    ptx::mbarrier_wait(empty, parity);
    ptx::wgmma_wait();
#pragma unroll
    for (int kb = 0; kb < 4; kb++) {
      if (kb > warp) break;
      uint32_t x[4];  // matrices in stmatrix's order
      if (kb < warp) {
#pragma unroll
        for (int i = 0, e = 8 * kb; i < 4; i++, e += 2) x[i] = pack<T>(acc[e] * factor[e], acc[e + 1] * factor[e + 1]);
      } else {  // the diagonal block
#pragma unroll
        for (int i = 0, e = 8 * kb; i < 4; i++, e += 2) {
          const int under = fragment_row(0, lane) + i % 2 * 8 - (i / 2 * 8 + col);
          // a select: the gate may be inf above the diagonal
          x[i] = pack<T>(under >= 0 ? acc[e] * factor[e] : 0.f, under >= 1 ? acc[e + 1] * factor[e + 1] : 0.f);
        }
      }
      ptx::stmatrix_x4(to + tile * kTileSmemBytes + 2048 * kb, x[0], x[1], x[2], x[3]);
    }
    ptx::proxy_fence();
    if (i > 0) {
      ptx::named_sync(2, kPgThreads);
      if (warp == 0 && lane == 0) {
        const uint32_t from = base + kPgAt + tile * kTileSmemBytes;
        ptx::bulk_copy_cluster(ptx::cluster_address(from, rank ^ 1), from, kTileSmemBytes,
                               ptx::cluster_address(pg_full_bar(base, tile), rank ^ 1));
      }
    }
    arrive(tile, false);
  }
}

}  // namespace qla::cuda::backward_passes
