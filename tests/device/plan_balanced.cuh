// qla_device_test_plan: the list of a balanced call (plan/balance.hpp).
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/plan_segments/launch.hpp"
#include "device/harness.hpp"
#include "device/plan_problem.cuh"
#include "device/plan_timing.cuh"
#include "plan/balance.hpp"

namespace qla::test {

// The balanced list of a fused call: every chunk once, shares as plan/balance.hpp says, each CTA's way through it.
inline void balanced(const Problem& p, int shares, int ctas, const std::string& name) {
  std::vector<int32_t> narrow(p.cu.begin(), p.cu.end());
  Device<int32_t> cu32(narrow);
  Device<int64_t> cu64(p.cu);
  const int64_t items = p.seqs() * p.heads;
  Device<PlanHeader> header(1);
  Device<WorkItem> list(size_t(items + shares));
  Device<int32_t> flags(size_t(2 * shares));
  const size_t gates = size_t(p.tokens * p.heads);
  Device<float> gate(std::vector<float>(gates, -0.5f)), vec(size_t(p.all_slots() * p.heads * kFusedVecFloats));
  segments::Args a{};
  a.cu_seqlens = p.wide ? static_cast<const void*>(cu64.get()) : cu32.get();
  a.index_dtype = p.wide ? QLA_INT64 : QLA_INT32;
  a.has_initial = p.initial;
  a.num_seqs = p.seqs();
  a.tokens = p.tokens;
  a.slots = int32_t(p.all_slots());
  a.num_v_heads = p.heads;
  a.v_parts = 1;
  a.header = header.get();
  a.items = list.get();
  a.balanced_shares = shares;
  a.fused_ctas = ctas;
  a.part_flags = flags.get();
  const gates::Args g = gates_of(p.tokens, p.heads, gate.get(), vec.get());
  cuda_ok(segments::launch_balanced(a, g, nullptr), "plan_balanced_and_gates");
  cuda_ok(cudaDeviceSynchronize(), name.c_str());
  check(header.guards_intact() && list.guards_intact() && flags.guards_intact() && vec.guards_intact(),
        name + ": writes stay inside");
  const PlanHeader h = header.download()[0];
  const std::vector<WorkItem> got = list.download();
  const std::vector<int32_t> words = flags.download();
  check(h.num_items >= items && h.num_items < items + shares && h.next_item == -ctas, name + ": header");
  for (int i = 0; i < shares; i++) check(words[size_t(i)] == 0, name + ": flags");
  if (!good_boundaries(p)) {
    bool good = true;
    for (const WorkItem& i : got)
      good &= i.token >= 0 && i.chunks >= 0 && i.slot >= 0 && int64_t(i.slot) + i.chunks <= p.all_slots() && i.start_index >= 0 &&
              i.start_index < shares && (i.segment == INT32_MAX || (i.segment >= 0 && i.segment < h.num_items)) &&
              (i.chunks == 0 || i.token + 64 * int64_t(i.chunks - 1) + i.last_rows <= p.tokens);
    check(good, name + ": everything stays inside");
    return;
  }
  check(h.end_token == p.cu.back() && h.valid_tokens == 1, name + ": header of good boundaries");
  int64_t total = 0, longest = 0;
  for (int64_t n = 0; n < p.seqs(); n++) {
    const int64_t chunks = (p.cu[size_t(n) + 1] - p.cu[size_t(n)] + 63) / 64;
    total += chunks * p.heads, longest = std::max(longest, chunks);
  }
  const int64_t share = qla::plan::balanced_share(total, longest, shares);
  std::map<std::pair<int, int>, int64_t> walked;  // sequence and head: chunks so far
  std::map<int, std::pair<int, int>> left;        // border: whose state lies there
  int64_t seen = 0;
  bool good = true;
  for (int taken = 0; taken < shares; taken++) {
    int64_t of_share = 0, guard = 0;
    for (int64_t at = words[size_t(shares + taken)]; at != INT32_MAX && guard++ < h.num_items; at = got[size_t(at)].segment) {
      const WorkItem& i = got[size_t(at)];
      const int64_t bos = p.cu[size_t(i.sequence)], eos = p.cu[size_t(i.sequence) + 1], chunks = (eos - bos + 63) / 64;
      const std::pair<int, int> who{i.sequence, i.v_head};
      const bool early = i.is_last == kCarry, late = i.start == kStartCarried;
      good &= i.first_chunk == walked[who] && i.token == bos + 64 * walked[who] && i.slot == bos / 64 + i.sequence + walked[who];
      walked[who] += i.chunks;
      good &= early ? walked[who] < chunks && i.last_rows == 64 && guard == 1 : walked[who] == chunks && i.is_last == kFinalState;
      if (!early && chunks > 0) good &= i.last_rows == eos - bos - 64 * (chunks - 1);
      if (late)
        good &= left.count(i.start_index) && left[i.start_index] == who && i.segment == INT32_MAX;
      else
        good &= i.start == (p.initial ? QLA_START_INITIAL : QLA_START_ZERO);
      if (early) good &= left.emplace(i.start_index, who).second && i.start_index < shares;
      of_share += i.chunks, seen++;
    }
    good &= of_share <= share + qla::plan::kLeastPart;
  }
  check(good, name + ": shares");
  check(seen == h.num_items && int64_t(walked.size()) == items, name + ": every item once");
  for (const auto& [who, chunks] : walked)
    check(chunks == (p.cu[size_t(who.first) + 1] - p.cu[size_t(who.first)] + 63) / 64, name + ": every chunk once");
}

}  // namespace qla::test
