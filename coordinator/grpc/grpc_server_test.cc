// Tests the services over real connections, with a client that may send anything.
#include "coordinator/grpc/grpc_server.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/crypto/identity.h"
#include "base/daemon/host_port.h"
#include "base/log_lines.h"
#include "base/unique_fd.h"
#include "coordinator/grpc/front.h"
#include "coordinator/grpc/stranger_budget.h"
#include "coordinator/store/store.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/control/grpc/support.h"
#include "proto/control/messages.h"
#include "proto/control/recording.h"
#include "proto/longhaul/v1/admin.grpc.pb.h"
#include "proto/longhaul/v1/coordinator.grpc.pb.h"
#include "proto/wire/limits.h"

namespace longhaul::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

using AttachStream = grpc::ClientReaderWriter<v1::PeerMessage, v1::CoordinatorMessage>;

// The id of the peer that these tests call by this number, and its text.
PeerId IdOf(uint64_t peer) { return Identity::ForTest(peer).peer(); }
std::string NameOf(uint64_t peer) { return ToString(IdOf(peer)); }

// Attached::Write() adds the key and the signature.
v1::PeerMessage Hello(uint64_t peer) {
  v1::PeerMessage message;
  v1::Hello* hello = message.mutable_hello();
  hello->set_peer(peer);
  hello->add_endpoints("10.0.0.1:29700");
  hello->set_protocol(control::kProtocolVersion);
  hello->set_host("host");
  return message;
}

v1::PeerMessage Join(const std::string& run) {
  v1::PeerMessage message;
  v1::Join* join = message.mutable_join();
  join->set_request(1);
  join->mutable_group()->set_run(run);
  return message;
}

// One Attach call: the peer's end of a control stream.
struct Attached {
  // `records`: the peer says that it answers requests for recordings.
  explicit Attached(v1::Coordinator::Stub* stub, bool records = false) {
    if (records) context.AddMetadata(control::kRecordingMetadata, "1");
    // Cancels calls that never end, so that the test fails and shows where it waited.
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    stream = stub->Attach(&context);
  }

  bool Write(const v1::PeerMessage& message) {
    if (!message.has_hello() || message.hello().peer() == 0) return stream->Write(message);
    v1::PeerMessage hello = message;
    Sign(Identity::ForTest(message.hello().peer()), hello.mutable_hello());
    return stream->Write(hello);
  }
  // Makes `hello` the Hello of this peer on this stream.
  void Sign(const Identity& identity, v1::Hello* hello) {
    hello->set_peer(identity.peer().value());
    hello->set_key(identity.public_key());
    hello->set_signature(identity.Sign(PossessionText(Nonce(), identity.public_key())));
  }
  // gRPC allows only one wait.
  void WaitForMetadata() {
    if (!std::exchange(has_metadata, true)) stream->WaitForInitialMetadata();
  }
  std::string Nonce() {
    WaitForMetadata();
    const auto& metadata = context.GetServerInitialMetadata();
    const auto nonce = metadata.find(control::kNonceMetadata);
    return nonce == metadata.end() ? "" : std::string(nonce->second.data(), nonce->second.size());
  }
  // Reads up to the next message of this kind. Returns false if the stream ended before.
  bool ReadUntil(v1::CoordinatorMessage::MessageCase kind, v1::CoordinatorMessage* message) {
    while (stream->Read(message)) {
      if (message->message_case() == kind) return true;
    }
    return false;
  }
  // Reads and drops all further messages; gives how the stream ended.
  grpc::Status Finish() {
    v1::CoordinatorMessage message;
    while (stream->Read(&message)) {
    }
    return stream->Finish();
  }

  grpc::ClientContext context;
  std::unique_ptr<AttachStream> stream;
  bool has_metadata = false;
};

class GrpcServerTest : public ::testing::Test {
 protected:
  GrpcServerTest() {
    CoordinatorLoop::Options options;
    options.core.incarnation = "c1";
    options.core.detect_ms = 30000;
    options.core.entropy = std::string(32, 'e');
    loop_ = *CoordinatorLoop::Start(std::move(options), MakeMemoryStore(), &metrics_);
    auto server =
        GrpcServer::StartForPeers("127.0.0.1:0", loop_.get(), &metrics_, &desk_, &peers_auth_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    auto operators = GrpcServer::StartForOperators("127.0.0.1:0", loop_.get(), &desk_, &tokens_,
                                                   &operators_auth_);
    EXPECT_TRUE(operators.ok()) << operators.status();
    operators_ = *std::move(operators);
    channel_ = Channel(*server_);
    peers_ = v1::Coordinator::NewStub(channel_);
    admin_channel_ = Channel(*operators_);
    admin_ = v1::Admin::NewStub(admin_channel_);
  }

  static std::shared_ptr<grpc::Channel> Channel(const GrpcServer& server) {
    grpc::ChannelArguments args;
    args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(server.address(), grpc::InsecureChannelCredentials(), args);
  }

  // From now on the connection is no stranger's (front.h).
  static void Introduce(v1::Coordinator::Stub* stub) {
    Attached attached(stub);
    v1::CoordinatorMessage message;
    EXPECT_TRUE(attached.Write(Hello(1000)));
    EXPECT_TRUE(attached.ReadUntil(v1::CoordinatorMessage::kWelcome, &message));
    attached.stream->WritesDone();
    EXPECT_TRUE(attached.Finish().ok());
  }

  // Makes a stream with one admitted member, and puts the member's name into `member`.
  std::unique_ptr<Attached> Member(uint64_t peer, const std::string& run, std::string* member) {
    auto attached = std::make_unique<Attached>(peers_.get());
    v1::CoordinatorMessage message;
    EXPECT_TRUE(attached->Write(Hello(peer)));
    EXPECT_TRUE(attached->Write(Join(run)));
    EXPECT_TRUE(attached->ReadUntil(v1::CoordinatorMessage::kJoinPending, &message));
    *member = "m" + std::to_string(message.join_pending().member());
    EXPECT_TRUE(attached->ReadUntil(v1::CoordinatorMessage::kPrepareEpoch, &message));
    v1::PeerMessage ready;
    *ready.mutable_epoch_ready()->mutable_group() = message.prepare_epoch().group();
    ready.mutable_epoch_ready()->set_epoch(message.prepare_epoch().epoch());
    ready.mutable_epoch_ready()->set_preparation(message.prepare_epoch().preparation());
    EXPECT_TRUE(attached->Write(ready));
    EXPECT_TRUE(attached->ReadUntil(v1::CoordinatorMessage::kCommitEpoch, &message));
    return attached;
  }

  // Sends raw bytes as the first message of an Attach call, and returns how the call ended.
  grpc::Status SendBytes(const std::string& bytes) {
    struct Call : grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
      void OnReadDone(bool ok) override {
        if (ok) StartRead(&incoming);
      }
      void OnDone(const grpc::Status& status) override { done.set_value(status); }
      grpc::ClientContext context;
      grpc::ByteBuffer outgoing, incoming;
      std::promise<grpc::Status> done;
    } call;
    const grpc::Slice slice(bytes);
    call.outgoing = grpc::ByteBuffer(&slice, 1);
    grpc::GenericStub stub(channel_);
    stub.PrepareBidiStreamingCall(&call.context, "/longhaul.v1.Coordinator/Attach", {}, &call);
    call.StartWrite(&call.outgoing);
    call.StartRead(&call.incoming);
    call.StartCall();
    return call.done.get_future().get();
  }

  std::vector<v1::Event> Events(const v1::WatchEventsRequest& request) {
    grpc::ClientContext context;
    const auto reader = admin_->WatchEvents(&context, request);
    std::vector<v1::Event> events;
    for (v1::Event event; reader->Read(&event);) events.push_back(event);
    EXPECT_TRUE(reader->Finish().ok());
    return events;
  }

  CoordinatorMetrics metrics_;
  RecordingDesk desk_{nullptr};
  TokenDesk tokens_{{}, {}};  // its test is tests/tokens/tokens_test.cc
  Authorizer peers_auth_{{Auth::kNone, "--auth", Role::kTrainer}, &tokens_, &metrics_};
  Authorizer operators_auth_{{Auth::kNone, "--admin-auth", Role::kOperator}, &tokens_, &metrics_};
  std::unique_ptr<CoordinatorLoop> loop_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<GrpcServer> operators_;
  std::shared_ptr<grpc::Channel> channel_;
  std::shared_ptr<grpc::Channel> admin_channel_;
  std::unique_ptr<v1::Coordinator::Stub> peers_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

// ------------------------------------------------------------------------------ Attach

TEST_F(GrpcServerTest, AnswersHelloAndEndsWithTheClient) {
  Attached attached(peers_.get());
  ASSERT_TRUE(attached.Write(Hello(1)));
  v1::CoordinatorMessage message;
  ASSERT_TRUE(attached.stream->Read(&message));
  EXPECT_EQ(message.welcome().coordinator(), "c1");
  EXPECT_EQ(message.welcome().detect_ms(), 30000u);
  attached.stream->WritesDone();
  EXPECT_TRUE(attached.Finish().ok());
}

TEST_F(GrpcServerTest, MessagesAgainstTheProtocolEndTheStreamWithTheReason) {
  const auto first = [this](const v1::PeerMessage& message) {
    Attached attached(peers_.get());
    attached.Write(message);
    return attached.Finish();
  };
  grpc::Status status = first(Join("run"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("first message is not Hello"));
  status = first(v1::PeerMessage());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  status = first(Hello(0));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_THAT(metrics_.Text(), HasSubstr("longhaul_coordinator_messages_refused_total 3\n"));
}

TEST_F(GrpcServerTest, APeerOfAnotherProtocolIsToldBothNumbers) {
  v1::PeerMessage hello = Hello(1);
  hello.mutable_hello()->set_protocol(control::kProtocolVersion - 1);
  Attached attached(peers_.get());
  ASSERT_TRUE(attached.Write(hello));
  const grpc::Status status = attached.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(),
              HasSubstr("speaks protocol " + std::to_string(control::kProtocolVersion - 1) +
                        ", this coordinator " + std::to_string(control::kProtocolVersion)));
}

// ------------------------------------------------------------------------------ recordings

// A message about recordings, as a message of the protocol with unknown fields.
v1::PeerMessage Unknown(const control::RecordingPiece& piece) {
  v1::PeerMessage message;
  EXPECT_TRUE(message.ParseFromString(control::Serialize(piece)));
  return message;
}

TEST_F(GrpcServerTest, APeersPieceReachesTheOperator) {
  Attached attached(peers_.get(), /*records=*/true);
  v1::CoordinatorMessage message;
  ASSERT_TRUE(attached.Write(Hello(0x1f)));
  ASSERT_TRUE(attached.ReadUntil(v1::CoordinatorMessage::kWelcome, &message));
  v1::ReadRecordingResponse response;
  auto asked = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    v1::ReadRecordingRequest request;
    request.set_peer(NameOf(0x1f));
    request.set_offset(7);
    return admin_->ReadRecording(&context, request, &response);
  });
  ASSERT_TRUE(attached.stream->Read(&message));
  const auto read = control::ParseReadRecording(message.SerializeAsString());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->offset, 7u);
  control::RecordingPiece piece;
  piece.request = read->request;
  piece.data = "abc";
  piece.received_us = 5;
  ASSERT_TRUE(attached.Write(Unknown(piece)));
  const grpc::Status status = asked.get();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.data(), "abc");
  EXPECT_EQ(response.received_us(), 5);
  EXPECT_GT(response.asked_us(), 0);
}

TEST_F(GrpcServerTest, APeerThatDoesNotAnswerCostsTheCallerItsDeadlineOnly) {
  Attached attached(peers_.get(), /*records=*/true);
  v1::CoordinatorMessage message;
  ASSERT_TRUE(attached.Write(Hello(0x1f)));
  ASSERT_TRUE(attached.ReadUntil(v1::CoordinatorMessage::kWelcome, &message));
  v1::ReadRecordingRequest request;
  request.set_peer(NameOf(0x1f));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  v1::ReadRecordingResponse response;
  EXPECT_EQ(admin_->ReadRecording(&context, request, &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(GrpcServerTest, APeerWithoutARecorderIsNotAsked) {
  Attached attached(peers_.get());
  v1::CoordinatorMessage message;
  ASSERT_TRUE(attached.Write(Hello(0x1f)));
  ASSERT_TRUE(attached.ReadUntil(v1::CoordinatorMessage::kWelcome, &message));
  grpc::ClientContext context;
  v1::ReadRecordingRequest request;
  request.set_peer(NameOf(0x1f));
  v1::ReadRecordingResponse response;
  EXPECT_EQ(admin_->ReadRecording(&context, request, &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(GrpcServerTest, APieceFromAStrangerOrOneTooLongEndsTheStream) {
  EXPECT_EQ(SendBytes(control::Serialize(control::RecordingPiece{1})).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  Attached attached(peers_.get(), /*records=*/true);
  v1::CoordinatorMessage message;
  ASSERT_TRUE(attached.Write(Hello(0x1f)));
  ASSERT_TRUE(attached.ReadUntil(v1::CoordinatorMessage::kWelcome, &message));
  control::RecordingPiece piece;
  piece.data = std::string(control::kPieceBytesMax + 1, 'x');
  attached.Write(Unknown(piece));
  EXPECT_EQ(attached.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(GrpcServerTest, BytesThatAreNoMessageAreRefusedAndCounted) {
  Introduce(peers_.get());
  for (const std::string& bytes :
       {std::string("\xff\xff\xff\xff"), std::string("\x0a\x7f"), std::string(1000, '\x12')}) {
    const grpc::Status status = SendBytes(bytes);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  }
  EXPECT_THAT(metrics_.Text(), HasSubstr("longhaul_coordinator_messages_refused_total 3\n"));
  Attached attached(peers_.get());
  EXPECT_TRUE(attached.Write(Hello(1)));
}

TEST_F(GrpcServerTest, OversizedMessageIsRefusedBeforeItIsRead) {
  Introduce(peers_.get());
  const grpc::Status status = SendBytes(std::string(LH_CONTROL_MESSAGE_BYTES_MAX + 1, 'x'));
  EXPECT_FALSE(status.ok());
  Attached attached(peers_.get());
  v1::CoordinatorMessage message;
  EXPECT_TRUE(attached.Write(Hello(1)));
  EXPECT_TRUE(attached.stream->Read(&message));
}

TEST_F(GrpcServerTest, CompressedMessagesAreRefused) {
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  auto stream = peers_->Attach(&context);
  v1::PeerMessage hello = Hello(1);
  hello.mutable_hello()->set_host(std::string(4000, 'h'));
  stream->Write(hello);
  v1::CoordinatorMessage message;
  EXPECT_FALSE(stream->Read(&message));
  EXPECT_FALSE(stream->Finish().ok());
}

TEST_F(GrpcServerTest, NewerStreamOfAPeerReplacesTheOlder) {
  Attached first(peers_.get());
  v1::CoordinatorMessage message;
  ASSERT_TRUE(first.Write(Hello(1)));
  ASSERT_TRUE(first.stream->Read(&message));
  Attached second(peers_.get());
  ASSERT_TRUE(second.Write(Hello(1)));
  ASSERT_TRUE(second.stream->Read(&message));
  const grpc::Status status = first.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_THAT(status.error_message(), HasSubstr("replaced by a newer stream"));
}

TEST_F(GrpcServerTest, ARefusalThatComesAgainIsCountedAndNotLoggedAgain) {
  const LogLines log;
  for (int i = 0; i < 3; ++i) {
    Attached stranger(peers_.get());
    v1::PeerMessage message = Hello(1);
    stranger.Sign(Identity::ForTest(1), message.mutable_hello());
    message.mutable_hello()->clear_signature();
    ASSERT_TRUE(stranger.stream->Write(message));
    EXPECT_EQ(stranger.Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);
  }
  EXPECT_EQ(log.Count("control stream refused"), 1);
  EXPECT_THAT(metrics_.Text(), HasSubstr("longhaul_coordinator_strangers_refused_total 3\n"));
}

TEST_F(GrpcServerTest, AStrangerDoesNotEndTheStreamOfAPeer) {
  std::string member;
  const auto attached = Member(1, "run", &member);
  const Identity peer = Identity::ForTest(1);
  const Identity other = Identity::ForTest(2);
  std::string old_signature;
  const auto refused = [&](const std::function<void(Attached*, v1::Hello*)>& forge,
                           const std::string& text) {
    Attached stranger(peers_.get());
    v1::PeerMessage message = Hello(1);
    stranger.Sign(peer, message.mutable_hello());
    const std::string signature = message.hello().signature();
    forge(&stranger, message.mutable_hello());
    old_signature = signature;
    ASSERT_TRUE(stranger.stream->Write(message));
    const grpc::Status status = stranger.Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << text;
    EXPECT_THAT(status.error_message(), HasSubstr(text));
  };
  refused([](Attached*, v1::Hello* hello) { hello->clear_key(); }, "Hello has a key of 0 bytes");
  refused([](Attached*, v1::Hello* hello) { hello->clear_signature(); },
          "does not have the peer's");
  // The peer's Hello on an earlier stream, which somebody has recorded.
  refused([&](Attached*, v1::Hello* hello) { hello->set_signature(old_signature); },
          "repeats the Hello of another stream");
  // The key of another peer.
  refused([&](Attached*, v1::Hello* hello) { hello->set_key(other.public_key()); },
          "it is not that peer");
  refused(
      [&](Attached* stranger, v1::Hello* hello) {
        hello->set_signature(other.Sign(PossessionText(stranger->Nonce(), hello->key())));
      },
      "does not have the peer's private key");
  EXPECT_THAT(metrics_.Text(), HasSubstr("longhaul_coordinator_strangers_refused_total 5\n"));
  // The real peer's stream still works.
  v1::PeerMessage join = Join("other");
  join.mutable_join()->set_request(2);
  v1::CoordinatorMessage message;
  ASSERT_TRUE(attached->Write(join));
  EXPECT_TRUE(attached->ReadUntil(v1::CoordinatorMessage::kJoinPending, &message));
}

TEST_F(GrpcServerTest, AConnectionHasNoLimitOnceItsCallerIsKnown) {
  std::vector<std::unique_ptr<Attached>> attached;
  const auto open = [&](size_t streams) {
    while (attached.size() < streams) {
      attached.push_back(std::make_unique<Attached>(peers_.get()));
      attached.back()->WaitForMetadata();
    }
  };
  open(StrangerBudget::kStreamsMax);
  v1::CoordinatorMessage message;
  ASSERT_TRUE(attached[0]->Write(Hello(1)));
  ASSERT_TRUE(attached[0]->ReadUntil(v1::CoordinatorMessage::kWelcome, &message));
  open(10 * StrangerBudget::kStreamsMax);
  for (const auto& each : attached) EXPECT_NE(each->Nonce(), "");
}

// Connections that say nothing, and those that stop in the middle, are more than are served at a
// time. A peer comes in among them, from the same address.
TEST_F(GrpcServerTest, APeerComesInThroughACrowdOfStrangers) {
  const absl::StatusOr<HostPort> port = ParseHostPort(server_->address());
  ASSERT_TRUE(port.ok());
  struct sockaddr_in address {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port->port);
  const std::string preface(StrangerBudget::kPreface);
  std::vector<UniqueFd> strangers;
  for (size_t i = 0; i < 3 * kStrangersServedMax; ++i) {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(fd.get(), reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
    if (i % 2 == 0) {
      ASSERT_EQ(send(fd.get(), preface.data(), preface.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(preface.size()));
    }
    strangers.push_back(std::move(fd));
  }
  Introduce(peers_.get());
}

// Streams without a Hello end each other, and no other stream.
TEST_F(GrpcServerTest, StreamsWithoutHelloAreBounded) {
  std::string member;
  const auto peer = Member(1, "run", &member);
  const auto waiting = [this] {
    const std::string text = metrics_.Text();
    const std::string name = "\nlonghaul_coordinator_streams_without_hello ";
    return std::stoul(text.substr(text.find(name) + name.size()));
  };
  // One connection allows fewer streams than this test needs, so there are several connections.
  const auto other = Channel(*server_);
  const auto strangers = v1::Coordinator::NewStub(other);
  Introduce(strangers.get());
  std::vector<std::unique_ptr<Attached>> silent;
  for (size_t i = 0; i < LH_STREAMS_WITHOUT_HELLO_MAX; ++i) {
    silent.push_back(std::make_unique<Attached>(i % 2 == 0 ? strangers.get() : peers_.get()));
    silent.back()->WaitForMetadata();
  }
  EXPECT_EQ(waiting(), LH_STREAMS_WITHOUT_HELLO_MAX);
  EXPECT_THAT(metrics_.Text(), HasSubstr("longhaul_coordinator_messages_refused_total 0\n"));
  // One more stream ends the oldest one.
  Attached another(peers_.get());
  another.WaitForMetadata();
  const grpc::Status status = silent[0]->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("LH_STREAMS_WITHOUT_HELLO_MAX"));
  EXPECT_EQ(waiting(), LH_STREAMS_WITHOUT_HELLO_MAX);
  EXPECT_THAT(metrics_.Text(), HasSubstr("longhaul_coordinator_messages_refused_total 1\n"));
  // A peer can still attach, and its stream stays: it has said Hello.
  v1::CoordinatorMessage message;
  ASSERT_TRUE(silent[1]->Write(Hello(2)));
  EXPECT_TRUE(silent[1]->ReadUntil(v1::CoordinatorMessage::kWelcome, &message));
  EXPECT_EQ(waiting(), LH_STREAMS_WITHOUT_HELLO_MAX - 1);
  ASSERT_TRUE(another.Write(Hello(3)));
  EXPECT_TRUE(another.ReadUntil(v1::CoordinatorMessage::kWelcome, &message));
  v1::PeerMessage join = Join("other");
  join.mutable_join()->set_request(2);
  ASSERT_TRUE(peer->Write(join));
  EXPECT_TRUE(peer->ReadUntil(v1::CoordinatorMessage::kJoinPending, &message));
  // Streams that end make room again.
  for (const auto& stream : silent) stream->context.TryCancel();
  for (size_t i = 1; i < silent.size(); ++i) silent[i]->Finish();
  while (waiting() > 0) std::this_thread::yield();
}

TEST_F(GrpcServerTest, CancelledAndBrokenStreamsAreGivenBack) {
  Introduce(peers_.get());
  for (int i = 0; i < 200; ++i) {
    Attached attached(peers_.get());
    if (i % 3 != 0) attached.Write(Hello(static_cast<uint64_t>(i % 5) + 1));
    if (i % 2 == 0) attached.context.TryCancel();
    if (i % 2 == 1) attached.stream->WritesDone();
    attached.Finish();
  }
  server_->Stop(std::chrono::seconds(10));
  ASSERT_TRUE(loop_->QueryAndWait(std::chrono::seconds(30)).ok());
  EXPECT_EQ(loop_->sessions(), 0u);
}

TEST_F(GrpcServerTest, StopEndsStreamsAndWatchersWithUnavailable) {
  std::string member;
  auto attached = Member(1, "run", &member);
  grpc::ClientContext context;
  v1::WatchEventsRequest request;
  request.set_follow(true);
  const auto watcher = admin_->WatchEvents(&context, request);
  v1::Event event;
  ASSERT_TRUE(watcher->Read(&event));
  server_->Stop(std::chrono::seconds(30));
  operators_->Stop(std::chrono::seconds(30));
  EXPECT_EQ(attached->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  while (watcher->Read(&event)) {
  }
  EXPECT_EQ(watcher->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(GrpcServerTest, StopDoesNotWaitForAClientThatDoesNotRead) {
  Attached deaf(peers_.get());
  ASSERT_TRUE(deaf.Write(Hello(1)));
  // The coordinator answers every repeated Join. The test never reads the answers.
  std::thread writer([&deaf] {
    v1::PeerMessage join = Join(std::string(LH_RUN_NAME_BYTES_MAX, 'r'));
    for (int i = 0; i < 20000 && deaf.Write(join); ++i) {
    }
  });
  writer.join();
  server_->Stop(std::chrono::milliseconds(100));
  EXPECT_FALSE(deaf.Finish().ok());
}

TEST_F(GrpcServerTest, SecondServerOnThePortIsRefusedWithTheReason) {
  const auto second =
      GrpcServer::StartForPeers(server_->address(), loop_.get(), &metrics_, &desk_, &peers_auth_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr("another process has the port, stop it or choose another --listen"));
  const auto operators = GrpcServer::StartForOperators(operators_->address(), loop_.get(), &desk_,
                                                       &tokens_, &operators_auth_);
  EXPECT_THAT(std::string(operators.status().message()), HasSubstr("choose another --admin"));
}

// ------------------------------------------------------------------------------ Admin

TEST_F(GrpcServerTest, ThePeersPortTakesNoOrders) {
  std::string member;
  const auto attached = Member(0x1f, "run", &member);
  const auto stranger = v1::Admin::NewStub(channel_);
  {
    grpc::ClientContext context;
    v1::EvictRequest request;
    request.set_run("run");
    request.set_member(member);
    v1::EvictResponse response;
    EXPECT_EQ(stranger->Evict(&context, request, &response).error_code(),
              grpc::StatusCode::UNIMPLEMENTED);
  }
  {
    grpc::ClientContext context;
    v1::DrainRequest request;
    request.set_peer(NameOf(0x1f));
    v1::DrainResponse response;
    EXPECT_EQ(stranger->Drain(&context, request, &response).error_code(),
              grpc::StatusCode::UNIMPLEMENTED);
  }
  {
    grpc::ClientContext context;
    v1::GetOverviewResponse overview;
    EXPECT_EQ(stranger->GetOverview(&context, {}, &overview).error_code(),
              grpc::StatusCode::UNIMPLEMENTED);
  }
  // The operators' port takes no peers, either.
  const auto peers = v1::Coordinator::NewStub(admin_channel_);
  Attached stray(peers.get());
  EXPECT_EQ(stray.Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(GrpcServerTest, ShowsRunsMembersAndRing) {
  std::string member;
  const auto a = Member(0x1f, "alpha", &member);
  std::string other;
  const auto b = Member(0x20, "beta", &other);
  {
    grpc::ClientContext context;
    v1::ListRunsResponse runs;
    ASSERT_TRUE(admin_->ListRuns(&context, {}, &runs).ok());
    ASSERT_EQ(runs.runs_size(), 2);
    EXPECT_EQ(runs.runs(0).run(), "alpha");
    EXPECT_EQ(runs.runs(0).members(), 1u);
  }
  {
    grpc::ClientContext context;
    v1::GetOverviewRequest request;
    request.mutable_selector()->set_run("beta");
    v1::GetOverviewResponse overview;
    ASSERT_TRUE(admin_->GetOverview(&context, request, &overview).ok());
    EXPECT_EQ(overview.incarnation(), "c1");
    EXPECT_EQ(overview.streams(), 2u);
    EXPECT_GT(overview.time_us(), int64_t{1600000000} * 1000000);
    ASSERT_EQ(overview.groups_size(), 1);
    EXPECT_EQ(overview.groups(0).members(0).member(), other);
    EXPECT_EQ(overview.groups(0).members(0).peer(), NameOf(0x20));
    EXPECT_TRUE(overview.groups(0).ring(0).attached());
  }
  {
    grpc::ClientContext context;
    v1::GetRingRequest request;
    v1::GetRingResponse rings;
    ASSERT_TRUE(admin_->GetRing(&context, request, &rings).ok());
    ASSERT_EQ(rings.rings_size(), 2);
    EXPECT_EQ(rings.rings(0).peers(0).endpoint(), "10.0.0.1:29700");
  }
  {
    grpc::ClientContext context;
    v1::GetLinksRequest request;
    request.mutable_selector()->set_run("beta");
    v1::GetLinksResponse links;
    ASSERT_TRUE(admin_->GetLinks(&context, request, &links).ok());
    ASSERT_EQ(links.groups_size(), 1);
    EXPECT_EQ(links.groups(0).peers(0).peer(), NameOf(0x20));
    EXPECT_EQ(links.groups(0).links_size(), 0);
  }
  {
    grpc::ClientContext context;
    v1::GetLinksRequest request;
    request.mutable_selector()->set_run("gamma");
    v1::GetLinksResponse links;
    EXPECT_EQ(admin_->GetLinks(&context, request, &links).error_code(),
              grpc::StatusCode::NOT_FOUND);
  }
  {
    grpc::ClientContext context;
    v1::ExplainResponse explanation;
    ASSERT_TRUE(admin_->Explain(&context, {}, &explanation).ok());
    EXPECT_EQ(explanation.groups(0).verdict(),
              "the coordinator waits for nothing; no op is in flight");
  }
  {
    grpc::ClientContext context;
    v1::GetOverviewRequest request;
    request.mutable_selector()->set_run("gamma");
    v1::GetOverviewResponse overview;
    EXPECT_EQ(admin_->GetOverview(&context, request, &overview).error_code(),
              grpc::StatusCode::NOT_FOUND);
  }
}

TEST_F(GrpcServerTest, DrainsAndEvicts) {
  std::string member;
  const auto attached = Member(0x1f, "run", &member);
  const auto drain = [this](const std::string& peer) {
    grpc::ClientContext context;
    v1::DrainRequest request;
    request.set_peer(peer);
    request.set_reason("maintenance");
    v1::DrainResponse response;
    return admin_->Drain(&context, request, &response).error_code();
  };
  const auto evict = [this](const std::string& id) {
    grpc::ClientContext context;
    v1::EvictRequest request;
    request.set_run("run");
    request.set_member(id);
    v1::EvictResponse response;
    return admin_->Evict(&context, request, &response).error_code();
  };
  for (const char* bad : {"", "p", "m1", "p0", "pxyz", "p11112222333344445", "1f"}) {
    EXPECT_EQ(drain(bad), grpc::StatusCode::INVALID_ARGUMENT) << bad;
  }
  for (const char* bad : {"", "m", "m0", "p1", "m-1", "m1a", "m99999999999999999999"}) {
    EXPECT_EQ(evict(bad), grpc::StatusCode::INVALID_ARGUMENT) << bad;
  }
  EXPECT_EQ(drain("p2f"), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(evict("m99"), grpc::StatusCode::NOT_FOUND);
  v1::CoordinatorMessage message;
  EXPECT_EQ(drain(NameOf(0x1f)), grpc::StatusCode::OK);
  ASSERT_TRUE(attached->ReadUntil(v1::CoordinatorMessage::kDrain, &message));
  EXPECT_THAT(message.drain().reason(), HasSubstr("maintenance"));
  EXPECT_EQ(evict(member), grpc::StatusCode::OK);
  ASSERT_TRUE(attached->ReadUntil(v1::CoordinatorMessage::kRemoved, &message));
  EXPECT_EQ(message.removed().why(), v1::REMOVAL_EVICTED);
}

TEST_F(GrpcServerTest, EventsAreGivenFromTheBacklogAndAsTheyHappen) {
  std::string member;
  const auto a = Member(0x1f, "alpha", &member);
  const auto b = Member(0x20, "beta", &member);
  // A message may leave a moment before the event of the same step is in the log.
  ASSERT_TRUE(loop_->QueryAndWait(std::chrono::seconds(30)).ok());
  const std::vector<v1::Event> all = Events({});
  std::vector<std::string> kinds;
  for (const v1::Event& event : all) kinds.push_back(event.kind());
  EXPECT_THAT(kinds, Contains("commit").Times(2));
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i].sequence(), i + 1);

  v1::WatchEventsRequest request;
  request.set_backlog(2);
  EXPECT_EQ(Events(request).size(), 2u);
  request.set_after_sequence(all.size() - 1);
  EXPECT_EQ(Events(request).size(), 1u);
  request.Clear();
  request.set_no_backlog(true);
  EXPECT_EQ(Events(request).size(), 0u);
  request.Clear();
  request.mutable_selector()->set_run("alpha");
  for (const v1::Event& event : Events(request)) EXPECT_NE(event.run(), "beta");

  request.set_follow(true);
  request.set_no_backlog(true);
  grpc::ClientContext context;
  const auto reader = admin_->WatchEvents(&context, request);
  reader->WaitForInitialMetadata();
  std::map<std::string, std::string> begun;
  for (const auto& [key, value] : context.GetServerInitialMetadata()) {
    begun[std::string(key.data(), key.size())] = std::string(value.data(), value.size());
  }
  EXPECT_EQ(begun["longhaul-incarnation"], all[0].incarnation());
  EXPECT_EQ(begun["longhaul-after-sequence"], std::to_string(all.size()));
  const auto c = Member(0x21, "gamma", &member);
  v1::PeerMessage leave;
  leave.mutable_leave()->mutable_group()->set_run("alpha");
  leave.mutable_leave()->set_member(1);
  ASSERT_TRUE(a->Write(leave));
  v1::Event event;
  do {
    ASSERT_TRUE(reader->Read(&event));
    EXPECT_NE(event.run(), "gamma");
  } while (event.run() != "alpha");
  context.TryCancel();
  while (reader->Read(&event)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

// ------------------------------------------------------------------------------ standard services

// Makes a unary or server-streaming call with raw bytes, and returns the first response.
std::string RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                    const std::string& request) {
  struct Call : grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
    void OnReadDone(bool ok) override {
      if (!ok) return;
      grpc::Slice slice;
      if (incoming.DumpToSingleSlice(&slice).ok()) {
        response.assign(reinterpret_cast<const char*>(slice.begin()), slice.size());
      }
      StartRead(&incoming);
    }
    void OnDone(const grpc::Status& status) override { done.set_value(status); }
    grpc::ClientContext context;
    grpc::ByteBuffer outgoing, incoming;
    std::string response;
    std::promise<grpc::Status> done;
  } call;
  const grpc::Slice slice(request);
  call.outgoing = grpc::ByteBuffer(&slice, 1);
  grpc::GenericStub stub(channel);
  stub.PrepareBidiStreamingCall(&call.context, method, {}, &call);
  call.StartWriteLast(&call.outgoing, {});
  call.StartRead(&call.incoming);
  call.StartCall();
  const grpc::Status status = call.done.get_future().get();
  EXPECT_TRUE(status.ok()) << status.error_message();
  return call.response;
}

TEST_F(GrpcServerTest, APortOutlivesALackOfDescriptors) {
  struct rlimit before {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  struct sockaddr_in address {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const absl::StatusOr<HostPort> port = ParseHostPort(server_->address());
  ASSERT_TRUE(port.ok());
  address.sin_port = htons(port->port);
  std::vector<int> strangers;
  const auto connect_one = [&] {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    strangers.push_back(fd);
    return connect(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof address) == 0;
  };
  ASSERT_TRUE(connect_one());
  // The strangers are in this process. So they take the last descriptors themselves, in the end.
  const struct rlimit few = {static_cast<rlim_t>(strangers[0]) + 2 * kDescriptorsReserved,
                             before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const LogLines log;
  while (connect_one()) {
  }
  const auto refused = [&log] { return log.Count("because file descriptors run out") > 0; };
  for (int i = 0; i < 1000 && !refused(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(refused());
  for (const int fd : strangers) close(fd);
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  const auto fresh =
      grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), [] {
        grpc::ChannelArguments own;
        own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
        return own;
      }());
  EXPECT_EQ(RawCall(fresh, "/grpc.health.v1.Health/Check", ""), "\x08\x01");
}

TEST_F(GrpcServerTest, HealthSaysServing) {
  // HealthCheckResponse{status: SERVING}
  EXPECT_EQ(RawCall(channel_, "/grpc.health.v1.Health/Check", ""), "\x08\x01");
  EXPECT_EQ(RawCall(channel_, "/grpc.health.v1.Health/Check", "\x0a\x17longhaul.v1.Coordinator"),
            "\x08\x01");
  EXPECT_EQ(RawCall(admin_channel_, "/grpc.health.v1.Health/Check", "\x0a\x11longhaul.v1.Admin"),
            "\x08\x01");
}

TEST_F(GrpcServerTest, ReflectionListsTheServicesOfEachPort) {
  // ServerReflectionRequest{list_services: "*"}
  const auto list = [](const std::shared_ptr<grpc::Channel>& channel) {
    return RawCall(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                   "\x3a\x01*");
  };
  EXPECT_THAT(list(channel_),
              AllOf(HasSubstr("longhaul.v1.Coordinator"), Not(HasSubstr("longhaul.v1.Admin"))));
  EXPECT_THAT(list(admin_channel_),
              AllOf(HasSubstr("longhaul.v1.Admin"), Not(HasSubstr("longhaul.v1.Coordinator"))));
}

}  // namespace
}  // namespace longhaul::coordinator
