#include "peerd/engine/state_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <semaphore>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/prng.h"
#include "peerd/state/memory_state.h"
#include "peerd/state/state_hash.h"
#include "peerd/transport/testing.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kMiB = uint64_t{1} << 20;
const GroupKey kGroup{kRun, 3};
const LocalId kLocal(4);

// A peer of PeerWorld with a StateRunner, as in the daemon.
class RunnerPeer final : public Peer {
 public:
  void Make(uint64_t state_rate, uint64_t keep_state) {
    StateRunner::Options options;
    options.self = id;
    options.state_rate = state_rate;
    options.kept = {keep_state, Seconds(60)};
    runner = std::make_unique<StateRunner>(
        options, transport.get(), [this] { woken_.release(); }, [this] { return ring->Now(); });
    transport->SetSegmentListeners({.ops = this, .states = runner->segments()});
  }

  void OnLinkUp(const LinkKey& link) override {
    Peer::OnLinkUp(link);
    runner->exchange()->OnLinkUp(link, ring->Now());
  }
  void OnLinkDown(const LinkKey& link, const std::string& reason, uint32_t silent_ms) override {
    Peer::OnLinkDown(link, reason, silent_ms);
    runner->exchange()->OnLinkDown(link, ring->Now());
  }
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload) override {
    return runner->exchange()->OnControlFrame(link, header, payload, /*in_group=*/true,
                                              ring->Now());
  }
  // Threads hash in real time. The ring's time does not advance meanwhile.
  void AfterTurn() override {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    runner->Work();
    while (runner->hashing()) {
      ASSERT_TRUE(woken_.try_acquire_until(deadline)) << "nothing is hashed";
      runner->Work();
    }
    for (Event& event : runner->PopEvents()) events.push_back(std::move(event));
    for (auto& [local, told] : runner->PopProgress()) progress.emplace_back(ring->Now(), told);
  }

  template <class T>
  std::vector<T> Events() const {
    std::vector<T> found;
    for (const Event& event : events) {
      if (const T* one = std::get_if<T>(&event)) found.push_back(*one);
    }
    return found;
  }

  std::unique_ptr<StateRunner> runner;
  std::vector<Event> events;
  std::vector<std::pair<Tick, control::FetchProgress>> progress;

 private:
  std::counting_semaphore<> woken_{0};
};

// A state as a trainer registers it.
struct State {
  State(uint64_t bytes, uint64_t seed, const std::string& name = "weights")
      : memory(bytes),
        inbox(bytes),
        changed(CountChunks(bytes)),
        state(std::make_shared<LocalState>()) {
    Prng random(seed);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
      const uint64_t value = random.Next();
      std::memcpy(memory.data() + i, &value, 8);
    }
    if (bytes % 8 != 0) memory.back() = static_cast<uint8_t>(seed);
    state->manifest = {{name, LH_WIRE_UINT8, {bytes}, bytes, false}};
    state->places = {memory.data()};
    state->digests = {std::vector<Hash128>(CountChunks(bytes))};
    state->FetchInto({inbox.data()});
    state->changed = changed;
    auto declared = std::make_shared<MemoryState>(*state);
    declared->places = {nullptr};
    state->declared = std::move(declared);
  }
  StateSync Sync() const {
    StateSync sync;
    sync.state = state;
    sync.revision = 1;
    return sync;
  }

  // The bytes that the state has now. Fetched chunks are read from the inbox.
  std::vector<uint8_t> Now() const {
    std::vector<uint8_t> bytes;
    for (uint64_t chunk = 0; chunk < changed.size(); ++chunk) {
      const uint8_t* const at = state->Chunk(0, chunk);
      bytes.insert(bytes.end(), at, at + ChunkBytes(memory.size(), chunk));
    }
    return bytes;
  }

  std::vector<uint8_t> memory;
  std::vector<uint8_t> inbox;
  std::vector<uint8_t> changed;
  std::shared_ptr<LocalState> state;
};

MemberId MemberOf(int peer) { return MemberId(100 + peer); }

class StateRunnerTest : public ::testing::Test {
 protected:
  // Makes the peers. Peer 0 has a link to each of the others.
  void Make(int peers, uint64_t state_rate = 0, uint64_t keep_state = 0) {
    FakeRingOptions network;
    network.stream_bytes_max = 64 << 10;
    network.partial = false;
    TransportOptions options;
    options.lanes = 1;
    world_ = std::make_unique<PeerWorld>(Rings::kFake, 1, peers, options, network,
                                         [] { return std::make_unique<RunnerPeer>(); });
    for (int i = 0; i < peers; ++i) at(i).Make(state_rate, keep_state);
    for (int i = 1; i < peers; ++i) world_->Open(0, i);
    ASSERT_TRUE(world_->Until([&] {
      for (int i = 1; i < peers; ++i) {
        if (!world_->Linked(0, i)) return false;
      }
      return true;
    }));
  }
  void TearDown() override {
    if (world_ != nullptr) world_->Close();
  }
  RunnerPeer& at(int i) { return static_cast<RunnerPeer&>(world_->at(i)); }
  StateRunner& runner(int i) { return *at(i).runner; }

  // Begins a sync and waits until the core would hear of it. Returns the root that is offered.
  Hash128 Begin(int i, const State& state) {
    const size_t before = at(i).Events<LocalSync>().size();
    runner(i).Begin(kLocal, kGroup, state.Sync(), /*with_step=*/false);
    EXPECT_TRUE(world_->Until([&] { return at(i).Events<LocalSync>().size() > before; }));
    return at(i).Events<LocalSync>().back().sync.state;
  }
  Hash128 Serve(int i, const State& state) {
    const Hash128 root = Begin(i, state);
    runner(i).Carry(ServeState{kLocal, kGroup, MemberOf(i), root});
    return root;
  }
  std::vector<control::SyncSource> Sources(std::vector<int> peers) {
    std::vector<control::SyncSource> sources;
    sources.reserve(peers.size());
    for (const int i : peers) sources.push_back({MemberOf(i), at(i).id});
    return sources;
  }
  void Fetch(const Hash128& root, std::vector<int> peers) {
    runner(0).Carry(StartTransfer{kLocal, kGroup, 1, {}, root, Sources(std::move(peers))});
  }
  std::vector<TransferEnded> Ended() { return at(0).Events<TransferEnded>(); }
  // Compares the manifest of peer 0 with that of peer 1. Returns the difference.
  std::string Difference() {
    const size_t before = at(0).Events<ManifestCompared>().size();
    runner(0).Carry(CompareManifest{kLocal, Sources({1}).front()});
    EXPECT_TRUE(world_->Until([&] { return at(0).Events<ManifestCompared>().size() > before; }));
    return at(0).Events<ManifestCompared>().back().difference;
  }
  void Steps(int count) {
    for (int i = 0; i < count; ++i) world_->Step();
  }
  // Stalls the data lane between peers 0 and 1, or lets it go on.
  void Stall(bool stalled) {
    for (int i = 0; i < world_->fake->connections(); ++i) {
      if (world_->fake->BytesSent(i, /*by_dialer=*/false) > (64 << 10)) {
        world_->fake->StallConnection(i, stalled);
      }
    }
  }
  // Peer 1 serves peer 0, and the lane stalls in the middle of a piece.
  void ServeAndStall(const State& held, const State& wanted) {
    const Hash128 root = Serve(1, held);
    Begin(0, wanted);
    Fetch(root, {1});
    ASSERT_TRUE(world_->Until(
        [&] { return runner(0).exchange()->ProgressOf(kLocal.value()).bytes_done >= 2 * kMiB; }));
    Stall(true);
    Steps(50);
    ASSERT_TRUE(runner(1).exchange()->server()->Reading(held.state.get()));
  }

  std::unique_ptr<PeerWorld> world_;
};

TEST_F(StateRunnerTest, AMemberFetchesWhatAnotherServesAndItsTrainerHearsOfProgress) {
  const State held(20 * kMiB + 5, 1);
  const State wanted(20 * kMiB + 5, 2);
  Make(2, /*state_rate=*/10 << 20);
  const Hash128 root = Serve(1, held);
  Begin(0, wanted);
  const std::vector<uint8_t> brought = wanted.memory;
  const Tick start = world_->Now();
  Fetch(root, {1});
  ASSERT_TRUE(world_->Until([&] { return !Ended().empty(); }));
  EXPECT_EQ(Ended()[0].local, kLocal);
  EXPECT_TRUE(Ended()[0].outcome.ok()) << Ended()[0].outcome.text;
  EXPECT_EQ(Ended()[0].bytes, 20 * kMiB + 5);
  EXPECT_THAT(Ended()[0].sources, ElementsAre(MemberOf(1)));
  EXPECT_THAT(Ended()[0].corrupt, IsEmpty());
  EXPECT_EQ(held.memory, wanted.Now());
  EXPECT_EQ(wanted.memory, brought) << "nothing is agreed on yet";
  EXPECT_GE(world_->Now() - start, Millis(1900)) << "the rate is kept";

  const auto& told = at(0).progress;
  ASSERT_GE(told.size(), 15u);
  EXPECT_LE(told.size(), 25u);
  for (size_t i = 1; i < told.size(); ++i) {
    EXPECT_GE(told[i].first - told[i - 1].first, Millis(100)) << "ten a second";
    EXPECT_GE(told[i].second.bytes_done, told[i - 1].second.bytes_done);
  }
  const control::FetchProgress& late = told.back().second;
  EXPECT_EQ(late.bytes_total, 20 * kMiB + 5);
  EXPECT_GT(late.bytes_done, 15 * kMiB);
  EXPECT_EQ(late.sources, 1u);
  EXPECT_NEAR(static_cast<double>(late.bytes_per_second), 10.0 * kMiB, 3.0 * kMiB);
  Steps(300);
  EXPECT_EQ(at(0).progress.size(), told.size()) << "none after the end";
}

TEST_F(StateRunnerTest, WithoutATrainerATransferEndsAtOnce) {
  Make(2);
  Fetch({1, 2}, {1});
  Steps(1);
  ASSERT_EQ(Ended().size(), 1u);
  EXPECT_EQ(Ended()[0].outcome.code, Code::kAborted);
}

TEST_F(StateRunnerTest, AStoppedTransferEndsWithItsReason) {
  const State held(8 * kMiB, 1);
  const State wanted(8 * kMiB, 2);
  Make(2, /*state_rate=*/1 << 20);
  const Hash128 root = Serve(1, held);
  Begin(0, wanted);
  Fetch(root, {1});
  ASSERT_TRUE(world_->Until(
      [&] { return runner(0).exchange()->ProgressOf(kLocal.value()).bytes_done >= 2 * kMiB; }));
  runner(0).Carry(StopTransfer{kLocal});
  ASSERT_TRUE(world_->Until([&] { return !Ended().empty(); }));
  EXPECT_EQ(Ended()[0].outcome.code, Code::kAborted);
  EXPECT_EQ(Ended()[0].outcome.text, "was stopped");
  EXPECT_EQ(Ended().size(), 1u);
}

TEST_F(StateRunnerTest, SourcesThatAreNamedLaterAreAsked) {
  const State held(3 * kMiB, 1);
  const State wanted(3 * kMiB, 2);
  Make(3);
  const Hash128 root = Serve(2, held);
  Begin(0, wanted);
  Fetch(root, {});
  Steps(20);
  EXPECT_TRUE(Ended().empty());
  runner(0).Carry(ChangeSources{kLocal, Sources({2})});
  ASSERT_TRUE(world_->Until([&] { return !Ended().empty(); }));
  EXPECT_TRUE(Ended()[0].outcome.ok()) << Ended()[0].outcome.text;
  EXPECT_THAT(Ended()[0].sources, ElementsAre(MemberOf(2)));
}

TEST_F(StateRunnerTest, AHolderWithWrongBitsIsNamed) {
  State held(6 * kMiB, 1);
  const State other(6 * kMiB, 1);
  const State wanted(6 * kMiB, 2);
  Make(3);
  const Hash128 root = Serve(1, held);
  ASSERT_EQ(Serve(2, other), root);
  for (size_t at = 0; at < held.memory.size(); at += kMiB) held.memory[at] ^= 1;
  Begin(0, wanted);
  Fetch(root, {1, 2});
  ASSERT_TRUE(world_->Until([&] { return !Ended().empty(); }));
  EXPECT_TRUE(Ended()[0].outcome.ok()) << Ended()[0].outcome.text;
  EXPECT_THAT(Ended()[0].corrupt, ElementsAre(MemberOf(1)));
  EXPECT_EQ(wanted.Now(), other.memory);
}

// ------------------------------------------------------------------------------ kept states

TEST_F(StateRunnerTest, WhatWasAgreedOnIsKeptBeforeTheAnswerAndServedFromThenOn) {
  State held(4 * kMiB + 5, 1);
  const State wanted(4 * kMiB + 5, 2);
  Make(2, /*state_rate=*/0, /*keep_state=*/64 * kMiB);
  runner(1).Add(kLocal, kGroup, "a");
  const Hash128 root = Serve(1, held);
  const std::vector<uint8_t> agreed = held.memory;
  runner(1).Carry(EndServe{kLocal});
  runner(1).Carry(SyncDone{kLocal, {}, 1, root, 0, 0});
  bool answered = false;
  runner(1).WhenUnread(kLocal, [&] { answered = true; });
  EXPECT_FALSE(answered) << "its trainer would write to what is being copied";
  EXPECT_TRUE(runner(1).reading());
  ASSERT_TRUE(world_->Until([&] { return answered; }));
  EXPECT_FALSE(runner(1).reading());
  EXPECT_EQ(runner(1).kept_bytes(), 4 * kMiB + 4096);
  uint64_t revision = 0;
  EXPECT_TRUE(runner(1).KeptRevision(kLocal, *held.state, &revision));
  EXPECT_EQ(revision, 1u);
  // The source trains, and is asked for the state that it has committed.
  std::fill(held.memory.begin(), held.memory.end(), uint8_t{9});
  Begin(0, wanted);
  Fetch(root, {1});
  ASSERT_TRUE(world_->Until([&] { return !Ended().empty(); }));
  EXPECT_TRUE(Ended()[0].outcome.ok()) << Ended()[0].outcome.text;
  EXPECT_THAT(Ended()[0].corrupt, IsEmpty());
  EXPECT_EQ(wanted.Now(), agreed);
}

TEST_F(StateRunnerTest, WhatCameInTheBackgroundIsCopiedBeforeItContributes) {
  const State held(8 * kMiB, 1);
  const State wanted(8 * kMiB, 2);
  Make(2, /*state_rate=*/4 << 20, /*keep_state=*/64 * kMiB);
  runner(0).Add(kLocal, kGroup, "a");
  const Hash128 root = Serve(1, held);
  Begin(0, wanted);
  StartTransfer fetch{kLocal, kGroup, 1, {}, root, Sources({1})};
  fetch.background = true;
  runner(0).Carry(fetch);
  ASSERT_TRUE(world_->Until(
      [&] { return runner(0).exchange()->ProgressOf(kLocal.value()).bytes_done >= 2 * kMiB; }));
  EXPECT_EQ(runner(0).kept_bytes(), 0u);
  runner(0).Carry(StopTransfer{kLocal});
  ASSERT_TRUE(world_->Until([&] { return !Ended().empty(); }));
  EXPECT_EQ(Ended()[0].outcome.text, "was stopped");
  EXPECT_EQ(runner(0).kept_bytes(), 8 * kMiB);
  runner(0).Carry(fetch);
  ASSERT_TRUE(world_->Until([&] { return Ended().size() == 2; }));
  EXPECT_TRUE(Ended()[1].outcome.ok()) << Ended()[1].outcome.text;
  uint64_t revision = 0;
  EXPECT_FALSE(runner(0).KeptRevision(kLocal, *held.state, &revision));
  runner(0).Carry(SyncDone{kLocal, {}, 1, root, 8 * kMiB, 1});
  EXPECT_FALSE(runner(0).reading()) << "the others would wait for the answer";
  EXPECT_TRUE(runner(0).KeptRevision(kLocal, *held.state, &revision));
  EXPECT_EQ(revision, 1u);
}

TEST_F(StateRunnerTest, WhatATrainerLeftIsNotServedAnyMore) {
  const State held(2 * kMiB, 1);
  const State wanted(2 * kMiB, 2);
  Make(2, /*state_rate=*/0, /*keep_state=*/64 * kMiB);
  runner(1).Add(kLocal, kGroup, "a");
  const Hash128 root = Serve(1, held);
  runner(1).Carry(EndServe{kLocal});
  runner(1).Carry(SyncDone{kLocal, {}, 1, root, 0, 0});
  ASSERT_TRUE(world_->Until([&] { return !runner(1).reading(); }));
  EXPECT_EQ(held.state.use_count(), 1) << "nobody holds on to the memory";
  runner(1).Gone(kLocal);
  EXPECT_EQ(runner(1).kept_bytes(), 2 * kMiB);
  Begin(0, wanted);
  Fetch(root, {1});
  ASSERT_TRUE(world_->Until([&] { return !Ended().empty(); }));
  EXPECT_THAT(Ended()[0].outcome.text, HasSubstr("m101 does not have the state"));
}

TEST_F(StateRunnerTest, ATransferThatBreaksOffLeavesTheTensorsAndTheNextGoesOnWhereItWas) {
  const State held(8 * kMiB, 1);
  const State own(8 * kMiB, 2);
  Make(2, /*state_rate=*/4 << 20);
  const Hash128 root = Serve(1, held);
  const std::vector<uint8_t> brought = own.memory;
  Begin(0, own);
  Fetch(root, {1});
  ASSERT_TRUE(world_->Until(
      [&] { return runner(0).exchange()->ProgressOf(kLocal.value()).bytes_done >= 2 * kMiB; }));
  runner(0).Carry(StopTransfer{kLocal});
  ASSERT_TRUE(world_->Until([&] { return !Ended().empty(); }));
  runner(0).Carry(SyncDone{kLocal, {Code::kAborted, "failed"}, 0, {}, 0, 0});
  EXPECT_EQ(own.memory, brought);
  const Hash128 before = Begin(0, own);
  EXPECT_EQ(before, RootOf(own.state->manifest, own.state->digests));
  Fetch(root, {1});
  ASSERT_TRUE(world_->Until([&] { return Ended().size() == 2; }));
  EXPECT_TRUE(Ended()[1].outcome.ok()) << Ended()[1].outcome.text;
  EXPECT_LE(Ended()[1].bytes, 6 * kMiB) << "two chunks were here";
  EXPECT_EQ(own.Now(), held.memory);
  runner(0).Carry(SyncDone{kLocal, {}, 1, root, 8 * kMiB, 1});
  EXPECT_EQ(own.changed, std::vector<uint8_t>(8, 1));
  EXPECT_EQ(own.memory, brought) << "that is for its trainer to do";
}

// ------------------------------------------------------------------------------ the end of a sync

TEST_F(StateRunnerTest, AfterASyncOthersMayCompareTheManifestAndFetchNothing) {
  const State held(2 * kMiB, 1);
  const State wanted(2 * kMiB, 2, "others");
  Make(2);
  const Hash128 root = Serve(1, held);
  Begin(0, wanted);
  const std::string difference = FirstDifference(wanted.state->manifest, held.state->manifest);
  ASSERT_NE(difference, "");
  EXPECT_EQ(Difference(), difference);
  runner(1).Carry(EndServe{kLocal});
  runner(1).Carry(SyncDone{kLocal, {}, 1, root, 0, 0});
  EXPECT_EQ(Difference(), difference);
  EXPECT_EQ(held.state.use_count(), 1) << "nobody holds on to the memory";
  Fetch(root, {1});
  ASSERT_TRUE(world_->Until([&] { return !Ended().empty(); }));
  EXPECT_THAT(Ended()[0].outcome.text, HasSubstr("m101 does not have the state"));
}

TEST_F(StateRunnerTest, AMemberThatIsOutIsNotKnown) {
  const State held(2 * kMiB, 1);
  const State wanted(2 * kMiB, 2, "others");
  Make(2);
  Serve(1, held);
  Begin(0, wanted);
  runner(1).Forget(kLocal);
  EXPECT_EQ(Difference(), "");
}

TEST_F(StateRunnerTest, WithoutAStateThereIsNothingToCompare) {
  Make(2);
  EXPECT_EQ(Difference(), "");
}

TEST_F(StateRunnerTest, ATrainerIsAnsweredWhenNothingReadsItsTensors) {
  const State held(16 * kMiB, 1);
  const State wanted(16 * kMiB, 2);
  Make(2);
  ServeAndStall(held, wanted);
  runner(1).Carry(EndServe{kLocal});
  runner(1).Carry(SyncDone{kLocal, {}, 1, {}, 0, 0});
  std::vector<int> told;
  runner(1).WhenUnread(kLocal, [&] { told.push_back(1); });
  runner(1).WhenUnread(kLocal, [&] { told.push_back(2); });
  runner(1).WhenUnread(LocalId(5), [&] { told.push_back(3); });
  EXPECT_THAT(told, ElementsAre(3)) << "others do not wait";
  Steps(200);
  EXPECT_THAT(told, ElementsAre(3));
  Stall(false);
  ASSERT_TRUE(world_->Until([&] { return told.size() == 3; }));
  EXPECT_THAT(told, ElementsAre(3, 1, 2));
  EXPECT_FALSE(runner(1).exchange()->server()->Reading(held.state.get()));
  runner(1).WhenUnread(kLocal, [&] { told.push_back(4); });
  EXPECT_EQ(told.back(), 4);
}

TEST_F(StateRunnerTest, ATrainerIsAnsweredThoughTheReceiverNeverReads) {
  const State held(16 * kMiB, 1);
  const State wanted(16 * kMiB, 2);
  Make(2);
  ServeAndStall(held, wanted);
  runner(1).Carry(EndServe{kLocal});
  bool told = false;
  runner(1).WhenUnread(kLocal, [&] { told = true; });
  EXPECT_FALSE(told);
  EXPECT_TRUE(world_->Until([&] { return told; }, /*ms=*/10000));
}

TEST_F(StateRunnerTest, NothingIsFetchedIntoTensorsThatAreRead) {
  const State held(16 * kMiB, 1);
  const State wanted(16 * kMiB, 2);
  Make(2);
  ServeAndStall(held, wanted);
  // A restarted coordinator has elected another state.
  runner(1).Carry(EndServe{kLocal});
  runner(1).Carry(StartTransfer{kLocal, kGroup, 1, {}, {7, 7}, Sources({0})});
  runner(1).Carry(ChangeSources{kLocal, {}});
  Steps(100);
  EXPECT_EQ(runner(1).exchange()->GetStats().transfers, 0u);
  Stall(false);
  ASSERT_TRUE(world_->Until([&] { return runner(1).exchange()->GetStats().transfers == 1; }));
  EXPECT_FALSE(runner(1).exchange()->server()->Reading(held.state.get()));
  runner(1).Carry(StopTransfer{kLocal});
  EXPECT_TRUE(world_->Until([&] { return at(1).Events<TransferEnded>().size() == 1; }));
}

}  // namespace
}  // namespace longhaul::peerd
