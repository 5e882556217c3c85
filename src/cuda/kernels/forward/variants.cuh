// The variants of one element type: attributes and launches. Included by one .cu an element type, so that they compile side by
// side.
#pragma once

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/forward/kernel.cuh"
#include "cuda/kernels/forward/variants.hpp"

namespace qla::cuda {

template <class Cfg, class Mma>
cudaError_t prepare_variant() {
  return cudaFuncSetAttribute(gdn_forward<Cfg, Mma>, cudaFuncAttributeMaxDynamicSharedMemorySize, Cfg::kSmemBytes);
}

template <class Cfg, class Mma>
cudaError_t launch_variant(const ForwardArgs& args, int grid, cudaStream_t stream) {
  return launch_dependent(gdn_forward<Cfg, Mma>, grid, Cfg::kThreads, Cfg::kSmemBytes, args.p.dependent, stream, args);
}

template <typename T>
cudaError_t prepare_forward_type() {
  cudaError_t e = prepare_variant<ForwardConfig<2, true>, Wgmma<T>>();
  if (!e) e = prepare_variant<ForwardConfig<1, true>, Wgmma<T>>();
  if (!e) e = prepare_variant<ForwardConfig<2, false>, Wgmma<T>>();
  if (!e) e = prepare_variant<ForwardConfig<1, false>, Wgmma<T>>();
  return e;
}

template <typename T>
cudaError_t launch_forward_type(const ForwardArgs& args, int grid, cudaStream_t stream) {
  const bool split = args.p.v_parts == 2;
  if (args.p.output)
    return split ? launch_variant<ForwardConfig<1, true>, Wgmma<T>>(args, grid, stream)
                 : launch_variant<ForwardConfig<2, true>, Wgmma<T>>(args, grid, stream);
  return split ? launch_variant<ForwardConfig<1, false>, Wgmma<T>>(args, grid, stream)
               : launch_variant<ForwardConfig<2, false>, Wgmma<T>>(args, grid, stream);
}

}  // namespace qla::cuda
