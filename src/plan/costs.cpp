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
  float DeviceCosts::*single;
  int of_intra;  // index, where single is null
};
constexpr Constant kConstants[] = {
    {"fused", &DeviceCosts::fused, 0},
    {"main_full", &DeviceCosts::main_full, 0},
    {"main_half", &DeviceCosts::main_half, 0},
    {"main_full_quiet", &DeviceCosts::main_full_quiet, 0},
    {"main_half_quiet", &DeviceCosts::main_half_quiet, 0},
    {"state_half", &DeviceCosts::state_half, 0},
    {"reverse_half", &DeviceCosts::reverse_half, 0},
    {"intra_4", nullptr, 0},
    {"intra_2", nullptr, 1},
    {"intra_1", nullptr, 2},
    {"passes", &DeviceCosts::passes, 0},
    {"grads", &DeviceCosts::grads, 0},
    {"merge", &DeviceCosts::merge, 0},
    {"item", &DeviceCosts::item, 0},
    {"launches", &DeviceCosts::launches, 0},
    {"intra_launch", &DeviceCosts::intra_launch, 0},
    {"packed", &DeviceCosts::packed, 0},
    {"cut", &DeviceCosts::cut, 0},
};

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
    (found->single ? costs.*found->single : costs.intra[found->of_intra]) = value;
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
