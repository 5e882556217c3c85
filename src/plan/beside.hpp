// The rule of cutting as it holds in a packing, where a sequence is cut or left whole with regard to the others.
#pragma once

#include <cstdint>

#include "plan/segments.hpp"

namespace qla::plan {

// Where segments need not be even (CutRule::balance 0) uncut_chunks holds for the longest sequence of the call (in a range: the
// longest part): where that is cut, so are all that are longer than a segment.
QLA_HD inline CutRule rule_where_cut(const CutRule& rule) {
  CutRule here = rule;
  if (here.balance == 0) here.uncut_chunks = 0;
  return here;
}
QLA_HD inline CutRule rule_beside(const CutRule& rule, int64_t longest_chunks) {
  CutRule here = rule_where_cut(rule);
  if (!rule.cuts(longest_chunks) && rule.balance == 0) here.segment_chunks = 0;
  return here;
}

}  // namespace qla::plan
