// Known failures of the fuzzer: a seed that fails for a reason that is understood and has an issue. It is reported as skipped,
// never silently.
#pragma once

#include <cstdint>
#include <vector>

namespace qla::test {

struct KnownFailure {
  const char* test;  // "Differential", "Packed", ..
  uint64_t seed;
  const char* issue;  // what is wrong, and where it is tracked
};

inline const std::vector<KnownFailure>& ledger() {
  static const std::vector<KnownFailure> failures = {};  // none known
  return failures;
}

}  // namespace qla::test
