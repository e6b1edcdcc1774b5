#include "peerd/core/peer_core.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "base/text.h"
#include "peerd/core/epoch_follower.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/local_members.h"
#include "peerd/core/local_syncs.h"
#include "peerd/core/op_table.h"

namespace longhaul::peerd {
namespace {

// The ops of a dead trainer have this many detect_ms to settle; then its member leaves anyway.
// Without a limit, members that died while they waited for each other's posts would never leave.
constexpr int64_t kDeathGrace = 2;
// How long a newcomer's data port is tried, in halves of detect_ms: long enough for TCP to repeat a
// SYN.
constexpr int64_t kTryHalfDetects = 3;

// A fault in progress, for its log line and FaultOver.
struct OpenFault {
  Tick begun;           // when the first epoch that freezes was prepared
  uint32_t frozen = 0;  // ops announced and not settled
  Tick committed;       // the time of the commit; 0: not yet
  Epoch epoch;
  std::string cause;
  FateCounts fates;
};

struct Group {
  Group(const GroupKey& key, PeerId self, OpCounters* counters)
      : epochs(key, self), ops(key, self, &epochs.history(), counters) {}
  // A copy's ops refer to the history and the counters of the original, until they are told of
  // others.
  Group(const Group&) = default;
  Group& operator=(const Group&) = delete;

  const EpochRecord* current() const {
    return epochs.history().empty() ? nullptr : &epochs.history().current();
  }

  EpochFollower epochs;
  OpTable ops;
  // A PrepareEpoch that came when all admitted members here were removed, but not yet finished: an
  // attempt had not stopped, for example. It is prepared when they are finished.
  std::optional<control::PrepareEpoch> deferred;
  // Set from the first freeze until the first op that had to be redone has ended.
  std::optional<OpenFault> fault;
  // The state that the group agreed on last. Members in the background fetch it.
  std::optional<control::StateAgreed> agreed;
  uint32_t pending = 0;  // members that wait for admission
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;

  LH_STATE(Group, LH_FIELD(epochs), LH_FIELD(ops), LH_FIELD(deferred),
           LH_FIELD(fault, rule::Aside{}), LH_FIELD(agreed), LH_FIELD(pending),
           LH_FIELD(bytes_sent), LH_FIELD(bytes_received));
};

}  // namespace

class PeerCore::Impl {
 public:
  explicit Impl(CoreConfig config) : config_(std::move(config)) {}
  std::unique_ptr<Impl> Clone() const;

  std::vector<Action> Step(const Event& event, Tick now);
  Tick NextDeadline() const;
  void SetBytes(const GroupKey& group, uint64_t sent, uint64_t received);
  void SetWorstLanes(std::map<std::string, control::WorstLane> worst);
  void SetProgress(LocalId local, const control::FetchProgress& progress) {
    syncs_.SetProgress(local, progress);
  }
  MembersView GetMembers(LocalId local, AsOf as_of) const;
  bool HasPeer(const GroupKey& group, PeerId peer) const;
  std::optional<MemberView> GetMember(LocalId local, MemberId member) const;
  std::optional<PostView> ViewPost(const LocalPost& post) const;
  Stats GetStats() const;
  void CheckInvariants() const;
  LH_STATE(Impl, LH_FIELD(config_, rule::Aside{}), LH_FIELD(detect_ms_), LH_FIELD(counters_),
           LH_FIELD(members_), LH_FIELD(syncs_), LH_FIELD(groups_), LH_FIELD(links_up_),
           LH_FIELD(welcome_), LH_FIELD(coordinator_up_), LH_FIELD(refused_), LH_FIELD(welcomed_),
           LH_FIELD(coordinator_down_since_), LH_FIELD(worst_, rule::Aside{}), LH_FIELD(beat_due_),
           LH_FIELD(drain_), LH_FIELD(now_, rule::Aside{}), LH_FIELD(out_, rule::Aside{}));

 private:
  struct OpenDrain {
    Tick deadline;
    bool due = false;     // the deadline has passed: all members leave now
    bool forced = false;  // no coordinator was reached: all members were removed without it
    bool told = false;    // Drained was emitted
    LH_FIELDS(OpenDrain, LH_FIELD(deadline), LH_FIELD(due), LH_FIELD(forced), LH_FIELD(told));
  };

  // ---- events
  void On(const CoordinatorUp&);
  void On(const CoordinatorDown&);
  void On(const FromCoordinator& event);
  void On(const LocalJoin& event);
  void On(const LocalStep& event);
  void On(const LocalSync& event);
  void On(const LocalTake& event) { syncs_.Take(event.local, event.deadline, now_, &out_); }
  void On(const LocalLeave& event) { members_.Leave(event.local, &out_); }
  void On(const LocalDied& event);
  void On(const LocalPost& event);
  void On(const LocalRefusal& event);
  void On(const LocalCancel& event);
  void On(const LinkUp& event);
  void On(const LinkDown& event);
  void On(const AddressTried& event) {
    Send(control::PeerTried{event.group, event.trial, event.peer, event.error});
  }
  void On(const PeerReady& event);
  void On(const PeerDone& event);
  void On(const AttemptComplete& event);
  void On(const ReadySigned& event);
  void On(const AttemptFinished& event);
  void On(const AttemptStopped& event);
  void On(const TransferMeasured& event) {
    syncs_.Measured(event.local, event.bytes_left, event.bytes_total);
  }
  void On(const TransferEnded& event) { syncs_.Ended(event, &out_); }
  void On(const ManifestCompared& event) {
    syncs_.ManifestCompared(event.local, event.difference, &out_);
  }
  void On(const DrainRequested& event) { BeginDrain(event.deadline, "asked to stop"); }
  void On(const TimePassed&) {}

  // ---- messages of the coordinator
  void Handle(const control::Welcome& message);
  void Handle(const control::JoinPending& message) { members_.Pending(message, &out_); }
  void Handle(const control::JoinRefused& message) { members_.Refused(message, &out_); }
  void Handle(const control::VoteResult& message);
  void Handle(const control::PrepareEpoch& message);
  void Handle(const control::CommitEpoch& message);
  void Handle(const control::AbortEpoch& message);
  void Handle(const control::TryPeer& message) {
    const Tick deadline = now_ + kTryHalfDetects * Millis(detect_ms_) / 2;
    out_.push_back(TryAddress{message.group, message.trial, message.peer, deadline});
  }
  void Handle(const control::Removed& message);
  void Handle(const control::PendingCount& message);
  void Handle(const control::Drain& message);
  void Handle(const control::SyncResult& message);
  void Handle(const control::StateAgreed& message);

  // Returns why the member may not begin this sync, or OK. The member must exist.
  Outcome MaySync(LocalId local, const SyncRequest& request);
  // True if a member in the background should come out. `request`: what it brings, or nullptr.
  bool ReadyToContribute(const LocalMember& local, const SyncRequest* request);
  void BeginSync(const LocalMember& local, const SyncRequest& request, bool with_vote);
  void BeginBackground(const LocalMember& local, const SyncRequest& request);
  // Returns why this peer may not follow the coordinator, or "".
  std::string ProblemWith(const control::Welcome& message) const;
  control::GroupState StateOf(const GroupKey& key, const Group& group) const;
  void Send(control::PeerMessage message) { out_.push_back(ToCoordinator{std::move(message)}); }
  void Ignore(const char* what, const GroupKey& group);
  Group* FindGroup(const GroupKey& key);
  void BeginDrain(Tick deadline, const std::string& reason);
  bool InBackground(const LocalMember& local);
  // Lets the member, if it is in the background, fetch the state that the group agreed on last.
  void Chase(const LocalMember& local);
  // Ends the posts and the sync of a removed member.
  void PutOut(const LocalMember& local);
  void CloseFault(const GroupKey& key, Group& group, bool resumed);

  // ---- after each event: take the steps that have become possible or due
  void Sweep();
  void SweepDrain();
  void SweepSteps();
  void SweepHeartbeat();
  void SweepGroups();
  Tick ForceDue() const;
  // Forgets links that no group needs. They are closed without LinkDown.
  void ForgetLinks();
  int64_t BeatUs() const { return Millis(detect_ms_) / 3; }

  const CoreConfig config_;
  uint32_t detect_ms_ = config_.detect_ms;
  OpCounters counters_;
  LocalMembers members_;
  LocalSyncs syncs_{config_.detect_ms};
  std::map<GroupKey, Group> groups_;
  std::set<std::pair<std::string, PeerId>> links_up_;
  control::Welcome welcome_;     // the last that was accepted; store 0: there was none
  bool coordinator_up_ = false;  // the control stream is open
  bool refused_ = false;         // this peer refused the coordinator: messages are ignored
  bool welcomed_ = false;        // a Welcome was accepted on this stream
  Tick coordinator_down_since_;
  std::map<std::string, control::WorstLane> worst_;  // by run
  Tick beat_due_ = kNever;
  std::optional<OpenDrain> drain_;

  // These belong to the Step() that runs.
  Tick now_;
  std::vector<Action> out_;
};

std::vector<Action> PeerCore::Impl::Step(const Event& event, Tick now) {
  now_ = now;
  std::visit([this](const auto& e) { On(e); }, event);
  Sweep();
  if (!coordinator_up_) {
    // Dropped here. On(CoordinatorUp) sends it again from the stored state.
    std::erase_if(out_, [](const Action& a) { return std::holds_alternative<ToCoordinator>(a); });
  }
  return std::exchange(out_, {});
}

void PeerCore::Impl::Ignore(const char* what, const GroupKey& group) {
  out_.push_back(
      LogLine{std::string(what) + " ignored group=" + ToString(group) + " why=\"no member here\""});
}

Group* PeerCore::Impl::FindGroup(const GroupKey& key) {
  const auto it = groups_.find(key);
  return it == groups_.end() ? nullptr : &it->second;
}

// ------------------------------------------------------------------------------ control stream

// A deferred PrepareEpoch counts as prepared, because it will be prepared.
control::GroupState PeerCore::Impl::StateOf(const GroupKey& key, const Group& group) const {
  control::GroupState state{key, group.epochs.history().committed(), members_.MembersOf(key)};
  const control::PrepareEpoch* const prepared =
      group.deferred ? &*group.deferred : group.epochs.prepared();
  if (prepared != nullptr) {
    state.prepared = prepared->epoch;
    state.preparation = prepared->preparation;
    state.frozen = prepared->freeze;
  }
  return state;
}

void PeerCore::Impl::On(const CoordinatorUp&) {
  coordinator_up_ = true;
  refused_ = false;
  beat_due_ = now_ + BeatUs();
  members_.ForgetUnheard();
  control::Hello hello;
  hello.peer = config_.peer;
  hello.endpoints = config_.endpoints;
  hello.protocol = control::kProtocolVersion;
  hello.lanes = config_.lanes;
  hello.version = config_.version;
  hello.host = config_.host;
  for (const auto& [key, group] : groups_) {
    control::GroupState state = StateOf(key, group);
    // A group that has an epoch is named even without members: messages about its epochs follow.
    if (state.members.empty() && !state.committed && !state.prepared) continue;
    hello.groups.push_back(std::move(state));
  }
  hello.store = welcome_.store;
  hello.term = welcome_.term;
  hello.coordinator = welcome_.coordinator;
  Send(std::move(hello));
  if (drain_) Send(control::Draining{});
  members_.Resend([this](LocalId id) { return syncs_.OfferOf(id); }, &out_);
  syncs_.Resend(&out_);
  for (const auto& [key, group] : groups_) group.epochs.Resend(&out_);
}

void PeerCore::Impl::On(const CoordinatorDown&) {
  coordinator_up_ = refused_ = false;
  if (std::exchange(welcomed_, false)) coordinator_down_since_ = now_;
  beat_due_ = kNever;
}

void PeerCore::Impl::On(const FromCoordinator& event) {
  if (refused_) return;
  std::visit([this](const auto& message) { Handle(message); }, event.message);
}

std::string PeerCore::Impl::ProblemWith(const control::Welcome& message) const {
  if (welcome_.store == 0) return "";
  if (message.store != welcome_.store) {
    if (!members_.AnyNumbered()) return "";
    return "it has another store than the coordinator that the members here are of: list only "
           "coordinators of one store, or let the members leave first";
  }
  const bool later = message.term > welcome_.term;
  const bool same = message.term == welcome_.term && message.coordinator == welcome_.coordinator;
  return later || same ? "" : "a later start of a coordinator on its store is known here";
}

void PeerCore::Impl::Handle(const control::Welcome& message) {
  if (const std::string problem = ProblemWith(message); !problem.empty()) {
    out_.push_back(LogLine{"coordinator refused" + LogField("coordinator", message.coordinator) +
                           " term=" + std::to_string(message.term) +
                           LogField("known_coordinator", welcome_.coordinator) + " known_term=" +
                           std::to_string(welcome_.term) + LogField("why", problem)});
    out_.push_back(RefuseCoordinator{problem});
    refused_ = true;
    coordinator_up_ = welcomed_ = false;
    beat_due_ = kNever;
    return;
  }
  welcome_ = message;
  welcomed_ = coordinator_up_;
  for (const auto& [key, group] : groups_) group.ops.AskAgain(&out_);
  if (message.detect_ms == 0) return;
  detect_ms_ = message.detect_ms;
  syncs_.SetDetectMs(detect_ms_);
  if (coordinator_up_) beat_due_ = std::min(beat_due_, now_ + BeatUs());
}

void PeerCore::Impl::Handle(const control::VoteResult& message) {
  const Group* const group = FindGroup(message.group);
  if (group == nullptr) return;
  const LocalMember* const local = members_.Voted(message, group->epochs.history(), &out_);
  if (local == nullptr) return;
  syncs_.VoteAnswered(local->id);
  Chase(*local);
}

void PeerCore::Impl::Handle(const control::SyncResult& message) {
  const LocalMember* const local = members_.Find(message.group, message.member);
  const Group* const group = FindGroup(message.group);
  if (local == nullptr || group == nullptr) return;
  const bool share = group->current() != nullptr && group->current()->AnyInBackground();
  syncs_.Result(local->id, message, share, now_, &out_);
}

bool PeerCore::Impl::InBackground(const LocalMember& local) {
  const Group* const group = FindGroup(local.group);
  return group != nullptr && group->current() != nullptr &&
         group->current()->InBackground(local.member);
}

void PeerCore::Impl::Chase(const LocalMember& local) {
  const Group* const group = FindGroup(local.group);
  if (!group->agreed || local.removed || !InBackground(local)) return;
  syncs_.Chase(local.id, *group->agreed, group->current()->SourcesFor(local.member), &out_);
}

void PeerCore::Impl::Handle(const control::StateAgreed& message) {
  Group* const group = FindGroup(message.group);
  if (group == nullptr) return Ignore("StateAgreed", message.group);
  group->agreed = message;
  for (const auto& [id, local] : members_.all()) {
    if (local.group == message.group) Chase(local);
  }
}

void PeerCore::Impl::Handle(const control::PrepareEpoch& message) {
  Group* const group = FindGroup(message.group);
  if (group == nullptr) return Ignore("PrepareEpoch", message.group);
  if (group->current() != nullptr && members_.AllAdmittedRemoved(message.group)) {
    group->deferred = message;
    return;
  }
  if (!group->epochs.Prepare(message, detect_ms_, now_, &out_)) return;
  group->ops.Expect(group->epochs.PreparedPeers());
  // Without a committed epoch there are no ops to freeze, and the epoch that is committed in the
  // end need not freeze.
  if (message.freeze && group->current() != nullptr && !group->ops.frozen()) {
    CloseFault(message.group, *group, /*resumed=*/false);
    group->fault =
        OpenFault{now_, static_cast<uint32_t>(group->ops.Report().size()), {}, {}, "", {}};
    group->ops.Freeze(now_, &out_);
  }
}

void PeerCore::Impl::Handle(const control::CommitEpoch& message) {
  Group* const group = FindGroup(message.group);
  if (group == nullptr) return Ignore("CommitEpoch", message.group);
  if (!group->epochs.Commit(message, now_, &out_)) return;
  const FateCounts fates =
      group->ops.Commit(message.fates, message.missed, group->epochs.LostPeers(), now_, &out_);
  if (group->fault && group->fault->committed == Tick()) {
    group->fault->committed = now_;
    group->fault->epoch = message.epoch;
    group->fault->cause = group->current()->cause;
    group->fault->fates = fates;
    if (fates.redone == 0) CloseFault(message.group, *group, /*resumed=*/false);
  }
  const EpochRecord& record = *group->current();
  // A trainer that has passed this boundary may look at the count at once. The coordinator's own
  // count comes after this message, so the newcomers are subtracted here.
  const auto admitted = static_cast<uint32_t>(
      std::count_if(record.members.begin(), record.members.end(),
                    [&](const auto& member) { return member.joined == record.epoch; }));
  group->pending -= std::min(group->pending, admitted);
  members_.Committed(message.group, record, group->pending, &out_);
  for (const auto& [id, local] : members_.all()) {
    if (local.group != message.group || !local.admitted) continue;
    if (!record.AnyInBackground()) syncs_.EndSharing(id, &out_);
    if (record.InBackground(local.member)) {
      syncs_.NameSources(id, record.SourcesFor(local.member), &out_);
    }
  }
  ForgetLinks();
}

void PeerCore::Impl::CloseFault(const GroupKey& key, Group& group, bool resumed) {
  if (!group.fault) return;
  const OpenFault fault = *std::exchange(group.fault, std::nullopt);
  if (fault.committed == Tick()) return;  // never committed here
  FaultOver over{key, fault.committed - fault.begun, -1};
  if (resumed) over.resume_us = now_ - fault.committed;
  out_.push_back(LogLine{"fault over group=" + ToString(key) + " epoch=" + ToString(fault.epoch) +
                         " ops_frozen=" + std::to_string(fault.frozen) +
                         " committed=" + std::to_string(fault.fates.committed) +
                         " redone=" + std::to_string(fault.fates.redone) +
                         " aborted=" + std::to_string(fault.fates.aborted) +
                         " agree_ms=" + std::to_string(over.agree_us / 1000) +
                         " resume_ms=" + (resumed ? std::to_string(over.resume_us / 1000) : "-") +
                         LogField("cause", fault.cause)});
  out_.push_back(over);
}

void PeerCore::Impl::Handle(const control::AbortEpoch& message) {
  Group* const group = FindGroup(message.group);
  if (group == nullptr) return Ignore("AbortEpoch", message.group);
  if (group->deferred && group->deferred->epoch == message.epoch) {
    group->deferred.reset();
    return;
  }
  if (!group->epochs.Abort(message, &out_)) return;
  group->ops.Expect({});
  ForgetLinks();
}

void PeerCore::Impl::Handle(const control::Removed& message) {
  // If the member is not known here, this is the answer to a Leave that was sent twice.
  const LocalMember* const local = members_.Removed(message, &out_);
  if (local != nullptr) return PutOut(*local);
  // No local member has a number now. A member that the coordinator has forgotten asks again, and
  // its admission may use the number of the epoch that is prepared here. So that preparation is
  // forgotten.
  Group* const group = FindGroup(message.group);
  if (group == nullptr || group->current() != nullptr) return;
  if (!members_.MembersOf(message.group).empty()) return;
  group->epochs.Forget(&out_);
  group->ops.Expect({});
  ForgetLinks();
}

void PeerCore::Impl::PutOut(const LocalMember& local) {
  const Outcome left{Code::kFailedPrecondition, "this member has left"};
  syncs_.Remove(local.id, local.removed->ok() ? left : *local.removed, &out_);
  Group* const group = FindGroup(local.group);
  if (group == nullptr || !local.member) return;
  Outcome outcome = *local.removed;
  if (outcome.ok()) outcome = {Code::kEvicted, "the member left before the op was settled"};
  group->ops.Evict(local.member, outcome, now_, &out_);
}

void PeerCore::Impl::Handle(const control::PendingCount& message) {
  Group* const group = FindGroup(message.group);
  if (group == nullptr || group->pending == message.count) return;
  group->pending = message.count;
  if (group->current() == nullptr) return;
  members_.PendingChanged(message.group, *group->current(), group->pending, &out_);
}

void PeerCore::Impl::Handle(const control::Drain& message) {
  BeginDrain(now_ + Millis(config_.drain_timeout_ms), message.reason);
}

// ------------------------------------------------------------------------------ trainers

void PeerCore::Impl::On(const LocalJoin& event) {
  members_.Join(event, &out_);
  if (members_.Find(event.local) == nullptr || groups_.contains(event.group)) return;
  groups_.try_emplace(event.group, event.group, config_.peer, &counters_);
}

void PeerCore::Impl::On(const LocalStep& event) {
  Outcome refusal = members_.MayStep(event.local);
  if (refusal.ok() && syncs_.Open(event.local)) {
    refusal = {Code::kFailedPrecondition, "this member is in a sync: wait for its end"};
  }
  if (refusal.ok() && event.sync) refusal = MaySync(event.local, *event.sync);
  if (!refusal.ok()) {
    if (event.sync) out_.push_back(syncs_.RefusalOf(event.local, refusal));
    out_.push_back(StepDone{event.local, refusal, {}});
    return;
  }
  const LocalMember& local = *members_.Find(event.local);
  const bool background = InBackground(local);
  const bool ready = background && ReadyToContribute(local, event.sync ? &*event.sync : nullptr);
  if (event.sync && background && !ready) {
    BeginBackground(local, *event.sync);
  } else if (event.sync) {
    BeginSync(local, *event.sync, /*with_vote=*/true);
  }
  members_.Step(event.local, syncs_.OfferOf(event.local), ready, &out_);
}

void PeerCore::Impl::On(const LocalSync& event) {
  Outcome refusal = members_.MaySync(event.local);
  if (refusal.ok()) refusal = MaySync(event.local, event.sync);
  if (!refusal.ok()) {
    out_.push_back(syncs_.RefusalOf(event.local, std::move(refusal)));
    return;
  }
  const LocalMember& local = *members_.Find(event.local);
  if (!InBackground(local)) return BeginSync(local, event.sync, /*with_vote=*/false);
  BeginBackground(local, event.sync);
  Chase(local);
}

Outcome PeerCore::Impl::MaySync(LocalId local, const SyncRequest& request) {
  if (request.strategy == control::SyncStrategy::kSend && InBackground(*members_.Find(local))) {
    return {Code::kInvalidArgument,
            "this member joined in the background: it has to get the state of the others, and "
            "cannot use send before its input is in results"};
  }
  return syncs_.MayBegin(local);
}

bool PeerCore::Impl::ReadyToContribute(const LocalMember& local, const SyncRequest* request) {
  const Group& group = *FindGroup(local.group);
  const bool alone = group.current()->SourcesFor(local.member).empty();
  return alone || !group.agreed || syncs_.CaughtUp(local.id, request, *group.agreed);
}

void PeerCore::Impl::BeginSync(const LocalMember& local, const SyncRequest& request,
                               bool with_vote) {
  syncs_.Begin(local.id, local.group, local.member, request, with_vote, &out_);
}

void PeerCore::Impl::BeginBackground(const LocalMember& local, const SyncRequest& request) {
  const Group& group = *FindGroup(local.group);
  syncs_.BeginBackground(local.id, local.group, local.member, request, group.agreed,
                         group.current()->SourcesFor(local.member), now_, &out_);
}

void PeerCore::Impl::On(const LocalDied& event) {
  members_.Died(event.local, event.reason, now_ + kDeathGrace * Millis(detect_ms_), &out_);
}

void PeerCore::Impl::On(const LocalPost& event) {
  Outcome refusal = members_.MayPost(event.post.local);
  if (refusal.ok()) {
    const LocalMember& local = *members_.Find(event.post.local);
    Group& group = groups_.at(local.group);
    if (group.current() != nullptr && group.current()->RankOf(local.member) >= 0) {
      group.ops.Post({event, local.member, local.boundary, local.passed}, now_, &out_);
      return;
    }
    refusal = {Code::kEvicted,
               "member " + ToString(local.member) + " is not in the epoch in force"};
  }
  out_.push_back(PostDone{event.post, std::move(refusal), {}});
}

void PeerCore::Impl::On(const LocalRefusal& event) {
  if (!members_.MayPost(event.op.post.local).ok()) return;
  const LocalMember& local = *members_.Find(event.op.post.local);
  Group& group = groups_.at(local.group);
  if (group.current() == nullptr || group.current()->RankOf(local.member) < 0) return;
  group.ops.Refuse({event.op, local.member, local.boundary, local.passed}, event.why, now_, &out_);
}

void PeerCore::Impl::On(const LocalCancel& event) {
  const LocalMember* const local = members_.Find(event.post.local);
  if (local == nullptr) return;
  const auto group = groups_.find(local->group);
  if (group != groups_.end()) group->second.ops.Cancel(event.post, &out_);
}

// ------------------------------------------------------------------------ links, frames, driver

void PeerCore::Impl::On(const LinkUp& event) {
  for (auto& [key, group] : groups_) {
    if (key.run != event.run || !group.epochs.OtherPeers().contains(event.peer)) continue;
    links_up_.emplace(event.run, event.peer);
    group.epochs.LinkUp(event.peer);
    group.ops.NoteLatency(event.peer, event.latency_us);
  }
}

void PeerCore::Impl::On(const LinkDown& event) {
  const bool was_up = links_up_.erase({event.run, event.peer}) != 0;
  for (auto& [key, group] : groups_) {
    if (key.run != event.run) continue;
    group.epochs.LinkDown(event.peer, was_up, {event.reason, event.silent_ms}, &out_);
    group.ops.Lose(group.epochs.LostPeers());
  }
}

void PeerCore::Impl::On(const PeerReady& event) {
  if (Group* const group = FindGroup(event.group)) return group->ops.OnReady(event, now_, &out_);
  ++counters_.frames_stale;
}

void PeerCore::Impl::On(const PeerDone& event) {
  if (Group* const group = FindGroup(event.group)) return group->ops.OnDone(event, now_, &out_);
  ++counters_.frames_stale;
}

void PeerCore::Impl::On(const ReadySigned& event) {
  if (Group* const group = FindGroup(event.group)) group->ops.OnSigned(event, now_, &out_);
}

void PeerCore::Impl::On(const AttemptComplete& event) {
  if (Group* const group = FindGroup(event.group)) group->ops.OnComplete(event, now_, &out_);
}

void PeerCore::Impl::On(const AttemptFinished& event) {
  if (Group* const group = FindGroup(event.group)) group->ops.OnFinished(event, now_, &out_);
}

void PeerCore::Impl::On(const AttemptStopped& event) {
  if (Group* const group = FindGroup(event.group)) group->ops.OnStopped(event, now_, &out_);
}

// ------------------------------------------------------------------------------ sweep

void PeerCore::Impl::BeginDrain(Tick deadline, const std::string& reason) {
  if (drain_) {
    drain_->deadline = std::min(drain_->deadline, deadline);
    return;
  }
  drain_ = OpenDrain{deadline};
  out_.push_back(LogLine{"draining" + LogField("reason", reason)});
  Send(control::Draining{});
  members_.Drain(reason, /*at_once=*/false, &out_);
}

Tick PeerCore::Impl::ForceDue() const {
  return std::max(drain_->deadline, coordinator_down_since_ + 2 * Millis(detect_ms_));
}

void PeerCore::Impl::SweepDrain() {
  if (!drain_) return;
  if (!drain_->due && now_ >= drain_->deadline) {
    drain_->due = true;
    members_.Drain("", /*at_once=*/true, &out_);
  }
  if (!drain_->forced && !welcomed_ && !members_.empty() && now_ >= ForceDue()) {
    drain_->forced = true;
    out_.push_back(LogLine{"draining without the coordinator: it cannot be reached"});
    for (const LocalMember* local :
         members_.RemoveAll("this peer stops, and no coordinator could be reached to leave")) {
      PutOut(*local);
    }
  }
}

void PeerCore::Impl::SweepSteps() {
  for (const auto& [id, local] : members_.all()) {
    if (!local.step_passed || syncs_.Open(id)) continue;
    Group& group = groups_.at(local.group);
    if (members_.EndStep(id, *group.current(), group.pending, &out_)) {
      group.ops.Pass(local.member, {local.boundary, local.passed}, &out_);
    }
    const Epoch oldest = members_.OldestStep(local.group, group.epochs.history().committed());
    group.epochs.ForgetMembersBefore(oldest);
  }
}

void PeerCore::Impl::SweepHeartbeat() {
  if (now_ < beat_due_) return;
  beat_due_ = now_ + BeatUs();
  control::Heartbeat beat;
  for (const auto& [key, group] : groups_) {
    if (!members_.HasAdmitted(key)) continue;
    beat.loads.push_back(
        {key, group.ops.open(), group.ops.settled(), group.bytes_sent, group.bytes_received});
    control::GroupLoad& load = beat.loads.back();
    load.oldest = group.ops.Oldest(now_);
    if (!load.oldest) continue;
    if (const auto worst = worst_.find(key.run); worst != worst_.end()) load.worst = worst->second;
  }
  beat.fetches = syncs_.Fetches();
  Send(std::move(beat));
}

void PeerCore::Impl::SweepGroups() {
  bool closed = false;
  for (auto it = groups_.begin(); it != groups_.end();) {
    const GroupKey& key = it->first;
    Group& group = it->second;
    EpochFollower& epochs = group.epochs;
    if (!members_.HasAny(key)) {
      // A group without local members has no open op.
      LH_CHECK(group.ops.open() == 0) << ToString(key);
      if (!epochs.history().empty() || epochs.preparing()) {
        out_.push_back(KeepLinks{key, epochs.history().committed(), {}});
        closed = true;
      }
      it = groups_.erase(it);
      continue;
    }
    if (!epochs.history().empty() && !members_.HasAdmitted(key)) {
      LH_CHECK(group.ops.open() == 0) << ToString(key);
      const Epoch committed = epochs.history().committed();
      epochs.Reset();
      group.ops.Reset();
      group.fault.reset();
      group.agreed.reset();
      const std::set<PeerId> peers = epochs.OtherPeers();
      out_.push_back(KeepLinks{key, committed, {peers.begin(), peers.end()}});
      closed = true;
      if (group.deferred) Handle(*std::exchange(group.deferred, std::nullopt));
    }
    if (group.fault && group.fault->committed != Tick() && group.ops.resumed()) {
      CloseFault(key, group, /*resumed=*/true);
    }
    epochs.FailIfDue(now_, &out_);
    if (epochs.WantsReady()) {
      if (!epochs.freezing()) {
        epochs.AnswerReady({}, &out_);
      } else if (!group.ops.Stopping()) {
        epochs.AnswerReady(group.ops.Report(), &out_);
      }
    }
    ++it;
  }
  if (closed) ForgetLinks();
}

void PeerCore::Impl::ForgetLinks() {
  std::set<std::pair<std::string, PeerId>> needed;
  for (const auto& [key, group] : groups_) {
    for (const PeerId peer : group.epochs.OtherPeers()) needed.emplace(key.run, peer);
  }
  std::erase_if(links_up_, [&](const auto& link) { return !needed.contains(link); });
}

void PeerCore::Impl::Sweep() {
  SweepDrain();
  syncs_.OnTime(now_, &out_);
  SweepSteps();
  const auto busy_with = [this](const LocalMember& local) {
    LocalMembers::Busy busy;
    if (const Group* const group = FindGroup(local.group)) {
      busy.posts = group->ops.PostsOf(local.id);
      busy.lingering = group->ops.LingeringOf(local.id);
    }
    busy.syncing = syncs_.Open(local.id) || syncs_.Writing(local.id);
    return busy;
  };
  members_.Sweep(busy_with, now_, &out_);
  if (!coordinator_up_) members_.ForgetUnheard();
  SweepGroups();
  SweepHeartbeat();
  if (drain_ && !drain_->told && members_.empty()) {
    drain_->told = true;
    out_.push_back(Drained{});
  }
}

Tick PeerCore::Impl::NextDeadline() const {
  Tick due = std::min({beat_due_, members_.NextDeadline(), syncs_.NextDeadline()});
  for (const auto& [key, group] : groups_) due = std::min(due, group.epochs.NextDeadline());
  if (drain_ && !drain_->due) due = std::min(due, drain_->deadline);
  if (drain_ && !drain_->forced && !welcomed_ && !members_.empty()) {
    due = std::min(due, ForceDue());
  }
  return due;
}

// ------------------------------------------------------------------------------ views

void PeerCore::Impl::SetBytes(const GroupKey& group, uint64_t sent, uint64_t received) {
  if (Group* const found = FindGroup(group)) {
    found->bytes_sent = sent;
    found->bytes_received = received;
  }
}

void PeerCore::Impl::SetWorstLanes(std::map<std::string, control::WorstLane> worst) {
  worst_ = std::move(worst);
}

PeerCore::MembersView PeerCore::Impl::GetMembers(LocalId id, AsOf as_of) const {
  MembersView view;
  const LocalMember* const local = members_.Find(id);
  if (local == nullptr || !local->admitted) return view;
  const Group& group = groups_.at(local->group);
  if (group.current() == nullptr || group.current()->RankOf(local->member) < 0) return view;
  view.epoch = as_of == AsOf::kStep ? local->step.epoch : group.current()->epoch;
  const std::vector<MemberId>* const members = group.epochs.history().MembersOf(view.epoch);
  LH_CHECK(members != nullptr) << "epoch " << view.epoch.value();
  view.members = *members;
  return view;
}

bool PeerCore::Impl::HasPeer(const GroupKey& key, PeerId peer) const {
  const auto it = groups_.find(key);
  return it != groups_.end() && it->second.epochs.OtherPeers().contains(peer);
}

std::optional<PeerCore::MemberView> PeerCore::Impl::GetMember(LocalId id, MemberId member) const {
  const LocalMember* const local = members_.Find(id);
  if (local == nullptr || !local->admitted) return std::nullopt;
  const Group& group = groups_.at(local->group);
  const KnownMember* const known = group.epochs.history().Member(member);
  if (known == nullptr || group.current() == nullptr) return std::nullopt;
  return MemberView{*known, group.current()->RankOf(member)};
}

std::optional<PostView> PeerCore::Impl::ViewPost(const LocalPost& post) const {
  if (!members_.MayPost(post.post.local).ok()) return std::nullopt;
  const LocalMember& local = *members_.Find(post.post.local);
  const Group& group = groups_.at(local.group);
  if (group.current() == nullptr || group.current()->RankOf(local.member) < 0) return std::nullopt;
  const NewPost asked{post, local.member, local.boundary};
  if (!group.ops.MayPost(asked).ok()) return std::nullopt;
  PostView view;
  view.member = local.member;
  group.ops.ViewPost(asked, &view);
  return view;
}

PeerCore::Stats PeerCore::Impl::GetStats() const {
  Stats stats;
  for (const auto& [id, local] : members_.all()) stats.members += local.admitted ? 1 : 0;
  for (const auto& [key, group] : groups_) {
    stats.ops_open += group.ops.open();
    if (const EpochRecord* const record = group.current()) {
      stats.mesh_share = std::max(stats.mesh_share, record->ShareOf(config_.peer));
    }
  }
  stats.ops_committed = counters_.committed;
  stats.ops_aborted = counters_.aborted;
  stats.ops_refused = counters_.refused;
  stats.retries = counters_.retries;
  stats.frames_stale = counters_.frames_stale;
  stats.frames_refused = counters_.frames_refused;
  return stats;
}

void PeerCore::Impl::CheckInvariants() const {
  members_.CheckInvariants();
  syncs_.CheckInvariants();
  for (const auto& [id, local] : members_.all()) {
    const auto it = groups_.find(local.group);
    LH_CHECK(it != groups_.end()) << ToString(local.group);
    const size_t posts = it->second.ops.PostsOf(id);
    LH_CHECK(!local.removed || posts != 0 || syncs_.Open(id) || syncs_.Writing(id))
        << "finished member kept";
    LH_CHECK(!syncs_.Open(id) || local.admitted) << "sync of a member that is not admitted";
    LH_CHECK(!syncs_.OfferOf(id) || (local.step_open && !local.step_passed))
        << "an offer waits for a vote that nobody casts";
    LH_CHECK(!local.step_passed || syncs_.Open(id) || local.exit != Exit::kNone || local.removed ||
             it->second.current()->RankOf(local.member) < 0)
        << "a step that has passed is not answered";
    LH_CHECK(local.admitted || posts == 0) << "posts of a member that is not admitted";
    LH_CHECK(!local.admitted || it->second.current() != nullptr) << "admitted without epoch";
  }
  for (const auto& [key, group] : groups_) {
    LH_CHECK(members_.HasAny(key)) << ToString(key);
    LH_CHECK(!group.deferred || members_.AllAdmittedRemoved(key)) << ToString(key);
    LH_CHECK(group.ops.frozen() == group.epochs.freezing() || !members_.HasAdmitted(key))
        << ToString(key);
    group.epochs.CheckInvariants();
    group.ops.CheckInvariants();
  }
}

std::unique_ptr<PeerCore::Impl> PeerCore::Impl::Clone() const {
  LH_CHECK(out_.empty());
  auto clone = std::make_unique<Impl>(*this);
  for (auto& [key, group] : clone->groups_) {
    group.ops.ReferTo(&group.epochs.history(), &clone->counters_);
  }
  return clone;
}

// ------------------------------------------------------------------------------ the shell

PeerCore::PeerCore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PeerCore::PeerCore(CoreConfig config) : impl_(std::make_unique<Impl>(std::move(config))) {}
PeerCore::~PeerCore() = default;
PeerCore::PeerCore(PeerCore&&) noexcept = default;
PeerCore& PeerCore::operator=(PeerCore&&) noexcept = default;

std::vector<Action> PeerCore::Step(const Event& event, Tick now) { return impl_->Step(event, now); }
Tick PeerCore::NextDeadline() const { return impl_->NextDeadline(); }
void PeerCore::SetBytes(const GroupKey& group, uint64_t sent, uint64_t received) {
  impl_->SetBytes(group, sent, received);
}
void PeerCore::SetWorstLanes(std::map<std::string, control::WorstLane> worst) {
  impl_->SetWorstLanes(std::move(worst));
}

void PeerCore::SetProgress(LocalId local, const control::FetchProgress& progress) {
  impl_->SetProgress(local, progress);
}
PeerCore::MembersView PeerCore::GetMembers(LocalId local, AsOf as_of) const {
  return impl_->GetMembers(local, as_of);
}
bool PeerCore::HasPeer(const GroupKey& group, PeerId peer) const {
  return impl_->HasPeer(group, peer);
}
std::optional<PeerCore::MemberView> PeerCore::GetMember(LocalId local, MemberId member) const {
  return impl_->GetMember(local, member);
}
std::optional<PostView> PeerCore::ViewPost(const LocalPost& post) const {
  return impl_->ViewPost(post);
}
PeerCore::Stats PeerCore::GetStats() const { return impl_->GetStats(); }
void PeerCore::CheckInvariants() const { impl_->CheckInvariants(); }
uint64_t PeerCore::Digest() const { return Digester().Add(*impl_).value(); }
PeerCore PeerCore::Clone() const { return PeerCore(impl_->Clone()); }

}  // namespace longhaul::peerd
