// chunk_grads: sizes, the shared-memory map and what the launch is given. Host-includable.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"
#include "cuda/kernels/backward_rows/config.hpp"

namespace qla::cuda::chunk_grads {

inline constexpr int kRows = 64;     // tokens of a chunk
inline constexpr int kDim = 128;     // K = V
inline constexpr int kTile = 16384;  // bytes of 64 x 128 of 16 bit: a token-major tile, or half of a snapshot
inline constexpr int kKqStages = 2, kTokenTiles = 4, kSnapshotStages = 2, kVecStages = 2, kPartStages = 2;

// What the roles hand to the finisher, per value head; floats.
inline constexpr int kXaQ = 0, kXaK = 64, kXe = 128;  // a_i of q and of k (B11), e'_i (B10)
inline constexpr int kSumFloats = 384;                // sums of Y of one warpgroup (scores.cuh)
inline constexpr int kXquery = 192, kXkey = kXquery + kSumFloats;
inline constexpr int kXdot = kXkey + kSumFloats;  // [2 warps] of <S, dS+>
inline constexpr int kPartFloats = kXdot + 4;

// Roles: two warpgroups of products, one of single-warp roles.
inline constexpr int kThreads = 384;
inline constexpr int kRegsAux = 56, kRegsProduct = 224;
static_assert(kRegsAux + 2 * kRegsProduct <= 65536 / kThreads / 8 * 8 * 3,
              "setmaxnreg only redistributes what the launch reserved");

struct GradView {  // a gradient the caller wants; data = nullptr: not wanted
  void* data = nullptr;
  int32_t dtype = 0;   // QLA_*
  int32_t vector = 0;  // 16-bit rows may be written 16 bytes at a time
  int32_t bulk = 0;    // whole chunks by tensor copies: of the inputs' type, and launch() has its map (dq, dk alone)
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
};
struct InputView {  // a scalar per token and value head, or per value head
  const void* data = nullptr;
  int32_t dtype = 0;
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
};

struct Params {
  const ChunkRecord* chunks;  // [slots]
  const float* vec;           // [slots][HV][kVecFloats]
  const uint8_t* state;       // [num_slots][HV][2] half tiles of S (formats.hpp), from first_slot on
  const uint8_t* d_state;     // the same of dS+
  const uint8_t* delta;       // [num_slots][HV] tiles of Delta
  int32_t first_slot, num_slots;
  int32_t num_k_heads, group;
  int32_t rows_per_batch;  // tokens of a batch row as the tensor maps see it
  int32_t tokens;          // T: of a batch row, for strides of the gradients
  int32_t qk_norm;
  float scale;
  GradView dq, dk, dg, dbeta;
  // raw gate (dg is then of the raw gate) and beta logits; data = nullptr: the gate, beta were given as they are
  InputView raw_gate, a_log, dt_bias, beta_logits;
  float beta_max;                      // 1, or 2 with negative eigenvalues
  float* gate_partials;                // [slots][HV][2]: this chunk's share of dA_log and ddt_bias; nullptr: not wanted
  backward_rows::PaddingArgs padding;  // rows to zero; header = nullptr: none
};

}  // namespace qla::cuda::chunk_grads
