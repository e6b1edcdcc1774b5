#include "base/daemon/host_port.h"

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
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

}  // namespace longhaul
