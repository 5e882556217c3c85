// The fused forward's intra-chunk role: Abar (F3) and Pg (F6) of a chunk by one warpgroup, ahead of the state roles.
//
// Only tokens j <= i are needed, so the scores are two products, 96 columns instead of the 128 of K [K;Q]^T. In the accumulators:
//   acc[0..31]   K [K;Q]^T of queries i >= 32, transposed: warp w has rows j = 16 w + lane / 4 (+ 8); acc[0..15] (K K^T)[j][i],
//                acc[16..31] (K Q^T)[j][i], i = 32 + 8 n + 2 (lane % 4) (+ 1);
//   acc[32..47]  [Q;K] K^T of the first 32 tokens alone: warps 0, 1 have rows i = 16 w + .. of (Q K^T)[i][j], warps 2, 3 rows
//                16 (w - 2) + .. of K K^T, which is symmetric.
//
// So warps 2 and 3 have all diagonal blocks of U, and warp 3, which has the fewest others, inverts them. The next chunk's first
// product runs between this one's block products, which leave the tensor cores idle, its second one behind the last of them,
// ahead of what the states issue when they have Abar: all products of a multiprocessor wait in one line.
#pragma once

#include "cuda/kernels/forward_fused/intra_blocks.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace qla::cuda {

__device__ __forceinline__ bool any_of_128(int barrier, bool mine) {
  uint32_t any;
  asm volatile("{.reg .pred p, q; setp.ne.b32 p, %1, 0; barrier.cta.red.or.aligned.pred q, %2, 128, p; selp.u32 %0, 1, 0, q;}"
               : "=r"(any)
               : "r"(int(mine)), "r"(barrier)
               : "memory");
  return any != 0;
}

// The scores' products (above). tile: the descriptor of Q's first row; k16 steps From .. To - 1 of K [K;Q]^T for queries i >= 32
template <typename T, int From, int To>
__device__ __forceinline__ void high_scores(float (&acc)[48], uint64_t tile) {
  float(&d)[32] = reinterpret_cast<float(&)[32]>(acc[0]);
#pragma unroll
  for (int w = From; w < To; w++) {
    const uint64_t k = further(tile, w / 4 * FusedConfig::kPanelBytes + w % 4 * 32 + FusedConfig::kOffK);
    ptx::wgmma_ss<T, 0>(d, k, further(k, 4096), w > 0);
  }
  ptx::wgmma_commit();
}
// [Q;K] K^T of the first 32 tokens
template <typename T>
__device__ __forceinline__ void low_scores(float (&acc)[48], uint64_t tile) {
  float(&d)[16] = reinterpret_cast<float(&)[16]>(acc[32]);
#pragma unroll
  for (int w = 0; w < 8; w++) {
    const uint64_t qk = further(tile, w / 4 * FusedConfig::kPanelBytes + w % 4 * 32);
    ptx::wgmma_ss<T, 0>(d, qk, further(qk, FusedConfig::kOffK), w > 0);
  }
  ptx::wgmma_commit();
}

// The inverse's off-diagonal blocks, by all four warps between two barriers of theirs (`barrier`: one more inside), with the next
// chunk's first scores between its products, whose chain leaves the tensor cores idle; after it all products are done. Returns
// whether this thread met entries that are too large (kLargest), an inf or a NaN: an operand that overflowed poisons a whole row
// or column of a block that is looked at. issued: see FusedSmem::blocks_issued.
template <typename T, bool Norm>
__device__ __forceinline__ bool blocks_and_scores(float (&acc)[48], const IntraChunk& x, uint32_t next_stage, int warp,
                                                  const tril::Lane& at, int barrier, uint32_t issued) {
  const uint32_t tile = x.abar, ex = x.ex;
  const uint64_t next = descriptor_k_major(next_stage);
  using namespace tril;
  using ptx::wgmma_rs;
  const uint64_t p = descriptor_k_major(ex + kExP), q = descriptor_k_major(ex + kExQ);
  uint32_t ta[8], f[4];
  float z1[8], z2[16], z3[16], size = 0.f;
  const uint32_t from = warp == 0 ? at.exchange + kExQ + 2048 : (at.exchange ^ 64) + (warp == 1 ? kExQ : kExP);
  ptx::ldmatrix_x4_trans(ex + from, f[0], f[1], f[2], f[3]);  // T_warp^T (of warp 3: not used)
#pragma unroll
  for (int i = 0; i < 4; i++) {
    ta[i] = warp ? 0 : f[i];
    ta[4 + i] = warp ? f[i] : 0;
  }
  ptx::wgmma_fence();  // T0^T U01, T2^T U23
#pragma unroll
  for (int k = 0; k < 2; k++) wgmma_rs<__half, 0>(z1, ta + 4 * k, further(q, 32 * k), k > 0);
  ptx::wgmma_commit();
  high_scores<T, 0, 2>(acc, next);
  ptx::wgmma_wait<1>();
#pragma unroll
  for (int i = 0; i < 4; i++) f[i] = pack<__half>(z1[2 * i], z1[2 * i + 1]);
  ptx::wgmma_fence();  // .. T1^T, T3^T
  wgmma_rs<__half, 0>(z2, f, further(q, 64), 0);
  ptx::wgmma_commit();
  high_scores<T, 2, 5>(acc, next);
  ptx::wgmma_wait<1>();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t a10 = pack<__half>(z2[2 * i], z2[2 * i + 1]);
    ta[4 + i] = warp ? ta[4 + i] : a10;
  }
  // Warp 2's block is an operand of the last product: it goes out and is fenced at once. What only the states read is packed here
  // and stored behind the next product.
  uint32_t block[4];
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < 4; i++) block[i] = pack<T>(z2[2 * i], z2[2 * i + 1]);
    size = sum_of_sizes(z2);
  }
  if (warp == 2) {
    store_block<__half>(ex + kExP + 2048 + (at.exchange ^ 64), z2 + 8);
    ptx::proxy_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) block[i] = pack<T>(z2[8 + 2 * i], z2[8 + 2 * i + 1]);
    size = sum_of_sizes(z2 + 8);
  }
  ptx::wgmma_fence();  // Ta^T U[0:2,2:4]
#pragma unroll
  for (int k = 0; k < 2; k++) wgmma_rs<__half, 0>(z3, ta + 4 * k, further(p, 32 * k), k > 0);
  ptx::wgmma_commit();
  high_scores<T, 5, 8>(acc, next);
  if (warp == 0 || warp == 2)
    ptx::stmatrix_x4_trans(tile + at.tile + (warp ? tile_block<true>(3, 2) : tile_block<true>(1, 0)), block[0], block[1],
                           block[2], block[3]);
  ptx::wgmma_wait<1>();
  ptx::named_sync(barrier, 128);
#pragma unroll
  for (int i = 0; i < 8; i++) ta[i] = pack<__half>(z3[2 * i], z3[2 * i + 1]);
  ptx::wgmma_fence();  // .. Tb^T
#pragma unroll
  for (int k = 0; k < 2; k++) wgmma_rs<__half, 0>(z2, ta + 4 * k, further(p, 64 + 32 * k), k > 0);
  ptx::wgmma_commit();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(issued);  // the second state's first products come behind these
  low_scores<T>(acc, next);                                 // done before the states get Abar
  ptx::wgmma_wait<1>();
  if (warp < 2) {
    store_block<T>(tile + tile_block<true>(2, warp) + at.tile, z2);
    store_block<T>(tile + tile_block<true>(3, warp) + at.tile, z2 + 8);
    size += sum_of_sizes(z2) + sum_of_sizes(z2 + 8);
  }
  return !(size < kLargest);
}

template <typename T, bool Norm, bool Save, bool Cut>
__device__ __forceinline__ void intra_role(const FusedArgs& a, const FusedSmem& sm) {
  // zeros that stay: above the diagonals of the tiles, and in the exchange memory
#pragma unroll 1
  for (int i = thread_in_group(); i < (FusedConfig::kOffItems - FusedConfig::kOffPairs) / 16; i += 128)
    ptx::sts4u(sm.base + FusedConfig::kOffPairs + 16 * i, 0, 0, 0, 0);
  ptx::proxy_fence();
  ptx::named_sync(kIntraBarrier + 1, 128);
  tril::Lane at(threadIdx.x % 32);
  const auto tiles = sm.tiles();
  const auto pairs = sm.pairs();
  FusedWalk walk;
  float acc[48];
  // Uniform, and so is everything of `walk`: addresses are made in uniform registers, without a reduction before the first load.
  const int warp = int(uniform(thread_in_group() / 32));
  walk.bits =
      FusedWalk::kMark;  // a CTA's first chunk does not wait for the second one's tiles, which come late in a direct launch
  const auto alone = [&] { return walk.last() || walk.marked(); };
  for (;;) {
    if (!walk.more()) {
      ptx::mbarrier_wait(sm.items().full(walk.slot()), walk.slot_phase());
      if (!slot::valid(sm.slot_address(walk.slot()))) break;
      walk.begin_item(slot::chunks(sm.slot_address(walk.slot())));
      if (!Cut && a.direct && walk.more()) ptx::mbarrier_wait(sm.first_gates(), 0);
      __syncwarp();
      if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(sm.items().empty(walk.slot()));
      if (!walk.more()) {
        walk.next_item();
        continue;
      }
    }
    ptx::mbarrier_wait(tiles.full(walk.stage), walk.phase());
    {
      const uint32_t stage = sm.stage(walk.stage);
      ptx::wgmma_fence();
      high_scores<T, 0, 8>(acc, descriptor_k_major(stage));
      low_scores<T>(acc, descriptor_k_major(stage));
      ptx::wgmma_wait();
      if constexpr (Norm) {
        const int tid = thread_in_group(), warp = int(uniform(tid / 32));
        put_high_key_norms(acc, stage + FusedConfig::kOffVec, warp, tid % 32, true);
        put_query_norms<T, Save>(stage, a.p.scale, tid, true);
        put_low_key_norms(acc, stage + FusedConfig::kOffVec, warp, tid % 32);
      }
    }
    bool goes_on;
#pragma unroll 1
    do {
      const uint32_t stage = sm.stage(walk.stage);
      asm volatile("" : "+r"(at.tile), "+r"(at.exchange));  // sums with them are not kept over a chunk
      int lane = threadIdx.x % 32;
      asm volatile("" : "+r"(lane));
      const IntraChunk x{stage + FusedConfig::kOffVec, sm.pair(walk.pair()), sm.exchange(), a.p.scale, lane, at};
      if constexpr (Norm) {
        ptx::named_sync(kIntraBarrier + 4, 128);
        if (thread_in_group() % 32 == 0) ptx::mbarrier_arrive(sm.normed(walk.stage));
      }
      const uint32_t empty = pairs.empty(walk.pair()), parity = walk.pair_phase() ^ 1;
      const bool grows = gates_and_diagonals<T, Norm, Cut>(acc, x, warp, empty, parity);
      if (Cut && grows) [[unlikely]]
        distrust(a, sm.slot_address(walk.slot()));
      const int next = walk.stage + 1 == FusedConfig::kStages ? 0 : walk.stage + 1;
      // They are there or on their way: the pair was free, so the stage of two chunks ago is. Without a next chunk the products
      // are of whatever lies there, for nothing.
      if (!alone()) ptx::mbarrier_wait(tiles.full(next), walk.phase() ^ uint32_t(next == 0));
      const uint32_t next_stage = sm.stage(next);
      ptx::proxy_fence();
      ptx::named_sync(kIntraBarrier + 1, 128);
      const bool poison =
          blocks_and_scores<T, Norm>(acc, x, next_stage, warp, at, kIntraBarrier + 2, sm.blocks_issued(walk.pair()));
      ptx::proxy_fence();
      // The states need not wait for this vote: a warp that met nothing large hands its part over before.
      const bool mine = __any_sync(~0u, poison);
      __syncwarp();
      if (!mine && lane == 0) ptx::mbarrier_arrive(pairs.full(walk.pair()));
      if (any_of_128(kIntraBarrier + 3, poison)) [[unlikely]] {
        redo_guarded<T, Norm>(x, stage, thread_in_group());
        if (mine && lane == 0) ptx::mbarrier_arrive(pairs.full(walk.pair()));
      }
      if constexpr (Norm) {
        put_high_key_norms(acc, next_stage + FusedConfig::kOffVec, warp, lane, !alone());
        put_query_norms<T, Save>(next_stage, a.p.scale, thread_in_group(), !alone());
      }
      ptx::wgmma_wait();
      if constexpr (Norm)
        if (!alone()) put_low_key_norms(acc, next_stage + FusedConfig::kOffVec, warp, lane);
      goes_on = !alone();
      walk.next_chunk();
    } while (goes_on);
    walk.bits &= ~FusedWalk::kMark;
    if (!walk.more()) walk.next_item();
  }
}

}  // namespace qla::cuda
