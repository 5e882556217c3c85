// Forward: (F0)-(F9) over windows of chunks: the intra-chunk stage (items: chunks), then the walk (items: value heads x panels of
// V). Where threads share a stream, a window's walk and the next window's intra-chunk stage are one phase. Nothing of a window
// outlives it but the states, so memory does not grow with the sequence.
#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/call.hpp"
#include "cpu/forward_run.hpp"
#include "cpu/lanes.hpp"
#include "cpu/segments.hpp"
#include "cpu/tiles.hpp"

namespace qla::cpu {
namespace {

// Inner chunks of a window; even, so that every window starts at a chunk of 64. One thread: tiles then stay in its L2. Threads
// that share a stream wait for one another at each window's end. Bits do not depend on it.
inline constexpr int kQuietWindow = 2, kSharedWindow = 8;

template <class T>
struct ThreadScratch {
  Buffer<T> block;
  T *products = nullptr, *kq = nullptr;  // nobody keeps them
  TileSet<T> wide;                       // one chunk of 64, where A or g is handed out

  ThreadScratch(const Call<T>& call, bool with_wide) {
    block.resize(lay_out(call, with_wide, nullptr));  // members exist by now, unlike in an initialiser of block
    lay_out(call, with_wide, block.data());
  }

 private:
  size_t lay_out(const Call<T>& call, bool with_wide, T* base) {
    Carver<T> carver(base);
    products = carver.take(2LL * kMaxChunk * kMaxChunk);
    kq = carver.take(2LL * kMaxChunk * call.ld);
    if (with_wide) wide.carve(carver, call, kMaxChunk, 1, false);
    return static_cast<size_t>(carver.used());
  }
};

template <class T>
class ForwardLane final : public Lane {
 public:
  ForwardLane(const ForwardRun<T>& run, std::vector<ThreadScratch<T>>& scratch, std::vector<char>& spoiled)
      : run_(run),
        call_(run.call),
        scratch_(scratch),
        spoiled_(spoiled),
        states_(static_cast<size_t>(call_.state_size * call_.group)),
        tiles_(call_.threads > 1 ? 2 * kSharedWindow : kQuietWindow) {
    block_.resize(lay_out(nullptr));
    lay_out(block_.data());
    walk_from_.resize(call_.group);
  }

  void start(int64_t index) override {
    index_ = index;
    stream_ = call_.stream(run_.plan, index);
    seq_ = &call_.sequences[stream_.sequence];
    walked_to_ = stream_.begin;
    walking_ = making_ = {};
    for (int h = 0; h < call_.group; ++h) {
      HeadStart at;
      if (stream_.starts >= 0) at = run_.plan.starts[stream_.starts + h];
      walk_from_[h] = stream_.begin - at.warmup_tokens;
      walked_to_ = std::min(walked_to_, walk_from_[h]);
      T* state = states_.data() + h * call_.state_size;
      if (at.start == QLA_START_INITIAL)
        call_.initial_state(*seq_, v_head(h), state);
      else if (at.start == QLA_START_MERGED)
        std::memcpy(state, run_.merged + at.merged * call_.state_size, sizeof(T) * call_.state_size);
      else
        std::memset(state, 0, sizeof(T) * call_.state_size);
    }
  }

  int64_t advance(int sharers) override {
    if (!walking_.empty()) walked_to_ = walking_.end;
    walking_ = std::exchange(making_, {});
    const int64_t made_to = walking_.empty() ? walked_to_ : walking_.end;
    if (walking_.empty() && made_to >= stream_.end) {
      finish();
      return 0;
    }
    if (made_to < stream_.end && (walking_.empty() || sharers > 1)) {
      making_.begin = made_to;
      const int window = sharers > 1 ? kSharedWindow : kQuietWindow;
      making_.end = std::min(made_to + static_cast<int64_t>(window) * kInnerChunk, stream_.end);
      // outputs begin at a window's start, so that a window has them on or off
      if (making_.begin < stream_.begin) making_.end = std::min(making_.end, stream_.begin);
      making_.tiles = walking_.empty() || walking_.tiles != tiles_.data() ? tiles_.data() : tiles_.data() + kSharedWindow;
    }
    // as few slices as there are threads: each reads all tiles
    slices_ = Pieces::of(walking_.empty() ? 0 : static_cast<int64_t>(call_.group) * call_.v_panels, sharers);
    return slices_.count + making_.chunks();
  }

  void run(int64_t piece, int thread) override {
    if (piece >= slices_.count) {
      intra(piece - slices_.count, scratch_[thread]);
      return;
    }
    const int64_t end = slices_.begin(piece + 1);
    for (int64_t i = slices_.begin(piece); i < end;) {
      const int h = static_cast<int>(i / call_.v_panels), p_begin = static_cast<int>(i % call_.v_panels);
      const int p_end = static_cast<int>(std::min<int64_t>(call_.v_panels, p_begin + end - i));
      walk(h, p_begin, p_end);
      i += p_end - p_begin;
    }
  }

 private:
  struct Window {
    int64_t begin = 0, end = 0;  // tokens of the sequence
    TileSet<T>* tiles = nullptr;

    bool empty() const { return tiles == nullptr; }
    int64_t chunks() const { return (end - begin + kInnerChunk - 1) / kInnerChunk; }
  };

  int64_t v_head(int h) const { return stream_.k_head * call_.group + h; }
  bool output(const Window& window) const { return window.begin >= stream_.begin; }

  size_t lay_out(T* base) {
    Carver<T> carver(base);
    for (TileSet<T>& set : tiles_) set.carve(carver, call_, kInnerChunk, call_.group, false);
    return static_cast<size_t>(carver.used());
  }

  void intra(int64_t index, ThreadScratch<T>& scratch) {
    TileSet<T>& set = making_.tiles[index];
    const int64_t token = making_.begin + index * kInnerChunk;
    const int rows = static_cast<int>(std::min<int64_t>(kInnerChunk, making_.end - token));
    const bool with_output = output(making_);
    set.chunk.products = scratch.products, set.chunk.kq = scratch.kq;
    alignas(64) T q_rnorm[kInnerChunk], k_rnorm[kInnerChunk], g[kInnerChunk], beta[kInnerChunk];
    load_chunk(call_, *seq_, stream_.k_head, token, rows, with_output, set.chunk, q_rnorm, k_rnorm);
    for (int h = 0; h < call_.group; ++h) {
      if (token < walk_from_[h]) continue;
      call_.gates.load(seq_->batch, seq_->bos + token, v_head(h), rows, g, beta);
      HeadTiles<T> head = set.heads[h];
      if (!with_output) head.pg = nullptr;
      call_.kernels.head_tiles(set.chunk, g, beta, call_.scale, false, head);
    }
    if (!with_output) return;
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
    wide.chunk.products = scratch.products, wide.chunk.kq = scratch.kq;
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
    const bool with_output = output(walking_);
    for (int64_t token = std::max(walking_.begin, walk_from_[h]); token < walking_.end; token += kInnerChunk) {
      const TileSet<T>& set = walking_.tiles[(token - walking_.begin) / kInnerChunk];
      Walk<T> w{};
      w.chunk = &set.chunk;
      w.head = &set.heads[h];
      w.v_dim = call_.v_dim;
      w.scale = call_.scale;
      w.v = token_rows(*call_.args.v, seq_->batch, seq_->bos + token, v_head(h));
      w.state_in = w.state_out = state;
      if (slices_.count > 1 && token + kInnerChunk < walking_.end) {  // made by another core, perhaps
        const TileSet<T>& next = walking_.tiles[(token - walking_.begin) / kInnerChunk + 1];
        const int64_t steps = static_cast<int64_t>(p_end - p_begin) * (2 * kInnerChunk + call_.k_dim), lines = next.bytes(h) / 64;
        w.ahead = next.chunk.k_t;
        w.ahead_step = (lines + steps - 1) / steps * 64;
      }
      if (with_output) {
        w.o = token_rows(run_.args->o, seq_->batch, seq_->bos + token, v_head(h));
        if (run_.args->h.data && token % kChunk == 0)
          call_.store_state(state, p_begin, p_end, state_rows(run_.args->h, seq_->first_chunk + token / kChunk, v_head(h)));
      }
      call_.kernels.walk(w, p_begin, p_end);
      const int64_t end = token + set.chunk.rows, every = call_.args.checkpoint_every;
      if (with_output && every > 0 && run_.args->state_checkpoints.data && end % every == 0)
        call_.store_state(state, p_begin, p_end,
                          state_rows(run_.args->state_checkpoints, seq_->first_checkpoint + end / every - 1, v_head(h)));
    }
  }

  void finish() {
    if (!stream_.last) spoiled_[index_] = !all_finite(states_.data(), call_.state_size * call_.group);
    if (!stream_.last || !run_.final_state->data || seq_->state_slot < 0) return;
    for (int h = 0; h < call_.group; ++h)
      call_.store_state(states_.data() + h * call_.state_size, 0, call_.v_panels,
                        state_rows(*run_.final_state, seq_->state_slot, v_head(h)));
  }

  const ForwardRun<T>& run_;
  const Call<T>& call_;
  std::vector<ThreadScratch<T>>& scratch_;
  std::vector<char>& spoiled_;  // by stream
  Buffer<T> states_, block_;
  std::vector<TileSet<T>> tiles_;  // of two windows
  std::vector<int64_t> walk_from_;
  Stream stream_;
  const Sequence* seq_ = nullptr;
  int64_t index_ = 0;        // of the stream
  int64_t walked_to_ = 0;    // tokens
  Window walking_, making_;  // of the phase
  Pieces slices_;            // of the walk
};

}  // namespace

template <class T>
void run_forward(const ForwardRun<T>& run) {
  const int threads = run.call.threads;
  const int64_t lanes_count = std::clamp<int64_t>(run.plan.size(), 1, threads);
  std::vector<ThreadScratch<T>> scratch;
  scratch.reserve(threads);
  for (int i = 0; i < threads; ++i) scratch.emplace_back(run.call, run.wide_outputs);
  std::vector<char> spoiled(run.plan.cut.size(), 0);
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int64_t i = 0; i < lanes_count; ++i) lanes.push_back(std::make_unique<ForwardLane<T>>(run, scratch, spoiled));
  run_lanes(threads, run.plan.size(), lanes);
  const StreamPlan again = whole_again(run.plan, run.call.sequences, spoiled);
  if (again.cut.empty()) return;
  lanes.clear();
  run_forward<T>({run.call, run.args, run.final_state, run.wide_outputs, again});
}
template void run_forward<float>(const ForwardRun<float>&);
template void run_forward<double>(const ForwardRun<double>&);

}  // namespace qla::cpu
