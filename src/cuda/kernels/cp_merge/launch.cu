// cp_merge - (C1) S_start(j + 1) = M_j S_start(j) + S_ext(j) along each chain of merged boundaries, in fp32, in place.
//   grid: a cluster of four CTAs a work item = (chain, 8 value rows of S^T): value columns of S are independent, so a chain's 16
//   items never meet. S^T (j + 1)[v][k] = sum_i S^T(j)[v][i] M^T[i][k] + S_ext^T[v][k]. CTA r owns columns i = 32 r .. 32 r + 31
//   of the state, hence those rows of M^T, 16 KiB in one piece; it sums over its i for every k and sends each CTA what that one
//   owns. All sums are taken in a fixed order.
//
// Edges              from -> to                    bytes     guards
//   loaded[stages]   bulk copy -> all              16,384    M^T of a boundary
//   sent[n % 2]      all four CTAs -> this one     4,096     parts[n % 2]: shares of entry n, by st.async
// parts[n % 2] is free for entry n + 2 when every CTA has sent its share of entry n + 1, which it does after it has read those of
// entry n. Where a chain starts anew (its first entry, or a start that is known) the four meet.
#include "cuda/kernels/cp_merge/launch.hpp"

#include <algorithm>

#include "cuda/dependent_launch.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/cluster_store.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/shared.cuh"

namespace qla::cuda::cp_merge {
namespace {

constexpr int kCtas = 4, kWarps = 8, kThreads = 32 * kWarps, kRows = 8, kItems = 128 / kRows, kOwn = 128 / kCtas, kStages = 3;
constexpr int kGroups = 4, kTerms = kOwn / kGroups;  // two warps a group: four value rows each, all k
// A quarter of the value heads never forgets, as a rule: four chains of these fill the device once with clusters.
constexpr int64_t kFewChains = 16;
static_assert(kThreads == kRows * kOwn && kWarps == 2 * kGroups);

struct alignas(128) Shared {
  float move[kStages][kOwn][128];      // [i][k]
  float parts[2][kCtas][kRows][kOwn];  // of this CTA's columns
  float partial[kGroups][kRows][128];
  float state[kRows][kOwn];
  uint64_t loaded[kStages], sent[2];
};

// Which of a chain's boundaries have an M, 32 of them from a multiple of 32 on; never its first
__device__ __forceinline__ uint32_t moves_from(const Args& a, MergeChain chain, int first, int lane) {
  const int n = first + lane;
  return __ballot_sync(~0u, n > 0 && n < chain.count && a.transitions[chain.first + n]);
}

// this CTA's share of the next state, for every k, in kGroups partial sums
__device__ __forceinline__ void multiply(Shared& s, int stage, int warp, int lane) {
  const int i0 = warp / 2 * kTerms, v0 = warp % 2 * 4;
  float4 sum[4] = {};
#pragma unroll
  for (int q = 0; q < kTerms; q += 4) {
    float4 x[4];
#pragma unroll
    for (int v = 0; v < 4; v++) x[v] = *reinterpret_cast<const float4*>(&s.state[v0 + v][i0 + q]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 m = *reinterpret_cast<const float4*>(&s.move[stage][i0 + q + i][4 * lane]);
#pragma unroll
      for (int v = 0; v < 4; v++) {
        const float y = i == 0 ? x[v].x : i == 1 ? x[v].y : i == 2 ? x[v].z : x[v].w;
        sum[v].x = fmaf(y, m.x, sum[v].x);
        sum[v].y = fmaf(y, m.y, sum[v].y);
        sum[v].z = fmaf(y, m.z, sum[v].z);
        sum[v].w = fmaf(y, m.w, sum[v].w);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < 4; v++) *reinterpret_cast<float4*>(&s.partial[warp / 2][v0 + v][4 * lane]) = sum[v];
}

__global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads, 2) cp_merge(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t s_all[];
  Shared& s = *reinterpret_cast<Shared*>(s_all);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = int(ptx::cluster_rank());
  const uint32_t loaded = ptx::shared_address(s.loaded), sent = ptx::shared_address(s.sent);
  // this thread adds up value row `warp`, columns 4 lane .. 4 lane + 3, and sends them to the CTA that owns them
  const uint32_t peer = ptx::cluster_address(ptx::shared_address(&s.parts[0][rank][warp][4 * lane % kOwn]), 4 * lane / kOwn),
                 peer_sent = ptx::cluster_address(sent, 4 * lane / kOwn);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) ptx::mbarrier_init(loaded + 8 * i, 1);
    for (int i = 0; i < 2; i++) ptx::mbarrier_init(sent + 8 * i, 1);
    ptx::mbarrier_init_fence();
  }
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  uint32_t phases = 0;             // parity of the next wait for sent[0], sent[1]
  uint32_t issued = 0, taken = 0;  // M's asked for (thread 0) and multiplied
  const int items = a.header->num_merges * kItems, clusters = gridDim.x / kCtas;
  for (int item = blockIdx.x / kCtas; item < items; item += clusters) {
    const MergeChain chain = a.chains[item / kItems];
    const int v0 = item % kItems * kRows;
    // value row `warp`, column `lane` of those this CTA owns: the element that this thread finishes
    float* place = a.states + int64_t(chain.first) * kStateFloats + (v0 + warp) * 128 + rank * kOwn + lane;
    float next = *place;  // S_ext
    uint32_t here = moves_from(a, chain, 0, lane), ahead = moves_from(a, chain, 32, lane);
    int wanted = 0;  // thread 0: M's of boundaries before this one have been asked for
    const auto load_ahead = [&](int n) {
      const uint64_t window = (uint64_t(ahead) << 32 | here) >> n % 32;  // of boundaries n, n + 1, ..
      while (issued - taken < kStages) {
        wanted = max(wanted, n);
        const uint64_t left = wanted - n < 64 ? window >> (wanted - n) : 0;
        if (!left) break;
        wanted += __ffsll(int64_t(left)) - 1;
        const uint32_t stage = issued % kStages;
        ptx::mbarrier_arrive_expect(loaded + 8 * stage, int(sizeof(s.move[0])));
        ptx::bulk_load(ptx::shared_address(s.move[stage]),
                       a.moves + int64_t(chain.first + wanted) * kStateFloats + rank * kOwn * 128, int(sizeof(s.move[0])),
                       loaded + 8 * stage);
        issued++;
        wanted++;
      }
    };
    if (threadIdx.x == 0) load_ahead(0);
#pragma unroll 1
    for (int n = 0; n < chain.count; n++) {
      if (n > 0 && n % 32 == 0) here = ahead, ahead = moves_from(a, chain, n + 32, lane);
      float sum = next;
      if (n + 1 < chain.count) next = place[kStateFloats];
      if (here >> n % 32 & 1) {
        ptx::mbarrier_wait(loaded + 8 * (taken % kStages), taken / kStages & 1);
        multiply(s, int(taken % kStages), warp, lane);
        taken++;
        __syncthreads();
        if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(sent + 8 * (n % 2), int(sizeof(s.parts[0])));
        float4 share = *reinterpret_cast<const float4*>(&s.partial[0][warp][4 * lane]);
#pragma unroll
        for (int g = 1; g < kGroups; g++) {
          const float4 x = *reinterpret_cast<const float4*>(&s.partial[g][warp][4 * lane]);
          share = make_float4(share.x + x.x, share.y + x.y, share.z + x.z, share.w + x.w);
        }
        ptx::store_async(peer + n % 2 * sizeof(s.parts[0]), share, peer_sent + 8 * (n % 2));
        if (threadIdx.x == 0) load_ahead(n + 1 - (n % 32 == 31));  // the window moves on with n
        ptx::mbarrier_wait(sent + 8 * (n % 2), phases >> (n % 2) & 1);
        phases ^= 1u << (n % 2);
#pragma unroll
        for (int r = 0; r < kCtas; r++) sum += s.parts[n % 2][r][warp][lane];
        *place = sum;
      } else {
        ptx::cluster_arrive_relaxed();  // nobody sends what belongs to this run before all are done with the last one
        ptx::cluster_wait();
      }
      s.state[warp][lane] = sum;
      place += kStateFloats;
      __syncthreads();
    }
  }
}

}  // namespace

cudaError_t prepare() {
  const cudaError_t status = prepare_wide();
  return status ? status : cudaFuncSetAttribute(cp_merge, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared)));
}

cudaError_t launch(const Args& args, int64_t most_chains, int multiprocessors, cudaStream_t stream) {
  if (most_chains > kFewChains) return launch_wide(args, most_chains, multiprocessors, stream);
  return launch_dependent(cp_merge, unsigned(std::clamp<int64_t>(most_chains * kItems, 1, multiprocessors / 2)) * kCtas, kThreads,
                          sizeof(Shared), true, stream, args);
}

}  // namespace qla::cuda::cp_merge
