#include "core/values.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/status.hpp"

namespace qla {

void check_boundaries(const qla_tensor& cu_seqlens, int64_t tokens) {
  int64_t previous = index_at(cu_seqlens, 0);
  QLA_CHECK(previous == 0, "cu_seqlens[0]: expected 0, got ", previous,
            "; boundaries are the prefix sums of the sequence lengths");
  for (int64_t n = 1; n < cu_seqlens.shape[0]; ++n) {
    const int64_t next = index_at(cu_seqlens, n);
    QLA_CHECK(next >= previous, "cu_seqlens[", n, "]: expected at least cu_seqlens[", n - 1, "] = ", previous, ", got ", next,
              "; boundaries never descend");
    QLA_CHECK(next <= tokens, "cu_seqlens[", n, "]: expected at most T = ", tokens, ", got ", next,
              "; the last boundary may not lie past the end of q");
    previous = next;
  }
}

void check_state_indices(const qla_tensor& state_indices, int64_t pool_slots) {
  const int64_t count = state_indices.shape[0];
  std::vector<std::pair<int64_t, int64_t>> used;  // slot, sequence
  used.reserve(static_cast<size_t>(count));
  for (int64_t n = 0; n < count; ++n) {
    const int64_t slot = index_at(state_indices, n);
    QLA_CHECK(slot >= -1 && slot < pool_slots, "state_indices[", n, "]: expected -1 (skip) or a slot below ", pool_slots,
              " (the first axis of initial_state), got ", slot, "; pass a slot of the pool");
    if (slot >= 0) used.emplace_back(slot, n);
  }
  std::sort(used.begin(), used.end());
  for (size_t i = 1; i < used.size(); ++i)
    QLA_CHECK(used[i].first != used[i - 1].first, "state_indices[", used[i].second, "]: expected slots to differ, got ",
              used[i].first, ", the slot of sequence ", used[i - 1].second, ", too; give every sequence a slot of its own");
}

}  // namespace qla
