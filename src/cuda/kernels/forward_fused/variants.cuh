// One variant of the fused forward: attributes and launch. Included by one .cu each.
#pragma once

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/forward_fused/kernel.cuh"
#include "cuda/kernels/forward_fused/variants.hpp"

namespace qla::cuda {

template <typename T, bool Norm, bool Save, bool Cut>
cudaError_t prepare_fused_type() {
  return cudaFuncSetAttribute(gdn_forward_fused<T, Norm, Save, Cut>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              FusedConfig::kSmemBytes);
}

template <typename T, bool Norm, bool Save, bool Cut>
cudaError_t launch_fused_type(const FusedArgs& args, int grid, cudaStream_t stream) {
  return launch_dependent(gdn_forward_fused<T, Norm, Save, Cut>, grid, FusedConfig::kThreads, FusedConfig::kSmemBytes,
                          args.p.dependent, stream, args);
}

}  // namespace qla::cuda
