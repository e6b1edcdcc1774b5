// Passes an operator's requests for recordings to the streams of peers, and the answers back
// (proto/longhaul/v1/recording.proto). Beside the loop and the core, which see none of it.
//
// Memory is bounded: at most kRequestsMax requests wait, and an answer has at most one piece. An
// answer that nobody waits for is dropped. The desk has no clock that ends a request: whoever asks
// cancels it, and the end of the peer's stream ends it.
//
// Threads: any. Callbacks run on the thread of the call that ends the request, without a lock.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "base/recorder.h"
#include "proto/control/recording.h"

namespace longhaul::coordinator {

// A control stream whose peer answers requests for recordings.
class RecordingStream {
 public:
  virtual ~RecordingStream() = default;
  // Sends these bytes to the peer.
  virtual void SendBytes(std::string bytes) = 0;
};

struct RecordingAnswer {
  control::RecordingPiece piece;
  int64_t asked_us = 0;  // by this host's clock
  int64_t answered_us = 0;
};

class RecordingDesk {
 public:
  static constexpr size_t kRequestsMax = 64;

  using Done = std::function<void(const absl::StatusOr<RecordingAnswer>&)>;

  // `own`: the recorder of this process, or null. It must outlive the desk.
  explicit RecordingDesk(const Recorder* own);

  // ---- streams of peers
  // The peer has been welcomed on this stream. Replaces an earlier stream of the peer.
  void Add(PeerId peer, const std::shared_ptr<RecordingStream>& stream);
  // The stream is over. Requests that wait for it end with Unavailable.
  void Remove(PeerId peer, const RecordingStream* stream);
  void OnPiece(PeerId from, control::RecordingPiece piece);

  // ---- operators
  // Asks the peer. `done` gets the answer, or why there is none: NotFound (no such peer is
  // attached, or it has no recorder), ResourceExhausted, Unavailable, or FailedPrecondition with
  // the peer's text. Returns the number of the request, for Cancel().
  uint64_t Ask(PeerId peer, control::ReadRecording request, const Done& done);
  // Ends the request with Cancelled, unless it has ended.
  void Cancel(uint64_t request);
  // Reads the recording of this process.
  absl::StatusOr<RecordingAnswer> AskSelf(const control::ReadRecording& request);

 private:
  struct Waiting {
    PeerId peer;
    int64_t asked_us;
    Done done;
  };

  const bool has_own_;
  control::RecordingSource own_;
  Mutex mutex_;
  std::map<PeerId, std::weak_ptr<RecordingStream>> streams_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_request_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace longhaul::coordinator
