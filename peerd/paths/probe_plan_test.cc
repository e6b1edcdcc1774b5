#include "peerd/paths/probe_plan.h"

#include <set>

#include "gtest/gtest.h"

namespace longhaul::peerd {
namespace {

const PeerId kSelf(1);
constexpr int64_t kInterval = Seconds(30);

Tick At(int64_t seconds) { return Tick{} + Seconds(5000 + seconds); }

std::vector<ProbeCandidate> Links(uint64_t peers) {
  std::vector<ProbeCandidate> links;
  for (uint64_t peer = 2; peer <= peers; ++peer) links.push_back({PeerId(peer)});
  return links;
}

TEST(ProbePlan, ProbesEveryLinkOnceAndOneInAnInterval) {
  ProbePlan plan(kSelf, kInterval);
  std::vector<ProbeCandidate> links = Links(7);
  std::multiset<PeerId> probed;
  std::vector<int64_t> times;
  for (int64_t second = 0; second < 300; ++second) {
    const auto peer = plan.Next(links, At(second));
    if (!peer) continue;
    plan.Ended(At(second), At(second) + Millis(500));
    probed.insert(*peer);
    times.push_back(second);
    links[peer->value() - 2].measured = At(second);
  }
  ASSERT_EQ(probed.size(), 6u);
  EXPECT_EQ(std::set<PeerId>(probed.begin(), probed.end()).size(), 6u);
  EXPECT_LT(times[0], 30);
  for (size_t i = 1; i < times.size(); ++i) EXPECT_EQ(times[i] - times[i - 1], 30);
}

TEST(ProbePlan, AnIntervalOfZeroProbesNothing) {
  ProbePlan plan(kSelf, 0);
  for (int64_t second = 0; second < 1000; ++second) {
    EXPECT_FALSE(plan.Next(Links(3), At(second)));
  }
}

TEST(ProbePlan, WhatIsKnownIsProbedAgainWhenItIsOld) {
  ProbePlan plan(kSelf, kInterval);
  std::vector<ProbeCandidate> links = Links(2);
  links[0].measured = At(0);
  EXPECT_FALSE(plan.Next(links, At(0)));
  EXPECT_FALSE(plan.Next(links, At(599)));
  EXPECT_EQ(plan.Next(links, At(600)), PeerId(2));
}

TEST(ProbePlan, LinksThatAreInUseComeLast) {
  ProbePlan plan(kSelf, kInterval);
  std::vector<ProbeCandidate> links = Links(4);
  for (ProbeCandidate& link : links) link.in_use = link.peer != PeerId(3);
  (void)plan.Next(links, At(0));
  EXPECT_EQ(plan.Next(links, At(30)), PeerId(3));
  links[1].measured = At(31);
  const auto next = plan.Next(links, At(60));
  ASSERT_TRUE(next);
  EXPECT_NE(*next, PeerId(3));
}

TEST(ProbePlan, WhatFailedIsTriedAgainAfterTheOthers) {
  ProbePlan plan(kSelf, kInterval);
  const std::vector<ProbeCandidate> links = Links(4);
  std::vector<PeerId> tried;
  for (int64_t second = 0; second < 240; ++second) {
    if (const auto peer = plan.Next(links, At(second))) tried.push_back(*peer);
  }
  ASSERT_GE(tried.size(), 6u);
  EXPECT_EQ(std::set<PeerId>(tried.begin(), tried.begin() + 3).size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(tried[i], tried[i + 3]);
}

TEST(ProbePlan, ProbesTakeASmallShareOfTheTime) {
  ProbePlan plan(kSelf, kInterval);
  int64_t second = 0;
  while (!plan.Next(Links(5), At(second))) ++second;
  plan.Ended(At(second), At(second + 4));
  const int64_t ended = second + 4;
  do ++second;
  while (!plan.Next(Links(5), At(second)));
  EXPECT_EQ(second - ended, 80);
}

TEST(ProbePlan, PeersProbeAtDifferentMoments) {
  std::set<int64_t> begins;
  for (uint64_t self = 1; self <= 20; ++self) {
    ProbePlan plan(PeerId(self), kInterval);
    const std::vector<ProbeCandidate> links = {{PeerId(50)}};
    int64_t second = 0;
    while (!plan.Next(links, At(second))) ++second;
    EXPECT_LE(second, 30);
    begins.insert(second);
  }
  EXPECT_GE(begins.size(), 8u);
}

}  // namespace
}  // namespace longhaul::peerd
