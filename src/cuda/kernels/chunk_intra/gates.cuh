// Loading and decoding of gate and beta: any float dtype and strides, raw gate, sigmoid (F0).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/chunk_intra/config.hpp"
#include "cuda/math/exp.cuh"
#include "cuda/ptx/shared.cuh"
#include "qla/qla.h"

namespace qla::cuda::intra {

// Element `offset` of a view into an 8-byte slot of shared memory, without passing through registers: a value that is awaited in
// a register would be waited for at the next fence. Of a 16-bit type the aligned word that holds it (and not what follows a last
// one).
__device__ __forceinline__ void copy_element(uint32_t slot, const View& view, int64_t offset) {
  const char* p = static_cast<const char*>(view.data);
  if (view.dtype == QLA_FLOAT32) {
    ptx::cp_async<4>(slot, p + offset * 4);
  } else if (view.dtype == QLA_FLOAT64) {
    ptx::cp_async<8>(slot, p + offset * 8);
  } else {
    const uintptr_t at = reinterpret_cast<uintptr_t>(p) + offset * 2;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(slot), "l"(at & ~uintptr_t(3)), "r"(at & 2 ? 4 : 2)
                 : "memory");
  }
}
// the value of a slot; odd: bit 0 of (address / 2) of the element
__device__ __forceinline__ float decode(uint32_t low, uint32_t high, int32_t dtype, bool odd) {
  if (dtype == QLA_FLOAT32) return __uint_as_float(low);
  if (dtype == QLA_FLOAT64) return float(__hiloint2double(int(high), int(low)));
  const uint32_t bits = odd ? low >> 16 : low & 0xffff;
  return dtype == QLA_BFLOAT16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(uint16_t(bits)));
}
__device__ __forceinline__ float load_element(const View& view, int64_t offset) {
  if (view.dtype == QLA_FLOAT32) return static_cast<const float*>(view.data)[offset];
  if (view.dtype == QLA_FLOAT64) return float(static_cast<const double*>(view.data)[offset]);
  return decode(static_cast<const uint16_t*>(view.data)[offset], 0, view.dtype, false);
}

// log(1 + e^x); precise where it is small
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
// rate = exp(A_log), bias = dt_bias of the head
__device__ __forceinline__ float decode_gate(float x, uint32_t flags, float rate, float bias) {
  if (flags & QLA_FLAG_RAW_GATE) x = -rate * softplus(x + bias);
  return max_keep_nan(x, -88.f);  // (F0)
}
__device__ __forceinline__ float decode_beta(float x, uint32_t flags) {
  if (flags & QLA_FLAG_BETA_SIGMOID) x = __fdividef(flags & QLA_FLAG_NEG_EIGVAL ? 2.f : 1.f, 1.f + expf(-x));
  return x;
}

}  // namespace qla::cuda::intra
