// The outside of a gRPC port: listens, accepts, speaks TLS, and relays what is within to gRPC
// through a pair of Unix sockets.
//
// Why gRPC does not do that itself (docs/adr/0067-a-front-before-grpc.md): nothing in gRPC 1.51
// bounds what a client costs that does not keep to its settings. A *stranger*, a caller that has
// not shown a valid token or certificate, reaches gRPC only within a budget (stranger_budget.h),
// few strangers are served at a time (stranger_table.h), and each has kPatience to become known.
// The services say when it has (Connection::Known()). Afterwards nothing is limited here.
//
//   waits     --(it has sent a whole ClientHello, or preface; and has its turn)--> served
//   served    --(TLS stands, the preface has come)--> relayed, one end of the pair goes to gRPC
//   relayed   --(either side closes, or it is put out, or its time is over)--> ends
//   ends      --(gRPC has closed its end)--> gone; until then it counts as served
//
// It also keeps the port open while descriptors run out: a connection that would take one of the
// last kDescriptorsReserved descriptors, which stores, logs and certificates need, is reset.
//
// One thread per front does all this. Any thread may call the methods.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/daemon/host_port.h"
#include "base/tls/seen_certificates.h"
#include "base/tls/tls_files.h"
#include "base/unique_fd.h"

namespace longhaul::coordinator {

inline constexpr int kDescriptorsReserved = 32;
// How many strangers are served at a time, and how many more may wait, if there are descriptors.
inline constexpr size_t kStrangersServedMax = 64;
inline constexpr size_t kStrangersWaitingMax = 1024;

class Front {
 public:
  struct Options {
    HostPort listen;
    // Names the port in logs, and in errors of Start().
    std::string flag;
    // Certificate and key, and the CAs whose certificates callers may show. Null: in clear.
    std::shared_ptr<tls::Files> files;
    // Is told of the certificates of callers. May be null.
    std::shared_ptr<tls::SeenCertificates> seen;
    // Called for each call whose certificate is refused. May be null.
    std::function<void(const tls::CertificateCheck&)> refused;
    // Called for each connection with the numeric address of its host, as HostOfUri() gives it.
    // Must not block. May be null.
    std::function<void(const std::string& host)> came;
    // Takes gRPC's end of a connection.
    std::function<void(UniqueFd fd)> pass;
    // A connection on which sent bytes are not acknowledged for so long is dead.
    uint32_t unacknowledged_ms = 20000;
  };

  // Listens, and begins to accept. Unavailable: it cannot listen there; the text says why.
  static absl::StatusOr<std::unique_ptr<Front>> Start(Options options);
  // What gRPC has answered goes out first, for half a second at most.
  ~Front();
  Front(const Front&) = delete;
  Front& operator=(const Front&) = delete;

  // The port that was bound.
  uint16_t port() const;
  // Closes the port. Connections that stand are relayed on.
  void StopAccepting();

 private:
  class Impl;
  explicit Front(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longhaul::coordinator
