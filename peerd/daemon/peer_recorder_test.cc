#include "peerd/daemon/peer_recorder.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fill_secrets.h"

namespace longhaul::peerd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const GroupKey kGroup{"demo", 3};

class PeerRecorderTest : public testing::Test {
 protected:
  PeerRecorderTest() {
    LocalJoin join;
    join.local = LocalId(1);
    join.group = kGroup;
    peer_.OnEvent(join, Tick{10});
    World world;
    world.member = MemberId(7);
    world.size = 2;
    peer_.OnAction(JoinDone{LocalId(1), {}, world}, Tick{20});
  }

  void Post(uint64_t call, uint64_t tag, Tick now) {
    LocalPost post;
    post.post = {LocalId(1), call};
    post.tag = tag;
    post.desc.count = 256;
    peer_.OnEvent(post, now);
  }
  void Ready(uint64_t peer, uint64_t tag, Tick now) {
    PeerReady ready;
    ready.group = kGroup;
    ready.peer = PeerId(peer);
    ready.tag = tag;
    peer_.OnEvent(ready, now);
  }
  void Done(uint64_t call, Tick now, Outcome outcome = {}, int64_t wait_us = 30) {
    OpInfo info;
    info.epoch = Epoch(5);
    info.members = {MemberId(1), MemberId(2)};
    info.wait_us = wait_us;
    info.transfer_us = 40;
    info.algorithm = Algorithm::kRing;
    peer_.OnAction(PostDone{{LocalId(1), call}, outcome, info}, now);
  }
  Record Op(uint64_t sequence) {
    Record record;
    EXPECT_TRUE(recorder_.ops().Read(sequence, &record));
    return record;
  }
  std::string LastEvent() {
    Record record;
    EXPECT_TRUE(recorder_.events().Read(recorder_.events().newest(), &record));
    return TextOf(record.text, sizeof record.text);
  }

  Recorder recorder_{"t", "1", 64, 64};
  std::vector<std::string> faults_;
  PeerRecorder peer_{&recorder_, [this](std::string_view why) { faults_.emplace_back(why); }};
};

TEST_F(PeerRecorderTest, AnOpIsThereFromItsPostOn) {
  Post(1, 42, Tick{100});
  EXPECT_EQ(Op(1).flags, kRecordOpOpen);
  EXPECT_EQ(Op(1).tag, 42u);
  EXPECT_EQ(Op(1).bytes, 1024u);
  EXPECT_EQ(Op(1).group, 3u);
  EXPECT_EQ(Op(1).member, 7u);
  EXPECT_EQ(TextOf(Op(1).run, sizeof Record::run), "demo");
  Done(1, Tick{190});
  EXPECT_EQ(recorder_.ops().newest(), 1u);
  EXPECT_EQ(Op(1).flags, 0);
  EXPECT_EQ(Op(1).time_us, 100);
  EXPECT_EQ(Op(1).wait_us, 30);
  EXPECT_EQ(Op(1).transfer_us, 40);
  EXPECT_EQ(Op(1).total_us, 90);
  EXPECT_EQ(Op(1).epoch, 5u);
  EXPECT_EQ(Op(1).world_size, 2u);
  EXPECT_EQ(Op(1).algorithm, static_cast<uint8_t>(Algorithm::kRing));
  EXPECT_TRUE(faults_.empty());
}

TEST_F(PeerRecorderTest, ThePeerWhoseReadyCameLastWasWaitedFor) {
  Ready(0xa, 42, Tick{90});
  Post(1, 42, Tick{100});
  Ready(0xb, 42, Tick{110});
  Ready(0xc, 42, Tick{130});
  Ready(0xd, 43, Tick{125});  // of another op
  Ready(0xb, 42, Tick{150});  // of the next op with this tag
  Done(1, Tick{190});
  EXPECT_EQ(Op(1).peer, 0xcu);
}

TEST_F(PeerRecorderTest, AnOpThatWasPostedLastWaitedForNobody) {
  Ready(0xa, 42, Tick{90});
  Post(1, 42, Tick{100});
  Done(1, Tick{190});
  EXPECT_EQ(Op(1).peer, 0u);
}

TEST_F(PeerRecorderTest, AnAbortedOpSaysWhyAndIsAFault) {
  Post(1, 42, Tick{100});
  Done(1, Tick{190}, {Code::kAborted, "m3 died"});
  EXPECT_EQ(Op(1).code, static_cast<uint8_t>(Code::kAborted));
  EXPECT_EQ(TextOf(Op(1).text, sizeof Record::text), "m3 died");
  EXPECT_THAT(faults_, ElementsAre("op aborted: m3 died"));
}

TEST_F(PeerRecorderTest, AnEndWithoutAPostIsLeftOut) {
  Done(9, Tick{190});
  EXPECT_EQ(recorder_.ops().newest(), 0u);
}

TEST_F(PeerRecorderTest, EventsSayWhatHappened) {
  EXPECT_THAT(LastEvent(), HasSubstr("admitted"));
  peer_.OnEvent(CoordinatorDown{}, Tick{30});
  EXPECT_EQ(LastEvent(), "the coordinator is lost");
  peer_.OnEvent(LinkDown{"demo", PeerId(0xb), "reset"}, Tick{40});
  EXPECT_EQ(LastEvent(), "link lost: reset");
  control::Removed removed{kGroup, MemberId(7), control::Removal::kDied, "silence"};
  peer_.OnEvent(FromCoordinator{removed}, Tick{50});
  EXPECT_EQ(LastEvent(), "m7 is removed, died: silence");
  peer_.OnAction(FaultOver{kGroup, 20000, 5000}, Tick{60});
  EXPECT_EQ(LastEvent(), "fault over: agreed in 20 ms, first redone op after 5 ms");
  EXPECT_EQ(faults_.size(), 2u);
  peer_.OnLanesLost(2, Tick{70});
  EXPECT_EQ(LastEvent(), "2 lanes lost");
  const uint64_t before = recorder_.events().newest();
  peer_.OnLanesLost(2, Tick{80});
  EXPECT_EQ(recorder_.events().newest(), before);
}

TEST_F(PeerRecorderTest, ASyncIsToldIfBytesMoveOrItFails) {
  const uint64_t before = recorder_.events().newest();
  SyncDone sync;
  sync.local = LocalId(1);
  sync.revision = 4;
  peer_.OnAction(sync, Tick{30});
  EXPECT_EQ(recorder_.events().newest(), before);
  sync.bytes = 1000;
  peer_.OnAction(sync, Tick{30});
  EXPECT_EQ(LastEvent(), "sync ended at revision 4, 1000 bytes fetched, ok");
  sync.bytes = 0;
  sync.outcome = {Code::kAborted, "fault"};
  peer_.OnAction(sync, Tick{30});
  EXPECT_THAT(LastEvent(), HasSubstr("aborted: fault"));
}

TEST_F(PeerRecorderTest, NoSecretOfAnyMessageIsRecorded) {
  const int secrets = ForEachKindWithSecrets<control::CoordinatorMessage>(
      [&](const auto& message) { peer_.OnEvent(FromCoordinator{message}, Tick{30}); });
  EXPECT_GT(secrets, 0);
  ForEachKindWithSecrets<control::PeerMessage>(
      [&](const auto& message) { peer_.OnAction(ToCoordinator{message}, Tick{40}); });
  EXPECT_FALSE(ShowsSecret(recorder_.Serialize("", SIZE_MAX, SIZE_MAX)));
}

}  // namespace
}  // namespace longhaul::peerd
