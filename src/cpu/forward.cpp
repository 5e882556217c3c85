// Forward: (F0)-(F9) over windows of chunks. A window's phases: the intra-chunk stage (items: chunks), then the walk (items:
// value heads x panels of V). Nothing of a window outlives it but the states, so memory does not grow with the sequence.
#include <algorithm>
#include <cmath>

#include "cpu/call.hpp"
#include "cpu/forward_run.hpp"
#include "cpu/lanes.hpp"
#include "cpu/tiles.hpp"

namespace qla::cpu {
namespace {

// Inner chunks of a window; even, so that every window starts at a chunk of 64. Small where a thread has streams enough: tiles
// then stay in L2. Large where threads share a stream's phases, since each phase ends with waiting for one another. Bits do not
// depend on it.
inline constexpr int kQuietWindow = 2, kSharedWindow = 16;

template <class T>
struct ThreadScratch {
  Buffer<T> block;
  T* products = nullptr;  // nobody keeps them
  TileSet<T> wide;        // one chunk of 64, where A or g is handed out

  ThreadScratch(const Call<T>& call, bool with_wide) {
    block.resize(lay_out(call, with_wide, nullptr));  // members exist by now, unlike in an initialiser of block
    lay_out(call, with_wide, block.data());
  }

 private:
  size_t lay_out(const Call<T>& call, bool with_wide, T* base) {
    Carver<T> carver(base);
    products = carver.take(2LL * kMaxChunk * kMaxChunk);
    if (with_wide) wide.carve(carver, call, kMaxChunk, 1, false);
    return static_cast<size_t>(carver.used());
  }
};

template <class T>
class ForwardLane final : public Lane {
 public:
  ForwardLane(const ForwardRun<T>& run, std::vector<ThreadScratch<T>>& scratch, int window)
      : run_(run),
        call_(run.call),
        scratch_(scratch),
        states_(static_cast<size_t>(call_.state_size * call_.group)),
        window_(window) {
    block_.resize(lay_out(nullptr));
    lay_out(block_.data());
    walk_from_.resize(call_.group);
  }

  void start(int64_t index) override {
    stream_ = call_.stream(run_.plan, index);
    seq_ = &call_.sequences[stream_.sequence];
    phase_ = Phase::Walk;
    window_end_ = stream_.begin;
    for (int h = 0; h < call_.group; ++h) {
      HeadStart at;
      if (stream_.starts >= 0) at = run_.plan.starts[stream_.starts + h];
      walk_from_[h] = stream_.begin - at.warmup_tokens;
      window_end_ = std::min(window_end_, walk_from_[h]);
      T* state = states_.data() + h * call_.state_size;
      if (at.start == QLA_START_INITIAL)
        call_.initial_state(*seq_, v_head(h), state);
      else if (at.start == QLA_START_MERGED)
        std::memcpy(state, run_.merged + at.merged * call_.state_size, sizeof(T) * call_.state_size);
      else
        std::memset(state, 0, sizeof(T) * call_.state_size);
    }
  }

  int64_t advance() override {
    if (phase_ == Phase::Walk) {  // the window is done
      if (window_end_ >= stream_.end) {
        finish();
        return 0;
      }
      window_begin_ = window_end_;
      window_end_ = std::min(window_begin_ + static_cast<int64_t>(window_.size()) * kInnerChunk, stream_.end);
      // outputs begin at a window's start, so that a window has them on or off
      if (window_begin_ < stream_.begin) window_end_ = std::min(window_end_, stream_.begin);
      phase_ = Phase::Intra;
      return (window_end_ - window_begin_ + kInnerChunk - 1) / kInnerChunk;
    }
    phase_ = Phase::Walk;
    return static_cast<int64_t>(call_.group) * call_.v_panels;
  }

  void run(int64_t begin, int64_t end, int thread) override {
    if (phase_ == Phase::Intra) {
      for (int64_t i = begin; i < end; ++i) intra(i, scratch_[thread]);
      return;
    }
    for (int64_t i = begin; i < end;) {
      const int h = static_cast<int>(i / call_.v_panels), p_begin = static_cast<int>(i % call_.v_panels);
      const int p_end = static_cast<int>(std::min<int64_t>(call_.v_panels, p_begin + end - i));
      walk(h, p_begin, p_end);
      i += p_end - p_begin;
    }
  }

 private:
  enum class Phase { Intra, Walk };

  int64_t v_head(int h) const { return stream_.k_head * call_.group + h; }
  bool output() const { return window_begin_ >= stream_.begin; }
  int rows_at(int64_t token) const { return static_cast<int>(std::min<int64_t>(kInnerChunk, window_end_ - token)); }

  size_t lay_out(T* base) {
    Carver<T> carver(base);
    for (TileSet<T>& set : window_) set.carve(carver, call_, kInnerChunk, call_.group, false);
    return static_cast<size_t>(carver.used());
  }

  void intra(int64_t index, ThreadScratch<T>& scratch) {
    TileSet<T>& set = window_[index];
    const int64_t token = window_begin_ + index * kInnerChunk;
    const int rows = rows_at(token);
    set.chunk.products = scratch.products;
    alignas(64) T q_rnorm[kInnerChunk], k_rnorm[kInnerChunk], g[kInnerChunk], beta[kInnerChunk];
    load_chunk(call_, *seq_, stream_.k_head, token, rows, output(), set.chunk, q_rnorm, k_rnorm);
    for (int h = 0; h < call_.group; ++h) {
      if (token < walk_from_[h]) continue;
      call_.gates.load(seq_->batch, seq_->bos + token, v_head(h), rows, g, beta);
      HeadTiles<T> head = set.heads[h];
      if (!output()) head.pg = nullptr;
      call_.kernels.head_tiles(set.chunk, g, beta, call_.scale, false, head);
    }
    if (!output()) return;
    if (call_.normalize) {
      const Rows to_q = token_rows(run_.args->q_rnorm, seq_->batch, seq_->bos + token, stream_.k_head);
      const Rows to_k = token_rows(run_.args->k_rnorm, seq_->batch, seq_->bos + token, stream_.k_head);
      for (int i = 0; i < rows; ++i) {
        if (to_q.data) store_at(to_q, i, q_rnorm[i]);
        if (to_k.data) store_at(to_k, i, k_rnorm[i]);
      }
    }
    if (run_.wide_outputs && token % kChunk == 0) hand_out(token, scratch);
  }

  // A, Abar and g of a whole chunk of 64: what flash_qla's low-level functions return.
  void hand_out(int64_t token, ThreadScratch<T>& scratch) {
    const auto& args = *run_.args;
    const int rows = static_cast<int>(std::min<int64_t>(kChunk, seq_->tokens() - token));
    TileSet<T>& wide = scratch.wide;
    const bool with_a = args.a_inv.data || args.a_gated.data;
    wide.chunk.products = scratch.products;
    alignas(64) T k_rnorm[kMaxChunk], g[kMaxChunk], beta[kMaxChunk];
    if (with_a) load_chunk(call_, *seq_, stream_.k_head, token, rows, false, wide.chunk, static_cast<T*>(nullptr), k_rnorm);
    for (int h = 0; h < call_.group; ++h) {
      call_.gates.load(seq_->batch, seq_->bos + token, v_head(h), rows, g, beta);
      HeadTiles<T> head = with_a ? wide.heads[0] : HeadTiles<T>{};
      head.pg = nullptr;
      for (const auto& [tensor, a_form] : {std::pair{&args.a_inv, true}, std::pair{&args.a_gated, false}}) {
        if (!tensor->data) continue;
        call_.kernels.head_tiles(wide.chunk, a_form ? nullptr : g, beta, call_.scale, a_form, head);
        call_.kernels.store_rows(head.abar, wide.chunk.c, rows, static_cast<int>(kChunk),
                                 token_rows(*tensor, seq_->batch, seq_->bos + token, v_head(h)));
      }
      const Rows to = token_rows(args.g_cumsum, seq_->batch, seq_->bos + token, v_head(h));
      double sum = 0;
      for (int i = 0; i < rows && to.data; ++i) {
        const double floor_at = sizeof(T) == 4 ? -88.0 : -700.0;
        sum += static_cast<double>(g[i]) < floor_at ? floor_at : static_cast<double>(g[i]);  // (F0), (F1)
        store_at(to, i, sum);
      }
    }
  }

  void walk(int h, int p_begin, int p_end) {
    T* state = states_.data() + h * call_.state_size;
    for (int64_t token = std::max(window_begin_, walk_from_[h]); token < window_end_; token += kInnerChunk) {
      const TileSet<T>& set = window_[(token - window_begin_) / kInnerChunk];
      Walk<T> w{};
      w.chunk = &set.chunk;
      w.head = &set.heads[h];
      w.v_dim = call_.v_dim;
      w.scale = call_.scale;
      w.v = token_rows(*call_.args.v, seq_->batch, seq_->bos + token, v_head(h));
      w.state_in = w.state_out = state;
      if (output()) {
        w.o = token_rows(run_.args->o, seq_->batch, seq_->bos + token, v_head(h));
        if (run_.args->h.data && token % kChunk == 0)
          call_.store_state(state, p_begin, p_end, state_rows(run_.args->h, seq_->first_chunk + token / kChunk, v_head(h)));
      }
      call_.kernels.walk(w, p_begin, p_end);
      const int64_t end = token + set.chunk.rows, every = call_.args.checkpoint_every;
      if (output() && every > 0 && run_.args->state_checkpoints.data && end % every == 0)
        call_.store_state(state, p_begin, p_end,
                          state_rows(run_.args->state_checkpoints, seq_->first_checkpoint + end / every - 1, v_head(h)));
    }
  }

  void finish() {
    if (!stream_.last || !run_.final_state->data || seq_->state_slot < 0) return;
    for (int h = 0; h < call_.group; ++h)
      call_.store_state(states_.data() + h * call_.state_size, 0, call_.v_panels,
                        state_rows(*run_.final_state, seq_->state_slot, v_head(h)));
  }

  const ForwardRun<T>& run_;
  const Call<T>& call_;
  std::vector<ThreadScratch<T>>& scratch_;
  Buffer<T> states_, block_;
  std::vector<TileSet<T>> window_;
  std::vector<int64_t> walk_from_;
  Stream stream_;
  const Sequence* seq_ = nullptr;
  Phase phase_ = Phase::Walk;
  int64_t window_begin_ = 0, window_end_ = 0;
};

}  // namespace

template <class T>
void run_forward(const ForwardRun<T>& run) {
  const int threads = run.call.threads;
  const int64_t lanes_count = std::clamp<int64_t>(run.plan.size(), 1, threads);
  std::vector<ThreadScratch<T>> scratch;
  scratch.reserve(threads);
  for (int i = 0; i < threads; ++i) scratch.emplace_back(run.call, run.wide_outputs);
  const int window = run.plan.size() >= 4 * threads ? kQuietWindow : threads > 1 ? kSharedWindow : kQuietWindow;
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int64_t i = 0; i < lanes_count; ++i) lanes.push_back(std::make_unique<ForwardLane<T>>(run, scratch, window));
  run_lanes(threads, run.plan.size(), lanes);
}
template void run_forward<float>(const ForwardRun<float>&);
template void run_forward<double>(const ForwardRun<double>&);

}  // namespace qla::cpu
