#include "support/watchdog.hpp"

#include <unistd.h>

#include <csignal>
#include <cstring>

namespace qla::test {
namespace {
char message[256];

extern "C" void on_alarm(int) {
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, message, std::strlen(message));
  _exit(99);
}
}  // namespace

Watchdog::Watchdog(unsigned seconds, const std::string& what) {
  const std::string text = "watchdog: " + what + " did not return within " + std::to_string(seconds) + " s\n";
  std::strncpy(message, text.c_str(), sizeof message - 1);
  std::signal(SIGALRM, on_alarm);
#ifdef __SANITIZE_ADDRESS__
  seconds *= 5;
#endif
  alarm(seconds);
}
Watchdog::~Watchdog() { alarm(0); }

}  // namespace qla::test
