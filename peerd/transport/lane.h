// One TCP connection of a link, from the end of its handshake to its close.
//
//   open --Finish()--> finishing: what is queued is sent, a CLOSE behind it, what comes is thrown
//       away, then closed
//   open, finishing --Abort(), or the connection breaks--> aborting: operations are cancelled, the
//       socket is closed with a reset, zero-copy notices are waited for
//   finishing, aborting --> ended: OnLaneEnded(); the lane may be destroyed
//
// A control lane carries small frames both ways: those of one turn of the ring, and those that come
// while others are being sent, go out together, so a burst of frames costs one system call and
// wakes the other side once. Frames that may wait go with the next ones that may not.
//
// The end of the stream without a CLOSE before it breaks the lane: it says nothing about the peer.
//
// A data lane pulls segments from its owner whenever it has sent what it had: the faster lane
// carries more. It receives the payload straight into the place that the owner names, together with
// the next header in the same call, so that a stream of segments costs one call each.
//
// Every segment that was pulled comes back by OnLaneSegmentSent() exactly once, when the kernel
// does not refer to its memory any more. Whether it has arrived is another matter: the n-th segment
// that was pulled is the n-th that the other end counts as received. It says how many it has with
// each PING, and sends one after every LH_SEGMENTS_PER_ACK of them.
//
// Threads: the ring's. Calls of the owner come from within Ring::RunOnce() only.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/transport/control_framing.h"
#include "peerd/transport/segment_framing.h"
#include "peerd/transport/zero_copy_gate.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

class Lane;

class LaneOwner {
 public:
  virtual ~LaneOwner() = default;
  // An error of these four breaks the lane.
  virtual absl::Status OnLaneFrame(Lane* lane, const FrameHeader& header,
                                   std::span<const uint8_t> payload) = 0;
  virtual absl::StatusOr<uint8_t*> OnLaneData(Lane* lane, const FrameHeader& header) = 0;
  virtual absl::Status OnLaneDataReceived(Lane* lane, const FrameHeader& header) = 0;
  // Data lanes: the other end has the first `segments` of those that were pulled.
  virtual absl::Status OnLaneAcked(Lane* lane, uint64_t segments) = 0;
  // The payload whose place was named last will not be completed: nothing writes there any more.
  // Follows the end of a lane that was aborted, unless that receive was detached.
  virtual void OnLaneDataAbandoned(Lane* lane, const FrameHeader& header) = 0;
  // Takes the next segment off the queue unless its payload is larger than `bytes_max`: kAnyBytes
  // for the first of those that the lane sends at once.
  virtual bool NextSegment(Lane* lane, uint32_t bytes_max, OutgoingSegment* segment) = 0;
  // The registered buffer that holds these bytes, or -1.
  virtual int FindBuffer(const uint8_t* data, size_t bytes) = 0;
  virtual void OnLaneSegmentSent(uint64_t cookie) = 0;
  // The other side sent CLOSE: nothing follows but the end. The owner may abort or finish the lane.
  virtual void OnLaneClosing(Lane* lane, bool given_up) = 0;
  // The end after a CLOSE: what is sent may still arrive there.
  virtual void OnLanePeerEnded(Lane* lane) = 0;
  // The connection is of no use any more; the owner calls Abort(). `protocol`: by what it sent.
  virtual void OnLaneBroken(Lane* lane, const std::string& reason, bool protocol) = 0;
  // The last call. Do not destroy the lane from within it.
  virtual void OnLaneEnded(Lane* lane) = 0;
};

inline constexpr uint32_t kAnyBytes = UINT32_MAX;
// What waits to be sent on a control lane, at most.
inline constexpr size_t kControlQueueBytesMax = 512 << 20;

struct LaneOptions {
  LaneKind kind = LaneKind::kControl;
  uint32_t index = 0;                 // of a data lane, for the owner
  std::string name;                   // for reasons: "control lane to 10.0.0.3:29700"
  ZeroCopyGate* zero_copy = nullptr;  // of the link; nullptr: not at all
  size_t queue_bytes_max = kControlQueueBytesMax;
};

struct LaneStats {
  uint64_t bytes_sent = 0;  // payload of segments
  uint64_t bytes_received = 0;
  uint64_t bytes_discarded = 0;
  uint64_t state_bytes = 0;  // of CHUNK_DATA, in frames that are not complete, too
  uint64_t zero_copy_copied = 0;

  void Add(const LaneStats& other) {
    bytes_sent += other.bytes_sent;
    bytes_received += other.bytes_received;
    bytes_discarded += other.bytes_discarded;
    state_bytes += other.state_bytes;
    zero_copy_copied += other.zero_copy_copied;
  }
};

class Lane {
 public:
  // Takes over `fd`, connected and tuned. Neither `ring` nor `owner` may go first.
  Lane(Ring* ring, int fd, LaneOptions options, LaneOwner* owner);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void StartReceiving();
  // Control lanes. False: too much is queued, the other side does not read.
  bool SendFrame(const FrameHeader& header, std::span<const uint8_t> payload);
  // The same of whole frames that are encoded already. `may_wait`: they go with the next ones, or
  // by themselves after kHoldUs: for what nobody waits for.
  bool SendFrames(std::span<const uint8_t> bytes, bool may_wait = false);
  // The same of a frame without payload of which only the newest matters. It takes the place of one
  // of its type that has not begun to be sent: to answer who asks and does not read costs nothing.
  bool SendNewest(const FrameHeader& header);
  // Data lanes: there may be a segment to pull.
  void Pull();
  // Data lanes: lets the other side hear something, unless segments are under way. `quiet_ms`: how
  // much longer than usual it may hear nothing after that.
  // False: it was not said, since segments are under way.
  bool Ping(uint32_t quiet_ms);
  // Data lanes: if the payload being received is one of these, the rest of it goes nowhere and
  // `done` follows once its memory is free, not from within this call.
  bool Detach(const std::function<bool(const FrameHeader&)>& names,
              absl::AnyInvocable<void()> done);

  // `flags` of the CLOSE.
  void Finish(uint8_t flags = 0);
  void Abort();

  void Tune(const StreamTuning& tuning);
  void SetLongWay();
  // How long what was sent may be unacknowledged before the connection counts as lost.
  void SetUserTimeout(uint32_t ms);
  bool open() const { return state_ == State::kOpen; }
  bool ended() const { return state_ == State::kEnded; }
  bool peer_ended() const { return peer_ended_; }
  LaneKind kind() const { return options_.kind; }
  uint32_t index() const { return options_.index; }
  const std::string& name() const { return options_.name; }
  Tick last_heard() const { return last_heard_; }
  // Data lanes: how much longer than usual the other side said that it may be silent.
  int64_t quiet_us() const { return quiet_us_; }
  // Segments that came in whole: all of them before the first that did not.
  uint64_t received() const { return received_; }
  // The owner was not running: silence until now says nothing about the other side.
  void ForgiveSilence(int64_t us) { last_heard_ = last_heard_ + us; }
  const LaneStats& stats() const { return stats_; }
  // None: it is closed, or the system does not say.
  std::optional<TcpDelivery> Delivery() const;

 private:
  enum class State { kOpen, kFinishing, kAborting, kEnded };
  static constexpr int64_t kHoldUs = 2000;
  // A segment that was sent without copying, until its last notice.
  struct ZeroCopySend {
    uint64_t cookie = 0;
    Tick begun;
    uint32_t notices = 0;
    bool sent = false;
    bool used = false;
  };

  void Receive();
  void OnReceived(IoResult result);
  void OnPeerEnded();
  void TakeControl(size_t bytes);
  void TakeData(size_t bytes);
  bool TakeHeader();
  void TakePayload();
  void RunDetached();

  void SendSoon();
  void SendInTime();
  void SendControl();
  void FillBatch();
  void AcknowledgeSoon();
  void SendPing();
  void SendBare(const FrameHeader& header);
  void SendBatch();
  void OnSent(int value);
  void AdvanceControl(size_t bytes);
  void AdvanceBatch(size_t bytes);
  void OnZeroCopy(size_t index, bool first, IoResult result);
  bool FallBackToCopying(int value);
  void ReleaseBatch();
  void ReleaseZeroCopy(size_t index);

  void Broken(const std::string& reason, bool protocol);
  void Settle();
  void MaybeShutdown();
  void Post();
  void End(bool abort);

  Ring* const ring_;
  const int fd_;
  LaneOptions options_;
  LaneOwner* const owner_;
  State state_ = State::kOpen;
  Tick last_heard_;
  int64_t quiet_us_ = 0;
  uint32_t user_timeout_ms_ = 0;  // 0: as it came
  LaneStats stats_;

  // Operations in flight; 0: none.
  IoId recv_id_ = 0;
  IoId send_id_ = 0;
  IoId post_id_ = 0;      // brings an end without operations into a callback
  IoId hold_id_ = 0;      // sends what may wait
  uint32_t notices_ = 0;  // zero-copy notices to come
  bool socket_open_ = true;
  bool shutdown_ = false;  // finishing: our direction is ended
  bool closing_ = false;   // the other side sent CLOSE
  bool peer_ended_ = false;
  uint8_t close_flags_ = 0;
  bool close_queued_ = false;

  // Receiving.
  ControlReader control_in_;
  SegmentReader segments_in_;
  uint64_t received_ = 0;
  uint64_t received_told_ = 0;      // to the other end
  bool recv_writes_place_ = false;  // the receive in flight may still write to a payload's place
  std::vector<uint8_t> sink_;       // finishing
  iovec recv_parts_[2];
  msghdr recv_message_{};
  std::vector<absl::AnyInvocable<void()>> detached_;

  // Sending, control lane.
  bool send_due_ = false;  // SendControl() comes before the ring submits
  ControlWriter control_out_;

  // Sending, data lane.
  bool ack_due_ = false;   // before the next segment
  uint32_t quiet_ms_ = 0;  // as Ping() was told last
  SegmentBatch batch_;
  bool batch_zero_copy_ = false;
  bool batch_bare_ = false;         // a frame of our own, no segment
  size_t batch_record_ = SIZE_MAX;  // in zero_copy_, of the only segment of the batch
  SegmentBatch::PartsArray send_parts_;
  msghdr send_message_{};
  std::deque<ZeroCopySend> zero_copy_;
  std::vector<size_t> zero_copy_free_;
};

}  // namespace longhaul::peerd
