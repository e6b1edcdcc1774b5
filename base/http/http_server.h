// A small HTTP/1.1 server for metrics, health checks and a status page.
//
// It answers GET and HEAD, and closes the connection after each response. One thread of the server
// does everything and also runs the handler, so a handler must not wait without a limit.
//
// Limits: kHttpConnectionsMax connections at a time (more wait in the queue of the kernel),
// kHttpRequestBytesMax bytes for a request, and kHttpSeconds from accept to the end of a
// connection.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace longhaul {

inline constexpr int kHttpConnectionsMax = 64;
inline constexpr int kHttpRequestBytesMax = 8192;
inline constexpr int kHttpSeconds = 10;

struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

class HttpServer {
 public:
  // Runs on the thread of the server. `path` comes without the query.
  using Handler = std::function<HttpResponse(const std::string& path)>;

  // Listens on `address` ("host:port"; port 0: any free port). Unavailable: the port is in use, or
  // this host does not have the address. InvalidArgument: `address` is not an address.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           Handler handler);
  // Closes all connections. No handler runs afterwards.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // The address that the server listens on, as "host:port".
  const std::string& address() const;

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul
