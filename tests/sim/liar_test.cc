// Members that were admitted and lie: what the others end with, and who is removed.
//
// Each trainer reduces one tensor after the other. One host changes what its core wants to say to
// one other host, and signs that as if it were true.
#include <algorithm>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "gtest/gtest.h"
#include "tests/sim/busy_trainer.h"
#include "tests/sim/simulation.h"

namespace longhaul::sim {
namespace {

struct Case {
  uint64_t seed = 1;
  uint64_t count = 1000;  // elements of each tensor
};

class LiarTest : public BusyGroup, public testing::TestWithParam<Case> {
 protected:
  LiarTest() : BusyGroup(GetParam().seed, GetParam().count) {}

  void Start(int n) { ASSERT_TRUE(Found(n)); }
  PeerHost& host(size_t i) { return *sim_.peers()[i]; }
  BusyTrainer& liar() { return *trainers_.back(); }
  // The last host tells the host `victim` something else, whenever it has something to tell.
  template <class Say>
  void LieTo(size_t victim, void (*change)(Say*)) {
    const PeerId to = host(victim).id();
    sim_.peers().back()->LieWith([=](std::vector<peerd::Action>* actions) {
      for (peerd::Action& action : *actions) {
        auto* const say = std::get_if<Say>(&action);
        if (say != nullptr && say->to == to) change(say);
      }
    });
  }
  // One member is out. The others go on, and no op of theirs ended otherwise than well.
  void ExpectOneIsOut(int64_t gap_max) {
    EXPECT_EQ(Members(), static_cast<int>(trainers_.size()) - 1);
    for (const auto& trainer : trainers_) {
      if (!trainer->member()) continue;
      for (const Code code : trainer->outcomes()) EXPECT_EQ(code, Code::kOk);
      EXPECT_LT(trainer->LongestGap(from_, sim_.now()), gap_max);
    }
  }
  void ExpectTheLiarIsOut(int64_t gap_max) {
    ExpectOneIsOut(gap_max);
    EXPECT_FALSE(liar().member());
  }
};

// Ops of both sizes.
std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (uint64_t seed = 1; seed <= Seeds(); ++seed) {
    cases.push_back({seed, seed % 2 == 1 ? uint64_t{1000} : uint64_t{100}});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Seeds, LiarTest, testing::ValuesIn(Cases()), [](const auto& info) {
  return "seed" + std::to_string(info.param.seed) + "count" + std::to_string(info.param.count);
});

void OfferAnotherOp(peerd::SendReady* ready) {
  ready->desc.min_world = ready->desc.min_world == 0 ? 2 : 0;
}
void SayTheOpposite(peerd::SendDone* done) {
  if (done->started) return;
  done->refused = !done->refused;
  if (done->readies_digest) done->readies_digest->low ^= 1;
}

// The first time, nobody can tell who lies. From then on READYs are signed, and the second lie is
// proof.
TEST_P(LiarTest, AHostThatOffersAnotherOpToOneOfTheOthersIsNamedAndRemoved) {
  Start(4);
  LieTo(1, OfferAnotherOp);
  Pass(Seconds(5));
  ExpectTheLiarIsOut(Seconds(1));
  EXPECT_NE(liar().end().text.find("told two peers different things"), std::string::npos)
      << liar().end().text;
}

TEST_P(LiarTest, TheLiarIsNotAdmittedAgain) {
  Start(4);
  liar().Insist();
  LieTo(0, OfferAnotherOp);
  Pass(Seconds(5));
  const PeerId id = liar().peer();
  auto again = std::make_unique<BusyTrainer>(&sim_, sim_.peers().back().get(), 9);
  Pass(Seconds(5));
  EXPECT_FALSE(again->member());
  EXPECT_NE(again->end().text.find("told members of the group different things"), std::string::npos)
      << again->end().text << " " << ToString(id);
}

// A DONE is not signed, so nobody can prove who lies. But the liar is in all pairs that differ.
TEST_P(LiarTest, AHostWhoseDonesAreWrongIsRemovedAfterAWhile) {
  Start(4);
  const PeerId a = host(0).id();
  const PeerId b = host(1).id();
  sim_.peers().back()->LieWith([=, turn = 0](std::vector<peerd::Action>* actions) mutable {
    for (peerd::Action& action : *actions) {
      auto* const done = std::get_if<peerd::SendDone>(&action);
      if (done != nullptr && done->to == (turn % 2 == 0 ? a : b)) {
        SayTheOpposite(done);
        ++turn;
      }
    }
  });
  Pass(Seconds(10));
  ExpectTheLiarIsOut(Seconds(1));
}

// Only the victim sees that, so nobody can say which of the two lies. Their link counts as broken,
// as every link does on which a frame breaks the protocol. The younger one is removed.
TEST_P(LiarTest, OfAPairWithWrongSignaturesOneIsRemovedAndTheOthersGoOn) {
  Start(4);
  LieTo(
      1, +[](peerd::SendReady* ready) {
        if (!ready->sign) return OfferAnotherOp(ready);
        ++*ready->sign;
      });
  Pass(Seconds(15));
  ExpectOneIsOut(Seconds(10));
}

}  // namespace
}  // namespace longhaul::sim
