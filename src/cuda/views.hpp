// The C ABI's tensors as the kernels' views of them: what forward and backward have in common on the host.
#pragma once

#include <vector>

#include "core/problem.hpp"
#include "core/tensor_view.hpp"
#include "cuda/device.hpp"
#include "cuda/formats.hpp"
#include "cuda/kernels/chunk_intra/config.hpp"
#include "cuda/kernels/plan_segments/config.hpp"
#include "cuda/tensor_map.hpp"
#include "plan/segments.hpp"

namespace qla::cuda {

inline TokenMapShape map_shape(const qla_tensor& t) {
  TokenMapShape s;
  s.data = t.data;
  s.stride_b = t.stride[0];
  s.stride_t = t.stride[1];
  s.stride_h = t.stride[2];
  s.batch = t.shape[0];
  s.tokens = t.shape[1];
  s.heads = t.shape[2];
  return s;
}

inline intra::View gate_view(const qla_tensor& t) {
  if (!present(t)) return {};
  return {t.data, {t.stride[0], t.stride[1], t.stride[2]}, t.dtype};
}
inline intra::View head_view(const qla_tensor& t) {
  if (!present(t)) return {};
  return {t.data, {0, 0, t.stride[0]}, t.dtype};
}
inline StateView state_view(const qla_tensor& t, uint32_t flags) {
  StateView s;
  if (!present(t)) return s;
  const bool v_first = flags & QLA_FLAG_STATE_V_FIRST;
  s.data = t.data;
  s.dtype = t.dtype;
  s.stride_n = t.stride[0];
  s.stride_h = t.stride[1];
  s.stride_k = t.stride[v_first ? 3 : 2];
  s.stride_v = t.stride[v_first ? 2 : 3];
  return s;
}

// QLA_FLAG_VALIDATE: values that only device memory knows. Synchronises.
inline std::vector<char> host_copy(const qla_tensor& t, cudaStream_t stream) {
  std::vector<char> bytes(size_t(numel(t) * dtype_size(t.dtype)));
  check_cuda(cudaMemcpyAsync(bytes.data(), t.data, bytes.size(), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return bytes;
}
inline void check_boundaries_in_memory(const qla_tensor& cu_seqlens, int64_t tokens, cudaStream_t stream) {
  std::vector<char> bytes = host_copy(cu_seqlens, stream);
  qla_tensor host = cu_seqlens;
  host.data = bytes.data();
  check_boundaries(host, tokens);
}

// Args: qla_gdn_forward_args or qla_gdn_backward_args. Header, items and chunk table are the caller's to fill in.
template <class Args>
segments::Args plan_args(const Args& args, const Problem& p, int32_t v_parts) {
  segments::Args a{};
  if (p.varlen) {
    a.cu_seqlens = args.cu_seqlens.data;
    a.index_dtype = args.cu_seqlens.dtype;
  }
  a.has_initial = present(args.initial_state);
  a.has_initial_state = static_cast<const uint8_t*>(args.has_initial_state.data);
  a.num_seqs = p.num_seqs;
  a.tokens = p.tokens;
  a.slots = int32_t(p.chunk_slots());
  a.num_v_heads = int32_t(p.num_v_heads);
  a.v_parts = v_parts;
  return a;
}

// Items a q/k head. Fewer value heads an item repeat K [K;Q]^T but fill the card sooner: rounds of CTAs times microseconds of an
// item, whose heads' inverses run side by side.
inline int32_t intra_parts(const Problem& p, int64_t slots, const Device& device) {
  const int64_t ctas = int64_t(device.multiprocessors) * intra::kCtasPerSm, group = p.group();
  int64_t best = 0;
  double best_us = 0;
  for (int64_t parts = plan::ceil_div(group, intra::kHeads); parts <= group; parts++) {
    const int64_t per = plan::ceil_div(group, parts);
    if ((parts - 1) * per >= group) continue;  // the last one would be empty
    const double us = double(plan::ceil_div(slots * p.num_k_heads * parts, ctas)) * intra::round_us(per);
    if (best != 0 && us >= best_us) continue;
    best = parts;
    best_us = us;
  }
  return int32_t(best);
}

// Whether chunk_intra can make the tables of a whole, uncut call on the way: few sequences, and a CTA for each of its own items,
// one more for the tables, and one for each work item of the recurrence (whose order then does not matter).
inline bool direct_plan(const Problem& p, int64_t v_parts, const Device& device) {
  const int64_t intra_items = p.chunk_slots() * p.num_k_heads * intra_parts(p, p.chunk_slots(), device);
  return p.num_seqs > 0 && p.num_seqs <= segments::kDirectSeqs &&
         p.num_seqs * p.num_v_heads * v_parts <= device.multiprocessors &&
         intra_items < int64_t(intra::kCtasPerSm) * device.multiprocessors;
}

// What goes in, of so many chunk slots. The chunk table and what comes out (abar, pg, vec, decay) are the caller's to fill in.
template <class Args>
intra::Args intra_args(const Args& args, const Problem& p, int64_t slots, const Device& device) {
  intra::Args a{};
  a.tokens = p.tokens;
  a.slots = int32_t(slots);
  a.varlen = p.varlen;
  a.num_k_heads = int32_t(p.num_k_heads);
  a.num_v_heads = int32_t(p.num_v_heads);
  a.group = int32_t(p.group());
  a.parts = intra_parts(p, slots, device);
  a.per = (a.group + a.parts - 1) / a.parts;
  a.flags = args.flags;
  a.scale = float(p.scale);
  a.g = gate_view(args.g);
  a.beta = gate_view(args.beta);
  a.a_log = head_view(args.A_log);
  a.dt_bias = head_view(args.dt_bias);
  return a;
}

}  // namespace qla::cuda
