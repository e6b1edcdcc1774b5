#include <gtest/gtest.h>

#include <string>

#include "peerd/core/op_table.h"
#include "peerd/core/op_table_testing.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

using control::Fate;

class CarriedInputTest : public OpTableTest {
 protected:
  CarriedInputTest() { copies_ = false; }
  // The peers are far apart, as the epoch says.
  void EnterFar(size_t peers = 3) {
    auto prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
    if (peers == 2) prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}});
    prepare.cost = {100'000, 60'000'000, 60'000'000};
    Enter(prepare);
  }
  static OpDesc Middle() { return Desc(16384); }
  static PeerReady Carrying(uint64_t peer, uint64_t tag, uint64_t attempt = 0) {
    PeerReady ready = ReadyOf(peer, tag, Middle(), attempt);
    ready.input = ReadyInput::kCarried;
    ready.payload = std::string(OneShotPayloadBytes(Middle()), static_cast<char>('0' + peer));
    return ready;
  }
  static PeerReady Withholding(uint64_t peer, uint64_t tag, uint64_t attempt = 0) {
    PeerReady ready = ReadyOf(peer, tag, Middle(), attempt);
    ready.input = ReadyInput::kWithheld;
    return ready;
  }
  static PeerDone StartedBy(uint64_t peer, uint64_t ordinal, uint64_t attempt = 0) {
    PeerDone done = DoneOf(peer, ordinal, attempt);
    done.started = true;
    return done;
  }
  Actions& Started(uint64_t peer, uint64_t ordinal, uint64_t attempt = 0) {
    out_.clear();
    ops_.OnDone(StartedBy(peer, ordinal, attempt), now_, &out_);
    Settled();
    return out_;
  }
};

TEST_F(CarriedInputTest, FarPeersExchangeTheirInputsWithReady) {
  EnterFar();
  Post(7, Middle());
  for (const SendReady& ready : Get<SendReady>(out_)) {
    EXPECT_TRUE(ready.one_shot);
    EXPECT_EQ(ready.input, ReadyInput::kCarried);
  }
  EXPECT_TRUE(Ready(Carrying(3, 7)).empty());
  const auto start = Get<StartAttempt>(Ready(Carrying(2, 7)));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].algorithm, Algorithm::kOneShot);
  EXPECT_EQ(start[0].payloads[1], Carrying(2, 7).payload);
  EXPECT_TRUE(Get<CreditAttempt>(out_).empty());
  EXPECT_TRUE(Get<SendDone>(out_).empty()) << "nobody waits to hear that it has started";
  const auto done = Get<PostDone>(Complete(1, 0, std::string(Middle().bytes(), 'r')));
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].outcome.ok());
  EXPECT_EQ(done[0].info.algorithm, Algorithm::kOneShot);
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 1u);
  Done(2, 1);
  Done(3, 1);
  EXPECT_EQ(ops_.LingeringOf(LocalId(1)), 0u);
}

TEST_F(CarriedInputTest, WhatThisPeerHasMeasuredCountsIfTheEpochSaysNothing) {
  EnterThree();
  EXPECT_EQ(Get<SendReady>(Post(7, Middle())).at(0).input, ReadyInput::kSegments);
  ops_.NoteLatency(PeerId(3), 100'000);
  EXPECT_EQ(Get<SendReady>(Post(8, Middle())).at(0).input, ReadyInput::kCarried);
}

TEST_F(CarriedInputTest, IfOneWithholdsItsInputSegmentsMoveToThoseThatHaveStarted) {
  EnterFar();
  Post(7, Middle());
  Ready(Carrying(3, 7));
  const auto start = Get<StartAttempt>(Ready(Withholding(2, 7)));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].algorithm, Algorithm::kMesh);
  EXPECT_TRUE(start[0].payloads.empty());
  EXPECT_TRUE(Get<CreditAttempt>(out_).empty());
  const auto told = Get<SendDone>(out_);
  ASSERT_EQ(told.size(), 2u);
  EXPECT_TRUE(told[0].started && told[1].started);
  EXPECT_EQ(Get<CreditAttempt>(Started(2, 1)).at(0).peer, PeerId(2));
  EXPECT_TRUE(Breaks(StartedBy(2, 1))) << "twice";
  EXPECT_EQ(Get<CreditAttempt>(Started(3, 1)).at(0).peer, PeerId(3));
  EXPECT_EQ(Get<SendDone>(Complete(1)).size(), 2u);
}

TEST_F(CarriedInputTest, APeerThatTakesItForAnOpOfSegmentsIsCreditedAtOnce) {
  EnterFar();
  Post(7, Middle());
  Ready(Carrying(3, 7));
  Ready(2, 7, Middle());
  EXPECT_EQ(Get<StartAttempt>(out_).at(0).algorithm, Algorithm::kMesh);
  const auto credits = Get<CreditAttempt>(out_);
  ASSERT_EQ(credits.size(), 1u);
  EXPECT_EQ(credits[0].peer, PeerId(2));
  EXPECT_TRUE(Breaks(StartedBy(2, 1))) << "it has not said that it starts late";
}

TEST_F(CarriedInputTest, WhoTakesItForAnOpOfSegmentsWaitsForThoseThatStartLate) {
  EnterThree();
  Post(7, Middle());
  EXPECT_EQ(Get<StartAttempt>(out_).size(), 1u);
  EXPECT_TRUE(Get<CreditAttempt>(Ready(Carrying(2, 7))).empty());
  EXPECT_EQ(Get<CreditAttempt>(Ready(3, 7, Middle())).size(), 1u);
  EXPECT_EQ(Get<CreditAttempt>(Started(2, 1)).size(), 1u);
}

TEST_F(CarriedInputTest, NoPeerIsSentMoreThanItTakesBeforeItAnnounces) {
  EnterFar(2);
  const OpDesc whole = Desc(LH_READY_INPUT_BYTES_MAX / 4);
  constexpr uint64_t kAhead = LH_READY_INPUTS_AHEAD_BYTES_MAX / LH_READY_INPUT_BYTES_MAX;
  for (uint64_t tag = 0; tag < kAhead; ++tag) {
    EXPECT_EQ(Get<SendReady>(Post(tag, whole)).at(0).input, ReadyInput::kCarried);
  }
  EXPECT_EQ(Get<SendReady>(Post(50, whole)).at(0).input, ReadyInput::kWithheld);
  // An op that the other peer has announced does not count.
  PeerReady ready = ReadyOf(2, 60, whole);
  ready.input = ReadyInput::kCarried;
  ready.payload = std::string(whole.bytes(), 'x');
  Ready(ready);
  EXPECT_EQ(Get<SendReady>(Post(60, whole)).at(0).input, ReadyInput::kCarried);
  ready.tag = 0;
  Ready(ready);
  EXPECT_EQ(Get<SendReady>(Post(51, whole)).at(0).input, ReadyInput::kCarried);
}

TEST_F(CarriedInputTest, AnswersBeyondTheRoomForResultsComeWhenAllAreDone) {
  EnterFar(2);
  const OpDesc whole = Desc(LH_READY_INPUT_BYTES_MAX / 4);
  constexpr uint64_t kRoom = LH_READY_INPUTS_AHEAD_BYTES_MAX / LH_READY_INPUT_BYTES_MAX;
  for (uint64_t tag = 0; tag <= kRoom; ++tag) {
    Post(tag, whole);
    PeerReady ready = ReadyOf(2, tag, whole);
    ready.input = ReadyInput::kCarried;
    ready.payload = std::string(whole.bytes(), 'x');
    Ready(ready);
    const size_t answers =
        Get<PostDone>(Complete(tag + 1, 0, std::string(whole.bytes(), 'r'))).size();
    EXPECT_EQ(answers, tag < kRoom ? 1u : 0u) << tag;
  }
  EXPECT_EQ(Get<PostDone>(Done(2, kRoom + 1)).size(), 1u);
}

TEST_F(CarriedInputTest, ReadiesThatMeetNoOpAreBoundedInBytes) {
  EnterFar(2);
  PeerReady ready = ReadyOf(2, 0, Desc(LH_READY_INPUT_BYTES_MAX / 4));
  ready.input = ReadyInput::kCarried;
  ready.payload = std::string(LH_READY_INPUT_BYTES_MAX, 'x');
  constexpr uint64_t kMost = LH_READY_INPUTS_UNMATCHED_BYTES_MAX / LH_READY_INPUT_BYTES_MAX;
  for (uint64_t tag = 0; tag < kMost; ++tag) {
    ready.tag = tag;
    EXPECT_TRUE(Ready(ready).empty());
  }
  ready.tag = kMost;
  EXPECT_TRUE(Breaks(ready));
  ready.attempt = Epoch(2);
  for (uint64_t tag = 0; tag < kMost; ++tag) EXPECT_TRUE(Ready(ready).empty());
  EXPECT_TRUE(Breaks(ready));
}

TEST_F(CarriedInputTest, WhoWasKeptFromTheResultTakesItThoughTheOpGoesAnotherWayNow) {
  EnterFar();
  Post(7, Middle());
  Ready(Carrying(2, 7));
  Freeze();
  EXPECT_EQ(ops_.Report().at(0).matches.size(), 1u) << "an earlier op may linger elsewhere";
  // Nobody says any more that the peers are far apart.
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<SendReady>(out_).at(0).input, ReadyInput::kWithheld);
  EXPECT_TRUE(Get<StartAttempt>(out_).empty()) << "the other one may have the result";
  auto ready = ReadyOf(2, 7, Middle(), 2);
  ready.result = OneShotResult{Epoch(1), kThree, std::string(Middle().bytes(), 'r')};
  const auto start = Get<StartAttempt>(Ready(ready));
  ASSERT_EQ(start.size(), 1u);
  EXPECT_EQ(start[0].algorithm, Algorithm::kOneShot);
  EXPECT_EQ(start[0].result, ready.result->bytes);
  EXPECT_TRUE(Get<SendDone>(out_).empty());
  const auto done = Get<PostDone>(Complete(1, 2, ready.result->bytes));
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].info.members, kThree);
}

TEST_F(CarriedInputTest, WithoutAResultTheRedoneOpMovesSegments) {
  EnterFar();
  Post(7, Middle());
  Ready(Carrying(2, 7));
  Freeze();
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  EXPECT_EQ(Get<StartAttempt>(Ready(Withholding(2, 7, 2))).at(0).algorithm, Algorithm::kRing);
  EXPECT_EQ(Get<CreditAttempt>(Started(2, 1, 2)).size(), 1u);
}

TEST_F(CarriedInputTest, AResultOfAnOpThatNeverHadOneBreaksTheLink) {
  EnterThree();
  Post(7, Middle());
  Ready(2, 7, Middle());
  Freeze();
  Stopped(1);
  LoseThree({{OpOrdinal(1), Fate::kRedo}});
  auto ready = ReadyOf(2, 7, Middle(), 2);
  ready.result = OneShotResult{Epoch(1), kThree, std::string(Middle().bytes(), 'r')};
  EXPECT_TRUE(Breaks(ready));
}

}  // namespace
}  // namespace longhaul::peerd
