// What the kernels in this tree can do; the planner asks for nothing else. No CUDA types: src/api prints plans where there is no
// CUDA, too.
#pragma once

#include "plan/choose.hpp"

namespace qla::cuda {

inline constexpr plan::Capabilities kForwardCapabilities{.fused = false, .v_split = true, .segments = true};

}  // namespace qla::cuda
