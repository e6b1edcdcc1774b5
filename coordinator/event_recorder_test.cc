#include "coordinator/event_recorder.h"

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

EventRecord EventOf(const std::string& kind) {
  EventRecord event;
  event.kind = kind;
  event.group = {"demo", 3};
  event.epoch = Epoch(5);
  event.member = MemberId(7);
  event.peer = PeerId(0x1f);
  event.text = "something happened";
  return event;
}

Record Recorded(const EventRecord& event) {
  RecordRing ring(2);
  RecordEvent(event, Tick{100}, &ring);
  Record record;
  EXPECT_TRUE(ring.Read(1, &record));
  return record;
}

TEST(EventRecorder, ARecordSaysWhatTheEventSays) {
  const Record record = Recorded(EventOf("commit"));
  EXPECT_EQ(record.time_us, 100);
  EXPECT_EQ(record.kind, static_cast<uint8_t>(RecordKind::kEpoch));
  EXPECT_EQ(record.group, 3u);
  EXPECT_EQ(record.epoch, 5u);
  EXPECT_EQ(record.member, 7u);
  EXPECT_EQ(record.peer, 0x1fu);
  EXPECT_EQ(TextOf(record.run, sizeof record.run), "demo");
  EXPECT_EQ(TextOf(record.text, sizeof record.text), "something happened");
  EXPECT_EQ(Recorded(EventOf("attach")).kind, static_cast<uint8_t>(RecordKind::kNote));
}

TEST(EventRecorder, DeathsEvictionsAndRepairsAreFaults) {
  EXPECT_TRUE(IsFault(EventOf("death")));
  EXPECT_TRUE(IsFault(EventOf("evict")));
  EXPECT_FALSE(IsFault(EventOf("leave")));
  EventRecord commit = EventOf("commit");
  EXPECT_FALSE(IsFault(commit));
  commit.fault.emplace();
  commit.fault->cause = "leave";
  EXPECT_FALSE(IsFault(commit));
  commit.fault->cause = "silence";
  EXPECT_TRUE(IsFault(commit));
}

}  // namespace
}  // namespace longhaul::coordinator
