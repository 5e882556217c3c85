// What one step costs on a device, in microseconds: the constants of the cost model, one row a device, measured there.
#pragma once

#include <cstdint>

#include "plan/hd.hpp"

namespace qla::plan {

// "full": a CTA owns all of V (two state warpgroups). "half": V-split, one of two CTAs. Per chunk and value head, on one
// multiprocessor.
struct DeviceCosts {
  const char* name;
  int32_t num_sms;
  float fused;                             // intra-chunk stage as a role of the forward kernel
  float main_full, main_half;              // forward with Abar and Pg loaded, card full: streaming from HBM
  float main_full_quiet, main_half_quiet;  // the same with few CTAs: nothing competes for HBM and the clock stays up
  float state_full, state_half;            // no output: the pre-pass of (C1), (C2), and backward's state pass
  float reverse_half;                      // backward's reverse pass
  float intra[3];                          // intra-chunk stage as a kernel: value heads a query/key head >= 4, 2, 1
  float grads;                             // chunk gradients
  float merge;                             // one step of (C1), split by value columns
  float launch;                            // one more kernel in the chain
  float plan;                              // the planning kernel
  float fixed;                             // the first launch until its last CTA has started, and the last one's end
};

// docs/design numbers of one H200 (132 multiprocessors, power-bound clock): each is a measurement of the kernel or of its model.
inline constexpr DeviceCosts kH200 = {"H200", 132,  2.42f, 2.2f, 1.34f, 1.75f, 1.15f, 1.25f, 0.80f, 1.21f, {0.73f, 1.0f, 1.47f},
                                      4.4f,   2.0f, 2.0f,  3.0f, 4.0f};

// A device nobody has measured: an H200's proportions at 1.5 times its cost, which errs towards fewer cuts (launches and merges
// cost the same).
inline DeviceCosts costs_for(int32_t num_sms, int32_t capability_major) {
  DeviceCosts costs = kH200;
  costs.num_sms = num_sms > 0 ? num_sms : kH200.num_sms;
  if (capability_major == 9) return costs;
  costs.name = "default";
  for (float* cost :
       {&costs.fused, &costs.main_full, &costs.main_half, &costs.main_full_quiet, &costs.main_half_quiet, &costs.state_full,
        &costs.state_half, &costs.reverse_half, &costs.intra[0], &costs.intra[1], &costs.intra[2], &costs.grads, &costs.merge})
    *cost *= 1.5f;
  return costs;
}

}  // namespace qla::plan
