// Decides what a group does next, and says what it waits for. Pure functions.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "base/ids.h"
#include "coordinator/core/assembly.h"
#include "coordinator/core/boundary.h"
#include "coordinator/core/epoch_state.h"
#include "coordinator/core/link_reports.h"
#include "coordinator/core/newcomers.h"
#include "coordinator/core/peer_directory.h"

namespace longhaul::coordinator {

struct Decision {
  enum class Act : uint8_t { kWait, kPrepare, kCommit, kCommitEmpty, kAbort, kAnswerVotes };
  Act act = Act::kWait;
  std::set<MemberId> joiners;  // kPrepare
  std::set<MemberId> raised;   // kPrepare
  bool freeze = false;         // kPrepare
  bool reorder = false;        // kPrepare
  bool Changes() const { return !joiners.empty() || !raised.empty() || reorder; }
  std::string why;  // kWait: what the group waits for; "": nothing
};

// What a group knows when it decides.
struct Known {
  const EpochState& epochs;
  const Boundary& boundary;
  const Newcomers& newcomers;
  const Assembly& assembly;
  const LinkReports& reports;
  const std::vector<PeerId>& better_ring;  // empty: no better ring is known
  const PeerDirectory& peers;
};

Decision Decide(const Known& known);

// The preparation that a decision asks for, without its id, its ring and what follows from the
// ring. `gain`: what it says of itself if it orders the ring anew.
Preparation PreparationFor(const Decision& decision, const std::string& gain,
                           const EpochState& epochs, Tick now);

}  // namespace longhaul::coordinator
