// cut_passes - the work items of a backward with context parallelism: for each segment and value head one of the state pass and
// one
//   of the reverse pass, by the rule of plan/segments.hpp in both directions, decided separately. Two lists: what needs no merge
//   (with the pre-pass: S_ext, dS_ext (C1), (C3) and M (C2), which serves both directions) and what starts from a merged state.
//   grid: one CTA; a thread a unit = (sequence, value head, segment). The merged boundary behind segment j of a job has the entry
//   unit - job: shapes bound the entries, and nothing is counted for them. Where two items of one length lie in a list is not
//   defined and nothing depends on it.
#pragma once

#include "cuda/kernels/plan_segments/cut.cuh"

namespace qla::cuda::segments {

struct PassUnit {
  float sum;                 // of ghat over the segment
  int32_t forward, reverse;  // start of each walk: QLA_START_*, and warm-up chunks << 8
};
static_assert(sizeof(PassUnit) == kPassUnitBytes);

struct PassCutShared {
  int32_t bucket[2][kBuckets];  // first and second launch
  int32_t first_unit[kCutThreads + 1];
  int32_t chains;
  int32_t scan[kCutThreads / 32];
  Job jobs[kCutThreads];
  int16_t job_of[kStagedUnits];  // of a unit
  PassUnit units[kStagedUnits];
};

struct PassCutter : Round<PassCutArgs, PassCutShared, PassUnit> {
  int32_t entries_before = 0;  // of this round's first unit: units less jobs before it

  __device__ void begin_round(int32_t from, int32_t jobs, PassUnit* all_units, int32_t units_before) {
    Round::begin_round(from, jobs, all_units, units_before);
    entries_before = units_before - from;
  }

  // (C4), (C5) of both walks
  __device__ void sums_and_starts() {
    for (int32_t u = threadIdx.x; u < num_units; u += kCutThreads) {
      const int j = find_job(u);
      const Job& job = s.jobs[j];
      const float* mine = decay + int64_t(job.slot) * a.plan.num_v_heads + job.head;
      units[u].sum =
          qla::plan::segment_decay(job.cut(), u - s.first_unit[j], [&](int32_t c) { return mine[c * a.plan.num_v_heads]; });
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < 2 * num_units; i += kCutThreads) {  // a thread a walk
      const bool reverse = i >= num_units;
      const int32_t u = reverse ? i - num_units : i;
      const int j = find_job(u);
      const Job& job = s.jobs[j];
      const int32_t segment = u - s.first_unit[j], end = min(s.first_unit[j + 1], num_units);
      const bool given = reverse ? a.has_final : job.start == QLA_START_INITIAL;
      qla::plan::BasicStart<int32_t> start{given ? QLA_START_INITIAL : QLA_START_ZERO, 0};
      if (reverse ? u + 1 < end : segment > 0) {
        float total = 0.0f;  // over what lies behind, in walking order
        if (reverse)
          for (int32_t n = end - 1; n > u; n--) total += units[n].sum;
        else
          for (int32_t n = s.first_unit[j]; n < u; n++) total += units[n].sum;
        const int32_t boundary = job.begin(segment + reverse), step = reverse ? a.plan.num_v_heads : -a.plan.num_v_heads;
        const float* nearest =  // ghat of the first chunk back
            decay + (int64_t(job.slot) + boundary - !reverse) * a.plan.num_v_heads + job.head;
        start = qla::plan::start_at(reverse ? job.chunks - boundary : boundary, total, given, a.rule,
                                    [&](int32_t n) { return nearest[(n - 1) * step]; });
      }
      (reverse ? units[u].reverse : units[u].forward) = start.start | start.warmup_chunks << 8;
    }
    __syncthreads();
  }
  __device__ int32_t usable(int32_t entry) const { return entry >= 0 && entry < a.most_states; }

  // Calls emit(list, item) for all items of a unit, chain(chain) for the merges that begin behind it.
  template <class Emit, class Chain>
  __device__ void walk(int32_t u, Emit emit, Chain chain) const {
    const int j = find_job(u);
    const Job& job = s.jobs[j];
    const int32_t begin = s.first_unit[j], end = min(s.first_unit[j + 1], num_units), segment = u - begin;
    const int32_t behind = entries_before + u - j, before = behind - 1;  // entries of the boundaries at this segment's ends
    const int32_t first = job.begin(segment), last = job.begin(segment + 1);
    const auto merged = [&](int32_t unit, bool reverse) {
      return ((reverse ? units[unit].reverse : units[unit].forward) & 0xff) == QLA_START_MERGED;
    };
    bool transition = false;
#pragma unroll 1
    for (int reverse = 0; reverse < 2; reverse++) {
      const int32_t word = reverse ? units[u].reverse : units[u].forward, start = word & 0xff, warmup = word >> 8;
      const int32_t from = reverse ? behind : before, to = reverse ? before : behind;  // entries the walk starts and ends at
      const bool at_end = reverse ? segment == 0 : u + 1 == end, is_merged = start == QLA_START_MERGED;
      const int32_t next = reverse ? u - 1 : u + 1;  // in walking order
      const bool next_merged = !at_end && merged(next, reverse) && usable(to);
      const int32_t low = reverse ? first : first - warmup, high = reverse ? last + warmup : last;
      PassItem item{};
      item.token = job.bos + 64 * int64_t(low);
      item.slot = job.slot + low;
      item.chunks = high - low;
      item.warmup = warmup;
      item.last_rows = high < job.chunks ? 64 : job.last_rows;
      item.sequence = job.sequence;
      item.v_head = job.head;
      item.reverse = reverse;
      item.initial = job.start == QLA_START_INITIAL;
      item.start = is_merged ? (usable(from) ? kFromBuffer : kFromZero) : start == QLA_START_INITIAL ? kFromCaller : kFromZero;
      item.start_index = is_merged ? from : 0;
      item.end = at_end ? (reverse && a.wants_dh0 ? kToCaller : kToNowhere) : next_merged && !is_merged ? kToBuffer : kToNowhere;
      item.end_index = to;
      emit(int(is_merged), item);
      if (!next_merged) continue;
      if (is_merged) {  // S_ext or dS_ext
        item.warmup = item.chunks;
        item.start = kFromZero;
        item.end = kToBuffer;
        emit(0, item);
        transition = true;
      } else {  // the first of a run of merged boundaries: all behind it are moved along
        int32_t count = 0;
        for (int32_t n = reverse ? next - 1 : next + 1; n >= begin && n < end && merged(n, reverse); n += reverse ? -1 : 1)
          count += usable(to + (reverse ? -count - 1 : count + 1));
        if (count > 0) chain(PassChain{to, count, reverse, 0});
      }
    }
    if (transition && usable(behind)) {
      PassItem item{};
      item.token = job.bos + 64 * int64_t(first);
      item.slot = job.slot + first;
      item.chunks = item.warmup = last - first;
      item.last_rows = last < job.chunks ? 64 : job.last_rows;
      item.sequence = job.sequence;
      item.v_head = job.head;
      item.start = kFromIdentity;
      item.end = kToBuffer;
      item.end_index = a.most_states + behind;
      emit(0, item);
    }
  }
  __device__ static int bucket_of(const PassItem& item) {  // by time: a reverse chunk takes half as long again
    return length_bucket(item.chunks * (item.reverse ? 3 : 2));
  }
  __device__ void count() {
    for (int32_t u = threadIdx.x; u < num_units; u += kCutThreads)
      walk(
          u, [&](int list, const PassItem& item) { atomicAdd(&s.bucket[list][bucket_of(item)], 1); }, [](const PassChain&) {});
    __syncthreads();
  }
  __device__ void write() {
    for (int32_t u = threadIdx.x; u < num_units; u += kCutThreads)
      walk(
          u,
          [&](int list, const PassItem& item) {
            const int32_t at = atomicAdd(&s.bucket[list][bucket_of(item)], 1);
            if (at < (list ? a.most_second : a.most_first)) store_item((list ? a.second : a.first) + at, item);
          },
          [&](const PassChain& chain) {
            const int32_t at = atomicAdd(&s.chains, 1);
            if (at < 2 * a.most_states) *reinterpret_cast<int4*>(a.chains + at) = *reinterpret_cast<const int4*>(&chain);
          });
    __syncthreads();
  }
};

__global__ void __launch_bounds__(kCutThreads, 1) cut_passes(const __grid_constant__ PassCutArgs a) {
  extern __shared__ float4 s_decay4[];
  float* const s_decay = reinterpret_cast<float*>(s_decay4);
  __shared__ PassCutShared s;
  const int32_t jobs = int32_t(a.plan.num_seqs * a.plan.num_v_heads), gates = a.plan.slots * a.plan.num_v_heads;
  const bool one_round = jobs <= kCutThreads;
  PassCutter cutter{{a, s, a.staged ? s_decay : a.decay}};
  PassUnit* all_units = a.most_units <= kStagedUnits ? s.units : reinterpret_cast<PassUnit*>(a.units);
  for (int i = threadIdx.x; i < 2 * kBuckets; i += kCutThreads) s.bucket[i / kBuckets][i % kBuckets] = 0;
  if (threadIdx.x == 0) s.chains = 0;
  if (one_round) cutter.begin_round(0, jobs, all_units, 0);
  if (!a.early) ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (a.staged) {
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < gates / 4; i += kCutThreads) s_decay4[i] = reinterpret_cast<const float4*>(a.decay)[i];
    if (threadIdx.x < gates % 4) s_decay[gates / 4 * 4 + threadIdx.x] = a.decay[gates / 4 * 4 + threadIdx.x];
  }
  __syncthreads();
  int32_t before = 0;
#pragma unroll 1
  for (int32_t from = 0; from < jobs; from += kCutThreads) {
    if (!one_round) cutter.begin_round(from, jobs, all_units, before);
    cutter.sums_and_starts();
    cutter.count();
    before += cutter.num_units;
  }
  if (threadIdx.x < 64) {  // counts to first positions, a warp a list
    const int list = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t through = counts_to_positions<kBuckets / 32>(s.bucket[list], lane);
    if (lane == 31) (list ? a.counts->second : a.counts->first) = min(through, list ? a.most_second : a.most_first);
  }
  __syncthreads();
  before = 0;
#pragma unroll 1
  for (int32_t from = 0; from < jobs; from += kCutThreads) {
    if (!one_round) cutter.begin_round(from, jobs, all_units, before);
    cutter.write();
    before += cutter.num_units;
  }
  if (threadIdx.x == 0) a.counts->chains = min(s.chains, 2 * a.most_states);
  if (a.early) ptx::grid_dependency_wait();  // who waits for this kernel has waited for those
}

}  // namespace qla::cuda::segments
