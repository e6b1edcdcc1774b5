#include "peerd/transport/handshakes.h"

#include <algorithm>

#include "base/check.h"
#include "base/status_macros.h"
#include "peerd/paths/congestion_choice.h"

namespace longhaul::peerd {

Handshakes::~Handshakes() {
  for (auto& [raw, handshake] : running_) (void)handshake.release();
}

// If no congestion control was asked for, finds one without pacing for loopback. A control that
// paces (bbr, the default of many systems) protects nothing there, and its timers cost a quarter of
// the processor time of a large op.
absl::Status Handshakes::CheckCongestion(int family) {
  LH_ASSIGN_OR_RETURN(const int probe, ring_->sockets().Open(family));
  const auto tune = [&](const std::string& congestion) {
    return ring_->sockets().Tune(probe, {.user_timeout_ms = 0, .congestion = congestion});
  };
  absl::Status status;
  if (!options_->congestion.empty()) {
    status = tune(options_->congestion);
    loopback_congestion_ = options_->congestion;
  } else {
    offers_bbr_ = tune(CongestionChoice::kOther).ok();
    offers_cubic_ = tune(CongestionChoice::kFirst).ok();
    for (const char* without_pacing : {"cubic", "reno"}) {
      if (!loopback_congestion_.empty() || !tune(without_pacing).ok()) continue;
      loopback_congestion_ = without_pacing;
    }
  }
  ring_->sockets().Close(probe);
  return status;
}

StreamTuning Handshakes::TuningFor(const SocketAddress& remote) const {
  // TCP's timeout is longer than detect_ms, so that a silent link breaks for its silence, and not
  // by this timeout. (Link::TuneLanes() changes the timeout later.)
  return {.user_timeout_ms = 4 * options_->detect_ms,
          .congestion = remote.loopback() ? loopback_congestion_ : options_->congestion};
}

bool Handshakes::MayDial(const SocketAddress& address) const {
  using Scope = SocketAddress::Scope;
  if (address.scope() == Scope::kWide || options_->own_endpoints == nullptr) return true;
  const std::vector<std::string> own = options_->own_endpoints();
  const auto first = own.empty() ? absl::NotFoundError("") : ParseHostPort(own.front());
  const auto numeric = first.ok() ? NumericAddress(*first) : std::nullopt;
  return numeric && numeric->scope() == address.scope();
}

DialSpec Handshakes::Introduce(const Peering& p, LaneKind kind, const SocketAddress& address,
                               PeerId relay, Credential credential, const Link* link) {
  const Digest32 nonce = nonces_.Next();
  const Tag16 run = RunTag(credential.token, p.key.run, nonce);
  DialSpec spec{
      .address = address,
      .tuning = TuningFor(address),
      .hello = {},
      .token = std::move(credential.token),
      .encryption = p.control.looked_local ? LaneEncryption::kRequire : options_->encryption,
      .host = options_->host,
      .tls = tls_.get(),
      .peer_key = p.public_key};
  if (link != nullptr) {
    spec.encryption = link->sealed() ? LaneEncryption::kRequire : LaneEncryption::kOff;
  }
  spec.hello = {.kind = kind,
                .run = run,
                .group = credential.group,
                .epoch = credential.epoch,
                .dialer = options_->self,
                .acceptor = p.key.peer,
                .relay = relay,
                .nonce = nonce};
  return spec;
}

// HELLO carries an empty tag of the run, which no run has, so no peer accepts it. The token is
// random: whatever listens at the address cannot guess it, so an ANSWER that accepts proves nothing
// and ends the dial.
DialSpec Handshakes::LookFor(PeerId peer, const SocketAddress& address) {
  const Digest32 secret = nonces_.Next();
  DialSpec spec{.address = address,
                .tuning = TuningFor(address),
                .hello = {},
                .token = std::string(secret.begin(), secret.end())};
  spec.hello = {
      .epoch = Epoch(1), .dialer = options_->self, .acceptor = peer, .nonce = nonces_.Next()};
  return spec;
}

LaneDial* Handshakes::Dial(DialSpec spec, Tick deadline, Done<LaneDial> done) {
  spec.forbidden = !MayDial(spec.address);
  return Keep(std::make_unique<LaneDial>(ring_, std::move(spec), deadline, Over(std::move(done))));
}

LaneKnock* Handshakes::Knock(const SocketAddress& address, Tick deadline, Done<LaneKnock> done) {
  return Keep(std::make_unique<LaneKnock>(ring_, address, TuningFor(address), !MayDial(address),
                                          deadline, Over(std::move(done))));
}

LaneAccept* Handshakes::Accept(int fd, Tick deadline, LaneAccept::Judge judge,
                               Done<LaneAccept> done) {
  return Keep(std::make_unique<LaneAccept>(ring_, fd, nonces_.Next(), tls_.get(), deadline,
                                           std::move(judge), Over(std::move(done))));
}

Tick Handshakes::Work(Tick now) {
  Tick next = kNever;
  for (auto& [raw, handshake] : running_) {
    if (handshake->deadline() <= now) {
      handshake->Fail("no answer in time");
    } else {
      next = std::min(next, handshake->deadline());
    }
  }
  return next;
}

void Handshakes::FailAll(const std::string& reason) {
  for (auto& [raw, handshake] : running_) handshake->Fail(reason);
}

template <class T>
T* Handshakes::Keep(std::unique_ptr<T> handshake) {
  T* const raw = handshake.get();
  alarm_->Set(raw->deadline());
  running_[raw] = std::move(handshake);
  return raw;
}

template <class T>
LaneHandshake::Done Handshakes::Over(Done<T> done) {
  return [this, done = std::move(done)](LaneHandshake* handshake) mutable {
    const auto it = running_.find(handshake);
    LH_CHECK(it != running_.end());
    events_->DestroyLater(std::move(it->second));
    running_.erase(it);
    done(static_cast<T*>(handshake));
  };
}

}  // namespace longhaul::peerd
