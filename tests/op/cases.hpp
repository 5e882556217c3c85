// The case table, shared by all backends: part A gradients and precision, part B shapes and packing, part C layouts and
// arguments.
#pragma once

#include "support/case.hpp"

namespace qla::test {

std::vector<Case> precision_cases();
std::vector<Case> shape_cases();
std::vector<Case> argument_cases();

inline constexpr int32_t kBf16 = QLA_BFLOAT16, kFp16 = QLA_FLOAT16, kF32 = QLA_FLOAT32, kF64 = QLA_FLOAT64;

// The ways to cut a sequence; the same truth for all.
inline Options uncut() { return {.name = "off", .cp_mode = QLA_CP_OFF}; }
inline Options merged(int64_t chunks) {
  return {.name = "exact merge every " + std::to_string(chunks),
          .cp_mode = QLA_CP_FIXED,
          .cp_segment_chunks = chunks,
          .cp_threshold = -std::numeric_limits<double>::infinity()};
}
inline Options fixed(int64_t chunks) {
  return {.name = "fixed " + std::to_string(chunks), .cp_mode = QLA_CP_FIXED, .cp_segment_chunks = chunks};
}
inline Options forward_only(Options call) {
  call.backward = false;
  return call;
}
inline Options v_first() { return {.name = "V first", .extra_flags = QLA_FLAG_STATE_V_FIRST}; }
inline Options laid_out(const char* name, Layout layout) { return {.name = name, .layout = layout}; }
inline Options states_in(const char* name, States states) { return {.name = name, .states = states}; }
inline Options no_final_state() { return {.name = "no final state", .final_state = false}; }
inline Options recomputed() { return {.name = "nothing saved", .reuse_saved = false}; }

}  // namespace qla::test
