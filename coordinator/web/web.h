// The HTTP port of the coordinator. It answers three paths:
//   /metrics  all metrics, for Prometheus
//   /healthz  200 while the process lives
//   /readyz   200 while the coordinator's loop answers and the coordinator does not stop; else 503
//
// Owns the HTTP server and its thread, on which requests are answered. One thread starts and
// destroys it.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/http/http_server.h"
#include "coordinator/loop/loop.h"
#include "coordinator/metrics/metrics.h"

namespace longhaul::coordinator {

class Web {
 public:
  // `loop` and `metrics` must outlive the Web. Errors are those of HttpServer::Start(); nothing
  // listens after an error.
  static absl::StatusOr<std::unique_ptr<Web>> Start(const std::string& address,
                                                    CoordinatorLoop* loop,
                                                    CoordinatorMetrics* metrics);

  // "host:port", with the port that was bound.
  const std::string& address() const { return server_->address(); }
  // From now on /readyz answers 503. Any thread may call it.
  void SetStopping() { stopping_ = true; }

 private:
  Web(CoordinatorLoop* loop, CoordinatorMetrics* metrics) : loop_(loop), metrics_(metrics) {}

  HttpResponse Handle(const std::string& path);
  HttpResponse Metrics();
  HttpResponse Ready();

  CoordinatorLoop* const loop_;
  CoordinatorMetrics* const metrics_;
  std::atomic<bool> stopping_{false};
  std::unique_ptr<HttpServer> server_;  // last: its thread uses everything above
};

}  // namespace longhaul::coordinator
