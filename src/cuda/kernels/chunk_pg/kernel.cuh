// chunk_pg<T> - Pg (F6) of every chunk and value head as compact tiles (formats.hpp), ahead of the reverse pass of backward,
// which else makes each beside its chain of products (pg_role.cuh, decision 0076). From Q, K and part B of the vector records.
//   grid: a CTA a multiprocessor, two workers (warpgroups) each; an item = (chunk slot, up to four value heads of one q/k head),
//   worker w of W has items w, w + W, ..: Q K^T once an item. In pairs of CTAs where the next kernel, whose clusters are pairs,
//   runs beside it.
//
// Barriers, of a worker    count    guards
//   full[2]                1 + tx   a stage: K, Q, vectors; the rows of its chunk (0: nothing to do)
//   named 1 + worker       128      a tile is written, the one before has left; at an item's end its stage has been read
//
// Tail: K, Q rows past the end are zeroed in shared memory.
#pragma once

#include <cuda.h>

#include "cuda/kernels/chunk_pg/config.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/pg.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda::chunk_pg {

struct Item {
  int slot, k_head, v_head, heads;
};
__device__ __forceinline__ Item item_of(const Args& a, int index) {
  Item it;
  const int per_slot = a.num_k_heads * a.parts;
  it.slot = index / per_slot;
  const int rest = index - it.slot * per_slot;
  it.k_head = rest / a.parts;
  const int first = (rest - it.k_head * a.parts) * a.per;
  it.v_head = it.k_head * a.group + first;
  it.heads = min(a.per, a.group - first);
  return it;
}

// the chunk's record; rows = 0 where its reader makes the tile, or there is none
__device__ __forceinline__ int4 record_of(const Args& a, int slot) {
  if (slot >= a.slots) return int4{};
  const int4* table = reinterpret_cast<const int4*>(a.chunk_table);
  int4 r = table[slot];
  if (a.made == 0) return r;
  int4 later{};  // so many chunks further on; a sequence's slots are consecutive
  if (slot + a.made < a.slots) later = table[slot + a.made];
  if (later.z == 0 || later.w != r.w) r.z = 0;
  return r;
}

// one thread
__device__ __forceinline__ void load(const Args& a, const CUtensorMap& map_k, const CUtensorMap& map_q, const Item& it,
                                     int4 record, uint32_t st, uint32_t bar) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(bar + 8), "r"(record.z) : "memory");
  if (record.z == 0) return ptx::mbarrier_arrive(bar);
  const int64_t token = int64_t(uint32_t(record.x)) | int64_t(record.y) << 32;
  const int batch = int(token / a.rows_per_batch), row = int(token % a.rows_per_batch);
  ptx::mbarrier_arrive_expect(bar, 4 * kPanel + it.heads * kVecPart);
#pragma unroll
  for (int panel = 0; panel < 2; panel++) {
    ptx::tensor_load_4d(st + panel * kPanel, &map_k, 64 * panel, it.k_head, row, batch, bar);
    ptx::tensor_load_4d(st + kStageQ + panel * kPanel, &map_q, 64 * panel, it.k_head, row, batch, bar);
  }
  const float* vec = a.vec + (int64_t(it.slot) * a.num_v_heads + it.v_head) * kVecFloats + kVecG;
  for (int head = 0; head < it.heads; head++)
    ptx::bulk_load(st + kStageVec + head * kVecPart, vec + head * kVecFloats, kVecPart, bar);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    chunk_pg(const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_q,
             const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t s_all[];
  const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0), worker = warp / 4, wg_warp = warp % 4, lane = threadIdx.x % 32,
            tid = threadIdx.x % kWorkerThreads;
  const uint32_t all = ptx::shared_address(s_all), smem = all + worker * kWorkerBytes, bars = all + kBars + worker * 32;
  if (tid == 0) {
    for (int s = 0; s < 2; s++) ptx::mbarrier_init(bars + 16 * s, 1);
    ptx::mbarrier_init_fence();
    ptx::tensor_prefetch_map(&map_k);
    ptx::tensor_prefetch_map(&map_q);
  }
  if (!a.late) ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  if (a.late) ptx::grid_dependency_launch();
  ptx::named_sync(1 + worker, kWorkerThreads);

  // Rows of 32 bytes of a block for stmatrix, 32-byte swizzle; panel kb of the compact tile begins with row 16 kb.
  const int to_row = 16 * wg_warp + lane / 8 % 2 * 8 + lane % 8;
  const uint32_t to = smem + kTileAt + 32 * to_row + ((lane / 16 ^ (to_row >> 2 & 1)) << 4);
  const int items = a.slots * a.num_k_heads * a.parts, step = int(gridDim.x) * kWorkers;
  int index = worker * int(gridDim.x) + int(blockIdx.x), stage = 0, tile = 0;
  uint32_t phase = 0;
  int4 ahead{};  // record of the item behind the next one that is asked for; of thread 0
  auto record_at = [&](int i) { return i < items ? record_of(a, i / (a.num_k_heads * a.parts)) : int4{}; };
  if (tid == 0 && index < items) {
    load(a, map_k, map_q, item_of(a, index), record_at(index), smem, bars);
    ahead = record_at(index + step);
  }
  for (; index < items; index += step) {
    const uint32_t st = smem + stage * kStageBytes, bar = bars + 16 * stage;
    if (tid == 0 && index + step < items) {
      load(a, map_k, map_q, item_of(a, index + step), ahead, smem + (stage ^ 1) * kStageBytes, bars + 16 * (stage ^ 1));
      ahead = record_at(index + 2 * step);
    }
    ptx::mbarrier_wait(bar, phase);
    int rows;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(rows) : "r"(bar + 8) : "memory");
    if (rows == 0) {
      ptx::named_sync(1 + worker, kWorkerThreads);  // everyone knows
    } else {
      const Item it = item_of(a, index);
      if (rows < 64) {
        for (int i = rows * 8 + tid; i < 64 * 8; i += kWorkerThreads)
          for (int panel = 0; panel < 4; panel++) ptx::sts4u(st + panel * kPanel + i * 16, 0, 0, 0, 0);
        ptx::proxy_fence();
        ptx::named_sync(1 + worker, kWorkerThreads);
      }
      const uint64_t q = descriptor_k_major(st + kStageQ), key = descriptor_k_major(st);
      float acc[32];
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const int at = k / 4 * kPanel + k % 4 * 32;
        ptx::wgmma_ss<T, 0>(acc, advance(q, at), advance(key, at), k > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait();
      int64_t out = (int64_t(it.slot) * a.num_v_heads + it.v_head) * kTileBytes;
      for (int head = 0; head < it.heads; head++) {
        const uint32_t vec = st + kStageVec + head * kVecPart - kVecG * 4;
        const PgRows of_rows(vec, a.scale, wg_warp, lane);
#pragma unroll
        for (int kb = 0; kb < 4; kb++) {
          if (kb > wg_warp) break;
          float factor[8];
          uint32_t x[4];
          of_rows.block(factor, vec, kb, lane);
          pack_pg<T>(x, acc + 8 * kb, factor, kb == wg_warp, lane);
          ptx::stmatrix_x4(to + tile * kTileBytes + panel_offset(kb) - 512 * kb, x[0], x[1], x[2], x[3]);
        }
        ptx::proxy_fence();
        if (tid == 0) ptx::bulk_wait_read();  // the tile before: its place is the next one's
        ptx::named_sync(1 + worker, kWorkerThreads);
        if (tid == 0) {
          ptx::bulk_store(a.pg + out, smem + kTileAt + tile * kTileBytes, kTileBytes);
          ptx::bulk_commit();
        }
        out += kTileBytes;
        tile ^= 1;
      }
    }
    stage ^= 1;
    if (stage == 0) phase ^= 1;
  }
  if (tid == 0) ptx::bulk_wait();
}

}  // namespace qla::cuda::chunk_pg
