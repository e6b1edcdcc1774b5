#include "coordinator/web/web.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace longhaul::coordinator {
namespace {

constexpr std::chrono::milliseconds kLoopPatience{1000};
constexpr char kText[] = "text/plain; charset=utf-8";
constexpr char kPrometheus[] = "text/plain; version=0.0.4; charset=utf-8";

}  // namespace

absl::StatusOr<std::unique_ptr<Web>> Web::Start(const std::string& address, CoordinatorLoop* loop,
                                                CoordinatorMetrics* metrics) {
  std::unique_ptr<Web> web(new Web(loop, metrics));
  LH_ASSIGN_OR_RETURN(web->server_,
                      HttpServer::Start(address, [w = web.get()](const std::string& path) {
                        return w->Handle(path);
                      }));
  return web;
}

HttpResponse Web::Handle(const std::string& path) {
  if (path == "/metrics") return Metrics();
  if (path == "/healthz") return {200, kText, "ok\n"};
  if (path == "/readyz") return Ready();
  if (path == "/") return {200, kText, "longhaul-coordinator: /metrics /healthz /readyz\n"};
  return {404, kText, "not found; there are /metrics /healthz /readyz\n"};
}

HttpResponse Web::Metrics() {
  metrics_->SetQueue(loop_->queued());
  // If the loop does not answer in time, the gauges keep their last values.
  const absl::StatusOr<Overview> overview = loop_->QueryAndWait(kLoopPatience);
  if (overview.ok()) metrics_->SetOverview(*overview);
  return {200, kPrometheus, metrics_->Text()};
}

HttpResponse Web::Ready() {
  if (stopping_) return {503, kText, "stopping\n"};
  const absl::Status alive = loop_->Ping(kLoopPatience);
  if (alive.ok()) return {200, kText, "ready\n"};
  return {503, kText, absl::StrCat(std::string(alive.message()), "\n")};
}

}  // namespace longhaul::coordinator
