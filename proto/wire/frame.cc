#include "proto/wire/frame.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/bytes.h"
#include "base/status_macros.h"

namespace longhaul {
namespace {

absl::Status Refuse(const char* field, uint64_t value, const char* wanted) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, ", not ", wanted));
}

bool IsKnown(uint8_t type) {
  return type >= static_cast<uint8_t>(FrameType::kPing) &&
         type <= static_cast<uint8_t>(FrameType::kPart);
}

bool BelongsOn(FrameType type, LaneKind kind) {
  if (type == FrameType::kPing || type == FrameType::kClose) return true;
  return IsSegment(type) == (kind == LaneKind::kData);
}

bool CarriesAck(FrameType type) {
  return type == FrameType::kPing || type == FrameType::kPong || type == FrameType::kAck ||
         type == FrameType::kResume;
}

absl::Status CheckPayload(FrameType type, uint32_t bytes) {
  switch (type) {
    case FrameType::kReady:
      if (bytes < kReadyBodyBytes || bytes > LH_PARTED_PAYLOAD_BYTES_MAX) {
        return Refuse("payload_bytes of READY", bytes, "88 to 1061056");
      }
      return absl::OkStatus();
    case FrameType::kParted:
      if (bytes != kFrameHeaderBytes) return Refuse("payload_bytes of PARTED", bytes, "64");
      return absl::OkStatus();
    case FrameType::kPart:
      if (bytes == 0 || bytes > LH_PARTED_PAYLOAD_BYTES_MAX) {
        return Refuse("payload_bytes of PART", bytes, "1 to 1061056");
      }
      return absl::OkStatus();
    case FrameType::kDone:
      if (bytes != 0 && bytes != kReadiesDigestBytes) {
        return Refuse("payload_bytes of DONE", bytes, "0 or 16");
      }
      return absl::OkStatus();
    case FrameType::kData:
      if (bytes == 0 || bytes > LH_SEGMENT_BYTES_MAX) {
        return Refuse("payload_bytes of DATA", bytes, "1 to 4194304");
      }
      return absl::OkStatus();
    case FrameType::kChunkRequest:
      if (bytes != kChunkRequestBodyBytes) {
        return Refuse("payload_bytes of CHUNK_REQUEST", bytes, "40");
      }
      return absl::OkStatus();
    case FrameType::kChunkData:
      if (bytes == 0 || bytes > LH_SEGMENT_BYTES_MAX) {
        return Refuse("payload_bytes of CHUNK_DATA", bytes, "1 to 4194304");
      }
      return absl::OkStatus();
    case FrameType::kChunkRefused:
      if (bytes != kChunkRefusedBodyBytes) {
        return Refuse("payload_bytes of CHUNK_REFUSED", bytes, "4");
      }
      return absl::OkStatus();
    case FrameType::kPing:
    case FrameType::kPong:
    case FrameType::kWantLanes:
    case FrameType::kAck:
    case FrameType::kLaneLost:
    case FrameType::kResume:
    case FrameType::kClose:
    case FrameType::kChunkCancel:
      if (bytes != 0) return Refuse("payload_bytes", bytes, "0 as this type demands");
      return absl::OkStatus();
  }
  return absl::OkStatus();
}
// Each with a signature: a result with the ids of its members; weights with a one-shot input in
// float32; lengths.
constexpr size_t kReadyFixedBytes = kReadyBodyBytes + LH_SIGNATURE_BYTES;
static_assert(kReadyFixedBytes + size_t{8} * LH_MEMBERS_MAX + LH_ONE_SHOT_BYTES_MAX <=
              LH_CONTROL_PAYLOAD_BYTES_MAX);
static_assert(kReadyFixedBytes + size_t{8} * LH_LOCAL_MEMBERS_MAX +
                  size_t{2} * LH_ONE_SHOT_BYTES_MAX <=
              LH_CONTROL_PAYLOAD_BYTES_MAX);
static_assert(kReadyFixedBytes + static_cast<size_t>(LH_OP_TERMS_BYTES_MAX) <=
              LH_CONTROL_PAYLOAD_BYTES_MAX);
static_assert(LH_CONTROL_PAYLOAD_BYTES_MAX == 12480 && LH_PARTED_PAYLOAD_BYTES_MAX == 1061056);
static_assert(kOtherOfferBytes == 56);
static_assert(LH_SEGMENT_BYTES_MAX == 4194304);
static_assert(kChunkRequestBodyBytes == 40 && kChunkRefusedBodyBytes == 4);

absl::Status CheckTransferFields(const FrameHeader& header) {
  if (!header.op) return Refuse("transfer", 0, "a number");
  if (!header.attempt && header.type != FrameType::kChunkCancel) {
    return Refuse("ask", 0, "a number");
  }
  if (header.phase != Phase::kReduce) {
    return Refuse("phase", static_cast<uint64_t>(header.phase), "0 as this type demands");
  }
  if (header.type != FrameType::kChunkData) return absl::OkStatus();
  if (header.stamp >= LH_COUNT_MAX * 8) {
    return Refuse("bytes of the answer", header.stamp, "below 2^51");
  }
  // The sum cannot overflow, because the offset is bounded.
  if (header.offset + header.payload_bytes > header.stamp) {
    return Refuse("end of the piece", header.offset + header.payload_bytes, "within the answer");
  }
  return absl::OkStatus();
}

absl::Status CheckPartFields(const FrameHeader& header) {
  if (!header.op) return Refuse("number of a frame in parts", 0, "a number");
  if (header.type == FrameType::kParted) return absl::OkStatus();
  if (header.stamp > LH_PARTED_PAYLOAD_BYTES_MAX) {
    return Refuse("bytes of a payload in parts", header.stamp, "at most 1061056");
  }
  // The sum cannot overflow, because the offset is bounded.
  if (header.offset + header.payload_bytes > header.stamp) {
    return Refuse("end of the part", header.offset + header.payload_bytes, "within the payload");
  }
  return absl::OkStatus();
}

// Checks the values of single fields.
absl::Status CheckFields(const FrameHeader& header) {
  const FrameType type = header.type;
  uint8_t known = 0;
  if (type == FrameType::kReady) known = kFlagSigned;
  if (type == FrameType::kDone) known = kFlagRefused | kFlagStarted;
  if (type == FrameType::kClose) known = kFlagGivenUp;
  if (type == FrameType::kWantLanes) known = kFlagOptional;
  if (type == FrameType::kLaneLost || type == FrameType::kResume) known = kFlagBarren;
  if ((header.flags & ~known) != 0 || header.flags == (kFlagRefused | kFlagStarted)) {
    return Refuse("flags", header.flags, "known for this type");
  }
  if (type == FrameType::kReady) {
    const bool is_signed = (header.flags & kFlagSigned) != 0;
    if (is_signed && header.payload_bytes < kReadyBodyBytes + LH_SIGNATURE_BYTES) {
      return Refuse("payload_bytes of a signed READY", header.payload_bytes, "152 or more");
    }
    if (!is_signed && header.stamp != 0)
      return Refuse("stamp", header.stamp, "0 as it is unsigned");
  }
  const bool names_op =
      type == FrameType::kReady || type == FrameType::kDone || type == FrameType::kData;
  if (names_op && !header.op) return Refuse("op", 0, "an ordinal");
  if (header.phase != Phase::kReduce && header.phase != Phase::kGather) {
    return Refuse("phase", static_cast<uint64_t>(header.phase), "0 or 1");
  }
  if (header.offset >= LH_COUNT_MAX * 8) return Refuse("offset", header.offset, "below 2^51");
  if (header.acked != 0 && !CarriesAck(type)) {
    return Refuse("acked", header.acked, "0 as this type demands");
  }
  if (type == FrameType::kLaneLost && header.group >= LH_LANES_MAX) {
    return Refuse("lane of LANE_LOST", header.group, "below 256");
  }
  if (IsOfTransfer(type)) return CheckTransferFields(header);
  if (type == FrameType::kParted || type == FrameType::kPart) return CheckPartFields(header);
  return absl::OkStatus();
}

}  // namespace

std::array<uint8_t, kFrameHeaderBytes> Encode(const FrameHeader& header) {
  std::array<uint8_t, kFrameHeaderBytes> bytes;
  ByteWriter writer(bytes);
  writer.U32(kFrameMagic);
  writer.U8(static_cast<uint8_t>(header.type));
  writer.U8(header.flags);
  writer.U16(0);
  writer.U32(header.group);
  writer.U32(header.payload_bytes);
  writer.U64(header.op.value());
  writer.U64(header.attempt.value());
  writer.U64(header.offset);
  writer.U32(static_cast<uint32_t>(header.phase));
  writer.U32(0);
  writer.U64(header.stamp);
  writer.U64(header.acked);
  return bytes;
}

absl::StatusOr<FrameHeader> ParseFrameHeader(std::span<const uint8_t, kFrameHeaderBytes> bytes,
                                             LaneKind kind) {
  ByteReader reader(bytes);
  if (const uint32_t magic = reader.U32(); magic != kFrameMagic) {
    return absl::InvalidArgumentError(absl::StrFormat("frame magic is 0x%08x, not LHF1", magic));
  }
  FrameHeader header;
  const uint8_t type = reader.U8();
  header.type = static_cast<FrameType>(type);
  if (!IsKnown(type) || !BelongsOn(header.type, kind)) {
    return Refuse("frame type", type,
                  kind == LaneKind::kData ? "one of a data lane" : "one of a control lane");
  }
  header.flags = reader.U8();
  if (!reader.Zeros(2)) return absl::InvalidArgumentError("reserved bytes 6 to 7 are not zero");
  header.group = reader.U32();
  header.payload_bytes = reader.U32();
  header.op = OpOrdinal(reader.U64());
  header.attempt = Epoch(reader.U64());
  header.offset = reader.U64();
  header.phase = static_cast<Phase>(reader.U32());
  if (!reader.Zeros(4)) return absl::InvalidArgumentError("reserved bytes 44 to 47 are not zero");
  header.stamp = reader.U64();
  header.acked = reader.U64();
  LH_RETURN_IF_ERROR(CheckPayload(header.type, header.payload_bytes));
  LH_RETURN_IF_ERROR(CheckFields(header));
  return header;
}

namespace {

// What follows a READY's fixed part and its terms.
enum class Follows : uint8_t { kTensor = 0, kOtherOffer = 1, kRefusal = 2 };

std::string OutlineBytes(const OpDesc& desc, const std::string& outline) {
  if (desc.list == 0) return "";
  std::string bytes(2, '\0');
  ByteWriter writer({reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()});
  writer.U16(static_cast<uint16_t>(outline.size()));
  return bytes + outline;
}

}  // namespace

std::string Encode(const OtherOffer& offer) {
  std::string bytes(kOtherOfferBytes, '\0');
  ByteWriter writer({reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()});
  writer.U64(offer.member.value());
  Write(offer.desc, &writer);
  return bytes + OutlineBytes(offer.desc, offer.outline);
}

std::string Encode(const OpRefusal& refusal) {
  std::string bytes(16, '\0');
  ByteWriter writer({reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()});
  writer.U64(refusal.member.value());
  writer.U64(refusal.step);
  return bytes + refusal.why;
}

std::string Encode(const ReadyBody& body) {
  std::string bytes(kReadyBodyBytes + TermsBytes(body.desc, body.terms), '\0');
  ByteWriter writer({reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()});
  writer.U64(body.boundary.value());
  writer.U64(body.tag);
  writer.U64(body.set);
  Write(body.desc, &writer);
  writer.U8(static_cast<uint8_t>(body.refusal       ? Follows::kRefusal
                                 : body.other_offer ? Follows::kOtherOffer
                                                    : Follows::kTensor));
  writer.U8(static_cast<uint8_t>(body.input));
  writer.U16(static_cast<uint16_t>(body.terms.size()));
  writer.U32(body.result_members);
  writer.U64(body.result_epoch.value());
  for (const OpTerms& terms : body.terms) {
    if (body.desc.weighted) writer.U64(std::bit_cast<uint64_t>(terms.weight));
    if (!body.desc.unequal) continue;
    writer.U16(static_cast<uint16_t>(terms.gives.size()));
    writer.U16(static_cast<uint16_t>(terms.gets.size()));
    for (const uint64_t length : terms.gives) writer.U64(length);
    for (const uint64_t length : terms.gets) writer.U64(length);
  }
  return body.result_epoch ? bytes : bytes + OutlineBytes(body.desc, body.outline);
}

namespace {

// Takes the outline of a list from the bytes that are left of the payload.
absl::Status ParseOutline(ByteReader* reader, std::span<const uint8_t> payload, const OpDesc& desc,
                          std::string* outline) {
  if (desc.list == 0) return absl::OkStatus();
  const uint16_t size = reader->U16();
  if (!reader->ok() || size > reader->remaining()) {
    return Refuse("bytes of READY's outline", reader->remaining(), "as many as it says");
  }
  const std::span<const uint8_t> bytes = payload.last(reader->remaining()).first(size);
  outline->assign(bytes.begin(), bytes.end());
  for (uint16_t i = 0; i < size; ++i) reader->U8();
  const std::string fault = OutlineFault(*outline);
  return fault.empty() ? absl::OkStatus() : absl::InvalidArgumentError(fault);
}

absl::StatusOr<ReadyBody> ParseOtherOffer(ByteReader* reader, std::span<const uint8_t> payload,
                                          ReadyBody body) {
  const size_t bytes = reader->remaining();
  if (bytes < kOtherOfferBytes) return Refuse("bytes of READY's other offer", bytes, "56");
  OtherOffer other;
  other.member = MemberId(reader->U64());
  const std::string fault = Read(reader, &other.desc);
  if (!fault.empty()) return absl::InvalidArgumentError(fault);
  LH_RETURN_IF_ERROR(ParseOutline(reader, payload, other.desc, &other.outline));
  if (reader->remaining() != 0) {
    return Refuse("bytes of READY's other offer", bytes,
                  other.desc.list == 0 ? "56" : "56 and an outline");
  }
  if (other.desc == body.desc) {
    return absl::InvalidArgumentError(
        absl::StrCat("READY for ", ToString(body.desc), " carries the same as other offer"));
  }
  body.other_offer = other;
  return body;
}

absl::StatusOr<ReadyBody> ParseRefusal(ByteReader* reader, std::span<const uint8_t> payload,
                                       ReadyBody body) {
  OpRefusal refusal;
  refusal.member = MemberId(reader->U64());
  refusal.step = reader->U64();
  if (!reader->ok() || reader->remaining() > kRefusalBytesMax) {
    return Refuse("bytes of READY's payload", payload.size(), "those of a refusal");
  }
  if (!refusal.member) return Refuse("member of a refusal", 0, "an id");
  const std::span<const uint8_t> text = payload.last(reader->remaining());
  refusal.why.assign(text.begin(), text.end());
  if (RefusalText(refusal.why) != refusal.why) {
    return absl::InvalidArgumentError("the text of a refusal is not printable");
  }
  if (body.desc != RefusedDesc(body.desc.kind)) {
    return absl::InvalidArgumentError(
        absl::StrCat("READY for ", ToString(body.desc), " is refused, so it names only its kind"));
  }
  body.refusal = std::move(refusal);
  return body;
}

absl::Status ParseLengths(ByteReader* reader, size_t count, std::vector<uint64_t>* lengths) {
  if (reader->remaining() < 8 * count) {
    return Refuse("bytes of READY's lengths", reader->remaining(), "8 for each of them");
  }
  for (size_t i = 0; i < count; ++i) {
    lengths->push_back(reader->U64());
    if (lengths->back() > LH_COUNT_MAX) {
      return Refuse("length of a part", lengths->back(), "at most 2^48 elements");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<OpTerms> ParseTerms(ByteReader* reader, const OpDesc& desc) {
  OpTerms terms;
  if (desc.weighted) {
    terms.weight = std::bit_cast<double>(reader->U64());
    if (!std::isfinite(terms.weight) || terms.weight < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("weight is ", terms.weight, ", not a number from 0 on"));
    }
  }
  if (desc.unequal) {
    const uint16_t gives = reader->U16();
    const uint16_t gets = reader->U16();
    if (gives > LH_MEMBERS_MAX || gets > LH_MEMBERS_MAX) {
      return Refuse("lengths in READY", std::max(gives, gets), "at most 1024");
    }
    LH_RETURN_IF_ERROR(ParseLengths(reader, gives, &terms.gives));
    LH_RETURN_IF_ERROR(ParseLengths(reader, gets, &terms.gets));
  }
  return terms;
}

}  // namespace

absl::StatusOr<ReadyBody> ParseReadyBody(std::span<const uint8_t> payload,
                                         std::span<const uint8_t>* rest) {
  ByteReader reader(payload);
  ReadyBody body;
  body.boundary = Epoch(reader.U64());
  body.tag = reader.U64();
  body.set = reader.U64();
  const std::string fault = Read(&reader, &body.desc);
  const uint8_t follows = reader.U8();
  const uint8_t input = reader.U8();
  body.input = static_cast<ReadyInput>(input);
  const uint16_t members = reader.U16();
  body.result_members = reader.U32();
  body.result_epoch = Epoch(reader.U64());
  *rest = {};
  if (!reader.ok()) return Refuse("bytes of READY's payload", payload.size(), "88 or more");
  if (!body.boundary) return Refuse("boundary", 0, "an epoch");
  if (!fault.empty()) return absl::InvalidArgumentError(fault);
  if (follows > static_cast<uint8_t>(Follows::kRefusal))
    return Refuse("follows", follows, "0 to 2");
  const bool tensor = follows == static_cast<uint8_t>(Follows::kTensor);
  if (input > static_cast<uint8_t>(ReadyInput::kWithheld) ||
      (input != 0 && (!MayCarryInput(body.desc) || !tensor || body.result_epoch))) {
    return absl::InvalidArgumentError(
        absl::StrCat("input of READY is ", input, ", which does not fit ", ToString(body.desc)));
  }
  if (body.result_epoch ? body.result_members == 0 || body.result_members > LH_MEMBERS_MAX
                        : body.result_members != 0) {
    return Refuse("result_members", body.result_members,
                  body.result_epoch ? "1 to 1024" : "0 without a result");
  }
  const bool one_shot = IsOneShot(body.desc);
  if (body.result_epoch && ((!one_shot && !MayCarryInput(body.desc)) || !tensor)) {
    return absl::InvalidArgumentError(
        absl::StrCat("READY for ", ToString(body.desc), " carries a result, and is not one-shot"));
  }
  const bool terms = body.desc.NeedsTerms() && tensor && !body.result_epoch;
  if (terms ? members == 0 || members > LH_LOCAL_MEMBERS_MAX : members != 0) {
    return Refuse("members with terms", members, terms ? "1 to 64" : "0");
  }
  for (uint16_t i = 0; i < members; ++i) {
    LH_ASSIGN_OR_RETURN(OpTerms each, ParseTerms(&reader, body.desc));
    if (!reader.ok()) break;
    body.terms.push_back(std::move(each));
  }
  if (!reader.ok())
    return Refuse("bytes of READY's payload", payload.size(), "enough for its terms");
  if (!body.result_epoch) {
    LH_RETURN_IF_ERROR(ParseOutline(&reader, payload, body.desc, &body.outline));
  }
  // If the sender's own members offer different ops, no input may follow.
  if (follows == static_cast<uint8_t>(Follows::kOtherOffer)) {
    return ParseOtherOffer(&reader, payload, std::move(body));
  }
  if (!tensor) return ParseRefusal(&reader, payload, std::move(body));
  *rest = payload.last(reader.remaining());
  const bool carried = one_shot || body.input == ReadyInput::kCarried;
  uint64_t expected = carried ? OneShotPayloadBytes(body.desc) : 0;
  if (body.result_epoch) expected = body.desc.bytes() + 8 * uint64_t{body.result_members};
  if (rest->size() != expected) {
    return absl::InvalidArgumentError(absl::StrCat("READY for ", ToString(body.desc), " carries ",
                                                   rest->size(), " bytes of input or result, not ",
                                                   expected));
  }
  return body;
}

std::array<uint8_t, kChunkRequestBodyBytes> Encode(const ChunkRequestBody& body) {
  std::array<uint8_t, kChunkRequestBodyBytes> bytes;
  ByteWriter writer(bytes);
  writer.U64(body.source.value());
  writer.U64(body.root.high);
  writer.U64(body.root.low);
  writer.U32(static_cast<uint32_t>(body.kind));
  writer.U32(body.tensor);
  writer.U64(body.chunk);
  return bytes;
}

absl::StatusOr<ChunkRequestBody> ParseChunkRequestBody(std::span<const uint8_t> payload) {
  if (payload.size() != kChunkRequestBodyBytes) {
    return Refuse("bytes of CHUNK_REQUEST's payload", payload.size(), "40");
  }
  ByteReader reader(payload);
  ChunkRequestBody body;
  body.source = MemberId(reader.U64());
  body.root.high = reader.U64();
  body.root.low = reader.U64();
  const uint32_t kind = reader.U32();
  body.tensor = reader.U32();
  body.chunk = reader.U64();
  if (!body.source) return Refuse("source", 0, "a member");
  if (kind < static_cast<uint32_t>(ChunkKind::kManifest) ||
      kind > static_cast<uint32_t>(ChunkKind::kChunk)) {
    return Refuse("kind", kind, "1 to 3");
  }
  body.kind = static_cast<ChunkKind>(kind);
  const bool chunk = body.kind == ChunkKind::kChunk;
  if (body.tensor >= (chunk ? LH_STATE_TENSORS_MAX : 1)) {
    return Refuse("tensor", body.tensor, chunk ? "below 65536" : "0 as this kind demands");
  }
  if (body.chunk >= (chunk ? LH_STATE_BYTES_MAX : 1)) {
    return Refuse("chunk", body.chunk, chunk ? "below 2^50" : "0 as this kind demands");
  }
  return body;
}

std::array<uint8_t, kChunkRefusedBodyBytes> Encode(const ChunkRefusedBody& body) {
  std::array<uint8_t, kChunkRefusedBodyBytes> bytes;
  ByteWriter(bytes).U32(static_cast<uint32_t>(body.code));
  return bytes;
}

absl::StatusOr<ChunkRefusedBody> ParseChunkRefusedBody(std::span<const uint8_t> payload) {
  if (payload.size() != kChunkRefusedBodyBytes) {
    return Refuse("bytes of CHUNK_REFUSED's payload", payload.size(), "4");
  }
  const uint32_t code = ByteReader(payload).U32();
  if (code < static_cast<uint32_t>(ChunkRefusal::kNotHere) ||
      code > static_cast<uint32_t>(ChunkRefusal::kOver)) {
    return Refuse("code of CHUNK_REFUSED", code, "1 to 4");
  }
  return ChunkRefusedBody{static_cast<ChunkRefusal>(code)};
}

FrameHeader ChunkFrame(FrameType type, uint32_t group, uint64_t transfer, uint64_t ask) {
  FrameHeader header;
  header.type = type;
  header.group = group;
  if (type == FrameType::kChunkRequest) header.payload_bytes = kChunkRequestBodyBytes;
  if (type == FrameType::kChunkRefused) header.payload_bytes = kChunkRefusedBodyBytes;
  header.op = OpOrdinal(transfer);
  header.attempt = Epoch(ask);
  return header;
}

}  // namespace longhaul
