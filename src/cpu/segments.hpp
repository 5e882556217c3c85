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

// The prepasses and merges of a plan; merged holds plan.num_merged states in panels.
template <class T>
void run_prepasses(const Call<T>& call, const StreamPlan& plan, const qla_tensor* d_o, const qla_tensor* d_final_state,
                   T* merged);

}  // namespace qla::cpu
