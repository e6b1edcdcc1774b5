// The scenarios of figures.md: worlds, what they do, and what the ops may cost there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/paths/world.h"

namespace longhaul::paths_model {

// Before an op, the rates of the last host become this part of what they were at first.
struct Change {
  int op = 0;
  double part = 1;
};

struct Scenario {
  std::string name;
  WorldOptions world;
  int ops = 0;
  int measured = 0;    // so many ops at the end give the figures
  double pause_s = 0;  // between ops
  std::vector<Change> changes;
  // The figures are at most these.
  double times_max = 0;
  double repeated_max = 0;  // percent
};

struct Figures {
  // The median op and the slowest: its time, divided by the least time that these links allow and
  // four latencies.
  double times = 0;
  double times_worst = 0;
  // What each host sent in all of these ops, divided by what it would send with the best shares:
  // the least and the most.
  double sent_least = 0;
  double sent_most = 0;
  // Lanes of each link at the end: the fewest and the most.
  uint32_t lanes_fewest = UINT32_MAX;
  uint32_t lanes_most = 0;
  double repeated = 0;  // percent of the bytes, by all hosts
  // After each change: how many ops until two in a row are within 1.25. -1: none.
  std::vector<int> adapted;
};

const std::vector<Scenario>& Scenarios();
Figures Measure(const Scenario& scenario, uint64_t seed);

// The figures of several runs: the median of each; of what is an extreme, the extreme.
Figures Summary(const std::vector<Figures>& runs);

// The line of figures.md for a scenario.
std::string Row(const Scenario& scenario, const Figures& figures);
// What stands above the lines.
std::string Head();

}  // namespace longhaul::paths_model
