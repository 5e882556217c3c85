// Addresses in the shared memory of another CTA of the cluster.
#pragma once

#include <cstdint>

namespace qla::cuda::ptx {

// what a shared address of this CTA is in CTA `rank` of the cluster; offsets may be added to it
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

}  // namespace qla::cuda::ptx
