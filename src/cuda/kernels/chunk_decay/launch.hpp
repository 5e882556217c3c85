// chunk_decay: the sums of ghat (C4) that cutting looks at, ahead of the intra-chunk stage.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels/chunk_intra/config.hpp"

namespace qla::cuda::decay {

struct Args {
  intra::Args intra;    // chunk table, gates, flags, heads; decay
  const void* k;        // [B, T, H, 128], last dimension contiguous, rows 16-byte aligned
  int64_t stride_k[3];  // batch, token, head, in elements
};

// dependent: behind plan_segments by programmatic launch. What is launched next may read the chunk table at once.
cudaError_t launch(int32_t dtype, const Args& args, int multiprocessors, cudaStream_t stream);

}  // namespace qla::cuda::decay
