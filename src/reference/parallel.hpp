// Independent jobs on a few threads. Each job writes only what is its own, so the result does not depend on the number of
// threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace qla::reference {

template <class Job>
void parallel_for(int64_t jobs, Job&& job) {
  const int64_t threads = std::min<int64_t>(jobs, std::max(1u, std::min(16u, std::thread::hardware_concurrency())));
  if (threads <= 1) {
    for (int64_t i = 0; i < jobs; ++i) job(i);
    return;
  }
  std::atomic<int64_t> next{0};
  std::vector<std::thread> pool;
  for (int64_t t = 0; t < threads; ++t)
    pool.emplace_back([&] {
      for (int64_t i = next++; i < jobs; i = next++) job(i);
    });
  for (std::thread& thread : pool) thread.join();
}

}  // namespace qla::reference
