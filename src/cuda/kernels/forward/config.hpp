// Sizes of the forward kernel's variants; host-includable.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"

namespace qla::cuda {

// Parts: state warpgroups of a CTA, 64 value columns each (1: V-split). Output: false walks for the end state alone.
template <int Parts_, bool Output_>
struct ForwardConfig {
  static constexpr int kParts = Parts_;
  static constexpr bool kOutput = Output_;
  static constexpr int kThreads = 128 * (1 + kParts);

  // one stage: K (and Q) | V | Abar | Pg | gate vectors
  static constexpr int kKqBytes = kOutput ? 32768 : 16384;
  static constexpr int kPanelBytes = kOutput ? 16384 : 8192;  // distance of K's two panels
  static constexpr int kVBytes = 8192 * kParts;
  static constexpr int kOffV = kKqBytes;
  static constexpr int kOffA = kOffV + kVBytes;
  static constexpr int kTiles = kOutput ? 2 : 1;
  static constexpr int kOffP = kOffA + kTileSmemBytes;
  static constexpr int kOffVec = kOffA + kTiles * kTileSmemBytes;
  static constexpr int kStageBytes = kOffVec + kVecBytesForward;
  static constexpr int kStages = kOutput ? 3 : kParts == 2 ? 5 : 6;
  static constexpr int kLoadBytes = kKqBytes + kVBytes + kTiles * kTileBytes + kVecBytesForward;

  static constexpr int kEmptyCount = kOutput ? kParts : 4 * kParts;  // arrivals that hand a stage back
  static constexpr bool kTurns = kParts == 2;  // the two state warpgroups take turns at the state's products

  static constexpr int kItemBytes = 96, kItemSlots = 2;
  static constexpr int kOffItems = kStages * kStageBytes;
  static constexpr int kOffBarriers = kOffItems + kItemSlots * kItemBytes;
  static constexpr int kNumBarriers = (3 + kParts) * kStages + 2 * kItemSlots;
  static constexpr int kSmemBytes = kOffBarriers + 8 * kNumBarriers + 1024;  // 1,024: alignment of the dynamic part

  static constexpr int kItemReaders = kParts + (kOutput ? kParts : 0) + 1;  // arrivals that hand an item's slot back

  // setmaxnreg shares out what the launch reserved: 65,536 / threads, rounded down to 8, a thread. A sum above it hangs.
  static constexpr int kRegsLaunch = 65536 / kThreads / 8 * 8 > 255 ? 255 : 65536 / kThreads / 8 * 8;
  static constexpr bool kShareRegs = kParts == 2;
  static constexpr int kRegsLoad = 56, kRegsState = 224;
  static_assert(!kShareRegs || kRegsLoad + kParts * kRegsState <= (1 + kParts) * kRegsLaunch);
  static_assert(kSmemBytes <= 232448);
  static_assert(kStageBytes % 1024 == 0);
};

}  // namespace qla::cuda
