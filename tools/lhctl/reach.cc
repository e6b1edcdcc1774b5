#include "tools/lhctl/reach.h"

#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/daemon/host_port.h"

namespace longhaul {
namespace {

using Clock = std::chrono::steady_clock;

// Pages of a daemon's metrics are below this.
constexpr size_t kPageBytesMax = 4 << 20;

// A socket, or -1. Closes it at its end.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

int MillisLeft(Clock::time_point deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::max<int64_t>(left, 0));
}

struct Target {
  sockaddr_storage address{};
  socklen_t bytes = 0;
};

// What `address` stands for, the best last. On failure there is none, and `*error` says why.
std::vector<Target> LookUp(const std::string& address, std::string* error) {
  const auto parsed = ParseHostPort(address);
  if (!parsed.ok()) {
    *error = std::string(parsed.status().message());
    return {};
  }
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int rc =
      getaddrinfo(parsed->host.c_str(), std::to_string(parsed->port).c_str(), &hints, &found);
  if (rc != 0) {
    *error = absl::StrCat("the name ", parsed->host, " is not known here: ", gai_strerror(rc));
    return {};
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> guard(found, freeaddrinfo);
  std::vector<Target> targets;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    Target& target = targets.emplace_back();
    target.bytes = each->ai_addrlen;
    memcpy(&target.address, each->ai_addr, each->ai_addrlen);
  }
  std::reverse(targets.begin(), targets.end());
  return targets;
}

// Begins to connect to the first target that does not fail at once, and takes it and those before
// it from the list. If all fail, the socket is -1, and `*error` says why.
Socket BeginConnecting(std::vector<Target>* targets, std::string* error) {
  while (!targets->empty()) {
    const Target target = targets->back();
    targets->pop_back();
    Socket socket(
        ::socket(target.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const auto* const address = reinterpret_cast<const sockaddr*>(&target.address);
    if (socket.fd() >= 0 &&
        (connect(socket.fd(), address, target.bytes) == 0 || errno == EINPROGRESS)) {
      return socket;
    }
    *error = strerror(errno);
  }
  return Socket();
}

bool SameAddress(const sockaddr* a, const sockaddr* b) {
  if (a == nullptr || b == nullptr || a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(b)->sin_addr.s_addr;
  }
  return a->sa_family == AF_INET6 &&
         memcmp(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr, sizeof(in6_addr)) == 0;
}

// Reads what the connection shows of its path.
void DescribePath(int fd, Reached* reached) {
  sockaddr_storage local{};
  socklen_t bytes = sizeof local;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&local), &bytes) != 0) return;
  const bool v4 = local.ss_family == AF_INET;
  int mtu = 0;
  bytes = sizeof mtu;
  if (getsockopt(fd, v4 ? IPPROTO_IP : IPPROTO_IPV6, v4 ? IP_MTU : IPV6_MTU, &mtu, &bytes) == 0) {
    reached->path_mtu = static_cast<uint32_t>(mtu);
  }
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> guard(all, freeifaddrs);
  const ifaddrs* own = nullptr;
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    // All of 127.0.0.0/8 is on the loopback interface, under the address 127.0.0.1.
    const bool loopback =
        v4 && (each->ifa_flags & IFF_LOOPBACK) != 0 &&
        ntohl(reinterpret_cast<sockaddr_in*>(&local)->sin_addr.s_addr) >> 24 == 127;
    if (loopback || SameAddress(each->ifa_addr, reinterpret_cast<sockaddr*>(&local))) {
      own = each;
      break;
    }
  }
  if (own == nullptr) return;
  reached->interface = own->ifa_name;
  ifreq request{};
  strncpy(request.ifr_name, own->ifa_name, IFNAMSIZ - 1);
  if (ioctl(fd, SIOCGIFMTU, &request) == 0) reached->mtu = static_cast<uint32_t>(request.ifr_mtu);
}

// The connection is there or has failed.
void Finish(int fd, Clock::time_point begun, Reached* reached) {
  int error = 0;
  socklen_t bytes = sizeof error;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) error = errno;
  if (error != 0) {
    reached->error = strerror(error);
    return;
  }
  reached->error.clear();
  reached->connect_us = static_cast<uint32_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begun).count());
  DescribePath(fd, reached);
}

}  // namespace

std::vector<Reached> TryConnecting(const std::vector<std::string>& addresses,
                                   std::chrono::milliseconds timeout) {
  struct Attempt {
    std::vector<Target> rest;  // what is tried if the present target fails
    Socket socket;
    Clock::time_point begun;
  };
  std::vector<Reached> all(addresses.size());
  std::vector<Attempt> attempts(addresses.size());
  // poll() ignores an entry of -1.
  std::vector<pollfd> polled(addresses.size(), {.fd = -1, .events = POLLOUT, .revents = 0});
  size_t left = 0;
  const auto begin = [&](size_t i) {
    attempts[i].begun = Clock::now();
    attempts[i].socket = BeginConnecting(&attempts[i].rest, &all[i].error);
    polled[i].fd = attempts[i].socket.fd();
    left += polled[i].fd >= 0 ? 1 : 0;
  };
  for (size_t i = 0; i < addresses.size(); ++i) {
    all[i].address = addresses[i];
    attempts[i].rest = LookUp(addresses[i], &all[i].error);
    begin(i);
  }
  const Clock::time_point deadline = Clock::now() + timeout;
  while (left > 0) {
    const int rc = poll(polled.data(), polled.size(), MillisLeft(deadline));
    if (rc < 0 && errno == EINTR) continue;
    if (rc <= 0) break;
    for (size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].fd < 0 || polled[i].revents == 0) continue;
      Finish(polled[i].fd, attempts[i].begun, &all[i]);
      polled[i].fd = -1;
      --left;
      if (!all[i].error.empty()) begin(i);
    }
  }
  for (size_t i = 0; i < polled.size(); ++i) {
    if (polled[i].fd < 0) continue;
    all[i].error = absl::StrCat("no answer within ", timeout.count(),
                                " ms: a firewall drops the packets, or the host is away");
  }
  return all;
}

std::optional<std::string> GetPage(const std::string& address, const std::string& path,
                                   std::chrono::milliseconds timeout) {
  std::string error;
  std::vector<Target> targets = LookUp(address, &error);
  const Socket socket = BeginConnecting(&targets, &error);
  if (socket.fd() < 0) return std::nullopt;
  const Clock::time_point deadline = Clock::now() + timeout;
  const std::string request =
      absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: ", address, "\r\nConnection: close\r\n\r\n");
  std::string answer;
  bool asked = false;
  while (true) {
    pollfd polled{.fd = socket.fd(), .events = static_cast<short>(asked ? POLLIN : POLLOUT)};
    const int rc = poll(&polled, 1, MillisLeft(deadline));
    if (rc < 0 && errno == EINTR) continue;
    if (rc <= 0) return std::nullopt;
    if (!asked) {
      // The request is smaller than any socket buffer, so the kernel takes it whole or not at all.
      const ssize_t sent = send(socket.fd(), request.data(), request.size(), MSG_NOSIGNAL);
      if (sent != static_cast<ssize_t>(request.size())) return std::nullopt;
      asked = true;
      continue;
    }
    char part[16384];
    const ssize_t got = recv(socket.fd(), part, sizeof part, 0);
    if (got < 0) return std::nullopt;
    if (got == 0) break;
    answer.append(part, static_cast<size_t>(got));
    if (answer.size() > kPageBytesMax) return std::nullopt;
  }
  const size_t body = answer.find("\r\n\r\n");
  if (answer.rfind("HTTP/1.", 0) != 0 || body == std::string::npos) return std::nullopt;
  return answer.substr(body + 4);
}

}  // namespace longhaul
