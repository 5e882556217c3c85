// Kernel arguments, and the element types' entry points (defined in inst_*.cu).
#pragma once

#include "cuda/kernels/chunk_gates/config.hpp"
#include "cuda/kernels/forward/variants.hpp"
#include "cuda/kernels/plan_segments/config.hpp"

namespace qla::cuda {

// FusedArgs::direct: no kernel has been before, the item comes from the boundaries in `plan` and its gate vectors by `gates`
inline constexpr int32_t kDirect = 1, kDirectPlain = 2;  // plain: fp32 gate and beta, to be taken as they are

// 0: there is none; in one piece: fp32, and tensor copies can load it (FusedArgs::state)
inline constexpr int32_t kStateGiven = 1, kStateInOnePiece = 2;
constexpr bool in_one_piece(const StateView& x) {
  return x.dtype == QLA_FLOAT32 && ((x.stride_k == 128 && x.stride_v == 1) || (x.stride_k == 1 && x.stride_v == 128));
}

// Division by a number that the host knows, of numbers whose product with it is below 2^32: a real one is a KiB of code, and no
// code is in a cache when a kernel begins.
constexpr uint32_t divisor_of(int by) { return by == 1 ? 0 : uint32_t((uint64_t(1) << 32) / uint32_t(by)) + 1; }
#ifdef __CUDACC__
__device__ __forceinline__ int divided(int x, uint32_t by) { return by ? int(__umulhi(uint32_t(x), by)) : x; }
#endif

struct FusedArgs : ForwardArgs {
  int32_t direct;
  int32_t first_state;            // kState* of all initial states
  uint32_t by_v_heads, by_group;  // divisor_of() the value heads and those of a query/key head
  segments::Args plan;            // boundaries and sizes
  gates::Args gates;
  CUtensorMap state;  // initial states, if they are in one piece: 64 rows a copy, each padded (FusedConfig::state_pitch())
};

template <typename T, bool Norm, bool Save, bool Cut>
cudaError_t prepare_fused_type();
template <typename T, bool Norm, bool Save, bool Cut>
cudaError_t launch_fused_type(const FusedArgs& args, int grid, cudaStream_t stream);

}  // namespace qla::cuda
