// The chunk form (F0)-(F9), (B1)-(B11) of docs/math.md, written as the kernels are cut: forward walk, reverse walk, gradients of
// one chunk.
//
//   Operand::kExact   float64, nothing rounded: a second road to the recurrence's numbers, and the reference for long sequences;
//   Operand::kBf16/16 the emulator: what a 16-bit GPU kernel rounds is rounded here, once - the matrix operands S, R, Delta, E,
//   Abar, Pg,
//                     dS, dR, dD, dP, X and the scaled dO and dR of (B4) - while states, accumulators and gate vectors are fp32;
//                     the inverse is put together from blocks by products of fp16 operands, as on the GPU.
//
// Its error against the recurrence is the scale by which a 16-bit backend is judged. Outputs are not yet rounded to their
// tensors' types.
#pragma once

#include "reference/inputs.hpp"

namespace qla::reference {

enum class Operand { kExact, kBf16, kFp16 };

// Of the emulator's inverse, whose blocks below the diagonal are products: blocks of 16, then of 32 (the fused form), or row of
// blocks after row of blocks (chunk_intra).
enum class InverseOrder { kTwoLevels, kRows };

Outputs chunk_forward(const Inputs& in, Operand operand, int64_t chunk = 64, InverseOrder order = InverseOrder::kTwoLevels);
Gradients chunk_backward(const Inputs& in, Operand operand, int64_t chunk = 64, InverseOrder order = InverseOrder::kTwoLevels);

// Outputs for tests of the intra-chunk stage and of the snapshots, of one call.
struct ChunkParts {
  std::vector<double> g_cumsum;  // [tokens, HV] (F1)
  std::vector<double> a_inv,
      a_gated;            // [tokens, HV, chunk] (F2), (F3); columns past the sequence's end as the tail rule gives them
  std::vector<double> h;  // [chunks of all sequences, HV, K, V]: the state at each chunk's start
};
ChunkParts chunk_parts(const Inputs& in, int64_t chunk = 64);  // exact

}  // namespace qla::reference
