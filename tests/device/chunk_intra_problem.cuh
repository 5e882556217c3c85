// chunk_intra's test: input kinds, layouts, dtypes and lengths of a case, and the kernel's arguments on the device.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>

#include "cuda/kernels/chunk_intra/launch.hpp"
#include "cuda/math/exp.cuh"
#include "cuda/tensor_map.hpp"
#include "device/harness.hpp"
#include "device/numbers.hpp"
#include "qla/qla.h"

namespace {

using namespace qla::cuda;
using namespace qla::test;

enum class Keys { kUnit, kCorrelated, kNearEqual, kEqual, kWide };

struct Case {
  std::string name;
  int group = 1, num_k_heads = 2;
  int64_t batch = 1, tokens = 0;  // dense
  std::vector<int64_t> lens;      // or packed
  int64_t padding = 0;            // tokens behind the last sequence
  bool fp16 = false, with_pg = true, strided = false;
  int32_t g_dtype = QLA_FLOAT32, beta_dtype = QLA_FLOAT32;
  uint32_t flags = 0;
  Keys keys = Keys::kUnit;
  double gate = -0.04, beta_low = 0, beta_high = 1, key_size = 1;
  double limit = 4e-3;  // of max(1, largest)
  bool backward = true, ungated = false;
  int nan_gate_at = -1;  // token of sequence 0
  int repeats = 0;       // more launches, whose bits must be the same
  bool leaves = false;   // beside a cut: the grid's last CTA leaves ahead of the others
};

double round_to(double x, int32_t dtype) {
  return dtype == QLA_FLOAT64 || dtype == QLA_FLOAT32 ? double(float(x)) : round16(x, dtype == QLA_BFLOAT16);
}

struct Problem {
  Case c;
  int64_t total = 0, num_seqs = 0;
  int heads_v = 0;
  std::vector<ChunkRecord> table;
  std::vector<double> k, q, g, beta;  // [total][H][128], [total][HV]
  std::vector<uint16_t> kq;           // [total][2 H + 1][128] when strided (q heads, one unused, k heads) else q then k
  std::vector<uint8_t> g_raw, beta_raw;
  std::vector<float> a_log, dt_bias;
};

Problem make(const Case& c, uint32_t seed) {
  Problem p;
  p.c = c;
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<int64_t> lens = c.lens.empty() ? std::vector<int64_t>(size_t(c.batch), c.tokens) : c.lens;
  int64_t bos = 0;
  p.num_seqs = int64_t(lens.size());
  for (int64_t len : lens) p.total += len;
  const int64_t used = p.total;
  p.total += c.padding;
  p.table.assign(size_t(p.total / 64 + p.num_seqs), ChunkRecord{0, 0, 0});
  for (int64_t n = 0; n < p.num_seqs; n++) {
    for (int64_t i = 0; i * 64 < lens[n]; i++)
      p.table[size_t(bos / 64 + n + i)] = {bos + 64 * i, int32_t(std::min<int64_t>(64, lens[n] - 64 * i)), int32_t(n)};
    bos += lens[n];
  }
  const int H = c.num_k_heads, HV = p.heads_v = H * c.group, rowk = 2 * H + 1;
  p.k.resize(p.total * H * 128);
  p.q.resize(p.total * H * 128);
  p.kq.resize(size_t(p.total) * rowk * 128, 0x7fff);
  std::vector<double> base(size_t(H) * 128);
  for (auto& x : base) x = normal(rng);
  for (int h = 0; h < H; h++) {
    double s = 0;
    for (int d = 0; d < 128; d++) s += base[h * 128 + d] * base[h * 128 + d];
    for (int d = 0; d < 128; d++) base[h * 128 + d] /= std::sqrt(s);
  }
  for (int64_t t = 0; t < p.total; t++)
    for (int h = 0; h < H; h++)
      for (int which = 0; which < 2; which++) {
        std::vector<double> x(128);
        double s = 0;
        for (int d = 0; d < 128; d++) {
          x[d] = normal(rng) / std::sqrt(128.0);
          if (!which) {
            if (c.keys == Keys::kCorrelated) x[d] = base[h * 128 + d] + 0.3 * x[d];
            if (c.keys == Keys::kNearEqual) x[d] = base[h * 128 + d] + 0.01 * x[d];
            if (c.keys == Keys::kEqual) x[d] = base[h * 128 + d];
          }
          s += x[d] * x[d];
        }
        const double wide = c.keys == Keys::kWide ? std::exp2(6 * uniform(rng) - 3) : 1;
        for (int d = 0; d < 128; d++) {
          const bool pad = t >= used;
          const float r =
              pad ? NAN : round16(x[d] / std::sqrt(s) * wide * (c.keys == Keys::kWide || !which ? c.key_size : 1), !c.fp16);
          (which ? p.q : p.k)[(t * H + h) * 128 + d] = r;
          const size_t at = c.strided ? (size_t(t) * rowk + (which ? h : H + 1 + h)) * 128 + d
                                      : (which ? 0 : size_t(p.total) * H * 128) + (size_t(t) * H + h) * 128 + d;
          p.kq[at] = to_bits(r, !c.fp16);
        }
      }
  p.g.resize(p.total * HV);
  p.beta.resize(p.total * HV);
  p.g_raw.resize(p.total * HV * dtype_size(c.g_dtype));
  p.beta_raw.resize(p.total * HV * dtype_size(c.beta_dtype));
  p.a_log.resize(HV);
  p.dt_bias.resize(HV);
  for (int h = 0; h < HV; h++) p.a_log[h] = float(uniform(rng) * 3 - 2), p.dt_bias[h] = float(normal(rng));
  for (int64_t t = 0; t < p.total; t++)
    for (int h = 0; h < HV; h++) {
      double g = c.flags & QLA_FLAG_RAW_GATE ? normal(rng) : c.gate * 2 * uniform(rng);
      if (int(t) == c.nan_gate_at) g = NAN;
      double b = c.flags & QLA_FLAG_BETA_SIGMOID ? normal(rng) : c.beta_low + (c.beta_high - c.beta_low) * uniform(rng);
      if (!(c.flags & QLA_FLAG_BETA_SIGMOID) && c.beta_low == 0 && rng() % 31 == 0) b = 0;
      if (t >= used) g = b = NAN;
      g = round_to(g, c.g_dtype);
      b = round_to(b, c.beta_dtype);
      const size_t at = size_t(h) * p.total + t;  // head-major in memory: a stride that is not the usual one
      put(p.g_raw, c.strided ? at : size_t(t) * HV + h, c.g_dtype, g);
      put(p.beta_raw, c.strided ? at : size_t(t) * HV + h, c.beta_dtype, b);
      if (c.flags & QLA_FLAG_RAW_GATE) g = -std::exp(double(p.a_log[h])) * std::log1p(std::exp(g + p.dt_bias[h]));
      if (c.flags & QLA_FLAG_BETA_SIGMOID) b = (c.flags & QLA_FLAG_NEG_EIGVAL ? 2 : 1) / (1 + std::exp(-b));
      p.g[t * HV + h] = g < -88 ? -88 : g;
      p.beta[t * HV + h] = b;
    }
  return p;
}

struct Run {
  Device<uint16_t> kq;
  Device<uint8_t> g, beta;
  Device<ChunkRecord> table;
  Device<float> a_log, dt_bias;
  Device<uint8_t> abar, pg;
  Device<float> vec, decay;
  Device<uint16_t> a_inv;
  CUtensorMap map_k{}, map_q{};
  intra::Args args{};
  explicit Run(const Problem& p)
      : kq(p.kq),
        g(p.g_raw),
        beta(p.beta_raw),
        table(p.table),
        a_log(p.a_log),
        dt_bias(p.dt_bias),
        abar(p.table.size() * p.heads_v * kTileBytes),
        pg(p.table.size() * p.heads_v * kTileBytes),
        vec(p.table.size() * p.heads_v * kVecFloats),
        decay(p.table.size() * p.heads_v),
        a_inv(size_t(p.total) * p.heads_v * 64) {
    const Case& c = p.c;
    const int64_t H = c.num_k_heads, HV = p.heads_v, rowk = 2 * H + 1, per_batch = p.total / c.batch;
    const int64_t stride_t = c.strided ? rowk * 128 : H * 128;
    TokenMapShape shape;
    shape.data = kq.get();
    shape.stride_h = 128;
    shape.stride_t = stride_t;
    shape.stride_b = per_batch * stride_t;
    shape.batch = c.batch;
    shape.tokens = per_batch;
    shape.heads = H;
    map_q = make_token_map(shape, !c.fp16, "q");
    shape.data = kq.get() + (c.strided ? (H + 1) * 128 : p.total * H * 128);
    map_k = make_token_map(shape, !c.fp16, "k");
    args.chunk_table = table.get();
    args.tokens = per_batch;
    args.slots = int32_t(p.table.size());
    args.varlen = !c.lens.empty();
    args.num_k_heads = int32_t(H);
    args.num_v_heads = int32_t(HV);
    args.group = c.group;
    args.parts = (c.group + 3) / 4;
    args.per = (c.group + args.parts - 1) / args.parts;
    args.flags = c.flags;
    args.scale = 0.08838834764f;
    const int64_t gs_t = c.strided ? 1 : HV, gs_h = c.strided ? p.total : 1;
    args.g = {g.get(), {per_batch * gs_t, gs_t, gs_h}, c.g_dtype};
    args.beta = {beta.get(), {per_batch * gs_t, gs_t, gs_h}, c.beta_dtype};
    args.a_log = {a_log.get(), {0, 0, 1}, QLA_FLOAT32};
    args.dt_bias = {dt_bias.get(), {0, 0, 1}, QLA_FLOAT32};
    args.abar = abar.get();
    args.pg = c.with_pg ? pg.get() : nullptr;
    args.vec = vec.get();
    args.vec_backward = c.backward;
    args.decay = c.ungated ? nullptr : decay.get();
    if (c.leaves) args.plan.sums = decay.get();
    args.a_inv = a_inv.get();
    const int64_t strides[4] = {per_batch * HV * 64, HV * 64, 64, 1};
    std::copy(strides, strides + 4, args.a_inv_stride);
  }
};

}  // namespace
