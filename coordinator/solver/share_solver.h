// Divides a tensor into shares, one for each host, such that a mesh all-reduce is as fast as the
// hosts' links allow together.
//
// In a mesh, the owner of a cut receives this cut of every other host, adds them up, and sends the
// sum to every other host. With shares w of a tensor of S bytes among N hosts,
//
//   host i sends (1 + (N-2) w_i) S bytes in all, and receives as many;
//   hosts i and j send each other (w_i + w_j) S bytes in each direction.
//
// So a host that owns nothing sends its input once and receives the result once. SolveShares()
// finds the shares with the least time T. T is at least each of these sums, divided by the rate of
// the host or of the pair. This is a linear programme. hivemind solves a similar one for its
// averager. Chen et al. (arXiv 2606.01680) bound the time with one slow host.
//
// If only hosts limit, T follows from one equation, which bisection solves. With slow pairs, a
// search over T goes on from there. For a given T, the greatest sum of shares is the dual of an
// edge cover of least cost. Doubling each host turns the cover into an assignment of least cost,
// and the potentials of the assignment are the shares. Keijsper and Pendavingh ("An efficient
// algorithm for minimum-weight bibranching", 1998) reduce covers to matchings; Kuhn (1955) solves
// assignments. The greatest sum is a concave function of T: the assignment of one T bounds the sum
// at every other T. So where the cost of that assignment reaches 1, T is still too small, or is the
// least one. The search goes on there (Newton's method). It takes a few steps, however many hosts
// there are.
//
// Pure: no clock, no thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/wire/shares.h"

namespace longhaul::coordinator {

// The rates of N hosts, in bytes per second. A rate may be infinite: nothing is known that limits
// it. A pair at 0 cannot exchange anything.
class ShareProblem {
 public:
  explicit ShareProblem(size_t hosts);
  size_t hosts() const { return hosts_.size(); }
  // What a host can send and receive in all, over all its links together. Above 0.
  void SetHost(size_t host, double up, double down);
  // What one host can send to another one.
  void SetPair(size_t from, size_t to, double rate);
  // The lower one of a host's two rates, as a host sends as much as it receives.
  double host(size_t i) const { return hosts_[i]; }
  // The lower one of the rates of the two directions.
  double pair(size_t i, size_t j) const { return pairs_[i * hosts() + j]; }

 private:
  std::vector<double> hosts_;
  std::vector<double> pairs_;
};

inline constexpr size_t kShareHostsMax = 64;

struct ShareSolution {
  // False: the pairs that cannot exchange anything leave too few owners, so the mesh cannot be
  // used.
  bool possible = false;
  // Empty: equal shares are as good as any.
  Shares shares;
  // The time of an all-reduce in seconds for each byte of the tensor, without latencies. 0: nothing
  // is known that limits.
  double seconds_per_byte = 0;
};

// The shares of least time, of at most GreatestShare() each. The time is at most two in a thousand
// above the optimum, and the shares' rounding. 64 hosts take about a millisecond
// (tests/solver/test_share_solver.py). Aborts the process (LH_CHECK) unless there are 1 to
// kShareHostsMax hosts.
ShareSolution SolveShares(const ShareProblem& problem);

// The time that these shares take, in seconds for each byte; infinite if a pair that cannot
// exchange anything has to.
double SecondsPerByte(const ShareProblem& problem, const Shares& shares);

}  // namespace longhaul::coordinator
