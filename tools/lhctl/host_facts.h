// What `lhctl doctor` reads of the machine it runs on: the kernel's settings, the limits of
// processes, and how longhaul-peerd was started here. Reads only; needs no rights. What cannot be
// read (in a container, or because it belongs to another user) stays unset. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace longhaul {

inline constexpr uint64_t kUnlimited = UINT64_MAX;

// A process of longhaul-peerd, or how the next one would be started.
struct PeerdFacts {
  int pid = 0;  // 0: no process runs here
  // Where the flags below come from: "process 17", a file, or "" (the defaults of longhaul-peerd).
  std::string source;
  std::vector<std::string> coordinators;  // empty: nobody has named one
  std::string listen = "[::]:29700";
  std::string http = "127.0.0.1:29701";  // empty: no HTTP server
  std::string advertise;
  std::string io = "auto";
  std::string congestion;
  std::string tls_ca;  // empty: peerd speaks to the coordinator in clear
};

struct LimitFacts {
  std::string of;  // the process: "longhaul-peerd, process 17", or "lhctl"
  std::optional<uint64_t> nofile_hard;
  std::optional<uint64_t> memlock;
  bool ipc_lock = false;  // the process has the capability IPC_LOCK
  bool seccomp = false;   // the process runs under a seccomp filter
};

struct ClockFacts {
  bool synchronised = false;
  int64_t error_us = 0;  // the kernel's bound of the error, if it is synchronised
};

struct HostFacts {
  std::string hostname;
  std::string kernel;  // "6.1.0-13-amd64"
  uint64_t memory_bytes = 0;
  // Other processes of longhaul-peerd run here, too.
  size_t peerds = 0;
  PeerdFacts peerd;
  LimitFacts limits;
  std::optional<int64_t> uring_disabled;  // kernel.io_uring_disabled
  // Sysctls as the kernel prints them; empty: not visible here.
  std::string tcp_rmem, tcp_wmem, rmem_max, wmem_max;
  std::string congestion, congestions;  // in use; available
  std::string slow_start_after_idle;
  std::optional<ClockFacts> clock;
};

struct HostPlaces {
  std::string proc = "/proc";
  std::string peerd_conf = "/etc/longhaul/peerd.conf";
};

// Which longhaul-peerd to look at.
struct PeerdChoice {
  // Unset: the one with the lowest process id. 0: none.
  std::optional<int> pid;
};

HostFacts ReadHost(const HostPlaces& places, const PeerdChoice& choice);

// What flags `peerd` was given by a file of lines `name=value` (as --config=FILE), by environment
// variables (each "NAME=value"), and by arguments; later ones win. Other flags are ignored.
void ApplyPeerdConfig(const std::string& text, PeerdFacts* peerd);
void ApplyPeerdEnvironment(const std::vector<std::string>& environment, PeerdFacts* peerd);
void ApplyPeerdArguments(const std::vector<std::string>& arguments, PeerdFacts* peerd);

}  // namespace longhaul
