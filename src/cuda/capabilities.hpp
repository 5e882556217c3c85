// What the kernels in this tree can do; the planner asks for nothing else. No CUDA types: src/api prints plans where there is no
// CUDA, too.
#pragma once

#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "core/status.hpp"
#include "core/tensor_view.hpp"
#include "plan/choose.hpp"

namespace qla::cuda {

inline constexpr plan::Capabilities kForwardCapabilities{.fused = true, .v_split = true, .segments = true, .mixed = true};

// What every kernel asks of q, k and v, on whatever device.
inline void check_served(const Problem& p) {
  QLA_SUPPORTED(p.dtype == QLA_BFLOAT16 || p.dtype == QLA_FLOAT16, "q: expected bfloat16 or float16 on CUDA, got ",
                dtype_name(p.dtype), "; cast q, k and v, or use CPU tensors");
  QLA_SUPPORTED(p.k_dim == 128 && p.v_dim == 128, "q, v: expected head sizes K = V = 128 on CUDA, got K = ", p.k_dim,
                ", V = ", p.v_dim, "; pad the heads to 128, or use CPU tensors");
}

// Outputs that are made of what the intra-chunk stage leaves in memory, by chunk_export; the ungated A is made anew.
inline bool exports_intra(const qla_gdn_forward_args& args) {
  return present(args.a_gated) || present(args.g_cumsum) || present(args.q_rnorm) || present(args.k_rnorm);
}
inline bool outputs_of_intra(const qla_gdn_forward_args& args) { return exports_intra(args) || present(args.a_inv); }

// .. for one call: the fused form keeps what it makes of the chunks that it walks (decision 0079), but no states on the way.
inline plan::Capabilities forward_capabilities(const qla_gdn_forward_args& args) {
  plan::Capabilities can = kForwardCapabilities;
  const bool keeps = present(args.saved) || exports_intra(args), skips = present(args.state_indices);
  can.fused = can.fused && !present(args.h) && !present(args.state_checkpoints) && !(keeps && skips);
  can.mixed = can.mixed && !present(args.h) && !present(args.state_checkpoints) && !outputs_of_intra(args);
  return can;
}

}  // namespace qla::cuda
