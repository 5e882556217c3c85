// Registers between warpgroups, programmatic dependent launch, clusters.
#pragma once

#include <cstdint>

#include "cuda/ptx/jitter.cuh"

namespace qla::cuda::ptx {

// executed by all warps of a warpgroup; the sum over the CTA must not exceed what the launch reserved (config.hpp checks it)
template <int Regs>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Regs));
}
template <int Regs>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Regs));
}

// everything the kernel before wrote is visible afterwards; before it only what no kernel of the chain writes may be read
__device__ __forceinline__ void grid_dependency_wait() {
  jitter();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  jitter();
}
// the next kernel's CTAs may start when all of this grid's have said so or exited; they still wait for its memory
__device__ __forceinline__ void grid_dependency_launch() {
  jitter();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Of a call's first kernel: what the caller's stream holds has ended before anything of this call looks at memory, and the call's
// next kernel may start.
__device__ __forceinline__ void begin_call() {
  grid_dependency_wait();
  grid_dependency_launch();
}

// One word between kernels that run at the same time, past an L1 that may hold what lay there before: it is what was there or
// what was written, and says nothing about other words. Why what it says is enough, who loads has to say: a kernel before let
// this one begin when it had waited for the word itself, or the word is its own flag.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* p) {
  jitter();
  int32_t x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ int64_t load_relaxed(const int64_t* p) {
  jitter();
  int64_t x;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ float load_relaxed(const float* p) {
  jitter();
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
// four words
__device__ __forceinline__ float4 load_relaxed(const float4* p) {
  jitter();
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(p)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_relaxed(float* p, float x) {
  jitter();
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}

// A flag between CTAs: raised after what the CTA's threads wrote and a barrier among them, seen before what is read then.
__device__ __forceinline__ void raise_flag(int32_t* p) {
  jitter();
  asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(p) : "memory");
}
__device__ __forceinline__ int32_t read_flag(const int32_t* p) {
  jitter();
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_arrive() {
  jitter();
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  jitter();
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  jitter();
}

}  // namespace qla::cuda::ptx
