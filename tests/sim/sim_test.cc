// Runs each seed twice. The checkers must find nothing, and both runs must be the same.
//
//   bazel run -c opt //tests/sim:sim_test -- --seeds=20000 --first_seed=1
//   bazel run //tests/sim:sim_test -- --first_seed=17 --seeds=1 --trace
//
// --plant=NAME plants a bug. --all_plants plants one bug after the other, and fails unless each is
// found.
//
// Seeds run in child processes, so that a seed that fails does not hide later failures.
#include <sys/wait.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "tests/sim/simulation.h"

namespace longhaul::sim {
namespace {

struct Options {
  uint64_t first_seed = 1;
  uint64_t seeds = 200;
  bool trace = false;
  Planted planted = Planted::kNone;
  bool all_plants = false;
};

Options options;

const char* PlantedText() {
  for (const PlantedName& name : kPlanted) {
    if (name.planted == options.planted) return name.name;
  }
  return "";
}

void SayHowToRepeat(uint64_t seed) {
  const bool planted = options.planted != Planted::kNone;
  std::fprintf(stderr,
               "seed %" PRIu64 " failed: bazel run //tests/sim:sim_test -- --first_seed=%" PRIu64
               " --seeds=1 --trace%s%s\n",
               seed, seed, planted ? " --plant=" : "", PlantedText());
}

// Sums over seeds of what happened. A child hands its sums to the parent.
struct Totals {
  uint64_t seeds = 0, events = 0, ok = 0, by_mesh = 0, by_ring = 0, other_kinds = 0, aborted = 0,
           unfit = 0, refused = 0, too_few = 0, removed = 0, retries = 0, epochs = 0, freezes = 0,
           fates = 0, tunnels = 0, cohorts = 0, late = 0, syncs_ok = 0, syncs_aborted = 0,
           syncs_refused = 0, syncs_fetched = 0, syncs_resumed = 0, background = 0, taken = 0,
           rings = 0, assemblies = 0, of_parts = 0, cancelled = 0, with_shares = 0, with_none = 0,
           encoded = 0, chosen = 0, not_chosen = 0, with_errors = 0, sent_again = 0,
           refused_to_another = 0;
  int64_t virtual_us = 0;
};

void RunTwice(uint64_t seed, Totals* totals) {
  const auto mode = options.trace ? Story::Mode::kPrint : Story::Mode::kQuiet;
  const SeedResult first = RunSeed(seed, options.planted, mode);
  const SeedResult second = RunSeed(seed, options.planted, Story::Mode::kQuiet);
  LH_CHECK(first.digest == second.digest && first.events == second.events)
      << "two runs of one seed differ: " << first.events << " and " << second.events << " events";
  ++totals->seeds;
  totals->events += first.events;
  totals->ok += first.counts.ok;
  totals->by_mesh += first.counts.by_mesh;
  totals->by_ring += first.counts.by_ring;
  totals->other_kinds += first.counts.other_kinds;
  totals->unfit += first.counts.unfit;
  totals->of_parts += first.counts.of_parts;
  totals->cancelled += first.counts.cancelled;
  totals->refused_to_another += first.counts.refused_to_another;
  totals->with_shares += first.counts.with_shares;
  totals->with_none += first.counts.with_none;
  totals->encoded += first.counts.encoded;
  totals->chosen += first.counts.chosen;
  totals->not_chosen += first.counts.not_chosen;
  totals->with_errors += first.counts.with_errors;
  totals->sent_again += first.counts.sent_again;
  totals->aborted += first.counts.aborted;
  totals->refused += first.counts.refused;
  totals->too_few += first.counts.too_few;
  totals->removed += first.counts.removed;
  totals->retries += first.counts.retries;
  totals->epochs += first.counts.epochs;
  totals->freezes += first.counts.freezes;
  totals->fates += first.counts.committed_by_fate;
  totals->tunnels += first.counts.tunnels;
  totals->cohorts += first.counts.cohorts;
  totals->late += first.counts.late;
  totals->syncs_ok += first.counts.syncs_ok;
  totals->syncs_aborted += first.counts.syncs_aborted;
  totals->syncs_refused += first.counts.syncs_refused;
  totals->syncs_fetched += first.counts.syncs_fetched;
  totals->syncs_resumed += first.counts.syncs_resumed;
  totals->background += first.counts.background;
  totals->taken += first.counts.taken;
  totals->assemblies += first.counts.assemblies;
  totals->rings += first.counts.rings;
  totals->virtual_us += first.end.us;
}

// Runs seeds from `*next` on in a child process until one fails. Returns true if one failed.
// Afterwards *next is the first seed that has not run.
bool RunChild(uint64_t* next, uint64_t end, Totals* totals) {
  int pipe_fds[2];
  LH_CHECK(pipe(pipe_fds) == 0);
  std::fflush(nullptr);
  const pid_t child = fork();
  LH_CHECK(child >= 0);
  if (child == 0) {
    close(pipe_fds[0]);
    SetCheckHook([] { std::fflush(stdout); });
    for (uint64_t seed = *next; seed < end; ++seed) {
      Totals one;
      RunTwice(seed, &one);
      LH_CHECK(write(pipe_fds[1], &one, sizeof one) == sizeof one);
    }
    std::fflush(nullptr);
    _exit(0);
  }
  close(pipe_fds[1]);
  Totals one;
  while (read(pipe_fds[0], &one, sizeof one) == sizeof one) {
    ++*next;
    totals->seeds += one.seeds;
    totals->events += one.events;
    totals->ok += one.ok;
    totals->by_mesh += one.by_mesh;
    totals->by_ring += one.by_ring;
    totals->other_kinds += one.other_kinds;
    totals->unfit += one.unfit;
    totals->of_parts += one.of_parts;
    totals->cancelled += one.cancelled;
    totals->refused_to_another += one.refused_to_another;
    totals->with_shares += one.with_shares;
    totals->with_none += one.with_none;
    totals->encoded += one.encoded;
    totals->chosen += one.chosen;
    totals->not_chosen += one.not_chosen;
    totals->with_errors += one.with_errors;
    totals->sent_again += one.sent_again;
    totals->aborted += one.aborted;
    totals->refused += one.refused;
    totals->too_few += one.too_few;
    totals->removed += one.removed;
    totals->retries += one.retries;
    totals->epochs += one.epochs;
    totals->freezes += one.freezes;
    totals->fates += one.fates;
    totals->tunnels += one.tunnels;
    totals->cohorts += one.cohorts;
    totals->late += one.late;
    totals->syncs_ok += one.syncs_ok;
    totals->syncs_aborted += one.syncs_aborted;
    totals->syncs_refused += one.syncs_refused;
    totals->syncs_fetched += one.syncs_fetched;
    totals->syncs_resumed += one.syncs_resumed;
    totals->background += one.background;
    totals->taken += one.taken;
    totals->assemblies += one.assemblies;
    totals->rings += one.rings;
    totals->virtual_us += one.virtual_us;
  }
  close(pipe_fds[0]);
  int status = 0;
  LH_CHECK(waitpid(child, &status, 0) == child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return false;
  SayHowToRepeat((*next)++);
  return true;
}

bool Parse(const char* argument) {
  const auto value = [&](const char* flag) -> const char* {
    const size_t length = std::strlen(flag);
    return std::strncmp(argument, flag, length) == 0 ? argument + length : nullptr;
  };
  if (const char* text = value("--seeds=")) {
    options.seeds = std::strtoull(text, nullptr, 10);
    return true;
  }
  if (const char* text = value("--first_seed=")) {
    options.first_seed = std::strtoull(text, nullptr, 10);
    return true;
  }
  if (const char* text = value("--plant=")) {
    for (const PlantedName& name : kPlanted) {
      if (std::strcmp(name.name, text) == 0) options.planted = name.planted;
    }
    return options.planted != Planted::kNone;
  }
  if (std::strcmp(argument, "--trace") == 0) return options.trace = true;
  if (std::strcmp(argument, "--all_plants") == 0) return options.all_plants = true;
  return false;
}

// Runs the seeds, and stops after `failures_max` failures. Returns the number of failures.
uint64_t RunSeeds(uint64_t failures_max, Totals* totals) {
  uint64_t failed = 0;
  const uint64_t end = options.first_seed + options.seeds;
  for (uint64_t next = options.first_seed; next < end && failed < failures_max;) {
    if (RunChild(&next, end, totals)) ++failed;
  }
  return failed;
}

bool FindAllPlants() {
  bool all_found = true;
  for (const PlantedName& name : kPlanted) {
    options.planted = name.planted;
    Totals totals;
    std::fflush(nullptr);
    const bool found = RunSeeds(1, &totals) == 1;
    std::printf("%s: %s after %" PRIu64 " seeds\n", name.name, found ? "found" : "NOT FOUND",
                totals.seeds);
    all_found = all_found && found;
  }
  return all_found;
}

int Main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (Parse(argv[i])) continue;
    std::fprintf(stderr,
                 "%s: unknown; there are --seeds=N --first_seed=N --trace --plant=NAME "
                 "--all_plants\n",
                 argv[i]);
    return 2;
  }
  if (options.all_plants) return FindAllPlants() ? 0 : 1;
  Totals totals;
  const uint64_t failed = RunSeeds(20, &totals);
  std::printf("seeds=%" PRIu64 " failed=%" PRIu64 " events=%" PRIu64 " virtual_s=%" PRId64
              " ops_ok=%" PRIu64 " by_mesh=%" PRIu64 " by_ring=%" PRIu64 " other_kinds=%" PRIu64
              " aborted=%" PRIu64 " unfit=%" PRIu64 " refused=%" PRIu64 " too_few=%" PRIu64
              " removed=%" PRIu64 " retries=%" PRIu64 " epochs=%" PRIu64 " freezing=%" PRIu64
              " ops_committed_by_fate=%" PRIu64 " tunnels=%" PRIu64 " cohorts=%" PRIu64
              " deadlines_missed=%" PRIu64 " syncs_ok=%" PRIu64 " syncs_aborted=%" PRIu64
              " syncs_refused=%" PRIu64 " syncs_fetched=%" PRIu64 " syncs_resumed=%" PRIu64
              " background=%" PRIu64 " taken=%" PRIu64 " rings=%" PRIu64 " assemblies=%" PRIu64
              " of_parts=%" PRIu64 " cancelled=%" PRIu64 " with_shares=%" PRIu64
              " with_none=%" PRIu64 " encoded=%" PRIu64 " chosen=%" PRIu64 " not_chosen=%" PRIu64
              " with_errors=%" PRIu64 " sent_again=%" PRIu64 " refused_to_another=%" PRIu64 "\n",
              totals.seeds, failed, totals.events, totals.virtual_us / 1000000, totals.ok,
              totals.by_mesh, totals.by_ring, totals.other_kinds, totals.aborted, totals.unfit,
              totals.refused, totals.too_few, totals.removed, totals.retries, totals.epochs,
              totals.freezes, totals.fates, totals.tunnels, totals.cohorts, totals.late,
              totals.syncs_ok, totals.syncs_aborted, totals.syncs_refused, totals.syncs_fetched,
              totals.syncs_resumed, totals.background, totals.taken, totals.rings,
              totals.assemblies, totals.of_parts, totals.cancelled, totals.with_shares,
              totals.with_none, totals.encoded, totals.chosen, totals.not_chosen,
              totals.with_errors, totals.sent_again, totals.refused_to_another);
  // Among many seeds there are both.
  if (options.seeds >= 50 && (totals.by_mesh == 0 || totals.by_ring == 0)) {
    std::printf("no op went over the mesh, or none round the ring\n");
    return 1;
  }
  if (options.seeds >= 50 && (totals.other_kinds == 0 || totals.unfit == 0)) {
    std::printf("no op but all-reduces went well, or none was aborted for its world\n");
    return 1;
  }
  if (options.seeds >= 50 && (totals.with_shares == 0 || totals.with_none == 0)) {
    std::printf("no attempt had unequal shares, or none had a peer without a share\n");
    return 1;
  }
  if (options.seeds >= 50 && (totals.of_parts == 0 || totals.cancelled == 0)) {
    std::printf("no op of a part of the group went well, or none was cancelled\n");
    return 1;
  }
  if (options.seeds >= 50 && totals.refused_to_another == 0) {
    std::printf("no op ended because a call of it was refused\n");
    return 1;
  }
  if (options.seeds >= 50 &&
      (totals.encoded == 0 || totals.with_errors == 0 || totals.sent_again == 0)) {
    std::printf("no op with a codec went well, or none with an error, or none was redone\n");
    return 1;
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace longhaul::sim

int main(int argc, char** argv) { return longhaul::sim::Main(argc, argv); }
