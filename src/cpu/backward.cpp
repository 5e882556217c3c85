// Backward of a stream, in windows of chunks from the last to the first. A pass beforehand keeps the state at each window's start
// (a checkpoint); in each window the states and Delta come again from there (F4), (F5), (F8), (F9), then the reverse walk
// (B1)-(B4) and every chunk's gradients (B5)-(B11) by themselves. So memory is one state a window, not one a chunk. All of it
// goes in blocks of a few chunks, so that a block's tiles are still in the cache; where threads share a stream, one block's walk
// (items: value heads x panels of V) and the next one's tiles, or the last one's gradients (items: chunks), are one phase.
#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/backward_run.hpp"
#include "cpu/backward_window.hpp"
#include "cpu/lanes.hpp"
#include "cpu/segments.hpp"
#include "cpu/tiles.hpp"

namespace qla::cpu {
namespace {

template <class T>
class BackwardLane final : public Lane {
 public:
  BackwardLane(const BackwardRun<T>& run, std::vector<BackwardScratch<T>>& scratch, const LaneShape& shape,
               std::vector<double>& dA_log, std::vector<double>& ddt_bias, std::vector<char>& spoiled)
      : run_(run),
        call_(run.call),
        scratch_(scratch),
        shape_(shape),
        dA_log_(dA_log),
        ddt_bias_(ddt_bias),
        spoiled_(spoiled),
        window_(static_cast<size_t>(shape.window)) {
    block_.resize(lay_out<T>(call_, shape_, window_, nullptr));
    lay_out<T>(call_, shape_, window_, block_.data());
    states_.resize(2 * call_.group * call_.state_size);
    checkpoints_.resize(static_cast<size_t>(shape_.most_windows * call_.group * call_.state_size));
    if (shape_.keep_delta) deltas_.resize(static_cast<size_t>(delta_size(call_, shape_)));
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
    next_checkpoint_ = 0;
    window_index_ = num_windows_;
    reverse_end_ = warm_end_;
    // over the warm-up and all windows but the last
    stage_ = Stage::Pass;
    conveyor(warm_begin_, std::max(stream_.begin, stream_.begin + (num_windows_ - 1) * span));
    if (walked_to_ == stream_.begin) keep_checkpoint();
  }

  int64_t advance(int sharers) override {
    slices_ = chunks_ = {};
    bool more = false;
    switch (stage_) {
      case Stage::Pass:
        more = convey(sharers);
        break;
      case Stage::States:
        more = convey(sharers);
        if (!more) {
          if (end_ == stream_.end && !stream_.last) look_for_nan(state(0));
          stage_ = Stage::Gradients;
          alone_ = sharers == 1;
          walking_ = {};
          reversed_to_ = end_;
          more = reverse_block(sharers);
        }
        break;
      case Stage::Gradients:
        more = reverse_block(sharers);
        if (!more) sum_gate_grads();
        break;
      case Stage::WarmTiles:  // one after the other: there are few of them
        stage_ = Stage::Warm;
        slices_ = Pieces::of(panels(), sharers);
        return slices_.count;
      case Stage::Warm:
        break;
    }
    if (more) return slices_.count + chunks_.count;
    if (stage_ != Stage::Pass) reverse_end_ = begin_;
    return next_window(sharers);
  }

  void run(int64_t piece, int thread) override {
    if (piece >= slices_.count) {
      for (int64_t i = chunks_.begin(piece - slices_.count); i < chunks_.begin(piece - slices_.count + 1); ++i)
        chunk_item(i, thread);
      return;
    }
    const int64_t end = slices_.begin(piece + 1);
    for (int64_t i = slices_.begin(piece); i < end;) {
      const int h = static_cast<int>(i / call_.v_panels), p_begin = static_cast<int>(i % call_.v_panels);
      const int p_end = static_cast<int>(std::min<int64_t>(call_.v_panels, p_begin + end - i));
      walk_item(h, p_begin, p_end);
      i += p_end - p_begin;
    }
  }

 private:
  // WarmTiles, Warm: a window of the reverse warm-up, behind the segment.
  enum class Stage { Pass, WarmTiles, Warm, States, Gradients };

  struct Block {
    int64_t begin = 0, end = 0;  // tokens
    WindowChunk<T>* chunks = nullptr;

    bool empty() const { return begin == end; }
    int64_t count() const { return (end - begin + kInnerChunk - 1) / kInnerChunk; }
    WindowChunk<T>& at(int64_t token) const { return chunks[(token - begin) / kInnerChunk]; }
  };

  int64_t v_head(int h) const { return stream_.k_head * call_.group + h; }
  int64_t panels() const { return static_cast<int64_t>(call_.group) * call_.v_panels; }
  T* state(int h) { return states_.data() + h * call_.state_size; }
  T* d_state(int h) { return states_.data() + (call_.group + h) * call_.state_size; }
  T* checkpoint(int64_t window, int h) { return checkpoints_.data() + (window * call_.group + h) * call_.state_size; }
  int64_t chunks() const { return (end_ - begin_ + kInnerChunk - 1) / kInnerChunk; }
  WindowChunk<T>& chunk_at(int64_t token) { return window_[(token - begin_) / kInnerChunk]; }

  // Tiles and forward walk over [begin, end), block after block.
  void conveyor(int64_t begin, int64_t end) {
    walked_to_ = begin, convey_end_ = end;
    walking_ = making_ = {};
  }

  // The next phase of it; false: done.
  bool convey(int sharers) {
    if (!walking_.empty()) {
      walked_to_ = walking_.end;
      if (stage_ == Stage::Pass && walked_to_ >= stream_.begin &&
          (walked_to_ - stream_.begin) % (shape_.window * kInnerChunk) == 0)
        keep_checkpoint();
    }
    walking_ = std::exchange(making_, {});
    const int64_t made_to = walking_.empty() ? walked_to_ : walking_.end;
    if (made_to < convey_end_ && (walking_.empty() || sharers > 1)) {
      making_.begin = made_to;
      const int64_t block = std::min(sharers > 1 ? kSharedBlock : kQuietBlock, shape_.window / 2);
      making_.end = std::min(made_to + block * kInnerChunk, convey_end_);
      if (stage_ == Stage::States) {
        making_.chunks = &chunk_at(made_to);
      } else {  // blocks end where the warm-up and the windows do, and two of them take turns
        const int64_t span = shape_.window * kInnerChunk, past = made_to - stream_.begin;
        making_.end = std::min(making_.end, past < 0 ? stream_.begin : stream_.begin + (past / span + 1) * span);
        making_.chunks =
            walking_.empty() || walking_.chunks != window_.data() ? window_.data() : window_.data() + shape_.window / 2;
      }
    }
    slices_ = Pieces::of(walking_.empty() ? 0 : panels(), sharers);
    chunks_ = {making_.count(), sharers == 1 ? std::min<int64_t>(making_.count(), 1) : making_.count()};
    return slices_.count + chunks_.count > 0;
  }

  // The next phase of reverse walk and gradients; false: done.
  bool reverse_block(int sharers) {
    const Block reversed = std::exchange(walking_, {});
    if (!alone_) {
      walking_.end = reversed_to_;
      walking_.begin = std::max(begin_, begin_ + (chunks_between(begin_, reversed_to_) - kSharedBlock) * kInnerChunk);
      reversed_to_ = walking_.begin;
      making_ = reversed;
      slices_ = Pieces::of(walking_.empty() ? 0 : panels(), sharers);
      chunks_ = {reversed.count(), reversed.count()};
    } else if (reversed_to_ > begin_) {
      reversed_to_ = begin_;
      chunks_ = {1, 1};
    }
    return slices_.count + chunks_.count > 0;
  }
  static int64_t chunks_between(int64_t begin, int64_t end) { return (end - begin + kInnerChunk - 1) / kInnerChunk; }

  void chunk_item(int64_t i, int thread) {
    if (stage_ == Stage::Gradients && alone_) {
      for (int h = 0; h < call_.group; ++h) begin_reverse(h, 0, call_.v_panels);
      for (int64_t c = chunks() - 1; c >= 0; --c) {
        for (int h = 0; h < call_.group; ++h) reverse_chunk(c, h, 0, call_.v_panels);
        grads(window_[c], begin_ + c * kInnerChunk, scratch_[thread]);
      }
    } else if (stage_ == Stage::Gradients) {
      const int64_t token = making_.begin + i * kInnerChunk;
      grads(chunk_at(token), token, scratch_[thread]);
    } else if (stage_ == Stage::WarmTiles) {
      intra(window_[i], begin_ + i * kInnerChunk, end_);
    } else {
      intra(making_.chunks[i], making_.begin + i * kInnerChunk, making_.end);
    }
  }

  void walk_item(int h, int p_begin, int p_end) {
    switch (stage_) {
      case Stage::Pass:
        pass_walk(h, p_begin, p_end);
        break;
      case Stage::States:
        state_walk(h, p_begin, p_end);
        break;
      default:
        if (stage_ == Stage::Gradients && walking_.end == end_) begin_reverse(h, p_begin, p_end);
        const int64_t first = stage_ == Stage::Gradients ? walking_.begin : begin_,
                      last = stage_ == Stage::Gradients ? walking_.end : end_;
        for (int64_t c = chunks_between(begin_, last) - 1; c >= chunks_between(begin_, first); --c)
          reverse_chunk(c, h, p_begin, p_end);
    }
  }

  // Where Delta of a chunk of the stream is kept; `chunk` is its place in the window.
  T* delta(WindowChunk<T>& chunk, int64_t token, int h) {
    if (!shape_.keep_delta) return chunk.delta[h];
    return deltas_.data() + ((token - stream_.begin) / kInnerChunk * call_.group + h) * delta_chunk_size(call_);
  }

  // dS+, dO and dR live until the gradients have read them. One thread goes chunk by chunk, and they never leave its cache.
  T* d_state_at(int64_t i, int h) { return window_[i % (alone_ ? kAloneSlots : kSharedSlots)].d_state[h]; }
  T* do_dr_at(int64_t i, int h) { return window_[alone_ ? 0 : i % kSharedSlots].do_dr[h]; }

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

  int64_t next_window(int sharers) {
    if (reverse_end_ > stream_.end) {  // warm-up behind the segment, towards it
      end_ = reverse_end_;
      const int64_t span = shape_.window * kInnerChunk;
      begin_ = stream_.end + (end_ - stream_.end - 1) / span * span;
      stage_ = Stage::WarmTiles;
      chunks_ = Pieces::of(chunks(), sharers == 1 ? 1 : chunks());
      return chunks_.count;
    }
    if (--window_index_ < 0) {
      finish();
      return 0;
    }
    begin_ = stream_.begin + window_index_ * shape_.window * kInnerChunk;
    end_ = std::min(begin_ + shape_.window * kInnerChunk, stream_.end);
    stage_ = Stage::States;
    conveyor(begin_, end_);
    convey(sharers);
    return slices_.count + chunks_.count;
  }

  bool warming() const { return stage_ == Stage::WarmTiles || stage_ == Stage::Warm; }

  void intra(WindowChunk<T>& chunk, int64_t token, int64_t end) {
    const int rows = static_cast<int>(std::min<int64_t>(kInnerChunk, end - token));
    const bool passing = stage_ == Stage::Pass;
    ChunkTiles<T>& tiles = chunk.tiles.chunk;
    alignas(64) T q_rnorm[kInnerChunk], k_rnorm[kInnerChunk], g[kInnerChunk], beta[kInnerChunk];
    load_chunk(call_, *seq_, stream_.k_head, token, rows, !passing, tiles, q_rnorm, k_rnorm);
    if (call_.normalize && !passing) {
      std::copy(q_rnorm, q_rnorm + rows, chunk.tiles.q_rnorm);
      std::copy(k_rnorm, k_rnorm + rows, chunk.tiles.k_rnorm);
    }
    for (int h = 0; h < call_.group; ++h) {
      if (token < walk_from_[h] || token >= reverse_from_[h]) continue;
      call_.gates.load(seq_->batch, seq_->bos + token, v_head(h), rows, g, beta);
      HeadTiles<T> head = chunk.tiles.heads[h];
      if (passing) head.pg = head.decay = nullptr;
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
    for (int64_t token = std::max(walking_.begin, walk_from_[h]); token < walking_.end; token += kInnerChunk) {
      WindowChunk<T>& chunk = walking_.at(token);
      Walk<T> w = walk_of(chunk, token, h);
      w.state_in = w.state_out = state(h);
      if (shape_.keep_delta && token >= stream_.begin) w.delta = delta(chunk, token, h);
      call_.kernels.walk(w, p_begin, p_end);
    }
  }

  // States and Delta of a block of the window, which starts from a checkpoint.
  void state_walk(int h, int p_begin, int p_end) {
    const int64_t at = static_cast<int64_t>(p_begin) * call_.panel * call_.k_dim;
    const int64_t size = static_cast<int64_t>(p_end - p_begin) * call_.panel * call_.k_dim;
    if (walking_.begin == begin_) std::memcpy(window_[0].state[h] + at, checkpoint(window_index_, h) + at, sizeof(T) * size);
    for (int64_t token = walking_.begin; token < walking_.end; token += kInnerChunk) {
      WindowChunk<T>& chunk = chunk_at(token);
      Walk<T> w = walk_of(chunk, token, h);
      w.state_in = chunk.state[h];
      w.state_out = token + kInnerChunk < end_             ? chunk_at(token + kInnerChunk).state[h]
                    : end_ == stream_.end && !stream_.last ? state(h)  // whether it is finite
                                                           : nullptr;
      w.delta = delta(chunk, token, h);
      w.known_delta = shape_.keep_delta && window_index_ + 1 < num_windows_;  // the pass has been there
      call_.kernels.walk(w, p_begin, p_end);
    }
  }

  void begin_reverse(int h, int p_begin, int p_end) {
    const int64_t at = static_cast<int64_t>(p_begin) * call_.panel * call_.k_dim;
    const int64_t size = static_cast<int64_t>(p_end - p_begin) * call_.panel * call_.k_dim;
    std::memcpy(d_state_at(chunks() - 1, h) + at, d_state(h) + at, sizeof(T) * size);
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
      r.d_state_in = d_state_at(i, h);
      r.d_state_out = i > 0 ? d_state_at(i - 1, h) : d_state(h);
      r.do_dr = do_dr_at(i, h);
      r.dv = token_rows(run_.args->dv, seq_->batch, seq_->bos + token, v_head(h));
    }
    call_.kernels.reverse(r, p_begin, p_end);
  }

  void grads(WindowChunk<T>& chunk, int64_t token, BackwardScratch<T>& scratch) {
    const auto& args = *run_.args;
    const int rows = chunk.tiles.chunk.rows;
    const int64_t index = (token - begin_) / kInnerChunk;
    alignas(64) T dg[kInnerChunk], dbeta[kInnerChunk];
    for (int h = 0; h < call_.group; ++h) {
      Grads<T> g{};
      g.chunk = &chunk.tiles.chunk;
      g.head = &chunk.tiles.heads[h];
      g.v_dim = call_.v_dim;
      g.scale = call_.scale;
      g.state = chunk.state[h], g.d_state = d_state_at(index, h);
      g.delta = delta(chunk, token, h), g.do_dr = do_dr_at(index, h);
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

  // What a warm-up behind (before) this stream does not see.
  void look_for_nan(const T* end_states) {
    if (!all_finite(end_states, call_.state_size * call_.group)) spoiled_[index_] = 1;
  }

  void finish() {
    if (!stream_.first) look_for_nan(d_state(0));
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
  std::vector<char>& spoiled_;              // by stream
  std::vector<WindowChunk<T>> window_;
  Buffer<T> block_, states_, checkpoints_, deltas_;
  std::vector<int64_t> walk_from_, reverse_from_;
  Stream stream_;
  const Sequence* seq_ = nullptr;
  Stage stage_ = Stage::Pass;
  int64_t index_ = 0, num_windows_ = 0, next_checkpoint_ = 0, window_index_ = 0;
  int64_t warm_begin_ = 0, warm_end_ = 0, reverse_end_ = 0;
  int64_t begin_ = 0, end_ = 0;  // tokens of the window at work
  int64_t walked_to_ = 0, convey_end_ = 0, reversed_to_ = 0;
  Block walking_, making_;  // of the phase: what is walked, and whose tiles (later: gradients) are made
  Pieces slices_, chunks_;  // of the phase
  bool alone_ = true;       // one thread has reverse walk and gradients of this window
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
  shape.sharing = call.threads > 1;
  shape.lanes = std::clamp<int64_t>(kLaneBudget / lane_bytes(call, shape), 1, wanted);
  shape.keep_delta =
      shape.most_windows > 1 && delta_size(call, shape) * shape.lanes * static_cast<int64_t>(sizeof(T)) <= kDeltaBudget;
  std::vector<BackwardScratch<T>> scratch;
  scratch.reserve(call.threads);
  for (int i = 0; i < call.threads; ++i) scratch.emplace_back(call);
  std::vector<double> dA_log(static_cast<size_t>(run.plan.size() * call.group), 0), ddt_bias(dA_log.size(), 0);
  std::vector<char> spoiled(run.plan.cut.size(), 0);
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int64_t i = 0; i < shape.lanes; ++i)
    lanes.push_back(std::make_unique<BackwardLane<T>>(run, scratch, shape, dA_log, ddt_bias, spoiled));
  run_lanes(call.threads, run.plan.size(), lanes);

  const StreamPlan again = whole_again(run.plan, call.sequences, spoiled);
  for (int64_t i = 0; i < run.plan.size(); ++i)
    for (int h = 0; h < call.group; ++h) {
      if (!spoiled.empty() && spoiled[i]) continue;
      const int64_t head = call.stream(run.plan, i).k_head * call.group + h;
      run.sums->dA_log[head] += dA_log[i * call.group + h], run.sums->ddt_bias[head] += ddt_bias[i * call.group + h];
    }
  if (again.cut.empty()) return;
  lanes.clear();
  run_backward<T>({call, run.args, again, nullptr, run.sums});
}
template void run_backward<float>(const BackwardRun<float>&);
template void run_backward<double>(const BackwardRun<double>&);

}  // namespace qla::cpu
