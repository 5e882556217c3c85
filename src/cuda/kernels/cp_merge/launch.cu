// cp_merge - (C1) S_start(j + 1) = M_j S_start(j) + S_ext(j) along each chain of merged boundaries, in fp32, in place.
//   grid: a cluster of four CTAs a work item = (chain, 32 value rows of S^T), a CTA eight of them: value columns of S are
//   independent, so CTAs share M and nothing else. S^T (j + 1)[v][k] = sum_i S^T(j)[v][i] M^T[i][k] + S_ext^T[v][k]; warp w sums
//   over i = 16 w .. 16 w + 15, a half of its lanes for four rows each, and the eight partial sums are added in a fixed order.
//   Few multiprocessors, so that the recurrence of the heads that wait for no merge runs on the others meanwhile.
//
// Roles    warps  owns
//   sums   0-7    eight rows of the state
//   load   8      lane 0: a quarter of each half of M^T, to all four CTAs
//
// Edges            from -> to                      count        guards
//   full[stages]   load of all four -> sums        1 + 32 KiB   half of an M^T: 64 rows, for four of the warps
//   empty[stages]  sums of all four -> load        4 x 4 warps  the same
//   named 1        sums                            256          partial sums written; the next state written
#include "cuda/kernels/cp_merge/launch.hpp"

#include <algorithm>

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/cp_merge/asks.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/shared.cuh"

namespace qla::cuda::cp_merge {
namespace {

constexpr int kCtas = 4, kWarps = 8, kThreads = 32 * (kWarps + 1), kRows = 8, kItems = 128 / (kCtas * kRows),
              kTerms = 128 / kWarps;
constexpr int kHalfRows = 64, kSlice = kHalfRows / kCtas, kStages = 5;
constexpr int kMostClusters = 16;  // of a grid: they leave half of an H200 to others
// A quarter of the value heads never forgets, as a rule: four chains of these are done in one round.
constexpr int64_t kFewChains = 16;

struct alignas(128) Shared {
  float move[kStages][kHalfRows][128];  // [i][k]
  float partial[kWarps][kRows][128];
  float state[kRows][128];
  uint64_t full[kStages], empty[kStages];
};
static_assert(sizeof(Shared) <= 232448);

// Which of a chain's boundaries have an M, 32 of them from a multiple of 32 on; never its first
__device__ __forceinline__ uint32_t moves_from(const Args& a, MergeChain chain, int first, int lane) {
  const int n = first + lane;
  return __ballot_sync(~0u, n > 0 && n < chain.count && a.transitions[chain.first + n]);
}

// half of an M, the h-th one: its stage and the parity of the stage's round
struct Place {
  uint32_t stage, parity;
  __device__ __forceinline__ explicit Place(uint32_t h) : stage(h % kStages), parity(h / kStages & 1) {}
};

// this warp's share of the next state; a lane has four rows and columns 4 l .. 4 l + 3 and 64 + 4 l .. of them, l = lane % 16:
// the state's elements are what a wider tile of rows would read more of, and a load of one for all lanes is not cheaper than
// others
__device__ __forceinline__ void multiply(Shared& s, uint32_t stage, int warp, int lane) {
  constexpr int kTile = kRows / 2;
  const int v0 = lane / 16 * kTile, k = lane % 16 * 4;
  float4 sum[2][kTile] = {};
#pragma unroll
  for (int q = 0; q < kTerms; q += 4) {
    float4 x[kTile];
#pragma unroll
    for (int v = 0; v < kTile; v++) x[v] = *reinterpret_cast<const float4*>(&s.state[v0 + v][warp * kTerms + q]);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float4 m = *reinterpret_cast<const float4*>(&s.move[stage][warp % 4 * kTerms + q + i][64 * half + k]);
#pragma unroll
        for (int v = 0; v < kTile; v++) {
          const float y = i == 0 ? x[v].x : i == 1 ? x[v].y : i == 2 ? x[v].z : x[v].w;
          sum[half][v].x = fmaf(y, m.x, sum[half][v].x);
          sum[half][v].y = fmaf(y, m.y, sum[half][v].y);
          sum[half][v].z = fmaf(y, m.z, sum[half][v].z);
          sum[half][v].w = fmaf(y, m.w, sum[half][v].w);
        }
      }
  }
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int v = 0; v < kTile; v++) *reinterpret_cast<float4*>(&s.partial[warp][v0 + v][64 * half + k]) = sum[half][v];
}

__device__ __forceinline__ void load_moves(Shared& s, const Args& a, int items, int cluster, int clusters, int rank, int lane) {
  const uint32_t full = ptx::shared_address(s.full), empty = ptx::shared_address(s.empty);
  uint32_t h = 0;
  for (int item = cluster; item < items; item += clusters) {
    const MergeChain chain = a.chains[item / kItems];
    for (int from = 0; from < chain.count; from += 32) {
      uint32_t moves = moves_from(a, chain, from, lane);
      while (lane == 0 && moves) {
        const int n = from + __ffs(int(moves)) - 1;
        moves &= moves - 1;
#pragma unroll
        for (int half = 0; half < 2; half++, h++) {
          const Place at(h);
          ptx::mbarrier_wait(empty + 8 * at.stage, at.parity ^ 1);
          ptx::mbarrier_arrive_expect(full + 8 * at.stage, int(sizeof(s.move[0])));
          ptx::bulk_load_multicast(ptx::shared_address(s.move[at.stage][rank * kSlice]),
                                   a.moves + int64_t(chain.first + n) * kStateFloats + (half * kHalfRows + rank * kSlice) * 128,
                                   kSlice * 512, full + 8 * at.stage, (1 << kCtas) - 1);
        }
      }
      __syncwarp();
    }
  }
}

__device__ __forceinline__ void sum_states(Shared& s, const Args& a, int items, int cluster, int clusters, int rank, int warp,
                                           int lane) {
  const uint32_t full = ptx::shared_address(s.full), empty = ptx::shared_address(s.empty);
  const auto meet = [] { ptx::named_sync(1, 32 * kWarps); };
  uint32_t h = warp / 4;
  for (int item = cluster; item < items; item += clusters) {
    const MergeChain chain = a.chains[item / kItems];
    const int v = (item % kItems * kCtas + rank) * kRows + warp;  // the row that this warp finishes
    float4* place = reinterpret_cast<float4*>(a.states + int64_t(chain.first) * kStateFloats + v * 128 + 4 * lane);
    float4 next = *place;  // S_ext
    uint32_t here = moves_from(a, chain, 0, lane), ahead = moves_from(a, chain, 32, lane);
#pragma unroll 1
    for (int n = 0; n < chain.count; n++) {
      if (n > 0 && n % 32 == 0) here = ahead, ahead = moves_from(a, chain, n + 32, lane);
      float4 sum = next;
      if (n + 1 < chain.count) next = place[kStateFloats / 4];
      if (here >> n % 32 & 1) {
        const Place at(h);
        h += 2;
        ptx::mbarrier_wait(full + 8 * at.stage, at.parity);
        multiply(s, at.stage, warp, lane);
        __syncwarp();
        if (lane < kCtas) ptx::mbarrier_arrive_cluster(empty + 8 * at.stage, lane);
        meet();
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
          const float4 x = *reinterpret_cast<const float4*>(&s.partial[w][warp][4 * lane]);
          sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
        }
        *place = sum;
      }
      *reinterpret_cast<float4*>(&s.state[warp][4 * lane]) = sum;
      place += kStateFloats / 4;
      meet();
    }
  }
}

__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads, 1) cp_merge(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t s_all[];
  Shared& s = *reinterpret_cast<Shared*>(s_all);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = int(ptx::cluster_rank());
  if (leaves(a)) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      ptx::mbarrier_init(ptx::shared_address(&s.full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&s.empty[i]), kCtas * kWarps / 2);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::cluster_arrive_relaxed();  // before any CTA writes to another one's stages
  ptx::cluster_wait();
  ptx::grid_dependency_wait();
  const int items = a.header->num_merges * kItems, clusters = gridDim.x / kCtas, cluster = blockIdx.x / kCtas;
  // Only now: what comes next counts on the pre-pass without waiting for it, and the next range writes the header anew.
  ptx::grid_dependency_launch();
  if (warp == kWarps)
    load_moves(s, a, items, cluster, clusters, rank, lane);
  else
    sum_states(s, a, items, cluster, clusters, rank, warp, lane);
  __syncwarp();
  // Nobody leaves while another one may still write to its stages or barriers; what this CTA sent is ordered before, since a CTA
  // of the main pass may take the multiprocessor and its shared memory.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace

cudaError_t prepare() {
  const cudaError_t status = prepare_wide();
  return status ? status : cudaFuncSetAttribute(cp_merge, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared)));
}

cudaError_t launch(const Args& args, int64_t most_chains, int multiprocessors, cudaStream_t stream) {
  if (most_chains > kFewChains) return launch_wide(args, most_chains, multiprocessors, stream);
  return launch_dependent(
      cp_merge, unsigned(std::clamp<int64_t>(most_chains * kItems, 1, std::min(kMostClusters, multiprocessors / kCtas))) * kCtas,
      kThreads, sizeof(Shared), true, stream, args);
}

}  // namespace qla::cuda::cp_merge
