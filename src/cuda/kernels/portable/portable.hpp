// The forward recurrence by mma.sync: for tests, and for targets to come.
#pragma once

#include "cuda/kernels/forward/launch.hpp"

namespace qla::cuda::portable {

cudaError_t launch(const ForwardParams& params, int multiprocessors, cudaStream_t stream);

}  // namespace qla::cuda::portable
