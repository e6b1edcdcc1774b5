// Knows which peers use which join token, and holds joins against the quotas of tokens.
//
// What counts: a peer uses the token with which its newest control stream was accepted, also while
// it has no stream, until the coordinator forgets the peer. A token's members are the members of
// these peers, pending and admitted, in all groups. Its groups are those in which it has a member,
// and its runs are those of its groups. So a peer that changes its token takes its members along.
// Only tokens with a quota are followed.
//
// Shared, because a question to the loop may outlive the service. Any thread.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/ids.h"
#include "base/mutex.h"
#include "coordinator/grpc/authorization.h"
#include "coordinator/loop/loop.h"

namespace longhaul::coordinator {

class TokenUse : public std::enable_shared_from_this<TokenUse> {
 public:
  // The peer's stream was accepted.
  void Attached(PeerId peer, const Caller& caller, CoordinatorLoop* loop);
  // Why the peer may not have the member that `join` asks for. Called on the loop's thread.
  std::optional<Denial> ObjectionTo(const Caller& caller, PeerId peer, const control::Join& join,
                                    const CoordinatorCore& core);

 private:
  // Beyond so many peers, those that the core has forgotten are dropped.
  static constexpr size_t kPeersMax = 2 * kSessionsMax;
  void Sweep(const CoordinatorCore& core);

  Mutex mutex_;
  std::map<PeerId, std::string> tokens_ ABSL_GUARDED_BY(mutex_);  // ids, by peer
};

}  // namespace longhaul::coordinator
