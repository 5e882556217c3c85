// Kernels of the backward, each alone on small packed problems, against the float64 adjoint of the token recurrence.
//   usage: test_backward [filter]     exit status 0: every case within its limit
#include "backward_harness.hpp"

namespace {

template <typename T>
void test_chunk_grads(const Case& c) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr int kType = kBf16 ? QLA_BFLOAT16 : QLA_FLOAT16;
  constexpr double kLimit = kBf16 ? 1e-2 : 2e-3;
  const Problem p = make_problem(c, round_to<T>, 1);
  const Truth truth = solve(p);
  const auto chunks = chunk_table(p);
  Buffer<cuda::ChunkRecord> d_chunks(chunks);
  Buffer<float> vec(gate_vectors(p, chunks));
  Buffer<T> q(cast<T>(p.q)), k(cast<T>(p.k)), d_o(cast<T>(p.d_o)), dv(cast<T>(truth.dv));
  Buffer<T> state(state_tiles<T>(p, truth.state)), d_state(state_tiles<T>(p, truth.d_state)),
      delta(token_tiles<T>(p, chunks, truth.delta));
  Buffer<T> dq(p.q.size()), dk16(p.k.size());
  Buffer<float> dk32(p.k.size()), dg(p.g.size()), dbeta(p.g.size()), partials(chunks.size() * c.hv * 2), g(cast<float>(p.g)),
      beta(cast<float>(p.beta)), a_log(cast<float>(p.a_log)), dt_bias(cast<float>(p.dt_bias));
  const bool wide = c.junk & 1;  // dk in float32 in some cases
  cg::Params a{};
  a.chunks = d_chunks.data;
  a.vec = vec.data;
  a.state = reinterpret_cast<uint8_t*>(state.data);
  a.d_state = reinterpret_cast<uint8_t*>(d_state.data);
  a.delta = reinterpret_cast<uint8_t*>(delta.data);
  a.num_slots = int(chunks.size());
  a.num_k_heads = c.hk;
  a.group = c.hv / c.hk;
  a.rows_per_batch = a.tokens = p.tokens;
  a.qk_norm = c.qk_norm;
  a.scale = c.scale;
  a.dq = view<T>(dq, kType, c.hk, kDim, p.tokens);
  a.dk = wide ? view<T>(dk32, QLA_FLOAT32, c.hk, kDim, p.tokens) : view<T>(dk16, kType, c.hk, kDim, p.tokens);
  a.dg = view<T>(dg, QLA_FLOAT32, c.hv, 1, p.tokens);
  a.dbeta = view<T>(dbeta, QLA_FLOAT32, c.hv, 1, p.tokens);
  if (wide) a.dq.bulk = 0;  // .. and dq by ordinary stores
  a.beta_max = c.neg_eigval ? 2 : 1;
  const cg::InputView scalar{nullptr, QLA_FLOAT32, int64_t(p.tokens) * c.hv, c.hv, 1};
  if (c.raw_gate) {
    a.raw_gate = scalar;
    a.raw_gate.data = g.data;
    a.a_log = scalar;
    a.a_log.data = a_log.data;
    a.dt_bias = scalar;
    a.dt_bias.data = dt_bias.data;
    a.gate_partials = partials.data;
  }
  if (c.logits) {
    a.beta_logits = scalar;
    a.beta_logits.data = beta.data;
  }
  CK(cg::launch(token_map(k.data, kBf16, c.hk, p.tokens), token_map(q.data, kBf16, c.hk, p.tokens),
                token_map(d_o.data, kBf16, c.hv, p.tokens), token_map(dv.data, kBf16, c.hv, p.tokens),
                token_map(dq.data, kBf16, c.hk, p.tokens), token_map(dk16.data, kBf16, c.hk, p.tokens), a, kType, c.ctas,
                nullptr));
  CK(cudaDeviceSynchronize());
  auto valid = [&](std::vector<double> x) {
    x.resize(x.size() / p.tokens * (p.tokens - c.junk));
    return x;
  };
  const std::string name = c.name + (kBf16 ? " bf16" : " fp16");
  compare(name, "dq", valid(widen(dq.pull())), valid(truth.dq), kLimit);
  compare(name, "dk", valid(widen(wide ? std::vector<float>(dk32.pull()) : cast<float>(widen(dk16.pull())))), valid(truth.dk),
          kLimit);
  compare(name, "dg", valid(widen(dg.pull())), valid(truth.dg), kLimit);
  compare(name, "dbeta", valid(widen(dbeta.pull())), valid(truth.dbeta), kLimit);
  if (c.raw_gate) {
    const auto part = partials.pull();
    std::vector<double> da(c.hv, 0), db(c.hv, 0);
    for (size_t s = 0; s < chunks.size(); s++)
      for (int h = 0; h < c.hv && chunks[s].rows; h++) {
        da[h] += part[(s * c.hv + h) * 2];
        db[h] += part[(s * c.hv + h) * 2 + 1];
      }
    compare(name, "dA_log", da, truth.da_log, kLimit);
    compare(name, "ddt_bias", db, truth.ddt_bias, kLimit);
  }
  if (!c.h0) {
    const auto x = dg.pull();
    for (int n = 0; n < int(c.lens.size()); n++)
      for (int h = 0; h < c.hv && c.lens[n]; h++)
        if (x[p.s_at(p.bos[n], h)] != 0) {
          failures++;
          std::printf("WRONG %s: dg of the first token is %g\n", name.c_str(), x[p.s_at(p.bos[n], h)]);
        }
  }
}

// boundary_chunks > 0: in ranges of that many slots, from the last to the first, states at their starts from a pass that stores
// nothing else
template <typename T>
void test_passes(const Case& c, int range_slots = 0) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr int kType = kBf16 ? QLA_BFLOAT16 : QLA_FLOAT16;
  constexpr double kLimit = kBf16 ? 1e-2 : 2e-3;
  const Problem p = make_problem(c, round_to<T>, 1);
  const Truth truth = solve(p);
  const auto chunks = chunk_table(p);
  const int slots = int(chunks.size());
  std::vector<T> tiles_of_abar;
  abar_tiles(p, chunks, tiles_of_abar);
  const size_t n_states = c.lens.size() * c.hv * kDim * kDim;
  Buffer<float> vec(gate_vectors(p, chunks)), h0(cast<float>(p.h0)), dht(cast<float>(p.dht)), dh0(n_states),
      boundary(size_t(slots + 1) * c.hv * kDim * kDim), carry(size_t(2) * c.hv * kDim * kDim);
  Buffer<T> q(cast<T>(p.q)), k(cast<T>(p.k)), v(cast<T>(p.v)), d_o(cast<T>(p.d_o)), abar(tiles_of_abar), dv(p.v.size());
  Buffer<T> state(truth.state.size()), d_state(state.count), delta(size_t(slots) * c.hv * 8192);
  bp::Params a{};
  a.num_items = int(c.lens.size()) * c.hv;
  a.num_k_heads = c.hk;
  a.num_v_heads = c.hv;
  a.rows_per_batch = p.tokens;
  a.abar = reinterpret_cast<uint8_t*>(abar.data);
  a.scale = c.scale;
  a.vec = vec.data;
  a.dv = dv.data;
  a.dv_stride_b = int64_t(p.tokens) * c.hv * kDim;
  a.dv_stride_t = c.hv * kDim;
  a.dv_stride_h = kDim;
  const bp::StateView view{nullptr, QLA_FLOAT32, c.hv * kDim * kDim, kDim * kDim, kDim, 1};
  a.h0 = a.dht = a.dh0 = view;
  a.h0.data = h0.data;
  a.dht.data = dht.data;
  a.dh0.data = dh0.data;
  a.boundary = boundary.data;
  const int range = range_slots ? range_slots : slots;
  a.boundary_slots = range;
  std::vector<cuda::WorkItem> items;
  for (int n = 0; n < int(c.lens.size()); n++)
    for (int h = 0; h < c.hv; h++) {
      cuda::WorkItem it{};
      it.token = p.bos[n];
      it.slot = slot_of(p, n, 0);
      it.chunks = (c.lens[n] + kRows - 1) / kRows;
      it.sequence = n;
      it.v_head = h;
      it.is_last = 1;
      it.last_rows = c.lens[n] - (it.chunks - 1) * kRows;
      it.start = c.h0 ? QLA_START_INITIAL : QLA_START_ZERO;
      items.push_back(it);
    }
  Buffer<cuda::WorkItem> d_items(items);
  a.items = d_items.data;
  if (!c.dht) a.dht.data = nullptr;
  auto run = [&](int first, int last, int kinds, int parity) {  // slots first .. last - 1
    bp::Params b = a;
    b.kinds = kinds;
    b.first_slot = first;
    b.end_slot = last;
    const int64_t half = int64_t(c.hv) * kDim * kDim;
    b.carry_in = carry.data + parity * half;
    b.carry_out = carry.data + (1 - parity) * half;
    // snapshots of this range where the truth has them
    b.state = reinterpret_cast<uint8_t*>(state.data) + int64_t(first) * c.hv * cuda::kSnapshotBytes;
    b.d_state = reinterpret_cast<uint8_t*>(d_state.data) + int64_t(first) * c.hv * cuda::kSnapshotBytes;
    b.delta = reinterpret_cast<uint8_t*>(delta.data) + int64_t(first) * c.hv * cuda::kDeltaBytes;
    CK(bp::launch(token_map(k.data, kBf16, c.hk, p.tokens), token_map(q.data, kBf16, c.hk, p.tokens),
                  token_map(v.data, kBf16, c.hv, p.tokens), token_map(d_o.data, kBf16, c.hv, p.tokens),
                  token_map(dv.data, kBf16, c.hv, p.tokens), b, kType, nullptr));
    CK(cudaDeviceSynchronize());
  };
  if (range_slots) run(0, slots, bp::kStateOnly, 0);
  int parity = 0;
  for (int first = (slots - 1) / range * range; first >= 0; first -= range, parity ^= 1)
    run(first, std::min(slots, first + range), bp::kBoth, parity);
  const std::string name = c.name + (range_slots ? " ranges" : "") + (kBf16 ? " bf16" : " fp16");
  // tiles of slots in use against the truth
  auto tiles = [&](const std::vector<T>& got, const std::vector<double>& want) {
    std::vector<double> g, w;
    for (int s = 0; s < slots; s++)
      for (int h = 0; h < c.hv && chunks[s].rows; h++)
        for (int f = 0; f < kDim; f++)
          for (int vv = 0; vv < kDim; vv++) {
            g.push_back(double(
                float(got[(int64_t(s) * c.hv + h) * kDim * kDim + vv / 64 * 8192 + cuda::panel_address(vv % 64, f, kRows) / 2])));
            w.push_back(want[((int64_t(s) * c.hv + h) * kDim + f) * kDim + vv]);
          }
    return std::pair(g, w);
  };
  const auto [s_got, s_want] = tiles(state.pull(), truth.state);
  const auto [d_got, d_want] = tiles(d_state.pull(), truth.d_state);
  compare(name, "S", s_got, s_want, kLimit);
  compare(name, "dS+", d_got, d_want, kLimit);
  std::vector<double> e_got, e_want;
  const auto delta_tiles = delta.pull();
  for (int s = 0; s < slots; s++)
    for (int h = 0; h < c.hv && chunks[s].rows; h++)
      for (int i = 0; i < kRows; i++)
        for (int vv = 0; vv < kDim; vv++) {
          e_got.push_back(double(float(delta_tiles[(int64_t(s) * c.hv + h) * 8192 + cuda::panel_address(i, vv, kRows) / 2])));
          e_want.push_back(i < chunks[s].rows ? truth.delta[p.v_at(int(chunks[s].token) + i, h) + vv] : 0);
        }
  compare(name, "Delta", e_got, e_want, kLimit);
  auto valid = [&](std::vector<double> x) {
    x.resize(x.size() / p.tokens * (p.tokens - c.junk));
    return x;
  };
  const auto dv_all = widen(dv.pull());
  compare(name, "dv", valid(dv_all), valid(truth.dv), kLimit);
  for (size_t i = p.v.size() / p.tokens * (p.tokens - c.junk); i < dv_all.size(); i++)
    if (dv_all[i] == dv_all[i]) {
      failures++;
      std::printf("WRONG %s: dv past the last sequence was written\n", name.c_str());
      break;
    }
  compare(name, "dh0", widen(dh0.pull()), truth.dh0, kLimit);
}

// time of one long sequence with random tiles
void time_passes(int hk, int hv, int tokens) {
  using T = __nv_bfloat16;
  const int slots = tokens / 64 + 1;
  std::vector<T> noise(size_t(1) << 22);
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (auto& x : noise) x = T(normal(rng) * 0.05f);
  auto fill = [&](Buffer<T>& b) {
    for (size_t at = 0; at < b.count; at += noise.size())
      CK(cudaMemcpy(b.data + at, noise.data(), std::min(noise.size(), b.count - at) * 2, cudaMemcpyHostToDevice));
  };
  Buffer<T> q(size_t(tokens) * hk * 128), k(q.count), v(size_t(tokens) * hv * 128), d_o(v.count), dv(v.count),
      state(size_t(slots) * hv * 16384), d_state(state.count), delta(size_t(slots) * hv * 8192),
      abar(size_t(slots) * hv * cuda::kTileBytes / 2);
  for (auto* b : {&q, &k, &v, &d_o, &abar}) fill(*b);
  std::vector<float> one(size_t(slots) * hv * cuda::kVecFloats, 0.5f);
  Buffer<float> vec(one);
  std::vector<cuda::WorkItem> items(hv);
  for (int h = 0; h < hv; h++) {
    items[h].chunks = tokens / 64;
    items[h].last_rows = 64;
    items[h].v_head = h;
  }
  Buffer<cuda::WorkItem> d_items(items);
  bp::Params a{};
  a.num_items = hv;
  a.num_k_heads = hk;
  a.num_v_heads = hv;
  a.rows_per_batch = tokens;
  a.boundary_slots = slots;
  a.abar = reinterpret_cast<uint8_t*>(abar.data);
  a.scale = 0.088f;
  a.vec = vec.data;
  a.dv = dv.data;
  a.dv_stride_t = hv * 128;
  a.dv_stride_h = 128;
  a.items = d_items.data;
  a.end_slot = slots;
  a.state = reinterpret_cast<uint8_t*>(state.data);
  a.d_state = reinterpret_cast<uint8_t*>(d_state.data);
  a.delta = reinterpret_cast<uint8_t*>(delta.data);
  const CUtensorMap mk = token_map(k.data, true, hk, tokens), mq = token_map(q.data, true, hk, tokens),
                    mv = token_map(v.data, true, hv, tokens), mo = token_map(d_o.data, true, hv, tokens),
                    mdv = token_map(dv.data, true, hv, tokens);
  cudaEvent_t x, y;
  CK(cudaEventCreate(&x));
  CK(cudaEventCreate(&y));
  std::vector<float> ms;
  for (int i = 0; i < 25; i++) {
    CK(cudaEventRecord(x));
    CK(bp::launch(mk, mq, mv, mo, mdv, a, QLA_BFLOAT16, nullptr));
    CK(cudaEventRecord(y));
    CK(cudaEventSynchronize(y));
    float t;
    CK(cudaEventElapsedTime(&t, x, y));
    if (i > 4) ms.push_back(t);
  }
  std::sort(ms.begin(), ms.end());
  const double kib = 48. * hk / hv + 64 + 64 + 32 + 2 * 5 + 3, chunks = double(tokens) / 64 * hv;
  std::printf("passes (%d, %d) T=%d: median %.4f ms, best %.4f, %.2f TB/s\n", hk, hv, tokens, ms[ms.size() / 2], ms[0],
              kib * 1024 * chunks / ms[ms.size() / 2] / 1e9);
}

// time of one long sequence with random tiles
void time_chunk_grads(int hk, int hv, int tokens) {
  using T = __nv_bfloat16;
  Case c;
  const int slots = tokens / 64 + 1;
  std::vector<T> noise(size_t(1) << 22);
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (auto& x : noise) x = T(normal(rng) * 0.1f);
  auto fill = [&](Buffer<T>& b) {
    for (size_t at = 0; at < b.count; at += noise.size())
      CK(cudaMemcpy(b.data + at, noise.data(), std::min(noise.size(), b.count - at) * 2, cudaMemcpyHostToDevice));
  };
  Buffer<T> q(size_t(tokens) * hk * 128), k(q.count), d_o(size_t(tokens) * hv * 128), dv(d_o.count),
      state(size_t(slots) * hv * 16384), d_state(state.count), delta(size_t(slots) * hv * 8192), dq(q.count), dk(q.count);
  for (auto* b : {&q, &k, &d_o, &dv, &state, &d_state, &delta}) fill(*b);
  std::vector<cuda::ChunkRecord> chunks(slots);
  for (int i = 0; i < slots; i++) chunks[i] = {i * 64ll, i * 64 < tokens ? 64 : 0, 0};
  Buffer<cuda::ChunkRecord> d_chunks(chunks);
  std::vector<float> one(size_t(slots) * hv * cuda::kVecFloats);
  for (auto& x : one) x = std::abs(normal(rng)) * 0.1f;
  Buffer<float> vec(one), dg(size_t(tokens) * hv), dbeta(dg.count);
  cg::Params a{};
  a.chunks = d_chunks.data;
  a.vec = vec.data;
  a.state = reinterpret_cast<uint8_t*>(state.data);
  a.d_state = reinterpret_cast<uint8_t*>(d_state.data);
  a.delta = reinterpret_cast<uint8_t*>(delta.data);
  a.num_slots = slots;
  a.num_k_heads = hk;
  a.group = hv / hk;
  a.rows_per_batch = a.tokens = tokens;
  a.scale = 0.088f;
  a.dq = view<T>(dq, QLA_BFLOAT16, hk, kDim, tokens);
  a.dk = view<T>(dk, QLA_BFLOAT16, hk, kDim, tokens);
  a.dg = view<T>(dg, QLA_FLOAT32, hv, 1, tokens);
  a.dbeta = view<T>(dbeta, QLA_FLOAT32, hv, 1, tokens);
  const CUtensorMap mk = token_map(k.data, true, hk, tokens), mq = token_map(q.data, true, hk, tokens),
                    mo = token_map(d_o.data, true, hv, tokens), mv = token_map(dv.data, true, hv, tokens),
                    mdq = token_map(dq.data, true, hk, tokens), mdk = token_map(dk.data, true, hk, tokens);
  cudaEvent_t x, y;
  CK(cudaEventCreate(&x));
  CK(cudaEventCreate(&y));
  std::vector<float> ms;
  double spent = 0;  // sustained: 30 ms of launches before, 100 ms timed
  for (int i = 0; spent < 130; i++) {
    CK(cudaEventRecord(x));
    CK(cg::launch(mk, mq, mo, mv, mdq, mdk, a, QLA_BFLOAT16, 132, nullptr));
    CK(cudaEventRecord(y));
    CK(cudaEventSynchronize(y));
    float t;
    CK(cudaEventElapsedTime(&t, x, y));
    if (i > 4) spent += t;
    if (spent > 30) ms.push_back(t);
  }
  std::sort(ms.begin(), ms.end());
  const double kib = (64.0 + 0.0) * hk / hv + 114, items = double(tokens) / 64 * hv;
  std::printf("chunk_grads (%d, %d) T=%d: median %.4f ms, best %.4f, %.2f TB/s, %.2f us a chunk-head-SM\n", hk, hv, tokens,
              ms[ms.size() / 2], ms[0], kib * 1024 * items / ms[ms.size() / 2] / 1e9, ms[ms.size() / 2] * 132e3 / items);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  CK(cg::prepare());
  CK(bp::prepare());
  std::vector<Case> cases;
  cases.push_back({"two whole chunks", {128}});
  cases.push_back({"tails", {70, 1, 64, 0, 129, 63}});
  {
    Case c{"tails, NaN past the end", {70, 1, 64, 0, 129, 63}};
    c.junk = 37;
    c.hv = 6;
    cases.push_back(c);
  }
  {
    Case c{"no h0, no dht", {100, 64, 30}};
    c.h0 = c.dht = false;
    c.hk = c.hv = 2;
    cases.push_back(c);
  }
  {
    Case c{"norm", {100, 64}};
    c.qk_norm = true;
    cases.push_back(c);
  }
  {
    Case c{"zero rows", {100}};
    c.qk_norm = c.zero_rows = true;
    cases.push_back(c);
  }
  {
    Case c{"raw gate, logits", {130}};
    c.raw_gate = c.logits = c.neg_eigval = c.qk_norm = true;
    cases.push_back(c);
  }
  {
    Case c{"strong decay -12", {128}};
    c.g_low = c.g_high = -12;
    cases.push_back(c);
  }
  {
    Case c{"strong decay -40", {100}};
    c.g_low = c.g_high = -40;
    c.h0 = false;
    cases.push_back(c);
  }
  {
    Case c{"mixed decay", {200}};
    c.g_low = -20;
    c.g_high = 0;
    cases.push_back(c);
  }
  {
    Case c{"growth and decay", {130}};
    c.g_low = -2;
    c.g_high = 2;
    cases.push_back(c);
  }
  {
    Case c{"correlated keys", {128}};
    c.correlated = 0.03;
    c.beta_low = 0.9;
    cases.push_back(c);
  }
  {
    Case c{"beta 0", {70}};
    c.beta_low = c.beta_high = 0;
    cases.push_back(c);
  }
  for (const int group : {1, 2, 4}) {  // rings go round several times only where a CTA has many items
    Case c{"many items a CTA, group " + std::to_string(group), {64 * 6 + 10, 64 * 5, 1}};
    c.hk = 2;
    c.hv = 2 * group;
    c.ctas = 3;
    c.qk_norm = group != 2;
    cases.push_back(c);
  }
  for (const Case& c : cases) {
    if (c.name.find(filter) == std::string::npos) continue;
    test_passes<__nv_bfloat16>(c);
    if (c.name == "tails" || c.name == "norm" || c.name == "zero rows") test_passes<__half>(c);
    if (c.lens.size() > 2) test_passes<__nv_bfloat16>(c, 2);
    test_chunk_grads<__nv_bfloat16>(c);
    if (c.name == "tails" || c.name == "norm" || c.name == "zero rows") test_chunk_grads<__half>(c);
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (filter == "time" || filter == "time gradients") {  // timings are no part of the tests
    if (filter == "time") {
      time_passes(16, 32, 32768);
      time_passes(16, 32, 8192);
      time_passes(2, 4, 8192);
    }
    time_chunk_grads(16, 32, 32768);
    time_chunk_grads(16, 32, 8192);
    time_chunk_grads(16, 64, 8192);
    time_chunk_grads(8, 16, 32768);
    time_chunk_grads(8, 16, 8192);
    time_chunk_grads(2, 4, 8192);
  }
  std::printf("backward: %d passed %d failed\n", passes, failures);
  return failures != 0;
}
