#include "base/daemon/daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "absl/debugging/failure_signal_handler.h"
#include "absl/debugging/symbolize.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/daemon/dumps.h"
#include "base/daemon/service_manager.h"
#include "base/log.h"
#include "base/status_macros.h"

ABSL_FLAG(std::string, log_format, "text", "format of the log on stderr: text or json");
ABSL_FLAG(std::string, log_level, "info",
          "least level that is logged: debug, info, warning, error");
ABSL_FLAG(std::string, ready_file, "",
          "file to write the bound addresses to, as JSON, once the daemon serves");
ABSL_FLAG(bool, core_dumps, false,
          "let a crash write a core file, and let debuggers of the same user attach; the core file "
          "holds tokens, keys and tensors");
ABSL_FLAG(std::string, dump_dir, "",
          "directory for the flight recorder's files: one after a crash or a failed check, and one "
          "after a fault of the run; at most 16 files of 2.5 MiB are kept; empty: none is written");

namespace longhaul {
namespace {

sigset_t StopSignals() {
  static const sigset_t signals = [] {
    sigset_t made;
    sigemptyset(&made);
    for (const int signal : {SIGTERM, SIGINT, SIGXCPU}) sigaddset(&made, signal);
    // nohup ignores it. A signal that is blocked waits, even if it is ignored.
    struct sigaction hangup {};
    sigaction(SIGHUP, nullptr, &hangup);
    if (hangup.sa_handler != SIG_IGN) sigaddset(&made, SIGHUP);
    return made;
  }();
  return signals;
}

void SetUpLog(const ProgramInfo& info) {
  const std::string format = absl::GetFlag(FLAGS_log_format);
  if (format != "text" && format != "json") {
    ExitUsage(info, absl::StrCat("flag --log-format=", format, ": write text or json"));
  }
  SetLogFormat(format == "json" ? LogFormat::kJson : LogFormat::kText);
  const std::string level = absl::GetFlag(FLAGS_log_level);
  if (level == "debug") {
    SetLogLevel(LogLevel::kDebug);
  } else if (level == "info") {
    SetLogLevel(LogLevel::kInfo);
  } else if (level == "warning") {
    SetLogLevel(LogLevel::kWarning);
  } else if (level == "error") {
    SetLogLevel(LogLevel::kError);
  } else {
    ExitUsage(info,
              absl::StrCat("flag --log-level=", level, ": write debug, info, warning or error"));
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Runs in the handler of a fatal signal. null: the report is complete.
void WriteCrashReport(const char* line) {
  if (line != nullptr && write(STDERR_FILENO, line, strlen(line)) < 0) {
    // stderr is gone. The recording is still worth its file.
  }
  internal::OnCrashReport(line);
}
#endif

void SetUpSignals() {
  const sigset_t signals = StopSignals();
  LH_CHECK(pthread_sigmask(SIG_BLOCK, &signals, nullptr) == 0);
  // By default each of these ends the process without a line. With SIGPIPE and SIGXFSZ ignored, the
  // write that caused them fails, and who writes says so.
  for (const int ignored : {SIGPIPE, SIGXFSZ, SIGUSR1, SIGUSR2}) signal(ignored, SIG_IGN);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Sanitizers install their own handlers.
  absl::FailureSignalHandlerOptions options;
  options.writerfn = WriteCrashReport;
  absl::InstallFailureSignalHandler(options);
#endif
}

// The flag of prctl() also counts where the kernel pipes core dumps into a program, as Debian's
// systemd-coredump does. RLIMIT_CORE does not. Root may still attach a debugger.
void ForbidCoreDumps() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // The leak checker of sanitizers attaches to its own process.
  if (!absl::GetFlag(FLAGS_core_dumps)) LH_CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
#endif
}

void RaiseFileLimit() {
  struct rlimit limit {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  // If this fails, the old limit stays, and the daemon can run with it.
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

absl::Status SystemError(const std::string& what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", strerror(errno)));
}

std::string JsonString(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned char>(c));
      json += escape;
    } else {
      json += c;
    }
  }
  return json + '"';
}

extern "C" void ExitAtOnce(int) { _exit(1); }

}  // namespace

void InitDaemon(int argc, char** argv, const ProgramInfo& info) {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  absl::InitializeSymbolizer(argv[0]);
  const std::vector<std::string> rest = ParseFlagsOrExit(argc, argv, info);
  if (!rest.empty()) {
    ExitUsage(info, absl::StrCat("unexpected argument '", rest[0], "'; see --help"));
  }
  SetUpLog(info);
  ForbidCoreDumps();
  SetUpSignals();
  RaiseFileLimit();
  if (const std::string path = absl::GetFlag(FLAGS_ready_file); !path.empty()) {
    unlink(path.c_str());
  }
}

int StopSignalFd() {
  static const int fd = [] {
    const sigset_t signals = StopSignals();
    const int made = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    LH_CHECK(made >= 0) << "signalfd: " << strerror(errno);
    return made;
  }();
  return fd;
}

int WaitForStopSignal(std::chrono::microseconds period, const std::function<void()>& each) {
  const sigset_t signals = StopSignals();
  const bool never = period.count() <= 0;
  struct timespec limit {};
  limit.tv_sec = period.count() / 1000000;
  limit.tv_nsec = period.count() % 1000000 * 1000;
  int number = -1;
  while (number < 0) {
    number = never ? sigwaitinfo(&signals, nullptr) : sigtimedwait(&signals, nullptr, &limit);
    if (number >= 0 || errno == EINTR) continue;
    LH_CHECK(errno == EAGAIN && !never) << "waiting for a signal: " << strerror(errno);
    each();
  }
  struct sigaction action {};
  action.sa_handler = ExitAtOnce;
  for (const int next : {SIGTERM, SIGINT, SIGXCPU}) sigaction(next, &action, nullptr);
  signal(SIGHUP, SIG_IGN);  // a terminal that closes may send it again
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  return number;
}

absl::Status WriteReadyFile(const std::string& path,
                            const std::vector<std::pair<std::string, std::string>>& addresses) {
  std::string json = "{";
  for (const auto& [name, address] : addresses) {
    absl::StrAppend(&json, json.size() > 1 ? ", " : "", JsonString(name), ": ",
                    JsonString(address));
  }
  json += "}\n";
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  const int fd = open(temporary.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  if (fd < 0) return SystemError(absl::StrCat("cannot write ready file ", temporary));
  ssize_t wrote = 0;
  for (size_t done = 0; wrote >= 0 && done < json.size(); done += static_cast<size_t>(wrote)) {
    wrote = write(fd, json.data() + done, json.size() - done);
    if (wrote < 0) break;
  }
  absl::Status write_error = SystemError(absl::StrCat("cannot write ready file ", temporary));
  close(fd);
  if (wrote < 0) {
    unlink(temporary.c_str());
    return write_error;
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    absl::Status error =
        SystemError(absl::StrCat("cannot rename ready file ", temporary, " to ", path));
    unlink(temporary.c_str());
    return error;
  }
  return absl::OkStatus();
}

absl::Status AnnounceReady(const std::vector<std::pair<std::string, std::string>>& addresses) {
  const std::string path = absl::GetFlag(FLAGS_ready_file);
  if (!path.empty()) LH_RETURN_IF_ERROR(WriteReadyFile(path, addresses));
  return TheServiceManager().Ready();
}

std::string DumpDir() { return absl::GetFlag(FLAGS_dump_dir); }

int FatalExit(const absl::Status& status) {
  Log(LogLevel::kError, std::string(status.message()));
  return status.code() == absl::StatusCode::kInvalidArgument ? 2 : 1;
}

}  // namespace longhaul
