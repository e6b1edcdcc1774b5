#include "coordinator/grpc/token_use.h"

#include <set>

#include "absl/strings/str_cat.h"

namespace longhaul::coordinator {
namespace {

std::optional<Denial> OverQuota(const Caller& caller, const control::Join& join, size_t used,
                                uint32_t max, const char* what) {
  if (max == 0 || used < max) return std::nullopt;
  return Denial{TokenRefusal::kQuota,
                absl::StrCat("join of ", ToString(join.group), " refused: the peers with ",
                             caller.Shown(), " have ", used, " ", what,
                             ", the most that its quota allows; let a member leave, or ask the "
                             "operator for a token with a larger quota")};
}

}  // namespace

void TokenUse::Attached(PeerId peer, const Caller& caller, CoordinatorLoop* loop) {
  bool full = false;
  {
    MutexLock lock(&mutex_);
    if (caller.quota == Quota()) {
      tokens_.erase(peer);
      return;
    }
    tokens_[peer] = caller.token;
    full = tokens_.size() > kPeersMax;
  }
  if (!full) return;
  loop->QueryCore(
      [self = shared_from_this()](const absl::StatusOr<Overview>&, const CoordinatorCore* core) {
        if (core != nullptr) self->Sweep(*core);
      });
}

void TokenUse::Sweep(const CoordinatorCore& core) {
  MutexLock lock(&mutex_);
  for (auto it = tokens_.begin(); it != tokens_.end();) {
    it = core.HasPeer(it->first) ? std::next(it) : tokens_.erase(it);
  }
}

std::optional<Denial> TokenUse::ObjectionTo(const Caller& caller, PeerId peer,
                                            const control::Join& join,
                                            const CoordinatorCore& core) {
  if (caller.quota == Quota() || core.KnowsJoin(peer, join)) return std::nullopt;
  std::set<PeerId> peers;
  {
    MutexLock lock(&mutex_);
    for (const auto& [other, token] : tokens_) {
      if (token == caller.token) peers.insert(other);
    }
  }
  const Holdings held = core.HoldingsOf(peers);
  std::optional<Denial> denial =
      OverQuota(caller, join, held.members, caller.quota.members, "members");
  if (!denial && !held.groups.contains(join.group)) {
    denial = OverQuota(caller, join, held.groups.size(), caller.quota.groups, "groups");
  }
  if (denial) return denial;
  std::set<std::string> runs;
  for (const GroupKey& group : held.groups) runs.insert(group.run);
  if (runs.contains(join.group.run)) return std::nullopt;
  return OverQuota(caller, join, runs.size(), caller.quota.runs, "runs");
}

}  // namespace longhaul::coordinator
