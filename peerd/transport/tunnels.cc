#include "peerd/transport/tunnels.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {

Tunnels::~Tunnels() {
  for (auto& [id, tunnel] : tunnels_) (void)tunnel.release();
}

LaneResult Tunnels::Judge(const LaneHello& hello) const {
  const Run* const run = runs_->Find(hello).run;
  if (run == nullptr) return LaneResult::kUnknownEpoch;
  for (const PeerId end : {hello.dialer, hello.acceptor}) {
    const auto peer = run->peers.find(end);
    // A link never goes through two relays.
    if (peer == run->peers.end() || !peer->second.Wants(PeerId())) {
      return LaneResult::kUnknownEpoch;
    }
  }
  return tunnels_.size() < LH_TUNNELS_MAX ? LaneResult::kAccepted : LaneResult::kNoWay;
}

void Tunnels::Open(int fd, const HelloBytes& bytes, const LaneHello& hello,
                   const SocketAddress& dialer) {
  const RunTable::Known known = runs_->Find(hello);
  const Peering& p = known.run->peers.at(hello.acceptor);
  MakeRoom();
  const uint64_t id = next_id_++;
  TunnelOptions options{.hello = bytes, .token = *known.token, .detect_ms = options_->detect_ms};
  auto ended = [this, id, peer = hello.dialer, dialer](Tunnel* tunnel) {
    gone_bytes_ += tunnel->bytes();
    if (tunnel->forged()) {
      refused_->Add(
          CallerRefusal::kToken, peer, ToString(dialer),
          "the caller does not have the epoch's token, and wanted to go through this peer",
          ring_->Now());
    }
    const auto it = tunnels_.find(id);
    LH_CHECK(it != tunnels_.end());
    events_->DestroyLater(std::move(it->second));
    tunnels_.erase(it);
  };
  auto tunnel = std::make_unique<Tunnel>(ring_, fd, std::move(options), std::move(ended));
  alarm_->Set(tunnel->deadline());
  tunnels_[id] = std::move(tunnel);

  std::vector<SocketAddress> addresses;
  // The address of our own link works, so it comes first.
  if (p.link != nullptr && p.link->options().dialled && !p.link->options().relay) {
    addresses.push_back(p.link->options().remote);
  }
  std::optional<HostPort> name;
  for (const std::string& endpoint : p.endpoints) {
    const auto host_port = ParseHostPort(endpoint);
    if (!host_port.ok()) continue;
    if (const auto address = NumericAddress(*host_port)) {
      addresses.push_back(*address);
    } else if (!name) {
      name = *host_port;
    }
  }
  if (!addresses.empty() || !name) return Connect(id, addresses);
  resolver_->Resolve(*name, [this, id](Resolver::Addresses found) {
    Connect(id, found.ok() ? *found : std::vector<SocketAddress>());
  });
}

void Tunnels::Connect(uint64_t id, const std::vector<SocketAddress>& addresses) {
  const auto it = tunnels_.find(id);
  if (it == tunnels_.end()) return;
  std::vector<Tunnel::Address> tuned;
  tuned.reserve(addresses.size());
  for (const SocketAddress& address : addresses) {
    if (handshakes_->MayDial(address)) {
      tuned.push_back({address, handshakes_->TuningFor(address)});
    }
  }
  it->second->Connect(std::move(tuned));
}

void Tunnels::MakeRoom() {
  size_t opening = 0;
  Tunnel* oldest = nullptr;
  for (const auto& [id, tunnel] : tunnels_) {
    if (tunnel->carrying() || tunnel->deadline() == kNever) continue;
    if (opening++ == 0) oldest = tunnel.get();
  }
  if (opening >= LH_TUNNELS_OPENING_MAX) oldest->Stop();
}

Tick Tunnels::Work(Tick now) {
  Tick next = kNever;
  for (const auto& [id, tunnel] : tunnels_) {
    if (tunnel->deadline() <= now) {
      tunnel->Stop();
    } else {
      next = std::min(next, tunnel->deadline());
    }
  }
  return next;
}

void Tunnels::Close() {
  for (const auto& [id, tunnel] : tunnels_) tunnel->Stop();
}

uint64_t Tunnels::bytes() const {
  uint64_t sum = gone_bytes_;
  for (const auto& [id, tunnel] : tunnels_) sum += tunnel->bytes();
  return sum;
}

}  // namespace longhaul::peerd
