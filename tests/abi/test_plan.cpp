// qla_gdn_plan and qla_plan_print: golden text, every chunk once, capacity and refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include "abi/calls.hpp"

namespace qla::test {
namespace {

struct Planned {
  qla_status status;
  qla_plan plan{};
  std::vector<qla_segment> segments;
};

Planned make_plan(const qla_gdn_forward_args& args, const std::vector<int64_t>& lens, const float* decay = nullptr) {
  Planned p;
  p.plan.struct_size = sizeof(p.plan);
  p.status = qla_gdn_plan(&args, lens.empty() ? nullptr : lens.data(), static_cast<int64_t>(lens.size()), decay, &p.plan);
  if (p.status != QLA_OK) return p;
  p.segments.resize(static_cast<size_t>(p.plan.num_items));
  p.plan.segments = p.segments.data();
  p.plan.segments_capacity = p.plan.num_items;
  p.status = qla_gdn_plan(&args, lens.empty() ? nullptr : lens.data(), static_cast<int64_t>(lens.size()), decay, &p.plan);
  return p;
}

std::string print(const qla_plan& plan) {
  size_t length = 0;
  EXPECT_EQ(qla_plan_print(&plan, nullptr, 0, &length), QLA_OK);
  std::string text(length + 1, '?');
  EXPECT_EQ(qla_plan_print(&plan, text.data(), text.size(), &length), QLA_OK);
  EXPECT_EQ(text.back(), '\0');
  text.pop_back();
  return text;
}

// Shapes only: nobody reads the data.
qla_gdn_forward_args packed(int64_t tokens, int64_t sequences, int64_t k_heads, int64_t v_heads, int32_t dtype = QLA_BFLOAT16) {
  static char somewhere[64];
  const auto shape = [&](int32_t type, std::vector<int64_t> sizes) {
    qla_tensor t{};
    t.data = somewhere, t.dtype = type, t.ndim = static_cast<int32_t>(sizes.size());
    int64_t stride = 1;
    for (int32_t i = t.ndim - 1; i >= 0; --i)
      t.shape[i] = sizes[static_cast<size_t>(i)], t.stride[i] = stride, stride *= t.shape[i];
    return t;
  };
  qla_gdn_forward_args args{};
  args.struct_size = sizeof(args);
  args.device = -1;
  args.scale = NAN;
  args.cp_warmup_threshold = NAN;
  args.q = args.k = shape(dtype, {1, tokens, k_heads, 128});
  args.v = args.o = shape(dtype, {1, tokens, v_heads, 128});
  args.g = args.beta = shape(QLA_FLOAT32, {1, tokens, v_heads});
  args.cu_seqlens = shape(QLA_INT64, {sequences + 1});
  return args;
}

TEST(Plan, GoldenFixed) {
  qla_gdn_forward_args args = packed(640, 2, 1, 2);
  args.cp_mode = QLA_CP_FIXED;
  args.cp_segment_chunks = 4;
  std::vector<float> decay(20);
  for (size_t i = 0; i < decay.size(); ++i) decay[i] = i % 2 ? 0.0f : -12.0f;  // head 0 forgets in a chunk, head 1 never
  const Planned p = make_plan(args, {600, 33}, decay.data());
  ASSERT_EQ(p.status, QLA_OK) << qla_last_error();
  std::string text = print(p.plan);
  const size_t workspace = text.find(", workspace");
  text.replace(workspace, text.find('\n', workspace) - workspace, "");  // the backend's own affair
  EXPECT_EQ(text,
            "plan: segments of the given length\n"
            "  2 sequences, 11 chunks, segments of at most 4 chunks, 4 segments a value head, 8 in all\n"
            "  V in 1 part\n"
            "  sequence head first_chunk chunks start warmup_chunks\n"
            "  0 0 0 4 zero 0\n"
            "  0 0 4 4 warm-up 1\n"
            "  0 0 8 2 warm-up 1\n"
            "  0 1 0 4 zero 0\n"
            "  0 1 4 4 zero 4\n"
            "  0 1 8 2 zero 8\n"
            "  1 0 0 1 zero 0\n"
            "  1 1 0 1 zero 0\n");
}

// Why nothing is cut, and of one thing only one.
TEST(Plan, SaysWhyNothingIsCut) {
  const auto said_of = [](int64_t tokens, float log_decay, bool given, int32_t mode = QLA_CP_AUTO, int64_t heads = 1) {
    qla_gdn_forward_args args = packed(tokens, 1, heads, heads);
    args.cp_mode = mode, args.cp_segment_chunks = mode == QLA_CP_FIXED ? 37 : 0;
    const std::vector<float> decay(static_cast<size_t>((tokens + 63) / 64 * heads), log_decay);
    const Planned p = make_plan(args, {tokens}, given ? decay.data() : nullptr);
    EXPECT_EQ(p.status, QLA_OK) << qla_last_error();
    return print(p.plan);
  };
  const auto has = [](const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; };
  const std::string short_one = said_of(64, 0.0f, false);
  EXPECT_TRUE(
      has(short_one, "plan: no sequence is long enough for a cut to pay: not cut\n  1 sequence, 1 chunk, not cut, 1 segment a"))
      << short_one;
  const std::string remembers = said_of(65536, 0.0f, true);
  EXPECT_TRUE(has(remembers, "plan: no head forgets soon enough for a cut to pay: not cut\n  1 sequence, 1024 chunks, not cut,"))
      << remembers;
  const std::string assumed = said_of(16384, 0.0f, false);
  EXPECT_TRUE(has(assumed, "not cut; gates not given: usual ones assumed\n")) << assumed;
  const std::string forgets = said_of(16384, -12.0f, true);
  EXPECT_TRUE(has(forgets, "cut into segments where their gates forget\n")) << forgets;
  EXPECT_TRUE(has(forgets, "segments of 64 chunks, 4 segments a value head")) << forgets;
  const std::string exact = said_of(65536, 0.0f, false, QLA_CP_EXACT);
  EXPECT_FALSE(has(exact, "gates")) << exact;
  const std::string fixed = said_of(64 * 64, 0.0f, false, QLA_CP_FIXED, 4);
  EXPECT_TRUE(has(fixed, "length; gates not given: usual ones assumed, 1 of 4 heads never forget\n")) << fixed;
  EXPECT_TRUE(has(fixed, "segments of at most 37 chunks")) << fixed;
}

// What a plan says, all but the reason: it names who chose.
std::string said(Planned p) {
  p.plan.reason[0] = '\0';
  return print(p.plan);
}

TEST(Plan, RepeatedIsTheSame) {
  std::mt19937_64 random(30);
  const auto pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  int partly = 0, cut = 0, fused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::vector<int64_t> lens(static_cast<size_t>(pick(1, 5)));
    int64_t tokens = 0;
    for (int64_t& n : lens) n = pick(0, int64_t{1} << pick(8, 15)), tokens += n;
    if (i == 0) lens = {4096, 2048, 2048}, tokens = 8192;
    const int64_t heads = i == 0 ? 8 : int64_t{1} << pick(0, 6);
    qla_gdn_forward_args args = packed(tokens, static_cast<int64_t>(lens.size()), heads, heads);
    args.device = i % 4 == 3 ? -1 : 0;
    if (args.device < 0) args.num_threads = 1;
    args.cp_mode = i % 5 == 4 ? QLA_CP_EXACT : i % 7 == 6 ? QLA_CP_OFF : QLA_CP_AUTO;
    if (i % 11 == 10) args.flags |= QLA_FLAG_BATCH_INVARIANT;
    const Planned made = make_plan(args, lens);
    ASSERT_EQ(made.status, QLA_OK) << qla_last_error();
    if (args.cp_mode == QLA_CP_EXACT) args.cp_warmup_threshold = -INFINITY;
    args.cp_mode = QLA_CP_PLAN;
    args.cp_segment_chunks = made.plan.segment_chunks;
    args.cp_uncut_chunks = static_cast<int32_t>(made.plan.uncut_chunks);
    const Planned again = make_plan(args, lens);
    ASSERT_EQ(again.status, QLA_OK) << qla_last_error();
    EXPECT_EQ(said(again), said(made)) << i;
    cut += made.plan.num_segments > made.plan.num_sequences, fused += made.plan.fused;
    if (made.plan.uncut_chunks == 0) continue;
    partly += made.plan.num_segments > made.plan.num_sequences;
    args.cp_mode = QLA_CP_FIXED, args.cp_uncut_chunks = 0;
    if (i == 0) {
      EXPECT_GT(make_plan(args, lens).plan.num_items, made.plan.num_items);
    }
  }
  EXPECT_GT(partly, 5);
  EXPECT_GT(cut, 50);
  EXPECT_GT(fused, 20);
}

TEST(Plan, EveryChunkOnceInEveryMode) {
  for (int32_t mode = QLA_CP_AUTO; mode <= QLA_CP_PLAN; ++mode) {
    for (uint32_t flags : {0u, static_cast<uint32_t>(QLA_FLAG_BATCH_INVARIANT)}) {
      for (int32_t device : {-1, 0}) {
        qla_gdn_forward_args args = packed(40000, 4, 2, 4);
        args.device = device;
        args.cp_mode = mode;
        args.flags = flags;
        args.cp_segment_chunks = mode == QLA_CP_FIXED || mode == QLA_CP_PLAN ? 7 : 0;
        args.cp_uncut_chunks = mode == QLA_CP_PLAN ? 200 : 0;
        const std::vector<int64_t> lens = {0, 32768, 1, 6500};
        const Planned p = make_plan(args, lens);
        ASSERT_EQ(p.status, QLA_OK) << qla_last_error();
        EXPECT_EQ(p.plan.total_chunks, 512 + 1 + 102);
        int64_t chunks = 0;
        for (int64_t n = 0; n < 4; ++n)
          for (int64_t head = 0; head < 4; ++head) {
            int64_t at = 0, last_owned = 0;
            for (const qla_segment& s : p.segments) {
              if (s.sequence != n || s.head != head) continue;
              EXPECT_EQ(s.first_chunk, at);
              EXPECT_LE(s.warmup_chunks, at);
              at += s.num_chunks, last_owned = s.num_chunks;
            }
            EXPECT_EQ(at, (lens[static_cast<size_t>(n)] + 63) / 64);
            chunks += at;
            EXPECT_TRUE(at == 0 || last_owned > 0);
          }
        EXPECT_EQ(chunks, 4 * (512 + 1 + 102));
        EXPECT_GT(std::string(p.plan.reason).size(), 0u);
        EXPECT_EQ(p.plan.predicted_us > 0, device == 0);
      }
    }
  }
}

// One sequence of 2^31 tokens, none at all, and a million of one token between two huge ones.
TEST(Plan, HugeAndEmpty) {
  qla_gdn_forward_args args = packed((int64_t{1} << 31) + 64, 1, 1, 1);
  Planned p = make_plan(args, {(int64_t{1} << 31) + 1});
  ASSERT_EQ(p.status, QLA_OK) << qla_last_error();
  EXPECT_EQ(p.plan.total_chunks, (int64_t{1} << 25) + 1);
  args = packed(100, 0, 1, 1);
  p = make_plan(args, {});
  ASSERT_EQ(p.status, QLA_OK) << qla_last_error();
  EXPECT_EQ(p.plan.num_items, 0);
  std::vector<int64_t> lens(1000002, 1);
  lens.front() = lens.back() = int64_t{1} << 24;
  args = packed((int64_t{1} << 25) + 1000000, 1000002, 1, 1);
  p = make_plan(args, lens);
  ASSERT_EQ(p.status, QLA_OK) << qla_last_error();
  EXPECT_EQ(p.plan.total_chunks, (int64_t{1} << 19) + 1000000);
  EXPECT_GE(p.plan.num_items, 1000002);
}

TEST(Plan, BatchInvariantDependsOnOwnLengthOnly) {
  const auto of_sequence = [](const Planned& p, int64_t n) {
    std::vector<std::vector<int64_t>> out;
    for (const qla_segment& s : p.segments)
      if (s.sequence == n && s.head == 0) out.push_back({s.first_chunk, s.num_chunks, s.warmup_chunks, s.start});
    return out;
  };
  for (int32_t device : {-1, 0}) {
    qla_gdn_forward_args alone = packed(30000, 1, 2, 2), among = packed(200000, 5, 8, 64);
    for (qla_gdn_forward_args* args : {&alone, &among}) args->flags = QLA_FLAG_BATCH_INVARIANT, args->device = device;
    // gates that forget a chunk in the next one: the CPU cuts where a short warm-up will do, and joins segments elsewhere
    const std::vector<float> decay(64 * 3000, -12.0f);
    const auto a = of_sequence(make_plan(alone, {30000}, decay.data()), 0),
               b = of_sequence(make_plan(among, {1, 70000, 30000, 5, 90000}, decay.data()), 2);
    EXPECT_EQ(a, b);
    EXPECT_GT(a.size(), 1u);
  }
}

// One call, two forms: the plan says which one these lengths take. The workspace is the call's.
TEST(Plan, BothFormsByTheLengths) {
  for (const int64_t tokens : {8192, 65536}) {  // the second one's two kernels take ranges of chunks
    qla_gdn_forward_args args = packed(tokens, 2, 16, 48);
    args.backend = QLA_BACKEND_CUDA, args.device = 0;
    const auto plan_of = [&](int64_t longest) {
      const int64_t lens[] = {longest, tokens - longest};
      qla_plan plan{};
      plan.struct_size = sizeof(plan);
      EXPECT_EQ(qla_gdn_plan(&args, lens, 2, nullptr, &plan), QLA_OK) << qla_last_error();
      return plan;
    };
    const qla_plan equal = plan_of(tokens / 2), uneven = plan_of(tokens / 8 * 7);
    EXPECT_EQ(equal.fused, 1);
    EXPECT_EQ(equal.value_splits, 1);
    EXPECT_EQ(equal.ranges, 1);
    EXPECT_EQ(equal.num_items, 2 * 48);
    EXPECT_EQ(uneven.fused, 0);
    EXPECT_EQ(uneven.value_splits, 2);
    EXPECT_EQ(uneven.ranges, tokens == 65536 ? 2 : 1);
    EXPECT_EQ(equal.workspace_bytes, uneven.workspace_bytes);
    EXPECT_LE(equal.workspace_bytes, int64_t{512} << 20);
    args.flags = QLA_FLAG_BATCH_INVARIANT;
    EXPECT_EQ(plan_of(tokens / 2).fused, 0);
  }
}

TEST(Plan, CapacityIsRespected) {
  qla_gdn_forward_args args = packed(640, 1, 1, 2);
  args.cp_mode = QLA_CP_FIXED;
  args.cp_segment_chunks = 2;
  qla_segment segments[4] = {};
  segments[3].sequence = 77;
  qla_plan plan{};
  plan.struct_size = sizeof(plan);
  plan.segments = segments;
  plan.segments_capacity = 3;
  const int64_t length = 640;
  ASSERT_EQ(qla_gdn_plan(&args, &length, 1, nullptr, &plan), QLA_OK) << qla_last_error();
  EXPECT_EQ(plan.num_items, 10);
  EXPECT_EQ(segments[2].first_chunk, 4);
  EXPECT_EQ(segments[3].sequence, 77);
  char text[16];
  size_t bytes = 0;
  ASSERT_EQ(qla_plan_print(&plan, text, sizeof(text), &bytes), QLA_OK);
  EXPECT_GT(bytes, sizeof(text));
  EXPECT_EQ(std::string(text).size(), sizeof(text) - 1);
}

TEST(Plan, RangeOfALength) {
  qla_plan plan{};
  plan.struct_size = sizeof(plan);
  qla_gdn_forward_args args = packed(640, 1, 1, 2);
  args.cp_segment_chunks = 1000000000000;
  const int64_t length = 640;
  for (const auto& [mode, expected] : {std::pair{QLA_CP_FIXED, "1 to 2147483647 with QLA_CP_FIXED"},
                                       std::pair{QLA_CP_PLAN, "0 to 2147483647 with QLA_CP_PLAN"}}) {
    args.cp_mode = mode;
    EXPECT_EQ(qla_gdn_plan(&args, &length, 1, nullptr, &plan), QLA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(qla_last_error()).find(std::string("expected ") + expected), std::string::npos) << qla_last_error();
  }
}

TEST(Plan, Refusals) {
  qla_plan plan{};
  plan.struct_size = sizeof(plan);
  qla_gdn_forward_args args = packed(640, 2, 1, 2);
  const auto refused = [&](std::vector<int64_t> lens, const std::string& argument) {
    EXPECT_EQ(qla_gdn_plan(&args, lens.data(), static_cast<int64_t>(lens.size()), nullptr, &plan), QLA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(qla_last_error()).rfind(argument, 0), 0u) << qla_last_error();
  };
  refused({640}, "num_lens:");
  refused({-1, 5}, "lens[0]:");
  refused({600, 41}, "lens[1]:");
  refused({INT64_MAX, INT64_MAX}, "lens[0]:");
  EXPECT_EQ(qla_gdn_plan(&args, nullptr, 0, nullptr, &plan), QLA_INVALID_ARGUMENT);
  plan.segments_capacity = 4;
  refused({600, 40}, "plan.segments:");
  plan.segments_capacity = -1;
  refused({600, 40}, "plan.segments_capacity:");
}

// No device is needed to look at a plan, and none to know that no kernel serves these.
TEST(Plan, WhatCudaRefuses) {
  qla_plan plan{};
  plan.struct_size = sizeof(plan);
  const int64_t length = 640;
  qla_gdn_forward_args args = packed(640, 1, 1, 2, QLA_FLOAT64);
  args.backend = QLA_BACKEND_CUDA, args.device = 0;
  EXPECT_EQ(qla_gdn_plan(&args, &length, 1, nullptr, &plan), QLA_NOT_SUPPORTED);
  EXPECT_STREQ(qla_last_error(), "q: expected bfloat16 or float16 on CUDA, got float64; cast q, k and v, or use CPU tensors");
  args = packed(640, 1, 1, 2);
  args.backend = QLA_BACKEND_CUDA, args.device = 0;
  args.q.shape[3] = args.k.shape[3] = 64;
  EXPECT_EQ(qla_gdn_plan(&args, &length, 1, nullptr, &plan), QLA_NOT_SUPPORTED);
  EXPECT_EQ(std::string(qla_last_error()).rfind("q, v: expected head sizes K = V = 128 on CUDA, got K = 64", 0), 0u)
      << qla_last_error();
}

TEST(Plan, OfNoTokens) {
  for (const int32_t device : {-1, 0}) {
    qla_gdn_forward_args args = packed(0, 2, 1, 2);
    args.device = device;
    const Planned p = make_plan(args, {0, 0});
    ASSERT_EQ(p.status, QLA_OK) << qla_last_error();
    EXPECT_EQ(std::string(p.plan.reason).rfind("no tokens: nothing to compute", 0), 0u) << p.plan.reason;
    EXPECT_EQ(p.plan.total_chunks, 0);
  }
}

}  // namespace
}  // namespace qla::test
