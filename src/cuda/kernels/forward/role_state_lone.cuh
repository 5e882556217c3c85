// The forward kernel's state role where it is a CTA's only one and has outputs (V split): a lone warp of a scheduler issues what
// it has one behind the other, so the chain that role_state.cuh has next to a second warpgroup gains nothing here and costs
// instructions: 1.20 us a chunk and half of V, and 1.115 in this order. The arithmetic is the same to the bit.
#pragma once

#include "cuda/kernels/forward/role_state.cuh"

namespace qla::cuda {

// The order of products in a chunk:
//   K S, Q S .. | Delta, .. Q S | S half 0, S half 1, Pg Delta onto Q S     .. is the part of Q S that fills the gap while the
//   CUDA cores make the next left operand
// and under them: O of the chunk before is stored | R | S decays | E | halves of S are packed for the next chunk.
template <class Cfg, class Mma>
__device__ __forceinline__ void lone_state_role(const ForwardArgs& a, const ForwardSmem<Cfg>& sm) {
  static_assert(Cfg::kParts == 1 && Cfg::kOutput);
  using T = typename Mma::Element;
  constexpr int kPanel = Cfg::kPanelBytes;
  const int lane4 = thread_in_group() % 4;
  const auto tiles = sm.tiles();
  const auto items = sm.items();
  const uint32_t v_lane = transposed_lane(Cfg::kOffV, 0, thread_in_group() / 32 * 16, 64,
                                          thread_in_group() % 32);  // this lane's row of V and O; 16 tokens further: + 2,048
  Ring<Cfg::kStages> ring;
  Ring<Cfg::kItemSlots> slots;
  const bool saves = a.p.h.data || a.p.checkpoints.data;
  float S[2][32];
  uint32_t sf[32], of[16];
  for (;;) {
    items.consumer_wait(slots);
    const uint32_t item = sm.slot_address(slots.stage);
    if (!slot::valid(item)) break;
    const bool waits = a.p.merging ? slot::start(item) == QLA_START_MERGED : slot::start_index(item) >= 0;
    if (waits) ptx::grid_dependency_wait();  // not in the rehearsal
    start_state(a, item, S, 0);
    pack_state<T, 0>(sf, S[0]);
    pack_state<T, 1>(sf, S[1]);
    const int chunks = slot::chunks(item);
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
      if (saves) save_state<Cfg>(a, item, S, c, false, 0);
      const uint32_t st = uniform(sm.stage(ring.stage)), vec = st + Cfg::kOffVec;
      tiles.consumer_wait(ring);
      float ks[32], o[32], delta[32];
      Mma::begin();
      Mma::template state_rows<kPanel>(ks, sf, st);
      Mma::commit();
      Mma::template state_rows<kPanel, 0, 4>(o, sf, st + 8192);
      Mma::commit();
      if (c > 0) put_output(sm, 0, ring.stage == 0 ? Cfg::kStages - 1 : ring.stage - 1, v_lane, of);
      uint32_t vt[16];
      float2 scale[8];
      load_values(vt, st, v_lane);
      load_columns(scale, vec_lane(vec, kVecK, lane4));
      Mma::template wait<1>();
      uint32_t rf[16];
      residual<T>(rf, vt, ks, scale);  // (F4)
      const uint32_t abar = st + Cfg::kOffA, pg = abar + kTileSmemBytes;
      Mma::begin();
      Mma::template triangular<0>(delta, rf, abar);  // (F5) Delta^T = R^T Abar^T
      Mma::commit();
      Mma::template state_rows<kPanel, 4, 8>(o, sf, st + 8192);
      Mma::commit();
      load_columns(scale, vec_lane(vec, kVecE, lane4));
      decay_state(S, vec);
      Mma::template wait<1>();
      uint32_t df[16], ef[16];
      scaled_operand<T>(ef, delta, scale);  // (F8)
      pack_operand<T>(df, delta);
      Mma::begin();
      Mma::template update<kPanel, 0>(S[0], ef, st);  // (F9) S^T += E^T K
      Mma::commit();
      Mma::template update<kPanel, 1>(S[1], ef, st);
      Mma::commit();
      Mma::template wait<2>();  // Q S
      scale_columns(o, vec_lane(vec, kVecQ, lane4));
      ptx::pin(o);
      Mma::begin();
      Mma::template triangular<1>(o, df, pg);  // (F7)
      Mma::commit();
      Mma::template wait<2>();
      pack_state<T, 0>(sf, S[0]);
      Mma::template wait<1>();
      pack_state<T, 1>(sf, S[1]);
      Mma::template wait<0>();
      pack_operand<T>(of, o);
      ring.advance();
    }
    if (chunks > 0) put_output(sm, 0, ring.stage == 0 ? Cfg::kStages - 1 : ring.stage - 1, v_lane, of);
    save_state<Cfg>(a, item, S, chunks, true, 0);
    ptx::named_sync(2, 128);
    if (thread_in_group() == 0) items.release(slots);
    slots.advance();
  }
  ptx::grid_dependency_wait();  // whoever waits for this kernel counts on all before it
}

}  // namespace qla::cuda
