// peerd/transport/transport.h over a model network.
//
// What the production transport promises, and no more: listeners are called from events only;
// frames of the control lane keep their order; segments of one link overtake each other (several
// data lanes); a payload may be cut off in the middle; a segment's memory may be read until it is
// told to be Sent; lanes are lost and replaced below the link, which shows as a delay, half
// received segments that are given back, and segments that are read and sent again, be it after
// they were Sent; silence and resets take a link down at either end by itself, at different times;
// a link is built only while both ends hold the token of one epoch. A link may go through a third
// peer: what is on it waits while that one stands still, and it ends when that one dies. Bits of
// states may flip.
#pragma once

#include <array>
#include <cstdint>
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

// Data lanes and their habits, equal at all peers of a run.
struct TransportModel {
  uint32_t detect_ms = 1500;
  int lanes = 2;
  double zero_copy = 0.5;  // share of segments whose memory is read until they have arrived
  int64_t segment_us = 200;
  double flips = 0;  // share of the segments of states that come with a bit flipped
  Planted planted = Planted::kNone;
};

// Finds the transports of other peers; outlives them.
class Switchboard {
 public:
  virtual ~Switchboard() = default;
  virtual ModelTransport* Find(PeerId peer) = 0;
  // A peer refused what another one sent: both are ours, so one of them is wrong.
  virtual void OnProtocolError(const std::string& text) = 0;
  // A frame or a segment is about to be handed over.
  virtual void OnFrame(PeerId from, PeerId to, const FrameHeader& header) = 0;
  // A link that goes through a third peer stands.
  virtual void OnTunnel(PeerId from, PeerId to, PeerId relay) = 0;
};

class ModelTransport final : public peerd::Transport {
 public:
  ModelTransport(World* world, Node* node, PeerId self, TransportModel model,
                 Switchboard* switchboard, peerd::TransportListener* listener);

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
  void DetachReceives(const std::string& run, const peerd::ReceiveKey& key,
                      uint64_t cookie) override;
  void DropSegments(const std::vector<uint64_t>& cookies) override;
  void BreakLink(const peerd::LinkKey& link, const std::string& reason) override;
  void AddMemory(const uint8_t*, size_t) override {}
  void RemoveMemory(const uint8_t*) override {}
  void SetDetectMs(uint32_t detect_ms) override { model_.detect_ms = detect_ms; }
  peerd::TransportStats GetStats() const override { return {}; }
  std::vector<peerd::LinkStats> GetLinkStats() const override { return {}; }
  std::vector<peerd::LinkDelivery> PopDeliveries() override { return {}; }
  bool StartProbe(const peerd::LinkKey&) override { return false; }
  std::optional<peerd::LinkProbe> PopProbe() override { return std::nullopt; }
  void Close() override {}
  bool closed() const override { return true; }

  // ---- what the simulation does to it

  // Pings, and looks for silence. The owner calls it every detect_ms / 3.
  void Beat();
  // It was frozen: silence says nothing.
  void ForgiveSilence();
  // One data lane and the control lane of each link to `peer` are lost and replaced.
  void LoseLanes(PeerId peer);
  // Breaks the link to `peer` as a reset in the network would.
  void Reset(PeerId peer);
  // Whoever dials it from now on is refused, or hears nothing.
  enum class Port { kOpen, kRefuses, kDrops };
  void SetPort(Port port) { port_ = port; }
  // The process is gone. With `resets` its kernel tells the others; else they find out by silence.
  void Die(bool resets);
  // Cookies of segments that have not been Sent: their memory may be referred to.
  std::vector<uint64_t> PopSegmentsOut();
  // Something that is under way is read from there, or written to there.
  bool Uses(const uint8_t* memory, size_t bytes) const;
  // Bits of a state that this one sent have come flipped to us.
  bool Flipped(PeerId from) const { return flipped_.contains(from); }
  // What is under way is bounded by what is open, not by how long the run lasts. Fails if not.
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
    bool lost = false;  // with its lane
    std::vector<uint8_t> copy;
    bool copied = false;
    bool sent = false;  // the sender knows
  };
  struct Lane {
    bool busy = false;
    Tick last_arrival;
  };
  // From one end to the other.
  struct Way {
    Tick last_arrival;  // of the control lane
    size_t frames = 0;  // under way on it
    std::vector<Lane> lanes;
    std::vector<std::shared_ptr<Segment>> queue;
    std::vector<std::shared_ptr<Segment>> flying;  // handed to a lane; may have arrived
    bool cut = false;                              // nothing more arrives but the end
    Tick relayed;                                  // the last that the relay passed on arrives
  };
  struct Connection {
    uint64_t id = 0;
    std::string run;
    uint32_t group = 0;  // whose epoch it was opened for
    Epoch epoch;
    std::array<ModelTransport*, 2> end{};
    ModelTransport* relay = nullptr;  // none: it goes straight
    std::array<bool, 2> open{};
    std::array<bool, 2> established{};  // the end has heard from the other one
    bool confirmed = false;             // the accepting end has seen the first frame
    std::array<bool, 2> finishing{};    // no listener any more, but the queue is still sent
    std::array<bool, 2> data{};         // data lanes stand, as this end knows
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
  // A link that an epoch needs and that was not reported yet.
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
  // Some group wants the link to go that way.
  bool Wants(const peerd::LinkKey& link, PeerId relay) const;
  static PeerId RelayOf(const ConnectionPtr& c) {
    return c->relay == nullptr ? PeerId() : c->relay->self_;
  }
  // When what this end sends now comes to the other one, or to the relay on the way.
  Tick FirstArrival(const ConnectionPtr& c);
  // At the other end, `first` being when it is there or at the relay.
  void Deliver(const ConnectionPtr& c, Tick first, std::function<void()> event);
  // The same for what belongs to no connection yet. `relay`: 0, or it is lost if that one is not
  // there.
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
  // Something small that keeps its place among the frames of the control lane.
  void SendOnControl(const ConnectionPtr& c, std::function<void()> at_other_end);
  void Pump(const ConnectionPtr& c, int end);
  void Begin(const ConnectionPtr& c, int end, size_t lane, std::shared_ptr<Segment> segment);
  void LoseLane(const ConnectionPtr& c, int from, size_t number);
  void Abandon(const ConnectionPtr& c, const std::shared_ptr<Segment>& segment);
  void Repeat(const ConnectionPtr& c, const Segment& lost);
  void SegmentSent(const std::shared_ptr<Segment>& segment);
  // Half of the payload is here: `bytes` of it from `at` on.
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

  std::map<TokenKey, std::string> tokens_;
  std::vector<Request> requests_;
  std::map<GroupAt, std::map<PeerId, PeerId>> keep_;  // through which relay
  std::map<peerd::LinkKey, ConnectionPtr> links_;
  std::vector<ConnectionPtr> finishing_;
  std::vector<ConnectionPtr> carried_;  // of others, through this one
  // Frames that wait for the next one to go with.
  std::map<peerd::LinkKey, std::vector<std::pair<FrameHeader, std::vector<uint8_t>>>> waiting_;
  Port port_ = Port::kOpen;
  std::map<uint64_t, TryAnswer> tries_;  // not answered
  std::vector<Receive> receives_;
  std::set<PeerId> flipped_;
  std::map<uint64_t, std::shared_ptr<Segment>> segments_;  // not Sent, by cookie
};

}  // namespace longhaul::sim
