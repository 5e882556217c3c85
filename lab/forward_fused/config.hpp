// Sizes of the forward kernel's variants; host-includable.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"

namespace qla::cuda {

// Parts: state warpgroups of a CTA, 64 value columns each (1: V-split). Output: false walks for the end state alone.
// Fused: Abar, Pg and the gate vectors are made by a role of the kernel (math.md F0-F3, F6) and not loaded.
template <int Parts_, bool Output_, bool Fused_ = false>
struct ForwardConfig {
  static constexpr int kParts = Parts_;
  static constexpr bool kOutput = Output_;
  static constexpr bool kFused = Fused_;
  static_assert(!kFused || (kParts == 2 && kOutput));
  static constexpr int kFirstState = kFused ? 2 : 1;  // warpgroup
  static constexpr int kThreads = 128 * (kFirstState + kParts);

  // one stage: K (and Q) | V | Abar | Pg | gate vectors
  static constexpr int kKqBytes = kOutput ? 32768 : 16384;
  static constexpr int kPanelBytes = kOutput ? 16384 : 8192;  // distance of K's two panels
  static constexpr int kVBytes = 8192 * kParts;
  static constexpr int kOffV = kKqBytes;
  static constexpr int kOffA = kOffV + kVBytes;
  static constexpr int kTiles = kFused ? 0 : kOutput ? 2 : 1;
  static constexpr int kOffP = kOffA + kTileSmemBytes;
  static constexpr int kOffVec = kOffA + kTiles * kTileSmemBytes;
  static constexpr int kStageBytes = kOffVec + (kFused ? 2048 : kVecBytesForward);
  static constexpr int kStages = kOutput ? 3 : kParts == 2 ? 5 : 6;
  static constexpr int kLoadBytes = kKqBytes + kVBytes + (kFused ? 0 : kTiles * kTileBytes + kVecBytesForward);

  static constexpr int kEmptyCount = kOutput ? kParts : 4 * kParts;  // arrivals that hand a stage back
  static constexpr int kFirstQ = kFused ? 8 : 4;  // k16 steps of Q S issued behind K S; the others behind Delta
  static constexpr bool kLean = kFused;           // fewer registers: see role_state.cuh
  static constexpr bool kTurns = kParts == 2;     // the two state warpgroups take turns at the first product

  static constexpr int kItemBytes = 96, kItemSlots = 2;
  // fused: two pairs of tiles and the exchange memory of the inverse
  static constexpr int kOffPairs = kStages * kStageBytes;
  static constexpr int kOffExchange = kOffPairs + (kFused ? 4 * kTileSmemBytes : 0);
  static constexpr int kOffRaw =
      kOffExchange + (kFused ? 14336 : 0);  // gate and beta of two chunks as they lie in memory, 8 bytes each
  static constexpr int kOffItems = kOffRaw + (kFused ? 2048 : 0);
  static constexpr int kOffBarriers = kOffItems + kItemSlots * kItemBytes;
  static constexpr int kNumBarriers = (3 + kParts) * kStages + 2 * kItemSlots + (kFused ? 4 : 0);
  static constexpr int kSmemBytes = kOffBarriers + 8 * kNumBarriers + 1024;  // 1,024: alignment of the dynamic part

  static constexpr int kItemReaders =
      kParts + (kOutput ? kParts : 0) + 1 + (kFused ? 4 : 0);  // arrivals that hand an item's slot back

  // setmaxnreg shares out what the launch reserved: 65,536 / threads, rounded down to 8, a thread. A sum above it hangs.
  static constexpr int kRegsLaunch = 65536 / kThreads / 8 * 8 > 255 ? 255 : 65536 / kThreads / 8 * 8;
  static constexpr bool kShareRegs = kParts == 2;
  static constexpr int kRegsLoad = kFused ? 32 : 56, kRegsIntra = kFused ? 96 : 0, kRegsState = kFused ? 192 : 224;
  static_assert(!kShareRegs || kRegsLoad + kRegsIntra + kParts * kRegsState <= (kFirstState + kParts) * kRegsLaunch);
  static_assert(kSmemBytes <= 232448);
  static_assert(kStageBytes % 1024 == 0);
};

}  // namespace qla::cuda
