// One forward call ready to run: what backend.cpp makes and forward.cpp walks.
#pragma once

#include <vector>

#include "cpu/call.hpp"
#include "cpu/streams.hpp"

namespace qla::cpu {

template <class T>
struct ForwardRun {
  const Call<T>& call;
  const qla_gdn_forward_args* args;
  const qla_tensor* final_state;  // the pool with state_indices
  bool wide_outputs;              // a_inv, a_gated or g_cumsum wanted
  const StreamPlan& plan;
  const T* merged = nullptr;  // states in panels, for QLA_START_MERGED
};

template <class T>
void run_forward(const ForwardRun<T>& run);

}  // namespace qla::cpu
