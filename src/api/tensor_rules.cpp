#include "api/tensor_rules.hpp"

#include <algorithm>
#include <string>

#include "core/status.hpp"
#include "core/tensor_view.hpp"

namespace qla::api {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 48;  // keeps every product of sizes inside int64
constexpr int64_t kMostBytes = int64_t{1} << 56;     // .. and every address

bool type_fits(int32_t dtype, Types types, int32_t q_dtype) {
  switch (types) {
    case Types::Compute:
    case Types::Float:
      return dtype_is_float(dtype);
    case Types::LikeQ:
      return dtype == q_dtype;
    case Types::Accumulator:
      return dtype == (q_dtype == QLA_FLOAT64 ? QLA_FLOAT64 : QLA_FLOAT32);
    case Types::Index:
      return dtype == QLA_INT32 || dtype == QLA_INT64;
    case Types::Bool:
      return dtype == QLA_BOOL8;
    case Types::Bytes:
      return dtype == QLA_UINT8;
  }
  return false;
}

std::string type_text(Types types, int32_t q_dtype) {
  switch (types) {
    case Types::Compute:
    case Types::Float:
      return "float64, float32, bfloat16 or float16";
    case Types::LikeQ:
      return concat("q's ", dtype_name(q_dtype));
    case Types::Accumulator:
      return q_dtype == QLA_FLOAT64 ? "float64 (as q is)" : "float32";
    case Types::Index:
      return "int32 or int64";
    case Types::Bool:
      return "bool8";
    case Types::Bytes:
      return "uint8";
  }
  return "";
}

bool without_elements(const qla_tensor& t) {  // any ndim, any sizes
  for (int32_t i = 0; i < t.ndim && i < 4; ++i)
    if (t.shape[i] == 0) return true;
  return false;
}

std::string axes_text(std::initializer_list<Axis> axes) {
  std::string text = "[";
  for (const Axis& axis : axes) {
    if (text.size() > 1) text += ", ";
    text += axis.extent == kAny ? std::string(axis.name) : concat(axis.name, "=", axis.extent);
  }
  return text + "]";
}

}  // namespace

bool TensorRules::optional(const char* name, const qla_tensor& t, std::initializer_list<Axis> axes, Types types, Layout layout,
                           Use use) {
  if (t.data == nullptr) {
    // Forgotten pointers would silently switch a feature off, so only a tensor that holds nothing counts as absent.
    QLA_CHECK(t.ndim == 0 || without_elements(t), name, ": expected data, got NULL with shape ", shape_string(t),
              "; set the pointer, or zero the struct for an absent tensor");
    return false;
  }
  check(name, t, axes, types, layout, use);
  return true;
}

void TensorRules::required(const char* name, const qla_tensor& t, std::initializer_list<Axis> axes, Types types, Layout layout,
                           Use use) {
  QLA_CHECK(t.data != nullptr || t.ndim != 0, name, ": expected a tensor ", axes_text(axes),
            ", got none (data = NULL); it is required");
  check(name, t, axes, types, layout, use);
}

void TensorRules::check(const char* name, const qla_tensor& t, std::initializer_list<Axis> axes, Types types, Layout layout,
                        Use use) {
  QLA_CHECK(dtype_known(t.dtype) && type_fits(t.dtype, types, q_dtype_), name, ": expected dtype ", type_text(types, q_dtype_),
            ", got ", dtype_name(t.dtype), dtype_known(t.dtype) ? "" : concat(" (", t.dtype, ")"), "; convert it");
  QLA_CHECK(t.ndim == static_cast<int32_t>(axes.size()), name, ": expected ", axes.size(), " dimensions ", axes_text(axes),
            ", got ", t.ndim, t.ndim > 0 && t.ndim <= 4 ? concat(" ", shape_string(t)) : std::string(), "; reshape it");
  int64_t count = 1;
  const Axis* axis = axes.begin();
  for (int32_t i = 0; i < t.ndim; ++i, ++axis) {
    QLA_CHECK(t.shape[i] >= 0 && (axis->extent == kAny || t.shape[i] == axis->extent), name, ": expected shape ", axes_text(axes),
              ", got ", shape_string(t), " (axis ", axis->name,
              "); pass a view whose sizes agree with q [B, T, H, K] and v [B, T, HV, V]");
    QLA_CHECK(!__builtin_mul_overflow(count, t.shape[i], &count) && (count <= kMostElements), name,
              ": expected fewer than 2^48 elements, got shape ", shape_string(t), "; split the call");
  }
  if (count == 0) return;  // nothing is read or written: pointer and strides may be anything
  QLA_CHECK(t.data != nullptr, name, ": expected data, got NULL with shape ", shape_string(t), "; set the pointer");
  ByteSpan span;
  QLA_CHECK(byte_span(t, &span) && span.begin >= -kMostBytes && span.end <= kMostBytes, name,
            ": expected offsets below 2^56 bytes, got strides ", stride_string(t), " for shape ", shape_string(t),
            "; strides are in elements");
  QLA_CHECK(layout != Layout::LastContiguous || last_contiguous(t), name,
            ": expected the last axis contiguous (stride 1), got strides ", stride_string(t), "; pass a contiguous copy");
  QLA_CHECK(layout != Layout::Contiguous || contiguous(t), name, ": expected a contiguous tensor, got shape ", shape_string(t),
            " with strides ", stride_string(t), "; pass a contiguous copy");
  QLA_CHECK(use == Use::Input || !self_overlapping(t), name, ": expected an output whose elements lie apart, got strides ",
            stride_string(t), " for shape ", shape_string(t), "; pass a tensor that is not expanded");
  if (stage_ == Stage::Query) return;
  QLA_CHECK(aligned(t.data, static_cast<uintptr_t>(dtype_size(t.dtype))), name, ": expected an address that is a multiple of ",
            dtype_size(t.dtype), " (", dtype_name(t.dtype), "), got ", t.data, "; pass an aligned copy");
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data));
  seen_.at(count_++) = {name, &t, use, address + span.begin, address + span.end};
}

void TensorRules::check_overlap(const void* workspace, size_t workspace_bytes) const {
  qla_tensor scratch{};
  scratch.data = const_cast<void*>(workspace);
  scratch.dtype = QLA_UINT8;
  scratch.ndim = 1;
  scratch.shape[0] = static_cast<int64_t>(std::min<size_t>(workspace_bytes, kMostElements));
  scratch.stride[0] = 1;
  const auto scratch_begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(workspace)),
             scratch_end = scratch_begin + scratch.shape[0];
  for (size_t i = 0; i < count_; ++i) {
    const Seen& one = seen_[i];
    QLA_CHECK(workspace == nullptr || one.apart(scratch_begin, scratch_end) || !overlapping(*one.tensor, scratch), one.name,
              ": expected memory apart from the workspace, got a tensor inside it", "; give the workspace memory of its own");
    if (one.use == Use::Input) continue;
    for (size_t j = 0; j < count_; ++j) {
      const Seen& other = seen_[j];
      if (j == i || (other.use != Use::Input && j < i)) continue;
      QLA_CHECK(one.apart(other.begin, other.end) || !overlapping(*one.tensor, *other.tensor), one.name,
                ": expected memory of its own, got memory that ", other.name,
                " uses, too; outputs may not overlap any other tensor of the call");
    }
  }
}

}  // namespace qla::api
