// The few loops that take the time, for float and double, compiled once for AVX2 and once for any x86-64 (chosen at load time).
// Row-major; the sum's order is fixed by the code, not by the data, so results repeat.
#pragma once

#include <cstdint>

namespace qla::reference {

void axpy(int64_t n, double a, const double* x, double* y);  // y += a x
void scal(int64_t n, double a, double* x);                   // x *= a
double dot(int64_t n, const double* x, const double* y);

// c [m, n] += op(a) op(b);  nn: a [m, p], b [p, n];  nt: b [n, p];  tn: a [p, m]
void gemm_nn(int64_t m, int64_t n, int64_t p, const double* a, const double* b, double* c);
void gemm_nt(int64_t m, int64_t n, int64_t p, const double* a, const double* b, double* c);
void gemm_tn(int64_t m, int64_t n, int64_t p, const double* a, const double* b, double* c);
void gemm_nn(int64_t m, int64_t n, int64_t p, const float* a, const float* b, float* c);
void gemm_nt(int64_t m, int64_t n, int64_t p, const float* a, const float* b, float* c);
void gemm_tn(int64_t m, int64_t n, int64_t p, const float* a, const float* b, float* c);

// any other scalar (std::complex): the plain loops
template <class S>
void axpy(int64_t n, S a, const S* x, S* y) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}
template <class S>
void scal(int64_t n, S a, S* x) {
  for (int64_t i = 0; i < n; ++i) x[i] *= a;
}

}  // namespace qla::reference
