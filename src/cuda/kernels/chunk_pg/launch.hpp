// chunk_pg: launch. Maps: token maps of q and k (tensor_map.hpp).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/kernels/chunk_pg/config.hpp"

namespace qla::cuda::chunk_pg {

cudaError_t prepare();  // attributes of the current device
// pairs: of CTAs, a multiprocessor each; fewer where there are fewer items. dtype: QLA_BFLOAT16 or QLA_FLOAT16
cudaError_t launch(const CUtensorMap& map_k, const CUtensorMap& map_q, const Args& args, int pairs, int32_t dtype,
                   cudaStream_t stream);

}  // namespace qla::cuda::chunk_pg
