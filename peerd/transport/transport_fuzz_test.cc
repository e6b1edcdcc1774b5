// A hostile member attacks a whole transport, over the network in memory.
//
// The member knows the token of the epoch. It dials lanes, or is dialled, with a handshake that is
// right, that has wrong fields, or that is garbage. On its lanes it sends frames with any fields,
// or any bytes, cut at any point; the network cuts them once more. Meanwhile the victim sends
// frames and segments. Whatever happens, no check may fire, every segment must come back once, the
// listener hears only of links that are up, and the transport can be closed.
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "peerd/io/fake_ring.h"
#include "peerd/transport/auth.h"
#include "peerd/transport/lane_handshake.h"
#include "peerd/transport/transport.h"
#include "proto/wire/frame.h"
#include "proto/wire/handshake.h"
#include "tests/support/fuzz_input.h"

namespace longhaul::peerd {
namespace {

constexpr char kRun[] = "demo";
constexpr char kToken[] = "0123456789abcdef0123456789abcdef";
const PeerId kHostile{1};
const PeerId kVictim{2};
constexpr size_t kMemoryBytes = 64 << 10;

FrameHeader DrawHeader(FuzzInput* in) {
  FrameHeader header;
  header.type = static_cast<FrameType>(in->Below(16));
  const uint8_t set = in->Byte();
  if ((set & 1) != 0) header.flags = static_cast<uint8_t>(in->Number());
  if ((set & 2) != 0) header.group = static_cast<uint32_t>(in->Number());
  if ((set & 4) != 0) header.op = OpOrdinal(in->Number());
  if ((set & 8) != 0) header.attempt = Epoch(in->Number());
  if ((set & 16) != 0) header.offset = in->Number();
  if ((set & 32) != 0) header.phase = static_cast<Phase>(in->Number());
  if ((set & 64) != 0) header.stamp = in->Number();
  if ((set & 128) != 0) header.acked = in->Number();
  header.payload_bytes = static_cast<uint32_t>((set & 16) != 0 ? in->Number() : in->Below(200));
  return header;
}

// The victim's listener.
class Listener : public TransportListener, public SegmentListener {
 public:
  void OnLinkUp(const LinkKey& link) override { up.insert(link.peer); }
  void OnLinkDown(const LinkKey& link, const std::string&, uint32_t) override {
    up.erase(link.peer);
  }
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload) override {
    LH_CHECK(up.contains(link.peer)) << "a frame of a link that is not up";
    LH_CHECK(payload.size() == header.payload_bytes);
    return header.op == OpOrdinal(7) ? absl::InvalidArgumentError("refused") : absl::OkStatus();
  }
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header) override {
    LH_CHECK(up.contains(link.peer)) << "data of a link that is not up";
    if (header.op == OpOrdinal(7)) return nullptr;
    const size_t bytes = header.payload_bytes;
    if (header.offset > kMemoryBytes || bytes > kMemoryBytes - header.offset) {
      return absl::InvalidArgumentError("beyond the end");
    }
    return memory.data() + header.offset;
  }
  absl::Status OnDataReceived(const LinkKey& link, const FrameHeader&) override {
    LH_CHECK(up.contains(link.peer)) << "data of a link that is not up";
    return absl::OkStatus();
  }
  void OnDataAbandoned(const LinkKey&, const FrameHeader&) override {}
  void OnSegmentSent(uint64_t cookie) override {
    LH_CHECK(out.erase(cookie) == 1) << "a segment came back twice";
  }
  uint64_t OnSegmentRepeat(uint64_t owner) override {
    if (owner % 4 == 3) return 0;
    out.insert(++last_cookie);
    return last_cookie;
  }
  void OnReceivesDetached(uint64_t cookie) override {
    LH_CHECK(detaching.erase(cookie) == 1) << "detached twice";
  }
  void OnPeerTried(const GroupKey&, uint64_t trial, PeerId, const std::string&) override {
    LH_CHECK(trying.erase(trial) == 1) << "tried twice";
  }

  std::set<PeerId> up;
  std::set<uint64_t> out;  // segments that have not come back
  std::set<uint64_t> detaching;
  std::set<uint64_t> trying;
  uint64_t last_cookie = 0;
  std::vector<uint8_t> memory = std::vector<uint8_t>(kMemoryBytes);
};

// One connection of the hostile member.
struct Connection {
  int fd = -1;
  LaneKind kind = LaneKind::kControl;
  std::unique_ptr<LaneHandshake> handshake;
  std::vector<uint8_t> in = std::vector<uint8_t>(4096);
  IoId receiving = 0;
  std::map<IoId, std::string> sending;
  bool closing = false;
};

class Attack {
 public:
  Attack(const uint8_t* data, size_t size)
      : in_(data, size), ring_({.seed = uint64_t{in_.Byte()} + 1, .stream_bytes_max = 4096}) {
    SetLogSink([](std::string_view) {});
    dialled_ = in_.Bool();
    TransportOptions options;
    options.self = kVictim;
    options.listen = "127.0.0.1:0";
    options.lanes = static_cast<uint32_t>(in_.Below(3));
    options.detect_ms = 1000;
    options.zero_copy =
        in_.Bool() ? TransportOptions::ZeroCopy::kOn : TransportOptions::ZeroCopy::kOff;
    options.seed = 1;
    options.identity = Identity::ForTest(2);
    auto transport = MakeTransport(options, &ring_, &listener_);
    LH_CHECK(transport.ok()) << transport.status().ToString();
    victim_ = *std::move(transport);
    victim_->SetSegmentListeners({.ops = &listener_, .states = &listener_});
    listening_ = *ring_.sockets().Listen(*NumericAddress(*ParseHostPort("127.0.0.1:0")));
    if (dialled_) AcceptNext();
    Open(1);
  }

  void Run() {
    for (int i = 0; i < 200 && !in_.empty(); ++i) Choose();
    ending_ = true;
    if (accepting_ != 0) ring_.Cancel(accepting_);
    for (Connection& connection : connections_) Close(&connection);
    victim_->Close();
    for (int i = 0; i < 100000 && !(victim_->closed() && listener_.out.empty()); ++i) Step();
    LH_CHECK(victim_->closed()) << "the transport does not close";
    LH_CHECK(listener_.out.empty()) << "segments did not come back";
    LH_CHECK(listener_.detaching.empty()) << "receives were not detached";
    for (int i = 0; i < 100000 && ring_.operations() > 0; ++i) Step();
    LH_CHECK(ring_.operations() == 0) << "operations are left";
    ring_.sockets().Close(listening_);
  }

 private:
  void Choose() {
    switch (in_.Byte() % 16) {
      case 0:
        return Dial();
      case 1:
        return DialRaw();
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
        return SendFrame();
      case 7:
        return SendRaw();
      case 8:
        if (Connection* const connection = Pick()) Close(connection);
        return;
      case 9:
      case 10:
        for (size_t n = 1 + in_.Below(40); n > 0; --n) Step();
        return;
      case 11: {
        ring_.AdvanceTime(Millis(static_cast<int64_t>(in_.Below(256)) * 4));
        return Step();
      }
      case 12:
      case 13:
        return Speak();
      case 14:
        return Speak2();
      case 15:
        return Open(1 + in_.Below(3));
    }
  }

  void Step() { LH_CHECK_OK(ring_.RunOnce(ring_.Now() + Millis(1))); }

  Connection* Pick() {
    if (connections_.empty()) return nullptr;
    auto it = connections_.begin();
    std::advance(it, static_cast<ptrdiff_t>(in_.Below(connections_.size())));
    return &*it;
  }

  // ---- the victim

  void Open(uint64_t epoch) {
    LinkRequest request;
    request.peer = kHostile;
    request.public_key = Identity::ForTest(1).public_key();
    request.dial = dialled_;
    request.data = in_.Bool();
    request.one_lane = in_.Bool();
    if (dialled_) request.endpoints = {ToString(*ring_.sockets().LocalAddress(listening_))};
    victim_->OpenLinks(kRun, 0, Epoch(epoch), kToken, {request}, ring_.Now() + Seconds(5));
  }
  void Speak() {
    const LinkKey link{kRun, kHostile};
    FrameHeader header;
    header.op = OpOrdinal(1 + in_.Below(4));
    header.attempt = Epoch(1);
    if (in_.Bool()) {
      header.type = FrameType::kDone;
      return in_.Bool() ? victim_->SendControl(link, header, {})
                        : victim_->SendControlInTime(link, header, {});
    }
    header.type = FrameType::kData;
    header.payload_bytes = static_cast<uint32_t>(1 + in_.Below(5000));
    listener_.out.insert(++listener_.last_cookie);
    victim_->SendSegment(link, header, source_.data(), listener_.last_cookie, ++last_owner_);
  }
  void Speak2() {
    const LinkKey link{kRun, kHostile};
    switch (in_.Below(10)) {
      case 0:
        return victim_->WantDataLanes(link);
      case 1: {
        const ReceiveKey key{FrameType::kData, static_cast<uint32_t>(in_.Below(2)),
                             OpOrdinal(in_.Below(8)), Epoch(in_.Below(8))};
        listener_.detaching.insert(++last_detach_);
        return victim_->DetachReceives(kRun, key, last_detach_);
      }
      case 2:
        return victim_->DropSegments(FrameType::kData,
                                     {listener_.out.begin(), listener_.out.end()});
      case 3:
        return victim_->KeepLinks(kRun, 0, Epoch(1),
                                  in_.Bool() ? std::vector{kHostile} : std::vector<PeerId>{});
      case 4:
        return victim_->BreakLink(link, "test");
      case 5:
        victim_->StartProbe(link);
        return;
      case 6:
        listener_.trying.insert(++last_trial_);
        return victim_->TryPeer({kRun, 0}, last_trial_, kHostile,
                                {ToString(*ring_.sockets().LocalAddress(listening_))},
                                ring_.Now() + Seconds(1));
      case 7:
        return victim_->SetDetectMs(static_cast<uint32_t>(200 + in_.Below(2000)));
      default:
        victim_->GetStats();
        victim_->GetLinkStats();
        victim_->PopRates();
        victim_->PopArrivals();
        victim_->PopWaits();
        victim_->PopProbe();
        victim_->BestUse(link);
        return;
    }
  }

  // ---- the hostile member

  Connection* Add(int fd, LaneKind kind) {
    connections_.emplace_back();
    Connection* const connection = &connections_.back();
    connection->fd = fd;
    connection->kind = kind;
    return connection;
  }

  LaneHello DrawHello() {
    LaneHello hello;
    hello.run = RunTag(kToken, kRun, hello.nonce);
    hello.kind = static_cast<LaneKind>(in_.Below(3));
    hello.epoch = Epoch(1);
    hello.dialer = kHostile;
    hello.acceptor = kVictim;
    const uint8_t set = in_.Byte();
    if (hello.kind != LaneKind::kControl) hello.lanes = 1 + static_cast<uint32_t>(in_.Below(3));
    if (hello.kind == LaneKind::kControl && links_ > 0 && (set & 1) == 0) hello.link = link_;
    if (hello.kind == LaneKind::kData) hello.link = link_;
    if (hello.link != 0) hello.serial = ++serial_;
    if ((set & 0xc0) != 0xc0) return hello;
    if ((set & 2) != 0) hello.link = in_.Number();
    if ((set & 4) != 0) hello.serial = in_.Number();
    if ((set & 8) != 0) hello.lane = static_cast<uint32_t>(in_.Number());
    if ((set & 16) != 0) hello.lanes = static_cast<uint32_t>(in_.Number());
    if ((set & 32) != 0) {
      hello.epoch = Epoch(in_.Number());
      hello.dialer = PeerId(in_.Number());
      hello.acceptor = PeerId(in_.Number());
      hello.relay = PeerId(in_.Number());
      hello.group = static_cast<uint32_t>(in_.Number());
      hello.sealed = in_.Bool();
    }
    return hello;
  }

  void Dial() {
    if (connections_.size() >= 12) return;
    DialSpec spec{.address = *NumericAddress(*ParseHostPort(victim_->listen_address())),
                  .tuning = {},
                  .hello = DrawHello(),
                  .token = in_.Below(16) == 15 ? "another token" : kToken,
                  .tls = &tls_,
                  .peer_key = Identity::ForTest(2).public_key()};
    const LaneHello hello = spec.hello;
    if (hello.kind == LaneKind::kData && spec.token == kToken) spec.token = clear_secret_;
    Connection* const connection = Add(-1, hello.kind);
    connection->handshake = std::make_unique<LaneDial>(
        &ring_, std::move(spec), kNever, [this, connection, hello](LaneHandshake* handshake) {
          if (!handshake->ok()) return;
          LaneSocket socket = handshake->TakeSocket();
          connection->fd = socket.fd;
          if (hello.kind == LaneKind::kControl && hello.link == 0) {
            clear_secret_ = socket.clear_secret;
            link_ = NewLinkId(hello);
            serial_ = 0;
            ++links_;
          }
          if (connection->closing) return Close(connection);
          Listen(connection);
        });
    if (in_.Below(8) == 7) connection->handshake->Fail("test");
    for (size_t n = in_.Below(64); n > 0; --n) Step();
  }
  void DialRaw() {
    if (connections_.size() >= 12) return;
    const SocketAddress address = *NumericAddress(*ParseHostPort(victim_->listen_address()));
    const int fd = *ring_.sockets().Open(address.family());
    Connection* const connection = Add(fd, LaneKind::kControl);
    bool connected = false;
    ring_.Connect(fd, address.get(), address.length, [&](IoResult) { connected = true; });
    while (!connected) Step();
    Listen(connection);
    if (in_.Bool()) {
      const auto hello = Encode(DrawHello());
      Send(connection, std::string(hello.begin(), hello.end()));
    } else {
      Send(connection, in_.Bytes(200));
    }
  }
  void AcceptNext() {
    accepting_ = ring_.Accept(listening_, [this](IoResult result) {
      accepting_ = 0;
      if (result.value < 0) return;
      if (ending_ || connections_.size() >= 12) {
        ring_.sockets().Abort(result.value);
        return ending_ ? void() : AcceptNext();
      }
      Connection* const connection = Add(-1, LaneKind::kControl);
      if (in_.Below(8) == 7) {
        connection->fd = result.value;
        Listen(connection);
        Send(connection, in_.Bytes(kLaneAnswerBytes));
      } else {
        const bool refuses = in_.Below(8) == 7;
        const auto judge = [this, connection, refuses](const LaneHello& hello) {
          connection->kind = hello.kind;
          if (refuses) return LaneVerdict{static_cast<LaneResult>(1 + in_.Below(7)), ""};
          return LaneVerdict{LaneResult::kAccepted,
                             hello.kind == LaneKind::kData ? clear_secret_ : kToken,
                             Identity::ForTest(2).public_key()};
        };
        connection->handshake =
            std::make_unique<LaneAccept>(&ring_, result.value, Digest32{}, &tls_, kNever, judge,
                                         [this, connection](LaneHandshake* handshake) {
                                           if (!handshake->ok()) return;
                                           LaneSocket socket = handshake->TakeSocket();
                                           connection->fd = socket.fd;
                                           if (!socket.clear_secret.empty()) {
                                             clear_secret_ = socket.clear_secret;
                                           }
                                           if (connection->closing) return Close(connection);
                                           Listen(connection);
                                         });
      }
      AcceptNext();
    });
  }

  void SendFrame() {
    Connection* const connection = Pick();
    if (connection == nullptr) return;
    std::string bytes;
    for (size_t n = 1 + in_.Below(3); n > 0; --n) {
      const FrameHeader header = DrawHeader(&in_);
      const auto encoded = Encode(header);
      bytes.append(encoded.begin(), encoded.end());
      bytes.append(std::min<size_t>(header.payload_bytes, 3000), static_cast<char>(in_.Byte()));
    }
    if (in_.Below(16) == 15) bytes.resize(in_.Below(bytes.size()));
    if (in_.Below(16) == 15) bytes[in_.Below(bytes.size() + 1)] = static_cast<char>(in_.Byte());
    Send(connection, std::move(bytes));
  }
  void SendRaw() {
    if (Connection* const connection = Pick()) Send(connection, in_.Bytes(200));
  }
  void Send(Connection* connection, std::string bytes) {
    if (connection->fd < 0 || connection->closing || bytes.empty()) return;
    if (!connection->sending.empty()) {
      // The victim does not read on, or is slow.
      for (int i = 0; i < 20 && !connection->sending.empty(); ++i) Step();
      if (connection->fd < 0 || connection->closing || !connection->sending.empty()) return;
    }
    auto kept = std::make_shared<std::string>(std::move(bytes));
    auto id = std::make_shared<IoId>();
    *id = ring_.Send(connection->fd, kept->data(), kept->size(), true,
                     [this, connection, kept, id](IoResult) {
                       connection->sending.erase(*id);
                       if (connection->closing) Close(connection);
                     });
    connection->sending[*id];
  }
  // Reads and forgets what comes.
  void Listen(Connection* connection) {
    connection->receiving = ring_.Recv(connection->fd, connection->in.data(), connection->in.size(),
                                       false, [this, connection](IoResult result) {
                                         connection->receiving = 0;
                                         if (result.value <= 0) connection->closing = true;
                                         if (connection->closing) return Close(connection);
                                         Listen(connection);
                                       });
  }
  // Closes when no operation is left.
  void Close(Connection* connection) {
    connection->closing = true;
    if (connection->handshake != nullptr && connection->fd < 0) connection->handshake->Fail("end");
    if (connection->fd < 0) return;
    if (connection->receiving != 0) ring_.Cancel(connection->receiving);
    for (const auto& [id, bytes] : connection->sending) ring_.Cancel(id);
    if (connection->receiving != 0 || !connection->sending.empty()) return;
    const int fd = std::exchange(connection->fd, -1);
    in_.Bool() ? ring_.sockets().Close(fd) : ring_.sockets().Abort(fd);
  }

  FuzzInput in_;
  const TlsContext tls_{Identity::ForTest(1)};
  std::string clear_secret_ = kToken;
  FakeRing ring_;
  Listener listener_;
  std::unique_ptr<Transport> victim_;
  bool dialled_ = false;  // by the victim
  bool ending_ = false;
  int listening_ = -1;
  IoId accepting_ = 0;
  std::list<Connection> connections_;
  uint64_t link_ = 0;
  uint64_t links_ = 0;
  uint64_t serial_ = 0;
  uint64_t last_owner_ = 0;
  uint64_t last_detach_ = 0;
  uint64_t last_trial_ = 0;
  std::vector<uint8_t> source_ = std::vector<uint8_t>(8192, 5);
};

}  // namespace
}  // namespace longhaul::peerd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  longhaul::peerd::Attack(data, size).Run();
  return 0;
}
