// lh-wan: wide-area links between network namespaces of one machine. See tests/wan/README.md.
//
// Exit codes: 0 ended by SIGTERM or SIGINT, 1 runtime failure, 2 bad usage.
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>

#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "base/daemon/flags.h"
#include "base/log.h"
#include "tests/wan/emulator.h"

ABSL_FLAG(std::string, control, "", "path of the control socket");
ABSL_FLAG(uint64_t, seed, 1, "seed of everything random");
ABSL_FLAG(bool, offload, true, "hosts hand over super-packets of up to 64 KiB (TSO, USO)");
ABSL_FLAG(uint32_t, tick_us, 500,
          "microseconds between two looks at hosts and due packets; a packet may be late by so "
          "much, and costs half as much or less; 0: handle every packet at once");
ABSL_FLAG(bool, realtime, true,
          "run with real-time priority, so that packets are on time on a busy machine");

namespace longhaul::wan {
namespace {

const ProgramInfo kInfo{
    "lh-wan",
    "Carries packets between TUN devices in network namespaces as wide-area links would: with\n"
    "delay, rates, queues, loss, a rate for each flow, and outages. Commands at the control\n"
    "socket, one per line, add hosts and change links (tests/wan/commands.h).\n"
    "\n"
    "  lh-wan --control=PATH\n"
    "\n"
    "Exit codes: 0 ended by SIGTERM or SIGINT, 1 runtime failure, 2 bad usage.",
    "LONGHAUL_WAN_"};

void RunBeforeOthers() {
  const sched_param priority = {.sched_priority = 1};
  if (sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &priority) != 0) {
    Log(LogLevel::kWarning, absl::StrCat("no real-time scheduling, packets may come late",
                                         LogField("reason", strerror(errno))));
  }
}

int StopFd() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  return signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
}

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, std::string(status.message()));
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

int Main(int argc, char** argv) {
  if (!ParseFlagsOrExit(argc, argv, kInfo).empty() || absl::GetFlag(FLAGS_control).empty()) {
    ExitUsage(kInfo, "give --control=PATH and nothing else; see lh-wan --help");
  }
  const int stop_fd = StopFd();
  // By default Linux lets timers be late by 50 us. Here that is too late.
  prctl(PR_SET_TIMERSLACK, 1);
  const auto emulator = Emulator::Make({.control = absl::GetFlag(FLAGS_control),
                                        .seed = absl::GetFlag(FLAGS_seed),
                                        .offload = absl::GetFlag(FLAGS_offload),
                                        .tick = absl::GetFlag(FLAGS_tick_us) * kMicrosecond});
  if (!emulator.ok()) return Fail(emulator.status());
  if (absl::GetFlag(FLAGS_realtime)) RunBeforeOthers();
  const absl::Status ended = (*emulator)->Run(stop_fd);
  return ended.ok() ? 0 : Fail(ended);
}

}  // namespace
}  // namespace longhaul::wan

int main(int argc, char** argv) { return longhaul::wan::Main(argc, argv); }
