// The caller's boundaries on the device. They are untrusted: each is clamped into [0, T] and a sequence that would end before it
// begins is empty, so that nothing made from them points outside the tensors.
#pragma once

#include <cstdint>

#include "cuda/kernels/plan_segments/config.hpp"
#include "qla/qla.h"

namespace qla::cuda::segments {

struct Span {
  int64_t bos, eos;
  __device__ __forceinline__ int32_t chunks() const { return int32_t((eos - bos + 63) / 64); }
};

__device__ __forceinline__ int64_t raw_boundary(const Args& a, int64_t n) {
  return a.index_dtype == QLA_INT64 ? static_cast<const int64_t*>(a.cu_seqlens)[n] : static_cast<const int32_t*>(a.cu_seqlens)[n];
}
__device__ __forceinline__ int64_t clamp_boundary(const Args& a, int64_t x) { return x < 0 ? 0 : x > a.tokens ? a.tokens : x; }
__device__ __forceinline__ int64_t boundary(const Args& a, int64_t n) {
  if (!a.cu_seqlens) return n * a.tokens;
  return clamp_boundary(a, raw_boundary(a, n));
}
__device__ __forceinline__ Span span_of(const Args& a, int64_t n) {
  if (!a.cu_seqlens) return {n * a.tokens, (n + 1) * a.tokens};
  int64_t bos, eos;  // both asked for before one is looked at
  if (a.index_dtype == QLA_INT64) {
    const int64_t* at = static_cast<const int64_t*>(a.cu_seqlens) + n;
    bos = at[0], eos = at[1];
  } else {
    const int32_t* at = static_cast<const int32_t*>(a.cu_seqlens) + n;
    bos = at[0], eos = at[1];
  }
  Span s{clamp_boundary(a, bos), clamp_boundary(a, eos)};
  if (s.eos < s.bos) s.eos = s.bos;
  return s;
}

// PlanHeader::end_token of a range of slots: padding belongs to the last one
__device__ __forceinline__ int64_t end_of_outputs(const Args& a) {
  const int64_t tokens = a.cu_seqlens ? a.tokens : a.num_seqs * a.tokens;
  if (a.first_slot + int64_t(a.slots) < tokens / 64 + a.num_seqs) return tokens;
  return a.num_seqs > 0 ? boundary(a, a.num_seqs) : 0;
}

__device__ __forceinline__ int start_of(const Args& a, int64_t n) {
  return a.has_initial && (!a.has_initial_state || a.has_initial_state[n]) ? QLA_START_INITIAL : QLA_START_ZERO;
}
__device__ __forceinline__ ChunkRecord record_of(const Span& span, int32_t n, int64_t slot) {
  const int64_t chunk = slot - (span.bos / 64 + n), token = span.bos + 64 * chunk;
  if (chunk < 0 || token >= span.eos) return {0, 0, 0};
  return {token, int32_t(span.eos - token < 64 ? span.eos - token : 64), n};
}

// ---- calls of at most kDirectSeqs sequences whose items all run at once: chunk_intra does what plan_segments would

// records of slots; every lane of a warp asks for the same ones
template <int N>
struct DirectRecords {
  ChunkRecord record[N];
  bool cuts;  // whether a sequence has more chunks than longest_whole
};
template <int N>
__device__ __forceinline__ DirectRecords<N> direct_records(const Args& a, const int (&slots)[N]) {
  const int lane = threadIdx.x % 32;
  Span span{0, 0};
  if (lane < a.num_seqs) span = span_of(a, lane);
  DirectRecords<N> found;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const unsigned at_or_before = __ballot_sync(~0u, lane < a.num_seqs && span.bos / 64 + lane <= slots[i]);
    const int n = at_or_before ? 31 - __clz(int(at_or_before)) : 0;
    found.record[i] = record_of({__shfl_sync(~0u, span.bos, n), __shfl_sync(~0u, span.eos, n)}, n, slots[i]);
  }
  found.cuts = __any_sync(~0u, int64_t(span.chunks()) > a.longest_whole);
  return found;
}

// all tables, by one CTA; items in order of sequence, head and half of V
inline __device__ __noinline__ void direct_tables(const Args& a) {
  const int32_t seqs = int32_t(a.num_seqs), threads = blockDim.x, items = seqs * a.num_v_heads * a.v_parts;
  for (int32_t slot = threadIdx.x; slot < a.slots; slot += threads) {
    Span span{0, 0};
    int32_t n = 0;
    for (int32_t i = 0; i < seqs; i++) {
      const Span other = span_of(a, i);
      if (other.bos / 64 + i <= slot) span = other, n = i;
    }
    a.chunk_table[slot] = record_of(span, n, slot);
  }
  for (int32_t i = threadIdx.x; i < items; i += threads) {
    WorkItem item{};
    item.v_part = i % a.v_parts;
    item.v_head = i / a.v_parts % a.num_v_heads;
    item.sequence = i / a.v_parts / a.num_v_heads;
    for (int32_t n = 0; n < item.sequence; n++) {
      const Span span = span_of(a, n);
      item.chunk_base += span.chunks();
      if (a.checkpoint_every_chunks)
        item.checkpoint_base += int32_t((span.eos - span.bos) / (64 * int64_t(a.checkpoint_every_chunks)));
    }
    const Span span = span_of(a, item.sequence);
    item.token = span.bos;
    item.slot = int32_t(span.bos / 64) + item.sequence;
    item.chunks = span.chunks();
    item.last_rows = item.chunks ? int32_t(span.eos - span.bos - 64 * int64_t(item.chunks - 1)) : 0;
    item.start = start_of(a, item.sequence);
    item.is_last = kFinalState;
    a.items[i] = item;
  }
  bool bad = false;
  for (int32_t n = threadIdx.x; n < seqs && a.cu_seqlens; n += threads) {
    const int64_t x = raw_boundary(a, n), y = raw_boundary(a, n + 1);
    bad |= x < 0 || y < x || y > a.tokens || (n == 0 && x != 0);
  }
  bad = __syncthreads_or(bad);
  if (threadIdx.x == 0) {
    PlanHeader header{};
    header.num_items = items;
    header.valid_tokens = !bad;
    header.end_token = boundary(a, a.num_seqs);
    *a.header = header;
  }
}

}  // namespace qla::cuda::segments
