// What makes the sums of ghat while cut_few reads them, in chunk_intra's place: it waits for plan_few, lets the next kernel
// begin, then makes the sums of chunks that the table has, in no order that anybody could count on, and ends late.
#pragma once

#include "cuda/dependent_launch.hpp"
#include "cuda/formats.hpp"
#include "cuda/ptx/control.cuh"
#include "device/harness.hpp"

namespace qla::test {

// gridDim.x slots at a time; kept: the last of them, so that the kernel ends after everything that decides is there
__global__ void make_sums(const cuda::ChunkRecord* table, const float* from, float* to, int slots, int heads, int* ended) {
  cuda::ptx::grid_dependency_wait();  // as chunk_intra: whoever reads the sums must not see what lay there before plan_few
  cuda::ptx::grid_dependency_launch();
  for (int slot = int(blockIdx.x); slot < slots; slot += int(gridDim.x)) {
    if (table[slot].rows == 0) continue;
    __nanosleep(unsigned(slot * 2654435761u >> 20));  // up to 4 us
    for (int head = int(threadIdx.x); head < heads; head += int(blockDim.x))
      cuda::ptx::store_relaxed(to + slot * heads + head, from[slot * heads + head]);
  }
  if (blockIdx.x != 0) return;
  for (int i = 0; i < 20; i++) __nanosleep(1000);
  if (threadIdx.x == 0) atomicAdd(ended, 1);
}
// behind cut_few: whoever waits for it counts on make_sums
__global__ void look_whether_ended(const int* ended, int* seen) {
  cuda::ptx::grid_dependency_wait();
  if (threadIdx.x == 0) *seen = *ended;
}

inline void launch_make_sums(const cuda::ChunkRecord* table, const float* from, float* to, int slots, int heads, int* ended) {
  cuda_ok(cuda::launch_dependent(make_sums, unsigned(std::max(1, std::min(slots, 2 * multiprocessors() - 1))), 64, 0, true,
                                 nullptr, table, from, to, slots, heads, ended),
          "make_sums");
}
inline void launch_look(const int* ended, int* seen) {
  cuda_ok(cuda::launch_dependent(look_whether_ended, 1, 32, 0, true, nullptr, ended, seen), "look_whether_ended");
}

}  // namespace qla::test
