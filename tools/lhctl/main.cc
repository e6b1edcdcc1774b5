// lhctl: the operator's command line.
//
// Exit codes: 0 done; 1 failed (no coordinator answers, or it refuses); 2 bad usage.
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/daemon/flags.h"
#include "base/daemon/host_port.h"
#include "base/daemon/tls_flags.h"
#include "base/log.h"
#include "base/recorder.h"
#include "tools/lhctl/admin_client.h"
#include "tools/lhctl/ca.h"
#include "tools/lhctl/doctor.h"
#include "tools/lhctl/examine.h"
#include "tools/lhctl/fetch_recording.h"
#include "tools/lhctl/links.h"
#include "tools/lhctl/recordings.h"
#include "tools/lhctl/render.h"
#include "tools/lhctl/token.h"
#include "tools/lhctl/top.h"

namespace {
constexpr char kDefaultCoordinator[] = "127.0.0.1:29602";
}

ABSL_FLAG(std::string, coordinator, kDefaultCoordinator,
          "--admin addresses of coordinators, host:port[,host:port...]; lhctl tries them in turn");
ABSL_FLAG(bool, json, false, "print JSON instead of tables");
ABSL_FLAG(bool, follow, false, "events: go on and print new events as they happen");
ABSL_FLAG(uint32_t, backlog, 0,
          "events: print at most so many past events; 0: all that the coordinator remembers");
ABSL_FLAG(bool, once, false, "top: print one table, after a second, and end");
ABSL_FLAG(int32_t, pid, -1,
          "doctor: the process of longhaul-peerd to look at; -1: the first one that runs here; 0: "
          "none");
ABSL_FLAG(std::string, run, "",
          "ca issue: the run that the certificate is for (default: all runs); token "
          "create: the run that the token is for, or * for all runs");
ABSL_FLAG(std::string, name, "", "ca issue: name of the holder, and of the files");
ABSL_FLAG(std::string, role, "trainer",
          "ca issue, token create: trainer (a host that takes part), observer, operator, or (ca "
          "issue only) coordinator");
ABSL_FLAG(std::string, token_file, "",
          "file with a join token of the role operator or observer, which only its owner may read; "
          "for a coordinator whose --admin asks for one");
ABSL_FLAG(std::string, ttl, "30d",
          "token create: how long the token is valid, for instance 90s, 30m, 72h or 30d");
ABSL_FLAG(std::string, label, "", "token create: a text for people, shown by token list");
ABSL_FLAG(uint32_t, groups, 0,
          "token create: in how many groups peers with the token may have members at a time; 0: no "
          "limit of its own");
ABSL_FLAG(uint32_t, members, 0,
          "token create: how many members peers with the token may have at a time; 0: no limit of "
          "its own");
ABSL_FLAG(uint32_t, runs, 0,
          "token create, for all runs: in how many runs peers with the token may have members at a "
          "time; 0: no limit of its own");
ABSL_FLAG(std::vector<std::string>, host, {},
          "ca issue: DNS names and IP addresses at which a coordinator is dialled");
ABSL_FLAG(uint32_t, days, 0,
          "ca: how long the certificate is valid; 0: ten years for init, one year for issue");
ABSL_FLAG(std::vector<std::string>, file, {},
          "dump, trace: files of --dump-dir to read, separated by commas; needs no coordinator");
ABSL_FLAG(uint32_t, last, 0,
          "dump, trace: at most so many ops and events of each process, the last ones; 0: 1000 for "
          "trace, all for dump");
ABSL_FLAG(uint32_t, timeout_ms, 5000,
          "dump, trace: how long a peer may take for each piece of 64 KiB");
ABSL_FLAG(std::string, reason, "", "drain, evict: a reason, for the members and for the log");

namespace longhaul {
namespace {

const ProgramInfo kInfo{
    "lhctl",
    "Shows what a longhaul-coordinator knows, and gives it orders.\n"
    "\n"
    "  lhctl [--coordinator=HOST:PORT] COMMAND [ARGUMENT] [--json]\n"
    "\n"
    "HOST:PORT is the coordinator's --admin address, not its port for peers. By default only\n"
    "the coordinator's own host reaches that address: run lhctl there.\n"
    "\n"
    "Commands; SELECTION is RUN or RUN/GROUP, and everything if you leave it out:\n"
    "  status [SELECTION]         groups: epoch, members, ring, ops in flight, what they wait for\n"
    "  runs                       runs with their number of members\n"
    "  members [SELECTION]        members in rank order\n"
    "  ring [SELECTION]           peers in ring order, with their traffic\n"
    "  links [SELECTION]          links between peers: rate and round trip, what is blocked\n"
    "  why [SELECTION]            why a group waits\n"
    "  top [SELECTION]            groups and peers with their rates, anew each second; --once\n"
    "  events [SELECTION]         what happened; --follow goes on, also across restarts\n"
    "  doctor                     what hinders Longhaul on this host, and what to do about it; "
    "needs\n"
    "                             no coordinator, no peerd and no rights; takes the coordinator's\n"
    "                             address for peers, too, to try the way to it\n"
    "  dump [PEER]                the flight recorder of a peer, or of the coordinator: its last "
    "ops\n"
    "                             and events; or --file=PATH: a file that a crash or a fault left\n"
    "  trace [SELECTION]          the last ops of all peers on one timeline, as JSON for\n"
    "                             ui.perfetto.dev; or --file=PATH[,PATH...]\n"
    "  drain PEER                 the peer's members leave at their next step boundary\n"
    "  evict RUN/GROUP/MEMBER     removes a member at once\n"
    "  token create --run=RUN     makes a join token and prints it; --role, --ttl, --label,\n"
    "                             --groups, --members, --runs\n"
    "  token list                 all join tokens, without their secrets\n"
    "  token revoke ID            refuses a join token from now on, and ends what uses it\n"
    "  ca init DIR                makes a certificate authority in a directory\n"
    "  ca issue DIR --name=NAME   issues DIR/NAME.crt and DIR/NAME.key; --role, --run, --host, "
    "--days\n"
    "  ca revoke DIR NAME|FILE    adds all certificates of NAME, or the one in FILE, to "
    "DIR/crl.pem,\n"
    "                             for --tls-crl of coordinators\n"
    "\n"
    "Exit codes: 0 done, 1 failed (doctor: something is wrong), 2 bad usage.",
    "LONGHAUL_LHCTL_"};

[[noreturn]] void Usage(const std::string& problem) {
  ExitUsage(kInfo, absl::StrCat(problem, "; see lhctl --help"));
}

int Fail(const absl::Status& status) {
  fprintf(stderr, "lhctl: %s\n", std::string(status.message()).c_str());
  return 1;
}

void Print(const std::string& text) {
  fwrite(text.data(), 1, text.size(), stdout);
  fflush(stdout);
}

uint32_t ParseGroup(const std::string& text) {
  uint32_t group = 0;
  if (!absl::SimpleAtoi(text, &group)) Usage(absl::StrCat("'", text, "' is not a group's number"));
  return group;
}

// Reads a SELECTION: "" (everything), RUN or RUN/GROUP.
v1::Selector ParseSelector(const std::string& text) {
  v1::Selector selector;
  const size_t slash = text.find('/');
  selector.set_run(text.substr(0, slash));
  if (slash != std::string::npos) selector.set_group(ParseGroup(text.substr(slash + 1)));
  if (!text.empty() && selector.run().empty()) Usage(absl::StrCat("no run in '", text, "'"));
  return selector;
}

template <class Response>
int Show(const absl::StatusOr<Response>& response, std::string (*render)(const Response&)) {
  if (!response.ok()) return Fail(response.status());
  Print(absl::GetFlag(FLAGS_json) ? RenderJson(*response, false) : render(*response));
  return 0;
}

int Events(AdminClient& client, const std::string& selection) {
  v1::WatchEventsRequest request;
  *request.mutable_selector() = ParseSelector(selection);
  request.set_follow(absl::GetFlag(FLAGS_follow));
  request.set_backlog(absl::GetFlag(FLAGS_backlog));
  const bool json = absl::GetFlag(FLAGS_json);
  const auto print = [json](const v1::Event& event) {
    Print(json ? RenderJson(event, true) : RenderEvent(event));
  };
  std::string told;
  const absl::Status ended =
      !request.follow()
          ? client.WatchEvents(request, print)
          : client.FollowEvents(request, print, [&told](const std::string& why) {
              if (why == told) return;
              told = why;
              fprintf(stderr, "lhctl: the stream of events ended, trying again: %s\n", why.c_str());
            });
  return ended.ok() ? 0 : Fail(ended);
}

// A hanging coordinator must not stop the clock of `lhctl top` for long.
constexpr std::chrono::milliseconds kTopDeadline{2000};
constexpr std::chrono::milliseconds kTopInterval{1000};
// How long other calls to one address may take.
constexpr std::chrono::seconds kCallMax{10};

// A recording has less than 3 MiB. More is no recording.
constexpr size_t kRecordingFileMax = 16 << 20;
// How many peers `lhctl trace` asks at once.
constexpr size_t kFetchThreads = 8;

// Shows the text in place of the one before on a terminal, and below it elsewhere.
void PrintScreen(const Top& top, bool terminal) {
  if (!terminal) return Print(top.Render(0, 0) + "\n");
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) size = {};
  // The last row stays free: a newline there would scroll.
  const size_t rows = size.ws_row > 1 ? size.ws_row - 1 : 0;
  std::string text = "\x1b[H";
  for (const char c : top.Render(rows, size.ws_col)) {
    // Erases what is left of the line before.
    if (c == '\n') text += "\x1b[K";
    text += c;
  }
  Print(text + "\x1b[J");
}

// The default address is the coordinator's port on loopback, which speaks in clear.
std::shared_ptr<tls::Files> AdminTls(const std::vector<std::string>& addresses) {
  if (absl::GetFlag(FLAGS_coordinator) == kDefaultCoordinator) return nullptr;
  const auto files = ClientTlsFromFlags("--coordinator", addresses);
  if (!files.ok()) Usage(std::string(files.status().message()));
  return *files;
}

int ShowTop(AdminClient&, const std::string& selection) {
  if (absl::GetFlag(FLAGS_json)) {
    Usage("top prints no JSON; `lhctl status --json` has the figures, as totals");
  }
  const v1::Selector selector = ParseSelector(selection);
  const auto addresses = *ParseAddressList(absl::GetFlag(FLAGS_coordinator));
  AdminClient client(addresses, kTopDeadline, AdminTls(addresses), absl::GetFlag(FLAGS_token_file));
  const bool once = absl::GetFlag(FLAGS_once);
  const bool terminal = !once && isatty(STDOUT_FILENO) != 0;
  Top top;
  if (terminal) Print("\x1b[2J");
  for (uint64_t round = 0;; ++round) {
    const auto begun = std::chrono::steady_clock::now();
    const absl::StatusOr<v1::GetOverviewResponse> overview = client.GetOverview(selector);
    const int64_t now_us = std::chrono::duration_cast<std::chrono::microseconds>(
                               std::chrono::steady_clock::now().time_since_epoch())
                               .count();
    if (overview.ok()) {
      top.Update(*overview, now_us);
    } else {
      // A run may not be back yet when the coordinator is. So only the first answer may be no.
      if (round == 0 || once) return Fail(overview.status());
      top.Lost(std::string(overview.status().message()), now_us);
    }
    // Rates need two answers.
    if (!once || round > 0) PrintScreen(top, terminal);
    if (once && round > 0) return 0;
    std::this_thread::sleep_until(begun + kTopInterval);
  }
}

int Drain(AdminClient& client, const std::string& peer) {
  v1::DrainRequest request;
  request.set_peer(peer);
  request.set_reason(absl::GetFlag(FLAGS_reason));
  if (const absl::Status status = client.Drain(request); !status.ok()) return Fail(status);
  if (!absl::GetFlag(FLAGS_json)) Print(absl::StrCat("peer ", peer, " was asked to drain\n"));
  return 0;
}

int Evict(AdminClient& client, const std::string& name) {
  const std::vector<std::string> parts = absl::StrSplit(name, '/');
  if (parts.size() != 3) Usage(absl::StrCat("'", name, "' is not RUN/GROUP/MEMBER"));
  v1::EvictRequest request;
  request.set_run(parts[0]);
  request.set_group(ParseGroup(parts[1]));
  request.set_member(parts[2]);
  request.set_reason(absl::GetFlag(FLAGS_reason));
  if (const absl::Status status = client.Evict(request); !status.ok()) return Fail(status);
  if (!absl::GetFlag(FLAGS_json)) Print(absl::StrCat("member ", name, " was evicted\n"));
  return 0;
}

int CreateToken(AdminClient& client) {
  v1::CreateTokenRequest request;
  request.set_run(absl::GetFlag(FLAGS_run));
  if (request.run().empty()) Usage("token create: give --run=RUN, or --run='*' for all runs");
  const std::optional<uint64_t> ttl_s = ParseTtl(absl::GetFlag(FLAGS_ttl));
  if (!ttl_s) {
    Usage(absl::StrCat("--ttl=", absl::GetFlag(FLAGS_ttl),
                       ": give a number and s, m, h or d, for instance 72h"));
  }
  request.set_ttl_s(*ttl_s);
  request.set_role(absl::GetFlag(FLAGS_role));
  request.set_label(absl::GetFlag(FLAGS_label));
  request.set_groups(absl::GetFlag(FLAGS_groups));
  request.set_members(absl::GetFlag(FLAGS_members));
  request.set_runs(absl::GetFlag(FLAGS_runs));
  const absl::StatusOr<v1::CreateTokenResponse> made = client.CreateToken(request);
  if (!made.ok()) return Fail(made.status());
  if (absl::GetFlag(FLAGS_json)) {
    Print(RenderJson(*made, false));
    return 0;
  }
  // The token alone goes to stdout, so that it can go into a file.
  Print(made->token() + "\n");
  fprintf(stderr, "%s", DescribeToken(made->about()).c_str());
  return 0;
}

int Token(AdminClient& client, const std::vector<std::string>& arguments) {
  const std::string order = arguments.size() > 1 ? arguments[1] : "";
  const size_t given = arguments.size() > 2 ? arguments.size() - 2 : 0;
  if (order == "create" && given == 0) return CreateToken(client);
  if (order == "list" && given == 0) return Show(client.ListTokens(), RenderTokens);
  if (order == "revoke" && given == 1) {
    v1::RevokeTokenRequest request;
    request.set_id(arguments[2]);
    const absl::Status revoked = client.RevokeToken(request);
    if (!revoked.ok()) return Fail(revoked);
    Print(absl::StrCat("token ", Printable(request.id()), " is revoked\n"));
    return 0;
  }
  Usage("token: give create, list, or revoke ID");
}

int Ca(const std::vector<std::string>& arguments) {
  constexpr uint32_t kCaDays = 3650;
  constexpr uint32_t kCertificateDays = 365;
  const std::string order = arguments.size() > 1 ? arguments[1] : "";
  const std::map<std::string, size_t> orders = {{"init", 3}, {"issue", 3}, {"revoke", 4}};
  const auto known = orders.find(order);
  if (known == orders.end()) Usage("ca: give init, issue or revoke");
  if (arguments.size() != known->second) {
    Usage(absl::StrCat("ca ", order, " needs DIR", order == "revoke" ? " and NAME or FILE" : ""));
  }
  const std::string& directory = arguments[2];
  const uint32_t days = absl::GetFlag(FLAGS_days);
  absl::Status done;
  std::string told;
  if (order == "init") {
    done = InitCa(directory, days != 0 ? days : kCaDays);
    told = absl::StrCat(directory, "/ca.crt is for --tls-ca of all programs; keep ", directory,
                        "/ca.key to yourself\n");
  } else if (order == "issue") {
    IssueOptions options;
    options.name = absl::GetFlag(FLAGS_name);
    options.role = absl::GetFlag(FLAGS_role);
    options.run = absl::GetFlag(FLAGS_run);
    options.hosts = absl::GetFlag(FLAGS_host);
    options.days = days != 0 ? days : kCertificateDays;
    done = IssueCertificate(directory, options);
    told = absl::StrCat(directory, "/", options.name, ".crt and ", directory, "/", options.name,
                        ".key are for --tls-cert and --tls-key\n");
  } else {
    const absl::StatusOr<size_t> revoked = RevokeCertificates(directory, arguments[3]);
    done = revoked.status();
    if (revoked.ok()) {
      told = absl::StrCat(*revoked, " of ", arguments[3], " revoked in ", directory,
                          "/crl.pem: copy that file to --tls-crl of the coordinator\n");
    }
  }
  if (absl::IsInvalidArgument(done)) Usage(std::string(done.message()));
  if (!done.ok()) return Fail(done);
  Print(told);
  return 0;
}

int Doctor(AdminClient&, const std::string&) {
  ExamineOptions options;
  // Main() has checked the list.
  options.coordinators = *ParseAddressList(absl::GetFlag(FLAGS_coordinator));
  options.tls = AdminTls(options.coordinators);
  options.token_file = absl::GetFlag(FLAGS_token_file);
  options.coordinators_named = absl::GetFlag(FLAGS_coordinator) != kDefaultCoordinator;
  if (const int32_t pid = absl::GetFlag(FLAGS_pid); pid >= 0) {
    if (pid > 0 && kill(pid, 0) != 0 && errno == ESRCH) {
      Usage(absl::StrCat("--pid=", pid, ": no such process here"));
    }
    options.choice.pid = pid;
  }
  const std::vector<Finding> findings = Diagnose(Examine(options));
  Print(absl::GetFlag(FLAGS_json) ? RenderFindingsJson(findings) : RenderFindings(findings));
  return ExitCodeOf(findings);
}

absl::StatusOr<Recording> ReadRecordingFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes;
  std::vector<char> buffer(1 << 16);
  while (bytes.size() <= kRecordingFileMax && file.good()) {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    bytes.append(buffer.data(), static_cast<size_t>(file.gcount()));
  }
  if (bytes.empty()) {
    return absl::NotFoundError(
        absl::StrCat("cannot read ", path, ": ", errno != 0 ? strerror(errno) : "it is empty"));
  }
  absl::StatusOr<Recording> recording = ParseRecording(bytes);
  if (recording.ok()) return recording;
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", std::string(recording.status().message())));
}

absl::StatusOr<TracedRecording> Fetch(AdminClient& client, const std::string& peer, uint32_t last) {
  const std::chrono::milliseconds patience(absl::GetFlag(FLAGS_timeout_ms));
  return FetchRecording(peer, {last, last}, [&](const v1::ReadRecordingRequest& request) {
    return client.ReadRecording(request, patience);
  });
}

int Dump(AdminClient& client, const std::string& peer) {
  const std::vector<std::string> files = absl::GetFlag(FLAGS_file);
  if (files.empty()) {
    const uint32_t last = absl::GetFlag(FLAGS_last);
    const auto traced = Fetch(client, peer, last == 0 ? UINT32_MAX : last);
    if (!traced.ok()) return Fail(traced.status());
    Print(absl::GetFlag(FLAGS_json) ? RenderRecordingJson(traced->recording)
                                    : RenderRecording(traced->recording));
    return 0;
  }
  if (!peer.empty()) Usage("dump: give a PEER or --file, not both");
  for (const std::string& path : files) {
    const absl::StatusOr<Recording> recording = ReadRecordingFile(path);
    if (!recording.ok()) return Fail(recording.status());
    Print(absl::GetFlag(FLAGS_json) ? RenderRecordingJson(*recording)
                                    : RenderRecording(*recording));
  }
  return 0;
}

// Asks the coordinator and all peers of the selection, several at a time. `silent` gets the names
// of those that gave no recording, and why.
absl::Status FetchAll(AdminClient& client, const v1::Selector& selector,
                      std::vector<TracedRecording>* recordings, std::vector<std::string>* silent) {
  const absl::StatusOr<v1::GetOverviewResponse> overview = client.GetOverview(selector);
  if (!overview.ok()) return overview.status();
  std::set<std::string> peers = {""};  // the coordinator
  for (const v1::GroupStatus& group : overview->groups()) {
    for (const v1::PeerStatus& peer : group.ring()) peers.insert(peer.peer());
    for (const v1::MemberStatus& member : group.members()) peers.insert(member.peer());
  }
  const std::vector<std::string> names(peers.begin(), peers.end());
  std::vector<absl::StatusOr<TracedRecording>> fetched(names.size(), absl::UnknownError(""));
  const uint32_t last = absl::GetFlag(FLAGS_last) == 0 ? 1000 : absl::GetFlag(FLAGS_last);
  std::atomic<size_t> next = 0;
  const auto addresses = *ParseAddressList(absl::GetFlag(FLAGS_coordinator));
  const auto tls = AdminTls(addresses);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < std::min(kFetchThreads, names.size()); ++t) {
    threads.emplace_back([&] {
      AdminClient own(addresses, kCallMax, tls, absl::GetFlag(FLAGS_token_file));
      for (size_t i = next++; i < names.size(); i = next++) fetched[i] = Fetch(own, names[i], last);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < names.size(); ++i) {
    if (fetched[i].ok()) {
      recordings->push_back(*std::move(fetched[i]));
    } else {
      silent->push_back(absl::StrCat(names[i].empty() ? "coordinator" : names[i], ": ",
                                     std::string(fetched[i].status().message())));
    }
  }
  return absl::OkStatus();
}

int Trace(AdminClient& client, const std::string& selection) {
  const v1::Selector selector = ParseSelector(selection);
  TraceOptions options{
      selector.run(), selector.has_group() ? int64_t{selector.group()} : int64_t{-1}, {}};
  const std::vector<std::string> files = absl::GetFlag(FLAGS_file);
  std::vector<TracedRecording> recordings;
  if (files.empty()) {
    const absl::Status fetched = FetchAll(client, selector, &recordings, &options.silent);
    if (!fetched.ok()) return Fail(fetched);
  }
  for (const std::string& path : files) {
    absl::StatusOr<Recording> recording = ReadRecordingFile(path);
    if (!recording.ok()) return Fail(recording.status());
    recordings.push_back({*std::move(recording)});
  }
  Print(RenderTrace(recordings, options));
  for (const std::string& why : options.silent) {
    fprintf(stderr, "lhctl: no recording of %s\n", Printable(why).c_str());
  }
  return options.silent.empty() ? 0 : 1;
}

struct Command {
  size_t arguments_min;
  size_t arguments_max;
  int (*run)(AdminClient& client, const std::string& argument);
};

const std::map<std::string, Command>& Commands() {
  static const auto* commands = new std::map<std::string, Command>{
      {"status",
       {0, 1,
        [](AdminClient& client, const std::string& selection) {
          return Show(client.GetOverview(ParseSelector(selection)), RenderStatus);
        }}},
      {"runs",
       {0, 0,
        [](AdminClient& client, const std::string&) {
          return Show(client.ListRuns(), RenderRuns);
        }}},
      {"members",
       {0, 1,
        [](AdminClient& client, const std::string& selection) {
          return Show(client.GetOverview(ParseSelector(selection)), RenderMembers);
        }}},
      {"ring",
       {0, 1,
        [](AdminClient& client, const std::string& selection) {
          return Show(client.GetRing(ParseSelector(selection)), RenderRing);
        }}},
      {"links",
       {0, 1,
        [](AdminClient& client, const std::string& selection) {
          return Show(client.GetLinks(ParseSelector(selection)), RenderLinks);
        }}},
      {"why",
       {0, 1,
        [](AdminClient& client, const std::string& selection) {
          return Show(client.Explain(ParseSelector(selection)), RenderWhy);
        }}},
      {"top", {0, 1, ShowTop}},
      {"events", {0, 1, Events}},
      {"doctor", {0, 0, Doctor}},
      {"dump", {0, 1, Dump}},
      {"trace", {0, 1, Trace}},
      {"drain", {1, 1, Drain}},
      {"evict", {1, 1, Evict}},
  };
  return *commands;
}

AdminClient MakeClient() {
  const auto addresses = ParseAddressList(absl::GetFlag(FLAGS_coordinator));
  if (!addresses.ok()) {
    Usage(absl::StrCat("--coordinator: ", std::string(addresses.status().message())));
  }
  return AdminClient(*addresses, kCallMax, AdminTls(*addresses), absl::GetFlag(FLAGS_token_file));
}

int Main(int argc, char** argv) {
  const std::vector<std::string> arguments = ParseFlagsOrExit(argc, argv, kInfo);
  // What matters of gRPC's messages comes back as an error of the call.
  SetLogLevel(LogLevel::kError);
  if (arguments.empty()) Usage("no command given");
  if (arguments[0] == "ca") return Ca(arguments);
  if (arguments[0] == "token") {
    AdminClient client = MakeClient();
    return Token(client, arguments);
  }
  const auto command = Commands().find(arguments[0]);
  if (command == Commands().end()) Usage(absl::StrCat("unknown command '", arguments[0], "'"));
  const size_t given = arguments.size() - 1;
  if (given < command->second.arguments_min) {
    Usage(absl::StrCat(arguments[0], " needs an argument"));
  }
  if (given > command->second.arguments_max) {
    Usage(absl::StrCat("unexpected argument '", arguments.back(), "'"));
  }
  AdminClient client = MakeClient();
  return command->second.run(client, given > 0 ? arguments[1] : "");
}

}  // namespace
}  // namespace longhaul

int main(int argc, char** argv) { return longhaul::Main(argc, argv); }
