// Environment variables, read once per process.
//   QLA_LOG            comma-separated topics written to standard error: plan, config, all. Unset: nothing is ever written.
//   QLA_VALIDATE=1     as QLA_FLAG_VALIDATE in every call
//   QLA_FORCE_BACKEND  cpu or cuda: calls that choose the backend themselves (QLA_BACKEND_AUTO) are refused if they would take
//   another. cpu-scalar, cpu-v2, cpu-v3, cpu-v4: also the CPU's instruction level
#pragma once

#include <cstdint>
#include <string>

namespace qla {

struct Environment {
  std::string log;
  bool validate = false;
  std::string force_backend;  // "", "cpu", "cuda", or what was there: the first call refuses it
};

Environment parse_environment(const char* (*get)(const char*));
const Environment& environment();

bool log_enabled(const char* topic);
void log_line(const char* topic,
              const std::string& text);  // one write, prefixed "qla plan: "; does nothing where the topic is off

}  // namespace qla
