#include "api/validate.hpp"

#include <cmath>
#include <string>
#include <utility>

#include "core/env.hpp"
#include "core/status.hpp"
#include "core/tensor_view.hpp"
#include "core/values.hpp"

namespace qla::api {
namespace {

constexpr int64_t kMostTokenHeads = int64_t{1} << 44;  // B * T * HV, N * HV: keeps byte counts of derived buffers inside int64
constexpr int64_t kCpuMostHeadSize = 256;
constexpr uint32_t kKnownFlags = QLA_FLAG_QK_L2NORM | QLA_FLAG_RAW_GATE | QLA_FLAG_BETA_SIGMOID | QLA_FLAG_NEG_EIGVAL |
                                 QLA_FLAG_STATE_V_FIRST | QLA_FLAG_BATCH_INVARIANT | QLA_FLAG_VALIDATE;

const char* backend_name(int32_t backend) { return backend == QLA_BACKEND_CUDA ? "cuda" : "cpu"; }

// Arguments without a tensor, the same in both structs.
template <typename Args>
void check_scalars(const Args& args) {
  QLA_CHECK(args.num_threads >= 0, "num_threads: expected 0 (automatic) or more, got ", args.num_threads, "; pass 0");
  QLA_CHECK((args.flags & ~kKnownFlags) == 0, "flags: expected QLA_FLAG_* bits only, got 0x", std::hex, args.flags,
            " with unknown bits 0x", args.flags & ~kKnownFlags, "; a newer feature needs a newer library");
  QLA_CHECK(!(args.flags & QLA_FLAG_NEG_EIGVAL) || (args.flags & QLA_FLAG_BETA_SIGMOID),
            "flags: expected QLA_FLAG_BETA_SIGMOID with QLA_FLAG_NEG_EIGVAL, got the latter alone; beta <- 2 sigmoid(logits) "
            "needs logits");
  QLA_CHECK(!std::isinf(args.scale), "scale: expected a finite number, or NaN for K^-0.5, got ", args.scale,
            "; pass NaN for the default");
  QLA_CHECK(args.cp_mode >= QLA_CP_AUTO && args.cp_mode <= QLA_CP_PLAN,
            "cp_mode: expected QLA_CP_AUTO, _EXACT, _OFF, _FIXED or _PLAN (0..4), got ", args.cp_mode, "; pass QLA_CP_AUTO");
  if (args.cp_mode == QLA_CP_FIXED)
    QLA_CHECK(args.cp_segment_chunks >= 1 && args.cp_segment_chunks <= INT32_MAX, "cp_segment_chunks: expected 1 to ", INT32_MAX,
              " with QLA_CP_FIXED, got ", args.cp_segment_chunks, "; pass the chunks of a segment");
  else if (args.cp_mode == QLA_CP_PLAN)
    QLA_CHECK(args.cp_segment_chunks >= 0 && args.cp_segment_chunks <= INT32_MAX, "cp_segment_chunks: expected 0 to ", INT32_MAX,
              " with QLA_CP_PLAN, got ", args.cp_segment_chunks, "; pass the plan's segment_chunks");
  else
    QLA_CHECK(args.cp_segment_chunks == 0, "cp_segment_chunks: expected 0 without QLA_CP_FIXED, got ", args.cp_segment_chunks,
              "; pass cp_mode = QLA_CP_FIXED to choose the length");
  QLA_CHECK(std::isnan(args.cp_warmup_threshold) || args.cp_warmup_threshold < 0.0,
            "cp_warmup_threshold: expected a negative sum of log decays, or NaN for the default, got ", args.cp_warmup_threshold,
            "; pass NaN");
  QLA_CHECK(args.cp_uncut_chunks == 0 || (args.cp_mode == QLA_CP_PLAN && args.cp_uncut_chunks > 0), "cp_uncut_chunks: expected ",
            args.cp_mode == QLA_CP_PLAN ? "0 or more" : "0 without QLA_CP_PLAN", ", got ", args.cp_uncut_chunks,
            "; pass the plan's uncut_chunks, or zero the struct before filling it");
}

// q, k, v, g, beta, cu_seqlens: what both directions read, and the sizes.
template <typename Args>
Problem check_inputs(TensorRules& rules, const Args& args, bool on_host, Stage stage) {
  Problem p;
  rules.required("q", args.q, {{"B", kAny}, {"T", kAny}, {"H", kAny}, {"K", kAny}}, Types::Compute, Layout::LastContiguous,
                 Use::Input);
  p.batch = args.q.shape[0];
  p.tokens = args.q.shape[1];
  p.num_k_heads = args.q.shape[2];
  p.k_dim = args.q.shape[3];
  p.dtype = args.q.dtype;
  rules.set_q_dtype(p.dtype);
  rules.required("k", args.k, {{"B", p.batch}, {"T", p.tokens}, {"H", p.num_k_heads}, {"K", p.k_dim}}, Types::LikeQ,
                 Layout::LastContiguous, Use::Input);
  rules.required("v", args.v, {{"B", p.batch}, {"T", p.tokens}, {"HV", kAny}, {"V", kAny}}, Types::LikeQ, Layout::LastContiguous,
                 Use::Input);
  p.num_v_heads = args.v.shape[2];
  p.v_dim = args.v.shape[3];
  QLA_CHECK(p.num_k_heads >= 1, "q: expected at least one head, got shape ", shape_string(args.q), "; H is the third axis");
  QLA_CHECK(p.num_v_heads >= 1 && p.num_v_heads % p.num_k_heads == 0,
            "v: expected a number of value heads HV that is a multiple of H = ", p.num_k_heads, ", got HV = ", p.num_v_heads,
            "; every query/key head serves the same number of value heads");
  QLA_CHECK(p.k_dim >= 1, "q: expected a head size K of at least 1, got shape ", shape_string(args.q), "; K is the last axis");
  QLA_CHECK(p.v_dim >= 1, "v: expected a head size V of at least 1, got shape ", shape_string(args.v), "; V is the last axis");
  if (on_host) {
    QLA_SUPPORTED(p.k_dim <= kCpuMostHeadSize, "q: expected a head size K of 1 to 256 on the CPU, got ", p.k_dim,
                  "; no larger one is served");
    QLA_SUPPORTED(p.v_dim <= kCpuMostHeadSize, "v: expected a head size V of 1 to 256 on the CPU, got ", p.v_dim,
                  "; value columns are independent: call once for each 256 of them");
  }

  rules.optional("g", args.g, {{"B", p.batch}, {"T", p.tokens}, {"HV", p.num_v_heads}}, Types::Float, Layout::Strided,
                 Use::Input);
  rules.required("beta", args.beta, {{"B", p.batch}, {"T", p.tokens}, {"HV", p.num_v_heads}}, Types::Float, Layout::Strided,
                 Use::Input);

  p.varlen = rules.optional("cu_seqlens", args.cu_seqlens, {{"N + 1", kAny}}, Types::Index, Layout::Contiguous, Use::Input);
  QLA_CHECK(args.cu_seqlens.ndim == 0 || p.varlen,
            "cu_seqlens: expected at least one boundary, got an empty tensor; pass [0, .., end] or none");
  p.num_seqs = p.batch;
  if (p.varlen) {
    QLA_CHECK(p.batch == 1, "cu_seqlens: expected B = 1 with packed sequences, got B = ", p.batch, "; fold the batch into T");
    QLA_CHECK(args.cu_seqlens.shape[0] >= 1,
              "cu_seqlens: expected N + 1 boundaries, got an empty tensor; pass [0, .., end] or none");
    p.num_seqs = args.cu_seqlens.shape[0] - 1;
    if (on_host && stage == Stage::Run) check_boundaries(args.cu_seqlens, p.tokens);
  }
  int64_t rows = 0;  // of tokens, of sequences; zero-size tensors leave the other axes unbounded, so each product is checked
  const bool fits = !__builtin_mul_overflow(p.batch, p.tokens, &rows) && !__builtin_mul_overflow(rows, p.num_v_heads, &rows) &&
                    rows <= kMostTokenHeads && !__builtin_mul_overflow(p.num_seqs, p.num_v_heads, &rows) &&
                    rows <= kMostTokenHeads && p.tokens <= kMostTokenHeads && p.k_dim <= kMostTokenHeads &&
                    p.v_dim <= kMostTokenHeads;
  QLA_CHECK(fits, "q: expected B * T * HV and N * HV up to 2^44, got B = ", p.batch, ", T = ", p.tokens, ", N = ", p.num_seqs,
            ", HV = ", p.num_v_heads, "; split the call");

  if (args.flags & QLA_FLAG_RAW_GATE) {
    QLA_CHECK(args.g.ndim != 0, "g: expected the raw gate with QLA_FLAG_RAW_GATE, got none; pass it or clear the flag");
    rules.required("A_log", args.A_log, {{"HV", p.num_v_heads}}, Types::Float, Layout::Contiguous, Use::Input);
    rules.optional("dt_bias", args.dt_bias, {{"HV", p.num_v_heads}}, Types::Float, Layout::Contiguous, Use::Input);
  } else {
    QLA_CHECK(args.A_log.ndim == 0 && args.A_log.data == nullptr, "A_log: expected none without QLA_FLAG_RAW_GATE, got shape ",
              shape_string(args.A_log), "; set the flag if g is the raw gate");
    QLA_CHECK(args.dt_bias.ndim == 0 && args.dt_bias.data == nullptr,
              "dt_bias: expected none without QLA_FLAG_RAW_GATE, got shape ", shape_string(args.dt_bias),
              "; set the flag if g is the raw gate");
  }
  p.scale = std::isnan(args.scale) ? 1.0 / std::sqrt(static_cast<double>(p.k_dim)) : args.scale;
  p.validate_values = (args.flags & QLA_FLAG_VALIDATE) || environment().validate;
  return p;
}

// A state tensor: the caller's order of K and V.
struct StateAxes {
  Axis k, v;
  StateAxes(const Problem& p, uint32_t flags) : k{"K", p.k_dim}, v{"V", p.v_dim} {
    if (flags & QLA_FLAG_STATE_V_FIRST) std::swap(k, v);
  }
};

template <typename Args>
void check_intermediates(TensorRules& rules, const Args& args, const Problem& p, Use use) {
  rules.optional("a_inv", args.a_inv, {{"B", p.batch}, {"T", p.tokens}, {"HV", p.num_v_heads}, {"C", kChunk}}, Types::LikeQ,
                 Layout::LastContiguous, use);
  rules.optional("g_cumsum", args.g_cumsum, {{"B", p.batch}, {"T", p.tokens}, {"HV", p.num_v_heads}}, Types::Accumulator,
                 Layout::Strided, use);
  rules.optional("q_rnorm", args.q_rnorm, {{"B", p.batch}, {"T", p.tokens}, {"H", p.num_k_heads}}, Types::Accumulator,
                 Layout::Strided, use);
  rules.optional("k_rnorm", args.k_rnorm, {{"B", p.batch}, {"T", p.tokens}, {"H", p.num_k_heads}}, Types::Accumulator,
                 Layout::Strided, use);
  if (rules.optional("saved", args.saved, {{"bytes", kAny}}, Types::Bytes, Layout::Contiguous, use))
    QLA_CHECK(aligned(args.saved.data, 256), "saved: expected an address that is a multiple of 256, got ", args.saved.data,
              "; allocate it aligned");
}

template <typename Args>
void check_has_initial_state(TensorRules& rules, const Args& args, const Problem& p) {
  if (rules.optional("has_initial_state", args.has_initial_state, {{"N", p.num_seqs}}, Types::Bool, Layout::Contiguous,
                     Use::Input))
    QLA_CHECK(present(args.initial_state), "has_initial_state: expected initial_state beside it, got none; pass both or neither");
}

// A linear decay passed as its logarithm gives NaN or nonsense a thousand tokens later: in validating calls, say so (testing.md
// BR-64).
void check_gate_space(const qla_tensor& g) {
  if (!present(g) || numel(g) == 0) return;
  const auto bits_at = [&](int64_t b, int64_t t, int64_t h) {
    const char* base =
        static_cast<const char*>(g.data) + (b * g.stride[0] + t * g.stride[1] + h * g.stride[2]) * dtype_size(g.dtype);
    switch (g.dtype) {  // positive and not zero: the sign bit is clear and some other bit is set, in all four float types
      case QLA_FLOAT64:
        return *reinterpret_cast<const int64_t*>(base) > 0;
      case QLA_FLOAT32:
        return *reinterpret_cast<const int32_t*>(base) > 0;
      default:
        return *reinterpret_cast<const int16_t*>(base) > 0;
    }
  };
  for (int64_t b = 0; b < g.shape[0]; ++b)
    for (int64_t t = 0; t < g.shape[1]; ++t)
      for (int64_t h = 0; h < g.shape[2]; ++h)
        if (!bits_at(b, t, h)) return;
  QLA_CHECK(false,
            "g: expected log decays (at most 0 but for rounding), got only positive values; pass log(alpha), not alpha, or "
            "switch validation off");
}

template <typename Args>
void check_host_values(const Args& args, const Problem& p) {
  if (p.validate_values && !(args.flags & QLA_FLAG_RAW_GATE)) check_gate_space(args.g);
}

// Sum over the sequences of f(length): known on the host, or kAny.
template <typename Count>
int64_t sum_over_sequences(const qla_tensor& cu_seqlens, const Problem& p, bool readable, Count count) {
  if (!p.varlen) return p.batch * count(p.tokens);
  if (!readable) return kAny;
  int64_t sum = 0;
  for (int64_t n = 0; n < p.num_seqs; ++n) sum += count(index_at(cu_seqlens, n + 1) - index_at(cu_seqlens, n));
  return sum;
}

}  // namespace

int32_t resolve_backend(int32_t backend, int32_t device, const void* stream) {
  QLA_CHECK(backend >= QLA_BACKEND_AUTO && backend <= QLA_BACKEND_CUDA,
            "backend: expected QLA_BACKEND_AUTO, _CPU or _CUDA (0..2), got ", backend, "; pass QLA_BACKEND_AUTO");
  QLA_CHECK(device >= -1, "device: expected a CUDA ordinal, or -1 for host memory, got ", device, "; pass -1 for the CPU");
  QLA_CHECK(backend != QLA_BACKEND_CUDA || device >= 0,
            "device: expected a CUDA ordinal with QLA_BACKEND_CUDA, got -1; pass the device of the tensors");
  if (backend != QLA_BACKEND_AUTO) return backend;
  QLA_CHECK(device >= 0 || stream == nullptr,
            "device: expected a CUDA ordinal with a stream, got -1; pass the stream's device, or QLA_BACKEND_CPU");
  const int32_t chosen = device >= 0 ? QLA_BACKEND_CUDA : QLA_BACKEND_CPU;
  const std::string& given = environment().force_backend;
  const std::string forced = given.rfind("cpu-", 0) == 0 ? "cpu" : given;  // cpu-v3 ..: src/cpu/dispatch.cpp knows the levels
  QLA_CHECK(forced.empty() || forced == "cpu" || forced == "cuda", "QLA_FORCE_BACKEND: expected cpu or cuda, got ", forced,
            "; unset it");
  QLA_SUPPORTED(forced.empty() || forced == backend_name(chosen), "backend: expected ", forced,
                " (QLA_FORCE_BACKEND), got tensors for ", backend_name(chosen), "; move them or unset the variable");
  return chosen;
}

Problem validate(const qla_gdn_forward_args& args, Stage stage) {
  const bool on_host = resolve_backend(args.backend, args.device, args.stream) == QLA_BACKEND_CPU;
  const bool readable = on_host && stage == Stage::Run;
  check_scalars(args);
  TensorRules rules(stage);
  const Problem p = check_inputs(rules, args, on_host, stage);
  const StateAxes state(p, args.flags);
  const Axis heads{"HV", p.num_v_heads};

  const bool pooled =
      rules.optional("state_indices", args.state_indices, {{"N", p.num_seqs}}, Types::Index, Layout::Contiguous, Use::Input);
  const bool initial = rules.optional("initial_state", args.initial_state,
                                      {pooled ? Axis{"P", kAny} : Axis{"N", p.num_seqs}, heads, state.k, state.v}, Types::Float,
                                      Layout::LastContiguous, pooled ? Use::InPlace : Use::Input);
  const bool final = rules.optional("final_state", args.final_state, {{"N", p.num_seqs}, heads, state.k, state.v}, Types::Float,
                                    Layout::LastContiguous, Use::Output);
  QLA_CHECK(!pooled || initial,
            "state_indices: expected a pool in initial_state, got none; pass the pool or clear state_indices");
  QLA_CHECK(!pooled || !final,
            "final_state: expected none with state_indices, got one; the pool in initial_state is updated in place");
  if (pooled && readable) check_state_indices(args.state_indices, args.initial_state.shape[0]);
  check_has_initial_state(rules, args, p);

  rules.required("o", args.o, {{"B", p.batch}, {"T", p.tokens}, heads, {"V", p.v_dim}}, Types::LikeQ, Layout::LastContiguous,
                 Use::Output);

  const int64_t every = args.checkpoint_every_n_tokens;
  QLA_CHECK(every >= 0 && every % kChunk == 0, "checkpoint_every_n_tokens: expected a multiple of 64, or 0 for none, got ", every,
            "; round it up");
  const bool checkpoints = args.state_checkpoints.ndim != 0 || present(args.state_checkpoints);
  QLA_CHECK(checkpoints == (every > 0), "state_checkpoints: expected together with checkpoint_every_n_tokens, got ",
            checkpoints ? "the tensor without the interval" : "the interval without the tensor", "; pass both or neither");
  if (checkpoints)
    rules.optional(
        "state_checkpoints", args.state_checkpoints,
        {{"sum floor(len / n)", sum_over_sequences(args.cu_seqlens, p, readable, [&](int64_t len) { return len / every; })},
         heads,
         state.k,
         state.v},
        Types::Float, Layout::LastContiguous, Use::Output);

  check_intermediates(rules, args, p, Use::Output);
  rules.optional("a_gated", args.a_gated, {{"B", p.batch}, {"T", p.tokens}, heads, {"C", kChunk}}, Types::LikeQ,
                 Layout::LastContiguous, Use::Output);
  if (args.h.ndim != 0 || present(args.h))
    rules.optional("h", args.h,
                   {{"sum of chunks", sum_over_sequences(args.cu_seqlens, p, readable,
                                                         [](int64_t len) { return len / kChunk + (len % kChunk != 0); })},
                    heads,
                    state.k,
                    state.v},
                   Types::LikeQ, Layout::LastContiguous, Use::Output);
  if (readable) check_host_values(args, p);
  if (stage == Stage::Run) rules.check_overlap(args.workspace, args.workspace_bytes);
  return p;
}

Problem validate(const qla_gdn_backward_args& args, Stage stage) {
  const bool on_host = resolve_backend(args.backend, args.device, args.stream) == QLA_BACKEND_CPU;
  check_scalars(args);
  TensorRules rules(stage);
  const Problem p = check_inputs(rules, args, on_host, stage);
  const StateAxes state(p, args.flags);
  const Axis batch{"B", p.batch}, tokens{"T", p.tokens}, heads{"HV", p.num_v_heads}, k_heads{"H", p.num_k_heads};
  const Axis k_dim{"K", p.k_dim}, v_dim{"V", p.v_dim}, seqs{"N", p.num_seqs};

  rules.optional("initial_state", args.initial_state, {seqs, heads, state.k, state.v}, Types::Float, Layout::LastContiguous,
                 Use::Input);
  check_has_initial_state(rules, args, p);
  check_intermediates(rules, args, p, Use::Input);

  rules.optional("d_o", args.d_o, {batch, tokens, heads, v_dim}, Types::Float, Layout::Strided, Use::Input);
  rules.optional("d_final_state", args.d_final_state, {seqs, heads, state.k, state.v}, Types::Float, Layout::LastContiguous,
                 Use::Input);

  rules.optional("dq", args.dq, {batch, tokens, k_heads, k_dim}, Types::Float, Layout::LastContiguous, Use::Output);
  rules.optional("dk", args.dk, {batch, tokens, k_heads, k_dim}, Types::Float, Layout::LastContiguous, Use::Output);
  rules.optional("dv", args.dv, {batch, tokens, heads, v_dim}, Types::Float, Layout::LastContiguous, Use::Output);
  rules.optional("dg", args.dg, {batch, tokens, heads}, Types::Float, Layout::Strided, Use::Output);
  rules.optional("dbeta", args.dbeta, {batch, tokens, heads}, Types::Float, Layout::Strided, Use::Output);
  rules.optional("d_initial_state", args.d_initial_state, {seqs, heads, state.k, state.v}, Types::Float, Layout::LastContiguous,
                 Use::Output);
  const bool d_a_log = rules.optional("dA_log", args.dA_log, {heads}, Types::Float, Layout::Contiguous, Use::Output);
  const bool d_dt_bias = rules.optional("ddt_bias", args.ddt_bias, {heads}, Types::Float, Layout::Contiguous, Use::Output);
  QLA_CHECK((args.flags & QLA_FLAG_RAW_GATE) || !d_a_log,
            "dA_log: expected none without QLA_FLAG_RAW_GATE, got one; set the flag or clear dA_log");
  QLA_CHECK((args.flags & QLA_FLAG_RAW_GATE) || !d_dt_bias,
            "ddt_bias: expected none without QLA_FLAG_RAW_GATE, got one; set the flag or clear ddt_bias");

  if (on_host && stage == Stage::Run) check_host_values(args, p);
  if (stage == Stage::Run) rules.check_overlap(args.workspace, args.workspace_bytes);
  return p;
}

void validate_workspace(const void* workspace, size_t given, size_t needed) {
  if (given < needed)
    throw Error(QLA_OUT_OF_MEMORY, concat("workspace_bytes: expected at least ", needed, ", got ", given,
                                          "; ask the workspace query with the same arguments"));
  QLA_CHECK(needed == 0 || workspace != nullptr, "workspace: expected ", needed,
            " bytes, got NULL; allocate what the workspace query says");
  QLA_CHECK(aligned(workspace, 256), "workspace: expected an address that is a multiple of 256, got ", workspace,
            "; allocate it aligned");
}

void validate_saved(const qla_tensor& saved, size_t needed) {
  QLA_CHECK(static_cast<size_t>(saved.shape[0]) >= needed, "saved: expected at least ", needed, " bytes, got ", saved.shape[0],
            "; ask qla_gdn_forward_saved with the same shapes");
}

}  // namespace qla::api
