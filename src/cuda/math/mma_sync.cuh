// The Mma policy of targets without wgmma (sm_80 and later): the members of Wgmma (state_step.cuh) by ldmatrix and mma.sync
// m16n8k16. A warp owns 16 rows of S^T in the same fragment layout and needs nobody else; begin, commit and wait have nothing to
// do.
#pragma once

#include <cstdint>

#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda {

template <typename T>
struct MmaSync {
  using Element = T;
  static __device__ __forceinline__ void begin() {}
  static __device__ __forceinline__ void commit() {}
  template <int Pending = 0>
  static __device__ __forceinline__ void wait() {}

  // 16 columns 16 n .. of d += a B, B given by the address of this lane's row of its four 8 x 8 matrices
  template <bool Transposed>
  static __device__ __forceinline__ void columns(float* d, const uint32_t* a, uint32_t lane_address) {
    uint32_t b[4];
    if constexpr (Transposed)
      ptx::ldmatrix_x4_trans(lane_address, b[0], b[1], b[2], b[3]);
    else
      ptx::ldmatrix_x4(lane_address, b[0], b[1], b[2], b[3]);
    ptx::mma_m16n8k16<T>(*reinterpret_cast<float(*)[4]>(d), a[0], a[1], a[2], a[3], b[0], b[1]);
    ptx::mma_m16n8k16<T>(*reinterpret_cast<float(*)[4]>(d + 4), a[0], a[1], a[2], a[3], b[2], b[3]);
  }
  static __device__ __forceinline__ int lane() { return int(threadIdx.x) % 32; }
  // lanes 8 m .. 8 m + 7 of a K-major operand's x4: rows 8 (m / 2) .., k half m % 2
  static __device__ __forceinline__ int k_major_row() { return lane() / 16 * 8 + lane() % 8; }
  static __device__ __forceinline__ int k_major_half() { return lane() / 8 % 2; }

  template <int kPanelBytes, int First = 0, int Last = 8>
  static __device__ __forceinline__ void state_rows(float (&acc)[32], const uint32_t (&s)[32], uint32_t x) {
    if (First == 0) clear(acc);
#pragma unroll
    for (int w = First; w < Last; w++)
#pragma unroll
      for (int n = 0; n < 4; n++)
        columns<false>(acc + 8 * n, s + 4 * w,
                       x + w / 4 * kPanelBytes + swizzle_128((16 * n + k_major_row()) * 128 + w % 4 * 32 + k_major_half() * 16));
  }
  template <int Accumulate>
  static __device__ __forceinline__ void triangular(float (&d)[32], const uint32_t (&x)[16], uint32_t tile) {
    if (!Accumulate) clear(d);
#pragma unroll
    for (int w = 0; w < 4; w++)
#pragma unroll
      for (int n = w; n < 4; n++)  // above the diagonal blocks there are zeros
        columns<false>(d + 8 * n, x + 4 * w, tile + 2048 * w + swizzle_32((16 * n + k_major_row()) * 32 + k_major_half() * 16));
  }
  template <int kPanelBytes, int Half>
  static __device__ __forceinline__ void update(float (&s)[32], const uint32_t (&e)[16], uint32_t k) {
    const int token = lane() / 8 % 2 * 8 + lane() % 8, half = lane() / 16;  // K is MN-major: transposed on the way
#pragma unroll
    for (int w = 0; w < 4; w++)
#pragma unroll
      for (int n = 0; n < 4; n++)
        columns<true>(s + 8 * n, e + 4 * w, k + Half * kPanelBytes + swizzle_128((16 * w + token) * 128 + n * 32 + half * 16));
  }

 private:
  static __device__ __forceinline__ void clear(float (&d)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) d[i] = 0.f;
  }
};

}  // namespace qla::cuda
