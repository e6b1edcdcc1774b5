#include "tools/lhctl/fetch_recording.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/recorder.h"

namespace longhaul {
namespace {

constexpr uint64_t kRecordingBytesMax = 16 << 20;
// Exchanges that are made only to know the clock better. A short recording comes in one piece, and
// one exchange may have waited somewhere.
constexpr int kClockExchanges = 8;
// A host whose clock is further away shows nonsense anyway; sums of larger numbers could overflow.
constexpr int64_t kTimeMax = int64_t{1} << 56;

bool Plausible(int64_t us) { return us > 0 && us < kTimeMax; }

// Takes the exchange into the estimate, if it is better than those before.
void Measure(const v1::ReadRecordingResponse& piece, TracedRecording* traced) {
  if (!Plausible(piece.asked_us()) || !Plausible(piece.received_us()) ||
      !Plausible(piece.sent_us()) || !Plausible(piece.answered_us())) {
    return;
  }
  const int64_t away =
      (piece.answered_us() - piece.asked_us()) - (piece.sent_us() - piece.received_us());
  if (away < 0) return;  // a clock was set in between
  const int64_t error = (away + 1) / 2;
  if (traced->error_us >= 0 && error >= traced->error_us) return;
  traced->error_us = error;
  traced->offset_us =
      ((piece.received_us() - piece.asked_us()) + (piece.sent_us() - piece.answered_us())) / 2;
}

}  // namespace

absl::StatusOr<TracedRecording> FetchRecording(const std::string& peer, const FetchOptions& options,
                                               const ReadPiece& read) {
  TracedRecording traced;
  std::string bytes;
  v1::ReadRecordingRequest request;
  request.set_peer(peer);
  request.set_ops_max(options.ops_max);
  request.set_events_max(options.events_max);
  uint64_t total = 0;
  do {
    request.set_offset(bytes.size());
    absl::StatusOr<v1::ReadRecordingResponse> piece = read(request);
    if (!piece.ok()) return piece.status();
    const bool first = bytes.empty();
    if (first) total = piece->total();
    if (piece->data().empty() || piece->total() != total || total > kRecordingBytesMax ||
        piece->data().size() > total - bytes.size() ||
        (!first && piece->snapshot() != request.snapshot())) {
      return absl::InternalError(
          absl::StrCat("the recording came in pieces that do not fit: ", piece->data().size(),
                       " bytes at ", bytes.size(), " of ", piece->total()));
    }
    bytes += piece->data();
    request.set_snapshot(piece->snapshot());
    Measure(*piece, &traced);
  } while (bytes.size() < total);
  absl::StatusOr<Recording> recording = ParseRecording(bytes);
  if (!recording.ok()) return absl::InternalError(std::string(recording.status().message()));
  traced.recording = *std::move(recording);
  // The coordinator's clock is the one that all others are compared with.
  if (peer.empty()) {
    traced.error_us = 0;
    return traced;
  }
  v1::ReadRecordingRequest least;  // a recording with its header alone
  least.set_peer(peer);
  for (int i = 0; i < kClockExchanges; ++i) {
    const absl::StatusOr<v1::ReadRecordingResponse> piece = read(least);
    if (!piece.ok()) break;  // the offset is known, only less well
    Measure(*piece, &traced);
  }
  return traced;
}

}  // namespace longhaul
