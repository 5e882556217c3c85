#include "cuda/kernels/forward_fused/variants.cuh"

namespace qla::cuda {
template cudaError_t prepare_fused_type<__half, true, true, false>();
template cudaError_t launch_fused_type<__half, true, true, false>(const FusedArgs&, int, cudaStream_t);
}  // namespace qla::cuda
