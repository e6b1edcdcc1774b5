#include "base/recorder.h"

#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <sstream>
#include <thread>

#include "gtest/gtest.h"

namespace longhaul {
namespace {

Record OpWithTag(uint64_t tag) {
  Record record;
  record.kind = static_cast<uint8_t>(RecordKind::kOp);
  record.tag = tag;
  return record;
}

void AddOp(Recorder& recorder, uint64_t tag) {
  Record record = OpWithTag(tag);
  recorder.ops().Add(&record);
}

void AddEvent(Recorder& recorder, std::string_view text) {
  Record record;
  record.kind = static_cast<uint8_t>(RecordKind::kEpoch);
  SetText(record.text, text);
  recorder.events().Add(&record);
}

TEST(RecordRing, KeepsTheLastRecordsOnly) {
  RecordRing ring(4);
  EXPECT_EQ(ring.newest(), 0u);
  Record record;
  EXPECT_FALSE(ring.Read(0, &record));
  EXPECT_FALSE(ring.Read(1, &record));
  for (uint64_t tag = 1; tag <= 11; ++tag) {
    Record added = OpWithTag(tag);
    EXPECT_EQ(ring.Add(&added), tag);
  }
  EXPECT_EQ(ring.oldest(), 8u);
  for (uint64_t n = 0; n <= 7; ++n) EXPECT_FALSE(ring.Read(n, &record)) << n;
  for (uint64_t n = 8; n <= 11; ++n) {
    ASSERT_TRUE(ring.Read(n, &record)) << n;
    EXPECT_EQ(record.tag, n);
  }
  EXPECT_FALSE(ring.Read(12, &record));
}

TEST(RecordRing, UpdatesARecordUntilItIsForgotten) {
  RecordRing ring(2);
  Record first = OpWithTag(1);
  ring.Add(&first);
  first.code = 3;
  ring.Update(first);
  Record read;
  ASSERT_TRUE(ring.Read(1, &read));
  EXPECT_EQ(read.code, 3);
  for (uint64_t tag = 2; tag <= 3; ++tag) {
    Record next = OpWithTag(tag);
    ring.Add(&next);
  }
  ring.Update(first);  // would overwrite the third record
  ASSERT_TRUE(ring.Read(3, &read));
  EXPECT_EQ(read.tag, 3u);
}

// All numbers of a record are equal. A reader must never see a mixture of two records.
TEST(RecordRing, AReaderSeesWholeRecordsWhileTheOwnerWrites) {
  RecordRing ring(8);
  std::atomic<bool> stop{false};
  std::thread owner([&] {
    for (uint64_t n = 1; !stop; ++n) {
      Record record = OpWithTag(n);
      record.bytes = n;
      record.epoch = n;
      record.member = n;
      record.peer = n;
      ring.Add(&record);
      ring.Update(record);
    }
  });
  uint64_t seen = 0;
  while (seen < 20000) {
    Record record;
    const uint64_t newest = ring.newest();
    for (uint64_t n = ring.oldest(); n <= newest; ++n) {
      if (!ring.Read(n, &record)) continue;
      ++seen;
      ASSERT_EQ(record.tag, n);
      ASSERT_EQ(record.bytes, n);
      ASSERT_EQ(record.epoch, n);
      ASSERT_EQ(record.member, n);
      ASSERT_EQ(record.peer, n);
    }
  }
  stop = true;
  owner.join();
}

TEST(Recorder, TakesAFewMebibytes) {
  EXPECT_LE((kOpRecordsMax + kEventRecordsMax) * (sizeof(Record) + 8), size_t{3} << 20);
}

TEST(Recorder, ARecordingHasWhatWasRecorded) {
  Recorder recorder("longhaul-test", "1.2", 4, 4);
  recorder.SetPeer(0x1f);
  for (uint64_t tag = 1; tag <= 6; ++tag) AddOp(recorder, tag);
  AddEvent(recorder, "epoch committed epoch=7");
  const auto recording = ParseRecording(recorder.Serialize("asked", 3, 10));
  ASSERT_TRUE(recording.ok()) << recording.status();
  EXPECT_EQ(recording->peer, 0x1fu);
  EXPECT_EQ(recording->program, "longhaul-test");
  EXPECT_EQ(recording->version, "1.2");
  EXPECT_EQ(recording->cause, "asked");
  EXPECT_EQ(recording->pid, static_cast<uint32_t>(getpid()));
  EXPECT_EQ(recording->ops_total, 6u);
  ASSERT_EQ(recording->ops.size(), 3u);
  EXPECT_EQ(recording->ops[0].tag, 4u);
  EXPECT_EQ(recording->ops[2].tag, 6u);
  ASSERT_EQ(recording->events.size(), 1u);
  EXPECT_EQ(TextOf(recording->events[0].text, sizeof recording->events[0].text),
            "epoch committed epoch=7");
  EXPECT_EQ(recording->WallOf(recording->monotonic_us), recording->wall_us);
}

TEST(Recorder, AFileHasTheSameRecords) {
  Recorder recorder("longhaul-test", "1.2", 4, 4);
  for (uint64_t tag = 1; tag <= 6; ++tag) AddOp(recorder, tag);
  AddEvent(recorder, "link lost");
  char path[] = "/tmp/recorder_test.XXXXXX";
  const int fd = mkstemp(path);
  ASSERT_GE(fd, 0);
  EXPECT_TRUE(recorder.WriteTo(fd, "SIGABRT"));
  close(fd);
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  unlink(path);
  const auto recording = ParseRecording(bytes.str());
  ASSERT_TRUE(recording.ok()) << recording.status();
  EXPECT_EQ(recording->cause, "SIGABRT");
  ASSERT_EQ(recording->ops.size(), 4u);
  EXPECT_EQ(recording->ops[0].tag, 3u);
  EXPECT_EQ(recording->events.size(), 1u);
  EXPECT_FALSE(recorder.WriteTo(-1, "no file"));
}

TEST(ParseRecording, RefusesForeignBytes) {
  EXPECT_FALSE(ParseRecording("").ok());
  EXPECT_FALSE(ParseRecording(std::string(319, 'x')).ok());
  EXPECT_FALSE(ParseRecording(std::string(5000, 'x')).ok());
  std::string times = Recorder("t", "1", 2, 2).Serialize("", 2, 2);
  times[31] = '\x80';  // the sign of wall_us
  EXPECT_FALSE(ParseRecording(times).ok());
}

TEST(ParseRecording, LeavesOutRecordsThatCannotBe) {
  Recorder recorder("t", "1", 8, 2);
  AddOp(recorder, 1);
  Record bad = OpWithTag(2);
  bad.total_us = -1;
  recorder.ops().Add(&bad);
  bad = OpWithTag(3);
  bad.time_us = INT64_MAX;
  recorder.ops().Add(&bad);
  bad = OpWithTag(4);
  bad.kind = 200;
  recorder.ops().Add(&bad);
  AddOp(recorder, 5);
  std::string bytes = recorder.Serialize("", 8, 2);
  const auto recording = ParseRecording(bytes);
  ASSERT_TRUE(recording.ok());
  ASSERT_EQ(recording->ops.size(), 2u);
  EXPECT_EQ(recording->ops[1].tag, 5u);
  // A file that was cut off.
  bytes.resize(bytes.size() - 1);
  EXPECT_EQ(ParseRecording(bytes)->ops.size(), 1u);
}

TEST(ParseRecording, TextHasNoControlCharacters) {
  Record record;
  SetText(record.text,
          "a\x1b[2J\xff"
          "b");
  EXPECT_EQ(TextOf(record.text, sizeof record.text), "a?[2J?b");
  SetText(record.run, std::string(100, 'r'));
  EXPECT_EQ(TextOf(record.run, sizeof record.run), std::string(64, 'r'));
}

}  // namespace
}  // namespace longhaul
