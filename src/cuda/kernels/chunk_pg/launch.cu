#include "cuda/kernels/chunk_pg/launch.hpp"

#include <algorithm>

#include "cuda/kernels/chunk_pg/kernel.cuh"
#include "qla/qla.h"

namespace qla::cuda::chunk_pg {

cudaError_t prepare() {
  const cudaError_t e = cudaFuncSetAttribute(chunk_pg<__nv_bfloat16>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  return e != cudaSuccess ? e : cudaFuncSetAttribute(chunk_pg<__half>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
}

cudaError_t launch(const CUtensorMap& map_k, const CUtensorMap& map_q, const Args& args, int pairs, int32_t dtype,
                   cudaStream_t stream) {
  Args sized = args;
  sized.parts = (args.group + kHeads - 1) / kHeads;
  sized.per = (args.group + sized.parts - 1) / sized.parts;
  const int64_t items = int64_t(args.slots) * args.num_k_heads * sized.parts, a_pair = 2 * kWorkers;
  if (items == 0) return cudaSuccess;
  // pairs as clusters, so that pairs are left to the next kernel; and both launches depend programmatically
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(2 * std::min<int64_t>(pairs, (items + a_pair - 1) / a_pair)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSmemBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, dtype == QLA_BFLOAT16 ? chunk_pg<__nv_bfloat16> : chunk_pg<__half>, map_k, map_q, sized);
}

}  // namespace qla::cuda::chunk_pg
