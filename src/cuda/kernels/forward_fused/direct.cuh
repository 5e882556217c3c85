// A direct launch: a CTA has one work item, or up to four, and there is no kernel before this one. The items follow from the
// caller's boundaries, and the state warps make their gate vectors (F0), (F1) before they have anything else to do.
#pragma once

#include "cuda/kernels/chunk_gates/rows.cuh"
#include "cuda/kernels/forward_fused/smem.cuh"
#include "cuda/kernels/plan_segments/boundaries.cuh"

namespace qla::cuda {

struct DirectItem {
  int sequence, v_head;
};
// A CTA's item in a round, as a place in the list of all: every other round goes backwards. From max_items on there is none.
__device__ __forceinline__ int direct_place(int round) {
  int cta, ctas;  // read here and not kept
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
  return round * ctas + (round % 2 ? ctas - 1 - cta : cta);
}
__device__ __forceinline__ bool direct_rounds(const FusedArgs& a) {
  int ctas;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
  return a.p.max_items > ctas;
}
// With more items than CTAs that list has the longest sequences first. By a whole warp, a lane a sequence: how many are before
// it.
__device__ __forceinline__ int longer_sequences(const FusedArgs& a, int lane) {
  const int chunks = lane < a.plan.num_seqs ? segments::span_of(a.plan, lane).chunks() : -1;
  int before = 0;
#pragma unroll 1
  for (int n = 0; n < int(a.plan.num_seqs); n++) {
    const int other = __shfl_sync(~0u, chunks, n);
    before += other > chunks || (other == chunks && n < lane);
  }
  return lane < a.plan.num_seqs ? before : -1;
}
__device__ __forceinline__ int sequence_at(const FusedArgs& a, int before, int place) {
  return __ffs(__ballot_sync(~0u, before == place / a.p.num_v_heads)) - 1;
}
// .. for the load thread, which is alone
__device__ __forceinline__ void put_direct_sequences(const FusedArgs& a, const FusedSmem& sm, int lane) {
  if (!direct_rounds(a)) return;
  const int before = longer_sequences(a, lane);
#pragma unroll 1
  for (int round = 0; direct_place(round) < a.p.max_items; round++) {
    const int sequence = sequence_at(a, before, direct_place(round));
    if (lane == 0) put_field(sm.direct_sequence(round), 0, sequence);
  }
}
__device__ __forceinline__ DirectItem direct_item(const FusedArgs& a, const FusedSmem& sm, int round) {
  const int place = direct_place(round), in_order = place / a.p.num_v_heads;
  int sequence = in_order;
  if (direct_rounds(a)) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(sequence) : "r"(sm.direct_sequence(round)) : "memory");
  return {sequence, place - in_order * a.p.num_v_heads};
}

// To L2 before whatever is still in the stream has ended: nothing is read.
__device__ __forceinline__ void ask_for_boundaries(const FusedArgs& a) {
  if (!a.plan.cu_seqlens) return;
  const int bytes = a.plan.index_dtype == QLA_INT64 ? 8 : 4;
  ptx::prefetch_l2(static_cast<const char*>(a.plan.cu_seqlens) + int64_t(int(blockIdx.x) / a.p.num_v_heads) * bytes);
}

// what plan_segments would have written, as far as the roles read it
__device__ __forceinline__ void put_direct_item(const FusedArgs& a, const FusedSmem& sm, uint32_t slot, int round) {
  const DirectItem item = direct_item(a, sm, round);
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
// usual case, fp32 gate and beta as they are, is a loop of its own. The first item's first chunks' go straight to their stages.
template <bool Norm, bool Save>
__device__ __forceinline__ void direct_gates_of(const FusedArgs& a, const FusedSmem& sm, const DirectItem& item, bool first_item,
                                                int warp, int warps, int lane) {
  const segments::Span span = segments::span_of(a.plan, item.sequence);
  const int rows = int(span.eos - span.bos);
  constexpr int kFloats = Save ? kVecFloats : kFusedVecFloats;
  const int64_t record = int64_t(int(span.bos) / 64 + item.sequence) * a.p.num_v_heads + item.v_head;
  float* out = a.gates.vec + record * kFloats + (Save ? kFusedInRecord : 0);
  const int64_t step = int64_t(warps) * a.p.num_v_heads * kFloats;
  out += warp * (step / warps);
  const int64_t batch = a.gates.varlen ? 0 : item.sequence, first = span.bos - batch * a.gates.tokens;
  const auto write = [&](int chunk, float2 g, float2 beta) {
    const bool staged = first_item && chunk < FusedConfig::kStages;
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
  if (first_item && warp < FusedConfig::kStages && 64 * warp >= rows && lane == 0) ptx::mbarrier_arrive(sm.first_gates());
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
    constexpr int kAhead = 4;  // chunks: what this takes is their latency
    float2 x[kAhead + 1], b[kAhead + 1];
#pragma unroll
    for (int i = 0; i < kAhead; i++) load(x[i], b[i]);
#pragma unroll 1
    for (int chunk = warp; 64 * chunk < rows; chunk += warps, out += step) {
      load(x[kAhead], b[kAhead]);
      const float2 raw = make_float2(max_keep_nan(x[0].x, -88.f) * kLog2e, max_keep_nan(x[0].y, -88.f) * kLog2e);
      write(chunk, raw, b[0]);
#pragma unroll
      for (int i = 0; i < kAhead; i++) x[i] = x[i + 1], b[i] = b[i + 1];
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
template <bool Norm, bool Save>
__device__ __forceinline__ void direct_gates(const FusedArgs& a, const FusedSmem& sm, int warp, int warps, int lane) {
  const int before = direct_rounds(a) ? longer_sequences(a, lane) : 0;
#pragma unroll 1
  for (int round = 0; direct_place(round) < a.p.max_items; round++) {
    const int place = direct_place(round), in_order = place / a.p.num_v_heads;
    const DirectItem item{direct_rounds(a) ? sequence_at(a, before, place) : in_order, place - in_order * a.p.num_v_heads};
    direct_gates_of<Norm, Save>(a, sm, item, round == 0, warp, warps, lane);
  }
}

}  // namespace qla::cuda
