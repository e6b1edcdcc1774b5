// lh-replay: gives the events of a journal (longhaul-coordinator --journal=FILE) to a new core of
// the coordinator, and compares the core's states with the recorded ones.
//
// Exit codes: 0 all states are the recorded ones; 1 a state differs, or the journal is damaged; 2
// bad usage.
#include <stdint.h>
#include <stdio.h>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "base/daemon/flags.h"
#include "base/log.h"
#include "coordinator/journal/journal.h"

ABSL_FLAG(uint64_t, until, 0, "stop after so many events; 0: read the whole journal");
ABSL_FLAG(bool, print, false, "print each event with the actions of the core");

namespace longhaul::coordinator {
namespace {

const ProgramInfo kInfo{
    "lh-replay",
    "Makes the decisions of a coordinator again, from its journal. Fails at the first state that\n"
    "differs from the recorded one.\n"
    "\n"
    "  lh-replay FILE [--until=N] [--print]\n"
    "\n"
    "Exit codes: 0 the same states, 1 another state or a damaged journal, 2 bad usage.",
    "LONGHAUL_REPLAY_"};

void PrintStep(uint64_t number, Tick now, const Event& event, const std::vector<Action>& actions) {
  printf("%llu at %lld us: %s\n", static_cast<unsigned long long>(number),
         static_cast<long long>(now.us), Describe(event).c_str());
  for (const Action& action : actions) printf("    %s\n", Describe(action).c_str());
}

void PrintGroups(const Overview& overview) {
  for (const GroupView& group : overview.groups) {
    size_t admitted = 0;
    for (const MemberView& member : group.members) admitted += member.joined ? 1 : 0;
    printf("group %s epoch=%s preparing=%s members=%zu pending=%zu%s%s\n",
           ToString(group.group).c_str(), ToString(group.committed).c_str(),
           ToString(group.preparing).c_str(), admitted, group.members.size() - admitted,
           group.waiting_for.empty() ? "" : ": ", group.waiting_for.c_str());
  }
}

int Main(int argc, char** argv) {
  const std::vector<std::string> arguments = ParseFlagsOrExit(argc, argv, kInfo);
  if (arguments.size() != 1) ExitUsage(kInfo, "give one journal; see lh-replay --help");
  ReplayOptions options;
  if (absl::GetFlag(FLAGS_until) > 0) options.until = absl::GetFlag(FLAGS_until);
  if (absl::GetFlag(FLAGS_print)) options.stepped = PrintStep;
  const auto report = Replay(arguments[0], options);
  fflush(stdout);
  if (!report.ok()) {
    fprintf(stderr, "lh-replay: %s\n", std::string(report.status().message()).c_str());
    return 1;
  }
  PrintGroups(report->overview);
  printf("replayed events=%llu digests=%llu release=%s%s%s%s\n",
         static_cast<unsigned long long>(report->events),
         static_cast<unsigned long long>(report->digests), report->version.c_str(),
         report->torn.empty() ? "" : "; ", report->torn.c_str(),
         report->limit_reached ? "; the journal reached its limit and ends there" : "");
  return 0;
}

}  // namespace
}  // namespace longhaul::coordinator

int main(int argc, char** argv) { return longhaul::coordinator::Main(argc, argv); }
