// Backward of a stream, in windows of chunks from the last to the first. A pass beforehand keeps the state at each window's start
// (a checkpoint); in each window the states and Delta come again from there (F4), (F5), (F8), (F9) while the reverse walk
// (B1)-(B4) runs beside them, then every chunk's gradients (B5)-(B11) by themselves. So memory is one state a window, not one a
// chunk.
#include <algorithm>
#include <cmath>

#include "cpu/backward_run.hpp"
#include "cpu/lanes.hpp"
#include "cpu/tiles.hpp"

namespace qla::cpu {
namespace {

inline constexpr int64_t kLeastWindow = 16;                  // inner chunks, a multiple of 2
inline constexpr int64_t kLaneBudget = 128LL * 1024 * 1024;  // bytes of all lanes together; one lane at least
inline constexpr int64_t kDeltaBudget = 64LL * 1024 * 1024;  // bytes: where Delta of whole streams fits, it is not computed twice

template <class T>
struct BackwardScratch {
  Buffer<T> block;
  T *dq_t = nullptr, *dk_t = nullptr, *rows = nullptr, *grads = nullptr;

  explicit BackwardScratch(const Call<T>& call) {
    block.resize(lay_out(call, nullptr));
    lay_out(call, block.data());
  }

 private:
  size_t lay_out(const Call<T>& call, T* base) {
    Carver<T> carver(base);
    const int64_t wide = static_cast<int64_t>(kMaxChunk) * call.k_dim;
    dq_t = carver.take(wide), dk_t = carver.take(wide), rows = carver.take(wide);
    grads = carver.take(call.kernels.grads_scratch(call.k_dim, call.v_dim));
    return static_cast<size_t>(carver.used());
  }
};

// What a window keeps of one chunk.
template <class T>
struct WindowChunk {
  TileSet<T> tiles;
  std::vector<T*> delta, do_dr, state, d_state;  // by value head; state: at the chunk's start, d_state: dS+, at its end
  std::vector<double> dA_log, ddt_bias;
};

// How the lanes of a call work; results do not depend on any of it.
struct LaneShape {
  int64_t window = kLeastWindow;  // chunks
  int64_t most_windows = 1;       // of a stream
  int64_t lanes = 1;
  // Streams enough for every thread: reverse walk and gradients then go chunk by chunk, and dS+, dO, dR never leave the cache.
  bool quiet = true;
  bool keep_delta = false;
};

template <class T>
class BackwardLane final : public Lane {
 public:
  BackwardLane(const BackwardRun<T>& run, std::vector<BackwardScratch<T>>& scratch, const LaneShape& shape,
               std::vector<double>& dA_log, std::vector<double>& ddt_bias)
      : run_(run),
        call_(run.call),
        scratch_(scratch),
        shape_(shape),
        dA_log_(dA_log),
        ddt_bias_(ddt_bias),
        window_(static_cast<size_t>(shape.window)) {
    block_.resize(lay_out(call_, shape_, window_, nullptr));
    lay_out(call_, shape_, window_, block_.data());
    states_.resize(2 * call_.group * call_.state_size);
    checkpoints_.resize(static_cast<size_t>(shape_.most_windows * call_.group * call_.state_size));
    if (shape_.keep_delta) deltas_.resize(static_cast<size_t>(delta_size(call_, shape_)));
  }

  static int64_t wide(const Call<T>& call) { return static_cast<int64_t>(kInnerChunk) * call.v_panels * call.panel; }
  static int64_t delta_size(const Call<T>& call, const LaneShape& shape) {
    return shape.most_windows * shape.window * call.group * wide(call);
  }
  static int64_t bytes(const Call<T>& call, const LaneShape& shape) {
    std::vector<WindowChunk<T>> window(static_cast<size_t>(shape.window));
    const int64_t states = (shape.most_windows + 2) * call.group * call.state_size;
    return (static_cast<int64_t>(lay_out(call, shape, window, nullptr)) + states) * static_cast<int64_t>(sizeof(T));
  }

  void start(int64_t index) override {
    index_ = index;
    stream_ = call_.stream(run_.plan, index);
    seq_ = &call_.sequences[stream_.sequence];
    warm_begin_ = stream_.begin, warm_end_ = stream_.end;
    walk_from_.assign(call_.group, stream_.begin);
    reverse_from_.assign(call_.group, stream_.end);
    for (int h = 0; h < call_.group; ++h) {
      HeadStart at, back;
      if (stream_.starts >= 0) at = run_.plan.starts[stream_.starts + h], back = run_.plan.reverse[stream_.starts + h];
      walk_from_[h] = stream_.begin - at.warmup_tokens;
      reverse_from_[h] = std::min(stream_.end + back.warmup_tokens, seq_->tokens());
      warm_begin_ = std::min(warm_begin_, walk_from_[h]);
      warm_end_ = std::max(warm_end_, reverse_from_[h]);
      fill_start(at, true, h, state(h));
      fill_start(back, false, h, d_state(h));
    }
    const int64_t span = shape_.window * kInnerChunk;
    num_windows_ = (stream_.end - stream_.begin + span - 1) / span;
    // forward pass over the warm-up and all windows but the last; its states after window i are checkpoint i + 1
    begin_ = end_ = warm_begin_;
    next_checkpoint_ = 0;
    window_index_ = num_windows_;
    reverse_end_ = warm_end_;
    phase_ = Phase::PassWalk;
    if (begin_ == stream_.begin) keep_checkpoint();
  }

  int64_t advance() override {
    switch (phase_) {
      case Phase::PassIntra:
        phase_ = Phase::PassWalk;
        return call_.group * call_.v_panels;
      case Phase::PassWalk:
        if (end_ > begin_ && end_ >= stream_.begin) keep_checkpoint();
        begin_ = end_;
        if (next_checkpoint_ < num_windows_) {
          const int64_t span = shape_.window * kInnerChunk;
          end_ = begin_ < stream_.begin ? std::min(begin_ + span, stream_.begin) : begin_ + span;
          phase_ = Phase::PassIntra;
          return chunks();
        }
        return next_reverse();
      case Phase::Intra:
        phase_ = Phase::Walk;
        return (warming() || shape_.quiet ? 1 : 2) * call_.group * call_.v_panels;
      case Phase::Walk:
        if (warming()) {
          reverse_end_ = begin_;
          return next_reverse();
        }
        phase_ = Phase::Grads;
        return shape_.quiet ? 1 : chunks();
      case Phase::Grads:
        sum_gate_grads();
        reverse_end_ = begin_;
        return next_reverse();
    }
    return 0;
  }

  void run(int64_t begin, int64_t end, int thread) override {
    BackwardScratch<T>& scratch = scratch_[thread];
    switch (phase_) {
      case Phase::PassIntra:
      case Phase::Intra:
        for (int64_t i = begin; i < end; ++i) intra(window_[i], begin_ + i * kInnerChunk);
        break;
      case Phase::Grads:
        if (shape_.quiet) {
          for (int h = 0; h < call_.group; ++h) begin_reverse(h, 0, call_.v_panels);
          for (int64_t i = chunks() - 1; i >= 0; --i) {
            for (int h = 0; h < call_.group; ++h) reverse_chunk(i, h, 0, call_.v_panels);
            grads(window_[i], begin_ + i * kInnerChunk, scratch);
          }
          break;
        }
        for (int64_t i = begin; i < end; ++i) grads(window_[i], begin_ + i * kInnerChunk, scratch);
        break;
      default:
        for (int64_t i = begin; i < end;) {
          const int64_t row = i / call_.v_panels;  // value head, then the same of the reverse walk
          const int p_begin = static_cast<int>(i % call_.v_panels);
          const int p_end = static_cast<int>(std::min<int64_t>(call_.v_panels, p_begin + end - i));
          const int h = static_cast<int>(row % call_.group);
          if (phase_ == Phase::PassWalk)
            pass_walk(h, p_begin, p_end);
          else if (row < call_.group && !warming())
            state_walk(h, p_begin, p_end);
          else
            reverse_walk(h, p_begin, p_end);
          i += p_end - p_begin;
        }
    }
  }

 private:
  enum class Phase { PassIntra, PassWalk, Intra, Walk, Grads };

  int64_t v_head(int h) const { return stream_.k_head * call_.group + h; }
  T* state(int h) { return states_.data() + h * call_.state_size; }
  T* d_state(int h) { return states_.data() + (call_.group + h) * call_.state_size; }
  T* checkpoint(int64_t window, int h) { return checkpoints_.data() + (window * call_.group + h) * call_.state_size; }
  bool warming() const { return begin_ >= stream_.end; }  // reverse warm-up, behind the segment
  int64_t chunks() const { return (end_ - begin_ + kInnerChunk - 1) / kInnerChunk; }
  int rows_at(int64_t token) const { return static_cast<int>(std::min<int64_t>(kInnerChunk, end_ - token)); }

  static size_t lay_out(const Call<T>& call, const LaneShape& shape, std::vector<WindowChunk<T>>& window, T* base) {
    Carver<T> carver(base);
    for (size_t i = 0; i < window.size(); ++i) {
      WindowChunk<T>& chunk = window[i];
      chunk.tiles.carve(carver, call, kInnerChunk, call.group, true);
      chunk.delta.clear(), chunk.do_dr.clear(), chunk.state.clear(), chunk.d_state.clear();
      for (int h = 0; h < call.group; ++h) {
        chunk.delta.push_back(shape.keep_delta ? nullptr : carver.take(wide(call)));
        chunk.state.push_back(carver.take(call.state_size));
        // quiet: dS+ lives for a chunk and the one before it, dO and dR for one
        chunk.d_state.push_back(shape.quiet && i >= 2 ? window[i % 2].d_state[h] : carver.take(call.state_size));
        chunk.do_dr.push_back(shape.quiet && i >= 1 ? window[0].do_dr[h] : carver.take(2 * wide(call)));
      }
      chunk.dA_log.assign(call.group, 0), chunk.ddt_bias.assign(call.group, 0);
    }
    return static_cast<size_t>(carver.used());
  }

  // Where Delta of a chunk of the stream is kept.
  T* delta(int64_t token, int h) {
    if (!shape_.keep_delta) return window_[(token - begin_) / kInnerChunk].delta[h];
    return deltas_.data() + ((token - stream_.begin) / kInnerChunk * call_.group + h) * wide(call_);
  }

  void fill_start(const HeadStart& at, bool forward, int h, T* panels) {
    if (at.start == QLA_START_MERGED) {
      std::memcpy(panels, run_.merged + at.merged * call_.state_size, sizeof(T) * call_.state_size);
    } else if (at.start == QLA_START_INITIAL && forward) {
      call_.initial_state(*seq_, v_head(h), panels);
    } else if (at.start == QLA_START_INITIAL && run_.args->d_final_state.data) {
      call_.load_state(state_rows(run_.args->d_final_state, stream_.sequence, v_head(h)), 0, call_.v_panels, panels);
    } else {
      std::memset(panels, 0, sizeof(T) * call_.state_size);
    }
  }

  void keep_checkpoint() {
    if (next_checkpoint_ < num_windows_)
      std::memcpy(checkpoint(next_checkpoint_, 0), states_.data(), sizeof(T) * call_.group * call_.state_size);
    ++next_checkpoint_;
  }

  int64_t next_reverse() {
    if (reverse_end_ > stream_.end) {  // warm-up behind the segment, towards it
      end_ = reverse_end_;
      const int64_t span = shape_.window * kInnerChunk;
      begin_ = stream_.end + (end_ - stream_.end - 1) / span * span;
    } else {
      if (--window_index_ < 0) {
        finish();
        return 0;
      }
      begin_ = stream_.begin + window_index_ * shape_.window * kInnerChunk;
      end_ = std::min(begin_ + shape_.window * kInnerChunk, stream_.end);
    }
    phase_ = Phase::Intra;
    return chunks();
  }

  bool passing() const { return phase_ == Phase::PassIntra; }

  void intra(WindowChunk<T>& chunk, int64_t token) {
    const int rows = rows_at(token);
    ChunkTiles<T>& tiles = chunk.tiles.chunk;
    alignas(64) T q_rnorm[kInnerChunk], k_rnorm[kInnerChunk], g[kInnerChunk], beta[kInnerChunk];
    load_chunk(call_, *seq_, stream_.k_head, token, rows, !passing(), tiles, q_rnorm, k_rnorm);
    if (call_.normalize && !passing()) {
      std::copy(q_rnorm, q_rnorm + rows, chunk.tiles.q_rnorm);
      std::copy(k_rnorm, k_rnorm + rows, chunk.tiles.k_rnorm);
    }
    for (int h = 0; h < call_.group; ++h) {
      if (token < walk_from_[h] || token >= reverse_from_[h]) continue;
      call_.gates.load(seq_->batch, seq_->bos + token, v_head(h), rows, g, beta);
      HeadTiles<T> head = chunk.tiles.heads[h];
      if (passing()) head.pg = head.decay = nullptr;
      if (warming()) head.decay = nullptr;
      call_.kernels.head_tiles(tiles, g, beta, call_.scale, false, head);
    }
  }

  Walk<T> walk_of(const WindowChunk<T>& chunk, int64_t token, int h) const {
    Walk<T> w{};
    w.chunk = &chunk.tiles.chunk;
    w.head = &chunk.tiles.heads[h];
    w.v_dim = call_.v_dim;
    w.scale = call_.scale;
    w.v = token_rows(*call_.args.v, seq_->batch, seq_->bos + token, v_head(h));
    return w;
  }

  void pass_walk(int h, int p_begin, int p_end) {
    for (int64_t token = std::max(begin_, walk_from_[h]); token < end_; token += kInnerChunk) {
      Walk<T> w = walk_of(window_[(token - begin_) / kInnerChunk], token, h);
      w.state_in = w.state_out = state(h);
      if (shape_.keep_delta && token >= stream_.begin) w.delta = delta(token, h);
      call_.kernels.walk(w, p_begin, p_end);
    }
  }

  // States and Delta of the window, from its checkpoint; the last chunk's end state goes nowhere.
  void state_walk(int h, int p_begin, int p_end) {
    const int64_t n = chunks(), at = static_cast<int64_t>(p_begin) * call_.panel * call_.k_dim;
    const int64_t size = static_cast<int64_t>(p_end - p_begin) * call_.panel * call_.k_dim;
    std::memcpy(window_[0].state[h] + at, checkpoint(window_index_, h) + at, sizeof(T) * size);
    for (int64_t i = 0; i < n; ++i) {
      Walk<T> w = walk_of(window_[i], begin_ + i * kInnerChunk, h);
      w.state_in = window_[i].state[h];
      w.state_out = i + 1 < n ? window_[i + 1].state[h] : nullptr;
      w.delta = delta(begin_ + i * kInnerChunk, h);
      w.known_delta = shape_.keep_delta && window_index_ + 1 < num_windows_;  // the pass has been there
      call_.kernels.walk(w, p_begin, p_end);
    }
  }

  void reverse_walk(int h, int p_begin, int p_end) {
    if (!warming()) begin_reverse(h, p_begin, p_end);
    for (int64_t i = chunks() - 1; i >= 0; --i) reverse_chunk(i, h, p_begin, p_end);
  }

  void begin_reverse(int h, int p_begin, int p_end) {
    const int64_t at = static_cast<int64_t>(p_begin) * call_.panel * call_.k_dim;
    const int64_t size = static_cast<int64_t>(p_end - p_begin) * call_.panel * call_.k_dim;
    std::memcpy(window_[chunks() - 1].d_state[h] + at, d_state(h) + at, sizeof(T) * size);
  }

  void reverse_chunk(int64_t i, int h, int p_begin, int p_end) {
    const int64_t token = begin_ + i * kInnerChunk;
    if (token >= reverse_from_[h]) return;
    WindowChunk<T>& chunk = window_[i];
    Reverse<T> r{};
    r.chunk = &chunk.tiles.chunk;
    r.head = &chunk.tiles.heads[h];
    r.v_dim = call_.v_dim;
    r.scale = call_.scale;
    r.d_o = token_rows(run_.args->d_o, seq_->batch, seq_->bos + token, v_head(h));
    r.d_o_step = run_.args->d_o.stride[3];
    if (warming()) {
      r.d_state_in = r.d_state_out = d_state(h);
    } else {
      r.d_state_in = chunk.d_state[h];
      r.d_state_out = i > 0 ? window_[i - 1].d_state[h] : d_state(h);
      r.do_dr = chunk.do_dr[h];
      r.dv = token_rows(run_.args->dv, seq_->batch, seq_->bos + token, v_head(h));
    }
    call_.kernels.reverse(r, p_begin, p_end);
  }

  void grads(WindowChunk<T>& chunk, int64_t token, BackwardScratch<T>& scratch) {
    const auto& args = *run_.args;
    const int rows = chunk.tiles.chunk.rows;
    alignas(64) T dg[kInnerChunk], dbeta[kInnerChunk];
    for (int h = 0; h < call_.group; ++h) {
      Grads<T> g{};
      g.chunk = &chunk.tiles.chunk;
      g.head = &chunk.tiles.heads[h];
      g.v_dim = call_.v_dim;
      g.scale = call_.scale;
      g.state = chunk.state[h], g.d_state = chunk.d_state[h];
      g.delta = delta(token, h), g.do_dr = chunk.do_dr[h];
      g.dq_t = scratch.dq_t, g.dk_t = scratch.dk_t;
      g.first = h == 0;
      g.dg = dg, g.dbeta = dbeta;
      g.scratch = scratch.grads;
      call_.kernels.grads(g);
      chunk.dA_log[h] = chunk.ddt_bias[h] = 0;
      call_.gates.backward(seq_->batch, seq_->bos + token, v_head(h), rows, dg, dbeta, &chunk.dA_log[h], &chunk.ddt_bias[h]);
      const Rows to_g = token_rows(args.dg, seq_->batch, seq_->bos + token, v_head(h));
      const Rows to_beta = token_rows(args.dbeta, seq_->batch, seq_->bos + token, v_head(h));
      for (int i = 0; i < rows; ++i) {
        if (to_g.data) store_at(to_g, i, dg[i]);
        if (to_beta.data) store_at(to_beta, i, dbeta[i]);
      }
    }
    const ChunkTiles<T>& tiles = chunk.tiles.chunk;
    store_rows(scratch.dq_t, tiles.kq + static_cast<int64_t>(rows) * tiles.ld, chunk.tiles.q_rnorm, rows, args.dq, token,
               scratch);
    store_rows(scratch.dk_t, tiles.kq, chunk.tiles.k_rnorm, rows, args.dk, token, scratch);
  }

  // Gradients of q or k, transposed back, through the normalisation x r of (x, r = (sum x^2 + eps)^-1/2): r (d - y <y, d>), y = x
  // r.
  void store_rows(const T* transposed, const T* normalised, const T* rnorm, int rows, const qla_tensor& to, int64_t token,
                  BackwardScratch<T>& scratch) {
    if (!to.data) return;
    call_.kernels.transpose_from_panels(transposed, rows, call_.k_dim, scratch.rows, call_.k_dim);
    if (call_.normalize) {
      for (int i = 0; i < rows; ++i) {
        T* d = scratch.rows + i * call_.k_dim;
        const T* y = normalised + i * call_.ld;
        T dot = 0;
        for (int j = 0; j < call_.k_dim; ++j) dot += y[j] * d[j];
        for (int j = 0; j < call_.k_dim; ++j) d[j] = rnorm[i] * (d[j] - y[j] * dot);
      }
    }
    call_.kernels.store_rows(scratch.rows, call_.k_dim, rows, call_.k_dim,
                             token_rows(to, seq_->batch, seq_->bos + token, stream_.k_head));
  }

  void sum_gate_grads() {
    for (int64_t i = chunks() - 1; i >= 0; --i)
      for (int h = 0; h < call_.group; ++h) {
        dA_log_[index_ * call_.group + h] += window_[i].dA_log[h];
        ddt_bias_[index_ * call_.group + h] += window_[i].ddt_bias[h];
      }
  }

  void finish() {
    if (!stream_.first || !run_.args->d_initial_state.data) return;
    for (int h = 0; h < call_.group; ++h) {
      const Rows to = state_rows(run_.args->d_initial_state, stream_.sequence, v_head(h));
      if (seq_->has_initial)
        call_.store_state(d_state(h), 0, call_.v_panels, to);
      else
        call_.zero_state(to);
    }
  }

  const BackwardRun<T>& run_;
  const Call<T>& call_;
  std::vector<BackwardScratch<T>>& scratch_;
  const LaneShape shape_;
  std::vector<double>&dA_log_, &ddt_bias_;  // by stream and value head of its group
  std::vector<WindowChunk<T>> window_;
  Buffer<T> block_, states_, checkpoints_, deltas_;
  std::vector<int64_t> walk_from_, reverse_from_;
  Stream stream_;
  const Sequence* seq_ = nullptr;
  Phase phase_ = Phase::PassWalk;
  int64_t index_ = 0, num_windows_ = 0, next_checkpoint_ = 0, window_index_ = 0;
  int64_t warm_begin_ = 0, warm_end_ = 0, reverse_end_ = 0;
  int64_t begin_ = 0, end_ = 0;  // tokens of the window at work
};

}  // namespace

template <class T>
void run_backward(const BackwardRun<T>& run) {
  const Call<T>& call = run.call;
  int64_t longest = 1;
  for (const Sequence& seq : call.sequences) longest = std::max(longest, seq.tokens());
  if (!run.plan.cut.empty()) {
    longest = 1;
    for (const Stream& stream : run.plan.cut) longest = std::max(longest, stream.end - stream.begin);
  }
  const int64_t chunks = (longest + kInnerChunk - 1) / kInnerChunk, streams = run.plan.size();
  LaneShape shape;
  // as many chunks in a window as there are windows, where a stream is that long
  shape.window = std::max(kLeastWindow, static_cast<int64_t>(std::sqrt(static_cast<double>(chunks) / 2)) / 2 * 2);
  shape.window = std::min(shape.window, (chunks + 1) / 2 * 2);
  shape.most_windows = (chunks + shape.window - 1) / shape.window;
  const int64_t wanted = std::clamp<int64_t>(streams, 1, call.threads);
  const auto fitting = [&] { return std::clamp<int64_t>(kLaneBudget / BackwardLane<T>::bytes(call, shape), 1, wanted); };
  shape.lanes = fitting();
  shape.quiet = call.threads == 1 || (streams >= 4 * call.threads && shape.lanes == wanted);
  if (!shape.quiet) shape.lanes = fitting();
  shape.keep_delta = shape.most_windows > 1 &&
                     BackwardLane<T>::delta_size(call, shape) * shape.lanes * static_cast<int64_t>(sizeof(T)) <= kDeltaBudget;
  std::vector<BackwardScratch<T>> scratch;
  scratch.reserve(call.threads);
  for (int i = 0; i < call.threads; ++i) scratch.emplace_back(call);
  std::vector<double> dA_log(static_cast<size_t>(run.plan.size() * call.group), 0), ddt_bias(dA_log.size(), 0);
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int64_t i = 0; i < shape.lanes; ++i)
    lanes.push_back(std::make_unique<BackwardLane<T>>(run, scratch, shape, dA_log, ddt_bias));
  run_lanes(call.threads, run.plan.size(), lanes);

  for (int64_t i = 0; i < run.plan.size(); ++i)
    for (int h = 0; h < call.group; ++h) {
      const int64_t head = call.stream(run.plan, i).k_head * call.group + h;
      run.sums->dA_log[head] += dA_log[i * call.group + h], run.sums->ddt_bias[head] += ddt_bias[i * call.group + h];
    }
}
template void run_backward<float>(const BackwardRun<float>&);
template void run_backward<double>(const BackwardRun<double>&);

}  // namespace qla::cpu
