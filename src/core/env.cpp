#include "core/env.hpp"

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "core/status.hpp"

namespace qla {
namespace {

std::string text_of(const char* value) { return value ? value : ""; }

bool has_topic(std::string_view list, std::string_view topic) {
  while (!list.empty()) {
    const size_t comma = list.find(',');
    const std::string_view item = list.substr(0, comma);
    if (item == topic || item == "all") return true;
    list = comma == std::string_view::npos ? std::string_view() : list.substr(comma + 1);
  }
  return false;
}

}  // namespace

Environment parse_environment(const char* (*get)(const char*)) {
  Environment env;
  env.log = text_of(get("QLA_LOG"));
  const std::string validate = text_of(get("QLA_VALIDATE"));
  env.validate = !validate.empty() && validate != "0";
  env.costs = text_of(get("QLA_COSTS"));
  env.force_backend = text_of(get("QLA_FORCE_BACKEND"));
  env.forward_mib = text_of(get("QLA_FORWARD_MIB"));
  return env;
}

const Environment& environment() {
  static const Environment env = parse_environment([](const char* name) -> const char* { return std::getenv(name); });
  return env;
}

size_t forward_workspace_limit() {
  const std::string& text = environment().forward_mib;
  if (text.empty()) return size_t{512} << 20;
  QLA_CHECK(text.size() <= 9 && text.find_first_not_of("0123456789") == std::string::npos,
            "QLA_FORWARD_MIB: expected a whole number of MiB, got '", text, "'; unset it for 512");
  return static_cast<size_t>(std::stoull(text)) << 20;
}

bool log_enabled(const char* topic) { return !environment().log.empty() && has_topic(environment().log, topic); }

void log_line(const char* topic, const std::string& text) {
  if (!log_enabled(topic)) return;
  const std::string line = "qla " + std::string(topic) + ": " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace qla
