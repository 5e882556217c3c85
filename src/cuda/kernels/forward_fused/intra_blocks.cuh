// Of the fused forward's intra-chunk role (role_intra.cuh): blocks of U and Pg out of the scores' accumulators, the diagonal
// blocks' inverses, norms, and the inverse in fp32 where an operand does not fit fp16.
#pragma once

#include "cuda/kernels/chunk_intra/inverse.cuh"
#include "cuda/kernels/forward_fused/smem.cuh"
#include "cuda/math/exp.cuh"
#include "cuda/math/tril_inverse.cuh"

namespace qla::cuda {

inline constexpr int kIntraBarrier = 6;  // named barriers 6 .. 10

// What is the same for all blocks of a warp and chunk.
struct IntraChunk {
  uint32_t vec, abar, ex;  // gate vectors, tile pair, exchange memory
  float scale;
  int lane;
  tril::Lane at;  // this lane's places, worked out once: the compiler would make them anew for every block
  __device__ __forceinline__ uint32_t pg() const { return abar + kTileSmemBytes; }
  __device__ __forceinline__ uint32_t u() const { return ex + tril::kExBytes; }
  // of a vector, this lane's two rows of block b
  __device__ __forceinline__ float2 rows(int which, int b) const {
    const uint32_t row = vec + (which + 16 * b + lane / 4) * 4;
    return make_float2(ptx::lds(row), ptx::lds(row + 32));
  }
};
// .. and its four columns: 2 (lane % 4), + 1, + 8, + 9
struct BlockColumns {
  float2 at[2];
  __device__ __forceinline__ BlockColumns(const IntraChunk& x, int which, int b)
      : at{ptx::lds2(x.vec + (which + 16 * b) * 4 + x.lane % 4 * 8),
           ptx::lds2(x.vec + (which + 16 * b) * 4 + x.lane % 4 * 8 + 32)} {}
  // .. of element i of an accumulator block
  __device__ __forceinline__ float of(int i) const { return i % 2 ? at[i / 4].y : at[i / 4].x; }
};
__device__ __forceinline__ float row_of(float2 rows, int i) { return i / 2 % 2 ? rows.y : rows.x; }
// the cumulated gate that rows i of the whole matrices take
template <bool Norm>
inline constexpr int kCumOfRows = Norm ? kFusedCumRows : kFusedCum;

// (F6)'s blocks to the tile, U's to the exchange memory; z: [j][i]
template <typename T>
__device__ __forceinline__ void put_pg_block(const IntraChunk& x, const float* z, int b, int w) {
  tril::store_block<T>(x.pg() + tril::tile_block<true>(b, w) + x.at.tile, z);
}
template <int B>
__device__ __forceinline__ void put_u_block(const IntraChunk& x, const float* z, int w) {
  uint32_t at =
      x.ex + (B == 1 ? tril::kExQ : tril::kExP + 2048 * (B - 2)) + (B == 1 ? x.at.exchange : x.at.exchange ^ uint32_t(32 * w));
  if (B == 3 && w == 2) at = x.ex + tril::kExQ + (x.at.exchange ^ 32);
  tril::store_block<__half>(at, z);
}
// .. z: [i][j]
template <typename T>
__device__ __forceinline__ void put_rows(uint32_t at, const float* z) {
  ptx::stmatrix_x4(at, pack<T>(z[0], z[1]), pack<T>(z[4], z[5]), pack<T>(z[2], z[3]), pack<T>(z[6], z[7]));
}

// Cut: keys may grow the state of the item's head (kMostKeyStep). All who say so write the same. The item's slot is still its
// own: the states are behind.
__device__ __forceinline__ void distrust(const FusedArgs& a, uint32_t item) {
  if (a.p.again || !a.p.heads) return;
  uint8_t* head = a.p.heads + int64_t(slot::sequence(item)) * a.p.num_v_heads + slot::v_head(item);
  const uint8_t bits = *head;
  if (!(bits & kHeadForgets)) return;
  *head = uint8_t(bits | kHeadDistrusted);
  a.p.cut_header->distrusted = 1;
}

// Diagonal block w of U to the substitution's memory; e = G diag(beta), transposed. Its rows j + 8 take nothing from columns
// i < 8. k: its part of K K^T. Returns for a cut whether keys of this lane's rows may grow the state.
template <bool Cut>
__device__ __forceinline__ bool fused_diagonal(float (&e)[8], const float* k, const IntraChunk& x, int w, float2 cum, float2 beta,
                                               const BlockColumns& i) {
  e[0] = exp2_approx(i.of(0) - cum.x) * beta.x;
  e[1] = exp2_approx(i.of(1) - cum.x) * beta.x;
  e[2] = e[3] = 0.f;
  e[4] = exp2_approx(i.of(4) - cum.x) * beta.x;
  e[5] = exp2_approx(i.of(5) - cum.x) * beta.x;
  e[6] = exp2_approx(i.of(6) - cum.y) * beta.y;
  e[7] = exp2_approx(i.of(7) - cum.y) * beta.y;
  const uint32_t swap = x.lane / 8 % 2 * 32;  // intra::place_u()
  const uint32_t low = x.u() + w * intra::kBlockU + x.lane / 4 * 64 + x.lane % 4 * 8 + swap, high = low + 32 - 2 * swap;
  ptx::sts2(low, k[0] * -e[0], k[1] * -e[1]);
  ptx::sts2(high, k[4] * -e[4], k[5] * -e[5]);
  ptx::sts2(high + 512, k[6] * -e[6], k[7] * -e[7]);
  if constexpr (!Cut) return false;
  const bool even = x.lane / 4 % 2 == 0;  // beta |k|^2
  const float low_step = even ? k[0] * e[0] : k[1] * e[1], high_step = even ? k[6] * e[6] : k[7] * e[7];
  return x.lane / 8 == x.lane % 4 && !(low_step <= kMostKeyStep && high_step <= kMostKeyStep);
}
// Where a lane of the warp that inverts finds its block and puts its rows: worked out before it waits, no branch behind.
struct InvertedPlaces {
  uint32_t u, first, second, diagonal;
  __device__ __forceinline__ explicit InvertedPlaces(const IntraChunk& x) {
    using namespace tril;
    const uint32_t c = x.lane % 8, b = uint32_t(x.lane) / 8;
    // The second half of a row of 32 bytes: ^ 16. T3 twice. T0: kExQ + 2048, ^ 64; T1: kExQ; T2: kExP; T3: kExP + 2048, ^ 32
    static_assert(kExP == 0 && kExQ == 4096);
    const uint32_t row = swizzle_128(c * 128 + 64);
    u = x.u() + b * intra::kBlockU;
    first = x.ex + (0x1023u >> 4 * b & 15) * 2048 + (row ^ (0x1002u >> 4 * b & 15) * 32);
    second = b == 3 ? x.ex + kExQ + 2048 + row : first;  // the others' rows once more: without a branch
    diagonal = x.abar + b * 2560 + swizzle_32(c * 32);
    static_assert(tile_block<true>(1, 1) == 2560 && tile_block<true>(3, 3) == 3 * 2560);
    asm volatile("" : "+r"(u), "+r"(first), "+r"(second), "+r"(diagonal));
  }
};
// All four diagonal blocks inverted by one warp, a lane rows c and c + 8 of one: to the tile and as operands to the exchange
// regions. Right of row c's eight columns there are standing zeros.
template <typename T>
__device__ __forceinline__ void invert_diagonals(const IntraChunk& x, const InvertedPlaces& at) {
  using namespace tril;
  const int c = x.lane % 8;
  float low[8], high[16];
  intra::substitute_rows(low, high, at.u, c);
  const auto put = [](auto type, uint32_t at, int further, const float* z) {
    using P = decltype(type);
    ptx::sts4u(at + further, pack<P>(z[0], z[1]), pack<P>(z[2], z[3]), pack<P>(z[4], z[5]), pack<P>(z[6], z[7]));
  };
  const auto put_rows_of = [&](auto type, uint32_t at, int eight_rows) {
    put(type, at, 0, low);
    put(type, at, eight_rows, high);
    put(type, at ^ 16, eight_rows, high + 8);
  };
  put_rows_of(__half(), at.first, 1024);
  put_rows_of(__half(), at.second, 1024);
  put_rows_of(T(), at.diagonal, 256);
}

// (F6) block (b, w), b >= 2, of Pg diag(beta), of e = G diag(beta); both transposed
template <typename T, bool Norm, bool Diagonal>
__device__ __forceinline__ void high_pg(const float* kq, const float (&e)[8], const IntraChunk& x, int b, int w) {
  const int r = x.lane / 4, t2 = x.lane % 4 * 2;
  float p[8];
  if constexpr (Norm) {
    const BlockColumns rq(x, kFusedPgRows, b);
#pragma unroll
    for (int i = 0; i < 8; i++) p[i] = kq[i] * (e[i] * rq.of(i));
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) p[i] = kq[i] * (e[i] * x.scale);
  }
  if constexpr (Diagonal) {  // selects: e may be inf above the diagonal
    p[0] = r <= t2 ? p[0] : 0.f;
    p[1] = r <= t2 + 1 ? p[1] : 0.f;
    p[2] = p[3] = 0.f;
    p[6] = r <= t2 ? p[6] : 0.f;
    p[7] = r <= t2 + 1 ? p[7] : 0.f;
  }
  put_pg_block<T>(x, p, b, w);
}
// .. and with it the block of U
template <typename T, bool Norm, int B>
__device__ __forceinline__ void high_block(const float (&acc)[48], const IntraChunk& x, int w, float2 cum, float2 beta,
                                           const BlockColumns& columns) {
  float e[8], u[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    e[i] = exp2_approx(columns.of(i) - row_of(cum, i)) * row_of(beta, i);
    u[i] = acc[8 * (B - 2) + i] * -e[i];
  }
  put_u_block<B>(x, u, w);
  high_pg<T, Norm, false>(acc + 16 + 8 * (B - 2), e, x, B, w);
}
// (F6) block (b, w) of the first 32 tokens, not transposed
template <typename T, bool Norm, bool Diagonal>
__device__ __forceinline__ void low_pg(const float* qk, const IntraChunk& x, int b, int w, float2 cum) {
  const BlockColumns cum_j(x, kFusedCum, w), beta(x, kFusedBeta, w);
  const int r = x.lane / 4, t2 = x.lane % 4 * 2;
  float p[8];
  if constexpr (Norm) {
    const float2 rq = x.rows(kFusedPgRows, b);
#pragma unroll
    for (int i = 0; i < 8; i++) p[i] = qk[i] * (exp2_approx(row_of(cum, i) - cum_j.of(i)) * (beta.of(i) * row_of(rq, i)));
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) p[i] = qk[i] * (exp2_approx(row_of(cum, i) - cum_j.of(i)) * (beta.of(i) * x.scale));
  }
  if constexpr (Diagonal) {
    p[0] = t2 <= r ? p[0] : 0.f;
    p[1] = t2 + 1 <= r ? p[1] : 0.f;
    p[4] = p[5] = 0.f;
    p[6] = t2 <= r ? p[6] : 0.f;
    p[7] = t2 + 1 <= r ? p[7] : 0.f;
  }
  put_rows<T>(x.pg() + tril::tile_block<true>(b, w) + x.at.tile, p);
}

// Warps share what code they can: all of it must stay in the instruction cache. Returns for a cut whether keys of this lane's
// rows may grow the state.
template <typename T, bool Norm, bool Cut>
__device__ __forceinline__ bool gates_and_diagonals(const float (&acc)[48], const IntraChunk& x, int warp, uint32_t pair_empty,
                                                    uint32_t parity) {
  bool grows = false;
  const float2 cum = x.rows(kFusedCum, warp), beta = x.rows(kFusedBeta, warp);
  const BlockColumns last(x, kCumOfRows<Norm>, 3);
  if (warp < 2) {
    const BlockColumns columns(x, kCumOfRows<Norm>, 2);
    ptx::mbarrier_wait(pair_empty, parity);  // the tiles of two chunks ago have been used
    high_block<T, Norm, 2>(acc, x, warp, cum, beta, columns);
    if (warp == 0) {
      low_pg<T, Norm, true>(acc + 32, x, 0, 0, cum);
    } else {
      low_pg<T, Norm, false>(acc + 32, x, 1, 0, cum);
      low_pg<T, Norm, true>(acc + 40, x, 1, 1, cum);
    }
  } else {
    const float2 low_cum = x.rows(kFusedCum, warp - 2), low_beta = x.rows(kFusedBeta, warp - 2);
    const BlockColumns low(x, kCumOfRows<Norm>, warp - 2);
    float e[8];
    if (warp == 2) {
      const BlockColumns high(x, kCumOfRows<Norm>, 2);
      grows |= fused_diagonal<Cut>(e, acc + 32, x, 0, low_cum, low_beta, low);
      grows |= fused_diagonal<Cut>(e, acc, x, 2, cum, beta, high);
      ptx::named_arrive(kIntraBarrier, 64);
      // Loaded here and not above: else its exponentials come before the blocks that warp 3 waits for.
      const BlockColumns next(x, kCumOfRows<Norm>, 1);
      float u[8];  // U's block (1, 0)
#pragma unroll
      for (int i = 0; i < 8; i++) u[i] = acc[40 + i] * -(exp2_approx(next.of(i) - row_of(low_cum, i)) * row_of(low_beta, i));
      put_u_block<1>(x, u, 0);
      ptx::mbarrier_wait(pair_empty, parity);
      high_pg<T, Norm, true>(acc + 16, e, x, 2, 2);
    } else {
      grows |= fused_diagonal<Cut>(e, acc + 40, x, 1, low_cum, low_beta, low);
      grows |= fused_diagonal<Cut>(e, acc + 8, x, 3, cum, beta, last);
      const InvertedPlaces places(x);
      ptx::mbarrier_wait(pair_empty, parity);
      high_pg<T, Norm, true>(acc + 24, e, x, 3, 3);
      ptx::named_sync(kIntraBarrier, 64);
      invert_diagonals<T>(x, places);
    }
  }
  if (warp < 3) high_block<T, Norm, 3>(acc, x, warp, cum, beta, last);
  return grows;
}

// An operand did not fit fp16: the whole inverse again in fp32, K K^T included. Rare, so slow and with few registers.
template <typename T, bool Norm>
__device__ __forceinline__ void redo_guarded(const IntraChunk& x, uint32_t keys, int tid) {
#pragma unroll 1
  for (int at = tid; at < 10 * 256; at += 128) {
    const int block = at / 256, b = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3, w = block - b * (b + 1) / 2;
    const int i = 16 * b + at / 16 % 16, j = 16 * w + at % 16;
    float sum = 0.f;
#pragma unroll 1
    for (int d = 0; d < 128 && j < i; d += 2) {
      const uint32_t panel = keys + d / 64 * FusedConfig::kPanelBytes + FusedConfig::kOffK;
      const float2 ki = unpack<T>(__float_as_uint(ptx::lds(panel + swizzle_128(i * 128 + d % 64 * 2))));
      const float2 kj = unpack<T>(__float_as_uint(ptx::lds(panel + swizzle_128(j * 128 + d % 64 * 2))));
      sum = fmaf(ki.x, kj.x, fmaf(ki.y, kj.y, sum));
    }
    const float e = exp2_approx(ptx::lds(x.vec + (kFusedCum + i) * 4) - ptx::lds(x.vec + (kFusedCum + j) * 4)) *
                    ptx::lds(x.vec + (kFusedBeta + j) * 4);
    if constexpr (Norm) sum *= ptx::lds(x.vec + (kFusedRk + i) * 4);
    ptx::sts(x.ex + tril::guarded_block(b, w) + (at / 16 % 16 * 16 + at % 16) * 4, j < i ? -e * sum : 0.f);
  }
  ptx::named_sync(kIntraBarrier, 128);
  tril::guarded_inverse<T>(x.abar, x.ex, tid);
  ptx::named_sync(kIntraBarrier, 128);
#pragma unroll 1
  for (int i = tid; i < tril::kExBytes / 16; i += 128) ptx::sts4u(x.ex + 16 * i, 0, 0, 0, 0);  // its standing zeros
  ptx::proxy_fence();
  ptx::named_sync(kIntraBarrier, 128);
}

// Inverse norms of a chunk's keys and queries. They go into its gate vectors, which then are gamma rk, scale gamma rq, tail beta
// rk; for this role beta rk, the cumulated gate of rows i with log2 rk in it, and for Pg scale rq, in rows i >= 32, which take
// that gate, over rk; for backward rq. |k|^2 is the diagonal of K K^T, which every fourth lane or so of warps 2 and 3 has two
// elements of in each of two blocks; half a row of Q is a thread's. Those of the second half of the keys and all of the queries
// without a branch: a product is in flight over them. valid: there is such a chunk.
__device__ __forceinline__ void put_key_norms(float low, float high, uint32_t row, bool owner) {
  const float rk_low = rsqrtf(low + 1e-6f), rk_high = rsqrtf(high + 1e-6f);
  for (const int which : {kFusedGamma, kFusedE, kFusedBeta}) {
    const uint32_t at = row + which * 4;
    const float x = ptx::lds(at) * rk_low, y = ptx::lds(at + 32) * rk_high;
    ptx::sts_if(owner, at, x);
    ptx::sts_if(owner, at + 32, y);
  }
  const uint32_t cum = row + kFusedCum * 4, cum_rows = row + kFusedCumRows * 4;
  const float c_low = ptx::lds(cum) + log2_approx(rk_low), c_high = ptx::lds(cum + 32) + log2_approx(rk_high);
  ptx::sts_if(owner, cum_rows, c_low);
  ptx::sts_if(owner, cum_rows + 32, c_high);
  ptx::sts_if(owner, row + kFusedRk * 4, rk_low);
  ptx::sts_if(owner, row + kFusedRk * 4 + 32, rk_high);
}
__device__ __forceinline__ void put_high_key_norms(const float (&acc)[48], uint32_t vec, int warp, int lane, bool valid) {
  const bool odd = lane & 4, last = warp == 3;
  const float low = odd ? (last ? acc[9] : acc[1]) : (last ? acc[8] : acc[0]),
              high = odd ? (last ? acc[15] : acc[7]) : (last ? acc[14] : acc[6]);
  put_key_norms(low, high, vec + (16 * warp + lane / 4) * 4, valid && warp >= 2 && lane % 4 == lane / 8);
}
__device__ __forceinline__ void put_low_key_norms(const float (&acc)[48], uint32_t vec, int warp, int lane) {
  if (warp < 2) return;
  const bool odd = lane & 4, last = warp == 3;
  const float low = odd ? (last ? acc[41] : acc[33]) : (last ? acc[40] : acc[32]),
              high = odd ? (last ? acc[47] : acc[39]) : (last ? acc[46] : acc[38]);
  put_key_norms(low, high, vec + (16 * (warp - 2) + lane / 4) * 4, lane % 4 == lane / 8);
}
template <typename T, bool Save>
__device__ __forceinline__ void put_query_norms(uint32_t stage, float scale, int tid, bool valid) {
  const int row = tid / 2, half = tid % 2;
  // the two halves in an order that keeps their banks apart
  const uint32_t q = stage + half * FusedConfig::kPanelBytes + FusedConfig::query_row(row) + ((row % 8 ^ 4 * half) << 4);
  float even = 0.f, odd = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint4 x = ptx::lds4u(q ^ uint32_t(16 * i));
    for (const uint32_t two : {x.x, x.y, x.z, x.w}) {
      const float2 f = unpack<T>(two);
      even = fmaf(f.x, f.x, even);
      odd = fmaf(f.y, f.y, odd);
    }
  }
  float sum = even + odd;
  sum += __shfl_xor_sync(~0u, sum, 1);
  const float rq = rsqrtf(sum + 1e-6f);
  const uint32_t vec = stage + FusedConfig::kOffVec + row * 4;
  __syncwarp();  // the keys' norms of rows from 32 on are this warp's
  const float rk = ptx::lds(vec + kFusedRk * 4), over = row < 32 ? 1.f : rk;
  const float gamma = ptx::lds(vec + kFusedQ * 4) * rq, pg = __fdividef(scale * rq, over);
  ptx::sts_if(valid && half == 0, vec + kFusedQ * 4, gamma);
  ptx::sts_if(valid && half == 1, vec + kFusedPgRows * 4, pg);
  if constexpr (Save) ptx::sts_if(valid && half == 1, vec + kFusedRq * 4, rq);
}

}  // namespace qla::cuda
