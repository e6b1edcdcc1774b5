// longhaul-peerd: the daemon on each GPU host. See peerd/daemon/daemon.h.
#include <errno.h>
#include <signal.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/daemon/daemon.h"
#include "base/daemon/dumps.h"
#include "base/daemon/host_port.h"
#include "base/daemon/secret_file.h"
#include "base/daemon/tls_flags.h"
#include "base/daemon/version.h"
#include "base/log.h"
#include "base/recorder.h"
#include "peerd/daemon/daemon.h"
#include "peerd/ipc/ipc_socket.h"
#include "proto/wire/limits.h"

ABSL_FLAG(std::string, coordinator, "127.0.0.1:29600",
          "coordinator addresses, host:port[,host:port...]; tried in turn");
ABSL_FLAG(std::string, token_file, "",
          "file with a join token of the role trainer (lhctl token create), which only its owner "
          "may read; read at each connection, so a new token needs no restart; empty: none");
ABSL_FLAG(std::string, socket, "",
          "path of the Unix socket for trainers; empty: /run/longhaul/peerd.sock, or "
          "$XDG_RUNTIME_DIR/longhaul/peerd.sock where /run/longhaul cannot be written");
ABSL_FLAG(std::string, socket_mode, "0660",
          "mode of the socket: 0600 (only root and the daemon's own user may connect), 0660 (also "
          "--socket-group), 0666 (all users of the host, unless --allow-users or --allow-groups "
          "names who)");
ABSL_FLAG(std::string, socket_group, "",
          "group of the socket, name or number, whose members may connect; empty: that of the "
          "daemon");
ABSL_FLAG(std::string, allow_users, "",
          "users who may connect to the socket, names or numbers, separated by commas, besides "
          "root and the daemon's own user; with this flag or --allow-groups, --socket-group alone "
          "admits nobody");
ABSL_FLAG(std::string, allow_groups, "",
          "groups whose members may connect to the socket, names or numbers, separated by commas");
ABSL_FLAG(uint32_t, user_share, 100,
          "the most that one user of the socket may have of what all users together may: "
          "connections, members, arena, registered states, ops in flight; 1 to 100 percent");
ABSL_FLAG(std::string, listen, "[::]:29700",
          "address of the data port, host:port or [v6]:port; [::]: all addresses, those of IPv4, "
          "too; 0.0.0.0: those of IPv4; port 0: any free one");
ABSL_FLAG(std::string, advertise, "",
          "host:port at which other peers reach the data port; empty: derived from --listen and "
          "the route to the coordinator");
ABSL_FLAG(std::string, http, "auto",
          "address that serves /metrics, /healthz and /readyz over HTTP; empty: no HTTP server; "
          "auto: 127.0.0.1:29701, or none if another process has that port");
ABSL_FLAG(std::string, lanes, "auto", "TCP connections for tensor data per link: auto or 1 to 256");
ABSL_FLAG(uint64_t, arena_limit, 0,
          "bytes of memory that all trainers together may share with the daemon; 0: three quarters "
          "of the host's memory");
ABSL_FLAG(uint64_t, scratch_limit, 0,
          "bytes of scratch memory that all ops in flight together may use; 0: a quarter of the "
          "host's memory");
ABSL_FLAG(std::string, zero_copy, "auto",
          "zero-copy sends: on, off, or auto (on except on loopback, where the kernel copies "
          "anyway)");
ABSL_FLAG(std::string, lane_encryption, "auto",
          "which connections to other peers are encrypted: auto (those that leave this host), "
          "require (all) or off; peers of one run need fitting values");
ABSL_FLAG(std::string, congestion, "",
          "TCP congestion control of lanes, for instance bbr or cubic; empty: the system's "
          "default within a site, on long ways cubic, or bbr where cubic loses packets at random, "
          "and on loopback cubic, because cubic does not pace");
ABSL_FLAG(std::string, io, "auto",
          "what moves the bytes: uring (io_uring), epoll (needs more processor time), or auto "
          "(io_uring if the system allows it, else epoll)");
ABSL_FLAG(
    bool, until_stdin_ends, false,
    "drain and end, as after SIGTERM, when the standard input ends: for a peerd that belongs to "
    "one program, which holds the other end of a pipe");
ABSL_FLAG(uint32_t, poll_us, 100,
          "microseconds that the data plane polls before it sleeps, while an op of a trainer is "
          "open or has just ended; polling makes small ops faster; 0: never poll");
ABSL_FLAG(
    uint32_t, hash_threads, 0,
    "threads that hash shared state; 0: half of the host's processors, at least 1, at most 8");
ABSL_FLAG(
    uint64_t, state_rate, 0,
    "bytes of shared state that are sent to other hosts in a second, at most; 0: no limit, but "
    "running ops have half of each link or more");
ABSL_FLAG(uint64_t, keep_state, 0,
          "bytes of memory, for all members together, in which the daemon keeps a copy of each "
          "member's state after each sync; a trainer that crashed goes on from the copy when it "
          "joins again under the same name; 0: keep none");
ABSL_FLAG(uint32_t, keep_state_for_ms, 600000,
          "how long a kept state waits for the next member of its name");
ABSL_FLAG(uint32_t, probe_interval_s, 30,
          "seconds between two probes, which measure links whose traffic does not show what they "
          "carry; a probe sends at most 8 MiB in at most 3 s, and probes take at most a twentieth "
          "of the time; 0: never probe");
ABSL_FLAG(uint32_t, drain_timeout_ms, 30000,
          "after SIGTERM: how long members may take to reach their next step boundary");
ABSL_FLAG(uint32_t, coordinator_timeout_ms, 10000,
          "a join fails when no coordinator could be reached for this long");

namespace longhaul::peerd {
namespace {

absl::StatusOr<uint32_t> ParseLanes(const std::string& text) {
  if (text == "auto") return 0;
  uint32_t lanes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), lanes);
  if (error != std::errc() || end != text.data() + text.size() || lanes < 1 ||
      lanes > LH_LANES_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("--lanes=", text, ": give auto or a number from 1 to ", LH_LANES_MAX));
  }
  return lanes;
}

std::vector<std::string> Words(const std::string& list) {
  return absl::StrSplit(list, ',', absl::SkipWhitespace());
}

// Trainers without a path of their own look for the socket at the same place.
std::string DefaultSocketPath() {
  const std::string system = "/run/longhaul";
  if (access(system.c_str(), W_OK) == 0 || access("/run", W_OK) == 0) return system + "/peerd.sock";
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime != '\0') {
    return absl::StrCat(runtime, "/longhaul/peerd.sock");
  }
  return system + "/peerd.sock";
}

uint64_t HostMemoryBytes() {
  struct sysinfo info {};
  if (sysinfo(&info) != 0) return uint64_t{8} << 30;
  return uint64_t{info.totalram} * info.mem_unit;
}

absl::StatusOr<DaemonOptions> OptionsFromFlags() {
  DaemonOptions options;
  absl::StatusOr<std::vector<std::string>> coordinators =
      ParseAddressList(absl::GetFlag(FLAGS_coordinator));
  if (!coordinators.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--coordinator: ", std::string(coordinators.status().message())));
  }
  options.coordinators = *std::move(coordinators);
  absl::StatusOr<std::shared_ptr<tls::Files>> tls =
      ClientTlsFromFlags("--coordinator", options.coordinators);
  if (!tls.ok()) return tls.status();
  options.tls = *std::move(tls);
  options.token_file = absl::GetFlag(FLAGS_token_file);
  if (!options.token_file.empty()) {
    // Says now what would keep the daemon from ever reaching a coordinator.
    const auto token = ReadSecretFile("--token-file", options.token_file);
    if (!token.ok()) return token.status();
  }
  options.socket_path = absl::GetFlag(FLAGS_socket);
  if (options.socket_path.empty()) options.socket_path = DefaultSocketPath();
  absl::StatusOr<mode_t> mode = ParseSocketMode(absl::GetFlag(FLAGS_socket_mode));
  if (!mode.ok()) return mode.status();
  options.socket_mode = *mode;
  options.socket_group = absl::GetFlag(FLAGS_socket_group);
  options.allow_users = Words(absl::GetFlag(FLAGS_allow_users));
  options.allow_groups = Words(absl::GetFlag(FLAGS_allow_groups));
  options.user_share = absl::GetFlag(FLAGS_user_share);
  if (options.user_share < 1 || options.user_share > 100) {
    return absl::InvalidArgumentError(
        absl::StrCat("--user-share=", options.user_share, ": give 1 to 100"));
  }
  options.listen = absl::GetFlag(FLAGS_listen);
  options.advertise = absl::GetFlag(FLAGS_advertise);
  options.http = absl::GetFlag(FLAGS_http);
  for (const auto& [name, address] : {std::pair{"--listen", options.listen},
                                      {"--advertise", options.advertise},
                                      {"--http", options.http}}) {
    if (address.empty() && std::string(name) != "--listen") continue;
    if (address == "auto" && std::string(name) == "--http") continue;
    if (const auto parsed = ParseHostPort(address); !parsed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": ", std::string(parsed.status().message())));
    }
  }
  // The coordinator would refuse an address that other peers cannot use.
  if (const std::string& address = options.advertise; !address.empty()) {
    if (ParseHostPort(address)->port == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--advertise: port 0 of ", address, ": name the port that others reach"));
    }
    if (address.size() > LH_ENDPOINT_BYTES_MAX) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--advertise: ", address.size(), " bytes long, more than ", LH_ENDPOINT_BYTES_MAX));
    }
  }
  absl::StatusOr<uint32_t> lanes = ParseLanes(absl::GetFlag(FLAGS_lanes));
  if (!lanes.ok()) return lanes.status();
  options.lanes = *lanes;
  options.arena_limit = absl::GetFlag(FLAGS_arena_limit);
  if (options.arena_limit == 0) options.arena_limit = HostMemoryBytes() / 4 * 3;
  options.scratch_limit = absl::GetFlag(FLAGS_scratch_limit);
  if (options.scratch_limit == 0) options.scratch_limit = HostMemoryBytes() / 4;
  options.zero_copy = absl::GetFlag(FLAGS_zero_copy);
  if (options.zero_copy != "auto" && options.zero_copy != "on" && options.zero_copy != "off") {
    return absl::InvalidArgumentError(
        absl::StrCat("--zero-copy=", options.zero_copy, ": give auto, on or off"));
  }
  options.lane_encryption = absl::GetFlag(FLAGS_lane_encryption);
  if (options.lane_encryption != "auto" && options.lane_encryption != "off" &&
      options.lane_encryption != "require") {
    return absl::InvalidArgumentError(
        absl::StrCat("--lane-encryption=", options.lane_encryption, ": give auto, off or require"));
  }
  options.congestion = absl::GetFlag(FLAGS_congestion);
  const std::string io = absl::GetFlag(FLAGS_io);
  const std::optional<IoChoice> choice = ParseIoChoice(io);
  if (!choice) {
    return absl::InvalidArgumentError(absl::StrCat("--io=", io, ": give auto, uring or epoll"));
  }
  options.io = *choice;
  options.poll_us = absl::GetFlag(FLAGS_poll_us);
  if (options.poll_us > 10000) {
    return absl::InvalidArgumentError(
        absl::StrCat("--poll-us=", options.poll_us, ": give 0 to 10000"));
  }
  options.hash_threads = absl::GetFlag(FLAGS_hash_threads);
  if (options.hash_threads > 256) {
    return absl::InvalidArgumentError(
        absl::StrCat("--hash-threads=", options.hash_threads, ": give 0 to 256"));
  }
  options.state_rate = absl::GetFlag(FLAGS_state_rate);
  options.keep_state = absl::GetFlag(FLAGS_keep_state);
  options.keep_state_for_ms = absl::GetFlag(FLAGS_keep_state_for_ms);
  options.probe_interval_s = absl::GetFlag(FLAGS_probe_interval_s);
  if (options.probe_interval_s > 86400) {
    return absl::InvalidArgumentError(
        absl::StrCat("--probe-interval-s=", options.probe_interval_s, ": give 0 to 86400"));
  }
  options.drain_timeout_ms = absl::GetFlag(FLAGS_drain_timeout_ms);
  options.coordinator_timeout_ms = absl::GetFlag(FLAGS_coordinator_timeout_ms);
  options.version = kVersion;
  return options;
}

// Call this after StopSignalFd(), so that the signal waits there.
void StopWhenStdinEnds() {
  std::thread([] {
    char buffer[64];
    ssize_t got;
    do {
      got = read(STDIN_FILENO, buffer, sizeof buffer);
    } while (got > 0 || (got < 0 && errno == EINTR));
    kill(getpid(), SIGTERM);
  }).detach();
}

int Main(int argc, char** argv) {
  const ProgramInfo info{
      "longhaul-peerd",
      "Moves tensors between this host's trainers and other hosts, and answers for them.\n\n"
      "  longhaul-peerd --coordinator=HOST:PORT[,HOST:PORT...] [flags]",
      "LONGHAUL_PEERD_"};
  InitDaemon(argc, argv, info);
  absl::StatusOr<DaemonOptions> options = OptionsFromFlags();
  if (!options.ok()) ExitUsage(info, std::string(options.status().message()));
  options->signal_fd = StopSignalFd();
  if (absl::GetFlag(FLAGS_until_stdin_ends)) StopWhenStdinEnds();
  // Never destroyed: a crash may come at any time, also while the process ends.
  static auto& recorder = *new Recorder(info.name, kVersion);
  Dumps dumps({DumpDir(), info.name}, &recorder);
  options->recorder = &recorder;
  options->dumps = &dumps;
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = MakeDaemon(*std::move(options));
  if (!daemon.ok()) return FatalExit(daemon.status());
  const absl::Status ready = AnnounceReady({{"socket", (*daemon)->socket_path()},
                                            {"listen", (*daemon)->listen_address()},
                                            {"http", (*daemon)->http_address()}});
  if (!ready.ok()) return FatalExit(ready);
  if (const absl::Status status = (*daemon)->Run(); !status.ok()) {
    // A second signal asks for an end at once, or the ring has failed. The kernel may still use
    // memory of ops, so the process ends without destructors.
    std::_Exit(absl::IsCancelled(status) ? 1 : FatalExit(status));
  }
  return 0;
}

}  // namespace
}  // namespace longhaul::peerd

int main(int argc, char** argv) { return longhaul::peerd::Main(argc, argv); }
