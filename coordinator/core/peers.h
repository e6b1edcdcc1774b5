// The peers that the coordinator knows, and the streams on which they speak: who is attached, who
// is silent and since when, and who is drained.
//
// It knows nothing of groups. Where it matters whether a peer has members, the caller says so.
// Plain value: no clock, no thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/records.h"
#include "coordinator/core/session_id.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// A peer that has a stream or members, or that may come back to be drained.
struct Peer {
  SessionId session;    // 0: not attached
  bool closed = false;  // its stream has closed; false: it has had none since the start
  // While not attached: another peer has come since, so this coordinator lets peers in.
  bool outdone = false;
  bool knocked = false;  // while not attached: Peers::Knock() was called
  // While not attached: the coordinator itself ended the stream, which is no sign of death.
  bool ended_here = false;
  Tick dead_at = kNever;  // while not attached: the peer is dead from this time on
  // While the peer is not attached: as Session::quiet_at.
  Tick quiet_at = kNever;
  PeerRecord record;
  bool draining = false;
  std::string drain_reason;  // set if an operator drains the peer
  // Whether the peer may still come back; it then has to hear the operator's order. Only for a peer
  // without a stream.
  bool awaited() const { return !drain_reason.empty() && dead_at != kNever; }
  // What its heartbeats tell: for the overview, and no decision.
  std::map<GroupKey, control::GroupLoad> loads;
  std::vector<control::FetchLoad> fetches;
  LH_FIELDS(Peer, LH_FIELD(session), LH_FIELD(closed), LH_FIELD(outdone), LH_FIELD(knocked),
            LH_FIELD(ended_here), LH_FIELD(dead_at), LH_FIELD(quiet_at), LH_FIELD(record),
            LH_FIELD(draining), LH_FIELD(drain_reason), LH_FIELD(loads, rule::Aside{}),
            LH_FIELD(fetches, rule::Aside{}));
};

class Peers {
 public:
  // Whether the peer has members.
  using HasMembers = std::function<bool(PeerId)>;

  explicit Peers(uint32_t detect_ms) : detect_us_(Millis(detect_ms)) {}

  // ---- at the start

  void Restore(const PeerRecord& record) { peers_[record.peer].record = record; }
  void Restore(const DrainRecord& drain);
  // From now on all peers have the same time to come back as after a restart of the coordinator,
  // and all streams count as heard.
  void AwaitAll(Tick now);

  // ---- streams

  // False: the stream was opened before.
  bool Open(SessionId session, Tick now);
  // A message has come. False: there is no such stream (any more).
  bool Heard(SessionId session, Tick now);
  // The peer of a stream; 0: it has not said Hello, or there is no such stream.
  PeerId PeerOf(SessionId session) const;
  // The peer says Hello on this stream. Returns the older stream that this one replaces, if any.
  std::optional<SessionId> Attach(SessionId session, const control::Hello& hello);
  // The stream is over. Returns its peer; 0: it had none. `has_admitted`: whether a peer has
  // admitted members. A peer with pending members only counts as dead sooner. `ended_here`: the
  // coordinator itself ended the stream. Then the peer is expected back for as long as if its
  // stream stood and were silent.
  PeerId Close(SessionId session, bool ended_here, const HasMembers& has_admitted, Tick now);
  // A connection has come from the peer's host, and no stream stands on it (yet). So the host
  // lives, and it may be this coordinator that lets nobody in. A peer without a stream gets the
  // whole time to come back again, until another peer comes: then it is not the coordinator's
  // fault. A quiet stream gets it once, because a path that has come back carries new connections
  // before old ones. Returns whether this is the first time since the peer has no stream.
  bool Knock(PeerId peer, Tick now);
  void Forget(PeerId peer) { peers_.erase(peer); }

  // ---- orders and news

  void Drain(PeerId peer, const std::string& reason);
  // The peer says that it drains.
  void SetDraining(PeerId peer) { peers_.at(peer).draining = true; }
  void SetLoads(PeerId peer, std::map<GroupKey, control::GroupLoad> loads,
                std::vector<control::FetchLoad> fetches);

  // ---- time

  // The peer is dead. It does not die again.
  void SetDead(PeerId peer) { peers_.at(peer).dead_at = kNever; }
  // The peers that have become quiet by now. Returns each once for each silence.
  std::vector<PeerId> TakeQuiet(Tick now);
  // The streams that are silent by now.
  std::vector<SessionId> Silent(Tick now) const;
  // The peers without a stream that are dead by now.
  std::vector<PeerId> Overdue(Tick now, const HasMembers& has_members) const;
  // Whether the peer may be removed for silence. While the coordinator is isolated, a peer with
  // members may not, however its stream has ended.
  bool MayDie(PeerId peer, const HasMembers& has_members) const;
  // Whether a peer with members is to be removed now because it was silent.
  bool AnyFallsDue(Tick now, const HasMembers& has_members) const;
  // Whether no peer with a stream was heard for detect_ms.
  bool NobodyHeard(Tick now) const;
  // This process did not run for a while. Messages that peers sent meanwhile have not been read
  // yet, so the times of silence of all peers start again.
  void ForgiveStall(Tick now);
  Tick NextDeadline(const HasMembers& has_members) const;

  // This coordinator itself is cut off: it was about to remove a member for silence, and had heard
  // no peer for detect_ms. Until it hears a peer, it removes no member for silence.
  void Isolate(Tick now) { isolated_since_ = now; }
  bool isolated() const { return isolated_since_.has_value(); }
  // A peer is heard again. Returns how long the isolation was, in microseconds. A peer that is dead
  // is removed after the time to come back.
  int64_t EndIsolation(Tick now);

  // ---- questions

  const std::map<PeerId, Peer>& all() const { return peers_; }
  const Peer* Find(PeerId peer) const;
  bool Attached(PeerId peer) const { return static_cast<bool>(SessionOf(peer)); }
  // 0: not attached.
  SessionId SessionOf(PeerId peer) const;
  bool Draining(PeerId peer) const;
  // How long the peer's stream was not heard, in microseconds; INT64_MAX: it has none.
  int64_t UnheardFor(PeerId peer, Tick now) const;
  // Whether the coordinator does not hear the peer: its stream is quiet, or it has none and has not
  // come back in time.
  bool Quiet(PeerId peer, Tick now) const;
  // Whether its stream speaks for the peer's life, whatever other peers report: the stream is not
  // quiet, or would not be quiet yet if the coordinator itself had not ended it.
  bool SpokenFor(PeerId peer, Tick now) const;
  // Whether the peer has no stream, while another peer with the same addresses has one.
  bool Succeeded(PeerId peer) const;
  // The other peers with these addresses.
  std::vector<PeerId> OthersAt(const std::vector<std::string>& endpoints, PeerId but) const;
  void CheckInvariants(const HasMembers& has_members) const;

  LH_STATE(Peers, LH_FIELD(detect_us_, rule::Aside{}), LH_FIELD(sessions_), LH_FIELD(peers_),
           LH_FIELD(isolated_since_));

 private:
  struct Session {
    PeerId peer;  // 0 before Hello
    // If no message comes before this time, the peer counts as dead from then on if another peer
    // has lost its link to the peer. kNever: that time has passed.
    Tick quiet_at;
    Tick silent_at;        // the same, but whatever other peers report
    bool knocked = false;  // Knock() has moved silent_at
    LH_FIELDS(Session, LH_FIELD(peer), LH_FIELD(quiet_at), LH_FIELD(silent_at), LH_FIELD(knocked));
  };
  Session HeardAt(PeerId peer, Tick now) const;

  int64_t detect_us_;
  std::map<SessionId, Session> sessions_;
  std::map<PeerId, Peer> peers_;
  std::optional<Tick> isolated_since_;
};

}  // namespace longhaul::coordinator
