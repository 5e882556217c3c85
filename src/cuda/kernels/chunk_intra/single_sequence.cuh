// Chunks of a call with one sequence, straight from its boundaries: no waiting for plan_segments' table.
#pragma once

#include <cstdint>

#include "cuda/kernels/chunk_intra/config.hpp"
#include "cuda/kernels/plan_segments/boundaries.cuh"

namespace qla::cuda::intra {

__device__ __forceinline__ void single_sequence(const Args& a, int& first_token, int& end_token) {
  const segments::Span span = segments::span_of(a.plan, 0);
  first_token = int(span.bos);
  end_token = int(span.eos);
}
// as a ChunkRecord's bits
__device__ __forceinline__ int4 single_record(int slot, int first_token, int end_token) {
  const int token = first_token % 64 + 64 * slot;
  return make_int4(token, 0, token < first_token ? 0 : max(0, min(64, end_token - token)), 0);
}

}  // namespace qla::cuda::intra
