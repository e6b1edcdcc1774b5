// Who calls the coordinator, and what the caller may do.
//
// A caller shows a join token (metadata "authorization: Bearer TOKEN"), a certificate, or both. The
// operator decides which of them a port asks for (--auth, --admin-auth). Both name a role and a
// run. If a caller shows both, it may do what both allow. A certificate without a role or a run is
// enough beside a token only.
//
// Authorizer checks each call before any message of it is read. Afterwards the call goes on with
// its Caller, a plain value. A call that stays open must end when its token or certificate does:
// Lapsed() says so, and the server asks it each second.
//
// Threads: any thread may call anything here. Nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "base/tick.h"
#include "base/tls/certificate.h"
#include "coordinator/grpc/connection.h"
#include "coordinator/grpc/rare_log.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/tokens/token_desk.h"
#include "proto/control/messages.h"

namespace grpc {
class CallbackServerContext;
class Status;
}  // namespace grpc

namespace longhaul::coordinator {

// What a caller has to show. kAuto becomes one of the others before a port opens. kAny: a token or
// a certificate; what is shown has to be right.
enum class Auth : uint8_t {
  kAuto = 1,
  kNone = 2,
  kToken = 3,
  kCertificate = 4,
  kAny = 5,
  kBoth = 6
};
constexpr auto NamesOf(Auth) {
  return EnumNames{1, {"auto", "none", "token", "certificate", "any", "both"}};
}
// InvalidArgument names the flag.
absl::StatusOr<Auth> ParseAuth(const std::string& flag, const std::string& text);

// A caller that may do something.
struct Caller {
  Role role = Role::kTrainer;
  std::string run;          // kAllRuns: all runs
  std::string token;        // the id of its token; "": it showed none
  Quota quota;              // of its token
  std::string certificate;  // SHA-256 of its certificate, in hexadecimal; "": it showed none

  bool MayUse(const std::string& other) const { return run == kAllRuns || run == other; }
  // "join token 0123456789ab": what the caller has shown, for texts and logs.
  std::string Shown() const;
};

// The caller of a port that asks for nothing.
Caller Anybody(Role role);

// The caller's certificate; nullopt: it showed none, as in clear. Does not check who issued it.
// InvalidArgument: it cannot be read, or contradicts itself.
absl::StatusOr<std::optional<tls::Subject>> CertificateCaller(const Connection& connection);

// What a call shows.
struct Presented {
  std::optional<std::string> token;  // of "authorization"
  std::optional<tls::Subject> certificate;
};
// Decides who the caller is. Says nothing of what its role may do. `auth` is not kAuto.
std::variant<Caller, Denial> Identify(Auth auth, const Presented& shown, const TokenDesk& desk,
                                      const std::string& flag);

// Whether a peer may send this message: nullopt, or why not. Each group that the message names has
// to be of the caller's run. Joins are not checked here, because a join is refused with an answer.
std::optional<Denial> ObjectionTo(const Caller& caller, const control::PeerMessage& message);
// Why the caller may not have the member that `join` asks for, as ObjectionTo() for joins.
std::optional<Denial> ObjectionToRun(const Caller& caller, const control::Join& join);

grpc::Status ToGrpc(const Denial& denial);

// Decides about the calls of one port. Counts each refusal, and logs the first ones.
class Authorizer {
 public:
  struct Options {
    Auth auth = Auth::kNone;        // not kAuto
    std::string flag = "--auth";    // which flag set it, for texts
    Role anybody = Role::kTrainer;  // who everybody is with Auth::kNone
    // Why the certificate with this fingerprint may not be used any more, although it was good when
    // its call began; "": it may. Null: a call goes on until its connection has reached its age.
    std::function<std::string(const std::string& fingerprint)> why_not_certificate = nullptr;
  };
  // `desk` and `metrics` must outlive this object.
  Authorizer(Options options, const TokenDesk* desk, CoordinatorMetrics* metrics);

  // Identifies the caller, and refuses it unless its role is `needed` or may do all that `needed`
  // may (an operator is an observer, too). A refusal is counted and logged. If the caller is not
  // refused, it is no stranger any more, and nor is its connection (front.h).
  std::variant<Caller, Denial> Admit(const grpc::CallbackServerContext& context, Role needed);
  // Why a caller that was admitted must end now; nullopt: it may go on.
  std::optional<Denial> Lapsed(const Caller& caller) const;

  // Counts and logs a refusal: the client's address, and what it wanted.
  void Refused(const Denial& denial, const std::string& client, const std::string& what);

 private:
  const Options options_;
  const TokenDesk* const desk_;
  CoordinatorMetrics* const metrics_;
  RareLog<TokenRefusal> refusals_{Seconds(10), static_cast<size_t>(NamesOf(TokenRefusal()).last())};
};

}  // namespace longhaul::coordinator
