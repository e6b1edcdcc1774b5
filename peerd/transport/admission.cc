#include "peerd/transport/admission.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace longhaul::peerd {
namespace {

// Turned-away callers are logged at most this often.
constexpr int64_t kCrowdedLogUs = Seconds(60);
// The pause after a failed accept (too many open files). Other code may close files meanwhile.
constexpr int64_t kAcceptPauseUs = Millis(50);

}  // namespace

absl::Status Admission::Listen(const SocketAddress& address) {
  LH_ASSIGN_OR_RETURN(listen_fd_, ring_->sockets().Listen(address));
  LH_ASSIGN_OR_RETURN(const SocketAddress bound, ring_->sockets().LocalAddress(listen_fd_));
  address_ = ToString(bound);
  AcceptNext();
  return absl::OkStatus();
}

void Admission::Close() {
  closing_ = true;
  if (accept_ != 0) {
    ring_->Cancel(accept_);
  } else {
    ring_->sockets().Close(std::exchange(listen_fd_, -1));
  }
}

void Admission::AcceptNext() {
  accept_ = ring_->Accept(listen_fd_, [this](IoResult result) {
    accept_ = 0;
    OnAccepted(result.value);
  });
}

void Admission::OnAccepted(int value) {
  if (closing_) {
    if (value >= 0) ring_->sockets().Close(value);
    ring_->sockets().Close(std::exchange(listen_fd_, -1));
    return;
  }
  if (value < 0) {
    if (value == -EINTR || value == -EAGAIN || value == -ECONNABORTED) return AcceptNext();
    if (!std::exchange(warned_, true)) {
      Log(LogLevel::kWarning, absl::StrCat("accept failed, trying again address=", address_) +
                                  LogField("error", strerror(-value)));
    }
    accept_ = ring_->Timeout(ring_->Now() + kAcceptPauseUs, [this](IoResult) {
      accept_ = 0;
      if (closing_) {
        ring_->sockets().Close(std::exchange(listen_fd_, -1));
      } else {
        AcceptNext();
      }
    });
    return;
  }
  ++accepted_;
  const auto remote = ring_->sockets().PeerAddress(value);
  if (accepts_ >= size_t{4} * LH_HANDSHAKES_MAX || !remote.ok() ||
      !ring_->sockets().Tune(value, handshakes_->TuningFor(*remote)).ok()) {
    Refuse(CallerRefusal::kBroken, {}, remote.ok() ? *remote : SocketAddress(),
           "no room, or the connection was cut at once");
    ring_->sockets().Abort(value);
    return AcceptNext();
  }
  ++accepts_;
  const AddressBlock block = AddressBlock::Of(*remote);
  const uint64_t caller = callers_.Add(block, runs_->PeerIsKnownAt(block));
  const bool on_host = StaysOnHost(ring_->sockets(), value, *remote);
  accepting_[caller] = handshakes_->Accept(
      value, ring_->Now() + 2 * Millis(options_->detect_ms),
      [this, caller, on_host](const LaneHello& hello) {
        LaneVerdict verdict = Judge(hello, on_host);
        if (verdict.result == LaneResult::kAccepted) callers_.SetJudged(caller);
        return verdict;
      },
      [this, caller, remote = *remote, on_host](LaneAccept* handshake) {
        OnHandshake(caller, handshake, remote, on_host);
      });
  if (callers_.size() > LH_HANDSHAKES_MAX) MakeRoom();
  AcceptNext();
}

// Turns one caller away, perhaps the one that was accepted last.
void Admission::MakeRoom() {
  const Callers::Victim victim = callers_.First();
  callers_.Remove(victim.caller);
  const auto accept = accepting_.find(victim.caller);
  accept->second->Fail("too many connections");
  accepting_.erase(accept);
  ++turned_away_;
  if (ring_->Now() < crowded_log_at_) return;
  crowded_log_at_ = ring_->Now() + kCrowdedLogUs;
  Log(LogLevel::kWarning,
      absl::StrCat("data port has more callers than it can listen to, some are turned away max=",
                   LH_HANDSHAKES_MAX, " turned_away=", std::exchange(turned_away_, 0),
                   " last_from=", ToString(victim.block)));
}

// Whether to let the caller go on and prove that it has the token.
LaneVerdict Admission::Judge(const LaneHello& hello, bool on_host) const {
  if (hello.relay == options_->self) {
    const LaneResult result = tunnels_->Judge(hello);
    return {result, "", "", result == LaneResult::kAccepted};
  }
  // The caller wants another peer, which had this address before.
  if (hello.acceptor != options_->self) return {LaneResult::kWrongPeer};
  // The link is checked before the epoch, because a side that has given the link up has usually
  // dropped the epoch too.
  if (hello.link != 0 && !runs_->HasLink(hello.dialer, hello.link)) {
    return {LaneResult::kUnknownLink};
  }
  const auto [run, token] = runs_->Find(hello);
  if (run == nullptr) return {LaneResult::kUnknownEpoch};
  const auto peer = run->peers.find(hello.dialer);
  if (peer == run->peers.end() || !peer->second.needed()) {
    return {LaneResult::kWrongPeer};
  }
  const Peering& p = peer->second;
  if (hello.link != 0 && (p.link == nullptr || p.link->options().id != hello.link)) {
    return {LaneResult::kUnknownLink};
  }
  LaneResult result = LaneResult::kAccepted;
  if (hello.link == 0 && !p.Wants(hello.relay)) {
    // The caller follows another epoch than this peer.
    result = LaneResult::kUnknownEpoch;
  } else if (!MaySeal(p, hello, on_host)) {
    result = LaneResult::kWrongSealing;
  } else if (hello.kind == LaneKind::kControl) {
    result = JudgeControl(p, hello);
  } else if (hello.kind == LaneKind::kProbe) {
    if (!owner_->HasRoomForProbe()) result = LaneResult::kBusy;
  } else if (!p.link->FitsDataLane(hello.lane, hello.lanes, hello.serial)) {
    result = LaneResult::kBusy;  // a newer lane is up
  } else if (p.link->options().dialled) {
    result = LaneResult::kWrongPeer;  // the side that dialled the link dials these too
  }
  if (result != LaneResult::kAccepted) return {result};
  // Every peer of the epoch has its token. Only the two ends of the link have its secret.
  const bool by_link = hello.kind == LaneKind::kData && !hello.relay && !p.link->sealed();
  return {result, by_link ? p.link->clear_secret() : *token, p.public_key};
}

// Whether this lane may be sealed, or in clear, as HELLO says. A probe carries nothing.
bool Admission::MaySeal(const Peering& p, const LaneHello& hello, bool on_host) const {
  if (hello.kind == LaneKind::kProbe) return true;
  if (hello.link != 0) return hello.sealed == p.link->sealed();
  switch (options_->encryption) {
    case LaneEncryption::kOff:
      return !hello.sealed;
    case LaneEncryption::kAuto:
      return hello.sealed || (on_host && !hello.relay && hello.host == handshakes_->host() &&
                              hello.host != Tag16());
    case LaneEncryption::kRequire:
      return hello.sealed;
  }
  return false;
}

// Each pair of peers has one control lane. A new connection replaces a link if the link was made in
// an older epoch of the group, is silent, or has lost its control lane. If both sides dial at once,
// the connection of the peer with the smaller id stays.
LaneResult Admission::JudgeControl(const Peering& p, const LaneHello& hello) const {
  const bool ours_first = options_->self < p.key.peer;
  if (hello.link != 0) {
    // The side that dialled the link dials its control lane again.
    if (p.link->options().dialled) return LaneResult::kWrongPeer;
    return p.link->FitsControl(hello.serial) ? LaneResult::kAccepted : LaneResult::kBusy;
  }
  if (p.link != nullptr) {
    // The peer begins anew, so it has given up the lost control lane.
    if (!p.link->has_control()) return LaneResult::kAccepted;
    if (!p.link->established()) return ours_first ? LaneResult::kBusy : LaneResult::kAccepted;
    const LinkOptions& link = p.link->options();
    const bool newer = hello.group == link.group && hello.epoch > link.epoch;
    const bool silent = ring_->Now() - p.link->last_heard() > Millis(options_->detect_ms) * 2 / 3;
    return newer || silent ? LaneResult::kAccepted : LaneResult::kBusy;
  }
  const LaneDial* const dial = p.control.dial;
  if (dial != nullptr && dial->connected() && ours_first) return LaneResult::kBusy;
  return LaneResult::kAccepted;
}

void Admission::OnHandshake(uint64_t caller, LaneAccept* handshake, const SocketAddress& remote,
                            bool on_host) {
  callers_.Remove(caller);
  accepting_.erase(caller);
  --accepts_;
  if (!handshake->ok() || closing_) {
    if (handshake->ok()) {
      ring_->sockets().Close(handshake->TakeFd());
    } else {
      Refuse(handshake->refusal(), handshake->hello(), remote, handshake->error());
    }
    return;
  }
  // Checked again: much may have changed since HELLO.
  const LaneHello& hello = handshake->hello();
  LaneSocket socket = handshake->TakeSocket();
  if (const auto result = Judge(hello, on_host).result; result != LaneResult::kAccepted) {
    Refuse(RefusalOf(result), hello, remote, "it came too late");
    ring_->sockets().Abort(socket.fd);
    return;
  }
  if (hello.relay == options_->self) {
    return tunnels_->Open(socket.fd, handshake->hello_bytes(), hello, remote);
  }
  Run* const run = runs_->Find(hello).run;
  owner_->OnAdmitted(&run->peers[hello.dialer], std::move(socket), hello, remote);
}

void Admission::Refuse(CallerRefusal refusal, const LaneHello& hello, const SocketAddress& remote,
                       const std::string& why) {
  const bool looks = refusal == CallerRefusal::kEpoch && hello.run == Tag16();
  refused_->Add(looks ? CallerRefusal::kLook : refusal, hello.dialer, ToString(remote), why,
                ring_->Now());
}

}  // namespace longhaul::peerd
