// cut_passes against the host's for_each_segment() in both directions: items of both launches, merges, transitions; bad
// boundaries stay inside. pass_merge against float64.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "cuda/kernels/pass_merge/launch.hpp"
#include "cuda/kernels/plan_segments/cut.hpp"
#include "cuda/kernels/plan_segments/launch.hpp"
#include "device/harness.hpp"
#include "plan/beside.hpp"
#include "qla/qla.h"

using namespace qla::cuda;
using namespace qla::test;

namespace {

struct Problem {
  std::vector<int64_t> cu;  // boundaries as given
  int64_t tokens = 0;
  int heads = 1;
  bool wide = false, initial = true, final = true, wants_dh0 = true;
  std::vector<uint8_t> has_initial;
  qla::plan::CutRule rule;
  std::vector<float> decay;  // [slot][heads]
  int64_t seqs() const { return int64_t(cu.size()) - 1; }
  int64_t slots() const { return tokens / 64 + seqs(); }
  int64_t units() const { return qla::plan::most_segments(tokens, seqs(), rule) * heads; }
  int64_t states() const { return (tokens / 64 + seqs()) / rule.segment_chunks * heads; }
};
struct Lists {
  std::vector<PassItem> first, second;
  std::vector<PassChain> chains;
};

Lists run(const Problem& p, const std::string& name) {
  const int64_t most_first = 2 * p.units() + p.states(), most_second = 2 * p.units();
  std::vector<int32_t> narrow(p.cu.begin(), p.cu.end());
  Device<int32_t> cu32(narrow);
  Device<int64_t> cu64(p.cu);
  Device<uint8_t> flags(p.has_initial.empty() ? std::vector<uint8_t>(1) : p.has_initial);
  Device<float> decay(p.decay);
  Device<PassCounts> counts(1);
  Device<PassItem> first(most_first), second(most_second);
  Device<PassChain> chains(std::max<int64_t>(1, 2 * p.states()));
  Device<uint8_t> units(p.units() * segments::kPassUnitBytes);
  segments::PassCutArgs c{};
  c.plan.cu_seqlens = p.wide ? static_cast<const void*>(cu64.get()) : cu32.get();
  c.plan.index_dtype = p.wide ? QLA_INT64 : QLA_INT32;
  c.plan.has_initial = p.initial;
  c.plan.has_initial_state = p.has_initial.empty() ? nullptr : flags.get();
  c.plan.num_seqs = p.seqs();
  c.plan.tokens = p.tokens;
  c.plan.slots = int32_t(p.slots());
  c.plan.num_v_heads = p.heads;
  c.plan.v_parts = 1;
  c.rule = p.rule;
  c.decay = decay.get();
  c.has_final = p.final;
  c.wants_dh0 = p.wants_dh0;
  c.most_states = int32_t(p.states());
  c.most_units = int32_t(p.units());
  c.most_first = int32_t(most_first);
  c.most_second = int32_t(most_second);
  c.units = units.get();
  c.counts = counts.get();
  c.first = first.get();
  c.second = second.get();
  c.chains = chains.get();
  cuda_ok(segments::launch_cut_passes(c, nullptr), "cut_passes");
  cuda_ok(cudaDeviceSynchronize(), name.c_str());
  check(counts.guards_intact() && first.guards_intact() && second.guards_intact() && chains.guards_intact() &&
            units.guards_intact(),
        name + ": writes stay inside");
  const PassCounts n = counts.download()[0];
  check(n.first >= 0 && n.first <= most_first && n.second >= 0 && n.second <= most_second && n.chains >= 0 &&
            n.chains <= 2 * p.states(),
        name + ": counts");
  Lists lists{first.download(), second.download(), chains.download()};
  lists.first.resize(size_t(std::clamp<int64_t>(n.first, 0, most_first)));
  lists.second.resize(size_t(std::clamp<int64_t>(n.second, 0, most_second)));
  lists.chains.resize(size_t(std::clamp<int64_t>(n.chains, 0, 2 * p.states())));
  return lists;
}

using Key = std::tuple<int64_t, int, int, int, int, int, int, int, int, int, int, int, int>;
Key key(const PassItem& i) {
  return {i.token,  i.slot,    i.chunks, i.warmup,      i.last_rows, i.sequence,
          i.v_head, i.reverse, i.start,  i.start_index, i.end,       i.end == kToBuffer ? i.end_index : 0,
          i.initial};
}

// What the host says of good boundaries. A merged boundary behind segment j has the entry: segments of all (sequence, head)
// before, less their number, plus j.
void compare(const Problem& p, const Lists& lists, const std::string& name) {
  std::multiset<Key> want[2];
  std::multiset<std::tuple<int, int, int>> want_chains;
  int64_t base = 0;
  const qla::plan::CutRule rule = qla::plan::rule_where_cut(p.rule);  // as cut_passes has it: each sequence by itself
  for (int64_t n = 0; n < p.seqs(); n++) {
    const int64_t bos = p.cu[n], eos = p.cu[n + 1], chunks = (eos - bos + 63) / 64, slot = bos / 64 + n;
    const bool initial = p.initial && (p.has_initial.empty() || p.has_initial[n]);
    const qla::plan::Cut cut = qla::plan::make_cut(chunks, rule);
    for (int h = 0; h < p.heads; h++, base += cut.num_segments - 1) {
      std::set<int64_t> transitions;
      for (const bool reverse : {false, true}) {
        int64_t run_base = -1, run_count = 0;  // of merged boundaries
        qla::plan::for_each_segment(
            cut, rule, reverse ? p.final : initial, reverse, [&](int64_t c) { return p.decay[(slot + c) * p.heads + h]; },
            [&](const qla::plan::Segment& s) {
              const int64_t behind = base + s.index, from = reverse ? behind : behind - 1, to = reverse ? behind - 1 : behind;
              const int64_t low = reverse ? s.first_chunk : s.first_chunk - s.warmup_chunks;
              PassItem i{};
              i.token = bos + 64 * low;
              i.slot = int32_t(slot + low);
              i.chunks = int32_t(s.walked_chunks());
              i.warmup = int32_t(s.warmup_chunks);
              i.last_rows = low + i.chunks < chunks ? 64 : chunks ? int32_t(eos - bos - 64 * (chunks - 1)) : 0;
              i.sequence = int32_t(n);
              i.v_head = h;
              i.reverse = reverse;
              i.initial = initial;
              const bool merged = s.start == QLA_START_MERGED;
              i.start = merged ? kFromBuffer : s.start == QLA_START_INITIAL ? kFromCaller : kFromZero;
              i.start_index = merged ? int32_t(from) : 0;
              i.end = s.is_end                       ? (reverse && p.wants_dh0 ? kToCaller : kToNowhere)
                      : s.needs_end_state && !merged ? kToBuffer
                                                     : kToNowhere;
              i.end_index = int32_t(to);
              want[merged].insert(key(i));
              if (s.needs_transition) {
                transitions.insert(s.index);
                i.warmup = i.chunks;
                i.start = kFromZero;
                i.end = kToBuffer;
                want[0].insert(key(i));
              }
              if (s.needs_end_state && !merged) run_base = to, run_count = 0;
              if (s.needs_transition) run_count++;
              if (!s.needs_end_state && run_base >= 0) {
                if (run_count) want_chains.insert({int(run_base), int(run_count), int(reverse)});
                run_base = -1;
              }
            });
      }
      for (const int64_t j : transitions) {
        PassItem i{};
        i.token = bos + 64 * cut.begin(j);
        i.slot = int32_t(slot + cut.begin(j));
        i.chunks = i.warmup = int32_t(cut.begin(j + 1) - cut.begin(j));
        i.last_rows = cut.begin(j + 1) < chunks ? 64 : int32_t(eos - bos - 64 * (chunks - 1));
        i.sequence = int32_t(n);
        i.v_head = h;
        i.start = kFromIdentity;
        i.end = kToBuffer;
        i.end_index = int32_t(p.states() + base + j);
        want[0].insert(key(i));
      }
    }
  }
  for (const bool second : {false, true}) {
    std::multiset<Key> got;
    for (const PassItem& i : second ? lists.second : lists.first) got.insert(key(i));
    check_items(got, want[second], name + (second ? ": items from merged states" : ": items that need no merge"),
                "token, slot, chunks, warm-up, rows, sequence, head, reverse, start, index, end, index, initial");
    int64_t last = INT32_MAX, wrong = 0;
    for (const PassItem& i : second ? lists.second : lists.first) {
      const int64_t time = i.chunks * (i.reverse ? 3 : 2);
      wrong += time > last + last / 4 + 1;
      last = time;
    }
    check(wrong == 0, name + ": longest first");
  }
  std::multiset<std::tuple<int, int, int>> chains;
  for (const PassChain& c : lists.chains) chains.insert({c.base, c.count, c.reverse});
  check(chains == want_chains, name + ": merges");
}

void inside(const Problem& p, const Lists& lists, const std::string& name) {
  bool good = true;
  for (const auto* list : {&lists.first, &lists.second})
    for (const PassItem& i : *list) {
      good &= i.token >= 0 && i.chunks >= 0 && i.slot >= 0 && int64_t(i.slot) + i.chunks <= p.slots() && i.sequence >= 0 &&
              i.sequence < p.seqs() && i.v_head >= 0 && i.v_head < p.heads;
      if (i.chunks > 0) good &= i.token + 64 * int64_t(i.chunks - 1) + i.last_rows <= p.tokens && i.last_rows >= 1;
      if (i.start == kFromBuffer) good &= i.start_index >= 0 && i.start_index < p.states();
      if (i.end == kToBuffer) good &= i.end_index >= 0 && i.end_index < 2 * p.states();
    }
  for (const PassChain& c : lists.chains) {
    const int last = c.reverse ? c.base - c.count : c.base + c.count;
    good &= c.base >= 0 && c.base < p.states() && c.count > 0 && last >= 0 && last < p.states();
  }
  check(good, name + ": everything stays inside");
}

void test_merge() {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  constexpr int kEntries = 16;
  auto matrices = [&](float size) {
    std::vector<float> x(size_t(kEntries) * kStateFloats);
    for (float& y : x) y = size * normal(rng);
    return x;
  };
  const std::vector<float> forward = matrices(1), reverse = matrices(1), m = matrices(0.09f);
  const std::vector<PassChain> chains = {{0, 4, 0, 0}, {7, 1, 0, 0}, {9, 5, 1, 0}, {15, 2, 1, 0}, {10, 5, 0, 0}};
  std::vector<double> want[2] = {{forward.begin(), forward.end()}, {reverse.begin(), reverse.end()}};
  for (const PassChain& c : chains)
    for (int n = 0; n < c.count; n++) {
      const int64_t from = c.reverse ? c.base - n : c.base + n, to = c.reverse ? from - 1 : from + 1, by = c.reverse ? from : to;
      for (int v = 0; v < 128; v++)
        for (int k = 0; k < 128; k++) {
          double sum = 0;
          for (int i = 0; i < 128; i++)
            sum +=
                want[c.reverse][(from * 128 + v) * 128 + i] * m[c.reverse ? (by * 128 + k) * 128 + i : (by * 128 + i) * 128 + k];
          want[c.reverse][(to * 128 + v) * 128 + k] += sum;
        }
    }
  Device<float> states[2] = {Device<float>(forward), Device<float>(reverse)};
  std::vector<float> transposed(m.size());
  for (size_t i = 0; i < m.size(); i++) transposed[i] = m[i / kStateFloats * kStateFloats + i % 128 * 128 + i / 128 % 128];
  Device<float> transitions(m), other(transposed);
  Device<PassChain> list(chains);
  Device<PassCounts> counts(std::vector<PassCounts>{{0, 0, int32_t(chains.size()), 0}});
  cuda_ok(pass_merge::launch({counts.get(), list.get(), {states[0].get(), states[1].get()}, {transitions.get(), other.get()}},
                             int64_t(chains.size()), 3, nullptr),
          "pass_merge");
  cuda_ok(cudaDeviceSynchronize(), "pass_merge");
  for (int d = 0; d < 2; d++) {
    const std::vector<float> got = states[d].download();
    double error = 0, size = 0;
    for (size_t i = 0; i < got.size(); i++) error += std::pow(got[i] - want[d][i], 2), size += std::pow(want[d][i], 2);
    check(std::sqrt(error / size) < 1e-6, d ? "merges of the reverse pass" : "merges of the state pass");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "quick";  // for sanitizers
  cuda_ok(segments::prepare(), "prepare");
  cuda_ok(pass_merge::prepare(), "prepare");
  std::mt19937 rng(12);
  auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); };
  auto gates = [&](Problem& p) {
    p.decay.resize(size_t(p.slots() * p.heads));
    for (int64_t s = 0; s < p.slots(); s++)
      for (int h = 0; h < p.heads; h++) {
        float& d = p.decay[s * p.heads + h];
        d = h % 4 == 0 ? 0.f : -0.1f * float(pick(0, h % 4 == 1 ? 4 : 60));
        if (h % 4 == 3 && pick(0, 40) == 0) d = pick(0, 1) ? -50.f : 0.5f;
        if (h % 8 == 7 && pick(0, 100) == 0) d = NAN;
      }
  };
  for (int round = 0; round < (quick ? 5 : 40); round++) {
    Problem p;
    p.cu = {0};
    const int64_t n = pick(1, round % 5 == 0 ? 900 : 12);
    for (int64_t i = 0; i < n; i++)
      p.cu.push_back(p.cu.back() + (pick(0, 9) == 0 ? 0 : pick(0, 3) == 0 ? pick(1, 9000) : pick(1, 200)));
    p.tokens = p.cu.back() + pick(0, 200);
    p.heads = int(pick(1, 9));
    p.wide = pick(0, 1);
    p.initial = pick(0, 3) != 0;
    p.final = pick(0, 1);
    p.wants_dh0 = pick(0, 1);
    if (pick(0, 1))
      for (int64_t i = 0; i < n; i++) p.has_initial.push_back(uint8_t(pick(0, 1)));
    p.rule.segment_chunks = pick(1, 40);
    p.rule.uncut_chunks = pick(0, 2) ? 0 : pick(0, 100);
    p.rule.max_warmup_chunks = pick(0, 2 * p.rule.segment_chunks);
    p.rule.exact = pick(0, 5) == 0;
    p.rule.balance = int32_t(pick(0, 1));
    gates(p);
    const std::string name = "round " + std::to_string(round) + " (" + std::to_string(n) + " sequences, " +
                             std::to_string(p.heads) + " heads, L " + std::to_string(p.rule.segment_chunks) + ")";
    const Lists lists = run(p, name);
    compare(p, lists, name);
    inside(p, lists, name);
  }
  for (int round = 0; round < (quick ? 4 : 20); round++) {  // bad boundaries
    Problem p;
    p.tokens = pick(1, 3000);
    const int64_t n = pick(1, 20);
    for (int64_t i = 0; i <= n; i++) p.cu.push_back(pick(0, 1) ? pick(-5000, 8000) : pick(0, p.tokens));
    p.cu[size_t(pick(0, n))] = pick(0, 1) ? INT32_MAX : INT32_MIN;
    p.heads = 3;
    p.rule.segment_chunks = pick(1, 8);
    p.rule.max_warmup_chunks = 4;
    gates(p);
    const std::string name = "bad boundaries " + std::to_string(round);
    inside(p, run(p, name), name);
  }
  test_merge();
  return summary("backward_cut");
}
