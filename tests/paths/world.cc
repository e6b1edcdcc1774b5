#include "tests/paths/world.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"
#include "coordinator/solver/share_solver.h"
#include "proto/wire/limits.h"

namespace longhaul::paths_model {
namespace {

using peerd::HostPaths;
using peerd::LaneCount;
using peerd::LaneSchedule;
using peerd::LinkMeter;
using peerd::LinkPath;

constexpr Nanos kMs = 1000000;
constexpr uint32_t kGrain = 32 << 10;
constexpr uint32_t kBatchBytes = 64 << 10;
constexpr uint64_t kWindowBytesPerLane = 1 << 20;
constexpr uint64_t kWindowBytesMin = 8 << 20;
constexpr uint32_t kFrameBytes = 40;
constexpr Nanos kLook = 100 * kMs;
constexpr int kLooksOfAWatch = 5;
constexpr uint64_t kLookBytes = 512 << 10;
constexpr int64_t kReportUs = Seconds(2);
// As in ring_choice.h.
constexpr int64_t kSharesKept = Seconds(20);
constexpr uint64_t kTellShareUnits = kShareUnits / 20;

}  // namespace

// A data lane, or the control lane of a link.
struct World::Lane {
  Link* link = nullptr;
  int connection = 0;
  uint32_t index = 0;
  bool control = false;
  bool up = false;
  uint64_t written = 0;
  uint64_t segments_sent = 0;
  std::deque<std::pair<uint64_t, Segment>> coming;  // each with the place of its end
  std::deque<std::pair<uint64_t, std::function<void()>>> frames;
};

// One direction between two hosts.
struct World::Link {
  Host* from = nullptr;
  Host* to = nullptr;
  uint64_t id = 0;
  std::unique_ptr<LinkPath> path;
  std::deque<Segment> queue;
  Tick waiting_since;
  std::vector<std::unique_ptr<Lane>> lanes;
  uint32_t planned = 0;
  size_t next_lane = 0;
  std::unique_ptr<Lane> control;
  int64_t ping_rtt_us = 0;
  uint64_t bytes_sent = 0;  // given to lanes
};

struct World::Host {
  int number = 0;
  PeerId id;
  HostPaths paths{/*counts_lanes=*/true};
  std::unique_ptr<peerd::PathReports> reports;
  std::vector<std::unique_ptr<Link>> links;  // by host; nullptr: itself
  uint64_t moved = 0;                        // bytes sent and received, in all
  uint64_t moved_seen = 0;
  uint64_t received = 0;
  int looks = 0;
  bool op_ended = false;
  Tick report_due;
  // The op.
  bool posted = false;
  bool complete = false;
  bool over = false;
  std::vector<bool> credit;
  std::vector<std::deque<uint32_t>> fresh;  // own input of grains that others own
  uint64_t fresh_queued = 0;                // bytes of these on links and not on lanes
  int turn = 0;
  bool handing = false;
  std::map<uint32_t, int> missing;  // of own grains: inputs
  uint64_t results_missing = 0;
  int dones = 0;
};

World::World(const WorldOptions& options)
    : options_(options), tcp_(options.seed, options.between, options.queue, this) {
  const auto count = static_cast<int>(options_.hosts.size());
  Prng random(options_.seed);
  for (int i = 0; i < count; ++i) {
    tcp_.AddHost(options_.hosts[i]);
    Host* const host = hosts_.emplace_back(std::make_unique<Host>()).get();
    host->number = i;
    host->id = PeerId(static_cast<uint64_t>(i) + 1);
    host->reports = std::make_unique<peerd::PathReports>(host->id, /*probe_interval_us=*/0);
    host->paths.ChooseCongestion(options_.offers_bbr);
    ring_.push_back(host->id);
  }
  const int64_t rtt_us = 2 * options_.between.one_way / 1000;
  for (const auto& host : hosts_) {
    for (const auto& peer : hosts_) {
      host->links.push_back(host == peer ? nullptr : std::make_unique<Link>());
      if (host == peer) continue;
      Link* const link = host->links.back().get();
      link->from = host.get();
      link->to = peer.get();
      link->id = static_cast<uint64_t>(host->number) * 100 + peer->number + 1;
      link->path = std::make_unique<LinkPath>(link->id, &host->paths);
      link->ping_rtt_us = rtt_us;
      link->control = std::make_unique<Lane>();
      link->control->link = link;
      link->control->control = true;
      link->control->connection = tcp_.Open(host->number, peer->number, "cubic");
      lanes_.resize(link->control->connection + 1);
      lanes_[link->control->connection] = link->control.get();
      AddLanes(link, LaneCount::First(rtt_us));
    }
    const auto phase = static_cast<Nanos>(random.Next() % kLook);
    tcp_.At(phase, [this, h = host.get()] { Turn(h); });
  }
  if (options_.rival) {
    lanes_.resize(tcp_.Open(0, 1, "cubic") + 1);
    OnWritable(static_cast<int>(lanes_.size()) - 1);
  }
  Pause(1);
}

World::~World() = default;

const HostPaths& World::paths(int host) const { return hosts_[host]->paths; }

std::pair<uint32_t, uint32_t> World::Lanes(int host) const {
  std::pair<uint32_t, uint32_t> lanes{UINT32_MAX, 0};
  for (const auto& link : hosts_[host]->links) {
    if (link == nullptr) continue;
    const uint32_t used = link->path->lanes().lanes_of_use();
    lanes = {std::min(lanes.first, used), std::max(lanes.second, used)};
  }
  return lanes;
}

// ------------------------------------------------------------------------------ links

void World::AddLanes(Link* link, uint32_t lanes) {
  for (; link->planned < lanes; ++link->planned) {
    Lane* const lane = link->lanes.emplace_back(std::make_unique<Lane>()).get();
    lane->link = link;
    lane->index = link->planned;
    lane->connection =
        tcp_.Open(link->from->number, link->to->number, link->from->paths.congestion());
    lanes_.resize(lane->connection + 1);
    lanes_[lane->connection] = lane;
    if (lane->index == 0 && link->from->number == 0 && options_.slow_lane_mbit != 0) {
      tcp_.SetOwnRate(lane->connection, options_.slow_lane_mbit);
    }
    tcp_.At(tcp_.now() + 2 * options_.between.one_way, [this, lane, lanes] {
      lane->up = true;
      LinkPath& path = *lane->link->path;
      path.AddLane(lane->index);
      const int64_t rtt_us = 2 * options_.between.one_way / 1000;
      if (rtt_us >= peerd::kLongWayUs) path.SetLongWay(rtt_us, /*count=*/true, lanes);
      Pull(lane);
    });
  }
}

void World::OnWritable(int connection) {
  if (lanes_[connection] == nullptr) return tcp_.Write(connection, kBatchBytes);
  if (!lanes_[connection]->control) Pull(lanes_[connection]);
}

void World::Pull(Lane* lane) {
  if (!lane->up || tcp_.unsent(lane->connection) >= kUnsentBytes) return;
  uint32_t bytes = 0;
  Segment segment;
  while (bytes < kBatchBytes && NextSegment(lane, bytes == 0, &segment)) {
    bytes += segment.bytes + kFrameBytes;
    lane->written += segment.bytes + kFrameBytes;
    lane->coming.emplace_back(lane->written, segment);
    ++lane->segments_sent;
    lane->link->bytes_sent += segment.bytes;
    lane->link->from->moved += segment.bytes;
    if (!segment.result) lane->link->from->fresh_queued -= segment.bytes;
  }
  if (bytes == 0) return;
  Host* const host = lane->link->from;
  tcp_.Write(lane->connection, bytes);
  HandFresh(host);
}

bool World::NextSegment(Lane* lane, bool anew, Segment* segment) {
  Link* const link = lane->link;
  LinkPath& path = *link->path;
  const Tick now = tcp_.Now();
  const auto more_lanes = [&] {
    const uint32_t lanes = path.lanes().lanes_of_use();
    if (lanes <= link->planned) return;
    tcp_.At(tcp_.now(), [this, link, lanes] { AddLanes(link, lanes); });
  };
  const uint32_t before = path.lanes().lanes_of_use();
  path.Asks(lane->index, anew, now);
  if (path.lanes().lanes_of_use() > before) more_lanes();
  if (!link->queue.empty() && !path.lanes().Uses(lane->index)) return false;
  if (link->queue.empty()) {
    if (path.long_way()) path.QueueEmptied();
    return false;
  }
  const uint32_t bytes = link->queue.front().bytes;
  if (path.Judge(lane->index, bytes, link->queue.size(), now) != LaneSchedule::Verdict::kCarry) {
    return false;
  }
  *segment = link->queue.front();
  link->queue.pop_front();
  const LinkPath::Given given = path.Gave(lane->index, bytes, now);
  if (given.lane_rate) tcp_.SetPace(lane->connection, *given.lane_rate);
  if (given.lanes_changed) more_lanes();
  return true;
}

void World::PullAll(Link* link) {
  for (size_t i = 0; i < link->lanes.size() && !link->queue.empty(); ++i) {
    link->next_lane = (link->next_lane + 1) % link->lanes.size();
    Pull(link->lanes[link->next_lane].get());
  }
}

void World::Send(Link* link, const Segment& segment) {
  if (link->queue.empty()) link->waiting_since = tcp_.Now();
  link->queue.push_back(segment);
  PullAll(link);
}

void World::Tell(Link* link, uint32_t bytes, std::function<void()> arrive) {
  Lane* const lane = link->control.get();
  lane->written += bytes;
  lane->frames.emplace_back(lane->written, std::move(arrive));
  tcp_.Write(lane->connection, bytes);
}

void World::OnReceived(int connection, uint64_t bytes) {
  Lane* const lane = lanes_[connection];
  if (lane == nullptr) return;
  while (!lane->frames.empty() && lane->frames.front().first <= bytes) {
    const std::function<void()> arrive = std::move(lane->frames.front().second);
    lane->frames.pop_front();
    arrive();
  }
  while (!lane->coming.empty() && lane->coming.front().first <= bytes) {
    const Segment segment = lane->coming.front().second;
    lane->coming.pop_front();
    Host* const to = lane->link->to;
    to->received += segment.bytes;
    to->moved += segment.bytes;
    OnSegment(to, segment);
  }
}

// ------------------------------------------------------------------------------ the daemon

void World::Turn(Host* host) {
  tcp_.At(tcp_.now() + kLook, [this, host] { Turn(host); });
  if (++host->looks % kLooksOfAWatch == 0) {
    WatchLinks(host);
  } else if (host->moved - host->moved_seen >= kLookBytes) {
    LookAt(host);
  }
}

void World::LookAt(Host* host) {
  host->moved_seen = host->moved;
  const Tick now = tcp_.Now();
  std::vector<peerd::HostSample::Waiting> waiting;
  size_t links = 0;
  for (const auto& link : host->links) {
    if (link == nullptr) continue;
    const auto ask = [&](uint32_t lane) -> std::optional<TcpDelivery> {
      if (lane == LinkMeter::kControlLane) return tcp_.Delivery(link->control->connection);
      return tcp_.Delivery(link->lanes[lane]->connection);
    };
    std::vector<LinkMeter::Lane> lanes;
    for (const auto& lane : link->lanes) {
      if (!lane->up) continue;
      lanes.push_back({lane->index, lane->segments_sent,
                       tcp_.Delivery(lane->connection).bytes_acked == lane->written});
    }
    HostPaths::LinkSample sample =
        link->path->SampleOf(link->path->meter().PopArrivals(lanes, ask), now);
    sample.rtt_us = link->ping_rtt_us;
    host->paths.Arrived(sample);
    if (sample.long_way && sample.arrived.bytes != 0) {
      Link* const back = link->to->links[host->number].get();
      Tell(link.get(), kFrameBytes, [this, l = link.get(), back, begun = tcp_.Now()] {  // PING
        Tell(back, kFrameBytes, [this, l, begun] { l->ping_rtt_us = tcp_.Now() - begun; });
      });
    }
    ++links;
    if (link->queue.empty()) continue;
    waiting.push_back(
        {link->to->id, now - link->waiting_since, static_cast<uint32_t>(link->ping_rtt_us)});
  }
  peerd::HostSample sum = host->paths.Measure(now);
  sum.waiting = std::move(waiting);
  sum.links = links;
  host->reports->Look(now, sum, host->received, std::exchange(host->op_ended, false));
}

void World::WatchLinks(Host* host) {
  LookAt(host);
  for (const auto& link : host->links) {
    if (link != nullptr) PullAll(link.get());  // PINGs on data lanes do so
  }
  const Tick now = tcp_.Now();
  std::vector<std::pair<PeerId, peerd::RateSample>> rates;
  for (const auto& link : host->links) {
    if (link == nullptr) continue;
    const auto ask = [&](uint32_t lane) -> std::optional<TcpDelivery> {
      return tcp_.Delivery(link->lanes[lane]->connection);
    };
    std::vector<LinkMeter::Lane> lanes;
    for (const auto& lane : link->lanes) {
      if (lane->up) lanes.push_back({lane->index, lane->segments_sent, false});
    }
    const peerd::RateSample rate =
        link->path->meter().PopRate(lanes, link->bytes_sent, !link->queue.empty(), ask);
    if (link->path->long_way()) host->paths.Carried(rate);
    if (rate.bytes_per_second != 0 || rate.bytes_repeated != 0) {
      rates.emplace_back(link->to->id, rate);
    }
  }
  if (host->paths.MeasureRates(now).congestion_changed) {
    for (const auto& link : host->links) {
      if (link == nullptr || !link->path->long_way()) continue;
      for (const auto& lane : link->lanes) {
        tcp_.SetCongestion(lane->connection, host->paths.congestion());
      }
    }
  }
  host->reports->AddRates(std::move(rates), now);
  if (now < host->report_due) return;
  host->report_due = now + kReportUs;
  std::vector<peerd::PathReports::Link> links;
  for (const auto& link : host->links) {
    if (link == nullptr) continue;
    const uint32_t rtt_us = tcp_.Delivery(link->control->connection).rtt_us;
    links.push_back({.peer = link->to->id, .rtt_us = rtt_us});
  }
  const control::LinkReport report = host->reports->PopReport(links, now);
  for (const control::LinkMeasure& measure : report.links) {
    measured_ |= table_.Record(measure, now);
  }
  measured_ |=
      table_.RecordHost(host->id, report.up_bytes_per_second, report.down_bytes_per_second, now);
}

// ------------------------------------------------------------------------------ ops

void World::ChooseShares() {
  const Tick now = tcp_.Now();
  const bool kept = now - shares_at_ < kSharesKept;
  if (!measured_ && !kept) return;
  const control::LinkCost cost = table_.Cost(ring_, {}, kept ? &shares_ : nullptr, now);
  if (!kept) measured_ = false;
  uint64_t moved = 0;
  const auto share = [&](const Shares& shares, size_t i) {
    return shares.empty() ? int64_t{kShareUnits} / static_cast<int64_t>(ring_.size())
                          : int64_t{shares[i]};
  };
  for (size_t i = 0; i < ring_.size(); ++i) {
    moved += static_cast<uint64_t>(std::abs(share(shares_, i) - share(cost.shares, i)));
  }
  if (moved / 2 < kTellShareUnits) return;
  shares_ = cost.shares;
  shares_at_ = now;
}

double World::DoOp() {
  ChooseShares();
  ++op_;
  over_ = 0;
  const auto grains = static_cast<uint32_t>(options_.op_bytes / kGrain);
  owner_of_.assign(grains, 0);
  uint64_t units = 0;
  uint32_t first = 0;
  for (size_t i = 0; i < hosts_.size(); ++i) {
    units += shares_.empty() ? kShareUnits / hosts_.size() : shares_[i];
    const auto end =
        i + 1 == hosts_.size() ? grains : static_cast<uint32_t>(units * grains / kShareUnits);
    std::fill(owner_of_.begin() + first, owner_of_.begin() + end, static_cast<uint32_t>(i));
    first = end;
  }
  const Nanos begun = tcp_.now();
  for (const auto& host : hosts_) BeginOp(host.get());
  tcp_.Run(begun + 600'000 * kMs, [this] { return over_ == static_cast<int>(hosts_.size()); });
  LH_CHECK(over_ == static_cast<int>(hosts_.size())) << "an op does not end";
  const double took = static_cast<double>(tcp_.now() - begun) * 1e-9;
  Pause(0.01);  // the boundary
  return took;
}

void World::Pause(double seconds) {
  const auto end = tcp_.now() + static_cast<Nanos>(seconds * 1e9);
  bool over = false;
  tcp_.At(end, [&over] { over = true; });
  tcp_.Run(end, [&over] { return over; });
}

void World::BeginOp(Host* host) {
  const auto self = static_cast<uint32_t>(host->number);
  host->posted = true;
  host->complete = host->over = false;
  host->dones = 0;
  host->credit.assign(hosts_.size(), false);
  host->fresh.assign(hosts_.size(), {});
  host->missing.clear();
  host->results_missing = 0;
  host->turn = host->number;
  for (uint32_t grain = 0; grain < owner_of_.size(); ++grain) {
    if (owner_of_[grain] == self) {
      host->missing[grain] = static_cast<int>(hosts_.size()) - 1;
    } else {
      host->fresh[owner_of_[grain]].push_back(grain);
      ++host->results_missing;
    }
  }
  for (const auto& link : host->links) {
    if (link == nullptr) continue;
    Tell(link.get(), 100, [this, to = link->to, self] {  // READY
      to->credit[self] = true;
      HandFresh(to);
    });
  }
}

void World::HandFresh(Host* host) {
  if (std::exchange(host->handing, true)) return;  // what is handed makes lanes ask for more
  uint64_t window = kWindowBytesMin;
  for (const auto& link : host->links) {
    if (link == nullptr) continue;
    window = std::max(window, link->path->lanes().lanes_of_use() * kWindowBytesPerLane);
  }
  const auto count = static_cast<int>(hosts_.size());
  for (int tried = 0; tried < count && host->fresh_queued < window;) {
    host->turn = (host->turn + 1) % count;
    std::deque<uint32_t>& fresh = host->fresh[host->turn];
    if (!host->credit[host->turn] || fresh.empty()) {
      ++tried;
      continue;
    }
    tried = 0;
    const Segment segment{kGrain, false, fresh.front()};
    fresh.pop_front();
    host->fresh_queued += kGrain;
    Send(host->links[host->turn].get(), segment);
  }
  host->handing = false;
}

void World::OnSegment(Host* host, const Segment& segment) {
  if (segment.result) {
    --host->results_missing;
  } else if (--host->missing[segment.grain] == 0) {
    host->missing.erase(segment.grain);
    for (const auto& link : host->links) {
      if (link != nullptr) Send(link.get(), {kGrain, true, segment.grain});
    }
  }
  MaybeComplete(host);
}

void World::MaybeComplete(Host* host) {
  if (host->complete || host->results_missing != 0 || !host->missing.empty()) return;
  host->complete = true;
  for (const auto& link : host->links) {
    if (link == nullptr) continue;
    Tell(link.get(), 100, [this, to = link->to] {  // DONE
      ++to->dones;
      MaybeOver(to);
    });
  }
  MaybeOver(host);
}

void World::MaybeOver(Host* host) {
  if (host->over || !host->complete || host->dones + 1 < static_cast<int>(hosts_.size())) return;
  host->over = host->op_ended = true;
  ++over_;
}

// ------------------------------------------------------------------------------ what is best

namespace {
coordinator::ShareProblem ProblemOf(const TcpModel& tcp, size_t hosts) {
  coordinator::ShareProblem problem(hosts);
  for (size_t i = 0; i < hosts; ++i) {
    const auto [up, down] = tcp.Rates(static_cast<int>(i));
    problem.SetHost(i, up * 125000, down * 125000);
  }
  return problem;
}
}  // namespace

double World::Bound() const {
  return SolveShares(ProblemOf(tcp_, hosts_.size())).seconds_per_byte *
         static_cast<double>(options_.op_bytes);
}

Shares World::BestShares() const { return SolveShares(ProblemOf(tcp_, hosts_.size())).shares; }

}  // namespace longhaul::paths_model
