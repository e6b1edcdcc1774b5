#include "tests/metrics/metrics_page.h"

#include <fstream>
#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(MetricsPage, NamesTypesLabelsAndHelpAreOnThePage) {
  const std::string page = MetricsPage();
  EXPECT_THAT(
      page,
      HasSubstr(
          "- `longhaul_peerd_op_phase_seconds` (histogram, by `phase`: commit, transfer, wait): "));
  EXPECT_THAT(page, HasSubstr("- `longhaul_peerd_links_lost_total` (counter): Links that broke"));
  EXPECT_THAT(page,
              HasSubstr("- `longhaul_coordinator_ring_link_rtt_seconds` (gauge, by `from`; by "
                        "`from_host`; by `group`; by"));
  EXPECT_THAT(page, Not(HasSubstr("`le`")));
}

TEST(MetricsPage, TheDocumentIsWhatTheCodeSays) {
  std::ifstream file("docs/metrics.md");
  ASSERT_TRUE(file) << "there is no docs/metrics.md";
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), MetricsPage())
      << "docs/metrics.md is not what the code says. Run\n"
         "  bazel run //tests/metrics:print_metrics_page >docs/metrics.md";
}

}  // namespace
}  // namespace longhaul
