// Threads of our own in place of OpenMP (docs/decisions/0010): created at the first call that wants them, reused, left behind by
// a fork.
#pragma once

#include <functional>

namespace qla::cpu {

int default_threads();               // OMP_NUM_THREADS, else what this process may run on
int resolve_threads(int requested);  // 0: the default

// Runs body(0) here and body(1) .. body(threads - 1) on workers and waits for all. body must not throw. While another thread's
// call has the workers, everything runs here: bodies must not wait for one another.
void run_on_threads(int threads, const std::function<void(int)>& body);

}  // namespace qla::cpu
