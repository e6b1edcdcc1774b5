// What the main() of both daemons has in common: flags, logs, signals, the ready file, and what the
// service manager is told.
//
//   int main(int argc, char** argv) {
//     longhaul::InitDaemon(argc, argv, {"longhaul-x", "Does x.\n\nUsage: ...", "LONGHAUL_X_"});
//     // Bind and serve.
//     const absl::Status ready = AnnounceReady({{"grpc", address}});
//     if (!ready.ok()) return FatalExit(ready);
//     WaitForStopSignal();
//     TheServiceManager().Stopping(longest);
//     // Drain. A second signal ends the process.
//   }
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/daemon/flags.h"

namespace longhaul {

// Call this first in main(), before there is a second thread. InitDaemon()
// - parses the flags, among them --log-format, --log-level, --ready-file and --dump-dir. It exits
//   with 0 for --help and --version, and with 2 for wrong usage, such as positional arguments
// - ignores SIGPIPE and SIGXFSZ, so that a write fails instead, and SIGUSR1 and SIGUSR2
// - blocks the signals that ask for a stop, in this and all later threads, for StopSignalFd():
//   SIGTERM and SIGINT; SIGHUP, unless nohup has it ignored; and SIGXCPU, of a limit of processor
//   time
// - raises the soft limit of open files to the hard limit
// - turns off the deadlock detector of Abseil. Debian builds Abseil with the detector on. It makes
//   locks several times slower, and aborts the process when locks are taken in an order that might
//   deadlock
// - forbids core dumps and debuggers of the same user, unless --core-dumps is given, because the
//   memory of a daemon holds tokens and keys, and tensors
// - makes a crash print a stack trace, and write what base/daemon/dumps.h says
// - removes a ready file that an earlier process left
void InitDaemon(int argc, char** argv, const ProgramInfo& info);

// Returns a signalfd that is readable when a signal that asks for a stop has come. The process has
// one such descriptor. The first call after InitDaemon() makes it, and it is never closed.
int StopSignalFd();

// Waits for a signal that asks for a stop and returns its number. Meanwhile calls `each` once in
// each `period`; 0: never. Afterwards another one, but SIGHUP, ends the process at once, with exit
// code 1.
int WaitForStopSignal(std::chrono::microseconds period = std::chrono::microseconds(0),
                      const std::function<void()>& each = nullptr);

// Call this when the daemon serves. Writes the file of --ready-file, if the flag was given: a JSON
// object with these strings. The write is atomic: a reader sees either no file or the complete
// file. Then tells the service manager (service_manager.h). Unavailable: the text says which step
// failed and why.
absl::Status AnnounceReady(const std::vector<std::pair<std::string, std::string>>& addresses);

// Writes the same file to `path`. Unavailable: the text says which step failed and why.
absl::Status WriteReadyFile(const std::string& path,
                            const std::vector<std::pair<std::string, std::string>>& addresses);

// The value of --dump-dir, for base/daemon/dumps.h.
std::string DumpDir();

// Logs the failure and returns the exit code for main(): 2 for InvalidArgument (wrong usage),
// else 1.
int FatalExit(const absl::Status& status);

}  // namespace longhaul
