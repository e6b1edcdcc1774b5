// Addresses as an operator writes them: "host:port", "[v6]:port".
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

// InvalidArgument quotes the text and says what is wrong with it. Nothing is resolved.
absl::StatusOr<HostPort> ParseHostPort(const std::string& text);

// "host:port", with brackets around a host that contains a colon.
std::string ToString(const HostPort& address);

// Comma-separated addresses, at least one, each with a port other than 0.
absl::StatusOr<std::vector<std::string>> ParseAddressList(const std::string& text);

// Whether one could listen on the address right now; listens for a moment. Unavailable says why not
// and what to do: `service` ("HTTP") and `flag` ("--http") name what the address is for.
absl::Status TryListening(const HostPort& address, const std::string& service,
                          const std::string& flag);

}  // namespace longhaul
