#include "peerd/io/sockets.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace longhaul::peerd {

// In tcp_delivery.cc: the kernel's header has more fields of tcp_info than the C library's.
std::optional<TcpDelivery> SystemTcpDelivery(int fd);

namespace {

absl::StatusOr<std::vector<SocketAddress>> GetAddresses(const HostPort& host_port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV | AI_PASSIVE;
  addrinfo* list = nullptr;
  const std::string port = absl::StrCat(host_port.port);
  const int error = getaddrinfo(host_port.host.empty() ? nullptr : host_port.host.c_str(),
                                port.c_str(), &hints, &list);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat(
        "resolve ", host_port.host, ": ",
        error == EAI_SYSTEM ? std::string(strerror(errno)) : std::string(gai_strerror(error))));
  }
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
    if (a->ai_family != AF_INET && a->ai_family != AF_INET6) continue;
    SocketAddress address;
    memcpy(&address.storage, a->ai_addr, a->ai_addrlen);
    address.length = a->ai_addrlen;
    addresses.push_back(address);
  }
  if (addresses.empty()) {
    return absl::UnavailableError(
        absl::StrCat("resolve ", host_port.host, ": no IPv4 or IPv6 address"));
  }
  return addresses;
}

bool SetInt(int fd, int level, int option, int value) {
  return setsockopt(fd, level, option, &value, sizeof(value)) == 0;
}

// An IPv4 address that a socket of IPv6 shows as ::ffff:10.0.0.1 is the IPv4 address.
SocketAddress Plain(const SocketAddress& address) {
  const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage);
  if (address.family() != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) return address;
  SocketAddress plain;
  plain.length = sizeof(sockaddr_in);
  auto* const v4 = reinterpret_cast<sockaddr_in*>(&plain.storage);
  v4->sin_family = AF_INET;
  v4->sin_port = v6->sin6_port;
  memcpy(&v4->sin_addr, v6->sin6_addr.s6_addr + 12, sizeof v4->sin_addr);
  return plain;
}

using AddressCall = int (*)(int, sockaddr*, socklen_t*);

absl::StatusOr<SocketAddress> AddressOf(int fd, AddressCall call, const char* what) {
  SocketAddress address;
  address.length = sizeof(address.storage);
  if (call(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) {
    return absl::UnavailableError(absl::StrCat(what, ": ", strerror(errno)));
  }
  return Plain(address);
}

class SystemSocketsImpl final : public Sockets {
 public:
  absl::StatusOr<int> Listen(const SocketAddress& address) override {
    // Blocking: kernels before 6.0 pass O_NONBLOCK of a listener on to io_uring's accept as EAGAIN.
    const int fd = socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return ListenError(address, errno);
    SetInt(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (address.family() == AF_INET6) SetInt(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (bind(fd, address.get(), address.length) != 0 || listen(fd, SOMAXCONN) != 0) {
      const int error = errno;
      close(fd);
      return ListenError(address, error);
    }
    return fd;
  }

  absl::StatusOr<SocketAddress> LocalAddress(int fd) override {
    return AddressOf(fd, getsockname, "getsockname");
  }
  absl::StatusOr<SocketAddress> PeerAddress(int fd) override {
    return AddressOf(fd, getpeername, "getpeername");
  }

  absl::StatusOr<int> Open(int family) override {
    const int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return absl::UnavailableError(absl::StrCat("socket: ", strerror(errno)));
    return fd;
  }

  absl::Status Tune(int fd, const StreamTuning& tuning) override {
    SetInt(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    // A stream of few packets, such as a control lane, repeats lost packets at an even pace. With
    // the usual doubling, the next try after a short outage would come as late again.
    SetInt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1);
    SetInt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(tuning.user_timeout_ms));
    if (tuning.segment_bytes_max != 0) {
      SetInt(fd, IPPROTO_TCP, TCP_MAXSEG, static_cast<int>(tuning.segment_bytes_max));
    }
    if (!tuning.congestion.empty() &&
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, tuning.congestion.data(),
                   tuning.congestion.size()) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("congestion control ", tuning.congestion, ": ", strerror(errno),
                       "; see sysctl net.ipv4.tcp_allowed_congestion_control"));
    }
    return absl::OkStatus();
  }

  std::optional<TcpDelivery> Delivery(int fd) override { return SystemTcpDelivery(fd); }

  void SetLongWay(int fd) override {
    SetInt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kUnsentBytes);
    SetPace(fd, 0);
  }

  void SetPace(int fd, uint64_t bytes_per_second) override {
    // Even a rate that is no limit makes the kernel pace packets by the congestion window.
    if (bytes_per_second == 0) bytes_per_second = uint64_t{1} << 40;
    setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &bytes_per_second, sizeof(bytes_per_second));
  }

  void ShutdownSend(int fd) override { shutdown(fd, SHUT_WR); }
  void Close(int fd) override { close(fd); }
  void Abort(int fd) override {
    const linger now{.l_onoff = 1, .l_linger = 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    close(fd);
  }

 private:
  static absl::Status ListenError(const SocketAddress& address, int error) {
    return absl::UnavailableError(
        absl::StrCat("listen on ", ToString(address), ": ", strerror(error),
                     error == EADDRINUSE ? "; another process has the port: choose another" : ""));
  }
};

}  // namespace

uint16_t SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  if (family() == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  }
  return 0;
}

bool SocketAddress::loopback() const {
  if (family() == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr) >> 24 == 127;
  }
  if (family() != AF_INET6) return false;
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

SocketAddress::Scope SocketAddress::scope() const {
  if (loopback()) return Scope::kMachine;
  const auto of_v4 = [](uint32_t v4) {
    return v4 == INADDR_ANY ? Scope::kMachine : v4 >> 16 == 0xa9fe ? Scope::kWire : Scope::kWide;
  };
  if (family() == AF_INET) {
    return of_v4(ntohl(reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr));
  }
  if (family() != AF_INET6) return Scope::kWide;
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr;
  if (IN6_IS_ADDR_UNSPECIFIED(&v6)) return Scope::kMachine;
  if (IN6_IS_ADDR_LINKLOCAL(&v6)) return Scope::kWire;
  if (!IN6_IS_ADDR_V4MAPPED(&v6)) return Scope::kWide;
  uint32_t v4 = 0;
  memcpy(&v4, v6.s6_addr + 12, sizeof(v4));
  return of_v4(ntohl(v4));
}

std::string ToString(const SocketAddress& address) {
  char host[NI_MAXHOST];
  if (getnameinfo(address.get(), address.length, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) !=
      0) {
    return "?";
  }
  return address.family() == AF_INET6 ? absl::StrCat("[", host, "]:", address.port())
                                      : absl::StrCat(host, ":", address.port());
}

std::optional<SocketAddress> NumericAddress(const HostPort& host_port) {
  auto addresses = GetAddresses(host_port, AI_NUMERICHOST);
  if (!addresses.ok()) return std::nullopt;
  return addresses->front();
}

absl::StatusOr<std::vector<SocketAddress>> ResolveBlocking(const HostPort& host_port) {
  return GetAddresses(host_port, 0);
}

Sockets& SystemSockets() {
  static SystemSocketsImpl* const sockets = new SystemSocketsImpl;
  return *sockets;
}

}  // namespace longhaul::peerd
