#include "peerd/engine/control_frames.h"

#include <array>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/bytes.h"
#include "base/crypto/secrets.h"
#include "base/status_macros.h"
#include "proto/control/signed_ready.h"

namespace longhaul::peerd {
namespace {

template <class Bytes>
std::string TextOf(const Bytes& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::string IdsOf(const std::vector<MemberId>& members) {
  std::string bytes(8 * members.size(), '\0');
  ByteWriter writer({reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()});
  for (const MemberId member : members) writer.U64(member.value());
  return bytes;
}

ControlFrame Address(const GroupKey& group, PeerId to, FrameHeader header, std::string payload) {
  header.group = group.group;
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  return {{group.run, to}, header, std::move(payload)};
}

}  // namespace

ControlFrame FrameOf(const SendReady& action, const std::string& input) {
  FrameHeader header;
  header.type = FrameType::kReady;
  header.op = action.ordinal;
  header.attempt = action.attempt;
  header.offset = action.step;
  ReadyBody body{action.boundary,    action.tag,     action.set,  action.desc,
                 action.other_offer, action.refusal, action.terms};
  body.input = action.input;
  body.outline = action.outline;
  if (action.result) {
    body.result_epoch = action.result->epoch;
    body.result_members = static_cast<uint32_t>(action.result->members.size());
  }
  std::string payload = Encode(body);
  if (action.refusal) {
    payload += Encode(*action.refusal);
  } else if (action.other_offer) {
    payload += Encode(*action.other_offer);
  } else {
    if (action.result) payload += IdsOf(action.result->members);
    payload += action.result ? action.result->bytes : input;
  }
  return Address(action.group, action.to, header, std::move(payload));
}

std::string SignReady(const SendReady& action, const Signer& sign, ControlFrame* frame) {
  std::string digest = Sha256(frame->payload);
  const control::ReadyName name{action.group, action.attempt, action.boundary,
                                action.tag,   action.set,     *action.sign};
  frame->payload += sign(control::TextToSign(name, digest));
  frame->header.flags |= kFlagSigned;
  frame->header.stamp = name.index;
  frame->header.payload_bytes = static_cast<uint32_t>(frame->payload.size());
  return digest;
}

ControlFrame FrameOf(const SendDone& action) {
  FrameHeader header;
  header.type = FrameType::kDone;
  header.flags = action.refused ? kFlagRefused : action.started ? kFlagStarted : 0;
  header.op = action.ordinal;
  header.attempt = action.attempt;
  std::string payload;
  if (action.readies_digest) {
    std::array<uint8_t, kReadiesDigestBytes> digest;
    ByteWriter writer(digest);
    writer.U64(action.readies_digest->high);
    writer.U64(action.readies_digest->low);
    payload = TextOf(digest);
  }
  ControlFrame frame = Address(action.group, action.to, header, std::move(payload));
  frame.may_wait = action.may_wait;
  return frame;
}

absl::StatusOr<TakenFrame> TakeFrame(const LinkKey& from, const FrameHeader& header,
                                     std::span<const uint8_t> payload) {
  const GroupKey group{from.run, header.group};
  if (header.type == FrameType::kDone) {
    const bool refused = (header.flags & kFlagRefused) != 0;
    const bool started = (header.flags & kFlagStarted) != 0;
    PeerDone done{group, from.peer, header.op, header.attempt, refused, started};
    if (!payload.empty()) {
      ByteReader reader(payload);
      const uint64_t high = reader.U64();
      done.readies_digest = Hash128{high, reader.U64()};
    }
    return done;
  }
  if (header.type != FrameType::kReady) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame type is ", static_cast<int>(header.type), ", not READY or DONE"));
  }
  std::optional<ReadySignature> signature;
  if ((header.flags & kFlagSigned) != 0) {
    const std::span<const uint8_t> bytes = payload.last(LH_SIGNATURE_BYTES);
    payload = payload.first(payload.size() - LH_SIGNATURE_BYTES);
    signature = ReadySignature{header.stamp, Sha256(TextOf(payload)), TextOf(bytes)};
  }
  std::span<const uint8_t> rest;
  LH_ASSIGN_OR_RETURN(ReadyBody body, ParseReadyBody(payload, &rest));
  PeerReady ready{group,
                  from.peer,
                  header.op,
                  header.attempt,
                  body.boundary,
                  body.tag,
                  body.set,
                  body.desc,
                  body.other_offer,
                  header.offset,
                  std::move(body.refusal),
                  std::move(body.terms)};
  ready.signature = std::move(signature);
  ready.input = body.input;
  ready.outline = std::move(body.outline);
  if (ready.other_offer || ready.refusal) return ready;
  ByteReader reader(rest);
  std::vector<MemberId> members;
  for (uint32_t i = 0; i < body.result_members; ++i) members.emplace_back(reader.U64());
  std::string bytes = TextOf(rest.last(reader.remaining()));
  if (body.result_epoch) {
    ready.result = OneShotResult{body.result_epoch, std::move(members), std::move(bytes)};
  } else {
    ready.payload = std::move(bytes);
  }
  return ready;
}

}  // namespace longhaul::peerd
