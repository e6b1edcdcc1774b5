// Keys of peers and sealed texts.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/crypto/identity.h"
#include "base/crypto/sealing.h"
#include "base/crypto/secrets.h"

namespace longhaul {
namespace {

TEST(IdentityTest, NewKeysDifferAndNameTheirPeer) {
  const Identity a = Identity::New();
  const Identity b = Identity::New();
  EXPECT_EQ(a.public_key().size(), kPublicKeyBytes);
  EXPECT_NE(a.public_key(), b.public_key());
  EXPECT_NE(a.peer(), b.peer());
  EXPECT_EQ(a.peer(), PeerIdOf(a.public_key()));
  EXPECT_EQ(Identity::ForTest(7).public_key(), Identity::ForTest(7).public_key());
}

TEST(IdentityTest, OnlyTheOwnerOfTheKeySigns) {
  const Identity a = Identity::New();
  const Identity b = Identity::New();
  const std::string nonce = RandomBytes(kPossessionNonceBytes);
  const std::string text = PossessionText(nonce, a.public_key());
  const std::string signature = a.Sign(text);
  EXPECT_EQ(signature.size(), kSignatureBytes);
  EXPECT_TRUE(IsSignedBy(a.public_key(), text, signature));
  EXPECT_FALSE(IsSignedBy(b.public_key(), text, signature));
  EXPECT_FALSE(IsSignedBy(a.public_key(), text, b.Sign(text)));
  // The Hello of another stream has another nonce.
  EXPECT_FALSE(IsSignedBy(a.public_key(),
                          PossessionText(RandomBytes(kPossessionNonceBytes), a.public_key()),
                          signature));
  for (size_t i = 0; i < signature.size(); ++i) {
    std::string wrong = signature;
    wrong[i] = static_cast<char>(wrong[i] ^ 1);
    EXPECT_FALSE(IsSignedBy(a.public_key(), text, wrong)) << i;
  }
  EXPECT_FALSE(IsSignedBy(a.public_key(), text, ""));
  EXPECT_FALSE(IsSignedBy(a.public_key(), text, signature + "x"));
  EXPECT_FALSE(IsSignedBy("", text, signature));
  EXPECT_FALSE(IsSignedBy(std::string(kPublicKeyBytes, '\xff'), text, signature));
}

KeySecret Secret(uint8_t first) {
  KeySecret secret;
  for (size_t i = 0; i < KeySecret::kBytes; ++i) secret.data()[i] = static_cast<uint8_t>(first + i);
  return secret;
}

class SealingTest : public testing::TestWithParam<Aead> {
 protected:
  // Returns `text` sealed, with its tag.
  std::string Seal(const std::string& text) {
    std::string out(text.size() + kTagBytes, '\0');
    sealer_.Seal(reinterpret_cast<const uint8_t*>(text.data()), text.size(),
                 reinterpret_cast<uint8_t*>(out.data()));
    return out;
  }
  bool Open(std::string* sealed) {
    auto* const data = reinterpret_cast<uint8_t*>(sealed->data());
    const size_t bytes = sealed->size() - kTagBytes;
    if (!opener_.OpenWhole(data, bytes, data + bytes)) return false;
    sealed->resize(bytes);
    return true;
  }
  Sealer sealer_{GetParam(), Secret(1)};
  Opener opener_{GetParam(), Secret(1)};
};

INSTANTIATE_TEST_SUITE_P(All, SealingTest,
                         testing::Values(Aead::kAes128Gcm, Aead::kChaCha20Poly1305),
                         [](const auto& info) {
                           return info.param == Aead::kAes128Gcm ? "Aes128Gcm" : "ChaCha20";
                         });

TEST_P(SealingTest, WhatWasSealedOpensInOrder) {
  for (const size_t bytes : {0, 1, 15, 16, 17, 64, 4096, 100000}) {
    const std::string text(bytes, 'x');
    std::string sealed = Seal(text);
    if (bytes > 8) {
      EXPECT_EQ(sealed.find("xxxxxxxx"), std::string::npos);
    }
    ASSERT_TRUE(Open(&sealed)) << bytes;
    EXPECT_EQ(sealed, text);
  }
}

TEST_P(SealingTest, EqualTextsAreSealedDifferently) {
  EXPECT_NE(Seal("the same text"), Seal("the same text"));
}

TEST_P(SealingTest, AChangedBitDoesNotOpen) {
  const std::string sealed = Seal("some text of a tensor");
  for (size_t i = 0; i < 8 * sealed.size(); ++i) {
    std::string changed = sealed;
    changed[i / 8] = static_cast<char>(changed[i / 8] ^ (1 << (i % 8)));
    Opener opener(GetParam(), Secret(1));
    auto* const data = reinterpret_cast<uint8_t*>(changed.data());
    const size_t bytes = changed.size() - kTagBytes;
    EXPECT_FALSE(opener.OpenWhole(data, bytes, data + bytes)) << i;
  }
}

TEST_P(SealingTest, TextsOpenOnceAndInTheirOrderOnly) {
  const std::string first = Seal("first");
  const std::string second = Seal("second");
  std::string early = second;
  EXPECT_FALSE(Open(&early));  // the first one is missing
  Opener opener(GetParam(), Secret(1));
  for (int i = 0; i < 2; ++i) {  // the same text twice
    std::string text = first;
    auto* const data = reinterpret_cast<uint8_t*>(text.data());
    EXPECT_EQ(opener.OpenWhole(data, 5, data + 5), i == 0);
  }
}

TEST_P(SealingTest, AnotherKeyDoesNotOpen) {
  std::string sealed = Seal("text");
  Opener opener(GetParam(), Secret(2));
  auto* const data = reinterpret_cast<uint8_t*>(sealed.data());
  EXPECT_FALSE(opener.OpenWhole(data, 4, data + 4));
}

TEST_P(SealingTest, PiecesOpenAsTheWholeDoes) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += static_cast<char>(i * 7);
  for (const size_t step : {1, 3, 16, 100, 999}) {
    std::string sealed = Seal(text);
    auto* const data = reinterpret_cast<uint8_t*>(sealed.data());
    opener_.Begin();
    for (size_t at = 0; at < text.size(); at += step) {
      opener_.Open(data + at, std::min(step, text.size() - at));
    }
    EXPECT_TRUE(opener_.Finish(data + text.size()));
    EXPECT_EQ(sealed.substr(0, text.size()), text);
  }
}

// RFC 5869 gives no vector for keys of 32 bytes without "extract", so this one was computed with
// HMAC-SHA-256(key, "label" | 01).
TEST(KeySecretTest, DerivesWithHkdf) {
  const KeySecret derived = Secret(0).Derive("label");
  std::string hex;
  for (size_t i = 0; i < KeySecret::kBytes; ++i) {
    static const char kDigits[] = "0123456789abcdef";
    hex += kDigits[derived.data()[i] >> 4];
    hex += kDigits[derived.data()[i] & 15];
  }
  EXPECT_EQ(hex, "cdcd2a48bdc064a1ca60351a64356e121974d0967975f543a00f677757bdae8a");
}

}  // namespace
}  // namespace longhaul
