// How a lane opens: three fixed-size messages, before which nothing is allocated for the caller.
//
//   dialer -> acceptor  HELLO    who I am, which run and epoch, which lane, a nonce
//   acceptor -> dialer  ANSWER   a nonce, and a proof over both nonces and HELLO
//   dialer -> acceptor  CONFIRM  a proof over the same, in the other direction
//
// A lane may go through a third peer, the relay, where the two cannot reach each other: the dialer
// connects to the relay, and HELLO names it. The relay connects to the acceptor, passes on the
// three messages, checks both proofs as the ends do, and from then on copies bytes. The bytes of
// the lane are the same as on a straight one.
//
// A proof is HMAC-SHA-256 keyed with the epoch's token (PrepareEpoch.token), so both ends show that
// they are members of that epoch; a stranger, a wrong run or an outdated epoch is refused. The
// acceptor knows the token by (run digest, group, epoch). Messages are little-endian:
//
// HELLO, 128 bytes:
//   0 magic u32 | 4 version u16 | 6 kind u8 (LaneKind) | 7 zero u8 | 8 run_digest 32 bytes (SHA-256
//   of the run's name) | 40 group u32 | 44 lane u16 | 46 lanes u16 | 48 relay u64 | 56 epoch u64 |
//   64 dialer u64 | 72 acceptor u64 | 80 nonce 32 bytes | 112 link u64 | 120 serial u64
// ANSWER, 96 bytes:
//   0 magic u32 | 4 version u16 | 6 result u8 | 7 zero u8 | 8 nonce 32 bytes | 40 proof 32 bytes |
//   72 zero 24 bytes
// CONFIRM, 40 bytes:
//   0 magic u32 | 4 version u16 | 6 zero u16 | 8 proof 32 bytes
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "proto/wire/frame.h"

namespace longhaul {

inline constexpr uint32_t kHandshakeMagic = 0x3148484cu;  // "LHH1"
inline constexpr uint16_t kLaneProtocolVersion = 6;
inline constexpr size_t kLaneHelloBytes = 128;
inline constexpr size_t kLaneAnswerBytes = 96;
inline constexpr size_t kLaneConfirmBytes = 40;

using Digest32 = std::array<uint8_t, 32>;

struct LaneHello {
  LaneKind kind = LaneKind::kControl;
  Digest32 run_digest{};
  uint32_t group = 0;
  uint32_t lane = 0;   // index of a data lane or in a probe; 0 for the control lane
  uint32_t lanes = 0;  // data lanes that the dialer opens, connections of a probe
  Epoch epoch;
  PeerId dialer;
  PeerId acceptor;
  PeerId relay;  // that the lane goes through; 0: straight
  Digest32 nonce{};
  // The link that the lane belongs to, as its first control lane's HELLO named it (NewLinkId);
  // zero: this is that HELLO. `serial` tells the lane from earlier ones of the same link, all of
  // which have lower ones; zero on the first control lane.
  uint64_t link = 0;
  uint64_t serial = 0;
  friend bool operator==(const LaneHello&, const LaneHello&) = default;
};

// The id of the link that this HELLO makes: both ends know it, and nobody who has not seen it.
uint64_t NewLinkId(const LaneHello& hello);

// Why a dialer is turned away; kAccepted otherwise. A refusal carries zeros for nonce and proof.
enum class LaneResult : uint8_t {
  kAccepted = 0,
  kWrongVersion = 1,
  kUnknownEpoch =
      2,  // no token for this run, group and epoch here (yet): try again while preparing
  kWrongPeer = 3,
  kBusy = 4,
  kUnknownLink = 5,  // the acceptor has given the link up
  kNoWay = 6,        // the relay could not connect to the acceptor, or carries too many lanes
};

struct LaneAnswer {
  LaneResult result = LaneResult::kAccepted;
  Digest32 nonce{};
  Digest32 proof{};
  friend bool operator==(const LaneAnswer&, const LaneAnswer&) = default;
};

struct LaneConfirm {
  Digest32 proof{};
  friend bool operator==(const LaneConfirm&, const LaneConfirm&) = default;
};

std::array<uint8_t, kLaneHelloBytes> Encode(const LaneHello& hello);
std::array<uint8_t, kLaneAnswerBytes> Encode(const LaneAnswer& answer);
std::array<uint8_t, kLaneConfirmBytes> Encode(const LaneConfirm& confirm);

// Each refuses (InvalidArgument, naming field and value) wrong magic, version or reserved bytes.
absl::StatusOr<LaneHello> ParseLaneHello(std::span<const uint8_t, kLaneHelloBytes> bytes);
absl::StatusOr<LaneAnswer> ParseLaneAnswer(std::span<const uint8_t, kLaneAnswerBytes> bytes);
absl::StatusOr<LaneConfirm> ParseLaneConfirm(std::span<const uint8_t, kLaneConfirmBytes> bytes);

}  // namespace longhaul
