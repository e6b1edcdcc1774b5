// The order of a ring in which the slowest link is as fast as possible.
//
// A ring all-reduce sends from each node to the next one, and is as fast as the slowest of these
// directed links; among rings that are equally fast the one with the least sum of latencies is the
// best. Rings are compared in this order (Compare()):
//
//   1. fewer blocked links, those that cannot exist
//   2. fewer links of unknown bandwidth: what has been measured is better than a guess
//   3. a higher bandwidth of the slowest known link, in steps of about 3 % (BandwidthStep()), so
//      that noise does not decide
//   4. a smaller sum of latencies, of which none counts for more than a second; one that is unknown
//      counts as that
//
// Pure: the same ring for the same problem on every machine; integers only. A thread of its own for
// it is the caller's business: a large ring takes seconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/fields.h"

namespace longhaul::coordinator {

// One direction of a link.
struct LinkQuality {
  uint64_t bytes_per_second = 0;  // 0: unknown
  uint32_t latency_us = 0;        // one way or there and back, in all the same; 0: unknown
  bool blocked = false;
  friend bool operator==(const LinkQuality&, const LinkQuality&) = default;
};

// From each node to each other one; unknown at first.
class LinkMatrix {
 public:
  LinkMatrix() = default;
  explicit LinkMatrix(size_t nodes) : nodes_(nodes), links_(nodes * nodes) {}
  size_t nodes() const { return nodes_; }
  LinkQuality& At(size_t from, size_t to) { return links_[from * nodes_ + to]; }
  const LinkQuality& At(size_t from, size_t to) const { return links_[from * nodes_ + to]; }
  friend bool operator==(const LinkMatrix&, const LinkMatrix&) = default;

 private:
  size_t nodes_ = 0;
  std::vector<LinkQuality> links_;
};

struct RingScore {
  uint32_t blocked = 0;     // links
  uint32_t unknown = 0;     // links that are not blocked, of unknown bandwidth
  uint64_t bottleneck = 0;  // bytes a second of the slowest known link; 0: none is known
  uint64_t latency_us = 0;  // sum over the ring, as compared
  uint32_t guessed = 0;     // links of unknown latency
  LH_FIELDS(RingScore, LH_FIELD(blocked), LH_FIELD(unknown), LH_FIELD(bottleneck),
            LH_FIELD(latency_us), LH_FIELD(guessed));
};

// Below 0: `a` is the better ring, above: `b`. Both are of one matrix.
int Compare(const RingScore& a, const RingScore& b);

// Of the ring order[0] -> order[1] -> ... -> order[0]. A ring of fewer than two has no link.
RingScore ScoreRing(const LinkMatrix& links, const std::vector<uint32_t>& order);

// The step of the ladder that a bandwidth stands on: 0 for an unknown one, then rising, each step
// 1/32 wider than the one below. The ladder is fixed, so two bandwidths that differ by less may
// stand on two steps: WorthChanging() compares bandwidths, not steps.
uint32_t BandwidthStep(uint64_t bytes_per_second);

// Whether `other` is worth the change, both of one matrix: it has fewer blocked links; or a
// bottleneck that is faster by 10 %; or one that is slower by 3 % at the most, with a latency that
// is less by a quarter and by a millisecond. Never if it has more links that are blocked or
// unknown, and never because of what is not known of the present ring.
bool WorthChanging(const RingScore& present, const RingScore& other);

struct RingProblem {
  LinkMatrix links;
  std::vector<uint32_t> present;  // each node once
  uint64_t seed = 0;
  // How long to search, where the search is not exact: one step is about one link looked at.
  // 0: DefaultSteps().
  uint64_t steps_max = 0;
  friend bool operator==(const RingProblem&, const RingProblem&) = default;
};

struct RingSolution {
  // Begins with the node that the present ring begins with; the present ring itself if no better
  // one was found.
  std::vector<uint32_t> order;
  RingScore score;
  RingScore present;
  bool exact = false;  // there is no better one
  uint64_t steps = 0;  // that it took
};

inline constexpr size_t kExactNodesMax = 12;
inline constexpr size_t kRingNodesMax = 1024;

// Enough for what a search usually finds; a second or two for a thousand nodes.
uint64_t DefaultSteps(size_t nodes);

// Exact up to kExactNodesMax nodes: the bottleneck by bisection, each time with the dynamic
// programme of Held and Karp (1962) over subsets. Beyond: cycle covers above a threshold, patched
// into one cycle (Karp 1979), then exchanges of links, again and again from a disturbed ring until
// the steps are used up.
//
// The solution is never worse than the present ring. CHECKs that the present ring has each node of
// the matrix once and that there are at most kRingNodesMax.
RingSolution SolveRing(const RingProblem& problem);

}  // namespace longhaul::coordinator
