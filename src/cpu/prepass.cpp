// The walks and merges that must come before a plan's streams: end states of segments (C1), transitions (C2), their adjoint (C3).
#include <algorithm>
#include <cstring>

#include "cpu/lanes.hpp"
#include "cpu/segments.hpp"
#include "cpu/tiles.hpp"

namespace qla::cpu {
namespace {

inline constexpr int kWindow = 8;  // inner chunks

template <class T>
struct PrepassRun {
  const Call<T>& call;
  const StreamPlan& plan;
  const qla_tensor *d_o, *d_final_state;
  T *merged, *transitions;
  int64_t transition_size;
};

// One segment of one value head: the forward walk over its windows (items: panels of the state, then of the transition), then the
// reverse.
template <class T>
class PrepassLane final : public Lane {
 public:
  explicit PrepassLane(const PrepassRun<T>& run) : run_(run), call_(run.call) {
    block_.resize(lay_out(nullptr));
    lay_out(block_.data());
  }

  void start(int64_t index) override {
    task_ = &run_.plan.prepasses[index];
    seq_ = &call_.sequences[task_->sequence];
    if (task_->state_slot >= 0) {
      T* state = run_.merged + task_->state_slot * call_.state_size;
      std::memset(state, 0, sizeof(T) * call_.state_size);
      if (task_->forward.start == QLA_START_INITIAL) call_.initial_state(*seq_, task_->v_head, state);
    }
    if (task_->reverse_slot >= 0) {
      T* d_state = run_.merged + task_->reverse_slot * call_.state_size;
      std::memset(d_state, 0, sizeof(T) * call_.state_size);
      if (task_->reverse.start == QLA_START_INITIAL && run_.d_final_state->data)
        call_.load_state(state_rows(*run_.d_final_state, task_->sequence, task_->v_head), 0, call_.v_panels, d_state);
    }
    if (task_->transition_slot >= 0) {
      T* m = run_.transitions + task_->transition_slot * run_.transition_size;
      std::memset(m, 0, sizeof(T) * run_.transition_size);
      for (int64_t k = 0; k < call_.k_dim; ++k) m[(k / call_.panel * call_.k_dim + k) * call_.panel + k % call_.panel] = 1;
    }
    phase_ = Phase::Walk;
    const bool forward = task_->state_slot >= 0 || task_->transition_slot >= 0;
    begin_ = end_ = forward ? task_->begin - task_->forward.warmup_tokens : task_->end;
  }

  int64_t advance(int sharers) override {
    pieces_ = Pieces::of(next_items(), phase_ == Phase::Walk || phase_ == Phase::Reverse ? sharers : 2 * sharers);
    return pieces_.count;
  }

  void run(int64_t piece, int) override { run_items(pieces_.begin(piece), pieces_.begin(piece + 1)); }

 private:
  enum class Phase { Intra, Walk, ReverseIntra, Reverse };

  int64_t next_items() {
    switch (phase_) {
      case Phase::Intra:
        phase_ = Phase::Walk;
        return walk_items();
      case Phase::Walk:
        if (end_ < task_->end) {
          begin_ = end_;
          end_ = std::min(begin_ + kWindow * kInnerChunk, begin_ < task_->begin ? task_->begin : task_->end);
          phase_ = Phase::Intra;
          return chunks();
        }
        if (task_->reverse_slot < 0) return 0;
        begin_ = std::min(task_->end + task_->reverse.warmup_tokens, seq_->tokens());
        return next_reverse();
      case Phase::ReverseIntra:
        phase_ = Phase::Reverse;
        return call_.v_panels;
      default:
        return next_reverse();
    }
  }

  void run_items(int64_t begin, int64_t end) {
    const int64_t v_panels = phase_ == Phase::Walk && task_->state_slot < 0 ? 0 : call_.v_panels;
    switch (phase_) {
      case Phase::Intra:
      case Phase::ReverseIntra:
        for (int64_t i = begin; i < end; ++i) intra(i);
        break;
      case Phase::Walk:
        if (begin < v_panels) walk(false, begin, std::min(end, v_panels));
        if (end > v_panels) walk(true, std::max(begin, v_panels) - v_panels, end - v_panels);
        break;
      case Phase::Reverse:
        reverse(begin, end);
    }
  }

  int64_t chunks() const { return (end_ - begin_ + kInnerChunk - 1) / kInnerChunk; }
  int64_t walk_items() const {
    return (task_->state_slot >= 0 ? call_.v_panels : 0) +
           (task_->transition_slot >= 0 && begin_ >= task_->begin ? call_.k_panels : 0);
  }
  size_t lay_out(T* base) {
    Carver<T> carver(base);
    for (TileSet<T>& set : window_) set.carve(carver, call_, kInnerChunk, 1, true);
    return static_cast<size_t>(carver.used());
  }

  // Windows of the reverse walk end where the one before began; none reaches across the segment's end.
  int64_t next_reverse() {
    if (begin_ <= task_->begin) return 0;
    end_ = begin_;
    const int64_t low = end_ > task_->end ? task_->end : task_->begin, span = kWindow * kInnerChunk;
    begin_ = low + (end_ - low - 1) / span * span;
    phase_ = Phase::ReverseIntra;
    return chunks();
  }

  void intra(int64_t index) {
    const int64_t token = begin_ + index * kInnerChunk;
    const int rows = static_cast<int>(std::min<int64_t>(kInnerChunk, end_ - token));
    const bool with_q = phase_ == Phase::ReverseIntra;
    TileSet<T>& set = window_[index];
    alignas(64) T q_rnorm[kInnerChunk], k_rnorm[kInnerChunk], g[kInnerChunk], beta[kInnerChunk];
    load_chunk(call_, *seq_, task_->v_head / call_.group, token, rows, with_q, set.chunk, q_rnorm, k_rnorm);
    call_.gates.load(seq_->batch, seq_->bos + token, task_->v_head, rows, g, beta);
    HeadTiles<T> head = set.heads[0];
    head.decay = nullptr;
    if (!with_q) head.pg = nullptr;
    call_.kernels.head_tiles(set.chunk, g, beta, call_.scale, false, head);
  }

  void walk(bool transition, int64_t p_begin, int64_t p_end) {
    T* state = transition ? run_.transitions + task_->transition_slot * run_.transition_size
                          : run_.merged + task_->state_slot * call_.state_size;
    for (int64_t i = 0; i < chunks(); ++i) {
      Walk<T> w{};
      w.chunk = &window_[i].chunk;
      w.head = &window_[i].heads[0];
      w.v_dim = transition ? call_.k_dim : call_.v_dim;
      w.scale = call_.scale;
      if (!transition) w.v = token_rows(*call_.args.v, seq_->batch, seq_->bos + begin_ + i * kInnerChunk, task_->v_head);
      w.state_in = w.state_out = state;
      call_.kernels.walk(w, static_cast<int>(p_begin), static_cast<int>(p_end));
    }
  }

  void reverse(int64_t p_begin, int64_t p_end) {
    T* d_state = run_.merged + task_->reverse_slot * call_.state_size;
    for (int64_t i = chunks() - 1; i >= 0; --i) {
      Reverse<T> r{};
      r.chunk = &window_[i].chunk;
      r.head = &window_[i].heads[0];
      r.v_dim = call_.v_dim;
      r.scale = call_.scale;
      r.d_o = token_rows(*run_.d_o, seq_->batch, seq_->bos + begin_ + i * kInnerChunk, task_->v_head);
      r.d_o_step = run_.d_o->stride[3];
      r.d_state_in = r.d_state_out = d_state;
      call_.kernels.reverse(r, static_cast<int>(p_begin), static_cast<int>(p_end));
    }
  }

  const PrepassRun<T>& run_;
  const Call<T>& call_;
  Buffer<T> block_;
  TileSet<T> window_[kWindow];
  const Prepass* task_ = nullptr;
  const Sequence* seq_ = nullptr;
  Phase phase_ = Phase::Walk;
  int64_t begin_ = 0, end_ = 0;  // tokens of the window at work
  Pieces pieces_;
};

// One chain of merges: each needs the one before.
template <class T>
class MergeLane final : public Lane {
 public:
  explicit MergeLane(const PrepassRun<T>& run) : run_(run) {}
  void start(int64_t stream) override { stream_ = stream, done_ = false; }
  int64_t advance(int) override {
    if (done_) return 0;
    done_ = true;
    return 1;
  }
  void run(int64_t, int) override {
    const Call<T>& call = run_.call;
    for (const Merge& m : run_.plan.chains[stream_]) {
      T* to = run_.merged + m.to * call.state_size;
      call.kernels.merge(run_.transitions + m.transition * run_.transition_size, m.reverse,
                         run_.merged + m.from * call.state_size, to, call.k_dim, call.v_dim, to);
    }
  }

 private:
  const PrepassRun<T>& run_;
  int64_t stream_ = 0;
  bool done_ = false;
};

}  // namespace

template <class T>
void run_prepasses(const Call<T>& call, const StreamPlan& plan, const qla_tensor* d_o, const qla_tensor* d_final_state,
                   T* merged) {
  if (plan.prepasses.empty()) return;
  const int64_t transition_size = static_cast<int64_t>(call.k_panels) * call.panel * call.k_dim;
  Buffer<T> transitions(static_cast<size_t>(plan.num_transitions * transition_size));
  const PrepassRun<T> run{call, plan, d_o, d_final_state, merged, transitions.data(), transition_size};
  const auto lanes_of = [&](int64_t streams, auto make) {
    std::vector<std::unique_ptr<Lane>> lanes;
    for (int64_t i = 0; i < std::clamp<int64_t>(streams, 1, call.threads); ++i) lanes.push_back(make());
    run_lanes(call.threads, streams, lanes);
  };
  lanes_of(static_cast<int64_t>(plan.prepasses.size()), [&] { return std::make_unique<PrepassLane<T>>(run); });
  lanes_of(static_cast<int64_t>(plan.chains.size()), [&] { return std::make_unique<MergeLane<T>>(run); });
}
template void run_prepasses<float>(const Call<float>&, const StreamPlan&, const qla_tensor*, const qla_tensor*, float*);
template void run_prepasses<double>(const Call<double>&, const StreamPlan&, const qla_tensor*, const qla_tensor*, double*);

}  // namespace qla::cpu
