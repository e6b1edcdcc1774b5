#include "coordinator/core/disputes.h"

#include <algorithm>

#include "coordinator/core/text.h"

namespace longhaul::coordinator {
namespace {

// The name of the READYs that a dispute is about.
control::ReadyName NameOf(const control::Dispute& dispute) {
  return {dispute.group, dispute.attempt, dispute.boundary,
          dispute.tag,   dispute.set,     dispute.index};
}

}  // namespace

std::optional<Disputes::Barred> Disputes::Take(PeerId peer, const control::Dispute& dispute,
                                               const VictimOf& victim_of, EpochState* epochs,
                                               const GroupStep& step) {
  GroupRecord& group = epochs->record;
  if (!epochs->InForce(peer) || dispute.peer == peer) return std::nullopt;
  // The freeze that answers the first dispute about an op may be under way when a second peer
  // disputes. The two together may prove who lies.
  const bool open = dispute.attempt == group.last_freeze && group.last_freeze <= group.committed;
  if (!open && !said_.contains(NameOf(dispute))) return std::nullopt;
  if (!Admit(peer, dispute.attempt)) return std::nullopt;
  const std::string what = Clean(dispute.what);
  const auto note = [&](PeerId of, const std::string& text) {
    epochs->Note("dispute", MemberId{}, of, text, step);
  };
  if (const std::optional<PeerId> liar = Add(peer, dispute, group)) {
    note(*liar, "peer lies peer=" + ToString(*liar) + " proof=\"signed two READYs of one op\"" +
                    LogField("op", what) + " reporter=" + ToString(peer));
    return Barred{*liar, "it told two peers different things about " + what + ", and signed both"};
  }
  const bool evidence = !dispute.peer && !dispute.statements.empty();
  if (!open || evidence) return std::nullopt;
  if (!dispute.peer) {
    const std::string text = ToString(peer) + " asks for a new attempt: " + what;
    note(peer, text);
    epochs->AskForFreeze(text, step.Fault("dispute", ToString(peer)));
    return std::nullopt;
  }
  note(peer, "verdicts differ peer=" + ToString(peer) + " other=" + ToString(dispute.peer) +
                 LogField("op", what) + " signed=" + (group.SignsOps() ? "1" : "0"));
  if (!group.sign_ops) {
    group.sign_ops = true;
    group.sign_ops_from = Epoch(group.highest.value() + 1);
  } else if (group.SignsOps() && CountUnproven(peer, dispute)) {
    // Nobody can prove who of the pair lies. The peer in most disputed pairs is removed, then the
    // one that joined last.
    const MissingLinks pairs = TakeUnproven();
    return Barred{victim_of(pairs), pairs.begin()->second};
  }
  epochs->AskForFreeze(
      "verdicts of " + ToString(peer) + " and " + ToString(dispute.peer) + " differ about " + what,
      step.Fault("dispute", ToString(peer), 0, dispute.peer));
  return std::nullopt;
}

bool Disputes::Admit(PeerId reporter, Epoch attempt) {
  auto& [newest, count] = sent_[reporter];
  if (attempt > newest) {
    newest = attempt;
    count = 0;
  }
  return ++count <= kDisputesOfPeerMax;
}

std::optional<PeerId> Disputes::Add(PeerId reporter, const control::Dispute& dispute,
                                    const GroupRecord& group) {
  if (dispute.statements.empty()) return std::nullopt;
  const control::ReadyName name = NameOf(dispute);
  Said& said = said_[name];
  if (!said.reporters.insert(reporter).second) return std::nullopt;
  std::optional<PeerId> liar;
  for (const control::Statement& statement : dispute.statements) {
    // A peer cannot testify against itself: what it did not send proves nothing.
    if (statement.peer == reporter) continue;
    const auto peer = std::find_if(group.peers.begin(), group.peers.end(),
                                   [&](const PeerRecord& p) { return p.peer == statement.peer; });
    const std::string key = peer == group.peers.end() ? "" : peer->key;
    if (key.empty() || !control::IsStatementOf(key, name, statement)) continue;
    const auto [known, added] = said.digests.emplace(statement.peer, statement.digest);
    if (!added && known->second != statement.digest) liar = statement.peer;
  }
  if (said.digests.empty()) {
    said_.erase(name);
    return std::nullopt;
  }
  // The names of old attempts come first.
  while (said_.size() > kReadiesMax) said_.erase(said_.begin());
  return liar;
}

bool Disputes::CountUnproven(PeerId reporter, const control::Dispute& dispute) {
  const auto [first, second] = std::minmax(reporter, dispute.peer);
  Unproved& pair = unproven_[{first, second}];
  pair.what = dispute.what;
  return ++pair.count > kDisputesMax;
}

MissingLinks Disputes::TakeUnproven() {
  MissingLinks pairs;
  for (const auto& [pair, unproved] : std::exchange(unproven_, {})) {
    pairs.emplace(pair, "verdicts of " + ToString(pair.first) + " and " + ToString(pair.second) +
                            " differ again and again, last about " + unproved.what);
  }
  return pairs;
}

void Disputes::ForgetIf(const std::function<bool(PeerId)>& stranger) {
  std::erase_if(sent_, [&](const auto& entry) { return stranger(entry.first); });
  std::erase_if(unproven_, [&](const auto& entry) {
    return stranger(entry.first.first) || stranger(entry.first.second);
  });
}

}  // namespace longhaul::coordinator
