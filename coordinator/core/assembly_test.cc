// Joins that wait for each other (control::Join::members): the group's first epoch has all of them.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/core/coordinator_core.h"
#include "gtest/gtest.h"
#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

using Peers = std::vector<uint64_t>;

class AssemblyTest : public testing::Test {
 protected:
  static PeerId P(uint64_t n) { return PeerId(n); }

  void Attach(uint64_t peers) {
    for (uint64_t peer = 1; peer <= peers; ++peer) h->AddLively(P(peer));
  }
  // A member at the peer joins. name "": the trainer chose none.
  void Join(uint64_t peer, uint32_t members, const std::string& name = "") {
    control::Join join{.request = ++requests_, .group = Harness::G(), .name = name};
    if (name.empty()) join.name = "pid" + std::to_string(requests_);
    join.wish.named = !name.empty();
    join.wish.members = members;
    h->LivelyJoin(P(peer), join);
    h->Run();
  }
  // The member of the request died, or gave up.
  void Leave(uint64_t peer, uint64_t member, bool died) {
    h->Say(P(peer), control::Leave{Harness::G(), MemberId(member), died,
                                   died ? "its process has ended" : "left"});
    h->Run();
  }
  // The peers of the admitted members, in rank order.
  Peers Ranks() const {
    Peers ranks;
    for (const MemberView& member : h->View().members) {
      if (member.joined) ranks.push_back(member.peer.value());
    }
    return ranks;
  }
  // What the peer was told last of its pending join.
  std::string Told(uint64_t peer) {
    std::string text;
    for (const std::string& message : h->Take(P(peer))) {
      if (message.starts_with("JoinPending ")) text = message;
    }
    return text;
  }

  std::unique_ptr<Harness> h = std::make_unique<Harness>();
  uint64_t requests_ = 0;
};

TEST_F(AssemblyTest, AllBeginInEpochOneWhoeverComesFirst) {
  Peers order = {1, 2, 3, 4};
  do {
    h = std::make_unique<Harness>();
    Attach(4);
    for (const uint64_t peer : order) {
      EXPECT_EQ(Ranks(), Peers{}) << peer;
      Join(peer, 4, "host-" + std::to_string(9 - peer));
    }
    EXPECT_EQ(h->View().committed, Epoch(1));
    EXPECT_EQ(Ranks(), (Peers{4, 3, 2, 1})) << "by name";
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(AssemblyTest, MembersWithoutANameStandBehindTheOthersByPeer) {
  Attach(4);
  Join(4, 4);
  Join(1, 4, "z");
  Join(3, 4);
  Join(2, 4, "a");
  EXPECT_EQ(Ranks(), (Peers{2, 1, 3, 4}));
}

TEST_F(AssemblyTest, TheMembersThatWaitAreToldWhoHasCome) {
  Attach(2);
  Join(1, 3, "a");
  EXPECT_EQ(Told(1), "JoinPending 1 m1 1 of 3 members have come: a at host1");
  Join(2, 3, "b");
  const std::string both = "2 of 3 members have come: a at host1, b at host2";
  EXPECT_EQ(Told(1), "JoinPending 1 m1 " + both);
  EXPECT_EQ(Told(2), "JoinPending 2 m2 " + both);
  EXPECT_EQ(h->View().waiting_for, "waiting for more members: " + both);
}

TEST_F(AssemblyTest, WhoDiesWhileItWaitsIsMissingInTheText) {
  Attach(4);
  for (uint64_t peer = 1; peer <= 3; ++peer) Join(peer, 4, "t" + std::to_string(peer));
  Leave(2, 2, true);
  EXPECT_EQ(Told(1),
            "JoinPending 1 m1 2 of 4 members have come: t1 at host1, t3 at host3; came and left "
            "again: t2 at host2 (its process has ended)");
  Leave(1, 1, false);
  EXPECT_EQ(Told(3),
            "JoinPending 3 m3 1 of 4 members have come: t3 at host3; came and left again: t2 at "
            "host2 (its process has ended), t1 at host1 (it gave up)");
  // Back again, it is not missing any more.
  Join(2, 4, "t2");
  EXPECT_EQ(Told(3),
            "JoinPending 3 m3 2 of 4 members have come: t3 at host3, t2 at host2; came and left "
            "again: t1 at host1 (it gave up)");
  Join(1, 4, "t1");
  Join(4, 4, "t4");
  EXPECT_EQ(Ranks(), (Peers{1, 2, 3, 4}));
}

// The host dies while the epoch is being prepared. The others do not begin without its member.
TEST_F(AssemblyTest, ADeathDuringThePreparationLetsTheOthersWaitOn) {
  Attach(3);
  h->Lively(P(3)).mute = true;
  for (uint64_t peer = 1; peer <= 3; ++peer) Join(peer, 3);
  EXPECT_TRUE(h->View().preparing);
  h->Kill(P(3));
  h->Wait(10000);
  EXPECT_EQ(Ranks(), Peers{});
  EXPECT_FALSE(h->View().preparing);
  h->AddLively(P(4));
  Join(4, 3);
  EXPECT_EQ(Ranks(), (Peers{1, 2, 4}));
}

TEST_F(AssemblyTest, OneMemberTooManyJoinsAtABoundary) {
  Attach(3);
  h->Lively(P(2)).mute = true;
  Join(1, 2);
  Join(2, 2);
  Join(3, 2);  // comes while the first epoch is being prepared
  h->Lively(P(2)).mute = false;
  h->Reattach(P(2));
  h->Run();
  EXPECT_EQ(Ranks(), (Peers{1, 2}));
  h->LivelyVote(P(1), MemberId(1));
  h->LivelyVote(P(2), MemberId(2));
  h->Run();
  EXPECT_EQ(Ranks(), (Peers{1, 2, 3}));
}

TEST_F(AssemblyTest, AMemberThatWaitsForNobodyJoinsWhenTheGroupHasFormed) {
  Attach(3);
  Join(1, 2);
  Join(3, 0);
  EXPECT_EQ(Ranks(), Peers{});
  Join(2, 2);
  EXPECT_EQ(Ranks(), (Peers{1, 2}));
  h->LivelyVote(P(1), MemberId(1));
  h->LivelyVote(P(2), MemberId(3));
  h->Run();
  EXPECT_EQ(Ranks(), (Peers{1, 2, 3}));
}

// A program that comes back after a crash gives the same `members` as before.
TEST_F(AssemblyTest, InAGroupWithMembersTheNumberHasNoMeaning) {
  Attach(3);
  Join(1, 2);
  Join(2, 2);
  Join(3, 2);
  EXPECT_EQ(Ranks(), (Peers{1, 2}));
  EXPECT_EQ(Told(3), "JoinPending 3 m3");
  h->LivelyVote(P(1), MemberId(1));
  h->LivelyVote(P(2), MemberId(2));
  h->Run();
  EXPECT_EQ(Ranks(), (Peers{1, 2, 3}));
}

TEST_F(AssemblyTest, NumbersThatDifferAreRefused) {
  Attach(2);
  Join(1, 2);
  Join(2, 3);
  const std::vector<std::string> told = h->Take(P(2));
  ASSERT_FALSE(told.empty());
  EXPECT_NE(told.back().find("the join waits for 3 members, and those that have come wait for 2: "
                             "give all the same number"),
            std::string::npos)
      << told.back();
  Join(2, 2);
  EXPECT_EQ(Ranks(), (Peers{1, 2}));
}

TEST_F(AssemblyTest, ALargeAssemblyIsNotToldOfEachNewcomer) {
  constexpr uint64_t kPeers = 200;
  h->SetUnchecked(true);
  Attach(kPeers);
  h->ForgetReceived();
  for (uint64_t peer = 1; peer < kPeers; ++peer) Join(peer, kPeers);
  EXPECT_LE(h->Take(P(1)).size(), 64u);
  Leave(kPeers - 1, kPeers - 1, true);
  const std::string told = Told(2);
  EXPECT_TRUE(told.starts_with("JoinPending 2 m2 198 of 200 members have come: ")) << told;
  Join(kPeers - 1, kPeers);
  Join(kPeers, kPeers);
  EXPECT_EQ(Ranks().size(), kPeers);
}

TEST_F(AssemblyTest, ARestartOfTheCoordinatorForgetsNobody) {
  Attach(2);
  Join(1, 2, "b");
  h->Boot();
  h->Reattach(P(1));
  h->Reattach(P(2));
  Join(2, 2, "a");
  EXPECT_EQ(Ranks(), (Peers{2, 1}));
}

}  // namespace
}  // namespace longhaul::coordinator
