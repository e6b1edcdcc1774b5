// Feeds bytes, cut at any point, to one end of a connection on the in-memory network. The first
// byte chooses what is attacked:
//
//   - the handshake of a lane, at the end that accepts and at the end that dials; with the right
//     token or without, in clear or with TLS behind
//   - a session of TLS, from its first byte on, and after its handshake: the other end says what it
//     likes, or somebody on the path changes bytes
//   - a data lane, in clear or sealed; the attacker has the keys, or changes sealed bytes
//
// Whatever comes, the victim refuses it or takes it, and ends. A lane takes no byte that was
// changed on the way if it is sealed.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/crypto/identity.h"
#include "base/crypto/sealing.h"
#include "peerd/io/fake_ring.h"
#include "peerd/transport/auth.h"
#include "peerd/transport/lane.h"
#include "peerd/transport/lane_handshake.h"
#include "peerd/transport/tls_session.h"
#include "proto/wire/frame.h"
#include "proto/wire/handshake.h"
#include "tests/support/fuzz_input.h"

namespace longhaul::peerd {
namespace {

constexpr char kToken[] = "token";
constexpr size_t kMemoryBytes = 16 << 10;

const Identity& IdentityOf(int i) {
  static const auto& identities =
      *new std::vector<Identity>{Identity::ForTest(1), Identity::ForTest(2), Identity::ForTest(3)};
  return identities[i];
}
const TlsContext& ContextOf(int i) {
  static const auto& contexts = *new std::vector<TlsContext*>{
      new TlsContext(IdentityOf(0)), new TlsContext(IdentityOf(1)), new TlsContext(IdentityOf(2))};
  return *contexts[i];
}

FakeRingOptions RingOptions(uint64_t seed) {
  FakeRingOptions options;
  options.seed = seed + 1;
  return options;
}

// The attacker's end of a connection. It sends, and keeps what it receives.
class Wire {
 public:
  Wire(FakeRing* ring, int fd) : ring_(ring), fd_(fd) { Listen(); }

  void Send(std::string bytes) {
    if (fd_ < 0 || bytes.empty()) return;
    bool sent = false;
    const IoId id =
        ring_->Send(fd_, bytes.data(), bytes.size(), true, [&](IoResult) { sent = true; });
    for (int i = 0; i < 1000 && !sent; ++i) Step();
    if (!sent) ring_->Cancel(id);
    while (!sent) Step();
  }
  void Step() { LH_CHECK_OK(ring_->RunOnce(ring_->Now() + Millis(1))); }
  void Steps(size_t n) {
    for (; n > 0; --n) Step();
  }
  // Waits for so many bytes, or for the end.
  void Await(size_t bytes) {
    for (int i = 0; i < 1000 && received.size() < bytes && !ended_; ++i) Step();
  }
  void Close() {
    if (fd_ < 0) return;
    if (receiving_ != 0) ring_->Cancel(receiving_);
    while (receiving_ != 0) Step();
    ring_->sockets().Close(std::exchange(fd_, -1));
  }

  std::string received;

 private:
  void Listen() {
    receiving_ = ring_->Recv(fd_, in_, sizeof in_, false, [this](IoResult result) {
      receiving_ = 0;
      if (result.value <= 0) {
        ended_ = true;
        return;
      }
      received.append(in_, static_cast<size_t>(result.value));
      Listen();
    });
  }
  FakeRing* const ring_;
  int fd_;
  char in_[2048];
  IoId receiving_ = 0;
  bool ended_ = false;
};

template <class Bytes>
std::string TextOf(const Bytes& bytes) {
  return std::string(bytes.begin(), bytes.end());
}
template <size_t kBytes>
std::array<uint8_t, kBytes> ArrayOf(const std::string& text) {
  std::array<uint8_t, kBytes> bytes{};
  std::copy_n(text.begin(), std::min(text.size(), kBytes), bytes.begin());
  return bytes;
}
std::span<const uint8_t> Span(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Changes some bytes, or cuts the text.
std::string Twisted(std::string text, FuzzInput* in) {
  switch (in->Below(4)) {
    case 0:
      if (!text.empty()) text[in->Below(text.size())] ^= static_cast<char>(1 + in->Byte() % 255);
      break;
    case 1:
      text.resize(in->Below(text.size() + 1));
      break;
    case 2:
      text.insert(in->Below(text.size() + 1), in->Bytes(16));
      break;
    default:
      break;
  }
  return text;
}

// Runs the attacker's TLS until it is shaken, or the bytes are used up. `twist`: changes bytes.
void ShakeHands(Wire* wire, TlsSession* tls, FuzzInput* in) {
  size_t used = wire->received.size() - wire->received.size();
  for (int i = 0; i < 20; ++i) {
    if (!tls->Shake().ok()) return;
    std::string out = TextOf(tls->TakeOutput());
    if (in->Below(8) == 7) out = Twisted(std::move(out), in);
    wire->Send(std::move(out));
    if (tls->shaken()) return;
    wire->Await(used + 1);
    if (wire->received.size() == used) return;
    tls->Feed(Span(wire->received).subspan(used));
    used = wire->received.size();
  }
}

// ------------------------------------------------------------------------------ handshakes

void End(FakeRing* ring, Wire* wire, LaneHandshake* handshake, const bool& done) {
  handshake->Fail("the end");
  for (int i = 0; i < 100 && !done; ++i) wire->Step();
  LH_CHECK(done) << "the handshake does not end";
  if (const int fd = handshake->TakeFd(); fd >= 0) ring->sockets().Abort(fd);
  wire->Close();
  for (int i = 0; i < 100 && ring->operations() > 0; ++i) wire->Step();
  LH_CHECK(ring->operations() == 0 && ring->open_sockets() == 0);
}

void AttackAcceptor(FuzzInput in) {
  FakeRing ring(RingOptions(in.Byte()));
  const auto [ours, theirs] = ring.Pair();
  Wire wire(&ring, theirs);
  const uint8_t how = in.Byte();
  bool done = false;
  const auto judge = [&](const LaneHello&) {
    LaneVerdict verdict;
    verdict.result = (how & 7) == 7 ? LaneResult::kWrongPeer : LaneResult::kAccepted;
    verdict.carry = (how & 0x38) == 0x38;
    verdict.token = kToken;
    verdict.peer_key = IdentityOf(0).public_key();
    return verdict;
  };
  LaneAccept accept(&ring, ours, Digest32{3}, &ContextOf(1), kNever, judge,
                    [&](LaneHandshake*) { done = true; });
  LaneHello hello;
  hello.kind = static_cast<LaneKind>(in.Below(3));
  hello.sealed = in.Bool() && hello.kind != LaneKind::kProbe;
  hello.run = RunTag(kToken, "run", hello.nonce);
  hello.epoch = Epoch(1);
  hello.dialer = PeerId(1);
  hello.acceptor = PeerId(2);
  if (hello.kind != LaneKind::kControl) hello.lanes = 1;
  if (hello.kind == LaneKind::kData) hello.link = hello.serial = 1;
  auto bytes = Encode(hello);
  const bool raw = (how & 0xc0) == 0xc0;
  std::string first = raw ? in.Bytes(200) : TextOf(bytes);
  if (!raw && in.Below(4) == 3) first = Twisted(std::move(first), &in);
  wire.Send(first);
  wire.Await(kLaneAnswerBytes);
  const auto answer = ParseLaneAnswer(ArrayOf<kLaneAnswerBytes>(wire.received));
  if (answer.ok() && answer->result == LaneResult::kAccepted &&
      wire.received.size() == kLaneAnswerBytes) {
    const auto said = ArrayOf<kLaneHelloBytes>(first);
    LaneConfirm confirm{ConfirmProof(in.Below(8) == 7 ? "wrong" : kToken, said, answer->nonce)};
    std::string text = TextOf(Encode(confirm));
    if (in.Below(4) == 3) text = Twisted(std::move(text), &in);
    wire.received.clear();
    wire.Send(std::move(text));
    if (in.Bool()) {
      TlsSession tls(ContextOf(in.Below(8) == 7 ? 2 : 0), TlsSession::Side::kClient,
                     IdentityOf(1).public_key());
      ShakeHands(&wire, &tls, &in);
    }
  }
  while (!in.empty() && !done) wire.Send(in.Bytes(400));
  wire.Steps(20);
  if (done && accept.ok() && accept.hello().kind == LaneKind::kControl && !((how & 0x38) == 0x38)) {
    const LaneSocket socket = accept.TakeSocket();
    LH_CHECK((socket.tls != nullptr) == accept.hello().sealed) << "sealed, and without TLS";
    LH_CHECK(socket.clear_secret.empty() == accept.hello().sealed) << "nobody has shown a key";
    done = true;
    wire.Close();
    return;
  }
  if (!done) return End(&ring, &wire, &accept, done);
  if (const int fd = accept.TakeFd(); fd >= 0) ring.sockets().Abort(fd);
  wire.Close();
}

void AttackDialer(FuzzInput in) {
  FakeRing ring(RingOptions(in.Byte()));
  const int listening = *ring.sockets().Listen(*NumericAddress(*ParseHostPort("127.0.0.1:0")));
  DialSpec spec{.address = *ring.sockets().LocalAddress(listening),
                .tuning = {},
                .hello = {},
                .token = kToken};
  spec.hello.kind = static_cast<LaneKind>(in.Below(2));
  spec.hello.epoch = Epoch(1);
  spec.hello.dialer = PeerId(2);
  spec.hello.acceptor = PeerId(1);
  if (spec.hello.kind == LaneKind::kData)
    spec.hello.lanes = spec.hello.link = spec.hello.serial = 1;
  if (in.Bool()) spec.encryption = LaneEncryption::kRequire;
  spec.tls = &ContextOf(1);
  spec.peer_key = IdentityOf(0).public_key();
  bool done = false;
  int accepted = -1;
  ring.Accept(listening, [&](IoResult result) { accepted = result.value; });
  LaneDial dial(&ring, std::move(spec), kNever, [&](LaneHandshake*) { done = true; });
  while (accepted < 0) LH_CHECK_OK(ring.RunOnce(ring.Now() + Millis(1)));
  ring.sockets().Close(listening);
  Wire wire(&ring, accepted);
  wire.Await(kLaneHelloBytes);
  const HelloBytes hello = ArrayOf<kLaneHelloBytes>(wire.received);
  if (in.Below(4) != 3) {
    LaneAnswer answer;
    if (in.Below(8) == 7) answer.result = static_cast<LaneResult>(in.Below(9));
    answer.nonce = Digest32{5};
    answer.proof = AnswerProof(in.Below(8) == 7 ? "wrong" : kToken, hello, answer.nonce);
    if (answer.result != LaneResult::kAccepted && in.Bool()) answer.nonce = answer.proof = {};
    std::string text = TextOf(Encode(answer));
    if (in.Below(4) == 3) text = Twisted(std::move(text), &in);
    wire.received.clear();
    wire.Send(std::move(text));
    wire.Await(kLaneConfirmBytes);
    if (in.Bool() && wire.received.size() >= kLaneConfirmBytes) {
      wire.received.erase(0, kLaneConfirmBytes);
      TlsSession tls(ContextOf(in.Below(8) == 7 ? 2 : 0), TlsSession::Side::kServer,
                     IdentityOf(1).public_key());
      tls.Feed(Span(wire.received));
      wire.received.clear();
      ShakeHands(&wire, &tls, &in);
    }
  }
  while (!in.empty() && !done) wire.Send(in.Bytes(400));
  wire.Steps(20);
  if (!done) return End(&ring, &wire, &dial, done);
  if (const int fd = dial.TakeFd(); fd >= 0) ring.sockets().Abort(fd);
  wire.Close();
}

// ------------------------------------------------------------------------------ lanes

class Owner : public LaneOwner {
 public:
  absl::Status OnLaneFrame(Lane*, const FrameHeader& header,
                           std::span<const uint8_t> payload) override {
    LH_CHECK(payload.size() == header.payload_bytes);
    ++frames;
    return absl::OkStatus();
  }
  absl::StatusOr<uint8_t*> OnLaneData(Lane*, const FrameHeader& header) override {
    if (header.op == OpOrdinal(7)) return nullptr;
    if (header.offset > kMemoryBytes || header.payload_bytes > kMemoryBytes - header.offset) {
      return absl::InvalidArgumentError("beyond the end");
    }
    return memory.data() + header.offset;
  }
  absl::Status OnLaneDataReceived(Lane*, const FrameHeader&) override {
    ++frames;
    return absl::OkStatus();
  }
  absl::Status OnLaneAcked(Lane*, uint64_t) override { return absl::OkStatus(); }
  void OnLaneDataAbandoned(Lane*, const FrameHeader&) override {}
  bool NextSegment(Lane*, uint32_t, OutgoingSegment*) override { return false; }
  int FindBuffer(const uint8_t*, size_t) override { return -1; }
  void OnLaneSegmentSent(FrameType, uint64_t) override {}
  void OnLaneClosing(Lane*, bool) override {}
  void OnLanePeerEnded(Lane* lane) override { lane->Abort(); }
  void OnLaneBroken(Lane* lane, const std::string&, bool) override {
    LH_CHECK(!std::exchange(broken, true)) << "broken twice";
    lane->Abort();
  }
  void OnLaneEnded(Lane*) override { ended = true; }

  size_t frames = 0;
  bool broken = false;
  bool ended = false;
  std::vector<uint8_t> memory = std::vector<uint8_t>(kMemoryBytes);
};

// A frame for a lane of this kind. Fields may be wrong.
std::pair<FrameHeader, std::string> DrawFrame(LaneKind kind, FuzzInput* in) {
  static constexpr FrameType kControlTypes[] = {FrameType::kPing, FrameType::kReady,
                                                FrameType::kDone, FrameType::kClose};
  static constexpr FrameType kDataTypes[] = {FrameType::kData, FrameType::kChunkData,
                                             FrameType::kPing, FrameType::kClose};
  FrameHeader header;
  const size_t which = in->Below(8);
  header.type = which >= 4                ? static_cast<FrameType>(in->Below(16))
                : kind == LaneKind::kData ? kDataTypes[which]
                                          : kControlTypes[which];
  header.op = OpOrdinal(in->Number());
  header.attempt = Epoch(in->Number());
  if (in->Bool()) header.offset = in->Number();
  if (in->Bool()) header.stamp = in->Number();
  if (in->Bool()) header.acked = in->Number();
  if (in->Below(4) == 3) header.flags = static_cast<uint8_t>(in->Number());
  if (IsSegment(header.type) || header.type == FrameType::kReady || in->Below(8) == 7) {
    header.payload_bytes = static_cast<uint32_t>(in->Bool() ? in->Below(3000) : in->Number());
  }
  std::string payload(std::min<size_t>(header.payload_bytes, 6000), static_cast<char>(in->Byte()));
  return {header, std::move(payload)};
}

void AttackLane(FuzzInput in, LaneKind kind, bool sealed) {
  FakeRing ring(RingOptions(in.Byte()));
  const auto [ours, theirs] = ring.Pair();
  Owner owner;
  LaneOptions options{.kind = kind, .name = "lane"};
  LaneSocket socket{ours, nullptr};
  KeySecret key;
  std::optional<Sealer> sealer;
  std::unique_ptr<TlsSession> tls;
  if (sealed && kind == LaneKind::kData) {
    const Aead aead = in.Bool() ? Aead::kAes128Gcm : Aead::kChaCha20Poly1305;
    options.keys = LaneKeys{aead, key.Derive("send"), key.Derive("receive")};
    sealer.emplace(aead, key.Derive("receive"));
    options.sealed_bytes_max = 1 << 20;
  } else if (sealed) {
    tls = std::make_unique<TlsSession>(ContextOf(0), TlsSession::Side::kClient,
                                       IdentityOf(1).public_key());
    socket.tls = std::make_unique<TlsSession>(ContextOf(1), TlsSession::Side::kServer,
                                              IdentityOf(0).public_key());
    for (int i = 0; i < 4; ++i) {
      LH_CHECK_OK(tls->Shake());
      socket.tls->Feed(tls->TakeOutput());
      LH_CHECK_OK(socket.tls->Shake());
      tls->Feed(socket.tls->TakeOutput());
    }
    LH_CHECK(tls->shaken() && socket.tls->shaken());
  }
  Lane lane(&ring, std::move(socket), options, &owner);
  lane.StartReceiving();
  Wire wire(&ring, theirs);
  const bool on_the_path = sealed && in.Bool();  // the attacker changes bytes, and has no keys
  bool changed = false;
  size_t sent = 0;
  for (int i = 0; i < 100 && !in.empty() && !owner.ended; ++i) {
    std::string bytes;
    if (!on_the_path && in.Below(8) == 7) {
      bytes = in.Bytes(200);
      if (tls != nullptr) tls->Write(Span(bytes));
    } else {
      auto [header, payload] = DrawFrame(kind, &in);
      auto encoded = Encode(header);
      if (sealer) {
        std::string record(encoded.size() + kTagBytes, '\0');
        auto* out = reinterpret_cast<uint8_t*>(record.data());
        sealer->Seal(encoded.data(), encoded.size(), out);
        bytes = record;
        if (!payload.empty()) {
          record.assign(payload.size() + kTagBytes, '\0');
          out = reinterpret_cast<uint8_t*>(record.data());
          sealer->Seal(reinterpret_cast<const uint8_t*>(payload.data()), payload.size(), out);
          bytes += record;
        }
      } else {
        bytes = TextOf(encoded) + payload;
        if (tls != nullptr) tls->Write(Span(bytes));
      }
      ++sent;
    }
    if (tls != nullptr) bytes = TextOf(tls->TakeOutput());
    if (on_the_path && !changed && in.Below(4) == 3) {
      std::string other = Twisted(bytes, &in);
      if (other != bytes) {
        changed = true;
        --sent;
        bytes = std::move(other);
      }
    }
    if (!on_the_path && in.Below(8) == 7) bytes.resize(in.Below(bytes.size() + 1));
    wire.Send(std::move(bytes));
    wire.Steps(in.Below(8));
    if (in.Below(16) == 15) {
      lane.Detach([](const FrameHeader& h) { return h.op == OpOrdinal(1); }, [] {});
    }
    if (kind == LaneKind::kData && in.Below(16) == 15) lane.Ping(0);
    if (in.Below(64) == 63) lane.Finish();
  }
  // After a changed byte nothing counts any more; a header in front of it may have counted.
  if (on_the_path && changed) LH_CHECK(owner.frames <= sent + 1);
  wire.Steps(20);
  if (!owner.ended) lane.Abort();
  for (int i = 0; i < 1000 && !owner.ended; ++i) wire.Step();
  LH_CHECK(owner.ended) << "the lane does not end";
  wire.Close();
  for (int i = 0; i < 1000 && ring.operations() > 0; ++i) wire.Step();
  LH_CHECK(ring.operations() == 0 && ring.open_sockets() == 0);
}

// Any bytes, from the first one on.
void AttackTls(FuzzInput in) {
  const auto side = in.Bool() ? TlsSession::Side::kClient : TlsSession::Side::kServer;
  TlsSession tls(ContextOf(1), side, IdentityOf(0).public_key());
  TlsSession other(
      ContextOf(0),
      side == TlsSession::Side::kClient ? TlsSession::Side::kServer : TlsSession::Side::kClient,
      IdentityOf(1).public_key());
  uint8_t room[512];
  for (int i = 0; i < 40 && !in.empty(); ++i) {
    if (!tls.shaken()) {
      if (!tls.Shake().ok()) break;
    } else {
      const auto read = tls.Read(room);
      if (!read.ok()) break;
    }
    other.Feed(tls.TakeOutput());
    if (!other.shaken()) {
      (void)other.Shake();
    } else {
      other.Write(Span(in.Bytes(100)));
    }
    std::string bytes = TextOf(other.TakeOutput());
    if (in.Below(4) == 3) bytes = Twisted(std::move(bytes), &in);
    if (in.Below(8) == 7) bytes += in.Bytes(100);
    tls.Feed(Span(bytes));
  }
}

}  // namespace
}  // namespace longhaul::peerd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longhaul::peerd;
  using longhaul::LaneKind;
  longhaul::FuzzInput in(data, size);
  switch (in.Byte() % 8) {
    case 0:
    case 1:
      AttackAcceptor(in);
      break;
    case 2:
      AttackDialer(in);
      break;
    case 3:
      AttackLane(in, LaneKind::kControl, false);
      break;
    case 4:
      AttackLane(in, LaneKind::kControl, true);
      break;
    case 5:
      AttackLane(in, LaneKind::kData, false);
      break;
    case 6:
      AttackLane(in, LaneKind::kData, true);
      break;
    case 7:
      AttackTls(in);
      break;
  }
  return 0;
}
