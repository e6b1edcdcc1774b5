#include "base/http/http_server.h"

#include <errno.h>
#include <fcntl.h>
#include <httplib.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <list>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/cpu_time.h"
#include "base/daemon/host_port.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace longhaul {
namespace {

using Clock = std::chrono::steady_clock;

// The stack of a connection's thread, whatever the limits of this process are.
constexpr size_t kStackBytes = size_t{1} << 20;
constexpr char kText[] = "text/plain; charset=utf-8";
// Written without the library, which would have to read the whole request first.
constexpr char kTooLarge[] =
    "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\n"
    "Content-Length: 18\r\nConnection: close\r\nX-Content-Type-Options: nosniff\r\n\r\n"
    "request too large\n";

// Both ends of one connection's bytes, for cpp-httplib. The whole request is read before the
// library sees it: a client that sends slowly or without end never keeps the library waiting.
//
// Newer versions of the library ask for more functions than that of Debian 12. They are here, and
// so no function says `override`.
class Connection : public httplib::Stream {
 public:
  Connection(int fd, Clock::time_point deadline) : fd_(fd), deadline_(deadline) {}

  enum class Outcome { kRead, kTooLarge, kGone };
  Outcome ReadRequest() {
    char buffer[4096];
    while (request_.find("\r\n\r\n") == std::string::npos &&
           request_.find("\n\n") == std::string::npos) {
      if (request_.size() > kHttpRequestBytesMax) return Outcome::kTooLarge;
      const ssize_t got = Wait(POLLIN) ? recv(fd_, buffer, sizeof buffer, 0) : -1;
      if (got <= 0 && !(got < 0 && errno == EAGAIN)) return Outcome::kGone;
      if (got > 0) request_.append(buffer, static_cast<size_t>(got));
    }
    HideRanges();
    return Outcome::kRead;
  }

  // Closing at once would reset a connection with unread bytes, and the client might lose the end
  // of the response. So wait until the client closes.
  void Finish() {
    shutdown(fd_, SHUT_WR);
    char buffer[4096];
    while (Wait(POLLIN)) {
      const ssize_t got = recv(fd_, buffer, sizeof buffer, 0);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return;
    }
  }

  // The client has closed, or the server stops.
  bool gone() const {
    struct pollfd p {
      fd_, POLLRDHUP, 0
    };
    return poll(&p, 1, 0) != 0;
  }
  void set_deadline(Clock::time_point deadline) { deadline_ = deadline; }

  // ---- httplib::Stream
  // NOLINTBEGIN(modernize-use-override)
  bool is_readable() const { return read_ < request_.size(); }
  bool wait_readable() const { return is_readable(); }
  bool is_writable() const { return Wait(POLLOUT); }
  bool wait_writable() const { return is_writable(); }
  ssize_t read(char* to, size_t size) {
    size = std::min(size, request_.size() - read_);
    memcpy(to, request_.data() + read_, size);
    read_ += size;
    return static_cast<ssize_t>(size);
  }
  ssize_t write(const char* from, size_t size) {
    for (size_t sent = 0; sent < size;) {
      if (!Wait(POLLOUT)) return -1;
      const ssize_t n = send(fd_, from + sent, size - sent, MSG_NOSIGNAL);
      if (n < 0 && errno != EAGAIN && errno != EINTR) return -1;
      if (n > 0) sent += static_cast<size_t>(n);
    }
    return static_cast<ssize_t>(size);
  }
  void get_remote_ip_and_port(std::string&, int&) const {}
  void get_local_ip_and_port(std::string&, int&) const {}
  socket_t socket() const { return fd_; }
  time_t duration() const { return 0; }
  // NOLINTEND(modernize-use-override)

 private:
  // Renames the header "Range". The library reads it with a regular expression that recurses, and a
  // header of 8 KiB overflows the stack of a thread.
  void HideRanges() {
    constexpr absl::string_view kRange = "\nrange:";
    for (size_t at = 0; (at = request_.find('\n', at)) != std::string::npos; ++at) {
      if (absl::EqualsIgnoreCase(absl::string_view(request_).substr(at, kRange.size()), kRange)) {
        request_[at + 1] = '-';
      }
    }
  }

  // False: the deadline has passed.
  bool Wait(short events) const {
    while (true) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
      if (left <= 0) return false;
      struct pollfd p {
        fd_, events, 0
      };
      const int ready = poll(&p, 1, static_cast<int>(left) + 1);
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;
    }
  }

  const int fd_;
  Clock::time_point deadline_;
  std::string request_;
  size_t read_ = 0;
};

HttpResponse Error(int status, const std::string& text) { return {status, kText, text + "\n"}; }

// Says what is wrong with a request that the library has refused.
HttpResponse Refusal(int status) {
  if (status == 400) return Error(400, "not an HTTP request");
  return Error(status, absl::StrCat("refused with HTTP status ", status));
}

// One use of cpp-httplib: parses the request that `connection` has read, and writes the response.
// It listens on nothing.
class Exchange : private httplib::Server {
 public:
  Exchange(Connection* connection, const HttpServer::Handler& handler, std::atomic<int>* streams,
           const std::atomic<bool>& stopping)
      : connection_(connection), handler_(handler), streams_(streams), stopping_(stopping) {
    // The library takes a server without a socket for one that stops, and ends streams.
    svr_sock_ = connection->socket();
    set_default_headers({{"X-Content-Type-Options", "nosniff"}});
    set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      Write(Answer(request), &response, this);
      return HandlerResponse::Handled;
    });
    set_error_handler(HandlerWithResponse([](const auto&, httplib::Response& response) {
      if (response.body.empty()) Write(Refusal(response.status), &response, nullptr);
      return HandlerResponse::Handled;
    }));
  }
  ~Exchange() override { svr_sock_ = INVALID_SOCKET; }

  void Run() { Process(this, connection_); }

 private:
  // The arguments depend on the version of the library: 0.11 (Debian 12), or 0.18 and later.
  template <class Self>
  static void Process(Self* self, httplib::Stream* connection) {
    bool closed = false;
    const auto plain = [](httplib::Request& request) {
      // Responses are sent as they are, not compressed.
      request.headers.erase("Accept-Encoding");
    };
    if constexpr (requires { self->process_request(*connection, true, closed, plain); }) {
      self->process_request(*connection, true, closed, plain);
    } else {
      self->process_request(*connection, std::string(), 0, std::string(), 0, true, closed, plain);
    }
  }

  HttpResponse Answer(const httplib::Request& request) {
    if (request.method != "GET" && request.method != "HEAD") {
      HttpResponse refused = Error(405, "only GET and HEAD");
      refused.headers.emplace_back("Allow", "GET, HEAD");
      return refused;
    }
    if (request.path.empty() || request.path[0] != '/') return Refusal(400);
    HttpResponse response = handler_(request.path);
    if (!response.stream || request.method == "HEAD") return response;
    // The count falls when the last copy of the stream goes.
    if (streams_->fetch_add(1) >= kHttpStreamsMax) {
      streams_->fetch_sub(1);
      return Error(503, absl::StrCat("there are ", kHttpStreamsMax,
                                     " streams, and no more are served; close one of them"));
    }
    std::shared_ptr<std::atomic<int>> place(streams_, [](auto* count) { count->fetch_sub(1); });
    response.stream = [stream = std::move(response.stream), place](std::string* piece) {
      return stream(piece);
    };
    return response;
  }

  static void Write(const HttpResponse& from, httplib::Response* to, Exchange* exchange) {
    to->status = from.status;
    for (const auto& [name, value] : from.headers) to->set_header(name, value);
    if (!from.stream) return to->set_content(from.body, from.content_type);
    to->set_content_provider(from.content_type,
                             [exchange, stream = from.stream](size_t, httplib::DataSink& sink) {
                               return exchange->WritePiece(stream, &sink);
                             });
  }

  // False: the connection is over.
  bool WritePiece(const HttpStream& stream, httplib::DataSink* sink) {
    std::string piece;
    if (stopping_ || connection_->gone()) return false;
    if (!stream(&piece)) {
      sink->done();
      return true;
    }
    if (piece.empty()) return true;
    connection_->set_deadline(Clock::now() + std::chrono::seconds(kHttpSeconds));
    return sink->write(piece.data(), piece.size());
  }

  Connection* const connection_;
  const HttpServer::Handler& handler_;
  std::atomic<int>* const streams_;
  const std::atomic<bool>& stopping_;
};

absl::StatusOr<UniqueFd> Listen(const HostPort& address) {
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
  UniqueFd fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
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
  Impl(UniqueFd listener, UniqueFd wake, std::string address, Handler handler)
      : listener_(std::move(listener)),
        wake_(std::move(wake)),
        address_(std::move(address)),
        handler_(std::move(handler)) {
    LH_CHECK(pthread_attr_init(&attributes_) == 0);
    LH_CHECK(pthread_attr_setstacksize(&attributes_, kStackBytes) == 0);
    acceptor_ = std::thread([this] { AcceptAll(); });
  }

  ~Impl() {
    stopping_ = true;
    Wake();
    acceptor_.join();
    pthread_attr_destroy(&attributes_);
  }

  const std::string& address() const { return address_; }

 private:
  struct Client {
    UniqueFd fd;
    std::atomic<bool> over{false};
    // The handler runs, or the answer is being sent. Other clients may be turned away.
    std::atomic<bool> answering{false};
    bool turned_away = false;
  };

  void AcceptAll() {
    const CpuTime cpu("http");
    while (!stopping_) {
      const bool listens = !accept_paused_ && (clients_.size() < kHttpConnectionsMax || Victim());
      struct pollfd polls[2] = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      if (poll(polls, listens ? 2 : 1, accept_paused_ ? 100 : -1) < 0 && errno != EINTR) {
        LH_CHECK(errno == ENOMEM) << "poll: " << strerror(errno);
      }
      accept_paused_ = false;
      uint64_t ignored;
      (void)!read(wake_.get(), &ignored, sizeof ignored);
      Reap();
      if (!listens) continue;
      if (clients_.size() < kHttpConnectionsMax) {
        Accept();
      } else if ((polls[1].revents & POLLIN) != 0) {
        MakeRoom();
      }
    }
    for (Client& client : clients_) shutdown(client.fd.get(), SHUT_RDWR);
    {
      MutexLock lock(&mutex_);
      workers_end_ = true;
      work_.SignalAll();
    }
    for (const pthread_t worker : workers_) pthread_join(worker, nullptr);
  }

  // Closes the connections that are over.
  void Reap() {
    for (auto it = clients_.begin(); it != clients_.end();) {
      if (!it->over) {
        ++it;
        continue;
      }
      it = clients_.erase(it);
    }
  }

  // The client to turn away if there are too many; nullptr: none now. One at a time is on its way
  // out: only when it is gone there is room.
  Client* Victim() {
    Client* oldest = nullptr;
    for (Client& client : clients_) {
      if (client.turned_away) return nullptr;
      if (oldest == nullptr && !client.answering) oldest = &client;
    }
    return oldest;
  }

  void MakeRoom() {
    Client* const victim = Victim();
    if (victim == nullptr) return;
    victim->turned_away = true;
    shutdown(victim->fd.get(), SHUT_RDWR);  // its worker finishes, and wakes the acceptor
  }

  void Accept() {
    while (clients_.size() < kHttpConnectionsMax) {
      UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (fd.get() < 0) {
        // No free descriptors. The listener stays readable, so wait a little to avoid a busy loop.
        accept_paused_ = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
        return;
      }
      if (!HaveWorker()) {
        accept_paused_ = true;
        return;
      }
      Client& client = clients_.emplace_back();
      client.fd = std::move(fd);
      MutexLock lock(&mutex_);
      waiting_.push_back(&client);
      work_.Signal();
    }
  }

  // Starts a thread if none is free for one more client. Threads stay until the server ends: to
  // start and end one for each connection would disturb the other threads of the process, which
  // share its memory map. False: the host has no more threads.
  bool HaveWorker() {
    {
      MutexLock lock(&mutex_);
      if (idle_ > waiting_.size() || workers_.size() == kHttpConnectionsMax) return true;
    }
    // Not a std::thread, which throws where the host has no more threads.
    pthread_t worker;
    if (pthread_create(&worker, &attributes_, RunWorker, this) != 0) return false;
    workers_.push_back(worker);
    return true;
  }

  static void* RunWorker(void* server_pointer) {
    static_cast<Impl*>(server_pointer)->Work();
    return nullptr;
  }

  void Work() {
    const CpuTime cpu("http");
    while (Client* const client = NextClient()) {
      Serve(client);
      client->over = true;  // from now on the acceptor may delete it
      Wake();
    }
  }

  // Waits for a client. Returns nullptr when the server ends.
  Client* NextClient() {
    MutexLock lock(&mutex_);
    ++idle_;
    while (!workers_end_ && waiting_.empty()) work_.Wait(&mutex_);
    --idle_;
    if (workers_end_) return nullptr;
    Client* const client = waiting_.front();
    waiting_.pop_front();
    return client;
  }

  void Serve(Client* client) {
    Connection connection(client->fd.get(), Clock::now() + std::chrono::seconds(kHttpSeconds));
    switch (connection.ReadRequest()) {
      case Connection::Outcome::kGone:
        return;
      case Connection::Outcome::kTooLarge:
        connection.httplib::Stream::write(kTooLarge);
        break;
      case Connection::Outcome::kRead:
        client->answering = true;
        Exchange(&connection, handler_, &streams_, stopping_).Run();
        client->answering = false;
    }
    connection.Finish();
  }

  void Wake() {
    const uint64_t one = 1;
    LH_CHECK(write(wake_.get(), &one, sizeof one) == sizeof one);
  }

  pthread_attr_t attributes_;  // of workers
  const UniqueFd listener_;
  const UniqueFd wake_;
  const std::string address_;
  const Handler handler_;
  std::atomic<int> streams_{0};
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  CondVar work_;
  std::deque<Client*> waiting_ ABSL_GUARDED_BY(mutex_);  // accepted, and not with a worker yet
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;              // workers that wait for a client
  bool workers_end_ ABSL_GUARDED_BY(mutex_) = false;
  // Only the acceptor uses these. A worker uses the fields of its client.
  std::vector<pthread_t> workers_;
  std::list<Client> clients_;
  bool accept_paused_ = false;
  std::thread acceptor_;  // uses everything above
};

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;
const std::string& HttpServer::address() const { return impl_->address(); }

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Handler handler) {
  LH_ASSIGN_OR_RETURN(HostPort host_port, ParseHostPort(address));
  LH_ASSIGN_OR_RETURN(UniqueFd listener, Listen(host_port));
  host_port.port = BoundPort(listener.get());
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake.get() < 0) {
    return absl::UnavailableError(absl::StrCat("eventfd for HTTP: ", strerror(errno)));
  }
  return std::unique_ptr<HttpServer>(new HttpServer(std::make_unique<Impl>(
      std::move(listener), std::move(wake), ToString(host_port), std::move(handler))));
}

}  // namespace longhaul
