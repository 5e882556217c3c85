// What the kernels in this tree can do; the planner asks for nothing else. No CUDA types: src/api prints plans where there is no
// CUDA, too.
#pragma once

#include "core/tensor_view.hpp"
#include "plan/choose.hpp"

namespace qla::cuda {

inline constexpr plan::Capabilities kForwardCapabilities{.fused = true, .v_split = true, .segments = true};

// .. for one call: the fused form leaves nothing of the intra-chunk stage in memory and stores no states on the way.
inline plan::Capabilities forward_capabilities(const qla_gdn_forward_args& args) {
  plan::Capabilities can = kForwardCapabilities;
  for (const qla_tensor* t :
       {&args.saved, &args.a_gated, &args.a_inv, &args.g_cumsum, &args.q_rnorm, &args.k_rnorm, &args.h, &args.state_checkpoints})
    can.fused = can.fused && !present(*t);
  return can;
}

}  // namespace qla::cuda
