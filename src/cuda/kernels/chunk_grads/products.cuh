// chunk_grads: the products of a warpgroup and what is done to their results in registers.
#pragma once

#include "cuda/kernels/chunk_grads/lane.cuh"
#include "cuda/math/warp.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_mn.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda::chunk_grads {

// the compiler no longer knows what it computed from a lane's number
__device__ __forceinline__ void forget(int& lane) {
  asm volatile("" : "+r"(lane));
  __builtin_assume(lane >= 0 && lane < 32);  // so that a division is a shift
}

// Addresses of this lane for x4 ldmatrix / stmatrix of the 16 x 16 blocks of rows row0 .. of a tile in 64-column panels,
// registers in the order of a left operand; block k is 16 columns further: the swizzle xors the same bits in all of them.
struct BlockRow {
  uint32_t first;
  __device__ __forceinline__ BlockRow(uint32_t tile, int row0, int lane)
      : first(tile + panel_address(row0 + lane / 8 % 2 * 8 + lane % 8, lane / 16 * 8, kRows)) {}
  __device__ __forceinline__ uint32_t block(int k) const { return (first ^ k % 4 * 32) + k / 4 * (kTile / 2); }
};
// transposed, block k 16 rows further
struct BlockColumn {
  uint32_t first;
  __device__ __forceinline__ BlockColumn(uint32_t tile, int col0, int lane)
      : first(transposed_lane(tile, 0, col0, kRows, lane)) {}
  __device__ __forceinline__ uint32_t block(int k) const { return first + k * 2048; }
};

// rows .. 63 of a token-major 64 x 128 tile become zero: beyond a sequence's end memory holds anything, and 0 x NaN is NaN
__device__ __forceinline__ void zero_rows(uint32_t tile, int rows, int thread) {
#pragma unroll 1  // seldom run: nothing of it is to be prepared outside
  for (int i = rows * 8 + thread; i < kRows * 8; i += 128) {
    ptx::sts4u(tile + i * 16, 0, 0, 0, 0);
    ptx::sts4u(tile + kTile / 2 + i * 16, 0, 0, 0, 0);
  }
  ptx::proxy_fence();
}

// Descriptors of one product from its tile's: those of another product from the same tile would be kept for it, and spill. A
// tile's address has 18 bits, so nothing is to be masked, and shift and sum are one instruction.
__device__ __forceinline__ uint64_t operand(uint32_t tile, uint32_t lbo) {
  asm volatile("" : "+r"(tile));
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"((tile >> 4) + (lbo / 16 << 16)), "r"(uint32_t(descriptor(0, 0, 1024, 1) >> 32)));
  return d;
}
__device__ __forceinline__ uint64_t k_major(uint32_t tile) { return operand(tile, 16); }
__device__ __forceinline__ uint64_t mn_major(uint32_t tile) { return operand(tile, kTile / 2); }
__device__ __forceinline__ constexpr uint64_t bytes(int n) { return uint64_t(n) / 16; }  // to add to a descriptor

// 0 that the compiler does not know: a product that begins with it overwrites its accumulator, and takes its registers instead of
// new ones
__device__ __forceinline__ int hidden_zero() {
  int x = 0;
  asm volatile("" : "+r"(x));
  return x;
}
// acc = left right^T of token-major 64 x 128 tiles (K-major both); issued, not waited for
template <typename T>
__device__ __forceinline__ void product_tokens(float (&acc)[32], uint32_t left, uint32_t right) {
  const uint64_t a = k_major(left), b = k_major(right);
  const int overwrite = hidden_zero();
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const uint64_t at = bytes(k / 4 * (kTile / 2) + k % 4 * 32);
    ptx::wgmma_ss<T, 0>(acc, a + at, b + at, k ? 1 : overwrite);
  }
}
// h = left S^T for 64 of the 128 features: [64 tokens][128 v] x [128 v][64 features]; `first`: waits for each half of V as it
// comes. One group.
template <typename T>
__device__ __forceinline__ void product_snapshot(float (&h)[32], uint32_t left, uint32_t snapshot, int panel, const Lane& w,
                                                 Pair pair, bool first) {
  const int overwrite = hidden_zero();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (first) w.wait_full(pair + half);
    const uint64_t a = k_major(left + half * (kTile / 2)), b = mn_major(snapshot + half * kTile + panel * (kTile / 2));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) ptx::wgmma_ss<T, 1>(h, a + bytes(k * 32), b + bytes(k * 2048), half + k ? 1 : overwrite);
  }
  ptx::wgmma_commit();
}
// acc += square tile: [64][64 tokens] x [64 tokens][128], the square as it is or transposed
template <typename T>
__device__ __forceinline__ void product_square(float (&acc)[64], uint32_t square, uint32_t tile) {
  const uint64_t a = k_major(square), b = mn_major(tile);
#pragma unroll
  for (int k = 0; k < 4; k++) ptx::wgmma_ss<T, 1>(acc, a + bytes(k * 32), b + bytes(k * 2048), 1);
}
template <typename T>
__device__ __forceinline__ void product_square_transposed(float (&acc)[64], uint32_t square, uint32_t tile) {
  const uint64_t a = mn_major(square), b = mn_major(tile);
#pragma unroll
  for (int k = 0; k < 4; k++) ptx::wgmma_mn<T>(acc, a + bytes(k * 2048), b + bytes(k * 2048));
}

// a lane's words of 64 columns of rows 16 warp .. of a tile, in the order of accumulators
struct RowWords {
  uint32_t x[16];
  __device__ __forceinline__ RowWords(const BlockRow& rows, int panel) { load(rows, panel); }
  __device__ __forceinline__ void load(const BlockRow& rows, int panel) {
#pragma unroll
    for (int kk = 0; kk < 4; kk++)
      ptx::ldmatrix_x4(rows.block(4 * panel + kk), x[4 * kk], x[4 * kk + 1], x[4 * kk + 2], x[4 * kk + 3]);
  }
};
// sum += factor x h, dot += <row, h>, for 64 features from 64 panel on
template <typename T>
__device__ __forceinline__ void absorb(float (&sum)[64], const float (&h)[32], int panel, const float (&factor)[2],
                                       const RowWords& words, float (&dot)[2]) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float2 x = unpack<T>(words.x[i]);
    const int at = 2 * i, row = i % 2;
    dot[row] += x.x * h[at];
    dot[row] += x.y * h[at + 1];
    sum[32 * panel + at] += factor[row] * h[at];
    sum[32 * panel + at + 1] += factor[row] * h[at + 1];
  }
}
// 64 x 128 sums as 16-bit rows in a tile
template <typename T>
__device__ __forceinline__ void stage_rows(const float (&sum)[64], uint32_t tile, int warp, int lane) {
  const BlockRow rows(tile, 16 * warp, lane);
#pragma unroll
  for (int kk = 0; kk < 8; kk++) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = pack<T>(sum[8 * kk + 2 * i], sum[8 * kk + 2 * i + 1]);
    ptx::stmatrix_x4(rows.block(kk), x[0], x[1], x[2], x[3]);
  }
}
// one value per row, summed over the quad
__device__ __forceinline__ void store_row_sums(uint32_t out, float a, float b, int row, int lane) {
  a = warp_sum<4>(a);
  b = warp_sum<4>(b);
  if (lane % 4 == 0) {
    ptx::sts(out + row * 4, a);
    ptx::sts(out + (row + 8) * 4, b);
  }
}
// the raw row's gradient: u - r^2 x <x, u>
template <typename T>
__device__ __forceinline__ void unnormalise(float (&u)[64], uint32_t tile, const float (&r)[2], int warp, int lane) {
  forget(lane);
  const BlockRow rows(tile, 16 * warp, lane);
  float dot[2] = {0.f, 0.f};
#pragma unroll
  for (int pass = 0; pass < 2; pass++) {
#pragma unroll
    for (int kk = 0; kk < 8; kk++) {
      uint32_t f[4];
      ptx::ldmatrix_x4(rows.block(kk), f[0], f[1], f[2], f[3]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 x = unpack<T>(f[i]);
        const int at = 8 * kk + 2 * i, row = i % 2;
        if (pass == 0) {
          dot[row] += x.x * u[at];
          dot[row] += x.y * u[at + 1];
        } else {
          u[at] -= dot[row] * x.x;
          u[at + 1] -= dot[row] * x.y;
        }
      }
    }
    if (pass == 0) {
      dot[0] = warp_sum<4>(dot[0]) * r[0] * r[0];
      dot[1] = warp_sum<4>(dot[1]) * r[1] * r[1];
    }
  }
}
__device__ __forceinline__ void load_rows(float (&x)[2], uint32_t vec, int which, int row) {
  x[0] = ptx::lds(vec + (which + row) * 4);
  x[1] = ptx::lds(vec + (which + row + 8) * 4);
}

}  // namespace qla::cuda::chunk_grads
