// Calls the coordinator's Admin service, for lhctl. Calls block. One thread uses a client. A failed
// call changes nothing in the client; the next call begins anew. No gRPC type appears here.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/tls/tls_files.h"
#include "proto/longhaul/v1/admin.pb.h"

namespace longhaul {

class AdminClient {
 public:
  // `addresses` are --admin addresses of coordinators. Each call tries them in turn until one
  // answers. Calls other than for events take at most `deadline` for each address.
  // `tls`: the files of TLS, read anew for each call; null: in clear. `token_file`: the file of the
  // join token to show, read anew for each call; empty: none.
  explicit AdminClient(std::vector<std::string> addresses,
                       std::chrono::milliseconds deadline = std::chrono::seconds(10),
                       std::shared_ptr<tls::Files> tls = nullptr, std::string token_file = "");
  ~AdminClient();

  // All calls have these errors. Unavailable: no address answers; the text names the addresses.
  // FailedPrecondition: the server that answers has no Admin service. The errors of the token's
  // file are those of ReadSecretFile(). Any other error comes from the coordinator;
  // Unauthenticated: it asks for a token or a certificate; PermissionDenied: for another one.
  absl::StatusOr<v1::ListRunsResponse> ListRuns();
  absl::StatusOr<v1::GetOverviewResponse> GetOverview(const v1::Selector& selector);
  absl::StatusOr<v1::GetRingResponse> GetRing(const v1::Selector& selector);
  absl::StatusOr<v1::GetLinksResponse> GetLinks(const v1::Selector& selector);
  absl::StatusOr<v1::ExplainResponse> Explain(const v1::Selector& selector);
  // Gives up after `patience`: a peer that hangs does not answer.
  absl::StatusOr<v1::ReadRecordingResponse> ReadRecording(const v1::ReadRecordingRequest& request,
                                                          std::chrono::milliseconds patience);
  absl::Status Drain(const v1::DrainRequest& request);
  absl::Status Evict(const v1::EvictRequest& request);
  absl::StatusOr<v1::CreateTokenResponse> CreateToken(const v1::CreateTokenRequest& request);
  absl::StatusOr<v1::ListTokensResponse> ListTokens();
  absl::Status RevokeToken(const v1::RevokeTokenRequest& request);
  // Calls `each` for every event, until the stream ends.
  absl::Status WatchEvents(const v1::WatchEventsRequest& request,
                           const std::function<void(const v1::Event&)>& each);
  // As WatchEvents(), for a request with `follow`. When the stream breaks, calls lost(why), pauses,
  // and tries again. Then the same coordinator sends the events after the last one that came; a
  // coordinator that was started anew sends all its events. Returns only if no coordinator answers
  // at first, or if a coordinator refuses the request.
  absl::Status FollowEvents(v1::WatchEventsRequest request,
                            const std::function<void(const v1::Event&)>& each,
                            const std::function<void(const std::string&)>& lost);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul
