// A whole coordinator: store, loop, gRPC and HTTP, started from the values of the flags. main()
// uses it, and so do tests that need a coordinator in their own process.
//
// A Server owns all these parts. One thread starts it, stops it and destroys it. After a failed
// Start() nothing listens and no thread runs; a new store file may have been made.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/daemon/dumps.h"
#include "base/recorder.h"
#include "coordinator/grpc/authorization.h"
#include "coordinator/grpc/grpc_server.h"
#include "coordinator/grpc/recording_desk.h"
#include "coordinator/loop/loop.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/sweeper.h"
#include "coordinator/tokens/token_desk.h"
#include "coordinator/web/web.h"

namespace longhaul::coordinator {

inline constexpr uint32_t kDetectMsMin = 50;
inline constexpr uint32_t kDetectMsMax = 60000;
inline constexpr uint32_t kRingIntervalMsMax = 86400000;  // a day
inline constexpr uint32_t kTlsConnectionAgeMinS = 1;
inline constexpr uint32_t kTlsConnectionAgeMaxS = 3600;

struct ServerOptions {
  // For peers. Empty: port 29600 of all addresses with TLS or `insecure`, else of loopback.
  std::string listen = "127.0.0.1:0";
  // For operators, and for metrics. Empty: no such port. auto: port 29602 or 29601 of loopback, and
  // no such port, with a warning, if this process cannot listen there.
  std::string admin;
  std::string http;
  // Empty: what DefaultStore() returns. It may make directories, so Start() asks for it only after
  // all other options are found good.
  std::string store = "memory";
  // Certificate and key, CAs of clients, and what these have revoked. Without a certificate all
  // ports speak in clear. With one, --listen speaks TLS, and so does --admin unless it is on
  // loopback.
  tls::Paths tls;
  uint32_t tls_connection_age_s = 45;
  bool insecure = false;  // ports in clear may be reached from other hosts
  // What callers of --listen and of --admin have to show: auto, none, token, certificate, any,
  // both. auto: nothing at a port on loopback, and at --listen with `insecure`; else any.
  std::string auth = "auto";
  std::string admin_auth = "auto";
  CoreConfig core;               // Start() sets incarnation, store and entropy
  Recorder* recorder = nullptr;  // the flight recorder, if any; outlives the server
  Dumps* dumps = nullptr;        // its files after faults, if any; outlives the server
  // Called once, on the loop's thread, after the store failed. Default: writes a log line and ends
  // the process with exit code 1.
  std::function<void(const absl::Status&)> fatal;
};

class Server {
 public:
  // InvalidArgument: an option is wrong. Any other error comes from the store or a port; its text
  // says which, and why.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options);
  // Calls Stop().
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  const std::string& grpc_address() const { return grpc_->address(); }
  // These two are empty if the coordinator has no such port.
  std::string admin_address() const { return admin_ ? admin_->address() : ""; }
  std::string http_address() const { return web_ ? web_->address() : ""; }
  const std::string& incarnation() const { return loop_->core_config().incarnation; }
  CoordinatorLoop* loop() { return loop_.get(); }
  CoordinatorMetrics* metrics() { return &metrics_; }

  // Accepts no new stream, ends all streams of peers, and waits for them to finish. Streams that
  // have not finished after `grace` are cancelled. /readyz answers 503 from now on.
  void Stop(std::chrono::milliseconds grace = std::chrono::milliseconds(2000));

 private:
  Server() = default;
  void EndLapsedStreams();

  CoordinatorMetrics metrics_;
  std::shared_ptr<tls::Files> tls_;              // null: in clear
  std::shared_ptr<tls::SeenCertificates> seen_;  // null: in clear
  std::unique_ptr<RecordingDesk> desk_;
  std::unique_ptr<TokenDesk> tokens_;  // the loop's thread calls it back
  std::unique_ptr<Authorizer> peers_;
  std::unique_ptr<Authorizer> operators_;
  // Ends streams whose callers' tokens were revoked or have expired.
  Sweeper sweeper_;
  std::unique_ptr<CoordinatorLoop> loop_;
  std::unique_ptr<GrpcServer> grpc_;
  std::unique_ptr<GrpcServer> admin_;
  std::unique_ptr<Web> web_;
};

}  // namespace longhaul::coordinator
