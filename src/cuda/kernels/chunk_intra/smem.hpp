// chunk_intra: what lies where in a CTA's shared memory. Host- and device-includable.
#pragma once

#include "cuda/kernels/chunk_intra/config.hpp"

namespace qla::cuda::intra {

inline constexpr int kThreads = 256;  // two warpgroups: scores, inverses

// Lower 16 x 16 blocks of K K^T as fp32 accumulator fragments, for all heads' warps to read: block (b, w) at fragment_block(b,
// w), in it float4 n8 = 0, 1 of every lane (fragment.cuh).
inline constexpr int kFragmentBytes = 1024;
constexpr int fragment_block(int b, int w) { return (b * (b + 1) / 2 + w) * kFragmentBytes; }

// Items whose inverses may be under way at once: places of s_kk and s_norm. Without Q and Pg there is room for one a warp.
constexpr int places(bool with_q) { return with_q ? 2 : 4; }
inline constexpr int kMostPlaces = places(false), kItems = 2 * kMostPlaces;

// What the warps of a head share, floats, each vector in the order of place():
//   cumsum (base 2) [64], beta [64]
//   - exp2(c_i - c_ref(i)) [64], ref(i) = 16 (i / 16); ungated: - beta_i
//   exp2(c_16b - c_j) beta_j, j < 16 b, for b = 1, 2, 3; ungated: 1
//   whether those two factors serve: 0, or 1 where gates grow so much that one of them might overflow
inline constexpr int kHeadCum = 0, kHeadBeta = 64, kHeadRow = 128, kHeadColumn = 192, kHeadGrows = 288, kHeadFloats = 296;
constexpr int head_column(int b) { return kHeadColumn + 8 * b * (b - 1); }  // of row block b
// Element i of a vector: a lane's four columns of a fragment, 2 (lane % 4) + {0, 1, 8, 9}, are one load of 16 bytes.
__host__ __device__ constexpr int place(int i) { return i / 16 * 16 + i % 8 / 2 * 4 + i / 8 % 2 * 2 + i % 2; }

// Shared memory, bytes from a 1,024-byte boundary.
//   s_kq    32 KiB  two 64-column panels, in each 64 rows of K, then 64 rows of Q; 128-byte swizzle. Without Q: K of two items
//   s_abar  20 KiB  [warp] tile (formats.hpp); before it is one: the diagonal blocks of U in fp32, then their inverses in fp16
//   s_pg    20 KiB  [head] tile. Without Q: more places of s_kk
//   s_kk    20 KiB  [item's place] fragments of K K^T
//   s_x      4 KiB  [warp] four columns of the guarded inverse
//   s_vec  9.3 KiB  [item's parity][warp] the vectors above
//   s_raw    4 KiB  [warp] gate [64], beta [64] as they lie in memory, 8 bytes each
//   s_norm   2 KiB  [item's place] rk [64], rq [64]
//   s_record 16 B   chunk record on its way; s_item: this and the next items, a ring; s_sums: 0, or 1 where sums of ghat are
//   made; barriers
inline constexpr int kSmemKq = 0, kSmemAbar = 32768, kSmemPg = kSmemAbar + kHeads * kTileBytes,
                     kSmemKk = kSmemPg + kHeads * kTileBytes, kSmemX = kSmemKk + 20 * kFragmentBytes,
                     kSmemVec = kSmemX + 1024 * kHeads, kSmemRaw = kSmemVec + 2 * kHeads * kHeadFloats * 4,
                     kSmemNorm = kSmemRaw + 1024 * kHeads, kSmemRecord = kSmemNorm + kMostPlaces * 512,
                     kSmemItem = kSmemRecord + 16, kSmemSums = kSmemItem + 32 * kItems, kSmemBar = kSmemSums + 8,
                     kSmemBytes = kSmemBar + 8 * (4 + 2 * kMostPlaces);
constexpr int fragments(bool with_q, int place) { return (with_q ? kSmemKk : kSmemPg) + place * 10 * kFragmentBytes; }
static_assert((kSmemBytes + 1024) * kCtasPerSm <= 233472, "two CTAs a SM");

}  // namespace qla::cuda::intra
