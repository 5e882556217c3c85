#include "cuda/kernels/chunk_intra/launch.hpp"

#include <algorithm>
#include <numeric>

#include "cuda/dependent_launch.hpp"
#include "cuda/kernels/chunk_intra/kernel.cuh"

namespace qla::cuda::intra {
namespace {

template <typename T, bool WithPg, bool Gated>
cudaError_t set_attributes() {
  return cudaFuncSetAttribute(chunk_intra<T, WithPg, Gated>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
}

template <typename T, bool WithPg, bool Gated>
cudaError_t start(const CUtensorMap& map_k, const CUtensorMap& map_q, const Args& args, int multiprocessors, bool dependent,
                  cudaStream_t stream) {
  const Grid grid = grid_of(args, multiprocessors);
  if (grid.items == 0) return cudaSuccess;
  const int64_t per_slot = int64_t(args.num_k_heads) * args.parts, late = grid.late_from();
  int64_t ctas = grid.ctas;
  while (args.until && std::gcd(ctas, per_slot) > 1) ctas--;  // each CTA meets all heads in turn: few have anything to do
  Args sized = args;
  sized.step_slots = int32_t(ctas / per_slot);
  sized.step_rest = int32_t(ctas % per_slot);
  sized.early = args.direct || args.ahead;
  sized.spares_sums = args.ahead && !args.vec_backward;
  sized.late_slot = int32_t(late / per_slot);
  sized.late_rest = int32_t(late % per_slot);
  return launch_dependent(chunk_intra<T, WithPg, Gated>, unsigned(ctas + args.makes_plan), kThreads, kSmemBytes, dependent,
                          stream, map_k, map_q, sized);
}

}  // namespace

cudaError_t prepare() {
  for (cudaError_t status : {set_attributes<__nv_bfloat16, true, true>(), set_attributes<__nv_bfloat16, false, true>(),
                             set_attributes<__nv_bfloat16, false, false>(), set_attributes<__half, true, true>(),
                             set_attributes<__half, false, true>(), set_attributes<__half, false, false>()})
    if (status != cudaSuccess) return status;
  return cudaSuccess;
}

cudaError_t launch(int32_t dtype, const CUtensorMap& map_k, const CUtensorMap& map_q, const Args& args, int multiprocessors,
                   bool dependent, cudaStream_t stream) {
  const bool with_q = args.pg || args.vec_backward;  // backward wants the norms of q, too
  if (dtype == QLA_BFLOAT16)
    return with_q ? start<__nv_bfloat16, true, true>(map_k, map_q, args, multiprocessors, dependent, stream)
                  : start<__nv_bfloat16, false, true>(map_k, map_q, args, multiprocessors, dependent, stream);
  return with_q ? start<__half, true, true>(map_k, map_q, args, multiprocessors, dependent, stream)
                : start<__half, false, true>(map_k, map_q, args, multiprocessors, dependent, stream);
}

cudaError_t launch_ungated(int32_t dtype, const CUtensorMap& map_k, const Args& args, int multiprocessors, bool dependent,
                           cudaStream_t stream) {
  return dtype == QLA_BFLOAT16 ? start<__nv_bfloat16, false, false>(map_k, map_k, args, multiprocessors, dependent, stream)
                               : start<__half, false, false>(map_k, map_k, args, multiprocessors, dependent, stream);
}

}  // namespace qla::cuda::intra
