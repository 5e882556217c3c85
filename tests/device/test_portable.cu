// The cases of test_forward on the mma.sync policy (kernels/portable): the recurrence is written once, its products are a policy.
// What the portable body has not (snapshots, checkpoints, the fused form) runs on the usual kernel.
#include "cuda/kernels/forward/launch.hpp"
#include "cuda/kernels/portable/portable.hpp"

#include <stdexcept>

static void launch_portable(const qla::cuda::ForwardParams& params, int multiprocessors, cudaStream_t stream) {
  if (params.h.data || params.checkpoints.data || params.fused) return qla::cuda::launch_forward(params, multiprocessors, stream);
  if (qla::cuda::portable::launch(params, multiprocessors, stream) != cudaSuccess) throw std::runtime_error("portable launch");
}
#define launch_forward launch_portable
#include "test_forward.cu"
