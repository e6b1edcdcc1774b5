#include "coordinator/grpc/authorization.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "proto/control/grpc/support.h"

namespace longhaul::coordinator {
namespace {

// Further values of an authorization header are of no use.
constexpr size_t kTokenCharsMax = 256;

// ------------------------------------------------------------------------------ groups of messages

template <class T>
constexpr bool NamesGroups();

template <class T, size_t... kIndex>
constexpr bool AnyFieldNamesGroups(std::index_sequence<kIndex...>) {
  return (
      NamesGroups<
          std::decay_t<decltype(std::declval<T>().*(std::get<kIndex>(T::Fields()).member))>>() ||
      ...);
}

// Whether a value of type T may hold a GroupKey.
template <class T>
constexpr bool NamesGroups() {
  if constexpr (std::is_same_v<T, GroupKey>) {
    return true;
  } else if constexpr (kIsVector<T> || kIsOptional<T>) {
    return NamesGroups<typename T::value_type>();
  } else if constexpr (HasFields<T>) {
    return AnyFieldNamesGroups<T>(
        std::make_index_sequence<std::tuple_size_v<decltype(T::Fields())>>());
  } else {
    return false;
  }
}

// Calls visit(group) for each group that the value names.
template <class T, class Visit>
void ForEachGroup(const T& value, const Visit& visit) {
  if constexpr (std::is_same_v<T, GroupKey>) {
    visit(value);
  } else if constexpr (!NamesGroups<T>()) {
    return;
  } else if constexpr (kIsOptional<T>) {
    if (value) ForEachGroup(*value, visit);
  } else if constexpr (kIsVector<T>) {
    for (const auto& element : value) ForEachGroup(element, visit);
  } else {
    ForEachField<T>([&](const auto& field) { ForEachGroup(value.*field.member, visit); });
  }
}

static_assert(NamesGroups<control::Hello>() && NamesGroups<control::Heartbeat>());
static_assert(NamesGroups<control::Vote>() && !NamesGroups<control::LinkReport>());

// ------------------------------------------------------------------------------ identification

Denial Missing(Auth auth, bool has_token, const std::string& flag) {
  std::string text;
  if (auth == Auth::kToken || (auth == Auth::kBoth && !has_token)) {
    text = "the caller shows no join token, and this coordinator asks for one";
  } else if (auth == Auth::kAny) {
    text = "the caller shows neither a join token nor a certificate";
  } else {
    text = "the caller shows no certificate, and this coordinator asks for one";
  }
  absl::StrAppend(&text, " (", flag, "=", NameOf(auth), "); ");
  if (auth == Auth::kCertificate || has_token) {
    text += "give a certificate of the coordinator's CA";
  } else {
    text += "give --token-file, a file with a token of `lhctl token create`";
  }
  return {TokenRefusal::kMissing, text};
}

Caller CallerOf(const TokenRecord& token) {
  Caller caller;
  caller.role = token.role;
  caller.run = token.run;
  caller.token = token.id;
  caller.quota = token.quota;
  return caller;
}

std::optional<Role> RoleOf(const tls::Subject& certificate) {
  const auto names = NamesOf(Role());
  for (uint64_t value = names.first; value <= names.last(); ++value) {
    if (certificate.role == NameOf(static_cast<Role>(value))) return static_cast<Role>(value);
  }
  return std::nullopt;
}

// Limits the caller to what its certificate allows, too.
std::optional<Denial> Restrict(const tls::Subject& certificate, Caller* caller) {
  caller->certificate = certificate.fingerprint;
  if (!certificate.role.empty() && certificate.role != NameOf(caller->role)) {
    return Denial{TokenRefusal::kCertificate,
                  absl::StrCat("join token ", caller->token, " is for the role ",
                               NameOf(caller->role), ", and the caller's certificate for ",
                               CleanText(certificate.role, 32), "; show two of one role")};
  }
  if (certificate.run.empty() || certificate.run == kAllRuns || certificate.run == caller->run) {
    return std::nullopt;
  }
  if (caller->run != kAllRuns) {
    return Denial{
        TokenRefusal::kCertificate,
        absl::StrCat("join token ", caller->token, " is for run ", caller->run,
                     ", and the caller's certificate for run ",
                     CleanText(certificate.run, kRunNameBytesMax), "; show two of one run")};
  }
  caller->run = certificate.run;
  return std::nullopt;
}

std::variant<Caller, Denial> CallerOf(const tls::Subject& certificate) {
  const std::optional<Role> role = RoleOf(certificate);
  if (!role || certificate.run.empty()) {
    const std::string seen = certificate.role.empty() ? "no role"
                             : !role ? "the role " + CleanText(certificate.role, 32)
                                     : "no run";
    return Denial{TokenRefusal::kCertificate,
                  absl::StrCat("the caller's certificate names ", seen,
                               ": it needs longhaul:role:trainer, longhaul:role:observer or "
                               "longhaul:role:operator, and longhaul:run:RUN (`lhctl ca issue` "
                               "writes them); or show a join token")};
  }
  Caller caller;
  caller.role = *role;
  caller.run = certificate.run;
  caller.certificate = certificate.fingerprint;
  return caller;
}

Denial OtherRun(const Caller& caller, const std::string& what, const GroupKey& group) {
  return {TokenRefusal::kRun,
          absl::StrCat(what, " ", ToString(group), " refused: it is a group of run ", group.run,
                       ", and the caller's ", caller.Shown(), " is for run ", caller.run)};
}

// Whether somebody with this role may do what needs that role.
bool Suffices(Role role, Role needed) {
  return role == needed || (role == Role::kOperator && needed == Role::kObserver);
}

}  // namespace

absl::StatusOr<Auth> ParseAuth(const std::string& flag, const std::string& text) {
  const auto names = NamesOf(Auth());
  for (uint64_t value = names.first; value <= names.last(); ++value) {
    if (text == NameOf(static_cast<Auth>(value))) return static_cast<Auth>(value);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(flag, "=", text, ": give auto, none, token, certificate, any or both"));
}

std::string Caller::Shown() const {
  if (!token.empty()) return absl::StrCat("join token ", token);
  if (!certificate.empty()) return absl::StrCat("certificate ", certificate.substr(0, 16));
  return "call";
}

Caller Anybody(Role role) {
  Caller caller;
  caller.role = role;
  caller.run = kAllRuns;
  return caller;
}

absl::StatusOr<std::optional<tls::Subject>> CertificateCaller(const Connection& connection) {
  if (connection.certificate().empty()) return std::optional<tls::Subject>();
  LH_ASSIGN_OR_RETURN(tls::Subject identity, tls::SubjectOf(connection.certificate()));
  return std::optional<tls::Subject>(std::move(identity));
}

std::variant<Caller, Denial> Identify(Auth auth, const Presented& shown, const TokenDesk& desk,
                                      const std::string& flag) {
  const bool token = shown.token.has_value();
  const bool certificate = shown.certificate.has_value();
  const bool needs_token = auth == Auth::kToken || auth == Auth::kBoth;
  const bool needs_certificate = auth == Auth::kCertificate || auth == Auth::kBoth;
  if ((needs_token && !token) || (needs_certificate && !certificate) || (!token && !certificate)) {
    return Missing(auth, token, flag);
  }
  // What is asked for counts. With kAny that is whatever the caller shows.
  const bool use_token = needs_token || (auth == Auth::kAny && token);
  const bool use_certificate = needs_certificate || (auth == Auth::kAny && certificate);
  if (!use_token) return CallerOf(*shown.certificate);
  std::variant<TokenRecord, Denial> checked = desk.Check(*shown.token);
  if (auto* denial = std::get_if<Denial>(&checked)) return std::move(*denial);
  Caller caller = CallerOf(std::get<TokenRecord>(checked));
  if (use_certificate) {
    if (std::optional<Denial> denial = Restrict(*shown.certificate, &caller)) {
      return *std::move(denial);
    }
  }
  return caller;
}

std::optional<Denial> ObjectionTo(const Caller& caller, const control::PeerMessage& message) {
  if (caller.run == kAllRuns || std::holds_alternative<control::Join>(message)) {
    return std::nullopt;
  }
  std::optional<Denial> denial;
  std::visit(
      [&](const auto& m) {
        ForEachGroup(m, [&](const GroupKey& group) {
          if (!denial && !caller.MayUse(group.run)) {
            denial = OtherRun(caller, absl::StrCat(control::Name(message), " of"), group);
          }
        });
      },
      message);
  return denial;
}

std::optional<Denial> ObjectionToRun(const Caller& caller, const control::Join& join) {
  if (caller.MayUse(join.group.run)) return std::nullopt;
  return OtherRun(caller, "join of", join.group);
}

grpc::Status ToGrpc(const Denial& denial) {
  switch (denial.refusal) {
    case TokenRefusal::kRole:
    case TokenRefusal::kRun:
    case TokenRefusal::kQuota:
      return {grpc::StatusCode::PERMISSION_DENIED, denial.text};
    default:
      return {grpc::StatusCode::UNAUTHENTICATED, denial.text};
  }
}

// ------------------------------------------------------------------------------ Authorizer

Authorizer::Authorizer(Options options, const TokenDesk* desk, CoordinatorMetrics* metrics)
    : options_(std::move(options)), desk_(desk), metrics_(metrics) {
  LH_CHECK(options_.auth != Auth::kAuto);
}

std::variant<Caller, Denial> Authorizer::Admit(const grpc::CallbackServerContext& context,
                                               Role needed) {
  const std::shared_ptr<const Connection> connection = ConnectionOf(context.peer());
  if (connection != nullptr) {
    if (const std::optional<tls::CertificateCheck> refusal = connection->Refusal()) {
      return Denial{TokenRefusal::kCertificate, refusal->why};
    }
  }
  if (options_.auth == Auth::kNone) {
    // A peer shows with its Hello at least that it is one.
    if (connection != nullptr && needed != Role::kTrainer) connection->Known();
    return Anybody(options_.anybody);
  }
  Presented shown;
  const auto& metadata = context.client_metadata();
  const auto [first, last] = metadata.equal_range(control::kAuthorization);
  if (first != last) {
    std::string value(first->second.data(), std::min(first->second.size(), kTokenCharsMax));
    // A second header, or one of another scheme, is no token: Check() refuses it.
    const bool good = std::next(first) == last && absl::StartsWith(value, control::kBearer);
    shown.token = good ? value.substr(sizeof control::kBearer - 1) : "";
  }
  std::variant<Caller, Denial> found;
  absl::StatusOr<std::optional<tls::Subject>> certificate = std::optional<tls::Subject>();
  if (connection != nullptr) certificate = CertificateCaller(*connection);
  if (certificate.ok()) {
    shown.certificate = *std::move(certificate);
    found = Identify(options_.auth, shown, *desk_, options_.flag);
  } else {
    found = Denial{TokenRefusal::kCertificate, std::string(certificate.status().message())};
  }
  if (const auto* caller = std::get_if<Caller>(&found)) {
    if (std::optional<Denial> lapsed = Lapsed(*caller)) {
      found = *std::move(lapsed);
    } else if (!Suffices(caller->role, needed)) {
      found = Denial{TokenRefusal::kRole,
                     absl::StrCat("the caller's ", caller->Shown(), " is for the role ",
                                  NameOf(caller->role), ", and this call needs ", NameOf(needed))};
    }
  }
  if (const auto* denial = std::get_if<Denial>(&found)) {
    Refused(*denial, ClientOf(context.peer()), "call refused");
  } else if (connection != nullptr) {
    connection->Known();
  }
  return found;
}

std::optional<Denial> Authorizer::Lapsed(const Caller& caller) const {
  if (!caller.token.empty()) {
    if (std::optional<Denial> lapsed = desk_->Lapsed(caller.token)) return lapsed;
  }
  if (caller.certificate.empty() || !options_.why_not_certificate) return std::nullopt;
  const std::string why = options_.why_not_certificate(caller.certificate);
  if (why.empty()) return std::nullopt;
  return Denial{TokenRefusal::kRevoked, why};
}

void Authorizer::Refused(const Denial& denial, const std::string& client, const std::string& what) {
  metrics_->OnCallerRefused(NameOf(denial.refusal));
  const std::optional<uint64_t> left_out = refusals_.Take(denial.refusal);
  if (!left_out) return;
  Log(LogLevel::kWarning,
      absl::StrCat(what, LogField("why", NameOf(denial.refusal)), LogField("client", client),
                   LogField("reason", denial.text), " not_logged=", *left_out));
}

}  // namespace longhaul::coordinator
