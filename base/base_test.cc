#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/bytes.h"
#include "base/check.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "base/mailbox.h"
#include "base/mutex.h"
#include "base/prng.h"
#include "base/rarely.h"
#include "base/status_macros.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

TEST(Hash128Test, ItsTextComesBack) {
  const Hash128 hash{0x0123456789abcdef, 0xfedcba9876543210};
  EXPECT_EQ(ToString(hash), "0123456789abcdeffedcba9876543210");
  Hash128 read;
  EXPECT_TRUE(ParseHash128(ToString(hash), &read));
  EXPECT_EQ(read, hash);
  const std::string zeros(31, '0');
  for (const std::string& bad : {std::string(), zeros, zeros + "g", zeros + "A", zeros + "00"}) {
    EXPECT_FALSE(ParseHash128(bad, &read)) << bad;
  }
  EXPECT_EQ(read, hash);
}

TEST(RarelyTest, LetsOneReportThroughInEachInterval) {
  Rarely<int> rarely(/*interval_us=*/10, /*keys_max=*/2);
  EXPECT_EQ(rarely.Take(1, Tick{0}), 0);
  EXPECT_EQ(rarely.Take(2, Tick{1}), 0);
  EXPECT_EQ(rarely.Take(1, Tick{8}), std::nullopt);
  EXPECT_EQ(rarely.Take(1, Tick{9}), std::nullopt);
  EXPECT_EQ(rarely.Take(1, Tick{10}), 2);
  EXPECT_EQ(rarely.Take(1, Tick{20}), 0);
}

TEST(RarelyTest, HoldsReportsBackIfItKnowsTooManyThings) {
  Rarely<int> rarely(/*interval_us=*/10, /*keys_max=*/2);
  EXPECT_EQ(rarely.Take(1, Tick{0}), 0);
  EXPECT_EQ(rarely.Take(2, Tick{5}), 0);
  EXPECT_EQ(rarely.Take(3, Tick{9}), std::nullopt);
  // The interval of 1 is over.
  EXPECT_EQ(rarely.Take(3, Tick{10}), 1) << "what was held back is told";
  EXPECT_EQ(rarely.Take(1, Tick{11}), std::nullopt);
  EXPECT_EQ(rarely.Take(2, Tick{12}), std::nullopt);
  EXPECT_EQ(rarely.Take(2, Tick{15}), 2) << "also of things that were forgotten";
}

TEST(CheckDeathTest, SaysWhereWhatAndWhy) {
  EXPECT_DEATH(LH_CHECK(1 + 1 == 3) << "sum of " << 2,
               "base_test.cc:[0-9]+: check failed: .*sum of 2");
  EXPECT_DEATH(LH_CHECK_OK(absl::NotFoundError("gone")), "gone");
}

TEST(CheckDeathTest, CallsTheHookOnceBeforeItAborts) {
  EXPECT_DEATH(
      {
        SetCheckHook([] { LH_CHECK(false) << "within the hook"; });
        LH_CHECK(false) << "first";
      },
      "first\n.*within the hook");
}

TEST(CheckTest, EvaluatesTextOnlyOnFailure) {
  int evaluated = 0;
  LH_CHECK(true) << ++evaluated;
  EXPECT_EQ(evaluated, 0);
}

absl::StatusOr<std::unique_ptr<int>> Half(int n) {
  if (n % 2 != 0) return absl::InvalidArgumentError("odd");
  return std::make_unique<int>(n / 2);
}
absl::StatusOr<int> Quarter(int n) {
  LH_ASSIGN_OR_RETURN(const std::unique_ptr<int> half, Half(n));
  int quarter = 0;
  LH_ASSIGN_OR_RETURN(const auto result, Half(*half));
  quarter = *result;
  LH_RETURN_IF_ERROR(quarter > 100 ? absl::OutOfRangeError("large") : absl::OkStatus());
  return quarter;
}

TEST(StatusMacrosTest, ReturnTheFirstErrorOrGoOn) {
  EXPECT_EQ(*Quarter(8), 2);
  EXPECT_EQ(Quarter(7).status().message(), "odd");
  EXPECT_EQ(Quarter(6).status().message(), "odd");
  EXPECT_EQ(Quarter(4000).status().message(), "large");
}

TEST(PrngTest, SequenceNeverChanges) {
  Prng prng(1);
  EXPECT_EQ(prng.Next(), 0xb3f2af6d0fc710c5u);
  EXPECT_EQ(prng.Next(), 0x853b559647364ceau);
  uint64_t state = 0;
  EXPECT_EQ(SplitMix64(&state), 0xe220a8397b1dcdafu);
}

TEST(PrngTest, BelowCoversItsRangeEvenly) {
  Prng prng(7);
  std::array<int, 5> seen{};
  for (int i = 0; i < 5000; ++i) ++seen[prng.Below(5)];
  for (const int n : seen) EXPECT_NEAR(n, 1000, 150);
  EXPECT_EQ(prng.Below(1), 0u);
  for (int i = 0; i < 100; ++i) {
    const int64_t n = prng.Between(-2, 2);
    EXPECT_TRUE(n >= -2 && n <= 2) << n;
  }
  prng.Between(INT64_MIN, INT64_MAX);
}

TEST(PrngTest, ChanceIsExactAtItsEnds) {
  Prng prng(3);
  int half = 0;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_FALSE(prng.Chance(0));
    EXPECT_TRUE(prng.Chance(1));
    half += prng.Chance(0.5);
  }
  EXPECT_NEAR(half, 500, 80);
}

TEST(BytesTest, WriterAndReaderAgreeOnLittleEndian) {
  std::array<uint8_t, 20> bytes{};
  ByteWriter writer(bytes);
  writer.U8(1);
  writer.U16(0x0203);
  writer.U32(0x04050607);
  writer.U64(0x08090a0b0c0d0e0f);
  writer.Zeros(2);
  const std::array<uint8_t, 3> tail = {7, 8, 9};
  writer.Bytes(tail);
  EXPECT_EQ(writer.remaining(), 0u);
  EXPECT_EQ(bytes[1], 3);
  EXPECT_EQ(bytes[14], 8);

  ByteReader reader(bytes);
  EXPECT_EQ(reader.U8(), 1);
  EXPECT_EQ(reader.U16(), 0x0203);
  EXPECT_EQ(reader.U32(), 0x04050607u);
  EXPECT_EQ(reader.U64(), 0x08090a0b0c0d0e0fu);
  EXPECT_TRUE(reader.Zeros(2));
  EXPECT_EQ(reader.Bytes(3)[2], 9);
  EXPECT_TRUE(reader.ok());
  EXPECT_EQ(reader.remaining(), 0u);
}

TEST(BytesTest, ReadingBeyondTheEndGivesZerosAndSticks) {
  const std::array<uint8_t, 3> bytes = {1, 2, 3};
  ByteReader reader(bytes);
  EXPECT_EQ(reader.U32(), 0u);
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.U8(), 0);
  EXPECT_TRUE(reader.Bytes(1).empty());
  EXPECT_FALSE(reader.Zeros(1));
}

TEST(BytesDeathTest, WritingBeyondTheEndIsABug) {
  std::array<uint8_t, 3> bytes{};
  ByteWriter writer(bytes);
  EXPECT_DEATH(writer.U32(1), "check failed");
}

TEST(MailboxTest, WakesOnceForAnyNumberOfPosts) {
  int wakes = 0;
  Mailbox<int> box(10, [&] { ++wakes; });
  EXPECT_TRUE(box.Post(1));
  EXPECT_TRUE(box.Post(2));
  EXPECT_EQ(wakes, 1);
  EXPECT_EQ(box.TakeAll(), (std::vector<int>{1, 2}));
  EXPECT_TRUE(box.TakeAll().empty());
  EXPECT_TRUE(box.Post(3));
  EXPECT_EQ(wakes, 2);
}

TEST(MailboxTest, RefusesWhenFullOrClosed) {
  Mailbox<std::unique_ptr<int>> box(2, [] {});
  EXPECT_TRUE(box.Post(std::make_unique<int>(1)));
  EXPECT_TRUE(box.Post(nullptr));
  EXPECT_FALSE(box.Post(nullptr));
  EXPECT_EQ(box.size(), 2u);
  box.Close();
  EXPECT_EQ(box.TakeAll().size(), 2u);
  EXPECT_FALSE(box.Post(nullptr));
}

TEST(MailboxTest, KeepsEachPostersOrder) {
  constexpr int kPosters = 4;
  constexpr int kPosts = 1000;
  Mutex mutex;
  CondVar arrived;
  Mailbox<std::pair<int, int>> box(kPosters * kPosts, [&] {
    MutexLock lock(&mutex);
    arrived.Signal();
  });
  std::vector<std::thread> posters;
  for (int p = 0; p < kPosters; ++p) {
    posters.emplace_back([&box, p] {
      for (int i = 0; i < kPosts; ++i) EXPECT_TRUE(box.Post({p, i}));
    });
  }
  std::array<int, kPosters> next{};
  for (int taken = 0; taken < kPosters * kPosts;) {
    {
      MutexLock lock(&mutex);
      while (box.size() == 0) arrived.Wait(&mutex);
    }
    for (const auto& [poster, number] : box.TakeAll()) {
      EXPECT_EQ(number, next[poster]++);
      ++taken;
    }
  }
  for (std::thread& poster : posters) poster.join();
}

TEST(IdsTest, PrintWithTheirLetter) {
  EXPECT_EQ(ToString(PeerId(0x1f)), "p1f");
  EXPECT_EQ(ToString(MemberId(7)), "m7");
  EXPECT_EQ(ToString(GroupKey{"demo", 2}), "demo/2");
  EXPECT_FALSE(Epoch());
}

}  // namespace
}  // namespace longhaul
