// One gRPC port of the coordinator. Peers and operators have a port each, so that a machine that
// can reach the peers' port cannot evict members
// (docs/adr/0022-strangers-at-the-coordinator.md). Both ports also offer gRPC's standard health and
// reflection services.
//
// One thread starts, stops and destroys the server. gRPC's own threads serve the calls and pass
// them to the loop. No gRPC type appears in this header.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/tls/seen_certificates.h"
#include "base/tls/tls_files.h"
#include "coordinator/grpc/authorization.h"
#include "coordinator/grpc/recording_desk.h"
#include "coordinator/loop/loop.h"
#include "coordinator/metrics/metrics.h"

namespace longhaul::coordinator {

// How a port is secured. Without files it speaks in clear.
struct GrpcTls {
  std::shared_ptr<tls::Files> files;
  // A control stream ends after this time, and begins anew on another connection, where the
  // certificates are checked anew. A connection that stands nevertheless is closed soon after.
  uint32_t connection_age_s = 45;
  // Is told of the certificates of callers. May be null.
  std::shared_ptr<tls::SeenCertificates> seen;
};

class GrpcServer {
 public:
  // StartForPeers() and StartForOperators() serve on `address` ("host:port"; port 0: any free
  // port). All that the pointers point to must outlive the server. `authorizer` decides who may
  // call. InvalidArgument: `address` is not an address. Unavailable: the server cannot listen
  // there; the text says why and names the flag that chooses the address. After an error nothing
  // listens.
  //
  // StartForPeers() offers the service Coordinator (--listen): the control streams of peers.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> StartForPeers(
      const std::string& address, CoordinatorLoop* loop, CoordinatorMetrics* metrics,
      RecordingDesk* desk, Authorizer* authorizer, GrpcTls tls = {});
  // StartForOperators() offers the service Admin (--admin): questions and orders of operators.
  // `metrics` counts bad certificates, and may be null without TLS.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> StartForOperators(
      const std::string& address, CoordinatorLoop* loop, RecordingDesk* desk, TokenDesk* tokens,
      Authorizer* authorizer, GrpcTls tls = {}, CoordinatorMetrics* metrics = nullptr);
  // Calls Stop() with a grace of one second, unless the server was stopped.
  ~GrpcServer();
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // "host:port", with the port that was bound.
  const std::string& address() const;

  // Ends each stream for whose caller `why` gives a reason, and each that has reached its age. To
  // be called each second. Any thread may call it before Stop().
  void EndStreamsOf(const std::function<std::optional<Denial>(const Caller&)>& why);

  // Refuses new calls, ends all streams with UNAVAILABLE, and waits until all calls are over. Calls
  // that are not over after `grace` are cancelled. On UNAVAILABLE a peer tries its next address, or
  // the same address again.
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
