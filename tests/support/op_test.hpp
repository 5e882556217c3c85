// Tests beside the table: one parameter, the backend; the recipe's number leads the test's name.
#pragma once

#include <gtest/gtest.h>

#include "support/case.hpp"
#include "support/watchdog.hpp"

namespace qla::test {

class OpTest : public testing::TestWithParam<const Backend*> {
 protected:
  const Backend& backend() const { return *GetParam(); }
  bool on_device() const { return backend().on_device(); }
  // types and head sizes worth a test here: a device serves 16 bit and 128, the CPU is quicker with less
  std::vector<int32_t> dtypes() const {
    return on_device() ? std::vector<int32_t>{QLA_BFLOAT16} : std::vector<int32_t>{QLA_BFLOAT16, QLA_FLOAT32};
  }
  int32_t plain_dtype() const { return on_device() ? QLA_BFLOAT16 : QLA_FLOAT32; }
  int64_t head_size(int64_t on_cpu) const { return on_device() ? 128 : on_cpu; }

  Result must_run(const Sample& sample, const Options& options = {}) const {
    const Watchdog watchdog(60, testing::UnitTest::GetInstance()->current_test_info()->name());
    Result result = run(backend(), sample, options);
    EXPECT_TRUE(result.ok()) << result.where << ": " << qla_status_name(result.status) << ": " << result.error;
    return result;
  }
  // runs and judges against the truth, as a row of the table
  void expect_case(const Case& c, int32_t dtype) const { run_case(backend(), c, dtype); }
};

inline std::string backend_name(const testing::TestParamInfo<const Backend*>& info) { return info.param->name(); }

#define QLA_ON_EVERY_BACKEND(Suite) INSTANTIATE_TEST_SUITE_P(Op, Suite, testing::ValuesIn(backends()), backend_name)

}  // namespace qla::test
