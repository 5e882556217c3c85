// The work of plan_segments for at most 32 sequences: every warp knows all of them, a lane each, so that nothing is handed over
// in shared memory and no CTA or warp waits for another. Two round trips to memory (boundaries, flags of initial states), then
// stores.
#pragma once

#include <cstdint>

#include "cuda/kernels/plan_segments/kernel.cuh"

namespace qla::cuda::segments {

struct FewPlan {
  Span span{0, 0};
  int64_t end = 0;  // the last boundary as it is given, clamped
  qla::plan::Run run;
  int32_t start = QLA_START_ZERO, place = 0;  // among sequences with chunks in the range, longest first
  int32_t chunk_base = 0, checkpoint_base = 0;
  unsigned present = 0;
  bool valid = true;
};

// by every lane of a warp; sequence = lane
template <bool Parts>
__device__ __forceinline__ FewPlan few_plan(const Args& a) {
  const int n = int(threadIdx.x % 32), seqs = int(a.num_seqs);
  FewPlan p;
  bool bad = false;
  if (n < seqs) {
    int64_t x = n * a.tokens, y = x + a.tokens;
    if (a.cu_seqlens) {
      if (a.index_dtype == QLA_INT64) {
        x = static_cast<const int64_t*>(a.cu_seqlens)[n], y = static_cast<const int64_t*>(a.cu_seqlens)[n + 1];
      } else {
        x = static_cast<const int32_t*>(a.cu_seqlens)[n], y = static_cast<const int32_t*>(a.cu_seqlens)[n + 1];
      }
      bad = x < 0 || y < x || y > a.tokens || (n == 0 && x != 0);
      x = clamp_boundary(a, x), y = clamp_boundary(a, y);
    }
    p.span = {x, y < x ? x : y};
    p.end = y;
    p.start = start_of(a, n);
    p.run = run_of<Parts>(a, p.span, n);
  }
  p.valid = !__any_sync(~0u, bad);
  p.present = __ballot_sync(~0u, p.run.present);
  if (p.run.continued()) p.start = kStartCarried;
  const int32_t every = a.checkpoint_every_chunks, chunks = p.span.chunks(),
                checkpoints = every ? int32_t(uint32_t((p.span.eos - p.span.bos) / 64) / uint32_t(every)) : 0,
                bucket = length_bucket(p.run.chunks);
  p.chunk_base = chunks, p.checkpoint_base = checkpoints;
#pragma unroll 1
  for (int d = 1; d < seqs; d *= 2) {
    const int32_t left = __shfl_up_sync(~0u, p.chunk_base, d), more = __shfl_up_sync(~0u, p.checkpoint_base, d);
    if (n >= d) p.chunk_base += left, p.checkpoint_base += more;
  }
  p.chunk_base -= chunks, p.checkpoint_base -= checkpoints;
#pragma unroll 1
  for (int m = 0; m < seqs; m++) {
    const int32_t other = __shfl_sync(~0u, bucket, m);
    p.place += p.present >> m & (other < bucket || (other == bucket && m < n));
  }
  return p;
}

// the work of CTA `cta` of `ctas`
template <bool Parts = false>
__device__ __forceinline__ void plan_few_cta(const Args& a, int cta, int ctas) {
  const int lane = int(threadIdx.x % 32), seqs = int(a.num_seqs), first = cta * kThreads + int(threadIdx.x) - lane,
            step = ctas * kThreads;
  const FewPlan p = few_plan<Parts>(a);
  const auto from = [](int64_t x, int lane) { return __shfl_sync(~0u, x, lane); };
  if (!Parts || a.chunk_table) {
    const bool parts = Parts && a.ranges > 1;
    // first slot of each sequence, counted from the range's
    const int64_t bos_slot = parts ? p.run.slot : base_slot(p.span, lane) - a.first_slot;
    const int64_t begins = parts && !p.run.present ? INT64_MAX : bos_slot;
#pragma unroll 1
    for (int at = first; at < a.slots; at += step) {  // a thread a slot; the warp's first lane decides
      const int slot = at + lane;
      int n = 0;
#pragma unroll 1
      for (int m = 1; m < seqs; m++)
        if (from(begins, m) <= slot) n = m;
      const Span span{from(p.span.bos, n), from(p.span.eos, n)};
      const int64_t chunk = slot - from(bos_slot, n) + (parts ? __shfl_sync(~0u, p.run.first, n) : 0),
                    end = parts ? __shfl_sync(~0u, p.run.first + p.run.chunks, n) : INT64_MAX, token = span.bos + 64 * chunk;
      ChunkRecord record{0, 0, 0};
      if (seqs > 0 && chunk >= 0 && chunk < end && token < span.eos)
        record = {token, int32_t(span.eos - token < 64 ? span.eos - token : 64), n};
      if (slot < a.slots) *reinterpret_cast<int4*>(a.chunk_table + slot) = *reinterpret_cast<const int4*>(&record);
    }
  }
  if (a.sums && __any_sync(~0u, int64_t(p.run.chunks) > a.longest_whole)) {
    const int32_t sums = a.slots * a.num_v_heads;
#pragma unroll 1
    for (int32_t i = first + lane; i < sums; i += step) reinterpret_cast<uint32_t*>(a.sums)[i] = kNoSum;
  }
  if (a.items) {  // four lanes an item, 16 bytes each
    const int per_seq = a.num_v_heads * a.v_parts, words = 4 * seqs * per_seq, word = lane % 4;
    const int64_t token = p.span.bos + 64 * int64_t(p.run.first);
    const int32_t last_rows = p.run.goes_on ? 64 : p.run.chunks ? int32_t(p.span.eos - token) - 64 * (p.run.chunks - 1) : 0;
    const int32_t place = p.run.present ? p.place * per_seq : -1;
    // what the lanes of each word need of their sequence
    const int4 words_of[3] = {make_int4(int(token), int(token >> 32), p.run.slot, p.run.chunks),
                              make_int4(last_rows, p.start, p.run.goes_on ? kCarry : kFinalState, place),
                              make_int4(p.run.first, p.chunk_base, p.checkpoint_base, 0)};
#pragma unroll 1
    for (int at = first; at < words; at += step) {
      const int item = (at + lane) / 4, n = min(seqs - 1, item / per_seq), rest = item - n * per_seq;
      const auto get = [&](const int4& x) {
        return make_int4(__shfl_sync(~0u, x.x, n), __shfl_sync(~0u, x.y, n), __shfl_sync(~0u, x.z, n), __shfl_sync(~0u, x.w, n));
      };
      const int4 walk = get(words_of[0]), kind = get(words_of[1]), base = get(words_of[2]);
      const int head = a.v_parts == 2 ? rest / 2 : rest, part = a.v_parts == 2 ? rest % 2 : 0;
      const int4 x = word == 0   ? walk
                     : word == 1 ? make_int4(0, kind.x, n, head)
                     : word == 2 ? make_int4(part, kind.y, 0, kind.z)
                                 : make_int4(0, base.x, base.y, base.z);
      if (at + lane < words && kind.w >= 0) reinterpret_cast<int4*>(a.items + kind.w + rest)[word] = x;
    }
  }
  if (cta != 0 || threadIdx.x >= 32) return;
  const int64_t last = from(p.end, seqs > 0 ? seqs - 1 : 0);
  if (lane != 0) return;
  PlanHeader header{};
  header.num_items = a.items ? __popc(p.present) * a.num_v_heads * a.v_parts : 0;
  header.valid_tokens = p.valid;
  // padding belongs to the last range
  const int64_t tokens = a.cu_seqlens ? a.tokens : a.num_seqs * a.tokens;
  const bool more = Parts && a.ranges > 1 ? a.range + 1 < a.ranges : a.first_slot + int64_t(a.slots) < tokens / 64 + a.num_seqs;
  header.end_token = more ? tokens : seqs > 0 ? last : 0;
  *a.header = header;
}

__global__ void __launch_bounds__(kThreads) plan_few(const __grid_constant__ Args a) {
  ptx::begin_call();
  plan_few_cta(a, int(blockIdx.x), int(gridDim.x));
}
__global__ void __launch_bounds__(kThreads)
    plan_few_and_gates(const __grid_constant__ Args a, const __grid_constant__ gates::Args g, int plan_ctas) {
  __shared__ gates::Shared s;
  ptx::begin_call();
  if (int(blockIdx.x) < plan_ctas) {
    plan_few_cta(a, int(blockIdx.x), plan_ctas);
  } else {
    const int unit = int(blockIdx.x) - plan_ctas, slot = unit / g.parts;
    gates::write_vectors(g, s, direct_records(a, {slot}).record[0], slot, unit - slot * g.parts);
  }
}

// Both forms: the tables of one range, or in the first range's place the fused form's; headers without work for whoever has none.
__device__ __forceinline__ void plan_both(const Args& a, Args& own, const FewSequences& few, bool fused, int range, int cta,
                                          int ctas) {
  const PlanHeader none = header_without_items(a.tokens);
  if (threadIdx.x == 0) {
    own = a;
    if (fused) {
      own.header = a.fused_header;
      own.items = a.fused_items;
      own.v_parts = 1;
      own.chunk_table = nullptr;
      own.ranges = 0;
    } else {
      own.header += range;
      own.items += range * a.range_items;
      own.chunk_table += int64_t(range) * a.range_slots;
      own.slots = a.range_slots;
      own.range = range;
      int32_t slot = 0;
#pragma unroll
      for (int n = 0; n < qla::plan::kMostBothSeqs; n++) {
        own.part_slot[n] = slot;
        slot = min(slot + qla::plan::part_of_sequence(few.span(n).chunks(), range, a.ranges).chunks, a.range_slots);
      }
    }
  }
  if (cta == 0 && threadIdx.x == 0) {
    if (fused)
      a.header[range] = none;
    else if (range == 0)
      *a.fused_header = none;
  }
  // The fused form's load threads copy an item before they know how many there are: none may be what nobody wrote.
  if (cta == 0 && range == 0 && !fused)
    for (int64_t i = threadIdx.x; i < a.num_seqs * a.num_v_heads * int64_t(sizeof(WorkItem) / 16); i += kThreads)
      reinterpret_cast<int4*>(a.fused_items)[i] = make_int4(0, 0, 0, 0);
  __syncthreads();
  if (!fused || range == 0) plan_few_cta<true>(own, cta, ctas);
}

// .. of a call with both forms: `plan_ctas` for each range, and gate vectors where the fused form takes the call.
__global__ void __launch_bounds__(kThreads)
    plan_both_and_gates(const __grid_constant__ Args a, const __grid_constant__ gates::Args g, int plan_ctas) {
  __shared__ union {
    Args own;
    gates::Shared gates;
  } s;
  ptx::begin_call();
  const FewSequences few(a);
  const bool fused = few.takes_fused(a);
  const int unit = int(blockIdx.x) - plan_ctas * a.ranges, slot = unit / g.parts;
  if (unit < 0)
    plan_both(a, s.own, few, fused, int(blockIdx.x) / plan_ctas, int(blockIdx.x) % plan_ctas, plan_ctas);
  else if (fused)
    gates::write_vectors(g, s.gates, few.chunk(a, slot), slot, unit - slot * g.parts);
}

}  // namespace qla::cuda::segments
