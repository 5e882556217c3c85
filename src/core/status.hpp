// One exception type inside, one status code outside: src/api is the only place that turns the one into the other.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "qla/qla.h"

namespace qla {

class Error : public std::runtime_error {
 public:
  Error(qla_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  qla_status status() const { return status_; }

 private:
  qla_status status_;
};

template <typename... Args>
std::string concat(Args&&... args) {
  std::ostringstream out;
  (out << ... << std::forward<Args>(args));
  return out.str();
}

}  // namespace qla

// QLA_CHECK(k.ndim == 4, "k: expected 4 dimensions [B,T,H,K], got ", k.ndim, "; pass ..."): argument, expected, got, remedy.
#define QLA_CHECK(condition, ...)                                                           \
  do {                                                                                      \
    if (!(condition)) throw ::qla::Error(QLA_INVALID_ARGUMENT, ::qla::concat(__VA_ARGS__)); \
  } while (0)

#define QLA_SUPPORTED(condition, ...)                                                    \
  do {                                                                                   \
    if (!(condition)) throw ::qla::Error(QLA_NOT_SUPPORTED, ::qla::concat(__VA_ARGS__)); \
  } while (0)
