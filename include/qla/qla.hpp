// C++20 sugar over the C ABI (qla.h), header-only: views from spans, defaults filled in, workspaces owned, errors thrown.
//
//   std::vector<float> q(B * T * H * K), ..;
//   auto args = qla::forward_args();
//   args.q = qla::view(q, {B, T, H, K});
//   ..
//   qla::HostWorkspace workspace;
//   qla::forward(args, workspace);           // throws qla::CallError
//
// For CUDA set args.device, args.stream and the views' device pointers (qla::view_at), and pass device memory of
// qla::forward_workspace(args) bytes in args.workspace; then qla::forward(args).
#ifndef QLA_QLA_HPP
#define QLA_QLA_HPP

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "qla/qla.h"

namespace qla {

// A refused or failed call: what() is qla_last_error().
class CallError : public std::runtime_error {
 public:
  CallError(qla_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  qla_status status() const noexcept { return status_; }

 private:
  qla_status status_;
};

inline void check(qla_status status) {
  if (status != QLA_OK) throw CallError(status, std::string(qla_status_name(status)) + ": " + qla_last_error());
}

// ---- tensors ------------------------------------------------------------------------------------------------------

template <typename T>
constexpr int32_t dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, double>)
    return QLA_FLOAT64;
  else if constexpr (std::is_same_v<U, float>)
    return QLA_FLOAT32;
  else if constexpr (std::is_same_v<U, int32_t>)
    return QLA_INT32;
  else if constexpr (std::is_same_v<U, int64_t>)
    return QLA_INT64;
  else if constexpr (std::is_same_v<U, bool>)
    return QLA_BOOL8;
  else if constexpr (std::is_same_v<U, uint8_t> || std::is_same_v<U, std::byte>)
    return QLA_UINT8;
  else
    static_assert(sizeof(T) == 0, "16-bit floats have no standard type: use qla::view_at(pointer, QLA_BFLOAT16, shape)");
}

// Any memory, any dtype; contiguous unless strides (in elements) are given.
inline qla_tensor view_at(const void* data, int32_t dtype, std::initializer_list<int64_t> shape,
                          std::initializer_list<int64_t> strides = {}) {
  if (shape.size() > 4 || (strides.size() != 0 && strides.size() != shape.size()))
    throw CallError(QLA_INVALID_ARGUMENT, "view: expected 1 to 4 sizes and as many strides (or none), got " +
                                              std::to_string(shape.size()) + " and " + std::to_string(strides.size()) +
                                              "; pass one stride for each axis");
  qla_tensor t{};
  t.data = const_cast<void*>(data);  // inputs are never written
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  int64_t contiguous = 1;
  for (int32_t i = t.ndim - 1; i >= 0; --i) {
    t.shape[i] = shape.begin()[i];
    t.stride[i] = strides.size() ? strides.begin()[i] : contiguous;
    contiguous *= t.shape[i];
  }
  return t;
}

// A whole span, contiguous: its size must be the product of the shape.
template <typename T>
qla_tensor view(std::span<T> data, std::initializer_list<int64_t> shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  if (count < 0 || static_cast<size_t>(count) != data.size())
    throw CallError(QLA_INVALID_ARGUMENT, "view: expected a span of " + std::to_string(count) + " elements for this shape, got " +
                                              std::to_string(data.size()) +
                                              "; pass the whole buffer or use view_at with strides");
  return view_at(data.data(), dtype_of<T>(), shape);
}

template <typename T>
qla_tensor view(std::vector<T>& data, std::initializer_list<int64_t> shape) {
  return view(std::span<T>(data), shape);
}
template <typename T>
qla_tensor view(const std::vector<T>& data, std::initializer_list<int64_t> shape) {
  return view(std::span<const T>(data), shape);
}

// ---- arguments ----------------------------------------------------------------------------------------------------

// Zeroed, with the size set and every default chosen: host memory, scale K^-0.5, automatic context parallelism.
inline qla_gdn_forward_args forward_args() {
  qla_gdn_forward_args args{};
  args.struct_size = sizeof(args);
  args.device = -1;
  args.scale = std::numeric_limits<double>::quiet_NaN();
  args.cp_warmup_threshold = std::numeric_limits<double>::quiet_NaN();
  return args;
}

inline qla_gdn_backward_args backward_args() {
  qla_gdn_backward_args args{};
  args.struct_size = sizeof(args);
  args.device = -1;
  args.scale = std::numeric_limits<double>::quiet_NaN();
  args.cp_warmup_threshold = std::numeric_limits<double>::quiet_NaN();
  return args;
}

// Backward of a forward call: the same inputs and options; set d_o, d_final_state and the gradients wanted.
inline qla_gdn_backward_args backward_args(const qla_gdn_forward_args& forward) {
  qla_gdn_backward_args args = backward_args();
  args.backend = forward.backend, args.device = forward.device, args.stream = forward.stream;
  args.num_threads = forward.num_threads, args.flags = forward.flags, args.scale = forward.scale;
  args.q = forward.q, args.k = forward.k, args.v = forward.v, args.g = forward.g, args.beta = forward.beta;
  args.initial_state = forward.initial_state, args.cu_seqlens = forward.cu_seqlens;
  args.A_log = forward.A_log, args.dt_bias = forward.dt_bias, args.has_initial_state = forward.has_initial_state;
  args.a_inv = forward.a_inv, args.g_cumsum = forward.g_cumsum, args.q_rnorm = forward.q_rnorm, args.k_rnorm = forward.k_rnorm;
  args.saved = forward.saved;
  args.cp_mode = forward.cp_mode, args.cp_segment_chunks = forward.cp_segment_chunks;
  args.cp_uncut_chunks = forward.cp_uncut_chunks, args.cp_warmup_threshold = forward.cp_warmup_threshold;
  return args;
}

// nullopt: the call would run. Else why not. Never throws for what the call would refuse.
inline std::optional<std::string> why_not(const qla_gdn_forward_args& args) {
  if (qla_gdn_forward_check(&args) == QLA_OK) return std::nullopt;
  return std::string(qla_last_error());
}
inline std::optional<std::string> why_not(const qla_gdn_backward_args& args) {
  if (qla_gdn_backward_check(&args) == QLA_OK) return std::nullopt;
  return std::string(qla_last_error());
}

// ---- running ------------------------------------------------------------------------------------------------------

inline size_t forward_workspace(const qla_gdn_forward_args& args) {
  size_t bytes = 0;
  check(qla_gdn_forward_workspace(&args, &bytes));
  return bytes;
}

struct WorkspaceRange {
  size_t least, best;
};
inline WorkspaceRange forward_workspace_range(const qla_gdn_forward_args& args) {
  WorkspaceRange range{};
  check(qla_gdn_forward_workspace_range(&args, &range.least, &range.best));
  return range;
}
inline WorkspaceRange backward_workspace(const qla_gdn_backward_args& args) {
  WorkspaceRange range{};
  check(qla_gdn_backward_workspace(&args, &range.least, &range.best));
  return range;
}

// Host memory for workspaces, 256-byte aligned, kept between calls and grown when one needs more. One for each thread that calls.
class HostWorkspace {
 public:
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{256})));
      size_ = bytes;
    }
    return memory_.get();
  }
  size_t size() const noexcept { return size_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept { ::operator delete (memory, std::align_val_t{256}); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t size_ = 0;
};

// With args.workspace set by the caller (any backend).
inline void forward(const qla_gdn_forward_args& args) { check(qla_gdn_forward(&args)); }
inline void backward(const qla_gdn_backward_args& args) { check(qla_gdn_backward(&args)); }

// On the CPU: the workspace comes from `workspace`.
inline void forward(qla_gdn_forward_args args, HostWorkspace& workspace) {
  args.workspace_bytes = forward_workspace(args);
  args.workspace = workspace.reserve(args.workspace_bytes);
  forward(args);
}
inline void backward(qla_gdn_backward_args args, HostWorkspace& workspace) {
  args.workspace_bytes = backward_workspace(args).best;
  args.workspace = workspace.reserve(args.workspace_bytes);
  backward(args);
}

// ---- plans and devices --------------------------------------------------------------------------------------------

// The plan with its segments. Not copied: the C struct points into the vector.
class Plan {
 public:
  explicit Plan(const qla_gdn_forward_args& args, std::span<const int64_t> lens = {},
                std::span<const float> chunk_log_decay = {}) {
    plan_.struct_size = sizeof(plan_);
    const float* const decay = chunk_log_decay.empty() ? nullptr : chunk_log_decay.data();
    const int64_t* const lengths = lens.empty() ? nullptr : lens.data();
    const int64_t count = static_cast<int64_t>(lens.size());
    check(qla_gdn_plan(&args, lengths, count, decay, &plan_));
    segments_.resize(static_cast<size_t>(plan_.num_items));
    plan_.segments = segments_.data();
    plan_.segments_capacity = plan_.num_items;
    check(qla_gdn_plan(&args, lengths, count, decay, &plan_));
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const qla_plan& operator*() const noexcept { return plan_; }
  const qla_plan* operator->() const noexcept { return &plan_; }
  std::span<const qla_segment> segments() const noexcept { return segments_; }

  std::string text() const {
    size_t length = 0;
    check(qla_plan_print(&plan_, nullptr, 0, &length));
    std::string out(length + 1, '\0');
    check(qla_plan_print(&plan_, out.data(), out.size(), &length));
    out.resize(length);
    return out;
  }

 private:
  qla_plan plan_{};
  std::vector<qla_segment> segments_;
};

// Calls with these arguments are cut as the plan of them says from now on. A fixed length is one already.
inline void repeat(qla_gdn_forward_args& args, const Plan& plan) noexcept {
  if (args.cp_mode == QLA_CP_FIXED) return;
  if (args.cp_mode == QLA_CP_EXACT) args.cp_warmup_threshold = -std::numeric_limits<double>::infinity();
  args.cp_mode = QLA_CP_PLAN;
  args.cp_segment_chunks = plan->segment_chunks;
  args.cp_uncut_chunks = static_cast<int32_t>(plan->uncut_chunks);
}

inline std::vector<qla_device_info_t> devices() {
  int32_t count = 0;
  check(qla_device_count(&count));
  std::vector<qla_device_info_t> all(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    all[static_cast<size_t>(i)].struct_size = sizeof(qla_device_info_t);
    check(qla_device_info(i, &all[static_cast<size_t>(i)]));
  }
  return all;
}

}  // namespace qla

#endif  // QLA_QLA_HPP
