// The HTTP port of a coordinator with the real loop and core, and peers that only send heartbeats.
#include "coordinator/web/web.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/daemon/host_port.h"
#include "coordinator/store/store.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// The processor time of this process.
double ProcessSeconds() {
  struct timespec time {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

class HeartbeatPort final : public SessionPort {
 public:
  void Send(const control::CoordinatorMessage&) override {}
  void Close(StreamEnd, const std::string& reason) override {
    ADD_FAILURE() << "closed: " << reason;
  }
  void Accepted() override {
    accepted_.fetch_add(1);
    accepted_.notify_all();
  }
  // Waits until the loop has taken `count` messages.
  void Wait(int count) const {
    for (int now = accepted_; now < count; now = accepted_) accepted_.wait(now);
  }

 private:
  std::atomic<int> accepted_{0};
};

class Client {
 public:
  Client(const std::string& address, const std::string& path) {
    struct sockaddr_in to {};
    to.sin_family = AF_INET;
    to.sin_port = htons(ParseHostPort(address)->port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(connect(fd_, reinterpret_cast<struct sockaddr*>(&to), sizeof to), 0);
    const std::string request = "GET " + path + " HTTP/1.1\r\nHost: h\r\n\r\n";
    EXPECT_EQ(send(fd_, request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
  }
  ~Client() { close(fd_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Reads until `text` has come, or the end; returns what was read since the last call.
  std::string ReadUntil(const std::string& text) {
    char buffer[65536];
    while (true) {
      if (const size_t at = read_.find(text); at != std::string::npos) {
        std::string all = read_.substr(0, at + text.size());
        read_.erase(0, at + text.size());
        return all;
      }
      const ssize_t got = recv(fd_, buffer, sizeof buffer, 0);
      if (got <= 0) return std::exchange(read_, "");
      read_.append(buffer, static_cast<size_t>(got));
    }
  }
  std::string ReadAll() { return ReadUntil(std::string("\0 never", 7)); }

 private:
  int fd_ = -1;
  std::string read_;
};

class WebTest : public ::testing::Test {
 protected:
  // A coordinator whose store has one group with this many members, each at a peer of its own.
  void Start(uint64_t members) {
    std::unique_ptr<Store> store = MakeMemoryStore();
    GroupRecord group;
    group.group = {"demo", 0};
    group.committed = group.highest = group.boundary = Epoch(4);
    for (uint64_t i = 1; i <= members; ++i) {
      MemberRecord member;
      member.member = MemberId(i);
      member.peer = PeerId(i);
      member.name = absl::StrCat("trainer-", i);
      member.joined = Epoch(1);
      group.members.push_back(member);
      group.peers.push_back({PeerId(i), {Endpoint(i)}, 2, absl::StrCat("host-", i)});
    }
    EXPECT_TRUE(store
                    ->Apply({PutStore{{77, 1}},
                             PutRun{{"demo", members + 1, std::string(kSecretBytes, 's')}},
                             PutGroup{group}})
                    .ok());
    CoordinatorLoop::Options options;
    options.core.incarnation = "abcd";
    options.core.store = 77;
    options.core.detect_ms = 60000;
    options.core.entropy = std::string(32, 'e');
    auto loop = CoordinatorLoop::Start(std::move(options), std::move(store), &metrics_);
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
    auto web = Web::Start("127.0.0.1:0", loop_.get(), &metrics_);
    ASSERT_TRUE(web.ok()) << web.status();
    web_ = *std::move(web);
  }
  static std::string Endpoint(uint64_t i) { return absl::StrCat("10.0.0.", i % 256, ":29700"); }

  void Attach(uint64_t members) {
    for (uint64_t i = 1; i <= members; ++i) {
      ports_.push_back(std::make_shared<HeartbeatPort>());
      sessions_.push_back(*loop_->OpenSession(ports_.back()));
      control::Hello hello;
      hello.peer = PeerId(i);
      hello.endpoints = {Endpoint(i)};
      hello.protocol = control::kProtocolVersion;
      hello.host = absl::StrCat("host-", i);
      control::GroupState state;
      state.group = {"demo", 0};
      state.committed = Epoch(4);
      state.members = {MemberId(i)};
      hello.groups = {state};
      hello.store = 77;
      hello.term = 1;
      loop_->PostMessage(sessions_.back(), hello);
    }
    for (const auto& port : ports_) port->Wait(1);
    sent_ = 1;
  }
  // All peers send a heartbeat; member i has sent `bytes` + i.
  void Beat(uint64_t bytes) {
    for (size_t i = 0; i < sessions_.size(); ++i) {
      control::Heartbeat heartbeat;
      heartbeat.loads.push_back({{"demo", 0}, 1, bytes, bytes + i + 1, bytes});
      loop_->PostMessage(sessions_[i], heartbeat);
    }
    ++sent_;
    for (const auto& port : ports_) port->Wait(sent_);
  }
  void TearDown() override {
    web_.reset();
    for (const SessionId session : sessions_) loop_->CloseSession(session);
  }
  std::string Get(const std::string& path) { return Client(web_->address(), path).ReadAll(); }

  CoordinatorMetrics metrics_;
  std::unique_ptr<CoordinatorLoop> loop_;
  std::unique_ptr<Web> web_;
  std::vector<std::shared_ptr<HeartbeatPort>> ports_;
  std::vector<SessionId> sessions_;
  int sent_ = 0;
};

TEST_F(WebTest, AnswersItsPaths) {
  Start(2);
  EXPECT_THAT(Get("/"), AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("Content-Type: text/html"),
                              HasSubstr("Content-Security-Policy: default-src 'none'; script-src "),
                              HasSubstr("X-Content-Type-Options: nosniff"),
                              HasSubstr("Cache-Control: no-store"), HasSubstr("</html>")));
  EXPECT_THAT(Get("/status.json"),
              AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("Content-Type: application/json"),
                    HasSubstr("\"m:demo/0/m2\":{\"peer\":\"p2\",\"name\":\"trainer-2\"")));
  EXPECT_THAT(Get("/metrics"), HasSubstr("\nlonghaul_coordinator_members 2\n"));
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get("/x"), AllOf(StartsWith("HTTP/1.1 404"), HasSubstr("/status.json")));
  web_->SetStopping();
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 503"));
}

TEST_F(WebTest, StreamsWhatHeartbeatsBring) {
  Start(2);
  Client client(web_->address(), "/status.events");
  EXPECT_THAT(client.ReadUntil("\n\n"),
              AllOf(HasSubstr("Content-Type: text/event-stream"), HasSubstr("\"attached\":false")));
  Attach(2);
  client.ReadUntil("\"attached\":true");
  Beat(1000);
  EXPECT_THAT(client.ReadUntil("\"l:demo/0/p2\":[1,1000,1002,1000]"), Not(HasSubstr("HTTP")));
}

TEST_F(WebTest, EndsWhileAPageLooks) {
  Start(2);
  Client client(web_->address(), "/status.events");
  client.ReadUntil("\n\n");
  web_.reset();
  EXPECT_EQ(client.ReadUntil("more"), "");
}

// The page may use 5 % of one processor with 200 members and at most four frames a second.
TEST_F(WebTest, WithMoreMembersThePageStaysCheap) {
  constexpr uint64_t kMembers = 200;
  constexpr int kFrames = 10;
  Start(kMembers);
  Attach(kMembers);
  uint64_t bytes = 1000000;
  const double begun = ProcessSeconds();
  for (int i = 0; i < kFrames; ++i) Beat(++bytes);
  const double without = ProcessSeconds() - begun;

  Client first(web_->address(), "/status.events");
  Client second(web_->address(), "/status.events");
  const size_t first_bytes = first.ReadUntil("\n\n").size();
  second.ReadUntil("\n\n");
  const double watched = ProcessSeconds();
  size_t frame_bytes = 0;
  for (int i = 0; i < kFrames; ++i) {
    Beat(++bytes);
    const std::string last =
        absl::StrCat("/p", "c8", "\":[1,", bytes, ",", bytes + kMembers, ",", bytes, "]");
    frame_bytes += first.ReadUntil(last).size();
    second.ReadUntil(last);
  }
  const double frame_s = (ProcessSeconds() - watched - without) / kFrames;
  printf(
      "snapshot: %zu bytes; a frame in which all loads change: %zu bytes, %.2f ms of processor "
      "time with two pages; four a second: %.2f %% of one processor\n",
      first_bytes, frame_bytes / kFrames, frame_s * 1e3, frame_s * 4 * 100);
  EXPECT_LT(first_bytes, 200000u);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__OPTIMIZE__)
  EXPECT_LT(frame_s * 4, 0.05);
#endif
}

}  // namespace
}  // namespace longhaul::coordinator
