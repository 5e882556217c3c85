#include "cpu/segments.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/lanes.hpp"

namespace qla::cpu {
namespace {

inline constexpr int64_t kMergeBudget = 32LL * 1024 * 1024;  // bytes of merged states and transitions at a time

// ghat (C4) summed over the chunks of 64 that a rule may look at: those near a boundary, and all of a sequence with a given
// state, which every chunk must help to forget. The others count 0. Whether inputs are finite is seen later, from end states.
template <class T>
class Decays {
 public:
  Decays(const Call<T>& call, const plan::CutRule& rule, const std::vector<int64_t>& sequences, const qla_tensor* d_final_state)
      : call_(call), sequences_(sequences) {
    int64_t chunks = 0;
    for (const int64_t n : sequences) base_.push_back(chunks), chunks += call.sequences[n].chunks();
    sums_.assign(static_cast<size_t>(chunks * call.problem.num_v_heads), 0.0f);
    if (rule.exact) return;  // looks at none
    needed_.assign(static_cast<size_t>(chunks), 0);
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& seq = call.sequences[sequences[i]];
      const plan::Cut cut = plan::make_cut(seq.chunks(), rule);
      const bool all = seq.has_initial || (d_final_state && d_final_state->data);
      for (int64_t segment = all ? 0 : 1; segment < (all ? 1 : cut.num_segments); ++segment) {
        const int64_t at = cut.begin(segment), reach = all ? cut.chunks : rule.max_warmup_chunks;
        for (int64_t c = std::max<int64_t>(0, at - reach); c < std::min(at + reach, cut.chunks); ++c) needed_[base_[i] + c] = 1;
      }
    }
    std::vector<std::unique_ptr<Lane>> lanes;
    const auto streams = static_cast<int64_t>(sequences.size());
    for (int64_t i = 0; i < std::min<int64_t>(streams, call.threads); ++i) lanes.push_back(std::make_unique<SumLane>(*this));
    run_lanes(call.threads, streams, lanes);
  }

  float at(int64_t cut_index, int64_t chunk, int64_t v_head) const {
    return sums_[static_cast<size_t>((base_[cut_index] + chunk) * call_.problem.num_v_heads + v_head)];
  }

 private:
  class SumLane final : public Lane {
   public:
    explicit SumLane(Decays& owner) : owner_(owner) {}
    void start(int64_t stream) override { stream_ = stream, done_ = false; }
    int64_t advance(int sharers) override {
      if (done_) return 0;
      done_ = true;
      pieces_ = Pieces::of(owner_.call_.sequences[owner_.sequences_[stream_]].chunks(), 2 * sharers);
      return pieces_.count;
    }
    void run(int64_t piece, int) override {
      for (int64_t chunk = pieces_.begin(piece); chunk < pieces_.begin(piece + 1); ++chunk)
        if (owner_.needed_[owner_.base_[stream_] + chunk]) owner_.sum_chunk(stream_, chunk);
    }

   private:
    Decays& owner_;
    int64_t stream_ = 0;
    bool done_ = false;
    Pieces pieces_;
  };

  void sum_chunk(int64_t cut_index, int64_t chunk) {
    const Sequence& seq = call_.sequences[sequences_[cut_index]];
    const int64_t token = chunk * kChunk;
    const int rows = static_cast<int>(std::min<int64_t>(kChunk, seq.tokens() - token));
    alignas(64) T row[kMaxDim], square[kMaxChunk], g[kMaxChunk], beta[kMaxChunk];
    for (int64_t k_head = 0; k_head < call_.problem.num_k_heads; ++k_head) {
      for (int i = 0; i < rows; ++i) {
        square[i] = 1;
        if (call_.normalize) continue;
        call_.kernels.load_rows(token_rows(*call_.args.k, seq.batch, seq.bos + token + i, k_head), 1, call_.k_dim, row,
                                call_.k_dim);
        square[i] = 0;
        for (int j = 0; j < call_.k_dim; ++j) square[i] += row[j] * row[j];
      }
      for (int64_t head = k_head * call_.group; head < (k_head + 1) * call_.group; ++head) {
        call_.gates.load(seq.batch, seq.bos + token, head, rows, g, beta);
        float sum = 0;
        for (int i = 0; i < rows; ++i) {
          const float strength = static_cast<float>(beta[i]) * static_cast<float>(square[i]) - 1.0f;
          const float raw = static_cast<float>(g[i]);
          sum += (raw < -88.0f ? -88.0f : raw) + (strength > 1 ? std::log(strength) : 0.0f);
        }
        sums_[static_cast<size_t>((base_[cut_index] + chunk) * call_.problem.num_v_heads + head)] = sum;
      }
    }
  }

  const Call<T>& call_;
  const std::vector<int64_t>& sequences_;
  std::vector<int64_t> base_;
  std::vector<float> sums_;
  std::vector<char> needed_;  // by chunk
};

// The segments of one value head, both directions, in token order, with their prepasses and merges entered into the plan.
struct HeadSegments {
  std::vector<plan::Segment> forward, reverse;
  std::vector<HeadStart> forward_start, reverse_start;  // of each
};

HeadStart start_of(const plan::Segment& s) {
  HeadStart at;
  at.warmup_tokens = s.warmup_chunks * kChunk;
  at.start = s.start == QLA_START_ZERO ? QLA_START_INITIAL : s.start;  // no state given: INITIAL reads zero
  return at;
}

Prepass& prepass_of(std::vector<Prepass>& all, size_t first, const Prepass& key) {
  for (size_t i = first; i < all.size(); ++i)
    if (all[i].begin == key.begin && all[i].end == key.end) return all[i];
  all.push_back(key);
  return all.back();
}

class PlanBuilder {
 public:
  PlanBuilder(StreamPlan& plan, int64_t sequence, int64_t tokens) : plan_(plan), sequence_(sequence), tokens_(tokens) {}

  template <typename Decay>
  HeadSegments head(const plan::Cut& cut, const plan::CutRule& rule, int64_t v_head, bool has_initial, bool backward,
                    bool has_final, Decay decay) {
    HeadSegments result;
    const size_t first_prepass = plan_.prepasses.size();
    plan::for_each_segment(cut, rule, has_initial, false, decay, [&](const plan::Segment& s) { result.forward.push_back(s); });
    if (backward)
      plan::for_each_segment(cut, rule, has_final, true, decay, [&](const plan::Segment& s) { result.reverse.push_back(s); });
    enter(result.forward, result.forward_start, false, v_head, first_prepass);
    enter(result.reverse, result.reverse_start, true, v_head, first_prepass);
    std::reverse(result.reverse.begin(), result.reverse.end());
    std::reverse(result.reverse_start.begin(), result.reverse_start.end());
    return result;
  }

 private:
  void enter(const std::vector<plan::Segment>& walk, std::vector<HeadStart>& starts, bool reverse, int64_t v_head,
             size_t first_prepass) {
    std::vector<Merge> chain;
    for (size_t j = 0; j < walk.size(); ++j) {
      HeadStart at = start_of(walk[j]);
      if (walk[j].start == QLA_START_MERGED) {
        at.merged = plan_.num_merged++;
        Prepass key;
        key.sequence = sequence_, key.v_head = v_head;
        key.begin = walk[j - 1].first_chunk * kChunk;
        key.end = std::min((walk[j - 1].first_chunk + walk[j - 1].num_chunks) * kChunk, tokens_);
        Prepass& prepass = prepass_of(plan_.prepasses, first_prepass, key);
        (reverse ? prepass.reverse_slot : prepass.state_slot) = at.merged;
        HeadStart& from = reverse ? prepass.reverse : prepass.forward;
        from = starts[j - 1];
        if (from.start == QLA_START_MERGED) {
          if (prepass.transition_slot < 0) prepass.transition_slot = plan_.num_transitions++;
          chain.push_back({from.merged, at.merged, prepass.transition_slot, reverse});
          from = HeadStart{0, QLA_START_ZERO, -1};  // S_ext: the segment from a zero state
        }
      }
      starts.push_back(at);
    }
    if (!chain.empty()) plan_.chains.push_back(std::move(chain));
  }

  StreamPlan& plan_;
  const int64_t sequence_, tokens_;
};

// One q/k head's streams: cut where every value head of it, in both directions, is.
void add_streams(StreamPlan& plan, int64_t sequence, int64_t k_head, int64_t tokens, const std::vector<HeadSegments>& heads) {
  const int64_t chunks = plan::chunks_of(tokens);
  std::vector<int64_t> bounds;
  for (const plan::Segment& s : heads[0].forward) {
    bool common = true;
    const auto starts_here = [&](const plan::Segment& other) { return other.first_chunk == s.first_chunk; };
    for (const HeadSegments& head : heads) {
      common = common && std::any_of(head.forward.begin(), head.forward.end(), starts_here);
      common = common && (head.reverse.empty() || std::any_of(head.reverse.begin(), head.reverse.end(), starts_here));
    }
    if (common) bounds.push_back(s.first_chunk);
  }
  for (size_t i = 0; i < bounds.size(); ++i) {
    Stream stream;
    stream.sequence = sequence, stream.k_head = k_head;
    stream.begin = bounds[i] * kChunk;
    const int64_t end_chunk = i + 1 < bounds.size() ? bounds[i + 1] : chunks;
    stream.end = std::min(end_chunk * kChunk, tokens);
    stream.first = i == 0, stream.last = i + 1 == bounds.size();
    stream.starts = static_cast<int64_t>(plan.starts.size());
    for (const HeadSegments& head : heads) {
      HeadStart forward, reverse;
      for (size_t j = 0; j < head.forward.size(); ++j)
        if (head.forward[j].first_chunk == bounds[i]) forward = head.forward_start[j];
      for (size_t j = 0; j < head.reverse.size(); ++j)
        if (head.reverse[j].first_chunk + head.reverse[j].num_chunks == end_chunk) reverse = head.reverse_start[j];
      plan.starts.push_back(forward);
      plan.reverse.push_back(reverse);
    }
    plan.cut.push_back(stream);
  }
}

}  // namespace

StreamPlan whole_again(const StreamPlan& plan, const std::vector<Sequence>& sequences, std::vector<char>& spoiled) {
  StreamPlan again;
  for (size_t i = 0; i < plan.cut.size();) {  // the streams of a sequence and q/k head lie together
    size_t end = i;
    bool any = false;
    for (; end < plan.cut.size() && plan.cut[end].sequence == plan.cut[i].sequence && plan.cut[end].k_head == plan.cut[i].k_head;
         ++end)
      any = any || spoiled[end];
    if (any) {
      std::fill(spoiled.begin() + static_cast<int64_t>(i), spoiled.begin() + static_cast<int64_t>(end), 1);
      Stream whole = plan.cut[i];
      whole.begin = 0, whole.end = sequences[whole.sequence].tokens();
      whole.first = whole.last = true;
      whole.starts = -1;
      again.cut.push_back(whole);
    }
    i = end;
  }
  return again;
}

template <class T>
void for_each_plan(const Call<T>& call, const plan::CutRule& rule, const qla_tensor* d_o, const qla_tensor* d_final_state,
                   const std::function<void(const StreamPlan&)>& run) {
  std::vector<int64_t> cut_sequences, cut_index(call.sequences.size(), -1);
  for (size_t n = 0; n < call.sequences.size() && rule.segment_chunks > 0; ++n)
    if (call.sequences[n].state_slot >= 0 && rule.cuts(call.sequences[n].chunks())) {
      cut_index[n] = static_cast<int64_t>(cut_sequences.size());
      cut_sequences.push_back(static_cast<int64_t>(n));
    }
  StreamPlan plan;
  if (cut_sequences.empty()) {
    plan.num_uncut = call.problem.num_seqs * call.problem.num_k_heads;
    run(plan);
    return;
  }
  const bool backward = d_o != nullptr;
  const Decays<T> decays(call, rule, cut_sequences, d_final_state);
  const int64_t transition_size = static_cast<int64_t>(call.k_panels) * call.panel * call.k_dim;
  for (int64_t n = 0; n < call.problem.num_seqs; ++n) {
    const Sequence& seq = call.sequences[n];
    for (int64_t k_head = 0; k_head < call.problem.num_k_heads; ++k_head) {
      const int64_t tokens = seq.state_slot < 0 ? 0 : seq.tokens();
      PlanBuilder builder(plan, n, tokens);
      const plan::Cut cut = plan::make_cut(plan::chunks_of(tokens), rule);
      std::vector<HeadSegments> heads;
      for (int64_t head = k_head * call.group; head < (k_head + 1) * call.group; ++head)
        heads.push_back(builder.head(cut, rule, head, seq.has_initial, backward, d_final_state && d_final_state->data,
                                     [&](int64_t chunk) { return decays.at(cut_index[n], chunk, head); }));
      add_streams(plan, n, k_head, tokens, heads);
      const int64_t bytes =
          (plan.num_merged * call.state_size + plan.num_transitions * transition_size) * static_cast<int64_t>(sizeof(T));
      if (bytes > kMergeBudget) {
        run(plan);
        plan = StreamPlan{};
      }
    }
  }
  if (plan.size() > 0) run(plan);
}
template void for_each_plan<float>(const Call<float>&, const plan::CutRule&, const qla_tensor*, const qla_tensor*,
                                   const std::function<void(const StreamPlan&)>&);
template void for_each_plan<double>(const Call<double>&, const plan::CutRule&, const qla_tensor*, const qla_tensor*,
                                    const std::function<void(const StreamPlan&)>&);

}  // namespace qla::cpu
