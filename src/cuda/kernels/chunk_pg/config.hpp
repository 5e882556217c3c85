// chunk_pg: arguments and sizes. Host- and device-includable.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"

namespace qla::cuda::chunk_pg {

struct Args {
  const ChunkRecord* chunk_table;
  const float* vec;        // [slot][HV][kVecFloats], part B is read
  uint8_t* pg;             // [slot][HV][kTileBytes]
  int32_t slots;           // entries of chunk_table
  int32_t rows_per_batch;  // tokens of a batch row, as the tensor maps see it
  int32_t num_k_heads, num_v_heads;
  int32_t group;       // value heads of a q/k head
  int32_t parts, per;  // items a q/k head; value heads of an item: set by the launch
  int32_t made;        // so many chunks at a sequence's end are made by their reader
  int32_t late;        // 1: the next kernel reads without a wait what those before this one wrote
  float scale;
};

inline constexpr int kWorkers = 2, kWorkerThreads = 128, kThreads = kWorkers * kWorkerThreads;
inline constexpr int kHeads = 4;  // value heads of an item

// Shared memory of a worker, bytes: two stages of K, Q (two 64-column panels each, 128-byte swizzle) and part B of the vector
// records; two tiles on their way out. Behind all workers': a barrier and the rows of each stage.
inline constexpr int kPanel = 8192, kStageQ = 2 * kPanel, kStageVec = 4 * kPanel, kVecPart = 1024,
                     kStageBytes = kStageVec + kHeads * kVecPart, kTileAt = 2 * kStageBytes,
                     kWorkerBytes = kTileAt + 2 * kTileBytes;
inline constexpr int kBars = kWorkers * kWorkerBytes, kSmemBytes = kBars + kWorkers * 2 * 16;
static_assert(kWorkerBytes % 1024 == 0 && kSmemBytes <= 227 * 1024, "shared memory");
static_assert(kVecBeta == kVecG + 64 && kVecRk == kVecG + 128 && kVecRq == kVecG + 192 && kVecPart == 1024, "part B is one copy");

}  // namespace qla::cuda::chunk_pg
