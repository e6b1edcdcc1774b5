// The coordinator's gRPC side: control streams of peers (Attach), the operator's Admin service, the
// standard health and reflection services. No gRPC type appears here.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/loop/loop.h"
#include "coordinator/metrics/metrics.h"

namespace longhaul::coordinator {

class GrpcServer {
 public:
  // Serves on `listen` ("host:port"; port 0: any free one). `loop` and `metrics` outlive the
  // server. InvalidArgument: not an address. Unavailable: it cannot be listened on; says why.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const std::string& listen,
                                                           CoordinatorLoop* loop,
                                                           CoordinatorMetrics* metrics);
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
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::coordinator
