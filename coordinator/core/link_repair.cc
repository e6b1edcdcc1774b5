#include "coordinator/core/link_repair.h"

#include <algorithm>

#include "coordinator/core/accusations.h"
#include "coordinator/core/text.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

// After this many lost links in one series of preparations, a further lost link counts as a link
// that cannot be built. Otherwise a link that breaks again and again would hold all members for
// ever.
constexpr uint32_t kRebuildsMax = 3;

}  // namespace

Violation LinkRepair::Lost(PeerId peer, const control::LinkLost& lost) {
  const GroupRecord& group = epochs_->record;
  if (lost.epoch > group.highest) {
    return "lost link in epoch " + ToString(lost.epoch) + ", which was never prepared";
  }
  // A freeze after the reporter's epoch answers the report when it is committed, because its
  // preparation checks all links. An epoch that froze nothing answers no report.
  const bool answered = lost.epoch < group.last_freeze;
  if ((answered && group.last_freeze <= group.committed) || lost.peer == peer) return std::nullopt;
  const auto counts = [this](PeerId id) {
    return epochs_->preparation ? epochs_->preparation->answers.contains(id)
                                : epochs_->Staying().contains(id);
  };
  if (!counts(peer) || !counts(lost.peer)) return std::nullopt;
  const LinkEnds link(peer, lost.peer);
  const PeerId relay = epochs_->RelayNow(peer, lost.peer);
  // The report is about the straight link, which the blocked pair no longer uses.
  if (relay && answered) return std::nullopt;
  const Accusations accusations(*epochs_, *reports_, step_.peers);
  // With a relay, the longer grace lets a death of the relay show first.
  const bool unheard = relay || (lost.silent_ms > 0 && !accusations.HeardOfLate(lost.peer));
  const LinkReports::Evidence evidence{lost.silent_ms, unheard,
                                       accusations.Witnesses(lost.peer).size()};
  // A lost link through a relay is no evidence against the far end.
  if (!relay) reports_->Accuse(link, evidence, step_.now);
  // The freeze has probably rebuilt a link that broke. A link that was silent may still be silent,
  // and then the freeze would wait for it. So its loss is noted.
  if (answered && lost.silent_ms == 0) return std::nullopt;
  const std::string reason = Clean(lost.reason);
  const FaultReport fault = step_.Fault(lost.silent_ms == 0 ? "reset" : "silence", ToString(peer),
                                        lost.silent_ms, lost.peer);
  if (reports_->Lose(link, evidence, {Tick(), lost.epoch, reason, fault}, step_.now)) {
    epochs_->Note("link_lost", MemberId{}, peer,
                  "link lost from=" + ToString(peer) + " to=" + ToString(lost.peer) +
                      " silent_ms=" + std::to_string(lost.silent_ms) + LogField("reason", reason),
                  step_);
  }
  return std::nullopt;
}

void LinkRepair::OnGraceOver() {
  for (const LinkEnds& link : reports_->LossesDue(step_.now)) GraceOver(link);
}

// The grace is over, and neither peer has turned out to be dead. So both are alive, and only their
// link is lost.
void LinkRepair::GraceOver(LinkEnds link) {
  const std::optional<LinkReports::Loss> loss = reports_->RemoveLoss(link);
  if (!loss) return;
  const std::string text = LinkText(link.first, link.second, loss->reason);
  std::optional<Preparation>& open = epochs_->preparation;
  // The open preparation freezes, was begun after the report, and builds this link. If the group
  // cannot go around the link, waiting for that preparation is best.
  if (open && open->freeze && loss->epoch < open->epoch &&
      !CanRouteAround(RoutesNow(), {{link, text}})) {
    return;
  }
  const MissingLinks again{{link, text + " (again and again)"}};
  const std::set<PeerId> in_force = epochs_->Staying();
  const bool freeze = in_force.contains(link.first) && in_force.contains(link.second);
  const control::BlockedPair pair = control::MakeBlockedPair(link.first, link.second);
  reports_->Strike(pair, step_.now);
  if (freeze) {
    // Both ends may report the same loss. It counts as one strike.
    reports_->ForgetLoss({link.second, link.first});
    epochs_->NoteFault(loss->fault);
    epochs_->must_freeze = text;
    const bool silent = loss->fault.detect_ms > 0;
    const bool often = reports_->StrikesTooOften(pair);
    if (const PeerId relay = epochs_->RelayNow(link.first, link.second)) {
      // If another relay is possible, this relay counts as failed. Otherwise it is used again.
      Routes others = RoutesNow();
      others.failed[pair].insert(relay);
      if ((silent || often) && CanRouteAround(others, {})) {
        reports_->FailRelay(pair, relay);
      } else if (often) {
        // The pair loses its link again and again on every way. Perhaps one of the two breaks the
        // protocol. All others would stand still with them.
        return calls_.remove(VictimOf(again), again.at(link), link.first);
      }
    } else if (silent && CanRouteAround(RoutesNow(), {{link, text}})) {
      // A link that broke can probably be rebuilt at once. A link that was silent for detect_ms may
      // stay silent, so members do not wait for it: the pair becomes blocked.
      return Block({{link, text}}, reports_->NextSilentRetry(pair));
    } else if (often && CanRouteAround(RoutesNow(), again)) {
      return Block(again, kBlockedRetry);
    }
  }
  if (!open || !open->answers.contains(link.first) || !open->answers.contains(link.second)) return;
  if (open->changed.empty() && ++open->rebuilds > kRebuildsMax) return GoAround(again);
  epochs_->MarkChanged(text);
}

// Handles missing links through relays. If an end of the pair cannot reach the relay, that link is
// the cause, and the pair is taken out of `missing`. Otherwise the relay has failed for this pair.
void LinkRepair::BlameRelays(MissingLinks* missing) {
  const MissingLinks all = *missing;
  const auto lacks = [&](PeerId x, PeerId y) {
    return all.contains({x, y}) || all.contains({y, x});
  };
  std::erase_if(*missing, [&](const auto& entry) {
    const auto [from, to] = entry.first;
    const PeerId relay = epochs_->RelayNow(from, to);
    if (!relay) return false;
    if (lacks(from, relay) || lacks(to, relay)) return true;
    reports_->FailRelay(control::MakeBlockedPair(from, to), relay);
    return false;
  });
}

void LinkRepair::GoAround(MissingLinks missing) {
  BlameRelays(&missing);
  while (!missing.empty()) {
    const Routes routes = RoutesNow();
    if (CanRouteAround(routes, missing)) return Block(missing, kBlockedRetry);
    // Before a peer is removed, the straight links of older blocked pairs are tried again.
    if (const auto old = BlockedBefore(); !old.empty() && CanRouteAround(routes, missing, old)) {
      for (const control::BlockedPair& pair : old) reports_->TryAgain(pair);
      return Block(missing, kBlockedRetry);
    }
    if (WidenFor(missing, routes)) return Block(missing, kBlockedRetry);
    RemoveVictim(routes, &missing);
  }
}

// Once in a series of preparations, further pending members are taken into the preparation if they
// can be the relays. Returns whether that helps.
bool LinkRepair::WidenFor(const MissingLinks& missing, const Routes& routes) {
  std::set<MemberId> waiting = calls_.waiting();
  if (waiting.empty() || epochs_->preparation->widened) return false;
  std::set<PeerId> peers = PeersOf(epochs_->record, waiting);
  peers.insert(routes.peers.begin(), routes.peers.end());
  if (!CanRouteAround(RoutesOf(peers), missing)) return false;
  epochs_->preparation->joiners.merge(waiting);
  epochs_->preparation->widened = true;
  return true;
}

void LinkRepair::RemoveVictim(const Routes& routes, MissingLinks* missing) {
  const PeerId victim = ChooseVictim(routes, *missing, epochs_->record);
  std::string reason;
  PeerId reporter;
  bool tried = false;  // whether `reason` is from a peer that tried to reach the victim
  std::erase_if(*missing, [&](const auto& entry) {
    const auto& [link, text] = entry;
    if (link.first != victim && link.second != victim) return false;
    // Prefer the reason of a peer that tried to reach the victim. The victim itself cannot tell:
    // its port may listen while a firewall drops packets.
    if (reason.empty() || (!tried && link.second == victim)) {
      reason = text;
      reporter = link.first;
      tried = link.second == victim;
    }
    return true;
  });
  calls_.remove(victim, reason, reporter);
}

Routes LinkRepair::RoutesOf(const std::set<PeerId>& peers) const {
  const std::vector<PeerId> order = ByAge(epochs_->record, peers);
  return {order, epochs_->Staying(), BlockedAmong(epochs_->record, order),
          reports_->failed_relays()};
}

Routes LinkRepair::RoutesNow() const {
  const std::vector<PeerId> peers = epochs_->Participants();
  return RoutesOf({peers.begin(), peers.end()});
}

// The blocked pairs of the open preparation that were blocked before this series of preparations.
control::BlockedPairs LinkRepair::BlockedBefore() const {
  control::BlockedPairs old = epochs_->preparation->blocked;
  std::erase_if(old, [this](const control::BlockedPair& pair) {
    return !reports_->BlockedBefore(pair, epochs_->preparation->begun);
  });
  return old;
}

void LinkRepair::Block(const MissingLinks& missing, int64_t retry_us) {
  const std::set<PeerId> in_force = epochs_->Staying();
  for (const auto& [link, reason] : missing) {
    const control::BlockedPair pair = control::MakeBlockedPair(link.first, link.second);
    const std::string text =
        ToString(pair.a) + " and " + ToString(pair.b) + " have no link: " + Clean(reason);
    epochs_->MarkChanged(text);
    if (epochs_->RelayNow(pair.a, pair.b)) continue;  // already blocked: it gets another relay
    if (!AddBlocked(pair, reason, retry_us, link.first)) continue;
    // If both peers are in the committed epoch, ops in flight may use the link.
    if (in_force.contains(pair.a) && in_force.contains(pair.b)) {
      epochs_->AskForFreeze(text, step_.Fault("unreachable", ToString(link.first), 0, link.second));
    }
  }
}

// Returns false if the pair was blocked already.
bool LinkRepair::AddBlocked(const control::BlockedPair& pair, const std::string& reason,
                            int64_t retry_us, PeerId reporter) {
  if (!reports_->Block(pair, retry_us, step_.now)) return false;
  std::vector<BlockedRecord>& blocked = epochs_->record.blocked;
  blocked.push_back({pair, Clean(reason)});
  std::sort(blocked.begin(), blocked.end(),
            [](const BlockedRecord& x, const BlockedRecord& y) { return x.pair < y.pair; });
  epochs_->Note("block", MemberId{}, reporter,
                "pair routed around a=" + ToString(pair.a) + " b=" + ToString(pair.b) +
                    LogField("reason", Clean(reason)),
                step_);
  return true;
}

void LinkRepair::BlockTried(const Trials::Ended& trial) {
  for (const auto& [peer, error] : trial.errors) {
    if (epochs_->record.blocked.size() >= LH_BLOCKED_PAIRS_MAX || !epochs_->InForce(peer)) continue;
    const control::BlockedPair pair = control::MakeBlockedPair(peer, trial.newcomer);
    AddBlocked(pair, Unreached(peer, trial.newcomer, error), reports_->NextSilentRetry(pair), peer);
  }
}

void LinkRepair::ChooseRing(const std::vector<PeerId>& better, Preparation* preparation) const {
  std::set<PeerId> peers;
  for (const auto& [peer, answer] : preparation->answers) peers.insert(peer);
  const std::vector<PeerId> order =
      preparation->reorders ? better : OrderOf(epochs_->record, peers);
  control::BlockedPairs blocked = BlockedAmong(epochs_->record, order);
  std::erase_if(blocked, [&](const control::BlockedPair& pair) {
    return preparation->freeze && reports_->TryDue(pair, step_.now);
  });
  ChooseRelays(ByAge(epochs_->record, peers), reports_->failed_relays(), &blocked);
  // No peer can be the relay of these pairs, so their straight links are tried again.
  std::erase_if(blocked, [](const control::BlockedPair& pair) { return !pair.relay; });
  preparation->ring = control::RingAvoiding(order, blocked).value_or(order);
  preparation->blocked = std::move(blocked);
}

}  // namespace longhaul::coordinator
