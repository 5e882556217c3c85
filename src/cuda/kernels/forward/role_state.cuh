// The forward kernel's state role: the recurrence (F4)-(F9) of 64 value columns by one warpgroup.
#pragma once

#include "cuda/kernels/forward/smem.cuh"
#include "cuda/math/state_step.cuh"
#include "cuda/tile/transition.cuh"

namespace qla::cuda {

// first of this warp's 16 value columns of V
__device__ __forceinline__ int first_column(uint32_t item, int part) {
  return slot::v_part(item) * 64 + part * 64 + thread_in_group() / 32 * 16;
}

__device__ __forceinline__ StateAddress state_address(const StateView& x, int64_t index, int v_head) {
  const int64_t bytes = x.dtype == QLA_FLOAT64 ? 8 : x.dtype == QLA_FLOAT32 ? 4 : 2;
  return {static_cast<char*>(x.data) + bytes * (index * x.stride_n + v_head * x.stride_h), x.dtype, x.stride_k, x.stride_v};
}

// Where a state lies in what ranges of chunks or the parts of an item hand over, counted in states.
__device__ __forceinline__ int64_t carried_at(const ForwardArgs& a, uint32_t item) {
  if (a.p.shares) return slot::start_index(item);
  return (a.p.carries_all ? int64_t(slot::sequence(item)) * a.p.num_v_heads : 0) + slot::v_head(item);
}

// Where the state goes before chunk c (or after the last): snapshot, checkpoint, final state. One copy of the stores for all.
template <class Cfg>
__device__ __forceinline__ void save_state(const ForwardArgs& a, uint32_t item, const float (&S)[2][32], int c, bool at_end,
                                           int part) {
#pragma unroll 1
  for (int target = 0; target < 3; target++) {
    StateView x;
    int64_t index = 0;
    if (target == 0) {
      if (at_end || c < slot::warmup(item)) continue;
      x = a.p.h;
      index = slot::chunk_base(item) + slot::first_chunk(item) + c;
    } else if (target == 1) {
      x = a.p.checkpoints;
      const int done = slot::first_chunk(item) + c;
      if (!x.data || c <= slot::warmup(item) || done % a.p.checkpoint_every_chunks != 0 ||
          (at_end && slot::last_rows(item) != 64))
        continue;
      index = slot::checkpoint_base(item) + done / a.p.checkpoint_every_chunks - 1;
    } else {
      if (!at_end) continue;
      if (Cfg::kOutput) {
        const int to = slot::is_last(item);
        if (to == kFinalState) {
          x = a.p.final_state;
          index = slot::state_index(item);
        } else if (to == kCarry) {
          x = {a.p.carry_out, QLA_FLOAT32, 16384, 0, 1, 128};
          index = carried_at(a, item);
        } else {
          continue;
        }
      } else {
        x = {a.p.end_states, QLA_FLOAT32, 16384, 0, 1, 128};
        index = slot::start_index(item);
        if (index < 0) continue;                    // the rehearsal
        if (slot::start(item) == kStartIdentity) {  // M
          transition::store(S, a.p.end_states + index * kStateFloats, first_column(item, part), thread_in_group() % 32);
          continue;
        }
      }
    }
    if (x.data) store_state(S, state_address(x, index, slot::v_head(item)), first_column(item, part), thread_in_group() % 32);
  }
}

__device__ __forceinline__ void start_state(const ForwardArgs& a, uint32_t item, float (&S)[2][32], int part) {
  const int start = slot::start(item), v0 = first_column(item, part), lane = thread_in_group() % 32;
  if (start == QLA_START_INITIAL) {
    load_state(S, state_address(a.p.initial_state, slot::state_index(item), slot::v_head(item)), v0, lane);
  } else if (start == QLA_START_MERGED || start == kStartCarried) {
    const float* from = start == kStartCarried ? a.p.carry_in + carried_at(a, item) * 16384
                                               : a.p.merged + int64_t(slot::start_index(item)) * 16384;
    load_contiguous<1, 128>(S, {const_cast<float*>(from), QLA_FLOAT32, 1, 128}, v0, lane);
  } else {
#pragma unroll
    for (int i = 0; i < 64; i++) {
      const int v = v0 + lane / 4 + i % 4 / 2 * 8, k = i / 4 * 8 + lane % 4 * 2 + i % 2;
      S[i / 32][i % 32] = start == kStartIdentity && v == k ? 1.f : 0.f;
    }
  }
}

// This lane's words of V^T from its stage, an operand of (F4).
__device__ __forceinline__ void load_values(uint32_t (&vt)[16], uint32_t stage, uint32_t v_lane) {
#pragma unroll
  for (int j = 0; j < 4; j++)
    ptx::ldmatrix_x4_trans(stage + v_lane + 2048 * j, vt[4 * j], vt[4 * j + 1], vt[4 * j + 2], vt[4 * j + 3]);
}

// O to V's place in its stage: a helper stores it and hands the stage back.
template <class Cfg>
__device__ __forceinline__ void put_output(const ForwardSmem<Cfg>& sm, int part, int stage, uint32_t v_lane,
                                           const uint32_t (&of)[16]) {
  const uint32_t st = sm.stage(stage);
#pragma unroll
  for (int j = 0; j < 4; j++)
    ptx::stmatrix_x4_trans(st + v_lane + 2048 * j, of[4 * j], of[4 * j + 1], of[4 * j + 2], of[4 * j + 3]);
  ptx::proxy_fence();
  __syncwarp();
  if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(sm.out_full(part, stage));
}

// S decays over a chunk: while Delta is in flight; earlier, ptxas serialises (C7518).
__device__ __forceinline__ void decay_state(float (&S)[2][32], uint32_t vec) {
  const float gamma_c = ptx::lds(vec + (kVecGamma + 63) * 4);
#pragma unroll
  for (int i = 0; i < 32; i++) S[0][i] *= gamma_c, S[1][i] *= gamma_c;
  ptx::pin(S[0]);
  ptx::pin(S[1]);
}

// The order of products, from the moment when the chunk's K S is done:
//   Q S .. | Delta, .. Q S | S half 0, S half 1, Pg Delta onto Q S, the next chunk's K S of half 0, of half 1
// The parts of Q S fill the gaps in which the CUDA cores make R and E; half 0 of the state is packed under half 1's product, and
// the next chunk has begun when O is stored. Behind an item's last chunk the next K S is of whatever lies in the next stage, for
// nothing. The two warpgroups take turns from S half 0 to the next K S.
template <class Cfg, class Mma>
__device__ __forceinline__ void state_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm, int part) {
  using T = typename Mma::Element;
  constexpr int kPanel = Cfg::kPanelBytes;
  const int lane4 = thread_in_group() % 4;
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  auto take_turn = [&] {
    if (Cfg::kTurns) ptx::named_sync(4 + part, 256);
  };
  auto pass_turn = [&] {
    if (Cfg::kTurns) ptx::named_arrive(5 - part, 256);
  };
  const uint32_t v_lane = transposed_lane(Cfg::kOffV + part * 8192, 0, thread_in_group() / 32 * 16, 64,
                                          thread_in_group() % 32);  // this lane's row of V and O; 16 tokens further: + 2,048
  Ring<Cfg::kStages> ring;
  Ring<Cfg::kItemSlots> slots;
  if (part == 1) pass_turn();
  const bool saves = a.p.h.data || a.p.checkpoints.data;
  float S[2][32], ks[32], o[32];
  uint32_t sf[32];
#pragma unroll
  for (int i = 0; i < 32; i++) ks[i] = o[i] = 0.f;  // they go around the loops
  for (;;) {
    items.consumer_wait(slots);
    const uint32_t item = sm.slot_address(slots.stage);
    if (!slot::valid(item)) break;
    const bool waits = Cfg::kOutput && a.p.merging ? slot::start(item) == QLA_START_MERGED : slot::start_index(item) >= 0;
    if (waits) ptx::grid_dependency_wait();  // not in the rehearsal
    start_state(a, item, S, part);
    pack_state<T, 0>(sf, S[0]);
    pack_state<T, 1>(sf, S[1]);
    const int chunks = slot::chunks(item);
    if (chunks > 0) tiles.consumer_wait(ring);
    Mma::begin();
    Mma::template state_rows<kPanel>(ks, sf, uniform(sm.stage(ring.stage)));
    Mma::commit();
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
      if (saves) {
        Mma::template wait<0>();
        save_state<Cfg>(a, item, S, c, false, part);
      }
      const uint32_t st = uniform(sm.stage(ring.stage)), vec = st + Cfg::kOffVec;
      const bool quiet = Cfg::kOutput && uniform(c < slot::warmup(item));
      // Half of Q S; of a chunk without output one step of it: products in flight over a branch must have written their
      // accumulator before it, and want a fence on either way (else ptxas serialises all).
      const auto query_products = [&]<int First>() {
        Mma::begin();
        Mma::template state_rows<kPanel, First, First + 1>(o, sf, st + 8192);
        if (!quiet) {
          Mma::begin();
          Mma::template state_rows<kPanel, First + 1, First + 4>(o, sf, st + 8192);
        }
        Mma::begin();
        Mma::commit();
      };
      uint32_t vt[16];
      float2 scale[8];
      load_values(vt, st, v_lane);
      if (!Cfg::kOutput && slot::start(item) == kStartIdentity) {
#pragma unroll
        for (int i = 0; i < 16; i++) vt[i] = 0;
      }
      load_columns(scale, vec_lane(vec, kVecK, lane4));
      Mma::template wait<0>();  // K S
      if constexpr (Cfg::kOutput) query_products.template operator()<0>();
      uint32_t rf[16];
      residual<T>(rf, vt, ks, scale);  // (F4)
      const uint32_t abar = st + Cfg::kOffA, pg = abar + kTileSmemBytes;
      float delta[32];
      Mma::begin();
      Mma::template triangular<0>(delta, rf, abar);  // (F5) Delta^T = R^T Abar^T
      Mma::commit();
      if constexpr (Cfg::kOutput) query_products.template operator()<4>();
      load_columns(scale, vec_lane(vec, kVecE, lane4));
      decay_state(S, vec);
      Mma::template wait<Cfg::kOutput ? 1 : 0>();  // Delta
      uint32_t df[16], ef[16];
      scaled_operand<T>(ef, delta, scale);  // (F8)
      if constexpr (Cfg::kOutput) pack_operand<T>(df, delta);
      take_turn();
      Mma::begin();
      Mma::template update<kPanel, 0>(S[0], ef, st);  // (F9) S^T += E^T K
      Mma::commit();
      Mma::template update<kPanel, 1>(S[1], ef, st);
      Mma::commit();
      if constexpr (Cfg::kOutput) {  // (F7)
        Mma::template wait<2>();     // Q S
        scale_columns(o, vec_lane(vec, kVecQ, lane4));
        ptx::pin(o);
        Mma::begin();
        Mma::template triangular<1>(o, df, pg);
        Mma::commit();
      }
      const int stage = ring.stage;
      ring.advance();
      if (c + 1 < chunks) tiles.consumer_wait(ring);
      const uint32_t next = uniform(sm.stage(ring.stage));
      Mma::template wait<Cfg::kOutput ? 2 : 1>();  // half 0 of S
      pack_state<T, 0>(sf, S[0]);
      Mma::begin();
      Mma::template state_rows<kPanel, 0, 4>(ks, sf, next);
      Mma::commit();
      Mma::template wait<Cfg::kOutput ? 2 : 1>();  // half 1
      pack_state<T, 1>(sf, S[1]);
      Mma::begin();
      Mma::template state_rows<kPanel, 4, 8>(ks, sf, next);
      Mma::commit();
      pass_turn();
      if constexpr (Cfg::kOutput) {
        Mma::template wait<2>();  // Pg Delta
        uint32_t of[16];
        pack_operand<T>(of, o);
        put_output(sm, part, stage, v_lane, of);
      } else {
        __syncwarp();  // every lane has read its stage
        if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(tiles.empty(stage));
      }
    }
    Mma::template wait<0>();
    save_state<Cfg>(a, item, S, chunks, true, part);
    ptx::named_sync(2 + part, 128);
    if (thread_in_group() == 0) items.release(slots);
    slots.advance();
  }
  if (part == 0) take_turn();
  if (Cfg::kOutput) ptx::grid_dependency_wait();  // whoever waits for this kernel counts on all before it
}

}  // namespace qla::cuda
