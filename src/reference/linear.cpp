#include "reference/linear.hpp"

// Under a sanitizer the load-time choice would run before the sanitizer's own start: one version then.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define QLA_REFERENCE_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define QLA_REFERENCE_CLONES
#endif
#define QLA_REFERENCE_INLINE static inline __attribute__((always_inline))

namespace qla::reference {
namespace {

template <class T>
QLA_REFERENCE_INLINE void axpy_body(int64_t n, T a, const T* __restrict x, T* __restrict y) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}
template <class T>
QLA_REFERENCE_INLINE T dot_body(int64_t n, const T* __restrict x, const T* __restrict y) {
  T sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}
template <class T>
QLA_REFERENCE_INLINE void nn_body(int64_t m, int64_t n, int64_t p, const T* a, const T* b, T* c) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t l = 0; l < p; ++l) axpy_body(n, a[i * p + l], b + l * n, c + i * n);
}
template <class T>
QLA_REFERENCE_INLINE void nt_body(int64_t m, int64_t n, int64_t p, const T* a, const T* b, T* c) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) c[i * n + j] += dot_body(p, a + i * p, b + j * p);
}
template <class T>
QLA_REFERENCE_INLINE void tn_body(int64_t m, int64_t n, int64_t p, const T* a, const T* b, T* c) {
  for (int64_t l = 0; l < p; ++l)
    for (int64_t i = 0; i < m; ++i) axpy_body(n, a[l * m + i], b + l * n, c + i * n);
}

}  // namespace

QLA_REFERENCE_CLONES void axpy(int64_t n, double a, const double* x, double* y) { axpy_body(n, a, x, y); }
QLA_REFERENCE_CLONES void scal(int64_t n, double a, double* x) {
  for (int64_t i = 0; i < n; ++i) x[i] *= a;
}
QLA_REFERENCE_CLONES double dot(int64_t n, const double* x, const double* y) { return dot_body(n, x, y); }

QLA_REFERENCE_CLONES void gemm_nn(int64_t m, int64_t n, int64_t p, const double* a, const double* b, double* c) {
  nn_body(m, n, p, a, b, c);
}
QLA_REFERENCE_CLONES void gemm_nt(int64_t m, int64_t n, int64_t p, const double* a, const double* b, double* c) {
  nt_body(m, n, p, a, b, c);
}
QLA_REFERENCE_CLONES void gemm_tn(int64_t m, int64_t n, int64_t p, const double* a, const double* b, double* c) {
  tn_body(m, n, p, a, b, c);
}
QLA_REFERENCE_CLONES void gemm_nn(int64_t m, int64_t n, int64_t p, const float* a, const float* b, float* c) {
  nn_body(m, n, p, a, b, c);
}
QLA_REFERENCE_CLONES void gemm_nt(int64_t m, int64_t n, int64_t p, const float* a, const float* b, float* c) {
  nt_body(m, n, p, a, b, c);
}
QLA_REFERENCE_CLONES void gemm_tn(int64_t m, int64_t n, int64_t p, const float* a, const float* b, float* c) {
  tn_body(m, n, p, a, b, c);
}

}  // namespace qla::reference
