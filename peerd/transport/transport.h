// Links to other peers: dialling, handshake, control lane, data lanes, frames.
//
// A link belongs to one run and one remote peer. It is up when its control lane is up and, if data
// lanes were asked for, its data lanes are up too. A segment goes to any data lane that has room.
// Its payload is received straight into the place that the listener names.
//
// A link that is up survives the loss (reset, end, stall) of any of its lanes, even of all at once.
// Lost lanes are dialled again, and what was in flight is sent again. The listener still gets every
// frame and every segment exactly once. A link goes down when
//   - nothing was heard on any lane for detect_ms. If the longest recent round trip r exceeds 100
//     ms, 4 * (r - 100 ms) are added, up to 4 * detect_ms in all,
//   - the peer's process is gone: after a lane broke, the peer's data port refuses connections, or
//     another peer answers there,
//   - the control lane or all data lanes are lost and none was dialled again in 2 * detect_ms,
//   - the peer closes the link, has given it up, or breaks the protocol.
//
// Segments are DATA (of ops) and CHUNK_DATA (of shared state). While both are queued on a link they
// take turns by bytes, ops first. If only one of them is queued, it gets the whole link.
//
// Threads: the thread that owns the ring. The listener is called from within Ring::RunOnce(), never
// from within a call of this class.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/counters.h"
#include "base/crypto/identity.h"
#include "base/ids.h"
#include "base/tick.h"
#include "peerd/io/ring.h"
#include "peerd/paths/samples.h"
#include "peerd/transport/auth.h"
#include "peerd/transport/lane_encryption.h"
#include "peerd/transport/refused_callers.h"
#include "proto/wire/frame.h"
#include "proto/wire/handshake.h"

namespace longhaul::peerd {

struct LinkKey {
  std::string run;
  PeerId peer;
  friend auto operator<=>(const LinkKey&, const LinkKey&) = default;
};

// Names segments that are being received: all of one attempt at an op, or of one ask of a transfer.
struct ReceiveKey {
  FrameType type = FrameType::kData;
  uint32_t group = 0;
  OpOrdinal op;
  Epoch attempt;

  bool Names(const FrameHeader& header) const {
    return header.type == type && header.group == group && header.op == op &&
           header.attempt == attempt;
  }
};

// The code that sends and receives the segments of one type.
class SegmentListener {
 public:
  virtual ~SegmentListener() = default;
  // Returns where header.payload_bytes bytes of the frame go. nullptr: they are read and thrown
  // away (a stale attempt). InvalidArgument closes the link.
  virtual absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header) = 0;
  virtual absl::Status OnDataReceived(const LinkKey& link, const FrameHeader& header) = 0;
  // The lane was lost before the payload was whole. Nothing writes to the place any more. The
  // segment is sent again, with another call of OnDataHeader().
  virtual void OnDataAbandoned(const LinkKey& link, const FrameHeader& header) = 0;
  virtual void OnSegmentSent(uint64_t cookie) = 0;
  // A lane was lost, and a segment of this owner on it had not arrived. Returns a new cookie to
  // send the segment again. Its memory then stays until OnSegmentSent() with that cookie. 0: do not
  // send it again.
  virtual uint64_t OnSegmentRepeat(uint64_t owner) = 0;
  // The answer to DetachReceives().
  virtual void OnReceivesDetached(uint64_t cookie) = 0;
};

// Who gets which segments: DATA and CHUNK_DATA. Links call them, and nobody in between.
struct SegmentListeners {
  SegmentListener* ops = nullptr;
  SegmentListener* states = nullptr;

  SegmentListener* Of(FrameType type) const { return type == FrameType::kChunkData ? states : ops; }
};

class TransportListener {
 public:
  virtual ~TransportListener() = default;
  virtual void OnLinkUp(const LinkKey& link) = 0;
  // From now on nothing comes from the link. Its queued frames and segments are dropped. Their
  // OnSegmentSent() still comes, once the kernel has let go of the memory. `silent_ms`: for how
  // many ms nothing had been heard from the peer; 0: something was heard within detect_ms. If the
  // peer has given the link up, `silent_ms` is at least detect_ms: the peer lives, and heard
  // nothing.
  virtual void OnLinkDown(const LinkKey& link, const std::string& reason, uint32_t silent_ms) = 0;
  // The answer to TryPeer(). `error` names the address and what was seen; empty: the peer answers.
  virtual void OnPeerTried(const GroupKey&, uint64_t /*trial*/, PeerId, const std::string&) {}
  // A whole READY, DONE, CHUNK_REQUEST, CHUNK_REFUSED or CHUNK_CANCEL. These frames come in the
  // order in which the peer sent them. InvalidArgument closes the link.
  virtual absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                                      std::span<const uint8_t> payload) = 0;
};

struct TransportOptions {
  PeerId self;
  std::string listen = "0.0.0.0:29700";  // host:port; [v6]:port; port 0: any free one
  uint32_t lanes = 0;                    // data lanes of a link that we dial; 0: automatic
  uint32_t detect_ms = 1500;
  enum class ZeroCopy { kAuto, kOn, kOff } zero_copy = ZeroCopy::kAuto;  // auto: not on loopback
  std::string congestion;                                                // "": system default
  uint64_t seed = 0;  // nonces in tests; 0: system randomness
  LaneEncryption encryption = LaneEncryption::kOff;
  std::optional<Identity> identity;  // needed
  Tag16 host = HostTag();            // where this process runs
  // The addresses that this peer tells others, best first. A peer that another one names is dialled
  // at a loopback or link-local address only if the first of these is such an address: it would be
  // one of this host's own, or its neighbour's. nullptr: any address is dialled. Any thread.
  std::function<std::vector<std::string>()> own_endpoints;
  uint64_t sealed_bytes_max = kSealedBytesMax;  // after which a data lane gets another key
};

// How an op should use a link.
struct LinkUse {
  // How many bytes of its own input an op keeps queued on the link. Fewer would leave lanes idle.
  // More would delay the sums that the op passes on for others. 0: there is no such link.
  uint64_t window_bytes = 0;
  // The link has many slow lanes. Short segments spread more evenly over them.
  bool long_way = false;
};

// One link that an epoch needs.
struct LinkRequest {
  PeerId peer;
  PeerId relay;  // the peer that the link goes through; 0: none, the link is straight
  // The public key of the peer. A link is made with the owner of this key only.
  std::string public_key;
  // Endpoints of the relay if there is one, else of the peer. They are tried in order, again and
  // again until `deadline`.
  std::vector<std::string> endpoints;
  bool dial = false;      // false: the peer dials, we accept
  bool data = false;      // the link needs data lanes too
  bool one_lane = false;  // of which one is enough to begin with
};

struct TransportStats {
  uint64_t connections_accepted = 0;
  RefusedCallers::Counts callers_refused{};
  uint64_t handshakes_refused = 0;    // their sum
  uint64_t handshakes_untrusted = 0;  // the other side did not have the key of the peer it named
  uint64_t frames_refused = 0;        // links closed for breaking the protocol
  uint64_t unauthentic = 0;           // lanes closed because bytes were changed or forged
  uint64_t links_lost = 0;
  uint64_t lanes_lost = 0;           // while their link stayed up
  uint64_t lane_rests = 0;           // times a slow data lane was left unused for a while
  uint64_t lanes_redialled = 0;      // lost lanes that were replaced
  uint64_t links_small_packets = 0;  // links on which large packets vanished
  uint64_t segments_repeated = 0;    // segments sent again because their lane was lost
  uint64_t frames_repeated = 0;      // control frames sent again because their lane was lost
  uint64_t bytes_sent = 0;           // payload of DATA and CHUNK_DATA frames
  uint64_t bytes_received = 0;
  uint64_t bytes_discarded = 0;  // received for stale attempts
  uint64_t probes = 0;           // probes that measured something
  uint64_t probes_failed = 0;
  uint64_t probe_bytes = 0;  // sent by probes
  uint32_t links_up = 0;
  uint32_t lanes_up = 0;
  uint32_t lanes_used = 0;        // data lanes that we send on
  uint64_t pace = 0;              // bytes a second that all long ways may carry; 0: no limit
  uint32_t tunnels = 0;           // lanes of other peers that go through this peer
  uint64_t bytes_carried = 0;     // bytes of those lanes
  uint64_t bytes_taken = 0;       // received on data lanes, incomplete segments included
  uint64_t zero_copy_copied = 0;  // zero-copy sends that the kernel copied after all
  uint64_t segments_unacked = 0;  // sent and not acknowledged: kept in case their lane is lost
};

// The counters that /metrics shows.
inline constexpr Counter<TransportStats> kTransportCounters[] = {
    {"longhaul_peerd_frames_refused_total",
     "Frames received against the protocol; each closed its link", &TransportStats::frames_refused},
    {"longhaul_peerd_connections_accepted_total", "Connections accepted on the data port",
     &TransportStats::connections_accepted},
    {"longhaul_peerd_handshakes_untrusted_total",
     "Handshakes in which the other side did not have the key that the epoch names for the peer",
     &TransportStats::handshakes_untrusted},
    {"longhaul_peerd_unauthentic_total",
     "Lanes that broke because received bytes were not those that the other peer sent",
     &TransportStats::unauthentic},
    {"longhaul_peerd_links_lost_total", "Links that broke or fell silent",
     &TransportStats::links_lost},
    {"longhaul_peerd_lanes_lost_total", "Lanes that broke while their link stood",
     &TransportStats::lanes_lost},
    {"longhaul_peerd_lanes_redialled_total", "Lost lanes that were replaced",
     &TransportStats::lanes_redialled},
    {"longhaul_peerd_links_small_packets_total",
     "Links that changed to small packets because large ones vanished",
     &TransportStats::links_small_packets},
    {"longhaul_peerd_lane_rests_total",
     "Times a lane was left unused for a while because it was far slower than others",
     &TransportStats::lane_rests},
    {"longhaul_peerd_segments_repeated_total", "Segments sent again because their lane was lost",
     &TransportStats::segments_repeated},
    {"longhaul_peerd_frames_repeated_total",
     "Control frames sent again because their lane was lost", &TransportStats::frames_repeated},
    {"longhaul_peerd_sent_bytes_total",
     "Bytes of tensors and shared state sent to other peers on data lanes",
     &TransportStats::bytes_sent},
    {"longhaul_peerd_received_bytes_total",
     "Bytes of tensors and shared state received from other peers on data lanes",
     &TransportStats::bytes_received},
    {"longhaul_peerd_discarded_bytes_total",
     "Bytes received on data lanes for attempts that were over", &TransportStats::bytes_discarded},
    {"longhaul_peerd_probes_total", "Probes that measured a link", &TransportStats::probes},
    {"longhaul_peerd_probes_failed_total", "Probes that measured nothing",
     &TransportStats::probes_failed},
    {"longhaul_peerd_probe_bytes_total", "Bytes sent by probes", &TransportStats::probe_bytes},
    {"longhaul_peerd_bytes_carried_total",
     "Bytes passed on as relay between two peers that cannot reach each other",
     &TransportStats::bytes_carried},
    {"longhaul_peerd_zero_copy_copied_total", "Zero-copy sends that the kernel copied after all",
     &TransportStats::zero_copy_copied},
};

struct LinkStats {
  LinkKey link;
  PeerId relay;  // 0: none, the link is straight
  uint32_t lanes = 0;
  uint32_t lanes_used = 0;     // data lanes that we send on
  bool small_packets = false;  // large packets vanish on the path
  bool sealed = false;         // authenticated and encrypted
  int64_t rtt_us = 0;          // of the last PING; 0: none was answered yet
  // The shortest round trip that TCP has seen on the control lane. A PING may be longer, since it
  // also waits for a busy peer. Through a relay, TCP sees the path to the relay only. If TCP tells
  // nothing, this is rtt_us.
  int64_t shortest_rtt_us = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

// The limits of a probe. A probe ends sooner if its rate does not rise any more. If the round trip
// is long, it may take up to twice kProbeUsMax.
inline constexpr int64_t kProbeUsMax = Millis(1500);
inline constexpr uint64_t kProbeBytesMax = uint64_t{8} << 20;
inline constexpr uint32_t kProbeConnectionsMax = 16;

// What a probe has measured, in the direction away from us.
struct LinkProbe {
  LinkKey link;
  Tick begun;
  Tick ended;
  RateSample rate;    // if its rate is 0, nothing was measured
  std::string error;  // says why
};

// Links and whole frames: everything but moving the bytes of tensors.
class Links {
 public:
  virtual ~Links() = default;

  // Asks for the links that `epoch` needs. From now on `token` authenticates lanes, in both
  // directions.
  //   - A link that is up is reported again with OnLinkUp(), not from within this call.
  //   - A missing link is built. OnLinkDown() comes when `deadline` passes. It comes sooner if for
  //     detect_ms / 2 every endpoint says that the peer is gone: nobody listens there, or another
  //     peer does.
  //   - A link whose path (straight, or through a relay) no group wants any more goes down, and is
  //     built anew.
  // This transport also serves as a relay between peers that know the token.
  virtual void OpenLinks(const std::string& run, uint32_t group, Epoch epoch,
                         const std::string& token, const std::vector<LinkRequest>& links,
                         Tick deadline) = 0;
  // From now on `group` needs the links to `peers`, and no tokens of epochs below `epoch`. A link
  // that no group of the run needs is closed once its queue is sent. No OnLinkDown() comes for it.
  virtual void KeepLinks(const std::string& run, uint32_t group, Epoch epoch,
                         const std::vector<PeerId>& peers) = 0;

  // Finds out whether a peer that shares no epoch with us yet answers at one of its endpoints.
  // OnPeerTried() with the same group and trial comes by `deadline`.
  virtual void TryPeer(const GroupKey& group, uint64_t trial, PeerId peer,
                       const std::vector<std::string>& endpoints, Tick deadline) = 0;

  // Queues a frame on the control lane and copies its payload. Drops it if the link is not up.
  virtual void SendControl(const LinkKey& link, const FrameHeader& header,
                           std::span<const uint8_t> payload) = 0;
  // Like SendControl(), for a READY or DONE that nobody waits for. The frame goes out with the next
  // frame, in order, or by itself after some milliseconds.
  virtual void SendControlInTime(const LinkKey& link, const FrameHeader& header,
                                 std::span<const uint8_t> payload) = 0;

  // Returns the latency of the link, one way, as it was when the link came up. 0: it is unknown, or
  // the path is short.
  virtual uint32_t LatencyUs(const LinkKey& /*link*/) const { return 0; }

  // Closes the link and counts it in frames_refused: the content of the peer's frames breaks the
  // protocol. OnLinkDown() follows, not from within this call.
  virtual void BreakLink(const LinkKey& link, const std::string& reason) = 0;

  // Memory that segments may be sent from. If possible it is pinned, piece by piece, when a segment
  // is first sent from a piece. It is not touched before. After RemoveMemory() the caller may unmap
  // it at once.
  virtual void AddMemory(const uint8_t* data, size_t bytes) = 0;
  virtual void RemoveMemory(const uint8_t* data) = 0;

  virtual void SetDetectMs(uint32_t detect_ms) = 0;
};

class Transport : public Links {
 public:
  // If the transport is not closed(), the ring must not be run any more, only destroyed.
  ~Transport() override = default;

  // Names the listeners for segments, which must outlive the transport. Must be called before links
  // are asked for.
  virtual void SetSegmentListeners(const SegmentListeners& listeners) = 0;

  // Returns the bound address with its port.
  virtual std::string listen_address() const = 0;

  // Queues a DATA or CHUNK_DATA frame. `data` stays mapped until OnSegmentSent(cookie), which comes
  // exactly once, even if the link is not up. If the segment is lost with its lane, it is read
  // again. So memory and bytes stay as they are until the receiver has the segment, or until
  // OnSegmentRepeat(owner) has returned 0. The caller chooses `cookie` and `owner`, which mean
  // nothing to the other listener, and never uses an `owner` again.
  virtual void SendSegment(const LinkKey& link, const FrameHeader& header, const uint8_t* data,
                           uint64_t cookie, uint64_t owner) = 0;
  // Builds data lanes for a link that is up without them. If this fails, the link stays as it is,
  // and its queued segments wait. Another call makes another attempt.
  virtual void WantDataLanes(const LinkKey& link) = 0;
  virtual LinkUse BestUse(const LinkKey& link) const = 0;
  // Returns the bytes of CHUNK_DATA payload received on all lanes of the link, incomplete frames
  // included. Frames that are thrown away do not count. 0: there is no such link.
  virtual uint64_t StateBytes(const LinkKey& link) const = 0;
  // From now on the payload of these segments is thrown away. OnReceivesDetached(cookie) follows,
  // never from within this call. After it nothing writes to memory named for them.
  virtual void DetachReceives(const std::string& run, const ReceiveKey& key, uint64_t cookie) = 0;
  // Drops the segments of this type with these cookies that are still queued. OnSegmentSent()
  // follows for each.
  virtual void DropSegments(FrameType type, const std::vector<uint64_t>& cookies) = 0;

  virtual TransportStats GetStats() const = 0;
  virtual std::vector<LinkStats> GetLinkStats() const = 0;
  // Returns what the straight links carried whose data lanes were used since the last call. Each
  // such lane costs a system call.
  virtual std::vector<std::pair<LinkKey, RateSample>> PopRates() = 0;
  // Returns what the data lanes of all links have delivered. Each lane that was used since the last
  // call costs a system call.
  virtual HostSample PopArrivals() = 0;
  // Returns, for each run, the link that keeps us waiting longest; nothing for a run without such a
  // link. Each lane on which segments are under way costs a system call, up to 32 lanes of a link.
  // What stalls is found by comparison with the last call, so call this at regular times.
  virtual std::vector<std::pair<LinkKey, LinkWait>> PopWaits() = 0;

  // Starts to measure the rate of a link that is up. Dials as many connections as the link has data
  // lanes (at most kProbeConnectionsMax) and sends at most kProbeBytesMax over them, which the peer
  // throws away. Returns false if the last probe runs or waits for PopProbe(), if the link is not
  // up, or if it goes through a relay.
  virtual bool StartProbe(const LinkKey& link) = 0;
  // Returns the result of the last probe, once, when the probe is over.
  virtual std::optional<LinkProbe> PopProbe() = 0;

  // Stops listening and closes every lane in order. From now on the listeners get only
  // OnSegmentSent() and OnReceivesDetached(). Run the ring until closed() or a deadline.
  virtual void Close() = 0;
  virtual bool closed() const = 0;
};

// Unavailable: the address, which the text names, cannot be bound. InvalidArgument: the address is
// malformed, or the kernel lacks the congestion control. `ring` and `listener` must outlive the
// transport.
absl::StatusOr<std::unique_ptr<Transport>> MakeTransport(TransportOptions options, Ring* ring,
                                                         TransportListener* listener);

}  // namespace longhaul::peerd
