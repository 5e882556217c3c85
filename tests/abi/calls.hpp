// A small valid call of each kind, owned: the misuse tests bend one thing at a time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <list>
#include <vector>

#include "qla/qla.h"

namespace qla::test {

class Buffers {
 public:
  // Contiguous, 256-byte aligned, filled with `value` (floats) or zero.
  qla_tensor make(int32_t dtype, std::vector<int64_t> shape, double value = 0.0) {
    qla_tensor t{};
    t.dtype = dtype;
    t.ndim = static_cast<int32_t>(shape.size());
    int64_t count = 1;
    for (int32_t i = t.ndim - 1; i >= 0; --i) {
      t.shape[i] = shape[static_cast<size_t>(i)];
      t.stride[i] = count;
      count *= t.shape[i];
    }
    blocks_.emplace_back(static_cast<size_t>(count) * 8 + 512, std::byte{0});
    std::byte* const base = blocks_.back().data();
    std::byte* const aligned = base + (256 - reinterpret_cast<uintptr_t>(base) % 256);
    t.data = aligned;
    for (int64_t i = 0; i < count; ++i) {
      if (dtype == QLA_FLOAT64) std::memcpy(aligned + i * 8, &value, 8);
      const float single = static_cast<float>(value);
      if (dtype == QLA_FLOAT32) std::memcpy(aligned + i * 4, &single, 4);
    }
    return t;
  }

  // Everything written so far: to see that a refused call touched nothing.
  std::vector<std::vector<std::byte>> snapshot() const { return {blocks_.begin(), blocks_.end()}; }

 private:
  std::list<std::vector<std::byte>> blocks_;
};

inline qla_tensor boundaries(Buffers& buffers, const std::vector<int64_t>& values) {
  qla_tensor t = buffers.make(QLA_INT64, {static_cast<int64_t>(values.size())});
  std::memcpy(t.data, values.data(), values.size() * 8);
  return t;
}

inline constexpr int64_t kB = 2, kT = 70, kH = 2, kHV = 4, kK = 8, kV = 12;

struct ForwardCall {
  Buffers buffers;
  qla_gdn_forward_args args{};

  explicit ForwardCall(int64_t b = kB) {
    args.struct_size = sizeof(args);
    args.device = -1;
    args.num_threads = 1;
    args.scale = NAN;
    args.cp_warmup_threshold = NAN;
    args.q = buffers.make(QLA_FLOAT32, {b, kT, kH, kK}, 0.25);
    args.k = buffers.make(QLA_FLOAT32, {b, kT, kH, kK}, 0.25);
    args.v = buffers.make(QLA_FLOAT32, {b, kT, kHV, kV}, 1.0);
    args.g = buffers.make(QLA_FLOAT32, {b, kT, kHV}, -0.5);
    args.beta = buffers.make(QLA_FLOAT32, {b, kT, kHV}, 0.5);
    args.o = buffers.make(QLA_FLOAT32, {b, kT, kHV, kV}, 7.0);
    args.initial_state = buffers.make(QLA_FLOAT32, {b, kHV, kK, kV}, 0.125);
    args.final_state = buffers.make(QLA_FLOAT32, {b, kHV, kK, kV}, 7.0);
  }

  void give_workspace() {
    size_t bytes = 0;
    if (qla_gdn_forward_workspace(&args, &bytes) != QLA_OK || bytes == 0) return;
    args.workspace = buffers.make(QLA_UINT8, {static_cast<int64_t>(bytes)}).data;
    args.workspace_bytes = bytes;
  }
};

struct BackwardCall {
  Buffers buffers;
  qla_gdn_backward_args args{};

  explicit BackwardCall(int64_t b = kB) {
    args.struct_size = sizeof(args);
    args.device = -1;
    args.num_threads = 1;
    args.scale = NAN;
    args.cp_warmup_threshold = NAN;
    args.q = buffers.make(QLA_FLOAT32, {b, kT, kH, kK}, 0.25);
    args.k = buffers.make(QLA_FLOAT32, {b, kT, kH, kK}, 0.25);
    args.v = buffers.make(QLA_FLOAT32, {b, kT, kHV, kV}, 1.0);
    args.g = buffers.make(QLA_FLOAT32, {b, kT, kHV}, -0.5);
    args.beta = buffers.make(QLA_FLOAT32, {b, kT, kHV}, 0.5);
    args.initial_state = buffers.make(QLA_FLOAT32, {b, kHV, kK, kV}, 0.125);
    args.d_o = buffers.make(QLA_FLOAT32, {b, kT, kHV, kV}, 1.0);
    args.d_final_state = buffers.make(QLA_FLOAT32, {b, kHV, kK, kV}, 1.0);
    args.dq = buffers.make(QLA_FLOAT32, {b, kT, kH, kK}, 7.0);
    args.dk = buffers.make(QLA_FLOAT32, {b, kT, kH, kK}, 7.0);
    args.dv = buffers.make(QLA_FLOAT32, {b, kT, kHV, kV}, 7.0);
    args.dg = buffers.make(QLA_FLOAT32, {b, kT, kHV}, 7.0);
    args.dbeta = buffers.make(QLA_FLOAT32, {b, kT, kHV}, 7.0);
    args.d_initial_state = buffers.make(QLA_FLOAT32, {b, kHV, kK, kV}, 7.0);
  }

  void give_workspace() {
    size_t least = 0, best = 0;
    if (qla_gdn_backward_workspace(&args, &least, &best) != QLA_OK || best == 0) return;
    args.workspace = buffers.make(QLA_UINT8, {static_cast<int64_t>(best)}).data;
    args.workspace_bytes = best;
  }
};

}  // namespace qla::test
