#include "coordinator/grpc/authorization.h"

#include <grpcpp/grpcpp.h>

#include "base/log_lines.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace longhaul::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A desk without a store.
class AuthorizationTest : public ::testing::Test {
 protected:
  std::string Token(const std::string& run, Role role = Role::kTrainer) {
    std::string token;
    TokenOrder order;
    order.run = run;
    order.role = role;
    order.ttl_s = 60;
    desk_.Create(order, [&](const absl::StatusOr<NewToken>& made) { token = made->token; });
    return token;
  }
  static tls::Subject Certificate(const std::string& role, const std::string& run) {
    tls::Subject certificate;
    certificate.role = role;
    certificate.run = run;
    certificate.fingerprint = "0123456789abcdef0123";
    return certificate;
  }
  std::variant<Caller, Denial> Ask(Auth auth, std::optional<std::string> token,
                                   std::optional<tls::Subject> certificate = std::nullopt) {
    return Identify(auth, {std::move(token), std::move(certificate)}, desk_, "--auth");
  }
  static Caller Known(const std::variant<Caller, Denial>& asked) {
    const auto* denial = std::get_if<Denial>(&asked);
    EXPECT_EQ(denial, nullptr) << denial->text;
    return denial == nullptr ? std::get<Caller>(asked) : Caller();
  }
  static Denial Refused(const std::variant<Caller, Denial>& asked) {
    EXPECT_TRUE(std::holds_alternative<Denial>(asked));
    return std::holds_alternative<Denial>(asked) ? std::get<Denial>(asked) : Denial{};
  }

  TokenDesk desk_{{},
                  {[](TokenChange, const TokenDesk::Done& done) { done(absl::OkStatus()); }, {}}};
};

TEST_F(AuthorizationTest, ValuesOfTheFlagAreNamed) {
  EXPECT_EQ(*ParseAuth("--auth", "both"), Auth::kBoth);
  EXPECT_EQ(*ParseAuth("--auth", "auto"), Auth::kAuto);
  EXPECT_THAT(std::string(ParseAuth("--admin-auth", "all").status().message()),
              AllOf(HasSubstr("--admin-auth=all"), HasSubstr("certificate, any or both")));
}

TEST_F(AuthorizationTest, ATokenNamesItsRunAndRole) {
  for (const Auth auth : {Auth::kToken, Auth::kAny}) {
    const Caller caller = Known(Ask(auth, Token("a", Role::kObserver)));
    EXPECT_EQ(caller.role, Role::kObserver);
    EXPECT_EQ(caller.run, "a");
    EXPECT_TRUE(caller.MayUse("a"));
    EXPECT_FALSE(caller.MayUse("b"));
    EXPECT_FALSE(caller.MayUse(kAllRuns));
    EXPECT_THAT(caller.Shown(), HasSubstr("join token " + caller.token));
  }
  EXPECT_TRUE(Known(Ask(Auth::kToken, Token(kAllRuns))).MayUse("b"));
}

TEST_F(AuthorizationTest, ACertificateNamesItsRunAndRole) {
  const Caller caller = Known(Ask(Auth::kCertificate, {}, Certificate("trainer", "a")));
  EXPECT_EQ(caller.role, Role::kTrainer);
  EXPECT_EQ(caller.run, "a");
  EXPECT_EQ(caller.Shown(), "certificate 0123456789abcdef");
  EXPECT_EQ(Known(Ask(Auth::kAny, {}, Certificate("operator", "*"))).run, kAllRuns);
  EXPECT_THAT(Refused(Ask(Auth::kAny, {}, Certificate("operator", ""))).text, HasSubstr("no run"));
  for (const char* role : {"", "coordinator", "Trainer"}) {
    const Denial denial = Refused(Ask(Auth::kAny, {}, Certificate(role, "a")));
    EXPECT_EQ(denial.refusal, TokenRefusal::kCertificate);
    EXPECT_THAT(denial.text, HasSubstr("longhaul:role:trainer"));
  }
}

TEST_F(AuthorizationTest, WhatIsMissingIsNamed) {
  const auto why = [&](Auth auth, std::optional<std::string> token,
                       std::optional<tls::Subject> certificate = std::nullopt) {
    const Denial denial = Refused(Ask(auth, std::move(token), std::move(certificate)));
    EXPECT_EQ(denial.refusal, TokenRefusal::kMissing);
    EXPECT_THAT(denial.text, HasSubstr("--auth="));
    return denial.text;
  };
  const tls::Subject certificate = Certificate("trainer", "");
  EXPECT_THAT(why(Auth::kToken, {}), AllOf(HasSubstr("no join token"), HasSubstr("--token-file")));
  EXPECT_THAT(why(Auth::kToken, {}, certificate), HasSubstr("no join token"));
  EXPECT_THAT(why(Auth::kCertificate, Token("a")), HasSubstr("no certificate"));
  EXPECT_THAT(why(Auth::kBoth, Token("a")), HasSubstr("no certificate"));
  EXPECT_THAT(why(Auth::kBoth, {}, certificate), HasSubstr("no join token"));
  EXPECT_THAT(why(Auth::kAny, {}), HasSubstr("neither"));
}

TEST_F(AuthorizationTest, WhatIsShownHasToBeRight) {
  EXPECT_EQ(Refused(Ask(Auth::kToken, "guess")).refusal, TokenRefusal::kMalformed);
  // A good certificate does not help a bad token.
  EXPECT_EQ(Refused(Ask(Auth::kAny, "guess", Certificate("trainer", ""))).refusal,
            TokenRefusal::kMalformed);
  // What is not asked for does not matter.
  EXPECT_EQ(Known(Ask(Auth::kCertificate, "guess", Certificate("trainer", "a"))).run, "a");
  EXPECT_EQ(Known(Ask(Auth::kToken, Token("a"), Certificate("operator", "b"))).run, "a");
}

TEST_F(AuthorizationTest, ACallerWithBothMayDoWhatBothAllow) {
  for (const Auth auth : {Auth::kBoth, Auth::kAny}) {
    Caller caller = Known(Ask(auth, Token(kAllRuns), Certificate("trainer", "a")));
    EXPECT_EQ(caller.run, "a");
    EXPECT_NE(caller.token, "");
    EXPECT_NE(caller.certificate, "");
    EXPECT_EQ(Known(Ask(auth, Token("a"), Certificate("", ""))).run, "a");
    EXPECT_EQ(Known(Ask(auth, Token("a"), Certificate("trainer", "a"))).run, "a");
    Denial denial = Refused(Ask(auth, Token("a"), Certificate("trainer", "b")));
    EXPECT_EQ(denial.refusal, TokenRefusal::kCertificate);
    EXPECT_THAT(denial.text, AllOf(HasSubstr("run a"), HasSubstr("run b")));
    denial = Refused(Ask(auth, Token("a"), Certificate("operator", "a")));
    EXPECT_EQ(denial.refusal, TokenRefusal::kCertificate);
    EXPECT_THAT(denial.text, AllOf(HasSubstr("trainer"), HasSubstr("operator")));
  }
}

// ------------------------------------------------------------------------------ messages

Caller OfRunA() {
  Caller caller = Anybody(Role::kTrainer);
  caller.run = "a";
  caller.token = "0123456789ab";
  return caller;
}

TEST(ObjectionTo, EveryMessageThatNamesAGroupOfAnotherRun) {
  const GroupKey b{"b", 0};
  control::Hello hello;
  hello.groups.resize(2);
  hello.groups[0].group = {"a", 0};
  hello.groups[1].group = b;
  control::Heartbeat loads;
  loads.loads.emplace_back().group = b;
  control::Heartbeat fetches;
  fetches.fetches.emplace_back().group = b;
  control::Leave leave;
  leave.group = b;
  control::Vote vote;
  vote.group = b;
  control::EpochReady ready;
  ready.group = b;
  control::EpochFailed failed;
  failed.group = b;
  control::LinkLost lost;
  lost.group = b;
  control::SyncVote sync;
  sync.group = b;
  control::FetchDone done;
  done.group = b;
  control::PeerTried tried;
  tried.group = b;
  control::CancelOp cancel;
  cancel.group = b;
  const std::vector<control::PeerMessage> messages = {hello,  loads, fetches, leave, vote,  ready,
                                                      failed, lost,  sync,    done,  tried, cancel};
  for (const control::PeerMessage& message : messages) {
    const std::optional<Denial> denial = ObjectionTo(OfRunA(), message);
    ASSERT_TRUE(denial) << control::Name(message);
    EXPECT_EQ(denial->refusal, TokenRefusal::kRun);
    EXPECT_THAT(denial->text,
                AllOf(HasSubstr("b/0"), HasSubstr("run b"), HasSubstr("is for run a"),
                      HasSubstr(control::Name(message)), HasSubstr("join token 0123456789ab")));
    EXPECT_FALSE(ObjectionTo(Anybody(Role::kTrainer), message)) << control::Name(message);
  }
}

TEST(ObjectionTo, NoMessageOfTheOwnRun) {
  control::Hello hello;
  hello.groups.emplace_back().group = {"a", 7};
  control::Vote vote;
  vote.group = {"a", 7};
  for (const control::PeerMessage& message :
       std::vector<control::PeerMessage>{hello, vote, control::Hello{}, control::Heartbeat{},
                                         control::LinkReport{}, control::Draining{}}) {
    EXPECT_FALSE(ObjectionTo(OfRunA(), message)) << control::Name(message);
  }
}

TEST(ObjectionTo, JoinsAreJudgedApart) {
  control::Join join;
  join.group = {"b", 0};
  EXPECT_FALSE(ObjectionTo(OfRunA(), join));
  const std::optional<Denial> denial = ObjectionToRun(OfRunA(), join);
  ASSERT_TRUE(denial);
  EXPECT_THAT(denial->text, AllOf(HasSubstr("join of b/0"), HasSubstr("is for run a")));
  join.group = {"a", 0};
  EXPECT_FALSE(ObjectionToRun(OfRunA(), join));
}

TEST(ToGrpc, SaysWhetherAnotherTokenHelps) {
  EXPECT_EQ(ToGrpc(Denial{TokenRefusal::kExpired, "x"}).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(ToGrpc(Denial{TokenRefusal::kRun, "x"}).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(ToGrpc(Denial{TokenRefusal::kRole, "x"}).error_message(), "x");
}

TEST_F(AuthorizationTest, RefusalsAreCountedAndOneOfAKindIsLogged) {
  const LogLines log;
  CoordinatorMetrics metrics;
  Authorizer authorizer({Auth::kToken, "--auth", Role::kTrainer}, &desk_, &metrics);
  for (int i = 0; i < 3; ++i)
    authorizer.Refused({TokenRefusal::kRun, "why"}, "client", "call refused");
  authorizer.Refused({TokenRefusal::kQuota, "why"}, "client", "call refused");
  const std::vector<std::string> lines = log.lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], AllOf(HasSubstr("call refused why=run"), HasSubstr("client=client")));
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("callers_refused_total{reason=\"run\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("callers_refused_total{reason=\"quota\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("callers_refused_total{reason=\"unknown\"} 0\n"));
}

TEST_F(AuthorizationTest, ACallerLapsesWithItsTokenOrItsCertificate) {
  CoordinatorMetrics metrics;
  std::string why;
  Authorizer authorizer(
      {Auth::kBoth, "--auth", Role::kTrainer, [&](const std::string&) { return why; }}, &desk_,
      &metrics);
  const Caller caller = Known(Ask(Auth::kBoth, Token("a"), Certificate("trainer", "a")));
  EXPECT_FALSE(authorizer.Lapsed(caller));
  why = "your certificate was revoked";
  ASSERT_TRUE(authorizer.Lapsed(caller));
  EXPECT_EQ(authorizer.Lapsed(caller)->refusal, TokenRefusal::kRevoked);
  EXPECT_EQ(authorizer.Lapsed(caller)->text, why);
  const Caller without = Known(Ask(Auth::kToken, Token("a")));
  EXPECT_FALSE(authorizer.Lapsed(without)) << "it showed no certificate that counts";
  desk_.Revoke(without.token, [](const absl::Status& status) { EXPECT_TRUE(status.ok()); });
  ASSERT_TRUE(authorizer.Lapsed(without));
  EXPECT_FALSE(authorizer.Lapsed(Anybody(Role::kTrainer)));
}

TEST_F(AuthorizationTest, EveryReasonHasASeries) {
  CoordinatorMetrics metrics;
  const auto names = NamesOf(TokenRefusal());
  for (uint64_t value = names.first; value <= names.last(); ++value) {
    EXPECT_THAT(metrics.Text(), HasSubstr(std::string("callers_refused_total{reason=\"") +
                                          NameOf(static_cast<TokenRefusal>(value)) + "\"} 0\n"));
  }
}

}  // namespace
}  // namespace longhaul::coordinator
