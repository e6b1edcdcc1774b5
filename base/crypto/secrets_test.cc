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

TEST(Secrets, AuthenticationCodesAreThePublishedOnes) {
  // RFC 4231, test cases 1 and 2, and a key that is longer than a block (test case 6).
  EXPECT_EQ(Hex(HmacSha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(Hex(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(Hex(HmacSha256(std::string(131, '\xaa'),
                           "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
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
