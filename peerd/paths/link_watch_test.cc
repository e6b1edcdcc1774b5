#include "peerd/paths/link_watch.h"

#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

using control::LinkMeasure;

constexpr uint64_t kMega = 1000000;
const PeerId kSelf(1), kOther(2), kThird(3);

Tick At(int64_t seconds) { return Tick{} + Seconds(1000 + seconds); }

TEST(LinkWatch, SaysWhatALinkCarried) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {10 * kMega, false, 40000}, At(0));
  watch.Add(kThird, {0, false, 30000}, At(0));
  EXPECT_EQ(watch.PopReport(At(2)).links,
            (std::vector<LinkMeasure>{{kSelf, kOther, 10 * kMega, 40000, 2000, /*at_least=*/true},
                                      {kSelf, kThird, 0, 30000}}));
  EXPECT_TRUE(watch.PopReport(At(3)).links.empty()) << "it was said";
}

TEST(LinkWatch, SaysHowLongALinkIsBeforeItCarriesAnything) {
  LinkWatch watch(kSelf);
  watch.SetRtt(kOther, 160000);
  watch.SetRtt(kThird, 0);
  EXPECT_EQ(watch.PopReport(At(0)).links, (std::vector<LinkMeasure>{{kSelf, kOther, 0, 160000}}));
  watch.SetRtt(kOther, 161000);
  EXPECT_TRUE(watch.PopReport(At(1)).links.empty()) << "it was said";
  watch.SetRtt(kOther, 40000);
  EXPECT_EQ(watch.PopReport(At(2)).links.at(0).rtt_us, 40000u) << "another route";
  watch.Add(kOther, {10 * kMega, false, 42000}, At(3));
  watch.SetRtt(kOther, 90000);
  EXPECT_EQ(watch.PopReport(At(3)).links.at(0).rtt_us, 42000u) << "TCP knows it without queues";
  watch.SetRtt(kOther, 90000);
  EXPECT_TRUE(watch.PopReport(At(3 + 2 * LinkWatch::kForget / Seconds(1))).links.empty())
      << "a report would keep the old rate alive";
}

TEST(LinkWatch, SaysWhereLargePacketsVanish) {
  LinkWatch watch(kSelf);
  watch.SetSmallPackets(kOther, true);
  const auto said = watch.PopReport(At(0)).links;
  ASSERT_EQ(said.size(), 1u);
  EXPECT_TRUE(said[0].small_packets);
  EXPECT_EQ(said[0].bytes_per_second, 0u) << "nothing was measured";
  EXPECT_TRUE(watch.PopReport(At(1)).links.empty()) << "it was said";
  watch.Add(kOther, {10 * kMega, false, 40000}, At(1));
  EXPECT_TRUE(watch.PopReport(At(1)).links.at(0).small_packets);
  watch.SetSmallPackets(kOther, false);
  EXPECT_FALSE(watch.PopReport(At(2)).links.at(0).small_packets) << "another link";
}

TEST(LinkWatch, SaysOnlyWhatHasChanged) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {100 * kMega, false, 40000}, At(0));
  watch.PopReport(At(0));
  watch.Add(kOther, {104 * kMega, false, 40000}, At(1));
  EXPECT_TRUE(watch.PopReport(At(1)).links.empty());
  watch.Add(kOther, {110 * kMega, false, 40000}, At(2));
  EXPECT_EQ(watch.PopReport(At(2)).links.at(0).bytes_per_second, 110 * kMega);
  watch.Add(kOther, {110 * kMega, false, 20000}, At(3));
  EXPECT_EQ(watch.PopReport(At(3)).links.at(0).rtt_us, 20000u);
}

TEST(LinkWatch, TheHighestOfTheWindowCounts) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {100 * kMega, false, 1000}, At(0));
  watch.Add(kOther, {30 * kMega, false, 1000}, At(5));
  watch.Add(kOther, {60 * kMega, false, 1000}, At(10));
  EXPECT_EQ(watch.PopReport(At(10)).links.at(0).bytes_per_second, 100 * kMega);
  watch.Add(kOther, {20 * kMega, false, 1000}, At(21));
  EXPECT_EQ(watch.PopReport(At(21)).links.at(0).bytes_per_second, 60 * kMega)
      << "the highest one is too old";
}

TEST(LinkWatch, TheShortestRoundTripOfTheWindowCounts) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {100 * kMega, false, 5000}, At(0));
  watch.Add(kOther, {100 * kMega, false, 100000}, At(5));
  watch.Add(kOther, {100 * kMega, false, 0}, At(10));
  EXPECT_EQ(watch.PopReport(At(10)).links.at(0).rtt_us, 5000u);
  watch.Add(kOther, {100 * kMega, false, 0}, At(21));
  EXPECT_TRUE(watch.PopReport(At(21)).links.empty()) << "it is not known any better";
  watch.Add(kOther, {100 * kMega, false, 120000}, At(22));
  EXPECT_EQ(watch.PopReport(At(22)).links.at(0).rtt_us, 100000u) << "another route";
  watch.Add(kOther, {100 * kMega, false, 90000}, At(60));
  EXPECT_EQ(watch.PopReport(At(60)).links.at(0).rtt_us, 90000u);
}

TEST(LinkWatch, ASenderWithTooLittleToSendShowsALinkIsFasterAndNeverSlower) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {5 * kMega, true, 1000}, At(0));
  EXPECT_EQ(watch.PopReport(At(0)).links.at(0).bytes_per_second, 0u) << "it says next to nothing";
  watch.Add(kOther, {50 * kMega, false, 1000}, At(1));
  watch.Add(kOther, {20 * kMega, true, 1000}, At(2));
  watch.Add(kOther, {20 * kMega, true, 1000}, At(40));
  EXPECT_EQ(watch.Measured(kOther), At(1));
  EXPECT_FALSE(watch.Measured(kThird));
  EXPECT_EQ(watch.PopReport(At(40)).links.at(0).bytes_per_second, 50 * kMega);
  watch.Add(kOther, {80 * kMega, true, 1000}, At(41));
  EXPECT_EQ(watch.PopReport(At(41)).links.at(0).bytes_per_second, 80 * kMega);
}

TEST(LinkWatch, TheFirstSamplesAfterAPauseMakeNoLinkSlower) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {60 * kMega, false, 1000}, At(0));
  watch.Add(kOther, {1 * kMega, false, 1000}, At(70));
  watch.Add(kOther, {2 * kMega, false, 1000}, At(79));
  EXPECT_EQ(watch.PopReport(At(79)).links.at(0).bytes_per_second, 60 * kMega);
  watch.Add(kOther, {50 * kMega, false, 1000}, At(80));
  EXPECT_EQ(watch.PopReport(At(80)).links.at(0).bytes_per_second, 50 * kMega) << "it is slower";
  watch.Add(kOther, {70 * kMega, false, 1000}, At(200));
  EXPECT_EQ(watch.PopReport(At(200)).links.at(0).bytes_per_second, 70 * kMega)
      << "faster shows at once";
}

TEST(LinkWatch, WhatWasSeenForAMomentOnlyIsALowerBound) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {20 * kMega, false, 1000}, At(0));
  EXPECT_TRUE(watch.PopReport(At(0)).links.at(0).at_least);
  watch.Add(kOther, {60 * kMega, false, 1000}, At(5));
  EXPECT_TRUE(watch.PopReport(At(5)).links.at(0).at_least);
  watch.Add(kOther, {60 * kMega, false, 1000}, At(10));
  EXPECT_FALSE(watch.PopReport(At(10)).links.at(0).at_least);
  watch.Add(kOther, {70 * kMega, false, 1000}, At(100));
  EXPECT_FALSE(watch.PopReport(At(100)).links.at(0).at_least) << "a pause takes nothing back";
}

TEST(LinkWatch, AProbeWithFewConnectionsIsALowerBound) {
  LinkWatch watch(kSelf);
  const RateSample probe{15 * kMega, false, 1000, /*few_connections=*/true};
  watch.Add(kOther, probe, At(0));
  EXPECT_EQ(watch.PopReport(At(0)).links,
            (std::vector<LinkMeasure>{{kSelf, kOther, 15 * kMega, 1000, 0, /*at_least=*/true}}));
  watch.Add(kOther, {15 * kMega, false, 1000}, At(10));
  EXPECT_FALSE(watch.PopReport(At(10)).links.at(0).at_least) << "an op got as much";
  watch.Add(kOther, {60 * kMega, false, 1000}, At(15));
  watch.Add(kOther, probe, At(100));
  watch.Add(kOther, probe, At(111));
  EXPECT_EQ(watch.PopReport(At(111)).links.at(0).bytes_per_second, 60 * kMega);
  // After kForget without a confirmation the old rate does not count any more.
  watch.Add(kOther, probe, At(700));
  EXPECT_EQ(watch.PopReport(At(700)).links.at(0).bytes_per_second, 15 * kMega);
}

TEST(LinkWatch, WhatLanesGetWhileTheirNumberGrowsIsALowerBound) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {20 * kMega, false, 1000, /*few_connections=*/true}, At(0));
  watch.Add(kOther, {30 * kMega, false, 1000, /*few_connections=*/true}, At(15));
  EXPECT_TRUE(watch.PopReport(At(15)).links.at(0).at_least) << "however long it takes";
  watch.Add(kOther, {60 * kMega, false, 1000}, At(16));
  EXPECT_FALSE(watch.PopReport(At(16)).links.at(0).at_least);
  // The path changes, and the link looks for another number of lanes.
  watch.Add(kOther, {10 * kMega, false, 1000, /*few_connections=*/true}, At(30));
  watch.Add(kOther, {20 * kMega, false, 1000, /*few_connections=*/true}, At(40));
  EXPECT_TRUE(watch.PopReport(At(40)).links.empty());
  watch.Add(kOther, {20 * kMega, false, 1000}, At(45));
  watch.Add(kOther, {20 * kMega, false, 1000}, At(55));
  EXPECT_EQ(watch.PopReport(At(55)).links.at(0).bytes_per_second, 20 * kMega);
}

TEST(LinkWatch, BesideOtherLinksASampleIsALowerBound) {
  LinkWatch watch(kSelf);
  RateSample crowded{20 * kMega, false, 1000};
  crowded.crowded = true;
  watch.Add(kOther, crowded, At(0));
  watch.Add(kOther, crowded, At(15));
  EXPECT_EQ(watch.PopReport(At(15)).links,
            (std::vector<LinkMeasure>{{kSelf, kOther, 20 * kMega, 1000, 0, /*at_least=*/true}}));
  watch.Add(kOther, {60 * kMega, false, 1000}, At(16));
  EXPECT_FALSE(watch.PopReport(At(16)).links.at(0).at_least);
  watch.Add(kOther, crowded, At(30));
  watch.Add(kOther, crowded, At(45));
  EXPECT_TRUE(watch.PopReport(At(45)).links.empty()) << "it makes no link slower";
}

TEST(LinkWatch, AHeldLinkLimitsTheRateItself) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {60 * kMega, false, 1000}, At(0));
  watch.Add(kOther, {60 * kMega, false, 1000}, At(10));
  watch.PopReport(At(10));
  RateSample crowded{20 * kMega, false, 1000};
  crowded.crowded = true;
  std::vector<LinkMeasure> said;
  for (int64_t s = 40; s <= 50; ++s) {
    watch.SetHeld(kOther);
    watch.Add(kOther, crowded, At(s));
    said = watch.PopReport(At(s)).links;
    const bool news = s == 41 || s == 50;  // that it is held (once is chance), and the rate
    EXPECT_EQ(said.size(), news ? 1u : 0u) << s;
  }
  LinkMeasure held{kSelf, kOther, 20 * kMega, 1000, 0};
  held.held = true;
  EXPECT_EQ(said, (std::vector<LinkMeasure>{held}));
  for (uint32_t i = 1; i < LinkWatch::kHeldSamples; ++i) {
    watch.Add(kOther, crowded, At(50));
    EXPECT_TRUE(watch.PopReport(At(50)).links.empty());
  }
  watch.Add(kOther, crowded, At(50));
  EXPECT_FALSE(watch.PopReport(At(50)).links.at(0).held) << "long without a sign";
}

TEST(LinkWatch, SaysItAgainBeforeItIsForgotten) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {50 * kMega, false, 1000}, At(0));
  EXPECT_EQ(watch.PopReport(At(0)).links.size(), 1u);
  EXPECT_TRUE(watch.PopReport(At(299)).links.empty());
  EXPECT_EQ(watch.PopReport(At(300)).links.at(0).age_ms, 300000u);
  EXPECT_TRUE(watch.PopReport(At(601)).links.empty()) << "nobody has confirmed it for long";
  watch.SayAllAgain();
  EXPECT_TRUE(watch.PopReport(At(601)).links.empty());
}

TEST(LinkWatch, ANewCoordinatorHearsAllOfIt) {
  LinkWatch watch(kSelf);
  watch.Add(kOther, {50 * kMega, false, 1000}, At(0));
  watch.Add(kThird, {60 * kMega, false, 1000}, At(0));
  EXPECT_EQ(watch.PopReport(At(0)).links.size(), 2u);
  watch.SayAllAgain();
  EXPECT_EQ(watch.PopReport(At(1)).links.size(), 2u);
  watch.Keep({kThird});
  watch.SayAllAgain();
  EXPECT_EQ(watch.PopReport(At(2)).links.at(0).to, kThird);
}

TEST(LinkWatch, KeepsFewSamples) {
  LinkWatch watch(kSelf);
  for (int64_t i = 0; i < 1000; ++i) {
    watch.Add(kOther, {(2000 - static_cast<uint64_t>(i)) * kMega, false, 1000},
              At(0) + Millis(15 * i));
  }
  // The oldest samples are dropped, although they were higher.
  EXPECT_EQ(watch.PopReport(At(15)).links.at(0).bytes_per_second,
            (2000 - 1000 + LinkWatch::kSamplesMax) * kMega);
}

}  // namespace
}  // namespace longhaul::peerd
