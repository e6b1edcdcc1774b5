#include "coordinator/core/trials.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

constexpr PeerId kNew(9);

class TrialsTest : public ::testing::Test {
 protected:
  static Tick At(int64_t ms) { return Tick{Seconds(1000) + Millis(ms)}; }
  // Members 1..n are asked, in trial number_.
  void Begin(uint64_t n) {
    std::set<PeerId> asked;
    for (uint64_t i = 1; i <= n; ++i) asked.insert(PeerId(i));
    number_ = trials_.Begin(kNew, asked, At(1000));
  }
  void Yes(uint64_t from) { trials_.Answer(PeerId(from), number_, kNew, ""); }
  void No(uint64_t from) { trials_.Answer(PeerId(from), number_, kNew, "refused"); }
  // "reached", "refused" or "open".
  std::string State(int64_t ms = 0) {
    const std::vector<Trials::Ended> ended = trials_.End(At(ms));
    if (!ended.empty() && !ended[0].reached) return "refused";
    return trials_.Reached(kNew) ? "reached" : trials_.Running(kNew) ? "open" : "unknown";
  }

  Trials trials_;
  uint64_t number_ = 0;
};

TEST_F(TrialsTest, RefusesAsSoonAsTheMissingAnswersChangeNothingAndPassesWithAll) {
  Begin(5);
  for (const uint64_t n : {1, 2, 3, 4}) Yes(n);
  EXPECT_EQ(State(), "open") << "the last one may need a relay";
  No(5);
  EXPECT_EQ(State(), "reached");
  Begin(5);
  No(1);
  Yes(2);
  No(3);
  EXPECT_EQ(State(), "open");
  No(4);
  EXPECT_EQ(State(), "refused");
}

TEST_F(TrialsTest, HalfOfThoseAskedAndAtLeastTwoAreEnoughToRefuse) {
  Begin(4);
  Yes(1);
  No(2);
  EXPECT_EQ(State(), "open");
  No(3);
  EXPECT_EQ(State(), "refused");
  Begin(2);
  Yes(1);
  No(2);
  EXPECT_EQ(State(), "reached") << "the second one goes through a relay";
  Begin(2);
  No(1);
  EXPECT_EQ(State(), "open");
  No(2);
  EXPECT_EQ(State(), "refused");
  Begin(1);
  No(1);
  EXPECT_EQ(State(), "refused");
}

TEST_F(TrialsTest, WhoDoesNotAnswerIsNotCounted) {
  Begin(4);
  Yes(1);
  No(2);
  Yes(3);
  EXPECT_EQ(State(999), "open");
  EXPECT_EQ(trials_.NextDeadline(), At(1000));
  EXPECT_EQ(State(1000), "reached");
  Begin(4);
  EXPECT_EQ(State(1000), "reached") << "nobody has said anything";
}

TEST_F(TrialsTest, AnAnswerToAnotherTrialOrOfAStrangerIsIgnored) {
  Begin(1);
  const uint64_t before = number_;
  Begin(1);
  trials_.Answer(PeerId(1), before, kNew, "");
  trials_.Answer(PeerId(2), number_, kNew, "");
  trials_.Answer(PeerId(1), number_, PeerId(8), "");
  EXPECT_EQ(State(), "open");
}

TEST_F(TrialsTest, ATrialThatEndedNamesWhoDoesNotReachTheNewcomerAndWhatWasSeen) {
  for (const bool reached : {false, true}) {
    Begin(3);
    No(1);
    if (reached) {
      Yes(2);
      Yes(3);
    } else {
      No(3);
    }
    const std::vector<Trials::Ended> ended = trials_.End(At(0));
    ASSERT_EQ(ended.size(), 1u);
    EXPECT_EQ(ended[0].newcomer, kNew);
    EXPECT_EQ(ended[0].reached, reached);
    EXPECT_EQ(ended[0].asked, 3u);
    std::map<PeerId, std::string> errors = {{PeerId(1), "refused"}};
    if (!reached) errors[PeerId(3)] = "refused";
    EXPECT_EQ(ended[0].errors, errors);
  }
}

}  // namespace
}  // namespace longhaul::coordinator
