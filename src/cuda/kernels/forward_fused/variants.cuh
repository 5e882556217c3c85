// One element type of the fused forward: attributes and launch. Included by one .cu an element type.
#pragma once

#include "cuda/kernels/forward_fused/kernel.cuh"
#include "cuda/kernels/forward_fused/variants.hpp"

namespace qla::cuda {

template <typename T>
cudaError_t prepare_fused_type() {
  return cudaFuncSetAttribute(gdn_forward_fused<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, FusedConfig::kSmemBytes);
}

template <typename T>
cudaError_t launch_fused_type(const ForwardArgs& args, int grid, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(FusedConfig::kThreads);
  config.dynamicSmemBytes = FusedConfig::kSmemBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = args.p.dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, gdn_forward_fused<T>, args);
}

}  // namespace qla::cuda
