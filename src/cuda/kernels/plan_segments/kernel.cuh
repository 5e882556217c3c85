// plan_segments - from the boundaries to the tables the other kernels walk by: chunk_table, and the work items of an uncut run.
//   grid: ceil(max(slots, N) / kThreads), at most two CTAs a SM. No CTA waits for another: where an item goes (longest sequences
//   first) each CTA works out for its own sequences by reading all N lengths, which is cheaper than a second launch up to N of
//   10^5.
//
// Overlapping sequences (boundaries that are not monotone) are computed as they say, in no fixed order.
#pragma once

#include <cstdint>

#include "cuda/kernels/chunk_gates/vectors.cuh"
#include "cuda/kernels/plan_segments/boundaries.cuh"
#include "cuda/kernels/plan_segments/config.hpp"
#include "cuda/ptx/control.cuh"
#include "plan/forms.hpp"
#include "plan/ranges.hpp"

namespace qla::cuda::segments {

__device__ __forceinline__ int64_t base_slot(const Span& span, int64_t n) { return span.bos / 64 + n; }
// Parts: of a call with both forms, whose ranges have a part of each sequence. Not in the code of all other calls.
template <bool Parts = false>
__device__ __forceinline__ qla::plan::Run run_of(const Args& a, const Span& span, int64_t n) {
  if (!Parts || a.ranges <= 1) return qla::plan::run_in_range(base_slot(span, n), span.chunks(), a.first_slot, a.slots);
  qla::plan::Run run = qla::plan::part_of_sequence(span.chunks(), a.range, a.ranges);
  run.slot = a.part_slot[n];
  if (run.chunks > a.slots - run.slot) {  // boundaries that overlap: not beyond the table
    run.chunks = a.slots - run.slot;
    run.goes_on = true;
  }
  return run;
}

// 0: the longest. Four buckets an octave, no sequence at all: the last.
__device__ __forceinline__ int length_bucket(int32_t chunks) {
  if (chunks == 0) return kBuckets - 1;
  const int octave = 31 - __clz(chunks), quarter = octave >= 2 ? chunks >> (octave - 2) & 3 : chunks << (2 - octave) & 3;
  return kBuckets - 2 - (4 * octave + quarter);
}

// Both forms: whether the call takes the fused one, and the chunk of a slot. All boundaries are asked for before one is looked
// at.
struct FewSequences {
  int64_t at[qla::plan::kMostBothSeqs + 1];
  __device__ __forceinline__ explicit FewSequences(const Args& a) {
    if (a.index_dtype == QLA_INT64) {
#pragma unroll
      for (int n = 0; n <= qla::plan::kMostBothSeqs; n++)
        at[n] = static_cast<const int64_t*>(a.cu_seqlens)[n < a.num_seqs ? n : a.num_seqs];
    } else {
#pragma unroll
      for (int n = 0; n <= qla::plan::kMostBothSeqs; n++)
        at[n] = static_cast<const int32_t*>(a.cu_seqlens)[n < a.num_seqs ? n : a.num_seqs];
    }
#pragma unroll
    for (int64_t& x : at) x = clamp_boundary(a, x);
  }
  __device__ __forceinline__ Span span(int n) const { return {at[n], at[n + 1] < at[n] ? at[n] : at[n + 1]}; }
  __device__ __forceinline__ bool takes_fused(const Args& a) const {
    int32_t longest = 0;
#pragma unroll
    for (int n = 0; n < qla::plan::kMostBothSeqs; n++) longest = max(longest, span(n).chunks());
    return qla::plan::takes_fused(longest, a.fused_chunks);
  }
  __device__ __forceinline__ ChunkRecord chunk(const Args& a, int64_t slot) const {
    ChunkRecord record = record_of(span(0), 0, slot);
#pragma unroll
    for (int n = 1; n < qla::plan::kMostBothSeqs; n++)
      if (n < a.num_seqs && at[n] / 64 + n <= slot) record = record_of(span(n), n, slot);
    return record;
  }
};

struct Shared {
  int64_t boundaries[kCachedSeqs + 1];
  int32_t before[kBuckets], total[kBuckets];  // sequences a bucket: in front of this CTA's own, all
  int32_t present;                            // all sequences with chunks in the range
  unsigned long long chunks_before, checkpoints_before;
  int64_t scan[kThreads / 32];
  int32_t invalid;
};

// The chunk of a slot; its sequence by binary search for the last n with bos(n) / 64 + n <= slot. bos(n): the boundary, clamped.
template <class Bos>
__device__ __forceinline__ ChunkRecord find_chunk(const Args& a, int64_t slot, const Bos& bos) {
  int64_t low = 0, high = a.num_seqs;  // the answer is in [low, high)
  if (!a.cu_seqlens) {
    low = slot / (a.tokens / 64 + 1);  // never too far to the left by more than the rounding of n T / 64: corrected below
    while (low + 1 < a.num_seqs && (low + 1) * a.tokens / 64 + low + 1 <= slot) low++;
    while (low > 0 && low * a.tokens / 64 + low > slot) low--;
  } else {
    while (high - low > 1) {
      const int64_t mid = (low + high) / 2;
      if (bos(mid) / 64 + mid <= slot)
        low = mid;
      else
        high = mid;
    }
  }
  return record_of(a.num_seqs > 0 ? span_of(a, low) : Span{0, 0}, int32_t(low), slot);
}
// chunk_table: a thread a slot
__device__ __forceinline__ void write_chunks(const Args& a, const Shared& s, bool cached, int cta, int ctas) {
  const auto bos = [&](int64_t n) { return cached ? s.boundaries[n] : boundary(a, n); };
  for (int64_t at = int64_t(cta) * kThreads + threadIdx.x; at < a.slots; at += int64_t(ctas) * kThreads) {
    const ChunkRecord record = find_chunk(a, a.first_slot + at, bos);
    *reinterpret_cast<int4*>(a.chunk_table + at) = *reinterpret_cast<const int4*>(&record);
  }
}

// inclusive sum over the CTA, in a fixed order
__device__ __forceinline__ int64_t block_inclusive_sum(int64_t x, int64_t* scan) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int64_t left = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += left;
  }
  __syncthreads();
  if (lane == 31) scan[warp] = x;
  __syncthreads();
  for (int w = 0; w < warp; w++) x += scan[w];
  return x;
}

__device__ __forceinline__ void write_items(const Args& a, Shared& s, int64_t first, int64_t last) {
  // all lengths: how many lie in each bucket, and in front of this CTA's own
  for (int i = threadIdx.x; i < kBuckets; i += kThreads) s.before[i] = s.total[i] = 0;
  if (threadIdx.x == 0) s.chunks_before = s.checkpoints_before = 0;
  __syncthreads();
  int64_t chunks_before = 0, checkpoints_before = 0;
  for (int64_t n = threadIdx.x; n < a.num_seqs; n += kThreads) {
    const Span span = span_of(a, n);
    const qla::plan::Run run = run_of(a, span, n);
    const int bucket = length_bucket(run.chunks);
    const unsigned same = __match_any_sync(__activemask(), run.present ? bucket * 2 + (n < first) : -1);
    if (run.present && __ffs(int(same)) - 1 == int(threadIdx.x % 32)) {
      atomicAdd(&s.total[bucket], __popc(same));
      if (n < first) atomicAdd(&s.before[bucket], __popc(same));
    }
    if (n < first) {
      chunks_before += span.chunks();
      if (a.checkpoint_every_chunks) checkpoints_before += (span.eos - span.bos) / (64 * int64_t(a.checkpoint_every_chunks));
    }
  }
  if (chunks_before) atomicAdd(&s.chunks_before, static_cast<unsigned long long>(chunks_before));
  if (checkpoints_before) atomicAdd(&s.checkpoints_before, static_cast<unsigned long long>(checkpoints_before));
  __syncthreads();
  if (threadIdx.x == 0) {  // where a bucket's next sequence goes
    int32_t base = 0;
    for (int b = 0; b < kBuckets; b++) {
      s.before[b] += base;
      base += s.total[b];
    }
    s.present = base;
  }
  __syncthreads();

  int64_t chunk_base = int64_t(s.chunks_before), checkpoint_base = int64_t(s.checkpoints_before);
  const int per_seq = a.num_v_heads * a.v_parts;
  for (int64_t from = first; from < last; from += kThreads) {
    const int64_t n = from + threadIdx.x;
    Span span{0, 0};
    qla::plan::Run run;
    int32_t place = -1;
    if (n < last) {
      span = span_of(a, n);
      run = run_of(a, span, n);
      if (run.present) place = atomicAdd(&s.before[length_bucket(run.chunks)], 1);
    }
    const int64_t checkpoints = a.checkpoint_every_chunks ? (span.eos - span.bos) / (64 * int64_t(a.checkpoint_every_chunks)) : 0;
    const int64_t chunks_through = block_inclusive_sum(span.chunks(), s.scan),
                  checkpoints_through = block_inclusive_sum(checkpoints, s.scan);
    WorkItem item{};
    item.token = span.bos + 64 * int64_t(run.first);
    item.slot = run.slot;
    item.chunks = run.chunks;
    item.last_rows = run.goes_on ? 64 : run.chunks ? int32_t(span.eos - item.token - 64 * int64_t(run.chunks - 1)) : 0;
    item.sequence = int32_t(n);
    item.start = run.continued()                                                                 ? kStartCarried
                 : n < last && a.has_initial && (!a.has_initial_state || a.has_initial_state[n]) ? QLA_START_INITIAL
                                                                                                 : QLA_START_ZERO;
    item.is_last = run.goes_on ? kCarry : kFinalState;
    item.first_chunk = run.first;
    item.chunk_base = int32_t(chunk_base + chunks_through - span.chunks());
    item.checkpoint_base = int32_t(checkpoint_base + checkpoints_through - checkpoints);
    // the heads of one sequence lie side by side: a warp writes its sequences one after the other, a lane a head
    const int lane = threadIdx.x % 32;
    for (int source = 0; source < 32; source++) {
      const int64_t owner = from + threadIdx.x / 32 * 32 + source;
      if (owner >= last) break;
      WorkItem out;
      const int* mine = reinterpret_cast<const int*>(&item);
      int* copy = reinterpret_cast<int*>(&out);
#pragma unroll
      for (int i = 0; i < int(sizeof(WorkItem) / 4); i++) copy[i] = __shfl_sync(~0u, mine[i], source);
      const int64_t at = int64_t(__shfl_sync(~0u, place, source)) * per_seq;
      if (at < 0) continue;  // nothing of it in the range
      for (int i = lane; i < per_seq; i += 32) {
        out.v_head = i / a.v_parts;
        out.v_part = i % a.v_parts;
        int4* to = reinterpret_cast<int4*>(a.items + at + i);
#pragma unroll
        for (int w = 0; w < 4; w++) to[w] = reinterpret_cast<const int4*>(&out)[w];
      }
    }
    if (from + kThreads < last) {  // the CTA's sums so far
      __syncthreads();
      if (threadIdx.x == kThreads - 1)
        s.chunks_before = chunk_base + chunks_through, s.checkpoints_before = checkpoint_base + checkpoints_through;
      __syncthreads();
      chunk_base = int64_t(s.chunks_before);
      checkpoint_base = int64_t(s.checkpoints_before);
    }
  }
}

// the work of CTA `cta` of `ctas`
__device__ __forceinline__ void plan_cta(const Args& a, Shared& s, int cta, int ctas) {
  const bool cached = a.cu_seqlens && a.num_seqs <= kCachedSeqs;
  if (threadIdx.x == 0) s.invalid = 0;
  if (cached)
    for (int n = threadIdx.x; n <= a.num_seqs; n += kThreads) s.boundaries[n] = boundary(a, n);
  __syncthreads();
  write_chunks(a, s, cached, cta, ctas);
  if (a.items) {
    const int64_t each = (a.num_seqs + ctas - 1) / ctas, first = int64_t(cta) * each;
    const int64_t last = first + each < a.num_seqs ? first + each : a.num_seqs;
    if (first < last) write_items(a, s, first, last);
  }
  if (cta != 0) return;
  if (a.cu_seqlens)
    for (int64_t n = threadIdx.x; n < a.num_seqs; n += kThreads) {
      const int64_t x = raw_boundary(a, n), y = raw_boundary(a, n + 1);
      if (x < 0 || y < x || y > a.tokens || (n == 0 && x != 0)) s.invalid = 1;
    }
  __syncthreads();
  if (threadIdx.x == 0) {
    PlanHeader header{};
    header.num_items = a.items && a.num_seqs > 0 ? int32_t(s.present * a.num_v_heads * a.v_parts) : 0;
    header.valid_tokens = !s.invalid;
    header.end_token = end_of_outputs(a);
    *a.header = header;
  }
}

// The header of whoever has nothing to do, and no padding to zero
__device__ __forceinline__ PlanHeader header_without_items(int64_t tokens) {
  PlanHeader none{};
  none.valid_tokens = 1;
  none.end_token = tokens;
  return none;
}

__global__ void __launch_bounds__(kThreads) plan_segments(const __grid_constant__ Args a) {
  __shared__ Shared s;
  ptx::begin_call();
  plan_cta(a, s, int(blockIdx.x), int(gridDim.x));
}

// The same in the first `plan_ctas`, and in the others the gate vectors of the fused forward: a CTA a (slot, part of the heads).
union PlanOrGates {
  Shared plan;
  gates::Shared gates;
};
__global__ void __launch_bounds__(kThreads)
    plan_and_gates(const __grid_constant__ Args a, const __grid_constant__ gates::Args g, int plan_ctas) {
  __shared__ PlanOrGates s;
  ptx::begin_call();
  if (int(blockIdx.x) < plan_ctas) {
    plan_cta(a, s.plan, int(blockIdx.x), plan_ctas);
  } else {
    const int unit = int(blockIdx.x) - plan_ctas, slot = unit / g.parts;
    const ChunkRecord record = find_chunk(a, slot, [&](int64_t n) { return boundary(a, n); });
    gates::write_vectors(g, s.gates, record, slot, unit - slot * g.parts);
  }
}

}  // namespace qla::cuda::segments
