// What both kinds of items of backward_passes share: loads by the producer, start and end states, publication of a chunk's
// outputs.
#pragma once

#include <cuda.h>

#include "cuda/kernels/backward_passes/config.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sync/ring.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/pack.cuh"
#include "cuda/tile/swizzle.cuh"
#include "qla/qla.h"

namespace qla::cuda::backward_passes {

struct Maps {
  CUtensorMap k, q, v, d_o, dv;
};

// Barriers, in the order of kernel.cuh's table of edges. Each ring: full[0], .., empty[0], ..
inline constexpr int kStageBars = 0;                           // state item: its stages; reverse item: K, Q, vectors
inline constexpr int kMostStages = 5;                          // of the two
inline constexpr int kRowBars = kStageBars + 2 * kMostStages;  // dO, Abar
inline constexpr int kPgBars = kRowBars + 2 * kRowStages;      // Pg
inline constexpr int kSnapshotBars = kPgBars + 2 * kPgTiles, kOutRowBars = kSnapshotBars + 4;  // at most two buffers each
inline constexpr int kTailBar = kOutRowBars + 4, kNumBars = kTailBar + 1;
static_assert(kBars + 8 * kNumBars <= kSmemBytes && kKeyStages <= kMostStages && kStateStages <= kMostStages, "barriers");

__device__ __forceinline__ uint32_t bar_at(uint32_t base, int which) { return base + kBars + 8 * which; }
__device__ __forceinline__ uint32_t full_bar(uint32_t base, int stage) { return bar_at(base, kStageBars + stage); }
__device__ __forceinline__ uint32_t empty_bar(uint32_t base, int stage) { return bar_at(base, kStageBars + kMostStages + stage); }
__device__ __forceinline__ uint32_t row_full_bar(uint32_t base, int stage) { return bar_at(base, kRowBars + stage); }
__device__ __forceinline__ uint32_t row_empty_bar(uint32_t base, int stage) {
  return bar_at(base, kRowBars + kRowStages + stage);
}
__device__ __forceinline__ uint32_t pg_full_bar(uint32_t base, int tile) { return bar_at(base, kPgBars + tile); }
__device__ __forceinline__ uint32_t pg_empty_bar(uint32_t base, int tile) { return bar_at(base, kPgBars + kPgTiles + tile); }
// the i-th snapshot (which = kSnapshotBars) or rows (kOutRowBars) that are stored, in one of Buffers buffers
template <int Buffers>
struct OutEdge {
  uint32_t full, empty, parity;
  __device__ __forceinline__ OutEdge(uint32_t base, int which, int i)
      : full(bar_at(base, which + uint32_t(i) % Buffers)),
        empty(bar_at(base, which + 2 + uint32_t(i) % Buffers)),
        parity(uint32_t(i) / Buffers % 2) {}
  __device__ __forceinline__ void wait_empty() const { ptx::mbarrier_wait(empty, parity ^ 1); }
  __device__ __forceinline__ void wait_full() const {
    ptx::mbarrier_wait(full, parity);
    ptx::proxy_fence();
  }
  // A product warp's: what it wrote may leave. The proxy fence is the reader's, between its wait and its bulk store: a fence is a
  // membar, and there its latency is in nobody's way.
  __device__ __forceinline__ void publish(int lane) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(full);
  }
};
// The store warp, one thread: the snapshot of the i-th stored chunk leaves, and the rows of the one before have been read.
template <class Out>
__device__ __forceinline__ void store_snapshot(uint8_t* to, int64_t at, int part, uint32_t base, uint32_t out, int i) {
  const OutEdge<Out::kSnapshots> snapshot(base, kSnapshotBars, i);
  const OutEdge<Out::kRows> last_rows(base, kOutRowBars, i + Out::kRows - 1);
  snapshot.wait_full();
  ptx::bulk_store(to + at * kSnapshotBytes + part * kSnapshotHalf, out + i % Out::kSnapshots * kSnapshotHalf, kSnapshotHalf);
  ptx::bulk_commit();
  ptx::bulk_wait_read<1>();
  if (i) ptx::mbarrier_arrive(last_rows.empty);
}
// .. and its rows, which the caller has sent; the snapshot has been read.
template <class Out>
__device__ __forceinline__ void sent_rows(uint32_t base, int i) {
  ptx::bulk_commit();
  ptx::bulk_wait_read<1>();
  ptx::mbarrier_arrive(OutEdge<Out::kSnapshots>(base, kSnapshotBars, i).empty);
}
// rows past the end of a reverse item's highest chunk are zero: product -> pg, once
__device__ __forceinline__ uint32_t tail_bar(uint32_t base) { return bar_at(base, kTailBar); }

// A thread's place in its warpgroup and the shared-memory addresses of its fragments. Only their first offsets are worked out:
// the swizzle depends on the row modulo 8, which is the lane's, so that a step of 16 rows adds 2,048 bytes and one of 16 columns
// exchanges bits 5 and 6. Made anew in the chain of products, an address would be four instructions.
struct Lane {
  int lane, warp;
  uint32_t of_rows, of_snapshot;
  __device__ __forceinline__ Lane()
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        of_rows(transposed_lane(0, 0, 16 * warp, kRows, lane)),
        of_snapshot(panel_address(16 * warp + lane / 8 % 2 * 8 + lane % 8, lane / 16 * 8, kHalf)) {
    asm volatile("" : "+r"(of_rows), "+r"(of_snapshot));
  }
  // token-major 64 x 64 panel seen transposed: value rows of this warp, tokens 16 j .. 16 j + 15
  __device__ __forceinline__ uint32_t transposed(uint32_t panel, int j) const { return panel + of_rows + 2048 * j; }
  // snapshot half [64 v][128 features]: value rows of this warp, features 16 j ..; tile aligned to 1,024
  __device__ __forceinline__ uint32_t snapshot(uint32_t tile, int j) const {
    return (tile + of_snapshot ^ 32 * (j % 4)) + j / 4 * kPanel;
  }
};

// 64 rows of a token-major tile of `panels` 64-column panels: rows .. 63 become zero (memory past a sequence's end holds
// anything, and 0 x NaN is NaN)
__device__ __forceinline__ void zero_rows(uint32_t tile, int panels, int rows) {
  for (int i = rows * 8 + threadIdx.x; i < kRows * 8; i += kProductThreads)
    for (int panel = 0; panel < panels; panel++) ptx::sts4u(tile + panel * kPanel + i * 16, 0, 0, 0, 0);
}

__device__ __forceinline__ float load_state(const StateView& s, int64_t at) {
  switch (s.dtype) {
    case QLA_FLOAT64:
      return float(static_cast<const double*>(s.data)[at]);
    case QLA_FLOAT32:
      return static_cast<const float*>(s.data)[at];
    case QLA_BFLOAT16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(s.data)[at]);
    default:
      return __half2float(static_cast<const __half*>(s.data)[at]);
  }
}
__device__ __forceinline__ void store_state(const StateView& s, int64_t at, float x) {
  switch (s.dtype) {
    case QLA_FLOAT64:
      static_cast<double*>(s.data)[at] = x;
      break;
    case QLA_FLOAT32:
      static_cast<float*>(s.data)[at] = x;
      break;
    case QLA_BFLOAT16:
      static_cast<__nv_bfloat16*>(s.data)[at] = __float2bfloat16_rn(x);
      break;
    default:
      static_cast<__half*>(s.data)[at] = __float2half_rn(x);
  }
}
// S^T fragment element 4 n + 2 h + c: value column 64 part + 16 warp + lane / 4 + 8 h, feature 8 n + 2 (lane % 4) + c
__device__ __forceinline__ void read_caller(float (&s)[64], const StateView& view, int sequence, int head, int part,
                                            const Lane& l) {
  const int64_t base = sequence * view.stride_n + head * view.stride_h;
  const int v = kHalf * part + fragment_row(l.warp, l.lane), k = fragment_col(l.lane);
#pragma unroll
  for (int i = 0; i < 64; i++)
    s[i] = load_state(view, base + (v + i / 2 % 2 * 8) * view.stride_v + (k + i / 4 * 8 + i % 2) * view.stride_k);
}
__device__ __forceinline__ void write_caller(const float (&s)[64], const StateView& view, int sequence, int head, int part,
                                             const Lane& l, bool zero) {
  const int64_t base = sequence * view.stride_n + head * view.stride_h;
  const int v = kHalf * part + fragment_row(l.warp, l.lane), k = fragment_col(l.lane);
#pragma unroll
  for (int i = 0; i < 64; i++)
    store_state(view, base + (v + i / 2 % 2 * 8) * view.stride_v + (k + i / 4 * 8 + i % 2) * view.stride_k, zero ? 0.f : s[i]);
}
// this thread's first element of matrix `index`
__device__ __forceinline__ int64_t buffer_at(int index, int part, const Lane& l) {
  return (int64_t(index) * kDim + kHalf * part + fragment_row(l.warp, l.lane)) * kDim + fragment_col(l.lane);
}
__device__ __forceinline__ void read_buffer(float (&s)[64], const float* buffer, int64_t at) {
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const float2 x = *reinterpret_cast<const float2*>(buffer + at + i % 2 * 8 * kDim + i / 2 * 8);
    s[2 * i] = x.x;
    s[2 * i + 1] = x.y;
  }
}
__device__ __forceinline__ void write_buffer(const float (&s)[64], float* buffer, int64_t at) {
#pragma unroll
  for (int i = 0; i < 32; i++)
    *reinterpret_cast<float2*>(buffer + at + i % 2 * 8 * kDim + i / 2 * 8) = make_float2(s[2 * i], s[2 * i + 1]);
}
// matrix `index` with rows and columns exchanged; eight lanes fill a sector
__device__ __forceinline__ void write_transposed(const float (&s)[64], float* buffer, int index, int part, const Lane& l) {
  float* to = buffer + (int64_t(index) * kDim + fragment_col(l.lane)) * kDim + kHalf * part + fragment_row(l.warp, l.lane);
#pragma unroll
  for (int i = 0; i < 64; i++) to[(i / 4 * 8 + i % 2) * kDim + i / 2 % 2 * 8] = s[i];
}

// The product warps' side of the empty edges: lane r < 2 hands a stage back to the producer of CTA r, which loads a half of what
// both use, for both. Relaxed, and no fence: what it orders are reads whose results have been used (wgmma waited for, ldmatrix
// consumed). With release semantics the arrive is a membar, a tenth of a chunk's time.
struct Release {
  uint32_t bars;  // this lane's remote barriers
  __device__ __forceinline__ Release(uint32_t base, int lane) : bars(ptx::cluster_address(bar_at(base, 0), lane % kCluster)) {}
  __device__ __forceinline__ void operator()(int which, int lane) const {
    __syncwarp();
    ptx::jitter();
    if (lane < kCluster)
      asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(bars + 8 * which) : "memory");
  }
};

// The producer's view of one chunk.
struct Source {
  int batch, token, slot, head;
  __device__ __forceinline__ int64_t index(const Params& p) const { return int64_t(slot) * p.num_v_heads + head; }
};
// Abar: panels of the compact tile under standing zeros (formats.hpp); rank 0 sends panels 0 and 3, rank 1 panels 1 and 2,
// to both CTAs
__device__ __forceinline__ void load_tile(const Params& p, const Source& c, uint32_t dst, int rank, uint32_t bar) {
  const uint8_t* src = p.abar + c.index(p) * kTileBytes;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int panel = rank ? 1 + i : 3 * i;
    ptx::bulk_load_multicast(dst + 2560 * panel, src + panel_offset(panel), panel_bytes(panel), bar, 3);
  }
}
// half of K's or Q's tile and of the gate vectors, to both CTAs
__device__ __forceinline__ void load_keys(const Params& p, const Source& c, uint32_t dst, const CUtensorMap* map, int rank,
                                          uint32_t bar) {
  ptx::tensor_load_4d_multicast(dst + rank * kPanel, map, 64 * rank, c.head / (p.num_v_heads / p.num_k_heads), c.token, c.batch,
                                bar, 3);
}
__device__ __forceinline__ void load_vectors(const Params& p, const Source& c, uint32_t dst, int rank, uint32_t bar, int bytes) {
  ptx::bulk_load_multicast(dst + rank * (bytes / 2), p.vec + c.index(p) * kVecFloats + rank * (bytes / 8), bytes / 2, bar, 3);
}

}  // namespace qla::cuda::backward_passes
