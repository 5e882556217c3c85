#include "cpu/pool.hpp"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

namespace qla::cpu {
namespace {

inline constexpr int kMostThreads = 256;

struct Pool {
  std::mutex in_use;  // one call at a time has the workers

  std::mutex mutex;
  std::condition_variable work, done;
  const std::function<void(int)>* body = nullptr;
  int64_t round = 0;
  int workers = 0, wanted = 0, running = 0;

  void worker(int index) {
    int64_t seen = 0;
    for (;;) {
      const std::function<void(int)>* mine = nullptr;
      {
        std::unique_lock lock(mutex);
        work.wait(lock, [&] { return round != seen; });
        seen = round;
        if (index < wanted) mine = body;
      }
      if (!mine) continue;
      (*mine)(index);
      std::lock_guard lock(mutex);
      if (--running == 0) done.notify_one();
    }
  }

  // As many as the system gives, at most `threads` - 1.
  int grow(int threads) {
    while (workers + 1 < threads) {
      try {
        std::thread(&Pool::worker, this, workers + 1).detach();
      } catch (const std::system_error&) {
        break;
      }
      ++workers;
    }
    return workers + 1 < threads ? workers + 1 : threads;
  }
};

// Never destroyed: workers may still wait on it while the process ends. A forked child has none of them, so it starts over with a
// new pool; the old one, whose locks may be held by threads that no longer exist, stays as it is.
std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  static const bool registered = [] {
    pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr, std::memory_order_relaxed); });
    return true;
  }();
  (void)registered;
  Pool* found = current_pool.load(std::memory_order_acquire);
  if (!found) {
    auto* fresh = new Pool;
    if (current_pool.compare_exchange_strong(found, fresh, std::memory_order_acq_rel))
      found = fresh;
    else
      delete fresh;
  }
  return *found;
}

}  // namespace

int default_threads() {
  if (const char* value = std::getenv("OMP_NUM_THREADS")) {
    const int n = std::atoi(value);  // "4" or "4,2": the outermost level is ours
    if (n > 0) return n < kMostThreads ? n : kMostThreads;
  }
  const unsigned n = std::thread::hardware_concurrency();
  return n == 0 ? 1 : static_cast<int>(n) < kMostThreads ? static_cast<int>(n) : kMostThreads;
}

int resolve_threads(int requested) {
  if (requested <= 0) return default_threads();
  return requested < kMostThreads ? requested : kMostThreads;
}

void run_on_threads(int threads, const std::function<void(int)>& body) {
  if (threads > 1) {
    Pool& p = pool();
    std::unique_lock in_use(p.in_use, std::try_to_lock);
    if (in_use) {
      {
        std::lock_guard lock(p.mutex);
        p.wanted = p.grow(threads);
        p.running = p.wanted - 1;
        p.body = &body;
        ++p.round;
      }
      p.work.notify_all();
      body(0);
      std::unique_lock lock(p.mutex);
      p.done.wait(lock, [&] { return p.running == 0; });
      return;
    }
  }
  body(0);
}

}  // namespace qla::cpu
