#include "coordinator/core/group.h"

#include <algorithm>
#include <tuple>

#include "base/check.h"
#include "coordinator/core/judge.h"
#include "coordinator/core/text.h"
#include "coordinator/core/token.h"

namespace longhaul::coordinator {
namespace {

using control::Removal;

// Lost links in one series of preparations before they count as links that cannot be built: what
// flaps must not hold the others for ever.
constexpr uint32_t kRebuildsMax = 3;
// How many detect_ms a peer has to answer a preparation; it gives its links four.
constexpr int64_t kAnswerDetects = 6;
// No correct peer comes near; keeps what a peer claims from using the numbers up.
constexpr uint64_t kEpochClaimMax = uint64_t{1} << 62;
constexpr size_t kNamesShownMax = 8;

const char* WhyText(Removal why) {
  switch (why) {
    case Removal::kLeft:
      return "left";
    case Removal::kDied:
      return "died";
    case Removal::kEvicted:
      return "evicted";
    case Removal::kUnreachable:
      return "unreachable";
    case Removal::kUnknown:
      return "unknown";
  }
  return "unknown";
}

const char* RemovalNotice(Removal why, bool pending) {
  switch (why) {
    case Removal::kLeft:
      return "leave";
    case Removal::kEvicted:
      return "evict";
    case Removal::kUnreachable:
      return pending ? "refuse" : "evict";
    case Removal::kDied:
    case Removal::kUnknown:
      break;
  }
  return "death";
}

std::string LinkText(PeerId from, PeerId to, const std::string& reason) {
  return ToString(from) + " lost its link to " + ToString(to) + ": " + reason;
}

bool Admits(const MemberRecord& member) { return static_cast<bool>(member.joined); }

}  // namespace

Group::Group(GroupRecord record, std::string run_secret, uint32_t detect_ms,
             const PeerDirectory* directory)
    : record_(std::move(record)),
      run_secret_(std::move(run_secret)),
      detect_ms_(detect_ms),
      directory_(directory) {
  ballot_ = Ballot(Survivors());
  // The predecessor froze ops and did not commit: peers wait for the next commit.
  if (record_.attempt > record_.committed && AnyAdmitted()) {
    repair_ = "the coordinator restarted in epoch " + ToString(record_.attempt) +
              ", which was prepared and froze ops";
  }
}

// ------------------------------------------------------------------------------ input

void Group::Attach(const PeerRecord& peer, const control::GroupState& state, Tick now,
                   GroupOutput* out) {
  for (PeerRecord& known : record_.peers) {
    if (known.peer == peer.peer) known = peer;
  }
  // Commits are durable before anybody hears of them, so this is a store that went back in time:
  // what the peer knows and what we know cannot be brought together, but numbers are not used
  // twice.
  const bool store_is_behind = state.committed > record_.committed;
  if (store_is_behind && state.committed.value() < kEpochClaimMax) {
    record_.highest = std::max(record_.highest, state.committed);
  }
  const bool knows_group = state.committed || !state.members.empty();
  if (knows_group && InForce(peer.peer) && state.committed < record_.committed) {
    out->messages.emplace_back(peer.peer, MakeCommit(peer.peer));
  }
  const std::set<MemberId> named(state.members.begin(), state.members.end());
  std::set<MemberId> known;
  for (const MemberRecord& member : record_.members) {
    if (member.peer == peer.peer) known.insert(member.member);
  }
  for (MemberId member : named) {
    if (known.contains(member)) continue;
    out->messages.emplace_back(
        peer.peer, control::Removed{record_.group, member, Removal::kUnknown,
                                    "the coordinator does not know the member (any more)"});
  }
  for (MemberId member : known) {
    if (store_is_behind) {
      Remove(member, Removal::kUnknown,
             "the coordinator's store is older than epoch " + ToString(state.committed) +
                 " of this peer: join again",
             out);
    } else if (!named.contains(member)) {
      Remove(member, Removal::kDied, "its peer came back without it", out);
    }
  }
  if (preparation_) {
    // A changed one is replaced by Advance().
    if (preparation_->changed.empty() && preparation_->answers.contains(peer.peer)) {
      SendPrepare(peer.peer, now, out);
    }
  } else if (!store_is_behind && record_.highest > record_.committed &&
             record_.attempt <= record_.committed && HasPeer(peer.peer)) {
    out->messages.emplace_back(
        peer.peer, control::AbortEpoch{record_.group, record_.highest, "it was given up"});
  }
  if (InForce(peer.peer)) {
    out->messages.emplace_back(peer.peer, control::PendingCount{record_.group, CountPending()});
  }
}

MemberId Group::FindRequest(PeerId peer, uint64_t request) const {
  for (const MemberRecord& member : record_.members) {
    if (member.peer == peer && member.request == request) return member.member;
  }
  return MemberId{};
}

void Group::Join(const PeerRecord& peer, const control::Join& join, MemberId member,
                 GroupOutput* out) {
  if (!HasPeer(peer.peer)) record_.peers.push_back(peer);
  MemberRecord record;
  record.member = member;
  record.peer = peer.peer;
  record.request = join.request;
  record.name = join.name;
  record_.members.push_back(record);
  out->messages.emplace_back(peer.peer, control::JoinPending{join.request, record_.group, member});
  Note("join", member, peer.peer,
       "member pending member=" + ToString(member) + " peer=" + ToString(peer.peer) +
           " name=" + Clean(join.name),
       out);
}

void Group::Leave(PeerId peer, const control::Leave& leave, GroupOutput* out) {
  const MemberRecord* member = Find(leave.member);
  if (member == nullptr || member->peer != peer) {
    out->messages.emplace_back(peer, control::Removed{record_.group, leave.member, Removal::kLeft,
                                                      "it is no member (any more)"});
    return;
  }
  Remove(leave.member, leave.died ? Removal::kDied : Removal::kLeft, Clean(leave.reason), out);
}

Violation Group::Vote(PeerId peer, const control::Vote& vote, GroupOutput* out) {
  MemberRecord* member = Find(vote.member);
  if (member == nullptr || member->peer != peer) {
    out->messages.emplace_back(
        peer, control::Removed{record_.group, vote.member, Removal::kUnknown,
                               "the coordinator does not know the member (any more)"});
    return std::nullopt;
  }
  if (vote.number == 0) return "vote of " + ToString(vote.member) + " has no number";
  if (!Admits(*member)) return "vote of " + ToString(vote.member) + ", which is not admitted";
  if (departures_.contains(vote.member)) return std::nullopt;
  if (vote.number <= member->votes) {
    out->messages.emplace_back(
        peer, control::VoteResult{record_.group, vote.member, vote.number, record_.committed});
    return std::nullopt;
  }
  // Normally no change. A store that lost its last moments does not know of the votes before.
  member->votes = vote.number - 1;
  ballot_.Vote(vote.member);
  return std::nullopt;
}

Violation Group::Ready(PeerId peer, const control::EpochReady& ready) {
  if (ready.epoch > record_.highest) {
    return "ready for epoch " + ToString(ready.epoch) + ", which was never prepared";
  }
  if (!preparation_ || preparation_->epoch != ready.epoch) return std::nullopt;  // stale
  const auto it = preparation_->answers.find(peer);
  if (it == preparation_->answers.end()) return std::nullopt;
  Answer& answer = it->second;
  answer.ready = true;
  answer.failed = false;
  answer.unreachable.clear();
  std::erase_if(missed_, [peer](const LostLink& link) { return link.first == peer; });
  if (preparation_->freeze) answer.ops = ready.ops;
  return std::nullopt;
}

Violation Group::Failed(PeerId peer, const control::EpochFailed& failed) {
  if (failed.epoch > record_.highest) {
    return "failure of epoch " + ToString(failed.epoch) + ", which was never prepared";
  }
  if (!preparation_ || preparation_->epoch != failed.epoch) return std::nullopt;  // stale
  const auto it = preparation_->answers.find(peer);
  if (it == preparation_->answers.end()) return std::nullopt;
  std::map<PeerId, std::string> unreachable;
  for (const control::Unreachable& other : failed.unreachable) {
    if (other.peer == peer || !preparation_->answers.contains(other.peer)) continue;
    unreachable.emplace(other.peer, Clean(other.reason));
  }
  if (unreachable.empty()) {
    return "failure of epoch " + ToString(failed.epoch) + " names no other peer of that epoch";
  }
  Answer& answer = it->second;
  answer.ready = false;
  answer.failed = true;
  answer.ops.clear();
  answer.unreachable = std::move(unreachable);
  return std::nullopt;
}

Violation Group::LinkLost(PeerId peer, const control::LinkLost& lost, Tick now, GroupOutput* out) {
  if (lost.epoch > record_.highest) {
    return "lost link in epoch " + ToString(lost.epoch) + ", which was never prepared";
  }
  // An older report is answered by the freeze that came after it: that preparation checks all
  // links. An epoch that froze nothing answers nothing, whatever its number.
  if (lost.epoch < record_.attempt || lost.peer == peer) return std::nullopt;
  const auto counts = [this](PeerId id) {
    return preparation_ ? preparation_->answers.contains(id) : PeersOf(Survivors()).contains(id);
  };
  if (!counts(peer) || !counts(lost.peer)) return std::nullopt;
  const std::string reason = Clean(lost.reason);
  missed_.emplace(peer, lost.peer);
  const bool fresh =
      lost_.try_emplace({peer, lost.peer}, Grace{now + Millis(detect_ms_) / 10, reason}).second;
  if (fresh) {
    Note("link_lost", MemberId{}, peer,
         "link lost from=" + ToString(peer) + " to=" + ToString(lost.peer) + " reason=" + reason,
         out);
  }
  return std::nullopt;
}

void Group::Evict(MemberId member, const std::string& reason, GroupOutput* out) {
  if (Find(member) != nullptr) Remove(member, Removal::kEvicted, Clean(reason), out);
}

void Group::PeerDied(PeerId peer, const std::string& reason, GroupOutput* out) {
  RemovePeer(peer, Removal::kDied, reason, out);
}

void Group::OnTime(Tick now, GroupOutput* out) {
  std::map<LostLink, std::string> over;
  for (const auto& [link, grace] : lost_) {
    if (grace.due <= now) over.emplace(link, grace.reason);
  }
  for (const auto& [link, reason] : over) {
    lost_.erase(link);
    LinkGraceOver(link, reason, out);
  }
  if (!preparation_) return;
  std::vector<PeerId> silent;
  for (const auto& [peer, answer] : preparation_->answers) {
    if (!answer.answered() && answer.due <= now) silent.push_back(peer);
  }
  for (PeerId peer : silent) {
    RemovePeer(peer, Removal::kUnreachable,
               "silent: " + ToString(peer) + " did not answer the preparation of epoch " +
                   ToString(preparation_->epoch) + " within " +
                   std::to_string(kAnswerDetects * detect_ms_) + " ms",
               out);
  }
}

void Group::Postpone(int64_t us) {
  for (auto& [link, grace] : lost_) grace.due = grace.due + us;
  if (!preparation_) return;
  for (auto& [peer, answer] : preparation_->answers) {
    if (answer.due != kNever) answer.due = answer.due + us;
  }
}

void Group::Advance(Tick now, GroupOutput* out) {
  for (int round = 0;; ++round) {
    LH_CHECK(round < 16) << "group " << ToString(record_.group) << " does not come to rest";
    ResolveUnreachable(out);
    const Decision decision = Decide();
    if (decision.act == Act::kWait) break;
    Apply(decision, now, out);
  }
  if (CountPending() != pending_told_) SendPendingCount(out);
}

// ------------------------------------------------------------------------------ deciding

Group::Decision Group::Decide() const {
  return preparation_ ? DecideInPreparation() : DecideIdle();
}

Group::Decision Group::DecideInPreparation() const {
  Decision decision;
  if (preparation_->changed.empty()) {
    decision.why = WaitingForAnswers();
    decision.act = decision.why.empty() ? Act::kCommit : Act::kWait;
    return decision;
  }
  const bool admitted = AnyAdmitted();
  decision.joiners = preparation_->joiners;
  // With nobody to vote, whoever came in between comes along.
  if (!admitted) decision.joiners.merge(Admissible());
  decision.freeze = admitted && (preparation_->freeze || !departures_.empty() || !repair_.empty());
  if (ballot_.electorate().empty() && decision.joiners.empty()) {
    decision.act = admitted ? Act::kCommitEmpty : Act::kAbort;
  } else if (decision.freeze || !decision.joiners.empty()) {
    decision.act = Act::kPrepare;
  } else {
    decision.act = Act::kAbort;
  }
  return decision;
}

Group::Decision Group::DecideIdle() const {
  Decision decision;
  const bool admitted = AnyAdmitted();
  if (admitted && ballot_.electorate().empty()) {
    decision.act = Act::kCommitEmpty;
    return decision;
  }
  if (admitted && (!departures_.empty() || !repair_.empty())) {
    decision.act = Act::kPrepare;
    decision.freeze = true;
    return decision;
  }
  if (admitted && !ballot_.Decided()) {
    decision.why = WaitingForVotes();
    return decision;
  }
  if (!admission_tried_) decision.joiners = Admissible();
  if (!decision.joiners.empty()) {
    decision.act = Act::kPrepare;
  } else if (admitted) {
    decision.act = Act::kAnswerVotes;
  } else if (CountPending() > 0) {
    decision.why = "waiting for a peer of the pending members that is attached and not draining";
  }
  return decision;
}

std::string Group::WaitingForAnswers() const {
  std::string text;
  size_t missing = 0;
  for (const auto& [peer, answer] : preparation_->answers) {
    if (answer.ready) continue;
    if (++missing > kNamesShownMax) continue;
    text += " " + ToString(peer);
    if (answer.failed) {
      std::vector<PeerId> others;
      for (const auto& [other, reason] : answer.unreachable) others.push_back(other);
      text += " (cannot reach " + List(others, " ", kNamesShownMax) + ")";
    } else if (!directory_->Attached(peer)) {
      text += " (not attached)";
    }
  }
  if (missing == 0) return "";
  if (missing > kNamesShownMax) {
    text += " and " + std::to_string(missing - kNamesShownMax) + " more";
  }
  return "epoch " + ToString(preparation_->epoch) + " waiting for " + std::to_string(missing) +
         " of " + std::to_string(preparation_->answers.size()) + " peers:" + text;
}

std::string Group::WaitingForVotes() const {
  const uint32_t pending = CountPending();
  if (ballot_.voted().empty() && pending == 0) return "";
  const std::vector<MemberId> missing = ballot_.Missing();
  std::string text = "waiting for " + std::to_string(missing.size()) + " of " +
                     std::to_string(ballot_.electorate().size()) +
                     " votes: " + List(missing, " ", kNamesShownMax);
  if (pending > 0) text += "; pending: " + std::to_string(pending);
  return text;
}

// ------------------------------------------------------------------------------ applying

void Group::Apply(const Decision& decision, Tick now, GroupOutput* out) {
  switch (decision.act) {
    case Act::kWait:
      return;
    case Act::kPrepare:
      return Prepare(decision, now, out);
    case Act::kCommit:
      return Commit(now, out);
    case Act::kCommitEmpty:
      return CommitEmpty(out);
    case Act::kAbort:
      return Abort("its newcomers are gone: " + preparation_->changed, out);
    case Act::kAnswerVotes:
      return AnswerVotes(out);
  }
}

void Group::Prepare(const Decision& decision, Tick now, GroupOutput* out) {
  std::vector<MemberId> left;
  for (const auto& [member, departure] : departures_) left.push_back(member);
  Preparation next;
  next.epoch = Epoch(record_.highest.value() + 1);
  next.freeze = decision.freeze;
  next.survivors = Survivors();
  next.joiners = decision.joiners;
  next.begun = now;
  next.cause = "joined=" + List(next.joiners, ",", kNamesShownMax) +
               " left=" + List(left, ",", kNamesShownMax);
  if (preparation_) {
    next.begun = preparation_->begun;
    next.rebuilds = preparation_->rebuilds;
    next.cause +=
        " instead of epoch " + ToString(preparation_->epoch) + ": " + preparation_->changed;
  } else if (!repair_.empty()) {
    next.cause += " because " + repair_;
  }
  next.cause = Clean(std::move(next.cause));
  for (PeerId peer : PeersOf(next.survivors)) next.answers[peer];
  for (PeerId peer : PeersOf(next.joiners)) next.answers[peer];

  record_.highest = next.epoch;
  if (!next.survivors.empty() && !next.joiners.empty()) admission_tried_ = true;
  if (next.freeze) {
    record_.attempt = next.epoch;
    lost_.clear();
  }
  repair_.clear();
  preparation_ = std::move(next);
  for (const auto& [peer, answer] : preparation_->answers) SendPrepare(peer, now, out);
  Note("prepare", MemberId{}, PeerId{},
       "epoch prepared epoch=" + ToString(preparation_->epoch) + " members=" +
           std::to_string(preparation_->survivors.size() + preparation_->joiners.size()) +
           " freeze=" + (preparation_->freeze ? "1 " : "0 ") + preparation_->cause,
       out);
}

void Group::Commit(Tick now, GroupOutput* out) {
  const Preparation done = *std::exchange(preparation_, std::nullopt);
  Reports reports;
  for (const auto& [peer, answer] : done.answers) reports[peer] = answer.ops;
  std::vector<std::pair<MemberRecord, Departure>> removed;
  for (const auto& [member, departure] : departures_)
    removed.emplace_back(*Find(member), departure);
  const std::set<MemberId> voted = done.joiners.empty() ? std::set<MemberId>{} : ballot_.voted();

  TakeEpoch(done.epoch, done.joiners);
  if (done.freeze) {
    for (auto& [peer, fates] : Judge(reports)) record_.fates.push_back({peer, std::move(fates)});
  }
  for (MemberId member : voted) ++Find(member)->votes;
  if (!done.joiners.empty()) {
    ballot_ = Ballot(Survivors());
    admission_tried_ = false;
  }

  for (const auto& [peer, answer] : done.answers)
    out->messages.emplace_back(peer, MakeCommit(peer));
  for (MemberId member : voted) {
    const MemberRecord* voter = Find(member);
    out->messages.emplace_back(
        voter->peer, control::VoteResult{record_.group, member, voter->votes, record_.committed});
  }
  std::vector<MemberId> left;
  for (const auto& [member, departure] : removed) {
    left.push_back(member.member);
    SendRemoved(member, departure.why, departure.reason, out);
  }
  for (MemberId member : done.joiners) {
    const MemberRecord* joiner = Find(member);
    Note("admit", member, joiner->peer,
         "member admitted member=" + ToString(member) + " peer=" + ToString(joiner->peer) +
             " epoch=" + ToString(record_.committed),
         out);
  }
  Note("commit", MemberId{}, PeerId{},
       "epoch committed epoch=" + ToString(record_.committed) +
           " members=" + std::to_string(Admitted().size()) + " joined=" + List(done.joiners) +
           " left=" + List(left) + " ring=" + List(Ring()) +
           " took_ms=" + std::to_string((now - done.begun) / Millis(1)),
       out);
}

void Group::CommitEmpty(GroupOutput* out) {
  preparation_.reset();
  std::vector<std::pair<MemberRecord, Departure>> removed;
  for (const auto& [member, departure] : departures_)
    removed.emplace_back(*Find(member), departure);
  record_.highest = Epoch(record_.highest.value() + 1);
  TakeEpoch(record_.highest, {});
  ballot_ = Ballot();
  admission_tried_ = false;
  repair_.clear();
  lost_.clear();
  std::vector<MemberId> left;
  for (const auto& [member, departure] : removed) {
    left.push_back(member.member);
    SendRemoved(member, departure.why, departure.reason, out);
  }
  Note("commit", MemberId{}, PeerId{},
       "epoch committed epoch=" + ToString(record_.committed) +
           " members=0 joined= left=" + List(left) + " ring= took_ms=0",
       out);
}

void Group::Abort(const std::string& reason, GroupOutput* out) {
  const Preparation given_up = *std::exchange(preparation_, std::nullopt);
  LH_CHECK(!given_up.freeze) << "group " << ToString(record_.group) << " epoch "
                             << ToString(given_up.epoch) << " froze ops and is given up";
  for (const auto& [peer, answer] : given_up.answers) {
    if (!HasPeer(peer)) continue;
    out->messages.emplace_back(peer,
                               control::AbortEpoch{record_.group, given_up.epoch, Clean(reason)});
  }
  Note("abort", MemberId{}, PeerId{},
       "epoch given up epoch=" + ToString(given_up.epoch) + " reason=" + Clean(reason), out);
}

void Group::AnswerVotes(GroupOutput* out) {
  for (MemberId member : ballot_.voted()) {
    MemberRecord* voter = Find(member);
    ++voter->votes;
    out->messages.emplace_back(
        voter->peer, control::VoteResult{record_.group, member, voter->votes, record_.committed});
  }
  ballot_ = Ballot(Survivors());
  admission_tried_ = false;
}

// The record of a committed epoch: who departs is out, `joiners` are in, the rest waits behind.
void Group::TakeEpoch(Epoch epoch, const std::set<MemberId>& joiners) {
  const std::set<PeerId> ring_before = AdmittedPeers();
  record_.committed = epoch;
  if (!joiners.empty()) record_.boundary = epoch;
  record_.fates.clear();
  std::erase_if(record_.members,
                [this](const MemberRecord& m) { return departures_.contains(m.member); });
  departures_.clear();
  for (MemberRecord& member : record_.members) {
    if (joiners.contains(member.member)) member.joined = epoch;
  }
  SortPeers(ring_before);
  std::erase_if(missed_, [this](const LostLink& link) {
    return !HasPeer(link.first) || !HasPeer(link.second);
  });
  std::map<PeerId, size_t> position;
  for (const PeerRecord& peer : record_.peers) position.emplace(peer.peer, position.size());
  const auto rank = [&position](const MemberRecord& m) {
    return Admits(m) ? std::tuple(0, position.at(m.peer), m.member)
                     : std::tuple(1, size_t{0}, m.member);
  };
  std::sort(record_.members.begin(), record_.members.end(),
            [&rank](const MemberRecord& a, const MemberRecord& b) { return rank(a) < rank(b); });
}

// Ring order is the order of first admission, then of ids; peers with nothing but pending members
// stand behind, peers with no members do not stand at all.
void Group::SortPeers(const std::set<PeerId>& ring_before) {
  std::erase_if(record_.peers, [this](const PeerRecord& p) { return CountMembers(p.peer) == 0; });
  const std::set<PeerId> ring = AdmittedPeers();
  const auto rank = [&](const PeerRecord& p) {
    if (!ring.contains(p.peer)) return std::pair(2, PeerId{});
    if (!ring_before.contains(p.peer)) return std::pair(1, p.peer);
    return std::pair(0, PeerId{});
  };
  std::stable_sort(record_.peers.begin(), record_.peers.end(),
                   [&rank](const PeerRecord& a, const PeerRecord& b) { return rank(a) < rank(b); });
}

// ------------------------------------------------------------------------------ messages

void Group::SendRemoved(const MemberRecord& member, Removal why, const std::string& reason,
                        GroupOutput* out) const {
  out->messages.emplace_back(member.peer,
                             control::Removed{record_.group, member.member, why, reason});
}

void Group::SendPrepare(PeerId peer, Tick now, GroupOutput* out) {
  if (!directory_->Attached(peer)) return;
  Answer& answer = preparation_->answers.at(peer);
  // The time to answer runs once, however often the peer comes back.
  if (answer.due == kNever) answer.due = now + kAnswerDetects * Millis(detect_ms_);
  out->messages.emplace_back(peer, MakePrepare());
}

control::PrepareEpoch Group::MakePrepare() const {
  const Preparation& p = *preparation_;
  control::PrepareEpoch message;
  message.group = record_.group;
  message.epoch = p.epoch;
  message.base = record_.committed;
  message.boundary = p.joiners.empty() ? record_.boundary : p.epoch;
  message.attempt = record_.attempt;
  message.freeze = p.freeze;
  message.token = EpochToken(run_secret_, record_.group.group, p.epoch);
  message.cause = p.cause;

  // The order that TakeEpoch() will give the record.
  const std::set<PeerId> ring_before = AdmittedPeers();
  std::vector<const PeerRecord*> fresh;
  std::vector<const PeerRecord*> ring;
  for (const PeerRecord& peer : record_.peers) {
    if (!p.answers.contains(peer.peer)) continue;
    (ring_before.contains(peer.peer) ? ring : fresh).push_back(&peer);
  }
  std::sort(fresh.begin(), fresh.end(),
            [](const PeerRecord* a, const PeerRecord* b) { return a->peer < b->peer; });
  ring.insert(ring.end(), fresh.begin(), fresh.end());
  std::map<PeerId, std::vector<control::MemberInfo>> members;
  for (const MemberRecord& m : record_.members) {
    if (p.joiners.contains(m.member)) {
      members[m.peer].push_back({m.member, m.peer, p.epoch, m.name});
    } else if (p.survivors.contains(m.member)) {
      members[m.peer].push_back({m.member, m.peer, m.joined, m.name});
    }
  }
  for (const PeerRecord* peer : ring) {
    message.peers.push_back({peer->peer, peer->endpoints, peer->lanes});
    std::vector<control::MemberInfo>& local = members[peer->peer];
    std::sort(local.begin(), local.end(),
              [](const auto& a, const auto& b) { return a.member < b.member; });
    message.members.insert(message.members.end(), local.begin(), local.end());
  }
  return message;
}

control::CommitEpoch Group::MakeCommit(PeerId peer) const {
  control::CommitEpoch message{record_.group, record_.committed, {}};
  for (const FatesRecord& record : record_.fates) {
    if (record.peer == peer) message.fates = record.fates;
  }
  return message;
}

void Group::SendPendingCount(GroupOutput* out) {
  pending_told_ = CountPending();
  for (PeerId peer : AdmittedPeers()) {
    out->messages.emplace_back(peer, control::PendingCount{record_.group, pending_told_});
  }
}

// ------------------------------------------------------------------------------ removing

void Group::Remove(MemberId id, Removal why, const std::string& reason, GroupOutput* out) {
  const MemberRecord member = *Find(id);
  if (departures_.contains(id)) return;
  const bool pending = !Admits(member);
  if (!pending) {
    departures_[id] = {why, reason};
    ballot_.Leave(id);
  } else {
    std::erase_if(record_.members, [id](const MemberRecord& m) { return m.member == id; });
    if (CountMembers(member.peer) == 0) {
      std::erase_if(record_.peers, [&](const PeerRecord& p) { return p.peer == member.peer; });
    }
    SendRemoved(member, why, reason, out);
  }
  if (preparation_ && (!pending || preparation_->joiners.erase(id) > 0)) {
    MarkChanged(ToString(id) + " " + WhyText(why));
  }
  Note(RemovalNotice(why, pending), id, member.peer,
       "member removed member=" + ToString(id) + " peer=" + ToString(member.peer) +
           " why=" + WhyText(why) + " reason=" + reason,
       out);
}

void Group::RemovePeer(PeerId peer, Removal why, const std::string& reason, GroupOutput* out) {
  std::vector<MemberId> members;
  for (const MemberRecord& member : record_.members) {
    if (member.peer == peer) members.push_back(member.member);
  }
  for (MemberId member : members) Remove(member, why, reason, out);
}

// All have answered, and some cannot reach others: decides who goes. It waits for all answers since
// the first ones do not show which end of a pair is the one that nobody reaches.
void Group::ResolveUnreachable(GroupOutput* out) {
  if (!preparation_ || !preparation_->changed.empty()) return;
  std::map<LostLink, std::string> pairs;
  for (const auto& [peer, answer] : preparation_->answers) {
    if (!answer.answered()) return;
    for (const auto& [other, reason] : answer.unreachable) {
      pairs.emplace(LostLink(peer, other),
                    ToString(peer) + " cannot reach " + ToString(other) + ": " + reason);
    }
  }
  Blame(std::move(pairs), out);
}

// Removes peers until no pair is left.
void Group::Blame(std::map<LostLink, std::string> pairs, GroupOutput* out) {
  while (!pairs.empty()) {
    const PeerId victim = ChooseVictim(pairs);
    std::string reason;
    std::erase_if(pairs, [&](const auto& pair) {
      if (pair.first.first != victim && pair.first.second != victim) return false;
      if (reason.empty()) reason = pair.second;
      return true;
    });
    RemovePeer(victim, Removal::kUnreachable, Clean(reason), out);
  }
}

// Newcomers before peers of the epoch in force; then the one in most pairs; then the one that
// joined last. Who reports is not the worse for it: a pair counts once, whoever reported it.
PeerId Group::ChooseVictim(const std::map<LostLink, std::string>& pairs) const {
  std::set<LostLink> undirected;
  for (const auto& [pair, reason] : pairs) undirected.insert(std::minmax(pair.first, pair.second));
  std::map<PeerId, size_t> count;
  for (const auto& [a, b] : undirected) {
    ++count[a];
    ++count[b];
  }
  const std::set<PeerId> established = PeersOf(preparation_->survivors);
  std::map<PeerId, std::pair<Epoch, MemberId>> age;  // smallest: here for the longest time
  for (const MemberRecord& m : record_.members) {
    const std::pair<Epoch, MemberId> own(Admits(m) ? m.joined : Epoch(UINT64_MAX), m.member);
    const auto [it, fresh] = age.emplace(m.peer, own);
    if (!fresh) it->second = std::min(it->second, own);
  }
  const auto weight = [&](PeerId peer) {
    return std::tuple(!established.contains(peer), count.at(peer), age[peer]);
  };
  PeerId victim = count.begin()->first;
  for (const auto& [peer, pairs_of_peer] : count) {
    if (weight(peer) > weight(victim)) victim = peer;
  }
  return victim;
}

// A death would have shown by now: the link is lost between two that live.
void Group::LinkGraceOver(LostLink link, const std::string& reason, GroupOutput* out) {
  const std::string text = LinkText(link.first, link.second, reason);
  const std::set<PeerId> in_force = PeersOf(Survivors());
  const bool freeze = in_force.contains(link.first) && in_force.contains(link.second);
  if (!preparation_) {
    if (freeze) repair_ = text;
    return;
  }
  Preparation& p = *preparation_;
  if (!p.answers.contains(link.first) || !p.answers.contains(link.second)) return;
  if (p.changed.empty() && ++p.rebuilds > kRebuildsMax) {
    Blame({{link, text + " (again and again)"}}, out);
    return;
  }
  if (freeze) repair_ = text;
  MarkChanged(text);
}

void Group::MarkChanged(const std::string& why) {
  if (preparation_->changed.empty()) preparation_->changed = why;
}

void Group::Note(std::string kind, MemberId member, PeerId peer, std::string text,
                 GroupOutput* out) const {
  const Epoch epoch = preparation_ ? preparation_->epoch : record_.committed;
  out->notices.push_back({std::move(kind), record_.group, epoch, member, peer, std::move(text)});
}

// ------------------------------------------------------------------------------ view

MemberRecord* Group::Find(MemberId member) {
  for (MemberRecord& record : record_.members) {
    if (record.member == member) return &record;
  }
  return nullptr;
}

const MemberRecord* Group::Find(MemberId member) const {
  return const_cast<Group*>(this)->Find(member);
}

bool Group::HasPeer(PeerId peer) const {
  for (const PeerRecord& record : record_.peers) {
    if (record.peer == peer) return true;
  }
  return false;
}

size_t Group::CountMembers(PeerId peer) const {
  return std::count_if(record_.members.begin(), record_.members.end(),
                       [peer](const MemberRecord& m) { return m.peer == peer; });
}

bool Group::Accused(PeerId peer) const {
  for (const LostLink& link : missed_) {
    if (link.second == peer) return true;
  }
  if (!preparation_) return false;
  for (const auto& [reporter, answer] : preparation_->answers) {
    if (answer.unreachable.contains(peer)) return true;
  }
  return false;
}

Tick Group::NextDeadline() const {
  Tick next = kNever;
  for (const auto& [link, grace] : lost_) next = std::min(next, grace.due);
  if (!preparation_) return next;
  for (const auto& [peer, answer] : preparation_->answers) {
    if (!answer.answered()) next = std::min(next, answer.due);
  }
  return next;
}

std::set<MemberId> Group::Admitted() const {
  std::set<MemberId> members;
  for (const MemberRecord& m : record_.members) {
    if (Admits(m)) members.insert(m.member);
  }
  return members;
}

std::set<MemberId> Group::Survivors() const {
  std::set<MemberId> members = Admitted();
  for (const auto& [member, departure] : departures_) members.erase(member);
  return members;
}

std::set<MemberId> Group::Admissible() const {
  std::set<MemberId> members;
  for (const MemberRecord& m : record_.members) {
    if (!Admits(m) && directory_->Attached(m.peer) && !directory_->Draining(m.peer)) {
      members.insert(m.member);
    }
  }
  return members;
}

std::set<PeerId> Group::PeersOf(const std::set<MemberId>& members) const {
  std::set<PeerId> peers;
  for (const MemberRecord& m : record_.members) {
    if (members.contains(m.member)) peers.insert(m.peer);
  }
  return peers;
}

std::set<PeerId> Group::AdmittedPeers() const { return PeersOf(Admitted()); }

bool Group::InForce(PeerId peer) const { return AdmittedPeers().contains(peer); }

uint32_t Group::CountPending() const {
  return static_cast<uint32_t>(
      std::count_if(record_.members.begin(), record_.members.end(),
                    [](const MemberRecord& member) { return !Admits(member); }));
}

// Admitted members stand before pending ones.
bool Group::AnyAdmitted() const {
  return !record_.members.empty() && Admits(record_.members.front());
}

std::vector<PeerId> Group::Ring() const {
  const std::set<PeerId> admitted = AdmittedPeers();
  std::vector<PeerId> ring;
  for (const PeerRecord& peer : record_.peers) {
    if (admitted.contains(peer.peer)) ring.push_back(peer.peer);
  }
  return ring;
}

GroupView Group::View() const {
  GroupView view;
  view.group = record_.group;
  view.committed = record_.committed;
  if (preparation_) view.preparing = preparation_->epoch;
  view.waiting_for = Decide().why;
  for (const MemberRecord& m : record_.members) {
    view.members.push_back({m.member, m.peer, m.name, m.joined, ballot_.HasVoted(m.member)});
  }
  return view;
}

// ------------------------------------------------------------------------------ checks

void Group::CheckInvariants() const {
  const std::string name = ToString(record_.group);
  LH_CHECK(record_.committed <= record_.highest) << name;
  LH_CHECK(record_.boundary <= record_.committed) << name;
  LH_CHECK(record_.attempt <= record_.highest) << name;

  std::set<MemberId> seen;
  std::set<PeerId> peers_of_members;
  bool pending_behind = false;
  for (const MemberRecord& m : record_.members) {
    LH_CHECK(m.member && m.peer) << name;
    LH_CHECK(seen.insert(m.member).second) << name << " has " << ToString(m.member) << " twice";
    LH_CHECK(m.joined <= record_.committed) << name << " " << ToString(m.member);
    LH_CHECK(!(pending_behind && Admits(m)))
        << name << " admitted " << ToString(m.member) << " behind a pending member";
    pending_behind = pending_behind || !Admits(m);
    peers_of_members.insert(m.peer);
  }
  std::set<PeerId> peers;
  for (const PeerRecord& p : record_.peers) LH_CHECK(peers.insert(p.peer).second) << name;
  LH_CHECK(peers == peers_of_members)
      << name << " peers " << List(peers) << " but members at " << List(peers_of_members);

  for (const auto& [member, departure] : departures_) {
    LH_CHECK(Admitted().contains(member)) << name << " " << ToString(member) << " departs";
  }
  LH_CHECK(ballot_.electorate() == Survivors())
      << name << " electorate " << List(ballot_.electorate());
  LH_CHECK(Decide().act == Act::kWait) << name << " has something to do and does not do it";
  if (!preparation_) {
    LH_CHECK(departures_.empty() && repair_.empty()) << name << " forgot a change";
    LH_CHECK(record_.attempt <= record_.committed) << name << " left ops frozen";
    return;
  }
  const Preparation& p = *preparation_;
  LH_CHECK(p.epoch > record_.committed && p.epoch <= record_.highest) << name;
  LH_CHECK(p.changed.empty() && repair_.empty()) << name << " keeps an outdated preparation";
  LH_CHECK(p.freeze == (record_.attempt > record_.committed)) << name;
  LH_CHECK(p.freeze || departures_.empty()) << name << " removes members without a freeze";
  LH_CHECK(!p.freeze || record_.attempt == p.epoch) << name;
  LH_CHECK(p.survivors == Survivors()) << name << " prepares " << List(p.survivors);
  std::set<PeerId> participants = PeersOf(p.survivors);
  for (MemberId member : p.joiners) {
    const MemberRecord* joiner = Find(member);
    LH_CHECK(joiner != nullptr && !Admits(*joiner)) << name << " " << ToString(member);
    participants.insert(joiner->peer);
  }
  std::set<PeerId> asked;
  for (const auto& [peer, answer] : p.answers) {
    asked.insert(peer);
    LH_CHECK(!(answer.ready && answer.failed)) << name << " " << ToString(peer);
    LH_CHECK(answer.failed != answer.unreachable.empty()) << name << " " << ToString(peer);
    LH_CHECK(!directory_->Attached(peer) || answer.due != kNever) << name << " " << ToString(peer);
  }
  LH_CHECK(asked == participants && !asked.empty()) << name << " asks " << List(asked);
}

namespace {

void AddRecord(const GroupRecord& record, Digester* digest) {
  digest->Add(record.group.run).Add(record.group.group);
  digest->Add(record.committed).Add(record.highest).Add(record.boundary).Add(record.attempt);
  digest->Add(record.members.size());
  for (const MemberRecord& m : record.members) {
    digest->Add(m.member).Add(m.peer).Add(m.request).Add(m.name).Add(m.joined).Add(m.votes);
  }
  digest->Add(record.peers.size());
  for (const PeerRecord& p : record.peers) {
    digest->Add(p.peer).Add(p.lanes).Add(p.host).Add(p.endpoints.size());
    for (const std::string& endpoint : p.endpoints) digest->Add(endpoint);
  }
  digest->Add(record.fates.size());
  for (const FatesRecord& f : record.fates) {
    digest->Add(f.peer).Add(f.fates.size());
    for (const control::OpFate& fate : f.fates) {
      digest->Add(fate.ordinal).Add(static_cast<uint64_t>(fate.fate));
    }
  }
}

void AddReport(const control::OpReport& op, Digester* digest) {
  digest->Add(op.ordinal).Add(op.boundary).Add(op.tag);
  digest->Add(uint64_t{op.done}).Add(uint64_t{op.abort_on_fault}).Add(op.matches.size());
  for (const control::OpMatch& match : op.matches) digest->Add(match.peer).Add(match.ordinal);
}

void AddMembers(const std::set<MemberId>& members, Digester* digest) {
  digest->Add(members.size());
  for (MemberId member : members) digest->Add(member);
}

}  // namespace

void Group::AddTo(Digester* digest) const {
  AddRecord(record_, digest);
  digest->Add(run_secret_);
  AddMembers(ballot_.electorate(), digest);
  AddMembers(ballot_.voted(), digest);
  digest->Add(uint64_t{admission_tried_}).Add(repair_).Add(uint64_t{pending_told_});
  digest->Add(departures_.size());
  for (const auto& [member, departure] : departures_) {
    digest->Add(member).Add(static_cast<uint64_t>(departure.why)).Add(departure.reason);
  }
  digest->Add(lost_.size());
  for (const auto& [link, grace] : lost_) {
    digest->Add(link.first).Add(link.second).Add(grace.due).Add(grace.reason);
  }
  digest->Add(missed_.size());
  for (const auto& [from, to] : missed_) digest->Add(from).Add(to);
  digest->Add(uint64_t{preparation_.has_value()});
  if (!preparation_) return;
  const Preparation& p = *preparation_;
  digest->Add(p.epoch).Add(uint64_t{p.freeze}).Add(p.begun).Add(uint64_t{p.rebuilds});
  digest->Add(p.cause).Add(p.changed);
  AddMembers(p.survivors, digest);
  AddMembers(p.joiners, digest);
  digest->Add(p.answers.size());
  for (const auto& [peer, answer] : p.answers) {
    digest->Add(peer).Add(answer.due).Add(uint64_t{answer.ready}).Add(uint64_t{answer.failed});
    digest->Add(answer.ops.size());
    for (const control::OpReport& op : answer.ops) AddReport(op, digest);
    digest->Add(answer.unreachable.size());
    for (const auto& [other, reason] : answer.unreachable) digest->Add(other).Add(reason);
  }
}

}  // namespace longhaul::coordinator
