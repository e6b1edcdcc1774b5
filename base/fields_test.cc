#include "base/fields.h"

#include "base/digest.h"
#include "base/fields_json.h"
#include "base/outcome.h"
#include "gtest/gtest.h"

namespace longhaul {
namespace {

enum class Colour : uint8_t { kRed = 1, kGreen = 2 };
constexpr auto NamesOf(Colour) { return EnumNames{1, {"red", "green"}}; }

struct Part {
  MemberId member;
  uint32_t count = 0;
  MemberId Key() const { return member; }
  LH_FIELDS(Part, LH_FIELD(member, rule::Needed{}), LH_FIELD(count));
};

struct Thing {
  PeerId peer;
  Epoch epoch;
  uint64_t number = 1;
  bool flag = true;
  Colour colour = Colour::kRed;
  std::string name;
  std::string secret = "x";
  std::string bytes;
  Hash128 hash;
  Outcome outcome;
  std::optional<Part> part;
  std::vector<Part> parts;
  std::vector<PeerId> peers;
  std::vector<std::string> endpoints;
  std::vector<Part> rows;
  std::string Fault() const { return number == 13 ? Refusal("number", "13", "another") : ""; }
  LH_FIELDS(Thing, LH_FIELD(peer), LH_FIELD(epoch), LH_FIELD(number, rule::Range{1, UINT64_MAX}),
            LH_FIELD(flag), LH_FIELD(colour), LH_FIELD(name, rule::Name{0, 5}),
            LH_FIELD(secret, rule::Secret{1, 4}), LH_FIELD(bytes, rule::Bytes{0, 2}),
            LH_FIELD(hash), LH_FIELD(outcome, rule::Flat{}), LH_FIELD(part),
            LH_FIELD(parts, rule::List{0, 2}), LH_FIELD(peers, rule::List{0, 2}),
            LH_FIELD(endpoints, rule::List{0, 2, rule::Endpoint{10}}),
            LH_FIELD(rows, rule::Rows{}));
};

Thing SomeThing() {
  Thing thing;
  thing.peer = PeerId(0x1f);
  thing.epoch = Epoch(UINT64_MAX);
  thing.number = UINT64_MAX;
  thing.flag = false;
  thing.colour = Colour::kGreen;
  thing.name = "a.b";
  thing.secret = "\xff\x01";
  thing.bytes = std::string("\0\x9", 2);
  thing.hash = {1, 2};
  thing.outcome = {Code::kAborted, "\"why\"\\\n\x7f gr\xc3\xbc\xc3\x9f"};
  thing.part = Part{MemberId(7), 8};
  thing.parts = {{MemberId(1), 2}, {MemberId(3), 4}};
  thing.peers = {PeerId(10), PeerId(11)};
  thing.endpoints = {"h:1"};
  thing.rows = {{MemberId(5), 6}};
  return thing;
}

std::string Fault(void (*spoil)(Thing*)) {
  Thing thing = SomeThing();
  spoil(&thing);
  return FaultIn(thing);
}

// What the macros ask the compiler.
struct Pair {
  std::optional<std::string> first;
  bool second = false;
};
class Hidden {
 public:
  template <bool kWhole>
  static constexpr bool Lists() {
    using Self = Hidden;
    if constexpr (kWhole) {
      constexpr auto fields = std::tuple(LH_FIELD(first_), LH_FIELD(second_));
      return fields_internal::Lists<Self, std::remove_const_t<decltype(fields)>>::All();
    } else {
      constexpr auto fields = std::tuple(LH_FIELD(first_));
      return fields_internal::Lists<Self, std::remove_const_t<decltype(fields)>>::All();
    }
  }

 private:
  uint64_t first_ = 0;
  [[maybe_unused]] bool second_ = false;
};
template <class Struct, class... Field>
constexpr bool ListsAll(Field... /*fields*/) {
  return fields_internal::Lists<Struct, std::tuple<Field...>>::All();
}

TEST(FieldsTest, AListHasEveryFieldInOrder) {
  using Self = Pair;
  static_assert(ListsAll<Pair>(LH_FIELD(first), LH_FIELD(second)));
  static_assert(!ListsAll<Pair>(LH_FIELD(first)));
  static_assert(!ListsAll<Pair>(LH_FIELD(second)));
  static_assert(!ListsAll<Pair>(LH_FIELD(second), LH_FIELD(first)));
  static_assert(!ListsAll<Pair>());
  struct Nothing {};
  static_assert(ListsAll<Nothing>());
  static_assert(Hidden::Lists<true>());
  static_assert(!Hidden::Lists<false>());
}

TEST(FieldsTest, EachRuleNamesThePathAndWhatWasSeen) {
  EXPECT_EQ(FaultIn(SomeThing()), "");
  EXPECT_EQ(Fault([](Thing* t) { t->number = 0; }), "number is 0, not 1 to 18446744073709551615");
  EXPECT_EQ(Fault([](Thing* t) { t->number = 13; }), "number is 13, not another");
  EXPECT_EQ(Fault([](Thing* t) { t->colour = Colour(3); }), "colour is 3, not 1 to 2");
  EXPECT_EQ(Fault([](Thing* t) { t->name = "a b"; }),
            "name is \"a b\", not 0 to 5 bytes of [A-Za-z0-9._-]");
  EXPECT_EQ(Fault([](Thing* t) { t->secret = "12345"; }), "secret is 5 bytes, not 1 to 4");
  EXPECT_EQ(Fault([](Thing* t) { t->bytes = "123"; }), "bytes is 3 bytes, not 0 to 2");
  EXPECT_EQ(Fault([](Thing* t) { t->outcome.code = Code(10); }), "code is 10, not at most 9");
  EXPECT_EQ(Fault([](Thing* t) { t->part->member = MemberId(); }), "part.member is 0, not an id");
  EXPECT_EQ(Fault([](Thing* t) { t->parts[1].member = MemberId(); }),
            "parts[1].member is 0, not an id");
  EXPECT_EQ(Fault([](Thing* t) { t->parts.push_back({}); }), "parts is 3 long, not 0 to 2");
  EXPECT_EQ(Fault([](Thing* t) { t->parts[1] = t->parts[0]; }), "parts has m1 twice");
  EXPECT_EQ(Fault([](Thing* t) { t->peers[1] = PeerId(); }), "peers[1] is 0, not an id");
  EXPECT_EQ(Fault([](Thing* t) { t->peers[1] = t->peers[0]; }), "peers has pa twice");
  EXPECT_EQ(Fault([](Thing* t) { t->endpoints[0] = "h"; }),
            "endpoints[0] is \"h\", not host:port of at most 10 bytes");
}

TEST(FieldsTest, JsonIsReadable) {
  EXPECT_EQ(ToJson(SomeThing(), {.secrets = true}),
            "{\"peer\":\"p1f\",\"epoch\":18446744073709551615,\"number\":18446744073709551615,"
            "\"flag\":false,\"colour\":\"green\",\"name\":\"a.b\",\"secret\":\"ff01\","
            "\"bytes\":\"0009\",\"hash\":\"00000000000000010000000000000002\",\"code\":\"aborted\","
            "\"text\":\"\\\"why\\\"\\\\\\u000a\\u007f gr\xc3\xbc\xc3\x9f\","
            "\"part\":{\"member\":\"m7\",\"count\":8},"
            "\"parts\":[{\"member\":\"m1\",\"count\":2},{\"member\":\"m3\",\"count\":4}],"
            "\"peers\":[\"pa\",\"pb\"],\"endpoints\":[\"h:1\"],\"rows\":[{\"member\":\"m5\","
            "\"count\":6}]}");
  EXPECT_EQ(ToJson(SomeThing(), {.rows = false}).find("rows"), std::string::npos);
}

TEST(FieldsTest, JsonComesBackAsItWent) {
  for (const Thing& thing : {SomeThing(), Thing()}) {
    Thing again;
    EXPECT_EQ(FromJson(ToJson(thing, {.secrets = true}), &again), "");
    EXPECT_EQ(again, thing);
  }
}

struct Gone {
  LH_NAMED(Gone);
};
struct Come {
  uint32_t number = 0;
  uint32_t Key() const { return number; }
  LH_NAMED(Come, LH_FIELD(number));
};

TEST(FieldsTest, KindsAreNamedAndMapsAreLists) {
  std::variant<Gone, Come> kind = Come{7};
  EXPECT_EQ(ToJson(kind), "{\"Come\":{\"number\":7}}");
  EXPECT_EQ(FromJson("{\"Gone\":{}}", &kind), "");
  EXPECT_EQ(kind.index(), 0u);
  EXPECT_EQ(FromJson("{\"Went\":{}}", &kind),
            "kind \"Went\" is not known here at byte 8 of its record");
  std::map<uint32_t, Come> map;
  EXPECT_EQ(FromJson("[{\"number\":5},{\"number\":3}]", &map), "");
  EXPECT_EQ(ToJson(map), "[{\"number\":3},{\"number\":5}]");
  std::map<uint32_t, Come> twice;
  EXPECT_NE(FromJson("[{\"number\":5},{\"number\":5}]", &twice), "");
}

TEST(FieldsTest, FieldsMayBeMissingAndInAnyOrder) {
  Thing thing;
  EXPECT_EQ(FromJson(" { \"number\" : 5,\n\"peer\" : \"p2\" } ", &thing), "");
  Thing expected;
  expected.number = 5;
  expected.peer = PeerId(2);
  EXPECT_EQ(thing, expected);
}

TEST(FieldsTest, JsonOfNobodyIsRefused) {
  const auto fault = [](std::string_view text) {
    Thing thing;
    return FromJson(text, &thing);
  };
  EXPECT_EQ(fault("{\"later\":1}"), "field \"later\" is not known here at byte 9 of its record");
  EXPECT_EQ(fault(""), "no '{' at byte 0 of its record");
  EXPECT_EQ(fault("{}{}"), "more than one value at byte 2 of its record");
  for (const char* bad : {"{",
                          "{\"peer\"",
                          "{\"peer\":",
                          "{\"peer\":7}",
                          "{\"peer\":\"m7\"}",
                          "{\"peer\":\"p\"}",
                          "{\"peer\":\"pfffffffffffffffff\"}",
                          "{\"epoch\":\"7\"}",
                          "{\"epoch\":-1}",
                          "{\"epoch\":18446744073709551616}",
                          "{\"part\":{\"count\":4294967296}}",
                          "{\"flag\":1}",
                          "{\"flag\":tru}",
                          "{\"colour\":\"blue\"}",
                          "{\"colour\":1}",
                          "{\"secret\":\"f\"}",
                          "{\"secret\":\"fg\"}",
                          "{\"hash\":\"00\"}",
                          "{\"parts\":{}}",
                          "{\"parts\":[{}",
                          "{\"parts\":[{},]}",
                          "{\"name\":\"",
                          "{\"name\":\"\\\"}",
                          "{\"name\":\"\\x\"}",
                          "{\"name\":\"\\u00\"}",
                          "{\"name\":\"\\u00zz\"}",
                          "{\"peers\":[\"p1\"",
                          "{\"rows\":{}}",
                          "{\"peer\":\"p1\",}",
                          "{\"peer\":null}"}) {
    EXPECT_NE(fault(bad), "") << bad;
  }
}

TEST(FieldsTest, SecretsAreLeftOutOfTextsForPeopleAndOfDigests) {
  Thing thing = SomeThing();
  const std::string shown = ToJson(thing, {.secrets = false});
  EXPECT_EQ(shown.find("secret"), std::string::npos);
  const uint64_t digest = Digester().Add(thing).value();
  thing.secret = "other";
  EXPECT_EQ(Digester().Add(thing).value(), digest);
}

TEST(FieldsTest, EveryOtherFieldCountsInADigest) {
  const uint64_t digest = Digester().Add(SomeThing()).value();
  const auto changed = [&](void (*change)(Thing*)) {
    Thing thing = SomeThing();
    change(&thing);
    return Digester().Add(thing).value() != digest;
  };
  EXPECT_TRUE(changed([](Thing* t) { t->flag = true; }));
  EXPECT_TRUE(changed([](Thing* t) { t->outcome.text += "x"; }));
  EXPECT_TRUE(changed([](Thing* t) { t->part.reset(); }));
  EXPECT_TRUE(changed([](Thing* t) { t->parts[1].count = 5; }));
  EXPECT_TRUE(changed([](Thing* t) { t->peers.pop_back(); }));
  EXPECT_TRUE(changed([](Thing* t) { t->rows.push_back({}); }));
}

TEST(IdsTest, IdsComeBackFromTheirText) {
  PeerId peer;
  MemberId member;
  Epoch epoch;
  EXPECT_TRUE(ParseId("pffffffffffffffff", &peer) && peer == PeerId(UINT64_MAX));
  EXPECT_TRUE(ParseId("m18446744073709551615", &member) && member == MemberId(UINT64_MAX));
  EXPECT_TRUE(ParseId("7", &epoch) && epoch == Epoch(7));
  for (const char* bad : {"", "p", "m1", "1", "p1g", "pF", "p10000000000000000", "p 1"}) {
    EXPECT_FALSE(ParseId(bad, &peer)) << bad;
  }
  EXPECT_FALSE(ParseId("m18446744073709551616", &member));
  EXPECT_FALSE(ParseId("m1a", &member));
}

}  // namespace
}  // namespace longhaul
