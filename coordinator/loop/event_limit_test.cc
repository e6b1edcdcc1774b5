#include "coordinator/loop/event_limit.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::ElementsAre;

EventRecord Of(uint64_t peer, const std::string& kind) {
  EventRecord event;
  event.peer = PeerId(peer);
  event.kind = kind;
  return event;
}

std::vector<std::string> Texts(const std::vector<EventRecord>& events) {
  std::vector<std::string> texts;
  for (const EventRecord& event : events) texts.push_back(event.text);
  return texts;
}

constexpr Tick kLater{kEventWindow};

TEST(EventLimitTest, OnePeersEventsLeaveTheOthersInPeace) {
  EventLimit limit;
  uint64_t told = 0;
  for (uint64_t i = 0; i < 10 * kEventsOfPeerMax; ++i) told += limit.Take(Of(1, "refuse"), Tick{5});
  EXPECT_EQ(told, kEventsOfPeerMax);
  EXPECT_TRUE(limit.Take(Of(1, "admit"), Tick{6}));
  EXPECT_TRUE(limit.Take(Of(2, "refuse"), Tick{6}));
  EXPECT_EQ(limit.due(), Tick{5} + kEventWindow);
  EXPECT_THAT(limit.TakeLeftOut(Tick{4} + kEventWindow), ElementsAre());
  EXPECT_THAT(
      Texts(limit.TakeLeftOut(limit.due())),
      ElementsAre("and 1800 more like this in 60 s event=refuse peer=" + ToString(PeerId(1))));
  EXPECT_EQ(limit.due(), kNever);
  EXPECT_TRUE(limit.Take(Of(1, "refuse"), Tick{6} + kEventWindow));
}

TEST(EventLimitTest, PeersThatAreMadeForItShareOneLimit) {
  EventLimit limit;
  uint64_t told = 0;
  for (uint64_t peer = 1; peer <= 3 * kEventsOfKindMax; ++peer) {
    told += limit.Take(Of(peer, "attach"), Tick{});
  }
  EXPECT_EQ(told, kEventsOfKindMax);
  EXPECT_TRUE(limit.Take(Of(1, "admit"), Tick{}));
  EXPECT_THAT(Texts(limit.TakeLeftOut(kLater)),
              ElementsAre("and 4096 more like this in 60 s event=attach"));
}

TEST(EventLimitTest, WhatTheCoordinatorDecidesIsAlwaysTold) {
  EventLimit limit;
  for (uint64_t i = 0; i < 2 * kEventsOfKindMax; ++i) {
    EXPECT_TRUE(limit.Take(Of(0, "commit"), Tick{}));
  }
  EXPECT_EQ(limit.due(), kNever);
}

TEST(EventLimitTest, ItsMemoryIsBounded) {
  EventLimit limit;
  uint64_t told = 0;
  for (int kind = 0; kind < 100; ++kind) {
    for (uint64_t peer = 1; peer <= kEventsOfKindMax; ++peer) {
      told += limit.Take(Of(peer, "kind" + std::to_string(kind)), Tick{});
    }
  }
  EXPECT_LT(told, kEventKeysMax);
  EXPECT_EQ(limit.TakeLeftOut(kLater).size(), 93u) << "one for each kind that was left out";
  EXPECT_TRUE(limit.Take(Of(1, "another"), kLater));
}

TEST(EventLimitTest, AQuietTimeAndASlowPeerAreNeverLimited) {
  EventLimit limit;
  for (int64_t i = 0; i < 1000; ++i) {
    EXPECT_TRUE(limit.Take(Of(1, "join"), Tick{i * Seconds(1)}));
  }
  EXPECT_EQ(limit.due(), kNever);
}

}  // namespace
}  // namespace longhaul::coordinator
