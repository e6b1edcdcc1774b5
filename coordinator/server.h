// The whole coordinator behind its flags: store, loop, gRPC, HTTP. For main() and for tests that
// want a coordinator in their process.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/grpc/grpc_server.h"
#include "coordinator/loop/loop.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/web/web.h"

namespace longhaul::coordinator {

inline constexpr uint32_t kDetectMsMin = 50;
inline constexpr uint32_t kDetectMsMax = 60000;
inline constexpr uint32_t kRingIntervalMsMax = 86400000;  // a day
inline constexpr uint64_t kJournalBytesMin = 1 << 20;

struct ServerOptions {
  std::string listen = "127.0.0.1:0";  // for peers
  std::string admin;                   // for operators; empty: none
  std::string http;                    // empty: none
  std::string store = "memory";
  CoreConfig core;         // Start() names the start and draws the entropy
  JournalOptions journal;  // without a path: none
  // Called once on the loop's thread when the store failed. Default: logs, and ends the process
  // with exit code 1.
  std::function<void(const absl::Status&)> fatal;
};

class Server {
 public:
  // InvalidArgument: an option is wrong. Anything else: the world refuses; says what.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options);
  // As Stop().
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  const std::string& grpc_address() const { return grpc_->address(); }
  // Empty if there is none, both.
  std::string admin_address() const { return admin_ ? admin_->address() : ""; }
  std::string http_address() const { return web_ ? web_->address() : ""; }
  const std::string& incarnation() const { return loop_->core_config().incarnation; }
  CoordinatorLoop* loop() { return loop_.get(); }
  CoordinatorMetrics* metrics() { return &metrics_; }

  // Takes nothing new, ends the streams of the peers, waits until they are over (at most `grace`).
  void Stop(std::chrono::milliseconds grace = std::chrono::milliseconds(2000));

 private:
  Server() = default;

  CoordinatorMetrics metrics_;
  std::unique_ptr<CoordinatorLoop> loop_;
  std::unique_ptr<GrpcServer> grpc_;
  std::unique_ptr<GrpcServer> admin_;
  std::unique_ptr<Web> web_;
};

}  // namespace longhaul::coordinator
