// One thing wrong at a time: every call is refused before anything is written, the message names the argument, what was expected,
// what came and what to do, and the next valid call works.  BR-44, BR-48, BR-49, BR-50, BR-57, BR-58, BR-59, BR-61, BR-62.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "abi/calls.hpp"

namespace qla::test {
namespace {

enum class When { Always, RunOnly };  // RunOnly: values, alignment and overlap are looked at when the data is

template <typename Call>
struct Misuse {
  const char* name;
  const char* argument;  // the message begins with it
  std::function<void(Call&)> bend;
  qla_status status = QLA_INVALID_ARGUMENT;
  When when = When::Always;
  int64_t batch = kB;
};

void expect_refused(qla_status status, qla_status expected, const std::string& argument) {
  const std::string message = qla_last_error();
  EXPECT_EQ(status, expected) << message;
  EXPECT_EQ(message.rfind(argument, 0), 0u) << "expected the message to begin with '" << argument << "': " << message;
  for (const char* part : {"expected", "got", ";"}) EXPECT_NE(message.find(part), std::string::npos) << message;
}

qla_status check(const ForwardCall& call) { return qla_gdn_forward_check(&call.args); }
qla_status check(const BackwardCall& call) { return qla_gdn_backward_check(&call.args); }
qla_status run(const ForwardCall& call) { return qla_gdn_forward(&call.args); }
qla_status run(const BackwardCall& call) { return qla_gdn_backward(&call.args); }

template <typename Call>
void try_all(const std::vector<Misuse<Call>>& table) {
  for (const Misuse<Call>& misuse : table) {
    SCOPED_TRACE(misuse.name);
    Call call(misuse.batch);
    call.give_workspace();
    misuse.bend(call);
    if (misuse.when == When::Always) expect_refused(check(call), misuse.status, misuse.argument);
    const auto before = call.buffers.snapshot();
    expect_refused(run(call), misuse.status, misuse.argument);
    EXPECT_EQ(call.buffers.snapshot(), before) << "a refused call wrote something";
    Call valid;
    valid.give_workspace();
    if (std::string(qla_cpu_level()) != "none") {
      EXPECT_EQ(run(valid), QLA_OK) << qla_last_error();
    }
  }
}

// The bends that both structs share.
template <typename Call>
std::vector<Misuse<Call>> common() {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  return {
      {"struct_size 0", "args.struct_size", [](Call& c) { c.args.struct_size = 0; }},
      {"struct_size smaller", "args.struct_size", [](Call& c) { c.args.struct_size -= 8; }},
      {"struct_size larger", "args.struct_size", [](Call& c) { c.args.struct_size += 8; }},
      {"backend 3", "backend", [](Call& c) { c.args.backend = 3; }},
      {"backend -1", "backend", [](Call& c) { c.args.backend = -1; }},
      {"device -2", "device", [](Call& c) { c.args.device = -2; }},
      {"cuda without device", "device", [](Call& c) { c.args.backend = QLA_BACKEND_CUDA; }},
      {"stream without device", "device", [](Call& c) { c.args.stream = &c; }},
      {"num_threads", "num_threads", [](Call& c) { c.args.num_threads = -1; }},
      {"unknown flag", "flags", [](Call& c) { c.args.flags = 1u << 30; }},
      {"neg_eigval alone", "flags", [](Call& c) { c.args.flags = QLA_FLAG_NEG_EIGVAL; }},
      {"scale inf", "scale", [](Call& c) { c.args.scale = kInf; }},
      {"cp_mode", "cp_mode", [](Call& c) { c.args.cp_mode = 5; }},
      {"fixed without length", "cp_segment_chunks", [](Call& c) { c.args.cp_mode = QLA_CP_FIXED; }},
      {"length without fixed", "cp_segment_chunks", [](Call& c) { c.args.cp_segment_chunks = 4; }},
      {"threshold 0", "cp_warmup_threshold", [](Call& c) { c.args.cp_warmup_threshold = 0; }},
      {"uncut without a plan", "cp_uncut_chunks", [](Call& c) { c.args.cp_uncut_chunks = 1; }},
      {"uncut below 0", "cp_uncut_chunks", [](Call& c) { c.args.cp_mode = QLA_CP_PLAN, c.args.cp_uncut_chunks = -1; }},
      {"plan of a negative length", "cp_segment_chunks",
       [](Call& c) { c.args.cp_mode = QLA_CP_PLAN, c.args.cp_segment_chunks = -1; }},

      {"q absent", "q:", [](Call& c) { c.args.q = {}; }},
      {"q NULL with shape", "q:", [](Call& c) { c.args.q.data = nullptr; }},
      {"q int", "q:", [](Call& c) { c.args.q.dtype = QLA_INT32; }},
      {"q unknown dtype", "q:", [](Call& c) { c.args.q.dtype = 99; }},
      {"q 3-D", "q:", [](Call& c) { c.args.q.ndim = 3; }},
      {"q ndim -1", "q:", [](Call& c) { c.args.q.ndim = -1; }},
      {"q ndim 1000", "q:", [](Call& c) { c.args.q.ndim = 1000; }},
      {"q negative", "q:", [](Call& c) { c.args.q.shape[1] = -1; }},
      {"q not contiguous", "q:", [](Call& c) { c.args.q.stride[3] = 2; }},
      {"q expanded in the last axis", "q:", [](Call& c) { c.args.q.stride[3] = 0; }},
      {"q stride overflow", "q:", [](Call& c) { c.args.q.stride[0] = INT64_MAX; }},
      {"q too many elements", "q:", [](Call& c) { c.args.q.shape[0] = INT64_MAX / 2; }},
      {"q misaligned", "q:", [](Call& c) { c.args.q.data = static_cast<char*>(c.args.q.data) + 1; }, QLA_INVALID_ARGUMENT,
       When::RunOnly},
      {"H 0", "q:", [](Call& c) { c.args.q.shape[2] = c.args.k.shape[2] = 0; }},
      {"K 0", "q:", [](Call& c) { c.args.q.shape[3] = c.args.k.shape[3] = 0; }},
      {"K 257", "q:",
       [](Call& c) {
         c.args.q = c.args.k = c.buffers.make(QLA_FLOAT32, {kB, kT, kH, 257});
       },
       QLA_NOT_SUPPORTED},
      {"V 512", "v:",
       [](Call& c) {
         c.args.v = c.buffers.make(QLA_FLOAT32, {kB, kT, kHV, 512});
       },
       QLA_NOT_SUPPORTED},
      {"k dtype", "k:", [](Call& c) { c.args.k.dtype = QLA_BFLOAT16; }},
      {"k shape", "k:", [](Call& c) { c.args.k.shape[1] = kT - 1; }},
      {"k heads", "k:", [](Call& c) { c.args.k.shape[2] = 1; }},
      {"k head size", "k:", [](Call& c) { c.args.k.shape[3] = kK - 1; }},
      {"v absent", "v:", [](Call& c) { c.args.v = {}; }},
      {"v batch", "v:", [](Call& c) { c.args.v.shape[0] = 1; }},
      {"HV not a multiple of H", "v:", [](Call& c) { c.args.v.shape[2] = 3; }},
      {"HV less than H", "v:", [](Call& c) { c.args.v.shape[2] = 1; }},
      {"HV 0", "v:", [](Call& c) { c.args.v.shape[2] = 0; }},
      {"V 0", "v:", [](Call& c) { c.args.v.shape[3] = 0; }},
      {"g heads", "g:", [](Call& c) { c.args.g.shape[2] = kH; }},
      {"g 4-D", "g:", [](Call& c) { c.args.g.ndim = 4; }},
      {"g bool", "g:", [](Call& c) { c.args.g.dtype = QLA_BOOL8; }},
      {"g NULL with shape", "g:", [](Call& c) { c.args.g.data = nullptr; }},
      {"beta absent", "beta:", [](Call& c) { c.args.beta = {}; }},
      {"beta tokens", "beta:", [](Call& c) { c.args.beta.shape[1] = kT + 1; }},
      {"raw gate without A_log", "A_log:", [](Call& c) { c.args.flags = QLA_FLAG_RAW_GATE; }},
      {"raw gate without g", "g:", [](Call& c) { c.args.flags = QLA_FLAG_RAW_GATE, c.args.g = {}; }},
      {"A_log without raw gate", "A_log:", [](Call& c) { c.args.A_log = c.buffers.make(QLA_FLOAT32, {kHV}); }},
      {"dt_bias without raw gate", "dt_bias:", [](Call& c) { c.args.dt_bias = c.buffers.make(QLA_FLOAT32, {kHV}); }},
      {"A_log heads",
       "A_log:", [](Call& c) { c.args.flags = QLA_FLAG_RAW_GATE, c.args.A_log = c.buffers.make(QLA_FLOAT32, {kH}); }},
      {"dt_bias strided", "dt_bias:",
       [](Call& c) {
         c.args.flags = QLA_FLAG_RAW_GATE, c.args.A_log = c.buffers.make(QLA_FLOAT32, {kHV});
         c.args.dt_bias = c.buffers.make(QLA_FLOAT32, {2 * kHV}), c.args.dt_bias.shape[0] = kHV, c.args.dt_bias.stride[0] = 2;
       }},

      {"state of another N", "initial_state:", [](Call& c) { c.args.initial_state.shape[0] = kB + 1; }},
      {"state V-first without the flag", "initial_state:",
       [](Call& c) {
         c.args.initial_state = c.buffers.make(QLA_FLOAT32, {kB, kHV, kV, kK});
       }},
      {"state K-first with the flag", "initial_state:", [](Call& c) { c.args.flags = QLA_FLAG_STATE_V_FIRST; }},
      {"state dtype", "initial_state:", [](Call& c) { c.args.initial_state.dtype = QLA_INT32; }},
      {"state transposed view",
       "initial_state:", [](Call& c) { std::swap(c.args.initial_state.stride[2], c.args.initial_state.stride[3]); }},
      {"has_initial_state alone", "has_initial_state:",
       [](Call& c) { c.args.has_initial_state = c.buffers.make(QLA_BOOL8, {kB}), c.args.initial_state = {}; }},
      {"has_initial_state dtype",
       "has_initial_state:", [](Call& c) { c.args.has_initial_state = c.buffers.make(QLA_INT32, {kB}); }},
      {"has_initial_state length",
       "has_initial_state:", [](Call& c) { c.args.has_initial_state = c.buffers.make(QLA_BOOL8, {kB + 1}); }},

      {"cu_seqlens with B = 2", "cu_seqlens:",
       [](Call& c) {
         c.args.cu_seqlens = boundaries(c.buffers, {0, 5, kT});
       }},
      {"cu_seqlens float", "cu_seqlens:", [](Call& c) { c.args.cu_seqlens = c.buffers.make(QLA_FLOAT32, {2}); },
       QLA_INVALID_ARGUMENT, When::Always, 1},
      {"cu_seqlens 2-D", "cu_seqlens:",
       [](Call& c) {
         c.args.cu_seqlens = c.buffers.make(QLA_INT64, {1, 2});
       },
       QLA_INVALID_ARGUMENT, When::Always, 1},
      {"cu_seqlens empty", "cu_seqlens:", [](Call& c) { c.args.cu_seqlens = c.buffers.make(QLA_INT64, {0}); },
       QLA_INVALID_ARGUMENT, When::Always, 1},
      {"cu_seqlens empty, NULL", "cu_seqlens:", [](Call& c) { c.args.cu_seqlens.dtype = QLA_INT64, c.args.cu_seqlens.ndim = 1; },
       QLA_INVALID_ARGUMENT, When::Always, 1},
      {"cu_seqlens strided", "cu_seqlens:",
       [](Call& c) {
         c.args.cu_seqlens = boundaries(c.buffers, {0, 0, kT, 0}), c.args.cu_seqlens.shape[0] = 2,
         c.args.cu_seqlens.stride[0] = 2;
       },
       QLA_INVALID_ARGUMENT, When::Always, 1},
      {"N of the states", "initial_state:",
       [](Call& c) {
         c.args.cu_seqlens = boundaries(c.buffers, {0, 5, kT});
       },
       QLA_INVALID_ARGUMENT, When::Always, 1},
      {"first boundary not 0", "cu_seqlens[0]",
       [](Call& c) {
         c.args.cu_seqlens = boundaries(c.buffers, {1, kT});
       },
       QLA_INVALID_ARGUMENT, When::RunOnly, 1},
      {"descending", "cu_seqlens[2]",
       [](Call& c) {
         c.args.cu_seqlens = boundaries(c.buffers, {0, 12, 8, 16});
       },
       QLA_INVALID_ARGUMENT, When::RunOnly, 1},
      {"negative", "cu_seqlens[1]",
       [](Call& c) {
         c.args.cu_seqlens = boundaries(c.buffers, {0, -3});
       },
       QLA_INVALID_ARGUMENT, When::RunOnly, 1},
      {"past the end", "cu_seqlens[1]",
       [](Call& c) {
         c.args.cu_seqlens = boundaries(c.buffers, {0, kT + 1});
       },
       QLA_INVALID_ARGUMENT, When::RunOnly, 1},

      {"g is alpha, validating", "g:",
       [](Call& c) {
         c.args.flags = QLA_FLAG_VALIDATE, c.args.g = c.buffers.make(QLA_FLOAT32, {kB, kT, kHV}, 0.9);
       },
       QLA_INVALID_ARGUMENT, When::RunOnly},
      {"workspace overlaps q", "q:", [](Call& c) { c.args.workspace = c.args.q.data, c.args.workspace_bytes = 256; },
       QLA_INVALID_ARGUMENT, When::RunOnly},
  };
}

TEST(Misuse, ForwardCommon) { try_all(common<ForwardCall>()); }
TEST(Misuse, BackwardCommon) { try_all(common<BackwardCall>()); }

TEST(Misuse, Forward) {
  using F = ForwardCall;
  const auto pooled = [](F& c, std::vector<int64_t> indices) {
    c.args.final_state = {};
    c.args.state_indices = boundaries(c.buffers, indices);
    c.args.initial_state = c.buffers.make(QLA_FLOAT32, {3, kHV, kK, kV});
  };
  try_all<F>({
      {"o absent", "o:", [](F& c) { c.args.o = {}; }},
      {"o dtype", "o:", [](F& c) { c.args.o.dtype = QLA_FLOAT64; }},
      {"o shape", "o:", [](F& c) { c.args.o.shape[3] = kV - 1; }},
      {"o expanded", "o:", [](F& c) { c.args.o.stride[0] = 0; }},
      {"o interleaved with itself", "o:", [](F& c) { c.args.o.stride[1] = kV; }},
      {"o is v", "o:", [](F& c) { c.args.o = c.args.v; }, QLA_INVALID_ARGUMENT, When::RunOnly},
      {"o overlaps v by one element", "o:",
       [](F& c) {
         c.args.o = c.buffers.make(QLA_FLOAT32, {2 * kB, kT, kHV, kV}), c.args.o.shape[0] = kB;
         c.args.v = c.args.o, c.args.v.data = static_cast<float*>(c.args.o.data) + kB * kT * kHV * kV - 1;
       },
       QLA_INVALID_ARGUMENT, When::RunOnly},
      {"final_state is initial_state", "final_state:", [](F& c) { c.args.final_state = c.args.initial_state; },
       QLA_INVALID_ARGUMENT, When::RunOnly},
      {"final_state V-first", "final_state:",
       [](F& c) {
         c.args.final_state = c.buffers.make(QLA_FLOAT32, {kB, kHV, kV, kK});
       }},
      {"final_state dtype", "final_state:", [](F& c) { c.args.final_state.dtype = QLA_INT64; }},
      {"indices without pool", "state_indices:",
       [](F& c) {
         c.args.state_indices = boundaries(c.buffers, {0, 1}), c.args.initial_state = c.args.final_state = {};
       }},
      {"indices with final_state", "final_state:",
       [](F& c) {
         c.args.state_indices = boundaries(c.buffers, {0, 1});
       }},
      {"indices length", "state_indices:",
       [&](F& c) {
         pooled(c, {0, 1, 2});
       }},
      {"index past the pool", "state_indices[1]",
       [&](F& c) {
         pooled(c, {0, 3});
       },
       QLA_INVALID_ARGUMENT, When::RunOnly},
      {"index -2", "state_indices[0]",
       [&](F& c) {
         pooled(c, {-2, 0});
       },
       QLA_INVALID_ARGUMENT, When::RunOnly},
      {"one slot twice", "state_indices[1]",
       [&](F& c) {
         pooled(c, {2, 2});
       },
       QLA_INVALID_ARGUMENT, When::RunOnly},
      {"pool expanded", "initial_state:",
       [&](F& c) {
         pooled(c, {0, 1}), c.args.initial_state.stride[0] = 0;
       }},
      {"checkpoints without interval", "state_checkpoints:",
       [](F& c) {
         c.args.state_checkpoints = c.buffers.make(QLA_FLOAT32, {kB, kHV, kK, kV});
       }},
      {"interval without checkpoints", "state_checkpoints:", [](F& c) { c.args.checkpoint_every_n_tokens = 64; }},
      {"interval 32", "checkpoint_every_n_tokens:", [](F& c) { c.args.checkpoint_every_n_tokens = 32; }},
      {"interval -64", "checkpoint_every_n_tokens:", [](F& c) { c.args.checkpoint_every_n_tokens = -64; }},
      {"checkpoint count", "state_checkpoints:",
       [](F& c) {
         c.args.checkpoint_every_n_tokens = 64, c.args.state_checkpoints = c.buffers.make(QLA_FLOAT32, {kB + 1, kHV, kK, kV});
       }},
      {"checkpoint count, packed", "state_checkpoints:",
       [](F& c) {
         c.args.cu_seqlens = boundaries(c.buffers, {0, kT}), c.args.checkpoint_every_n_tokens = 64;
         c.args.state_checkpoints = c.buffers.make(QLA_FLOAT32, {2, kHV, kK, kV});
       },
       QLA_INVALID_ARGUMENT, When::RunOnly, 1},
      {"a_inv width", "a_inv:",
       [](F& c) {
         c.args.a_inv = c.buffers.make(QLA_FLOAT32, {kB, kT, kHV, 32});
       }},
      {"a_gated dtype", "a_gated:",
       [](F& c) {
         c.args.a_gated = c.buffers.make(QLA_FLOAT64, {kB, kT, kHV, 64});
       }},
      {"g_cumsum dtype", "g_cumsum:",
       [](F& c) {
         c.args.g_cumsum = c.buffers.make(QLA_FLOAT64, {kB, kT, kHV});
       }},
      {"q_rnorm heads", "q_rnorm:",
       [](F& c) {
         c.args.q_rnorm = c.buffers.make(QLA_FLOAT32, {kB, kT, kHV});
       }},
      {"h count", "h:",
       [](F& c) {
         c.args.h = c.buffers.make(QLA_FLOAT32, {kB, kHV, kK, kV});
       }},
      {"saved dtype", "saved:", [](F& c) { c.args.saved = c.buffers.make(QLA_FLOAT32, {64}); }},
      {"two outputs in one place", "g_cumsum:",
       [](F& c) {
         c.args.q_rnorm = c.args.g_cumsum = c.buffers.make(QLA_FLOAT32, {kB, kT, kHV}), c.args.q_rnorm.shape[2] = kH;
       },
       QLA_INVALID_ARGUMENT, When::RunOnly},
  });
}

TEST(Misuse, Backward) {
  using F = BackwardCall;
  try_all<F>({
      {"d_o shape", "d_o:", [](F& c) { c.args.d_o.shape[1] = 1; }},
      {"d_o int", "d_o:", [](F& c) { c.args.d_o.dtype = QLA_INT32; }},
      {"d_final_state N", "d_final_state:", [](F& c) { c.args.d_final_state.shape[0] = 1; }},
      {"dq heads", "dq:",
       [](F& c) {
         c.args.dq = c.buffers.make(QLA_FLOAT32, {kB, kT, kHV, kK});
       }},
      {"dk head size", "dk:", [](F& c) { c.args.dk.shape[3] = 1; }},
      {"dv heads", "dv:", [](F& c) { c.args.dv.shape[2] = kH; }},
      {"dg 4-D", "dg:", [](F& c) { c.args.dg.ndim = 4; }},
      {"dbeta int", "dbeta:", [](F& c) { c.args.dbeta.dtype = QLA_INT64; }},
      {"dbeta expanded", "dbeta:", [](F& c) { c.args.dbeta.stride[2] = 0; }},
      {"d_initial_state layout", "d_initial_state:",
       [](F& c) {
         c.args.d_initial_state = c.buffers.make(QLA_FLOAT32, {kB, kHV, kV, kK});
       }},
      {"dA_log without raw gate", "dA_log:", [](F& c) { c.args.dA_log = c.buffers.make(QLA_FLOAT32, {kHV}); }},
      {"ddt_bias without raw gate", "ddt_bias:", [](F& c) { c.args.ddt_bias = c.buffers.make(QLA_FLOAT32, {kHV}); }},
      {"dk is dq", "dq:", [](F& c) { c.args.dk = c.args.dq; }, QLA_INVALID_ARGUMENT, When::RunOnly},
      {"dv is d_o", "dv:", [](F& c) { c.args.dv = c.args.d_o; }, QLA_INVALID_ARGUMENT, When::RunOnly},
      {"dg is g", "dg:", [](F& c) { c.args.dg = c.args.g; }, QLA_INVALID_ARGUMENT, When::RunOnly},
  });
}

TEST(Misuse, NullEverywhere) {
  EXPECT_EQ(qla_gdn_forward_check(nullptr), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(qla_last_error()).rfind("args", 0), 0u);
  EXPECT_EQ(qla_gdn_backward_check(nullptr), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_gdn_forward(nullptr), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_gdn_backward(nullptr), QLA_INVALID_ARGUMENT);
  size_t bytes = 0;
  EXPECT_EQ(qla_gdn_forward_workspace(nullptr, &bytes), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_gdn_forward_workspace_range(nullptr, &bytes, &bytes), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_gdn_forward_saved(nullptr, &bytes), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_gdn_backward_workspace(nullptr, &bytes, &bytes), QLA_INVALID_ARGUMENT);
  ForwardCall forward;
  BackwardCall backward;
  EXPECT_EQ(qla_gdn_forward_workspace(&forward.args, nullptr), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(qla_last_error()).rfind("bytes", 0), 0u);
  EXPECT_EQ(qla_gdn_forward_workspace_range(&forward.args, nullptr, &bytes), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_gdn_forward_workspace_range(&forward.args, &bytes, nullptr), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_gdn_forward_saved(&forward.args, nullptr), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_gdn_backward_workspace(&backward.args, nullptr, &bytes), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_gdn_backward_workspace(&backward.args, &bytes, nullptr), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_device_count(nullptr), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_device_info(0, nullptr), QLA_INVALID_ARGUMENT);
  qla_device_info_t info{};
  EXPECT_EQ(qla_device_info(0, &info), QLA_INVALID_ARGUMENT);  // struct_size 0
  qla_plan plan{};
  plan.struct_size = sizeof(plan);
  EXPECT_EQ(qla_gdn_plan(nullptr, nullptr, 0, nullptr, &plan), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_gdn_plan(&forward.args, nullptr, 0, nullptr, nullptr), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_plan_print(nullptr, nullptr, 0, &bytes), QLA_INVALID_ARGUMENT);
  EXPECT_EQ(qla_plan_print(&plan, nullptr, 0, nullptr), QLA_INVALID_ARGUMENT);
}

TEST(Misuse, StatusNamesAndVersion) {
  for (qla_status status = QLA_OK; status <= QLA_INTERNAL_ERROR; ++status)
    EXPECT_EQ(std::string(qla_status_name(status)).rfind("QLA_", 0), 0u);
  EXPECT_STREQ(qla_status_name(-5), "unknown qla_status");
  EXPECT_STREQ(qla_version(), "0.1.0");
  EXPECT_NE(std::string(qla_build_info()).find("qla 0.1.0"), std::string::npos);
}

TEST(Misuse, DeviceCountAnswersAnywhere) {
  int32_t count = -1;
  EXPECT_EQ(qla_device_count(&count), QLA_OK) << qla_last_error();
  EXPECT_GE(count, 0);
  EXPECT_NE(qla_prepare(-1), QLA_OK);
}

extern "C" int qla_test_header_from_c(void);
TEST(Header, CompilesAsC11) { EXPECT_EQ(qla_test_header_from_c(), 17); }

}  // namespace
}  // namespace qla::test
