// The message of this thread's last failing call. A plain thread-local buffer: no allocation, so it can hold "out of memory",
// too.
#pragma once

namespace qla {

void set_last_error(const char* message) noexcept;  // cut at the buffer's end
const char* last_error() noexcept;                  // "" before the first failure

}  // namespace qla
