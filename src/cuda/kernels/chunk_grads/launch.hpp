// Launch of chunk_grads: gradients of the chunks of slots first_slot .. first_slot + num_slots - 1.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/kernels/chunk_grads/config.hpp"

namespace qla::cuda::chunk_grads {

// maps: token maps (tensor_map.hpp) of k, q, d_o, d_v and, where their views say bulk, of dq and dk, all of one element type,
// dtype (QLA_BFLOAT16 or QLA_FLOAT16)
cudaError_t launch(const CUtensorMap& k, const CUtensorMap& q, const CUtensorMap& d_o, const CUtensorMap& d_v,
                   const CUtensorMap& dq, const CUtensorMap& dk, const Params& params, int32_t dtype, int multiprocessors,
                   cudaStream_t stream);
cudaError_t prepare();  // attributes of the current device

}  // namespace qla::cuda::chunk_grads
