#include "cpu/dispatch.hpp"

#include <cstdlib>
#include <string>

#include "core/status.hpp"
#include "cpu/kernels/levels.hpp"

namespace qla::cpu {

const std::vector<Level>& levels() {
  static const std::vector<Level> found = [] {
    std::vector<Level> list;
    list.push_back({"scalar", "cpu-scalar", scalar::float_table(), scalar::double_table()});
#if defined(__x86_64__)
    __builtin_cpu_init();
    const auto has = [](auto... names) { return (names && ...); };
    if (has(__builtin_cpu_supports("sse4.2"), __builtin_cpu_supports("ssse3"), __builtin_cpu_supports("popcnt"))) {
      list.push_back({"x86-64-v2", "cpu-v2", v2::float_table(), v2::double_table()});
      // F16C and LZCNT came with the same processors as the others, MOVBE with Haswell; the level's name stands for all of them
      if (has(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("fma"), __builtin_cpu_supports("bmi"),
              __builtin_cpu_supports("bmi2"))) {
        list.push_back({"x86-64-v3", "cpu-v3", v3::float_table(), v3::double_table()});
        if (has(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"), __builtin_cpu_supports("avx512cd"),
                __builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512vl")))
          list.push_back({"x86-64-v4", "cpu-v4", v4::float_table(), v4::double_table()});
      }
    }
#else
    list.push_back({"native", "cpu-native", native::float_table(), native::double_table()});
#endif
    return list;
  }();
  return found;
}

namespace {
std::string& forced_name() {
  static std::string name = [] {
    const char* value = std::getenv("QLA_FORCE_BACKEND");
    return std::string(value ? value : "");
  }();
  return name;
}
}  // namespace

void force_level(const char* force_name) { forced_name() = force_name; }

const Level& chosen_level() {
  const std::string& forced = forced_name();
  if (forced.rfind("cpu-", 0) != 0) return levels().back();
  std::string known;
  for (const Level& level : levels()) {
    if (forced == level.force_name) return level;
    known += std::string(known.empty() ? "" : ", ") + level.force_name;
  }
  throw Error(QLA_NOT_SUPPORTED,
              concat("QLA_FORCE_BACKEND: expected one of ", known, " on this machine, got ", forced, "; unset it or pick one"));
}

}  // namespace qla::cpu
