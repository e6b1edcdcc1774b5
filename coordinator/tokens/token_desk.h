// Makes, checks, lists and revokes join tokens. See docs/security.md.
//
// The desk has all tokens in memory. The loop's thread writes changes to the store (`keep` below);
// a change takes effect once it is durable. A token consists of an id and of a secret of 32 random
// bytes. Randomness, hashes and comparisons come from OpenSSL. No secret is kept, and none appears
// in any text that the desk gives, except for the new token itself.
//
// Threads: any thread may call any method. No method blocks. Callbacks run on the loop's thread, or
// on the caller's if the request is refused at once; no lock is held then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "coordinator/tokens/token_record.h"

namespace longhaul::coordinator {

// The most tokens, with those that are expired or revoked and not deleted yet.
inline constexpr size_t kTokensMax = 4096;
// So long after its end, an expired or revoked token is deleted when the next token is made. Until
// then its holder is told that it has expired or was revoked; then it is merely unknown.
inline constexpr uint64_t kDeadTokenForgottenS = 30 * uint64_t{86400};
inline constexpr uint64_t kTokenTtlMaxS = 3660 * uint64_t{86400};  // ten years

// What a new token is to be.
struct TokenOrder {
  std::string run;  // kAllRuns: all runs
  Role role = Role::kTrainer;
  std::string label;
  uint64_t ttl_s = 0;
  Quota quota;
};

struct NewToken {
  std::string token;  // with its secret: give it to the caller, and keep it nowhere
  TokenRecord record;
};

class TokenDesk {
 public:
  using Done = std::function<void(const absl::Status&)>;
  struct Options {
    // Makes a change durable, and then calls `done` once.
    std::function<void(TokenChange change, Done done)> keep;
    // Seconds since 1970. Default: the system's clock.
    std::function<uint64_t()> now_s;
  };

  // `records`: what the store holds.
  TokenDesk(std::vector<TokenRecord> records, Options options);

  // Calls `done` with the new token, or with an error, after which there is no new token.
  // InvalidArgument: the order asks for something that does not exist. ResourceExhausted:
  // kTokensMax tokens are in use. Other errors come from `keep`.
  void Create(TokenOrder order, std::function<void(absl::StatusOr<NewToken>)> done);
  // From now on the token is refused. NotFound: there is no such token. A token that was revoked
  // before stays as it is (OK). Other errors come from `keep`, and nothing has changed then.
  void Revoke(const std::string& id, Done done);
  // All tokens, in the order of their making.
  std::vector<TokenRecord> List() const;

  // Gives the record of the token that `text` is, if it may be used now. The time that this takes
  // says nothing about the secret.
  std::variant<TokenRecord, Denial> Check(const std::string& text) const;
  // Why the token with this id may not be used any more; nullopt: it may.
  std::optional<Denial> Lapsed(const std::string& id) const;

  // `changed` is called after each revocation. Set it before other threads use the desk.
  void SetOnRevoked(std::function<void()> changed) { on_revoked_ = std::move(changed); }

 private:
  uint64_t Now() const;
  // Why a token with this record may not be used at this time.
  static std::optional<Denial> DeadAt(const TokenRecord& record, uint64_t now_s);
  // The tokens to delete, so that there is room for a new one. Error: there is no room.
  absl::StatusOr<std::vector<std::string>> MakeRoom(uint64_t now_s) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  std::function<void()> on_revoked_;
  mutable Mutex mutex_;
  std::map<std::string, TokenRecord> tokens_ ABSL_GUARDED_BY(mutex_);
  size_t making_ ABSL_GUARDED_BY(mutex_) = 0;  // tokens that are not durable yet
};

// The parts of a token's text. nullopt: the text is no token. Public for tests.
struct TokenParts {
  std::string id;
  std::string secret;  // 32 bytes
};
std::optional<TokenParts> ParseToken(const std::string& text);

}  // namespace longhaul::coordinator
