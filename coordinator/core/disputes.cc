#include "coordinator/core/disputes.h"

#include <algorithm>

namespace longhaul::coordinator {

control::ReadyName NameOf(const control::Dispute& dispute) {
  return {dispute.group, dispute.attempt, dispute.boundary,
          dispute.tag,   dispute.set,     dispute.index};
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
                                    const KeyOf& key_of) {
  if (dispute.statements.empty()) return std::nullopt;
  const control::ReadyName name = NameOf(dispute);
  Said& said = said_[name];
  if (!said.reporters.insert(reporter).second) return std::nullopt;
  std::optional<PeerId> liar;
  for (const control::Statement& statement : dispute.statements) {
    // A peer cannot testify against itself: what it did not send proves nothing.
    if (statement.peer == reporter) continue;
    const std::string key = key_of(statement.peer);
    if (key.empty() || !control::IsStatementOf(key, name, statement)) continue;
    const auto [known, added] = said.digests.emplace(statement.peer, statement.digest);
    if (!added && known->second != statement.digest) liar = statement.peer;
  }
  if (said.digests.empty()) {
    said_.erase(name);
    return std::nullopt;
  }
  // The names of old attempts come first.
  while (said_.size() > kReadiesKept) said_.erase(said_.begin());
  return liar;
}

bool Disputes::CountUnproven(PeerId reporter, const control::Dispute& dispute) {
  const auto [first, second] = std::minmax(reporter, dispute.peer);
  Unproved& pair = unproven_[{first, second}];
  pair.what = dispute.what;
  return ++pair.count > kDisputesMax;
}

LostLinks Disputes::Unproven() const {
  LostLinks pairs;
  for (const auto& [pair, unproved] : unproven_) {
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

void Disputes::AddTo(Digester* digest) const {
  for (const auto& [name, said] : said_) {
    digest->Add(name.attempt).Add(name.boundary).Add(name.tag).Add(name.set).Add(name.index);
    digest->Add(said.reporters).Add(said.digests);
  }
  for (const auto& [pair, unproved] : unproven_) digest->Add(pair).Add(unproved.count);
  if (!sent_.empty()) digest->Add(sent_);
}

}  // namespace longhaul::coordinator
