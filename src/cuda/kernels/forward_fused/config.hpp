// Sizes of the fused forward kernel; host-includable.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"

namespace qla::cuda {

struct FusedConfig {
  static constexpr int kParts = 2;  // state warpgroups, 64 value columns each
  static constexpr bool kOutput = true;
  static constexpr int kThreads = 512;

  // K and Q stage: two panels of 64 columns, in each rows 0-31 of Q, 0-63 of K, 32-63 of Q, so that the first halves of Q and K
  // are one operand, and the second ones | gate vectors. V stage: two panels; O takes their place.
  static constexpr int kStages = 3;
  static constexpr int kKqBytes = 32768, kPanelBytes = 16384, kVBytes = 16384;
  static constexpr int kOffK = 4096;  // in a panel
  static constexpr int query_row(int row) { return row * 128 + (row < 32 ? 0 : 8192); }
  // Floats between two rows of a CTA's first initial state in shared memory, where it lies by 64 rows: so that no two lanes of a
  // state warp meet in a bank. It begins in stage 2 and ends behind V.
  static constexpr int kPitchVFirst = 136, kPitchKFirst = 132;
  static constexpr int kStatePart = 64 * 4 * kPitchVFirst;
  static constexpr int state_pitch(bool v_first) { return v_first ? kPitchVFirst : kPitchKFirst; }
  // gate vectors: where a first state does not come, they may be there before it is taken
  static constexpr int kOffVec = kStatePart, kStageBytes = kOffVec + 3072;
  static constexpr int kOffPairs = kStages * kStageBytes;              // 2 x (Abar, Pg)
  static constexpr int kOffExchange = kOffPairs + 4 * kTileSmemBytes;  // of the inverse
  static constexpr int kExchangeBytes = 14336;
  static constexpr int kItemBytes = 96, kItemSlots = 2;
  static constexpr int kOffItems = kOffExchange + kExchangeBytes;
  static constexpr int kOffBarriers = kOffItems + kItemSlots * kItemBytes;
  static constexpr int kNumBarriers = 8 * kStages + 4 + 2 * kItemSlots + 1 + kStages + 5;
  static constexpr int kDirectRounds = 4;                             // items of a CTA of a direct launch
  static constexpr int kOffDirect = kOffBarriers + 8 * kNumBarriers;  // their sequences
  static constexpr int kOffV = (kOffDirect + 4 * kDirectRounds + 1023) / 1024 * 1024;
  static constexpr int kSmemBytes = kOffV + (kStages - 1) * kVBytes + kStatePart + 1024;  // 1,024: alignment of the dynamic part

  static constexpr int kItemReaders = 2 * kParts + 1 + 4;  // arrivals that hand an item's slot back

  // setmaxnreg shares out what the launch reserved: 128 a thread. A sum above it hangs.
  static constexpr int kRegsLoad = 24, kRegsIntra = 104, kRegsState = 192;
  static_assert(kRegsLoad + kRegsIntra + kParts * kRegsState <= 512);
  static_assert(kStages == 3 && kOffVec >= kKqBytes && kStatePart >= kVBytes && kSmemBytes <= 232448);
  static_assert(kPitchKFirst <= kPitchVFirst);
  static_assert(kStageBytes % 1024 == 0);
};

}  // namespace qla::cuda
