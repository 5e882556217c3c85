// The loop of cp_merge: a CTA walks a chain of merged boundaries with 32 value rows of S^T, which no other rows meet.
//   (C1)  S^T(j + 1)[v][k] = sum_i S^T(j)[v][i] B[i][k] + S_ext^T[v][k],  B = M^T
//
// Products by wgmma of numbers split in two: x = hi + lo, bf16 each, 16 bits of x. A warpgroup has 64 rows and we 32: row g of a
// warp's 16 is hi, row g + 8 lo of the same value row, so that a lane has both, their products with B add up in the lane, and the
// sum, split again, is the next step's left operand inside the thread: the state never leaves its registers. B comes split from
// the pre-pass, as the products read it (tile/transition.cuh); its halves come one behind the other: all four products are summed
// in fp32. The relative error is 2^-18 an operand; what is merged has been through bf16 products (2^-9).
//
// A lane has, of its row, the columns 32 m + 8 (lane % 4) .. + 7 for m = 0 .. 3. Columns 0-63 (m = 0, 1) are summed, split and
// stored under the products of the others.
//
// Roles       warps  owns
//   chain     0-3    the state
//   copy      4      B and S_ext, by bulk copies steps ahead
//
// Edges                from -> to       count         guards
//   full[stages]       copy -> chain    1 + 64 KiB    a B
//   empty[stages]      chain -> copy    4 (warps)     the same
//   ext full, empty    the same         1 + 16 KiB, 4 S_ext's 32 rows
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/formats.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sync/ring.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/transition.cuh"

namespace qla::cuda::cp_merge {

inline constexpr int kRows = 32, kItems = 128 / kRows;  // a work item = (chain, rows)
inline constexpr int kChainWarps = 4, kThreads = 32 * (kChainWarps + 1);
inline constexpr int kStages = 3, kStageBytes = transition::kBytes;
inline constexpr int kExtStages = 2, kExtBytes = kRows * 512;
inline constexpr int kOffExt = kStages * kStageBytes, kOffEdge = kOffExt + kExtStages * kExtBytes,
                     kOffExtEdge = kOffEdge + Edge<kStages>::kBytes,
                     kSharedBytes = kOffExtEdge + Edge<kExtStages>::kBytes + 1024;  // 1,024: alignment
static_assert(kSharedBytes <= 232448);

struct Chain {
  float* states;               // entry 0: its start state; later ones: S_ext, which the start states replace
  const uint8_t* moves;        // B of entry 0, if it had one
  int32_t count;               // entries
  const uint8_t* transitions;  // [entry]: this one has a B, else it is a start state already
};

struct Stages {
  uint32_t base;
  __device__ __forceinline__ uint32_t stage(int s) const { return base + s * kStageBytes; }
  __device__ __forceinline__ uint32_t ext(int s) const { return base + kOffExt + s * kExtBytes; }
  __device__ __forceinline__ Edge<kStages> edge() const { return {base + kOffEdge}; }
  __device__ __forceinline__ Edge<kExtStages> ext_edge() const { return {base + kOffExtEdge}; }
};

// Which of entries first .. first + 31 have a B; never the first one
__device__ __forceinline__ uint32_t moves_from(const Chain& chain, int first, int lane) {
  const int n = first + lane;
  return __ballot_sync(~0u, n > 0 && n < chain.count && __ldcg(chain.transitions + n));
}

// The steps of this CTA's items, in order.
template <class Chains>
struct Steps {
  const Chains& chains;
  int items, item, first = 0, entry = 0;
  uint32_t left = 0;
  Chain chain{};
  __device__ __forceinline__ Steps(const Chains& of, int n) : chains(of), items(n), item(int(blockIdx.x) - int(gridDim.x)) {}
  // to the next one, if there is one
  __device__ __forceinline__ bool next(int lane) {
    while (left == 0) {
      first += 32;
      if (first >= chain.count) {
        item += int(gridDim.x);
        if (item >= items) return false;
        chain = chains(item / kItems);
        first = 0;
      }
      left = moves_from(chain, first, lane);
    }
    entry = first + __ffs(int(left)) - 1;
    left &= left - 1;
    return true;
  }
};

template <class Chains, class Ready>
__device__ __forceinline__ void copy_role(const Chains& chains, int items, const Ready& ready, Stages s, int lane) {
  Steps<Chains> steps(chains, items);
  const auto edge = s.edge();
  const auto ext_edge = s.ext_edge();
  Ring<kStages> ring;
  Ring<kExtStages> ext_ring;
  bool more = steps.next(lane);
  ready();
  for (; more; more = steps.next(lane), ring.advance(), ext_ring.advance()) {
    if (lane == 0) {
      constexpr int kPieces = 4, kPieceBytes = kStageBytes / kPieces;
      const uint8_t* const from = steps.chain.moves + int64_t(steps.entry) * kStageBytes;
      edge.producer_wait(ring);
      ptx::mbarrier_arrive_expect(edge.full(ring.stage), kStageBytes);
#pragma unroll
      for (int n = 0; n < kPieces; n++)
        ptx::bulk_load(s.stage(ring.stage) + n * kPieceBytes, from + n * kPieceBytes, kPieceBytes, edge.full(ring.stage));
      ext_edge.producer_wait(ext_ring);
      ptx::mbarrier_arrive_expect(ext_edge.full(ext_ring.stage), kExtBytes);
      ptx::bulk_load(s.ext(ext_ring.stage),
                     steps.chain.states + int64_t(steps.entry) * kStateFloats + steps.item % kItems * kRows * 128, kExtBytes,
                     ext_edge.full(ext_ring.stage));
    }
    __syncwarp();
  }
}

__device__ __forceinline__ uint32_t same_in_all_lanes(uint32_t x) { return __reduce_or_sync(~0u, x); }

// This lane's eight columns of each 32 of a row
struct Columns {
  float4 x[4][2];
};
__device__ __forceinline__ Columns load_columns(const float* row) {
  Columns c;
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) c.x[m][i] = __ldcg(reinterpret_cast<const float4*>(row + 32 * m + 4 * i));
  return c;
}
// one half of them as the left operand of the products with B's rows of that half
__device__ __forceinline__ void split_half(uint32_t (&a)[16], const float4 (&x0)[2], const float4 (&x1)[2]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 four = i < 2 ? x0[i] : x1[i - 2];
    transition::split(a[4 * i], a[4 * i + 1], four.x, four.y);
    transition::split(a[4 * i + 2], a[4 * i + 3], four.z, four.w);
  }
  ptx::pin(a);
}

// d (+)= the left operand of one half of a state's columns, B's rows of that half and columns of another
template <int Rows, int Columns>
__device__ __forceinline__ void products(float (&d)[32], const uint32_t (&a)[16], uint32_t b) {
#pragma unroll
  for (int w = 0; w < 8; w++)
    ptx::wgmma_rs<__nv_bfloat16, 1>(
        d, a + w % 4 * 4,
        descriptor_mn_major(b + w / 4 * transition::kLowBytes + Columns * transition::kPanelBytes + (4 * Rows + w % 4) * 2048,
                            transition::kPanelBytes),
        Rows > 0 || w > 0);
  ptx::wgmma_commit();
}

// Entries first .. last, all but the first with a B. rows: a lane's row of entry 0, from its columns on; at: the same in an
// S_ext's stage. In order:
//   columns 0-63 of rows 64-127, columns 64-127 of rows 0-63, of rows 64-127; the next step's columns 0-63 of rows 0-63
// so that products are in flight while the sums of either half become the next left operand. Behind the last step these are of
// whatever lies in the next stage, for nothing.
__device__ __forceinline__ void walk_run(float* rows, uint32_t at, int first, int last, Stages s, Ring<kStages>& ring,
                                         Ring<kExtStages>& ext_ring, int lane) {
  const auto ext_edge = s.ext_edge();
  const auto edge = s.edge();
  uint32_t a[2][16];
  float d[2][32];
  float* row = rows + int64_t(first) * kStateFloats;
  {
    const Columns start = load_columns(row);
    split_half(a[0], start.x[0], start.x[1]);
    split_half(a[1], start.x[2], start.x[3]);
  }
  edge.consumer_wait(ring);
  ptx::wgmma_fence();
  products<0, 0>(d[0], a[0], same_in_all_lanes(s.stage(ring.stage)));
#pragma unroll 1
  for (int n = first; n < last; n++) {
    row += kStateFloats;
    const auto finish = [&](int half) {
      float4 x[2][2];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int m = i / 2, c = i % 2;
        const float* const sum = d[half] + 8 * i;
        const float4 e = ptx::lds4(s.ext(ext_ring.stage) + at + 256 * half + 128 * m + 16 * c);
        x[m][c] = make_float4(sum[0] + sum[2] + e.x, sum[1] + sum[3] + e.y, sum[4] + sum[6] + e.z, sum[5] + sum[7] + e.w);
        *reinterpret_cast<float4*>(row + 64 * half + 32 * m + 4 * c) = x[m][c];
      }
      split_half(a[half], x[0], x[1]);
    };
    const int stage = ring.stage;
    const uint32_t b = same_in_all_lanes(s.stage(stage));
    ptx::wgmma_wait<0>();  // without it ptxas serialises all products (C7514): it does not follow d[0] around the loop
    ptx::wgmma_fence();
    products<1, 0>(d[0], a[1], b);
    products<0, 1>(d[1], a[0], b);
    products<1, 1>(d[1], a[1], b);
    ext_edge.consumer_wait(ext_ring);
    ptx::wgmma_wait<1>();
    finish(0);
    ring.advance();
    if (n + 1 < last) edge.consumer_wait(ring);
    const uint32_t next = same_in_all_lanes(s.stage(ring.stage));
    ptx::wgmma_fence();
    products<0, 0>(d[0], a[0], next);
    ptx::wgmma_wait<1>();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(edge.empty(stage));
    finish(1);
    __syncwarp();
    if (lane == 0) ext_edge.release(ext_ring);
    ext_ring.advance();
  }
  ptx::wgmma_wait<0>();
}

template <class Chains, class Ready>
__device__ __forceinline__ void chain_role(const Chains& chains, int items, const Ready& ready, Stages s, int warp, int lane) {
  Ring<kStages> ring;
  Ring<kExtStages> ext_ring;
  Chain chain{};
  uint32_t here = 0;
  const auto take = [&](int item) {
    if (item >= items) return;
    chain = chains(item / kItems);
    here = moves_from(chain, 0, lane);
  };
  const int row = warp * 8 + lane / 4;
  take(blockIdx.x);
  ready();
  for (int item = blockIdx.x; item < items; take(item += gridDim.x)) {
    float* const rows = chain.states + (item % kItems * kRows + row) * 128 + lane % 4 * 8;
    for (int first = 0; first < chain.count;) {
      int end = first + 1;
      for (; end < chain.count; end++) {
        if (end % 32 == 0) here = moves_from(chain, end, lane);
        if (!(here >> end % 32 & 1)) break;
      }
      if (end > first + 1) walk_run(rows, uint32_t(row * 512 + lane % 4 * 32), first, end - 1, s, ring, ext_ring, lane);
      first = end;
    }
  }
}

// By all threads of a CTA. chains(n): the n-th chain; the lists that it reads are there. ready(): then states and moves are, too.
template <class Chains, class Ready>
__device__ __forceinline__ void walk(const Chains& chains, int items, const Ready& ready, Stages s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp < kChainWarps)
    chain_role(chains, items, ready, s, warp, lane);
  else
    copy_role(chains, items, ready, s, lane);
}

}  // namespace qla::cuda::cp_merge
