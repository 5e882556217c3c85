// backward_passes - the state pass (F4)(F5)(F8)(F9) and the reverse pass (B1)-(B4) as two kinds of work items in one launch:
// neither needs the other.
//   grid: a cluster an item; uncut, first the reverse items, which take longer, then the state items; cut, what the list says.
//   The CTAs of a cluster are the two halves of V of one value head. What they share (K, Q, Abar, gate vectors) each loads a half
//   of, for both, by multicast.
//
// Roles      warps  regs  owns                        per chunk
//   product  0-3    240   S^T or dS^T, 64 x 128 fp32  state_item.cuh, reverse_item.cuh
//   pg       4-7    104   -                           reverse items: pg_role.cuh
//   load     8      56    -                           lane 0 issues all loads
//   store    9      56    -                           lane 0 issues all stores; rows of a tail chunk by all lanes
//
// Edges           from -> to                       count          guards
//   full[4|5]     load of both CTAs -> product,pg  1 + tx         a stage: K V Abar vectors (state), K Q vectors (reverse)
//   empty         product of both CTAs -> load     2 x 4 warps    the same: a stage is filled in both CTAs at once
//   row full[3]   load of both CTAs -> product     1 + tx         dO, Abar of a reverse item
//   row empty     product of both CTAs -> load     2 x 4 warps    the same
//   pg full[2]    pg of either CTA -> product      4 warps (+ tx) Pg; of every second chunk the other CTA's, sent
//   pg empty      product of both CTAs -> pg       2 x 4 warps    Pg
//   out full      product -> store                 4 warps        a snapshot; rows of Delta or dR. The store warp fences
//   out empty     store -> product                 1              the same
//   tail          product -> pg                    1              rows past the end zeroed (reverse)
//   named 1       product                          128            the same, among the products
//   named 2       pg                               128            a tile to be sent is written
//
// SMEM (KiB)      state item                             reverse item
//   stages        5 x 33: K 16, V half 8, Abar 8, vec 1  4 x 34: K 16, Q 16, vec 2; 3 x 16: dO half 8, Abar 8
//   Pg                                                   2 x 8
//   outputs       2 x S half 16, 2 x Delta half 8        dS+ half 16, dR half 8
//   total         213                                    224 of 227
// Abar: compact panels under zeros that are written once (formats.hpp); Pg likewise. K and Q run a chunk ahead of dO, since Pg of
// a chunk has to be there before the chunk begins. One buffer of each output is enough where it leaves as soon as it is written.
//
// Tail: K, Q, V, dO rows past the end are zeroed in shared memory; dV rows leave one by one.
#pragma once

#include "cuda/kernels/backward_passes/pg_role.cuh"
#include "cuda/kernels/backward_passes/reverse_item.cuh"
#include "cuda/kernels/backward_passes/state_item.cuh"

namespace qla::cuda::backward_passes {

template <typename T>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    backward_passes_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = ptx::shared_address(smem);
  const int cluster = blockIdx.x / kCluster, rank = int(ptx::cluster_rank());
  bool reverse = p.kinds == kBoth && cluster < p.num_items;
  PassItem it;
  if (p.cut_items) {  // the kind of item is known only when it is there
    ptx::grid_dependency_launch();
    ptx::grid_dependency_wait();
    if (cluster >= *p.num_cut_items) return;  // both CTAs of the cluster
    it = p.cut_items[cluster];
    reverse = it.reverse;
  }
  if (threadIdx.x == 0) {
    constexpr int kWarps = kProductThreads / 32;
    for (int s = 0; s < kMostStages; s++) {
      ptx::mbarrier_init(full_bar(base, s), 1);
      ptx::mbarrier_init(empty_bar(base, s), kCluster * kWarps);
    }
    for (int s = 0; s < kRowStages; s++) {
      ptx::mbarrier_init(row_full_bar(base, s), 1);
      ptx::mbarrier_init(row_empty_bar(base, s), kCluster * kWarps);
    }
    for (int s = 0; s < kPgTiles; s++) {
      ptx::mbarrier_init(pg_full_bar(base, s), kPgThreads / 32);
      ptx::mbarrier_init(pg_empty_bar(base, s), kCluster * kWarps);
    }
    for (int which : {kSnapshotBars, kOutRowBars})
      for (int b = 0; b < 2; b++) {
        ptx::mbarrier_init(bar_at(base, which + b), kWarps);
        ptx::mbarrier_init(bar_at(base, which + 2 + b), 1);
      }
    ptx::mbarrier_init(tail_bar(base), 1);
    ptx::mbarrier_init_fence();
  }
  // the upper blocks of Abar and Pg stay zero
  auto zero = [&](uint32_t at, int tiles, int stride) {
    for (int s = 0; s < tiles; s++)
      for (int i = threadIdx.x; i < kTileSmemBytes / 16; i += kThreads) ptx::sts4u(base + at + s * stride + 16 * i, 0, 0, 0, 0);
  };
  if (reverse) {
    zero(kRowAt + kRowA, kRowStages, kRowStage);
    zero(kPgAt, kPgTiles, kTileSmemBytes);
  } else {
    zero(kStateA, kStateStages, kStateStage);
  }
  ptx::proxy_fence();
  __syncthreads();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (!p.cut_items) {
    ptx::grid_dependency_launch();
    ptx::grid_dependency_wait();  // from here on what earlier kernels wrote is read
    it = make_item(p.items[p.kinds == kBoth && !reverse ? cluster - p.num_items : cluster], p, reverse);
  }
  const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0), lane = threadIdx.x % 32;  // the same in all lanes, known to be
  if (warp < 4) {
    ptx::setmaxnreg_inc<kRegsProduct>();
    if (it.chunks < 0) {
      // nothing of this sequence in the range
    } else if (reverse) {
      reverse_item<T>(p, it, base, rank);
    } else {
      state_item<T>(p, it, base, rank);
    }
  } else if (warp < 8) {
    ptx::setmaxnreg_dec<kRegsPg>();
    if (reverse) pg_role<T>(p, it, base, rank);
  } else {
    ptx::setmaxnreg_dec<kRegsAux>();
    if (it.chunks < 0) {
    } else if (warp == 8) {
      if (lane == 0) {
        if (reverse)
          load_reverse_item<T>(p, maps, it, base, rank);
        else
          load_state_item<T>(p, maps, it, base, rank);
      }
    } else if (warp == 9) {
      if (reverse)
        store_reverse_item(p, maps, it, base, rank, lane);
      else if (lane == 0)
        store_state_item(p, it, base, rank);
    }
  }
  __syncwarp();
  ptx::cluster_arrive();  // nobody leaves while the other may still write to its shared memory or barriers
  ptx::cluster_wait();
}

}  // namespace qla::cuda::backward_passes
