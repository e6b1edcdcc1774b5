// Scripted scenarios: small runs in which everything happens at chosen moments, told as text.
//
// The scenarios are those of docs/life_of_an_op.md and docs/life_of_a_join.md, with a death in each
// phase. The text is compared with scenarios/NAME.txt. After an intended change:
//
//   bazel run //tests/sim:scenario_test -- --update
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "base/check.h"
#include "gtest/gtest.h"
#include "tests/sim/simulation.h"

namespace longhaul::sim {
namespace {

bool update = false;

constexpr uint32_t kSlots[] = {0, 1, 2, 3, 4};

// A trainer that does what the scenario says. It tells the story what it hears.
class ScriptedTrainer final : public TrainerSide {
 public:
  ScriptedTrainer(Simulation* sim, PeerHost* peer, uint32_t slot)
      : sim_(sim), peer_(peer), slot_(slot), name_("t" + std::to_string(slot + 1)) {}

  void Join() {
    Say("lh_join");
    local_ = peer_->Join(this, {"demo", 0}, name_, slot_);
  }
  void Step() {
    Say("lh_begin_step");
    peer_->Step(local_);
  }
  void Leave() {
    Say("lh_leave");
    peer_->Leave(local_);
  }
  void Die() {
    Say("dies");
    peer_->TrainerDied(local_);
  }
  // Starts a sum of int64, in place.
  void AllReduce(uint64_t tag, uint64_t count, OnFault on_fault = OnFault::kRetry,
                 Algorithm algorithm = Algorithm::kRing) {
    Post post;
    post.name = {0, 0, tag, turns_[tag]++};
    post.desc.dtype = DType::kInt64;
    post.desc.count = count;
    post.desc.on_fault = on_fault;
    // With a fixed algorithm, the costs of links do not matter.
    if (!IsOneShot(post.desc)) post.desc.algorithm = algorithm;
    post.memory = std::make_shared<std::vector<uint8_t>>(InputOf(post.name, post.desc, slot_));
    Say("lh_all_reduce tag " + std::to_string(tag));
    const uint64_t call = ++calls_;
    peer_->Post({{local_, call}, tag, post.desc}, InPlace(post.desc, post.memory), {post.name});
    posts_[call] = post;
  }

  bool joined() const { return joined_; }
  bool gone() const { return gone_; }
  size_t open() const { return posts_.size(); }
  int steps() const { return steps_; }

  void OnJoinDone(const Outcome& outcome, const peerd::World& world) override {
    if (!outcome.ok()) return Say("lh_join: " + Describe(outcome));
    joined_ = true;
    step_ = sim_->checker().FirstStep(0, world.member);
    sim_->checker().OnStep(0, step_, world);
    Say("lh_join: ok, " + Text(world));
  }
  void OnStepDone(const Outcome& outcome, const peerd::World& world) override {
    if (!outcome.ok()) return Say("lh_begin_step: " + Describe(outcome));
    ++steps_;
    sim_->checker().OnStep(0, ++step_, world);
    Say("lh_begin_step: ok, " + Text(world));
  }
  void OnSyncDone(const Outcome& outcome, const peerd::StateSyncInfo&) override {
    Say("lh_sync: " + Describe(outcome));
  }
  void OnTakeDone(const Outcome& outcome, const peerd::StateSyncInfo&) override {
    Say("take: " + Describe(outcome));
  }
  void OnLeaveDone(const Outcome& outcome) override { Say("lh_leave: " + Describe(outcome)); }
  void OnPostDone(uint64_t call, const Outcome& outcome, const peerd::OpInfo& info) override {
    const Post post = posts_.at(call);
    posts_.erase(call);
    std::string text = "lh_all_reduce tag " + std::to_string(post.name.tag) + ": ";
    if (!outcome.ok()) {
      EXPECT_EQ(*post.memory, InputOf(post.name, post.desc, slot_)) << "the input is not as posted";
      return Say(text + Describe(outcome) + ", the input is as posted");
    }
    Say(text + "ok, the sum of " + Summands(post) + ", retries " + std::to_string(info.retries));
  }
  void OnWorldChanged(const peerd::World& world) override { Say("hears: " + Text(world)); }
  void OnMemberGone(const Outcome& outcome) override {
    gone_ = true;
    Say("is out: " + Describe(outcome));
  }
  void OnPeerGone() override {
    gone_ = true;
    posts_.clear();
  }

 private:
  struct Post {
    OpName name;
    OpDesc desc;
    std::shared_ptr<std::vector<uint8_t>> memory;
  };
  void Say(const std::string& text) { sim_->story().Tell(sim_->now(), name_, "  ", text); }
  static std::string Text(const peerd::World& world) {
    return ToString(world.member) + " rank " + std::to_string(world.rank) + " of " +
           std::to_string(world.size) + " in epoch " + ToString(world.epoch) + ", pending " +
           std::to_string(world.pending);
  }
  // Returns the trainers whose inputs make up the result: tries every set.
  static std::string Summands(const Post& post) {
    for (uint32_t mask = 1; mask < 1u << std::size(kSlots); ++mask) {
      std::vector<uint32_t> slots;
      std::string names;
      for (const uint32_t slot : kSlots) {
        if ((mask >> slot & 1) == 0) continue;
        slots.push_back(slot);
        names += (names.empty() ? "t" : " t") + std::to_string(slot + 1);
      }
      if (*post.memory == ResultOf(post.name, post.desc, slots)) return names;
    }
    ADD_FAILURE() << "the result is no sum of inputs";
    return "nobody knows what";
  }

  Simulation* const sim_;
  PeerHost* const peer_;
  const uint32_t slot_;
  const std::string name_;
  peerd::LocalId local_;
  bool joined_ = false;
  bool gone_ = false;
  int steps_ = 0;
  uint64_t step_ = 0;
  uint64_t calls_ = 0;
  std::map<uint64_t, uint32_t> turns_;
  std::map<uint64_t, Post> posts_;
};

constexpr uint64_t kSmall = 8;     // number of elements: travels in the READY
constexpr uint64_t kLarge = 1000;  // number of elements: moved as segments

class ScenarioTest : public testing::Test {
 protected:
  ScenarioTest() : sim_(Options()) {}

  static SimulationOptions Options() {
    SimulationOptions options;
    options.detect_ms = 1500;
    options.latency = {200, 200};
    options.scripted = true;
    options.mode = Story::Mode::kKeep;
    return options;
  }

  // Adds `n` peers with one trainer each.
  void Start(int n) {
    for (int i = 0; i < n; ++i) AddPeer();
    Pass(10);
  }
  void AddPeer() {
    PeerHost* const peer = sim_.AddPeer();
    trainers_.push_back(
        std::make_unique<ScriptedTrainer>(&sim_, peer, static_cast<uint32_t>(trainers_.size())));
  }
  // Adds peers as Start() does, and makes all trainers members of one epoch. The story begins after
  // that.
  void StartTogether(int n) {
    Start(n);
    T(1).Join();
    Until([&] { return T(1).joined(); });
    for (int i = 2; i <= n; ++i) T(i).Join();
    Pass(5);
    T(1).Step();
    Until([&] { return T(n).joined() && T(1).steps() == 1; });
    Pass(5);
    from_ = sim_.story().lines().size();
  }
  ScriptedTrainer& T(int i) { return *trainers_.at(static_cast<size_t>(i - 1)); }
  PeerHost& P(int i) { return *sim_.peers().at(static_cast<size_t>(i - 1)); }
  void Tell(const std::string& text) { sim_.story().Tell(sim_.now(), "# ", text); }
  void Pass(int64_t ms) {
    sim_.RunUntil(sim_.now() + Millis(ms), [] { return false; });
  }
  void Until(const std::function<bool()>& done) {
    ASSERT_TRUE(sim_.RunUntil(sim_.now() + Seconds(30), done)) << "waits for ever";
  }
  // Runs until no trainer waits for an op.
  void UntilSettled() {
    Until([&] {
      for (const auto& trainer : trainers_) {
        if (trainer->open() > 0) return false;
      }
      return true;
    });
    Pass(5);
  }

  // Compares the story from `from_` on with scenarios/NAME.txt.
  void Check(const std::string& name) {
    for (const auto& peer : sim_.peers()) peer->CheckAllAnswered();
    std::string story;
    for (size_t i = from_; i < sim_.story().lines().size(); ++i) {
      const std::string& line = sim_.story().lines()[i];
      // Log lines and the arrivals of frames add nothing new.
      if (line.find("  logs ") != std::string::npos) continue;
      if (line.find(" <- ") != std::string::npos) continue;
      story += line + "\n";
    }
    const std::string path = "tests/sim/scenarios/" + name + ".txt";
    if (update) {
      const char* const root = std::getenv("BUILD_WORKSPACE_DIRECTORY");
      std::ofstream file((root != nullptr ? std::string(root) + "/" : "") + path);
      file << story;
      ASSERT_TRUE(file.good()) << path;
      return;
    }
    std::ifstream file(path);
    std::stringstream golden;
    golden << file.rdbuf();
    EXPECT_EQ(golden.str(), story)
        << path << " differs; if that is meant: bazel run //tests/sim:scenario_test -- --update";
  }

  Simulation sim_;
  std::vector<std::unique_ptr<ScriptedTrainer>> trainers_;
  size_t from_ = 0;
};

TEST_F(ScenarioTest, LifeOfAJoin) {
  Start(2);
  Tell("nobody is there: t1 is admitted at once");
  T(1).Join();
  Until([&] { return T(1).joined(); });
  Tell("t2 waits for the next step boundary of t1");
  T(2).Join();
  Pass(20);
  T(1).Step();
  Until([&] { return T(2).joined(); });
  Pass(5);
  Tell("with nobody pending a boundary is one message there and one back");
  T(1).Step();
  T(2).Step();
  Until([&] { return T(2).steps() == 1 && T(1).steps() == 2; });
  Check("life_of_a_join");
}

TEST_F(ScenarioTest, LifeOfAnOp) {
  StartTogether(3);
  Tell("large: t3 is late; what can flow flows before");
  T(1).AllReduce(1, kLarge);
  T(2).AllReduce(1, kLarge);
  Pass(20);
  T(3).AllReduce(1, kLarge);
  UntilSettled();
  Tell("in the mesh: sooner, since nothing is passed on");
  for (int i = 1; i <= 3; ++i) T(i).AllReduce(3, kLarge, OnFault::kRetry, Algorithm::kMesh);
  UntilSettled();
  Tell("small: the inputs travel in the READYs");
  for (int i = 1; i <= 3; ++i) T(i).AllReduce(2, kSmall);
  UntilSettled();
  Check("life_of_an_op");
}

TEST_F(ScenarioTest, DescriptorsThatDiffer) {
  StartTogether(3);
  T(1).AllReduce(1, kLarge);
  T(2).AllReduce(1, kLarge);
  T(3).AllReduce(1, kLarge + 1);
  UntilSettled();
  Check("descriptors_that_differ");
}

TEST_F(ScenarioTest, OnFaultThatDiffersAndOneThatLeaves) {
  for (const uint64_t count : {kSmall, kLarge}) {
    if (trainers_.empty()) StartTogether(4);
    const int leaver = count == kSmall ? 4 : 3;
    T(1).AllReduce(1, count, OnFault::kAbort);
    T(2).AllReduce(1, count, OnFault::kRetry);
    if (count == kSmall) T(3).AllReduce(1, count, OnFault::kRetry);
    Pass(5);
    Tell("t" + std::to_string(leaver) + " leaves and has not posted");
    T(leaver).Leave();
    UntilSettled();
    Until([&] { return T(leaver).gone(); });
  }
  Check("on_fault_that_differs_and_one_that_leaves");
}

TEST_F(ScenarioTest, DeathWhileIdle) {
  StartTogether(3);
  P(3).Crash(/*resets=*/true);
  Pass(20);
  Tell("the others go on");
  T(1).AllReduce(1, kSmall);
  T(2).AllReduce(1, kSmall);
  UntilSettled();
  Check("death_while_idle");
}

TEST_F(ScenarioTest, SilentDeathWhileIdle) {
  StartTogether(2);
  P(2).Crash(/*resets=*/false);
  Until([&] { return P(1).core().GetMembers(peerd::LocalId(1)).members.size() == 1; });
  Check("silent_death_while_idle");
}

TEST_F(ScenarioTest, DeathWhilePending) {
  StartTogether(2);
  AddPeer();
  Pass(5);
  T(3).Join();
  Pass(5);
  Tell("the peer of the pending t3 dies: the epoch does not change");
  P(3).Crash(/*resets=*/true);
  Pass(1600);
  T(1).Step();
  T(2).Step();
  Until([&] { return T(2).steps() == 1; });
  Check("death_while_pending");
}

TEST_F(ScenarioTest, DeathOfANewcomerWhilePreparing) {
  StartTogether(2);
  AddPeer();
  Pass(5);
  T(3).Join();
  Pass(5);
  sim_.Trigger(Moment::kPrepareArrived, 3, [&](PeerHost*) { P(3).Crash(/*resets=*/true); });
  T(1).Step();
  T(2).Step();
  Until([&] { return T(2).steps() == 1; });
  Check("death_of_a_newcomer_while_preparing");
}

TEST_F(ScenarioTest, DeathOfAMemberWhilePreparing) {
  StartTogether(3);
  AddPeer();
  Pass(5);
  T(4).Join();
  Pass(5);
  sim_.Trigger(Moment::kReadySent, 2, [&](PeerHost*) { P(3).Crash(/*resets=*/true); });
  for (int i = 1; i <= 3; ++i) T(i).Step();
  Until([&] { return T(4).joined() && T(1).steps() == 2; });
  Pass(5);
  Check("death_of_a_member_while_preparing");
}

TEST_F(ScenarioTest, DeathWhileGathering) {
  StartTogether(3);
  T(1).AllReduce(1, kLarge);
  T(2).AllReduce(1, kLarge);
  Pass(5);
  Tell("t3 has not posted; its peer dies");
  P(3).Crash(/*resets=*/true);
  UntilSettled();
  Check("death_while_gathering");
}

TEST_F(ScenarioTest, DeathWhileRunning) {
  StartTogether(3);
  for (int i = 1; i <= 3; ++i) T(i).AllReduce(1, kLarge);
  sim_.Trigger(Moment::kAttemptComplete, 1, [&](PeerHost*) { P(3).Crash(/*resets=*/true); });
  UntilSettled();
  Check("death_while_running");
}

TEST_F(ScenarioTest, DeathWhileRunningInTheMesh) {
  StartTogether(4);
  for (int i = 1; i <= 4; ++i) T(i).AllReduce(1, kLarge, OnFault::kRetry, Algorithm::kMesh);
  Tell("p4 dies with the inputs of the others for its part, and most of its own on the way");
  sim_.Trigger(Moment::kAttemptStarted, 4, [&](PeerHost*) {
    sim_.world().At(sim_.now() + 300, [&] { P(4).Crash(/*resets=*/true); });
  });
  UntilSettled();
  Check("death_while_running_in_the_mesh");
}

TEST_F(ScenarioTest, DeathWhileRunningAborts) {
  StartTogether(3);
  for (int i = 1; i <= 3; ++i) T(i).AllReduce(1, kLarge, OnFault::kAbort);
  sim_.Trigger(Moment::kAttemptComplete, 1, [&](PeerHost*) { P(3).Crash(/*resets=*/true); });
  UntilSettled();
  Check("death_while_running_aborts");
}

TEST_F(ScenarioTest, DeathAfterTheFirstDone) {
  StartTogether(3);
  for (int i = 1; i <= 3; ++i) T(i).AllReduce(1, kLarge);
  Tell("a peer dies between its two DONEs: one survivor has it, the other has not");
  sim_.Trigger(Moment::kDoneSent, 5, [&](PeerHost* at) { at->Crash(/*resets=*/true); });
  UntilSettled();
  Check("death_after_the_first_done");
}

TEST_F(ScenarioTest, DeathAfterAnAnswer) {
  StartTogether(3);
  Tell("small: p3's READY reaches p1, which answers, and not p2; then p3 dies");
  sim_.world().Block(P(3).node()->index, P(2).node()->index, sim_.now() + Seconds(1));
  for (int i = 1; i <= 3; ++i) T(i).AllReduce(1, kSmall);
  Until([&] { return T(1).open() == 0; });
  P(3).Crash(/*resets=*/true);
  sim_.world().Unblock();
  UntilSettled();
  Tell("p2 has p1's result, over three");
  Check("death_after_an_answer");
}

TEST_F(ScenarioTest, DeathDuringTheCommitOfARepair) {
  StartTogether(4);
  for (int i = 1; i <= 4; ++i) T(i).AllReduce(1, kLarge);
  sim_.Trigger(Moment::kAttemptComplete, 1, [&](PeerHost*) { P(4).Crash(/*resets=*/true); });
  Tell("while the epoch without p4 is committed, p3 dies too");
  sim_.Trigger(Moment::kCommitArrived, 1, [&](PeerHost*) { P(3).Crash(/*resets=*/true); });
  UntilSettled();
  Check("death_during_the_commit_of_a_repair");
}

TEST_F(ScenarioTest, CoordinatorDiesWhilePreparingARepair) {
  StartTogether(3);
  for (int i = 1; i <= 3; ++i) T(i).AllReduce(1, kLarge);
  sim_.Trigger(Moment::kAttemptComplete, 1, [&](PeerHost*) { P(3).Crash(/*resets=*/true); });
  sim_.Trigger(Moment::kReadySent, 1,
               [&](PeerHost*) { sim_.StopCoordinator(Millis(50), /*resets=*/true); });
  UntilSettled();
  Check("coordinator_dies_while_preparing_a_repair");
}

TEST_F(ScenarioTest, CoordinatorDiesBetweenTwoCommitsOfOneEpoch) {
  StartTogether(3);
  for (int i = 1; i <= 3; ++i) T(i).AllReduce(1, kLarge);
  sim_.Trigger(Moment::kAttemptComplete, 1, [&](PeerHost*) { P(3).Crash(/*resets=*/true); });
  Tell("p1 hears of the commit, p2 does not");
  sim_.Trigger(Moment::kCommitSent, 2,
               [&](PeerHost*) { sim_.StopCoordinator(Millis(50), /*resets=*/true); });
  UntilSettled();
  Check("coordinator_dies_between_two_commits_of_one_epoch");
}

TEST_F(ScenarioTest, OpsGoOnWithoutTheCoordinator) {
  StartTogether(2);
  sim_.StopCoordinator(Millis(100), /*resets=*/true);
  Pass(5);
  for (int i = 1; i <= 2; ++i) T(i).AllReduce(1, kLarge);
  UntilSettled();
  Pass(150);
  Check("ops_go_on_without_the_coordinator");
}

TEST_F(ScenarioTest, LinkLostBetweenTwoThatLive) {
  StartTogether(3);
  for (int i = 1; i <= 3; ++i) T(i).AllReduce(1, kLarge);
  sim_.Trigger(Moment::kAttemptStarted, 2, [&](PeerHost*) {
    Tell("the network resets p1 and p2");
    sim_.ResetLink(&P(1), P(2).id());
  });
  UntilSettled();
  Check("link_lost_between_two_that_live");
}

TEST_F(ScenarioTest, TrainerDiesAndItsOpFinishes) {
  StartTogether(3);
  for (int i = 1; i <= 3; ++i) T(i).AllReduce(1, kLarge);
  Pass(1);
  T(3).Die();
  Until([&] { return T(1).open() == 0 && T(2).open() == 0; });
  Pass(20);
  Check("trainer_dies_and_its_op_finishes");
}

TEST_F(ScenarioTest, Leave) {
  StartTogether(3);
  T(1).AllReduce(1, kSmall);
  T(2).AllReduce(1, kSmall);
  Pass(5);
  Tell("t3 leaves while the others wait for its op");
  T(3).Leave();
  UntilSettled();
  Until([&] { return T(3).gone(); });
  Check("leave");
}

TEST_F(ScenarioTest, Drain) {
  StartTogether(2);
  P(2).Drain();
  Pass(5);
  Tell("t2 leaves at its next boundary; its op before is not touched");
  T(1).AllReduce(1, kSmall);
  T(2).AllReduce(1, kSmall);
  UntilSettled();
  T(1).Step();
  T(2).Step();
  Until([&] { return T(2).gone() && T(1).steps() == 2; });
  Check("drain");
}

}  // namespace
}  // namespace longhaul::sim

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--update") longhaul::sim::update = true;
  }
  return RUN_ALL_TESTS();
}
