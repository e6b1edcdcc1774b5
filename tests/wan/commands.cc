#include "tests/wan/commands.h"

#include <netinet/in.h>

#include <algorithm>
#include <cctype>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace longhaul::wan {
namespace {

constexpr size_t kNameBytesMax = 32;

absl::Status Invalid(const std::string& problem) { return absl::InvalidArgumentError(problem); }

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&quoted, "\\", std::string(1, c));
    } else if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) {
      absl::StrAppendFormat(&quoted, "\\u%04x", static_cast<unsigned char>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

absl::Status WantWords(const std::vector<std::string>& words, size_t min, size_t max) {
  if (words.size() >= min && words.size() <= max) return absl::OkStatus();
  return Invalid(absl::StrCat(words[0], ": takes ", min - 1,
                              max == min ? "" : absl::StrCat(" to ", max - 1), " words, got ",
                              words.size() - 1));
}

struct Setting {
  std::string key;
  std::string value;
};

absl::StatusOr<std::vector<Setting>> ParseSettings(const std::vector<std::string>& words,
                                                   size_t first) {
  std::vector<Setting> settings;
  for (size_t i = first; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    if (equals == std::string::npos) return Invalid(absl::StrCat(words[i], " is no KEY=VALUE"));
    settings.push_back({words[i].substr(0, equals), words[i].substr(equals + 1)});
  }
  return settings;
}

absl::StatusOr<QueueLimit> ParseQueue(const std::string& value) {
  QueueLimit limit;
  if (value.ends_with('s')) {
    LH_ASSIGN_OR_RETURN(limit.time, ParseDuration(value));
  } else {
    LH_ASSIGN_OR_RETURN(limit.bytes, ParseBytes(value));
  }
  return limit;
}

absl::Status Apply(const Setting& setting, PairConfig* config) {
  const auto& [key, value] = setting;
  if (key == "delay") {
    LH_ASSIGN_OR_RETURN(config->delay, ParseDuration(value));
  } else if (key == "jitter") {
    LH_ASSIGN_OR_RETURN(config->jitter, ParseDuration(value));
  } else if (key == "rate") {
    LH_ASSIGN_OR_RETURN(config->rate, ParseRate(value));
  } else if (key == "queue") {
    LH_ASSIGN_OR_RETURN(config->queue, ParseQueue(value));
  } else if (key == "loss") {
    LH_ASSIGN_OR_RETURN(config->loss, ParseFraction(value));
  } else if (key == "flow_rate") {
    LH_ASSIGN_OR_RETURN(config->flow_rate, ParseRate(value));
  } else if (key == "flow_queue") {
    LH_ASSIGN_OR_RETURN(config->flow_queue, ParseQueue(value));
  } else {
    return Invalid(absl::StrCat(
        key, " is no setting of a pair: delay, jitter, rate, queue, loss, flow_rate, flow_queue"));
  }
  return absl::OkStatus();
}

absl::Status Apply(const Setting& setting, AccessConfig* config) {
  const auto& [key, value] = setting;
  if (key == "up") {
    LH_ASSIGN_OR_RETURN(config->up, ParseRate(value));
  } else if (key == "down") {
    LH_ASSIGN_OR_RETURN(config->down, ParseRate(value));
  } else if (key == "queue") {
    LH_ASSIGN_OR_RETURN(config->queue, ParseQueue(value));
  } else {
    return Invalid(absl::StrCat(key, " is no setting of an access: up, down, queue"));
  }
  return absl::OkStatus();
}

template <typename Config>
absl::Status ApplyAll(const std::vector<Setting>& settings, Config* config) {
  for (const Setting& setting : settings) LH_RETURN_IF_ERROR(Apply(setting, config));
  return absl::OkStatus();
}

double Ms(Nanos time) { return static_cast<double>(time) / kMillisecond; }

}  // namespace

std::string Commands::Execute(std::string_view line) {
  const Words words =
      absl::StrSplit(std::string(line), absl::ByAnyChar(" \t\r\n"), absl::SkipEmpty());
  absl::StatusOr<std::string> answer = Invalid("an empty line");
  if (!words.empty()) answer = Dispatch(words);
  if (!answer.ok()) {
    return absl::StrCat("{\"error\":", Quoted(std::string(answer.status().message())), "}");
  }
  return absl::StrCat("{\"ok\":true", *answer, "}");
}

// Returns what follows "ok":true in the answer.
absl::StatusOr<std::string> Commands::Dispatch(const Words& words) {
  const std::string& command = words[0];
  absl::Status done;
  if (command == "host") {
    done = AddHost(words);
  } else if (command == "set") {
    done = SetPairs(words, /*both_ways=*/false);
  } else if (command == "link") {
    done = SetPairs(words, /*both_ways=*/true);
  } else if (command == "access") {
    done = SetAccess(words);
  } else if (command == "flow") {
    done = SetFlow(words);
  } else if (command == "down") {
    done = SetDown(words, true);
  } else if (command == "up") {
    done = SetDown(words, false);
  } else if (command == "flows") {
    return Flows(words);
  } else if (command == "show" || command == "stats" || command == "reset") {
    LH_RETURN_IF_ERROR(WantWords(words, 1, 1));
    if (command == "show") return Show();
    if (command == "stats") return Stats();
    network_->ResetCounters();
    hooks_.reset();
  } else {
    done = Invalid(absl::StrCat(
        command,
        " is no command: host, set, link, access, flow, down, up, show, stats, flows, reset"));
  }
  LH_RETURN_IF_ERROR(done);
  return std::string();
}

absl::StatusOr<int> Commands::HostNamed(const std::string& name) const {
  const auto found = hosts_.find(name);
  if (found != hosts_.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [known, number] : hosts_) names.push_back(known);
  return Invalid(absl::StrCat("no host ", name, "; there are: ", absl::StrJoin(names, " ")));
}

absl::StatusOr<std::vector<int>> Commands::HostsNamed(const std::string& name) const {
  std::vector<int> numbers;
  if (name == "*") {
    for (const auto& [known, number] : hosts_) numbers.push_back(number);
  } else {
    LH_ASSIGN_OR_RETURN(const int number, HostNamed(name));
    numbers.push_back(number);
  }
  return numbers;
}

absl::Status Commands::AddHost(const Words& words) {
  LH_RETURN_IF_ERROR(WantWords(words, 5, 5));
  const std::string& name = words[1];
  const bool plain = std::ranges::all_of(
      name, [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_'; });
  if (!plain || name.size() > kNameBytesMax) {
    return Invalid(absl::StrCat("host name ", name, ": up to ", kNameBytesMax,
                                " letters, digits, - and _ are allowed"));
  }
  LH_ASSIGN_OR_RETURN(const int64_t number, ParseInteger(words[2]));
  if (number < 1 || number > kHostNumberMax) {
    return Invalid(absl::StrCat("host number ", number, ": 1 to ", kHostNumberMax));
  }
  if (hosts_.contains(name) || network_->HasHost(static_cast<int>(number))) {
    return Invalid(absl::StrCat("host ", name, " or number ", number, " is there already"));
  }
  LH_RETURN_IF_ERROR(hooks_.attach(static_cast<int>(number), words[3], words[4]));
  hosts_[name] = static_cast<int>(number);
  network_->AddHost(static_cast<int>(number));
  return absl::OkStatus();
}

absl::Status Commands::SetPairs(const Words& words, bool both_ways) {
  LH_RETURN_IF_ERROR(WantWords(words, 4, 64));
  LH_ASSIGN_OR_RETURN(const std::vector<int> sources, HostsNamed(words[1]));
  LH_ASSIGN_OR_RETURN(const std::vector<int> targets, HostsNamed(words[2]));
  LH_ASSIGN_OR_RETURN(const std::vector<Setting> settings, ParseSettings(words, 3));
  PairConfig trial;
  LH_RETURN_IF_ERROR(ApplyAll(settings, &trial));
  const auto set = [&](int src, int dst) {
    PairConfig config = network_->pair(src, dst);
    ApplyAll(settings, &config).IgnoreError();  // the trial has passed, so this passes
    network_->SetPair(src, dst, config);
  };
  for (const int src : sources) {
    for (const int dst : targets) {
      if (src == dst) continue;
      set(src, dst);
      if (both_ways) set(dst, src);
    }
  }
  return absl::OkStatus();
}

absl::Status Commands::SetAccess(const Words& words) {
  LH_RETURN_IF_ERROR(WantWords(words, 3, 8));
  LH_ASSIGN_OR_RETURN(const std::vector<int> hosts, HostsNamed(words[1]));
  LH_ASSIGN_OR_RETURN(const std::vector<Setting> settings, ParseSettings(words, 2));
  AccessConfig trial;
  LH_RETURN_IF_ERROR(ApplyAll(settings, &trial));
  for (const int host : hosts) {
    AccessConfig config = network_->access(host);
    LH_RETURN_IF_ERROR(ApplyAll(settings, &config));
    network_->SetAccess(host, config);
  }
  return absl::OkStatus();
}

absl::Status Commands::SetFlow(const Words& words) {
  LH_RETURN_IF_ERROR(WantWords(words, 6, 6));
  LH_ASSIGN_OR_RETURN(const int src, HostNamed(words[1]));
  LH_ASSIGN_OR_RETURN(const int dst, HostNamed(words[2]));
  LH_ASSIGN_OR_RETURN(const int64_t src_port, ParseInteger(words[3]));
  LH_ASSIGN_OR_RETURN(const int64_t dst_port, ParseInteger(words[4]));
  LH_ASSIGN_OR_RETURN(const int64_t rate, ParseRate(words[5]));
  if (src_port > 65535 || dst_port > 65535) return Invalid("ports are 0 to 65535");
  network_->SetFlowRate(
      src, dst, {IPPROTO_TCP, static_cast<uint16_t>(src_port), static_cast<uint16_t>(dst_port)},
      rate);
  return absl::OkStatus();
}

absl::Status Commands::SetDown(const Words& words, bool down) {
  LH_RETURN_IF_ERROR(WantWords(words, 2, 3));
  LH_ASSIGN_OR_RETURN(const std::vector<int> sources, HostsNamed(words[1]));
  if (words.size() == 2) {
    for (const int host : sources) network_->SetHostDown(host, down);
    return absl::OkStatus();
  }
  LH_ASSIGN_OR_RETURN(const std::vector<int> targets, HostsNamed(words[2]));
  for (const int src : sources) {
    for (const int dst : targets) {
      PairConfig config = network_->pair(src, dst);
      config.down = down;
      network_->SetPair(src, dst, config);
    }
  }
  return absl::OkStatus();
}

std::string Commands::Show() const {
  std::vector<std::string> hosts;
  std::vector<std::string> pairs;
  for (const auto& [src_name, src] : hosts_) {
    const AccessConfig& access = network_->access(src);
    hosts.push_back(absl::StrFormat(
        "{\"name\":\"%s\",\"number\":%d,\"up_bits\":%d,\"down_bits\":%d,\"down\":%s}", src_name,
        src, access.up, access.down, network_->host_down(src) ? "true" : "false"));
    for (const auto& [dst_name, dst] : hosts_) {
      if (src == dst) continue;
      const PairConfig& pair = network_->pair(src, dst);
      pairs.push_back(absl::StrFormat(
          "{\"src\":\"%s\",\"dst\":\"%s\",\"delay_ms\":%g,\"jitter_ms\":%g,\"rate_bits\":%d,"
          "\"loss\":%g,\"flow_rate_bits\":%d,\"down\":%s}",
          src_name, dst_name, Ms(pair.delay), Ms(pair.jitter), pair.rate, pair.loss, pair.flow_rate,
          pair.down ? "true" : "false"));
    }
  }
  return absl::StrCat(",\"hosts\":[", absl::StrJoin(hosts, ","), "],\"pairs\":[",
                      absl::StrJoin(pairs, ","), "]");
}

std::string Commands::Stats() const {
  std::vector<std::string> pairs;
  for (const auto& [src_name, src] : hosts_) {
    for (const auto& [dst_name, dst] : hosts_) {
      const PairCounters& counters = network_->counters(src, dst);
      if (counters.entered == 0) continue;
      pairs.push_back(absl::StrFormat(
          "{\"src\":\"%s\",\"dst\":\"%s\",\"packets\":%d,\"entered\":%d,\"delivered\":%d,"
          "\"delivered_bytes\":%d,\"lost\":%d,\"dropped\":%d,\"blackholed\":%d,"
          "\"queued_max_ms\":%.3f}",
          src_name, dst_name, counters.packets, counters.entered, counters.delivered,
          counters.delivered_bytes, counters.lost, counters.dropped, counters.blackholed,
          Ms(counters.queued_max)));
    }
  }
  return absl::StrCat(",\"pairs\":[", absl::StrJoin(pairs, ","),
                      "],\"emulator\":", hooks_.emulator());
}

absl::StatusOr<std::string> Commands::Flows(const Words& words) const {
  LH_RETURN_IF_ERROR(WantWords(words, 3, 3));
  LH_ASSIGN_OR_RETURN(const int src, HostNamed(words[1]));
  LH_ASSIGN_OR_RETURN(const int dst, HostNamed(words[2]));
  std::vector<std::string> flows;
  for (const FlowView& flow : network_->Flows(src, dst)) {
    flows.push_back(absl::StrFormat(
        "{\"protocol\":%d,\"src_port\":%d,\"dst_port\":%d,\"rate_bits\":%d,\"own_rate\":%s,"
        "\"delivered_bytes\":%d,\"dropped\":%d}",
        flow.key.protocol, flow.key.src_port, flow.key.dst_port, flow.rate,
        flow.rate_is_own ? "true" : "false", flow.delivered_bytes, flow.dropped));
  }
  return absl::StrCat(",\"flows\":[", absl::StrJoin(flows, ","), "]");
}

}  // namespace longhaul::wan
