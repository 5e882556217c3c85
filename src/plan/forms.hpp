// Which form a packing takes where its call has both in it: the host knows how many sequences there are, the planning kernel how
// long they are. The kernel and qla_gdn_plan ask the same function.
#pragma once

#include <cstdint>

#include "plan/hd.hpp"

namespace qla::plan {

// A packing of this many sequences may be given both forms; more even out.
inline constexpr int64_t kLeastBothSeqs = 2, kMostBothSeqs = 3;

// fused_chunks: up to which length of its longest sequence a packing takes the fused form. Two kernels with halves of V else.
QLA_HD constexpr bool takes_fused(int64_t longest_chunks, int64_t fused_chunks) { return longest_chunks <= fused_chunks; }

}  // namespace qla::plan
