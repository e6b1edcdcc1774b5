#include "coordinator/grpc/recording_desk.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::HasSubstr;

class FakeStream final : public RecordingStream {
 public:
  void SendBytes(std::string bytes) override {
    sent.push_back(*control::ParseReadRecording(bytes));
  }
  std::vector<control::ReadRecording> sent;
};

class RecordingDeskTest : public testing::Test {
 protected:
  RecordingDeskTest() { desk_.Add(PeerId(1), stream_); }

  uint64_t Ask(PeerId peer) {
    return desk_.Ask(peer, {}, [this](const absl::StatusOr<RecordingAnswer>& answer) {
      answers_.push_back(answer);
    });
  }
  control::RecordingPiece PieceFor(uint64_t request) {
    control::RecordingPiece piece;
    piece.request = request;
    piece.data = "abc";
    return piece;
  }

  RecordingDesk desk_{nullptr};
  std::shared_ptr<FakeStream> stream_ = std::make_shared<FakeStream>();
  std::vector<absl::StatusOr<RecordingAnswer>> answers_;
};

TEST_F(RecordingDeskTest, PassesRequestAndAnswer) {
  const uint64_t request = Ask(PeerId(1));
  ASSERT_EQ(stream_->sent.size(), 1u);
  EXPECT_EQ(stream_->sent[0].request, request);
  EXPECT_TRUE(answers_.empty());
  desk_.OnPiece(PeerId(1), PieceFor(request));
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok());
  EXPECT_EQ(answers_[0]->piece.data, "abc");
  EXPECT_GT(answers_[0]->asked_us, 0);
  EXPECT_GE(answers_[0]->answered_us, answers_[0]->asked_us);
  // A second answer, and the end of the call, change nothing.
  desk_.OnPiece(PeerId(1), PieceFor(request));
  desk_.Cancel(request);
  EXPECT_EQ(answers_.size(), 1u);
}

TEST_F(RecordingDeskTest, DropsAnswersOfOtherPeersAndAnswersThatNobodyAskedFor) {
  const uint64_t request = Ask(PeerId(1));
  desk_.OnPiece(PeerId(2), PieceFor(request));
  desk_.OnPiece(PeerId(1), PieceFor(request + 1));
  desk_.OnPiece(PeerId(1), PieceFor(0));
  EXPECT_TRUE(answers_.empty());
}

TEST_F(RecordingDeskTest, APeerThatIsNotThereIsNotFound) {
  Ask(PeerId(2));
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsNotFound(answers_[0].status()));
  EXPECT_THAT(answers_[0].status().message(), HasSubstr("p2"));
  stream_.reset();
  Ask(PeerId(1));
  EXPECT_TRUE(absl::IsNotFound(answers_.back().status()));
}

TEST_F(RecordingDeskTest, TheEndOfTheStreamEndsItsRequests) {
  Ask(PeerId(1));
  const auto newer = std::make_shared<FakeStream>();
  desk_.Remove(PeerId(1), newer.get());  // of another stream of the peer
  EXPECT_TRUE(answers_.empty());
  desk_.Remove(PeerId(1), stream_.get());
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(answers_[0].status()));
}

TEST_F(RecordingDeskTest, RequestsAreBounded) {
  uint64_t first = 0;
  for (size_t i = 0; i < RecordingDesk::kRequestsMax; ++i) {
    const uint64_t request = Ask(PeerId(1));
    if (i == 0) first = request;
  }
  EXPECT_TRUE(answers_.empty());
  Ask(PeerId(1));
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsResourceExhausted(answers_[0].status()));
  desk_.Cancel(first);
  EXPECT_TRUE(absl::IsCancelled(answers_[1].status()));
  Ask(PeerId(1));
  EXPECT_EQ(answers_.size(), 2u);
}

TEST_F(RecordingDeskTest, TheTextOfAPeerHasNoControlCharacters) {
  control::RecordingPiece piece = PieceFor(Ask(PeerId(1)));
  piece.error = "no\x1b[2J";
  desk_.OnPiece(PeerId(1), piece);
  EXPECT_EQ(answers_[0].status().message(), "no?[2J");
}

TEST(RecordingDesk, ReadsItsOwnRecorder) {
  EXPECT_TRUE(absl::IsNotFound(RecordingDesk(nullptr).AskSelf({}).status()));
  const Recorder recorder("c", "1", 1, 4);
  RecordingDesk desk(&recorder);
  const auto answer = desk.AskSelf({});
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(ParseRecording(answer->piece.data)->program, "c");
  EXPECT_EQ(answer->asked_us, 0);
}

}  // namespace
}  // namespace longhaul::coordinator
