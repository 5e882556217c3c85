// The element types' entry points (defined in inst_*.cu).
#pragma once

#include "cuda/kernels/forward/variants.hpp"

namespace qla::cuda {

template <typename T>
cudaError_t prepare_fused_type();
template <typename T>
cudaError_t launch_fused_type(const ForwardArgs& args, int grid, cudaStream_t stream);

}  // namespace qla::cuda
