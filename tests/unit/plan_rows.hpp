// Rows of the published grid, as the planner sees them.
#pragma once

#include "plan/choose.hpp"

namespace qla::plan {

inline Shape shape_of_row(int64_t tokens, int64_t seqs, int64_t k_heads, int64_t v_heads) {
  Shape shape;
  shape.total_tokens = tokens;
  shape.num_seqs = seqs;
  shape.num_v_heads = v_heads;
  shape.group = v_heads / k_heads;
  shape.equal_lengths = seqs == 1;
  return shape;
}

}  // namespace qla::plan
