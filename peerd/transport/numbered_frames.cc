#include "peerd/transport/numbered_frames.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "peerd/transport/lane.h"

namespace longhaul::peerd {
namespace {

// The limit of frames kept. The members of this peer cannot cause more, even if each has all the
// ops open that it may have, announced and done. It leaves room in a control lane's queue.
constexpr size_t kKeptBytesMax = size_t{LH_LOCAL_MEMBERS_MAX} * LH_OPS_OPEN_MAX *
                                 (2 * kFrameHeaderBytes + LH_CONTROL_PAYLOAD_BYTES_MAX);
static_assert(kKeptBytesMax + (1 << 20) < kControlQueueBytesMax);
// A correct peer acknowledges at least so often.
constexpr uint32_t kAckFrames = 64;
constexpr size_t kAckBytes = 64 << 10;

}  // namespace

bool NumberedFrames::Keep(const FrameHeader& header, std::span<const uint8_t> payload) {
  const size_t bytes = kFrameHeaderBytes + payload.size();
  if (kept_.size() - kept_head_ + bytes > kKeptBytesMax) return false;
  const auto encoded = Encode(header);
  kept_.insert(kept_.end(), encoded.begin(), encoded.end());
  kept_.insert(kept_.end(), payload.begin(), payload.end());
  kept_sizes_.push_back(static_cast<uint32_t>(bytes));
  ++sent_;
  return true;
}

std::span<const uint8_t> NumberedFrames::TakeForLane() {
  if (!resumed_) return {};
  const auto bytes = std::span<const uint8_t>(kept_).subspan(kept_head_ + on_lane_bytes_);
  on_lane_bytes_ += bytes.size();
  put_on_lane_ = sent_;
  return bytes;
}

absl::Status NumberedFrames::OnAcked(uint64_t acked) {
  if (acked > sent_) {
    return absl::InvalidArgumentError(
        absl::StrCat("acknowledges ", acked, " frames where ", sent_, " were sent"));
  }
  for (; acked_ < acked; ++acked_) {
    kept_head_ += kept_sizes_.front();
    on_lane_bytes_ -= std::min<size_t>(on_lane_bytes_, kept_sizes_.front());
    kept_sizes_.pop_front();
  }
  if (kept_head_ * 2 >= kept_.size()) {
    kept_.erase(kept_.begin(), kept_.begin() + static_cast<ptrdiff_t>(kept_head_));
    kept_head_ = 0;
  }
  return absl::OkStatus();
}

absl::Status NumberedFrames::OnReceived() {
  if (!resumed_) return absl::InvalidArgumentError("a frame before RESUME");
  ++received_;
  return absl::OkStatus();
}

bool NumberedFrames::AckIsDue(size_t bytes) {
  ++unacked_frames_;
  unacked_bytes_ += bytes;
  if (unacked_frames_ < kAckFrames && unacked_bytes_ < kAckBytes) return false;
  unacked_frames_ = 0;
  unacked_bytes_ = 0;
  return true;
}

void NumberedFrames::BeginLane() {
  resumed_ = false;
  on_lane_bytes_ = 0;
  unacked_frames_ = 0;
  unacked_bytes_ = 0;
}

absl::StatusOr<uint64_t> NumberedFrames::OnResume(uint64_t acked) {
  if (resumed_) return absl::InvalidArgumentError("RESUME on a lane that was not lost");
  if (acked < acked_) {
    return absl::InvalidArgumentError(
        absl::StrCat("RESUME after ", acked, " frames where ", acked_, " were acknowledged"));
  }
  const absl::Status status = OnAcked(acked);
  if (!status.ok()) return status;
  resumed_ = true;
  return put_on_lane_ > acked_ ? put_on_lane_ - acked_ : 0;
}

}  // namespace longhaul::peerd
