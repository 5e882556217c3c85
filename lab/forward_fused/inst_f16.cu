#include "variants.cuh"

namespace qla::cuda {
template cudaError_t prepare_forward_type<__half>();
template cudaError_t launch_forward_type<__half>(const ForwardArgs&, int, cudaStream_t);
}  // namespace qla::cuda
