// Every row of the case table, in each of its types, on each backend there is.
#include <gtest/gtest.h>

#include "op/cases.hpp"

namespace qla::test {

const std::vector<Case>& case_table() {
  static const std::vector<Case> table = [] {
    std::vector<Case> all = precision_cases();
    for (auto part : {shape_cases(), argument_cases()}) all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return table;
}

namespace {

struct Row {
  const Case* c;
  int32_t dtype;
  const Backend* backend;
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const Backend* backend : backends())
    for (const Case& c : case_table())
      for (const int32_t dtype : c.dtypes) all.push_back({&c, dtype, backend});
  return all;
}

std::string row_name(const testing::TestParamInfo<Row>& info) {
  std::string name = std::string(info.param.c->recipe) + "_" + info.param.c->name + "_" + name_of(info.param.dtype) + "_" +
                     info.param.backend->name();
  for (char& letter : name)
    if (!std::isalnum(static_cast<unsigned char>(letter))) letter = '_';
  return name;
}

class Table : public testing::TestWithParam<Row> {};
TEST_P(Table, Case) { run_case(*GetParam().backend, *GetParam().c, GetParam().dtype); }
INSTANTIATE_TEST_SUITE_P(Op, Table, testing::ValuesIn(rows()), row_name);

}  // namespace
}  // namespace qla::test
