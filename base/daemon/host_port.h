// Addresses as an operator writes them: "host:port" or "[IPv6 address]:port".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace longhaul {

struct HostPort {
  std::string host;  // without brackets, never empty
  uint16_t port = 0;
  friend bool operator==(const HostPort&, const HostPort&) = default;
};

// Parses an address. Does not resolve the host name. InvalidArgument quotes the text and says what
// is wrong with it.
absl::StatusOr<HostPort> ParseHostPort(const std::string& text);

// "host:port", with brackets around a host that contains a colon.
std::string ToString(const HostPort& address);

// Parses a comma-separated list of one or more addresses. No port may be 0.
absl::StatusOr<std::vector<std::string>> ParseAddressList(const std::string& text);

// Whether only this host reaches the address: localhost, names that end in .localhost, 127.0.0.0/8
// and ::1. Other names do not count, wherever they point: a name may point elsewhere tomorrow.
bool IsLoopback(const HostPort& address);

// Tests whether this process can listen on the address: listens for a moment, then stops.
// Unavailable says why the process cannot listen. The text names `service` ("HTTP"), and also
// `flag` ("--http") if another process has the port.
absl::Status TryListening(const HostPort& address, const std::string& service,
                          const std::string& flag);

}  // namespace longhaul
