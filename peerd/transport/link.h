// All lanes to one peer, from the control lane's handshake to the end of the last lane.
//
//   forming --(established by PING and PONG, or by CONFIRM at the side that was dialled)-->
//   standing standing --Open(): told to the listener--> frames are handed over, segments flow any
//   --Break()--> broken: every lane is aborted; nothing is handed over any more any --Finish()-->
//   finishing: what is queued is sent, then the lanes are closed broken, finishing --(last lane
//   ended)--> OnLinkEnded(); the link may be destroyed
//
// One queue of segments feeds all data lanes: each pulls the next one when it has room.
//
// Threads: the ring's. Calls of the owner come from within Ring::RunOnce(), except OnLinkBroken(),
// which may also come from within SendControl() and Tick().
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "peerd/transport/lane.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {

class Link;

class LinkOwner {
 public:
  virtual ~LinkOwner() = default;
  // The dialled side has answered: the control lane stands.
  virtual void OnLinkEstablished(Link* link) = 0;
  virtual void OnWantLanes(Link* link, uint32_t group, Epoch epoch) = 0;
  virtual absl::Status OnLinkFrame(Link* link, const FrameHeader& header,
                                   std::span<const uint8_t> payload) = 0;
  virtual absl::StatusOr<uint8_t*> OnLinkData(Link* link, const FrameHeader& header) = 0;
  virtual absl::Status OnLinkDataReceived(Link* link, const FrameHeader& header) = 0;
  virtual int FindBuffer(const uint8_t* data, size_t bytes) = 0;
  virtual void OnLinkSegmentSent(uint64_t cookie) = 0;
  // Segments that never got onto a lane; report them later, not from within this call.
  virtual void OnLinkSegmentsDropped(std::vector<uint64_t> cookies) = 0;
  // The other side is closing: Work() is due soon.
  virtual void OnLinkClosing(Link* link) = 0;
  // The link is broken, its lanes are being aborted.
  virtual void OnLinkBroken(Link* link, const std::string& reason, bool protocol) = 0;
  // The last call. Do not destroy the link from within it.
  virtual void OnLinkEnded(Link* link) = 0;
};

struct LinkOptions {
  LinkKey key;
  SocketAddress remote;
  bool dialled = false;  // by us
  // What the control lane was authenticated with.
  uint32_t group = 0;
  Epoch epoch;
  bool zero_copy = false;  // data lanes
  bool zero_copy_always = false;
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

  // A data lane `index` of `count`. False: it does not fit the lanes that are there.
  bool FitsDataLane(uint32_t index, uint32_t count) const;
  void AddDataLane(int fd, uint32_t index, uint32_t count);
  bool HasDataLane(uint32_t index) const;
  uint32_t data_lanes() const { return data_lanes_; }
  // All of those that the dialler announced, and at least one.
  bool data_complete() const { return !data_.empty() && data_lanes_ == data_.size(); }
  uint32_t data_lanes_announced() const { return static_cast<uint32_t>(data_.size()); }
  uint32_t lanes() const { return (alive() && established_ ? 1 : 0) + data_lanes_; }

  // The listener is being told of the link: frames and segments may be sent.
  void MarkOpen() { open_ = true; }
  // It has been told: hands over what came before, and receives data from now on.
  void Deliver();
  // The listener was told once, and so has to be told of the end.
  bool was_open() const { return open_; }

  void SendControl(const FrameHeader& header, std::span<const uint8_t> payload);
  void SendSegment(const OutgoingSegment& segment);
  void DropSegments(const std::unordered_set<uint64_t>& cookies);
  // Calls of `done` that follow, one per lane that is receiving for this attempt.
  int Detach(uint32_t group, OpOrdinal op, Epoch attempt, const std::function<void()>& done);

  void Break(const std::string& reason, bool protocol = false);
  void Finish();
  // Ends a Finish() that takes too long.
  void Abort();

  // Sends a PING when one is due and breaks the link when the other side has been silent; when to
  // call again.
  Tick Work(Tick now, uint32_t detect_ms);
  Tick last_heard() const { return control_->last_heard(); }
  void ForgiveSilence(int64_t us) { control_->ForgiveSilence(us); }
  void Tune(const StreamTuning& tuning);
  int64_t rtt_us() const { return rtt_us_; }
  LaneStats stats() const;

 private:
  enum class State { kAlive, kFinishing, kBroken, kEnded };

  absl::Status OnLaneFrame(Lane* lane, const FrameHeader& header,
                           std::span<const uint8_t> payload) override;
  absl::StatusOr<uint8_t*> OnLaneData(Lane* lane, const FrameHeader& header) override;
  absl::Status OnLaneDataReceived(Lane* lane, const FrameHeader& header) override;
  bool NextSegment(uint32_t bytes_max, OutgoingSegment* segment) override;
  int FindBuffer(const uint8_t* data, size_t bytes) override;
  void OnLaneSegmentSent(uint64_t cookie) override;
  void OnLanePeerEnded(Lane* lane) override;
  void OnLaneBroken(Lane* lane, const std::string& reason, bool protocol) override;
  void OnLaneEnded(Lane* lane) override;

  void OnPong(const FrameHeader& header);
  absl::Status Hold(const FrameHeader& header, std::span<const uint8_t> payload);
  void DropQueue();
  void AbortLanes();

  Ring* const ring_;
  const LinkOptions options_;
  LinkOwner* const owner_;
  State state_ = State::kAlive;
  bool established_ = false;
  bool open_ = false;
  bool delivering_ = false;

  std::unique_ptr<Lane> control_;
  std::vector<std::unique_ptr<Lane>> data_;  // by lane index
  uint32_t data_lanes_ = 0;
  std::deque<OutgoingSegment> queue_;
  size_t next_lane_ = 0;  // that is offered the next segment first

  // Frames that came before Deliver().
  std::vector<std::pair<FrameHeader, std::vector<uint8_t>>> held_;
  size_t held_bytes_ = 0;

  // The first lane that the other side ended: the others may still bring what it had queued.
  std::string closing_lane_;
  Tick closing_since_;

  Tick last_ping_;
  int64_t rtt_us_ = 0;
};

}  // namespace longhaul::peerd
