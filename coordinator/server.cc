#include "coordinator/server.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/crypto/secrets.h"
#include "base/daemon/host_port.h"
#include "base/digest.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "coordinator/event_recorder.h"
#include "coordinator/store/store.h"

namespace longhaul::coordinator {
namespace {

// Returns the name for a new store. The name is random, with one exception: a store in memory is
// named after the host and the address. Such a store is new and empty at each start. Because its
// name stays the same, peers accept the restarted coordinator as one that has forgotten everything.
// If the system chooses the port, no peer can come back, so the name is random.
uint64_t StoreName(const ServerOptions& options) {
  const absl::StatusOr<HostPort> listen = ParseHostPort(options.listen);
  if (options.store == "memory" && listen.ok() && listen->port != 0) {
    char host[256] = {};
    gethostname(host, sizeof host - 1);
    const uint64_t name = Digester().Add(std::string(host)).Add(options.listen).value();
    if (name != 0) return name;
  }
  uint64_t name = 0;
  while (name == 0) {
    const std::string bytes = RandomBytes(sizeof name);
    memcpy(&name, bytes.data(), sizeof name);
  }
  return name;
}

// The options with addresses in place of defaults, and whether the ports that the coordinator can
// do without were named.
struct Chosen : ServerOptions {
  explicit Chosen(const ServerOptions& given) : ServerOptions(given) {
    const bool open = !tls.cert.empty() || insecure;
    if (listen.empty()) listen = open ? "0.0.0.0:29600" : "127.0.0.1:29600";
    if (!admin_named) admin = "127.0.0.1:29602";
    if (!http_named) http = "127.0.0.1:29601";
  }
  const bool admin_named = admin != "auto";
  const bool http_named = http != "auto";
};

// Whether a port is to be had: what came of starting its server. If only the default port cannot be
// had, because a second coordinator runs on this host for instance, the coordinator goes without.
absl::Status UnlessDefault(bool named, const absl::Status& started) {
  if (started.ok() || named) return started;
  Log(LogLevel::kWarning,
      absl::StrCat("the coordinator goes on without a port: ", started.message()));
  return absl::OkStatus();
}

bool OffLoopback(const std::string& address) {
  const auto parsed = ParseHostPort(address);
  return parsed.ok() && !IsLoopback(*parsed);
}

// What other hosts reach is encrypted, or allowed by --insecure.
absl::Status CheckTls(const ServerOptions& options) {
  const tls::Paths& tls = options.tls;
  if (tls.cert.empty() && (!tls.ca.empty() || !tls.crl.empty())) {
    return absl::InvalidArgumentError(
        "--tls-ca and --tls-crl are for TLS, which needs --tls-cert and --tls-key, too");
  }
  if (tls.ca.empty() && !tls.crl.empty()) {
    return absl::InvalidArgumentError("--tls-crl needs --tls-ca, the CA that has signed the CRL");
  }
  if (options.tls_connection_age_s < kTlsConnectionAgeMinS ||
      options.tls_connection_age_s > kTlsConnectionAgeMaxS) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tls-connection-age-s=", options.tls_connection_age_s, ": give ",
                     kTlsConnectionAgeMinS, " to ", kTlsConnectionAgeMaxS));
  }
  if (!tls.cert.empty() && options.insecure) {
    return absl::InvalidArgumentError(
        "--insecure contradicts --tls-cert: with TLS nothing goes in clear, and callers show who "
        "they are. Remove --insecure, or give --auth=none if whoever reaches the port may join");
  }
  const auto refuse = [](const char* flag, const std::string& address, const char* todo) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, "=", address, ": other hosts reach this address, ", todo));
  };
  if (tls.cert.empty() && !options.insecure) {
    for (const auto& [flag, address] :
         {std::pair("--listen", options.listen), std::pair("--admin", options.admin)}) {
      if (!OffLoopback(address)) continue;
      return refuse(flag, address,
                    "and nothing would be encrypted. Give --tls-cert, --tls-key and --tls-ca "
                    "(docs/security.md: lhctl ca makes the files), or --insecure in a private "
                    "network or a tunnel, or an address on loopback such as 127.0.0.1:29600");
    }
  }
  return absl::OkStatus();
}

// What callers of the two ports have to show: with a value other than kAuto.
struct Asked {
  Auth peers = Auth::kNone;
  Auth operators = Auth::kNone;
};

// InvalidArgument: a flag has another value, or asks for what no caller could show.
absl::StatusOr<Asked> AskedOf(const ServerOptions& options) {
  Asked asked;
  LH_ASSIGN_OR_RETURN(asked.peers, ParseAuth("--auth", options.auth));
  LH_ASSIGN_OR_RETURN(asked.operators, ParseAuth("--admin-auth", options.admin_auth));
  if (asked.peers == Auth::kAuto) {
    asked.peers = OffLoopback(options.listen) && !options.insecure ? Auth::kAny : Auth::kNone;
  }
  if (asked.operators == Auth::kAuto) {
    asked.operators = OffLoopback(options.admin) ? Auth::kAny : Auth::kNone;
  }
  for (const auto& [flag, auth] :
       {std::pair("--auth", asked.peers), std::pair("--admin-auth", asked.operators)}) {
    if ((auth == Auth::kCertificate || auth == Auth::kBoth) && options.tls.ca.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, "=", NameOf(auth),
                       ": without TLS nobody can show a certificate; give --tls-cert, --tls-key "
                       "and --tls-ca, the CA that issues the callers' certificates"));
    }
  }
  return asked;
}

void WarnOfClearPorts(const ServerOptions& options, const Asked& asked) {
  if (!options.tls.cert.empty()) return;
  if (OffLoopback(options.listen)) {
    Log(LogLevel::kWarning,
        absl::StrCat("--insecure: gRPC of peers is not encrypted, and ",
                     asked.peers == Auth::kNone ? "whoever reaches the port may join runs"
                                                : "whoever sees the packets can read join tokens",
                     LogField("listen", options.listen)));
  }
  if (OffLoopback(options.admin)) {
    Log(LogLevel::kWarning,
        absl::StrCat("--insecure: the port of operators is not encrypted, and ",
                     asked.operators == Auth::kNone
                         ? "whoever reaches it may evict members and drain peers"
                         : "whoever sees the packets can read operators' tokens",
                     LogField("admin", options.admin)));
  }
}

struct Port {
  const char* flag;
  const std::string* address;
  const char* service;
};

// The ports that the coordinator must have.
std::vector<Port> PortsOf(const Chosen& options) {
  std::vector<Port> ports = {{"--listen", &options.listen, "gRPC"}};
  if (options.admin_named && !options.admin.empty()) {
    ports.push_back({"--admin", &options.admin, "gRPC"});
  }
  if (options.http_named && !options.http.empty()) {
    ports.push_back({"--http", &options.http, "HTTP"});
  }
  return ports;
}

// Checks what needs no file and no socket.
absl::Status Check(const Chosen& options) {
  for (const Port& port : PortsOf(options)) {
    if (const auto address = ParseHostPort(*port.address); !address.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(port.flag, ": ", std::string(address.status().message())));
    }
  }
  LH_RETURN_IF_ERROR(CheckTls(options));
  const CoreConfig& core = options.core;
  if (core.detect_ms < kDetectMsMin || core.detect_ms > kDetectMsMax) {
    return absl::InvalidArgumentError(absl::StrCat("--detect-ms=", core.detect_ms, ": give ",
                                                   kDetectMsMin, " to ", kDetectMsMax));
  }
  if (core.ring_interval_ms > kRingIntervalMsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ring-interval-s=", core.ring_interval_ms / 1000, ": give at most ",
                     kRingIntervalMsMax / 1000));
  }
  return absl::OkStatus();
}

// Tries the ports before the loop starts. Each start of a loop raises the term of the store, and a
// coordinator that cannot serve must not do that.
absl::Status TryPorts(const Chosen& options) {
  for (const Port& port : PortsOf(options)) {
    LH_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(*port.address));
    LH_RETURN_IF_ERROR(TryListening(address, port.service, port.flag));
  }
  return absl::OkStatus();
}

void ExitOnFatal(const absl::Status& status) {
  Log(LogLevel::kError, absl::StrCat("the store failed, so the coordinator ends; start it again, "
                                     "and it goes on from what the store holds: ",
                                     std::string(status.message())));
  _Exit(1);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& given) {
  Chosen options(given);
  LH_RETURN_IF_ERROR(Check(options));
  LH_ASSIGN_OR_RETURN(const Asked asked, AskedOf(options));
  WarnOfClearPorts(options, asked);
  std::unique_ptr<Server> server(new Server);
  if (!options.tls.cert.empty()) {
    auto files =
        tls::Files::Open(options.tls, {[metrics = &server->metrics_](tls::Files::Change change) {
                           metrics->SetTlsFilesRefused(change == tls::Files::Change::kRefused);
                           if (change != tls::Files::Change::kRestored) {
                             metrics->OnTlsFiles(change == tls::Files::Change::kUsed);
                           }
                         }});
    if (!files.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("TLS: ", files.status().message()));
    }
    server->tls_ = *std::move(files);
    server->tls_->Watch();
    server->seen_ = std::make_shared<tls::SeenCertificates>(server->tls_);
  }
  const GrpcTls tls{server->tls_, options.tls_connection_age_s, server->seen_};
  if (options.store.empty()) {
    LH_ASSIGN_OR_RETURN(options.store, DefaultStore(kStateDirectory, ::getenv));
  }
  LH_ASSIGN_OR_RETURN(std::unique_ptr<Store> store, OpenStore(options.store));
  LH_RETURN_IF_ERROR(TryPorts(options));
  LH_ASSIGN_OR_RETURN(std::vector<TokenRecord> tokens, store->LoadTokens());
  TokenDesk::Options token_options;
  token_options.keep = [server = server.get()](TokenChange change, TokenDesk::Done done) {
    server->loop_->ChangeTokens(std::move(change), std::move(done));
  };
  server->tokens_ = std::make_unique<TokenDesk>(std::move(tokens), std::move(token_options));
  server->tokens_->SetOnRevoked([server = server.get()] { server->sweeper_.Wake(); });
  std::function<std::string(const std::string&)> why_not;
  if (server->seen_ != nullptr) {
    why_not = [seen = server->seen_](const std::string& fingerprint) {
      return seen->WhyNot(fingerprint);
    };
  }
  server->peers_ = std::make_unique<Authorizer>(
      Authorizer::Options{asked.peers, "--auth", Role::kTrainer, why_not}, server->tokens_.get(),
      &server->metrics_);
  server->operators_ = std::make_unique<Authorizer>(
      Authorizer::Options{asked.operators, "--admin-auth", Role::kOperator, why_not},
      server->tokens_.get(), &server->metrics_);
  CoordinatorLoop::Options loop;
  loop.core = options.core;
  loop.core.incarnation = absl::BytesToHexString(RandomBytes(8));
  loop.core.store = StoreName(options);
  loop.core.entropy = RandomBytes(32);
  if (options.recorder != nullptr) {
    loop.observe = [ring = &options.recorder->events(), dumps = options.dumps](
                       const EventRecord& event, Tick now) {
      RecordEvent(event, now, ring);
      if (dumps != nullptr && IsFault(event)) dumps->Fault(event.text);
    };
  }
  loop.fatal = options.fatal ? options.fatal : ExitOnFatal;
  LH_ASSIGN_OR_RETURN(server->loop_,
                      CoordinatorLoop::Start(std::move(loop), std::move(store), &server->metrics_));
  server->desk_ = std::make_unique<RecordingDesk>(options.recorder);
  if (!options.http.empty()) {
    auto web = Web::Start(options.http, server->loop_.get(), &server->metrics_);
    LH_RETURN_IF_ERROR(UnlessDefault(options.http_named, web.status()));
    if (web.ok()) server->web_ = *std::move(web);
  }
  if (!options.admin.empty()) {
    auto admin = GrpcServer::StartForOperators(
        options.admin, server->loop_.get(), server->desk_.get(), server->tokens_.get(),
        server->operators_.get(), OffLoopback(options.admin) ? tls : GrpcTls{}, &server->metrics_);
    LH_RETURN_IF_ERROR(UnlessDefault(options.admin_named, admin.status()));
    if (admin.ok()) server->admin_ = *std::move(admin);
  }
  // The last step: from here on peers connect.
  LH_ASSIGN_OR_RETURN(server->grpc_, GrpcServer::StartForPeers(
                                         options.listen, server->loop_.get(), &server->metrics_,
                                         server->desk_.get(), server->peers_.get(), tls));
  server->sweeper_.Start([server = server.get()] { server->EndLapsedStreams(); });
  Log(LogLevel::kInfo, "coordinator serving" + LogField("grpc", server->grpc_address()) +
                           LogField("admin", server->admin_address()) +
                           LogField("tls", server->tls_ == nullptr ? "off" : "on") +
                           LogField("auth", NameOf(asked.peers)) +
                           LogField("admin_auth", NameOf(asked.operators)) +
                           LogField("http", server->http_address()) +
                           LogField("store", server->loop_->store_name()) +
                           LogField("incarnation", server->incarnation()) +
                           LogField("detect_ms", std::to_string(options.core.detect_ms)));
  return server;
}

Server::~Server() {
  if (grpc_) Stop();
  // The thread of web_ queries the loop, so web_ goes before the loop.
  web_.reset();
  // gRPC may keep the files for a while, but not the metrics.
  if (tls_) tls_->StopWatching();
}

void Server::EndLapsedStreams() {
  const auto lapsed = [this](const Caller& caller) { return peers_->Lapsed(caller); };
  grpc_->EndStreamsOf(lapsed);
  if (admin_) admin_->EndStreamsOf(lapsed);
}

void Server::Stop(std::chrono::milliseconds grace) {
  if (web_) web_->SetStopping();
  sweeper_.Stop();
  grpc_->Stop(grace);
  if (admin_) admin_->Stop(grace);
}

}  // namespace longhaul::coordinator
