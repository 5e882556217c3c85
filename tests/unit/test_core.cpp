// core: dtypes, environment, last error, values.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/dtype.hpp"
#include "core/env.hpp"
#include "core/last_error.hpp"
#include "core/status.hpp"
#include "core/values.hpp"

namespace qla {
namespace {

TEST(Dtype, SizesAndNames) {
  const int64_t sizes[] = {8, 4, 2, 2, 4, 8, 1, 1};
  for (int32_t dtype = QLA_FLOAT64; dtype <= QLA_UINT8; ++dtype) {
    EXPECT_EQ(dtype_size(dtype), sizes[dtype]);
    EXPECT_TRUE(dtype_known(dtype));
    EXPECT_STRNE(dtype_name(dtype), "unknown dtype");
    EXPECT_EQ(dtype_is_float(dtype), dtype <= QLA_FLOAT16);
  }
  EXPECT_FALSE(dtype_known(-1));
  EXPECT_FALSE(dtype_known(8));
}

TEST(Environment, Parses) {
  const Environment none = parse_environment([](const char*) -> const char* { return nullptr; });
  EXPECT_FALSE(none.validate);
  EXPECT_EQ(none.log, "");
  const Environment all = parse_environment([](const char* name) -> const char* {
    return std::strcmp(name, "QLA_VALIDATE") == 0 ? "1" : std::strcmp(name, "QLA_FORCE_BACKEND") == 0 ? "cpu" : "plan,config";
  });
  EXPECT_TRUE(all.validate);
  EXPECT_EQ(all.force_backend, "cpu");
  EXPECT_EQ(all.log, "plan,config");
  EXPECT_FALSE(parse_environment([](const char*) -> const char* { return "0"; }).validate);
}

TEST(LastError, BelongsToItsThreadAndIsCut) {
  set_last_error("first");
  std::thread([] {
    EXPECT_STREQ(last_error(), "");
    set_last_error("second");
  }).join();
  EXPECT_STREQ(last_error(), "first");
  set_last_error(std::string(10000, 'x').c_str());
  EXPECT_EQ(std::strlen(last_error()), 2047u);
  set_last_error(last_error() + 2000);  // its own text
  EXPECT_EQ(std::strlen(last_error()), 47u);
}

template <typename T>
qla_tensor view(std::vector<T>& values) {
  qla_tensor t{};
  t.data = values.data();
  t.dtype = sizeof(T) == 8 ? QLA_INT64 : QLA_INT32;
  t.ndim = 1;
  t.shape[0] = static_cast<int64_t>(values.size());
  t.stride[0] = 1;
  return t;
}

template <typename Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Values, Boundaries) {
  const auto check32 = [](std::vector<int32_t> b, int64_t tokens) {
    return message_of([&] { check_boundaries(view(b), tokens); });
  };
  const auto check64 = [](std::vector<int64_t> b, int64_t tokens) {
    return message_of([&] { check_boundaries(view(b), tokens); });
  };
  EXPECT_EQ(check32({0, 0, 5, 5, 9}, 9), "");
  EXPECT_EQ(check64({0}, 0), "");
  EXPECT_EQ(check64({0, 4}, 9), "");  // padding behind the last boundary
  EXPECT_NE(check32({0, 12, 8, 16}, 16).find("cu_seqlens[2]: expected at least cu_seqlens[1] = 12, got 8"), std::string::npos);
  EXPECT_NE(check64({1, 4}, 9).find("cu_seqlens[0]: expected 0, got 1"), std::string::npos);
  EXPECT_NE(check64({0, (int64_t{1} << 32) + 4}, 9).find("got 4294967300"), std::string::npos);
  EXPECT_NE(check32({0, 4, 10}, 9).find("cu_seqlens[2]: expected at most T = 9"), std::string::npos);
}

TEST(Values, StateIndices) {
  const auto check = [](std::vector<int64_t> i, int64_t slots) {
    return message_of([&] { check_state_indices(view(i), slots); });
  };
  EXPECT_EQ(check({-1, 2, -1, 0}, 3), "");
  EXPECT_EQ(check({}, 0), "");
  EXPECT_NE(check({0, 3}, 3).find("state_indices[1]"), std::string::npos);
  EXPECT_NE(check({-2}, 3).find("state_indices[0]"), std::string::npos);
  EXPECT_NE(check({1, 0, 1}, 3).find("state_indices[2]: expected slots to differ, got 1, the slot of sequence 0"),
            std::string::npos);
}

}  // namespace
}  // namespace qla
