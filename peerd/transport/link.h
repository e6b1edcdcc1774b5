// All lanes to one peer, from the control lane's handshake to the end of the last lane.
//
//   forming              The side that was dialled leaves this state at once: CONFIRM proved the
//                        dialer. The dialer leaves it with the PONG to its first PING.
//   established          MarkOpen() lets the owner send. After Deliver() frames are handed over and
//                        segments are received.
//   broken               After Break(): every lane ends, and nothing is handed over any more.
//   finishing            After Finish(): what is queued is sent, then the lanes are closed.
//   ended                From broken or finishing, when the last lane has ended: OnLinkEnded(). The
//                        link may be destroyed.
//
// The data lanes pull segments from one queue. A lane that has room takes the next segment, unless
// LinkPath leaves the segment to other lanes.
//
// An established link outlives its lanes. The side that dialled the link also dials its lost lanes.
// Serials of lanes grow, so both ends can tell a new connection from an earlier one:
//
//   data lane      Each end keeps the segments that it put on a lane until they are acknowledged.
//                  The total over all lanes is limited. An end that loses a lane first gives back
//                  the place of a half-received payload. When its receive has ended, it sends
//                  LANE_LOST with the number of segments that came in whole. The other end loses
//                  the lane too, sends LANE_LOST likewise, and puts the segments that did not
//                  arrive at the front of its queue.
//   control lane   See control_channel.h.
//
// The link breaks when
//   - nothing was heard on any lane for Patience() (detect_ms, more if round trips are long),
//   - the control lane or all data lanes are lost and none is replaced in 2 * detect_ms,
//   - the peer closes the link, has given it up, or breaks the protocol.
//
// Threads: the ring's. The owner is called from within Ring::RunOnce(). Only OnLinkBroken() and
// OnLinkEnded() may also come from within calls of this class.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "peerd/paths/black_hole.h"
#include "peerd/paths/link_path.h"
#include "peerd/transport/control_channel.h"
#include "peerd/transport/lane.h"
#include "peerd/transport/link_owner.h"
#include "peerd/transport/segment_queue.h"
#include "peerd/transport/transport.h"
#include "peerd/transport/unacked_segments.h"

namespace longhaul::peerd {

class Link final : public LaneOwner, private ControlChannelOwner {
 public:
  // `control`: the control lane.
  Link(Ring* ring, LaneSocket control, LinkOptions options, LinkOwner* owner);

  const LinkOptions& options() const { return options_; }
  const LinkKey& key() const { return options_.key; }
  bool alive() const { return state_ == State::kAlive; }
  bool ended() const { return state_ == State::kEnded; }
  bool finishing() const { return state_ == State::kFinishing; }
  bool established() const { return control_.established(); }
  bool open() const { return open_ && alive(); }
  // The peer is closing the link. A lane that ends now is not lost.
  bool closing() const { return !closing_lane_.empty(); }

  // Returns a serial for a new lane. Only the side that dialled the link does this.
  uint64_t NewSerial() { return next_serial_++; }

  bool has_control() const { return control_.lane() != nullptr; }
  // Whether a control lane with this serial would be newer than every earlier one.
  bool FitsControl(uint64_t serial) const;
  // The lane must be sealed if the link is.
  void ResumeControl(LaneSocket control, uint64_t serial);
  // The lanes of the link are sealed. The keys of its data lanes derive from the TLS session of its
  // first control lane, which both ends remember.
  bool sealed() const { return secret_.has_value(); }
  // What proves that a straight data lane of a link in clear is opened by the other end, and not by
  // a third peer of the epoch. From the first control lane, too. Empty if the link is sealed.
  const std::string& clear_secret() const { return clear_secret_; }

  // Raises the number of data lanes to `count`. Never lowers it.
  void ExpectDataLanes(uint32_t count);
  // Whether data lane `index` of `count` may be added: the link is established and not closing, and
  // `serial` is newer than that of every earlier lane with this index.
  bool FitsDataLane(uint32_t index, uint32_t count, uint64_t serial) const;
  void AddDataLane(int fd, uint32_t index, uint32_t count, uint64_t serial);
  bool small_packets() const { return black_hole_.small(); }
  bool HasDataLane(uint32_t index) const;
  uint32_t data_lanes() const override { return data_lanes_; }
  // All announced data lanes are up, and at least one was announced.
  bool data_complete() const { return !data_.empty() && data_lanes_ == data_.size(); }
  // The data lanes were complete once, and at least one is up.
  bool data_usable() const { return data_were_complete_ && data_lanes_ > 0; }
  bool data_were_complete() const { return data_were_complete_; }
  // Treats the data lanes as complete if at least one is up. From now on the missing ones count as
  // lost, and are repaired like lost ones.
  void StartWithFewer() { data_were_complete_ |= data_lanes_ > 0; }
  uint32_t data_lanes_announced() const { return static_cast<uint32_t>(data_.size()); }
  uint32_t lanes() const;
  // Returns how many of the data lanes that are up are sent on.
  uint32_t lanes_used() const;
  LinkUse BestUse() const;
  // A probe measured this rate on the path.
  void Probed(uint64_t bytes_per_second);

  // The listener is about to be told that the link is up. From now on frames and segments may be
  // sent.
  void MarkOpen() { open_ = true; }
  // The listener has been told. Hands over the frames that came before, and starts to receive data.
  void Deliver();
  // The listener was told that the link is up, so it has to be told of the end.
  bool was_open() const { return open_; }

  // `may_wait` concerns numbered frames only, see Lane::SendFrames().
  void SendControl(const FrameHeader& header, std::span<const uint8_t> payload,
                   bool may_wait = false) {
    control_.Send(header, payload, may_wait);
  }
  void SendSegment(const OutgoingSegment& segment);
  void DropSegments(FrameType type, const std::unordered_set<uint64_t>& cookies);
  // Stops receiving the payloads that `key` names. Returns how many calls of `done` follow: one for
  // each lane with such a receive in flight.
  int Detach(const ReceiveKey& key, const std::function<void()>& done);

  // Breaks the link, and tells the peer if there is a control lane.
  void Break(const std::string& reason, bool protocol = false);
  // The peer has answered that it does not know the link any more. Breaks the link: at once if
  // there is no control lane, otherwise after a delay in which frames sent before can arrive.
  void OnUnknownThere(const std::string& lane);
  // The link broke because the peer had given it up. The peer heard nothing, or too little, for
  // long.
  bool given_up_there() const { return given_up_there_; }
  void Finish();
  // Ends the lanes at once, also during a Finish() or Break() that takes too long.
  void Abort();

  // Sends PINGs that are due, and drops stalled lanes. Breaks the link if it is silent or was not
  // repaired in time; `repair_error` says why. Returns when to call again.
  Tick Work(Tick now, uint32_t detect_ms, const std::string& repair_error);
  Tick last_heard() const;
  void ForgiveSilence(int64_t us);
  void Tune(const StreamTuning& tuning);
  // The congestion control of data lanes, if the path is long.
  void SetCongestion(const std::string& congestion);
  bool long_way() const override { return path_.long_way(); }
  // One way. 0: unknown, or the path is short.
  uint32_t latency_us() const {
    return path_.long_way() ? static_cast<uint32_t>(path_.lanes().rtt_us() / 2) : 0;
  }
  int64_t rtt_us() const { return control_.rtt_us(); }
  // As in LinkStats.
  int64_t shortest_rtt_us() const;
  // True if a round trip was measured, and no recent one took long.
  bool short_way() const;
  LaneStats stats() const;
  // Returns how many segments were put on a lane and are not acknowledged.
  size_t unacked() const { return unacked_; }
  // Returns what the data lanes that were used since the last call have delivered.
  RateSample PopRate();
  // Returns how long this link keeps us waiting, and on which lane.
  LinkWait PopWait(Tick now);
  // Returns what has come and gone since the last call, see LinkMeter::PopArrivals().
  HostPaths::LinkSample PopSample();
  // Returns for how long segments have waited for a lane without a break. 0: none waits.
  int64_t waiting_us() const;
  // Returns how many bytes sent on the data lanes that are up have arrived at the peer.
  uint64_t arrived_bytes() const;

 private:
  enum class State { kAlive, kFinishing, kBroken, kEnded };
  struct DataLane {
    std::unique_ptr<Lane> lane;
    uint32_t index = 0;
    uint64_t serial = 0;
    UnackedSegments segments;
    uint64_t sent_dry = 0;  // segments.sent() when the queue was last found empty
    Tick nudge_at = kNever;
    Tick sent_first;  // when the first segment was put on the lane
    // Only for a lost lane:
    bool barren = false;    // nothing that it carried ever arrived (black_hole.h)
    bool told = false;      // LANE_LOST was sent
    bool answered = false;  // LANE_LOST was received
  };

  absl::Status OnLaneFrame(Lane*, const FrameHeader& header,
                           std::span<const uint8_t> payload) override {
    return control_.OnFrame(header, payload);
  }
  absl::StatusOr<uint8_t*> OnLaneData(Lane* lane, const FrameHeader& header) override;
  absl::Status OnLaneDataReceived(Lane* lane, const FrameHeader& header) override;
  absl::Status OnLaneAcked(Lane* lane, uint64_t segments) override;
  void OnLaneDataAbandoned(Lane* lane, const FrameHeader& header) override;
  bool NextSegment(Lane* lane, uint32_t bytes_max, OutgoingSegment* segment) override;
  int FindBuffer(const uint8_t* data, size_t bytes) override;
  void OnLaneSegmentSent(FrameType type, uint64_t cookie) override;
  void OnLaneClosing(Lane* lane, bool given_up) override;
  void OnLanePeerEnded(Lane* lane) override;
  void OnLaneBroken(Lane* lane, const std::string& reason, bool protocol) override;
  void OnLaneEnded(Lane* lane) override;

  void OnControlAnswered() override { owner_->OnLinkEstablished(this); }
  absl::Status OnControlFrame(const FrameHeader& header, std::span<const uint8_t> payload) override;
  void OnControlResumed(uint64_t repeated, bool barren) override;
  void OnControlStuck(const std::string& reason) override { BreakAs(reason, false, false); }
  void SendParts(const std::vector<OutgoingSegment>& parts) override;

  std::unique_ptr<Lane> MakeControl(LaneSocket control);
  std::optional<LaneKeys> KeysOf(uint32_t index, uint64_t serial) const;
  absl::Status OnLaneLost(const FrameHeader& header);
  absl::Status OnUnknownLaneLost(uint32_t index, uint64_t serial);
  void SendLaneLost(const DataLane& lost, uint64_t received);
  // A barren lane (black_hole.h: nothing that it carried ever arrived) was lost, here or at the
  // peer. (The dialer decides the size of packets both
  // ways.)
  void OnBarrenDataLane(uint64_t serial);
  void OnBarrenLane(LaneKind kind);
  bool WaitsLong(Tick since) const;
  bool Barren(const DataLane& data) const;
  void ActOnBlackHole();
  void ReplaceBarren();
  bool HeardOfLate() const;
  void Repeat(const UnackedSegments& lost);
  void Give(uint32_t index, Tick now, OutgoingSegment* segment);
  void RanDry(DataLane* data, Tick now);
  Tick Nudge(Tick now);
  void TellLaneCount();
  void PullAll();
  void LoseLane(Lane* lane, const std::string& reason);
  void LoseControl();
  void LoseData(uint32_t index);
  void MarkClosing(const std::string& lane);
  void MaybeClosed();
  void BreakAs(const std::string& reason, bool protocol, bool tell);
  void BreakGivenUp(const std::string& lane);
  bool BreakIfDead(Tick now, uint32_t detect_ms, const std::string& repair_error);
  void LoseStalled(Tick now, uint32_t detect_ms);
  void TuneLanes(uint32_t detect_ms);
  // As LinkMeter asks.
  std::optional<TcpDelivery> AskTcp(uint32_t lane) const;
  std::vector<LinkMeter::Lane> MeteredLanes() const;
  void PingDataLanes(Tick now, uint32_t detect_ms);
  int64_t Patience(uint32_t detect_ms) const;
  void DropQueue();
  void CheckEnded();
  template <class F>
  void ForEachLane(F f) const;

  Ring* const ring_;
  // From which the keys of data lanes derive.
  struct Secret {
    Aead aead = Aead::kAes128Gcm;
    KeySecret secret;
  };

  const LinkOptions options_;
  LinkOwner* const owner_;
  std::optional<Secret> secret_;  // of a sealed link
  std::string clear_secret_;      // of a link in clear
  State state_ = State::kAlive;
  bool open_ = false;
  uint64_t next_serial_ = 1;
  LaneStats gone_;  // of lanes that have ended
  Tick heard_;      // when something was last heard on a lane that was lost

  ControlChannel control_;
  bool control_barren_ = false;  // the control lane before this one was barren, see black_hole.h

  std::vector<DataLane> data_;         // by index; a lane that is nullptr is missing
  std::vector<uint64_t> last_serial_;  // by index: the newest serial that was in use or lost
  std::vector<DataLane> lost_;
  // LANE_LOST frames for lanes unknown here: how many came since the peer last acknowledged one of
  // our answers, and the frame number of our last answer.
  uint64_t unknown_lost_ = 0;
  uint64_t unknown_lost_answered_ = 0;
  size_t unacked_ = 0;  // segments that lanes in data_ and lost_ keep
  ZeroCopyGate zero_copy_;
  uint32_t data_lanes_ = 0;
  bool data_were_complete_ = false;
  Tick data_lost_;  // when a data lane was last lost
  BlackHole black_hole_;
  uint64_t first_small_serial_ = 0;  // earlier lanes were dialled with large packets
  BlackHole::Verdict black_hole_verdict_ = BlackHole::Verdict::kWait;  // Work() acts on it
  uint32_t detect_ms_ = 0;                                             // from the last Work()
  SegmentQueue queue_;
  Tick waiting_since_;  // when a segment last came into the empty queue
  std::string congestion_;
  LinkPath path_;         // for the lanes in data_
  size_t next_lane_ = 0;  // the lane that was offered a segment last

  // The first lane on which the peer sent CLOSE. Other lanes may still bring what was queued on
  // them.
  std::string closing_lane_;
  Tick closing_since_;
  bool given_up_there_ = false;

  Tick last_ping_;
  Tick last_data_ping_;
  Tick last_segment_;  // when a segment was last put on a data lane
  // The last PING on every data lane told the peer how much longer than usual this end may be
  // silent.
  bool quiet_told_ = false;
};

}  // namespace longhaul::peerd
