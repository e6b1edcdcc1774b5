#include "tools/lhctl/bench.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Bench, SizesHaveUnits) {
  EXPECT_THAT(*ParseSizes("256,4K,64m,1G"),
              ElementsAre(256, 4096, uint64_t{64} << 20, uint64_t{1} << 30));
  for (const char* bad :
       {"", "x", "4K,", "-4", "4.5K", "K", "1T", "99999999999999999999", "2000000G"}) {
    EXPECT_THAT(std::string(ParseSizes(bad).status().message()), HasSubstr("is not a size")) << bad;
  }
  for (const char* bad : {"0", "6", "4,2"}) {
    EXPECT_THAT(std::string(ParseSizes(bad).status().message()), HasSubstr("a multiple of 4"))
        << bad;
  }
}

TEST(Bench, AlgorithmsThatCanBeChosen) {
  EXPECT_EQ(*ParseAlgorithm("mesh"), LH_MESH);
  EXPECT_THAT(std::string(ParseAlgorithm("local").status().message()),
              HasSubstr("'local' is no algorithm; give auto, oneshot, mesh or ring"));
}

TEST(Bench, QuantilesAreThoseOfThePythonModule) {
  EXPECT_EQ(Median({3, 1, 2}), 2);
  EXPECT_EQ(Median({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(Quantile({5, 4, 3, 2, 1}, 0.1), 1);
  EXPECT_EQ(Quantile({5, 4, 3, 2, 1}, 0.9), 5);
  EXPECT_EQ(Quantile({7}, 0), 7);
}

TEST(Bench, BandwidthsAreThoseOfNcclTests) {
  const BenchRow row{4, 64 << 20, LH_RING, 10, 0.5, 0.4, 0.6};
  EXPECT_DOUBLE_EQ(row.algbw(), 134217728);
  EXPECT_DOUBLE_EQ(row.busbw(), 201326592);
  EXPECT_EQ(BenchHead(4) + BenchLine(row),
            "4 members, float32 sums in place, times of whole calls at the slowest member\n"
            "   tensor  way        ops  median ms       p10       p90  algbw GB/s  busbw GB/s\n"
            "   64 MiB  ring        10    500.000   400.000   600.000       0.134       0.201\n");
  EXPECT_THAT(BenchJson({row, row}), HasSubstr("\"bytes\": 67108864, \"memory\": \"arena\", "
                                               "\"algorithm\": \"ring\", \"ops\": 10"));
}

}  // namespace
}  // namespace longhaul
