#include "peerd/core/local_members.h"

#include <gtest/gtest.h>

#include "peerd/core/testing.h"
#include "proto/wire/limits.h"

namespace longhaul::peerd {
namespace {

using control::Removal;

class LocalMembersTest : public testing::Test {
 protected:
  LocalMembersTest() { history_.Add(record_); }
  template <class F>
  Actions& Do(F what) {
    out_.clear();
    what();
    members_.CheckInvariants();
    return out_;
  }
  Actions& Join(uint64_t id) {
    return Do([&] { members_.Join({LocalId(id), kGroup, "name"}, &out_); });
  }
  Actions& Pending(uint64_t id, uint64_t member) {
    return Do([&] { members_.Pending({id, kGroup, MemberId(member)}, &out_); });
  }
  Actions& Commit() {
    return Do([&] { members_.Committed(kGroup, record_, 2, &out_); });
  }
  Actions& Step(uint64_t id) {
    return Do([&] { members_.Step(LocalId(id), std::nullopt, false, &out_); });
  }
  Actions& Leave(uint64_t id) {
    return Do([&] { members_.Leave(LocalId(id), &out_); });
  }
  Actions& Voted(uint64_t member, uint64_t number, uint64_t epoch = 3) {
    return Do([&] {
      const LocalMember* const passed =
          members_.Voted({kGroup, MemberId(member), number, Epoch(epoch)}, history_, &out_);
      if (passed != nullptr) members_.EndStep(passed->id, record_, 0, &out_);
    });
  }
  Actions& Removed(uint64_t member, Removal why, const std::string& reason = "") {
    return Do([&] { members_.Removed({kGroup, MemberId(member), why, reason}, &out_); });
  }
  Actions& Sweep(size_t posts = 0, Tick now = {}, bool syncing = false) {
    return Do([&] {
      members_.Sweep(
          [=, this](const LocalMember&) {
            return LocalMembers::Busy{posts, lingering_, syncing};
          },
          now, &out_);
    });
  }
  Actions& Resend() {
    return Do([&] { members_.Resend([](LocalId) { return std::nullopt; }, &out_); });
  }
  Code MayStep(uint64_t id) const { return members_.MayStep(LocalId(id)).code; }
  Actions& Drain(bool at_once = false) {
    return Do([&] { members_.Drain("operator", at_once, &out_); });
  }
  void Admit(uint64_t id) {
    Join(id);
    Pending(id, id);
    Commit();
  }

  size_t lingering_ = 0;
  LocalMembers members_;
  EpochRecord record_ = RecordOf(MakePrepare(3, 0, 2, 0, {{1, 1, 1}, {9, 9, 1}, {2, 1, 2}}));
  EpochHistory history_;
  Actions out_;
};

TEST_F(LocalMembersTest, AJoinIsAnsweredWhenItsEpochIsCommitted) {
  EXPECT_EQ(Sent<control::Join>(Join(2)).at(0).request, 2u);
  EXPECT_TRUE(Commit().empty());
  EXPECT_TRUE(Pending(2, 2).empty());
  const auto done = Get<JoinDone>(Commit());
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].outcome.ok());
  EXPECT_EQ(done[0].world,
            (World{Epoch(3), MemberId(2), 2, 3, 2, false, Epoch(2), {Epoch(3), 2, 3}}));
  EXPECT_EQ(members_.Find(LocalId(2))->boundary, Epoch(2));
  EXPECT_EQ(Get<WorldChanged>(Commit()).size(), 1u);
}

TEST_F(LocalMembersTest, AJoinIsToldWhetherOthersWereThereBefore) {
  Join(2);
  Pending(2, 2);
  EXPECT_TRUE(Get<JoinDone>(Commit()).at(0).newcomer);
  // All begin together in epoch 3. This peer hears of it by a later epoch.
  record_ = RecordOf(MakePrepare(4, 0, 3, 4, {{5, 1, 3}, {7, 7, 3}}));
  Join(5);
  Pending(5, 5);
  EXPECT_FALSE(Get<JoinDone>(Commit()).at(0).newcomer);
  // One that came after this member counts as little.
  record_ = RecordOf(MakePrepare(6, 0, 6, 4, {{7, 7, 6}, {6, 1, 5}}));
  Join(6);
  Pending(6, 6);
  EXPECT_FALSE(Get<JoinDone>(Commit()).at(0).newcomer);
}

TEST_F(LocalMembersTest, AJoinSaysItsCohortAndDeadlineEachTime) {
  LocalJoin join{LocalId(2), kGroup, "t", {"host-7", 3, 5000}};
  Do([&] { members_.Join(join, &out_); });
  const control::Join expected{2, kGroup, "t", {"host-7", 3, 5000}};
  EXPECT_EQ(Sent<control::Join>(out_).at(0), expected);
  EXPECT_EQ(Sent<control::Join>(Resend()).at(0), expected);
}

TEST_F(LocalMembersTest, ARefusedJoinEnds) {
  Join(2);
  Do([&] { members_.Refused({2, kGroup, {Code::kUnavailable, "full"}}, &out_); });
  EXPECT_EQ(Get<JoinDone>(out_).at(0).outcome.text, "full");
  EXPECT_TRUE(Get<MemberGone>(out_).empty());
  EXPECT_TRUE(members_.empty());
  Join(3);
  Do([&] { members_.Refused({3, kGroup, {}}, &out_); });
  EXPECT_EQ(Get<JoinDone>(out_).at(0).outcome.code, Code::kInternal);
}

TEST_F(LocalMembersTest, OneMoreThanTheMostIsRefused) {
  for (uint64_t id = 1; id <= LH_LOCAL_MEMBERS_MAX; ++id) Join(id);
  EXPECT_EQ(Get<JoinDone>(Join(1000)).at(0).outcome.code, Code::kUnavailable);
}

TEST_F(LocalMembersTest, AJoinThatIsWithdrawnSaysWhatItWaitedFor) {
  const auto why = [this](uint64_t id) { return Get<JoinDone>(Leave(id)).at(0).outcome.text; };
  Join(1);
  EXPECT_EQ(why(1), "the join was withdrawn: the coordinator has not taken the request yet");
  Join(2);
  Pending(2, 2);
  EXPECT_EQ(why(2),
            "the join was withdrawn: a newcomer is admitted when all members stand at a step "
            "boundary (begin_step() or step())");
  Do([&] { members_.Join({LocalId(3), kGroup, "name", {.members = 4, .named = true}}, &out_); });
  const auto join = Sent<control::Join>(out_).at(0);
  EXPECT_EQ(join.wish.members, 4u);
  EXPECT_TRUE(join.wish.named);
  Do([&] { members_.Pending({3, kGroup, MemberId(3), "1 of 4"}, &out_); });
  Do([&] { members_.Pending({3, kGroup, MemberId(3), "2 of 4"}, &out_); });
  EXPECT_EQ(why(3), "the join was withdrawn: 2 of 4");
}

TEST_F(LocalMembersTest, ANumberThatAnotherOneHasIsNotTaken) {
  Join(1);
  Join(2);
  Pending(1, 1);
  EXPECT_EQ(Get<LogLine>(Pending(2, 1)).size(), 1u);
  EXPECT_EQ(Get<LogLine>(Pending(2, 0)).size(), 1u);
  EXPECT_FALSE(members_.Find(LocalId(2))->member);
}

TEST_F(LocalMembersTest, WhatWasSaidOfAJoinBeforeItWasNumberedAnewIsNotTaken) {
  Join(2);
  Pending(2, 5);
  EXPECT_TRUE(Pending(2, 4).empty());
  Do([&] { members_.Refused({2, kGroup, {Code::kUnavailable, "full"}}, &out_); });
  EXPECT_TRUE(out_.empty());
  EXPECT_EQ(members_.Find(LocalId(2))->member, MemberId(5));
  Pending(2, 6);
  EXPECT_EQ(members_.Find(LocalId(2))->member, MemberId(6));
  // A coordinator whose store lost its last changes sends Removed (unknown) first.
  Removed(6, Removal::kUnknown);
  Pending(2, 3);
  EXPECT_EQ(members_.Find(LocalId(2))->member, MemberId(3));
}

TEST_F(LocalMembersTest, AMemberMadeForAJoinThatHasEndedIsSentAwayAgain) {
  Join(2);
  Pending(2, 2);
  Removed(2, Removal::kEvicted);
  EXPECT_EQ(Sent<control::Leave>(Pending(2, 5)).at(0).member, MemberId(5));
  Sweep();
  EXPECT_EQ(Sent<control::Leave>(Pending(2, 6)).at(0).member, MemberId(6));
}

TEST_F(LocalMembersTest, AWithdrawnJoinIsAnsweredAtOnceAndLeavesWhenItsNumberIsKnown) {
  Join(2);
  Leave(2);
  EXPECT_EQ(Get<JoinDone>(out_).at(0).outcome.code, Code::kAborted);
  EXPECT_TRUE(Get<LeaveDone>(out_).at(0).outcome.ok());
  EXPECT_TRUE(Sweep().empty());
  Pending(2, 2);
  EXPECT_EQ(Sent<control::Leave>(Sweep()).at(0).member, MemberId(2));
  EXPECT_TRUE(Sweep().empty());
  // The member may be admitted meanwhile. No trainer is told.
  EXPECT_TRUE(Commit().empty());
  EXPECT_TRUE(Commit().empty());
  Removed(2, Removal::kLeft);
  EXPECT_TRUE(Sweep().empty());
  EXPECT_TRUE(members_.empty());
}

TEST_F(LocalMembersTest, AWithdrawnJoinOfWhichTheCoordinatorHearsNoMoreIsForgotten) {
  Join(2);
  Do([&] { members_.Died(LocalId(2), "killed", Tick{5}, &out_); });
  EXPECT_EQ(Get<JoinDone>(out_).size(), 1u);
  Do([&] { members_.ForgetUnheard(); });
  EXPECT_TRUE(members_.empty());
}

TEST_F(LocalMembersTest, AStepIsOneVoteAndOneAnswer) {
  Admit(2);
  EXPECT_EQ(Sent<control::Vote>(Step(2)).at(0).number, 1u);
  EXPECT_EQ(MayStep(2), Code::kFailedPrecondition);
  EXPECT_TRUE(Voted(2, 2).empty());
  EXPECT_TRUE(Voted(8, 1).empty());
  EXPECT_EQ(Get<LogLine>(Voted(2, 1, 4)).size(), 1u);
  record_.boundary = Epoch(3);
  EXPECT_EQ(Get<StepDone>(Voted(2, 1)).at(0).world.rank, 2u);
  EXPECT_EQ(members_.Find(LocalId(2))->boundary, Epoch(3));
  EXPECT_TRUE(Voted(2, 1).empty());
  EXPECT_EQ(Sent<control::Vote>(Step(2)).at(0).number, 2u);
}

TEST_F(LocalMembersTest, RequestsOutOfPlaceSayWhy) {
  EXPECT_EQ(MayStep(5), Code::kEvicted);
  EXPECT_TRUE(Get<LeaveDone>(Leave(5)).at(0).outcome.ok());
  EXPECT_EQ(members_.MayPost(LocalId(5)).code, Code::kEvicted);
  Join(2);
  EXPECT_EQ(MayStep(2), Code::kFailedPrecondition);
  EXPECT_EQ(members_.MayPost(LocalId(2)).code, Code::kFailedPrecondition);
  EXPECT_EQ(members_.MaySync(LocalId(2)).code, Code::kFailedPrecondition);
  Pending(2, 2);
  Commit();
  EXPECT_TRUE(members_.MayPost(LocalId(2)).ok());
  EXPECT_TRUE(members_.MaySync(LocalId(2)).ok());
  Step(2);
  EXPECT_EQ(members_.MaySync(LocalId(2)).code, Code::kFailedPrecondition);
  Voted(2, 1);
  Leave(2);
  EXPECT_EQ(MayStep(2), Code::kFailedPrecondition);
  EXPECT_EQ(members_.MayPost(LocalId(2)).code, Code::kFailedPrecondition);
  Removed(2, Removal::kLeft);
  EXPECT_EQ(members_.MayPost(LocalId(2)).code, Code::kEvicted);
}

TEST_F(LocalMembersTest, AVoteCarriesItsOfferEachTimeUntilItIsAnswered) {
  Admit(2);
  const control::SyncOffer offer{7};
  Do([&] { members_.Step(LocalId(2), offer, false, &out_); });
  EXPECT_EQ(Sent<control::Vote>(out_).at(0).sync, offer);
  const auto resend = [&] {
    return Sent<control::Vote>(Do([&] { members_.Resend([&](LocalId) { return offer; }, &out_); }));
  };
  EXPECT_EQ(resend().at(0).sync, offer);
  members_.Voted({kGroup, MemberId(2), 1, Epoch(3)}, history_, &out_);
  EXPECT_TRUE(resend().empty());
}

TEST_F(LocalMembersTest, ALeaveWaitsForOpenPosts) {
  Admit(2);
  EXPECT_TRUE(Leave(2).empty());
  EXPECT_TRUE(Sweep(1).empty());
  EXPECT_FALSE(Sent<control::Leave>(Sweep(0)).at(0).died);
  Removed(2, Removal::kLeft);
  EXPECT_TRUE(Removed(2, Removal::kLeft).empty());
  EXPECT_TRUE(Sweep(1).empty());
  EXPECT_TRUE(Sweep(0, {}, /*syncing=*/true).empty());
  Sweep(0);
  EXPECT_TRUE(Get<LeaveDone>(out_).at(0).outcome.ok());
  EXPECT_TRUE(Get<MemberGone>(out_).at(0).outcome.ok());
}

TEST_F(LocalMembersTest, ALeaveWaitsForLingeringOpsButNobodyWaitsForThemWhoIsOut) {
  Admit(2);
  lingering_ = 1;
  EXPECT_TRUE(Leave(2).empty());
  EXPECT_TRUE(Sweep().empty());
  lingering_ = 0;
  EXPECT_EQ(Sent<control::Leave>(Sweep()).size(), 1u);
  lingering_ = 1;
  Removed(2, Removal::kLeft);
  EXPECT_EQ(Get<MemberGone>(Sweep()).size(), 1u);
}

TEST_F(LocalMembersTest, ADeadTrainersPostsGetTimeButNotForEver) {
  Admit(2);
  Step(2);
  Do([&] { members_.Died(LocalId(2), "killed", Tick{500}, &out_); });
  EXPECT_EQ(members_.NextDeadline(), Tick{500});
  EXPECT_TRUE(Sweep(1, Tick{499}).empty());
  const auto leave = Sent<control::Leave>(Sweep(1, Tick{500}));
  EXPECT_TRUE(leave.at(0).died);
  EXPECT_EQ(leave[0].reason, "killed");
  EXPECT_EQ(members_.NextDeadline(), kNever);
  EXPECT_TRUE(Voted(2, 1).empty());
  Removed(2, Removal::kDied, "killed");
  Sweep();
  EXPECT_EQ(Get<StepDone>(out_).at(0).outcome.code, Code::kEvicted);
  EXPECT_EQ(Get<MemberGone>(out_).size(), 1u);
}

TEST_F(LocalMembersTest, AnEvictedMemberIsToldWhy) {
  Admit(2);
  Step(2);
  Removed(2, Removal::kEvicted, "too slow");
  EXPECT_EQ(MayStep(2), Code::kEvicted);
  Sweep();
  ASSERT_EQ(Get<StepDone>(out_).size(), 1u);
  EXPECT_EQ(Get<MemberGone>(out_).at(0).outcome,
            (Outcome{Code::kEvicted,
                     "member m2 is out of run/0 (evicted): too slow; join again to come back"}));
}

TEST_F(LocalMembersTest, OneThatLeavesWithAStepOpenGetsBothAnswers) {
  Admit(2);
  Step(2);
  Leave(2);
  Removed(2, Removal::kLeft);
  Sweep();
  EXPECT_EQ(Get<StepDone>(out_).at(0).outcome.code, Code::kFailedPrecondition);
  EXPECT_EQ(Get<LeaveDone>(out_).size(), 1u);
}

TEST_F(LocalMembersTest, APendingMemberThatIsRemovedHasItsJoinRefused) {
  Join(2);
  Pending(2, 2);
  Removed(2, Removal::kUnreachable, "h:1 timed out");
  Sweep();
  EXPECT_EQ(Get<JoinDone>(out_).at(0).outcome.code, Code::kUnavailable);
  EXPECT_TRUE(Get<MemberGone>(out_).empty());
}

TEST_F(LocalMembersTest, APendingMemberThatTheCoordinatorForgotAsksAgain) {
  Join(2);
  Pending(2, 2);
  EXPECT_EQ(Sent<control::Join>(Removed(2, Removal::kUnknown)).size(), 1u);
  Pending(2, 1);
  EXPECT_EQ(members_.MembersOf(kGroup), std::vector<MemberId>{MemberId(1)});
}

TEST_F(LocalMembersTest, ResendSaysWhatIsOpen) {
  Join(1);
  Admit(2);
  Step(2);
  EXPECT_EQ(Sent<control::Join>(Resend()).size(), 1u);
  EXPECT_EQ(Sent<control::Vote>(out_).at(0).number, 1u);
  Leave(2);
  Sweep();
  EXPECT_TRUE(Sent<control::Vote>(Resend()).empty());
  EXPECT_EQ(Sent<control::Leave>(out_).size(), 1u);
}

TEST_F(LocalMembersTest, ADrainRefusesJoinsAndLetsMembersReachTheirBoundary) {
  Admit(2);
  Join(1);
  Drain();
  EXPECT_EQ(Get<JoinDone>(out_).at(0).outcome.code, Code::kUnavailable);
  EXPECT_EQ(Get<JoinDone>(Join(7)).at(0).outcome.code, Code::kUnavailable);
  EXPECT_TRUE(Sweep().empty());
  EXPECT_TRUE(members_.MayPost(LocalId(2)).ok());
  EXPECT_TRUE(Step(2).empty());
  EXPECT_EQ(Sent<control::Leave>(Sweep()).at(0).reason, "peer is draining: operator");
  EXPECT_EQ(members_.MayPost(LocalId(2)).code, Code::kEvicted);
  Removed(2, Removal::kLeft);
  Sweep();
  const Outcome outcome = Get<StepDone>(out_).at(0).outcome;
  EXPECT_EQ(outcome.code, Code::kEvicted);
  EXPECT_EQ(outcome.text, "this peer is draining (operator): join at another peer");
}

TEST_F(LocalMembersTest, AtTheDrainDeadlineEverybodyLeaves) {
  Admit(2);
  Drain();
  Drain(true);
  EXPECT_EQ(Sent<control::Leave>(Sweep()).size(), 1u);
}

TEST_F(LocalMembersTest, AMemberThatStandsAtItsBoundaryDrainsNow) {
  Admit(2);
  Step(2);
  Drain();
  EXPECT_EQ(Sent<control::Leave>(Sweep()).size(), 1u);
  EXPECT_TRUE(Voted(2, 1).empty());
}

TEST_F(LocalMembersTest, RemoveAllTakesEverybodyOnce) {
  Admit(2);
  Join(1);
  Do([&] { EXPECT_EQ(members_.RemoveAll("stop").size(), 2u); });
  EXPECT_TRUE(members_.RemoveAll("stop").empty());
  Sweep();
  EXPECT_EQ(Get<MemberGone>(out_).at(0).outcome.text, "stop");
  EXPECT_EQ(Get<JoinDone>(out_).size(), 1u);
  EXPECT_TRUE(members_.empty());
}

}  // namespace
}  // namespace longhaul::peerd
