// The coordinator's protocol core: who is a member of which group, in which epoch, and why.
//
// Pure: Step(event, now) -> actions, deterministic, no clock, thread, socket or protobuf. The
// driver carries out actions in order; nothing that follows a Persist in the list (or in a later
// one) may leave the process before that Persist is durable. A core made from the records that were
// persisted goes on where its predecessor stopped.
//
// One group:
//
//   idle --(all votes in and somebody pending or ready to leave the background | all votes in and a
//           better ring or new link costs | a removal | a lost link)--> preparing(n)
//   preparing(n) --(every peer EpochReady)--> committed(n), idle
//   preparing(n) --(removal, lost link, unreachable peer, deadline)--> preparing(n+1)
//   preparing(n) --(not frozen; its newcomers are gone, or its ring cannot be built)--> idle
//           (AbortEpoch)
//
// A preparation that removes members or repairs links between members freezes the ops in flight;
// one that only admits, ends a background, or orders the ring anew, does not. Epoch numbers are
// never reused: a superseded one is skipped.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/config.h"
#include "coordinator/core/records.h"
#include "coordinator/solver/ring_solver.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// One control stream. Chosen by the driver, never reused within a process.
using SessionId = Id<struct SessionIdKind>;

// ------------------------------------------------------------------------------ events

struct SessionOpened {
  SessionId session;
  LH_NAMED(SessionOpened, LH_FIELD(session));
};
struct SessionClosed {
  SessionId session;
  LH_NAMED(SessionClosed, LH_FIELD(session));
};
struct FromPeer {
  SessionId session;
  control::PeerMessage message;
  LH_NAMED(FromPeer, LH_FIELD(session), LH_FIELD(message));
};
// Operator's wishes; answered by nothing but their effect, which is durable with the Persist of the
// step.
struct EvictMember {
  GroupKey group;
  MemberId member;
  std::string reason;
  LH_NAMED(EvictMember, LH_FIELD(group), LH_FIELD(member), LH_FIELD(reason));
};
struct DrainPeer {
  PeerId peer;
  std::string reason;
  LH_NAMED(DrainPeer, LH_FIELD(peer), LH_FIELD(reason));
};
// The answer to OrderRing, exactly one to each.
struct RingOrdered {
  uint64_t request = 0;
  GroupKey group;
  std::vector<PeerId> ring;
  RingScore score;
  RingScore present;  // of the ring that it was asked about
  LH_NAMED(RingOrdered, LH_FIELD(request), LH_FIELD(group), LH_FIELD(ring), LH_FIELD(score),
           LH_FIELD(present));
};
// Time has passed; the driver sends it no later than NextDeadline(). Deadlines are judged by this
// event only, so what was received before should be stepped first. One that comes more than
// detect_ms / 2 late shows that this process itself was held up. Then the silence of every peer
// starts again, and all other deadlines of the groups move by the delay and detect_ms.
struct TimePassed {
  LH_NAMED(TimePassed);
};

using Event = std::variant<SessionOpened, SessionClosed, FromPeer, EvictMember, DrainPeer,
                           RingOrdered, TimePassed>;

// ------------------------------------------------------------------------------ actions

struct ToPeer {
  SessionId session;
  control::CoordinatorMessage message;
};
// Why a stream is ended; each has a status of its own on the wire.
enum class StreamEnd : uint8_t {
  kGone,        // replaced by a newer stream of the same peer, or silent
  kViolation,   // the peer broke the protocol
  kStranger,    // it speaks for a peer that is heard, and does not know the peer's secret
  kOtherStore,  // the peer has members in another store; a peer refuses that by itself, too
};
struct CloseSession {
  SessionId session;
  std::string reason;
  StreamEnd end = StreamEnd::kGone;
};
// Mutations to make durable as one transaction, before anything after this action takes effect.
struct Persist {
  std::vector<Mutation> mutations;
};
// Something an operator wants to see: `lhctl events`, log line, metric.
struct Notice {
  EventRecord event;
};

// Solve the problem (Solve() below), on some other thread as it may take seconds, and step the
// answer. One at a time.
struct OrderRing {
  uint64_t request = 0;
  GroupKey group;
  std::vector<PeerId> peers;  // the nodes of the problem
  RingProblem problem;
};

using Action = std::variant<ToPeer, CloseSession, Persist, Notice, OrderRing>;

// Carries it out, on any thread.
RingOrdered Solve(const OrderRing& order);

// ------------------------------------------------------------------------------ the core

class CoordinatorCore {
 public:
  // `records` is what the store holds; empty for a fresh start. CHECKs that the entropy has 32
  // bytes.
  CoordinatorCore(CoreConfig config, Records records);
  ~CoordinatorCore();
  CoordinatorCore(CoordinatorCore&&) noexcept;
  CoordinatorCore& operator=(CoordinatorCore&&) noexcept;

  std::vector<Action> Step(const Event& event, Tick now);

  // When TimePassed is due at the latest; kNever if nothing waits.
  Tick NextDeadline() const;

  // It is attached or has members.
  bool HasPeer(PeerId peer) const;
  // What an operator sees. Runs, groups and members in order of name and number.
  Overview GetOverview() const;

  // Aborts the process with a reason if an internal invariant is broken. Called by tests after each
  // step.
  void CheckInvariants() const;
  // A digest of the whole state but its secrets, equal for equal states.
  uint64_t Digest() const;
  // A core in the same state, from which another future can be tried.
  CoordinatorCore Clone() const;

 private:
  class Impl;
  explicit CoordinatorCore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::coordinator
