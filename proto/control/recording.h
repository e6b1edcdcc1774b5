// How recordings of the flight recorder (base/recorder.h) travel from a peer to the coordinator, in
// pieces. See proto/longhaul/v1/recording.proto.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "base/recorder.h"

namespace longhaul::control {

// Metadata of a peer's stream: the peer answers ReadRecording.
inline constexpr char kRecordingMetadata[] = "longhaul-recording";

inline constexpr size_t kPieceBytesMax = 64 << 10;
// A recording of any release has fewer bytes.
inline constexpr uint64_t kRecordingBytesMax = 16 << 20;

struct ReadRecording {
  uint64_t request = 0;
  uint64_t snapshot = 0;
  uint64_t offset = 0;
  uint32_t ops_max = 0;
  uint32_t events_max = 0;
};

struct RecordingPiece {
  uint64_t request = 0;
  uint64_t snapshot = 0;
  uint64_t offset = 0;
  uint64_t total = 0;
  std::string data;
  int64_t received_us = 0;
  int64_t sent_us = 0;
  std::string error;
};

// Microseconds since 1970, by this host's clock.
int64_t WallClockUs();

// Whether bytes from the stream are one of these messages, and not one of the protocol.
bool IsRecordingMessage(std::string_view bytes);

std::string Serialize(const ReadRecording& request);
std::string Serialize(const RecordingPiece& piece);
// InvalidArgument: the bytes are no such message, or break a limit; the text says which.
absl::StatusOr<ReadRecording> ParseReadRecording(const std::string& bytes);
absl::StatusOr<RecordingPiece> ParseRecordingPiece(const std::string& bytes);

// Answers requests for the recording of this process. Keeps the last kSnapshots recordings that
// were not read to their end, so that pieces fit together. Any thread.
class RecordingSource {
 public:
  static constexpr size_t kSnapshots = 4;

  // `recorder` must outlive this object.
  explicit RecordingSource(const Recorder* recorder) : recorder_(recorder) {}

  // `received_us`: when the request came.
  RecordingPiece Answer(const ReadRecording& request, int64_t received_us);

 private:
  struct Snapshot {
    uint64_t number;
    std::string bytes;
  };

  const Recorder* const recorder_;
  Mutex mutex_;
  std::deque<Snapshot> snapshots_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace longhaul::control
