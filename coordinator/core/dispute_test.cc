// Peers whose verdicts on an op differ: ops are frozen, READYs are signed from then on, and a peer
// that signed two different READYs of one op is removed.
#include <optional>
#include <string>
#include <vector>

#include "base/crypto/secrets.h"
#include "coordinator/core/coordinator_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/control/signed_ready.h"
#include "tests/support/core_harness.h"

namespace longhaul::coordinator {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Texts = std::vector<std::string>;

class DisputeTest : public testing::Test {
 protected:
  static GroupKey G() { return Harness::G(); }
  static PeerId P(uint64_t n) { return PeerId(n); }

  uint64_t attempt() { return h.Stored().last_freeze.value(); }
  control::Dispute About(uint64_t other, std::optional<uint64_t> attempt_said = std::nullopt) {
    control::Dispute dispute;
    dispute.group = G();
    dispute.peer = P(other);
    dispute.attempt = Epoch(attempt_said.value_or(attempt()));
    dispute.boundary = Epoch(1);
    dispute.tag = 7;
    dispute.what = "all-reduce tag 7";
    return dispute;
  }
  // Adds to the dispute that `peer` has said this, signed by `signer`.
  static void Testify(uint64_t peer, uint64_t signer, const std::string& said,
                      control::Dispute* dispute) {
    const control::ReadyName name{dispute->group, dispute->attempt, dispute->boundary,
                                  dispute->tag,   dispute->set,     dispute->index};
    const std::string digest = Sha256(said);
    dispute->statements.push_back(
        {P(peer), digest, Harness::IdentityOf(P(signer)).Sign(control::TextToSign(name, digest))});
  }
  // The group signs READYs.
  void BeginSigning() {
    h.Say(P(1), About(2));
    h.Wait(100);
    ASSERT_TRUE(h.Stored().SignsOps());
    h.ForgetReceived();
  }
  size_t Members() { return h.View().members.size(); }

  Harness h;
};

TEST_F(DisputeTest, TheFirstOneFreezesOpsAndFromThenOnReadysAreSigned) {
  h.Found(3);
  EXPECT_FALSE(h.Prepared(P(1)).sign_ops);
  h.Say(P(1), About(2));
  h.Wait(100);
  EXPECT_EQ(h.View().committed, Epoch(4));
  EXPECT_TRUE(h.Prepared(P(1)).freeze);
  EXPECT_TRUE(h.Prepared(P(1)).sign_ops);
  EXPECT_EQ(h.View().fault.cause, "dispute");
  EXPECT_THAT(h.Notices("dispute"),
              ElementsAre("verdicts differ peer=p1 other=p2 op=\"all-reduce tag 7\" signed=0"));
  EXPECT_EQ(Members(), 3u);
  // The second end of the same pair has nothing to add.
  h.Say(P(2), About(1, 0));
  h.Wait(100);
  EXPECT_EQ(h.View().committed, Epoch(4));
}

TEST_F(DisputeTest, SigningSurvivesARestart) {
  h.Found(2);
  BeginSigning();
  h.Boot();
  for (const uint64_t p : {1, 2}) h.Reattach(P(p));
  h.Run();
  h.Say(P(1), About(2));
  h.Wait(100);
  EXPECT_TRUE(h.Prepared(P(1)).sign_ops);
}

TEST_F(DisputeTest, WhoSignedTwoDifferentReadysIsRemovedAndNotAdmittedAgain) {
  h.Found(4);
  BeginSigning();
  control::Dispute one = About(2);
  Testify(2, 2, "same", &one);
  Testify(4, 4, "offer", &one);
  h.Say(P(1), one);
  control::Dispute two = About(1, one.attempt.value());
  Testify(1, 1, "same", &two);
  Testify(4, 4, "another offer", &two);
  h.Say(P(2), two);
  h.Wait(1000);
  EXPECT_EQ(Members(), 3u);
  EXPECT_THAT(h.Notices("dispute").back(), HasSubstr("peer lies peer=p4"));
  EXPECT_THAT(h.Take(P(4)).back(), HasSubstr("Removed m4"));
  h.LivelyJoin(P(4), 2);
  h.Run();
  EXPECT_THAT(h.Take(P(4)).back(), HasSubstr("told members of the group different things"));
}

TEST_F(DisputeTest, EvidenceOfWhoRefusedCountsWithAnotherPeersDispute) {
  h.Found(3);
  BeginSigning();
  control::Dispute evidence = About(0);
  Testify(3, 3, "another offer", &evidence);
  h.Say(P(2), evidence);
  h.Wait(100);
  EXPECT_EQ(h.View().committed, Epoch(4)) << "nobody has disputed anything";
  control::Dispute dispute = About(2);
  Testify(3, 3, "offer", &dispute);
  h.Say(P(1), dispute);
  h.Say(P(2), evidence);
  h.Wait(1000);
  EXPECT_EQ(Members(), 2u);
}

TEST_F(DisputeTest, StatementsOfOthersThanTheirSignersProveNothing) {
  h.Found(3);
  BeginSigning();
  control::Dispute one = About(2);
  Testify(3, 3, "offer", &one);
  h.Say(P(1), one);
  control::Dispute forged = About(1, one.attempt.value());
  Testify(3, 2, "another offer", &forged);  // peer 2 signed it
  h.Say(P(2), forged);
  control::Dispute old = About(1, one.attempt.value());
  Testify(3, 3, "another offer", &old);
  old.index = 1;  // it was about another op
  h.Say(P(2), old);
  h.Wait(1000);
  EXPECT_EQ(Members(), 3u);
}

TEST_F(DisputeTest, WithoutProofThePeerInMostPairsIsRemoved) {
  h.Found(4);
  BeginSigning();
  for (int i = 0; i < 10 && Members() == 4; ++i) {
    h.Say(P(i % 2 == 0 ? 1 : 3), About(2));
    h.Wait(200);
  }
  EXPECT_EQ(Members(), 3u);
  EXPECT_THAT(h.Take(P(2)).back(), HasSubstr("Removed m2"));
}

TEST_F(DisputeTest, OfOnePeerInOneAttemptAreBounded) {
  h.Found(3);
  BeginSigning();
  const size_t before = h.Notices("dispute").size();
  h.Lively(P(3)).mute = true;  // the freeze stays open, and with it the attempt
  for (uint64_t i = 0; i < 1000; ++i) {
    control::Dispute dispute = About(2);
    dispute.tag = i;
    Testify(2, 1, "not signed by peer 2", &dispute);
    h.Say(P(1), dispute);
  }
  EXPECT_LE(h.Notices("dispute").size(), before + 8);
}

TEST_F(DisputeTest, OfAnAttemptThatWasNeverPreparedIsAgainstTheProtocol) {
  h.Found(2);
  h.Say(P(1), About(2, 9));
  EXPECT_THAT(h.closings().back(), HasSubstr("disputed a verdict of attempt 9"));
}

TEST_F(DisputeTest, OfAStrangerDoesNothing) {
  h.Found(2);
  h.AddLively(P(3));
  h.Run();
  h.Say(P(3), About(1, 0));
  h.Wait(100);
  EXPECT_EQ(h.View().committed, Epoch(2));
}

TEST_F(DisputeTest, WhoAsksForANewAttemptGetsIt) {
  h.Found(2);
  BeginSigning();
  h.Say(P(1), About(0));
  h.Wait(100);
  EXPECT_EQ(h.View().committed, Epoch(4));
  EXPECT_EQ(Members(), 2u);
}

}  // namespace
}  // namespace longhaul::coordinator
