#include "coordinator/journal/journal.h"

#include <unistd.h>

#include <fstream>
#include <sstream>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "coordinator/core/token.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/core_harness.h"
#include "tests/support/fill_secrets.h"

namespace longhaul::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const char kEntropy[] = "entropy-entropy-entropy-entropy!";

class JournalTest : public ::testing::Test {
 protected:
  JournalTest() {
    static int number = 0;
    path_ = absl::StrCat(::testing::TempDir(), "/journal_", getpid(), "_", ++number);
    for (const char* suffix : {"", ".1", "-lock"}) unlink((path_ + suffix).c_str());
    options_.path = path_;
    options_.digest_every = 1;
  }
  ~JournalTest() override {
    for (const char* suffix : {"", ".1", "-lock"}) unlink((path_ + suffix).c_str());
  }

  void Begin(const Records& records = {}) {
    CoreConfig config;
    config.incarnation = "c1";
    config.detect_ms = 1000;
    config.entropy = kEntropy;
    core_ = std::make_unique<CoordinatorCore>(config, records);
    writer_.reset();  // closes the file
    auto writer = JournalWriter::Begin(options_, config, records);
    ASSERT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);
  }
  void Step(const Event& event, int64_t ms) {
    now_ = now_ + Millis(ms);
    writer_->Write(event, now_);
    for (const Action& action : core_->Step(event, now_)) {
      if (const auto* close = std::get_if<CloseSession>(&action)) closed_.push_back(close->session);
      const auto* persist = std::get_if<Persist>(&action);
      if (persist == nullptr) continue;
      for (const Mutation& mutation : persist->mutations) Apply(mutation, &store_);
    }
    writer_->Stepped(*core_);
  }
  void Hello(uint64_t peer) { Hello(peer, SessionId(peer), "key"); }
  void Hello(uint64_t peer, SessionId session, const std::string& key) {
    Step(SessionOpened{session}, 1);
    control::Hello hello;
    hello.peer = PeerId(peer);
    hello.endpoints = {"10.0.0.1:29700"};
    hello.protocol = control::kProtocolVersion;
    hello.key = key;
    Step(FromPeer{session, hello}, 1);
  }
  control::EpochReady ReadyFor(const GroupKey& group, uint64_t epoch) const {
    const uint64_t preparation =
        PreparationId(core_->GetOverview().incarnation, group, Epoch(epoch));
    return {group, Epoch(epoch), {}, preparation};
  }
  // Two members join. One of them is evicted. The other's stream closes, and it dies.
  void Story() {
    const GroupKey group{"run", 0};
    Hello(1);
    Step(FromPeer{SessionId(1), control::Join{1, group, "t"}}, 1);
    Step(FromPeer{SessionId(1), ReadyFor(group, 1)}, 1);
    Hello(2);
    Step(FromPeer{SessionId(2), control::Join{1, group, "t"}}, 1);
    Step(FromPeer{SessionId(1), control::PeerTried{group, 1, PeerId(2), ""}}, 1);
    Step(FromPeer{SessionId(1), control::Vote{group, MemberId(1), 1}}, 1);
    for (uint64_t p : {1, 2}) {
      Step(FromPeer{SessionId(p), ReadyFor(group, 2)}, 1);
    }
    // A sync gives both members one state; the second member has to fetch it.
    const control::SyncOffer offer{1, control::SyncStrategy::kPopular, 13, {1, 1}, {2, 2}};
    control::SyncOffer other = offer;
    other.state = {3, 3};
    Step(FromPeer{SessionId(1), control::SyncVote{group, MemberId(1), offer}}, 1);
    Step(FromPeer{SessionId(2), control::SyncVote{group, MemberId(2), other}}, 1);
    Step(FromPeer{SessionId(2), control::FetchDone{group, MemberId(2), 1, {}, {2, 2}, 100}}, 1);
    synced_ = store_;
    Step(FromPeer{SessionId(2), control::LinkReport{{{PeerId(2), PeerId(1), 5, 6, 7}}}}, 1);
    Step(RingOrdered{7, group, {PeerId(2), PeerId(1)}, {1, 2, 3, 4, 5}, {5, 4, 3, 2, 1}}, 1);
    Step(DrainPeer{PeerId(2), "x"}, 1);
    Step(EvictMember{group, MemberId(2), "x"}, 1);
    Step(FromPeer{SessionId(1), ReadyFor(group, 3)}, 1);
    Step(SessionClosed{SessionId(2)}, 1);
    Step(SessionClosed{SessionId(1)}, 1);
    Step(TimePassed{}, 1000);  // it may be time to tell what links cost
    Step(TimePassed{}, 1000);
    Step(TimePassed{}, 2000);
  }
  std::string Bytes() const {
    std::ifstream file(path_, std::ios::binary);
    std::ostringstream bytes;
    bytes << file.rdbuf();
    return bytes.str();
  }
  void Overwrite(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }

  std::string path_;
  JournalOptions options_;
  Records store_;
  Records synced_;                 // the records after the sync of the Story()
  std::vector<SessionId> closed_;  // the sessions that the core closed
  Tick now_{Seconds(5)};
  std::unique_ptr<CoordinatorCore> core_;
  std::unique_ptr<JournalWriter> writer_;
};

TEST_F(JournalTest, AStoryIsReplayedToTheSameStates) {
  Begin();
  Story();
  const auto report = Replay(path_, {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->events, 24u);
  EXPECT_EQ(report->digests, 24u);
  EXPECT_EQ(report->torn, "");
  ASSERT_EQ(report->overview.groups.size(), 1u);
  EXPECT_EQ(report->overview.groups[0].committed, Epoch(4));
}

TEST_F(JournalTest, AStoryThatBeginsWithRecordsIsReplayedToo) {
  Begin();
  Hello(1);
  Step(FromPeer{SessionId(1), control::Join{1, {"run", 0}, "t"}}, 1);
  const Records records = store_;
  ASSERT_EQ(records.groups.size(), 1u);
  Begin(records);
  Step(TimePassed{}, 1);
  Step(TimePassed{}, 2000);
  const auto report = Replay(path_, {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->digests, 2u);
}

TEST_F(JournalTest, RecordsOfASyncAreReplayed) {
  Begin();
  Story();
  const Records records = synced_;
  ASSERT_EQ(records.groups.begin()->second.state, (StateRecord{13, {2, 2}, {1, 1}, 2}));
  ASSERT_EQ(records.groups.begin()->second.members.front().syncs, 1u);
  Begin(records);
  Step(TimePassed{}, 1);
  const auto report = Replay(path_, {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->digests, 1u);
  EXPECT_EQ(report->overview.groups.at(0).state, (StateRecord{13, {2, 2}, {1, 1}, 2}));
}

TEST_F(JournalTest, TheJournalBeforeIsKept) {
  Begin();
  Story();
  const std::string first = Bytes();
  Begin();
  EXPECT_NE(Bytes(), first);
  std::ifstream file(path_ + ".1", std::ios::binary);
  std::ostringstream kept;
  kept << file.rdbuf();
  EXPECT_EQ(kept.str(), first);
}

TEST_F(JournalTest, SecretsAreNotInIt) {
  Records records;
  records.runs["run"] = {"run", 1, "secret-of-the-run-32-bytes-long!"};
  Begin(records);
  Story();
  EXPECT_THAT(Bytes(), Not(HasSubstr(kEntropy)));
  EXPECT_THAT(Bytes(), Not(HasSubstr("secret-of-the-run")));
}

// Holds for messages that do not exist yet, too: the secrets are found by the lists of fields.
TEST_F(JournalTest, NoSecretOfAnyMessageRecordOrSettingIsInIt) {
  CoreConfig config;
  config.incarnation = "c1";
  config.detect_ms = 1000;
  Records records;
  EXPECT_GT(FillSecrets(&config), 0);
  EXPECT_GT(FillSecrets(&records), 0);
  auto writer = JournalWriter::Begin(options_, config, records);
  ASSERT_TRUE(writer.ok()) << writer.status();
  const auto write = [&](const Event& event) { (*writer)->Write(event, Tick{5}); };
  ForEachKindWithSecrets<control::PeerMessage>([&](const auto& message) {
    write(FromPeer{SessionId(1), message});
  });
  ForEachKindWithSecrets<Event>([&](const auto& event) {
    if constexpr (!std::is_same_v<std::decay_t<decltype(event)>, FromPeer>) write(event);
  });
  writer->reset();  // closes the file
  EXPECT_GT(Bytes().size(), 100u);
  EXPECT_FALSE(ShowsSecret(Bytes()));
}

// A replay distinguishes a stranger from the peer itself, as the recorded core did.
TEST_F(JournalTest, ReplacedStreamsAreReplayed) {
  Begin();
  Hello(1);
  Hello(1, SessionId(11), "another key");
  Hello(1, SessionId(12), "");
  EXPECT_THAT(closed_, ::testing::ElementsAre(SessionId(11), SessionId(12)));
  Hello(1, SessionId(13), "key");
  EXPECT_EQ(closed_.back(), SessionId(1));
  const auto report = Replay(path_, {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->digests, 8u);
}

TEST_F(JournalTest, ItStopsWhereItIsTold) {
  Begin();
  Story();
  ReplayOptions options;
  options.until = 4;
  std::vector<std::string> steps;
  options.stepped = [&](uint64_t number, Tick, const Event& event,
                        const std::vector<Action>& actions) {
    steps.push_back(absl::StrCat(number, " ", Describe(event)));
    for (const Action& action : actions) steps.push_back(Describe(action));
  };
  const auto report = Replay(path_, options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->events, 4u);
  EXPECT_EQ(steps[0], "1 {\"SessionOpened\":{\"session\":1}}");
  EXPECT_THAT(steps,
              ::testing::Contains("notice admit: member admitted member=m1 peer=p1 epoch=1"));
}

// The coordinator was killed while it wrote. This tries every byte.
TEST_F(JournalTest, ATornLastRecordIsReportedAndNoError) {
  Begin();
  Hello(1);
  const std::string before = Bytes();
  Step(FromPeer{SessionId(1), control::Heartbeat{}}, 1);
  const std::string bytes = Bytes();
  for (size_t size = before.size() + 1; size < bytes.size(); ++size) {
    Overwrite(bytes.substr(0, size));
    const auto report = Replay(path_, {});
    ASSERT_TRUE(report.ok()) << size << ": " << report.status();
    EXPECT_GE(report->events, 2u);
  }
  Overwrite(bytes.substr(0, before.size() + 3));
  EXPECT_EQ(Replay(path_, {})->torn,
            absl::StrCat("the last record, 3 bytes at byte ", before.size(), ", is incomplete"));
}

TEST_F(JournalTest, DamageInTheMiddleIsAnErrorThatNamesThePlace) {
  Begin();
  const size_t start = Bytes().size();
  Story();
  std::string bytes = Bytes();
  bytes[start + 9] = static_cast<char>(bytes[start + 9] ^ 1);
  Overwrite(bytes);
  const auto report = Replay(path_, {});
  EXPECT_EQ(report.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(report.status().message()),
              HasSubstr(absl::StrCat("is damaged at byte ", start, " of ", bytes.size(),
                                     ": the checksum of the record is wrong")));
}

TEST_F(JournalTest, AnotherStateIsAnErrorThatNamesTheEvent) {
  Begin();
  Hello(1);
  // Records an event that the core never gets.
  writer_->Write(FromPeer{SessionId(1), control::Join{1, {"run", 0}, "t"}}, now_);
  writer_->Stepped(*core_);
  const auto report = Replay(path_, {});
  EXPECT_EQ(report.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("after event 3 the core is in"));
}

TEST_F(JournalTest, AtItsLimitItEndsAndTheCoordinatorGoesOn) {
  options_.bytes_max = 400;
  Begin();
  Story();
  EXPECT_LT(Bytes().size(), 420u);
  const auto report = Replay(path_, {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->limit_reached);
  EXPECT_LT(report->events, 15u);
}

TEST_F(JournalTest, WhatIsNoJournalIsRefused) {
  EXPECT_EQ(Replay(path_, {}).status().code(), absl::StatusCode::kNotFound);
  Overwrite("");
  EXPECT_EQ(Replay(path_, {}).status().code(), absl::StatusCode::kDataLoss);
  Overwrite(std::string(100000, 'x'));
  EXPECT_EQ(Replay(path_, {}).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace longhaul::coordinator
