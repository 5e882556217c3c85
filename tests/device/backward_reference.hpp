// Packed problems for the backward kernels and their truth: the token recurrence and its hand-written adjoint in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace qla::test {

constexpr int kDim = 128, kRows = 64;

struct Case {
  std::string name;
  std::vector<int> lens;  // sequence lengths, packed
  int hk = 2, hv = 4;
  int junk = 0;  // tokens past the last sequence; NaN in every input
  bool qk_norm = false, h0 = true, dht = true, raw_gate = false, logits = false, neg_eigval = false;
  double g_low = -0.08, g_high = -0.01;
  double correlated = 0;  // > 0: keys are one vector per head plus this much noise, normalised
  double beta_low = 0.05, beta_high = 0.95;
  double scale = 0.08838834764831845;
  bool zero_rows = false;  // q and k of token 17, head 1 are 0
  int ctas = 132;          // of chunk_grads
};

struct Problem {
  Case c;
  int tokens = 0;  // junk included
  std::vector<int> bos;
  // [T, H, 128], [T, HV, 128], [T, HV], [N, HV, K, V]
  std::vector<double> q, k, v, d_o, g, beta, h0, dht, a_log, dt_bias;
  int64_t qk_at(int t, int h) const { return (int64_t(t) * c.hk + h) * kDim; }
  int64_t v_at(int t, int h) const { return (int64_t(t) * c.hv + h) * kDim; }
  int64_t s_at(int t, int h) const { return int64_t(t) * c.hv + h; }
  int64_t state_at(int n, int h) const { return (int64_t(n) * c.hv + h) * kDim * kDim; }
};

// Gradients, and what the passes write at chunk boundaries: S before and dS+ after each chunk [slot][HV][K][V], Delta per token.
struct Truth {
  std::vector<double> o, dq, dk, dv, dg, dbeta, dh0, da_log, ddt_bias, state, d_state, delta;
};

inline int slot_of(const Problem& p, int n, int chunk) { return p.bos[n] / kRows + n + chunk; }
inline int num_slots(const Problem& p) { return p.tokens / kRows + int(p.c.lens.size()); }

template <typename Round>
Problem make_problem(const Case& c, Round round, uint64_t seed) {
  Problem p;
  p.c = c;
  for (int len : c.lens) {
    p.bos.push_back(p.tokens);
    p.tokens += len;
  }
  const int valid = p.tokens;
  p.tokens += c.junk;
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  auto uniform = [&](double a, double b) { return a + (b - a) * (rng() >> 11) * 0x1p-53; };
  auto rows = [&](std::vector<double>& x, int heads, double unit, double correlated) {
    x.resize(int64_t(p.tokens) * heads * kDim);
    std::vector<double> base(int64_t(heads) * kDim);
    for (auto& e : base) e = normal(rng);
    for (int t = 0; t < p.tokens; t++)
      for (int h = 0; h < heads; h++) {
        double* r = x.data() + (int64_t(t) * heads + h) * kDim;
        double norm = 0, base_norm = 0;
        for (int i = 0; i < kDim; i++) base_norm += base[h * kDim + i] * base[h * kDim + i];
        for (int i = 0; i < kDim; i++) {
          r[i] = normal(rng);
          if (correlated > 0) r[i] = base[h * kDim + i] / std::sqrt(base_norm) + correlated * r[i];
          norm += r[i] * r[i];
        }
        for (int i = 0; i < kDim; i++) r[i] = round(unit > 0 ? unit * r[i] / std::sqrt(norm) : r[i]);
      }
  };
  rows(p.q, c.hk, c.qk_norm ? 3 : 1, 0);
  rows(p.k, c.hk, c.qk_norm ? 3 : 1, c.correlated);
  rows(p.v, c.hv, 0, 0);
  rows(p.d_o, c.hv, 0, 0);
  for (int64_t i = 0; i < int64_t(p.tokens) * c.hv; i++) {
    p.g.push_back(float(c.raw_gate ? normal(rng) : i % c.hv == c.hv - 1 && c.g_low > -1 ? 0 : uniform(c.g_low, c.g_high)));
    p.beta.push_back(float(c.logits ? normal(rng) : uniform(c.beta_low, c.beta_high)));
  }
  for (int h = 0; h < c.hv; h++) {
    p.a_log.push_back(float(std::log(0.05 + h)));
    p.dt_bias.push_back(float(0.5 * normal(rng)));
  }
  p.h0.resize(c.lens.size() * c.hv * kDim * kDim);
  p.dht.resize(p.h0.size());
  for (auto& x : p.h0) x = c.h0 ? float(normal(rng)) : 0;
  for (auto& x : p.dht) x = c.dht ? float(normal(rng) / 8) : 0;
  if (c.zero_rows)
    for (int i = 0; i < kDim; i++) p.q[p.qk_at(17, 1) + i] = p.k[p.qk_at(17, 1) + i] = 0;
  const double nan = std::nan("");
  for (int64_t t = valid; t < p.tokens; t++) {
    for (int64_t i = 0; i < c.hk * kDim; i++) p.q[t * c.hk * kDim + i] = p.k[t * c.hk * kDim + i] = nan;
    for (int64_t i = 0; i < c.hv * kDim; i++) p.v[t * c.hv * kDim + i] = p.d_o[t * c.hv * kDim + i] = nan;
    for (int h = 0; h < c.hv; h++) p.g[t * c.hv + h] = p.beta[t * c.hv + h] = nan;
  }
  return p;
}

inline double softplus(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }
inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Gates {
  double g, beta, rq, rk;
};
inline Gates gates_of(const Problem& p, int t, int hv) {
  const Case& c = p.c;
  Gates r{p.g[p.s_at(t, hv)], p.beta[p.s_at(t, hv)], 1, 1};
  if (c.raw_gate) r.g = -std::exp(p.a_log[hv]) * softplus(r.g + p.dt_bias[hv]);
  r.g = std::max(r.g, -88.0);
  if (c.logits) r.beta = (c.neg_eigval ? 2 : 1) * sigmoid(r.beta);
  if (c.qk_norm) {
    double q2 = 1e-6, k2 = 1e-6;
    for (int i = 0; i < kDim; i++) {
      const double q = p.q[p.qk_at(t, hv / (c.hv / c.hk)) + i], k = p.k[p.qk_at(t, hv / (c.hv / c.hk)) + i];
      q2 += q * q;
      k2 += k * k;
    }
    r.rq = 1 / std::sqrt(q2);
    r.rk = 1 / std::sqrt(k2);
  }
  return r;
}

inline Truth solve(const Problem& p) {
  const Case& c = p.c;
  const int group = c.hv / c.hk, DD = kDim * kDim;
  Truth r;
  r.o.assign(p.v.size(), 0);
  r.dq.assign(p.q.size(), 0);
  r.dk = r.dq;
  r.dv = r.o;
  r.delta = r.o;
  r.dg.assign(p.g.size(), 0);
  r.dbeta = r.dg;
  r.dh0.assign(p.h0.size(), 0);
  r.da_log.assign(c.hv, 0);
  r.ddt_bias = r.da_log;
  r.state.assign(int64_t(num_slots(p)) * c.hv * DD, 0);
  r.d_state = r.state;
  for (int n = 0; n < int(c.lens.size()); n++)
    for (int h = 0; h < c.hv; h++) {
      const int len = c.lens[n], hk = h / group;
      std::vector<double> S(p.h0.begin() + p.state_at(n, h), p.h0.begin() + p.state_at(n, h) + DD), all(int64_t(len) * DD);
      std::vector<double> qn(int64_t(len) * kDim), kn(qn.size());
      std::vector<Gates> gate(len);
      for (int i = 0; i < len; i++) {
        const int t = p.bos[n] + i;
        gate[i] = gates_of(p, t, h);
        const Gates& g = gate[i];
        double *k = &kn[int64_t(i) * kDim], *q = &qn[int64_t(i) * kDim];
        for (int f = 0; f < kDim; f++) {
          q[f] = g.rq * p.q[p.qk_at(t, hk) + f];
          k[f] = g.rk * p.k[p.qk_at(t, hk) + f];
        }
        if (i % kRows == 0) std::copy(S.begin(), S.end(), r.state.begin() + (int64_t(slot_of(p, n, i / kRows)) * c.hv + h) * DD);
        double* D = &all[int64_t(i) * DD];  // the decayed state
        const double e = std::exp(g.g);
        for (int j = 0; j < DD; j++) D[j] = S[j] * e;
        double* delta = &r.delta[p.v_at(t, h)];
        for (int v = 0; v < kDim; v++) delta[v] = p.v[p.v_at(t, h) + v];
        for (int f = 0; f < kDim; f++)
          for (int v = 0; v < kDim; v++) delta[v] -= k[f] * D[f * kDim + v];
        double* o = &r.o[p.v_at(t, h)];
        for (int f = 0; f < kDim; f++)
          for (int v = 0; v < kDim; v++) {
            S[f * kDim + v] = D[f * kDim + v] + g.beta * k[f] * delta[v];
            o[v] += c.scale * q[f] * S[f * kDim + v];
          }
      }
      std::vector<double> dS(p.dht.begin() + p.state_at(n, h), p.dht.begin() + p.state_at(n, h) + DD);
      for (int i = len - 1; i >= 0; i--) {
        const int t = p.bos[n] + i;
        const Gates& g = gate[i];
        const double *k = &kn[int64_t(i) * kDim], *q = &qn[int64_t(i) * kDim], *D = &all[int64_t(i) * DD],
                     *delta = &r.delta[p.v_at(t, h)], *d_o = &p.d_o[p.v_at(t, h)];
        if (i == len - 1 || i % kRows == kRows - 1)
          std::copy(dS.begin(), dS.end(), r.d_state.begin() + (int64_t(slot_of(p, n, i / kRows)) * c.hv + h) * DD);
        double dqn[kDim], dkn[kDim], dd[kDim] = {}, db = 0, dgate = 0;
        for (int f = 0; f < kDim; f++) {
          dqn[f] = 0;
          for (int v = 0; v < kDim; v++) {
            dqn[f] += c.scale * (D[f * kDim + v] + g.beta * k[f] * delta[v]) * d_o[v];
            dS[f * kDim + v] += c.scale * q[f] * d_o[v];
            dd[v] += g.beta * k[f] * dS[f * kDim + v];
          }
        }
        for (int f = 0; f < kDim; f++) {
          double sd = 0, ddd = 0;
          for (int v = 0; v < kDim; v++) {
            sd += dS[f * kDim + v] * delta[v];
            ddd += D[f * kDim + v] * dd[v];
          }
          db += k[f] * sd;
          dkn[f] = g.beta * sd - ddd;
        }
        const double e = std::exp(g.g);
        for (int f = 0; f < kDim; f++)
          for (int v = 0; v < kDim; v++) {
            dS[f * kDim + v] -= k[f] * dd[v];
            dgate += D[f * kDim + v] * dS[f * kDim + v];
            dS[f * kDim + v] *= e;
          }
        double qd = 0, kd = 0;
        if (c.qk_norm)
          for (int f = 0; f < kDim; f++) {
            qd += q[f] * dqn[f];
            kd += k[f] * dkn[f];
          }
        for (int f = 0; f < kDim; f++) {
          r.dq[p.qk_at(t, hk) + f] += g.rq * (dqn[f] - q[f] * qd);
          r.dk[p.qk_at(t, hk) + f] += g.rk * (dkn[f] - k[f] * kd);
          r.dv[p.v_at(t, h) + f] = dd[f];
        }
        if (c.raw_gate) {
          const double x = p.g[p.s_at(t, h)] + p.dt_bias[h], a = -std::exp(p.a_log[h]);
          r.da_log[h] += dgate * a * softplus(x);
          dgate *= a * sigmoid(x);
          r.ddt_bias[h] += dgate;
        }
        if (c.logits) {
          const double s = sigmoid(p.beta[p.s_at(t, h)]);
          db *= (c.neg_eigval ? 2 : 1) * s * (1 - s);
        }
        r.dg[p.s_at(t, h)] = dgate;
        r.dbeta[p.s_at(t, h)] = db;
      }
      std::copy(dS.begin(), dS.end(), r.dh0.begin() + p.state_at(n, h));
    }
  return r;
}

}  // namespace qla::test
