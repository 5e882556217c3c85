// Swizzled tiles in shared memory and their wgmma descriptors.
//   128-byte swizzle: rows of 128 bytes (64 elements of 16 bit), groups of 8 rows = 1,024 bytes, tile aligned to 1,024.
//    32-byte swizzle: rows of 32 bytes (one k16 step), groups of 8 rows = 256 bytes; the panels of Abar and Pg (formats.hpp).
// A tile 128 columns wide is two 64-column panels one after the other.
#pragma once

#include <cstdint>

namespace qla::cuda {

// byte offset inside a tile -> where TMA and wgmma put it
__host__ __device__ __forceinline__ constexpr uint32_t swizzle_128(uint32_t offset) { return offset ^ (offset >> 7 & 7) << 4; }
__host__ __device__ __forceinline__ constexpr uint32_t swizzle_32(uint32_t offset) { return offset ^ (offset >> 7 & 1) << 4; }

// element (row, col) of a tile of `rows` rows in 64-column panels (16-bit elements)
__host__ __device__ __forceinline__ constexpr uint32_t panel_address(int row, int col, int rows) {
  return swizzle_128(uint32_t(col / 64 * rows * 128 + row * 128 + col % 64 * 2));
}

// lbo: leading byte offset, sbo: stride byte offset (between groups of 8 rows)
__device__ __forceinline__ uint64_t descriptor(uint32_t addr, uint32_t lbo, uint32_t sbo, uint32_t type) {
  return uint64_t((addr & 0x3FFFF) >> 4) | uint64_t(lbo >> 4) << 16 | uint64_t(sbo >> 4) << 32 | uint64_t(type) << 62;
}
// K-major operand in the 128-byte swizzle; k16 step kk of a panel is 32 kk bytes further
__device__ __forceinline__ uint64_t descriptor_k_major(uint32_t addr) { return descriptor(addr, 16, 1024, 1); }
// MN-major operand (rows of k, mn contiguous); panel_bytes: distance of its two 64-column panels; k16 step kk is 2,048 kk bytes
// further
__device__ __forceinline__ uint64_t descriptor_mn_major(uint32_t addr, uint32_t panel_bytes) {
  return descriptor(addr, panel_bytes, 1024, 1);
}
// one k16 step of a K-major operand in the 32-byte swizzle
__device__ __forceinline__ uint64_t descriptor_k_major_32(uint32_t addr) { return descriptor(addr, 16, 256, 3); }
// The descriptor of what lies `bytes` further on. The sum is one of the lower word, where it stays: where control flow is not
// known to be uniform (behind a wait, in a loop), a sum of 64 bits takes a dozen instructions, and the products wait for them.
__device__ __forceinline__ uint64_t advance(uint64_t first, int bytes) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(uint32_t(first) + uint32_t(bytes) / 16), "r"(uint32_t(first >> 32)));
  return d;
}
// .. where the compiler knows that it is the same in all lanes (uniform()): one instruction in uniform registers, where advance()
// takes two.
__device__ __forceinline__ uint64_t further(uint64_t first, int bytes) { return first + uint64_t(bytes) / 16; }

}  // namespace qla::cuda
