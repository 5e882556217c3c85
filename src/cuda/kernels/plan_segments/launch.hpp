// plan_segments: launches. CutArgs and PassCutArgs are in cut.hpp.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels/chunk_gates/config.hpp"
#include "cuda/kernels/plan_segments/config.hpp"

namespace qla::cuda::segments {

cudaError_t prepare();  // once a device
// dependent: the call's first kernel may set itself up while what is before it in the stream still ends; it waits for that. Only
// where every kernel of the call waits for the one before it ahead of its own first look at memory: what begins sooner counts on
// a launch in stream order before it, after which no L1 holds what lay there before.
cudaError_t launch(const Args& args, int multiprocessors, cudaStream_t stream, bool dependent = false);
// .. and in the same launch the fused forward's gate vectors
cudaError_t launch_with_gates(const Args& args, const gates::Args& gates, int multiprocessors, cudaStream_t stream,
                              bool dependent = false);
// .. a fused call's list by McNaughton's rule: args.balanced_shares more items than sequences and heads
cudaError_t launch_balanced(const Args& args, const gates::Args& gates, cudaStream_t stream, bool dependent = false);
// after chunk_intra, where sequences are cut
struct CutArgs;
cudaError_t launch_cut(CutArgs& args, cudaStream_t stream);
struct PassCutArgs;
cudaError_t launch_cut_passes(PassCutArgs& args, cudaStream_t stream);

}  // namespace qla::cuda::segments
