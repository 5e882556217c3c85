// One backward call ready to run: what backend.cpp makes and backward.cpp walks.
#pragma once

#include "cpu/call.hpp"
#include "cpu/streams.hpp"

namespace qla::cpu {

template <class T>
struct BackwardRun {
  const Call<T>& call;
  const qla_gdn_backward_args* args;
  const StreamPlan& plan;
  const T* merged = nullptr;          // start states in panels, for QLA_START_MERGED
  const T* merged_reverse = nullptr;  // gradients of end states
};

template <class T>
void run_backward(const BackwardRun<T>& run);

}  // namespace qla::cpu
