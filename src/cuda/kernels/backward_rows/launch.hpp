// backward_rows: launches.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/backward_rows/config.hpp"

namespace qla::cuda::backward_rows {

cudaError_t launch_copy(const CopyArgs& args, cudaStream_t stream);
cudaError_t launch_padding(const PaddingArgs& args, int multiprocessors, cudaStream_t stream);
cudaError_t launch_reduce(const ReduceArgs& args, cudaStream_t stream);

}  // namespace qla::cuda::backward_rows
