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
// A sequence's first token, over [B * T], and its rows. 32 bits hold them, and half of the code of segments::span_of().
struct DirectSpan {
  int bos, rows;
  __device__ __forceinline__ int chunks() const { return (rows + 63) / 64; }
};
__device__ __forceinline__ DirectSpan direct_span(const FusedArgs& a, int sequence) {
  const int tokens = int(a.plan.tokens);
  if (!a.plan.cu_seqlens) return {sequence * tokens, tokens};
  const bool wide = a.plan.index_dtype == QLA_INT64;
  int2 bos{}, eos{};  // low and high half; both asked for before one is looked at
  if (wide) {
    const int2* at = static_cast<const int2*>(a.plan.cu_seqlens) + sequence;
    bos = at[0], eos = at[1];
  } else {
    const int32_t* at = static_cast<const int32_t*>(a.plan.cu_seqlens) + sequence;
    bos.x = at[0], eos.x = at[1];
  }
  const auto clamped = [&](int2 x) {
    const int high = wide ? x.y : x.x >> 31;
    return high < 0 ? 0 : high > 0 ? tokens : int(min(uint32_t(x.x), uint32_t(tokens)));
  };
  const int from = clamped(bos);
  return {from, max(clamped(eos) - from, 0)};
}
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
  const int chunks = lane < a.plan.num_seqs ? direct_span(a, lane).chunks() : -1;
  int before = 0;
#pragma unroll 1
  for (int n = 0; n < int(a.plan.num_seqs); n++) {
    const int other = __shfl_sync(~0u, chunks, n);
    before += other > chunks || (other == chunks && n < lane);
  }
  return lane < a.plan.num_seqs ? before : -1;
}
__device__ __forceinline__ int sequence_at(const FusedArgs& a, int before, int place) {
  return __ffs(__ballot_sync(~0u, before == divided(place, a.by_v_heads))) - 1;
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
  __syncwarp();
}
__device__ __forceinline__ DirectItem direct_item(const FusedArgs& a, const FusedSmem& sm, int round) {
  const int place = direct_place(round), in_order = divided(place, a.by_v_heads);
  int sequence = in_order;
  if (direct_rounds(a)) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(sequence) : "r"(sm.direct_sequence(round)) : "memory");
  return {sequence, place - in_order * a.p.num_v_heads};
}

// .. by a whole warp, which looks for itself
__device__ __forceinline__ DirectItem direct_item_of_warp(const FusedArgs& a, int before, int round) {
  const int place = direct_place(round), in_order = divided(place, a.by_v_heads);
  return {direct_rounds(a) ? sequence_at(a, before, place) : in_order, place - in_order * a.p.num_v_heads};
}

// To L2 before whatever is still in the stream has ended: nothing is read.
__device__ __forceinline__ void ask_for_boundaries(const FusedArgs& a) {
  if (!a.plan.cu_seqlens) return;
  const int bytes = a.plan.index_dtype == QLA_INT64 ? 8 : 4;
  ptx::prefetch_l2(static_cast<const char*>(a.plan.cu_seqlens) + int64_t(divided(int(blockIdx.x), a.by_v_heads)) * bytes);
}

// what plan_segments would have written, as far as the roles read it
__device__ __forceinline__ void put_direct_item(const FusedArgs& a, const FusedSmem& sm, uint32_t slot, int round) {
  const DirectItem item = direct_item(a, sm, round);
  const DirectSpan span = direct_span(a, item.sequence);
  const int chunks = span.chunks();
  put_field(slot, offsetof(ItemSlot, item.token), span.bos);
  put_field(slot, offsetof(ItemSlot, item.slot), span.bos / 64 + item.sequence);
  put_field(slot, offsetof(ItemSlot, item.chunks), chunks);
  put_field(slot, offsetof(ItemSlot, item.last_rows), span.rows - 64 * (chunks - 1));
  put_field(slot, offsetof(ItemSlot, item.sequence), item.sequence);
  put_field(slot, offsetof(ItemSlot, item.v_head), item.v_head);
  put_field(slot, offsetof(ItemSlot, item.v_part), 0);
  put_field(slot, offsetof(ItemSlot, item.start), a.plan.has_initial ? QLA_START_INITIAL : QLA_START_ZERO);
  put_field(slot, offsetof(ItemSlot, item.is_last), kFinalState);
}
// Whether nothing but the boundaries has to be read for the first item (and whether it has an initial state).
__device__ __forceinline__ bool known_at_once(const FusedArgs& a) { return a.direct && !a.p.state_indices; }

// .. and its slot
__device__ __forceinline__ void put_first_slot(const FusedArgs& a, uint32_t slot, const DirectItem& item, const DirectSpan& span,
                                               int batch, int row) {
  static_assert(offsetof(ItemSlot, item.chunks) == 12 && offsetof(ItemSlot, item.last_rows) == 20 &&
                offsetof(ItemSlot, item.v_head) == 28 && offsetof(ItemSlot, item.start) == 36 &&
                offsetof(ItemSlot, item.is_last) == 44 && offsetof(ItemSlot, state_index) == 64 &&
                offsetof(ItemSlot, skip_rows) == 68 && offsetof(ItemSlot, row) == 72 && offsetof(ItemSlot, valid) == 80 &&
                offsetof(ItemSlot, first) == 84);
  const int chunks = span.chunks();
  const int state = a.p.has_initial_state && !a.p.has_initial_state[item.sequence] ? 0 : a.first_state;
  ptx::sts4u(slot, span.bos, 0, span.bos / 64 + item.sequence, chunks);
  ptx::sts4u(slot + 16, 0, span.rows - 64 * (chunks - 1), item.sequence, item.v_head);
  ptx::sts4u(slot + 32, 0, state ? QLA_START_INITIAL : QLA_START_ZERO, 0, kFinalState);
  ptx::sts4u(slot + 64, item.sequence, 0, row, batch);
  ptx::sts4u(slot + 80, 1, state == kStateInOnePiece ? kFirstByCopy : kFirst, 0, 0);
}

// Chunks warp, warp + warps, .. of an item, by one warp. The first item's first chunks' go straight to their stages. What runs
// here is not in the instruction cache yet, and a KiB of it takes a microsecond: the usual case, fp32 gate and beta as they are,
// is a loop of its own, with its loads in one place.
template <bool Norm, bool Save>
__device__ __forceinline__ void direct_gates_of(const FusedArgs& a, const FusedSmem& sm, const DirectItem& item,
                                                const DirectSpan& span, bool first_item, int warp, int warps, int lane) {
  const int rows = span.rows;
  constexpr int kFloats = Save ? kVecFloats : kFusedVecFloats;
  const int64_t record = int64_t(span.bos / 64 + item.sequence) * a.p.num_v_heads + item.v_head;
  const int batch = a.gates.varlen ? 0 : item.sequence, first = a.gates.varlen ? span.bos : 0;
  const auto write = [&](int chunk, float2 g, float2 beta) {
    const bool staged = first_item && chunk < FusedConfig::kStages;
    const int64_t index = record + int64_t(chunk) * a.p.num_v_heads;
    float* out = a.gates.vec + index * kFloats + (Save ? kFusedInRecord : 0);
    float* to = staged ? static_cast<float*>(__cvta_shared_to_generic(sm.stage(chunk) + FusedConfig::kOffVec)) : out;
    const float2 gamma = gates::write_vectors_of(to, g, beta, a.gates.scale, lane);
    if constexpr (Save) gates::write_rest(a.gates, index, gamma, lane);
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
    constexpr int kAhead = 2;  // chunks: what this takes is their latency
    const intra::View &vg = a.gates.g, &vb = a.gates.beta;
    const int row = 64 * warp + 2 * lane;
    const auto from = [&](const intra::View& x) {
      return static_cast<const float*>(x.data) + batch * x.stride[0] + (first + row) * x.stride[1] + item.v_head * x.stride[2];
    };
    const float *g = from(vg), *beta = from(vb);
    int left = rows - row;  // from this lane's row on
    float2 x[kAhead + 1], b[kAhead + 1];
#pragma unroll
    for (int i = 0; i <= kAhead; i++) x[i] = b[i] = make_float2(0.f, 0.f);
#pragma unroll 1
    for (int chunk = warp - kAhead * warps; 64 * chunk < rows; chunk += warps) {
      x[kAhead] = b[kAhead] = make_float2(0.f, 0.f);
      if (left > 0) x[kAhead].x = g[0], b[kAhead].x = beta[0];
      if (left > 1) x[kAhead].y = g[vg.stride[1]], b[kAhead].y = beta[vb.stride[1]];
      left -= 64 * warps;
      g += 64 * warps * vg.stride[1];
      beta += 64 * warps * vb.stride[1];
      if (chunk >= 0) write(chunk, make_float2(max_keep_nan(x[0].x, -88.f) * kLog2e, max_keep_nan(x[0].y, -88.f) * kLog2e), b[0]);
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
  for (int chunk = warp; 64 * chunk < rows; chunk += warps) {
    load(next, chunk + warps);
    const int inside = min(2, rows - 64 * chunk - 2 * lane);
    const float2 g = gates::decode_gates(raw, a.gates, rate, bias, inside), beta = gates::decode_betas(raw, a.gates, inside);
    write(chunk, g, beta);
    raw = next;
  }
}
// All items', by the state warps
template <bool Norm, bool Save>
__device__ __forceinline__ void direct_gates(const FusedArgs& a, const FusedSmem& sm, int warp, int warps, int lane) {
  const int before = direct_rounds(a) ? longer_sequences(a, lane) : 0;
#pragma unroll 1
  for (int round = 0; direct_place(round) < a.p.max_items; round++) {
    const DirectItem item = direct_item_of_warp(a, before, round);
    direct_gates_of<Norm, Save>(a, sm, item, direct_span(a, item.sequence), round == 0, warp, warps, lane);
  }
}

}  // namespace qla::cuda
