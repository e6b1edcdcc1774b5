// An HTTP/1.1 server for metrics, health checks and a status page.
//
// It answers GET and HEAD, and closes the connection after each response. A response is a whole
// text, or a stream that goes on until one side ends it. Each connection has a thread for
// itself, which runs the handler: handlers run at the same time.
//
// cpp-httplib reads requests and writes responses. The server owns what the library of Debian 12
// does not bound: sockets, threads, the size of a request, and all times.
//
// Limits:
//   kHttpConnectionsMax   connections at a time. One more ends the oldest one that has not sent its
//                         whole request, or has got its whole answer; if there is none, it waits in
//                         the queue of the kernel. So silent strangers keep nobody out
//   kHttpStreamsMax       of these, streams; one more is answered 503
//   kHttpRequestBytesMax  bytes for a request; more are answered 431
//   kHttpSeconds          from accept to the end of a connection that is no stream; for a stream:
//                         how long the client may leave one piece unread
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace longhaul {

inline constexpr int kHttpConnectionsMax = 64;
inline constexpr int kHttpStreamsMax = 16;
inline constexpr int kHttpRequestBytesMax = 8192;
inline constexpr int kHttpSeconds = 10;

// Gives the next piece of a stream; false: the stream is over. The function waits for news, at most
// kHttpStreamWait, and leaves `piece` empty if there are none. One thread calls it, and destroys it
// once the stream is over or the client is gone.
using HttpStream = std::function<bool(std::string* piece)>;
inline constexpr std::chrono::milliseconds kHttpStreamWait{200};

struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers = {};  // more headers
  HttpStream stream = nullptr;  // if set, it is sent in place of `body`
};

class HttpServer {
 public:
  // Runs on the thread of a connection, and on several at a time. `path` comes without the query,
  // begins with '/', and is decoded.
  using Handler = std::function<HttpResponse(const std::string& path)>;

  // Listens on `address` ("host:port"; port 0: any free port). Unavailable: the port is in use, or
  // this host does not have the address. InvalidArgument: `address` is not an address.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           Handler handler);
  // Closes all connections, and waits for handlers and streams that run: a stream for at most
  // kHttpStreamWait. No handler or stream runs afterwards.
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
