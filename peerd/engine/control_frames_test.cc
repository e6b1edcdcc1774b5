#include "peerd/engine/control_frames.h"

#include <gtest/gtest.h>

#include <string>
#include <variant>

namespace longhaul::peerd {
namespace {

constexpr PeerId kA(1);
constexpr PeerId kC(3);
const GroupKey kGroup{"run", 7};

SendReady Ready() {
  SendReady action;
  action.group = kGroup;
  action.to = kC;
  action.ordinal = OpOrdinal(11);
  action.attempt = Epoch(4);
  action.boundary = Epoch(3);
  action.tag = 5;
  action.set = 77;
  action.desc.count = 2;
  action.one_shot = true;
  return action;
}

SendDone Done() {
  SendDone action;
  action.group = kGroup;
  action.to = kC;
  action.ordinal = OpOrdinal(12);
  action.attempt = Epoch(4);
  action.refused = true;
  return action;
}

// Returns what the receiver gets if peer A sends the frame.
absl::StatusOr<TakenFrame> Take(const ControlFrame& frame) {
  // The header is encoded and parsed, as on a lane.
  const auto header = ParseFrameHeader(Encode(frame.header), LaneKind::kControl);
  if (!header.ok()) return header.status();
  return TakeFrame({frame.link.run, kA}, *header, frame.bytes());
}

void ExpectReady(const TakenFrame& taken) {
  const auto* const ready = std::get_if<PeerReady>(&taken);
  ASSERT_NE(ready, nullptr);
  EXPECT_EQ(ready->group, kGroup);
  EXPECT_EQ(ready->peer, kA);
  EXPECT_EQ(ready->ordinal, OpOrdinal(11));
  EXPECT_EQ(ready->attempt, Epoch(4));
  EXPECT_EQ(ready->boundary, Epoch(3));
  EXPECT_EQ(ready->tag, 5u);
  EXPECT_EQ(ready->set, 77u);
  EXPECT_EQ(ready->desc, Ready().desc);
  EXPECT_EQ(ready->payload, "12345678");
}

void ExpectDone(const TakenFrame& taken) {
  const auto* const done = std::get_if<PeerDone>(&taken);
  ASSERT_NE(done, nullptr);
  EXPECT_EQ(done->group, kGroup);
  EXPECT_EQ(done->peer, kA);
  EXPECT_EQ(done->ordinal, OpOrdinal(12));
  EXPECT_EQ(done->attempt, Epoch(4));
  EXPECT_TRUE(done->refused);
}

TEST(ControlFrames, AreTakenAsTheyWereMeant) {
  const ControlFrame ready = FrameOf(Ready(), "12345678");
  EXPECT_EQ(ready.link, (LinkKey{"run", kC}));
  EXPECT_EQ(ready.header.type, FrameType::kReady);
  ExpectReady(*Take(ready));
  const ControlFrame done = FrameOf(Done());
  EXPECT_EQ(done.link, (LinkKey{"run", kC}));
  ExpectDone(*Take(done));
}

TEST(ControlFrames, CarryAResultInPlaceOfAnInput) {
  SendReady action = Ready();
  action.one_shot = false;
  action.result = OneShotResult{Epoch(3), {MemberId(4), MemberId(9)}, "abcdefgh"};
  const auto taken = Take(FrameOf(action, ""));
  ASSERT_TRUE(taken.ok()) << taken.status();
  const auto& ready = std::get<PeerReady>(*taken);
  EXPECT_EQ(ready.result, action.result);
  EXPECT_EQ(ready.payload, "");
}

TEST(ControlFrames, CarryTheTermsOfTheMembersBeforeTheInput) {
  SendReady action = Ready();
  action.desc.weighted = true;
  action.terms = {{0.5, {}, {}}, {2, {}, {}}};
  auto taken = Take(FrameOf(action, "12345678"));
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(std::get<PeerReady>(*taken).terms, action.terms);
  EXPECT_EQ(std::get<PeerReady>(*taken).payload, "12345678");
  action = Ready();
  action.one_shot = false;
  action.desc.kind = OpKind::kAllToAll;
  action.desc.world = 2;
  action.desc.count = 0;
  action.desc.unequal = true;
  action.terms = {{1, {3, 0}, {3, 7}}};
  taken = Take(FrameOf(action, ""));
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(std::get<PeerReady>(*taken).terms, action.terms);
  EXPECT_EQ(std::get<PeerReady>(*taken).payload, "");
}

TEST(ControlFrames, CarryTheOffersOfMembersThatDiffer) {
  SendReady action = Ready();
  action.one_shot = false;
  action.other_offer = OtherOffer{MemberId(9), action.desc};
  action.other_offer->desc.count = 3;
  const auto taken = Take(FrameOf(action, ""));
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(std::get<PeerReady>(*taken).other_offer, action.other_offer);
  EXPECT_TRUE(std::get<PeerReady>(*taken).terms.empty());
}

TEST(ControlFrames, MayWaitIfTheActionMay) {
  SendDone action = Done();
  EXPECT_FALSE(FrameOf(action).may_wait);
  action.may_wait = true;
  EXPECT_TRUE(FrameOf(action).may_wait);
}

TEST(ControlFrames, OfTransfersAreRefused) {
  ControlFrame frame;
  frame.header.type = FrameType::kChunkCancel;
  frame.header.op = OpOrdinal(1);
  EXPECT_EQ(Take(frame).status().message(), "frame type is 7, not READY or DONE");
}

TEST(ControlFrames, AreRefusedIfTheirPayloadMakesNoSense) {
  ControlFrame frame = FrameOf(Ready(), "12345678");
  frame.payload[25] = LH_WIRE_DTYPE_COUNT;
  EXPECT_EQ(Take(frame).status().message(), "dtype is 15, not at most 14");
}

}  // namespace
}  // namespace longhaul::peerd
