#include "base/log.h"

#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace longhaul {
namespace {

// 2024-11-21T10:00:00.123456Z
constexpr long long kTime = 1732183200123456;

TEST(LogTest, TextIsTimeLevelAndLine) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, LogLevel::kInfo, "epoch committed epoch=12", kTime),
            "2024-11-21T10:00:00.123456Z INFO epoch committed epoch=12");
}

TEST(LogTest, JsonSeparatesWordsFromFields) {
  EXPECT_EQ(
      FormatLogLine(LogFormat::kJson, LogLevel::kWarning,
                    "link lost peer=p1f" + LogField("reason", "no \"answer\" for 2 s"), kTime),
      "{\"time\":\"2024-11-21T10:00:00.123456Z\",\"level\":\"warning\",\"message\":\"link lost\","
      "\"peer\":\"p1f\",\"reason\":\"no \\\"answer\\\" for 2 s\"}");
}

TEST(LogTest, FieldCannotReplaceTheLinesOwnMembers) {
  EXPECT_EQ(FormatLogLine(LogFormat::kJson, LogLevel::kInfo, "x time=1 level=2", kTime),
            "{\"time\":\"2024-11-21T10:00:00.123456Z\",\"level\":\"info\",\"message\":\"x\","
            "\"time_\":\"1\",\"level_\":\"2\"}");
}

TEST(LogTest, ForeignTextStaysOnItsLine) {
  const std::string hostile = "a\nb\x1b[2J\xff\xc0\x80 \xc3\xa9";
  EXPECT_EQ(FormatLogLine(LogFormat::kText, LogLevel::kError, hostile, kTime),
            "2024-11-21T10:00:00.123456Z ERROR a\\x0ab\\x1b[2J\\xff\\xc0\\x80 \xc3\xa9");
  EXPECT_EQ(
      FormatLogLine(LogFormat::kJson, LogLevel::kError, "a\nb", kTime),
      "{\"time\":\"2024-11-21T10:00:00.123456Z\",\"level\":\"error\",\"message\":\"a\\\\x0ab\"}");
}

TEST(LogTest, TextThatSteersATerminalOrHidesIsEscaped) {
  const auto shown = [](const std::string& text) {
    return FormatLogLine(LogFormat::kText, LogLevel::kInfo, text, kTime).substr(33);
  };
  EXPECT_EQ(shown("a\xc2\x9b"
                  "2J"),
            "a\\xc2\\x9b2J");  // U+009B, as ESC [
  EXPECT_EQ(shown("a\xe2\x80\xae"
                  "b"),
            "a\\xe2\\x80\\xae"
            "b");                                         // U+202E
  EXPECT_EQ(shown("a\xe2\x81\xa9"), "a\\xe2\\x81\\xa9");  // U+2069
  EXPECT_EQ(shown("\xe2\x80\xa8x"), "\\xe2\\x80\\xa8x");  // U+2028
  EXPECT_EQ(shown("\xe2\x82\xac \xf0\x9f\x9a\x82"), "\xe2\x82\xac \xf0\x9f\x9a\x82");
}

TEST(LogTest, AValueBringsNoFields) {
  for (const char* const value :
       {"bye peer=p1 why=evicted", "\" peer=p1", "x\\\" peer=p1", "peer=p1"}) {
    const std::string line =
        "member removed member=m1" + LogField("reason", value) + " cause=leave";
    const std::string json = FormatLogLine(LogFormat::kJson, LogLevel::kInfo, line, kTime);
    EXPECT_EQ(json.find("\"peer\":"), std::string::npos) << json;
    EXPECT_NE(json.find("\"cause\":\"leave\""), std::string::npos) << json;
  }
}

TEST(LogTest, FieldIsQuotedOnlyWhereNeeded) {
  EXPECT_EQ(LogField("a", "b"), " a=b");
  EXPECT_EQ(LogField("a", ""), " a=\"\"");
  EXPECT_EQ(LogField("a", "b c"), " a=\"b c\"");
}

TEST(LogTest, LinesOfThreadsDoNotMixAndLowLevelsAreDropped) {
  std::vector<std::string> lines;
  SetLogSink([&](std::string_view line) { lines.emplace_back(line); });
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int j = 0; j < 100; ++j) {
        Log(LogLevel::kInfo, "kept");
        Log(LogLevel::kDebug, "dropped");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  SetLogSink(nullptr);
  ASSERT_EQ(lines.size(), 400u);
  for (const std::string& line : lines) EXPECT_TRUE(line.ends_with(" INFO kept")) << line;
}

}  // namespace
}  // namespace longhaul
