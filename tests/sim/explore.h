// Exhaustive search of small runs: every order of events, with a bounded number of faults at every
// place.
//
// The search goes depth first over ExploreState, through each state once (by digest). With `sample`
// above 1, a path that may have only one more fault tries one in `sample` of the possible last
// faults, chosen by digest and seed. All other moves are tried.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/sim/explore_state.h"

namespace longhaul::sim {

struct ExploreOptions {
  int faults = 1;  // maximal number on a path
  uint64_t states_max = UINT64_MAX;
  uint64_t sample = 1;
  uint64_t seed = 1;
  Planted planted = Planted::kNone;
};

struct ExploreResult {
  uint64_t states = 0;     // different states
  uint64_t moves = 0;      // all moves made, also to states seen before
  uint64_t terminal = 0;   // states in which every call is answered
  uint64_t depth_max = 0;  // longest path, in moves
  bool complete = true;    // false: stopped at states_max
  std::array<uint64_t, static_cast<size_t>(Move::Kind::kCount)> faults{};  // tried, by kind
  uint64_t faults_within = 0;  // a peer or the coordinator died in the middle of an event
};

const std::vector<ExploreScenario>& ExploreScenarios();

// Searches the scenario. If a check fails, prints the moves of the path and ends the process.
ExploreResult Explore(const ExploreScenario& scenario, const ExploreOptions& options);

}  // namespace longhaul::sim
