// The forward kernel alone, against the float64 token recurrence; Abar, Pg and gate vectors are made on the host. `test_forward
// bench` times it.
#include <thread>

#include "cuda/kernels/forward/launch.hpp"
#include "cuda/kernels/plan_segments/launch.hpp"
#include "cuda/tile/transition.cuh"
#include "forward_bench.hpp"
#include "forward_cases.hpp"
#include "forward_list.hpp"

using namespace fwdtest;
using qla::test::dtype_size;
using qla::test::get;
using qla::test::put;

#ifdef launch_forward
constexpr bool kTransitionsInFp32 = true;  // by the mma.sync policy, [V][K] as every end state: no kernel merges these yet
#else
constexpr bool kTransitionsInFp32 = false;  // tile/transition.cuh
#endif

static int g_failed = 0, g_passed = 0, g_sms = 132;

static void report(const std::string& name, bool ok, const char* detail) {
  (ok ? g_passed : g_failed)++;
  std::printf("%-44s %s%s\n", name.c_str(), detail, ok ? "" : "  FAILED");
  std::fflush(stdout);
}

// Where a token tensor lies: element offset of (token over B*T, head)
struct Place {
  int64_t sb, st, sh, offset, T;
  int64_t at(int64_t token, int h) const { return offset + token / T * sb + token % T * st + h * sh; }
};

struct Setup {
  Data d;
  std::vector<uint8_t> abar, pg;
  std::vector<float> vec;
};
static Setup prepare(const Data& d) {
  Setup s{d, std::vector<uint8_t>(num_slots(d) * d.Hv * kTileBytes, 0xff),
          std::vector<uint8_t>(num_slots(d) * d.Hv * kTileBytes, 0xff),
          std::vector<float>(num_slots(d) * d.Hv * kVecFloats, NAN)};
  for (int n = 0; n < d.N(); n++)
    for (int64_t c = 0; c * 64 < d.len[n]; c++)
      for (int h = 0; h < d.Hv; h++) {
        const int64_t i = slot_of(d, n, int(c)) * d.Hv + h;
        host_intra(d, d.bos[n] + c * 64, int(std::min<int64_t>(64, d.len[n] - c * 64)), h, &s.abar[i * kTileBytes],
                   &s.pg[i * kTileBytes], &s.vec[i * kVecFloats]);
      }
  return s;
}

// q and k as a caller gives them that asks for norms, and what the recurrence then runs on
static void normalise(Data& normed, Data& raw) {
  Rng r(4321);
  for (std::vector<double> Data::*x : {&Data::q, &Data::k})
    for (size_t at = 0; at < (raw.*x).size(); at += 128) {
      const double length = std::exp2(8 * r.uniform() - 4);
      double sum = 1e-6;
      for (size_t i = at; i < at + 128; i++) {
        (raw.*x)[i] = round16((raw.*x)[i] * length, raw.bf16);
        sum += (raw.*x)[i] * (raw.*x)[i];
      }
      for (size_t i = at; i < at + 128; i++) (normed.*x)[i] = (raw.*x)[i] / std::sqrt(sum);
    }
}

static std::vector<double> random_state(Rng& r) {
  std::vector<double> S(16384);
  for (auto& x : S) x = r.normal() * 0.3;
  return S;
}

// What a call that saves leaves for backward, of every chunk; slots without one stay as they were (0xff).
struct SavedErrors {
  Error abar, vec;
  int64_t wrong = 0;  // rows past the end that reach a gradient, slots of no chunk, sums
};
static SavedErrors check_saved(const Setup& s, const Data& raw, bool normalise, const std::vector<uint8_t>& abar,
                               const std::vector<float>& vec, const std::vector<float>& decay) {
  SavedErrors e;
  const Data& d = s.d;
  const auto norm = [&](const double* x) {
    double sum = 1e-6;
    for (int i = 0; i < 128; i++) sum += x[i] * x[i];
    return normalise ? 1 / std::sqrt(sum) : 1.;
  };
  std::vector<bool> used(num_slots(d));
  for (int n = 0; n < d.N(); n++)
    for (int64_t c = 0; c * 64 < d.len[n]; c++) {
      const int rows = int(std::min<int64_t>(64, d.len[n] - c * 64));
      used[slot_of(d, n, int(c))] = true;
      for (int h = 0; h < d.Hv; h++) {
        const int64_t at = slot_of(d, n, int(c)) * d.Hv + h, token = d.bos[n] + c * 64;
        const float *got = &vec[at * kVecFloats], *want = &s.vec[at * kVecFloats];
        for (int i = 0; i < kTileBytes; i += 2) {
          uint16_t x, y;
          std::memcpy(&x, &abar[at * kTileBytes + i], 2);
          std::memcpy(&y, &s.abar[at * kTileBytes + i], 2);
          e.abar.add(from_bits(x, d.bf16), from_bits(y, d.bf16));
        }
        for (int i = 0; i < 64; i++) {
          e.vec.add(got[kVecGamma + i], want[kVecGamma + i]);
          e.vec.add(std::exp2(got[kVecG + i]), want[kVecGamma + i]);
          e.wrong += decay[at] != 0;
          if (i >= rows) {
            e.wrong += got[kVecBeta + i] != 0 || got[kVecE + i] != 0 || !std::isfinite(got[kVecRk + i]);
            continue;
          }
          const double rk = norm(raw.krow(token + i, h / d.group())), rq = norm(raw.qrow(token + i, h / d.group()));
          e.vec.add(got[kVecBeta + i], d.beta[(token + i) * d.Hv + h]);
          e.vec.add(got[kVecK + i] / rk, want[kVecK + i]);
          e.vec.add(got[kVecQ + i] / rq / d.scale, want[kVecQ + i] / d.scale);
          e.vec.add(got[kVecE + i] / rk, want[kVecE + i]);
          e.vec.add(got[kVecRk + i] / rk, 1);
          e.vec.add(got[kVecRq + i] / rq, 1);
        }
      }
    }
  for (size_t i = 0; i < abar.size(); i++) e.wrong += !used[i / kTileBytes / d.Hv] && abar[i] != 0xff;
  for (size_t i = 0; i < vec.size(); i++) e.wrong += !used[i / kVecFloats / d.Hv] && !std::isnan(vec[i]);
  return e;
}

static void run(const Case& c) {
  Data normed = make_data(c.B, c.T, c.lens, c.Hk, c.Hv, c.bf16, c.gate, 1234), raw = normed;
  if (c.normalise) normalise(normed, raw);
  if (c.gate_type == QLA_BFLOAT16 || c.gate_type == QLA_FLOAT16)
    for (std::vector<double>* x : {&normed.g, &normed.beta})
      for (double& e : *x) e = round16(e, c.gate_type == QLA_BFLOAT16);
  const Setup s = prepare(normed);
  const Data& d = s.d;
  const int N = d.N();
  const int64_t rows = c.B * c.T;
  // token tensors; everything not owned by a sequence is NaN
  const uint16_t nan16 = to_bits(NAN, c.bf16);
  Place pq, pk, pv, po;
  std::vector<uint16_t> in, out;
  if (c.strided) {
    const int64_t st = (2 * c.Hk + c.Hv) * 128 + 64, sb = c.T * st + 5 * st;
    in.assign(c.B * sb, nan16);
    pq = {sb, st, 128, 0, c.T};
    pk = {sb, st, 128, c.Hk * 128, c.T};
    pv = {sb, st, 128, 2 * c.Hk * 128, c.T};
    const int64_t os = c.Hv * 128 + 64;
    po = {c.T * os + 3 * os, os, 128, 8, c.T};
    out.assign(c.B * (c.T + 3) * os + 8, nan16);
  } else {
    const int64_t a = rows * c.Hk * 128;
    in.assign(2 * a + rows * c.Hv * 128, nan16);
    pq = {c.T * c.Hk * 128, c.Hk * 128, 128, 0, c.T};
    pk = pq;
    pk.offset = a;
    pv = {c.T * c.Hv * 128, c.Hv * 128, 128, 2 * a, c.T};
    po = pv;
    po.offset = 0;
    out.assign(rows * c.Hv * 128, nan16);
  }
  for (int64_t t = 0; t < d.end_token; t++) {
    for (int h = 0; h < c.Hk; h++)
      for (int e = 0; e < 128; e++) {
        in[pq.at(t, h) + e] = to_bits(raw.qrow(t, h)[e], c.bf16);
        in[pk.at(t, h) + e] = to_bits(raw.krow(t, h)[e], c.bf16);
      }
    for (int h = 0; h < c.Hv; h++)
      for (int e = 0; e < 128; e++) in[pv.at(t, h) + e] = to_bits(d.vrow(t, h)[e], c.bf16);
  }
  // states: [row][Hv][..], NaN between
  const int sdt = c.h0_dtype < 0 ? QLA_FLOAT32 : c.h0_dtype;
  const int64_t srows = c.pool ? N + 3 : N, sh = 16384 + 32, sn = c.Hv * sh;
  const int64_t sk = c.v_first ? 1 : 128, sv = c.v_first ? 128 : 1;
  std::vector<uint8_t> h0(srows * sn * dtype_size(sdt)), ht(srows * sn * dtype_size(sdt));
  for (int64_t i = 0; i < srows * sn; i++) {
    put(h0, i, sdt, NAN);
    put(ht, i, sdt, NAN);
  }
  Rng r(99);
  std::vector<int64_t> index(N);
  for (int n = 0; n < N; n++) index[n] = c.pool ? (n == 1 ? -1 : N + 2 - n) : n;
  std::vector<uint8_t> has(N);
  std::vector<std::vector<double>> S(N * c.Hv, std::vector<double>(16384, 0.0));
  for (int n = 0; n < N; n++) {
    has[n] = n % 2 == 0;
    if (index[n] < 0) continue;
    for (int h = 0; h < c.Hv; h++) {
      std::vector<double> x = random_state(r);
      for (int k = 0; k < 128; k++)
        for (int v = 0; v < 128; v++) {
          const size_t i = index[n] * sn + h * sh + k * sk + v * sv;
          put(h0, i, sdt, x[k * 128 + v]);
          if (c.h0_dtype >= 0 && (!c.has_initial || has[n])) S[n * c.Hv + h][k * 128 + v] = get(h0, i, sdt);
        }
    }
  }
  // reference
  std::vector<std::vector<double>> o(N * c.Hv);
  std::vector<std::vector<std::vector<double>>> starts(N * c.Hv);
  {
    std::vector<std::thread> pool;
    for (int w = 0; w < 8; w++)
      pool.emplace_back([&, w] {
        for (int i = w; i < N * c.Hv; i += 8)
          if (index[i / c.Hv] >= 0) recurrence(d, d.bos[i / c.Hv], d.len[i / c.Hv], i % c.Hv, S[i], &o[i], &starts[i]);
      });
    for (auto& t : pool) t.join();
  }
  // work items
  std::vector<WorkItem> items;
  std::vector<float> merged;
  std::vector<int32_t> chunk_base(N), cp_base(N);
  int32_t chunks_before = 0, cps = 0;
  for (int n = 0; n < N; n++) {
    chunk_base[n] = chunks_before;
    cp_base[n] = cps;
    chunks_before += int32_t((d.len[n] + 63) / 64);
    if (c.checkpoint) cps += int32_t(d.len[n] / (64 * c.checkpoint));
  }
  for (int n = 0; n < N; n++) {
    const int total = int((d.len[n] + 63) / 64), segs = std::max(1, std::min(c.segments, total));
    for (int h = 0; h < c.Hv; h++)
      for (int g = 0; g < segs; g++)
        for (int part = 0; part < c.v_parts; part++) {
          const int a = total * g / segs, b = total * (g + 1) / segs, w = g && !(c.mixed && h % 2) ? std::min(c.warmup, a) : 0;
          WorkItem it{};
          it.token = d.bos[n] + (a - w) * 64;
          it.slot = int32_t(slot_of(d, n, a - w));
          it.chunks = b - a + w;
          it.warmup = w;
          it.last_rows = int32_t(b == total && d.len[n] % 64 ? d.len[n] % 64 : 64);
          it.sequence = n;
          it.v_head = h;
          it.v_part = part;
          it.start = g == 0 ? QLA_START_INITIAL : w ? QLA_START_WARMUP : QLA_START_MERGED;
          it.is_last = b == total;
          it.segment = g;
          it.first_chunk = a - w;
          it.chunk_base = chunk_base[n];
          it.checkpoint_base = cp_base[n];
          if (it.start == QLA_START_MERGED) {
            it.start_index = int32_t(merged.size() / 16384);
            if (part == 0)
              for (int v = 0; v < 128; v++)
                for (int k = 0; k < 128; k++) merged.push_back(index[n] < 0 ? NAN : float(starts[n * c.Hv + h][a][k * 128 + v]));
            else
              it.start_index--;
          }
          items.push_back(it);
        }
  }
  PlanHeader header{};
  header.num_items = int32_t(items.size());
  header.valid_tokens = 1;
  header.end_token = d.end_token;
  ForwardParams p;
  p.dtype = c.bf16 ? QLA_BFLOAT16 : QLA_FLOAT16;
  p.batch = c.B;
  p.tokens = c.T;
  p.num_k_heads = c.Hk;
  p.num_v_heads = c.Hv;
  uint16_t *din = upload(in), *dout = upload(out);
  auto view = [](uint16_t* b, const Place& x) { return TokenView{b + x.offset, x.sb, x.st, x.sh}; };
  p.q = view(din, pq);
  p.k = view(din, pk);
  p.v = view(din, pv);
  p.o = view(dout, po);
  p.plan = upload(std::vector<PlanHeader>{header});
  std::vector<WorkItem> room = items;  // more CTAs than items: what lies behind the items is nobody's to use
  room.resize(items.size() + 7);
  std::memset(static_cast<void*>(room.data() + items.size()), 0xff, 7 * sizeof(WorkItem));
  p.items = upload(room);
  p.max_items = int32_t(room.size());
  p.v_parts = c.v_parts;
  p.rehearse = c.T % 128 != 0;  // some of both
  p.abar = upload(s.abar);
  p.pg = upload(s.pg);
  p.vec = upload(s.vec);
  p.merged = upload(merged);
  uint8_t *dh0 = upload(h0), *dht = upload(ht);
  if (c.h0_dtype >= 0) p.initial_state = {dh0, sdt, sn, sh, sk, sv}, p.num_states = srows;
  p.final_state = {c.pool ? dh0 : dht, sdt, sn, sh, sk, sv};
  if (c.pool) {
    p.state_indices = upload(index);
    p.state_indices_dtype = QLA_INT64;
  }
  if (c.has_initial) p.has_initial_state = upload(has);
  const int hdt = c.bf16 ? QLA_BFLOAT16 : QLA_FLOAT16;
  std::vector<uint8_t> hb(size_t(chunks_before) * c.Hv * 16384 * 2, 0xff), cb(size_t(cps) * c.Hv * 16384 * 4, 0xff);
  uint8_t *dh = upload(hb), *dc = upload(cb);
  if (c.snapshots) p.h = {dh, hdt, int64_t(c.Hv) * 16384, 16384, sk, sv};
  if (c.checkpoint) {
    p.checkpoints = {dc, QLA_FLOAT32, int64_t(c.Hv) * 16384, 16384, sk, sv};
    p.checkpoint_every_chunks = c.checkpoint;
  }
  float* decay = nullptr;
  if (c.fused) {
    const int64_t slots = num_slots(d);
    const int64_t gate_t = c.heads_first ? 1 : c.Hv, gate_h = c.heads_first ? c.T : 1;
    std::vector<uint8_t> g(rows * c.Hv * dtype_size(c.gate_type)), beta(g.size());
    for (int64_t t = 0; t < rows; t++)
      for (int h = 0; h < c.Hv; h++) {
        const size_t at = t / c.T * c.T * c.Hv + t % c.T * gate_t + h * gate_h;
        put(g, at, c.gate_type, t < d.end_token ? d.g[t * c.Hv + h] : NAN);
        put(beta, at, c.gate_type, t < d.end_token ? d.beta[t * c.Hv + h] : NAN);
      }
    std::vector<int64_t> boundaries = d.bos;
    boundaries.push_back(d.end_token);
    segments::Args plan{};
    if (!c.lens.empty()) plan.cu_seqlens = upload(boundaries);
    plan.index_dtype = QLA_INT64;
    plan.num_seqs = N;
    plan.tokens = c.T;
    plan.slots = int32_t(slots);
    plan.num_v_heads = c.Hv;
    plan.v_parts = 1;
    plan.header = upload(std::vector<PlanHeader>{header});
    plan.chunk_table = upload(std::vector<ChunkRecord>(slots));
    gates::Args a{};
    a.tokens = c.T;
    a.varlen = !c.lens.empty();
    a.num_v_heads = c.Hv;
    a.scale = float(d.scale);
    a.g = {upload(g), {c.T * c.Hv, gate_t, gate_h}, c.gate_type};
    a.beta = {upload(beta), {c.T * c.Hv, gate_t, gate_h}, c.gate_type};
    a.vec = upload(std::vector<float>(slots * c.Hv * (c.saves ? kVecFloats : kFusedVecFloats), NAN));
    if (c.saves) {
      a.saves = 1;
      a.flags = c.normalise ? QLA_FLAG_QK_L2NORM : 0;
      a.decay = decay = upload(std::vector<float>(slots * c.Hv, NAN));
      p.saved_abar = upload(std::vector<uint8_t>(slots * c.Hv * kTileBytes, 0xff));
      p.saved_vec = a.vec;
    }
    plan.has_initial = c.h0_dtype >= 0;
    p.fused = true;
    p.normalise = c.normalise;
    p.cut = c.segments > 1;
    p.merging = !merged.empty();
    p.scale = float(d.scale);
    p.abar = p.pg = nullptr;
    p.vec = a.vec;
    if (c.direct) {
      p.plan = nullptr;
      p.items = nullptr;
      launch_forward_direct(p, plan, a, std::min(c.sms, g_sms), 0);
    } else {
      CUDA_OK(segments::launch_with_gates(plan, a, g_sms, 0));
    }
  }
  if (!c.direct) launch_forward(p, std::min(c.sms, g_sms), 0);
  cudaError_t err = cudaDeviceSynchronize();
  if (err) {
    std::printf("%-44s %s  FAILED\n", c.name.c_str(), cudaGetErrorString(err));
    std::exit(1);
  }
  // compare
  const std::vector<uint16_t> got = download(dout, out.size());
  std::vector<uint8_t> state = download(c.pool ? dh0 : dht, ht.size());
  std::vector<uint8_t> expected_written(out.size(), 0);
  Error eo, es, eh, ec;
  int64_t zeros_wrong = 0, touched = 0;
  for (int n = 0; n < N; n++)
    for (int h = 0; h < c.Hv; h++) {
      for (int64_t t = 0; t < d.len[n]; t++)
        for (int e = 0; e < 128; e++) {
          const int64_t i = po.at(d.bos[n] + t, h) + e;
          expected_written[i] = 1;
          if (index[n] < 0)
            zeros_wrong += got[i] != 0;
          else
            eo.add(from_bits(got[i], c.bf16), o[n * c.Hv + h][t * 128 + e]);
        }
      if (index[n] < 0) continue;
      for (int k = 0; k < 128; k++)
        for (int v = 0; v < 128; v++)
          es.add(get(state, index[n] * sn + h * sh + k * sk + v * sv, sdt), S[n * c.Hv + h][k * 128 + v]);
    }
  for (int64_t t = d.end_token; t < rows; t++)
    for (int h = 0; h < c.Hv; h++)
      for (int e = 0; e < 128; e++) {
        const int64_t i = po.at(t, h) + e;
        expected_written[i] = 1;
        zeros_wrong += got[i] != 0;
      }
  for (size_t i = 0; i < out.size(); i++) touched += !expected_written[i] && got[i] != nan16;
  if (c.snapshots) {
    hb = download(dh, hb.size());
    for (int n = 0; n < N; n++)
      for (int h = 0; h < c.Hv; h++)
        for (size_t j = 0; j < starts[n * c.Hv + h].size(); j++)
          for (int k = 0; k < 128; k++)
            for (int v = 0; v < 128; v++)
              eh.add(get(hb, (size_t(chunk_base[n] + j) * c.Hv + h) * 16384 + k * sk + v * sv, hdt),
                     starts[n * c.Hv + h][j][k * 128 + v]);
  }
  if (c.checkpoint) {
    cb = download(dc, cb.size());
    for (int n = 0; n < N; n++)
      for (int h = 0; h < c.Hv; h++)
        for (int j = 0; j < d.len[n] / (64 * c.checkpoint); j++) {
          const size_t at = size_t(j + 1) * c.checkpoint;
          const auto& want = at < starts[n * c.Hv + h].size() ? starts[n * c.Hv + h][at] : S[n * c.Hv + h];
          for (int k = 0; k < 128; k++)
            for (int v = 0; v < 128; v++)
              ec.add(get(cb, (size_t(cp_base[n] + j) * c.Hv + h) * 16384 + k * sk + v * sv, QLA_FLOAT32), want[k * 128 + v]);
        }
  }
  SavedErrors saved;
  if (c.saves) {
    const size_t records = num_slots(d) * c.Hv;
    saved = check_saved(s, raw, c.normalise, download(p.saved_abar, records * kTileBytes),
                        download(p.saved_vec, records * kVecFloats), download(decay, records));
  }
  const double limit = c.bf16 ? 6e-3 : 1e-3, slimit = sdt == QLA_BFLOAT16 ? 6e-3 : limit;
  const bool ok = eo.rel() < limit && es.rel() < slimit && eh.rel() < limit && ec.rel() < limit && !zeros_wrong && !touched &&
                  saved.abar.rel() < limit && saved.vec.rel() < 1e-5 && !saved.wrong;
  char line[256];
  std::snprintf(line, sizeof line, "o %.2e  state %.2e  h %.2e  checkpoints %.2e  saved %.2e, %.2e  not zero %lld  touched %lld",
                eo.rel(), es.rel(), eh.rel(), ec.rel(), saved.abar.rel(), saved.vec.rel(), (long long)(zeros_wrong + saved.wrong),
                (long long)touched);
  report(c.name, ok, line);
  for (const void* x : {(const void*)din, (const void*)dout, (const void*)p.plan, (const void*)p.items, (const void*)p.abar,
                        (const void*)p.pg, (const void*)p.vec, (const void*)p.merged, (const void*)p.saved_abar,
                        (const void*)decay, (const void*)dh0, (const void*)dht, (const void*)dh, (const void*)dc})
    cudaFree(const_cast<void*>(x));
}

// Without output: S_ext from zero and M from the identity; M S0 + S_ext is the end state from S0 (C1), (C2)
static void run_prepass(int v_parts, bool bf16) {
  const Setup s = prepare(make_data(1, 300, {300}, 1, 2, bf16, 1.0 / 16, 77));
  const Data& d = s.d;
  std::vector<uint16_t> k(d.k.size()), v(d.v.size());
  for (size_t i = 0; i < k.size(); i++) k[i] = to_bits(d.k[i], bf16);
  for (size_t i = 0; i < v.size(); i++) v[i] = to_bits(d.v[i], bf16);
  std::vector<WorkItem> items;
  for (int h = 0; h < 2; h++)
    for (int m = 0; m < 2; m++)
      for (int part = 0; part < v_parts; part++) {
        WorkItem it{};
        it.chunks = 5;
        it.last_rows = 300 - 256;
        it.v_head = h;
        it.v_part = part;
        it.start = m ? kStartIdentity : QLA_START_ZERO;
        it.start_index = 2 * h + m;
        items.push_back(it);
      }
  PlanHeader header{};
  header.num_items = int32_t(items.size());
  header.end_token = 300;
  ForwardParams p;
  p.dtype = bf16 ? QLA_BFLOAT16 : QLA_FLOAT16;
  p.batch = 1;
  p.tokens = 300;
  p.num_k_heads = 1;
  p.num_v_heads = 2;
  p.output = false;
  p.v_parts = v_parts;
  p.k = {upload(k), 300 * 128, 128, 128};
  p.v = {upload(v), 300 * 256, 256, 128};
  p.plan = upload(std::vector<PlanHeader>{header});
  p.items = upload(items);
  p.max_items = int32_t(items.size());
  p.abar = upload(s.abar);
  p.vec = upload(s.vec);
  p.end_states = upload(std::vector<float>(4 * 16384, NAN));
  launch_forward(p, 132, 0);
  CUDA_OK(cudaDeviceSynchronize());
  const std::vector<float> e = download(p.end_states, 4 * 16384);
  const auto move = [&](int h, int from, int to) {
    const float* const m = e.data() + size_t(2 * h + 1) * kStateFloats;
    if (kTransitionsInFp32) return double(m[from * 128 + to]);
    const uint8_t* const at = reinterpret_cast<const uint8_t*>(m) + transition::offset(from, to);  // hi + lo
    __nv_bfloat16 hi, lo;
    std::memcpy(&hi, at, 2);
    std::memcpy(&lo, at + transition::kLowBytes, 2);
    return double(float(hi)) + double(float(lo));
  };
  Rng r(5);
  Error es;
  for (int h = 0; h < 2; h++) {
    std::vector<double> S = random_state(r), S0 = S;
    recurrence(d, 0, 300, h, S, nullptr);
    // S_ext is [V][K]: S_ext(k, v) = x[v * 128 + k]; M(i, j) = column j of the state started from e_j, B[j][i] there
    for (int i = 0; i < 128; i++)
      for (int j = 0; j < 128; j++) {
        double x = e[(2 * h) * 16384 + j * 128 + i];
        for (int m = 0; m < 128; m++) x += move(h, m, i) * S0[m * 128 + j];
        es.add(x, S[i * 128 + j]);
      }
  }
  char line[64];
  std::snprintf(line, sizeof line, "M S0 + S_ext %.2e", es.rel());
  report(std::string("end states, parts ") + std::to_string(v_parts) + (bf16 ? " bf16" : " fp16"),
         es.rel() < (bf16 ? 6e-3 : 1e-3), line);
}

int main(int argc, char** argv) {
  cudaDeviceProp prop;
  CUDA_OK(cudaGetDeviceProperties(&prop, 0));
  g_sms = prop.multiProcessorCount;
  prepare_forward();
  if (argc > 1 && !std::strcmp(argv[1], "bench")) return fwdtest::bench(argc > 2 ? argv[2] : "");
  const std::vector<Case> cases = forward_list();
  const std::string filter = argc > 1 ? argv[1] : "", without = argc > 2 ? argv[2] : "";  // parts of a name; for sanitizers
  for (const Case& c : cases) {
    if (!filter.empty() && c.name.find(filter) == std::string::npos) continue;
    if (without.empty() || c.name.find(without) == std::string::npos) run(c);
  }
  for (int parts : filter.empty() ? std::vector<int>{1, 2} : std::vector<int>{})
    for (bool bf16 : {true, false}) run_prepass(parts, bf16);
  std::printf("%d passed, %d failed\n", g_passed, g_failed);
  return g_failed != 0;
}
