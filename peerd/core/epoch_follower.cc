#include "peerd/core/epoch_follower.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/text.h"

namespace longhaul::peerd {
namespace {

// The links of an epoch must be up within this many detect_ms.
constexpr int64_t kBuildDetects = 4;

std::string RingText(const std::vector<PeerId>& ring) {
  std::string text;
  for (const PeerId peer : ring) text += (text.empty() ? "" : ",") + ToString(peer);
  return text;
}

}  // namespace

EpochFollower::EpochFollower(GroupKey group, PeerId self) : group_(std::move(group)), self_(self) {}

std::set<PeerId> EpochFollower::PreparedPeers() const {
  std::set<PeerId> peers;
  if (!prepared_) return peers;
  for (const control::PeerInfo& peer : prepared_->message.peers) peers.insert(peer.peer);
  return peers;
}

bool EpochFollower::InCommitted(PeerId peer) const {
  return !history_.empty() && peer != self_ && history_.current().HasPeer(peer);
}

std::set<PeerId> EpochFollower::OtherPeers() const {
  std::set<PeerId> peers = PreparedPeers();
  if (!history_.empty()) {
    const std::vector<PeerId>& ring = history_.current().ring;
    peers.insert(ring.begin(), ring.end());
  }
  peers.erase(self_);
  return peers;
}

Epoch EpochFollower::Newest() const {
  return prepared_ ? prepared_->message.epoch : history_.committed();
}

// ------------------------------------------------------------------------------ the coordinator

std::string EpochFollower::ProblemWith(const control::PrepareEpoch& message) const {
  if (message.epoch <= Newest()) {
    return "it is no newer than epoch " + ToString(Newest());
  }
  if (std::string problem = ProblemOf(message, self_); !problem.empty()) return problem;
  if (history_.empty()) return "";
  if (freezing() && !message.freeze) return "ops are frozen and it does not freeze";

  const EpochRecord& current = history_.current();
  if (message.base != current.epoch) {
    return "it follows epoch " + ToString(message.base) + ", committed here is " +
           ToString(current.epoch);
  }
  if (message.boundary < current.boundary) return "its boundary goes back";
  if (!message.freeze && message.last_freeze != current.last_freeze)
    return "its last_freeze changed";
  if (!message.freeze && message.sign_ops != current.sign_ops)
    return "it changes whether READYs are signed and does not freeze";
  std::set<MemberId> kept;
  for (const control::MemberInfo& member : message.members) {
    const int rank = current.RankOf(member.member);
    const std::string name = "member " + ToString(member.member);
    if (rank < 0) {
      // Such a member would take part in ops that the other members have begun without it.
      if (member.joined <= current.epoch) return name + " is new and joined before";
      continue;
    }
    const control::MemberInfo& before = current.members[static_cast<size_t>(rank)];
    if (before.joined != member.joined || before.peer != member.peer) return name + " changed";
    kept.insert(member.member);
  }
  if (message.freeze) return "";
  if (kept.size() != current.members.size()) return "it removes members and does not freeze";
  // A link that goes another way is built anew. Ops in flight would lose frames with the old link.
  for (const PeerId a : current.ring) {
    for (const PeerId b : current.ring) {
      if (!(a < b) || current.RelayOf(a, b) == control::RelayOf(message.blocked, a, b)) continue;
      return "it changes the way between " + ToString(a) + " and " + ToString(b) +
             " and does not freeze";
    }
  }
  return "";
}

bool EpochFollower::Prepare(const control::PrepareEpoch& message, uint32_t detect_ms, Tick now,
                            std::vector<Action>* out) {
  if (prepared_ && prepared_->message.epoch == message.epoch &&
      prepared_->message.preparation == message.preparation) {
    // The coordinator repeats the message after a reconnect.
    SendAnswer(out);
    return false;
  }
  if (const std::string problem = ProblemWith(message); !problem.empty()) {
    out->push_back(LogLine{"epoch not prepared group=" + ToString(group_) +
                           " epoch=" + ToString(message.epoch) + LogField("why", problem)});
    return false;
  }
  Prepared prepared;
  prepared.begun = prepared_ ? prepared_->begun : now;
  prepared.message = message;
  prepared.record = RecordOf(message);
  // A connection and its handshake take some round trips, and on a lossy path some packets are sent
  // again. The deadline may be long: if a peer dies meanwhile, this is found in other ways.
  const Tick deadline = now + kBuildDetects * Millis(detect_ms);
  prepared.deadline = deadline + Millis(detect_ms) / 4;
  std::vector<LinkWanted> links = LinksOf(message, self_);
  const EpochRecord* before = history_.empty() ? nullptr : &history_.current();
  if (prepared_) before = &prepared_->record;
  for (const LinkWanted& link : links) {
    const PeerId peer = link.peer.peer;
    prepared.links.emplace(peer, WantedLink{});
    if (before == nullptr || !before->HasPeer(peer)) continue;
    if (before->RelayOf(self_, peer) != link.relay) prepared.relinked.insert(peer);
  }
  prepared_ = std::move(prepared);
  reported_.clear();
  const std::vector<PeerId>& ring = prepared_->record.ring;
  out->push_back(LogLine{"epoch preparing group=" + ToString(group_) + " epoch=" +
                         ToString(message.epoch) + " freeze=" + (message.freeze ? "1" : "0") +
                         " ring=" + RingText(ring) + LogField("cause", message.cause)});
  if (!links.empty()) {
    out->push_back(OpenLinks{group_, message.epoch, message.token, std::move(links), deadline});
  }
  if (!message.freeze) {
    // Frames were lost with the old link, and ops in flight wait for them. The coordinator prepared
    // this epoch before it heard of the loss, so it takes the old report for stale. Report again.
    for (const auto& [peer, why] : lost_) {
      if (prepared_->links.contains(peer)) ReportLost(peer, why, out);
    }
  }
  return true;
}

bool EpochFollower::Commit(const control::CommitEpoch& message, Tick now,
                           std::vector<Action>* out) {
  if (message.epoch <= history_.committed()) return false;  // repeated
  if (!prepared_ || prepared_->message.epoch != message.epoch ||
      prepared_->answer != Answer::kReady) {
    out->push_back(LogLine{"epoch not committed group=" + ToString(group_) + " epoch=" +
                           ToString(message.epoch) + " why=\"this peer is not ready for it\""});
    return false;
  }
  const Prepared prepared = *std::exchange(prepared_, std::nullopt);
  const EpochRecord& record = prepared.record;
  history_.Add(record);
  lost_.clear();
  std::vector<PeerId> others;
  for (const PeerId peer : record.ring) {
    if (InCommitted(peer)) others.push_back(peer);
  }
  // A link that broke after it was up in the preparation stays lost: the other end may have sent
  // frames of this epoch on it.
  for (const auto& [peer, why] : reported_) {
    if (InCommitted(peer)) lost_.emplace(peer, why);
  }
  out->push_back(KeepLinks{group_, record.epoch, std::move(others)});
  out->push_back(LogLine{
      "epoch committed group=" + ToString(group_) + " epoch=" + ToString(record.epoch) +
      " members=" + std::to_string(record.members.size()) + " ring=" + RingText(record.ring) +
      " took_ms=" + std::to_string((now - prepared.begun) / 1000)});
  return true;
}

bool EpochFollower::Abort(const control::AbortEpoch& message, std::vector<Action>* out) {
  if (!prepared_ || prepared_->message.epoch != message.epoch || freezing()) {
    out->push_back(LogLine{"epoch not aborted group=" + ToString(group_) +
                           " epoch=" + ToString(message.epoch) + " why=\"" +
                           (freezing() ? "it froze ops" : "it is not prepared here") + "\""});
    return false;
  }
  prepared_.reset();
  reported_.clear();
  const std::set<PeerId> peers = OtherPeers();
  out->push_back(KeepLinks{group_, history_.committed(), {peers.begin(), peers.end()}});
  out->push_back(LogLine{"epoch aborted group=" + ToString(group_) +
                         " epoch=" + ToString(message.epoch) + LogField("reason", message.reason)});
  for (const auto& [peer, why] : lost_) ReportLost(peer, why, out);
  return true;
}

// ------------------------------------------------------------------------------ links

void EpochFollower::ReportLost(PeerId peer, const WhyLost& why, std::vector<Action>* out) {
  if (!reported_.emplace(peer, why).second) return;
  out->push_back(LogLine{"link lost group=" + ToString(group_) + " epoch=" + ToString(Newest()) +
                         " peer=" + ToString(peer) + " silent_ms=" + std::to_string(why.silent_ms) +
                         LogField("reason", why.reason)});
  out->push_back(
      ToCoordinator{control::LinkLost{group_, Newest(), peer, why.reason, why.silent_ms}});
}

void EpochFollower::LinkUp(PeerId peer) {
  if (!prepared_) return;
  const auto it = prepared_->links.find(peer);
  if (it == prepared_->links.end()) return;
  it->second.state = LinkState::kUp;
  prepared_->relinked.erase(peer);
}

void EpochFollower::LinkDown(PeerId peer, bool was_up, const WhyLost& why,
                             std::vector<Action>* out) {
  if (InCommitted(peer)) {
    lost_.emplace(peer, why);
    if (!prepared_) return ReportLost(peer, why, out);
  }
  if (!prepared_) return;
  const auto it = prepared_->links.find(peer);
  if (it == prepared_->links.end()) return;
  if (was_up && prepared_->relinked.erase(peer) != 0) return;
  if (was_up) {
    it->second.state = LinkState::kLost;
    ReportLost(peer, why, out);
  } else if (it->second.state == LinkState::kWanted) {
    it->second = {LinkState::kFailed, why.reason};
  }
}

std::set<PeerId> EpochFollower::LostPeers() const {
  std::set<PeerId> peers;
  for (const auto& [peer, why] : lost_) peers.insert(peer);
  return peers;
}

bool EpochFollower::WantsReady() const {
  if (!prepared_ || prepared_->answer != Answer::kNone) return false;
  for (const auto& [peer, link] : prepared_->links) {
    if (link.state != LinkState::kUp) return false;
    if (!prepared_->message.freeze && lost_.contains(peer)) return false;
  }
  return true;
}

void EpochFollower::AnswerReady(std::vector<control::OpReport> ops, std::vector<Action>* out) {
  LH_CHECK(WantsReady());
  prepared_->ops = std::move(ops);
  prepared_->answer = Answer::kReady;
  SendAnswer(out);
}

void EpochFollower::FailIfDue(Tick now, std::vector<Action>* out) {
  if (!prepared_ || prepared_->answer != Answer::kNone) return;
  std::vector<control::Unreachable> unreachable;
  for (auto& [peer, link] : prepared_->links) {
    if (link.state == LinkState::kWanted && now >= prepared_->deadline) {
      link = {LinkState::kFailed, "no link to " + ToString(peer) + " by the deadline"};
    }
    if (link.state == LinkState::kWanted) return;
    if (link.state == LinkState::kFailed) unreachable.push_back({peer, link.reason});
  }
  if (unreachable.empty()) return;
  prepared_->answer = Answer::kFailed;
  prepared_->unreachable = std::move(unreachable);
  SendAnswer(out);
}

Tick EpochFollower::NextDeadline() const {
  if (!prepared_ || prepared_->answer != Answer::kNone) return kNever;
  const bool waiting =
      std::any_of(prepared_->links.begin(), prepared_->links.end(),
                  [](const auto& entry) { return entry.second.state == LinkState::kWanted; });
  return waiting ? prepared_->deadline : kNever;
}

void EpochFollower::SendAnswer(std::vector<Action>* out) const {
  const Epoch epoch = prepared_->message.epoch;
  if (prepared_->answer == Answer::kReady) {
    out->push_back(ToCoordinator{
        control::EpochReady{group_, epoch, prepared_->ops, prepared_->message.preparation}});
  } else if (prepared_->answer == Answer::kFailed) {
    out->push_back(ToCoordinator{control::EpochFailed{group_, epoch, prepared_->unreachable,
                                                      prepared_->message.preparation}});
  }
}

void EpochFollower::Resend(std::vector<Action>* out) const {
  if (prepared_) SendAnswer(out);
  for (const auto& [peer, why] : reported_) {
    out->push_back(
        ToCoordinator{control::LinkLost{group_, Newest(), peer, why.reason, why.silent_ms}});
  }
}

void EpochFollower::Forget(std::vector<Action>* out) {
  if (!prepared_) return;
  const Epoch epoch = prepared_->message.epoch;
  prepared_.reset();
  reported_.clear();
  out->push_back(KeepLinks{group_, epoch, {}});
}

void EpochFollower::Reset() {
  history_.Clear();
  lost_.clear();
  if (!prepared_) reported_.clear();
}

// ------------------------------------------------------------------------------ for tests

void EpochFollower::CheckInvariants() const {
  const std::string name = ToString(group_);
  if (prepared_) {
    LH_CHECK(prepared_->message.epoch > history_.committed()) << name;
    LH_CHECK(!prepared_->links.contains(self_)) << name;
    LH_CHECK(prepared_->links.size() == LinksOf(prepared_->message, self_).size()) << name;
  }
  for (const auto& [peer, reason] : lost_) {
    LH_CHECK(!history_.empty() && history_.current().HasPeer(peer)) << name;
  }
  // A lost link was reported, or there is a preparation that will build it again.
  for (const auto& [peer, reason] : lost_) {
    LH_CHECK(prepared_ || reported_.contains(peer)) << name << " " << ToString(peer);
  }
}

}  // namespace longhaul::peerd
