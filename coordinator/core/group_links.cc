#include <algorithm>

#include "base/check.h"
#include "coordinator/core/group.h"
#include "coordinator/core/text.h"
#include "proto/wire/limits.h"

// The part of Group that handles links that are lost or cannot be built, and trials of newcomers.
namespace longhaul::coordinator {
namespace {

using control::Removal;

// After this many lost links in one series of preparations, a further lost link counts as a link
// that cannot be built. Otherwise a link that breaks again and again would hold all members for
// ever.
constexpr uint32_t kRebuildsMax = 3;

std::string Unreached(PeerId from, PeerId to, const std::string& reason) {
  return ToString(from) + " cannot reach " + ToString(to) + ": " + reason;
}

}  // namespace

// ------------------------------------------------------------------------------
// reports

Violation Group::LinkLost(PeerId peer, const control::LinkLost& lost, Tick now, GroupOutput* out) {
  if (lost.epoch > record_.highest) {
    return "lost link in epoch " + ToString(lost.epoch) + ", which was never prepared";
  }
  // A freeze after the reporter's epoch answers the report when it is committed, because its
  // preparation checks all links. An epoch that froze nothing answers no report.
  const bool answered = lost.epoch < record_.last_freeze;
  if ((answered && record_.last_freeze <= record_.committed) || lost.peer == peer)
    return std::nullopt;
  const auto counts = [this](PeerId id) {
    return preparation_ ? preparation_->answers.contains(id)
                        : PeersOf(record_, Survivors(record_)).contains(id);
  };
  if (!counts(peer) || !counts(lost.peer)) return std::nullopt;
  const LostLink link(peer, lost.peer);
  const PeerId relay = RelayNow(peer, lost.peer);
  // The report is about the straight link, which the blocked pair no longer uses.
  if (relay && answered) return std::nullopt;
  // With a relay, the longer grace lets a death of the relay show first.
  const bool unheard = relay || (lost.silent_ms > 0 && !HeardOfLate(lost.peer));
  const Suspicion::Evidence evidence{lost.silent_ms, unheard, Witnesses(lost.peer).size()};
  // A lost link through a relay is no evidence against the far end.
  if (!relay) suspicion_.Accuse(link, evidence, now);
  // The freeze has probably rebuilt a link that broke. A link that was silent may still be silent,
  // and then the freeze would wait for it. So its loss is noted.
  if (answered && lost.silent_ms == 0) return std::nullopt;
  const std::string reason = Clean(lost.reason);
  const Fault fault = FaultNow(lost.silent_ms == 0 ? "reset" : "silence", ToString(peer),
                               lost.silent_ms, lost.peer);
  if (suspicion_.Lose(link, evidence, {Tick(), lost.epoch, reason, fault}, now)) {
    Note("link_lost", MemberId{}, peer,
         "link lost from=" + ToString(peer) + " to=" + ToString(lost.peer) +
             " silent_ms=" + std::to_string(lost.silent_ms) + " reason=" + reason,
         out);
  }
  return std::nullopt;
}

// The grace is over, and neither peer has turned out to be dead. So both are alive, and only their
// link is lost.
void Group::LossGraceOver(LostLink link, GroupOutput* out) {
  const std::optional<Suspicion::Loss> loss = suspicion_.RemoveLoss(link);
  if (!loss) return;
  const std::string text = LinkText(link.first, link.second, loss->reason);
  // The open preparation freezes, was begun after the report, and builds this link. If the group
  // cannot go around the link, waiting for that preparation is best.
  if (preparation_ && preparation_->freeze && loss->epoch < preparation_->epoch &&
      !CanRouteAround(RoutesNow(), {{link, text}})) {
    return;
  }
  const LostLinks again{{link, text + " (again and again)"}};
  const std::set<PeerId> in_force = PeersOf(record_, Survivors(record_));
  const bool freeze = in_force.contains(link.first) && in_force.contains(link.second);
  const control::BlockedPair pair = control::MakeBlockedPair(link.first, link.second);
  suspicion_.Strike(pair, directory_->Now());
  if (freeze) {
    // Both ends may report the same loss. It counts as one strike.
    suspicion_.ForgetLoss({link.second, link.first});
    NoteFault(loss->fault);
    repair_ = text;
    const bool silent = loss->fault.detect_ms > 0;
    const bool often = suspicion_.StrikesTooOften(pair);
    if (const PeerId relay = RelayNow(link.first, link.second)) {
      // If another relay is possible, this relay counts as failed. Otherwise it is used again.
      Routes others = RoutesNow();
      others.failed[pair].insert(relay);
      if ((silent || often) && CanRouteAround(others, {})) {
        suspicion_.FailRelay(pair, relay);
      } else if (often) {
        // The pair loses its link again and again on every way. Perhaps one of the two breaks the
        // protocol. All others would stand still with them.
        return RemovePeer(ChooseVictim(RoutesNow(), again, record_), Removal::kUnreachable,
                          again.at(link), FaultNow("unreachable", ToString(link.first)), out);
      }
    } else if (silent && CanRouteAround(RoutesNow(), {{link, text}})) {
      // A link that broke can probably be rebuilt at once. A link that was silent for detect_ms may
      // stay silent, so members do not wait for it: the pair becomes blocked.
      return Block({{link, text}}, suspicion_.NextSilentRetry(pair), out);
    } else if (often && CanRouteAround(RoutesNow(), again)) {
      return Block(again, kBlockedRetry, out);
    }
  }
  if (!preparation_) return;
  Preparation& p = *preparation_;
  if (!p.answers.contains(link.first) || !p.answers.contains(link.second)) return;
  if (p.changed.empty() && ++p.rebuilds > kRebuildsMax) return Settle(again, out);
  MarkChanged(text);
}

bool Group::AccusedBy(PeerId other, PeerId peer, Tick at) const {
  if (suspicion_.Accuses({other, peer}, at)) return true;
  if (!preparation_) return false;
  const auto answer = preparation_->answers.find(other);
  return answer != preparation_->answers.end() && answer->second.unreachable.contains(peer) &&
         !RelayNow(other, peer);
}

bool Group::Accused(PeerId peer, Tick now) const {
  return std::any_of(record_.peers.begin(), record_.peers.end(),
                     [&](const PeerRecord& other) { return AccusedBy(other.peer, peer, now); });
}

std::vector<PeerId> Group::Accusers(PeerId peer) const {
  std::vector<PeerId> accusers;
  for (const PeerRecord& other : record_.peers) {
    if (AccusedBy(other.peer, peer, kNever)) accusers.push_back(other.peer);
  }
  return accusers;
}

bool Group::AccusedByAll(PeerId peer) const {
  const std::vector<PeerId> witnesses = Witnesses(peer);
  return witnesses.size() >= 2 &&
         std::all_of(witnesses.begin(), witnesses.end(), [&](PeerId other) {
           return AccusedBy(other, peer, kNever) || RelayNow(other, peer);
         });
}

bool Group::HeardOfLate(PeerId peer) const {
  return directory_->HeardWithin(peer, suspicion_.heard_of_late_us());
}

std::vector<PeerId> Group::Witnesses(PeerId peer) const {
  std::vector<PeerId> others = Participants();
  std::erase_if(others, [&](PeerId other) {
    return other == peer || (directory_->Attached(other) && !HeardOfLate(other));
  });
  return others;
}

// ------------------------------------------------------------------------------
// no link

// Decides what to do about links that cannot be built, when all peers have answered. It waits for
// all answers, because the first ones do not show which end of a pair is the unreachable one.
// Exception: a preparation that only orders the ring is given up at the first failure.
void Group::ResolveUnreachable(GroupOutput* out) {
  if (!preparation_ || !preparation_->changed.empty()) return;
  if (preparation_->reorders) {
    for (const auto& [peer, answer] : preparation_->answers) {
      if (!answer.failed) continue;
      const auto& [other, reason] = *answer.unreachable.begin();
      return KeepRing(Unreached(peer, other, reason), out);
    }
  }
  LostLinks pairs;
  for (const auto& [peer, answer] : preparation_->answers) {
    if (!answer.answered()) return;
    for (const auto& [other, reason] : answer.unreachable) {
      pairs.emplace(LostLink(peer, other), Unreached(peer, other, reason));
    }
  }
  Settle(std::move(pairs), out);
}

std::string Group::Refusal(PeerId newcomer, const std::string& reason, bool held) {
  const std::vector<std::string>& endpoints = PeerOf(newcomer).endpoints;
  const int64_t pause_us = pauses_.Begin(endpoints, held, directory_->Now());
  const std::string address = endpoints.empty() ? "its address" : endpoints.front();
  return Clean(reason + "; open " + address +
               " (TCP) of that host for the hosts of the group, or name the address that they "
               "reach with --advertise of its longhaul-peerd; the group tries this address again "
               "in " +
               std::to_string(pause_us / Seconds(1)) + " s at the earliest");
}

const PeerRecord& Group::PeerOf(PeerId peer) const {
  const auto found = std::find_if(record_.peers.begin(), record_.peers.end(),
                                  [&](const PeerRecord& record) { return record.peer == peer; });
  LH_CHECK(found != record_.peers.end()) << ToString(record_.group) << " " << ToString(peer);
  return *found;
}

// Handles lost links through relays. If an end of the pair cannot reach the relay, that link is the
// cause, and the pair is taken out of `lost`. Otherwise the relay has failed for this pair.
void Group::BlameRelays(LostLinks* lost) {
  const LostLinks all = *lost;
  const auto missing = [&](PeerId x, PeerId y) {
    return all.contains({x, y}) || all.contains({y, x});
  };
  std::erase_if(*lost, [&](const auto& entry) {
    const auto [from, to] = entry.first;
    const PeerId relay = RelayNow(from, to);
    if (!relay) return false;
    if (missing(from, relay) || missing(to, relay)) return true;
    suspicion_.FailRelay(control::MakeBlockedPair(from, to), relay);
    return false;
  });
}

// Removes peers until the group can go around each lost link that is left.
void Group::Settle(LostLinks lost, GroupOutput* out) {
  BlameRelays(&lost);
  while (!lost.empty()) {
    const Routes routes = RoutesNow();
    if (CanRouteAround(routes, lost)) return Block(lost, kBlockedRetry, out);
    // Before a peer is removed, the straight links of older blocked pairs are tried again.
    if (const auto old = BlockedBefore(); !old.empty() && CanRouteAround(routes, lost, old)) {
      for (const control::BlockedPair& pair : old) suspicion_.TryAgain(pair);
      return Block(lost, kBlockedRetry, out);
    }
    // Then, once in a series of preparations, further pending members are taken into the
    // preparation if they can be the relays.
    if (std::set<MemberId> waiting = Waiting(); !waiting.empty() && !preparation_->widened) {
      std::set<PeerId> peers = PeersOf(record_, waiting);
      peers.insert(routes.peers.begin(), routes.peers.end());
      if (CanRouteAround(RoutesOf(peers), lost)) {
        preparation_->joiners.merge(waiting);
        preparation_->widened = true;
        return Block(lost, kBlockedRetry, out);
      }
    }
    const PeerId victim = ChooseVictim(routes, lost, record_);
    std::string reason;
    std::string reporter;
    bool tried = false;  // whether `reason` is from a peer that tried to reach the victim
    std::erase_if(lost, [&](const auto& entry) {
      const auto& [link, text] = entry;
      if (link.first != victim && link.second != victim) return false;
      // Prefer the reason of a peer that tried to reach the victim. The victim itself cannot tell:
      // its port may listen while a firewall drops packets.
      if (reason.empty() || (!tried && link.second == victim)) {
        reason = text;
        reporter = ToString(link.first);
        tried = link.second == victim;
      }
      return true;
    });
    reason = routes.established.contains(victim) ? Clean(reason)
                                                 : Refusal(victim, reason, /*held=*/true);
    RemovePeer(victim, Removal::kUnreachable, reason, FaultNow("unreachable", reporter), out);
  }
}

Routes Group::RoutesOf(const std::set<PeerId>& peers) const {
  const std::vector<PeerId> order = ByAge(record_, peers);
  return {order, PeersOf(record_, Survivors(record_)), BlockedAmong(record_, order),
          suspicion_.failed_relays()};
}

Routes Group::RoutesNow() const {
  const std::vector<PeerId> peers = Participants();
  return RoutesOf({peers.begin(), peers.end()});
}

// The blocked pairs of the open preparation that were blocked before this series of preparations.
control::BlockedPairs Group::BlockedBefore() const {
  control::BlockedPairs old = preparation_->blocked;
  std::erase_if(old, [this](const control::BlockedPair& pair) {
    return !suspicion_.BlockedBefore(pair, preparation_->begun);
  });
  return old;
}

std::set<MemberId> Group::Waiting() const {
  // If the preparation admits no newcomer, votes may be missing, and nobody may be admitted.
  if (!preparation_ || preparation_->joiners.empty() || AssemblySize() > 0) return {};
  std::set<MemberId> waiting = Admissible();
  for (MemberId joiner : preparation_->joiners) waiting.erase(joiner);
  return waiting;
}

void Group::Block(const LostLinks& lost, int64_t retry_us, GroupOutput* out) {
  const std::set<PeerId> in_force = PeersOf(record_, Survivors(record_));
  for (const auto& [link, reason] : lost) {
    const control::BlockedPair pair = control::MakeBlockedPair(link.first, link.second);
    const std::string text =
        ToString(pair.a) + " and " + ToString(pair.b) + " have no link: " + Clean(reason);
    MarkChanged(text);
    if (RelayNow(pair.a, pair.b)) continue;  // already blocked: the pair gets another relay
    if (!AddBlocked(pair, reason, retry_us, link.first, out)) continue;
    // If both peers are in the committed epoch, ops in flight may use the link.
    if (in_force.contains(pair.a) && in_force.contains(pair.b)) {
      repair_ = Clean(text);
      NoteFault(FaultNow("unreachable", ToString(link.first), 0, link.second));
    }
  }
}

// Returns false if the pair was blocked already.
bool Group::AddBlocked(const control::BlockedPair& pair, const std::string& reason,
                       int64_t retry_us, PeerId reporter, GroupOutput* out) {
  if (!suspicion_.Block(pair, retry_us, directory_->Now())) return false;
  record_.blocked.push_back({pair, Clean(reason)});
  std::sort(record_.blocked.begin(), record_.blocked.end(),
            [](const BlockedRecord& x, const BlockedRecord& y) { return x.pair < y.pair; });
  Note("block", MemberId{}, reporter,
       "pair routed around a=" + ToString(pair.a) + " b=" + ToString(pair.b) +
           " reason=" + Clean(reason),
       out);
  return true;
}

// ------------------------------------------------------------------------------
// newcomers

// Members' peers try a newcomer's data port while the newcomer is pending. If an unreachable
// newcomer were admitted without a trial, all members would wait for it.
void Group::TryNewcomers(Tick now, GroupOutput* out) {
  pause_over_ = kNever;
  if (!AnyAdmitted(record_)) return trials_.ForgetIf([](PeerId) { return true; });
  for (const Trials::Ended& trial : trials_.End(now)) {
    if (trial.reached) {
      BlockTried(trial, out);
    } else {
      RefuseTried(trial, out);
    }
  }
  const std::set<PeerId> asked = Triers();
  if (asked.empty()) return;
  for (const PeerId newcomer : Untried()) {
    const PeerRecord& record = PeerOf(newcomer);
    if (const Tick until = pauses_.Until(record.endpoints); now < until) {
      pause_over_ = std::min(pause_over_, until);
      continue;
    }
    const uint64_t trial =
        trials_.Begin(newcomer, asked, now + kTrialHalfDetects * Millis(detect_ms_) / 2);
    for (const PeerId peer : asked) {
      out->messages.emplace_back(peer, control::TryPeer{record_.group,
                                                        trial,
                                                        {newcomer, record.endpoints, record.lanes,
                                                         record.host, record.key}});
    }
  }
}

void Group::RefuseTried(const Trials::Ended& trial, GroupOutput* out) {
  // Other newcomers may become relays for this newcomer. So it stays pending and is tried again
  // later.
  if (!TooFewReach(trial.errors.size(), trial.asked + OthersComing(trial.newcomer))) {
    pauses_.Begin(PeerOf(trial.newcomer).endpoints, /*held=*/false, directory_->Now());
    return;
  }
  std::string reason;
  for (const auto& [peer, error] : trial.errors) {
    reason += (reason.empty() ? "" : ", ") + Unreached(peer, trial.newcomer, error);
    if (reason.size() > LH_ERROR_TEXT_BYTES_MAX / 3) break;
  }
  reason += " (" + std::to_string(trial.errors.size()) + " of the " + std::to_string(trial.asked) +
            " members that tried cannot)";
  RemovePeer(trial.newcomer, Removal::kUnreachable, Refusal(trial.newcomer, reason, /*held=*/false),
             FaultNow("unreachable", ToString(trial.errors.begin()->first)), out);
}

// The pairs of the newcomer with the few members that do not reach it are blocked from the start,
// so that nobody waits until these members give up.
void Group::BlockTried(const Trials::Ended& trial, GroupOutput* out) {
  for (const auto& [peer, error] : trial.errors) {
    if (record_.blocked.size() >= LH_BLOCKED_PAIRS_MAX || !InForce(peer)) continue;
    const control::BlockedPair pair = control::MakeBlockedPair(peer, trial.newcomer);
    AddBlocked(pair, Unreached(peer, trial.newcomer, error), suspicion_.NextSilentRetry(pair), peer,
               out);
  }
}

// Returns how many peers of other pending members the members' peers have reached or are trying.
size_t Group::OthersComing(PeerId newcomer) const {
  std::set<PeerId> others;
  for (const MemberRecord& member : record_.members) {
    const PeerId peer = member.peer;
    if (peer == newcomer || InForce(peer)) continue;
    if (trials_.Reached(peer) || trials_.Running(peer)) others.insert(peer);
  }
  return others.size();
}

bool Group::Reached(PeerId peer) const {
  return !AnyAdmitted(record_) || InForce(peer) || trials_.Reached(peer);
}

// A member of a complete cohort needs no further trial: the members of all its groups have reached
// its peer, and the cohort has to be admitted in all groups by one ballot.
bool Group::MayAdmit(const MemberRecord& member) const {
  const bool complete = !member.cohort.empty() && member.after != kCohortIncomplete;
  return complete || Reached(member.peer);
}

std::set<PeerId> Group::Untried() const {
  std::set<PeerId> untried;
  for (const MemberRecord& member : record_.members) {
    const PeerId peer = member.peer;
    if (IsAdmitted(member) || MayAdmit(member) || trials_.Running(peer)) continue;
    if (directory_->Attached(peer) && !directory_->Draining(peer)) untried.insert(peer);
  }
  return untried;
}

// The peers that try newcomers: at most kTriersMax of the members' peers that are heard, spread
// over the ring.
std::set<PeerId> Group::Triers() const {
  std::vector<PeerId> heard = OrderOf(record_, PeersOf(record_, Survivors(record_)));
  std::erase_if(heard,
                [this](PeerId peer) { return !directory_->Attached(peer) || !HeardOfLate(peer); });
  std::set<PeerId> triers;
  const size_t count = std::min(heard.size(), kTriersMax);
  for (size_t i = 0; i < count; ++i) triers.insert(heard[i * heard.size() / count]);
  return triers;
}

uint32_t Group::CountComing() const {
  return static_cast<uint32_t>(
      std::count_if(record_.members.begin(), record_.members.end(),
                    [this](const MemberRecord& m) { return !IsAdmitted(m) && MayAdmit(m); }));
}

// Forgets what is known of peers that are no longer in the group. If one comes back, everything is
// tried again.
void Group::ForgetStrangers() {
  ForgetBlockedOfStrangers(&record_);
  const auto stranger = [this](PeerId peer) { return !HasPeer(peer); };
  suspicion_.ForgetReportsOf(stranger);
  disputes_.ForgetIf(stranger);
  trials_.ForgetIf(stranger);
  suspicion_.ForgetPairsOf(stranger, [this](const control::BlockedPair& pair) {
    return std::any_of(record_.blocked.begin(), record_.blocked.end(), [&](const BlockedRecord& b) {
      return b.pair.a == pair.a && b.pair.b == pair.b;
    });
  });
}

PeerId Group::RelayNow(PeerId x, PeerId y) const {
  if (record_.blocked.empty()) return PeerId();
  return control::RelayOf(preparation_ ? preparation_->blocked : BlockedAmong(record_, Ring()), x,
                          y);
}

}  // namespace longhaul::coordinator
