// Environment variables, read once per process.
//   QLA_LOG            comma-separated topics written to standard error: plan, config, all. Unset: nothing is ever written.
//   QLA_VALIDATE=1     as QLA_FLAG_VALIDATE in every call
//   QLA_COSTS          file of the cost model's constants, as `qla calibrate` writes it
//   QLA_FORCE_BACKEND  cpu or cuda: calls that choose the backend themselves (QLA_BACKEND_AUTO) are refused if they would take
//   another. cpu-scalar, cpu-v2, cpu-v3, cpu-v4: also the CPU's instruction level
//   QLA_FORWARD_MIB    what qla_gdn_forward_workspace stays under as far as it can, in MiB. Unset: 512
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace qla {

struct Environment {
  std::string log;
  bool validate = false;
  std::string costs;          // path of a file of the planner's constants
  std::string force_backend;  // "", "cpu", "cuda", or what was there: the first call refuses it
  std::string forward_mib;    // digits, or what was there: forward_workspace_limit() refuses it
};

// QLA_FORWARD_MIB in bytes, or 512 MiB. Throws qla::Error.
size_t forward_workspace_limit();

Environment parse_environment(const char* (*get)(const char*));
const Environment& environment();

bool log_enabled(const char* topic);
void log_line(const char* topic,
              const std::string& text);  // one write, prefixed "qla plan: "; does nothing where the topic is off

}  // namespace qla
