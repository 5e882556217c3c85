// plan_segments: launch.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels/plan_segments/config.hpp"

namespace qla::cuda::segments {

cudaError_t launch(const Args& args, int multiprocessors, cudaStream_t stream);

}  // namespace qla::cuda::segments
