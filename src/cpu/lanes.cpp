#include "cpu/lanes.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>

#include "cpu/flush.hpp"
#include "cpu/pool.hpp"

namespace qla::cpu {
namespace {

struct Job {
  int lane;
  int64_t piece;
  int home;  // the thread that had this piece of the lane's earlier phases: its caches hold what the piece needs
};

class Board {
 public:
  Board(int threads, int64_t num_streams, const std::vector<std::unique_ptr<Lane>>& lanes)
      : threads_(threads), num_streams_(num_streams), lanes_(lanes), remaining_(lanes.size(), 0) {
    for (int i = static_cast<int>(lanes.size()) - 1; i >= 0; --i) idle_.push_back(i);
    ready_.reserve(4 * lanes.size() + 4 * threads);
  }

  void work(int thread) {
    const FlushDenormals flush;
    std::unique_lock lock(mutex_);
    while (!error_) {
      if (!ready_.empty()) {
        run(take(thread), thread, lock);
      } else if (!idle_.empty() && next_stream_ < num_streams_) {
        const int lane = idle_.back();
        idle_.pop_back();
        const int64_t stream = next_stream_++;
        ++active_;
        guarded(lock, [&] { lanes_[lane]->start(stream); });
        step(lane, thread, lock);
      } else if (active_ == 0) {
        break;
      } else {
        wait(lock);
      }
    }
    post();
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  // Its own, else anybody's.
  Job take(int thread) {
    auto found = ready_.end() - 1;
    for (auto at = ready_.end(); at != ready_.begin();)
      if ((--at)->home == thread) {
        found = at;
        break;
      }
    const Job job = *found;
    ready_.erase(found);
    return job;
  }

  template <typename Body>
  void guarded(std::unique_lock<std::mutex>& lock, const Body& body) {
    lock.unlock();
    std::exception_ptr caught;
    try {
      body();
    } catch (...) {
      caught = std::current_exception();
    }
    lock.lock();
    if (caught && !error_) error_ = caught;
  }

  void run(const Job& job, int thread, std::unique_lock<std::mutex>& lock) {
    guarded(lock, [&] { lanes_[job.lane]->run(job.piece, thread); });
    if (--remaining_[job.lane] == 0) step(job.lane, thread, lock);
  }

  // The lane's next phases, for as long as this thread can run them whole.
  void step(int lane, int thread, std::unique_lock<std::mutex>& lock) {
    while (!error_) {
      const int64_t streams = active_ + std::min<int64_t>(num_streams_ - next_stream_, static_cast<int64_t>(idle_.size()));
      const int sharers = static_cast<int>((threads_ + streams - 1) / streams);
      int64_t pieces = 0;
      guarded(lock, [&] { pieces = lanes_[lane]->advance(sharers); });
      if (error_) return;
      if (pieces == 0) {
        --active_;
        idle_.push_back(lane);
        post();
        return;
      }
      if (sharers == 1) {
        guarded(lock, [&] {
          for (int64_t i = 0; i < pieces; ++i) lanes_[lane]->run(i, thread);
        });
        continue;
      }
      remaining_[lane] = pieces;
      for (int64_t i = pieces - 1; i >= 0; --i)
        ready_.push_back({lane, i, static_cast<int>((lane * sharers + i % sharers) % threads_)});
      post();
      return;
    }
  }

  void post() {
    epoch_.fetch_add(1, std::memory_order_release);
    if (sleeping_ > 0) wake_.notify_all();
  }

  // Phases are short: look for a while before going to sleep.
  void wait(std::unique_lock<std::mutex>& lock) {
    const uint32_t seen = epoch_.load(std::memory_order_relaxed);
    lock.unlock();
    bool moved = false;
    for (int i = 0; i < 2000 && !moved; ++i) {
      relax();
      moved = epoch_.load(std::memory_order_acquire) != seen;
    }
    lock.lock();
    ++sleeping_;
    wake_.wait(lock, [&] { return epoch_.load(std::memory_order_relaxed) != seen; });
    --sleeping_;
  }

  const int threads_;
  const int64_t num_streams_;
  const std::vector<std::unique_ptr<Lane>>& lanes_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint32_t> epoch_{0};
  std::vector<Job> ready_;
  std::vector<int> idle_;
  std::vector<int64_t> remaining_;  // pieces of each lane's phase
  int64_t next_stream_ = 0;
  int64_t active_ = 0;
  int sleeping_ = 0;
  std::exception_ptr error_;
};

}  // namespace

void run_lanes(int threads, int64_t num_streams, const std::vector<std::unique_ptr<Lane>>& lanes) {
  if (threads <= 1) {
    const FlushDenormals flush;
    Lane& lane = *lanes.front();
    for (int64_t stream = 0; stream < num_streams; ++stream) {
      lane.start(stream);
      while (const int64_t pieces = lane.advance(1))
        for (int64_t i = 0; i < pieces; ++i) lane.run(i, 0);
    }
    return;
  }
  Board board(threads, num_streams, lanes);
  run_on_threads(threads, [&](int thread) { board.work(thread); });
  board.rethrow();
}

}  // namespace qla::cpu
