// Hosts whose controllers decide together, over modelled paths. Figures are bounded, and a change
// of any rule shows in figures.md.

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/paths/scenarios.h"

namespace longhaul::paths_model {
namespace {

constexpr char kPage[] = "tests/paths/figures.md";
constexpr char kRenew[] =
    "figures.md is not what the code does. If the new figures are as good, run\n"
    "  bazel run //tests/paths:print_figures >tests/paths/figures.md";

std::string PageText() {
  std::ifstream file(kPage);
  EXPECT_TRUE(file) << "there is no " << kPage;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class PathsTest : public ::testing::TestWithParam<size_t> {};

TEST_P(PathsTest, FiguresAreBoundedAndThoseOfThePage) {
  const Scenario& scenario = Scenarios()[GetParam()];
  const Figures figures = Measure(scenario, 1);
  EXPECT_LE(figures.times, scenario.times_max) << scenario.name;
  EXPECT_LE(figures.repeated, scenario.repeated_max) << scenario.name;
  EXPECT_GE(figures.sent_least, 0.7) << scenario.name;
  EXPECT_LE(figures.sent_most, 1.3) << scenario.name;
  for (const int ops : figures.adapted) {
    EXPECT_GE(ops, 0) << scenario.name << " does not adapt";
    EXPECT_LE(ops, 12) << scenario.name;
  }
  const std::string row = Row(scenario, figures);
  EXPECT_TRUE(absl::StrContains(PageText(), row)) << row << kRenew;
}

INSTANTIATE_TEST_SUITE_P(All, PathsTest, ::testing::Range(size_t{0}, Scenarios().size()));

TEST(PathsPage, HasALineForEachScenarioAndNoOther) {
  const std::string page = PageText();
  EXPECT_TRUE(absl::StartsWith(page, Head())) << kRenew;
  std::istringstream lines(page.substr(std::min(page.size(), Head().size())));
  size_t count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    ASSERT_LT(count, Scenarios().size());
    EXPECT_TRUE(absl::StartsWith(line, "| " + Scenarios()[count].name + " |")) << line;
  }
  EXPECT_EQ(count, Scenarios().size());
}

TEST(Determinism, TheSameSeedGivesTheSameFigures) {
  const Scenario& scenario = Scenarios().front();
  EXPECT_EQ(Row(scenario, Measure(scenario, 7)), Row(scenario, Measure(scenario, 7)));
}

}  // namespace
}  // namespace longhaul::paths_model
