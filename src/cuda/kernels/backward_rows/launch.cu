// backward_rows - what the backward needs beside its three kernels:
//   copy_rows      d_o that tensor copies cannot address -> contiguous 16 bit; dV in 16 bit -> the caller's type and strides
//   zero_padding   gradients of the rows past the last sequence, where chunk_grads does not do it
//   reduce_gate    dA_log, ddt_bias from the chunks' shares: a CTA a head, strided sums, then a tree: the same bits every time
#include "cuda/kernels/backward_rows/launch.hpp"

#include <algorithm>

#include "cuda/kernels/backward_rows/padding.cuh"
#include "cuda/math/warp.cuh"
#include "qla/qla.h"

namespace qla::cuda::backward_rows {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float load(const View& v, int64_t at) {
  switch (v.dtype) {
    case QLA_FLOAT64:
      return float(static_cast<const double*>(v.data)[at]);
    case QLA_FLOAT32:
      return static_cast<const float*>(v.data)[at];
    case QLA_BFLOAT16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(v.data)[at]);
    default:
      return __half2float(static_cast<const __half*>(v.data)[at]);
  }
}
// a thread: 8 neighbouring elements of a row
__global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ CopyArgs a) {
  const int per_row = a.to.width / 8;
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, head_row = i / per_row;
  const int64_t token = head_row / a.to.heads;
  if (token >= a.batch * a.tokens) return;
  const int64_t head = head_row % a.to.heads, batch = token / a.tokens, row = token % a.tokens, first = i % per_row * 8;
  const int64_t from = batch * a.from.stride[0] + row * a.from.stride[1] + head * a.from.stride[2] + first * a.from.stride[3];
  const int64_t to = batch * a.to.stride[0] + row * a.to.stride[1] + head * a.to.stride[2] + first * a.to.stride[3];
  float x[8];
#pragma unroll
  for (int e = 0; e < 8; e++) x[e] = a.from.data ? load(a.from, from + e * a.from.stride[3]) : 0.f;
#pragma unroll
  for (int e = 0; e < 8; e++) store(a.to, to + e * a.to.stride[3], x[e]);
}

__global__ void __launch_bounds__(kThreads) zero_padding(const __grid_constant__ PaddingArgs a) {
  zero_padding_rows(a, threadIdx.x / 32, kThreads / 32, threadIdx.x % 32);
}

__global__ void __launch_bounds__(kThreads) reduce_gate(const __grid_constant__ ReduceArgs a) {
  const int head = blockIdx.x;
  float sum[2] = {0.f, 0.f};
  for (int slot = threadIdx.x; slot < a.slots; slot += kThreads) {
    if (a.chunks[slot].rows <= 0) continue;
    const float2 x = *reinterpret_cast<const float2*>(a.partials + (int64_t(slot) * a.num_v_heads + head) * 2);
    sum[0] += x.x;
    sum[1] += x.y;
  }
  __shared__ float warps[2][kThreads / 32];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sum[i] = warp_sum(sum[i]);
    if (threadIdx.x % 32 == 0) warps[i][threadIdx.x / 32] = sum[i];
  }
  __syncthreads();
  if (threadIdx.x >= 2) return;
  float total = 0.f;
  for (int i = 0; i < kThreads / 32; i++) total += warps[threadIdx.x][i];
  const View& out = threadIdx.x == 0 ? a.d_a_log : a.d_dt_bias;
  if (out.data) store(out, head * out.stride[2], total);
}

}  // namespace

cudaError_t launch_copy(const CopyArgs& args, cudaStream_t stream) {
  const int64_t threads = args.batch * args.tokens * args.to.heads * (args.to.width / 8);
  if (threads == 0) return cudaSuccess;
  copy_rows<<<unsigned((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args);
  return cudaPeekAtLastError();
}

cudaError_t launch_padding(const PaddingArgs& args, int multiprocessors, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  zero_padding<<<unsigned(std::min<int64_t>(args.tokens, multiprocessors)), kThreads, 0, stream>>>(args);
  return cudaPeekAtLastError();
}

cudaError_t launch_reduce(const ReduceArgs& args, cudaStream_t stream) {
  if (args.num_v_heads == 0) return cudaSuccess;
  reduce_gate<<<unsigned(args.num_v_heads), kThreads, 0, stream>>>(args);
  return cudaPeekAtLastError();
}

}  // namespace qla::cuda::backward_rows
