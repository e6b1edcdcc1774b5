// Tests the loop with the real core, and with a store that a test can make fail or wait.
#include "coordinator/loop/loop.h"

#include <atomic>
#include <deque>
#include <future>

#include "base/log_lines.h"
#include "base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kDeadline{30};

// Keeps what the store got and what sessions were sent, in order.
class Journal {
 public:
  void Add(std::string line) {
    MutexLock lock(&mutex_);
    lines_.push_back(std::move(line));
    changed_.SignalAll();
  }
  // Waits for a line that begins with `beginning`, and takes all lines up to it. "": none came in
  // time.
  std::string TakeUntil(const std::string& beginning) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    MutexLock lock(&mutex_);
    while (true) {
      while (!lines_.empty()) {
        std::string line = std::move(lines_.front());
        lines_.pop_front();
        if (line.rfind(beginning, 0) == 0) return line;
      }
      const auto left = deadline - std::chrono::steady_clock::now();
      if (left <= left.zero()) return "";
      changed_.WaitFor(&mutex_, left);
    }
  }
  std::vector<std::string> Lines() {
    MutexLock lock(&mutex_);
    return {lines_.begin(), lines_.end()};
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

class FakeStore final : public Store {
 public:
  explicit FakeStore(Journal* journal) : journal_(journal) {}
  absl::StatusOr<Records> Load() override { return records_; }
  absl::Status Apply(const std::vector<Mutation>& mutations) override {
    journal_->Add("persist");
    if (fail_) return absl::UnavailableError("disk on fire");
    for (const Mutation& mutation : mutations) coordinator::Apply(mutation, &records_);
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<TokenRecord>> LoadTokens() override { return tokens_; }
  absl::Status ChangeTokens(const TokenChange& change) override {
    journal_->Add("tokens");
    if (fail_) return absl::UnavailableError("disk on fire");
    if (change.put) tokens_.push_back(*change.put);
    return absl::OkStatus();
  }
  std::string Name() const override { return "fake"; }

  std::atomic<bool> fail_{false};

 private:
  Journal* const journal_;
  Records records_;
  std::vector<TokenRecord> tokens_;
};

class FakePort final : public SessionPort {
 public:
  FakePort(Journal* journal, std::string name) : journal_(journal), name_(std::move(name)) {}
  void Send(const control::CoordinatorMessage& message) override {
    static constexpr const char* kNames[] = {"welcome", "pending", "refused", "voted",   "prepare",
                                             "commit",  "abort",   "removed", "waiting", "drain"};
    if (const auto* pending = std::get_if<control::JoinPending>(&message)) {
      member_ = pending->member.value();
    }
    if (const auto* prepare = std::get_if<control::PrepareEpoch>(&message)) {
      epoch_ = prepare->epoch.value();
      preparation_ = prepare->preparation;
    }
    journal_->Add(name_ + " " + kNames[message.index()]);
  }
  void Close(StreamEnd, const std::string& reason) override {
    journal_->Add(name_ + " closed " + reason);
  }
  void Accepted() override { journal_->Add(name_ + " accepted"); }
  std::optional<Denial> ObjectionTo(const control::Join& join,
                                    const CoordinatorCore& core) override {
    if (core.KnowsJoin(peer_, join)) return std::nullopt;
    if (core.HoldingsOf({peer_}).members < members_max_) return std::nullopt;
    return Denial{TokenRefusal::kQuota, "too many"};
  }

  PeerId peer() const override { return peer_; }

  const PeerId peer_{1};
  std::atomic<size_t> members_max_{SIZE_MAX};
  std::atomic<uint64_t> member_{0};
  std::atomic<uint64_t> epoch_{0};
  std::atomic<uint64_t> preparation_{0};

 private:
  Journal* const journal_;
  const std::string name_;
};

control::Hello HelloOf(uint64_t peer) {
  control::Hello hello;
  hello.peer = PeerId(peer);
  hello.endpoints = {"10.0.0.1:29700"};
  hello.protocol = control::kProtocolVersion;
  hello.host = "h";
  return hello;
}

class LoopTest : public ::testing::Test {
 protected:
  void Start(uint32_t detect_ms = 60000) {
    CoordinatorLoop::Options options;
    options.core.incarnation = "c1";
    options.core.detect_ms = detect_ms;
    options.core.entropy = std::string(32, 'e');
    options.now = [this] {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      return Tick{std::chrono::duration_cast<std::chrono::microseconds>(now).count() + later_us_};
    };
    options.fatal = [this](const absl::Status& status) {
      journal_.Add("fatal " + std::string(status.message()));
    };
    auto store = std::make_unique<FakeStore>(&journal_);
    store_ = store.get();
    auto loop = CoordinatorLoop::Start(std::move(options), std::move(store), &metrics_);
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
  }
  // Attaches a peer with one admitted member.
  SessionId Join(const std::shared_ptr<FakePort>& port, const std::string& name, uint64_t peer) {
    const std::optional<SessionId> session = loop_->OpenSession(port);
    EXPECT_TRUE(session.has_value());
    loop_->PostMessage(*session, HelloOf(peer));
    EXPECT_NE(journal_.TakeUntil(name + " accepted"), "");
    loop_->PostMessage(*session, control::Join{1, {"run", 0}, "t"});
    EXPECT_NE(journal_.TakeUntil(name + " accepted"), "");
    loop_->PostMessage(
        *session, control::EpochReady{{"run", 0}, Epoch(port->epoch_), {}, port->preparation_});
    EXPECT_NE(journal_.TakeUntil(name + " accepted"), "");
    return *session;
  }

  std::atomic<int64_t> later_us_{0};
  Journal journal_;
  CoordinatorMetrics metrics_;
  FakeStore* store_ = nullptr;
  std::unique_ptr<CoordinatorLoop> loop_;
};

TEST_F(LoopTest, APeerThatIsRefusedAllTheTimeDoesNotPushOthersEventsOut) {
  Start();
  auto port = std::make_shared<FakePort>(&journal_, "a");
  port->members_max_ = 1;
  const SessionId session = Join(port, "a", 1);
  const LogLines log;
  for (uint64_t request = 2; request < 2002; ++request) {
    loop_->PostMessage(session, control::Join{request, {"run", 1}, "t"});
    ASSERT_EQ(journal_.TakeUntil("a accepted"), "a accepted");
  }
  ASSERT_TRUE(loop_->Ping(kDeadline).ok());
  EXPECT_LT(loop_->events().newest(), 250u);
  EXPECT_EQ(log.Count("join refused"), 200);
  EXPECT_THAT(metrics_.Text(), HasSubstr("longhaul_coordinator_joins_refused_total 2000\n"));
  later_us_ = Seconds(61);
  ASSERT_TRUE(loop_->Ping(kDeadline).ok());
  ASSERT_TRUE(loop_->Ping(kDeadline).ok());
  EXPECT_EQ(log.Count("and 1800 more like this in 60 s event=refuse peer=p1"), 1);
  EXPECT_THAT(loop_->events().Read(0, 1000).back().event.text, HasSubstr("and 1800 more"));
}

TEST_F(LoopTest, PersistsBeforeItAnswers) {
  Start();
  auto port = std::make_shared<FakePort>(&journal_, "a");
  const auto session = loop_->OpenSession(port);
  ASSERT_TRUE(session.has_value());
  loop_->PostMessage(*session, HelloOf(1));
  ASSERT_NE(journal_.TakeUntil("a accepted"), "");
  loop_->PostMessage(*session, control::Join{1, {"run", 0}, "t"});
  ASSERT_EQ(journal_.TakeUntil("a pending"), "a pending");
  loop_->PostMessage(*session, control::Join{2, {"run", 1}, "t"});
  ASSERT_NE(journal_.TakeUntil("a accepted"), "");
  ASSERT_EQ(journal_.TakeUntil("persist"), "persist");
  EXPECT_EQ(journal_.TakeUntil("a pending"), "a pending");
}

TEST_F(LoopTest, NothingLeavesAfterTheStoreFailed) {
  Start();
  auto port = std::make_shared<FakePort>(&journal_, "a");
  const auto session = loop_->OpenSession(port);
  loop_->PostMessage(*session, HelloOf(1));
  ASSERT_NE(journal_.TakeUntil("a accepted"), "");
  store_->fail_ = true;
  loop_->PostMessage(*session, control::Join{1, {"run", 0}, "t"});
  EXPECT_EQ(journal_.TakeUntil("fatal"), "fatal disk on fire");
  // After the failure the loop answers requests with an error and opens no session.
  EXPECT_EQ(loop_->QueryAndWait(kDeadline).status().code(), absl::StatusCode::kUnavailable);
  loop_->PostMessage(*session, control::Join{2, {"run", 0}, "t"});
  loop_->CloseSession(*session);
  EXPECT_FALSE(loop_->OpenSession(port).has_value());
  loop_.reset();
  for (const std::string& line : journal_.Lines()) EXPECT_THAT(line, HasSubstr("nothing more"));
}

TEST_F(LoopTest, AdmitsAMemberAndShowsIt) {
  Start();
  auto port = std::make_shared<FakePort>(&journal_, "a");
  Join(port, "a", 0x1f);
  const auto overview = loop_->QueryAndWait(kDeadline);
  ASSERT_TRUE(overview.ok()) << overview.status();
  ASSERT_EQ(overview->groups.size(), 1u);
  EXPECT_EQ(overview->groups[0].members[0].joined, overview->groups[0].committed);
  EXPECT_EQ(overview->groups[0].ring[0].peer, PeerId(0x1f));
  std::vector<std::string> kinds;
  for (const StampedEvent& event : loop_->events().Read(0, 100)) kinds.push_back(event.event.kind);
  EXPECT_THAT(kinds, ::testing::IsSupersetOf({"attach", "join", "prepare", "admit", "commit"}));
  const std::string text = metrics_.Text();
  EXPECT_THAT(text, HasSubstr("longhaul_coordinator_epochs_total{cause=\"admit\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("longhaul_coordinator_preparation_seconds_count 1\n"));
  EXPECT_THAT(text, HasSubstr("longhaul_coordinator_streams 1\n"));
}

TEST_F(LoopTest, ClosesASessionThatBreaksTheProtocol) {
  Start();
  auto port = std::make_shared<FakePort>(&journal_, "a");
  const auto session = loop_->OpenSession(port);
  loop_->PostMessage(*session, control::Heartbeat{});
  EXPECT_THAT(journal_.TakeUntil("a closed"), HasSubstr("first message is not Hello"));
  loop_->CloseSession(*session);
  EXPECT_TRUE(loop_->QueryAndWait(kDeadline).ok());
  EXPECT_EQ(loop_->sessions(), 0u);
}

TEST_F(LoopTest, TimePassesWithoutMail) {
  Start(/*detect_ms=*/1);
  auto port = std::make_shared<FakePort>(&journal_, "a");
  ASSERT_TRUE(loop_->OpenSession(port).has_value());
  EXPECT_THAT(journal_.TakeUntil("a closed"), HasSubstr("silent for 4 ms"));
}

TEST_F(LoopTest, EvictsAndDrainsWhatThereIs) {
  Start();
  auto port = std::make_shared<FakePort>(&journal_, "a");
  Join(port, "a", 1);
  const auto wait = [](auto start) {
    std::promise<absl::Status> promise;
    start([&promise](const absl::Status& status) { promise.set_value(status); });
    return promise.get_future().get();
  };
  const auto evict = [&](uint64_t member) {
    return wait([&](CoordinatorLoop::Done done) {
      loop_->Evict({{"run", 0}, MemberId(member), "why"}, std::move(done));
    });
  };
  const auto drain = [&](uint64_t peer) {
    return wait([&](CoordinatorLoop::Done done) {
      loop_->Drain({PeerId(peer), "why"}, std::move(done));
    });
  };
  EXPECT_EQ(evict(99).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(drain(99).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(drain(1).ok());
  EXPECT_EQ(journal_.TakeUntil("a drain"), "a drain");
  EXPECT_TRUE(evict(port->member_).ok());
  EXPECT_EQ(journal_.TakeUntil("a removed"), "a removed");
  EXPECT_EQ(evict(port->member_).code(), absl::StatusCode::kNotFound);

  // A peer without members can be drained, too.
  auto idle = std::make_shared<FakePort>(&journal_, "b");
  const auto session = loop_->OpenSession(idle);
  loop_->PostMessage(*session, HelloOf(2));
  ASSERT_EQ(journal_.TakeUntil("b welcome"), "b welcome");
  EXPECT_TRUE(drain(2).ok());
  EXPECT_EQ(journal_.TakeUntil("b drain"), "b drain");
}

TEST_F(LoopTest, ADrainIsAcknowledgedOnlyWhenItIsWritten) {
  Start();
  auto port = std::make_shared<FakePort>(&journal_, "a");
  const auto session = loop_->OpenSession(port);
  loop_->PostMessage(*session, HelloOf(1));
  ASSERT_NE(journal_.TakeUntil("a accepted"), "");
  store_->fail_ = true;
  std::promise<absl::Status> answer;
  loop_->Drain({PeerId(1), "why"},
               [&answer](const absl::Status& status) { answer.set_value(status); });
  EXPECT_EQ(answer.get_future().get().code(), absl::StatusCode::kUnavailable);
}

TEST_F(LoopTest, APingIsAnsweredWhenTheMailBeforeItIsHandled) {
  Start();
  auto port = std::make_shared<FakePort>(&journal_, "a");
  ASSERT_TRUE(loop_->OpenSession(port).has_value());
  EXPECT_TRUE(loop_->Ping(kDeadline).ok());
  EXPECT_EQ(loop_->queued(), 0u);
  const std::string text = metrics_.Text();
  EXPECT_THAT(text, HasSubstr("longhaul_coordinator_streams 1\n"));
  EXPECT_THAT(text, HasSubstr("longhaul_coordinator_loop_lag_seconds_count 2\n"));
}

TEST_F(LoopTest, AJoinToWhichTheStreamObjectsIsRefusedAndTheCoreDoesNotHearOfIt) {
  Start();
  auto port = std::make_shared<FakePort>(&journal_, "a");
  port->members_max_ = 1;
  const SessionId session = Join(port, "a", 1);
  loop_->PostMessage(session, control::Join{2, {"run", 1}, "t"});
  EXPECT_EQ(journal_.TakeUntil("a refused"), "a refused");
  EXPECT_EQ(journal_.TakeUntil("a accepted"), "a accepted");
  // The first join again: a peer repeats it if it has lost the answer.
  loop_->PostMessage(session, control::Join{1, {"run", 0}, "t"});
  EXPECT_EQ(journal_.TakeUntil("a pending"), "a pending");
  const auto overview = loop_->QueryAndWait(kDeadline);
  ASSERT_TRUE(overview.ok()) << overview.status();
  EXPECT_EQ(overview->groups.size(), 1u);
  EXPECT_EQ(loop_->events().Read(0, 100).back().event.kind, "refuse");
  EXPECT_EQ(loop_->events().Read(0, 100).back().event.text,
            "join refused peer=p1 reason=\"too many\"");
  const std::string text = metrics_.Text();
  EXPECT_THAT(text, HasSubstr("longhaul_coordinator_joins_refused_total 1\n"));
  EXPECT_THAT(text, HasSubstr("longhaul_coordinator_callers_refused_total{reason=\"quota\"} 1\n"));
}

TEST_F(LoopTest, AChangeOfTokensIsAcknowledgedOnlyWhenItIsWritten) {
  Start();
  const auto change = [this] {
    std::promise<absl::Status> answer;
    TokenChange put;
    put.put = TokenRecord{};
    loop_->ChangeTokens(put, [&](const absl::Status& status) { answer.set_value(status); });
    return answer.get_future().get();
  };
  EXPECT_TRUE(change().ok());
  EXPECT_EQ(journal_.TakeUntil("tokens"), "tokens");
  store_->fail_ = true;
  EXPECT_TRUE(absl::IsUnavailable(change()));
  EXPECT_EQ(journal_.TakeUntil("fatal"), "fatal disk on fire");
  EXPECT_TRUE(absl::IsUnavailable(change()));
}

TEST_F(LoopTest, CountsAMemberThatLeavesApartFromOneThatDies) {
  Start();
  auto a = std::make_shared<FakePort>(&journal_, "a");
  const SessionId session = Join(a, "a", 1);
  loop_->PostMessage(session, control::Leave{{"run", 0}, MemberId(a->member_), false, "over"});
  ASSERT_NE(journal_.TakeUntil("a accepted"), "");
  EXPECT_THAT(metrics_.Text(), HasSubstr("members_removed_total{cause=\"leave\"} 1\n"));
  EXPECT_THAT(metrics_.Text(), HasSubstr("members_removed_total{cause=\"trainer_died\"} 0\n"));
}

TEST_F(LoopTest, SessionsAreBoundedAndGivenBack) {
  Start();
  auto port = std::make_shared<FakePort>(&journal_, "a");
  std::vector<SessionId> sessions;
  for (size_t i = 0; i < kSessionsMax; ++i) sessions.push_back(*loop_->OpenSession(port));
  EXPECT_FALSE(loop_->OpenSession(port).has_value());
  for (const SessionId session : sessions) loop_->CloseSession(session);
  ASSERT_TRUE(loop_->QueryAndWait(kDeadline).ok());
  EXPECT_TRUE(loop_->OpenSession(port).has_value());
}

TEST_F(LoopTest, StopsWithRequestsWaiting) {
  Start();
  std::atomic<int> answered{0};
  for (int i = 0; i < 100; ++i) {
    loop_->Query([&answered](const absl::StatusOr<Overview>&) { ++answered; });
  }
  loop_.reset();
  EXPECT_EQ(answered, 100);
}

}  // namespace
}  // namespace longhaul::coordinator
