#include "peerd/engine/sync_runner.h"

#include <string.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <optional>
#include <semaphore>
#include <string>
#include <variant>

#include "base/log.h"
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
    state_->FetchInto({inbox_.data() + 1, nullptr, inbox_.data() + 2500001});
  }

  StateSync Sync(std::vector<uint8_t> touched = {}) {
    StateSync sync;
    sync.state = state_;
    sync.strategy = control::SyncStrategy::kSend;
    sync.revision = 12;
    sync.touched = std::move(touched);
    return sync;
  }
  // Waits until there is an event, and returns all events.
  std::vector<Event> Events() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    std::vector<Event> events;
    while (events.empty()) {
      pool_.Deliver();
      events = runner_.PopEvents();
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
  StateSyncInfo End(Outcome outcome = {}) {
    return runner_.End(SyncDone{kLocal, std::move(outcome), 12, {}, 0, 0});
  }

  std::vector<uint8_t> bytes_ = std::vector<uint8_t>(2500101);
  std::vector<uint8_t> inbox_ = std::vector<uint8_t>(2500101, 99);
  std::vector<uint8_t> changed_ = std::vector<uint8_t>(4, 1);
  std::shared_ptr<LocalState> state_;
  Tick now_;
  std::counting_semaphore<> woken_{0};
  HashPool pool_{2, [this] { woken_.release(); }};
  KeptStates kept_{{uint64_t{1} << 30, Seconds(60)}, &pool_, [this] { return now_; }};
  SyncRunner runner_{&pool_, &kept_, [this] { return now_; }};
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
  EXPECT_EQ(state_->digests[0], chunks);
  EXPECT_EQ(runner_.StateOf(kLocal), state_);
}

TEST_F(SyncRunnerTest, AStepCarriesTheSync) {
  runner_.Begin(kLocal, Sync(), /*with_step=*/true);
  const std::vector<Event> events = Events();
  ASSERT_EQ(events.size(), 1u);
  const auto& step = std::get<LocalStep>(events[0]);
  EXPECT_EQ(step.local, kLocal);
  ASSERT_TRUE(step.sync.has_value());
  EXPECT_EQ(step.sync->revision, 12u);
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

TEST_F(SyncRunnerTest, WhatWasPreparedIsKnown) {
  bool prepared = false;
  runner_.Prepare(state_, [&] { prepared = true; });
  while (!prepared) {
    ASSERT_TRUE(woken_.try_acquire_for(std::chrono::seconds(30)));
    pool_.Deliver();
  }
  EXPECT_TRUE(runner_.PopEvents().empty());
  bytes_[1] ^= 1;
  const SyncRequest request = RequestOf(Sync({0, 0, 0}));
  bytes_[1] ^= 1;
  End();
  EXPECT_EQ(RequestOf(Sync()).state, request.state);
}

TEST_F(SyncRunnerTest, WhatMayBeUnequalDoesNotCount) {
  const SyncRequest before = RequestOf(Sync());
  End();
  bytes_[2500001] ^= 1;
  EXPECT_EQ(RequestOf(Sync()).state, before.state);
}

TEST_F(SyncRunnerTest, AfterASyncThatFailedAllIsHashedAgainAndWhatHadComeIsNotAskedForAgain) {
  const SyncRequest before = RequestOf(Sync());
  const Hash128 came{1, 2};
  state_->BeginFetch(0, 1);
  state_->Fetched(0, 1, came);
  state_->BeginFetch(0, 2);
  End({Code::kAborted, "source died"});
  EXPECT_EQ(RequestOf(Sync({0, 0, 0})).state, before.state);
  EXPECT_EQ(state_->Chunk(0, 1), bytes_.data() + 1 + kStateChunkBytes);
  EXPECT_TRUE(state_->Has(0, 1, came));
  EXPECT_EQ(state_->Chunk(0, 1), inbox_.data() + 1 + kStateChunkBytes);
  EXPECT_FALSE(state_->Has(0, 2, came));
}

// If peerd has only copies of the tensors, fetched chunks overwrite them.
TEST_F(SyncRunnerTest, WhatWasFetchedOverACopyIsForgottenWhenTheCopyIsMadeAnew) {
  state_->FetchInto(state_->places);
  RequestOf(Sync());
  state_->BeginFetch(0, 1);
  state_->Fetched(0, 1, {1, 2});
  End({Code::kAborted, "source died"});
  RequestOf(Sync());
  EXPECT_FALSE(state_->Has(0, 1, {1, 2}));
}

TEST_F(SyncRunnerTest, TheAnswerSaysHowLongItTook) {
  RequestOf(Sync());
  now_ = Tick{5000};
  const StateSyncInfo info = runner_.End(SyncDone{kLocal, {}, 13, {1, 2}, 77, 3});
  EXPECT_EQ(info.total_us, 5000);
  EXPECT_EQ(info.revision, 13u);
  EXPECT_EQ(info.state, (Hash128{1, 2}));
  EXPECT_EQ(info.bytes, 77u);
  EXPECT_EQ(info.sources, 3u);
  EXPECT_EQ(runner_.StateOf(kLocal), nullptr);
}

TEST_F(SyncRunnerTest, TheTrainerIsToldWhichChunksCameFromOthers) {
  RequestOf(Sync());
  state_->Fetched(0, 1, {1, 2});
  state_->Fetched(2, 0, {3, 4});
  EXPECT_TRUE(runner_.End(SyncDone{kLocal, {}, 13, {1, 2}, 77, 3}).changed);
  EXPECT_EQ(changed_, (std::vector<uint8_t>{0, 1, 0, 1}));
  EXPECT_EQ(state_->Chunk(0, 1), bytes_.data() + 1 + kStateChunkBytes) << "its trainer has it";
  RequestOf(Sync());
  EXPECT_FALSE(End().changed);
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 0));
}

TEST_F(SyncRunnerTest, AWithdrawnSyncNeverReachesTheCore) {
  runner_.Begin(kLocal, Sync(), /*with_step=*/false);
  EXPECT_EQ(runner_.StateOf(kLocal), nullptr);
  EXPECT_EQ(runner_.Withdraw(kLocal), false);
  EXPECT_FALSE(runner_.Withdraw(kLocal).has_value());
  // Another member syncs the same state. What the first sync did not hash is hashed now.
  const LocalId other(5);
  runner_.Begin(other, Sync({0, 0, 0}), /*with_step=*/false);
  const std::vector<Event> events = Events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(std::get<LocalSync>(events[0]).local, other);
  EXPECT_EQ(state_->digests[0].size(), 3u);
  EXPECT_FALSE(runner_.Withdraw(other).has_value()) << "the core has heard of it";
}

TEST_F(SyncRunnerTest, EndsOfWithdrawnSyncsAreIgnored) {
  const StateSyncInfo info = End({Code::kEvicted, "late"});
  EXPECT_FALSE(info.changed);
  EXPECT_EQ(info.total_us, 0);
}

// ------------------------------------------------------------------------------ the background

class HeldSyncsTest : public SyncRunnerTest {
 protected:
  // Puts the member into the background: its call has ended, and its tensors are held.
  void Hold() {
    RequestOf(Sync());
    SyncDone ended{kLocal};
    ended.background = true;
    const StateSyncInfo info = runner_.End(ended);
    EXPECT_TRUE(info.background);
    EXPECT_EQ(info.bytes, 0u);
  }
};

TEST_F(HeldSyncsTest, WhatIsHeldIsThereForTransfersUntilItIsTaken) {
  Hold();
  EXPECT_EQ(runner_.StateOf(kLocal), state_);
  const StateSyncInfo late = runner_.End(TakeDone{kLocal, {Code::kDeadlineExceeded, "not yet"}});
  EXPECT_TRUE(late.background);
  EXPECT_EQ(runner_.StateOf(kLocal), state_);
  const StateSyncInfo info = runner_.End(TakeDone{kLocal, {}, 13, {1, 2}, 77, 3});
  EXPECT_FALSE(info.background);
  EXPECT_EQ(info.revision, 13u);
  EXPECT_EQ(info.bytes, 77u);
  EXPECT_EQ(runner_.StateOf(kLocal), nullptr);
}

TEST_F(HeldSyncsTest, NothingIsHashedOfWhatIsHeld) {
  Hold();
  state_->digests[0][1] = {};
  runner_.Begin(kLocal, Sync(), /*with_step=*/true);
  const std::vector<Event> events = runner_.PopEvents();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_TRUE(std::get<LocalStep>(events[0]).sync.has_value());
  EXPECT_EQ(state_->digests[0][1], Hash128{});
}

TEST_F(HeldSyncsTest, WhatHasChangedIsToldAgainstWhatTheTrainerHas) {
  Hold();
  state_->Fetched(0, 1, {1, 2});
  // The trainer calls again while the state is being fetched.
  runner_.Begin(kLocal, Sync(), /*with_step=*/false);
  runner_.PopEvents();
  SyncDone ended{kLocal};
  ended.background = true;
  runner_.End(ended);
  state_->Fetched(2, 0, {3, 4});
  runner_.End(TakeDone{kLocal, {}, 13, {1, 2}, 77, 3});
  EXPECT_EQ(changed_, (std::vector<uint8_t>{0, 1, 0, 1}));
}

TEST_F(HeldSyncsTest, ASyncThatEndsAsUsualTellsTheSame) {
  Hold();
  state_->Fetched(0, 1, {1, 2});
  runner_.Begin(kLocal, Sync(), /*with_step=*/false);
  runner_.PopEvents();
  runner_.End(SyncDone{kLocal, {}, 13, {1, 2}, 77, 3});
  EXPECT_EQ(changed_, (std::vector<uint8_t>{0, 1, 0, 0}));
  EXPECT_EQ(runner_.StateOf(kLocal), nullptr);
}

// ------------------------------------------------------------------------------ kept states

class KeptSyncsTest : public SyncRunnerTest {
 protected:
  KeptSyncsTest() {
    SetLogSink([](std::string_view) {});
    Join(kLocal, "a");
  }
  ~KeptSyncsTest() override { SetLogSink(nullptr); }

  void Join(LocalId local, const std::string& name) { kept_.Add(local.value(), {"run", 0}, name); }
  bool Until(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (true) {
      pool_.Deliver();
      if (condition()) return true;
      if (!woken_.try_acquire_until(deadline)) return false;
    }
  }
  SyncRequest Begin(LocalId local, uint64_t revision,
                    control::SyncStrategy strategy = control::SyncStrategy::kPopular) {
    StateSync sync = Sync();
    sync.revision = revision;
    sync.strategy = strategy;
    runner_.Begin(local, sync, /*with_step=*/false);
    const std::vector<Event> events = Events();
    EXPECT_EQ(events.size(), 1u);
    return std::get<LocalSync>(events.at(0)).sync;
  }
  // Runs a sync of the present tensors to its end. The trainer is answered.
  StateSyncInfo Commit(LocalId local, uint64_t revision) {
    const SyncRequest request = Begin(local, revision);
    const StateSyncInfo info =
        runner_.End(SyncDone{local, {}, request.revision, request.state, 0, 0});
    EXPECT_TRUE(Until([&] { return !runner_.Keeping(local); }));
    return info;
  }
  // Acts as if a trainer of this name had committed a state full of `fill`, and died.
  void Leave(const std::string& name, uint8_t fill, uint64_t revision) {
    const LocalId former(77);
    Join(former, name);
    std::fill(bytes_.begin(), bytes_.end(), fill);
    Commit(former, revision);
    kept_.Remove(former.value());
    std::fill(bytes_.begin(), bytes_.end(), uint8_t{0});
  }
  // Ignores the byte before the first tensor, which belongs to no tensor.
  bool AllAre(uint8_t value) const {
    return std::all_of(bytes_.begin() + 1, bytes_.end(), [&](uint8_t b) { return b == value; });
  }
  // True if all bytes that are offered have this value.
  bool AllOfferedAre(uint8_t value) const {
    for (size_t tensor = 0; tensor < state_->manifest.size(); ++tensor) {
      for (uint64_t chunk = 0; chunk < state_->digests[tensor].size(); ++chunk) {
        const uint8_t* const at = state_->Chunk(tensor, chunk);
        const uint8_t* const end = at + ChunkBytes(state_->manifest[tensor].bytes, chunk);
        if (!std::all_of(at, end, [&](uint8_t b) { return b == value; })) return false;
      }
    }
    return true;
  }
};

TEST_F(KeptSyncsTest, AMemberGoesOnWhereOneOfItsNameWas) {
  Leave("a", 7, 20);
  const SyncRequest request = Begin(kLocal, 3);
  EXPECT_EQ(request.revision, 20u);
  EXPECT_TRUE(request.kept);
  EXPECT_TRUE(AllOfferedAre(7));
  EXPECT_TRUE(AllAre(0)) << "before all have agreed on it";
  EXPECT_EQ(request.state, RootOf(state_->manifest, state_->digests));
  const StateSyncInfo info = runner_.End(SyncDone{kLocal, {}, 20, request.state, 0, 0});
  EXPECT_TRUE(info.resumed);
  EXPECT_TRUE(info.changed);
  EXPECT_EQ(info.revision, 20u);
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 1)) << "all of it is to be copied";
  // The member has committed itself. If it brings a lower revision later, its trainer wants that.
  EXPECT_EQ(Begin(kLocal, 2).revision, 2u);
}

TEST_F(KeptSyncsTest, WhatTheTrainerBringsStaysIfItIsNotOlder) {
  Leave("a", 7, 20);
  for (const uint64_t revision : {20u, 21u}) {
    const SyncRequest request = Begin(kLocal, revision);
    EXPECT_EQ(request.revision, revision);
    EXPECT_FALSE(request.kept);
    EXPECT_TRUE(AllAre(0));
    End({Code::kStateMismatch, "no"});
  }
}

TEST_F(KeptSyncsTest, AMemberThatOnlySendsStaysAsItIs) {
  Leave("a", 7, 20);
  EXPECT_EQ(Begin(kLocal, 3, control::SyncStrategy::kSend).revision, 3u);
  EXPECT_TRUE(AllOfferedAre(0));
  End({Code::kStateMismatch, "no"});
  EXPECT_EQ(Begin(kLocal, 3, control::SyncStrategy::kReceive).revision, 20u);
  EXPECT_TRUE(AllOfferedAre(7));
}

TEST_F(KeptSyncsTest, ASyncThatFailsLeavesTheTensorsAndWhatIsKept) {
  Leave("a", 7, 20);
  Begin(kLocal, 3);
  const StateSyncInfo info = End({Code::kAborted, "x"});
  EXPECT_FALSE(info.resumed);
  EXPECT_FALSE(info.changed);
  EXPECT_TRUE(AllAre(0));
  const SyncRequest again = Begin(kLocal, 3);
  EXPECT_EQ(again.revision, 20u);
  EXPECT_TRUE(again.kept);
  EXPECT_TRUE(AllOfferedAre(7));
}

TEST_F(KeptSyncsTest, InPlaceOfKeptBitsThatAreDamagedTheTrainersOwnAreOffered) {
  Leave("a", 7, 20);
  kept_.Find(kLocal.value(), state_->manifest)->places[0][5] ^= 1;
  const SyncRequest request = Begin(kLocal, 3);
  EXPECT_EQ(request.revision, 3u);
  EXPECT_FALSE(request.kept);
  EXPECT_TRUE(AllOfferedAre(0));
  const StateSyncInfo info = runner_.End(SyncDone{kLocal, {}, 3, request.state, 0, 0});
  EXPECT_FALSE(info.resumed);
  EXPECT_FALSE(info.changed);
}

TEST_F(KeptSyncsTest, WhatIsDamagedIsNotTriedAgain) {
  Leave("a", 7, 20);
  kept_.Find(kLocal.value(), state_->manifest)->places[0][5] ^= 1;
  Begin(kLocal, 3);
  End({Code::kAborted, "x"});
  EXPECT_EQ(kept_.Find(kLocal.value(), state_->manifest), nullptr);
  EXPECT_EQ(kept_.bytes(), 0u);
}

// The trainer's own tensors are elsewhere. Damaged bytes have overwritten peerd's copies, which are
// no member's state now.
TEST_F(KeptSyncsTest, CopiesThatDamagedBitsWereWrittenToAreNotOffered) {
  Leave("a", 7, 20);
  state_->FetchInto(state_->places);
  kept_.Find(kLocal.value(), state_->manifest)->places[0][5] ^= 1;
  const SyncRequest request = Begin(kLocal, 3);
  EXPECT_FALSE(request.whole);
  EXPECT_FALSE(request.kept);
  EXPECT_EQ(request.revision, 3u);
  // The other members have the kept state, but undamaged. So one chunk is fetched. The trainer must
  // copy all chunks.
  const Hash128 right = HashChunk(std::vector<uint8_t>(1 << 20, 7));
  EXPECT_NE(state_->digests[0][0], right);
  EXPECT_EQ(state_->digests[0][1], right);
  memset(state_->BeginFetch(0, 0), 7, 1 << 20);
  state_->Fetched(0, 0, right);
  EXPECT_TRUE(AllOfferedAre(7));
  const StateSyncInfo info = runner_.End(SyncDone{kLocal, {}, 20, {1, 2}, 1 << 20, 1});
  EXPECT_TRUE(info.changed);
  EXPECT_EQ(changed_, (std::vector<uint8_t>{1, 1, 1, 0})) << "all that is compared is to be copied";
}

TEST_F(KeptSyncsTest, AMemberMayLeaveWhileWhatIsKeptIsCopied) {
  Leave("a", 7, 20);
  StateSync sync = Sync();
  sync.strategy = control::SyncStrategy::kPopular;
  runner_.Begin(kLocal, sync, /*with_step=*/true);
  EXPECT_EQ(runner_.Withdraw(kLocal), true) << "it came with a step";
  EXPECT_TRUE(AllAre(0));
  EXPECT_EQ(state_->digests[0], std::vector<Hash128>(3)) << "it is hashed before it is offered";
}

TEST_F(KeptSyncsTest, ASuccessorWaitsForWhatIsStillBeingCopied) {
  const LocalId former(77);
  Join(former, "b");
  std::fill(bytes_.begin(), bytes_.end(), uint8_t{7});
  const SyncRequest offered = Begin(former, 20);
  // The former member has a trainer and tensors of its own. In this test the tensors share memory.
  runner_.End(SyncDone{former, {}, 20, offered.state, 0, 0});
  EXPECT_TRUE(runner_.Keeping(former));
  kept_.Remove(former.value());
  const LocalId next(78);
  Join(next, "b");
  EXPECT_EQ(Begin(next, 3).revision, 20u);
  EXPECT_TRUE(AllOfferedAre(7));
}

}  // namespace
}  // namespace longhaul::peerd
