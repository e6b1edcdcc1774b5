// The coordinator's protocol core: who is a member of which group, in which epoch, and why.
//
// Pure: Step(event, now) -> actions. Deterministic; no clock, thread, socket or protobuf. The
// driver carries out the actions in order. No message behind a Persist, in the same list or in a
// later one, may leave the process before that Persist is durable. A core that is made from the
// persisted records goes on where its predecessor stopped.
//
// The states of one group:
//
//   idle --(all votes are in, and a member is pending or ready to leave the background | all votes
//           are in, and a better ring or new link costs are known | a removal | a lost link)-->
//           preparing(n)
//   preparing(n) --(every peer EpochReady)--> committed(n), idle
//   preparing(n) --(removal, lost link, unreachable peer, deadline)--> preparing(n+1)
//   preparing(n) --(not frozen; its newcomers are gone, or its ring cannot be built)--> idle
//           (AbortEpoch)
//
// A preparation that removes members or repairs links between members freezes the ops in flight. A
// preparation that only admits members, takes members out of the background, or orders the ring
// anew freezes nothing. Epoch numbers are never reused: a superseded number is skipped.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/config.h"
#include "coordinator/core/records.h"
#include "coordinator/core/session_id.h"
#include "coordinator/solver/ring_solver.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// ------------------------------------------------------------------------------ events

struct SessionOpened {
  SessionId session;
};
struct SessionClosed {
  SessionId session;
};
struct FromPeer {
  SessionId session;
  control::PeerMessage message;
};
// EvictMember and DrainPeer are an operator's orders. The core does not answer them. The same
// step's Persist makes their effect durable. An order for an unknown member or peer does nothing.
struct EvictMember {
  GroupKey group;
  MemberId member;
  std::string reason;
};
struct DrainPeer {
  PeerId peer;
  std::string reason;
};
// The answer to an OrderRing. The driver gives exactly one answer to each OrderRing.
struct RingOrdered {
  uint64_t request = 0;
  GroupKey group;
  std::vector<PeerId> ring;
  RingScore score;
  RingScore present;  // the score of OrderRing.problem.present
};
// Time has passed. The driver sends this event no later than NextDeadline(). Only this event makes
// deadlines expire, so the driver should first step the messages that it has received. If an event
// of any kind comes more than detect_ms / 2 after NextDeadline(), this process itself was held up.
// Then each peer's time of silence starts again, and all other deadlines of the groups move by the
// delay plus detect_ms.
struct TimePassed {};

using Event = std::variant<SessionOpened, SessionClosed, FromPeer, EvictMember, DrainPeer,
                           RingOrdered, TimePassed>;

// ------------------------------------------------------------------------------ actions

struct ToPeer {
  SessionId session;
  control::CoordinatorMessage message;
};
// Why the coordinator ends a stream. Each reason has its own status on the wire.
enum class StreamEnd : uint8_t {
  kGone,        // replaced by a newer stream of the same peer, or silent
  kViolation,   // the peer broke the protocol
  kStranger,    // it names a peer that is known here with another key
  kOtherStore,  // the peer has members in another store; peers check this themselves, too
};
struct CloseSession {
  SessionId session;
  std::string reason;
  StreamEnd end = StreamEnd::kGone;
};
// Make these mutations durable as one transaction, before any later action is carried out.
struct Persist {
  std::vector<Mutation> mutations;
};
// Tell operators of this event: in `lhctl events`, the log and the metrics.
struct Notice {
  EventRecord event;
};

// Solve this problem with Solve(), and step the answer. Solving may take seconds, so use another
// thread. The core asks for one ring at a time.
struct OrderRing {
  uint64_t request = 0;
  GroupKey group;
  std::vector<PeerId> peers;  // the nodes of the problem
  RingProblem problem;
};

using Action = std::variant<ToPeer, CloseSession, Persist, Notice, OrderRing>;

// Solves the problem of `order`. Any thread may call this.
RingOrdered Solve(const OrderRing& order);

// ------------------------------------------------------------------------------ the core

// One direction between two peers of a group, as measured.
struct DirectionView {
  PeerId from;
  PeerId to;
  LinkView link;
  bool small_packets = false;  // large packets vanish on the way
  bool held = false;           // the link or the receiver limits the rate, and not the sender
};

// What some peers take up with their members, pending and admitted ones.
struct Holdings {
  size_t members = 0;
  std::set<GroupKey> groups;  // in which they have members
};

class CoordinatorCore {
 public:
  // `records`: what the store holds; empty for a new store. Aborts the process (LH_CHECK) unless
  // the entropy has 32 bytes.
  CoordinatorCore(CoreConfig config, Records records);
  ~CoordinatorCore();
  CoordinatorCore(CoordinatorCore&&) noexcept;
  CoordinatorCore& operator=(CoordinatorCore&&) noexcept;

  std::vector<Action> Step(const Event& event, Tick now);

  // When TimePassed is due at the latest. kNever: no deadline is open.
  Tick NextDeadline() const;

  // Whether the peer is attached, has members, or may still come back to be drained.
  bool HasPeer(PeerId peer) const;
  // Costs time that grows with all members.
  Holdings HoldingsOf(const std::set<PeerId>& peers) const;
  // Whether the member that this Join asks for is there: the peer has sent the Join before.
  bool KnowsJoin(PeerId peer, const control::Join& join) const;
  // Returns what operators see of all groups, in order of run and group number.
  Overview GetOverview() const;
  // What is known of the links between the peers of this group's ring, ordered by the ring: first
  // by `from`, then by `to`. Costs time that grows with the square of the peers.
  std::vector<DirectionView> LinksOf(const GroupView& group) const;
  // Returns the peer without which an all-reduce over the mesh would be clearly faster; nothing if
  // there is none. Solves for the shares several times: some milliseconds for 64 peers.
  std::optional<PaceView> PaceOf(const GroupKey& group) const;

  // Aborts the process with a reason if an internal invariant is broken. Tests call this after each
  // step.
  void CheckInvariants() const;
  // A digest of the whole state except its secrets. Equal states have equal digests.
  uint64_t Digest() const;
  // Returns a copy in the same state, so that a search can try several futures.
  CoordinatorCore Clone() const;

 private:
  class Impl;
  explicit CoordinatorCore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::coordinator
