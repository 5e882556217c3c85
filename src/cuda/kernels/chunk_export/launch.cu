// chunk_export - not on the way of a forward run: only for callers who ask for a_gated, g_cumsum or the norms.
//   grid: a CTA a chunk slot (strided); a thread a (row, head) or a (row, head, column). Rows behind the last sequence are zeros.
#include "cuda/kernels/chunk_export/launch.hpp"

#include <algorithm>

#include "cuda/dependent_launch.hpp"
#include "cuda/math/exp.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda::chunk_export {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t place(const Output& out, int64_t batch, int64_t token, int64_t head) {
  return batch * out.stride[0] + token * out.stride[1] + head * out.stride[2];
}

// one 16-bit element of a 5-KiB tile; 0 above the diagonal blocks
__device__ __forceinline__ uint16_t tile_element(const uint8_t* tile, int row, int col) {
  const int panel = col / 16;
  if (panel > row / 16) return 0;
  return *reinterpret_cast<const uint16_t*>(tile + panel_offset(panel) + swizzle_32((row - 16 * panel) * 32 + col % 16 * 2));
}

__global__ void __launch_bounds__(kThreads) chunk_export(const __grid_constant__ Args a) {
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  for (int slot = blockIdx.x; slot < a.slots; slot += gridDim.x) {
    const ChunkRecord record = a.chunk_table[slot];
    const int64_t batch = a.varlen ? 0 : record.sequence, token = record.token - batch * a.tokens;
    const int64_t index = int64_t(slot) * a.num_v_heads;
    if (a.g_cumsum.data)
      for (int i = threadIdx.x; i < record.rows * a.num_v_heads; i += kThreads) {
        const int row = i / a.num_v_heads, head = i % a.num_v_heads;
        static_cast<float*>(a.g_cumsum.data)[place(a.g_cumsum, batch, token + row, head)] =
            a.vec[(index + head) * kVecFloats + kVecG + row] * kLn2;
      }
    for (int which = 0; which < 2; which++) {
      const Output& out = which ? a.k_rnorm : a.q_rnorm;
      if (!out.data) continue;
      const int group = a.num_v_heads / a.num_k_heads;
      for (int i = threadIdx.x; i < record.rows * a.num_k_heads; i += kThreads) {
        const int row = i / a.num_k_heads, head = i % a.num_k_heads;
        static_cast<float*>(out.data)[place(out, batch, token + row, head)] =
            a.vec[(index + head * group) * kVecFloats + (which ? kVecRk : kVecRq) + row];
      }
    }
    if (a.a_gated.data)
      for (int i = threadIdx.x; i < record.rows * a.num_v_heads * 64; i += kThreads) {
        const int col = i % 64, head = i / 64 % a.num_v_heads, row = i / 64 / a.num_v_heads;
        static_cast<uint16_t*>(a.a_gated.data)[place(a.a_gated, batch, token + row, head) + col * a.a_gated.stride[3]] =
            tile_element(a.abar + (index + head) * kTileBytes, row, col);
      }
  }
  // padding; only packed calls (one batch row) have any
  for (int64_t t = a.header->end_token + blockIdx.x; t < a.total_tokens; t += gridDim.x) {
    for (int i = threadIdx.x; i < a.num_v_heads && a.g_cumsum.data; i += kThreads)
      static_cast<float*>(a.g_cumsum.data)[place(a.g_cumsum, 0, t, i)] = 0.f;
    for (int i = threadIdx.x; i < a.num_k_heads && a.q_rnorm.data; i += kThreads)
      static_cast<float*>(a.q_rnorm.data)[place(a.q_rnorm, 0, t, i)] = 0.f;
    for (int i = threadIdx.x; i < a.num_k_heads && a.k_rnorm.data; i += kThreads)
      static_cast<float*>(a.k_rnorm.data)[place(a.k_rnorm, 0, t, i)] = 0.f;
    for (int i = threadIdx.x; i < a.num_v_heads * 64 && a.a_gated.data; i += kThreads)
      static_cast<uint16_t*>(a.a_gated.data)[place(a.a_gated, 0, t, i / 64) + i % 64 * a.a_gated.stride[3]] = 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    zero_padding(const PlanHeader* header, const __grid_constant__ Output out, int64_t total_tokens, int num_v_heads) {
  for (int64_t t = header->end_token + blockIdx.x; t < total_tokens; t += gridDim.x)
    for (int i = threadIdx.x; i < num_v_heads * 64; i += kThreads)
      static_cast<uint16_t*>(out.data)[place(out, 0, t, i / 64) + i % 64 * out.stride[3]] = 0;
}

}  // namespace

cudaError_t launch(const Args& args, int multiprocessors, bool dependent, cudaStream_t stream) {
  if (args.slots == 0) return cudaSuccess;
  return launch_dependent(chunk_export, unsigned(std::min(args.slots, 8 * multiprocessors)), kThreads, 0, dependent, stream,
                          args);
}

cudaError_t launch_zero_padding(const PlanHeader* header, const Output& a_inv, int64_t total_tokens, int32_t num_v_heads,
                                cudaStream_t stream) {
  zero_padding<<<128, kThreads, 0, stream>>>(header, a_inv, total_tokens, num_v_heads);
  return cudaGetLastError();
}

}  // namespace qla::cuda::chunk_export
