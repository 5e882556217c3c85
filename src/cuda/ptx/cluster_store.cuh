// Stores into the shared memory of another CTA of the cluster.
#pragma once

#include <cstdint>

namespace qla::cuda::ptx {

// what a shared address of this CTA is in CTA `rank` of the cluster; offsets may be added to it
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// asynchronous; completes 16 bytes of the barrier `bar`, which lies in the same CTA as `to`
__device__ __forceinline__ void store_async(uint32_t to, float4 x, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
               "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(__float_as_uint(x.z)), "r"(__float_as_uint(x.w)),
               "r"(bar)
               : "memory");
}

}  // namespace qla::cuda::ptx
