// What the core is told (events), and what it asks its driver for (actions). Plain values.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/ids.h"
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
  // The coordinator itself ended the stream, although it was not silent. So the end is no sign that
  // the peer died.
  bool ended_here = false;
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
// A connection came from the host of this peer, and no stream stands on it yet. Only a hint:
// without it a peer that this coordinator does not let in would be removed as if it were dead.
struct PeerKnocked {
  PeerId peer;
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
                           PeerKnocked, RingOrdered, TimePassed>;

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

}  // namespace longhaul::coordinator
