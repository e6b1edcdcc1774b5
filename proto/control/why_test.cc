#include "proto/control/why.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/control/convert.h"
#include "proto/control/messages.h"
#include "proto/wire/limits.h"

namespace longhaul::control {
namespace {

TEST(WhyTest, MessagesCrossTheWire) {
  const auto ask = ParseAskWhy(Serialize(AskWhy{7, {"demo", 3}}));
  ASSERT_TRUE(ask.ok()) << ask.status();
  EXPECT_EQ(ask->request, 7u);
  EXPECT_EQ(ask->group, (GroupKey{"demo", 3}));
  const auto tell = ParseTellWhy(Serialize(TellWhy{7, "m2 is missing"}));
  ASSERT_TRUE(tell.ok()) << tell.status();
  EXPECT_EQ(tell->request, 7u);
  EXPECT_EQ(tell->text, "m2 is missing");
}

TEST(WhyTest, TheFirstBytesTellTheMessagesOfTheProtocolApart) {
  EXPECT_TRUE(IsWhyMessage(Serialize(AskWhy{1, {"demo", 0}})));
  EXPECT_TRUE(IsWhyMessage(Serialize(TellWhy{1, ""})));
  EXPECT_FALSE(IsWhyMessage(""));
  EXPECT_FALSE(IsWhyMessage(Serialize(PeerMessage(Hello{}))));
  EXPECT_FALSE(IsWhyMessage(Serialize(PeerMessage(Heartbeat{}))));
  EXPECT_FALSE(IsWhyMessage(Serialize(CoordinatorMessage(Welcome{}))));
}

TEST(WhyTest, RefusesWhatIsNoMessageAndCutsLongTexts) {
  EXPECT_FALSE(ParseAskWhy("\x8a\x04\x7f").ok());
  EXPECT_FALSE(ParseAskWhy(Serialize(AskWhy{0, {"demo", 0}})).ok());
  EXPECT_FALSE(ParseAskWhy(Serialize(AskWhy{1, {"", 0}})).ok());
  EXPECT_FALSE(ParseAskWhy(Serialize(AskWhy{1, {std::string(65, 'x'), 0}})).ok());
  EXPECT_FALSE(ParseAskWhy(Serialize(AskWhy{1, {"a b", 0}})).ok());
  EXPECT_FALSE(ParseTellWhy("garbage").ok());
  const auto tell = ParseTellWhy(Serialize(TellWhy{1, std::string(10000, 'x')}));
  ASSERT_TRUE(tell.ok());
  EXPECT_EQ(tell->text.size(), size_t{LH_ERROR_TEXT_BYTES_MAX});
}

}  // namespace
}  // namespace longhaul::control
