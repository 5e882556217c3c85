// plan_segments and cut_items against the host's for_each_segment(): tables, items of both lists, chains; bad boundaries stay
// inside.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "cuda/kernels/chunk_gates/config.hpp"
#include "cuda/kernels/plan_segments/cut.hpp"
#include "cuda/kernels/plan_segments/launch.hpp"
#include "device/harness.hpp"
#include "device/plan_balanced.cuh"
#include "device/plan_beside.cuh"
#include "device/plan_problem.cuh"
#include "device/plan_timing.cuh"

using namespace qla::cuda;
using namespace qla::test;

namespace {

Tables run(const Problem& p, const std::string& name) {
  const int64_t segments = qla::plan::most_segments(p.tokens, p.seqs(), p.rule), items = segments * p.heads * p.v_parts;
  const int64_t states = most_states(p);
  std::vector<int32_t> narrow(p.cu.begin(), p.cu.end());
  Device<int32_t> cu32(narrow);
  Device<int64_t> cu64(p.cu);
  Device<uint8_t> flags(p.has_initial.empty() ? std::vector<uint8_t>(1) : p.has_initial);
  Device<PlanHeader> header(size_t(p.parts)), pre_header(1);
  Device<WorkItem> main_items(p.parts * items), pre_items(std::max<int64_t>(1, 2 * states * p.v_parts));
  Device<ChunkRecord> chunks(std::max<int64_t>(1, p.parts * p.slots()));
  Device<float> decay(p.decay.empty() ? std::vector<float>(1) : p.decay);
  // made while cut_few looks at them: whatever lay there before
  Device<float> late(std::vector<float>(p.beside ? size_t(p.slots() * p.heads) : 1, -1.f));
  Device<int> ended(std::vector<int>(1)), seen(std::vector<int>(1));
  Device<MergeChain> chains(p.seqs() * p.heads);
  Device<uint8_t> transitions(std::max<int64_t>(1, states)), heads(size_t(p.seqs() * p.heads));
  Device<int32_t> until(size_t(p.seqs() * p.heads));
  const int64_t most_units = qla::plan::most_units(p.tokens, p.seqs(), p.rule) * p.heads;
  Device<uint8_t> units(most_units * segments::kUnitBytes);
  Device<PlanHeader> fused_header(1), cut_header(1);
  Device<WorkItem> uncut_items(size_t(p.seqs() * p.heads * 2));
  Device<WorkItem> fused_items(size_t(p.seqs() * p.heads));
  // beside the plan in the launch of a call with both forms
  constexpr int kRecord = kFusedVecFloats;
  const size_t gates = size_t(p.tokens * p.heads), records = p.fused_chunks ? size_t(p.all_slots() * p.heads * kRecord) : 1;
  Device<float> gate(std::vector<float>(p.fused_chunks ? gates : 1, -0.5f)), vec(records);
  segments::Args a{};
  a.cu_seqlens = p.wide ? static_cast<const void*>(cu64.get()) : cu32.get();
  a.index_dtype = p.wide ? QLA_INT64 : QLA_INT32;
  a.has_initial = p.initial;
  a.has_initial_state = p.has_initial.empty() ? nullptr : flags.get();
  a.num_seqs = p.seqs();
  a.tokens = p.tokens;
  a.slots = int32_t(p.slots());
  a.first_slot = int32_t(p.first_slot);
  a.num_v_heads = p.heads;
  a.v_parts = p.v_parts;
  a.checkpoint_every_chunks = p.checkpoint_every;
  a.header = header.get();
  a.items = main_items.get();
  a.chunk_table = chunks.get();
  if (p.uncut_parts) a.v_parts = p.uncut_parts, a.items = uncut_items.get();
  if (p.fused_chunks) {
    a.fused_chunks = p.fused_chunks;
    a.fused_header = fused_header.get();
    a.fused_items = fused_items.get();
    a.slots = int32_t(p.all_slots());
    a.ranges = int32_t(p.parts);
    a.range_slots = int32_t(p.slots());
    a.range_items = items;
    const gates::Args g = gates_of(p.tokens, p.heads, gate.get(), vec.get());
    cuda_ok(segments::launch_with_gates(a, g, multiprocessors(), nullptr), "plan_and_gates");
  } else {
    if (p.beside) a.sums = late.get(), a.longest_whole = p.rule.longest_whole();
    cuda_ok(segments::launch(a, multiprocessors(), nullptr), "plan_segments");
    if (p.beside) launch_make_sums(chunks.get(), decay.get() + p.first_slot * p.heads, late.get(), a.slots, p.heads, ended.get());
  }
  if (p.rule.segment_chunks) {
    segments::CutArgs c{};
    c.plan = a;
    c.plan.items = main_items.get();
    if (p.uncut_parts) {
      c.uncut_header = a.header;
      c.plan.header = cut_header.get();
      c.plan.v_parts = p.v_parts;
    }
    c.rule = p.rule;
    c.decay = decay.get() + p.first_slot * p.heads;
    if (p.beside) c.decay = late.get(), c.beside = 1, c.rehearses = p.rehearses;
    c.need_bases = 1;
    c.most_states = int32_t(states);
    c.most_units = int32_t(most_units);
    c.most_items = int32_t(segments * p.heads);
    c.units = units.get();
    c.pre_v_parts = p.v_parts;
    c.pre_header = pre_header.get();
    c.pre_items = pre_items.get();
    c.chains = chains.get();
    c.transitions = transitions.get();
    if (p.says_heads) c.heads = heads.get(), c.until = until.get();
    cuda_ok(segments::launch_cut(c, nullptr), "cut_items");
    if (p.beside) launch_look(ended.get(), seen.get());
  }
  cuda_ok(cudaDeviceSynchronize(), name.c_str());
  check(header.guards_intact() && pre_header.guards_intact() && main_items.guards_intact() && pre_items.guards_intact() &&
            chunks.guards_intact() && chains.guards_intact() && transitions.guards_intact() && units.guards_intact() &&
            uncut_items.guards_intact() && heads.guards_intact() && until.guards_intact() && cut_header.guards_intact() &&
            late.guards_intact() && fused_header.guards_intact() && fused_items.guards_intact() && vec.guards_intact(),
        name + ": writes stay inside");
  if (p.beside) check(seen.download()[0] == 1, name + ": ends behind what makes the sums");
  Tables t{chunks.download(),    main_items.download(),    pre_items.download(), chains.download(), transitions.download(),
           header.download()[0], pre_header.download()[0], heads.download(),     until.download()};
  if (p.uncut_parts) {  // one list has everything
    const PlanHeader cut = cut_header.download()[0];
    const PlanHeader& none = cuts_anything(p) ? t.header : cut;
    if (p.says_heads && cuts_anything(p)) {
      int64_t walked = 0, chunks = 0;
      const std::vector<WorkItem> list = uncut_items.download();
      for (int64_t i = 0; i < std::min<int64_t>(none.num_items, int64_t(list.size())); i++) walked += list[size_t(i)].chunks;
      for (int64_t n = 0; n < p.seqs(); n++) chunks += (p.cu[n + 1] - p.cu[n] + 63) / 64;
      if (good_boundaries(p) && p.slots() == p.all_slots())
        check(none.num_items == p.seqs() * p.heads * p.uncut_parts && walked == chunks * p.heads * p.uncut_parts,
              name + ": the uncut list stays");
    } else {
      check(none.num_items == 0 && none.end_token == p.tokens, name + ": the other list has no items");
    }
    if (cuts_anything(p))
      t.header = cut;
    else
      t.items = uncut_items.download();
  }
  if (p.fused_chunks) {  // one form has everything, the other nothing to do, not even padding
    const auto idle = [&](const PlanHeader& h) { return h.num_items == 0 && h.next_item == 0 && h.end_token == p.tokens; };
    const std::vector<PlanHeader> headers = header.download();
    const bool fused = takes_fused(p);
    if (fused) {
      check(std::all_of(headers.begin(), headers.end(), idle), name + ": the two kernels have no items");
      t.header = fused_header.download()[0];
      t.items = fused_items.download();
      check(t.header.num_items == p.seqs() * p.heads, name + ": the fused form has all items");
    } else {
      check(idle(fused_header.download()[0]), name + ": the fused form has no items");
      for (const WorkItem& i : fused_items.download()) check(i.chunks == 0, name + ": its list is written all the same");
      t.header = headers[size_t(p.part)];
      t.items.erase(t.items.begin(), t.items.begin() + p.part * items);
      t.chunks.erase(t.chunks.begin(), t.chunks.begin() + p.part * p.slots());
      t.chunks.resize(size_t(p.slots()));
    }
    const std::vector<float> vectors = vec.download();
    std::set<int64_t> used;  // slots
    for (int64_t n = 0; n < p.seqs() && good_boundaries(p); n++)
      for (int64_t c = 0; 64 * c < p.cu[size_t(n) + 1] - p.cu[size_t(n)]; c++) used.insert(p.cu[size_t(n)] / 64 + n + c);
    bool as_chosen = true;
    for (int64_t s = 0; s < p.all_slots(); s++)
      for (int h = 0; h < p.heads; h++) {
        const float first = vectors[size_t((s * p.heads + h) * kRecord)];
        as_chosen &= (first == first) == (fused && used.count(s) > 0);  // NaN where nothing was written
      }
    if (good_boundaries(p)) check(as_chosen, name + ": gate vectors where the fused form takes them");
  }
  const auto most = int64_t(t.items.size());
  check(t.header.num_items >= 0 && t.header.num_items <= most, name + ": number of items");
  t.items.resize(size_t(std::clamp<int64_t>(t.header.num_items, 0, most)));
  if (!p.rule.segment_chunks) {
    t.pre_items.clear();
    t.chains.clear();
  } else {
    check((t.pre_header.num_items != 0) == (t.pre_header.cut != 0), name + ": a cut's answer is never no items");
    t.pre_items.resize(size_t(std::clamp<int64_t>(t.pre_header.num_items, 0, int64_t(t.pre_items.size()))));
    t.chains.resize(size_t(std::min<int64_t>(t.pre_header.num_merges, int64_t(t.chains.size()))));
  }
  return t;
}

using Key = std::tuple<int64_t, int, int, int, int, int, int, int, int, int, int, int>;
Key key(const WorkItem& i, bool with_index) {
  return {i.token,    i.slot,       i.chunks, i.warmup, i.last_rows,
          i.sequence, i.v_head,     i.v_part, i.start,  with_index ? i.start_index : 0,
          i.is_last,  i.first_chunk};
}

// What the host says of good boundaries.
void compare(const Problem& p, const Tables& t, const std::string& name) {
  std::multiset<Key> want, want_pre;
  std::vector<std::pair<int, int>> want_chains;
  std::vector<uint8_t> want_transitions;
  std::map<int64_t, ChunkRecord> records;
  const int64_t states = most_states(p);
  int entry = 0;
  bool bases = true, words = true;
  std::vector<int64_t> chunk_base(p.seqs() + 1, 0), checkpoint_base(p.seqs() + 1, 0);
  const bool fused = takes_fused(p);
  const int v_parts = fused ? 1 : p.uncut_parts && !cuts_anything(p) ? p.uncut_parts : p.v_parts;
  const int64_t parts = fused ? 1 : p.parts, slots = fused ? p.all_slots() : p.slots();
  const qla::plan::CutRule rule = rule_of(p);
  int64_t walked = 0;  // chunks of earlier sequences in this range of parts
  for (int64_t n = 0; n < p.seqs(); n++) {
    const int64_t bos = p.cu[n], eos = p.cu[n + 1], chunks = (eos - bos + 63) / 64, slot = bos / 64 + n;
    chunk_base[n + 1] = chunk_base[n] + chunks;
    checkpoint_base[n + 1] = checkpoint_base[n] + (p.checkpoint_every ? (eos - bos) / (64 * p.checkpoint_every) : 0);
    const qla::plan::Run part = parts > 1 ? qla::plan::part_of_sequence(int32_t(chunks), int32_t(p.part), int32_t(parts))
                                          : qla::plan::run_in_range(slot, int32_t(chunks), p.first_slot, slots);
    const int64_t first_in_tables = parts > 1 ? walked - part.first : slot - p.first_slot;  // of the sequence's first chunk
    walked += part.chunks;
    for (int64_t c = part.first; c < part.first + part.chunks; c++)
      records[first_in_tables + c] = {bos + 64 * c, int32_t(std::min<int64_t>(64, eos - bos - 64 * c)), int32_t(n)};
    const bool given = p.initial && (p.has_initial.empty() || p.has_initial[n]), initial = given || part.continued();
    for (int h = 0; h < p.heads && part.present; h++) {
      const auto decay = [&](int64_t c) { return p.decay[(slot + part.first + c) * p.heads + h]; };
      const qla::plan::Cut cut = qla::plan::make_head_cut(part.chunks, rule, initial, decay);
      int previous = -1, boundaries = 0, merged_boundaries = 0, until = 0;
      const int first_entry = entry;
      qla::plan::for_each_segment(cut, rule, initial, false, decay, [&](const qla::plan::Segment& s) {
        boundaries += s.index > 0, merged_boundaries += s.start == QLA_START_MERGED;
        WorkItem i{};
        i.first_chunk = int32_t(part.first + s.first_chunk - s.warmup_chunks);
        i.token = bos + 64 * int64_t(i.first_chunk);
        i.slot = int32_t(first_in_tables + i.first_chunk);
        i.chunks = int32_t(s.walked_chunks());
        i.warmup = int32_t(s.warmup_chunks);
        i.last_rows = i.first_chunk + i.chunks < chunks ? 64 : chunks ? int32_t(eos - bos - 64 * (chunks - 1)) : 0;
        i.sequence = int32_t(n);
        i.v_head = h;
        const int start = s.start == QLA_START_INITIAL && part.continued() ? kStartCarried : s.start;
        i.start = start;
        i.start_index = s.start == QLA_START_MERGED ? previous : 0;
        i.is_last = !s.is_end ? 0 : part.goes_on ? kCarry : kFinalState;
        for (i.v_part = 0; i.v_part < v_parts; i.v_part++) want.insert(key(i, true));
        if (!s.needs_end_state) return;
        until = i.slot + i.chunks;
        i.is_last = 0;
        const int64_t pieces = qla::plan::pieces_of_segment(p.rule, s.index);
        for (int64_t piece = 0; piece < pieces; piece++) {
          const int64_t from = piece ? s.warmup_chunks + qla::plan::begin_of_piece(s.num_chunks, pieces, piece) : 0,
                        until = s.warmup_chunks + qla::plan::begin_of_piece(s.num_chunks, pieces, piece + 1);
          const bool moves = piece > 0 || s.needs_transition;
          WorkItem walk = i;
          walk.first_chunk += int32_t(from), walk.slot += int32_t(from), walk.token += 64 * from;
          walk.chunks = int32_t(until - from);
          walk.warmup = piece ? 0 : i.warmup;
          walk.last_rows = 64;
          walk.start = moves ? QLA_START_ZERO : start;
          walk.start_index = entry;
          for (walk.v_part = 0; walk.v_part < p.v_parts; walk.v_part++) want_pre.insert(key(walk, true));
          walk.start = kStartIdentity;
          walk.start_index = int32_t(states + entry);
          for (walk.v_part = 0; walk.v_part < p.v_parts && moves; walk.v_part++) want_pre.insert(key(walk, true));
          want_transitions.push_back(uint8_t(moves));
          previous = entry++;
        }
      });
      if (entry > first_entry) want_chains.push_back({first_entry, entry - first_entry});
      const int bits = (merged_boundaries < boundaries) * kHeadForgets;
      if (p.says_heads && cuts_anything(p))
        words &= t.heads[size_t(n * p.heads + h)] == bits && t.until[size_t(n * p.heads + h)] == until;
    }
  }
  // Entries have gaps between heads; in order they are as the host counts them. Translate them by the chains.
  std::vector<std::pair<int, int>> chains;
  for (const MergeChain& c : t.chains) chains.push_back({c.first, c.count});
  std::sort(chains.begin(), chains.end());
  std::map<int, int> counted;  // entry -> the host's
  bool chains_right = chains.size() == want_chains.size();
  for (size_t i = 0; i < chains.size() && chains_right; i++) {
    chains_right = chains[i].second == want_chains[i].second;
    for (int j = 0; j < chains[i].second && chains_right; j++) counted[chains[i].first + j] = want_chains[i].first + j;
  }
  check(chains_right && int(counted.size()) == entry, name + ": chains");
  check(words, name + ": heads that forget, how far the pre-pass walks");
  const auto host_entry = [&](int e) { return counted.count(e) ? counted[e] : -1; };
  bool same = true;
  for (const auto& [e, host] : counted) same &= t.transitions[size_t(e)] == want_transitions[size_t(host)];
  check(same, name + ": transitions");
  std::multiset<Key> got, got_pre;
  int64_t last_length = INT32_MAX, lengths_wrong = 0;
  for (WorkItem i : t.items) {
    if (i.start == QLA_START_MERGED) i.start_index = host_entry(i.start_index);
    got.insert(key(i, true));
    bases &= i.chunk_base == chunk_base[i.sequence] && i.checkpoint_base == checkpoint_base[i.sequence];
    if (i.start == QLA_START_MERGED && p.rule.segment_chunks) continue;  // those come behind
    lengths_wrong += i.chunks > last_length + last_length / 4 + 1;
    last_length = i.chunks;
  }
  for (WorkItem i : t.pre_items) {
    const int first = i.start == kStartIdentity ? int(states) : 0;
    i.start_index = first + host_entry(i.start_index - first);
    got_pre.insert(key(i, true));
  }
  check_items(got, want, name + ": items of the main pass",
              "token, slot, chunks, warm-up, last rows, sequence, head, part, start, index, last, first");
  check(got_pre == want_pre, name + ": items of the pre-pass");
  check(bases, name + ": rows of snapshots and checkpoints");
  check(lengths_wrong == 0, name + ": longest first");
  bool table = true;
  for (int64_t s = 0; s < p.slots() && !fused; s++) {  // the fused form walks without it
    const auto found = records.find(s);
    const ChunkRecord& r = t.chunks[s];
    table &= found == records.end()
                 ? r.rows == 0
                 : r.rows == found->second.rows && r.token == found->second.token && r.sequence == found->second.sequence;
  }
  check(table, name + ": chunk table");
  const bool last_range = parts > 1 ? p.part == parts - 1 : fused || p.first_slot + p.slots() == p.all_slots();  // that pads
  check(t.header.end_token == (last_range ? p.cu.back() : p.tokens) && t.header.valid_tokens == 1, name + ": header");
}

// Whatever the boundaries: records and items lie inside.
void inside(const Problem& p, const Tables& t, const std::string& name) {
  const bool fused = takes_fused(p);
  bool good = t.header.valid_tokens == 0 && t.header.end_token >= 0 && t.header.end_token <= p.tokens;
  for (const ChunkRecord& r : fused ? std::vector<ChunkRecord>{} : t.chunks)
    good &= r.rows == 0 || (r.rows > 0 && r.rows <= 64 && r.token >= 0 && r.token + r.rows <= p.tokens && r.sequence >= 0 &&
                            r.sequence < p.seqs());
  const int64_t states = most_states(p);
  for (const MergeChain& c : t.chains) good &= c.first >= 0 && c.count > 0 && int64_t(c.first) + c.count <= states;
  for (const WorkItem& i : t.items)  // a merged start is one of a chain's entries
    if (p.rule.segment_chunks && i.start == QLA_START_MERGED)
      good &= std::any_of(t.chains.begin(), t.chains.end(),
                          [&](const MergeChain& c) { return i.start_index >= c.first && i.start_index < c.first + c.count; });
  for (const auto* list : {&t.items, &t.pre_items})
    for (const WorkItem& i : *list) {
      good &= i.token >= 0 && i.chunks >= 0 && i.slot >= 0 && int64_t(i.slot) + i.chunks <= (fused ? p.all_slots() : p.slots()) &&
              i.sequence >= 0 && i.sequence < p.seqs() && i.v_head >= 0 && i.v_head < p.heads;
      if (i.chunks > 0)
        good &= i.token + 64 * int64_t(i.chunks - 1) + i.last_rows <= p.tokens && i.last_rows >= 1 && i.last_rows <= 64;
    }
  check(good, name + ": everything stays inside");
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "quick";  // for sanitizers
  cuda_ok(segments::prepare(), "prepare");
  if (argc > 1 && std::string(argv[1]) == "time") return time_planning(), 0;
  std::mt19937 rng(11);
  auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); };
  auto boundaries = [&](std::vector<int64_t> lens, int64_t padding) {
    Problem p;
    p.cu = {0};
    for (int64_t l : lens) p.cu.push_back(p.cu.back() + l);
    p.tokens = p.cu.back() + padding;
    return p;
  };
  auto gates = [&](Problem& p) {
    p.decay.resize(size_t(p.all_slots() * p.heads));
    for (int64_t s = 0; s < p.all_slots(); s++)
      for (int h = 0; h < p.heads; h++) p.decay[s * p.heads + h] = h % 4 == 0 ? 0.f : -0.1f * float(pick(0, h % 4 == 1 ? 4 : 60));
  };
  for (int round = 0; round < (quick ? 5 : 30); round++) {
    std::vector<int64_t> lens(size_t(pick(1, round % 5 == 0 ? 1500 : 12)));
    for (auto& l : lens) l = pick(0, 9) == 0 ? 0 : pick(0, 3) == 0 ? pick(1, 9000) : pick(1, 200);
    Problem p = boundaries(lens, pick(0, 200));
    p.heads = int(pick(1, 9));
    p.v_parts = int(pick(1, 2));
    p.wide = pick(0, 1);
    p.initial = pick(0, 3) != 0;
    p.checkpoint_every = int(pick(0, 2)) * 3;
    if (pick(0, 1))
      for (size_t n = 0; n < lens.size(); n++) p.has_initial.push_back(uint8_t(pick(0, 1)));
    if (round % 3 != 0) {
      p.rule.segment_chunks = pick(1, 40);
      p.rule.uncut_chunks = pick(0, 2) ? 0 : pick(0, 100);
      p.rule.max_warmup_chunks = pick(0, 2 * p.rule.segment_chunks);
      p.rule.exact = pick(0, 5) == 0;
      p.rule.balance = int32_t(pick(0, 1));
      p.uncut_parts = int(pick(0, 2));
      if (pick(0, 3)) refine(p, pick);
      p.says_heads = p.uncut_parts > 0 && pick(0, 1);
    }
    gates(p);
    p.beside = p.rule.segment_chunks && pick(0, 1) && refines(p);
    p.rehearses = round % 2;
    const std::string name = "round " + std::to_string(round) + " (" + std::to_string(lens.size()) + " sequences, " +
                             std::to_string(p.heads) + " heads, L " + std::to_string(p.rule.segment_chunks) + ")";
    compare(p, run(p, name), name);
    if (p.all_slots() > 1500) continue;
    p.range_slots = pick(1, p.all_slots());
    const int64_t ranges = (p.all_slots() + p.range_slots - 1) / p.range_slots;
    for (int64_t index = 0; index < ranges; index++) {
      if (index > 3 && index < ranges - 2) continue;
      p.first_slot = index * p.range_slots;
      const std::string range = name + ", range from " + std::to_string(p.first_slot);
      compare(p, run(p, range), range);
    }
  }
  for (int round = 0; round < (quick ? 5 : 60); round++) {  // few sequences, refined cuts; then bad boundaries
    std::vector<int64_t> lens(size_t(pick(1, 4)));
    for (auto& l : lens) l = pick(0, 7) == 0 ? 0 : pick(1, 20000);
    Problem p = boundaries(lens, pick(0, 1) * pick(0, 300));
    p.heads = int(pick(1, 32));
    p.v_parts = int(pick(1, 2));
    p.initial = pick(0, 1);
    const int64_t longest = longest_chunks(p);
    p.rule.segment_chunks = std::max<int64_t>(2, longest / pick(1, 9));
    p.rule.uncut_chunks = pick(0, 3) ? 0 : longest / 2;
    p.rule.max_warmup_chunks = p.rule.segment_chunks / 2;
    p.uncut_parts = int(pick(0, 2));
    gates(p);
    refine(p, pick);
    const std::string name = "refined " + std::to_string(round) + " (L " + std::to_string(p.rule.segment_chunks) + ", " +
                             std::to_string(p.rule.merged_chunks) + ", pieces " + std::to_string(p.rule.first_pieces) + ", " +
                             std::to_string(p.rule.pieces) + ")";
    compare(p, run(p, name), name);
    p.beside = refines(p);
    if (p.beside) compare(p, run(p, name + ", beside"), name + ", beside");
    p.rehearses = true;
    if (p.beside) compare(p, run(p, name + ", rehearsed"), name + ", rehearsed");
    const qla::plan::CutRule rule = p.rule;
    p.rule.uncut_chunks = std::max(longest, rule.segment_chunks);  // the longest is just not cut
    if (p.beside) compare(p, run(p, name + ", whole"), name + ", whole");
    const Problem good = p;
    for (auto& x : p.cu)
      if (pick(0, 2) == 0) x = pick(-5000, 2 * p.tokens);
    p.cu[0] = -1;
    if (p.beside) inside(p, run(p, name + ", whole, bad boundaries"), name + ", whole, bad boundaries");
    p = good;
    p.rule = rule;
    for (auto& x : p.cu)
      if (pick(0, 2) == 0) x = pick(-5000, 2 * p.tokens);
    p.cu[0] = -1;
    inside(p, run(p, name + ", bad boundaries"), name + ", bad boundaries");
  }
  for (int round = 0; round < (quick ? 4 : 24); round++) {  // both forms: lengths about the crossing, and exactly there
    std::vector<int64_t> lens(size_t(pick(2, 3)));
    for (auto& l : lens) l = pick(0, 5) == 0 ? 0 : pick(1, 6000);
    Problem p = boundaries(lens, pick(0, 1) * pick(0, 300));
    p.heads = int(pick(1, quick ? 5 : 40));
    p.v_parts = 2;
    p.wide = pick(0, 1);
    p.initial = pick(0, 1);
    p.fused_chunks = std::max<int64_t>(1, round % 4 == 0   ? longest_chunks(p)
                                          : round % 4 == 1 ? longest_chunks(p) - 1
                                                           : pick(1, 100));
    const std::string name = "both forms " + std::to_string(round) + (takes_fused(p) ? ", fused" : ", two kernels");
    compare(p, run(p, name), name);
    p.parts = pick(2, 4);
    for (p.part = 0; p.part < p.parts; p.part++) {
      const std::string range = name + ", range " + std::to_string(p.part) + " of " + std::to_string(p.parts);
      compare(p, run(p, range), range);
    }
  }
  for (int round = 0; round < (quick ? 2 : 10); round++) {
    Problem p;
    p.tokens = pick(1, 3000);
    for (int64_t i = 0; i <= 3; i++) p.cu.push_back(pick(0, 1) ? pick(-5000, 8000) : pick(0, p.tokens));
    p.cu[size_t(pick(0, 3))] = INT32_MAX;
    p.heads = 3;
    p.v_parts = 2;
    p.fused_chunks = pick(1, 40);
    for (p.parts = 1; p.parts <= 3; p.parts++)
      for (p.part = 0; p.part < p.parts; p.part++) {
        const std::string name = "both forms, bad boundaries " + std::to_string(round) + ", " + std::to_string(p.part);
        inside(p, run(p, name), name);
      }
  }
  for (int round = 0; round < (quick ? 4 : 40); round++) {
    std::vector<int64_t> lens(size_t(pick(1, round % 4 == 0 ? 60 : 12)));
    const int64_t equal = pick(1, 3000);
    for (auto& l : lens) l = round % 2 ? equal : pick(0, 5) == 0 ? 0 : pick(1, 4000);
    Problem p = boundaries(lens, pick(0, 1) * pick(0, 300));
    p.heads = int(pick(1, quick ? 5 : 40));
    p.wide = pick(0, 1);
    p.initial = pick(0, 1);
    balanced(p, int(pick(2, 140)), int(pick(1, 140)), "balanced " + std::to_string(round));
    for (auto& x : p.cu)
      if (pick(0, 3) == 0) x = pick(-3000, 2 * p.tokens);
    balanced(p, int(pick(2, 140)), 132, "balanced, bad boundaries " + std::to_string(round));
  }
  if (!quick) {  // one very long sequence, and very many
    Problem p = boundaries({1048576 - 7}, 7);
    p.heads = 8;
    p.rule.segment_chunks = 300;
    p.rule.max_warmup_chunks = 150;
    gates(p);
    compare(p, run(p, "a million tokens"), "a million tokens");
    Problem q = boundaries(std::vector<int64_t>(70000, 3), 0);
    gates(q);
    compare(q, run(q, "70,000 sequences"), "70,000 sequences");
  }
  for (int heads : {1, 5}) {  // the same tokens again and again, none of them forgotten: more entries than shapes allow
    Problem p;
    p.tokens = 64 * 64;
    p.cu = {0, p.tokens, 0, p.tokens, 0, p.tokens, 0, p.tokens};
    p.heads = heads;
    p.rule.segment_chunks = 4, p.rule.max_warmup_chunks = 4;
    p.decay.assign(size_t(p.all_slots() * p.heads), 0.f);
    const std::string name = "overlapping sequences, " + std::to_string(heads) + " heads";
    inside(p, run(p, name), name);
  }
  for (int round = 0; round < (quick ? 4 : 20); round++) {  // bad boundaries
    Problem p;
    p.tokens = pick(1, 3000);
    const int64_t n = pick(1, 20);
    for (int64_t i = 0; i <= n; i++) p.cu.push_back(pick(0, 1) ? pick(-5000, 8000) : pick(0, p.tokens));
    p.cu[size_t(pick(0, n))] = pick(0, 1) ? INT32_MAX : INT32_MIN;
    p.heads = 3;
    if (round % 2) p.rule.segment_chunks = pick(1, 8), p.rule.max_warmup_chunks = 4;
    if (round % 4 > 1) p.range_slots = pick(1, p.all_slots()), p.first_slot = pick(0, p.all_slots() - p.range_slots);
    gates(p);
    const std::string name = "bad boundaries " + std::to_string(round);
    inside(p, run(p, name), name);
  }
  return summary("plan");
}
