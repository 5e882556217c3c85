// mbarrier and named barriers, by 32-bit shared address. Written here and not taken from <cuda/ptx>, whose functions want
// 64-bit pointers: each use would convert an address, and a file that includes it compiles 0.6 s longer.
#pragma once

#include <cstdint>

#include "cuda/ptx/jitter.cuh"

namespace qla::cuda::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// after the inits, before any other thread or the async proxy uses them; then a CTA (or cluster) barrier
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  jitter();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t bar, int bytes) {
  jitter();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// waits until the phase of this parity has completed: 0 for the first
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  jitter();
  asm volatile(
      "{.reg .pred p;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done; bra wait; done: }" ::"r"(bar),
      "r"(parity)
      : "memory");
  jitter();
}

// named barriers 1..15 (0 is __syncthreads); threads is a multiple of 32 and counts everyone who syncs or arrives
__device__ __forceinline__ void named_sync(int id, int threads) {
  jitter();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  jitter();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// makes this thread's ordinary stores to shared memory visible to wgmma and bulk copies: in every writing thread, before it
// arrives at the barrier that the reader (or the thread that issues the copy) waits for
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// the same for global memory written by ordinary stores and then read by bulk or tensor copies
__device__ __forceinline__ void proxy_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace qla::cuda::ptx
