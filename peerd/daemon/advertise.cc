#include "peerd/daemon/advertise.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/daemon/host_port.h"
#include "base/log.h"

namespace longhaul::peerd {
namespace {

// Addresses for documentation, which no host has: the way to them is the default route.
constexpr char kAnywhere4[] = "192.0.2.1";
constexpr char kAnywhere6[] = "2001:db8::1";

// "": other hosts cannot reach the address, or need an interface of their own to name it.
std::string IfReachable(const sockaddr* address, bool link_local = false) {
  if (address == nullptr) return "";
  socklen_t length = 0;
  if (address->sa_family == AF_INET) {
    length = sizeof(sockaddr_in);
    const uint32_t ip = ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr);
    if (ip == 0 || ip >> 24 == 127) return "";
    if (!link_local && ip >> 16 == 0xa9fe) return "";  // 169.254.0.0/16
  } else if (address->sa_family == AF_INET6) {
    length = sizeof(sockaddr_in6);
    const in6_addr& ip = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    if (IN6_IS_ADDR_UNSPECIFIED(&ip) || IN6_IS_ADDR_LOOPBACK(&ip)) return "";
    if (!link_local && IN6_IS_ADDR_LINKLOCAL(&ip)) return "";
  } else {
    return "";
  }
  char host[NI_MAXHOST];
  return getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0 ? host
                                                                                          : "";
}

std::string SourceTowards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  // connect() on a datagram socket sends nothing. It only picks a route.
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  const bool ok = connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                  getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0;
  close(fd);
  // Who reaches a coordinator at a link-local address has no other.
  return ok ? IfReachable(reinterpret_cast<const sockaddr*>(&local), /*link_local=*/true) : "";
}

// The address of the first interface that is up.
std::string OfInterface(int family) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    // A bridge of containers that do not run is up, but not running.
    constexpr unsigned kUp = IFF_UP | IFF_RUNNING;
    if ((each->ifa_flags & kUp) != kUp || (each->ifa_flags & IFF_LOOPBACK) != 0) continue;
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family) continue;
    if (std::string host = IfReachable(each->ifa_addr); !host.empty()) return host;
  }
  return "";
}

std::string GeneralAddress(bool ipv4_only) {
  std::string host = SourceTowards(kAnywhere4);
  if (host.empty()) host = OfInterface(AF_INET);
  if (ipv4_only || !host.empty()) return host;
  host = SourceTowards(kAnywhere6);
  return host.empty() ? OfInterface(AF_INET6) : host;
}

bool OnLoopback(const std::string& endpoint) {
  const auto parsed = ParseHostPort(endpoint);
  return parsed.ok() && IsLoopback(*parsed);
}

}  // namespace

OwnAddresses SystemAddresses() { return {SourceTowards, GeneralAddress}; }

std::vector<std::string> AdvertisedEndpoints(const std::string& listen,
                                             const std::string& coordinator,
                                             const OwnAddresses& own) {
  const auto bound = ParseHostPort(listen);
  if (!bound.ok() || (bound->host != "0.0.0.0" && bound->host != "::")) return {listen};
  const bool ipv4_only = bound->host == "0.0.0.0";
  const auto at = [&](const std::string& host) { return ToString(HostPort{host, bound->port}); };
  const auto reached = ParseHostPort(coordinator);
  const bool beside = reached.ok() && IsLoopback(*reached);
  std::string host;
  if (reached.ok() && !beside) host = own.towards(reached->host);
  if (host.empty() || (ipv4_only && host.find(':') != std::string::npos)) {
    host = own.general(ipv4_only);
  }
  if (host.empty()) return {at("127.0.0.1")};
  if (beside) return {at(host), at("127.0.0.1")};
  return {at(host)};
}

std::vector<std::string> ReachedFrom(const std::string& coordinator,
                                     const std::vector<std::string>& endpoints) {
  const auto reached = ParseHostPort(coordinator);
  if (!reached.ok() || IsLoopback(*reached)) return endpoints;
  std::vector<std::string> beside;  // the coordinator
  std::vector<std::string> elsewhere;
  for (const std::string& endpoint : endpoints) {
    if (!OnLoopback(endpoint)) {
      elsewhere.push_back(endpoint);
      continue;
    }
    beside.push_back(ToString(HostPort{reached->host, ParseHostPort(endpoint)->port}));
  }
  if (beside.empty()) return endpoints;
  // With nothing but loopback, the peer may also be on this host, where it listens only there.
  std::vector<std::string> result = elsewhere.empty() ? endpoints : beside;
  for (const std::string& endpoint : elsewhere.empty() ? beside : elsewhere) {
    if (std::find(result.begin(), result.end(), endpoint) == result.end()) {
      result.push_back(endpoint);
    }
  }
  return result;
}

std::string WhereKernelListens(const std::string& listen) {
  const auto parsed = ParseHostPort(listen);
  if (!parsed.ok() || parsed->host != "::") return listen;
  const int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 && errno == EAFNOSUPPORT) return ToString(HostPort{"0.0.0.0", parsed->port});
  if (fd >= 0) close(fd);
  return listen;
}

AdvertisedAddress::AdvertisedAddress(std::string fixed, Derive derive)
    : derive_(fixed.empty() ? std::move(derive) : nullptr) {
  if (!fixed.empty()) endpoints_ = {std::move(fixed)};
}

void AdvertisedAddress::Refresh(const std::string& coordinator) {
  std::vector<std::string> endpoints;
  if (derive_) endpoints = derive_(coordinator);
  MutexLock lock(&mutex_);
  coordinator_ = coordinator;
  if (!derive_) return;
  const std::string now = absl::StrJoin(endpoints, ",");
  const bool remote = !coordinator.empty() && !OnLoopback(coordinator);
  const bool unreached = remote && OnLoopback(endpoints.front());
  if (unreached && !std::exchange(unreached_, true)) {
    Log(LogLevel::kWarning,
        absl::StrCat("other hosts cannot reach this peer: it listens on loopback only, or in no "
                     "address family in which this host has an address; give --listen=[::]:PORT, "
                     "or --advertise advertise=",
                     now));
  } else if (!endpoints_.empty() && endpoints != endpoints_) {
    Log(LogLevel::kInfo, absl::StrCat("host address changed advertise=", now,
                                      " before=", absl::StrJoin(endpoints_, ",")));
  }
  unreached_ = unreached;
  endpoints_ = std::move(endpoints);
}

std::vector<std::string> AdvertisedAddress::Get() const {
  MutexLock lock(&mutex_);
  return endpoints_;
}

std::vector<std::string> AdvertisedAddress::Reached(
    const std::vector<std::string>& endpoints) const {
  MutexLock lock(&mutex_);
  return ReachedFrom(coordinator_, endpoints);
}

}  // namespace longhaul::peerd
