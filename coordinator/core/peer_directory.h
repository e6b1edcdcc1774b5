// What a group asks about peers. It knows no more of them.
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
  // Something came on its stream within this time.
  virtual bool HeardWithin(PeerId peer, int64_t us) const = 0;
  virtual bool Draining(PeerId peer) const = 0;
  // A member of the cohort of this peer is admitted in some group, or about to
  // be.
  virtual bool CohortBegun(const std::string &run, PeerId peer,
                           const std::string &cohort) const = 0;
  // Of the links between the peers of the ring, as measured.
  virtual control::LinkCost CostOf(const std::vector<PeerId> &ring) const = 0;
  // Of the step that is running.
  virtual Tick Now() const = 0;
};

}  // namespace longhaul::coordinator
