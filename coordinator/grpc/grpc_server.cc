#include "coordinator/grpc/grpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>

#include <chrono>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/daemon/host_port.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/tick.h"
#include "base/unique_fd.h"
#include "coordinator/grpc/front.h"
#include "coordinator/grpc/rare_log.h"
#include "coordinator/grpc/services.h"
#include "proto/control/grpc/support.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

// A connection without calls is closed after this time. Peers always have a call.
constexpr int kIdleMs = 10000;
constexpr int kStreamsPerConnectionMax = 256;
constexpr size_t kMemoryBytesMax = size_t{1} << 30;
// Calls that are in flight when a connection has reached its age may go on so long, and for a fifth
// of the age. gRPC varies the age by a tenth both ways. The coordinator itself ends a control
// stream at the age of the stream, which is soon after that of its connection. It must be first:
// only then it knows that the end is no sign of death.
constexpr int kAgeGraceMs = 3000;

// Counts refused certificates, and logs each reason at most once a second.
class RefusalLog {
 public:
  RefusalLog(CoordinatorMetrics* metrics, const char* flag) : metrics_(metrics), flag_(flag) {}

  void Refused(const tls::CertificateCheck& verdict) {
    const char* const reason = tls::RefusalName(verdict.refusal);
    metrics_->OnCertificateRefused(reason);
    const std::optional<uint64_t> left_out = refusals_.Take(verdict.refusal);
    if (!left_out) return;
    Log(LogLevel::kWarning,
        "certificate refused" + LogField("port", flag_) + LogField("reason", reason) +
            LogField("name", verdict.identity.name) +
            LogField("fingerprint", verdict.identity.fingerprint) + LogField("told", verdict.why) +
            " not_logged=" + std::to_string(*left_out));
  }

 private:
  CoordinatorMetrics* const metrics_;
  const char* const flag_;
  RareLog<tls::CertificateRefusal> refusals_{Seconds(1), tls::kRefusals};
};

void Configure(grpc::ServerBuilder* builder, uint32_t detect_ms) {
  builder->SetMaxReceiveMessageSize(LH_CONTROL_MESSAGE_BYTES_MAX);
  builder->SetMaxSendMessageSize(LH_CONTROL_MESSAGE_BYTES_MAX);
  // Compressed messages are refused: one could unpack to more than any limit.
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnectionMax);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleMs);
  const control::Keepalive keepalive = control::KeepaliveFor(detect_ms);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive.time_ms);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive.timeout_ms);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Peers may ping as often as they like.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  grpc::ResourceQuota quota("longhaul-coordinator");
  quota.Resize(kMemoryBytesMax);
  builder->SetResourceQuota(quota);
}

// Works once per process and must run before the first server is built.
void EnablePlugins() {
  static const bool enabled = [] {
    control::InitGrpc();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)enabled;
}

}  // namespace

class GrpcServer::Impl {
 public:
  // `name` is the service's name on the wire. `flag` is the flag that chooses the address. The
  // services themselves decide what a role may do (authorization.h).
  Impl(std::unique_ptr<DrainableService> service, const char* name, const char* flag, GrpcTls tls,
       CoordinatorMetrics* metrics)
      : service_(std::move(service)),
        name_(name),
        flag_(flag),
        tls_(std::move(tls)),
        metrics_(metrics) {}

  ~Impl() {
    if (server_) Stop(std::chrono::seconds(1));
  }

  absl::Status Start(HostPort listen, uint32_t detect_ms) {
    EnablePlugins();
    grpc::ServerBuilder builder;
    Configure(&builder, detect_ms);
    if (tls_.files != nullptr) {
      const int age_ms = static_cast<int>(tls_.connection_age_s) * 1000;
      builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, age_ms);
      builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, kAgeGraceMs + age_ms / 5);
    }
    // gRPC speaks with the front only (front.h).
    acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::InsecureServerCredentials());
    builder.RegisterService(service_->service());
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return absl::InternalError("gRPC does not start, and does not say why");
    Front::Options front;
    front.listen = listen;
    front.flag = flag_;
    front.files = tls_.files;
    front.seen = tls_.seen;
    if (tls_.files != nullptr) {
      front.refused = [log = std::make_shared<RefusalLog>(metrics_, flag_)](
                          const tls::CertificateCheck& verdict) { log->Refused(verdict); };
    }
    front.came = [this](const std::string& host) { service_->Came(host); };
    front.pass = [this](UniqueFd fd) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.fd = fd.Release();
      acceptor_->HandleNewConnection(&connection);
    };
    front.unacknowledged_ms = static_cast<uint32_t>(control::KeepaliveFor(detect_ms).timeout_ms);
    absl::StatusOr<std::unique_ptr<Front>> started = Front::Start(std::move(front));
    if (!started.ok()) {
      server_->Shutdown();
      server_ = nullptr;
      LH_RETURN_IF_ERROR(TryListening(listen, "gRPC", flag_));
      return absl::UnavailableError(absl::StrCat("cannot listen for gRPC on ", ToString(listen),
                                                 ": ", started.status().message()));
    }
    front_ = *std::move(started);
    listen.port = front_->port();
    address_ = ToString(listen);
    SetServing(true);
    return absl::OkStatus();
  }

  void Stop(std::chrono::milliseconds grace) {
    SetServing(false);
    front_->StopAccepting();
    service_->EndStreams();
    server_->Shutdown(std::chrono::system_clock::now() + grace);
    server_->Wait();
    front_ = nullptr;
    server_ = nullptr;
  }

  DrainableService* service() { return service_.get(); }
  bool serving() const { return server_ != nullptr; }
  const std::string& address() const { return address_; }

 private:
  void SetServing(bool serving) {
    grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
    if (health == nullptr) return;
    health->SetServingStatus(serving);
    health->SetServingStatus(name_, serving);
  }

  const std::unique_ptr<DrainableService> service_;
  const char* const name_;
  const char* const flag_;
  const GrpcTls tls_;
  CoordinatorMetrics* const metrics_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Front> front_;  // uses the three above
  std::string address_;
};

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GrpcServer::~GrpcServer() = default;
const std::string& GrpcServer::address() const { return impl_->address(); }

void GrpcServer::EndStreamsOf(const std::function<std::optional<Denial>(const Caller&)>& why) {
  impl_->service()->EndStreamsOf(why);
}

void GrpcServer::Stop(std::chrono::milliseconds grace) {
  if (impl_->serving()) impl_->Stop(grace);
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(std::unique_ptr<Impl> impl,
                                                              const std::string& address,
                                                              uint32_t detect_ms) {
  LH_ASSIGN_OR_RETURN(HostPort parsed, ParseHostPort(address));
  LH_RETURN_IF_ERROR(impl->Start(std::move(parsed), detect_ms));
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::StartForPeers(
    const std::string& address, CoordinatorLoop* loop, CoordinatorMetrics* metrics,
    RecordingDesk* desk, Authorizer* authorizer, GrpcTls tls) {
  std::optional<std::chrono::milliseconds> age;
  if (tls.files != nullptr) age = std::chrono::seconds(tls.connection_age_s);
  return Start(
      std::make_unique<Impl>(MakeAttachService(loop, metrics, desk, authorizer, age),
                             "longhaul.v1.Coordinator", "--listen", std::move(tls), metrics),
      address, loop->core_config().detect_ms);
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::StartForOperators(
    const std::string& address, CoordinatorLoop* loop, RecordingDesk* desk, TokenDesk* tokens,
    Authorizer* authorizer, GrpcTls tls, CoordinatorMetrics* metrics) {
  return Start(std::make_unique<Impl>(MakeAdminService(loop, desk, tokens, authorizer),
                                      "longhaul.v1.Admin", "--admin", std::move(tls), metrics),
               address, loop->core_config().detect_ms);
}

}  // namespace longhaul::coordinator
