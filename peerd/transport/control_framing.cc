#include "peerd/transport/control_framing.h"

#include <string.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace longhaul::peerd {
namespace {

// There is room for several frames, and always for one of the largest.
constexpr size_t kReceiveBytes = 16 << 10;
static_assert(kReceiveBytes >= kFrameHeaderBytes + LH_CONTROL_PAYLOAD_BYTES_MAX);

}  // namespace

std::span<uint8_t> ControlReader::Room() {
  if (tls_ != nullptr) {
    sealed_.resize(kReceiveBytes);
    return sealed_;
  }
  bytes_.resize(kReceiveBytes);
  return std::span(bytes_).subspan(have_);
}

void ControlReader::Took(size_t bytes) {
  if (tls_ == nullptr) {
    have_ += bytes;
  } else {
    tls_->Feed(std::span(sealed_).first(bytes));
  }
}

absl::StatusOr<std::optional<ControlReader::Frame>> ControlReader::Next() {
  while (true) {
    const std::span<const uint8_t> rest(bytes_.data() + used_, have_ - used_);
    if (rest.size() >= kFrameHeaderBytes) {
      const auto header = ParseFrameHeader(rest.first<kFrameHeaderBytes>(), LaneKind::kControl);
      if (!header.ok()) return header.status();
      if (header->payload_bytes > LH_CONTROL_PAYLOAD_BYTES_MAX) {
        return absl::InvalidArgumentError(absl::StrCat("payload_bytes is ", header->payload_bytes,
                                                       ", too many for a control lane"));
      }
      const size_t whole = kFrameHeaderBytes + header->payload_bytes;
      if (rest.size() >= whole) {
        used_ += whole;
        return Frame{*header, rest.subspan(kFrameHeaderBytes, header->payload_bytes)};
      }
    }
    if (!rest.empty()) memmove(bytes_.data(), rest.data(), rest.size());
    have_ = rest.size();
    used_ = 0;
    if (tls_ == nullptr) return std::nullopt;
    bytes_.resize(kReceiveBytes);
    const absl::StatusOr<size_t> read = tls_->Read(std::span(bytes_).subspan(have_));
    if (!read.ok()) return read.status();
    if (*read == 0) return std::nullopt;
    have_ += *read;
  }
}

bool ControlWriter::HasRoom(size_t bytes) const {
  return queued_.size() + flying_.size() - flying_sent_ + bytes <= bytes_max_;
}

bool ControlWriter::Add(const FrameHeader& header, std::span<const uint8_t> payload) {
  LH_CHECK(payload.size() == header.payload_bytes);
  if (!HasRoom(kFrameHeaderBytes + payload.size())) return false;
  const auto bytes = Encode(header);
  queued_.insert(queued_.end(), bytes.begin(), bytes.end());
  queued_.insert(queued_.end(), payload.begin(), payload.end());
  return true;
}

bool ControlWriter::Add(std::span<const uint8_t> frames) {
  if (!HasRoom(frames.size())) return false;
  queued_.insert(queued_.end(), frames.begin(), frames.end());
  return true;
}

bool ControlWriter::AddNewest(const FrameHeader& header) {
  for (const auto& [type, at] : newest_) {
    if (type != header.type) continue;
    const auto bytes = Encode(header);
    std::copy(bytes.begin(), bytes.end(), queued_.begin() + static_cast<ptrdiff_t>(at));
    return true;
  }
  const size_t at = queued_.size();
  if (!Add(header, {})) return false;
  newest_.emplace_back(header.type, at);
  return true;
}

void ControlWriter::AddLast(const FrameHeader& header) {
  const auto bytes = Encode(header);
  queued_.insert(queued_.end(), bytes.begin(), bytes.end());
}

std::span<const uint8_t> ControlWriter::Take() {
  if (flying_sent_ == flying_.size()) {
    flying_.clear();
    flying_sent_ = 0;
    newest_.clear();
    if (tls_ == nullptr) {
      flying_.swap(queued_);
    } else {
      // A session that has failed takes nothing. Then the lane is about to break, and numbered
      // frames are sent again on the next one.
      (void)tls_->Write(queued_);
      queued_.clear();
      flying_ = tls_->TakeOutput();
    }
  }
  return std::span<const uint8_t>(flying_).subspan(flying_sent_);
}

}  // namespace longhaul::peerd
