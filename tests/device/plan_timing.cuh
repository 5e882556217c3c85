// `qla_device_test_plan time`: microseconds that a planning kernel adds between the kernel before it and the one behind it, as a
// call chains them (programmatic launch). A graph of many (before, planning, after): `before` takes its time and notes when it
// ends, `after` when its wait is over; the median of that, with planning and without. The code of the kernels is thrown out of
// the instruction caches in between.
#pragma once

#include <algorithm>
#include <random>

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/chunk_gates/config.hpp"
#include "cuda/kernels/plan_segments/cut.hpp"
#include "cuda/kernels/plan_segments/launch.hpp"
#include "device/harness.hpp"
#include "plan/choose.hpp"

namespace qla::test {

// Of a packing whose gate and beta are the same [tokens][heads].
inline cuda::gates::Args gates_of(int64_t tokens, int64_t heads, const float* gate, float* vec) {
  cuda::gates::Args g{};
  g.tokens = tokens;
  g.varlen = 1;
  g.num_v_heads = int(heads);
  g.scale = 1.f;
  g.g = g.beta = {gate, {tokens * heads, heads, 1}, QLA_FLOAT32};
  g.vec = vec;
  return g;
}

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
// 64 KiB of code
__global__ void much_code(float* to, float x) {
#pragma unroll
  for (int i = 0; i < 4000; i++) asm volatile("fma.rn.f32 %0, %0, %0, 0f3F800000;" : "+f"(x));
  if (x == 1.f) *to = x;
}
__global__ void before(int64_t* stamp, int64_t ns) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int64_t begin = nanoseconds();
  while (nanoseconds() - begin < (blockIdx.x ? ns / 2 : ns)) {
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *stamp = nanoseconds();
}
__global__ void after(int64_t* stamp) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (blockIdx.x == 0 && threadIdx.x == 0) *stamp = nanoseconds();
}

__global__ void nothing_at_all() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <class Planning>
double exposed_us(int repeats, Planning planning) {
  Device<int64_t> stamps(size_t(2 * repeats));
  Device<float> nothing(1);
  cudaStream_t stream;
  cuda_ok(cudaStreamCreate(&stream), "stream");
  cudaGraph_t graph;
  cudaGraphExec_t run;
  cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < repeats; i++) {
    much_code<<<unsigned(multiprocessors()), 128, 0, stream>>>(nothing.get(), 2.f);
    before<<<unsigned(multiprocessors()), 128, 0, stream>>>(stamps.get() + 2 * i, 12000);
    planning(stream);
    cuda_ok(qla::cuda::launch_dependent(after, unsigned(multiprocessors()), 128, 0, true, stream, stamps.get() + 2 * i + 1),
            "after");
  }
  cuda_ok(cudaStreamEndCapture(stream, &graph), "capture");
  cuda_ok(cudaGraphInstantiate(&run, graph, 0), "graph");
  for (int i = 0; i < 20; i++) cuda_ok(cudaGraphLaunch(run, stream), "replay");
  cuda_ok(cudaStreamSynchronize(stream), "replays");
  const std::vector<int64_t> t = stamps.download();
  std::vector<int64_t> times;
  for (int i = 0; i < repeats; i++) times.push_back(t[size_t(2 * i + 1)] - t[size_t(2 * i)]);
  std::sort(times.begin(), times.end());
  cuda_ok(cudaGraphExecDestroy(run), "graph");
  cuda_ok(cudaGraphDestroy(graph), "graph");
  cuda_ok(cudaStreamDestroy(stream), "stream");
  return double(times[size_t(repeats / 2)]) * 1e-3;
}

// plan_segments and plan_and_gates are ordinary launches: against an empty kernel in their place.
inline void time_tables() {
  using namespace qla::cuda;
  const double base = exposed_us(60, [](cudaStream_t s) { nothing_at_all<<<1, 32, 0, s>>>(); });
  std::printf("an empty kernel between: %.2f us; plan_segments and plan_and_gates less this\n", base);
  struct Case {
    int sequences, tokens, heads;
  };
  for (const Case x :
       {Case{1, 32768, 8}, {1, 32768, 32}, {1, 2048, 16}, {2, 16384, 48}, {8, 1024, 16}, {8, 4096, 24}, {32, 1024, 8}}) {
    const int64_t tokens = int64_t(x.sequences) * x.tokens, slots = tokens / 64 + x.sequences;
    std::vector<int32_t> boundaries;
    for (int n = 0; n <= x.sequences; n++) boundaries.push_back(n * x.tokens);
    Device<int32_t> cu(boundaries);
    Device<PlanHeader> header(1);
    Device<WorkItem> items{size_t(x.sequences * x.heads * 2)};
    Device<ChunkRecord> chunks{size_t(slots)};
    Device<float> gate(std::vector<float>(size_t(tokens * x.heads), -0.5f)), vec{size_t(slots * x.heads * kFusedVecFloats)};
    segments::Args a{};
    a.cu_seqlens = cu.get();
    a.index_dtype = QLA_INT32;
    a.has_initial = 1;
    a.num_seqs = x.sequences;
    a.tokens = tokens;
    a.slots = int32_t(slots);
    a.num_v_heads = x.heads;
    a.v_parts = 1;
    a.header = header.get();
    a.items = items.get();
    a.chunk_table = chunks.get();
    const gates::Args g = gates_of(tokens, x.heads, gate.get(), vec.get());
    const double tables =
        exposed_us(60, [&](cudaStream_t s) { cuda_ok(segments::launch(a, multiprocessors(), s), "plan_segments"); });
    const double both = exposed_us(
        60, [&](cudaStream_t s) { cuda_ok(segments::launch_with_gates(a, g, multiprocessors(), s), "plan_and_gates"); });
    std::printf("%d x %d, %d heads: plan_segments %.2f us, plan_and_gates %.2f\n", x.sequences, x.tokens, x.heads, tables - base,
                both - base);
  }
}

inline void time_planning() {
  using namespace qla::cuda;
  time_tables();
  const double base = exposed_us(60, [](cudaStream_t) {});
  std::printf("nothing between: %.2f us; all others less this\n", base);
  for (const auto& [hk, hv] : {std::pair{2, 8}, {4, 16}, {8, 32}, {16, 32}})
    for (const int64_t tokens : {32768, 8192, 2048}) {
      qla::plan::Shape shape;
      shape.total_tokens = tokens, shape.num_seqs = 1, shape.num_v_heads = hv, shape.group = hv / hk;
      qla::plan::Capabilities can;
      can.fused = false;
      const qla::plan::Choice choice = qla::plan::choose(qla::plan::kH200, shape, {}, can);
      const int64_t slots = tokens / 64 + 1;
      if (!choice.rule.segment_chunks) continue;
      std::mt19937 rng(1);
      std::vector<float> sums(size_t(slots * hv));
      for (size_t i = 0; i < sums.size(); i++) sums[i] = int(i % size_t(hv)) % 4 == 0 ? 0.f : -2.6f - 0.4f * float(rng() % 2);
      const int64_t items = qla::plan::most_items(shape, choice), states = qla::plan::most_end_states(shape, choice);
      Device<int32_t> cu(std::vector<int32_t>{0, int32_t(tokens)});
      Device<PlanHeader> header(1), pre_header(1);
      Device<WorkItem> main_items{size_t(items)}, pre_items{size_t(4 * states)};
      Device<ChunkRecord> chunks{size_t(slots)};
      Device<float> decay(sums);
      Device<MergeChain> chains{size_t(hv)};
      Device<uint8_t> transitions{size_t(states)}, units{size_t(items * segments::kUnitBytes)};
      segments::CutArgs c{};
      c.plan.cu_seqlens = cu.get();
      c.plan.index_dtype = QLA_INT32;
      c.plan.has_initial = 1;
      c.plan.num_seqs = 1;
      c.plan.tokens = tokens;
      c.plan.slots = int32_t(slots);
      c.plan.num_v_heads = hv;
      c.plan.v_parts = choice.value_splits;
      c.plan.header = header.get();
      c.plan.items = main_items.get();
      c.plan.chunk_table = chunks.get();
      c.rule = choice.rule;
      c.decay = decay.get();
      c.most_states = int32_t(states);
      c.most_units = c.most_items = int32_t(items / choice.value_splits);
      c.units = units.get();
      c.pre_v_parts = 2;
      c.pre_header = pre_header.get();
      c.pre_items = pre_items.get();
      c.chains = chains.get();
      c.transitions = transitions.get();
      cuda_ok(segments::launch(c.plan, multiprocessors(), nullptr), "plan_segments");
      double us[3];
      for (int i = 0; i < 3; i++) {  // cut; asked and not cut; cut beside the kernel before, whose sums are all there
        segments::CutArgs now = c;
        if (i == 1) now.rule.uncut_chunks = tokens;
        now.beside = i == 2;
        us[i] = exposed_us(60, [&](cudaStream_t s) { cuda_ok(segments::launch_cut(now, s), "cut"); }) - base;
      }
      std::printf("(%d, %d) 1x%lld, %lld segments: cut items %.2f us, nothing to cut %.2f, beside %.2f\n", hk, hv,
                  static_cast<long long>(tokens), static_cast<long long>(items / choice.value_splits / hv), us[0], us[1], us[2]);
    }
}

}  // namespace qla::test
