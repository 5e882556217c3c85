// chunk_intra against float64, over input kinds, layouts, dtypes and lengths; with "time" as argument a table of times instead.
#include "device/chunk_intra_problem.cuh"

namespace {

double tile_value(const std::vector<uint8_t>& tiles, size_t index, int i, int j, bool fp16) {
  const int w = j / 16;
  if (w > i / 16) return 0;
  uint32_t off = uint32_t((i - 16 * w) * 32 + j % 16 * 2);
  off ^= (off >> 7 & 1) << 4;
  uint16_t b;
  std::memcpy(&b, &tiles[index * kTileBytes + panel_offset(w) + off], 2);
  return from_bits(b, !fp16);
}
// NaN and inf must meet their like
double difference(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || a == b ? 0 : std::isfinite(a - b) ? std::abs(a - b) : INFINITY;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void run(const Case& c, uint32_t seed) {
  const Problem p = make(c, seed);
  Run r(p);
  const int32_t dtype = c.fp16 ? QLA_FLOAT16 : QLA_BFLOAT16;
  if (c.ungated)
    cuda_ok(intra::launch_ungated(dtype, r.map_k, r.args, multiprocessors(), false, nullptr), "launch_ungated");
  else
    cuda_ok(intra::launch(dtype, r.map_k, r.map_q, r.args, multiprocessors(), false, nullptr), "launch");
  cuda_ok(cudaDeviceSynchronize(), c.name.c_str());
  const auto abar = r.abar.download(), pg = r.pg.download();
  const auto vec = r.vec.download(), decay = r.decay.download();
  const auto a_inv = r.a_inv.download();
  for (int i = 0; i < c.repeats; i++) {
    cuda_ok(cudaMemset(r.abar.get(), 0xff, abar.size()), "cudaMemset");
    cuda_ok(intra::launch(dtype, r.map_k, r.map_q, r.args, multiprocessors(), false, nullptr), "launch");
    cuda_ok(cudaDeviceSynchronize(), c.name.c_str());
    check(r.abar.download() == abar && r.pg.download() == pg && same_bits(r.decay.download(), decay),
          c.name + ": the same bits again");
  }
  const int H = c.num_k_heads, HV = p.heads_v;
  const double scale = r.args.scale;
  double worst_a = 0, worst_p = 0, worst_v = 0, worst_sum = 0, largest = 0, largest_p = 0;
  bool below_nan = true;
  for (size_t slot = 0; slot < p.table.size(); slot++) {
    const ChunkRecord rec = p.table[slot];
    if (rec.rows == 0) continue;
    for (int h = 0; h < HV; h++) {
      const int kh = h / c.group, n = rec.rows;
      auto k = [&](int i, int d) { return p.k[((rec.token + i) * H + kh) * 128 + d]; };
      auto q = [&](int i, int d) { return p.q[((rec.token + i) * H + kh) * 128 + d]; };
      double cs[64], b[64], rk[64], rq[64], run_sum = 0;
      for (int i = 0; i < 64; i++) {
        run_sum += i < n && !c.ungated ? p.g[(rec.token + i) * HV + h] : 0;
        cs[i] = run_sum;
        b[i] = i < n ? p.beta[(rec.token + i) * HV + h] : 0;
        rk[i] = rq[i] = 1;
        if (i < n && c.flags & QLA_FLAG_QK_L2NORM) {
          double sk = 1e-6, sq = 1e-6;
          for (int d = 0; d < 128; d++) sk += k(i, d) * k(i, d), sq += q(i, d) * q(i, d);
          rk[i] = 1 / std::sqrt(sk);
          rq[i] = 1 / std::sqrt(sq);
        }
      }
      std::vector<double> kk(4096, 0.0), qk(4096, 0.0), x(4096, 0.0), l(4096, 0.0);
      for (int i = 0; i < n; i++)
        for (int j = 0; j <= i; j++) {
          double s = 0, t = 0;
          for (int d = 0; d < 128; d++) s += k(i, d) * k(j, d), t += q(i, d) * k(j, d);
          kk[i * 64 + j] = s * rk[i] * rk[j];
          qk[i * 64 + j] = t * rq[i] * rk[j];
          l[i * 64 + j] = std::exp(cs[i] - cs[j]) * kk[i * 64 + j] * (c.ungated ? b[i] : b[j]);
        }
      for (int j = 0; j < 64; j++) {
        x[j * 64 + j] = 1;
        for (int i = j + 1; i < 64; i++) {
          double t = 0;
          for (int m = j; m < i; m++) t -= l[i * 64 + m] * x[m * 64 + j];
          x[i * 64 + j] = t;
        }
      }
      const size_t index = slot * HV + h;
      if (c.nan_gate_at >= 0 && rec.sequence == 0 && rec.token <= c.nan_gate_at && c.nan_gate_at < rec.token + n) {
        // rows before the NaN are untouched in the gates; from it on everything of the chunk that depends on it is NaN
        const int at = c.nan_gate_at - int(rec.token);
        for (int i = 0; i < 64; i++) below_nan &= std::isnan(vec[index * kVecFloats + kVecGamma + i]) == (i >= at);
        below_nan &= std::isnan(decay[index]);
        for (int i = 0; i < 64; i++) below_nan &= std::isnan(tile_value(abar, index, i, 0, c.fp16)) || i < at;
        continue;
      }
      double chunk_largest = 1;
      for (double v : x) chunk_largest = std::max(chunk_largest, std::abs(v));
      for (int i = 0; i < 64; i++)
        for (int j = 0; j < 64; j++) {
          if (c.ungated) {
            if (i >= n) continue;
            worst_a =
                std::max(worst_a, difference(x[i * 64 + j], from_bits(a_inv[((rec.token + i) * HV + h) * 64 + j], !c.fp16)) /
                                      chunk_largest);
            continue;
          }
          worst_a = std::max(worst_a, difference(x[i * 64 + j], tile_value(abar, index, i, j, c.fp16)) / chunk_largest);
          if (i != j) largest = std::max(largest, std::abs(x[i * 64 + j]));
          if (!c.with_pg) continue;
          const double y = i >= j ? scale * std::exp(cs[i] - cs[j]) * qk[i * 64 + j] * b[j] : 0;
          largest_p = std::max(largest_p, std::abs(y));
          worst_p = std::max(worst_p, difference(y, tile_value(pg, index, i, j, c.fp16)) / std::max(1.0, std::abs(y)));
        }
      if (c.ungated) continue;
      double sum = cs[63];  // (C4)
      for (int i = 0; i < n; i++) sum += std::log(std::max(1.0, b[i] * kk[i * 64 + i] - 1));
      worst_sum = std::max(worst_sum, difference(sum, decay[index]) / std::max(1.0, std::abs(sum)));
      const float* v = &vec[index * kVecFloats];
      for (int i = 0; i < n; i++) {
        auto relative = [&](double want, float got) {
          worst_v = std::max(worst_v, difference(want, got) / std::max(std::abs(want), 1e-2));
        };
        const double gamma = std::exp(cs[i]), tail = std::exp(cs[63] - cs[i]);
        relative(gamma, v[kVecGamma + i]);
        relative(gamma * rk[i], v[kVecK + i]);
        if (c.with_pg) relative(scale * gamma * rq[i], v[kVecQ + i]);
        relative(tail * b[i] * rk[i], v[kVecE + i]);
        if (!c.backward) continue;
        relative(cs[i], v[kVecG + i] * kLn2);
        relative(b[i], v[kVecBeta + i]);
        relative(rk[i], v[kVecRk + i]);
        if (c.with_pg) relative(rq[i], v[kVecRq + i]);
      }
      for (int i = n; i < 64; i++)
        worst_v = std::max(worst_v, difference(0, v[kVecE + i]) +
                                        difference(std::exp(cs[63]), v[kVecGamma + i]) / std::max(std::exp(cs[63]), 1e-30));
    }
  }
  char line[300];
  std::snprintf(line, sizeof line, "%-34s %s (%d,%d) Abar %.1e (largest %.3g)  Pg %.1e (%.2g)  vectors %.1e  sums %.1e",
                c.name.c_str(), c.fp16 ? "fp16" : "bf16", H, HV, worst_a, largest, worst_p, largest_p, worst_v, worst_sum);
  std::printf("%s\n", line);
  std::fflush(stdout);
  check(worst_a <= c.limit && worst_p <= 4e-3 &&
            worst_v <= (c.gate < -5                   ? 2e-3
                        : c.flags & QLA_FLAG_RAW_GATE ? 2e-4
                                                      : 2e-5),
        line);
  check(worst_sum <= 2e-4, c.name + ": sums of ghat");
  check(below_nan, c.name + ": NaN where the gate was NaN and behind it");
  check(r.abar.guards_intact() && r.pg.guards_intact() && r.vec.guards_intact() && r.decay.guards_intact() &&
            r.a_inv.guards_intact(),
        c.name + ": writes stay inside");
}

// Args::until: the same bits for every item with a head of which its chunk is asked for, and nothing of the others.
void run_chosen(Case c, uint32_t seed, int one_of) {
  c.with_pg = c.backward = false;
  const Problem p = make(c, seed);
  Run r(p);
  r.args.decay = nullptr;
  const int32_t dtype = c.fp16 ? QLA_FLOAT16 : QLA_BFLOAT16;
  const int64_t sequences = c.lens.empty() ? c.batch : int64_t(c.lens.size()), HV = p.heads_v;
  const auto tiles_of = [&](const char* what) {
    cuda_ok(cudaMemset(r.abar.get(), 0xff, p.table.size() * HV * kTileBytes), what);
    cuda_ok(cudaMemset(r.vec.get(), 0xff, p.table.size() * HV * kVecFloats * sizeof(float)), what);
    cuda_ok(intra::launch(dtype, r.map_k, r.map_q, r.args, multiprocessors(), false, nullptr), what);
    cuda_ok(cudaDeviceSynchronize(), what);
    return std::make_pair(r.abar.download(), r.vec.download());
  };
  const auto all = tiles_of("chunk_intra");
  std::mt19937 rng(seed);
  std::vector<int32_t> until(size_t(sequences * HV));
  for (int32_t& x : until) x = rng() % uint32_t(one_of) ? 0 : int32_t(rng() % (p.table.size() + 1));
  Device<int32_t> on_device(until);
  r.args.until = on_device.get();
  const auto chosen = tiles_of("chunk_intra of chosen heads");
  bool made = true, alone = true;
  for (size_t slot = 0; slot < p.table.size(); slot++)
    for (int64_t h = 0; h < HV; h++) {
      const int64_t first = h / c.group * c.group + h % c.group / r.args.per * r.args.per;
      bool wanted = false;
      for (int64_t i = first; i < std::min(first + r.args.per, h / c.group * c.group + c.group); i++)
        wanted |= p.table[slot].rows && int32_t(slot) < until[size_t(p.table[slot].sequence * HV + i)];
      const size_t index = slot * HV + h;
      for (size_t i = index * kTileBytes; i < (index + 1) * kTileBytes; i++)
        (wanted ? made : alone) &= chosen.first[i] == (wanted ? all.first[i] : 0xff);
      for (size_t i = index * kVecFloats; i < (index + 1) * kVecFloats; i++) {
        uint32_t x, y;
        std::memcpy(&x, &chosen.second[i], 4);
        std::memcpy(&y, &all.second[i], 4);
        (wanted ? made : alone) &= x == (wanted ? y : 0xffffffffu);
      }
    }
  check(made, c.name + ": heads that are chosen");
  check(alone && r.abar.guards_intact() && r.vec.guards_intact(), c.name + ": and no others");
}

__global__ void fill_normal(uint16_t* x, size_t n, float size, uint32_t seed, bool unit_sum) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
  float s = 0;
  for (int r = 0; r < 4; r++) {
    z ^= z >> 30;
    z *= 0xbf58476d1ce4e5b9ull;
    z ^= z >> 27;
    z *= 0x94d049bb133111ebull;
    z ^= z >> 31;
    s += float(uint32_t(z >> 32)) * 2.3283064e-10f - 0.5f;
  }
  const __nv_bfloat16 b = __float2bfloat16(s * 1.7320508f * size);
  x[i] = reinterpret_cast<const uint16_t&>(b);
}
__global__ void fill_gates(float* g, float* b, size_t n, uint32_t seed) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
  z ^= z >> 30;
  z *= 0xbf58476d1ce4e5b9ull;
  z ^= z >> 27;
  z *= 0x94d049bb133111ebull;
  z ^= z >> 31;
  g[i] = -float(uint32_t(z >> 32)) * 2.3283064e-10f * 0.1f;
  b[i] = float(uint32_t(z)) * 2.3283064e-10f;
}

// Times of launches back to back, several input and output sets in turn so that nothing stays in L2.
void time_it(int H, int HV, bool with_pg, uint32_t flags, int32_t beta_dtype = QLA_FLOAT32) {
  const int T = 32768, sets = H <= 2 ? 8 : 2, reps = 40;
  struct Set {
    Device<uint16_t> q, k;
    Device<float> g, beta;
    Device<uint8_t> abar, pg;
    Device<float> vec;
    CUtensorMap map_q, map_k;
    Set(int H, int HV, int T)
        : q(size_t(T) * H * 128),
          k(size_t(T) * H * 128),
          g(size_t(T) * HV),
          beta(size_t(T) * HV),
          abar(size_t(T / 64 + 1) * HV * kTileBytes),
          pg(size_t(T / 64 + 1) * HV * kTileBytes),
          vec(size_t(T / 64 + 1) * HV * kVecFloats) {}
  };
  std::vector<ChunkRecord> host(T / 64 + 1, ChunkRecord{0, 0, 0});
  for (int i = 0; i < T / 64; i++) host[i] = {64 * i, 64, 0};
  Device<ChunkRecord> table(host);
  std::vector<Set*> all;
  for (int s = 0; s < sets; s++) {
    Set* x = new Set(H, HV, T);
    const size_t n = size_t(T) * H * 128;
    fill_normal<<<unsigned((n + 255) / 256), 256>>>(x->q.get(), n, 0.08838f, 11 * s + 1, true);
    fill_normal<<<unsigned((n + 255) / 256), 256>>>(x->k.get(), n, 0.08838f, 11 * s + 2, true);
    fill_gates<<<unsigned((size_t(T) * HV + 255) / 256), 256>>>(x->g.get(), x->beta.get(), size_t(T) * HV, 11 * s + 3);
    TokenMapShape shape;
    shape.data = x->q.get();
    shape.stride_h = 128;
    shape.stride_t = H * 128;
    shape.stride_b = n;
    shape.batch = 1;
    shape.tokens = T;
    shape.heads = H;
    x->map_q = make_token_map(shape, true, "q");
    shape.data = x->k.get();
    x->map_k = make_token_map(shape, true, "k");
    all.push_back(x);
  }
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  std::vector<float> times;
  for (int r = 0; r < 5; r++) {
    cudaEventRecord(a);
    for (int i = 0; i < reps; i++) {
      Set* x = all[i % sets];
      intra::Args args{};
      args.chunk_table = table.get();
      args.tokens = T;
      args.slots = T / 64 + 1;
      args.varlen = 1;
      args.num_k_heads = H;
      args.num_v_heads = HV;
      args.group = HV / H;
      args.parts = (args.group + 3) / 4;
      args.per = (args.group + args.parts - 1) / args.parts;
      args.scale = 0.088f;
      args.flags = flags;
      args.g = {x->g.get(), {0, HV, 1}, QLA_FLOAT32};
      args.beta = {x->beta.get(), {0, HV, 1}, beta_dtype};
      args.abar = x->abar.get();
      args.pg = with_pg ? x->pg.get() : nullptr;
      args.vec = x->vec.get();
      cuda_ok(intra::launch(QLA_BFLOAT16, x->map_k, x->map_q, args, multiprocessors(), false, nullptr), "launch");
    }
    cudaEventRecord(b);
    cuda_ok(cudaEventSynchronize(b), "time");
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    times.push_back(ms / reps);
  }
  std::sort(times.begin(), times.end());
  std::printf("| %2d, %2d | %s%s%s | %.4f (%.4f-%.4f) ms | %.3f us a chunk-head-SM |\n", H, HV, with_pg ? "Abar and Pg" : "Abar",
              flags & QLA_FLAG_QK_L2NORM ? ", norms" : "", beta_dtype == QLA_BFLOAT16 ? ", bf16 beta" : "", times[2], times[0],
              times[4], times[2] * 1e3 * 132 / (T / 64.0 * HV));
  std::fflush(stdout);
  for (Set* x : all) delete x;
}

}  // namespace

int main(int argc, char** argv) {
  cuda_ok(intra::prepare(), "prepare");
  if (argc > 1 && std::string(argv[1]) == "time") {
    for (auto [h, hv] : {std::pair{16, 64}, {16, 32}, {32, 32}, {2, 8}}) time_it(h, hv, true, 0);
    time_it(16, 64, false, 0);
    time_it(16, 32, false, 0);
    time_it(16, 32, true, QLA_FLAG_QK_L2NORM);
    return 0;
  }
  std::vector<Case> cases;
  auto add = [&](Case c) { cases.push_back(c); };
  const std::vector<int64_t> mixed = {1, 63, 64, 65, 130, 0, 200, 1, 1, 127, 128};
  for (bool fp16 : {false, true}) {
    const double fine = fp16 ? 2e-3 : 4e-3;
    for (int group : {1, 2, 3, 4, 5, 8})
      add({.name = "mixed lengths, NaN padding", .group = group, .lens = mixed, .padding = 77, .fp16 = fp16, .limit = fine});
    add({.name = "correlated keys", .group = 2, .tokens = 512, .fp16 = fp16, .keys = Keys::kCorrelated, .limit = fine});
    add({.name = "near-equal keys (BR-20)",
         .group = 2,
         .tokens = 512,
         .fp16 = fp16,
         .keys = Keys::kNearEqual,
         .gate = 0,
         .limit = 8e-3});
    add({.name = "equal keys, beta to 2 (BR-21)",
         .group = 2,
         .tokens = 512,
         .fp16 = fp16,
         .keys = Keys::kEqual,
         .gate = 0,
         .beta_high = 2,
         .limit = 8e-3});
    add({.name = "near-equal keys, beta 1",
         .group = 1,
         .tokens = 256,
         .fp16 = fp16,
         .keys = Keys::kNearEqual,
         .gate = 0,
         .beta_low = 1,
         .limit = 8e-3});
    add({.name = "g about -20", .group = 4, .tokens = 256, .fp16 = fp16, .gate = -20, .limit = fine});
    add({.name = "floored gates", .group = 4, .tokens = 256, .fp16 = fp16, .gate = -200, .limit = fine});
    add({.name = "no decay", .group = 4, .tokens = 256, .fp16 = fp16, .gate = 0, .limit = fine});
    add({.name = "NaN gate", .group = 2, .tokens = 256, .fp16 = fp16, .limit = fine, .nan_gate_at = 70});
  }
  add({.name = "positive gates", .group = 2, .tokens = 256, .keys = Keys::kCorrelated, .gate = 0.5, .limit = 4e-3});
  add({.name = "keys of norm 12, beta to 1e-2",
       .group = 2,
       .tokens = 256,
       .keys = Keys::kCorrelated,
       .beta_high = 1e-2,
       .key_size = 12,
       .limit = 8e-3});
  add({.name = "norms 1/8 to 8, beta to 0.03", .group = 2, .tokens = 256, .keys = Keys::kWide, .beta_high = 0.03, .limit = 8e-3});
  add({.name = "unstable: keys of norm 6, beta 1",
       .group = 2,
       .tokens = 256,
       .keys = Keys::kUnit,
       .gate = -0.1,
       .key_size = 6,
       .limit = 1e-2});
  add({.name = "q-k norms",
       .group = 2,
       .lens = mixed,
       .padding = 5,
       .flags = QLA_FLAG_QK_L2NORM,
       .keys = Keys::kCorrelated,
       .key_size = 3});
  add({.name = "q-k norms of wide keys, fp16",
       .group = 3,
       .tokens = 192,
       .fp16 = true,
       .flags = QLA_FLAG_QK_L2NORM,
       .keys = Keys::kWide});
  add({.name = "raw gate, sigmoid", .group = 2, .lens = mixed, .flags = QLA_FLAG_RAW_GATE | QLA_FLAG_BETA_SIGMOID});
  add({.name = "raw gate, 2 sigmoid",
       .group = 4,
       .lens = mixed,
       .flags = QLA_FLAG_RAW_GATE | QLA_FLAG_BETA_SIGMOID | QLA_FLAG_NEG_EIGVAL,
       .limit = 6e-3});
  for (int32_t g : {QLA_FLOAT64, QLA_BFLOAT16, QLA_FLOAT16})
    for (int32_t b : {QLA_FLOAT64, QLA_BFLOAT16, QLA_FLOAT16})
      add({.name = "gate dtypes", .group = 3, .lens = {70, 30}, .strided = true, .g_dtype = g, .beta_dtype = b});
  add({.name = "batch of 3, 100 tokens", .group = 2, .batch = 3, .tokens = 100});
  add({.name = "batch of 3, strided", .group = 2, .batch = 3, .tokens = 100, .strided = true});
  add({.name = "without Pg", .group = 4, .lens = mixed, .padding = 3, .with_pg = false});
  add({.name = "without Pg, norms", .group = 4, .lens = mixed, .padding = 3, .with_pg = false, .flags = QLA_FLAG_QK_L2NORM});
  add({.name = "no part B", .group = 4, .lens = mixed, .backward = false});
  add({.name = "ungated A", .group = 2, .lens = mixed, .padding = 3, .keys = Keys::kCorrelated, .ungated = true});
  add({.name = "ungated A, near-equal keys",
       .group = 1,
       .tokens = 128,
       .fp16 = true,
       .keys = Keys::kNearEqual,
       .beta_low = 1,
       .limit = 8e-3,
       .ungated = true});
  add({.name = "many tiny sequences", .group = 2, .lens = std::vector<int64_t>(700, 3)});
  add({.name = "more items than CTAs", .group = 8, .num_k_heads = 4, .tokens = 64 * 110});
  add({.name = "the last CTA leaves ahead", .group = 1, .num_k_heads = 4, .tokens = 64 * 1200 + 7, .leaves = true});
  add({.name = "the last CTA has nothing", .group = 4, .num_k_heads = 4, .tokens = 64 * 150, .leaves = true});
  // Heads done again in fp32 take ten times as long as others: a warp falls behind those that go on to the next items. The limit
  // is for what it would then read, not for rounding, which the growing recurrence of such keys magnifies.
  for (int group : {1, 3})
    for (bool with_pg : {true, false})
      add({.name = "guarded heads among many items",
           .group = group,
           .num_k_heads = 4,
           .tokens = 64 * 260,
           .with_pg = with_pg,
           .keys = Keys::kWide,
           .limit = 0.5,
           .repeats = 2});
  const bool quick = argc > 1 && std::string(argv[1]) == "quick";  // for sanitizers
  uint32_t seed = 1;
  for (const Case& c : cases) {
    seed++;
    if (!quick || seed % 5 == 2) run(c, seed - 1);
  }
  for (int group : {1, 2, 6})
    for (int one_of : {1, 3, 20, 1000}) {  // the last: of none, in all likelihood
      if (quick && one_of != 3) continue;
      run_chosen({.name = "chosen heads", .group = group, .num_k_heads = 5, .lens = mixed, .padding = 77}, seed++, one_of);
      run_chosen({.name = "chosen heads, dense", .group = group, .num_k_heads = 4, .batch = 2, .tokens = 64 * 70}, seed++,
                 one_of);
    }
  return summary("chunk_intra");
}
