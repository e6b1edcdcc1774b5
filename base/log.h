// Log lines to stderr: fixed words, then key=value; one line each, text or JSON.
//
//   Log(LogLevel::kInfo, absl::StrCat("epoch committed epoch=", 12, " members=", 5));
//   Log(LogLevel::kWarning, "link lost" + LogField("peer", name) + LogField("reason", reason));
//
// text:  2024-11-21T10:00:00.123456Z INFO epoch committed epoch=12 members=5
// json:  {"time":"2024-11-21T10:00:00.123456Z","level":"info","message":"epoch
// committed","epoch":"12",
//         "members":"5"}
//
// A line is written by one call of write(2). Control characters and bytes that are not UTF-8 are
// escaped, so foreign text can neither start a line of its own nor break the JSON. Any thread.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace longhaul {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };
enum class LogFormat { kText, kJson };

void Log(LogLevel level, std::string_view line);

// " key=value", with the value in quotes when it is empty or a blank, a quote or a control
// character is in it.
std::string LogField(std::string_view key, std::string_view value);

// Text and kInfo by default.
void SetLogFormat(LogFormat format);
// Lines below `level` are dropped.
void SetLogLevel(LogLevel level);
// Lines go to `sink` (without their newline) instead of stderr; nullptr: back. For tests.
void SetLogSink(std::function<void(std::string_view)> sink);

// A line as it is written, at `time_us` microseconds since 1970.
std::string FormatLogLine(LogFormat format, LogLevel level, std::string_view line,
                          long long time_us);

}  // namespace longhaul
