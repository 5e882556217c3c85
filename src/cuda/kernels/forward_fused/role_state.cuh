// The fused forward's state role: the recurrence (F4)-(F9) of 64 value columns by one warpgroup. 192 registers: the state and K S
// | Q S are accumulators of 64 registers; Q S, scaled, is what Pg Delta is summed onto.
//
// The two state warpgroups and the intra role share one line of products. Each chunk the intra role's four block products depend
// on one another, so they must not find a thousand cycles of K S, Q S before each: the second warpgroup's come behind the last of
// them. It then runs half a chunk behind the first one, and one's products lie under the other's conversions.
#pragma once

#include "cuda/kernels/forward/role_state.cuh"
#include "cuda/kernels/forward_fused/direct.cuh"
#include "cuda/kernels/forward_fused/smem.cuh"

namespace qla::cuda {

// The initial state that was copied to shared memory, [K][V] or [V][K], its rows apart so that no lanes meet in a bank. Loaded
// from global memory by every thread it would hold up the intra role's shared memory: 2,000 sectors wait in the same queue.
__device__ __forceinline__ void take_first_state(const FusedSmem& sm, bool v_first, float (&S)[2][32], int part, int lane) {
  const int v = thread_in_group() / 32 * 16 + lane / 4, k = lane % 4 * 2;
  if (v_first) {
    constexpr int kPitch = FusedConfig::kPitchVFirst;
    const uint32_t at = sm.first_state(part) + (v * kPitch + k) * 4;
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      const float2 x = ptx::lds2(at + (8 * (i / 4) + i / 2 % 2 * 8 * kPitch) * 4);
      S[i / 32][i % 32] = x.x, S[i / 32][i % 32 + 1] = x.y;
    }
  } else {
    constexpr int kPitch = FusedConfig::kPitchKFirst;
    const uint32_t at = (k * kPitch + 64 * part + v) * 4;
#pragma unroll
    for (int i = 0; i < 64; i++)
      S[i / 32][i % 32] = ptx::lds(sm.first_state(i / 32) + at + ((8 * (i % 32 / 4) + i % 2) * kPitch + i / 2 % 2 * 8) * 4);
  }
}

// The end state of an item, where its sequence ends or goes on elsewhere.
__device__ __forceinline__ void save_end(const FusedArgs& a, uint32_t item, const float (&S)[2][32], int part) {
  const int to = slot::is_last(item);
  if (to != kFinalState && to != kCarry) return;
  StateView x = a.p.final_state;
  int64_t index = slot::state_index(item);
  if (to == kCarry) {
    x = {a.p.carry_out, QLA_FLOAT32, kStateFloats, 0, 1, 128};
    index = carried_at(a, item);
  }
  if (x.data) store_state(S, state_address(x, index, slot::v_head(item)), first_column(item, part), thread_in_group() % 32);
}

// d (+)= x^T tile^T with a lower triangular tile: its columns 0-31 take nothing from tokens 32-63.
template <typename T, int Accumulate>
__device__ __forceinline__ void lower_product(float (&d)[32], const uint32_t (&x)[16], uint64_t tile) {
  float(&low)[16] = reinterpret_cast<float(&)[16]>(d[0]);
  float(&high)[16] = reinterpret_cast<float(&)[16]>(d[16]);
#pragma unroll
  for (int w = 0; w < 2; w++) ptx::wgmma_rs<T, 0>(low, x + 4 * w, further(tile, 2048 * w), Accumulate || w > 0);
#pragma unroll
  for (int w = 0; w < 4; w++) ptx::wgmma_rs<T, 0>(high, x + 4 * w, further(tile, 2048 * w + 1024), Accumulate || w > 0);
}

template <typename T, bool Norm, bool Save, bool Cut>
__device__ __forceinline__ void fused_state_role(const FusedArgs& a, const FusedSmem& sm, int part) {
  using Cfg = FusedConfig;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // this lane's row of V and O; 16 tokens further: + 2,048
  uint32_t v_lane = transposed_lane(part * 8192, 0, warp * 16, 64, lane);
  asm volatile("" : "+r"(v_lane));  // kept, not made anew in every chunk
  const auto tiles = sm.tiles();
  auto take_turn = [&] { ptx::named_sync(4 + part, 256); };
  auto pass_turn = [&] { ptx::named_arrive(5 - part, 256); };
  if (part == 1) pass_turn();
  if (!Cut || !a.p.merging) ptx::grid_dependency_wait();
  FusedWalk walk;
  float S[2][32];
  float(&state)[64] = reinterpret_cast<float(&)[64]>(S);
#pragma unroll
  for (int i = 0; i < 64; i++) state[i] = 0.f;
  for (;; walk.next_item()) {
    ptx::mbarrier_wait(sm.items().full(walk.slot()), walk.slot_phase());
    if (!slot::valid(sm.slot_address(walk.slot()))) break;
    const int first = slot::first(sm.slot_address(walk.slot()));
    if (first == kFirstByCopy) {
      ptx::mbarrier_wait(sm.state_full(), 0);
      take_first_state(sm, a.p.initial_state.stride_k == 1, S, part, lane);
    } else {
      const uint32_t item = sm.slot_address(walk.slot());
      if (Cut && slot::start(item) == QLA_START_MERGED) ptx::grid_dependency_wait();
      if (!Cut && slot::start(item) == kStartCarried)  // balanced: the late part of an item; the early one is under way or done
        while (ptx::read_flag(a.p.part_flags + slot::start_index(item)) < Cfg::kParts) __nanosleep(200);
      start_state(a, item, S, part);
    }
    if (first) {
      // The third chunk's tiles come where the state lies: its loads must have returned, which an arrival alone does not wait
      // for, and be ahead of what the copies write.
      ptx::proxy_fence();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(sm.state_taken());
    }
    walk.begin_item(slot::chunks(sm.slot_address(walk.slot())));
    if (!Cut && a.direct && walk.more()) ptx::mbarrier_wait(sm.first_gates(), 0);
#pragma unroll 1
    for (; walk.more(); walk.next_chunk()) {
      const int s = walk.stage;
      uint32_t sf[32];
#pragma unroll
      for (int i = 0; i < 32; i++) sf[i] = pack<T>(state[2 * i], state[2 * i + 1]);
      ptx::pin(sf);  // packed before the waits below
      ptx::mbarrier_wait(tiles.full(s), walk.phase());
      const uint32_t st = uniform(sm.stage(s)), abar = uniform(sm.pair(walk.pair())), vec = st + Cfg::kOffVec + lane % 4 * 8,
                     v = sm.v_stage(s) + v_lane;
      if constexpr (Norm) ptx::mbarrier_wait(sm.normed(s), walk.phase());  // the intra role is ahead
      const uint64_t kq = descriptor_k_major(st), k = descriptor_mn_major(st + Cfg::kOffK, Cfg::kPanelBytes),
                     tile = descriptor_k_major_32(abar);
      float gamma_c = ptx::lds(st + Cfg::kOffVec + ((Norm ? kFusedCum : kFusedGamma) + 63) * 4);
      if constexpr (Norm) gamma_c = exp2_approx(gamma_c);  // the stage's gamma has norms in it
#pragma unroll
      for (int i = 0; i < 64; i++) state[i] *= gamma_c;
      float acc[64];  // (Q S)^T of the first 32 tokens, (K S)^T, (Q S)^T of the others: the order of the rows in a stage
      if (part == 1) ptx::mbarrier_wait(sm.blocks_issued(walk.pair()), walk.pair_phase());
      take_turn();
      ptx::wgmma_fence();
#pragma unroll
      for (int w = 0; w < 8; w++) ptx::wgmma_rs<T, 0>(acc, sf + 4 * w, further(kq, w / 4 * Cfg::kPanelBytes + w % 4 * 32), w > 0);
      ptx::wgmma_commit();
      ptx::mbarrier_wait(sm.values().full(s), walk.phase());
      uint32_t vt[16];
#pragma unroll
      for (int j = 0; j < 4; j++) ptx::ldmatrix_x4_trans(v + 2048 * j, vt[4 * j], vt[4 * j + 1], vt[4 * j + 2], vt[4 * j + 3]);
      ptx::wgmma_wait();
      pass_turn();
      float2 scale[8];
      load_columns(scale, vec + kFusedGamma * 4);
      uint32_t rf[16];
#pragma unroll
      for (int n = 0; n < 8; n++) {  // (F4)
        const float2 low = unpack<T>(vt[2 * n]), high = unpack<T>(vt[2 * n + 1]);
        const float* ks = acc + 16 + 4 * n;
        rf[2 * n] = pack<T>(low.x - scale[n].x * ks[0], low.y - scale[n].y * ks[1]);
        rf[2 * n + 1] = pack<T>(high.x - scale[n].x * ks[2], high.y - scale[n].y * ks[3]);
      }
      load_columns(scale, vec + kFusedQ * 4);
      float o[32];
#pragma unroll
      for (int n = 0; n < 8; n++) {  // (F7) first term
        const float* qs = acc + 4 * n + (n < 4 ? 0 : 32);
        o[4 * n] = qs[0] * scale[n].x;
        o[4 * n + 1] = qs[1] * scale[n].y;
        o[4 * n + 2] = qs[2] * scale[n].x;
        o[4 * n + 3] = qs[3] * scale[n].y;
      }
      ptx::pin(o);
      ptx::mbarrier_wait(sm.pairs().full(walk.pair()), walk.pair_phase());
      float delta[32];
      ptx::wgmma_fence();
      lower_product<T, 0>(delta, rf, tile);  // (F5)
      ptx::wgmma_commit();
      load_columns(scale, vec + kFusedE * 4);
      ptx::wgmma_wait();
      uint32_t ef[16], df[16];
      pack_operand<T>(df, delta);
      scaled_operand<T>(ef, delta, scale);  // (F8)
      ptx::wgmma_fence();
      lower_product<T, 1>(o, df, further(tile, kTileSmemBytes));  // (F7) second term
      ptx::wgmma_commit();
      ptx::wgmma_fence();
#pragma unroll
      for (int w = 0; w < 4; w++)  // (F9) S^T += E^T K
        ptx::wgmma_rs<T, 1>(state, ef + 4 * w, advance(k, 2048 * w), 1);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // o leaves under the state's product
#pragma unroll
      for (int j = 0; j < 4; j++)
        ptx::stmatrix_x4_trans(v + 2048 * j, pack<T>(o[8 * j], o[8 * j + 1]), pack<T>(o[8 * j + 2], o[8 * j + 3]),
                               pack<T>(o[8 * j + 4], o[8 * j + 5]), pack<T>(o[8 * j + 6], o[8 * j + 7]));
      ptx::proxy_fence();
      __syncwarp();
      if (lane == 0) {
        ptx::mbarrier_arrive(sm.out_full(part, s));
        ptx::mbarrier_arrive(sm.pairs().empty(walk.pair()));
      }
      ptx::wgmma_wait();
      if (lane == 0) ptx::mbarrier_arrive(tiles.empty(s));
    }
    save_end(a, sm.slot_address(walk.slot()), S, part);
    ptx::named_sync(2 + part, 128);
    if (threadIdx.x % 128 == 0) {
      const uint32_t item = sm.slot_address(walk.slot());
      if (!Cut && a.p.shares && slot::is_last(item) == kCarry) ptx::raise_flag(a.p.part_flags + slot::start_index(item));
      ptx::mbarrier_arrive(sm.items().empty(walk.slot()));
    }
  }
  if (part == 0) take_turn();
  if (Cut) ptx::grid_dependency_wait();  // whoever waits for this kernel counts on all before it
}

}  // namespace qla::cuda
