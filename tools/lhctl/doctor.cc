#include "tools/lhctl/doctor.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/daemon/host_port.h"
#include "tools/lhctl/render.h"

namespace longhaul {
namespace {

constexpr uint64_t kNofileGood = 8192;  // as docs/operations.md says
constexpr uint64_t kNofileMin = 1024;
constexpr uint64_t kBufferBytesGood = 4 << 20;
constexpr uint32_t kMtuGood = 1280;  // the least of IPv6
// The largest packet of IPv4: the path over a loopback interface of 65536 carries no larger one.
constexpr uint32_t kPacketMax = 65535;
// A way is long from this round trip on: links then begin with several lanes.
constexpr uint32_t kLongWayUs = 5000;
constexpr int64_t kClockGoodUs = 1000000;
constexpr size_t kNamesMax = 8;

std::string Names(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kNamesMax);
  std::string text =
      absl::StrJoin(names.begin(), names.begin() + static_cast<ptrdiff_t>(shown), ", ");
  if (shown < names.size()) absl::StrAppend(&text, " and ", names.size() - shown, " more");
  return text;
}

std::string Millis(double us) { return absl::StrFormat("%.1f ms", us / 1000.0); }

std::string Limit(uint64_t bytes) { return bytes == kUnlimited ? "unlimited" : RenderBytes(bytes); }

// The longest round trip that was seen, in microseconds.
uint32_t LongestWay(const Symptoms& s) {
  uint32_t longest = 0;
  for (const CoordinatorSeen& each : s.coordinators) {
    longest = std::max(longest, each.reached.connect_us);
  }
  for (const Reached& each : s.members) longest = std::max(longest, each.connect_us);
  return longest;
}

bool OnLongWay(const Symptoms& s) { return LongestWay(s) >= kLongWayUs; }

Finding Kernel(const Symptoms& s) {
  Finding f{.check = "kernel",
            .seen = absl::StrCat("Linux ", s.host.kernel, " runs"),
            .why = "Longhaul needs 5.19 or later, and is tested with 6.x"};
  const std::vector<std::string> parts = absl::StrSplit(s.host.kernel, absl::ByAnyChar(".-+"));
  int major = 0;
  int minor = 0;
  if (parts.size() < 2 || !absl::SimpleAtoi(parts[0], &major) ||
      !absl::SimpleAtoi(parts[1], &minor)) {
    f.verdict = Rating::kUnknown;
  } else if (major < 5 || (major == 5 && minor < 19)) {
    f.verdict = Rating::kWrong;
    f.todo = "install a newer kernel, for instance 6.1 of Debian 12";
  } else if (major < 6) {
    f.verdict = Rating::kAdvice;
    f.todo = "take 6.1 or later: without it there are no zero-copy sends";
  }
  return f;
}

Finding Uring(const Symptoms& s) {
  Finding f{.check = "io_uring",
            .why =
                "peerd moves tensors with io_uring; without it peerd uses epoll, which takes "
                "more processor time and copies what it sends"};
  const std::string profile =
      "run the container with the seccomp profile deploy/docker/seccomp-peerd.json (in the image: "
      "/usr/share/longhaul/seccomp-peerd.json)";
  const std::string sysctl = "set it to 0 on the host: sysctl -w kernel.io_uring_disabled=0";
  const int64_t disabled = s.host.uring_disabled.value_or(0);
  if (s.uring_error.empty()) {
    f.seen = "io_uring can be set up here";
    if (s.host.peerd.io == "epoll") {
      f.seen += "; --io=epoll tells peerd not to use it";
    } else if (s.on_epoll.value_or(false)) {
      f.verdict = Rating::kAdvice;
      f.seen = absl::StrCat(
          "lhctl can set up io_uring, but longhaul-peerd, process ", s.host.peerd.pid,
          ", runs on epoll, so peerd is under another seccomp filter or under a lower limit");
      f.todo =
          absl::StrCat("read the warning 'epoll instead of io_uring' in peerd's log; ", profile);
    }
    return f;
  }
  f.verdict = s.host.peerd.io == "uring" ? Rating::kWrong : Rating::kAdvice;
  if (s.host.peerd.io == "epoll") f.verdict = Rating::kOk;
  if (disabled == 2) {
    f.seen = "kernel.io_uring_disabled=2 refuses io_uring to all processes";
    f.todo = sysctl;
  } else if (disabled == 1) {
    f.seen = absl::StrCat(
        "kernel.io_uring_disabled=1 refuses io_uring to processes without CAP_SYS_ADMIN outside "
        "the group kernel.io_uring_group",
        s.host.limits.seccomp ? ", and a seccomp filter is on, which may refuse it, too" : "");
    f.todo = sysctl;
    if (s.host.limits.seccomp) f.todo += absl::StrCat("; ", profile);
  } else if (s.host.limits.seccomp && (absl::StrContains(s.uring_error, "(EPERM)") ||
                                       absl::StrContains(s.uring_error, "(ENOSYS)"))) {
    f.seen =
        "a seccomp filter refuses io_uring, as the default profiles of Docker 25, containerd "
        "2 and podman do";
    f.todo = profile;
  } else {
    f.seen = s.uring_error;
    f.todo = "see what the text names";
  }
  if (f.verdict == Rating::kOk) f.todo.clear();
  return f;
}

Finding Memlock(const Symptoms& s) {
  Finding f{.check = "memlock",
            .why =
                "for zero-copy sends the kernel locks the memory that trainers share with "
                "peerd; beyond the limit peerd copies"};
  const LimitFacts& limits = s.host.limits;
  if (!limits.memlock) {
    f.verdict = Rating::kUnknown;
    f.seen = absl::StrCat("the limit of ", limits.of, " cannot be read");
    return f;
  }
  f.seen = absl::StrCat(limits.of, " may lock ", Limit(*limits.memlock), " of memory",
                        limits.ipc_lock ? ", and has IPC_LOCK, so no limit counts" : "");
  if (limits.ipc_lock || *limits.memlock >= s.host.memory_bytes / 4 * 3) return f;
  f.verdict = Rating::kAdvice;
  f.todo =
      "raise it (LimitMEMLOCK=infinity, --ulimit memlock=-1, ulimit -l unlimited), or give "
      "peerd the capability IPC_LOCK";
  return f;
}

Finding Nofile(const Symptoms& s) {
  Finding f{.check = "nofile",
            .why = "each lane is a file descriptor: up to 256 for each of at most 15 neighbours"};
  const LimitFacts& limits = s.host.limits;
  if (!limits.nofile_hard) {
    f.verdict = Rating::kUnknown;
    f.seen = absl::StrCat("the limit of ", limits.of, " cannot be read");
    return f;
  }
  f.seen = absl::StrCat(
      limits.of, " may open ",
      *limits.nofile_hard == kUnlimited ? "any number of" : absl::StrCat(*limits.nofile_hard),
      " files (hard limit)");
  if (*limits.nofile_hard >= kNofileGood) return f;
  f.verdict = *limits.nofile_hard < kNofileMin ? Rating::kWrong : Rating::kAdvice;
  f.todo = absl::StrCat("raise the hard limit to ", kNofileGood,
                        " or more (LimitNOFILE=, --ulimit nofile=, ulimit -Hn)");
  return f;
}

Finding Mtu(const Symptoms& s) {
  Finding f{.check = "mtu",
            .why =
                "packets larger than the path carries vanish where ICMP is dropped; then links "
                "fall back to packets of 576 bytes"};
  std::map<std::string, uint32_t> interfaces;
  std::vector<std::string> narrow;
  const auto add = [&](const Reached& reached) {
    if (!reached.error.empty() || reached.interface.empty()) return;
    interfaces[reached.interface] = reached.mtu;
    if (reached.path_mtu > 0 && reached.path_mtu < std::min(reached.mtu, kPacketMax)) {
      narrow.push_back(absl::StrCat(reached.address, " (", reached.path_mtu, ")"));
    }
  };
  for (const CoordinatorSeen& each : s.coordinators) add(each.reached);
  for (const Reached& each : s.members) add(each);
  if (interfaces.empty()) {
    f.verdict = Rating::kUnknown;
    f.seen = "no connection from here shows which interface is used";
    return f;
  }
  std::vector<std::string> seen;
  uint32_t least = UINT32_MAX;
  for (const auto& [name, mtu] : interfaces) {
    seen.push_back(absl::StrCat(name, " has ", mtu));
    least = std::min(least, mtu);
  }
  f.seen = Names(seen);
  if (!narrow.empty()) {
    f.verdict = Rating::kAdvice;
    absl::StrAppend(&f.seen, "; the path to these is narrower: ", Names(narrow));
    f.todo =
        "set the MTU of the interface to what the path carries, so that nothing depends on ICMP";
  } else if (least < kMtuGood) {
    f.verdict = Rating::kAdvice;
    f.todo = absl::StrCat("raise the MTU to ", kMtuGood, " or more: each packet carries a header");
  }
  return f;
}

Finding Buffers(const Symptoms& s) {
  Finding f{.check = "buffers", .why = "a lane carries at most one buffer in each round trip"};
  const auto most = [](const std::string& triple) {
    const std::vector<std::string> parts = absl::StrSplit(triple, ' ', absl::SkipEmpty());
    uint64_t bytes = 0;
    return parts.size() == 3 && absl::SimpleAtoi(parts[2], &bytes) ? bytes : 0;
  };
  const uint64_t receive = most(s.host.tcp_rmem);
  const uint64_t send = most(s.host.tcp_wmem);
  if (receive == 0 || send == 0) {
    f.verdict = Rating::kUnknown;
    f.seen = "net.ipv4.tcp_rmem and tcp_wmem cannot be read here";
    return f;
  }
  f.seen = absl::StrCat("net.ipv4.tcp_rmem allows ", RenderBytes(receive), ", tcp_wmem ",
                        RenderBytes(send));
  if (!s.host.rmem_max.empty() && !s.host.wmem_max.empty()) {
    absl::StrAppend(&f.seen, " (net.core.rmem_max=", s.host.rmem_max,
                    " and wmem_max=", s.host.wmem_max, " do not limit Longhaul)");
  }
  const uint64_t least = std::min(receive, send);
  absl::StrAppend(&f.why, ": here ", RenderBytes(least * 10), "/s at 100 ms");
  if (least >= kBufferBytesGood) return f;
  f.verdict = Rating::kAdvice;
  f.todo =
      "sysctl -w net.ipv4.tcp_rmem='4096 131072 6291456' net.ipv4.tcp_wmem='4096 16384 "
      "4194304', or more for long ways";
  return f;
}

Finding Congestion(const Symptoms& s) {
  Finding f{.check = "congestion",
            .why =
                "on long ways that lose packets though no queue is full, bbr carries more than "
                "cubic"};
  if (s.host.congestion.empty() || s.host.congestions.empty()) {
    f.verdict = Rating::kUnknown;
    f.seen = "net.ipv4.tcp_congestion_control cannot be read here";
    return f;
  }
  const std::vector<std::string> all = absl::StrSplit(s.host.congestions, ' ', absl::SkipEmpty());
  const auto available = [&all](const std::string& name) {
    return std::find(all.begin(), all.end(), name) != all.end();
  };
  const std::string& chosen = s.host.peerd.congestion;
  f.seen = absl::StrCat("the system uses ", s.host.congestion,
                        "; available: ", absl::StrJoin(all, ", "));
  if (!chosen.empty()) absl::StrAppend(&f.seen, "; peerd has --congestion=", chosen);
  if (!chosen.empty() && !available(chosen)) {
    f.verdict = Rating::kWrong;
    f.why = "peerd cannot open lanes with a congestion control that the kernel does not offer";
    f.todo = absl::StrCat("modprobe tcp_", chosen, ", or take --congestion away");
  } else if (!available("bbr") && OnLongWay(s)) {
    f.verdict = Rating::kAdvice;
    absl::StrAppend(&f.seen, "; a round trip takes ", Millis(LongestWay(s)));
    f.todo = "if links lose packets: modprobe tcp_bbr, and start peerd with --congestion=bbr";
  }
  return f;
}

Finding SlowStart(const Symptoms& s) {
  Finding f{.check = "slow start",
            .why =
                "with 1, a lane that was idle, as between the outer steps of DiLoCo, begins "
                "again with ten packets; that costs long ways several round trips"};
  if (s.host.slow_start_after_idle.empty()) {
    f.verdict = Rating::kUnknown;
    f.seen = "net.ipv4.tcp_slow_start_after_idle cannot be read here";
    return f;
  }
  f.seen = absl::StrCat("net.ipv4.tcp_slow_start_after_idle is ", s.host.slow_start_after_idle);
  if (s.host.slow_start_after_idle == "0" || !OnLongWay(s)) return f;
  f.verdict = Rating::kAdvice;
  absl::StrAppend(&f.seen, ", and a round trip takes ", Millis(LongestWay(s)));
  f.todo = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 (in a container: inside)";
  return f;
}

Finding Clock(const Symptoms& s) {
  Finding f{.check = "clock",
            .why =
                "Longhaul compares no clocks, but times in logs, events and metrics of two "
                "hosts only line up if their clocks agree"};
  if (s.host.clock) {
    f.seen = s.host.clock->synchronised
                 ? absl::StrCat("the clock is synchronised, within ",
                                Millis(static_cast<double>(s.host.clock->error_us)))
                 : "the kernel says that nothing synchronises the clock";
    if (!s.host.clock->synchronised) {
      f.verdict = Rating::kAdvice;
      f.todo = "run chrony or systemd-timesyncd (in a container or a virtual machine: on the host)";
    }
  } else {
    f.verdict = Rating::kUnknown;
    f.seen = "the kernel does not tell whether the clock is synchronised";
  }
  if (!s.admin || !s.admin->clock_ahead_us) {
    f.seen += "; the offset to the coordinator is not known";
    return f;
  }
  const int64_t ahead = *s.admin->clock_ahead_us;
  absl::StrAppend(&f.seen, "; it is ", Millis(static_cast<double>(std::abs(ahead))),
                  ahead >= 0 ? " ahead of" : " behind", " the coordinator's, give or take ",
                  Millis(static_cast<double>(s.admin->clock_error_us)));
  if (std::abs(ahead) - s.admin->clock_error_us > kClockGoodUs) {
    f.verdict = Rating::kAdvice;
    f.todo = "run chrony or systemd-timesyncd here and on the coordinator's host";
  }
  return f;
}

Finding Peerd(const Symptoms& s) {
  const PeerdFacts& peerd = s.host.peerd;
  Finding f{.check = "peerd", .why = "trainers of this host reach the others through it"};
  if (peerd.pid == 0) {
    f.verdict = Rating::kUnknown;
    f.seen = absl::StrCat("no longhaul-peerd was looked at (", s.host.peerds,
                          " run here); the next one would be started with ",
                          peerd.source.empty() ? "the default flags" : peerd.source);
    return f;
  }
  f.seen = absl::StrCat("longhaul-peerd runs as process ", peerd.pid);
  if (s.host.peerds > 1) absl::StrAppend(&f.seen, ", the one looked at of ", s.host.peerds);
  if (peerd.http.empty()) {
    absl::StrAppend(&f.seen, "; --http= is empty, so it cannot be asked whether it is ready");
    f.verdict = Rating::kUnknown;
  } else if (!s.readyz) {
    f.verdict = Rating::kWrong;
    absl::StrAppend(&f.seen, ", but does not answer at http://", peerd.http, "/readyz");
    f.todo = absl::StrCat("read its log; if it hangs, send SIGABRT to process ", peerd.pid,
                          " and start it again");
  } else if (!absl::StartsWith(*s.readyz, "ok")) {
    f.verdict = Rating::kWrong;
    absl::StrAppend(&f.seen, ", and says: ", absl::StripAsciiWhitespace(*s.readyz));
    f.todo = "see the line 'coordinator' below, and the log of peerd";
  } else {
    f.seen += " and is ready";
  }
  return f;
}

Finding DataPort(const Symptoms& s) {
  const PeerdFacts& peerd = s.host.peerd;
  Finding f{.check = "data port", .why = "the other hosts connect to this port"};
  if (s.data_port) {
    f.seen = absl::StrCat(
        "peerd listens at ", peerd.listen,
        peerd.advertise.empty() ? "" : absl::StrCat(", and tells the others ", peerd.advertise));
    if (s.data_port->error.empty()) return f;
    f.verdict = Rating::kWrong;
    f.seen = absl::StrCat("no connection to ", s.data_port->address,
                          ", peerd's --listen: ", s.data_port->error);
    f.todo = "let the firewall of this host accept the port, and see the log of peerd";
    return f;
  }
  f.seen = absl::StrCat(peerd.listen, ", where peerd would listen, is free");
  if (s.listen_error.empty()) return f;
  f.verdict = Rating::kWrong;
  f.seen = s.listen_error;
  f.todo = "end what has the port, or start peerd with another --listen";
  return f;
}

Finding Coordinator(const Symptoms& s) {
  Finding f{.check = "coordinator",
            .why = "without it nobody joins, and step boundaries wait; ops go on"};
  if (s.coordinators.empty()) {
    f.verdict = Rating::kUnknown;
    f.seen = "nobody has named a coordinator for peers";
    f.todo = "to try the way: lhctl doctor --coordinator=COORDINATOR_HOST:29600";
    return f;
  }
  std::vector<std::string> good;
  std::vector<std::string> bad;
  for (const CoordinatorSeen& each : s.coordinators) {
    const std::string& address = each.reached.address;
    if (!each.reached.error.empty()) {
      bad.push_back(absl::StrCat(address, ": ", each.reached.error));
      f.todo = "start the coordinator, or open its port --listen (29600) for this host";
    } else if (each.answer == CoordinatorSeen::Answer::kAdmin) {
      bad.push_back(absl::StrCat(address, " is the port for operators (--admin)"));
      f.todo = "give peerd the coordinator's --listen address, usually port 29600";
    } else if (each.answer == CoordinatorSeen::Answer::kOther) {
      bad.push_back(absl::StrCat(address, ": something listens, but no coordinator"));
      f.todo =
          "give peerd the coordinator's --listen address, usually port 29600; if it speaks TLS, "
          "give --tls-ca to lhctl, too";
    } else {
      good.push_back(absl::StrCat(address, " (", Millis(each.reached.connect_us), ")"));
    }
  }
  if (!good.empty()) f.seen = absl::StrCat("a coordinator answers at ", Names(good));
  if (!bad.empty()) {
    // peerd tries the addresses in turn, so one good address is enough.
    f.verdict = good.empty() ? Rating::kWrong : Rating::kAdvice;
    absl::StrAppend(&f.seen, good.empty() ? "" : "; not usable: ", Names(bad));
  }
  return f;
}

Finding Admin(const Symptoms& s) {
  Finding f{.check = "admin",
            .why = "lhctl asks the coordinator's port for operators who the members are"};
  if (s.admin) {
    f.seen = absl::StrCat("the coordinator answers at ", s.admin->address, ", version ",
                          s.admin->overview.version(), ", ", s.admin->overview.streams(),
                          " peers attached");
    return f;
  }
  f.verdict = s.admin_named ? Rating::kWrong : Rating::kUnknown;
  f.seen = s.admin_error;
  f.todo =
      "on the coordinator's host nothing is needed; elsewhere use a tunnel: ssh -N -L "
      "29602:127.0.0.1:29602 COORDINATOR_HOST";
  return f;
}

Finding Members(const Symptoms& s) {
  Finding f{.check = "members", .why = "each host has to reach the data port of every other host"};
  if (s.members.empty()) {
    f.verdict = s.admin ? Rating::kOk : Rating::kUnknown;
    f.seen = s.admin ? "no other host is a member now, so no data port was tried"
                     : "the other members are not known here (see 'admin'), so none was tried";
    return f;
  }
  std::vector<std::string> bad;
  const Reached* slowest = nullptr;
  for (const Reached& each : s.members) {
    if (!each.error.empty()) {
      bad.push_back(absl::StrCat(each.address, ": ", each.error));
    } else if (slowest == nullptr || each.connect_us > slowest->connect_us) {
      slowest = &each;
    }
  }
  f.seen = absl::StrCat(s.members.size() - bad.size(), " of ", s.members.size(),
                        " data ports of other members accept a connection from here");
  if (slowest != nullptr) {
    absl::StrAppend(&f.seen, ", ", slowest->address, " as the slowest in ",
                    Millis(slowest->connect_us));
  }
  if (bad.empty()) return f;
  f.verdict = Rating::kWrong;
  absl::StrAppend(&f.seen, "; not: ", Names(bad));
  const bool loopback = std::any_of(s.members.begin(), s.members.end(), [](const Reached& each) {
    const auto address = ParseHostPort(each.address);
    return !each.error.empty() && address.ok() && IsLoopback(*address);
  });
  f.todo = loopback
               ? "a peerd that tells only a loopback address needs --listen=[::]:29700 or "
                 "--advertise; open --listen (29700) of the other hosts for this host"
               : "open --listen (29700) of these hosts for this host, or set their --advertise";
  return f;
}

Finding ReachedBy(const Symptoms& s) {
  Finding f{.check = "reached by", .why = "the others have to reach this host, too"};
  std::vector<std::string> groups;
  std::vector<std::string> blocked;
  for (const v1::GroupStatus& group : s.admin
                                          ? s.admin->overview.groups()
                                          : google::protobuf::RepeatedPtrField<v1::GroupStatus>()) {
    std::set<std::string> own;
    for (const v1::PeerStatus& peer : group.ring()) {
      if (IsThisHost(s.host, peer)) own.insert(peer.peer());
    }
    if (own.empty()) continue;
    for (const v1::BlockedStatus& pair : group.blocked()) {
      if (own.contains(pair.a()) || own.contains(pair.b())) {
        blocked.push_back(absl::StrCat(pair.a(), " and ", pair.b(), " (", pair.reason(), ")"));
      }
    }
    if (group.epoch() > 0) {
      groups.push_back(absl::StrCat(group.run(), "/", group.group(), " with ",
                                    group.ring_size() - static_cast<int>(own.size())));
    }
  }
  if (!blocked.empty()) {
    f.verdict = Rating::kWrong;
    f.seen = absl::StrCat("these peers have no link of their own: ", Names(blocked));
    f.todo = "open both data ports between the two; until then a third host carries their link";
  } else if (groups.empty()) {
    f.verdict = Rating::kUnknown;
    f.seen = s.admin ? "this host's peerd has no member now; when one joins, the others try its "
                       "data port, and the join's error or `lhctl why` names what fails"
                     : "the groups of this host are not known here (see 'admin')";
  } else {
    f.seen = absl::StrCat("links stand between this host and all other peers: ", Names(groups));
  }
  return f;
}

Finding Timeouts(const Symptoms& s) {
  Finding f{.check = "timeouts",
            .why =
                "all follow from --detect-ms of the coordinator; more tolerates worse networks, "
                "less finds deaths sooner"};
  if (!s.admin) {
    f.verdict = Rating::kUnknown;
    f.seen = "detect_ms of this coordinator is not known here (see 'admin'); the default is 1500";
    return f;
  }
  const int64_t detect = s.admin->overview.detect_ms();
  f.seen = absl::StrCat(
      "detect_ms is ", detect, ": a host that falls silent is out after ", detect, " to ",
      detect + detect / 2, " ms; a broken path is built again ", detect / 10, " to ", detect / 5,
      " ms after its report, and given up after ", 4 * detect, " ms; ops of a dead trainer have ",
      2 * detect, " ms; a peer that only the coordinator misses is out after ", 4 * detect,
      " ms, and one that does not answer a new epoch after ", 6 * detect, " ms");
  const int64_t way_ms = LongestWay(s) / 1000;
  // A link tolerates 4 ms more for each millisecond above 100, but at most 4 * detect_ms.
  if (detect + 4 * (way_ms - 100) <= 4 * detect) return f;
  f.verdict = Rating::kAdvice;
  absl::StrAppend(&f.seen, "; a round trip takes ", way_ms, " ms, and what links tolerate ends at ",
                  4 * detect, " ms of silence");
  f.todo = absl::StrCat("start the coordinator with --detect-ms=", 2 * way_ms, " or more");
  return f;
}

const char* Name(Rating verdict) {
  switch (verdict) {
    case Rating::kOk:
      return "ok";
    case Rating::kUnknown:
      return "unknown";
    case Rating::kAdvice:
      return "advice";
    case Rating::kWrong:
      return "wrong";
  }
  return "wrong";
}

int64_t Count(const std::vector<Finding>& findings, Rating verdict) {
  return std::count_if(findings.begin(), findings.end(),
                       [verdict](const Finding& f) { return f.verdict == verdict; });
}

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : Printable(text)) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

}  // namespace

bool IsThisHost(const HostFacts& host, const v1::PeerStatus& peer) {
  if (host.peerd.pid == 0) return false;
  if (!host.peerd.advertise.empty()) return peer.endpoint() == host.peerd.advertise;
  const auto listen = ParseHostPort(host.peerd.listen);
  const auto endpoint = ParseHostPort(peer.endpoint());
  return listen.ok() && endpoint.ok() && peer.host() == host.hostname &&
         listen->port == endpoint->port;
}

std::vector<Finding> Diagnose(const Symptoms& s) {
  return {Kernel(s),     Uring(s),     Memlock(s),   Nofile(s),  Mtu(s),      Buffers(s),
          Congestion(s), SlowStart(s), Clock(s),     Peerd(s),   DataPort(s), Coordinator(s),
          Admin(s),      Members(s),   ReachedBy(s), Timeouts(s)};
}

std::string RenderFindings(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& f : findings) {
    text +=
        Printable(absl::StrFormat("%-7s  %-11s  %s. Why: %s.%s", Name(f.verdict), f.check, f.seen,
                                  f.why, f.todo.empty() ? "" : absl::StrCat(" Do: ", f.todo, ".")));
    text += '\n';
  }
  absl::StrAppend(&text, "\n", Count(findings, Rating::kWrong), " wrong, ",
                  Count(findings, Rating::kAdvice), " advice, ", Count(findings, Rating::kUnknown),
                  " unknown, ", Count(findings, Rating::kOk), " ok\n");
  return text;
}

std::string RenderFindingsJson(const std::vector<Finding>& findings) {
  std::vector<std::string> checks;
  checks.reserve(findings.size());
  for (const Finding& f : findings) {
    checks.push_back(absl::StrCat("  {\"check\": ", Quoted(f.check), ", \"verdict\": ",
                                  Quoted(Name(f.verdict)), ", \"seen\": ", Quoted(f.seen),
                                  ", \"why\": ", Quoted(f.why), ", \"do\": ", Quoted(f.todo), "}"));
  }
  return absl::StrCat("{\n \"wrong\": ", Count(findings, Rating::kWrong),
                      ",\n \"advice\": ", Count(findings, Rating::kAdvice),
                      ",\n \"unknown\": ", Count(findings, Rating::kUnknown),
                      ",\n \"ok\": ", Count(findings, Rating::kOk), ",\n \"checks\": [\n",
                      absl::StrJoin(checks, ",\n"), "\n ]\n}\n");
}

int ExitCodeOf(const std::vector<Finding>& findings) {
  return Count(findings, Rating::kWrong) > 0 ? 1 : 0;
}

}  // namespace longhaul
