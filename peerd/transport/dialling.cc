#include "peerd/transport/dialling.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "peerd/paths/lane_count.h"
#include "peerd/transport/repair.h"

namespace longhaul::peerd {
namespace {

// How many data lanes a link gets if the options leave it open. One TCP connection hardly fills a
// fast path, and carries only a fraction of a lossy one.
constexpr uint32_t kLanesLoopback = 2;
constexpr uint32_t kLanesElsewhere = 4;
// The least time for a connection attempt if there are other addresses to try.
constexpr int64_t kAttemptMinUs = Millis(50);
// Handshakes of data lanes that one link runs at once. The limit leaves room for other peers below
// LH_HANDSHAKES_MAX of the acceptor.
constexpr int kDataDialsMax = 32;

}  // namespace

void Dialling::BeginRequest(Peering* p, Tick now) {
  p->control.candidates.clear();
  p->control.backoff.Reset(now);
  p->data.error.clear();
  p->data.want_sent = false;
  p->data.backoff.Reset(now);
}

void Dialling::BeginLink(Peering* p, const SocketAddress& remote, int64_t rtt_us, Tick now) {
  p->control.candidates.clear();
  p->control.gone_since = kNever;
  Peering::DataDialling& data = p->data;
  data.planned = PlannedLanes(*p, remote, rtt_us);
  data.optional_until = Tick{};
  data.peer_wants = false;
  data.want_sent = false;
  data.dials.assign(data.planned, nullptr);
  data.backoff.Reset(now);
}

uint32_t Dialling::PlannedLanes(const Peering& p, const SocketAddress& address,
                                int64_t rtt_us) const {
  if (options_->lanes != 0) return std::min<uint32_t>(options_->lanes, LH_LANES_MAX);
  if (p.data.one_lane) return 1;
  if (rtt_us >= kLongWayUs) return LaneCount::First(rtt_us);
  return address.loopback() ? kLanesLoopback : kLanesElsewhere;
}

void Dialling::Plan(Peering* p, uint32_t lanes) {
  if (options_->lanes != 0 || lanes <= p->data.planned) return;
  if (p->link == nullptr || !p->link->alive()) return;
  p->data.planned = lanes;
  p->data.dials.resize(lanes, nullptr);
  p->link->ExpectDataLanes(lanes);
  p->data.backoff.Reset(ring_->Now());
  alarm_->Set(ring_->Now());
}

void Dialling::PlanAll(Peering* p) {
  if (p->link == nullptr || !p->link->options().dialled || p->data.planned != 1) return;
  Plan(p, PlannedLanes(*p, p->link->options().remote, p->link->rtt_us()));
}

void Dialling::CancelControl(Peering* p, const char* why) {
  if (p->control.dial != nullptr) std::exchange(p->control.dial, nullptr)->Fail(why);
}

void Dialling::CancelData(Peering* p, const char* why) {
  for (LaneDial*& dial : p->data.dials) {
    if (dial != nullptr) std::exchange(dial, nullptr)->Fail(why);
  }
}

const Request* Dialling::NextRequest(const Peering& p) {
  std::vector<const Request*> dials;
  for (const Request& r : p.requests) {
    if (r.dial) dials.push_back(&r);
  }
  return dials.empty() ? nullptr : dials[dials.size() - 1 - p.control.attempts % dials.size()];
}

// ------------------------------------------------------------------------------ control lanes

Tick Dialling::WorkControl(Peering* p, Tick now) {
  const Request* const request = NextRequest(*p);
  if (request == nullptr || p->control.dial != nullptr) return kNever;
  if (p->control.backoff.next <= now) DialControl(p, *request, now);
  return p->control.backoff.next > now ? p->control.backoff.next : kNever;
}

void Dialling::DialControl(Peering* p, const Request& request, Tick now) {
  Peering::ControlDialling& control = p->control;
  if (control.candidates.empty() && control.resolving == 0) StartRound(p, request);
  if (!control.candidates.empty()) {
    StartControlDial(p, request, now);
  } else if (control.resolving == 0) {
    control.backoff.Failed(now);
  }
}

// Begins another pass through all endpoints.
void Dialling::StartRound(Peering* p, const Request& request) {
  for (const std::string& endpoint : request.endpoints) {
    const auto host_port = ParseHostPort(endpoint);
    if (!host_port.ok()) {
      p->last_error = std::string(host_port.status().message());
      continue;
    }
    if (const auto address = NumericAddress(*host_port)) {
      p->control.candidates.push_back(*address);
      continue;
    }
    ++p->control.resolving;
    resolver_->Resolve(*host_port, [this, key = p->key,
                                    serial = p->serial](Resolver::Addresses addresses) {
      Peering* peering = runs_->FindSerial(key, serial);
      if (peering == nullptr) return;
      Peering::ControlDialling& control = peering->control;
      --control.resolving;
      if (addresses.ok()) {
        control.candidates.insert(control.candidates.end(), addresses->begin(), addresses->end());
      } else {
        peering->last_error = std::string(addresses.status().message());
        control.gone_since = kNever;
        if (control.candidates.empty()) control.backoff.Failed(ring_->Now());
      }
      alarm_->Set(ring_->Now());
    });
  }
  if (request.endpoints.empty()) p->last_error = "the peer has no endpoint to connect to";
}

void Dialling::StartControlDial(Peering* p, const Request& request, Tick now) {
  Peering::ControlDialling& control = p->control;
  const Run& run = runs_->RunOf(*p);
  const std::string* token = runs_->FindToken(run, request.group, request.epoch);
  if (token == nullptr) {
    control.backoff.Failed(now);
    return;
  }
  const SocketAddress address = control.candidates.front();
  control.candidates.pop_front();
  Tick deadline = std::min(request.deadline, now + 2 * Millis(options_->detect_ms));
  if (!control.candidates.empty()) {
    // An address that does not answer must not use up the time of the addresses behind it.
    const int64_t share =
        (request.deadline - now) / static_cast<int64_t>(control.candidates.size() + 1);
    deadline = std::min(deadline, now + std::max(share, kAttemptMinUs));
  }
  DialSpec spec = handshakes_->Introduce(*p, LaneKind::kControl, address, request.relay,
                                         {request.group, request.epoch, *token}, nullptr);
  spec.hello.lanes = PlannedLanes(*p, address, 0);
  control.dial = handshakes_->Dial(std::move(spec), deadline, [this, key = p->key](LaneDial* dial) {
    OnControlDialled(key, dial);
  });
}

void Dialling::OnControlDialled(const LinkKey& key, LaneDial* dial) {
  Peering* p = runs_->Find(key);
  if (p == nullptr || p->control.dial != dial || closing_) {
    if (dial->ok()) ring_->sockets().Close(dial->TakeFd());
    return;
  }
  p->control.dial = nullptr;
  if (dial->ok() && p->link == nullptr) {
    return owner_->OnControlDialled(p, dial->TakeSocket(), dial->hello(), dial->address());
  }
  if (dial->ok()) ring_->sockets().Close(dial->TakeFd());
  OnControlFailed(p, *dial);
}

void Dialling::OnControlFailed(Peering* p, const LaneDial& dial) {
  const Tick now = ring_->Now();
  Peering::ControlDialling& control = p->control;
  if (dial.refused() == LaneResult::kWrongSealing && !dial.hello().sealed &&
      !control.looked_local && options_->encryption == LaneEncryption::kAuto) {
    // Its address looks local, but something forwards to another host, where the peer wants a
    // sealed lane.
    control.looked_local = true;
    control.candidates.push_front(dial.address());
    return alarm_->Set(now);
  }
  if (!dial.ok()) {
    p->last_error = dial.error();
    if (p->last_error.find(ToString(dial.address())) == std::string::npos) {
      p->last_error = absl::StrCat(dial.connected() ? "handshake with " : "connect to ",
                                   ToString(dial.address()), ": ", dial.error());
    }
  }
  if (!dial.SaysGone()) {
    control.gone_since = kNever;
  } else if (control.gone_since == kNever) {
    control.gone_since = now;
  }
  if (control.candidates.empty()) {
    ++control.attempts;
    control.backoff.Failed(now);
    const int64_t patience = Millis(options_->detect_ms) / 2;
    if (control.gone_since != kNever && now - control.gone_since >= patience &&
        control.resolving == 0) {
      // A peer listens from its start to its end, so this one is gone.
      for (Request& request : p->requests) {
        if (request.dial) request.deadline = now;
      }
      alarm_->Set(now);
    }
  }
  alarm_->Set(std::max(control.backoff.next, now));
}

// ------------------------------------------------------------------------------ data lanes

Tick Dialling::WorkData(Peering* p, Tick now) {
  DialData(p, now);
  const Peering::DataDialling& data = p->data;
  Tick next = kNever;
  const bool wanted = data.peer_wants && data.peer_wants_until > now;
  if (p->link != nullptr && wanted && !p->link->data_complete()) next = data.peer_wants_until;
  if (data.backoff.next > now) next = std::min(next, data.backoff.next);
  return next;
}

void Dialling::DialData(Peering* p, Tick now) {
  Link* link = p->link.get();
  Peering::DataDialling& data = p->data;
  if (!link->established() || !link->options().dialled || link->data_complete()) return;
  if (link->closing()) return;
  const bool lost = link->data_were_complete();
  const bool wanted = p->data_wanted();
  const bool optional = data.optional_until > now;
  if (!wanted && !data.peer_wants && !lost && !optional) return;
  if (!wanted && !lost && data.peer_wants && data.peer_wants_until <= now) {
    link->Break(absl::StrCat("data lanes that the peer wants could not be built: ",
                             data.error.empty() ? "no answer in time" : data.error));
    return;
  }
  if (data.backoff.next > now) return;
  const std::optional<Credential> credential = runs_->AnyToken(*p);
  if (!credential) return;
  Tick deadline = now + 2 * Millis(options_->detect_ms);
  if (!lost) {
    deadline = std::min(deadline, wanted            ? p->requests.back().deadline
                                  : data.peer_wants ? data.peer_wants_until
                                                    : data.optional_until);
  }
  auto running = std::count_if(data.dials.begin(), data.dials.end(), [](LaneDial* d) { return d; });
  for (uint32_t lane = 0; lane < data.planned && running < kDataDialsMax; ++lane) {
    if (link->HasDataLane(lane) || data.dials[lane] != nullptr) continue;
    ++running;
    DialDataLane(p, lane, *credential, deadline);
  }
}

void Dialling::DialDataLane(Peering* p, uint32_t lane, const Credential& credential,
                            Tick deadline) {
  Link* const link = p->link.get();
  DialSpec spec = handshakes_->Introduce(*p, LaneKind::kData, link->options().remote,
                                         link->options().relay, credential, link);
  spec.hello.lane = lane;
  spec.hello.lanes = p->data.planned;
  spec.hello.link = link->options().id;
  spec.hello.serial = link->NewSerial();
  if (!link->sealed() && !spec.hello.relay) spec.token = link->clear_secret();
  if (link->small_packets()) spec.tuning.segment_bytes_max = kSmallSegmentBytes;
  if (link->data_were_complete()) {
    spec.connect_by = ReconnectBy(*link, options_->detect_ms, ring_->Now());
  }
  p->data.dials[lane] = handshakes_->Dial(
      std::move(spec), deadline,
      [this, key = p->key, lane](LaneDial* dial) { OnDataDialled(key, lane, dial); });
}

void Dialling::OnDataDialled(const LinkKey& key, uint32_t lane, LaneDial* dial) {
  Peering* p = runs_->Find(key);
  if (p == nullptr || lane >= p->data.dials.size() || p->data.dials[lane] != dial || closing_) {
    if (dial->ok()) ring_->sockets().Close(dial->TakeFd());
    return;
  }
  Peering::DataDialling& data = p->data;
  data.dials[lane] = nullptr;
  if (dial->ok()) {
    // A dial is cancelled with its link, so this is the link that the dial was started for.
    LH_CHECK(p->link != nullptr);
    const int fd = dial->TakeFd();
    const bool too_large = p->link->small_packets() && !dial->small_packets();
    if (too_large || !p->link->FitsDataLane(lane, data.planned, dial->hello().serial)) {
      // One of three: the lane was dialled before it was known that large packets vanish; the peer
      // lost it before it was in use here; or the link is closing.
      ring_->sockets().Abort(fd);
      alarm_->Set(ring_->Now());
      return;
    }
    p->link->AddDataLane(fd, lane, data.planned, dial->hello().serial);
    if (data.planned > static_cast<uint32_t>(kDataDialsMax)) alarm_->Set(ring_->Now());
    owner_->OnDataLaneDialled(p);
    return;
  }
  data.error = dial->error();
  runs_->TryNextToken(p, *dial);
  if (dial->refused() == LaneResult::kUnknownLink) {
    return p->link->OnUnknownThere(
        absl::StrCat("data lane ", lane, " to ", ToString(dial->address())));
  }
  if (dial->SaysGone() && p->link->data_were_complete()) {
    return BreakGone(p->link.get(), *dial);
  }
  data.backoff.Failed(ring_->Now());
  alarm_->Set(data.backoff.next);
}

}  // namespace longhaul::peerd
