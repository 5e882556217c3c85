// Rows and scalars of gradients to memory in whatever float type the caller asked for; rows past the chunk's end stay as they
// are.
#pragma once

#include "cuda/kernels/chunk_grads/config.hpp"
#include "cuda/tile/pack.cuh"
#include "qla/qla.h"

namespace qla::cuda::chunk_grads {

__device__ __forceinline__ void store_scalar(const GradView& out, int64_t at, float x) {
  switch (out.dtype) {
    case QLA_FLOAT64:
      static_cast<double*>(out.data)[at] = x;
      break;
    case QLA_FLOAT32:
      static_cast<float*>(out.data)[at] = x;
      break;
    case QLA_BFLOAT16:
      static_cast<__nv_bfloat16*>(out.data)[at] = __float2bfloat16_rn(x);
      break;
    default:
      static_cast<__half*>(out.data)[at] = __float2half_rn(x);
  }
}
__device__ __forceinline__ float load_scalar(const InputView& in, int64_t at) {
  switch (in.dtype) {
    case QLA_FLOAT64:
      return float(static_cast<const double*>(in.data)[at]);
    case QLA_FLOAT32:
      return static_cast<const float*>(in.data)[at];
    case QLA_BFLOAT16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(in.data)[at]);
    default:
      return __half2float(static_cast<const __half*>(in.data)[at]);
  }
}

// Words of four 8-column blocks, a word a lane of the quad -> four words of one block: 16 contiguous bytes.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t a = x[i], b = x[i + 1], got = __shfl_xor_sync(~0u, odd ? a : b, 1);
    x[i] = odd ? got : a;
    x[i + 1] = odd ? b : got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t a = x[i], b = x[i + 2], got = __shfl_xor_sync(~0u, high ? a : b, 2);
    x[i] = high ? got : a;
    x[i + 2] = high ? b : got;
  }
}

template <typename U>
__device__ __forceinline__ void store_rows16(U* data, bool vector, const float (&d)[64], const int64_t (&offset)[2],
                                             const bool (&valid)[2], int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    uint32_t x[4][4];  // all exchanges before the first branch, so that their latencies overlap
#pragma unroll
    for (int m = 0; m < 4; m++) {
#pragma unroll
      for (int j = 0; j < 4; j++) x[m][j] = pack<U>(d[4 * (4 * m + j) + 2 * h], d[4 * (4 * m + j) + 2 * h + 1]);
      transpose_quad(x[m], lane);
    }
    if (!valid[h]) continue;
    U* const row = data + offset[h] + 8 * (lane % 4);
    if (vector) {
#pragma unroll
      for (int m = 0; m < 4; m++) *reinterpret_cast<uint4*>(row + 32 * m) = make_uint4(x[m][0], x[m][1], x[m][2], x[m][3]);
    } else {
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          reinterpret_cast<uint16_t*>(row + 32 * m)[2 * j] = uint16_t(x[m][j]);
          reinterpret_cast<uint16_t*>(row + 32 * m)[2 * j + 1] = uint16_t(x[m][j] >> 16);
        }
    }
  }
}
template <typename U>
__device__ __forceinline__ void store_rows_wide(U* data, const float (&d)[64], const int64_t (&offset)[2], const bool (&valid)[2],
                                                int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (!valid[h]) continue;
    U* at = data + offset[h] + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 16; n++) {
      at[8 * n] = d[4 * n + 2 * h];
      at[8 * n + 1] = d[4 * n + 2 * h + 1];
    }
  }
}

// A warpgroup's 64 x 128 accumulator to rows first .. first + rows - 1 (over [B * T]) of a [B, T, H, 128] gradient.
__device__ __forceinline__ void store_rows(const GradView& out, int first, int rows, int head, int tokens, const float (&d)[64],
                                           int warp, int lane) {
  if (out.data == nullptr) return;
  int64_t offset[2];
  bool valid[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = 16 * warp + lane / 4 + 8 * h;
    const int token = first + row;
    valid[h] = row < rows;
    offset[h] = int64_t(uint32_t(token) / uint32_t(tokens)) * out.stride_b +
                int64_t(uint32_t(token) % uint32_t(tokens)) * out.stride_t + head * out.stride_h;
  }
  switch (out.dtype) {
    case QLA_BFLOAT16:
      store_rows16(static_cast<__nv_bfloat16*>(out.data), out.vector, d, offset, valid, lane);
      break;
    case QLA_FLOAT16:
      store_rows16(static_cast<__half*>(out.data), out.vector, d, offset, valid, lane);
      break;
    case QLA_FLOAT32:
      store_rows_wide(static_cast<float*>(out.data), d, offset, valid, lane);
      break;
    default:
      store_rows_wide(static_cast<double*>(out.data), d, offset, valid, lane);
  }
}

}  // namespace qla::cuda::chunk_grads
