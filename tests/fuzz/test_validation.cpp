// Garbage in argument structs: no call crashes, a refusal says why, and a run writes only its outputs and workspace.
// Repeat one case: --gtest_filter=ValidationFuzz.* with QLA_FUZZ_SEED=<seed printed> and QLA_FUZZ_ROUNDS=1.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "qla/qla.h"

namespace qla::test {
namespace {

constexpr size_t kArena = size_t{1} << 20;  // all tensors lie in it, outputs in its second half
constexpr size_t kWorkspace = size_t{1} << 26;

struct Memory {
  std::vector<std::byte> store = std::vector<std::byte>(kArena + kWorkspace + 512);
  std::byte* arena = store.data() + (256 - reinterpret_cast<uintptr_t>(store.data()) % 256);
  std::byte* workspace = arena + kArena;
};

Memory& memory() {
  static Memory m;
  return m;
}

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : random_(seed) {}

  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }
  bool chance(int64_t one_in) { return pick(1, one_in) == 1; }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[pick(0, static_cast<int64_t>(values.size()) - 1)];
  }

  // A contiguous view at the next free place of its half, or sometimes anywhere in it.
  qla_tensor tensor(int32_t dtype, std::initializer_list<int64_t> shape, bool output) {
    qla_tensor t{};
    t.dtype = dtype;
    t.ndim = static_cast<int32_t>(shape.size());
    int64_t count = 1;
    for (int32_t i = t.ndim - 1; i >= 0; --i) {
      t.shape[i] = shape.begin()[i];
      t.stride[i] = count;
      count *= std::max<int64_t>(1, t.shape[i]);
    }
    size_t& next = output ? next_output_ : next_input_;
    t.data = memory().arena + next;
    next += (static_cast<size_t>(count) * 8 + 255) / 256 * 256;
    return t;
  }

  void bend(qla_tensor& t) {
    switch (pick(0, 6)) {
      case 0:
        t.shape[pick(0, 3)] =
            one_of<int64_t>({-1, 0, 1, 2, 3, 4, 8, 63, 64, 65, 257, 1 << 20, int64_t{1} << 47, INT64_MAX, INT64_MIN});
        break;
      case 1:
        t.stride[pick(0, 3)] = one_of<int64_t>({-1, 0, 1, 2, 3, 7, 64, 1 << 20, int64_t{1} << 60, INT64_MAX, INT64_MIN, -8});
        break;
      case 2:
        t.dtype = static_cast<int32_t>(one_of<int64_t>({-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, INT32_MAX}));
        break;
      case 3:
        t.ndim = static_cast<int32_t>(one_of<int64_t>({-1, 0, 1, 2, 3, 4, 5, INT32_MAX, INT32_MIN}));
        break;
      case 4:
        t.data = chance(2) ? nullptr : memory().arena + pick(0, kArena - 1);
        break;
      case 5:
        t = {};
        break;
      default:
        std::swap(t.stride[pick(0, 3)], t.stride[pick(0, 3)]);
        break;
    }
  }

  template <typename Args>
  void bend_scalars(Args& a) {
    switch (pick(0, 9)) {
      case 0:
        a.backend = static_cast<int32_t>(one_of<int64_t>({-1, 0, 1, 3, INT32_MAX}));
        break;
      case 1:
        a.device = static_cast<int32_t>(one_of<int64_t>({-2, -1, INT32_MIN}));
        break;
      case 2:
        a.stream = chance(2) ? nullptr : &a;
        break;
      case 3:
        a.num_threads = static_cast<int32_t>(one_of<int64_t>({-1, 0, 1, 2, INT32_MIN}));
        break;
      case 4:
        a.flags = static_cast<uint32_t>(one_of<int64_t>({pick(0, 127), int64_t{1} << 31, pick(0, UINT32_MAX)}));
        break;
      case 5:
        a.scale = one_of<double>({0.0, -1.0, NAN, INFINITY, 1e300});
        break;
      case 6:
        a.cp_mode = static_cast<int32_t>(pick(-1, 5));
        break;
      case 7:
        a.cp_segment_chunks = one_of<int64_t>({0, 1, 2, -1, INT64_MAX});
        break;
      case 8:
        a.cp_warmup_threshold = one_of<double>({NAN, -1.0, 0.0, 1.0, -INFINITY, INFINITY});
        break;
      default:
        a.cp_uncut_chunks = static_cast<int32_t>(pick(-1, 1));
        break;
    }
  }

 private:
  std::mt19937_64 random_;
  size_t next_input_ = 0, next_output_ = kArena / 2;
};

struct Sizes {
  int64_t b, t, h, hv, k, v, n;
  bool packed;
};

Sizes sizes_of(Fuzzer& f) {
  Sizes s{};
  s.packed = f.chance(2);
  s.b = s.packed ? 1 : f.pick(0, 2);
  s.t = f.one_of<int64_t>({0, 1, 2, 33, 64, 65, 130});
  s.h = f.pick(1, 2);
  s.hv = s.h * f.pick(1, 2);
  s.k = f.pick(1, 9), s.v = f.pick(1, 9);
  s.n = s.packed ? f.pick(0, 3) : s.b;
  return s;
}

template <typename Args>
void fill_inputs(Fuzzer& f, Args& a, const Sizes& s) {
  const int32_t dtype = static_cast<int32_t>(f.pick(QLA_FLOAT64, QLA_FLOAT16));
  a.struct_size = sizeof(a);
  a.device = -1;
  a.num_threads = 1;
  a.scale = NAN;
  a.cp_warmup_threshold = NAN;
  a.q = f.tensor(dtype, {s.b, s.t, s.h, s.k}, false);
  a.k = f.tensor(dtype, {s.b, s.t, s.h, s.k}, false);
  a.v = f.tensor(dtype, {s.b, s.t, s.hv, s.v}, false);
  a.g = f.tensor(QLA_FLOAT32, {s.b, s.t, s.hv}, false);
  a.beta = f.tensor(QLA_FLOAT32, {s.b, s.t, s.hv}, false);
  if (s.packed) {
    a.cu_seqlens = f.tensor(QLA_INT64, {s.n + 1}, false);
    int64_t at = 0;
    for (int64_t n = 0; n <= s.n; ++n) {
      static_cast<int64_t*>(a.cu_seqlens.data)[n] = at;
      at = f.chance(40) ? f.pick(-5, 200) : std::min(s.t, at + f.pick(0, 70));
    }
  }
  if (f.chance(2)) a.initial_state = f.tensor(QLA_FLOAT32, {s.n, s.hv, s.k, s.v}, false);
  if (f.chance(4)) a.has_initial_state = f.tensor(QLA_BOOL8, {s.n}, false);
  if (f.chance(4)) {
    a.flags |= QLA_FLAG_RAW_GATE;
    a.A_log = f.tensor(QLA_FLOAT32, {s.hv}, false);
    if (f.chance(2)) a.dt_bias = f.tensor(QLA_FLOAT32, {s.hv}, false);
  }
  if (f.chance(3)) a.flags |= QLA_FLAG_QK_L2NORM;
  if (f.chance(4)) a.flags |= QLA_FLAG_BETA_SIGMOID;
  if (f.chance(6)) a.cp_mode = QLA_CP_FIXED, a.cp_segment_chunks = 1;
}

std::vector<qla_tensor*> tensors(qla_gdn_forward_args& a) {
  return {&a.q,
          &a.k,
          &a.v,
          &a.g,
          &a.beta,
          &a.initial_state,
          &a.final_state,
          &a.o,
          &a.cu_seqlens,
          &a.A_log,
          &a.dt_bias,
          &a.state_indices,
          &a.has_initial_state,
          &a.state_checkpoints,
          &a.a_inv,
          &a.a_gated,
          &a.g_cumsum,
          &a.q_rnorm,
          &a.k_rnorm,
          &a.h,
          &a.saved};
}
std::vector<qla_tensor*> tensors(qla_gdn_backward_args& a) {
  return {&a.q,
          &a.k,
          &a.v,
          &a.g,
          &a.beta,
          &a.initial_state,
          &a.cu_seqlens,
          &a.A_log,
          &a.dt_bias,
          &a.has_initial_state,
          &a.a_inv,
          &a.g_cumsum,
          &a.q_rnorm,
          &a.k_rnorm,
          &a.saved,
          &a.d_o,
          &a.d_final_state,
          &a.dq,
          &a.dk,
          &a.dv,
          &a.dg,
          &a.dbeta,
          &a.d_initial_state,
          &a.dA_log,
          &a.ddt_bias};
}
std::set<const qla_tensor*> outputs(qla_gdn_forward_args& a) {
  std::set<const qla_tensor*> out = {&a.final_state, &a.o,       &a.state_checkpoints, &a.a_inv, &a.a_gated,
                                     &a.g_cumsum,    &a.q_rnorm, &a.k_rnorm,           &a.h,     &a.saved};
  if (a.state_indices.data) out.insert(&a.initial_state);
  return out;
}
std::set<const qla_tensor*> outputs(qla_gdn_backward_args& a) {
  return {&a.dq, &a.dk, &a.dv, &a.dg, &a.dbeta, &a.d_initial_state, &a.dA_log, &a.ddt_bias};
}

int64_t element_bytes(int32_t dtype) {
  constexpr int64_t sizes[] = {8, 4, 2, 2, 4, 8, 1, 1};
  return dtype >= 0 && dtype < 8 ? sizes[dtype] : 0;
}

// Calls visit(offset in the arena) for every element; false if one lies outside, or there are too many to look at.
template <typename Visit>
bool for_each_element(const qla_tensor& t, Visit visit) {
  if (t.data == nullptr) return true;
  if (t.ndim < 1 || t.ndim > 4) return false;
  int64_t count = 1;
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.shape[i] < 0 || t.shape[i] > (1 << 20) || t.stride[i] > (1 << 20) || t.stride[i] < -(1 << 20)) return t.shape[i] == 0;
    count *= std::max<int64_t>(t.shape[i], 0);
    if (count > (1 << 20)) return false;
  }
  const int64_t base = static_cast<std::byte*>(t.data) - memory().arena, size = element_bytes(t.dtype);
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, offset = 0;
    for (int32_t axis = t.ndim - 1; axis >= 0; --axis) offset += rest % t.shape[axis] * t.stride[axis], rest /= t.shape[axis];
    const int64_t at = base + offset * size;
    if (at < 0 || at + size > static_cast<int64_t>(kArena)) return false;
    visit(at);
  }
  return true;
}

qla_status check(const qla_gdn_forward_args& a) { return qla_gdn_forward_check(&a); }
qla_status check(const qla_gdn_backward_args& a) { return qla_gdn_backward_check(&a); }
qla_status run(const qla_gdn_forward_args& a) { return qla_gdn_forward(&a); }
qla_status run(const qla_gdn_backward_args& a) { return qla_gdn_backward(&a); }
qla_status workspace(const qla_gdn_forward_args& a, size_t* bytes) {
  size_t saved = 0;
  EXPECT_EQ(qla_gdn_forward_saved(&a, &saved), check(a));
  return qla_gdn_forward_workspace(&a, bytes);
}
qla_status workspace(const qla_gdn_backward_args& a, size_t* bytes) {
  size_t least = 0;
  const qla_status status = qla_gdn_backward_workspace(&a, &least, bytes);
  EXPECT_LE(least, *bytes);
  return status;
}

struct Tally {
  int64_t refused = 0, ran = 0, skipped = 0;
};

template <typename Args>
void try_call(Args& a, Tally& tally) {
  const auto expect_reason = [](qla_status status) {
    ASSERT_TRUE(status == QLA_INVALID_ARGUMENT || status == QLA_NOT_SUPPORTED || status == QLA_OUT_OF_MEMORY) << qla_last_error();
    const std::string message = qla_last_error();
    for (const char* part : {": expected", "got", ";"}) ASSERT_NE(message.find(part), std::string::npos) << message;
  };
  const qla_status checked = check(a);
  size_t bytes = 0;
  ASSERT_EQ(workspace(a, &bytes), checked) << qla_last_error();
  if (checked != QLA_OK) {
    expect_reason(checked);
    ASSERT_EQ(run(a), checked) << "check and run disagree";
    ++tally.refused;
    return;
  }
  if (bytes > kWorkspace) {
    ++tally.skipped;
    return;
  }
  a.workspace = memory().workspace, a.workspace_bytes = bytes;
  std::vector<bool> writable(kArena, false);
  const auto out = outputs(a);
  for (const qla_tensor* t : tensors(a)) {
    const bool inside = for_each_element(*t, [&](int64_t at) {
      if (out.count(t))
        for (int64_t b = 0; b < element_bytes(t->dtype); ++b) writable[static_cast<size_t>(at + b)] = true;
    });
    if (!inside) {  // valid, but not our memory
      ++tally.skipped;
      return;
    }
  }
  const std::vector<std::byte> before(memory().arena, memory().arena + kArena);
  const qla_status status = run(a);
  if (status != QLA_OK) expect_reason(status);
  for (size_t block = 0; block < kArena; block += 256) {
    if (std::memcmp(memory().arena + block, before.data() + block, 256) == 0) continue;
    for (size_t i = block; i < block + 256; ++i) {
      const bool allowed = memory().arena[i] == before[i] || (status == QLA_OK && writable[i]);
      ASSERT_TRUE(allowed) << "byte " << i << " of the arena changed, status " << status << ": " << qla_last_error();
    }
  }
  status == QLA_OK ? ++tally.ran : ++tally.refused;
}

qla_gdn_forward_args forward_call(Fuzzer& f) {
  qla_gdn_forward_args a{};
  const Sizes s = sizes_of(f);
  fill_inputs(f, a, s);
  a.o = f.tensor(a.q.dtype, {s.b, s.t, s.hv, s.v}, true);
  if (f.chance(2)) a.final_state = f.tensor(QLA_FLOAT32, {s.n, s.hv, s.k, s.v}, true);
  if (f.chance(5)) a.a_inv = f.tensor(a.q.dtype, {s.b, s.t, s.hv, 64}, true);
  if (f.chance(5)) a.a_gated = f.tensor(a.q.dtype, {s.b, s.t, s.hv, 64}, true);
  if (f.chance(5)) a.g_cumsum = f.tensor(a.q.dtype == QLA_FLOAT64 ? QLA_FLOAT64 : QLA_FLOAT32, {s.b, s.t, s.hv}, true);
  if (f.chance(8)) a.state_indices = f.tensor(QLA_INT32, {s.n}, false);
  if (f.chance(8) && !s.packed) {
    a.checkpoint_every_n_tokens = 64;
    a.state_checkpoints = f.tensor(QLA_FLOAT32, {s.b * (s.t / 64), s.hv, s.k, s.v}, true);
  }
  if (f.chance(6) && !s.packed) a.h = f.tensor(a.q.dtype, {s.b * ((s.t + 63) / 64), s.hv, s.k, s.v}, true);
  return a;
}

qla_gdn_backward_args backward_call(Fuzzer& f) {
  qla_gdn_backward_args a{};
  const Sizes s = sizes_of(f);
  fill_inputs(f, a, s);
  if (f.chance(2)) a.d_o = f.tensor(a.q.dtype, {s.b, s.t, s.hv, s.v}, false);
  if (f.chance(2)) a.d_final_state = f.tensor(QLA_FLOAT32, {s.n, s.hv, s.k, s.v}, false);
  if (!f.chance(4)) a.dq = f.tensor(a.q.dtype, {s.b, s.t, s.h, s.k}, true);
  if (!f.chance(4)) a.dk = f.tensor(a.q.dtype, {s.b, s.t, s.h, s.k}, true);
  if (!f.chance(4)) a.dv = f.tensor(a.q.dtype, {s.b, s.t, s.hv, s.v}, true);
  if (!f.chance(4)) a.dg = f.tensor(QLA_FLOAT32, {s.b, s.t, s.hv}, true);
  if (!f.chance(4)) a.dbeta = f.tensor(QLA_FLOAT32, {s.b, s.t, s.hv}, true);
  if (f.chance(2)) a.d_initial_state = f.tensor(QLA_FLOAT32, {s.n, s.hv, s.k, s.v}, true);
  return a;
}

template <typename Make>
void fuzz(uint64_t base_seed, int64_t rounds, Make make) {
  const char* const given_seed = std::getenv("QLA_FUZZ_SEED");
  const char* const given_rounds = std::getenv("QLA_FUZZ_ROUNDS");
  if (given_seed) base_seed = std::strtoull(given_seed, nullptr, 10);
  if (given_rounds) rounds = std::strtoll(given_rounds, nullptr, 10);
  std::vector<std::byte> pattern(kArena);  // small positive numbers in every float type, and zeros
  for (size_t i = 0; i < kArena; ++i) pattern[i] = static_cast<std::byte>(i % 64 == 1 || i % 64 == 33 ? 0x3f : 0);
  Tally tally;
  for (int64_t round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
    const uint64_t seed = base_seed + static_cast<uint64_t>(round);
    SCOPED_TRACE("QLA_FUZZ_SEED=" + std::to_string(seed) + " QLA_FUZZ_ROUNDS=1");
    Fuzzer f(seed);
    std::memcpy(memory().arena, pattern.data(), kArena);
    auto args = make(f);
    for (int64_t bends = f.chance(4) ? 0 : f.pick(1, 3); bends > 0; --bends) {
      const auto all = tensors(args);
      if (f.chance(4))
        f.bend_scalars(args);
      else
        f.bend(*all[static_cast<size_t>(f.pick(0, static_cast<int64_t>(all.size()) - 1))]);
    }
    try_call(args, tally);
  }
  if (!given_rounds) {
    EXPECT_GT(tally.ran, rounds / 20);
    EXPECT_GT(tally.refused, rounds / 20);
  }
}

TEST(ValidationFuzz, Forward) { fuzz(1, 3000, forward_call); }
TEST(ValidationFuzz, Backward) { fuzz(1000001, 3000, backward_call); }

// Every byte of the struct random: shape-only functions answer and never read through a pointer.
TEST(ValidationFuzz, PureNoise) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 20000; ++round) {
    qla_gdn_forward_args forward;
    qla_gdn_backward_args backward;
    for (size_t i = 0; i + 8 <= sizeof(forward); i += 8) {
      const uint64_t word = random() >> (random() % 64);
      std::memcpy(reinterpret_cast<char*>(&forward) + i, &word, 8);
    }
    for (size_t i = 0; i + 8 <= sizeof(backward); i += 8) {
      const uint64_t word = random() >> (random() % 64);
      std::memcpy(reinterpret_cast<char*>(&backward) + i, &word, 8);
    }
    if (round % 2) forward.struct_size = sizeof(forward), backward.struct_size = sizeof(backward);
    size_t bytes = 0, more = 0;
    qla_plan plan{};
    plan.struct_size = sizeof(plan);
    EXPECT_NE(qla_gdn_forward_check(&forward), QLA_INTERNAL_ERROR) << qla_last_error();
    EXPECT_NE(qla_gdn_backward_check(&backward), QLA_INTERNAL_ERROR) << qla_last_error();
    EXPECT_NE(qla_gdn_forward_workspace(&forward, &bytes), QLA_INTERNAL_ERROR) << qla_last_error();
    EXPECT_NE(qla_gdn_backward_workspace(&backward, &bytes, &more), QLA_INTERNAL_ERROR) << qla_last_error();
    EXPECT_NE(qla_gdn_plan(&forward, nullptr, 0, nullptr, &plan), QLA_INTERNAL_ERROR) << qla_last_error();
  }
}

}  // namespace
}  // namespace qla::test
