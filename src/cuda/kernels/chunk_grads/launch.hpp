// Launch of chunk_grads: gradients of the chunks of slots first_slot .. first_slot + num_slots - 1.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/kernels/chunk_grads/config.hpp"

namespace qla::cuda::chunk_grads {

// maps: token maps (tensor_map.hpp) of k, q, d_o and d_v, the last three and dtype (QLA_BFLOAT16 or QLA_FLOAT16) of one element
// type
cudaError_t launch(const CUtensorMap& k, const CUtensorMap& q, const CUtensorMap& d_o, const CUtensorMap& d_v,
                   const Params& params, int32_t dtype, int multiprocessors, cudaStream_t stream);
cudaError_t prepare();  // attributes of the current device

}  // namespace qla::cuda::chunk_grads
