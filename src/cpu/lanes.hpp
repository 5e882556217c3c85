// How work is spread over threads. A stream is a chain of phases (one sequence's segment of one q/k head); a phase is a number of
// independent items. Streams run side by side in lanes, and where there are fewer streams than threads the phases are split
// between them. Every item computes the same bits wherever it runs and however its phase is split, so results do not depend on
// the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace qla::cpu {

class Lane {
 public:
  virtual ~Lane() = default;
  virtual void start(int64_t stream) = 0;
  // After all pieces of a phase: prepares the next one and returns its number of pieces, the longest first; 0: the stream is
  // done. sharers: threads that this stream has; with one they run in order, on one thread. It may decide how work is cut and in
  // what order it is done, never what is computed.
  virtual int64_t advance(int sharers) = 0;
  virtual void run(int64_t piece, int thread) = 0;
};

// Items [begin(i), begin(i + 1)) are piece i.
struct Pieces {
  int64_t items = 0, count = 0;

  static Pieces of(int64_t items, int64_t most) { return {items, items < most ? items : most}; }
  int64_t begin(int64_t piece) const { return items * piece / count; }
};

// Streams 0 .. num_streams - 1 are started in order. At most lanes.size() run at a time. Rethrows what a lane throws.
void run_lanes(int threads, int64_t num_streams, const std::vector<std::unique_ptr<Lane>>& lanes);

}  // namespace qla::cpu
