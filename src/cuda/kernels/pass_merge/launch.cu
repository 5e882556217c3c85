// pass_merge - (C1) S_start(j + 1) = M_j S_start(j) + S_ext(j) and (C3) dS_end(j - 1) = M_j^T dS_end(j) + dS_ext(j) along each
// chain
//   of merged boundaries, in fp32, in place. One M serves both directions: the reverse walk is the adjoint of the forward one. It
//   is there in both layouts, so that both read it row by row (a thread that gathers a column needs 5 us a step instead of 1.1).
//   grid: a work item = (chain, 8 value rows of S^T): value columns of S are independent, so a chain's 16 items never meet.
//   S^T'[v][k] = sum_i S^T[v][i] B[i][k] + ext, B = M^T forward and M in reverse. Warp w sums over i = 8 w .. 8 w + 7, lane l has
//   k = 4 l .. 4 l + 3; the sixteen partial sums are added in a fixed order. B of the step after the next is on its way while
//   this one is multiplied.
#include "cuda/kernels/pass_merge/launch.hpp"

#include <algorithm>

#include "cuda/ptx/control.cuh"

namespace qla::cuda::pass_merge {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps, kRows = 8, kItems = 128 / kRows, kTerms = 128 / kWarps;
static_assert(kThreads * 2 == kRows * 128);  // a thread finishes two neighbouring sums

struct Shared {
  float state[kRows][128];
  float partial[kWarps][kRows][128];
};

// all 512 threads together read the 64 KiB in order
__device__ __forceinline__ void load_transition(float4 (&m)[kTerms], const float* from, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kTerms; i++) m[i] = reinterpret_cast<const float4*>(from)[(warp * kTerms + i) * 32 + lane];
}
// this warp's share of the product, for all rows, to its partial sums
__device__ __forceinline__ void multiply(Shared& s, const float4 (&m)[kTerms], int warp, int lane) {
#pragma unroll
  for (int v = 0; v < kRows; v++) {
    float4 part = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kTerms; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(&s.state[v][warp * kTerms + i]);
      const float coefficient[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int q = 0; q < 4; q++) {
        part.x = fmaf(coefficient[q], m[i + q].x, part.x);
        part.y = fmaf(coefficient[q], m[i + q].y, part.y);
        part.z = fmaf(coefficient[q], m[i + q].z, part.z);
        part.w = fmaf(coefficient[q], m[i + q].w, part.w);
      }
    }
    *reinterpret_cast<float4*>(&s.partial[warp][v][4 * lane]) = part;
  }
}

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
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const float2 x = *reinterpret_cast<const float2*>(&s.partial[w][row][col]);
      sum.x += x.x;
      sum.y += x.y;
    }
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
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(std::clamp<int64_t>(most_chains * kItems, 1, 2 * multiprocessors)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, pass_merge, args);
}

}  // namespace qla::cuda::pass_merge
