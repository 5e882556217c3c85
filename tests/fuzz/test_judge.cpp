// The judge of the fuzzer and of the op table (support/case.cpp) on sums over tokens that cancel (decision 0101): roundings pass,
// faults do not.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include "support/case.hpp"

namespace qla::test {
namespace {

// How many failures the judge reports of got.
int failures(const Case& c, const Sample& s, const Values& got, const Values& truth, const std::vector<Values>& emulated) {
  testing::TestPartResultArray reported;
  {
    testing::ScopedFakeTestPartResultReporter catches(&reported);
    expect_values(c, s, {}, got, truth, emulated);
  }
  return reported.size();
}

TEST(Judge, SumsThatCancel) {
  const Case plain{.recipe = "JUDGE", .name = "sums", .T = 200, .H = 1, .HV = 1, .K = 16, .V = 16, .raw_gate = true};
  int cancelling = 0;
  for (uint64_t seed = 1; seed <= 80; ++seed) {
    Case c = plain;
    c.seed = seed;
    const Sample s = sample_of(c, QLA_BFLOAT16);
    const Values truth = truth_of(s), emulated = emulation_of(s);
    for (const Field& field : fields()) {
      if (field.member != &Values::dA_log && field.member != &Values::ddt_bias) continue;
      Values nothing = truth;
      nothing.*field.member = {0.0};
      const double of_size = relative_error(s, field, nothing, truth);  // |sum| / its size with random signs, or 1
      if (of_size > 0.1) continue;
      ++cancelling;
      EXPECT_EQ(failures(c, s, emulated, truth, {emulated}), 0) << field.name << ", seed " << seed;
      const double size = std::fabs((truth.*field.member)[0]) / of_size;
      for (const double fault : {-0.03, 0.03}) {  // a token of 200 has 0.07
        Values got = emulated;
        (got.*field.member)[0] += fault * size;
        EXPECT_GE(failures(c, s, got, truth, {emulated}), 1) << field.name << ", seed " << seed;
      }
    }
  }
  EXPECT_GE(cancelling, 4);
}

}  // namespace
}  // namespace qla::test
