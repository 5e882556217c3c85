// What the reference computes from and what it returns: plain contiguous vectors, one layout, no strides, no dtypes.
// The caller rounds inputs to the tensor types first: the reference then takes them as exact.
#pragma once

#include <cstdint>
#include <vector>

namespace qla::reference {

// S is double, or std::complex<double> for the complex-step check of the adjoint.
template <class S>
struct InputsOf {
  int64_t tokens = 0;             // of the whole [B * T] buffer; those outside every sequence are not read and get zeros
  std::vector<int64_t> bos, eos;  // sequence n is the tokens bos[n] .. eos[n] - 1
  int64_t k_heads = 1, v_heads = 1, k_dim = 1, v_dim = 1;
  double scale = 1.0;
  bool qk_l2norm = false, raw_gate = false, beta_sigmoid = false, neg_eigval = false;

  std::vector<S> q, k;            // [tokens, H, K]
  std::vector<S> v;               // [tokens, HV, V]
  std::vector<S> g;               // [tokens, HV]; empty: no decay
  std::vector<S> beta;            // [tokens, HV]
  std::vector<S> initial_state;   // [N, HV, K, V]; empty: zero
  std::vector<char> has_initial;  // [N]; empty: all have. 0: that sequence starts from zero
  std::vector<S> A_log, dt_bias;  // [HV] with raw_gate; dt_bias may be empty

  std::vector<double> d_o;            // [tokens, HV, V]; empty: zero
  std::vector<double> d_final_state;  // [N, HV, K, V]; empty: zero

  int64_t num_seqs() const { return static_cast<int64_t>(bos.size()); }
  int64_t group() const { return v_heads / k_heads; }
  int64_t state_size() const { return k_dim * v_dim; }
  bool starts_from_state(int64_t n) const { return !initial_state.empty() && (has_initial.empty() || has_initial[n]); }
};
using Inputs = InputsOf<double>;

template <class S>
struct OutputsOf {
  std::vector<S> o;            // [tokens, HV, V]
  std::vector<S> final_state;  // [N, HV, K, V]
};
using Outputs = OutputsOf<double>;

struct Gradients {  // shapes of what they are the gradients of; dh0 is always filled, dA_log and ddt_bias with raw_gate
  std::vector<double> dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias;
};

}  // namespace qla::reference
