#include "support/sample.hpp"

#include <limits>

#include "reference/chunk_form.hpp"
#include "reference/recurrence.hpp"

namespace qla::test {

void Sample::set_sequences() {
  in.bos.clear(), in.eos.clear();
  in.tokens = batch * length;
  if (cu.empty())
    for (int64_t b = 0; b < batch; ++b) in.bos.push_back(b * length), in.eos.push_back((b + 1) * length);
  for (size_t n = 0; n + 1 < cu.size(); ++n) in.bos.push_back(cu[n]), in.eos.push_back(cu[n + 1]);
}

void Sample::round_values() {
  const int64_t valid = valid_tokens();
  const auto each = [&](Numbers& x, int32_t type, int64_t per_token) {
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = per_token && static_cast<int64_t>(i) >= valid * per_token ? std::numeric_limits<double>::quiet_NaN()
                                                                       : round_to(x[i], type);
  };
  each(in.q, dtype, in.k_heads * in.k_dim);
  each(in.k, dtype, in.k_heads * in.k_dim);
  each(in.v, dtype, in.v_heads * in.v_dim);
  each(in.d_o, dtype, in.v_heads * in.v_dim);
  each(in.g, g_dtype, in.v_heads);
  each(in.beta, beta_dtype, in.v_heads);
  each(in.initial_state, state_dtype, 0);
  each(in.d_final_state, grad_state_dtype(), 0);
  const int32_t gate_dtype = dtype == QLA_FLOAT64 ? QLA_FLOAT64 : QLA_FLOAT32;
  each(in.A_log, gate_dtype, 0);
  each(in.dt_bias, gate_dtype, 0);
}

const std::vector<Field>& fields() {
  static const std::vector<Field> list = {
      {"o", &Values::o, false, false},          {"final_state", &Values::final_state, true, false},
      {"dq", &Values::dq, false, true},         {"dk", &Values::dk, false, true},
      {"dv", &Values::dv, false, true},         {"dg", &Values::dg, false, true},
      {"dbeta", &Values::dbeta, false, true},   {"dh0", &Values::dh0, true, true},
      {"dA_log", &Values::dA_log, false, true}, {"ddt_bias", &Values::ddt_bias, false, true}};
  return list;
}

int32_t field_dtype(const Sample& sample, const Field& field) {
  const std::string name = field.name;
  if (field.is_state || name == "dA_log" || name == "ddt_bias") return sample.grad_state_dtype();
  if (name == "dg") return sample.g_dtype;
  if (name == "dbeta") return sample.beta_dtype;
  return sample.dtype;
}

int64_t field_heads(const Sample& sample, const Field& field) {
  const std::string name = field.name;
  if (field.is_state || name == "dA_log" || name == "ddt_bias") return 0;
  return name == "dq" || name == "dk" ? sample.in.k_heads : sample.in.v_heads;
}

namespace {
Values collect(reference::Outputs out, reference::Gradients grads) {
  return {std::move(out.o),        std::move(out.final_state), std::move(grads.dq),    std::move(grads.dk),
          std::move(grads.dv),     std::move(grads.dg),        std::move(grads.dbeta), std::move(grads.dh0),
          std::move(grads.dA_log), std::move(grads.ddt_bias)};
}

Numbers slice(const Numbers& x, int64_t from, int64_t to, int64_t width) {
  if (x.empty()) return {};
  return {x.begin() + from * width, x.begin() + to * width};
}
}  // namespace

Values truth_of(const Sample& sample, bool backward) {
  return collect(reference::recurrence_forward(sample.in),
                 backward ? reference::recurrence_backward(sample.in) : reference::Gradients{});
}

Values emulation_of(const Sample& sample, bool backward, reference::InverseOrder order) {
  const auto operand = sample.dtype == QLA_FLOAT16 ? reference::Operand::kFp16 : reference::Operand::kBf16;
  Values values = collect(reference::chunk_forward(sample.in, operand, 64, order),
                          backward ? reference::chunk_backward(sample.in, operand, 64, order) : reference::Gradients{});
  for (const Field& field : fields())
    for (double& x : values.*field.member) x = round_to(x, field_dtype(sample, field));
  return values;
}

std::vector<Values> emulations_of(const Sample& sample, bool backward, bool on_device) {
  if (!is_16_bit(sample.dtype)) return {};
  std::vector<Values> all{emulation_of(sample, backward)};
  if (on_device) all.push_back(emulation_of(sample, backward, reference::InverseOrder::kRows));
  return all;
}

Sample tokens_of(const Sample& sample, int64_t from, int64_t to) {
  Sample part = sample;
  const reference::Inputs& in = sample.in;
  part.batch = 1, part.length = to - from, part.cu.clear();
  part.in.q = slice(in.q, from, to, in.k_heads * in.k_dim);
  part.in.k = slice(in.k, from, to, in.k_heads * in.k_dim);
  part.in.v = slice(in.v, from, to, in.v_heads * in.v_dim);
  part.in.d_o = slice(in.d_o, from, to, in.v_heads * in.v_dim);
  part.in.g = slice(in.g, from, to, in.v_heads);
  part.in.beta = slice(in.beta, from, to, in.v_heads);
  part.set_sequences();
  return part;
}

Sample sequence_of(const Sample& sample, int64_t n) {
  Sample part = tokens_of(sample, sample.in.bos[n], sample.in.eos[n]);
  const int64_t states = sample.in.v_heads * sample.in.state_size();
  part.in.initial_state = slice(sample.in.initial_state, n, n + 1, states);
  part.in.d_final_state = slice(sample.in.d_final_state, n, n + 1, states);
  if (!sample.in.has_initial.empty()) part.in.has_initial = {sample.in.has_initial[n]};
  return part;
}

}  // namespace qla::test
