// All lanes to one peer, from the control lane's handshake to the end of the last lane.
//
//   forming              established by PING and PONG, or by CONFIRM at the side that was dialled:
//                        standing
//   standing             MarkOpen(), Deliver(): frames are handed over, segments flow
//   any                  Break(): broken; every lane ends, nothing is handed over any more
//   any                  Finish(): finishing; what is queued is sent, then the lanes are closed
//   broken, finishing    the last lane has ended: OnLinkEnded(); the link may be destroyed
//
// The data lanes pull segments from one queue: each the next one when it has room, unless it had
// better leave that one to others (LaneSchedule).
//
// A standing link outlives its lanes. Whoever dialled it dials what is missing, with serials that
// grow, so that the two ends always agree which connection they speak of:
//
//   data lane      Each end keeps every segment that it put on the lane until it is acknowledged,
//                  and puts no more on all lanes than it may keep. An end that has lost a lane says
//                  LANE_LOST and how many segments came in whole, once its receive has ended; the
//                  other one loses the lane too, says the same, and puts the segments that did not
//                  arrive back to the front of the queue. A place that was half filled is given
//                  back first.
//   control lane   Frames that matter are numbered and kept until the other end has acknowledged
//                  them. On the lane that takes the place of a lost one each end says RESUME and
//                  how many it has, and the other one sends the rest.
//
// The link breaks when nothing was heard on any lane for as long as it is patient (detect_ms, more
// on a path of long round trips, see Patience()), when what is lost cannot be dialled for twice
// detect_ms, when the other side says that it closes or has given the link up, or breaks the
// protocol.
//
// Threads: the ring's. Calls of the owner come from within Ring::RunOnce(), except OnLinkBroken()
// and OnLinkEnded(), which may also come from within calls.
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

#include "peerd/transport/black_hole.h"
#include "peerd/transport/lane.h"
#include "peerd/transport/lane_schedule.h"
#include "peerd/transport/numbered_frames.h"
#include "peerd/transport/segment_queue.h"
#include "peerd/transport/transport.h"
#include "peerd/transport/unacked_segments.h"

namespace longhaul::peerd {

class Link;

class LinkOwner {
 public:
  virtual ~LinkOwner() = default;
  // The dialled side has answered: the control lane stands.
  virtual void OnLinkEstablished(Link* link) = 0;
  // `optional`: if they cannot be built, the link stays as it is.
  // `lanes`: so many altogether; 0: as many as are usual.
  virtual void OnWantLanes(Link* link, bool optional, uint32_t lanes) = 0;
  virtual absl::Status OnLinkFrame(Link* link, const FrameHeader& header,
                                   std::span<const uint8_t> payload) = 0;
  virtual absl::StatusOr<uint8_t*> OnLinkData(Link* link, const FrameHeader& header) = 0;
  virtual absl::Status OnLinkDataReceived(Link* link, const FrameHeader& header) = 0;
  virtual void OnLinkDataAbandoned(Link* link, const FrameHeader& header) = 0;
  virtual int FindBuffer(const uint8_t* data, size_t bytes) = 0;
  virtual void OnLinkSegmentSent(uint64_t cookie) = 0;
  // A segment goes out once more: a cookie for that, or 0 if its owner has no use for it.
  virtual uint64_t OnLinkSegmentRepeat(uint64_t owner) = 0;
  // Control frames that were sent once more.
  virtual void OnLinkFramesRepeated(uint64_t frames) = 0;
  // Segments that never got onto a lane; report them later, not from within this call.
  virtual void OnLinkSegmentsDropped(std::vector<uint64_t> cookies) = 0;
  // The other side is closing: Work() is due soon.
  virtual void OnLinkClosing(Link* link) = 0;
  // A lane is lost, the link is not: Work() is due, and if we dialled the link, a new lane is to be
  // dialled.
  virtual void OnLinkLaneLost(Link* link, LaneKind kind, const std::string& reason) = 0;
  virtual void OnLinkLaneBack(Link* link, const std::string& name) = 0;
  // Large packets vanish on the way: new lanes are to use small ones, as small_packets() says.
  virtual void OnLinkSmallPackets(Link* link) = 0;
  // It sends on so many data lanes from now on, and would if it had so many. `rate`: what it got
  // before, bytes a second. Act on it later, not from within this call.
  virtual void OnLinkLaneCount(Link* link, uint32_t lanes, uint64_t rate) = 0;
  // Work() is due then, or before.
  virtual void OnLinkDue(Link* link, Tick at) = 0;
  // A data lane delivers far less than the others, and is left alone for a while.
  virtual void OnLinkLaneRests(Link* link) = 0;
  // Destroy it later, not from within this call.
  virtual void OnLinkLaneEnded(std::unique_ptr<Lane> lane) = 0;
  // The link is broken, its lanes are ending.
  virtual void OnLinkBroken(Link* link, const std::string& reason, bool protocol) = 0;
  // The last call. Do not destroy the link from within it.
  virtual void OnLinkEnded(Link* link) = 0;
};

struct LinkOptions {
  LinkKey key;
  uint64_t id = 0;  // NewLinkId() of the HELLO that made it
  SocketAddress remote;
  PeerId relay;          // it goes through that one, which is at `remote`; 0: straight
  bool dialled = false;  // by us
  // What the control lane was authenticated with.
  uint32_t group = 0;
  Epoch epoch;
  ZeroCopyGate::Use zero_copy = ZeroCopyGate::Use::kNever;  // on data lanes
  // On a long way: finds out how many data lanes are of use. Else all are used.
  bool count_lanes = false;
  uint64_t probed_rate = 0;  // what a probe of this path has shown, bytes a second; 0: nothing
};

class Link final : public LaneOwner {
 public:
  // `fd`: the control lane.
  Link(Ring* ring, int fd, LinkOptions options, LinkOwner* owner);
  ~Link() override;

  const LinkOptions& options() const { return options_; }
  const LinkKey& key() const { return options_.key; }
  bool alive() const { return state_ == State::kAlive; }
  bool ended() const { return state_ == State::kEnded; }
  bool finishing() const { return state_ == State::kFinishing; }
  bool established() const { return established_; }
  bool open() const { return open_ && alive(); }
  // Lanes that end now are not lost.
  bool closing() const { return !closing_lane_.empty(); }

  // The side that dials draws the serials of new lanes.
  uint64_t NewSerial() { return next_serial_++; }

  bool has_control() const { return control_ != nullptr; }
  // Whether a control lane of this serial would be newer than any before.
  bool FitsControl(uint64_t serial) const;
  void ResumeControl(int fd, uint64_t serial);

  // There are to be so many data lanes, if there are fewer.
  void ExpectDataLanes(uint32_t count);
  // A data lane `index` of `count` or more. False: it does not fit the lanes that are there.
  bool FitsDataLane(uint32_t index, uint32_t count, uint64_t serial) const;
  void AddDataLane(int fd, uint32_t index, uint32_t count, uint64_t serial);
  bool small_packets() const { return black_hole_.small(); }
  bool HasDataLane(uint32_t index) const;
  uint32_t data_lanes() const { return data_lanes_; }
  // All of those that the dialler announced, and at least one.
  bool data_complete() const { return !data_.empty() && data_lanes_ == data_.size(); }
  // They were complete before, and the link has some of them.
  bool data_usable() const { return data_were_complete_ && data_lanes_ > 0; }
  bool data_were_complete() const { return data_were_complete_; }
  // The lanes that stand will do; those that are missing count as lost, and are repaired as such.
  void StartWithFewer() { data_were_complete_ |= data_lanes_ > 0; }
  uint32_t data_lanes_announced() const { return static_cast<uint32_t>(data_.size()); }
  uint32_t lanes() const;
  // Of the data lanes that stand, those that it sends on.
  uint32_t lanes_used() const;
  LinkUse BestUse() const;
  // A probe saw the path carry so much.
  void Probed(uint64_t bytes_per_second);

  // The listener is being told of the link: frames and segments may be sent.
  void MarkOpen() { open_ = true; }
  // It has been told: hands over what came before, and receives data from now on.
  void Deliver();
  // The listener was told once, and so has to be told of the end.
  bool was_open() const { return open_; }

  // `may_wait`: of a numbered frame, see Lane::SendFrames().
  void SendControl(const FrameHeader& header, std::span<const uint8_t> payload,
                   bool may_wait = false);
  void SendSegment(const OutgoingSegment& segment);
  void DropSegments(const std::unordered_set<uint64_t>& cookies);
  // Calls of `done` that follow, one per lane that is receiving one of these.
  int Detach(const ReceiveKey& key, const std::function<void()>& done);

  // Told to the other side, if that can be.
  void Break(const std::string& reason, bool protocol = false);
  // The other side does not know the link any more: breaks it, once what it may have sent before
  // had time to arrive.
  void OnUnknownThere(const std::string& lane);
  // It broke because the other side had given it up, which heard nothing, or too little, for long.
  bool given_up_there() const { return given_up_there_; }
  void Finish();
  // Ends a Finish() or Break() that takes too long.
  void Abort();

  // Sends PINGs when they are due, loses lanes that are stalled, breaks the link when it is silent
  // or could not be repaired (`repair_error`: why); when to call again.
  Tick Work(Tick now, uint32_t detect_ms, const std::string& repair_error);
  Tick last_heard() const;
  void ForgiveSilence(int64_t us);
  void Tune(const StreamTuning& tuning);
  int64_t rtt_us() const { return rtt_us_; }
  // No round trip took long of late.
  bool short_way() const;
  LaneStats stats() const;
  // Segments that were put on a lane and are not known to have arrived.
  size_t unacked() const { return unacked_; }
  // What the data lanes that were used since the last call have delivered.
  LinkDelivery PopDelivery();
  // Bytes that have arrived of what the data lanes that stand have sent.
  uint64_t arrived_bytes() const;

 private:
  enum class State { kAlive, kFinishing, kBroken, kEnded };
  struct DataLane {
    std::unique_ptr<Lane> lane;
    uint32_t index = 0;
    uint64_t serial = 0;
    UnackedSegments segments;
    uint64_t sent_measured = 0;  // of segments.sent(), when its delivery was looked at last
    uint64_t sent_dry = 0;       // the same when there was nothing more
    Tick nudge_at = kNever;
    Tick sent_first;  // its first segment
    // Of a lost one:
    bool barren = false;    // as black_hole.h says
    bool told = false;      // LANE_LOST is sent
    bool answered = false;  // and received
  };

  absl::Status OnLaneFrame(Lane* lane, const FrameHeader& header,
                           std::span<const uint8_t> payload) override;
  absl::StatusOr<uint8_t*> OnLaneData(Lane* lane, const FrameHeader& header) override;
  absl::Status OnLaneDataReceived(Lane* lane, const FrameHeader& header) override;
  absl::Status OnLaneAcked(Lane* lane, uint64_t segments) override;
  void OnLaneDataAbandoned(Lane* lane, const FrameHeader& header) override;
  bool NextSegment(Lane* lane, uint32_t bytes_max, OutgoingSegment* segment) override;
  int FindBuffer(const uint8_t* data, size_t bytes) override;
  void OnLaneSegmentSent(uint64_t cookie) override;
  void OnLaneClosing(Lane* lane, bool given_up) override;
  void OnLanePeerEnded(Lane* lane) override;
  void OnLaneBroken(Lane* lane, const std::string& reason, bool protocol) override;
  void OnLaneEnded(Lane* lane) override;

  std::unique_ptr<Lane> MakeControl(int fd);
  absl::Status HandleFrame(const FrameHeader& header, std::span<const uint8_t> payload);
  absl::Status OnResume(const FrameHeader& header);
  absl::Status OnAcked(uint64_t acked);
  absl::Status OnLaneLost(const FrameHeader& header);
  absl::Status OnUnknownLaneLost(uint32_t index, uint64_t serial);
  void OnPong(const FrameHeader& header);
  absl::Status Hold(const FrameHeader& header, std::span<const uint8_t> payload);
  void SendOnLane(const FrameHeader& header);
  void SendNumbered(const FrameHeader& header, std::span<const uint8_t> payload, bool may_wait);
  void PutNumberedOnLane(bool may_wait);
  void SendLaneLost(const DataLane& lost, uint64_t received);
  // At either end. The side that dials decides how large the packets of a lane are, both ways.
  void OnBarrenLane(LaneKind kind);
  bool WaitsLong(Tick since) const;
  bool Barren(const DataLane& data) const;
  void ActOnBlackHole();
  void ReplaceBarren();
  bool HeardOfLate() const;
  void Repeat(const UnackedSegments& lost);
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
  void SendPings(Tick now);
  void PingDataLanes(Tick now, uint32_t detect_ms);
  int64_t Patience(uint32_t detect_ms) const;
  void DropQueue();
  void CheckEnded();
  template <class F>
  void ForEachLane(F f) const;

  Ring* const ring_;
  const LinkOptions options_;
  LinkOwner* const owner_;
  State state_ = State::kAlive;
  bool established_ = false;
  bool open_ = false;
  bool delivering_ = false;
  uint64_t next_serial_ = 1;
  LaneStats gone_;               // of lanes that are no more
  Tick heard_;                   // on those
  uint64_t bytes_measured_ = 0;  // sent, when the delivery was looked at last

  // The control lane, or nullptr while it is lost.
  std::unique_ptr<Lane> control_;
  uint64_t control_serial_ = 0;
  Tick control_lost_;
  Tick control_since_;                               // it is in use
  uint64_t control_acked_ = 0;                       // frames, at that time
  bool control_barren_ = false;                      // the one before it, as black_hole.h says
  std::vector<std::unique_ptr<Lane>> old_controls_;  // that have not ended

  NumberedFrames frames_;

  std::vector<DataLane> data_;         // by lane index; without a lane: missing
  std::vector<uint64_t> last_serial_;  // by lane index: the newest that was in use or lost
  std::vector<DataLane> lost_;
  // LANE_LOST of lanes that are not known here: how many came before an answer was acknowledged,
  // and the number of the last answer.
  uint64_t unknown_lost_ = 0;
  uint64_t unknown_lost_answered_ = 0;
  size_t unacked_ = 0;  // segments that the lanes of data_ and lost_ keep
  ZeroCopyGate zero_copy_;
  uint32_t data_lanes_ = 0;
  bool data_were_complete_ = false;
  Tick data_lost_;  // the last one
  BlackHole black_hole_;
  BlackHole::Verdict black_hole_verdict_ = BlackHole::Verdict::kWait;  // to be acted on
  uint32_t detect_ms_ = 0;                                             // as Work() was told last
  SegmentQueue queue_;
  LaneSchedule schedule_;  // of the lanes of data_
  size_t next_lane_ = 0;   // that is offered the next segment first

  // Frames that came before Deliver().
  std::vector<std::pair<FrameHeader, std::vector<uint8_t>>> held_;
  size_t held_bytes_ = 0;

  // The first lane that the other side closes: the others may still bring what it had queued.
  std::string closing_lane_;
  Tick closing_since_;
  bool given_up_there_ = false;

  Tick last_ping_;
  Tick last_data_ping_;
  Tick last_segment_;        // put on a data lane
  bool quiet_told_ = false;  // on every data lane, with the last PING
  int64_t rtt_us_ = 0;
  int64_t rtt_high_us_ = 0;  // of the last ones the highest, which fades
};

}  // namespace longhaul::peerd
