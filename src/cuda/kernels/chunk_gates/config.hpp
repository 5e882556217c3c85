// chunk_gates: the gate vectors that the fused forward loads; arguments. Host- and device-includable.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"
#include "cuda/kernels/chunk_intra/config.hpp"

namespace qla::cuda::gates {

struct Args {
  int64_t tokens;  // T of one batch row
  int32_t varlen;  // 1: one batch row; 0: sequence n is batch row n
  int32_t num_v_heads;
  int32_t parts;   // CTAs a slot: set by the launch
  uint32_t flags;  // QLA_FLAG_RAW_GATE, BETA_SIGMOID, NEG_EIGVAL; saves: QK_L2NORM
  float scale;
  intra::View g, beta;         // [B, T, HV]; g may be absent
  intra::View a_log, dt_bias;  // [HV] (stride[2]) with QLA_FLAG_RAW_GATE; dt_bias may be absent
  float* vec;                  // [slot][HV][kFusedVecFloats]; saves: [slot][HV][kVecFloats]
  // The whole record is kept for backward; norms are the fused kernel's to add. The sums that a cut backward looks at are 0 then:
  // no chunk forgets, so each cut is merged.
  int32_t saves;
  // [slot][HV]; saves: see above. Else where sequences may be cut (nullptr: not): the chunk's sum of gates and kGrowthRoom, NaN
  // where a gate or beta is not finite. What keys add to ghat (C4), chunk_intra sees later.
  float* decay;
};

inline constexpr int kHeads = 32;  // of a CTA

}  // namespace qla::cuda::gates
