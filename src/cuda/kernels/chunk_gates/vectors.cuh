// The gate vectors of one chunk and up to 32 value heads for the fused forward, by one CTA of plan_and_gates. Computes (F0),
// (F1).
//
// Gate and beta lie [token][head]: a thread decodes row t / 8 of heads t % 8 + 8 i, so that a warp touches 4 rows and not 32, and
// hands them over in shared memory; then a warp has heads w and w + 16, a lane rows 2 lane and 2 lane + 1.
// Tail: raw gate and beta are 0 in rows past the end. Not here: norms, which the fused kernel multiplies in.
#pragma once

#include "cuda/kernels/chunk_gates/rows.cuh"

namespace qla::cuda::gates {

inline constexpr int kThreads = 512;
inline constexpr int kPitch = 68;  // a warp stores four rows of eight heads: all banks

struct Shared {
  float gate[kHeads][kPitch], beta[kHeads][kPitch];
};

__device__ __forceinline__ void write_vectors(const Args& a, Shared& s, const ChunkRecord& record, int slot, int part) {
  const int first = part * kHeads, heads = min(kHeads, a.num_v_heads - first);
  {
    const int row = int(threadIdx.x) / 8, column = int(threadIdx.x) % 8;
    const int64_t batch = a.varlen ? 0 : record.sequence, token = record.token - batch * a.tokens + row;
    const bool inside = row < record.rows;
    const int count = inside ? (heads - column + 7) / 8 : 0;
    const auto offset = [&](const intra::View& x) {
      return batch * x.stride[0] + token * x.stride[1] + (first + column) * x.stride[2];
    };
    Raw<kHeads / 8> g{}, beta{};
    if (a.g.data) load_raw(g, a.g, offset(a.g), 8 * a.g.stride[2], count);
    load_raw(beta, a.beta, offset(a.beta), 8 * a.beta.stride[2], count);
#pragma unroll
    for (int i = 0; i < kHeads / 8; i++) {
      const int head = column + 8 * i;
      if (head >= heads) break;
      float rate = 1.f, bias = 0.f;
      load_head(a, first + head, rate, bias);
      s.gate[head][row] = inside ? gate_of(a, g.low[i], g.high[i], rate, bias) : 0.f;
      s.beta[head][row] = inside ? beta_of(a, beta.low[i], beta.high[i]) : 0.f;
    }
  }
  __syncthreads();
  if (record.rows == 0) return;
  const int lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < heads; head += kThreads / 32) {
    const float2 g = *reinterpret_cast<const float2*>(&s.gate[head][2 * lane]);
    const float2 beta = *reinterpret_cast<const float2*>(&s.beta[head][2 * lane]);
    const int64_t index = int64_t(slot) * a.num_v_heads + first + head;
    float* record = a.vec + (a.saves ? index * kVecFloats + kFusedInRecord : index * kFusedVecFloats);
    const float2 gamma = write_vectors_of(record, g, beta, a.scale, lane);
    if (a.saves) {
      write_rest(a, index, gamma, lane);
    } else if (a.decay) {
      const float unknown = (beta.x - beta.x) + (beta.y - beta.y);  // NaN where a beta is not finite
      const float sum = warp_sum(g.x + g.y + unknown) * kLn2 + kGrowthRoom;
      if (lane == 0) a.decay[index] = sum;
    }
  }
}

}  // namespace qla::cuda::gates
