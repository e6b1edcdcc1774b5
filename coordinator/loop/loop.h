// The thread that owns the coordinator's core: takes what others post, steps the core, carries out
// its actions in order.
//
// A Persist is carried out at once and synchronously, so nothing that follows it leaves the process
// before it is durable. If the store fails, nothing further leaves: `fatal` is called, which in the
// daemon ends the process; its successor reads what the store really holds.
//
// Rings are solved on a thread of their own (ring_worker.h), one at a time.
//
// Bounded: a session has at most one message in the mailbox. Accepted() tells it when the next may
// be posted, which is how a slow disk slows the peers down instead of filling memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/tick.h"
#include "coordinator/core/coordinator_core.h"
#include "coordinator/journal/journal.h"
#include "coordinator/loop/event_log.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/store/store.h"

namespace longhaul::coordinator {

inline constexpr size_t kSessionsMax = 4096;
inline constexpr size_t kRequestsMax = 1024;

// A control stream as the loop sees it. Called on the loop's thread; must not block.
class SessionPort {
 public:
  virtual ~SessionPort() = default;
  virtual void Send(const control::CoordinatorMessage& message) = 0;
  // Ends the stream; CloseSession() is still expected.
  virtual void Close(StreamEnd end, const std::string& reason) = 0;
  // The message posted last was accepted: the next may be posted.
  virtual void Accepted() = 0;
};

class CoordinatorLoop {
 public:
  struct Options {
    CoreConfig core;
    // Called once, on the loop's thread, when the store failed; the loop does nothing afterwards.
    std::function<void(const absl::Status&)> fatal;
    // Read on the loop's thread only. Default: the system's monotonic clock.
    std::function<Tick()> now;
    // Where to write a journal; without a path: none.
    JournalOptions journal;
  };

  // Reads the store, begins the journal and starts the thread. `metrics` outlives the loop.
  static absl::StatusOr<std::unique_ptr<CoordinatorLoop>> Start(Options options,
                                                                std::unique_ptr<Store> store,
                                                                CoordinatorMetrics* metrics);
  // Answers what is waiting and stops the thread.
  ~CoordinatorLoop();
  CoordinatorLoop(const CoordinatorLoop&) = delete;
  CoordinatorLoop& operator=(const CoordinatorLoop&) = delete;

  // ---- any thread

  // None: there are kSessionsMax already, or the loop has stopped.
  std::optional<SessionId> OpenSession(std::shared_ptr<SessionPort> port);
  // At most one message of a session between two calls of Accepted().
  void PostMessage(SessionId session, control::PeerMessage message);
  // Exactly once for each session that was opened; it may not post afterwards.
  void CloseSession(SessionId session);

  // `done` is called on the loop's thread; with NotFound if there is no such member or peer,
  // Unavailable if there are kRequestsMax requests waiting or the loop stops.
  using Done = std::function<void(const absl::Status&)>;
  void Evict(EvictMember request, Done done);
  void Drain(DrainPeer request, Done done);
  // `done` is called on the loop's thread; with an error as above.
  void Query(std::function<void(const absl::StatusOr<Overview>&)> done);
  // The same for a thread that may wait; DeadlineExceeded if the loop is held up for longer.
  absl::StatusOr<Overview> QueryAndWait(std::chrono::milliseconds timeout);

  EventLog& events();
  const CoreConfig& core_config() const;
  const std::string& store_name() const;
  // Sessions that are open.
  size_t sessions() const;

 private:
  class Impl;
  explicit CoordinatorLoop(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::coordinator
