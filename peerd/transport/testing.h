// Whole transports, for tests. Each peer has a listener that records its calls. The peers are
// connected by the in-memory network or by loopback TCP.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log_lines.h"
#include "peerd/io/fake_ring.h"
#include "peerd/transport/auth.h"
#include "peerd/transport/transport.h"
#include "proto/wire/handshake.h"

namespace longhaul::peerd {

inline constexpr char kRun[] = "demo";
inline constexpr char kToken[] = "0123456789abcdef0123456789abcdef";

struct Frame {
  PeerId from;
  FrameHeader header;
  std::string payload;
};

// One peer: a transport, and a listener that records its calls.
class Peer : public TransportListener, public SegmentListener {
 public:
  void OnLinkUp(const LinkKey& link) override {
    EXPECT_TRUE(inside) << "called from within a call";
    up.insert(link.peer);
    ++ups[link.peer];
  }
  void OnLinkDown(const LinkKey& link, const std::string& reason, uint32_t silent_ms) override {
    EXPECT_TRUE(inside);
    up.erase(link.peer);
    downs[link.peer].push_back(reason);
    silences[link.peer] = silent_ms;
  }
  void OnPeerTried(const GroupKey&, uint64_t trial, PeerId, const std::string& error) override {
    EXPECT_TRUE(inside) << "called from within a call";
    EXPECT_TRUE(tried.emplace(trial, error).second) << "answered twice";
  }
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload) override {
    EXPECT_TRUE(inside);
    EXPECT_TRUE(up.count(link.peer)) << "a frame of a link that is not up";
    frames.push_back({link.peer, header, std::string(payload.begin(), payload.end())});
    return absl::OkStatus();
  }
  absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header) override {
    EXPECT_TRUE(inside);
    EXPECT_TRUE(up.count(link.peer)) << "data of a link that is not up";
    ++headers;
    if (discard) return nullptr;
    if (scatter) {
      auto& place = places[{link.peer, CookieOf(header)}];
      place.resize(header.payload_bytes);
      return place.data();
    }
    if (header.offset + header.payload_bytes > memory.size()) {
      return absl::InvalidArgumentError("beyond the end");
    }
    return memory.data() + header.offset;
  }
  absl::Status OnDataReceived(const LinkKey& link, const FrameHeader& header) override {
    EXPECT_TRUE(inside);
    if (scatter) {
      const auto& place = places[{link.peer, CookieOf(header)}];
      EXPECT_TRUE(std::equal(place.begin(), place.end(), memory.begin() + header.offset));
    }
    received += header.payload_bytes;
    ++segments;
    order.push_back(header);
    ++arrived[{link.peer, CookieOf(header)}];
    return absl::OkStatus();
  }
  void OnDataAbandoned(const LinkKey& link, const FrameHeader& header) override {
    EXPECT_TRUE(inside);
    EXPECT_TRUE(up.count(link.peer));
    EXPECT_GT(header.payload_bytes, 0u);
    ++abandoned;
  }
  void OnSegmentSent(uint64_t cookie) override {
    EXPECT_TRUE(inside);
    ++sent[cookie];
  }
  // Cookies above kRepeats belong to repeated segments.
  uint64_t OnSegmentRepeat(uint64_t owner) override {
    EXPECT_TRUE(inside);
    if (forgotten.count(owner)) return 0;
    ++started[++last_repeat];
    return last_repeat;
  }
  void OnReceivesDetached(uint64_t cookie) override {
    EXPECT_TRUE(inside);
    ++detached[cookie];
  }

  virtual SegmentListeners Segments() { return {.ops = this, .states = this}; }

  // Called after each turn of the ring.
  virtual void AfterTurn() {}

  // Sends part of `memory` to a peer as segment `cookie`.
  void Send(PeerId to, uint64_t offset, uint32_t bytes, uint64_t cookie, uint64_t op = 1) {
    Send(FrameType::kData, to, offset, bytes, cookie, op);
  }
  // Like Send(), for a segment of shared state.
  void SendChunk(PeerId to, uint64_t offset, uint32_t bytes, uint64_t cookie, uint64_t op = 1) {
    Send(FrameType::kChunkData, to, offset, bytes, cookie, op);
  }
  void Send(FrameType type, PeerId to, uint64_t offset, uint32_t bytes, uint64_t cookie,
            uint64_t op) {
    FrameHeader header;
    header.type = type;
    header.payload_bytes = bytes;
    header.op = OpOrdinal(op);
    header.attempt = Epoch(1);
    header.offset = offset;
    header.stamp = cookie;
    // A chunk's stamp is the length of the answer. It must reach beyond the end of the piece.
    if (type == FrameType::kChunkData) header.stamp += memory.size();
    ++started[cookie];
    transport->SendSegment({kRun, to}, header, memory.data() + offset, cookie, op);
  }
  // Returns the cookie that an arrived segment had at its sender, whose memory is as large as ours.
  uint64_t CookieOf(const FrameHeader& header) const {
    return header.stamp - (header.type == FrameType::kChunkData ? memory.size() : 0);
  }
  void SendCancel(PeerId to, uint64_t transfer) {
    FrameHeader header;
    header.type = FrameType::kChunkCancel;
    header.op = OpOrdinal(transfer);
    transport->SendControl({kRun, to}, header, {});
  }
  void SendReady(PeerId to, uint64_t op, size_t bytes) {
    FrameHeader header;
    header.type = FrameType::kReady;
    header.op = OpOrdinal(op);
    header.attempt = Epoch(1);
    header.payload_bytes = static_cast<uint32_t>(bytes);
    transport->SendControl({kRun, to}, header, std::vector<uint8_t>(bytes, uint8_t(op)));
  }

  PeerId id;
  Ring* ring = nullptr;
  std::unique_ptr<Transport> transport;
  bool inside = false;  // RunOnce() runs
  bool discard = false;
  bool scatter =
      false;  // each segment gets its own memory, which is compared with `memory` at the end
  std::map<std::pair<PeerId, uint64_t>, std::vector<uint8_t>> places;
  std::set<PeerId> up;
  std::map<PeerId, int> ups;
  std::map<PeerId, std::vector<std::string>> downs;
  std::map<PeerId, uint32_t> silences;    // from the last OnLinkDown()
  std::map<uint64_t, std::string> tried;  // the result of each trial
  std::vector<Frame> frames;
  std::vector<uint8_t> memory;
  std::map<std::pair<PeerId, uint64_t>, int> arrived;  // by sender and cookie
  std::vector<FrameHeader> order;  // headers of the segments that arrived, in order
  int headers = 0;
  int segments = 0;
  uint64_t received = 0;
  int abandoned = 0;
  static constexpr uint64_t kRepeats = uint64_t{1} << 40;
  uint64_t last_repeat = kRepeats;
  std::set<uint64_t> forgotten;
  std::map<uint64_t, int> started;
  std::map<uint64_t, int> sent;
  std::map<uint64_t, int> detached;
};

// How many callers this peer has refused for this reason.
inline uint64_t RefusedFor(const Peer& peer, CallerRefusal reason) {
  return peer.transport->GetStats().callers_refused[static_cast<size_t>(reason)];
}

// The HELLO of a control lane of the first epoch, with this byte all over its nonce. The lane is in
// clear.
inline LaneHello HelloOf(PeerId dialer, PeerId acceptor, uint8_t nonce = 0) {
  LaneHello hello;
  hello.nonce.fill(nonce);
  hello.run = RunTag(kToken, kRun, hello.nonce);
  hello.host = HostTag();
  hello.epoch = Epoch(1);
  hello.dialer = dialer;
  hello.acceptor = acceptor;
  return hello;
}

// Whether all lanes of these tests are sealed. The build runs the tests once in clear, and once so.
inline bool SealedByDefault() { return getenv("LONGHAUL_TEST_SEALED") != nullptr; }

// One FakeRing for all peers; one UringRing for all; a UringRing each; an EpollRing each.
enum class Rings { kFake, kOne, kEach, kEpollEach };

class PeerWorld {
 public:
  PeerWorld(
      Rings rings, uint64_t seed, int count, TransportOptions options = {},
      FakeRingOptions fake_options = {},
      const std::function<std::unique_ptr<Peer>()>& make = [] { return std::make_unique<Peer>(); })
      : kind(rings) {
    SetLogLevel(LogLevel::kWarning);
    if (rings == Rings::kFake) {
      fake_options.seed = seed;
      auto ring = std::make_unique<FakeRing>(fake_options);
      fake = ring.get();
      owned_.push_back(std::move(ring));
    }
    options.seed = seed;
    for (int i = 0; i < count; ++i) Add(options, make);
  }

  // Adds one more peer.
  void Add(
      TransportOptions options, const std::function<std::unique_ptr<Peer>()>& make = [] {
        return std::make_unique<Peer>();
      }) {
    const int i = static_cast<int>(peers.size());
    const bool each = kind == Rings::kEach || kind == Rings::kEpollEach;
    if (each || (kind == Rings::kOne && i == 0)) {
      auto ring = kind == Rings::kEpollEach ? MakeEpollRing() : MakeUringRing(64);
      EXPECT_TRUE(ring.ok()) << ring.status();
      owned_.push_back(*std::move(ring));
    }
    auto peer = make();
    peer->id = PeerId(i + 1);
    peer->ring = owned_.back().get();
    if (options.listen == TransportOptions{}.listen) options.listen = "127.0.0.1:0";
    options.self = peer->id;
    options.identity = IdentityOf(i);
    if (SealedByDefault()) options.encryption = LaneEncryption::kRequire;
    options.seed += i + 1;
    auto transport = MakeTransport(options, peer->ring, peer.get());
    EXPECT_TRUE(transport.ok()) << transport.status();
    peer->transport = *std::move(transport);
    peer->transport->SetSegmentListeners(peer->Segments());
    peers.push_back(std::move(peer));
  }

  ~PeerWorld() {
    Close();
    peers.clear();
  }

  // Closes all transports. Checks that every segment came back exactly once, and that nothing is
  // left in the in-memory ring.
  void Close() {
    if (closed_) return;
    closed_ = true;
    for (auto& peer : peers) peer->transport->Close();
    EXPECT_TRUE(Until([&] {
      return std::all_of(peers.begin(), peers.end(),
                         [](const auto& p) { return p->transport->closed(); });
    })) << "a transport does not close";
    for (auto& peer : peers) {
      EXPECT_EQ(peer->sent, peer->started) << "segments of " << ToString(peer->id);
    }
    if (fake != nullptr) {
      EXPECT_EQ(fake->operations(), 0u);
      EXPECT_EQ(fake->open_sockets(), 0u);
    }
  }

  Peer& at(int i) { return *peers[i]; }
  Tick Now() { return peers[0]->ring->Now(); }

  void Step() {
    for (auto& peer : peers) peer->inside = true;
    for (auto& ring : owned_) EXPECT_TRUE(ring->RunOnce(ring->Now() + Millis(1)).ok());
    for (auto& peer : peers) peer->inside = false;
    for (auto& peer : peers) peer->AfterTurn();
  }

  template <class Condition>
  bool Until(Condition condition, int64_t ms = 30000) {
    const Tick deadline = Now() + Millis(ms);
    while (!condition()) {
      if (Now() >= deadline) return false;
      Step();
    }
    return true;
  }

  static Identity IdentityOf(int i) { return Identity::ForTest(static_cast<uint64_t>(i) + 1); }

  LinkRequest Request(int to, bool dial, bool data) {
    return {.peer = at(to).id,
            .public_key = IdentityOf(to).public_key(),
            .endpoints = {at(to).transport->listen_address()},
            .dial = dial,
            .data = data};
  }

  // Both peers ask for the link, and `from` dials `to`.
  void Open(int from, int to, uint64_t epoch = 1, bool data = true, int64_t ms = 5000) {
    at(from).transport->OpenLinks(kRun, 0, Epoch(epoch), kToken, {Request(to, true, data)},
                                  Now() + Millis(ms));
    at(to).transport->OpenLinks(kRun, 0, Epoch(epoch), kToken, {Request(from, false, data)},
                                Now() + Millis(ms));
  }
  bool Linked(int a, int b) { return at(a).up.count(at(b).id) && at(b).up.count(at(a).id); }

  Rings kind;
  FakeRing* fake = nullptr;
  std::vector<std::unique_ptr<Ring>> owned_;
  std::vector<std::unique_ptr<Peer>> peers;

 private:
  bool closed_ = false;
};

// Numbered traffic of ops and of transfers between two peers. Every segment and every frame has to
// arrive exactly once with the right bytes, and frames in order.
class Traffic {
 public:
  explicit Traffic(PeerWorld* world) : world_(world) {
    for (auto& peer : world->peers) {
      peer->scatter = true;
      peer->memory = Pattern();
    }
  }

  void Segment(int from, int to, uint64_t offset, uint32_t bytes, uint64_t op = 1) {
    const uint64_t cookie = next_++;
    if (cookie % 3 == 0) {
      world_->at(from).SendChunk(world_->at(to).id, offset, bytes, cookie, op);
    } else {
      world_->at(from).Send(world_->at(to).id, offset, bytes, cookie, op);
    }
    segments_.push_back({world_->at(from).id, to, cookie});
  }
  void Frame(int from, int to, size_t bytes) {
    const uint64_t number = ++frames_[{from, to}];
    if (number % 4 == 3) {
      world_->at(from).SendCancel(world_->at(to).id, number);
    } else {
      world_->at(from).SendReady(world_->at(to).id, number, bytes);
    }
  }

  bool AllIsThere() const {
    for (const Sent& sent : segments_) {
      if (world_->at(sent.to).arrived.count({sent.from, sent.cookie}) == 0) return false;
    }
    for (auto& peer : world_->peers) {
      if (peer->sent != peer->started) return false;
    }
    for (const auto& [way, count] : frames_) {
      if (Frames(way.first, way.second).size() < count) return false;
    }
    return true;
  }

  void ExpectOnce() const {
    size_t arrived = 0;
    for (auto& peer : world_->peers) arrived += peer->arrived.size();
    EXPECT_EQ(arrived, segments_.size());
    for (const Sent& sent : segments_) {
      EXPECT_EQ(world_->at(sent.to).arrived[std::pair(sent.from, sent.cookie)], 1);
    }
    for (const auto& [way, count] : frames_) {
      const auto frames = Frames(way.first, way.second);
      ASSERT_EQ(frames.size(), count);
      for (size_t i = 0; i < count; ++i) EXPECT_EQ(frames[i], i + 1);
    }
  }

 private:
  struct Sent {
    PeerId from;
    int to;
    uint64_t cookie;
  };
  // What the memory of each peer holds. It is computed once, because tests make thousands of
  // worlds.
  static const std::vector<uint8_t>& Pattern() {
    static const auto& pattern = *new std::vector<uint8_t>([] {
      std::vector<uint8_t> bytes(1 << 20);
      for (size_t b = 0; b < bytes.size(); ++b) bytes[b] = static_cast<uint8_t>(b * 13 + b / 241);
      return bytes;
    }());
    return pattern;
  }
  std::vector<uint64_t> Frames(int from, int to) const {
    std::vector<uint64_t> ordinals;
    for (const auto& frame : world_->at(to).frames) {
      if (frame.from != world_->at(from).id) continue;
      ordinals.push_back(frame.header.op.value());
      EXPECT_EQ(frame.payload, std::string(frame.payload.size(), char(frame.header.op.value())));
    }
    return ordinals;
  }

  PeerWorld* const world_;
  uint64_t next_ = 1;
  std::vector<Sent> segments_;
  std::map<std::pair<int, int>, size_t> frames_;
};

inline void ExpectNoLinkWasLost(PeerWorld* world) {
  for (auto& peer : world->peers) {
    for (const auto& [other, reasons] : peer->downs) {
      for (const std::string& reason : reasons)
        ADD_FAILURE() << ToString(peer->id) << ": " << reason;
    }
    EXPECT_EQ(peer->transport->GetStats().links_lost, 0u);
    EXPECT_EQ(peer->transport->GetStats().frames_refused, 0u);
    for (const auto& [other, times] : peer->ups) EXPECT_EQ(times, 1);
  }
}

}  // namespace longhaul::peerd
