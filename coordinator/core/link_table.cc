#include "coordinator/core/link_table.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

namespace longhaul::coordinator {
namespace {

// Whether two measurements differ by more than noise: by two steps of the solver (BandwidthStep()),
// or in `at_least` or `held`, or in latency by more than an eighth and more than a millisecond.
bool Differs(const MeasuredLink& a, const MeasuredLink& b) {
  const uint32_t step_a = BandwidthStep(a.bytes_per_second);
  const uint32_t step_b = BandwidthStep(b.bytes_per_second);
  if (std::max(step_a, step_b) - std::min(step_a, step_b) >= 2) return true;
  if (a.at_least != b.at_least || a.held != b.held) return true;
  const auto [low, high] = std::minmax(a.rtt_us, b.rtt_us);
  return high - low > std::max(high / 8, 1000u);
}

// Hosts stay with shares with which an op takes up to so many times the least time.
constexpr double kWorthMoving = 1.05;

bool DiffersByATenth(uint64_t a, uint64_t b) {
  const auto [low, high] = std::minmax(a, b);
  return high - low > high / 10;
}

// Rates of equal links differ by some percent from one measurement to the next. Hosts whose rates
// are so near to each other get the mean of them. Otherwise the one that was measured highest would
// own most, and set the pace.
void LevelRates(std::vector<double>* rates) {
  constexpr double kNear = 0.88;  // of the highest one
  std::vector<size_t> by_rate;
  for (size_t i = 0; i < rates->size(); ++i) {
    if (std::isfinite((*rates)[i])) by_rate.push_back(i);
  }
  std::sort(by_rate.begin(), by_rate.end(),
            [rates](size_t a, size_t b) { return (*rates)[a] > (*rates)[b]; });
  for (size_t begin = 0; begin < by_rate.size();) {
    size_t end = begin;
    double sum = 0;
    while (end < by_rate.size() && (*rates)[by_rate[end]] >= kNear * (*rates)[by_rate[begin]]) {
      sum += (*rates)[by_rate[end++]];
    }
    for (size_t i = begin; i < end; ++i) {
      (*rates)[by_rate[i]] = sum / static_cast<double>(end - begin);
    }
    begin = end;
  }
}

}  // namespace

bool LinkTable::Record(const control::LinkMeasure& measure, Tick now) {
  const Tick at = now + -Millis(measure.age_ms);
  if (now - at >= kLinkExpires) return false;
  const bool known = Fresh(measure.from, measure.to, now) != nullptr;
  std::map<PeerId, MeasuredLink>& row = links_[measure.from];
  auto it = row.find(measure.to);
  if (it == row.end()) {
    if (size_ >= kLinksMax) {
      if (row.empty()) links_.erase(measure.from);
      return false;
    }
    it = row.emplace(measure.to, MeasuredLink{}).first;
    ++size_;
  }
  MeasuredLink& link = it->second;
  if (!known) link = {0, 0, at};
  if (at < link.at) return false;
  const MeasuredLink before = link;
  link.at = at;
  if (measure.bytes_per_second != 0) {
    link.bytes_per_second = measure.bytes_per_second;
    link.at_least = measure.at_least;
    link.held = measure.held;
  }
  if (measure.rtt_us != 0) link.rtt_us = measure.rtt_us;
  link.small_packets = measure.small_packets;
  return !known || Differs(before, link);
}

bool LinkTable::RecordHost(PeerId peer, uint64_t up, uint64_t down, Tick now) {
  if (up == 0 && down == 0) return false;
  if (!hosts_.contains(peer) && hosts_.size() >= kHostsMax) return false;
  Host& host = hosts_[peer];
  if (now - host.at >= kLinkExpires) host = Host{};
  host.at = now;
  const uint64_t before = host.rates.up;
  if (up != 0) host.rates.up = up < control::kNoLimitBytesPerSecond ? up : 0;
  if (DiffersByATenth(before, host.rates.up)) host.changed_at = now;
  if (down != 0) host.rates.down = down;
  if (!DiffersByATenth(host.rates.up, host.told.up) &&
      !DiffersByATenth(host.rates.down, host.told.down)) {
    return false;
  }
  host.told = host.rates;
  return true;
}

std::optional<HostRates> LinkTable::HostOf(PeerId peer, Tick now) const {
  const auto host = hosts_.find(peer);
  if (host == hosts_.end() || now - host->second.at >= kLinkExpires) return std::nullopt;
  return host->second.rates;
}

const MeasuredLink* LinkTable::Fresh(PeerId from, PeerId to, Tick now) const {
  const auto row = links_.find(from);
  if (row == links_.end()) return nullptr;
  const auto link = row->second.find(to);
  if (link == row->second.end() || now - link->second.at >= kLinkExpires) return nullptr;
  return &link->second;
}

std::optional<MeasuredLink> LinkTable::Find(PeerId from, PeerId to, Tick now) const {
  const MeasuredLink* const there = Fresh(from, to, now);
  const MeasuredLink* const back = Fresh(to, from, now);
  if (there == nullptr && (back == nullptr || back->rtt_us == 0)) return std::nullopt;
  MeasuredLink link = there != nullptr ? *there : MeasuredLink{0, 0, back->at};
  if (link.rtt_us == 0 && back != nullptr) link.rtt_us = back->rtt_us;
  return link;
}

std::set<std::pair<PeerId, PeerId>> LinkTable::SmallPackets(const std::vector<PeerId>& peers,
                                                            Tick now) const {
  const std::set<PeerId> among(peers.begin(), peers.end());
  std::set<std::pair<PeerId, PeerId>> pairs;
  for (const PeerId from : among) {
    const auto row = links_.find(from);
    if (row == links_.end()) continue;
    for (const auto& [to, link] : row->second) {
      if (!link.small_packets || !among.contains(to) || now - link.at >= kLinkExpires) continue;
      pairs.emplace(std::min(from, to), std::max(from, to));
    }
  }
  return pairs;
}

void LinkTable::Forget(PeerId peer) {
  hosts_.erase(peer);
  if (const auto row = links_.find(peer); row != links_.end()) {
    size_ -= row->second.size();
    links_.erase(row);
  }
  for (auto row = links_.begin(); row != links_.end();) {
    size_ -= row->second.erase(peer);
    row = row->second.empty() ? links_.erase(row) : std::next(row);
  }
}

LinkMatrix LinkTable::Matrix(const std::vector<PeerId>& peers, Tick now) const {
  std::map<PeerId, size_t> place;
  for (PeerId peer : peers) place.emplace(peer, place.size());
  LinkMatrix matrix(peers.size());
  // Goes through the measurements and not through all pairs: in a large ring few are measured.
  for (const auto& [from, row] : links_) {
    const auto sender = place.find(from);
    if (sender == place.end()) continue;
    for (const auto& [to, link] : row) {
      const auto receiver = place.find(to);
      if (receiver == place.end() || now - link.at >= kLinkExpires) continue;
      LinkQuality& there = matrix.At(sender->second, receiver->second);
      LinkQuality& back = matrix.At(receiver->second, sender->second);
      there.bytes_per_second = link.bytes_per_second;
      if (link.rtt_us == 0) continue;
      there.latency_us = link.rtt_us;
      // If the other direction has a measurement of its own, that measurement counts for it. It is
      // in the matrix already, or will overwrite this value.
      if (back.latency_us == 0) back.latency_us = link.rtt_us;
    }
  }
  return matrix;
}

control::LinkCost LinkTable::Cost(const std::vector<PeerId>& ring,
                                  const control::BlockedPairs& blocked, const Shares* present,
                                  Tick now) const {
  control::LinkCost cost;
  if (ring.size() < 2) return cost;
  std::map<PeerId, PeerId> next;
  for (size_t i = 0; i < ring.size(); ++i) next.emplace(ring[i], ring[(i + 1) % ring.size()]);
  double hop = std::numeric_limits<double>::infinity();  // the slowest one of the ring
  for (const auto& [from, row] : links_) {
    const auto sender = next.find(from);
    if (sender == next.end()) continue;
    for (const auto& [to, link] : row) {
      if (!next.contains(to) || now - link.at >= kLinkExpires) continue;
      cost.latency_us = std::max(cost.latency_us, link.rtt_us / 2);
      if (to != sender->second || !link.limits()) continue;
      hop = std::min(hop, static_cast<double>(link.bytes_per_second));
    }
  }
  // Of a larger ring, only the hops are known to limit.
  ShareProblem problem = Capacities(ring, now);
  for (size_t i = 0; i < ring.size(); ++i) hop = std::min(hop, problem.host(i));
  if (std::isfinite(hop)) cost.ring_bytes_per_second = static_cast<uint64_t>(hop);
  if (ring.size() > kShareHostsMax) return cost;
  for (const control::BlockedPair& pair : blocked) {
    const auto a = std::find(ring.begin(), ring.end(), pair.a);
    const auto b = std::find(ring.begin(), ring.end(), pair.b);
    if (a != ring.end() && b != ring.end()) problem.SetPair(a - ring.begin(), b - ring.begin(), 0);
  }
  const auto rate = [](double seconds_per_byte) {
    return seconds_per_byte > 0 ? static_cast<uint64_t>(1 / seconds_per_byte) : 0;
  };
  cost.even_bytes_per_second = rate(SecondsPerByte(problem, {}));
  ShareSolution found = SolveShares(problem);
  if (!found.possible) return cost;
  if (present != nullptr && !found.shares.empty() &&
      (present->empty() || present->size() == ring.size())) {
    const double seconds = SecondsPerByte(problem, *present);
    if (seconds <= found.seconds_per_byte * kWorthMoving) found = {true, *present, seconds};
  }
  cost.mesh_bytes_per_second = rate(found.seconds_per_byte);
  cost.shares = std::move(found.shares);
  return cost;
}

ShareProblem LinkTable::Capacities(const std::vector<PeerId>& ring, Tick now) const {
  constexpr double kUnlimited = std::numeric_limits<double>::infinity();
  ShareProblem problem(ring.size());
  if (ring.size() > kShareHostsMax) return problem;
  const auto rate = [](uint64_t known) {
    return known == 0 ? kUnlimited : static_cast<double>(known);
  };
  std::vector<double> up(ring.size());
  std::vector<double> down(ring.size());
  uint64_t fastest_link = 0;
  for (size_t i = 0; i < ring.size(); ++i) {
    size_t held = 0;      // how many others are held by their link to this peer
    uint64_t single = 0;  // the most that one of its links was seen to carry, if that is known
    uint64_t coming = 0;  // what all links to this peer were seen to carry
    bool sent = false;    // enough to measure a link
    const auto known = hosts_.find(ring[i]);
    const Tick outlived = std::min(known == hosts_.end() ? Tick{} : known->second.changed_at,
                                   now + -kLinkOutlivesRate);
    for (const PeerId other : ring) {
      const MeasuredLink* const from = Fresh(other, ring[i], now);
      if (from != nullptr && from->held) ++held;
      if (from != nullptr) coming += from->bytes_per_second;
      if (from != nullptr) fastest_link = std::max(fastest_link, from->bytes_per_second);
      const MeasuredLink* const to = Fresh(ring[i], other, now);
      if (to != nullptr && to->limits() && to->at >= outlived) {
        single = std::max(single, to->bytes_per_second);
      }
      if (to != nullptr && to->bytes_per_second != 0) sent = true;
    }
    for (size_t from = 0; from < ring.size(); ++from) {
      const MeasuredLink* const link = Fresh(ring[from], ring[i], now);
      if (link == nullptr || !link->limits() || (link->held && held > 1)) continue;
      problem.SetPair(from, i, rate(link->bytes_per_second));
    }
    const HostRates host = HostOf(ring[i], now).value_or(HostRates{});
    // Small ops show only that a host sends little.
    up[i] = host.up == 0 || !sent ? kUnlimited : rate(std::max(host.up, single));
    down[i] = held >= 2 ? rate(std::max(host.down, coming)) : kUnlimited;
  }
  LevelRates(&up);
  LevelRates(&down);
  double fastest = 0;
  for (const double each : up) {
    if (std::isfinite(each)) fastest = std::max(fastest, each);
  }
  for (double& each : up) {
    if (!std::isfinite(each) && fastest > 0) each = fastest;
  }
  for (size_t i = 0; i < ring.size(); ++i) problem.SetHost(i, up[i], down[i]);
  if (fastest > 0 || fastest_link == 0) return problem;
  // Nothing is known of hosts. A pair whose limit is unknown then counts as the fastest link.
  // Otherwise everything would be moved away from the first pair whose limit is known.
  for (size_t i = 0; i < ring.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (!std::isfinite(problem.pair(i, j))) problem.SetPair(i, j, rate(fastest_link));
    }
  }
  return problem;
}

std::optional<PaceView> LinkTable::PaceOf(const std::vector<PeerId>& ring,
                                          const control::BlockedPairs& blocked, Tick now) const {
  if (ring.size() < 3 || ring.size() > kShareHostsMax) return std::nullopt;
  const ShareProblem problem = Capacities(ring, now);
  // The slowest host, and the two ends of the slowest pair: nobody else can set the pace.
  std::set<size_t> slowest;
  size_t host = 0;
  size_t fastest = 0;
  std::pair<size_t, size_t> pair{0, 1};
  for (size_t i = 0; i < ring.size(); ++i) {
    if (problem.host(i) < problem.host(host)) host = i;
    if (problem.host(i) > problem.host(fastest)) fastest = i;
    for (size_t j = 0; j < i; ++j) {
      if (problem.pair(i, j) < problem.pair(pair.first, pair.second)) pair = {i, j};
    }
  }
  if (std::isfinite(problem.host(host))) slowest.insert(host);
  if (std::isfinite(problem.pair(pair.first, pair.second))) {
    slowest.insert({pair.first, pair.second});
  }
  const auto rate_without = [&](size_t i) {
    std::vector<PeerId> others = ring;
    others.erase(others.begin() + static_cast<ptrdiff_t>(i));
    return Cost(others, blocked, nullptr, now).mesh_bytes_per_second;
  };
  PaceView pace;
  pace.bytes_per_second = Cost(ring, blocked, nullptr, now).mesh_bytes_per_second;
  if (pace.bytes_per_second == 0) return std::nullopt;
  for (const size_t i : slowest) {
    const uint64_t without = rate_without(i);
    if (without <= pace.without) continue;
    pace.without = without;
    pace.peer = ring[i];
  }
  // Any group is a little faster with one peer less.
  const uint64_t usual = std::max(pace.bytes_per_second, rate_without(fastest));
  if (pace.without <= usual + usual / 20) return std::nullopt;
  return pace;
}

}  // namespace longhaul::coordinator
