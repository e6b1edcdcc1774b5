// Blocked pairs: two peers of an epoch that cannot reach each other although others reach both.
//
// The link of such a pair goes through a third peer, its relay
// (docs/adr/0011-links-through-a-relay.md). Its bytes cost the relay's links twice, so the ring
// avoids the pair where it can (docs/adr/0009-blocked-pairs.md). Coordinator and peers decide with
// these functions, so that they agree. Pure; nothing depends on anything but arguments.
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
  // Their link goes through that one. 0 where no epoch has chosen it yet.
  PeerId relay;
  LH_FIELDS(BlockedPair, LH_FIELD(a), LH_FIELD(b), LH_FIELD(relay));
  // The relay is no part of what the pair is called.
  friend bool operator<(const BlockedPair& x, const BlockedPair& y) {
    return std::pair(x.a, x.b) < std::pair(y.a, y.b);
  }
};

// In rising order, each pair once, as in PrepareEpoch.
using BlockedPairs = std::vector<BlockedPair>;

BlockedPair MakeBlockedPair(PeerId x, PeerId y);
bool IsBlocked(const BlockedPairs& blocked, PeerId x, PeerId y);
// The relay of a blocked pair; 0: the two are not blocked.
PeerId RelayOf(const BlockedPairs& blocked, PeerId x, PeerId y);
// The peer is none of the two and reaches both, so that their link can go through it.
bool CanRelay(const BlockedPairs& blocked, const BlockedPair& pair, PeerId peer);

// An order of the same peers in which no blocked pair are neighbours, the last and the first being
// neighbours too; `order` itself if it is one. It begins with the same peer and stays near `order`.
// nullopt: up to 8 peers, there is none (2 or 3 peers with a blocked pair never have one); beyond,
// none was found. The work is bounded by a small power of the number of peers.
//
// The ring of an op is RingAvoiding(its participants in the order of the epoch). If the result is
// nullopt, the ring is that order itself.
std::optional<std::vector<PeerId>> RingAvoiding(const std::vector<PeerId>& order,
                                                const BlockedPairs& blocked);

// What is wrong with the blocked pairs of an epoch of these peers: a pair that is no pair of them,
// or whose relay does not reach both. Empty: nothing.
std::string BlockedFault(const std::vector<PeerId>& peers, const BlockedPairs& blocked);

}  // namespace longhaul::control
