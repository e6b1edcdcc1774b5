#include "tools/lhctl/links.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

v1::GetLinksResponse Parse(const std::string& text) {
  v1::GetLinksResponse message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message));
  return message;
}

TEST(Links, AMatrixShowsRatesRoundTripsAndBlockedPairs) {
  EXPECT_EQ(RenderLinks(Parse(R"(groups {
              run: "demo" epoch: 7
              peers { peer: "pa" host: "h1" } peers { peer: "pb" host: "h2" }
              peers { peer: "pc" host: "h\n3" }
              links { from: "pa" to: "pb" link { bytes_per_second: 13107200 rtt_us: 40250 } }
              links { from: "pb" to: "pa" link { bytes_per_second: 1048576 at_least: true } }
              links { from: "pb" to: "pc" link { rtt_us: 100 } small_packets: true }
              blocked { a: "pc" b: "pa" reason: "no route" relay: "pb" }
            })")),
            "demo/0, epoch 7: 3 peers, 3 of 6 directions measured\n"
            "\n"
            "MIB/S TO  HOST  pa       pb    pc\n"
            "pa        h1    -        12.5  blocked\n"
            "pb        h2    1.0+     -     ?\n"
            "pc        h?3   blocked  ?     -\n"
            "\n"
            "RTT MS TO  HOST  pa       pb    pc\n"
            "pa         h1    -        40.2  blocked\n"
            "pb         h2    ?        -     0.1\n"
            "pc         h?3   blocked  ?     -\n"
            "\n"
            "blocked: pc and pa cannot reach each other (no route); pb carries their link\n"
            "large packets vanish: pb to pc; check the MTU of the path\n");
}

// A group of `peers` in which the link from peer i to the next one has the rate of (i + 1) MiB/s
// and a round trip of (i + 1) ms.
v1::GetLinksResponse Large(int peers) {
  v1::GetLinksResponse links;
  auto* group = links.add_groups();
  group->set_run("demo");
  for (int i = 0; i < peers; ++i) {
    auto* peer = group->add_peers();
    peer->set_peer(absl::StrCat("p", i));
    auto* link = group->add_links();
    link->set_from(absl::StrCat("p", i));
    link->set_to(absl::StrCat("p", (i + 1) % peers));
    link->mutable_link()->set_bytes_per_second(static_cast<uint64_t>(i + 1) << 20);
    link->mutable_link()->set_rtt_us(static_cast<uint32_t>(i + 1) * 1000);
  }
  return links;
}

TEST(Links, SixteenPeersAreAMatrixThatATerminalShows) {
  const std::string text = RenderLinks(Large(16));
  EXPECT_THAT(text, HasSubstr("MIB/S TO"));
  EXPECT_THAT(text, Not(HasSubstr("SLOWEST")));
  size_t widest = 0;
  for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
    widest = std::max(widest, end - at);
  }
  EXPECT_LE(widest, 160u);
}

TEST(Links, OfMoreThanSixteenPeersTheWorstAreListed) {
  v1::GetLinksResponse links = Large(17);
  const std::string text = RenderLinks(links);
  EXPECT_THAT(text, Not(HasSubstr("MIB/S TO")));
  EXPECT_THAT(text, HasSubstr("SLOWEST FROM  FROM HOST  TO   TO HOST  MIB/S  RTT MS  MEASURED\n"
                              "p0                       p1            1.0    1.0     0 s ago\n"
                              "p1 "));
  EXPECT_THAT(text, HasSubstr("LONGEST FROM  FROM HOST  TO   TO HOST  MIB/S  RTT MS  MEASURED\n"
                              "p16                      p0            17.0   17.0    0 s ago\n"
                              "p15 "));
  // Ten of each: a line about the group, and twice an empty line, a title and ten rows.
  EXPECT_THAT(text,
              HasSubstr("\np9                       p10           10.0   10.0    0 s ago\n\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 25);

  // What is blocked has sentences of its own. What was not measured is not bad.
  auto* blocked = links.mutable_groups(0)->add_blocked();
  blocked->set_a("p0");
  blocked->set_b("p1");
  links.mutable_groups(0)->mutable_links(1)->mutable_link()->clear_bytes_per_second();
  EXPECT_THAT(RenderLinks(links), HasSubstr("MEASURED\np2 "));
  EXPECT_THAT(RenderLinks(links), HasSubstr("\nblocked: p0 and p1 cannot reach each other"));
}

TEST(Links, WhatHostsCarryInAllFollowsAndWhatHoldsThem) {
  EXPECT_THAT(RenderLinks(Parse(R"(groups {
                run: "demo" epoch: 7
                peers { peer: "pa" host: "h1" up_bytes_per_second: 13107200
                        down_bytes_per_second: 1048576 share: 1 }
                peers { peer: "pb" host: "h\n2" up_bytes_per_second: 1048576 }
                peers { peer: "pc" host: "h3" }
                links { from: "pa" to: "pb" link { bytes_per_second: 1048576 } held: true }
              })")),
              HasSubstr("\n"
                        "MIB/S IN ALL  HOST  UP    DOWN  SHARE\n"
                        "pa            h1    12.5  1.0   100.0 %\n"
                        "pb            h?2   1.0   ?     0.0 %\n"
                        "pc            h3    ?     ?     0.0 %\n"
                        "\n"
                        "held: pa could send more; its link to pb, or pb itself, takes no more\n"));
}

TEST(Links, OfMoreThanSixteenPeersTheSlowestHostsAreListed) {
  v1::GetLinksResponse links = Large(17);
  for (int i = 0; i < 17; ++i) {
    v1::PeerStatus* const peer = links.mutable_groups(0)->mutable_peers(i);
    peer->set_up_bytes_per_second(static_cast<uint64_t>(i) << 20);
    peer->set_down_bytes_per_second(static_cast<uint64_t>(20 - i) << 20);
  }
  const std::string text = RenderLinks(links);
  EXPECT_THAT(text, HasSubstr("MIB/S IN ALL  HOST  UP    DOWN  SHARE\n"
                              "p1                  1.0   19.0  0.0 %\n"
                              "p2                  2.0   18.0  0.0 %\n"));
  EXPECT_THAT(text, Not(HasSubstr("p0                  ?")));
}

TEST(Links, WithoutTwoPeersThereIsNone) {
  EXPECT_EQ(RenderLinks({}), "no links: no group has two peers\n");
  EXPECT_EQ(RenderLinks(Parse(R"(groups { run: "a" peers { peer: "pa" } })")),
            "no links: no group has two peers\n");
}

}  // namespace
}  // namespace longhaul
