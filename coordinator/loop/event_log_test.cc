#include "coordinator/loop/event_log.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

EventRecord Event(const std::string& text) {
  EventRecord event;
  event.text = text;
  return event;
}

std::vector<uint64_t> Sequences(const std::vector<StampedEvent>& events) {
  std::vector<uint64_t> sequences;
  for (const StampedEvent& event : events) sequences.push_back(event.sequence);
  return sequences;
}

TEST(EventLog, ReadsOnFromAnySequenceNumber) {
  EventLog log;
  EXPECT_THAT(log.Read(0, 10), IsEmpty());
  for (int i = 1; i <= 5; ++i) log.Append(Event(std::to_string(i)), i);
  EXPECT_THAT(Sequences(log.Read(0, 2)), ElementsAre(1, 2));
  EXPECT_THAT(Sequences(log.Read(2, 10)), ElementsAre(3, 4, 5));
  EXPECT_THAT(log.Read(5, 10), IsEmpty());
  EXPECT_THAT(log.Read(UINT64_MAX, SIZE_MAX), IsEmpty());
  EXPECT_EQ(log.Read(4, 1)[0].event.text, "5");
  EXPECT_EQ(log.Read(4, 1)[0].time_us, 5);
  EXPECT_EQ(log.newest(), 5u);
}

TEST(EventLog, ForgetsTheOldestAndShowsTheGap) {
  EventLog log(3);
  for (int i = 1; i <= 5; ++i) log.Append(Event(""), i);
  EXPECT_THAT(Sequences(log.Read(1, SIZE_MAX)), ElementsAre(3, 4, 5));
}

TEST(EventLog, WakesSubscribersUntilTheyLeave) {
  EventLog log;
  int woken = 0;
  const auto subscription = log.Subscribe([&woken] { ++woken; });
  log.Append(Event(""), 1);
  log.Append(Event(""), 2);
  log.Unsubscribe(subscription);
  log.Append(Event(""), 3);
  EXPECT_EQ(woken, 2);
}

}  // namespace
}  // namespace longhaul::coordinator
