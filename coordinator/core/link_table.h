// What peers have measured of the links between them: the newest of each direction.
//
// Plain value, no clock. Nothing of it is made durable: it is measured again within minutes, and
// each report would be a write. Bounded by kLinksMax.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "base/tick.h"
#include "coordinator/solver/ring_solver.h"
#include "proto/control/messages.h"

namespace longhaul::coordinator {

// A measurement counts for so long. Peers say again what they know before that.
inline constexpr int64_t kLinkExpires = Seconds(900);
// Directions of links that are remembered; of more nothing is taken.
inline constexpr size_t kLinksMax = size_t{1} << 20;

struct MeasuredLink {
  uint64_t bytes_per_second = 0;  // 0: unknown
  uint32_t rtt_us = 0;            // 0: unknown
  Tick at;                        // measured
  bool at_least = false;          // as in control::LinkMeasure
  bool small_packets = false;     // likewise
  friend bool operator==(const MeasuredLink&, const MeasuredLink&) = default;
};

class LinkTable {
 public:
  // Takes in what was reported now; what is older than what is known changes nothing. True if a
  // ring may come out differently: the link was unknown, or it differs by more than noise.
  bool Record(const control::LinkMeasure& measure, Tick now);
  // None: unknown, or expired. The way there and back is taken from the other direction if it was
  // not measured in this one.
  std::optional<MeasuredLink> Find(PeerId from, PeerId to, Tick now) const;
  // Everything from it and to it.
  void Forget(PeerId peer);
  // Between these peers, by their places in the list; latencies are there and back.
  LinkMatrix Matrix(const std::vector<PeerId>& peers, Tick now) const;
  // The worst of what is known between the peers of this ring.
  control::LinkCost Cost(const std::vector<PeerId>& ring, Tick now) const;
  // Pairs of these peers between which large packets vanish, as one of the two says.
  std::set<std::pair<PeerId, PeerId>> SmallPackets(const std::vector<PeerId>& peers,
                                                   Tick now) const;
  size_t size() const { return size_; }

  void AddTo(Digester* digest) const;

 private:
  const MeasuredLink* Fresh(PeerId from, PeerId to, Tick now) const;

  std::map<PeerId, std::map<PeerId, MeasuredLink>> links_;  // by sender, then receiver
  size_t size_ = 0;
};

}  // namespace longhaul::coordinator
