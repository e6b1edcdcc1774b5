// Tries to reach TCP addresses from this host, for `lhctl doctor`. Any thread. Calls block.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace longhaul {

struct Reached {
  std::string address;      // as it was given
  std::string error;        // why there is no connection; empty: there was one
  uint32_t connect_us = 0;  // how long connecting took: about one round trip
  std::string interface;    // on which this host's end of the connection is; empty: not known
  uint32_t mtu = 0;         // of the interface; 0: not known
  uint32_t path_mtu = 0;    // what the kernel knows of the path; 0: not known
};

// Opens a connection to each address and closes it again. All at the same time, in one thread;
// names are looked up one after the other before. Sends no byte.
std::vector<Reached> TryConnecting(const std::vector<std::string>& addresses,
                                   std::chrono::milliseconds timeout);

// Gives the body of an HTTP page, whatever its status. nullopt: nothing answered within `timeout`.
std::optional<std::string> GetPage(const std::string& address, const std::string& path,
                                   std::chrono::milliseconds timeout);

}  // namespace longhaul
