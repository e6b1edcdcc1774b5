// What the coordinator keeps of a join token, and why it refuses callers. Plain values.
//
// A join token is a text, "lht_ID_SECRET", that a program shows to the coordinator. It says which
// runs its holder may use, and in which role (docs/security.md). The coordinator keeps no secret
// of a token, only a hash of the secret. The core knows nothing of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"

namespace longhaul::coordinator {

// What a caller may do. kTrainer: attach as a peer, and have members in groups. kObserver: ask the
// service Admin. kOperator: everything at the service Admin.
enum class Role : uint8_t { kTrainer = 1, kObserver = 2, kOperator = 3 };
constexpr auto NamesOf(Role) { return EnumNames{1, {"trainer", "observer", "operator"}}; }

// Instead of the name of a run: all runs. It is no name of a run.
inline constexpr char kAllRuns[] = "*";

inline constexpr size_t kTokenIdBytes = 12;  // hexadecimal digits
inline constexpr size_t kTokenHashBytes = 32;
inline constexpr size_t kTokenLabelBytesMax = 128;

// How much the peers that use one token may have at a time. 0: as much as the coordinator allows.
struct Quota {
  uint32_t groups = 0;   // groups in which these peers have members
  uint32_t members = 0;  // these members, pending and admitted
  uint32_t runs = 0;     // runs of these groups
  LH_FIELDS(Quota, LH_FIELD(groups), LH_FIELD(members), LH_FIELD(runs));
};

struct TokenRecord {
  std::string id;    // kTokenIdBytes hexadecimal digits; no secret
  std::string hash;  // SHA-256 of the secret
  std::string run;   // kAllRuns: all runs
  Role role = Role::kTrainer;
  std::string label;  // for people
  // Seconds since 1970, by the coordinator's clock.
  uint64_t created_s = 0;
  uint64_t expires_s = 0;
  uint64_t revoked_s = 0;  // 0: not revoked
  Quota quota;
  std::string Key() const { return id; }
  LH_FIELDS(TokenRecord, LH_FIELD(id, rule::Name{kTokenIdBytes, kTokenIdBytes}),
            LH_FIELD(hash, rule::Secret{kTokenHashBytes, kTokenHashBytes}), LH_FIELD(run),
            LH_FIELD(role), LH_FIELD(label, rule::Text{kTokenLabelBytesMax}), LH_FIELD(created_s),
            LH_FIELD(expires_s), LH_FIELD(revoked_s), LH_FIELD(quota, rule::Flat{}));
};

// A change of what the store keeps of tokens. It takes effect as one transaction.
struct TokenChange {
  std::optional<TokenRecord> put;
  std::vector<std::string> gone;  // ids; those that are not known are ignored
};

// Why a caller is refused: the label of the metric longhaul_coordinator_callers_refused_total.
enum class TokenRefusal : uint8_t {
  kMissing = 1,      // the caller shows less than it has to
  kMalformed = 2,    // what it shows is no token
  kUnknown = 3,      // the coordinator did not make this token, or has deleted it
  kExpired = 4,      // the token or the certificate
  kRevoked = 5,      // the token or the certificate
  kCertificate = 6,  // the certificate says nothing useful, or contradicts the token
  kRole = 7,         // its role may not do this
  kRun = 8,          // it is for another run
  kQuota = 9,        // a join beyond the token's quota
};
constexpr auto NamesOf(TokenRefusal) {
  return EnumNames{1,
                   {"missing", "malformed", "unknown", "expired", "revoked", "certificate", "role",
                    "run", "quota"}};
}

// Why somebody may not do something. The text is for that caller, and holds no secret.
struct Denial {
  TokenRefusal refusal = TokenRefusal::kMissing;
  std::string text;
};

}  // namespace longhaul::coordinator
