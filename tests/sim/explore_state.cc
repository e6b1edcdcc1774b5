#include "tests/sim/explore_state.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/crypto/identity.h"
#include "base/digest.h"
#include "coordinator/core/leases.h"
#include "proto/control/convert.h"
#include "proto/wire/limits.h"
#include "tests/sim/checker.h"
#include "tests/sim/store_back.h"
#include "tests/sim/story.h"

namespace longhaul::sim {
namespace {

using Kind = Move::Kind;

constexpr uint32_t kDetectMs = 300;
// A wait that is longer than this after the last fault counts as endless.
constexpr int64_t kPatience = 30 * Millis(kDetectMs);
constexpr uint64_t kLargeCount = LH_ONE_SHOT_BYTES_MAX;  // elements of eight bytes
// After this time a peer whose stream the coordinator has closed connects again.
constexpr int64_t kPause = Millis(kDetectMs) / 2;
// A transfer fails if it finds no source for this time.
constexpr int64_t kStall = 4 * Millis(kDetectMs);
// How long the coordinator and a peer wait for each other on a silent stream.
constexpr int64_t kLease = coordinator::kLease * Millis(kDetectMs);
// Longer than the lease, so both ends give the stream up.
constexpr int64_t kSilence = kLease + Millis(kDetectMs);
constexpr Hash128 kManifest{7, 7};

Hash128 HashOfState(uint64_t state) { return {state, 1}; }

const GroupKey& TheGroup() {
  static const GroupKey group{"run", 0};
  return group;
}

PeerId IdOf(int peer) { return PeerId(static_cast<uint64_t>(peer) + 1); }
int IndexOf(PeerId peer) { return static_cast<int>(peer.value()) - 1; }
std::string NameOf(int peer) { return ToString(IdOf(peer)); }
const Identity& IdentityOf(int peer) {
  static const std::array<Identity, ExploreState::kPeersMax> identities = {
      Identity::ForTest(1), Identity::ForTest(2), Identity::ForTest(3)};
  return identities[static_cast<size_t>(peer)];
}
peerd::LocalId LocalOf(int member) { return peerd::LocalId(static_cast<uint64_t>(member) + 1); }
// A sum of inputs shows which inputs are in it, and how often.
uint64_t InputOf(int member) { return uint64_t{1} << (8 * member); }

uint64_t InputOf(int member, const Act& act) {
  return InputOf(member) * std::max<uint64_t>(1, act.weight);
}

// The whole of a one-shot op, which begins with the value that stands for it.
std::string Bytes(uint64_t value, uint64_t size) {
  std::string bytes(std::max<uint64_t>(size, sizeof value), '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}
uint64_t Value(const std::string& bytes) {
  uint64_t value = 0;
  if (bytes.size() >= sizeof value) std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

uint64_t HashOf(const std::string& bytes, uint64_t salt) {
  return Digester().Add(salt).Add(bytes).value();
}

// Hashes the events that wait in queues.
struct EventHash {
  uint64_t operator()(const peerd::LinkUp& e) const { return Of(1, e.peer); }
  uint64_t operator()(const peerd::LinkDown& e) const { return Of(2, e.peer); }
  uint64_t operator()(const peerd::AttemptComplete& e) const {
    return Digester().Add(uint64_t{5}).Add(e.ordinal).Add(e.attempt).value();
  }
  uint64_t operator()(const peerd::AttemptFinished& e) const {
    return Digester().Add(uint64_t{9}).Add(e.ordinal).value();
  }
  uint64_t operator()(const peerd::AttemptStopped& e) const {
    return Digester().Add(uint64_t{6}).Add(e.ordinal).Add(e.attempt).value();
  }
  uint64_t operator()(const peerd::TransferEnded& e) const {
    return Digester().Add(uint64_t{7}).Add(e.local).Add(e.outcome.text).Add(e.bytes).value();
  }
  uint64_t operator()(const peerd::ManifestCompared& e) const {
    return Digester().Add(uint64_t{8}).Add(e.local).value();
  }
  template <class Other>
  uint64_t operator()(const Other&) const {
    Checker::Fail("an event in a queue that never waits in one");
  }
  static uint64_t Of(uint64_t kind, PeerId peer) { return Digester().Add(kind).Add(peer).value(); }
};

struct EventText {
  std::string operator()(const peerd::LinkUp& e) const { return "link up to " + ToString(e.peer); }
  std::string operator()(const peerd::LinkDown& e) const {
    return "link down to " + ToString(e.peer);
  }
  std::string operator()(const peerd::AttemptComplete& e) const {
    return "attempt complete " + ToString(e.ordinal) + " attempt=" + ToString(e.attempt);
  }
  std::string operator()(const peerd::AttemptFinished& e) const {
    return "attempt finished " + ToString(e.ordinal);
  }
  std::string operator()(const peerd::AttemptStopped& e) const {
    return "attempt stopped " + ToString(e.ordinal) + " attempt=" + ToString(e.attempt);
  }
  std::string operator()(const peerd::TransferEnded& e) const {
    return "transfer of t" + std::to_string(e.local.value()) + " ended: " + Describe(e.outcome);
  }
  template <class Other>
  std::string operator()(const Other&) const {
    return "event";
  }
};

uint64_t DigestOf(const coordinator::Records& records) {
  Digester digest;
  digest.Add(records.store.term);
  for (const auto& [name, run] : records.runs) digest.Add(run.next_member);
  for (const auto& [key, group] : records.groups) {
    digest.Add(group.committed).Add(group.highest).Add(group.boundary).Add(group.last_freeze);
    for (const auto& member : group.members) {
      digest.Add(member.member).Add(member.joined).Add(member.votes).Add(member.syncs);
      digest.Add(uint64_t{member.departs.has_value()});
    }
    if (group.state) digest.Add(group.state->revision).Add(group.state->state);
    for (const auto& fates : group.fates) {
      digest.Add(fates.peer);
      for (const auto& fate : fates.fates) {
        digest.Add(fate.ordinal).Add(static_cast<uint64_t>(fate.fate));
      }
      for (const auto& op : fates.missed) digest.Add(op.boundary).Add(op.tag).Add(op.set);
    }
  }
  return digest.value();
}

// Whether a clone of what has this digest is compared with it: one in eight, because digests of
// whole cores take time. 0: the digest is not known.
bool IsChecked(uint64_t digest) { return digest != 0 && digest % 8 == 0; }

template <class Queue>
Queue Emptied(Queue* queue) {
  return std::exchange(*queue, Queue());
}

}  // namespace

// ------------------------------------------------------------------------------ packets

template <class T>
ExploreState::Packet ExploreState::Pack(T what, uint64_t hash, uint64_t session) {
  auto body = std::make_shared<Body>();
  body->what = std::move(what);
  body->session = session;
  body->hash = Digester().Add(hash).Add(session).value();
  return body;
}

ExploreState::Packet ExploreState::PackEnd(uint64_t session) { return Pack(End{}, 77, session); }

ExploreState::Packet ExploreState::PackEvent(peerd::Event event) {
  const uint64_t hash = std::visit(EventHash(), event);
  return Pack(std::move(event), hash);
}

ExploreState::Peer& ExploreState::Write(int i) {
  if (peers_[i].use_count() != 1) peers_[i] = std::make_shared<Peer>(*peers_[i]);
  return const_cast<Peer&>(*peers_[i]);
}

// ------------------------------------------------------------------------------ ports

// One object stands behind all ports, because each port needs only a few lines here.
class ExploreState::Ports final : public peerd::TrainerPort,
                                  public peerd::OpPort,
                                  public peerd::StatePort,
                                  public peerd::Links,
                                  public peerd::EngineObserver {
 public:
  Ports(ExploreState* state, int i, std::optional<peerd::Event> due = std::nullopt)
      : s(state), i(i) {
    if (due) events_.push_back(*std::move(due));
  }

  peerd::EnginePorts all() {
    peerd::EnginePorts ports;
    ports.trainers = this;
    ports.links = this;
    ports.ops = this;
    ports.states = this;
    ports.to_coordinator = [this](const control::PeerMessage& m) { s->SendToCoordinator(i, m); };
    ports.refuse_coordinator = [this](const std::string& reason) {
      Checker::Fail(NameOf(i) + " refuses the only coordinator there is: " + reason);
    };
    ports.clock = [this] { return s->now_; };
    ports.sign = [this](const std::string& text) { return IdentityOf(i).Sign(text); };
    ports.observer = this;
    return ports;
  }

  // ---- TrainerPort
  void JoinDone(peerd::LocalId local, const Outcome& outcome, const peerd::World& world,
                bool) override {
    const int m = s->MemberOf(local);
    Member& member = s->members_[m];
    s->Answered(&member.join_open, "join", m);
    if (!outcome.ok()) {
      member.gone = true;
      return;
    }
    member.joined = true;
    s->EnterWorld(m, world);
  }
  void StepDone(peerd::LocalId local, const Outcome& outcome, const peerd::World& world) override {
    const int m = s->MemberOf(local);
    s->Answered(&s->members_[m].step_open, "step", m);
    if (outcome.ok()) s->EnterWorld(m, world);
  }
  void SyncDone(peerd::LocalId, const Outcome&, const peerd::StateSyncInfo&) override {
    s->OnSyncDone(ended_);
  }
  void TakeDone(peerd::LocalId, const Outcome&, const peerd::StateSyncInfo&) override {
    Checker::Fail("a state that nobody wants to take");
  }
  void SyncProgress(peerd::LocalId, const control::FetchProgress&) override {}
  void LeaveDone(peerd::LocalId local, const Outcome&) override {
    const int m = s->MemberOf(local);
    s->Answered(&s->members_[m].leave_open, "leave", m);
  }
  void PostDone(const peerd::PostRef& post, const Outcome& outcome, const peerd::OpInfo& info,
                const peerd::OpTraffic&) override {
    s->OnPostDone({post, outcome, info});
    if (s->planted_ == Planted::kAnswerTwice) s->OnPostDone({post, outcome, info});
  }
  void WorldChanged(peerd::LocalId local, const peerd::World&) override {
    const int m = s->MemberOf(local);
    if (!s->members_[m].joined) Checker::Fail("WorldChanged outside a membership");
    s->CheckMembers(m);
  }
  void MemberGone(peerd::LocalId local, const Outcome& outcome) override {
    const int m = s->MemberOf(local);
    Member& member = s->members_[m];
    s->Say("t" + std::to_string(m + 1) + " is out: " + outcome.text);
    if (!member.joined || member.gone) Checker::Fail("MemberGone outside a membership");
    if (member.join_open || member.step_open || member.sync_open || member.leave_open ||
        !member.posts.empty()) {
      Checker::Fail("t" + std::to_string(m + 1) + " is out, and has calls that are not answered");
    }
    member.gone = true;
  }

  // ---- OpPort
  void AddPost(const peerd::LocalPost&, peerd::PostBuffers) override {}
  Outcome Admit(const peerd::LocalPost&, const peerd::PostView&) override { return {}; }
  peerd::OpTraffic EndPost(const peerd::PostRef&) override { return {}; }
  std::string Payload(const peerd::SendReady& ready) const override {
    return Bytes(s->PayloadOf(ready.desc, ready.posts, ready.cuts), ready.desc.bytes());
  }
  void Start(const peerd::StartAttempt& action) override { s->Start(i, action); }
  void Credit(const peerd::CreditAttempt& action) override { s->Credit(i, action); }
  void Stop(const peerd::StopAttempt& action) override { s->Stop(i, action); }
  void Finish(const peerd::FinishAttempt& action) override { s->Finish(i, action); }
  void ForgetGroup(const GroupKey&) override {}
  // Events of ops and of states.
  std::vector<peerd::Event> PopEvents() override { return std::exchange(events_, {}); }

  // ---- StatePort
  void SetDetectMs(uint32_t) override {}
  void Add(peerd::LocalId, const GroupKey&, const std::string&) override {}
  void Gone(peerd::LocalId) override {}
  void Forget(peerd::LocalId) override {}
  bool KeptRevision(peerd::LocalId, const peerd::LocalState&, uint64_t*) const override {
    return false;
  }
  void Prepare(const std::shared_ptr<peerd::LocalState>&, std::function<void()>) override {}
  void Begin(peerd::LocalId local, const GroupKey&, const peerd::StateSync&,
             bool with_step) override {
    const peerd::SyncRequest request = s->RequestOf(s->MemberOf(local));
    if (with_step) {
      events_.push_back(peerd::LocalStep{local, request});
    } else {
      events_.push_back(peerd::LocalSync{local, request});
    }
  }
  std::optional<bool> Withdraw(peerd::LocalId) override { return std::nullopt; }
  void Carry(const peerd::ServeState& action) override { s->Serve(i, action); }
  void Carry(const peerd::EndServe& action) override {
    if (s->Write(i).served.erase(s->MemberOf(action.local)) == 0) {
      Checker::Fail("what ends to be served was not served");
    }
  }
  void Carry(const peerd::StartTransfer& action) override { s->StartFetch(i, action); }
  void Carry(const peerd::ChangeSources& action) override {
    const auto fetch = s->Write(i).fetches.find(s->MemberOf(action.local));
    if (fetch == s->Write(i).fetches.end()) return;  // it has ended, and the core does not know yet
    fetch->second.sources = action.sources;
    fetch->second.fails_at = s->now_ + kStall;
  }
  void Carry(const peerd::StopTransfer& action) override {
    const int m = s->MemberOf(action.local);
    if (s->peers_[i]->fetches.contains(m)) s->EndFetch(i, m, /*ok=*/false);
  }
  void Carry(const peerd::CompareManifest&) override {
    Checker::Fail("manifests are compared, and all are the same");
  }
  peerd::StateSyncInfo Carry(const peerd::SyncDone& action) override {
    ended_ = action;
    return {};
  }
  peerd::StateSyncInfo Carry(const peerd::TakeDone&) override { return {}; }
  void WhenUnread(peerd::LocalId, std::function<void()> act) override { act(); }
  bool reading() const override { return false; }
  void OnLinkUp(const peerd::LinkKey&) override {}
  void OnLinkDown(const peerd::LinkKey&) override {}
  absl::Status OnControlFrame(const peerd::LinkKey&, const FrameHeader&, std::span<const uint8_t>,
                              bool) override {
    Checker::Fail("a frame of a transfer, which nobody sends");
  }
  void Work() override {}  // for ops and for states
  bool HasWork() const override { return false; }
  Tick NextDeadline() const override { return kNever; }
  std::vector<std::pair<peerd::LocalId, control::FetchProgress>> PopProgress() override {
    return {};
  }

  // ---- Links
  void OpenLinks(const std::string&, uint32_t, Epoch epoch, const std::string&,
                 const std::vector<peerd::LinkRequest>& links, Tick deadline) override {
    s->OpenLinks(i, epoch, links, deadline);
  }
  void KeepLinks(const std::string&, uint32_t, Epoch epoch,
                 const std::vector<PeerId>& peers) override {
    s->KeepLinks(i, epoch, peers);
  }
  void TryPeer(const GroupKey& group, uint64_t trial, PeerId peer, const std::vector<std::string>&,
               Tick deadline) override {
    s->TryPeer(i, group, trial, peer, deadline);
  }
  void SendControl(const peerd::LinkKey& link, const FrameHeader& header,
                   std::span<const uint8_t> payload) override {
    s->SendFrame(i, link.peer, header,
                 std::string(reinterpret_cast<const char*>(payload.data()), payload.size()));
  }
  void SendControlInTime(const peerd::LinkKey& link, const FrameHeader& header,
                         std::span<const uint8_t> payload) override {
    SendControl(link, header, payload);
  }
  void BreakLink(const peerd::LinkKey& link, const std::string& reason) override {
    Checker::Fail(NameOf(i) + " breaks its link to " + ToString(link.peer) + ": " + reason);
  }
  void AddMemory(const uint8_t*, size_t) override {}
  void RemoveMemory(const uint8_t*) override {}

  // ---- EngineObserver
  void OnActions(std::vector<peerd::Action>* actions) override {
    s->turning_->core().CheckInvariants();
    for (peerd::Action& action : *actions) {
      auto* const ready = std::get_if<peerd::SendReady>(&action);
      if (ready == nullptr) continue;
      (void)s->InputsOf(ready->posts);  // fails if an input is not as posted
      if (ready->sign && s->planted_ == Planted::kIndexForgotten) ready->sign = 0;
      if (!ready->result || s->planted_ != Planted::kResultForgotten) continue;
      ready->result.reset();
      ready->one_shot = true;
    }
  }
  bool OnAction(const peerd::Action& action) override {
    if (s->crash_after_ != 0 && done_ == s->crash_after_) {
      s->crashed_ = true;
      return false;
    }
    const bool visible = std::holds_alternative<peerd::ToCoordinator>(action) ||
                         std::holds_alternative<peerd::PostDone>(action) ||
                         std::holds_alternative<peerd::SendReady>(action) ||
                         std::holds_alternative<peerd::SendDone>(action) ||
                         std::holds_alternative<peerd::SyncDone>(action);
    done_ += visible ? 1 : 0;
    if (const auto* refused = std::get_if<peerd::BreakLink>(&action)) {
      Checker::Fail(NameOf(i) + " takes no more of " + ToString(refused->peer) + ": " +
                    refused->reason);
    }
    if (const auto* line = std::get_if<peerd::LogLine>(&action)) {
      s->Say(NameOf(i) + " logs " + line->text);
    }
    return true;
  }

 private:
  ExploreState* const s;
  const int i;
  std::vector<peerd::Event> events_;
  peerd::SyncDone ended_;
  uint32_t done_ = 0;  // actions that others can see
};

// ------------------------------------------------------------------------------ setting up

ExploreState::ExploreState(const ExploreScenario* scenario, Planted planted)
    : scenario_(scenario),
      planted_(planted),
      durable_(std::make_shared<coordinator::Records>()),
      closed_attempts_(scenario->closed_attempts) {
  LH_CHECK(scenario->peers <= kPeersMax && scenario->members.size() <= 8);
  members_.resize(scenario->members.size());
  Restart();
  for (int i = 0; i < peers(); ++i) {
    peerd::EngineOptions options;
    options.core.peer = IdOf(i);
    options.core.endpoints = {"host" + std::to_string(i) + ":29700"};
    options.core.lanes = 1;
    options.core.version = "explore";
    options.core.host = "host" + std::to_string(i);
    options.core.detect_ms = kDetectMs;
    auto engine = std::make_shared<peerd::Engine>();
    Ports ports(this, i);
    engine->Start(options, ports.all());
    auto peer = std::make_shared<Peer>();
    peer->engine = std::move(engine);
    peers_[i] = std::move(peer);
  }
}

void ExploreState::Setup() {
  const auto begun = [this](size_t m) { return members_[m].next >= scenario_->members[m].setup; };
  for (int steps = 0;; ++steps) {
    if (steps > 10000) Checker::Fail("the setup does not end");
    // Boundaries come last. Then all members that join are pending.
    std::optional<Move> next;
    for (const Move& move : Moves(/*faults=*/false)) {
      if (move.kind == Kind::kOperator || move.kind == Kind::kMeasure) continue;
      if (move.kind == Kind::kTime) continue;
      if (move.kind == Kind::kAct && begun(move.a)) continue;
      const bool last =
          move.kind == Kind::kAct &&
          scenario_->members[move.a].acts[members_[move.a].next].kind == Act::Kind::kStep;
      if (!last || !next) next = move;
      if (!last) break;
    }
    if (!next) break;
    Apply(*next);
  }
  for (size_t m = 0; m < members_.size(); ++m) {
    const Member& member = members_[m];
    if (!begun(m) || member.join_open || member.step_open || member.sync_open ||
        !member.posts.empty()) {
      Checker::Fail("the setup of " + scenario_->name + " does not come to its end");
    }
  }
}

// ------------------------------------------------------------------------------ what can happen

bool ExploreState::EndPending(int to, int from) const {
  for (const Packet& packet : ControlTo(to, from)) {
    if (std::holds_alternative<End>(packet->what)) return true;
  }
  return false;
}

bool ExploreState::CanAct(int m) const {
  const Member& member = members_[m];
  const auto& script = scenario_->members[m];
  if (member.dead || member.gone) return false;
  if (!member.again.empty()) return true;
  if (member.join_open || member.step_open || member.sync_open || member.leave_open) return false;
  if (member.sync_again) return true;
  if (member.next >= script.acts.size()) return false;
  const Act& act = script.acts[member.next];
  if (act.kind == Act::Kind::kCancel) return true;
  if (act.kind != Act::Kind::kPost && act.kind != Act::Kind::kRefuse) {
    const bool stays = act.kind == Act::Kind::kStep;
    return std::all_of(member.posts.begin(), member.posts.end(), [&](const auto& post) {
      return stays && script.acts[post.second.act].beside;
    });
  }
  return std::none_of(member.posts.begin(), member.posts.end(),
                      [&](const auto& post) { return post.second.tag == act.tag; });
}

uint64_t ExploreState::TurnOf(int m, size_t index) const {
  const std::vector<Act>& acts = scenario_->members[m].acts;
  const auto rounds = members_[m].rounds.find(index);
  uint64_t turn = rounds == members_[m].rounds.end() ? 0 : rounds->second;
  turn += uint64_t{10000} * static_cast<uint64_t>(acts[index].op);
  if (!acts[index].beside) turn += 1000000 * members_[m].steps;
  for (size_t i = index; i-- > 0;) {
    if (acts[i].kind == Act::Kind::kCancel || acts[i].kind == Act::Kind::kWait) continue;
    if (acts[i].kind != Act::Kind::kPost && acts[i].kind != Act::Kind::kRefuse) break;
    turn += acts[i].tag == acts[index].tag && acts[i].op == acts[index].op ? 100 : 0;
  }
  return turn;
}

// True if every call is answered and every script has ended.
bool ExploreState::Settled() const {
  for (size_t m = 0; m < members_.size(); ++m) {
    const Member& member = members_[m];
    if (member.dead || member.gone) continue;
    if (member.next < scenario_->members[m].acts.size() || !member.again.empty()) return false;
    if (member.join_open || member.step_open || member.leave_open || !member.posts.empty() ||
        member.sync_open || member.sync_again) {
      return false;
    }
  }
  return true;
}

std::vector<Move> ExploreState::Moves(bool faults) const {
  std::vector<Move> moves;
  const auto add = [&](Kind kind, int a, int b = 0) {
    moves.push_back({kind, static_cast<uint8_t>(a), static_cast<uint8_t>(b), 0});
  };
  for (int i = 0; i < peers(); ++i) {
    const StreamState& stream = streams_[i];
    const bool heard = coordinator_ && !Silent(i);
    if (heard && !stream.to_coordinator.empty()) add(Kind::kToCoordinator, i);
    if (heard && !stream.late_end.empty()) add(Kind::kLateEnd, i);
    if (!peers_[i]->engine) continue;
    if (!stream.to_peer.empty()) add(Kind::kToPeer, i);
    if (!peers_[i]->local.empty()) add(Kind::kLocal, i);
    for (const auto& [m, fetch] : peers_[i]->fetches) {
      if (HasSource(i, fetch)) add(Kind::kTransfer, i, m);
    }
    for (int j = 0; j < peers(); ++j) {
      if (j == i) continue;
      if (!ControlTo(i, j).empty()) add(Kind::kControl, i, j);
      if (!DataTo(i, j).empty()) add(Kind::kData, i, j);
    }
    if (heard && !stream.peer_up && stream.to_peer.empty() && now_ >= stream.not_before) {
      add(Kind::kReconnect, i);
      if (!stream.to_coordinator.empty()) add(Kind::kReconnectFirst, i);
    }
  }
  for (size_t m = 0; m < members_.size(); ++m) {
    if (CanAct(static_cast<int>(m))) add(Kind::kAct, static_cast<int>(m));
  }
  if (scenario_->evicted >= 0 && !evict_done_ && coordinator_) add(Kind::kOperator, 0);
  if (scenario_->measured && !measure_done_ && coordinator_) add(Kind::kMeasure, 0);
  if (!coordinator_) add(Kind::kRestart, 0);
  const bool busy = !moves.empty();
  if (!busy && Settled()) return moves;
  if (!busy) add(Kind::kTime, 0);
  if (faults) AddFaults(busy, &moves);
  return moves;
}

void ExploreState::AddFaults(bool busy, std::vector<Move>* moves) const {
  const auto add = [&](Kind kind, int a, int b = 0) {
    moves->push_back({kind, static_cast<uint8_t>(a), static_cast<uint8_t>(b), 0});
  };
  // Receivers that die while they handle what they receive, here after their first visible action.
  // Search::Try() tries deaths after the later actions.
  for (size_t i = moves->size(); i-- > 0;) {
    Move move = (*moves)[i];
    if (move.kind > Kind::kLocal || move.kind == Kind::kData) continue;
    move.crash_after = 1;
    moves->push_back(move);
  }
  int alive = 0;
  for (int i = 0; i < peers(); ++i) alive += peers_[i]->engine ? 1 : 0;
  for (int i = 0; i < peers(); ++i) {
    if (!peers_[i]->engine) continue;
    add(Kind::kCrashPeer, i);
    add(Kind::kCrashPeerLost, i);
    add(Kind::kCrashPeerSilent, i);
    if (streams_[i].live) {
      add(Kind::kBreakStream, i);
      add(Kind::kBreakStreamLost, i);
      if (coordinator_ && scenario_->silences && !Silent(i)) {
        add(Kind::kSilence, i);
        if (i == 0) add(Kind::kIsolate, 0);
      }
    }
    for (int j = i + 1; j < peers(); ++j) {
      if (!PairOf(i, j).connected) continue;
      add(Kind::kBreakLink, i, j);
      add(Kind::kBreakLinkLost, i, j);
      if (scenario_->cuts && !PairOf(i, j).cut) add(Kind::kCutPair, i, j);
    }
  }
  for (size_t m = 0; m < members_.size(); ++m) {
    const Member& member = members_[m];
    if (member.next > 0 && !member.dead && !member.gone) {
      add(Kind::kKillTrainer, static_cast<int>(m));
    }
  }
  if (coordinator_) {
    add(Kind::kCrashCoordinator, 0);
    add(Kind::kCrashCoordinatorLost, 0);
    if (before_ != nullptr) add(Kind::kStoreGoesBack, 0);
  }
  if (busy && NextDeadline() != kNever) add(Kind::kEarly, 0);
}

Tick ExploreState::NextDeadline() const {
  Tick due = coordinator_ ? coordinator_->NextDeadline() : kNever;
  for (int i = 0; i < peers(); ++i) {
    if (!peers_[i]->engine) continue;
    due = std::min(due, CoreOf(i).NextDeadline());
    for (const auto& [peer, request] : peers_[i]->requests) due = std::min(due, request.deadline);
    for (const auto& [peer, when] : peers_[i]->silent) due = std::min(due, when);
    for (const auto& [m, fetch] : peers_[i]->fetches) due = std::min(due, fetch.fails_at);
    for (const auto& [trial, attempt] : peers_[i]->tries) due = std::min(due, attempt.deadline);
    const StreamState& stream = streams_[i];
    due = std::min(due, stream.silent_at);
    if (Silent(i)) due = std::min(due, stream.dead_until);
    if (!stream.peer_up && stream.not_before > now_) due = std::min(due, stream.not_before);
  }
  return due;
}

// ------------------------------------------------------------------------------ making a move

bool ExploreState::Apply(const Move& move) {
  crash_after_ = move.crash_after;
  crashed_ = false;
  if (move.fault()) {
    last_fault_ = now_;
    more_faults_ = first_fault_.has_value();
    if (!first_fault_) first_fault_ = move.kind;
  }
  const int a = move.a;
  const int b = move.b;
  switch (move.kind) {
    case Kind::kToPeer:
      DeliverToPeer(a);
      break;
    case Kind::kToCoordinator:
      DeliverToCoordinator(a);
      break;
    case Kind::kLateEnd: {
      Queue& queue = streams_[a].late_end;
      const Packet packet = queue.front();
      queue.erase(queue.begin());
      StepCoordinator(coordinator::SessionClosed{coordinator::SessionId(packet->session)});
      break;
    }
    case Kind::kControl:
      DeliverControl(a, b);
      break;
    case Kind::kData:
      DeliverData(a, b);
      break;
    case Kind::kLocal: {
      Queue& queue = Write(a).local;
      const Packet packet = queue.front();
      queue.erase(queue.begin());
      Turn(
          a, [](peerd::Engine*) {}, std::get<peerd::Event>(packet->what));
      break;
    }
    case Kind::kTransfer:
      EndFetch(a, b, /*ok=*/true);
      break;
    case Kind::kAct:
      DoAct(a);
      break;
    case Kind::kOperator: {
      evict_done_ = true;
      const MemberId member(members_[scenario_->evicted].member);
      StepCoordinator(coordinator::EvictMember{TheGroup(), member, "the operator wants it out"});
      break;
    }
    case Kind::kMeasure:
      MeasureLinks();
      break;
    case Kind::kRestart:
      Restart();
      break;
    case Kind::kReconnect:
    case Kind::kReconnectFirst:
      Reconnect(a, move.kind == Kind::kReconnectFirst);
      break;
    case Kind::kTime:
      if (now_ - last_fault_ > kPatience) {
        std::string text = "somebody waits for ever;";
        if (coordinator_) {
          for (const auto& group : coordinator_->GetOverview().groups) {
            text += " the coordinator says \"" + group.waiting_for + "\"";
          }
        }
        Checker::Fail(text);
      }
      CheckNobodyWaitsForTheClosedPort();
      CheckSilentPeersAreRemoved();
      PassTime();
      break;
    case Kind::kEarly:
      PassTime();
      break;
    case Kind::kCrashPeer:
    case Kind::kCrashPeerLost:
    case Kind::kCrashPeerSilent:
      CrashPeer(a, move.kind);
      break;
    case Kind::kKillTrainer:
      KillTrainer(a);
      break;
    case Kind::kBreakLink:
    case Kind::kBreakLinkLost:
      BreakLink(a, b, move.kind == Kind::kBreakLinkLost);
      break;
    case Kind::kCutPair:
      CutPair(a, b);
      break;
    case Kind::kBreakStream:
    case Kind::kBreakStreamLost:
      BreakStream(a, move.kind == Kind::kBreakStreamLost);
      break;
    case Kind::kSilence:
      Silence(a);
      break;
    case Kind::kIsolate:
      for (int i = 0; i < peers(); ++i) Silence(i);
      break;
    case Kind::kCrashCoordinator:
    case Kind::kCrashCoordinatorLost:
      CrashCoordinator(move.kind == Kind::kCrashCoordinatorLost);
      break;
    case Kind::kStoreGoesBack:
      CrashCoordinator(/*lost=*/false);
      GoBack();
      break;
    case Kind::kCount:
      Checker::Fail("no such move");
  }
  Connect();
  return crash_after_ == 0 || crashed_;
}

void ExploreState::DeliverToPeer(int i) {
  StreamState& stream = streams_[i];
  const Packet packet = stream.to_peer.front();
  stream.to_peer.erase(stream.to_peer.begin());
  if (std::holds_alternative<End>(packet->what)) {
    stream.peer_up = false;
    Turn(i, [](peerd::Engine* engine) { engine->OnStreamDown("it ended"); });
    return;
  }
  const auto& message = std::get<control::CoordinatorMessage>(packet->what);
  if (const auto* prepare = std::get_if<control::PrepareEpoch>(&message)) {
    Write(i).attempt_seen = std::max(peers_[i]->attempt_seen, prepare->last_freeze.value());
  }
  Turn(i, [&](peerd::Engine* engine) { engine->OnMessage(message); });
}

void ExploreState::DeliverToCoordinator(int i) {
  StreamState& stream = streams_[i];
  const Packet packet = stream.to_coordinator.front();
  stream.to_coordinator.erase(stream.to_coordinator.begin());
  const coordinator::SessionId session(packet->session);
  if (std::holds_alternative<Opened>(packet->what)) {
    stream.opened = true;
    StepCoordinator(coordinator::SessionOpened{session});
  } else if (std::holds_alternative<End>(packet->what)) {
    StepCoordinator(coordinator::SessionClosed{session});
  } else {
    StepCoordinator(coordinator::FromPeer{session, std::get<control::PeerMessage>(packet->what)});
  }
}

void ExploreState::DeliverControl(int to, int from) {
  Queue& queue = ControlTo(to, from);
  const Packet packet = queue.front();
  queue.erase(queue.begin());
  if (std::holds_alternative<End>(packet->what)) {
    DataTo(to, from).clear();
    Turn(to, [&](peerd::Engine* engine) {
      engine->OnLinkDown({TheGroup().run, IdOf(from)}, "connection reset by peer", 0);
    });
    return;
  }
  if (std::holds_alternative<peerd::Event>(packet->what)) {
    Turn(to, [&](peerd::Engine* engine) { engine->OnLinkUp({TheGroup().run, IdOf(from)}); });
    return;
  }
  auto [header, payload] = std::get<Frame>(packet->what);
  if (planted_ == Planted::kStaleFrames) {
    header.attempt = std::max(header.attempt, Epoch(peers_[to]->attempt_seen));
  }
  Turn(to, [&](peerd::Engine* engine) {
    const absl::Status status =
        engine->OnControlFrame({TheGroup().run, IdOf(from)}, header,
                               {reinterpret_cast<const uint8_t*>(payload.data()), payload.size()});
    if (!status.ok()) {
      Checker::Fail(NameOf(to) + " refuses a frame of " + NameOf(from) + ": " +
                    std::string(status.message()));
    }
  });
}

// Members try a newcomer's data port first, so the newcomer cannot hold up a boundary or an op.
void ExploreState::CheckNobodyWaitsForTheClosedPort() const {
  if (scenario_->closed_attempts == 0 || first_fault_) return;
  for (size_t m = 0; m < members_.size(); ++m) {
    const Member& member = members_[m];
    if (!member.joined || (!member.step_open && member.posts.empty())) continue;
    Checker::Fail("t" + std::to_string(m + 1) + " waits for a newcomer whose port is closed");
  }
}

// A silent peer is removed after the lease. The end of its stream must not start another wait.
void ExploreState::CheckSilentPeersAreRemoved() const {
  if (!coordinator_ || first_fault_ != Kind::kSilence || more_faults_) return;
  for (int i = 0; i < peers(); ++i) {
    if (!Silent(i) || now_ <= last_fault_ + kLease) continue;
    for (const auto& group : coordinator_->GetOverview().groups) {
      for (const coordinator::MemberView& member : group.members) {
        if (member.peer == IdOf(i)) {
          Checker::Fail(NameOf(i) + " was silent for the lease, and is still a member");
        }
      }
    }
  }
}

void ExploreState::PassTime() {
  const Tick due = NextDeadline();
  if (due == kNever) {
    if (Settled()) return;
    Checker::Fail("somebody waits, and nobody has a deadline");
  }
  now_ = std::max(now_, due);
  for (int i = 0; i < peers(); ++i) {
    if (!peers_[i]->engine) continue;
    struct Down {
      int other;
      const char* reason;
      uint32_t silent_ms;
    };
    std::vector<Down> down;
    Peer& peer = Write(i);
    for (auto it = peer.silent.begin(); it != peer.silent.end();) {
      if (it->second > now_) {
        ++it;
        continue;
      }
      down.push_back({it->first, "silent", PairOf(i, it->first).cut ? kDetectMs : 0});
      it = peer.silent.erase(it);
    }
    for (auto it = peer.requests.begin(); it != peer.requests.end();) {
      if (it->second.deadline > now_) {
        ++it;
        continue;
      }
      down.push_back({it->first, "no link by the deadline", 0});
      it = peer.requests.erase(it);
    }
    for (const Down& each : down) {
      const peerd::LinkKey link{TheGroup().run, IdOf(each.other)};
      Turn(i,
           [&](peerd::Engine* engine) { engine->OnLinkDown(link, each.reason, each.silent_ms); });
    }
    const std::map<int, Fetch> fetches = peers_[i]->fetches;
    for (const auto& [m, fetch] : fetches) {
      if (fetch.fails_at > now_) continue;
      if (HasSource(i, fetch)) {
        Write(i).fetches.at(m).fails_at = now_ + kStall;
      } else {
        EndFetch(i, m, /*ok=*/false);
      }
    }
    const std::map<uint64_t, Try> tries = peers_[i]->tries;
    for (const auto& [trial, attempt] : tries) {
      if (attempt.deadline > now_) continue;
      Write(i).tries.erase(trial);
      Turn(i, [&](peerd::Engine* engine) {
        engine->OnPeerTried(attempt.group, trial, attempt.peer, "no answer in time");
      });
    }
    StreamState& stream = streams_[i];
    if (stream.silent_at <= now_) {
      stream.silent_at = kNever;
      stream.to_peer.push_back(PackEnd());
    }
    if (CoreOf(i).NextDeadline() <= now_) Turn(i, [](peerd::Engine*) {});
    if (CoreOf(i).NextDeadline() <= now_) {
      Checker::Fail(NameOf(i) + ": its deadline stays in the past");
    }
  }
  if (!coordinator_ || coordinator_->NextDeadline() > now_) return;
  StepCoordinator(coordinator::TimePassed{});
  if (coordinator_ && coordinator_->NextDeadline() <= now_) {
    Checker::Fail("the coordinator's deadline stays in the past");
  }
}

void ExploreState::DoAct(int m) {
  Member& member = members_[m];
  const ScriptedMember& script = scenario_->members[m];
  size_t index = member.next;
  if (member.again.empty() && member.sync_again) return BeginSync(m, /*with_step=*/false);
  if (member.again.empty()) {
    ++member.next;
  } else {
    index = member.again.front();
    member.again.erase(member.again.begin());
  }
  const Act& act = script.acts[index];
  const peerd::LocalId local = LocalOf(m);
  switch (act.kind) {
    case Act::Kind::kJoin:
      member.join_open = true;
      return Turn(script.peer, [&](peerd::Engine* engine) {
        engine->OnJoin({local, TheGroup(), "t" + std::to_string(m + 1)});
      });
    case Act::Kind::kStep:
    case Act::Kind::kSync:
      if (act.state != 0) {
        member.state = act.state;
        brought_.insert(act.state);
        return BeginSync(m, act.kind == Act::Kind::kStep);
      }
      member.step_open = true;
      return Turn(script.peer, [&](peerd::Engine* engine) { engine->OnStep(local, nullptr); });
    case Act::Kind::kLeave:
      member.leave_open = true;
      return Turn(script.peer, [&](peerd::Engine* engine) { engine->OnLeave(local); });
    case Act::Kind::kCancel:
      return Cancel(m, act.tag);
    case Act::Kind::kWait:
      return;
    case Act::Kind::kRefuse: {
      uint64_t world = 0;
      const peerd::LocalPost refused = LocalPostOf(m, act, ++member.calls, &world);
      ops_[{member.boundary, act.tag, TurnOf(m, index)}].refused = true;
      if (planted_ == Planted::kRefusalUntold) return;
      return Turn(script.peer, [&](peerd::Engine* engine) {
        engine->OnRefusal({refused, "it does not fit"});
      });
    }
    case Act::Kind::kPost: {
      const uint64_t call = ++member.calls;
      Post post;
      post.tag = act.tag;
      post.boundary = member.boundary;
      post.turn = TurnOf(m, index);
      post.input = post.buffer = InputOf(m);
      post.abort_on_fault = act.abort_on_fault;
      post.act = index;
      const peerd::LocalPost local_post = LocalPostOf(m, act, call, &post.world);
      member.posts.emplace(call, post);
      OpSeen& seen = ops_[{post.boundary, post.tag, post.turn}];
      seen.posted |= InputOf(m);
      seen.worlds.insert(post.world);
      return Turn(script.peer, [&](peerd::Engine* engine) { engine->OnPost(local_post, {}); });
    }
  }
}

peerd::LocalPost ExploreState::LocalPostOf(int m, const Act& act, uint64_t call,
                                           uint64_t* world) const {
  const auto id_of = [this](int member) { return MemberId(members_[member].member); };
  const std::vector<MemberId> seen =
      CoreOf(scenario_->members[m].peer).GetMembers(LocalOf(m)).members;
  std::vector<int> present;  // those that would take part now, by rank
  for (const MemberId id : seen) {
    for (int other = 0; other < static_cast<int>(members_.size()); ++other) {
      const bool in_set =
          act.set.empty() || std::find(act.set.begin(), act.set.end(), other) != act.set.end();
      if (id_of(other) == id && in_set) present.push_back(other);
    }
  }
  peerd::LocalPost post;
  post.post = {LocalOf(m), call};
  post.tag = act.tag;
  OpDesc& desc = post.desc;
  desc.kind = act.op;
  // Weights are for floats. The models know neither dtypes nor lengths.
  desc.dtype = act.weight != 0 ? DType::kFloat64 : DType::kInt64;
  desc.count = act.algorithm == Algorithm::kOneShot ? 1 : kLargeCount;
  desc.algorithm = act.algorithm;
  desc.on_fault = act.abort_on_fault ? OnFault::kAbort : OnFault::kRetry;
  desc.weighted = act.weight != 0;
  post.terms.weight = act.weight != 0 ? static_cast<double>(act.weight) : 1;
  if (desc.InParts()) {
    desc.world = static_cast<uint16_t>(present.size());
    *world = present.size();
  }
  post.is_root = act.root == m;
  if (HasRoot(desc.kind)) desc.root = id_of(act.root);
  if (desc.kind == OpKind::kSendRecv) post.partner = id_of(post.is_root ? act.receiver : act.root);
  for (const int other : act.set) post.participants.push_back(id_of(other));
  std::sort(post.participants.begin(), post.participants.end());
  if (act.unequal) {
    LH_CHECK(act.op == OpKind::kAllGather || act.op == OpKind::kReduceScatter);
    desc.unequal = true;
    desc.count = 0;
    std::vector<uint64_t> all;
    for (const int other : present) all.push_back(kLargeCount + static_cast<uint64_t>(other));
    const std::vector<uint64_t> own{kLargeCount + static_cast<uint64_t>(m)};
    post.terms.gives = act.op == OpKind::kAllGather ? own : all;
    post.terms.gets = act.op == OpKind::kAllGather ? all : own;
  }
  return post;
}

void ExploreState::Cancel(int m, uint64_t tag) {
  for (auto& [call, post] : members_[m].posts) {
    if (post.tag != tag) continue;
    post.cancelled = true;
    ++ops_[{post.boundary, post.tag, post.turn}].cancels;
    const peerd::PostRef ref{LocalOf(m), call};
    return Turn(scenario_->members[m].peer, [&](peerd::Engine* engine) { engine->OnCancel(ref); });
  }
}

// ------------------------------------------------------------------------------ the coordinator

void ExploreState::Restart() {
  coordinator::CoreConfig config;
  config.incarnation = "c" + std::to_string(++starts_);
  config.detect_ms = kDetectMs;
  config.entropy.assign(32, static_cast<char>(starts_));
  // 1 ms: the core may order a ring at once. 0: it never does.
  config.ring_interval_ms = scenario_->measured ? 1 : 0;
  config.sign_ops = scenario_->signs;
  coordinator::Records records = *durable_;
  if (planted_ == Planted::kEpochReused) {
    for (auto& [key, group] : records.groups) {
      group.highest = group.committed;
      group.last_freeze = std::min(group.last_freeze, group.committed);
    }
  }
  coordinator_ = std::make_shared<coordinator::CoordinatorCore>(config, std::move(records));
  StepCoordinator(coordinator::TimePassed{});
}

// Reports every link to the next peer as slow, so that another ring is better.
void ExploreState::MeasureLinks() {
  measure_done_ = true;
  for (int i = 0; i < peers(); ++i) {
    // The report must not overtake messages in flight.
    if (!coordinator_ || !streams_[i].live || !streams_[i].to_coordinator.empty()) continue;
    control::LinkReport report;
    for (int j = 0; j < peers(); ++j) {
      if (i == j) continue;
      const uint64_t rate = j == (i + 1) % peers() ? 1000000 : 9000000;
      report.links.push_back({IdOf(i), IdOf(j), rate, 1000, 0});
      report.links.back().held = i == 0;
    }
    report.up_bytes_per_second = 1000000 * static_cast<uint64_t>(i);  // 0: unknown
    StepCoordinator(coordinator::FromPeer{coordinator::SessionId(streams_[i].session), report});
  }
  now_ = now_ + Millis(1);
  if (!coordinator_ || coordinator_->NextDeadline() > now_) return;
  StepCoordinator(coordinator::TimePassed{});
}

void ExploreState::StepCoordinator(const coordinator::Event& event) {
  auto core = std::make_shared<coordinator::CoordinatorCore>(coordinator_->Clone());
  if (IsChecked(coordinator_digest_) && core->Digest() != coordinator_digest_) {
    Checker::Fail("CoordinatorCore::Clone() makes another core");
  }
  std::vector<coordinator::Action> actions = core->Step(event, now_);
  core->CheckInvariants();
  coordinator_digest_ = core->Digest();
  coordinator_ = std::move(core);
  const bool sends_first = planted_ == Planted::kSentBeforeDurable;
  std::stable_sort(actions.begin(), actions.end(), [&](const auto& x, const auto& y) {
    const auto persists = [](const coordinator::Action& action) {
      return std::holds_alternative<coordinator::Persist>(action);
    };
    return sends_first && !persists(x) && persists(y);
  });
  uint32_t done = 0;
  std::optional<coordinator::RingOrdered> answer;
  for (coordinator::Action& action : actions) {
    if (const auto* notice = std::get_if<coordinator::Notice>(&action)) {
      Say("coordinator notes " + notice->event.text);
      if (notice->event.kind == "death" && first_fault_ == Kind::kIsolate && !more_faults_) {
        Checker::Fail("a member is removed because the coordinator was cut off: " +
                      notice->event.text);
      }
      continue;
    }
    // The receiver dies before this action.
    if (crash_after_ != 0 && done == crash_after_) {
      crashed_ = true;
      CrashCoordinator(/*lost=*/false);
      return;
    }
    ++done;
    if (const auto* persist = std::get_if<coordinator::Persist>(&action)) {
      const std::shared_ptr<const coordinator::Records> before = durable_;
      auto records = std::make_shared<coordinator::Records>(*durable_);
      for (const coordinator::Mutation& m : persist->mutations) {
        coordinator::Apply(m, records.get());
      }
      durable_ = std::move(records);
      const bool may_go_back = scenario_->store_goes_back && ForgetsPlansOnly(*before, *durable_);
      before_ = may_go_back ? before : nullptr;
      before_digest_ = before_ != nullptr ? DigestOf(*before_) : 0;
      CheckState(*before);
    } else if (const auto* to_peer = std::get_if<coordinator::ToPeer>(&action)) {
      SendToPeer(*to_peer);
    } else if (const auto* order = std::get_if<coordinator::OrderRing>(&action)) {
      answer = coordinator::Solve(*order);
    } else {
      CloseSession(std::get<coordinator::CloseSession>(action).session.value());
    }
  }
  // The answer comes at once. What could happen while the core waits for it could as well happen
  // before the core asks.
  if (answer) StepCoordinator(*answer);
}

void ExploreState::CloseSession(uint64_t session) {
  for (StreamState& stream : streams_) {
    if (stream.session != session || !stream.live) continue;
    stream.live = false;
    stream.not_before = now_ + kPause;
    if (now_ >= stream.dead_until) stream.to_peer.push_back(PackEnd());
  }
}

void ExploreState::SendToPeer(const coordinator::ToPeer& action) {
  int i = 0;
  while (i < peers() && coordinator::SessionId(streams_[i].session) != action.session) ++i;
  control::CoordinatorMessage message = action.message;
  const auto record = durable_->groups.find(TheGroup());
  if (auto* prepare = std::get_if<control::PrepareEpoch>(&message)) {
    if (record == durable_->groups.end() || record->second.highest < prepare->epoch) {
      Checker::Fail("PrepareEpoch of epoch " + ToString(prepare->epoch) + " is not durable");
    }
    CheckPrepare(*prepare);
    if (planted_ == Planted::kRingDiffers && i == 1) {
      std::reverse(prepare->members.begin(), prepare->members.end());
    }
  } else if (auto* commit = std::get_if<control::CommitEpoch>(&message)) {
    if (record == durable_->groups.end() || record->second.committed < commit->epoch) {
      Checker::Fail("CommitEpoch of epoch " + ToString(commit->epoch) + " is not durable");
    }
    committed_.insert(commit->epoch.value());
    if (planted_ == Planted::kCancelForgotten)
      cancel_forgotten_.Forge(static_cast<uint64_t>(i), commit);
    if (planted_ == Planted::kCommitLost && i == 0 && !commit->fates.empty()) return;
    if (planted_ == Planted::kFateFlipped && i == 1) {
      for (control::OpFate& fate : commit->fates) {
        fate.fate =
            fate.fate == control::Fate::kRedo ? control::Fate::kAbort : control::Fate::kRedo;
      }
    }
  }
  if (i == peers() || !streams_[i].live || Silent(i)) return;
  const std::string bytes = control::Serialize(message);
  auto parsed = control::ParseCoordinatorMessage(bytes);
  if (!parsed.ok()) {
    Checker::Fail("a message of the coordinator is refused: " +
                  std::string(parsed.status().message()));
  }
  Say("coordinator -> " + NameOf(i) + "  " + (trace_ ? Describe(message) : ""));
  streams_[i].to_peer.push_back(Pack(*std::move(parsed), HashOf(bytes, 1)));
}

void ExploreState::SendToCoordinator(int i, const control::PeerMessage& said) {
  StreamState& stream = streams_[i];
  if (!stream.peer_up || !stream.live || Silent(i)) return;
  control::PeerMessage message = said;
  Withhold(planted_, "c" + std::to_string(starts_), &message);
  if (auto* const hello = std::get_if<control::Hello>(&message)) {
    if (scenario_->signs) hello->key = IdentityOf(i).public_key();
  }
  if (const auto* dispute = std::get_if<control::Dispute>(&message)) {
    Checker::Fail(NameOf(i) + " and " + ToString(dispute->peer) +
                  " have come to different verdicts about " + dispute->what);
  }
  if (planted_ == Planted::kCancelForgotten) {
    cancel_forgotten_.Note(static_cast<uint64_t>(i), message);
  }
  const std::string bytes = control::Serialize(message);
  auto parsed = control::ParsePeerMessage(bytes);
  if (!parsed.ok()) {
    Checker::Fail("a message of " + NameOf(i) +
                  " is refused: " + std::string(parsed.status().message()));
  }
  if (std::holds_alternative<control::Heartbeat>(message)) {
    // Heartbeats are sent when time passes. With nothing in the queue before it, a heartbeat
    // arrives at once: its arrival needs no state of its own.
    if (stream.to_coordinator.empty() && coordinator_) {
      StepCoordinator(
          coordinator::FromPeer{coordinator::SessionId(stream.session), *std::move(parsed)});
      return;
    }
  }
  Say(NameOf(i) + " -> coordinator  " + (trace_ ? Describe(message) : ""));
  stream.to_coordinator.push_back(Pack(*std::move(parsed), HashOf(bytes, 2), stream.session));
}

// ------------------------------------------------------------------------------ a peer

const peerd::PeerCore& ExploreState::CoreOf(int i) const {
  return turning_peer_ == i ? turning_->core() : peers_[i]->engine->core();
}

void ExploreState::Turn(int i, const std::function<void(peerd::Engine*)>& what,
                        std::optional<peerd::Event> due) {
  Peer& peer = Write(i);
  Ports ports(this, i, std::move(due));
  std::shared_ptr<peerd::Engine> engine = peer.engine->Clone(ports.all());
  if (IsChecked(peer.digest) && engine->Digest() != peer.digest) {
    Checker::Fail("Engine::Clone() makes another engine");
  }
  turning_ = engine.get();
  turning_peer_ = i;
  what(engine.get());
  engine->Turn();
  turning_ = nullptr;
  turning_peer_ = -1;
  if (crashed_) return CrashPeer(i, Kind::kCrashPeer);
  peer.digest = engine->Digest();
  peer.engine = std::move(engine);
}

int ExploreState::MemberOf(peerd::LocalId local) const {
  return static_cast<int>(local.value()) - 1;
}

void ExploreState::Answered(bool* open, const char* what, int m) {
  Say("t" + std::to_string(m + 1) + " has its answer: " + what);
  if (!*open && !members_[m].dead) {
    Checker::Fail("t" + std::to_string(m + 1) + ": " + what + " is answered and was not asked");
  }
  *open = false;
}

void ExploreState::EnterWorld(int m, const peerd::World& world) {
  Member& member = members_[m];
  const auto epoch = epochs_.find(world.epoch.value());
  if (epoch == epochs_.end() || !committed_.contains(world.epoch.value())) {
    Checker::Fail("t" + std::to_string(m + 1) + " is in epoch " + ToString(world.epoch) +
                  ", which was not committed");
  }
  const uint64_t boundary = epoch->second->boundary.value();
  if (boundary == member.boundary) {
    ++member.steps;
  } else {
    member.boundary = boundary;
    member.steps = 0;
    member.rounds.clear();
  }
  const auto step = epochs_.find(world.step.epoch.value());
  if (step == epochs_.end() || !committed_.contains(world.step.epoch.value()) ||
      world.step.rank >= step->second->members.size() ||
      step->second->members[world.step.rank].member != world.member ||
      step->second->members.size() != world.step.size) {
    Checker::Fail("t" + std::to_string(m + 1) + " is told a wrong world of its boundary");
  }
  member.member = world.member.value();
  CheckMembers(m);
}

void ExploreState::CheckMembers(int m) {
  const auto view = CoreOf(scenario_->members[m].peer).GetMembers(LocalOf(m));
  if (!view.epoch) return;
  std::vector<MemberId> expected;
  for (const auto& info : epochs_.at(view.epoch.value())->members) expected.push_back(info.member);
  if (expected != view.members) {
    Checker::Fail("t" + std::to_string(m + 1) + " sees other members in epoch " +
                  ToString(view.epoch) + " than were prepared");
  }
}

void ExploreState::CheckPrepare(const control::PrepareEpoch& prepare) {
  const auto [it, fresh] = epochs_.try_emplace(prepare.epoch.value());
  if (fresh) {
    it->second = std::make_shared<control::PrepareEpoch>(prepare);
    return;
  }
  control::PrepareEpoch known = *it->second;
  known.cause = prepare.cause;
  if (known != prepare) {
    Checker::Fail("epoch " + ToString(prepare.epoch) + " is used twice");
  }
}

// ------------------------------------------------------------------------------ ops

ExploreState::Post& ExploreState::PostOf(const peerd::PostRef& post) {
  return members_[MemberOf(post.local)].posts.at(post.call);
}

uint64_t ExploreState::InputsOf(const std::vector<peerd::PostRef>& posts) {
  uint64_t sum = 0;
  for (const peerd::PostRef& post : posts) {
    const Post& known = PostOf(post);
    if (known.buffer != known.input) {
      Checker::Fail("an input is sent that is not as it was posted");
    }
    const Act& act = ActOf(MemberOf(post.local), known);
    sum += known.buffer * std::max<uint64_t>(1, act.weight);
  }
  return sum;
}

// What this peer gives to a one-shot op: its inputs, or those that belong to a part.
uint64_t ExploreState::PayloadOf(const OpDesc& desc, const std::vector<peerd::PostRef>& posts,
                                 const std::vector<peerd::CutOwner>& cuts) {
  if (Reduces(desc.kind)) return InputsOf(posts);
  std::set<int> owners;
  for (const peerd::CutOwner& cut : cuts) {
    if (cut.post >= 0) owners.insert(cut.post);
  }
  uint64_t sum = 0;
  for (const int owner : owners) sum += InputsOf({posts.at(static_cast<size_t>(owner))});
  return sum;
}

// The core says by `cuts` who gives what to whom. The checks know it from the kind and the root.
void ExploreState::Start(int i, const peerd::StartAttempt& start) {
  Attempt& attempt = Write(i).attempts[start.ordinal];
  attempt = Attempt();
  attempt.attempt = start.attempt;
  attempt.posts = start.posts;
  const OpKind kind = start.desc.kind;
  attempt.in_place = kind == OpKind::kAllReduce || kind == OpKind::kBarrier;
  const auto peer_at = [&](int position) {
    return IndexOf(start.ring.at(static_cast<size_t>(position)));
  };
  // `from` gives `part` to `to`; the part is known at `from`.
  const auto give = [&](int from, int to, uint64_t part) {
    if (to == i) attempt.gets = true;
    if (to == i && from != i) attempt.missing.insert(from);
    if (from == i) attempt.parts[to] += part;
  };
  if (Reduces(kind)) {
    const uint64_t own = InputsOf(start.posts);
    for (const PeerId from : start.ring) {
      for (const PeerId to : start.ring) {
        const bool gets =
            kind != OpKind::kReduce || IndexOf(to) == peer_at(start.cuts.at(0).position);
        if (gets) give(IndexOf(from), IndexOf(to), own);
      }
    }
  }
  for (const peerd::CutOwner& cut : start.cuts) {
    if (Reduces(kind) || start.result) break;
    const uint64_t part =
        cut.post < 0 ? 0 : InputsOf({start.posts.at(static_cast<size_t>(cut.post))});
    if (IsDirect(kind)) {
      give(peer_at(cut.position), peer_at(cut.to_position), part);
      continue;
    }
    for (const PeerId to : start.ring) give(peer_at(cut.position), IndexOf(to), part);
  }
  if (const auto own = attempt.parts.find(i); own != attempt.parts.end()) {
    attempt.sum = own->second;
  }
  if (start.algorithm == Algorithm::kOneShot) {
    attempt.sum = PayloadOf(start.desc, start.posts, start.cuts);
    for (const std::string& payload : start.payloads) attempt.sum += Value(payload);
    if (start.result) attempt.sum = Value(*start.result);
    attempt.gets = attempt.gets || start.result;
    attempt.missing.clear();
    attempt.one_shot = true;
    attempt.bytes = start.desc.bytes();
  }
  // Only an all-reduce passes its sums on.
  attempt.mesh = start.algorithm == Algorithm::kMesh && attempt.in_place;
  if (attempt.mesh) attempt.unfinished = attempt.missing;
  Contribute(i, start.ordinal, /*finished=*/false);
}

// In a ring, the first part that arrives overwrites the buffers. In the mesh, the first finished
// part does. A peer finishes its own part when all inputs are there, and sends it to all.
void ExploreState::Contribute(int i, OpOrdinal ordinal, bool finished) {
  Attempt& attempt = Write(i).attempts.at(ordinal);
  if (!attempt.mesh || finished || attempt.missing.empty()) {
    for (const peerd::PostRef& post : attempt.posts) {
      if (attempt.gets)
        (attempt.in_place ? PostOf(post).buffer : PostOf(post).target) = attempt.sum;
    }
  }
  if (!attempt.missing.empty() || !attempt.unfinished.empty() || attempt.complete) return;
  attempt.complete = true;
  Write(i).local.push_back(
      PackEvent(peerd::AttemptComplete{TheGroup(), ordinal, attempt.attempt,
                                       attempt.one_shot ? Bytes(attempt.sum, attempt.bytes) : ""}));
}

void ExploreState::Credit(int i, const peerd::CreditAttempt& credit) {
  Attempt& attempt = Write(i).attempts.at(credit.ordinal);
  const int to = IndexOf(credit.peer);
  attempt.theirs[to] = credit.theirs;
  SendPart(i, attempt, to, /*finished=*/false);
  if (attempt.mesh && attempt.missing.empty()) SendPart(i, attempt, to, /*finished=*/true);
}

void ExploreState::SendPart(int i, const Attempt& attempt, int to, bool finished) {
  const auto part = attempt.parts.find(to);
  if (part == attempt.parts.end() || !PairOf(i, to).connected || EndPending(i, to)) return;
  const Data data{attempt.theirs.at(to), attempt.attempt, finished ? 0 : part->second, finished};
  const uint64_t hash = Digester()
                            .Add(uint64_t{finished ? 10u : 9u})
                            .Add(data.ordinal)
                            .Add(data.attempt)
                            .Add(data.value)
                            .value();
  DataTo(to, i).push_back(Pack(data, hash));
}

void ExploreState::DeliverData(int to, int from) {
  Queue& queue = DataTo(to, from);
  const Packet packet = queue.front();
  queue.erase(queue.begin());
  const Data& data = std::get<Data>(packet->what);
  const auto found = peers_[to]->attempts.find(data.ordinal);
  if (found == peers_[to]->attempts.end()) {
    if (data.attempt.value() >= peers_[to]->attempt_seen) {
      Checker::Fail(NameOf(to) + " gets a segment of " + NameOf(from) + " for " +
                    ToString(data.ordinal) + ", and has no place for it");
    }
    return;
  }
  const bool stale = found->second.stopped || found->second.attempt != data.attempt;
  if (stale && planted_ != Planted::kNoDetach) return;
  Attempt& attempt = Write(to).attempts.at(data.ordinal);
  (data.finished ? attempt.unfinished : attempt.missing).erase(from);
  attempt.sum += data.value;
  if (attempt.mesh && !data.finished && attempt.missing.empty()) {
    for (const auto& [peer, theirs] : attempt.theirs) SendPart(to, attempt, peer, true);
  }
  Contribute(to, data.ordinal, data.finished);
}

void ExploreState::Stop(int i, const peerd::StopAttempt& stop) {
  Attempt& attempt = Write(i).attempts.at(stop.ordinal);
  if (attempt.attempt != stop.attempt || attempt.stopped) {
    Checker::Fail("an attempt is stopped that does not run");
  }
  if (planted_ == Planted::kDoneWhileFrozen) {
    for (const auto& [peer, theirs] : attempt.theirs) {
      FrameHeader header;
      header.type = FrameType::kDone;
      header.group = TheGroup().group;
      header.op = theirs;
      header.attempt = stop.attempt;
      SendFrame(i, IdOf(peer), header, "");
    }
  }
  attempt.stopped = true;
  if (planted_ != Planted::kNoRestore) {
    for (const peerd::PostRef& post : attempt.posts) PostOf(post).buffer = PostOf(post).input;
  }
  Write(i).local.push_back(
      PackEvent(peerd::AttemptStopped{TheGroup(), stop.ordinal, stop.attempt}));
}

void ExploreState::Finish(int i, const peerd::FinishAttempt& finish) {
  Peer& peer = Write(i);
  const auto it = peer.attempts.find(finish.ordinal);
  if (finish.commit && (it == peer.attempts.end() || it->second.stopped || !it->second.complete)) {
    Checker::Fail("an op is committed whose result is not complete");
  }
  if (!finish.commit && it != peer.attempts.end() && !it->second.stopped) {
    Checker::Fail("an op ends whose attempt was not stopped");
  }
  if (it != peer.attempts.end()) peer.attempts.erase(it);
  if (finish.commit) {
    peer.local.push_back(PackEvent(peerd::AttemptFinished{TheGroup(), finish.ordinal}));
  }
}

void ExploreState::OnPostDone(const peerd::PostDone& done) {
  const int m = MemberOf(done.post.local);
  Member& member = members_[m];
  const std::string name = "t" + std::to_string(m + 1) + "'s op";
  const auto it = member.posts.find(done.post.call);
  if (it == member.posts.end()) Checker::Fail(name + " is answered twice");
  const Post post = it->second;
  member.posts.erase(it);
  OpSeen& seen = ops_[{post.boundary, post.tag, post.turn}];
  Say(name + " tag " + std::to_string(post.tag) + " ends: " + Describe(done.outcome));
  const Act& act = ActOf(m, post);
  if (!done.outcome.ok()) {
    if (post.buffer != post.input) Checker::Fail(name + " failed and its input is not as posted");
    if (done.outcome.code == Code::kEvicted || done.outcome.code == Code::kUnavailable) return;
    if (done.outcome.code == Code::kInvalidArgument && seen.refused) {
      const Epoch now = CoreOf(scenario_->members[m].peer).GetMembers(LocalOf(m)).epoch;
      seen.aborters.insert(MemberId(member.member));
      seen.abort_epoch = std::max(seen.abort_epoch, now.value());
      return CheckOneOutcome(seen, name);
    }
    if (done.outcome.code != Code::kAborted) {
      Checker::Fail(name + " ended as " + Describe(done.outcome));
    }
    if (!post.abort_on_fault) return CheckAborted(m, post, &seen);
    seen.aborted.insert(done.info.epoch.value());
    const bool gives_up = act.gives_up;
    if (gives_up) seen.given_up = true;
    if (!gives_up && !member.dead) member.again.push_back(post.act);
  } else {
    ++ops_ok_;
    CheckSucceeded(m, post, done.info, &seen);
  }
  if (seen.result && (seen.given_up || seen.aborted.contains(seen.result_epoch))) {
    Checker::Fail(name + " is aborted at one member and succeeded at another");
  }
  CheckOneOutcome(seen, name);
}

std::vector<int> ExploreState::ParticipantsOf(const Act& act, const Post& post,
                                              uint64_t epoch) const {
  std::vector<int> participants;
  const auto known = epochs_.find(epoch);
  if (known == epochs_.end()) Checker::Fail("an op ended in an unknown epoch");
  for (const auto& info : known->second->members) {
    if (info.joined.value() > post.boundary) continue;
    for (int other = 0; other < static_cast<int>(members_.size()); ++other) {
      const bool in_set = act.op == OpKind::kSendRecv
                              ? other == act.root || other == act.receiver
                              : act.set.empty() || std::find(act.set.begin(), act.set.end(),
                                                             other) != act.set.end();
      // The name identifies the member, because a trainer that does not know its number yet takes
      // part as well.
      if (in_set && info.name == "t" + std::to_string(other + 1)) participants.push_back(other);
    }
  }
  return participants;
}

// What all members get that get anything; of an op in parts, it stands for their part.
uint64_t ExploreState::ResultOf(const Act& act, const std::vector<int>& participants) const {
  const bool of_root =
      act.op == OpKind::kBroadcast || act.op == OpKind::kScatter || act.op == OpKind::kSendRecv;
  uint64_t result = 0;
  for (const int other : participants) {
    if (of_root && other != act.root) continue;
    for (const Act& theirs : scenario_->members[other].acts) {
      if (theirs.kind != Act::Kind::kPost || theirs.tag != act.tag) continue;
      result += InputOf(other, theirs);
      break;
    }
  }
  return result;
}

void ExploreState::CheckSucceeded(int m, const Post& post, const peerd::OpInfo& info,
                                  OpSeen* seen) {
  const std::string name = "t" + std::to_string(m + 1) + "'s op";
  const Act& act = ActOf(m, post);
  const std::vector<int> participants = ParticipantsOf(act, post, info.epoch.value());
  uint64_t everybody = 0;
  std::vector<MemberId> members;
  for (const int other : participants) everybody += InputOf(other);
  for (const auto& each : epochs_.at(info.epoch.value())->members) {
    for (const int other : participants) {
      if (each.name == "t" + std::to_string(other + 1)) members.push_back(each.member);
    }
  }
  const bool in_place = act.op == OpKind::kAllReduce || act.op == OpKind::kBarrier;
  const bool gets = TargetOf(act.op, act.root == m) != Extent::kNone;
  const uint64_t result = in_place ? post.buffer : post.target;
  if ((gets && result != ResultOf(act, participants)) || info.members != members) {
    Checker::Fail(name + " is not the result over its participants");
  }
  if (!in_place && post.buffer != post.input) Checker::Fail(name + " has written to its source");
  if ((seen->posted & everybody) != everybody) {
    Checker::Fail(name + " succeeded without somebody who did not post it");
  }
  const auto takes_part = [&](int other) {
    return std::find(participants.begin(), participants.end(), other) != participants.end();
  };
  if ((act.root >= 0 && !takes_part(act.root)) ||
      (act.receiver >= 0 && !takes_part(act.receiver))) {
    Checker::Fail(name + " succeeded without its root or its partner");
  }
  const bool parts_for_all =
      act.op == OpKind::kReduceScatter || act.op == OpKind::kScatter || act.op == OpKind::kAllToAll;
  if (parts_for_all && participants.size() != post.world) {
    Checker::Fail(name + " succeeded with another number of members than it is laid out for");
  }
  CheckResult(m, everybody, info, seen);
}

// The op ended Aborted, and not because of on_fault=abort.
void ExploreState::CheckAborted(int m, const Post& post, OpSeen* seen) {
  const std::string name = "t" + std::to_string(m + 1) + "'s op";
  const Act& act = ActOf(m, post);
  Member& member = members_[m];
  const Epoch now = CoreOf(scenario_->members[m].peer).GetMembers(LocalOf(m)).epoch;
  const std::vector<int> participants = ParticipantsOf(act, post, now.value());
  const auto gone = [&](int other) {
    return other >= 0 &&
           std::find(participants.begin(), participants.end(), other) == participants.end();
  };
  const bool all_needed =
      act.op == OpKind::kReduceScatter || act.op == OpKind::kScatter || act.op == OpKind::kAllToAll;
  const bool absent = gone(act.root) || gone(act.receiver);
  const bool unfit = IsInParts(act.op) &&
                     (seen->worlds.size() > 1 || (all_needed && participants.size() != post.world));
  const bool passed = act.beside && member.boundary > post.boundary;
  if (!absent && !unfit && !passed && seen->cancels == 0) {
    Checker::Fail(name + " is aborted, and nobody has cancelled it, and it fits");
  }
  seen->aborters.insert(MemberId(member.member));
  seen->abort_epoch = std::max(seen->abort_epoch, now.value());
  CheckOneOutcome(*seen, name);
  if (member.dead || absent || act.gives_up) return;
  if (member.boundary == post.boundary) ++member.rounds[post.act];
  member.again.push_back(post.act);
}

// If an op ends in two ways, no member that knows the older outcome may be in the epoch of the
// newer one: a result of a small op may have died with its only holder.
void ExploreState::CheckOneOutcome(const OpSeen& seen, const std::string& name) const {
  if (!seen.result || seen.aborters.empty()) return;
  bool both = seen.abort_epoch == seen.result_epoch;
  const std::set<MemberId>& older =
      seen.abort_epoch > seen.result_epoch ? seen.holders : seen.aborters;
  for (const auto& known : epochs_.at(std::max(seen.abort_epoch, seen.result_epoch))->members) {
    both = both || older.contains(known.member);
  }
  if (both) Checker::Fail(name + " is aborted at one member and succeeded at another");
}

// If there are two results, no member with the older result may be in the epoch of the newer
// result.
void ExploreState::CheckResult(int m, uint64_t result, const peerd::OpInfo& info, OpSeen* seen) {
  const uint64_t epoch = info.epoch.value();
  std::set<MemberId> older{MemberId(members_[m].member)};
  if (!seen->result || *seen->result == result) {
    seen->holders.merge(older);
  } else {
    if (epoch >= seen->result_epoch) seen->holders.swap(older);
    for (const auto& known : epochs_.at(std::max(epoch, seen->result_epoch))->members) {
      if (older.contains(known.member)) {
        Checker::Fail("t" + std::to_string(m + 1) + "'s op has two results");
      }
    }
    if (epoch < seen->result_epoch) return;
  }
  seen->result = result;
  seen->result_epoch = epoch;
}

// ------------------------------------------------------------------------------ shared state

void ExploreState::BeginSync(int m, bool with_step) {
  Member& member = members_[m];
  member.sync_again = false;
  member.sync_open = true;
  ++member.syncs;
  member.step_open = member.step_open || with_step;
  const peerd::StateSync sync;
  Turn(scenario_->members[m].peer, [&](peerd::Engine* engine) {
    if (with_step) {
      engine->OnStep(LocalOf(m), &sync);
    } else {
      engine->OnSync(LocalOf(m), sync);
    }
  });
}

peerd::SyncRequest ExploreState::RequestOf(int m) {
  Member& member = members_[m];
  peerd::SyncRequest sync;
  sync.revision = member.revision;
  sync.manifest = kManifest;
  sync.state = HashOfState(member.state);
  return sync;
}

void ExploreState::Serve(int i, const peerd::ServeState& serve) {
  const int m = MemberOf(serve.local);
  const Member& member = members_[m];
  const uint64_t state = member.fetched != 0 ? member.fetched : member.state;
  if (serve.state != HashOfState(state)) {
    Checker::Fail("t" + std::to_string(m + 1) + " serves a state that it does not have");
  }
  if (!Write(i).served.emplace(m, std::pair(serve.member, state)).second) {
    Checker::Fail("t" + std::to_string(m + 1) + " serves two states");
  }
}

bool ExploreState::HasSource(int i, const Fetch& fetch) const {
  return std::any_of(fetch.sources.begin(), fetch.sources.end(),
                     [&](const control::SyncSource& source) {
                       const int other = IndexOf(source.peer);
                       if (!peers_[other]->engine || (other != i && !PairOf(i, other).connected))
                         return false;
                       const auto& served = peers_[other]->served;
                       return std::any_of(served.begin(), served.end(), [&](const auto& entry) {
                         return entry.second == std::pair(source.member, fetch.state);
                       });
                     });
}

void ExploreState::StartFetch(int i, const peerd::StartTransfer& start) {
  Fetch fetch{start.state.high, start.sources, now_ + kStall};
  if (!Write(i).fetches.emplace(MemberOf(start.local), std::move(fetch)).second) {
    Checker::Fail("a transfer is started while another one is on");
  }
}

// The transfer writes nothing from here on. The core hears of its end later.
void ExploreState::EndFetch(int i, int m, bool ok) {
  const Fetch fetch = Write(i).fetches.at(m);
  Write(i).fetches.erase(m);
  peerd::TransferEnded ended{LocalOf(m)};
  if (Write(i).served.contains(m)) {
    Checker::Fail("t" + std::to_string(m + 1) + " fetches while others may ask for its state");
  }
  if (ok) {
    members_[m].fetched = fetch.state;
    ended.bytes = 1;
    ended.sources = {fetch.sources.front().member};
  } else {
    ended.outcome = {Code::kAborted, "broken off"};
  }
  Write(i).local.push_back(PackEvent(std::move(ended)));
}

// Checks and notes the state that was made durable just now.
void ExploreState::CheckState(const coordinator::Records& before) {
  static const coordinator::GroupRecord kNone;
  const auto of = [](const coordinator::Records& records) -> const coordinator::GroupRecord& {
    const auto group = records.groups.find(TheGroup());
    return group == records.groups.end() ? kNone : group->second;
  };
  const coordinator::GroupRecord& old = of(before);
  const coordinator::GroupRecord& now = of(*durable_);
  if (!now.state || now.state == old.state) return;
  if (old.state && now.state->revision < old.state->revision) Checker::Fail("the revision falls");
  agreed_.insert({now.state->revision, now.state->state});
  for (const coordinator::MemberRecord& member : now.members) {
    const coordinator::MemberRecord* const known = FindMember(old, member.member);
    if (known != nullptr && known->syncs < member.syncs) {
      committed_syncs_.insert({member.member, member.syncs});
    }
  }
}

void ExploreState::OnSyncDone(const peerd::SyncDone& ended) {
  const int m = MemberOf(ended.local);
  Member& member = members_[m];
  const std::string name = "t" + std::to_string(m + 1);
  Answered(&member.sync_open, "sync", m);
  const uint64_t fetched = std::exchange(member.fetched, 0);
  if (peers_[scenario_->members[m].peer]->served.contains(m)) {
    Checker::Fail(name + " has its answer, and others may still ask for its state");
  }
  if (!ended.outcome.ok()) {
    if (member.dead || ended.outcome.code == Code::kEvicted ||
        ended.outcome.code == Code::kUnavailable) {
      return;
    }
    if (ended.outcome.code == Code::kAborted &&
        committed_syncs_.contains({MemberId(member.member), member.syncs})) {
      Checker::Fail(name + " is told that its sync failed, and it is committed");
    }
    if (ended.outcome.code != Code::kAborted) {
      Checker::Fail(name + "'s sync ended as " + Describe(ended.outcome));
    }
    member.sync_again = true;
    return;
  }
  ++syncs_ok_;
  if (fetched != 0) member.state = fetched;
  if (ended.state != HashOfState(member.state) || !brought_.contains(member.state)) {
    Checker::Fail(name + " holds something else than was agreed on");
  }
  if (!agreed_.contains({ended.revision, ended.state})) {
    Checker::Fail(name + " is told of revision " + std::to_string(ended.revision) +
                  ", which is not durable");
  }
  member.revision = ended.revision + 1;
}

// ------------------------------------------------------------------------------ links

bool ExploreState::PortClosed(int i) const { return i == peers() - 1 && closed_attempts_ > 0; }

void ExploreState::TryPeer(int i, const GroupKey& group, uint64_t trial, PeerId peer,
                           Tick deadline) {
  LH_CHECK(turning_ != nullptr && turning_peer_ == i);
  const int other = IndexOf(peer);
  const bool reached = peers_[other]->engine && !PairOf(i, other).cut && !PortClosed(other);
  if (PortClosed(other)) {
    --closed_attempts_;
    Say(NameOf(i) + " does not reach " + ToString(peer));
    if (scenario_->drops) {
      Write(i).tries[trial] = {group, peer, deadline};
      return;
    }
  }
  turning_->OnPeerTried(group, trial, peer, reached ? "" : "no answer in time");
}

void ExploreState::SendFrame(int from, PeerId to, const FrameHeader& header, std::string payload) {
  const int other = IndexOf(to);
  Say(NameOf(from) + " -> " + ToString(to) + "  " + (trace_ ? Describe(header) : ""));
  if (!PairOf(from, other).connected || EndPending(from, other)) return;
  const auto bytes = Encode(header);
  const uint64_t hash =
      HashOf(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()) + payload, 3);
  ControlTo(other, from).push_back(Pack(Frame{header, std::move(payload)}, hash));
}

void ExploreState::OpenLinks(int i, Epoch epoch, const std::vector<peerd::LinkRequest>& links,
                             Tick deadline) {
  Peer& peer = Write(i);
  peer.tokens.insert(epoch.value());
  for (const peerd::LinkRequest& wanted : links) {
    const int other = IndexOf(wanted.peer);
    const int relay = wanted.relay ? IndexOf(wanted.relay) : -1;
    peer.requests.erase(other);
    // This end's view. The link may have ended, and this end does not know yet.
    const bool silent = peer.silent.contains(other);
    Pair& pair = PairOf(i, other);
    const bool stands = pair.connected || EndPending(i, other) || silent;
    if (stands && pair.relay != relay) {
      // The link is given up for a link that goes another way.
      if (std::exchange(pair.connected, false)) ControlTo(other, i).push_back(PackEnd());
      ControlTo(i, other).clear();
      DataTo(i, other).clear();
      ControlTo(i, other).push_back(PackEnd());
      peer.silent.erase(other);
      peer.requests[other] = {epoch, relay, deadline};
    } else if (stands) {
      Queue& queue = ControlTo(i, other);
      queue.insert(queue.begin(), PackEvent(peerd::LinkUp{TheGroup().run, IdOf(other)}));
    } else {
      peer.requests[other] = {epoch, relay, deadline};
    }
  }
}

void ExploreState::KeepLinks(int i, Epoch epoch, const std::vector<PeerId>& keep) {
  Peer& peer = Write(i);
  std::set<int> kept;
  for (const PeerId id : keep) kept.insert(IndexOf(id));
  std::erase_if(peer.tokens, [&](uint64_t token) { return token < epoch.value(); });
  std::erase_if(peer.requests, [&](const auto& entry) { return !kept.contains(entry.first); });
  std::erase_if(peer.silent, [&](const auto& entry) { return !kept.contains(entry.first); });
  for (int other = 0; other < peers(); ++other) {
    if (other == i || kept.contains(other)) continue;
    Pair& pair = PairOf(i, other);
    ControlTo(i, other).clear();
    DataTo(i, other).clear();
    if (!std::exchange(pair.connected, false)) continue;
    // Frames in flight still arrive.
    ControlTo(other, i).push_back(PackEnd());
  }
}

// A link is built as soon as one end asks for it and the other end knows the token.
void ExploreState::Connect() {
  for (int a = 0; a < peers(); ++a) {
    for (int b = a + 1; b < peers(); ++b) {
      Pair& pair = PairOf(a, b);
      if (pair.connected || !peers_[a]->engine || !peers_[b]->engine) continue;
      const LinkRequest* asked = nullptr;
      for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
        const auto request = peers_[from]->requests.find(to);
        if (request == peers_[from]->requests.end()) continue;
        if (CanConnect(from, to, request->second)) asked = &request->second;
      }
      if (asked == nullptr) continue;
      pair.connected = true;
      pair.relay = asked->relay;
      for (const auto& [end, other] : {std::pair(a, b), std::pair(b, a)}) {
        Write(end).requests.erase(other);
        ControlTo(end, other).push_back(PackEvent(peerd::LinkUp{TheGroup().run, IdOf(other)}));
      }
      Say("link " + NameOf(a) + " " + NameOf(b) + " stands");
    }
  }
}

bool ExploreState::CanConnect(int from, int to, const LinkRequest& request) const {
  const uint64_t token = request.epoch.value();
  if (!peers_[to]->tokens.contains(token)) return false;
  // The older member dials. So a newcomer with a closed port gets no link at all.
  if (PortClosed(from) || PortClosed(to)) return false;
  // If the other end asks for a link too, both must ask for the same relay.
  const auto theirs = peers_[to]->requests.find(from);
  if (theirs != peers_[to]->requests.end() && theirs->second.relay != request.relay) return false;
  const int relay = request.relay;
  if (relay < 0) return !PairOf(from, to).cut;
  return peers_[relay]->engine && peers_[relay]->tokens.contains(token) &&
         !PairOf(from, relay).cut && !PairOf(relay, to).cut;
}

// ------------------------------------------------------------------------------ faults

namespace {

// Frames in flight are lost. Reports of this end's own transport stay.
template <class Queue>
void LoseFrames(Queue* queue) {
  std::erase_if(*queue, [](const auto& packet) { return packet->frame(); });
}

}  // namespace

void ExploreState::BreakLink(int a, int b, bool lost) {
  PairOf(a, b).connected = false;
  for (const auto& [end, other] : {std::pair(a, b), std::pair(b, a)}) {
    if (lost) {
      LoseFrames(&ControlTo(end, other));
      DataTo(end, other).clear();
    }
    ControlTo(end, other).push_back(PackEnd());
  }
}

void ExploreState::CutPair(int a, int b) {
  PairOf(a, b).cut = true;
  const auto silence = [this](int x, int y) {
    PairOf(x, y).connected = false;
    for (const auto& [end, other] : {std::pair(x, y), std::pair(y, x)}) {
      LoseFrames(&ControlTo(end, other));
      DataTo(end, other).clear();
      Write(end).silent[other] = now_ + Millis(kDetectMs);
    }
  };
  for (int x = 0; x < peers(); ++x) {
    for (int y = x + 1; y < peers(); ++y) {
      const Pair& pair = PairOf(x, y);
      if (!pair.connected) continue;
      const int relay = pair.relay;
      const bool over = relay < 0 ? std::pair(x, y) == std::pair(std::min(a, b), std::max(a, b))
                                  : PairOf(x, relay).cut || PairOf(relay, y).cut;
      if (over) silence(x, y);
    }
  }
}

// The relay has died. The links through it end.
void ExploreState::LoseCarried(int relay, Kind how) {
  for (int a = 0; a < peers(); ++a) {
    for (int b = a + 1; b < peers(); ++b) {
      Pair& pair = PairOf(a, b);
      if (pair.relay != relay || !std::exchange(pair.connected, false)) continue;
      for (const auto& [end, other] : {std::pair(a, b), std::pair(b, a)}) {
        if (how != Kind::kCrashPeer) {
          LoseFrames(&ControlTo(end, other));
          DataTo(end, other).clear();
        }
        if (how == Kind::kCrashPeerSilent) {
          Write(end).silent[other] = now_ + Millis(kDetectMs);
        } else {
          ControlTo(end, other).push_back(PackEnd());
        }
      }
    }
  }
}

void ExploreState::EndOfStream(int i, bool lost) {
  StreamState& stream = streams_[i];
  if (!std::exchange(stream.live, false)) return;
  if (lost) stream.to_coordinator.clear();
  if (!lost || stream.opened) stream.to_coordinator.push_back(PackEnd(stream.session));
}

void ExploreState::BreakStream(int i, bool lost) {
  EndOfStream(i, lost);
  StreamState& stream = streams_[i];
  if (lost) stream.to_peer.clear();
  stream.to_peer.push_back(PackEnd());
  stream.silent_at = kNever;
}

// Both ends give the stream up after the lease. After that the network works again. Messages in
// flight are lost.
void ExploreState::Silence(int i) {
  StreamState& stream = streams_[i];
  stream.dead_until = now_ + kSilence;
  stream.to_coordinator.clear();
  stream.to_peer.clear();
  if (stream.peer_up) stream.silent_at = now_ + kLease;
}

void ExploreState::CrashPeer(int i, Kind how) {
  Say(NameOf(i) + " dies");
  StreamState& stream = streams_[i];
  if (how == Kind::kCrashPeerSilent) {
    stream.live = false;
  } else {
    EndOfStream(i, how == Kind::kCrashPeerLost);
  }
  stream.peer_up = false;
  stream.silent_at = kNever;
  stream.to_peer.clear();
  for (int other = 0; other < peers(); ++other) {
    if (other == i) continue;
    ControlTo(i, other).clear();
    DataTo(i, other).clear();
    if (!std::exchange(PairOf(i, other).connected, false)) continue;
    if (how == Kind::kCrashPeerLost) {
      LoseFrames(&ControlTo(other, i));
      DataTo(other, i).clear();
    }
    if (how == Kind::kCrashPeerSilent) {
      Write(other).silent[i] = now_ + Millis(kDetectMs);
    } else {
      ControlTo(other, i).push_back(PackEnd());
    }
  }
  LoseCarried(i, how);
  peers_[i] = std::make_shared<Peer>();
  for (size_t m = 0; m < members_.size(); ++m) {
    if (scenario_->members[m].peer != i) continue;
    members_[m].dead = true;
    members_[m].posts.clear();
  }
}

// The peer's queues stay: what the trainer posted is still mapped at the peer.
void ExploreState::KillTrainer(int m) {
  members_[m].dead = true;
  Turn(scenario_->members[m].peer,
       [&](peerd::Engine* engine) { engine->OnGone(LocalOf(m), "its connection broke"); });
}

void ExploreState::CrashCoordinator(bool lost) {
  Say("coordinator dies");
  coordinator_.reset();
  coordinator_digest_ = 0;
  for (StreamState& stream : streams_) {
    stream.live = false;
    stream.opened = false;
    stream.to_coordinator.clear();
    stream.late_end.clear();
    if (!stream.peer_up) continue;
    const bool ended =
        !stream.to_peer.empty() && std::holds_alternative<End>(stream.to_peer.back()->what);
    if (lost) stream.to_peer.clear();
    if (lost || !ended) stream.to_peer.push_back(PackEnd());
    stream.silent_at = kNever;
  }
}

void ExploreState::GoBack() {
  durable_ = std::exchange(before_, nullptr);
  before_digest_ = 0;
  // Numbers that only peers remember may be given out again.
  const auto group = durable_->groups.find(TheGroup());
  const uint64_t highest = group == durable_->groups.end() ? 0 : group->second.highest.value();
  std::erase_if(epochs_, [&](const auto& entry) { return entry.first > highest; });
}

void ExploreState::Reconnect(int i, bool first) {
  StreamState& stream = streams_[i];
  if (first) {
    // Messages on the old stream are lost. Its end arrives late.
    for (const Packet& packet : Emptied(&stream.to_coordinator)) {
      if (std::holds_alternative<End>(packet->what)) stream.late_end.push_back(packet);
    }
  }
  stream.session = ++sessions_;
  stream.live = stream.peer_up = true;
  stream.opened = false;
  stream.to_coordinator.push_back(Pack(Opened{}, 78, stream.session));
  Turn(i, [](peerd::Engine* engine) { engine->OnStreamUp(); });
}

// ------------------------------------------------------------------------------ views

uint64_t ExploreState::Digest(bool faults) const {
  Digester digest;
  const auto add_queue = [&](const Queue& queue) {
    digest.Add(uint64_t{queue.size()});
    for (const Packet& packet : queue) digest.Add(packet->hash);
  };
  digest.Add(now_).Add(last_fault_).Add(coordinator_digest_).Add(starts_).Add(sessions_);
  digest.Add(uint64_t{evict_done_}).Add(uint64_t{measure_done_});
  digest.Add(uint64_t(closed_attempts_)).Add(uint64_t{more_faults_});
  const bool silence = first_fault_ == Kind::kSilence || first_fault_ == Kind::kIsolate;
  digest.Add(silence ? static_cast<uint64_t>(*first_fault_) : uint64_t{first_fault_.has_value()});
  for (int i = 0; i < peers(); ++i) {
    const Peer& peer = *peers_[i];
    digest.Add(uint64_t{peer.engine != nullptr}).Add(peer.digest);
    add_queue(peer.local);
    for (const auto& [ordinal, attempt] : peer.attempts) {
      digest.Add(ordinal).Add(attempt.attempt).Add(attempt.sum);
      digest.Add(uint64_t{attempt.stopped} << 1 | uint64_t{attempt.complete});
      for (const int missing : attempt.missing) digest.Add(uint64_t(missing));
      for (const int other : attempt.unfinished)
        digest.Add(uint64_t{100} + static_cast<uint64_t>(other));
    }
    for (const uint64_t token : peer.tokens) digest.Add(token);
    for (const auto& [other, request] : peer.requests) {
      digest.Add(uint64_t(other)).Add(request.epoch).Add(request.deadline);
      digest.Add(uint64_t(request.relay + 1));
    }
    for (const auto& [other, when] : peer.silent) digest.Add(uint64_t(other)).Add(when);
    for (const auto& [m, state] : peer.served) digest.Add(uint64_t(m)).Add(state.second);
    for (const auto& [trial, attempt] : peer.tries) digest.Add(trial).Add(attempt.deadline);
    for (const auto& [m, fetch] : peer.fetches) {
      digest.Add(uint64_t(m)).Add(fetch.state).Add(fetch.fails_at);
      for (const control::SyncSource& source : fetch.sources) digest.Add(source.member);
    }
    const StreamState& stream = streams_[i];
    digest.Add(stream.session).Add(std::max(stream.not_before, now_)).Add(stream.silent_at);
    digest.Add(std::max(stream.dead_until, now_));
    digest.Add(uint64_t{stream.live} | uint64_t{stream.peer_up} << 1 |
               uint64_t{stream.opened} << 2);
    add_queue(stream.to_coordinator);
    add_queue(stream.to_peer);
    add_queue(stream.late_end);
    for (int j = i + 1; j < peers(); ++j) {
      const Pair& pair = PairOf(i, j);
      digest.Add(uint64_t{pair.connected} | uint64_t{pair.cut} << 1);
      digest.Add(uint64_t(pair.relay + 1));
      for (const int end : {0, 1}) {
        add_queue(pair.control[end]);
        add_queue(pair.data[end]);
      }
    }
  }
  // The digest of the running coordinator includes the durable records.
  if (!coordinator_) digest.Add(DigestOf(*durable_));
  // The records before the last write matter only if a fault may bring them back.
  if (faults) digest.Add(before_digest_);
  for (const Member& member : members_) {
    digest.Add(uint64_t{member.next}).Add(member.boundary).Add(member.calls).Add(member.steps);
    digest.Add(uint64_t{member.dead} | uint64_t{member.gone} << 1 |
               uint64_t{member.join_open} << 2 | uint64_t{member.step_open} << 3 |
               uint64_t{member.leave_open} << 4 | uint64_t{member.joined} << 5 |
               uint64_t{member.sync_open} << 6 | uint64_t{member.sync_again} << 7);
    digest.Add(member.state).Add(member.fetched).Add(member.revision).Add(member.syncs);
    for (const size_t act : member.again) digest.Add(uint64_t{act});
    for (const auto& [act, rounds] : member.rounds) digest.Add(uint64_t{act}).Add(rounds);
    for (const auto& [call, post] : member.posts) {
      digest.Add(call).Add(post.buffer).Add(post.target).Add(post.world);
      digest.Add(uint64_t{post.cancelled});
    }
  }
  for (const auto& [name, op] : ops_) {
    for (const uint64_t part : name) digest.Add(part);
    digest.Add(op.result.value_or(0));
    digest.Add(op.result_epoch).Add(op.posted);
    for (const MemberId holder : op.holders) digest.Add(holder);
    for (const uint64_t epoch : op.aborted) digest.Add(epoch);
    digest.Add(uint64_t{op.given_up} | uint64_t{op.refused} << 1);
    digest.Add(op.cancels).Add(op.abort_epoch);
    for (const uint64_t world : op.worlds) digest.Add(world);
    for (const MemberId aborter : op.aborters) digest.Add(aborter);
  }
  for (const auto& [revision, state] : agreed_) digest.Add(revision).Add(state);
  for (const auto& [member, number] : committed_syncs_) digest.Add(member).Add(number);
  for (const auto& [epoch, prepare] : epochs_) {
    digest.Add(epoch).Add(uint64_t{committed_.contains(epoch)}).Add(prepare->boundary);
    for (const auto& member : prepare->members) digest.Add(member.member).Add(member.joined);
  }
  return digest.value();
}

std::string ExploreState::Text(const Move& move) const {
  const auto head = [](const Queue& queue) -> std::string {
    if (queue.empty()) return "nothing";
    const auto& what = queue.front()->what;
    if (std::holds_alternative<End>(what)) return "the end";
    if (std::holds_alternative<Opened>(what)) return "the beginning";
    if (std::holds_alternative<Data>(what)) return "data";
    if (const auto* m = std::get_if<control::PeerMessage>(&what)) return Describe(*m);
    if (const auto* m = std::get_if<control::CoordinatorMessage>(&what)) return Describe(*m);
    if (const auto* frame = std::get_if<Frame>(&what)) return Describe(frame->header);
    return std::visit(EventText(), std::get<peerd::Event>(what));
  };
  const std::string a = NameOf(move.a);
  const std::string b = NameOf(move.b);
  const std::string dies =
      move.crash_after == 0 ? "" : ", and dies after action " + std::to_string(move.crash_after);
  static constexpr const char* kActs[] = {"joins",  "posts",   "steps", "syncs",
                                          "leaves", "cancels", "waits", "is refused"};
  switch (move.kind) {
    case Kind::kToPeer:
      return a + " hears " + head(streams_[move.a].to_peer) + dies;
    case Kind::kToCoordinator:
      return "the coordinator hears of " + a + ": " + head(streams_[move.a].to_coordinator) + dies;
    case Kind::kLateEnd:
      return "the coordinator hears late that an old stream of " + a + " has ended" + dies;
    case Kind::kControl:
      return a + " gets " + head(ControlTo(move.a, move.b)) + dies;
    case Kind::kData:
      return a + " gets data of " + b;
    case Kind::kLocal:
      return a + " is told: " + head(peers_[move.a]->local) + dies;
    case Kind::kTransfer:
      return "t" + std::to_string(move.b + 1) + " has got all that it fetches";
    case Kind::kAct: {
      const Member& member = members_[move.a];
      if (!member.again.empty()) return "t" + std::to_string(move.a + 1) + " posts again";
      if (member.sync_again) return "t" + std::to_string(move.a + 1) + " syncs again";
      const Act& act = scenario_->members[move.a].acts[member.next];
      return "t" + std::to_string(move.a + 1) + " " + kActs[static_cast<int>(act.kind)];
    }
    case Kind::kOperator:
      return "the operator evicts t" + std::to_string(scenario_->evicted + 1);
    case Kind::kMeasure:
      return "all links are measured";
    case Kind::kRestart:
      return "the coordinator restarts";
    case Kind::kReconnect:
      return a + " attaches";
    case Kind::kReconnectFirst:
      return a + " attaches, and its old stream's end is noticed later";
    case Kind::kTime:
      return "time passes to " + std::to_string(NextDeadline().us / 1000) + " ms";
    case Kind::kCrashPeer:
      return a + " dies";
    case Kind::kCrashPeerLost:
      return a + " dies, and what it had sent is lost";
    case Kind::kCrashPeerSilent:
      return a + " dies silently";
    case Kind::kKillTrainer:
      return "t" + std::to_string(move.a + 1) + " dies";
    case Kind::kBreakLink:
      return "the link of " + a + " and " + b + " breaks";
    case Kind::kBreakLinkLost:
      return "the link of " + a + " and " + b + " breaks, with what was on it";
    case Kind::kCutPair:
      return "nothing gets through between " + a + " and " + b + " any more";
    case Kind::kBreakStream:
      return "the stream of " + a + " breaks";
    case Kind::kBreakStreamLost:
      return "the stream of " + a + " breaks, with what was on it";
    case Kind::kSilence:
      return "the coordinator and " + a + " hear nothing of each other any more";
    case Kind::kIsolate:
      return "the coordinator and all peers hear nothing of each other any more";
    case Kind::kCrashCoordinator:
      return "the coordinator dies";
    case Kind::kCrashCoordinatorLost:
      return "the coordinator dies, and what it had sent is lost";
    case Kind::kStoreGoesBack:
      return "the coordinator dies, and its store has lost its last write";
    case Kind::kEarly:
      return "messages are slower than time, which passes to " +
             std::to_string(NextDeadline().us / 1000) + " ms";
    case Kind::kCount:
      break;
  }
  return "?";
}

void ExploreState::Say(const std::string& text) const {
  if (trace_) std::printf("      %s\n", text.c_str());
}

}  // namespace longhaul::sim
