#include "coordinator/web/web.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/daemon/version.h"
#include "base/status_macros.h"
#include "coordinator/web/page.h"

namespace longhaul::coordinator {
namespace {

constexpr std::chrono::milliseconds kLoopPatience{1000};
constexpr char kText[] = "text/plain; charset=utf-8";
constexpr char kPrometheus[] = "text/plain; version=0.0.4; charset=utf-8";

constexpr char kPaths[] = "/ (status page) /status.json /status.events /metrics /healthz /readyz\n";

// What the page shows is new with each request, and for nobody's eyes but the reader's.
HttpResponse Fresh(std::string content_type, std::string body) {
  return {200,
          std::move(content_type),
          std::move(body),
          {{"Cache-Control", "no-store"}, {"Cross-Origin-Resource-Policy", "same-origin"}}};
}

HttpResponse Page() {
  HttpResponse response = Fresh("text/html; charset=utf-8", kPageHtml);
  response.headers.emplace_back("Content-Security-Policy", kPagePolicy);
  response.headers.emplace_back("Referrer-Policy", "no-referrer");
  response.headers.emplace_back("X-Frame-Options", "DENY");
  return response;
}

StatusFeed::Options FeedOptions(CoordinatorLoop* loop) {
  StatusFeed::Options options;
  options.overview = [loop] { return loop->QueryAndWait(kLoopPatience); };
  options.streams = [loop] { return loop->sessions(); };
  options.events = &loop->events();
  options.incarnation = loop->core_config().incarnation;
  options.version = kVersion;
  options.store = loop->store_name();
  options.detect_ms = loop->core_config().detect_ms;
  return options;
}

}  // namespace

Web::Web(CoordinatorLoop* loop, CoordinatorMetrics* metrics)
    : loop_(loop), metrics_(metrics), feed_(FeedOptions(loop)) {}

Web::~Web() { feed_.Stop(); }

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
  if (path == "/") return Page();
  if (path == "/status.json") return Status();
  if (path == "/status.events") {
    HttpResponse response = Fresh("text/event-stream", "");
    response.stream = feed_.Stream();
    return response;
  }
  return {404, kText, absl::StrCat("not found; there are ", kPaths)};
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

HttpResponse Web::Status() {
  const auto snapshot = feed_.Snapshot();
  if (snapshot.ok()) return Fresh("application/json", **snapshot);
  return {503, kText, absl::StrCat(std::string(snapshot.status().message()), "\n")};
}

}  // namespace longhaul::coordinator
