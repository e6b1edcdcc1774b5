#include "coordinator/core/token.h"

#include <set>

#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

TEST(Token, IsTheSameForTheSameEpoch) {
  const std::string secret(kSecretBytes, 's');
  EXPECT_EQ(EpochToken(secret, 1, Epoch(7)), EpochToken(secret, 1, Epoch(7)));
  EXPECT_EQ(EpochToken(secret, 1, Epoch(7)).size(), kSecretBytes);
}

TEST(Token, DiffersByGroupEpochAndSecret) {
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
