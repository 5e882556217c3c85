// Cuts of sequences into segments (math.md, context parallel): which streams there are and what must be walked and merged before
// they run.
#pragma once

#include <functional>
#include <vector>

#include "cpu/call.hpp"
#include "plan/segments.hpp"

namespace qla::cpu {

// Calls run(plan) for parts of the call, in order, such that a part's merged states and transitions stay within a budget. Which
// part a stream is in depends on shapes and gates only. d_o, d_final_state: backward's, whose streams need both walks; nullptr in
// forward.
template <class T>
void for_each_plan(const Call<T>& call, const plan::CutRule& rule, const qla_tensor* d_o, const qla_tensor* d_final_state,
                   const std::function<void(const StreamPlan&)>& run);

// A warm-up does not see a NaN or inf before it, which must reach all later tokens. So a stream whose end state (reverse:
// gradient of its start state) is not finite is spoiled, and its sequence and head are computed once more, uncut: these are the
// streams for that. spoiled, by stream of the plan: then set for all streams that are computed again.
StreamPlan whole_again(const StreamPlan& plan, const std::vector<Sequence>& sequences, std::vector<char>& spoiled);

template <class T>
bool all_finite(const T* x, int64_t n) {
  T sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] - x[i];
  return sum == 0;
}

// The prepasses and merges of a plan; merged holds plan.num_merged states in panels.
template <class T>
void run_prepasses(const Call<T>& call, const StreamPlan& plan, const qla_tensor* d_o, const qla_tensor* d_final_state,
                   T* merged);

}  // namespace qla::cpu
