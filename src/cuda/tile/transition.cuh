// M of a merge (C1) as the pre-pass leaves it and cp_merge multiplies by it: B = M^T, split in two, x = hi + lo, bf16 each.
//
// An entry is 64 KiB, in global memory as in shared memory: hi, then lo of B, each two 64-column panels of 128 rows in the
// 128-byte swizzle, read MN-major (swizzle.cuh). Rows and columns are in an order in which the fragments that lane q of four
// holds, 2 q and 2 q + 1 of each of four runs of eight, are eight neighbours: 32 a + 8 j + 2 q + e lies at 32 a + 8 q + 2 j + e.
// What a product adds up is in the same order on both sides, and that of its columns is the next left operand's.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"
#include "cuda/tile/pack.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda::transition {

inline constexpr int kPanelBytes = 16384, kLowBytes = 2 * kPanelBytes, kBytes = 2 * kLowBytes;
static_assert(kBytes == 4 * kStateFloats);  // a place is as large as a state

// where row or column n lies, and what lies there
__host__ __device__ constexpr int place(int n) { return n / 32 * 32 + n % 8 / 2 * 8 + n / 8 % 4 * 2 + n % 2; }
// bytes from an entry's begin to hi of B[i][k]; lo is kLowBytes further on
__host__ __device__ constexpr uint32_t offset(int i, int k) { return panel_address(place(i), place(k), 128); }

// hi and lo of two numbers
__device__ __forceinline__ void split(uint32_t& hi, uint32_t& lo, float x, float y) {
  hi = pack<__nv_bfloat16>(x, y);
  const float2 taken = unpack<__nv_bfloat16>(hi);
  lo = pack<__nv_bfloat16>(x - taken.x, y - taken.y);
}

// 16 rows of B, first .. first + 15, from a warp's fragments of them (state_step.cuh's S^T)
__device__ __forceinline__ void store(const float (&s)[2][32], void* entry, int first, int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = place(first + lane / 4 + 8 * h);
    uint8_t* const to = static_cast<uint8_t*>(entry) + row * 128;
#pragma unroll
    for (int m = 0; m < 4; m++) {
      uint32_t hi[4], lo[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float* const x = s[m / 2] + 4 * (4 * (m % 2) + j) + 2 * h;
        split(hi[j], lo[j], x[0], x[1]);
      }
      uint8_t* const eight = to + m / 2 * kPanelBytes + ((m % 2 * 4 + lane % 4) ^ row % 8) * 16;
      *reinterpret_cast<uint4*>(eight) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
      *reinterpret_cast<uint4*>(eight + kLowBytes) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
  }
}

}  // namespace qla::cuda::transition
