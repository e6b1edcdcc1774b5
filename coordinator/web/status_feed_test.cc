#include "coordinator/web/status_feed.h"

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "coordinator/web/page.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// A group with `members` members, each at a peer of its own.
Overview MakeOverview(uint64_t members) {
  Overview overview;
  GroupView& group = overview.groups.emplace_back();
  group.group = {"demo", 0};
  group.committed = Epoch(4);
  group.state = StateRecord{17, {1, 2}, {3, 4}};
  for (uint64_t i = 1; i <= members; ++i) {
    MemberView member;
    member.member = MemberId(i);
    member.peer = PeerId(0x123456789abcdef0 + i);
    member.name = absl::StrCat("trainer-with-a-long-name-", i);
    member.joined = Epoch(1);
    group.members.push_back(member);
    PeerView peer;
    peer.peer = member.peer;
    peer.host = absl::StrCat("gpu-host-", i, ".cluster.example.org");
    peer.endpoint = absl::StrCat("10.20.30.", i % 256, ":29700");
    peer.attached = true;
    peer.load.bytes_sent = 123456789012 + i;
    peer.load.bytes_received = 123456789012 + i;
    peer.next = LinkView{1250000000, 12000, 3, true};
    group.ring.push_back(peer);
  }
  return overview;
}

class StatusFeedTest : public ::testing::Test {
 protected:
  void Start(std::chrono::milliseconds interval = std::chrono::milliseconds(1)) {
    StatusFeed::Options options;
    options.overview = [this]() -> absl::StatusOr<Overview> {
      ++asked_;
      MutexLock lock(&mutex_);
      if (!error_.ok()) return error_;
      return overview_;
    };
    options.streams = [] { return uint64_t{3}; };
    options.events = &events_;
    options.incarnation = "abcd";
    options.version = "1.2.3";
    options.store = "memory";
    options.detect_ms = 1500;
    options.interval = interval;
    options.alive = alive_;
    feed_ = std::make_unique<StatusFeed>(std::move(options));
  }
  void Set(Overview overview) {
    MutexLock lock(&mutex_);
    overview_ = std::move(overview);
  }
  void SetError(absl::Status error) {
    MutexLock lock(&mutex_);
    error_ = std::move(error);
  }
  void Happens(const std::string& kind, const std::string& text) {
    events_.Append({kind, {"demo", 0}, Epoch(4), MemberId(1), PeerId(), text}, 1000000);
  }
  // The next piece that is news.
  static std::string Read(const HttpStream& stream) {
    std::string piece;
    while (piece.empty()) {
      if (!stream(&piece)) return "the stream is over";
    }
    return piece;
  }
  // Reads until the stream has said `text`, and returns all of it.
  static std::string ReadUntil(const HttpStream& stream, const std::string& text) {
    std::string all;
    while (all.find(text) == std::string::npos) all += Read(stream);
    return all;
  }

  EventLog events_;
  std::atomic<uint64_t> asked_{0};
  Mutex mutex_;
  Overview overview_ ABSL_GUARDED_BY(mutex_) = MakeOverview(2);
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  std::chrono::milliseconds alive_ = std::chrono::hours(1);
  std::unique_ptr<StatusFeed> feed_;
};

TEST_F(StatusFeedTest, SnapshotHasGroupsMembersPeersAndEvents) {
  Happens("commit", "epoch committed \"quoted\" \x01");
  Start();
  const auto snapshot = feed_->Snapshot();
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_THAT(
      **snapshot,
      AllOf(StartsWith("{\"version\":1,\"base\":0,"), HasSubstr("\"incarnation\":\"abcd\""),
            HasSubstr("\"g:demo/0\":{\"run\":\"demo\",\"group\":0,\"epoch\":4,"),
            HasSubstr("\"members\":[\"m1\",\"m2\"]"), HasSubstr("\"revision\":17"),
            HasSubstr("\"m:demo/0/m2\":{\"peer\":\"p123456789abcdef2\""),
            HasSubstr("\"l:demo/0/p123456789abcdef1\":[0,0,123456789013,123456789013]"),
            HasSubstr("\"k:demo/0/p123456789abcdef1\":[1250000000,12000,1]"),
            HasSubstr("\"w:demo/0\":{\"waiting\":false,\"verdict\":\"the coordinator waits for"),
            HasSubstr("{\"sequence\":1,\"time_ms\":1000,\"kind\":\"commit\",\"group\":\"demo/0\""),
            HasSubstr("committed \\\"quoted\\\""), Not(HasSubstr("\x01"))));
}

TEST_F(StatusFeedTest, StreamBeginsWithASnapshotAndThenHasOnlyWhatChanges) {
  Start();
  const HttpStream stream = feed_->Stream();
  EXPECT_THAT(Read(stream), AllOf(StartsWith("data: {\"version\":1,\"base\":0,"),
                                  HasSubstr("\"m:demo/0/m2\""), ::testing::EndsWith("\n\n")));
  Overview next = MakeOverview(2);
  next.groups[0].members[0].voting = true;
  Set(next);
  EXPECT_THAT(Read(stream), AllOf(StartsWith("data: {\"version\":2,\"base\":1,"),
                                  HasSubstr("\"m:demo/0/m1\":{"), HasSubstr("\"voting\":true"),
                                  Not(HasSubstr("m:demo/0/m2")), Not(HasSubstr("head"))));
  Set(MakeOverview(1));
  EXPECT_THAT(Read(stream),
              AllOf(HasSubstr("\"gone\":["), HasSubstr("\"m:demo/0/m2\""),
                    HasSubstr("\"l:demo/0/p123456789abcdef2\""), HasSubstr("\"g:demo/0\":{")));
  Happens("death", "member died");
  EXPECT_THAT(Read(stream), AllOf(HasSubstr("\"set\":{},\"gone\":[]"), HasSubstr("member died")));
}

TEST_F(StatusFeedTest, SaysNothingWhileNothingChanges) {
  Start();
  const HttpStream stream = feed_->Stream();
  Read(stream);
  const uint64_t asked = asked_;
  std::string piece;
  // The feed looks again and again.
  while (asked_ < asked + 20) {
    ASSERT_TRUE(stream(&piece));
    ASSERT_EQ(piece, "");
  }
}

TEST_F(StatusFeedTest, SaysThatItIsAliveWhileNothingChanges) {
  alive_ = std::chrono::milliseconds(1);
  Start();
  const HttpStream stream = feed_->Stream();
  ReadUntil(stream, "\"base\":0");
  EXPECT_EQ(Read(stream), "event: alive\ndata: 1\n\n");
}

TEST_F(StatusFeedTest, StreamsShareTheWorkAndNobodyCausesNone) {
  Start(std::chrono::hours(1));
  std::vector<HttpStream> streams;
  for (int i = 0; i < 10; ++i) streams.push_back(feed_->Stream());
  for (const HttpStream& stream : streams) EXPECT_THAT(Read(stream), StartsWith("data: "));
  EXPECT_TRUE(feed_->Snapshot().ok());
  EXPECT_EQ(asked_, 1u);
  streams.clear();
  feed_.reset();

  Start();
  EXPECT_TRUE(feed_->Snapshot().ok());
  feed_.reset();
  EXPECT_EQ(asked_, 2u);
}

TEST_F(StatusFeedTest, AReaderThatMissedFramesGetsASnapshot) {
  Start();
  const HttpStream fast = feed_->Stream();
  const HttpStream slow = feed_->Stream();
  Read(slow);
  for (size_t i = 0; i <= kFeedFramesMax + 2; ++i) {
    Happens("join", absl::StrCat("number ", i, "."));
    ReadUntil(fast, absl::StrCat("number ", i, "."));
  }
  EXPECT_THAT(Read(slow), AllOf(HasSubstr("\"base\":0,"), HasSubstr("number 0."),
                                HasSubstr(absl::StrCat("number ", kFeedFramesMax + 2, "."))));
}

TEST_F(StatusFeedTest, KeepsTheNewestEvents) {
  for (size_t i = 1; i <= 3 * kFeedEventsMax; ++i) Happens("join", absl::StrCat("number ", i, "."));
  Start();
  const auto snapshot = feed_->Snapshot();
  ASSERT_TRUE(snapshot.ok());
  EXPECT_THAT(**snapshot, AllOf(HasSubstr(absl::StrCat("number ", 3 * kFeedEventsMax, ".")),
                                HasSubstr(absl::StrCat("number ", 2 * kFeedEventsMax + 1, ".")),
                                Not(HasSubstr(absl::StrCat("number ", 2 * kFeedEventsMax, ".")))));
}

TEST_F(StatusFeedTest, WhatComesWithEachStepDisplacesNothingRare) {
  Happens("death", "member died long ago");
  for (size_t i = 1; i <= 2000; ++i) Happens("sync", absl::StrCat("step ", i, "."));
  Start();
  const auto snapshot = feed_->Snapshot();
  ASSERT_TRUE(snapshot.ok());
  EXPECT_THAT(**snapshot,
              AllOf(HasSubstr("member died long ago"), HasSubstr("step 2000."),
                    Not(HasSubstr(absl::StrCat("step ", 2000 - kFeedRoutineMax, ".")))));
}

TEST_F(StatusFeedTest, ALoopThatDoesNotAnswerIsSaidAndWhatWasKnownStays) {
  Start();
  const HttpStream stream = feed_->Stream();
  Read(stream);
  SetError(absl::DeadlineExceededError("the loop did not answer"));
  EXPECT_THAT(Read(stream),
              AllOf(HasSubstr("\"error\":\"the loop did not answer\""), HasSubstr("\"gone\":[]")));
  EXPECT_THAT(**feed_->Snapshot(), HasSubstr("\"m:demo/0/m2\""));
  SetError(absl::OkStatus());
  EXPECT_THAT(Read(stream), HasSubstr("\"error\":\"\""));
}

TEST_F(StatusFeedTest, StopEndsStreamsThatWait) {
  Start(std::chrono::hours(1));
  const HttpStream stream = feed_->Stream();
  Read(stream);
  feed_->Stop();
  std::string piece;
  EXPECT_FALSE(stream(&piece));
  EXPECT_EQ(feed_->Snapshot().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(StatusFeedTest, ForeignBytesBecomeValidText) {
  Overview overview = MakeOverview(1);
  overview.groups[0].members[0].name = "</script>\xff\n\"";
  Set(overview);
  Start();
  const std::string text = **feed_->Snapshot();
  EXPECT_THAT(text, AllOf(HasSubstr("</script>"), Not(HasSubstr("\xff")), Not(HasSubstr("\n"))));
}

TEST_F(StatusFeedTest, TheFirstLoadWith200MembersIsSmall) {
  for (size_t i = 0; i < kFeedEventsMax; ++i) Happens("join", std::string(400, 'x'));
  Set(MakeOverview(200));
  Start();
  const HttpStream stream = feed_->Stream();
  const size_t bytes = Read(stream).size() + std::string(kPageHtml).size();
  RecordProperty("bytes", static_cast<int>(bytes));
  printf("first load: %zu bytes\n", bytes);
  EXPECT_LT(bytes, 1000000u / 3);
}

TEST(Page, PolicyAllowsNoForeignOrInlineSource) {
  EXPECT_THAT(std::string(kPagePolicy),
              AllOf(HasSubstr("default-src 'none'"), HasSubstr("script-src 'sha256-"),
                    HasSubstr("frame-ancestors 'none'"), Not(HasSubstr("unsafe"))));
  EXPECT_THAT(std::string(kPageHtml),
              AllOf(HasSubstr("<!DOCTYPE html>"), HasSubstr("</html>"), Not(HasSubstr("innerHTML")),
                    Not(HasSubstr("style=\""))));
}

}  // namespace
}  // namespace longhaul::coordinator
