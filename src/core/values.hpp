// Rules on values: boundaries and state indices, in host memory. src/api applies them to CPU calls; the CUDA backend, when asked
// to (Problem::validate_values), to a host copy.
#pragma once

#include <cstdint>

#include "qla/qla.h"

namespace qla {

// One element of a contiguous 1-D int32 or int64 tensor in host memory.
inline int64_t index_at(const qla_tensor& t, int64_t i) {
  return t.dtype == QLA_INT64 ? static_cast<const int64_t*>(t.data)[i] : static_cast<const int32_t*>(t.data)[i];
}

// cu_seqlens: starts at 0, never descends, ends at or before `tokens`. Throws qla::Error.
void check_boundaries(const qla_tensor& cu_seqlens, int64_t tokens);

// state_indices: -1 or a slot of the pool, and no slot twice (it would be written by two sequences).
void check_state_indices(const qla_tensor& state_indices, int64_t pool_slots);

}  // namespace qla
