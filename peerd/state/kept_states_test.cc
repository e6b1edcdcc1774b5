#include "peerd/state/kept_states.h"

#include <algorithm>
#include <chrono>
#include <semaphore>
#include <string>

#include "base/log.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "peerd/state/state_hash.h"
#include "proto/wire/types.h"

namespace longhaul::peerd {
namespace {

using testing::Each;
using testing::HasSubstr;

constexpr uint64_t kTensorBytes = 2500000;
// The bytes of a kept TrainerState, rounded up to whole pages.
constexpr uint64_t kStateBytes = 2502656;
const GroupKey kGroup{"run", 3};

// A trainer's tensors and their digests.
struct TrainerState : MemoryState {
  explicit TrainerState(uint8_t fill, const std::string& name = "w") : bytes(kTensorBytes + 100) {
    std::fill(bytes.begin(), bytes.end(), fill);
    manifest = {{name, LH_WIRE_UINT8, {kTensorBytes}, kTensorBytes, false},
                {"none", LH_WIRE_FLOAT32, {0}, 0, false},
                {"rng", LH_WIRE_UINT8, {100}, 100, true}};
    places = {bytes.data(), nullptr, bytes.data() + kTensorBytes};
    Hash();
    FetchInto(places);
  }
  void Hash() {
    digests = {{}, {}, {HashChunk({places[2], 100})}};
    for (uint64_t chunk = 0; chunk < CountChunks(kTensorBytes); ++chunk) {
      digests[0].push_back(
          HashChunk({places[0] + ChunkOffset(chunk), ChunkBytes(kTensorBytes, chunk)}));
    }
  }
  Hash128 root() const { return RootOf(manifest, digests); }

  std::vector<uint8_t> bytes;
};

class KeptStatesTest : public testing::Test {
 protected:
  KeptStatesTest() {
    SetLogSink([this](std::string_view line) { log_ += std::string(line) + "\n"; });
  }
  ~KeptStatesTest() override { SetLogSink(nullptr); }

  void Restart(uint64_t bytes_max) {
    kept_ = std::make_unique<KeptStates>(KeptStates::Options{bytes_max, Seconds(60)}, &pool_,
                                         [this] { return now_; });
  }
  bool Until(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (true) {
      pool_.Deliver();
      if (condition()) return true;
      if (!woken_.try_acquire_until(deadline)) return false;
    }
  }
  // Commits a state of the member and waits until it is copied.
  void Keep(uint64_t local, const std::shared_ptr<TrainerState>& state, uint64_t revision) {
    bool done = false;
    if (!kept_->Keep(local, state, revision, state->root(), [&] { done = true; })) {
      EXPECT_TRUE(Until([&] { return done; }));
    }
  }
  void Prepare(uint64_t local, const std::shared_ptr<TrainerState>& state) {
    bool done = false;
    if (!kept_->Prepare(local, state, [&] { done = true; })) {
      EXPECT_TRUE(Until([&] { return done; }));
    }
  }
  bool Restore(const std::shared_ptr<const KeptState>& from,
               const std::shared_ptr<TrainerState>& to) {
    std::optional<bool> right;
    kept_->CopyTo(from, to, [&](bool is) { right = is; });
    EXPECT_TRUE(Until([&] { return right.has_value(); }));
    return right.value_or(false);
  }
  static std::vector<uint8_t> Bytes(const KeptState& kept, size_t tensor) {
    return {kept.places[tensor], kept.places[tensor] + kept.manifest[tensor].bytes};
  }

  std::string log_;
  Tick now_;
  std::counting_semaphore<> woken_{0};
  HashPool pool_{2, [this] { woken_.release(); }};
  std::unique_ptr<KeptStates> kept_ = std::make_unique<KeptStates>(
      KeptStates::Options{3 * kStateBytes, Seconds(60)}, &pool_, [this] { return now_; });
};

TEST_F(KeptStatesTest, WhatWasCommittedIsThereForTheNextOfTheName) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  Keep(1, state, 12);
  EXPECT_EQ(kept_->bytes(), kStateBytes);
  kept_->Remove(1);
  kept_->Add(2, kGroup, "a");
  const auto kept = kept_->Inherit(2, state->manifest);
  ASSERT_NE(kept, nullptr);
  EXPECT_EQ(kept->revision, 12u);
  EXPECT_EQ(kept->root, state->root());
  EXPECT_EQ(kept->digests, state->digests);
  EXPECT_THAT(Bytes(*kept, 0), Each(7));
  EXPECT_THAT(Bytes(*kept, 2), Each(7));
  EXPECT_TRUE(kept_->Inherited(2));
  const auto fresh = std::make_shared<TrainerState>(0);
  EXPECT_TRUE(Restore(kept, fresh));
  EXPECT_EQ(fresh->bytes, state->bytes);
  EXPECT_EQ(fresh->root(), kept->root);
  Keep(2, fresh, 13);
  EXPECT_FALSE(kept_->Inherited(2));
  EXPECT_EQ(kept_->Find(2, state->manifest)->revision, 13u);
}

TEST_F(KeptStatesTest, NamesAndGroupsAreApart) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  Keep(1, state, 12);
  kept_->Remove(1);
  kept_->Add(2, kGroup, "b");
  kept_->Add(3, {"run", 4}, "a");
  kept_->Add(4, {"other", 3}, "a");
  for (const uint64_t local : {2u, 3u, 4u}) {
    EXPECT_EQ(kept_->Find(local, state->manifest), nullptr) << local;
    EXPECT_EQ(kept_->Inherit(local, state->manifest), nullptr) << local;
  }
}

TEST_F(KeptStatesTest, OnlyChunksThatChangedAreCopied) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  Keep(1, state, 12);
  // Keep() compares digests only, so it does not see a change without a new digest.
  state->bytes[0] = 1;
  state->bytes[kStateChunkBytes] = 2;
  state->digests[0][1] =
      HashChunk({state->places[0] + kStateChunkBytes, ChunkBytes(kTensorBytes, 1)});
  Keep(1, state, 13);
  const auto kept = kept_->Find(1, state->manifest);
  ASSERT_NE(kept, nullptr);
  EXPECT_EQ(kept->revision, 13u);
  EXPECT_EQ(kept->places[0][0], 7);
  EXPECT_EQ(kept->places[0][kStateChunkBytes], 2);
  EXPECT_TRUE(kept_->Keep(1, state, 14, state->root(), [] { FAIL() << "nothing to wait for"; }));
  EXPECT_EQ(kept->revision, 14u);
}

TEST_F(KeptStatesTest, BitsThatAreNotWhatWasAgreedOnAreNotKept) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  Keep(1, state, 12);
  const Manifest manifest = state->manifest;
  const auto next = std::make_shared<TrainerState>(8);
  next->bytes[kTensorBytes - 1] ^= 1;
  Keep(1, next, 13);
  EXPECT_EQ(kept_->Find(1, manifest), nullptr);
  EXPECT_EQ(kept_->bytes(), 0u);
  EXPECT_THAT(log_, HasSubstr("its tensors were written to before the sync had ended"));
  // The next state is hashed, and kept.
  next->Hash();
  Keep(1, next, 14);
  EXPECT_EQ(kept_->Find(1, manifest)->revision, 14u);
}

TEST_F(KeptStatesTest, AMemberOfTheSameNameThatIsHereIsLeftAlone) {
  kept_->Add(1, kGroup, "a");
  kept_->Add(2, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  Keep(1, state, 12);
  const auto other = std::make_shared<TrainerState>(8);
  EXPECT_EQ(kept_->Find(2, state->manifest), nullptr);
  Keep(2, other, 13);
  EXPECT_EQ(kept_->Find(1, state->manifest)->revision, 12u);
  EXPECT_THAT(log_, HasSubstr("another member of this name is here"));
}

TEST_F(KeptStatesTest, OtherTensorsAreOfNoUseAndReplaceItWhenTheyAreCommitted) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  Keep(1, state, 12);
  kept_->Remove(1);
  kept_->Add(2, kGroup, "a");
  const auto other = std::make_shared<TrainerState>(8, "v");
  EXPECT_EQ(kept_->Inherit(2, other->manifest), nullptr);
  EXPECT_THAT(log_, HasSubstr("tensor 0 is \\\"v\\\" here and \\\"w\\\" there"));
  EXPECT_EQ(kept_->bytes(), kStateBytes);
  Keep(2, other, 1);
  EXPECT_EQ(kept_->Find(2, state->manifest), nullptr);
  EXPECT_EQ(kept_->Find(2, other->manifest)->revision, 1u);
  EXPECT_EQ(kept_->bytes(), kStateBytes);
}

TEST_F(KeptStatesTest, WhatWaitsGoesWhenItsTimeIsUp) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  Keep(1, state, 12);
  EXPECT_EQ(kept_->NextDeadline(), kNever);
  now_ = Tick{} + Seconds(100);
  kept_->Remove(1);
  EXPECT_EQ(kept_->NextDeadline(), Tick{} + Seconds(160));
  now_ = Tick{} + Seconds(159);
  kept_->OnTime();
  kept_->Add(2, kGroup, "a");
  EXPECT_NE(kept_->Find(2, state->manifest), nullptr);
  now_ = Tick{} + Seconds(160);
  kept_->OnTime();
  EXPECT_EQ(kept_->Find(2, state->manifest), nullptr);
  EXPECT_EQ(kept_->bytes(), 0u);
  EXPECT_EQ(kept_->NextDeadline(), kNever);
}

TEST_F(KeptStatesTest, TheOldestThatWaitsMakesRoomAndThoseThatAreHereDoNot) {
  const auto state = std::make_shared<TrainerState>(7);
  const char* const names[] = {"a", "b", "c"};
  for (uint64_t local = 1; local <= 3; ++local) {
    kept_->Add(local, kGroup, names[local - 1]);
    Keep(local, state, local);
  }
  EXPECT_EQ(kept_->bytes(), 3 * kStateBytes);
  kept_->Remove(2);
  now_ = now_ + 1;
  kept_->Remove(1);
  kept_->Add(4, kGroup, "d");
  Keep(4, state, 4);
  kept_->Add(5, kGroup, "a");
  kept_->Add(6, kGroup, "b");
  EXPECT_NE(kept_->Find(5, state->manifest), nullptr);
  EXPECT_EQ(kept_->Find(6, state->manifest), nullptr) << "it went first";
  EXPECT_NE(kept_->Inherit(5, state->manifest), nullptr);
  EXPECT_EQ(log_.find("state not kept"), std::string::npos);
  Keep(6, state, 6);
  Keep(6, state, 7);
  EXPECT_EQ(kept_->Find(6, state->manifest), nullptr);
  EXPECT_EQ(kept_->bytes(), 3 * kStateBytes);
  const size_t told = log_.find("state not kept");
  EXPECT_THAT(log_, HasSubstr("raise --keep-state"));
  EXPECT_EQ(log_.find("state not kept", told + 1), std::string::npos) << "once is enough";
}

TEST_F(KeptStatesTest, NothingWaitingGoesForAStateThatDoesNotFitAnyway) {
  Restart(2 * kStateBytes - 1);
  const auto state = std::make_shared<TrainerState>(7);
  kept_->Add(1, kGroup, "a");
  Keep(1, state, 1);
  kept_->Remove(1);
  auto large = std::make_shared<TrainerState>(1);
  std::vector<uint8_t> more(2 * kStateBytes);
  large->manifest.push_back({"more", LH_WIRE_UINT8, {more.size()}, more.size(), false});
  large->places.push_back(more.data());
  large->digests.emplace_back(CountChunks(more.size()));
  kept_->Add(2, kGroup, "b");
  EXPECT_TRUE(kept_->Keep(2, large, 1, {}, [] { FAIL(); }));
  EXPECT_EQ(kept_->bytes(), kStateBytes);
}

TEST_F(KeptStatesTest, WithoutBytesNothingIsKept) {
  Restart(0);
  EXPECT_FALSE(kept_->enabled());
  const auto state = std::make_shared<TrainerState>(7);
  kept_->Add(1, kGroup, "a");
  EXPECT_TRUE(kept_->Keep(1, state, 1, state->root(), [] { FAIL(); }));
  EXPECT_EQ(kept_->Find(1, state->manifest), nullptr);
  EXPECT_EQ(log_, "");
}

TEST_F(KeptStatesTest, WhatIsBeingCopiedWhenItsMemberDiesIsWaitedFor) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  bool kept = false;
  ASSERT_FALSE(kept_->Keep(1, state, 12, state->root(), [&] { kept = true; }));
  kept_->Remove(1);
  kept_->Add(2, kGroup, "a");
  EXPECT_TRUE(kept_->Busy(2));
  EXPECT_EQ(kept_->Find(2, state->manifest), nullptr);
  uint64_t revision = 0;
  EXPECT_TRUE(kept_->Revision(2, state->manifest, &revision));
  EXPECT_EQ(revision, 12u);
  bool ready = false;
  kept_->WhenIdle(2, [&] { ready = true; });
  EXPECT_FALSE(ready);
  EXPECT_TRUE(Until([&] { return ready; }));
  EXPECT_TRUE(kept);
  EXPECT_EQ(kept_->Inherit(2, state->manifest)->revision, 12u);
}

TEST_F(KeptStatesTest, ChunksThatAreRightAreNotCopied) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  Keep(1, state, 12);
  const auto other = std::make_shared<TrainerState>(7);
  other->bytes[3] = 1;  // wrong bits under the right digest
  other->bytes[2 * kStateChunkBytes] = 2;
  other->digests[0][2] = {};
  other->digests[2][0] = {1, 2};
  EXPECT_TRUE(Restore(kept_->Find(1, state->manifest), other));
  EXPECT_EQ(other->bytes[3], 1);
  EXPECT_EQ(other->bytes[2 * kStateChunkBytes], 7);
  EXPECT_EQ(other->digests, state->digests);
}

TEST_F(KeptStatesTest, ACopyTellsIfItIsNotWhatWasKept) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  Keep(1, state, 12);
  const auto kept = kept_->Find(1, state->manifest);
  kept->places[0][5] ^= 1;
  const auto fresh = std::make_shared<TrainerState>(0);
  EXPECT_FALSE(Restore(kept, fresh));
}

TEST_F(KeptStatesTest, WhatIsCopiedAheadIsNobodysAndSparesTheCommitItsCopy) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  const ChunkDigests all = state->digests;
  state->digests[0][1] = {};
  Prepare(1, state);
  EXPECT_EQ(kept_->bytes(), kStateBytes);
  EXPECT_EQ(kept_->Find(1, state->manifest), nullptr);
  EXPECT_EQ(kept_->Inherit(1, state->manifest), nullptr);
  EXPECT_EQ(kept_->Committed(1), nullptr);
  EXPECT_FALSE(kept_->Inherited(1));
  uint64_t revision = 0;
  EXPECT_FALSE(kept_->Revision(1, state->manifest, &revision));
  // Since then chunk 1 has come, and chunk 2 has changed.
  state->bytes[2 * kStateChunkBytes] = 2;
  state->Hash();
  Prepare(1, state);
  EXPECT_TRUE(kept_->Prepare(1, state, [] { FAIL() << "nothing to wait for"; }));
  EXPECT_TRUE(kept_->Keep(1, state, 12, state->root(), [] { FAIL() << "nothing to wait for"; }));
  const auto kept = kept_->Committed(1);
  ASSERT_NE(kept, nullptr);
  EXPECT_EQ(kept->revision, 12u);
  EXPECT_EQ(kept->root, state->root());
  EXPECT_EQ(Bytes(*kept, 0),
            std::vector<uint8_t>(state->bytes.begin(), state->bytes.begin() + kTensorBytes));
  // After Keep() the copy is the agreed state, and Prepare() does nothing.
  state->bytes[0] = 1;
  state->Hash();
  EXPECT_TRUE(kept_->Prepare(1, state, [] { FAIL(); }));
  EXPECT_EQ(kept->places[0][0], 7);
  EXPECT_EQ(kept_->bytes(), kStateBytes);
}

TEST_F(KeptStatesTest, ACopyAheadThatIsWrongIsMadeAgainAtTheCommit) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  state->bytes[5] = 1;  // the digest is that of other bits
  Prepare(1, state);
  state->bytes[5] = 7;
  Keep(1, state, 12);
  ASSERT_NE(kept_->Committed(1), nullptr);
  EXPECT_THAT(Bytes(*kept_->Committed(1), 0), Each(7));
  EXPECT_EQ(log_, "");
}

TEST_F(KeptStatesTest, ACopyAheadGoesWithItsMember) {
  const auto state = std::make_shared<TrainerState>(7);
  kept_->Add(1, kGroup, "a");
  Prepare(1, state);
  kept_->Remove(1);
  EXPECT_EQ(kept_->bytes(), 0u);
  EXPECT_EQ(kept_->NextDeadline(), kNever);
  // A member may go in the middle of the copy. The next member of the name does not wait for it.
  kept_->Add(2, kGroup, "a");
  bool done = false;
  ASSERT_FALSE(kept_->Prepare(2, state, [&] { done = true; }));
  kept_->Remove(2);
  kept_->Add(3, kGroup, "a");
  EXPECT_FALSE(kept_->Busy(3));
  EXPECT_EQ(kept_->Inherit(3, state->manifest), nullptr);
  EXPECT_TRUE(kept_->Prepare(3, state, [] { FAIL(); }));
  EXPECT_TRUE(Until([&] { return done; }));
  EXPECT_EQ(kept_->bytes(), 0u);
  Keep(3, state, 1);
  EXPECT_NE(kept_->Committed(3), nullptr);
}

TEST_F(KeptStatesTest, NothingIsCopiedAheadOverWhatWasLeftOrWithoutRoom) {
  const auto state = std::make_shared<TrainerState>(7);
  kept_->Add(1, kGroup, "a");
  Keep(1, state, 12);
  kept_->Remove(1);
  kept_->Add(2, kGroup, "a");
  const auto other = std::make_shared<TrainerState>(9);
  EXPECT_TRUE(kept_->Prepare(2, other, [] { FAIL(); }));
  EXPECT_THAT(Bytes(*kept_->Inherit(2, state->manifest), 0), Each(7));
  Restart(kStateBytes - 1);
  kept_->Add(3, kGroup, "a");
  EXPECT_TRUE(kept_->Prepare(3, state, [] { FAIL(); }));
  EXPECT_THAT(log_, HasSubstr("raise --keep-state"));
}

TEST_F(KeptStatesTest, EndsInTheMiddleOfACopy) {
  kept_->Add(1, kGroup, "a");
  const auto state = std::make_shared<TrainerState>(7);
  kept_->Keep(1, state, 12, state->root(), [] { FAIL(); });
  kept_.reset();
  pool_.Deliver();
}

}  // namespace
}  // namespace longhaul::peerd
