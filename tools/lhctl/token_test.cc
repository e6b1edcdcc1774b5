#include "tools/lhctl/token.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

TEST(Ttl, HasAUnit) {
  EXPECT_EQ(ParseTtl("90s"), 90u);
  EXPECT_EQ(ParseTtl("30m"), 1800u);
  EXPECT_EQ(ParseTtl("72h"), 259200u);
  EXPECT_EQ(ParseTtl("30d"), 2592000u);
  EXPECT_EQ(ParseTtl("366000d"), uint64_t{366000} * 86400);
  for (const char* text : {"", "s", "0s", "7", "7 h", "-7h", "1.5h", "7w", "h7", "366001d",
                           "99999999999999999999999999s"}) {
    EXPECT_FALSE(ParseTtl(text)) << text;
  }
}

TEST(Tokens, AreATableWithoutControlCharacters) {
  v1::ListTokensResponse response;
  EXPECT_EQ(RenderTokens(response), "no tokens\n");
  v1::Token* token = response.add_tokens();
  token->set_id("0123456789ab");
  token->set_run("demo");
  token->set_role("trainer");
  token->set_state("valid");
  token->set_created_s(1700000000);
  token->set_expires_s(1700259200);
  token->set_members(8);
  token->set_label("site\x1b[2J b");
  EXPECT_EQ(RenderTokens(response),
            "ID            RUN   ROLE     STATE  CREATED           EXPIRES           GROUPS  "
            "MEMBERS  RUNS  LABEL\n"
            "0123456789ab  demo  trainer  valid  2023-11-14 22:13  2023-11-17 22:13  -       "
            "8        -     site?[2J b\n");
  EXPECT_EQ(
      DescribeToken(*token),
      "token 0123456789ab for run demo, role trainer, until 2023-11-17 22:13 UTC; it is shown "
      "only this once\n");
  token->set_run("*");
  EXPECT_THAT(DescribeToken(*token), ::testing::HasSubstr(" for all runs, "));
}

}  // namespace
}  // namespace longhaul
