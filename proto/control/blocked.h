// Blocked pairs: two peers of an epoch that cannot reach each other, while a third peer reaches
// both.
//
// The link of such a pair goes through a third peer, its relay
// (docs/adr/0011-links-through-a-relay.md). The relay sends and receives all bytes of the pair, so
// the ring avoids the pair if possible (docs/adr/0009-blocked-pairs.md). Coordinator and peers use
// the same pure functions, so that they agree.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "base/ids.h"

namespace longhaul::control {

struct BlockedPair {
  PeerId a;  // a < b
  PeerId b;
  // The peer through which the link goes. 0: not chosen yet.
  PeerId relay;
  LH_FIELDS(BlockedPair, LH_FIELD(a), LH_FIELD(b), LH_FIELD(relay));
  // Two values with the same peers are the same pair, whatever the relay.
  friend bool operator<(const BlockedPair& x, const BlockedPair& y) {
    return std::pair(x.a, x.b) < std::pair(y.a, y.b);
  }
};

// In rising order, each pair once, as in PrepareEpoch.
using BlockedPairs = std::vector<BlockedPair>;

// Returns the pair of two different peers, in either order, without a relay.
BlockedPair MakeBlockedPair(PeerId x, PeerId y);
bool IsBlocked(const BlockedPairs& blocked, PeerId x, PeerId y);
// Returns the relay of a blocked pair; 0: the pair is not blocked.
PeerId RelayOf(const BlockedPairs& blocked, PeerId x, PeerId y);
// Returns whether `peer` can be the relay: it is neither end of the pair and reaches both ends.
bool CanRelay(const BlockedPairs& blocked, const BlockedPair& pair, PeerId peer);

// Returns an order of the same peers in which no blocked pair are neighbours. The last and the
// first are neighbours, too. If `order` is such an order, returns `order`. The result begins with
// the same peer and stays near `order`. nullopt: up to 8 peers no such order exists; with more
// peers none was found. The work is bounded by a small power of the number of peers.
//
// The ring of an op is RingAvoiding(its participants in the order of the epoch). If the result is
// nullopt, the ring is that order itself.
std::optional<std::vector<PeerId>> RingAvoiding(const std::vector<PeerId>& order,
                                                const BlockedPairs& blocked);

// Checks the blocked pairs of an epoch with these peers. Returns the first fault: an end or a relay
// is not one of the peers, the order is wrong, or a relay is missing or does not reach both ends.
// Returns "" if there is none.
std::string BlockedFault(const std::vector<PeerId>& peers, const BlockedPairs& blocked);

}  // namespace longhaul::control
