// Tensor maps of token tensors: how the kernels' tensor copies see q, k, v, o and their gradients.
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

// "" or why TMA cannot address the tensor: base and strides must be multiples of 16 bytes, positive and below 2^40 bytes.
const char* token_map_obstacle(const TokenMapShape& shape);

}  // namespace qla::cuda
