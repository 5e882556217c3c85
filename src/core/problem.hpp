// The sizes of one call, read off its tensors once by src/api after validation; every backend takes them from here.
#pragma once

#include <cstdint>

#include "qla/qla.h"

namespace qla {

inline constexpr int64_t kChunk = 64;  // tokens a chunk wherever A, g or h are handed out

struct Problem {
  int64_t batch = 0;        // B
  int64_t tokens = 0;       // T, of one batch row
  int64_t num_seqs = 0;     // N; = B without cu_seqlens
  int64_t num_k_heads = 0;  // H
  int64_t num_v_heads = 0;  // HV
  int64_t k_dim = 0, v_dim = 0;
  bool varlen = false;           // cu_seqlens given (then batch == 1)
  int32_t dtype = QLA_FLOAT32;   // of q, k, v, o
  double scale = 1.0;            // NaN already resolved to K^-0.5
  bool validate_values = false;  // QLA_FLAG_VALIDATE or QLA_VALIDATE=1: for tensors that
                                 // src/api cannot read the backend does it, by core/values.hpp on a host copy

  int64_t group() const { return num_v_heads / num_k_heads; }
  int64_t total_tokens() const { return batch * tokens; }
  // Upper bound from shapes alone; sequence n, chunk c owns slot bos(n) / 64 + n + c, which needs no prefix sum over lengths.
  int64_t chunk_slots() const { return total_tokens() / kChunk + num_seqs; }
};

}  // namespace qla
