// Every level computes the same function: the whole operator with each level forced in a child process, which has made no choice
// yet.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "cpu/dispatch.hpp"
#include "cpu_problem.hpp"

namespace qla::cpu_test {
namespace {

TEST(CpuLevels, EachAgainstTheRecurrence) {
  for (const cpu::Level& level : cpu::levels()) {
    const pid_t child = fork();
    if (child == 0) {
      cpu::force_level(level.force_name);
      double worst = 0;
      for (const int32_t dtype : {QLA_FLOAT32, QLA_FLOAT64}) {
        Options s;
        s.dtype = s.gate_dtype = s.beta_dtype = s.state_dtype = dtype;
        s.tokens = 150, s.k_heads = 1, s.v_heads = 3, s.k_dim = 70, s.v_dim = 45;
        CpuRun run(s);
        run.forward();
        run.backward();
        for (const NamedError& e : errors_of(run)) worst = std::max(worst, e.error / (dtype == QLA_FLOAT32 ? 1e-5 : 1e-10));
      }
      _exit(std::string(cpu::chosen_level().force_name) != level.force_name ? 2 : worst <= 1 ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << level.name;
  }
}

}  // namespace
}  // namespace qla::cpu_test
