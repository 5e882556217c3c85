// One forward call, and the backward call that follows it, through the C ABI: tensors with guards and poison, every option of the
// arguments.
#pragma once

#include <functional>
#include <limits>
#include <string>

#include "support/arena.hpp"
#include "support/sample.hpp"

namespace qla::test {

enum class Layout {
  kContiguous,
  kGapped,       // NaN between tokens and after the last token of each batch row
  kHeadMajor,    // memory [B, heads, T, dim], seen as [B, T, heads, dim]
  kFused,        // q, k, v side by side in one buffer with a gap of 64 elements; their gradients likewise
  kEverySecond,  // x[:, ::2]
  kBackwards     // tokens in falling addresses
};

enum class States {
  kContiguous,
  kPoolSlice /* pool[:, 1] of [N, 2, ..] */,
  kEveryThird /* big[::3] */,
  kTransposed /* x.transpose(-1, -2), where the last stride may be not 1 */
};

struct Options {
  std::string name = "auto";
  int32_t cp_mode = QLA_CP_AUTO;
  int64_t cp_segment_chunks = 0;
  double cp_threshold = std::numeric_limits<double>::quiet_NaN();
  int32_t threads = 0;
  uint32_t extra_flags = 0;  // QLA_FLAG_STATE_V_FIRST, QLA_FLAG_BATCH_INVARIANT
  int32_t cu_dtype = QLA_INT32;
  Layout layout = Layout::kContiguous;
  States states = States::kContiguous;
  bool expanded_beta = false;  // beta with stride 0 over the heads (the sample's is the same for all)
  bool expanded_d_o = false;   // d_o with stride 0 in tokens and heads
  bool final_state = true;
  bool backward = true;
  bool reuse_saved = true;  // hand the forward's g_cumsum, norms and saved buffer to backward
  bool parts = false;       // also ask for a_inv, a_gated, h
  int64_t checkpoint_every = 0;
  std::vector<int64_t> cu_override = {};                         // boundaries to pass instead of the sample's
  std::function<void(qla_gdn_forward_args&)> edit_forward = {};  // last word before the call
  std::function<void(qla_gdn_backward_args&)> edit_backward = {};

  bool v_first() const { return extra_flags & QLA_FLAG_STATE_V_FIRST; }
};

struct Result {
  qla_status status = QLA_OK;
  std::string error;  // the library's message, or memory that changed and must not
  std::string where;  // "forward", "backward", "memory"
  Values values;      // states K-first whatever the call's layout
  Numbers a_inv, a_gated, h, g_cumsum, checkpoints;
  bool ok() const { return status == QLA_OK && error.empty(); }
};

// Pieces of a call of one batch: lengths that sum to T, each starting from the state the one before ended in. Outputs and the
// last states.
Values run_chained(const Backend& backend, const Sample& sample, const std::vector<int64_t>& lengths,
                   const Options& options = {});

Result run(const Backend& backend, const Sample& sample, const Options& options = {});

// [.., K, V] <-> [.., V, K]
Numbers swap_state_axes(const Numbers& states, int64_t rows, int64_t columns);

}  // namespace qla::test
