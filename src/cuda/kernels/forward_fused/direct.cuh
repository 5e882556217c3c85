// A direct launch: every work item has a CTA of its own, and there is no kernel before this one. The item follows from the
// caller's boundaries, and the state warps make its gate vectors (F0), (F1) before they have anything else to do.
#pragma once

#include "cuda/kernels/chunk_gates/rows.cuh"
#include "cuda/kernels/forward_fused/smem.cuh"
#include "cuda/kernels/plan_segments/boundaries.cuh"

namespace qla::cuda {

struct DirectItem {
  int sequence, v_head;
};
__device__ __forceinline__ DirectItem direct_item(const FusedArgs& a) {
  const int sequence = int(blockIdx.x) / a.p.num_v_heads;
  return {sequence, int(blockIdx.x) - sequence * a.p.num_v_heads};
}

// what plan_segments would have written, as far as the roles read it
__device__ __forceinline__ void put_direct_item(const FusedArgs& a, uint32_t slot) {
  const DirectItem item = direct_item(a);
  const segments::Span span = segments::span_of(a.plan, item.sequence);
  const int bos = int(span.bos), rows = int(span.eos - span.bos), chunks = (rows + 63) / 64;
  put_field(slot, offsetof(ItemSlot, item.token), bos);
  put_field(slot, offsetof(ItemSlot, item.slot), bos / 64 + item.sequence);
  put_field(slot, offsetof(ItemSlot, item.chunks), chunks);
  put_field(slot, offsetof(ItemSlot, item.last_rows), rows - 64 * (chunks - 1));
  put_field(slot, offsetof(ItemSlot, item.sequence), item.sequence);
  put_field(slot, offsetof(ItemSlot, item.v_head), item.v_head);
  put_field(slot, offsetof(ItemSlot, item.v_part), 0);
  put_field(slot, offsetof(ItemSlot, item.start), a.plan.has_initial ? QLA_START_INITIAL : QLA_START_ZERO);
  put_field(slot, offsetof(ItemSlot, item.is_last), kFinalState);
}

// Chunks warp, warp + warps, .. What runs here is not in the instruction cache yet, and a KiB of it takes a microsecond: the
// usual case, fp32 gate and beta as they are, is a loop of its own.
// The first chunks' go straight to their stages.
template <bool Norm, bool Save>
__device__ __forceinline__ void direct_gates(const FusedArgs& a, const FusedSmem& sm, int warp, int warps, int lane) {
  const DirectItem item = direct_item(a);
  const segments::Span span = segments::span_of(a.plan, item.sequence);
  const int rows = int(span.eos - span.bos);
  constexpr int kFloats = Save ? kVecFloats : kFusedVecFloats;
  const int64_t record = int64_t(int(span.bos) / 64 + item.sequence) * a.p.num_v_heads + item.v_head;
  float* out = a.gates.vec + record * kFloats + (Save ? kFusedInRecord : 0);
  const int64_t step = int64_t(warps) * a.p.num_v_heads * kFloats;
  out += warp * (step / warps);
  const int64_t batch = a.gates.varlen ? 0 : item.sequence, first = span.bos - batch * a.gates.tokens;
  const auto write = [&](int chunk, float2 g, float2 beta) {
    const bool staged = chunk < FusedConfig::kStages;
    float* to = staged ? static_cast<float*>(__cvta_shared_to_generic(sm.stage(chunk) + FusedConfig::kOffVec)) : out;
    const float2 gamma = gates::write_vectors_of(to, g, beta, a.gates.scale, lane);
    if constexpr (Save) gates::write_rest(a.gates, record + int64_t(chunk) * a.p.num_v_heads, gamma, lane);
    if (staged) {
      // What the store warp saves when norms have come to it is left alone: nothing orders its copies behind these stores.
      if constexpr (Save)
        for (int at = (Norm ? kFusedGamma : 0) + 2 * lane; at < kFusedVecFloats; at += 64)
          *reinterpret_cast<float2*>(out + at) = *reinterpret_cast<const float2*>(to + at);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(sm.first_gates());
    }
  };
  if (warp < FusedConfig::kStages && 64 * warp >= rows && lane == 0) ptx::mbarrier_arrive(sm.first_gates());
  if (a.direct == kDirectPlain) {
    const intra::View &vg = a.gates.g, &vb = a.gates.beta;
    const int64_t row = first + 64 * warp + 2 * lane;
    const float* g = static_cast<const float*>(vg.data) + batch * vg.stride[0] + row * vg.stride[1] + item.v_head * vg.stride[2];
    const float* beta =
        static_cast<const float*>(vb.data) + batch * vb.stride[0] + row * vb.stride[1] + item.v_head * vb.stride[2];
    int left = rows - 64 * warp - 2 * lane;  // rows from this lane's on
    const auto load = [&](float2& to_g, float2& to_beta) {
      to_g = to_beta = make_float2(0.f, 0.f);
      if (left > 0) to_g.x = g[0], to_beta.x = beta[0];
      if (left > 1) to_g.y = g[vg.stride[1]], to_beta.y = beta[vb.stride[1]];
      left -= 64 * warps;
      g += 64 * warps * vg.stride[1];
      beta += 64 * warps * vb.stride[1];
    };
    float2 x, b, next_x, next_b;
    load(x, b);
#pragma unroll 1
    for (int chunk = warp; 64 * chunk < rows; chunk += warps, out += step) {
      load(next_x, next_b);  // under this one
      const float2 raw = make_float2(max_keep_nan(x.x, -88.f) * kLog2e, max_keep_nan(x.y, -88.f) * kLog2e);
      write(chunk, raw, b);
      x = next_x;
      b = next_b;
    }
    return;
  }
  gates::RowPairs raw, next;
  const auto load = [&](gates::RowPairs& to, int chunk) {
    const int row = 64 * chunk + 2 * lane;
    gates::load_rows(to, a.gates, batch, first + row, item.v_head, min(2, rows - row));
  };
  float rate = 1.f, bias = 0.f;
  gates::load_head(a.gates, item.v_head, rate, bias);
  load(raw, warp);
#pragma unroll 1
  for (int chunk = warp; 64 * chunk < rows; chunk += warps, out += step) {
    load(next, chunk + warps);
    const int inside = min(2, rows - 64 * chunk - 2 * lane);
    const float2 g = gates::decode_gates(raw, a.gates, rate, bias, inside), beta = gates::decode_betas(raw, a.gates, inside);
    write(chunk, g, beta);
    raw = next;
  }
}

}  // namespace qla::cuda
