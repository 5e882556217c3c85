#include "cpu/call.hpp"

#include <algorithm>
#include <cmath>

namespace qla::cpu {

std::vector<Sequence> read_sequences(const Problem& problem, const CommonArgs& args) {
  std::vector<Sequence> sequences(static_cast<size_t>(problem.num_seqs));
  int64_t chunks = 0, checkpoints = 0;
  for (int64_t n = 0; n < problem.num_seqs; ++n) {
    Sequence& seq = sequences[n];
    if (problem.varlen) {
      seq.batch = 0;
      // src/api has refused bad boundaries; whatever comes here, nothing outside the buffers is touched
      seq.bos = std::clamp<int64_t>(load_integer(*args.cu_seqlens, n), 0, problem.tokens);
      seq.eos = std::clamp<int64_t>(load_integer(*args.cu_seqlens, n + 1), seq.bos, problem.tokens);
    } else {
      seq.batch = n, seq.bos = 0, seq.eos = problem.tokens;
    }
    seq.first_chunk = chunks;
    seq.first_checkpoint = checkpoints;
    chunks += seq.chunks();
    if (args.checkpoint_every > 0) checkpoints += seq.tokens() / args.checkpoint_every;
    seq.state_slot = args.state_indices && args.state_indices->data ? load_integer(*args.state_indices, n) : n;
    seq.has_initial = seq.state_slot >= 0 && args.initial_state->data &&
                      (!args.has_initial_state->data || load_integer(*args.has_initial_state, n) != 0);
  }
  return sequences;
}

namespace {
// In float for float tensors, as the contract says: the same functions as a framework's fp32 expression.
template <class T>
T softplus(T x) {
  return x > 20 ? x : std::log1p(std::exp(x));
}
template <class T>
T sigmoid(T x) {
  if (x >= 0) return 1 / (1 + std::exp(-x));
  const T e = std::exp(x);
  return e / (1 + e);
}
}  // namespace

template <class T>
Gates<T>::Gates(const Problem& problem, const CommonArgs& args) : args_(args) {
  raw_ = (args.flags & QLA_FLAG_RAW_GATE) != 0;
  sigmoid_ = (args.flags & QLA_FLAG_BETA_SIGMOID) != 0;
  twice_ = (args.flags & QLA_FLAG_NEG_EIGVAL) != 0;
  if (!raw_) return;
  const auto vector_of = [](const qla_tensor& t, int64_t head) { return load_at({t.data, t.stride[0], t.dtype}, head); };
  for (int64_t head = 0; head < problem.num_v_heads; ++head) {
    rate_.push_back(-std::exp(static_cast<T>(vector_of(*args.A_log, head))));
    bias_.push_back(args.dt_bias->data ? static_cast<T>(vector_of(*args.dt_bias, head)) : T(0));
  }
}

template <class T>
void Gates<T>::load(int64_t batch, int64_t token, int64_t v_head, int rows, T* g, T* beta) const {
  const Rows g_rows = token_rows(*args_.g, batch, token, v_head), beta_rows = token_rows(*args_.beta, batch, token, v_head);
  for (int i = 0; i < rows; ++i) {
    T x = g_rows.data ? static_cast<T>(load_at(g_rows, i)) : T(0);
    if (raw_) x = rate_[v_head] * softplus(x + bias_[v_head]);
    g[i] = x;
    T b = static_cast<T>(load_at(beta_rows, i));
    if (sigmoid_) b = sigmoid(b);
    beta[i] = twice_ ? 2 * b : b;
  }
}

template <class T>
void Gates<T>::backward(int64_t batch, int64_t token, int64_t v_head, int rows, T* dg, T* dbeta, double* dA_log,
                        double* ddt_bias) const {
  const Rows g_rows = token_rows(*args_.g, batch, token, v_head), beta_rows = token_rows(*args_.beta, batch, token, v_head);
  for (int i = 0; i < rows; ++i) {
    if (raw_) {
      const T x = (g_rows.data ? static_cast<T>(load_at(g_rows, i)) : T(0)) + bias_[v_head];
      *dA_log += static_cast<double>(dg[i]) * (rate_[v_head] * softplus(x));  // d log decay / d A_log is the log decay itself
      dg[i] *= rate_[v_head] * sigmoid(x);
      *ddt_bias += dg[i];
    }
    if (sigmoid_) {
      const T x = static_cast<T>(load_at(beta_rows, i));
      dbeta[i] *= (twice_ ? 2 : 1) * sigmoid(x) * sigmoid(-x);
    }
  }
}

template class Gates<float>;
template class Gates<double>;

void zero_outside(const std::vector<Sequence>& sequences, const Problem& problem, const qla_tensor& t) {
  if (!t.data) return;
  const int64_t n = t.ndim == 4 ? t.shape[3] : 1;
  const auto zero = [&](int64_t batch, int64_t begin, int64_t end) {
    for (int64_t head = 0; head < t.shape[2]; ++head) zero_rows(token_rows(t, batch, begin, head), end - begin, n);
  };
  int64_t done = 0;  // varlen: the end of what the sequences so far own
  for (const Sequence& seq : sequences) {
    if (problem.varlen) {
      zero(0, done, std::max(done, seq.bos));
      done = std::max(done, seq.eos);
    }
    if (seq.state_slot < 0) zero(seq.batch, seq.bos, seq.eos);
  }
  if (problem.varlen) zero(0, done, problem.tokens);
}

}  // namespace qla::cpu
