// cut_items: arguments. Host- and device-includable.
#pragma once

#include "cuda/kernels/plan_segments/config.hpp"
#include "plan/segments.hpp"

namespace qla::cuda::segments {

struct CutArgs {
  Args plan;               // boundaries, sizes, header and items of the main pass
  qla::plan::CutRule rule;
  const float* decay;      // [slot][HV] of chunk_intra
  int32_t staged;          // 1: decay fits in shared memory
  int32_t need_bases;      // 1: chunk_base and checkpoint_base are used
  int32_t most_states;     // entries of S_ext; those of M follow
  PlanHeader* pre_header;
  WorkItem* pre_items;
  MergeChain* chains;
  uint8_t* transitions;    // [most_states]
};

}  // namespace qla::cuda::segments
