#include "coordinator/core/accusations.h"

#include <algorithm>

namespace longhaul::coordinator {

bool Accusations::AccusedBy(PeerId other, PeerId peer, Tick at) const {
  if (reports_.Accuses({other, peer}, at)) return true;
  if (!epochs_.preparation) return false;
  const auto& answers = epochs_.preparation->answers;
  const auto answer = answers.find(other);
  return answer != answers.end() && answer->second.unreachable.contains(peer) &&
         !epochs_.RelayNow(other, peer);
}

bool Accusations::Accused(PeerId peer) const {
  return std::any_of(
      epochs_.record.peers.begin(), epochs_.record.peers.end(),
      [&](const PeerRecord& other) { return AccusedBy(other.peer, peer, peers_.Now()); });
}

std::vector<PeerId> Accusations::Accusers(PeerId peer) const {
  std::vector<PeerId> accusers;
  for (const PeerRecord& other : epochs_.record.peers) {
    if (AccusedBy(other.peer, peer, kNever)) accusers.push_back(other.peer);
  }
  return accusers;
}

bool Accusations::AccusedByAll(PeerId peer) const {
  const std::vector<PeerId> witnesses = Witnesses(peer);
  return witnesses.size() >= 2 &&
         std::all_of(witnesses.begin(), witnesses.end(), [&](PeerId other) {
           return AccusedBy(other, peer, kNever) || epochs_.RelayNow(other, peer);
         });
}

std::vector<PeerId> Accusations::Witnesses(PeerId peer) const {
  std::vector<PeerId> others = epochs_.Participants();
  std::erase_if(others, [&](PeerId other) {
    return other == peer || (peers_.Attached(other) && !HeardOfLate(other));
  });
  return others;
}

bool Accusations::HeardOfLate(PeerId peer) const {
  return peers_.HeardWithin(peer, reports_.heard_of_late_us());
}

}  // namespace longhaul::coordinator
