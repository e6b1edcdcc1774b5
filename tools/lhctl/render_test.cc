#include "tools/lhctl/render.h"

#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::HasSubstr;

template <class Message>
Message Parse(const char* text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message));
  return message;
}

const char kOverview[] = R"(
  incarnation: "c0ffee" version: "1.2.3" detect_ms: 1500 store: "memory" streams: 2
  groups {
    run: "demo" group: 0 epoch: 12 preparing: 13 waiting_for: "waiting for pb"
    members { member: "m1" peer: "pa" name: "left" joined: 1 voting: true }
    members { member: "m2" peer: "pb" joined: 3 }
    members { member: "m9" peer: "pc" name: "new" }
    ring { peer: "pa" host: "h1" endpoint: "10.0.0.1:29700" attached: true ops_open: 2
           ops_settled: 100 bytes_sent: 1536 bytes_received: 3221225472
           next { bytes_per_second: 13107200 rtt_us: 40250 age_s: 7 } }
    ring { peer: "pb" host: "h2" endpoint: "10.0.0.2:29700"
           next { bytes_per_second: 1048576 age_s: 3 at_least: true } }
  }
  groups { run: "demo" group: 1 })";

TEST(Render, Status) {
  EXPECT_EQ(RenderStatus(Parse<v1::GetOverviewResponse>(kOverview)),
            "coordinator c0ffee  version 1.2.3  store memory  detect 1500 ms  peers 2\n"
            "\n"
            "GROUP   EPOCH  MEMBERS  PENDING  OPS  RING         STATE\n"
            "demo/0  12     2        1        2    pa>pb(away)  preparing 13: waiting for pb\n"
            "demo/1  0      0        0        0    -            no epoch yet\n");
  EXPECT_THAT(RenderStatus({}), HasSubstr("no runs\n"));
}

TEST(Render, StatusOfAGroupWithSharedState) {
  const auto overview = Parse<v1::GetOverviewResponse>(
      R"(groups { run: "a" epoch: 3 state { revision: 13 digest: "0123456789abcdef" } })");
  EXPECT_THAT(RenderStatus(overview), HasSubstr("steady, revision 13 of state 01234567\n"));
}

TEST(Render, StatusWhileMembersFetch) {
  auto overview = Parse<v1::GetOverviewResponse>(kOverview);
  v1::Fetch* fetch = overview.mutable_groups(0)->mutable_members(0)->mutable_fetch();
  fetch->set_bytes_done(3 << 20);
  fetch->set_bytes_total(4 << 20);
  fetch->set_bytes_per_second(1 << 20);
  fetch->set_sources(2);
  overview.mutable_groups(0)->mutable_members(1)->mutable_fetch();
  EXPECT_THAT(RenderStatus(overview),
              HasSubstr("\n\n"
                        "GROUP   FETCHING  NAME  DONE  LEFT     SOURCES  PER SECOND\n"
                        "demo/0  m1        left  75 %  1.0 MiB  2        1.0 MiB\n"
                        "demo/0  m2        -     -     -        0        0 B\n"));
  EXPECT_THAT(RenderMembers(overview), HasSubstr("epoch 1  fetching\n"));
}

TEST(Render, MembersInTheBackground) {
  auto overview = Parse<v1::GetOverviewResponse>(kOverview);
  v1::GroupStatus* group = overview.mutable_groups(0);
  group->mutable_members(0)->set_background(true);
  group->mutable_members(1)->set_background(true);
  group->mutable_members(1)->mutable_fetch();
  const std::string text = RenderMembers(overview);
  EXPECT_THAT(text, HasSubstr("epoch 1  background\n"));
  EXPECT_THAT(text, HasSubstr("epoch 3  fetching (background)\n"));
}

TEST(Render, Members) {
  EXPECT_EQ(RenderMembers(Parse<v1::GetOverviewResponse>(kOverview)),
            "GROUP   RANK  MEMBER  NAME  PEER  HOST  SINCE    STATE\n"
            "demo/0  0     m1      left  pa    h1    epoch 1  at boundary\n"
            "demo/0  1     m2      -     pb    h2    epoch 3  working\n"
            "demo/0  -     m9      new   pc    -     -        pending\n");
}

TEST(Render, Ring) {
  v1::GetRingResponse rings;
  const auto overview = Parse<v1::GetOverviewResponse>(kOverview);
  auto* ring = rings.add_rings();
  ring->set_run("demo");
  *ring->mutable_peers() = overview.groups(0).ring();
  ring->mutable_peers(0)->set_up_bytes_per_second(10 << 20);
  ring->mutable_peers(0)->set_share(0.625);
  ring->mutable_peers(1)->set_share(0.375);
  const std::string table =
      "GROUP   POSITION  PEER  HOST  ENDPOINT        STATE     OPS  SETTLED  SENT     RECEIVED  "
      "UP          DOWN  SHARE   TO NEXT       RTT      MEASURED\n"
      "demo/0  0         pa    h1    10.0.0.1:29700  attached  2    100      1.5 KiB  3.0 GiB   "
      "10.0 MiB/s  -     62.5 %  12.5 MiB/s    40.2 ms  7 s ago\n"
      "demo/0  1         pb    h2    10.0.0.2:29700  away      0    0        0 B      0 B       "
      "-           -     37.5 %  >= 1.0 MiB/s  -        3 s ago\n";
  EXPECT_EQ(RenderRing(rings), table);
  ring->set_ring_epoch(9);
  ring->set_ring_gain("slowest_mb_s=10.0 was=2.0");
  EXPECT_EQ(RenderRing(rings),
            table + "\ndemo/0: ordered anew in epoch 9, slowest_mb_s=10.0 was=2.0\n");
}

TEST(Render, RunsAndWhyAndEvent) {
  EXPECT_EQ(RenderRuns(Parse<v1::ListRunsResponse>(
                R"(runs { run: "demo" groups: 2 members: 3 pending: 1 })")),
            "RUN   GROUPS  MEMBERS  PENDING\ndemo  2       3        1\n");
  EXPECT_EQ(RenderWhy(Parse<v1::ExplainResponse>(
                R"(groups { run: "demo" verdict: "waits" facts: "a" facts: "b" })")),
            "demo/0: waits\n  - a\n  - b\n");
  EXPECT_EQ(
      RenderEvent(Parse<v1::Event>(
          R"(sequence: 7 time_us: 1700000000123456 kind: "commit" run: "demo" text: "x y=1")")),
      "2023-11-14T22:13:20.123Z  commit     demo/0  x y=1\n");
}

TEST(Render, ForeignTextCannotSteerTheTerminal) {
  v1::GetOverviewResponse overview;
  auto* group = overview.add_groups();
  group->set_run("r");
  group->set_waiting_for(
      "a\x1b[2Jb\xc2\x9b"
      "c\nd\xc3\xa9");
  EXPECT_THAT(RenderStatus(overview), HasSubstr("a?[2Jb?c?d\xc3\xa9\n"));
}

TEST(Render, JsonNamesEveryFieldAsInTheProto) {
  EXPECT_EQ(RenderJson(Parse<v1::Event>("sequence: 1 kind: \"join\""), true),
            R"({"sequence":"1","time_us":"0","kind":"join","run":"","group":0,"epoch":"0",)"
            R"("member":"","peer":"","text":"","incarnation":""})"
            "\n");
}

TEST(Render, BytesAreRounded) {
  EXPECT_EQ(RenderBytes(0), "0 B");
  EXPECT_EQ(RenderBytes(1023), "1023 B");
  EXPECT_EQ(RenderBytes(1024), "1.0 KiB");
  EXPECT_EQ(RenderBytes(UINT64_MAX), "16.0 EiB");
}

}  // namespace
}  // namespace longhaul
