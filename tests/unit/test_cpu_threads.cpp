// Calls from several threads, and in a child after a fork.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "cpu/pool.hpp"
#include "cpu_problem.hpp"

namespace qla::cpu_test {
namespace {

Options sizeable() {
  Options s;
  s.tokens = 600, s.k_heads = 2, s.v_heads = 4, s.k_dim = s.v_dim = 64, s.threads = 4;
  return s;
}

TEST(CpuThreads, PoolRunsEveryIndexOnce) {
  for (const int threads : {1, 2, 5, 3}) {
    std::vector<std::atomic<int>> hits(static_cast<size_t>(threads));
    cpu::run_on_threads(threads, [&](int i) { ++hits[static_cast<size_t>(i)]; });
    for (const auto& n : hits) EXPECT_EQ(n.load(), 1);
  }
}

TEST(CpuThreads, ChildComputesAfterFork) {
  CpuRun run(sizeable());
  run.forward();
  run.backward();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    CpuRun again(sizeable());
    again.forward();
    again.backward();
    const bool same = again.o.bytes == run.o.bytes && again.dk.bytes == run.dk.bytes;
    _exit(same ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  CpuRun after(sizeable());
  after.forward();
  EXPECT_EQ(after.o.bytes, run.o.bytes);
}

TEST(CpuThreads, CallsFromSeveralThreads) {
  CpuRun expected(sizeable());
  expected.forward();
  expected.backward();
  std::vector<std::unique_ptr<CpuRun>> runs;
  for (int i = 0; i < 6; ++i) runs.push_back(std::make_unique<CpuRun>(sizeable()));
  std::vector<std::thread> callers;
  for (auto& run : runs)
    callers.emplace_back([&] {
      for (int n = 0; n < 3; ++n) run->forward(), run->backward();
    });
  for (std::thread& t : callers) t.join();
  for (auto& run : runs) {
    EXPECT_EQ(run->o.bytes, expected.o.bytes);
    EXPECT_EQ(run->dq.bytes, expected.dq.bytes);
  }
}

}  // namespace
}  // namespace qla::cpu_test
