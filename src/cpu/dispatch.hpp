// The instruction level in use, chosen once: the best the machine has, or QLA_FORCE_BACKEND=cpu-scalar|cpu-v2|cpu-v3|cpu-v4.
#pragma once

#include <vector>

#include "cpu/kernels/table.hpp"

namespace qla::cpu {

const std::vector<Level>& levels();  // those this machine can run, least first
const Level& chosen_level();         // throws Error(NOT_SUPPORTED) where QLA_FORCE_BACKEND names one that it cannot run

void force_level(const char* force_name);  // for tests: as the variable would, from now on

template <class T>
const KernelTable<T>& kernels_of(const Level& level);
template <>
inline const KernelTable<float>& kernels_of<float>(const Level& level) {
  return *level.f32;
}
template <>
inline const KernelTable<double>& kernels_of<double>(const Level& level) {
  return *level.f64;
}

}  // namespace qla::cpu
