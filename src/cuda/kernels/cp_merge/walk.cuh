// The loop of cp_merge: a CTA walks a chain of merged boundaries with 32 value rows of S^T, which no other rows meet.
//   (C1)  S^T(j + 1)[v][k] = sum_i S^T(j)[v][i] B[i][k] + S_ext^T[v][k],  B = M^T
//
// Products by wgmma of numbers split in two: x = hi + lo, bf16 each, 16 bits of x. A warpgroup has 64 rows and we 32: row g of a
// warp's 16 is hi, row g + 8 lo of the same value row, so that a lane has both, their products with B add up in the lane, and the
// sum, split again, is the next step's left operand inside the thread: the state never leaves its registers. B's halves come one
// behind the other: all four products are summed in fp32. The relative error is 2^-18 an operand; what is merged has been through
// bf16 products (2^-9).
//
// Roles       warps  regs  owns
//   chain     0-3    232   the state
//   split     4-11   112   B of the steps: memory -> registers, a step ahead -> hi and lo in shared memory
//   hand      12     24    S_ext, row by row; the proxy fence behind B's parts, which would wait for the loads of who wrote them
//
// Edges               from -> to           count           guards
//   written[stages]   split -> hand        8 (warps)       hi and lo of a B
//   full[stages]      hand -> chain        2 + 16 KiB      the same and S_ext
//   empty[stages]     chain -> split, hand 4 (warps)       both
//
// A stage: hi, then lo of B, each two 64-column panels of 128 rows (i) in the 128-byte swizzle, read MN-major; S_ext, 32 rows of
// 528 bytes, so that eight rows begin at different banks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/formats.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sync/ring.cuh"
#include "cuda/tile/pack.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda::cp_merge {

inline constexpr int kRows = 32, kItems = 128 / kRows;  // a work item = (chain, rows)
inline constexpr int kChainWarps = 4, kSplitWarps = 8, kHandWarp = kChainWarps + kSplitWarps;
inline constexpr int kThreads = 32 * (kHandWarp + 4);  // registers are shared out by warpgroups
inline constexpr int kRegsChain = 232, kRegsSplit = 112, kRegsHand = 24;
static_assert(kRegsChain + 2 * kRegsSplit + kRegsHand <= 4 * 128);
inline constexpr int kStages = 2, kPanelBytes = 16384, kLowBytes = 2 * kPanelBytes, kExtBytes = 2 * kLowBytes, kExtRowBytes = 528,
                     kStageBytes = kExtBytes + (kRows * kExtRowBytes + 1023) / 1024 * 1024;
inline constexpr int kRowsOfB = 128 / kSplitWarps;                                   // of a split warp
inline constexpr int kSharedBytes = kStages * kStageBytes + 3 * 8 * kStages + 1024;  // 1,024: alignment
static_assert(kSharedBytes <= 232448);

struct Chain {
  float* states;               // entry 0: its start state; later ones: S_ext, which the start states replace
  const float* moves;          // B of entry 0, if it had one
  int32_t count;               // entries
  const uint8_t* transitions;  // [entry]: this one has a B, else it is a start state already
};

struct Stages {
  uint32_t base;
  __device__ __forceinline__ uint32_t stage(int s) const { return base + s * kStageBytes; }
  __device__ __forceinline__ uint32_t full(int s) const { return base + kStages * kStageBytes + 8 * s; }
  __device__ __forceinline__ uint32_t empty(int s) const { return full(kStages + s); }
  __device__ __forceinline__ uint32_t written(int s) const { return full(2 * kStages + s); }
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < kStages; s++) {
      ptx::mbarrier_init(full(s), 2);
      ptx::mbarrier_init(empty(s), kChainWarps);
      ptx::mbarrier_init(written(s), kSplitWarps);
    }
  }
};

// Which of entries first .. first + 31 have a B; never the first one
__device__ __forceinline__ uint32_t moves_from(const Chain& chain, int first, int lane) {
  const int n = first + lane;
  return __ballot_sync(~0u, n > 0 && n < chain.count && __ldcg(chain.transitions + n));
}

// The steps of this CTA's items, in order.
template <class Chains>
struct Steps {
  const Chains& chains;
  int items, item, first = 0, entry = 0;
  uint32_t left = 0;
  Chain chain{};
  __device__ __forceinline__ Steps(const Chains& of, int n) : chains(of), items(n), item(int(blockIdx.x) - int(gridDim.x)) {}
  // to the next one, if there is one
  __device__ __forceinline__ bool next(int lane) {
    while (left == 0) {
      first += 32;
      if (first >= chain.count) {
        item += int(gridDim.x);
        if (item >= items) return false;
        chain = chains(item / kItems);
        first = 0;
      }
      left = moves_from(chain, first, lane);
    }
    entry = first + __ffs(int(left)) - 1;
    left &= left - 1;
    return true;
  }
};

// hi and lo of two numbers
__device__ __forceinline__ void split(uint32_t& hi, uint32_t& lo, float x, float y) {
  hi = pack<__nv_bfloat16>(x, y);
  const float2 taken = unpack<__nv_bfloat16>(hi);
  lo = pack<__nv_bfloat16>(x - taken.x, y - taken.y);
}

template <class Chains, class Ready>
__device__ __forceinline__ void split_role(const Chains& chains, int items, const Ready& ready, Stages s, int warp, int lane) {
  Steps<Chains> steps(chains, items);
  Ring<kStages> ring;
  const int at = warp * kRowsOfB * 128 + 4 * lane;  // of B: a warp reads a row at once
  const uint32_t to = uint32_t(lane / 16 * kPanelBytes + warp * kRowsOfB * 128), in_row = lane % 16 * 8;
  float4 b[kRowsOfB];
  bool more = steps.next(lane);
  ready();
  if (!more) return;
  const float* from = steps.chain.moves + int64_t(steps.entry) * kStateFloats + at;
#pragma unroll
  for (int r = 0; r < kRowsOfB; r++) b[r] = __ldcg(reinterpret_cast<const float4*>(from + r * 128));
  while (more) {
    more = steps.next(lane);
    if (more) from = steps.chain.moves + int64_t(steps.entry) * kStateFloats + at;  // behind the last one it is read once more
    const uint32_t stage = s.stage(ring.stage) + to;
#pragma unroll
    for (int r = 0; r < kRowsOfB; r++) {
      // four times: over a loop ptxas moves nothing, else it would split all rows first
      if (r % 4 == 0) ptx::mbarrier_wait(s.empty(ring.stage), ring.phase ^ 1);
      uint32_t hi[2], lo[2];
      split(hi[0], lo[0], b[r].x, b[r].y);
      split(hi[1], lo[1], b[r].z, b[r].w);
      b[r] = __ldcg(reinterpret_cast<const float4*>(from + r * 128));
      const uint32_t place = stage + r * 128 + (in_row ^ uint32_t(r % 8) << 4);
      ptx::sts2(place, __uint_as_float(hi[0]), __uint_as_float(hi[1]));
      ptx::sts2(place + kLowBytes, __uint_as_float(lo[0]), __uint_as_float(lo[1]));
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(s.written(ring.stage));
    ring.advance();
  }
}

template <class Chains, class Ready>
__device__ __forceinline__ void hand_role(const Chains& chains, int items, const Ready& ready, Stages s, int lane) {
  Steps<Chains> steps(chains, items);
  Ring<kStages> ring;
  bool more = steps.next(lane);
  ready();
  while (more) {
    const float* const row =
        steps.chain.states + int64_t(steps.entry) * kStateFloats + (steps.item % kItems * kRows + lane) * 128;
    ptx::mbarrier_wait(s.empty(ring.stage), ring.phase ^ 1);
    if (lane == 0) ptx::mbarrier_arrive_expect(s.full(ring.stage), kRows * 512);
    __syncwarp();
    ptx::bulk_load(s.stage(ring.stage) + kExtBytes + lane * kExtRowBytes, row, 512, s.full(ring.stage));
    more = steps.next(lane);
    ptx::mbarrier_wait(s.written(ring.stage), ring.phase);
    ptx::proxy_fence();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(s.full(ring.stage));
    ring.advance();
  }
}

__device__ __forceinline__ uint32_t same_in_all_lanes(uint32_t x) { return __reduce_or_sync(~0u, x); }

// Entries first .. last, all but the first with a B. rows: a lane's row of entry 0, from its columns 2 (lane % 4), + 1 of each 8;
// ext: the same in a stage.
__device__ __forceinline__ void walk_run(float* rows, uint32_t ext, int first, int last, Stages s, Ring<kStages>& ring,
                                         int lane) {
  uint32_t a[32];
  float* row = rows + int64_t(first) * kStateFloats;
#pragma unroll
  for (int n = 0; n < 16; n++) {
    const float2 x = __ldcg(reinterpret_cast<const float2*>(row + 8 * n));
    split(a[2 * n], a[2 * n + 1], x.x, x.y);
  }
  ptx::pin(a);
#pragma unroll 1
  for (int n = first; n < last; n++) {
    float d[64];
    row += kStateFloats;
    ptx::mbarrier_wait(s.full(ring.stage), ring.phase);
    const uint32_t b = same_in_all_lanes(s.stage(ring.stage));
    ptx::wgmma_fence();
#pragma unroll
    for (int w = 0; w < 16; w++)
      ptx::wgmma_rs<__nv_bfloat16, 1>(d, a + w % 8 * 4, descriptor_mn_major(b + w / 8 * kLowBytes + w % 8 * 2048, kPanelBytes),
                                      w > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    float2 x[16];
#pragma unroll
    for (int k = 0; k < 16; k++) {
      const float2 e = ptx::lds2(b + ext + 32 * k);
      x[k] = make_float2(d[4 * k] + d[4 * k + 2] + e.x, d[4 * k + 1] + d[4 * k + 3] + e.y);
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(s.empty(ring.stage));
#pragma unroll
    for (int k = 0; k < 16; k++) split(a[2 * k], a[2 * k + 1], x[k].x, x[k].y);
    ptx::pin(a);
#pragma unroll
    for (int k = 0; k < 16; k++) *reinterpret_cast<float2*>(row + 8 * k) = x[k];
    ring.advance();
  }
}

template <class Chains, class Ready>
__device__ __forceinline__ void chain_role(const Chains& chains, int items, const Ready& ready, Stages s, int warp, int lane) {
  Ring<kStages> ring;
  Chain chain{};
  uint32_t here = 0;
  const auto take = [&](int item) {
    if (item >= items) return;
    chain = chains(item / kItems);
    here = moves_from(chain, 0, lane);
  };
  const int row = warp * 8 + lane / 4;
  take(blockIdx.x);
  ready();
  for (int item = blockIdx.x; item < items; take(item += gridDim.x)) {
    float* const rows = chain.states + (item % kItems * kRows + row) * 128 + lane % 4 * 2;
    const uint32_t ext = kExtBytes + row * kExtRowBytes + lane % 4 * 8;
    for (int first = 0; first < chain.count;) {
      int end = first + 1;
      for (; end < chain.count; end++) {
        if (end % 32 == 0) here = moves_from(chain, end, lane);
        if (!(here >> end % 32 & 1)) break;
      }
      if (end > first + 1) walk_run(rows, ext, first, end - 1, s, ring, lane);
      first = end;
    }
  }
}

// By all threads of a CTA. chains(n): the n-th chain; the lists that it reads are there. ready(): then states and moves are, too.
template <class Chains, class Ready>
__device__ __forceinline__ void walk(const Chains& chains, int items, const Ready& ready, Stages s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp < kChainWarps) {
    ptx::setmaxnreg_inc<kRegsChain>();
    chain_role(chains, items, ready, s, warp, lane);
  } else if (warp < kHandWarp) {
    ptx::setmaxnreg_dec<kRegsSplit>();
    split_role(chains, items, ready, s, warp - kChainWarps, lane);
  } else {
    ptx::setmaxnreg_dec<kRegsHand>();
    if (warp == kHandWarp) hand_role(chains, items, ready, s, lane);
  }
}

}  // namespace qla::cuda::cp_merge
