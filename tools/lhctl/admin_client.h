// Calls of the coordinator's Admin service, blocking, from one thread. No gRPC type appears here.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/longhaul/v1/admin.pb.h"

namespace longhaul {

class AdminClient {
 public:
  // `addresses` (the coordinators' --admin) are tried in turn until one answers.
  explicit AdminClient(std::vector<std::string> addresses);
  ~AdminClient();

  // Errors are the coordinator's, or Unavailable: none of the addresses answers; names them. Or
  // FailedPrecondition: what answers has no Admin service.
  absl::StatusOr<v1::ListRunsResponse> ListRuns();
  absl::StatusOr<v1::GetOverviewResponse> GetOverview(const v1::Selector& selector);
  absl::StatusOr<v1::GetRingResponse> GetRing(const v1::Selector& selector);
  absl::StatusOr<v1::ExplainResponse> Explain(const v1::Selector& selector);
  absl::Status Drain(const v1::DrainRequest& request);
  absl::Status Evict(const v1::EvictRequest& request);
  // Calls `each` for every event until the stream ends.
  absl::Status WatchEvents(const v1::WatchEventsRequest& request,
                           const std::function<void(const v1::Event&)>& each);
  // The same for a request that follows, which goes on after the coordinator was away: with the
  // events after the last one seen, or all of a coordinator that was started anew. `lost` is told
  // why the stream ended, before each pause. Returns only if no coordinator answers at first, or
  // one refuses.
  absl::Status FollowEvents(v1::WatchEventsRequest request,
                            const std::function<void(const v1::Event&)>& each,
                            const std::function<void(const std::string&)>& lost);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul
