// cut_items - the work items of a run with context parallelism, from boundaries and gates: what for_each_segment()
// (plan/segments.hpp)
//   says of each sequence and value head, in two lists: the items of the main pass, longest first and merged ones last, and of
//   the pre-pass, which walks to S_ext and M (C1), (C2) for the boundaries that are merged. grid: one CTA; a thread a unit =
//   (sequence, value head, segment), so that no sum is longer than a segment or its warm-up. Positions come from counters in
//   shared memory: where two items of one length lie is not defined and nothing depends on it. The entries of merged states are
//   in order of sequence, head and boundary.
#pragma once

#include "cuda/kernels/plan_segments/cut.hpp"
#include "cuda/kernels/plan_segments/kernel.cuh"
#include "plan/beside.hpp"

namespace qla::cuda::segments {

inline constexpr int kCutThreads = 256, kStagedUnits = 1024;

struct Unit {
  float sum;      // of ghat over the segment
  int32_t start;  // QLA_START_* of the segment, and warm-up chunks << 8
  int32_t entry;  // merged boundaries before this segment's end, over all units
};
static_assert(sizeof(Unit) == kUnitBytes);
// One thread's sequence and head: the part of it that lies in the range of chunks.
struct Job {
  int64_t bos;
  int32_t chunks, last_rows, segment_chunks, segments;
  int32_t sequence, head, slot;
  int32_t first;  // chunks in earlier ranges
  int16_t start;  // QLA_START_ZERO, QLA_START_INITIAL, kStartCarried
  int16_t end;    // kFinalState, kCarry
  __device__ __forceinline__ int32_t begin(int32_t segment) const {
    return segment < segments ? segment * segment_chunks : chunks;
  }
  __device__ __forceinline__ qla::plan::BasicCut<int32_t> cut() const { return {chunks, segment_chunks, segments}; }
};
struct CutShared {
  int32_t bucket[2][kBuckets];  // merged starts: the second half
  int32_t first_unit[kCutThreads + 1];
  int32_t pre_items, chains, states;
  int32_t scan[kCutThreads / 32];
  Job jobs[kCutThreads];
  int16_t job_of[kStagedUnits];  // of a unit
  Unit units[kStagedUnits];
};

template <class A>  // CutArgs or PassCutArgs
__device__ __forceinline__ Job job_at(const A& a, int32_t index) {
  Job job;
  job.sequence = index / a.plan.num_v_heads;
  job.head = index - job.sequence * a.plan.num_v_heads;
  const Span span = span_of(a.plan, job.sequence);
  const qla::plan::Run run = run_of(a.plan, span, job.sequence);
  job.bos = span.bos + 64 * int64_t(run.first);
  job.chunks = run.chunks;
  job.last_rows = run.goes_on ? 64 : run.chunks ? int32_t(span.eos - job.bos - 64 * int64_t(run.chunks - 1)) : 0;
  job.slot = run.slot;
  job.first = run.first;
  const auto cut = qla::plan::make_basic_cut(job.chunks, qla::plan::rule_where_cut(a.rule));
  job.segment_chunks = cut.segment_chunks;
  job.segments = run.present ? cut.num_segments : 0;
  job.start = int16_t(run.continued() ? kStartCarried : start_of(a.plan, job.sequence));
  job.end = run.goes_on ? kCarry : kFinalState;
  return job;
}

// exclusive sum over the CTA; `all` receives the total
__device__ __forceinline__ int32_t block_exclusive_sum(int32_t x, int32_t* scan, int32_t& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t through = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int32_t left = __shfl_up_sync(~0u, through, d);
    if (lane >= d) through += left;
  }
  __syncthreads();
  if (lane == 31) scan[warp] = through;
  __syncthreads();
  int32_t before = through - x;
  all = 0;
#pragma unroll
  for (int w = 0; w < kCutThreads / 32; w++) {
    if (w < warp) before += scan[w];
    all += scan[w];
  }
  return before;
}

template <class Item>  // WorkItem or PassItem
__device__ __forceinline__ void store_item(Item* to, const Item& item) {
  static_assert(sizeof(Item) == 64);
#pragma unroll
  for (int w = 0; w < 4; w++) reinterpret_cast<int4*>(to)[w] = reinterpret_cast<const int4*>(&item)[w];
}

// The queue of 2 kBuckets: merged starts last, while all segments are about as long; where one has a sequence's rest alone, the
// longest first, merged ones behind their like: a long one that began last would end last.
__device__ __forceinline__ int32_t cut_bucket(const qla::plan::CutRule& rule, bool merged, int32_t by_length) {
  return rule.balance ? merged * kBuckets + by_length : 2 * by_length + merged;
}

// first positions in `buckets` (32 * kEach of them) from counts, by one warp; -> the total, in its last lane
template <int kEach>
__device__ __forceinline__ int32_t counts_to_positions(int32_t* buckets, int lane) {
  int32_t mine[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) mine[i] = buckets[lane * kEach + i], sum += mine[i];
  int32_t through = sum;
  for (int d = 1; d < 32; d *= 2) {
    const int32_t left = __shfl_up_sync(~0u, through, d);
    if (lane >= d) through += left;
  }
  int32_t base = through - sum;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    buckets[lane * kEach + i] = base;
    base += mine[i];
  }
  return through;
}

// A round: a thread a job, its units behind each other. Cutter and PassCutter decide about them.
template <class A, class Shared, class U>
struct Round {
  const A& a;
  Shared& s;
  const float* decay;
  U* units = nullptr;  // of this round's jobs
  int32_t num_units = 0;
  int32_t each = 0, num_jobs = 0;  // units of every job, 0: not the same number

  // a round's jobs: first_unit[j] .. of job j
  __device__ void begin_round(int32_t from, int32_t jobs, U* all_units, int32_t units_before) {
    const int32_t index = from + threadIdx.x;
    int32_t mine = 0;
    if (index < jobs) {
      s.jobs[threadIdx.x] = job_at(a, index);
      mine = s.jobs[threadIdx.x].segments;
    }
    const int32_t before = block_exclusive_sum(mine, s.scan, num_units);
    s.first_unit[threadIdx.x] = before;
    if (threadIdx.x == 0) s.first_unit[kCutThreads] = num_units;
    for (int32_t i = before; i < before + mine && i < kStagedUnits; i++) s.job_of[i] = int16_t(threadIdx.x);
    // Sequences that overlap (bad boundaries) may have more segments than the shapes allow: the rest is dropped.
    num_units = min(num_units, a.most_units - units_before);
    units = all_units + units_before;
    num_jobs = min(int32_t(kCutThreads), jobs - from);
    __syncthreads();
    each = s.jobs[0].segments;
    const bool same = each > 0 && __syncthreads_and(int32_t(threadIdx.x) >= num_jobs || mine == each);
    if (!same || num_units != each * num_jobs) each = 0;
  }
  // The unit that the i-th thread sums up: heads of one segment side by side where that is easy, so that the lanes of a warp read
  // different banks. Segments of one head lie a multiple of all banks apart.
  __device__ int32_t unit_at(int32_t i) const { return each ? i % num_jobs * each + i / num_jobs : i; }
  __device__ int find_job(int32_t unit) const {
    if (unit < kStagedUnits) return s.job_of[unit];
    int low = 0, high = kCutThreads;  // last j with first_unit[j] <= unit; jobs behind the last one start at the end
    while (high - low > 1) {
      const int mid = (low + high) / 2;
      if (s.first_unit[mid] <= unit)
        low = mid;
      else
        high = mid;
    }
    return low;
  }
};

struct Cutter : Round<CutArgs, CutShared, Unit> {
  __device__ void sums_and_starts() {
    for (int32_t i = threadIdx.x; i < num_units; i += kCutThreads) {
      const int32_t u = unit_at(i);
      const int j = find_job(u);
      const Job& job = s.jobs[j];
      const int32_t segment = u - s.first_unit[j];
      const float* mine = decay + int64_t(job.slot) * a.plan.num_v_heads + job.head;
      units[u].sum = qla::plan::segment_decay(job.cut(), segment, [&](int32_t c) { return mine[c * a.plan.num_v_heads]; });
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < num_units; i += kCutThreads) {
      const int32_t u = unit_at(i);
      const int j = find_job(u);
      const Job& job = s.jobs[j];
      const int32_t segment = u - s.first_unit[j];
      qla::plan::BasicStart<int32_t> start{job.start, 0};
      if (segment > 0) {
        float total = 0.0f;
        for (int32_t before = s.first_unit[j]; before < u; before++) total += units[before].sum;
        const int32_t boundary = job.begin(segment);
        const float* mine = decay + int64_t(job.slot) * a.plan.num_v_heads + job.head;
        start = qla::plan::start_at(boundary, total, job.start != QLA_START_ZERO, a.rule,
                                    [&](int32_t n) { return mine[(boundary - n) * a.plan.num_v_heads]; });
        if (start.start == QLA_START_INITIAL) start.start = job.start;
      }
      units[u].start = start.start | start.warmup_chunks << 8;
    }
    __syncthreads();
  }
  __device__ bool merged(int32_t u) const { return (units[u].start & 0xff) == QLA_START_MERGED; }
  // what a unit's segment is; entry as in Unit
  __device__ void count() {
    for (int32_t from = 0; from < num_units; from += kCutThreads) {
      const int32_t u = from + threadIdx.x;
      int32_t needs_end = 0;
      if (u < num_units) {
        const int j = find_job(u);
        const Job& job = s.jobs[j];
        const int32_t segment = u - s.first_unit[j];
        const int32_t walked = job.begin(segment + 1) - job.begin(segment) + (units[u].start >> 8);
        needs_end = u + 1 < min(s.first_unit[j + 1], num_units) && merged(u + 1);
        atomicAdd(&s.bucket[0][0] + cut_bucket(a.rule, merged(u), length_bucket(walked)), a.plan.v_parts);
      }
      int32_t all;
      const int32_t before = block_exclusive_sum(needs_end, s.scan, all);
      if (u < num_units) units[u].entry = s.states + before + needs_end;
      __syncthreads();
      if (threadIdx.x == 0) s.states += all;
      __syncthreads();
    }
  }
  __device__ void write() {
    for (int32_t u = threadIdx.x; u < num_units; u += kCutThreads) {
      const int j = find_job(u);
      const Job& job = s.jobs[j];
      const int32_t segment = u - s.first_unit[j];
      const int32_t job_end = min(s.first_unit[j + 1], num_units);
      const bool is_end = u + 1 == job_end, is_merged = merged(u);
      const bool needs_end = !is_end && merged(u + 1) && units[u].entry <= a.most_states;  // the bound holds for good boundaries
      const int32_t start = units[u].start & 0xff, warmup = units[u].start >> 8;
      const int32_t first = job.begin(segment) - warmup, walked = job.begin(segment + 1) - first;
      WorkItem item{};
      item.token = job.bos + 64 * int64_t(first);
      item.slot = job.slot + first;
      item.chunks = walked;
      item.warmup = warmup;
      item.last_rows = first + walked < job.chunks ? 64 : job.last_rows;
      item.sequence = job.sequence;
      item.v_head = job.head;
      item.start = start;
      item.start_index = is_merged ? min(units[u - 1].entry, a.most_states) - 1 : 0;
      if (item.start_index < 0) item.start = QLA_START_ZERO, item.start_index = 0;
      item.is_last = is_end ? job.end : 0;
      item.segment = segment;
      item.first_chunk = job.first + first;
      if (a.need_bases) add_bases(item, job.sequence);
      int32_t at = atomicAdd(&s.bucket[0][0] + cut_bucket(a.rule, is_merged, length_bucket(walked)), a.plan.v_parts);
      for (int32_t part = 0; part < a.plan.v_parts; part++) {
        item.v_part = part;
        store_item(a.plan.items + at + part, item);
      }
      if (needs_end) {  // S_ext, and M where the segment's own start is merged, too
        const int32_t entry = units[u].entry - 1;
        a.transitions[entry] = is_merged;
        at = atomicAdd(&s.pre_items, a.pre_v_parts * (1 + is_merged));
        item.is_last = 0;
        item.start = is_merged ? QLA_START_ZERO : start;
        item.start_index = entry;
        for (int32_t part = 0; part < a.pre_v_parts * (1 + is_merged); part++) {
          if (part == a.pre_v_parts) item.start = kStartIdentity, item.start_index = a.most_states + entry;
          item.v_part = part % a.pre_v_parts;
          store_item(a.pre_items + at + part, item);
        }
      }
      if (is_end) {  // the job's chain
        // overlapping sequences may count more entries than the shapes allow: the chain ends with the last one there is
        const int32_t begin = s.first_unit[j], last = min(units[u].entry, a.most_states),
                      before = begin == u ? last : units[begin].entry - (merged(begin + 1) ? 1 : 0);
        if (last > before) {
          const int32_t chain = atomicAdd(&s.chains, 1);
          a.chains[chain] = {before, last - before};
        }
        if (a.heads) {
          const int64_t at_head = job.sequence * a.plan.num_v_heads + job.head;
          a.heads[at_head] = last - before < segment ? kHeadForgets : 0;
          int32_t merges = u;
          while (merges > begin && !merged(merges)) merges--;
          if (a.until) a.until[at_head] = merges > begin ? job.slot + job.begin(merges - begin) : 0;
        }
      }
    }
    __syncthreads();
  }
  __device__ void add_bases(WorkItem& item, int64_t sequence) const {
    for (int64_t n = 0; n < sequence; n++) {
      const Span span = span_of(a.plan, n);
      item.chunk_base += span.chunks();
      if (a.plan.checkpoint_every_chunks)
        item.checkpoint_base += int32_t((span.eos - span.bos) / (64 * int64_t(a.plan.checkpoint_every_chunks)));
    }
  }
};

// the sums of all chunks to shared memory, with as many loads under way as there are registers for
__device__ __forceinline__ void stage_decay(float* to, const float* from, int32_t count) {
  constexpr int kAhead = 4;
  const int32_t whole = reinterpret_cast<uintptr_t>(from) % 16 == 0 ? count / 4 : 0;
  for (int32_t i = threadIdx.x; i < whole; i += kAhead * kCutThreads) {
    float4 x[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; j++)
      if (i + j * kCutThreads < whole) x[j] = reinterpret_cast<const float4*>(from)[i + j * kCutThreads];
#pragma unroll
    for (int j = 0; j < kAhead; j++)
      if (i + j * kCutThreads < whole) reinterpret_cast<float4*>(to)[i + j * kCutThreads] = x[j];
  }
  for (int32_t i = 4 * whole + threadIdx.x; i < count; i += kCutThreads) to[i] = from[i];
}

// A pre-pass's count as its header has it. Every thread of the pre-pass looks up for itself whether there is anything to do,
// while the count takes the place of the answer below: so where something is cut both are something else than 0, or the threads
// of a CTA would not agree.
__device__ __forceinline__ int32_t pre_pass_items(int32_t items) { return items > 0 ? items : -1; }

// Boundaries alone decide whether anything is cut. The pre-pass and the merges may look that up before their own wait
// (ptx::load_relaxed), and leave: so the answer is in memory before the next kernel is let begin. -> nothing is cut: the items
// of plan_segments stand, no more to do.
__device__ __forceinline__ bool answer(const CutArgs& a, bool cuts) {
  cuts = __syncthreads_or(cuts);
  if (threadIdx.x == 0) {
    PlanHeader header{};
    header.cut = cuts;
    header.num_items = cuts ? pre_pass_items(0) : 0;
    header.end_token = a.plan.tokens;
    *a.pre_header = header;
    if (!cuts && a.uncut_header) *a.plan.header = header_without_items(a.plan.tokens);
    __threadfence();
  }
  __syncthreads();
  if (cuts) return false;
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();  // whoever waits for this kernel counts on all before it
  return true;
}

__global__ void __launch_bounds__(kCutThreads, 1) cut_items(const __grid_constant__ CutArgs a) {
  extern __shared__ float4 s_decay4[];
  float* const s_decay = reinterpret_cast<float*>(s_decay4);
  __shared__ CutShared s;
  const int32_t jobs = int32_t(a.plan.num_seqs * a.plan.num_v_heads), gates = a.plan.slots * a.plan.num_v_heads;
  const bool one_round = jobs <= kCutThreads;
  Cutter cutter{{a, s, a.staged ? s_decay : a.decay}};
  Unit* all_units = a.most_units <= kStagedUnits ? s.units : reinterpret_cast<Unit*>(a.units);
  bool long_enough = false;
  for (int32_t n = threadIdx.x; n < int32_t(a.plan.num_seqs); n += kCutThreads)
    long_enough |= a.rule.cuts(run_of(a.plan, span_of(a.plan, n), n).chunks);
  if (answer(a, long_enough)) return;
  if (one_round) cutter.begin_round(0, jobs, all_units, 0);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (a.staged) stage_decay(s_decay, a.decay, gates);
  for (int i = threadIdx.x; i < 2 * kBuckets; i += kCutThreads) s.bucket[i / kBuckets][i % kBuckets] = 0;
  if (threadIdx.x == 0) s.pre_items = s.chains = s.states = 0;
  __syncthreads();
  int32_t before = 0;
#pragma unroll 1
  for (int32_t from = 0; from < jobs; from += kCutThreads) {
    if (!one_round) cutter.begin_round(from, jobs, all_units, before);
    cutter.sums_and_starts();
    cutter.count();
    before += cutter.num_units;
  }
  if (threadIdx.x < 32) {  // counts to first positions
    const int32_t through = counts_to_positions<2 * kBuckets / 32>(&s.bucket[0][0], int(threadIdx.x));
    if (threadIdx.x == 31) {
      a.plan.header->num_items = through;
      a.plan.header->next_item = 0;
    }
  }
  __syncthreads();
  before = 0;
#pragma unroll 1
  for (int32_t from = 0; from < jobs; from += kCutThreads) {
    if (!one_round) cutter.begin_round(from, jobs, all_units, before);
    cutter.write();
    before += cutter.num_units;
  }
  if (threadIdx.x == 0) {
    if (a.uncut_header) {
      a.plan.header->valid_tokens = a.uncut_header->valid_tokens;
      a.plan.header->end_token = a.uncut_header->end_token;
      if (!a.heads) *a.uncut_header = header_without_items(a.plan.tokens);
    }
    PlanHeader header{};
    header.cut = 1;
    header.num_items = pre_pass_items(s.pre_items);
    header.num_merges = s.chains;
    header.end_token = a.plan.header->end_token;
    *a.pre_header = header;
    a.plan.header->num_merges = s.chains;
  }
}

}  // namespace qla::cuda::segments
