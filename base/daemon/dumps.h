// Files with the recording of this process (base/recorder.h), in the directory of --dump-dir:
//
//   longhaul-peerd.PID.crash.lhrec     a fatal signal or a failed check
//   longhaul-peerd.PID.fault-N.lhrec   a fault of the run that the process survived
//
// The newest kDumpFilesMax files stay; older ones of any process of this directory are removed. At
// most one file for faults is written in kFaultDumpEvery. It is written kFaultDumpDelay after the
// fault, so that it also shows how the fault ended, and by a thread of its own, so that a slow disk
// stops nothing else.
//
// `lhctl dump --file=PATH` and `lhctl trace --file=PATH` read the files.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "base/recorder.h"

namespace longhaul {

inline constexpr size_t kDumpFilesMax = 16;
inline constexpr std::chrono::seconds kFaultDumpEvery{30};
inline constexpr std::chrono::seconds kFaultDumpDelay{2};

class Dumps {
 public:
  struct Options {
    std::string dir;      // empty: nothing is written
    std::string program;  // the first part of the names of files
    std::chrono::milliseconds every = kFaultDumpEvery;
    std::chrono::milliseconds delay = kFaultDumpDelay;
  };

  // Makes the directory (not its parents) if it is missing, removes old files, and lets a crash of
  // this process write a file. A directory that cannot be written costs a warning in the log, and
  // nothing is written then. `recorder` must live until the process ends: a crash may come at any
  // time.
  Dumps(Options options, const Recorder* recorder);
  // Writes a file that is due first. From now on a crash writes nothing.
  ~Dumps();
  Dumps(const Dumps&) = delete;
  Dumps& operator=(const Dumps&) = delete;

  // A fault happened. Any thread. Does not wait for the disk.
  void Fault(std::string_view why);

 private:
  void Run();
  void WriteFault(const std::string& why, uint64_t number);
  void RemoveOld();

  const Options options_;
  const Recorder* const recorder_;
  Mutex mutex_;
  CondVar changed_;
  std::string why_ ABSL_GUARDED_BY(mutex_);  // of the fault that has no file yet; else empty
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

namespace internal {
// Called in the handler of a fatal signal with the lines of the report, and with null at its end:
// writes the crash file, if a Dumps exists. For base/daemon/daemon.cc.
void OnCrashReport(const char* line);
}  // namespace internal

}  // namespace longhaul
