#include "core/last_error.hpp"

#include <cstring>

namespace qla {
namespace {
constexpr size_t kCapacity = 2048;
thread_local char message_buffer[kCapacity] = "";
}  // namespace

void set_last_error(const char* message) noexcept {
  const size_t length = strnlen(message, kCapacity - 1);
  std::memmove(message_buffer, message, length);
  message_buffer[length] = '\0';
}

const char* last_error() noexcept { return message_buffer; }

}  // namespace qla
