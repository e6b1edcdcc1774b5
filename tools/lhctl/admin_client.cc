#include "tools/lhctl/admin_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/daemon/secret_file.h"
#include "base/status_macros.h"
#include "proto/control/grpc/credentials.h"
#include "proto/control/grpc/support.h"
#include "proto/longhaul/v1/admin.grpc.pb.h"

namespace longhaul {
namespace {

// The pauses of FollowEvents(): the first one, and the longest.
constexpr std::chrono::milliseconds kPauseMin{100};
constexpr std::chrono::milliseconds kPauseMax{2000};
// An overview of runs with thousands of members is large.
constexpr int kResponseBytesMax = 64 << 20;

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, tls::Files* tls) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(kResponseBytesMax);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 5000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address, control::MakeChannelCredentials(tls), args);
}

// The error for an address at which a gRPC server without the Admin service answers.
absl::Status NoAdminHere(const std::string& address) {
  return absl::FailedPreconditionError(absl::StrCat(
      "the server at ", address,
      " takes no orders from operators: it is a coordinator's port for peers (--listen), or no "
      "coordinator at all. Give the coordinator's --admin address with --coordinator=HOST:PORT; "
      "the default of --admin is 127.0.0.1:29602, on the coordinator's host"));
}

absl::Status FromGrpc(const grpc::Status& status) {
  // gRPC and Abseil number their codes alike, as google.rpc.Code does.
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

}  // namespace

class AdminClient::Impl {
 public:
  Impl(std::vector<std::string> addresses, std::chrono::milliseconds deadline,
       std::shared_ptr<tls::Files> tls, std::string token_file)
      : addresses_(std::move(addresses)),
        deadline_(deadline),
        tls_(std::move(tls)),
        token_file_(std::move(token_file)) {}

  // Runs `call` at each address until one answers.
  absl::Status Try(
      const std::function<grpc::Status(v1::Admin::Stub*, grpc::ClientContext*)>& call) {
    std::string token;
    if (!token_file_.empty()) {
      LH_ASSIGN_OR_RETURN(token, ReadSecretFile("--token-file", token_file_));
    }
    std::string tried;
    for (const std::string& address : addresses_) {
      const auto stub = v1::Admin::NewStub(MakeChannel(address, tls_.get()));
      grpc::ClientContext context;
      if (!token.empty()) {
        context.AddMetadata(control::kAuthorization, absl::StrCat(control::kBearer, token));
      }
      const grpc::Status status = call(stub.get(), &context);
      const bool absent = status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                          status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
      if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) return NoAdminHere(address);
      if (!absent) return FromGrpc(status);
      absl::StrAppend(&tried, tried.empty() ? "" : "; ", address, ": ", status.error_message(),
                      control::TlsAdvice(status, tls_ != nullptr));
    }
    return absl::UnavailableError(
        absl::StrCat("no coordinator answers (", tried,
                     "); run lhctl on the coordinator's host, or give the coordinator's --admin "
                     "address with --coordinator=HOST:PORT"));
  }

  template <class Request, class Response>
  absl::StatusOr<Response> Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                        const Request&, Response*),
                                const Request& request) {
    return Call(method, request, deadline_);
  }
  template <class Request, class Response>
  absl::StatusOr<Response> Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                        const Request&, Response*),
                                const Request& request, std::chrono::milliseconds deadline) {
    Response response;
    const absl::Status status = Try([&](v1::Admin::Stub* stub, grpc::ClientContext* context) {
      context->set_deadline(std::chrono::system_clock::now() + deadline);
      return (stub->*method)(context, request, &response);
    });
    if (!status.ok()) return status;
    return response;
  }

  // Watches events. Calls begun(rest) as soon as a coordinator answers; `rest` is the request that
  // would continue this stream.
  absl::Status Watch(const v1::WatchEventsRequest& request,
                     const std::function<void(const v1::WatchEventsRequest& rest)>& begun,
                     const std::function<void(const v1::Event&)>& each) {
    // Once a coordinator has answered, no other address is tried: another one would repeat events.
    absl::Status ended;
    const absl::Status tried = Try([&](v1::Admin::Stub* stub, grpc::ClientContext* context) {
      const auto reader = stub->WatchEvents(context, request);
      // The metadata comes at once. The first event may come much later.
      reader->WaitForInitialMetadata();
      v1::WatchEventsRequest rest = request;
      const bool answered = Begun(*context, &rest);
      if (answered) begun(rest);
      v1::Event event;
      while (reader->Read(&event)) each(event);
      grpc::Status status = reader->Finish();
      if (!answered || status.ok()) return status;
      ended = FromGrpc(status);
      return grpc::Status::OK;
    });
    return tried.ok() ? ended : tried;
  }

 private:
  // Says whether a coordinator accepted the request. If so, `*rest` becomes the request that would
  // continue its stream.
  static bool Begun(const grpc::ClientContext& context, v1::WatchEventsRequest* rest) {
    const auto& metadata = context.GetServerInitialMetadata();
    const auto incarnation = metadata.find(control::kWatchedIncarnation);
    const auto after = metadata.find(control::kWatchedAfter);
    uint64_t sequence = 0;
    if (incarnation == metadata.end() || after == metadata.end() ||
        !absl::SimpleAtoi(absl::string_view(after->second.data(), after->second.size()),
                          &sequence)) {
      return false;
    }
    rest->set_no_backlog(false);
    rest->set_backlog(0);
    rest->set_after_sequence(sequence);
    rest->set_incarnation(std::string(incarnation->second.data(), incarnation->second.size()));
    return true;
  }

  const std::vector<std::string> addresses_;
  const std::chrono::milliseconds deadline_;
  const std::shared_ptr<tls::Files> tls_;
  const std::string token_file_;
};

AdminClient::AdminClient(std::vector<std::string> addresses, std::chrono::milliseconds deadline,
                         std::shared_ptr<tls::Files> tls, std::string token_file)
    : impl_(std::make_unique<Impl>(std::move(addresses), deadline, std::move(tls),
                                   std::move(token_file))) {
  control::InitGrpc();
}
AdminClient::~AdminClient() = default;

absl::StatusOr<v1::ListRunsResponse> AdminClient::ListRuns() {
  return impl_->Call(&v1::Admin::Stub::ListRuns, v1::ListRunsRequest());
}

absl::StatusOr<v1::GetOverviewResponse> AdminClient::GetOverview(const v1::Selector& selector) {
  v1::GetOverviewRequest request;
  *request.mutable_selector() = selector;
  return impl_->Call(&v1::Admin::Stub::GetOverview, request);
}

absl::StatusOr<v1::GetRingResponse> AdminClient::GetRing(const v1::Selector& selector) {
  v1::GetRingRequest request;
  *request.mutable_selector() = selector;
  return impl_->Call(&v1::Admin::Stub::GetRing, request);
}

absl::StatusOr<v1::GetLinksResponse> AdminClient::GetLinks(const v1::Selector& selector) {
  v1::GetLinksRequest request;
  *request.mutable_selector() = selector;
  return impl_->Call(&v1::Admin::Stub::GetLinks, request);
}

absl::StatusOr<v1::ExplainResponse> AdminClient::Explain(const v1::Selector& selector) {
  v1::ExplainRequest request;
  *request.mutable_selector() = selector;
  return impl_->Call(&v1::Admin::Stub::Explain, request);
}

absl::StatusOr<v1::ReadRecordingResponse> AdminClient::ReadRecording(
    const v1::ReadRecordingRequest& request, std::chrono::milliseconds patience) {
  return impl_->Call(&v1::Admin::Stub::ReadRecording, request, patience);
}

absl::Status AdminClient::Drain(const v1::DrainRequest& request) {
  return impl_->Call(&v1::Admin::Stub::Drain, request).status();
}

absl::Status AdminClient::Evict(const v1::EvictRequest& request) {
  return impl_->Call(&v1::Admin::Stub::Evict, request).status();
}

absl::StatusOr<v1::CreateTokenResponse> AdminClient::CreateToken(
    const v1::CreateTokenRequest& request) {
  return impl_->Call(&v1::Admin::Stub::CreateToken, request);
}

absl::StatusOr<v1::ListTokensResponse> AdminClient::ListTokens() {
  return impl_->Call(&v1::Admin::Stub::ListTokens, v1::ListTokensRequest());
}

absl::Status AdminClient::RevokeToken(const v1::RevokeTokenRequest& request) {
  return impl_->Call(&v1::Admin::Stub::RevokeToken, request).status();
}

absl::Status AdminClient::WatchEvents(const v1::WatchEventsRequest& request,
                                      const std::function<void(const v1::Event&)>& each) {
  return impl_->Watch(
      request, [](const v1::WatchEventsRequest&) {}, each);
}

absl::Status AdminClient::FollowEvents(v1::WatchEventsRequest request,
                                       const std::function<void(const v1::Event&)>& each,
                                       const std::function<void(const std::string&)>& lost) {
  bool reached = false;
  std::chrono::milliseconds pause = kPauseMin;
  while (true) {
    const auto begun = [&](const v1::WatchEventsRequest& rest) {
      reached = true;
      pause = kPauseMin;
      request = rest;
    };
    absl::Status ended = impl_->Watch(request, begun, [&](const v1::Event& event) {
      request.set_after_sequence(event.sequence());
      each(event);
    });
    const bool away = absl::IsUnavailable(ended) || absl::IsDeadlineExceeded(ended);
    if (!away || !reached) return ended;
    lost(std::string(ended.message()));
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kPauseMax);
  }
}

}  // namespace longhaul
