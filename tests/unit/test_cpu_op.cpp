// The CPU backend against the float64 recurrence on small problems: every option once. tests/op has the full case table.
#include <gtest/gtest.h>

#include "cpu_problem.hpp"

namespace qla::cpu_test {
namespace {

std::vector<Options> setups() {
  std::vector<Options> all;
  const auto add = [&](const char* name, auto change) {
    Options s;
    s.name = name;
    change(s);
    all.push_back(s);
  };
  add("default", [](Options&) {});
  add("one token", [](Options& s) { s.tokens = 1; });
  add("64 tokens", [](Options& s) { s.tokens = 64; });
  add("head sizes 1 and 1", [](Options& s) { s.k_dim = s.v_dim = 1, s.tokens = 70; });
  add("head sizes 5 and 3", [](Options& s) { s.k_dim = 5, s.v_dim = 3; });
  add("head sizes 128 and 128", [](Options& s) { s.k_dim = s.v_dim = 128, s.tokens = 200; });
  add("head sizes 256 and 200", [](Options& s) { s.k_dim = 256, s.v_dim = 200; });
  add("group 3, batch 2", [](Options& s) { s.batch = 2, s.k_heads = 2, s.v_heads = 6; });
  add("windows", [](Options& s) { s.tokens = 1400, s.k_dim = s.v_dim = 8; });
  add("packed", [](Options& s) { s.cu = {0, 0, 33, 34, 98, 98}, s.tokens = 111; });
  add("float64", [](Options& s) { s.dtype = s.gate_dtype = s.beta_dtype = s.state_dtype = QLA_FLOAT64, s.tokens = 200; });
  add("float64 wide", [](Options& s) {
    s.dtype = s.gate_dtype = s.beta_dtype = s.state_dtype = QLA_FLOAT64, s.tokens = 97, s.k_dim = 130, s.v_dim = 70;
  });
  add("no gate", [](Options& s) { s.with_gate = false; });
  add("gate 0", [](Options& s) { s.gate = 0; });
  add("gate -50", [](Options& s) { s.gate_shift = -50; });
  add("gate -200", [](Options& s) { s.gate_shift = -200; });
  add("gate above 0", [](Options& s) { s.gate = 0.02, s.gate_shift = 0.03; });
  add("no h0", [](Options& s) { s.with_h0 = false; });
  add("no dht", [](Options& s) { s.with_dht = false; });
  add("v first", [](Options& s) { s.flags = QLA_FLAG_STATE_V_FIRST; });
  add("normalised", [](Options& s) { s.flags = QLA_FLAG_QK_L2NORM; });
  add("raw gate", [](Options& s) { s.flags = QLA_FLAG_RAW_GATE; });
  add("raw gate without bias", [](Options& s) { s.flags = QLA_FLAG_RAW_GATE, s.with_bias = false; });
  add("sigmoid", [](Options& s) { s.flags = QLA_FLAG_BETA_SIGMOID; });
  add("negative eigenvalues", [](Options& s) { s.flags = QLA_FLAG_BETA_SIGMOID | QLA_FLAG_NEG_EIGVAL; });
  add("everything", [](Options& s) {
    s.flags = QLA_FLAG_BETA_SIGMOID | QLA_FLAG_NEG_EIGVAL | QLA_FLAG_RAW_GATE | QLA_FLAG_QK_L2NORM | QLA_FLAG_STATE_V_FIRST;
    s.cu = {0, 70, 70, 199}, s.tokens = 200, s.v_heads = 4, s.k_heads = 2;
  });
  add("state float64", [](Options& s) { s.state_dtype = QLA_FLOAT64; });
  add("scale 0", [](Options& s) { s.scale = 0; });
  add("scale -2", [](Options& s) { s.scale = -2; });
  add("correlated keys", [](Options& s) { s.key_noise = 0.05, s.beta = 0.98, s.gate = 0.02, s.tokens = 300; });
  add("one key", [](Options& s) { s.key_noise = 0, s.beta = 1, s.gate = 0, s.tokens = 300; });
  add("bfloat16", [](Options& s) { s.dtype = QLA_BFLOAT16; });
  add("float16",
      [](Options& s) { s.dtype = s.gate_dtype = QLA_FLOAT16, s.beta_dtype = QLA_BFLOAT16, s.state_dtype = QLA_BFLOAT16; });
  return all;
}

TEST(CpuOp, RecurrenceAndAdjoint) {
  for (const Options& s : setups()) {
    CpuRun run(s);
    run.forward();
    run.backward();
    const bool rounded = s.dtype == QLA_BFLOAT16 || s.dtype == QLA_FLOAT16;
    const double limit = s.dtype == QLA_FLOAT64 ? 1e-10 : rounded ? 4e-3 : s.key_noise >= 0 ? 1e-4 : 1e-5;
    for (const NamedError& e : errors_of(run)) EXPECT_LE(e.error, limit) << s.name << ": " << e.name;
  }
}

// What flash_qla's low-level functions take: A of (F2), g, the state at each chunk's start; every other output as without them.
TEST(CpuOp, HandsOutChunkParts) {
  Options s;
  s.tokens = 200, s.cu = {0, 130, 200};
  CpuRun plain(s), parts(s);
  plain.forward();
  const Tensor a_inv(QLA_FLOAT32, {1, s.tokens, s.v_heads, 64}), a_gated = Tensor(QLA_FLOAT32, {1, s.tokens, s.v_heads, 64});
  const Tensor g(QLA_FLOAT32, {1, s.tokens, s.v_heads}), h(QLA_FLOAT32, {5, s.v_heads, s.k_dim, s.v_dim});
  qla_gdn_forward_args args = parts.forward_args();
  args.a_inv = a_inv.arg(), args.a_gated = a_gated.arg(), args.g_cumsum = g.arg(), args.h = h.arg();
  cpu::forward(args, parts.problem);
  EXPECT_EQ(plain.o.bytes, parts.o.bytes);
  for (const Tensor* t : {&a_inv, &a_gated, &g, &h})
    for (const double x : t->values()) ASSERT_FALSE(std::isnan(x));
  const int64_t state = s.v_heads * s.k_dim * s.v_dim;
  for (int64_t i = 0; i < state; ++i) {  // chunks 0 and 3 start the sequences
    EXPECT_EQ(h.get(i), plain.h0.get(i));
    EXPECT_EQ(h.get(3 * state + i), plain.h0.get(state + i));
  }
  for (int64_t token = 0; token < s.tokens; ++token)
    for (int64_t head = 0; head < s.v_heads; ++head) {
      const int64_t in_chunk = (token < 130 ? token : token - 130) % 64, at = token * s.v_heads + head;
      const double before = in_chunk ? g.get(at - s.v_heads) : 0;
      EXPECT_NEAR(g.get(at) - before, plain.g.get(at), 1e-5);
      EXPECT_EQ(a_inv.get(at * 64 + in_chunk), 1.0);
      for (int64_t j = in_chunk + 1; j < 64; ++j) EXPECT_EQ(a_gated.get(at * 64 + j), 0.0);
    }
}

// The gradient of o.sum() is one number with strides of 0; a column-major one has a last stride of its own.
TEST(CpuOp, GradientOfOutputWithAnyStrides) {
  Options s;
  s.tokens = 70;
  for (const bool expanded : {true, false}) {
    CpuRun plain(s), strided(s);
    const int64_t rows = s.tokens * s.v_heads;
    Tensor turned(QLA_FLOAT32, {s.v_dim, rows});
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < s.v_dim; ++j) {
        if (expanded) plain.d_o.set(i * s.v_dim + j, 0.5);
        turned.set(expanded ? i * s.v_dim + j : j * rows + i, plain.d_o.get(i * s.v_dim + j));
      }
    qla_gdn_backward_args args = strided.backward_args();
    args.d_o.data = turned.view.data;
    const int64_t strides[4] = {0, expanded ? 0 : s.v_heads, expanded ? 0 : 1, expanded ? 0 : rows};
    std::copy(strides, strides + 4, args.d_o.stride);
    plain.backward();
    cpu::backward(args, strided.problem);
    EXPECT_EQ(plain.dq.bytes, strided.dq.bytes) << expanded;
    EXPECT_EQ(plain.dv.bytes, strided.dv.bytes) << expanded;
  }
}

}  // namespace
}  // namespace qla::cpu_test
