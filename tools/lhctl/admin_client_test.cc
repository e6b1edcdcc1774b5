#include "tools/lhctl/admin_client.h"

#include <grpcpp/grpcpp.h>

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/longhaul/v1/admin.grpc.pb.h"

namespace longhaul {
namespace {

using ::testing::ElementsAre;

// A coordinator whose streams of events do what the test says, and then end.
class Coordinator final : public v1::Admin::Service {
 public:
  struct Stream {
    std::string incarnation;  // empty: the stream is refused
    uint64_t after = 0;
    std::vector<uint64_t> events;
    grpc::StatusCode code = grpc::StatusCode::UNAVAILABLE;
  };

  explicit Coordinator(std::vector<Stream> streams) : streams_(std::move(streams)) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  ~Coordinator() override { server_->Shutdown(); }

  const std::string& address() const { return address_; }
  // The requests, in the order in which they came. Call this only when no client is asking.
  const std::vector<v1::WatchEventsRequest>& asked() const { return asked_; }

 private:
  grpc::Status WatchEvents(grpc::ServerContext* context, const v1::WatchEventsRequest* request,
                           grpc::ServerWriter<v1::Event>* writer) override {
    const Stream& stream = streams_.at(asked_.size());
    asked_.push_back(*request);
    if (stream.incarnation.empty()) return {stream.code, "refused"};
    context->AddInitialMetadata("longhaul-incarnation", stream.incarnation);
    context->AddInitialMetadata("longhaul-after-sequence", std::to_string(stream.after));
    writer->SendInitialMetadata();
    for (const uint64_t sequence : stream.events) {
      v1::Event event;
      event.set_sequence(sequence);
      event.set_incarnation(stream.incarnation);
      writer->Write(event);
    }
    return {stream.code, "it stops"};
  }

  const std::vector<Stream> streams_;
  std::vector<v1::WatchEventsRequest> asked_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

struct Followed {
  absl::Status ended;
  std::vector<uint64_t> events;
  int lost = 0;
};

Followed Follow(const Coordinator& coordinator, const v1::WatchEventsRequest& request) {
  AdminClient client({coordinator.address()});
  Followed followed;
  followed.ended = client.FollowEvents(
      request, [&](const v1::Event& event) { followed.events.push_back(event.sequence()); },
      [&](const std::string&) { ++followed.lost; });
  return followed;
}

v1::WatchEventsRequest FollowRequest() {
  v1::WatchEventsRequest request;
  request.set_follow(true);
  request.mutable_selector()->set_run("demo");
  return request;
}

TEST(FollowEvents, GoesOnWhereACoordinatorEndsBeforeItHadAnEvent) {
  const Coordinator coordinator({{"first", 7, {}},
                                 {"second", 0, {1, 2}},
                                 {"second", 2, {}, grpc::StatusCode::RESOURCE_EXHAUSTED}});
  v1::WatchEventsRequest request = FollowRequest();
  request.set_no_backlog(true);
  const Followed followed = Follow(coordinator, request);
  EXPECT_TRUE(absl::IsResourceExhausted(followed.ended)) << followed.ended;
  EXPECT_EQ(followed.lost, 2);
  EXPECT_THAT(followed.events, ElementsAre(1, 2));
  ASSERT_EQ(coordinator.asked().size(), 3u);
  EXPECT_TRUE(coordinator.asked()[0].no_backlog());
  // The client gets the events of the meantime, and no event twice.
  EXPECT_FALSE(coordinator.asked()[1].no_backlog());
  EXPECT_EQ(coordinator.asked()[1].incarnation(), "first");
  EXPECT_EQ(coordinator.asked()[1].after_sequence(), 7u);
  EXPECT_EQ(coordinator.asked()[1].selector().run(), "demo");
  EXPECT_EQ(coordinator.asked()[2].incarnation(), "second");
  EXPECT_EQ(coordinator.asked()[2].after_sequence(), 2u);
}

TEST(FollowEvents, EndsWhereNoCoordinatorAnswersAtFirst) {
  const Coordinator coordinator({Coordinator::Stream{}});
  const Followed followed = Follow(coordinator, FollowRequest());
  EXPECT_TRUE(absl::IsUnavailable(followed.ended)) << followed.ended;
  EXPECT_EQ(followed.lost, 0);
  EXPECT_EQ(coordinator.asked().size(), 1u);
}

}  // namespace
}  // namespace longhaul
