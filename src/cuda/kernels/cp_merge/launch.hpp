// cp_merge: launch.
#pragma once

#include <cuda_runtime.h>

#include "cuda/formats.hpp"

namespace qla::cuda::cp_merge {

cudaError_t prepare();  // once a device

struct Args {
  const PlanHeader* header;  // before the wait: whether anything is cut; then num_merges: chains
  const MergeChain* chains;
  const uint8_t* transitions;  // [entry]
  float* states;               // [entry][V][K]: S_ext, then the start states
  const uint8_t* moves;        // [entry] M, as the pre-pass leaves it from S = I (tile/transition.cuh)
  bool lets_begin;             // if nothing is, the next kernel may begin at once: it looks, too, and waits then
};
// most_chains: bound from shapes
cudaError_t launch(const Args& args, int64_t most_chains, int multiprocessors, cudaStream_t stream);

}  // namespace qla::cuda::cp_merge
