// chunk_grads - gradients of one chunk of one q/k head and all its value heads from S, Delta, dS+, dR.   Computes (B5)-(B11), no
// recurrence.
//   grid: persistent; item = (chunk slot, q/k head). q-k normalisation: raw Q, K are the operands, the norms ride on the row
//   factors; dq, dk of the raw rows: u - r^2 x <x, u>, where u = r * (gradient of the normalised row), once at the store.
//
// clang-format off
// Roles      warps  regs  owns                       per value head (Q K^T | K K^T once an item, kept in registers)
//   query    0-3    224   dQ 64 x 128 fp32           dQ += q_scale (dO S^T), a_i of q; J, scores -> M = dP with norms; dQ += M K
//   key      4-7    224   dK 64 x 128 fp32           dK += -k_scale (dR S^T) + e_scale (Delta dS+^T), a_i, e'_i of k; Z,
//                                                    scores -> X + X^T; dK += (X + X^T) K + M^T Q
//   dot      8-9    56    -                          <S, dS+>; beside the product warps that have the fewest blocks
//   finish   10     56    -                          (B11) and (B10) from the parts of the others, stores dg, dbeta
//   load     11     56    -                          issues all loads, waits for places in the order in which they come free
// All code of a head is meant to stay in the instruction cache (decision 0078): before adding to it, read there.
//
// Edges              from -> to                   count        guards
//   kq[2]            load -> query, key           1 + tx / 2   s_kq[stage]: K, Q of an item; dQ, dK in them have left (one thread each)
//   first[2]         load -> key                  1 + tx       dR of a head, asked for before the others (left with them)
//   token[2]         load -> query, key           1 + tx / 8   dO, Delta of a head; all three tiles are left
//   state[2]         load -> query, key, dot      1 + tx / 10  s_state[stage]: half of S
//   d_state[2]       load -> key, dot             1 + tx / 6   s_d_state[stage]: half of dS+
//   vec[2]           load -> query, key, finish   1 + tx / 9   s_vec[stage]
//   m                query -> query, key          4 / 8        s_m; left: s_x, too
//   x                key -> key                   4 / -        s_x
//   part[2]          query, key, dot -> finish    10 / 1       s_part[stage]
//   (full count / empty count, in warps)
//   named 1          query <-> key                256          rows of K, Q past the end are zeroed (tail chunks alone); K, Q have been read
//   named 2 / 3      query / key                  128          rows of dO / dR are zeroed; dQ / dK lie in Q / K
//
// SMEM            KiB  stages    life: one value head unless said otherwise
//   s_kq           64   2 x 32   K, Q panels (64 columns each): an item; then dK, dQ, until they have been copied out
//   s_token        64   4 x 16   a ring: dR: dR S^T, Z; dO: dO S^T, J; Delta: J, Delta dS+^T, Z. Three are free after J and Z: for dO,
//                                Delta of the next head and dR of the one after it
//   s_state        32   2 x 16   S, v < 64 / v >= 64: dO S^T, dR S^T, dot
//   s_d_state      32   2 x 16   dS+, the same: Delta dS+^T, dot
//   s_m             8   1        M: query's scores -> left operand, and key's M^T; zero above the diagonal blocks
//   s_x             8   1        X + X^T: key's scores -> left operand
//   s_vec           4   2        gate vectors
//   s_part          8   2        parts of dg, dbeta
//   total         220   of 227
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
