#include <algorithm>
#include <functional>
#include <set>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "peerd/paths/host_paths.h"
#include "peerd/transport/admission.h"
#include "peerd/transport/alarm.h"
#include "peerd/transport/dialling.h"
#include "peerd/transport/event_queue.h"
#include "peerd/transport/handshakes.h"
#include "peerd/transport/link.h"
#include "peerd/transport/pinned_memory.h"
#include "peerd/transport/probing.h"
#include "peerd/transport/repair.h"
#include "peerd/transport/resolver.h"
#include "peerd/transport/run_table.h"
#include "peerd/transport/transport.h"
#include "peerd/transport/trying.h"
#include "peerd/transport/tunnels.h"

namespace longhaul::peerd {
namespace {

// Connects the parts. dialling.h and admission.h build links, repair.h repairs them, and probing.h
// measures them. This class decides which links there are, and tells the listener about them.
class TransportImpl final : public Transport,
                            public LinkOwner,
                            public DiallingOwner,
                            public AdmissionOwner {
 public:
  TransportImpl(TransportOptions options, Ring* ring, TransportListener* listener)
      : options_(std::move(options)),
        ring_(ring),
        listener_(listener),
        paths_(/*counts_lanes=*/options_.lanes == 0),
        events_(ring, [this] { OnEventsRun(); }),
        alarm_(ring, [this](Tick due) { Work(due); }),
        resolver_(ring),
        handshakes_(ring, &options_, &events_, &alarm_),
        dialling_(ring, &options_, &alarm_, &handshakes_, &resolver_, &runs_, this),
        repair_(ring, &options_, &alarm_, &handshakes_, &resolver_, &runs_),
        probing_(ring, &options_, &events_, &alarm_, &handshakes_, &runs_,
                 [this](const LinkProbe& probe) { OnProbed(probe); }),
        trying_(ring, &alarm_, &handshakes_, &resolver_),
        tunnels_(ring, &options_, &events_, &alarm_, &handshakes_, &resolver_, &runs_,
                 &refused_callers_),
        admission_(ring, &options_, &handshakes_, &runs_, &tunnels_, &refused_callers_, this),
        memory_(ring, &events_) {}
  ~TransportImpl() override;

  absl::Status Start();

  void SetSegmentListeners(const SegmentListeners& listeners) override { segments_ = listeners; }
  std::string listen_address() const override { return admission_.address(); }
  void OpenLinks(const std::string& run, uint32_t group, Epoch epoch, const std::string& token,
                 const std::vector<LinkRequest>& links, Tick deadline) override;
  void KeepLinks(const std::string& run, uint32_t group, Epoch epoch,
                 const std::vector<PeerId>& peers) override;
  void TryPeer(const GroupKey& group, uint64_t trial, PeerId peer,
               const std::vector<std::string>& endpoints, Tick deadline) override;
  void SendControl(const LinkKey& link, const FrameHeader& header,
                   std::span<const uint8_t> payload) override;
  void SendControlInTime(const LinkKey& link, const FrameHeader& header,
                         std::span<const uint8_t> payload) override;
  void SendSegment(const LinkKey& link, const FrameHeader& header, const uint8_t* data,
                   uint64_t cookie, uint64_t owner) override;
  void WantDataLanes(const LinkKey& link) override;
  LinkUse BestUse(const LinkKey& link) const override;
  uint32_t LatencyUs(const LinkKey& link) const override;
  uint64_t StateBytes(const LinkKey& link) const override;
  void DetachReceives(const std::string& run, const ReceiveKey& key, uint64_t cookie) override;
  void DropSegments(FrameType type, const std::vector<uint64_t>& cookies) override;
  void BreakLink(const LinkKey& link, const std::string& reason) override;
  void AddMemory(const uint8_t* data, size_t bytes) override { memory_.Add(data, bytes); }
  void RemoveMemory(const uint8_t* data) override { memory_.Remove(data); }
  void SetDetectMs(uint32_t detect_ms) override;
  TransportStats GetStats() const override;
  std::vector<LinkStats> GetLinkStats() const override;
  std::vector<std::pair<LinkKey, LinkWait>> PopWaits() override;
  std::vector<std::pair<LinkKey, RateSample>> PopRates() override;
  HostSample PopArrivals() override;
  bool StartProbe(const LinkKey& key) override { return probing_.Start(key); }
  std::optional<LinkProbe> PopProbe() override { return probing_.PopResult(); }
  void Close() override;
  bool closed() const override;

 private:
  // LinkOwner
  void OnLinkEstablished(Link* link) override;
  void OnWantLanes(Link* link, bool optional, uint32_t lanes) override;
  absl::Status OnLinkFrame(Link* link, const FrameHeader& header,
                           std::span<const uint8_t> payload) override;
  void OnLinkSegmentsRepeated(uint64_t segments) override { stats_.segments_repeated += segments; }
  void OnLinkFramesRepeated(uint64_t frames) override { stats_.frames_repeated += frames; }
  void OnLinkLaneLost(Link* link, LaneKind kind, const std::string& reason) override;
  void OnLinkSmallPackets(Link* link) override;
  void OnLinkLaneBack(Link* link, const std::string& name) override;
  void OnLinkLaneCount(Link* link, uint32_t lanes, uint64_t rate) override;
  void OnHostLaneCount() override;
  void OnLinkDue(Link*, Tick at) override { alarm_.Set(at); }
  void OnLinkLaneRests(Link*) override { ++stats_.lane_rests; }
  void OnLinkLaneEnded(std::unique_ptr<Lane> lane) override;
  int FindBuffer(const uint8_t* data, size_t bytes) override { return memory_.Find(data, bytes); }
  void OnLinkSegmentsDropped(FrameType type, std::vector<uint64_t> cookies) override;
  void OnLinkClosing(Link*) override { alarm_.Set(ring_->Now()); }
  void OnLinkBroken(Link* link, const std::string& reason, bool protocol) override;
  void OnLinkEnded(Link* link) override;

  // DiallingOwner
  void OnControlDialled(Peering* p, LaneSocket socket, const LaneHello& hello,
                        const SocketAddress& remote) override {
    Adopt(p, std::move(socket), hello, remote, true);
  }
  void OnDataLaneDialled(Peering* p) override { Evaluate(p); }

  // AdmissionOwner
  bool HasRoomForProbe() const override { return probing_.HasRoom(); }
  void OnAdmitted(Peering* p, LaneSocket socket, const LaneHello& hello,
                  const SocketAddress& remote) override;

  void OnProbed(const LinkProbe& probe);
  void OnEventsRun();
  void Work(Tick due);
  Tick WorkPeering(Peering* p, Tick now);
  Tick StartWithFewer(Peering* p, Tick now);
  Tick WorkRetired(Tick now);

  // Returns the peering that has this link, or nullptr.
  Peering* PeeringOf(const Link* link);
  template <class F>
  void ForEachLink(F f);
  void AskForOptionalLanes(Link* link, uint32_t lanes);
  void Evaluate(Peering* p);
  void Announce(const LinkKey& key, uint64_t serial);
  void Expire(Peering* p, const std::vector<Request>& expired);
  std::string WhyNotUp(const Peering& p, const Request& request) const;
  void ReportDown(const Peering& p, const std::string& reason, int64_t silent_us = 0);
  void Adopt(Peering* p, LaneSocket socket, const LaneHello& hello, const SocketAddress& remote,
             bool dialled);
  void Retire(Peering* p);
  void RetireLink(Peering* p);
  void CancelDials(Peering* p, const char* why);
  ZeroCopyGate::Use UseZeroCopy(const SocketAddress& remote) const;

  TransportOptions options_;
  Ring* const ring_;
  TransportListener* const listener_;
  SegmentListeners segments_;
  bool closing_ = false;

  struct Retired {
    std::unique_ptr<Link> link;
    Tick abort_at;
  };
  HostPaths paths_;
  RunTable runs_;
  std::vector<Retired> retired_;
  EventQueue events_;
  Alarm alarm_;
  Resolver resolver_;
  Handshakes handshakes_;
  Dialling dialling_;
  Repair repair_;
  Probing probing_;
  Trying trying_;
  RefusedCallers refused_callers_;
  Tunnels tunnels_;
  Admission admission_;
  PinnedMemory memory_;

  TransportStats stats_;
  LaneStats gone_;  // of links that have ended
};

// ------------------------------------------------------------------------------ start and end

absl::Status TransportImpl::Start() {
  LH_RETURN_IF_ERROR(resolver_.Start());
  LH_ASSIGN_OR_RETURN(const HostPort host_port, ParseHostPort(options_.listen));
  SocketAddress address;
  if (const auto numeric = NumericAddress(host_port)) {
    address = *numeric;
  } else {
    LH_ASSIGN_OR_RETURN(const auto addresses, ResolveBlocking(host_port));
    address = addresses.front();
  }
  LH_RETURN_IF_ERROR(handshakes_.CheckCongestion(address.family()));
  if (options_.congestion.empty() && handshakes_.offers_cubic()) {
    paths_.ChooseCongestion(handshakes_.offers_bbr());
  }
  return admission_.Listen(address);
}

TransportImpl::~TransportImpl() {
  if (closed()) return;
  // The kernel may still write into lanes. Their memory stays until the process ends.
  for (auto& [name, run] : runs_.all()) {
    for (auto& [id, peer] : run.peers) (void)peer.link.release();
  }
  for (Retired& retired : retired_) (void)retired.link.release();
}

void TransportImpl::Close() {
  if (closing_) return;
  closing_ = true;
  admission_.Close();
  resolver_.Close();
  dialling_.Close();
  repair_.Close();
  memory_.Close();
  for (Retired& retired : retired_) {
    if (!retired.link->finishing()) retired.link->Abort();
  }
  handshakes_.FailAll("closing");
  probing_.Close();
  trying_.Close();
  tunnels_.Close();
  for (auto& [name, run] : runs_.all()) {
    for (auto& [id, peer] : run.peers) Retire(&peer);
  }
  runs_.all().clear();
  events_.Later([] {});
}

bool TransportImpl::closed() const {
  return closing_ && admission_.idle() && handshakes_.empty() && retired_.empty() &&
         events_.idle() && probing_.idle() && tunnels_.idle() && alarm_.idle() &&
         resolver_.closed();
}

// ------------------------------------------------------------------------------ time

void TransportImpl::OnEventsRun() {
  // There is nothing left to watch, so closed() does not have to wait for the timer.
  if (closing_ && retired_.empty() && handshakes_.empty() && tunnels_.idle()) alarm_.Stop();
}

void TransportImpl::Work(Tick due) {
  const Tick now = ring_->Now();
  // This process itself stood still (stopped, starved). This much silence says nothing about peers.
  const int64_t late = now - due;
  if (late > Millis(options_.detect_ms) / 2) {
    ForEachLink([late](Link* link) {
      if (link->alive()) link->ForgiveSilence(late);
    });
  }
  Tick next = std::min({handshakes_.Work(now), WorkRetired(now), probing_.Work(now),
                        tunnels_.Work(now), trying_.Work(now)});
  for (auto& [name, run] : runs_.all()) {
    for (auto& [id, peer] : run.peers) next = std::min(next, WorkPeering(&peer, now));
  }
  if (next != kNever) alarm_.Set(std::max(next, now + 1));
}

Tick TransportImpl::WorkRetired(Tick now) {
  Tick next = kNever;
  std::vector<Link*> late;
  for (Retired& retired : retired_) {
    if (retired.abort_at > now) {
      next = std::min(next, retired.abort_at);
    } else {
      late.push_back(retired.link.get());
      retired.abort_at = kNever;
    }
  }
  for (Link* link : late) link->Abort();
  return next;
}

Tick TransportImpl::WorkPeering(Peering* p, Tick now) {
  std::vector<Request> expired;
  for (const Request& r : p->requests) {
    if (r.deadline <= now && !p->announcing) expired.push_back(r);
  }
  if (!expired.empty()) {
    std::erase_if(p->requests, [now](const Request& r) { return r.deadline <= now; });
    Expire(p, expired);
  }
  Tick next = kNever;
  for (const Request& r : p->requests) next = std::min(next, r.deadline);
  if (p->link == nullptr) return std::min(next, dialling_.WorkControl(p, now));
  const std::string& error = p->link->has_control() ? p->data.error : p->repair.redial_error;
  next = std::min(next, p->link->Work(now, options_.detect_ms, error));
  if (p->link != nullptr) next = std::min(next, repair_.Work(p, now));
  if (p->link != nullptr) next = std::min(next, StartWithFewer(p, now));
  if (p->link != nullptr) next = std::min(next, dialling_.WorkData(p, now));
  return next;
}

// If some data lanes are up and others are late, the link starts with fewer. Returns when to call
// again.
Tick TransportImpl::StartWithFewer(Peering* p, Tick now) {
  if (!p->link->established() || !p->MissingLanesWanted()) return kNever;
  const auto wants =
      std::find_if(p->requests.begin(), p->requests.end(), [](const Request& r) { return r.data; });
  const Tick at = wants->started + Millis(options_.detect_ms);
  if (now < at) return at;
  if (p->link->data_lanes() == 0) return kNever;  // Evaluate() is called when one comes
  p->link->StartWithFewer();
  Evaluate(p);
  return kNever;
}

// ------------------------------------------------------------------------------ finding

Peering* TransportImpl::PeeringOf(const Link* link) {
  Peering* p = runs_.Find(link->key());
  return p != nullptr && p->link.get() == link ? p : nullptr;
}

template <class F>
void TransportImpl::ForEachLink(F f) {
  for (auto& [name, run] : runs_.all()) {
    for (auto& [id, peer] : run.peers) {
      if (peer.link != nullptr) f(peer.link.get());
    }
  }
  for (Retired& retired : retired_) f(retired.link.get());
}

// ------------------------------------------------------------------------------ links

void TransportImpl::OpenLinks(const std::string& run_name, uint32_t group, Epoch epoch,
                              const std::string& token, const std::vector<LinkRequest>& links,
                              Tick deadline) {
  if (closing_) return;
  Run& run = runs_.Get(run_name);
  run.tokens[group][epoch] = token;
  const Tick now = ring_->Now();
  for (const LinkRequest& link : links) {
    if (link.peer == options_.self || !link.peer) continue;
    Peering& p = runs_.GetPeering(&run, link.peer);
    p.data.one_lane = link.one_lane && (p.groups.empty() || p.data.one_lane);
    if (!p.data.one_lane) dialling_.PlanAll(&p);
    p.groups[group] = link.relay;
    p.public_key = link.public_key;
    runs_.SetEndpoints(&p, link.endpoints);
    if (p.control.dial != nullptr && !p.Wants(p.control.dial->relay())) {
      dialling_.CancelControl(&p, "the link is to go another way");
    }
    if (p.link != nullptr && !p.Wants(p.link->options().relay)) {
      if (p.link->was_open()) ReportDown(p, "the link is to go another way");
      RetireLink(&p);
    }
    std::erase_if(p.requests, [group](const Request& r) { return r.group == group; });
    Request request{.group = group,
                    .epoch = epoch,
                    .dial = link.dial,
                    .data = link.data,
                    .relay = link.relay,
                    .endpoints = link.endpoints,
                    .started = now,
                    .deadline = deadline};
    if (request.endpoints.size() > LH_ENDPOINTS_MAX) request.endpoints.resize(LH_ENDPOINTS_MAX);
    p.requests.push_back(std::move(request));
    p.last_error.clear();
    dialling_.BeginRequest(&p, now);
    Evaluate(&p);
  }
  alarm_.Set(now);
}

void TransportImpl::KeepLinks(const std::string& run_name, uint32_t group, Epoch epoch,
                              const std::vector<PeerId>& peers) {
  const auto found = runs_.all().find(run_name);
  if (found == runs_.all().end()) return;
  Run& run = found->second;
  auto& tokens = run.tokens[group];
  tokens.erase(tokens.begin(), tokens.lower_bound(epoch));
  if (tokens.empty()) run.tokens.erase(group);
  const std::set<PeerId> kept(peers.begin(), peers.end());
  for (auto it = run.peers.begin(); it != run.peers.end();) {
    Peering& p = it->second;
    if (kept.count(p.key.peer) != 0) {
      p.groups.try_emplace(group);
    } else {
      p.groups.erase(group);
      std::erase_if(p.requests, [group](const Request& r) { return r.group == group; });
    }
    if (p.needed()) {
      ++it;
      continue;
    }
    Retire(&p);
    it = runs_.Drop(&run, it);
  }
  if (run.peers.empty() && run.tokens.empty()) runs_.all().erase(found);
}

void TransportImpl::TryPeer(const GroupKey& group, uint64_t trial, PeerId peer,
                            const std::vector<std::string>& endpoints, Tick deadline) {
  if (closing_) return;
  trying_.Begin(peer, endpoints, deadline, [this, group, trial, peer](const std::string& error) {
    listener_->OnPeerTried(group, trial, peer, error);
  });
}

// Ends a peering. What is queued is still sent.
void TransportImpl::Retire(Peering* p) {
  dialling_.CancelControl(p, "not needed any more");
  if (p->link != nullptr) RetireLink(p);
}

void TransportImpl::RetireLink(Peering* p) {
  CancelDials(p, "not needed any more");
  p->data.peer_wants = false;
  p->data.want_sent = false;
  Link* link = p->link.get();
  const Tick abort_at = ring_->Now() + Millis(options_.detect_ms);
  retired_.push_back({std::move(p->link), abort_at});
  if (link->established()) {
    link->Finish();
  } else {
    link->Abort();
  }
  alarm_.Set(abort_at);
}

// Called when something about the link has changed. If lanes are missing, has them dialled, or asks
// the peer to dial them. Otherwise plans to tell the listener that the link is up.
void TransportImpl::Evaluate(Peering* p) {
  if (p->link == nullptr || !p->link->alive() || !p->link->established()) return;
  if (p->MissingLanesWanted()) {
    alarm_.Set(ring_->Now());  // dials the lanes that we have to dial
    if (!p->link->options().dialled && !p->data.want_sent) {
      p->data.want_sent = true;
      const auto wants = std::find_if(p->requests.begin(), p->requests.end(),
                                      [](const Request& r) { return r.data; });
      FrameHeader want{.type = FrameType::kWantLanes};
      want.group = wants->group;
      want.attempt = wants->epoch;
      p->link->SendControl(want, {});
    }
    return;
  }
  if (p->requests.empty() || p->announcing) return;
  p->announcing = true;
  events_.Later([this, key = p->key, serial = p->serial] { Announce(key, serial); });
}

void TransportImpl::Announce(const LinkKey& key, uint64_t serial) {
  Peering* p = runs_.FindSerial(key, serial);
  if (p == nullptr) return;
  p->announcing = false;
  if (p->link == nullptr || !p->link->alive() || !p->link->established()) return;
  if (p->requests.empty() || p->MissingLanesWanted()) return;
  p->requests.clear();
  p->last_error.clear();
  dialling_.CancelControl(p, "the link stands");
  Link* link = p->link.get();
  const bool news = !link->open();
  link->MarkOpen();
  if (news) {
    Log(LogLevel::kInfo,
        absl::StrCat("link up peer=", ToString(key.peer), " run=", key.run,
                     " address=", ToString(link->options().remote),
                     " dialled=", link->options().dialled ? "here" : "there",
                     " data_lanes=", link->data_lanes()) +
            (link->options().relay ? absl::StrCat(" relay=", ToString(link->options().relay))
                                   : ""));
  }
  listener_->OnLinkUp(key);
  link->Deliver();
}

void TransportImpl::OnLinkEstablished(Link* link) {
  Peering* p = PeeringOf(link);
  if (p == nullptr) return;
  p->control.backoff.Reset(ring_->Now());
  Evaluate(p);
}

void TransportImpl::OnWantLanes(Link* link, bool optional, uint32_t lanes) {
  Peering* p = PeeringOf(link);
  if (p == nullptr) return;
  if (link->data_were_complete() && lanes != 0) return dialling_.Plan(p, lanes);
  const Tick until = ring_->Now() + 2 * Millis(options_.detect_ms);
  if (optional) {
    p->data.optional_until = until;
  } else {
    p->data.peer_wants = true;
    p->data.peer_wants_until = until;
  }
  p->data.backoff.Reset(ring_->Now());
  alarm_.Set(ring_->Now());
}

absl::Status TransportImpl::OnLinkFrame(Link* link, const FrameHeader& header,
                                        std::span<const uint8_t> payload) {
  return listener_->OnControlFrame(link->key(), header, payload);
}

void TransportImpl::OnLinkLaneLost(Link* link, LaneKind kind, const std::string& reason) {
  Peering* p = PeeringOf(link);
  LH_CHECK(p != nullptr);
  ++stats_.lanes_lost;
  repair_.OnLaneLost(p, kind, reason);
}

void TransportImpl::OnLinkSmallPackets(Link* link) {
  ++stats_.links_small_packets;
  Log(LogLevel::kWarning,
      absl::StrCat("large packets vanish peer=", ToString(link->key().peer),
                   " run=", link->key().run, " remote=", ToString(link->options().remote)) +
          LogField("why",
                   "lanes die with their first large packets while PINGs come through; "
                   "lanes use small packets from now on; check the MTU of the path, and "
                   "that ICMP \"fragmentation needed\" is let through"));
}

void TransportImpl::OnLinkLaneBack(Link* link, const std::string& name) {
  Peering* p = PeeringOf(link);
  LH_CHECK(p != nullptr);
  ++stats_.lanes_redialled;
  repair_.OnLaneBack(p, name);
}

void TransportImpl::OnLinkLaneCount(Link* link, uint32_t lanes, uint64_t rate) {
  Log(LogLevel::kInfo,
      absl::StrCat("data lanes peer=", ToString(link->key().peer), " run=", link->key().run,
                   " used=", lanes, " before_mbit_per_s=", rate * 8 / 1000000));
  if (lanes <= link->data_lanes_announced()) return;
  events_.Later([this, key = link->key(), id = link->options().id, lanes] {
    Peering* p = runs_.Find(key);
    if (p == nullptr || p->link == nullptr || p->link->options().id != id) return;
    if (p->link->options().dialled) return dialling_.Plan(p, lanes);
    AskForOptionalLanes(p->link.get(), lanes);
  });
}

void TransportImpl::OnHostLaneCount() {
  const HostLanes& lanes = paths_.lanes();
  Log(LogLevel::kInfo, absl::StrCat("data lanes of all busy links links=", lanes.links(),
                                    " used_by_each=", lanes.lanes(),
                                    " before_mbit_per_s=", lanes.rate() * 8 / 1000000));
}

// Asks the side that dials for data lanes. 0: as many as it chooses.
void TransportImpl::AskForOptionalLanes(Link* link, uint32_t lanes) {
  FrameHeader want{.type = FrameType::kWantLanes, .flags = kFlagOptional};
  want.group = link->options().group;
  want.attempt = link->options().epoch;
  want.offset = lanes;
  link->SendControl(want, {});
}

void TransportImpl::OnLinkLaneEnded(std::unique_ptr<Lane> lane) {
  events_.DestroyLater(std::move(lane));
}

void TransportImpl::OnLinkSegmentsDropped(FrameType type, std::vector<uint64_t> cookies) {
  events_.Later([this, type, cookies = std::move(cookies)] {
    for (const uint64_t cookie : cookies) segments_.Of(type)->OnSegmentSent(cookie);
  });
}

void TransportImpl::OnLinkBroken(Link* link, const std::string& reason, bool protocol) {
  if (protocol) ++stats_.frames_refused;
  Peering* p = PeeringOf(link);
  LH_CHECK(p != nullptr) << "a link that nobody has broke";
  const Tick abort_at = ring_->Now() + Millis(options_.detect_ms);
  retired_.push_back({std::move(p->link), abort_at});
  alarm_.Set(abort_at);
  CancelDials(p, "the link broke");
  p->data.peer_wants = false;
  p->data.want_sent = false;
  p->last_error = reason;
  const Tick now = ring_->Now();
  p->control.backoff.Failed(now);
  alarm_.Set(p->control.backoff.next);
  if (!link->was_open()) return;
  ++stats_.links_lost;
  Log(LogLevel::kInfo, absl::StrCat("link down peer=", ToString(p->key.peer), " run=", p->key.run) +
                           LogField("reason", reason));
  const int64_t silent_us = now - link->last_heard();
  ReportDown(*p, reason,
             link->given_up_there() ? std::max(silent_us, Millis(options_.detect_ms)) : silent_us);
}

void TransportImpl::OnLinkEnded(Link* link) {
  const auto it = std::find_if(retired_.begin(), retired_.end(),
                               [link](const Retired& r) { return r.link.get() == link; });
  LH_CHECK(it != retired_.end());
  gone_.Add(link->stats());
  events_.DestroyLater(std::move(it->link));
  retired_.erase(it);
}

void TransportImpl::ReportDown(const Peering& p, const std::string& reason, int64_t silent_us) {
  const uint32_t silent_ms =
      silent_us < Millis(options_.detect_ms) ? 0 : static_cast<uint32_t>(silent_us / 1000);
  events_.Later([this, key = p.key, serial = p.serial, reason, silent_ms] {
    if (runs_.FindSerial(key, serial) != nullptr) listener_->OnLinkDown(key, reason, silent_ms);
  });
}

void TransportImpl::Expire(Peering* p, const std::vector<Request>& expired) {
  const std::string reason = WhyNotUp(*p, expired.back());
  if (Dialling::NextRequest(*p) == nullptr) dialling_.CancelControl(p, "no time left");
  bool told = false;
  if (p->link != nullptr) {
    told = p->link->was_open();
    p->link->Break(reason);
  }
  if (told) return;  // OnLinkBroken() has told the listener
  Log(LogLevel::kInfo,
      absl::StrCat("link not built peer=", ToString(p->key.peer), " run=", p->key.run) +
          LogField("reason", reason));
  ReportDown(*p, reason);
}

std::string TransportImpl::WhyNotUp(const Peering& p, const Request& request) const {
  const int64_t ms = (request.deadline - request.started + 500) / 1000;
  if (p.link != nullptr && p.link->established()) {
    const uint32_t want =
        p.link->options().dialled ? p.data.planned : p.link->data_lanes_announced();
    return absl::StrCat(p.link->data_lanes(), " of ", want, " data lanes to ",
                        ToString(p.link->options().remote), " stood after ", ms, " ms",
                        p.data.error.empty() ? "" : ": ", p.data.error);
  }
  if (!p.last_error.empty()) return p.last_error;
  if (const LaneDial* dial = p.control.dial; dial != nullptr) {
    return absl::StrCat(dial->connected() ? "handshake with " : "connect to ",
                        ToString(dial->address()), ": no answer in ", ms, " ms");
  }
  if (!request.dial) {
    return absl::StrCat("peer ", ToString(p.key.peer), " did not connect to ", listen_address(),
                        " within ", ms, " ms");
  }
  return absl::StrCat("connect to ", request.endpoints.empty() ? "?" : request.endpoints.front(),
                      ": no answer in ", ms, " ms");
}

// A new control lane has passed its handshake. Makes it the link of the peering.
void TransportImpl::Adopt(Peering* p, LaneSocket socket, const LaneHello& hello,
                          const SocketAddress& remote, bool dialled) {
  LinkOptions options{.key = p->key,
                      .segments = segments_,
                      .id = NewLinkId(hello),
                      .remote = remote,
                      .relay = hello.relay,
                      .dialled = dialled,
                      .group = hello.group,
                      .epoch = hello.epoch,
                      .zero_copy = UseZeroCopy(remote),
                      .count_lanes = options_.lanes == 0,
                      .paths = &paths_,
                      .congestion = paths_.congestion(),
                      .probed_rate = p->probed_rate,
                      .sealed_bytes_max = options_.sealed_bytes_max};
  const std::optional<TcpDelivery> measured = ring_->sockets().Delivery(socket.fd);
  const Tick now = ring_->Now();
  runs_.SetLinked(p, remote);
  dialling_.BeginLink(p, remote, measured ? measured->rtt_us : 0, now);
  repair_.Begin(p, now);
  p->link = std::make_unique<Link>(ring_, std::move(socket), std::move(options), this);
  Evaluate(p);
  alarm_.Set(now);
}

void TransportImpl::CancelDials(Peering* p, const char* why) {
  repair_.Cancel(p, why);
  dialling_.CancelData(p, why);
}

void TransportImpl::OnAdmitted(Peering* p, LaneSocket socket, const LaneHello& hello,
                               const SocketAddress& remote) {
  if (hello.kind == LaneKind::kProbe) return probing_.Adopt(socket.fd);
  if (hello.kind == LaneKind::kData) {
    p->link->AddDataLane(socket.fd, hello.lane, hello.lanes, hello.serial);
    Evaluate(p);
    return;
  }
  if (hello.link != 0) {
    p->link->ResumeControl(std::move(socket), hello.serial);
    alarm_.Set(ring_->Now());
    return;
  }
  if (p->link != nullptr) p->link->Break("replaced by a new connection of the peer");
  dialling_.CancelControl(p, "the peer has dialled us");
  Adopt(p, std::move(socket), hello, remote, false);
}

void TransportImpl::OnProbed(const LinkProbe& probe) {
  Peering* p = runs_.Find(probe.link);
  if (p == nullptr || !probe.error.empty()) return;
  p->probed_rate = probe.rate.bytes_per_second;
  if (p->link != nullptr) p->link->Probed(p->probed_rate);
}

// ------------------------------------------------------------------------------ traffic

void TransportImpl::BreakLink(const LinkKey& key, const std::string& reason) {
  if (Link* link = runs_.FindOpen(key)) link->Break(reason, true);
}

void TransportImpl::SendControl(const LinkKey& key, const FrameHeader& header,
                                std::span<const uint8_t> payload) {
  if (Link* link = runs_.FindOpen(key)) link->SendControl(header, payload);
}

void TransportImpl::SendControlInTime(const LinkKey& key, const FrameHeader& header,
                                      std::span<const uint8_t> payload) {
  if (Link* link = runs_.FindOpen(key)) link->SendControl(header, payload, /*may_wait=*/true);
}

void TransportImpl::SendSegment(const LinkKey& key, const FrameHeader& header, const uint8_t* data,
                                uint64_t cookie, uint64_t owner) {
  if (Link* link = runs_.FindOpen(key)) {
    link->SendSegment({.header = header, .data = data, .cookie = cookie, .owner = owner});
  } else {
    OnLinkSegmentsDropped(header.type, {cookie});
  }
}

void TransportImpl::DropSegments(FrameType type, const std::vector<uint64_t>& cookies) {
  const std::unordered_set<uint64_t> wanted(cookies.begin(), cookies.end());
  ForEachLink([&](Link* link) { link->DropSegments(type, wanted); });
}

void TransportImpl::WantDataLanes(const LinkKey& key) {
  Link* link = runs_.FindOpen(key);
  if (link == nullptr || link->closing() || link->data_lanes() > 0 || link->data_were_complete()) {
    return;
  }
  Peering* p = runs_.Find(key);
  const Tick now = ring_->Now();
  if (p->data.optional_until > now) return;  // the lanes are being built
  p->data.optional_until = now + 2 * Millis(options_.detect_ms);
  if (link->options().dialled) {
    p->data.backoff.Reset(now);
    alarm_.Set(now);
    return;
  }
  AskForOptionalLanes(link, 0);
}

LinkUse TransportImpl::BestUse(const LinkKey& key) const {
  const Link* link = runs_.FindLink(key);
  return link == nullptr ? LinkUse{} : link->BestUse();
}

uint32_t TransportImpl::LatencyUs(const LinkKey& key) const {
  const Link* link = runs_.FindLink(key);
  return link == nullptr ? 0 : link->latency_us();
}

uint64_t TransportImpl::StateBytes(const LinkKey& key) const {
  const Link* link = runs_.FindLink(key);
  return link == nullptr ? 0 : link->stats().state_bytes;
}

void TransportImpl::DetachReceives(const std::string& run, const ReceiveKey& key, uint64_t cookie) {
  // Begins with one more than there are receives, so that it cannot reach zero before all are
  // counted.
  const auto left = std::make_shared<int>(1);
  SegmentListener* const listener = segments_.Of(key.type);
  const std::function<void()> done = [this, left, listener, cookie] {
    if (--*left == 0) events_.Later([listener, cookie] { listener->OnReceivesDetached(cookie); });
  };
  ForEachLink([&](Link* link) {
    if (link->key().run == run) *left += link->Detach(key, done);
  });
  done();
}

ZeroCopyGate::Use TransportImpl::UseZeroCopy(const SocketAddress& remote) const {
  using Use = ZeroCopyGate::Use;
  if (!ring_->features().send_zero_copy) return Use::kNever;
  switch (options_.zero_copy) {
    case TransportOptions::ZeroCopy::kOn:
      return Use::kAlways;
    case TransportOptions::ZeroCopy::kOff:
      return Use::kNever;
    case TransportOptions::ZeroCopy::kAuto:
      // On loopback the kernel copies all the same, at a higher price.
      return remote.loopback() ? Use::kNever : Use::kWhereOfUse;
  }
  return Use::kNever;
}

// ------------------------------------------------------------------------------ numbers

void TransportImpl::SetDetectMs(uint32_t detect_ms) {
  if (detect_ms == 0 || detect_ms == options_.detect_ms) return;
  options_.detect_ms = detect_ms;
  ForEachLink([this](Link* link) {
    if (link->alive()) link->Tune(handshakes_.TuningFor(link->options().remote));
  });
  alarm_.Set(ring_->Now());
}

TransportStats TransportImpl::GetStats() const {
  TransportStats stats = stats_;
  LaneStats sum = gone_;
  for (const auto& [name, run] : runs_.all()) {
    for (const auto& [id, peer] : run.peers) {
      if (peer.link == nullptr) continue;
      sum.Add(peer.link->stats());
      if (peer.link->open()) ++stats.links_up;
      stats.lanes_up += peer.link->lanes();
      stats.lanes_used += peer.link->lanes_used();
      stats.segments_unacked += peer.link->unacked();
    }
  }
  for (const Retired& retired : retired_) sum.Add(retired.link->stats());
  stats.connections_accepted = admission_.accepted();
  stats.callers_refused = refused_callers_.counts();
  stats.handshakes_refused = Sum(stats.callers_refused);
  stats.handshakes_untrusted = stats.callers_refused[static_cast<size_t>(CallerRefusal::kKey)];
  stats.probes = probing_.probes();
  stats.probes_failed = probing_.failed();
  stats.probe_bytes = probing_.bytes();
  stats.pace = paths_.pace();
  stats.tunnels = tunnels_.count();
  stats.bytes_carried = tunnels_.bytes();
  stats.bytes_sent = sum.bytes_sent;
  stats.bytes_received = sum.bytes_received;
  stats.bytes_discarded = sum.bytes_discarded;
  stats.bytes_taken = sum.bytes_taken;
  stats.zero_copy_copied = sum.zero_copy_copied;
  stats.unauthentic = sum.unauthentic;
  return stats;
}

std::vector<LinkStats> TransportImpl::GetLinkStats() const {
  std::vector<LinkStats> result;
  for (const auto& [name, run] : runs_.all()) {
    for (const auto& [id, peer] : run.peers) {
      if (peer.link == nullptr || !peer.link->open()) continue;
      const LaneStats s = peer.link->stats();
      result.push_back({.link = peer.key,
                        .relay = peer.link->options().relay,
                        .lanes = peer.link->lanes(),
                        .lanes_used = peer.link->lanes_used(),
                        .small_packets = peer.link->small_packets(),
                        .sealed = peer.link->sealed(),
                        .rtt_us = peer.link->rtt_us(),
                        .shortest_rtt_us = peer.link->shortest_rtt_us(),
                        .bytes_sent = s.bytes_sent,
                        .bytes_received = s.bytes_received});
    }
  }
  return result;
}

std::vector<std::pair<LinkKey, RateSample>> TransportImpl::PopRates() {
  std::vector<std::pair<LinkKey, RateSample>> result;
  for (const auto& [name, run] : runs_.all()) {
    for (const auto& [id, peer] : run.peers) {
      // TCP sees only the path to the relay.
      if (peer.link == nullptr || !peer.link->open() || peer.link->options().relay) continue;
      const RateSample rate = peer.link->PopRate();
      if (peer.link->long_way()) paths_.Carried(rate);
      if (rate.bytes_per_second != 0 || rate.bytes_repeated != 0)
        result.emplace_back(peer.key, rate);
    }
  }
  const HostPaths::News news = paths_.MeasureRates(ring_->Now());
  if (news.lanes_changed) OnHostLaneCount();
  if (!news.congestion_changed) return result;
  ForEachLink([this](Link* link) {
    if (link->alive()) link->SetCongestion(paths_.congestion());
  });
  return result;
}

HostSample TransportImpl::PopArrivals() {
  const Tick now = ring_->Now();
  std::vector<HostSample::Waiting> waiting;
  size_t links = 0;
  for (const auto& [name, run] : runs_.all()) {
    for (const auto& [id, peer] : run.peers) {
      if (peer.link == nullptr || !peer.link->open()) continue;
      paths_.Arrived(peer.link->PopSample());
      ++links;
      const int64_t us = peer.link->waiting_us();
      if (us == 0) continue;
      const int64_t rtt_us = std::clamp<int64_t>(peer.link->rtt_us(), 0, UINT32_MAX);
      waiting.push_back({peer.key.peer, us, static_cast<uint32_t>(rtt_us)});
    }
  }
  HostSample result = paths_.Measure(now);
  result.waiting = std::move(waiting);
  result.links = links;
  return result;
}

std::vector<std::pair<LinkKey, LinkWait>> TransportImpl::PopWaits() {
  std::vector<std::pair<LinkKey, LinkWait>> result;
  for (const auto& [name, run] : runs_.all()) {
    std::optional<std::pair<LinkKey, LinkWait>> worst;
    for (const auto& [id, peer] : run.peers) {
      if (peer.link == nullptr || !peer.link->open()) continue;
      const LinkWait wait = peer.link->PopWait(ring_->Now());
      if (wait.us > (worst ? worst->second.us : 0)) worst = {peer.key, wait};
    }
    if (worst) result.push_back(*std::move(worst));
  }
  return result;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> MakeTransport(TransportOptions options, Ring* ring,
                                                         TransportListener* listener) {
  auto transport = std::make_unique<TransportImpl>(std::move(options), ring, listener);
  LH_RETURN_IF_ERROR(transport->Start());
  return transport;
}

}  // namespace longhaul::peerd
