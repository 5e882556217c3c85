// A problem for the CPU backend's unit tests: contiguous random tensors of any dtype, the call through core/backend.hpp, and the
// float64 recurrence of src/reference on the very values the tensors hold.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/backend.hpp"
#include "cpu/view.hpp"
#include "reference/recurrence.hpp"

namespace qla::cpu_test {

struct Tensor {
  qla_tensor view{};
  std::vector<char> bytes;

  Tensor() = default;
  Tensor(int32_t dtype, std::vector<int64_t> shape) {
    view.dtype = dtype;
    view.ndim = static_cast<int32_t>(shape.size());
    int64_t count = 1;
    for (int i = view.ndim - 1; i >= 0; --i) view.shape[i] = shape[i], view.stride[i] = count, count *= shape[i];
    bytes.assign(static_cast<size_t>(count * cpu::element_size(dtype)) + 1, static_cast<char>(0xFF));  // NaN in every float type
    view.data = bytes.data();
  }
  int64_t count() const { return view.data ? static_cast<int64_t>(bytes.size() - 1) / cpu::element_size(view.dtype) : 0; }
  char* at(int64_t i) const { return static_cast<char*>(view.data) + i * cpu::element_size(view.dtype); }
  void set(int64_t i, double x) { cpu::store_scalar(view.dtype, at(i), x); }
  double get(int64_t i) const { return cpu::load_scalar(view.dtype, at(i)); }
  std::vector<double> values() const {
    std::vector<double> all(static_cast<size_t>(count()));
    for (int64_t i = 0; i < count(); ++i) all[i] = get(i);
    return all;
  }
  qla_tensor arg() const {
    qla_tensor t = view;
    if (t.data) t.data = const_cast<char*>(bytes.data());
    return t;
  }
};

struct Options {
  std::string name = "default";
  int64_t batch = 1, tokens = 100, k_heads = 1, v_heads = 2, k_dim = 16, v_dim = 24;
  int32_t dtype = QLA_FLOAT32, gate_dtype = QLA_FLOAT32, beta_dtype = QLA_FLOAT32, state_dtype = QLA_FLOAT32;
  std::vector<int64_t> cu;  // boundaries; empty: dense
  uint32_t flags = 0;
  double gate = 0.5, gate_shift = 0;  // log decay -gate * U + shift
  double scale = std::numeric_limits<double>::quiet_NaN();
  bool with_gate = true, with_h0 = true, with_dht = true, with_bias = true;
  double key_noise = -1;  // >= 0: keys are one base key plus this much noise
  double beta = -1;       // >= 0: this write strength everywhere
  int32_t cp_mode = QLA_CP_OFF;
  int64_t cp_segment_chunks = 0;
  double cp_threshold = std::numeric_limits<double>::quiet_NaN();
  int threads = 1;
  unsigned seed = 1;
};

struct CpuRun {
  Options s;
  Problem problem;
  Tensor q, k, v, g, beta, h0, cu, A_log, dt_bias, d_o, dht;
  Tensor o, ht, dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias;

  explicit CpuRun(const Options& setup) : s(setup) {
    std::mt19937 random(s.seed);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    const int64_t n = s.cu.empty() ? s.batch : static_cast<int64_t>(s.cu.size()) - 1;
    problem.batch = s.batch, problem.tokens = s.tokens, problem.num_seqs = n;
    problem.num_k_heads = s.k_heads, problem.num_v_heads = s.v_heads, problem.k_dim = s.k_dim, problem.v_dim = s.v_dim;
    problem.varlen = !s.cu.empty(), problem.dtype = s.dtype;
    problem.scale = std::isnan(s.scale) ? 1 / std::sqrt(static_cast<double>(s.k_dim)) : s.scale;
    const auto make = [&](int32_t dtype, std::vector<int64_t> shape) { return Tensor(dtype, shape); };
    q = make(s.dtype, {s.batch, s.tokens, s.k_heads, s.k_dim}), k = make(s.dtype, {s.batch, s.tokens, s.k_heads, s.k_dim});
    v = make(s.dtype, {s.batch, s.tokens, s.v_heads, s.v_dim}), d_o = make(s.dtype, {s.batch, s.tokens, s.v_heads, s.v_dim});
    beta = make(s.beta_dtype, {s.batch, s.tokens, s.v_heads});
    if (s.with_gate) g = make(s.gate_dtype, {s.batch, s.tokens, s.v_heads});
    const int64_t rows = s.flags & QLA_FLAG_STATE_V_FIRST ? s.v_dim : s.k_dim, columns = s.k_dim + s.v_dim - rows;
    if (s.with_h0) h0 = make(s.state_dtype, {n, s.v_heads, rows, columns});
    if (s.with_dht) dht = make(s.state_dtype, {n, s.v_heads, rows, columns});
    const bool raw = s.flags & QLA_FLAG_RAW_GATE, norm = s.flags & QLA_FLAG_QK_L2NORM, logits = s.flags & QLA_FLAG_BETA_SIGMOID;
    std::vector<double> base(static_cast<size_t>(s.k_dim));
    double length = 0;
    for (double& x : base) x = normal(random), length += x * x;
    for (double& x : base) x /= std::sqrt(length);
    for (Tensor* t : {&q, &k})
      for (int64_t i = 0; i < t->count(); i += s.k_dim) {
        std::vector<double> row(base.size());
        double sum = 0;
        for (size_t j = 0; j < row.size(); ++j)
          row[j] = (t == &k && s.key_noise >= 0 ? base[j] + s.key_noise * normal(random) : normal(random)),
          sum += row[j] * row[j];
        for (size_t j = 0; j < row.size(); ++j) t->set(i + static_cast<int64_t>(j), norm ? 3 * row[j] : row[j] / std::sqrt(sum));
      }
    for (Tensor* t : {&v, &d_o, &h0, &dht})
      for (int64_t i = 0; i < t->count(); ++i) t->set(i, normal(random) * (t == &dht ? 0.125 : 1));
    for (int64_t i = 0; i < beta.count(); ++i) beta.set(i, s.beta >= 0 ? s.beta : logits ? normal(random) : uniform(random));
    for (int64_t i = 0; i < g.count(); ++i) g.set(i, raw ? normal(random) : -s.gate * uniform(random) + s.gate_shift);
    if (raw) {
      A_log = make(QLA_FLOAT32, {s.v_heads});
      for (int64_t i = 0; i < s.v_heads; ++i) A_log.set(i, std::log(0.05 + 4 * uniform(random)));
      if (s.with_bias) {
        dt_bias = make(QLA_FLOAT32, {s.v_heads});
        for (int64_t i = 0; i < s.v_heads; ++i) dt_bias.set(i, normal(random));
      }
    }
    if (!s.cu.empty()) {
      cu = make(QLA_INT32, {n + 1});
      for (int64_t i = 0; i <= n; ++i) {
        const auto x = static_cast<int32_t>(s.cu[i]);
        std::memcpy(cu.at(i), &x, 4);
      }
    }
    o = make(s.dtype, {s.batch, s.tokens, s.v_heads, s.v_dim});
    ht = make(s.state_dtype, {n, s.v_heads, rows, columns});
    dq = make(s.dtype, {s.batch, s.tokens, s.k_heads, s.k_dim}), dk = dq,
    dv = make(s.dtype, {s.batch, s.tokens, s.v_heads, s.v_dim});
    dk.view.data = dk.bytes.data();
    dg = make(s.gate_dtype, {s.batch, s.tokens, s.v_heads}), dbeta = make(s.beta_dtype, {s.batch, s.tokens, s.v_heads});
    dh0 = make(QLA_FLOAT32, {n, s.v_heads, rows, columns});
    if (s.dtype == QLA_FLOAT64) dh0 = make(QLA_FLOAT64, {n, s.v_heads, rows, columns});
    if (raw) dA_log = make(QLA_FLOAT32, {s.v_heads}), ddt_bias = make(QLA_FLOAT32, {s.v_heads});
    if (!s.with_bias) ddt_bias = Tensor();
  }

  template <class Args>
  void common(Args& a) const {
    a = Args{};
    a.struct_size = sizeof(Args);
    a.backend = QLA_BACKEND_CPU, a.device = -1;
    a.num_threads = s.threads, a.flags = s.flags, a.scale = problem.scale;
    a.q = q.arg(), a.k = k.arg(), a.v = v.arg(), a.g = g.arg(), a.beta = beta.arg();
    a.initial_state = h0.arg(), a.cu_seqlens = cu.arg(), a.A_log = A_log.arg(), a.dt_bias = dt_bias.arg();
    a.cp_mode = s.cp_mode, a.cp_segment_chunks = s.cp_segment_chunks, a.cp_warmup_threshold = s.cp_threshold;
  }
  qla_gdn_forward_args forward_args() const {
    qla_gdn_forward_args a;
    common(a);
    a.final_state = ht.arg(), a.o = o.arg();
    return a;
  }
  qla_gdn_backward_args backward_args() const {
    qla_gdn_backward_args a;
    common(a);
    a.d_o = d_o.arg(), a.d_final_state = dht.arg();
    a.dq = dq.arg(), a.dk = dk.arg(), a.dv = dv.arg(), a.dg = dg.arg(), a.dbeta = dbeta.arg(), a.d_initial_state = dh0.arg();
    a.dA_log = dA_log.arg(), a.ddt_bias = ddt_bias.arg();
    return a;
  }
  void forward() const { cpu::forward(forward_args(), problem); }
  void backward() const { cpu::backward(backward_args(), problem); }

  std::vector<double> state_values(const Tensor& t) const {  // as [N, HV, K, V]
    std::vector<double> all = t.values();
    if (!(s.flags & QLA_FLAG_STATE_V_FIRST)) return all;
    std::vector<double> turned(all.size());
    const int64_t size = s.k_dim * s.v_dim;
    for (size_t at = 0; at < all.size(); at += size)
      for (int64_t i = 0; i < s.k_dim; ++i)
        for (int64_t j = 0; j < s.v_dim; ++j) turned[at + i * s.v_dim + j] = all[at + j * s.k_dim + i];
    return turned;
  }

  reference::Inputs reference_inputs() const {
    reference::Inputs in;
    in.tokens = s.batch * s.tokens;
    for (int64_t n = 0; n < problem.num_seqs; ++n) {
      in.bos.push_back(s.cu.empty() ? n * s.tokens : s.cu[n]);
      in.eos.push_back(s.cu.empty() ? (n + 1) * s.tokens : s.cu[n + 1]);
    }
    in.k_heads = s.k_heads, in.v_heads = s.v_heads, in.k_dim = s.k_dim, in.v_dim = s.v_dim, in.scale = problem.scale;
    in.qk_l2norm = s.flags & QLA_FLAG_QK_L2NORM, in.raw_gate = s.flags & QLA_FLAG_RAW_GATE;
    in.beta_sigmoid = s.flags & QLA_FLAG_BETA_SIGMOID, in.neg_eigval = s.flags & QLA_FLAG_NEG_EIGVAL;
    in.q = q.values(), in.k = k.values(), in.v = v.values(), in.g = g.values(), in.beta = beta.values();
    in.A_log = A_log.values(), in.dt_bias = dt_bias.values();
    in.initial_state = state_values(h0), in.d_o = d_o.values(), in.d_final_state = state_values(dht);
    return in;
  }
};

// Relative L2 error; NaN anywhere is an infinite error.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& expected) {
  if (got.size() != expected.size()) return INFINITY;
  double difference = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i)
    difference += (got[i] - expected[i]) * (got[i] - expected[i]), size += expected[i] * expected[i];
  const double error = std::sqrt(difference / (size > 1e-60 ? size : 1));
  return std::isnan(error) ? INFINITY : error;
}

struct NamedError {
  const char* name;
  double error;
};
inline std::vector<NamedError> errors_of(const CpuRun& r) {
  const reference::Inputs in = r.reference_inputs();
  const reference::Outputs out = reference::recurrence_forward(in);
  const reference::Gradients grad = reference::recurrence_backward(in);
  std::vector<NamedError> all{
      {"o", relative_error(r.o.values(), out.o)},     {"ht", relative_error(r.state_values(r.ht), out.final_state)},
      {"dq", relative_error(r.dq.values(), grad.dq)}, {"dk", relative_error(r.dk.values(), grad.dk)},
      {"dv", relative_error(r.dv.values(), grad.dv)}, {"dbeta", relative_error(r.dbeta.values(), grad.dbeta)}};
  if (r.g.view.data) all.push_back({"dg", relative_error(r.dg.values(), grad.dg)});
  if (r.h0.view.data) all.push_back({"dh0", relative_error(r.state_values(r.dh0), grad.dh0)});
  if (r.dA_log.view.data) all.push_back({"dA_log", relative_error(r.dA_log.values(), grad.dA_log)});
  if (r.ddt_bias.view.data) all.push_back({"ddt_bias", relative_error(r.ddt_bias.values(), grad.ddt_bias)});
  return all;
}

}  // namespace qla::cpu_test
