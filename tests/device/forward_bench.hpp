// Times the forward kernel on whole problems: data made on the device, tiles a repeated pool of real ones. Two sets of buffers in
// turn, so that nothing stays in L2.
#pragma once

#include "cuda/kernels/forward/launch.hpp"
#include "cuda/kernels/plan_segments/launch.hpp"
#include "forward_cases.hpp"
#include "plan/model.hpp"

namespace fwdtest {

__device__ inline uint32_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return uint32_t(x);
}
__device__ inline float device_normal(uint64_t i) {
  const float u = (mix(2 * i) + 1.f) * 2.3283064e-10f, v = mix(2 * i + 1) * 2.3283064e-10f;
  return sqrtf(-2 * logf(fminf(u, 1.f))) * cospif(2 * v);
}
static __global__ void make_rows(__nv_bfloat16* x, size_t rows, bool unit, uint64_t seed) {
  const size_t row = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  float v[4], s = 0;
  for (int i = 0; i < 4; i++) {
    v[i] = device_normal(seed + row * 128 + lane * 4 + i);
    s += v[i] * v[i];
  }
  for (int o = 16; o; o /= 2) s += __shfl_xor_sync(~0u, s, o);
  for (int i = 0; i < 4; i++) x[row * 128 + lane * 4 + i] = __float2bfloat16(unit ? v[i] * rsqrtf(s) : v[i]);
}
static __global__ void repeat(uint4* dst, const uint4* src, size_t n, size_t period) {
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    dst[i] = src[i % period];
}
static __global__ void make_gates(float* g, float* b, size_t n, uint64_t seed) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  g[i] = -log1pf(expf(-device_normal(seed + i))) / 16;
  b[i] = 1 / (1 + expf(-device_normal(seed + (1ull << 41) + i)));
}
static __global__ void reset(PlanHeader* h) { h->next_item = 0; }

struct Row {
  const char* name;
  int seqs;
  int64_t len;
  int Hk, Hv, parts;
  bool output;
  bool fused = false, saves = false;
  // items of so many chunks, behind so many without output where they do not begin a sequence; by the cut form if fused
  int segment = 0, warmup = 0;
  bool cut = false;
};
// cycles a microsecond just now
static __global__ void read_clock(float* mhz) {
  uint64_t t0, t1;
  const int64_t c0 = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t1));
  while (t1 - t0 < 20000);
  *mhz = float(clock64() - c0) * 1e3f / float(t1 - t0);
}

inline int bench(const std::string& only) {
  const Row table[] = {{"(16,64) 8192x4", 4, 8192, 16, 64, 1, true},
                       {"(32,32) 8192x4", 4, 8192, 32, 32, 1, true},
                       {"(16,32) 8192x4", 4, 8192, 16, 32, 1, true},
                       {"(8,32) 1x32768 V split", 1, 32768, 8, 32, 2, true},
                       {"(2,8) 1x2048 V split", 1, 2048, 2, 8, 2, true},
                       {"(12,12) 4096x32", 4096, 32, 12, 12, 1, true},
                       {"(12,12) 4096x64", 4096, 64, 12, 12, 1, true},
                       {"(8,32) 1x32768 V split, no output", 1, 32768, 8, 32, 2, false},
                       {"(32,32) 8192x4, no output", 4, 8192, 32, 32, 1, false},
                       {"(16,64) 8192x4 fused", 4, 8192, 16, 64, 1, true, true},
                       {"(32,32) 8192x4 fused", 4, 8192, 32, 32, 1, true, true},
                       {"(16,32) 4096x8 fused", 8, 4096, 16, 32, 1, true, true},
                       {"(16,32) 4096x8 fused, saves", 8, 4096, 16, 32, 1, true, true, true},
                       {"(16,16) 1024x8 fused", 8, 1024, 16, 16, 1, true, true},
                       {"(8,32) 2048x4 fused", 4, 2048, 8, 32, 1, true, true},
                       {"(4,16) 1024x8 fused", 8, 1024, 4, 16, 1, true, true},
                       {"(8,32) 1024x8 fused", 8, 1024, 8, 32, 1, true, true},
                       {"(16,64) 1024x8 fused", 8, 1024, 16, 64, 1, true, true},
                       {"(32,32) 2048x4 fused", 4, 2048, 32, 32, 1, true, true},
                       {"(32,32) 1024x8 fused", 8, 1024, 32, 32, 1, true, true},
                       {"(8,24) 8192x4 fused", 4, 8192, 8, 24, 1, true, true},
                       {"(16,16) 8192x4 fused", 4, 8192, 16, 16, 1, true, true},
                       {"(2,8) 1x32768 items of 32", 1, 32768, 2, 8, 1, true, false, false, 32},
                       {"(2,8) 1x32768 items of 7 + 32", 1, 32768, 2, 8, 1, true, false, false, 32, 7},
                       {"(2,8) 1x32768 items of 7 + 32 fused, cut", 1, 32768, 2, 8, 1, true, true, false, 32, 7, true},
                       {"(16,16) 1x32768 items of 64", 1, 32768, 16, 16, 1, true, false, false, 64},
                       {"(16,16) 1x32768 items of 64 fused, cut", 1, 32768, 16, 16, 1, true, true, false, 64, 0, true},
                       {"(16,16) 1x32768 items of 5 + 64", 1, 32768, 16, 16, 1, true, false, false, 64, 5},
                       {"(16,16) 1x32768 items of 5 + 64 fused, cut", 1, 32768, 16, 16, 1, true, true, false, 64, 5, true},
                       {"(4,16) 1x32768 items of 64", 1, 32768, 4, 16, 1, true, false, false, 64},
                       {"(4,16) 1x32768 items of 32 + 64", 1, 32768, 4, 16, 1, true, false, false, 64, 32},
                       {"(2,8) 1x32768 items of 64, V split", 1, 32768, 2, 8, 2, true, false, false, 64},
                       {"(2,8) 1x32768 items of 64, V split, no output", 1, 32768, 2, 8, 2, false, false, false, 64},
                       {"(2,8) 1x32768 items of 32, no output", 1, 32768, 2, 8, 1, false, false, false, 32}};
  int sms = 132;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
  for (const Row& r : table) {
    if (!only.empty() && !std::strstr(r.name, only.c_str())) continue;
    const int64_t T = r.seqs * r.len, slots = T / 64 + r.seqs;
    Data d = make_data(1, 64 * 16, {}, 1, 4, true, 1.0 / 16, 3);
    std::vector<uint8_t> a(64 * kTileBytes), b(64 * kTileBytes);
    std::vector<float> vec(64 * kVecFloats, 0.f);
    for (int i = 0; i < 64; i++)
      host_intra(d, i / 4 * 64, int(std::min<int64_t>(64, r.len)), i % 4, &a[i * kTileBytes], &b[i * kTileBytes],
                 &vec[i * kVecFloats]);
    uint8_t *pa = upload(a), *pb = upload(b);
    float* pv = upload(vec);
    std::vector<WorkItem> items;
    const int chunks = int((r.len + 63) / 64), step = r.segment ? r.segment : chunks;
    for (int n = 0; n < r.seqs; n++)
      for (int first = 0; first < chunks; first += step)
        for (int h = 0; h < r.Hv; h++)
          for (int part = 0; part < r.parts; part++) {
            WorkItem it{};
            it.warmup = std::min(first, r.warmup);
            it.token = n * r.len + 64 * (first - it.warmup);
            it.slot = int32_t(n * r.len / 64 + n) + first - it.warmup;
            it.chunks = std::min(step, chunks - first) + it.warmup;
            it.last_rows = first + step >= chunks ? int32_t((r.len - 1) % 64 + 1) : 64;
            it.sequence = n;
            it.v_head = h;
            it.v_part = part;
            it.start = first ? QLA_START_WARMUP : r.output ? QLA_START_INITIAL : QLA_START_ZERO;
            it.is_last = first + step >= chunks;
            it.start_index = n * r.Hv + h;
            items.push_back(it);
          }
    PlanHeader header{};
    header.num_items = int32_t(items.size());
    header.end_token = T;
    WorkItem* ditems = upload(items);
    ForwardParams ps[2];
    gates::Args gs[2]{};
    segments::Args plans[2]{};
    for (int s = 0; s < 2; s++) {
      ForwardParams& p = ps[s];
      __nv_bfloat16 *q, *k, *v, *o;
      CUDA_OK(cudaMalloc(&q, T * r.Hk * 256));
      CUDA_OK(cudaMalloc(&k, T * r.Hk * 256));
      CUDA_OK(cudaMalloc(&v, T * r.Hv * 256));
      CUDA_OK(cudaMalloc(&o, T * r.Hv * 256));
      make_rows<<<unsigned((T * r.Hk + 7) / 8), 256>>>(q, T * r.Hk, true, 1 + s);
      make_rows<<<unsigned((T * r.Hk + 7) / 8), 256>>>(k, T * r.Hk, true, (1ull << 40) + s);
      make_rows<<<unsigned((T * r.Hv + 7) / 8), 256>>>(v, T * r.Hv, false, (1ull << 41) + s);
      uint8_t *ta, *tp;
      float *tv, *h0, *ht;
      const size_t n = size_t(slots) * r.Hv;
      CUDA_OK(cudaMalloc(&ta, n * kTileBytes));
      CUDA_OK(cudaMalloc(&tp, n * kTileBytes));
      CUDA_OK(cudaMalloc(&tv, n * kVecFloats * 4));
      CUDA_OK(cudaMalloc(&h0, size_t(r.seqs) * r.Hv * 65536));
      CUDA_OK(cudaMalloc(&ht, size_t(r.seqs) * r.Hv * 65536));
      CUDA_OK(cudaMemset(h0, 0, size_t(r.seqs) * r.Hv * 65536));
      repeat<<<1024, 256>>>((uint4*)ta, (uint4*)pa, n * kTileBytes / 16, 64 * kTileBytes / 16);
      repeat<<<1024, 256>>>((uint4*)tp, (uint4*)pb, n * kTileBytes / 16, 64 * kTileBytes / 16);
      repeat<<<1024, 256>>>((uint4*)tv, (uint4*)pv, n * kVecFloats / 4, 64 * kVecFloats / 4);
      p.dtype = QLA_BFLOAT16;
      p.batch = 1;
      p.tokens = T;
      p.num_k_heads = r.Hk;
      p.num_v_heads = r.Hv;
      p.output = r.output;
      p.v_parts = r.parts;
      p.q = {q, T * r.Hk * 128, r.Hk * 128, 128};
      p.k = p.q;
      p.k.data = k;
      p.v = {v, T * r.Hv * 128, r.Hv * 128, 128};
      p.o = p.v;
      p.o.data = o;
      p.plan = upload(std::vector<PlanHeader>{header});
      p.items = ditems;
      p.max_items = int32_t(items.size());
      p.abar = ta;
      p.pg = tp;
      p.vec = tv;
      p.initial_state = {h0, QLA_FLOAT32, int64_t(r.Hv) * 16384, 16384, 128, 1};
      p.num_states = r.seqs;
      p.final_state = p.initial_state;
      p.final_state.data = ht;
      p.end_states = ht;
      if (r.fused) {
        std::vector<int64_t> boundaries;
        for (int n = 0; n <= r.seqs; n++) boundaries.push_back(n * r.len);
        segments::Args& plan = plans[s];
        plan.cu_seqlens = upload(boundaries);
        plan.index_dtype = QLA_INT64;
        plan.num_seqs = r.seqs;
        plan.tokens = T;
        plan.slots = int32_t(slots);
        plan.num_v_heads = r.Hv;
        plan.v_parts = 1;
        plan.has_initial = 1;
        plan.header = r.segment ? upload(std::vector<PlanHeader>{header}) : p.plan;  // items are what they are
        plan.items = r.segment ? upload(items) : ditems;
        plan.chunk_table = upload(std::vector<ChunkRecord>(slots));
        float *g, *b;
        CUDA_OK(cudaMalloc(&g, T * r.Hv * 4));
        CUDA_OK(cudaMalloc(&b, T * r.Hv * 4));
        make_gates<<<unsigned((T * r.Hv + 255) / 256), 256>>>(g, b, T * r.Hv, 77 + s);
        gates::Args& a = gs[s];
        a.tokens = T;
        a.varlen = 1;
        a.num_v_heads = r.Hv;
        a.scale = 0.08838834764f;
        a.g = {g, {0, r.Hv, 1}, QLA_FLOAT32};
        a.beta = {b, {0, r.Hv, 1}, QLA_FLOAT32};
        a.vec = tv;
        if (r.saves) {
          a.saves = 1;
          CUDA_OK(cudaMalloc(&a.decay, size_t(slots) * r.Hv * sizeof(float)));
          p.saved_abar = ta;
          p.saved_vec = tv;
        }
        CUDA_OK(segments::launch_with_gates(plan, a, sms, 0));
        p.fused = true;
        p.cut = r.cut;
        p.scale = a.scale;
      }
    }
    CUDA_OK(cudaDeviceSynchronize());
    cudaEvent_t e0, e1;
    cudaEventCreate(&e0);
    cudaEventCreate(&e1);
    std::vector<float> ms;
    for (int rep = 0; rep < 12; rep++) {
      reset<<<1, 1>>>(ps[rep % 2].plan);
      cudaEventRecord(e0);
      launch_forward(ps[rep % 2], sms, 0);
      cudaEventRecord(e1);
      CUDA_OK(cudaEventSynchronize(e1));
      float t;
      cudaEventElapsedTime(&t, e0, e1);
      ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    // back to back, 25 ms untimed, then 100 ms: power decides the clock
    float all = 0, gates_ms = 0;
    for (const float budget : {25.f, 100.f}) {
      const int many = std::max(2, int(budget / ms[6]));
      cudaEventRecord(e0);
      for (int rep = 0; rep < many; rep++) {
        reset<<<1, 1>>>(ps[rep % 2].plan);
        launch_forward(ps[rep % 2], sms, 0);
      }
      cudaEventRecord(e1);
      CUDA_OK(cudaEventSynchronize(e1));
      cudaEventElapsedTime(&all, e0, e1);
      all /= many;
    }
    float call_ms = 0, direct_ms = 0;  // whole calls, sustained
    const bool fits = int(items.size()) <= qla::plan::kDirectRounds * sms && !r.segment;
    float* clock_mhz;
    CUDA_OK(cudaMalloc(&clock_mhz, 4));
    read_clock<<<1, 1>>>(clock_mhz);
    const float mhz = download(clock_mhz, 1)[0];
    cudaFree(clock_mhz);
    if (r.fused) {
      for (const bool direct : {false, true}) {
        if (direct && !fits) continue;
        float& result = direct ? direct_ms : call_ms;
        for (const float budget : {25.f, 100.f}) {
          const int many = std::max(2, int(budget / ms[6]));
          cudaEventRecord(e0);
          for (int rep = 0; rep < many; rep++) {
            ForwardParams p = ps[rep % 2];
            p.dependent = true;
            if (direct) {
              launch_forward_direct(p, plans[rep % 2], gs[rep % 2], sms, 0);
            } else {
              CUDA_OK(segments::launch_with_gates(plans[rep % 2], gs[rep % 2], sms, 0, true));
              launch_forward(p, sms, 0);
            }
          }
          cudaEventRecord(e1);
          CUDA_OK(cudaEventSynchronize(e1));
          cudaEventElapsedTime(&result, e0, e1);
          result /= many;
        }
      }
      cudaEventRecord(e0);
      for (int rep = 0; rep < 20; rep++) CUDA_OK(segments::launch_with_gates(plans[rep % 2], gs[rep % 2], sms, 0));
      cudaEventRecord(e1);
      CUDA_OK(cudaEventSynchronize(e1));
      cudaEventElapsedTime(&gates_ms, e0, e1);
    }
    double walked = 0;
    for (const WorkItem& it : items) walked += it.chunks;
    const double ctas = std::min<double>(sms, double(items.size())), per = ms[6] * 1e3 / walked * ctas;
    std::printf("%-44s %.4f ms median (%.4f least), %.4f in a row at %.0f MHz; %.3f us an item-chunk and CTA (perfect balance)",
                r.name, ms[6], ms[0], all, mhz, per);
    if (r.fused) std::printf("; plan and gates %.4f, whole call %.4f, direct %.4f ms", gates_ms / 20, call_ms, direct_ms);
    std::printf("\n");
    std::fflush(stdout);
    for (int s = 0; s < 2; s++)
      for (const void* x : {(const void*)plans[s].chunk_table, plans[s].cu_seqlens, gs[s].g.data, gs[s].beta.data})
        cudaFree(const_cast<void*>(x));
    for (auto& p : ps)
      for (const void* x : {p.q.data, p.k.data, p.v.data, p.o.data, (const void*)p.abar, (const void*)p.pg, (const void*)p.vec,
                            (const void*)p.initial_state.data, (const void*)p.final_state.data})
        cudaFree(const_cast<void*>(x));
  }
  return 0;
}

}  // namespace fwdtest
