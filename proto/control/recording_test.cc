#include "proto/control/recording.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/control/convert.h"

namespace longhaul::control {
namespace {

using ::testing::HasSubstr;

void AddOps(Recorder& recorder, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    Record record;
    record.kind = static_cast<uint8_t>(RecordKind::kOp);
    record.tag = i;
    recorder.ops().Add(&record);
  }
}

TEST(Recording, MessagesCrossTheWire) {
  const auto request = ParseReadRecording(Serialize(ReadRecording{1, 2, 3, 4, 5}));
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->request, 1u);
  EXPECT_EQ(request->snapshot, 2u);
  EXPECT_EQ(request->offset, 3u);
  EXPECT_EQ(request->ops_max, 4u);
  EXPECT_EQ(request->events_max, 5u);
  const auto piece = ParseRecordingPiece(Serialize(RecordingPiece{1, 2, 3, 4, "abc", 6, 7, "e"}));
  ASSERT_TRUE(piece.ok()) << piece.status();
  EXPECT_EQ(piece->request, 1u);
  EXPECT_EQ(piece->snapshot, 2u);
  EXPECT_EQ(piece->offset, 3u);
  EXPECT_EQ(piece->total, 4u);
  EXPECT_EQ(piece->data, "abc");
  EXPECT_EQ(piece->received_us, 6);
  EXPECT_EQ(piece->sent_us, 7);
  EXPECT_EQ(piece->error, "e");
}

TEST(Recording, TheFirstBytesTellTheMessagesOfTheProtocolApart) {
  EXPECT_TRUE(IsRecordingMessage(Serialize(ReadRecording{1})));
  EXPECT_TRUE(IsRecordingMessage(Serialize(RecordingPiece{1})));
  EXPECT_FALSE(IsRecordingMessage(""));
  EXPECT_FALSE(IsRecordingMessage(Serialize(PeerMessage(Hello{}))));
  EXPECT_FALSE(IsRecordingMessage(Serialize(PeerMessage(Heartbeat{}))));
  EXPECT_FALSE(IsRecordingMessage(Serialize(CoordinatorMessage(Welcome{}))));
  // An older release refuses such a message, so it must not be sent there.
  EXPECT_FALSE(ParsePeerMessage(Serialize(RecordingPiece{1})).ok());
}

TEST(Recording, RefusesWhatIsTooLongAndWhatIsNoMessage) {
  EXPECT_FALSE(ParseReadRecording("\x82\x04\x7f").ok());
  EXPECT_FALSE(ParseReadRecording(Serialize(ReadRecording{})).ok());
  EXPECT_FALSE(ParseRecordingPiece("garbage").ok());
  RecordingPiece piece;
  piece.data = std::string(kPieceBytesMax, 'x');
  piece.total = kRecordingBytesMax;
  EXPECT_TRUE(ParseRecordingPiece(Serialize(piece)).ok());
  piece.data += 'x';
  EXPECT_FALSE(ParseRecordingPiece(Serialize(piece)).ok());
  piece.data = "";
  piece.total = kRecordingBytesMax + 1;
  EXPECT_FALSE(ParseRecordingPiece(Serialize(piece)).ok());
  piece.total = 0;
  piece.error = std::string(449, 'x');
  EXPECT_FALSE(ParseRecordingPiece(Serialize(piece)).ok());
}

TEST(RecordingSource, PiecesMakeTheRecordingOfOneMoment) {
  Recorder recorder("t", "1", 2048, 16);
  AddOps(recorder, 1000);
  RecordingSource source(&recorder);
  std::string bytes;
  uint64_t snapshot = 0;
  uint64_t total = 1;
  size_t pieces = 0;
  while (bytes.size() < total) {
    const RecordingPiece piece = source.Answer({++pieces, snapshot, bytes.size(), 2000, 10}, 5);
    ASSERT_EQ(piece.error, "");
    ASSERT_FALSE(piece.data.empty());
    EXPECT_EQ(piece.request, pieces);
    EXPECT_EQ(piece.received_us, 5);
    EXPECT_GT(piece.sent_us, 0);
    EXPECT_LE(piece.data.size(), kPieceBytesMax);
    snapshot = piece.snapshot;
    total = piece.total;
    bytes += piece.data;
    AddOps(recorder, 500);
  }
  EXPECT_GT(pieces, 2u);
  const auto recording = ParseRecording(bytes);
  ASSERT_TRUE(recording.ok());
  EXPECT_EQ(recording->ops.size(), 1000u);
  // It was read to its end, so its memory is free again.
  EXPECT_THAT(source.Answer({9, snapshot, 0, 0, 0}, 5).error, HasSubstr("gone"));
}

TEST(RecordingSource, KeepsAFewRecordingsOnly) {
  Recorder recorder("t", "1", 2048, 16);
  AddOps(recorder, 1000);
  RecordingSource source(&recorder);
  const uint64_t first = source.Answer({1, 0, 0, 2000, 0}, 0).snapshot;
  for (size_t i = 1; i < RecordingSource::kSnapshots; ++i) source.Answer({1, 0, 0, 2000, 0}, 0);
  EXPECT_EQ(source.Answer({1, first, 100, 0, 0}, 0).error, "");
  EXPECT_THAT(source.Answer({1, first, uint64_t{1} << 40, 0, 0}, 0).error, HasSubstr("shorter"));
  source.Answer({1, 0, 0, 2000, 0}, 0);
  EXPECT_THAT(source.Answer({1, first, 100, 0, 0}, 0).error, HasSubstr("gone"));
}

}  // namespace
}  // namespace longhaul::control
