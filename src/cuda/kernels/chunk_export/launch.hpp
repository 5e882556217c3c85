// chunk_export: the optional outputs of the intra-chunk stage in the caller's layout, from tiles and vector records.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/formats.hpp"

namespace qla::cuda::chunk_export {

struct Output {  // data == nullptr: not asked for
  void* data;
  int64_t stride[4];  // batch, token, head, column
};
struct Args {
  const PlanHeader* header;
  const ChunkRecord* chunk_table;
  int64_t tokens, total_tokens;  // of a batch row, of all
  int32_t slots, varlen, num_k_heads, num_v_heads;
  const uint8_t* abar;
  const float* vec;
  Output a_gated;           // [B, T, HV, 64] 16-bit (F3)
  Output g_cumsum;          // [B, T, HV] fp32 (F1)
  Output q_rnorm, k_rnorm;  // [B, T, H] fp32
};
cudaError_t launch(const Args& args, int multiprocessors, bool dependent, cudaStream_t stream);

// rows of a_inv behind the last sequence are the caller's concern: zeroed here, as those of the others are by launch
cudaError_t launch_zero_padding(const PlanHeader* header, const Output& a_inv, int64_t total_tokens, int32_t num_v_heads,
                                cudaStream_t stream);

}  // namespace qla::cuda::chunk_export
