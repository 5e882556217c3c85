// What calls count on beside their own flags (docs/kernels/ordering.md): which launches and waits make sure that no L1 gives what
// lay in memory before. Each SM holds old numbers in its L1 when new ones are written by another.
#include <chrono>
#include <numeric>

#include "cuda/dependent_launch.hpp"
#include "cuda/ptx/control.cuh"
#include "device/harness.hpp"

using namespace qla::cuda;
using namespace qla::test;

namespace {

constexpr int kLines = 64, kWords = 32 * kLines;  // a word a line

__device__ __forceinline__ uint32_t load_plain(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
// how many of the lines hold `value` as this warp's plain loads see them
__device__ __forceinline__ int lines_with(const uint32_t* words, uint32_t value) {
  int count = 0;
  for (int line = threadIdx.x % 32; line < kLines; line += 32) count += load_plain(words + 32 * line) == value;
  return __reduce_add_sync(~0u, count);
}
__device__ __forceinline__ void sleep_us(int us) {
  for (int i = 0; i < us; i++) __nanosleep(1000);
}

// Every SM has the lines in its L1 as they were; then CTA 0 writes, and whoever looks again sees what its L1 holds.
__global__ void fill_and_write(uint32_t* words, uint32_t before, uint32_t after, int* arrived, int* old_after) {
  const int all = lines_with(words, before);
  if (threadIdx.x == 0) {
    old_after[blockIdx.x] = all;  // so that it is looked at
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < int(gridDim.x)) {
    }
  }
  __syncwarp();
  if (blockIdx.x == 0) {
    for (int line = threadIdx.x; line < kLines; line += 32) words[32 * line] = after;
    __threadfence();
    __syncwarp();
    if (threadIdx.x == 0) atomicAdd(arrived, 1);
  }
  if (threadIdx.x == 0)
    while (atomicAdd(arrived, 0) < int(gridDim.x) + 1) {
    }
  __syncwarp();
  const int old = lines_with(words, before);
  if (threadIdx.x == 0) old_after[blockIdx.x] = old;
}
// A call's first kernel: one CTA, which looks at none of that
__global__ void begin(bool waits) {
  if (waits) ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  sleep_us(20);
}
// .. and a later one, on every SM, that looks without a wait of its own
__global__ void look(const uint32_t* words, uint32_t after, int* good) {
  const int all = lines_with(words, after);
  if (threadIdx.x == 0) good[blockIdx.x] = all;
}

// Writes when all CTAs of the kernel behind it have had the old numbers in their hands; says so if they came too late.
__global__ void write_late(uint32_t* words, uint32_t after, int* arrived, int ctas) {
  ptx::grid_dependency_launch();
  for (int i = 0; i < 2000 && ptx::read_flag(arrived) < ctas; i++) __nanosleep(1000);  // never for ever
  if (threadIdx.x == 0 && ptx::read_flag(arrived) < ctas) arrived[1] = 1;
  for (int line = threadIdx.x; line < kLines; line += 32) words[32 * line] = after;
}
// old: before the wait; good: behind it, by the warp that waits; beside: by a warp that a barrier alone connects with that one
__global__ void look_around_a_wait(uint32_t* words, uint32_t before, uint32_t after, bool stores, int* arrived, int* old,
                                   int* good, int* beside) {
  const int warp = threadIdx.x / 32;
  if (warp == 0) {
    if (stores)
      for (int line = threadIdx.x; line < kLines; line += 32) words[32 * line] = before;  // as they are
    const int seen = lines_with(words, before);
    if (threadIdx.x == 0) old[blockIdx.x] = seen;
    __syncwarp();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(arrived) : "memory");
    ptx::grid_dependency_wait();
    const int all = lines_with(words, after);
    if (threadIdx.x == 0) good[blockIdx.x] = all;
  }
  __syncthreads();
  if (warp == 1) {
    const int all = lines_with(words, after);
    if (threadIdx.x == 32) beside[blockIdx.x] = all;
  }
}

struct Fixture {
  int sms = multiprocessors();
  Device<uint32_t> words{size_t(kWords)};
  Device<int> arrived{2}, old{size_t(sms)}, good{size_t(sms)}, beside{size_t(sms)};
  cudaStream_t stream = nullptr;
  uint32_t number = 1;
  Fixture() { cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream"); }

  int sum(const Device<int>& x) const {
    const auto host = x.download();
    return std::accumulate(host.begin(), host.end(), 0);
  }
  void set(uint32_t value) {
    words.upload(std::vector<uint32_t>(kWords, value));
    arrived.upload({0, 0});
    cuda_ok(cudaDeviceSynchronize(), "set");
  }
  // Shared memory for two CTAs an SM, one of each kernel: with other amounts the second kernel's would wait for the first's end.
  template <class... P>
  void launch(void (*kernel)(P...), int grid, int threads, bool dependent, const std::type_identity_t<P>&... p) {
    constexpr int kShared = 100 * 1024;
    cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "attribute");
    cuda_ok(launch_dependent(kernel, grid, threads, kShared, dependent, stream, p...), "launch");
  }
  void run(bool graph, auto launches) {
    if (!graph) {
      launches();
    } else {
      cudaGraph_t made;
      cudaGraphExec_t exec;
      cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
      launches();
      cuda_ok(cudaStreamEndCapture(stream, &made), "end of capture");
      cuda_ok(cudaGraphInstantiate(&exec, made, 0), "instantiate");
      cuda_ok(cudaGraphLaunch(exec, stream), "graph");
      cuda_ok(cudaStreamSynchronize(stream), "graph");
      cudaGraphExecDestroy(exec);
      cudaGraphDestroy(made);
    }
    cuda_ok(cudaStreamSynchronize(stream), "run");
  }
};

// The stream-ordered launch of a call's first kernel, one CTA on one SM, empties all L1s: what is launched programmatically
// behind it may look without a wait at what was written before the call.
void test_launches_in_order(Fixture& f, bool graph) {
  const int all = f.sms * kLines;
  int old = 0, wrong = 0, wrong_behind_dependent = 0;
  for (int round = 0; round < 20; round++)
    for (const bool first_depends : {false, true}) {
      const uint32_t before = f.number, after = ++f.number;
      f.set(before);
      f.run(graph, [&] {
        f.launch(fill_and_write, f.sms, 32, false, f.words.get(), before, after, f.arrived.get(), f.old.get());
        f.launch(begin, 1, 32, first_depends, first_depends);
        f.launch(look, f.sms, 32, true, f.words.get(), after, f.good.get());
      });
      old += f.sum(f.old);
      (first_depends ? wrong_behind_dependent : wrong) += all - f.sum(f.good);
    }
  check(wrong == 0, std::string("behind a launch in stream order a look without a wait sees what was written before it") +
                        (graph ? ", in a graph" : ""));
  std::printf(
      "  %s: old lines that L1s held: %d of %d; seen behind a first kernel in stream order: %d, behind a programmatic one: %d\n",
      graph ? "graph" : "launches", old, 40 * all, wrong, wrong_behind_dependent);
}
// griddepcontrol.wait makes plain loads see what the kernel before wrote meanwhile, in all warps that it is ordered before,
// whether the L1 had the old numbers from loads or from stores of its own SM.
void test_waits(Fixture& f, bool graph) {
  const int all = f.sms * kLines;
  int looked = 0, old = 0, wrong = 0, wrong_beside = 0;
  for (int round = 0; round < 20; round++)
    for (const bool stores : {false, true}) {
      const uint32_t before = f.number, after = ++f.number;
      f.set(before);
      f.run(graph, [&] {
        f.launch(write_late, 1, 32, false, f.words.get(), after, f.arrived.get(), f.sms);
        f.launch(look_around_a_wait, f.sms, 64, true, f.words.get(), before, after, stores, f.arrived.get(), f.old.get(),
                 f.good.get(), f.beside.get());
      });
      if (f.arrived.download()[1]) continue;  // the host was late with the second launch
      looked += all, old += f.sum(f.old), wrong += all - f.sum(f.good), wrong_beside += all - f.sum(f.beside);
    }
  const char* in = graph ? ", in a graph" : "";
  check(wrong == 0, std::string("behind its wait a warp's plain loads see what the kernel before wrote") + in);
  check(wrong_beside == 0, std::string(".. and another warp's, behind a barrier") + in);
  std::printf("  %s: old lines seen before the wait: %d of %d, behind it: %d and %d\n", graph ? "graph" : "launches", old, looked,
              wrong, wrong_beside);
}

}  // namespace

// seconds: again and again for so long, e.g. beside other processes
int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0;
  Fixture f;
  const auto begin = std::chrono::steady_clock::now();
  do
    for (const bool graph : {false, true}) test_launches_in_order(f, graph), test_waits(f, graph);
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds);
  return summary("test_order");
}
