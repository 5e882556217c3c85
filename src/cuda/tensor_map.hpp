// Tensor maps: how the kernels' tensor copies see q, k, v, o, their gradients, and initial states.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace qla::cuda {

// A [batch, tokens, heads, 128] tensor of 16-bit elements; strides in elements, the last dimension contiguous.
struct TokenMapShape {
  const void* data = nullptr;
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
  int64_t batch = 0, tokens = 0, heads = 0;
  int32_t box_tokens = 64;
};

// dims {128, heads, tokens, batch}, box {64, 1, box_tokens, 1}, 128-byte swizzle: one copy is a 64-column panel of 64 tokens
// (8 KiB).
// Coordinates (column, head, token of the batch row, batch row). Throws Error naming `name` and all fields when the driver
// refuses.
CUtensorMap make_token_map(const TokenMapShape& shape, bool bf16, const char* name);

// States [states, heads, 128, 128] of fp32, each in one piece; strides in elements.
struct StateMapShape {
  const void* data = nullptr;
  int64_t stride_n = 0, stride_h = 0;
  int64_t states = 0, heads = 0;
  int32_t pitch = 128;  // in shared memory
};
// Whether TMA can address them.
bool has_state_map(const StateMapShape& shape);
// dims {128, 128, heads, states}, box {pitch, 64, 1, 1}: one copy is 64 rows, and `pitch` elements of shared memory a row; what
// lies past a row's end comes as zeros. Coordinates (column, row, head, state).
CUtensorMap make_state_map(const StateMapShape& shape, const char* name);

// "" or why TMA cannot address the tensor: base and strides must be multiples of 16 bytes, positive and below 2^40 bytes.
const char* token_map_obstacle(const TokenMapShape& shape);

}  // namespace qla::cuda
