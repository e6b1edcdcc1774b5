#include "peerd/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "proto/control/messages.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const GroupKey kGroup{"run", 0};
constexpr PeerId kSelf(1);
constexpr PeerId kOther(2);
constexpr LocalId kLocal(1);
constexpr MemberId kMember(11);
constexpr uint32_t kPatienceMs = 10000;

// Stands behind all ports and notes the calls in one list, so that tests see their order.
class Surroundings final : public TrainerPort, public OpPort, public StatePort, public Links {
 public:
  std::vector<std::string> told;
  std::vector<std::string> opened;  // the links of the last OpenLinks()
  std::vector<Outcome> outcomes;
  std::vector<Event> op_events;
  std::vector<Event> state_events;
  std::vector<FrameHeader> frames;
  std::deque<std::function<void()>> unread;  // waiting functions, while `read` is true
  bool read = false;
  Outcome admitted;
  int admissions = 0;
  bool has_work = false;
  std::optional<bool> withdrawn;  // the result of Withdraw()
  Tick now{Seconds(1)};
  std::vector<control::PeerMessage> sent;
  std::vector<control::AskWhy> asked;

  void ReadersGone() {
    for (const auto& act : std::exchange(unread, {})) act();
  }
  std::vector<std::string> Told() { return std::exchange(told, {}); }

  // ---- TrainerPort
  void JoinDone(LocalId, const Outcome& outcome, const World&, bool) override {
    Answer("join done", outcome);
  }
  void StepDone(LocalId, const Outcome& outcome, const World&) override {
    Answer("step done", outcome);
  }
  void SyncDone(LocalId, const Outcome& outcome, const StateSyncInfo&) override {
    Answer("sync done", outcome);
  }
  void TakeDone(LocalId, const Outcome& outcome, const StateSyncInfo&) override {
    Answer("take done", outcome);
  }
  void SyncProgress(LocalId, const control::FetchProgress&) override {}
  void LeaveDone(LocalId, const Outcome& outcome) override { Answer("leave done", outcome); }
  void PostDone(const PostRef&, const Outcome& outcome, const OpInfo&,
                const OpTraffic& traffic) override {
    Answer("post done sent=" + std::to_string(traffic.bytes_sent), outcome);
  }
  void WorldChanged(LocalId, const World&) override { told.push_back("world changed"); }
  void MemberGone(LocalId, const Outcome& outcome) override { Answer("member gone", outcome); }

  // ---- OpPort
  void AddPost(const LocalPost&, PostBuffers) override {}
  Outcome Admit(const LocalPost&, const PostView&) override {
    ++admissions;
    return admitted;
  }
  bool HasWork() const override { return has_work; }
  OpTraffic EndPost(const PostRef&) override {
    told.push_back("take post");
    return {7, 7};
  }
  std::string Payload(const SendReady& ready) const override {
    return std::string(ready.desc.bytes(), 'x');
  }
  void Start(const StartAttempt& a) override {
    told.push_back("start");
    op_events.push_back(AttemptComplete{a.group, a.ordinal, a.attempt, "result"});
  }
  void Credit(const CreditAttempt&) override { told.push_back("credit"); }
  void Stop(const StopAttempt&) override { told.push_back("stop"); }
  void Finish(const FinishAttempt& a) override {
    told.push_back(a.commit ? "finish commit" : "finish");
    if (a.commit) op_events.push_back(AttemptFinished{a.group, a.ordinal});
  }
  void ForgetGroup(const GroupKey&) override {}
  std::vector<Event> PopEvents() override {
    std::vector<Event> events = std::exchange(op_events, {});
    for (Event& event : std::exchange(state_events, {})) events.push_back(std::move(event));
    return events;
  }

  // ---- StatePort
  void Add(LocalId, const GroupKey&, const std::string&) override {}
  void Gone(LocalId) override { told.push_back("states gone"); }
  void Forget(LocalId) override { told.push_back("states forget"); }
  bool KeptRevision(LocalId, const LocalState&, uint64_t*) const override { return false; }
  void Prepare(const std::shared_ptr<LocalState>&, std::function<void()> done) override { done(); }
  void Begin(LocalId, const GroupKey&, const StateSync&, bool) override {
    told.push_back("states begin");
  }
  std::optional<bool> Withdraw(LocalId) override { return std::exchange(withdrawn, std::nullopt); }
  void Carry(const ServeState&) override {}
  void Carry(const EndServe&) override {}
  void Carry(const StartTransfer&) override {}
  void Carry(const ChangeSources&) override {}
  void Carry(const StopTransfer&) override {}
  void Carry(const CompareManifest&) override {}
  StateSyncInfo Carry(const peerd::SyncDone&) override { return {}; }
  StateSyncInfo Carry(const peerd::TakeDone&) override { return {}; }
  void WhenUnread(LocalId, std::function<void()> act) override {
    if (!read) return act();
    unread.push_back(std::move(act));
  }
  bool reading() const override { return !unread.empty(); }
  void OnLinkUp(const LinkKey&) override { told.push_back("states link up"); }
  void OnLinkDown(const LinkKey&) override { told.push_back("states link down"); }
  absl::Status OnControlFrame(const LinkKey&, const FrameHeader&, std::span<const uint8_t>,
                              bool in_group) override {
    told.push_back(in_group ? "states frame" : "states frame of a stranger");
    return absl::OkStatus();
  }
  void Work() override {}
  Tick NextDeadline() const override { return kNever; }
  std::vector<std::pair<LocalId, control::FetchProgress>> PopProgress() override { return {}; }

  // ---- Links
  void OpenLinks(const std::string&, uint32_t, Epoch, const std::string&,
                 const std::vector<LinkRequest>& links, Tick) override {
    told.push_back("open links " + std::to_string(links.size()));
    opened.clear();
    for (const LinkRequest& link : links) {
      opened.push_back(ToString(link.peer) + " at " + link.endpoints.at(0) +
                       (link.relay ? " through " + ToString(link.relay) : ""));
    }
  }
  void KeepLinks(const std::string&, uint32_t, Epoch, const std::vector<PeerId>&) override {}
  void TryPeer(const GroupKey&, uint64_t, PeerId, const std::vector<std::string>&, Tick) override {}
  void SendControl(const LinkKey&, const FrameHeader& header, std::span<const uint8_t>) override {
    told.push_back(header.type == FrameType::kReady ? "send READY" : "send DONE");
    frames.push_back(header);
  }
  void SendControlInTime(const LinkKey& link, const FrameHeader& header,
                         std::span<const uint8_t> payload) override {
    told.push_back("in time");
    SendControl(link, header, payload);
  }
  void BreakLink(const LinkKey& link, const std::string&) override {
    told.push_back("break link to " + ToString(link.peer));
  }
  void AddMemory(const uint8_t*, size_t) override {}
  void RemoveMemory(const uint8_t*) override {}
  void SetDetectMs(uint32_t detect_ms) override { detect = detect_ms; }

  uint32_t detect = 0;

 private:
  void Answer(std::string what, const Outcome& outcome) {
    told.push_back(std::move(what));
    outcomes.push_back(outcome);
  }
};

class EngineTest : public testing::Test {
 protected:
  EngineTest() {
    SetLogSink([](std::string_view) {});
    EngineOptions options;
    options.core.peer = kSelf;
    options.core.endpoints = {"h:1"};
    options.coordinator_timeout_ms = kPatienceMs;
    options.coordinators = "c:1";
    engine.Start(options, Ports());
  }
  ~EngineTest() override { SetLogSink(nullptr); }

  EnginePorts Ports(EngineObserver* observer = nullptr) {
    EnginePorts ports;
    ports.trainers = &world;
    ports.links = &world;
    ports.ops = &world;
    ports.states = &world;
    ports.to_coordinator = [this](const control::PeerMessage& m) { world.sent.push_back(m); };
    ports.ask_why = [this](const control::AskWhy& ask) { world.asked.push_back(ask); };
    ports.refuse_coordinator = [this](const std::string&) { world.told.push_back("refuse"); };
    ports.clock = [this] { return world.now; };
    ports.observer = observer;
    return ports;
  }

  void Attach() {
    engine.OnStreamUp();
    engine.Turn();
    control::Welcome welcome;
    welcome.detect_ms = 700;
    engine.OnMessage(welcome);
    engine.Turn();
  }

  // A member of this peer and a member of another peer are in epoch 1.
  void Join() { Enter({kSelf, kOther}); }
  // One member of each peer of the ring is in epoch 1.
  void Enter(const std::vector<PeerId>& ring, const control::BlockedPairs& blocked = {}) {
    Attach();
    engine.OnJoin({kLocal, kGroup, "t"});
    engine.Turn();
    engine.OnMessage(control::JoinPending{kLocal.value(), kGroup, kMember});
    control::PrepareEpoch prepare;
    prepare.group = kGroup;
    prepare.epoch = prepare.last_freeze = prepare.boundary = Epoch(1);
    for (const PeerId peer : ring) {
      prepare.members.push_back({MemberId(10 + peer.value()), peer, Epoch(1), "t"});
      prepare.peers.push_back({peer, {"h" + std::to_string(peer.value()) + ":1"}, 0});
    }
    prepare.blocked = blocked;
    engine.OnMessage(prepare);
    engine.Turn();
    for (const PeerId peer : ring) {
      if (peer != kSelf) engine.OnLinkUp({"run", peer});
    }
    engine.Turn();
    engine.OnMessage(control::CommitEpoch{kGroup, Epoch(1), {}});
    engine.Turn();
    ASSERT_TRUE(engine.OnMembers(kLocal, PeerCore::AsOf::kNow).epoch);
    world.told.clear();
    world.outcomes.clear();
  }

  static OpDesc Small() {
    OpDesc desc;
    desc.dtype = DType::kInt64;
    desc.count = 1;
    return desc;
  }

  // The other peer announces the op that was posted here with tag 5.
  static void Ready(Engine* engine) {
    FrameHeader header;
    header.type = FrameType::kReady;
    header.op = OpOrdinal(1);
    header.attempt = Epoch(1);
    const auto body = Encode(ReadyBody{Epoch(1), 5, 0, Small()});
    std::vector<uint8_t> payload(body.begin(), body.end());
    payload.resize(payload.size() + Small().bytes());
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    ASSERT_TRUE(engine->OnControlFrame({"run", kOther}, header, payload).ok());
  }

  Surroundings world;
  Engine engine;
};

TEST_F(EngineTest, NothingIsDoneBeforeATurn) {
  engine.OnStreamUp();
  EXPECT_THAT(world.sent, IsEmpty());
  engine.Turn();
  ASSERT_EQ(world.sent.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<control::Hello>(world.sent[0]));
}

TEST_F(EngineTest, WorkThatIsLeftOverAsksForTheNextTurnAtOnce) {
  EXPECT_GT(engine.NextDeadline(), world.now);
  world.has_work = true;
  EXPECT_EQ(engine.NextDeadline(), world.now);
}

TEST_F(EngineTest, WelcomeTellsLinksHowLongSilenceMayBe) {
  Attach();
  EXPECT_TRUE(engine.welcome());
  EXPECT_EQ(world.detect, 700u);
  engine.OnStreamDown("reset");
  EXPECT_FALSE(engine.welcome());
}

TEST_F(EngineTest, ARefusedPostIsAnsweredAndTheCoreHearsNothingOfIt) {
  Join();
  world.admitted = {Code::kUnavailable, "no memory"};
  engine.OnPost({{kLocal, 1}, 5, Small()}, {});
  engine.Turn();
  EXPECT_THAT(world.Told(), ElementsAre("take post", "post done sent=7"));
  EXPECT_EQ(world.outcomes[0].code, Code::kUnavailable);
  EXPECT_EQ(engine.core().GetStats().ops_open, 0u);
}

// The core decides whether a post is allowed. No memory is taken for a post that it refuses.
TEST_F(EngineTest, NoMemoryIsTakenForAPostThatTheCoreRefuses) {
  Join();
  engine.OnPost({{kLocal, 1}, 5, Small()}, {});
  engine.Turn();
  EXPECT_EQ(world.admissions, 1);
  world.Told();
  engine.OnPost({{kLocal, 2}, 5, Small()}, {});
  engine.Turn();
  EXPECT_EQ(world.admissions, 1);
  EXPECT_THAT(world.Told(), ElementsAre("take post", "post done sent=7"));
  EXPECT_THAT(world.outcomes.back().text, HasSubstr("op with this tag in flight"));
}

// The result is in its place before the trainer is answered. No trainer waits for the DONE of a
// small op, so that frame may wait.
TEST_F(EngineTest, AnOpIsFinishedBeforeItsTrainerIsTold) {
  Join();
  engine.OnPost({{kLocal, 1}, 5, Small()}, {});
  engine.Turn();
  EXPECT_THAT(world.Told(), ElementsAre("send READY"));
  Ready(&engine);
  engine.Turn();
  // What the attempt does at once happens in the same turn.
  EXPECT_THAT(world.Told(), ElementsAre("start", "finish commit", "in time", "send DONE",
                                        "take post", "post done sent=7"));
}

TEST_F(EngineTest, WhatIsSaidOfAMemberWaitsForTheReadersOfItsTensors) {
  Join();
  world.read = true;
  engine.OnLeave(kLocal);
  engine.Turn();
  engine.OnMessage(control::Removed{kGroup, kMember, control::Removal::kLeft, ""});
  engine.Turn();
  EXPECT_THAT(world.Told(), IsEmpty());
  world.ReadersGone();
  EXPECT_THAT(world.Told(), ElementsAre("leave done", "states forget", "member gone"));
}

TEST_F(EngineTest, ASyncThatTheCoreHasNotHeardOfEndsWithItsMember) {
  Join();
  const StateSync sync;
  engine.OnStep(kLocal, &sync);
  engine.Turn();
  world.withdrawn = true;
  engine.OnLeave(kLocal);
  EXPECT_THAT(world.Told(), ElementsAre("states begin", "sync done", "step done"));
  EXPECT_EQ(world.outcomes[0].code, Code::kAborted);
}

TEST_F(EngineTest, ASyncWithoutAStepThatEndsWithItsMemberIsAnsweredAlone) {
  Join();
  engine.OnSync(kLocal, {});
  engine.Turn();
  world.withdrawn = false;
  engine.OnMessage(control::Removed{kGroup, kMember, control::Removal::kEvicted, ""});
  engine.Turn();
  EXPECT_THAT(world.Told(),
              ElementsAre("states begin", "sync done", "states forget", "member gone"));
}

// 1. The member is removed while its tensors are still read, so its trainer is not told yet.
// 2. The trainer begins a sync.
TEST_F(EngineTest, ASyncOfAMemberThatIsOutIsAnswered) {
  Join();
  world.read = true;
  engine.OnMessage(control::Removed{kGroup, kMember, control::Removal::kEvicted, ""});
  engine.Turn();
  const StateSync sync;
  engine.OnStep(kLocal, &sync);
  engine.Turn();
  world.ReadersGone();
  EXPECT_THAT(world.Told(), ElementsAre("states forget", "member gone", "sync done", "step done"));
}

TEST_F(EngineTest, AJoinFailsWhenNoCoordinatorServesThePeer) {
  engine.OnStreamDown("c:1 refused");
  engine.OnJoin({kLocal, kGroup, "t"});
  engine.Turn();
  world.now = world.now + (Millis(kPatienceMs) - 1);
  engine.Turn();
  EXPECT_THAT(world.Told(), IsEmpty());
  world.now = world.now + 1;
  engine.Turn();
  ASSERT_FALSE(world.outcomes.empty());
  EXPECT_EQ(world.outcomes[0].code, Code::kUnavailable);
  EXPECT_THAT(world.outcomes[0].text, HasSubstr("c:1 refused"));
  // When the coordinator comes back, the peer does not ask for this member again.
  Attach();
  EXPECT_EQ(engine.core().GetStats().members, 0u);
}

TEST_F(EngineTest, AJoinThatIsWithdrawnWithoutACoordinatorSaysWhyThereIsNone) {
  engine.OnStreamDown("c:1 refused: join token expired");
  engine.OnJoin({kLocal, kGroup, "t"});
  engine.Turn();
  world.now = world.now + Seconds(1);
  engine.OnLeave(kLocal);
  engine.Turn();
  ASSERT_FALSE(world.outcomes.empty());
  EXPECT_EQ(world.outcomes[0].code, Code::kAborted);
  EXPECT_THAT(world.outcomes[0].text,
              HasSubstr("; no coordinator for 1 s: c:1 refused: join token expired"));
}

TEST_F(EngineTest, WithoutACoordinatorATrainerIsToldSinceWhenAndWhy) {
  std::vector<std::string> said;
  const auto note = [&](const std::string& text) { said.push_back(text); };
  engine.OnStreamDown("c:1 refused: join token expired");
  world.now = world.now + Seconds(30);
  engine.OnWhy(kGroup, note);
  EXPECT_THAT(said, ElementsAre("no coordinator for 30 s: c:1 refused: join token expired"));
  EXPECT_THAT(world.asked, IsEmpty());
}

TEST_F(EngineTest, TheCoordinatorSaysWhyAGroupWaits) {
  std::vector<std::string> said;
  const auto note = [&](const std::string& text) { said.push_back(text); };
  Join();
  engine.OnWhy({"other", 1}, note);
  EXPECT_THAT(std::exchange(said, {}), ElementsAre("this host has no member in the group"));
  engine.OnWhy(kGroup, note);
  engine.OnWhy(kGroup, note);
  ASSERT_EQ(world.asked.size(), 1u) << "once, however many trainers ask";
  EXPECT_EQ(world.asked[0].group, kGroup);
  engine.OnTellWhy({99, "what nobody asked"});
  EXPECT_THAT(said, IsEmpty());
  engine.OnTellWhy({world.asked[0].request, "m2 is missing"});
  engine.OnTellWhy({world.asked[0].request, "again"});
  engine.OnWhy(kGroup, note);
  EXPECT_THAT(std::exchange(said, {}),
              ElementsAre("m2 is missing", "m2 is missing", "m2 is missing"));
  EXPECT_EQ(world.asked.size(), 1u);
  world.now = world.now + kWhyPatience;
  engine.Turn();
  engine.OnWhy(kGroup, note);
  EXPECT_EQ(world.asked.size(), 2u);
  // This answer does not come.
  EXPECT_LE(engine.NextDeadline(), world.now + kWhyPatience);
  world.now = world.now + (kWhyPatience - 1);
  engine.Turn();
  EXPECT_THAT(said, IsEmpty());
  world.now = world.now + 1;
  engine.Turn();
  EXPECT_THAT(std::exchange(said, {}), ElementsAre(HasSubstr("the coordinator does not answer")));
  engine.OnWhy(kGroup, note);
  engine.OnStreamDown("reset");
  engine.Turn();
  EXPECT_THAT(said, ElementsAre("no coordinator for 0 s: reset"));
}

TEST_F(EngineTest, AStreamThatNeverStoodIsNoNewsForTheCore) {
  engine.OnStreamDown("c:1 refused");
  EXPECT_EQ(engine.queued(), 0u);
}

TEST_F(EngineTest, FramesOfTransfersGoToTheStates) {
  FrameHeader header;
  header.type = FrameType::kChunkRequest;
  const auto told_of = [&](const std::string& run, uint32_t group, PeerId peer) {
    world.told.clear();
    header.group = group;
    EXPECT_TRUE(engine.OnControlFrame({run, peer}, header, {}).ok());
    return world.Told().at(0);
  };
  EXPECT_EQ(told_of("run", 0, kOther), "states frame of a stranger");
  Join();
  EXPECT_EQ(told_of("run", 0, kOther), "states frame");
  EXPECT_EQ(told_of("run", 0, PeerId(9)), "states frame of a stranger");
  EXPECT_EQ(told_of("run", 1, kOther), "states frame of a stranger");
  EXPECT_EQ(told_of("other", 0, kOther), "states frame of a stranger");
  EXPECT_EQ(engine.queued(), 0u);
}

TEST_F(EngineTest, AFrameAgainstTheProtocolClosesTheLink) {
  FrameHeader header;
  header.type = FrameType::kReady;
  EXPECT_FALSE(engine.OnControlFrame({"run", kOther}, header, {}).ok());
  EXPECT_EQ(engine.queued(), 0u);
}

TEST_F(EngineTest, ALinkThroughARelayIsDialledWhereTheRelayIs) {
  constexpr PeerId kFar(3);
  Enter({kSelf, kOther, kFar}, {{kSelf, kFar, kOther}});
  EXPECT_THAT(world.opened, ElementsAre("p2 at h2:1", "p3 at h2:1 through p2"));
  engine.OnPost({{kLocal, 1}, 5, Small()}, {});
  engine.Turn();
  EXPECT_THAT(world.Told(), ElementsAre("send READY", "send READY"));
}

TEST_F(EngineTest, ACloneGoesOnByItself) {
  Join();
  const std::unique_ptr<Engine> clone = engine.Clone(Ports());
  EXPECT_EQ(clone->Digest(), engine.Digest());
  clone->OnLinkDown({"run", kOther}, "reset", 0);
  clone->Turn();
  EXPECT_NE(clone->Digest(), engine.Digest());
}

// An observer may end the turn, as if the process were killed between two actions.
TEST_F(EngineTest, AnObserverEndsATurnBetweenTwoActions) {
  struct Killer final : EngineObserver {
    bool OnAction(const Action& action) override {
      return !std::holds_alternative<PostDone>(action);
    }
  } killer;
  Join();
  engine.OnPost({{kLocal, 1}, 5, Small()}, {});
  engine.Turn();
  world.told.clear();
  const std::unique_ptr<Engine> doomed = engine.Clone(Ports(&killer));
  Ready(doomed.get());
  doomed->Turn();
  EXPECT_THAT(world.Told(), ElementsAre("start", "finish commit", "in time", "send DONE"));
}

TEST_F(EngineTest, DrainedAndReadIsOver) {
  Join();
  engine.OnDrain(world.now);
  engine.Turn();
  world.now = world.now + Seconds(1);
  engine.Turn();
  world.read = true;
  engine.OnMessage(control::Removed{kGroup, kMember, control::Removal::kLeft, ""});
  engine.Turn();
  EXPECT_TRUE(engine.drained());
  EXPECT_FALSE(engine.over());
  world.unread.clear();
  EXPECT_TRUE(engine.over());
}

}  // namespace
}  // namespace longhaul::peerd
