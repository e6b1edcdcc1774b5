#include "base/crypto/secrets.h"

#include <set>

#include "gtest/gtest.h"

namespace longhaul {
namespace {

std::string Hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(c) >> 4];
    text += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

TEST(Secrets, HashesAreThePublishedOnes) {
  // FIPS 180-4, and the hash of nothing.
  EXPECT_EQ(Hex(Sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Hex(Sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(Secrets, RandomBytesDiffer) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) seen.insert(RandomBytes(16));
  EXPECT_EQ(seen.size(), 100u);
  EXPECT_EQ(seen.begin()->size(), 16u);
}

TEST(Secrets, OnlyEqualBytesAreTheSame) {
  EXPECT_TRUE(SameBytes(std::string("a\0b", 3), std::string("a\0b", 3)));
  EXPECT_FALSE(SameBytes(std::string("a\0b", 3), std::string("a\0c", 3)));
  EXPECT_FALSE(SameBytes("a", "ab"));
  EXPECT_TRUE(SameBytes("", ""));
}

}  // namespace
}  // namespace longhaul
