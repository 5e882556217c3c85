// cp_merge_wide - (C1) S_start(j + 1) = M_j S_start(j) + S_ext(j) along each chain of merged boundaries, in fp32, in place.
//   grid: a work item = (chain, 8 value rows of S^T), by the step of math/merge_step.cuh with B = M^T. M of the next boundary is
//   on its way while this one is multiplied. For many chains, which keep all multiprocessors busy so; few of them finish sooner
//   in cp_merge's clusters.
#include "cuda/kernels/cp_merge/launch.hpp"

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/cp_merge/asks.cuh"
#include "cuda/math/merge_step.cuh"
#include "cuda/ptx/control.cuh"

namespace qla::cuda::cp_merge {
namespace {

using namespace merge_step;

// M of the chain's boundary n, if it has one
__device__ __forceinline__ void load_move(float4 (&m)[kTerms], const Args& a, MergeChain chain, int n, int warp, int lane) {
  if (n >= chain.count || !a.transitions[chain.first + n]) return;
  load_transition(m, a.moves + int64_t(chain.first + n) * kStateFloats, warp, lane);
}

__global__ void __launch_bounds__(kThreads, 1) cp_merge_wide(const __grid_constant__ Args a) {
  extern __shared__ uint8_t s_all[];
  Shared& s = *reinterpret_cast<Shared*>(s_all);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (leaves(a)) return;
  ptx::grid_dependency_wait();
  const int items = a.header->num_merges * kItems;
  // Only now: what comes next counts on the pre-pass without waiting for it, and the next range writes the header anew.
  ptx::grid_dependency_launch();
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const MergeChain chain = a.chains[item / kItems];
    const int v0 = item % kItems * kRows, row = threadIdx.x / 64, col = threadIdx.x % 64 * 2;
    float4 moves[2][kTerms];  // of this boundary and the next; the one after that is on its way
    float2* place = reinterpret_cast<float2*>(a.states + int64_t(chain.first) * kStateFloats + (v0 + row) * 128 + col);
    float2 next = *place;  // S_ext
    load_move(moves[0], a, chain, 0, warp, lane);
    load_move(moves[1], a, chain, 1, warp, lane);
#pragma unroll 1
    for (int pair = 0; pair < chain.count; pair += 2) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int n = pair + half;
        if (n >= chain.count) break;
        float2 sum = next;
        if (n + 1 < chain.count) next = place[kStateFloats / 2];
        if (a.transitions[chain.first + n]) {
          multiply(s, moves[half], warp, lane);
          load_move(moves[half], a, chain, n + 2, warp, lane);
          __syncthreads();
          add_partials(sum, s, row, col);
          *place = sum;
        } else {
          load_move(moves[half], a, chain, n + 2, warp, lane);
        }
        *reinterpret_cast<float2*>(&s.state[row][col]) = sum;
        place += kStateFloats / 2;
        __syncthreads();
      }
    }
  }
}

}  // namespace

cudaError_t prepare_wide() {
  return cudaFuncSetAttribute(cp_merge_wide, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared)));
}

cudaError_t launch_wide(const Args& args, int64_t most_chains, int multiprocessors, cudaStream_t stream) {
  return launch_dependent(cp_merge_wide, grid(most_chains, multiprocessors), kThreads, sizeof(Shared), true, stream, args);
}

}  // namespace qla::cuda::cp_merge
