#include "coordinator/core/token.h"

#include <set>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

std::string Hex(const std::array<uint8_t, 16>& bytes) {
  static const char kDigits[] = "0123456789abcdef";
  std::string text;
  for (uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

// Vectors of the reference implementation: key 00 01 .. 0f, data 00 01 .. of growing length.
TEST(SipHash128, MatchesThePublishedVectors) {
  std::array<uint8_t, 16> key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(i);
  std::string data;
  EXPECT_EQ(Hex(SipHash128(key, data)), "a3817f04ba25a8e66df67214c7550293");
  data = std::string("\0", 1);
  EXPECT_EQ(Hex(SipHash128(key, data)), "da87c1d86b99af44347659119b22fc45");
  data = std::string("\0\1", 2);
  EXPECT_EQ(Hex(SipHash128(key, data)), "8177228da4a45dc7fca38bdef60affe4");
  data = std::string("\0\1\2\3\4\5\6\7\x8", 9);
  EXPECT_EQ(Hex(SipHash128(key, data)), "264499060ad9baabc47f8b02bb6d71ed");
}

TEST(Token, IsTheSameForTheSameEpoch) {
  const std::string secret(kSecretBytes, 's');
  EXPECT_EQ(EpochToken(secret, 1, Epoch(7)), EpochToken(secret, 1, Epoch(7)));
  EXPECT_EQ(EpochToken(secret, 1, Epoch(7)).size(), kSecretBytes);
}

TEST(Token, DiffersByRunGroupEpochAndEachHalfOfTheSecret) {
  std::set<std::string> tokens;
  std::string secret(kSecretBytes, 's');
  tokens.insert(EpochToken(secret, 1, Epoch(7)));
  tokens.insert(EpochToken(secret, 1, Epoch(8)));
  tokens.insert(EpochToken(secret, 2, Epoch(7)));
  secret.front() = 't';
  tokens.insert(EpochToken(secret, 1, Epoch(7)));
  secret.back() = 't';
  tokens.insert(EpochToken(secret, 1, Epoch(7)));
  EXPECT_EQ(tokens.size(), 5u);
}

TEST(Token, SecretsOfRunsDifferByNameNumberAndEntropy) {
  const std::string entropy(kSecretBytes, 'e');
  const std::set<std::string> secrets = {RunSecret(entropy, 1, "a"), RunSecret(entropy, 1, "b"),
                                         RunSecret(entropy, 2, "a"),
                                         RunSecret(std::string(kSecretBytes, 'f'), 1, "a")};
  EXPECT_EQ(secrets.size(), 4u);
}

TEST(TokenDeathTest, ShortEntropyIsABug) { EXPECT_DEATH(RunSecret("short", 1, "a"), "5 bytes"); }

}  // namespace
}  // namespace longhaul::coordinator
