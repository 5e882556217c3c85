// What one step costs on a device, in microseconds: the constants of the cost model, one row a device, measured there.
#pragma once

#include <cstdint>

#include "plan/hd.hpp"

namespace qla::plan {

// "full": a CTA owns all of V (two state warpgroups). "half": V-split, one of two CTAs. Per chunk and value head, on one
// multiprocessor; "quiet" with at most one CTA a multiprocessor's worth of items, else the card is full: HBM and the clock give
// way.
struct DeviceCosts {
  const char* name;
  int32_t num_sms;
  float fused;                 // intra-chunk stage as a role of the forward kernel
  float main_full, main_half;  // forward with Abar and Pg loaded
  float main_full_quiet, main_half_quiet;
  float state_half;    // no output, half of V: the pre-pass of (C1), (C2), and backward's state pass
  float reverse_half;  // backward's reverse pass
  float intra[3];      // intra-chunk stage as a kernel: value heads a query/key head >= 4, 2, 1
  float grads;         // chunk gradients
  float merge;         // one step of (C1)
  float plan;          // the planning kernel
  float intra_fixed;   // a launch that does nothing: intra-chunk stage,
  float walk_fixed;    //   a recurrence kernel (first loads, last stores),
  float cut_fixed;     //   segments cut behind the intra-chunk stage,
  float merge_fixed;   //   merges
};

// One H200: 132 multiprocessors, power bound (docs/perf-log.md).
inline constexpr DeviceCosts kH200 = {"H200", 132,  2.45f, 2.1f, 1.3f, 1.85f, 1.14f, 0.81f, 1.21f, {0.75f, 1.03f, 1.5f},
                                      4.4f,   1.1f, 2.0f,  8.0f, 7.0f, 10.0f, 3.0f};

// A device nobody has measured: an H200's proportions at 1.5 times its cost a chunk, which errs towards more cuts where they are
// cheap.
inline DeviceCosts costs_for(int32_t num_sms, int32_t capability_major) {
  DeviceCosts costs = kH200;
  costs.num_sms = num_sms > 0 ? num_sms : kH200.num_sms;
  if (capability_major == 9) return costs;
  costs.name = "default";
  for (float* cost :
       {&costs.fused, &costs.main_full, &costs.main_half, &costs.main_full_quiet, &costs.main_half_quiet, &costs.state_half,
        &costs.reverse_half, &costs.intra[0], &costs.intra[1], &costs.intra[2], &costs.grads, &costs.merge})
    *cost *= 1.5f;
  return costs;
}

}  // namespace qla::plan
