#include "tests/wan/network.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/check.h"

namespace longhaul::wan {
namespace {

// The least length of a queue. With less, a queue at a low rate would have no room for a packet.
constexpr int64_t kQueueBytesMin = 10 * 1500;

double Uniform(Prng& random) {  // in [0, 1)
  return static_cast<double>(random.Next() >> 11) * 0x1p-53;
}

double BytesIn(Nanos time, int64_t rate) {
  return static_cast<double>(time) * 1e-9 * static_cast<double>(rate) / 8;
}

}  // namespace

void RateQueue::Configure(int64_t rate, const QueueLimit& limit) {
  rate_ = rate;
  limit_bytes_ = limit.bytes != 0 ? limit.bytes : std::llround(BytesIn(limit.time, rate));
  limit_bytes_ = std::max(limit_bytes_, kQueueBytesMin);
}

int RateQueue::Room(Nanos now, int count, int64_t bytes) const {
  const double waiting = BytesIn(std::max<Nanos>(0, idle_from_ - now), rate_);
  const double room = static_cast<double>(limit_bytes_) - waiting;
  const double fit = std::floor(room * count / static_cast<double>(bytes));
  return static_cast<int>(std::clamp<double>(fit, waiting == 0 ? 1 : 0, count));
}

Nanos RateQueue::Admit(Nanos now, int64_t bytes) {
  idle_from_ = std::max(idle_from_, now) +
               std::llround(static_cast<double>(bytes) * 8e9 / static_cast<double>(rate_));
  return idle_from_;
}

void LossProcess::Configure(double rate) {
  rate_ = rate;
  Draw();
}

void LossProcess::Draw() {
  if (rate_ <= 0) {
    passing_ = INT64_MAX;
  } else if (rate_ >= 1) {
    passing_ = 0;
  } else {
    // How many segments pass before the first loss, from one random number in (0, 1].
    const double trials = std::log(1 - Uniform(random_)) / std::log1p(-rate_);
    passing_ = static_cast<int64_t>(std::min(trials, 1e18));
  }
}

int LossProcess::TakePassing(int count) {
  const int taken = static_cast<int>(std::min<int64_t>(count, passing_));
  if (passing_ != INT64_MAX) passing_ -= taken;
  return taken;
}

void LossProcess::TakeLost() {
  LH_CHECK(passing_ == 0) << passing_;
  Draw();
}

Network::Network(uint64_t seed, Deliver deliver) : seed_(seed), deliver_(std::move(deliver)) {}

void Network::AddHost(int host) {
  LH_CHECK(host >= 1 && host <= kHostNumberMax) << host;
  if (!hosts_.try_emplace(host).second) return;
  const auto add_pair = [this](int src, int dst) {
    uint64_t seed = seed_ ^ (static_cast<uint64_t>(src) << 32 | static_cast<uint64_t>(dst) << 40);
    pairs_.try_emplace({src, dst}, SplitMix64(&seed));
  };
  for (const auto& [other, unused] : hosts_) {
    add_pair(host, other);
    add_pair(other, host);
  }
}

void Network::SetPair(int src, int dst, const PairConfig& config) {
  Pair& pair = PairOf(src, dst);
  if (config.loss != pair.config.loss) pair.loss.Configure(config.loss);
  pair.queue.Configure(config.rate, config.queue);
  for (auto& [key, flow] : pair.flows) {
    flow.queue.Configure(flow.rate_is_own ? flow.queue.rate() : config.flow_rate,
                         config.flow_queue);
  }
  pair.config = config;
}

void Network::SetAccess(int host, const AccessConfig& config) {
  Host& state = hosts_.at(host);
  state.config = config;
  state.uplink.Configure(config.up, config.queue);
  state.downlink.Configure(config.down, config.queue);
}

void Network::SetFlowRate(int src, int dst, const FlowKey& key, int64_t rate) {
  Pair& pair = PairOf(src, dst);
  Flow& flow = FlowOf(pair, key);
  flow.queue.Configure(rate, pair.config.flow_queue);
  flow.rate_is_own = true;
}

std::vector<FlowView> Network::Flows(int src, int dst) const {
  std::vector<FlowView> views;
  for (const auto& [key, flow] : PairOf(src, dst).flows) {
    views.push_back({key, flow.queue.rate(), flow.rate_is_own, flow.delivered_bytes, flow.dropped});
  }
  return views;
}

void Network::ResetCounters() {
  for (auto& [hosts, pair] : pairs_) {
    pair.counters = {};
    for (auto& [key, flow] : pair.flows) flow.delivered_bytes = flow.dropped = 0;
  }
}

bool Network::Down(const Pair& pair, const Packet& packet) const {
  return pair.config.down || hosts_.at(packet.src()).down || hosts_.at(packet.dst()).down;
}

Network::Flow& Network::FlowOf(Pair& pair, const FlowKey& key) {
  const auto found = pair.flows.find(key);
  if (found != pair.flows.end()) return found->second;
  if (pair.flows.size() >= kFlowsMax) {
    pair.flows.erase(std::ranges::min_element(pair.flows, {},
                                              [](const auto& entry) { return entry.second.last; }));
  }
  Flow& flow = pair.flows[key];
  flow.queue.Configure(pair.config.flow_rate, pair.config.flow_queue);
  return flow;
}

RateQueue& Network::QueueAt(Stage stage, Pair& pair, Flow& flow, const Packet& packet) {
  switch (stage) {
    case kFlow:
      return flow.queue;
    case kUplink:
      return hosts_.at(packet.src()).uplink;
    case kPair:
      return pair.queue;
    default:
      return hosts_.at(packet.dst()).downlink;
  }
}

void Network::Enter(Packet packet, Nanos now) {
  const auto found = pairs_.find({packet.src(), packet.dst()});
  if (found == pairs_.end()) return;
  Pair& pair = found->second;
  const int segments = packet.segments();
  ++pair.counters.packets;
  pair.counters.entered += segments;
  if (Down(pair, packet)) {
    pair.counters.blackholed += segments;
    return;
  }
  FlowOf(pair, packet.flow()).last = now;
  for (int first = 0; first < segments;) {
    const int passing = pair.loss.TakePassing(segments - first);
    if (passing == segments) {
      Advance(std::move(packet), kFlow, now);
      return;
    }
    if (passing > 0) Advance(packet.Slice(first, passing), kFlow, now);
    first += passing;
    if (first == segments) return;
    pair.loss.TakeLost();
    ++pair.counters.lost;
    ++first;
  }
}

void Network::Advance(Packet packet, Stage stage, Nanos now) {
  Pair& pair = PairOf(packet.src(), packet.dst());
  Flow& flow = FlowOf(pair, packet.flow());
  for (; stage != kDelivery; stage = static_cast<Stage>(stage + 1)) {
    RateQueue& queue = QueueAt(stage, pair, flow, packet);
    Nanos out = queue.Pass(now);
    if (queue.limited()) {
      const int count = packet.segments();
      const int room = queue.Room(now, count, packet.wire_bytes());
      pair.counters.dropped += count - room;
      if (stage == kFlow) flow.dropped += count - room;
      if (room == 0) return;
      if (room < count) packet = packet.Slice(0, room);
      out = queue.Admit(now, packet.wire_bytes());
    }
    if (stage == kPair) {
      pair.counters.queued_max = std::max(pair.counters.queued_max, out - now);
      out += pair.config.delay;
      if (pair.config.jitter != 0) {
        out += std::llround(static_cast<double>(pair.config.jitter) * Uniform(pair.jitter));
      }
      // A delay that becomes shorter does not reorder packets, either.
      out = pair.last_out = std::max(out, pair.last_out);
    }
    if (out > now) {
      events_.push_back({out, order_++, static_cast<Stage>(stage + 1), std::move(packet)});
      std::ranges::push_heap(events_, Later);
      return;
    }
  }
  if (Down(pair, packet)) {
    pair.counters.blackholed += packet.segments();
    return;
  }
  pair.counters.delivered += packet.segments();
  pair.counters.delivered_bytes += packet.wire_bytes();
  flow.delivered_bytes += packet.wire_bytes();
  deliver_(packet, now);
}

bool Network::Later(const Event& a, const Event& b) {
  return std::tie(a.due, a.order) > std::tie(b.due, b.order);
}

void Network::Run(Nanos now) {
  while (!events_.empty() && events_.front().due <= now) {
    std::ranges::pop_heap(events_, Later);
    Event event = std::move(events_.back());
    events_.pop_back();
    Advance(std::move(event.packet), event.stage, event.due);
  }
}

}  // namespace longhaul::wan
