// plan_balanced_and_gates - the work items of a fused call by McNaughton's rule (plan/balance.hpp), by its first CTA; the others
// make gate vectors as in plan_and_gates.
//
// The list is the tape: share by share, in each the early part of the item across its first border, whole items, the late part of
// the one across its last. WorkItem::segment is the index of the item to do next, INT32_MAX at a share's end. Shares are taken
// from a counter, the last one first: whoever waits for an early part waits for a share that was taken before its own, so however
// few CTAs run at a time, one of them goes on.
#pragma once

#include "cuda/kernels/plan_segments/kernel.cuh"
#include "plan/balance.hpp"

namespace qla::cuda::segments {

static_assert(qla::plan::kMostBalancedSeqs == kThreads);

struct BalancedShared {
  int64_t at[kThreads];  // on the tape, where a sequence's first head begins
  int32_t chunks[kThreads];
  int64_t scan[kThreads / 32];
  int32_t counts[kThreads / 32];
  int64_t total;
  int32_t longest;
};

// How many of the CTA's threads before this one say yes, and all together.
__device__ __forceinline__ int2 block_rank(bool yes, int32_t* counts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned same = __ballot_sync(~0u, yes);
  __syncthreads();
  if (lane == 0) counts[warp] = __popc(same);
  __syncthreads();
  int before = __popc(same & ((1u << lane) - 1)), all = 0;
  for (int w = 0; w < kThreads / 32; w++) {
    if (w < warp) before += counts[w];
    all += counts[w];
  }
  return {before, all};
}

__device__ __forceinline__ void put_item(WorkItem* to, const WorkItem& item) {
#pragma unroll
  for (int w = 0; w < 4; w++) reinterpret_cast<int4*>(to)[w] = reinterpret_cast<const int4*>(&item)[w];
}

__device__ __forceinline__ void plan_balanced(const Args& a, BalancedShared& s) {
  const int n = int(threadIdx.x), seqs = int(a.num_seqs), shares = a.balanced_shares, items = seqs * a.num_v_heads;
  for (int i = n; i < 2 * shares; i += kThreads) a.part_flags[i] = i < shares ? 0 : INT32_MAX;  // flags, where shares begin
  if (n == 0) s.longest = 0;
  __syncthreads();
  const int32_t chunks = n < seqs ? span_of(a, n).chunks() : 0;
  atomicMax(&s.longest, chunks);
  const int64_t of_sequence = int64_t(chunks) * a.num_v_heads, through = block_inclusive_sum(of_sequence, s.scan);
  s.at[n] = through - of_sequence;
  s.chunks[n] = chunks;
  if (n == kThreads - 1) s.total = through;
  __syncthreads();
  const int64_t share = qla::plan::balanced_share(s.total, s.longest, shares);
  const int used = int(min(int64_t(shares), max(int64_t(1), (s.total + share - 1) / share)));
  const auto parts_of = [&](int i) {
    const int of = i / a.num_v_heads;
    qla::plan::Parts parts =
        qla::plan::parts_of_item(s.at[of] + int64_t(i - of * a.num_v_heads) * s.chunks[of], s.chunks[of], share);
    parts.share = min(parts.share, used - 1);  // what ends where the tape does
    return parts;
  };
  const auto first_of = [&](int i) { return parts_of(i).share; };
  const auto last_of = [&](int i) {
    const qla::plan::Parts parts = parts_of(i);
    return parts.share + (parts.early > 0);
  };
  int cuts = 0;
  for (int from = 0; from < items; from += kThreads) {
    const int i = from + n;
    const qla::plan::Parts parts = i < items ? parts_of(i) : qla::plan::Parts{0, 0, 0};
    const int2 cut = block_rank(parts.early > 0, s.counts);
    if (i < items) {
      const int sequence = i / a.num_v_heads, index = i + cuts + cut.x, last = index + (parts.early > 0);
      const int next = i + 1 < items && first_of(i + 1) == last_of(i) ? last + 1 : INT32_MAX;
      if (i == 0 || last_of(i - 1) != parts.share) a.part_flags[shares + used - 1 - parts.share] = index;
      const Span span = span_of(a, sequence);
      WorkItem item{};
      item.token = span.bos;
      item.slot = int32_t(base_slot(span, sequence));
      item.sequence = sequence;
      item.v_head = i - sequence * a.num_v_heads;
      item.start = start_of(a, sequence);
      item.start_index = parts.share;
      if (parts.early > 0) {
        item.chunks = parts.early;
        item.last_rows = 64;
        item.is_last = kCarry;
        item.segment = next;
        put_item(a.items + last, item);
        a.part_flags[shares + used - 2 - parts.share] = last;
        item.token += 64 * int64_t(parts.early);
        item.slot += parts.early;
        item.start = kStartCarried;
        item.first_chunk = parts.early;
      }
      item.segment = parts.early > 0 ? INT32_MAX : next;
      item.chunks = parts.late;
      item.last_rows = item.chunks ? int32_t(span.eos - item.token - 64 * int64_t(item.chunks - 1)) : 0;
      item.is_last = kFinalState;
      put_item(a.items + index, item);
    }
    cuts += cut.y;
  }
  // A load thread copies the item it asks for before it knows how many there are: none may be what nobody wrote.
  for (int i = items + cuts + n; i < items + shares; i += kThreads) put_item(a.items + i, WorkItem{});
  bool bad = false;
  if (a.cu_seqlens && n < seqs) {
    const int64_t x = raw_boundary(a, n), y = raw_boundary(a, n + 1);
    bad = x < 0 || y < x || y > a.tokens || (n == 0 && x != 0);
  }
  bad = __syncthreads_or(bad);
  if (n == 0) {
    PlanHeader header{};
    header.num_items = items + cuts;
    header.next_item = -a.fused_ctas;
    header.valid_tokens = !bad;
    header.end_token = boundary(a, a.num_seqs);
    *a.header = header;
  }
}

__global__ void __launch_bounds__(kThreads)
    plan_balanced_and_gates(const __grid_constant__ Args a, const __grid_constant__ gates::Args g) {
  __shared__ union {
    BalancedShared plan;
    gates::Shared gates;
  } s;
  ptx::begin_call();
  if (blockIdx.x == 0) return plan_balanced(a, s.plan);
  const int unit = int(blockIdx.x) - 1, slot = unit / g.parts;
  const ChunkRecord record = find_chunk(a, slot, [&](int64_t n) { return boundary(a, n); });
  gates::write_vectors(g, s.gates, record, slot, unit - slot * g.parts);
}

}  // namespace qla::cuda::segments
