// The choice that a forward call with these arguments runs by: for qla_gdn_plan and the log. The backends make the same call of
// plan::choose or plan::choose_cpu themselves.
#pragma once

#include <string>

#include "core/problem.hpp"
#include "core/status.hpp"
#include "plan/choose.hpp"
#include "qla/qla.h"

namespace qla::api {

struct PlannedCall {
  plan::Choice choice;
  plan::DeviceCosts costs = plan::kH200;
  bool device_here = true;  // false: no such device, an H200 assumed
  const char* why = "";
  size_t workspace = 0;                 // CUDA: as the workspace query answers, or would where there is such a device
  int64_t range_slots = 0, ranges = 1;  // chunk slots taken at a time (plan/ranges.hpp); one range: all of them
};

// "1 chunk", "2 chunks"
inline std::string counted(int64_t count, const char* one) { return concat(count, " ", one, count == 1 ? "" : "s"); }

PlannedCall planned_call(const qla_gdn_forward_args& args, const Problem& problem, bool cuda);

}  // namespace qla::api
