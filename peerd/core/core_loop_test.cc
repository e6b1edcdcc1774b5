// Several cores together, messages in random order, faults at random times.
//
// The coordinator here is a page long: it admits whoever waits when all have voted, and answers
// every death and lost link by a freezing epoch. It judges as docs/life_of_an_op.md says. Bytes are
// modelled: an attempt may complete once every participant of it has started, and its result is the
// set of inputs behind it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "base/prng.h"
#include "peerd/core/peer_core.h"
#include "peerd/core/testing.h"

namespace longhaul::peerd {
namespace {

using control::Fate;

// What one op added up: each participant peer, under its own name of the op.
using Result = std::map<PeerId, OpOrdinal>;

struct Plan {
  uint64_t seed = 1;
  int peers = 3;
  int members_per_peer = 1;
  int late_peers = 0;  // join while the others run
  int rounds = 4;
  int tags = 3;
  int crashes = 0;
  int trainer_deaths = 0;
  int evictions = 0;
  int link_breaks = 0;
  int stream_breaks = 0;
  double abort_share = 0;         // of ops
  bool straddle = false;          // one op a round may be in flight over the step boundary
  control::BlockedPairs blocked;  // peers that never get a link
};

class Loop {
 public:
  explicit Loop(const Plan& plan) : plan_(plan), random_(plan.seed) {
    for (int i = 0; i < plan.peers + plan.late_peers; ++i) {
      const PeerId id(static_cast<uint64_t>(i) + 1);
      CoreConfig config;
      config.peer = id;
      config.endpoints = {"h:1"};
      auto host = std::make_unique<Host>();
      host->id = id;
      host->core = std::make_unique<PeerCore>(config);
      hosts_.emplace(id, std::move(host));
    }
  }

  void Run() {
    for (auto& [id, host] : hosts_) {
      if (id.value() <= static_cast<uint64_t>(plan_.peers)) Enter(*host);
    }
    for (int steps = 0; !testing::Test::HasFailure(); ++steps) {
      ASSERT_LT(steps, 400000) << "no end in sight, " << Describe();
      // Admissions are short, and what happens meanwhile is worth more than its share.
      const bool admitting = preparation_ && !preparation_->freeze && highest_ > 1;
      if (steps > 40 && random_.Chance(admitting ? 0.1 : 0.01)) Fault();
      if (TakeStep()) continue;
      if (AllFinished()) break;
      ASSERT_LT(++idle_, 2000) << "stuck, " << Describe();
      now_ = now_ + Millis(100);
      for (auto& [id, host] : hosts_) {
        if (host->alive && !host->trainers.empty()) Give(*host, TimePassed{});
      }
    }
    Finally();
  }

  uint64_t Digest() const { return digest_; }
  uint64_t retries() const { return retries_; }
  uint64_t settled() const { return results_.size(); }
  uint64_t aborted() const { return aborted_; }
  uint64_t relayed() const { return relayed_; }

 private:
  struct Trainer {
    LocalId local;
    bool admitted = false;
    bool gone = false;  // ended
    bool dead = false;  // killed
    uint64_t round = 0;
    std::map<uint64_t, uint64_t> open;  // tag by call
    std::vector<uint64_t> to_post;      // tags of this round
    bool stepping = false;
    bool leaving = false;
  };
  struct Mail {
    Event event;
    PeerId forward;  // to be passed on to this peer; 0: it has arrived
  };
  struct RunState {
    Epoch attempt;
    std::vector<PeerId> peers;
    Result result;  // grows with credits
    uint32_t members = 0;
    bool eager = false;
    bool complete = false;
    Epoch counted;  // the attempt that the inputs are from
  };
  struct Host {
    PeerId id;
    std::unique_ptr<PeerCore> core;
    bool alive = true;
    bool attached = false;
    std::deque<control::CoordinatorMessage> inbox;
    std::map<PeerId, std::deque<Mail>> link;  // from each peer: up, frames, down, in order
    std::deque<Event> stopped;
    std::map<LocalId, Trainer> trainers;
    std::map<OpOrdinal, RunState> runs;
    // What the op of this ordinal was, for the whole life of the host: (round, tag) of its posts.
    std::map<OpOrdinal, std::set<std::pair<uint64_t, uint64_t>>> meaning;
    std::map<OpOrdinal, RunState> finishing;  // committed, and not answered
    std::optional<RunState> finished;         // of the AttemptFinished that was just told
  };
  struct Link {
    bool stands = false;
    std::set<PeerId> open;  // ends that have not seen it go
    std::set<PeerId> wants;
  };

  // ---------------------------------------------------------------- trainers

  void Enter(Host& host) {
    host.attached = true;
    Give(host, CoordinatorUp{});
    for (int i = 0; i < plan_.members_per_peer; ++i) {
      Trainer trainer;
      trainer.local = LocalId(++next_local_);
      host.trainers.emplace(trainer.local, trainer);
      Give(host, LocalJoin{trainer.local, kGroup, "t"});
    }
  }

  // The same ops at every member: a function of round and tag.
  OpDesc DescOf(uint64_t round, uint64_t tag) const {
    uint64_t state = round * 1000 + tag + plan_.seed * 77;
    const uint64_t roll = SplitMix64(&state);
    OpDesc desc = roll % 2 == 0 ? Small() : Large();
    // One that ends aborted is posted again, which is too late after the boundary.
    if (tag < kStraddling && static_cast<double>(roll >> 11) * 0x1p-53 < plan_.abort_share) {
      desc.on_fault = OnFault::kAbort;
    }
    return desc;
  }

  void BeginRound(Trainer& trainer) {
    trainer.to_post.clear();
    for (int tag = 0; tag < plan_.tags; ++tag) trainer.to_post.push_back(tag);
    if (plan_.straddle) trainer.to_post.push_back(kStraddling + trainer.round);
    for (size_t i = trainer.to_post.size(); i > 1; --i) {
      std::swap(trainer.to_post[i - 1], trainer.to_post[random_.Below(i)]);
    }
  }

  static constexpr uint64_t kStraddling = 1000;

  bool CanAct(const Trainer& trainer) const {
    if (!trainer.admitted || trainer.gone || trainer.dead || trainer.stepping || trainer.leaving) {
      return false;
    }
    if (!trainer.to_post.empty()) return true;
    // An op that straddles a boundary ends before the next one.
    for (const auto& [call, tag] : trainer.open) {
      if (tag != kStraddling + trainer.round) return false;
    }
    return true;
  }

  void Act(Host& host, Trainer& trainer) {
    if (!trainer.to_post.empty()) {
      const uint64_t tag = trainer.to_post.back();
      trainer.to_post.pop_back();
      const uint64_t call = ++next_call_;
      trainer.open.emplace(call, tag);
      posts_[{trainer.local, call}] = {trainer.round, tag};
      Give(host, LocalPost{{trainer.local, call}, tag, DescOf(trainer.round, tag)});
      return;
    }
    if (trainer.round >= static_cast<uint64_t>(plan_.rounds)) {
      trainer.leaving = true;
      Give(host, LocalLeave{trainer.local});
      return;
    }
    trainer.stepping = true;
    Give(host, LocalStep{trainer.local});
  }

  // ---------------------------------------------------------------- driver

  void Give(Host& host, const Event& event) {
    now_ = now_ + 10;
    host.finished.reset();
    if (const auto* const finished = std::get_if<AttemptFinished>(&event)) {
      host.finished = host.finishing.extract(finished->ordinal).mapped();
    }
    std::vector<Action> actions = host.core->Step(event, now_);
    host.core->CheckInvariants();
    digest_ = digest_ * 31 + host.core->Digest();
    for (const Action& action : actions) {
      std::visit([&](const auto& a) { Carry(host, a); }, action);
    }
  }

  Link& LinkOf(PeerId a, PeerId b) { return links_[{std::min(a, b), std::max(a, b)}]; }

  void Carry(Host& host, const ToCoordinator& a) {
    ASSERT_TRUE(host.attached);
    coordinator_inbox_.emplace_back(host.id, a.message);
  }
  void Carry(Host& host, const JoinDone& a) {
    Trainer& trainer = host.trainers.at(a.local);
    if (!a.outcome.ok()) {
      trainer.gone = true;
      return;
    }
    ASSERT_FALSE(trainer.admitted);
    trainer.admitted = true;
    trainer.round = round_of_epoch_.at(a.world.epoch);
    BeginRound(trainer);
  }
  void Carry(Host& host, const StepDone& a) {
    Trainer& trainer = host.trainers.at(a.local);
    ASSERT_TRUE(trainer.stepping);
    trainer.stepping = false;
    if (!a.outcome.ok()) return;
    ++trainer.round;
    BeginRound(trainer);
  }
  void Carry(Host& host, const LeaveDone& a) {
    ASSERT_TRUE(a.outcome.ok());
    ASSERT_TRUE(host.trainers.at(a.local).leaving);
  }
  void Carry(Host& host, const PostDone& a) {
    Trainer& trainer = host.trainers.at(a.post.local);
    const auto open = trainer.open.find(a.post.call);
    ASSERT_TRUE(open != trainer.open.end()) << "answered twice";
    const uint64_t tag = open->second;
    trainer.open.erase(open);
    retries_ += a.info.retries;
    if (a.outcome.code == Code::kAborted) {
      ++aborted_;
      trainer.to_post.push_back(tag);
      return;
    }
    if (!a.outcome.ok()) {
      ASSERT_EQ(a.outcome.code, Code::kEvicted) << a.outcome.text;
      return;
    }
    ASSERT_TRUE(host.finished.has_value());
    const Result& result = host.finished->result;
    const std::pair<uint64_t, uint64_t> op = posts_.at(a.post);
    size_t inputs = 0;
    for (const auto& [peer, ordinal] : result) {
      ASSERT_EQ(hosts_.at(peer)->meaning.at(ordinal), (std::set{op})) << "ops were mixed";
      inputs += inputs_.at({peer, ordinal, host.finished->counted});
    }
    ASSERT_EQ(a.info.size, inputs);
    ASSERT_EQ(a.info.size, host.finished->members);
    CheckResult(host, a.post.local, op, result);
  }
  // A small op may end otherwise where nobody is left who has its first result.
  void CheckResult(const Host& host, LocalId local, const std::pair<uint64_t, uint64_t>& op,
                   const Result& result) {
    Ended& ended = results_[op];
    if (ended.result != result && ended.eager) {
      for (const auto& [peer, holder] : ended.holders) {
        const Host& other = *hosts_.at(peer);
        ASSERT_FALSE(other.alive && Survives(other.trainers.at(holder)))
            << "two results of one op, " << Describe();
      }
      ended = {};
    }
    if (ended.holders.empty()) {
      ended.result = result;
      ended.eager = host.finished->eager;
    }
    ASSERT_EQ(ended.result, result) << "two results of one op, " << Describe();
    ended.holders.emplace_back(host.id, local);
  }
  static bool Survives(const Trainer& trainer) { return !trainer.gone && !trainer.dead; }
  void Carry(Host& host, const WorldChanged& a) { ASSERT_TRUE(host.trainers.at(a.local).admitted); }
  void Carry(Host& host, const MemberGone& a) {
    Trainer& trainer = host.trainers.at(a.local);
    ASSERT_FALSE(trainer.gone);
    ASSERT_TRUE(trainer.open.empty() && !trainer.stepping) << "open requests at the end";
    trainer.gone = true;
  }
  void Carry(Host& host, const OpenLinks& a) {
    for (const LinkWanted& want : a.links) {
      Link& link = LinkOf(host.id, want.peer.peer);
      if (link.stands) {
        host.link[want.peer.peer].push_back({LinkUp{a.group.run, want.peer.peer}, {}});
      } else {
        link.wants.insert(host.id);
      }
    }
  }
  void Carry(Host& host, const KeepLinks& a) {
    for (auto& [pair, link] : links_) {
      const auto& [x, y] = pair;
      if (x != host.id && y != host.id) continue;
      const PeerId other = x == host.id ? y : x;
      if (std::find(a.peers.begin(), a.peers.end(), other) != a.peers.end()) continue;
      link.wants.erase(host.id);
      host.link[other].clear();
      link.open.erase(host.id);
      // Closed in order: what was sent arrives before the other side sees the end.
      if (link.stands) {
        hosts_.at(other)->link[host.id].push_back({LinkDown{a.group.run, host.id, "closed"}, {}});
      }
      link.stands = false;
    }
  }
  void SendFrame(Host& host, PeerId to, PeerId via, Event event) {
    ASSERT_EQ(via != to, Blocked(host.id, to));
    if (!LinkOf(host.id, via).stands) return;
    hosts_.at(via)->link[host.id].push_back({std::move(event), via == to ? PeerId() : to});
  }
  // As the driver of the relay and of the destination: nothing that is sent here breaks the rules.
  static bool MayCarry(const Host& host, const Event& event, PeerId origin, PeerId relay,
                       PeerId destination) {
    const auto* const ready = std::get_if<PeerReady>(&event);
    const Epoch attempt = ready != nullptr ? ready->attempt : std::get<PeerDone>(event).attempt;
    const RelayCheck check = host.core->CheckRelay({kGroup, origin, relay, destination, attempt});
    EXPECT_NE(check, RelayCheck::kRefuse)
        << ToString(host.id) << " of " << ToString(origin) << " to " << ToString(destination)
        << " through " << ToString(relay) << " in attempt " << ToString(attempt);
    return check == RelayCheck::kTake;
  }
  static bool Relayed(const Event& event) {
    const auto* const ready = std::get_if<PeerReady>(&event);
    const auto* const done = std::get_if<PeerDone>(&event);
    return (ready != nullptr && ready->via) || (done != nullptr && done->via);
  }
  static bool MayTake(const Host& host, const Event& event, PeerId relay) {
    const auto* const ready = std::get_if<PeerReady>(&event);
    const PeerId origin = ready != nullptr ? ready->peer : std::get<PeerDone>(event).peer;
    return MayCarry(host, event, origin, relay, host.id);
  }
  void PassOn(Host& relay, PeerId from, Mail mail) {
    if (!MayCarry(relay, mail.event, from, relay.id, mail.forward)) return;
    if (!LinkOf(relay.id, mail.forward).stands) return;
    ++relayed_;
    if (auto* const ready = std::get_if<PeerReady>(&mail.event)) ready->via = relay.id;
    if (auto* const done = std::get_if<PeerDone>(&mail.event)) done->via = relay.id;
    hosts_.at(mail.forward)->link[relay.id].push_back({std::move(mail.event), {}});
  }
  bool Blocked(PeerId a, PeerId b) const { return control::IsBlocked(plan_.blocked, a, b); }
  // An eager payload says whose input it is, under which name.
  static std::string PayloadOf(OpOrdinal ordinal) {
    std::string payload = std::to_string(ordinal.value());
    return payload + std::string(Small().bytes() - payload.size(), ' ');
  }
  void Carry(Host& host, const SendReady& a) {
    for (const PostRef& post : a.posts) host.meaning[a.ordinal].insert(posts_.at(post));
    SendFrame(host, a.to, a.via,
              PeerReady{a.group, host.id, a.ordinal, a.attempt, a.boundary, a.tag, a.desc,
                        a.local_mismatch, a.eager ? PayloadOf(a.ordinal) : "", PeerId(), a.result});
    inputs_[{host.id, a.ordinal, a.attempt}] = a.posts.size();
  }
  void Carry(Host& host, const SendDone& a) {
    SendFrame(host, a.to, a.via, PeerDone{a.group, host.id, a.ordinal, a.attempt, a.refused});
  }
  void Carry(Host& host, const StartAttempt& a) {
    for (const PostRef& post : a.posts) host.meaning[a.ordinal].insert(posts_.at(post));
    inputs_[{host.id, a.ordinal, a.attempt}] = a.posts.size();
    ASSERT_FALSE(host.runs.contains(a.ordinal));
    RunState run;
    run.attempt = a.attempt;
    run.peers = a.ring;
    run.members = a.members;
    run.eager = a.algorithm == Algorithm::kOneShot;
    run.result[host.id] = a.ordinal;
    for (size_t i = 0; i < a.payloads.size(); ++i) {
      if (a.ring[i] == host.id) continue;
      run.result[a.ring[i]] = OpOrdinal(std::strtoull(a.payloads[i].c_str(), nullptr, 10));
    }
    run.counted = a.attempt;
    if (a.result) {
      const RunState& known = shots_.at(std::strtoull(a.result->c_str(), nullptr, 10));
      run.result = known.result;
      run.members = known.members;
      run.counted = known.counted;
    }
    host.runs.emplace(a.ordinal, run);
    rings_.emplace(std::tuple(posts_.at(a.posts[0]), a.attempt), a.ring);
    ASSERT_EQ(rings_.at({posts_.at(a.posts[0]), a.attempt}), a.ring) << "rings differ";
  }
  void Carry(Host& host, const CreditAttempt& a) {
    RunState& run = host.runs.at(a.ordinal);
    ASSERT_EQ(run.attempt, a.attempt);
    run.result[a.peer] = a.theirs;
  }
  void Carry(Host& host, const StopAttempt& a) {
    ASSERT_EQ(host.runs.at(a.ordinal).attempt, a.attempt);
    host.runs.erase(a.ordinal);
    host.stopped.push_back(AttemptStopped{a.group, a.ordinal, a.attempt});
  }
  void Carry(Host& host, const FinishAttempt& a) {
    const auto it = host.runs.find(a.ordinal);
    if (!a.commit) {
      ASSERT_TRUE(it == host.runs.end());
      return;
    }
    ASSERT_TRUE(it != host.runs.end() && it->second.complete);
    host.finishing.emplace(a.ordinal, it->second);
    host.runs.erase(it);
    host.stopped.push_back(AttemptFinished{a.group, a.ordinal});
  }
  // Trainers here have no state.
  void Carry(Host&, const SyncEnded&) { FAIL(); }
  void Carry(Host&, const TakeDone&) { FAIL(); }
  void Carry(Host&, const ServeState&) { FAIL(); }
  void Carry(Host&, const EndServe&) { FAIL(); }
  void Carry(Host&, const StartTransfer&) { FAIL(); }
  void Carry(Host&, const ChangeSources&) { FAIL(); }
  void Carry(Host&, const StopTransfer&) { FAIL(); }
  void Carry(Host&, const CompareManifest&) { FAIL(); }
  void Carry(Host&, const FaultOver& a) { ASSERT_GE(a.agree_us, 0); }
  void Carry(Host&, const Drained&) { FAIL(); }
  void Carry(Host&, const LogLine& a) { last_log_ = a.text; }
  void Carry(Host&, const BreakLink& a) { FAIL() << "protocol broken: " << a.reason; }
  void Carry(Host&, const RefuseCoordinator& a) { FAIL() << "refused: " << a.reason; }

  // Bytes flow over links that stand, between attempts that run.
  bool CanComplete(const Host& host, const RunState& run) {
    if (run.complete) return false;
    if (run.eager) return true;
    for (const PeerId peer : run.peers) {
      const auto it = run.result.find(peer);
      if (it == run.result.end()) return false;
      if (peer == host.id) continue;
      const Host& other = *hosts_.at(peer);
      const auto theirs = other.runs.find(it->second);
      if (!other.alive || theirs == other.runs.end() || theirs->second.attempt != run.attempt) {
        return false;
      }
      if (!Blocked(peer, host.id) && !LinkOf(peer, host.id).stands) return false;
    }
    return true;
  }

  // ---------------------------------------------------------------- coordinator

  struct Member {
    PeerId peer;
    uint64_t request = 0;
    Epoch joined;
    uint64_t votes = 0;  // answered
    std::optional<uint64_t> vote;
  };

  void ToPeer(PeerId peer, control::CoordinatorMessage message) {
    Host& host = *hosts_.at(peer);
    if (host.alive && host.attached) host.inbox.push_back(std::move(message));
  }

  void Hear(PeerId from, const control::PeerMessage& message) {
    std::visit([&](const auto& m) { Handle(from, m); }, message);
    Advance();
  }
  void Handle(PeerId, const control::LinkReport&) {}  // the core sends none
  void Handle(PeerId from, const control::Hello& m) {
    Epoch committed;
    std::set<MemberId> named;
    for (const control::GroupState& state : m.groups) {
      committed = state.committed;
      named.insert(state.members.begin(), state.members.end());
    }
    for (const MemberId member : named) {
      if (!members_.contains(member)) {
        ToPeer(from, control::Removed{kGroup, member, control::Removal::kUnknown, ""});
      }
    }
    std::vector<MemberId> unnamed;
    for (const auto& [id, member] : members_) {
      if (member.peer == from && !named.contains(id)) unnamed.push_back(id);
    }
    for (const MemberId id : unnamed) Remove(id, control::Removal::kDied);
    if (committed < committed_.epoch && InForce(from)) {
      ToPeer(from, control::CommitEpoch{kGroup, committed_.epoch, fates_[from]});
    }
    if (preparation_ && answers_.contains(from)) ToPeer(from, *preparation_);
  }
  void Handle(PeerId from, const control::Join& m) {
    for (const auto& [id, member] : members_) {
      if (member.peer == from && member.request == m.request) {
        ToPeer(from, control::JoinPending{m.request, kGroup, id});
        return;
      }
    }
    const MemberId id(++next_member_);
    members_[id] = Member{from, m.request, Epoch(), 0, std::nullopt};
    ToPeer(from, control::JoinPending{m.request, kGroup, id});
  }
  void Handle(PeerId from, const control::Leave& m) {
    if (!members_.contains(m.member)) {
      ToPeer(from, control::Removed{kGroup, m.member, control::Removal::kLeft, ""});
      return;
    }
    Remove(m.member, m.died ? control::Removal::kDied : control::Removal::kLeft);
  }
  void Handle(PeerId from, const control::Vote& m) {
    const auto it = members_.find(m.member);
    if (it == members_.end()) return;
    if (m.number <= it->second.votes) {
      ToPeer(from, control::VoteResult{kGroup, m.member, m.number, committed_.epoch});
      return;
    }
    it->second.vote = m.number;
  }
  void Handle(PeerId from, const control::EpochReady& m) {
    if (!preparation_ || preparation_->epoch != m.epoch || !answers_.contains(from)) return;
    answers_[from] = m.ops;
  }
  void Handle(PeerId, const control::EpochFailed& m) {
    if (preparation_ && preparation_->epoch == m.epoch) repair_ = true;
  }
  void Handle(PeerId, const control::LinkLost& m) {
    const Epoch newest = preparation_ ? preparation_->epoch : committed_.epoch;
    if (m.epoch >= newest) repair_ = true;
  }
  void Handle(PeerId, const control::Heartbeat&) {}
  void Handle(PeerId, const control::Draining&) {}
  void Handle(PeerId, const control::SyncVote&) { FAIL(); }
  void Handle(PeerId, const control::SyncDone&) { FAIL(); }

  bool InForce(PeerId peer) const {
    for (const auto& member : committed_.members) {
      if (member.peer == peer) return true;
    }
    return false;
  }
  void Remove(MemberId id, control::Removal why) {
    const Member member = members_.at(id);
    members_.erase(id);
    ToPeer(member.peer, control::Removed{kGroup, id, why, ""});
    if (member.joined) repair_ = true;
    if (preparation_) {
      for (const auto& info : preparation_->members) repair_ = repair_ || info.member == id;
    }
  }

  // False: there was no way around a blocked pair, and the newer peer of one was removed for it.
  bool Routable(bool admit) {
    std::vector<PeerId> order;
    for (const auto& [id, member] : members_) {
      if (!member.joined && !admit) continue;
      if (std::find(order.begin(), order.end(), member.peer) == order.end()) {
        order.push_back(member.peer);
      }
    }
    control::BlockedPairs blocked;
    for (const auto& [a, b] : plan_.blocked) {
      if (std::count(order.begin(), order.end(), a) != 0 &&
          std::count(order.begin(), order.end(), b) != 0) {
        blocked.push_back({a, b});
      }
    }
    const auto ring = control::RingAvoiding(order, blocked);
    if (ring && control::RingFault(*ring, blocked).empty()) return true;
    std::vector<MemberId> victims;
    for (const auto& [id, member] : members_) {
      if (member.peer == blocked.back().b) victims.push_back(id);
    }
    for (const MemberId id : victims) Remove(id, control::Removal::kUnreachable);
    return false;
  }

  void Prepare(bool admit, bool freeze) {
    control::PrepareEpoch message;
    message.group = kGroup;
    message.epoch = Epoch(++highest_);
    message.base = committed_.epoch;
    message.freeze = freeze;
    message.attempt = freeze ? message.epoch : committed_.attempt;
    message.boundary = committed_.boundary;
    message.cause = "change";
    std::set<PeerId> peers;
    while (!Routable(admit)) {
    }
    for (const auto& [id, member] : members_) {
      if (!member.joined && !admit) continue;
      if (!member.joined) message.boundary = message.epoch;
      message.members.push_back(
          {id, member.peer, member.joined ? member.joined : message.epoch, ""});
      if (peers.insert(member.peer).second) message.peers.push_back({member.peer, {"h:1"}, 0});
    }
    // Rings change between epochs.
    for (size_t i = message.peers.size(); i > 1; --i) {
      std::swap(message.peers[i - 1], message.peers[random_.Below(i)]);
    }
    for (const auto& [a, b] : plan_.blocked) {
      if (peers.contains(a) && peers.contains(b)) message.blocked.push_back({a, b});
    }
    std::vector<PeerId> order;
    for (const auto& info : message.peers) order.push_back(info.peer);
    const auto ring = control::RingAvoiding(order, message.blocked);
    for (size_t i = 0; i < message.peers.size(); ++i) message.peers[i].peer = (*ring)[i];
    repair_ = false;
    answers_.clear();
    preparation_.reset();
    if (message.peers.empty()) {
      committed_ = {};
      return;
    }
    for (const auto& info : message.peers) answers_[info.peer] = std::nullopt;
    preparation_ = message;
    for (const auto& info : message.peers) ToPeer(info.peer, message);
  }

  static std::map<PeerId, std::vector<control::OpFate>> Judge(
      const std::map<PeerId, std::optional<std::vector<control::OpReport>>>& answers) {
    std::map<PeerId, std::map<OpOrdinal, const control::OpReport*>> reports;
    for (const auto& [peer, ops] : answers) {
      reports[peer];
      for (const control::OpReport& op : *ops) reports[peer][op.ordinal] = &op;
    }
    std::map<PeerId, std::vector<control::OpFate>> fates;
    for (const auto& [peer, ops] : reports) {
      for (const auto& [ordinal, op] : ops) {
        bool commit = op->done;
        for (const control::OpMatch& match : op->matches) {
          const auto survivor = reports.find(match.peer);
          if (survivor == reports.end()) continue;
          const auto theirs = survivor->second.find(match.ordinal);
          if (theirs != survivor->second.end() && !theirs->second->done) commit = false;
        }
        fates[peer].push_back({ordinal, commit               ? Fate::kCommit
                                        : op->abort_on_fault ? Fate::kAbort
                                                             : Fate::kRedo});
      }
    }
    return fates;
  }

  void Advance() {
    const bool pending = std::any_of(members_.begin(), members_.end(),
                                     [](const auto& m) { return !m.second.joined; });
    const bool anybody = std::any_of(members_.begin(), members_.end(),
                                     [](const auto& m) { return bool(m.second.joined); });
    const bool voted = std::all_of(members_.begin(), members_.end(), [](const auto& m) {
      return !m.second.joined || m.second.vote.has_value();
    });
    if (repair_) {
      const bool freeze = committed_.epoch != Epoch() && anybody;
      Prepare(voted || !anybody, freeze);
    }
    if (preparation_) {
      for (const auto& [peer, answer] : answers_) {
        if (!answer) return;
      }
      Commit();
      return Advance();
    }
    const size_t first = static_cast<size_t>(plan_.peers) * plan_.members_per_peer;
    if (highest_ == 0 && members_.size() < first) return;
    if (pending && voted) return Prepare(true, false);
    if (anybody && voted) {
      ++rounds_;
      AnswerVotes();
    }
  }
  void Commit() {
    const control::PrepareEpoch message = *std::exchange(preparation_, std::nullopt);
    committed_ = message;
    fates_ = message.freeze ? Judge(answers_) : decltype(fates_)();
    bool admitted = false;
    for (const auto& info : message.members) {
      Member& member = members_.at(info.member);
      admitted = admitted || !member.joined;
      member.joined = info.joined;
    }
    if (admitted) ++rounds_;
    round_of_epoch_[message.epoch] = rounds_;
    for (const auto& info : message.peers) {
      ToPeer(info.peer, control::CommitEpoch{kGroup, message.epoch, fates_[info.peer]});
    }
    if (admitted) AnswerVotes();
  }
  void AnswerVotes() {
    for (auto& [id, member] : members_) {
      if (!member.vote) continue;
      member.votes = *std::exchange(member.vote, std::nullopt);
      ToPeer(member.peer, control::VoteResult{kGroup, id, member.votes, committed_.epoch});
    }
  }

  // ---------------------------------------------------------------- the world

  void Break(PeerId a, PeerId b) {
    Link& link = LinkOf(a, b);
    if (!link.stands) return;
    link.stands = false;
    for (const auto& [x, y] : {std::pair(a, b), std::pair(b, a)}) {
      std::deque<Mail>& events = hosts_.at(x)->link[y];
      // What was on the way is lost; the end shows when it shows.
      std::erase_if(events, [](const Mail& m) { return !std::holds_alternative<LinkUp>(m.event); });
      events.push_back({LinkDown{"run", y, "reset"}, {}});
    }
  }

  void CutStream(Host& host) {
    host.attached = false;
    host.inbox.clear();
    std::erase_if(coordinator_inbox_, [&](const auto& m) { return m.first == host.id; });
    Give(host, CoordinatorDown{});
  }

  void Fault() {
    std::vector<int*> left;
    for (int* kind : {&left_.crashes, &left_.trainer_deaths, &left_.link_breaks,
                      &left_.stream_breaks, &left_.late_peers, &left_.evictions}) {
      if (*kind > 0) left.push_back(kind);
    }
    std::vector<Host*> alive;
    for (auto& [id, host] : hosts_) {
      if (host->alive && !host->trainers.empty()) alive.push_back(host.get());
    }
    if (left.empty() || alive.empty()) return;
    int* const kind = left[random_.Below(left.size())];
    --*kind;
    Host& host = *alive[random_.Below(alive.size())];
    Host& other = *alive[random_.Below(alive.size())];
    if (kind == &left_.crashes) {
      if (alive.size() > 1) Crash(host);
    } else if (kind == &left_.trainer_deaths) {
      for (auto& [local, trainer] : host.trainers) {
        if (trainer.gone || trainer.dead) continue;
        trainer.dead = true;
        Give(host, LocalDied{local, "killed"});
        return;
      }
    } else if (kind == &left_.link_breaks) {
      if (other.id != host.id) Break(host.id, other.id);
    } else if (kind == &left_.evictions) {
      std::vector<MemberId> members;
      for (const auto& [id, member] : members_) members.push_back(id);
      if (members.size() < 2) return;
      Remove(members[random_.Below(members.size())], control::Removal::kEvicted);
      Advance();
    } else if (kind == &left_.stream_breaks) {
      if (host.attached) CutStream(host);
    } else {
      for (auto& [id, newcomer] : hosts_) {
        if (newcomer->trainers.empty()) return Enter(*newcomer);
      }
    }
  }

  void Crash(Host& host) {
    host.alive = false;
    host.inbox.clear();
    for (auto& [id, other] : hosts_) {
      if (id != host.id) Break(id, host.id);
    }
    coordinator_inbox_.emplace_back(host.id, std::nullopt);
  }

  void HearNext() {
    const auto [from, message] = coordinator_inbox_.front();
    coordinator_inbox_.pop_front();
    if (message) return Hear(from, *message);
    std::vector<MemberId> lost;
    for (const auto& [id, member] : members_) {
      if (member.peer == from) lost.push_back(id);
    }
    for (const MemberId id : lost) Remove(id, control::Removal::kDied);
    Advance();
  }

  template <class T>
  static T Pop(std::deque<T>* queue) {
    T front = std::move(queue->front());
    queue->pop_front();
    return front;
  }

  void OfferHost(Host* host, std::vector<std::function<void()>>* choices) {
    if (!host->attached) {
      choices->push_back([this, host] {
        host->attached = true;
        Give(*host, CoordinatorUp{});
      });
    }
    if (!host->inbox.empty()) {
      choices->push_back([this, host] { Give(*host, FromCoordinator{Pop(&host->inbox)}); });
    }
    for (auto& [peer, events] : host->link) {
      if (events.empty()) continue;
      choices->push_back([this, host, from = peer] {
        Mail mail = Pop(&host->link[from]);
        if (mail.forward) return PassOn(*host, from, std::move(mail));
        const Event& event = mail.event;
        if (Relayed(event) && !MayTake(*host, event, from)) return;
        if (std::holds_alternative<LinkDown>(event)) LinkOf(host->id, from).open.erase(host->id);
        Give(*host, event);
      });
    }
    if (!host->stopped.empty()) {
      choices->push_back([this, host] { Give(*host, Pop(&host->stopped)); });
    }
    for (auto& [local, trainer] : host->trainers) {
      if (CanAct(trainer)) choices->push_back([this, host, t = &trainer] { Act(*host, *t); });
    }
    for (auto& [ordinal, run] : host->runs) {
      if (!CanComplete(*host, run)) continue;
      choices->push_back([this, host, o = ordinal, r = &run] {
        r->complete = true;
        std::string result;
        if (r->eager) {
          result = PayloadOf(OpOrdinal(shots_.size()));
          shots_.push_back(*r);
        }
        Give(*host, AttemptComplete{kGroup, o, r->attempt, result});
      });
    }
  }

  void OfferLink(PeerId a, PeerId b, Link* link, std::vector<std::function<void()>>* choices) {
    Host* const x = hosts_.at(a).get();
    Host* const y = hosts_.at(b).get();
    if (link->wants.empty()) return;
    if (!x->alive || !y->alive) {
      choices->push_back([this, x, y, link] {
        link->wants.clear();
        if (x->alive) Give(*x, LinkDown{"run", y->id, "refused"});
        if (y->alive) Give(*y, LinkDown{"run", x->id, "refused"});
      });
    } else if (link->wants.size() == 2 && link->open.empty()) {
      choices->push_back([x, y, link] {
        link->wants.clear();
        link->stands = true;
        link->open = {x->id, y->id};
        x->link[y->id].push_back({LinkUp{"run", y->id}, {}});
        y->link[x->id].push_back({LinkUp{"run", x->id}, {}});
      });
    }
  }

  // One thing that can happen, chosen at random; false if nothing can.
  bool TakeStep() {
    std::vector<std::function<void()>> choices;
    if (!coordinator_inbox_.empty()) choices.push_back([this] { HearNext(); });
    for (auto& [id, host] : hosts_) {
      if (host->alive && !host->trainers.empty()) OfferHost(host.get(), &choices);
    }
    for (auto& [pair, link] : links_) OfferLink(pair.first, pair.second, &link, &choices);
    if (choices.empty()) return false;
    choices[random_.Below(choices.size())]();
    return true;
  }

  bool AllFinished() const {
    for (const auto& [id, host] : hosts_) {
      for (const auto& [local, trainer] : host->trainers) {
        if (host->alive && !trainer.gone) return false;
      }
    }
    return true;
  }

  void Finally() {
    for (const auto& [id, host] : hosts_) {
      if (!host->alive) continue;
      const PeerCore::Stats stats = host->core->GetStats();
      EXPECT_EQ(stats.frames_refused, 0u);
      EXPECT_EQ(stats.ops_open, 0u);
      EXPECT_EQ(stats.members, 0u);
      EXPECT_TRUE(host->runs.empty());
    }
  }

  std::string Describe() const {
    std::string text = "seed " + std::to_string(plan_.seed) + "\n";
    for (const auto& [id, host] : hosts_) {
      text += ToString(id) + (host->alive ? "" : " dead") + (host->attached ? "" : " detached") +
              " runs=" + std::to_string(host->runs.size()) +
              " open=" + std::to_string(host->core->GetStats().ops_open) + ":";
      for (const auto& [local, t] : host->trainers) {
        text += " t" + std::to_string(local.value()) + " round=" + std::to_string(t.round) +
                " open=" + std::to_string(t.open.size()) + (t.stepping ? " steps" : "") +
                (t.leaving ? " leaves" : "") + (t.dead ? " dead" : "") + (t.gone ? " gone" : "") +
                (t.admitted ? "" : " pending");
      }
      text += "\n";
    }
    text += "committed=" + ToString(committed_.epoch) +
            " preparing=" + (preparation_ ? ToString(preparation_->epoch) : "none");
    for (const auto& [peer, answer] : answers_) {
      if (preparation_ && !answer) text += " waits for " + ToString(peer);
    }
    return text + "\nlast log: " + last_log_ + "\n";
  }

  const Plan plan_;
  Plan left_ = plan_;  // faults
  Prng random_;
  Tick now_{1};
  std::map<PeerId, std::unique_ptr<Host>> hosts_;
  std::map<std::pair<PeerId, PeerId>, Link> links_;
  std::deque<std::pair<PeerId, std::optional<control::PeerMessage>>> coordinator_inbox_;
  std::map<std::tuple<PeerId, OpOrdinal, Epoch>, size_t> inputs_;
  std::map<PostRef, std::pair<uint64_t, uint64_t>> posts_;  // round and tag
  std::map<std::tuple<std::pair<uint64_t, uint64_t>, Epoch>, std::vector<PeerId>> rings_;
  struct Ended {
    Result result;
    bool eager = false;
    std::vector<std::pair<PeerId, LocalId>> holders;
  };
  std::map<std::pair<uint64_t, uint64_t>, Ended> results_;
  std::vector<RunState> shots_;  // results of one-shot attempts, told by their numbers

  std::map<MemberId, Member> members_;
  control::PrepareEpoch committed_;
  std::optional<control::PrepareEpoch> preparation_;
  std::map<PeerId, std::optional<std::vector<control::OpReport>>> answers_;
  std::map<PeerId, std::vector<control::OpFate>> fates_;
  bool repair_ = false;
  uint64_t highest_ = 0;
  uint64_t next_member_ = 0;
  uint64_t rounds_ = 0;  // boundaries passed
  std::map<Epoch, uint64_t> round_of_epoch_;

  uint64_t next_local_ = 0;
  uint64_t next_call_ = 0;
  int idle_ = 0;
  uint64_t aborted_ = 0;
  uint64_t relayed_ = 0;
  uint64_t retries_ = 0;
  uint64_t digest_ = 0;
  std::string last_log_;
};

// One failing seed is repeated with --gtest_filter and LONGHAUL_SEED; LONGHAUL_SEED_FACTOR tries
// more.
class CoreLoop : public testing::Test {
 protected:
  template <class F>
  void Sweep(int seeds, F plan_of) {
    const char* const only = std::getenv("LONGHAUL_SEED");
    const uint64_t first = only != nullptr ? std::strtoull(only, nullptr, 10) : 1;
    const char* const factor = std::getenv("LONGHAUL_SEED_FACTOR");
    const uint64_t times = factor != nullptr ? std::strtoull(factor, nullptr, 10) : 1;
    const uint64_t last = only != nullptr ? first : static_cast<uint64_t>(seeds) * times;
    for (uint64_t seed = first; seed <= last && !HasFailure(); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      Plan plan;
      plan.seed = seed;
      plan_of(&plan);
      Loop loop(plan);
      loop.Run();
      settled_ += loop.settled();
      retries_ += loop.retries();
      aborted_ += loop.aborted();
      relayed_ += loop.relayed();
      if (seed % 16 != 1) continue;
      Loop again(plan);
      again.Run();
      EXPECT_EQ(again.Digest(), loop.Digest()) << "not deterministic";
    }
  }
  uint64_t settled_ = 0;
  uint64_t retries_ = 0;
  uint64_t aborted_ = 0;
  uint64_t relayed_ = 0;
};

TEST_F(CoreLoop, WithoutFaultsEveryOpHasOneResult) {
  Sweep(30, [](Plan* plan) { plan->peers = 1 + static_cast<int>(plan->seed % 5); });
  // Members leave one after the other, each time through a freeze; none had to redo an op for it.
  EXPECT_EQ(retries_, 0u);
}

TEST_F(CoreLoop, SeveralMembersOfOneHostActAsOnePeer) {
  Sweep(30, [](Plan* plan) {
    plan->peers = 2;
    plan->members_per_peer = 3;
    plan->trainer_deaths = static_cast<int>(plan->seed % 4);
  });
}

TEST_F(CoreLoop, NewcomersComeInAtABoundary) {
  Sweep(40, [](Plan* plan) {
    plan->peers = 2;
    plan->late_peers = 2;
    plan->rounds = 8;
    plan->straddle = true;
  });
}

TEST_F(CoreLoop, LinksThatBreakDuringAnAdmissionAreNotForgotten) {
  Sweep(50, [](Plan* plan) {
    plan->peers = 3;
    plan->late_peers = 3;
    plan->link_breaks = 8;
    plan->rounds = 8;
  });
}

TEST_F(CoreLoop, EvictedMembersTakeNobodyWithThem) {
  Sweep(50, [](Plan* plan) {
    plan->peers = 2 + static_cast<int>(plan->seed % 2);
    plan->members_per_peer = 2;
    plan->evictions = 2;
    plan->rounds = 6;
    plan->straddle = true;
  });
}

TEST_F(CoreLoop, CrashedPeersLeaveOneOutcomeAmongTheOthers) {
  Sweep(80, [](Plan* plan) {
    plan->peers = 2 + static_cast<int>(plan->seed % 4);
    plan->crashes = 1 + static_cast<int>(plan->seed % 3);
    plan->tags = 6;
  });
  EXPECT_GT(retries_, 0u);
}

TEST_F(CoreLoop, BrokenLinksAreRepaired) {
  Sweep(50, [](Plan* plan) {
    plan->peers = 2 + static_cast<int>(plan->seed % 3);
    plan->link_breaks = 6;
  });
  EXPECT_GT(retries_, 0u);
}

TEST_F(CoreLoop, BrokenStreamsOfTheCoordinatorAreMadeUpFor) {
  Sweep(50, [](Plan* plan) {
    plan->stream_breaks = 6;
    plan->crashes = 1;
    plan->late_peers = 1;
  });
}

TEST_F(CoreLoop, OpsThatAbortOnAFaultEndTheSameAtAll) {
  Sweep(40, [](Plan* plan) {
    plan->peers = 3;
    plan->link_breaks = 3;
    plan->abort_share = 0.5;
  });
  EXPECT_GT(aborted_, 0u);
}

TEST_F(CoreLoop, BlockedPairsSpeakThroughOthers) {
  Sweep(60, [](Plan* plan) {
    plan->peers = 4 + static_cast<int>(plan->seed % 3);
    plan->blocked = {{PeerId(1), PeerId(3)}};
    if (plan->peers > 4) plan->blocked.push_back({PeerId(2), PeerId(5)});
    plan->tags = 6;
    plan->link_breaks = static_cast<int>(plan->seed % 5);
    plan->crashes = static_cast<int>(plan->seed % 2);
  });
  EXPECT_GT(relayed_, 0u);
  EXPECT_GT(retries_, 0u);
}

TEST_F(CoreLoop, NewcomersMayBeBlockedWithOthersAndRelayForThem) {
  Sweep(60, [](Plan* plan) {
    plan->peers = 4;
    plan->late_peers = 2;
    plan->rounds = 8;
    plan->blocked = {{PeerId(1), PeerId(3)}, {PeerId(2), PeerId(6)}};
    plan->link_breaks = 4;
    plan->stream_breaks = 2;
    plan->evictions = static_cast<int>(plan->seed % 2);
    plan->straddle = plan->seed % 2 == 0;
  });
  EXPECT_GT(relayed_, 0u);
}

TEST_F(CoreLoop, EverythingAtOnce) {
  Sweep(120, [](Plan* plan) {
    plan->peers = 3;
    plan->members_per_peer = 1 + static_cast<int>(plan->seed % 2);
    plan->late_peers = 2;
    plan->rounds = 6;
    plan->crashes = static_cast<int>(plan->seed % 3);
    plan->trainer_deaths = static_cast<int>(plan->seed % 3);
    plan->link_breaks = 4;
    plan->stream_breaks = 4;
    plan->abort_share = 0.2;
    plan->evictions = static_cast<int>(plan->seed % 2);
    plan->straddle = plan->seed % 5 < 2;
  });
}

}  // namespace
}  // namespace longhaul::peerd
