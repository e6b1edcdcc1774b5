// Shares: how much of a tensor each position owns in the mesh.
//
// The owner of a part of the tensor gets this part from all other positions, adds it up, and sends
// the sum to all. With N positions and a tensor of S bytes, a position with share w sends and
// receives (1 + (N-2) w) S bytes. So a slow host has a small share, or none
// (docs/adr/0034-unequal-shares.md). The coordinator chooses the shares, and tells them to all
// peers in the epoch. Coordinator and peers use the same pure functions, so that they agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace longhaul {

// Of each position, in units of 1 / kShareUnits of the tensor. Their sum is kShareUnits. Empty:
// all positions have equal shares.
using Shares = std::vector<uint32_t>;
inline constexpr uint32_t kShareUnits = 1 << 16;

// The greatest share among so many positions. An owner needs scratch memory for its share of each
// other position's tensor; with this limit, that is at most kShareScratchMax tensors.
inline constexpr uint32_t kShareScratchMax = 4;
constexpr uint32_t GreatestShare(size_t positions) {
  return positions <= kShareScratchMax + 1
             ? kShareUnits
             : static_cast<uint32_t>((uint64_t{kShareUnits} * kShareScratchMax + positions - 2) /
                                     (positions - 1));
}

// Returns what is wrong with shares of so many positions, or "".
std::string SharesFault(const Shares& shares, size_t positions);

// Returns the shares of the positions that are left, in proportion to what they had. `left`: their
// places in `shares`, in rising order or not. Equal shares (empty), if the positions that are left
// had nothing, or if one of them would get more than GreatestShare().
Shares SharesOf(const Shares& shares, const std::vector<size_t>& left);

}  // namespace longhaul
