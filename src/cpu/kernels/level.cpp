// Compiled once for every instruction level (cmake/cpu.cmake) with QLA_LEVEL = scalar, v2, v3, v4 or native: Highway picks the
// vectors from the compiler's flags. Everything lives in a namespace of its own and no inline function of the standard library is
// used, so that the linker can never put code made for one level where another is called.
#include <math.h>
#include <stdint.h>

#include <hwy/highway.h>
// after highway.h
#include <hwy/contrib/math/math-inl.h>

#include "cpu/kernels/levels.hpp"
#include "cpu/kernels/table.hpp"
#include "qla/qla.h"

namespace qla::cpu::QLA_LEVEL {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// (F0): below it e^g is 0 in the compute type
template <class T>
inline constexpr double kGateFloor = sizeof(T) == 4 ? -88.0 : -700.0;

#include "cpu/kernels/gemm.inl"
// the rest is built on gemm.inl
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/intra.inl"
#include "cpu/kernels/walk.inl"
// and on convert.inl
#include "cpu/kernels/grads.inl"

template <class T>
constexpr KernelTable<T> make_table() {
  KernelTable<T> t{};
  t.panel = kPanel<T>;
  t.load_rows = load_rows<T>;
  t.store_rows = store_rows<T>;
  t.transpose_to_panels = transpose_to_panels<T>;
  t.transpose_from_panels = transpose_from_panels<T>;
  t.normalize_rows = normalize_rows<T>;
  t.load_state = load_state<T>;
  t.store_state = store_state<T>;
  t.products = products<T>;
  t.head_tiles = head_tiles<T>;
  t.walk = walk<T>;
  t.reverse = reverse<T>;
  t.grads = grads<T>;
  t.grads_scratch = grads_scratch<T>;
  t.merge = merge<T>;
  t.fma_rate = fma_rate<T>;
  return t;
}
constexpr KernelTable<float> kFloatTable = make_table<float>();
constexpr KernelTable<double> kDoubleTable = make_table<double>();
}  // namespace

const KernelTable<float>* float_table() { return &kFloatTable; }
const KernelTable<double>* double_table() { return &kDoubleTable; }
const char* target_name() { return hwy::TargetName(HWY_TARGET); }
}  // namespace qla::cpu::QLA_LEVEL
