#include "cuda/kernels/plan_segments/launch.hpp"

#include <algorithm>

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/plan_segments/balanced.cuh"
#include "cuda/kernels/plan_segments/cut.cuh"
#include "cuda/kernels/plan_segments/cut_few.cuh"
#include "cuda/kernels/plan_segments/cut_passes.cuh"
#include "cuda/kernels/plan_segments/few.cuh"
#include "cuda/kernels/plan_segments/kernel.cuh"

namespace qla::cuda::segments {
namespace {
int plan_ctas(const Args& args, int multiprocessors) {
  const int64_t work = std::max<int64_t>(args.slots, args.num_seqs);
  return int(std::clamp<int64_t>((work + kThreads - 1) / kThreads, 1, 2 * multiprocessors));
}

template <class A>
cudaError_t launch_one_cta(void (*kernel)(A), int threads, A& args, cudaStream_t stream) {
  const int64_t bytes = int64_t(args.plan.slots) * args.plan.num_v_heads * int64_t(sizeof(float));
  args.staged = bytes <= kStagedBytes;
  return launch_dependent(kernel, 1, unsigned(threads), args.staged ? size_t(bytes) : 0, true, stream, args);
}
}  // namespace

cudaError_t prepare() {
  for (const void* kernel : {reinterpret_cast<const void*>(cut_items), reinterpret_cast<const void*>(cut_few),
                             reinterpret_cast<const void*>(cut_passes)})
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kStagedBytes));
        e != cudaSuccess)
      return e;
  return cudaSuccess;
}

cudaError_t launch(const Args& args, int multiprocessors, cudaStream_t stream, bool dependent) {
  const auto kernel = args.num_seqs <= kFewSequences ? plan_few : plan_segments;
  return launch_dependent(kernel, unsigned(plan_ctas(args, multiprocessors)), kThreads, 0, dependent, stream, args);
}

cudaError_t launch_with_gates(const Args& args, const gates::Args& gates, int multiprocessors, cudaStream_t stream,
                              bool dependent) {
  gates::Args sized = gates;
  sized.parts = (gates.num_v_heads + gates::kHeads - 1) / gates::kHeads;
  const int ctas = plan_ctas(args, multiprocessors);
  const int64_t gate_ctas = int64_t(args.slots) * sized.parts;
  const auto kernel = args.fused_chunks                ? plan_both_and_gates
                      : args.num_seqs <= kFewSequences ? plan_few_and_gates
                                                       : plan_and_gates;
  const int64_t planning = args.fused_chunks ? int64_t(ctas) * args.ranges : ctas;
  return launch_dependent(kernel, unsigned(planning + gate_ctas), kThreads, 0, dependent, stream, args, sized, ctas);
}

cudaError_t launch_balanced(const Args& args, const gates::Args& gates, cudaStream_t stream, bool dependent) {
  gates::Args sized = gates;
  sized.parts = (gates.num_v_heads + gates::kHeads - 1) / gates::kHeads;
  return launch_dependent(plan_balanced_and_gates, unsigned(1 + int64_t(args.slots) * sized.parts), kThreads, 0, dependent,
                          stream, args, sized);
}

cudaError_t launch_cut(CutArgs& args, cudaStream_t stream) {
  if (few_cut(args.plan.num_seqs, args.most_units, args.plan.slots, args.plan.num_v_heads))
    return launch_one_cta(cut_few, std::max(64, (args.most_units + 63) / 64 * 64), args, stream);  // none without sequences
  args.most_units = std::min(args.most_units, args.most_items);
  return launch_one_cta(cut_items, kCutThreads, args, stream);
}
cudaError_t launch_cut_passes(PassCutArgs& args, cudaStream_t stream) {
  return launch_one_cta(cut_passes, kCutThreads, args, stream);
}

}  // namespace qla::cuda::segments
