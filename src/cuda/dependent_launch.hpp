// How the kernels that wait for each other are launched.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace qla::cuda {

// dependent: programmatic dependent launch - the kernel may begin while what is before it in the stream still ends, and waits
// with griddepcontrol.wait where it needs its results.
template <class... Params>
cudaError_t launch_dependent(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes, bool dependent,
                             cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace qla::cuda
