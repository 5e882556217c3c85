// qla_gdn_plan and qla_plan_print: the plan that a call with these shapes follows, for lengths and gates given on the host.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "api/guard.hpp"
#include "api/planned_call.hpp"
#include "api/structs.hpp"
#include "api/validate.hpp"
#include "core/backend.hpp"
#include "core/env.hpp"
#include "core/tensor_view.hpp"
#include "cuda/capabilities.hpp"
#include "cuda/forward_plan.hpp"
#include "plan/beside.hpp"
#include "plan/choose.hpp"
#include "plan/choose_cpu.hpp"
#include "plan/ranges.hpp"

namespace qla::api {
namespace {

using plan::Choice;
using plan::DeviceCosts;
using plan::Segment;

// As qla_gdn_forward_workspace answers.
size_t cpu_workspace(const qla_gdn_forward_args& args, const Problem& problem) {
  try {
    return cpu::forward_workspace(args, problem);
  } catch (const Error&) {
    return 0;  // not served here: the plan can be looked at all the same
  }
}

// Lengths of the sequences, checked against the tensors' shapes.
std::vector<int64_t> sequence_lengths(const Problem& problem, const int64_t* lens, int64_t num_lens) {
  if (lens == nullptr) {
    QLA_CHECK(num_lens == 0, "num_lens: expected 0 without lens, got ", num_lens, "; pass the lengths");
    QLA_CHECK(!problem.varlen || problem.num_seqs <= 1,
              "lens: expected the sequence lengths of a packed call (tensor data is not read here), ",
              "got NULL; pass N = ", problem.num_seqs, " lengths");
    return std::vector<int64_t>(static_cast<size_t>(problem.num_seqs), problem.tokens);
  }
  QLA_CHECK(num_lens == problem.num_seqs, "num_lens: expected N = ", problem.num_seqs, " as cu_seqlens or the batch say, got ",
            num_lens, "; pass one length for each sequence");
  int64_t total = 0;
  for (int64_t n = 0; n < num_lens; ++n) {
    QLA_CHECK(lens[n] >= 0 && (problem.varlen || lens[n] == problem.tokens), "lens[", n, "]: expected ",
              problem.varlen ? std::string("0 or more") : concat("T = ", problem.tokens, " (no cu_seqlens)"), ", got ", lens[n],
              "; pass token counts");
    const bool overflow = __builtin_add_overflow(total, lens[n], &total);
    QLA_CHECK(!overflow && total <= problem.total_tokens(), "lens[", n, "]: expected a sum of at most ", problem.total_tokens(),
              " tokens (q's shape), got more; pass the lengths that q holds");
  }
  return std::vector<int64_t>(lens, lens + num_lens);
}

// Longest first over the multiprocessors, as the persistent grid takes items: of any number of lengths.
float makespan(std::vector<float>& items, int32_t sms) {
  std::sort(items.begin(), items.end(), std::greater<>());
  std::vector<plan::EqualItems> kinds;
  for (const float us : items)
    if (!kinds.empty() && kinds.back().each == us)
      ++kinds.back().count;
    else
      kinds.push_back({1, us});
  std::vector<plan::FreeGroup> groups(kinds.size() + 1);
  return plan::makespan(kinds.data(), static_cast<int32_t>(kinds.size()), static_cast<float>(sms), groups.data());
}

float predict(const PlannedCall& planned, const Choice& choice, const plan::Shape& shape, const std::vector<Segment>& segments,
              int64_t chunks) {
  const DeviceCosts& costs = planned.costs;
  const plan::Candidate candidate{choice.rule.segment_chunks, choice.value_splits, choice.fused, choice.rule.uncut_chunks,
                                  choice.balanced};
  const auto items = static_cast<float>(static_cast<int64_t>(segments.size()) * choice.value_splits);
  const float per_chunk =
      plan::chunk_cost(costs, shape, candidate, items,
                       static_cast<float>(chunks) * static_cast<float>(shape.num_v_heads) / static_cast<float>(costs.num_sms));
  std::vector<float> main, pre;
  const plan::CutRule& rule = choice.rule;
  int64_t chain = 0, longest_chain = 0, chains = 0, merged = 0, of_heads = 0, merging = 0;
  int64_t longest = 0;  // chunks of a sequence
  for (const Segment& s : segments) longest = std::max(longest, s.first_chunk + s.num_chunks);
  bool cut = false;
  for (const Segment& s : segments) {
    cut |= s.index > 0;
    merged += s.start == QLA_START_MERGED;
    of_heads += s.is_end, merging += s.is_end && s.start == QLA_START_MERGED;  // a head's last segment says how it goes
    chain = s.start == QLA_START_MERGED ? chain + 1 : 0;
    chains += chain > 1 && s.is_end;  // with an M to multiply by
    longest_chain = std::max(longest_chain, chain);
  }
  const int64_t steps = longest_chain > 0 ? rule.first_pieces + rule.pieces * (longest_chain - 1) : 0;
  const float merges =
      static_cast<float>(longest_chain) * costs.merge + static_cast<float>(steps - longest_chain) * plan::kMoreMerges;
  const bool hidden = plan::hides_merges(costs, shape, static_cast<float>(choice.value_splits), static_cast<float>(chains),
                                         items - static_cast<float>(merged * choice.value_splits));
  for (const Segment& s : segments) {
    const float ends = s.index == 0 && s.is_end ? costs.item : plan::kSegmentEnds * costs.item;
    const float delay = hidden && s.start == QLA_START_MERGED ? merges : 0.0f;
    for (int32_t part = 0; part < choice.value_splits; ++part)
      main.push_back(static_cast<float>(s.walked_chunks()) * per_chunk + ends + delay);
    for (int32_t part = 0; part < 2; ++part) {
      const auto pieces = static_cast<int32_t>(plan::pieces_of_segment(rule, s.index));
      const float us = static_cast<float>(s.num_chunks) / static_cast<float>(pieces) * costs.state_half +
                       (pieces > 1 ? plan::kPieceEnds : 0.0f);
      for (int32_t piece = 0; piece < pieces && s.needs_end_state; ++piece) {
        pre.push_back(us + (piece == 0 ? static_cast<float>(s.warmup_chunks) * costs.state_half : 0.0f));
        if (piece > 0 || s.needs_transition) pre.push_back(us);
      }
    }
  }
  const float merging_share = static_cast<float>(merging) / static_cast<float>(std::max<int64_t>(1, of_heads));
  if (choice.balanced) {
    float total = 0, longest_us = 0;
    for (const float us : main) total += us, longest_us = std::max(longest_us, us);
    return plan::parallel_cost(costs, shape, candidate, static_cast<float>(chunks), cut, merging_share) +
           std::max(longest_us, total / static_cast<float>(costs.num_sms)) + plan::kHandOver;
  }
  return plan::parallel_cost(costs, shape, candidate, static_cast<float>(chunks), cut, merging_share) +
         makespan(main, costs.num_sms) + makespan(pre, costs.num_sms) + (hidden ? 0.0f : merges) +
         (cut ? costs.cut_item * static_cast<float>(segments.size()) : 0.0f) -
         plan::saved_by_direct_launch(costs, shape, candidate, longest);
}

void fill_plan(const qla_gdn_forward_args& args, const int64_t* lens, int64_t num_lens, const float* chunk_log_decay,
               qla_plan& result) {
  QLA_CHECK(result.segments_capacity >= 0, "plan.segments_capacity: expected 0 or more, got ", result.segments_capacity,
            "; pass the array's size");
  QLA_CHECK(result.segments != nullptr || result.segments_capacity == 0, "plan.segments: expected an array of ",
            result.segments_capacity, " segments, got NULL; pass it, or a capacity of 0");
  const Problem problem = validate(args, Stage::Query);
  const bool cuda = resolve_backend(args.backend, args.device, args.stream) == QLA_BACKEND_CUDA;
  if (cuda) cuda::check_served(problem);
  const std::vector<int64_t> lengths = sequence_lengths(problem, lens, num_lens);
  const plan::Policy policy = plan::make_policy(args, problem.dtype);

  PlannedCall planned = planned_call(args, problem, cuda);
  int64_t longest = 0;
  for (const int64_t length : lengths) longest = std::max(longest, plan::chunks_of(length));
  const Choice choice = plan::chosen_form(planned.choice, longest);
  if (choice.fused) planned.range_slots = problem.chunk_slots(), planned.ranges = 1;
  const float both_us =  // what the other form and ranges cost
      choice.fused_chunks > 0 ? plan::kBothForms + plan::kRangeLaunches * static_cast<float>(planned.ranges - 1) : 0.0f;

  // Where no gates are given: as choose() supposes.
  const float assumed = policy.threshold / static_cast<float>(plan::kAssumedWarmup);
  const int64_t never_forget = plan::assumed_exact_heads(problem.num_v_heads);
  std::vector<Segment> all;
  int64_t total_chunks = 0, written = 0, most_of_a_head = 0, items = 0;
  std::vector<int64_t> of_head(static_cast<size_t>(problem.num_v_heads), 0);
  const bool predicting = cuda;
  bool long_enough = false, cut = false;
  for (int64_t range = 0; range < planned.ranges; ++range) {
    const auto run_of = [&](int64_t n, int64_t token) {  // of sequence n, which begins at `token`
      const auto chunks = static_cast<int32_t>(plan::chunks_of(lengths[static_cast<size_t>(n)]));
      return choice.fused_chunks > 0 && planned.ranges > 1
                 ? plan::part_of_sequence(chunks, static_cast<int32_t>(range), static_cast<int32_t>(planned.ranges))
                 : plan::run_in_range(token / kChunk + n, chunks, range * planned.range_slots, planned.range_slots);
    };
    int64_t longest_part = 0;
    for (int64_t n = 0, token = 0; n < problem.num_seqs; token += lengths[static_cast<size_t>(n++)])
      longest_part = std::max<int64_t>(longest_part, run_of(n, token).chunks);
    const plan::CutRule rule = plan::rule_beside(choice.rule, longest_part);
    int64_t base = 0, token = 0;  // chunks and tokens of all earlier sequences
    for (int64_t n = 0; n < problem.num_seqs; ++n) {
      const int64_t chunks = plan::chunks_of(lengths[static_cast<size_t>(n)]);
      const plan::Run run = run_of(n, token);
      const bool given = present(args.initial_state) || run.continued();
      long_enough |= run.present && rule.cuts(run.chunks);
      for (int64_t head = 0; head < problem.num_v_heads && run.present; ++head) {
        const auto decay = [&](int64_t c) {
          return chunk_log_decay       ? chunk_log_decay[(base + run.first + c) * problem.num_v_heads + head]
                 : head < never_forget ? 0.0f
                                       : assumed;
        };
        const plan::Cut head_cut = plan::make_head_cut(run.chunks, rule, given, decay);
        plan::for_each_segment(head_cut, rule, given, false, decay, [&](const Segment& s) {
          if (written < result.segments_capacity)
            result.segments[written++] = {n, head, run.first + s.first_chunk, s.num_chunks, s.warmup_chunks, s.start, 0};
          ++items, ++of_head[static_cast<size_t>(head)];
          cut |= s.index > 0;
          if (predicting) all.push_back(s);
        });
      }
      base += chunks, token += lengths[static_cast<size_t>(n)];
    }
    total_chunks = base;
  }
  for (const int64_t count : of_head) most_of_a_head = std::max(most_of_a_head, count);

  result.num_sequences = problem.num_seqs;
  result.total_chunks = total_chunks;
  result.num_segments = most_of_a_head;
  result.num_items = items;
  result.value_splits = choice.value_splits;
  result.workspace_bytes = static_cast<int64_t>(cuda ? planned.workspace : cpu_workspace(args, problem));
  result.predicted_us =
      predicting ? static_cast<double>(both_us + predict(planned, choice, plan::shape_of(args, problem), all, total_chunks))
                 : 0.0;
  result.fused = choice.fused;
  result.ranges = static_cast<int32_t>(planned.ranges);
  result.segment_chunks = choice.rule.segment_chunks;
  result.uncut_chunks = choice.rule.uncut_chunks;
  const bool by_itself = policy.mode == QLA_CP_AUTO || policy.mode == QLA_CP_EXACT;
  const bool too_short = !long_enough && by_itself && choice.rule.segment_chunks > 0;
  const char* const why = total_chunks == 0     ? "no tokens: nothing to compute"
                          : too_short           ? "no sequence is long enough for a cut to pay: not cut"
                          : long_enough && !cut ? "no head forgets soon enough for a cut to pay: not cut"
                                                : planned.why;
  const std::string gates =  // where they decide
      chunk_log_decay || !long_enough || choice.rule.exact
          ? std::string()
          : concat("; gates not given: usual ones assumed",
                   never_forget > 0 ? concat(", ", never_forget, " of ", problem.num_v_heads, " heads never forget") : "");
  const std::string reason =
      concat(why, cuda && !planned.device_here ? " (no such device here: planned for an H200)" : "", gates);
  std::memset(result.reason, 0, sizeof(result.reason));
  std::strncpy(result.reason, reason.c_str(), sizeof(result.reason) - 1);
}

std::string segments_text(const qla_plan& p) {
  if (p.segment_chunks == 0 || p.num_segments <= p.num_sequences) return "not cut";
  int64_t longest = p.segment_chunks, shortest = 0;
  if (p.segments != nullptr && p.segments_capacity >= p.num_items) {  // else the limit is all that is known
    longest = 0, shortest = INT64_MAX;
    const auto in_one_sequence = [&](int64_t i, int64_t next) {
      return next >= 0 && next < p.num_items && p.segments[i].sequence == p.segments[next].sequence &&
             p.segments[i].head == p.segments[next].head;
    };
    for (int64_t i = 0; i < p.num_items; ++i)
      if (in_one_sequence(i, i - 1) || in_one_sequence(i, i + 1)) {
        longest = std::max(longest, p.segments[i].num_chunks);
        shortest = std::min(shortest, p.segments[i].num_chunks);
      }
    if (longest == 0) return "not cut";  // but taken in ranges
  }
  const std::string text = concat(longest == shortest ? "segments of " : "segments of at most ", counted(longest, "chunk"));
  return p.uncut_chunks > 0 ? concat(text, " (sequences of up to ", p.uncut_chunks, " whole)") : text;
}

std::string plan_text(const qla_plan& p) {
  constexpr int64_t kMostLines = 64;
  static const char* const starts[] = {"zero", "initial", "warm-up", "merged"};
  std::string text =
      concat("plan: ", p.reason, "\n", "  ", counted(p.num_sequences, "sequence"), ", ", counted(p.total_chunks, "chunk"), ", ",
             segments_text(p), ", ", counted(p.num_segments, "segment"), " a value head, ", p.num_items, " in all");
  text += concat("\n  V in ", counted(p.value_splits, "part"), p.fused ? ", intra-chunk stage fused" : "", ", workspace ",
                 p.workspace_bytes, " bytes",
                 p.ranges > 1 ? concat(", in ", p.ranges, " ranges of chunks one after the other") : std::string());
  if (p.predicted_us > 0) text += concat(", predicted ", static_cast<int64_t>(p.predicted_us + 0.5), " us");
  text += "\n";
  const int64_t known = std::min(p.num_items, p.segments ? p.segments_capacity : 0);
  if (known > 0) text += "  sequence head first_chunk chunks start warmup_chunks\n";
  for (int64_t i = 0; i < std::min(known, kMostLines); ++i) {
    const qla_segment& s = p.segments[i];
    const char* start = s.start >= QLA_START_ZERO && s.start <= QLA_START_MERGED ? starts[s.start] : "?";
    text += concat("  ", s.sequence, " ", s.head, " ", s.first_chunk, " ", s.num_chunks, " ", start, " ", s.warmup_chunks, "\n");
  }
  if (known > kMostLines) text += concat("  .. and ", p.num_items - kMostLines, " more\n");
  return text;
}

}  // namespace

PlannedCall planned_call(const qla_gdn_forward_args& args, const Problem& problem, bool cuda) {
  PlannedCall planned;
  const plan::Policy policy = plan::make_policy(args, problem.dtype);
  if (!cuda) {
    planned.choice.rule = plan::choose_cpu(policy, problem);
    if (!plan::shape_of(args, problem).may_cut) planned.choice.rule.segment_chunks = 0;
    planned.why = plan::cpu_reason_text(policy, planned.choice.rule);
    planned.range_slots = problem.chunk_slots();
    return planned;
  }
  qla_device_info_t info{};
  info.struct_size = sizeof(info);
  info.multiprocessors = plan::kH200.num_sms;
  info.capability_major = 9;
  try {
    cuda::device_info(args.device, &info);
  } catch (const Error&) {
    planned.device_here = false;  // plans can be looked at anywhere: an H200's row stands in
  }
  planned.costs = plan::device_costs(info.multiprocessors, info.capability_major);
  const cuda::PlanInput input = cuda::plan_input(args, problem, planned.costs);
  const cuda::WholePlans whole = cuda::whole_plans(input);
  const cuda::ForwardPlan plan = cuda::fitting_plan(input, whole, forward_workspace_limit());
  planned.workspace = std::clamp(forward_workspace_limit(), cuda::least_plan(input, whole).bytes, whole.best.bytes);
  planned.choice = plan.choice;
  planned.range_slots = plan.counts.range_slots;
  planned.ranges = plan.counts.ranges;
  planned.why = plan::reason_text(planned.choice.reason);
  return planned;
}

}  // namespace qla::api

using namespace qla::api;

extern "C" {

qla_status qla_gdn_plan(const qla_gdn_forward_args* args, const int64_t* lens, int64_t num_lens, const float* chunk_log_decay,
                        qla_plan* plan) {
  return guarded([&] {
    const auto& checked_args = checked(args, "args");
    fill_plan(checked_args, lens, num_lens, chunk_log_decay, checked(plan, "plan"));
  });
}

qla_status qla_plan_print(const qla_plan* plan, char* buffer, size_t capacity, size_t* length) {
  return guarded([&] {
    const qla_plan& checked_plan = checked(plan, "plan");
    QLA_CHECK(std::memchr(checked_plan.reason, 0, sizeof(checked_plan.reason)) != nullptr,
              "plan.reason: expected text that ends, got 256 bytes without a NUL; pass a plan that qla_gdn_plan filled");
    const std::string text = plan_text(checked_plan);
    if (length != nullptr) *length = text.size();
    QLA_CHECK(length != nullptr || buffer != nullptr,
              "length: expected a pointer, or a buffer to write to, got neither; pass one of them");
    if (buffer == nullptr || capacity == 0) return;
    const size_t copied = std::min(text.size(), capacity - 1);
    std::memcpy(buffer, text.data(), copied);
    buffer[copied] = '\0';
  });
}

}  // extern "C"
