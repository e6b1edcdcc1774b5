// A small HTTP/1.1 server for what operators' tools fetch: metrics, health, a status page.
//
// GET and HEAD only; every response closes its connection. One thread does everything, the handler
// included, so a handler may take a moment but must not wait without a limit. Bounded: at most
// kHttpConnectionsMax connections (others wait in the kernel's queue), kHttpRequestBytesMax bytes
// of request, kHttpSeconds from accept to end, whatever the client does.
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
  // Called on the server's thread with the path, without its query.
  using Handler = std::function<HttpResponse(const std::string& path)>;

  // Listens on `address` ("host:port"; port 0: any free one). Unavailable if the port is taken or
  // the address is not of this host; InvalidArgument if it is not an address.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           Handler handler);
  // Closes all connections; no handler runs afterwards.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // "host:port" as bound.
  const std::string& address() const;

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul
