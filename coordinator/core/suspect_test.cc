// Reports about contributions that look wrong: they become events, in bounded number, and decide
// nothing.
#include <string>
#include <vector>

#include "coordinator/core/coordinator_core.h"
#include "gtest/gtest.h"
#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

using Texts = std::vector<std::string>;

class SuspectTest : public testing::Test {
 protected:
  void Report(uint64_t reporter, uint64_t peer, uint64_t nan, std::vector<MemberId> members = {}) {
    control::ContributionSuspect suspect;
    suspect.group = Harness::G();
    suspect.tag = 7;
    suspect.peer = PeerId(peer);
    suspect.members = std::move(members);
    suspect.nan = nan;
    h.Say(PeerId(reporter), suspect);
  }
  Texts Events() const { return h.Notices("contribution_suspect"); }

  Harness h;
};

TEST_F(SuspectTest, TheEventSaysWhoSentWhatAndWhoReportedIt) {
  h.Found(3);
  control::ContributionSuspect suspect;
  suspect.group = Harness::G();
  suspect.tag = 7;
  suspect.peer = PeerId(3);
  suspect.nan = 12;
  suspect.inf = 1;
  suspect.norms = "rms=1e+06 median=2 hosts=3";
  suspect.held_back = 4;
  h.Say(PeerId(1), suspect);
  EXPECT_EQ(Events(), (Texts{"contribution suspect reporter=p1 peer=p3 members=m3 tag=7 nan=12 "
                             "inf=1 held_back=4 host=\"host3\" "
                             "norms=\"rms=1e+06 median=2 hosts=3\""}));
  EXPECT_TRUE(h.closings().empty());
  EXPECT_EQ(h.Take(PeerId(3)), Texts{});
}

TEST_F(SuspectTest, OnePairHasOneEventInTenSeconds) {
  h.Found(3);
  for (int i = 0; i < 100; ++i) Report(1, 3, 1);
  EXPECT_EQ(Events().size(), 1u);
  // Another reporter, and another suspect.
  Report(2, 3, 1);
  Report(1, 2, 1);
  EXPECT_EQ(Events().size(), 3u);
  h.Wait(10001);
  Report(1, 3, 1);
  ASSERT_EQ(Events().size(), 4u);
  EXPECT_NE(Events().back().find(" held_back=99 "), std::string::npos) << Events().back();
}

TEST_F(SuspectTest, APeerNamesItsOwnMembersOnly) {
  h.Found(2);
  h.LivelyJoin(PeerId(1), 2);
  h.Run();
  h.LivelyVote(PeerId(1), MemberId(1));
  h.LivelyVote(PeerId(2), MemberId(2));
  h.Run();
  ASSERT_EQ(h.View().committed, Epoch(3));
  Report(1, 1, 5, {MemberId(3)});
  ASSERT_EQ(Events().size(), 1u);
  EXPECT_NE(Events()[0].find(" members=m3 "), std::string::npos) << Events()[0];
  // Peer 2 cannot know which member of peer 1 it was.
  Report(2, 1, 5, {MemberId(3)});
  ASSERT_EQ(Events().size(), 2u);
  EXPECT_NE(Events()[1].find(" members=m1,m3 "), std::string::npos) << Events()[1];
  // A member of another peer is not named.
  Report(2, 2, 5, {MemberId(1)});
  EXPECT_EQ(Events().size(), 2u);
}

TEST_F(SuspectTest, StrangersAreNeitherHeardNorNamed) {
  h.Found(2);
  Report(1, 9, 5);
  h.Attach(PeerId(9));
  Report(9, 1, 5);
  EXPECT_EQ(Events(), Texts{});
}

TEST_F(SuspectTest, AnEventHasNoLinesOfItsReporter) {
  h.Found(2);
  control::ContributionSuspect suspect;
  suspect.group = Harness::G();
  suspect.peer = PeerId(2);
  suspect.norms = "a\nb";
  h.Say(PeerId(1), suspect);
  ASSERT_EQ(Events().size(), 1u);
  EXPECT_NE(Events()[0].find("norms=\"a b\""), std::string::npos) << Events()[0];
}

}  // namespace
}  // namespace longhaul::coordinator
