// cut_few - cut_items for few sequences and segments, which is what a planner's own cut makes: the same lists.
//   grid: one CTA; a thread a unit = (sequence, segment, value head), heads side by side, so that lanes read sums of different
//   banks. What boundaries decide is worked out before anything is waited for. Then: sums to shared memory; sum of each segment;
//   start of each segment, counted by length; positions and items. No 64-bit division, no loop over units: the CTA has as many
//   threads as there may be units. Where heads that merge have segments of their own (CutRule::merged_chunks) each head has
//   threads for both cuts, and one of them makes no items.
// CutArgs::beside: chunk_intra is still at work when this kernel begins, as soon as a multiprocessor has room for one CTA of it
//   fewer. Its sums are taken one by one as they come (gather_sums), all but those behind the last boundary of a sequence, which
//   decide nothing: so the lists are there when chunk_intra ends, and this kernel ends when it has seen that.
// CutArgs::rehearses: what comes behind the sums takes as long as its code is in no cache, 7 us for 3. Where the last of them are
//   still to come, a whole cut is made of made-up ones first: in the same places, which the real one writes again, or nobody
//   reads.
// The merged boundary in front of segment j > 0 of a sequence's head h has an entry for each piece of the pre-pass's way to it,
//   by its rank: behind those that the sequences before and the heads before may have, merged boundaries of this head before it.
//   Shapes bound that; entries of one chain are consecutive.
#pragma once

#include "cuda/kernels/plan_segments/cut.cuh"
#include "cuda/ptx/control.cuh"

namespace qla::cuda::segments {

// Looks at sums that are not there yet: with the pause behind them 1 us each, in all about what chunk_intra takes at most from
// here on.
inline constexpr int kPatience = 128, kPauseNs = 300;

struct FewSequence {
  int64_t bos;  // of its part in the range
  int32_t chunks, last_rows, slot, first_chunk;
  int32_t segment_chunks[2], segments[2];  // of a head that merges: the second one, if any
  int32_t places, first_place;             // .. of both cuts
  int32_t first_entry;                     // of its first head
  int32_t chunk_base, checkpoint_base;
  int16_t start, end;
};
struct FewShared {
  alignas(16) int32_t bucket[2][kBuckets];  // units by length; merged starts: the second half
  FewSequence sequence[kFewSequences];
  int32_t places;  // over all sequences
  int32_t valid;   // for the header of a list of its own
  int64_t end_token;
  int32_t long_items, pre_items, chains;
  float sum[kFewUnits];            // of ghat over the unit's segment
  uint32_t merged[kFewUnits];      // [place / 32][head]: bit place % 32
  uint8_t sequence_of[kFewUnits];  // of a place
  uint8_t merging[kFewUnits];      // [a sequence's first place][head]
};

// of a head whose boundaries are all merged
__device__ __forceinline__ int32_t few_entries(const CutArgs& a, const FewSequence& x) {
  const int32_t segments = max(x.segments[0], x.segments[1]);
  return segments > 1 ? (segments - 2) * a.rule.pieces + a.rule.first_pieces : 0;
}

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
    const qla::plan::CutRule rule = qla::plan::rule_where_cut(a.rule);
#pragma unroll
    for (int merging = 0; merging < 2; merging++) {
      const auto cut = qla::plan::make_basic_cut(run.chunks, rule, merging);
      x.segment_chunks[merging] = cut.segment_chunks;
      x.segments[merging] = run.present ? cut.num_segments : 0;
    }
    if (a.rule.merged_chunks == 0 || x.segments[0] < 2) x.segments[1] = 0;
    x.places = x.segments[0] + x.segments[1];
    x.start = int16_t(run.continued() ? kStartCarried : start_of(a.plan, n));
    x.end = run.goes_on ? kCarry : kFinalState;
  }
  const bool cuts = __any_sync(~0u, a.rule.cuts(x.chunks));
  const int32_t every = a.plan.checkpoint_every_chunks, chunks = span.chunks(), entries_a_head = few_entries(a, x),
                checkpoints = every ? int32_t(uint32_t((span.eos - span.bos) / 64) / uint32_t(every)) : 0;
  int32_t places = x.places, entries = entries_a_head, chunk_base = chunks, checkpoint_base = checkpoints;
#pragma unroll 1
  for (int d = 1; d < 32 && seqs > 1; d *= 2) {
    const int32_t left[] = {__shfl_up_sync(~0u, places, d), __shfl_up_sync(~0u, entries, d), __shfl_up_sync(~0u, chunk_base, d),
                            __shfl_up_sync(~0u, checkpoint_base, d)};
    if (n >= d) places += left[0], entries += left[1], chunk_base += left[2], checkpoint_base += left[3];
  }
  x.first_place = places - x.places;
  x.first_entry = (entries - entries_a_head) * heads;
  x.chunk_base = chunk_base - chunks;
  x.checkpoint_base = checkpoint_base - checkpoints;
  // Sequences that overlap (bad boundaries) may have more segments than the shapes allow: the rest is dropped.
  const int32_t most = a.most_units / heads;
  x.places = max(0, min(x.places, most - x.first_place));
  x.segments[0] = min(x.segments[0], x.places);
  x.segments[1] = min(x.segments[1], x.places - x.segments[0]);
  if (n < seqs) s.sequence[n] = x;
  if (n == seqs - 1) s.places = min(places, most);
  if (a.uncut_header) {  // as plan_few has it in the other list's
    bool bad = false;
    if (n < seqs && a.plan.cu_seqlens) {
      const int64_t from = raw_boundary(a.plan, n), to = raw_boundary(a.plan, n + 1);
      bad = from < 0 || to < from || to > a.plan.tokens || (n == 0 && from != 0);
    }
    const bool valid = !__any_sync(~0u, bad);
    if (n == 0) s.valid = valid, s.end_token = end_of_outputs(a.plan);
  }
  return cuts;
}

// One thread's unit.
struct FewUnit {
  const CutArgs& a;
  FewShared& s;
  const float* decay;                    // in shared memory
  int32_t heads, place, head, sequence;  // place: over all sequences
  int32_t segment, begin, end;           // segment and chunks of the sequence
  int32_t segments;
  bool finer;  // of the cut for heads that merge

  __device__ __forceinline__ void find() {
    const FewSequence& of = s.sequence[sequence];
    segment = place - of.first_place;
    finer = segment >= of.segments[0];
    if (finer) segment -= of.segments[0];
    begin = min(segment * of.segment_chunks[finer], of.chunks);
    end = min(begin + of.segment_chunks[finer], of.chunks);
    segments = of.segments[finer];
  }
  __device__ __forceinline__ bool is_last() const { return segment + 1 == segments; }
  __device__ __forceinline__ uint8_t& merging() const { return s.merging[s.sequence[sequence].first_place * heads + head]; }
  __device__ __forceinline__ float sum() const {
    const float* const first = decay + (s.sequence[sequence].slot + begin) * heads + head;
    return qla::plan::sum_in_order(end - begin, [&](int32_t c) { return first[c * heads]; });
  }
  __device__ __forceinline__ qla::plan::BasicStart<int32_t> start() const {
    const FewSequence& of = s.sequence[sequence];
    if (segment == 0) return {of.start, 0};
    const float* const before = s.sum + (place - segment) * heads + head;
    const float total = qla::plan::sum_in_order(segment, [&](int32_t c) { return before[c * heads]; });
    const float* const nearest = decay + (of.slot + begin - 1) * heads + head;
    auto start = qla::plan::start_at(begin, total, of.start != QLA_START_ZERO, a.rule,
                                     [&](int32_t back) { return nearest[(1 - back) * heads]; });
    if (start.start == QLA_START_INITIAL) start.start = of.start;
    return start;
  }
  __device__ __forceinline__ bool merges(int32_t at) const { return s.merged[(at >> 5) * heads + head] >> (at & 31) & 1; }
  // of the head's last segment: the slot up to which the pre-pass walks
  __device__ __forceinline__ int32_t pre_pass_until() const {
    const FewSequence& of = s.sequence[sequence];
    const int32_t first = place - segment, length = of.segment_chunks[merging()];
    int32_t at = segment;
#pragma unroll 1
    while (at > 0 && !merges(first + at)) at--;
    return at > 0 ? of.slot + min(at * length, of.chunks) : 0;
  }
  // entries of this head in front of those of the sequence's segments behind this one
  __device__ __forceinline__ int32_t entries() const {
    const int32_t first = place - segment;
    int32_t count = 0;
#pragma unroll 1
    for (int32_t w = first >> 5; w <= place >> 5; w++) {
      uint32_t bits = s.merged[w * heads + head];
      if (w == first >> 5) bits &= ~0u << (first & 31);
      if (w == place >> 5) bits &= ~0u >> (31 - (place & 31));
      count += __popc(bits);
    }
    const bool of_first = segment > 0 && merges(first + 1);
    return count * a.rule.pieces + (of_first ? a.rule.first_pieces - a.rule.pieces : 0);
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

__device__ __forceinline__ bool is_there(float4 x) {
  return __float_as_uint(x.x) != kNoSum && __float_as_uint(x.y) != kNoSum && __float_as_uint(x.z) != kNoSum &&
         __float_as_uint(x.w) != kNoSum;
}
__device__ __forceinline__ bool is_there(float x) { return __float_as_uint(x) != kNoSum; }

// Sums to shared memory as they come, by all threads. A sum and the word that it is there are one word, so relaxed loads do:
// nothing is ordered. When
// the kernels before have ended what is still missing belongs to no chunk (bad boundaries); patience: looks before that is waited
// for.
template <typename Word>
__device__ __forceinline__ void gather_sums(Word* to, const Word* from, int32_t count, int32_t& patience) {
  constexpr int kAtOnce = 4;
  const int32_t threads = int32_t(blockDim.x);
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < count; i += kAtOnce * threads) {
    Word x[kAtOnce];
#pragma unroll 1
    for (;;) {
      const bool ended = patience <= 0;
      if (ended) ptx::grid_dependency_wait();
      bool there = true;
#pragma unroll
      for (int w = 0; w < kAtOnce; w++)
        if (i + w * threads < count) x[w] = ptx::load_relaxed(from + i + w * threads);
#pragma unroll
      for (int w = 0; w < kAtOnce; w++)
        if (i + w * threads < count) there &= is_there(x[w]);
      if (there || ended) break;
      patience--;
      __nanosleep(kPauseNs);  // who writes them has to go on: looks without a pause cost chunk_intra a tenth of its time
    }
#pragma unroll
    for (int w = 0; w < kAtOnce; w++)
      if (i + w * threads < count) to[i + w * threads] = x[w];
  }
}
// Sums that decide about a sequence, from its slot's on: those of chunks before its last boundary.
__device__ __forceinline__ int32_t deciding_sums(const CutArgs& a, const FewSequence& of) {
  const int32_t last = max((of.segments[0] - 1) * of.segment_chunks[0], (of.segments[1] - 1) * of.segment_chunks[1]);
  return max(0, min(of.chunks, last)) * a.plan.num_v_heads;
}
__device__ __forceinline__ void gather_sums(const CutArgs& a, const FewShared& s, float* to) {
  const int32_t heads = a.plan.num_v_heads;
  const bool by_four = heads % 4 == 0 && reinterpret_cast<uintptr_t>(a.decay) % 16 == 0;
  int32_t patience = a.beside ? kPatience : 0;
#pragma unroll 1
  for (int n = 0; n < int(a.plan.num_seqs); n++) {
    const int32_t at = s.sequence[n].slot * heads, count = deciding_sums(a, s.sequence[n]);
    if (by_four)
      gather_sums(reinterpret_cast<float4*>(to + at), reinterpret_cast<const float4*>(a.decay + at), count / 4, patience);
    else
      gather_sums(to + at, a.decay + at, count, patience);
  }
}
// Whether the last of them are still to come, and there is time. A thread a sequence.
__device__ __forceinline__ bool early(const CutArgs& a, const FewShared& s) {
  if (!a.rehearses || int(threadIdx.x) >= int(a.plan.num_seqs)) return false;
  const FewSequence& of = s.sequence[threadIdx.x];
  const int32_t count = deciding_sums(a, of);
  return count > 0 && !is_there(ptx::load_relaxed(a.decay + of.slot * a.plan.num_v_heads + count - 1));
}
// For a rehearsal: heads that forget in a chunk, and heads that do not at all.
__device__ __forceinline__ void make_up_sums(const CutArgs& a, float* to) {
  const int32_t count = a.plan.slots * a.plan.num_v_heads;
#pragma unroll 4
  for (int32_t i = threadIdx.x; i < count; i += int32_t(blockDim.x)) to[i] = i % 2 ? 0.f : a.rule.threshold;
}

__global__ void __launch_bounds__(kFewUnits, 1) cut_few(const __grid_constant__ CutArgs a) {
  extern __shared__ float4 s_decay4[];
  float* const s_decay = reinterpret_cast<float*>(s_decay4);
  __shared__ FewShared s;
  const int32_t heads = a.plan.num_v_heads, threads = int32_t(blockDim.x);
  const bool cuts = threadIdx.x < 32 && few_sequences(a, s);
  if (answer(a, cuts)) return;
  if (a.beside) ptx::grid_dependency_launch();
#pragma unroll 1
  for (int n = 0; n < int(a.plan.num_seqs); n++)
#pragma unroll 1
    for (int i = threadIdx.x; i < s.sequence[n].places; i += threads) s.sequence_of[s.sequence[n].first_place + i] = uint8_t(n);
  // All of it comes twice where there is time: the first time of sums that are made up, so that its code is in the cache.
  bool rehearses = __syncthreads_or(early(a, s));
  if (!a.beside) {
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
  }
  int32_t items;
#pragma unroll 1
  for (;; rehearses = false) {
    if (threadIdx.x == 0) s.long_items = s.pre_items = s.chains = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * kBuckets; i += threads) (&s.bucket[0][0])[i] = 0;
    s.merged[threadIdx.x] = 0;
    s.merging[threadIdx.x] = 0;
    // While the sums are still to come: a division and loads whose code is in no cache yet. The segment itself comes behind them,
    // for want of registers.
    const int32_t unit = int32_t(threadIdx.x);
    FewUnit u{a, s, s_decay, heads, 0, 0, 0, 0, 0, 0, 0, false};
    bool mine = unit < s.places * heads;
    if (mine) {
      u.place = int32_t(uint32_t(unit) / uint32_t(heads));
      u.head = unit - u.place * heads;
      u.sequence = s.sequence_of[u.place];
    }
    if (rehearses)
      make_up_sums(a, s_decay);
    else
      gather_sums(a, s, s_decay);
    __syncthreads();
    if (mine) u.find();
    if (mine && !u.is_last()) s.sum[unit] = u.sum();
    __syncthreads();
    qla::plan::BasicStart<int32_t> start{QLA_START_ZERO, 0};
    if (mine) start = u.start();
    if (a.rule.merged_chunks) {  // the last boundary of the one cut says which of them the head has
      if (mine && !u.finer && u.is_last() && start.start == QLA_START_MERGED) u.merging() = 1;
      __syncthreads();
      if (mine && u.finer != bool(u.merging())) mine = false, start = {QLA_START_ZERO, 0};
    }
    const bool merged = start.start == QLA_START_MERGED;
    if (merged) atomicOr(&s.merged[(u.place >> 5) * heads + u.head], 1u << (u.place & 31));
    const int32_t bucket = cut_bucket(a.rule, merged, length_bucket(u.end - u.begin + start.warmup_chunks)),
                  in_bucket = few_count(s.bucket[0], bucket, mine);
    items = __syncthreads_count(mine);
    const int32_t at = few_first(s, bucket) + in_bucket;
    // bad boundaries may make more entries than there is room for
    const FewSequence& of = s.sequence[u.sequence];
    const int32_t first_entry = of.first_entry + u.head * few_entries(a, of), room = a.most_states - first_entry,
                  entries = mine ? u.entries() : 0;
    // The pre-pass walks this segment: S_ext of each piece, M where something is in front of it. The longer pieces come first.
    const int32_t pieces = qla::plan::pieces_of_segment(a.rule, u.segment), pre_items = 2 * pieces - (merged ? 0 : 1);
    const bool walks = mine && !u.is_last() && u.merges(u.place + 1) && entries + pieces <= room;
    int32_t* counter = &s.pre_items;
    if (a.rule.pieces != a.rule.first_pieces) {
      const bool longer = (u.segment == 0) == (a.rule.first_pieces < a.rule.pieces);
      if (walks && longer) atomicAdd(&s.pre_items, pre_items), counter = &s.long_items;
      __syncthreads();
    }
    if (mine) {
      const bool usable = merged && entries <= room;
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
      item.start_index = usable ? first_entry + entries - 1 : 0;
      item.is_last = u.is_last() ? of.end : 0;
      item.segment = u.segment;
      item.first_chunk = of.first_chunk + first;
      if (a.need_bases) item.chunk_base = of.chunk_base, item.checkpoint_base = of.checkpoint_base;
      const auto put = [&](WorkItem* to, int32_t parts) {
#pragma unroll 1
        for (item.v_part = 0; item.v_part < parts; item.v_part++, to++) store_item(to, item);
      };
      if (at < a.most_items) put(a.plan.items + int64_t(at) * a.plan.v_parts, a.plan.v_parts);
      if (u.is_last()) {  // the head's chain
        const int32_t count = min(entries, room);
        if (count > 0) a.chains[atomicAdd(&s.chains, 1)] = {first_entry, count};
        if (a.heads) {
          const int32_t all = u.segment * a.rule.pieces + (u.segment > 0 ? a.rule.first_pieces - a.rule.pieces : 0);
          a.heads[u.sequence * heads + u.head] = entries < all ? kHeadForgets : 0;
          if (a.until) a.until[u.sequence * heads + u.head] = u.pre_pass_until();
        }
      } else if (walks) {
        WorkItem* to = a.pre_items + int64_t(atomicAdd(counter, pre_items)) * a.pre_v_parts;
        item.is_last = 0;
#pragma unroll 1
        for (int32_t piece = 0; piece < pieces; piece++) {
          const int32_t entry = first_entry + entries + piece;
          const bool moves = merged || piece > 0;
          const int32_t from = qla::plan::begin_of_piece(u.end - u.begin, pieces, piece),
                        until = qla::plan::begin_of_piece(u.end - u.begin, pieces, piece + 1),
                        warmup = piece == 0 ? start.warmup_chunks : 0, walk = u.begin + from - warmup;
          item.token = of.bos + 64 * int64_t(walk);
          item.slot = of.slot + walk;
          item.chunks = until - from + warmup;
          item.warmup = warmup;
          item.first_chunk = of.first_chunk + walk;
          item.start = moves ? QLA_START_ZERO : start.start;
          item.start_index = entry;
          a.transitions[entry] = moves;
          put(to, a.pre_v_parts), to += a.pre_v_parts;
          item.start = kStartIdentity;
          item.start_index = a.most_states + entry;
          if (moves) put(to, a.pre_v_parts), to += a.pre_v_parts;
        }
      }
    }
    __syncthreads();
    if (!rehearses) break;
  }
  if (threadIdx.x == 0) {
    PlanHeader header{};
    header.cut = 1;
    header.num_items = pre_pass_items(s.pre_items * a.pre_v_parts);
    header.num_merges = s.chains;
    header.end_token = a.plan.tokens;
    *a.pre_header = header;
    if (a.uncut_header) {
      a.plan.header->valid_tokens = s.valid;
      a.plan.header->end_token = s.end_token;
      if (!a.heads) *a.uncut_header = header_without_items(a.plan.tokens);
    }
    a.plan.header->num_items = min(items, a.most_items) * a.plan.v_parts;
    a.plan.header->next_item = 0;
    a.plan.header->num_merges = s.chains;
    if (a.beside) ptx::grid_dependency_wait();  // whoever waits for this kernel counts on all before it
  }
}

}  // namespace qla::cuda::segments
