#include "proto/control/convert.h"

#include <functional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/fields.h"
#include "base/prng.h"
#include "gtest/gtest.h"
#include "proto/longhaul/v1/coordinator.pb.h"
#include "proto/wire/limits.h"

namespace longhaul::control {
namespace {

// Makes random valid messages.
class Generator {
 public:
  explicit Generator(uint64_t seed) : prng_(seed) {}

  Hello MakeHello() {
    Hello m{
        .peer = Make<PeerId>(), .endpoints = Endpoints(), .protocol = Small(), .lanes = Lanes()};
    m.version = Words();
    m.host = Words();
    m.key = Bytes(LH_PUBLIC_KEY_BYTES);
    m.signature = Bytes(LH_SIGNATURE_BYTES);
    for (uint32_t i = Count(3); i > 0; --i) {
      GroupState state{.group = {Label(), i}, .committed = Epoch(prng_.Below(5))};
      for (uint32_t j = Count(4); j > 0; --j) state.members.push_back(MemberId(100 * i + j));
      if (prng_.Chance(0.5)) {
        state.prepared = Make<Epoch>();
        state.preparation = Any();
        state.frozen = prng_.Chance(0.5);
      }
      m.groups.push_back(state);
    }
    m.store = Any();
    m.term = Any();
    m.coordinator = Words();
    return m;
  }
  Join MakeJoin() {
    Join m{.request = Any(), .group = Group(), .name = Label()};
    if (prng_.Chance(0.5)) {
      m.wish.cohort = Label();
      m.wish.cohort_size = 1 + Count(LH_LOCAL_MEMBERS_MAX - 1);
    }
    m.wish.step_deadline_ms = Count(LH_STEP_DEADLINE_MS_MAX);
    m.wish.background = prng_.Chance(0.5);
    m.wish.members = Count(LH_MEMBERS_MAX);
    m.wish.named = prng_.Chance(0.5);
    return m;
  }
  Leave MakeLeave() { return {Group(), Make<MemberId>(), prng_.Chance(0.5), Words()}; }
  Vote MakeVote() {
    Vote m{Group(), Make<MemberId>(), Any()};
    if (prng_.Chance(0.5)) m.sync = MakeSyncOffer();
    m.ready = prng_.Chance(0.5);
    return m;
  }
  Hash128 Hash() { return {prng_.Next(), prng_.Next()}; }
  SyncOffer MakeSyncOffer() {
    SyncOffer offer{Any(), static_cast<SyncStrategy>(1 + prng_.Below(3)), prng_.Below(100), Hash(),
                    Hash()};
    offer.complete = offer.strategy == SyncStrategy::kSend || prng_.Chance(0.5);
    offer.kept = prng_.Chance(0.5);
    return offer;
  }
  SyncVote MakeSyncVote() { return {Group(), Make<MemberId>(), MakeSyncOffer()}; }
  FetchDone MakeFetchDone() {
    FetchDone m{Group(), Make<MemberId>(), Any(), {static_cast<Code>(prng_.Below(10)), Words()},
                Hash(),  prng_.Next()};
    for (uint32_t i = Count(3); i > 0; --i) m.sources.push_back(MemberId(i));
    for (uint32_t i = Count(2); i > 0; --i) m.corrupt.push_back(MemberId(i));
    return m;
  }
  LinkReport MakeLinkReport() {
    LinkReport m;
    for (uint32_t i = Count(4); i > 0; --i) {
      m.links.push_back({PeerId(i), PeerId(i + 1), Any(), static_cast<uint32_t>(Any()),
                         static_cast<uint32_t>(Any())});
      m.links.back().held = prng_.Chance(0.5);
    }
    if (prng_.Chance(0.5)) m.up_bytes_per_second = Any();
    if (prng_.Chance(0.5)) m.down_bytes_per_second = Any();
    return m;
  }
  EpochReady MakeEpochReady() {
    EpochReady m{.group = Group(), .epoch = Make<Epoch>(), .preparation = Any()};
    for (uint32_t i = Count(4); i > 0; --i) {
      OpReport op{OpOrdinal(i),      Make<Epoch>(),     prng_.Next(),     prng_.Next(),
                  prng_.Chance(0.5), prng_.Chance(0.5), prng_.Chance(0.5)};
      for (uint32_t j = Count(3); j > 0; --j) op.matches.push_back({PeerId(j), Make<OpOrdinal>()});
      m.ops.push_back(op);
    }
    return m;
  }
  EpochFailed MakeEpochFailed() {
    EpochFailed m{.group = Group(), .epoch = Make<Epoch>(), .preparation = Any()};
    for (uint32_t i = 1 + Count(3); i > 0; --i) m.unreachable.push_back({PeerId(i), Words()});
    return m;
  }
  LinkLost MakeLinkLost() {
    return {Group(), Make<Epoch>(), Make<PeerId>(), Words(), Count(LH_DETECT_MS_MAX)};
  }
  OldestOp MakeOldestOp() {
    OldestOp op{prng_.Next(), Make<Epoch>(), static_cast<OpPhase>(1 + prng_.Below(6)), Small()};
    for (uint32_t i = Count(kAwaitedMax); i > 0; --i) op.members.push_back(MemberId(i));
    for (uint32_t i = Count(kAwaitedMax); i > 0; --i) op.peers.push_back(PeerId(i));
    op.awaited = Small();
    return op;
  }
  Heartbeat MakeHeartbeat() {
    Heartbeat m;
    for (uint32_t i = Count(3); i > 0; --i) {
      m.loads.push_back({Group(), Small(), prng_.Next(), prng_.Next(), prng_.Next()});
      if (prng_.Chance(0.5)) m.loads.back().oldest = MakeOldestOp();
      if (prng_.Chance(0.5)) {
        m.loads.back().worst = WorstLane{Make<PeerId>(), Small(),      Small(), Small(),
                                         prng_.Next(),   prng_.Next(), Small()};
      }
    }
    for (uint32_t i = Count(3); i > 0; --i) {
      m.fetches.push_back(
          {Group(), Make<MemberId>(), {prng_.Next(), prng_.Next(), prng_.Next(), Small()}});
    }
    return m;
  }
  Draining MakeDraining() { return {}; }

  Welcome MakeWelcome() { return {Words(), 1 + Small(), Any(), Any()}; }
  JoinPending MakeJoinPending() { return {Any(), Group(), Make<MemberId>(), Words()}; }
  JoinRefused MakeJoinRefused() {
    return {Any(), Group(), {static_cast<Code>(1 + prng_.Below(9)), Words()}};
  }
  VoteResult MakeVoteResult() { return {Group(), Make<MemberId>(), Any(), Make<Epoch>()}; }
  PrepareEpoch MakePrepareEpoch() {
    const uint64_t epoch = 2 + prng_.Below(1000);
    PrepareEpoch m{.group = Group(), .epoch = Epoch(epoch), .preparation = Any()};
    m.base = Epoch(prng_.Below(epoch));
    m.boundary = Epoch(1 + prng_.Below(epoch));
    m.last_freeze = Epoch(prng_.Chance(0.5) ? epoch : prng_.Below(epoch));
    m.freeze = m.last_freeze == m.epoch;
    for (uint32_t i = 1 + Count(4); i > 0; --i) {
      m.peers.push_back({PeerId(i), Endpoints(), Lanes(), Label()});
      for (uint32_t j = 1 + Count(2); j > 0; --j) {
        m.members.push_back(
            {MemberId(10 * i + j), PeerId(i), Epoch(1 + prng_.Below(epoch)), Label()});
        m.members.back().background_until =
            prng_.Chance(0.3) ? kInBackground : Epoch(prng_.Below(epoch));
        if (prng_.Chance(0.5)) m.members.back().cohort = Label();
      }
    }
    // Peers stand in falling order: 5 4 3 2 1.
    if (m.peers.size() >= 4 && prng_.Chance(0.7))
      m.blocked.push_back({PeerId(1), PeerId(3), PeerId(4)});
    if (m.peers.size() >= 5 && prng_.Chance(0.7))
      m.blocked.push_back({PeerId(2), PeerId(5), PeerId(1)});
    m.token = std::string("\0\xff", 2) + Label();
    m.cause = Words();
    if (prng_.Chance(0.5)) m.cost = {static_cast<uint32_t>(Any()), Any(), prng_.Next(), Any(), {}};
    if (prng_.Chance(0.5)) {
      m.cost.shares.assign(m.peers.size(), 0);
      for (uint32_t i = 0; i < 4; ++i) {
        m.cost.shares[prng_.Below(m.peers.size())] += kShareUnits / 4;
      }
      if (!SharesFault(m.cost.shares, m.peers.size()).empty()) m.cost.shares.clear();
    }
    return m;
  }
  CommitEpoch MakeCommitEpoch() {
    CommitEpoch m{.group = Group(), .epoch = Make<Epoch>()};
    for (uint32_t i = Count(4); i > 0; --i) {
      m.fates.push_back({OpOrdinal(i), static_cast<Fate>(1 + prng_.Below(3))});
    }
    for (uint32_t i = 0; i < Count(4); ++i)
      m.missed.push_back({Epoch(i + 1), UINT64_MAX - i, prng_.Next()});
    return m;
  }
  AbortEpoch MakeAbortEpoch() { return {Group(), Make<Epoch>(), Words()}; }
  Removed MakeRemoved() {
    return {Group(), Make<MemberId>(), static_cast<Removal>(1 + prng_.Below(5)), Words()};
  }
  PendingCount MakePendingCount() { return {Group(), Count(LH_MEMBERS_MAX)}; }
  Drain MakeDrain() { return {Words()}; }
  SyncResult MakeSyncResult() {
    SyncResult m{Group(), Make<MemberId>(), Any(), static_cast<SyncAction>(1 + prng_.Below(3))};
    if (m.action == SyncAction::kEnd) {
      m.outcome = {static_cast<Code>(prng_.Below(10)), Words()};
      if (prng_.Chance(0.3)) m.sources = {{Make<MemberId>(), Make<PeerId>()}};
    } else if (m.action == SyncAction::kFetch) {
      for (uint32_t i = 1 + Count(3); i > 0; --i) m.sources.push_back({MemberId(i), PeerId(i)});
    }
    m.revision = prng_.Next();
    m.manifest = Hash();
    m.state = Hash();
    return m;
  }

  StateAgreed MakeStateAgreed() { return {Group(), prng_.Below(LH_REVISION_MAX), Hash(), Hash()}; }

  PeerTried MakePeerTried() { return {Group(), Any(), Make<PeerId>(), Words()}; }
  CancelOp MakeCancelOp() { return {Group(), Make<MemberId>(), Make<Epoch>(), Words()}; }
  Dispute MakeDispute() {
    Dispute dispute{Group(), Make<PeerId>(), Make<Epoch>(), Make<Epoch>(), Any(), Any(), Any()};
    for (uint64_t i = prng_.Below(3); i > 0; --i) {
      dispute.statements.push_back(
          {PeerId(i), std::string(LH_SHA256_BYTES, 'd'), std::string(LH_SIGNATURE_BYTES, 's')});
    }
    dispute.what = Words();
    return dispute;
  }
  TryPeer MakeTryPeer() { return {Group(), Any(), {Make<PeerId>(), {"10.0.0.1:29700"}, 4}}; }

  std::vector<PeerMessage> PeerMessages() {
    return {MakeHello(),       MakeJoin(),       MakeLeave(),     MakeVote(),     MakeEpochReady(),
            MakeEpochFailed(), MakeLinkLost(),   MakeHeartbeat(), MakeDraining(), MakeSyncVote(),
            MakeFetchDone(),   MakeLinkReport(), MakePeerTried(), MakeCancelOp(), MakeDispute()};
  }
  std::vector<CoordinatorMessage> CoordinatorMessages() {
    return {MakeWelcome(),      MakeJoinPending(), MakeJoinRefused(), MakeVoteResult(),
            MakePrepareEpoch(), MakeCommitEpoch(), MakeAbortEpoch(),  MakeRemoved(),
            MakePendingCount(), MakeDrain(),       MakeSyncResult(),  MakeStateAgreed(),
            MakeTryPeer()};
  }

 private:
  uint64_t Any() { return prng_.Chance(0.2) ? UINT64_MAX : 1 + prng_.Below(1000); }
  template <class T>
  T Make() {
    return T(Any());
  }
  // Returns random bytes; there may be none.
  // At most `most` bytes.
  std::string Bytes(size_t most) {
    std::string bytes(Count(most), '\0');
    for (char& byte : bytes) byte = static_cast<char>(prng_.Below(256));
    return bytes;
  }
  uint32_t Small() { return static_cast<uint32_t>(prng_.Below(100)); }
  uint32_t Count(uint32_t max) { return static_cast<uint32_t>(prng_.Below(max + 1)); }
  uint32_t Lanes() { return Count(LH_LANES_MAX); }
  std::string Label() {
    static constexpr char kAllowed[] = "abcXYZ019._-";
    std::string label;
    for (uint64_t n = 1 + prng_.Below(LH_RUN_NAME_BYTES_MAX); n > 0; --n) {
      label += kAllowed[prng_.Below(sizeof(kAllowed) - 1)];
    }
    return label;
  }
  std::string Words() { return prng_.Chance(0.2) ? "" : "gr\xc3\xbc\xc3\x9f to " + Label(); }
  GroupKey Group() { return {Label(), static_cast<uint32_t>(prng_.Next())}; }
  std::vector<std::string> Endpoints() {
    std::vector<std::string> endpoints;
    for (uint64_t n = 1 + prng_.Below(LH_ENDPOINTS_MAX); n > 0; --n) {
      endpoints.push_back(Label() + ":" + std::to_string(1 + prng_.Below(65535)));
    }
    return endpoints;
  }

  Prng prng_;
};

TEST(ConvertTest, EveryMessageComesBackAsItWent) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Generator generator(seed);
    for (const PeerMessage& message : generator.PeerMessages()) {
      const auto again = ParsePeerMessage(Serialize(message));
      ASSERT_TRUE(again.ok()) << "seed " << seed << ": " << again.status();
      EXPECT_TRUE(*again == message) << Name(message) << " seed " << seed;
    }
    for (const CoordinatorMessage& message : generator.CoordinatorMessages()) {
      const auto again = ParseCoordinatorMessage(Serialize(message));
      ASSERT_TRUE(again.ok()) << "seed " << seed << ": " << again.status();
      EXPECT_TRUE(*again == message) << Name(message) << " seed " << seed;
    }
  }
}

TEST(ConvertTest, GeneratorMakesEveryKind) {
  Generator generator(1);
  EXPECT_EQ(generator.PeerMessages().size(), std::variant_size_v<PeerMessage>);
  EXPECT_EQ(generator.CoordinatorMessages().size(), std::variant_size_v<CoordinatorMessage>);
}

TEST(ConvertTest, GarbageIsRefusedOrCanonical) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Generator generator(seed);
    Prng prng(seed);
    for (const PeerMessage& message : generator.PeerMessages()) {
      std::string bytes = Serialize(message);
      if (bytes.empty()) continue;
      bytes[prng.Below(bytes.size())] = static_cast<char>(prng.Next());
      const auto parsed = ParsePeerMessage(bytes);
      if (parsed.ok()) {
        EXPECT_TRUE(*ParsePeerMessage(Serialize(*parsed)) == *parsed);
      }
    }
    for (const CoordinatorMessage& message : generator.CoordinatorMessages()) {
      std::string bytes = Serialize(message);
      bytes[prng.Below(bytes.size())] = static_cast<char>(prng.Next());
      const auto parsed = ParseCoordinatorMessage(bytes);
      if (parsed.ok()) {
        EXPECT_TRUE(*ParseCoordinatorMessage(Serialize(*parsed)) == *parsed);
      }
    }
  }
}

// Both functions collect names of fields, such as "offer.number": the first one those of T and all
// structs in it, the second one those of a protobuf message.
template <HasFields T>
void AddNames(const std::string& prefix, std::set<std::string>* names) {
  ForEachField<T>([&](const auto& field) {
    using Member = std::remove_cvref_t<decltype(std::declval<T>().*field.member)>;
    using Rule = std::remove_cvref_t<decltype(field.rule)>;
    const auto add = [&]<class V>(V*) {
      if constexpr (HasFields<V>) {
        const bool flat = std::is_same_v<Rule, rule::Flat>;
        AddNames<V>(flat ? prefix : prefix + field.name + ".", names);
        if (flat) return;
      }
      names->insert(prefix + field.name);
    };
    if constexpr (kIsVector<Member> || kIsOptional<Member>) {
      add(static_cast<typename Member::value_type*>(nullptr));
    } else {
      add(static_cast<Member*>(nullptr));
    }
  });
}
void AddNames(const google::protobuf::Descriptor* type, const std::string& prefix,
              std::set<std::string>* names) {
  for (int i = 0; i < type->field_count(); ++i) {
    const std::string name = prefix + type->field(i)->name();
    names->insert(name);
    if (type->field(i)->message_type() == nullptr) continue;
    AddNames(type->field(i)->message_type(), name + ".", names);
  }
}

template <class... Kinds>
void ExpectSameFields(const google::protobuf::Descriptor* envelope, std::variant<Kinds...>*) {
  EXPECT_EQ(size_t(envelope->field_count()), sizeof...(Kinds));
  const auto expect_same = [&]<class Kind>(Kind*) {
    const google::protobuf::FieldDescriptor* proto = nullptr;
    for (int i = 0; i < envelope->field_count(); ++i) {
      const bool found = envelope->field(i)->message_type()->name() == Kind::kName;
      if (found) proto = envelope->field(i);
    }
    ASSERT_NE(proto, nullptr) << Kind::kName;
    std::set<std::string> ours;
    std::set<std::string> theirs;
    AddNames<Kind>("", &ours);
    AddNames(proto->message_type(), "", &theirs);
    EXPECT_EQ(ours, theirs) << Kind::kName;
  };
  (expect_same(static_cast<Kinds*>(nullptr)), ...);
}

TEST(ConvertTest, ProtoFileAndStructsHaveTheSameFields) {
  ExpectSameFields(v1::PeerMessage::descriptor(), static_cast<PeerMessage*>(nullptr));
  ExpectSameFields(v1::CoordinatorMessage::descriptor(), static_cast<CoordinatorMessage*>(nullptr));
}

// Changes the message with `spoil`. Returns the reason why it is refused then, or "".
template <class Message>
std::string Refusal(Message message, const std::function<void(Message*)>& spoil) {
  spoil(&message);
  if constexpr (std::is_constructible_v<PeerMessage, Message>) {
    return std::string(ParsePeerMessage(Serialize(PeerMessage(message))).status().message());
  } else {
    return std::string(
        ParseCoordinatorMessage(Serialize(CoordinatorMessage(message))).status().message());
  }
}
#define REFUSAL(Kind, ...) Refusal<Kind>(Generator(7).Make##Kind(), [](Kind* m) { __VA_ARGS__; })

TEST(RefusalTest, MessageOfNoKind) {
  EXPECT_FALSE(ParsePeerMessage("").ok());
  EXPECT_FALSE(ParseCoordinatorMessage("").ok());
  EXPECT_FALSE(ParsePeerMessage("\xff").ok());
  EXPECT_EQ(ParsePeerMessage(std::string(LH_CONTROL_MESSAGE_BYTES_MAX + 1, 'x')).status().message(),
            "message is 8388609 bytes, not at most 8388608");
}

TEST(RefusalTest, GroupNames) {
  EXPECT_EQ(REFUSAL(Vote, m->group.run = ""),
            "Vote: group.run is \"\", not 1 to 64 bytes of [A-Za-z0-9._-]");
  EXPECT_EQ(REFUSAL(Vote, m->group.run = "a/b"),
            "Vote: group.run is \"a/b\", not 1 to 64 bytes of [A-Za-z0-9._-]");
  EXPECT_EQ(REFUSAL(Vote, m->group.run = std::string(LH_RUN_NAME_BYTES_MAX, 'a')), "");
  EXPECT_NE(REFUSAL(Vote, m->group.run = std::string(LH_RUN_NAME_BYTES_MAX + 1, 'a')), "");
  v1::PeerMessage without;
  without.mutable_vote()->set_member(1);
  without.mutable_vote()->set_number(1);
  EXPECT_FALSE(FromProto(without).ok());
}

TEST(RefusalTest, MemberNames) {
  EXPECT_EQ(REFUSAL(Join, m->name = ""), "");
  EXPECT_EQ(REFUSAL(Join, m->name = std::string(LH_MEMBER_NAME_BYTES_MAX, 'a')), "");
  EXPECT_NE(REFUSAL(Join, m->name = std::string(LH_MEMBER_NAME_BYTES_MAX + 1, 'a')), "");
  EXPECT_NE(REFUSAL(Join, m->name = "two words"), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->members[0].name = "\n"), "");
}

TEST(RefusalTest, IdsThatAreZero) {
  EXPECT_EQ(REFUSAL(Hello, m->peer = PeerId()), "Hello: peer is 0, not an id");
  EXPECT_EQ(REFUSAL(Join, m->request = 0), "Join: request is 0, not an id");
  EXPECT_EQ(REFUSAL(Leave, m->member = MemberId()), "Leave: member is 0, not an id");
  EXPECT_EQ(REFUSAL(Vote, m->member = MemberId()), "Vote: member is 0, not an id");
  EXPECT_EQ(REFUSAL(Vote, m->number = 0), "Vote: number is 0, not an id");
  EXPECT_EQ(REFUSAL(EpochReady, m->epoch = Epoch()), "EpochReady: epoch is 0, not an id");
  EXPECT_EQ(REFUSAL(EpochFailed, m->epoch = Epoch()), "EpochFailed: epoch is 0, not an id");
  EXPECT_EQ(REFUSAL(LinkLost, m->epoch = Epoch()), "LinkLost: epoch is 0, not an id");
  EXPECT_EQ(REFUSAL(LinkLost, m->peer = PeerId()), "LinkLost: peer is 0, not an id");
  EXPECT_EQ(REFUSAL(JoinPending, m->request = 0), "JoinPending: request is 0, not an id");
  EXPECT_EQ(REFUSAL(JoinPending, m->member = MemberId()), "JoinPending: member is 0, not an id");
  EXPECT_EQ(REFUSAL(JoinRefused, m->request = 0), "JoinRefused: request is 0, not an id");
  EXPECT_EQ(REFUSAL(VoteResult, m->epoch = Epoch()), "VoteResult: epoch is 0, not an id");
  EXPECT_EQ(REFUSAL(VoteResult, m->number = 0), "VoteResult: number is 0, not an id");
  EXPECT_EQ(REFUSAL(CommitEpoch, m->epoch = Epoch()), "CommitEpoch: epoch is 0, not an id");
  EXPECT_EQ(REFUSAL(AbortEpoch, m->epoch = Epoch()), "AbortEpoch: epoch is 0, not an id");
  EXPECT_EQ(REFUSAL(Removed, m->member = MemberId()), "Removed: member is 0, not an id");
}

TEST(RefusalTest, Endpoints) {
  EXPECT_NE(REFUSAL(Hello, m->endpoints.clear()), "");
  EXPECT_EQ(REFUSAL(Hello, m->endpoints.assign(LH_ENDPOINTS_MAX, "h:1")), "");
  EXPECT_EQ(REFUSAL(Hello, m->endpoints.assign(LH_ENDPOINTS_MAX + 1, "h:1")),
            "Hello: endpoints is 9 long, not 1 to 8");
  for (const char* good : {"h:1", "10.0.0.1:65535", "[::1]:29700"}) {
    Hello hello = Generator(7).MakeHello();
    hello.endpoints = {good};
    EXPECT_TRUE(ParsePeerMessage(Serialize(PeerMessage(hello))).ok()) << good;
  }
  for (const char* bad :
       {"", "h", ":1", "h:", "h:0", "h:65536", "h:123456", "h:1x", "a b:1", "\n:1"}) {
    Hello hello = Generator(7).MakeHello();
    hello.endpoints = {bad};
    EXPECT_FALSE(ParsePeerMessage(Serialize(PeerMessage(hello))).ok()) << bad;
  }
  EXPECT_EQ(REFUSAL(Hello, m->endpoints = {std::string(LH_ENDPOINT_BYTES_MAX - 2, 'h') + ":1"}),
            "");
  EXPECT_NE(REFUSAL(Hello, m->endpoints = {std::string(LH_ENDPOINT_BYTES_MAX - 1, 'h') + ":1"}),
            "");
}

TEST(RefusalTest, KeysAndSignaturesAreBounded) {
  EXPECT_EQ(REFUSAL(Hello, m->key.assign(LH_PUBLIC_KEY_BYTES, '\xff')), "");
  EXPECT_EQ(REFUSAL(Hello, m->key.assign(LH_PUBLIC_KEY_BYTES + 1, '\xff')),
            "Hello: key is 33 bytes, not 0 to 32");
  EXPECT_EQ(REFUSAL(Hello, m->signature.assign(LH_SIGNATURE_BYTES + 1, '\xff')),
            "Hello: signature is 65 bytes, not 0 to 64");
}

TEST(RefusalTest, CountsOfHello) {
  EXPECT_EQ(REFUSAL(Hello, m->lanes = LH_LANES_MAX), "");
  EXPECT_EQ(REFUSAL(Hello, m->lanes = LH_LANES_MAX + 1), "Hello: lanes is 257, not at most 256");
  const auto groups = [](uint32_t n) {
    Hello hello = Generator(7).MakeHello();
    hello.groups.clear();
    for (uint32_t i = 0; i < n; ++i) hello.groups.push_back({{"run", i}, Epoch(), {}});
    return ParsePeerMessage(Serialize(PeerMessage(hello))).ok();
  };
  EXPECT_TRUE(groups(LH_GROUPS_MAX));
  EXPECT_FALSE(groups(LH_GROUPS_MAX + 1));
  const auto members = [](uint32_t n) {
    Hello hello = Generator(7).MakeHello();
    hello.groups = {{{"run", 0}, Epoch(), {}}};
    for (uint32_t i = 0; i < n; ++i) hello.groups[0].members.push_back(MemberId(i + 1));
    return ParsePeerMessage(Serialize(PeerMessage(hello))).ok();
  };
  EXPECT_TRUE(members(LH_LOCAL_MEMBERS_MAX));
  EXPECT_FALSE(members(LH_LOCAL_MEMBERS_MAX + 1));
}

TEST(RefusalTest, WhatComesTwice) {
  EXPECT_EQ(REFUSAL(Hello, m->groups.assign(2, {{"run", 1}, Epoch(), {}})),
            "Hello: groups has run/1 twice");
  EXPECT_EQ(REFUSAL(Hello, m->groups = {{{"run", 1}, Epoch(), {MemberId(2), MemberId(2)}}}),
            "Hello: groups[0].members has m2 twice");
  EXPECT_EQ(REFUSAL(EpochReady, m->ops.assign(2, {OpOrdinal(3), Epoch(1)})),
            "EpochReady: ops has o3 twice");
  EXPECT_EQ(REFUSAL(EpochReady, m->ops = {{OpOrdinal(3), Epoch(1)}};
                    m->ops[0].matches.assign(2, {PeerId(4), OpOrdinal(1)})),
            "EpochReady: ops[0].matches has p4 twice");
  EXPECT_EQ(REFUSAL(EpochFailed, m->unreachable.assign(2, {PeerId(4), ""})),
            "EpochFailed: unreachable has p4 twice");
  EXPECT_EQ(REFUSAL(CommitEpoch, m->fates.assign(2, {OpOrdinal(3), Fate::kRedo})),
            "CommitEpoch: fates has o3 twice");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->members.push_back(m->members[0])), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->peers.push_back(m->peers[0])), "");
}

TEST(RefusalTest, OpsThatAreNotNamed) {
  EXPECT_NE(REFUSAL(EpochReady, m->ops = {{OpOrdinal(), Epoch(1)}}), "");
  EXPECT_NE(REFUSAL(EpochReady, m->ops = {{OpOrdinal(1), Epoch()}}), "");
  EXPECT_NE(REFUSAL(EpochReady, m->ops = {{OpOrdinal(1), Epoch(1)}};
                    m->ops[0].matches = {{PeerId(), OpOrdinal(1)}}),
            "");
  EXPECT_NE(REFUSAL(EpochReady, m->ops = {{OpOrdinal(1), Epoch(1)}};
                    m->ops[0].matches = {{PeerId(1), OpOrdinal()}}),
            "");
  EXPECT_NE(REFUSAL(EpochFailed, m->unreachable.clear()), "");
}

TEST(RefusalTest, NumbersThatAreNoEnum) {
  EXPECT_EQ(REFUSAL(CommitEpoch, m->fates = {{OpOrdinal(1), static_cast<Fate>(0)}}),
            "CommitEpoch: fates[0].fate is 0, not 1 to 3");
  EXPECT_EQ(REFUSAL(CommitEpoch, m->fates = {{OpOrdinal(1), static_cast<Fate>(4)}}),
            "CommitEpoch: fates[0].fate is 4, not 1 to 3");
  EXPECT_EQ(REFUSAL(Removed, m->why = static_cast<Removal>(0)), "Removed: why is 0, not 1 to 5");
  EXPECT_EQ(REFUSAL(Removed, m->why = static_cast<Removal>(6)), "Removed: why is 6, not 1 to 5");
  EXPECT_EQ(REFUSAL(JoinRefused, m->outcome.code = Code::kOk),
            "JoinRefused: code is 0, not one of an error");
  EXPECT_EQ(REFUSAL(JoinRefused, m->outcome.code = static_cast<Code>(10)),
            "JoinRefused: code is 10, not at most 9");
}

TEST(RefusalTest, OffersThatMakeNoSense) {
  EXPECT_EQ(REFUSAL(SyncVote, m->offer.number = 0), "SyncVote: offer.number is 0, not an id");
  EXPECT_EQ(REFUSAL(SyncVote, m->offer.strategy = static_cast<SyncStrategy>(0)),
            "SyncVote: offer.strategy is 0, not 1 to 3");
  EXPECT_EQ(REFUSAL(SyncVote, m->offer.strategy = static_cast<SyncStrategy>(4)),
            "SyncVote: offer.strategy is 4, not 1 to 3");
  EXPECT_EQ(REFUSAL(SyncVote, m->offer.revision = LH_REVISION_MAX), "");
  EXPECT_EQ(REFUSAL(SyncVote, m->offer.revision = LH_REVISION_MAX + 1),
            "SyncVote: offer.revision is 9223372036854775809, not at most 9223372036854775808");
  EXPECT_EQ(REFUSAL(SyncVote, m->offer.strategy = SyncStrategy::kSend; m->offer.complete = false),
            "SyncVote: offer.complete is 0, not 1, as the member sends");
  EXPECT_EQ(REFUSAL(SyncVote, m->member = MemberId()), "SyncVote: member is 0, not an id");
  EXPECT_EQ(REFUSAL(Vote, m->sync = SyncOffer{}), "Vote: sync.number is 0, not an id");
}

TEST(RefusalTest, EndsOfSyncsThatMakeNoSense) {
  EXPECT_EQ(REFUSAL(FetchDone, m->number = 0), "FetchDone: number is 0, not an id");
  EXPECT_EQ(REFUSAL(FetchDone, m->outcome.code = static_cast<Code>(10)),
            "FetchDone: code is 10, not at most 9");
  EXPECT_EQ(REFUSAL(FetchDone, m->corrupt.assign(2, MemberId(4))),
            "FetchDone: corrupt has m4 twice");
  EXPECT_EQ(REFUSAL(FetchDone, m->sources = {MemberId()}), "FetchDone: sources[0] is 0, not an id");
  const auto accepts = [](uint64_t sources) {
    FetchDone done = Generator(7).MakeFetchDone();
    done.sources.clear();
    for (uint64_t i = 1; i <= sources; ++i) done.sources.push_back(MemberId(i));
    return ParsePeerMessage(Serialize(PeerMessage(done))).ok();
  };
  EXPECT_TRUE(accepts(LH_SYNC_SOURCES_MAX));
  EXPECT_FALSE(accepts(LH_SYNC_SOURCES_MAX + 1));
}

TEST(RefusalTest, MeasuredLinksThatMakeNoSense) {
  const auto refusal = [](const LinkMeasure& link) {
    return std::string(
        ParsePeerMessage(Serialize(PeerMessage(LinkReport{{link}}))).status().message());
  };
  EXPECT_EQ(refusal({PeerId(1), PeerId(2), 5, 0, 0}), "");
  EXPECT_EQ(refusal({PeerId(1), PeerId(2), 0, 5, 0}), "");
  EXPECT_EQ(refusal({PeerId(1), PeerId(2), 0, 0, 5}),
            "LinkReport: links[0].bytes_per_second is 0, and so is rtt_us, not a measurement");
  EXPECT_EQ(refusal({PeerId(0), PeerId(2), 5, 5, 5}), "LinkReport: links[0].from is 0, not an id");
  EXPECT_EQ(refusal({PeerId(1), PeerId(0), 5, 5, 5}), "LinkReport: links[0].to is 0, not an id");
  EXPECT_EQ(refusal({PeerId(1), PeerId(1), 5, 5, 5}),
            "LinkReport: links[0].to is p1, not another peer than from");
  const LinkMeasure link{PeerId(1), PeerId(2), 5, 5, 5};
  EXPECT_EQ(ParsePeerMessage(Serialize(PeerMessage(LinkReport{{link, link}}))).status().message(),
            "LinkReport: links has p1-p2 twice");
  const auto accepts = [](uint64_t links) {
    LinkReport report;
    for (uint64_t i = 1; i <= links; ++i) {
      report.links.push_back({PeerId(i), PeerId(i + 1), 5, 5, 5});
    }
    return ParsePeerMessage(Serialize(PeerMessage(report))).ok();
  };
  EXPECT_TRUE(accepts(kLinkMeasuresMax));
  EXPECT_FALSE(accepts(kLinkMeasuresMax + 1));
}

TEST(GoldenTest, MeasuredLinks) {
  const LinkReport report{{{PeerId(1), PeerId(2), 300, 4, 5}}};
  EXPECT_EQ(Serialize(PeerMessage(report)),
            std::string("\x92\x01\x1b\x0a\x19\x09\x01") + std::string(7, '\0') + "\x11\x02" +
                std::string(7, '\0') + "\x18\xac\x02\x20\x04\x28\x05");
  EXPECT_EQ(Serialize(PeerMessage(LinkReport{{}, 300, 5})),
            std::string("\x92\x01\x05\x10\xac\x02\x18\x05"))
      << "a host whose links have no news";
}

TEST(RefusalTest, ResultsOfSyncsThatMakeNoSense) {
  const auto refusal = [](SyncAction action, Code code, uint64_t sources) {
    SyncResult m{{"run", 0}, MemberId(1), 1, action, {code, ""}};
    for (uint64_t i = 1; i <= sources; ++i) m.sources.push_back({MemberId(i), PeerId(1)});
    return std::string(
        ParseCoordinatorMessage(Serialize(CoordinatorMessage(m))).status().message());
  };
  EXPECT_EQ(refusal(SyncAction::kEnd, Code::kOk, 0), "");
  EXPECT_EQ(refusal(SyncAction::kEnd, Code::kStateMismatch, 1), "");
  EXPECT_EQ(refusal(SyncAction::kEnd, Code::kOk, 2), "SyncResult: sources is 2 long, not 0 to 1");
  EXPECT_EQ(refusal(SyncAction::kServe, Code::kOk, 0), "");
  EXPECT_EQ(refusal(SyncAction::kServe, Code::kAborted, 0),
            "SyncResult: code is 4, not 0, as the sync goes on");
  EXPECT_EQ(refusal(SyncAction::kFetch, Code::kOk, 0),
            "SyncResult: sources is 0 long, not 1 to 64");
  EXPECT_EQ(refusal(SyncAction::kFetch, Code::kOk, LH_SYNC_SOURCES_MAX), "");
  EXPECT_EQ(refusal(SyncAction::kFetch, Code::kOk, LH_SYNC_SOURCES_MAX + 1),
            "SyncResult: sources is 65 long, not 0 to 64");
  EXPECT_EQ(refusal(static_cast<SyncAction>(0), Code::kOk, 0),
            "SyncResult: action is 0, not 1 to 3");
  EXPECT_EQ(REFUSAL(StateAgreed, m->revision = uint64_t{LH_REVISION_MAX} + 1),
            "StateAgreed: revision is 9223372036854775809, not at most 9223372036854775808");
  EXPECT_EQ(REFUSAL(SyncResult, m->number = 0), "SyncResult: number is 0, not an id");
  EXPECT_EQ(REFUSAL(SyncResult, m->action = SyncAction::kFetch; m->outcome = {};
                    m->sources = {{MemberId(1), PeerId()}}),
            "SyncResult: sources[0].peer is 0, not an id");
}

// Other releases must read these bytes. They were written by hand, one message of each kind.
TEST(GoldenTest, MessagesOfSyncs) {
  const Hash128 manifest{1, 2};
  const Hash128 state{3, 4};
  const auto hash = [](char high, char low) {
    return std::string("\x09") + high + std::string(7, '\0') + "\x11" + low + std::string(7, '\0');
  };
  const std::string group = "\x0a\x05\x0a\x03run";
  const std::string offer = std::string("\x08\x05\x10\x02\x18\x0d\x22\x12") + hash(1, 2) +
                            "\x2a\x12" + hash(3, 4) + "\x30\x01\x38\x01";
  const SyncOffer said{5, SyncStrategy::kReceive, 13, manifest, state, true, true};
  EXPECT_EQ(Serialize(PeerMessage(SyncVote{{"run", 0}, MemberId(7), said})),
            std::string("\x82\x01\x3d") + group + "\x10\x07\x1a\x32" + offer);
  EXPECT_EQ(Serialize(PeerMessage(Vote{{"run", 0}, MemberId(7), 9, said})),
            std::string("\x22\x40") + group + "\x10\x07\x18\x09\x82\x01\x32" + offer);
  const FetchDone done{{"run", 0},    MemberId(7),  5, {Code::kAborted, "x"}, state, 6,
                       {MemberId(1)}, {MemberId(2)}};
  EXPECT_EQ(Serialize(PeerMessage(done)), std::string("\x8a\x01\x2c") + group +
                                              "\x10\x07\x18\x05\x20\x04\x2a\x01x\x32\x12" +
                                              hash(3, 4) + "\x38\x06\x42\x01\x01\x4a\x01\x02");
  const SyncResult result{{"run", 0}, MemberId(7), 5,     SyncAction::kFetch,        {},
                          13,         manifest,    state, {{MemberId(1), PeerId(2)}}};
  EXPECT_EQ(Serialize(CoordinatorMessage(result)),
            std::string("\x82\x01\x44") + group + "\x10\x07\x18\x05\x20\x03\x38\x0d\x42\x12" +
                hash(1, 2) + "\x4a\x12" + hash(3, 4) + "\x52\x0b\x08\x01\x11\x02" +
                std::string(7, '\0'));
}

TEST(RefusalTest, EpochsOutOfOrder) {
  EXPECT_NE(REFUSAL(PrepareEpoch, m->base = m->epoch), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->boundary = Epoch(m->epoch.value() + 1)), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->boundary = Epoch()), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->last_freeze = Epoch(m->epoch.value() + 1)), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->freeze = !m->freeze), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->members[0].joined = Epoch()), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->members[0].joined = Epoch(m->epoch.value() + 1)), "");
}

TEST(RefusalTest, MembersAndPeersThatDoNotMeet) {
  EXPECT_NE(REFUSAL(PrepareEpoch, m->members[0].peer = PeerId(99)), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->peers.push_back({PeerId(99), {"h:1"}, 0})), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->members[0].background_until = Epoch(m->epoch.value() + 1)),
            "");
  EXPECT_EQ(REFUSAL(PrepareEpoch, m->members[0].background_until = kInBackground), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->members.clear()), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->peers.clear()), "");
}

TEST(RefusalTest, Cohorts) {
  EXPECT_EQ(REFUSAL(Join, m->wish.cohort = "host1"; m->wish.cohort_size = 1), "");
  EXPECT_EQ(REFUSAL(Join, m->wish.cohort = "host1"; m->wish.cohort_size = LH_LOCAL_MEMBERS_MAX),
            "");
  EXPECT_EQ(REFUSAL(Join, m->wish.cohort = ""; m->wish.cohort_size = 0), "");
  EXPECT_EQ(REFUSAL(Join, m->wish.cohort = "host1"; m->wish.cohort_size = LH_LOCAL_MEMBERS_MAX + 1),
            "Join: cohort_size is 65, not 1 to 64");
  EXPECT_EQ(REFUSAL(Join, m->wish.cohort = "host1"; m->wish.cohort_size = 0),
            "Join: cohort_size is 0, not 1 to 64");
  EXPECT_EQ(REFUSAL(Join, m->wish.cohort = ""; m->wish.cohort_size = 2),
            "Join: cohort_size is 2, not 0, as there is no cohort");
  EXPECT_EQ(REFUSAL(Join, m->wish.cohort = "a b"; m->wish.cohort_size = 2),
            "Join: cohort is \"a b\", not 0 to 64 bytes of [A-Za-z0-9._-]");
  EXPECT_NE(REFUSAL(Join, m->wish.cohort.assign(LH_COHORT_NAME_BYTES_MAX + 1, 'a');
                    m->wish.cohort_size = 2),
            "");
}

TEST(RefusalTest, StepDeadlines) {
  EXPECT_EQ(REFUSAL(Join, m->wish.step_deadline_ms = LH_STEP_DEADLINE_MS_MAX), "");
  EXPECT_EQ(REFUSAL(Join, m->wish.step_deadline_ms = LH_STEP_DEADLINE_MS_MAX + 1),
            "Join: step_deadline_ms is 86400001, not at most 86400000");
}

TEST(RefusalTest, BlockedPairs) {
  const auto refusal = [](uint64_t peers, BlockedPairs blocked) {
    PrepareEpoch m{.group = {"run", 0}, .epoch = Epoch(2), .base = Epoch(1), .boundary = Epoch(2)};
    m.preparation = 1;
    m.token = "t";
    for (uint64_t i = 1; i <= peers; ++i) {
      m.peers.push_back({PeerId(i), {"h:1"}, 0});
      m.members.push_back({MemberId(i), PeerId(i), Epoch(1), ""});
    }
    m.blocked = std::move(blocked);
    return std::string(
        ParseCoordinatorMessage(Serialize(CoordinatorMessage(m))).status().message());
  };
  EXPECT_EQ(refusal(4, {{PeerId(1), PeerId(3), PeerId(2)}}), "");
  EXPECT_EQ(refusal(4, {{PeerId(1), PeerId(2), PeerId()}}),
            "PrepareEpoch: blocked pair p1-p2 has no relay");
  EXPECT_EQ(refusal(4, {{PeerId(1), PeerId(1), PeerId(2)}}),
            "PrepareEpoch: blocked pair p1-p1 is no pair of peers of the epoch, the smaller first");
  EXPECT_EQ(refusal(4, {{PeerId(1), PeerId(9), PeerId(2)}}),
            "PrepareEpoch: blocked pair p1-p9 is no pair of peers of the epoch, the smaller first");
  EXPECT_EQ(refusal(4, BlockedPairs(2, {PeerId(1), PeerId(3), PeerId(2)})),
            "PrepareEpoch: blocked pair p1-p3 is out of order");
  // As many pairs as are allowed, then one more.
  BlockedPairs many;
  for (uint64_t a = 1; many.size() < LH_BLOCKED_PAIRS_MAX; ++a) {
    for (uint64_t b = a + 2; b < a + 6 && many.size() < LH_BLOCKED_PAIRS_MAX; ++b) {
      many.push_back({PeerId(a), PeerId(b), PeerId(600)});
    }
  }
  EXPECT_EQ(refusal(600, many), "");
  many.push_back({PeerId(500), PeerId(502), PeerId(600)});
  EXPECT_EQ(refusal(600, many), "PrepareEpoch: blocked is 1025 long, not 0 to 1024");
}

TEST(RefusalTest, SilenceIsCutNotRefused) {
  LinkLost lost = Generator(7).MakeLinkLost();
  lost.silent_ms = UINT32_MAX;
  const auto parsed = ParsePeerMessage(Serialize(PeerMessage(lost)));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(std::get<LinkLost>(*parsed).silent_ms, LH_DETECT_MS_MAX);
}

TEST(RefusalTest, MembersOfAnEpochAreBounded) {
  const auto accepts = [](uint32_t n) {
    PrepareEpoch m{.group = {"run", 0}, .epoch = Epoch(2), .base = Epoch(1), .boundary = Epoch(2)};
    m.preparation = 1;
    m.token = "t";
    m.peers = {{PeerId(1), {"h:1"}, 0}};
    for (uint32_t i = 0; i < n; ++i) {
      m.members.push_back({MemberId(i + 1), PeerId(1), Epoch(1), ""});
    }
    return ParseCoordinatorMessage(Serialize(CoordinatorMessage(m))).ok();
  };
  EXPECT_TRUE(accepts(LH_MEMBERS_MAX));
  EXPECT_FALSE(accepts(LH_MEMBERS_MAX + 1));
}

TEST(RefusalTest, TokensAndKnobs) {
  EXPECT_NE(REFUSAL(PrepareEpoch, m->token.clear()), "");
  EXPECT_EQ(REFUSAL(PrepareEpoch, m->token.assign(LH_TOKEN_BYTES_MAX, '\0')), "");
  EXPECT_NE(REFUSAL(PrepareEpoch, m->token.assign(LH_TOKEN_BYTES_MAX + 1, '\0')), "");
  EXPECT_EQ(REFUSAL(PrepareEpoch, m->preparation = 0), "PrepareEpoch: preparation is 0, not an id");
  EXPECT_EQ(REFUSAL(EpochReady, m->preparation = 0), "EpochReady: preparation is 0, not an id");
  EXPECT_EQ(REFUSAL(EpochFailed, m->preparation = 0), "EpochFailed: preparation is 0, not an id");
  EXPECT_EQ(REFUSAL(Welcome, m->store = 0), "Welcome: store is 0, not an id");
  EXPECT_EQ(REFUSAL(Welcome, m->term = 0), "Welcome: term is 0, not an id");
  EXPECT_EQ(REFUSAL(Hello, m->groups = {{{"run", 1}, Epoch(), {}, Epoch(4), 0}}),
            "Hello: groups[0].prepared is 4 with preparation 0, not both or none");
  EXPECT_NE(REFUSAL(Hello, m->groups = {{{"run", 1}, Epoch(), {}, Epoch(), 0, true}}), "");
  EXPECT_NE(REFUSAL(Welcome, m->detect_ms = 0), "");
  EXPECT_EQ(REFUSAL(Welcome, m->detect_ms = LH_DETECT_MS_MAX), "");
  EXPECT_NE(REFUSAL(Welcome, m->detect_ms = LH_DETECT_MS_MAX + 1), "");
  EXPECT_EQ(REFUSAL(PendingCount, m->count = LH_MEMBERS_MAX), "");
  EXPECT_NE(REFUSAL(PendingCount, m->count = LH_MEMBERS_MAX + 1), "");
}

TEST(CleanTextTest, CutsAtTheBorderOfACharacter) {
  EXPECT_EQ(CleanText("abc", 3), "abc");
  EXPECT_EQ(CleanText("abcd", 3), "abc");
  EXPECT_EQ(CleanText("ab\xc3\xbc", 3), "ab");
  EXPECT_EQ(CleanText("ab\xc3\xbc", 4), "ab\xc3\xbc");
}

TEST(CleanTextTest, ReplacesWhatIsNotUtf8) {
  EXPECT_EQ(CleanText("a\xff", 9), "a?");
  EXPECT_EQ(CleanText("\xc0\x80", 9), "??");            // overlong
  EXPECT_EQ(CleanText("\xed\xa0\x80", 9), "???");       // a surrogate
  EXPECT_EQ(CleanText("\xf4\x90\x80\x80", 9), "????");  // beyond Unicode
  EXPECT_EQ(CleanText("\xe2\x82", 9), "??");            // cut short
  EXPECT_EQ(CleanText("\xe2\x82\xac", 9), "\xe2\x82\xac");
}

TEST(CleanTextTest, TextsOfMessagesAreCutNotRefused) {
  Leave leave = Generator(7).MakeLeave();
  leave.reason = std::string(LH_ERROR_TEXT_BYTES_MAX + 1, 'x') + "\xff";
  const auto parsed = ParsePeerMessage(Serialize(PeerMessage(leave)));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(std::get<Leave>(*parsed).reason, std::string(LH_ERROR_TEXT_BYTES_MAX, 'x'));
}

}  // namespace
}  // namespace longhaul::control
