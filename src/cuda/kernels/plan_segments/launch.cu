#include "cuda/kernels/plan_segments/launch.hpp"

#include <algorithm>

#include "cuda/kernels/plan_segments/kernel.cuh"

namespace qla::cuda::segments {

cudaError_t launch(const Args& args, int multiprocessors, cudaStream_t stream) {
  const int64_t work = std::max<int64_t>(args.slots, args.num_seqs);
  const int64_t ctas = std::clamp<int64_t>((work + kThreads - 1) / kThreads, 1, 2 * multiprocessors);
  plan_segments<<<unsigned(ctas), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace qla::cuda::segments
