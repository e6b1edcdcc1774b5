// The journal: a file with every event that the coordinator's core gets. lh-replay (tools/replay)
// feeds the events to a core again, so an engineer can watch in a debugger what a coordinator
// decided in production.
//
// The journal is for diagnosis. It does not make anything durable; the store does (store/store.h).
//
// - A record is written to the kernel before the core handles the event. So the journal survives
//   SIGKILL, and its last record is the event that made a coordinator crash. The journal is not
//   flushed to the disk.
// - If a record cannot be written, the journal ends, the log says so, and the coordinator goes on.
// - No secrets are in it: neither entropy, nor secrets of runs, nor tokens.
//
// proto/longhaul/v1/journal.proto describes the format.
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
  // The journal ends before it becomes larger than this. Dropping its beginning instead is
  // impossible: such a journal could not be replayed.
  uint64_t bytes_max = uint64_t{1} << 30;
  // After every `digest_every` events the journal gets a digest of the core's state.
  uint64_t digest_every = 64;
};

// Writes a journal. The coordinator loop owns it, and the loop's thread makes all calls.
class JournalWriter {
 public:
  // Begins a new journal for a core with this configuration and these records. An older journal at
  // the path becomes PATH.1 and replaces the file there: after a crash PATH.1 shows what led to it.
  // Holds the lock `PATH-lock` until destroyed. FailedPrecondition: another coordinator writes this
  // journal; no journal was touched. Unavailable: the file, its lock or its directory cannot be
  // made.
  static absl::StatusOr<std::unique_ptr<JournalWriter>> Begin(const JournalOptions& options,
                                                              const CoreConfig& config,
                                                              const Records& records);
  ~JournalWriter();
  JournalWriter(const JournalWriter&) = delete;
  JournalWriter& operator=(const JournalWriter&) = delete;

  // Records an event. Call this before the core handles the event.
  void Write(const Event& event, Tick now);
  // Records a digest of the core if one is due. Call this after the core has handled the event.
  void Stepped(const CoordinatorCore& core);

 private:
  class Impl;
  explicit JournalWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct ReplayOptions {
  uint64_t until = UINT64_MAX;  // stop after this many events
  // Called after each event, with the number of the event (the first is 1) and what the core
  // decided.
  std::function<void(uint64_t number, Tick now, const Event& event,
                     const std::vector<Action>& actions)>
      stepped;
};

struct ReplayReport {
  uint64_t events = 0;
  uint64_t digests = 0;  // recorded digests that were compared; all were equal
  std::string version;   // the release of the coordinator that wrote the journal
  // Not empty: the last record is incomplete, because the coordinator was killed while it wrote.
  // The text says where.
  std::string torn;
  bool limit_reached = false;  // the journal reached its limit and ended before the coordinator did
  Overview overview;           // of the core after the last event
};

// Feeds the events of a journal to a new core of this release. Reads the file only; any thread.
//   NotFound, Unavailable  the file cannot be opened or read
//   DataLoss               a record is damaged, or the file is no journal; the text names the byte
//   FailedPrecondition     another release wrote the journal, in another format
//   Aborted                the core came to another state than the recorded digest says; the text
//                          names the event
absl::StatusOr<ReplayReport> Replay(const std::string& path, const ReplayOptions& options);

// One line for people, without secrets.
std::string Describe(const Event& event);
std::string Describe(const Action& action);

}  // namespace longhaul::coordinator
