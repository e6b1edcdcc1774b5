#include "peerd/transport/transport.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "peerd/transport/auth.h"
#include "peerd/transport/callers.h"
#include "peerd/transport/lane_handshake.h"
#include "peerd/transport/link.h"
#include "peerd/transport/probe_stream.h"
#include "peerd/transport/rate_meter.h"
#include "peerd/transport/resolver.h"

namespace longhaul::peerd {
namespace {

// Data lanes where the options leave it open: one stream hardly fills a fast path, and on a lossy
// one it is a fraction of it.
constexpr uint32_t kLanesLoopback = 2;
constexpr uint32_t kLanesElsewhere = 4;
constexpr int64_t kBackoffMinUs = Millis(5);
constexpr int64_t kBackoffMaxUs = Millis(200);
// A connection attempt gets at least this when there are other addresses to try.
constexpr int64_t kAttemptMinUs = Millis(50);
// Attempts to connect within detect_ms where a lane is lost, on a path of usual length.
constexpr int64_t kConnectsPerDetect = 6;
// Data lanes of one link whose handshakes run at once: all peers together stay below the acceptor's
// bound on unfinished handshakes.
constexpr int kDataDialsMax = 32;
// Lanes of one peer that are lost at longer intervals than this are dialled again at once.
constexpr int64_t kLossApartUs = Seconds(1);
// Lost lanes of one peer that are logged in that time; the others are counted.
constexpr int kLossesLogged = 4;
// While callers are turned away, it is logged this often.
constexpr int64_t kCrowdedLogUs = Seconds(60);
// After a failed accept (too many open files): others may close some meanwhile.
constexpr int64_t kAcceptPauseUs = Millis(50);
// Connections of others' probes at one time; more are told to come later.
constexpr size_t kProbeSinksMax = 128;
// What one of them may bring, and for how long.
constexpr uint64_t kProbeSinkBytesMax = 2 * kProbeBytesMax;
constexpr int64_t kProbeSinkUsMax = 4 * kProbeUsMax;
// How often is looked at what has arrived.
constexpr int64_t kProbeLookUs = Millis(20);
// Arena memory that is pinned, or released, in one turn of the ring: about a millisecond.
constexpr size_t kPinBytes = size_t{4} << 20;

struct Request {
  uint32_t group = 0;
  Epoch epoch;
  bool dial = false;
  bool data = false;
  std::vector<std::string> endpoints;
  Tick started;
  Tick deadline;
};

struct Backoff {
  Tick next;
  int64_t us = kBackoffMinUs;
  void Failed(Tick now) {
    next = now + us;
    us = std::min(us * 2, kBackoffMaxUs);
  }
  void Reset(Tick now) { *this = Backoff{.next = now}; }
};

// What we know of one peer in one run, linked or not.
struct Peering {
  LinkKey key;
  uint64_t serial = 0;  // tells it from an earlier one of the same key
  std::set<uint32_t> groups;
  std::vector<Request> requests;
  std::unique_ptr<Link> link;  // alive, or none
  bool announcing = false;     // OnLinkUp is queued

  // The control lane, where we dial.
  LaneDial* dial = nullptr;
  std::deque<SocketAddress> candidates;
  int resolving = 0;
  Backoff backoff;
  size_t attempts = 0;
  Tick gone_since = kNever;  // from then on each address said that the peer is not there
  std::string last_error;

  // The data lanes. `planned`: how many, if we dial them.
  uint32_t planned = 0;
  bool peer_wants_lanes = false;
  bool want_lanes_sent = false;
  Tick peer_wants_until;
  // Data lanes that the link can do without: dialled until then, or asked of the peer until then.
  Tick optional_until;
  std::vector<LaneDial*> data_dials;
  Backoff data_backoff;
  std::string data_error;

  // Repair of a link that stands.
  LaneDial* redial = nullptr;  // of the control lane
  Backoff redial_backoff;
  std::string redial_error;
  size_t token_attempts = 0;
  // While the control lane is lost and the other side dials: is anybody there?
  std::vector<std::string> endpoints;  // of the peer, as told last
  std::vector<AddressBlock> blocks;    // of those that are numeric
  std::optional<AddressBlock> linked;  // of the last link
  int knocks = 0;                      // under way, names being resolved included
  int knocks_refused = 0;              // in this round
  int knocks_other = 0;
  std::string knock_refused;  // by that address
  Backoff knock_backoff;
  Tick losses_since;
  int losses = 0;  // since then

  bool needed() const { return !groups.empty() || !requests.empty(); }
  // The request to dial for next, one after the other: the other side may know of one epoch and not
  // yet of another.
  const Request* dialling() const {
    std::vector<const Request*> dials;
    for (const Request& r : requests) {
      if (r.dial) dials.push_back(&r);
    }
    return dials.empty() ? nullptr : dials[dials.size() - 1 - attempts % dials.size()];
  }
  bool data_wanted() const {
    return std::any_of(requests.begin(), requests.end(), [](const Request& r) { return r.data; });
  }
};

// The probe that is under way.
struct Probing {
  LinkProbe result;
  std::set<LaneDial*> dials;
  std::vector<ProbeStream*> streams;  // that have not ended
  TcpDelivery gone;                   // of those that have
  uint32_t connections = 0;           // planned
  uint32_t started = 0;               // streams
  Tick first;                         // of those
  uint64_t acked = 0;
  // Of the link's own traffic meanwhile, which takes a part of what the link carries.
  uint64_t link_arrived = 0;
  uint64_t link_arrived_before = 0;
  RateMeter meter;
};

void AddBytes(const TcpDelivery& from, TcpDelivery* sum) {
  sum->bytes_acked += from.bytes_acked;
  sum->bytes_arrived += from.bytes_arrived;
  sum->bytes_sent += from.bytes_sent;
  sum->bytes_repeated += from.bytes_repeated;
}

struct Run {
  std::string name;
  Digest32 digest;
  std::map<uint32_t, std::map<Epoch, std::string>> tokens;
  std::map<PeerId, Peering> peers;
};

class TransportImpl final : public Transport, public LinkOwner {
 public:
  TransportImpl(TransportOptions options, Ring* ring, TransportListener* listener)
      : options_(std::move(options)),
        ring_(ring),
        listener_(listener),
        nonces_(options_.seed),
        resolver_(ring) {}
  ~TransportImpl() override;

  absl::Status Start();

  std::string listen_address() const override { return listen_address_; }
  void OpenLinks(const std::string& run, uint32_t group, Epoch epoch, const std::string& token,
                 const std::vector<LinkRequest>& links, Tick deadline) override;
  void KeepLinks(const std::string& run, uint32_t group, Epoch epoch,
                 const std::vector<PeerId>& peers) override;
  void SendControl(const LinkKey& link, const FrameHeader& header,
                   std::span<const uint8_t> payload) override;
  void SendControlInTime(const LinkKey& link, const FrameHeader& header,
                         std::span<const uint8_t> payload) override;
  void SendSegment(const LinkKey& link, const FrameHeader& header, const uint8_t* data,
                   uint64_t cookie, uint64_t owner) override;
  void WantDataLanes(const LinkKey& link) override;
  LinkUse BestUse(const LinkKey& link) const override;
  uint64_t StateBytes(const LinkKey& link) const override;
  void ForgetSegments(uint64_t owner) override;
  void DetachReceives(const std::string& run, const ReceiveKey& key, uint64_t cookie) override;
  void DropSegments(const std::vector<uint64_t>& cookies) override;
  void BreakLink(const LinkKey& link, const std::string& reason) override;
  void AddMemory(const uint8_t* data, size_t bytes) override;
  void RemoveMemory(const uint8_t* data) override;
  void SetDetectMs(uint32_t detect_ms) override;
  TransportStats GetStats() const override;
  std::vector<LinkStats> GetLinkStats() const override;
  std::vector<LinkDelivery> TakeDeliveries() override;
  bool StartProbe(const LinkKey& key) override;
  std::optional<LinkProbe> TakeProbe() override;
  void Close() override;
  bool closed() const override;

 private:
  struct Memory {
    size_t bytes = 0;
    std::vector<int> buffers;  // of each kPinBytes from the start on; -1: not pinned
    bool refused = false;      // the system lets us pin no more
  };

  // LinkOwner
  void OnLinkEstablished(Link* link) override;
  void OnWantLanes(Link* link, bool optional, uint32_t lanes) override;
  absl::Status OnLinkFrame(Link* link, const FrameHeader& header,
                           std::span<const uint8_t> payload) override;
  absl::StatusOr<uint8_t*> OnLinkData(Link* link, const FrameHeader& header) override;
  absl::Status OnLinkDataReceived(Link* link, const FrameHeader& header) override;
  void OnLinkDataAbandoned(Link* link, const FrameHeader& header) override;
  uint64_t OnLinkSegmentRepeat(uint64_t owner) override;
  void OnLinkFramesRepeated(uint64_t frames) override { stats_.frames_repeated += frames; }
  void OnLinkLaneLost(Link* link, LaneKind kind, const std::string& reason) override;
  void OnLinkLaneBack(Link* link, const std::string& name) override;
  void OnLinkLaneCount(Link* link, uint32_t lanes, uint64_t rate) override;
  void OnLinkDue(Link*, Tick at) override { Arm(at); }
  void OnLinkLaneRests(Link*) override { ++stats_.lane_rests; }
  void OnLinkLaneEnded(std::unique_ptr<Lane> lane) override;
  int FindBuffer(const uint8_t* data, size_t bytes) override;
  void OnLinkSegmentSent(uint64_t cookie) override { listener_->OnSegmentSent(cookie); }
  void OnLinkSegmentsDropped(std::vector<uint64_t> cookies) override;
  void OnLinkClosing(Link*) override { Arm(ring_->Now()); }
  void OnLinkBroken(Link* link, const std::string& reason, bool protocol) override;
  void OnLinkEnded(Link* link) override;

  // Things to do from within the ring, in order.
  void Later(absl::AnyInvocable<void()> event);
  void RunEvents();
  // Work() at this tick or before.
  void Arm(Tick at);
  void Work();
  Tick WorkPeering(Peering* p, Tick now);
  Tick StartWithFewer(Peering* p, Tick now);
  Tick WorkHandshakes(Tick now);
  Tick WorkRetired(Tick now);
  Tick WorkProbes(Tick now);

  Peering* Find(const LinkKey& key);
  Peering* FindSerial(const LinkKey& key, uint64_t serial);
  Link* FindOpen(const LinkKey& key);
  template <class F>
  void ForEachLink(F f);
  const std::string* FindToken(const Run& run, uint32_t group, Epoch epoch) const;
  Run* FindRun(const Digest32& digest);
  absl::Status CheckCongestion(int family);
  StreamTuning TuningFor(const SocketAddress& remote) const;
  uint32_t PlannedLanes(const SocketAddress& address, int64_t rtt_us) const;
  void PlanLanes(Peering* p, uint32_t lanes);
  void AskForOptionalLanes(Link* link, uint32_t lanes);

  void SetEndpoints(Peering* p, const std::vector<std::string>& endpoints);
  void Evaluate(Peering* p);
  void Announce(const LinkKey& key, uint64_t serial);
  void Expire(Peering* p, const std::vector<Request>& expired);
  std::string WhyNotUp(const Peering& p, const Request& request) const;
  void ReportDown(const Peering& p, const std::string& reason, int64_t silent_us = 0);
  void Adopt(Peering* p, int fd, const LaneHello& hello, const SocketAddress& remote, bool dialled);
  void Retire(Peering* p);
  void CancelDials(Peering* p, const char* why);

  void DialControl(Peering* p, const Request& request, Tick now);
  void StartRound(Peering* p, const Request& request);
  void StartControlDial(Peering* p, const Request& request, Tick now);
  void DialData(Peering* p, Tick now);
  Tick RepairControl(Peering* p, Tick now);
  void Redial(Peering* p, Tick now);
  void OnRedialled(const LinkKey& key, LaneHandshake* handshake);
  void Knock(Peering* p, Tick now);
  void KnockAt(Peering* p, const SocketAddress& address);
  void OnKnocked(const LinkKey& key, uint64_t serial, LaneHandshake* handshake);
  void OnKnockOver(Peering* p);
  bool FindAnyToken(const Peering& p, uint32_t* group, Epoch* epoch, std::string* token) const;
  void TryNextToken(Peering* p, const LaneDial& dial) const;
  bool MissingLanesWanted(const Peering& p) const;
  Tick ReconnectBy(const Link& link, Tick now) const;
  // A lane broke, and now nobody listens where the peer did, or somebody else.
  void BreakGone(Peering* p, const LaneDial& dial);
  void BreakRefused(Peering* p, const std::string& address);
  void OnControlDialled(const LinkKey& key, LaneHandshake* handshake);
  void OnDataDialled(const LinkKey& key, uint32_t lane, LaneHandshake* handshake);
  template <class T>
  T* Keep(std::unique_ptr<T> handshake);
  std::unique_ptr<LaneHandshake> Release(LaneHandshake* handshake);

  void OnProbeDialled(LaneHandshake* handshake);
  void AddProbeStream(int fd, bool sends);
  void OnProbeStreamEnded(ProbeStream* stream);
  void SumUp(Tick now);
  std::optional<SocketAddress> DataAddress(const Peering& p) const;
  void EndProbe(std::string error);

  void AcceptNext();
  void OnAccepted(int value);
  LaneVerdict Judge(const LaneHello& hello);
  LaneResult JudgeControl(const Peering& p, const LaneHello& hello) const;
  bool PeerIsKnownAt(const AddressBlock& block);
  void MakeRoom();
  void OnHandshakeAccepted(uint64_t caller, LaneHandshake* handshake);

  int Pin(const uint8_t* data, Memory* memory, size_t piece);
  void UnpinNext();
  bool UseZeroCopy(const SocketAddress& remote) const;

  TransportOptions options_;
  Ring* const ring_;
  TransportListener* const listener_;
  NonceSource nonces_;
  Resolver resolver_;
  std::string loopback_congestion_;
  std::string listen_address_;
  int listen_fd_ = -1;
  IoId accept_ = 0;
  bool closing_ = false;

  std::map<std::string, Run> runs_;
  uint64_t next_serial_ = 1;
  std::map<LaneHandshake*, std::unique_ptr<LaneHandshake>> handshakes_;
  Callers callers_;
  std::map<uint64_t, LaneAccept*> accepting_;  // those
  size_t accepts_ = 0;                         // those and the ones that are ending
  std::set<AddressBlock> known_blocks_;        // of all peers
  bool known_blocks_stale_ = false;
  Tick crowded_log_at_;
  uint64_t turned_away_ = 0;  // since the last log
  struct Retired {
    std::unique_ptr<Link> link;
    Tick abort_at;
  };
  std::vector<Retired> retired_;
  std::optional<Probing> probing_;
  std::optional<LinkProbe> probed_;
  // Of our probe and of those of others.
  std::map<ProbeStream*, std::unique_ptr<ProbeStream>> probe_streams_;
  size_t probe_sinks_ = 0;  // of those, the others'

  std::deque<absl::AnyInvocable<void()>> events_;
  IoId events_timer_ = 0;
  // Destroyed from the top of the ring's callback only, when nobody is inside them.
  std::vector<std::unique_ptr<Link>> ended_links_;
  std::vector<std::unique_ptr<LaneHandshake>> ended_handshakes_;
  std::vector<std::unique_ptr<Lane>> ended_lanes_;
  std::vector<std::unique_ptr<ProbeStream>> ended_streams_;

  IoId work_timer_ = 0;
  Tick work_at_ = kNever;
  uint64_t work_serial_ = 0;
  int timers_ = 0;  // started and not called back

  std::map<const uint8_t*, Memory> memory_;
  std::vector<int> unused_buffers_;  // of memory that is no more
  bool pinned_ = false;              // in this turn of the ring
  bool unpinning_ = false;           // the next one has its turn
  bool warned_ = false;
  bool warned_accept_ = false;

  TransportStats stats_;
  LaneStats gone_;  // of links that are no more
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
  LH_RETURN_IF_ERROR(CheckCongestion(address.family()));
  LH_ASSIGN_OR_RETURN(listen_fd_, ring_->sockets().Listen(address));
  LH_ASSIGN_OR_RETURN(const SocketAddress bound, ring_->sockets().LocalAddress(listen_fd_));
  listen_address_ = ToString(bound);
  AcceptNext();
  return absl::OkStatus();
}

// Whether there is the congestion control that was asked for; and which to use on loopback if none
// was. A model that paces (bbr, the default of many systems) has nothing to protect there, and its
// timers cost a quarter of the processor time of a large op.
absl::Status TransportImpl::CheckCongestion(int family) {
  LH_ASSIGN_OR_RETURN(const int probe, ring_->sockets().Open(family));
  const auto tune = [&](const std::string& congestion) {
    return ring_->sockets().Tune(probe, {.user_timeout_ms = 0, .congestion = congestion});
  };
  absl::Status status;
  if (!options_.congestion.empty()) {
    status = tune(options_.congestion);
    loopback_congestion_ = options_.congestion;
  } else {
    for (const char* without_pacing : {"cubic", "reno"}) {
      if (!loopback_congestion_.empty() || !tune(without_pacing).ok()) continue;
      loopback_congestion_ = without_pacing;
    }
  }
  ring_->sockets().Close(probe);
  return status;
}

TransportImpl::~TransportImpl() {
  if (closed()) return;
  // The kernel may still write into lanes: their memory stays until the process ends.
  for (auto& [name, run] : runs_) {
    for (auto& [id, peer] : run.peers) (void)peer.link.release();
  }
  for (Retired& retired : retired_) (void)retired.link.release();
  for (auto& [raw, handshake] : handshakes_) (void)handshake.release();
  for (auto& [raw, stream] : probe_streams_) (void)stream.release();
}

void TransportImpl::Close() {
  if (closing_) return;
  closing_ = true;
  if (accept_ != 0) {
    ring_->Cancel(accept_);
  } else {
    ring_->sockets().Close(std::exchange(listen_fd_, -1));
  }
  resolver_.Close();
  for (Retired& retired : retired_) {
    if (!retired.link->finishing()) retired.link->Abort();
  }
  for (auto& [raw, handshake] : handshakes_) handshake->Fail("closing");
  for (auto& [raw, stream] : probe_streams_) stream->Stop();
  for (auto& [name, run] : runs_) {
    for (auto& [id, peer] : run.peers) Retire(&peer);
  }
  runs_.clear();
  Later([] {});
}

bool TransportImpl::closed() const {
  return closing_ && accept_ == 0 && handshakes_.empty() && retired_.empty() && events_.empty() &&
         probe_streams_.empty() && timers_ == 0 && resolver_.closed();
}

// ------------------------------------------------------------------------------ events and time

void TransportImpl::Later(absl::AnyInvocable<void()> event) {
  events_.push_back(std::move(event));
  if (events_timer_ != 0) return;
  ++timers_;
  events_timer_ = ring_->Timeout(Tick{}, [this](IoResult) {
    --timers_;
    events_timer_ = 0;
    RunEvents();
  });
}

void TransportImpl::RunEvents() {
  for (size_t n = events_.size(); n > 0; --n) {
    auto event = std::move(events_.front());
    events_.pop_front();
    event();
  }
  for (const auto& link : ended_links_) gone_.Add(link->stats());
  ended_links_.clear();
  ended_handshakes_.clear();
  ended_lanes_.clear();
  ended_streams_.clear();
  // Nothing is left to watch over: closed() need not wait for the timer.
  if (closing_ && retired_.empty() && handshakes_.empty() && work_timer_ != 0) {
    ring_->Cancel(work_timer_);
  }
}

void TransportImpl::Arm(Tick at) {
  if (at == kNever) return;
  // Work() takes what it comes late for time that this process stood still.
  at = std::max(at, ring_->Now());
  if (work_timer_ != 0 && work_at_ <= at) return;
  if (work_timer_ != 0) ring_->Cancel(work_timer_);
  work_at_ = at;
  ++timers_;
  work_timer_ = ring_->Timeout(at, [this, serial = ++work_serial_](IoResult) {
    --timers_;
    if (serial != work_serial_) return;  // replaced by an earlier one
    work_timer_ = 0;
    Work();
  });
}

void TransportImpl::Work() {
  const Tick now = ring_->Now();
  // This process itself stood still (stopped, starved): that says nothing about the others.
  const int64_t late = now - work_at_;
  if (late > Millis(options_.detect_ms) / 2) {
    ForEachLink([late](Link* link) {
      if (link->alive()) link->ForgiveSilence(late);
    });
  }
  Tick next = std::min({WorkHandshakes(now), WorkRetired(now), WorkProbes(now)});
  for (auto& [name, run] : runs_) {
    for (auto& [id, peer] : run.peers) next = std::min(next, WorkPeering(&peer, now));
  }
  if (next != kNever) Arm(std::max(next, now + 1));
}

Tick TransportImpl::WorkHandshakes(Tick now) {
  Tick next = kNever;
  for (auto& [raw, handshake] : handshakes_) {
    if (handshake->deadline() <= now) {
      handshake->Fail("no answer in time");
    } else {
      next = std::min(next, handshake->deadline());
    }
  }
  return next;
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
  if (p->link != nullptr) {
    const std::string& error = p->link->has_control() ? p->data_error : p->redial_error;
    next = std::min(next, p->link->Work(now, options_.detect_ms, error));
  }
  if (p->link != nullptr) next = std::min(next, RepairControl(p, now));
  if (p->link != nullptr) next = std::min(next, StartWithFewer(p, now));
  if (p->link != nullptr) {
    DialData(p, now);
    const bool wanted = p->peer_wants_lanes && p->peer_wants_until > now;
    if (p->link != nullptr && wanted && !p->link->data_complete()) {
      next = std::min(next, p->peer_wants_until);
    }
    if (p->data_backoff.next > now) next = std::min(next, p->data_backoff.next);
  } else if (const Request* request = p->dialling(); request != nullptr && p->dial == nullptr) {
    if (p->backoff.next <= now) {
      DialControl(p, *request, now);
    }
    if (p->backoff.next > now) next = std::min(next, p->backoff.next);
  }
  return next;
}

// Some data lanes are there and others are long in coming: the epoch does not wait for those. When
// to look again.
Tick TransportImpl::StartWithFewer(Peering* p, Tick now) {
  if (!p->link->established() || !MissingLanesWanted(*p)) return kNever;
  const auto wants =
      std::find_if(p->requests.begin(), p->requests.end(), [](const Request& r) { return r.data; });
  const Tick at = wants->started + Millis(options_.detect_ms);
  if (now < at) return at;
  if (p->link->data_lanes() == 0) return kNever;  // Evaluate() sees to it when one comes
  p->link->StartWithFewer();
  Evaluate(p);
  return kNever;
}

// ------------------------------------------------------------------------------ finding

Peering* TransportImpl::Find(const LinkKey& key) {
  const auto run = runs_.find(key.run);
  if (run == runs_.end()) return nullptr;
  const auto peer = run->second.peers.find(key.peer);
  return peer == run->second.peers.end() ? nullptr : &peer->second;
}

Peering* TransportImpl::FindSerial(const LinkKey& key, uint64_t serial) {
  Peering* p = Find(key);
  return p != nullptr && p->serial == serial ? p : nullptr;
}

Link* TransportImpl::FindOpen(const LinkKey& key) {
  Peering* p = Find(key);
  return p != nullptr && p->link != nullptr && p->link->open() ? p->link.get() : nullptr;
}

template <class F>
void TransportImpl::ForEachLink(F f) {
  for (auto& [name, run] : runs_) {
    for (auto& [id, peer] : run.peers) {
      if (peer.link != nullptr) f(peer.link.get());
    }
  }
  for (Retired& retired : retired_) f(retired.link.get());
}

Run* TransportImpl::FindRun(const Digest32& digest) {
  for (auto& [name, run] : runs_) {
    if (run.digest == digest) return &run;
  }
  return nullptr;
}

const std::string* TransportImpl::FindToken(const Run& run, uint32_t group, Epoch epoch) const {
  const auto tokens = run.tokens.find(group);
  if (tokens == run.tokens.end()) return nullptr;
  const auto token = tokens->second.find(epoch);
  return token == tokens->second.end() ? nullptr : &token->second;
}

StreamTuning TransportImpl::TuningFor(const SocketAddress& remote) const {
  // Later than the silence that the control lane notices, so that the reason names the silence.
  return {.user_timeout_ms = 4 * options_.detect_ms,
          .congestion = remote.loopback() ? loopback_congestion_ : options_.congestion};
}

uint32_t TransportImpl::PlannedLanes(const SocketAddress& address, int64_t rtt_us) const {
  if (options_.lanes != 0) return std::min<uint32_t>(options_.lanes, LH_LANES_MAX);
  if (rtt_us >= kLongWayUs) return LaneCount::First(rtt_us);
  return address.loopback() ? kLanesLoopback : kLanesElsewhere;
}

// A sender has use for so many. Those that there are stay.
void TransportImpl::PlanLanes(Peering* p, uint32_t lanes) {
  if (options_.lanes != 0 || lanes <= p->planned || p->link == nullptr || !p->link->alive()) return;
  p->planned = lanes;
  p->data_dials.resize(lanes, nullptr);
  p->link->ExpectDataLanes(lanes);
  p->data_backoff.Reset(ring_->Now());
  Arm(ring_->Now());
}

// ------------------------------------------------------------------------------ links

void TransportImpl::SetEndpoints(Peering* p, const std::vector<std::string>& endpoints) {
  if (endpoints.empty() || endpoints == p->endpoints) return;
  p->endpoints = endpoints;
  if (p->endpoints.size() > LH_ENDPOINTS_MAX) p->endpoints.resize(LH_ENDPOINTS_MAX);
  p->blocks.clear();
  for (const std::string& endpoint : p->endpoints) {
    const auto host_port = ParseHostPort(endpoint);
    if (!host_port.ok()) continue;
    if (const auto address = NumericAddress(*host_port)) {
      p->blocks.push_back(AddressBlock::Of(*address));
    }
  }
  known_blocks_stale_ = true;
}

void TransportImpl::OpenLinks(const std::string& run_name, uint32_t group, Epoch epoch,
                              const std::string& token, const std::vector<LinkRequest>& links,
                              Tick deadline) {
  if (closing_) return;
  Run& run = runs_[run_name];
  if (run.name.empty()) {
    run.name = run_name;
    run.digest = RunDigest(run_name);
  }
  run.tokens[group][epoch] = token;
  const Tick now = ring_->Now();
  for (const LinkRequest& link : links) {
    if (link.peer == options_.self || !link.peer) continue;
    Peering& p = run.peers[link.peer];
    if (p.serial == 0) {
      p.key = {run_name, link.peer};
      p.serial = next_serial_++;
    }
    p.groups.insert(group);
    SetEndpoints(&p, link.endpoints);
    std::erase_if(p.requests, [group](const Request& r) { return r.group == group; });
    Request request{.group = group,
                    .epoch = epoch,
                    .dial = link.dial,
                    .data = link.data,
                    .endpoints = link.endpoints,
                    .started = now,
                    .deadline = deadline};
    if (request.endpoints.size() > LH_ENDPOINTS_MAX) request.endpoints.resize(LH_ENDPOINTS_MAX);
    p.requests.push_back(std::move(request));
    p.last_error.clear();
    p.data_error.clear();
    p.candidates.clear();
    p.want_lanes_sent = false;
    p.backoff.Reset(now);
    p.data_backoff.Reset(now);
    Evaluate(&p);
  }
  Arm(now);
}

void TransportImpl::KeepLinks(const std::string& run_name, uint32_t group, Epoch epoch,
                              const std::vector<PeerId>& peers) {
  const auto found = runs_.find(run_name);
  if (found == runs_.end()) return;
  Run& run = found->second;
  auto& tokens = run.tokens[group];
  tokens.erase(tokens.begin(), tokens.lower_bound(epoch));
  if (tokens.empty()) run.tokens.erase(group);
  const std::set<PeerId> kept(peers.begin(), peers.end());
  for (auto it = run.peers.begin(); it != run.peers.end();) {
    Peering& p = it->second;
    if (kept.count(p.key.peer) != 0) {
      p.groups.insert(group);
    } else {
      p.groups.erase(group);
      std::erase_if(p.requests, [group](const Request& r) { return r.group == group; });
    }
    if (p.needed()) {
      ++it;
      continue;
    }
    Retire(&p);
    it = run.peers.erase(it);
    known_blocks_stale_ = true;
  }
  if (run.peers.empty() && run.tokens.empty()) runs_.erase(found);
}

// The end of a peering: what is queued still goes out.
void TransportImpl::Retire(Peering* p) {
  if (p->dial != nullptr) std::exchange(p->dial, nullptr)->Fail("not needed any more");
  CancelDials(p, "not needed any more");
  if (p->link == nullptr) return;
  Link* link = p->link.get();
  const Tick abort_at = ring_->Now() + Millis(options_.detect_ms);
  retired_.push_back({std::move(p->link), abort_at});
  if (link->established()) {
    link->Finish();
  } else {
    link->Abort();
  }
  Arm(abort_at);
}

// The control lane stands, or a data lane was added, or somebody asked: is there something to tell?
void TransportImpl::Evaluate(Peering* p) {
  if (p->link == nullptr || !p->link->alive() || !p->link->established()) return;
  if (MissingLanesWanted(*p)) {
    Arm(ring_->Now());  // dials what is up to us
    if (!p->link->options().dialled && !p->want_lanes_sent) {
      p->want_lanes_sent = true;
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
  Later([this, key = p->key, serial = p->serial] { Announce(key, serial); });
}

void TransportImpl::Announce(const LinkKey& key, uint64_t serial) {
  Peering* p = FindSerial(key, serial);
  if (p == nullptr) return;
  p->announcing = false;
  if (p->link == nullptr || !p->link->alive() || !p->link->established()) return;
  if (p->requests.empty() || MissingLanesWanted(*p)) return;
  p->requests.clear();
  p->last_error.clear();
  if (p->dial != nullptr) std::exchange(p->dial, nullptr)->Fail("the link stands");
  Link* link = p->link.get();
  const bool news = !link->open();
  link->MarkOpen();
  if (news) {
    Log(LogLevel::kInfo, absl::StrCat("link up peer=", ToString(key.peer), " run=", key.run,
                                      " address=", ToString(link->options().remote),
                                      " dialled=", link->options().dialled ? "here" : "there",
                                      " data_lanes=", link->data_lanes()));
  }
  listener_->OnLinkUp(key);
  link->Deliver();
}

void TransportImpl::OnLinkEstablished(Link* link) {
  if (Peering* p = Find(link->key()); p != nullptr && p->link.get() == link) {
    p->backoff.Reset(ring_->Now());
    Evaluate(p);
  }
}

void TransportImpl::OnWantLanes(Link* link, bool optional, uint32_t lanes) {
  Peering* p = Find(link->key());
  if (p == nullptr || p->link.get() != link) return;
  if (link->data_were_complete() && lanes != 0) return PlanLanes(p, lanes);
  const Tick until = ring_->Now() + 2 * Millis(options_.detect_ms);
  if (optional) {
    p->optional_until = until;
  } else {
    p->peer_wants_lanes = true;
    p->peer_wants_until = until;
  }
  p->data_backoff.Reset(ring_->Now());
  Arm(ring_->Now());
}

absl::Status TransportImpl::OnLinkFrame(Link* link, const FrameHeader& header,
                                        std::span<const uint8_t> payload) {
  return listener_->OnControlFrame(link->key(), header, payload);
}

absl::StatusOr<uint8_t*> TransportImpl::OnLinkData(Link* link, const FrameHeader& header) {
  return listener_->OnDataHeader(link->key(), header);
}

absl::Status TransportImpl::OnLinkDataReceived(Link* link, const FrameHeader& header) {
  return listener_->OnDataReceived(link->key(), header);
}

void TransportImpl::OnLinkDataAbandoned(Link* link, const FrameHeader& header) {
  listener_->OnDataAbandoned(link->key(), header);
}

uint64_t TransportImpl::OnLinkSegmentRepeat(uint64_t owner) {
  const uint64_t cookie = listener_->OnSegmentRepeat(owner);
  if (cookie != 0) ++stats_.segments_repeated;
  return cookie;
}

void TransportImpl::OnLinkLaneLost(Link* link, LaneKind kind, const std::string& reason) {
  Peering* p = Find(link->key());
  LH_CHECK(p != nullptr && p->link.get() == link);
  ++stats_.lanes_lost;
  const Tick now = ring_->Now();
  // Lanes that break again and again are not dialled in a busy loop.
  const bool apart = p->losses == 0 || now - p->losses_since > kLossApartUs;
  if (apart) {
    p->losses_since = now;
    p->losses = 0;
    p->redial_backoff.Reset(now);
    p->knock_backoff.Reset(now);
    p->data_backoff.Reset(now);
  } else if (p->losses > 2 * static_cast<int>(1 + link->data_lanes_announced())) {
    (kind == LaneKind::kControl ? p->redial_backoff : p->data_backoff).Failed(now);
  }
  if (++p->losses <= kLossesLogged) {
    Log(LogLevel::kWarning, absl::StrCat("lane lost peer=", ToString(p->key.peer),
                                         " run=", p->key.run, " data_lanes=", link->data_lanes(),
                                         p->losses == kLossesLogged ? " more=not_logged" : "") +
                                LogField("reason", reason));
  }
  Arm(now);
}

void TransportImpl::OnLinkLaneBack(Link* link, const std::string& name) {
  Peering* p = Find(link->key());
  LH_CHECK(p != nullptr && p->link.get() == link);
  ++stats_.lanes_redialled;
  p->redial_error.clear();
  if (p->losses > kLossesLogged) return;
  Log(LogLevel::kInfo, absl::StrCat("lane back peer=", ToString(p->key.peer), " run=", p->key.run,
                                    " data_lanes=", link->data_lanes()) +
                           LogField("lane", name));
}

void TransportImpl::OnLinkLaneCount(Link* link, uint32_t lanes, uint64_t rate) {
  Log(LogLevel::kInfo,
      absl::StrCat("data lanes peer=", ToString(link->key().peer), " run=", link->key().run,
                   " used=", lanes, " before_mbit_per_s=", rate * 8 / 1000000));
  if (lanes <= link->data_lanes_announced()) return;
  Later([this, key = link->key(), id = link->options().id, lanes] {
    Peering* p = Find(key);
    if (p == nullptr || p->link == nullptr || p->link->options().id != id) return;
    if (p->link->options().dialled) return PlanLanes(p, lanes);
    AskForOptionalLanes(p->link.get(), lanes);
  });
}

// Of the side that dials; 0: as many as it finds right.
void TransportImpl::AskForOptionalLanes(Link* link, uint32_t lanes) {
  FrameHeader want{.type = FrameType::kWantLanes, .flags = kFlagOptional};
  want.group = link->options().group;
  want.attempt = link->options().epoch;
  want.offset = lanes;
  link->SendControl(want, {});
}

void TransportImpl::OnLinkLaneEnded(std::unique_ptr<Lane> lane) {
  ended_lanes_.push_back(std::move(lane));
  Later([] {});  // destroys it
}

void TransportImpl::OnLinkSegmentsDropped(std::vector<uint64_t> cookies) {
  Later([this, cookies = std::move(cookies)] {
    for (const uint64_t cookie : cookies) listener_->OnSegmentSent(cookie);
  });
}

void TransportImpl::OnLinkBroken(Link* link, const std::string& reason, bool protocol) {
  if (protocol) ++stats_.frames_refused;
  Peering* p = Find(link->key());
  LH_CHECK(p != nullptr && p->link.get() == link) << "a link that nobody has broke";
  const Tick abort_at = ring_->Now() + Millis(options_.detect_ms);
  retired_.push_back({std::move(p->link), abort_at});
  Arm(abort_at);
  CancelDials(p, "the link broke");
  p->peer_wants_lanes = false;
  p->want_lanes_sent = false;
  p->last_error = reason;
  const Tick now = ring_->Now();
  p->backoff.Failed(now);
  Arm(p->backoff.next);
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
  ended_links_.push_back(std::move(it->link));
  retired_.erase(it);
  Later([] {});  // destroys it
}

void TransportImpl::ReportDown(const Peering& p, const std::string& reason, int64_t silent_us) {
  const uint32_t silent_ms =
      silent_us < Millis(options_.detect_ms) ? 0 : static_cast<uint32_t>(silent_us / 1000);
  Later([this, key = p.key, serial = p.serial, reason, silent_ms] {
    if (FindSerial(key, serial) != nullptr) listener_->OnLinkDown(key, reason, silent_ms);
  });
}

void TransportImpl::Expire(Peering* p, const std::vector<Request>& expired) {
  const std::string reason = WhyNotUp(*p, expired.back());
  if (p->dialling() == nullptr && p->dial != nullptr) {
    std::exchange(p->dial, nullptr)->Fail("no time left");
  }
  bool told = false;
  if (p->link != nullptr) {
    told = p->link->was_open();
    p->link->Break(reason);
  }
  if (told) return;  // by OnLinkBroken()
  Log(LogLevel::kInfo,
      absl::StrCat("link not built peer=", ToString(p->key.peer), " run=", p->key.run) +
          LogField("reason", reason));
  ReportDown(*p, reason);
}

std::string TransportImpl::WhyNotUp(const Peering& p, const Request& request) const {
  const int64_t ms = (request.deadline - request.started + 500) / 1000;
  if (p.link != nullptr && p.link->established()) {
    const uint32_t want = p.link->options().dialled ? p.planned : p.link->data_lanes_announced();
    return absl::StrCat(p.link->data_lanes(), " of ", want, " data lanes to ",
                        ToString(p.link->options().remote), " stood after ", ms, " ms",
                        p.data_error.empty() ? "" : ": ", p.data_error);
  }
  if (!p.last_error.empty()) return p.last_error;
  if (p.dial != nullptr) {
    return absl::StrCat(p.dial->connected() ? "handshake with " : "connect to ",
                        ToString(p.dial->address()), ": no answer in ", ms, " ms");
  }
  if (!request.dial) {
    return absl::StrCat("peer ", ToString(p.key.peer), " did not connect to ", listen_address_,
                        " within ", ms, " ms");
  }
  return absl::StrCat("connect to ", request.endpoints.empty() ? "?" : request.endpoints.front(),
                      ": no answer in ", ms, " ms");
}

// A control lane has passed its handshake: it becomes the peering's link.
void TransportImpl::Adopt(Peering* p, int fd, const LaneHello& hello, const SocketAddress& remote,
                          bool dialled) {
  LinkOptions options{.key = p->key,
                      .id = NewLinkId(hello),
                      .remote = remote,
                      .dialled = dialled,
                      .group = hello.group,
                      .epoch = hello.epoch,
                      .zero_copy = UseZeroCopy(remote),
                      .zero_copy_always = options_.zero_copy == TransportOptions::ZeroCopy::kOn,
                      .count_lanes = options_.lanes == 0};
  const std::optional<TcpDelivery> measured = ring_->sockets().Delivery(fd);
  p->linked = AddressBlock::Of(remote);
  known_blocks_.insert(*p->linked);
  p->planned = PlannedLanes(remote, measured ? measured->rtt_us : 0);
  p->optional_until = Tick{};
  p->peer_wants_lanes = false;
  p->want_lanes_sent = false;
  p->data_dials.assign(p->planned, nullptr);
  p->data_backoff.Reset(ring_->Now());
  p->candidates.clear();
  p->gone_since = kNever;
  p->redial_backoff.Reset(ring_->Now());
  p->knock_backoff.Reset(ring_->Now());
  p->losses = 0;
  p->link = std::make_unique<Link>(ring_, fd, std::move(options), this);
  Evaluate(p);
  Arm(ring_->Now());
}

// ------------------------------------------------------------------------------ dialling

template <class T>
T* TransportImpl::Keep(std::unique_ptr<T> handshake) {
  T* raw = handshake.get();
  Arm(raw->deadline());
  handshakes_[raw] = std::move(handshake);
  return raw;
}

std::unique_ptr<LaneHandshake> TransportImpl::Release(LaneHandshake* handshake) {
  const auto it = handshakes_.find(handshake);
  LH_CHECK(it != handshakes_.end());
  std::unique_ptr<LaneHandshake> owned = std::move(it->second);
  handshakes_.erase(it);
  return owned;
}

void TransportImpl::DialControl(Peering* p, const Request& request, Tick now) {
  if (p->candidates.empty() && p->resolving == 0) StartRound(p, request);
  if (!p->candidates.empty()) {
    StartControlDial(p, request, now);
  } else if (p->resolving == 0) {
    p->backoff.Failed(now);
  }
}

// One more time through all endpoints.
void TransportImpl::StartRound(Peering* p, const Request& request) {
  for (const std::string& endpoint : request.endpoints) {
    const auto host_port = ParseHostPort(endpoint);
    if (!host_port.ok()) {
      p->last_error = std::string(host_port.status().message());
      continue;
    }
    if (const auto address = NumericAddress(*host_port)) {
      p->candidates.push_back(*address);
      continue;
    }
    ++p->resolving;
    resolver_.Resolve(*host_port, [this, key = p->key,
                                   serial = p->serial](Resolver::Addresses addresses) {
      Peering* peering = FindSerial(key, serial);
      if (peering == nullptr) return;
      --peering->resolving;
      if (addresses.ok()) {
        peering->candidates.insert(peering->candidates.end(), addresses->begin(), addresses->end());
      } else {
        peering->last_error = std::string(addresses.status().message());
        peering->gone_since = kNever;
        if (peering->candidates.empty()) peering->backoff.Failed(ring_->Now());
      }
      Arm(ring_->Now());
    });
  }
  if (request.endpoints.empty()) p->last_error = "the peer has no endpoint to connect to";
}

void TransportImpl::StartControlDial(Peering* p, const Request& request, Tick now) {
  const std::string* token = FindToken(runs_[p->key.run], request.group, request.epoch);
  if (token == nullptr) {
    p->backoff.Failed(now);
    return;
  }
  const SocketAddress address = p->candidates.front();
  p->candidates.pop_front();
  Tick deadline = std::min(request.deadline, now + 2 * Millis(options_.detect_ms));
  if (!p->candidates.empty()) {
    // A black hole must not use up the time of the addresses behind it.
    const int64_t share = (request.deadline - now) / static_cast<int64_t>(p->candidates.size() + 1);
    deadline = std::min(deadline, now + std::max(share, kAttemptMinUs));
  }
  DialSpec spec{.address = address, .tuning = TuningFor(address), .hello = {}, .token = *token};
  spec.hello = {.kind = LaneKind::kControl,
                .run_digest = runs_[p->key.run].digest,
                .group = request.group,
                .lane = 0,
                .lanes = PlannedLanes(address, 0),
                .epoch = request.epoch,
                .dialer = options_.self,
                .acceptor = p->key.peer,
                .nonce = nonces_.Next()};
  p->dial = Keep(std::make_unique<LaneDial>(
      ring_, std::move(spec), deadline,
      [this, key = p->key](LaneHandshake* h) { OnControlDialled(key, h); }));
}

void TransportImpl::OnControlDialled(const LinkKey& key, LaneHandshake* handshake) {
  ended_handshakes_.push_back(Release(handshake));
  Later([] {});
  LaneDial* dial = static_cast<LaneDial*>(handshake);
  Peering* p = Find(key);
  if (p == nullptr || p->dial != dial || closing_) {
    if (dial->ok()) ring_->sockets().Close(dial->TakeFd());
    return;
  }
  p->dial = nullptr;
  if (dial->ok() && p->link == nullptr) {
    Adopt(p, dial->TakeFd(), dial->hello(), dial->address(), true);
    return;
  }
  const Tick now = ring_->Now();
  if (dial->ok()) {
    ring_->sockets().Close(dial->TakeFd());
  } else {
    p->last_error = dial->error();
    if (p->last_error.find(ToString(dial->address())) == std::string::npos) {
      p->last_error = absl::StrCat(dial->connected() ? "handshake with " : "connect to ",
                                   ToString(dial->address()), ": ", dial->error());
    }
  }
  if (!dial->SaysGone()) {
    p->gone_since = kNever;
  } else if (p->gone_since == kNever) {
    p->gone_since = now;
  }
  if (p->candidates.empty()) {
    ++p->attempts;
    p->backoff.Failed(now);
    const int64_t patience = Millis(options_.detect_ms) / 2;
    if (p->gone_since != kNever && now - p->gone_since >= patience && p->resolving == 0) {
      // A peer listens from its start to its end.
      for (Request& request : p->requests) {
        if (request.dial) request.deadline = now;
      }
      Arm(now);
    }
  }
  Arm(std::max(p->backoff.next, now));
}

void TransportImpl::CancelDials(Peering* p, const char* why) {
  if (p->redial != nullptr) std::exchange(p->redial, nullptr)->Fail(why);
  for (LaneDial*& dial : p->data_dials) {
    if (dial != nullptr) std::exchange(dial, nullptr)->Fail(why);
  }
}

// Starts what is missing of the data lanes, where that is up to us and somebody wants them.
void TransportImpl::DialData(Peering* p, Tick now) {
  Link* link = p->link.get();
  if (!link->established() || !link->options().dialled || link->data_complete()) return;
  if (link->closing()) return;
  const bool lost = link->data_were_complete();
  const bool wanted = p->data_wanted();
  const bool optional = p->optional_until > now;
  if (!wanted && !p->peer_wants_lanes && !lost && !optional) return;
  if (!wanted && !lost && p->peer_wants_lanes && p->peer_wants_until <= now) {
    link->Break(absl::StrCat("data lanes that the peer wants could not be built: ",
                             p->data_error.empty() ? "no answer in time" : p->data_error));
    return;
  }
  if (p->data_backoff.next > now) return;
  // The newest token of a group that both are in; if it is not known there yet, that of another
  // one.
  const Run& run = runs_[p->key.run];
  uint32_t group = 0;
  Epoch epoch;
  std::string token;
  if (!FindAnyToken(*p, &group, &epoch, &token)) return;
  Tick deadline = now + 2 * Millis(options_.detect_ms);
  if (!lost) {
    deadline = std::min(deadline, wanted                ? p->requests.back().deadline
                                  : p->peer_wants_lanes ? p->peer_wants_until
                                                        : p->optional_until);
  }
  int running = static_cast<int>(
      std::count_if(p->data_dials.begin(), p->data_dials.end(), [](LaneDial* d) { return d; }));
  for (uint32_t lane = 0; lane < p->planned && running < kDataDialsMax; ++lane) {
    if (link->HasDataLane(lane) || p->data_dials[lane] != nullptr) continue;
    ++running;
    DialSpec spec{.address = link->options().remote,
                  .tuning = TuningFor(link->options().remote),
                  .hello = {},
                  .token = token};
    spec.hello = {.kind = LaneKind::kData,
                  .run_digest = run.digest,
                  .group = group,
                  .lane = lane,
                  .lanes = p->planned,
                  .epoch = epoch,
                  .dialer = options_.self,
                  .acceptor = p->key.peer,
                  .nonce = nonces_.Next(),
                  .link = link->options().id,
                  .serial = link->NewSerial()};
    if (lost) spec.connect_by = ReconnectBy(*link, now);
    p->data_dials[lane] = Keep(std::make_unique<LaneDial>(
        ring_, std::move(spec), deadline,
        [this, key = p->key, lane](LaneHandshake* h) { OnDataDialled(key, lane, h); }));
  }
}

// A packet that is lost on the way is repeated after a second; a new attempt begins at once.
Tick TransportImpl::ReconnectBy(const Link& link, Tick now) const {
  return link.short_way() ? now + Millis(options_.detect_ms) / kConnectsPerDetect : kNever;
}

void TransportImpl::OnDataDialled(const LinkKey& key, uint32_t lane, LaneHandshake* handshake) {
  ended_handshakes_.push_back(Release(handshake));
  Later([] {});
  LaneDial* dial = static_cast<LaneDial*>(handshake);
  Peering* p = Find(key);
  if (p == nullptr || lane >= p->data_dials.size() || p->data_dials[lane] != dial || closing_) {
    if (dial->ok()) ring_->sockets().Close(dial->TakeFd());
    return;
  }
  p->data_dials[lane] = nullptr;
  if (dial->ok()) {
    // The dial is cancelled with its link, so the link is the one it was started for.
    LH_CHECK(p->link != nullptr);
    const int fd = dial->TakeFd();
    if (!p->link->FitsDataLane(lane, p->planned, dial->hello().serial)) {
      // Lost at the other end before it was in use here, or the link is closing.
      ring_->sockets().Abort(fd);
      Arm(ring_->Now());
      return;
    }
    p->link->AddDataLane(fd, lane, p->planned, dial->hello().serial);
    if (p->planned > static_cast<uint32_t>(kDataDialsMax)) Arm(ring_->Now());
    Evaluate(p);
    return;
  }
  p->data_error = dial->error();
  TryNextToken(p, *dial);
  if (dial->refused() == LaneResult::kUnknownLink) {
    return p->link->OnUnknownThere(
        absl::StrCat("data lane ", lane, " to ", ToString(dial->address())));
  }
  if (dial->SaysGone() && p->link->data_were_complete()) return BreakGone(p, *dial);
  p->data_backoff.Failed(ring_->Now());
  Arm(p->data_backoff.next);
}

// ------------------------------------------------------------------------------ repair

bool TransportImpl::MissingLanesWanted(const Peering& p) const {
  return p.data_wanted() && !p.link->data_complete() && !p.link->data_usable();
}

// One token after the other, as attempts go by: the other side may have forgotten one already and
// not know the other yet. First those of requests, then those of the link's own group.
bool TransportImpl::FindAnyToken(const Peering& p, uint32_t* group, Epoch* epoch,
                                 std::string* token) const {
  const Run& run = runs_.at(p.key.run);
  std::vector<std::pair<uint32_t, Epoch>> names;
  const auto add = [&](uint32_t g) {
    const auto tokens = run.tokens.find(g);
    if (tokens == run.tokens.end()) return;
    for (auto it = tokens->second.rbegin(); it != tokens->second.rend(); ++it) {
      const std::pair<uint32_t, Epoch> name(g, it->first);
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  };
  for (auto it = p.requests.rbegin(); it != p.requests.rend(); ++it) add(it->group);
  add(p.link->options().group);
  for (const uint32_t g : p.groups) add(g);
  if (names.empty()) return false;
  std::tie(*group, *epoch) = names[p.token_attempts % names.size()];
  *token = *FindToken(run, *group, *epoch);
  return true;
}

// After a dial that failed, if that was for its token. Several may fail with the same one.
void TransportImpl::TryNextToken(Peering* p, const LaneDial& dial) const {
  uint32_t group = 0;
  Epoch epoch;
  std::string token;
  if (dial.refused() == LaneResult::kUnknownEpoch && FindAnyToken(*p, &group, &epoch, &token) &&
      group == dial.hello().group && epoch == dial.hello().epoch) {
    ++p->token_attempts;
  }
}

void TransportImpl::BreakGone(Peering* p, const LaneDial& dial) {
  if (dial.connect_error() != 0) return BreakRefused(p, ToString(dial.address()));
  p->link->Break(
      absl::StrCat("another peer answers at ", ToString(dial.address()), " after a lane broke"));
}

void TransportImpl::BreakRefused(Peering* p, const std::string& address) {
  p->link->Break(absl::StrCat("connection refused by ", address, " after a lane broke"));
}

// Where the control lane is lost: dials a new one, or finds out whether somebody is there to do so.
// When to call again.
Tick TransportImpl::RepairControl(Peering* p, Tick now) {
  const Link& link = *p->link;
  if (!link.alive() || !link.established() || link.has_control() || link.closing()) return kNever;
  if (link.options().dialled) {
    if (p->redial == nullptr && p->redial_backoff.next <= now) Redial(p, now);
    return p->redial == nullptr ? p->redial_backoff.next : kNever;
  }
  if (p->knocks == 0 && p->knock_backoff.next <= now) Knock(p, now);
  return p->knocks == 0 && p->link != nullptr ? p->knock_backoff.next : kNever;
}

void TransportImpl::Redial(Peering* p, Tick now) {
  DialSpec spec{.address = p->link->options().remote,
                .tuning = TuningFor(p->link->options().remote),
                .hello = {},
                .token = {}};
  uint32_t group = 0;
  Epoch epoch;
  if (!FindAnyToken(*p, &group, &epoch, &spec.token)) {
    p->redial_backoff.Failed(now);
    return;
  }
  spec.hello = {.kind = LaneKind::kControl,
                .run_digest = runs_[p->key.run].digest,
                .group = group,
                .lane = 0,
                .lanes = p->planned,
                .epoch = epoch,
                .dialer = options_.self,
                .acceptor = p->key.peer,
                .nonce = nonces_.Next(),
                .link = p->link->options().id,
                .serial = p->link->NewSerial()};
  spec.connect_by = ReconnectBy(*p->link, now);
  p->redial = Keep(
      std::make_unique<LaneDial>(ring_, std::move(spec), now + Millis(options_.detect_ms),
                                 [this, key = p->key](LaneHandshake* h) { OnRedialled(key, h); }));
}

void TransportImpl::OnRedialled(const LinkKey& key, LaneHandshake* handshake) {
  ended_handshakes_.push_back(Release(handshake));
  Later([] {});
  LaneDial* dial = static_cast<LaneDial*>(handshake);
  Peering* p = Find(key);
  if (p == nullptr || p->redial != dial || closing_) {
    if (dial->ok()) ring_->sockets().Close(dial->TakeFd());
    return;
  }
  // The dial is cancelled with its link, so the link is the one it was started for.
  p->redial = nullptr;
  if (dial->ok()) {
    const int fd = dial->TakeFd();
    if (p->link->FitsControl(dial->hello().serial)) {
      p->link->ResumeControl(fd, dial->hello().serial);
    } else {
      ring_->sockets().Abort(fd);
    }
    Arm(ring_->Now());
    return;
  }
  p->redial_error = dial->error();
  if (dial->refused() == LaneResult::kUnknownLink) {
    return p->link->OnUnknownThere(absl::StrCat("control lane to ", ToString(dial->address())));
  }
  if (dial->SaysGone()) return BreakGone(p, *dial);
  TryNextToken(p, *dial);
  p->redial_backoff.Failed(ring_->Now());
  Arm(p->redial_backoff.next);
}

// At all addresses of the peer at once. If each refuses, its process is gone.
void TransportImpl::Knock(Peering* p, Tick now) {
  p->knocks_refused = 0;
  p->knocks_other = 0;
  p->knock_backoff.Failed(now);
  for (const std::string& endpoint : p->endpoints) {
    const auto host_port = ParseHostPort(endpoint);
    if (!host_port.ok()) continue;
    if (const auto address = NumericAddress(*host_port)) {
      KnockAt(p, *address);
      continue;
    }
    ++p->knocks;
    resolver_.Resolve(*host_port,
                      [this, key = p->key, serial = p->serial](Resolver::Addresses addresses) {
                        Peering* peering = FindSerial(key, serial);
                        if (peering == nullptr) return;
                        if (addresses.ok()) {
                          for (const SocketAddress& address : *addresses) KnockAt(peering, address);
                        } else {
                          ++peering->knocks_other;
                        }
                        --peering->knocks;
                        OnKnockOver(peering);
                      });
  }
}

void TransportImpl::KnockAt(Peering* p, const SocketAddress& address) {
  ++p->knocks;
  Keep(std::make_unique<LaneKnock>(
      ring_, address, TuningFor(address), ring_->Now() + Millis(options_.detect_ms),
      [this, key = p->key, serial = p->serial](LaneHandshake* h) { OnKnocked(key, serial, h); }));
}

void TransportImpl::OnKnocked(const LinkKey& key, uint64_t serial, LaneHandshake* handshake) {
  ended_handshakes_.push_back(Release(handshake));
  Later([] {});
  LaneKnock* knock = static_cast<LaneKnock*>(handshake);
  if (knock->ok()) ring_->sockets().Close(knock->TakeFd());
  Peering* p = FindSerial(key, serial);
  if (p == nullptr || closing_) return;
  if (knock->connect_error() == ECONNREFUSED) {
    ++p->knocks_refused;
    p->knock_refused = ToString(knock->address());
  } else {
    ++p->knocks_other;
  }
  --p->knocks;
  OnKnockOver(p);
}

void TransportImpl::OnKnockOver(Peering* p) {
  if (p->knocks > 0) return;
  Arm(p->knock_backoff.next);
  if (p->link == nullptr || !p->link->alive() || p->link->has_control()) return;
  if (p->knocks_refused > 0 && p->knocks_other == 0) BreakRefused(p, p->knock_refused);
}

// ------------------------------------------------------------------------------ probes

bool TransportImpl::StartProbe(const LinkKey& key) {
  const Link* link = FindOpen(key);
  if (link == nullptr || probing_ || probed_ || closing_) return false;
  const Peering& p = *Find(key);
  uint32_t group = 0;
  Epoch epoch;
  std::string token;
  const std::optional<SocketAddress> address = DataAddress(p);
  if (!address || !FindAnyToken(p, &group, &epoch, &token)) return false;
  const Tick now = ring_->Now();
  probing_.emplace();
  probing_->result.link = key;
  probing_->result.begun = now;
  probing_->link_arrived_before = link->arrived_bytes();
  const uint32_t lanes = link->data_lanes() != 0 ? link->data_lanes_announced() : p.planned;
  probing_->connections = std::clamp(lanes, 1u, kProbeConnectionsMax);
  for (uint32_t i = 0; i < probing_->connections; ++i) {
    DialSpec spec{.address = *address, .tuning = TuningFor(*address), .hello = {}, .token = token};
    spec.hello = {.kind = LaneKind::kProbe,
                  .run_digest = runs_[key.run].digest,
                  .group = group,
                  .lane = i,
                  .lanes = probing_->connections,
                  .epoch = epoch,
                  .dialer = options_.self,
                  .acceptor = key.peer,
                  .nonce = nonces_.Next(),
                  .link = link->options().id,
                  .serial = 1};
    probing_->dials.insert(Keep(
        std::make_unique<LaneDial>(ring_, std::move(spec), now + 2 * Millis(options_.detect_ms),
                                   [this](LaneHandshake* h) { OnProbeDialled(h); })));
  }
  Arm(now);
  return true;
}

void TransportImpl::OnProbeDialled(LaneHandshake* handshake) {
  ended_handshakes_.push_back(Release(handshake));
  Later([] {});
  LaneDial* dial = static_cast<LaneDial*>(handshake);
  const int fd = dial->ok() ? dial->TakeFd() : -1;
  if (!probing_ || probing_->dials.erase(dial) == 0 || closing_) {
    if (fd >= 0) ring_->sockets().Abort(fd);
    return;
  }
  if (fd >= 0) return AddProbeStream(fd, true);
  if (probing_->result.error.empty()) probing_->result.error = dial->error();
  Arm(ring_->Now());
}

void TransportImpl::AddProbeStream(int fd, bool sends) {
  const Tick now = ring_->Now();
  const uint64_t bytes = sends ? kProbeBytesMax / probing_->connections : kProbeSinkBytesMax;
  const Tick deadline = now + (sends ? 2 * kProbeUsMax : kProbeSinkUsMax);
  auto stream = std::make_unique<ProbeStream>(ring_, fd, sends, bytes, deadline,
                                              [this](ProbeStream* s) { OnProbeStreamEnded(s); });
  if (sends) {
    if (probing_->started++ == 0) probing_->first = now;
    probing_->streams.push_back(stream.get());
  } else {
    ++probe_sinks_;
  }
  ProbeStream* const raw = stream.get();
  probe_streams_[raw] = std::move(stream);
  Arm(sends ? now : deadline);
}

void TransportImpl::OnProbeStreamEnded(ProbeStream* stream) {
  const auto it = probe_streams_.find(stream);
  LH_CHECK(it != probe_streams_.end());
  if (!stream->sends()) {
    --probe_sinks_;
  } else if (probing_ && std::erase(probing_->streams, stream) != 0) {
    AddBytes(stream->delivery(), &probing_->gone);
    if (probing_->result.error.empty()) probing_->result.error = "its connections broke";
    Arm(ring_->Now());
  }
  ended_streams_.push_back(std::move(it->second));
  probe_streams_.erase(it);
  Later([] {});
}

// Stops what has had its time; looks at what our probe has shown, and ends it. When to call again.
Tick TransportImpl::WorkProbes(Tick now) {
  Tick next = kNever;
  for (auto& [raw, stream] : probe_streams_) {
    if (stream->deadline() <= now) {
      stream->Stop();
    } else {
      next = std::min(next, stream->deadline());
    }
  }
  if (!probing_) return next;
  if (probing_->streams.empty() && probing_->dials.empty()) {
    EndProbe(probing_->result.error);
    return next;
  }
  if (probing_->streams.empty()) return next;
  SumUp(now);
  const LinkProbe& result = probing_->result;
  const int64_t us_max = std::clamp(16 * int64_t{result.rtt_us}, kProbeUsMax, 2 * kProbeUsMax);
  const uint64_t planned = probing_->started * (kProbeBytesMax / probing_->connections);
  const bool arrived = probing_->dials.empty() && probing_->acked >= planned;
  if (!probing_->meter.settled() && !arrived && now - probing_->first < us_max) {
    return std::min(next, now + kProbeLookUs);
  }
  if (arrived && result.bytes_per_second == 0) {
    // Too fast to be watched: at least so much.
    const auto us = static_cast<uint64_t>(std::max(now - probing_->first, kProbeLookUs / 4));
    probing_->result.bytes_per_second = probing_->acked * 1000000 / us;
  }
  EndProbe(result.bytes_per_second == 0 ? "too little arrived in its time" : "");
  return next;
}

void TransportImpl::SumUp(Tick now) {
  LinkProbe& result = probing_->result;
  TcpDelivery sum = probing_->gone;
  for (ProbeStream* stream : probing_->streams) {
    const TcpDelivery& seen = stream->delivery();
    AddBytes(seen, &sum);
    if (result.rtt_us == 0 || (seen.rtt_us != 0 && seen.rtt_us < result.rtt_us)) {
      result.rtt_us = seen.rtt_us;
    }
  }
  probing_->acked = sum.bytes_acked;
  result.bytes_sent = sum.bytes_sent;
  result.bytes_repeated = sum.bytes_repeated;
  if (const Link* link = FindOpen(result.link)) {
    const uint64_t arrived = link->arrived_bytes();
    // Less than before: a lane was replaced.
    const uint64_t more = arrived - std::min(arrived, probing_->link_arrived_before);
    probing_->link_arrived += more;
    probing_->link_arrived_before = arrived;
  }
  // What is acknowledged comes in leaps where something was lost, what has arrived does not.
  probing_->meter.Add(now, sum.bytes_arrived + probing_->link_arrived, result.rtt_us);
  result.bytes_per_second = probing_->meter.bytes_per_second();
}

void TransportImpl::EndProbe(std::string error) {
  probed_ = std::move(probing_->result);
  probed_->error = std::move(error);
  probed_->ended = ring_->Now();
  ++(probed_->error.empty() ? stats_.probes : stats_.probes_failed);
  stats_.probe_bytes += probed_->bytes_sent;
  const std::set<LaneDial*> dials = std::move(probing_->dials);
  const std::vector<ProbeStream*> streams = std::move(probing_->streams);
  probing_.reset();
  for (LaneDial* dial : dials) dial->Fail("the probe is over");
  for (ProbeStream* stream : streams) stream->Stop();
}

std::optional<LinkProbe> TransportImpl::TakeProbe() { return std::exchange(probed_, std::nullopt); }

// Where a peer that dialled us listens: the port that it dials from is another one.
std::optional<SocketAddress> TransportImpl::DataAddress(const Peering& p) const {
  if (p.link->options().dialled) return p.link->options().remote;
  for (const std::string& endpoint : p.endpoints) {
    const auto host_port = ParseHostPort(endpoint);
    if (!host_port.ok()) continue;
    if (const auto address = NumericAddress(*host_port)) return *address;
  }
  return std::nullopt;
}

// ------------------------------------------------------------------------------ being dialled

void TransportImpl::AcceptNext() {
  accept_ = ring_->Accept(listen_fd_, [this](IoResult result) {
    accept_ = 0;
    OnAccepted(result.value);
  });
}

void TransportImpl::OnAccepted(int value) {
  if (closing_) {
    if (value >= 0) ring_->sockets().Close(value);
    ring_->sockets().Close(std::exchange(listen_fd_, -1));
    return;
  }
  if (value < 0) {
    if (value == -EINTR || value == -EAGAIN || value == -ECONNABORTED) return AcceptNext();
    if (!std::exchange(warned_accept_, true)) {
      Log(LogLevel::kWarning,
          absl::StrCat("accept failed, trying again address=", listen_address_) +
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
  ++stats_.connections_accepted;
  const auto remote = ring_->sockets().PeerAddress(value);
  if (accepts_ >= size_t{4} * LH_HANDSHAKES_MAX || !remote.ok() ||
      !ring_->sockets().Tune(value, TuningFor(*remote)).ok()) {
    ++stats_.handshakes_refused;
    ring_->sockets().Abort(value);
    return AcceptNext();
  }
  ++accepts_;
  const AddressBlock block = AddressBlock::Of(*remote);
  const uint64_t caller = callers_.Add(block, PeerIsKnownAt(block));
  accepting_[caller] = Keep(std::make_unique<LaneAccept>(
      ring_, value, nonces_.Next(), ring_->Now() + 2 * Millis(options_.detect_ms),
      [this, caller](const LaneHello& hello) {
        LaneVerdict verdict = Judge(hello);
        if (verdict.result == LaneResult::kAccepted) callers_.SetJudged(caller);
        return verdict;
      },
      [this, caller](LaneHandshake* h) { OnHandshakeAccepted(caller, h); }));
  if (callers_.size() > LH_HANDSHAKES_MAX) MakeRoom();
  AcceptNext();
}

bool TransportImpl::PeerIsKnownAt(const AddressBlock& block) {
  if (std::exchange(known_blocks_stale_, false)) {
    known_blocks_.clear();
    for (const auto& [name, run] : runs_) {
      for (const auto& [id, peer] : run.peers) {
        known_blocks_.insert(peer.blocks.begin(), peer.blocks.end());
        if (peer.linked) known_blocks_.insert(*peer.linked);
      }
    }
  }
  return known_blocks_.contains(block);
}

// Somebody who was accepted goes again, perhaps the last one.
void TransportImpl::MakeRoom() {
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

// Whether to let the caller prove that it is who it says.
LaneVerdict TransportImpl::Judge(const LaneHello& hello) {
  // The caller looks for one that was here before.
  if (hello.acceptor != options_.self) return {LaneResult::kWrongPeer, ""};
  Run* run = FindRun(hello.run_digest);
  if (hello.link != 0) {
    // Whoever has lost the link does not have the epoch any more, as a rule.
    const Peering* p = run == nullptr ? nullptr : Find({run->name, hello.dialer});
    if (p == nullptr || p->link == nullptr || p->link->options().id != hello.link) {
      return {LaneResult::kUnknownLink, ""};
    }
  }
  const std::string* token = run == nullptr ? nullptr : FindToken(*run, hello.group, hello.epoch);
  if (token == nullptr) return {LaneResult::kUnknownEpoch, ""};
  const auto peer = run->peers.find(hello.dialer);
  if (peer == run->peers.end() || !peer->second.needed()) {
    return {LaneResult::kWrongPeer, ""};
  }
  const Peering& p = peer->second;
  LaneResult result = LaneResult::kAccepted;
  if (hello.kind == LaneKind::kControl) {
    result = JudgeControl(p, hello);
  } else if (hello.kind == LaneKind::kProbe) {
    if (probe_sinks_ >= kProbeSinksMax) result = LaneResult::kBusy;
  } else if (!p.link->FitsDataLane(hello.lane, hello.lanes, hello.serial)) {
    result = LaneResult::kBusy;  // a newer one stands
  } else if (p.link->options().dialled) {
    result = LaneResult::kWrongPeer;  // data lanes are dialled by the side that dialled the first
  }
  return {result, result == LaneResult::kAccepted ? *token : std::string()};
}

// One control lane a pair. A second one takes the place of the first if that one is older or
// silent. If both sides dial at once, the smaller id's connection stays.
LaneResult TransportImpl::JudgeControl(const Peering& p, const LaneHello& hello) const {
  const bool ours_first = options_.self < p.key.peer;
  if (hello.link != 0) {
    // Dialled again by the side that dialled the first.
    if (p.link->options().dialled) return LaneResult::kWrongPeer;
    return p.link->FitsControl(hello.serial) ? LaneResult::kAccepted : LaneResult::kBusy;
  }
  if (p.link != nullptr) {
    // The peer would not begin anew if it had not given up what is lost.
    if (!p.link->has_control()) return LaneResult::kAccepted;
    if (!p.link->established()) return ours_first ? LaneResult::kBusy : LaneResult::kAccepted;
    const LinkOptions& link = p.link->options();
    const bool newer = hello.group == link.group && hello.epoch > link.epoch;
    const bool silent = ring_->Now() - p.link->last_heard() > Millis(options_.detect_ms) * 2 / 3;
    return newer || silent ? LaneResult::kAccepted : LaneResult::kBusy;
  }
  if (p.dial != nullptr && p.dial->connected() && ours_first) return LaneResult::kBusy;
  return LaneResult::kAccepted;
}

void TransportImpl::OnHandshakeAccepted(uint64_t caller, LaneHandshake* handshake) {
  ended_handshakes_.push_back(Release(handshake));
  Later([] {});
  callers_.Remove(caller);
  accepting_.erase(caller);
  --accepts_;
  if (!handshake->ok() || closing_) {
    if (!handshake->ok()) ++stats_.handshakes_refused;
    if (handshake->ok()) ring_->sockets().Close(handshake->TakeFd());
    return;
  }
  // Much may have happened since the HELLO.
  const LaneHello& hello = handshake->hello();
  const int fd = handshake->TakeFd();
  const auto remote = ring_->sockets().PeerAddress(fd);
  if (!remote.ok() || Judge(hello).result != LaneResult::kAccepted) {
    ++stats_.handshakes_refused;
    ring_->sockets().Abort(fd);
    return;
  }
  Run* run = FindRun(hello.run_digest);
  Peering* p = &run->peers[hello.dialer];
  if (hello.kind == LaneKind::kProbe) return AddProbeStream(fd, false);
  if (hello.kind == LaneKind::kData) {
    p->link->AddDataLane(fd, hello.lane, hello.lanes, hello.serial);
    Evaluate(p);
    return;
  }
  if (hello.link != 0) {
    p->link->ResumeControl(fd, hello.serial);
    Arm(ring_->Now());
    return;
  }
  if (p->link != nullptr) p->link->Break("replaced by a new connection of the peer");
  if (p->dial != nullptr) std::exchange(p->dial, nullptr)->Fail("the peer has dialled us");
  Adopt(p, fd, hello, *remote, false);
}

// ------------------------------------------------------------------------------ traffic

void TransportImpl::BreakLink(const LinkKey& key, const std::string& reason) {
  if (Link* link = FindOpen(key)) link->Break(reason, true);
}

void TransportImpl::SendControl(const LinkKey& key, const FrameHeader& header,
                                std::span<const uint8_t> payload) {
  if (Link* link = FindOpen(key)) link->SendControl(header, payload);
}

void TransportImpl::SendControlInTime(const LinkKey& key, const FrameHeader& header,
                                      std::span<const uint8_t> payload) {
  if (Link* link = FindOpen(key)) link->SendControl(header, payload, /*may_wait=*/true);
}

void TransportImpl::SendSegment(const LinkKey& key, const FrameHeader& header, const uint8_t* data,
                                uint64_t cookie, uint64_t owner) {
  if (Link* link = FindOpen(key)) {
    link->SendSegment({.header = header, .data = data, .cookie = cookie, .owner = owner});
  } else {
    OnLinkSegmentsDropped({cookie});
  }
}

void TransportImpl::DropSegments(const std::vector<uint64_t>& cookies) {
  const std::unordered_set<uint64_t> wanted(cookies.begin(), cookies.end());
  ForEachLink([&](Link* link) { link->DropSegments(wanted); });
}

void TransportImpl::ForgetSegments(uint64_t owner) {
  ForEachLink([&](Link* link) { link->ForgetSegments(owner); });
}

void TransportImpl::WantDataLanes(const LinkKey& key) {
  Link* link = FindOpen(key);
  if (link == nullptr || link->closing() || link->data_lanes() > 0 || link->data_were_complete()) {
    return;
  }
  Peering* p = Find(key);
  const Tick now = ring_->Now();
  if (p->optional_until > now) return;  // under way
  p->optional_until = now + 2 * Millis(options_.detect_ms);
  if (link->options().dialled) {
    p->data_backoff.Reset(now);
    Arm(now);
    return;
  }
  AskForOptionalLanes(link, 0);
}

LinkUse TransportImpl::BestUse(const LinkKey& key) const {
  const auto run = runs_.find(key.run);
  if (run == runs_.end()) return {};
  const auto peer = run->second.peers.find(key.peer);
  if (peer == run->second.peers.end() || peer->second.link == nullptr) return {};
  return peer->second.link->BestUse();
}

uint64_t TransportImpl::StateBytes(const LinkKey& key) const {
  const auto run = runs_.find(key.run);
  if (run == runs_.end()) return 0;
  const auto peer = run->second.peers.find(key.peer);
  if (peer == run->second.peers.end() || peer->second.link == nullptr) return 0;
  return peer->second.link->stats().state_bytes;
}

void TransportImpl::DetachReceives(const std::string& run, const ReceiveKey& key, uint64_t cookie) {
  // One more than there are receives, so that it cannot reach zero before all are counted.
  const auto left = std::make_shared<int>(1);
  const std::function<void()> done = [this, left, cookie] {
    if (--*left == 0) Later([this, cookie] { listener_->OnReceivesDetached(cookie); });
  };
  ForEachLink([&](Link* link) {
    if (link->key().run == run) *left += link->Detach(key, done);
  });
  done();
}

// ------------------------------------------------------------------------------ zero-copy memory

bool TransportImpl::UseZeroCopy(const SocketAddress& remote) const {
  if (!ring_->features().send_zero_copy) return false;
  switch (options_.zero_copy) {
    case TransportOptions::ZeroCopy::kOn:
      return true;
    case TransportOptions::ZeroCopy::kOff:
      return false;
    case TransportOptions::ZeroCopy::kAuto:
      return !remote.loopback();  // where the kernel copies after all, at a higher price
  }
  return false;
}

void TransportImpl::AddMemory(const uint8_t* data, size_t bytes) {
  const size_t pieces = bytes / kPinBytes + (bytes % kPinBytes != 0);
  memory_[data] = Memory{.bytes = bytes, .buffers = std::vector<int>(pieces, -1)};
}

void TransportImpl::RemoveMemory(const uint8_t* data) {
  const auto it = memory_.find(data);
  if (it == memory_.end()) return;
  for (const int buffer : it->second.buffers) {
    if (buffer >= 0) unused_buffers_.push_back(buffer);
  }
  memory_.erase(it);
  UnpinNext();
}

// One in each turn of the ring: whoever lets go of a page last has to free it.
void TransportImpl::UnpinNext() {
  if (unused_buffers_.empty() || std::exchange(unpinning_, true)) return;
  Later([this] {
    unpinning_ = false;
    if (closing_) return;  // the ring's end unpins everything
    ring_->UnregisterBuffer(unused_buffers_.back());
    unused_buffers_.pop_back();
    UnpinNext();
  });
}

int TransportImpl::FindBuffer(const uint8_t* data, size_t bytes) {
  auto it = memory_.upper_bound(data);
  if (it == memory_.begin() || bytes == 0) return -1;
  --it;
  const size_t offset = static_cast<size_t>(data - it->first);
  Memory& memory = it->second;
  if (offset >= memory.bytes || bytes > memory.bytes - offset) return -1;
  const size_t piece = offset / kPinBytes;
  // Across two pieces there is no one buffer: such a send pins its pages itself.
  if ((offset + bytes - 1) / kPinBytes != piece) return -1;
  int& buffer = memory.buffers[piece];
  if (buffer < 0) buffer = Pin(it->first, &memory, piece);
  return buffer;
}

// Memory is pinned when it is first sent from, not when it is announced: then its trainer has
// filled it, and what is never sent costs nothing. -1: not now.
int TransportImpl::Pin(const uint8_t* data, Memory* memory, size_t piece) {
  if (!ring_->features().registered_buffers || memory->refused) return -1;
  // Other lanes, and the pings among them, are not to wait for more than one.
  if (std::exchange(pinned_, true)) return -1;
  Later([this] { pinned_ = false; });
  const size_t offset = piece * kPinBytes;
  const auto buffer =
      ring_->RegisterBuffer(data + offset, std::min(kPinBytes, memory->bytes - offset));
  if (buffer.ok()) return *buffer;
  // What is still to be unpinned counts against the limits.
  if (absl::IsUnavailable(buffer.status()) || !unused_buffers_.empty()) return -1;
  memory->refused = true;
  if (!std::exchange(warned_, true)) {
    Log(LogLevel::kWarning, "arena memory is not registered, zero-copy sends cost more" +
                                LogField("reason", std::string(buffer.status().message())));
  }
  return -1;
}

// ------------------------------------------------------------------------------ numbers

void TransportImpl::SetDetectMs(uint32_t detect_ms) {
  if (detect_ms == 0 || detect_ms == options_.detect_ms) return;
  options_.detect_ms = detect_ms;
  ForEachLink([this](Link* link) {
    if (link->alive()) link->Tune(TuningFor(link->options().remote));
  });
  Arm(ring_->Now());
}

TransportStats TransportImpl::GetStats() const {
  TransportStats stats = stats_;
  LaneStats sum = gone_;
  for (const auto& [name, run] : runs_) {
    for (const auto& [id, peer] : run.peers) {
      if (peer.link == nullptr) continue;
      sum.Add(peer.link->stats());
      if (peer.link->open()) ++stats.links_up;
      stats.lanes_up += peer.link->lanes();
      stats.lanes_used += peer.link->lanes_used();
    }
  }
  for (const Retired& retired : retired_) sum.Add(retired.link->stats());
  for (const auto& link : ended_links_) sum.Add(link->stats());
  stats.bytes_sent = sum.bytes_sent;
  stats.bytes_received = sum.bytes_received;
  stats.bytes_discarded = sum.bytes_discarded;
  stats.zero_copy_copied = sum.zero_copy_copied;
  return stats;
}

std::vector<LinkStats> TransportImpl::GetLinkStats() const {
  std::vector<LinkStats> result;
  for (const auto& [name, run] : runs_) {
    for (const auto& [id, peer] : run.peers) {
      if (peer.link == nullptr || !peer.link->open()) continue;
      const LaneStats s = peer.link->stats();
      result.push_back({.link = peer.key,
                        .lanes = peer.link->lanes(),
                        .lanes_used = peer.link->lanes_used(),
                        .rtt_us = peer.link->rtt_us(),
                        .bytes_sent = s.bytes_sent,
                        .bytes_received = s.bytes_received});
    }
  }
  return result;
}

std::vector<LinkDelivery> TransportImpl::TakeDeliveries() {
  std::vector<LinkDelivery> result;
  for (const auto& [name, run] : runs_) {
    for (const auto& [id, peer] : run.peers) {
      if (peer.link == nullptr || !peer.link->open()) continue;
      const LinkDelivery delivery = peer.link->TakeDelivery();
      if (delivery.bytes_per_second != 0) result.push_back(delivery);
    }
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
