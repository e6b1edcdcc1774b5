// Everything in the peerd process but its flags (main.cc). One thread, the reactor, owns the ring,
// the engine, the transport, the Unix socket and the runners of ops and states.
//
// Other threads run gRPC (the control client) and the HTTP server, hash and copy states, and unmap
// memory. They hand results to the reactor through bounded mailboxes, and wake it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/daemon/dumps.h"
#include "base/recorder.h"
#include "base/tls/tls_files.h"
#include "peerd/io/open_ring.h"

namespace longhaul::peerd {

struct DaemonOptions {
  std::vector<std::string> coordinators;  // host:port, tried in turn
  std::shared_ptr<tls::Files> tls;        // for the calls to coordinators; null: in clear
  std::string token_file;                 // with the join token; "": none
  std::string socket_path;
  // Root, the user of peerd and the members of this group may connect. "": the group of peerd.
  uint32_t socket_mode = 0660;
  std::string socket_group;
  std::vector<std::string> allow_users;   // besides root and the daemon's own user; with
  std::vector<std::string> allow_groups;  // both empty, mode and group decide
  std::string listen;     // data port; [::] means IPv4 as well, and only that without IPv6
  std::string advertise;  // host:port at which other peers reach the data port; "": see advertise.h
  // "": no HTTP server. auto: port 29701 of loopback; none, with a warning, if that is taken.
  std::string http;
  std::string version;
  uint32_t lanes = 0;         // 0: automatic
  uint32_t user_share = 100;  // the most that one user may have of what all may, in percent
  uint64_t arena_limit = 0;
  uint64_t scratch_limit = 0;
  IoChoice io = IoChoice::kAuto;
  uint32_t poll_us = 100;     // how long the reactor polls before it sleeps, while ops are open or
                              // have just ended; 0: it does not poll
  uint32_t hash_threads = 0;  // 0: half of the processors, at most 8
  uint64_t state_rate = 0;    // bytes of shared state sent a second; 0: no limit
  uint64_t keep_state = 0;    // bytes of states that are kept for members; 0: none is kept
  uint32_t keep_state_for_ms = 600000;  // how long a kept state waits for the next member
  uint32_t drain_timeout_ms = 30000;    // how long members may take to leave after a signal
  // A join fails if no coordinator could be reached for this long.
  uint32_t coordinator_timeout_ms = 10000;
  uint32_t probe_interval_s = 0;         // between two probes of links; 0: links are not probed
  std::string zero_copy = "auto";        // auto, on, off
  std::string lane_encryption = "auto";  // auto, off, require
  std::string congestion;
  Recorder* recorder = nullptr;  // the flight recorder; outlives the daemon
  Dumps* dumps = nullptr;        // its files after faults; outlives the daemon
  int signal_fd = -1;            // a signalfd of SIGTERM and SIGINT; -1: signals are not watched
};

class Daemon {
 public:
  virtual ~Daemon() = default;

  // The addresses that are bound: with port numbers where the options had 0.
  virtual std::string listen_address() const = 0;
  virtual std::string socket_path() const = 0;
  virtual std::string http_address() const = 0;

  // Serves until the daemon is drained (OK), a second signal comes (Cancelled), or the ring fails
  // (another error). After an error the kernel may still use the daemon's memory: end the process
  // without destructors.
  virtual absl::Status Run() = 0;
};

// Opens everything that the system may refuse: the ring, ports, the socket path. On an error
// nothing stays open.
absl::StatusOr<std::unique_ptr<Daemon>> MakeDaemon(DaemonOptions options);

}  // namespace longhaul::peerd
