#include "coordinator/solver/share_solver.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "base/check.h"

namespace longhaul::coordinator {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// The search for the time ends when its two ends are this near.
constexpr double kPrecision = 1e-3;
// A search that takes more steps than this ends with the best time so far. None was seen to.
constexpr int kStepsMax = 64;

// Solves an assignment of least cost by shortest augmenting paths (the Hungarian method), and
// returns the mean of the potentials of row i and column i for each i. `cost` is symmetric, n x n.
// For all i and j, the potentials of row i and column j add up to at most cost(i, j), and all of
// them to the cost of the assignment.
class Assignment {
 public:
  Assignment(size_t n, const std::vector<double>& cost)
      : n_(n), cost_(cost), row_(n + 1), column_(n + 1), matched_(n + 1), before_(n + 1) {}

  std::vector<double> Potentials() {
    for (size_t i = 1; i <= n_; ++i) Augment(i);
    std::vector<double> mean(n_);
    for (size_t i = 0; i < n_; ++i) mean[i] = (row_[i + 1] + column_[i + 1]) / 2;
    return mean;
  }

 private:
  // Matches one more row. Rows and columns count from 1; column 0 is the start of the path.
  void Augment(size_t row) {
    std::vector<double> slack(n_ + 1, kInfinite);
    std::vector<bool> reached(n_ + 1);
    size_t at = 0;
    matched_[0] = row;
    do {
      reached[at] = true;
      const size_t i = matched_[at];
      double least = kInfinite;
      size_t next = 0;
      for (size_t j = 1; j <= n_; ++j) {
        if (reached[j]) continue;
        const double reduced = cost_[(i - 1) * n_ + j - 1] - row_[i] - column_[j];
        if (reduced < slack[j]) {
          slack[j] = reduced;
          before_[j] = at;
        }
        if (slack[j] < least) {
          least = slack[j];
          next = j;
        }
      }
      for (size_t j = 0; j <= n_; ++j) {
        if (reached[j]) {
          row_[matched_[j]] += least;
          column_[j] -= least;
        } else {
          slack[j] -= least;
        }
      }
      at = next;
    } while (matched_[at] != 0);
    for (; at != 0; at = before_[at]) matched_[at] = matched_[before_[at]];
  }

  size_t n_;
  const std::vector<double>& cost_;
  std::vector<double> row_;      // potentials
  std::vector<double> column_;   // potentials
  std::vector<size_t> matched_;  // the row of each column; 0: none
  std::vector<size_t> before_;   // the column before this one on the path
};

double Greatest(size_t hosts) { return static_cast<double>(GreatestShare(hosts)) / kShareUnits; }

// The greatest share of a host in this time (for each byte), as far as the host itself limits it;
// below 0: it cannot even send its input in that time.
double MostOf(const ShareProblem& problem, size_t host, double time) {
  const size_t n = problem.hosts();
  const double spare = time * problem.host(host) - 1;
  if (spare < 0) return -1;
  return n > 2 ? std::min(Greatest(n), spare / static_cast<double>(n - 2)) : 1;
}

double Sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// The least time in which each host can send its input.
double TimeOfInputs(const ShareProblem& problem) {
  double time = 0;
  for (size_t i = 0; i < problem.hosts(); ++i) time = std::max(time, 1 / problem.host(i));
  return time;
}

// The greatest shares that are possible in this time, if only hosts limit.
std::vector<double> SharesOfHosts(const ShareProblem& problem, double time) {
  std::vector<double> shares(problem.hosts());
  for (size_t i = 0; i < shares.size(); ++i) {
    shares[i] = std::max(0.0, MostOf(problem, i, time));
  }
  return shares;
}

// The least time, if only hosts limit. `high`: a time that is enough.
double TimeOfHosts(const ShareProblem& problem, double low, double high) {
  while (high - low > kPrecision / 100 * high) {
    const double middle = (low + high) / 2;
    (Sum(SharesOfHosts(problem, middle)) >= 1 ? high : low) = middle;
  }
  return high;
}

// The greatest shares that are possible in this time, which is at least TimeOfInputs(). Their sum
// is 1 or more if the time is enough.
std::vector<double> GreatestShares(const ShareProblem& problem, double time) {
  const size_t n = problem.hosts();
  std::vector<double> most(n);  // of each host alone
  for (size_t i = 0; i < n; ++i) {
    most[i] = std::max(0.0, MostOf(problem, i, time));
    for (size_t j = 0; j < n; ++j) {
      if (j != i) most[i] = std::min(most[i], time * problem.pair(i, j));
    }
  }
  // An assignment must cover each host exactly once, but a cover may do so more often. It never
  // pays more for a pair than for the two hosts alone.
  std::vector<double> cost(n * n);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) {
      const double alone = most[i] + most[j];
      cost[i * n + j] = i == j ? alone : std::min(alone, time * problem.pair(i, j));
    }
  }
  std::vector<double> shares = Assignment(n, cost).Potentials();
  // A share below 0 may be 0 as well: no other share is greater than its host allows alone.
  for (double& share : shares) share = std::max(0.0, share);
  return shares;
}

bool IsEnough(double sum) { return sum >= 1 - 1e-9; }

// Rounds shares to units with the right sum: the largest remainders are rounded up.
Shares Rounded(const std::vector<double>& shares) {
  const double sum = Sum(shares);
  Shares units(shares.size());
  std::vector<std::pair<double, size_t>> remainders;
  uint32_t left = kShareUnits;
  for (size_t i = 0; i < shares.size(); ++i) {
    const double exact = shares[i] / sum * kShareUnits;
    units[i] = std::min(left, static_cast<uint32_t>(exact));
    left -= units[i];
    remainders.emplace_back(units[i] - exact, i);
  }
  std::sort(remainders.begin(), remainders.end());
  for (size_t k = 0; left > 0; k = (k + 1) % remainders.size()) {
    const size_t i = remainders[k].second;
    // A host that owns nothing stays so.
    if (shares[i] == 0 || units[i] >= GreatestShare(shares.size())) continue;
    ++units[i];
    --left;
  }
  return units;
}

// Returns the greatest shares in the least time, or in one that is longer by kPrecision at most.
// Empty: no time is enough. `low`: a lower bound of the time. `high`: a time that is enough, or
// infinite.
std::vector<double> SharesInLeastTime(const ShareProblem& problem, double low, double high) {
  const auto sum = [&](double time) { return Sum(GreatestShares(problem, time)); };
  double below = sum(low);
  if (IsEnough(below)) return GreatestShares(problem, low);
  if (high == kInfinite) {
    // With pairs that cannot exchange anything, the owners are hosts that reach all others.
    constexpr int kDoublingsMax = 200;
    int doublings = 0;
    high = 2 * low;
    for (double next = sum(high); !IsEnough(next); next = sum(high)) {
      if (++doublings > kDoublingsMax) return {};
      low = high;
      below = next;
      high *= 2;
    }
  }
  double above = sum(high);
  for (int step = 0; step < kStepsMax && high - low > kPrecision * high; ++step) {
    // The chord, and then a time just below it: often the chord has found the least time.
    double next = low + (high - low) * (1 - below) / std::max(above - below, 1e-12);
    if (step % 2 == 1) next = std::max(low, high * (1 - 0.9 * kPrecision));
    if (step % 4 == 2) next = (low + high) / 2;
    if (next <= low || next >= high) next = (low + high) / 2;
    const double reached = sum(next);
    (IsEnough(reached) ? high : low) = next;
    (IsEnough(reached) ? above : below) = reached;
  }
  return GreatestShares(problem, high);
}

}  // namespace

ShareProblem::ShareProblem(size_t hosts)
    : hosts_(hosts, kInfinite), pairs_(hosts * hosts, kInfinite) {}

void ShareProblem::SetHost(size_t host, double up, double down) {
  LH_CHECK(up > 0 && down > 0) << "host " << host;
  hosts_[host] = std::min(up, down);
}

void ShareProblem::SetPair(size_t from, size_t to, double rate) {
  LH_CHECK(rate >= 0) << "pair " << from << " " << to;
  for (const size_t at : {from * hosts() + to, to * hosts() + from}) {
    pairs_[at] = std::min(pairs_[at], rate);
  }
}

double SecondsPerByte(const ShareProblem& problem, const Shares& shares) {
  const size_t n = problem.hosts();
  const auto share = [&](size_t i) {
    return shares.empty() ? 1 / static_cast<double>(n)
                          : static_cast<double>(shares[i]) / kShareUnits;
  };
  double time = 0;
  for (size_t i = 0; n > 1 && i < n; ++i) {
    time = std::max(time, (1 + static_cast<double>(n - 2) * share(i)) / problem.host(i));
    for (size_t j = 0; j < i; ++j) {
      const double both = share(i) + share(j);
      if (both > 0) time = std::max(time, both / problem.pair(i, j));
    }
  }
  return time;
}

ShareSolution SolveShares(const ShareProblem& problem) {
  const size_t n = problem.hosts();
  LH_CHECK(n >= 1 && n <= kShareHostsMax) << n << " hosts";
  // Without anything that limits, or with two hosts, equal shares are as good as any.
  const ShareSolution equal{SecondsPerByte(problem, {}) < kInfinite, {},
                            SecondsPerByte(problem, {})};
  if (n <= 2 || equal.seconds_per_byte == 0) return equal.possible ? equal : ShareSolution();
  double low = TimeOfInputs(problem);
  double high = static_cast<double>(n) * low;  // a host that owns everything needs n - 1
  ShareSolution best{true, {}, kInfinite};
  const auto take = [&](const std::vector<double>& shares) {
    if (Sum(shares) == 0) return;
    Shares rounded = Rounded(shares);
    const double time = SecondsPerByte(problem, rounded);
    if (time < best.seconds_per_byte) best = {true, std::move(rounded), time};
  };
  if (low > 0) {
    low = TimeOfHosts(problem, low, high);
    take(SharesOfHosts(problem, low));
  } else {
    low = 1e-15;
  }
  if (best.seconds_per_byte > (1 + kPrecision) * low) {
    high = std::min(best.seconds_per_byte, equal.seconds_per_byte);
    take(SharesInLeastTime(problem, low, high));
  }
  if (equal.possible && equal.seconds_per_byte <= best.seconds_per_byte) return equal;
  return best.seconds_per_byte < kInfinite ? best : ShareSolution();
}

}  // namespace longhaul::coordinator
