// One TCP connection of a link, from the end of its handshake to its close.
//
//   open        Frames or segments move.
//   finishing   After Finish(): what is queued is sent, then CLOSE. What is received is thrown
//               away. When both directions have ended, the socket is closed.
//   aborting    After Abort(), or when a finishing connection breaks: operations are cancelled, the
//               socket is closed with a reset, and the lane waits for the zero-copy notices.
//   ended       From finishing or aborting: OnLaneEnded(). The lane may be destroyed.
//
// A control lane carries small frames both ways. Frames that are queued during one
// Ring::RunOnce() go out together, and so do frames that come while others are being sent. So a
// burst of frames costs one system call and wakes the peer once. A frame that may wait goes out
// with the next frame that may not wait.
//
// If the stream ends without CLOSE, the lane breaks. This says nothing about the peer.
//
// A data lane pulls segments from its owner whenever it has sent the last ones, so a faster lane
// carries more. A payload is received straight into the place that the owner names. The same call
// receives the next header, so a stream of segments costs one call for each segment.
//
// Every segment that was pulled, but for parts of frames, comes back through OnLaneSegmentSent()
// exactly once, when the kernel does not refer to its memory any more. This does not mean that it
// has arrived. The peer counts the segments that it receives on the lane, in the order in which
// they were pulled. Each PING carries the count, and one is sent after every LH_SEGMENTS_PER_ACK
// segments.
//
// A sealed lane breaks if it receives what the other end did not send. It says nothing about the
// peer then: anybody on the path can change bytes.
//
// Threads: the ring's. The owner is called from within Ring::RunOnce() only.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/crypto/sealing.h"
#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/transport/control_framing.h"
#include "peerd/transport/lane_encryption.h"
#include "peerd/transport/segment_framing.h"
#include "peerd/transport/tls_session.h"
#include "peerd/transport/zero_copy_gate.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {

class Lane;

class LaneOwner {
 public:
  virtual ~LaneOwner() = default;
  // If one of the next four returns an error, the lane breaks.
  virtual absl::Status OnLaneFrame(Lane* lane, const FrameHeader& header,
                                   std::span<const uint8_t> payload) = 0;
  virtual absl::StatusOr<uint8_t*> OnLaneData(Lane* lane, const FrameHeader& header) = 0;
  virtual absl::Status OnLaneDataReceived(Lane* lane, const FrameHeader& header) = 0;
  // Data lanes: the peer has received the first `segments` of the pulled segments.
  virtual absl::Status OnLaneAcked(Lane* lane, uint64_t segments) = 0;
  // The payload whose place was named last will not be completed. Nothing writes to that place any
  // more. Called when an aborted lane has ended its receive, unless the receive was detached.
  virtual void OnLaneDataAbandoned(Lane* lane, const FrameHeader& header) = 0;
  // Takes the next segment off the queue. Returns false if there is none for this lane, or if its
  // payload is larger than `bytes_max`. kAnyBytes asks for the first segment of a batch.
  virtual bool NextSegment(Lane* lane, uint32_t bytes_max, OutgoingSegment* segment) = 0;
  // Returns the registered buffer that holds these bytes, or -1.
  virtual int FindBuffer(const uint8_t* data, size_t bytes) = 0;
  virtual void OnLaneSegmentSent(FrameType type, uint64_t cookie) = 0;
  // The peer sent CLOSE. Only the end of the stream follows. The owner may abort or finish the
  // lane.
  virtual void OnLaneClosing(Lane* lane, bool given_up) = 0;
  // The stream ended after CLOSE. What is sent may still arrive at the peer.
  virtual void OnLanePeerEnded(Lane* lane) = 0;
  // The connection is of no use any more. The owner has to call Abort(). `protocol`: the peer broke
  // the protocol.
  virtual void OnLaneBroken(Lane* lane, const std::string& reason, bool protocol) = 0;
  // The last call. Do not destroy the lane from within it.
  virtual void OnLaneEnded(Lane* lane) = 0;
};

inline constexpr uint32_t kAnyBytes = UINT32_MAX;
// The limit of what waits to be sent on a control lane.
inline constexpr size_t kControlQueueBytesMax = size_t{1} << 30;

// The keys of a sealed data lane.
struct LaneKeys {
  Aead aead = Aead::kAes128Gcm;
  KeySecret send;
  KeySecret receive;
};
struct LaneOptions {
  LaneKind kind = LaneKind::kControl;
  uint32_t index = 0;                 // of a data lane; for the owner
  std::string name;                   // for error texts: "control lane to 10.0.0.3:29700"
  ZeroCopyGate* zero_copy = nullptr;  // of the link; nullptr: no zero-copy sends
  size_t queue_bytes_max = kControlQueueBytesMax;
  std::optional<LaneKeys> keys;  // of a sealed data lane
  uint64_t sealed_bytes_max = kSealedBytesMax;
};

struct LaneStats {
  uint64_t bytes_sent = 0;  // payload of segments
  uint64_t bytes_received = 0;
  uint64_t bytes_discarded = 0;
  uint64_t bytes_taken = 0;  // all that came in on a data lane
  uint64_t state_bytes = 0;  // payload of CHUNK_DATA, incomplete frames included
  uint64_t zero_copy_copied = 0;
  uint64_t unauthentic = 0;  // times that received bytes were not those that the other end sent

  void Add(const LaneStats& other) {
    bytes_sent += other.bytes_sent;
    bytes_received += other.bytes_received;
    bytes_discarded += other.bytes_discarded;
    bytes_taken += other.bytes_taken;
    state_bytes += other.state_bytes;
    zero_copy_copied += other.zero_copy_copied;
    unauthentic += other.unauthentic;
  }
};

class Lane {
 public:
  // Takes over a connected and tuned socket. `ring` and `owner` must outlive the lane.
  Lane(Ring* ring, LaneSocket socket, LaneOptions options, LaneOwner* owner);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void StartReceiving();
  // Control lanes: queues a frame. Returns false if too much is queued: the peer does not read.
  bool SendFrame(const FrameHeader& header, std::span<const uint8_t> payload);
  // Like SendFrame(), for whole encoded frames. `may_wait`: nobody waits for the frames. They go
  // out with the next frame, or by themselves after kHoldUs.
  bool SendFrames(std::span<const uint8_t> bytes, bool may_wait = false);
  // Like SendFrame(), for a frame without payload of which only the newest matters. The frame
  // replaces a queued frame of its type. So a peer that asks much and does not read costs no
  // memory.
  bool SendNewest(const FrameHeader& header);
  // Data lanes: there may be a segment to pull.
  void Pull();
  // Data lanes: sends a PING and returns true. If segments are being sent, sends nothing and
  // returns false, because segments tell the peer as much. `quiet_ms`: after this PING the peer may
  // hear nothing for so many ms longer than usual. If no PING is sent now, the next one carries the
  // value.
  bool Ping(uint32_t quiet_ms);
  // Data lanes: if `names` accepts the header of the payload that is being received, throws the
  // rest of the payload away. Returns true if a receive in flight may still write to its place.
  // Then `done` follows when it has ended, not from within this call.
  bool Detach(const std::function<bool(const FrameHeader&)>& names,
              absl::AnyInvocable<void()> done);

  // `flags`: of the CLOSE frame.
  void Finish(uint8_t flags = 0);
  void Abort();

  void Tune(const StreamTuning& tuning);
  void SetLongWay();
  // On a long way: TCP sends at most so many bytes a second, give or take a percent. 0: no limit.
  void SetPace(uint64_t bytes_per_second);
  void SetCongestion(const std::string& congestion);
  // How long sent bytes may be unacknowledged before TCP gives the connection up.
  void SetUserTimeout(uint32_t ms);
  bool open() const { return state_ == State::kOpen; }
  bool ended() const { return state_ == State::kEnded; }
  bool peer_ended() const { return peer_ended_; }
  LaneKind kind() const { return options_.kind; }
  uint32_t index() const { return options_.index; }
  const std::string& name() const { return options_.name; }
  Tick last_heard() const { return last_heard_; }
  // Data lanes: how much longer than usual the peer may be silent, as its last frame said.
  int64_t quiet_us() const { return quiet_us_; }
  // Returns how many segments came in whole.
  uint64_t received() const { return received_; }
  // The owner did not run for `us`, so this much silence says nothing about the peer.
  void ForgiveSilence(int64_t us) { last_heard_ = last_heard_ + us; }
  const LaneStats& stats() const { return stats_; }
  // Returns nothing if the socket is closed, or if the system does not know.
  std::optional<TcpDelivery> Delivery() const;

 private:
  enum class State { kOpen, kFinishing, kAborting, kEnded };
  static constexpr int64_t kHoldUs = 2000;
  // A segment sent without a copy, until its last notice.
  struct ZeroCopySend {
    FrameType type = FrameType::kData;
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
  // The bytes that were received are against the rules, or were not sent by the other end.
  void BrokenBy(const absl::Status& status);
  void AfterReceive();
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
  uint32_t user_timeout_ms_ = 0;  // 0: not set since the lane began
  uint64_t pace_ = 0;             // 0: no limit
  LaneStats stats_;

  // Operations in flight. 0: none.
  IoId recv_id_ = 0;
  IoId send_id_ = 0;
  IoId post_id_ = 0;      // leads to a call of Settle() when nothing else is in flight
  IoId hold_id_ = 0;      // the timer for frames that may wait
  uint32_t notices_ = 0;  // zero-copy notices that have not come yet
  bool socket_open_ = true;
  bool shutdown_ = false;  // finishing: our sending side is shut down
  bool closing_ = false;   // the peer sent CLOSE
  bool peer_ended_ = false;
  uint8_t close_flags_ = 0;
  bool close_queued_ = false;

  const std::unique_ptr<TlsSession> tls_;  // of a sealed control lane
  std::unique_ptr<Sealer> sealer_;         // these two: of a sealed data lane
  std::unique_ptr<Opener> opener_;

  // Receiving.
  bool tls_drained_ = true;  // what the handshake received behind its own bytes was taken
  ControlReader control_in_;
  SegmentReader segments_in_;
  uint64_t received_ = 0;
  uint64_t received_told_ = 0;      // the part of received_ that the peer was told
  bool recv_writes_place_ = false;  // the receive in flight may still write to a payload's place
  std::vector<uint8_t> sink_;       // for what a finishing lane throws away
  iovec recv_parts_[2];
  msghdr recv_message_{};
  std::vector<absl::AnyInvocable<void()>> detached_;

  // Sending on a control lane.
  bool send_due_ = false;  // SendControl() is called before the ring submits
  ControlWriter control_out_;

  // Sending on a data lane.
  bool ack_due_ = false;   // a PING goes before the next segment
  uint32_t quiet_ms_ = 0;  // from the last Ping()
  SegmentBatch batch_;
  bool batch_zero_copy_ = false;
  bool batch_bare_ = false;         // the batch is one frame of our own, not segments
  size_t batch_record_ = SIZE_MAX;  // the entry of zero_copy_ for the only segment of the batch
  SegmentBatch::PartsArray send_parts_;
  msghdr send_message_{};
  std::deque<ZeroCopySend> zero_copy_;
  std::vector<size_t> zero_copy_free_;
};

}  // namespace longhaul::peerd
