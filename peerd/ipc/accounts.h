// What trainers hold of peerd: connections, members, memory. Bounds each kind for one connection,
// for one user, and for all users together.
//
// An Account counts for one owner: a connection, a user, or peerd as a whole. An account may have a
// parent, and what it takes counts there, too: the connection's parent is its user, and the user's
// parent is peerd. A Hold gives back what was taken when it is destroyed.
//
// Threads: the reactor thread. Accounts live as long as any Hold of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace longhaul::peerd {

enum class Resource : uint8_t {
  kConnections,
  kMembers,
  kRegions,
  kArenaBytes,
  kTensors,  // of registered states
  kPieces,   // of ops in flight
};
inline constexpr size_t kResources = 6;

// The most that an account may hold of each Resource. UINT64_MAX: no limit.
using ResourceLimits = std::array<uint64_t, kResources>;

// `percent` of each limit, rounded down, but at least 1. No limit stays no limit.
ResourceLimits ShareOf(const ResourceLimits& limits, uint32_t percent);

class Account;

// A part of what an account holds. Empty when default-constructed or moved from.
class Hold {
 public:
  Hold() = default;
  Hold(Hold&& other) noexcept { *this = std::move(other); }
  Hold& operator=(Hold&& other) noexcept {
    std::swap(account_, other.account_);
    std::swap(resource_, other.resource_);
    std::swap(amount_, other.amount_);
    return *this;
  }
  ~Hold();

 private:
  friend class Account;
  Hold(std::shared_ptr<Account> account, Resource resource, uint64_t amount)
      : account_(std::move(account)), resource_(resource), amount_(amount) {}

  std::shared_ptr<Account> account_;
  Resource resource_ = Resource::kConnections;
  uint64_t amount_ = 0;
};

class Account : public std::enable_shared_from_this<Account> {
 public:
  // `owner` stands in refusals: "peerd", "user 1000". `advice` follows the limit there, for
  // instance
  // "(--user-share=50 of peerd)"; "": none.
  static std::shared_ptr<Account> Make(std::string owner, std::string advice,
                                       const ResourceLimits& limits,
                                       std::shared_ptr<Account> parent);

  // ResourceExhausted: the text names the owner whose limit does not allow it, the limit, and what
  // to do. Then nothing was taken.
  absl::StatusOr<Hold> Take(Resource resource, uint64_t amount);

  uint64_t held(Resource resource) const { return held_[static_cast<size_t>(resource)]; }

 private:
  friend class Hold;
  Account(std::string owner, std::string advice, const ResourceLimits& limits,
          std::shared_ptr<Account> parent)
      : owner_(std::move(owner)),
        advice_(std::move(advice)),
        limits_(limits),
        parent_(std::move(parent)) {}
  void Give(Resource resource, uint64_t amount);

  const std::string owner_;
  const std::string advice_;
  const ResourceLimits limits_;
  const std::shared_ptr<Account> parent_;  // null: none
  std::array<uint64_t, kResources> held_{};
};

}  // namespace longhaul::peerd
