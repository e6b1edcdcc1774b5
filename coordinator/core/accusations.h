// Answers which peers of a group are accused of being dead, and by which others.
//
// A peer accuses another one if it has reported that it lost its link to it and has not reported
// all links up since, or if it answered the open preparation that it cannot reach it. A lost link
// through a relay accuses nobody.
//
// Made for one question or a few: it refers to what it is made from.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/core/epoch_state.h"
#include "coordinator/core/link_reports.h"
#include "coordinator/core/peer_directory.h"

namespace longhaul::coordinator {

class Accusations {
 public:
  Accusations(const EpochState& epochs, const LinkReports& reports, const PeerDirectory& peers)
      : epochs_(epochs), reports_(reports), peers_(peers) {}

  // Whether another peer accuses this peer. A report of silence counts only after a delay: TCP
  // repeats packets that a short outage swallowed, after up to twice the outage.
  bool Accused(PeerId peer) const;
  // The peers that accuse this peer, also those whose report does not count yet.
  std::vector<PeerId> Accusers(PeerId peer) const;
  // Whether there are two witnesses or more, and each of them accuses the peer or has only a link
  // through a relay to it. Their reports count at once: if the peer were alive after a short
  // outage, a witness would have heard it.
  bool AccusedByAll(PeerId peer) const;
  // The peers that would report this peer silent if it were dead: all other participants.
  // Exception: participants that are attached and silent may be dead themselves.
  std::vector<PeerId> Witnesses(PeerId peer) const;
  // Whether the coordinator has heard the peer's stream within LinkReports::heard_of_late_us().
  bool HeardOfLate(PeerId peer) const;

 private:
  bool AccusedBy(PeerId other, PeerId peer, Tick at) const;

  const EpochState& epochs_;
  const LinkReports& reports_;
  const PeerDirectory& peers_;
};

}  // namespace longhaul::coordinator
