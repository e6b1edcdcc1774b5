#include "base/http/http_server.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/cpu_time.h"
#include "base/daemon/host_port.h"
#include "base/status_macros.h"

namespace longhaul {
namespace {

using Clock = std::chrono::steady_clock;

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

const char* Reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    case 503:
      return "Service Unavailable";
    default:
      return "Status";
  }
}

struct Request {
  bool head = false;
  std::string path;
};

// Parses the first line of a request whose header is complete. The message of an error is the HTTP
// status of the answer.
absl::StatusOr<Request> ParseRequest(const std::string& header) {
  const std::string line = header.substr(0, header.find_first_of("\r\n"));
  const size_t first = line.find(' ');
  const size_t second = first == std::string::npos ? first : line.find(' ', first + 1);
  if (second == std::string::npos || line.compare(second + 1, 7, "HTTP/1.") != 0) {
    return absl::InvalidArgumentError("400");
  }
  Request request;
  const std::string method = line.substr(0, first);
  if (method != "GET" && method != "HEAD") return absl::InvalidArgumentError("405");
  request.head = method == "HEAD";
  request.path = line.substr(first + 1, second - first - 1);
  request.path = request.path.substr(0, request.path.find('?'));
  if (request.path.empty() || request.path[0] != '/') return absl::InvalidArgumentError("400");
  return request;
}

std::string Render(const HttpResponse& response, bool head) {
  std::string text = absl::StrCat("HTTP/1.1 ", response.status, " ", Reason(response.status),
                                  "\r\nContent-Type: ", response.content_type,
                                  "\r\nContent-Length: ", response.body.size(),
                                  "\r\nConnection: close\r\nX-Content-Type-Options: nosniff\r\n");
  if (response.status == 405) text += "Allow: GET, HEAD\r\n";
  text += "\r\n";
  if (!head) text += response.body;
  return text;
}

// A connection. The server reads the request, sends the response (`out`), and then reads what the
// client still sends (`finishing`). Closing at once would reset the connection, and the client
// might lose the end of the response.
struct Connection {
  Fd fd;
  Clock::time_point deadline;
  std::string in;
  std::string out;
  size_t sent = 0;
  bool responding = false;
  bool finishing = false;
};

absl::StatusOr<Fd> Listen(const HostPort& address) {
  struct addrinfo hints {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  struct addrinfo* found = nullptr;
  const int error =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen for HTTP on ", ToString(address), ": ", gai_strerror(error)));
  }
  Fd fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int one = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  const bool listening = fd.get() >= 0 && bind(fd.get(), found->ai_addr, found->ai_addrlen) == 0 &&
                         listen(fd.get(), 128) == 0;
  const int saved = errno;
  freeaddrinfo(found);
  if (listening) return fd;
  return absl::UnavailableError(absl::StrCat(
      "cannot listen for HTTP on ", ToString(address), ": ", strerror(saved),
      saved == EADDRINUSE ? "; another process has the port, choose another --http" : ""));
}

uint16_t BoundPort(int fd) {
  struct sockaddr_storage bound {};
  socklen_t size = sizeof bound;
  LH_CHECK(getsockname(fd, reinterpret_cast<struct sockaddr*>(&bound), &size) == 0);
  return ntohs(bound.ss_family == AF_INET6
                   ? reinterpret_cast<const struct sockaddr_in6&>(bound).sin6_port
                   : reinterpret_cast<const struct sockaddr_in&>(bound).sin_port);
}

}  // namespace

class HttpServer::Impl {
 public:
  Impl(Fd listener, Fd wake, std::string address, Handler handler)
      : listener_(std::move(listener)),
        wake_(std::move(wake)),
        address_(std::move(address)),
        handler_(std::move(handler)),
        thread_([this] { Run(); }) {}

  ~Impl() {
    const uint64_t one = 1;
    LH_CHECK(write(wake_.get(), &one, sizeof one) == sizeof one);
    thread_.join();
  }

  const std::string& address() const { return address_; }

 private:
  void Run() {
    const CpuTime cpu("http");
    std::vector<struct pollfd> polls;
    while (true) {
      polls.clear();
      polls.push_back({wake_.get(), POLLIN, 0});
      const bool full = connections_.size() >= kHttpConnectionsMax || accept_paused_;
      polls.push_back({full ? -1 : listener_.get(), POLLIN, 0});
      for (const Connection& c : connections_) {
        const bool writing = c.responding && !c.finishing;
        polls.push_back({c.fd.get(), static_cast<short>(writing ? POLLOUT : POLLIN), 0});
      }
      if (poll(polls.data(), polls.size(), PollTimeoutMs()) < 0 && errno != EINTR) {
        LH_CHECK(errno == ENOMEM) << "poll: " << strerror(errno);
      }
      if (polls[0].revents != 0) return;
      accept_paused_ = false;
      ServeConnections(polls);
      if (polls[1].revents != 0) Accept();
    }
  }

  int PollTimeoutMs() const {
    if (accept_paused_) return 100;
    if (connections_.empty()) return -1;
    // The first connection is the oldest, so its deadline is the next one.
    const auto left = connections_.front().deadline - Clock::now();
    return static_cast<int>(std::clamp<int64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1, 0, 60000));
  }

  void ServeConnections(const std::vector<struct pollfd>& polls) {
    size_t i = 2;
    for (auto it = connections_.begin(); it != connections_.end(); ++i) {
      const bool late = Clock::now() >= it->deadline;
      const bool alive = !late && (polls[i].revents == 0 || Serve(&*it));
      it = alive ? std::next(it) : connections_.erase(it);
    }
  }

  void Accept() {
    while (connections_.size() < kHttpConnectionsMax) {
      Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (fd.get() < 0) {
        // No free descriptors. The listener stays readable, so wait a little to avoid a busy loop.
        accept_paused_ = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
        return;
      }
      Connection connection;
      connection.fd = std::move(fd);
      connection.deadline = Clock::now() + std::chrono::seconds(kHttpSeconds);
      connections_.push_back(std::move(connection));
    }
  }

  // Returns false if the connection is over.
  bool Serve(Connection* c) {
    if (c->finishing) return Discard(c);
    if (!c->responding && !ReadRequest(c)) return false;
    return !c->responding || WriteResponse(c);
  }

  bool ReadRequest(Connection* c) {
    char buffer[4096];
    while (!c->responding) {
      const ssize_t got = recv(c->fd.get(), buffer, sizeof buffer, 0);
      if (got < 0) return errno == EAGAIN || errno == EINTR;
      if (got == 0) return false;
      c->in.append(buffer, static_cast<size_t>(got));
      if (c->in.find("\r\n\r\n") != std::string::npos || c->in.find("\n\n") != std::string::npos) {
        Respond(c);
      } else if (c->in.size() > kHttpRequestBytesMax) {
        SetResponse(c, {431, "text/plain; charset=utf-8", "request too large\n"}, false);
      }
    }
    return true;
  }

  void Respond(Connection* c) {
    const absl::StatusOr<Request> request = ParseRequest(c->in);
    if (!request.ok()) {
      const bool method = request.status().message() == "405";
      SetResponse(c,
                  {method ? 405 : 400, "text/plain; charset=utf-8",
                   method ? "only GET and HEAD\n" : "not an HTTP request\n"},
                  false);
      return;
    }
    SetResponse(c, handler_(request->path), request->head);
  }

  void SetResponse(Connection* c, const HttpResponse& response, bool head) {
    c->out = Render(response, head);
    c->in.clear();
    c->responding = true;
  }

  bool WriteResponse(Connection* c) {
    while (c->sent < c->out.size()) {
      const ssize_t sent =
          send(c->fd.get(), c->out.data() + c->sent, c->out.size() - c->sent, MSG_NOSIGNAL);
      if (sent < 0) return errno == EAGAIN || errno == EINTR;
      c->sent += static_cast<size_t>(sent);
    }
    shutdown(c->fd.get(), SHUT_WR);
    c->finishing = true;
    return Discard(c);
  }

  bool Discard(Connection* c) {
    char buffer[4096];
    // Reads one buffer in each turn. So a client that sends without end blocks no other client.
    const ssize_t got = recv(c->fd.get(), buffer, sizeof buffer, 0);
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
  }

  const Fd listener_;
  const Fd wake_;
  const std::string address_;
  const Handler handler_;
  std::list<Connection> connections_;  // oldest first
  bool accept_paused_ = false;
  std::thread thread_;  // last: it uses everything above
};

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;
const std::string& HttpServer::address() const { return impl_->address(); }

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Handler handler) {
  LH_ASSIGN_OR_RETURN(HostPort host_port, ParseHostPort(address));
  LH_ASSIGN_OR_RETURN(Fd listener, Listen(host_port));
  host_port.port = BoundPort(listener.get());
  Fd wake(eventfd(0, EFD_CLOEXEC));
  if (wake.get() < 0) {
    return absl::UnavailableError(absl::StrCat("eventfd for HTTP: ", strerror(errno)));
  }
  return std::unique_ptr<HttpServer>(new HttpServer(std::make_unique<Impl>(
      std::move(listener), std::move(wake), ToString(host_port), std::move(handler))));
}

}  // namespace longhaul
