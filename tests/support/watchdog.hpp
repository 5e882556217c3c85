// A call that never comes back must not hang the suite: after the limit the process ends and says which test it was.
#pragma once

#include <string>

namespace qla::test {

class Watchdog {
 public:
  Watchdog(unsigned seconds, const std::string& what);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
};

}  // namespace qla::test
