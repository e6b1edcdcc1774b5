// One gRPC port of the coordinator. Peers and operators have a port each: who can reach the peers'
// port must not be able to evict members (docs/adr/0022-strangers-at-the-coordinator.md). Both
// ports have the standard health and reflection services. No gRPC type appears here.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/loop/loop.h"
#include "coordinator/metrics/metrics.h"

namespace longhaul::coordinator {

class GrpcServer {
 public:
  // Serve on `address` ("host:port"; port 0: any free one). `loop` and `metrics` outlive the
  // server. InvalidArgument: not an address. Unavailable: it cannot be listened on; says why, and
  // names the flag that chooses the address.
  //
  // The service Coordinator (--listen): control streams of peers.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> StartForPeers(const std::string& address,
                                                                   CoordinatorLoop* loop,
                                                                   CoordinatorMetrics* metrics);
  // The service Admin (--admin): what operators ask and order.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> StartForOperators(const std::string& address,
                                                                       CoordinatorLoop* loop);
  // Stop() with a second of grace, unless it was called.
  ~GrpcServer();
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // "host:port" as bound.
  const std::string& address() const;

  // Takes nothing new, ends all streams with UNAVAILABLE (their peers try the next address, or this
  // one again), and waits until all calls are over; those that are not within `grace` are
  // cancelled.
  void Stop(std::chrono::milliseconds grace);

 private:
  class Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(std::unique_ptr<Impl> impl,
                                                           const std::string& address,
                                                           uint32_t detect_ms);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::coordinator
