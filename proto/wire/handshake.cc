#include "proto/wire/handshake.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/bytes.h"
#include "base/status_macros.h"

namespace longhaul {
namespace {

void WriteStart(ByteWriter* writer) {
  writer->U32(kHandshakeMagic);
  writer->U16(kLaneProtocolVersion);
}

absl::Status CheckStart(ByteReader* reader, const char* message) {
  if (const uint32_t magic = reader->U32(); magic != kHandshakeMagic) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: magic is 0x%08x, not LHH1", message, magic));
  }
  if (const uint16_t version = reader->U16(); version != kLaneProtocolVersion) {
    return absl::InvalidArgumentError(absl::StrCat(message, ": lane protocol version is ", version,
                                                   ", not ", kLaneProtocolVersion,
                                                   "; run the same release at both ends"));
  }
  return absl::OkStatus();
}

absl::Status Refuse(const char* message, const char* field, uint64_t value, const char* wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat(message, ": ", field, " is ", value, ", not ", wanted));
}

absl::Status NotZero(const char* message) {
  return absl::InvalidArgumentError(absl::StrCat(message, ": reserved bytes are not zero"));
}

template <class Array>
Array ReadBytes(ByteReader* reader) {
  Array array{};
  const auto bytes = reader->Bytes(array.size());
  std::copy(bytes.begin(), bytes.end(), array.begin());
  return array;
}

}  // namespace

std::array<uint8_t, kLaneHelloBytes> Encode(const LaneHello& hello) {
  std::array<uint8_t, kLaneHelloBytes> bytes;
  ByteWriter writer(bytes);
  WriteStart(&writer);
  writer.U8(static_cast<uint8_t>(hello.kind));
  writer.U8(hello.sealed ? 1 : 0);
  writer.Bytes(hello.run);
  writer.Bytes(hello.host);
  writer.U32(hello.group);
  writer.U16(static_cast<uint16_t>(hello.lane));
  writer.U16(static_cast<uint16_t>(hello.lanes));
  writer.U64(hello.relay.value());
  writer.U64(hello.epoch.value());
  writer.U64(hello.dialer.value());
  writer.U64(hello.acceptor.value());
  writer.Bytes(hello.nonce);
  writer.U64(hello.link);
  writer.U64(hello.serial);
  return bytes;
}

uint64_t NewLinkId(const LaneHello& hello) {
  ByteReader reader(std::span<const uint8_t>(hello.nonce).first(8));
  return reader.U64() | 1;
}

std::array<uint8_t, kLaneAnswerBytes> Encode(const LaneAnswer& answer) {
  std::array<uint8_t, kLaneAnswerBytes> bytes;
  ByteWriter writer(bytes);
  WriteStart(&writer);
  writer.U8(static_cast<uint8_t>(answer.result));
  writer.U8(0);
  writer.Bytes(answer.nonce);
  writer.Bytes(answer.proof);
  writer.Zeros(24);
  return bytes;
}

std::array<uint8_t, kLaneConfirmBytes> Encode(const LaneConfirm& confirm) {
  std::array<uint8_t, kLaneConfirmBytes> bytes;
  ByteWriter writer(bytes);
  WriteStart(&writer);
  writer.U16(0);
  writer.Bytes(confirm.proof);
  return bytes;
}

absl::StatusOr<LaneHello> ParseLaneHello(std::span<const uint8_t, kLaneHelloBytes> bytes) {
  ByteReader reader(bytes);
  LH_RETURN_IF_ERROR(CheckStart(&reader, "HELLO"));
  LaneHello hello;
  const uint8_t kind = reader.U8();
  const uint8_t sealed = reader.U8();
  hello.sealed = sealed == 1;
  hello.kind = static_cast<LaneKind>(kind);
  hello.run = ReadBytes<Tag16>(&reader);
  hello.host = ReadBytes<Tag16>(&reader);
  hello.group = reader.U32();
  hello.lane = reader.U16();
  hello.lanes = reader.U16();
  hello.relay = PeerId(reader.U64());
  hello.epoch = Epoch(reader.U64());
  hello.dialer = PeerId(reader.U64());
  hello.acceptor = PeerId(reader.U64());
  hello.nonce = ReadBytes<Digest32>(&reader);
  hello.link = reader.U64();
  hello.serial = reader.U64();
  if (kind > static_cast<uint8_t>(LaneKind::kProbe)) {
    return Refuse("HELLO", "lane kind", kind, "0 to 2");
  }
  if (sealed > 1) return Refuse("HELLO", "sealed", sealed, "0 or 1");
  if (hello.kind == LaneKind::kProbe && hello.sealed) {
    return Refuse("HELLO", "sealed", sealed, "0 for a probe");
  }
  if (hello.lanes > LH_LANES_MAX) return Refuse("HELLO", "lanes", hello.lanes, "at most 256");
  if (hello.kind == LaneKind::kControl && hello.lane != 0) {
    return Refuse("HELLO", "lane", hello.lane, "0 as for a control lane");
  }
  if (hello.kind != LaneKind::kControl && hello.lane >= hello.lanes) {
    return Refuse("HELLO", "lane", hello.lane, "below the number of lanes");
  }
  if (!hello.epoch) return Refuse("HELLO", "epoch", 0, "an epoch");
  if (!hello.dialer) return Refuse("HELLO", "dialer", 0, "a peer");
  if (!hello.acceptor) return Refuse("HELLO", "acceptor", 0, "a peer");
  if (hello.relay && (hello.relay == hello.dialer || hello.relay == hello.acceptor)) {
    return Refuse("HELLO", "relay", hello.relay.value(), "a third peer");
  }
  if (hello.kind != LaneKind::kControl && hello.link == 0) {
    return Refuse("HELLO", "link", 0, "that of a link, as for all but a control lane");
  }
  if ((hello.link == 0) != (hello.serial == 0)) {
    return Refuse("HELLO", "serial", hello.serial,
                  hello.link == 0 ? "0 as for a new link" : "that of a lane");
  }
  return hello;
}

absl::StatusOr<LaneAnswer> ParseLaneAnswer(std::span<const uint8_t, kLaneAnswerBytes> bytes) {
  ByteReader reader(bytes);
  LH_RETURN_IF_ERROR(CheckStart(&reader, "ANSWER"));
  LaneAnswer answer;
  const uint8_t result = reader.U8();
  bool zeros = reader.Zeros(1);
  answer.result = static_cast<LaneResult>(result);
  answer.nonce = ReadBytes<Digest32>(&reader);
  answer.proof = ReadBytes<Digest32>(&reader);
  zeros &= reader.Zeros(24);
  if (result > static_cast<uint8_t>(LaneResult::kWrongSealing)) {
    return Refuse("ANSWER", "result", result, "at most 7");
  }
  if (!zeros) return NotZero("ANSWER");
  if (answer.result != LaneResult::kAccepted &&
      (answer.nonce != Digest32{} || answer.proof != Digest32{})) {
    return absl::InvalidArgumentError("ANSWER: a refusal carries a nonce or a proof");
  }
  return answer;
}

absl::StatusOr<LaneConfirm> ParseLaneConfirm(std::span<const uint8_t, kLaneConfirmBytes> bytes) {
  ByteReader reader(bytes);
  LH_RETURN_IF_ERROR(CheckStart(&reader, "CONFIRM"));
  if (!reader.Zeros(2)) return NotZero("CONFIRM");
  LaneConfirm confirm;
  confirm.proof = ReadBytes<Digest32>(&reader);
  return confirm;
}

}  // namespace longhaul
