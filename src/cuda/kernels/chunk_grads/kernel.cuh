// chunk_grads - gradients of one chunk of one q/k head and all its value heads from S, Delta, dS+, dR.   Computes (B5)-(B11), no
// recurrence.
//   grid: persistent; item = (chunk slot, q/k head). q-k normalisation: raw Q, K are the operands, the norms ride on the row
//   factors; dq, dk of the raw rows: u - r^2 x <x, u>, where u = r * (gradient of the normalised row), once at the store.
//
// clang-format off
// Roles      warps  regs  owns                       per value head
//   query    0-3    224   dQ 64 x 128 fp32           dQ += q_scale (dO S^T), a_i of q; J, Q K^T, scores -> M = dP with norms;
//                                                    dQ += M K
//   key      4-7    224   dK 64 x 128 fp32           dK += -k_scale (dR S^T) + e_scale (Delta dS+^T), a_i, e'_i of k; Z, K K^T,
//                                                    scores -> X; dK += (X + X^T) K + M^T Q
//   dot      8-9    56    -                          <S, dS+>; beside the product warps that have the fewest blocks
//   load     10     56    -                          issues all loads but K, Q
//   finish   11     56    -                          (B11) and (B10) from the parts of the others, stores dg, dbeta; loads K, Q
//                                                    of the next item
//
// Edges              from -> to                   count        guards
//   kq               finish -> query, key         1 + tx / 8   s_kq: K, Q of an item
//   token[2]         load -> query, key           1 + tx / 8   s_token[stage]: Delta, dO, dR of a value head
//   state[2]         load -> query, key, dot      1 + tx / 10  s_state[stage]: half of S
//   d_state[2]       load -> key, dot             1 + tx / 6   s_d_state[stage]: half of dS+
//   vec[2]           load -> query, key, finish   1 + tx / 9   s_vec[stage]
//   m                query -> key                 4 / 4        s_m
//   part[2]          query, key, dot -> finish    10 / 1       s_part[stage]
//   (full count / empty count, in warps)
//   named 1          query <-> key                256          rows of K, Q past the end are zeroed (tail chunks alone)
//   named 2 / 3      query / key                  128          rows of dO / dR are zeroed; 3 also: X is written, X has been read
//
// SMEM            KiB  stages    life: one value head unless said otherwise
//   s_kq           32   1        K, Q panels (64 columns each): an item; the next item's products with S start without them
//   s_token        96   2 x 48   Delta: J, Delta dS+^T, Z; dO: J, dO S^T; dR: dR S^T, Z. All free after Z; the next head's are there by then
//   s_state        32   2 x 16   S, v < 64 / v >= 64: dO S^T, dR S^T, dot
//   s_d_state      32   2 x 16   dS+, the same: Delta dS+^T, dot
//   s_m             8   1        M: query's scores -> key's M^T operand
//   s_x             8   1        X: key's scores -> key's X^T operand
//   s_vec           4   2        gate vectors
//   s_part         10   2        parts of dg, dbeta
//   total         222   of 227
// clang-format on
#pragma once

#include "cuda/kernels/chunk_grads/role_aux.cuh"
#include "cuda/kernels/chunk_grads/role_product.cuh"
#include "cuda/ptx/control.cuh"

namespace qla::cuda::chunk_grads {

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    chunk_grads_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t raw_smem[];
  const uint32_t base = ptx::shared_address(raw_smem);
  const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);  // the compiler knows that it is the same in all lanes
  Lane w{base, warp % 4, int(threadIdx.x % 32), 0};
  if (threadIdx.x == 0) init_barriers(w);
  for (uint32_t i = threadIdx.x; i < sizeof(Smem::m) / 16; i += kThreads)  // above the diagonal M stays zero
    ptx::sts4u(base + offsetof(Smem, m) + i * 16, 0, 0, 0, 0);
  ptx::proxy_fence();
  __syncthreads();
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();  // from here on what earlier kernels wrote is read
  if (warp < 8) {
    ptx::setmaxnreg_inc<kRegsProduct>();
    product_role<T>(p, maps, w, __any_sync(~0u, warp >= 4));
  } else {
    ptx::setmaxnreg_dec<kRegsAux>();
    if (warp == 11) {
      if (w.lane == 0) load_role(p, maps, w);
    } else if (warp == 10) {
      finish_role<T>(p, w);
    } else {
      w.warp = warp - 8;
      dot_role<T>(p, w);
    }
  }
}

}  // namespace qla::cuda::chunk_grads
