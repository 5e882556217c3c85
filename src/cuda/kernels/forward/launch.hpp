// Host interface of the forward kernel (F4)-(F9). Everything is device memory; nothing is read on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/formats.hpp"

namespace qla::cuda {

struct TokenView {  // [B, T, H, 128]; strides in elements, last dimension contiguous, base and strides multiples of 16 bytes
  const void* data = nullptr;
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
};

struct ForwardParams {
  int32_t dtype = 0;  // QLA_BFLOAT16 or QLA_FLOAT16: q, k, v, o, Abar, Pg
  int64_t batch = 0, tokens = 0;
  int32_t num_k_heads = 0, num_v_heads = 0;
  TokenView q, k, v, o;
  PlanHeader* plan = nullptr;  // next_item is 0 at launch
  const WorkItem* items = nullptr;
  int32_t max_items = 0;          // bound on plan->num_items, sizes the grid
  int32_t v_parts = 1;            // 1: an item has all of V; 2: half of it (WorkItem::v_part)
  bool output = true;             // false: no q, no Pg, no o; the end state goes to end_states[item.start_index]
  const uint8_t* abar = nullptr;  // [slot][v_head] tiles of kTileBytes
  const uint8_t* pg = nullptr;
  const float* vec = nullptr;  // [slot][v_head][kVecFloats]
  // The fused form (forward_fused/): Abar and Pg are made inside, vec is chunk_gates' [slot][v_head][kFusedVecFloats]. All of V,
  // output, no h, no checkpoints.
  bool fused = false;
  bool cut = false;        // fused: items may have a warm-up or a merged start
  bool normalise = false;  // fused: q and k by their norms
  float scale = 1.f;       // fused: of Pg
  // fused and cut: whoever meets keys that kMostKeyStep does not bound says so here, [sequence][HV] kHead* and the pre-pass's
  // header; again: a pass over uncut sequences, of these heads alone, or of all if nothing was cut
  uint8_t* heads = nullptr;
  PlanHeader* cut_header = nullptr;
  bool again = false;
  // fused: kept for backward, [slot][v_head] tiles and whole records; vec is these records then, and chunk_gates' work in them
  uint8_t* saved_abar = nullptr;
  float* saved_vec = nullptr;
  StateView initial_state, final_state;  // by sequence, or by state_indices
  int64_t num_states = 0;                // initial ones
  StateView checkpoints, h;              // by WorkItem::checkpoint_base / chunk_base
  const void* state_indices = nullptr;   // -1: skip the sequence, o = 0
  int32_t state_indices_dtype = 0;       // QLA_INT32 or QLA_INT64
  const uint8_t* has_initial_state = nullptr;
  int32_t checkpoint_every_chunks = 0;
  const float* merged = nullptr;     // [index][V][K] start states (QLA_START_MERGED)
  bool rehearse = false;             // worth it where the state role would fetch its code behind the load role
  bool merging = false;              // the kernel before this one makes these, and all others have ended when this one starts ..
  const int32_t* any_cut = nullptr;  // .. unless this is 0: nothing is cut, and nothing has ended. nullptr: they have ended
  bool uncut = false;                // leaves at once unless it is 0
  float* end_states = nullptr;       // [index], without output: [V][K], from the identity as in tile/transition.cuh
  const float* carry_in = nullptr;   // [HV][V][K]: kStartCarried ..
  float* carry_out = nullptr;        // .. and kCarry
  bool carries_all = false;          // .. for every sequence, [N][HV][V][K]
  int32_t shares = 0;                // fused, balanced: so many, 0: not ..
  int32_t* part_flags = nullptr;     // .. a late part's early one is done (2), and where shares begin; states by start_index
  // Both forms are in the call: leaves at once where the other one has everything. The fused form, which comes first, lets what
  // follows begin when it has the plan.
  bool asks = false;
  bool dependent = false;  // launch with programmatic stream serialisation
};

void prepare_forward();  // attributes, once a device
void launch_forward(const ForwardParams& params, int num_sms, cudaStream_t stream);
// The fused form of an uncut call of at most plan::kDirectRounds items a multiprocessor, and of plan::kDirectSequences sequences
// where it is more than one: nothing goes before it. params.vec: room for the gate vectors; plan and items are not used.
namespace segments {
struct Args;
}
namespace gates {
struct Args;
}
void launch_forward_direct(const ForwardParams& params, const segments::Args& plan, const gates::Args& gates, int num_sms,
                           cudaStream_t stream);

}  // namespace qla::cuda
