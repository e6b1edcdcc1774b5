// A model network behind peerd/transport/transport.h.
//
// It keeps the promises of the production transport. It does everything that the production
// transport is free to do:
// - Listeners are called from events only.
// - Frames of the control lane keep their order. Segments of one link overtake each other, because
//   a link has several data lanes.
// - A payload may be cut off in the middle.
// - A segment's memory may be read until OnSegmentSent(), and again if its lane is lost.
// - Lanes are lost and replaced below the link. Then the listener sees a delay, half received
//   segments that are given back, and segments that are read and sent again, even after
//   OnSegmentSent().
// - Silence or a reset takes a link down at each end by itself, at different times.
// - A link is built only while both ends hold the token of one epoch.
// - A link may go through a relay. Its messages wait while the relay is frozen, and the link ends
//   when the relay dies.
// - Bits of states may flip.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "peerd/transport/transport.h"
#include "tests/sim/planted.h"
#include "tests/sim/world.h"

namespace longhaul::sim {

class ModelTransport;

// Data lanes and their habits, the same at all peers of a run.
struct TransportModel {
  uint32_t detect_ms = 1500;
  int lanes = 2;
  double zero_copy = 0.5;  // share of segments whose memory is read until they have arrived
  int64_t segment_us = 200;
  double flips = 0;  // share of the segments of states that arrive with a flipped bit
  // What peers measure: no path is long, all are, or those to some peers are. (Latencies are not
  // what they say.)
  enum class Far { kNone, kAll, kSome } far = Far::kNone;
  Planted planted = Planted::kNone;
};

// Finds the transports of other peers. Outlives them.
class Switchboard {
 public:
  virtual ~Switchboard() = default;
  virtual ModelTransport* Find(PeerId peer) = 0;
  // A peer refused what another peer sent. Both run our code, so one of them is wrong.
  virtual void OnProtocolError(const std::string& text) = 0;
  // Called before a frame or a segment is handed to the listener.
  virtual void OnFrame(PeerId from, PeerId to, const FrameHeader& header) = 0;
  // A link through a relay is up.
  virtual void OnTunnel(PeerId from, PeerId to, PeerId relay) = 0;
};

class ModelTransport final : public peerd::Transport {
 public:
  ModelTransport(World* world, Node* node, PeerId self, TransportModel model,
                 Switchboard* switchboard, peerd::TransportListener* listener);

  void SetSegmentListeners(const peerd::SegmentListeners& listeners) override {
    segment_listeners_ = listeners;
  }
  std::string listen_address() const override { return node_->name + ":29700"; }
  void OpenLinks(const std::string& run, uint32_t group, Epoch epoch, const std::string& token,
                 const std::vector<peerd::LinkRequest>& links, Tick deadline) override;
  void KeepLinks(const std::string& run, uint32_t group, Epoch epoch,
                 const std::vector<PeerId>& peers) override;
  void TryPeer(const GroupKey& group, uint64_t trial, PeerId peer,
               const std::vector<std::string>& endpoints, Tick deadline) override;
  void SendControl(const peerd::LinkKey& link, const FrameHeader& header,
                   std::span<const uint8_t> payload) override;
  void SendControlInTime(const peerd::LinkKey& link, const FrameHeader& header,
                         std::span<const uint8_t> payload) override;
  void SendSegment(const peerd::LinkKey& link, const FrameHeader& header, const uint8_t* data,
                   uint64_t cookie, uint64_t owner) override;
  void WantDataLanes(const peerd::LinkKey&) override {}  // every link has some
  uint64_t StateBytes(const peerd::LinkKey& link) const override;
  peerd::LinkUse BestUse(const peerd::LinkKey& link) const override {
    return {.window_bytes = 0, .long_way = link.peer.value() % 2 == 0};
  }
  uint32_t LatencyUs(const peerd::LinkKey& link) const override {
    const bool far = model_.far == TransportModel::Far::kAll ||
                     (model_.far == TransportModel::Far::kSome && link.peer.value() % 2 == 0);
    return far ? 100'000 : 0;
  }
  void DetachReceives(const std::string& run, const peerd::ReceiveKey& key,
                      uint64_t cookie) override;
  void DropSegments(FrameType type, const std::vector<uint64_t>& cookies) override;
  void BreakLink(const peerd::LinkKey& link, const std::string& reason) override;
  void AddMemory(const uint8_t*, size_t) override {}
  void RemoveMemory(const uint8_t*) override {}
  void SetDetectMs(uint32_t detect_ms) override { model_.detect_ms = detect_ms; }
  peerd::TransportStats GetStats() const override { return {}; }
  std::vector<peerd::LinkStats> GetLinkStats() const override { return {}; }
  std::vector<std::pair<peerd::LinkKey, peerd::LinkWait>> PopWaits() override { return {}; }
  std::vector<std::pair<peerd::LinkKey, peerd::RateSample>> PopRates() override { return {}; }
  peerd::HostSample PopArrivals() override { return {}; }
  bool StartProbe(const peerd::LinkKey&) override { return false; }
  std::optional<peerd::LinkProbe> PopProbe() override { return std::nullopt; }
  void Close() override {}
  bool closed() const override { return true; }

  // Called for each segment that is handed over to be sent.
  using Watch = std::function<void(const peerd::LinkKey& link, const FrameHeader& header,
                                   const uint8_t* data)>;
  void WatchSegments(Watch watch) { watch_ = std::move(watch); }

  // ---- what the simulation does to this transport

  // Sends pings, and takes silent links down. The owner calls it every detect_ms / 3.
  void Beat();
  // The process was frozen, so a silence proves nothing. Every link counts as heard now.
  void ForgiveSilence();
  // Loses one data lane and the control lane of each link to `peer`. Both are replaced.
  void LoseLanes(PeerId peer);
  // Breaks the link to `peer` as a reset in the network would.
  void Reset(PeerId peer);
  // What a new connection finds. Only TryPeer() sees kRefuses and kDrops differ; a dial gets no
  // answer from either.
  enum class Port { kOpen, kRefuses, kDrops };
  void SetPort(Port port) { port_ = port; }
  // The process is dead. With `resets` its kernel tells the other ends; otherwise they find out by
  // silence.
  void Die(bool resets);
  // Gives all segments back that are not yet sent, as if their memory were not referred to any
  // more.
  void GiveBackSegments();
  // True if something in flight is read from there or written to there.
  bool Uses(const uint8_t* memory, size_t bytes) const;
  // True if a bit flipped in a state that came from that peer.
  bool Flipped(PeerId from) const { return flipped_.contains(from); }
  // Fails if queues are longer than a run can explain: their length may depend on what is open, not
  // on how long the run lasts.
  void CheckBounds() const;

 private:
  struct Segment {
    FrameHeader header;
    const uint8_t* data = nullptr;
    uint64_t cookie = 0;
    uint64_t owner = 0;
    uint64_t connection = 0;  // 0: none
    size_t lane = 0;
    bool arrived = false;
    bool lost = false;  // its lane was lost
    std::vector<uint8_t> copy;
    bool copied = false;
    bool sent = false;  // the listener knows
  };
  struct Lane {
    bool busy = false;
    Tick last_arrival;
  };
  // One direction of a connection.
  struct Way {
    Tick last_arrival;  // when the last message on the control lane arrives
    size_t frames = 0;  // in flight on the control lane
    std::vector<Lane> lanes;
    std::vector<std::shared_ptr<Segment>> queue;
    std::vector<std::shared_ptr<Segment>> flying;  // handed to a lane; may have arrived
    bool cut = false;                              // nothing more arrives except the end
    Tick relayed;  // when the last thing that the relay passed on arrives
  };
  struct Connection {
    uint64_t id = 0;
    std::string run;
    uint32_t group = 0;  // group of the epoch that opened it
    Epoch epoch;
    std::array<ModelTransport*, 2> end{};
    ModelTransport* relay = nullptr;  // nullptr: none, a straight link
    std::array<bool, 2> open{};
    std::array<bool, 2> established{};  // the end has heard from the other one
    bool confirmed = false;             // the accepting end has got the first frame
    std::array<bool, 2> finishing{};    // no listener any more, but the queue is still sent
    std::array<bool, 2> data{};         // the end knows that the data lanes are up
    std::array<Tick, 2> heard{};
    std::array<uint64_t, 2> state_bytes{};  // that came to this end
    std::array<Way, 2> way;                 // by sending end
  };
  using ConnectionPtr = std::shared_ptr<Connection>;
  // A payload that is being received.
  struct Receive {
    ConnectionPtr connection;
    std::shared_ptr<Segment> segment;
    uint8_t* place = nullptr;
  };
  // A link that an epoch needs, and that was not yet reported as up.
  struct Request {
    uint64_t id = 0;
    std::string run;
    uint32_t group = 0;
    Epoch epoch;
    std::string token;
    PeerId peer;
    PeerId relay;
    bool dial = false;
    bool data = false;
    Tick deadline;
  };
  using TryAnswer = std::function<void(const std::string& error)>;
  using TokenKey = std::tuple<std::string, uint32_t, Epoch>;
  using GroupAt = std::pair<std::string, uint32_t>;

  ConnectionPtr Find(const peerd::LinkKey& link) const;
  int EndOf(const ConnectionPtr& c) const { return c->end[0] == this ? 0 : 1; }
  Request* FindRequest(uint64_t id);
  bool Satisfied(const Request& request) const;
  // True if a group wants the link to go through `relay` (0: straight).
  bool Wants(const peerd::LinkKey& link, PeerId relay) const;
  static PeerId RelayOf(const ConnectionPtr& c) {
    return c->relay == nullptr ? PeerId() : c->relay->self_;
  }
  // Returns when something that this end sends now reaches the other end, or the relay if the
  // connection has one.
  Tick FirstArrival(const ConnectionPtr& c);
  // Runs `event` at the other end. `first` is when it reaches the other end, or the relay if the
  // connection has one.
  void Deliver(const ConnectionPtr& c, Tick first, std::function<void()> event);
  // Runs `event` at `to` without a connection. `relay`: the event goes through that peer (0:
  // straight), and is lost if that peer is dead.
  void Call(ModelTransport* to, PeerId relay, std::function<void()> event);
  void ReportSatisfied(const peerd::LinkKey& link);
  void Dial(uint64_t request);
  void OnDial(ModelTransport* from, const Request& request);
  bool GivesWay(PeerId from, const Request& request) const;
  void OnAnswer(uint64_t request);
  void EndTry(uint64_t id, const std::string& error);
  void OnConfirm(const ConnectionPtr& c, const Request& request);
  void SendFrame(const peerd::LinkKey& link, const FrameHeader& header,
                 const std::vector<uint8_t>& payload);
  void SendWaiting(const peerd::LinkKey& link);
  // Sends a small message, in order with the frames of the control lane. Runs `at_other_end` when
  // the message arrives.
  void SendOnControl(const ConnectionPtr& c, std::function<void()> at_other_end);
  void Pump(const ConnectionPtr& c, int end);
  void Begin(const ConnectionPtr& c, int end, size_t lane, std::shared_ptr<Segment> segment);
  void LoseLane(const ConnectionPtr& c, int from, size_t number);
  void Abandon(const ConnectionPtr& c, const std::shared_ptr<Segment>& segment);
  void Repeat(const ConnectionPtr& c, const Segment& lost);
  void SegmentSent(const std::shared_ptr<Segment>& segment);
  peerd::SegmentListener* ListenerOf(const Segment& segment) const {
    return segment_listeners_.Of(segment.header.type);
  }
  // Half of the payload has arrived: copies `bytes` of it, from offset `at` on.
  void Arrive(const ConnectionPtr& c, const Segment& segment, uint8_t* place, size_t at,
              size_t bytes);
  bool Readable(const ConnectionPtr& c, int from, const Segment& segment) const;
  void ReceiveHeader(const ConnectionPtr& c, std::shared_ptr<Segment> segment);
  void ReceiveRest(const ConnectionPtr& c, const std::shared_ptr<Segment>& segment);
  void Down(const ConnectionPtr& c, const std::string& reason, uint32_t silent_ms = 0);
  // Takes this end of the connection out of use.
  void Release(const ConnectionPtr& c);
  void TellEnd(const ConnectionPtr& c, const std::string& reason);
  bool Needed(const peerd::LinkKey& link) const;

  World* const world_;
  Node* const node_;
  const PeerId self_;
  TransportModel model_;
  Switchboard* const switchboard_;
  peerd::TransportListener* const listener_;
  peerd::SegmentListeners segment_listeners_;
  Watch watch_;

  std::map<TokenKey, std::string> tokens_;
  std::vector<Request> requests_;
  std::map<GroupAt, std::map<PeerId, PeerId>> keep_;  // peers to stay linked to, and their relays
  std::map<peerd::LinkKey, ConnectionPtr> links_;
  std::vector<ConnectionPtr> finishing_;
  std::vector<ConnectionPtr> carried_;  // links of other peers through this one
  // Frames from SendControlInTime(), which leave with the next frame, or a little later.
  std::map<peerd::LinkKey, std::vector<std::pair<FrameHeader, std::vector<uint8_t>>>> waiting_;
  Port port_ = Port::kOpen;
  std::map<uint64_t, TryAnswer> tries_;  // not answered, by number
  std::vector<Receive> receives_;
  std::set<PeerId> flipped_;
  // Not yet sent, by type and cookie.
  std::map<std::pair<FrameType, uint64_t>, std::shared_ptr<Segment>> segments_;
};

}  // namespace longhaul::sim
