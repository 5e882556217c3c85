// The truth: token by token in float64, no chunk, no cumsum, no inverse. Per value head
//
//     S <- exp(g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = scale S^T q_t
//
// and its adjoint, the same steps walked backwards.
#pragma once

#include <complex>

#include "reference/inputs.hpp"

namespace qla::reference {

Outputs recurrence_forward(const Inputs& in);
OutputsOf<std::complex<double>> recurrence_forward(const InputsOf<std::complex<double>>& in);  // for the complex-step check
Gradients recurrence_backward(const Inputs& in);

}  // namespace qla::reference
