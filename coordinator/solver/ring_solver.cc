#include "coordinator/solver/ring_solver.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/prng.h"

namespace longhaul::coordinator {
namespace {

using Order = std::vector<uint32_t>;

// ------------------------------------------------------------------------------ the ladder

constexpr uint64_t NextStep(uint64_t bound) {
  const uint64_t width = bound / 32 + 1;
  return bound > UINT64_MAX - width ? 0 : bound + width;
}
constexpr size_t CountSteps() {
  size_t count = 0;
  for (uint64_t bound = 1; bound != 0; bound = NextStep(bound)) ++count;
  return count;
}
// The bandwidth at which each step begins.
constexpr auto kLadder = [] {
  std::array<uint64_t, CountSteps()> ladder{};
  size_t at = 0;
  for (uint64_t bound = 1; bound != 0; bound = NextStep(bound)) ladder[at++] = bound;
  return ladder;
}();

// ------------------------------------------------------------------------------ costs

// The cost of a link. For a given step of the bottleneck, the sum over a ring compares rings as
// Compare() does: first by blocked links, then by unknown links, then by links that are too slow,
// then by latency. The sum of one kind over kRingNodesMax links is less than one of the next kind.
constexpr uint32_t kLatencyMax = 1000000;
constexpr int64_t kSlow = int64_t{1} << 30;
constexpr int64_t kUnknown = int64_t{1} << 41;
constexpr int64_t kBlocked = int64_t{1} << 52;
static_assert(int64_t{kRingNodesMax} * kLatencyMax < kSlow);
static_assert(int64_t{kRingNodesMax} * (kSlow + kLatencyMax) < kUnknown);
static_assert(int64_t{kRingNodesMax} * kUnknown < kBlocked - kUnknown);

bool HasSlow(int64_t cost) { return cost % kUnknown >= kSlow; }

uint32_t Latency(const LinkQuality& link) {
  return link.latency_us == 0 ? kLatencyMax : std::min(link.latency_us, kLatencyMax);
}

// The problem in the form that the searches use: each link by its kind and its cost.
class Costs {
 public:
  static constexpr uint16_t kIsBlocked = 0;
  static constexpr uint16_t kIsUnknown = 1;  // higher kinds: a known link, as its step plus 1

  explicit Costs(const LinkMatrix& links) : nodes_(links.nodes()), cost_(nodes_ * nodes_, 0) {
    kinds_.reserve(nodes_ * nodes_);
    latencies_.reserve(nodes_ * nodes_);
    for (size_t from = 0; from < nodes_; ++from) {
      for (size_t to = 0; to < nodes_; ++to) {
        const LinkQuality& link = links.At(from, to);
        const uint32_t step = BandwidthStep(link.bytes_per_second);
        kinds_.push_back(link.blocked ? kIsBlocked : static_cast<uint16_t>(step + 1));
        latencies_.push_back(Latency(link));
      }
    }
  }

  size_t nodes() const { return nodes_; }
  uint16_t Kind(uint32_t from, uint32_t to) const { return kinds_[from * nodes_ + to]; }
  int64_t operator()(uint32_t from, uint32_t to) const { return cost_[from * nodes_ + to]; }

  // The kinds of all known links, each once, in rising order.
  std::vector<uint16_t> Known() const {
    std::vector<bool> seen(kLadder.size() + 2, false);
    for (size_t from = 0; from < nodes_; ++from) {
      for (size_t to = 0; to < nodes_; ++to) {
        if (from != to) seen[kinds_[from * nodes_ + to]] = true;
      }
    }
    std::vector<uint16_t> known;
    for (size_t kind = kIsUnknown + 1; kind < seen.size(); ++kind) {
      if (seen[kind]) known.push_back(static_cast<uint16_t>(kind));
    }
    return known;
  }

  // From now on, known links of a lower kind are too slow.
  void SetFloor(uint16_t floor) {
    for (size_t i = 0; i < cost_.size(); ++i) {
      const uint16_t kind = kinds_[i];
      cost_[i] = latencies_[i];
      if (kind == kIsBlocked) {
        cost_[i] += kBlocked;
      } else if (kind == kIsUnknown) {
        cost_[i] += kUnknown;
      } else if (kind < floor) {
        cost_[i] += kSlow;
      }
    }
  }

  int64_t Sum(const Order& ring) const {
    int64_t sum = 0;
    for (size_t i = 0; i < ring.size(); ++i) sum += (*this)(ring[i], ring[(i + 1) % ring.size()]);
    return sum;
  }

 private:
  size_t nodes_;
  std::vector<uint16_t> kinds_;
  std::vector<uint32_t> latencies_;
  std::vector<int64_t> cost_;
};

// ------------------------------------------------------------------------------ exact

// Finds the cheapest ring with the dynamic programme of Held and Karp: for each set of nodes, and
// for each node in it, the cheapest path from node 0 through all of the set that ends at that node.
class HeldKarp {
 public:
  explicit HeldKarp(const Costs& costs) : costs_(costs), rest_(costs.nodes() - 1) {
    LH_CHECK(costs.nodes() > 1 && costs.nodes() <= kExactNodesMax) << costs.nodes() << " nodes";
    best_.resize((size_t{1} << rest_) * rest_);
  }

  Order Solve() {
    const size_t all = (size_t{1} << rest_) - 1;
    for (size_t set = 1; set <= all; ++set) {
      for (size_t last = 0; last < rest_; ++last) {
        if ((set >> last & 1) != 0) best_[set * rest_ + last] = Cheapest(set, last).first;
      }
    }
    // Walk back from the end. Where two nodes are equally good, take the smaller number.
    Order ring;
    int64_t cheapest = kNone;
    size_t last = 0;
    for (size_t node = 0; node < rest_; ++node) {
      const int64_t cost = best_[all * rest_ + node] + costs_(Node(node), 0);
      if (cost < cheapest) std::tie(cheapest, last) = std::tuple(cost, node);
    }
    for (size_t set = all; set != 0;) {
      ring.push_back(Node(last));
      const size_t before = Cheapest(set, last).second;
      set &= ~(size_t{1} << last);
      last = before;
    }
    ring.push_back(0);
    std::reverse(ring.begin(), ring.end());
    return ring;
  }
  uint64_t steps() const { return steps_; }

 private:
  static constexpr int64_t kNone = INT64_MAX;
  static uint32_t Node(size_t index) { return static_cast<uint32_t>(index + 1); }

  // The cheapest path through `set` that ends at `last`, and the node before `last`.
  std::pair<int64_t, size_t> Cheapest(size_t set, size_t last) {
    const size_t without = set & ~(size_t{1} << last);
    steps_ += rest_;
    if (without == 0) return {costs_(0, Node(last)), 0};
    std::pair<int64_t, size_t> found(kNone, 0);
    for (size_t before = 0; before < rest_; ++before) {
      if ((without >> before & 1) == 0) continue;
      const int64_t cost = best_[without * rest_ + before] + costs_(Node(before), Node(last));
      if (cost < found.first) found = {cost, before};
    }
    return found;
  }

  const Costs& costs_;
  const size_t rest_;  // the number of nodes without node 0
  std::vector<int64_t> best_;
  uint64_t steps_ = 0;
};

// Finds the highest floor for which there is a ring without slower links, and the cheapest ring for
// it. The numbers of blocked and unknown links count before the floor, so they are the smallest at
// every floor.
Order SolveExactly(Costs* costs, uint64_t* steps) {
  const auto solve = [&](uint16_t floor) {
    costs->SetFloor(floor);
    HeldKarp search(*costs);
    Order ring = search.Solve();
    *steps += search.steps();
    return ring;
  };
  const std::vector<uint16_t> known = costs->Known();
  Order best = solve(0);
  // For floors below `low` there is a ring. For `high` and above there is none.
  size_t low = 0;
  size_t high = known.size();
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    Order ring = solve(known[middle]);
    if (HasSlow(costs->Sum(ring))) {
      high = middle;
    } else {
      best = std::move(ring);
      low = middle + 1;
    }
  }
  return best;
}

// ------------------------------------------------------------------------------ covers

// A cycle cover: cycles that together have each node once. They use allowed links only: known links
// from a floor on, and unknown links if asked for.
class Cover {
 public:
  Cover(const Costs& costs, uint16_t floor, bool unknown)
      : costs_(costs), floor_(floor), unknown_(unknown), nodes_(costs.nodes()), out_(nodes_) {
    for (uint32_t from = 0; from < nodes_; ++from) {
      for (uint32_t to = 0; to < nodes_; ++to) {
        if (Allowed(from, to)) out_[from].push_back(to);
      }
    }
    steps_ += nodes_ * nodes_;
  }

  // Finds a cover. Returns false if there is none; then there is no ring over these links either.
  bool Find(Prng* prng) {
    next_.assign(nodes_, kNobody);
    before_.assign(nodes_, kNobody);
    Order order(nodes_);
    for (uint32_t i = 0; i < nodes_; ++i) order[i] = i;
    Shuffle(prng, &order);
    for (Order& row : out_) Shuffle(prng, &row);
    for (const uint32_t from : order) {
      for (const uint32_t to : out_[from]) {
        ++steps_;
        if (before_[to] != kNobody) continue;
        Link(from, to);
        break;
      }
    }
    return std::all_of(order.begin(), order.end(),
                       [this](uint32_t from) { return next_[from] != kNobody || Augment(from); });
  }

  // Joins cycles until one is left. If no allowed links join two cycles, the cheapest other links
  // do.
  Order Join() {
    Label();
    while (sizes_.size() > 1 && JoinAllowed()) {
    }
    while (sizes_.size() > 1) JoinCheapest();
    Order ring;
    for (uint32_t node = 0; ring.size() < nodes_; node = next_[node]) ring.push_back(node);
    return ring;
  }

  uint64_t steps() const { return steps_; }

 private:
  static constexpr uint32_t kNobody = UINT32_MAX;

  bool Allowed(uint32_t from, uint32_t to) const {
    if (from == to) return false;
    const uint16_t kind = costs_.Kind(from, to);
    return kind == Costs::kIsUnknown ? unknown_ : kind != Costs::kIsBlocked && kind >= floor_;
  }
  static void Shuffle(Prng* prng, Order* order) {
    for (size_t i = order->size(); i > 1; --i) std::swap((*order)[i - 1], (*order)[prng->Below(i)]);
  }
  void Link(uint32_t from, uint32_t to) {
    next_[from] = to;
    before_[to] = from;
  }

  // Gives `start` a successor. Searches breadth first for nodes that can change to other
  // successors.
  bool Augment(uint32_t start) {
    std::vector<uint32_t> reached_from(nodes_, kNobody);
    std::deque<uint32_t> queue{start};
    while (!queue.empty()) {
      const uint32_t from = queue.front();
      queue.pop_front();
      for (uint32_t to : out_[from]) {
        ++steps_;
        if (reached_from[to] != kNobody) continue;
        reached_from[to] = from;
        if (before_[to] != kNobody) {
          queue.push_back(before_[to]);
          continue;
        }
        while (to != kNobody) {
          const uint32_t giver = reached_from[to];
          const uint32_t given_up = next_[giver];
          Link(giver, to);
          to = giver == start ? kNobody : given_up;
        }
        return true;
      }
    }
    return false;
  }

  void Label() {
    cycle_.assign(nodes_, kNobody);
    sizes_.clear();
    for (uint32_t start = 0; start < nodes_; ++start) {
      if (cycle_[start] != kNobody) continue;
      size_t size = 0;
      for (uint32_t node = start; cycle_[node] == kNobody; node = next_[node], ++size) {
        cycle_[node] = start;
      }
      sizes_.emplace_back(size, start);
    }
    steps_ += nodes_;
    std::sort(sizes_.begin(), sizes_.end());
  }

  // Two links a -> a' and b -> b' of two cycles become a -> b' and b -> a', which makes one cycle.
  void Exchange(uint32_t a, uint32_t b) {
    const uint32_t after_a = next_[a];
    Link(a, next_[b]);
    Link(b, after_a);
    Label();
  }

  // Join the smallest cycles first, because they have the fewest links to be joined by.
  bool JoinAllowed() {
    for (const auto& [size, start] : sizes_) {
      uint32_t a = start;
      for (size_t i = 0; i < size; ++i, a = next_[a]) {
        for (const uint32_t to : out_[a]) {
          ++steps_;
          if (cycle_[to] == cycle_[a] || !Allowed(before_[to], next_[a])) continue;
          Exchange(a, before_[to]);
          return true;
        }
      }
    }
    return false;
  }

  void JoinCheapest() {
    const auto [size, start] = sizes_.front();
    std::tuple<int64_t, uint32_t, uint32_t> best(INT64_MAX, 0, 0);
    uint32_t a = start;
    for (size_t i = 0; i < size; ++i, a = next_[a]) {
      for (uint32_t b = 0; b < nodes_; ++b) {
        if (cycle_[b] == cycle_[a]) continue;
        const int64_t cost =
            costs_(a, next_[b]) + costs_(b, next_[a]) - costs_(a, next_[a]) - costs_(b, next_[b]);
        best = std::min(best, std::tuple(cost, a, b));
      }
    }
    steps_ += size * nodes_;
    Exchange(std::get<1>(best), std::get<2>(best));
  }

  const Costs& costs_;
  const uint16_t floor_;
  const bool unknown_;
  const size_t nodes_;
  std::vector<Order> out_;  // for each node, the nodes that allowed links lead to
  Order next_;
  Order before_;
  std::vector<uint32_t> cycle_;  // for each node, its cycle, named by the smallest node of that
  std::vector<std::pair<size_t, uint32_t>> sizes_;  // for each cycle, its size and its name
  uint64_t steps_ = 0;
};

// ------------------------------------------------------------------------------ exchanges

// A ring that is made cheaper by exchanging two or three links at a time. The cost of a link
// depends on its direction, so a part of the ring that is reversed has another cost.
class Exchanges {
 public:
  Exchanges(const Costs& costs, uint64_t seed) : costs_(costs), nodes_(costs.nodes()) {
    // The cheapest links from each node and to each node. Each node orders equally cheap links
    // differently; otherwise all nodes would try the same few nodes first.
    out_.resize(nodes_);
    in_.resize(nodes_);
    std::vector<std::tuple<int64_t, uint64_t, uint32_t>> row;
    for (uint32_t node = 0; node < nodes_; ++node) {
      for (const bool out : {true, false}) {
        row.clear();
        for (uint32_t other = 0; other < nodes_; ++other) {
          if (other == node) continue;
          uint64_t mix = seed ^ (uint64_t{node} << 32 | uint64_t{other} << 1 | (out ? 1 : 0));
          row.emplace_back(out ? costs_(node, other) : costs_(other, node), SplitMix64(&mix),
                           other);
        }
        const size_t count = std::min(kNear, row.size());
        std::partial_sort(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(count), row.end());
        Order& near = out ? out_[node] : in_[node];
        for (size_t i = 0; i < count; ++i) near.push_back(std::get<2>(row[i]));
      }
    }
    steps_ += 2 * nodes_ * nodes_;
  }

  void Adopt(Order ring) {
    ring_ = std::move(ring);
    queued_.assign(nodes_, false);
    queue_.clear();
    Refresh();
  }
  const Order& ring() const { return ring_; }
  int64_t cost() const { return cost_; }
  uint64_t steps() const { return steps_; }

  // Exchanges links until no exchange at any node makes the ring cheaper, or the steps are used up.
  void ImproveAll(uint64_t steps_max) {
    for (const uint32_t node : ring_) Enqueue(node);
    Improve(steps_max);
  }

  // Disturbs the ring at one place and improves it again. If the result is worse than before,
  // restores the ring.
  void Kick(Prng* prng, uint64_t steps_max) {
    const Order ring = ring_;
    const Order position = position_;
    const std::vector<int64_t> turned = turned_;
    const int64_t cost = cost_;
    const size_t longest = std::min<size_t>(kKickMax, (nodes_ - 1) / 2);
    const size_t first = prng->Below(nodes_);
    const size_t one = 1 + prng->Below(longest);
    const size_t two = 1 + prng->Below(longest);
    steps_ += nodes_;
    Swap(first, one, two);
    Improve(steps_max);
    if (cost_ <= cost) return;
    ring_ = ring;
    position_ = position;
    turned_ = turned;
    cost_ = cost;
    for (const uint32_t node : queue_) queued_[node] = false;
    queue_.clear();
  }

 private:
  static constexpr size_t kNear = 12;
  static constexpr size_t kKickMax = 40;

  uint32_t Next(uint32_t node) const { return ring_[(position_[node] + 1) % nodes_]; }
  uint32_t Before(uint32_t node) const { return ring_[(position_[node] + nodes_ - 1) % nodes_]; }
  // The number of links along the ring from one node to another.
  size_t Distance(uint32_t from, uint32_t to) const {
    return (position_[to] + nodes_ - position_[from]) % nodes_;
  }
  void Enqueue(uint32_t node) {
    if (queued_[node]) return;
    queued_[node] = true;
    queue_.push_back(node);
  }

  void Refresh() {
    position_.resize(nodes_);
    turned_.resize(nodes_ + 1);
    cost_ = 0;
    for (size_t i = 0; i < nodes_; ++i) {
      position_[ring_[i]] = static_cast<uint32_t>(i);
      const uint32_t next = ring_[(i + 1) % nodes_];
      const int64_t forward = costs_(ring_[i], next);
      cost_ += forward;
      turned_[i + 1] = turned_[i] + costs_(next, ring_[i]) - forward;
    }
    steps_ += nodes_;
  }
  // How much more it costs to walk from one node to the other backwards.
  int64_t Turned(uint32_t from, uint32_t to) const {
    const size_t begin = position_[from];
    const size_t end = position_[to];
    return turned_[end] - turned_[begin] + (end < begin ? turned_[nodes_] : 0);
  }

  void Improve(uint64_t steps_max) {
    while (!queue_.empty() && steps_ < steps_max) {
      const uint32_t node = queue_.front();
      if (MoveBehind(node) || TurnBehind(node)) continue;
      queue_.pop_front();
      queued_[node] = false;
    }
  }

  // a -> a' ... b -> s ... c -> t ... a becomes a -> s ... c -> a' ... b -> t ... a: two
  // neighbouring parts of the ring change places.
  bool MoveBehind(uint32_t a) {
    const uint32_t after = Next(a);
    const int64_t now = costs_(a, after);
    for (const uint32_t s : out_[a]) {
      ++steps_;
      const int64_t gain = now - costs_(a, s);
      if (gain <= 0) break;
      if (s == after) continue;
      const uint32_t b = Before(s);
      const int64_t broken = gain + costs_(b, s);
      const size_t reach = Distance(s, a);
      const auto gains = [&](uint32_t c, uint32_t t) {
        ++steps_;
        return broken + costs_(c, t) - costs_(c, after) - costs_(b, t) > 0;
      };
      for (const uint32_t c : in_[after]) {
        if (c == a || Distance(s, c) >= reach) continue;
        if (gains(c, Next(c))) return Exchange(after, s, c);
      }
      for (const uint32_t t : out_[b]) {
        if (t == s || Distance(s, t) > reach) continue;
        if (gains(Before(t), t)) return Exchange(after, s, Before(t));
      }
    }
    return false;
  }

  // a -> a' ... b -> b' becomes a -> b ... a' -> b': the part from a' to b is reversed.
  bool TurnBehind(uint32_t a) {
    const uint32_t after = Next(a);
    const int64_t now = costs_(a, after);
    for (const uint32_t b : out_[a]) {
      ++steps_;
      if (costs_(a, b) >= now) break;
      if (b == after) continue;
      const uint32_t behind = Next(b);
      const int64_t delta =
          costs_(a, b) + costs_(after, behind) - now - costs_(b, behind) + Turned(after, b);
      if (delta >= 0) continue;
      const size_t length = Distance(after, b) + 1;
      const size_t begin = position_[after];
      for (size_t i = 0; i < length / 2; ++i) {
        std::swap(ring_[(begin + i) % nodes_], ring_[(begin + length - 1 - i) % nodes_]);
      }
      for (const uint32_t node : {a, after, b, behind}) Enqueue(node);
      Refresh();
      return true;
    }
    return false;
  }

  bool Exchange(uint32_t after, uint32_t s, uint32_t c) {
    Swap(position_[after], Distance(after, s), Distance(s, c) + 1);
    return true;
  }

  // Two neighbouring parts of these lengths change places. The first one begins at `begin`.
  void Swap(size_t begin, size_t one, size_t two) {
    moved_.clear();
    for (size_t i = 0; i < two; ++i) moved_.push_back(ring_[(begin + one + i) % nodes_]);
    for (size_t i = 0; i < one; ++i) moved_.push_back(ring_[(begin + i) % nodes_]);
    for (size_t i = 0; i < moved_.size(); ++i) ring_[(begin + i) % nodes_] = moved_[i];
    const size_t last = begin + one + two - 1;
    for (const size_t at :
         {begin + nodes_ - 1, begin, begin + two - 1, begin + two, last, last + 1}) {
      Enqueue(ring_[at % nodes_]);
    }
    Refresh();
  }

  const Costs& costs_;
  const size_t nodes_;
  std::vector<Order> out_;
  std::vector<Order> in_;
  Order ring_;
  std::vector<uint32_t> position_;  // of each node in the ring
  std::vector<int64_t> turned_;     // how much more it costs to walk backwards, from position 0 on
  int64_t cost_ = 0;
  std::vector<bool> queued_;
  std::deque<uint32_t> queue_;  // nodes at which an exchange may make the ring cheaper
  Order moved_;
  uint64_t steps_ = 0;
};

// ------------------------------------------------------------------------------ the search

class Search {
 public:
  Search(const RingProblem& problem, uint64_t steps_max, Costs* costs)
      : problem_(problem),
        costs_(*costs),
        known_(costs->Known()),
        steps_max_(steps_max),
        prng_(problem.seed),
        best_(problem.present),
        best_score_(ScoreRing(problem.links, problem.present)) {}

  Order Run() {
    // First look for rings with known links only, if there may be any.
    bool unknown = false;
    if (known_.empty() || !Bound(unknown)) {
      unknown = true;
      if (!Bound(unknown)) bound_ = known_.size();
    }
    Climb(unknown);
    // Then try to raise the floor a little, beginning with a disturbed ring.
    while (NextFloor() <= bound_ && NextFloor() < known_.size()) {
      if (!Polish(known_[NextFloor()], steps_ + Left() / 4, true)) break;
    }
    const uint32_t step = BandwidthStep(best_score_.bottleneck);
    Polish(step == 0 ? uint16_t{0} : static_cast<uint16_t>(step + 1), steps_max_, false);
    return best_;
  }
  uint64_t steps() const { return steps_; }

 private:
  static constexpr int kTries = 3;

  uint64_t Left() const { return steps_ < steps_max_ ? steps_max_ - steps_ : 0; }

  bool Offer(const Order& ring) {
    const RingScore score = ScoreRing(problem_.links, ring);
    steps_ += ring.size();
    if (Compare(score, best_score_) >= 0) return false;
    best_ = ring;
    best_score_ = score;
    return true;
  }

  // The index of the first entry of known_ above the bottleneck of the best ring.
  size_t NextFloor() const {
    const uint32_t step = BandwidthStep(best_score_.bottleneck);
    if (step == 0) return known_.size();
    return static_cast<size_t>(
        std::upper_bound(known_.begin(), known_.end(), static_cast<uint16_t>(step + 1)) -
        known_.begin());
  }

  // Sets bound_: no ring of allowed links has a higher floor. Returns false if there is no ring of
  // allowed links.
  bool Bound(bool unknown) {
    size_t low = 0;
    size_t high = known_.size();
    bool found = false;
    while (low < high && Left() > 0) {
      const size_t middle = low + (high - low) / 2;
      Cover cover(costs_, known_[middle], unknown);
      const bool covered = cover.Find(&prng_);
      steps_ += cover.steps();
      if (covered) {
        found = true;
        bound_ = middle;
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return found;
  }

  // Finds the highest floor for which the search finds a ring, by bisection from the bound down.
  void Climb(bool unknown) {
    if (bound_ >= known_.size()) return;
    size_t low = 0;
    size_t high = bound_ + 1;
    for (size_t middle = bound_; low < high && Left() > 0; middle = low + (high - low) / 2) {
      if (Construct(known_[middle], unknown)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
  }

  bool Construct(uint16_t floor, bool unknown) {
    costs_.SetFloor(floor);
    steps_ += costs_.nodes() * costs_.nodes();
    Cover cover(costs_, floor, unknown);
    std::optional<Exchanges> exchanges;
    const uint64_t steps_before = steps_;
    bool reached = false;
    for (int i = 0; i < kTries && !reached && Left() > 0; ++i) {
      if (!cover.Find(&prng_)) break;
      Order ring = cover.Join();
      if (HasSlow(costs_.Sum(ring))) {
        if (!exchanges) exchanges.emplace(costs_, problem_.seed);
        exchanges->Adopt(std::move(ring));
        exchanges->ImproveAll(exchanges->steps() + Left() / 8);
        ring = exchanges->ring();
      }
      reached = !HasSlow(costs_.Sum(ring));
      Offer(ring);
      steps_ = steps_before + cover.steps() + (exchanges ? exchanges->steps() : 0);
    }
    steps_ = std::max(steps_, steps_before + cover.steps());
    return reached;
  }

  // Makes the best ring cheaper at this floor, until steps_ reaches `until`. With `only_reach` it
  // stops as soon as the ring has no link below the floor. Returns true if it found a better ring.
  bool Polish(uint16_t floor, uint64_t until, bool only_reach) {
    if (steps_ >= until) return false;
    costs_.SetFloor(floor);
    Exchanges exchanges(costs_, problem_.seed);
    const uint64_t base = steps_ + costs_.nodes() * costs_.nodes();
    const auto there = [&] { return only_reach && !HasSlow(exchanges.cost()); };
    const uint64_t steps_max = until > base ? until - base : 0;
    exchanges.Adopt(best_);
    exchanges.ImproveAll(steps_max);
    while (exchanges.steps() < steps_max && !there()) exchanges.Kick(&prng_, steps_max);
    steps_ = base + exchanges.steps();
    return Offer(exchanges.ring());
  }

  const RingProblem& problem_;
  Costs& costs_;
  const std::vector<uint16_t> known_;
  const uint64_t steps_max_;
  Prng prng_;
  size_t bound_ = 0;  // an index into known_
  Order best_;
  RingScore best_score_;
  uint64_t steps_ = 0;
};

void CheckProblem(const RingProblem& problem) {
  const size_t nodes = problem.links.nodes();
  LH_CHECK(nodes <= kRingNodesMax) << "a ring of " << nodes;
  LH_CHECK(problem.present.size() == nodes)
      << "a ring of " << problem.present.size() << " among " << nodes;
  std::vector<bool> seen(nodes, false);
  for (const uint32_t node : problem.present) {
    LH_CHECK(node < nodes && !seen[node]) << "node " << node << " of " << nodes;
    seen[node] = true;
  }
}

}  // namespace

uint32_t BandwidthStep(uint64_t bytes_per_second) {
  return static_cast<uint32_t>(std::upper_bound(kLadder.begin(), kLadder.end(), bytes_per_second) -
                               kLadder.begin());
}

int Compare(const RingScore& a, const RingScore& b) {
  if (a.blocked != b.blocked) return a.blocked < b.blocked ? -1 : 1;
  if (a.unknown != b.unknown) return a.unknown < b.unknown ? -1 : 1;
  const uint32_t step_a = BandwidthStep(a.bottleneck);
  const uint32_t step_b = BandwidthStep(b.bottleneck);
  if (step_a != step_b) return step_a > step_b ? -1 : 1;
  if (a.latency_us != b.latency_us) return a.latency_us < b.latency_us ? -1 : 1;
  return 0;
}

RingScore ScoreRing(const LinkMatrix& links, const std::vector<uint32_t>& order) {
  RingScore score;
  if (order.size() < 2) return score;
  for (size_t i = 0; i < order.size(); ++i) {
    const LinkQuality& link = links.At(order[i], order[(i + 1) % order.size()]);
    score.latency_us += Latency(link);
    if (link.latency_us == 0) ++score.guessed;
    if (link.blocked) {
      ++score.blocked;
    } else if (link.bytes_per_second == 0) {
      ++score.unknown;
    } else if (score.bottleneck == 0 || link.bytes_per_second < score.bottleneck) {
      score.bottleneck = link.bytes_per_second;
    }
  }
  return score;
}

bool WorthChanging(const RingScore& present, const RingScore& other) {
  if (other.blocked != present.blocked) return other.blocked < present.blocked;
  if (other.unknown > present.unknown) return false;
  if (other.bottleneck > present.bottleneck &&
      other.bottleneck - present.bottleneck >= present.bottleneck / 10) {
    return present.bottleneck > 0;
  }
  const bool slower = present.bottleneck > other.bottleneck &&
                      present.bottleneck - other.bottleneck > present.bottleneck / 32;
  return !slower && present.guessed == 0 && other.latency_us + 1000 <= present.latency_us &&
         other.latency_us <= present.latency_us / 4 * 3;
}

uint64_t DefaultSteps(size_t nodes) { return uint64_t{nodes} * (20000 + 60 * nodes); }

RingSolution SolveRing(const RingProblem& problem) {
  CheckProblem(problem);
  const size_t nodes = problem.links.nodes();
  RingSolution solution;
  solution.order = problem.present;
  solution.present = ScoreRing(problem.links, problem.present);
  solution.score = solution.present;
  solution.exact = nodes <= kExactNodesMax;
  if (nodes < 3) return solution;

  Costs costs(problem.links);
  Order order;
  if (solution.exact) {
    order = SolveExactly(&costs, &solution.steps);
  } else {
    Search search(problem, problem.steps_max == 0 ? DefaultSteps(nodes) : problem.steps_max,
                  &costs);
    order = search.Run();
    solution.steps = search.steps();
  }
  const RingScore score = ScoreRing(problem.links, order);
  if (Compare(score, solution.present) >= 0) return solution;
  std::rotate(order.begin(), std::find(order.begin(), order.end(), problem.present.front()),
              order.end());
  solution.order = std::move(order);
  solution.score = score;
  return solution;
}

}  // namespace longhaul::coordinator
