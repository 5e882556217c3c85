// Launch of backward_passes over p.num_items items of each kind.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/kernels/backward_passes/config.hpp"

namespace qla::cuda::backward_passes {

// token maps (tensor_map.hpp) of one element type, dtype = QLA_BFLOAT16 or QLA_FLOAT16
cudaError_t launch(const CUtensorMap& k, const CUtensorMap& q, const CUtensorMap& v, const CUtensorMap& d_o,
                   const CUtensorMap& dv, const Params& params, int32_t dtype, cudaStream_t stream);
cudaError_t prepare();  // attributes of the current device

}  // namespace qla::cuda::backward_passes
