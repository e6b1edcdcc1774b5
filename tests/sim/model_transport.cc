#include "tests/sim/model_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace longhaul::sim {

// More than this in flight in a simulated run shows a bug: something grows without bounds.
constexpr size_t kUnderWayMax = 1000;

using peerd::LinkKey;
using peerd::LinkRequest;

ModelTransport::ModelTransport(World* world, Node* node, PeerId self, TransportModel model,
                               Switchboard* switchboard, peerd::TransportListener* listener)
    : world_(world),
      node_(node),
      self_(self),
      model_(model),
      switchboard_(switchboard),
      listener_(listener) {}

// ------------------------------------------------------------------------------ building links

void ModelTransport::OpenLinks(const std::string& run, uint32_t group, Epoch epoch,
                               const std::string& token, const std::vector<LinkRequest>& links,
                               Tick deadline) {
  tokens_[{run, group, epoch}] = token;
  for (const LinkRequest& link : links) {
    std::erase_if(requests_, [&](const Request& r) {
      return r.run == run && r.group == group && r.peer == link.peer;
    });
    keep_[{run, group}][link.peer] = link.relay;
    if (const ConnectionPtr c = Find({run, link.peer});
        c != nullptr && !Wants({run, link.peer}, RelayOf(c))) {
      world_->On(node_, world_->now(), [this, c] { Down(c, "the link is to go another way"); });
    }
    const uint64_t id = world_->NewNumber();
    requests_.push_back(
        {id, run, group, epoch, token, link.peer, link.relay, link.dial, link.data, deadline});
    const Tick soon = world_->now() + world_->Between(0, 50);
    if (link.dial) {
      world_->On(node_, soon, [this, id] { Dial(id); });
    } else {
      world_->On(node_, soon, [this, key = LinkKey{run, link.peer}] { ReportSatisfied(key); });
    }
    world_->On(node_, std::max(deadline, world_->now()), [this, id] {
      const Request* const request = FindRequest(id);
      if (request == nullptr) return;
      const LinkKey key{request->run, request->peer};
      if (Satisfied(*request)) return ReportSatisfied(key);
      std::erase_if(requests_, [&](const Request& r) { return r.id == id; });
      const std::string reason = "no link to " + ToString(key.peer) + " by the deadline";
      if (const ConnectionPtr c = Find(key)) {
        Down(c, reason);
        if (c->established[EndOf(c)]) return;
      }
      listener_->OnLinkDown(key, reason, 0);
    });
  }
}

void ModelTransport::TryPeer(const GroupKey& group, uint64_t trial, PeerId peer,
                             const std::vector<std::string>& endpoints, Tick deadline) {
  const uint64_t id = world_->NewNumber();
  tries_[id] = [=, this](const std::string& error) {
    listener_->OnPeerTried(group, trial, peer, error);
  };
  world_->On(node_, std::max(deadline, world_->now()),
             [=, this] { EndTry(id, "connect to " + endpoints.front() + ": no answer in time"); });
  ModelTransport* const other = switchboard_->Find(peer);
  if (other == nullptr || !other->node_->alive) return;
  world_->On(other->node_, world_->Arrival(*node_, *other->node_), [=, this] {
    if (!node_->alive || other->port_ == Port::kDrops) return;
    const bool refused = other->port_ == Port::kRefuses;
    world_->On(node_, world_->Arrival(*other->node_, *node_), [=, this] {
      EndTry(id, refused ? "connect to " + endpoints.front() + ": Connection refused" : "");
    });
  });
}

void ModelTransport::EndTry(uint64_t id, const std::string& error) {
  if (auto answer = tries_.extract(id)) answer.mapped()(error);
}

ModelTransport::Request* ModelTransport::FindRequest(uint64_t id) {
  for (Request& request : requests_) {
    if (request.id == id) return &request;
  }
  return nullptr;
}

ModelTransport::ConnectionPtr ModelTransport::Find(const LinkKey& link) const {
  const auto it = links_.find(link);
  return it == links_.end() ? nullptr : it->second;
}

bool ModelTransport::Wants(const LinkKey& link, PeerId relay) const {
  return std::any_of(keep_.begin(), keep_.end(), [&](const auto& entry) {
    const auto& [group, peers] = entry;
    const auto it = peers.find(link.peer);
    return group.first == link.run && it != peers.end() && it->second == relay;
  });
}

bool ModelTransport::Satisfied(const Request& request) const {
  const LinkKey key{request.run, request.peer};
  const ConnectionPtr c = Find(key);
  return c != nullptr && Wants(key, RelayOf(c)) && c->established[EndOf(c)] &&
         (!request.data || c->data[EndOf(c)]);
}

void ModelTransport::ReportSatisfied(const LinkKey& link) {
  const size_t satisfied = std::erase_if(requests_, [&](const Request& r) {
    return r.run == link.run && r.peer == link.peer && Satisfied(r);
  });
  if (satisfied > 0) listener_->OnLinkUp(link);
}

void ModelTransport::Dial(uint64_t id) {
  const Request* const request = FindRequest(id);
  if (request == nullptr) return;
  const LinkKey key{request->run, request->peer};
  if (Satisfied(*request)) return ReportSatisfied(key);
  ModelTransport* const other = switchboard_->Find(request->peer);
  LH_CHECK(other != nullptr);
  if (const ConnectionPtr c = Find(key); c != nullptr && c->established[EndOf(c)]) {
    // The link is up. Only its data lanes are missing.
    SendOnControl(c, [c, other] {
      c->data[other->EndOf(c)] = true;
      other->ReportSatisfied({c->run, c->end[1 - other->EndOf(c)]->self_});
      other->SendOnControl(c, [c, other] {
        const int end = 1 - other->EndOf(c);
        c->data[end] = true;
        c->end[end]->ReportSatisfied({c->run, other->self_});
      });
    });
  } else if (c == nullptr) {
    Call(other, request->relay, [this, other, copy = *request] { other->OnDial(this, copy); });
  }
  world_->On(node_, world_->now() + world_->Between(Millis(60), Millis(200)),
             [this, id] { Dial(id); });
}

void ModelTransport::OnDial(ModelTransport* from, const Request& request) {
  if (port_ != Port::kOpen) return;
  const auto token = tokens_.find({request.run, request.group, request.epoch});
  if (token == tokens_.end() || token->second != request.token) return;
  if (!Wants({request.run, from->self_}, request.relay)) return;
  if (!from->node_->alive || !GivesWay(from->self_, request)) return;
  Call(from, request.relay, [from, id = request.id] { from->OnAnswer(id); });
}

void ModelTransport::Call(ModelTransport* to, PeerId relay_id, std::function<void()> event) {
  ModelTransport* const relay = relay_id ? switchboard_->Find(relay_id) : nullptr;
  if (!relay_id) {
    if (!to->node_->alive) return;
    world_->On(to->node_, world_->Arrival(*node_, *to->node_), std::move(event));
  } else if (relay != nullptr && relay->node_->alive) {
    world_->On(relay->node_, world_->Arrival(*node_, *relay->node_),
               [to, relay, event = std::move(event)]() mutable {
                 relay->Call(to, PeerId(), std::move(event));
               });
  }
}

Tick ModelTransport::FirstArrival(const ConnectionPtr& c) {
  const ModelTransport* const next = c->relay != nullptr ? c->relay : c->end[1 - EndOf(c)];
  return world_->Arrival(*node_, *next->node_);
}

void ModelTransport::Deliver(const ConnectionPtr& c, Tick first, std::function<void()> event) {
  const int end = EndOf(c);
  ModelTransport* const other = c->end[1 - end];
  if (c->relay == nullptr) {
    if (other->node_->alive) world_->On(other->node_, first, std::move(event));
    return;
  }
  if (!c->relay->node_->alive) return;
  world_->On(c->relay->node_, first, [c, end, other, event = std::move(event)]() mutable {
    if (!other->node_->alive) return;
    Way& way = c->way[end];
    way.relayed = std::max(way.relayed, c->relay->world_->Arrival(*c->relay->node_, *other->node_));
    other->world_->On(other->node_, way.relayed, std::move(event));
  });
}

// Returns true if the link that is up here makes way: for a link of a newer epoch of the same
// group, or because it may be dead. If both sides dial at once, the connection that the smaller id
// dialled stays.
bool ModelTransport::GivesWay(PeerId from, const Request& request) const {
  const ConnectionPtr c = Find({request.run, from});
  if (c == nullptr) return true;
  if (!c->established[EndOf(c)]) return from < self_;
  const bool newer = request.group == c->group && request.epoch > c->epoch;
  return newer || world_->now() - c->heard[EndOf(c)] > Millis(model_.detect_ms) * 2 / 3;
}

void ModelTransport::OnAnswer(uint64_t id) {
  const Request* const request = FindRequest(id);
  if (request == nullptr || Find({request->run, request->peer}) != nullptr) return;
  ModelTransport* const other = switchboard_->Find(request->peer);
  ModelTransport* const relay = request->relay ? switchboard_->Find(request->relay) : nullptr;
  if (request->relay && (relay == nullptr || !relay->node_->alive)) return;
  auto c = std::make_shared<Connection>();
  c->relay = relay;
  if (relay != nullptr) {
    std::erase_if(relay->carried_, [](const auto& old) { return !old->open[0] && !old->open[1]; });
    relay->carried_.push_back(c);
  }
  c->id = world_->NewNumber();
  c->run = request->run;
  c->group = request->group;
  c->epoch = request->epoch;
  c->end = {this, other};
  c->open[0] = true;
  c->data = {request->data, request->data};
  c->heard = {world_->now(), world_->now()};
  for (Way& way : c->way) way.lanes.resize(model_.lanes);
  links_[{request->run, request->peer}] = c;
  SendOnControl(c, [c, other, copy = *request] { other->OnConfirm(c, copy); });
}

void ModelTransport::OnConfirm(const ConnectionPtr& c, const Request& request) {
  const LinkKey key{c->run, c->end[0]->self_};
  c->confirmed = true;
  // The state here may have changed since the dial was answered.
  if (!tokens_.contains({request.run, request.group, request.epoch}) || !Wants(key, RelayOf(c)) ||
      !GivesWay(key.peer, request)) {
    TellEnd(c, "handshake refused");
    return;
  }
  if (const ConnectionPtr old = Find(key)) Down(old, "replaced by a new connection");
  c->open[1] = true;
  c->established[1] = true;
  c->heard[1] = world_->now();
  links_[key] = c;
  if (c->relay != nullptr) switchboard_->OnTunnel(key.peer, self_, RelayOf(c));
  SendOnControl(c, [c] {
    c->established[0] = true;
    c->end[0]->ReportSatisfied({c->run, c->end[1]->self_});
  });
  const size_t before = requests_.size();
  ReportSatisfied(key);
  // The dial was for an epoch whose link had been reported here before.
  if (requests_.size() == before) listener_->OnLinkUp(key);
}

// ------------------------------------------------------------------------------ closing links

bool ModelTransport::Needed(const LinkKey& link) const {
  for (const auto& [group, peers] : keep_) {
    if (group.first == link.run && peers.contains(link.peer)) return true;
  }
  return std::any_of(requests_.begin(), requests_.end(),
                     [&](const Request& r) { return r.run == link.run && r.peer == link.peer; });
}

void ModelTransport::KeepLinks(const std::string& run, uint32_t group, Epoch epoch,
                               const std::vector<PeerId>& peers) {
  auto& kept = keep_[{run, group}];
  const std::set<PeerId> needed(peers.begin(), peers.end());
  std::erase_if(kept, [&](const auto& entry) { return !needed.contains(entry.first); });
  for (const PeerId peer : peers) kept.try_emplace(peer);
  std::erase_if(requests_, [&](const Request& r) {
    return r.run == run && r.group == group && !keep_[{run, group}].contains(r.peer);
  });
  std::erase_if(tokens_, [&](const auto& entry) {
    const auto& [r, g, e] = entry.first;
    return r == run && g == group && e < epoch;
  });
  std::vector<ConnectionPtr> idle;
  for (const auto& [key, c] : links_) {
    if (key.run == run && !Needed(key)) idle.push_back(c);
  }
  for (const ConnectionPtr& c : idle) {
    const int end = EndOf(c);
    SendWaiting({c->run, c->end[1 - end]->self_});
    c->open[end] = false;
    c->finishing[end] = true;
    links_.erase({c->run, c->end[1 - end]->self_});
    std::erase_if(receives_, [&](const Receive& r) { return r.connection == c; });
    finishing_.push_back(c);
    world_->On(node_, world_->now(), [this, c, end] { Pump(c, end); });
  }
}

void ModelTransport::Down(const ConnectionPtr& c, const std::string& reason, uint32_t silent_ms) {
  const int end = EndOf(c);
  if (!c->open[end]) return;
  Release(c);
  TellEnd(c, "connection reset by peer");
  if (!c->established[end]) return;  // the listener has not heard of it yet
  listener_->OnLinkDown({c->run, c->end[1 - end]->self_}, reason, silent_ms);
}

void ModelTransport::Release(const ConnectionPtr& c) {
  const int end = EndOf(c);
  c->open[end] = false;
  c->finishing[end] = false;
  const LinkKey key{c->run, c->end[1 - end]->self_};
  if (const auto it = links_.find(key); it != links_.end() && it->second == c) {
    links_.erase(it);
    waiting_.erase(key);
  }
  std::erase(finishing_, c);
  std::erase_if(receives_, [&](const Receive& r) { return r.connection == c; });
  c->way[end].queue.clear();
  // Segments in flight come back when the kernel does not read them any more.
  for (const auto& [cookie, segment] : segments_) {
    if (segment->connection != c->id) continue;
    world_->On(node_, world_->now() + world_->Between(0, Millis(2)),
               [this, segment = segment] { SegmentSent(segment); });
  }
}

void ModelTransport::TellEnd(const ConnectionPtr& c, const std::string& reason) {
  const int end = EndOf(c);
  ModelTransport* const other = c->end[1 - end];
  if (!other->node_->alive) return;
  Deliver(c, std::max(c->way[end].last_arrival, FirstArrival(c)), [c, other, reason] {
    if (c->open[other->EndOf(c)]) other->Down(c, reason);
  });
}

void ModelTransport::BreakLink(const LinkKey& link, const std::string& reason) {
  switchboard_->OnProtocolError(ToString(self_) + " breaks its link to " + ToString(link.peer) +
                                ": " + reason);
  world_->On(node_, world_->now(), [this, link, reason] {
    if (const ConnectionPtr c = Find(link)) Down(c, reason);
  });
}

void ModelTransport::Reset(PeerId peer) {
  std::vector<ConnectionPtr> connections;
  for (const auto& [key, c] : links_) {
    if (key.peer == peer) connections.push_back(c);
  }
  // Links that go over this path to reach their relay break as well.
  ModelTransport* const other = switchboard_->Find(peer);
  for (const auto& [relay, end] : {std::pair(this, other), std::pair(other, this)}) {
    if (relay == nullptr) continue;
    for (const ConnectionPtr& c : relay->carried_) {
      if (c->end[0] == end || c->end[1] == end) connections.push_back(c);
    }
  }
  for (const ConnectionPtr& c : connections) {
    // Neither end tells the other one.
    for (const int end : {0, 1}) {
      ModelTransport* const transport = c->end[end];
      c->way[end].cut = true;
      if (!transport->node_->alive) continue;
      world_->On(transport->node_, world_->now() + world_->Between(0, Millis(3)),
                 [c, transport] { transport->Down(c, "connection reset"); });
    }
  }
}

void ModelTransport::Die(bool resets) {
  std::vector<ConnectionPtr> connections = finishing_;
  for (const auto& [key, c] : links_) connections.push_back(c);
  for (const ConnectionPtr& c : connections) {
    const int end = EndOf(c);
    c->open[end] = false;
    c->finishing[end] = false;
    c->way[end].queue.clear();
    if (resets) TellEnd(c, "connection reset by peer");
  }
  tries_.clear();
  for (const ConnectionPtr& c : carried_) {
    for (const int end : {0, 1}) {
      ModelTransport* const transport = c->end[end];
      c->way[end].cut = true;
      if (!resets || !c->open[end] || !transport->node_->alive) continue;
      world_->On(transport->node_, world_->Arrival(*node_, *transport->node_),
                 [c, transport] { transport->Down(c, "connection reset by peer"); });
    }
  }
  carried_.clear();
  links_.clear();
  waiting_.clear();
  finishing_.clear();
  receives_.clear();
}

void ModelTransport::GiveBackSegments() {
  // Queued segments may be sent then; these are given back at once as well.
  while (!segments_.empty()) SegmentSent(std::shared_ptr<Segment>(segments_.begin()->second));
}

// ------------------------------------------------------------------------------ silence

void ModelTransport::Beat() {
  std::vector<ConnectionPtr> connections;
  for (const auto& [key, c] : links_) connections.push_back(c);
  for (const ConnectionPtr& c : connections) {
    const int end = EndOf(c);
    if (!c->open[end]) continue;
    if (world_->now() - c->heard[end] > Millis(model_.detect_ms)) {
      Down(c, "silent for " + std::to_string(model_.detect_ms) + " ms", model_.detect_ms);
    } else {
      SendOnControl(c, [] {});
    }
  }
}

void ModelTransport::ForgiveSilence() {
  for (const auto& [key, c] : links_) c->heard[EndOf(c)] = world_->now();
}

void ModelTransport::CheckBounds() const {
  const auto check = [this](size_t size, const char* what) {
    if (size > kUnderWayMax) {
      switchboard_->OnProtocolError(ToString(self_) + " has " + std::to_string(size) + " " + what);
    }
  };
  check(segments_.size(), "segments under way");
  check(receives_.size(), "segments that are being received");
  check(requests_.size(), "links to be built");
  for (const auto& [key, c] : links_) {
    const Way& way = c->way[EndOf(c)];
    check(way.frames, "frames under way on a control lane");
    check(way.queue.size() + way.flying.size(), "segments on the lanes of a link");
  }
}

// ------------------------------------------------------------------------------ frames

void ModelTransport::SendOnControl(const ConnectionPtr& c, std::function<void()> at_other_end) {
  const int end = EndOf(c);
  ModelTransport* const other = c->end[1 - end];
  if (!other->node_->alive) return;
  Way& way = c->way[end];
  way.last_arrival = std::max(way.last_arrival, FirstArrival(c));
  ++way.frames;
  Deliver(c, way.last_arrival, [c, end, run = std::move(at_other_end)] {
    --c->way[end].frames;
    if (c->way[end].cut) return;
    // At the accepting end the first message, the confirmation, opens the connection.
    if (!c->open[1 - end] && c->confirmed) return;
    c->heard[1 - end] = std::max(c->heard[1 - end], c->end[1 - end]->world_->now());
    run();
  });
}

void ModelTransport::SendControl(const LinkKey& link, const FrameHeader& header,
                                 std::span<const uint8_t> payload) {
  SendWaiting(link);
  SendFrame(link, header, {payload.begin(), payload.end()});
}

void ModelTransport::SendControlInTime(const LinkKey& link, const FrameHeader& header,
                                       std::span<const uint8_t> payload) {
  if (Find(link) == nullptr) return;
  auto& waiting = waiting_[link];
  waiting.emplace_back(header, std::vector<uint8_t>(payload.begin(), payload.end()));
  if (waiting.size() > 1) return;
  world_->On(node_, world_->now() + world_->Between(0, Millis(5)),
             [this, link] { SendWaiting(link); });
}

void ModelTransport::SendWaiting(const LinkKey& link) {
  const auto waiting = waiting_.extract(link);
  if (waiting.empty()) return;
  for (const auto& [header, payload] : waiting.mapped()) SendFrame(link, header, payload);
}

void ModelTransport::SendFrame(const LinkKey& link, const FrameHeader& header,
                               const std::vector<uint8_t>& payload) {
  const ConnectionPtr c = Find(link);
  if (c == nullptr) return;
  ModelTransport* const other = c->end[1 - EndOf(c)];
  // As on a wire, the bytes go through the production parser.
  const auto bytes = Encode(header);
  SendOnControl(c, [this, other, bytes, run = link.run, payload] {
    const auto parsed = ParseFrameHeader(bytes, LaneKind::kControl);
    absl::Status status = parsed.status();
    if (status.ok()) {
      switchboard_->OnFrame(self_, other->self_, *parsed);
      status = other->listener_->OnControlFrame({run, self_}, *parsed, payload);
    }
    if (!status.ok()) {
      switchboard_->OnProtocolError(ToString(other->self_) + " refuses a frame of " +
                                    ToString(self_) + ": " + std::string(status.message()));
    }
  });
}

// ------------------------------------------------------------------------------ segments

void ModelTransport::SendSegment(const LinkKey& link, const FrameHeader& header,
                                 const uint8_t* data, uint64_t cookie, uint64_t owner) {
  if (watch_) watch_(link, header, data);
  auto segment = std::make_shared<Segment>();
  segment->header = header;
  segment->data = data;
  segment->cookie = cookie;
  segment->owner = owner;
  const bool fresh = segments_.emplace(std::pair(segment->header.type, cookie), segment).second;
  LH_CHECK(fresh) << "cookie " << cookie << " is in use";
  const ConnectionPtr c = Find(link);
  if (c == nullptr) {
    world_->On(node_, world_->now(), [this, segment] { SegmentSent(segment); });
    return;
  }
  segment->connection = c->id;
  const int end = EndOf(c);
  c->way[end].queue.push_back(segment);
  world_->On(node_, world_->now(), [this, c, end] { Pump(c, end); });
}

void ModelTransport::Pump(const ConnectionPtr& c, int end) {
  if (!c->open[end] && !c->finishing[end]) return;
  Way& way = c->way[end];
  while (!way.queue.empty()) {
    std::vector<size_t> idle;
    for (size_t lane = 0; lane < way.lanes.size(); ++lane) {
      if (!way.lanes[lane].busy) idle.push_back(lane);
    }
    if (idle.empty()) return;
    std::shared_ptr<Segment> segment = std::move(way.queue.front());
    way.queue.erase(way.queue.begin());
    Begin(c, end, idle[world_->Below(idle.size())], std::move(segment));
  }
  if (!c->finishing[end]) return;
  for (const Lane& lane : way.lanes) {
    if (lane.busy) return;
  }
  c->finishing[end] = false;
  std::erase(finishing_, c);
  TellEnd(c, "closed by the peer");
}

void ModelTransport::Begin(const ConnectionPtr& c, int end, size_t number,
                           std::shared_ptr<Segment> segment) {
  Way& way = c->way[end];
  Lane& lane = way.lanes[number];
  ModelTransport* const other = c->end[1 - end];
  lane.busy = true;
  segment->lane = number;
  std::erase_if(way.flying, [](const auto& other) { return other->arrived || other->lost; });
  way.flying.push_back(segment);
  const Tick gone = world_->now() + world_->Between(1, model_.segment_us);
  // A relay has a copy in its own memory.
  segment->copied = !world_->Chance(model_.zero_copy) || c->relay != nullptr;
  const bool early = model_.planted == Planted::kSentTooEarly && !segment->copied &&
                     segment->header.type == FrameType::kData;
  if (segment->copied) {
    segment->copy.assign(segment->data, segment->data + segment->header.payload_bytes);
  }
  const Tick header = std::max({lane.last_arrival, FirstArrival(c)});
  // So late that the memory usually belongs to somebody else.
  const int64_t late = early ? world_->Between(0, Millis(100)) : 0;
  const Tick rest = header + world_->Between(1, model_.segment_us) + late;
  lane.last_arrival = rest;
  Deliver(c, header, [c, other, segment] { other->ReceiveHeader(c, segment); });
  Deliver(c, rest, [c, other, segment] { other->ReceiveRest(c, segment); });
  world_->On(node_, gone, [this, c, end, number] {
    c->way[end].lanes[number].busy = false;
    Pump(c, end);
  });
  const Tick returns =
      segment->copied || early ? gone : std::max(gone, rest + world_->Between(1, Millis(1)));
  world_->On(node_, returns, [this, segment] { SegmentSent(segment); });
}

void ModelTransport::LoseLanes(PeerId peer) {
  for (const auto& [key, c] : links_) {
    if (key.peer != peer || !c->open[0] || !c->open[1]) continue;
    const size_t number = world_->Below(c->way[0].lanes.size());
    for (const int end : {0, 1}) {
      c->way[end].last_arrival =
          std::max(c->way[end].last_arrival, world_->now()) + world_->Between(0, Millis(5));
      LoseLane(c, end, number);
    }
  }
}

void ModelTransport::LoseLane(const ConnectionPtr& c, int from, size_t number) {
  Way& way = c->way[from];
  way.lanes[number].last_arrival = world_->now() + world_->Between(0, Millis(5));
  ModelTransport* const sender = c->end[from];
  ModelTransport* const receiver = c->end[1 - from];
  for (const std::shared_ptr<Segment>& segment : way.flying) {
    if (segment->lane != number || segment->arrived || segment->lost) continue;
    segment->lost = true;
    // The sender hears of the loss only when the receiver does not write to the place any more.
    const Tick given_back = world_->now() + world_->Between(0, Millis(1));
    world_->On(receiver->node_, given_back, [c, receiver, segment, sender, this] {
      receiver->Abandon(c, segment);
      receiver->Deliver(c, receiver->FirstArrival(c),
                        [c, sender, segment] { sender->Repeat(c, *segment); });
    });
  }
}

void ModelTransport::Abandon(const ConnectionPtr& c, const std::shared_ptr<Segment>& segment) {
  const auto it = std::find_if(receives_.begin(), receives_.end(),
                               [&](const Receive& r) { return r.segment == segment; });
  if (it == receives_.end()) return;
  const bool placed = it->place != nullptr;
  receives_.erase(it);
  if (placed)
    ListenerOf(*segment)->OnDataAbandoned({c->run, c->end[1 - EndOf(c)]->self_}, segment->header);
}

void ModelTransport::Repeat(const ConnectionPtr& c, const Segment& lost) {
  const int end = EndOf(c);
  if (!c->open[end] || model_.planted == Planted::kLaneForgets) return;
  const uint64_t cookie = ListenerOf(lost)->OnSegmentRepeat(lost.owner);
  if (cookie == 0) return;
  auto segment = std::make_shared<Segment>();
  segment->header = lost.header;
  segment->data = lost.data;
  segment->cookie = cookie;
  segment->owner = lost.owner;
  segment->connection = c->id;
  const bool fresh = segments_.emplace(std::pair(segment->header.type, cookie), segment).second;
  LH_CHECK(fresh) << "cookie " << cookie << " is in use";
  c->way[end].queue.insert(c->way[end].queue.begin(), std::move(segment));
  Pump(c, end);
}

void ModelTransport::SegmentSent(const std::shared_ptr<Segment>& segment) {
  if (std::exchange(segment->sent, true)) return;
  segments_.erase({segment->header.type, segment->cookie});
  ListenerOf(*segment)->OnSegmentSent(segment->cookie);
}

// True if the bytes can still be read at the segment's place.
bool ModelTransport::Readable(const ConnectionPtr& c, int from, const Segment& segment) const {
  if (segment.copied || model_.planted == Planted::kSentTooEarly) {
    return segment.copied || c->end[from]->node_->alive;
  }
  return !segment.sent && c->end[from]->node_->alive;
}

void ModelTransport::Arrive(const ConnectionPtr& c, const Segment& segment, uint8_t* place,
                            size_t at, size_t bytes) {
  const uint8_t* const data = segment.copied ? segment.copy.data() : segment.data;
  std::memcpy(place + at, data + at, bytes);
  if (segment.header.type != FrameType::kChunkData) return;
  const int end = EndOf(c);
  c->state_bytes[end] += bytes;
  if (model_.flips == 0 || bytes == 0 || !world_->Chance(model_.flips / 2)) return;
  place[at + world_->Below(bytes)] ^= static_cast<uint8_t>(1u << world_->Below(8));
  flipped_.insert(c->end[1 - end]->self_);
}

uint64_t ModelTransport::StateBytes(const LinkKey& link) const {
  const ConnectionPtr c = Find(link);
  return c == nullptr ? 0 : c->state_bytes[EndOf(c)];
}

bool ModelTransport::Uses(const uint8_t* memory, size_t bytes) const {
  const auto within = [&](const uint8_t* at) { return memory <= at && at < memory + bytes; };
  return std::any_of(segments_.begin(), segments_.end(),
                     [&](const auto& entry) { return within(entry.second->data); }) ||
         std::any_of(receives_.begin(), receives_.end(),
                     [&](const Receive& receive) { return within(receive.place); });
}

void ModelTransport::ReceiveHeader(const ConnectionPtr& c, std::shared_ptr<Segment> segment) {
  const int end = EndOf(c);
  Way& way = c->way[1 - end];
  if (way.cut || !c->open[end] || segment->lost) return;
  if (!Readable(c, 1 - end, *segment)) {
    way.cut = true;
    return;
  }
  c->heard[end] = world_->now();
  const PeerId from = c->end[1 - end]->self_;
  const auto parsed = ParseFrameHeader(Encode(segment->header), LaneKind::kData);
  LH_CHECK(parsed.ok()) << parsed.status().ToString();
  switchboard_->OnFrame(from, self_, *parsed);
  const auto place = ListenerOf(*segment)->OnDataHeader({c->run, from}, *parsed);
  if (!place.ok()) {
    switchboard_->OnProtocolError(ToString(self_) + " refuses a segment of " + ToString(from) +
                                  ": " + std::string(place.status().message()));
    Down(c, "a segment was refused");
    return;
  }
  if (*place != nullptr) Arrive(c, *segment, *place, 0, parsed->payload_bytes / 2);
  receives_.push_back({c, std::move(segment), *place});
}

void ModelTransport::ReceiveRest(const ConnectionPtr& c, const std::shared_ptr<Segment>& segment) {
  if (segment->lost) return;
  segment->arrived = true;
  const auto it = std::find_if(receives_.begin(), receives_.end(),
                               [&](const Receive& r) { return r.segment == segment; });
  if (it == receives_.end()) return;
  const int end = EndOf(c);
  Way& way = c->way[1 - end];
  if (way.cut || !Readable(c, 1 - end, *segment)) {
    way.cut = true;
    return;
  }
  uint8_t* const place = it->place;
  receives_.erase(it);
  c->heard[end] = world_->now();
  if (place == nullptr) return;
  const size_t half = segment->header.payload_bytes / 2;
  Arrive(c, *segment, place, half, segment->header.payload_bytes - half);
  const PeerId from = c->end[1 - end]->self_;
  const absl::Status status = ListenerOf(*segment)->OnDataReceived({c->run, from}, segment->header);
  if (!status.ok()) {
    switchboard_->OnProtocolError(ToString(self_) + " refuses a payload of " + ToString(from) +
                                  ": " + std::string(status.message()));
  }
}

void ModelTransport::DetachReceives(const std::string& run, const peerd::ReceiveKey& key,
                                    uint64_t cookie) {
  world_->On(node_, world_->now() + world_->Between(0, 500), [=, this] {
    for (Receive& receive : receives_) {
      if (receive.connection->run == run && key.Names(receive.segment->header) &&
          model_.planted != Planted::kNoDetach) {
        receive.place = nullptr;
      }
    }
    segment_listeners_.Of(key.type)->OnReceivesDetached(cookie);
  });
}

// Drops queued segments by their cookies. For a segment that is lost later, the listener refuses
// the repeat.
void ModelTransport::DropSegments(FrameType type, const std::vector<uint64_t>& cookies) {
  for (const uint64_t cookie : cookies) {
    const auto it = segments_.find({type, cookie});
    if (it == segments_.end()) continue;
    const std::shared_ptr<Segment> segment = it->second;
    const auto drop = [&](const ConnectionPtr& c) {
      return std::erase(c->way[EndOf(c)].queue, segment) > 0;
    };
    bool dropped = false;
    for (const auto& [key, c] : links_) dropped = dropped || drop(c);
    for (const ConnectionPtr& c : finishing_) dropped = dropped || drop(c);
    if (!dropped) continue;
    world_->On(node_, world_->now() + world_->Between(0, 100),
               [this, segment] { SegmentSent(segment); });
  }
}

}  // namespace longhaul::sim
