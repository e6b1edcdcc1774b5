#include "coordinator/core/group.h"

#include <algorithm>
#include <tuple>

#include "base/check.h"
#include "coordinator/core/judge.h"
#include "coordinator/core/text.h"
#include "coordinator/core/token.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

using control::Removal;

// Lost links in one series of preparations before they count as links that cannot be built: what
// flaps must not hold the others for ever.
constexpr uint32_t kRebuildsMax = 3;
// How many detect_ms a peer has to answer a preparation; it gives its links four.
constexpr int64_t kAnswerDetects = 6;
// Losses of one pair, each within this time of the one before, after which the pair is routed
// around rather than repaired again.
constexpr uint32_t kStrikesMax = 3;
constexpr int64_t kStrikesForgotten = Seconds(60);
// A pair that cannot build its link, or loses it again and again, is tried again with the first
// freezing preparation that comes so much later. One that fell silent after so much less, four
// times as long each time.
constexpr int64_t kBlockedRetry = Seconds(600);
constexpr int64_t kSilentRetry = Seconds(30);
// A better ring is looked for so long after a link was measured, as other measurements come with
// it, and no more often than so: shares of the interval at which the ring may change.
constexpr int64_t kOrderSettles = 60;
constexpr int64_t kOrderEvery = 10;
// What peers are told of their links is worth an epoch when it differs by so much.
constexpr uint32_t kTellLatencyUs = 1000;
constexpr uint32_t kTellFactor = 2;
constexpr Tick kLongAgo{INT64_MIN / 2};
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

std::string MegabytesText(uint64_t bytes_per_second) {
  if (bytes_per_second == 0) return "unknown";
  const uint64_t tenths = bytes_per_second / 100000;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10);
}

// What a better ring is better in.
std::string GainText(const RingScore& score, const RingScore& present) {
  return "slowest_mb_s=" + MegabytesText(score.bottleneck) +
         " was=" + MegabytesText(present.bottleneck) +
         " rtt_sum_ms=" + std::to_string(score.latency_us / 1000) +
         " was=" + std::to_string(present.latency_us / 1000);
}

std::string CostText(const control::LinkCost& cost) {
  return "latency_us=" + std::to_string(cost.latency_us) +
         " slowest_mb_s=" + MegabytesText(cost.bytes_per_second) +
         " ring_mb_s=" + MegabytesText(cost.ring_bytes_per_second);
}

// Whether peers may choose other algorithms by the one than by the other: what they depend on is
// how long a way is, and whether some link is slower than those of the ring. Unknown ones are near
// and alike.
bool TellsMore(const control::LinkCost& told, const control::LinkCost& now) {
  const auto [near, far] = std::minmax(told.latency_us, now.latency_us);
  if (far - near >= kTellLatencyUs && far / kTellFactor >= near) return true;
  const auto unevenness = [](const control::LinkCost& cost) {
    if (cost.bytes_per_second == 0 || cost.ring_bytes_per_second == 0) return 1.0;
    return static_cast<double>(cost.ring_bytes_per_second) /
           static_cast<double>(cost.bytes_per_second);
  };
  const auto [even, uneven] = std::minmax({unevenness(told), unevenness(now)});
  return uneven >= kTellFactor * even;
}

bool Admits(const MemberRecord& member) { return static_cast<bool>(member.joined); }
bool InBackground(const MemberRecord& member) { return member.counts == control::kCountsNotYet; }

}  // namespace

Group::Group(GroupRecord record, std::string run_secret, const GroupConfig& config,
             const PeerDirectory* directory)
    : record_(std::move(record)),
      run_secret_(std::move(run_secret)),
      detect_ms_(config.detect_ms),
      ring_interval_ms_(config.ring_interval_ms),
      directory_(directory),
      order_after_(kLongAgo) {
  ballot_ = Ballot(Survivors());
  for (const BlockedRecord& blocked : record_.blocked) {
    // Time counts from the first step, see Advance().
    detours_[blocked.pair] = {kNever, kBlockedRetry};
  }
  // The predecessor froze ops and did not commit: peers wait for the next commit.
  if (record_.attempt > record_.committed && AnyAdmitted()) {
    repair_ = "the coordinator restarted in epoch " + ToString(record_.attempt) +
              ", which was prepared and froze ops";
  }
}

// ------------------------------------------------------------------------------ input

void Group::Attach(const PeerRecord& peer, const control::GroupState& state, bool anew, Tick now,
                   GroupOutput* out) {
  // What blocked it may have gone with its old stream.
  for (auto& [pair, detour] : detours_) {
    if (anew && (pair.a == peer.peer || pair.b == peer.peer)) detour.since = kLongAgo;
  }
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
             FaultNow("restart", "coordinator"), out);
    } else if (!named.contains(member)) {
      Remove(member, Removal::kDied, "its peer came back without it",
             FaultNow("trainer_died", ToString(peer.peer)), out);
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
  record.cohort = join.cohort;
  record.cohort_size = join.cohort_size;
  if (!join.cohort.empty()) record.after = kCohortIncomplete;
  record.step_deadline_ms = join.step_deadline_ms;
  if (join.background) record.counts = control::kCountsNotYet;
  record_.members.push_back(record);
  out->messages.emplace_back(peer.peer, control::JoinPending{join.request, record_.group, member});
  Note("join", member, peer.peer,
       "member pending member=" + ToString(member) + " peer=" + ToString(peer.peer) + " name=" +
           Clean(join.name) + (join.cohort.empty() ? "" : " cohort=" + Clean(join.cohort)) +
           (join.background ? " mode=background" : ""),
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
    out->messages.emplace_back(
        peer, control::Removed{record_.group, vote.member, Removal::kUnknown,
                               "the coordinator does not know the member (any more)"});
    return std::nullopt;
  }
  if (vote.number == 0) return "vote of " + ToString(vote.member) + " has no number";
  if (!Admits(*member)) return "vote of " + ToString(vote.member) + ", which is not admitted";
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
  // Normally no change. A store that lost its last moments does not know of the votes before.
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
    out->messages.emplace_back(
        peer, control::Removed{record_.group, vote.member, Removal::kUnknown,
                               "the coordinator does not know the member (any more)"});
    return std::nullopt;
  }
  if (!Admits(*member)) return "sync of " + ToString(vote.member) + ", which is not admitted";
  if (InBackground(*member)) {
    return "offer of " + ToString(vote.member) + ", which is in the background";
  }
  if (member->departs) return std::nullopt;
  SyncOutput sync;
  sync_.Offer(vote.member, vote.offer, record_, directory_->Now(), &sync);
  Emit(std::move(sync), out);
  return std::nullopt;
}

void Group::SyncDone(PeerId peer, const control::SyncDone& done, GroupOutput* out) {
  const MemberRecord* member = Find(done.member);
  if (member == nullptr || member->peer != peer) return;  // stale
  SyncOutput sync;
  sync_.Done(done, &sync);
  Emit(std::move(sync), out);
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
  std::erase_if(missed_, [peer](const auto& missed) { return missed.first.first == peer; });
  std::erase_if(lost_, [&](const auto& lost) {
    return lost.first.first == peer && lost.second.epoch < ready.epoch;
  });
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
  const bool answered = lost.epoch < record_.attempt;
  if ((answered && record_.attempt <= record_.committed) || lost.peer == peer) return std::nullopt;
  const auto counts = [this](PeerId id) {
    return preparation_ ? preparation_->answers.contains(id) : PeersOf(Survivors()).contains(id);
  };
  if (!counts(peer) || !counts(lost.peer)) return std::nullopt;
  if (RoutedAround(peer, lost.peer)) return std::nullopt;
  const std::string reason = Clean(lost.reason);
  // Its stream is closed by then if it died. Where it has fallen silent on its stream too, what a
  // short outage swallowed may be on its way again: that takes up to twice as long as the outage.
  const int64_t detect_us = Millis(detect_ms_);
  const bool unheard = lost.silent_ms > 0 && !HeardOfLate(lost.peer);
  const int64_t grace_us = unheard ? detect_us / 5 : detect_us / 10;
  // After an outage somebody hears it in a moment. If it is dead all miss it in a moment, see
  // AccusedByAll(): so there is time where there are more to miss it.
  const int64_t doubt_us = Witnesses(lost.peer).size() >= 2 ? detect_us / 2 : grace_us;
  missed_.try_emplace({peer, lost.peer}, lost.silent_ms > 0 ? now + doubt_us : kLongAgo);
  // What broke is likely to be built anew by then. Where nothing came through for detect_ms, the
  // freeze may wait for what does not come through now either.
  if (answered && lost.silent_ms == 0) return std::nullopt;
  const Fault fault =
      FaultNow(lost.silent_ms == 0 ? "reset" : "silence", ToString(peer), lost.silent_ms);
  const bool fresh =
      lost_.try_emplace({peer, lost.peer}, Grace{now + grace_us, lost.epoch, reason, fault}).second;
  if (fresh) {
    Note("link_lost", MemberId{}, peer,
         "link lost from=" + ToString(peer) + " to=" + ToString(lost.peer) +
             " silent_ms=" + std::to_string(lost.silent_ms) + " reason=" + reason,
         out);
  }
  return std::nullopt;
}

void Group::Evict(MemberId member, const std::string& reason, GroupOutput* out) {
  if (Find(member) == nullptr) return;
  Remove(member, Removal::kEvicted, Clean(reason), FaultNow("evict", "operator"), out);
}

void Group::PeerDied(PeerId peer, const std::string& reason, uint32_t silent_ms, GroupOutput* out) {
  Fault fault = FaultNow(silent_ms == 0 ? "peer_died" : "silence", "coordinator", silent_ms);
  // Whoever lost its link to it said so first.
  for (const auto& [link, grace] : lost_) {
    if (link.second == peer && grace.fault.since <= fault.since) fault = grace.fault;
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
    if (member.peer == peer && member.cohort == cohort && !Admits(member)) member.after = ballot;
  }
}

void Group::LinkMeasured(Tick now) {
  if (ring_interval_ms_ == 0 || order_due_ != kNever) return;
  order_due_ = std::max(now + Millis(ring_interval_ms_) / kOrderSettles, order_after_);
}

bool Group::TakeOrderDue(Tick now) {
  if (order_due_ > now) return false;
  order_due_ = kNever;
  HoldOrder(now + Millis(ring_interval_ms_) / kOrderEvery);
  // Two have one ring only. While an epoch is prepared there may soon be another one.
  if (preparation_) LinkMeasured(now);
  return !preparation_ && Ring().size() > 2;
}

void Group::HoldOrder(Tick until) {
  order_after_ = std::max(order_after_, until);
  if (order_due_ != kNever) order_due_ = std::max(order_due_, order_after_);
}

void Group::RingFound(const std::vector<PeerId>& ring, Epoch asked_in, const RingScore& score,
                      const RingScore& present, GroupOutput* out) {
  if (asked_in != record_.committed || preparation_ || !FitsRing(ring)) {
    return LinkMeasured(directory_->Now());
  }
  // What was found before may have ceased to be better.
  better_.clear();
  if (ring != Ring() && WorthChanging(present, score)) {
    better_ = ring;
    better_gain_ = GainText(score, present);
    Note("ring", MemberId{}, PeerId{},
         "better ring found ring=" + List(ring, ",", kNamesShownMax) + " " + better_gain_, out);
  } else if (const control::LinkCost cost = directory_->CostOf(Ring()); TellsMore(told_, cost)) {
    better_ = Ring();
    better_gain_ = CostText(cost);
  }
}

// The peers of the ring in an order that avoids blocked pairs.
bool Group::FitsRing(const std::vector<PeerId>& ring) const {
  const std::vector<PeerId> present = Ring();
  return ring.size() == present.size() &&
         std::is_permutation(ring.begin(), ring.end(), present.begin()) &&
         control::RingFault(ring, BlockedAmong(ring)).empty();
}

// A better ring is a wish: nobody is removed for it.
void Group::KeepRing(const std::string& reason, GroupOutput* out) {
  better_.clear();
  HoldOrder(directory_->Now() + Millis(ring_interval_ms_));
  LinkMeasured(directory_->Now());
  MarkChanged(reason);
  Note("ring", MemberId{}, PeerId{}, "ring kept reason=" + Clean(reason), out);
}

// Members that have let the deadline pass that they joined with.
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

void Group::OnTime(Tick now, GroupOutput* out) {
  std::vector<LostLink> over;
  for (const auto& [link, grace] : lost_) {
    if (grace.due <= now) over.push_back(link);
  }
  for (const LostLink& link : over) LinkGraceOver(link, out);
  EvictLate(&Group::VoteDue, "missed the step boundary: no vote", now, out);
  EvictLate(&Group::OfferDue, "missed the sync: no offer", now, out);
  if (!preparation_) return;
  std::vector<PeerId> silent;
  for (const auto& [peer, answer] : preparation_->answers) {
    if (!answer.answered() && answer.due <= now) silent.push_back(peer);
  }
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

void Group::Postpone(int64_t us) {
  for (auto& [link, grace] : lost_) grace.due = grace.due + us;
  for (auto& [link, from] : missed_) {
    if (from != kLongAgo) from = from + us;
  }
  if (first_vote_ != kNever) first_vote_ = first_vote_ + us;
  sync_.Postpone(us);
  if (!preparation_) return;
  for (auto& [peer, answer] : preparation_->answers) {
    if (answer.due != kNever) answer.due = answer.due + us;
  }
}

void Group::Advance(Tick now, GroupOutput* out) {
  for (auto& [pair, detour] : detours_) {
    if (detour.since == kNever) detour.since = now;
  }
  for (int round = 0;; ++round) {
    LH_CHECK(round < 16) << "group " << ToString(record_.group) << " does not come to rest";
    ResolveUnreachable(out);
    // Of other peers by now, or two that were to be neighbours are blocked.
    if (!better_.empty() && !FitsRing(better_)) better_.clear();
    const Decision decision = Decide();
    if (decision.act == Act::kWait) break;
    Apply(decision, now, out);
  }
  SyncOutput sync;
  const std::optional<StateRecord> before = record_.state;
  sync_.Advance(Counting(), ballot_.voted(), &record_, now, &sync);
  Emit(std::move(sync), out);
  if (record_.state != before) agreed_for_.merge(BackgroundPeers());
  SendAgreed(out);
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
    if (decision.why.empty()) decision.why = WaitingForGrace();
    decision.act = decision.why.empty() ? Act::kCommit : Act::kWait;
    return decision;
  }
  const bool admitted = AnyAdmitted();
  decision.joiners = preparation_->joiners;
  decision.raised = preparation_->raised;
  // With nobody to vote, whoever came in between comes along.
  if (!admitted) decision.joiners.merge(Admissible());
  decision.freeze = admitted && (preparation_->freeze || AnyDeparture() || !repair_.empty());
  decision.reorder = preparation_->reorders && !decision.freeze && !better_.empty();
  if (ballot_.electorate().empty() && decision.joiners.empty()) {
    decision.act = admitted ? Act::kCommitEmpty : Act::kAbort;
  } else if (decision.freeze || decision.Changes()) {
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
  if (admitted && (AnyDeparture() || !repair_.empty())) {
    decision.act = Act::kPrepare;
    decision.freeze = true;
    return decision;
  }
  if (admitted && !ballot_.Decided()) {
    decision.why = WaitingForVotes();
    return decision;
  }
  decision.why = WaitingForCohort();
  if (!decision.why.empty()) return decision;
  if (!admission_tried_) decision.joiners = Admissible();
  if (admitted) decision.raised = ready_;
  // By itself, and only with everybody there: nobody is to wait long for it.
  decision.reorder = !decision.Changes() && !better_.empty() && AllAttached(better_);
  if (decision.Changes()) {
    decision.act = Act::kPrepare;
  } else if (admitted) {
    decision.act = Act::kAnswerVotes;
  } else if (CountPending() > 0) {
    decision.why =
        "waiting for a pending member whose peer is attached and not draining, and whose cohort, "
        "if it has one, is complete";
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

// A link was lost after its end had answered, maybe. Committed now, the epoch could be used over a
// link that lost some of it, and ops would have to be frozen; before that nothing is lost.
std::string Group::WaitingForGrace() const {
  for (const auto& [link, grace] : lost_) {
    const auto [from, to] = link;
    if (!preparation_->answers.contains(from) || !preparation_->answers.contains(to)) continue;
    return "epoch " + ToString(preparation_->epoch) + " waiting for whether " + ToString(to) +
           " is gone: " + LinkText(from, to, grace.reason);
  }
  return "";
}

// Who is admitted in another group has to come in here by the same ballot. Its peer comes back, or
// is dead soon.
std::string Group::WaitingForCohort() const {
  if (!AnyAdmitted() || admission_tried_) return "";
  for (const MemberRecord& m : record_.members) {
    if (Admits(m) || m.cohort.empty() || m.after > record_.ballots) continue;
    if (directory_->Attached(m.peer) || directory_->Draining(m.peer)) continue;
    if (!directory_->CohortBegun(record_.group.run, m.peer, m.cohort)) continue;
    return "waiting for " + ToString(m.peer) + " to come back: its cohort " + m.cohort +
           " is admitted in another group, " + ToString(m.member) + " is not yet";
  }
  return "";
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
      return Abort((preparation_->reorders ? "the ring is kept: " : "its newcomers are gone: ") +
                       preparation_->changed,
                   out);
    case Act::kAnswerVotes:
      return AnswerVotes(out);
  }
}

void Group::Prepare(const Decision& decision, Tick now, GroupOutput* out) {
  std::vector<MemberId> left;
  for (const auto& [member, departure] : Departures()) left.push_back(member);
  Preparation next;
  next.epoch = Epoch(record_.highest.value() + 1);
  next.freeze = decision.freeze;
  next.survivors = Survivors();
  next.joiners = decision.joiners;
  next.raised = decision.raised;
  next.reorders = decision.reorder;
  next.begun = now;
  next.cause = "joined=" + List(next.joiners, ",", kNamesShownMax) +
               " left=" + List(left, ",", kNamesShownMax);
  if (!next.raised.empty()) next.cause += " ready=" + List(next.raised, ",", kNamesShownMax);
  if (next.reorders) {
    next.cause +=
        (better_ == Ring() ? " to tell what links cost " : " for a better ring ") + better_gain_;
  }
  if (preparation_) {
    next.begun = preparation_->begun;
    next.rebuilds = preparation_->rebuilds;
    next.widened = preparation_->widened;
    next.cause +=
        " instead of epoch " + ToString(preparation_->epoch) + ": " + preparation_->changed;
  } else if (!repair_.empty()) {
    next.cause += " because " + repair_;
  }
  next.cause = Clean(std::move(next.cause));
  for (PeerId peer : PeersOf(next.survivors)) next.answers[peer];
  for (PeerId peer : PeersOf(next.joiners)) next.answers[peer];
  ChooseRing(now, &next);
  next.cost = directory_->CostOf(next.ring);
  const control::BlockedPairs before = BlockedAmong(OrderOf(PeersOf(next.survivors)));
  if (!next.freeze &&
      !std::includes(next.blocked.begin(), next.blocked.end(), before.begin(), before.end())) {
    // No ring with the newcomers avoids them all. A pair gets a link in a freezing epoch only.
    next.freeze = true;
    NoteFault(FaultNow("unreachable", "coordinator"));
  }

  record_.highest = next.epoch;
  if (!AnyAdmitted()) {
    // The first admission is a ballot that nobody had to vote in.
    if (!preparation_) ++record_.ballots;
    for (MemberId joiner : next.joiners) {
      record_.ballots = std::max(record_.ballots, Find(joiner)->after + 1);
    }
  }
  if (next.freeze && !fault_) fault_ = Fault{"restart", "coordinator", 0, now};
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
  for (const auto& [member, departure] : Departures())
    removed.emplace_back(*Find(member), departure);
  const std::set<MemberId> voted = done.AtBoundary() ? ballot_.voted() : std::set<MemberId>{};
  const bool first = !AnyAdmitted();
  const std::vector<PeerId> ring = Ring();

  std::erase_if(record_.blocked, [&done](const BlockedRecord& b) {
    return done.answers.contains(b.pair.a) && done.answers.contains(b.pair.b) &&
           !control::IsBlocked(done.blocked, b.pair.a, b.pair.b);
  });
  TakeEpoch(done);
  told_ = done.cost;
  std::string fault_text;
  std::optional<FaultRecord> fault;
  if (done.freeze) {
    // Nobody could vote meanwhile.
    if (first_vote_ != kNever) first_vote_ = first_vote_ + (now - done.begun);
    sync_.Postpone(now - done.begun);
    fault = FaultRecord{fault_->cause, fault_->detector, fault_->detect_ms,
                        static_cast<uint32_t>((now - fault_->since) / Millis(1))};
    fault_text = " cause=" + fault->cause + " detector=" + fault->detector +
                 " detect_ms=" + std::to_string(fault->detect_ms) +
                 " agree_ms=" + std::to_string(fault->agree_ms);
    fault_epoch_ = record_.committed;
    last_fault_ = *fault;
    fault_.reset();
    record_.fates = Judge(reports);
  }
  if (first) {
    ballot_ = Ballot(Survivors());
    admission_tried_ = false;
  } else if (done.AtBoundary()) {
    CompleteBallot();
  }

  for (const auto& [peer, answer] : done.answers)
    out->messages.emplace_back(peer, MakeCommit(peer));
  for (MemberId member : voted) AnswerVote(member, out);
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
  for (MemberId member : done.raised) {
    Note("ready", member, Find(member)->peer,
         "member counts member=" + ToString(member) + " epoch=" + ToString(record_.committed), out);
  }
  if (!done.joiners.empty()) agreed_for_.merge(BackgroundPeers());
  if (done.reorders) better_.clear();
  if (done.reorders && Ring() == ring) {
    Note("ring", MemberId{}, PeerId{},
         "link costs told epoch=" + ToString(record_.committed) + " " + CostText(told_), out);
  } else if (done.reorders) {
    ring_epoch_ = record_.committed;
    ring_gain_ = std::exchange(better_gain_, "");
    HoldOrder(now + Millis(ring_interval_ms_));
    Note("ring", MemberId{}, PeerId{},
         "ring ordered anew epoch=" + ToString(record_.committed) +
             " ring=" + List(Ring(), ",", kNamesShownMax) + " " + ring_gain_,
         out);
  } else if (Ring() != ring) {
    LinkMeasured(now);
  }
  Note("commit", MemberId{}, PeerId{},
       "epoch committed epoch=" + ToString(record_.committed) +
           " members=" + std::to_string(Admitted().size()) + " joined=" + List(done.joiners) +
           " left=" + List(left) + " ring=" + List(Ring()) +
           " took_ms=" + std::to_string((now - done.begun) / Millis(1)) + fault_text,
       out);
  out->notices.back().fault = std::move(fault);
}

void Group::CommitEmpty(GroupOutput* out) {
  preparation_.reset();
  std::vector<std::pair<MemberRecord, Departure>> removed;
  for (const auto& [member, departure] : Departures())
    removed.emplace_back(*Find(member), departure);
  record_.highest = Epoch(record_.highest.value() + 1);
  Preparation empty;
  empty.epoch = record_.highest;
  TakeEpoch(empty);
  ballot_ = Ballot();
  first_vote_ = kNever;
  ready_.clear();
  sync_.Clear();
  record_.state.reset();
  admission_tried_ = false;
  repair_.clear();
  fault_.reset();
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
  for (MemberId member : ballot_.voted()) AnswerVote(member, out);
  CompleteBallot();
}

void Group::AnswerVote(MemberId member, GroupOutput* out) {
  MemberRecord* voter = Find(member);
  ++voter->votes;
  out->messages.emplace_back(
      voter->peer, control::VoteResult{record_.group, member, voter->votes, record_.committed});
  SyncOutput sync;
  sync_.Release(member, record_, directory_->Now(), &sync);
  Emit(std::move(sync), out);
}

void Group::CompleteBallot() {
  ++record_.ballots;
  ballot_ = Ballot(Survivors());
  first_vote_ = kNever;
  ready_.clear();
  admission_tried_ = false;
}

// The record of a committed epoch: who departs is out, newcomers are in, the rest waits behind.
void Group::TakeEpoch(const Preparation& done) {
  record_.committed = done.epoch;
  if (done.AtBoundary()) record_.boundary = done.epoch;
  record_.fates.clear();
  std::erase_if(record_.members, [](const MemberRecord& m) { return m.departs.has_value(); });
  for (MemberRecord& member : record_.members) {
    if (done.joiners.contains(member.member)) {
      member.joined = done.epoch;
      // There is nobody whom it could hold up.
      if (done.survivors.empty()) member.counts = Epoch();
    }
    if (done.raised.contains(member.member)) member.counts = done.epoch;
  }
  SortPeers(done.ring);
  std::erase_if(missed_, [this](const auto& missed) {
    return !HasPeer(missed.first.first) || !HasPeer(missed.first.second);
  });
  SortMembers(done.ring, done.joiners, &record_.members);
}

// Ranks: who has one keeps its place, whatever becomes of the ring; newcomers stand behind in its
// order, pending ones behind them.
void Group::SortMembers(const std::vector<PeerId>& ring, const std::set<MemberId>& joiners,
                        std::vector<MemberRecord>* members) {
  std::map<PeerId, size_t> position;
  for (PeerId peer : ring) position.emplace(peer, position.size());
  const auto rank = [&](const MemberRecord& m) {
    if (joiners.contains(m.member)) return std::tuple(1, position.at(m.peer), m.member);
    return Admits(m) ? std::tuple(0, size_t{0}, MemberId()) : std::tuple(2, size_t{0}, m.member);
  };
  std::stable_sort(
      members->begin(), members->end(),
      [&rank](const MemberRecord& a, const MemberRecord& b) { return rank(a) < rank(b); });
}

// Peers with nothing but pending members stand behind the ring, peers with no members do not stand
// at all.
void Group::SortPeers(const std::vector<PeerId>& ring) {
  std::erase_if(record_.peers, [this](const PeerRecord& p) { return CountMembers(p.peer) == 0; });
  ForgetBlockedOfStrangers();
  std::map<PeerId, size_t> position;
  for (PeerId peer : ring) position.emplace(peer, position.size());
  const auto rank = [&](const PeerRecord& p) {
    const auto it = position.find(p.peer);
    return it == position.end() ? position.size() : it->second;
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
  message.boundary = p.AtBoundary() ? p.epoch : record_.boundary;
  message.attempt = record_.attempt;
  message.freeze = p.freeze;
  message.token = EpochToken(run_secret_, record_.group.group, p.epoch);
  message.cause = p.cause;
  message.blocked = p.blocked;
  message.cost = p.cost;

  std::map<PeerId, const PeerRecord*> records;
  for (const PeerRecord& peer : record_.peers) records[peer.peer] = &peer;
  for (PeerId id : p.ring) {
    const PeerRecord* peer = records.at(id);
    message.peers.push_back({peer->peer, peer->endpoints, peer->lanes});
  }
  std::vector<MemberRecord> members = record_.members;
  SortMembers(p.ring, p.joiners, &members);
  for (const MemberRecord& m : members) {
    if (p.joiners.contains(m.member)) {
      const Epoch counts = p.survivors.empty() ? Epoch() : m.counts;
      message.members.push_back({m.member, m.peer, p.epoch, m.name, counts});
    } else if (p.survivors.contains(m.member)) {
      const Epoch counts = p.raised.contains(m.member) ? p.epoch : m.counts;
      message.members.push_back({m.member, m.peer, m.joined, m.name, counts});
    }
  }
  return message;
}

control::CommitEpoch Group::MakeCommit(PeerId peer) const {
  control::CommitEpoch message{record_.group, record_.committed, {}, {}};
  for (const FatesRecord& record : record_.fates) {
    if (record.peer != peer) continue;
    message.fates = record.fates;
    message.missed = record.missed;
  }
  return message;
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
  pending_told_ = CountPending();
  for (PeerId peer : AdmittedPeers()) {
    out->messages.emplace_back(peer, control::PendingCount{record_.group, pending_told_});
  }
}

std::set<PeerId> Group::BackgroundPeers() const {
  std::set<PeerId> peers;
  for (const MemberRecord& member : record_.members) {
    if (Admits(member) && InBackground(member)) peers.insert(member.peer);
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

// ------------------------------------------------------------------------------ removing

void Group::Remove(MemberId id, Removal why, const std::string& reason, const Fault& fault,
                   GroupOutput* out) {
  const MemberRecord member = *Find(id);
  if (member.departs) return;
  const bool pending = !Admits(member);
  if (!member.cohort.empty()) out->removed.push_back({member, reason});
  if (!pending) {
    Find(id)->departs = Departure{why, reason};
    NoteFault(fault);
    ballot_.Leave(id);
    ready_.erase(id);
    if (preparation_) preparation_->raised.erase(id);
    sync_.Leave(id);
    if (ballot_.voted().empty()) first_vote_ = kNever;
  } else {
    std::erase_if(record_.members, [id](const MemberRecord& m) { return m.member == id; });
    if (CountMembers(member.peer) == 0) {
      std::erase_if(record_.peers, [&](const PeerRecord& p) { return p.peer == member.peer; });
      ForgetBlockedOfStrangers();
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

void Group::RemovePeer(PeerId peer, Removal why, const std::string& reason, const Fault& fault,
                       GroupOutput* out) {
  std::vector<MemberId> members;
  for (const MemberRecord& member : record_.members) {
    if (member.peer == peer) members.push_back(member.member);
  }
  for (MemberId member : members) Remove(member, why, reason, fault, out);
}

// All have answered, and some cannot reach others: decides what to do about it. It waits for all
// answers since the first ones do not show which end of a pair is the one that nobody reaches.
void Group::ResolveUnreachable(GroupOutput* out) {
  if (!preparation_ || !preparation_->changed.empty()) return;
  if (preparation_->reorders) {
    for (const auto& [peer, answer] : preparation_->answers) {
      if (!answer.failed) continue;
      const auto& [other, reason] = *answer.unreachable.begin();
      return KeepRing(ToString(peer) + " cannot reach " + ToString(other) + ": " + reason, out);
    }
  }
  std::map<LostLink, std::string> pairs;
  for (const auto& [peer, answer] : preparation_->answers) {
    if (!answer.answered()) return;
    for (const auto& [other, reason] : answer.unreachable) {
      pairs.emplace(LostLink(peer, other),
                    ToString(peer) + " cannot reach " + ToString(other) + ": " + reason);
    }
  }
  Settle(std::move(pairs), out);
}

// Removes peers until the pairs that are left, if any, can be routed around.
void Group::Settle(std::map<LostLink, std::string> pairs, GroupOutput* out) {
  while (!pairs.empty()) {
    if (CanRouteAround(pairs)) return Block(pairs, kBlockedRetry, out);
    // Before anybody goes, what was blocked at another time is tried again.
    if (const auto old = BlockedBefore();
        !old.empty() && CanRouteAround(pairs, old, Participants())) {
      for (const control::BlockedPair& pair : old) detours_[pair].since = kLongAgo;
      return Block(pairs, kBlockedRetry, out);
    }
    // Or those are taken along who wait to come in, once, where they are the way around.
    if (std::set<MemberId> waiting = Waiting(); !waiting.empty() && !preparation_->widened) {
      std::set<PeerId> peers = PeersOf(waiting);
      for (PeerId peer : Participants()) peers.insert(peer);
      if (CanRouteAround(pairs, {}, OrderOf(peers))) {
        preparation_->joiners.merge(waiting);
        preparation_->widened = true;
        return Block(pairs, kBlockedRetry, out);
      }
    }
    const PeerId victim = ChooseVictim(pairs);
    std::string reason;
    std::string reporter;
    std::erase_if(pairs, [&](const auto& pair) {
      if (pair.first.first != victim && pair.first.second != victim) return false;
      if (reason.empty()) {
        reason = pair.second;
        reporter = ToString(pair.first.first);
      }
      return true;
    });
    RemovePeer(victim, Removal::kUnreachable, Clean(reason), FaultNow("unreachable", reporter),
               out);
  }
}

bool Group::CanRouteAround(const std::map<LostLink, std::string>& pairs) const {
  return CanRouteAround(pairs, {}, Participants());
}

// True if the group can go on with all of `peers` although these pairs, and those known already but
// for some, have no link. A newcomer is not worth it that half of the others or more cannot reach.
bool Group::CanRouteAround(const std::map<LostLink, std::string>& pairs,
                           const control::BlockedPairs& but,
                           const std::vector<PeerId>& peers) const {
  const control::BlockedPairs known = BlockedAmong(peers);
  std::set<control::BlockedPair> all(known.begin(), known.end());
  for (const control::BlockedPair& pair : but) all.erase(pair);
  for (const auto& [pair, reason] : pairs) {
    all.insert(control::MakeBlockedPair(pair.first, pair.second));
  }
  if (all.size() > LH_BLOCKED_PAIRS_MAX) return false;
  std::map<PeerId, size_t> count;
  for (const control::BlockedPair& pair : all) {
    ++count[pair.a];
    ++count[pair.b];
  }
  const std::set<PeerId> established = PeersOf(Survivors());
  for (const auto& [peer, pairs_of_peer] : count) {
    if (!established.contains(peer) && 2 * pairs_of_peer >= peers.size() - 1) return false;
  }
  const control::BlockedPairs blocked(all.begin(), all.end());
  const auto ring = control::RingAvoiding(peers, blocked);
  return ring && control::RingFault(*ring, blocked).empty();
}

// The pairs that were routed around before this series of preparations, and are not tried in it.
control::BlockedPairs Group::BlockedBefore() const {
  control::BlockedPairs old = preparation_->blocked;
  std::erase_if(old, [this](const control::BlockedPair& pair) {
    const auto detour = detours_.find(pair);
    return detour == detours_.end() || detour->second.since >= preparation_->begun;
  });
  return old;
}

void Group::Block(const std::map<LostLink, std::string>& pairs, int64_t retry_us,
                  GroupOutput* out) {
  const std::set<PeerId> in_force = PeersOf(Survivors());
  for (const auto& [link, reason] : pairs) {
    const control::BlockedPair pair = control::MakeBlockedPair(link.first, link.second);
    const bool known = detours_.contains(pair);
    detours_[pair] = {directory_->Now(), retry_us};
    const std::string text =
        ToString(pair.a) + " and " + ToString(pair.b) + " have no link: " + Clean(reason);
    MarkChanged(text);
    if (known) continue;
    record_.blocked.push_back({pair, Clean(reason)});
    std::sort(record_.blocked.begin(), record_.blocked.end(),
              [](const BlockedRecord& x, const BlockedRecord& y) { return x.pair < y.pair; });
    // Ops in flight may use the link, if it once stood.
    if (in_force.contains(pair.a) && in_force.contains(pair.b)) {
      repair_ = Clean(text);
      NoteFault(FaultNow("unreachable", ToString(link.first)));
    }
    Note("block", MemberId{}, link.first,
         "pair routed around a=" + ToString(pair.a) + " b=" + ToString(pair.b) +
             " reason=" + Clean(reason),
         out);
  }
}

// Who has left the group is tried again if it comes back.
void Group::ForgetBlockedOfStrangers() {
  std::erase_if(record_.blocked, [this](const BlockedRecord& b) {
    return !HasPeer(b.pair.a) || !HasPeer(b.pair.b);
  });
  const auto known = [this](const control::BlockedPair& pair) {
    return std::any_of(record_.blocked.begin(), record_.blocked.end(),
                       [&](const BlockedRecord& b) { return b.pair == pair; });
  };
  std::erase_if(detours_, [&](const auto& entry) { return !known(entry.first); });
  std::erase_if(strikes_, [this](const auto& entry) {
    return !HasPeer(entry.first.a) || !HasPeer(entry.first.b);
  });
}

// The order of the peers and the pairs that get no link. When it freezes, pairs that have waited
// for long are tried again; so are all if nobody can route around them any more, as with three
// peers left.
void Group::ChooseRing(Tick now, Preparation* preparation) const {
  std::set<PeerId> peers;
  for (const auto& [peer, answer] : preparation->answers) peers.insert(peer);
  const std::vector<PeerId> order = preparation->reorders ? better_ : OrderOf(peers);
  control::BlockedPairs blocked = BlockedAmong(order);
  std::erase_if(blocked, [&](const control::BlockedPair& pair) {
    const Detour& detour = detours_.at(pair);
    return preparation->freeze && now - detour.since >= detour.retry_us;
  });
  auto ring = control::RingAvoiding(order, blocked);
  if (!ring || !control::RingFault(*ring, blocked).empty()) {
    blocked.clear();
    ring = order;
  }
  preparation->ring = *std::move(ring);
  preparation->blocked = std::move(blocked);
}

// Newcomers before peers of the epoch in force; then the one in most pairs, which is reached by
// fewest; then the one that joined last. Who reports is not the worse for it: a pair counts once,
// whoever reported it, and age has nothing to do with reporting.
PeerId Group::ChooseVictim(const std::map<LostLink, std::string>& pairs) const {
  std::set<LostLink> undirected;
  std::set<PeerId> candidates;
  for (const auto& [pair, reason] : pairs) {
    undirected.insert(std::minmax(pair.first, pair.second));
    candidates.insert({pair.first, pair.second});
  }
  // Those that are routed around already count as well.
  for (const auto& [a, b] : BlockedAmong(Participants())) undirected.insert({a, b});
  std::map<PeerId, size_t> count;
  for (const auto& [a, b] : undirected) {
    ++count[a];
    ++count[b];
  }
  const std::set<PeerId> established = PeersOf(Survivors());
  std::map<PeerId, std::pair<Epoch, MemberId>> age;  // smallest: here for the longest time
  for (const MemberRecord& m : record_.members) {
    const std::pair<Epoch, MemberId> own(Admits(m) ? m.joined : Epoch(UINT64_MAX), m.member);
    const auto [it, fresh] = age.emplace(m.peer, own);
    if (!fresh) it->second = std::min(it->second, own);
  }
  const auto weight = [&](PeerId peer) {
    return std::tuple(!established.contains(peer), count.at(peer), age[peer]);
  };
  PeerId victim = *candidates.begin();
  for (PeerId peer : candidates) {
    if (weight(peer) > weight(victim)) victim = peer;
  }
  return victim;
}

// A death would have shown by now: the link is lost between two that live.
void Group::LinkGraceOver(LostLink link, GroupOutput* out) {
  const auto lost = lost_.extract(link);
  if (lost.empty()) return;
  const Grace& grace = lost.mapped();
  if (RoutedAround(link.first, link.second)) return;
  const std::string text = LinkText(link.first, link.second, grace.reason);
  const std::set<PeerId> in_force = PeersOf(Survivors());
  const bool freeze = in_force.contains(link.first) && in_force.contains(link.second);
  const control::BlockedPair pair = control::MakeBlockedPair(link.first, link.second);
  Strikes& strikes = strikes_[pair];
  const Tick now = directory_->Now();
  strikes.count = now - strikes.last > kStrikesForgotten ? 1 : strikes.count + 1;
  if (now - strikes.last > 2 * kBlockedRetry) strikes.detours = 0;
  strikes.last = now;
  if (freeze) {
    // Both ends report one loss: the other's report is the same strike.
    lost_.erase({link.second, link.first});
    NoteFault(grace.fault);
    repair_ = text;
    // A connection that broke is likely to be rebuilt at once. Where nothing came through for
    // detect_ms, nobody is made to wait for what may come through now.
    if (grace.fault.detect_ms > 0 && CanRouteAround({{link, text}})) {
      const int64_t retry = kSilentRetry << 2 * std::min(strikes.detours++, 3u);
      return Block({{link, text}}, std::min(retry, kBlockedRetry), out);
    }
    const std::map<LostLink, std::string> pairs{{link, text + " (again and again)"}};
    if (strikes.count > kStrikesMax && CanRouteAround(pairs)) {
      return Block(pairs, kBlockedRetry, out);
    }
  }
  if (!preparation_) return;
  Preparation& p = *preparation_;
  if (!p.answers.contains(link.first) || !p.answers.contains(link.second)) return;
  if (p.changed.empty() && ++p.rebuilds > kRebuildsMax) {
    Settle({{link, text + " (again and again)"}}, out);
    return;
  }
  MarkChanged(text);
}

void Group::MarkChanged(const std::string& why) {
  if (preparation_ && preparation_->changed.empty()) preparation_->changed = why;
}

Group::Fault Group::FaultNow(std::string cause, std::string detector, uint32_t detect_ms) const {
  return {std::move(cause), std::move(detector), detect_ms, directory_->Now()};
}

// What follows from the first, or comes while it is repaired, is not a fault of its own.
void Group::NoteFault(const Fault& fault) {
  if (!fault_) fault_ = fault;
}

void Group::Note(std::string kind, MemberId member, PeerId peer, std::string text,
                 GroupOutput* out) const {
  const Epoch epoch = preparation_ ? preparation_->epoch : record_.committed;
  out->notices.push_back({std::move(kind), record_.group, epoch, member, peer, std::move(text)});
}

// ------------------------------------------------------------------------------ view

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

bool Group::AccusedBy(PeerId other, PeerId peer, Tick now) const {
  const auto missed = missed_.find({other, peer});
  if (missed != missed_.end() && missed->second <= now) return true;
  if (!preparation_) return false;
  const auto answer = preparation_->answers.find(other);
  return answer != preparation_->answers.end() && answer->second.unreachable.contains(peer);
}

bool Group::Accused(PeerId peer, Tick now) const {
  return std::any_of(record_.peers.begin(), record_.peers.end(),
                     [&](const PeerRecord& other) { return AccusedBy(other.peer, peer, now); });
}

bool Group::AccusedByAll(PeerId peer) const {
  const std::vector<PeerId> witnesses = Witnesses(peer);
  return witnesses.size() >= 2 &&
         std::all_of(witnesses.begin(), witnesses.end(), [&](PeerId other) {
           return AccusedBy(other, peer, kNever) || RoutedAround(other, peer);
         });
}

bool Group::HeardOfLate(PeerId peer) const {
  return directory_->HeardWithin(peer, Millis(detect_ms_) * 2 / 3);
}

std::vector<PeerId> Group::Witnesses(PeerId peer) const {
  std::vector<PeerId> others = Participants();
  std::erase_if(others, [&](PeerId other) {
    return other == peer || (directory_->Attached(other) && !HeardOfLate(other));
  });
  return others;
}

std::vector<PeerId> Group::TakeAccused(Tick now) {
  std::vector<PeerId> accused;
  for (auto& [link, from] : missed_) {
    if (from == kLongAgo || from > now) continue;
    accused.push_back(link.second);
    from = kLongAgo;
  }
  return accused;
}

Tick Group::NextDeadline() const {
  Tick next = kNever;
  for (const auto& [link, grace] : lost_) next = std::min(next, grace.due);
  for (const auto& [link, from] : missed_) {
    if (from != kLongAgo) next = std::min(next, from);
  }
  for (const MemberRecord& member : record_.members) {
    next = std::min({next, VoteDue(member), OfferDue(member)});
  }
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
  std::set<MemberId> members;
  for (const MemberRecord& m : record_.members) {
    if (Admits(m) && !m.departs) members.insert(m.member);
  }
  return members;
}

std::set<MemberId> Group::Counting() const {
  std::set<MemberId> members;
  for (const MemberRecord& m : record_.members) {
    if (Admits(m) && !m.departs && !InBackground(m)) members.insert(m.member);
  }
  return members;
}

std::map<MemberId, Departure> Group::Departures() const {
  std::map<MemberId, Departure> departures;
  for (const MemberRecord& m : record_.members) {
    if (m.departs) departures.emplace(m.member, *m.departs);
  }
  return departures;
}

bool Group::AnyDeparture() const {
  return std::any_of(record_.members.begin(), record_.members.end(),
                     [](const MemberRecord& m) { return m.departs.has_value(); });
}

std::vector<PeerId> Group::Participants() const {
  std::set<PeerId> peers = PeersOf(Survivors());
  if (preparation_) peers.merge(PeersOf(preparation_->joiners));
  return OrderOf(peers);
}

bool Group::AllAttached(const std::vector<PeerId>& peers) const {
  return std::all_of(peers.begin(), peers.end(),
                     [this](PeerId peer) { return directory_->Attached(peer); });
}

std::set<MemberId> Group::Waiting() const {
  // With nobody to admit, votes may be missing.
  if (!preparation_ || preparation_->joiners.empty()) return {};
  std::set<MemberId> waiting = Admissible();
  for (MemberId joiner : preparation_->joiners) waiting.erase(joiner);
  return waiting;
}

// The order of first admission, then of ids.
std::vector<PeerId> Group::OrderOf(const std::set<PeerId>& peers) const {
  const std::set<PeerId> admitted = AdmittedPeers();
  std::vector<PeerId> order;
  for (const PeerRecord& peer : record_.peers) {
    if (peers.contains(peer.peer) && admitted.contains(peer.peer)) order.push_back(peer.peer);
  }
  for (PeerId peer : peers) {
    if (!admitted.contains(peer)) order.push_back(peer);
  }
  return order;
}

control::BlockedPairs Group::BlockedAmong(const std::vector<PeerId>& peers) const {
  const std::set<PeerId> there(peers.begin(), peers.end());
  control::BlockedPairs blocked;
  for (const BlockedRecord& b : record_.blocked) {
    if (there.contains(b.pair.a) && there.contains(b.pair.b)) blocked.push_back(b.pair);
  }
  return blocked;
}

std::vector<const MemberRecord*> Group::Cohort(PeerId peer, const std::string& cohort) const {
  std::vector<const MemberRecord*> members;
  for (const MemberRecord& m : record_.members) {
    if (m.peer == peer && m.cohort == cohort && !m.departs) members.push_back(&m);
  }
  return members;
}

// They were told that they get no link.
bool Group::RoutedAround(PeerId x, PeerId y) const {
  if (record_.blocked.empty()) return false;
  return control::IsBlocked(preparation_ ? preparation_->blocked : BlockedAmong(Ring()), x, y);
}

uint64_t Group::NewestBallot() const { return record_.ballots + (ballot_.voted().empty() ? 0 : 1); }

bool Group::Missed(const MemberRecord& member) const {
  return !Admits(member) && member.after != kCohortIncomplete && !member.cohort.empty() &&
         AnyAdmitted() && record_.ballots > member.after;
}

bool Group::AdmittedOrPrepared(const MemberRecord& member) const {
  return Admits(member) || (preparation_ && preparation_->joiners.contains(member.member));
}

// While ops are frozen nobody can come to the boundary who waits for one of them.
bool Group::Judged(const MemberRecord& member) const {
  return member.step_deadline_ms != 0 && Admits(member) && !member.departs &&
         !(preparation_ && preparation_->freeze);
}

Tick Group::VoteDue(const MemberRecord& member) const {
  if (first_vote_ == kNever || !Judged(member) || ballot_.HasVoted(member.member)) return kNever;
  // It cannot come before the sync has ended that it takes part in.
  if (sync_.InSync(member.member)) return kNever;
  return std::max(first_vote_, sync_.last_end()) + Millis(member.step_deadline_ms);
}

Tick Group::OfferDue(const MemberRecord& member) const {
  if (sync_.first_offer() == kNever || !Judged(member) || InBackground(member)) return kNever;
  if (!sync_.Awaits(member.member)) return kNever;
  return std::max(sync_.first_offer(), sync_.last_end()) + Millis(member.step_deadline_ms);
}

std::set<MemberId> Group::Admissible() const {
  // The ballot that is open, or, in a first epoch that is being prepared, the one it stands for.
  const uint64_t ballot =
      AnyAdmitted() ? record_.ballots + 1 : (preparation_ ? record_.ballots : kCohortIncomplete);
  std::set<MemberId> members;
  for (const MemberRecord& m : record_.members) {
    if (m.after >= ballot) continue;
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
  const std::string sync = sync_.WaitingFor(Counting());
  if (!sync.empty()) view.waiting_for += (view.waiting_for.empty() ? "" : "; ") + sync;
  view.state = record_.state;
  for (const MemberRecord& m : record_.members) {
    view.members.push_back({m.member, m.peer, m.name, m.joined, ballot_.HasVoted(m.member),
                            m.cohort, std::nullopt, InBackground(m)});
  }
  view.blocked = record_.blocked;
  view.fault_epoch = fault_epoch_;
  view.fault = last_fault_;
  view.ring_epoch = ring_epoch_;
  view.ring_gain = ring_gain_;
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
    LH_CHECK(InBackground(m) || m.counts <= record_.boundary) << name << " " << ToString(m.member);
    LH_CHECK(!(pending_behind && Admits(m)))
        << name << " admitted " << ToString(m.member) << " behind a pending member";
    LH_CHECK(!m.departs || Admits(m)) << name << " " << ToString(m.member) << " departs";
    LH_CHECK(m.cohort.empty() == (m.cohort_size == 0)) << name << " " << ToString(m.member);
    pending_behind = pending_behind || !Admits(m);
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
    LH_CHECK(detours_.contains(pair)) << name;
  }
  LH_CHECK(detours_.size() == record_.blocked.size()) << name;
  LH_CHECK(ballot_.electorate() == Survivors())
      << name << " electorate " << List(ballot_.electorate());
  for (const MemberId member : ready_) {
    LH_CHECK(ballot_.HasVoted(member) && InBackground(*Find(member))) << name;
  }
  sync_.CheckInvariants(Survivors(), Counting());
  LH_CHECK(agreed_for_.empty()) << name << " owes somebody what was agreed on";
  LH_CHECK(!record_.state || AnyAdmitted()) << name << " remembers a state of nobody";
  LH_CHECK(better_.empty() || FitsRing(better_)) << name << " has a ring of others";
  LH_CHECK(Decide().act == Act::kWait) << name << " has something to do and does not do it";
  if (!preparation_) {
    LH_CHECK(!AnyDeparture() && repair_.empty()) << name << " forgot a change";
    LH_CHECK(!fault_) << name << " forgot " << fault_->cause;
    const std::string ring_fault = control::RingFault(Ring(), BlockedAmong(Ring()));
    LH_CHECK(ring_fault.empty()) << name << " " << ring_fault;
    LH_CHECK(record_.attempt <= record_.committed) << name << " left ops frozen";
    return;
  }
  const Preparation& p = *preparation_;
  LH_CHECK(p.epoch > record_.committed && p.epoch <= record_.highest) << name;
  LH_CHECK(p.changed.empty() && repair_.empty()) << name << " keeps an outdated preparation";
  LH_CHECK(p.freeze == (record_.attempt > record_.committed)) << name;
  LH_CHECK(p.freeze || !AnyDeparture()) << name << " removes members without a freeze";
  LH_CHECK(p.freeze == fault_.has_value()) << name << " freezes without a cause";
  const std::string ring_fault = control::RingFault(p.ring, p.blocked);
  LH_CHECK(ring_fault.empty()) << name << " " << ring_fault;
  LH_CHECK(p.ring.size() == p.answers.size()) << name;
  LH_CHECK(!p.freeze || record_.attempt == p.epoch) << name;
  LH_CHECK(!p.reorders || (!p.freeze && p.joiners.empty() && p.raised.empty() && p.ring == better_))
      << name << " orders the ring anew and does more";
  LH_CHECK(p.survivors == Survivors()) << name << " prepares " << List(p.survivors);
  LH_CHECK(std::includes(ready_.begin(), ready_.end(), p.raised.begin(), p.raised.end())) << name;
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
    digest->Add(m.syncs).Add(m.counts);
    digest->Add(m.cohort).Add(uint64_t{m.cohort_size}).Add(m.after).Add(m.step_deadline_ms);
    digest->Add(uint64_t{m.departs.has_value()});
    if (m.departs) digest->Add(static_cast<uint64_t>(m.departs->why)).Add(m.departs->reason);
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
    digest->Add(f.missed.size());
    for (const control::MissedOp& op : f.missed) digest->Add(op.boundary).Add(op.tag);
  }
  digest->Add(uint64_t{record.state.has_value()});
  if (record.state) {
    digest->Add(record.state->revision).Add(record.state->state);
    digest->Add(record.state->manifest);
  }
  digest->Add(record.ballots).Add(record.blocked.size());
  for (const BlockedRecord& b : record.blocked) {
    digest->Add(b.pair.a).Add(b.pair.b).Add(b.reason);
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

// Secrets are left out: they decide nothing, and a replay has others.
void Group::AddTo(Digester* digest) const {
  const auto add_fault = [digest](const Fault& fault) {
    digest->Add(fault.cause).Add(fault.detector).Add(uint64_t{fault.detect_ms}).Add(fault.since);
  };
  AddRecord(record_, digest);
  AddMembers(ballot_.electorate(), digest);
  AddMembers(ballot_.voted(), digest);
  AddMembers(ready_, digest);
  digest->Add(uint64_t{admission_tried_}).Add(repair_).Add(uint64_t{pending_told_});
  digest->Add(first_vote_);
  sync_.AddTo(digest);
  digest->Add(uint64_t{fault_.has_value()});
  if (fault_) add_fault(*fault_);
  digest->Add(fault_epoch_).Add(last_fault_.cause).Add(last_fault_.detector);
  digest->Add(uint64_t{last_fault_.detect_ms}).Add(uint64_t{last_fault_.agree_ms});
  digest->Add(strikes_.size());
  for (const auto& [pair, strikes] : strikes_) {
    digest->Add(pair.a).Add(pair.b).Add(strikes.last);
    digest->Add(uint64_t{strikes.count}).Add(uint64_t{strikes.detours});
  }
  for (const auto& [pair, detour] : detours_) {
    digest->Add(detour.since).Add(static_cast<uint64_t>(detour.retry_us));
  }
  digest->Add(lost_.size());
  for (const auto& [link, grace] : lost_) {
    digest->Add(link.first).Add(link.second).Add(grace.due).Add(grace.epoch).Add(grace.reason);
    add_fault(grace.fault);
  }
  digest->Add(missed_.size());
  for (const auto& [link, from] : missed_) digest->Add(link.first).Add(link.second).Add(from);
  digest->Add(better_.size());
  for (PeerId peer : better_) digest->Add(peer);
  digest->Add(uint64_t{told_.latency_us}).Add(told_.bytes_per_second);
  digest->Add(told_.ring_bytes_per_second);
  digest->Add(better_gain_).Add(order_due_).Add(order_after_).Add(ring_epoch_).Add(ring_gain_);
  digest->Add(uint64_t{preparation_.has_value()});
  if (!preparation_) return;
  const Preparation& p = *preparation_;
  digest->Add(p.epoch).Add(uint64_t{p.freeze}).Add(p.begun).Add(uint64_t{p.rebuilds});
  digest->Add(uint64_t{p.reorders}).Add(uint64_t{p.cost.latency_us});
  digest->Add(p.cost.bytes_per_second).Add(p.cost.ring_bytes_per_second);
  digest->Add(p.cause).Add(p.changed).Add(p.blocked.size());
  for (PeerId peer : p.ring) digest->Add(peer);
  for (const control::BlockedPair& pair : p.blocked) digest->Add(pair.a).Add(pair.b);
  AddMembers(p.survivors, digest);
  AddMembers(p.joiners, digest);
  AddMembers(p.raised, digest);
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
