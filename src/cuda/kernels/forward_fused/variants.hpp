// Kernel arguments, and the element types' entry points (defined in inst_*.cu).
#pragma once

#include "cuda/kernels/chunk_gates/config.hpp"
#include "cuda/kernels/forward/variants.hpp"
#include "cuda/kernels/plan_segments/config.hpp"

namespace qla::cuda {

// FusedArgs::direct: no kernel has been before, the item comes from the boundaries in `plan` and its gate vectors by `gates`
inline constexpr int32_t kDirect = 1, kDirectPlain = 2;  // plain: fp32 gate and beta, to be taken as they are

struct FusedArgs : ForwardArgs {
  int32_t direct;
  segments::Args plan;  // boundaries and sizes
  gates::Args gates;
};

template <typename T, bool Norm, bool Save, bool Cut>
cudaError_t prepare_fused_type();
template <typename T, bool Norm, bool Save, bool Cut>
cudaError_t launch_fused_type(const FusedArgs& args, int grid, cudaStream_t stream);

}  // namespace qla::cuda
