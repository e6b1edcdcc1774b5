#include "peerd/engine/control_frames.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace longhaul::peerd {
namespace {

constexpr PeerId kA(1);
constexpr PeerId kRelayer(2);
constexpr PeerId kC(3);
constexpr PeerId kStranger(9);
const GroupKey kGroup{"run", 7};

SendReady Ready() {
  SendReady action;
  action.group = kGroup;
  action.to = kC;
  action.ordinal = OpOrdinal(11);
  action.attempt = Epoch(4);
  action.boundary = Epoch(3);
  action.tag = 5;
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

// A and C have no link, and the relayer is between them.
std::optional<PeerId> Between(const GroupKey& group, Epoch attempt, PeerId from, PeerId to) {
  if (group != kGroup || from == kStranger || to == kStranger) return std::nullopt;
  EXPECT_EQ(attempt, Epoch(4));
  return std::pair(from, to) == std::pair(kA, kC) ? kRelayer : to;
}

// All have links.
std::optional<PeerId> Straight(const GroupKey&, Epoch, PeerId, PeerId to) { return to; }

// Nothing is known of the group or the attempt.
std::optional<PeerId> Nobody(const GroupKey&, Epoch, PeerId, PeerId) { return std::nullopt; }

// The frame, sent by `from`, as `self` takes it.
absl::StatusOr<TakenFrame> Take(PeerId from, PeerId self, const ControlFrame& frame,
                                const Carriers& carriers = Between) {
  // As it crosses the lane.
  const auto header = ParseFrameHeader(Encode(frame.header), LaneKind::kControl);
  if (!header.ok()) return header.status();
  return TakeFrame({frame.link.run, from}, *header, frame.bytes(), self, carriers);
}

std::string Refusal(PeerId from, PeerId self, const ControlFrame& frame) {
  return std::string(Take(from, self, frame).status().message());
}

bool Stale(PeerId from, PeerId self, const ControlFrame& frame) {
  const auto taken = Take(from, self, frame);
  return taken.ok() && std::holds_alternative<StaleFrame>(*taken);
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

// What A says to C through the relay, as it leaves A.
ControlFrame Relayed() { return FrameOf(Ready(), kA, Between, "12345678"); }

// With another body, of the same payload.
ControlFrame Altered(RelayBody body) {
  ControlFrame frame = Relayed();
  const auto bytes = Encode(body);
  std::copy(bytes.begin(), bytes.end(), frame.payload.begin());
  return frame;
}
RelayBody Body() { return *ParseRelayBody(Relayed().bytes()); }

TEST(ControlFrames, GoStraightWhereThereIsALink) {
  const ControlFrame ready = FrameOf(Ready(), kA, Straight, "12345678");
  EXPECT_EQ(ready.link, (LinkKey{"run", kC}));
  EXPECT_EQ(ready.header.type, FrameType::kReady);
  ExpectReady(*Take(kA, kC, ready, Straight));
  const ControlFrame done = FrameOf(Done(), kA, Straight);
  EXPECT_EQ(done.link, (LinkKey{"run", kC}));
  ExpectDone(*Take(kA, kC, done, Straight));
}

TEST(ControlFrames, DoNotGoStraightWhereThePairIsBlocked) {
  EXPECT_EQ(Refusal(kA, kC, FrameOf(Ready(), kA, Straight, "12345678")),
            "READY from p1 in attempt 4, in which p2 carries between the two");
  EXPECT_EQ(Refusal(kA, kC, FrameOf(Done(), kA, Straight)),
            "DONE from p1 in attempt 4, in which p2 carries between the two");
}

TEST(ControlFrames, OfAnAttemptThatIsOverGoStraightToTheCore) {
  const ControlFrame ready = FrameOf(Ready(), kA, Nobody, "12345678");
  EXPECT_EQ(ready.link, (LinkKey{"run", kC}));
  ExpectReady(*Take(kA, kC, ready, Nobody));
}

TEST(ControlFrames, CarryAResultInPlaceOfAnInput) {
  SendReady action = Ready();
  action.one_shot = false;
  action.result = OneShotResult{Epoch(3), 2, "abcdefgh"};
  const auto taken = Take(kA, kC, FrameOf(action, kA, Straight, ""), Straight);
  ASSERT_TRUE(taken.ok()) << taken.status();
  const auto& ready = std::get<PeerReady>(*taken);
  EXPECT_EQ(ready.result, action.result);
  EXPECT_EQ(ready.payload, "");
}

TEST(ControlFrames, MayWaitIfTheActionMay) {
  SendDone action = Done();
  EXPECT_FALSE(FrameOf(action, kA, Straight).may_wait);
  action.may_wait = true;
  EXPECT_TRUE(FrameOf(action, kA, Straight).may_wait);
}

TEST(ControlFrames, ArePassedOnByTheRelayAndTakenAsTheOrigins) {
  for (const bool done : {false, true}) {
    const ControlFrame frame = done ? FrameOf(Done(), kA, Between) : Relayed();
    EXPECT_EQ(frame.link, (LinkKey{"run", kRelayer}));
    EXPECT_EQ(frame.header.type, FrameType::kRelay);
    const auto at_relay = Take(kA, kRelayer, frame);
    ASSERT_TRUE(at_relay.ok()) << at_relay.status();
    const auto* const on = std::get_if<ControlFrame>(&*at_relay);
    ASSERT_NE(on, nullptr);
    EXPECT_EQ(on->link, (LinkKey{"run", kC}));
    EXPECT_EQ(on->header, frame.header);
    EXPECT_EQ(on->payload, frame.payload);
    const auto at_end = Take(kRelayer, kC, *on);
    ASSERT_TRUE(at_end.ok()) << at_end.status();
    done ? ExpectDone(*at_end) : ExpectReady(*at_end);
  }
}

TEST(ControlFrames, OfPeersThatAreNoneAreLeftAside) {
  RelayBody body = Body();
  body.destination = kStranger;
  EXPECT_TRUE(Stale(kA, kRelayer, Altered(body)));
  body = Body();
  body.origin = kStranger;
  EXPECT_TRUE(Stale(kRelayer, kC, Altered(body)));
  EXPECT_NE(Refusal(kStranger, kC, Relayed()), "") << "by a stranger";
}

TEST(ControlFrames, OfAGroupThatIsNoneAreLeftAside) {
  ControlFrame frame = Relayed();
  RelayBody body = Body();
  frame.header.group = body.inner.group = 8;
  const auto bytes = Encode(body);
  std::copy(bytes.begin(), bytes.end(), frame.payload.begin());
  EXPECT_TRUE(Stale(kA, kRelayer, frame));
  EXPECT_TRUE(Stale(kRelayer, kC, frame));
}

TEST(ControlFrames, OfTransfersAreRefused) {
  ControlFrame frame;
  frame.header.type = FrameType::kChunkCancel;
  frame.header.op = OpOrdinal(1);
  EXPECT_EQ(Refusal(kA, kC, frame), "frame type is 15, not READY, DONE or RELAY");
  // Nor do they travel inside RELAY.
  RelayBody body = Body();
  body.inner = frame.header;
  EXPECT_NE(Refusal(kA, kRelayer, Altered(body)), "");
}

TEST(ControlFrames, TakeOneRelayNeverTwo) {
  // A second relay would get the frame from a peer that is not its origin.
  EXPECT_EQ(Refusal(kRelayer, PeerId(4), Relayed()),
            "RELAY from p1 to p3 does not belong on a link to p2");
}

TEST(ControlFrames, AreNotRelayedByTheirOrigin) {
  EXPECT_EQ(Refusal(kA, kC, Relayed()), "RELAY from p1 to p3 does not belong on a link to p1");
  RelayBody body = Body();
  body.origin = kRelayer;
  EXPECT_NE(Refusal(kA, kRelayer, Altered(body)), "");
}

TEST(ControlFrames, AreRelayedByTheRelayOfThePairOnly) {
  const std::string no = "RELAY from p1 to p3 in attempt 4, in which p4 is not their relay";
  // It would speak in the name of A; and A would speak through whom it likes.
  EXPECT_EQ(Refusal(PeerId(4), kC, Relayed()), no);
  EXPECT_EQ(Refusal(kA, PeerId(4), Relayed()), no);
  RelayBody body = Body();
  body.origin = PeerId(4);
  EXPECT_NE(Refusal(PeerId(4), kRelayer, Altered(body)), "");
}

TEST(ControlFrames, AreReadByTheRelayBeforeTheyArePassedOn) {
  RelayBody body = Body();
  body.inner.group = 8;
  EXPECT_EQ(Refusal(kA, kRelayer, Altered(body)), "RELAY of group 7 carries a frame of group 8");
  ControlFrame frame = Relayed();
  frame.payload[kRelayBodyBytes + 17] = 12;
  EXPECT_EQ(Refusal(kA, kRelayer, frame), "dtype is 12, not at most 11");
  frame = Relayed();
  frame.payload.pop_back();
  EXPECT_NE(Refusal(kA, kRelayer, frame), "");
}

}  // namespace
}  // namespace longhaul::peerd
