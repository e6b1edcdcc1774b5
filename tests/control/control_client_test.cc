// Tests the peer's control client with a real coordinator, over loopback.
#include "peerd/control/control_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/crypto/identity.h"
#include "base/daemon/host_port.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "coordinator/server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::chrono::seconds kDeadline{20};

// Keeps one line of text for each callback of the client.
class Owner {
 public:
  peerd::ControlClientCallbacks Callbacks() {
    peerd::ControlClientCallbacks callbacks;
    callbacks.connected = [this] {
      Add("connected");
      return !full_of_streams_;
    };
    callbacks.disconnected = [this](const std::string& reason) { Add("disconnected " + reason); };
    callbacks.message = [this](control::CoordinatorMessage message) {
      if (const auto* welcome = std::get_if<control::Welcome>(&message)) {
        welcome_store_ = welcome->store;
        Add(absl::StrCat("welcome ", welcome->coordinator));
      } else if (const auto* pending = std::get_if<control::JoinPending>(&message)) {
        Add(absl::StrCat("pending ", pending->request));
      } else if (const auto* prepare = std::get_if<control::PrepareEpoch>(&message)) {
        preparation_ = prepare->preparation;
        Add("prepare " + ToString(prepare->epoch));
      } else if (const auto* commit = std::get_if<control::CommitEpoch>(&message)) {
        Add("commit " + ToString(commit->epoch));
      } else {
        Add("message");
      }
      return !full_;
    };
    return callbacks;
  }

  // Waits for the next line. "": none came in time.
  std::string Next() {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    MutexLock lock(&mutex_);
    while (lines_.empty()) {
      const auto left = deadline - std::chrono::steady_clock::now();
      if (left <= left.zero()) return "";
      changed_.WaitFor(&mutex_, left);
    }
    std::string line = std::move(lines_.front());
    lines_.pop_front();
    return line;
  }
  std::string NextWith(const std::string& beginning) {
    std::string line;
    do {
      line = Next();
    } while (!line.empty() && line.rfind(beginning, 0) != 0);
    return line;
  }

  // Makes the owner refuse messages, or take them again.
  void SetFull(bool full) { full_ = full; }
  // Makes the owner refuse new streams, or take them again.
  void SetFullOfStreams(bool full) { full_of_streams_ = full; }
  // What the last PrepareEpoch said, and the last Welcome.
  uint64_t preparation() const { return preparation_; }
  uint64_t welcome_store() const { return welcome_store_; }

 private:
  void Add(std::string line) {
    MutexLock lock(&mutex_);
    lines_.push_back(std::move(line));
    changed_.SignalAll();
  }

  std::atomic<bool> full_ = false, full_of_streams_ = false;
  Mutex mutex_;
  CondVar changed_;
  std::atomic<uint64_t> preparation_{0};
  std::atomic<uint64_t> welcome_store_{0};
  std::deque<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

// The client of these tests has this key.
Identity TheIdentity() { return Identity::ForTest(1); }

control::Hello HelloOfPeer() {
  control::Hello hello;
  hello.peer = TheIdentity().peer();
  hello.endpoints = {"10.0.0.1:29700"};
  hello.protocol = control::kProtocolVersion;
  hello.host = "host";
  return hello;
}

std::unique_ptr<coordinator::Server> StartServer(const std::string& listen = "127.0.0.1:0",
                                                 const std::string& store = "memory") {
  coordinator::ServerOptions options;
  options.listen = listen;
  options.store = store;
  options.core.detect_ms = 30000;
  auto server = coordinator::Server::Start(options);
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

class ControlClientTest : public ::testing::Test {
 protected:
  void Connect(std::vector<std::string> addresses) {
    peerd::ControlClientOptions options;
    options.identity = TheIdentity();
    options.addresses = std::move(addresses);
    options.pause_ms_min = 1;
    options.pause_ms_max = 20;
    client_ = peerd::MakeControlClient(std::move(options), owner_.Callbacks());
  }

  Owner owner_;
  std::unique_ptr<peerd::ControlClient> client_;
};

TEST_F(ControlClientTest, CarriesMessagesBothWays) {
  const auto server = StartServer();
  Connect({server->grpc_address()});
  ASSERT_EQ(owner_.Next(), "connected");
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_EQ(owner_.Next(), "welcome " + server->incarnation());
  ASSERT_TRUE(client_->Send(control::Join{7, {"run", 0}, "t"}));
  EXPECT_EQ(owner_.Next(), "pending 7");
}

TEST_F(ControlClientTest, DropsWhatComesBeforeHelloAndASecondHello) {
  const auto server = StartServer();
  Connect({server->grpc_address()});
  EXPECT_FALSE(client_->Send(control::Draining{}));
  ASSERT_EQ(owner_.Next(), "connected");
  EXPECT_FALSE(client_->Send(control::Join{7, {"run", 0}, "t"}));
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_FALSE(client_->Send(HelloOfPeer()));
  EXPECT_TRUE(client_->Send(control::Join{8, {"run", 0}, "t"}));
  EXPECT_THAT(owner_.Next(), StartsWith("welcome"));
  EXPECT_EQ(owner_.Next(), "pending 8");
}

TEST_F(ControlClientTest, ComesBackToACoordinatorThatRestartsOnItsPort) {
  auto server = StartServer();
  const std::string address = server->grpc_address();
  Connect({address});
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(owner_.NextWith("connected"), "connected");
    ASSERT_TRUE(client_->Send(HelloOfPeer()));
    EXPECT_EQ(owner_.Next(), "welcome " + server->incarnation());
    server.reset();
    EXPECT_THAT(owner_.Next(), AllOf(StartsWith("disconnected control stream to coordinator"),
                                     HasSubstr("shutting down")));
    server = StartServer(address);
  }
}

TEST_F(ControlClientTest, GivesUpAStreamWhoseMessagesItsOwnerHasNoRoomFor) {
  const auto server = StartServer();
  Connect({server->grpc_address()});
  ASSERT_EQ(owner_.Next(), "connected");
  owner_.SetFull(true);
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_THAT(owner_.NextWith("disconnected"),
              HasSubstr("too many messages of the coordinator still to read"));
  // The peer shows its key, so its new stream replaces the first one at once.
  ASSERT_EQ(owner_.NextWith("connected"), "connected");
  owner_.SetFull(false);
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_EQ(owner_.Next(), "welcome " + server->incarnation());
}

// Without this the stream would stay open, and nobody would say Hello on it.
TEST_F(ControlClientTest, GivesUpAStreamWhoseBeginningItsOwnerHasNoRoomFor) {
  const auto server = StartServer();
  owner_.SetFullOfStreams(true);
  Connect({server->grpc_address()});
  ASSERT_EQ(owner_.Next(), "connected");
  EXPECT_THAT(owner_.Next(), HasSubstr("too many messages of the coordinator still to read"));
  owner_.SetFullOfStreams(false);
  ASSERT_EQ(owner_.NextWith("connected"), "connected");
}

TEST_F(ControlClientTest, MemberOutlivesTheCoordinatorThroughItsStore) {
  const std::string store =
      absl::StrCat("sqlite:", ::testing::TempDir(), "/control_client_", getpid(), ".db");
  auto server = StartServer("127.0.0.1:0", store);
  const std::string address = server->grpc_address();
  Connect({address});
  ASSERT_EQ(owner_.Next(), "connected");
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  ASSERT_TRUE(client_->Send(control::Join{1, {"run", 0}, "t"}));
  ASSERT_EQ(owner_.NextWith("prepare"), "prepare 1");
  ASSERT_TRUE(client_->Send(control::EpochReady{{"run", 0}, Epoch(1), {}, owner_.preparation()}));
  ASSERT_EQ(owner_.NextWith("commit"), "commit 1");
  server.reset();
  server = StartServer(address, store);
  ASSERT_EQ(owner_.NextWith("connected"), "connected");
  control::Hello hello = HelloOfPeer();
  hello.groups = {{{"run", 0}, Epoch(1), {MemberId(1)}}};
  ASSERT_TRUE(client_->Send(hello));
  EXPECT_EQ(owner_.Next(), "welcome " + server->incarnation());
  const auto overview = server->loop()->QueryAndWait(kDeadline);
  ASSERT_TRUE(overview.ok()) << overview.status();
  ASSERT_EQ(overview->groups.size(), 1u);
  EXPECT_EQ(overview->groups[0].committed, Epoch(1));
  ASSERT_EQ(overview->groups[0].members.size(), 1u);
  EXPECT_EQ(overview->groups[0].members[0].joined, Epoch(1));
  EXPECT_TRUE(overview->groups[0].ring[0].attached);
}

TEST_F(ControlClientTest, TriesTheNextAddress) {
  const auto server = StartServer();
  Connect({"127.0.0.1:1", "nosuchhost.invalid:1", server->grpc_address()});
  EXPECT_THAT(owner_.Next(), StartsWith("disconnected cannot reach coordinator 127.0.0.1:1: "));
  EXPECT_THAT(owner_.Next(), StartsWith("disconnected cannot reach coordinator nosuchhost"));
  EXPECT_EQ(owner_.Next(), "connected");
}

TEST_F(ControlClientTest, ACoordinatorThatIsRefusedIsFollowedByTheNextAddress) {
  const auto first = StartServer();
  const auto second = StartServer();
  Connect({first->grpc_address(), second->grpc_address()});
  ASSERT_EQ(owner_.Next(), "connected");
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_EQ(owner_.Next(), "welcome " + first->incarnation());
  client_->Refuse("it is another one");
  EXPECT_THAT(owner_.Next(), AllOf(StartsWith("disconnected control stream to coordinator"),
                                   HasSubstr("this peer refuses it: it is another one")));
  ASSERT_EQ(owner_.Next(), "connected");
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_EQ(owner_.Next(), "welcome " + second->incarnation());
}

// While the peer's own coordinator is away, the other coordinator does not take the peer's members.
TEST_F(ControlClientTest, ACoordinatorOfAnotherStoreSendsAPeerWithMembersAway) {
  auto own = StartServer();
  const std::string own_address = own->grpc_address();
  const auto other = StartServer();
  Connect({own_address, other->grpc_address()});
  ASSERT_EQ(owner_.Next(), "connected");
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  const std::string incarnation = own->incarnation();
  EXPECT_EQ(owner_.Next(), "welcome " + incarnation);
  control::Hello hello = HelloOfPeer();
  hello.groups = {{{"run", 0}, Epoch(1), {MemberId(1)}}};
  hello.store = owner_.welcome_store();
  hello.term = 1;
  hello.coordinator = incarnation;
  own.reset();
  for (;;) {
    ASSERT_EQ(owner_.NextWith("connected"), "connected");
    ASSERT_TRUE(client_->Send(hello));
    const std::string line = owner_.Next();
    if (line.rfind("disconnected", 0) != 0) FAIL() << line;
    if (line.find(ToString(TheIdentity().peer()) + " has members in store") != std::string::npos)
      break;
  }
  const auto overview = other->loop()->QueryAndWait(kDeadline);
  ASSERT_TRUE(overview.ok()) << overview.status();
  EXPECT_TRUE(overview->groups.empty());
}

TEST_F(ControlClientTest, TellsWhyItsMessageWasRefused) {
  const auto server = StartServer();
  Connect({server->grpc_address()});
  ASSERT_EQ(owner_.Next(), "connected");
  control::Hello hello = HelloOfPeer();
  hello.endpoints = {"not an endpoint"};
  ASSERT_TRUE(client_->Send(hello));
  EXPECT_THAT(owner_.Next(), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("not an endpoint")));
  // The client connects again all the same.
  ASSERT_EQ(owner_.Next(), "connected");
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_THAT(owner_.Next(), StartsWith("welcome"));
}

TEST_F(ControlClientTest, StopsWhileConnectedWhileTryingAndTwice) {
  const auto server = StartServer();
  Connect({server->grpc_address()});
  ASSERT_EQ(owner_.Next(), "connected");
  client_->Stop();
  client_->Stop();
  EXPECT_FALSE(client_->Send(HelloOfPeer()));
  Connect({"127.0.0.1:1"});
  EXPECT_THAT(owner_.NextWith("disconnected"), HasSubstr("127.0.0.1:1"));
  client_.reset();
  for (int i = 0; i < 20; ++i) {
    Connect({server->grpc_address()});
    client_.reset();
  }
}

// The listener takes connections and never answers: it neither refuses nor speaks HTTP/2.
TEST_F(ControlClientTest, GivesUpAnAddressThatDoesNotAnswer) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  struct sockaddr_in address {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(listener, reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener, 8), 0);
  socklen_t size = sizeof address;
  getsockname(listener, reinterpret_cast<struct sockaddr*>(&address), &size);
  const auto server = StartServer();
  peerd::ControlClientOptions options;
  options.identity = TheIdentity();
  options.addresses = {absl::StrCat("127.0.0.1:", ntohs(address.sin_port)), server->grpc_address()};
  options.detect_ms = 100;
  client_ = peerd::MakeControlClient(options, owner_.Callbacks());
  EXPECT_THAT(owner_.Next(), StartsWith("disconnected cannot reach coordinator 127.0.0.1:"));
  EXPECT_EQ(owner_.Next(), "connected");
  close(listener);
}

TEST_F(ControlClientTest, GarbageOnTheGrpcPortHurtsNobody) {
  const auto server = StartServer();
  Connect({server->grpc_address()});
  ASSERT_EQ(owner_.Next(), "connected");
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_THAT(owner_.Next(), StartsWith("welcome"));
  struct sockaddr_in address {};
  address.sin_family = AF_INET;
  address.sin_port = htons(ParseHostPort(server->grpc_address())->port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  for (const std::string& bytes : {std::string(100000, '\0'), std::string("GET / HTTP/1.1\r\n\r\n"),
                                   preface + std::string(50000, '\xff'),
                                   preface + std::string("\0\0\x04\x01", 4), std::string()}) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ASSERT_EQ(connect(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
    (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    shutdown(fd, SHUT_WR);
    char buffer[4096];
    while (recv(fd, buffer, sizeof buffer, 0) > 0) {
    }
    close(fd);
  }
  ASSERT_TRUE(client_->Send(control::Join{7, {"run", 0}, "t"}));
  EXPECT_EQ(owner_.Next(), "pending 7");
}

}  // namespace
}  // namespace longhaul
