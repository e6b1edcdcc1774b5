#include "tools/lhctl/fetch_recording.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

// Answers as a coordinator and a peer would, with pieces of 1000 bytes.
class FakePeer {
 public:
  FakePeer() : recorder_("t", "1", 64, 4) {
    recorder_.SetPeer(0xa);
    for (uint64_t tag = 1; tag <= 20; ++tag) {
      Record record;
      record.kind = static_cast<uint8_t>(RecordKind::kOp);
      record.tag = tag;
      recorder_.ops().Add(&record);
    }
  }

  ReadPiece Read() {
    return
        [this](
            const v1::ReadRecordingRequest& request) -> absl::StatusOr<v1::ReadRecordingResponse> {
          if (request.snapshot() == 0) {
            bytes_ = recorder_.Serialize("asked", request.ops_max(), request.events_max());
          }
          v1::ReadRecordingResponse piece;
          piece.set_snapshot(5);
          piece.set_total(bytes_.size());
          piece.set_data(bytes_.substr(request.offset(), 1000));
          if (change) change(piece, pieces++);
          return piece;
        };
  }

  std::function<void(v1::ReadRecordingResponse&, int)> change;
  int pieces = 0;

 private:
  Recorder recorder_;
  std::string bytes_;
};

TEST(FetchRecording, PutsThePiecesTogether) {
  FakePeer peer;
  const auto traced = FetchRecording("pa", {15, 4}, peer.Read());
  ASSERT_TRUE(traced.ok()) << traced.status();
  EXPECT_EQ(traced->recording.peer, 0xau);
  EXPECT_EQ(traced->recording.ops.size(), 15u);
  EXPECT_EQ(traced->error_us, -1);
}

TEST(FetchRecording, TheShortestExchangeGivesTheOffset) {
  FakePeer peer;
  // The peer's clock is 1000 us ahead. The second exchange has the shortest way, 60 us.
  peer.change = [](v1::ReadRecordingResponse& piece, int number) {
    const int64_t there = number == 1 ? 20 : 500;
    const int64_t back = number == 1 ? 40 : 900;
    piece.set_asked_us(1'000'000);
    piece.set_received_us(1'000'000 + there + 1000);
    piece.set_sent_us(1'000'000 + there + 10 + 1000);
    piece.set_answered_us(1'000'000 + there + 10 + back);
  };
  const auto traced = FetchRecording("pa", {64, 4}, peer.Read());
  ASSERT_TRUE(traced.ok());
  EXPECT_EQ(traced->error_us, 30);
  EXPECT_LE(std::abs(traced->offset_us - 1000), traced->error_us);
}

TEST(FetchRecording, TimesThatCannotBeAreLeftOut) {
  FakePeer peer;
  peer.change = [](v1::ReadRecordingResponse& piece, int) {
    piece.set_asked_us(1'000'000);
    piece.set_received_us(INT64_MIN);
    piece.set_sent_us(INT64_MAX);
    piece.set_answered_us(1'000'001);
  };
  EXPECT_EQ(FetchRecording("pa", {64, 4}, peer.Read())->error_us, -1);
}

TEST(FetchRecording, TheCoordinatorsClockIsTheMeasure) {
  FakePeer peer;
  EXPECT_EQ(FetchRecording("", {64, 4}, peer.Read())->error_us, 0);
}

TEST(FetchRecording, RefusesPiecesThatDoNotFit) {
  const auto refused = [](std::function<void(v1::ReadRecordingResponse&, int)> change) {
    FakePeer peer;
    peer.change = std::move(change);
    const auto traced = FetchRecording("pa", {64, 4}, peer.Read());
    return !traced.ok();
  };
  EXPECT_TRUE(refused([](auto& piece, int) { piece.clear_data(); }));
  EXPECT_TRUE(refused([](auto& piece, int) { piece.set_total(uint64_t{1} << 40); }));
  EXPECT_TRUE(refused([](auto& piece, int) { piece.set_total(10); }));
  EXPECT_TRUE(refused([](auto& piece, int number) { piece.set_total(3000 + number); }));
  EXPECT_TRUE(refused([](auto& piece, int number) { piece.set_snapshot(5 + number); }));
  EXPECT_TRUE(refused([](auto& piece, int) { piece.set_data(std::string(1000, 'x')); }));
}

}  // namespace
}  // namespace longhaul
