// Kernel arguments, and the element types' entry points (defined in inst_*.cu).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "launch.hpp"

namespace qla::cuda {

struct ForwardArgs {
  CUtensorMap q, k, v, o;  // dims {128, heads, tokens, batch}, box {64, 1, 64, 1}
  ForwardParams p;
  int64_t row_tokens;  // tokens of a row of the maps' batch dimension
};

template <typename T>
cudaError_t prepare_forward_type();
template <typename T>
cudaError_t launch_forward_type(const ForwardArgs& args, int grid, cudaStream_t stream);

}  // namespace qla::cuda
