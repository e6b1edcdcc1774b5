// What both daemons do around their main(): flags, logs, signals, ready file.
//
//   int main(int argc, char** argv) {
//     longhaul::InitDaemon(argc, argv, {"longhaul-x", "Does x.\n\nUsage: ...", "LONGHAUL_X_"});
//     ... bind and serve ...
//     if (absl::Status ready = AnnounceReady({{"grpc", address}}); !ready.ok()) return
//     FatalExit(ready); WaitForStopSignal();
//     ... drain; a second signal ends the process by itself ...
//   }
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/daemon/flags.h"

namespace longhaul {

// First thing in main(), before any thread exists.
//
// Parses the flags, --log-format, --log-level and --ready-file among them (exits: 0 for --help and
// --version, 2 for bad usage, which positional arguments are). Ignores SIGPIPE; blocks SIGTERM and
// SIGINT in this and all later threads, for StopSignalFd(). Raises the soft limit of open files to
// the hard one. Turns off Abseil's deadlock detector, which in the distribution's build costs
// most of a lock and aborts the process. Prints a stack trace when the process crashes. Removes a
// ready file that an earlier process left.
void InitDaemon(int argc, char** argv, const ProgramInfo& info);

// Readable when SIGTERM or SIGINT came (struct signalfd_siginfo). One for the process, made at the
// first call after InitDaemon(), never closed.
int StopSignalFd();

// Blocks until SIGTERM or SIGINT comes, and gives its number. From then on another one ends the
// process at once, with exit code 1.
int WaitForStopSignal();

// Writes --ready-file, if it was given: a JSON object of these strings. Atomic: a reader sees no
// file or the whole of it.
absl::Status AnnounceReady(const std::vector<std::pair<std::string, std::string>>& addresses);

// The same for any path. Unavailable: says which step failed and why.
absl::Status WriteReadyFile(const std::string& path,
                            const std::vector<std::pair<std::string, std::string>>& addresses);

// Logs the failure and gives main()'s exit code for it: 2 for InvalidArgument (bad usage), else 1.
int FatalExit(const absl::Status& status);

}  // namespace longhaul
