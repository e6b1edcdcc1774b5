#include "proto/control/recording.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/longhaul/v1/recording.pb.h"

namespace longhaul::control {
namespace {

// Field 64, with a length: how both envelopes begin.
constexpr std::string_view kEnvelope("\x82\x04", 2);
constexpr size_t kErrorBytesMax = 448;

}  // namespace

int64_t WallClockUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

bool IsRecordingMessage(std::string_view bytes) { return bytes.starts_with(kEnvelope); }

std::string Serialize(const ReadRecording& request) {
  v1::RecordingRequestEnvelope envelope;
  v1::ReadRecording* const proto = envelope.mutable_read_recording();
  proto->set_request(request.request);
  proto->set_snapshot(request.snapshot);
  proto->set_offset(request.offset);
  proto->set_ops_max(request.ops_max);
  proto->set_events_max(request.events_max);
  return envelope.SerializeAsString();
}

std::string Serialize(const RecordingPiece& piece) {
  v1::RecordingAnswerEnvelope envelope;
  v1::RecordingPiece* const proto = envelope.mutable_recording_piece();
  proto->set_request(piece.request);
  proto->set_snapshot(piece.snapshot);
  proto->set_offset(piece.offset);
  proto->set_total(piece.total);
  proto->set_data(piece.data);
  proto->set_received_us(piece.received_us);
  proto->set_sent_us(piece.sent_us);
  proto->set_error(piece.error);
  return envelope.SerializeAsString();
}

absl::StatusOr<ReadRecording> ParseReadRecording(const std::string& bytes) {
  v1::RecordingRequestEnvelope envelope;
  if (!envelope.ParseFromString(bytes) || !envelope.has_read_recording()) {
    return absl::InvalidArgumentError("a request for a recording is not a valid protobuf");
  }
  const v1::ReadRecording& proto = envelope.read_recording();
  if (proto.request() == 0) {
    return absl::InvalidArgumentError("a request for a recording has the number 0");
  }
  return ReadRecording{proto.request(), proto.snapshot(), proto.offset(), proto.ops_max(),
                       proto.events_max()};
}

absl::StatusOr<RecordingPiece> ParseRecordingPiece(const std::string& bytes) {
  v1::RecordingAnswerEnvelope envelope;
  if (!envelope.ParseFromString(bytes) || !envelope.has_recording_piece()) {
    return absl::InvalidArgumentError("a piece of a recording is not a valid protobuf");
  }
  v1::RecordingPiece& proto = *envelope.mutable_recording_piece();
  if (proto.data().size() > kPieceBytesMax || proto.error().size() > kErrorBytesMax ||
      proto.total() > kRecordingBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a piece of a recording has ", proto.data().size(), " bytes of ", proto.total(),
        " and a text of ", proto.error().size(), "; at most ", kPieceBytesMax, ", ",
        kRecordingBytesMax, " and ", kErrorBytesMax, " are allowed"));
  }
  return RecordingPiece{proto.request(),
                        proto.snapshot(),
                        proto.offset(),
                        proto.total(),
                        std::move(*proto.mutable_data()),
                        proto.received_us(),
                        proto.sent_us(),
                        std::move(*proto.mutable_error())};
}

RecordingPiece RecordingSource::Answer(const ReadRecording& request, int64_t received_us) {
  RecordingPiece piece;
  piece.request = request.request;
  piece.offset = request.offset;
  piece.received_us = received_us;
  MutexLock lock(&mutex_);
  uint64_t number = request.snapshot;
  if (number == 0) {
    number = next_++;
    snapshots_.push_back({number, recorder_->Serialize("asked by an operator", request.ops_max,
                                                       request.events_max)});
    if (snapshots_.size() > kSnapshots) snapshots_.pop_front();
  }
  const auto snapshot = std::find_if(snapshots_.begin(), snapshots_.end(),
                                     [&](const Snapshot& each) { return each.number == number; });
  if (snapshot == snapshots_.end()) {
    piece.error = "this recording is gone, because others were asked for meanwhile; ask again";
  } else if (request.offset > snapshot->bytes.size()) {
    piece.error = "the recording is shorter";
  } else {
    piece.snapshot = number;
    piece.total = snapshot->bytes.size();
    piece.data = snapshot->bytes.substr(request.offset, kPieceBytesMax);
    if (request.offset + piece.data.size() == piece.total) snapshots_.erase(snapshot);
  }
  piece.sent_us = WallClockUs();
  return piece;
}

}  // namespace longhaul::control
