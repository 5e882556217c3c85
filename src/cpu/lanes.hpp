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
  virtual int64_t
  advance() = 0;  // after all items of a phase: prepares the next one and returns its number of items; 0: stream done
  virtual void run(int64_t begin, int64_t end, int thread) = 0;
};

// Streams 0 .. num_streams - 1 are started in order. At most lanes.size() run at a time. Rethrows what a lane throws.
void run_lanes(int threads, int64_t num_streams, const std::vector<std::unique_ptr<Lane>>& lanes);

}  // namespace qla::cpu
