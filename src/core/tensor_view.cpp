#include "core/tensor_view.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>

namespace qla {
namespace {

std::string list_string(const int64_t* values, int32_t ndim) {
  std::string text = "[";
  const int32_t count = std::clamp(ndim, 0, 4);
  for (int32_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + (ndim > 4 ? ", ..]" : "]");
}

// sum of coefficient * x over the terms, x in [least, most], coefficients positive and descending.
struct Term {
  int64_t coefficient, least, most;
};

struct Sum {
  std::array<Term, 9> terms;
  int count = 0;

  void add(int64_t coefficient, int64_t least, int64_t most) {
    for (int i = 0; i < count; ++i) {
      if (terms[i].coefficient != coefficient) continue;
      terms[i].least += least, terms[i].most += most;  // same stride in both views: one difference
      return;
    }
    int at = count++;
    for (; at > 0 && terms[at - 1].coefficient < coefficient; --at) terms[at] = terms[at - 1];
    terms[at] = {coefficient, least, most};
  }
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && a < 0); }

// Is there a choice of every x with the sum equal to target? Largest coefficient first: the smaller ones leave it few values.
bool reachable(const Sum& sum, int level, int64_t target, int* budget) {
  if (--*budget < 0) return false;
  const Term& term = sum.terms[level];
  if (level + 1 == sum.count)
    return target % term.coefficient == 0 && target / term.coefficient >= term.least && target / term.coefficient <= term.most;
  int64_t rest_least = 0, rest_most = 0;
  for (int i = level + 1; i < sum.count; ++i) {
    rest_least += sum.terms[i].coefficient * sum.terms[i].least;
    rest_most += sum.terms[i].coefficient * sum.terms[i].most;
  }
  const int64_t first = std::max(term.least, -floor_div(rest_most - target, term.coefficient));  // ceil((target - rest_most) / c)
  const int64_t last = std::min(term.most, floor_div(target - rest_least, term.coefficient));
  for (int64_t x = first; x <= last && *budget >= 0; ++x)
    if (reachable(sum, level + 1, target - x * term.coefficient, budget)) return true;
  return false;
}

}  // namespace

std::string shape_string(const qla_tensor& t) { return list_string(t.shape, t.ndim); }
std::string stride_string(const qla_tensor& t) { return list_string(t.stride, t.ndim); }

bool byte_span(const qla_tensor& t, ByteSpan* span) {
  *span = {};
  if (numel(t) == 0) return true;
  const int64_t size = dtype_size(t.dtype);
  for (int32_t i = 0; i < t.ndim; ++i) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(t.shape[i] - 1, t.stride[i], &reach) || __builtin_mul_overflow(reach, size, &reach)) return false;
    int64_t& edge = reach < 0 ? span->begin : span->end;
    if (__builtin_add_overflow(edge, reach, &edge)) return false;
  }
  return !__builtin_add_overflow(span->end, size, &span->end);
}

bool self_overlapping(const qla_tensor& t) {
  // Axes from the smallest stride up; a stride of an axis taken is never looked at again.
  bool taken[4] = {};
  int64_t covered = 1;
  for (;;) {
    int32_t smallest = -1;
    for (int32_t i = 0; i < t.ndim; ++i)
      if (!taken[i] && t.shape[i] > 1 && (smallest < 0 || std::llabs(t.stride[i]) < std::llabs(t.stride[smallest]))) smallest = i;
    if (smallest < 0) return false;
    if (std::llabs(t.stride[smallest]) < covered) return true;
    covered += std::llabs(t.stride[smallest]) * (t.shape[smallest] - 1);
    taken[smallest] = true;
  }
}

bool overlapping(const qla_tensor& a, const qla_tensor& b) {
  ByteSpan span_a, span_b;
  if (!byte_span(a, &span_a) || !byte_span(b, &span_b)) return true;
  const int64_t base_a = static_cast<int64_t>(reinterpret_cast<uintptr_t>(a.data)) + span_a.begin;
  const int64_t base_b = static_cast<int64_t>(reinterpret_cast<uintptr_t>(b.data)) + span_b.begin;
  const int64_t length_a = span_a.end - span_a.begin, length_b = span_b.end - span_b.begin;
  if (length_a == 0 || length_b == 0) return false;
  if (base_a + length_a <= base_b || base_b + length_b <= base_a) return false;

  // Address of a byte of a = address of a byte of b, with every stride made positive by starting at the lowest address.
  Sum sum;
  for (int32_t i = 0; i < a.ndim; ++i)
    if (a.shape[i] > 1 && a.stride[i] != 0) sum.add(std::llabs(a.stride[i]) * dtype_size(a.dtype), 0, a.shape[i] - 1);
  for (int32_t i = 0; i < b.ndim; ++i)
    if (b.shape[i] > 1 && b.stride[i] != 0) sum.add(std::llabs(b.stride[i]) * dtype_size(b.dtype), 1 - b.shape[i], 0);
  sum.add(1, 1 - dtype_size(b.dtype), dtype_size(a.dtype) - 1);
  int budget = 4096;
  return reachable(sum, 0, base_b - base_a, &budget);
}

}  // namespace qla
