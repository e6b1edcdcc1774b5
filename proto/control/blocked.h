// Blocked pairs: two peers of an epoch that cannot have a link although others reach both.
//
// Such a pair is routed around (docs/adr/0009). Tensors flow around a ring in which the two are not
// neighbours; what they have to say to each other is carried by a third peer. Coordinator and peers
// decide with these functions, so that they agree. Pure; nothing depends on anything but arguments.
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
  friend auto operator<=>(const BlockedPair&, const BlockedPair&) = default;
  LH_FIELDS(BlockedPair, LH_FIELD(a), LH_FIELD(b));
};

// In rising order, each pair once, as in PrepareEpoch.
using BlockedPairs = std::vector<BlockedPair>;

BlockedPair MakeBlockedPair(PeerId x, PeerId y);
bool IsBlocked(const BlockedPairs& blocked, PeerId x, PeerId y);

// Who carries control frames between two peers of a blocked pair: the first of `order` that is
// blocked with neither; none if there is nobody. If the two are not blocked it is `to`. Peers take
// the order in which they came into the group, so that the relay outlives newcomers and new rings.
PeerId RelayBetween(const std::vector<PeerId>& order, const BlockedPairs& blocked, PeerId from,
                    PeerId to);

// An order of the same peers in which no blocked pair are neighbours, the last and the first being
// neighbours too; `order` itself if it is one. It begins with the same peer and stays near `order`.
// nullopt: up to 8 peers, there is none (2 or 3 peers with a blocked pair never have one); beyond,
// none was found. The work is bounded by a small power of the number of peers.
//
// The peers of an epoch are in such an order. An op in which fewer take part (newcomers do not)
// runs over RingAvoiding(the participants in the order of the epoch).
std::optional<std::vector<PeerId>> RingAvoiding(const std::vector<PeerId>& order,
                                                const BlockedPairs& blocked);

// What is wrong with `ring` as the ring of an epoch with these pairs: a pair that is no pair of its
// peers, neighbours that are blocked, a pair without a relay. Empty: nothing.
std::string RingFault(const std::vector<PeerId>& ring, const BlockedPairs& blocked);

}  // namespace longhaul::control
