// cp_merge - (C1) S_start(j + 1) = M_j S_start(j) + S_ext(j) along each chain of merged boundaries, in fp32, in place.
//   grid: a work item = (chain, 4 value rows of S^T): value columns of S are independent, so a chain's 32 items never meet.
//   S^T (j + 1)[v][k] = sum_i S^T(j)[v][i] M^T[i][k] + S_ext^T[v][k]. Warp w sums over i = 8 w .. 8 w + 7, lane l has k = 4 l ..
//   4 l + 3; the sixteen partial sums are added in a fixed order. M of the next boundary is on its way while this one is
//   multiplied.
#include "cuda/kernels/cp_merge/launch.hpp"

#include <algorithm>

#include "cuda/ptx/control.cuh"

namespace qla::cuda::cp_merge {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps, kRows = 4, kItems = 128 / kRows, kTerms = 128 / kWarps;
static_assert(kThreads == kRows * 128);

struct Shared {
  float state[kRows][128];
  float partial[kWarps][kRows][128];
};

__device__ __forceinline__ void load_move(float4 (&m)[kTerms], const Args& a, int entry, bool needed, int warp, int lane) {
  if (!needed) return;
  const float4* from = reinterpret_cast<const float4*>(a.moves + int64_t(entry) * kStateFloats) + warp * kTerms * 32 + lane;
#pragma unroll
  for (int i = 0; i < kTerms; i++) m[i] = from[i * 32];
}

__global__ void __launch_bounds__(kThreads) cp_merge(const __grid_constant__ Args a) {
  extern __shared__ uint8_t s_all[];
  Shared& s = *reinterpret_cast<Shared*>(s_all);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  const int items = a.header->num_merges * kItems;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const MergeChain chain = a.chains[item / kItems];
    const int v0 = item % kItems * kRows, row = threadIdx.x / 128, col = threadIdx.x % 128;
    float4 move[kTerms];
    load_move(move, a, chain.first, a.transitions[chain.first], warp, lane);
    float next = a.states[int64_t(chain.first) * kStateFloats + (v0 + row) * 128 + col];  // S_ext
    for (int n = 0; n < chain.count; n++) {
      const int entry = chain.first + n;
      float sum = next;
      if (n + 1 < chain.count) next = a.states[int64_t(entry + 1) * kStateFloats + (v0 + row) * 128 + col];
      if (a.transitions[entry]) {
        float4 part[kRows];
#pragma unroll
        for (int v = 0; v < kRows; v++) {
          part[v] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
          for (int i = 0; i < kTerms; i += 4) {
            const float4 x = *reinterpret_cast<const float4*>(&s.state[v][warp * kTerms + i]);
            const float coefficient[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int q = 0; q < 4; q++) {
              part[v].x = fmaf(coefficient[q], move[i + q].x, part[v].x);
              part[v].y = fmaf(coefficient[q], move[i + q].y, part[v].y);
              part[v].z = fmaf(coefficient[q], move[i + q].z, part[v].z);
              part[v].w = fmaf(coefficient[q], move[i + q].w, part[v].w);
            }
          }
        }
        if (n + 1 < chain.count) load_move(move, a, entry + 1, a.transitions[entry + 1], warp, lane);
#pragma unroll
        for (int v = 0; v < kRows; v++) *reinterpret_cast<float4*>(&s.partial[warp][v][4 * lane]) = part[v];
        __syncthreads();
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
          sum += s.partial[w][row][col];
        }
        a.states[int64_t(entry) * kStateFloats + (v0 + row) * 128 + col] = sum;
      } else if (n + 1 < chain.count) {
        load_move(move, a, entry + 1, a.transitions[entry + 1], warp, lane);
      }
      s.state[row][col] = sum;
      __syncthreads();
    }
  }
}

}  // namespace

cudaError_t prepare() { return cudaFuncSetAttribute(cp_merge, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared))); }

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
  return cudaLaunchKernelEx(&config, cp_merge, args);
}

}  // namespace qla::cuda::cp_merge
