// What the kernels in this tree can do; the planner asks for nothing else. No CUDA types: src/api prints plans where there is no
// CUDA, too.
#pragma once

#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "core/status.hpp"
#include "core/tensor_view.hpp"
#include "plan/choose.hpp"

namespace qla::cuda {

inline constexpr plan::Capabilities kForwardCapabilities{.fused = true, .v_split = true, .segments = true};

// What every kernel asks of q, k and v, on whatever device.
inline void check_served(const Problem& p) {
  QLA_SUPPORTED(p.dtype == QLA_BFLOAT16 || p.dtype == QLA_FLOAT16, "q: expected bfloat16 or float16 on CUDA, got ",
                dtype_name(p.dtype), "; cast q, k and v, or use CPU tensors");
  QLA_SUPPORTED(p.k_dim == 128 && p.v_dim == 128, "q, v: expected head sizes K = V = 128 on CUDA, got K = ", p.k_dim,
                ", V = ", p.v_dim, "; pad the heads to 128, or use CPU tensors");
}

// .. for one call: of the intra-chunk stage the fused form leaves nothing in memory but what backward reuses, of sequences that
// it walks; it stores no states on the way.
inline plan::Capabilities forward_capabilities(const qla_gdn_forward_args& args) {
  plan::Capabilities can = kForwardCapabilities;
  for (const qla_tensor* t :
       {&args.a_gated, &args.a_inv, &args.g_cumsum, &args.q_rnorm, &args.k_rnorm, &args.h, &args.state_checkpoints})
    can.fused = can.fused && !present(*t);
  if (present(args.saved)) can.fused = can.fused && !present(args.state_indices);
  return can;
}

}  // namespace qla::cuda
