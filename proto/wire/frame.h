// The frames on lanes between peers. A frame is a fixed header of 64 bytes, little-endian, and
// `payload_bytes` of payload.
//
//   0 magic u32 | 4 type u8 | 5 flags u8 | 6 zero u16 | 8 group u32 | 12 payload_bytes u32
//  16 op u64 | 24 attempt u64 | 32 offset u64 | 40 phase u32 | 44 zero u32 | 48 stamp u64 |
//  56 acked u64
//
// A frame does not name the run: a lane belongs to one run from its handshake on.
// Data lanes carry DATA, CHUNK_DATA, PING (which has no PONG there) and CLOSE. Control lanes carry
// everything but DATA and CHUNK_DATA.
//
// READY, DONE, WANT_LANES, LANE_LOST, CHUNK_REQUEST, CHUNK_REFUSED and CHUNK_CANCEL are numbered.
// Each end of a link counts the numbered frames that it sends, across all control lanes of the
// link. `acked` says how many numbered frames the sender has received. When a control lane is lost,
// an end sends the frames again that the other end has not received. PING, PONG, ACK, RESUME and
// CLOSE are not numbered: they concern only the connection that carries them.
//
// DATA and CHUNK_DATA frames are counted on each data lane. `acked` of a PING on a data lane says
// how many of them its sender has received whole on that lane. A receiver sends such a PING after
// at most LH_SEGMENTS_PER_ACK of them.
//
// The four CHUNK_ types move shared state (docs/life_of_a_sync.md). The peer that fetches numbers
// its transfers and the asks of each transfer. In a CHUNK_ frame `op` holds the transfer, and
// `attempt` holds the ask.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "proto/wire/limits.h"
#include "proto/wire/op_desc.h"

namespace longhaul {

inline constexpr uint32_t kFrameMagic = 0x3146484cu;  // "LHF1"
inline constexpr size_t kFrameHeaderBytes = 64;

enum class FrameType : uint8_t {
  // stamp on a control lane: the sender's clock, which the PONG returns. stamp on a data lane: for
  // how many ms longer than usual the sender may be silent.
  kPing = 1,
  kPong = 2,
  // op: the sender's ordinal. offset: the latest NewPost::step of its members, which is not signed.
  // Payload: ReadyBody, then a one-shot input or a result. flags bit 0: a
  // signature follows (kSignatureBytes), and stamp is SignedReady::index
  // (proto/control/signed_ready.h).
  kReady = 3,
  // op: the receiver's ordinal. flags bit 0: refused; bit 1: not done yet, only started. Payload:
  // if the READYs of the attempt are signed, a digest of all of them (Hash128), else nothing.
  kDone = 4,
  kData = 5,  // op: the receiver's ordinal. offset, phase, payload: the segment
  // The sender needs data lanes, and the receiver has to dial them. flags bit 0: if the lanes
  // cannot be built, the link stays as it is. offset: how many lanes the sender would use, at most
  // LH_LANES_MAX; 0: the receiver chooses.
  kWantLanes = 6,
  kChunkCancel = 7,  // the receiver drops the ask `attempt`; 0: the whole transfer
  kAck = 8,          // acknowledges numbered frames (`acked`) between two PINGs
  // The sender has lost a data lane. group: its index; stamp: its serial; offset: how many DATA and
  // CHUNK_DATA frames the sender had received whole on it. The receiver sends the rest again.
  kLaneLost = 9,
  kResume = 10,  // both ends send it first on a control lane that replaces a lost one
  // The last frame on a connection. flags bit 0: the sender gives the link up, and frames and
  // segments may be missing. Otherwise the sender has sent everything and does not need the link.
  kClose = 11,
  // Payload: ChunkRequestBody. stamp: asks of this transfer with lower numbers are over at the
  // sender, so the receiver drops them.
  kChunkRequest = 12,
  // A piece of an answer. stamp: bytes of the whole answer; offset: where the piece begins in it.
  kChunkData = 13,
  kChunkRefused = 14,  // payload: ChunkRefusedBody
  // A numbered frame whose payload travels in parts on data lanes. op: the number of this PARTED
  // among those of the sender, from 1. Payload: the frame's own header, 64 bytes. The frame takes
  // its place among the numbered frames when all parts are here.
  kParted = 15,
  // A part of such a payload. op: the number of the PARTED. stamp: bytes of the whole payload;
  // offset: where the part begins in it.
  kPart = 16,
};

inline constexpr uint8_t kFlagSigned = 1;          // READY
inline constexpr uint8_t kFlagRefused = 1;         // DONE
inline constexpr size_t kReadiesDigestBytes = 16;  // the payload of a DONE, if it has one
// DONE: the sender has the READY of every participant, so it knows all terms of the op, and takes
// segments from now on. The DONE proper follows later.
inline constexpr uint8_t kFlagStarted = 2;
inline constexpr uint8_t kFlagGivenUp = 1;   // CLOSE
inline constexpr uint8_t kFlagOptional = 1;  // WANT_LANES
// LANE_LOST: nothing that the lost lane carried ever arrived (peerd/paths/black_hole.h calls it
// barren). RESUME: the same is true of the control lane that this one replaces.
inline constexpr uint8_t kFlagBarren = 1;

// The half of an all-reduce that a segment belongs to.
enum class Phase : uint32_t { kReduce = 0, kGather = 1 };

struct FrameHeader {
  FrameType type = FrameType::kPing;
  uint8_t flags = 0;
  uint32_t group = 0;
  uint32_t payload_bytes = 0;
  OpOrdinal op;
  Epoch attempt;  // the newest epoch that froze ops; CHUNK_ types: the ask
  // Bytes from the start of the tensor, of the answer, or of the payload in parts. PING on a
  // control lane, PONG, ACK, RESUME: how many frames in parts have come whole.
  uint64_t offset = 0;
  Phase phase = Phase::kReduce;
  uint64_t stamp = 0;
  // PING, PONG, ACK, RESUME: numbered frames received. PING on a data lane: segments received.
  uint64_t acked = 0;
  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

// A kProbe lane carries no frames, only bytes that the receiver throws away.
enum class LaneKind : uint8_t { kControl = 0, kData = 1, kProbe = 2 };

// Returns whether the frame is numbered. A numbered frame arrives exactly once and in order, even
// if control lanes are lost on the way.
constexpr bool IsNumbered(FrameType type) {
  switch (type) {
    case FrameType::kReady:
    case FrameType::kDone:
    case FrameType::kWantLanes:
    case FrameType::kLaneLost:
    case FrameType::kChunkRequest:
    case FrameType::kChunkRefused:
    case FrameType::kChunkCancel:
    case FrameType::kParted:
      return true;
    case FrameType::kPart:
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

// Returns whether the frame moves shared state: `op` is the transfer, `attempt` the ask.
constexpr bool IsOfTransfer(FrameType type) {
  return type == FrameType::kChunkRequest || type == FrameType::kChunkData ||
         type == FrameType::kChunkRefused || type == FrameType::kChunkCancel;
}

// Returns whether the frame is a segment. The payload of a segment is received straight into memory
// that the listener names. It is sent again if its lane is lost.
constexpr bool IsSegment(FrameType type) {
  return type == FrameType::kData || type == FrameType::kChunkData || type == FrameType::kPart;
}

// Returns whether a numbered frame is meant for the listener of the link, and not for the link.
constexpr bool IsForListener(FrameType type) {
  return IsNumbered(type) && type != FrameType::kWantLanes && type != FrameType::kLaneLost;
}

// Returns whether the payload of a frame of this type may travel in parts.
constexpr bool MayBeParted(FrameType type) { return type == FrameType::kReady; }

std::array<uint8_t, kFrameHeaderBytes> Encode(const FrameHeader& header);

// InvalidArgument: the magic is wrong, the type does not belong on a lane of `kind`, the payload is
// beyond the limit of its type, a reserved byte is not zero, or a field is not allowed for the
// type. The text names the field and its value.
absl::StatusOr<FrameHeader> ParseFrameHeader(std::span<const uint8_t, kFrameHeaderBytes> bytes,
                                             LaneKind kind);

// The second offer in a READY, 56 bytes:
//   0 member u64 | 8 the fields of OpDesc in their order, then zeros
// Of a list its outline follows: bytes u16 | the bytes.
inline constexpr size_t kOtherOfferBytes = 8 + kOpDescBytes;

std::string Encode(const OtherOffer& offer);
std::string Encode(const OpRefusal& refusal);

// The first part of a READY's payload. Its fixed part has 88 bytes:
//   0 boundary u64 | 8 tag u64 | 16 set u64 | 24 the fields of OpDesc in their order, then zeros
//  72 follows u8 | 73 input u8 | 74 members u16 | 76 result_members u32 | 80 result_epoch
//  u64
// Then come the OpTerms of `members` members, each:
//   weight f64, if desc.weighted
//   gives u16 | gets u16 | so many lengths u64, if desc.unequal
// Then comes the outline of a list, as in an OtherOffer, if there is no result. Then comes a
// one-shot input or a result (`follows` is 0), an OtherOffer (1), or a refusal (2). A result is
// `result_members` ids of members (u64 each), then the whole tensor. A refusal is member u64 | step
// u64 | the text.
struct ReadyBody {
  Epoch boundary;
  uint64_t tag = 0;
  uint64_t set = 0;  // a digest of the ids of the members that take part (SetOf()); 0: all members
  OpDesc desc;
  // Set if the sender's own members offer different ops. Then `desc` is the offer of the first
  // member, and `other_offer` is an offer that differs from it.
  std::optional<OtherOffer> other_offer;
  // Set: the call of one of the sender's members was refused. `desc` is RefusedDesc().
  std::optional<OpRefusal> refusal;
  // Of the sender's members, in rank order, if desc.NeedsTerms(). Empty with a result or another
  // offer.
  std::vector<OpTerms> terms;
  std::string outline = {};  // of a list, if there is no result; see OutlineFault()
  // Not 0: this one-shot op has ended at the sender in this epoch, and its result follows.
  // `result_members`: how many members' inputs are in the result. Their ids follow, in rank order.
  Epoch result_epoch;
  uint32_t result_members = 0;
  ReadyInput input = ReadyInput::kSegments;
  friend bool operator==(const ReadyBody&, const ReadyBody&) = default;
};
inline constexpr size_t kReadyBodyBytes = 88;

// Encodes the first part. The caller appends what follows it.
std::string Encode(const ReadyBody& body);
// Returns the first part, and sets *rest to what follows it.
absl::StatusOr<ReadyBody> ParseReadyBody(std::span<const uint8_t> payload,
                                         std::span<const uint8_t>* rest);

// What a peer that fetches a state asks of a peer that has the state.
enum class ChunkKind : uint32_t {
  kManifest = 1,  // EncodeManifest() (peerd/state/memory_state.h)
  kDigests = 2,   // 16 bytes each (high u64, low u64), of all chunks of all tensors in order
  kChunk = 3,     // chunk `chunk` of tensor `tensor`
};

// The payload of a CHUNK_REQUEST, 40 bytes:
//   0 source u64 | 8 root (high u64, low u64) | 24 kind u32 | 28 tensor u32 | 32 chunk u64
struct ChunkRequestBody {
  MemberId source;
  Hash128 root;  // of the wanted state; for kManifest 0 means any state
  ChunkKind kind = ChunkKind::kChunk;
  uint32_t tensor = 0;  // only for kChunk
  uint64_t chunk = 0;   // only for kChunk
  friend bool operator==(const ChunkRequestBody&, const ChunkRequestBody&) = default;
};
inline constexpr size_t kChunkRequestBodyBytes = 40;

std::array<uint8_t, kChunkRequestBodyBytes> Encode(const ChunkRequestBody& body);
absl::StatusOr<ChunkRequestBody> ParseChunkRequestBody(std::span<const uint8_t> payload);

enum class ChunkRefusal : uint32_t {
  kNotHere = 1,  // the source does not serve this state: not yet, or not any more
  kChanged = 2,  // the source's copy of the chunk has other bits by now
  kBusy = 3,     // the source serves too many transfers: ask again later
  kOver = 4,     // the source's trainer goes on from this state, and the source keeps no copy of it
};

// The payload of a CHUNK_REFUSED, 4 bytes: code u32
struct ChunkRefusedBody {
  ChunkRefusal code = ChunkRefusal::kNotHere;
  friend bool operator==(const ChunkRefusedBody&, const ChunkRefusedBody&) = default;
};
inline constexpr size_t kChunkRefusedBodyBytes = 4;

std::array<uint8_t, kChunkRefusedBodyBytes> Encode(const ChunkRefusedBody& body);
absl::StatusOr<ChunkRefusedBody> ParseChunkRefusedBody(std::span<const uint8_t> payload);

// Returns the header of a frame of one of the four CHUNK_ types. `payload_bytes` is the size of the
// type's payload; for CHUNK_DATA it is 0, and the caller sets it.
FrameHeader ChunkFrame(FrameType type, uint32_t group, uint64_t transfer, uint64_t ask);

}  // namespace longhaul
