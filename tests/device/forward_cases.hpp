// Inputs, float64 intra-chunk stage and float64 token recurrence on the host for the forward kernel's tests.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cuda/formats.hpp"
#include "device/numbers.hpp"
#include "qla/qla.h"

#define CUDA_OK(x)                                                                    \
  do {                                                                                \
    cudaError_t e_ = (x);                                                             \
    if (e_) {                                                                         \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (0)

namespace fwdtest {

using namespace qla::cuda;

using qla::test::from_bits;
using qla::test::round16;
using qla::test::to_bits;

struct Rng {
  std::mt19937_64 g;
  explicit Rng(uint64_t s) : g(s) {}
  double normal() { return std::normal_distribution<double>()(g); }
  double uniform() { return std::uniform_real_distribution<double>()(g); }
};

// One packed or dense problem: values rounded to the element type, held in double.
struct Data {
  int64_t B = 1, T = 0;
  int Hk = 1, Hv = 1;
  bool bf16 = true;
  double scale = 0.08838834764831845;
  std::vector<double> q, k, v;    // [B*T][H][128]
  std::vector<double> g, beta;    // [B*T][Hv]
  std::vector<int64_t> bos, len;  // sequences, over B*T
  int64_t end_token = 0;

  int group() const { return Hv / Hk; }
  int N() const { return int(len.size()); }
  const double* qrow(int64_t t, int h) const { return &q[(t * Hk + h) * 128]; }
  const double* krow(int64_t t, int h) const { return &k[(t * Hk + h) * 128]; }
  const double* vrow(int64_t t, int h) const { return &v[(t * Hv + h) * 128]; }
};

inline Data make_data(int64_t B, int64_t T, const std::vector<int64_t>& lens, int Hk, int Hv, bool bf16, double gate,
                      uint64_t seed) {
  Data d;
  d.B = B;
  d.T = T;
  d.Hk = Hk;
  d.Hv = Hv;
  d.bf16 = bf16;
  Rng r(seed);
  const int64_t n = B * T;
  d.q.resize(n * Hk * 128);
  d.k.resize(n * Hk * 128);
  d.v.resize(n * Hv * 128);
  d.g.resize(n * Hv);
  d.beta.resize(n * Hv);
  for (auto* x : {&d.q, &d.k})
    for (int64_t i = 0; i < n * Hk; i++) {
      double s = 0, w[128];
      for (auto& y : w) {
        y = r.normal();
        s += y * y;
      }
      for (int j = 0; j < 128; j++) (*x)[i * 128 + j] = round16(w[j] / std::sqrt(s), bf16);
    }
  for (auto& x : d.v) x = round16(r.normal(), bf16);
  for (auto& x : d.g) x = -std::log1p(std::exp(-r.normal())) * gate;
  for (auto& x : d.beta) x = 1 / (1 + std::exp(-r.normal()));
  int64_t at = 0;
  if (lens.empty())
    for (int64_t b = 0; b < B; b++) {
      d.bos.push_back(b * T);
      d.len.push_back(T);
      at = (b + 1) * T;
    }
  else
    for (int64_t l : lens) {
      d.bos.push_back(at);
      d.len.push_back(l);
      at += l;
    }
  d.end_token = at;
  return d;
}

inline int64_t slot_of(const Data& d, int n, int c) { return d.bos[n] / 64 + n + c; }
inline int64_t num_slots(const Data& d) { return d.B * d.T / 64 + d.N(); }

// (F1), (F3), (F6) of one chunk and value head in float64, written in the device's tile format
inline void host_intra(const Data& d, int64_t t0, int rows, int h, uint8_t* abar, uint8_t* pg, float* vec) {
  const int kh = h / d.group();
  std::vector<double> G(64), b(64, 0.0), kk(4096, 0.0), qk(4096, 0.0), X(4096, 0.0);
  double run = 0;
  for (int i = 0; i < 64; i++) {
    if (i < rows) {
      run += std::max(d.g[(t0 + i) * d.Hv + h], -88.0);
      b[i] = d.beta[(t0 + i) * d.Hv + h];
    }
    G[i] = run;
  }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j <= i; j++) {
      double x = 0, y = 0;
      for (int e = 0; e < 128; e++) {
        x += d.krow(t0 + i, kh)[e] * d.krow(t0 + j, kh)[e];
        y += d.qrow(t0 + i, kh)[e] * d.krow(t0 + j, kh)[e];
      }
      const double w = std::exp(G[i] - G[j]);
      kk[i * 64 + j] = x * w;
      qk[i * 64 + j] = y * w;
    }
  for (int j = 0; j < 64; j++) {
    X[j * 64 + j] = 1;
    for (int i = j + 1; i < 64; i++) {
      double s = 0;
      for (int m = j; m < i; m++) s -= kk[i * 64 + m] * b[m] * X[m * 64 + j];
      X[i * 64 + j] = s;
    }
  }
  for (int w = 0; w < 4; w++)
    for (int i = 16 * w; i < 64; i++)
      for (int j = 16 * w; j < 16 * w + 16; j++) {
        uint32_t off = (i - 16 * w) * 32 + (j - 16 * w) * 2;
        off = panel_offset(w) + (off ^ (off >> 7 & 1) << 4);
        const uint16_t a = to_bits(j <= i ? X[i * 64 + j] : 0, d.bf16),
                       p = to_bits(j <= i ? d.scale * qk[i * 64 + j] * b[j] : 0, d.bf16);
        std::memcpy(abar + off, &a, 2);
        std::memcpy(pg + off, &p, 2);
      }
  for (int i = 0; i < 64; i++) {
    vec[kVecK + i] = float(std::exp(G[i]));
    vec[kVecQ + i] = float(d.scale * std::exp(G[i]));
    vec[kVecE + i] = i < rows ? float(std::exp(G[63] - G[i]) * b[i]) : 0.f;
    vec[kVecGamma + i] = float(std::exp(G[i]));
  }
}

// Token recurrence of one sequence and head from S (K x V, in place); o: [len][128]; snapshots at every chunk start if asked
inline void recurrence(const Data& d, int64_t bos, int64_t len, int h, std::vector<double>& S, std::vector<double>* o,
                       std::vector<std::vector<double>>* starts = nullptr) {
  const int kh = h / d.group();
  if (o) o->assign(len * 128, 0);
  std::vector<double> u(128);
  for (int64_t t = 0; t < len; t++) {
    if (starts && t % 64 == 0) starts->push_back(S);
    const double *q = d.qrow(bos + t, kh), *k = d.krow(bos + t, kh), *v = d.vrow(bos + t, h);
    const double a = std::exp(d.g[(bos + t) * d.Hv + h]), b = d.beta[(bos + t) * d.Hv + h];
    for (auto& x : S) x *= a;
    for (int j = 0; j < 128; j++) u[j] = v[j];
    for (int e = 0; e < 128; e++)
      for (int j = 0; j < 128; j++) u[j] -= k[e] * S[e * 128 + j];
    for (int e = 0; e < 128; e++) {
      const double x = k[e] * b;
      for (int j = 0; j < 128; j++) S[e * 128 + j] += x * u[j];
    }
    if (o)
      for (int e = 0; e < 128; e++) {
        const double x = q[e] * d.scale;
        for (int j = 0; j < 128; j++) (*o)[t * 128 + j] += x * S[e * 128 + j];
      }
  }
}

// relative L2 error, NaN counted as infinite
struct Error {
  double e = 0, n = 0;
  void add(double got, double want) {
    const double x = got - want;
    e += std::isfinite(x) ? x * x : std::numeric_limits<double>::infinity();
    n += want * want;
  }
  double rel() const { return n > 0 ? std::sqrt(e / n) : std::sqrt(e); }
};

template <typename X>
X* upload(const std::vector<X>& h) {
  X* p;
  CUDA_OK(cudaMalloc(&p, std::max<size_t>(h.size(), 1) * sizeof(X)));
  CUDA_OK(cudaMemcpy(p, h.data(), h.size() * sizeof(X), cudaMemcpyHostToDevice));
  return p;
}
template <typename X>
std::vector<X> download(const X* p, size_t n) {
  std::vector<X> h(n);
  CUDA_OK(cudaMemcpy(h.data(), p, n * sizeof(X), cudaMemcpyDeviceToHost));
  return h;
}

}  // namespace fwdtest
