// Prints the page figures.md; with --seeds, the summary of so many runs of each scenario.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/match.h"
#include "tests/paths/scenarios.h"

ABSL_FLAG(int, seeds, 1, "how many runs of each scenario, with the seeds 1, 2, 3, ...");
ABSL_FLAG(std::string, only, "", "only scenarios with this text in their names");

int main(int argc, char** argv) {
  using namespace longhaul::paths_model;  // NOLINT(build/namespaces)
  absl::ParseCommandLine(argc, argv);
  std::fputs(Head().c_str(), stdout);
  for (const Scenario& scenario : Scenarios()) {
    if (!absl::StrContains(scenario.name, absl::GetFlag(FLAGS_only))) continue;
    std::vector<Figures> runs;
    for (int seed = 1; seed <= absl::GetFlag(FLAGS_seeds); ++seed) {
      runs.push_back(Measure(scenario, static_cast<uint64_t>(seed)));
    }
    std::fputs(Row(scenario, Summary(runs)).c_str(), stdout);
    std::fflush(stdout);
  }
}
