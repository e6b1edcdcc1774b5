// For tests: a coordinator core with a store and peers, in one thread.
//
// There are two kinds of peers. A scripted peer sends what the test says, and the harness keeps
// what the peer receives as text. A lively peer follows the protocol by itself: it prepares, gets
// ready, commits, and after a reconnect sends again what was not answered. It also checks
// (LH_CHECK) what a peer may rely on.
//
// The harness drives the core. It carries out a Persist before all other actions. It moves time
// from deadline to deadline and sends the heartbeats of all peers. It checks the core's invariants
// after each step. It can kill the coordinator at any Persist. It owns the core, the store and the
// peers.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/crypto/identity.h"
#include "coordinator/core/coordinator_core.h"
#include "coordinator/core/text.h"

namespace longhaul::coordinator {

inline std::string Describe(const control::CoordinatorMessage& message);

struct LivelyPeer {
  struct LocalMember {
    GroupKey group;
    bool admitted = false;
    uint64_t votes = 0;  // how many votes were answered
    bool voting = false;
    bool leaving = false;
    // The state that the member has now. Set while its sync has no answer kEnd.
    std::optional<control::SyncOffer> sync;
    bool sync_with_vote = false;  // `sync` goes with the vote that has no answer yet
    bool ready = false;           // the unanswered vote says `ready`
    uint64_t syncs = 0;           // the number of the last sync
    std::vector<control::SyncResult> sync_results;
  };
  struct GroupAtPeer {
    Epoch committed;
    std::optional<control::PrepareEpoch> prepared;
    bool frozen = false;
    std::vector<control::OpReport> ops;
    std::map<OpOrdinal, control::Fate> fates;
  };
  std::map<uint64_t, control::Join> joins;  // joins without an answer
  std::map<MemberId, LocalMember> members;
  std::map<GroupKey, GroupAtPeer> groups;
  std::set<PeerId> cannot_reach;
  std::set<PeerId> no_way_through;  // the peer cannot build links through these relays
  bool tries_well = false;          // the peer's trials succeed, also with peers it cannot reach
  bool tries_nobody = false;        // the peer answers no trial
  std::optional<control::StateAgreed> agreed;  // the last StateAgreed that the peer received
  bool mute = false;                           // the peer answers no preparation
  bool patient = false;                        // the peer does not report unreachable peers yet
  bool fetches = true;                         // the peer's fetches succeed at once
};

class Harness {
 public:
  explicit Harness(uint32_t detect_ms = 1000, uint32_t ring_interval_ms = 300000)
      : detect_ms_(detect_ms), ring_interval_ms_(ring_interval_ms) {
    Boot();
  }

  static GroupKey G(uint32_t group = 0) { return {"run", group}; }
  static PeerId P(uint64_t n) { return PeerId(n); }
  static MemberId M(uint64_t n) { return MemberId(n); }

  // ---- peers

  // Opens a stream and sends Hello.
  // The peer lies: it claims to know this term of the store, and another coordinator.
  void Claim(PeerId peer, uint64_t term) {
    control::Welcome welcome;
    welcome.coordinator = "another";
    welcome.store = store().store.store;
    welcome.term = term;
    welcomes_[peer] = welcome;
    liars_.insert(peer);
  }
  void Attach(PeerId peer, std::vector<control::GroupState> groups = {}) {
    const SessionId session(++last_session_);
    Step(SessionOpened{session});
    sessions_[peer] = session;
    owners_[session] = peer;
    control::Hello hello;
    hello.peer = peer;
    const auto moved = addresses_.find(peer);
    const PeerId host = moved == addresses_.end() ? peer : moved->second;
    hello.endpoints = {"10.0.0." + std::to_string(host.value()) + ":29700"};
    hello.protocol = control::kProtocolVersion;
    hello.lanes = 2;
    hello.version = "1";
    hello.host = "host" + std::to_string(peer.value());
    hello.key = KeyOf(peer);
    hello.groups = std::move(groups);
    const auto welcome = welcomes_.find(peer);
    if (welcome != welcomes_.end()) {
      hello.store = welcome->second.store;
      hello.term = welcome->second.term;
      hello.coordinator = welcome->second.coordinator;
    }
    Say(peer, hello);
  }
  void Say(PeerId peer, control::PeerMessage message) {
    const auto it = sessions_.find(peer);
    LH_CHECK(it != sessions_.end()) << ToString(peer) << " has no stream";
    if (auto* ready = std::get_if<control::EpochReady>(&message)) NamePreparation(peer, ready);
    if (auto* failed = std::get_if<control::EpochFailed>(&message)) NamePreparation(peer, failed);
    Step(FromPeer{it->second, std::move(message)});
    Run();
  }
  // `ended_here`: the coordinator itself ends the stream.
  void Close(PeerId peer, bool ended_here = false) {
    const auto it = sessions_.find(peer);
    if (it == sessions_.end()) return;
    const SessionId session = it->second;
    owners_.erase(session);
    sessions_.erase(it);
    Step(SessionClosed{session, ended_here});
    Run();
  }
  // The public key in the peer's Hello.
  static Identity IdentityOf(PeerId peer) { return Identity::ForTest(peer.value()); }
  static std::string KeyOf(PeerId peer) { return IdentityOf(peer).public_key(); }
  // From its next Attach() on, the peer has the address of `other`.
  void SetAddress(PeerId peer, PeerId other) { addresses_[peer] = other; }
  bool HasStream(PeerId peer) const { return sessions_.contains(peer); }
  // The peer hangs: it sends no heartbeats from now on.
  void Hang(PeerId peer) { hanging_.insert(peer); }
  void Unhang(PeerId peer) { hanging_.erase(peer); }

  LivelyPeer& AddLively(PeerId peer) {
    LivelyPeer& lively = lively_[peer];
    Reattach(peer);
    return lively;
  }
  LivelyPeer& Lively(PeerId peer) { return lively_.at(peer); }
  // The peer's host dies and does not come back.
  void Kill(PeerId peer) {
    lively_.erase(peer);
    Close(peer);
  }
  void Reattach(PeerId peer) {
    const LivelyPeer lively = lively_.at(peer);
    std::map<GroupKey, control::GroupState> states;
    for (const auto& [member, local] : lively.members) {
      control::GroupState& state = states[local.group];
      state.group = local.group;
      const auto group = lively.groups.find(local.group);
      if (group != lively.groups.end()) {
        state.committed = group->second.committed;
        if (group->second.prepared) {
          state.prepared = group->second.prepared->epoch;
          state.preparation = group->second.prepared->preparation;
          state.frozen = group->second.frozen;
        }
      }
      state.members.push_back(member);
    }
    std::vector<control::GroupState> said;
    said.reserve(states.size());
    for (auto& [key, state] : states) said.push_back(state);
    Attach(peer, said);
    for (const auto& [request, join] : lively.joins) Tell(peer, join);
    for (const auto& [member, local] : lively.members) {
      if (local.leaving) Tell(peer, control::Leave{local.group, member, false, "bye"});
      if (local.voting) SendVote(peer, member, local);
      if (local.sync && !local.sync_with_vote) {
        Tell(peer, control::SyncVote{local.group, member, *local.sync});
      }
    }
  }
  void LivelyJoin(PeerId peer, uint64_t request, const GroupKey& group = G()) {
    LivelyJoin(peer, control::Join{request, group, "t"});
  }
  void LivelyJoin(PeerId peer, const control::Join& join) {
    lively_.at(peer).joins[join.request] = join;
    Tell(peer, join);
  }
  // Adds peers 1..n with one admitted member each, m1..mn, one after the other. Forgets what they
  // received.
  void Found(uint64_t n) {
    for (uint64_t i = 1; i <= n; ++i) {
      AddLively(PeerId(i));
      LivelyJoin(PeerId(i), 1);
      Run();
      for (uint64_t j = 1; j < i; ++j) LivelyVote(PeerId(j), MemberId(j));
      Run();
    }
    LH_CHECK(View().committed == Epoch(n)) << ToString(View().committed);
    ForgetReceived();
  }
  void LivelyVote(PeerId peer, MemberId member,
                  std::optional<control::SyncOffer> sync = std::nullopt, bool ready = false) {
    LivelyPeer& lively = lively_.at(peer);
    const auto it = lively.members.find(member);
    if (it == lively.members.end() || it->second.voting) return;
    it->second.voting = true;
    it->second.ready = ready;
    if (sync) {
      it->second.sync = sync;
      it->second.sync->number = ++it->second.syncs;
      it->second.sync_with_vote = true;
    }
    SendVote(peer, member, it->second);
  }
  // The member votes for a sync. The harness sets the number of `offer`.
  void LivelySync(PeerId peer, MemberId member, control::SyncOffer offer) {
    const auto it = lively_.at(peer).members.find(member);
    if (it == lively_.at(peer).members.end() || it->second.sync) return;
    offer.number = ++it->second.syncs;
    it->second.sync = offer;
    Tell(peer, control::SyncVote{it->second.group, member, offer});
  }
  // The member reports that the fetch that it was told to do has ended, well or with an error.
  void LivelyFetched(PeerId peer, MemberId member, const Outcome& outcome = {},
                     uint64_t bytes = 100, std::vector<MemberId> corrupt = {}) {
    LivelyPeer::LocalMember& local = lively_.at(peer).members.at(member);
    const control::SyncResult& told = local.sync_results.back();
    LH_CHECK(told.action == control::SyncAction::kFetch);
    if (outcome.ok()) {
      local.sync->state = told.state;
      local.sync->revision = told.revision;
      local.sync->complete = true;
    }
    const control::FetchDone done{local.group,
                                  member,
                                  told.number,
                                  outcome,
                                  told.state,
                                  bytes,
                                  {told.sources.front().member},
                                  std::move(corrupt)};
    Tell(peer, done);
  }
  void LivelyLeave(PeerId peer, MemberId member) {
    LivelyPeer& lively = lively_.at(peer);
    const auto it = lively.members.find(member);
    if (it == lively.members.end() || it->second.leaving) return;
    it->second.leaving = true;
    Tell(peer, control::Leave{it->second.group, member, false, "bye"});
  }

  // ---- time, coordinator

  void Wait(int64_t ms) {
    const Tick end = now_ + Millis(ms);
    while (now_ < end) {
      if (crashed_) {
        now_ = end;
        return;
      }
      Tick next = std::min(end, next_heartbeat_);
      next = std::min(next, std::max(now_, core_->NextDeadline()));
      now_ = next;
      if (now_ >= next_heartbeat_) {
        next_heartbeat_ = now_ + Millis(detect_ms_) / 3;
        std::vector<PeerId> peers;
        for (const auto& [peer, session] : sessions_) peers.push_back(peer);
        for (PeerId peer : peers) {
          if (!hanging_.contains(peer) && HasStream(peer)) Tell(peer, control::Heartbeat{});
        }
      }
      if (core_->NextDeadline() <= now_) Step(TimePassed{});
      Run();
    }
  }
  // The coordinator's process does not run for `ms`.
  void Stall(int64_t ms) { now_ = now_ + Millis(ms); }
  void Pass() {
    Step(TimePassed{});
    Run();
  }
  void Evict(MemberId member) {
    Step(EvictMember{G(), member, "test"});
    Run();
  }
  void Drain(PeerId peer) {
    Step(DrainPeer{peer, "test"});
    Run();
  }
  // A connection comes from the peer's host, and no stream.
  void Knock(PeerId peer) {
    Step(PeerKnocked{peer});
    Run();
  }

  // Starts a new coordinator with what the store holds. All streams are gone.
  void Boot() {
    sessions_.clear();
    owners_.clear();
    inbox_.clear();
    tries_.clear();
    ring_orders_.clear();
    crashed_ = false;
    CoreConfig config;
    config.incarnation = "c" + std::to_string(++boots_);
    config.detect_ms = detect_ms_;
    config.ring_interval_ms = ring_interval_ms_;
    config.entropy = std::string(31, 'e') + static_cast<char>(boots_);
    core_ = std::make_unique<CoordinatorCore>(config, store_);
  }
  // Starts a new coordinator with a store that went back in time.
  void Restore(Records records) {
    store_ = std::move(records);
    Boot();
  }
  // The coordinator dies at a Persist; 1 is the next one. With `kept` it dies after the store has
  // the records and before any message leaves; otherwise before the store gets them.
  void CrashAt(int number, bool kept) {
    crash_at_ = number;
    crash_kept_ = kept;
  }
  bool crashed() const { return crashed_; }
  int persists() const { return persists_; }

  // Skips the checks after each step, for a test that only fills a group.
  void SetUnchecked(bool unchecked) { unchecked_ = unchecked; }

  // Solves the ring that the core asked for last, and gives the core the answer.
  void AnswerRing() {
    const RingOrdered answer = Solve(ring_orders_.back());
    Step(answer);
    Run();
  }

  // ---- view

  // All rings that the core asked for. The core waits for an answer before it asks again.
  const std::vector<OrderRing>& ring_orders() const { return ring_orders_; }
  CoordinatorCore& core() { return *core_; }
  const Records& store() const { return store_; }
  const GroupRecord& Stored(const GroupKey& key = G()) const { return store_.groups.at(key); }
  GroupView View(const GroupKey& key = G()) const {
    for (const GroupView& view : core_->GetOverview().groups) {
      if (view.group == key) return view;
    }
    return {};
  }
  // What the peer received since the last call, without Welcome and PendingCount.
  std::vector<std::string> Take(PeerId peer) { return std::exchange(received_[peer], {}); }
  void ForgetReceived() { received_.clear(); }
  const control::Welcome& Welcomed(PeerId peer) const { return welcomes_.at(peer); }
  // The last PrepareEpoch that the peer received.
  const control::PrepareEpoch& Prepared(PeerId peer) const { return prepared_.at(peer); }
  // The reason that the peer was given for the removal of its last removed member.
  const std::string& RemovedText(PeerId peer) const { return removed_.at(peer); }
  uint32_t pending_count(PeerId peer) const { return pending_.at(peer); }
  const std::vector<std::string>& closings() const { return closings_; }
  std::vector<std::string> Notices(const std::string& kind) const {
    std::vector<std::string> texts;
    for (const EventRecord& notice : notices_) {
      if (notice.kind == kind) texts.push_back(notice.text);
    }
    return texts;
  }
  uint64_t trace() const { return trace_; }
  Tick now() const { return now_; }

  // Lets lively peers answer until no message is left.
  void Run() {
    while ((!inbox_.empty() || !tries_.empty()) && !crashed_) {
      for (const auto& [peer, attempt] : std::exchange(tries_, {})) {
        Tell(peer, control::PeerTried{attempt.group, attempt.trial, attempt.peer.peer, ""});
      }
      if (inbox_.empty()) continue;
      auto [peer, session, message] = inbox_.front();
      inbox_.pop_front();
      const auto it = sessions_.find(peer);
      if (it == sessions_.end() || it->second != session || !lively_.contains(peer)) continue;
      React(peer, message);
    }
  }
  void Step(const Event& event) {
    if (crashed_) return;
    const std::vector<Action> actions = core_->Step(event, now_);
    if (!unchecked_) core_->CheckInvariants();
    if (!unchecked_) trace_ = (trace_ ^ core_->Digest()) * 0x100000001b3u;
    for (size_t i = 0; i < actions.size(); ++i) {
      if (const auto* persist = std::get_if<Persist>(&actions[i])) {
        LH_CHECK(i == 0) << "something was sent before Persist";
        LH_CHECK(!persist->mutations.empty());
        ++persists_;
        const bool crash = crash_at_ > 0 && --crash_at_ == 0;
        if (!crash || crash_kept_) {
          for (const Mutation& mutation : persist->mutations) Apply(mutation, &store_);
        }
        if (crash) {
          crashed_ = true;
          return;
        }
      } else if (const auto* send = std::get_if<ToPeer>(&actions[i])) {
        Receive(*send);
      } else if (const auto* close = std::get_if<CloseSession>(&actions[i])) {
        closings_.push_back(close->reason);
        const auto owner = owners_.find(close->session);
        if (owner == owners_.end()) continue;
        if (sessions_[owner->second] == close->session) sessions_.erase(owner->second);
        owners_.erase(close->session);
      } else if (const auto* order = std::get_if<OrderRing>(&actions[i])) {
        ring_orders_.push_back(*order);
      } else {
        notices_.push_back(std::get<Notice>(actions[i]).event);
      }
    }
  }

 private:
  struct Letter {
    PeerId peer;
    SessionId session;
    control::CoordinatorMessage message;
  };

  // An answer of a scripted peer names the last preparation that the peer received, unless the test
  // sets another one.
  template <class Answer>
  void NamePreparation(PeerId peer, Answer* answer) {
    const auto prepared = prepared_.find(peer);
    if (answer->preparation != 0 || prepared == prepared_.end()) return;
    if (prepared->second.epoch == answer->epoch) {
      answer->preparation = prepared->second.preparation;
    }
  }

  void SendVote(PeerId peer, MemberId member, const LivelyPeer::LocalMember& local) {
    control::Vote vote{local.group, member, local.votes + 1};
    if (local.sync_with_vote) vote.sync = local.sync;
    vote.ready = local.ready;
    Tell(peer, vote);
  }

  // As Say(), but without running the other peers. Used for the answers of lively peers.
  void Tell(PeerId peer, control::PeerMessage message) {
    const auto it = sessions_.find(peer);
    if (it == sessions_.end() || crashed_) return;
    Step(FromPeer{it->second, std::move(message)});
  }

  void Receive(const ToPeer& send) {
    const auto owner = owners_.find(send.session);
    LH_CHECK(owner != owners_.end()) << "sent to a closed session " << Describe(send.message);
    const PeerId peer = owner->second;
    if (const auto* prepare = std::get_if<control::PrepareEpoch>(&send.message)) {
      const GroupRecord& record = store_.groups.at(prepare->group);
      LH_CHECK(record.highest >= prepare->epoch) << "prepared before it was durable";
      prepared_[peer] = *prepare;
    }
    if (const auto* commit = std::get_if<control::CommitEpoch>(&send.message)) {
      const GroupRecord& record = store_.groups.at(commit->group);
      LH_CHECK(record.committed >= commit->epoch) << "committed before it was durable";
    }
    if (const auto* end = std::get_if<control::SyncResult>(&send.message)) {
      const bool committed = end->action == control::SyncAction::kEnd && end->outcome.ok();
      if (committed) {
        const auto& state = store_.groups.at(end->group).state;
        LH_CHECK(state && state->state == end->state && state->revision == end->revision)
            << "state committed before it was durable";
      }
    }
    if (const auto* removed = std::get_if<control::Removed>(&send.message)) {
      removed_[peer] = removed->reason;
    }
    if (const auto* count = std::get_if<control::PendingCount>(&send.message)) {
      pending_[peer] = count->count;
    } else if (const auto* welcome = std::get_if<control::Welcome>(&send.message)) {
      const control::Welcome& before = welcomes_[peer];
      LH_CHECK(store_.store == (StoreRecord{welcome->store, welcome->term}))
          << "a term that is not durable";
      LH_CHECK(liars_.contains(peer) || before.store != welcome->store ||
               before.term < welcome->term ||
               (before.term == welcome->term && before.coordinator == welcome->coordinator))
          << ToString(peer) << " was welcomed by a later start";
      welcomes_[peer] = *welcome;
    } else if (const auto* attempt = std::get_if<control::TryPeer>(&send.message)) {
      // Trials of scripted peers always succeed.
      if (!lively_.contains(peer)) tries_.push_back({peer, *attempt});
    } else {
      received_[peer].push_back(Describe(send.message));
    }
    inbox_.push_back({peer, send.session, send.message});
  }

  void React(PeerId peer, const control::CoordinatorMessage& message) {
    std::visit([&](const auto& m) { On(peer, lively_.at(peer), m); }, message);
  }
  void On(PeerId, LivelyPeer&, const control::Welcome&) {}
  void On(PeerId, LivelyPeer&, const control::PendingCount&) {}
  void On(PeerId peer, LivelyPeer& self, const control::TryPeer& m) {
    if (self.tries_nobody) return;
    const bool fails = !self.tries_well && self.cannot_reach.contains(m.peer.peer);
    const std::string reason = fails ? "no route to " + m.peer.endpoints.front() : "";
    Tell(peer, control::PeerTried{m.group, m.trial, m.peer.peer, reason});
  }
  void On(PeerId, LivelyPeer& self, const control::JoinPending& m) {
    if (self.joins.erase(m.request) > 0) self.members[m.member].group = m.group;
  }
  void On(PeerId, LivelyPeer& self, const control::JoinRefused& m) { self.joins.erase(m.request); }
  void On(PeerId peer, LivelyPeer& self, const control::VoteResult& m) {
    const auto it = self.members.find(m.member);
    if (it == self.members.end() || m.number <= it->second.votes) return;
    LH_CHECK(it->second.voting && m.number == it->second.votes + 1)
        << ToString(peer) << " " << Describe(m);
    LH_CHECK(m.epoch == self.groups[m.group].committed) << "result before its commit";
    it->second.voting = false;
    it->second.sync_with_vote = false;
    it->second.votes = m.number;
  }
  void On(PeerId peer, LivelyPeer& self, const control::SyncResult& m) {
    const auto it = self.members.find(m.member);
    if (it == self.members.end()) return;
    LivelyPeer::LocalMember& local = it->second;
    if (!local.sync || local.sync->number != m.number) {
      LH_CHECK(m.number <= local.syncs) << ToString(peer) << " " << Describe(m);
      return;
    }
    LH_CHECK(!local.sync_with_vote) << ToString(peer) << " " << Describe(m) << " before its vote";
    local.sync_results.push_back(m);
    if (m.action == control::SyncAction::kEnd) {
      if (m.outcome.ok()) LH_CHECK(local.sync->state == m.state) << Describe(m);
      local.sync.reset();
    } else if (m.action == control::SyncAction::kServe) {
      LH_CHECK(local.sync->state == m.state && local.sync->complete) << Describe(m);
    } else if (local.sync->state == m.state && local.sync->complete) {
      LivelyFetched(peer, m.member, {}, 0);
    } else {
      LH_CHECK(local.sync->strategy != control::SyncStrategy::kSend) << Describe(m);
      local.sync->complete = false;
      if (self.fetches) LivelyFetched(peer, m.member);
    }
  }
  void On(PeerId peer, LivelyPeer& self, const control::PrepareEpoch& m) {
    LivelyPeer::GroupAtPeer& group = self.groups[m.group];
    LH_CHECK(m.epoch > group.committed) << ToString(peer) << " " << Describe(m);
    LH_CHECK(!group.frozen || m.freeze) << ToString(peer) << " was frozen";
    for (const control::MemberInfo& member : m.members) {
      // A peer that has only newcomers may have been in the group long ago, so it is not checked.
      if (member.peer != peer || member.joined == m.epoch) continue;
      LH_CHECK(m.base == group.committed) << ToString(peer) << " did not hear of a commit";
    }
    group.prepared = m;
    group.frozen = m.freeze && group.committed;  // a newcomer has nothing to freeze
    if (self.mute) return;
    std::vector<control::Unreachable> unreachable;
    for (const control::PeerInfo& other : m.peers) {
      const PeerId relay = control::RelayOf(m.blocked, peer, other.peer);
      if (relay ? self.cannot_reach.contains(relay) || self.no_way_through.contains(relay)
                : self.cannot_reach.contains(other.peer)) {
        unreachable.push_back({other.peer, "no route to " + other.endpoints.front()});
      }
    }
    if (!unreachable.empty() && self.patient) return;
    if (!unreachable.empty()) {
      Tell(peer, control::EpochFailed{m.group, m.epoch, unreachable, m.preparation});
      return;
    }
    Tell(peer, control::EpochReady{m.group, m.epoch,
                                   m.freeze ? group.ops : std::vector<control::OpReport>{},
                                   m.preparation});
  }
  void On(PeerId peer, LivelyPeer& self, const control::CommitEpoch& m) {
    LivelyPeer::GroupAtPeer& group = self.groups[m.group];
    if (m.epoch == group.committed) return;
    LH_CHECK(group.prepared && group.prepared->epoch == m.epoch)
        << ToString(peer) << " did not prepare " << Describe(m);
    LH_CHECK(m.fates.size() == (group.frozen ? group.ops.size() : 0)) << Describe(m);
    for (const control::OpFate& fate : m.fates) group.fates[fate.ordinal] = fate.fate;
    if (group.frozen) group.ops.clear();
    group.frozen = false;
    group.committed = m.epoch;
    for (const control::MemberInfo& member : group.prepared->members) {
      if (member.peer == peer) self.members.at(member.member).admitted = true;
    }
    group.prepared.reset();
  }
  void On(PeerId, LivelyPeer& self, const control::AbortEpoch& m) {
    LivelyPeer::GroupAtPeer& group = self.groups[m.group];
    if (!group.prepared || group.prepared->epoch != m.epoch) return;
    LH_CHECK(!group.frozen) << "a freeze was given up";
    group.prepared.reset();
  }
  void On(PeerId, LivelyPeer& self, const control::Removed& m) {
    const auto it = self.members.find(m.member);
    if (it == self.members.end()) return;
    const bool admitted = it->second.admitted;
    self.members.erase(it);
    if (!admitted) return;
    for (const auto& [id, member] : self.members) {
      if (member.group == m.group && member.admitted) return;
    }
    // The peer has no member of the epoch any more, so its ops and its freeze end.
    self.groups.erase(m.group);
  }
  void On(PeerId, LivelyPeer&, const control::Drain&) {}
  void On(PeerId, LivelyPeer& self, const control::StateAgreed& m) {
    const auto& state = store_.groups.at(m.group).state;
    LH_CHECK(state && state->state == m.state && state->revision == m.revision)
        << "state told before it was durable";
    self.agreed = m;
  }

  uint32_t detect_ms_;
  uint32_t ring_interval_ms_;
  int boots_ = 0;
  Tick now_{Seconds(100)};
  Tick next_heartbeat_{0};
  std::unique_ptr<CoordinatorCore> core_;
  Records store_;
  uint64_t last_session_ = 0;
  std::map<PeerId, SessionId> sessions_;
  std::map<SessionId, PeerId> owners_;
  std::set<PeerId> liars_;
  std::map<PeerId, PeerId> addresses_;
  std::set<PeerId> hanging_;
  std::map<PeerId, LivelyPeer> lively_;
  std::deque<Letter> inbox_;
  std::map<PeerId, std::vector<std::string>> received_;
  std::map<PeerId, control::PrepareEpoch> prepared_;
  std::map<PeerId, control::Welcome> welcomes_;
  std::map<PeerId, uint32_t> pending_;
  std::vector<std::pair<PeerId, control::TryPeer>>
      tries_;  // trials of scripted peers without an answer
  std::map<PeerId, std::string> removed_;
  std::vector<std::string> closings_;
  std::vector<EventRecord> notices_;
  std::vector<OrderRing> ring_orders_;
  uint64_t trace_ = 0;
  int persists_ = 0;
  int crash_at_ = 0;
  bool crash_kept_ = false;
  bool crashed_ = false;
  bool unchecked_ = false;
};

// ---- messages as text

struct Describer {
  static std::string FateText(control::Fate fate) {
    return fate == control::Fate::kCommit ? "commit"
           : fate == control::Fate::kRedo ? "redo"
                                          : "abort";
  }
  std::string operator()(const control::Welcome&) const { return "Welcome"; }
  std::string operator()(const control::JoinPending& m) const {
    return "JoinPending " + std::to_string(m.request) + " " + ToString(m.member) +
           (m.present.empty() ? "" : " " + m.present);
  }
  std::string operator()(const control::JoinRefused& m) const {
    return "JoinRefused " + std::to_string(m.request) + " " + m.outcome.text;
  }
  std::string operator()(const control::VoteResult& m) const {
    return "VoteResult " + ToString(m.member) + " number=" + std::to_string(m.number) +
           " epoch=" + ToString(m.epoch);
  }
  std::string operator()(const control::PrepareEpoch& m) const {
    std::string members;
    for (const control::MemberInfo& member : m.members) {
      if (!members.empty()) members += ",";
      members += ToString(member.member) + "@" + ToString(member.joined);
      if (member.background_until == control::kInBackground) {
        members += "-";
      } else if (member.background_until) {
        members += "+" + ToString(member.background_until);
      }
    }
    std::string ring;
    for (const control::PeerInfo& peer : m.peers) {
      ring += (ring.empty() ? "" : ",") + ToString(peer.peer);
    }
    std::string blocked;
    for (const auto& [a, b, relay] : m.blocked) {
      blocked += (blocked.empty() ? " blocked=" : ",") + ToString(a) + "-" + ToString(b) +
                 " through " + ToString(relay);
    }
    return "Prepare " + ToString(m.epoch) + " base=" + ToString(m.base) +
           " boundary=" + ToString(m.boundary) + " last_freeze=" + ToString(m.last_freeze) +
           (m.freeze ? " freeze" : "") + " members=" + members + " ring=" + ring + blocked;
  }
  std::string operator()(const control::CommitEpoch& m) const {
    std::string text = "Commit " + ToString(m.epoch);
    for (const control::OpFate& fate : m.fates) {
      text += " " + ToString(fate.ordinal) + "=" + FateText(fate.fate);
    }
    for (const control::MissedOp& op : m.missed) {
      text += " missed=" + ToString(op.boundary) + "/" + std::to_string(op.tag) +
              (op.set == 0 ? "" : "/" + std::to_string(op.set));
    }
    return text;
  }
  std::string operator()(const control::AbortEpoch& m) const {
    return "Abort " + ToString(m.epoch);
  }
  std::string operator()(const control::Removed& m) const {
    static const char* const kWhy[] = {"", "left", "died", "evicted", "unreachable", "unknown"};
    return "Removed " + ToString(m.member) + " " + kWhy[static_cast<int>(m.why)];
  }
  std::string operator()(const control::PendingCount& m) const {
    return "Pending " + std::to_string(m.count);
  }
  std::string operator()(const control::Drain&) const { return "Drain"; }
  std::string operator()(const control::TryPeer& m) const { return "Try " + ToString(m.peer.peer); }
  std::string operator()(const control::StateAgreed& m) const {
    return "Agreed revision=" + std::to_string(m.revision) +
           " state=" + std::to_string(m.state.high);
  }
  std::string operator()(const control::SyncResult& m) const {
    static const char* const kActions[] = {"", "end", "serve", "fetch"};
    std::string sources;
    for (const control::SyncSource& source : m.sources) {
      sources += (sources.empty() ? " sources=" : ",") + ToString(source.member);
    }
    const std::string state =
        m.outcome.ok()
            ? " revision=" + std::to_string(m.revision) + " state=" + std::to_string(m.state.high)
            : " code=" + std::to_string(static_cast<int>(m.outcome.code));
    return "Sync " + ToString(m.member) + " " + std::to_string(m.number) + " " +
           kActions[static_cast<int>(m.action)] + state + sources;
  }
};

inline std::string Describe(const control::CoordinatorMessage& message) {
  return std::visit(Describer{}, message);
}

}  // namespace longhaul::coordinator
