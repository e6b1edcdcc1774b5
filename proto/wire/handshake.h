// The handshake that opens a lane. Two peers exchange three messages of fixed size. Before the
// handshake is over, the acceptor allocates no memory whose size the dialer could choose.
//
//   dialer -> acceptor  HELLO    the peers, run, epoch and lane, and a nonce
//   acceptor -> dialer  ANSWER   a nonce, and a proof over both nonces and HELLO
//   dialer -> acceptor  CONFIRM  a proof over the same, in the other direction
//
// Two peers that cannot reach each other open a lane through a third peer, the relay. The dialer
// connects to the relay, and HELLO names the relay. The relay connects to the acceptor, passes on
// the three messages, and checks both proofs as the ends do. From then on it copies bytes. The
// bytes of a relayed lane are the same as those of a straight one.
//
// On a control lane, TLS 1.3 follows CONFIRM, with the dialer as client, and both ends prove their
// own keys. All frames of a sealed lane are inside TLS. On a lane in clear, TLS ends with its
// handshake, and frames follow. On a sealed data lane, frames follow CONFIRM at once, sealed with
// keys that both ends derive from that TLS session (docs/wire_format.md). Only the two ends of a
// relayed lane can open it. On a straight data lane in clear, the proofs are keyed with a secret of
// that session in place of the token, so that only the two ends of the link can open it.
//
// A proof is HMAC-SHA-256 keyed with the epoch's token (PrepareEpoch.token). It shows that both
// ends are peers of that epoch. A stranger, a wrong run or an outdated epoch is refused. The
// acceptor finds the token by group, epoch and the tag of the run, which only a peer of the epoch
// can compute, or recognize. The messages are little-endian:
//
// HELLO, 128 bytes:
//   0 magic u32 | 4 version u16 | 6 kind u8 (LaneKind) | 7 sealed u8 | 8 run 16 bytes
//   (LaneHello::run) | 24 host 16 bytes (LaneHello::host) | 40 group u32 | 44 lane u16 | 46 lanes
//   u16 | 48 relay u64 | 56 epoch u64 | 64 dialer u64 | 72 acceptor u64 | 80 nonce 32 bytes | 112
//   link u64 | 120 serial u64
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
inline constexpr uint16_t kLaneProtocolVersion = 13;
inline constexpr size_t kLaneHelloBytes = 128;
inline constexpr size_t kLaneAnswerBytes = 96;
inline constexpr size_t kLaneConfirmBytes = 40;

using Digest32 = std::array<uint8_t, 32>;
using Tag16 = std::array<uint8_t, 16>;

struct LaneHello {
  LaneKind kind = LaneKind::kControl;
  bool sealed = false;  // authenticated and encrypted
  // HMAC-SHA-256 of the run's name and the nonce, keyed with the epoch's token; the first 16 bytes.
  // Zeros if the dialer only looks whether the acceptor listens.
  Tag16 run{};
  // Names the dialer's machine and network namespace if the lane is in clear, zeros otherwise. The
  // acceptor compares it with its own: a local address may belong to a proxy that forwards.
  Tag16 host{};
  uint32_t group = 0;
  uint32_t lane = 0;   // index of a data lane, or of a connection of a probe; control lane: 0
  uint32_t lanes = 0;  // how many data lanes, or connections of a probe, the dialer opens
  Epoch epoch;
  PeerId dialer;
  PeerId acceptor;
  PeerId relay;  // the peer that the lane goes through; 0: the lane is straight
  Digest32 nonce{};
  // The link that the lane belongs to (NewLinkId). 0: this HELLO makes a new link with its first
  // control lane. `serial` is higher than that of every earlier lane of the link; 0 on the first
  // control lane.
  uint64_t link = 0;
  uint64_t serial = 0;
  friend bool operator==(const LaneHello&, const LaneHello&) = default;
};

// Returns the id of the link that this HELLO makes. Whoever has the HELLO can compute the id;
// nobody else can.
uint64_t NewLinkId(const LaneHello& hello);

// Whether the acceptor takes the lane, and why not. A refusal carries zeros for nonce and proof.
enum class LaneResult : uint8_t {
  kAccepted = 0,
  kWrongVersion = 1,
  // The acceptor has no token for this run, group and epoch. While the epoch is being prepared, the
  // token may still come: try again.
  kUnknownEpoch = 2,
  // This dialer may not open this lane here: for instance, HELLO names another acceptor.
  kWrongPeer = 3,
  kBusy = 4,          // no room, or another connection goes first: try again later
  kUnknownLink = 5,   // the acceptor has given the link up
  kNoWay = 6,         // the relay could not connect to the acceptor, or carries too many lanes
  kWrongSealing = 7,  // one end wants a sealed lane, and the other one does not
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

// InvalidArgument names the field and its value: wrong magic, version, reserved bytes or field.
absl::StatusOr<LaneHello> ParseLaneHello(std::span<const uint8_t, kLaneHelloBytes> bytes);
absl::StatusOr<LaneAnswer> ParseLaneAnswer(std::span<const uint8_t, kLaneAnswerBytes> bytes);
absl::StatusOr<LaneConfirm> ParseLaneConfirm(std::span<const uint8_t, kLaneConfirmBytes> bytes);

}  // namespace longhaul
