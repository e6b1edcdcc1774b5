// Transfers of shared state between whole peers, each with a transport, a server and a receiver.
// They run on the network in memory, driven by seeds, and over loopback TCP.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/prng.h"
#include "peerd/io/fake_ring.h"
#include "peerd/state/hasher.h"
#include "peerd/state/memory_state.h"
#include "peerd/state/state_exchange.h"
#include "peerd/state/state_hash.h"
#include "peerd/state/token_bucket.h"
#include "peerd/transport/testing.h"
#include "peerd/transport/transport.h"
#include "proto/wire/frame.h"

namespace longhaul::peerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr uint64_t kMiB = uint64_t{1} << 20;
const GroupKey kGroup{kRun, 3};
constexpr uint64_t kLocal = 77;

// Hashes between turns of the ring: a random part of the open work, in random order.
class TestHasher final : public Hasher {
 public:
  explicit TestHasher(uint64_t seed) : random_(seed) {}

  void Hash(const std::byte* data, size_t bytes, std::function<void(Hash128)> done) override {
    work_.push_back({{reinterpret_cast<const uint8_t*>(data), bytes}, std::move(done)});
  }
  void Touch(std::span<uint8_t> memory, std::function<void()> done) override {
    work_.push_back({{}, [this, memory, done = std::move(done)](Hash128) {
                       touched_[memory.data()] = memory.size();
                       done();
                     }});
  }
  // Returns whether all of this memory was touched. The memory must lie in one chunk.
  bool Touched(const uint8_t* data, size_t bytes) const {
    const auto next = touched_.upper_bound(data);
    if (next == touched_.begin()) return false;
    const auto& [begin, size] = *std::prev(next);
    return data + bytes <= begin + size;
  }
  void Run() {
    if (holds) return;
    for (size_t n = work_.size(); n > 0; --n) {
      if (random_.Chance(0.3)) continue;
      const size_t i = random_.Below(work_.size());
      Work work = std::move(work_[i]);
      work_.erase(work_.begin() + static_cast<ptrdiff_t>(i));
      work.done(HashChunk(work.bytes));
    }
  }

  bool holds = false;  // Run() does nothing
  size_t waiting() const { return work_.size(); }

 private:
  struct Work {
    std::span<const uint8_t> bytes;
    std::function<void(Hash128)> done;
  };
  Prng random_;
  std::vector<Work> work_;
  std::map<const uint8_t*, size_t> touched_;
};

// Names a segment of a transfer that a test sent itself.
constexpr uint64_t kCookieOfTest = UINT64_MAX;

// A peer of PeerWorld that also exchanges state.
class StatePeer final : public Peer {
 public:
  void Make() {
    hasher = std::make_unique<TestHasher>(id.value());
    exchange = std::make_unique<StateExchange>(id, transport.get(), hasher.get(), 1500);
  }

  void OnLinkUp(const LinkKey& link) override {
    Peer::OnLinkUp(link);
    exchange->OnLinkUp(link, ring->Now());
  }
  void OnLinkDown(const LinkKey& link, const std::string& reason, uint32_t silent_ms) override {
    Peer::OnLinkDown(link, reason, silent_ms);
    exchange->OnLinkDown(link, ring->Now());
  }
  absl::Status OnControlFrame(const LinkKey& link, const FrameHeader& header,
                              std::span<const uint8_t> payload) override {
    if (!IsOfTransfer(header.type)) return Peer::OnControlFrame(link, header, payload);
    if (header.type == FrameType::kChunkRequest) ++requests;
    if (mute) return absl::OkStatus();
    return exchange->OnControlFrame(link, header, payload, in_group, ring->Now());
  }
  SegmentListeners Segments() override { return {.ops = this, .states = &states_}; }
  void AfterTurn() override {
    hasher->Run();
    exchange->Work(ring->Now());
    for (auto& ended : exchange->PopEnded()) {
      EXPECT_FALSE(results.contains(ended.local)) << "ended twice";
      results[ended.local] = ended.result;
    }
    for (auto& compared : exchange->PopCompared())
      differences[compared.local] = compared.difference;
  }

  std::unique_ptr<TestHasher> hasher;
  std::unique_ptr<StateExchange> exchange;
  std::map<uint64_t, TransferResult> results;
  std::map<uint64_t, std::string> differences;
  int requests = 0;
  bool mute = false;     // answers no ask
  bool in_group = true;  // whether the others are in the groups of its members
  uint64_t state_bytes = 0;
  std::span<const uint8_t> fresh;  // the inbox if it is memory of its own

 private:
  // Looks at what comes for the exchange.
  struct States final : SegmentListener {
    explicit States(StatePeer* owner) : peer(owner) {}
    absl::StatusOr<uint8_t*> OnDataHeader(const LinkKey& link, const FrameHeader& header) override {
      const absl::StatusOr<uint8_t*> place = peer->exchange->OnDataHeader(link, header);
      const std::span<const uint8_t> fresh = peer->fresh;
      if (place.ok() && *place != nullptr && fresh.data() <= *place &&
          *place < fresh.data() + fresh.size()) {
        EXPECT_TRUE(peer->hasher->Touched(*place, header.payload_bytes))
            << "the network makes its pages";
      }
      return place;
    }
    absl::Status OnDataReceived(const LinkKey& link, const FrameHeader& header) override {
      peer->state_bytes += header.payload_bytes;
      return peer->exchange->OnDataReceived(link, header);
    }
    void OnDataAbandoned(const LinkKey& link, const FrameHeader& header) override {
      peer->exchange->OnDataAbandoned(link, header);
    }
    void OnSegmentSent(uint64_t cookie) override {
      if (cookie == kCookieOfTest) return peer->Peer::OnSegmentSent(cookie);
      peer->exchange->OnSegmentSent(cookie);
    }
    uint64_t OnSegmentRepeat(uint64_t owner) override {
      return peer->exchange->OnSegmentRepeat(owner);
    }
    void OnReceivesDetached(uint64_t cookie) override {
      peer->exchange->OnReceivesDetached(cookie);
    }
    StatePeer* const peer;
  };
  States states_{this};
};

// A state and its memory.
struct State {
  explicit State(const Manifest& manifest) : state(std::make_shared<MemoryState>()) {
    uint64_t total = 0;
    for (const StateTensor& tensor : manifest) total += tensor.bytes;
    auto memory = std::make_shared<std::vector<uint8_t>>(total + 1);
    bytes = memory.get();
    state->manifest = manifest;
    uint64_t offset = 0;
    for (const StateTensor& tensor : manifest) {
      state->places.push_back(bytes->data() + offset);
      offset += tensor.bytes;
    }
    state->memory = std::move(memory);
    Hash();
    state->FetchInto(state->places);
  }
  void OwnInbox() {
    inbox.resize(bytes->size());
    std::vector<uint8_t*> where;
    for (const uint8_t* const place : state->places) {
      where.push_back(inbox.data() + (place - bytes->data()));
    }
    state->FetchInto(std::move(where));
  }
  void Fill(uint64_t seed) {
    Prng random(seed);
    for (size_t i = 0; i + 8 <= bytes->size(); i += 8) {
      const uint64_t value = random.Next();
      std::memcpy(bytes->data() + i, &value, 8);
    }
    Hash();
  }
  void Hash() {
    state->digests.clear();
    for (size_t t = 0; t < state->manifest.size(); ++t) {
      auto& chunks = state->digests.emplace_back();
      const uint64_t size = state->manifest[t].bytes;
      for (uint64_t c = 0; c < CountChunks(size); ++c) {
        chunks.push_back(HashChunk({state->places[t] + ChunkOffset(c), ChunkBytes(size, c)}));
      }
    }
  }
  Hash128 root() const { return RootOf(state->manifest, state->digests); }
  // Returns the bytes of the state: each chunk from where Chunk() finds it. Checks the digests.
  std::vector<uint8_t> Seen() const {
    std::vector<uint8_t> seen;
    for (uint32_t t = 0; t < state->manifest.size(); ++t) {
      const uint64_t size = state->manifest[t].bytes;
      for (uint64_t c = 0; c < CountChunks(size); ++c) {
        const std::span<const uint8_t> chunk(state->Chunk(t, c), ChunkBytes(size, c));
        EXPECT_EQ(HashChunk(chunk), state->digests[t][c]) << "tensor " << t << " chunk " << c;
        seen.insert(seen.end(), chunk.begin(), chunk.end());
      }
    }
    return seen;
  }

  std::shared_ptr<MemoryState> state;
  std::vector<uint8_t>* bytes = nullptr;
  std::vector<uint8_t> inbox;  // empty: chunks are fetched into `bytes`
};

Manifest OneTensor(uint64_t bytes) { return {{"weights", 9, {bytes}, bytes, false}}; }

MemberId MemberOf(int peer) { return MemberId(100 + peer); }

// Peer 0 fetches, and all other peers hold the state. With odd seeds peer 0 has an inbox of its
// own.
class Cluster {
 public:
  Cluster(Rings rings, uint64_t seed, int count, const Manifest& manifest, bool data = true,
          TransportOptions options = {})
      : Cluster(rings, seed, count, manifest, data, std::move(options), Network(seed)) {}
  Cluster(Rings rings, uint64_t seed, int count, const Manifest& manifest, bool data,
          TransportOptions options, FakeRingOptions network)
      : world(rings, seed, count, std::move(options), network,
              [] { return std::make_unique<StatePeer>(); }) {
    for (int i = 0; i < count; ++i) {
      at(i).Make();
      states.emplace_back(manifest);
      states.back().Fill(i == 0 ? 1 : 2);
    }
    root = states.back().root();
    if (seed % 2 == 1) {
      states[0].OwnInbox();
      at(0).fresh = states[0].inbox;
    }
    for (int i = 1; i < count; ++i) world.Open(0, i, 1, data);
    EXPECT_TRUE(world.Until([&] {
      for (int i = 1; i < count; ++i) {
        if (!world.Linked(0, i)) return false;
      }
      return true;
    }));
  }
  ~Cluster() { world.Close(); }

  static FakeRingOptions Network(uint64_t seed) {
    FakeRingOptions options;
    options.stream_bytes_max = seed % 3 == 0 ? 64 << 10 : 1 << 20;
    options.partial = seed % 2 == 0;
    return options;
  }

  StatePeer& at(int i) { return static_cast<StatePeer&>(world.at(i)); }
  void Serve(int i, bool may_change = false) {
    at(i).exchange->server()->Register(kGroup, MemberOf(i), states[i].state);
    at(i).exchange->server()->Serve(kGroup, MemberOf(i), root, may_change);
  }
  std::vector<StateSource> Sources() {
    std::vector<StateSource> sources;
    for (size_t i = 1; i < states.size(); ++i) sources.push_back({MemberOf(i), at(i).id});
    return sources;
  }
  void Start(bool unequal_too = false) { Start(Sources(), unequal_too); }
  void StartInBackground(std::vector<StateSource> sources) {
    Start(std::move(sources), /*unequal_too=*/false, /*background=*/true);
  }
  void Start(std::vector<StateSource> sources, bool unequal_too = false, bool background = false) {
    at(0).exchange->StartTransfer({.local = kLocal,
                                   .group = kGroup,
                                   .root = root,
                                   .state = states[0].state,
                                   .sources = std::move(sources),
                                   .unequal_too = unequal_too,
                                   .background = background},
                                  world.Now());
  }
  bool Ended() { return at(0).results.contains(kLocal); }
  const TransferResult& result() { return at(0).results.at(kLocal); }
  // Breaks the link between peer 0 and peer `i`.
  void Cut(int i) {
    at(i).transport->BreakLink({kRun, PeerId(1)}, "cut");
    EXPECT_TRUE(world.Until([&] { return !at(0).up.contains(at(i).id); }));
  }
  void Pass(int64_t us) {
    const Tick until = world.Now() + us;
    EXPECT_TRUE(world.Until([&] { return world.Now() >= until; }));
  }
  StateTransfer::Progress progress() { return at(0).exchange->ProgressOf(kLocal); }
  // Bytes sent to peer 0 on all connections.
  uint64_t BytesToReceiver() {
    uint64_t bytes = 0;
    if (world.fake == nullptr) return 0;
    for (int i = 0; i < world.fake->connections(); ++i) {
      bytes += world.fake->BytesSent(i, /*by_dialer=*/false);
    }
    return bytes;
  }
  uint64_t total() const { return states[0].bytes->size() - 1; }

  // Runs until the transfer ends, and expects that it has succeeded.
  void ExpectFetched() {
    ASSERT_TRUE(world.Until([&] { return Ended(); })) << "does not end";
    ASSERT_EQ(result().error, "");
    ExpectEqual();
    EXPECT_TRUE(world.Until([&] {
      for (size_t i = 1; i < states.size(); ++i) {
        if (at(i).up.contains(PeerId(1)) && at(i).exchange->server()->transfers() != 0)
          return false;
      }
      return true;
    })) << "sources are told of the end";
  }
  void ExpectEqual() {
    EXPECT_TRUE(states[0].Seen() == states.back().Seen());
    EXPECT_EQ(states[0].root(), root);
  }

  PeerWorld world;
  std::deque<State> states;
  Hash128 root;
};

struct Param {
  std::string name;
  Rings rings;
  uint64_t seed;
};
std::ostream& operator<<(std::ostream& out, const Param& param) { return out << param.name; }

std::vector<Param> Params() {
  std::vector<Param> params = {{"OneUring", Rings::kOne, 1},
                               {"UringEach", Rings::kEach, 1},
                               {"EpollEach", Rings::kEpollEach, 1}};
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    params.push_back({"Fake" + std::to_string(seed), Rings::kFake, seed});
  }
  return params;
}

class ExchangeTest : public ::testing::TestWithParam<Param> {};
INSTANTIATE_TEST_SUITE_P(Rings, ExchangeTest, ::testing::ValuesIn(Params()),
                         [](const auto& info) { return info.param.name; });

class ExchangeSeeds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, ExchangeSeeds, ::testing::Range(1, 7));

// ------------------------------------------------------------------------------ what travels

TEST_P(ExchangeTest, EverythingComesFromTwoAndFromThreeSources) {
  for (const int sources : {2, 3}) {
    Cluster cluster(GetParam().rings, GetParam().seed, 1 + sources, OneTensor(16 * kMiB + 12345));
    for (int i = 1; i <= sources; ++i) cluster.Serve(i);
    cluster.Start();
    cluster.ExpectFetched();
    EXPECT_EQ(cluster.result().bytes, cluster.total());
    EXPECT_EQ(cluster.result().sources.size(), static_cast<size_t>(sources));
    EXPECT_THAT(cluster.result().corrupt, IsEmpty());
  }
}

TEST_P(ExchangeTest, OnlyChunksThatDifferTravel) {
  const Manifest manifest = {{"a", 9, {}, 3 * kMiB, false},
                             {"nothing", 9, {0}, 0, false},
                             {"b", 9, {}, 5 * kMiB + 3, false},
                             {"small", 9, {}, 4, false}};
  Cluster cluster(GetParam().rings, GetParam().seed, 2, manifest);
  *cluster.states[0].bytes = *cluster.states[1].bytes;
  cluster.states[0].state->places[0][kMiB + 5] ^= 1;
  cluster.states[0].state->places[2][5 * kMiB + 2] ^= 1;
  cluster.states[0].state->places[3][0] ^= 1;
  cluster.states[0].Hash();
  cluster.Serve(1);
  cluster.Start();
  cluster.ExpectFetched();
  EXPECT_EQ(cluster.result().bytes, kMiB + 3 + 4);
  EXPECT_EQ(cluster.at(1).requests, 4) << "one for the digests";
}

TEST_P(ExchangeTest, NothingTravelsWhereNothingDiffers) {
  for (const Manifest& manifest :
       {OneTensor(2 * kMiB), Manifest{}, Manifest{{"nothing", 9, {0}, 0, false}}}) {
    Cluster cluster(GetParam().rings, GetParam().seed, 2, manifest);
    *cluster.states[0].bytes = *cluster.states[1].bytes;
    cluster.states[0].Hash();
    cluster.Serve(1);
    cluster.Start();
    cluster.ExpectFetched();
    EXPECT_EQ(cluster.result().bytes, 0u);
  }
}

TEST_P(ExchangeTest, ManySmallTensorsTravelInReasonableTime) {
  Manifest manifest;
  for (int i = 0; i < 3000; ++i) manifest.push_back({"t" + std::to_string(i), 9, {}, 8, false});
  Cluster cluster(GetParam().rings, GetParam().seed, 3, manifest);
  cluster.Serve(1);
  cluster.Serve(2);
  cluster.Start();
  cluster.ExpectFetched();
  EXPECT_EQ(cluster.result().bytes, 24000u);
}

TEST_P(ExchangeTest, LinksWithoutDataLanesGetSome) {
  Cluster cluster(GetParam().rings, GetParam().seed, 3, OneTensor(6 * kMiB), /*data=*/false);
  EXPECT_EQ(cluster.at(0).transport->GetStats().lanes_up, 2u);
  cluster.Serve(1);
  cluster.Serve(2);
  cluster.Start();
  cluster.ExpectFetched();
  EXPECT_EQ(cluster.at(0).transport->GetStats().links_lost, 0u);
}

// A tensor of 6 GiB. Only one page is not zero, and no other page is ever touched.
TEST(ExchangeLargeTest, ChunkBeyond4GiBIsFetchedIntoItsPlace) {
  constexpr uint64_t kBytes = 6144 * kMiB;
  constexpr uint64_t kChunk = 5000;
  const auto map = [] {
    void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(memory, MAP_FAILED);
    return std::shared_ptr<const void>(memory,
                                       [](const void* m) { munmap(const_cast<void*>(m), kBytes); });
  };
  Cluster cluster(Rings::kFake, 1, 2, OneTensor(0));
  const Hash128 zero = HashChunk(std::vector<uint8_t>(kMiB));
  for (State& state : cluster.states) {
    state.state->manifest = OneTensor(kBytes);
    state.state->memory = map();
    state.state->places = {
        const_cast<uint8_t*>(static_cast<const uint8_t*>(state.state->memory.get()))};
    state.state->digests = {std::vector<Hash128>(kBytes / kMiB, zero)};
    state.state->FetchInto(state.state->places);
  }
  MemoryState& held = *cluster.states[1].state;
  const uint64_t at = kChunk * kMiB + 4097;
  held.places[0][at] = 'x';
  held.digests[0][kChunk] = HashChunk({held.places[0] + kChunk * kMiB, kMiB});
  cluster.root = RootOf(held.manifest, held.digests);
  cluster.Serve(1);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_EQ(cluster.result().error, "");
  EXPECT_EQ(cluster.result().bytes, kMiB);
  EXPECT_EQ(cluster.states[0].state->places[0][at], 'x');
  EXPECT_EQ(cluster.states[0].state->digests, held.digests);
}

TEST_P(ExchangeTest, SourceOnTheSameHostIsReadFromMemoryAndNobodyElseIsAsked) {
  Cluster cluster(GetParam().rings, GetParam().seed, 2, OneTensor(5 * kMiB + 9));
  cluster.Serve(1);
  State own(OneTensor(5 * kMiB + 9));
  own.Fill(2);
  cluster.at(0).exchange->server()->Register(kGroup, MemberId(5), own.state);
  cluster.at(0).exchange->server()->Serve(kGroup, MemberId(5), cluster.root);
  auto sources = cluster.Sources();
  sources.push_back({MemberId(5), cluster.at(0).id});
  cluster.Start(sources);
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().sources, ElementsAre(MemberId(5)));
  EXPECT_EQ(cluster.at(1).requests, 0);
  EXPECT_EQ(cluster.result().bytes, cluster.total());
}

TEST_P(ExchangeTest, SourceOnTheSameHostThatEndsIsReplacedByOthers) {
  Cluster cluster(GetParam().rings, GetParam().seed, 2, OneTensor(20 * kMiB));
  cluster.Serve(1);
  State own(OneTensor(20 * kMiB));
  own.Fill(2);
  StateServer* const server = cluster.at(0).exchange->server();
  server->Register(kGroup, MemberId(5), own.state);
  server->Serve(kGroup, MemberId(5), cluster.root);
  auto sources = cluster.Sources();
  sources.push_back({MemberId(5), cluster.at(0).id});
  cluster.Start(sources);
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 3 * kMiB; }));
  server->Unregister(kGroup, MemberId(5));
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().sources, UnorderedElementsAre(MemberId(5), MemberOf(1)));
}

TEST_P(ExchangeTest, TensorsThatMayBeUnequalComeFromOneSourceAndOnlyWhereTheyAreWanted) {
  const Manifest manifest = {{"w", 9, {}, 3 * kMiB, false}, {"step", 9, {}, 2 * kMiB + 7, true}};
  for (const bool wanted : {false, true}) {
    Cluster cluster(GetParam().rings, GetParam().seed, 3, manifest);
    // Each peer has other bytes in the tensor that may be unequal.
    for (int i = 0; i < 3; ++i) {
      std::memset(cluster.states[i].state->places[1], 'a' + i, manifest[1].bytes);
      cluster.states[i].Hash();
    }
    for (int i = 1; i < 3; ++i) cluster.Serve(i);
    cluster.Start(wanted);
    ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
    ASSERT_EQ(cluster.result().error, "");
    EXPECT_EQ(cluster.states[0].root(), cluster.root);
    const uint8_t* const step = cluster.states[0].state->Chunk(1, 0);
    EXPECT_EQ(step[0] == 'a', !wanted);
    EXPECT_TRUE(std::all_of(step, step + manifest[1].bytes, [&](uint8_t byte) {
      return byte == step[0];
    })) << "not some of one and some of another";
    EXPECT_EQ(cluster.result().bytes, wanted ? 5 * kMiB + 7 : 3 * kMiB);
  }
}

// ------------------------------------------------------------------------------ sources go

TEST_P(ExchangeTest, SourceThatDiesHalfWayCostsLittle) {
  constexpr uint64_t kChunks = 48;
  Cluster cluster(GetParam().rings, GetParam().seed, 3, OneTensor(kChunks * kMiB));
  cluster.Serve(1);
  cluster.Serve(2);
  cluster.Start();
  ASSERT_TRUE(
      cluster.world.Until([&] { return cluster.progress().bytes_done >= kChunks / 2 * kMiB; }));
  cluster.at(1).transport->BreakLink({kRun, PeerId(1)}, "dies");
  cluster.ExpectFetched();
  EXPECT_EQ(cluster.result().bytes, cluster.total());
  EXPECT_EQ(cluster.at(0).ups[PeerId(2)], 1) << "it does not come back";
  // On the network in memory, time stands still while bytes move. So no source is slow, even on a
  // busy machine.
  if (GetParam().rings == Rings::kFake) {
    EXPECT_LE(cluster.result().bytes_repeated, cluster.total() / 20);
  }
}

// Holds for every seed, whichever bytes are on their way at the death and whichever source helps.
// The receiver counts every byte.
TEST_P(ExchangeSeeds, DeathOfASourceNeverCostsATwentiethAndAllThatCameIsCounted) {
  for (int round = 0; round < 2; ++round) {
    Prng random(GetParam() * 100 + round);
    SCOPED_TRACE("round " + std::to_string(round));
    constexpr uint64_t kChunks = 64;
    const int sources = 2 + static_cast<int>(random.Below(3));
    TransportOptions options;
    options.lanes = 1 + static_cast<uint32_t>(random.Below(3));
    Cluster cluster(Rings::kFake, random.Next(), 1 + sources, OneTensor(kChunks * kMiB), true,
                    options);
    for (int i = 1; i <= sources; ++i) cluster.Serve(i);
    cluster.Start();
    const uint64_t until = (10 + random.Below(45)) * kMiB;
    ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= until; }));
    const int dies = 1 + static_cast<int>(random.Below(sources));
    const bool noticed_here = random.Chance(0.5);
    cluster.at(noticed_here ? 0 : dies)
        .transport->BreakLink({kRun, noticed_here ? cluster.at(dies).id : PeerId(1)}, "dies");
    ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
    ASSERT_EQ(cluster.result().error, "");
    cluster.ExpectEqual();
    const TransferResult& result = cluster.result();
    EXPECT_EQ(result.bytes, cluster.total());
    EXPECT_LE(result.bytes_repeated, cluster.total() / 20);
    EXPECT_LE(result.bytes_repeated, (options.lanes + 1) * kMiB) << "whatever the window is";
    const TransportStats stats = cluster.at(0).transport->GetStats();
    EXPECT_LE(stats.bytes_received + stats.bytes_discarded,
              result.bytes + result.bytes_repeated + kChunks * kDigestBytes);
  }
}

TEST_P(ExchangeSeeds, SourceWhoseLinkComesBackGoesOn) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(24 * kMiB));
  cluster.Serve(1);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 6 * kMiB; }));
  cluster.at(1).transport->BreakLink({kRun, PeerId(1)}, "breaks");
  ASSERT_TRUE(cluster.world.Until([&] { return !cluster.at(0).downs.empty(); }));
  cluster.world.Open(0, 1, 2);
  cluster.ExpectFetched();
  EXPECT_EQ(cluster.at(0).ups[PeerId(2)], 2);
  EXPECT_EQ(cluster.result().bytes, cluster.total()) << "what was there is not fetched again";
}

TEST_P(ExchangeSeeds, SourceThatFallsSilentIsReplacedBeforeItsLinkIsGone) {
  Cluster cluster(Rings::kFake, GetParam(), 3, OneTensor(24 * kMiB));
  cluster.Serve(1);
  cluster.Serve(2);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 6 * kMiB; }));
  // The data lanes of the first link stall. Its control lane goes on.
  const Tick stalled = cluster.world.Now();
  for (int connection = 0; connection < cluster.world.fake->connections(); ++connection) {
    if (cluster.world.fake->BytesSent(connection, /*by_dialer=*/false) > kMiB) {
      cluster.world.fake->StallConnection(connection, true);
      break;
    }
  }
  cluster.ExpectFetched();
  EXPECT_LT(cluster.world.Now() - stalled, Seconds(4));
  EXPECT_LE(cluster.result().bytes_repeated, 8 * kMiB);
}

TEST_P(ExchangeSeeds, LastSourceThatGoesIsNamedInTheError) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(24 * kMiB));
  cluster.Serve(1);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 6 * kMiB; }));
  const Tick broken = cluster.world.Now();
  cluster.at(1).transport->BreakLink({kRun, PeerId(1)}, "dies");
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_THAT(cluster.result().error, HasSubstr("nothing came for 6"));
  EXPECT_THAT(cluster.result().error, HasSubstr("m101 has no link"));
  EXPECT_GE(cluster.result().bytes, 6 * kMiB);
  EXPECT_LT(cluster.world.Now() - broken, Seconds(7));
}

TEST_P(ExchangeSeeds, SourcesThatAreNotNamedAnyMoreAreNotAsked) {
  Cluster cluster(Rings::kFake, GetParam(), 3, OneTensor(24 * kMiB));
  cluster.Serve(1);
  cluster.Serve(2);
  cluster.Start({{MemberOf(1), cluster.at(1).id}});
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 6 * kMiB; }));
  cluster.at(0).exchange->ChangeSources(kLocal, {{MemberOf(2), cluster.at(2).id}},
                                        cluster.world.Now());
  for (int i = 0; i < 60; ++i) cluster.world.Step();
  const int asked = cluster.at(1).requests;
  cluster.ExpectFetched();
  EXPECT_EQ(cluster.at(1).requests, asked);
  EXPECT_GT(cluster.at(2).requests, 5);
}

TEST_P(ExchangeSeeds, NobodyLeftAndNobodyNewEndsItWithWhatEachSaid) {
  Cluster cluster(Rings::kFake, GetParam(), 3, OneTensor(4 * kMiB));
  cluster.Serve(1);
  cluster.Start();
  const Tick start = cluster.world.Now();
  cluster.at(0).exchange->ChangeSources(kLocal, {}, start);
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_EQ(
      cluster.result().error,
      "no source is left, the digests of the state are missing; m101 has left, m102 has left");
  EXPECT_GE(cluster.world.Now() - start, Seconds(6));
  EXPECT_LT(cluster.world.Now() - start, Seconds(7));
}

TEST_P(ExchangeSeeds, WhereTheLastSourceWentOthersThatAreNamedInTimeAreAsked) {
  Cluster cluster(Rings::kFake, GetParam(), 3, OneTensor(24 * kMiB));
  cluster.Serve(1);
  cluster.Serve(2);
  cluster.Start({{MemberOf(1), cluster.at(1).id}});
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 6 * kMiB; }));
  // The source's trainer is gone. The receiver may hear of that before another source is named.
  cluster.at(1).exchange->server()->Unregister(kGroup, MemberOf(1));
  cluster.Pass(Seconds(4));
  EXPECT_FALSE(cluster.Ended());
  cluster.at(0).exchange->ChangeSources(kLocal, {{MemberOf(2), cluster.at(2).id}},
                                        cluster.world.Now());
  cluster.ExpectFetched();
  EXPECT_EQ(cluster.result().bytes, cluster.total());
  EXPECT_THAT(cluster.result().sources, UnorderedElementsAre(MemberOf(1), MemberOf(2)));
}

TEST_P(ExchangeSeeds, SourceThatIsNamedAgainIsAskedAgain) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(24 * kMiB));
  cluster.Serve(1);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 6 * kMiB; }));
  cluster.at(0).exchange->ChangeSources(kLocal, {}, cluster.world.Now());
  cluster.Pass(Seconds(1));
  const int asked = cluster.at(1).requests;
  cluster.Pass(Seconds(1));
  EXPECT_EQ(cluster.at(1).requests, asked);
  cluster.at(0).exchange->ChangeSources(kLocal, cluster.Sources(), cluster.world.Now());
  cluster.ExpectFetched();
  EXPECT_EQ(cluster.result().bytes, cluster.total());
}

// The fetching peer and the holder cannot reach each other; a third peer reaches both.
TEST_P(ExchangeSeeds, HolderWithoutALinkIsWaitedForUntilAnotherOneHasIt) {
  Cluster cluster(Rings::kFake, GetParam(), 3, OneTensor(4 * kMiB));
  cluster.Serve(1);
  cluster.Cut(1);
  cluster.Start({{MemberOf(1), cluster.at(1).id}});
  cluster.Pass(Seconds(5));
  EXPECT_FALSE(cluster.Ended());
  // Another member's fetch is done, so the coordinator names it. That restarts the time limit.
  cluster.at(0).exchange->ChangeSources(kLocal, cluster.Sources(), cluster.world.Now());
  cluster.Pass(Millis(700));
  cluster.Serve(2);
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().sources, ElementsAre(MemberOf(2)));
}

TEST_P(ExchangeSeeds, HolderWhoseLinkComesBackInTimeIsAsked) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
  cluster.Serve(1);
  cluster.Cut(1);
  cluster.Start();
  cluster.Pass(Seconds(5));
  EXPECT_FALSE(cluster.Ended());
  cluster.world.Open(0, 1, 2);
  cluster.ExpectFetched();
}

TEST_P(ExchangeSeeds, HolderWhoseLinkDoesNotComeBackInTimeIsNamedInTheError) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
  cluster.Serve(1);
  cluster.Cut(1);
  cluster.Start();
  const Tick start = cluster.world.Now();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_EQ(cluster.result().error,
            "nothing came for 6000 ms, the digests of the state are missing; m101 has no link");
  EXPECT_LT(cluster.world.Now() - start, Seconds(7));
}

TEST_P(ExchangeSeeds, SourceThatIsToldLaterIsAskedAgain) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
  cluster.Start();
  const Tick later = cluster.world.Now() + Millis(400);
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.world.Now() >= later; }));
  EXPECT_FALSE(cluster.Ended());
  EXPECT_GT(cluster.at(1).requests, 2);
  cluster.Serve(1);
  cluster.ExpectFetched();
}

TEST_P(ExchangeSeeds, SourceThatNeverHasTheStateIsGivenUp) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
  cluster.at(1).exchange->server()->Register(kGroup, MemberOf(1), cluster.states[1].state);
  cluster.at(1).exchange->server()->Serve(kGroup, MemberOf(1), Hash128{1, 2});
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_EQ(cluster.result().error,
            "no source is left, the digests of the state are missing; m101 does not have the state "
            "any more");
}

TEST_P(ExchangeSeeds, OpenAsksAreRefusedWhenASourceEnds) {
  Cluster cluster(Rings::kFake, GetParam(), 3, OneTensor(24 * kMiB));
  cluster.Serve(1);
  cluster.Serve(2);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 6 * kMiB; }));
  StateServer* const server = cluster.at(1).exchange->server();
  server->EndServe(kGroup, MemberOf(1));
  // Once Reading() is false, the source's trainer may write.
  ASSERT_TRUE(cluster.world.Until([&] { return !server->Reading(cluster.states[1].state.get()); }));
  std::fill(cluster.states[1].bytes->begin(), cluster.states[1].bytes->end(), 0);
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().corrupt, IsEmpty());
}

// ------------------------------------------------------------------------------ wrong bits

TEST_P(ExchangeTest, FlippedBitAtAHolderDropsItAndTheResultIsRight) {
  Cluster cluster(GetParam().rings, GetParam().seed, 3, OneTensor(16 * kMiB));
  cluster.Serve(1);
  cluster.Serve(2);
  for (int c = 0; c < 16; ++c) cluster.states[1].state->places[0][c * kMiB + 1234] ^= 4;
  cluster.Start();
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().corrupt, ElementsAre(MemberOf(1)));
  EXPECT_THAT(cluster.result().sources, ElementsAre(MemberOf(2)));
  EXPECT_EQ(cluster.result().bytes, cluster.total());
}

TEST_P(ExchangeSeeds, FlippedBitOnTheWireDropsTheSourceAndTheResultIsRight) {
  Cluster cluster(Rings::kFake, GetParam(), 3, OneTensor(24 * kMiB));
  FakeRing* const network = cluster.world.fake;
  cluster.Serve(1);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done > 0; }));
  int flipped = 0;
  for (int connection = 0; connection < network->connections() && flipped == 0; ++connection) {
    const uint64_t sent = network->BytesSent(connection, /*by_dialer=*/false);
    if (sent < (100 << 10)) continue;
    network->FlipBit(connection, false, sent + 600000);
    ++flipped;
  }
  ASSERT_EQ(flipped, 1);
  // Time passes only when the first source has nothing left to send.
  const Tick later = cluster.world.Now() + Millis(50);
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.world.Now() >= later; }));
  EXPECT_FALSE(cluster.Ended());
  cluster.Serve(2);
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().corrupt, ElementsAre(MemberOf(1)));
  EXPECT_EQ(cluster.result().bytes, cluster.total());
}

TEST_P(ExchangeTest, DigestsThatDoNotAddUpDropTheirSource) {
  Cluster cluster(GetParam().rings, GetParam().seed, 3, OneTensor(6 * kMiB));
  cluster.Serve(1);
  cluster.Serve(2);
  cluster.states[1].state->digests[0][3].low ^= 1;
  cluster.Start();
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().corrupt, ElementsAre(MemberOf(1)));
  EXPECT_THAT(cluster.result().sources, ElementsAre(MemberOf(2)));
}

TEST_P(ExchangeTest, HolderWhoseBitsChangeSaysSoAndIsNotCorrupt) {
  Cluster cluster(GetParam().rings, GetParam().seed, 3, OneTensor(16 * kMiB));
  cluster.Serve(1, /*may_change=*/true);
  cluster.Serve(2);
  for (int c = 0; c < 16; ++c) cluster.states[1].state->places[0][c * kMiB + 99] ^= 4;
  cluster.Start();
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().corrupt, IsEmpty());
  EXPECT_THAT(cluster.result().sources, ElementsAre(MemberOf(2)));
  EXPECT_EQ(cluster.result().bytes_repeated, 0u) << "nothing wrong travels";
}

TEST_P(ExchangeSeeds, OnlyHolderWhoseBitsChangeEndsTheTransfer) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(16 * kMiB));
  cluster.Serve(1, /*may_change=*/true);
  cluster.states[1].state->places[0][15 * kMiB] ^= 4;
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_THAT(cluster.result().error, HasSubstr("no source is left"));
  EXPECT_THAT(cluster.result().error, HasSubstr("m101 has a state that has changed"));
  EXPECT_THAT(cluster.result().corrupt, IsEmpty());
}

TEST_P(ExchangeSeeds, UnchangedHolderThatMightChangeServesAll) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(6 * kMiB + 1));
  cluster.Serve(1, /*may_change=*/true);
  cluster.Start();
  cluster.ExpectFetched();
}

// The trainers of the sources are at their next boundary, where all wait for the fetching member.
TEST_P(ExchangeSeeds, InTheBackgroundATransferEndsAtOnceWhenItsStateIsOverAtAllSources) {
  Cluster cluster(Rings::kFake, GetParam(), 3, OneTensor(24 * kMiB));
  cluster.Serve(1, /*may_change=*/true);
  cluster.Serve(2, /*may_change=*/true);
  cluster.StartInBackground(cluster.Sources());
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 6 * kMiB; }));
  const Tick over = cluster.world.Now();
  for (const int i : {1, 2}) {
    cluster.at(i).exchange->server()->EndServe(kGroup, MemberOf(i));
    // The next state is offered already.
    cluster.at(i).exchange->server()->Serve(kGroup, MemberOf(i), Hash128{1, 2});
  }
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_LT(cluster.world.Now() - over, Millis(500));
  EXPECT_THAT(cluster.result().error, HasSubstr("no source is left"));
  EXPECT_THAT(cluster.result().error, HasSubstr("m102 does not have the state any more"));
  EXPECT_GE(cluster.result().bytes, 6 * kMiB);
}

TEST_P(ExchangeSeeds, InTheBackgroundATransferOfAStateThatIsOverEndsAtOnce) {
  Cluster cluster(Rings::kFake, GetParam(), 3, OneTensor(4 * kMiB));
  for (const int i : {1, 2}) {
    cluster.Serve(i, /*may_change=*/true);
    cluster.at(i).exchange->server()->EndServe(kGroup, MemberOf(i));
  }
  const Tick start = cluster.world.Now();
  cluster.StartInBackground(cluster.Sources());
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_LT(cluster.world.Now() - start, Millis(500));
  EXPECT_EQ(cluster.result().error,
            "no source is left, the digests of the state are missing; m101 does not have the state "
            "any more, m102 does not have the state any more");
}

TEST_P(ExchangeSeeds, InTheBackgroundASourceOnTheSameHostThatIsOverEndsTheTransferAtOnce) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(24 * kMiB));
  State here(OneTensor(24 * kMiB));
  here.Fill(2);
  StateServer* const server = cluster.at(0).exchange->server();
  server->Register(kGroup, MemberId(5), here.state);
  server->Serve(kGroup, MemberId(5), cluster.root, /*may_change=*/true);
  cluster.StartInBackground({{MemberId(5), cluster.at(0).id}});
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 4 * kMiB; }));
  const Tick over = cluster.world.Now();
  server->EndServe(kGroup, MemberId(5));
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_LT(cluster.world.Now() - over, Millis(500));
  EXPECT_THAT(cluster.result().error, HasSubstr("m5 does not have the state any more"));
}

TEST_P(ExchangeSeeds, InTheBackgroundASourceThatIsToldLaterOrServesAgainIsAsked) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
  cluster.Serve(1, /*may_change=*/true);
  cluster.at(1).exchange->server()->EndServe(kGroup, MemberOf(1));
  cluster.at(1).exchange->server()->Serve(kGroup, MemberOf(1), cluster.root);
  cluster.at(1).exchange->server()->EndServe(kGroup, MemberOf(1));
  cluster.StartInBackground(cluster.Sources());
  cluster.Pass(Millis(400));
  EXPECT_FALSE(cluster.Ended());
  cluster.Serve(1, /*may_change=*/true);
  cluster.ExpectFetched();
}

TEST_P(ExchangeTest, KeptBitsAreServedWhileTheirTrainerWritesToItsOwn) {
  Cluster cluster(GetParam().rings, GetParam().seed, 2, OneTensor(6 * kMiB + 1));
  State kept(OneTensor(6 * kMiB + 1));
  *kept.bytes = *cluster.states[1].bytes;
  kept.Hash();
  StateServer* const server = cluster.at(1).exchange->server();
  server->Register(kGroup, MemberOf(1), cluster.states[1].state);
  server->Serve(kGroup, MemberOf(1), Hash128{1, 2});
  server->ServeKept(kGroup, MemberOf(1), kept.state, cluster.root);
  std::fill(cluster.states[1].bytes->begin(), cluster.states[1].bytes->end(), 9);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_EQ(cluster.result().error, "");
  EXPECT_THAT(cluster.result().corrupt, IsEmpty());
  EXPECT_TRUE(cluster.states[0].Seen() == kept.Seen());
}

TEST_P(ExchangeSeeds, KeptBitsAreNotReadOnceTheyEnd) {
  Cluster cluster(Rings::kFake, GetParam(), 3, OneTensor(24 * kMiB));
  State kept(OneTensor(24 * kMiB));
  *kept.bytes = *cluster.states[1].bytes;
  kept.Hash();
  StateServer* const server = cluster.at(1).exchange->server();
  server->Register(kGroup, MemberOf(1), cluster.states[1].state);
  server->ServeKept(kGroup, MemberOf(1), kept.state, cluster.root);
  cluster.Serve(2);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 6 * kMiB; }));
  server->EndServeKept(kGroup, MemberOf(1));
  std::fill(kept.bytes->begin(), kept.bytes->end(), 0);
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().corrupt, IsEmpty());
}

TEST_P(ExchangeTest, KeptBitsOnTheSameHostAreReadFromMemory) {
  Cluster cluster(GetParam().rings, GetParam().seed, 2, OneTensor(5 * kMiB + 9));
  State own(OneTensor(5 * kMiB + 9));
  State kept(OneTensor(5 * kMiB + 9));
  *kept.bytes = *cluster.states[1].bytes;
  kept.Hash();
  StateServer* const server = cluster.at(0).exchange->server();
  server->Register(kGroup, MemberId(5), own.state);
  server->ServeKept(kGroup, MemberId(5), kept.state, cluster.root);
  cluster.Start({{MemberId(5), cluster.at(0).id}});
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().sources, ElementsAre(MemberId(5)));
  server->Unregister(kGroup, MemberId(5));
  EXPECT_EQ(server->Find(kGroup, MemberId(5), cluster.root), nullptr);
}

// ------------------------------------------------------------------------------ ends

TEST_P(ExchangeTest, ReceiverThatGivesUpWritesNothingMoreAndIsForgotten) {
  Cluster cluster(GetParam().rings, GetParam().seed, 3, OneTensor(32 * kMiB));
  cluster.Serve(1);
  cluster.Serve(2);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 4 * kMiB; }));
  cluster.at(0).exchange->StopTransfer(kLocal);
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_EQ(cluster.result().error, "was stopped");
  const std::vector<uint8_t> frozen = *cluster.states[0].bytes;
  const std::vector<uint8_t> inbox = cluster.states[0].inbox;
  ASSERT_TRUE(cluster.world.Until([&] {
    return cluster.at(1).exchange->server()->transfers() == 0 &&
           cluster.at(2).exchange->server()->transfers() == 0 &&
           !cluster.at(1).exchange->server()->Reading(cluster.states[1].state.get()) &&
           !cluster.at(2).exchange->server()->Reading(cluster.states[2].state.get());
  }));
  for (int i = 0; i < 50; ++i) cluster.world.Step();
  EXPECT_EQ(*cluster.states[0].bytes, frozen);
  EXPECT_EQ(cluster.states[0].inbox, inbox);
  // The next transfer fetches only the chunks that are missing.
  const uint64_t there = cluster.result().bytes;
  cluster.at(0).results.clear();
  cluster.Start();
  cluster.ExpectFetched();
  EXPECT_LE(cluster.result().bytes, cluster.total() - there);
}

TEST_P(ExchangeSeeds, SourceForgetsAReceiverThatAsksNoMore) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
  cluster.Serve(1);
  const FrameHeader header = ChunkFrame(FrameType::kChunkRequest, kGroup.group, 9, 1);
  const auto body = Encode(ChunkRequestBody{MemberOf(1), cluster.root, ChunkKind::kChunk, 0, 2});
  cluster.at(0).transport->SendControl({kRun, PeerId(2)}, header, body);
  StateServer* const server = cluster.at(1).exchange->server();
  ASSERT_TRUE(cluster.world.Until([&] { return server->transfers() == 1; }));
  const Tick asked = cluster.world.Now();
  ASSERT_TRUE(cluster.world.Until([&] { return server->transfers() == 0; }));
  EXPECT_GE(cluster.world.Now() - asked, Seconds(6));
  EXPECT_LT(cluster.world.Now() - asked, Seconds(7));
}

TEST_P(ExchangeSeeds, WhoAsksForMoreThanAReceiverNeedsIsRefused) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
  cluster.Serve(1);
  const StateServer* const server = cluster.at(1).exchange->server();
  for (const ChunkKind kind : {ChunkKind::kManifest, ChunkKind::kDigests}) {
    const uint64_t before = server->stats().asks_refused;
    for (uint64_t ask = 1; ask <= 9; ++ask) {
      const FrameHeader header =
          ChunkFrame(FrameType::kChunkRequest, kGroup.group, static_cast<uint64_t>(kind), ask);
      const auto body = Encode(ChunkRequestBody{MemberOf(1), cluster.root, kind, 0, 0});
      cluster.at(0).transport->SendControl({kRun, PeerId(2)}, header, body);
    }
    ASSERT_TRUE(
        cluster.world.Until([&] { return server->stats().asks_refused == before + 5; }, 1000));
  }
  EXPECT_EQ(cluster.at(1).transport->GetStats().frames_refused, 0u);
}

TEST_P(ExchangeSeeds, SixTransfersOfAPeerAreServedAtATimeAndAllEnd) {
  constexpr uint64_t kTransfers = 11;
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(2 * kMiB));
  // The last transfers wait for longer than a transfer waits for a silent source.
  cluster.at(1).exchange->server()->SetRate(1500 << 10);
  cluster.Serve(1);
  std::deque<State> states;
  for (uint64_t i = 0; i < kTransfers; ++i) {
    states.emplace_back(OneTensor(2 * kMiB));
    cluster.at(0).exchange->StartTransfer({.local = i + 1,
                                           .group = kGroup,
                                           .root = cluster.root,
                                           .state = states.back().state,
                                           .sources = cluster.Sources()},
                                          cluster.world.Now());
  }
  size_t most = 0;
  ASSERT_TRUE(cluster.world.Until([&] {
    most = std::max(most, cluster.at(1).exchange->server()->transfers());
    return cluster.at(0).results.size() == kTransfers;
  }));
  EXPECT_EQ(most, 6u);
  EXPECT_GT(cluster.at(1).exchange->server()->stats().asks_refused, 0u);
  for (const auto& [local, result] : cluster.at(0).results) EXPECT_EQ(result.error, "");
  for (const State& state : states) EXPECT_EQ(*state.bytes, *cluster.states[1].bytes);
}

TEST_P(ExchangeSeeds, WhatIsNotHereTakesNoPlace) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
  cluster.Serve(1);
  const StateServer* const server = cluster.at(1).exchange->server();
  for (uint64_t transfer = 1000; transfer < 1020; ++transfer) {
    const FrameHeader header = ChunkFrame(FrameType::kChunkRequest, 77, transfer, 1);
    const auto body =
        Encode(ChunkRequestBody{MemberOf(1), cluster.root, ChunkKind::kDigests, 0, 0});
    cluster.at(0).transport->SendControl({kRun, PeerId(2)}, header, body);
  }
  ASSERT_TRUE(cluster.world.Until([&] { return server->stats().asks_refused == 20; }, 1000));
  EXPECT_EQ(server->transfers(), 0u);
}

TEST_P(ExchangeSeeds, APeerOfAnotherGroupGetsNothing) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
  cluster.Serve(1);
  cluster.at(1).in_group = false;
  const StateServer* const server = cluster.at(1).exchange->server();
  uint64_t transfer = 1000;
  for (const ChunkKind kind : {ChunkKind::kManifest, ChunkKind::kDigests, ChunkKind::kChunk}) {
    for (const Hash128& root : {cluster.root, Hash128{}}) {
      const FrameHeader header = ChunkFrame(FrameType::kChunkRequest, 77, ++transfer, 1);
      const auto body = Encode(ChunkRequestBody{MemberOf(1), root, kind, 0, 0});
      cluster.at(0).transport->SendControl({kRun, PeerId(2)}, header, body);
    }
  }
  ASSERT_TRUE(cluster.world.Until([&] { return server->stats().asks_refused == 6; }, 1000));
  EXPECT_EQ(server->transfers(), 0u);
}

// ------------------------------------------------------------------------------ manifests

// Only receives of the ask are detached from the buffer, so a piece of another ask must not use it.
TEST_P(ExchangeSeeds, AManifestUnderAnotherNameIsNotTaken) {
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(100));
  cluster.at(0).exchange->CompareManifest(1, kGroup,
                                          std::make_shared<const Manifest>(OneTensor(101)),
                                          {MemberOf(1), PeerId(2)}, cluster.world.Now());
  FrameHeader header = ChunkFrame(FrameType::kChunkData, kGroup.group, /*transfer=*/1, /*ask=*/2);
  header.payload_bytes = 1000;
  header.stamp = 2000;
  StatePeer& liar = cluster.at(1);
  liar.memory.resize(1000);
  ++liar.started[kCookieOfTest];
  liar.transport->SendSegment({kRun, PeerId(1)}, header, liar.memory.data(), kCookieOfTest, 1);
  ASSERT_TRUE(cluster.world.Until([&] { return !cluster.at(0).up.count(PeerId(2)); }));
  EXPECT_THAT(cluster.at(0).downs[PeerId(2)].at(0), HasSubstr("that was not asked for"));
}

TEST_P(ExchangeTest, ManifestsAreComparedWithoutServing) {
  Cluster cluster(GetParam().rings, GetParam().seed, 2, OneTensor(100));
  cluster.at(1).exchange->server()->Register(kGroup, MemberOf(1), cluster.states[1].state);
  const auto compare = [&](uint64_t local, Manifest ours, const StateSource& other) {
    cluster.at(0).exchange->CompareManifest(local, kGroup,
                                            std::make_shared<const Manifest>(std::move(ours)),
                                            other, cluster.world.Now());
  };
  compare(1, OneTensor(100), {MemberOf(1), PeerId(2)});
  compare(2, OneTensor(101), {MemberOf(1), PeerId(2)});
  compare(3, OneTensor(101), {MemberId(9), PeerId(2)});
  compare(4, OneTensor(101), {MemberId(9), PeerId(55)});
  cluster.at(0).exchange->server()->Register(kGroup, MemberId(8), cluster.states[0].state);
  compare(5, OneTensor(101), {MemberId(8), PeerId(1)});
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.at(0).differences.size() == 5; }));
  EXPECT_EQ(cluster.at(0).differences[1], "");
  EXPECT_EQ(cluster.at(0).differences[2], FirstDifference(OneTensor(101), OneTensor(100)));
  EXPECT_EQ(cluster.at(0).differences[3], "") << "nobody of that name";
  EXPECT_EQ(cluster.at(0).differences[4], "") << "no such peer: in time all the same";
  EXPECT_EQ(cluster.at(0).differences[5], FirstDifference(OneTensor(101), OneTensor(100)));
  EXPECT_TRUE(
      cluster.world.Until([&] { return cluster.at(1).exchange->server()->transfers() == 0; }));
}

// A member that is refused for its manifest asks for the elected manifest. At that moment the sync
// of the source may end.
TEST_P(ExchangeTest, AManifestThatWasAskedForIsSentThoughItsSyncEnds) {
  Cluster cluster(GetParam().rings, GetParam().seed, 2, OneTensor(100));
  cluster.Serve(1);
  StateServer* const server = cluster.at(1).exchange->server();
  cluster.at(0).exchange->CompareManifest(1, kGroup,
                                          std::make_shared<const Manifest>(OneTensor(101)),
                                          {MemberOf(1), PeerId(2)}, cluster.world.Now());
  ASSERT_TRUE(cluster.world.Until([&] { return server->transfers() == 1; }));
  server->EndServe(kGroup, MemberOf(1));
  server->Register(kGroup, MemberOf(1), State(OneTensor(100)).state);
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.at(0).differences.size() == 1; }));
  EXPECT_EQ(cluster.at(0).differences[1], FirstDifference(OneTensor(101), OneTensor(100)));
}

// ------------------------------------------------------------------------------ with ops

TEST_P(ExchangeTest, OpsAndATransferShareALinkAndBothProgress) {
  for (const uint32_t lanes : {1u, 4u}) {
    SCOPED_TRACE(lanes);
    TransportOptions options;
    options.lanes = lanes;
    Cluster cluster(GetParam().rings, GetParam().seed, 2, OneTensor(48 * kMiB), true, options);
    cluster.Serve(1);
    StatePeer& from = cluster.at(1);
    StatePeer& to = cluster.at(0);
    from.memory.resize(1 << 20, 'x');
    to.memory = from.memory;
    to.scatter = true;
    cluster.Start();
    ASSERT_TRUE(cluster.world.Until([&] { return cluster.progress().bytes_done >= 2 * kMiB; }));
    // As with a collective, more segments are always queued than are on the lanes.
    uint64_t next = 1;
    const auto send = [&] {
      while (next - from.sent.size() <= 8 + lanes) from.Send(PeerId(1), 0, 512 << 10, next++);
    };
    ASSERT_TRUE(cluster.world.Until([&] {
      send();
      return to.received >= lanes * kMiB / 2;
    }));
    // Now the segments that were on the lanes at first have arrived.
    const uint64_t state_before = to.state_bytes;
    const uint64_t ops_before = to.received;
    const uint64_t wire_before = cluster.BytesToReceiver();
    ASSERT_TRUE(cluster.world.Until([&] {
      send();
      return to.received >= 12 * kMiB || cluster.Ended();
    }));
    ASSERT_FALSE(cluster.Ended()) << "the transfer took more than its share";
    const uint64_t state_bytes = to.state_bytes - state_before;
    const uint64_t ops_bytes = to.received - ops_before;
    // Bytes that may be on the lanes when the measurement begins and ends.
    const uint64_t slack = lanes * kMiB;
    EXPECT_GE(ops_bytes + slack, state_bytes);
    EXPECT_GE(state_bytes + slack, ops_bytes / 2) << "and not nothing";
    if (GetParam().rings == Rings::kFake) {
      EXPECT_LE(cluster.BytesToReceiver() - wire_before, 2 * (ops_bytes + slack));
    }
    cluster.ExpectFetched();
    ASSERT_TRUE(cluster.world.Until([&] { return from.sent == from.started; }));
  }
}

TEST_P(ExchangeSeeds, RateBoundsWhatAPeerSendsToAllTogether) {
  // Two members of peer 0 fetch from one holder.
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(6 * kMiB));
  StateServer* const server = cluster.at(1).exchange->server();
  server->SetRate(4 * kMiB);
  cluster.Serve(1);
  State second(OneTensor(6 * kMiB));
  const Tick start = cluster.world.Now();
  cluster.Start();
  cluster.at(0).exchange->StartTransfer({.local = kLocal + 1,
                                         .group = kGroup,
                                         .root = cluster.root,
                                         .state = second.state,
                                         .sources = cluster.Sources()},
                                        start);
  uint64_t first_done = 0;
  ASSERT_TRUE(cluster.world.Until([&] {
    const int64_t us = cluster.world.Now() - start + TokenBucket::kBurstUs;
    EXPECT_LE(server->stats().bytes_sent, 4 * kMiB * us / Seconds(1) + kPieceBytes + kMiB / 100);
    if (cluster.world.Now() - start < Seconds(1)) first_done = cluster.progress().bytes_done;
    return cluster.at(0).results.size() == 2;
  }));
  EXPECT_GE(cluster.world.Now() - start, Millis(2900));
  EXPECT_LT(cluster.world.Now() - start, Millis(3500)) << "and it is used";
  EXPECT_LE(first_done, 3 * kMiB) << "they take turns";
  for (const auto& [local, result] : cluster.at(0).results) {
    EXPECT_EQ(result.error, "");
    EXPECT_EQ(result.bytes_repeated, 0u) << "slow is not late";
  }
  EXPECT_EQ(*second.bytes, *cluster.states[1].bytes);
}

TEST_P(ExchangeSeeds, SlowSourceThatGoesOnIsNotGivenUp) {
  // A chunk takes longer than a transfer waits for a silent source.
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(2 * kMiB));
  cluster.at(1).exchange->server()->SetRate(100 << 10);
  cluster.Serve(1);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }, /*ms=*/60000));
  EXPECT_EQ(cluster.result().error, "");
  EXPECT_EQ(cluster.result().bytes_repeated, 0u);
}

// Pieces arrive side by side. The first piece is complete only after the time for which a transfer
// waits for a silent source.
TEST_P(ExchangeSeeds, SlowLinkOfManyLanesIsNotGivenUp) {
  TransportOptions options;
  options.lanes = 8;
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(2 * kMiB), true, options,
                  {.stream_bytes_max = 2000, .partial = false});
  cluster.Serve(1);
  cluster.Start();
  const Tick begin = cluster.world.Now();
  bool stalled = false;
  for (int turn = 0; !cluster.Ended() && cluster.world.Now() < begin + Seconds(60); ++turn) {
    if (stalled != (turn % 50 != 0)) {
      stalled = !stalled;
      for (int i = 1; i <= 8; ++i) cluster.world.fake->StallConnection(i, stalled);
    }
    cluster.world.Step();
  }
  ASSERT_TRUE(cluster.Ended());
  EXPECT_EQ(cluster.result().error, "");
  EXPECT_GE(cluster.world.Now() - begin, Seconds(6));
}

// ------------------------------------------------------------------------------ fresh memory

TEST(ExchangeFreshTest, NothingIsAskedForOrTakenBeforeTheMemoryIsTouched) {
  Cluster cluster(Rings::kFake, 1, 2, OneTensor(3 * kMiB));
  cluster.Serve(1);
  cluster.at(0).hasher->holds = true;
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.at(0).hasher->waiting() > 0; }));
  cluster.Pass(Millis(200));
  EXPECT_EQ(cluster.at(1).requests, 1) << "for digests";
  // A source sends the chunk although its memory is still being touched.
  FrameHeader header = ChunkFrame(FrameType::kChunkData, kGroup.group, 1, 2);
  header.payload_bytes = header.stamp = kMiB;
  const auto place = cluster.at(0).exchange->OnDataHeader({kRun, PeerId(2)}, header);
  ASSERT_TRUE(place.ok()) << place.status();
  EXPECT_EQ(*place, nullptr);
  cluster.at(0).hasher->holds = false;
  cluster.ExpectFetched();
}

TEST_P(ExchangeSeeds, ATransferThatIsStoppedWaitsForTheMemoryThatIsTouched) {
  Cluster cluster(Rings::kFake, 1 + 2 * GetParam(), 2, OneTensor(3 * kMiB));
  cluster.Serve(1);
  cluster.at(0).hasher->holds = true;
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.at(0).hasher->waiting() > 0; }));
  cluster.at(0).exchange->StopTransfer(kLocal);
  cluster.Pass(Millis(200));
  EXPECT_FALSE(cluster.Ended());
  cluster.at(0).hasher->holds = false;
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.Ended(); }));
  EXPECT_EQ(cluster.result().error, "was stopped");
  EXPECT_EQ(cluster.at(1).requests, 1) << "for digests";
}

TEST_P(ExchangeSeeds, AskThatIsDroppedWhileItsMemoryIsTouchedGoesToAnotherSource) {
  Cluster cluster(Rings::kFake, 1 + 2 * GetParam(), 3, OneTensor(3 * kMiB));
  cluster.Serve(1);
  cluster.Serve(2);
  cluster.at(0).hasher->holds = true;
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.at(0).hasher->waiting() >= 3; }));
  cluster.Cut(1);
  cluster.at(0).hasher->holds = false;
  cluster.ExpectFetched();
  EXPECT_THAT(cluster.result().sources, ElementsAre(MemberOf(2)));
}

// ------------------------------------------------------------------------------ any faults

TEST_P(ExchangeSeeds, WhateverIsCutTheResultIsRight) {
  for (int round = 0; round < 6; ++round) {
    Prng random(GetParam() * 100 + round);
    Cluster cluster(Rings::kFake, random.Next(), 4, OneTensor(10 * kMiB + 77));
    for (int i = 1; i < 4; ++i) cluster.Serve(i);
    for (int cuts = 0; cuts < 12; ++cuts) {
      cluster.world.fake->CutConnection(random.Below(cluster.world.fake->connections() + 6),
                                        random.Chance(0.5), 200 + random.Below(2 * kMiB));
    }
    cluster.Start();
    uint64_t epoch = 2;
    ASSERT_TRUE(cluster.world.Until([&] {
      for (int i = 1; i < 4; ++i) {
        // Ask for lost links anew, as an epoch after a fault does.
        if (cluster.at(0).downs[PeerId(i + 1)].empty() && cluster.at(i).downs[PeerId(1)].empty()) {
          continue;
        }
        cluster.at(0).downs[PeerId(i + 1)].clear();
        cluster.at(i).downs[PeerId(1)].clear();
        cluster.world.Open(0, i, epoch++);
      }
      return cluster.Ended();
    })) << "round "
        << round;
    ASSERT_EQ(cluster.result().error, "") << "round " << round;
    cluster.ExpectEqual();
    EXPECT_THAT(cluster.result().corrupt, IsEmpty());
  }
}

TEST_P(ExchangeSeeds, FramesAgainstTheProtocolCloseTheLink) {
  struct Bad {
    const char* what;
    std::function<void(Cluster*)> send;
  };
  const auto request = [](uint64_t ask, uint64_t over, uint32_t tensor, uint64_t chunk) {
    return [=](Cluster* cluster) {
      FrameHeader header = ChunkFrame(FrameType::kChunkRequest, kGroup.group, 1, ask);
      header.stamp = over;
      const auto body =
          Encode(ChunkRequestBody{MemberOf(1), cluster->root, ChunkKind::kChunk, tensor, chunk});
      cluster->at(0).transport->SendControl({kRun, PeerId(2)}, header, body);
    };
  };
  const auto twice = [](auto f) {
    return [=](Cluster* cluster) {
      f(cluster);
      f(cluster);
    };
  };
  for (const Bad& bad : {Bad{"the same ask twice", twice(request(1, 1, 0, 0))},
                         Bad{"a tensor that is not there", request(1, 1, 1, 0)},
                         Bad{"a chunk that is not there", request(1, 1, 0, 4)},
                         Bad{"an ask that is over", request(1, 2, 0, 0)}}) {
    Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
    cluster.Serve(1);
    bad.send(&cluster);
    ASSERT_TRUE(cluster.world.Until([&] {
      return cluster.at(1).transport->GetStats().frames_refused == 1;
    })) << bad.what;
  }
  // Peer 1 sends an answer of the wrong length.
  Cluster cluster(Rings::kFake, GetParam(), 2, OneTensor(4 * kMiB));
  cluster.at(1).mute = true;
  cluster.at(1).memory.resize(1000);
  cluster.Start();
  ASSERT_TRUE(cluster.world.Until([&] { return cluster.at(1).requests > 0; }));
  FrameHeader header = ChunkFrame(FrameType::kChunkData, kGroup.group, 1, 1);
  header.payload_bytes = 65;
  header.stamp = 65;
  ++cluster.at(1).started[kCookieOfTest];
  cluster.at(1).transport->SendSegment({kRun, PeerId(1)}, header, cluster.at(1).memory.data(),
                                       kCookieOfTest, 1);
  EXPECT_TRUE(
      cluster.world.Until([&] { return cluster.at(0).transport->GetStats().frames_refused == 1; }));
}

}  // namespace
}  // namespace longhaul::peerd
