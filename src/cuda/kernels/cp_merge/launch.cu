// cp_merge - (C1) S_start(j + 1) = M_j S_start(j) + S_ext(j) along each chain of merged boundaries, in place.
//   grid: a work item = (chain, 32 value rows of S^T), by the loop of walk.cuh: four multiprocessors a chain, so that the
//   recurrence of the heads that wait for no merge runs on the others meanwhile however many chains there are.
#include "cuda/kernels/cp_merge/launch.hpp"

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/cp_merge/asks.cuh"
#include "cuda/kernels/cp_merge/walk.cuh"

namespace qla::cuda::cp_merge {
namespace {

struct Chains {
  const Args& a;
  __device__ __forceinline__ Chain operator()(int n) const {
    const int2 chain = __ldcg(reinterpret_cast<const int2*>(a.chains + n));  // first, count
    const int64_t at = int64_t(chain.x) * kStateFloats;
    return {a.states + at, a.moves + int64_t(chain.x) * transition::kBytes, chain.y, a.transitions + chain.x};
  }
};

__global__ void __launch_bounds__(kThreads, 1) cp_merge(const __grid_constant__ Args a) {
  extern __shared__ uint8_t s_all[];
  if (leaves(a)) return;
  const Stages stages{(ptx::shared_address(s_all) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    stages.edge().init(1, kChainWarps);
    stages.ext_edge().init(1, kChainWarps);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  // The pre-pass lets this kernel begin when it has waited for the lists itself; past L1, which may hold the last call's.
  const int items = ptx::load_relaxed(&a.header->num_merges) * kItems;
  const auto ready = [] {
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();  // only now: what comes next counts on the pre-pass without waiting for it
  };
  walk(Chains{a}, items, ready, stages);
}

}  // namespace

cudaError_t prepare() { return cudaFuncSetAttribute(cp_merge, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes); }

cudaError_t launch(const Args& args, int64_t most_chains, int multiprocessors, cudaStream_t stream) {
  const auto ctas = unsigned(std::clamp<int64_t>(most_chains * kItems, 1, multiprocessors));
  return launch_dependent(cp_merge, ctas, kThreads, kSharedBytes, true, stream, args);
}

}  // namespace qla::cuda::cp_merge
