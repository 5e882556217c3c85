// gdn_forward - outputs and end state of one segment of one value head (all of V or half of it). Computes (F4)-(F9); Abar and Pg
// come from chunk_intra.
//   grid: persistent; CTA b takes work item b, then whatever the queue counter gives. Not here: gates, the inverse, where
//   segments are cut.
//
// clang-format off
// Roles      warps        regs  owns                          per chunk
//   load     0            56    the item queue                lane 0 issues tensor loads (K, Q, V) and bulk loads (tiles, gate vectors)
//   store    1, 2         56    -                             tensor store of one state warpgroup's O each (a tail row by row); hands the stage back
//   helper   3            56    rows past a sequence's end    zeroes them in a last chunk's tiles; o of skipped sequences and past the last one
//   state    4-7, 8-11    224   S^T rows (64 x 128 fp32 each) KS, QS; R (F4); Delta (F5); E (F8); S (F9); O (F7)
//   With V-split there is one state warpgroup (with output: role_state_lone.cuh), one store warp and no setmaxnreg; without output
//   no store warp.
//
// Edges            from -> to             count               guards
//   full[stages]   load or helper -> state  1 (+ tx)          the stage's tiles
//   raw[stages]    load -> helper         1 + tx              tiles of a last chunk with rows to zero; the helper then completes full
//   out[2][stages] state -> store         4 (warps)           O in V's place; every read of the stage by that warpgroup is done
//   empty[stages]  store -> load          state warpgroups    the stage; its O has been read out (without output: state -> load, every warp)
//   item_full[2]   load -> all others     1                   a work item's slot
//   item_empty[2]  all others -> load     readers             the same
//   turn[2]        state -> state         256 (named)         the tensor cores from the update of S to the next K S: the two take turns
// Written by ordinary stores and read by wgmma or a tensor store: proxy fence in every writing thread before its arrive.
//
// SMEM, a stage    KiB         KiB of the variant without output
//   K, Q           32          16   K rows then Q rows in each of two 64-column panels
//   V              8 or 16     8 or 16   O takes its place
//   Abar, Pg       16          8    panels laid under standing zeros (formats.hpp)
//   vectors        1           1    k_scale, q_scale, e_scale, gamma
//   x 3 stages: 195 or 171      x 5 or 6: 205 or 198
// clang-format on
//
// With p.rehearse the first item is a rehearsal (smem.cuh): one chunk that no load is issued for, in stage 0.
// griddepcontrol.wait is the load role's and the helper's; with p.merging the state role's, before it reads a merged state.
//
// Tail: rows past the end in a sequence's last chunk belong to others or are padding (NaN perhaps): zeroed in K, Q, V before use;
// tiles and vectors come zeroed from chunk_intra. Its O rows are stored one by one.
#pragma once

#include "cuda/kernels/forward/role_load.cuh"
#include "cuda/kernels/forward/role_state_lone.cuh"

namespace qla::cuda {

template <class Cfg, class Mma>
__global__ void __launch_bounds__(Cfg::kThreads, 1) gdn_forward(const __grid_constant__ ForwardArgs a) {
  extern __shared__ uint8_t smem[];
  ForwardSmem<Cfg> sm;
  sm.base = (ptx::shared_address(smem) + 1023) & ~1023u;
  sm.generic = smem + (sm.base - ptx::shared_address(smem));
  // Whether anything is cut: what cut_items says at once, which no kernel changes while this one looks. Beside merges all but
  // these is there when this kernel begins; or nothing is cut. Asked for early.
  const int32_t cut = Cfg::kOutput && a.p.any_cut ? ptx::load_relaxed(a.p.any_cut) : 1;
  bool leaves = Cfg::kOutput && a.p.uncut && cut != 0;
  if (a.p.asks) {
    const int32_t items = ptx::load_relaxed(&a.p.plan->num_items);  // both on their way at once
    const int64_t end_token = ptx::load_relaxed(&a.p.plan->end_token);
    leaves |= items == 0 && end_token == a.p.tokens;
  }
  if (leaves) {
    ptx::grid_dependency_launch();
    if (blockIdx.x == 0) ptx::grid_dependency_wait();  // it ends when all before it has ended
    return;
  }
  if (threadIdx.x == 0) {
    sm.tiles().init(1, Cfg::kEmptyCount);
    sm.items().init(1, Cfg::kItemReaders);
    for (int s = 0; s < Cfg::kStages; s++) {
      ptx::mbarrier_init(sm.raw(s), 1);
      for (int part = 0; part < Cfg::kParts; part++) ptx::mbarrier_init(sm.out_full(part, s), 4);
    }
    ptx::mbarrier_init_fence();
    if (a.p.rehearse) {
      rehearsal_item(sm.slot(0));
      ptx::mbarrier_arrive(sm.items().full(0));
      ptx::mbarrier_arrive(sm.tiles().full(0));
    }
    if (a.p.batch * a.p.tokens > 0) {
      ptx::tensor_prefetch_map(&a.k);
      ptx::tensor_prefetch_map(&a.v);
      if (Cfg::kOutput) {
        ptx::tensor_prefetch_map(&a.q);
        ptx::tensor_prefetch_map(&a.o);
      }
    }
  }
  // zeros that stay: what Abar's and Pg's panels leave free in their tiles
  constexpr int kPieces = Cfg::kTiles * kTileSmemBytes / 16;
  for (int i = threadIdx.x; i < Cfg::kStages * kPieces; i += Cfg::kThreads)
    ptx::sts4u(sm.stage(i / kPieces) + Cfg::kOffA + i % kPieces * 16, 0, 0, 0, 0);
  ptx::proxy_fence();
  __syncthreads();
  if constexpr (Cfg::kOutput) ptx::grid_dependency_launch();  // without output when it has waited: the merges read lists at once
  const int group = threadIdx.x / 128;
  if (group == 0) {
    if constexpr (Cfg::kShareRegs) ptx::setmaxnreg_dec<Cfg::kRegsLoad>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0)
      load_role(a, sm, !Cfg::kOutput || !a.p.merging || cut == 0);
    else if (Cfg::kOutput && warp >= 1 && warp <= Cfg::kParts)
      store_role(a, sm, warp - 1, lane);
    else if (warp == kHelperWarp)
      helper_role<Cfg>(a, sm, lane, !a.p.merging || cut == 0);
  } else {
    if constexpr (Cfg::kShareRegs) ptx::setmaxnreg_inc<Cfg::kRegsState>();
    if constexpr (Cfg::kParts == 1 && Cfg::kOutput)
      lone_state_role<Cfg, Mma>(a, sm);
    else
      state_role<Cfg, Mma>(a, sm, group - 1);
  }
}

}  // namespace qla::cuda
