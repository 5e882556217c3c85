// A ring of stages: producer and consumer each keep stage and parity of their own and never exchange them.
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace qla::cuda {

template <int Stages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;  // parity of the round
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// A full/empty pair of barrier arrays: the producer waits on empty (the first round passes at once), the consumer on full.
// Barriers lie at `base`: full[0], full[1], .., empty[0], .. (8 bytes each).
// Where all lanes of a warp wait and one of them hands back, __syncwarp comes between: a lane that is late would otherwise look
// when the phase it waits for and the next one have passed, and wait for ever.
template <int Stages>
struct Edge {
  static constexpr int kBytes = 16 * Stages;
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int s) const { return base + 8 * s; }
  __device__ __forceinline__ uint32_t empty(int s) const { return base + 8 * (Stages + s); }
  __device__ __forceinline__ void init(int full_count, int empty_count) const {
#pragma unroll
    for (int s = 0; s < Stages; s++) {
      ptx::mbarrier_init(full(s), full_count);
      ptx::mbarrier_init(empty(s), empty_count);
    }
  }
  __device__ __forceinline__ void producer_wait(const Ring<Stages>& r) const { ptx::mbarrier_wait(empty(r.stage), r.phase ^ 1); }
  __device__ __forceinline__ void consumer_wait(const Ring<Stages>& r) const { ptx::mbarrier_wait(full(r.stage), r.phase); }
  __device__ __forceinline__ void release(const Ring<Stages>& r) const { ptx::mbarrier_arrive(empty(r.stage)); }
};

}  // namespace qla::cuda
