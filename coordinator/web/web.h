// The HTTP port of the coordinator. It answers these paths:
//   /               the status page
//   /status.json    what the page shows, as one snapshot (status_feed.h)
//   /status.events  the same as server-sent events: a snapshot, then what changes
//   /metrics        all metrics, for Prometheus
//   /healthz        200 while the process lives
//   /readyz         200 while the coordinator's loop answers and the coordinator does not stop;
//                   else 503
//
// All of it only reads. Owns the HTTP server and its threads, on which requests are answered. One
// thread starts and destroys it.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/http/http_server.h"
#include "coordinator/loop/loop.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/web/status_feed.h"

namespace longhaul::coordinator {

class Web {
 public:
  // `loop` and `metrics` must outlive the Web. Errors are those of HttpServer::Start(); nothing
  // listens after an error.
  static absl::StatusOr<std::unique_ptr<Web>> Start(const std::string& address,
                                                    CoordinatorLoop* loop,
                                                    CoordinatorMetrics* metrics);

  // Ends all streams and closes all connections.
  ~Web();

  // "host:port", with the port that was bound.
  const std::string& address() const { return server_->address(); }
  // From now on /readyz answers 503. Any thread may call it.
  void SetStopping() { stopping_ = true; }

 private:
  Web(CoordinatorLoop* loop, CoordinatorMetrics* metrics);

  HttpResponse Handle(const std::string& path);
  HttpResponse Metrics();
  HttpResponse Ready();
  HttpResponse Status();

  CoordinatorLoop* const loop_;
  CoordinatorMetrics* const metrics_;
  std::atomic<bool> stopping_{false};
  StatusFeed feed_;
  std::unique_ptr<HttpServer> server_;  // last: its threads use everything above
};

}  // namespace longhaul::coordinator
