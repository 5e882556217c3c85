// qla.hpp: what it fills in, what it throws. (Numbers: examples/, which are tests.)
#include <gtest/gtest.h>

#include <cmath>

#include "abi/calls.hpp"
#include "qla/qla.hpp"

namespace qla::test {
namespace {

TEST(Sugar, ViewsAreContiguousAndTyped) {
  std::vector<float> data(24);
  const qla_tensor t = view(data, {2, 3, 4});
  EXPECT_EQ(t.data, data.data());
  EXPECT_EQ(t.dtype, QLA_FLOAT32);
  EXPECT_EQ(t.ndim, 3);
  EXPECT_EQ(t.stride[0], 12);
  EXPECT_EQ(t.stride[1], 4);
  EXPECT_EQ(t.stride[2], 1);
  const std::vector<int64_t> lengths(3);
  EXPECT_EQ(view(lengths, {3}).dtype, QLA_INT64);
  const qla_tensor strided = view_at(data.data(), QLA_BFLOAT16, {2, 3}, {8, 1});
  EXPECT_EQ(strided.stride[0], 8);
  EXPECT_THROW(view(data, {2, 3, 5}), CallError);
  EXPECT_THROW(view_at(data.data(), QLA_FLOAT32, {2, 3}, {1}), CallError);
  EXPECT_THROW(view_at(data.data(), QLA_FLOAT32, {1, 1, 1, 1, 1}), CallError);
}

TEST(Sugar, ErrorsBecomeExceptionsWithTheMessage) {
  ForwardCall call;
  call.args.beta = {};
  try {
    forward(call.args);
    FAIL();
  } catch (const CallError& error) {
    EXPECT_EQ(error.status(), QLA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(error.what()).rfind("QLA_INVALID_ARGUMENT: beta: expected", 0), 0u) << error.what();
  }
  ASSERT_TRUE(why_not(call.args).has_value());
  EXPECT_EQ(why_not(call.args)->rfind("beta", 0), 0u);
}

TEST(Sugar, BackwardTakesOverTheForwardCall) {
  ForwardCall call;
  call.args.flags = QLA_FLAG_QK_L2NORM;
  call.args.cp_mode = QLA_CP_EXACT;
  const qla_gdn_backward_args back = backward_args(call.args);
  EXPECT_EQ(back.struct_size, sizeof(back));
  EXPECT_EQ(back.flags, call.args.flags);
  EXPECT_EQ(back.cp_mode, QLA_CP_EXACT);
  EXPECT_EQ(back.q.data, call.args.q.data);
  EXPECT_EQ(back.initial_state.data, call.args.initial_state.data);
  EXPECT_EQ(back.d_o.data, nullptr);
}

TEST(Sugar, HostWorkspaceGrowsAndIsAligned) {
  HostWorkspace workspace;
  EXPECT_EQ(workspace.reserve(0), nullptr);
  void* const small = workspace.reserve(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small) % 256, 0u);
  EXPECT_EQ(workspace.reserve(50), small);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(workspace.reserve(5000)) % 256, 0u);
  EXPECT_EQ(workspace.size(), 5000u);
}

TEST(Sugar, PlanOwnsItsSegments) {
  ForwardCall call;
  call.args.cp_mode = QLA_CP_FIXED;
  call.args.cp_segment_chunks = 1;
  const Plan plan(call.args);
  EXPECT_EQ(plan->total_chunks, 4);
  EXPECT_EQ(plan.segments().size(), static_cast<size_t>(plan->num_items));
  EXPECT_EQ(plan.segments()[1].first_chunk, 1);
  EXPECT_NE(plan.text().find("segments of the given length"), std::string::npos);
  EXPECT_NO_THROW(devices());
}

TEST(Sugar, PlanIsRepeated) {
  for (const int32_t mode : {QLA_CP_AUTO, QLA_CP_EXACT, QLA_CP_OFF, QLA_CP_FIXED}) {
    ForwardCall call;
    call.args.cp_mode = mode;
    if (mode == QLA_CP_FIXED) call.args.cp_segment_chunks = 1;
    const Plan plan(call.args);
    repeat(call.args, plan);
    const Plan again(call.args);
    EXPECT_EQ(again->num_items, plan->num_items);
    EXPECT_EQ(again->segment_chunks, plan->segment_chunks);
    EXPECT_EQ(std::isinf(call.args.cp_warmup_threshold), mode == QLA_CP_EXACT);
  }
}

}  // namespace
}  // namespace qla::test
