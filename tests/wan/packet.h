// Packets, as a TUN device with IFF_VNET_HDR carries them. Plain values: no thread, no clock. No
// bytes that a host sends can make anything here fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace longhaul::wan {

// Host n has the addresses 10.77.0.n and fd77::n. In the second address n is hexadecimal.
inline constexpr int kHostNumberMax = 254;

// The largest frame of a TUN device: a virtio_net_hdr and 64 KiB of IP.
inline constexpr size_t kFrameBytesMax = 65536 + 64;

// Names a flow of a pair of hosts by protocol and ports. A packet without ports (ICMP, a later
// fragment) belongs to a flow with ports 0.
struct FlowKey {
  uint8_t protocol = 0;
  uint16_t src_port = 0;
  uint16_t dst_port = 0;
  friend auto operator<=>(const FlowKey&, const FlowKey&) = default;
};

// One frame: a virtio_net_hdr and an IP packet. With segmentation offload the packet may be a
// super-packet: it stands for up to 64 KiB of consecutive packets of the wire. This directory
// calls them segments, as Linux does. Any other packet is one segment. A move-only value that owns
// its bytes.
class Packet {
 public:
  // Copies `frame`. Returns nullopt if the frame is not complete, or if its source or destination
  // is not a host's address.
  static std::optional<Packet> FromFrame(std::span<const uint8_t> frame);

  int src() const { return src_; }
  int dst() const { return dst_; }
  const FlowKey& flow() const { return flow_; }
  int segments() const { return segments_; }

  // The IP bytes of all segments on the wire, where each segment has headers of its own.
  int64_t wire_bytes() const {
    return static_cast<int64_t>(segments_ - 1) * header_bytes_ + ip_bytes();
  }

  // The segments [first, first + count) as a packet of their own, with the headers that
  // segmentation would have given them. The range must be within the packet and not empty.
  Packet Slice(int first, int count) const;

  std::span<const uint8_t> frame() const { return {frame_.get(), size_}; }

 private:
  Packet() = default;

  int64_t ip_bytes() const;
  void FixHeaders(int first_segment, bool has_last_segment);

  std::unique_ptr<uint8_t[]> frame_;
  uint32_t size_ = 0;
  uint16_t segments_ = 1;
  uint16_t segment_payload_ = 0;  // 0: not a super-packet
  uint16_t header_bytes_ = 0;     // IP and transport
  uint8_t src_ = 0;
  uint8_t dst_ = 0;
  FlowKey flow_;
};

}  // namespace longhaul::wan
