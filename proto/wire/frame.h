// Frames on lanes between peers: a fixed header of 64 bytes, little-endian, then `payload_bytes`.
//
//   0 magic u32 | 4 type u8 | 5 flags u8 | 6 zero u16 | 8 group u32 | 12 payload_bytes u32
//  16 op u64 | 24 attempt u64 | 32 offset u64 | 40 phase u32 | 44 zero u32 | 48 stamp u64 |
//  56 acked u64
//
// The run is not in a frame: a lane belongs to one run from its handshake on.
// Data lanes carry DATA, CHUNK_DATA, PING (no PONG follows) and CLOSE; control lanes carry
// everything but DATA and CHUNK_DATA.
//
// READY, DONE, WANT_LANES, LANE_LOST, CHUNK_REQUEST, CHUNK_REFUSED and CHUNK_CANCEL are
// numbered: the n-th that an end of the link sends is its number n, on whichever control lane it
// goes. Each end says in `acked` how many it has received, and after the loss of a control lane
// sends those again that the other end has not. PING, PONG, ACK, RESUME and CLOSE belong to the
// connection on which they go.
//
// DATA and CHUNK_DATA are counted on each data lane: `acked` of a PING there is how many of them
// its sender received whole on that lane. A PING follows at the latest LH_SEGMENTS_PER_ACK of them.
//
// The four of CHUNK_ move shared state (docs/adr/0014-shared-state.md). `op` is the transfer of the
// peer that fetches, `attempt` one ask of it; both are that peer's own numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "proto/wire/limits.h"
#include "proto/wire/op_desc.h"

namespace longhaul {

inline constexpr uint32_t kFrameMagic = 0x3146484cu;  // "LHF1"
inline constexpr size_t kFrameHeaderBytes = 64;

enum class FrameType : uint8_t {
  // stamp: on a control lane the sender's clock, returned in the PONG; on a data lane for how many
  // ms longer than usual it may say nothing
  kPing = 1,
  kPong = 2,
  kReady = 3,  // op: the sender's ordinal. Payload: ReadyBody, then a one-shot input or a result
  kDone = 4,   // op: the receiver's ordinal. flags bit 0: refused
  kData = 5,   // op: the receiver's ordinal. offset, phase, payload: the segment
  // The sender needs data lanes that the receiver has to dial. flags bit 0: if they cannot be
  // built, the link stays as it is. offset: how many it would use, at most LH_LANES_MAX; 0: as
  // many as the receiver finds right.
  kWantLanes = 6,
  kChunkCancel = 7,  // attempt 0: the whole transfer
  kAck = 8,          // acked, between PINGs
  // A data lane is gone at the sender's end. group: its index; stamp: its serial; offset: how many
  // DATA and CHUNK_DATA frames the sender received whole on it. The receiver sends the others
  // again.
  kLaneLost = 9,
  kResume = 10,  // first on a control lane that replaces a lost one, both ways
  // Last on a connection, whose end follows. flags bit 0: the link is given up, frames and segments
  // may be missing; else the sender has sent all it had and needs the link no more.
  kClose = 11,
  // stamp: the sender's asks of this transfer and this peer below that number are over. Payload:
  // ChunkRequestBody
  kChunkRequest = 12,
  // A piece of the answer. stamp: bytes of the whole answer; offset: of the piece in it
  kChunkData = 13,
  kChunkRefused = 14,  // payload: ChunkRefusedBody
};

inline constexpr uint8_t kFlagRefused = 1;   // DONE
inline constexpr uint8_t kFlagGivenUp = 1;   // CLOSE
inline constexpr uint8_t kFlagOptional = 1;  // WANT_LANES
inline constexpr uint8_t kFlagBarren = 1;    // LANE_LOST, RESUME: of the lane before

// Which half of an all-reduce a segment belongs to.
enum class Phase : uint32_t { kReduce = 0, kGather = 1 };

struct FrameHeader {
  FrameType type = FrameType::kPing;
  uint8_t flags = 0;
  uint32_t group = 0;
  uint32_t payload_bytes = 0;
  OpOrdinal op;
  Epoch attempt;
  uint64_t offset = 0;  // bytes from the start of the tensor, or of the answer
  Phase phase = Phase::kReduce;
  uint64_t stamp = 0;
  // PING, PONG, ACK, RESUME: numbered frames received; PING on a data lane: segments
  uint64_t acked = 0;
  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

// kProbe: carries no frames, only bytes that are thrown away.
enum class LaneKind : uint8_t { kControl = 0, kData = 1, kProbe = 2 };

// Arrives exactly once and in order, over as many control lanes as it takes.
constexpr bool IsNumbered(FrameType type) {
  switch (type) {
    case FrameType::kReady:
    case FrameType::kDone:
    case FrameType::kWantLanes:
    case FrameType::kLaneLost:
    case FrameType::kChunkRequest:
    case FrameType::kChunkRefused:
    case FrameType::kChunkCancel:
      return true;
    case FrameType::kPing:
    case FrameType::kPong:
    case FrameType::kData:
    case FrameType::kChunkData:
    case FrameType::kAck:
    case FrameType::kResume:
    case FrameType::kClose:
      return false;
  }
  return false;
}

// Moves shared state: `op` is the transfer, `attempt` the ask.
constexpr bool IsOfTransfer(FrameType type) {
  return type == FrameType::kChunkRequest || type == FrameType::kChunkData ||
         type == FrameType::kChunkRefused || type == FrameType::kChunkCancel;
}

// The payload of these is received where the listener says, and sent again if its lane is lost.
constexpr bool IsSegment(FrameType type) {
  return type == FrameType::kData || type == FrameType::kChunkData;
}

std::array<uint8_t, kFrameHeaderBytes> Encode(const FrameHeader& header);

// Refuses (InvalidArgument, naming field and value) a wrong magic, a type that does not belong on a
// lane of `kind`, a payload beyond the limit of its type, and non-zero reserved bytes.
absl::StatusOr<FrameHeader> ParseFrameHeader(std::span<const uint8_t, kFrameHeaderBytes> bytes,
                                             LaneKind kind);

// The second offer in a READY, 43 bytes:
//   0 member u64 | 8 the fields of OpDesc in their order, then zeros
inline constexpr size_t kOtherOfferBytes = 8 + kOpDescBytes;

std::array<uint8_t, kOtherOfferBytes> Encode(const OtherOffer& offer);

// The fixed part of a READY's payload, 64 bytes; a one-shot input, a result, or an OtherOffer
// follows:
//   0 boundary u64 | 8 tag u64 | 16 the fields of OpDesc in their order, then zeros
//  51 has_other_offer u8 | 52 result_members u32 | 56 result_epoch u64
struct ReadyBody {
  Epoch boundary;
  uint64_t tag = 0;
  OpDesc desc;
  // The sender's own members disagree: `desc` is the offer of its first one.
  std::optional<OtherOffer> other_offer;
  // Not 0: the op has ended at the sender, with the result that follows: of so many members of this
  // epoch.
  Epoch result_epoch;
  uint32_t result_members = 0;
  friend bool operator==(const ReadyBody&, const ReadyBody&) = default;
};
inline constexpr size_t kReadyBodyBytes = 64;

// Without the OtherOffer, which follows.
std::array<uint8_t, kReadyBodyBytes> Encode(const ReadyBody& body);
absl::StatusOr<ReadyBody> ParseReadyBody(std::span<const uint8_t> payload);

// What a peer asks of another one that holds a state.
enum class ChunkKind : uint32_t {
  kManifest = 1,  // EncodeManifest() (peerd/state/memory_state.h)
  kDigests = 2,   // 16 bytes each (high u64, low u64), of all chunks of all tensors in order
  kChunk = 3,     // chunk `chunk` of tensor `tensor`
};

// The payload of a CHUNK_REQUEST, 40 bytes:
//   0 source u64 | 8 root (high u64, low u64) | 24 kind u32 | 28 tensor u32 | 32 chunk u64
struct ChunkRequestBody {
  MemberId source;
  Hash128 root;  // of the state that is asked for; kManifest: 0 is any
  ChunkKind kind = ChunkKind::kChunk;
  uint32_t tensor = 0;  // kChunk
  uint64_t chunk = 0;   // kChunk
  friend bool operator==(const ChunkRequestBody&, const ChunkRequestBody&) = default;
};
inline constexpr size_t kChunkRequestBodyBytes = 40;

std::array<uint8_t, kChunkRequestBodyBytes> Encode(const ChunkRequestBody& body);
absl::StatusOr<ChunkRequestBody> ParseChunkRequestBody(std::span<const uint8_t> payload);

enum class ChunkRefusal : uint32_t {
  kNotHere = 1,  // the source does not serve this state (yet, or any more)
  kChanged = 2,  // its bits are not those of the state any more
  kBusy = 3,     // ask again later
};

// The payload of a CHUNK_REFUSED, 4 bytes: code u32
struct ChunkRefusedBody {
  ChunkRefusal code = ChunkRefusal::kNotHere;
  friend bool operator==(const ChunkRefusedBody&, const ChunkRefusedBody&) = default;
};
inline constexpr size_t kChunkRefusedBodyBytes = 4;

std::array<uint8_t, kChunkRefusedBodyBytes> Encode(const ChunkRefusedBody& body);
absl::StatusOr<ChunkRefusedBody> ParseChunkRefusedBody(std::span<const uint8_t> payload);

// The header of one of the four of CHUNK_, `payload_bytes` as its type demands (0 of CHUNK_DATA).
FrameHeader ChunkFrame(FrameType type, uint32_t group, uint64_t transfer, uint64_t ask);

}  // namespace longhaul
