#include "tools/lhctl/top.h"

#include <string>

#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

v1::GetOverviewResponse Parse(const std::string& text) {
  v1::GetOverviewResponse message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message));
  return message;
}

v1::GetOverviewResponse Overview(const std::string& settled, const std::string& waiting) {
  return Parse(R"(
    incarnation: "c0ffee" version: "1.2.3" streams: 2
    groups {
      run: "demo" epoch: 12 waiting_for: ")" +
               waiting + R"("
      members { member: "m1" peer: "pa" joined: 1 voting: true }
      members { member: "m2" peer: "pb" joined: 3 }
      members { member: "m9" peer: "pb" }
      ring { peer: "pa" host: "h1" attached: true ops_open: 2 ops_settled: )" +
               settled + R"(
             bytes_sent: )" +
               settled + R"(000 next { bytes_per_second: 13107200 rtt_us: 40250 } }
      ring { peer: "pb" host: "h2" ops_settled: 5 bytes_received: )" +
               settled + R"(000 }
    })");
}

TEST(Top, RatesComeFromTwoOverviews) {
  Top top;
  top.Update(Overview("100", "1 of 2 votes"), 1000000);
  EXPECT_EQ(top.Render(0, 0),
            "coordinator c0ffee  version 1.2.3  peers 2  groups 1\n"
            "\n"
            "GROUP   EPOCH  MEMBERS  PENDING  REVISION  OPEN  OPS/S  SENT/S  RECEIVED/S  "
            "WAITS\n"
            "demo/0  12     2        1        -         2     0.0    0 B     0 B         "
            "1 of 2 votes (0 s)\n"
            "\n"
            "GROUP   PEER  HOST  STATE     OPEN  OPS/S  SENT/S  RECEIVED/S  TO NEXT     RTT      "
            "MEMBERS\n"
            "demo/0  pa    h1    attached  2     -      -       -           12.5 MiB/s  40.2 ms  "
            "m1 at boundary\n"
            "demo/0  pb    h2    away      0     -      -       -           -           -        "
            "m2 working, m9 pending\n");
  top.Update(Overview("130", "1 of 2 votes"), 3000000);
  const std::string text = top.Render(0, 0);
  EXPECT_THAT(text, HasSubstr("2     15.0   14.6 KiB  14.6 KiB    1 of 2 votes (2 s)\n"));
  EXPECT_THAT(text, HasSubstr("pa    h1    attached  2     15.0   14.6 KiB  0 B "));
  EXPECT_THAT(text, HasSubstr("pb    h2    away      0     0.0    0 B       14.6 KiB "));
}

TEST(Top, AnotherReasonToWaitIsNewAndNoneIsShownAsNone) {
  Top top;
  top.Update(Overview("1", "x"), 1000000);
  top.Update(Overview("1", "y"), 9000000);
  EXPECT_THAT(top.Render(0, 0), HasSubstr("y (0 s)\n"));
  top.Update(Overview("1", ""), 10000000);
  EXPECT_THAT(top.Render(0, 0), HasSubstr("0 B         -\n"));
}

TEST(Top, ACounterThatBeginsAnewIsNoRate) {
  Top top;
  top.Update(Overview("100", ""), 1000000);
  top.Update(Overview("3", ""), 2000000);
  EXPECT_THAT(top.Render(0, 0), HasSubstr("attached  2     0.0    0 B     0 B"));
}

TEST(Top, WithoutACoordinatorItShowsWhatWasSaidLast) {
  Top top;
  top.Lost("nobody is there", 1);
  EXPECT_EQ(top.Render(0, 0), "NO ANSWER: nobody is there\n");
  top.Update(Overview("100", "x"), 1000000);
  top.Lost("gone\x1b[2J", 5000000);
  std::string text = top.Render(0, 0);
  EXPECT_THAT(text, HasSubstr("\nNO ANSWER for 4 s; below is what it said last: gone?[2J\n"));
  EXPECT_THAT(text, HasSubstr("demo/0  12 "));
  // A new start of the coordinator knows the same peers, whose counters go on.
  top.Update(Overview("200", "x"), 6000000);
  text = top.Render(0, 0);
  EXPECT_THAT(text, Not(HasSubstr("NO ANSWER")));
  EXPECT_THAT(text, HasSubstr("attached  2     20.0 "));
}

TEST(Top, FitsTheTerminal) {
  Top top;
  top.Update(Overview("100", ""), 1000000);
  EXPECT_EQ(top.Render(3, 11),
            "coordinator\n"
            "\n"
            "6 more lines\n");
  EXPECT_THAT(top.Render(8, 0), Not(HasSubstr("more")));
  // A character may take several bytes.
  top.Update(Parse("incarnation: '\xc3\xa9\xc3\xa9'"), 2000000);
  EXPECT_THAT(top.Render(0, 13), HasSubstr("coordinator \xc3\xa9\n"));
}

TEST(Top, WithoutRunsItSaysSo) {
  Top top;
  top.Update({}, 1);
  EXPECT_THAT(top.Render(0, 0), HasSubstr("\nno runs\n"));
}

}  // namespace
}  // namespace longhaul
