// Every number of recipes.txt has a C++ test, a python test with its marker, or a line in skips.hpp.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "op/cases.hpp"
#include "op/skips.hpp"

namespace qla::test {
namespace {

std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

void add_matches(const std::string& text, const std::regex& pattern, const std::string& prefix, std::set<std::string>& out) {
  for (std::sregex_iterator at(text.begin(), text.end(), pattern), end; at != end; ++at) {
    const std::string number = (*at)[1];
    out.insert(prefix + (number.size() == 1 && prefix == "BR-" ? "0" + number : number));
  }
}

// Numbers of the tests of this binary that are not disabled, from their names: BR07_.., D6_..
std::set<std::string> tested_here() {
  std::set<std::string> found;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i)
    for (int j = 0; j < all.GetTestSuite(i)->total_test_count(); ++j) {
      static const std::regex br("/BR(\\d+)_"), d("/D(\\d+)_");
      const std::string name = std::string("/") + all.GetTestSuite(i)->GetTestInfo(j)->name();
      add_matches(name, br, "BR-", found);
      add_matches(name, d, "D-", found);
    }
  return found;
}

// @pytest.mark.br(6), br(6, 45), br("D-4"), or a docstring that begins with D-4.
std::set<std::string> tested_in_python() {
  std::set<std::string> found;
  const std::filesystem::path folder = std::filesystem::path(QLA_SOURCE_DIR) / "tests" / "python";
  if (!std::filesystem::exists(folder)) return found;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    const std::string text = text_of(file.path());
    add_matches(text, std::regex("\"\"\"D-(\\d+)\\."), "D-",
                found);  // the recipes of part F: a test's docstring begins with the number
    const std::regex mark("mark\\.br\\(([^)]*)\\)");
    for (std::sregex_iterator at(text.begin(), text.end(), mark), end; at != end; ++at) {
      const std::string arguments = "," + std::string((*at)[1]);
      add_matches(arguments, std::regex("[, ](\\d+)"), "BR-", found);
      add_matches(arguments, std::regex("D-?(\\d+)"), "D-", found);
    }
  }
  return found;
}

TEST(Recipes, EachHasATestOrAReason) {
  const std::set<std::string> here = tested_here();
  std::set<std::string> covered = here;
  std::set<std::string> in_python = tested_in_python();
  if (in_python.empty()) GTEST_SKIP() << "no python tests with markers in this tree";
  covered.merge(in_python);
  std::map<std::string, std::string> skipped;
  for (const Skip& skip : kSkips) skipped[skip.recipe] = skip.reason;
  std::istringstream list(text_of(std::filesystem::path(QLA_SOURCE_DIR) / "tests" / "op" / "recipes.txt"));
  int count = 0;
  std::set<std::string> known;
  for (std::string line; std::getline(list, line);) {
    if (line.empty() || line[0] == '#') continue;
    const std::string number = line.substr(0, line.find(' '));
    ++count;
    known.insert(number);
    EXPECT_TRUE(covered.count(number) || skipped.count(number))
        << line << ": no test, no python marker br(..), no line in skips.hpp";
    EXPECT_FALSE(here.count(number) && skipped.count(number)) << line << ": has a test and a reason why it has none";
  }
  EXPECT_EQ(count, 73);
  for (const auto& [number, reason] : skipped) EXPECT_TRUE(known.count(number)) << number << " is not a recipe";
  for (const std::string& number : here) EXPECT_TRUE(known.count(number)) << number << " is not a recipe";
}

}  // namespace
}  // namespace qla::test
