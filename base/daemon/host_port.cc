#include "base/daemon/host_port.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace longhaul {
namespace {

absl::Status Bad(const std::string& text, const char* what) {
  return absl::InvalidArgumentError(
      absl::StrCat("address '", text, "': ", what, "; write host:port or [v6]:port"));
}

}  // namespace

absl::StatusOr<HostPort> ParseHostPort(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return Bad(text, "no port");
  HostPort address;
  address.host = text.substr(0, colon);
  const std::string port = text.substr(colon + 1);
  if (!address.host.empty() && address.host.front() == '[') {
    if (address.host.size() < 3 || address.host.back() != ']') return Bad(text, "']' is missing");
    address.host = address.host.substr(1, address.host.size() - 2);
  } else if (address.host.find(':') != std::string::npos) {
    return Bad(text, "an IPv6 address needs brackets");
  }
  if (address.host.empty()) return Bad(text, "no host");
  for (const unsigned char c : address.host) {
    if (!absl::ascii_isalnum(c) && c != '.' && c != '-' && c != '_' && c != ':' && c != '%') {
      return Bad(text, "the host has a character that no host name has");
    }
  }
  uint32_t number = 0;
  const bool digits = !port.empty() && port.size() <= 5 &&
                      port.find_first_not_of("0123456789") == std::string::npos;
  if (!digits || !absl::SimpleAtoi(port, &number) || number > 65535) {
    return Bad(text, "the port is not a number from 0 to 65535");
  }
  address.port = static_cast<uint16_t>(number);
  return address;
}

std::string ToString(const HostPort& address) {
  if (address.host.find(':') != std::string::npos) {
    return absl::StrCat("[", address.host, "]:", address.port);
  }
  return absl::StrCat(address.host, ":", address.port);
}

absl::StatusOr<std::vector<std::string>> ParseAddressList(const std::string& text) {
  std::vector<std::string> addresses;
  const std::vector<std::string> pieces = absl::StrSplit(text, ',', absl::SkipWhitespace());
  for (const std::string& piece : pieces) {
    absl::StatusOr<HostPort> address =
        ParseHostPort(std::string(absl::StripAsciiWhitespace(piece)));
    if (!address.ok()) return address.status();
    if (address->port == 0) return Bad(piece, "port 0 cannot be dialled");
    addresses.push_back(ToString(*address));
  }
  if (addresses.empty()) return absl::InvalidArgumentError("no address given; write host:port");
  return addresses;
}

bool IsLoopback(const HostPort& address) {
  const std::string host = absl::AsciiStrToLower(address.host);
  if (host == "localhost" || absl::EndsWith(host, ".localhost")) return true;
  struct in_addr v4 {};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  struct in6_addr v6 {};
  if (inet_pton(AF_INET6, host.c_str(), &v6) != 1) return false;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

absl::Status TryListening(const HostPort& address, const std::string& service,
                          const std::string& flag) {
  const std::string what =
      absl::StrCat("cannot listen for ", service, " on ", ToString(address), ": ");
  struct addrinfo hints {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  struct addrinfo* found = nullptr;
  const int error =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(absl::StrCat(what, gai_strerror(error)));
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 && errno == EAFNOSUPPORT && address.host == "::") {
    // A kernel without IPv6. Daemons then take the addresses of IPv4.
    freeaddrinfo(found);
    return TryListening({"0.0.0.0", address.port}, service, flag);
  }
  bool listening = false;
  if (fd >= 0) {
    const int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    listening = bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 1) == 0;
  }
  const int saved = errno;
  freeaddrinfo(found);
  if (fd >= 0) close(fd);
  if (listening) return absl::OkStatus();
  const bool used = saved == EADDRINUSE;
  return absl::UnavailableError(absl::StrCat(
      what, strerror(saved),
      used ? absl::StrCat("; another process has the port, stop it or choose another ", flag)
           : std::string()));
}

}  // namespace longhaul
