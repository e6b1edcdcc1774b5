// Fetches recordings of peers through the coordinator, piece by piece, and estimates on the way how
// far a peer's clock is from the coordinator's.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/longhaul/v1/admin.pb.h"
#include "tools/lhctl/recordings.h"

namespace longhaul {

struct FetchOptions {
  uint32_t ops_max = 0;
  uint32_t events_max = 0;
};

// Asks for one piece.
using ReadPiece =
    std::function<absl::StatusOr<v1::ReadRecordingResponse>(const v1::ReadRecordingRequest&)>;

// Fetches the recording of `peer`; "": the coordinator's. Trusts nothing that the peer says. Errors
// are those of `read`, or Internal: the pieces do not fit together, or are no recording.
//
// The offset of the clocks is that of the exchange with the shortest way, as NTP does it. Half of
// that way is the most by which the offset can be wrong.
absl::StatusOr<TracedRecording> FetchRecording(const std::string& peer, const FetchOptions& options,
                                               const ReadPiece& read);

}  // namespace longhaul
