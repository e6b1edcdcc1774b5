// What a link tells its owner, and what it is made of. See link.h for the threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/ids.h"
#include "base/tick.h"
#include "peerd/io/sockets.h"
#include "peerd/transport/lane.h"
#include "peerd/transport/transport.h"

namespace longhaul::peerd {

class Link;

class LinkOwner {
 public:
  virtual ~LinkOwner() = default;
  // The control lane works: the peer answered our PING. Called only if we dialled the link.
  virtual void OnLinkEstablished(Link* link) = 0;
  // The peer needs data lanes. `optional`: if they cannot be built, the link stays as it is.
  // `lanes`: how many in all; 0: we choose.
  virtual void OnWantLanes(Link* link, bool optional, uint32_t lanes) = 0;
  virtual absl::Status OnLinkFrame(Link* link, const FrameHeader& header,
                                   std::span<const uint8_t> payload) = 0;
  virtual int FindBuffer(const uint8_t* data, size_t bytes) = 0;
  // So many segments of a lost data lane are sent again.
  virtual void OnLinkSegmentsRepeated(uint64_t segments) = 0;
  // So many control frames are sent again on a new control lane.
  virtual void OnLinkFramesRepeated(uint64_t frames) = 0;
  // These segments were never put on a lane. Tell their listener later, not from within this call.
  virtual void OnLinkSegmentsDropped(FrameType type, std::vector<uint64_t> cookies) = 0;
  // The peer closes the link. Work() is due now.
  virtual void OnLinkClosing(Link* link) = 0;
  // A lane is lost, and the link is alive. Work() is due. If we dialled the link, a new lane has to
  // be dialled.
  virtual void OnLinkLaneLost(Link* link, LaneKind kind, const std::string& reason) = 0;
  virtual void OnLinkLaneBack(Link* link, const std::string& name) = 0;
  // Large packets vanish on the path: small_packets() is true from now on, and new lanes must use
  // small packets.
  virtual void OnLinkSmallPackets(Link* link) = 0;
  // From now on the link sends on `lanes` data lanes, or would if it had so many. `rate`: bytes a
  // second measured before. Act on it later, not from within this call.
  virtual void OnLinkLaneCount(Link* link, uint32_t lanes, uint64_t rate) = 0;
  // Every busy link of this host should use another number of data lanes from now on.
  virtual void OnHostLaneCount() = 0;
  // Work() is due at `at` or before.
  virtual void OnLinkDue(Link* link, Tick at) = 0;
  // A data lane is far slower than the others. It is left unused for a while.
  virtual void OnLinkLaneRests(Link* link) = 0;
  // Destroy the lane later, not from within this call.
  virtual void OnLinkLaneEnded(std::unique_ptr<Lane> lane) = 0;
  // The link is broken, and its lanes are ending.
  virtual void OnLinkBroken(Link* link, const std::string& reason, bool protocol) = 0;
  // The last call. Do not destroy the link from within it.
  virtual void OnLinkEnded(Link* link) = 0;
};

struct LinkOptions {
  LinkKey key;
  SegmentListeners segments;
  uint64_t id = 0;  // NewLinkId() of the HELLO that made the link
  SocketAddress remote;
  PeerId relay;  // the peer at `remote` that the link goes through; 0: none, the link is straight
  bool dialled = false;  // by us
  // Names the token that authenticated the first control lane.
  uint32_t group = 0;
  Epoch epoch;
  ZeroCopyGate::Use zero_copy = ZeroCopyGate::Use::kNever;  // on data lanes
  // On a long path, find out how many data lanes are of use. Otherwise all are used.
  bool count_lanes = false;
  HostPaths* paths = nullptr;  // of all links together; outlives the link
  std::string congestion;      // of data lanes on a long path; "": as they are
  uint64_t probed_rate = 0;    // bytes a second that a probe of this path measured; 0: no probe did
  uint64_t sealed_bytes_max = kSealedBytesMax;  // see LaneOptions
};

}  // namespace longhaul::peerd
