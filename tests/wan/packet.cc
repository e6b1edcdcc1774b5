#include "tests/wan/packet.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/ip6.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace longhaul::wan {
namespace {

// The same as struct virtio_net_hdr, without the buffer count. Some releases of the system's header
// are not valid C++.
struct VnetHeader {
  uint8_t flags;
  uint8_t gso_type;  // 0: the frame is not a super-packet
  uint16_t hdr_len;
  uint16_t gso_size;  // payload of a segment
  uint16_t csum_start;
  uint16_t csum_offset;
};
constexpr size_t kVnet = sizeof(VnetHeader);
static_assert(kVnet == 10);

constexpr uint8_t kPrefix4[] = {10, 77, 0};
constexpr uint8_t kPrefix6[] = {0xfd, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};

constexpr uint8_t kTcpCwr = 0x80;

// Offsets count from the first byte of IP.
struct IpHeader {
  uint8_t protocol;
  size_t bytes;
  std::span<const uint8_t> src;
  std::span<const uint8_t> dst;
  bool has_ports;  // false in all fragments but the first
};

std::optional<IpHeader> ParseIp(std::span<const uint8_t> ip) {
  if (ip.size() >= sizeof(iphdr) && ip[0] >> 4 == 4) {
    const size_t bytes = static_cast<size_t>(ip[0] & 0xf) * 4;
    if (bytes < sizeof(iphdr) || bytes > ip.size()) return std::nullopt;
    const bool first_fragment = (ip[6] & 0x1f) == 0 && ip[7] == 0;
    return IpHeader{ip[9], bytes, ip.subspan(12, 4), ip.subspan(16, 4), first_fragment};
  }
  if (ip.size() >= sizeof(ip6_hdr) && ip[0] >> 4 == 6) {
    return IpHeader{ip[6], sizeof(ip6_hdr), ip.subspan(8, 16), ip.subspan(24, 16), true};
  }
  return std::nullopt;
}

// Returns the number of the host with this address; 0: no host has it.
uint8_t HostNumber(std::span<const uint8_t> address) {
  const std::span<const uint8_t> prefix =
      address.size() == 4 ? std::span<const uint8_t>(kPrefix4) : std::span<const uint8_t>(kPrefix6);
  if (!std::ranges::equal(prefix, address.first(prefix.size()))) return 0;
  return address.back() <= kHostNumberMax ? address.back() : 0;
}

// Returns the length of a TCP or UDP header; nullopt: the header is not complete, or the protocol
// is another.
std::optional<size_t> TransportHeaderBytes(uint8_t protocol, std::span<const uint8_t> transport) {
  size_t bytes = 0;
  if (protocol == IPPROTO_TCP && transport.size() >= sizeof(tcphdr)) {
    bytes = static_cast<size_t>(transport[12] >> 4) * 4;
    if (bytes < sizeof(tcphdr)) return std::nullopt;
  } else if (protocol == IPPROTO_UDP) {
    bytes = sizeof(udphdr);
  } else {
    return std::nullopt;
  }
  if (bytes > transport.size()) return std::nullopt;
  return bytes;
}

void Store16(uint8_t* at, uint32_t value) {
  at[0] = static_cast<uint8_t>(value >> 8);
  at[1] = static_cast<uint8_t>(value);
}

uint32_t Load16(const uint8_t* at) { return static_cast<uint32_t>(at[0]) << 8 | at[1]; }

// The ones' complement sum of RFC 1071. All ranges that are summed here have an even length.
uint32_t Sum16(std::span<const uint8_t> bytes, uint32_t sum = 0) {
  for (size_t i = 0; i + 1 < bytes.size(); i += 2) sum += Load16(&bytes[i]);
  while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

}  // namespace

std::optional<Packet> Packet::FromFrame(std::span<const uint8_t> frame) {
  if (frame.size() < kVnet || frame.size() > kFrameBytesMax) return std::nullopt;
  const std::span<const uint8_t> ip = frame.subspan(kVnet);
  const std::optional<IpHeader> header = ParseIp(ip);
  if (!header) return std::nullopt;

  Packet packet;
  packet.src_ = HostNumber(header->src);
  packet.dst_ = HostNumber(header->dst);
  if (packet.src_ == 0 || packet.dst_ == 0) return std::nullopt;

  const std::span<const uint8_t> transport = ip.subspan(header->bytes);
  packet.flow_.protocol = header->protocol;
  std::optional<size_t> transport_bytes;
  if (header->has_ports) transport_bytes = TransportHeaderBytes(header->protocol, transport);
  if (transport_bytes) {
    packet.flow_.src_port = static_cast<uint16_t>(Load16(&transport[0]));
    packet.flow_.dst_port = static_cast<uint16_t>(Load16(&transport[2]));
  }
  packet.header_bytes_ = static_cast<uint16_t>(header->bytes + transport_bytes.value_or(0));

  VnetHeader vnet;
  std::memcpy(&vnet, frame.data(), kVnet);
  if (vnet.gso_type != 0) {
    if (!transport_bytes || vnet.gso_size == 0) return std::nullopt;
    const size_t payload = ip.size() - packet.header_bytes_;
    packet.segment_payload_ = vnet.gso_size;
    packet.segments_ =
        static_cast<uint16_t>(std::max<size_t>(1, (payload + vnet.gso_size - 1) / vnet.gso_size));
  }
  packet.size_ = static_cast<uint32_t>(frame.size());
  packet.frame_ = std::make_unique_for_overwrite<uint8_t[]>(frame.size());
  std::memcpy(packet.frame_.get(), frame.data(), frame.size());
  return packet;
}

int64_t Packet::ip_bytes() const { return static_cast<int64_t>(size_ - kVnet); }

Packet Packet::Slice(int first, int count) const {
  LH_CHECK(first >= 0 && count > 0 && first + count <= segments_)
      << first << " " << count << " of " << segments_;
  const size_t headers = kVnet + header_bytes_;
  const size_t begin = headers + static_cast<size_t>(first) * segment_payload_;
  const size_t end = std::min<size_t>(size_, begin + static_cast<size_t>(count) * segment_payload_);

  Packet part;
  part.size_ = static_cast<uint32_t>(headers + (end - begin));
  part.segments_ = static_cast<uint16_t>(count);
  part.segment_payload_ = segment_payload_;
  part.header_bytes_ = header_bytes_;
  part.src_ = src_;
  part.dst_ = dst_;
  part.flow_ = flow_;
  part.frame_ = std::make_unique_for_overwrite<uint8_t[]>(part.size_);
  std::memcpy(part.frame_.get(), frame_.get(), headers);
  std::memcpy(part.frame_.get() + headers, frame_.get() + begin, end - begin);
  part.FixHeaders(first, first + count == segments_);
  return part;
}

// Corrects the headers of a slice as segmentation does for each segment.
void Packet::FixHeaders(int first_segment, bool has_last_segment) {
  if (segments_ == 1) {
    VnetHeader vnet;
    std::memcpy(&vnet, frame_.get(), kVnet);
    vnet.gso_type = 0;
    vnet.gso_size = 0;
    std::memcpy(frame_.get(), &vnet, kVnet);
  }

  uint8_t* const ip = frame_.get() + kVnet;
  const std::optional<IpHeader> header = ParseIp({ip, static_cast<size_t>(ip_bytes())});
  LH_CHECK(header.has_value());
  const uint32_t transport_bytes =
      static_cast<uint32_t>(ip_bytes()) - static_cast<uint32_t>(header->bytes);
  if (header->src.size() == 4) {
    Store16(ip + 2, static_cast<uint32_t>(ip_bytes()));
    Store16(ip + 4, Load16(ip + 4) + static_cast<uint32_t>(first_segment));  // identification
    Store16(ip + 10, 0);
    Store16(ip + 10, ~Sum16({ip, header->bytes}));
  } else {
    Store16(ip + 4, transport_bytes);
  }

  uint8_t* const transport = ip + header->bytes;
  uint8_t* checksum = transport + 6;
  if (header->protocol == IPPROTO_TCP) {
    uint32_t sequence;
    std::memcpy(&sequence, transport + 4, sizeof(sequence));
    sequence = htonl(ntohl(sequence) + static_cast<uint32_t>(first_segment) * segment_payload_);
    std::memcpy(transport + 4, &sequence, sizeof(sequence));
    uint8_t& flags = transport[13];
    if (!has_last_segment) flags = static_cast<uint8_t>(flags & ~(TH_FIN | TH_PUSH));
    if (first_segment > 0) flags = static_cast<uint8_t>(flags & ~kTcpCwr);
    checksum = transport + 16;
  } else {
    Store16(transport + 4, transport_bytes);
  }
  // The receiving device completes the checksum. It starts from the sum of the pseudo-header, which
  // is stored here.
  const uint32_t addresses = Sum16(header->dst, Sum16(header->src));
  Store16(checksum, Sum16({}, addresses + header->protocol + transport_bytes));
}

}  // namespace longhaul::wan
