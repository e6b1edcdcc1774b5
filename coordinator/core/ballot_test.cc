#include "coordinator/core/ballot.h"

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

const MemberId kA(1), kB(2), kC(3);

TEST(Ballot, DecidesWhenTheLastMemberVotes) {
  Ballot ballot({kA, kB});
  EXPECT_FALSE(ballot.Decided());
  ballot.Vote(kA);
  EXPECT_FALSE(ballot.Decided());
  ballot.Vote(kB);
  EXPECT_TRUE(ballot.Decided());
}

TEST(Ballot, CountsARepeatedVoteOnce) {
  Ballot ballot({kA, kB});
  ballot.Vote(kA);
  ballot.Vote(kA);
  EXPECT_FALSE(ballot.Decided());
  EXPECT_EQ(ballot.Missing(), std::vector<MemberId>{kB});
}

TEST(Ballot, DoesNotCountTheVoteOfAStranger) {
  Ballot ballot({kA});
  ballot.Vote(kC);
  EXPECT_FALSE(ballot.Decided());
  EXPECT_FALSE(ballot.HasVoted(kC));
}

TEST(Ballot, DecidesWhenLastUndecidedMemberLeaves) {
  Ballot ballot({kA, kB, kC});
  ballot.Vote(kA);
  ballot.Vote(kC);
  ballot.Leave(kB);
  EXPECT_TRUE(ballot.Decided());
  EXPECT_EQ(ballot.voted(), (std::set<MemberId>{kA, kC}));
}

TEST(Ballot, StaysDecidedWhenAVoterLeaves) {
  Ballot ballot({kA, kB});
  ballot.Vote(kA);
  ballot.Vote(kB);
  ballot.Leave(kA);
  EXPECT_TRUE(ballot.Decided());
}

TEST(Ballot, OfNobodyIsDecided) { EXPECT_TRUE(Ballot().Decided()); }

}  // namespace
}  // namespace longhaul::coordinator
