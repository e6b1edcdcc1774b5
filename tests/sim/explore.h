// Exhaustive search of small runs: every order of what can happen, with a bounded number of faults
// at every place.
//
// Depth first over ExploreState, each state once (by digest). With `sample` above 1 only one in so
// many of the last faults of a path is tried, chosen by digest and seed: the rest of the search is
// complete.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/sim/explore_state.h"

namespace longhaul::sim {

struct ExploreOptions {
  int faults = 1;  // at most, on a path
  uint64_t states_max = UINT64_MAX;
  uint64_t sample = 1;
  uint64_t seed = 1;
  Planted planted = Planted::kNone;
};

struct ExploreResult {
  uint64_t states = 0;     // different ones
  uint64_t moves = 0;      // made; those that led to a state seen before included
  uint64_t terminal = 0;   // states in which everything had been answered
  uint64_t depth_max = 0;  // moves of a path
  bool complete = true;    // false: states_max came first
  std::array<uint64_t, static_cast<size_t>(Move::Kind::kCount)> faults{};  // tried, by kind
  uint64_t faults_within = 0;  // tried between two things that a receiver does
};

const std::vector<ExploreScenario>& ExploreScenarios();

// Ends the process with the story of the path if something that must hold does not.
ExploreResult Explore(const ExploreScenario& scenario, const ExploreOptions& options);

}  // namespace longhaul::sim
