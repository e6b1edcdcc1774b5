#include "peerd/core/verdicts.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "base/crypto/identity.h"
#include "base/crypto/secrets.h"
#include "peerd/core/op_table_testing.h"
#include "proto/control/signed_ready.h"

namespace longhaul::peerd {
namespace {

TEST_F(OpTableTest, ADoneWithAnotherVerdictIsDisputed) {
  EnterThree();
  RunToDone(7);
  const auto disputes = Sent<control::Dispute>(Done(2, 1, 0, true));
  ASSERT_EQ(disputes.size(), 1u);
  EXPECT_EQ(disputes[0].peer, PeerId(2));
  EXPECT_EQ(disputes[0].tag, 7u);
  EXPECT_EQ(disputes[0].what, "all-reduce tag 7");
  EXPECT_TRUE(disputes[0].statements.empty());
  EXPECT_TRUE(Done(3, 1).empty());
  EXPECT_EQ(ops_.open(), 1u);
  EXPECT_EQ(Sent<control::Dispute>(AskAgain()), disputes);
  // The coordinator sees that the verdicts differ, and says redo.
  Freeze();
  EXPECT_EQ(ops_.Report().at(0).verdict, 0u);
  EXPECT_TRUE(ops_.Report().at(0).done);
}

// The refusal of the other peer keeps this one from getting done. So the dispute does not wait for
// that.
TEST_F(OpTableTest, ARefusalByOneOtherIsDisputedWhileTheAttemptRuns) {
  EnterThree();
  Post(7, Large());
  Ready(2, 7, Large());
  EXPECT_TRUE(Done(2, 1, 0, true).empty()) << "the READY of peer 3 may explain it";
  EXPECT_EQ(Sent<control::Dispute>(Ready(3, 7, Large())).size(), 1u);
}

// ------------------------------------------------------------------------------ signed READYs

class SignedOpTest : public OpTableTest {
 protected:
  static Identity IdentityOf(uint64_t peer) { return Identity::ForTest(peer); }
  void EnterSigned() {
    control::PrepareEpoch prepare = MakePrepare(1, 0, 1, 0, {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}});
    prepare.sign_ops = true;
    for (control::PeerInfo& peer : prepare.peers) {
      peer.key = IdentityOf(peer.peer.value()).public_key();
    }
    Enter(prepare);
  }
  static PeerReady SignedBy(uint64_t peer, uint64_t tag, const OpDesc& desc, uint64_t index = 0,
                            const std::string& said = "") {
    PeerReady ready = ReadyOf(peer, tag, desc);
    const std::string digest = Sha256(said);
    const control::ReadyName name{kGroup, Epoch(0), Epoch(1), tag, 0, index};
    ready.signature = {index, digest, IdentityOf(peer).Sign(control::TextToSign(name, digest))};
    return ready;
  }
  Actions& Signed(uint64_t ordinal, const std::string& said = "mine") {
    out_.clear();
    ops_.OnSigned({kGroup, OpOrdinal(ordinal), Epoch(0), Sha256(said)}, now_, &out_);
    Settled();
    return out_;
  }
  // What an honest peer's DONE says after READYs of tag 7, in which peer 2 said nothing.
  static std::optional<Hash128> ReadiesDigestOf(const std::string& of_3, bool refused = false) {
    Verdicts verdicts;
    verdicts.BeginSigning({kGroup, Epoch(0), Epoch(1), 7, 0, 0});
    verdicts.SignedOwn(Sha256("mine"));
    for (const uint64_t peer : {2, 3}) {
      const PeerReady ready = SignedBy(peer, 7, Large(), 0, peer == 3 ? of_3 : "");
      EXPECT_EQ(verdicts.TakeSignature(ready.peer, ready.signature,
                                       {{ready.peer, IdentityOf(peer).public_key()}}),
                "");
    }
    return verdicts.Own(PeerId(1), refused).readies_digest;
  }
  Actions& DoneWith(uint64_t peer, std::optional<Hash128> readies_digest, bool refused = false) {
    out_.clear();
    PeerDone done{kGroup, PeerId(peer), OpOrdinal(1), Epoch(0), refused};
    done.readies_digest = readies_digest;
    ops_.OnDone(done, now_, &out_);
    Settled();
    return out_;
  }
};

TEST_F(SignedOpTest, ASmallOpEndsWhenAllHaveSaidThatTheyGotTheSame) {
  EnterSigned();
  const auto sent = Get<SendReady>(Post(7, Small()));
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0].sign, 0u);
  Signed(1);
  Ready(SignedBy(2, 7, Small()));
  Ready(SignedBy(3, 7, Small()));
  const auto dones = Get<SendDone>(Complete(1, 0, PayloadOf(Small())));
  ASSERT_EQ(dones.size(), 2u) << "and nothing is answered yet";
  EXPECT_EQ(dones[0].readies_digest, ReadiesDigestOf(""));
  DoneWith(2, ReadiesDigestOf(""));
  EXPECT_EQ(Get<FinishAttempt>(DoneWith(3, ReadiesDigestOf(""))).size(), 1u);
}

TEST_F(SignedOpTest, InputsThatDifferAreDisputedWithProofs) {
  EnterSigned();
  Post(7, Small());
  Signed(1);
  Ready(SignedBy(2, 7, Small()));
  Ready(SignedBy(3, 7, Small(), 0, "what 2 did not get"));
  Complete(1, 0, PayloadOf(Small()));
  const auto disputes = Sent<control::Dispute>(DoneWith(2, ReadiesDigestOf("")));
  ASSERT_EQ(disputes.size(), 1u);
  ASSERT_EQ(disputes[0].statements.size(), 2u);
  const control::ReadyName name{kGroup, Epoch(0), Epoch(1), 7, 0, 0};
  for (const control::Statement& statement : disputes[0].statements) {
    EXPECT_TRUE(
        control::IsStatementOf(IdentityOf(statement.peer.value()).public_key(), name, statement));
  }
}

TEST_F(SignedOpTest, AReadyWithoutAGoodSignatureBreaksTheLink) {
  EnterSigned();
  Post(7, Large());
  Signed(1);
  EXPECT_TRUE(Breaks(ReadyOf(2, 7, Large()))) << "not signed";
  EXPECT_TRUE(Breaks(SignedBy(2, 7, Large(), 1))) << "of another op of this name";
  PeerReady ready = SignedBy(2, 7, Large());
  ready.signature->signature[5] ^= 1;
  EXPECT_TRUE(Breaks(ready));
  ready = SignedBy(3, 7, Large());
  ready.peer = PeerId(2);
  EXPECT_TRUE(Breaks(ready)) << "signed by another peer";
  EXPECT_FALSE(Breaks(SignedBy(2, 7, Large())));
}

// Members hear of a change of the world at different times. That is nobody's fault.
TEST_F(SignedOpTest, OffersForAnotherWorldAreSignedAndCountInTheDigest) {
  EnterSigned();
  OpDesc three = Large();
  three.kind = OpKind::kAllGather;
  three.world = 3;
  OpDesc four = three;
  four.world = 4;
  Post(7, three);
  Signed(1);
  EXPECT_TRUE(Breaks(ReadyOf(2, 7, four)));
  Ready(SignedBy(2, 7, four));
  Ready(SignedBy(3, 7, three));
  const auto dones = Get<SendDone>(Stopped(1));
  ASSERT_FALSE(dones.empty());
  EXPECT_TRUE(dones[0].refused);
  EXPECT_EQ(dones[0].readies_digest, ReadiesDigestOf("", /*refused=*/true));
}

TEST_F(SignedOpTest, ADoneWithoutADigestBreaksTheLink) {
  EnterSigned();
  Post(7, Large());
  Signed(1);
  Ready(SignedBy(2, 7, Large()));
  EXPECT_EQ(Get<BreakLink>(DoneWith(2, std::nullopt)).size(), 1u);
}

TEST_F(SignedOpTest, ACopyGoesOnCountingTheReadiesOfAName) {
  EnterSigned();
  EXPECT_EQ(Get<SendReady>(Post(7, Large())).at(0).sign, 0u);
  Signed(1);
  Ready(SignedBy(2, 7, Large()));
  Ready(SignedBy(3, 7, Large()));
  Complete(1);
  DoneWith(2, ReadiesDigestOf(""));
  DoneWith(3, ReadiesDigestOf(""));
  OpTable copy = ops_;
  Actions out;
  copy.Post({PostOf(1, 7, Large()), MemberId(1), Epoch(1)}, now_, &out);
  EXPECT_EQ(Get<SendReady>(out).at(0).sign, 1u);
}

TEST_F(SignedOpTest, WhoRefusesGivesItsEvidenceWhenOpsAreFrozen) {
  EnterSigned();
  Post(7, Large());
  Signed(1);
  Ready(SignedBy(2, 7, Large()));
  Ready(SignedBy(3, 7, Small()));
  const auto evidence = Sent<control::Dispute>(Freeze());
  ASSERT_EQ(evidence.size(), 1u);
  EXPECT_EQ(evidence[0].peer, PeerId());
  EXPECT_EQ(evidence[0].statements.size(), 2u);
}

TEST_F(OpTableTest, ASignatureNobodyAskedForBreaksTheLink) {
  EnterThree();
  Post(7, Large());
  PeerReady ready = ReadyOf(2, 7, Large());
  ready.signature = ReadySignature{0, Sha256(""), "signature"};
  EXPECT_TRUE(Breaks(ready));
}

}  // namespace
}  // namespace longhaul::peerd
