// chunk_intra: launches. Maps: tensor_map() of q and k, box 64 columns x 1 head x 64 tokens x 1 batch row.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/kernels/chunk_intra/config.hpp"

namespace qla::cuda::intra {

// Once a device (prepare): function attributes. dtype: QLA_BFLOAT16 or QLA_FLOAT16
cudaError_t prepare();
// args.pg == nullptr: Abar and vectors only. dependent: the kernel before in the stream is of our chain (programmatic launch)
cudaError_t launch(int32_t dtype, const CUtensorMap& map_k, const CUtensorMap& map_q, const Args& args, int multiprocessors,
                   bool dependent, cudaStream_t stream);
// (F2) into args.a_inv
cudaError_t launch_ungated(int32_t dtype, const CUtensorMap& map_k, const Args& args, int multiprocessors, bool dependent,
                           cudaStream_t stream);

}  // namespace qla::cuda::intra
