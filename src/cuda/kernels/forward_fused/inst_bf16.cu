#include "cuda/kernels/forward_fused/variants.cuh"

namespace qla::cuda {
template cudaError_t prepare_fused_type<__nv_bfloat16>();
template cudaError_t launch_fused_type<__nv_bfloat16>(const ForwardArgs&, int, cudaStream_t);
}  // namespace qla::cuda
