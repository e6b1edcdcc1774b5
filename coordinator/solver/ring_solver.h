// Finds an order of nodes in a ring, such that the slowest link is as fast as possible.
//
// In a ring all-reduce each node sends to the next one, so the ring is as fast as its slowest
// directed link. Among equally fast rings, the one with the smallest sum of latencies is the best.
// Compare() compares two rings by these points, in this order:
//
//   1. Fewer blocked links are better. A blocked link cannot carry data.
//   2. Fewer links of unknown bandwidth are better: a measured link is better than a guess.
//   3. A higher bandwidth of the slowest known link is better. Bandwidths are compared in steps of
//      about 3 % (BandwidthStep()), so that noise does not decide.
//   4. A smaller sum of latencies is better. A latency above one second, or unknown, counts as one
//      second.
//
// Pure: the same problem gives the same ring on every machine, because all computation is in
// integers. A large ring takes seconds, so the caller should solve it on a thread of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/fields.h"

namespace longhaul::coordinator {

// The known cost of one direction of a link.
struct LinkQuality {
  uint64_t bytes_per_second = 0;  // 0: unknown
  uint32_t latency_us = 0;        // one way or round trip, the same for all links; 0: unknown
  bool blocked = false;           // the two nodes cannot reach each other
  friend bool operator==(const LinkQuality&, const LinkQuality&) = default;
};

// The links from each node to each other node. All are unknown at first.
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

// How good a ring is.
struct RingScore {
  uint32_t blocked = 0;     // number of blocked links
  uint32_t unknown = 0;     // number of other links whose bandwidth is unknown
  uint64_t bottleneck = 0;  // bytes per second of the slowest known link; 0: no link is known
  uint64_t latency_us = 0;  // sum over the ring, with at most one second for each link
  uint32_t guessed = 0;     // number of links whose latency is unknown
  LH_FIELDS(RingScore, LH_FIELD(blocked), LH_FIELD(unknown), LH_FIELD(bottleneck),
            LH_FIELD(latency_us), LH_FIELD(guessed));
};

// Returns a number below 0 if `a` is better, above 0 if `b` is better, and 0 if they are equally
// good. Both scores must be of the same matrix.
int Compare(const RingScore& a, const RingScore& b);

// The score of the ring order[0] -> order[1] -> ... -> order[0]. A ring of fewer than two nodes has
// no link.
RingScore ScoreRing(const LinkMatrix& links, const std::vector<uint32_t>& order);

// The number of the step that a bandwidth falls into. 0: unknown. Each step begins at a bandwidth
// that is 1/32 higher than the start of the step below. The borders are fixed, so two bandwidths
// that are nearly equal can fall into two steps. Therefore WorthChanging() compares bandwidths, not
// steps.
uint32_t BandwidthStep(uint64_t bytes_per_second);

// Whether a group should change from the present ring to the other one. Both scores must be of the
// same matrix. The first of these rules that applies decides:
// - The numbers of blocked links differ: yes if the other ring has fewer.
// - The other ring has more unknown links: no.
// - Its bottleneck is faster by 10 %: yes.
// - Its bottleneck is slower by at most 3 %, and its latency is lower by a quarter and by at least
//   a millisecond: yes.
// Otherwise no. What is unknown of the present ring is never a reason for a change.
bool WorthChanging(const RingScore& present, const RingScore& other);

struct RingProblem {
  LinkMatrix links;
  std::vector<uint32_t> present;  // the present ring; each node once
  uint64_t seed = 0;              // of the random numbers of the search
  // How long to search, if the search is not exact. One step looks at about one link.
  // 0: DefaultSteps().
  uint64_t steps_max = 0;
  friend bool operator==(const RingProblem&, const RingProblem&) = default;
};

struct RingSolution {
  // The best ring that was found; the present ring if there was no better one. Begins with the node
  // that the present ring begins with.
  std::vector<uint32_t> order;
  RingScore score;     // of `order`
  RingScore present;   // of the present ring
  bool exact = false;  // true: no ring is better than `order`
  uint64_t steps = 0;  // how long the search took
};

inline constexpr size_t kExactNodesMax = 12;
inline constexpr size_t kRingNodesMax = 1024;

// A number of steps in which a search usually finds what it can find. For a thousand nodes it takes
// one or two seconds.
uint64_t DefaultSteps(size_t nodes);

// Searches for the best ring. The solution is never worse than the present ring.
//
// Up to kExactNodesMax nodes the solution is exact: bisection finds the best bottleneck, with the
// dynamic programme of Held and Karp (1962) over subsets in each step. With more nodes the search
// finds cycle covers above a threshold and joins them into one cycle (Karp 1979). Then it exchanges
// links, again and again from a disturbed ring, until the steps are used up.
//
// Aborts the process (LH_CHECK) unless the present ring has each node of the matrix once, and at
// most kRingNodesMax nodes.
RingSolution SolveRing(const RingProblem& problem);

}  // namespace longhaul::coordinator
