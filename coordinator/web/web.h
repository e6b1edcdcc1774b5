// The coordinator over HTTP: /metrics (Prometheus), /healthz (the process lives), /readyz (its loop
// answers, and it is not stopping).
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
  // `loop` and `metrics` outlive it. Errors as HttpServer::Start().
  static absl::StatusOr<std::unique_ptr<Web>> Start(const std::string& address,
                                                    CoordinatorLoop* loop,
                                                    CoordinatorMetrics* metrics);

  // "host:port" as bound.
  const std::string& address() const { return server_->address(); }
  // /readyz says 503 from now on. Any thread.
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
