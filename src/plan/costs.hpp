// What one step costs on a device, in microseconds: the constants of the cost model, one row a device, measured there.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

#include "plan/hd.hpp"

namespace qla::plan {

// "full": a CTA owns all of V (two state warpgroups). "half": V-split, one of two CTAs. Per chunk and value head, on one
// multiprocessor; "quiet" with at most one item a multiprocessor.
struct DeviceCosts {
  const char* name;
  int32_t num_sms;
  float fused[3];              // intra-chunk stage as a role of the forward kernel, its gates included: heads as intra's
  float fused_cut;             // .. and its sequences are cut into segments
  float fused_quiet;           // .. with items for at most three quarters of the multiprocessors: the clock stays up
  float main_full, main_half;  // forward with Abar and Pg loaded
  float main_full_quiet, main_half_quiet;
  float state_half;    // no output, half of V: the pre-pass of (C1), (C2)
  float reverse_half;  // backward's reverse pass
  float intra[3];      // intra-chunk stage as a kernel: value heads a query/key head >= 4, 2, 1
  float passes;        // backward's two passes of one value head where memory bounds them
  float grads;         // chunk gradients
  float pass_state;    // .. of the state pass, half of V; an item's ends, a step of its merges, and what its cuts cost
  float pass_item, pass_merge, pass_cut;
  float merge;         // one step of (C1)
  float item;          // an item's beginning and end: first tiles, initial and final state
  float launches;      // of an uncut call: planning, intra-chunk stage, recurrence
  float intra_launch;  //   of these, chunk_intra's, which the fused form does without
  float packed;        // more, with several sequences
  float cut_item;      // .. for every segment
  float cut;           // more, where something may be cut: items from gates, pre-pass, merges
  float cut_fused;     // the same in the fused form
};

// One H200: fitted to the published grid, 171 forward rows and their plans (decision 0092); reverse and gradients from the
// kernels alone.
inline constexpr DeviceCosts kH200 = {.name = "H200",
                                      .num_sms = 132,
                                      .fused = {2.34f, 2.39f, 2.52f},
                                      .fused_cut = 2.14f,
                                      .fused_quiet = 2.34f,
                                      .main_full = 1.505f,
                                      .main_half = 0.934f,
                                      .main_full_quiet = 1.487f,
                                      .main_half_quiet = 0.979f,
                                      .state_half = 0.727f,
                                      .reverse_half = 1.21f,
                                      .intra = {0.962f, 1.176f, 1.99f},
                                      .passes = 7.0f,
                                      .grads = 4.4f,
                                      .pass_state = 0.83f,
                                      .pass_item = 10.4f,
                                      .pass_merge = 1.63f,
                                      .pass_cut = 15.7f,
                                      .merge = 0.8f,
                                      .item = 5.58f,
                                      .launches = 14.7f,
                                      .intra_launch = 0.5f,
                                      .packed = 3.73f,
                                      .cut_item = 0.0376f,
                                      .cut = 8.2f,
                                      .cut_fused = 12.6f};

// A device nobody has measured: an H200's proportions at 1.5 times its cost a chunk, which errs towards more cuts where they are
// cheap.
inline DeviceCosts costs_for(int32_t num_sms, int32_t capability_major) {
  DeviceCosts costs = kH200;
  costs.num_sms = num_sms > 0 ? num_sms : kH200.num_sms;
  if (capability_major == 9) return costs;
  costs.name = "default";
  for (float* cost :
       {&costs.fused[0], &costs.fused[1], &costs.fused[2], &costs.fused_cut, &costs.fused_quiet, &costs.main_full,
        &costs.main_half, &costs.main_full_quiet, &costs.main_half_quiet, &costs.state_half, &costs.reverse_half, &costs.intra[0],
        &costs.intra[1], &costs.intra[2], &costs.passes, &costs.grads, &costs.merge, &costs.pass_state, &costs.pass_merge})
    *cost *= 1.5f;
  return costs;
}

// The device at hand: the constants that the file named by QLA_COSTS gives (what `qla calibrate` measured), the others as above.
DeviceCosts device_costs(int32_t num_sms, int32_t capability_major);
// Lines of a name and microseconds, # begins a comment; `where` is for messages.
DeviceCosts read_costs(std::istream& in, const std::string& where, DeviceCosts costs);

}  // namespace qla::plan
