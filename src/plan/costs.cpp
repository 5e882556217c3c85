#include "plan/costs.hpp"

#include <cmath>
#include <fstream>
#include <sstream>

#include "core/env.hpp"
#include "core/status.hpp"

namespace qla::plan {
namespace {

struct Constant {
  const char* name;
  float& (*of)(DeviceCosts&);
};
#define QLA_CONSTANT(name, member)                          \
  Constant {                                                \
    name, [](DeviceCosts& c) -> float& { return c.member; } \
  }
const Constant kConstants[] = {
    QLA_CONSTANT("fused_4", fused[0]),
    QLA_CONSTANT("fused_2", fused[1]),
    QLA_CONSTANT("fused_1", fused[2]),
    QLA_CONSTANT("fused_cut", fused_cut),
    QLA_CONSTANT("fused_quiet", fused_quiet),
    QLA_CONSTANT("main_full", main_full),
    QLA_CONSTANT("main_half", main_half),
    QLA_CONSTANT("main_full_quiet", main_full_quiet),
    QLA_CONSTANT("main_half_quiet", main_half_quiet),
    QLA_CONSTANT("state_half", state_half),
    QLA_CONSTANT("reverse_half", reverse_half),
    QLA_CONSTANT("intra_4", intra[0]),
    QLA_CONSTANT("intra_2", intra[1]),
    QLA_CONSTANT("intra_1", intra[2]),
    QLA_CONSTANT("passes", passes),
    QLA_CONSTANT("grads", grads),
    QLA_CONSTANT("merge", merge),
    QLA_CONSTANT("item", item),
    QLA_CONSTANT("launches", launches),
    QLA_CONSTANT("intra_launch", intra_launch),
    QLA_CONSTANT("packed", packed),
    QLA_CONSTANT("cut", cut),
    QLA_CONSTANT("cut_item", cut_item),
    QLA_CONSTANT("cut_fused", cut_fused),
};
#undef QLA_CONSTANT

std::string names() {
  std::string all;
  for (const Constant& c : kConstants) all += std::string(all.empty() ? "" : ", ") + c.name;
  return all;
}

}  // namespace

DeviceCosts read_costs(std::istream& in, const std::string& where, DeviceCosts costs) {
  std::string line;
  for (int number = 1; std::getline(in, line); number++) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::string name, rest;
    float value = 0;
    if (!(words >> name)) continue;
    const Constant* found = nullptr;
    for (const Constant& c : kConstants)
      if (name == c.name) found = &c;
    QLA_CHECK(found, where, ":", number, ": expected one of ", names(), ", got '", name, "'; `qla calibrate` writes such a file");
    QLA_CHECK((words >> value) && !(words >> rest) && std::isfinite(value) && value >= 0, where, ":", number, ": expected '",
              name, "' and one number of microseconds, not negative, got '", line, "'");
    found->of(costs) = value;
  }
  costs.name = "calibrated";
  return costs;
}

DeviceCosts device_costs(int32_t num_sms, int32_t capability_major) {
  const std::string& path = environment().costs;
  const DeviceCosts shipped = costs_for(num_sms, capability_major);
  if (path.empty()) return shipped;
  // One file for all devices of the process; each keeps its own number of multiprocessors.
  static const DeviceCosts read = [&] {
    std::ifstream file(path);
    QLA_CHECK(file.good(), "QLA_COSTS: expected a readable file, got '", path, "'; write one with `qla calibrate`, or unset it");
    return read_costs(file, path, shipped);
  }();
  DeviceCosts costs = read;
  costs.num_sms = shipped.num_sms;
  return costs;
}

}  // namespace qla::plan
