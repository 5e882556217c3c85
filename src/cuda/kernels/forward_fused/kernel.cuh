// gdn_forward_fused - outputs and end state of one sequence and value head, the intra-chunk stage included. Computes (F2)-(F9),
// with the gate vectors of chunk_gates or, in a direct launch, of its own (direct.cuh). Norm: q and k by their norms. Save: Abar
// and the whole vector records are left for backward, as chunk_intra leaves them.
//   grid: persistent; CTA b takes work item b, then whatever the queue counter gives; direct: up to four, no queue. Not here:
//   snapshots, checkpoints, cut sequences, V-split: such calls run chunk_intra and gdn_forward.
//
// clang-format off
// Roles      warps             regs  owns                          per chunk
//   load     0                 24    the item queue                lane 0 issues tensor loads (K, Q, V) and one bulk load (gate vectors)
//   store    1, 2              24    -                             tensor store of one state warpgroup's O each (a tail row by row); hands V's stage back; Save: copies Abar and normed vectors out
//   helper   3                 24    rows past a sequence's end    zeroes them in a last chunk's tiles; o of skipped sequences and past the last one
//   intra    4-7               104   exchange memory               K [K;Q]^T, j <= i; Abar (F3), Pg (F6), a chunk or two ahead of the states
//   state    8-11, 12-15       192   S^T rows (64 x 128 fp32 each) KS, QS; R (F4); Delta (F5); E (F8); S (F9); O (F7)
//
// Edges                 from -> to               count               guards
//   tiles.full[3]       load or helper -> intra, state  1 (+ tx)     K, Q and gate vectors of a stage
//   tiles.empty[3]      state -> load            8 (warps)           the same (intra is done: its pair was waited for); with norms to save + 1: store
//   values.full[3]      load or helper -> state  1 (+ tx)            V of a stage
//   out[2][3]           state -> store           4 (warps)           O in V's place
//   values.empty[3]     store -> load            2                   V's stage: its O has been read out
//   raw_*[3]            load -> helper           1 + tx              tiles of a last chunk with rows to zero; the helper then completes full
//   pairs.full[2]       intra -> state           4 (warps)           Abar and Pg of a chunk
//   pairs.empty[2]      state -> intra           8 (warps)           the same; to save + 1: store; with norms + 2
//   normed[3]           intra -> state           4 (warps)           with norms: they are in the stage's vectors
//   state_full          load -> state            1 + tx              a CTA's first initial state, in stage 2 and V's, and behind V ..
//   state_taken         state -> load            8 (warps)           .. and its place is free
//   first_gates         state -> intra, state    3 (warps)           direct: gate vectors of the first three chunks, in their stages
//   gates_ready         state -> load            8 (warps)           .. of all others, in global memory
//   item_full[2]        load -> all others       1                   a work item's slot
//   item_empty[2]       all others -> load       9                   the same
//   turn[2]             state -> state           256 (named)         the tensor cores at the first product: the two take turns
//   blocks_issued[2]    intra -> second state    4 (warps)           .. the second one's comes behind the block products of the same chunk
// Written by ordinary stores and read by wgmma or a tensor store: proxy fence in every writing thread before its arrive.
//
// SMEM          KiB
//   K, Q        3 x 37     rows of Q, K, Q (config.hpp) in each of two 64-column panels | 2 free | cumulated gate, beta, gamma, q_scale, e_scale (rk, q)
//   Abar, Pg    2 x 16     lower blocks under standing zeros, 32-byte swizzle (formats.hpp)
//   exchange    14         the inverse's operands (math/tril_inverse.cuh)
//   V           3 x 16     O takes its place
//   state       18         the last quarter of a CTA's first initial state, whose rows lie apart
// clang-format on
//
// Tail: rows past the end in a sequence's last chunk belong to others or are padding (NaN perhaps): zeroed in K, Q, V before use;
// the vectors come so from chunk_gates. Its O rows are stored one by one.
#pragma once

#include "cuda/kernels/forward_fused/role_intra.cuh"
#include "cuda/kernels/forward_fused/role_load.cuh"
#include "cuda/kernels/forward_fused/role_state.cuh"

namespace qla::cuda {

template <typename T, bool Norm, bool Save, bool Cut>
__global__ void __launch_bounds__(FusedConfig::kThreads, 1) gdn_forward_fused(const __grid_constant__ FusedArgs a) {
  using Cfg = FusedConfig;
  extern __shared__ uint8_t smem[];
  const FusedSmem sm{(ptx::shared_address(smem) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    sm.tiles().init(1, 4 * Cfg::kParts + (Norm && Save));
    sm.values().init(1, Cfg::kParts);
    sm.pairs().init(4, 4 * Cfg::kParts + Save + (Norm && Save));
    sm.items().init(1, Cfg::kItemReaders);
    for (int s = 0; s < Cfg::kStages; s++) {
      ptx::mbarrier_init(sm.raw_tiles(s), 1);
      ptx::mbarrier_init(sm.raw_values(s), 1);
      for (int part = 0; part < Cfg::kParts; part++) ptx::mbarrier_init(sm.out_full(part, s), 4);
    }
    ptx::mbarrier_init(sm.gates_ready(), 4 * Cfg::kParts);
    for (int s = 0; s < Cfg::kStages; s++) ptx::mbarrier_init(sm.normed(s), 4);
    ptx::mbarrier_init(sm.first_gates(), Cfg::kStages);
    for (int p = 0; p < 2; p++) ptx::mbarrier_init(sm.blocks_issued(p), 4);
    ptx::mbarrier_init(sm.state_full(), 1);
    ptx::mbarrier_init(sm.state_taken(), 4 * Cfg::kParts);
    ptx::mbarrier_init_fence();
  } else if (threadIdx.x == 32) {
    for (const CUtensorMap* map : {&a.k, &a.q, &a.v, &a.o, &a.state}) ptx::tensor_prefetch_map(map);
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == 0) {
    const int warp = threadIdx.x / 32;
    LoadStep step = kFirstChunk;
    if (!Cut && a.direct) {  // before registers are given away: it would want more than are kept
      if (threadIdx.x == 64) ask_for_boundaries(a);
      if (warp == 0) {
        ptx::grid_dependency_wait();
        put_direct_sequences(a, sm, int(threadIdx.x));
        if (known_at_once(a)) step = begin_direct(a, sm, int(threadIdx.x));
      }
    }
    ptx::setmaxnreg_dec<Cfg::kRegsLoad>();
    if (!Cut || !a.p.merging) ptx::grid_dependency_wait();
    if (a.p.asks) ptx::grid_dependency_launch();  // not sooner: what follows looks at the plan without a wait of its own
    if (warp == 0) {
      if (threadIdx.x == 0) fused_load_role<Save, Cut>(a, sm, step);
    } else if (warp == 3) {
      fused_helper_role<Cut>(a, sm);
    } else {
      fused_store_role<Norm, Save, Cut>(a, sm, warp - 1);
    }
  } else if (group == 1) {
    ptx::setmaxnreg_dec<Cfg::kRegsIntra>();
    intra_role<T, Norm, Save, Cut>(a, sm);
  } else {
    if (!Cut && a.direct) {  // .. and before they are there
      ptx::grid_dependency_wait();
      direct_gates<Norm, Save>(a, sm, threadIdx.x / 32 - 8, 4 * Cfg::kParts, threadIdx.x % 32);
      ptx::proxy_fence_global();
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(sm.gates_ready());
    }
    ptx::setmaxnreg_inc<Cfg::kRegsState>();
    fused_state_role<T, Norm, Save, Cut>(a, sm, group - 2);
  }
}

}  // namespace qla::cuda
