#include "tests/paths/tcp_model.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace longhaul::paths_model {
namespace {

constexpr uint32_t kPacket = 1448;  // payload
constexpr double kHeaders = 52;
constexpr double kAckBytes = 64;
constexpr Nanos kMs = 1000000;
constexpr Nanos kSecond = 1000 * kMs;
constexpr double kWindowFirst = 10;  // packets
constexpr double kBeta = 0.7;
constexpr double kCubic = 0.4;

double MbitToBytesPerNano(double mbit) { return mbit / 8000; }

double WireBytes(uint32_t bytes) {
  return bytes + kHeaders * std::ceil(static_cast<double>(bytes) / kPacket);
}

// Not cbrt(), whose last digits differ between libraries.
double CubeRoot(double x) {
  if (x == 0) return 0;
  double root = x < 0 ? -1 : 1;
  for (int i = 0; i < 60; ++i) root = (2 * root + x / (root * root)) / 3;
  return root;
}

}  // namespace

TcpModel::TcpModel(uint64_t seed, const Between& between, Nanos queue, User* user)
    : between_(between), queue_(queue), user_(user), random_(seed) {}

int TcpModel::AddHost(const AccessRates& rates) {
  hosts_.emplace_back();
  SetRates(static_cast<int>(hosts_.size()) - 1, rates);
  return static_cast<int>(hosts_.size()) - 1;
}

void TcpModel::SetRates(int host, const AccessRates& rates) {
  hosts_[host].rates = rates;
  // What waits leaves at the times that were set before.
  hosts_[host].up.rate = MbitToBytesPerNano(rates.up_mbit);
  hosts_[host].down.rate = MbitToBytesPerNano(rates.down_mbit);
}

int TcpModel::Open(int from, int to, const std::string& congestion) {
  const int id = static_cast<int>(connections_.size());
  Connection& c = connections_.emplace_back();
  c.from = from;
  c.to = to;
  c.own.rate = MbitToBytesPerNano(between_.connection_mbit);
  c.opens_at = now_ + 2 * between_.one_way;
  c.next_send = c.opens_at;
  c.min_rtt = c.srtt = static_cast<double>(2 * between_.one_way);
  c.rttvar = c.srtt / 4;
  c.of_bbr.min_rtt_ns = c.min_rtt;
  c.of_bbr.min_rtt_at = now_;
  SetCongestion(id, congestion);
  return id;
}

void TcpModel::SetCongestion(int connection, const std::string& congestion) {
  Connection& c = connections_[connection];
  const bool bbr = congestion == "bbr";
  if (bbr && !c.bbr) {
    const double min_rtt = c.min_rtt;
    c.of_bbr = {};
    c.of_bbr.min_rtt_ns = min_rtt;
    c.of_bbr.min_rtt_at = now_;
    c.of_bbr.round_ends = c.arrived + c.in_flight;
  } else if (!bbr && c.bbr) {
    c.ssthresh = 1e9;
    c.epoch = 0;
    c.w_max = c.w_last = 0;
  }
  c.bbr = bbr;
}

void TcpModel::SetOwnRate(int connection, double mbit) {
  connections_[connection].own.rate = MbitToBytesPerNano(mbit);
}

void TcpModel::SetPace(int connection, uint64_t bytes_per_second) {
  connections_[connection].pace = static_cast<double>(bytes_per_second) / kSecond;
}

void TcpModel::Write(int connection, uint64_t bytes) {
  Connection& c = connections_[connection];
  if (c.trains.empty() && c.lost.empty() && c.sent == c.written) AfterPause(&c);
  c.written += bytes;
  c.writable_told = false;
  TrySend(connection);
}

uint64_t TcpModel::unsent(int connection) const {
  const Connection& c = connections_[connection];
  return c.written - c.sent;
}

TcpDelivery TcpModel::Delivery(int connection) const {
  const Connection& c = connections_[connection];
  return {.bytes_per_second = static_cast<uint64_t>(c.rate_sample * kSecond),
          .limited_by_sender = c.sample_limited,
          .rtt_us = static_cast<uint32_t>(c.min_rtt / 1000),
          .bytes_acked = c.acked,
          .bytes_arrived = c.arrived,
          .bytes_sent = c.all_sent,
          .bytes_repeated = c.all_repeated,
          .usual_rtt_us = static_cast<uint32_t>(c.srtt / 1000),
          .bytes_waiting = c.written - c.acked,
          .unheard_us = (now_ - c.last_ack) / 1000};
}

void TcpModel::At(Nanos at, std::function<void()> call) {
  size_t slot = calls_.size();
  if (free_calls_.empty()) {
    calls_.push_back(std::move(call));
  } else {
    slot = free_calls_.back();
    free_calls_.pop_back();
    calls_[slot] = std::move(call);
  }
  Push(at, Kind::kCall, 0, slot, 0, 0);
}

void TcpModel::Run(Nanos end, const std::function<bool()>& done) {
  while (!events_.empty() && events_.front().at <= end && !done()) {
    std::pop_heap(events_.begin(), events_.end(), Later);
    const Event event = events_.back();
    events_.pop_back();
    now_ = event.at;
    Handle(event);
  }
}

void TcpModel::Push(Nanos at, Kind kind, int connection, uint64_t id, uint64_t seq,
                    uint32_t bytes) {
  events_.push_back({at, order_++, kind, connection, id, seq, bytes});
  std::push_heap(events_.begin(), events_.end(), Later);
}

void TcpModel::Handle(const Event& event) {
  switch (event.kind) {
    case Kind::kSend:
      connections_[event.connection].send_planned = false;
      return TrySend(event.connection);
    case Kind::kUplink: {
      Queue* const up = &hosts_[connections_[event.connection].from].up;
      const Nanos out = Pass(up, now_, WireBytes(event.bytes), true);
      if (out < 0) return;
      return Push(out + between_.one_way, Kind::kDownlink, event.connection, event.id, event.seq,
                  event.bytes);
    }
    case Kind::kDownlink: {
      Queue* const down = &hosts_[connections_[event.connection].to].down;
      const Nanos out = Pass(down, now_, WireBytes(event.bytes), true);
      if (out < 0) return;
      return Push(out, Kind::kReceived, event.connection, event.id, event.seq, event.bytes);
    }
    case Kind::kReceived:
      return OnTrain(event.connection, event.id, event.seq, event.bytes);
    case Kind::kAck:
      return OnAck(event.connection, event.id, event.seq);
    case Kind::kTimer:
      return OnTimer(event.connection);
    case Kind::kCall: {
      const std::function<void()> call = std::move(calls_[event.id]);
      free_calls_.push_back(event.id);
      return call();
    }
  }
}

Nanos TcpModel::Pass(Queue* queue, Nanos at, double bytes, bool drops) const {
  if (queue->rate == 0) return at;
  const Nanos waits = std::max<Nanos>(0, queue->idle_at - at);
  const auto takes = static_cast<Nanos>(bytes / queue->rate);
  if (drops && waits != 0 && waits + takes > queue_) return -1;
  queue->idle_at = at + waits + takes;
  return queue->idle_at;
}

// ------------------------------------------------------------------------------ the sender

double TcpModel::BbrRate(const Connection& c) const {
  const Bbr& b = c.of_bbr;
  return b.rates.empty() ? c.cwnd * kPacket / c.srtt : b.rates.front().second;
}

double TcpModel::PacingRate(const Connection& c) const {
  double rate = 0;
  if (c.bbr) {
    rate = c.of_bbr.gain * BbrRate(c);
  } else {
    rate = (c.cwnd < c.ssthresh / 2 ? 2 : 1.2) * c.cwnd * kPacket / c.srtt;
  }
  return c.pace == 0 ? rate : std::min(rate, c.pace);
}

void TcpModel::AfterPause(Connection* c) {
  if (c->bbr || c->last_sent == 0) return;
  const Nanos idle = now_ - c->last_sent;
  const Nanos timeout = TimeoutOf(*c);
  if (idle < timeout) return;
  c->ssthresh = std::max(c->ssthresh >= 1e9 ? 0 : c->ssthresh, 0.75 * c->cwnd);
  for (Nanos left = idle; left >= timeout && c->cwnd > kWindowFirst; left -= timeout) c->cwnd /= 2;
  c->cwnd = std::max(c->cwnd, kWindowFirst);
}

void TcpModel::TrySend(int connection) {
  for (;;) {
    Connection& c = connections_[connection];
    const uint64_t unsent = c.written - c.sent;
    if (unsent < kUnsentBytes && !c.writable_told && now_ >= c.opens_at) {
      c.writable_told = true;
      user_->OnWritable(connection);
      continue;  // it may have written
    }
    if (unsent == 0 && c.lost.empty()) {
      c.app_limited_until = std::max<uint64_t>(c.arrived + c.in_flight, 1);
      return;
    }
    const double room = c.cwnd * kPacket - static_cast<double>(c.in_flight);
    if (room < kPacket && c.in_flight > 0) {
      c.limited_at = now_;
      return;
    }
    if (now_ < c.next_send) {
      if (!std::exchange(c.send_planned, true)) {
        Push(c.next_send, Kind::kSend, connection, 0, 0, 0);
      }
      return;
    }
    const double rate = PacingRate(c);
    auto bytes = static_cast<uint32_t>(std::clamp(rate * kMs, 2.0 * kPacket, 44.0 * kPacket));
    if (between_.loss > 0) bytes = kPacket;
    bytes = std::min(bytes, std::max(kPacket, static_cast<uint32_t>(room)));
    if (!c.lost.empty()) {
      auto& [seq, length] = c.lost.front();
      bytes = std::min(bytes, length);
      const uint64_t from = seq;
      seq += bytes;
      length -= bytes;
      if (length == 0) c.lost.pop_front();
      Transmit(connection, from, bytes, true, false);
    } else {
      bytes = static_cast<uint32_t>(std::min<uint64_t>(bytes, unsent));
      const uint64_t seq = c.sent;
      c.sent += bytes;
      Transmit(connection, seq, bytes, false, false);
    }
  }
}

void TcpModel::Transmit(int connection, uint64_t seq, uint32_t bytes, bool again, bool probe) {
  Connection& c = connections_[connection];
  if (c.trains.empty()) {
    c.arrived_at = c.first_sent_at = now_;
    c.last_ack = now_;
    if (c.epoch != 0) c.epoch += now_ - c.last_sent;  // a pause is no time to grow in
  }
  c.in_flight += bytes;
  c.trains.push_back({.seq = seq,
                      .bytes = bytes,
                      .again = again,
                      .probe = probe,
                      .app_limited = c.app_limited_until != 0,
                      .sent_at = now_,
                      .arrived = c.arrived,
                      .arrived_at = c.arrived_at,
                      .first_sent_at = c.first_sent_at,
                      .in_flight = c.in_flight});
  const uint64_t id = c.first_id + c.trains.size() - 1;
  c.all_sent += bytes;
  hosts_[c.from].sent += bytes;
  if (again) {
    c.all_repeated += bytes;
    hosts_[c.from].repeated += bytes;
  }
  c.last_sent = now_;
  // The kernel paces payload.
  c.next_send = std::max(c.next_send, now_) + static_cast<Nanos>(bytes / PacingRate(c));
  SetTimer(connection);
  if (between_.loss > 0 && static_cast<double>(random_.Next() >> 11) * 0x1p-53 < between_.loss) {
    return;
  }
  if (c.own.rate == 0) {
    return Handle({now_, 0, Kind::kUplink, connection, id, seq, bytes});
  }
  const Nanos out = Pass(&c.own, now_, WireBytes(bytes), true);
  if (out >= 0) Push(out, Kind::kUplink, connection, id, seq, bytes);
}

// ------------------------------------------------------------------------------ the receiver

void TcpModel::OnTrain(int connection, uint64_t id, uint64_t seq, uint32_t bytes) {
  Connection& c = connections_[connection];
  const uint64_t before = c.received;
  const uint64_t end = seq + bytes;
  if (seq <= c.received) {
    c.received = std::max(c.received, end);
    auto next = c.behind_gaps.begin();
    while (next != c.behind_gaps.end() && next->first <= c.received) {
      c.received = std::max(c.received, next->second);
      next = c.behind_gaps.erase(next);
    }
  } else {
    uint64_t& known = c.behind_gaps[seq];
    known = std::max(known, end);
  }
  // What waits in the sender's queue when the acknowledgement gets there is not known yet, so what
  // waits there now counts.
  const Nanos out = Pass(&hosts_[c.to].up, now_, kAckBytes, false) + between_.one_way;
  Push(std::max(out, hosts_[c.from].down.idle_at), Kind::kAck, connection, id, c.received, 0);
  const uint64_t received = c.received;
  if (received != before) user_->OnReceived(connection, received);
}

// ------------------------------------------------------------------------------ acknowledgements

void TcpModel::OnAck(int connection, uint64_t id, uint64_t acked) {
  Connection& c = connections_[connection];
  c.last_ack = now_;
  c.timeouts = 0;
  c.acked = std::max(c.acked, acked);
  if (id < c.first_id) return SetTimer(connection);  // it was taken for lost
  bool loss = false;
  while (c.first_id < id) {
    const Train train = c.trains.front();
    c.trains.pop_front();
    ++c.first_id;
    c.in_flight -= train.bytes;
    // A copy of the last train has arrived.
    const Train& next = c.trains.front();
    if (c.first_id == id && next.probe && next.seq == train.seq) continue;
    if (train.probe) continue;
    Lose(&c, train);
    loss = true;
  }
  const Train train = c.trains.front();
  c.trains.pop_front();
  ++c.first_id;
  c.in_flight -= train.bytes;
  c.probed = false;
  c.arrived += train.bytes;
  c.arrived_at = now_;
  c.first_sent_at = train.sent_at;
  if (c.arrived > c.app_limited_until) c.app_limited_until = 0;
  const auto rtt = static_cast<double>(now_ - train.sent_at);
  if (!train.probe) {
    c.rttvar += (std::abs(rtt - c.srtt) - c.rttvar) / 4;
    c.srtt += (rtt - c.srtt) / 8;
    c.min_rtt = std::min(c.min_rtt, rtt);
  }
  const Nanos took = std::max(now_ - train.arrived_at, train.sent_at - train.first_sent_at);
  if (took > 0) {
    c.rate_sample = static_cast<double>(c.arrived - train.arrived) / static_cast<double>(took);
    c.sample_limited = train.app_limited;
  }
  if (c.in_recovery && id >= c.recovery_ends) c.in_recovery = false;
  if (loss && !c.in_recovery) {
    c.in_recovery = true;
    c.recovery_ends = c.first_id + c.trains.size();
    Shrink(&c);
  }
  Grow(&c, train, static_cast<double>(train.bytes) / kPacket, rtt);
  SetTimer(connection);
  TrySend(connection);
}

void TcpModel::Lose(Connection* c, const Train& train) {
  c->lost.emplace_back(train.seq, train.bytes);
}

Nanos TcpModel::TimeoutOf(const Connection& c) const {
  return static_cast<Nanos>(c.srtt + std::max(200.0 * kMs, 4 * c.rttvar));
}

void TcpModel::SetTimer(int connection) {
  Connection& c = connections_[connection];
  if (c.trains.empty()) {
    c.timer_at = -1;
    return;
  }
  const Nanos since = std::max(c.last_ack, c.last_sent);
  const Nanos wait =
      c.probed ? TimeoutOf(c) << std::min(c.timeouts, 6) : static_cast<Nanos>(2 * c.srtt) + 2 * kMs;
  c.timer_at = since + wait;
  if (std::exchange(c.timer_planned, true)) return;
  Push(c.timer_at, Kind::kTimer, connection, 0, 0, 0);
}

void TcpModel::OnTimer(int connection) {
  Connection& c = connections_[connection];
  c.timer_planned = false;
  if (c.timer_at < 0) return;
  if (c.timer_at > now_) {
    c.timer_planned = true;
    return Push(c.timer_at, Kind::kTimer, connection, 0, 0, 0);
  }
  if (!std::exchange(c.probed, true)) {  // a tail loss probe
    const Train last = c.trains.back();
    return Transmit(connection, last.seq, last.bytes, true, true);
  }
  ++c.timeouts;
  for (const Train& train : c.trains) {
    if (!train.probe) Lose(&c, train);
  }
  c.first_id += c.trains.size();
  c.trains.clear();
  c.in_flight = 0;
  c.in_recovery = false;
  if (c.bbr) {
    c.of_bbr.cwnd_before = std::max(c.of_bbr.cwnd_before, c.cwnd);
  } else {
    Shrink(&c);
  }
  c.cwnd = 1;
  TrySend(connection);
}

// ------------------------------------------------------------------------------ the window

void TcpModel::Shrink(Connection* c) {
  if (c->bbr) return;
  c->epoch = 0;
  c->w_max = c->cwnd < c->w_last ? c->cwnd * (1 + kBeta) / 2 : c->cwnd;
  c->w_last = c->cwnd;
  c->cwnd = std::max(2.0, c->cwnd * kBeta);
  c->ssthresh = c->cwnd;
}

void TcpModel::Grow(Connection* c, const Train& train, double packets, double rtt) {
  if (c->bbr) return UpdateBbr(c, train, rtt);
  if (c->in_recovery) return;
  if (c->cwnd >= c->ssthresh) {
    if (now_ - c->limited_at < static_cast<Nanos>(c->srtt)) GrowCubic(c, packets);
    return;
  }
  if (2 * train.in_flight > c->cwnd * kPacket) c->cwnd += packets;
  if (c->arrived > c->hystart_ends) {
    c->hystart_ends = c->arrived + c->in_flight;
    c->hystart_rtt = 1e18;
    c->hystart_samples = 0;
  }
  c->hystart_rtt = std::min(c->hystart_rtt, rtt);
  const double longer = std::clamp(c->min_rtt / 8, 4.0 * kMs, 16.0 * kMs);
  if (++c->hystart_samples >= 8 && c->cwnd >= 16 && c->hystart_rtt > c->min_rtt + longer) {
    c->ssthresh = c->cwnd;
  }
}

void TcpModel::GrowCubic(Connection* c, double packets) {
  if (c->epoch == 0) {
    c->epoch = now_;
    c->k = c->w_max > c->cwnd ? CubeRoot((c->w_max - c->cwnd) / kCubic) : 0;
    if (c->w_max < c->cwnd) c->w_max = c->cwnd;
    c->w_tcp = c->cwnd;
  }
  const double t = static_cast<double>(now_ - c->epoch) / kSecond + c->min_rtt / kSecond;
  const double from_k = t - c->k;
  const double target = std::min(c->w_max + kCubic * from_k * from_k * from_k, 1.5 * c->cwnd);
  c->w_tcp += packets * 3 * (1 - kBeta) / (1 + kBeta) / c->cwnd;
  const double goal = std::max(target, c->w_tcp);
  c->cwnd += packets * std::max(goal - c->cwnd, 0.01) / c->cwnd;
}

void TcpModel::UpdateBbr(Connection* c, const Train& train, double rtt) {
  Bbr& b = c->of_bbr;
  const bool new_round = c->arrived >= b.round_ends;
  if (new_round) {
    ++b.round;
    b.round_ends = c->arrived + c->in_flight;
  }
  const double sample = c->rate_sample;
  if (!train.app_limited || sample > BbrRate(*c)) {
    while (!b.rates.empty() && b.rates.back().second <= sample) b.rates.pop_back();
    b.rates.emplace_back(b.round, sample);
  }
  while (b.rates.size() > 1 && b.round - b.rates.front().first >= 10) b.rates.pop_front();
  const double rate = BbrRate(*c);
  const bool old = now_ - b.min_rtt_at > 10 * kSecond;
  if (rtt <= b.min_rtt_ns || old) {
    b.min_rtt_ns = rtt;
    b.min_rtt_at = now_;
  }
  const auto in_flight = static_cast<double>(c->in_flight);
  if (b.mode == Bbr::Mode::kStartup && new_round && !train.app_limited) {
    if (rate >= b.full_rate * 1.25) {
      b.full_rate = rate;
      b.full_rounds = 0;
    } else if (++b.full_rounds >= 3) {
      b.mode = Bbr::Mode::kDrain;
      b.gain = 1 / 2.885;
    }
  }
  if (b.mode == Bbr::Mode::kDrain && in_flight <= rate * b.min_rtt_ns) {
    b.mode = Bbr::Mode::kProbeBandwidth;
    b.window_gain = 2;
    b.phase = 2 + static_cast<int>(random_.Next() % 6);
    b.phase_at = now_;
    b.gain = 1;
  }
  if (b.mode == Bbr::Mode::kProbeBandwidth) {
    const bool over = now_ - b.phase_at > static_cast<Nanos>(b.min_rtt_ns);
    const bool drained = b.phase == 1 && in_flight <= rate * b.min_rtt_ns;
    if (drained ||
        (over && (b.phase != 0 || in_flight >= 1.25 * rate * b.min_rtt_ns || c->in_recovery))) {
      b.phase = (b.phase + 1) % 8;
      b.phase_at = now_;
      b.gain = b.phase == 0 ? 1.25 : b.phase == 1 ? 0.75 : 1;
    }
  }
  if (old && b.mode != Bbr::Mode::kProbeRtt) {
    b.mode = Bbr::Mode::kProbeRtt;
    b.gain = 1;
    b.cwnd_before = std::max(b.cwnd_before, c->cwnd);
    b.probe_rtt_done = now_ + std::max<Nanos>(200 * kMs, static_cast<Nanos>(b.min_rtt_ns));
  }
  if (b.mode == Bbr::Mode::kProbeRtt) {
    if (now_ < b.probe_rtt_done) {
      c->cwnd = std::min(c->cwnd, 4.0);
      return;
    }
    b.min_rtt_at = now_;
    const bool full = b.full_rounds >= 3;
    b.mode = full ? Bbr::Mode::kProbeBandwidth : Bbr::Mode::kStartup;
    b.gain = full ? 1 : 2.885;
    b.phase = 2;
    b.phase_at = now_;
    c->cwnd = std::max(c->cwnd, std::exchange(b.cwnd_before, 0));
  }
  const double target = b.window_gain * rate * b.min_rtt_ns / kPacket + 6;
  const double packets = static_cast<double>(train.bytes) / kPacket;
  if (b.full_rounds >= 3) {
    c->cwnd = std::min(c->cwnd + packets, target);
  } else if (c->cwnd < target || c->arrived < 10 * kPacket) {
    c->cwnd += packets;
  }
  c->cwnd = std::max(c->cwnd, 4.0);
}

}  // namespace longhaul::paths_model
