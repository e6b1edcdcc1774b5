#include "base/daemon/dumps.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"

namespace longhaul {
namespace {

constexpr char kSuffix[] = ".lhrec";

// What a signal handler needs. It must not allocate memory or take a lock.
char crash_path[4096];
char crash_cause[sizeof RecordingHeader::cause];
std::atomic<const Recorder*> crash_recorder{nullptr};

bool IsDump(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  return absl::StartsWith(name, "longhaul-") && absl::EndsWith(name, kSuffix);
}

// Returns what keeps files from being made in the directory, or "".
std::string Obstacle(const std::string& dir) {
  if (mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST) return strerror(errno);
  if (access(dir.c_str(), W_OK | X_OK) != 0) return strerror(errno);
  return "";
}

}  // namespace

namespace internal {

void OnCrashReport(const char* line) {
  const Recorder* const recorder = crash_recorder.load();
  if (recorder == nullptr) return;
  if (line != nullptr) {
    // The first line names the signal.
    if (crash_cause[0] != '\0') return;
    for (size_t i = 0; i < sizeof crash_cause && line[i] != '\0' && line[i] != '\n'; ++i) {
      crash_cause[i] = line[i];
    }
    return;
  }
  crash_recorder = nullptr;
  const int fd = open(crash_path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600);
  const size_t length = strnlen(crash_cause, sizeof crash_cause);
  const bool written = fd >= 0 && recorder->WriteTo(fd, {crash_cause, length});
  const char* const told = written ? "the flight recorder is in " : "no flight recorder file at ";
  for (const char* text : {told, static_cast<const char*>(crash_path), "\n"}) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return;
  }
}

}  // namespace internal

Dumps::Dumps(Options options, const Recorder* recorder)
    : options_(std::move(options)), recorder_(recorder) {
  if (options_.dir.empty()) return;
  if (const std::string why = Obstacle(options_.dir); !why.empty()) {
    Log(LogLevel::kWarning, "--dump-dir cannot be written, so faults and crashes leave no file" +
                                LogField("dir", options_.dir) + LogField("reason", why));
    return;
  }
  RemoveOld();
  const std::string path =
      absl::StrCat(options_.dir, "/", options_.program, ".", getpid(), ".crash", kSuffix);
  if (path.size() < sizeof crash_path) {
    memcpy(crash_path, path.c_str(), path.size() + 1);
    crash_cause[0] = '\0';
    crash_recorder = recorder_;
  }
  thread_ = std::thread([this] { Run(); });
}

Dumps::~Dumps() {
  crash_recorder = nullptr;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

void Dumps::Fault(std::string_view why) {
  if (!thread_.joinable()) return;
  MutexLock lock(&mutex_);
  if (!why_.empty()) return;  // the file that is due shows this fault, too
  why_ = why.empty() ? "a fault" : std::string(why);
  changed_.SignalAll();
}

void Dumps::Run() {
  using Clock = std::chrono::steady_clock;
  Clock::time_point next;  // no file before
  for (uint64_t number = 1;; ++number) {
    std::string why;
    {
      MutexLock lock(&mutex_);
      while (why_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (why_.empty()) return;
      const Clock::time_point due = std::max(next, Clock::now() + options_.delay);
      while (!stopping_ && Clock::now() < due) changed_.WaitFor(&mutex_, due - Clock::now());
      why = std::exchange(why_, "");
    }
    WriteFault(why, number);
    next = Clock::now() + options_.every;
  }
}

void Dumps::WriteFault(const std::string& why, uint64_t number) {
  const std::string path =
      absl::StrCat(options_.dir, "/", options_.program, ".", getpid(), ".fault-", number, kSuffix);
  // A reader sees a whole file or none.
  const std::string temporary = path + ".tmp";
  const int fd =
      open(temporary.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600);
  bool written = fd >= 0 && recorder_->WriteTo(fd, why.substr(0, sizeof RecordingHeader::cause));
  if (fd >= 0) close(fd);
  written = written && rename(temporary.c_str(), path.c_str()) == 0;
  if (written) {
    Log(LogLevel::kInfo,
        "flight recorder written" + LogField("file", path) + LogField("reason", why));
  } else {
    Log(LogLevel::kWarning, "flight recorder not written" + LogField("file", path) +
                                LogField("reason", strerror(errno)));
    unlink(temporary.c_str());
  }
  RemoveOld();
}

void Dumps::RemoveOld() {
  std::vector<std::pair<std::filesystem::file_time_type, std::filesystem::path>> files;
  std::error_code error;
  for (std::filesystem::directory_iterator it(options_.dir, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code gone;  // another process may remove files at the same time
    const auto time = std::filesystem::last_write_time(it->path(), gone);
    if (!gone && IsDump(it->path())) files.emplace_back(time, it->path());
  }
  std::sort(files.begin(), files.end());
  for (size_t i = 0; i + kDumpFilesMax < files.size(); ++i) {
    std::filesystem::remove(files[i].second, error);
  }
}

}  // namespace longhaul
