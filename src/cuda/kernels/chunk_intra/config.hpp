// chunk_intra: arguments and what the host counts with. Host- and device-includable.
#pragma once

#include <cstdint>

#include "cuda/formats.hpp"
#include "cuda/kernels/plan_segments/config.hpp"

namespace qla::cuda::intra {

// Any float dtype (QLA_*), any strides in elements; data == nullptr: absent.
struct View {
  const void* data;
  int64_t stride[3];  // batch, token, head
  int32_t dtype;
};

struct Args {
  const ChunkRecord* chunk_table;
  segments::Args plan;  // with makes_plan: the tables this kernel makes, by one more CTA ..
  int32_t makes_plan;   // .. and does without; the grid has a CTA for every item
  int64_t tokens;       // T of one batch row
  int32_t slots;        // entries of chunk_table
  int32_t varlen;       // 1: one batch row; 0: sequence n is batch row n
  int32_t num_k_heads, num_v_heads;
  int32_t group;                  // value heads of a q/k head
  int32_t parts;                  // items a q/k head: ceil(group / 4)
  int32_t per;                    // value heads of an item, at most kHeads: ceil(group / parts)
  int32_t step_slots, step_rest;  // the grid's size in slots and items of one: set by the launch
  int32_t late_slot, late_rest;   // from this item on the grid's last CTA has none: set by the launch
  int32_t direct;                 // 1: one sequence, chunks are found from its boundaries in `plan`; the chunk table is not read
  int32_t ahead;   // 1: a CTA's first two chunks are found from boundaries; it waits for the chunk table behind them
  int32_t early;   // direct or ahead: set by the launch. It waits for the kernels before it when its work is done
  int32_t asks;    // 1: the fused form is in the call, too, and came before; nothing to do where `plan`'s header has no items
  uint32_t flags;  // QLA_FLAG_QK_L2NORM, RAW_GATE, BETA_SIGMOID, NEG_EIGVAL
  float scale;
  View g, beta;          // [B, T, HV]; g may be absent
  View a_log, dt_bias;   // [HV] (stride[2]) with QLA_FLAG_RAW_GATE; dt_bias may be absent
  uint8_t* abar;         // [slot][HV][kTileBytes]
  uint8_t* pg;           // the same, or nullptr: not written
  float* vec;            // [slot][HV][kVecFloats]; nullptr: not written
  int32_t vec_backward;  // 1: part B of the records, too
  const int32_t* until;  // [sequence][HV] Abar and vectors of slots before this one alone (no Pg, no decay); nullptr: of all
  float* decay;          // [slot][HV] sum of ghat (C4) over the chunk, or nullptr; NaN where k, g or beta is not finite
  int32_t spares_sums;   // 1 (ahead, and nothing is left for backward): none where nothing is cut: set by the launch
  void* a_inv;           // the ungated form only: (F2) [B, T, HV, 64] in q's dtype, any strides
  int64_t a_inv_stride[4];
};

inline constexpr int kCtasPerSm = 2;
inline constexpr int kHeads = 4;  // value heads of one item, at most

// A round of items, us, about: what `parts` is chosen by, and
constexpr double round_us(int64_t heads) { return 2.0 + 0.95 * double(heads); }

struct Grid {
  int64_t items = 0, ctas = 0;
  // Where cut_few is to make the cut beside this kernel (Args::plan.sums) it needs a place, and there is one when a CTA leaves:
  // so the last one has so many rounds fewer than the others, where none of them has more by that.
  int64_t rounds_fewer = 0;
  bool rehearses = false;  // .. and there is time for cut_few to rehearse, from its leaving to the end

  int64_t late_from() const { return rounds_fewer > 0 ? ((items + ctas - 1) / ctas - 1 - rounds_fewer) * ctas : items; }
};
inline Grid grid_of(const Args& args, int multiprocessors) {
  // From the beginning of cut_few: three times over what it takes where its code and its loads are slowest, and for a rehearsal.
  constexpr double kEnoughUs = 50.0, kRehearsalUs = 20.0;
  const int64_t places = int64_t(multiprocessors) * kCtasPerSm;
  Grid grid;
  grid.items = int64_t(args.slots) * args.num_k_heads * args.parts;
  grid.ctas = grid.items < places ? grid.items : places;
  if (grid.items == 0 || !args.plan.sums || args.until || args.makes_plan) return grid;
  const int64_t rounds = (grid.items + grid.ctas - 1) / grid.ctas, in_last = grid.items - (rounds - 1) * grid.ctas,
                enough = int64_t(kEnoughUs / round_us(args.per)), fewer = rounds - 1 < enough ? rounds - 1 : enough;
  if (in_last + fewer >= grid.ctas) return grid;
  grid.rounds_fewer = fewer;
  grid.rehearses = double(fewer + 1) * round_us(args.per) >= kRehearsalUs;
  return grid;
}

}  // namespace qla::cuda::intra
