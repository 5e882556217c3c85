// cp_merge_wide - (C1) S_start(j + 1) = M_j S_start(j) + S_ext(j) along each chain of merged boundaries, in fp32, in place.
//   grid: a work item = (chain, 8 value rows of S^T): value columns of S are independent, so a chain's 16 items never meet.
//   S^T (j + 1)[v][k] = sum_i S^T(j)[v][i] M^T[i][k] + S_ext^T[v][k]. Warp w sums over i = 8 w .. 8 w + 7, lane l has k = 4 l ..
//   4 l + 3; the sixteen partial sums are added in a fixed order. M of the next boundary is on its way while this one is
//   multiplied. For many chains, which keep all multiprocessors busy so; few of them finish sooner in cp_merge's clusters.
#include "cuda/kernels/cp_merge/launch.hpp"

#include <algorithm>

#include "cuda/ptx/control.cuh"

namespace qla::cuda::cp_merge {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps, kRows = 8, kItems = 128 / kRows, kTerms = 128 / kWarps;
static_assert(kThreads * 2 == kRows * 128);  // a thread finishes two neighbouring sums

struct Shared {
  float state[kRows][128];
  float partial[kWarps][kRows][128];
};

// M of the chain's boundary n, if it has one; all 512 threads together read its 64 KiB in order
__device__ __forceinline__ void load_move(float4 (&m)[kTerms], const Args& a, MergeChain chain, int n, int warp, int lane) {
  if (n >= chain.count || !a.transitions[chain.first + n]) return;
  const float4* from =
      reinterpret_cast<const float4*>(a.moves + int64_t(chain.first + n) * kStateFloats) + warp * kTerms * 32 + lane;
#pragma unroll
  for (int i = 0; i < kTerms; i++) m[i] = from[i * 32];
}
// this warp's share of the product, for all rows, to its partial sums
__device__ __forceinline__ void multiply(Shared& s, const float4 (&move)[kTerms], int warp, int lane) {
#pragma unroll
  for (int v = 0; v < kRows; v++) {
    float4 part = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kTerms; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(&s.state[v][warp * kTerms + i]);
      const float coefficient[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int q = 0; q < 4; q++) {
        part.x = fmaf(coefficient[q], move[i + q].x, part.x);
        part.y = fmaf(coefficient[q], move[i + q].y, part.y);
        part.z = fmaf(coefficient[q], move[i + q].z, part.z);
        part.w = fmaf(coefficient[q], move[i + q].w, part.w);
      }
    }
    *reinterpret_cast<float4*>(&s.partial[warp][v][4 * lane]) = part;
  }
}

__global__ void __launch_bounds__(kThreads, 1) cp_merge_wide(const __grid_constant__ Args a) {
  extern __shared__ uint8_t s_all[];
  Shared& s = *reinterpret_cast<Shared*>(s_all);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  const int items = a.header->num_merges * kItems;
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
#pragma unroll
          for (int w = 0; w < kWarps; w++) {
            const float2 x = *reinterpret_cast<const float2*>(&s.partial[w][row][col]);
            sum.x += x.x;
            sum.y += x.y;
          }
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
  return cudaLaunchKernelEx(&config, cp_merge_wide, args);
}

}  // namespace qla::cuda::cp_merge
