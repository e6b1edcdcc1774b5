// Links to other peers: dialling, handshake, control lane, data lanes, frames.
//
// A link belongs to one run and one remote peer. It is up when its control lane stands and, where
// asked for, its data lanes do. Segments go to whichever data lane has room. Payload is received
// straight into the place that the listener names.
//
// A link that is up survives the loss (reset, end, stall) of any of its lanes, the control lane and
// all at once included: they are dialled again, what was on its way is sent again, and the listener
// still gets every frame and every segment exactly once. It goes down when
//   - nothing was heard on any lane for detect_ms, and where round trips take longer than 100 ms
//     (r, the longest of late) for 4 * (r - 100 ms) more, at most for 4 * detect_ms,
//   - the peer's process is gone: after a lane broke, its data port refuses connections or another
//     peer answers there,
//   - what was lost could not be dialled again for twice detect_ms,
//   - the peer closes the link, has given it up, or breaks the protocol.
//
// Segments are DATA (of ops) and CHUNK_DATA (of shared state). While both are queued on a link they
// take turns by bytes, ops first; alone, each has all of it.
//
// Threads: owner thread of the ring only. Listener calls come from within Ring::RunOnce(), never
// from within a call of this class.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/counters.h"
#include "base/ids.h"
#include "base/tick.h"
#include "peerd/io/ring.h"
#include "proto/wire/frame.h"
#include "proto/wire/handshake.h"

namespace longhaul::peerd {

struct LinkKey {
  std::string run;
  PeerId peer;
  friend auto operator<=>(const LinkKey&, const LinkKey&) = default;
};

// Segments that are being received: all of one attempt at an op, or of one ask of a transfer.
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

// Whoever sends and receives segments.
class SegmentListener {
 public:
  virtual ~SegmentListener() = default;
  // Where the payload of a DATA or CHUNK_DATA frame goes: header.payload_bytes bytes from the
  // pointer on; nullptr: read and thrown away (a stale attempt). InvalidArgument closes the link.
  virtual absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header) = 0;
  virtual absl::Status OnDataReceived(const LinkKey& link, const FrameHeader& header) = 0;
  // The payload will not come: its lane was lost. Nothing writes to its place any more; the segment
  // is sent again, and asks for a place again.
  virtual void OnDataAbandoned(const LinkKey& link, const FrameHeader& header) = 0;
  virtual void OnSegmentSent(uint64_t cookie) = 0;
  // A segment of this owner was on a lane that was lost, and has not arrived. A cookie with which
  // it is sent again, from the same memory, until OnSegmentSent() of that; 0: not any more.
  virtual uint64_t OnSegmentRepeat(uint64_t owner) = 0;
  // Answer to DetachReceives().
  virtual void OnReceivesDetached(uint64_t cookie) = 0;
};

class TransportListener : public SegmentListener {
 public:
  virtual void OnLinkUp(const LinkKey& link) = 0;
  // After this nothing more comes from the link; its queued frames and segments are gone (their
  // OnSegmentSent has been or will be called all the same, once the kernel let go of the memory).
  // `silent_ms`: for so long nothing had been heard from the peer; 0 if something had within
  // detect_ms. What the other side has given up counts as silent: it heard nothing, and lives.
  virtual void OnLinkDown(const LinkKey& link, const std::string& reason, uint32_t silent_ms) = 0;
  // Answer to TryPeer(). `error`: names the address and what was seen; empty: the peer answers.
  virtual void OnPeerTried(const GroupKey&, uint64_t /*trial*/, PeerId, const std::string&) {}
  // READY, DONE, CHUNK_REQUEST, CHUNK_REFUSED, CHUNK_CANCEL: whole frames of the control
  // lane, in order. InvalidArgument closes the link.
  virtual absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                                      std::span<const uint8_t> payload) = 0;
};

struct TransportOptions {
  PeerId self;
  std::string listen = "0.0.0.0:29700";  // host:port; [v6]:port; port 0: any free one
  uint32_t lanes = 0;                    // data lanes that we open; 0: automatic
  uint32_t detect_ms = 1500;
  enum class ZeroCopy { kAuto, kOn, kOff } zero_copy = ZeroCopy::kAuto;  // auto: not on loopback
  std::string congestion;                                                // "": system default
  uint64_t seed = 0;  // nonces in tests; 0: system randomness
};

// How an op had best use a link.
struct LinkUse {
  // Of its own input it has so much queued, so that no lane of the link waits; more would only
  // delay what it passes on for others. 0: there is no such link.
  uint64_t window_bytes = 0;
  // Its lanes are many and slow: the shorter segments are, the better they share them.
  bool long_way = false;
};

// One link that an epoch needs.
struct LinkRequest {
  PeerId peer;
  PeerId relay;  // the link goes through that peer; 0: straight
  // Of the relay, if there is one. Tried in order, again and again until `deadline`.
  std::vector<std::string> endpoints;
  bool dial = false;  // false: the other side dials, we accept
  bool data = false;  // data lanes too
};

struct TransportStats {
  uint64_t connections_accepted = 0;
  uint64_t handshakes_refused = 0;  // garbage, wrong token, unknown epoch, too slow
  uint64_t frames_refused = 0;      // links closed for breaking the protocol
  uint64_t links_lost = 0;
  uint64_t lanes_lost = 0;           // of links that stood
  uint64_t lane_rests = 0;           // data lanes left alone for a while, as they were slow
  uint64_t lanes_redialled = 0;      // those that were replaced
  uint64_t links_small_packets = 0;  // links on which large packets vanished
  uint64_t segments_repeated = 0;    // that were on a lost lane and had not arrived
  uint64_t frames_repeated = 0;      // the same of control frames
  uint64_t bytes_sent = 0;           // payload of DATA and CHUNK_DATA frames
  uint64_t bytes_received = 0;
  uint64_t bytes_discarded = 0;  // of stale attempts
  uint64_t probes = 0;           // that showed something
  uint64_t probes_failed = 0;
  uint64_t probe_bytes = 0;  // sent by them
  uint32_t links_up = 0;
  uint32_t lanes_up = 0;
  uint32_t lanes_used = 0;        // data lanes that we send on
  uint32_t tunnels = 0;           // lanes of others that go through us
  uint64_t bytes_carried = 0;     // on them
  uint64_t zero_copy_copied = 0;  // zero-copy sends that the kernel copied after all
  uint64_t segments_unacked = 0;  // kept now, in case their lane is lost
};

// The counters that /metrics shows.
inline constexpr Counter<TransportStats> kTransportCounters[] = {
    {"longhaul_peerd_frames_refused_total",
     "Frames received against the protocol; each closed its link", &TransportStats::frames_refused},
    {"longhaul_peerd_connections_accepted_total", "Connections accepted on the data port",
     &TransportStats::connections_accepted},
    {"longhaul_peerd_handshakes_refused_total",
     "Connections on the data port that failed the handshake", &TransportStats::handshakes_refused},
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
  PeerId relay;  // 0: it goes straight
  uint32_t lanes = 0;
  uint32_t lanes_used = 0;     // data lanes that we send on
  bool small_packets = false;  // large ones vanish on the way
  int64_t rtt_us = 0;          // last PING; 0: none yet
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

// A round trip from which on a way is long: farther than one site.
inline constexpr uint32_t kLongWayUs = 5000;

// A probe of a path ends sooner where it gets no faster. For twice that if the round trip is long.
inline constexpr int64_t kProbeUsMax = Millis(1500);
inline constexpr uint64_t kProbeBytesMax = uint64_t{8} << 20;
inline constexpr uint32_t kProbeConnectionsMax = 16;

// What TCP has seen one link carry away from us.
struct LinkDelivery {
  LinkKey link;
  uint64_t bytes_per_second = 0;   // of the lanes that were used, together; 0: none was
  bool limited_by_sender = false;  // some of them, or the link, had too little to send
  uint32_t rtt_us = 0;             // the shortest; 0: unknown
  bool lanes_growing = false;      // it is not found yet how many lanes are of use
};

// What a probe has shown of the direction away from us.
struct LinkProbe {
  LinkKey link;
  Tick begun;
  Tick ended;
  uint64_t bytes_per_second = 0;  // 0: nothing, see `error`
  uint32_t rtt_us = 0;            // the shortest; 0: unknown
  uint64_t bytes_sent = 0;        // what was sent again counted again
  uint64_t bytes_repeated = 0;    // of those, sent again: lost, as far as TCP can tell
  std::string error;
};

// Links and whole frames: what can be said to other peers without moving bytes of tensors.
class Links {
 public:
  virtual ~Links() = default;

  // The epoch's token authenticates lanes from now on, in both directions. Links that already stand
  // are reported up again (OnLinkUp, later); missing ones are built. One that stands and goes
  // another way than any group wants it, straight or through a relay, goes down and is built anew.
  // This transport is a relay for peers that all know the token. OnLinkDown when the deadline
  // passes, or all endpoints have said for half of detect_ms that the peer is not there: nobody
  // listens, or another peer does.
  virtual void OpenLinks(const std::string& run, uint32_t group, Epoch epoch,
                         const std::string& token, const std::vector<LinkRequest>& links,
                         Tick deadline) = 0;
  // Group `group` needs these peers from now on and tokens of epochs below `epoch` no more. Links
  // that no group of the run needs are closed after what is queued on them was sent; no OnLinkDown
  // for them.
  virtual void KeepLinks(const std::string& run, uint32_t group, Epoch epoch,
                         const std::vector<PeerId>& peers) = 0;

  // Whether the peer answers at one of its endpoints, though it is in no epoch with this one yet.
  // OnPeerTried() follows with the same group and number, by `deadline`.
  virtual void TryPeer(const GroupKey& group, uint64_t trial, PeerId peer,
                       const std::vector<std::string>& endpoints, Tick deadline) = 0;

  // Queues a frame on the control lane; payload is copied. Dropped if the link is not up.
  virtual void SendControl(const LinkKey& link, const FrameHeader& header,
                           std::span<const uint8_t> payload) = 0;
  // The same of a READY or DONE that nobody waits for: it goes with the next frame, in order, or
  // after some milliseconds.
  virtual void SendControlInTime(const LinkKey& link, const FrameHeader& header,
                                 std::span<const uint8_t> payload) = 0;

  // The peer broke the protocol in what its frames mean: closes the link and counts it among
  // frames_refused. OnLinkDown follows, not from within this call.
  virtual void BreakLink(const LinkKey& link, const std::string& reason) = 0;

  // Memory that segments may be sent from. Where that is possible it is pinned, piece by piece, as
  // it is sent from; it is not touched before. After RemoveMemory() it may be unmapped at once.
  virtual void AddMemory(const uint8_t* data, size_t bytes) = 0;
  virtual void RemoveMemory(const uint8_t* data) = 0;

  virtual void SetDetectMs(uint32_t detect_ms) = 0;
};

class Transport : public Links {
 public:
  // If it is not closed(), the ring must not be run any more, only destroyed.
  ~Transport() override = default;

  // The bound address, port filled in.
  virtual std::string listen_address() const = 0;

  // Queues a DATA or CHUNK_DATA frame; `data` stays until OnSegmentSent(cookie), which comes
  // exactly once, link up or not. Should the segment be lost with its lane, it is read again: so
  // the memory stays, and its bytes as they are, until the receiver has the segment, or
  // OnSegmentRepeat(owner) says no. Owners are numbers of the caller's choice, never used again.
  virtual void SendSegment(const LinkKey& link, const FrameHeader& header, const uint8_t* data,
                           uint64_t cookie, uint64_t owner) = 0;
  // A link that is up and was built without data lanes gets some. If they cannot be built it stays
  // as it is, and what is queued on it waits; ask again for another attempt.
  virtual void WantDataLanes(const LinkKey& link) = 0;
  virtual LinkUse BestUse(const LinkKey& link) const = 0;
  // What has come over the link of the CHUNK_DATA that is received, all lanes together, also of
  // frames that are not complete; 0: there is no such link.
  virtual uint64_t StateBytes(const LinkKey& link) const = 0;
  // What is being received of these segments is diverted to nowhere. OnReceivesDetached(cookie)
  // follows, never from within this call: from then on nothing is written to memory named for them.
  virtual void DetachReceives(const std::string& run, const ReceiveKey& key, uint64_t cookie) = 0;
  // Drops those of the queued segments whose sending has not begun: OnSegmentSent follows for each.
  virtual void DropSegments(const std::vector<uint64_t>& cookies) = 0;

  virtual TransportStats GetStats() const = 0;
  virtual std::vector<LinkStats> GetLinkStats() const = 0;
  // Of the straight links whose data lanes were used since the last call: a system call for each
  // such lane.
  virtual std::vector<LinkDelivery> PopDeliveries() = 0;

  // Finds out what a link that is up carries: sends up to kProbeBytesMax, for kProbeUsMax at most,
  // to be thrown away there, over as many connections as the link has data lanes, dialled for it.
  // One at a time; false: one is under way, or the link is not up, or it goes through a relay. The
  // answer comes by PopProbe().
  virtual bool StartProbe(const LinkKey& link) = 0;
  // The probe that was started is over.
  virtual std::optional<LinkProbe> PopProbe() = 0;

  // Stops listening and closes every lane in an orderly way. Of the listener only OnSegmentSent()
  // and OnReceivesDetached() are called after this. Run the ring until closed() or a deadline.
  virtual void Close() = 0;
  virtual bool closed() const = 0;
};

// Unavailable: the address cannot be bound (the text names it). InvalidArgument: the address makes
// no sense, or the kernel does not have the congestion control. `ring` and `listener` outlive it.
absl::StatusOr<std::unique_ptr<Transport>> MakeTransport(TransportOptions options, Ring* ring,
                                                         TransportListener* listener);

}  // namespace longhaul::peerd
