// cut_items - the work items of a run with context parallelism, from boundaries and gates: what for_each_segment() (plan/segments.hpp)
//   says of each sequence and value head, in two lists: the items of the main pass, longest first, and of the pre-pass, which walks to
//   S_ext and M (C1), (C2) for the boundaries that are merged.
//   grid: one CTA; a thread a (sequence, value head), in rounds. Positions come from counters in shared memory: where two items of one
//   length lie is not defined and nothing depends on it. The entries of merged states are in order of sequence, head and boundary.
#pragma once

#include "cuda/kernels/plan_segments/cut.hpp"
#include "cuda/kernels/plan_segments/kernel.cuh"

namespace qla::cuda::segments {

inline constexpr int kCutThreads = 512;

struct CutShared {
  int32_t bucket[kBuckets];
  int32_t pre_items, chains, states;
  int32_t scan[kCutThreads / 32];
};

// what one thread's sequence and head need of the sequence
struct CutJob {
  Span span;
  int64_t sequence;
  int32_t head, slot;
  bool initial;
};

__device__ __forceinline__ CutJob cut_job(const Args& a, int64_t index) {
  CutJob job;
  job.sequence = index / a.num_v_heads;
  job.head = int32_t(index - job.sequence * a.num_v_heads);
  job.span = span_of(a, job.sequence);
  job.slot = int32_t(job.span.bos / 64 + job.sequence);
  job.initial = a.has_initial && (!a.has_initial_state || a.has_initial_state[job.sequence]);
  return job;
}
template <typename Emit>
__device__ __forceinline__ void walk_segments(const CutArgs& a, const CutJob& job, const float* decay, Emit emit) {
  const qla::plan::Cut cut = qla::plan::make_cut(job.span.chunks(), a.rule);
  const float* mine = decay + int64_t(job.slot) * a.plan.num_v_heads + job.head;
  const int64_t stride = a.plan.num_v_heads;
  qla::plan::for_each_segment(cut, a.rule, job.initial, false, [&](int64_t c) { return mine[c * stride]; }, emit);
}

__device__ __forceinline__ void store_item(WorkItem* to, const WorkItem& item) {
#pragma unroll
  for (int w = 0; w < 4; w++) reinterpret_cast<int4*>(to)[w] = reinterpret_cast<const int4*>(&item)[w];
}

__global__ void __launch_bounds__(kCutThreads, 1) cut_items(const __grid_constant__ CutArgs a) {
  extern __shared__ float s_decay[];
  __shared__ CutShared s;
  ptx::grid_dependency_launch();
  for (int i = threadIdx.x; i < kBuckets; i += kCutThreads) s.bucket[i] = 0;
  if (threadIdx.x == 0) s.pre_items = s.chains = s.states = 0;
  ptx::grid_dependency_wait();
  if (a.staged)
    for (int64_t i = threadIdx.x; i < int64_t(a.plan.slots) * a.plan.num_v_heads; i += kCutThreads) s_decay[i] = a.decay[i];
  const float* decay = a.staged ? s_decay : a.decay;
  __syncthreads();
  const int64_t jobs = a.plan.num_seqs * a.plan.num_v_heads;

  for (int64_t index = threadIdx.x; index < jobs; index += kCutThreads)
    walk_segments(a, cut_job(a.plan, index), decay, [&](const qla::plan::Segment& segment) {
      atomicAdd(&s.bucket[length_bucket(int32_t(segment.walked_chunks()))], a.plan.v_parts);
    });
  __syncthreads();
  if (threadIdx.x < 32) {  // counts to first positions
    int32_t mine[kBuckets / 32], sum = 0;
    for (int i = 0; i < kBuckets / 32; i++) mine[i] = s.bucket[threadIdx.x * (kBuckets / 32) + i], sum += mine[i];
    int32_t through = sum;
    for (int d = 1; d < 32; d *= 2) {
      const int32_t left = __shfl_up_sync(~0u, through, d);
      if (int(threadIdx.x) >= d) through += left;
    }
    int32_t base = through - sum;
    for (int i = 0; i < kBuckets / 32; i++) {
      s.bucket[threadIdx.x * (kBuckets / 32) + i] = base;
      base += mine[i];
    }
    if (threadIdx.x == 31) {
      a.plan.header->num_items = through;
      a.plan.header->next_item = 0;
    }
  }
  __syncthreads();

  for (int64_t from = 0; from < jobs; from += kCutThreads) {
    const int64_t index = from + threadIdx.x;
    CutJob job{};
    int32_t states = 0;
    if (index < jobs) {
      job = cut_job(a.plan, index);
      walk_segments(a, job, decay, [&](const qla::plan::Segment& segment) { states += segment.needs_end_state; });
    }
    // entries in order of the jobs
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t through = states;
    for (int d = 1; d < 32; d *= 2) {
      const int32_t left = __shfl_up_sync(~0u, through, d);
      if (lane >= d) through += left;
    }
    if (lane == 31) s.scan[warp] = through;
    __syncthreads();
    int32_t entry = s.states + through - states, all = 0;
    for (int w = 0; w < kCutThreads / 32; w++) {
      if (w < warp) entry += s.scan[w];
      all += s.scan[w];
    }
    __syncthreads();
    if (threadIdx.x == 0) s.states += all;
    if (index < jobs) {
      if (states) a.chains[atomicAdd(&s.chains, 1)] = {entry, states};
      int64_t chunk_base = 0, checkpoint_base = 0;
      if (a.need_bases)
        for (int64_t n = 0; n < job.sequence; n++) {
          const Span span = span_of(a.plan, n);
          chunk_base += span.chunks();
          if (a.plan.checkpoint_every_chunks) checkpoint_base += (span.eos - span.bos) / (64 * int64_t(a.plan.checkpoint_every_chunks));
        }
      const int32_t chunks = job.span.chunks();
      const int32_t last_rows = chunks ? int32_t(job.span.eos - job.span.bos - 64 * int64_t(chunks - 1)) : 0;
      int32_t previous = -1;  // entry behind the segment emitted before
      walk_segments(a, job, decay, [&](const qla::plan::Segment& segment) {
        const int32_t first = int32_t(segment.first_chunk - segment.warmup_chunks), walked = int32_t(segment.walked_chunks());
        WorkItem item{};
        item.token = job.span.bos + 64 * int64_t(first);
        item.slot = job.slot + first;
        item.chunks = walked;
        item.warmup = int32_t(segment.warmup_chunks);
        item.last_rows = first + walked == chunks ? last_rows : 64;
        item.sequence = int32_t(job.sequence);
        item.v_head = job.head;
        item.start = segment.start;
        item.start_index = segment.start == QLA_START_MERGED ? previous : 0;
        item.is_last = segment.is_end;
        item.segment = int32_t(segment.index);
        item.first_chunk = first;
        item.chunk_base = int32_t(chunk_base);
        item.checkpoint_base = int32_t(checkpoint_base);
        int32_t at = atomicAdd(&s.bucket[length_bucket(walked)], a.plan.v_parts);
        for (int32_t part = 0; part < a.plan.v_parts; part++) {
          item.v_part = part;
          store_item(a.plan.items + at + part, item);
        }
        if (!segment.needs_end_state) return;
        item.start_index = entry;
        item.is_last = 0;
        if (item.start == QLA_START_MERGED) item.start = QLA_START_ZERO;  // S_ext
        at = atomicAdd(&s.pre_items, a.plan.v_parts * (1 + segment.needs_transition));
        for (int32_t part = 0; part < a.plan.v_parts; part++) {
          item.v_part = part;
          store_item(a.pre_items + at + part, item);
        }
        a.transitions[entry] = uint8_t(segment.needs_transition);
        if (segment.needs_transition) {
          item.start = kStartIdentity;
          item.start_index = a.most_states + entry;
          for (int32_t part = 0; part < a.plan.v_parts; part++) {
            item.v_part = part;
            store_item(a.pre_items + at + a.plan.v_parts + part, item);
          }
        }
        previous = entry++;
      });
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    PlanHeader header{};
    header.num_items = s.pre_items;
    header.num_merges = s.chains;
    header.end_token = a.plan.header->end_token;
    *a.pre_header = header;
    a.plan.header->num_merges = s.chains;
  }
}

}  // namespace qla::cuda::segments
