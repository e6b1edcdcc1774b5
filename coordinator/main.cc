// longhaul-coordinator: agrees with the peers on who takes part. See coordinator/server.h.
#include <algorithm>
#include <chrono>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "base/daemon/daemon.h"
#include "base/daemon/dumps.h"
#include "base/daemon/service_manager.h"
#include "base/daemon/tls_flags.h"
#include "base/daemon/version.h"
#include "base/log.h"
#include "base/recorder.h"
#include "coordinator/server.h"

ABSL_FLAG(std::string, listen, "",
          "address for peers (gRPC), host:port or [v6]:port; port 0: any free one; default: "
          "0.0.0.0:29600 with --tls-cert or --insecure, else 127.0.0.1:29600");
ABSL_FLAG(
    std::string, admin, "auto",
    "address for lhctl (gRPC), in clear on loopback: everybody on this host may evict members "
    "and drain peers; elsewhere with TLS, for the roles operator and observer; empty: none; "
    "auto: 127.0.0.1:29602, or none if another process has that port");
ABSL_FLAG(std::string, tls_crl, "",
          "file with what the CAs of --tls-ca have revoked (PEM); new contents are used without a "
          "restart");
ABSL_FLAG(uint32_t, tls_connection_age_s, 45,
          "seconds after which a connection with TLS ends and its peer connects anew: so long, and "
          "about ten seconds, a revoked certificate or a removed CA may still be in use");
ABSL_FLAG(std::string, auth, "auto",
          "what peers have to show at --listen: none, token (a join token of the role trainer), "
          "certificate, any (one of the two), both; auto: none on loopback and with --insecure, "
          "else any");
ABSL_FLAG(std::string, admin_auth, "auto",
          "what operators and observers have to show at --admin, as for --auth; auto: none on "
          "loopback, else any");
ABSL_FLAG(std::string, http, "auto",
          "address of the status page, /metrics, /healthz and /readyz; empty: none; auto: "
          "127.0.0.1:29601, or none if another process has that port");
ABSL_FLAG(std::string, store, "",
          "where to keep what must survive a restart: sqlite:PATH, or memory (nothing survives; a "
          "restart removes all members); default: sqlite:/var/lib/longhaul/coordinator.db, or in "
          "$XDG_STATE_HOME/longhaul where that cannot be written and has never been");
ABSL_FLAG(uint32_t, detect_ms, 1500,
          "milliseconds of silence after which a peer counts as dead; all other timeouts derive "
          "from it");
ABSL_FLAG(
    uint32_t, ring_interval_s, 300,
    "seconds after which the ring of a group may be ordered anew where measured links promise "
    "a faster one; 0: never");
ABSL_FLAG(bool, sign_ops, false,
          "peers sign what they say of each op from the beginning; without it they do so once two "
          "peers of a group have told different outcomes of an op (ADR 0045)");

namespace longhaul::coordinator {
namespace {

// Ending streams takes at most 2 s. The rest is for a disk that is slow at that moment.
constexpr std::chrono::seconds kStopMax(15);

int Main(int argc, char** argv) {
  const ProgramInfo info{
      "longhaul-coordinator",
      "Agrees with the peers of training runs on who takes part, and settles what a failure left "
      "open.\n\n"
      "  longhaul-coordinator [--listen=HOST:PORT] [--admin=HOST:PORT] [--store=sqlite:PATH] "
      "[flags]",
      "LONGHAUL_COORDINATOR_"};
  InitDaemon(argc, argv, info);
  ServerOptions options;
  options.listen = absl::GetFlag(FLAGS_listen);
  options.admin = absl::GetFlag(FLAGS_admin);
  options.http = absl::GetFlag(FLAGS_http);
  options.store = absl::GetFlag(FLAGS_store);
  absl::StatusOr<tls::Paths> tls = TlsPathsFromFlags();
  if (!tls.ok()) ExitUsage(info, std::string(tls.status().message()));
  options.tls = *std::move(tls);
  options.tls.crl = absl::GetFlag(FLAGS_tls_crl);
  options.tls_connection_age_s = absl::GetFlag(FLAGS_tls_connection_age_s);
  options.insecure = InsecureFlag();
  options.auth = absl::GetFlag(FLAGS_auth);
  options.admin_auth = absl::GetFlag(FLAGS_admin_auth);
  options.core.detect_ms = absl::GetFlag(FLAGS_detect_ms);
  options.core.ring_interval_ms = static_cast<uint32_t>(
      std::min<uint64_t>(uint64_t{absl::GetFlag(FLAGS_ring_interval_s)} * 1000, UINT32_MAX));
  options.core.sign_ops = absl::GetFlag(FLAGS_sign_ops);
  // Never destroyed: a crash may come at any time, also while the process ends. The coordinator
  // runs no ops.
  static auto& recorder = *new Recorder(info.name, kVersion, /*ops=*/1);
  Dumps dumps({DumpDir(), info.name}, &recorder);
  options.recorder = &recorder;
  options.dumps = &dumps;
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
  if (absl::IsInvalidArgument(server.status())) {
    ExitUsage(info, std::string(server.status().message()));
  }
  if (!server.ok()) return FatalExit(server.status());
  const absl::Status ready = AnnounceReady({{"grpc", (*server)->grpc_address()},
                                            {"admin", (*server)->admin_address()},
                                            {"http", (*server)->http_address()}});
  if (!ready.ok()) return FatalExit(ready);

  ServiceManager& manager = TheServiceManager();
  const int signal = WaitForStopSignal(manager.alive_period(), [&] {
    // A loop that hangs, on its disk for instance, answers no query. So it gives no sign of life.
    (*server)->loop()->Query([&manager](const absl::StatusOr<Overview>& overview) {
      if (overview.ok()) manager.Alive();
    });
  });
  Log(LogLevel::kInfo, "stopping" + LogField("signal", std::to_string(signal)));
  manager.Stopping(kStopMax);
  (*server)->Stop();
  server->reset();
  Log(LogLevel::kInfo, "stopped");
  return 0;
}

}  // namespace
}  // namespace longhaul::coordinator

int main(int argc, char** argv) { return longhaul::coordinator::Main(argc, argv); }
