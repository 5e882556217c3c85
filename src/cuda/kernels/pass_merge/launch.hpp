// pass_merge: launch.
#pragma once

#include <cuda_runtime.h>

#include "cuda/formats.hpp"

namespace qla::cuda::pass_merge {

cudaError_t prepare();  // once a device

struct Args {
  const PassCounts* counts;
  const PassChain* chains;
  float* states[2];             // [entry][V][K] of the state pass and the reverse pass: S_ext, dS_ext, then the start states
  const float* transitions[2];  // [entry][K][K]: M transposed, as the state pass leaves it from S = I, and M
};
// most_chains: bound from shapes
cudaError_t launch(const Args& args, int64_t most_chains, int multiprocessors, cudaStream_t stream);

}  // namespace qla::cuda::pass_merge
