#include "proto/control/blocked.h"

#include <algorithm>
#include <set>

#include "base/check.h"

namespace longhaul::control {
namespace {

// Up to this many peers every order is tried. The first peer is fixed, so there are at most 7!.
constexpr size_t kExactMax = 8;

// Appends the peers that are not yet in `ring`, in the order of `order` where possible. Returns
// false if no order closes the ring; `ring` is unchanged then.
bool Complete(const std::vector<PeerId>& order, const BlockedPairs& blocked,
              std::vector<bool>* used, std::vector<PeerId>* ring) {
  if (ring->size() == order.size()) return !IsBlocked(blocked, ring->back(), ring->front());
  for (size_t i = 0; i < order.size(); ++i) {
    if ((*used)[i] || IsBlocked(blocked, ring->back(), order[i])) continue;
    (*used)[i] = true;
    ring->push_back(order[i]);
    if (Complete(order, blocked, used, ring)) return true;
    ring->pop_back();
    (*used)[i] = false;
  }
  return false;
}

// A ring that is repaired in steps. Each step leaves fewer neighbours that are blocked.
class Repair {
 public:
  Repair(std::vector<PeerId> ring, const BlockedPairs& blocked)
      : ring_(std::move(ring)), blocked_(blocked) {}

  bool Run() {
    for (size_t at = FirstConflict(); at < ring_.size(); at = FirstConflict()) {
      if (!MoveElsewhere((at + 1) % ring_.size()) && !MoveElsewhere(at) && !Reverse(at)) {
        return false;
      }
    }
    return true;
  }
  std::vector<PeerId> Take() { return std::move(ring_); }

 private:
  bool Clash(PeerId x, PeerId y) const { return IsBlocked(blocked_, x, y); }
  PeerId At(size_t i) const { return ring_[i % ring_.size()]; }

  // Returns the first position whose peer is blocked with the next one; the size if there is none.
  size_t FirstConflict() const {
    size_t at = 0;
    while (at < ring_.size() && !Clash(At(at), At(at + 1))) ++at;
    return at;
  }
  // Moves the peer at this position to a place where it clashes with neither neighbour. Returns
  // false if there is no such place, if the peers around the gap would clash, or for the first
  // peer.
  bool MoveElsewhere(size_t at) {
    const size_t n = ring_.size();
    if (at == 0 || Clash(At(at + n - 1), At(at + 1))) return false;
    const PeerId moved = ring_[at];
    std::vector<PeerId> rest = ring_;
    rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(at));
    for (size_t step = 0; step < rest.size(); ++step) {
      const size_t left = (at + step) % rest.size();
      if (Clash(rest[left], moved) || Clash(moved, rest[(left + 1) % rest.size()])) continue;
      rest.insert(rest.begin() + static_cast<std::ptrdiff_t>(left + 1), moved);
      ring_ = std::move(rest);
      return true;
    }
    return false;
  }
  // Reverses a part of the ring, so that two pairs of neighbours are replaced by two pairs that are
  // not blocked. Returns false if no part will do.
  bool Reverse(size_t at) {
    const size_t n = ring_.size();
    for (size_t other = 0; other < n; ++other) {
      const size_t low = std::min(at, other);
      const size_t high = std::max(at, other);
      if (high < low + 2 || (low == 0 && high == n - 1)) continue;
      if (Clash(At(low), At(high)) || Clash(At(low + 1), At(high + 1))) continue;
      std::reverse(ring_.begin() + static_cast<std::ptrdiff_t>(low + 1),
                   ring_.begin() + static_cast<std::ptrdiff_t>(high + 1));
      return true;
    }
    return false;
  }

  std::vector<PeerId> ring_;
  const BlockedPairs& blocked_;
};

}  // namespace

BlockedPair MakeBlockedPair(PeerId x, PeerId y) {
  LH_CHECK(x != y) << "a pair of " << ToString(x) << " alone";
  return x < y ? BlockedPair{x, y, {}} : BlockedPair{y, x, {}};
}

bool IsBlocked(const BlockedPairs& blocked, PeerId x, PeerId y) {
  if (blocked.empty() || x == y) return false;
  return std::binary_search(blocked.begin(), blocked.end(), MakeBlockedPair(x, y));
}

PeerId RelayOf(const BlockedPairs& blocked, PeerId x, PeerId y) {
  if (blocked.empty() || x == y) return PeerId{};
  const BlockedPair pair = MakeBlockedPair(x, y);
  const auto found = std::lower_bound(blocked.begin(), blocked.end(), pair);
  return found == blocked.end() || pair < *found ? PeerId{} : found->relay;
}

bool CanRelay(const BlockedPairs& blocked, const BlockedPair& pair, PeerId peer) {
  return peer && peer != pair.a && peer != pair.b && !IsBlocked(blocked, peer, pair.a) &&
         !IsBlocked(blocked, peer, pair.b);
}

std::optional<std::vector<PeerId>> RingAvoiding(const std::vector<PeerId>& order,
                                                const BlockedPairs& blocked) {
  if (blocked.empty() || order.size() < 2) return order;
  if (order.size() > kExactMax) {
    Repair repair(order, blocked);
    if (!repair.Run()) return std::nullopt;
    return repair.Take();
  }
  std::vector<bool> used(order.size(), false);
  used[0] = true;
  std::vector<PeerId> ring{order[0]};
  if (!Complete(order, blocked, &used, &ring)) return std::nullopt;
  return ring;
}

std::string BlockedFault(const std::vector<PeerId>& peers, const BlockedPairs& blocked) {
  const std::set<PeerId> there(peers.begin(), peers.end());
  for (size_t i = 0; i < blocked.size(); ++i) {
    const auto& [a, b, relay] = blocked[i];
    const std::string pair = "blocked pair " + ToString(a) + "-" + ToString(b);
    if (!(a < b) || !there.contains(a) || !there.contains(b)) {
      return pair + " is no pair of peers of the epoch, the smaller first";
    }
    if (i > 0 && !(blocked[i - 1] < blocked[i])) return pair + " is out of order";
    if (!relay) return pair + " has no relay";
    if (!there.contains(relay) || !CanRelay(blocked, blocked[i], relay)) {
      return pair + " has relay " + ToString(relay) + ", which does not reach both";
    }
  }
  return "";
}

}  // namespace longhaul::control
