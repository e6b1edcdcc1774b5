#include "coordinator/core/peers.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "coordinator/core/leases.h"

namespace longhaul::coordinator {

void Peers::Restore(const DrainRecord& drain) {
  Peer& peer = peers_[drain.peer];
  peer.record.peer = drain.peer;
  peer.draining = true;
  peer.drain_reason = drain.reason;
}

void Peers::AwaitAll(Tick now) {
  for (auto& [id, session] : sessions_) session = HeardAt(session.peer, now);
  for (auto& [id, peer] : peers_) {
    if (peer.session) continue;
    peer.dead_at = now + kLease * detect_us_;
    peer.quiet_at = now + kShortLease * detect_us_;
  }
}

// ------------------------------------------------------------------------------
// streams

Peers::Session Peers::HeardAt(PeerId peer, Tick now) const {
  return {peer, now + detect_us_, now + kLease * detect_us_};
}

bool Peers::Open(SessionId session, Tick now) {
  return sessions_.emplace(session, HeardAt(PeerId{}, now)).second;
}

bool Peers::Heard(SessionId session, Tick now) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return false;
  it->second = HeardAt(it->second.peer, now);
  return true;
}

PeerId Peers::PeerOf(SessionId session) const {
  const auto it = sessions_.find(session);
  return it == sessions_.end() ? PeerId{} : it->second.peer;
}

std::optional<SessionId> Peers::Attach(SessionId session, const control::Hello& hello) {
  Peer& peer = peers_[hello.peer];
  std::optional<SessionId> replaced;
  if (peer.session) {
    replaced = peer.session;
    sessions_.erase(peer.session);
  }
  sessions_.at(session).peer = hello.peer;
  peer.session = session;
  peer.closed = peer.outdone = peer.knocked = peer.ended_here = false;
  for (auto& [id, other] : peers_) other.outdone = other.outdone || !other.session;
  peer.dead_at = peer.quiet_at = kNever;
  peer.record = {hello.peer, hello.endpoints, hello.lanes, hello.host, hello.key};
  return replaced;
}

PeerId Peers::Close(SessionId session, bool ended_here, const HasMembers& has_admitted, Tick now) {
  const auto closed = sessions_.extract(session);
  if (closed.empty()) return PeerId{};
  const PeerId id = closed.mapped().peer;
  if (!id) return id;
  Peer& peer = peers_.at(id);
  peer.session = SessionId{};
  peer.closed = true;
  peer.ended_here = ended_here;
  // The time until the peer is dead runs from its last message, not from the end of the stream. So
  // a stream that closes after a long silence does not give the peer that time again.
  const int64_t shorter = ended_here || has_admitted(id) ? 0 : kLease - kShortLease;
  peer.dead_at = std::max(now, closed.mapped().silent_at + -shorter * detect_us_);
  peer.quiet_at = ended_here ? closed.mapped().quiet_at : kNever;
  return id;
}

bool Peers::Knock(PeerId id, Tick now) {
  const auto it = peers_.find(id);
  if (it == peers_.end()) return false;
  Peer& peer = it->second;
  const int64_t lease = kLease * detect_us_;
  if (peer.session) {
    Session& session = sessions_.at(peer.session);
    if (session.knocked || !Quiet(id, now)) return false;
    session.knocked = true;
    session.silent_at = session.silent_at + lease;
    return false;
  }
  if (peer.outdone || peer.dead_at == kNever) return false;
  peer.dead_at = std::max(peer.dead_at, now + lease);
  return !std::exchange(peer.knocked, true);
}

// ------------------------------------------------------------------------------
// orders and news

void Peers::Drain(PeerId peer, const std::string& reason) {
  peers_.at(peer).draining = true;
  peers_.at(peer).drain_reason = reason;
}

void Peers::SetLoads(PeerId peer, std::map<GroupKey, control::GroupLoad> loads,
                     std::vector<control::FetchLoad> fetches) {
  peers_.at(peer).loads = std::move(loads);
  peers_.at(peer).fetches = std::move(fetches);
}

// ------------------------------------------------------------------------------
// time

std::vector<PeerId> Peers::TakeQuiet(Tick now) {
  std::vector<PeerId> quiet;
  for (auto& [id, session] : sessions_) {
    if (session.quiet_at > now) continue;
    session.quiet_at = kNever;
    if (session.peer) quiet.push_back(session.peer);
  }
  for (auto& [id, peer] : peers_) {
    if (peer.session || peer.quiet_at > now) continue;
    peer.quiet_at = kNever;
    quiet.push_back(id);
  }
  return quiet;
}

std::vector<SessionId> Peers::Silent(Tick now) const {
  std::vector<SessionId> silent;
  for (const auto& [id, session] : sessions_) {
    if (session.silent_at <= now) silent.push_back(id);
  }
  return silent;
}

std::vector<PeerId> Peers::Overdue(Tick now, const HasMembers& has_members) const {
  std::vector<PeerId> overdue;
  for (const auto& [id, peer] : peers_) {
    if (peer.dead_at <= now && MayDie(id, has_members)) overdue.push_back(id);
  }
  return overdue;
}

bool Peers::MayDie(PeerId peer, const HasMembers& has_members) const {
  return Find(peer) != nullptr && (!isolated() || !has_members(peer));
}

bool Peers::AnyFallsDue(Tick now, const HasMembers& has_members) const {
  return std::any_of(sessions_.begin(), sessions_.end(),
                     [&](const auto& entry) {
                       const Session& session = entry.second;
                       return session.silent_at <= now && has_members(session.peer);
                     }) ||
         std::any_of(peers_.begin(), peers_.end(), [&](const auto& entry) {
           const auto& [id, peer] = entry;
           return peer.dead_at <= now && has_members(id);
         });
}

bool Peers::NobodyHeard(Tick now) const {
  return std::all_of(sessions_.begin(), sessions_.end(), [now](const auto& entry) {
    const Session& session = entry.second;
    return !session.peer || session.quiet_at == kNever || session.quiet_at <= now;
  });
}

void Peers::ForgiveStall(Tick now) {
  for (auto& [id, session] : sessions_) session = HeardAt(session.peer, now);
  for (auto& [id, peer] : peers_) {
    if (peer.dead_at != kNever) peer.dead_at = std::max(peer.dead_at, now + kLease * detect_us_);
    if (peer.session || peer.quiet_at == kNever) continue;
    peer.quiet_at = now + kShortLease * detect_us_;
  }
}

int64_t Peers::EndIsolation(Tick now) {
  const int64_t us = now - *std::exchange(isolated_since_, std::nullopt);
  AwaitAll(now);
  return us;
}

Tick Peers::NextDeadline(const HasMembers& has_members) const {
  Tick next = kNever;
  for (const auto& [id, session] : sessions_) {
    next = std::min({next, session.quiet_at, session.silent_at});
  }
  for (const auto& [id, peer] : peers_) {
    if (peer.session) continue;
    next = std::min(next, peer.quiet_at);
    if (MayDie(id, has_members)) next = std::min(next, peer.dead_at);
  }
  return next;
}

// ------------------------------------------------------------------------------
// questions

const Peer* Peers::Find(PeerId peer) const {
  const auto it = peers_.find(peer);
  return it == peers_.end() ? nullptr : &it->second;
}

SessionId Peers::SessionOf(PeerId peer) const {
  const Peer* const known = Find(peer);
  return known == nullptr ? SessionId{} : known->session;
}

bool Peers::Draining(PeerId peer) const {
  const Peer* const known = Find(peer);
  return known != nullptr && known->draining;
}

int64_t Peers::UnheardFor(PeerId peer, Tick now) const {
  const SessionId session = SessionOf(peer);
  if (!session) return INT64_MAX;
  const Session& heard = sessions_.at(session);
  return (heard.knocked ? 2 : 1) * kLease * detect_us_ - (heard.silent_at - now);
}

bool Peers::Quiet(PeerId peer, Tick now) const {
  const Peer* const known = Find(peer);
  if (known == nullptr) return false;
  if (!known->session) {
    return known->dead_at != kNever && (known->quiet_at == kNever || known->quiet_at <= now);
  }
  const Tick quiet_at = sessions_.at(known->session).quiet_at;
  return quiet_at == kNever || quiet_at <= now;
}

bool Peers::SpokenFor(PeerId peer, Tick now) const {
  const Peer* const known = Find(peer);
  return known != nullptr && (known->session || known->ended_here) && !Quiet(peer, now);
}

bool Peers::Succeeded(PeerId peer) const {
  const Peer* const known = Find(peer);
  if (known == nullptr || known->session || known->record.endpoints.empty()) return false;
  const std::vector<PeerId> others = OthersAt(known->record.endpoints, peer);
  return std::any_of(others.begin(), others.end(), [this](PeerId id) { return Attached(id); });
}

std::vector<PeerId> Peers::OthersAt(const std::vector<std::string>& endpoints, PeerId but) const {
  std::vector<PeerId> others;
  for (const auto& [id, peer] : peers_) {
    if (id != but && peer.record.endpoints == endpoints) others.push_back(id);
  }
  return others;
}

void Peers::CheckInvariants(const HasMembers& has_members) const {
  for (const auto& [id, session] : sessions_) {
    LH_CHECK(!session.peer || SessionOf(session.peer) == id) << "session " << id.value();
  }
  for (const auto& [id, peer] : peers_) {
    LH_CHECK(peer.record.peer == id) << ToString(id);
    LH_CHECK(peer.session || peer.awaited() || has_members(id))
        << ToString(id) << " is remembered for nothing";
    if (!peer.session) continue;
    LH_CHECK(PeerOf(peer.session) == id) << ToString(id);
    LH_CHECK(peer.dead_at == kNever && !peer.closed) << ToString(id);
  }
}

}  // namespace longhaul::coordinator
