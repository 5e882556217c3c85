// Gradients of the rows past the last sequence become 0: by a kernel of its own, or by chunk_grads on its way out.
#pragma once

#include "cuda/kernels/backward_rows/config.hpp"
#include "cuda/tile/pack.cuh"
#include "qla/qla.h"

namespace qla::cuda::backward_rows {

__device__ __forceinline__ void store(const View& v, int64_t at, float x) {
  switch (v.dtype) {
    case QLA_FLOAT64:
      static_cast<double*>(v.data)[at] = x;
      break;
    case QLA_FLOAT32:
      static_cast<float*>(v.data)[at] = x;
      break;
    case QLA_BFLOAT16:
      static_cast<__nv_bfloat16*>(v.data)[at] = __float2bfloat16_rn(x);
      break;
    default:
      static_cast<__half*>(v.data)[at] = __float2half_rn(x);
  }
}

// `warps` warps a CTA; a warp: a row of one head after the other
__device__ __forceinline__ void zero_padding_rows(const PaddingArgs& a, int warp, int warps, int lane) {
  for (int64_t token = a.header->end_token + blockIdx.x; token < a.tokens; token += gridDim.x)
#pragma unroll 1
    for (int v = 0; v < kMostViews; v++) {
      const View& view = a.views[v];
      if (view.data == nullptr) continue;
      for (int head = warp; head < view.heads; head += warps)
        for (int e = lane; e < view.width; e += 32)
          store(view, token * view.stride[1] + head * view.stride[2] + e * view.stride[3], 0.f);
    }
}

}  // namespace qla::cuda::backward_rows
