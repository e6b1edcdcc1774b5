// The questions that a group may ask about peers. A group knows nothing else of the peers' streams.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

class PeerDirectory {
 public:
  virtual ~PeerDirectory() = default;
  virtual bool Attached(PeerId peer) const = 0;
  // Whether the peer is attached and a message came on its stream within the last `us`.
  virtual bool HeardWithin(PeerId peer, int64_t us) const = 0;
  virtual bool Draining(PeerId peer) const = 0;
  // Whether a member of this peer's cohort is admitted in some group, or in a preparation that
  // would admit it.
  virtual bool CohortBegun(const std::string& run, PeerId peer,
                           const std::string& cohort) const = 0;
  // The measured costs of the links between the peers of the ring, and the shares that fit them.
  // `present`: the shares that these peers own now, and that stay unless others are clearly better;
  // nullptr: there are none.
  virtual control::LinkCost CostOf(const std::vector<PeerId>& ring,
                                   const control::BlockedPairs& blocked,
                                   const Shares* present) const = 0;
  // The time of the step that is running.
  virtual Tick Now() const = 0;
};

}  // namespace longhaul::coordinator
