// The levels' entry points, each compiled from level.cpp with its own instruction set.
#pragma once

#include "cpu/kernels/table.hpp"

#define QLA_DECLARE_LEVEL(level)             \
  namespace qla::cpu::level {                \
  const KernelTable<float>* float_table();   \
  const KernelTable<double>* double_table(); \
  const char* target_name(); /* Highway's */ \
  }
QLA_DECLARE_LEVEL(scalar)
QLA_DECLARE_LEVEL(native)
QLA_DECLARE_LEVEL(v2)
QLA_DECLARE_LEVEL(v3)
QLA_DECLARE_LEVEL(v4)
#undef QLA_DECLARE_LEVEL
