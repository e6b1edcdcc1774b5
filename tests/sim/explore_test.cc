// Searches small runs exhaustively (explore.h). Each scenario has its own process.
//
//   bazel run -c opt //tests/sim:explore_test
//   bazel run -c opt //tests/sim:explore_test -- --scenario=join --faults=2
//   bazel run -c opt //tests/sim:explore_test -- --faults=2 --states=5000000 --sample=50 --seed=3
//
// Without flags, the search tries what kDefaults says: one or two faults on a path, all of them or
// a sample. With --more=N, the samples are N times as large. --plant=NAME plants a bug.
// --all_plants plants one bug after the other, and fails unless each is found.
#include "tests/sim/explore.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"

namespace longhaul::sim {
namespace {

struct Options {
  std::string scenario;
  std::optional<int> faults;
  uint64_t states = UINT64_MAX;
  uint64_t sample = 1;
  uint64_t seed = 1;
  uint64_t more = 1;
  std::optional<Planted> planted;
  bool all_plants = false;
};

Options options;

// What the search tries without flags, and the minimal number of states. A search that explores
// nothing must not pass.
struct Default {
  const char* scenario;
  int faults;
  uint64_t sample;
  uint64_t states_min;
};
constexpr Default kDefaults[] = {
    {"one_op", 2, 1, 250000},
    {"one_ring_op", 2, 30, 50000},
    {"one_mesh_op", 2, 60, 50000},
    {"signed", 1, 1, 1},         // early: no other scenario shows index_forgotten
    {"cancel", 1, 100, 110000},  // early: no other scenario shows cancel_forgotten
    {"abort_on_fault", 2, 20, 30000},
    {"given_up", 1, 240, 100000},
    {"two_members_of_one_peer", 2, 300, 20000},
    {"tag_again", 2, 250, 50000},
    {"tag_again_or_abort", 1, 30000, 50000},
    {"leave", 2, 3000, 30000},
    {"evict_one_of_two", 1, 1000, 10000},
    {"two_tags", 1, 1, 30000},
    {"join", 1, 1, 120000},
    {"evict", 1, 1, 120000},
    {"three_peers", 1, 2000, 5000},
    {"no_path", 1, 6000, 20000},
    {"join_during_an_op", 1, 2000000, 130000},
    {"join_refused", 1, 20, 100000},
    {"join_unanswered", 1, 1, 20000},
    {"silence", 1, 1, 15000},
    {"ring", 1, 3000, 150000},
    {"ring_during_an_op", 1, 90000, 140000},
    {"sync", 2, 100, 40000},
    {"sync_at_a_boundary", 2, 300, 40000},
    {"sync_of_three", 1, 1, 80000},
    {"sync_of_a_joiner", 1, 1, 80000},
    {"reduce_scatter", 1, 1, 4900},
    {"small_reduce_scatter", 1, 1, 3500},
    {"reduce_scatter_of_three", 1, 2000, 55000},
    {"all_gather", 1, 1, 4800},
    {"all_gather_of_three", 1, 700, 45000},
    {"unequal_all_gather", 1, 1, 5500},
    {"broadcast", 1, 1, 5000},
    {"reduce_and_gather", 1, 200, 28000},
    {"all_to_all_of_three", 1, 5000, 5000},
    {"scatter", 1, 1, 3500},
    {"barrier", 1, 1, 4900},
    {"send_recv", 1, 80, 45000},
    {"send_beside_a_third", 1, 3, 42000},
    {"two_of_three", 1, 3, 70000},
    {"weights", 1, 1, 5600},
    {"weights_of_three", 1, 8000, 25000},
    {"cancel_small", 1, 100, 100000},
    {"cancel_before", 1, 400, 40000},
    {"two_cancel", 1, 2000, 200000},
    {"cancel_and_tag_again", 1, 500, 60000},
    {"cancels_cross", 0, 1, 80000},
    {"cancels_cross_at_a_host", 0, 1, 95000},
    {"cancel_the_rest_at_a_host", 1, 1, 130000},
    {"cancel_and_a_boundary", 1, 40, 30000},
    {"cancel_and_another_kind", 1, 400, 40000},
    {"cancel_of_a_set", 0, 1, 23000},
    {"beside_a_boundary", 1, 2000, 14000},
    {"refused", 1, 5, 10000},
    {"refused_small_and_leaves", 1, 5, 20000},
    {"refused_at_a_host", 1, 20, 30000},
    {"refused_to_two", 1, 350, 50000},
    {"refused_and_left_out", 1, 1, 10000},
    {"refused_in_two_steps", 1, 1, 10000},
    {"refused_and_cancelled", 1, 500, 30000},
    {"refused_and_cancelled_at_a_host", 1, 20, 30000},
};

constexpr uint64_t kPlantedStatesMax = 300000;

const ExploreScenario& Find(const std::string& name) {
  for (const ExploreScenario& scenario : ExploreScenarios()) {
    if (scenario.name == name) return scenario;
  }
  LH_CHECK(false) << "there is no scenario " << name;
  __builtin_unreachable();
}

void Print(const std::string& name, const ExploreOptions& explore, const ExploreResult& result) {
  uint64_t faults = result.faults_within;
  for (const uint64_t count : result.faults) faults += count;
  std::printf("%s: faults<=%d sample=%" PRIu64 " states=%" PRIu64 " moves=%" PRIu64
              " terminal=%" PRIu64 " depth=%" PRIu64 " faults_tried=%" PRIu64 " within=%" PRIu64
              " cpu_ms=%ld%s\n",
              name.c_str(), explore.faults, explore.sample, result.states, result.moves,
              result.terminal, result.depth_max, faults, result.faults_within,
              static_cast<long>(std::clock() / (CLOCKS_PER_SEC / 1000)),
              result.complete ? "" : " (not complete)");
  std::fflush(stdout);
}

// Bazel may divide the test among several processes (shard_count). Part `number` of the work, which
// counts from 0, belongs to one of them.
bool IsMine(size_t number) {
  const char* const total = std::getenv("TEST_TOTAL_SHARDS");
  const char* const index = std::getenv("TEST_SHARD_INDEX");
  if (total == nullptr || index == nullptr) return true;
  return number % std::strtoul(total, nullptr, 10) == std::strtoul(index, nullptr, 10);
}

// Tells Bazel that this program knows of shards.
void ConfirmShards() {
  const char* const path = std::getenv("TEST_SHARD_STATUS_FILE");
  if (path == nullptr) return;
  std::FILE* const file = std::fopen(path, "w");
  LH_CHECK(file != nullptr) << path;
  (void)std::fclose(file);
}

// Returns true if the search failed.
bool RunChild(const std::string& name, const ExploreOptions& explore, uint64_t states_min) {
  std::fflush(nullptr);
  const pid_t child = fork();
  LH_CHECK(child >= 0);
  if (child == 0) {
    if (options.all_plants) {
      // With planted bugs, the stories of failures are not wanted.
      LH_CHECK(std::freopen("/dev/null", "w", stdout) != nullptr);
    }
    const ExploreResult result = Explore(Find(name), explore);
    Print(name, explore, result);
    LH_CHECK(result.terminal > 0) << "no run of " << name << " came to its end";
    LH_CHECK(result.states >= states_min || explore.states_max != UINT64_MAX)
        << name << " has " << result.states << " states, which is too few";
    std::fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  LH_CHECK(waitpid(child, &status, 0) == child);
  return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}

bool RunAll(Planted planted) {
  bool failed = false;
  size_t number = 0;
  for (const Default& run : kDefaults) {
    // With planted bugs, each process looks for some of the bugs, in all scenarios.
    if (planted == Planted::kNone && !IsMine(number++)) continue;
    if (!options.scenario.empty() && options.scenario != run.scenario) continue;
    ExploreOptions explore;
    explore.faults = options.faults.value_or(run.faults);
    explore.sample =
        options.faults ? options.sample : std::max<uint64_t>(1, run.sample / options.more);
    explore.states_max = options.states;
    explore.seed = options.seed;
    explore.planted = planted;
    if (planted != Planted::kNone) {
      // One fault shows each planted bug, in the smallest runs.
      explore.faults = options.faults.value_or(1);
      explore.states_max = std::min(explore.states_max, kPlantedStatesMax);
    }
    failed = RunChild(run.scenario, explore, options.faults ? 0 : run.states_min) || failed;
    if (failed && planted != Planted::kNone) return true;
  }
  return failed;
}

bool Parse(const char* argument) {
  const auto value = [&](const char* flag) -> const char* {
    const size_t length = std::strlen(flag);
    return std::strncmp(argument, flag, length) == 0 ? argument + length : nullptr;
  };
  const auto number = [](const char* text) { return std::strtoull(text, nullptr, 10); };
  if (const char* text = value("--scenario=")) {
    Find(options.scenario = text);
  } else if (const char* faults = value("--faults=")) {
    options.faults = static_cast<int>(number(faults));
  } else if (const char* states = value("--states=")) {
    options.states = number(states);
  } else if (const char* sample = value("--sample=")) {
    options.sample = number(sample);
  } else if (const char* seed = value("--seed=")) {
    options.seed = number(seed);
  } else if (const char* more = value("--more=")) {
    options.more = std::max<uint64_t>(1, number(more));
  } else if (const char* plant = value("--plant=")) {
    for (const PlantedName& name : kPlanted) {
      if (std::strcmp(name.name, plant) == 0) options.planted = name.planted;
    }
    return options.planted.has_value();
  } else if (std::strcmp(argument, "--all_plants") == 0) {
    options.all_plants = true;
  } else {
    return false;
  }
  return true;
}

bool FindAllPlants() {
  bool all_found = true;
  size_t number = 0;
  for (const PlantedName& name : kPlanted) {
    if (!name.explored || !IsMine(number++)) continue;
    const bool found = RunAll(name.planted);
    std::printf("%s: %s\n", name.name, found ? "found" : "NOT FOUND");
    all_found = all_found && found;
  }
  return all_found;
}

int Main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (Parse(argv[i])) continue;
    std::fprintf(stderr,
                 "%s: unknown; there are --scenario=NAME --faults=N --states=N --sample=N --seed=N "
                 "--more=N --plant=NAME --all_plants\n",
                 argv[i]);
    return 2;
  }
  ConfirmShards();
  if (options.all_plants) return FindAllPlants() ? 0 : 1;
  return RunAll(options.planted.value_or(Planted::kNone)) ? 1 : 0;
}

}  // namespace
}  // namespace longhaul::sim

int main(int argc, char** argv) { return longhaul::sim::Main(argc, argv); }
