#include "coordinator/grpc/front.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/cpu_time.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/tick.h"
#include "base/tls/server_context.h"
#include "coordinator/grpc/connection.h"
#include "coordinator/grpc/rare_log.h"
#include "coordinator/grpc/stranger_budget.h"
#include "coordinator/grpc/stranger_table.h"

namespace longhaul::coordinator {
namespace {

// How long a stranger may wait, and how long it may then take to become known.
constexpr int64_t kPatienceUs = Seconds(10);
// How long a client may take to read what gRPC has said before it closed.
constexpr int64_t kLastWordsUs = Seconds(5);
constexpr int64_t kStopUs = Millis(500);
constexpr int64_t kLookEveryUs = Millis(250);
constexpr int64_t kAcceptPauseUs = Millis(20);
constexpr int kAcceptsAtATime = 64;
constexpr int kRoundsAtATime = 16;
constexpr int kBacklog = 1024;
constexpr size_t kChunk = 16 << 10;
constexpr size_t kStrangersChunk = 4 << 10;
constexpr size_t kFrameHeader = 9;
constexpr size_t kClientHelloHeader = 5;
constexpr int64_t kLogUs = Seconds(60);
constexpr size_t kLogHostsMax = 64;

Tick Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return Tick{std::chrono::duration_cast<std::chrono::microseconds>(now).count()};
}

// Unique in this process: connection.h knows connections of all fronts.
uint64_t NextId() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// The kernel gives the lowest free number. So a high number says that few are left.
bool IsOneOfTheLast(int fd) {
  struct rlimit limit {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return false;
  return static_cast<rlim_t>(fd) + kDescriptorsReserved >= limit.rlim_cur;
}

// Those that wait take a quarter of the descriptors at most: a peer needs three.
size_t WaitingMax() {
  struct rlimit limit {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kStrangersWaitingMax;
  return static_cast<size_t>(
      std::min<rlim_t>(kStrangersWaitingMax, std::max<rlim_t>(limit.rlim_cur / 4, 1)));
}

// The caller's address: as gRPC writes it, and what counts as one address for strangers.
struct From {
  std::string uri;
  std::string share;
};
From FromOf(const sockaddr_storage& end) {
  char text[INET6_ADDRSTRLEN] = "";
  if (end.ss_family == AF_INET) {
    sockaddr_in v4{};
    memcpy(&v4, &end, sizeof v4);
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof text);
    return {absl::StrCat("ipv4:", text, ":", ntohs(v4.sin_port)), text};
  }
  sockaddr_in6 v6{};
  memcpy(&v6, &end, sizeof v6);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    inet_ntop(AF_INET, &v6.sin6_addr.s6_addr[12], text, sizeof text);
    return {absl::StrCat("ipv4:", text, ":", ntohs(v6.sin6_port)), text};
  }
  inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text);
  return {absl::StrCat("ipv6:%5B", text, "%5D:", ntohs(v6.sin6_port)),
          std::string(reinterpret_cast<const char*>(v6.sin6_addr.s6_addr), 8)};
}

void ResetOnClose(int fd) {
  const struct linger now = {1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

// One address of the port.
absl::StatusOr<UniqueFd> Listen(const sockaddr* address, socklen_t size, int family) {
  UniqueFd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.get() < 0) return absl::ErrnoToStatus(errno, "socket");
  const int one = 1;
  const int zero = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (family == AF_INET6) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
  }
  if (bind(fd.get(), address, size) != 0) return absl::ErrnoToStatus(errno, "bind");
  if (listen(fd.get(), kBacklog) != 0) return absl::ErrnoToStatus(errno, "listen");
  return fd;
}

uint16_t PortOf(int fd) {
  sockaddr_storage here{};
  socklen_t size = sizeof here;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &size) != 0) return 0;
  uint16_t port = 0;  // at the same place for both families
  memcpy(&port, reinterpret_cast<const char*>(&here) + offsetof(sockaddr_in, sin_port),
         sizeof port);
  return ntohs(port);
}

// Listens on all addresses of the host. Both wildcards are all addresses of IPv4 and IPv6.
absl::StatusOr<std::vector<UniqueFd>> ListenAt(HostPort* at) {
  std::vector<UniqueFd> fds;
  if (at->host == "0.0.0.0" || at->host == "::") {
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(at->port);
    absl::StatusOr<UniqueFd> fd =
        Listen(reinterpret_cast<const sockaddr*>(&any), sizeof any, AF_INET6);
    if (fd.ok()) {
      at->port = PortOf(fd->get());
      fds.push_back(*std::move(fd));
      return fds;
    }
    const UniqueFd ipv6(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (ipv6.get() >= 0) return fd.status();
  }
  struct addrinfo hints {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  const std::string host = at->host == "::" ? "0.0.0.0" : at->host;
  struct addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(at->port).c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(gai_strerror(error));
  absl::Status failed;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    sockaddr_storage address{};
    memcpy(&address, each->ai_addr, std::min<size_t>(each->ai_addrlen, sizeof address));
    // With port 0 the first address chooses the port.
    const uint16_t port = htons(at->port);
    memcpy(reinterpret_cast<char*>(&address) + offsetof(sockaddr_in, sin_port), &port, sizeof port);
    absl::StatusOr<UniqueFd> fd =
        Listen(reinterpret_cast<const sockaddr*>(&address), each->ai_addrlen, each->ai_family);
    if (!fd.ok()) {
      failed = fd.status();
      continue;
    }
    at->port = PortOf(fd->get());
    fds.push_back(*std::move(fd));
  }
  freeaddrinfo(found);
  if (fds.empty()) return failed;
  return fds;
}

// What other threads tell the thread of the front. Connections refer to it, and may outlive it.
struct Inbox {
  UniqueFd wake{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  Mutex mutex;
  std::vector<uint64_t> known ABSL_GUARDED_BY(mutex);
  bool stop_accepting ABSL_GUARDED_BY(mutex) = false;
  bool stop ABSL_GUARDED_BY(mutex) = false;

  void Wake() const {
    const uint64_t one = 1;
    (void)!write(wake.get(), &one, sizeof one);
  }
};

// A connection. Its epoll keys are 2 * id and 2 * id + 1.
struct Link {
  uint64_t id = 0;
  From from;
  bool stranger = true;
  bool served = false;
  Tick deadline;
  UniqueFd net;  // -1: closed
  UniqueFd inner;
  tls::SslPtr ssl;
  bool shaken = false;  // TLS stands
  StrangerBudget budget;
  std::shared_ptr<const Connection> connection;
  std::string up;       // from the client, not given to gRPC yet
  size_t may_pass = 0;  // so many bytes of `up` may go to gRPC
  std::string down;     // from gRPC, not sent to the client yet
  bool net_eof = false;
  bool inner_eof = false;
  uint32_t net_events = 0;    // as epoll knows them
  uint32_t inner_events = 0;  // 0: epoll does not know it
  bool net_in = false, net_out = false, inner_in = false, inner_out = false;  // wanted
};

enum class Io { kSome, kBlocked, kEnd };

}  // namespace

class Front::Impl {
 public:
  Impl(Options options, std::vector<UniqueFd> listeners)
      : options_(std::move(options)),
        listeners_(std::move(listeners)),
        thread_([this] { Run(); }) {}

  ~Impl() {
    {
      MutexLock lock(&inbox_->mutex);
      inbox_->stop = true;
    }
    inbox_->Wake();
    thread_.join();
  }

  uint16_t port() const { return options_.listen.port; }
  void StopAccepting() {
    {
      MutexLock lock(&inbox_->mutex);
      inbox_->stop_accepting = true;
    }
    inbox_->Wake();
  }

 private:
  static constexpr uint64_t kListenerKey = ~uint64_t{0};
  static constexpr uint64_t kInboxKey = kListenerKey - 1;

  void Run();
  void TakeMail();
  void Listen(bool on);
  void AcceptAll();
  bool AcceptOne(int listener);
  void Look();
  void Turn();

  void OnEvent(uint64_t key, uint32_t events);
  void LookWhetherReady(Link& link);
  void Serve(Link& link);
  void Pump(Link& link);
  // These return false if there is nothing more to do for the link, which may be gone.
  bool Shake(Link& link);
  bool PumpUp(Link& link);
  bool PumpDown(Link& link);
  bool OpenInner(Link& link);
  bool EndNet(Link& link, bool reset);
  void Erase(uint64_t id);
  void Watch(Link& link);
  void SetEvents(int fd, uint64_t key, uint32_t wanted, uint32_t* known) const;

  Io Read(Link& link, size_t room, size_t* size);
  Io Write(Link& link);
  tls::SslPtr MakeSsl(int fd);
  void CountRefused();

  Options options_;
  std::vector<UniqueFd> listeners_;
  bool listening_ = false;
  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  const UniqueFd epoll_{epoll_create1(EPOLL_CLOEXEC)};

  // Only the thread uses these.
  std::map<uint64_t, std::unique_ptr<Link>> links_;
  StrangerTable table_{kStrangersServedMax, WaitingMax()};
  std::vector<uint64_t> again_;  // have more to do than a turn
  Tick accept_again_ = kNever;
  Tick stop_at_ = kNever;
  std::shared_ptr<const tls::Material> material_;
  tls::SslContextPtr context_;
  std::vector<char> scratch_ = std::vector<char>(kChunk);
  uint64_t refused_ = 0;
  RareLog<int> refusals_{kLogUs, 1};
  RareLog<std::string> failures_{Seconds(10), kLogHostsMax};  // by host
  RareLog<int> put_out_{kLogUs, 1};

  std::thread thread_;  // last: it uses everything above
};

// ------------------------------------------------------------------------------ the thread

void Front::Impl::Run() {
  const CpuTime cpu("front");
  // OpenSSL writes to sockets whose other end is gone.
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  struct epoll_event mail {};
  mail.events = EPOLLIN;
  mail.data.u64 = kInboxKey;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, inbox_->wake.get(), &mail);
  Listen(true);
  Tick look = Now() + kLookEveryUs;
  std::vector<epoll_event> events(256);
  while (true) {
    Tick due = std::min({look, accept_again_, table_.due()});
    if (!again_.empty()) due = Now();
    const int64_t left_us = std::max<int64_t>(due - Now(), 0);
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                 static_cast<int>((left_us + 999) / 1000));
    for (const uint64_t id : std::exchange(again_, {})) {
      const auto it = links_.find(id);
      if (it != links_.end()) Pump(*it->second);
    }
    for (int i = 0; i < count; ++i) OnEvent(events[i].data.u64, events[i].events);
    TakeMail();  // before anybody is put out: it may be known by now
    const Tick now = Now();
    if (accept_again_ <= now) Listen(true);
    if (look <= now) {
      Look();
      look = now + kLookEveryUs;
    }
    if (stop_at_ == kNever) Turn();
    if (stop_at_ != kNever && (links_.empty() || stop_at_ <= now)) break;
  }
  while (!links_.empty()) Erase(links_.begin()->first);
}

void Front::Impl::TakeMail() {
  uint64_t count = 0;
  (void)!read(inbox_->wake.get(), &count, sizeof count);
  std::vector<uint64_t> known;
  bool stop_accepting = false;
  {
    MutexLock lock(&inbox_->mutex);
    known.swap(inbox_->known);
    stop_accepting = inbox_->stop_accepting || inbox_->stop;
    if (inbox_->stop && stop_at_ == kNever) stop_at_ = Now() + kStopUs;
  }
  if (stop_at_ != kNever) {
    std::erase_if(links_, [](const auto& entry) { return entry.second->inner.get() < 0; });
  }
  if (stop_accepting) {
    Listen(false);
    listeners_.clear();
    accept_again_ = kNever;
  }
  for (const uint64_t id : known) {
    const auto it = links_.find(id);
    if (it == links_.end() || !it->second->stranger) continue;
    Link& link = *it->second;
    link.stranger = false;
    link.deadline = kNever;
    link.may_pass = link.up.size();
    table_.Remove(id);
    if (link.net.get() >= 0) Pump(link);
  }
}

void Front::Impl::Listen(bool on) {
  accept_again_ = on ? kNever : Now() + kAcceptPauseUs;
  if (on == listening_) return;
  listening_ = on;
  for (const UniqueFd& listener : listeners_) {
    struct epoll_event event {};
    event.events = EPOLLIN;
    event.data.u64 = kListenerKey;
    epoll_ctl(epoll_.get(), on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, listener.get(), &event);
  }
}

void Front::Impl::AcceptAll() {
  for (const UniqueFd& listener : listeners_) {
    for (int i = 0; i < kAcceptsAtATime && AcceptOne(listener.get()); ++i) {
    }
  }
}

// False: nobody waits there, or there are too few descriptors.
bool Front::Impl::AcceptOne(int listener) {
  sockaddr_storage there{};
  socklen_t size = sizeof there;
  UniqueFd fd(
      accept4(listener, reinterpret_cast<sockaddr*>(&there), &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.get() < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      CountRefused();
      Listen(false);  // for a moment: a caller that asks again at once must not keep a core busy
    }
    return errno == ECONNABORTED || errno == EINTR;
  }
  if (IsOneOfTheLast(fd.get())) {
    ResetOnClose(fd.get());
    CountRefused();
    return true;
  }
  const int one = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  const unsigned int unacknowledged = options_.unacknowledged_ms;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged, sizeof unacknowledged);
  auto link = std::make_unique<Link>();
  link->id = NextId();
  link->from = FromOf(there);
  link->deadline = Now() + kPatienceUs;
  link->net = std::move(fd);
  if (options_.came) options_.came(HostOfUri(link->from.uri));
  const std::optional<uint64_t> closed = table_.Add(link->id, link->from.share);
  if (closed) {
    ResetOnClose(links_.at(*closed)->net.get());
    Erase(*closed);
  }
  struct epoll_event event {};
  event.events = EPOLLIN | EPOLLRDHUP | EPOLLET;
  event.data.u64 = 2 * link->id;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link->net.get(), &event);
  link->net_events = event.events;
  links_.emplace(link->id, std::move(link));
  return true;
}

// Ends the links whose time is over.
void Front::Impl::Look() {
  const Tick now = Now();
  std::vector<uint64_t> over;
  for (const auto& [id, link] : links_) {
    if (link->deadline <= now) over.push_back(id);
  }
  for (const uint64_t id : over) {
    Link& link = *links_.at(id);
    // gRPC may take its time to close its end.
    link.deadline = kNever;
    EndNet(link, /*reset=*/link.stranger);
  }
}

void Front::Impl::Turn() {
  while (true) {
    const StrangerTable::Step step = table_.Next(Now());
    if (step.serve) {
      Serve(*links_.at(*step.serve));
    } else if (step.put_out) {
      Link& link = *links_.at(*step.put_out);
      if (put_out_.Take(0)) {
        Log(LogLevel::kWarning,
            absl::StrCat("more than ", kStrangersServedMax,
                         " callers have not shown yet who they are: the oldest of those with the "
                         "most connections are put out",
                         LogField("port", options_.flag), LogField("client", link.from.uri)));
      }
      EndNet(link, /*reset=*/true);
    } else {
      return;
    }
  }
}

void Front::Impl::CountRefused() {
  ++refused_;
  if (!refusals_.Take(0)) return;
  Log(LogLevel::kWarning, absl::StrCat("connections refused, because file descriptors run out; "
                                       "raise the limit (LimitNOFILE=, ulimit -n) refused=",
                                       refused_));
}

// ------------------------------------------------------------------------------ a link

void Front::Impl::OnEvent(uint64_t key, uint32_t events) {
  if (key == kListenerKey) return AcceptAll();
  if (key == kInboxKey) return;  // Run() looks there anyway
  const auto it = links_.find(key / 2);
  if (it == links_.end()) return;
  Link& link = *it->second;
  const bool net = key % 2 == 0;
  if (net && (events & (EPOLLHUP | EPOLLERR)) != 0) {
    EndNet(link, /*reset=*/false);
    return;
  }
  if (!link.served) return LookWhetherReady(link);
  Pump(link);
}

// Whether a first message is there that is worth memory. It stays in the kernel until then.
void Front::Impl::LookWhetherReady(Link& link) {
  unsigned char begin[StrangerBudget::kPreface.size()];
  const ssize_t size = recv(link.net.get(), begin, sizeof begin, MSG_PEEK | MSG_DONTWAIT);
  if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR)) {
    EndNet(link, /*reset=*/false);
    return;
  }
  if (size < 0) return;
  const auto have = static_cast<size_t>(size);
  bool whole = have == sizeof begin;
  if (options_.files != nullptr && begin[0] == SSL3_RT_HANDSHAKE) {
    int waiting = 0;
    ioctl(link.net.get(), FIONREAD, &waiting);
    whole = have >= kClientHelloHeader &&
            static_cast<size_t>(waiting) >= kClientHelloHeader + (size_t{begin[3]} << 8 | begin[4]);
  } else if (options_.files != nullptr || begin[0] != StrangerBudget::kPreface[0]) {
    whole = true;  // it is refused at once
  }
  if (whole) table_.Ready(link.id);
}

void Front::Impl::Serve(Link& link) {
  link.served = true;
  link.deadline = Now() + kPatienceUs;
  if (options_.files != nullptr) {
    link.ssl = MakeSsl(link.net.get());
    if (link.ssl == nullptr) {
      EndNet(link, /*reset=*/true);
      return;
    }
  }
  Pump(link);
}

tls::SslPtr Front::Impl::MakeSsl(int fd) {
  std::shared_ptr<const tls::Material> material = options_.files->Current();
  if (material != material_) {
    absl::StatusOr<tls::SslContextPtr> context = tls::MakeServerContext(*material);
    if (context.ok()) {
      context_ = *std::move(context);
    } else {
      Log(LogLevel::kError, "new TLS files cannot be used; the last good ones stay in use" +
                                LogField("reason", std::string(context.status().message())));
    }
    material_ = std::move(material);
  }
  if (context_ == nullptr) return nullptr;
  tls::SslPtr ssl(SSL_new(context_.get()));
  if (ssl == nullptr || SSL_set_fd(ssl.get(), fd) != 1) return nullptr;
  SSL_set_accept_state(ssl.get());
  return ssl;
}

void Front::Impl::Pump(Link& link) {
  link.net_in = link.net_out = link.inner_in = link.inner_out = false;
  if (link.net.get() >= 0 && link.ssl != nullptr && !link.shaken && !Shake(link)) return;
  if (link.ssl == nullptr || link.shaken) {
    if (link.net.get() >= 0 && !PumpUp(link)) return;
    if (!PumpDown(link)) return;
  }
  Watch(link);
}

bool Front::Impl::Shake(Link& link) {
  ERR_clear_error();
  const int result = SSL_do_handshake(link.ssl.get());
  if (result == 1) {
    link.shaken = true;
    return true;
  }
  const int error = SSL_get_error(link.ssl.get(), result);
  link.net_in = error == SSL_ERROR_WANT_READ;
  link.net_out = error == SSL_ERROR_WANT_WRITE;
  if (link.net_in || link.net_out) return true;
  const std::optional<uint64_t> held_back = failures_.Take(HostOfUri(link.from.uri));
  if (held_back) {
    Log(LogLevel::kInfo,
        absl::StrCat("TLS handshake failed", LogField("port", options_.flag),
                     LogField("client", link.from.uri),
                     LogField("reason", error == SSL_ERROR_SSL ? tls::LastError() : "it closed"),
                     " not_logged=", *held_back));
  }
  EndNet(link, /*reset=*/false);
  return false;
}

// From the client to gRPC.
bool Front::Impl::PumpUp(Link& link) {
  for (int round = 0; round < kRoundsAtATime; ++round) {
    if (link.inner.get() < 0 && link.may_pass >= StrangerBudget::kPreface.size() &&
        !OpenInner(link)) {
      return false;
    }
    if (link.inner.get() >= 0 && link.may_pass > 0) {
      const ssize_t sent =
          send(link.inner.get(), link.up.data(), link.may_pass, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) {
        // If gRPC has closed its end, PumpDown() notices.
        link.inner_out = errno == EAGAIN;
        return true;
      }
      link.may_pass -= static_cast<size_t>(sent);
      link.up.erase(0, static_cast<size_t>(sent));
      if (link.up.empty()) std::string().swap(link.up);
      if (link.may_pass > 0) continue;
    }
    if (link.net_eof) return EndNet(link, /*reset=*/false);
    // A frame that is more than a stranger may send waits, and so does all behind it.
    if (link.stranger && link.inner.get() >= 0 && link.up.size() >= kFrameHeader) return true;
    size_t size = 0;
    switch (Read(link, link.stranger ? kStrangersChunk : kChunk, &size)) {
      case Io::kBlocked:
        return true;
      case Io::kEnd:
        link.net_eof = true;
        continue;
      case Io::kSome:
        break;
    }
    link.up.append(scratch_.data(), size);
    if (!link.stranger) {
      link.may_pass = link.up.size();
      continue;
    }
    link.may_pass += link.budget.Pass(std::string_view(link.up).substr(link.may_pass));
    if (link.budget.broken()) {
      // To a client that speaks TLS, or HTTP/1, a frame of HTTP/2 says more than the end.
      static constexpr char kSettings[kFrameHeader] = {0, 0, 0, 4, 0, 0, 0, 0, 0};
      link.down.assign(kSettings, sizeof kSettings);
      (void)Write(link);
      return EndNet(link, /*reset=*/false);
    }
  }
  again_.push_back(link.id);
  return true;
}

// From gRPC to the client.
bool Front::Impl::PumpDown(Link& link) {
  for (int round = 0; round < kRoundsAtATime; ++round) {
    if (link.net.get() >= 0 && !link.down.empty()) {
      switch (Write(link)) {
        case Io::kBlocked:
          return true;
        case Io::kEnd:
          return EndNet(link, /*reset=*/false);
        case Io::kSome:
          continue;
      }
    }
    if (link.inner.get() < 0) return true;
    if (link.inner_eof) {
      if (link.ssl != nullptr) SSL_shutdown(link.ssl.get());
      Erase(link.id);
      return false;
    }
    const ssize_t size = recv(link.inner.get(), scratch_.data(), kChunk, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
      link.inner_in = true;
      return true;
    }
    if (size <= 0) {
      link.inner_eof = true;
      link.deadline = Now() + kLastWordsUs;
    } else if (link.net.get() >= 0) {
      link.down.assign(scratch_.data(), static_cast<size_t>(size));
    }
  }
  again_.push_back(link.id);
  return true;
}

Io Front::Impl::Read(Link& link, size_t room, size_t* size) {
  if (link.ssl == nullptr) {
    const ssize_t got = recv(link.net.get(), scratch_.data(), room, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      link.net_in = true;
      return Io::kBlocked;
    }
    if (got <= 0) return Io::kEnd;
    *size = static_cast<size_t>(got);
    return Io::kSome;
  }
  ERR_clear_error();
  const int got = SSL_read(link.ssl.get(), scratch_.data(), static_cast<int>(room));
  if (got > 0) {
    *size = static_cast<size_t>(got);
    return Io::kSome;
  }
  const int error = SSL_get_error(link.ssl.get(), got);
  if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) return Io::kEnd;
  (error == SSL_ERROR_WANT_READ ? link.net_in : link.net_out) = true;
  return Io::kBlocked;
}

// Writes of link.down what the client takes.
Io Front::Impl::Write(Link& link) {
  ssize_t sent = 0;
  if (link.ssl == nullptr) {
    sent = send(link.net.get(), link.down.data(), link.down.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
      link.net_out = true;
      return Io::kBlocked;
    }
  } else {
    ERR_clear_error();
    const int result =
        SSL_write(link.ssl.get(), link.down.data(), static_cast<int>(link.down.size()));
    const int error = result > 0 ? SSL_ERROR_NONE : SSL_get_error(link.ssl.get(), result);
    if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) {
      (error == SSL_ERROR_WANT_READ ? link.net_in : link.net_out) = true;
      return Io::kBlocked;
    }
    sent = result;
  }
  if (sent <= 0) return Io::kEnd;
  link.down.erase(0, static_cast<size_t>(sent));
  if (link.down.empty()) std::string().swap(link.down);
  return Io::kSome;
}

// Gives gRPC its end of the link. The name of the other end tells the services who calls.
bool Front::Impl::OpenInner(Link& link) {
  int pair[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
    CountRefused();
    return EndNet(link, /*reset=*/true);
  }
  link.inner = UniqueFd(pair[0]);
  UniqueFd theirs(pair[1]);
  if (IsOneOfTheLast(std::max(pair[0], pair[1]))) {
    CountRefused();
    link.inner = UniqueFd();
    return EndNet(link, /*reset=*/true);
  }
  Connection::Options connection;
  connection.client = link.from.uri;
  connection.known = [inbox = inbox_, id = link.id] {
    {
      MutexLock lock(&inbox->mutex);
      inbox->known.push_back(id);
    }
    inbox->Wake();
  };
  const tls::ShownCertificate shown =
      link.ssl == nullptr ? tls::ShownCertificate() : tls::ShownBy(link.ssl.get());
  if (!shown.certificate.empty()) {
    connection.certificate = shown.certificate;
    connection.check = [files = options_.files, seen = options_.seen, refused = options_.refused,
                        shown] {
      tls::CertificateCheck verdict;
      const std::shared_ptr<const tls::Material> material = files->Current();
      verdict.ok = material->trust == nullptr;
      if (verdict.ok) return verdict;
      verdict = material->trust->Check(shown.certificate, shown.chain);
      if (!verdict.ok && refused) refused(verdict);
      if (verdict.ok && seen) {
        seen->Saw(verdict.identity.fingerprint, shown.certificate, shown.chain);
      }
      return verdict;
    };
  }
  link.connection = std::make_shared<const Connection>(std::move(connection));
  const std::string name = NameConnection(link.id, link.connection);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof address.sun_path - 2);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (bind(link.inner.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    Log(LogLevel::kError, "a connection cannot be named" + LogField("reason", strerror(errno)));
    link.inner = UniqueFd();
    return EndNet(link, /*reset=*/true);
  }
  options_.pass(std::move(theirs));
  return true;
}

// The client is gone, or has to go. gRPC then closes its end. Returns false.
bool Front::Impl::EndNet(Link& link, bool reset) {
  if (link.net.get() >= 0) {
    if (reset) {
      ResetOnClose(link.net.get());
    } else if (link.ssl != nullptr && link.shaken) {
      ERR_clear_error();
      SSL_shutdown(link.ssl.get());
    }
    link.ssl.reset();
    link.net = UniqueFd();
  }
  if (link.inner.get() < 0 || link.inner_eof) {
    Erase(link.id);
    return false;
  }
  link.up = std::string();
  link.down = std::string();
  link.may_pass = 0;
  link.deadline = kNever;
  shutdown(link.inner.get(), SHUT_WR);
  link.inner_in = true;
  link.inner_out = false;
  Watch(link);
  return false;
}

void Front::Impl::Erase(uint64_t id) {
  const auto it = links_.find(id);
  if (it == links_.end()) return;
  if (it->second->stranger) table_.Remove(id);
  if (it->second->connection != nullptr) ForgetConnection(id);
  links_.erase(it);
}

void Front::Impl::Watch(Link& link) {
  if (link.net.get() >= 0) {
    const uint32_t wanted = (link.net_in ? EPOLLIN : 0u) | (link.net_out ? EPOLLOUT : 0u);
    SetEvents(link.net.get(), 2 * link.id, wanted, &link.net_events);
  }
  if (link.inner.get() >= 0) {
    const uint32_t wanted = (link.inner_in ? EPOLLIN : 0u) | (link.inner_out ? EPOLLOUT : 0u);
    SetEvents(link.inner.get(), 2 * link.id + 1, wanted, &link.inner_events);
  }
}

// epoll tells of ends even if nothing is wanted. So it must not know a descriptor of which nothing
// is wanted: it would tell of it for ever.
void Front::Impl::SetEvents(int fd, uint64_t key, uint32_t wanted, uint32_t* known) const {
  if (wanted == *known) return;
  struct epoll_event event {};
  event.events = wanted;
  event.data.u64 = key;
  const int op = wanted == 0 ? EPOLL_CTL_DEL : *known == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  epoll_ctl(epoll_.get(), op, fd, &event);
  *known = wanted;
}

// ------------------------------------------------------------------------------ the outside

Front::Front(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Front::~Front() = default;
uint16_t Front::port() const { return impl_->port(); }
void Front::StopAccepting() { impl_->StopAccepting(); }

absl::StatusOr<std::unique_ptr<Front>> Front::Start(Options options) {
  LH_ASSIGN_OR_RETURN(std::vector<UniqueFd> listeners, ListenAt(&options.listen));
  return std::unique_ptr<Front>(
      new Front(std::make_unique<Impl>(std::move(options), std::move(listeners))));
}

}  // namespace longhaul::coordinator
