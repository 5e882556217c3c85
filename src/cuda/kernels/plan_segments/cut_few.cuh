// cut_few - cut_items for few sequences and segments, which is what a planner's own cut makes: the same lists.
//   grid: one CTA; a thread a unit = (sequence, segment, value head), heads side by side, so that lanes read sums of different
//   banks. What boundaries decide is worked out before the wait. Behind it every step is one round trip: sums to shared memory in
//   one bulk copy; sum of each segment; start of each segment, counted by length; positions and items. No 64-bit division, no
//   loop over units: the CTA has as many threads as there may be units.
// The merged boundary in front of segment j > 0 of a sequence's head h has an entry by its rank: behind those that the sequences
//   before and the heads before (segments - 1 each) may have, merged boundaries of this head before it. Shapes bound that;
//   entries of one chain are consecutive.
#pragma once

#include "cuda/kernels/plan_segments/cut.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"

namespace qla::cuda::segments {

struct FewSequence {
  int64_t bos;  // of its part in the range
  int32_t chunks, last_rows, slot, first_chunk;
  int32_t segment_chunks, segments, first_segment;
  int32_t first_entry;  // of its first head
  int32_t chunk_base, checkpoint_base;
  int16_t start, end;
};
struct FewShared {
  alignas(16) int32_t bucket[2][kBuckets];  // units by length; merged starts: the second half
  uint64_t arrived;                         // the sums
  FewSequence sequence[kFewSequences];
  int32_t segments;  // over all sequences
  int32_t pre_items, chains;
  float sum[kFewUnits];            // of ghat over the unit's segment
  uint32_t merged[kFewUnits];      // [segment / 32][head]: bit segment % 32
  uint8_t sequence_of[kFewUnits];  // of a segment
};

// By the first warp, a lane a sequence; -> something is cut.
__device__ __forceinline__ bool few_sequences(const CutArgs& a, FewShared& s) {
  const int n = int(threadIdx.x), seqs = int(a.plan.num_seqs), heads = a.plan.num_v_heads;
  Span span{0, 0};
  FewSequence x{};
  if (n < seqs) {
    span = span_of(a.plan, n);
    const qla::plan::Run run = run_of(a.plan, span, n);
    x.bos = span.bos + 64 * int64_t(run.first);
    x.chunks = run.chunks;
    x.last_rows = run.goes_on ? 64 : run.chunks ? int32_t(span.eos - x.bos) - 64 * (run.chunks - 1) : 0;
    x.slot = run.slot;
    x.first_chunk = run.first;
    const auto cut = qla::plan::make_basic_cut(run.chunks, a.rule);
    x.segment_chunks = cut.segment_chunks;
    x.segments = run.present ? cut.num_segments : 0;
    x.start = int16_t(run.continued() ? kStartCarried : start_of(a.plan, n));
    x.end = run.goes_on ? kCarry : kFinalState;
  }
  const bool cuts = __any_sync(~0u, a.rule.cuts(x.chunks));
  const int32_t every = a.plan.checkpoint_every_chunks, chunks = span.chunks(), boundaries = max(0, x.segments - 1),
                checkpoints = every ? int32_t(uint32_t((span.eos - span.bos) / 64) / uint32_t(every)) : 0;
  int32_t segments = x.segments, entries = boundaries, chunk_base = chunks, checkpoint_base = checkpoints;
#pragma unroll 1
  for (int d = 1; d < 32 && seqs > 1; d *= 2) {
    const int32_t left[] = {__shfl_up_sync(~0u, segments, d), __shfl_up_sync(~0u, entries, d), __shfl_up_sync(~0u, chunk_base, d),
                            __shfl_up_sync(~0u, checkpoint_base, d)};
    if (n >= d) segments += left[0], entries += left[1], chunk_base += left[2], checkpoint_base += left[3];
  }
  x.first_segment = segments - x.segments;
  x.first_entry = (entries - boundaries) * heads;
  x.chunk_base = chunk_base - chunks;
  x.checkpoint_base = checkpoint_base - checkpoints;
  // Sequences that overlap (bad boundaries) may have more segments than the shapes allow: the rest is dropped.
  const int32_t most = a.most_units / heads;
  x.segments = max(0, min(x.segments, most - x.first_segment));
  if (n < seqs) s.sequence[n] = x;
  if (n == seqs - 1) s.segments = min(segments, most);
  return cuts;
}

// One thread's unit.
struct FewUnit {
  const CutArgs& a;
  FewShared& s;
  const float* decay;                      // in shared memory
  int32_t heads, segment, head, sequence;  // segment: over all sequences
  int32_t in_sequence, begin, end;         // segment and chunks of the sequence
  bool is_last;

  __device__ __forceinline__ float sum() const {
    const float* const first = decay + (s.sequence[sequence].slot + begin) * heads + head;
    return qla::plan::sum_in_order(end - begin, [&](int32_t c) { return first[c * heads]; });
  }
  __device__ __forceinline__ qla::plan::BasicStart<int32_t> start() const {
    const FewSequence& of = s.sequence[sequence];
    if (in_sequence == 0) return {of.start, 0};
    const float* const before = s.sum + of.first_segment * heads + head;
    const float total = qla::plan::sum_in_order(in_sequence, [&](int32_t c) { return before[c * heads]; });
    const float* const nearest = decay + (of.slot + begin - 1) * heads + head;
    auto start = qla::plan::start_at(begin, total, of.start != QLA_START_ZERO, a.rule,
                                     [&](int32_t back) { return nearest[(1 - back) * heads]; });
    if (start.start == QLA_START_INITIAL) start.start = of.start;
    return start;
  }
  __device__ __forceinline__ bool merges(int32_t at) const { return s.merged[(at >> 5) * heads + head] >> (at & 31) & 1; }
  // merged boundaries of this head in front of the sequence's segments up to its own
  __device__ __forceinline__ int32_t rank() const {
    const int32_t first = segment - in_sequence;
    int32_t count = 0;
#pragma unroll 1
    for (int32_t w = first >> 5; w <= segment >> 5; w++) {
      uint32_t bits = s.merged[w * heads + head];
      if (w == first >> 5) bits &= ~0u << (first & 31);
      if (w == segment >> 5) bits &= ~0u >> (31 - (segment & 31));
      count += __popc(bits);
    }
    return count;
  }
};

// Where each unit stands in its bucket: those of a warp are counted together.
__device__ __forceinline__ int32_t few_count(int32_t* buckets, int32_t bucket, bool counts) {
  const unsigned same = __match_any_sync(~0u, counts ? bucket : -1);
  const int lane = threadIdx.x % 32, leader = __ffs(int(same)) - 1;
  int32_t first = 0;
  if (counts && lane == leader) first = atomicAdd(buckets + bucket, __popc(same));
  return __shfl_sync(~0u, first, leader) + __popc(same & ((1u << lane) - 1));
}
// .. and where the bucket begins, by every warp for itself
__device__ __forceinline__ int32_t few_first(const FewShared& s, int32_t bucket) {
  const int lane = threadIdx.x % 32;
  int32_t through[2], sum[2];
#pragma unroll
  for (int list = 0; list < 2; list++) {
    const int4 x = reinterpret_cast<const int4*>(s.bucket[list])[lane];
    through[list] = sum[list] = x.x + x.y + x.z + x.w;
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int32_t left[] = {__shfl_up_sync(~0u, through[0], d), __shfl_up_sync(~0u, through[1], d)};
    if (lane >= d) through[0] += left[0], through[1] += left[1];
  }
  const int of = bucket % kBuckets, owner = of / 4;
  const int32_t first[] = {__shfl_sync(~0u, through[0] - sum[0], owner), __shfl_sync(~0u, through[1] - sum[1], owner)},
                of_first_list = __shfl_sync(~0u, through[0], 31);
  int32_t at = bucket < kBuckets ? first[0] : first[1] + of_first_list;
  const int4 x = reinterpret_cast<const int4*>(s.bucket[bucket / kBuckets])[owner];
  if (of % 4 > 0) at += x.x;
  if (of % 4 > 1) at += x.y;
  if (of % 4 > 2) at += x.z;
  return at;
}

__global__ void __launch_bounds__(kFewUnits, 1) cut_few(const __grid_constant__ CutArgs a) {
  extern __shared__ float4 s_decay4[];
  float* const s_decay = reinterpret_cast<float*>(s_decay4);
  __shared__ FewShared s;
  const int32_t heads = a.plan.num_v_heads, gates = a.plan.slots * heads, threads = int32_t(blockDim.x);
  const uint32_t arrived = ptx::shared_address(&s.arrived);
  if (a.early) ptx::grid_dependency_launch();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(arrived, 1);
    ptx::mbarrier_init_fence();
    s.pre_items = s.chains = 0;
  }
  const bool cuts = threadIdx.x < 32 && few_sequences(a, s);
  if (answer(a, cuts)) return;
#pragma unroll 1
  for (int n = 0; n < int(a.plan.num_seqs); n++)
#pragma unroll 1
    for (int i = threadIdx.x; i < s.sequence[n].segments; i += threads)
      s.sequence_of[s.sequence[n].first_segment + i] = uint8_t(n);
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * kBuckets; i += threads) (&s.bucket[0][0])[i] = 0;
  s.merged[threadIdx.x] = 0;
  __syncthreads();
  const int32_t units = s.segments * heads, unit = int32_t(threadIdx.x);
  const bool mine = unit < units;
  FewUnit u{a, s, s_decay, heads, 0, 0, 0, 0, 0, 0, false};
  if (mine) {
    u.segment = int32_t(uint32_t(unit) / uint32_t(heads));
    u.head = unit - u.segment * heads;
    u.sequence = s.sequence_of[u.segment];
    const FewSequence& of = s.sequence[u.sequence];
    u.in_sequence = u.segment - of.first_segment;
    u.begin = min(u.in_sequence * of.segment_chunks, of.chunks);
    u.end = min(u.begin + of.segment_chunks, of.chunks);
    u.is_last = u.in_sequence + 1 == of.segments;
  }

  ptx::grid_dependency_wait();
  if (!a.early) ptx::grid_dependency_launch();
  const PlanHeader& planned = a.uncut_header ? *a.uncut_header : *a.plan.header;
  int64_t end_token = 0;
  if (reinterpret_cast<uintptr_t>(a.decay) % 16 == 0 && gates % 4 == 0) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect(arrived, 4 * gates);
      ptx::bulk_load(ptx::shared_address(s_decay), a.decay, 4 * gates, arrived);
      end_token = planned.end_token;
    }
    ptx::mbarrier_wait(arrived, 0);
  } else {
    if (threadIdx.x == 0) end_token = planned.end_token;
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < gates; i += threads) ptx::cp_async<4>(ptx::shared_address(s_decay + i), a.decay + i);
    ptx::cp_async_wait_all();
    __syncthreads();
  }
  if (mine) s.sum[unit] = u.sum();
  __syncthreads();
  qla::plan::BasicStart<int32_t> start{QLA_START_ZERO, 0};
  if (mine) start = u.start();
  const bool merged = start.start == QLA_START_MERGED;
  if (merged) atomicOr(&s.merged[(u.segment >> 5) * heads + u.head], 1u << (u.segment & 31));
  const int32_t bucket = merged * kBuckets + length_bucket(u.end - u.begin + start.warmup_chunks),
                in_bucket = few_count(s.bucket[0], bucket, mine);
  __syncthreads();
  const int32_t place = few_first(s, bucket) + in_bucket;
  if (mine) {
    const FewSequence& of = s.sequence[u.sequence];
    // bad boundaries may make more entries than there is room for
    const int32_t rank = u.rank(), first_entry = of.first_entry + u.head * (of.segments - 1), room = a.most_states - first_entry;
    const bool usable = merged && rank <= room;
    const int32_t first = u.begin - start.warmup_chunks;
    WorkItem item{};
    item.token = of.bos + 64 * int64_t(first);
    item.slot = of.slot + first;
    item.chunks = u.end - first;
    item.warmup = start.warmup_chunks;
    item.last_rows = u.end < of.chunks ? 64 : of.last_rows;
    item.sequence = u.sequence;
    item.v_head = u.head;
    item.start = merged && !usable ? QLA_START_ZERO : start.start;
    item.start_index = usable ? first_entry + rank - 1 : 0;
    item.is_last = u.is_last ? of.end : 0;
    item.segment = u.in_sequence;
    item.first_chunk = of.first_chunk + first;
    if (a.need_bases) item.chunk_base = of.chunk_base, item.checkpoint_base = of.checkpoint_base;
    const auto put = [&](WorkItem* to, int32_t parts) {
#pragma unroll 1
      for (item.v_part = 0; item.v_part < parts; item.v_part++, to++) store_item(to, item);
    };
    put(a.plan.items + int64_t(place) * a.plan.v_parts, a.plan.v_parts);
    if (u.is_last) {  // the head's chain
      const int32_t count = min(rank, room);
      if (count > 0) a.chains[atomicAdd(&s.chains, 1)] = {first_entry, count};
    } else if (u.merges(u.segment + 1) && rank < room) {  // S_ext, and M where the segment's own start is merged, too
      const int32_t entry = first_entry + rank;
      a.transitions[entry] = merged;
      item.is_last = 0;
      item.start = merged ? QLA_START_ZERO : start.start;
      item.start_index = entry;
      WorkItem* const to = a.pre_items + int64_t(atomicAdd(&s.pre_items, 1 + merged)) * a.pre_v_parts;
      put(to, a.pre_v_parts);
      item.start = kStartIdentity;
      item.start_index = a.most_states + entry;
      if (merged) put(to + a.pre_v_parts, a.pre_v_parts);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    PlanHeader header{};
    header.cut = 1;
    header.num_items = pre_pass_items(s.pre_items * a.pre_v_parts);
    header.num_merges = s.chains;
    header.end_token = end_token;
    *a.pre_header = header;
    if (a.uncut_header) {
      a.plan.header->valid_tokens = a.uncut_header->valid_tokens;
      a.plan.header->end_token = end_token;
      *a.uncut_header = header_without_items(a.plan.tokens);
    }
    a.plan.header->num_items = units * a.plan.v_parts;
    a.plan.header->next_item = 0;
    a.plan.header->num_merges = s.chains;
  }
}

}  // namespace qla::cuda::segments
