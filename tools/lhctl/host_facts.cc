#include "tools/lhctl/host_facts.h"

#include <dirent.h>
#include <sys/sysinfo.h>
#include <sys/timex.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace longhaul {
namespace {

constexpr int kCapIpcLock = 14;

// The text of a small file; none if it cannot be read.
std::optional<std::string> Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) return std::nullopt;
  return text.str();
}

std::string Sysctl(const HostPlaces& places, const std::string& name) {
  const auto text = Read(absl::StrCat(places.proc, "/sys/", name));
  if (!text) return "";
  std::string line(absl::StripAsciiWhitespace(*text));
  absl::StrReplaceAll({{"\t", " "}}, &line);
  return line;
}

std::vector<std::string> NulSeparated(const std::string& text) {
  return absl::StrSplit(absl::StripSuffix(text, absl::string_view("\0", 1)), '\0');
}

// The processes named longhaul-peerd, in order of their ids.
std::vector<int> FindPeerds(const HostPlaces& places) {
  std::vector<int> pids;
  DIR* const directory = opendir(places.proc.c_str());
  if (directory == nullptr) return pids;
  while (const dirent* entry = readdir(directory)) {
    int pid = 0;
    if (!absl::SimpleAtoi(entry->d_name, &pid)) continue;
    const auto name = Read(absl::StrCat(places.proc, "/", pid, "/comm"));
    if (name && absl::StripAsciiWhitespace(*name) == "longhaul-peerd") pids.push_back(pid);
  }
  closedir(directory);
  std::sort(pids.begin(), pids.end());
  return pids;
}

// Sets the flag if doctor looks at it. `name` is written with '_'.
void SetFlag(const std::string& name, const std::string& value, PeerdFacts* peerd) {
  if (name == "coordinator") peerd->coordinators = absl::StrSplit(value, ',', absl::SkipEmpty());
  if (name == "listen") peerd->listen = value;
  if (name == "http") peerd->http = value == "auto" ? PeerdFacts().http : value;
  if (name == "advertise") peerd->advertise = value;
  if (name == "io") peerd->io = value;
  if (name == "tls_ca") peerd->tls_ca = value;
  if (name == "congestion") peerd->congestion = value;
}

// The flags among the arguments, by name.
std::map<std::string, std::string> FlagsOf(const std::vector<std::string>& arguments) {
  std::map<std::string, std::string> flags;
  for (size_t i = 1; i < arguments.size(); ++i) {
    absl::string_view argument = arguments[i];
    if (!absl::ConsumePrefix(&argument, "-")) continue;
    absl::ConsumePrefix(&argument, "-");
    const std::vector<std::string> parts = absl::StrSplit(argument, absl::MaxSplits('=', 1));
    const std::string name = absl::StrReplaceAll(parts[0], {{"-", "_"}});
    if (parts.size() == 2) {
      flags[name] = parts[1];
    } else if (i + 1 < arguments.size() && !absl::StartsWith(arguments[i + 1], "-")) {
      flags[name] = arguments[++i];
    }
  }
  return flags;
}

// The value of a string in the flat JSON object that --ready-file gets.
std::string JsonString(const std::string& json, const std::string& name) {
  const std::string key = absl::StrCat("\"", name, "\"");
  size_t at = json.find(key);
  if (at == std::string::npos) return "";
  at = json.find('"', at + key.size());
  if (at == std::string::npos) return "";
  const size_t end = json.find('"', at + 1);
  return end == std::string::npos ? "" : json.substr(at + 1, end - at - 1);
}

PeerdFacts ReadPeerd(const HostPlaces& places, int pid) {
  const std::string process = absl::StrCat(places.proc, "/", pid);
  PeerdFacts peerd;
  peerd.pid = pid;
  peerd.source = absl::StrCat("process ", pid);
  const auto command_line = Read(process + "/cmdline");
  const std::vector<std::string> arguments = NulSeparated(command_line.value_or(""));
  std::map<std::string, std::string> flags = FlagsOf(arguments);
  for (const char* const name : {"config", "flagfile"}) {
    if (flags.contains(name)) ApplyPeerdConfig(Read(flags[name]).value_or(""), &peerd);
  }
  auto environment = Read(process + "/environ");
  // Only root may read it (peerd forbids core dumps). In a container, this program has the same
  // one.
  if (!environment) environment = Read(absl::StrCat(places.proc, "/self/environ"));
  if (environment) {
    ApplyPeerdEnvironment(NulSeparated(*environment), &peerd);
  }
  ApplyPeerdArguments(arguments, &peerd);
  // Port 0 means any free port. The ready file has the real ones.
  if (flags.contains("ready_file")) {
    const std::string ready = Read(flags["ready_file"]).value_or("");
    if (const std::string listen = JsonString(ready, "listen"); !listen.empty()) {
      peerd.listen = listen;
    }
    if (ready.find("\"http\"") != std::string::npos) peerd.http = JsonString(ready, "http");
  }
  return peerd;
}

std::optional<uint64_t> ParseLimit(absl::string_view text) {
  if (text == "unlimited") return kUnlimited;
  uint64_t value = 0;
  if (!absl::SimpleAtoi(text, &value)) return std::nullopt;
  return value;
}

LimitFacts ReadLimits(const HostPlaces& places, int pid) {
  LimitFacts limits;
  limits.of = pid == 0 ? "lhctl" : absl::StrCat("longhaul-peerd, process ", pid);
  const std::string process =
      absl::StrCat(places.proc, "/", pid == 0 ? "self" : std::to_string(pid));
  const std::string text = Read(process + "/limits").value_or("");
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    // "Max open files            1024                 4096                 files"
    for (const auto& [name, hard] :
         {std::pair{"Max open files", true}, {"Max locked memory", false}}) {
      absl::string_view rest = line;
      if (!absl::ConsumePrefix(&rest, name)) continue;
      const std::vector<absl::string_view> words = absl::StrSplit(rest, ' ', absl::SkipEmpty());
      if (words.size() < 2) continue;
      (hard ? limits.nofile_hard : limits.memlock) = ParseLimit(words[hard ? 1 : 0]);
    }
  }
  const std::string status = Read(process + "/status").value_or("");
  for (const absl::string_view line : absl::StrSplit(status, '\n')) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar("\t "), absl::SkipEmpty());
    if (words.size() < 2) continue;
    uint64_t capabilities = 0;
    if (words[0] == "CapEff:" && absl::SimpleHexAtoi(words[1], &capabilities)) {
      limits.ipc_lock = (capabilities >> kCapIpcLock & 1) != 0;
    }
    if (words[0] == "Seccomp:") limits.seccomp = words[1] == "2";
  }
  return limits;
}

std::optional<ClockFacts> ReadClock() {
  struct timex state {};
  const int rc = adjtimex(&state);
  if (rc < 0) return std::nullopt;
  return ClockFacts{.synchronised = rc != TIME_ERROR && (state.status & STA_UNSYNC) == 0,
                    .error_us = static_cast<int64_t>(state.maxerror)};
}

}  // namespace

void ApplyPeerdConfig(const std::string& text, PeerdFacts* peerd) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    absl::string_view rest = absl::StripAsciiWhitespace(line);
    if (rest.empty() || rest[0] == '#') continue;
    absl::ConsumePrefix(&rest, "--");
    const std::vector<std::string> parts = absl::StrSplit(rest, absl::MaxSplits('=', 1));
    if (parts.size() == 2) {
      SetFlag(absl::StrReplaceAll(parts[0], {{"-", "_"}}), parts[1], peerd);
    }
  }
}

void ApplyPeerdEnvironment(const std::vector<std::string>& environment, PeerdFacts* peerd) {
  // A variable of the program itself wins over one for all programs, so it comes last.
  for (const bool own : {false, true}) {
    for (const absl::string_view variable : environment) {
      absl::string_view rest = variable;
      const bool is_own = absl::ConsumePrefix(&rest, "LONGHAUL_PEERD_");
      if (is_own != own || (!is_own && !absl::ConsumePrefix(&rest, "LONGHAUL_"))) continue;
      const std::vector<std::string> parts = absl::StrSplit(rest, absl::MaxSplits('=', 1));
      if (parts.size() == 2 && !parts[1].empty()) {
        SetFlag(absl::AsciiStrToLower(parts[0]), parts[1], peerd);
      }
    }
  }
}

void ApplyPeerdArguments(const std::vector<std::string>& arguments, PeerdFacts* peerd) {
  for (const auto& [name, value] : FlagsOf(arguments)) SetFlag(name, value, peerd);
}

HostFacts ReadHost(const HostPlaces& places, const PeerdChoice& choice) {
  HostFacts facts;
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) == 0) facts.hostname = name;
  struct utsname kernel {};
  if (uname(&kernel) == 0) facts.kernel = kernel.release;

  struct sysinfo info {};
  if (sysinfo(&info) == 0) facts.memory_bytes = uint64_t{info.totalram} * info.mem_unit;

  std::vector<int> pids = FindPeerds(places);
  facts.peerds = pids.size();
  if (choice.pid) pids = *choice.pid == 0 ? std::vector<int>() : std::vector<int>{*choice.pid};
  if (!pids.empty()) {
    facts.peerd = ReadPeerd(places, pids.front());
  } else if (const auto config = Read(places.peerd_conf)) {
    ApplyPeerdConfig(*config, &facts.peerd);
    facts.peerd.source = places.peerd_conf;
  }
  facts.limits = ReadLimits(places, facts.peerd.pid);

  int64_t disabled = 0;
  if (absl::SimpleAtoi(Sysctl(places, "kernel/io_uring_disabled"), &disabled)) {
    facts.uring_disabled = disabled;
  }
  facts.tcp_rmem = Sysctl(places, "net/ipv4/tcp_rmem");
  facts.tcp_wmem = Sysctl(places, "net/ipv4/tcp_wmem");
  facts.rmem_max = Sysctl(places, "net/core/rmem_max");
  facts.wmem_max = Sysctl(places, "net/core/wmem_max");
  facts.congestion = Sysctl(places, "net/ipv4/tcp_congestion_control");
  facts.congestions = Sysctl(places, "net/ipv4/tcp_available_congestion_control");
  facts.slow_start_after_idle = Sysctl(places, "net/ipv4/tcp_slow_start_after_idle");
  facts.clock = ReadClock();
  return facts;
}

}  // namespace longhaul
