// Rules on one tensor (shape, dtype, strides, alignment) and on all of a call's tensors together (overlap).
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "core/problem.hpp"
#include "qla/qla.h"

namespace qla::api {

struct Axis {
  const char* name;
  int64_t extent;  // kAny: free
};
inline constexpr int64_t kAny = -1;

enum class Types {
  Compute,      // float64, float32, bfloat16, float16: q
  LikeQ,        // q's dtype
  Float,        // any float dtype
  Accumulator,  // float32; float64 for float64 tensors
  Index,        // int32, int64
  Bool,
  Bytes
};
enum class Layout {
  Strided,         // any strides
  LastContiguous,  // last stride 1
  Contiguous
};
enum class Use { Input, Output, InPlace };

// What a call is about to do with the arguments decides what they must hold.
enum class Stage {
  Query,  // check, workspace, plan: shapes, dtypes, strides, combinations; data pointers are tested for NULL and nothing else
  Run     // alignment, overlap and the values that the host can read, too
};

class TensorRules {
 public:
  explicit TensorRules(Stage stage) : stage_(stage) {}

  void set_q_dtype(int32_t dtype) { q_dtype_ = dtype; }

  // Absent is fine for `optional`; what is there must follow the rule. Returns whether it is there.
  bool optional(const char* name, const qla_tensor& t, std::initializer_list<Axis> axes, Types types, Layout layout, Use use);
  void required(const char* name, const qla_tensor& t, std::initializer_list<Axis> axes, Types types, Layout layout, Use use);

  // No output shares memory with any other tensor of the call, nor with the workspace.
  void check_overlap(const void* workspace, size_t workspace_bytes) const;

 private:
  struct Seen {
    const char* name;
    const qla_tensor* tensor;
    Use use;
    int64_t begin, end;  // the addresses it spans

    bool apart(int64_t other_begin, int64_t other_end) const { return end <= other_begin || other_end <= begin; }
  };
  static constexpr size_t kMostTensors = 40;

  void check(const char* name, const qla_tensor& t, std::initializer_list<Axis> axes, Types types, Layout layout, Use use);

  Stage stage_;
  int32_t q_dtype_ = QLA_FLOAT32;
  std::array<Seen, kMostTensors> seen_{};
  size_t count_ = 0;
};

}  // namespace qla::api
