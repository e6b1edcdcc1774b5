// The journal: everything that a coordinator's core is given, on disk, so that what it decided in
// production can be decided again under a debugger (tools/replay).
//
// For diagnosis, not for durability: the store is what survives (store/store.h). A record is handed
// to the kernel before the core is stepped, so a journal survives SIGKILL and shows the event that
// a crash came from; it is not flushed to the disk. If it cannot be written, it ends with a line in
// the log, and the coordinator goes on. Secrets (entropy, secrets of runs and peers,
// tokens) are not in it.
//
// The format is described in proto/longhaul/v1/journal.proto.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/tick.h"
#include "coordinator/core/coordinator_core.h"

namespace longhaul::coordinator {

struct JournalOptions {
  std::string path;
  // The journal ends when it would become larger: one that began in the middle could not be
  // replayed.
  uint64_t bytes_max = uint64_t{1} << 30;
  // How many events there are between two digests.
  uint64_t digest_every = 64;
};

// One owner thread, the coordinator loop's.
class JournalWriter {
 public:
  // Begins a new journal of a core with this configuration and these records. What was at the path
  // is kept as PATH.1 (and what was there is gone): after a crash it tells what led to it. Holds
  // `PATH-lock` until destroyed. FailedPrecondition: another coordinator writes there, and nothing
  // was touched; Unavailable: the file cannot be made.
  static absl::StatusOr<std::unique_ptr<JournalWriter>> Begin(const JournalOptions& options,
                                                              const CoreConfig& config,
                                                              const Records& records);
  ~JournalWriter();
  JournalWriter(const JournalWriter&) = delete;
  JournalWriter& operator=(const JournalWriter&) = delete;

  // Before the step.
  void Write(const Event& event, Tick now);
  // After it.
  void Stepped(const CoordinatorCore& core);

 private:
  class Impl;
  explicit JournalWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct ReplayOptions {
  uint64_t until = UINT64_MAX;  // stop after so many events
  // Called after each step, with the number of the event from 1.
  std::function<void(uint64_t number, Tick now, const Event& event,
                     const std::vector<Action>& actions)>
      stepped;
};

struct ReplayReport {
  uint64_t events = 0;
  uint64_t digests = 0;  // compared, all equal
  std::string version;   // of the coordinator that wrote the journal
  // The last record is incomplete: the coordinator was killed while it wrote. Says where.
  std::string torn;
  bool limit_reached = false;  // the journal ended before the coordinator did
  Overview overview;           // after the last event
};

// Steps a core of this release with what the journal holds. Errors: NotFound or Unavailable: the
// file cannot be read; DataLoss: a record in the middle is damaged; FailedPrecondition: another
// format; Aborted: the core came to another state than the one that was recorded. All name the
// place.
absl::StatusOr<ReplayReport> Replay(const std::string& path, const ReplayOptions& options);

// One line, for people.
std::string Describe(const Event& event);
std::string Describe(const Action& action);

}  // namespace longhaul::coordinator
