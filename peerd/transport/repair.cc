#include "peerd/transport/repair.h"

#include <cerrno>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"

namespace longhaul::peerd {
namespace {

// On a short path, how often to dial a lost lane within detect_ms.
constexpr int64_t kConnectsPerDetect = 6;
// If lanes of a peer are lost at longer intervals than this, they are dialled again at once.
constexpr int64_t kLossApartUs = Seconds(1);
// How many losses of one peer are logged in that time. Further ones are only counted.
constexpr int kLossesLogged = 4;

void BreakRefused(Link* link, const std::string& address) {
  link->Break(absl::StrCat("connection refused by ", address, " after a lane broke"));
}

}  // namespace

void BreakGone(Link* link, const LaneDial& dial) {
  const std::string address = ToString(dial.address());
  if (dial.connect_error() != 0) return BreakRefused(link, address);
  link->Break(absl::StrCat("another peer answers at ", address, " after a lane broke"));
}

Tick ReconnectBy(const Link& link, uint32_t detect_ms, Tick now) {
  return link.short_way() ? now + Millis(detect_ms) / kConnectsPerDetect : kNever;
}

void Repair::Begin(Peering* p, Tick now) {
  p->repair.redial_backoff.Reset(now);
  p->repair.knock_backoff.Reset(now);
  p->repair.losses = 0;
}

void Repair::OnLaneLost(Peering* p, LaneKind kind, const std::string& reason) {
  const Tick now = ring_->Now();
  Peering::Repairing& repair = p->repair;
  // Lanes that break again and again are not dialled in a busy loop.
  const bool apart = repair.losses == 0 || now - repair.losses_since > kLossApartUs;
  if (apart) {
    repair.losses_since = now;
    repair.losses = 0;
    repair.redial_backoff.Reset(now);
    repair.knock_backoff.Reset(now);
    p->data.backoff.Reset(now);
  } else if (repair.losses > 2 * static_cast<int>(1 + p->link->data_lanes_announced())) {
    (kind == LaneKind::kControl ? repair.redial_backoff : p->data.backoff).Failed(now);
  }
  if (++repair.losses <= kLossesLogged) {
    Log(LogLevel::kWarning, absl::StrCat("lane lost peer=", ToString(p->key.peer),
                                         " run=", p->key.run, " data_lanes=", p->link->data_lanes(),
                                         repair.losses == kLossesLogged ? " more=not_logged" : "") +
                                LogField("reason", reason));
  }
  alarm_->Set(now);
}

void Repair::OnLaneBack(Peering* p, const std::string& name) {
  p->repair.redial_error.clear();
  if (p->repair.losses > kLossesLogged) return;
  Log(LogLevel::kInfo, absl::StrCat("lane back peer=", ToString(p->key.peer), " run=", p->key.run,
                                    " data_lanes=", p->link->data_lanes()) +
                           LogField("lane", name));
}

Tick Repair::Work(Peering* p, Tick now) {
  const Link& link = *p->link;
  Peering::Repairing& repair = p->repair;
  if (!link.alive() || !link.established() || link.has_control() || link.closing()) return kNever;
  if (link.options().dialled) {
    if (repair.redial == nullptr && repair.redial_backoff.next <= now) Redial(p, now);
    return repair.redial == nullptr ? repair.redial_backoff.next : kNever;
  }
  // A connection to the relay would show only that the relay lives.
  if (link.options().relay) return kNever;
  if (repair.knocks == 0 && repair.knock_backoff.next <= now) Knock(p, now);
  return repair.knocks == 0 && p->link != nullptr ? repair.knock_backoff.next : kNever;
}

void Repair::Cancel(Peering* p, const char* why) {
  if (p->repair.redial != nullptr) std::exchange(p->repair.redial, nullptr)->Fail(why);
}

void Repair::Redial(Peering* p, Tick now) {
  const std::optional<Credential> credential = runs_->AnyToken(*p);
  if (!credential) {
    p->repair.redial_backoff.Failed(now);
    return;
  }
  DialSpec spec = handshakes_->Introduce(*p, LaneKind::kControl, p->link->options().remote,
                                         p->link->options().relay, *credential, p->link.get());
  spec.hello.lanes = p->data.planned;
  spec.hello.link = p->link->options().id;
  spec.hello.serial = p->link->NewSerial();
  if (p->link->small_packets()) spec.tuning.segment_bytes_max = kSmallSegmentBytes;
  spec.connect_by = ReconnectBy(*p->link, options_->detect_ms, now);
  p->repair.redial =
      handshakes_->Dial(std::move(spec), now + Millis(options_->detect_ms),
                        [this, key = p->key](LaneDial* dial) { OnRedialled(key, dial); });
}

void Repair::OnRedialled(const LinkKey& key, LaneDial* dial) {
  Peering* p = runs_->Find(key);
  if (p == nullptr || p->repair.redial != dial || closing_) {
    if (dial->ok()) ring_->sockets().Close(dial->TakeFd());
    return;
  }
  // A dial is cancelled with its link, so this is the link that the dial was started for.
  p->repair.redial = nullptr;
  if (dial->ok()) {
    LaneSocket socket = dial->TakeSocket();
    const bool too_large = p->link->small_packets() && !dial->small_packets();
    if (!too_large && p->link->FitsControl(dial->hello().serial)) {
      p->link->ResumeControl(std::move(socket), dial->hello().serial);
    } else {
      ring_->sockets().Abort(socket.fd);
    }
    alarm_->Set(ring_->Now());
    return;
  }
  p->repair.redial_error = dial->error();
  if (dial->refused() == LaneResult::kUnknownLink) {
    return p->link->OnUnknownThere(absl::StrCat("control lane to ", ToString(dial->address())));
  }
  if (dial->SaysGone()) return BreakGone(p->link.get(), *dial);
  runs_->TryNextToken(p, *dial);
  p->repair.redial_backoff.Failed(ring_->Now());
  alarm_->Set(p->repair.redial_backoff.next);
}

// Knocks at all addresses of the peer at once. If each refuses, the peer's process is gone.
void Repair::Knock(Peering* p, Tick now) {
  Peering::Repairing& repair = p->repair;
  repair.knocks_refused = 0;
  repair.knocks_other = 0;
  repair.knock_backoff.Failed(now);
  for (const std::string& endpoint : p->endpoints) {
    const auto host_port = ParseHostPort(endpoint);
    if (!host_port.ok()) continue;
    if (const auto address = NumericAddress(*host_port)) {
      KnockAt(p, *address);
      continue;
    }
    ++repair.knocks;
    resolver_->Resolve(*host_port,
                       [this, key = p->key, serial = p->serial](Resolver::Addresses addresses) {
                         Peering* peering = runs_->FindSerial(key, serial);
                         if (peering == nullptr) return;
                         if (addresses.ok()) {
                           for (const SocketAddress& address : *addresses)
                             KnockAt(peering, address);
                         } else {
                           ++peering->repair.knocks_other;
                         }
                         --peering->repair.knocks;
                         OnKnockOver(peering);
                       });
  }
}

void Repair::KnockAt(Peering* p, const SocketAddress& address) {
  ++p->repair.knocks;
  handshakes_->Knock(address, ring_->Now() + Millis(options_->detect_ms),
                     [this, key = p->key, serial = p->serial](LaneKnock* knock) {
                       OnKnocked(key, serial, knock);
                     });
}

void Repair::OnKnocked(const LinkKey& key, uint64_t serial, LaneKnock* knock) {
  if (knock->ok()) ring_->sockets().Close(knock->TakeFd());
  Peering* p = runs_->FindSerial(key, serial);
  if (p == nullptr || closing_) return;
  if (knock->connect_error() == ECONNREFUSED) {
    ++p->repair.knocks_refused;
    p->repair.knock_refused = ToString(knock->address());
  } else {
    ++p->repair.knocks_other;
  }
  --p->repair.knocks;
  OnKnockOver(p);
}

void Repair::OnKnockOver(Peering* p) {
  Peering::Repairing& repair = p->repair;
  if (repair.knocks > 0) return;
  alarm_->Set(repair.knock_backoff.next);
  if (p->link == nullptr || !p->link->alive() || p->link->has_control()) return;
  if (repair.knocks_refused > 0 && repair.knocks_other == 0) {
    BreakRefused(p->link.get(), repair.knock_refused);
  }
}

}  // namespace longhaul::peerd
