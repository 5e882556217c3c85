// chunk_decay - sum of ghat (C4) over every chunk and value head: what cut_items decides by. The intra-chunk stage has the same
//   sums on its way, but at its end; made here first, from the keys and the gates alone, they let cut_items run beside that stage
//   and not behind it. Reads K once more than needed (from L2, where it then lies for the intra-chunk stage): for few heads.
//   grid: a CTA an item = (chunk slot, q/k head), persistent. Warp w has rows 16 w .. 16 w + 15, half a warp a row; then value
//   heads w, w + 4, .., a lane rows 2 l and 2 l + 1. All loads of an item are under way at once.
// Tail: rows past the end count as k = 0, beta = 0, gate 0.
#include "cuda/kernels/chunk_decay/launch.hpp"

#include <algorithm>

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/chunk_intra/gates.cuh"
#include "cuda/kernels/chunk_intra/single_sequence.cuh"
#include "cuda/math/warp.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/tile/pack.cuh"

namespace qla::cuda::decay {
namespace {

constexpr int kWarps = 4, kCtasPerSm = 8, kRowPairs = 64 / kWarps / 2;

template <typename T>
__device__ __forceinline__ float square(uint4 x) {
  const float2 a = unpack<T>(x.x), b = unpack<T>(x.y), c = unpack<T>(x.z), d = unpack<T>(x.w);
  return fmaf(a.x, a.x, fmaf(a.y, a.y, fmaf(b.x, b.x, b.y * b.y))) + fmaf(c.x, c.x, fmaf(c.y, c.y, fmaf(d.x, d.x, d.y * d.y)));
}

template <typename T>
__global__ void __launch_bounds__(32 * kWarps, kCtasPerSm) chunk_decay(const __grid_constant__ Args args) {
  __shared__ float squares[64];
  const intra::Args& a = args.intra;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (!a.direct) ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();  // behind the wait: whoever starts now finds the chunk table complete
  int first_token = 0, end_token = int(a.tokens);
  if (a.direct) intra::single_sequence(a, first_token, end_token);
  const int items = a.slots * a.num_k_heads;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int slot = item / a.num_k_heads, k_head = item - slot * a.num_k_heads;
    const int4 record =
        a.direct ? intra::single_record(slot, first_token, end_token) : reinterpret_cast<const int4*>(a.chunk_table)[slot];
    const int rows = record.z;
    if (rows == 0) continue;
    const int64_t batch = a.varlen ? 0 : record.w;
    const int64_t token = (int64_t(uint32_t(record.x)) | int64_t(record.y) << 32) - batch * a.tokens;
    const uint4* k = reinterpret_cast<const uint4*>(
        static_cast<const char*>(args.k) +
        2 * (batch * args.stride_k[0] + token * args.stride_k[1] + k_head * args.stride_k[2] + lane % 16 * 8));
    const bool in0 = 2 * lane < rows, in1 = 2 * lane + 1 < rows;
    const auto pair = [&](const intra::View& x, int head) {
      const int64_t at = batch * x.stride[0] + (token + 2 * lane) * x.stride[1] + head * x.stride[2];
      return make_float2(in0 ? intra::load_element(x, at) : 0.f, in1 ? intra::load_element(x, at + x.stride[1]) : 0.f);
    };
    float2 beta = make_float2(0.f, 0.f), g = beta;  // of the first head, asked for before the keys
    if (warp < a.group) {
      beta = pair(a.beta, k_head * a.group + warp);
      if (a.g.data) g = pair(a.g, k_head * a.group + warp);
    }
    uint4 x[kRowPairs];
#pragma unroll
    for (int i = 0; i < kRowPairs; i++) {
      const int row = 2 * (warp * kRowPairs + i) + lane / 16;
      x[i] = row < rows ? k[row * (args.stride_k[1] / 8)] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kRowPairs; i++) {
      const float sum = warp_sum<16>(square<T>(x[i]));
      if (lane % 16 == 0) squares[2 * (warp * kRowPairs + i) + lane / 16] = sum;
    }
    __syncthreads();
    float2 k2 = make_float2(squares[2 * lane], squares[2 * lane + 1]);
    __syncthreads();                                      // before the next item's are written
    const float unknown = (k2.x - k2.x) + (k2.y - k2.y);  // NaN where a key is not finite, with beta = 0 or not
    if (a.flags & QLA_FLAG_QK_L2NORM) k2 = make_float2(k2.x / (k2.x + 1e-6f), k2.y / (k2.y + 1e-6f));
    for (int in_group = warp; in_group < a.group; in_group += kWarps) {
      const int head = k_head * a.group + in_group;
      if (in_group != warp) {
        beta = pair(a.beta, head);
        if (a.g.data) g = pair(a.g, head);
      }
      float rate = 1.f, bias = 0.f;
      if (a.flags & QLA_FLAG_RAW_GATE) {
        rate = expf(intra::load_element(a.a_log, head * a.a_log.stride[2]));
        if (a.dt_bias.data) bias = intra::load_element(a.dt_bias, head * a.dt_bias.stride[2]);
      }
      const float2 b =
          make_float2(in0 ? intra::decode_beta(beta.x, a.flags) : 0.f, in1 ? intra::decode_beta(beta.y, a.flags) : 0.f);
      const float2 raw = make_float2(in0 ? intra::decode_gate(g.x, a.flags, rate, bias) * kLog2e : 0.f,
                                     in1 ? intra::decode_gate(g.y, a.flags, rate, bias) * kLog2e : 0.f);
      const float growth = log2_approx(max_keep_nan(b.x * k2.x - 1.f, 1.f)) + log2_approx(max_keep_nan(b.y * k2.y - 1.f, 1.f));
      const float sum = warp_sum(raw.x + raw.y + growth + unknown) * kLn2;
      if (lane == 0) a.decay[int64_t(slot) * a.num_v_heads + head] = sum;
    }
  }
  if (a.direct) ptx::grid_dependency_wait();  // whoever waits for this kernel counts on plan_segments, too
}

}  // namespace

cudaError_t launch(int32_t dtype, const Args& args, int multiprocessors, cudaStream_t stream) {
  const int64_t items = int64_t(args.intra.slots) * args.intra.num_k_heads;
  if (items == 0) return cudaSuccess;
  const auto kernel = dtype == QLA_BFLOAT16 ? chunk_decay<__nv_bfloat16> : chunk_decay<__half>;
  return launch_dependent(kernel, unsigned(std::min<int64_t>(items, int64_t(multiprocessors) * kCtasPerSm)), 32 * kWarps, 0, true,
                          stream, args);
}

}  // namespace qla::cuda::decay
