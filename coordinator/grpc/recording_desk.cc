#include "coordinator/grpc/recording_desk.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace longhaul::coordinator {
namespace {

// Answers with a piece, or with the error in it.
absl::StatusOr<RecordingAnswer> Finished(RecordingAnswer answer) {
  if (answer.piece.error.empty()) return answer;
  return absl::FailedPreconditionError(
      TextOf(answer.piece.error.data(), answer.piece.error.size()));
}

// A weak pointer compares by its control block, also after the object is gone.
bool Same(const std::weak_ptr<RecordingStream>& a, const RecordingStream* b) {
  const std::shared_ptr<RecordingStream> alive = a.lock();
  return alive == nullptr || alive.get() == b;
}

}  // namespace

RecordingDesk::RecordingDesk(const Recorder* own) : has_own_(own != nullptr), own_(own) {}

void RecordingDesk::Add(PeerId peer, const std::shared_ptr<RecordingStream>& stream) {
  MutexLock lock(&mutex_);
  // A stream that ended while it was welcomed was removed before it was added.
  std::erase_if(streams_, [](const auto& entry) { return entry.second.expired(); });
  streams_[peer] = stream;
}

void RecordingDesk::Remove(PeerId peer, const RecordingStream* stream) {
  std::vector<Done> ended;
  {
    MutexLock lock(&mutex_);
    const auto it = streams_.find(peer);
    if (it == streams_.end() || !Same(it->second, stream)) return;
    streams_.erase(it);
    for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
      if (waiting->second.peer == peer) {
        ended.push_back(std::move(waiting->second.done));
        waiting = waiting_.erase(waiting);
      } else {
        ++waiting;
      }
    }
  }
  for (const Done& done : ended) {
    done(absl::UnavailableError(
        absl::StrCat("the control stream of peer ", ToString(peer), " ended; try again")));
  }
}

void RecordingDesk::OnPiece(PeerId from, control::RecordingPiece piece) {
  const int64_t now = control::WallClockUs();
  Waiting waiting;
  {
    MutexLock lock(&mutex_);
    const auto it = waiting_.find(piece.request);
    // A peer may answer its own requests only.
    if (it == waiting_.end() || it->second.peer != from) return;
    waiting = std::move(it->second);
    waiting_.erase(it);
  }
  waiting.done(Finished({std::move(piece), waiting.asked_us, now}));
}

uint64_t RecordingDesk::Ask(PeerId peer, control::ReadRecording request, const Done& done) {
  std::shared_ptr<RecordingStream> stream;
  absl::Status refused;
  {
    MutexLock lock(&mutex_);
    const auto it = streams_.find(peer);
    if (it != streams_.end()) stream = it->second.lock();
    if (stream == nullptr) {
      refused = absl::NotFoundError(absl::StrCat(
          "no peer ", ToString(peer),
          " is attached, or its release has no flight recorder; `lhctl ring` lists peers"));
    } else if (waiting_.size() >= kRequestsMax) {
      refused = absl::ResourceExhaustedError(
          absl::StrCat(kRequestsMax, " requests for recordings wait for peers already; try again"));
    } else {
      request.request = next_request_++;
      waiting_[request.request] = {peer, control::WallClockUs(), done};
    }
  }
  if (!refused.ok()) {
    done(refused);
    return 0;
  }
  stream->SendBytes(control::Serialize(request));
  return request.request;
}

void RecordingDesk::Cancel(uint64_t request) {
  Done done;
  {
    MutexLock lock(&mutex_);
    const auto it = waiting_.find(request);
    if (it == waiting_.end()) return;
    done = std::move(it->second.done);
    waiting_.erase(it);
  }
  done(absl::CancelledError("the caller did not wait for the peer's answer"));
}

absl::StatusOr<RecordingAnswer> RecordingDesk::AskSelf(const control::ReadRecording& request) {
  if (!has_own_) return absl::NotFoundError("this coordinator has no flight recorder");
  RecordingAnswer answer{own_.Answer(request, 0)};
  answer.piece.sent_us = 0;
  return Finished(std::move(answer));
}

}  // namespace longhaul::coordinator
