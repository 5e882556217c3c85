// What a lane of backward keeps, and how large it is.
#pragma once

#include <vector>

#include "cpu/call.hpp"

namespace qla::cpu {

inline constexpr int64_t kLeastWindow = 16;                  // inner chunks, a multiple of 2
inline constexpr int64_t kQuietBlock = 2, kSharedBlock = 8;  // inner chunks; kSharedBlock <= kLeastWindow / 2
// dS+ of a chunk and the one before it; of the block that is walked, the one whose gradients are made, and the chunk before them
inline constexpr int64_t kAloneSlots = 2, kSharedSlots = 2 * kSharedBlock + 2;
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
  bool sharing = false;  // several threads may work on a stream: kSharedSlots in place of kAloneSlots
  bool keep_delta = false;
};

template <class T>
int64_t delta_chunk_size(const Call<T>& call) {
  return static_cast<int64_t>(kInnerChunk) * call.v_panels * call.panel;
}

template <class T>
int64_t delta_size(const Call<T>& call, const LaneShape& shape) {
  return shape.most_windows * shape.window * call.group * delta_chunk_size(call);
}

// With a null base it only counts.
template <class T>
size_t lay_out(const Call<T>& call, const LaneShape& shape, std::vector<WindowChunk<T>>& window, T* base) {
  Carver<T> carver(base);
  const size_t slots = shape.sharing ? kSharedSlots : kAloneSlots;
  for (size_t i = 0; i < window.size(); ++i) {
    WindowChunk<T>& chunk = window[i];
    chunk.tiles.carve(carver, call, kInnerChunk, call.group, true);
    chunk.delta.clear(), chunk.do_dr.clear(), chunk.state.clear(), chunk.d_state.clear();
    for (int h = 0; h < call.group; ++h) {
      chunk.delta.push_back(shape.keep_delta ? nullptr : carver.take(delta_chunk_size(call)));
      chunk.state.push_back(carver.take(call.state_size));
      chunk.d_state.push_back(i < slots ? carver.take(call.state_size) : nullptr);
      chunk.do_dr.push_back(i == 0 || (shape.sharing && i < slots) ? carver.take(2 * delta_chunk_size(call)) : nullptr);
    }
    chunk.dA_log.assign(call.group, 0), chunk.ddt_bias.assign(call.group, 0);
  }
  return static_cast<size_t>(carver.used());
}

template <class T>
int64_t lane_bytes(const Call<T>& call, const LaneShape& shape) {
  std::vector<WindowChunk<T>> window(static_cast<size_t>(shape.window));
  const int64_t states = (shape.most_windows + 2) * call.group * call.state_size;
  return (static_cast<int64_t>(lay_out<T>(call, shape, window, nullptr)) + states) * static_cast<int64_t>(sizeof(T));
}

}  // namespace qla::cpu
