// The thread that owns the coordinator's core and store. The loop takes what other threads post,
// gives it to the core as events, and carries out the core's actions in order.
//
// The loop carries out a Persist action before the actions behind it, and waits for the disk. So no
// message leaves the process before the records that the message depends on are durable. If the
// store fails, no further message leaves: the loop calls `fatal` and stops. In the daemon `fatal`
// ends the process, and the next coordinator reads what the store really holds.
//
// Another thread solves rings (ring_worker.h), one at a time.
//
// Memory is bounded: a session has at most one message in the mailbox, and Accepted() tells it when
// it may post the next one. So a slow disk slows the peers down and does not fill memory.
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
#include "coordinator/loop/event_log.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/store/store.h"
#include "coordinator/tokens/token_record.h"

namespace longhaul::coordinator {

inline constexpr size_t kSessionsMax = 4096;
inline constexpr size_t kRequestsMax = 1024;

// A control stream, as the loop sees it. The loop calls these methods on its own thread; they must
// not block.
class SessionPort {
 public:
  virtual ~SessionPort() = default;
  virtual void Send(const control::CoordinatorMessage& message) = 0;
  // Ends the stream. The stream must still call CloseSession().
  virtual void Close(StreamEnd end, const std::string& reason) = 0;
  // The peer at the other end; 0: it has not said Hello.
  virtual PeerId peer() const { return PeerId{}; }
  // The loop has handled the last message of the stream. The stream may post the next one.
  virtual void Accepted() = 0;
  // Why the caller at the other end may not have this member; nullopt: it may. If it may not, the
  // loop answers with JoinRefused, and the core never hears of the join.
  virtual std::optional<Denial> ObjectionTo(const control::Join&, const CoordinatorCore&) {
    return std::nullopt;
  }
};

class CoordinatorLoop {
 public:
  struct Options {
    CoreConfig core;
    // Called once, on the loop's thread, after the store failed. Afterwards the loop carries out
    // nothing and answers every request with Unavailable.
    std::function<void(const absl::Status&)> fatal;
    // The clock, which only the loop's thread calls. Default: the system's monotonic clock.
    std::function<Tick()> now;
    // Called for each event that is told (event_limit.h), on the loop's thread. Default: nobody
    // listens.
    std::function<void(const EventRecord&, Tick)> observe;
  };

  // Reads the store and starts the thread. `metrics` must outlive the loop. The errors are those of
  // Store::Load(); no thread runs after an error.
  static absl::StatusOr<std::unique_ptr<CoordinatorLoop>> Start(Options options,
                                                                std::unique_ptr<Store> store,
                                                                CoordinatorMetrics* metrics);
  // Answers the requests that wait, and stops the thread.
  ~CoordinatorLoop();
  CoordinatorLoop(const CoordinatorLoop&) = delete;
  CoordinatorLoop& operator=(const CoordinatorLoop&) = delete;

  // ---- any thread

  // Opens a session. nullopt: kSessionsMax sessions are open, or the loop has stopped.
  std::optional<SessionId> OpenSession(std::shared_ptr<SessionPort> port);
  // Gives a peer's message to the core. A session posts its first message after OpenSession(), and
  // each further one only after Accepted() for the one before.
  void PostMessage(SessionId session, control::PeerMessage message);
  // Ends a session. Call this exactly once for each session that was opened, after its last
  // message. `ended_here`: the coordinator itself ended the stream (core/events.h: SessionClosed).
  void CloseSession(SessionId session, bool ended_here = false);

  // A connection came from the host of this peer (core/events.h: PeerKnocked). Dropped if
  // kRequestsMax requests wait already.
  void Knocked(PeerId peer);

  // Orders of an operator. `done` gets the outcome: NotFound if there is no such member or peer,
  // Unavailable if kRequestsMax requests wait already or the loop stops; nothing has changed then.
  // `done` runs on the loop's thread; if the request is refused at once, on the caller's.
  using Done = std::function<void(const absl::Status&)>;
  void Evict(EvictMember request, Done done);
  void Drain(DrainPeer request, Done done);
  // Changes what the store has of join tokens. OK: the change is durable. If the store fails, the
  // loop stops, as after any other failed write.
  void ChangeTokens(TokenChange change, Done done);
  // Asks for an overview of all groups. `done` gets it, or Unavailable as above.
  void Query(std::function<void(const absl::StatusOr<Overview>&)> done);
  // As Query(). `done` may ask the core for more; nullptr after an error.
  void QueryCore(std::function<void(const absl::StatusOr<Overview>&, const CoordinatorCore*)> done);
  // As Query(), for a thread that may wait. DeadlineExceeded: the loop did not answer in time.
  absl::StatusOr<Overview> QueryAndWait(std::chrono::milliseconds timeout);
  // Waits until the loop has handled all that was posted before. Errors as for QueryAndWait().
  // Costs the loop nothing.
  absl::Status Ping(std::chrono::milliseconds timeout);

  EventLog& events();
  const CoreConfig& core_config() const;
  const std::string& store_name() const;
  // How much mail waits for the loop's thread.
  size_t queued() const;
  // The number of open sessions.
  size_t sessions() const;

 private:
  class Impl;
  explicit CoordinatorLoop(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::coordinator
