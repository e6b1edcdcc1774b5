#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "coordinator/grpc/stranger_budget.h"
#include "coordinator/grpc/stranger_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

constexpr uint8_t kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kContinuation = 9;

std::string Frame(uint8_t type, size_t length) {
  std::string frame(9 + length, 'x');
  frame[0] = static_cast<char>(length >> 16);
  frame[1] = static_cast<char>(length >> 8);
  frame[2] = static_cast<char>(length);
  frame[3] = static_cast<char>(type);
  return frame;
}
const std::string kPreface(StrangerBudget::kPreface);

// How many bytes pass if they come in pieces of this size.
size_t PassedIn(const std::string& bytes, size_t piece) {
  StrangerBudget budget;
  std::string waiting;
  size_t passed = 0;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    waiting += bytes.substr(at, piece);
    const size_t more = budget.Pass(waiting);
    waiting.erase(0, more);
    passed += more;
  }
  return passed;
}

TEST(StrangerBudgetTest, AnHonestFirstCallPasses) {
  std::string call = kPreface + Frame(kSettings, 36) + Frame(8, 4) + Frame(kSettings, 0) +
                     Frame(kHeaders, 400) + Frame(kData, 300);
  for (const size_t piece : {size_t{1}, size_t{7}, call.size()}) {
    EXPECT_EQ(PassedIn(call, piece), call.size()) << piece;
  }
}

TEST(StrangerBudgetTest, WhatIsTooMuchWaitsAndAllBehindItToo) {
  const std::string begin = kPreface + Frame(kSettings, 0);
  struct Case {
    std::string frames, beyond;
  };
  std::string streams, resets;
  for (size_t i = 0; i < StrangerBudget::kStreamsMax; ++i) streams += Frame(kHeaders, 5);
  for (size_t i = 0; i < StrangerBudget::kFramesMax - 1; ++i) resets += Frame(kReset, 4);
  for (const Case& each :
       std::vector<Case>{{streams, Frame(kHeaders, 5)},
                         {resets, Frame(kReset, 4)},
                         {Frame(kHeaders, 2000), Frame(kContinuation, 49)},
                         {"", Frame(kHeaders, StrangerBudget::kHeaderBytesMax + 1)},
                         {Frame(kSettings, StrangerBudget::kOtherBytesMax), Frame(kSettings, 6)},
                         {Frame(kData, StrangerBudget::kDataBytesMax), Frame(kData, 1)},
                         {"", Frame(kSettings, (1 << 24) - 1)}}) {
    const std::string passes = begin + each.frames;
    const std::string all = passes + each.beyond + Frame(kSettings, 0);
    for (const size_t piece : {size_t{3}, all.size()}) {
      EXPECT_EQ(PassedIn(all, piece), passes.size()) << each.frames.size() << " " << piece;
    }
  }
}

TEST(StrangerBudgetTest, WhatIsNoHttp2IsBrokenAtTheFirstWrongByte) {
  for (const std::string bytes : {"GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01", "PRI * HTTP/2.1"}) {
    StrangerBudget budget;
    EXPECT_EQ(budget.Pass(bytes), 0u);
    EXPECT_TRUE(budget.broken());
  }
  StrangerBudget budget;
  EXPECT_EQ(budget.Pass("PRI"), 3u);
  EXPECT_FALSE(budget.broken());
  EXPECT_EQ(budget.Pass("!"), 0u);
  EXPECT_TRUE(budget.broken());
}

// Does what the table says. Returns those that are put out.
std::vector<uint64_t> Turn(StrangerTable* table, std::set<uint64_t>* served, Tick now) {
  std::vector<uint64_t> out;
  while (true) {
    const StrangerTable::Step step = table->Next(now);
    if (step.serve) served->insert(*step.serve);
    if (!step.serve && !step.put_out) return out;
    if (!step.put_out) continue;
    out.push_back(*step.put_out);
    served->erase(*step.put_out);
    table->Remove(*step.put_out);
  }
}

TEST(StrangerTableTest, OnlyThoseThatSpeakAreServed) {
  StrangerTable table(2, 10);
  std::set<uint64_t> served;
  for (uint64_t id = 1; id <= 5; ++id) table.Add(id, "a");
  Turn(&table, &served, Tick{});
  EXPECT_THAT(served, testing::ElementsAre());
  table.Ready(4);
  Turn(&table, &served, Tick{});
  EXPECT_THAT(served, testing::ElementsAre(4));
  EXPECT_EQ(table.waiting(), 4u);
}

TEST(StrangerTableTest, AFloodFromSomeAddressesLeavesRoomForAnother) {
  StrangerTable table(10, 1000);
  std::set<uint64_t> served;
  uint64_t id = 0;
  for (int i = 0; i < 500; ++i) {
    for (const char* from : {"a", "b", "c"}) {
      table.Add(++id, from);
      table.Ready(id);
    }
    Turn(&table, &served, Tick{});
    EXPECT_LE(table.served(), 10u);
  }
  const uint64_t honest = ++id;
  table.Add(honest, "honest");
  table.Ready(honest);
  EXPECT_EQ(Turn(&table, &served, Tick{1}).size(), 1u);
  EXPECT_TRUE(served.contains(honest));
  // And it stays, whatever the others do.
  for (int i = 0; i < 500; ++i) {
    table.Add(++id, "a");
    table.Ready(id);
    Turn(&table, &served, Tick{Seconds(5) * i});
    EXPECT_TRUE(served.contains(honest));
  }
}

TEST(StrangerTableTest, WithinOneAddressTheOldestLeavesAfterItsTime) {
  StrangerTable table(2, 10);
  std::set<uint64_t> served;
  for (uint64_t id = 1; id <= 3; ++id) {
    table.Add(id, "a");
    table.Ready(id);
  }
  EXPECT_THAT(Turn(&table, &served, Tick{}), testing::ElementsAre());
  EXPECT_EQ(table.due(), Tick{StrangerTable::kLeastUs});
  EXPECT_THAT(Turn(&table, &served, table.due()), testing::ElementsAre(1));
  EXPECT_THAT(served, testing::ElementsAre(2, 3));
  EXPECT_EQ(table.due(), kNever);
}

TEST(StrangerTableTest, WhoIsOnItsWayOutCountsUntilItIsGone) {
  StrangerTable table(1, 10);
  for (uint64_t id = 1; id <= 2; ++id) {
    table.Add(id, "a");
    table.Ready(id);
  }
  EXPECT_EQ(table.Next(Tick{}).serve, 1u);
  EXPECT_EQ(table.Next(Tick{Seconds(1)}).put_out, 1u);
  EXPECT_FALSE(table.Next(Tick{Seconds(9)}).serve) << "gRPC has not closed its end";
  EXPECT_EQ(table.served(), 1u);
  table.Remove(1);
  EXPECT_EQ(table.Next(Tick{Seconds(9)}).serve, 2u);
}

TEST(StrangerTableTest, TheOldestOfTheAddressWithTheMostMakesRoomForAnotherThatWaits) {
  StrangerTable table(1, 3);
  EXPECT_EQ(table.Add(1, "honest"), std::nullopt);
  EXPECT_EQ(table.Add(2, "a"), std::nullopt);
  EXPECT_EQ(table.Add(3, "a"), std::nullopt);
  EXPECT_EQ(table.Add(4, "a"), 2u);
  EXPECT_EQ(table.Add(5, "b"), 3u);
  EXPECT_EQ(table.waiting(), 3u);
}

}  // namespace
}  // namespace longhaul::coordinator
