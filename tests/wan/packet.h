// Packets as a TUN device with IFF_VNET_HDR carries them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace longhaul::wan {

// Host n has the addresses 10.77.0.n and fd77::n (n in hexadecimal there).
inline constexpr int kHostNumberMax = 254;

// The largest frame that a TUN device hands over: a virtio_net_hdr and 64 KiB of IP.
inline constexpr size_t kFrameBytesMax = 65536 + 64;

// What tells one flow of a pair of hosts from another: protocol and ports. What has no ports
// (ICMP, later fragments) counts as a flow of ports 0.
struct FlowKey {
  uint8_t protocol = 0;
  uint16_t src_port = 0;
  uint16_t dst_port = 0;
  friend auto operator<=>(const FlowKey&, const FlowKey&) = default;
};

// One frame: a virtio_net_hdr and an IP packet. Under segmentation offload the packet is a
// super-packet that stands for up to 64 KiB of consecutive packets of the wire, called segments
// here; without it, it is one segment. Move-only value.
class Packet {
 public:
  // Copies `frame`. Nothing unless it is whole and goes from one address of a host to another's.
  static std::optional<Packet> FromFrame(std::span<const uint8_t> frame);

  int src() const { return src_; }
  int dst() const { return dst_; }
  const FlowKey& flow() const { return flow_; }
  int segments() const { return segments_; }

  // IP bytes of all segments on the wire, where each has headers of its own.
  int64_t wire_bytes() const {
    return static_cast<int64_t>(segments_ - 1) * header_bytes_ + ip_bytes();
  }

  // The part of a super-packet that stands for segments [first, first + count): with the headers
  // that segmentation would have given them.
  Packet Slice(int first, int count) const;

  std::span<const uint8_t> frame() const { return {frame_.get(), size_}; }

 private:
  Packet() = default;

  int64_t ip_bytes() const;
  void FixHeaders(int first_segment, bool has_last_segment);

  std::unique_ptr<uint8_t[]> frame_;
  uint32_t size_ = 0;
  uint16_t segments_ = 1;
  uint16_t segment_payload_ = 0;  // 0: of a packet that is one segment
  uint16_t header_bytes_ = 0;     // IP and transport
  uint8_t src_ = 0;
  uint8_t dst_ = 0;
  FlowKey flow_;
};

}  // namespace longhaul::wan
