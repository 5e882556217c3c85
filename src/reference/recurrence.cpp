#include "reference/recurrence.hpp"

#include <algorithm>
#include <cmath>

#include "reference/activations.hpp"
#include "reference/linear.hpp"
#include "reference/parallel.hpp"

namespace qla::reference {
namespace {

constexpr int64_t kMaxDim = 512;  // of K and V

template <class S>
struct Token {  // of one value head; q and k normalised if asked
  S q[kMaxDim], k[kMaxDim];
  const S* v;
  S decay, beta;
};

template <class S>
void token_at(const InputsOf<S>& in, const ActivatedOf<S>& act, int64_t t, int64_t head, Token<S>& x) {
  using std::exp;
  const int64_t row = t * in.k_heads + head / in.group(), i = t * in.v_heads + head;
  for (int64_t c = 0; c < in.k_dim; ++c) {
    x.q[c] = in.q[row * in.k_dim + c] * act.q_rnorm[row];
    x.k[c] = in.k[row * in.k_dim + c] * act.k_rnorm[row];
  }
  x.v = &in.v[i * in.v_dim];
  x.decay = exp(act.g[i]);
  x.beta = act.beta[i];
}

// One step of the recurrence; o (if wanted) is overwritten.
template <class S>
void step(const InputsOf<S>& in, const Token<S>& x, S* state, S* o) {
  const int64_t V = in.v_dim;
  S delta[kMaxDim];  // v - S^T k, S decayed
  std::copy(x.v, x.v + V, delta);
  for (int64_t i = 0; i < in.k_dim; ++i) {
    scal(V, x.decay, state + i * V);
    axpy(V, -x.k[i], state + i * V, delta);
  }
  if (o) std::fill(o, o + V, S(0));
  for (int64_t i = 0; i < in.k_dim; ++i) {
    axpy(V, x.beta * x.k[i], delta, state + i * V);
    if (o) axpy(V, in.scale * x.q[i], state + i * V, o);
  }
}

template <class S>
std::vector<S> start_state(const InputsOf<S>& in, int64_t n, int64_t head) {
  std::vector<S> state(in.state_size(), S(0));
  if (in.starts_from_state(n)) {
    const S* from = &in.initial_state[(n * in.v_heads + head) * in.state_size()];
    state.assign(from, from + in.state_size());
  }
  return state;
}

template <class S>
OutputsOf<S> forward(const InputsOf<S>& in) {
  const ActivatedOf<S> act = activate(in);
  OutputsOf<S> out;
  out.o.assign(in.tokens * in.v_heads * in.v_dim, S(0));
  out.final_state.assign(in.num_seqs() * in.v_heads * in.state_size(), S(0));
  parallel_for(in.num_seqs() * in.v_heads, [&](int64_t job) {
    const int64_t n = job / in.v_heads, head = job % in.v_heads;
    std::vector<S> state = start_state(in, n, head);
    Token<S> x;
    for (int64_t t = in.bos[n]; t < in.eos[n]; ++t) {
      token_at(in, act, t, head, x);
      step(in, x, state.data(), &out.o[(t * in.v_heads + head) * in.v_dim]);
    }
    std::copy(state.begin(), state.end(), &out.final_state[job * in.state_size()]);
  });
  return out;
}

// Adjoint of one token: before and after are the states around it, d_state the gradient of `after` and then of `before`.
void step_adjoint(const Inputs& in, const Token<double>& x, const double* before, const double* after, const double* d_o,
                  double* d_state, double* dq, double* dk, double* dv, double* dg, double* dbeta) {
  const int64_t K = in.k_dim, V = in.v_dim;
  double delta[kMaxDim], kds[kMaxDim];  // v - S^T k of the decayed S; dS^T k
  std::copy(x.v, x.v + V, delta);
  std::fill(kds, kds + V, 0.0);
  for (int64_t i = 0; i < K; ++i) {
    if (d_o) {
      dq[i] += in.scale * dot(V, after + i * V, d_o);
      axpy(V, in.scale * x.q[i], d_o, d_state + i * V);
    }
    axpy(V, -x.decay * x.k[i], before + i * V, delta);
    axpy(V, x.k[i], d_state + i * V, kds);
  }
  *dbeta = dot(V, kds, delta);
  double* const d_delta = kds;
  scal(V, x.beta, d_delta);
  axpy(V, 1.0, d_delta, dv);
  *dg = 0.0;
  for (int64_t i = 0; i < K; ++i) {
    dk[i] += x.beta * dot(V, d_state + i * V, delta) - x.decay * dot(V, before + i * V, d_delta);
    axpy(V, -x.k[i], d_delta, d_state + i * V);
    *dg += x.decay * dot(V, before + i * V, d_state + i * V);
    scal(V, x.decay, d_state + i * V);
  }
}

constexpr int64_t kCheckpoint = 48;  // tokens between kept states; those between are rebuilt

void backward_head(const Inputs& in, const Activated& act, int64_t n, int64_t head, Gradients& grads) {
  const int64_t size = in.state_size(), bos = in.bos[n], length = in.eos[n] - bos;
  std::vector<double> kept;  // the state before tokens 0, 48, 96, ..
  std::vector<double> state = start_state(in, n, head);
  Token<double> x;
  for (int64_t t = 0; t < length; ++t) {
    if (t % kCheckpoint == 0) kept.insert(kept.end(), state.begin(), state.end());
    token_at(in, act, bos + t, head, x);
    step(in, x, state.data(), static_cast<double*>(nullptr));
  }
  std::vector<double> d_state(size, 0.0);
  if (!in.d_final_state.empty()) {
    const double* from = &in.d_final_state[(n * in.v_heads + head) * size];
    d_state.assign(from, from + size);
  }
  std::vector<double> between((std::min(kCheckpoint, length) + 1) * size);
  for (int64_t first = (length - 1) / kCheckpoint * kCheckpoint; first >= 0 && length > 0; first -= kCheckpoint) {
    const int64_t count = std::min(kCheckpoint, length - first);
    std::copy_n(&kept[first / kCheckpoint * size], size, between.begin());
    for (int64_t t = 0; t < count; ++t) {
      std::copy_n(&between[t * size], size, &between[(t + 1) * size]);
      token_at(in, act, bos + first + t, head, x);
      step(in, x, &between[(t + 1) * size], static_cast<double*>(nullptr));
    }
    for (int64_t t = count - 1; t >= 0; --t) {
      const int64_t token = bos + first + t, i = token * in.v_heads + head,
                    row = (token * in.k_heads + head / in.group()) * in.k_dim;
      token_at(in, act, token, head, x);
      step_adjoint(in, x, &between[t * size], &between[(t + 1) * size], in.d_o.empty() ? nullptr : &in.d_o[i * in.v_dim],
                   d_state.data(), &grads.dq[row], &grads.dk[row], &grads.dv[i * in.v_dim], &grads.dg[i], &grads.dbeta[i]);
    }
  }
  if (in.initial_state.empty() || in.starts_from_state(n))
    std::copy(d_state.begin(), d_state.end(), &grads.dh0[(n * in.v_heads + head) * size]);
}

}  // namespace

Outputs recurrence_forward(const Inputs& in) { return forward(in); }
OutputsOf<std::complex<double>> recurrence_forward(const InputsOf<std::complex<double>>& in) { return forward(in); }

Gradients recurrence_backward(const Inputs& in) {
  const Activated act = activate(in);
  Gradients grads;
  grads.dq.assign(in.q.size(), 0.0);
  grads.dk.assign(in.k.size(), 0.0);
  grads.dv.assign(in.v.size(), 0.0);
  grads.dg.assign(in.tokens * in.v_heads, 0.0);
  grads.dbeta.assign(in.tokens * in.v_heads, 0.0);
  grads.dh0.assign(in.num_seqs() * in.v_heads * in.state_size(), 0.0);
  parallel_for(in.num_seqs() * in.k_heads,
               [&](int64_t job) {  // a job owns a q/k head, so that its dq and dk are summed by one thread
                 const int64_t n = job / in.k_heads, k_head = job % in.k_heads;
                 for (int64_t h = k_head * in.group(); h < (k_head + 1) * in.group(); ++h) backward_head(in, act, n, h, grads);
               });
  activations_adjoint(in, act, grads);
  return grads;
}

}  // namespace qla::reference
