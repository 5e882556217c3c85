// One call, read off its arguments: sequences, gates, states. Common to forward and backward.
#pragma once

#include <vector>

#include "core/problem.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/memory.hpp"
#include "cpu/streams.hpp"
#include "cpu/view.hpp"

namespace qla::cpu {

struct Sequence {
  int64_t batch, bos, eos;   // tokens [bos, eos) of batch row `batch`
  int64_t first_chunk;       // over all sequences, in chunks of 64: the slot of h
  int64_t first_checkpoint;  // over all sequences
  int64_t state_slot;        // of initial_state and final_state; -1: skipped, its o is 0
  bool has_initial;
  int64_t tokens() const { return eos - bos; }
  int64_t chunks() const { return (tokens() + kChunk - 1) / kChunk; }
};

// The arguments that forward and backward share.
struct CommonArgs {
  const qla_tensor *q, *k, *v, *g, *beta, *initial_state, *cu_seqlens, *A_log, *dt_bias, *has_initial_state, *state_indices;
  int64_t checkpoint_every = 0;
  uint32_t flags = 0;
};

std::vector<Sequence> read_sequences(const Problem& problem, const CommonArgs& args);

// Log decay and write strength of `rows` tokens as the recurrence takes them, activated (not floored). T is float or double.
template <class T>
class Gates {
 public:
  Gates(const Problem& problem, const CommonArgs& args);
  void load(int64_t batch, int64_t token, int64_t v_head, int rows, T* g, T* beta) const;
  // Turns gradients of the activated values into those of what the caller gave; adds to the sums of A_log's and dt_bias's
  // gradients.
  void backward(int64_t batch, int64_t token, int64_t v_head, int rows, T* dg, T* dbeta, double* dA_log, double* ddt_bias) const;

 private:
  const CommonArgs args_;
  std::vector<T> rate_, bias_;  // -exp(A_log), dt_bias by value head
  bool raw_, sigmoid_, twice_;
};

template <class T>
struct Call {
  Call(const Problem& p, const CommonArgs& a, int threads_wanted)
      : problem(p),
        args(a),
        kernels(kernels_of<T>(chosen_level())),
        gates(p, a),
        sequences(read_sequences(p, a)),
        threads(threads_wanted) {
    group = static_cast<int>(p.group());
    k_dim = static_cast<int>(p.k_dim), v_dim = static_cast<int>(p.v_dim);
    panel = kernels.panel;
    v_panels = (v_dim + panel - 1) / panel;
    k_panels = (k_dim + panel - 1) / panel;
    ld = (k_dim + 15) / 16 * 16;
    state_size = static_cast<int64_t>(v_panels) * panel * k_dim;
    normalize = (a.flags & QLA_FLAG_QK_L2NORM) != 0;
    v_first = (a.flags & QLA_FLAG_STATE_V_FIRST) != 0;
    scale = static_cast<T>(p.scale);
  }

  const Problem problem;
  const CommonArgs args;
  const KernelTable<T>& kernels;
  const Gates<T> gates;
  const std::vector<Sequence> sequences;
  const int threads;
  int group, k_dim, v_dim, panel, v_panels, k_panels, ld;
  int64_t state_size;  // elements of one state in panels
  bool normalize, v_first;
  T scale;

  void load_state(const Rows& rows, int p_begin, int p_end, T* panels) const {
    kernels.load_state(rows, v_first, k_dim, v_dim, p_begin, p_end, panels);
  }
  void store_state(const T* panels, int p_begin, int p_end, const Rows& rows) const {
    kernels.store_state(panels, v_first, k_dim, v_dim, p_begin, p_end, rows);
  }
  // The state a sequence starts from.
  void initial_state(const Sequence& seq, int64_t v_head, T* panels) const {
    if (seq.has_initial)
      load_state(state_rows(*args.initial_state, seq.state_slot, v_head), 0, v_panels, panels);
    else
      std::memset(panels, 0, sizeof(T) * state_size);
  }
  Stream stream(const StreamPlan& plan, int64_t index) const {
    if (!plan.cut.empty()) return plan.cut[index];
    Stream s;
    s.sequence = index / problem.num_k_heads, s.k_head = index % problem.num_k_heads;
    s.end = sequences[s.sequence].state_slot < 0 ? 0 : sequences[s.sequence].tokens();  // a skipped sequence has nothing to do
    return s;
  }
  void zero_state(const Rows& rows) const {
    if (rows.data) zero_rows(rows, v_first ? v_dim : k_dim, v_first ? k_dim : v_dim);
  }
};

// Zeroes what no sequence owns (padding) and what skipped ones own: t is [B, T, heads, ..].
void zero_outside(const std::vector<Sequence>& sequences, const Problem& problem, const qla_tensor& t);

// Tiles of one chunk of one q/k head and its value heads, carved from one block.
template <class T>
struct TileSet {
  ChunkTiles<T> chunk{};
  std::vector<HeadTiles<T>> heads;
  T *q_rnorm = nullptr, *k_rnorm = nullptr;  // backward's

  // What the walk of value head h reads, from k_t on.
  int64_t bytes(int h) const { return reinterpret_cast<const char*>(heads[h].gamma) - reinterpret_cast<const char*>(chunk.k_t); }
  // With a null carver base it only counts.
  void carve(Carver<T>& carver, const Call<T>& call, int c, int heads_count, bool backward) {
    chunk.c = c;
    chunk.k_dim = call.k_dim;
    chunk.ld = call.ld;
    chunk.kq = backward ? carver.take(2LL * c * call.ld) : nullptr;
    heads.resize(heads_count);
    const int64_t transposed = static_cast<int64_t>(c) * call.k_dim;
    chunk.k_t = carver.take(2 * transposed);
    chunk.q_t = chunk.k_t;  // moved behind K's panels once the number of rows is known
    if (backward) {
      chunk.products = carver.take(2LL * c * c);
      q_rnorm = carver.take(c), k_rnorm = carver.take(c);
    }
    for (HeadTiles<T>& head : heads) {
      head.abar = carver.take(static_cast<int64_t>(c) * c);
      head.pg = carver.take(static_cast<int64_t>(c) * c);
      head.decay = backward ? carver.take(static_cast<int64_t>(c) * c) : nullptr;
      head.gamma = carver.take(c), head.tail = carver.take(c), head.beta = carver.take(c);
    }
  }
};

}  // namespace qla::cpu
