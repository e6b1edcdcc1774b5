#include "tests/paths/scenarios.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace longhaul::paths_model {
namespace {

constexpr uint64_t kMiB = 1 << 20;

// `hosts` with access links of `mbit`, the last ones with parts of it, up and down.
WorldOptions Hosts(int hosts, double mbit, double delay_ms, std::vector<AccessRates> parts = {}) {
  WorldOptions world;
  world.hosts.assign(hosts, {mbit, mbit});
  for (size_t i = 0; i < parts.size(); ++i) {
    AccessRates& rates = world.hosts[world.hosts.size() - parts.size() + i];
    rates = {mbit * parts[i].up_mbit, mbit * parts[i].down_mbit};
  }
  world.between.one_way = static_cast<Nanos>(delay_ms * 1e6);
  return world;
}

WorldOptions With(WorldOptions world, uint64_t mib) {
  world.op_bytes = mib * kMiB;
  return world;
}

WorldOptions Losing(WorldOptions world, double loss) {
  world.between.loss = loss;
  return world;
}

WorldOptions Policed(WorldOptions world, double connection_mbit) {
  world.between.connection_mbit = connection_mbit;
  return world;
}

WorldOptions WithBbr(WorldOptions world) {
  world.offers_bbr = true;
  return world;
}

WorldOptions WithRival(WorldOptions world) {
  world.rival = true;
  return world;
}

WorldOptions WithSlowLane(WorldOptions world, double mbit) {
  world.slow_lane_mbit = mbit;
  return world;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The most that a change of a rule may make of `times`, and of the percent that is repeated: a
// tenth and half more than what was measured when a rule was last changed.
struct Bound {
  const char* scenario;
  double times;
  double repeated;
};
constexpr Bound kBounds[] = {
    {"equal, 20 ms", 1.19, 0.5},
    {"equal, 80 ms", 1.18, 0.5},
    {"equal, 200 Mbit/s, 80 ms", 1.50, 0.5},
    {"one at 0.7, 80 ms", 1.41, 0.5},
    {"one at half, 20 ms", 1.20, 0.5},
    {"one at half, 80 ms", 1.32, 0.5},
    {"two at half, 80 ms", 1.24, 0.5},
    {"one at a quarter, 20 ms", 1.20, 0.5},
    {"one at a quarter, 80 ms", 1.35, 1.1},
    {"one sends a fifth, 20 ms", 1.20, 0.6},
    {"one receives a fifth, 20 ms", 1.19, 1.0},
    {"one receives a fifth, 80 ms", 1.30, 1.3},
    {"8 hosts, one at half, 20 ms", 1.25, 0.5},
    {"8 hosts, one at a quarter, 80 ms", 1.47, 1.1},
    {"64 MiB, equal, 20 ms", 1.20, 0.5},
    {"64 MiB, one at half, 80 ms", 1.22, 0.5},
    {"64 MiB, one at a quarter, 80 ms", 1.22, 0.8},
    {"4 MiB, equal, 20 ms", 1.20, 0.5},
    {"pauses of 10 s, equal, 80 ms", 1.35, 0.6},
    {"falls to half, recovers, 20 ms", 1.34, 0.5},
    {"falls to a quarter, recovers, 80 ms", 1.32, 0.5},
    {"10 Mbit/s a connection, 40 ms", 1.23, 0.5},
    {"0.1 % lost at random, 40 ms", 1.28, 0.5},
    {"another program sends, 20 ms", 1.26, 0.5},
    {"a slow lane, 40 ms", 1.25, 0.5},
    {"two hosts, 200 Mbit/s, 100 ms", 1.67, 2.0},
    {"1 % lost at random, bbr offered, 40 ms", 1.65, 1.6},
    {"two hosts, 500 Mbit/s, 1 % lost, bbr offered, 100 ms", 1.99, 30.9},
    {"two hosts, 1 % lost, bbr offered, 100 ms", 2.30, 43.5},
};

std::vector<Scenario> Bounded(std::vector<Scenario> scenarios) {
  for (Scenario& scenario : scenarios) {
    for (const Bound& bound : kBounds) {
      if (scenario.name != bound.scenario) continue;
      scenario.times_max = bound.times;
      scenario.repeated_max = bound.repeated;
    }
  }
  return scenarios;
}

}  // namespace

const std::vector<Scenario>& Scenarios() {
  static const auto* const scenarios = new std::vector<Scenario>(Bounded({
      {"equal, 20 ms", Hosts(4, 100, 20), 24, 12},
      {"equal, 80 ms", Hosts(4, 100, 80), 30, 12},
      {"equal, 200 Mbit/s, 80 ms", Hosts(4, 200, 80), 40, 12},
      {"one at 0.7, 80 ms", Hosts(4, 100, 80, {{.7, .7}}), 30, 12},
      {"one at half, 20 ms", Hosts(4, 100, 20, {{.5, .5}}), 24, 12},
      {"one at half, 80 ms", Hosts(4, 100, 80, {{.5, .5}}), 30, 12},
      {"two at half, 80 ms", Hosts(4, 100, 80, {{.5, .5}, {.5, .5}}), 30, 12},
      {"one at a quarter, 20 ms", Hosts(4, 100, 20, {{.25, .25}}), 20, 10},
      {"one at a quarter, 80 ms", Hosts(4, 100, 80, {{.25, .25}}), 20, 10},
      {"one sends a fifth, 20 ms", Hosts(4, 100, 20, {{.2, 1}}), 20, 10},
      {"one receives a fifth, 20 ms", Hosts(4, 100, 20, {{1, .2}}), 20, 10},
      {"one receives a fifth, 80 ms", Hosts(4, 100, 80, {{1, .2}}), 20, 10},
      {"8 hosts, one at half, 20 ms", Hosts(8, 100, 20, {{.5, .5}}), 24, 12},
      {"8 hosts, one at a quarter, 80 ms", Hosts(8, 100, 80, {{.25, .25}}), 14, 7},
      {"64 MiB, equal, 20 ms", With(Hosts(4, 100, 20), 64), 12, 6},
      {"64 MiB, one at half, 80 ms", With(Hosts(4, 100, 80, {{.5, .5}}), 64), 12, 6},
      {"64 MiB, one at a quarter, 80 ms", With(Hosts(4, 100, 80, {{.25, .25}}), 64), 10, 5},
      {"4 MiB, equal, 20 ms", With(Hosts(4, 100, 20), 4), 80, 40},
      {"pauses of 10 s, equal, 80 ms", Hosts(4, 100, 80), 24, 12, 10},
      {"falls to half, recovers, 20 ms", Hosts(4, 100, 20), 48, 12, 0, {{18, .5}, {33, 1}}},
      {"falls to a quarter, recovers, 80 ms", Hosts(4, 100, 80), 52, 12, 0, {{22, .25}, {36, 1}}},
      {"10 Mbit/s a connection, 40 ms", Policed(With(Hosts(3, 200, 40), 32), 10), 24, 12},
      {"0.1 % lost at random, 40 ms", Losing(Hosts(3, 100, 40), .001), 30, 12},
      {"another program sends, 20 ms", WithRival(Hosts(4, 100, 20)), 40, 12},
      {"a slow lane, 40 ms", WithSlowLane(Hosts(4, 100, 40), 1), 24, 12},
      {"two hosts, 200 Mbit/s, 100 ms", With(Hosts(2, 200, 100), 32), 24, 12},
      {"1 % lost at random, bbr offered, 40 ms", WithBbr(Losing(Hosts(3, 100, 40), .01)), 60, 12},
      {"two hosts, 1 % lost, bbr offered, 100 ms",
       WithBbr(Losing(With(Hosts(2, 200, 100), 32), .01)), 24, 12},
      {"two hosts, 500 Mbit/s, 1 % lost, bbr offered, 100 ms",
       WithBbr(Losing(With(Hosts(2, 500, 100), 32), .01)), 24, 12},
  }));
  return *scenarios;
}

Figures Measure(const Scenario& scenario, uint64_t seed) {
  WorldOptions options = scenario.world;
  options.seed = seed;
  World world(options);
  const auto hosts = static_cast<int>(options.hosts.size());
  const AccessRates last = options.hosts.back();
  const double latencies = 4 * static_cast<double>(options.between.one_way) * 1e-9;
  Figures figures;
  std::vector<double> times;
  std::vector<uint64_t> sent(hosts);
  uint64_t all = 0;
  uint64_t repeated = 0;
  const auto sum = [&](auto of) {
    uint64_t total = 0;
    for (int i = 0; i < hosts; ++i) total += (world.tcp().*of)(i);
    return total;
  };
  for (int op = 0; op < scenario.ops; ++op) {
    for (const Change& change : scenario.changes) {
      if (change.op == op) {
        world.SetRates(hosts - 1, {last.up_mbit * change.part, last.down_mbit * change.part});
      }
    }
    if (op == scenario.ops - scenario.measured) {
      for (int i = 0; i < hosts; ++i) sent[i] = world.tcp().sent(i) - world.tcp().repeated(i);
      all = sum(&TcpModel::sent);
      repeated = sum(&TcpModel::repeated);
    }
    times.push_back(world.DoOp() / (world.Bound() + latencies));
    if (scenario.pause_s != 0) world.Pause(scenario.pause_s);
  }
  for (const Change& change : scenario.changes) {
    int first = change.op + 1;
    while (first + 1 < scenario.ops && std::max(times[first], times[first + 1]) > 1.25) ++first;
    figures.adapted.push_back(first + 1 < scenario.ops ? first - change.op : -1);
  }
  const std::vector<double> measured(times.end() - scenario.measured, times.end());
  figures.times = Median(measured);
  figures.times_worst = *std::max_element(measured.begin(), measured.end());
  const Shares best = world.BestShares();
  figures.sent_least = 1e9;
  for (int i = 0; i < hosts; ++i) {
    const double share = best.empty() ? 1.0 / hosts : static_cast<double>(best[i]) / kShareUnits;
    const double due = (1 + (hosts - 2) * share) * static_cast<double>(options.op_bytes);
    const uint64_t did = world.tcp().sent(i) - world.tcp().repeated(i) - sent[i];
    const double part = static_cast<double>(did) / (scenario.measured * due);
    figures.sent_least = std::min(figures.sent_least, part);
    figures.sent_most = std::max(figures.sent_most, part);
    const auto [fewest, most] = world.Lanes(i);
    figures.lanes_fewest = std::min(figures.lanes_fewest, fewest);
    figures.lanes_most = std::max(figures.lanes_most, most);
  }
  figures.repeated = 100 * static_cast<double>(sum(&TcpModel::repeated) - repeated) /
                     static_cast<double>(sum(&TcpModel::sent) - all);
  return figures;
}

Figures Summary(const std::vector<Figures>& runs) {
  const auto median = [&](auto of) {
    std::vector<double> values;
    for (const Figures& run : runs) values.push_back(static_cast<double>(run.*of));
    return Median(values);
  };
  Figures figures = runs.front();
  figures.times = median(&Figures::times);
  figures.sent_least = median(&Figures::sent_least);
  figures.sent_most = median(&Figures::sent_most);
  figures.repeated = median(&Figures::repeated);
  for (const Figures& run : runs) {
    figures.times_worst = std::max(figures.times_worst, run.times_worst);
    figures.lanes_fewest = std::min(figures.lanes_fewest, run.lanes_fewest);
    figures.lanes_most = std::max(figures.lanes_most, run.lanes_most);
  }
  return figures;
}

std::string Row(const Scenario& scenario, const Figures& figures) {
  std::vector<std::string> adapted;
  for (const int ops : figures.adapted) adapted.push_back(ops < 0 ? "never" : absl::StrCat(ops));
  return absl::StrFormat("| %s | %.2f | %.2f | %.2f to %.2f | %d to %d | %.2f %% | %s |\n",
                         scenario.name, figures.times, figures.times_worst, figures.sent_least,
                         figures.sent_most, figures.lanes_fewest, figures.lanes_most,
                         figures.repeated, absl::StrJoin(adapted, ", "));
}

std::string Head() {
  return R"(# Figures of peerd/paths over modelled paths
Read this page if you change how hosts use long ways ([paths.md](../../docs/paths.md)). Afterwards you see what a change
of a rule does to hosts that all follow it. The code makes this page; after a change, run

    bazel run //tests/paths:print_figures >tests/paths/figures.md

Hosts with access links of 100 Mbit/s and queues of 50 ms (unless a line says something else) do all-reduces of 16 MiB
in virtual time, with cubic. *times*: the median of the last ops, divided by the least time that these links allow and
four latencies; *worst*: the slowest of these ops. *sent*: what each host sent, divided by what it would send with the
best shares. *lanes*: of each link, at the end. *repeated*: by TCP. *adapted*: how many ops after each change until two
in a row are within 1.25 times the best. One run each, so small differences are chance: before you decide by them,
look at the medians of many runs (`bazel run //tests/paths:print_figures -- --seeds=10`).

| hosts | times | worst | sent | lanes | repeated | adapted |
| --- | --- | --- | --- | --- | --- | --- |
)";
}

}  // namespace longhaul::paths_model
