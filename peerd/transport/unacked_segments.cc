#include "peerd/transport/unacked_segments.h"

#include "absl/strings/str_cat.h"

namespace longhaul::peerd {

absl::StatusOr<size_t> UnackedSegments::Acknowledge(uint64_t received) {
  if (received > sent()) {
    return absl::InvalidArgumentError(
        absl::StrCat("acknowledges ", received, " segments where ", sent(), " were sent"));
  }
  if (received <= acked_) return 0;
  const size_t news = received - acked_;
  segments_.erase(segments_.begin(), segments_.begin() + static_cast<ptrdiff_t>(news));
  acked_ = received;
  return news;
}

}  // namespace longhaul::peerd
