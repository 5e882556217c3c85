// The accumulator fragment of wgmma m64nN (a warp's 16 rows of it: also that of mma.sync m16n8) and its use as a left operand.
//   d[4 n + 2 h + c] = D[16 warp + lane / 4 + 8 h][8 n + 2 (lane % 4) + c]      n = 0 .. N / 8 - 1, h and c = 0, 1
// The left operand of k16 step kk is a[0..3] with a[2 m + h] = row half h, columns 16 kk + 8 m + 2 (lane % 4) (+ 1): that is the
// packed accumulator, in order. So a product's result becomes the next one's left operand inside the thread.
#pragma once

#include <cstdint>

#include "cuda/ptx/matrix.cuh"
#include "cuda/tile/pack.cuh"
#include "cuda/tile/swizzle.cuh"

namespace qla::cuda {

__device__ __forceinline__ int fragment_row(int warp, int lane) { return 16 * warp + lane / 4; }  // and + 8
__device__ __forceinline__ int fragment_col(int lane) { return lane % 4 * 2; }                    // + 8 n (+ 1)

// accumulator -> left operand: registers 4 kk .. 4 kk + 3 belong to k16 step kk
template <typename T, int Regs>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[Regs / 2], const float (&d)[Regs]) {
#pragma unroll
  for (int i = 0; i < Regs / 2; i++) a[i] = pack<T>(d[2 * i], d[2 * i + 1]);
}

// Transposed access to a token-major tile [rows][.] in 128-byte-swizzled 64-column panels: the address for this lane of a .trans
// x4 form that moves the 16 (columns, from col0: rows of the fragment) x 16 (tokens, from row0) block of the fragment:
// registers in the order a[0..3] of one k16 step. `rows` = rows of the tile.
__device__ __forceinline__ uint32_t transposed_lane(uint32_t tile, int row0, int col0, int rows, int lane) {
  return tile + panel_address(row0 + lane / 16 * 8 + lane % 8, col0 + lane / 8 % 2 * 8, rows);
}
// V^T as a left operand (or O^T as accumulator, packed) of 16 value columns from col0 and tokens row0 .. row0 + 15
__device__ __forceinline__ void load_transposed(uint32_t (&a)[4], uint32_t tile, int row0, int col0, int rows, int lane) {
  ptx::ldmatrix_x4_trans(transposed_lane(tile, row0, col0, rows, lane), a[0], a[1], a[2], a[3]);
}

}  // namespace qla::cuda
