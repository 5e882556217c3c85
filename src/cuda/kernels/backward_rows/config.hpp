// backward_rows: arguments of the small kernels around the backward. Host- and device-includable.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"

namespace qla::cuda::backward_rows {

// [B, T, H, width] or, with width 1, [B, T, H]: any float type and strides in elements; data = nullptr: absent
struct View {
  void* data = nullptr;
  int32_t dtype = 0;
  int32_t heads = 0, width = 1;
  int64_t stride[4] = {0, 0, 0, 1};
};

struct CopyArgs {  // to = from, rounded to its type; from absent: zeros
  View from, to;   // the same heads and width (a multiple of 8)
  int64_t batch, tokens;
};

inline constexpr int kMostViews = 5;
struct PaddingArgs {  // rows from header->end_token on become 0
  const PlanHeader* header;
  int64_t tokens;
  View views[kMostViews];
};

struct ReduceArgs {           // dA_log, ddt_bias: sums over the chunks, in a fixed order
  const float* partials;      // [slots][HV][2]
  const ChunkRecord* chunks;  // [slots]; unused slots have no partials
  int32_t slots, num_v_heads;
  View d_a_log, d_dt_bias;  // [HV]: stride[2]
};

}  // namespace qla::cuda::backward_rows
