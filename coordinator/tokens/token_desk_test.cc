#include "coordinator/tokens/token_desk.h"

#include <deque>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kNow = 1000000000;
constexpr uint64_t kHour = 3600;

// A desk whose store and clock the test controls.
class TokenDeskTest : public ::testing::Test {
 protected:
  TokenDesk Desk(std::vector<TokenRecord> records = {}) {
    TokenDesk::Options options;
    options.keep = [this](TokenChange change, TokenDesk::Done done) {
      changes_.push_back(std::move(change));
      dones_.push_back(std::move(done));
      if (at_once_) Kept(absl::OkStatus());
    };
    options.now_s = [this] { return now_; };
    return TokenDesk(std::move(records), std::move(options));
  }
  // The store answers the oldest change that waits.
  void Kept(const absl::Status& status) {
    const TokenDesk::Done done = std::move(dones_.front());
    dones_.pop_front();
    done(status);
  }
  absl::StatusOr<NewToken> Create(TokenDesk* desk, const TokenOrder& order) {
    std::optional<absl::StatusOr<NewToken>> made;
    desk->Create(order, [&](absl::StatusOr<NewToken> token) { made = std::move(token); });
    EXPECT_TRUE(made.has_value());
    return *made;
  }
  absl::Status Revoke(TokenDesk* desk, const std::string& id) {
    std::optional<absl::Status> revoked;
    desk->Revoke(id, [&](const absl::Status& status) { revoked = status; });
    return revoked.value_or(absl::InternalError("no answer"));
  }
  static TokenOrder Order(const std::string& run = "a") {
    TokenOrder order;
    order.run = run;
    order.ttl_s = kHour;
    return order;
  }
  // Why the desk refuses the text; 0: it does not.
  static Refusal Why(const TokenDesk& desk, const std::string& text) {
    const auto checked = desk.Check(text);
    const auto* denial = std::get_if<Denial>(&checked);
    return denial == nullptr ? Refusal{} : denial->refusal;
  }

  uint64_t now_ = kNow;
  bool at_once_ = true;
  std::vector<TokenChange> changes_;
  std::deque<TokenDesk::Done> dones_;
};

TEST_F(TokenDeskTest, ANewTokenIsAcceptedAndNamesWhatItsHolderMayDo) {
  TokenDesk desk = Desk();
  TokenOrder order = Order(kAllRuns);
  order.label = "site b";
  order.quota = {1, 2, 3};
  const auto made = Create(&desk, order);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_THAT(made->token, ::testing::MatchesRegex("lht_[0-9a-f]{12}_[A-Za-z0-9_-]{43}"));
  const auto checked = desk.Check(made->token);
  ASSERT_TRUE(std::holds_alternative<TokenRecord>(checked));
  const TokenRecord& record = std::get<TokenRecord>(checked);
  EXPECT_EQ(record, made->record);
  EXPECT_EQ(record.run, "*");
  EXPECT_EQ(record.label, "site b");
  EXPECT_EQ(record.quota, (Quota{1, 2, 3}));
  EXPECT_EQ(record.created_s, kNow);
  EXPECT_EQ(record.expires_s, kNow + kHour);
}

TEST_F(TokenDeskTest, TheStoreGetsNoSecret) {
  TokenDesk desk = Desk();
  const auto made = Create(&desk, Order());
  ASSERT_EQ(changes_.size(), 1u);
  const std::optional<TokenParts> parts = ParseToken(made->token);
  ASSERT_TRUE(parts);
  const TokenRecord& kept = *changes_[0].put;
  EXPECT_EQ(kept.id, parts->id);
  EXPECT_NE(kept.hash, parts->secret);
  for (const std::string* field : {&kept.hash, &kept.label, &kept.run, &kept.id}) {
    EXPECT_THAT(*field, Not(HasSubstr(made->token.substr(20))));
  }
}

TEST_F(TokenDeskTest, TwoTokensHaveNothingInCommon) {
  TokenDesk desk = Desk();
  std::set<std::string> ids, secrets, hashes;
  for (int i = 0; i < 50; ++i) {
    const auto made = Create(&desk, Order());
    const std::optional<TokenParts> parts = ParseToken(made->token);
    ASSERT_TRUE(parts) << i;  // whatever characters the secret has
    ids.insert(parts->id);
    secrets.insert(parts->secret);
    hashes.insert(made->record.hash);
  }
  EXPECT_EQ(ids.size(), 50u);
  EXPECT_EQ(secrets.size(), 50u);
  EXPECT_EQ(hashes.size(), 50u);
}

TEST_F(TokenDeskTest, ANewTokenCountsOnceItIsDurable) {
  TokenDesk desk = Desk();
  at_once_ = false;
  std::optional<absl::StatusOr<NewToken>> made;
  desk.Create(Order(), [&](absl::StatusOr<NewToken> token) { made = std::move(token); });
  EXPECT_FALSE(made);
  EXPECT_TRUE(desk.List().empty());
  Kept(absl::UnavailableError("disk"));
  ASSERT_TRUE(made);
  EXPECT_TRUE(absl::IsUnavailable(made->status()));
  EXPECT_TRUE(desk.List().empty());
}

TEST_F(TokenDeskTest, OtherTextsAreRefusedWithoutSayingWhatIsWrong) {
  TokenDesk desk = Desk();
  const auto made = Create(&desk, Order());
  const std::string& token = made->token;
  for (const std::string& text :
       {std::string(), std::string("x"), token + "x", token.substr(0, token.size() - 1),
        "lhx" + token.substr(3), "lht_" + token, std::string(token.size(), '\0'),
        std::string(5000, 'a')}) {
    EXPECT_EQ(Why(desk, text), Refusal::kMalformed) << text.substr(0, 80);
  }
  // The right id, another secret.
  std::string other = token;
  other[20] = other[20] == 'A' ? 'B' : 'A';
  EXPECT_EQ(Why(desk, other), Refusal::kUnknown);
  const std::string wrong_secret = std::get<Denial>(desk.Check(other)).text;
  // Another id.
  std::string stranger = token;
  stranger[4] = stranger[4] == '0' ? '1' : '0';
  EXPECT_EQ(Why(desk, stranger), Refusal::kUnknown);
  // The two cannot be told apart by their text, and no text repeats a secret.
  std::string unknown_id = std::get<Denial>(desk.Check(stranger)).text;
  unknown_id.replace(unknown_id.find(stranger.substr(4, 12)), 12, token.substr(4, 12));
  EXPECT_EQ(wrong_secret, unknown_id);
  EXPECT_THAT(wrong_secret, Not(HasSubstr(other.substr(17))));
}

TEST_F(TokenDeskTest, ATokenExpires) {
  TokenDesk desk = Desk();
  const auto made = Create(&desk, Order());
  now_ = kNow + kHour - 1;
  EXPECT_EQ(Why(desk, made->token), Refusal{});
  EXPECT_FALSE(desk.Lapsed(made->record.id));
  now_ = kNow + kHour;
  EXPECT_EQ(Why(desk, made->token), Refusal::kExpired);
  ASSERT_TRUE(desk.Lapsed(made->record.id));
  EXPECT_EQ(desk.Lapsed(made->record.id)->refusal, Refusal::kExpired);
  EXPECT_THAT(desk.Lapsed(made->record.id)->text, HasSubstr("expired at 2001-09-09 02:46:40 UTC"));
}

TEST_F(TokenDeskTest, ARevokedTokenIsRefusedFromThenOn) {
  TokenDesk desk = Desk();
  int told = 0;
  desk.SetOnRevoked([&] { ++told; });
  const auto made = Create(&desk, Order());
  const auto other = Create(&desk, Order());
  at_once_ = false;
  std::optional<absl::Status> revoked;
  desk.Revoke(made->record.id, [&](const absl::Status& status) { revoked = status; });
  EXPECT_FALSE(desk.Lapsed(made->record.id)) << "it is not durable yet";
  Kept(absl::OkStatus());
  ASSERT_TRUE(revoked && revoked->ok());
  EXPECT_EQ(told, 1);
  EXPECT_EQ(Why(desk, made->token), Refusal::kRevoked);
  EXPECT_EQ(desk.Lapsed(made->record.id)->refusal, Refusal::kRevoked);
  EXPECT_EQ(Why(desk, other->token), Refusal{});
  // Once more changes nothing.
  now_ += 5;
  EXPECT_TRUE(Revoke(&desk, made->record.id).ok());
  EXPECT_EQ(desk.List()[0].revoked_s + desk.List()[1].revoked_s, kNow);
  EXPECT_TRUE(absl::IsNotFound(Revoke(&desk, "000000000000")));
}

TEST_F(TokenDeskTest, ARevocationThatIsNotDurableChangesNothing) {
  TokenDesk desk = Desk();
  const auto made = Create(&desk, Order());
  at_once_ = false;
  std::optional<absl::Status> revoked;
  desk.Revoke(made->record.id, [&](const absl::Status& status) { revoked = status; });
  Kept(absl::UnavailableError("disk"));
  EXPECT_FALSE(revoked->ok());
  EXPECT_EQ(Why(desk, made->token), Refusal{});
}

TEST_F(TokenDeskTest, ADeskOfTheSameStoreKnowsTheTokens) {
  TokenDesk first = Desk();
  const auto made = Create(&first, Order());
  TokenDesk second = Desk({*changes_[0].put});
  EXPECT_EQ(Why(second, made->token), Refusal{});
  EXPECT_EQ(second.List(), first.List());
}

TEST_F(TokenDeskTest, OrdersForWhatDoesNotExistAreRefused) {
  TokenDesk desk = Desk();
  const auto refused = [&](const TokenOrder& order) {
    const auto made = Create(&desk, order);
    EXPECT_TRUE(absl::IsInvalidArgument(made.status())) << made.status();
    return std::string(made.status().message());
  };
  EXPECT_THAT(refused(Order("")), HasSubstr("* for all runs"));
  EXPECT_THAT(refused(Order("a/0")), HasSubstr("* for all runs"));
  EXPECT_THAT(refused(Order("**")), HasSubstr("* for all runs"));
  TokenOrder order = Order();
  order.ttl_s = 0;
  EXPECT_THAT(refused(order), HasSubstr("ttl"));
  order.ttl_s = kTokenTtlMaxS + 1;
  EXPECT_THAT(refused(order), HasSubstr("ttl"));
  order = Order();
  order.quota.runs = 1;
  EXPECT_THAT(refused(order), HasSubstr("for one run"));
  order = Order(kAllRuns);
  order.role = Role::kObserver;
  order.quota.members = 1;
  EXPECT_THAT(refused(order), HasSubstr("only a trainer's token"));
  order = Order();
  order.role = Role{};
  EXPECT_THAT(refused(order), HasSubstr("role"));
  EXPECT_TRUE(changes_.empty());
}

TEST_F(TokenDeskTest, DeadTokensMakeRoomAndLiveOnesDoNot) {
  std::vector<TokenRecord> records;
  for (size_t i = 0; i < kTokensMax; ++i) {
    TokenRecord record;
    record.id = absl::StrCat(absl::Hex(i, absl::kZeroPad12));
    record.run = "a";
    record.created_s = kNow + i;
    record.expires_s = kNow + kHour;
    records.push_back(record);
  }
  TokenDesk desk = Desk(records);
  EXPECT_TRUE(absl::IsResourceExhausted(Create(&desk, Order()).status()));
  EXPECT_TRUE(changes_.empty());
  ASSERT_TRUE(Revoke(&desk, records[9].id).ok());
  ASSERT_TRUE(Revoke(&desk, records[7].id).ok());
  ASSERT_TRUE(Create(&desk, Order()).ok());
  EXPECT_EQ(changes_.back().gone, std::vector<std::string>{records[7].id});
  EXPECT_EQ(desk.List().size(), kTokensMax);
  EXPECT_EQ(desk.Lapsed(records[7].id)->refusal, Refusal::kUnknown);
  // Tokens that ended long ago go with the next one that is made.
  now_ = kNow + kHour + kDeadTokenForgottenS + 1;
  ASSERT_TRUE(Create(&desk, Order()).ok());
  EXPECT_EQ(desk.List().size(), 1u);
}

}  // namespace
}  // namespace longhaul::coordinator
