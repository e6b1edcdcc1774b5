#include "coordinator/solver/share_solver.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace longhaul::coordinator {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// A time is good enough if it is this near to a lower bound.
constexpr double kPrecision = 1e-3;
// A search that takes more steps than this finds nothing. None was seen to take more than ten.
constexpr int kStepsMax = 64;
// The sum of the shares may be below 1 by this much, as rounding makes it 1.
constexpr double kMissingMax = 1e-9;

// Solves an assignment of least cost by shortest augmenting paths (the Hungarian method). `cost` is
// symmetric, n x n. For all i and j, the potentials of row i and column j add up to at most
// cost(i, j), and all of them to the cost of the assignment.
class Assignment {
 public:
  Assignment(size_t n, const std::vector<double>& cost)
      : n_(n), cost_(cost), row_(n + 1), column_(n + 1), matched_(n + 1), before_(n + 1) {}

  void Solve() {
    for (size_t i = 1; i <= n_; ++i) Augment(i);
  }

  // The mean of the potentials of row i and column i.
  double potential(size_t i) const { return (row_[i + 1] + column_[i + 1]) / 2; }
  // The row that has column j.
  size_t row_of(size_t j) const { return matched_[j + 1] - 1; }

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

// A value that depends on the time: what it is at the time in question, and how fast it grows
// there. It is the least of several lines, so it never grows faster later on.
struct Growing {
  double now;
  double slope;
};

Growing Less(Growing a, Growing b) { return a.now <= b.now ? a : b; }

Growing operator+(Growing a, Growing b) { return {a.now + b.now, a.slope + b.slope}; }

// The greatest share of a host among more than two in this time (for each byte), as far as the host
// itself limits it. `time`: at least TimeOfInputs().
Growing MostOf(const ShareProblem& problem, size_t host, double time) {
  const Growing greatest{Greatest(problem.hosts()), 0};
  const double rate = problem.host(host);
  if (rate == kInfinite) return greatest;
  const double others = static_cast<double>(problem.hosts() - 2);
  return Less(greatest, {std::max(0.0, (time * rate - 1) / others), rate / others});
}

double Sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// 1 for each host that can exchange something with all others, 0 for the rest: they own nothing.
std::vector<double> PossibleOwners(const ShareProblem& problem) {
  std::vector<double> owners(problem.hosts(), 1);
  for (size_t i = 0; i < owners.size(); ++i) {
    for (size_t j = 0; j < owners.size(); ++j) {
      if (j != i && problem.pair(i, j) == 0) owners[i] = 0;
    }
  }
  return owners;
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
    shares[i] = MostOf(problem, i, time).now;
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

struct SharesInTime {
  std::vector<double> shares;
  // How fast their sum grows with the time.
  double slope = 0;
};

// The greatest shares that are possible in this time, which is at least TimeOfInputs(). Their sum
// is 1 or more if the time is enough.
SharesInTime GreatestShares(const ShareProblem& problem, double time) {
  const size_t n = problem.hosts();
  const auto pair = [&](size_t i, size_t j) {
    const double rate = problem.pair(i, j);
    return Growing{time * rate, rate};
  };
  std::vector<Growing> most(n);  // of each host alone
  for (size_t i = 0; i < n; ++i) {
    most[i] = MostOf(problem, i, time);
    for (size_t j = 0; j < n; ++j) {
      if (j != i) most[i] = Less(most[i], pair(i, j));
    }
  }
  // An assignment must cover each host exactly once, but a cover may do so more often. It never
  // pays more for a pair than for the two hosts alone.
  const auto cost_of = [&](size_t i, size_t j) {
    const Growing alone = most[i] + most[j];
    return i == j ? alone : Less(alone, pair(i, j));
  };
  std::vector<double> cost(n * n);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) cost[i * n + j] = cost_of(i, j).now;
  }
  Assignment assignment(n, cost);
  assignment.Solve();
  SharesInTime found;
  for (size_t i = 0; i < n; ++i) {
    // A share below 0 may be 0 as well: no other share is greater than its host allows alone.
    found.shares.push_back(std::max(0.0, assignment.potential(i)));
    found.slope += cost_of(assignment.row_of(i), i).slope / 2;
  }
  return found;
}

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

// Returns the greatest shares in the least time; empty: they were not found. `time`: a lower bound.
std::vector<double> SharesInLeastTime(const ShareProblem& problem, double time) {
  for (int step = 0; step < kStepsMax && time < kInfinite; ++step) {
    SharesInTime found = GreatestShares(problem, time);
    const double missing = 1 - Sum(found.shares);
    if (missing <= kMissingMax) return std::move(found.shares);
    // The sum never grows faster later on. So this is a lower bound, too.
    time += missing / found.slope;
  }
  return {};
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
  const ShareSolution equal{
      SecondsPerByte(problem, {}) < kInfinite, {}, SecondsPerByte(problem, {})};
  if (n <= 2 || equal.seconds_per_byte == 0) return equal.possible ? equal : ShareSolution();
  const std::vector<double> owners = PossibleOwners(problem);
  if (Sum(owners) * Greatest(n) < 1) return {};
  ShareSolution best{true, {}, kInfinite};
  const auto take = [&](const std::vector<double>& shares) {
    if (shares.empty()) return;
    Shares rounded = Rounded(shares);
    const double time = SecondsPerByte(problem, rounded);
    if (time < best.seconds_per_byte) best = {true, std::move(rounded), time};
  };
  take(owners);
  double low = TimeOfInputs(problem);
  if (low > 0) {
    // A host that owns everything needs n - 1 times the time of its input.
    low = TimeOfHosts(problem, low, static_cast<double>(n) * low);
    take(SharesOfHosts(problem, low));
  } else {
    low = 1e-15;
  }
  if (best.seconds_per_byte > (1 + kPrecision) * low) {
    take(SharesInLeastTime(problem, low));
  }
  return equal.possible && equal.seconds_per_byte <= best.seconds_per_byte ? equal : best;
}

}  // namespace longhaul::coordinator
