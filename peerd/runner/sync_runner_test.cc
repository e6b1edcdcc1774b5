#include "peerd/runner/sync_runner.h"

#include <chrono>
#include <numeric>
#include <semaphore>
#include <variant>

#include "gtest/gtest.h"
#include "peerd/state/state_hash.h"

namespace longhaul::peerd {
namespace {

const LocalId kLocal(4);

class SyncRunnerTest : public testing::Test {
 protected:
  SyncRunnerTest() {
    std::iota(bytes_.begin(), bytes_.end(), uint8_t{0});
    state_ = std::make_shared<LocalState>();
    state_->manifest = {{"w", LH_WIRE_UINT8, {2500000}, 2500000, false},
                        {"none", LH_WIRE_FLOAT32, {0}, 0, false},
                        {"rng", LH_WIRE_UINT8, {100}, 100, true}};
    state_->places = {bytes_.data() + 1, nullptr, bytes_.data() + 2500001};
    state_->changed = changed_;
    state_->digests.resize(3);
    state_->digests[0].resize(3);
    state_->digests[2].resize(1);
  }

  StateSync Sync(std::vector<uint8_t> touched = {}) {
    StateSync sync;
    sync.state = state_;
    sync.strategy = control::SyncStrategy::kSend;
    sync.revision = 12;
    sync.touched = std::move(touched);
    return sync;
  }
  // The events that come of it; waits for one.
  std::vector<Event> Events() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    std::vector<Event> events;
    while (events.empty()) {
      pool_.Deliver();
      events = runner_.TakeEvents();
      if (events.empty() && !woken_.try_acquire_until(deadline)) break;
    }
    return events;
  }
  SyncRequest RequestOf(const StateSync& sync) {
    runner_.Begin(kLocal, sync, /*with_step=*/false);
    const std::vector<Event> events = Events();
    EXPECT_EQ(events.size(), 1u);
    return std::get<LocalSync>(events.at(0)).sync;
  }
  void End(Outcome outcome = {}, bool torn = false) {
    runner_.End({kLocal, std::move(outcome), 12, {}, torn, 0, 0});
  }

  std::vector<uint8_t> bytes_ = std::vector<uint8_t>(2500101);
  std::vector<uint8_t> changed_ = std::vector<uint8_t>(4, 1);
  std::shared_ptr<LocalState> state_;
  Tick now_;
  std::counting_semaphore<> woken_{0};
  HashPool pool_{2, [this] { woken_.release(); }};
  SyncRunner runner_{&pool_, [this] { return now_; }};
};

TEST_F(SyncRunnerTest, TellsTheCoreWhatThereIs) {
  const SyncRequest request = RequestOf(Sync());
  const uint8_t* const w = bytes_.data() + 1;
  const std::vector<Hash128> chunks = {HashChunk({w, 1 << 20}), HashChunk({w + (1 << 20), 1 << 20}),
                                       HashChunk({w + (2 << 20), 2500000 - (2 << 20)})};
  const std::vector<Hash128> tensors = {HashTensor(2500000, chunks), HashTensor(0, {}), {}};
  EXPECT_EQ(request.state, HashState(state_->manifest, tensors));
  EXPECT_EQ(request.manifest, HashManifest(state_->manifest));
  EXPECT_EQ(request.strategy, control::SyncStrategy::kSend);
  EXPECT_EQ(request.revision, 12u);
  EXPECT_FALSE(request.restored);
  EXPECT_EQ(state_->digests[0], chunks);
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 0));
  EXPECT_EQ(runner_.StateOf(kLocal), state_);
}

TEST_F(SyncRunnerTest, AStepCarriesTheSync) {
  StateSync sync = Sync();
  sync.restored = true;
  runner_.Begin(kLocal, sync, /*with_step=*/true);
  const std::vector<Event> events = Events();
  ASSERT_EQ(events.size(), 1u);
  const auto& step = std::get<LocalStep>(events[0]);
  EXPECT_EQ(step.local, kLocal);
  ASSERT_TRUE(step.sync.has_value());
  EXPECT_TRUE(step.sync->restored);
}

TEST_F(SyncRunnerTest, HashesWhatWasTouchedAndWhatIsNotKnown) {
  const SyncRequest before = RequestOf(Sync({0, 0, 0}));
  End();
  bytes_[1] ^= 1;
  EXPECT_EQ(RequestOf(Sync({0, 0, 0})).state, before.state) << "the trainer says it is as it was";
  End();
  const SyncRequest after = RequestOf(Sync({1, 0, 0}));
  EXPECT_NE(after.state, before.state);
  End();
  bytes_[1] ^= 1;
  EXPECT_EQ(RequestOf(Sync()).state, before.state);
}

TEST_F(SyncRunnerTest, WhatMayBeUnequalDoesNotCount) {
  const SyncRequest before = RequestOf(Sync());
  End();
  bytes_[2500001] ^= 1;
  EXPECT_EQ(RequestOf(Sync()).state, before.state);
}

TEST_F(SyncRunnerTest, ATornStateIsHashedAgain) {
  const SyncRequest before = RequestOf(Sync());
  End({Code::kAborted, "source died"}, /*torn=*/true);
  bytes_[1] ^= 1;
  EXPECT_NE(RequestOf(Sync({0, 0, 0})).state, before.state);
}

TEST_F(SyncRunnerTest, TheAnswerSaysHowLongItTook) {
  RequestOf(Sync());
  now_ = Tick{5000};
  const StateSyncInfo info = runner_.End({kLocal, {}, 13, {1, 2}, false, 77, 3});
  EXPECT_EQ(info.total_us, 5000);
  EXPECT_EQ(info.revision, 13u);
  EXPECT_EQ(info.state, (Hash128{1, 2}));
  EXPECT_EQ(info.bytes, 77u);
  EXPECT_EQ(info.sources, 3u);
  EXPECT_EQ(runner_.StateOf(kLocal), nullptr);
}

TEST_F(SyncRunnerTest, TheTrainerIsToldWhichChunksCameFromOthers) {
  RequestOf(Sync());
  state_->digests[0][1] = {1, 2};
  state_->digests[2][0] = {3, 4};
  runner_.End({kLocal, {}, 13, {1, 2}, false, 77, 3});
  EXPECT_EQ(changed_, (std::vector<uint8_t>{0, 1, 0, 1}));
  RequestOf(Sync());
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 0));
}

TEST_F(SyncRunnerTest, AWithdrawnSyncNeverReachesTheCore) {
  runner_.Begin(kLocal, Sync(), /*with_step=*/false);
  EXPECT_EQ(runner_.StateOf(kLocal), nullptr);
  EXPECT_TRUE(runner_.Withdraw(kLocal));
  EXPECT_FALSE(runner_.Withdraw(kLocal));
  // Another one of the same member; what was dropped is hashed again.
  const LocalId other(5);
  runner_.Begin(other, Sync({0, 0, 0}), /*with_step=*/false);
  const std::vector<Event> events = Events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(std::get<LocalSync>(events[0]).local, other);
  EXPECT_EQ(state_->digests[0].size(), 3u);
  EXPECT_FALSE(runner_.Withdraw(other)) << "the core has heard of it";
}

TEST_F(SyncRunnerTest, EndsOfWithdrawnSyncsAreIgnored) {
  const StateSyncInfo info = runner_.End({kLocal, {Code::kEvicted, "late"}, 0, {}, true, 0, 0});
  EXPECT_TRUE(info.torn);
  EXPECT_EQ(info.total_us, 0);
}

}  // namespace
}  // namespace longhaul::peerd
