// Tests what join tokens allow at a whole coordinator, over real connections.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>

#include "base/crypto/identity.h"
#include "coordinator/server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/control/grpc/support.h"
#include "proto/control/messages.h"
#include "proto/longhaul/v1/admin.grpc.pb.h"
#include "proto/longhaul/v1/coordinator.grpc.pb.h"

namespace longhaul::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::chrono::seconds kDeadline{20};

v1::PeerMessage Hello(uint64_t peer, const std::string& run = "") {
  v1::PeerMessage message;
  v1::Hello* hello = message.mutable_hello();
  hello->set_peer(peer);
  hello->add_endpoints("10.0.0.1:29700");
  hello->set_protocol(control::kProtocolVersion);
  hello->set_host("host");
  if (!run.empty()) {
    hello->add_groups()->mutable_group()->set_run(run);
  }
  return message;
}

v1::PeerMessage Join(const std::string& run, uint32_t group, uint64_t request) {
  v1::PeerMessage message;
  message.mutable_join()->set_request(request);
  message.mutable_join()->mutable_group()->set_run(run);
  message.mutable_join()->mutable_group()->set_group(group);
  return message;
}

void Show(const std::string& token, grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() + kDeadline);
  if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
}

// A peer's control stream.
struct Peer {
  Peer(v1::Coordinator::Stub* stub, const std::string& token) {
    Show(token, &context);
    stream = stub->Attach(&context);
  }
  // A Hello gets the key and the signature of the peer of this number.
  bool Write(v1::PeerMessage message) {
    if (message.has_hello()) {
      const Identity identity = Identity::ForTest(message.hello().peer());
      stream->WaitForInitialMetadata();
      const auto& metadata = context.GetServerInitialMetadata();
      const auto nonce = metadata.find(control::kNonceMetadata);
      if (nonce == metadata.end()) return false;
      v1::Hello* const hello = message.mutable_hello();
      hello->set_peer(identity.peer().value());
      hello->set_key(identity.public_key());
      hello->set_signature(identity.Sign(PossessionText(
          std::string(nonce->second.data(), nonce->second.size()), identity.public_key())));
    }
    return stream->Write(message);
  }
  bool ReadUntil(v1::CoordinatorMessage::MessageCase kind, v1::CoordinatorMessage* message) {
    while (stream->Read(message)) {
      if (message->message_case() == kind) return true;
    }
    return false;
  }
  // Says Hello, and waits for the answer.
  bool Attach(uint64_t peer) {
    v1::CoordinatorMessage message;
    return Write(Hello(peer)) && ReadUntil(v1::CoordinatorMessage::kWelcome, &message);
  }
  // Why the join was refused; "": it was not.
  std::string Refused(const v1::PeerMessage& join) {
    v1::CoordinatorMessage message;
    EXPECT_TRUE(Write(join));
    while (stream->Read(&message)) {
      if (message.has_join_pending() && message.join_pending().request() == join.join().request()) {
        return "";
      }
      if (message.has_join_refused()) return message.join_refused().text();
    }
    return "the stream ended: " + stream->Finish().error_message();
  }
  grpc::Status Finish() {
    v1::CoordinatorMessage message;
    while (stream->Read(&message)) {
    }
    return stream->Finish();
  }
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::PeerMessage, v1::CoordinatorMessage>> stream;
};

class ServerTokensTest : public ::testing::Test {
 protected:
  ServerTokensTest() {
    // The first start asks operators for nothing. So there can be a token for the second one.
    Start("none");
    operator_ = Token("*", "operator");
    Start("token");
  }
  ~ServerTokensTest() override {
    server_.reset();
    for (const char* suffix : {"", "-wal", "-shm", "-lock"}) unlink((path_ + suffix).c_str());
  }

  void Start(const std::string& auth) {
    server_.reset();
    ServerOptions options;
    options.listen = "127.0.0.1:0";
    options.admin = "127.0.0.1:0";
    options.store = "sqlite:" + path_;
    options.auth = auth;
    options.admin_auth = auth;
    options.core.detect_ms = 30000;
    options.fatal = [](const absl::Status& status) { ADD_FAILURE() << status; };
    auto server = Server::Start(options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = Channel(server_->grpc_address());
    admin_channel_ = Channel(server_->admin_address());
    peers_ = v1::Coordinator::NewStub(channel_);
    admin_ = v1::Admin::NewStub(admin_channel_);
  }
  static std::shared_ptr<grpc::Channel> Channel(const std::string& address) {
    grpc::ChannelArguments args;
    args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args);
  }

  // Makes a token; `change` may ask for more.
  std::string Token(const std::string& run, const std::string& role = "trainer",
                    const std::function<void(v1::CreateTokenRequest*)>& change = nullptr) {
    v1::CreateTokenRequest request;
    request.set_run(run);
    request.set_role(role);
    if (change) change(&request);
    v1::CreateTokenResponse response;
    grpc::ClientContext context;
    Show(operator_, &context);
    const grpc::Status status = admin_->CreateToken(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.token();
  }
  grpc::Status Revoke(const std::string& token) {
    v1::RevokeTokenRequest request;
    request.set_id(token.substr(4, kTokenIdBytes));
    v1::RevokeTokenResponse response;
    grpc::ClientContext context;
    Show(operator_, &context);
    return admin_->RevokeToken(&context, request, &response);
  }
  std::string Metric(const std::string& reason) {
    const std::string name =
        "longhaul_coordinator_callers_refused_total{reason=\"" + reason + "\"} ";
    const std::string text = server_->metrics()->Text();
    const size_t at = text.find(name) + name.size();
    return text.substr(at, text.find('\n', at) - at);
  }
  // How a call of Admin ends for a caller with this token.
  template <class Request, class Response>
  grpc::Status Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                            Response*),
                    const std::string& token, const Request& request = {}) {
    Response response;
    grpc::ClientContext context;
    Show(token, &context);
    return (admin_.get()->*method)(&context, request, &response);
  }
  // Waits until the peer has no stream any more.
  void ExpectEnded(Peer* peer, const std::string& words) {
    const grpc::Status status = peer->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(words));
  }

  const std::string path_ =
      ::testing::TempDir() + "/server_tokens_" + std::to_string(getpid()) + ".db";
  std::string operator_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_, admin_channel_;
  std::unique_ptr<v1::Coordinator::Stub> peers_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

// ------------------------------------------------------------------------------ Admin

// Calls the method with an empty request.
grpc::StatusCode Ask(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& token, std::string* text) {
  struct Call : grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
    void OnReadDone(bool ok) override {
      if (ok) StartRead(&incoming);
    }
    void OnDone(const grpc::Status& status) override { done.set_value(status); }
    grpc::ClientContext context;
    grpc::ByteBuffer outgoing, incoming;
    std::promise<grpc::Status> done;
  } call;
  Show(token, &call.context);
  const grpc::Slice empty;
  call.outgoing = grpc::ByteBuffer(&empty, 1);
  grpc::GenericStub stub(channel);
  stub.PrepareBidiStreamingCall(&call.context, method, {}, &call);
  call.StartWriteLast(&call.outgoing, {});
  call.StartRead(&call.incoming);
  call.StartCall();
  const grpc::Status status = call.done.get_future().get();
  *text = status.error_message();
  return status.error_code();
}

TEST_F(ServerTokensTest, NoMethodOfAdminWorksWithoutAToken) {
  const auto* service =
      google::protobuf::DescriptorPool::generated_pool()->FindServiceByName("longhaul.v1.Admin");
  ASSERT_NE(service, nullptr);
  ASSERT_GT(service->method_count(), 10);
  const std::string trainer = Token("a");
  const std::string observer = Token("*", "observer");
  const std::set<std::string> orders = {"Drain", "Evict", "CreateToken", "ListTokens",
                                        "RevokeToken"};
  for (int i = 0; i < service->method_count(); ++i) {
    const std::string name = service->method(i)->name();
    const std::string method = "/longhaul.v1.Admin/" + name;
    std::string text;
    EXPECT_EQ(Ask(admin_channel_, method, "", &text), grpc::StatusCode::UNAUTHENTICATED) << method;
    EXPECT_THAT(text, HasSubstr("shows no join token")) << method;
    EXPECT_EQ(Ask(admin_channel_, method, trainer, &text), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(text, AllOf(HasSubstr("role trainer"), HasSubstr("needs"))) << method;
    const grpc::StatusCode observed = Ask(admin_channel_, method, observer, &text);
    EXPECT_EQ(observed == grpc::StatusCode::PERMISSION_DENIED, orders.contains(name))
        << method << ": " << text;
    EXPECT_NE(Ask(admin_channel_, method, operator_, &text), grpc::StatusCode::PERMISSION_DENIED);
  }
  EXPECT_EQ(Metric("missing"), std::to_string(service->method_count()));
}

TEST_F(ServerTokensTest, AnObserverOfOneRunSeesThatRunOnly) {
  const std::string trainer = Token("*");
  Peer peer(peers_.get(), trainer);
  ASSERT_TRUE(peer.Attach(1));
  ASSERT_EQ(peer.Refused(Join("a", 0, 1)), "");
  ASSERT_EQ(peer.Refused(Join("b", 0, 2)), "");
  const std::string token = Token("a", "observer");

  grpc::ClientContext context;
  Show(token, &context);
  v1::ListRunsResponse runs;
  ASSERT_TRUE(admin_->ListRuns(&context, {}, &runs).ok());
  ASSERT_EQ(runs.runs_size(), 1);
  EXPECT_EQ(runs.runs(0).run(), "a");

  grpc::ClientContext overview_context;
  Show(token, &overview_context);
  v1::GetOverviewResponse overview;
  ASSERT_TRUE(admin_->GetOverview(&overview_context, {}, &overview).ok());
  ASSERT_EQ(overview.groups_size(), 1);
  EXPECT_EQ(overview.groups(0).run(), "a");

  v1::GetOverviewRequest other;
  other.mutable_selector()->set_run("b");
  const grpc::Status refused = Call(&v1::Admin::Stub::GetOverview, token, other);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), AllOf(HasSubstr("run b"), HasSubstr("is for run a")));
  EXPECT_EQ(Call(&v1::Admin::Stub::ReadRecording, token).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);

  grpc::ClientContext events_context;
  Show(token, &events_context);
  const auto reader = admin_->WatchEvents(&events_context, {});
  int seen = 0;
  for (v1::Event event; reader->Read(&event); ++seen) EXPECT_EQ(event.run(), "a") << event.text();
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_GT(seen, 0);
}

TEST_F(ServerTokensTest, AnOperatorOfOneRunEvictsThereOnly) {
  const std::string token = Token("a", "operator");
  v1::EvictRequest evict;
  evict.set_member("m1");
  evict.set_run("a");
  EXPECT_EQ(Call(&v1::Admin::Stub::Evict, token, evict).error_code(), grpc::StatusCode::NOT_FOUND);
  evict.set_run("b");
  EXPECT_EQ(Call(&v1::Admin::Stub::Evict, token, evict).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  for (const grpc::Status& status :
       {Call(&v1::Admin::Stub::Drain, token), Call(&v1::Admin::Stub::CreateToken, token),
        Call(&v1::Admin::Stub::ListTokens, token), Call(&v1::Admin::Stub::RevokeToken, token)}) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(status.error_message(), HasSubstr("concerns all runs"));
  }
}

TEST_F(ServerTokensTest, AListShowsStatesAndNoSecret) {
  const std::string token = Token("a", "trainer", [](v1::CreateTokenRequest* request) {
    request->set_label("site b");
    request->set_members(5);
  });
  ASSERT_TRUE(Revoke(token).ok());
  v1::ListTokensResponse list;
  grpc::ClientContext context;
  Show(operator_, &context);
  ASSERT_TRUE(admin_->ListTokens(&context, {}, &list).ok());
  ASSERT_EQ(list.tokens_size(), 2);
  const v1::Token& listed = list.tokens(list.tokens(0).run() == "a" ? 0 : 1);
  EXPECT_EQ(listed.state(), "revoked");
  EXPECT_EQ(listed.label(), "site b");
  EXPECT_EQ(listed.members(), 5u);
  EXPECT_EQ(listed.expires_s() - listed.created_s(), 30 * 86400);
  EXPECT_THAT(list.DebugString(), Not(HasSubstr(token.substr(17))));
  v1::CreateTokenRequest wrong;
  wrong.set_run("a");
  wrong.set_role("admin");
  EXPECT_EQ(Call(&v1::Admin::Stub::CreateToken, operator_, wrong).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ServerTokensTest, AWatchEndsWhenItsTokenIsRevoked) {
  const std::string token = Token("*", "observer");
  grpc::ClientContext context;
  Show(token, &context);
  v1::WatchEventsRequest request;
  request.set_follow(true);
  const auto reader = admin_->WatchEvents(&context, request);
  reader->WaitForInitialMetadata();
  ASSERT_TRUE(Revoke(token).ok());
  for (v1::Event event; reader->Read(&event);) {
  }
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(status.error_message(), HasSubstr("was revoked"));
}

// ------------------------------------------------------------------------------ peers

TEST_F(ServerTokensTest, APeerNeedsATokenOfATrainer) {
  // Each on a connection of its own: a caller who is not known yet may open a few streams only.
  const auto attach = [this](const std::string& token) {
    const auto peers = v1::Coordinator::NewStub(Channel(server_->grpc_address()));
    Peer peer(peers.get(), token);
    return peer.Finish();
  };
  grpc::Status status = attach("");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(status.error_message(), HasSubstr("shows no join token"));
  EXPECT_EQ(attach("guess").error_code(), grpc::StatusCode::UNAUTHENTICATED);
  std::string token = Token("a");
  token[20] = token[20] == 'A' ? 'B' : 'A';
  EXPECT_THAT(attach(token).error_message(), HasSubstr("is not known here"));
  for (const char* role : {"observer", "operator"}) {
    status = attach(Token("*", role));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(status.error_message(), HasSubstr(std::string("role ") + role));
  }
  EXPECT_EQ(Metric("missing"), "1");
  EXPECT_EQ(Metric("malformed"), "1");
  EXPECT_EQ(Metric("unknown"), "1");
  EXPECT_EQ(Metric("role"), "2");
  // No stream was opened for them.
  EXPECT_THAT(server_->metrics()->Text(),
              HasSubstr("longhaul_coordinator_streams_opened_total 0\n"));
  Peer peer(peers_.get(), Token("a"));
  EXPECT_TRUE(peer.Attach(1));
}

TEST_F(ServerTokensTest, TwoAuthorizationHeadersAreRefused) {
  grpc::ClientContext context;
  const std::string token = Token("a");
  Show(token, &context);
  context.AddMetadata("authorization", "Bearer " + token);
  const auto stream = peers_->Attach(&context);
  v1::CoordinatorMessage message;
  EXPECT_FALSE(stream->Read(&message));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(ServerTokensTest, APeerJoinsGroupsOfItsRunOnly) {
  const std::string token = Token("a");
  Peer peer(peers_.get(), token);
  ASSERT_TRUE(peer.Attach(1));
  EXPECT_EQ(peer.Refused(Join("a", 0, 1)), "");
  EXPECT_THAT(peer.Refused(Join("b", 0, 2)),
              AllOf(HasSubstr("join of b/0 refused"), HasSubstr("run b"), HasSubstr("for run a")));
  EXPECT_EQ(peer.Refused(Join("a", 1, 3)), "") << "the stream goes on";
  EXPECT_EQ(Metric("run"), "1");
  const auto overview = server_->loop()->QueryAndWait(kDeadline);
  ASSERT_TRUE(overview.ok());
  for (const GroupView& group : overview->groups) EXPECT_EQ(group.group.run, "a");

  // Any other message that names a group of another run ends the stream.
  v1::PeerMessage vote;
  vote.mutable_vote()->mutable_group()->set_run("b");
  vote.mutable_vote()->set_member(1);
  vote.mutable_vote()->set_number(1);
  ASSERT_TRUE(peer.Write(vote));
  const grpc::Status status = peer.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("Vote of b/0"), HasSubstr("for run a")));

  Peer other(peers_.get(), token);
  ASSERT_TRUE(other.Write(Hello(2, "b")));
  EXPECT_THAT(other.Finish().error_message(), HasSubstr("Hello of b/0 refused"));
  EXPECT_EQ(Metric("run"), "3");
}

TEST_F(ServerTokensTest, AQuotaCountsTheMembersGroupsAndRunsOfAllPeersOfAToken) {
  const std::string token = Token("*", "trainer", [](v1::CreateTokenRequest* request) {
    request->set_members(4);
    request->set_groups(3);
    request->set_runs(2);
  });
  Peer first(peers_.get(), token);
  Peer second(peers_.get(), token);
  ASSERT_TRUE(first.Attach(1));
  ASSERT_TRUE(second.Attach(2));
  EXPECT_EQ(first.Refused(Join("a", 0, 1)), "");
  EXPECT_EQ(second.Refused(Join("b", 0, 1)), "");
  EXPECT_THAT(first.Refused(Join("c", 0, 2)), HasSubstr("have 2 runs, the most"));
  EXPECT_EQ(first.Refused(Join("a", 1, 3)), "");
  EXPECT_THAT(first.Refused(Join("a", 2, 4)), HasSubstr("have 3 groups, the most"));
  EXPECT_EQ(second.Refused(Join("a", 0, 5)), "") << "a group that the token has already";
  EXPECT_THAT(first.Refused(Join("a", 0, 6)), HasSubstr("have 4 members, the most"));
  EXPECT_EQ(first.Refused(Join("a", 0, 1)), "") << "a join that was answered before";
  EXPECT_EQ(Metric("quota"), "3");
  // Peers with another token are not counted.
  Peer third(peers_.get(), Token("a"));
  ASSERT_TRUE(third.Attach(3));
  EXPECT_EQ(third.Refused(Join("a", 7, 1)), "");
  // What is given back may be used again.
  v1::PeerMessage leave;
  leave.mutable_leave()->mutable_group()->set_run("b");
  leave.mutable_leave()->set_member(1);
  ASSERT_TRUE(second.Write(leave));
  v1::CoordinatorMessage message;
  ASSERT_TRUE(second.ReadUntil(v1::CoordinatorMessage::kRemoved, &message));
  EXPECT_EQ(first.Refused(Join("c", 0, 7)), "");
}

TEST_F(ServerTokensTest, RevokingATokenEndsItsStreamsAndNoOthers) {
  const std::string token = Token("a");
  Peer revoked(peers_.get(), token);
  Peer twin(peers_.get(), token);
  Peer other(peers_.get(), Token("a"));
  ASSERT_TRUE(revoked.Attach(1));
  ASSERT_TRUE(twin.Attach(2));
  ASSERT_TRUE(other.Attach(3));
  ASSERT_TRUE(Revoke(token).ok());
  ExpectEnded(&revoked, "was revoked at");
  ExpectEnded(&twin, "was revoked at");
  EXPECT_EQ(Metric("revoked"), "2");
  Peer again(peers_.get(), token);
  ExpectEnded(&again, "was revoked at");
  EXPECT_EQ(other.Refused(Join("a", 0, 1)), "");
}

TEST_F(ServerTokensTest, AnExpiredTokenEndsItsStreams) {
  Peer peer(peers_.get(),
            Token("a", "trainer", [](v1::CreateTokenRequest* request) { request->set_ttl_s(2); }));
  ASSERT_TRUE(peer.Attach(1));
  ExpectEnded(&peer, "expired at");
  EXPECT_EQ(Metric("expired"), "1");
}

TEST_F(ServerTokensTest, TokensOutliveTheCoordinator) {
  const std::string token = Token("a");
  const std::string revoked = Token("a");
  ASSERT_TRUE(Revoke(revoked).ok());
  Start("token");
  Peer peer(peers_.get(), token);
  EXPECT_TRUE(peer.Attach(1));
  Peer refused(peers_.get(), revoked);
  ExpectEnded(&refused, "was revoked at");
}

TEST_F(ServerTokensTest, WhatNobodyCouldShowIsNoChoice) {
  ServerOptions options;
  options.core.detect_ms = 1000;
  options.auth = "certificate";
  EXPECT_THAT(std::string(Server::Start(options).status().message()),
              AllOf(HasSubstr("--auth=certificate"), HasSubstr("--tls-ca")));
  options.auth = "sometimes";
  EXPECT_THAT(std::string(Server::Start(options).status().message()),
              HasSubstr("--auth=sometimes: give auto"));
}

}  // namespace
}  // namespace longhaul::coordinator
