#include "coordinator/tokens/token_desk.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/crypto/secrets.h"

namespace longhaul::coordinator {
namespace {

constexpr char kPrefix[] = "lht_";
constexpr size_t kPrefixChars = sizeof kPrefix - 1;
constexpr size_t kTokenSecretBytes = 32;
// Base64 for URLs, without padding.
constexpr size_t kTokenSecretChars = 43;

std::string TimeText(uint64_t seconds) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC",
                          absl::FromUnixSeconds(static_cast<int64_t>(seconds)),
                          absl::UTCTimeZone());
}

bool IsHexDigit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

// "" or what is wrong with the order.
std::string FaultIn(const TokenOrder& order) {
  if (order.run != kAllRuns) {
    const GroupKey key{order.run, 0};
    if (const std::string fault = longhaul::FaultIn(key); !fault.empty()) {
      return absl::StrCat(fault, "; give the name of a run, or * for all runs");
    }
  }
  if (!NamesOf(Role()).Has(static_cast<uint64_t>(order.role))) {
    return "role: give trainer, observer or operator";
  }
  if (order.ttl_s == 0 || order.ttl_s > kTokenTtlMaxS) {
    return absl::StrCat("ttl: give at least a second, and at most ", kTokenTtlMaxS / 86400,
                        " days");
  }
  if (order.role != Role::kTrainer && !(order.quota == Quota())) {
    return "groups, members, runs: only a trainer's token has a quota";
  }
  if (order.run != kAllRuns && order.quota.runs != 0) {
    return "runs: this token is for one run; only a token for all runs has a quota of runs";
  }
  return "";
}

}  // namespace

std::optional<TokenParts> ParseToken(const std::string& text) {
  constexpr size_t kIdEnd = kPrefixChars + kTokenIdBytes;
  if (text.size() != kIdEnd + 1 + kTokenSecretChars || !absl::StartsWith(text, kPrefix) ||
      text[kIdEnd] != '_') {
    return std::nullopt;
  }
  TokenParts parts;
  parts.id = text.substr(kPrefixChars, kTokenIdBytes);
  if (!std::all_of(parts.id.begin(), parts.id.end(), IsHexDigit)) return std::nullopt;
  if (!absl::WebSafeBase64Unescape(text.substr(kIdEnd + 1), &parts.secret) ||
      parts.secret.size() != kTokenSecretBytes) {
    return std::nullopt;
  }
  return parts;
}

TokenDesk::TokenDesk(std::vector<TokenRecord> records, Options options)
    : options_(std::move(options)) {
  MutexLock lock(&mutex_);
  for (TokenRecord& record : records) {
    const std::string id = record.id;
    tokens_.emplace(id, std::move(record));
  }
}

uint64_t TokenDesk::Now() const {
  if (options_.now_s) return options_.now_s();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(
                                   std::chrono::system_clock::now().time_since_epoch())
                                   .count());
}

std::optional<Denial> TokenDesk::DeadAt(const TokenRecord& record, uint64_t now_s) {
  const bool revoked = record.revoked_s != 0;
  if (!revoked && now_s < record.expires_s) return std::nullopt;
  // The text stays the same, so that a peer that tries again and again logs it once.
  return Denial{
      revoked ? Refusal::kRevoked : Refusal::kExpired,
      absl::StrCat("join token ", record.id, revoked ? " was revoked at " : " expired at ",
                   TimeText(revoked ? record.revoked_s : record.expires_s),
                   "; ask the operator for another one")};
}

absl::StatusOr<std::vector<std::string>> TokenDesk::MakeRoom(uint64_t now_s) const {
  std::vector<std::string> gone;
  const TokenRecord* oldest = nullptr;  // of the dead ones that are not forgotten
  for (const auto& [id, record] : tokens_) {
    if (!DeadAt(record, now_s)) continue;
    const uint64_t ended =
        record.revoked_s != 0 ? std::min(record.revoked_s, record.expires_s) : record.expires_s;
    if (now_s - std::min(now_s, ended) > kDeadTokenForgottenS) {
      gone.push_back(id);
    } else if (oldest == nullptr || record.created_s < oldest->created_s) {
      oldest = &record;
    }
  }
  if (tokens_.size() + making_ - gone.size() < kTokensMax) return gone;
  if (oldest == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the coordinator has ", kTokensMax,
        " tokens that are neither expired nor revoked, the most it can have; revoke some"));
  }
  gone.push_back(oldest->id);
  return gone;
}

void TokenDesk::Create(TokenOrder order, std::function<void(absl::StatusOr<NewToken>)> done) {
  if (const std::string fault = FaultIn(order); !fault.empty()) {
    return done(absl::InvalidArgumentError(fault));
  }
  const uint64_t now_s = Now();
  const std::string secret = RandomBytes(kTokenSecretBytes);
  NewToken made;
  made.record.hash = Sha256(secret);
  made.record.run = order.run;
  made.record.role = order.role;
  made.record.label = CleanText(order.label, kTokenLabelBytesMax);
  made.record.created_s = now_s;
  made.record.expires_s = now_s + order.ttl_s;
  made.record.quota = order.quota;
  TokenChange change;
  absl::Status full;
  {
    MutexLock lock(&mutex_);
    do {
      made.record.id = absl::BytesToHexString(RandomBytes(kTokenIdBytes / 2));
    } while (tokens_.contains(made.record.id));
    absl::StatusOr<std::vector<std::string>> gone = MakeRoom(now_s);
    if (gone.ok()) {
      change.gone = *std::move(gone);
      ++making_;
    } else {
      full = gone.status();
    }
  }
  if (!full.ok()) return done(full);
  made.token = absl::StrCat(kPrefix, made.record.id, "_", absl::WebSafeBase64Escape(secret));
  change.put = made.record;
  const std::vector<std::string> gone = change.gone;
  options_.keep(std::move(change), [this, made = std::move(made), gone,
                                    done = std::move(done)](const absl::Status& stored) {
    {
      MutexLock lock(&mutex_);
      --making_;
      if (stored.ok()) {
        for (const std::string& id : gone) tokens_.erase(id);
        tokens_.emplace(made.record.id, made.record);
      }
    }
    if (!stored.ok()) return done(stored);
    done(made);
  });
}

void TokenDesk::Revoke(const std::string& id, Done done) {
  TokenRecord record;
  {
    MutexLock lock(&mutex_);
    const auto it = tokens_.find(id);
    if (it != tokens_.end()) record = it->second;
  }
  if (record.id.empty()) {
    return done(absl::NotFoundError(absl::StrCat("no token ", CleanText(id, kTokenLabelBytesMax),
                                                 "; `lhctl token list` lists all tokens")));
  }
  if (record.revoked_s != 0) return done(absl::OkStatus());
  record.revoked_s = std::max<uint64_t>(Now(), 1);
  TokenChange change;
  change.put = record;
  options_.keep(std::move(change),
                [this, record, done = std::move(done)](const absl::Status& stored) {
                  if (!stored.ok()) return done(stored);
                  {
                    MutexLock lock(&mutex_);
                    // It may have been deleted meanwhile, to make room. Then the store has it
                    // again.
                    tokens_[record.id] = record;
                  }
                  if (on_revoked_) on_revoked_();
                  done(stored);
                });
}

std::vector<TokenRecord> TokenDesk::List() const {
  std::vector<TokenRecord> records;
  {
    MutexLock lock(&mutex_);
    for (const auto& [id, record] : tokens_) records.push_back(record);
  }
  std::stable_sort(records.begin(), records.end(), [](const TokenRecord& a, const TokenRecord& b) {
    return a.created_s < b.created_s;
  });
  return records;
}

std::variant<TokenRecord, Denial> TokenDesk::Check(const std::string& text) const {
  const std::optional<TokenParts> parts = ParseToken(text);
  if (!parts) {
    return Denial{Refusal::kMalformed,
                  "what the caller shows is no join token: a token is \"lht_\", 12 hexadecimal "
                  "digits, \"_\" and 43 further characters, as `lhctl token create` prints it"};
  }
  const std::string hash = Sha256(parts->secret);
  TokenRecord record;
  {
    MutexLock lock(&mutex_);
    const auto it = tokens_.find(parts->id);
    if (it != tokens_.end()) record = it->second;
  }
  // An id is no secret. So only the comparison of the hashes has to take constant time. Whoever
  // does not have the secret learns nothing about the token, not even that it exists.
  if (!SameBytes(record.hash, hash)) {
    return Denial{Refusal::kUnknown, absl::StrCat("join token ", parts->id,
                                                  " is not known here: it is of another "
                                                  "coordinator, or was deleted, or is mistyped")};
  }
  if (std::optional<Denial> dead = DeadAt(record, Now())) return *std::move(dead);
  return record;
}

std::optional<Denial> TokenDesk::Lapsed(const std::string& id) const {
  const uint64_t now_s = Now();
  MutexLock lock(&mutex_);
  const auto it = tokens_.find(id);
  if (it == tokens_.end()) {
    return Denial{Refusal::kUnknown, absl::StrCat("join token ", id, " was deleted")};
  }
  return DeadAt(it->second, now_s);
}

}  // namespace longhaul::coordinator
