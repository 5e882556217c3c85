// One backward call ready to run: what backend.cpp makes and backward.cpp walks.
#pragma once

#include <vector>

#include "cpu/call.hpp"
#include "cpu/streams.hpp"

namespace qla::cpu {

struct GateSums {  // by value head, over all plans of the call
  std::vector<double> dA_log, ddt_bias;
};

template <class T>
struct BackwardRun {
  const Call<T>& call;
  const qla_gdn_backward_args* args;
  const StreamPlan& plan;
  const T* merged;  // states and gradients of states in panels, for QLA_START_MERGED
  GateSums* sums;
};

template <class T>
void run_backward(const BackwardRun<T>& run);

}  // namespace qla::cpu
