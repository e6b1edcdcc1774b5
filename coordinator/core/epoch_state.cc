#include "coordinator/core/epoch_state.h"

#include <algorithm>

#include "base/check.h"
#include "coordinator/core/text.h"

namespace longhaul::coordinator {
namespace {

// Whom a fault was about: "m3 at p3 (host h3)", or "p3 (host h3)".
std::string SubjectOf(const FaultReport& fault, const std::vector<MemberRecord>& removed,
                      const GroupRecord& group) {
  const auto name = [&group](PeerId peer) {
    const auto known = std::find_if(group.peers.begin(), group.peers.end(),
                                    [peer](const PeerRecord& p) { return p.peer == peer; });
    const bool named = known != group.peers.end() && !known->host.empty();
    return ToString(peer) + (named ? " (host " + known->host + ")" : "");
  };
  if (removed.empty()) return fault.of ? name(fault.of) : "";
  std::string text;
  for (size_t i = 0; i < std::min(removed.size(), kNamesShownMax); ++i) {
    text +=
        (text.empty() ? "" : ", ") + ToString(removed[i].member) + " at " + name(removed[i].peer);
  }
  if (removed.size() <= kNamesShownMax) return text;
  return text + " and " + std::to_string(removed.size() - kNamesShownMax) + " more";
}

}  // namespace

const PeerRecord& EpochState::PeerOf(PeerId peer) const {
  const auto found = std::find_if(record.peers.begin(), record.peers.end(),
                                  [&](const PeerRecord& known) { return known.peer == peer; });
  LH_CHECK(found != record.peers.end()) << ToString(record.group) << " " << ToString(peer);
  return *found;
}

std::vector<PeerId> EpochState::Participants() const {
  std::set<PeerId> peers = Staying();
  if (preparation) peers.merge(PeersOf(record, preparation->joiners));
  return OrderOf(record, peers);
}

PeerId EpochState::RelayNow(PeerId x, PeerId y) const {
  if (record.blocked.empty()) return PeerId();
  return control::RelayOf(preparation ? preparation->blocked : BlockedAmong(record, Ring()), x, y);
}

void EpochState::AskForFreeze(const std::string& why, const FaultReport& report) {
  MarkChanged(why);
  must_freeze = Clean(why);
  NoteFault(report);
}

FaultRecord EpochState::EndFault(const std::vector<MemberRecord>& removed, Tick now) {
  const FaultReport report = *std::exchange(fault, std::nullopt);
  return {report.cause, report.detector, report.detect_ms,
          static_cast<uint32_t>((now - report.since) / Millis(1)),
          SubjectOf(report, removed, record)};
}

void EpochState::Reconcile(PeerId peer, const control::GroupState& said, bool forgotten,
                           const GroupStep& step) {
  if (!said.prepared) return;
  const std::optional<Preparation>& open = preparation;
  const bool in_force = InForce(peer);
  if (open && open->epoch == said.prepared && open->id == said.preparation) {
    return;  // the peer has the open preparation
  }
  if (in_force && said.prepared <= record.committed) return;  // CommitEpoch was sent
  // The store does not know the peer's preparation: the store went back in time, and perhaps the
  // number was given out again before this peer attached.
  const bool unknown = forgotten || (open && open->epoch <= said.prepared);
  const bool replaced = open && !unknown && (open->freeze || !said.frozen);
  if (replaced) return;
  if (!unknown && !(in_force && said.frozen)) {
    step.Send(peer, control::AbortEpoch{record.group, said.prepared, "it was given up"});
    return;
  }
  const std::string text = ToString(peer) + " has prepared another epoch " +
                           ToString(said.prepared) + " than the store knows";
  MarkChanged(text);
  if (in_force) AskForFreeze(text, step.Fault("restart", "coordinator"));
}

control::CommitEpoch EpochState::CommitFor(PeerId peer) const {
  control::CommitEpoch message{record.group, record.committed, {}, {}};
  for (const FatesRecord& fates : record.fates) {
    if (fates.peer != peer) continue;
    message.fates = fates.fates;
    message.missed = fates.missed;
  }
  return message;
}

EventRecord& EpochState::Note(std::string kind, MemberId member, PeerId peer, std::string text,
                              const GroupStep& step) const {
  const Epoch epoch = preparation ? preparation->epoch : record.committed;
  return step.out->notices.emplace_back(
      EventRecord{std::move(kind), record.group, epoch, member, peer, std::move(text)});
}

}  // namespace longhaul::coordinator
