// Loads and stores of shared memory by 32-bit address, and cp.async. An address kept as one register (and not a 64-bit
// pointer that has to be converted) is what keeps the recurrence kernels free of spills.
#pragma once

#include <cstdint>

namespace qla::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ float lds(uint32_t a) {
  float r;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(a) : "memory");
  return r;
}
__device__ __forceinline__ float2 lds2(uint32_t a) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(a) : "memory");
  return r;
}
__device__ __forceinline__ float4 lds4(uint32_t a) {
  float4 r;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(a) : "memory");
  return r;
}
__device__ __forceinline__ uint4 lds4u(uint32_t a) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(a) : "memory");
  return r;
}
__device__ __forceinline__ void sts(uint32_t a, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory"); }
// .. where `really`; no branch, which products in flight would not survive
__device__ __forceinline__ void sts_if(bool really, uint32_t a, float x) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.f32 [%0], %1;}" ::"r"(a), "f"(x), "r"(int(really)) : "memory");
}
__device__ __forceinline__ void sts2(uint32_t a, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void sts4(uint32_t a, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
__device__ __forceinline__ void sts4u(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// cp.async (sm_80): bytes 4, 8 or 16 without passing through registers
template <int Bytes>
__device__ __forceinline__ void cp_async(uint32_t dst, const void* src) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(Bytes) : "memory");
}
// .. 16 bytes past L1, which may hold what lay there in an earlier call: for what no wait of this grid precedes
__device__ __forceinline__ void cp_async_past_l1(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// keeps values in registers and out of reach of reordering, e.g. a scaling that must happen before products are issued
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i]));
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i]));
}

}  // namespace qla::cuda::ptx
