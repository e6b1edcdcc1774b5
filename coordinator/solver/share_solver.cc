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
// The bisection ends when its two ends are this near.
constexpr double kPrecision = 1e-3;

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

// The greatest shares that are possible in time T (for each byte); nullopt: some host cannot even
// send its input in that time. Their sum is 1 or more if T is enough.
std::optional<std::vector<double>> GreatestShares(const ShareProblem& problem, double time) {
  const size_t n = problem.hosts();
  std::vector<double> most(n);  // of each host alone
  for (size_t i = 0; i < n; ++i) {
    const double spare = time * problem.host(i) - 1;
    if (spare < 0) return std::nullopt;
    // More than the whole tensor is never of use. This also keeps the costs finite.
    most[i] = n > 2 ? std::min(1.0, spare / static_cast<double>(n - 2)) : 1.0;
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

double Sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

bool IsEnough(const std::optional<std::vector<double>>& shares) {
  return shares && Sum(*shares) >= 1 - 1e-9;
}

// Rounds shares to units with the right sum: the largest remainders are rounded up.
std::vector<uint32_t> Rounded(const std::vector<double>& shares) {
  const double sum = Sum(shares);
  std::vector<uint32_t> units(shares.size());
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
    if (shares[i] == 0) continue;  // a host that owns nothing stays so
    ++units[i];
    --left;
  }
  return units;
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

double SecondsPerByte(const ShareProblem& problem, const std::vector<uint32_t>& units) {
  const size_t n = problem.hosts();
  double time = 0;
  for (size_t i = 0; n > 1 && i < n; ++i) {
    const double share = static_cast<double>(units[i]) / kShareUnits;
    time = std::max(time, (1 + static_cast<double>(n - 2) * share) / problem.host(i));
    for (size_t j = 0; j < i; ++j) {
      const double both = share + static_cast<double>(units[j]) / kShareUnits;
      if (both > 0) time = std::max(time, both / problem.pair(i, j));
    }
  }
  return time;
}

Shares SolveShares(const ShareProblem& problem) {
  const size_t n = problem.hosts();
  LH_CHECK(n >= 1 && n <= kShareHostsMax) << n << " hosts";
  // Without anything that limits, or with two hosts, equal shares are as good as any.
  const std::vector<uint32_t> equal = Rounded(std::vector<double>(n, 1));
  const double equal_time = SecondsPerByte(problem, equal);
  double low = 0;  // each host sends its input at least
  for (size_t i = 0; n > 1 && i < n; ++i) low = std::max(low, 1 / problem.host(i));
  if (n <= 2 || equal_time == 0) {
    return equal_time < kInfinite ? Shares{equal, equal_time} : Shares{};
  }
  double high = equal_time;
  if (high == kInfinite) {
    // With pairs that cannot exchange anything, the owners are hosts that reach all others.
    high = std::max(low, 1e-15);
    constexpr int kDoublingsMax = 200;
    int doublings = 0;
    while (!IsEnough(GreatestShares(problem, high))) {
      if (++doublings > kDoublingsMax) return {};
      low = high;
      high *= 2;
    }
  }
  while (high - low > kPrecision * high) {
    const double middle = (low + high) / 2;
    (IsEnough(GreatestShares(problem, middle)) ? high : low) = middle;
  }
  Shares best{Rounded(*GreatestShares(problem, high)), 0};
  best.seconds_per_byte = SecondsPerByte(problem, best.units);
  if (equal_time <= best.seconds_per_byte) return {equal, equal_time};
  return best;
}

}  // namespace longhaul::coordinator
