#include "peerd/daemon/advertise.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/daemon/host_port.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace longhaul::peerd {
namespace {

// The source address that a packet to `target` would carry; "": there is no route to `target`.
std::string SourceAddressTowards(const HostPort& target) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(target.host.c_str(), std::to_string(target.port).c_str(), &hints, &found) != 0)
    return "";
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    const int fd = socket(info->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    // connect() on a datagram socket sends nothing. It only picks a route.
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    char host[NI_MAXHOST];
    const bool ok = connect(fd, info->ai_addr, info->ai_addrlen) == 0 &&
                    getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0 &&
                    getnameinfo(reinterpret_cast<sockaddr*>(&local), length, host, sizeof host,
                                nullptr, 0, NI_NUMERICHOST) == 0;
    close(fd);
    if (ok) return host;
  }
  return "";
}

}  // namespace

absl::StatusOr<std::string> AdvertisedEndpoint(const std::string& listen,
                                               const std::vector<std::string>& coordinators) {
  LH_ASSIGN_OR_RETURN(const HostPort bound, ParseHostPort(listen));
  if (bound.host != "0.0.0.0" && bound.host != "::") return listen;
  for (const std::string& coordinator : coordinators) {
    LH_ASSIGN_OR_RETURN(const HostPort target, ParseHostPort(coordinator));
    const std::string host = SourceAddressTowards(target);
    if (host.empty()) continue;
    return ToString(HostPort{host, bound.port});
  }
  return absl::FailedPreconditionError(
      "cannot derive the address that other peers reach: no coordinator resolves and has a route; "
      "give the address with --advertise=HOST:PORT");
}

AdvertisedAddress::AdvertisedAddress(std::string fixed, Derive derive)
    : derive_(fixed.empty() ? std::move(derive) : nullptr), endpoint_(std::move(fixed)) {}

absl::Status AdvertisedAddress::Refresh(const std::vector<std::string>& coordinators) {
  if (!derive_) return absl::OkStatus();
  absl::StatusOr<std::string> endpoint = derive_(coordinators);  // may block, so without the lock
  MutexLock lock(&mutex_);
  if (!endpoint.ok()) return endpoint_.empty() ? endpoint.status() : absl::OkStatus();
  if (!endpoint_.empty() && endpoint_ != *endpoint) {
    Log(LogLevel::kInfo,
        absl::StrCat("host address changed advertise=", *endpoint, " before=", endpoint_));
  }
  endpoint_ = *std::move(endpoint);
  return absl::OkStatus();
}

std::string AdvertisedAddress::Get() const {
  MutexLock lock(&mutex_);
  return endpoint_;
}

}  // namespace longhaul::peerd
