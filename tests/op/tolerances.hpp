// The limits of the suite, all of them. Relative L2 against the float64 recurrence unless it says otherwise.
//
// 16-bit tensors: o and final_state 5e-3, gradients 1e-2, or twice the emulator's own error where that is larger; largest error
// at most twice the emulator's (on a device: the larger of two, that invert in the orders of its two kernels). The emulator's
// error has a budget too, so that it cannot hide a fault. Float32 1e-5 (1e-4 where keys are correlated or beta reaches 2),
// float64 1e-10. A limit is never loosened for one case without a note that explains it.
#pragma once

#include <algorithm>

#include "support/dtype.hpp"

namespace qla::test::limits {

inline constexpr double kOutput16 = 5e-3, kGradient16 = 1e-2;  // o and final_state; gradients
inline constexpr double kFloat32 = 1e-5, kFloat32Hard = 1e-4;  // hard: BR-20, BR-21, BR-23
inline constexpr double kFloat64 = 1e-10;
inline constexpr double kOfEmulator = 2.0;  // of its relative and of its largest error
inline constexpr double kZero = 1e-6;       // where the truth is 0: of the largest entry elsewhere
inline constexpr double kNearZero = 1e-3;  // where it is nearly 0 (BR-21): of the largest entry with independent keys; 16 bit: or
inline constexpr double kNearZeroEmulator = 1e-2;  // twice the emulator's error, which stays below this (decision 0023)
inline constexpr double kSmallest = 0x1p-126;      // where it is below fp32's range: all that is known is that it stays there
inline constexpr double kSlope = 3e-4;
inline constexpr double kLargest = 20.0;  // fp32, float64: largest error, of limit times largest entry

// Budgets of the emulator's own error (measured, and a margin).
struct EmulatorBudget {
  double output = 4.5e-3, gradient = 9e-3;
};

// What the output tensor's own type costs at most, relative (a bf16 gradient of an fp32 gate is rounded once more).
inline double unit_roundoff(int32_t dtype) {
  switch (dtype) {
    case QLA_BFLOAT16:
      return 0x1p-9;
    case QLA_FLOAT16:
      return 0x1p-11;
    case QLA_FLOAT32:
      return 0x1p-24;
    default:
      return 0x1p-53;
  }
}

inline double relative(int32_t dtype, bool gradient, bool hard) {
  if (is_16_bit(dtype)) return gradient ? kGradient16 : kOutput16;
  if (dtype == QLA_FLOAT32) return hard ? kFloat32Hard : kFloat32;
  return kFloat64;
}

}  // namespace qla::test::limits
