// Pg (F6) of each chunk of a reverse item, made where it is used: by a warpgroup of its own, up to two chunks ahead of the
// products. Both CTAs of a cluster make the whole tile: half of it each, exchanged, would put the other CTA into every chunk's
// path. Where chunk_pg makes the tiles of all chunks but the first ones (p.pg), the same warpgroup loads these.
#pragma once

#include "cuda/kernels/backward_passes/common.cuh"
#include "cuda/tile/pg.cuh"

namespace qla::cuda::backward_passes {

// Tiles from chunk i on. The first warp asks for them as soon as a place is free, the others answer for the chunk's other tiles:
// the products wait for one barrier a chunk either way.
__device__ __forceinline__ void load_pg(const Params& p, const PassItem& it, uint32_t base, int i, Ring<kKeyStages> ring,
                                        Ring<kRowStages> rows, int warp, int lane) {
  if (i >= it.chunks || lane != 0) return;
  if (p.pg_late && warp == 0) ptx::grid_dependency_wait();  // for chunk_pg
  const int64_t step = int64_t(p.num_v_heads) * kTileBytes;
  const uint8_t* from = p.pg + (int64_t(it.slot + it.chunks - 1 - i) * p.num_v_heads + it.v_head) * kTileBytes;
#pragma unroll 1
  for (; i < it.chunks; i++, from -= step) {
    const int tile = i % kPgTiles;
    const uint32_t full = pg_full_bar(base, tile);
    ptx::mbarrier_wait(pg_empty_bar(base, tile), i / kPgTiles % 2 ^ 1);
    if (warp == 0) {
      const uint32_t to = base + kPgAt + tile * kTileSmemBytes;
      ptx::mbarrier_arrive_expect(full, kTileBytes);
#pragma unroll
      for (int panel = 0; panel < 4; panel++)
        ptx::bulk_load(to + 2560 * panel, from + panel_offset(panel), panel_bytes(panel), full);
    } else {
      ptx::mbarrier_wait(full_bar(base, ring.stage), ring.phase);
      ptx::mbarrier_wait(row_full_bar(base, rows.stage), rows.phase);
      ptx::mbarrier_arrive(full);
      ring.advance();
      rows.advance();
    }
  }
}

template <typename T>
__device__ __forceinline__ void pg_role(const Params& p, const PassItem& it, uint32_t base) {
  // a warp's number known to be the same in all its lanes: else descriptors go through ordinary registers
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, int(threadIdx.x / 32 % 4), 0);
  // the four 8 x 8 matrices of a 16 x 16 block for stmatrix: rows of 32 bytes, 32-byte swizzle
  const int to_row = 16 * warp + lane / 8 % 2 * 8 + lane % 8;
  const uint32_t to = base + kPgAt + 32 * to_row + ((lane / 16 ^ (to_row >> 2 & 1)) << 4);
  const int made = p.pg ? min(p.pg_made, it.chunks) : it.chunks;
  Ring<kKeyStages> ring;
  Ring<kRowStages> rows;
  for (int i = 0; i < made; i++) {
    const uint32_t st = base + ring.stage * kKeyStage, vec = st + kKeyVec;
    ptx::mbarrier_wait(full_bar(base, ring.stage), ring.phase);
    if (i == 0 && it.last_rows < kRows) ptx::mbarrier_wait(tail_bar(base), 0);  // rows past the end are zero now
    const uint64_t q = descriptor_k_major(st + kKeyQ), key = descriptor_k_major(st);
    float acc[32];
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int at = k / 4 * kPanel + k % 4 * 32;
      ptx::wgmma_ss<T, 0>(acc, advance(q, at), advance(key, at), k > 0);
    }
    ptx::wgmma_commit();
    float factor[32];  // what the products are multiplied by, made while they run
    const PgRows of_rows(vec, p.scale, warp, lane);
#pragma unroll
    for (int kb = 0; kb < 4; kb++) {
      if (kb > warp) break;  // blocks above the diagonal stay zero
      of_rows.block(factor + 8 * kb, vec, kb, lane);
    }
    const int tile = i % kPgTiles;
    ptx::mbarrier_wait(pg_empty_bar(base, tile), i / kPgTiles % 2 ^ 1);
    ptx::wgmma_wait();
#pragma unroll
    for (int kb = 0; kb < 4; kb++) {
      if (kb > warp) break;
      uint32_t x[4];
      pack_pg<T>(x, acc + 8 * kb, factor + 8 * kb, kb == warp, lane);
      ptx::stmatrix_x4(to + tile * kTileSmemBytes + 2048 * kb, x[0], x[1], x[2], x[3]);
    }
    ptx::proxy_fence();
    ptx::mbarrier_wait(row_full_bar(base, rows.stage), rows.phase);  // the products wait for one barrier a chunk
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(pg_full_bar(base, tile));
    ring.advance();
    rows.advance();
  }
  if (p.pg) load_pg(p, it, base, made, ring, rows, warp, lane);
}

}  // namespace qla::cuda::backward_passes
