// The peerd process behind its flags: one reactor thread that owns the ring, the engine and what is
// behind its ports, and the control client beside it.
//
// Other threads (gRPC, HTTP) reach the reactor through a bounded mailbox only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace longhaul::peerd {

struct DaemonOptions {
  std::vector<std::string> coordinators;  // host:port, tried in turn
  std::string socket_path;
  std::string socket_group;  // "": the own group; who may connect besides root and the own user
  std::string listen;        // data port
  std::string advertise;     // host:port told to others; "": derived
  std::string http;          // "": no HTTP
  std::string version;
  uint32_t lanes = 0;  // 0: automatic
  uint64_t arena_limit = 0;
  uint64_t scratch_limit = 0;
  uint32_t poll_us = 0;       // the reactor polls for so long before it sleeps
  uint32_t hash_threads = 0;  // 0: half of the processors, at most 8
  uint64_t state_rate = 0;    // bytes of shared state sent a second; 0: no limit
  uint64_t keep_state = 0;    // bytes of states kept for members; 0: none is
  uint32_t keep_state_for_ms = 600000;
  uint32_t drain_timeout_ms = 30000;
  // A join fails if no coordinator could be reached for this long.
  uint32_t coordinator_timeout_ms = 10000;
  uint32_t probe_interval_s = 0;   // between two probes of links; 0: none
  std::string zero_copy = "auto";  // auto, on, off
  std::string congestion;
  int signal_fd = -1;  // readable when SIGTERM or SIGINT came; -1: none
};

class Daemon {
 public:
  virtual ~Daemon() = default;

  // Bound addresses.
  virtual std::string listen_address() const = 0;
  virtual std::string socket_path() const = 0;
  virtual std::string http_address() const = 0;

  // Serves until drained (OK), told to stop at once (Cancelled), or broken.
  virtual absl::Status Run() = 0;
};

// Everything that can be refused is refused here: io_uring, ports, socket path.
absl::StatusOr<std::unique_ptr<Daemon>> MakeDaemon(DaemonOptions options);

}  // namespace longhaul::peerd
