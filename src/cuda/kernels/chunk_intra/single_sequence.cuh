// Chunks of a call with one sequence, straight from its boundaries: no waiting for plan_segments' table.
#pragma once

#include <cstdint>

#include "cuda/kernels/chunk_intra/config.hpp"
#include "qla/qla.h"

namespace qla::cuda::intra {

// its boundaries, clamped as plan_segments clamps them
__device__ __forceinline__ void single_sequence(const Args& a, int& first_token, int& end_token) {
  if (!a.cu_seqlens) return;
  const auto boundary = [&](int n) {
    const int64_t x =
        a.index_dtype == QLA_INT64 ? static_cast<const int64_t*>(a.cu_seqlens)[n] : static_cast<const int32_t*>(a.cu_seqlens)[n];
    return int(x < 0 ? 0 : x > a.tokens ? a.tokens : x);
  };
  first_token = boundary(0);
  end_token = boundary(1);
}
// as a ChunkRecord's bits
__device__ __forceinline__ int4 single_record(int slot, int first_token, int end_token) {
  const int token = first_token % 64 + 64 * slot;
  return make_int4(token, 0, token < first_token ? 0 : max(0, min(64, end_token - token)), 0);
}

}  // namespace qla::cuda::intra
