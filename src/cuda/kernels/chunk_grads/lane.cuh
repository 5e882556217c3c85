// chunk_grads: shared memory, barriers, items, and a warp's place among them.
#pragma once

#include <cuda.h>

#include <cstddef>

#include "cuda/kernels/chunk_grads/config.hpp"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/shared.cuh"

namespace qla::cuda::chunk_grads {

struct alignas(1024) Smem {
  uint8_t kq[kKqStages][2][kTile];    // K, Q
  uint8_t token[kTokenTiles][kTile];  // a ring; of a head: dR, dO, Delta
  uint8_t state[kSnapshotStages][kTile];
  uint8_t d_state[kSnapshotStages][kTile];
  uint8_t m[kRows * kRows * 2];
  uint8_t x[kRows * kRows * 2];
  float vec[kVecStages][kVecFloats];
  float part[kPartStages][kPartFloats];
  uint64_t full[20], empty[20];  // by Pair
};
static_assert(sizeof(Smem) <= 227 * 1024, "shared memory");

// Barrier pairs, and the one counter that says where every ring is: n, value heads done so far. Stages used once a head (vec,
// part) alternate: stage n % 2, parity n / 2 % 2; so do the barriers of the tokens' tiles 3 n .. 3 n + 2 (modulo 4), of which the
// first comes by itself (kFirst) and all are left together (kToken). Both stages of state and d_state are used by every head, m
// is single: parity n % 2. Fewer registers than a ring each. K, Q go by items.
enum Pair {
  kFirst0,
  kFirst1,
  kToken0,
  kToken1,
  kVec0,
  kVec1,
  kPart0,
  kPart1,
  kState0,
  kState1,
  kDState0,
  kDState1,
  kM,
  kX,
  kKq0,
  kKq1,
  kPairs
};
static_assert(kKqStages == 2 && kTokenTiles == 4 && kSnapshotStages == 2 && kVecStages == 2 && kPartStages == 2, "see Pair");

struct Maps {
  CUtensorMap k, q, d_o, d_v, dq, dk;
};

// The items of a CTA in order, the same for every role: chunks from both ends in turn. The passes have written S of the last ones
// and dS+ of the first ones last, and some of that is in L2 still.
struct Item {
  int index, rows = 0, token = 0;  // token: over [B * T], the host checks that it fits
  __device__ __forceinline__ explicit Item(const Params& p) : index(int(blockIdx.x) - int(gridDim.x)) {}
  __device__ __forceinline__ int slot(const Params& p) const { return slot_of(p, index); }
  __device__ __forceinline__ int k_head(const Params& p) const { return int(uint32_t(index) % uint32_t(p.num_k_heads)); }
  __device__ __forceinline__ bool next(const Params& p) {
    do {
      index += gridDim.x;
      if (index >= p.num_slots * p.num_k_heads) return false;
      look(p, index, token, rows);
    } while (rows <= 0);
    return true;
  }

 protected:
  __device__ __forceinline__ static int slot_of(const Params& p, int index) {
    const int n = int(uint32_t(index) / uint32_t(p.num_k_heads));
    return p.first_slot + (n % 2 ? p.num_slots - 1 - n / 2 : n / 2);
  }
  __device__ __forceinline__ static void look(const Params& p, int index, int& token, int& rows) {
    const int4 record = *reinterpret_cast<const int4*>(p.chunks + slot_of(p, index));
    token = record.x, rows = record.z;
  }
};
// .. with the next item's record asked for an item before it is needed: where loads queue for memory it takes 2 us to come
struct ForeseenItem : Item {
  int rows_ahead = 0, token_ahead = 0;
  __device__ __forceinline__ explicit ForeseenItem(const Params& p) : Item(p) { look_ahead(p); }
  __device__ __forceinline__ bool next(const Params& p) {
    do {
      index += gridDim.x;
      if (index >= p.num_slots * p.num_k_heads) return false;
      rows = rows_ahead, token = token_ahead;
      look_ahead(p);
    } while (rows <= 0);
    return true;
  }

 private:
  __device__ __forceinline__ void look_ahead(const Params& p) {
    const int ahead = index + int(gridDim.x);
    if (ahead < p.num_slots * p.num_k_heads) look(p, ahead, token_ahead, rows_ahead);
  }
};

// whole token tiles of a head from or to memory, by one thread; in loops, since code that runs seldom costs more to fetch
struct Rows {
  int row, batch;
  __device__ __forceinline__ Rows(const Params& p, const Item& it)
      : row(int(uint32_t(it.token) % uint32_t(p.rows_per_batch))), batch(int(uint32_t(it.token) / uint32_t(p.rows_per_batch))) {}
  __device__ __forceinline__ void load(uint32_t dst, const CUtensorMap* map, int head, uint32_t bar) const {
#pragma unroll 1
    for (int column = 0; column < kDim; column += 64) ptx::tensor_load_4d(dst + column * 128, map, column, head, row, batch, bar);
  }
  __device__ __forceinline__ void store(const CUtensorMap* map, int head, uint32_t src) const {
#pragma unroll 1
    for (int column = 0; column < kDim; column += 64) ptx::tensor_store_4d(map, column, head, row, batch, src + column * 128);
    ptx::bulk_commit();
  }
};

// One warp's place.
struct Lane {
  uint32_t base;   // shared memory
  int warp, lane;  // warp: within its role
  uint32_t n;      // value heads done (see Pair)
  __device__ __forceinline__ uint32_t s_k(uint32_t item) const { return base + offsetof(Smem, kq) + item % 2 * (2 * kTile); }
  __device__ __forceinline__ uint32_t s_token(int i) const { return base + offsetof(Smem, token) + (3 * n + i) % 4 * kTile; }
  __device__ __forceinline__ uint32_t s_state(int half) const { return base + offsetof(Smem, state) + half * kTile; }
  __device__ __forceinline__ uint32_t s_d_state(int half) const { return base + offsetof(Smem, d_state) + half * kTile; }
  __device__ __forceinline__ uint32_t s_vec() const { return base + offsetof(Smem, vec) + n % 2 * (kVecFloats * 4); }
  __device__ __forceinline__ uint32_t s_part() const { return base + offsetof(Smem, part) + n % 2 * (kPartFloats * 4); }
  __device__ __forceinline__ uint32_t full(int pair) const { return base + offsetof(Smem, full) + 8 * pair; }
  __device__ __forceinline__ uint32_t empty(int pair) const { return base + offsetof(Smem, empty) + 8 * pair; }
  // pairs of two stages that a head uses one of
  __device__ __forceinline__ void wait_full2(Pair pair) const { ptx::mbarrier_wait(full(pair + n % 2), n / 2 % 2); }
  __device__ __forceinline__ void wait_empty2(Pair pair) const { ptx::mbarrier_wait(empty(pair + n % 2), n / 2 % 2 ^ 1); }
  // pairs that every head uses
  __device__ __forceinline__ void wait_full(int pair) const { ptx::mbarrier_wait(full(pair), n % 2); }
  __device__ __forceinline__ void wait_empty(int pair) const { ptx::mbarrier_wait(empty(pair), n % 2 ^ 1); }
  __device__ __forceinline__ void arrive(uint32_t bar) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(bar);
  }
};
__device__ __forceinline__ void init_barriers(const Lane& w) {
  constexpr int kQuery = 4, kKey = 4, kFinish = 1, kDot = 2;  // warps
  for (int i = 0; i < kPairs; i++) {
    int full = 1, empty = kQuery + kKey;
    if (i == kKq0 || i == kKq1) empty = 2;  // the threads that store dQ and dK
    if (i == kVec0 || i == kVec1) empty = kQuery + kKey + kFinish;
    if (i == kPart0 || i == kPart1) full = kQuery + kKey + kDot, empty = kFinish;
    if (i == kState0 || i == kState1) empty = kQuery + kKey + kDot;
    if (i == kDState0 || i == kDState1) empty = kKey + kDot;
    if (i == kM) full = kQuery;  // empty: of M and X
    if (i == kX) full = kKey;
    ptx::mbarrier_init(w.full(i), full);
    ptx::mbarrier_init(w.empty(i), empty);
  }
  ptx::mbarrier_init_fence();
}

}  // namespace qla::cuda::chunk_grads
