// The recurrence of one chunk on fragments, (F4)-(F9) transposed: what forward, context parallelism's pre-pass and backward's
// state pass share.
//
// A state warpgroup owns 64 rows of S^T (64 value columns) as wgmma accumulators; on other targets each warp owns 16 of them as
// mma.sync accumulators, the same fragment layout (tile/fragment.cuh). The products are members of an Mma policy, so that a
// kernel reads
//     Mma::begin(); Mma::state_kq(acc, s, kq); Mma::commit(); .. Mma::wait();
// on every target. Between begin and wait nothing may touch the accumulators or the packed left operands.
//
// The state is two accumulators of 64 keys each, S[half][..]: its halves are updated, packed and used one behind the other, so
// that a lone warpgroup keeps the tensor cores busy (n64 products cost what one n128 does per column).
//
// Right operands in shared memory:
//   k, q    64 rows (tokens) of 128 in two 64-column panels, 128-byte swizzle; kPanelBytes is their distance: 16,384 where K and
//   Q alternate, else 8,192 a, pg   Abar and Pg: 5-KiB panels under standing zeros (formats.hpp); k16 step w is a 64-row operand
//   at 2,048 w, 32-byte swizzle
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/pack.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda {

template <typename T>
struct Wgmma {
  using Element = T;
  static __device__ __forceinline__ void begin() { ptx::wgmma_fence(); }
  static __device__ __forceinline__ void commit() { ptx::wgmma_commit(); }
  template <int Pending = 0>
  static __device__ __forceinline__ void wait() {
    ptx::wgmma_wait<Pending>();
  }
  // acc (+)= S^T X^T over k16 steps First .. Last - 1 of 8; X = K or Q
  template <int kPanelBytes, int First = 0, int Last = 8>
  static __device__ __forceinline__ void state_rows(float (&acc)[32], const uint32_t (&s)[32], uint32_t x) {
#pragma unroll
    for (int w = First; w < Last; w++)
      ptx::wgmma_rs<T, 0>(acc, s + 4 * w, descriptor_k_major(x + w / 4 * kPanelBytes + w % 4 * 32), w > 0);
  }
  // d (+)= x^T tile^T with a triangular tile (Abar or Pg)
  template <int Accumulate>
  static __device__ __forceinline__ void triangular(float (&d)[32], const uint32_t (&x)[16], uint32_t tile) {
#pragma unroll
    for (int w = 0; w < 4; w++) ptx::wgmma_rs<T, 0>(d, x + 4 * w, descriptor_k_major_32(tile + 2048 * w), Accumulate || w > 0);
  }
  // one half of S^T += E^T K
  template <int kPanelBytes, int Half>
  static __device__ __forceinline__ void update(float (&s)[32], const uint32_t (&e)[16], uint32_t k) {
#pragma unroll
    for (int w = 0; w < 4; w++)
      ptx::wgmma_rs<T, 1>(s, e + 4 * w, descriptor_mn_major(k + Half * kPanelBytes + 2048 * w, kPanelBytes), 1);
  }
};

// the two columns (tokens) 8 n + 2 (lane % 4), + 1 of a gate vector; `vec` already points at this lane's pair of it
__device__ __forceinline__ uint32_t vec_lane(uint32_t vec, int which, int lane) { return vec + which * 4 + lane % 4 * 8; }

// (F4) R^T = V^T - (K S)^T diag(k_scale), packed as the left operand of the next product
template <typename T>
__device__ __forceinline__ void residual(uint32_t (&r)[16], const uint32_t (&v)[16], const float (&ks)[32],
                                         const float2 (&c)[8]) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const float2 lo = unpack<T>(v[2 * n]), hi = unpack<T>(v[2 * n + 1]);
    r[2 * n] = pack<T>(lo.x - c[n].x * ks[4 * n], lo.y - c[n].y * ks[4 * n + 1]);
    r[2 * n + 1] = pack<T>(hi.x - c[n].x * ks[4 * n + 2], hi.y - c[n].y * ks[4 * n + 3]);
  }
}
// (F8) E^T = Delta^T diag(e_scale)
template <typename T>
__device__ __forceinline__ void scaled_operand(uint32_t (&e)[16], const float (&delta)[32], const float2 (&c)[8]) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    e[2 * n] = pack<T>(delta[4 * n] * c[n].x, delta[4 * n + 1] * c[n].y);
    e[2 * n + 1] = pack<T>(delta[4 * n + 2] * c[n].x, delta[4 * n + 3] * c[n].y);
  }
}
// d diag(c), c read from a gate vector on the way
__device__ __forceinline__ void scale_columns(float (&d)[32], uint32_t vec) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const float2 c = ptx::lds2(vec + 32 * n);
    d[4 * n] *= c.x;
    d[4 * n + 1] *= c.y;
    d[4 * n + 2] *= c.x;
    d[4 * n + 3] *= c.y;
  }
}
// half of S^T as the left operand of the next chunk's first products
template <typename T, int Half>
__device__ __forceinline__ void pack_state(uint32_t (&a)[32], const float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 16; i++) a[16 * Half + i] = pack<T>(s[2 * i], s[2 * i + 1]);
}
__device__ __forceinline__ void load_columns(float2 (&c)[8], uint32_t vec) {
#pragma unroll
  for (int n = 0; n < 8; n++) c[n] = ptx::lds2(vec + 32 * n);
}

// ---- the state in registers <-> any float type and strides in memory. Once a segment, so plain loads and stores: with either
// layout a warp's access covers whole 32-byte sectors.
struct StateAddress {
  void* data;     // element (v = 0, k = 0) of one head's state
  int32_t dtype;  // QLA_*
  int64_t stride_k, stride_v;
};

template <typename M>
__device__ __forceinline__ void load_state_as(float (&s)[2][32], const StateAddress& a, int v0, int lane) {
  const M* p = static_cast<const M*>(a.data) + (v0 + lane / 4) * a.stride_v + lane % 4 * 2 * a.stride_k;
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int c = 0; c < 2; c++) s[n / 8][4 * (n % 8) + 2 * h + c] = to_float(p[(8 * n + c) * a.stride_k + 8 * h * a.stride_v]);
}
template <typename M>
__device__ __forceinline__ void store_state_as(const float (&s)[2][32], const StateAddress& a, int v0, int lane) {
  M* p = static_cast<M*>(a.data) + (v0 + lane / 4) * a.stride_v + lane % 4 * 2 * a.stride_k;
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        p[(8 * n + c) * a.stride_k + 8 * h * a.stride_v] = from_float<M>(s[n / 8][4 * (n % 8) + 2 * h + c]);
}
// The two layouts of a contiguous fp32 state, by constant strides: the general form is 7 KiB of code, and these 2.
template <int StrideK, int StrideV>
__device__ __forceinline__ bool contiguous(const StateAddress& a) {
  return a.dtype == 1 && a.stride_k == StrideK && a.stride_v == StrideV && reinterpret_cast<uintptr_t>(a.data) % 8 == 0;
}
template <int StrideK, int StrideV>
__device__ __forceinline__ void load_contiguous(float (&s)[2][32], const StateAddress& a, int v0, int lane) {
  const float* p = static_cast<const float*>(a.data) + (v0 + lane / 4) * StrideV + lane % 4 * 2 * StrideK;
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const float* x = p + 8 * (i / 4) * StrideK + i / 2 % 2 * 8 * StrideV;
    if constexpr (StrideK == 1) {
      const float2 pair = *reinterpret_cast<const float2*>(x);
      s[i / 32][i % 32] = pair.x, s[i / 32][i % 32 + 1] = pair.y;
    } else {
      s[i / 32][i % 32] = x[0], s[i / 32][i % 32 + 1] = x[StrideK];
    }
  }
}
template <int StrideK, int StrideV>
__device__ __forceinline__ void store_contiguous(const float (&s)[2][32], const StateAddress& a, int v0, int lane) {
  float* p = static_cast<float*>(a.data) + (v0 + lane / 4) * StrideV + lane % 4 * 2 * StrideK;
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    float* x = p + 8 * (i / 4) * StrideK + i / 2 % 2 * 8 * StrideV;
    if constexpr (StrideK == 1)
      *reinterpret_cast<float2*>(x) = make_float2(s[i / 32][i % 32], s[i / 32][i % 32 + 1]);
    else
      x[0] = s[i / 32][i % 32], x[StrideK] = s[i / 32][i % 32 + 1];
  }
}
// v0: first of the warp's 16 value columns
__device__ __forceinline__ void load_state(float (&s)[2][32], const StateAddress& a, int v0, int lane) {
  if (contiguous<128, 1>(a)) return load_contiguous<128, 1>(s, a, v0, lane);
  if (contiguous<1, 128>(a)) return load_contiguous<1, 128>(s, a, v0, lane);
  switch (a.dtype) {
    case 0:
      load_state_as<double>(s, a, v0, lane);
      break;
    case 1:
      load_state_as<float>(s, a, v0, lane);
      break;
    case 2:
      load_state_as<__nv_bfloat16>(s, a, v0, lane);
      break;
    default:
      load_state_as<__half>(s, a, v0, lane);
      break;
  }
}
__device__ __forceinline__ void store_state(const float (&s)[2][32], const StateAddress& a, int v0, int lane) {
  if (contiguous<128, 1>(a)) return store_contiguous<128, 1>(s, a, v0, lane);
  if (contiguous<1, 128>(a)) return store_contiguous<1, 128>(s, a, v0, lane);
  switch (a.dtype) {
    case 0:
      store_state_as<double>(s, a, v0, lane);
      break;
    case 1:
      store_state_as<float>(s, a, v0, lane);
      break;
    case 2:
      store_state_as<__nv_bfloat16>(s, a, v0, lane);
      break;
    default:
      store_state_as<__half>(s, a, v0, lane);
      break;
  }
}

}  // namespace qla::cuda
