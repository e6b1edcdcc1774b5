#include "coordinator/core/group.h"

#include <algorithm>

#include "base/check.h"
#include "coordinator/core/judge.h"
#include "coordinator/core/membership.h"
#include "coordinator/core/text.h"
#include "coordinator/core/token.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

using control::Removal;

// Epoch numbers that a peer claims to know are ignored from here on. No correct peer comes near
// this number. Without the limit, one claim could use up all numbers.
constexpr uint64_t kEpochClaimMax = uint64_t{1} << 62;

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

// How many removed members a group remembers.
constexpr size_t kGoneMax = 1024;

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

}  // namespace

Group::Group(GroupRecord record, std::string run_secret, const CoreConfig& config,
             const PeerDirectory* directory)
    : record_(std::move(record)),
      issued_(record_.highest),
      run_secret_(std::move(run_secret)),
      detect_ms_(config.detect_ms),
      incarnation_(config.incarnation),
      directory_(directory),
      suspicion_(config.detect_ms),
      pauses_(config.detect_ms),
      ring_choice_(config.ring_interval_ms) {
  ballot_ = Ballot(Survivors(record_));
  for (const BlockedRecord& blocked : record_.blocked) suspicion_.Restore(blocked.pair);
  // Before the restart the coordinator froze ops and did not commit. The peers wait for a commit.
  if (record_.last_freeze > record_.committed && AnyAdmitted(record_)) {
    repair_ = "the coordinator restarted in epoch " + ToString(record_.last_freeze) +
              ", which was prepared and froze ops";
  }
}

// ------------------------------------------------------------------------------
// input

void Group::Attach(const PeerRecord& peer, const control::GroupState& state, bool anew, Tick now,
                   GroupOutput* out) {
  // The cause that blocked the peer's links may be gone, so they are tried again.
  if (anew) suspicion_.TryAgain(peer.peer);
  for (PeerRecord& known : record_.peers) {
    if (known.peer != peer.peer) continue;
    if (known.endpoints != peer.endpoints) trials_.Forget(peer.peer);
    known = peer;
  }
  // A commit is durable before any peer hears of it. So if the peer knows a newer epoch, the store
  // went back in time. The newer epoch cannot be restored here, so the peer's members are removed.
  // The epoch numbers that the peer knows are not used again.
  const bool store_is_behind = state.committed > record_.committed;
  const Epoch newest = std::max(state.committed, state.prepared);
  const bool forgotten = newest > issued_ && newest.value() < kEpochClaimMax;
  if (forgotten) record_.highest = std::max(record_.highest, newest);
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
    out->messages.emplace_back(peer.peer, Unknown(member));
  }
  for (MemberId member : known) {
    if (store_is_behind) {
      Remove(member, Removal::kUnknown,
             "the coordinator's store is older than epoch " + ToString(state.committed) +
                 " of this peer: join again",
             FaultNow("restart", "coordinator"), out);
    } else if (!named.contains(member)) {
      Remove(member, Removal::kDied, "its peer came back without it",
             FaultNow("trainer_died", ToString(peer.peer)), out);
    }
  }
  if (!store_is_behind && HasPeer(peer.peer)) Reconcile(peer.peer, state, forgotten, out);
  // If the preparation has changed, Advance() replaces it.
  if (preparation_ && preparation_->changed.empty() && preparation_->answers.contains(peer.peer)) {
    SendPrepare(peer.peer, now, out);
  }
  if (InForce(peer.peer)) {
    out->messages.emplace_back(peer.peer, control::PendingCount{record_.group, CountComing()});
    agreed_for_.insert(peer.peer);
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
  record.cohort = join.wish.cohort;
  record.cohort_size = join.wish.cohort_size;
  if (!join.wish.cohort.empty()) record.after = kCohortIncomplete;
  record.step_deadline_ms = join.wish.step_deadline_ms;
  if (join.wish.background) record.background_until = control::kInBackground;
  record.members = join.wish.members;
  record.named = join.wish.named;
  record_.members.push_back(record);
  std::erase_if(left_assembly_,
                [&](const auto& left) { return left.first.starts_with(join.name + " at "); });
  out->messages.emplace_back(peer.peer, PendingOf(member));
  Note("join", member, peer.peer,
       "member pending member=" + ToString(member) + " peer=" + ToString(peer.peer) +
           " name=" + Clean(join.name) +
           (join.wish.cohort.empty() ? "" : " cohort=" + Clean(join.wish.cohort)) +
           (join.wish.background ? " mode=background" : "") +
           (join.wish.members > 0 ? " members=" + std::to_string(join.wish.members) : ""),
       out);
}

void Group::Leave(PeerId peer, const control::Leave& leave, GroupOutput* out) {
  const MemberRecord* member = Find(leave.member);
  if (member == nullptr || member->peer != peer) {
    out->messages.emplace_back(peer, control::Removed{record_.group, leave.member, Removal::kLeft,
                                                      "it is no member (any more)"});
    return;
  }
  Remove(leave.member, leave.died ? Removal::kDied : Removal::kLeft, Clean(leave.reason),
         FaultNow(leave.died ? "trainer_died" : "leave", ToString(peer)), out);
}

Violation Group::Vote(PeerId peer, const control::Vote& vote, GroupOutput* out) {
  MemberRecord* member = Find(vote.member);
  if (member == nullptr || member->peer != peer) {
    out->messages.emplace_back(peer, Unknown(vote.member));
    return std::nullopt;
  }
  if (vote.number == 0) return "vote of " + ToString(vote.member) + " has no number";
  if (!IsAdmitted(*member)) return "vote of " + ToString(vote.member) + ", which is not admitted";
  if (vote.sync && !vote.ready && InBackground(*member)) {
    return "offer of " + ToString(vote.member) + ", which is in the background";
  }
  if (member->departs) return std::nullopt;
  if (vote.number <= member->votes) {
    out->messages.emplace_back(
        peer, control::VoteResult{record_.group, vote.member, vote.number, record_.committed});
    if (vote.sync) return Sync(peer, {record_.group, vote.member, *vote.sync}, out);
    return std::nullopt;
  }
  // This changes `votes` only if the store lost its last transactions, and with them earlier votes.
  member->votes = vote.number - 1;
  ballot_.Vote(vote.member);
  if (vote.sync) sync_.Hold(vote.member, *vote.sync);
  if (vote.ready && InBackground(*member)) ready_.insert(vote.member);
  if (first_vote_ == kNever) first_vote_ = directory_->Now();
  return std::nullopt;
}

Violation Group::Sync(PeerId peer, const control::SyncVote& vote, GroupOutput* out) {
  const MemberRecord* member = Find(vote.member);
  if (member == nullptr || member->peer != peer) {
    out->messages.emplace_back(peer, Unknown(vote.member));
    return std::nullopt;
  }
  if (!IsAdmitted(*member)) return "sync of " + ToString(vote.member) + ", which is not admitted";
  if (InBackground(*member)) {
    return "offer of " + ToString(vote.member) + ", which is in the background";
  }
  if (member->departs) return std::nullopt;
  SyncOutput sync;
  sync_.Offer(vote.member, vote.offer, record_, directory_->Now(), &sync);
  Emit(std::move(sync), out);
  return std::nullopt;
}

void Group::FetchDone(PeerId peer, const control::FetchDone& done, GroupOutput* out) {
  const MemberRecord* member = Find(done.member);
  if (member == nullptr || member->peer != peer) return;  // stale
  SyncOutput sync;
  sync_.FetchDone(done, &sync);
  Emit(std::move(sync), out);
}

Violation Group::Ready(PeerId peer, const control::EpochReady& ready) {
  if (ready.epoch > record_.highest) {
    return "ready for epoch " + ToString(ready.epoch) + ", which was never prepared";
  }
  if (preparation_ && NoteReady(peer, ready, &*preparation_)) suspicion_.Absolve(peer, ready.epoch);
  return std::nullopt;
}

Violation Group::Failed(PeerId peer, const control::EpochFailed& failed) {
  if (failed.epoch > record_.highest) {
    return "failure of epoch " + ToString(failed.epoch) + ", which was never prepared";
  }
  return preparation_ ? NoteFailed(peer, failed, &*preparation_) : std::nullopt;
}

void Group::Tried(PeerId peer, const control::PeerTried& tried) {
  trials_.Answer(peer, tried.trial, tried.peer, Clean(tried.reason));
}

void Group::Evict(MemberId member, const std::string& reason, GroupOutput* out) {
  if (Find(member) == nullptr) return;
  Remove(member, Removal::kEvicted, Clean(reason), FaultNow("evict", "operator"), out);
}

void Group::PeerDied(PeerId peer, const std::string& reason, uint32_t silent_ms, GroupOutput* out) {
  Fault fault = FaultNow(silent_ms == 0 ? "peer_died" : "silence", "coordinator", silent_ms);
  // If a peer has reported that it lost its link to the dead peer, that report counts as the fault.
  for (const auto& [link, loss] : suspicion_.losses()) {
    if (link.second == peer && loss.fault.since <= fault.since) fault = loss.fault;
  }
  RemovePeer(peer, Removal::kDied, reason, fault, out);
}

void Group::RemoveCohort(PeerId peer, const std::string& cohort, const std::string& reason,
                         GroupOutput* out) {
  std::vector<MemberId> members;
  for (const MemberRecord* member : Cohort(peer, cohort)) members.push_back(member->member);
  for (MemberId member : members) {
    Remove(member, Removal::kEvicted, Clean(reason), FaultNow("cohort", ToString(peer)), out);
  }
}

void Group::AdmitCohortAfter(PeerId peer, const std::string& cohort, uint64_t ballot) {
  for (MemberRecord& member : record_.members) {
    if (member.peer == peer && member.cohort == cohort && !IsAdmitted(member))
      member.after = ballot;
  }
}

bool Group::OrderFallsDue(Tick now) {
  return ring_choice_.FallsDue(now, Ring().size(), preparation_.has_value());
}

void Group::RingFound(const std::vector<PeerId>& ring, Epoch asked_in, const RingScore& score,
                      const RingScore& present, GroupOutput* out) {
  if (asked_in != record_.committed || preparation_ || !FitsRing(ring)) {
    return LinkMeasured(directory_->Now());
  }
  const std::string found = ring_choice_.Found(ring, Ring(), score, present, CostNow());
  if (!found.empty()) Note("ring", MemberId{}, PeerId{}, found, out);
}

control::LinkCost Group::CostNow() const {
  const std::vector<PeerId> ring = Ring();
  return directory_->CostOf(ring, BlockedAmong(record_, ring),
                            ring_choice_.KeptShares(directory_->Now()));
}

// Whether `ring` has the peers of the present ring, in an order that avoids blocked pairs.
bool Group::FitsRing(const std::vector<PeerId>& ring) const {
  const std::vector<PeerId> present = Ring();
  return ring.size() == present.size() &&
         std::is_permutation(ring.begin(), ring.end(), present.begin()) &&
         control::RingAvoiding(ring, BlockedAmong(record_, ring)) == ring;
}

// Gives up the better ring. No peer is removed for it.
void Group::KeepRing(const std::string& reason, GroupOutput* out) {
  ring_choice_.GiveUp(directory_->Now());
  MarkChanged(reason);
  Note("ring", MemberId{}, PeerId{}, "ring kept reason=" + Clean(reason), out);
}

// Evicts members whose step deadline, as given by `due`, has passed.
void Group::EvictLate(Tick (Group::*due)(const MemberRecord&) const, const std::string& what,
                      Tick now, GroupOutput* out) {
  std::vector<MemberRecord> late;
  for (const MemberRecord& member : record_.members) {
    if ((this->*due)(member) <= now) late.push_back(member);
  }
  for (const MemberRecord& member : late) {
    const uint32_t ms = member.step_deadline_ms;
    Remove(member.member, Removal::kEvicted,
           what + " within " + std::to_string(ms) + " ms of the first",
           FaultNow("step_deadline", "coordinator", ms), out);
  }
}

void Group::OnGraceOver(Tick now, GroupOutput* out) {
  if (ring_choice_.TellingFallsDue(now, Ring().size(), preparation_.has_value())) {
    ring_choice_.Compare(Ring(), CostNow());
  }
  for (const LostLink& link : suspicion_.LossesDue(now)) LossGraceOver(link, out);
}

void Group::OnSilence(Tick now, GroupOutput* out) {
  EvictLate(&Group::VoteDue, "late at the step boundary: no vote", now, out);
  EvictLate(&Group::OfferDue, "late for the sync: no offer", now, out);
  if (!preparation_) return;
  const std::vector<PeerId> silent = Silent(*preparation_, now);
  if (!silent.empty() && preparation_->reorders) {
    return KeepRing(ToString(silent.front()) + " did not answer in time", out);
  }
  for (PeerId peer : silent) {
    RemovePeer(
        peer, Removal::kUnreachable,
        "silent: " + ToString(peer) + " did not answer the preparation of epoch " +
            ToString(preparation_->epoch) + " within " +
            std::to_string(kAnswerDetects * detect_ms_) + " ms",
        FaultNow("silence", "coordinator", static_cast<uint32_t>(kAnswerDetects) * detect_ms_),
        out);
  }
}

void Group::PostponeSilence(int64_t us) {
  if (first_vote_ != kNever) first_vote_ = first_vote_ + us;
  sync_.Postpone(us);
  if (!preparation_) return;
  for (auto& [peer, answer] : preparation_->answers) {
    if (answer.due != kNever) answer.due = answer.due + us;
  }
}

void Group::Advance(Tick now, GroupOutput* out) {
  suspicion_.Start(now);
  for (int round = 0;; ++round) {
    LH_CHECK(round < 16) << "group " << ToString(record_.group) << " does not come to rest";
    ResolveUnreachable(out);
    TryNewcomers(now, out);
    // The group has other peers by now, or two neighbours of the better ring are blocked.
    if (!Better().empty() && !FitsRing(Better())) ring_choice_.Drop();
    const Decision decision = Decide();
    if (decision.act == Act::kWait) break;
    Apply(decision, now, out);
  }
  SyncOutput sync;
  const std::optional<StateRecord> before = record_.state;
  sync_.Advance(Counting(record_), ballot_.voted(), &record_, now, &sync);
  Emit(std::move(sync), out);
  if (record_.state != before) agreed_for_.merge(BackgroundPeers());
  SendAgreed(out);
  if (CountComing() != pending_told_) SendPendingCount(out);
  TellAssembly(out);
}

// ------------------------------------------------------------------------------
// messages

void Group::SendRemoved(const MemberRecord& member, Removal why, const std::string& reason,
                        GroupOutput* out) const {
  out->messages.emplace_back(member.peer,
                             control::Removed{record_.group, member.member, why, reason});
}

void Group::Emit(SyncOutput sync, GroupOutput* out) const {
  for (control::SyncResult& result : sync.results) {
    result.group = record_.group;
    out->messages.emplace_back(Find(result.member)->peer, std::move(result));
  }
  for (EventRecord& notice : sync.notices) {
    notice.group = record_.group;
    notice.epoch = record_.committed;
    if (const MemberRecord* member = Find(notice.member)) notice.peer = member->peer;
    out->notices.push_back(std::move(notice));
  }
}

void Group::SendPendingCount(GroupOutput* out) {
  pending_told_ = CountComing();
  for (PeerId peer : AdmittedPeers(record_)) {
    out->messages.emplace_back(peer, control::PendingCount{record_.group, pending_told_});
  }
}

std::set<PeerId> Group::BackgroundPeers() const {
  std::set<PeerId> peers;
  for (const MemberRecord& member : record_.members) {
    if (IsAdmitted(member) && InBackground(member)) peers.insert(member.peer);
  }
  return peers;
}

void Group::SendAgreed(GroupOutput* out) {
  const std::set<PeerId> peers = std::exchange(agreed_for_, {});
  if (peers.empty() || !record_.state) return;
  for (const PeerId peer : BackgroundPeers()) {
    if (!peers.contains(peer)) continue;
    out->messages.emplace_back(
        peer, control::StateAgreed{record_.group, record_.state->revision, record_.state->manifest,
                                   record_.state->state});
  }
}

// ------------------------------------------------------------------------------
// removing

void Group::Remove(MemberId id, Removal why, const std::string& reason, const Fault& fault,
                   GroupOutput* out) {
  const MemberRecord member = *Find(id);
  if (member.departs) return;
  const bool pending = !IsAdmitted(member);
  if (!member.cohort.empty()) out->removed.push_back({member, reason});
  Remember(id, why, reason, fault.detector);
  if (!pending) {
    Find(id)->departs = Departure{why, reason};
    NoteFault(fault);
    ballot_.Leave(id);
    ready_.erase(id);
    if (preparation_) preparation_->raised.erase(id);
    sync_.Leave(id);
    if (ballot_.voted().empty()) first_vote_ = kNever;
  } else {
    LeaveAssembly(member, why == Removal::kLeft ? "it gave up" : reason);
    std::erase_if(record_.members, [id](const MemberRecord& m) { return m.member == id; });
    if (CountMembers(member.peer) == 0) {
      std::erase_if(record_.peers, [&](const PeerRecord& p) { return p.peer == member.peer; });
      ForgetStrangers();
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
  out->notices.back().cause = fault.cause;
}

void Group::Remember(MemberId member, Removal why, const std::string& reason,
                     const std::string& by) {
  const std::string who = by == "coordinator" || by == "operator" ? "the " + by : by;
  gone_[member] = {directory_->Now(),
                   std::string(WhyText(why)) + ", found by " + who + ": " + reason};
  if (gone_.size() > kGoneMax) gone_.erase(gone_.begin());
}

control::Removed Group::Unknown(MemberId member) const {
  const auto gone = gone_.find(member);
  const std::string text =
      gone == gone_.end()
          ? "the coordinator does not know the member: it was removed before the coordinator "
            "started, or so many others have been since"
          : "the coordinator removed it " +
                std::to_string((directory_->Now() - gone->second.at) / Millis(1)) +
                " ms before its peer came back (" + gone->second.text + ")";
  return {record_.group, member, Removal::kUnknown, Clean(text)};
}

void Group::RemovePeer(PeerId peer, Removal why, const std::string& reason, const Fault& fault,
                       GroupOutput* out) {
  std::vector<MemberId> members;
  for (const MemberRecord& member : record_.members) {
    if (member.peer == peer) members.push_back(member.member);
  }
  for (MemberId member : members) Remove(member, why, reason, fault, out);
}

void Group::MarkChanged(const std::string& why) {
  if (preparation_ && preparation_->changed.empty()) preparation_->changed = why;
}

void Group::AskForFreeze(const std::string& why, const Fault& fault) {
  MarkChanged(why);
  repair_ = Clean(why);
  NoteFault(fault);
}

Fault Group::FaultNow(std::string cause, std::string detector, uint32_t detect_ms,
                      PeerId of) const {
  return {std::move(cause), std::move(detector), detect_ms, directory_->Now(), of};
}

// "m3 at p3 (host h3)", or "p3 (host h3)".
std::string Group::SubjectOf(const Fault& fault, const std::vector<MemberRecord>& removed) const {
  const auto name = [this](PeerId peer) {
    const auto known = std::find_if(record_.peers.begin(), record_.peers.end(),
                                    [peer](const PeerRecord& p) { return p.peer == peer; });
    const bool named = known != record_.peers.end() && !known->host.empty();
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

// Notes the first fault that the next freezing epoch repairs. A later one follows from the first,
// or is repaired with it, so it is not noted.
void Group::NoteFault(const Fault& fault) {
  if (!fault_) fault_ = fault;
}

void Group::Note(std::string kind, MemberId member, PeerId peer, std::string text,
                 GroupOutput* out) const {
  const Epoch epoch = preparation_ ? preparation_->epoch : record_.committed;
  out->notices.push_back({std::move(kind), record_.group, epoch, member, peer, std::move(text)});
}

// ------------------------------------------------------------------------------
// view

Tick Group::SilenceDue() const {
  Tick next = kNever;
  for (const MemberRecord& member : record_.members) {
    next = std::min({next, VoteDue(member), OfferDue(member)});
  }
  return preparation_ ? std::min(next, coordinator::NextDeadline(*preparation_)) : next;
}

std::vector<PeerId> Group::Participants() const {
  std::set<PeerId> peers = PeersOf(record_, Survivors(record_));
  if (preparation_) peers.merge(PeersOf(record_, preparation_->joiners));
  return OrderOf(record_, peers);
}

bool Group::AllAttached(const std::vector<PeerId>& peers) const {
  return std::all_of(peers.begin(), peers.end(),
                     [this](PeerId peer) { return directory_->Attached(peer); });
}

std::vector<const MemberRecord*> Group::Cohort(PeerId peer, const std::string& cohort) const {
  std::vector<const MemberRecord*> members;
  for (const MemberRecord& m : record_.members) {
    if (m.peer == peer && m.cohort == cohort && !m.departs) members.push_back(&m);
  }
  return members;
}

uint64_t Group::NewestBallot() const { return record_.ballots + (ballot_.voted().empty() ? 0 : 1); }

bool Group::PassedOver(const MemberRecord& member) const {
  return !IsAdmitted(member) && member.after != kCohortIncomplete && !member.cohort.empty() &&
         AnyAdmitted(record_) && record_.ballots > member.after;
}

bool Group::AdmittedOrPrepared(const MemberRecord& member) const {
  return IsAdmitted(member) || (preparation_ && preparation_->joiners.contains(member.member));
}

// Whether the member has a step deadline whose clock runs now. The clock stands still while ops are
// frozen, because a trainer that waits for an op cannot come to the boundary.
bool Group::Judged(const MemberRecord& member) const {
  return member.step_deadline_ms != 0 && IsAdmitted(member) && !member.departs &&
         !(preparation_ && preparation_->freeze);
}

Tick Group::VoteDue(const MemberRecord& member) const {
  if (first_vote_ == kNever || !Judged(member) || ballot_.HasVoted(member.member)) return kNever;
  // A member in a sync cannot vote before the sync has ended.
  if (sync_.InSync(member.member)) return kNever;
  return std::max(first_vote_, sync_.last_end()) + Millis(member.step_deadline_ms);
}

Tick Group::OfferDue(const MemberRecord& member) const {
  if (sync_.first_offer() == kNever || !Judged(member) || InBackground(member)) return kNever;
  if (!sync_.Awaits(member.member)) return kNever;
  return std::max(sync_.first_offer(), sync_.last_end()) + Millis(member.step_deadline_ms);
}

std::set<MemberId> Group::Admissible() const {
  // The number of the open ballot. A group without admitted members has no voters: its open
  // preparation counts as a ballot, and has that ballot's number. Without a preparation such a
  // group may admit every complete cohort.
  const uint64_t ballot = AnyAdmitted(record_)
                              ? record_.ballots + 1
                              : (preparation_ ? record_.ballots : kCohortIncomplete);
  const bool assembly = AssemblySize() > 0;
  std::set<MemberId> members;
  for (const MemberRecord& m : record_.members) {
    if (m.after >= ballot || !MayAdmit(m)) continue;
    // A member that waits for no others joins the group after it has formed.
    if (m.members == 0 && assembly) continue;
    if (!IsAdmitted(m) && directory_->Attached(m.peer) && !directory_->Draining(m.peer)) {
      members.insert(m.member);
    }
  }
  return members;
}

GroupView Group::View() const {
  GroupView view;
  view.group = record_.group;
  view.committed = record_.committed;
  if (preparation_) view.preparing = preparation_->epoch;
  view.waiting_for = Decide().why;
  const std::string sync = sync_.WaitingFor(Counting(record_));
  if (!sync.empty()) view.waiting_for += (view.waiting_for.empty() ? "" : "; ") + sync;
  std::vector<PeerId> waits;
  for (const PeerId newcomer : Untried()) {
    if (pauses_.Until(PeerOf(newcomer).endpoints) > directory_->Now()) waits.push_back(newcomer);
  }
  if (!waits.empty()) {
    view.waiting_for += (view.waiting_for.empty() ? "" : "; ") +
                        ("not tried again yet, since members could not reach it: " +
                         List(waits, " ", kNamesShownMax));
  }
  view.state = record_.state;
  view.first_vote = first_vote_;
  view.last_step = last_step_;
  for (const MemberRecord& m : record_.members) {
    view.members.push_back({m.member, m.peer, m.name, m.joined, ballot_.HasVoted(m.member),
                            m.cohort, std::nullopt, InBackground(m)});
  }
  view.blocked = record_.blocked;
  view.fault_epoch = fault_epoch_;
  view.fault = last_fault_;
  view.ring_epoch = ring_choice_.ordered_epoch();
  view.ring_gain = ring_choice_.ordered_gain();
  return view;
}

// ------------------------------------------------------------------------------
// checks

void Group::CheckInvariants() const {
  const std::string name = ToString(record_.group);
  LH_CHECK(record_.committed <= record_.highest) << name;
  LH_CHECK(issued_ <= record_.highest) << name;
  LH_CHECK(record_.boundary <= record_.committed) << name;
  LH_CHECK(record_.last_freeze <= record_.highest) << name;

  std::set<MemberId> seen;
  std::set<PeerId> peers_of_members;
  bool pending_behind = false;
  for (const MemberRecord& m : record_.members) {
    LH_CHECK(m.member && m.peer) << name;
    LH_CHECK(seen.insert(m.member).second) << name << " has " << ToString(m.member) << " twice";
    LH_CHECK(m.joined <= record_.committed) << name << " " << ToString(m.member);
    LH_CHECK(InBackground(m) || m.background_until <= record_.boundary)
        << name << " " << ToString(m.member);
    LH_CHECK(!(pending_behind && IsAdmitted(m)))
        << name << " admitted " << ToString(m.member) << " behind a pending member";
    LH_CHECK(!m.departs || IsAdmitted(m)) << name << " " << ToString(m.member) << " departs";
    LH_CHECK(m.cohort.empty() == (m.cohort_size == 0)) << name << " " << ToString(m.member);
    pending_behind = pending_behind || !IsAdmitted(m);
    peers_of_members.insert(m.peer);
  }
  std::set<PeerId> peers;
  for (const PeerRecord& p : record_.peers) LH_CHECK(peers.insert(p.peer).second) << name;
  LH_CHECK(peers == peers_of_members)
      << name << " peers " << List(peers) << " but members at " << List(peers_of_members);

  for (size_t i = 0; i < record_.blocked.size(); ++i) {
    const control::BlockedPair& pair = record_.blocked[i].pair;
    LH_CHECK(i == 0 || record_.blocked[i - 1].pair < pair) << name;
    LH_CHECK(peers.contains(pair.a) && peers.contains(pair.b)) << name << " blocks a stranger";
    LH_CHECK(suspicion_.Knows(pair)) << name;
  }
  LH_CHECK(suspicion_.CountBlocked() == record_.blocked.size()) << name;
  LH_CHECK(ballot_.electorate() == Survivors(record_))
      << name << " electorate " << List(ballot_.electorate());
  for (const MemberId member : ready_) {
    LH_CHECK(ballot_.HasVoted(member) && InBackground(*Find(member))) << name;
  }
  sync_.CheckInvariants(Survivors(record_), Counting(record_));
  LH_CHECK(agreed_for_.empty()) << name << " owes somebody what was agreed on";
  LH_CHECK(!record_.state || AnyAdmitted(record_)) << name << " remembers a state of nobody";
  LH_CHECK(Better().empty() || FitsRing(Better())) << name << " has a ring of others";
  LH_CHECK(Decide().act == Act::kWait) << name << " has something to do and does not do it";
  if (!preparation_) {
    LH_CHECK(!AnyDeparts(record_) && repair_.empty()) << name << " forgot a change";
    LH_CHECK(!fault_) << name << " forgot " << fault_->cause;
    const std::string fault = control::BlockedFault(Ring(), BlockedAmong(record_, Ring()));
    LH_CHECK(fault.empty()) << name << " " << fault;
    LH_CHECK(record_.last_freeze <= record_.committed) << name << " left ops frozen";
    return;
  }
  const Preparation& p = *preparation_;
  coordinator::CheckInvariants(p, record_, *directory_);
  LH_CHECK(repair_.empty()) << name << " forgot " << repair_;
  LH_CHECK(p.freeze == fault_.has_value()) << name << " freezes without a cause";
  LH_CHECK(!p.reorders || p.ring == Better()) << name << " orders the ring otherwise";
  LH_CHECK(std::includes(ready_.begin(), ready_.end(), p.raised.begin(), p.raised.end())) << name;
}

namespace {

void AddMembers(const std::set<MemberId>& members, Digester* digest) {
  digest->Add(members.size());
  for (MemberId member : members) digest->Add(member);
}

}  // namespace

// Leaves out the secrets: no decision depends on them, and a replay has other secrets.
void Group::AddTo(Digester* digest) const {
  digest->Add(record_);
  digest->Add(issued_);
  AddMembers(ballot_.electorate(), digest);
  AddMembers(ballot_.voted(), digest);
  AddMembers(ready_, digest);
  digest->Add(uint64_t{admission_tried_}).Add(repair_).Add(uint64_t{pending_told_});
  digest->Add(first_vote_);
  sync_.AddTo(digest);
  trials_.AddTo(digest);
  pauses_.AddTo(digest);
  digest->Add(pause_over_);
  digest->Add(assembly_told_).Add(assembly_present_).Add(left_assembly_.size());
  for (const auto& [name, why] : left_assembly_) digest->Add(name).Add(why);
  digest->Add(gone_.size());
  for (const auto& [member, gone] : gone_) digest->Add(member).Add(gone.at).Add(gone.text);
  digest->Add(uint64_t{fault_.has_value()});
  if (fault_) digest->Add(*fault_);
  digest->Add(fault_epoch_).Add(last_fault_.cause).Add(last_fault_.detector);
  digest->Add(uint64_t{last_fault_.detect_ms}).Add(uint64_t{last_fault_.agree_ms});
  digest->Add(last_fault_.subject);
  suspicion_.AddTo(digest);
  disputes_.AddTo(digest);
  ring_choice_.AddTo(digest);
  digest->Add(uint64_t{preparation_.has_value()});
  if (preparation_) digest->Add(*preparation_);
}

}  // namespace longhaul::coordinator
