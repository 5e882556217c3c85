// pass_merge - (C1) S_start(j + 1) = M_j S_start(j) + S_ext(j) and (C3) dS_end(j - 1) = M_j^T dS_end(j) + dS_ext(j) along each
//   chain of merged boundaries, in fp32, in place. One M serves both directions: the reverse walk is the adjoint of the forward
//   one. It is there in both layouts, so that both read it row by row (a thread that gathers a column needs 5 us a step instead
//   of 1.1). grid: a work item = (chain, 8 value rows of S^T), by the step of math/merge_step.cuh with B = M^T forward and M in
//   reverse. B of the step after the next is on its way while this one is multiplied.
#include "cuda/kernels/pass_merge/launch.hpp"

#include "cuda/dependent_launch.hpp"
#include "cuda/math/merge_step.cuh"
#include "cuda/ptx/control.cuh"

namespace qla::cuda::pass_merge {
namespace {

using namespace merge_step;

__device__ __forceinline__ void walk(Shared& s, const Args& a, const PassChain& chain, int v0) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = threadIdx.x / 64, col = threadIdx.x % 64 * 2;
  const int64_t step_floats = chain.reverse ? -kStateFloats : kStateFloats;
  float* place = a.states[chain.reverse] + int64_t(chain.base) * kStateFloats + (v0 + row) * 128 + col;
  // step n makes entry base +- (n + 1) by the M of the segment between them
  const float* transition = a.transitions[chain.reverse] + int64_t(chain.base + !chain.reverse) * kStateFloats;
  float4 even[kTerms], odd[kTerms];
  load_transition(even, transition, warp, lane);
  if (chain.count > 1) load_transition(odd, transition + step_floats, warp, lane);
  *reinterpret_cast<float2*>(&s.state[row][col]) = *reinterpret_cast<const float2*>(place);
  float2 next = *reinterpret_cast<const float2*>(place + step_floats);
  __syncthreads();
  const auto step = [&](float4(&m)[kTerms], int n) {
    place += step_floats;
    float2 sum = next;
    if (n + 1 < chain.count) next = *reinterpret_cast<const float2*>(place + step_floats);
    multiply(s, m, warp, lane);
    if (n + 2 < chain.count) load_transition(m, transition + (n + 2) * step_floats, warp, lane);
    __syncthreads();
    add_partials(sum, s, row, col);
    *reinterpret_cast<float2*>(place) = sum;
    *reinterpret_cast<float2*>(&s.state[row][col]) = sum;
    __syncthreads();
  };
#pragma unroll 1
  for (int n = 0; n < chain.count; n += 2) {
    step(even, n);
    if (n + 1 < chain.count) step(odd, n + 1);
  }
}

__global__ void __launch_bounds__(kThreads, 1) pass_merge(const __grid_constant__ Args a) {
  extern __shared__ uint8_t s_all[];
  Shared& s = *reinterpret_cast<Shared*>(s_all);
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  const int items = a.counts->chains * kItems;
  for (int item = blockIdx.x; item < items; item += gridDim.x) walk(s, a, a.chains[item / kItems], item % kItems * kRows);
}

}  // namespace

cudaError_t prepare() {
  return cudaFuncSetAttribute(pass_merge, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared)));
}

cudaError_t launch(const Args& args, int64_t most_chains, int multiprocessors, cudaStream_t stream) {
  return launch_dependent(pass_merge, grid(most_chains, multiprocessors), kThreads, sizeof(Shared), true, stream, args);
}

}  // namespace qla::cuda::pass_merge
