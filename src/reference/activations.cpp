#include "reference/activations.hpp"

#include "reference/linear.hpp"

namespace qla::reference {
namespace {

// x^ = r x with r = (|x|^2 + eps)^-1/2:  dx = r (dx^ - x^ <x^, dx^>)
void norm_adjoint(int64_t dim, const double* x, double rnorm, double* dx) {
  const double along = rnorm * rnorm * dot(dim, x, dx);
  for (int64_t c = 0; c < dim; ++c) dx[c] = rnorm * (dx[c] - along * x[c]);
}

}  // namespace

void activations_adjoint(const Inputs& in, const Activated& act, Gradients& grads) {
  const int64_t heads = in.v_heads;
  grads.dA_log.assign(in.raw_gate ? heads : 0, 0.0);
  grads.ddt_bias.assign(in.raw_gate ? heads : 0, 0.0);
  for (int64_t n = 0; n < in.num_seqs(); ++n)
    for (int64_t t = in.bos[n]; t < in.eos[n]; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t i = t * heads + h;
        if (in.raw_gate) {
          grads.dA_log[h] += grads.dg[i] * act.g[i];
          const double x = in.g[i] + (in.dt_bias.empty() ? 0.0 : in.dt_bias[h]);
          grads.dg[i] *= -std::exp(in.A_log[h]) * sigmoid(x);
          grads.ddt_bias[h] += grads.dg[i];
        }
        if (in.beta_sigmoid) {
          const double top = in.neg_eigval ? 2.0 : 1.0, s = act.beta[i] / top;
          grads.dbeta[i] *= top * s * (1.0 - s);
        }
      }
      if (in.qk_l2norm)
        for (int64_t j = 0; j < in.k_heads; ++j) {
          const int64_t row = t * in.k_heads + j, at = row * in.k_dim;
          norm_adjoint(in.k_dim, &in.q[at], act.q_rnorm[row], &grads.dq[at]);
          norm_adjoint(in.k_dim, &in.k[at], act.k_rnorm[row], &grads.dk[at]);
        }
    }
}

}  // namespace qla::reference
