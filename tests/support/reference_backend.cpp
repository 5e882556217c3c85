// The reference (or the emulator) behind the argument structs: tests the tests before, and beside, the real backends.
#include <algorithm>
#include <cmath>

#include "reference/chunk_form.hpp"
#include "reference/recurrence.hpp"
#include "support/backend.hpp"
#include "support/dtype.hpp"

namespace qla::test {
namespace {

using Numbers = std::vector<double>;

Numbers read(const qla_tensor& t) {
  if (!t.data) return {};
  int64_t count = 1;
  for (int axis = 0; axis < t.ndim; ++axis) count *= t.shape[axis];
  Numbers values(count);
  each_row(t.ndim, t.shape, t.stride, [&](int64_t first, int64_t offset, int64_t columns, int64_t stride) {
    load(static_cast<const char*>(t.data) + offset * size_of(t.dtype), t.dtype, &values[first], columns, stride);
  });
  return values;
}
void write(const qla_tensor& t, const Numbers& values) {
  if (!t.data) return;
  each_row(t.ndim, t.shape, t.stride, [&](int64_t first, int64_t offset, int64_t columns, int64_t stride) {
    store(static_cast<char*>(t.data) + offset * size_of(t.dtype), t.dtype, &values[first], columns, stride);
  });
}
qla_tensor states_k_first(qla_tensor t, uint32_t flags) {
  if (t.data && (flags & QLA_FLAG_STATE_V_FIRST)) std::swap(t.shape[2], t.shape[3]), std::swap(t.stride[2], t.stride[3]);
  return t;
}

template <class Args>
reference::Inputs inputs_of(const Args& args) {
  reference::Inputs in;
  const int64_t B = args.q.shape[0], T = args.q.shape[1];
  in.tokens = B * T;
  in.k_heads = args.q.shape[2], in.k_dim = args.q.shape[3], in.v_heads = args.v.shape[2], in.v_dim = args.v.shape[3];
  in.scale = std::isnan(args.scale) ? 1.0 / std::sqrt(static_cast<double>(in.k_dim)) : args.scale;
  in.qk_l2norm = args.flags & QLA_FLAG_QK_L2NORM, in.raw_gate = args.flags & QLA_FLAG_RAW_GATE;
  in.beta_sigmoid = args.flags & QLA_FLAG_BETA_SIGMOID, in.neg_eigval = args.flags & QLA_FLAG_NEG_EIGVAL;
  in.q = read(args.q), in.k = read(args.k), in.v = read(args.v), in.g = read(args.g), in.beta = read(args.beta);
  in.initial_state = read(states_k_first(args.initial_state, args.flags));
  in.A_log = read(args.A_log), in.dt_bias = read(args.dt_bias);
  for (const double x : read(args.has_initial_state)) in.has_initial.push_back(x != 0);
  const Numbers cu = read(args.cu_seqlens);
  for (size_t n = 0; n + 1 < cu.size(); ++n)
    in.bos.push_back(static_cast<int64_t>(cu[n])), in.eos.push_back(static_cast<int64_t>(cu[n + 1]));
  if (!args.cu_seqlens.data)
    for (int64_t b = 0; b < B; ++b) in.bos.push_back(b * T), in.eos.push_back((b + 1) * T);
  return in;
}

class Reference : public Backend {
 public:
  explicit Reference(bool emulate) : emulate_(emulate) {}
  std::string name() const override { return emulate_ ? "emulator" : "reference"; }
  int32_t id() const override { return QLA_BACKEND_CPU; }
  std::string last_error() const override { return ""; }
  qla_status forward_workspace(const qla_gdn_forward_args&, size_t* bytes) const override { return *bytes = 0, QLA_OK; }
  qla_status forward_saved(const qla_gdn_forward_args&, size_t* bytes) const override { return *bytes = 0, QLA_OK; }
  qla_status backward_workspace(const qla_gdn_backward_args&, size_t* least, size_t* best) const override {
    return *least = *best = 0, QLA_OK;
  }

  qla_status forward(const qla_gdn_forward_args& args) const override {
    const reference::Inputs in = inputs_of(args);
    const reference::Outputs out =
        emulate_ ? reference::chunk_forward(in, operand(args.q.dtype)) : reference::recurrence_forward(in);
    write(args.o, out.o);
    write(states_k_first(args.final_state, args.flags), out.final_state);
    if (args.g_cumsum.data || args.h.data) {
      const reference::ChunkParts parts = reference::chunk_parts(in);
      write(args.g_cumsum, parts.g_cumsum), write(args.a_inv, parts.a_inv), write(args.a_gated, parts.a_gated);
      write(states_k_first(args.h, args.flags), parts.h);
    }
    return QLA_OK;
  }
  qla_status backward(const qla_gdn_backward_args& args) const override {
    reference::Inputs in = inputs_of(args);
    in.d_o = read(args.d_o), in.d_final_state = read(states_k_first(args.d_final_state, args.flags));
    const reference::Gradients grads =
        emulate_ ? reference::chunk_backward(in, operand(args.q.dtype)) : reference::recurrence_backward(in);
    write(args.dq, grads.dq), write(args.dk, grads.dk), write(args.dv, grads.dv), write(args.dg, grads.dg),
        write(args.dbeta, grads.dbeta);
    write(states_k_first(args.d_initial_state, args.flags), grads.dh0);
    write(args.dA_log, grads.dA_log), write(args.ddt_bias, grads.ddt_bias);
    return QLA_OK;
  }

 private:
  static reference::Operand operand(int32_t dtype) {
    if (dtype == QLA_BFLOAT16) return reference::Operand::kBf16;
    return dtype == QLA_FLOAT16 ? reference::Operand::kFp16 : reference::Operand::kExact;
  }
  bool emulate_;
};

}  // namespace

const Backend* reference_backend(bool emulate) {
  static const Reference reference(false), emulator(true);
  return emulate ? &emulator : &reference;
}

}  // namespace qla::test
