// A call whose sequences turn out too short for a cut: nothing to merge, and nobody need wait to learn it.
#pragma once

#include "cuda/kernels/cp_merge/launch.hpp"
#include "cuda/ptx/control.cuh"

namespace qla::cuda::cp_merge {

__device__ __forceinline__ bool leaves(const Args& a) {
  // cut_items or cut_few wrote that before it let the pre-pass begin, and nothing else later
  if (ptx::load_relaxed(&a.header->cut) != 0) return false;
  // Where the next kernel may not begin yet it counts on all before this one without a wait of its own.
  if (a.lets_begin) ptx::grid_dependency_launch();
  if (blockIdx.x == 0) ptx::grid_dependency_wait();  // it ends when all before it has ended
  ptx::grid_dependency_launch();
  return true;
}

}  // namespace qla::cuda::cp_merge
