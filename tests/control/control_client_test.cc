// Tests the peer's control client with a real coordinator, over loopback.
#include "peerd/control/control_client.h"

#include <arpa/inet.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/crypto/identity.h"
#include "base/daemon/host_port.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "base/tls/tls_files.h"
#include "coordinator/server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/lhctl/ca.h"

namespace longhaul {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::chrono::seconds kDeadline{20};
// For clients that are to notice a silence soon.
constexpr uint32_t kShortMs = 500;

// Keeps one line of text for each callback of the client.
class Owner {
 public:
  peerd::ControlClientCallbacks Callbacks() {
    peerd::ControlClientCallbacks callbacks;
    callbacks.connected = [this](const std::string& address) {
      {
        MutexLock lock(&mutex_);
        address_ = address;
      }
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
  // Where the coordinator of the last stream was reached.
  std::string address() {
    MutexLock lock(&mutex_);
    return address_;
  }

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
  std::string address_ ABSL_GUARDED_BY(mutex_);
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
                                                 const std::string& store = "memory",
                                                 uint32_t detect_ms = 30000, tls::Paths tls = {}) {
  coordinator::ServerOptions options;
  options.listen = listen;
  options.store = store;
  options.core.detect_ms = detect_ms;
  options.tls = std::move(tls);
  auto server = coordinator::Server::Start(options);
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

// A DNS server that knows one name, coordinator.test. While it is silent, it answers nothing.
class NameServer {
 public:
  NameServer() : fd_(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    struct sockaddr_in address {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(fd_, reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
    socklen_t size = sizeof address;
    getsockname(fd_, reinterpret_cast<struct sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Serve(); });
  }
  ~NameServer() {
    shutdown(fd_, SHUT_RDWR);  // ends recvfrom()
    thread_.join();
    close(fd_);
  }
  enum class Mood { kAnswers, kDenies, kSilent };
  void Set(Mood mood) { mood_ = mood; }
  // The address of a coordinator at this port of loopback, by its name.
  std::string AddressOf(const std::string& coordinator) const {
    return absl::StrCat("dns://127.0.0.1:", port_,
                        "/coordinator.test:", ParseHostPort(coordinator)->port);
  }

 private:
  void Serve() {
    char query[512];
    for (;;) {
      struct sockaddr_in from {};
      socklen_t size = sizeof from;
      const ssize_t n =
          recvfrom(fd_, query, sizeof query, 0, reinterpret_cast<struct sockaddr*>(&from), &size);
      if (n <= 0) return;
      const Mood mood = mood_;
      if (n < 17 || mood == Mood::kSilent) continue;
      // The header with the question, which ends with its type and class, and one answer to a
      // question of type A. There is no answer to other types.
      size_t end = 12;
      while (end < static_cast<size_t>(n) && query[end] != 0) end += query[end] + 1;
      end += 5;
      if (end > static_cast<size_t>(n)) continue;
      std::string answer(query, end);
      const bool known = mood == Mood::kAnswers && answer[end - 3] == 1;
      answer[2] = static_cast<char>(0x85);                                 // an answer
      answer[3] = static_cast<char>(mood == Mood::kDenies ? 0x83 : 0x80);  // NXDOMAIN, or good
      answer[7] = known ? 1 : 0;
      answer[8] = answer[9] = answer[10] = answer[11] = 0;
      if (known) answer += std::string("\xc0\x0c\0\1\0\1\0\0\0\0\0\4\x7f\0\0\1", 16);
      sendto(fd_, answer.data(), answer.size(), 0, reinterpret_cast<struct sockaddr*>(&from), size);
    }
  }

  const int fd_;
  int port_ = 0;
  std::atomic<Mood> mood_ = Mood::kAnswers;
  std::thread thread_;
};

// A gRPC server that is no coordinator: it answers every call with a message.
class OtherService : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Call();
  }

 private:
  class Call final : public grpc::ServerGenericBidiReactor {
   public:
    Call() { StartWrite(&message_); }
    void OnCancel() override { Finish(grpc::Status::CANCELLED); }
    void OnDone() override { delete this; }

   private:
    const grpc::Slice slice_{"hello"};
    const grpc::ByteBuffer message_{&slice_, 1};
  };
};

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

TEST_F(ControlClientTest, AServerThatIsNoCoordinatorIsGivenUp) {
  OtherService service;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterCallbackGenericService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  Connect({absl::StrCat("127.0.0.1:", port)});
  EXPECT_THAT(owner_.Next(), AllOf(StartsWith("disconnected cannot reach coordinator"),
                                   HasSubstr("is it no coordinator?")));
  client_->Stop();
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

// ------------------------------------------------------------------------------ silence

// A path to a coordinator that can be cut for the connections that stand, like one on which TCP
// waits before it repeats what was lost, and for new ones.
class Path {
 public:
  explicit Path(const std::string& to)
      : to_(ParseHostPort(to)->port), listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    struct sockaddr_in address = Loopback(0);
    EXPECT_EQ(bind(listener_, reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(listen(listener_, 64), 0);
    socklen_t size = sizeof address;
    getsockname(listener_, reinterpret_cast<struct sockaddr*>(&address), &size);
    address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    thread_ = std::thread([this] { Carry(); });
  }
  ~Path() {
    stop_ = true;
    thread_.join();
    close(listener_);
  }
  const std::string& address() const { return address_; }
  // What stands now carries nothing until Mend().
  void Cut() { cut_ = true; }
  void Mend() { cut_ = false; }
  // Connections from now on carry nothing, ever.
  void SwallowNew() { swallow_ = true; }
  size_t accepted() const { return accepted_; }

 private:
  struct Pair {
    int ends[2];
    bool old = false;  // it stood before Cut()
    bool swallowed = false;
  };
  static struct sockaddr_in Loopback(uint16_t port) {
    struct sockaddr_in address {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }
  void Carry() {
    std::deque<Pair> pairs;
    bool was_cut = false;
    while (!stop_) {
      if (cut_ && !was_cut) {
        for (Pair& pair : pairs) pair.old = true;
      }
      was_cut = cut_;
      std::vector<struct pollfd> ready = {{listener_, POLLIN, 0}};
      std::vector<std::pair<int, int>> ways;
      for (const Pair& pair : pairs) {
        if (pair.swallowed || (pair.old && was_cut)) continue;
        for (const int i : {0, 1}) {
          ready.push_back({pair.ends[i], POLLIN, 0});
          ways.emplace_back(pair.ends[i], pair.ends[1 - i]);
        }
      }
      (void)poll(ready.data(), ready.size(), 5);
      for (size_t i = 0; i < ways.size(); ++i) {
        if (ready[i + 1].revents == 0) continue;
        char bytes[4096];
        const ssize_t n = read(ways[i].first, bytes, sizeof bytes);
        if (n <= 0) {
          shutdown(ways[i].first, SHUT_RDWR);
          shutdown(ways[i].second, SHUT_RDWR);
          std::erase_if(pairs, [&](const Pair& pair) {
            const bool ended = pair.ends[0] == ways[i].first || pair.ends[1] == ways[i].first;
            if (ended) {
              close(pair.ends[0]);
              close(pair.ends[1]);
            }
            return ended;
          });
          break;
        }
        (void)!write(ways[i].second, bytes, static_cast<size_t>(n));
      }
      if (ready[0].revents == 0) continue;
      const int here = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      const int there = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      struct sockaddr_in address = Loopback(to_);
      (void)connect(there, reinterpret_cast<struct sockaddr*>(&address), sizeof address);
      pairs.push_back({{here, there}, false, swallow_});
      ++accepted_;
    }
    for (const Pair& pair : pairs) {
      close(pair.ends[0]);
      close(pair.ends[1]);
    }
  }

  const uint16_t to_;
  const int listener_;
  std::string address_;
  std::atomic<bool> stop_ = false, cut_ = false, swallow_ = false;
  std::atomic<size_t> accepted_ = 0;
  std::thread thread_;
};

constexpr uint32_t kSilentMs = 1500;

TEST_F(ControlClientTest, WhereNothingIsHeardASecondConnectionTakesThePlaceOfTheFirst) {
  const auto server = StartServer("127.0.0.1:0", "memory", kSilentMs);
  Path path(server->grpc_address());
  Connect({path.address()});
  ASSERT_EQ(owner_.Next(), "connected");
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_THAT(owner_.Next(), StartsWith("welcome"));
  path.Cut();
  const size_t before = path.accepted();
  EXPECT_TRUE(client_->Send(control::Heartbeat{}));
  EXPECT_THAT(owner_.Next(), HasSubstr("nothing was heard, and a second connection stands"));
  EXPECT_EQ(owner_.Next(), "connected");
  EXPECT_GT(path.accepted(), before);
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_THAT(owner_.Next(), StartsWith("welcome"));
  EXPECT_EQ(client_->GetStats().second, 1u);
}

TEST_F(ControlClientTest, AFirstConnectionThatIsHeardAgainStays) {
  const auto server = StartServer("127.0.0.1:0", "memory", kSilentMs);
  Path path(server->grpc_address());
  Connect({path.address()});
  ASSERT_EQ(owner_.Next(), "connected");
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_THAT(owner_.Next(), StartsWith("welcome"));
  path.SwallowNew();
  path.Cut();
  const size_t before = path.accepted();
  EXPECT_TRUE(client_->Send(control::Heartbeat{}));
  while (path.accepted() < before + 2) std::this_thread::yield();  // a try of TCP, then of gRPC
  path.Mend();
  ASSERT_TRUE(client_->Send(control::Join{1, {"run", 0}, "t"}));
  EXPECT_EQ(owner_.Next(), "pending 1");
  EXPECT_EQ(client_->GetStats().second, 0u);
}

// The answer to a heartbeat is a word, though the owner is not told of it.
TEST_F(ControlClientTest, WhereHeartbeatsAreAnsweredThereIsNoSecondConnection) {
  const auto server = StartServer("127.0.0.1:0", "memory", kSilentMs);
  Connect({server->grpc_address()});
  ASSERT_EQ(owner_.Next(), "connected");
  ASSERT_TRUE(client_->Send(HelloOfPeer()));
  EXPECT_THAT(owner_.Next(), StartsWith("welcome"));
  ASSERT_TRUE(client_->Send(control::Heartbeat{}));
  std::this_thread::sleep_for(std::chrono::milliseconds(kSilentMs * 3 / 2));
  ASSERT_TRUE(client_->Send(control::Join{1, {"run", 0}, "t"}));
  EXPECT_EQ(owner_.Next(), "pending 1");
  EXPECT_EQ(client_->GetStats().second, 0u);
}

// ------------------------------------------------------------------------------ names

uint64_t FailuresOf(const peerd::ControlClient& client, peerd::ControlFailure failure) {
  return client.GetStats().failures[static_cast<size_t>(failure)];
}

// A coordinator whose certificate is for the given name, with TLS on the port for peers.
class TlsCoordinator {
 public:
  explicit TlsCoordinator(const std::string& name)
      : directory_(absl::StrCat(::testing::TempDir(), "/ca-of-control-client-test")) {
    std::filesystem::remove_all(directory_);
    EXPECT_TRUE(InitCa(directory_, 1).ok());
    Start(name, "127.0.0.1:0");
  }
  // Ends it, and starts one with a certificate for another name at the same address.
  void Restart(const std::string& name) {
    const std::string address = this->address();
    server_.reset();
    Start(name, address);
  }
  std::string address() const { return server_->grpc_address(); }
  std::shared_ptr<tls::Files> trust() const {
    return *tls::Files::Open({"", "", directory_ + "/ca.crt", ""});
  }

 private:
  void Start(const std::string& name, const std::string& listen) {
    EXPECT_TRUE(IssueCertificate(directory_, {"server", "coordinator", "", {name}, 1}).ok());
    server_ = StartServer(listen, "memory", kShortMs,
                          {directory_ + "/server.crt", directory_ + "/server.key", "", ""});
  }

  const std::string directory_;
  std::unique_ptr<coordinator::Server> server_;
};

TEST_F(ControlClientTest, WhereDnsFailsTheAddressThatWorkedLastIsDialled) {
  for (const NameServer::Mood mood : {NameServer::Mood::kDenies, NameServer::Mood::kSilent}) {
    NameServer names;
    auto server = StartServer("127.0.0.1:0", "memory", kShortMs);
    const std::string address = server->grpc_address();
    peerd::ControlClientOptions options;
    options.identity = TheIdentity();
    options.addresses = {names.AddressOf(address)};
    options.pause_ms_min = 1;
    options.pause_ms_max = 20;
    Owner owner;
    const auto client = peerd::MakeControlClient(options, owner.Callbacks());
    const auto welcome = [&] {
      ASSERT_EQ(owner.NextWith("connected"), "connected");
      EXPECT_EQ(owner.address(), address);
      ASSERT_TRUE(client->Send(HelloOfPeer()));
      EXPECT_THAT(owner.Next(), StartsWith("welcome"));
    };
    const auto restart = [&] {
      server.reset();
      server = StartServer(address, "memory", kShortMs);
    };
    ASSERT_NO_FATAL_FAILURE(welcome());
    EXPECT_EQ(client->GetStats().by_last_address, 0u);
    names.Set(mood);
    for (uint64_t i = 1; i <= 2; ++i) {
      restart();
      ASSERT_NO_FATAL_FAILURE(welcome()) << "while DNS is away";
      EXPECT_GE(client->GetStats().by_last_address, i);
      EXPECT_GE(FailuresOf(*client, peerd::ControlFailure::kLookup), i);
    }
    // With DNS, the name counts again.
    names.Set(NameServer::Mood::kAnswers);
    const uint64_t before = client->GetStats().by_last_address;
    restart();
    ASSERT_NO_FATAL_FAILURE(welcome());
    EXPECT_EQ(client->GetStats().by_last_address, before);
  }
}

TEST_F(ControlClientTest, AtTheLastAddressTheCertificateStillHasToBeForTheName) {
  NameServer names;
  TlsCoordinator coordinator("coordinator.test");
  peerd::ControlClientOptions options;
  options.identity = TheIdentity();
  options.addresses = {names.AddressOf(coordinator.address())};
  options.pause_ms_min = 1;
  options.pause_ms_max = 20;
  options.tls = coordinator.trust();
  client_ = peerd::MakeControlClient(options, owner_.Callbacks());
  const auto welcome = [&] {
    ASSERT_EQ(owner_.NextWith("connected"), "connected");
    ASSERT_TRUE(client_->Send(HelloOfPeer()));
    EXPECT_THAT(owner_.Next(), StartsWith("welcome"));
  };
  ASSERT_NO_FATAL_FAILURE(welcome());
  names.Set(NameServer::Mood::kDenies);
  coordinator.Restart("coordinator.test");
  ASSERT_NO_FATAL_FAILURE(welcome());
  EXPECT_GE(client_->GetStats().by_last_address, 1u);
  EXPECT_EQ(FailuresOf(*client_, peerd::ControlFailure::kName), 0u);
  // Another program has the address now, with a certificate of the same CA.
  coordinator.Restart("other.test");
  std::string line;
  do {
    line = owner_.Next();
    ASSERT_THAT(line, StartsWith("disconnected"));
  } while (line.find("certificate is for other names") == std::string::npos);
  EXPECT_GE(FailuresOf(*client_, peerd::ControlFailure::kName), 1u);
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
