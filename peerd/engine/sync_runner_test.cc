#include "peerd/engine/sync_runner.h"

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
  void End(Outcome outcome = {}, bool torn = false) {
    runner_.End({kLocal, std::move(outcome), 12, {}, torn, 0, 0});
  }

  std::vector<uint8_t> bytes_ = std::vector<uint8_t>(2500101);
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

TEST_F(SyncRunnerTest, ATornStateIsHashedAgain) {
  const SyncRequest before = RequestOf(Sync());
  End({Code::kAborted, "source died"}, /*torn=*/true);
  bytes_[1] ^= 1;
  EXPECT_NE(RequestOf(Sync({0, 0, 0})).state, before.state);
}

TEST_F(SyncRunnerTest, WhatItsTrainerSaysIsTornIsToldTheCore) {
  EXPECT_FALSE(RequestOf(Sync()).torn);
  End();
  StateSync sync = Sync();
  sync.torn = true;
  EXPECT_TRUE(RequestOf(sync).torn);
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
  state_->BeginWriting();
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 1)) << "should this process die";
  state_->digests[0][1] = {1, 2};
  state_->digests[2][0] = {3, 4};
  runner_.End({kLocal, {}, 13, {1, 2}, false, 77, 3});
  EXPECT_EQ(changed_, (std::vector<uint8_t>{0, 1, 0, 1}));
  RequestOf(Sync());
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 0));
  // A transfer that found nothing to fetch.
  state_->BeginWriting();
  End();
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 0));
}

TEST_F(SyncRunnerTest, AWithdrawnSyncNeverReachesTheCore) {
  runner_.Begin(kLocal, Sync(), /*with_step=*/false);
  EXPECT_EQ(runner_.StateOf(kLocal), nullptr);
  const std::optional<StateSyncInfo> withdrawn = runner_.Withdraw(kLocal);
  ASSERT_TRUE(withdrawn.has_value());
  EXPECT_FALSE(withdrawn->torn);
  EXPECT_FALSE(runner_.Withdraw(kLocal).has_value());
  // Another one of the same member; what was dropped is hashed again.
  const LocalId other(5);
  runner_.Begin(other, Sync({0, 0, 0}), /*with_step=*/false);
  const std::vector<Event> events = Events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(std::get<LocalSync>(events[0]).local, other);
  EXPECT_EQ(state_->digests[0].size(), 3u);
  EXPECT_FALSE(runner_.Withdraw(other).has_value()) << "the core has heard of it";
}

TEST_F(SyncRunnerTest, EndsOfWithdrawnSyncsAreIgnored) {
  const StateSyncInfo info = runner_.End({kLocal, {Code::kEvicted, "late"}, 0, {}, true, 0, 0});
  EXPECT_TRUE(info.torn);
  EXPECT_EQ(info.total_us, 0);
}

// ------------------------------------------------------------------------------ the background

class HeldSyncsTest : public SyncRunnerTest {
 protected:
  // The member is in the background: its call has ended, its tensors are held.
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

TEST_F(HeldSyncsTest, NothingIsHashedThatATransferWritesTo) {
  Hold();
  state_->digests[0][1] = {};
  runner_.Begin(kLocal, Sync(), /*with_step=*/true, /*fetching=*/true);
  const std::vector<Event> events = runner_.PopEvents();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_TRUE(std::get<LocalStep>(events[0]).sync->fetching);
  EXPECT_EQ(state_->digests[0][1], Hash128{});
}

TEST_F(HeldSyncsTest, WhatHasChangedIsToldAgainstWhatTheTrainerHas) {
  Hold();
  state_->digests[0][1] = {1, 2};
  // Another call in between, while it is fetched.
  runner_.Begin(kLocal, Sync(), /*with_step=*/false, /*fetching=*/true);
  runner_.PopEvents();
  SyncDone ended{kLocal};
  ended.background = true;
  runner_.End(ended);
  state_->digests[2][0] = {3, 4};
  runner_.End(TakeDone{kLocal, {}, 13, {1, 2}, 77, 3});
  EXPECT_EQ(changed_, (std::vector<uint8_t>{0, 1, 0, 1}));
}

TEST_F(HeldSyncsTest, ASyncThatEndsAsUsualTellsTheSame) {
  Hold();
  state_->digests[0][1] = {1, 2};
  runner_.Begin(kLocal, Sync(), /*with_step=*/false, /*fetching=*/true);
  runner_.PopEvents();
  runner_.End({kLocal, {}, 13, {1, 2}, false, 77, 3});
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
  // A sync of what is there, to its end: the trainer has been answered.
  StateSyncInfo Commit(LocalId local, uint64_t revision) {
    const SyncRequest request = Begin(local, revision);
    const StateSyncInfo info =
        runner_.End({local, {}, request.revision, request.state, false, 0, 0});
    EXPECT_TRUE(Until([&] { return !runner_.Keeping(local); }));
    return info;
  }
  // As if a trainer of this name had committed `fill` at this revision, and died.
  void Leave(const std::string& name, uint8_t fill, uint64_t revision) {
    const LocalId former(77);
    Join(former, name);
    std::fill(bytes_.begin(), bytes_.end(), fill);
    Commit(former, revision);
    kept_.Remove(former.value());
    std::fill(bytes_.begin(), bytes_.end(), uint8_t{0});
  }
  // Without the byte before the first tensor, which is nobody's.
  bool AllAre(uint8_t value) const {
    return std::all_of(bytes_.begin() + 1, bytes_.end(), [&](uint8_t b) { return b == value; });
  }
  TransferEnded Over(TransferEnded ended) {
    runner_.TransferOver(std::move(ended));
    const std::vector<Event> events = Events();
    EXPECT_EQ(events.size(), 1u);
    return std::get<TransferEnded>(events.at(0));
  }
};

TEST_F(KeptSyncsTest, AMemberGoesOnWhereOneOfItsNameWas) {
  Leave("a", 7, 20);
  const SyncRequest request = Begin(kLocal, 3);
  EXPECT_EQ(request.revision, 20u);
  EXPECT_TRUE(request.kept);
  EXPECT_TRUE(request.restored);
  EXPECT_FALSE(request.torn);
  EXPECT_TRUE(AllAre(7));
  EXPECT_EQ(request.state, RootOf(state_->manifest, state_->digests));
  const StateSyncInfo info = runner_.End({kLocal, {}, 20, request.state, false, 0, 0});
  EXPECT_TRUE(info.resumed);
  EXPECT_FALSE(info.replaced);
  EXPECT_EQ(info.revision, 20u);
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 1)) << "copies have to be made of all of it";
  // Its own commits are its own: a lower revision later is what the trainer wants.
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

TEST_F(KeptSyncsTest, WhatIsTornIsFilledWhateverItsRevision) {
  Leave("a", 7, 20);
  StateSync sync = Sync();
  sync.strategy = control::SyncStrategy::kPopular;
  sync.revision = 21;
  sync.torn = true;
  const SyncRequest request = RequestOf(sync);
  EXPECT_EQ(request.revision, 20u);
  EXPECT_FALSE(request.torn);
  EXPECT_TRUE(request.restored);
  EXPECT_TRUE(AllAre(7));
}

TEST_F(KeptSyncsTest, AMemberThatOnlySendsStaysAsItIs) {
  Leave("a", 7, 20);
  EXPECT_EQ(Begin(kLocal, 3, control::SyncStrategy::kSend).revision, 3u);
  EXPECT_TRUE(AllAre(0));
  End({Code::kStateMismatch, "no"});
  EXPECT_EQ(Begin(kLocal, 3, control::SyncStrategy::kReceive).revision, 20u);
  EXPECT_TRUE(AllAre(7));
}

TEST_F(KeptSyncsTest, ASyncThatFailsTellsWhatTheTensorsHold) {
  Leave("a", 7, 20);
  Begin(kLocal, 3);
  const StateSyncInfo info = runner_.End({kLocal, {Code::kAborted, "x"}, 0, {}, false, 0, 0});
  EXPECT_TRUE(info.resumed);
  EXPECT_TRUE(info.replaced);
  EXPECT_EQ(info.revision, 20u);
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 1));
  // Offered again, at the revision that was told, it is still what was kept.
  EXPECT_TRUE(Begin(kLocal, 20).kept);
  End({Code::kAborted, "x"});
  // A trainer that works on copies has its own bits and revision: filled again.
  std::fill(bytes_.begin(), bytes_.end(), uint8_t{0});
  EXPECT_EQ(Begin(kLocal, 3).revision, 20u);
  EXPECT_TRUE(AllAre(7));
}

TEST_F(KeptSyncsTest, ATransferThatBreaksOffIsUndone) {
  std::fill(bytes_.begin(), bytes_.end(), uint8_t{5});
  Commit(kLocal, 12);
  const Hash128 before = RootOf(state_->manifest, state_->digests);
  std::fill(bytes_.begin(), bytes_.end(), uint8_t{6});
  Begin(kLocal, 13);
  // Some of it was fetched.
  bytes_[100] = 1;
  state_->digests[0][0] = {};
  const TransferEnded over = Over({kLocal, {Code::kAborted, "x"}, 1 << 20, {}, {}, true});
  ASSERT_TRUE(over.put_back.has_value());
  EXPECT_EQ(over.put_back->revision, 12u);
  EXPECT_EQ(over.put_back->state, before);
  EXPECT_TRUE(AllAre(5));
  const StateSyncInfo info = runner_.End({kLocal, {Code::kAborted, "x"}, 12, before, false, 0, 0});
  EXPECT_TRUE(info.replaced);
  EXPECT_FALSE(info.torn);
  EXPECT_FALSE(info.resumed);
  EXPECT_EQ(info.revision, 12u);
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 1));
}

TEST_F(KeptSyncsTest, ATransferThatWroteNothingOrEndedWellIsLeftAlone) {
  Commit(kLocal, 12);
  bytes_[1] ^= 1;
  Begin(kLocal, 13);
  EXPECT_FALSE(Over({kLocal, {Code::kAborted, "x"}, 0, {}, {}, false}).put_back.has_value());
  EXPECT_FALSE(Over({kLocal, {}, 0, {}, {}, true}).put_back.has_value());
  EXPECT_FALSE(Over({LocalId(5), {Code::kAborted, "x"}, 0, {}, {}, true}).put_back.has_value());
}

TEST_F(KeptSyncsTest, WithoutAnythingKeptAMixtureStaysOne) {
  Begin(kLocal, 13);
  EXPECT_FALSE(Over({kLocal, {Code::kAborted, "x"}, 0, {}, {}, true}).put_back.has_value());
}

TEST_F(KeptSyncsTest, WhatWasPutBackAndAgreedOnAfterAllReachesCopies) {
  Commit(kLocal, 12);
  const Hash128 before = RootOf(state_->manifest, state_->digests);
  bytes_[1] ^= 1;
  Begin(kLocal, 13);
  bytes_[2] ^= 1;
  state_->digests[0][0] = {};
  ASSERT_TRUE(Over({kLocal, {Code::kAborted, "x"}, 0, {}, {}, true}).put_back.has_value());
  // A coordinator that restarted has elected it.
  const StateSyncInfo info = runner_.End({kLocal, {}, 12, before, false, 0, 0});
  EXPECT_TRUE(info.resumed);
  EXPECT_EQ(changed_, (std::vector<uint8_t>{1, 0, 0, 0}));
}

TEST_F(KeptSyncsTest, KeptBitsThatAreDamagedMakeATornState) {
  Leave("a", 7, 20);
  kept_.Find(kLocal.value(), state_->manifest)->places[0][5] ^= 1;
  const SyncRequest request = Begin(kLocal, 3);
  EXPECT_TRUE(request.torn);
  EXPECT_FALSE(request.kept);
  EXPECT_FALSE(request.restored);
}

TEST_F(KeptSyncsTest, AMemberThatLeavesWhileItsTensorsAreFilledIsToldThatTheyAreTorn) {
  Leave("a", 7, 20);
  StateSync sync = Sync();
  sync.strategy = control::SyncStrategy::kPopular;
  runner_.Begin(kLocal, sync, /*with_step=*/true);
  const std::optional<StateSyncInfo> info = runner_.Withdraw(kLocal);
  ASSERT_TRUE(info.has_value());
  EXPECT_TRUE(info->torn);
  EXPECT_EQ(changed_, std::vector<uint8_t>(4, 1)) << "also if this process dies";
  EXPECT_EQ(state_->digests[0], std::vector<Hash128>(3)) << "it is hashed before it is offered";
}

TEST_F(KeptSyncsTest, ASuccessorWaitsForWhatIsStillBeingCopied) {
  const LocalId former(77);
  Join(former, "b");
  std::fill(bytes_.begin(), bytes_.end(), uint8_t{7});
  const SyncRequest offered = Begin(former, 20);
  // A trainer of its own, with tensors of its own: here they lie in the same place.
  runner_.End({former, {}, 20, offered.state, false, 0, 0});
  EXPECT_TRUE(runner_.Keeping(former));
  kept_.Remove(former.value());
  const LocalId next(78);
  Join(next, "b");
  EXPECT_EQ(Begin(next, 3).revision, 20u);
  EXPECT_TRUE(AllAre(7));
}

}  // namespace
}  // namespace longhaul::peerd
