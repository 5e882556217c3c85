// Everything between the caller's tensors and the recurrence: gate activation, beta's sigmoid, inverse norms; and the way back.
#pragma once

#include <cmath>
#include <complex>

#include "reference/inputs.hpp"

namespace qla::reference {

inline constexpr double kNormEps = 1e-6;  // x / sqrt(sum x^2 + eps)

inline double real_part(double x) { return x; }
inline double real_part(std::complex<double> x) { return x.real(); }

// log(1 + e^x) and its derivative, without overflow
template <class S>
S softplus(S x) {
  using std::exp, std::log;
  return real_part(x) > 0 ? x + log(1.0 + exp(-x)) : log(1.0 + exp(x));
}
template <>
inline double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}
template <class S>
S sigmoid(S x) {
  using std::exp;
  if (real_part(x) >= 0) return 1.0 / (1.0 + exp(-x));
  const S e = exp(x);
  return e / (1.0 + e);
}

template <class S>
struct ActivatedOf {
  std::vector<S> g, beta;           // [tokens, HV]: log decay, write strength
  std::vector<S> q_rnorm, k_rnorm;  // [tokens, H]: inverse norms, 1 without normalisation
};
using Activated = ActivatedOf<double>;

template <class S>
ActivatedOf<S> activate(const InputsOf<S>& in) {
  using std::exp, std::sqrt;
  ActivatedOf<S> out;
  const int64_t heads = in.v_heads;
  out.g.assign(in.tokens * heads, S(0));
  out.beta.assign(in.tokens * heads, S(0));
  out.q_rnorm.assign(in.tokens * in.k_heads, S(1));
  out.k_rnorm.assign(in.tokens * in.k_heads, S(1));
  for (int64_t n = 0; n < in.num_seqs(); ++n)
    for (int64_t t = in.bos[n]; t < in.eos[n]; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t i = t * heads + h;
        if (!in.g.empty()) {
          out.g[i] = in.g[i];
          if (in.raw_gate) out.g[i] = -exp(in.A_log[h]) * softplus(in.g[i] + (in.dt_bias.empty() ? S(0) : in.dt_bias[h]));
        }
        out.beta[i] = in.beta[i];
        if (in.beta_sigmoid) out.beta[i] = (in.neg_eigval ? 2.0 : 1.0) * sigmoid(in.beta[i]);
      }
      if (in.qk_l2norm)
        for (int64_t j = 0; j < in.k_heads; ++j) {
          const int64_t row = t * in.k_heads + j;
          S qq(kNormEps), kk(kNormEps);
          for (int64_t c = 0; c < in.k_dim; ++c) {
            qq += in.q[row * in.k_dim + c] * in.q[row * in.k_dim + c];
            kk += in.k[row * in.k_dim + c] * in.k[row * in.k_dim + c];
          }
          out.q_rnorm[row] = 1.0 / sqrt(qq);
          out.k_rnorm[row] = 1.0 / sqrt(kk);
        }
    }
  return out;
}

// grads holds the gradients of normalised q and k, log decay and beta in (0, 2): turns them into those of the caller's tensors.
void activations_adjoint(const Inputs& in, const Activated& act, Gradients& grads);

}  // namespace qla::reference
