// The forward kernel's state role: the recurrence (F4)-(F9) of 64 value columns by one warpgroup.
#pragma once

#include "cuda/math/state_step.cuh"
#include "smem.cuh"

namespace qla::cuda {

// first of this warp's 16 value columns of V
__device__ __forceinline__ int first_column(uint32_t item, int part) {
  return slot::v_part(item) * 64 + part * 64 + thread_in_group() / 32 * 16;
}

__device__ __forceinline__ StateAddress state_address(const StateView& x, int64_t index, int v_head) {
  const int64_t bytes = x.dtype == QLA_FLOAT64 ? 8 : x.dtype == QLA_FLOAT32 ? 4 : 2;
  return {static_cast<char*>(x.data) + bytes * (index * x.stride_n + v_head * x.stride_h), x.dtype, x.stride_k, x.stride_v};
}

// Where the state goes before chunk c (or after the last): snapshot, checkpoint, final state. One copy of the stores for all.
template <class Cfg>
__device__ __forceinline__ void save_state(const ForwardArgs& a, uint32_t item, const float (&S)[2][32], int c, bool at_end,
                                           int part) {
#pragma unroll 1
  for (int target = Cfg::kFused ? 2 : 0; target < 3; target++) {
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
        if (!slot::is_last(item)) continue;
        x = a.p.final_state;
        index = slot::state_index(item);
      } else {
        x = {a.p.end_states, QLA_FLOAT32, 16384, 0, 1, 128};
        index = slot::start_index(item);
      }
    }
    if (x.data) store_state(S, state_address(x, index, slot::v_head(item)), first_column(item, part), thread_in_group() % 32);
  }
}

__device__ __forceinline__ void start_state(const ForwardArgs& a, uint32_t item, float (&S)[2][32], int part) {
  const int start = slot::start(item), v0 = first_column(item, part), lane = thread_in_group() % 32;
  if (start == QLA_START_INITIAL) {
    load_state(S, state_address(a.p.initial_state, slot::state_index(item), slot::v_head(item)), v0, lane);
  } else if (start == QLA_START_MERGED) {
    load_state_as<float>(S, {const_cast<float*>(a.p.merged) + int64_t(slot::start_index(item)) * 16384, QLA_FLOAT32, 1, 128}, v0,
                         lane);
  } else {
#pragma unroll
    for (int i = 0; i < 64; i++) {
      const int v = v0 + lane / 4 + i % 4 / 2 * 8, k = i / 4 * 8 + lane % 4 * 2 + i % 2;
      S[i / 32][i % 32] = start == kStartIdentity && v == k ? 1.f : 0.f;
    }
  }
}

// The order of products in a chunk:
//   K S, Q S .. | Delta, .. Q S | S half 0, S half 1, Pg Delta      .. is the part of Q S that fills the gap while the CUDA cores
//   make the next left operand
// and under them: O of the chunk before is stored | R | S decays | E | halves of S are packed for the next chunk.
// Lean (fused form: 184 registers): all of Q S at once, scaled before Pg Delta is added to it; V read after the wait.
template <class Cfg, class Mma>
__device__ __forceinline__ void state_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm, int part) {
  using T = typename Mma::Element;
  constexpr int kPanel = Cfg::kPanelBytes;
  constexpr bool kLean = Cfg::kLean, kSplitQ = Cfg::kOutput && Cfg::kFirstQ < 8;
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  auto take_turn = [&] {
    if (Cfg::kTurns) ptx::named_sync(4 + part, 256);
  };
  auto pass_turn = [&] {
    if (Cfg::kTurns) ptx::named_arrive(5 - part, 256);
  };
  // This lane's row of V and O (16 tokens further: + 2,048) and its columns of a gate vector. Lean: made anew where they are
  // used.
  const auto v_offset = [&](int tid) { return transposed_lane(Cfg::kOffV + part * 8192, 0, tid / 32 * 16, 64, tid % 32); };
  const uint32_t v_kept = kLean ? 0 : v_offset(threadIdx.x % 128);
  const int lane_kept = kLean ? 0 : threadIdx.x % 4;
  const auto v_lane = [&](uint32_t st) { return st + (kLean ? v_offset(thread_in_group()) : v_kept); };
  const auto columns = [&](uint32_t st, int which) {
    return vec_lane(st + Cfg::kOffVec, which, kLean ? thread_in_group() : lane_kept);
  };
  Walk<Cfg> walk;
  Ring<Cfg::kItemSlots> slots;
  if (part == 1) pass_turn();
  const bool saves = !Cfg::kFused && (a.p.h.data || a.p.checkpoints.data);
  float S[2][32];
  uint32_t sf[32], of[16];
  for (;;) {
    items.consumer_wait(slots);
    const uint32_t item = sm.slot_address(slots.stage);
    if (!slot::valid(item)) break;
    start_state(a, item, S, part);
    pack_state<T, 0>(sf, S[0]);
    pack_state<T, 1>(sf, S[1]);
    // O of a chunk, in `of`, to V's place in its stage: a helper stores it and hands the stage back
    auto put_output = [&](int stage) {
      const uint32_t at = v_lane(sm.stage(stage));
#pragma unroll
      for (int j = 0; j < 4; j++) ptx::stmatrix_x4_trans(at + 2048 * j, of[4 * j], of[4 * j + 1], of[4 * j + 2], of[4 * j + 3]);
      ptx::proxy_fence();
      __syncwarp();
      if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(sm.out_full(part, stage));
    };
    const int chunks = slot::chunks(item);
    int c = 0;
#pragma unroll 1
    for (; c < chunks; c++, walk.advance()) {
      if (saves) save_state<Cfg>(a, item, S, c, false, part);
      const uint32_t st = sm.stage(walk.stage());
      ptx::mbarrier_wait(tiles.full(walk.stage()), walk.phase());
      float ks[32], qs[32], delta[32];
      take_turn();
      Mma::begin();
      Mma::template state_rows<kPanel>(ks, sf, st);
      Mma::commit();
      if constexpr (Cfg::kOutput) {
        Mma::template state_rows<kPanel, 0, Cfg::kFirstQ>(qs, sf, st + 8192);
        Mma::commit();
        if (!kLean && c > 0) put_output(walk.stage_before());
      }
      uint32_t vt[16];
      float2 scale[8];
      auto load_v = [&] {
        const uint32_t at = v_lane(st);
#pragma unroll
        for (int j = 0; j < 4; j++) ptx::ldmatrix_x4_trans(at + 2048 * j, vt[4 * j], vt[4 * j + 1], vt[4 * j + 2], vt[4 * j + 3]);
        if (!Cfg::kOutput && slot::start(item) == kStartIdentity) {
#pragma unroll
          for (int i = 0; i < 16; i++) vt[i] = 0;
        }
        load_columns(scale, columns(st, kVecK));
      };
      if constexpr (!kLean) load_v();
      Mma::template wait<kSplitQ ? 1 : 0>();
      pass_turn();
      if constexpr (kLean) load_v();
      uint32_t rf[16];
      residual<T>(rf, vt, ks, scale);  // (F4)
      const uint32_t abar = Cfg::kFused ? sm.pair(walk.chunks & 1) : st + Cfg::kOffA, pg = abar + kTileSmemBytes;
      if constexpr (Cfg::kFused) ptx::mbarrier_wait(sm.pairs().full(walk.chunks & 1), walk.chunks >> 1 & 1);
      Mma::begin();
      Mma::template triangular<0>(delta, rf, abar);  // (F5) Delta^T = R^T Abar^T
      Mma::commit();
      if constexpr (kSplitQ) {
        Mma::template state_rows<kPanel, Cfg::kFirstQ, 8>(qs, sf, st + 8192);
        Mma::commit();
      }
      if constexpr (!kLean) load_columns(scale, columns(st, kVecE));
      const float gamma_c = ptx::lds(st + Cfg::kOffVec + (kVecGamma + 63) * 4);
      // while Delta is in flight; earlier, ptxas serialises (C7518)
#pragma unroll
      for (int i = 0; i < 32; i++) S[0][i] *= gamma_c, S[1][i] *= gamma_c;
      ptx::pin(S[0]);
      ptx::pin(S[1]);
      if constexpr (kLean) {
        scale_columns(qs, columns(st, kVecQ));  // (F7) first term
        ptx::pin(qs);
        load_columns(scale, columns(st, kVecE));
      }
      Mma::template wait<kSplitQ ? 1 : 0>();
      uint32_t df[16], ef[16];
      scaled_operand<T>(ef, delta, scale);  // (F8)
      if constexpr (Cfg::kOutput) pack_operand<T>(df, delta);
      Mma::begin();
      Mma::template update<kPanel, 0>(S[0], ef, st);  // (F9) S^T += E^T K
      Mma::commit();
      Mma::template update<kPanel, 1>(S[1], ef, st);
      Mma::commit();
      float pd[kLean ? 1 : 32];
      if constexpr (Cfg::kOutput) {  // (F7) second term
        if constexpr (kLean)
          Mma::template triangular<1>(qs, df, pg);
        else
          Mma::template triangular<0>(pd, df, pg);
        Mma::commit();
      }
      Mma::template wait<Cfg::kOutput ? 2 : 1>();
      pack_state<T, 0>(sf, S[0]);
      Mma::template wait<Cfg::kOutput ? 1 : 0>();
      pack_state<T, 1>(sf, S[1]);
      if constexpr (Cfg::kOutput) {
        if constexpr (!kLean) {
          scale_columns(qs, columns(st, kVecQ));  // (F7) first term
          ptx::pin(qs);
        }
        Mma::template wait<0>();
        if constexpr (kLean) {
          pack_operand<T>(of, qs);
          put_output(walk.stage());
        } else {
#pragma unroll
          for (int i = 0; i < 16; i++) of[i] = pack<T>(qs[2 * i] + pd[2 * i], qs[2 * i + 1] + pd[2 * i + 1]);
        }
        if constexpr (Cfg::kFused) {
          if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(sm.pairs().empty(walk.chunks & 1));
        }
      } else if (thread_in_group() % 32 == 0) {
        ptx::mbarrier_arrive(tiles.empty(walk.stage()));
      }
    }
    if (Cfg::kOutput && !kLean && c > 0) put_output(walk.stage_before());
    save_state<Cfg>(a, item, S, c, true, part);
    ptx::named_sync(2 + part, 128);
    if (thread_in_group() == 0) items.release(slots);
    slots.advance();
  }
  if (part == 0) take_turn();
}

}  // namespace qla::cuda
