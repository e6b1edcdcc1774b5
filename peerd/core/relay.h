// A frame between two peers without a link, which a third peer hands on.
#pragma once

#include <cstdint>

#include "base/ids.h"

namespace longhaul::peerd {

// READY or DONE of two peers that are to have no link, and the peer that carries it.
struct RelayedFrame {
  GroupKey group;
  PeerId origin;
  PeerId relay;
  PeerId destination;
  Epoch attempt;
};

enum class RelayCheck : uint8_t {
  kTake,    // an epoch of the attempt, committed or prepared, blocks the pair and has this relay
  kStale,   // of an attempt, a group or a peer that was
  kRefuse,  // against the protocol: whoever it came from
};

}  // namespace longhaul::peerd
