#include "peerd/transport/probing.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace longhaul::peerd {
namespace {

// The most connections of other peers' probes at one time. Further callers are refused as kBusy.
constexpr size_t kSinksMax = 128;
// The most bytes that one of these connections may bring, and the longest that it may last.
constexpr uint64_t kSinkBytesMax = 2 * kProbeBytesMax;
constexpr int64_t kSinkUsMax = 4 * kProbeUsMax;
// How often to look at what has arrived.
constexpr int64_t kLookUs = Millis(20);

void AddBytes(const TcpDelivery& from, TcpDelivery* sum) {
  sum->bytes_acked += from.bytes_acked;
  sum->bytes_arrived += from.bytes_arrived;
  sum->bytes_sent += from.bytes_sent;
  sum->bytes_repeated += from.bytes_repeated;
}

}  // namespace

Probing::~Probing() {
  for (auto& [raw, stream] : streams_) (void)stream.release();
}

bool Probing::Start(const LinkKey& key) {
  const Link* link = runs_->FindOpen(key);
  if (link == nullptr || link->options().relay || probe_ || result_ || closing_) return false;
  const Peering& p = *runs_->Find(key);
  const std::optional<SocketAddress> address = DataAddress(p);
  const std::optional<Credential> credential = runs_->AnyToken(p);
  if (!address || !credential) return false;
  const Tick now = ring_->Now();
  probe_ = Probe{};
  probe_->result.link = key;
  probe_->result.begun = now;
  probe_->link_arrived_before = link->arrived_bytes();
  const uint32_t lanes = link->data_lanes() != 0 ? link->data_lanes_announced() : p.data.planned;
  probe_->connections = std::clamp(lanes, 1u, kProbeConnectionsMax);
  for (uint32_t i = 0; i < probe_->connections; ++i) {
    DialSpec spec =
        handshakes_->Introduce(p, LaneKind::kProbe, *address, PeerId(), *credential, link);
    spec.hello.lane = i;
    spec.hello.lanes = probe_->connections;
    spec.hello.link = link->options().id;
    spec.hello.serial = 1;
    probe_->dials.insert(handshakes_->Dial(std::move(spec), now + 2 * Millis(options_->detect_ms),
                                           [this](LaneDial* dial) { OnDialled(dial); }));
  }
  alarm_->Set(now);
  return true;
}

// Returns where the peer listens. If the peer dialled us, that is not the port it dialled from.
std::optional<SocketAddress> Probing::DataAddress(const Peering& p) const {
  if (p.link->options().dialled) return p.link->options().remote;
  for (const std::string& endpoint : p.endpoints) {
    const auto host_port = ParseHostPort(endpoint);
    if (!host_port.ok()) continue;
    if (const auto address = NumericAddress(*host_port)) return *address;
  }
  return std::nullopt;
}

void Probing::OnDialled(LaneDial* dial) {
  const int fd = dial->ok() ? dial->TakeFd() : -1;
  if (!probe_ || probe_->dials.erase(dial) == 0 || closing_) {
    if (fd >= 0) ring_->sockets().Abort(fd);
    return;
  }
  if (fd >= 0) return AddStream(fd, true);
  if (probe_->result.error.empty()) probe_->result.error = dial->error();
  alarm_->Set(ring_->Now());
}

bool Probing::HasRoom() const { return sinks_ < kSinksMax; }

void Probing::Adopt(int fd) { AddStream(fd, false); }

void Probing::AddStream(int fd, bool sends) {
  const Tick now = ring_->Now();
  const uint64_t bytes = sends ? kProbeBytesMax / probe_->connections : kSinkBytesMax;
  const Tick deadline = now + (sends ? 2 * kProbeUsMax : kSinkUsMax);
  auto stream = std::make_unique<ProbeStream>(ring_, fd, sends, bytes, deadline,
                                              [this](ProbeStream* s) { OnStreamEnded(s); });
  if (sends) {
    if (probe_->started++ == 0) probe_->first = now;
    probe_->streams.push_back(stream.get());
  } else {
    ++sinks_;
  }
  ProbeStream* const raw = stream.get();
  streams_[raw] = std::move(stream);
  alarm_->Set(sends ? now : deadline);
}

void Probing::OnStreamEnded(ProbeStream* stream) {
  const auto it = streams_.find(stream);
  LH_CHECK(it != streams_.end());
  if (!stream->sends()) {
    --sinks_;
  } else if (probe_ && std::erase(probe_->streams, stream) != 0) {
    AddBytes(stream->delivery(), &probe_->gone);
    if (probe_->result.error.empty()) probe_->result.error = "its connections broke";
    alarm_->Set(ring_->Now());
  }
  events_->DestroyLater(std::move(it->second));
  streams_.erase(it);
}

Tick Probing::Work(Tick now) {
  Tick next = kNever;
  for (auto& [raw, stream] : streams_) {
    if (stream->deadline() <= now) {
      stream->Stop();
    } else {
      next = std::min(next, stream->deadline());
    }
  }
  if (!probe_) return next;
  if (probe_->streams.empty() && probe_->dials.empty()) {
    End(probe_->result.error);
    return next;
  }
  if (probe_->streams.empty()) return next;
  SumUp(now);
  RateSample& rate = probe_->result.rate;
  const int64_t us_max = std::clamp(16 * int64_t{rate.rtt_us}, kProbeUsMax, 2 * kProbeUsMax);
  const uint64_t planned = probe_->started * (kProbeBytesMax / probe_->connections);
  const bool arrived = probe_->dials.empty() && probe_->acked >= planned;
  if (!probe_->meter.settled() && !arrived && now - probe_->first < us_max) {
    return std::min(next, now + kLookUs);
  }
  if (arrived && rate.bytes_per_second == 0) {
    // Everything arrived before the rate could be watched. So the rate is at least this.
    const auto us = static_cast<uint64_t>(std::max(now - probe_->first, kLookUs / 4));
    rate.bytes_per_second = probe_->acked * 1000000 / us;
  }
  End(rate.bytes_per_second == 0 ? "too little arrived in its time" : "");
  return next;
}

void Probing::SumUp(Tick now) {
  RateSample& rate = probe_->result.rate;
  TcpDelivery sum = probe_->gone;
  for (ProbeStream* stream : probe_->streams) {
    const TcpDelivery& seen = stream->delivery();
    AddBytes(seen, &sum);
    if (rate.rtt_us == 0 || (seen.rtt_us != 0 && seen.rtt_us < rate.rtt_us)) {
      rate.rtt_us = seen.rtt_us;
    }
  }
  probe_->acked = sum.bytes_acked;
  rate.bytes_sent = sum.bytes_sent;
  rate.bytes_repeated = sum.bytes_repeated;
  if (const Link* link = runs_->FindOpen(probe_->result.link)) {
    const uint64_t arrived = link->arrived_bytes();
    // If there are fewer bytes than before, a lane was replaced.
    const uint64_t more = arrived - std::min(arrived, probe_->link_arrived_before);
    probe_->link_arrived += more;
    probe_->link_arrived_before = arrived;
  }
  // Counts the bytes that have arrived, not those acknowledged: acknowledgements jump where packets
  // were lost.
  probe_->meter.Add(now, sum.bytes_arrived + probe_->link_arrived, rate.rtt_us);
  rate.bytes_per_second = probe_->meter.bytes_per_second();
}

void Probing::End(std::string error) {
  result_ = std::move(probe_->result);
  result_->error = std::move(error);
  result_->ended = ring_->Now();
  ++(result_->error.empty() ? probes_ : failed_);
  bytes_ += result_->rate.bytes_sent;
  const std::set<LaneDial*> dials = std::move(probe_->dials);
  const std::vector<ProbeStream*> streams = std::move(probe_->streams);
  probe_.reset();
  for (LaneDial* dial : dials) dial->Fail("the probe is over");
  for (ProbeStream* stream : streams) stream->Stop();
  done_(*result_);
}

std::optional<LinkProbe> Probing::PopResult() { return std::exchange(result_, std::nullopt); }

void Probing::Close() {
  closing_ = true;
  for (auto& [raw, stream] : streams_) stream->Stop();
}

}  // namespace longhaul::peerd
