// One problem with its numbers: sizes, types, values already rounded to the tensors' types; and what every way of computing it
// returns.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "reference/chunk_form.hpp"
#include "reference/inputs.hpp"
#include "support/dtype.hpp"

namespace qla::test {

using Numbers = std::vector<double>;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  double normal() { return normal_(engine_); }
  double uniform(double low = 0, double high = 1) { return low + (high - low) * uniform_(engine_); }
  int64_t integer(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  Numbers normals(int64_t count, double size = 1) {
    Numbers x(count);
    for (double& value : x) value = size * normal();
    return x;
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
  std::uniform_real_distribution<double> uniform_;
};

struct Sample {
  int64_t batch = 1, length = 0;  // B, T
  std::vector<int64_t> cu;        // empty: every batch row is a sequence
  int32_t dtype = QLA_BFLOAT16, g_dtype = QLA_FLOAT32, beta_dtype = QLA_FLOAT32, state_dtype = QLA_FLOAT32;
  bool no_gate = false;       // g is absent, not merely empty
  bool default_scale = true;  // scale NaN in the call; in.scale holds its value
  reference::Inputs in;

  int64_t num_seqs() const { return in.num_seqs(); }
  int64_t tokens() const { return in.tokens; }
  int64_t valid_tokens() const { return cu.empty() ? tokens() : cu.back(); }
  int32_t grad_state_dtype() const { return dtype == QLA_FLOAT64 ? QLA_FLOAT64 : QLA_FLOAT32; }

  void set_sequences();  // in.bos, in.eos, in.tokens from batch, length, cu
  void round_values();   // to the types; NaN past the last sequence
};

struct Values {
  Numbers o, final_state, dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias;
};

struct Field {
  const char* name;
  Numbers Values::*member;
  bool is_state;  // [N, HV, K, V]; else the first axis is the token ([tokens, heads(, dim)])
  bool is_gradient;
};
const std::vector<Field>& fields();
int32_t field_dtype(const Sample& sample, const Field& field);  // of the output tensor
int64_t field_heads(const Sample& sample, const Field& field);  // 0: no token axis (states, dA_log)

Values truth_of(const Sample& sample, bool backward = true);  // the token recurrence, float64
// 16-bit operands where a 16-bit kernel has them; outputs rounded to their types
Values emulation_of(const Sample& sample, bool backward = true,
                    reference::InverseOrder order = reference::InverseOrder::kTwoLevels);

// .. by which a result is judged: of 16-bit tensors, on a device once for each order in which its kernels invert
std::vector<Values> emulations_of(const Sample& sample, bool backward, bool on_device);

// Sequence n alone, with its states and gradients.
Sample sequence_of(const Sample& sample, int64_t n);
// Tokens [from, to) of a single-sequence sample, states untouched.
Sample tokens_of(const Sample& sample, int64_t from, int64_t to);

}  // namespace qla::test
