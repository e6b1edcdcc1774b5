// Writes log lines to stderr, as text or JSON. A line has fixed words first, then key=value fields.
//
//   Log(LogLevel::kInfo, absl::StrCat("epoch committed epoch=", 12, " members=", 5));
//   Log(LogLevel::kWarning, "link lost" + LogField("peer", name) + LogField("reason", reason));
//
// As text:
//   2024-11-21T10:00:00.123456Z INFO epoch committed epoch=12 members=5
// As JSON (one line in the log):
//   {"time":"2024-11-21T10:00:00.123456Z","level":"info",
//    "message":"epoch committed","epoch":"12","members":"5"}
//
// Each line is written by one call of write(2). Control characters, marks of the direction of
// writing, and bytes that are not UTF-8 are escaped, so foreign text can neither begin a line of
// its own nor break the JSON. LogField() (text.h) keeps it from becoming fields.
//
// Threads: any thread may call any function.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/text.h"

namespace longhaul {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };
enum class LogFormat { kText, kJson };

void Log(LogLevel level, std::string_view line);

// The format. The default is kText.
void SetLogFormat(LogFormat format);
// Lines below `level` are dropped. The default is kInfo.
void SetLogLevel(LogLevel level);
// For tests: passes each line, without its newline, to `sink` instead of stderr. nullptr: back to
// stderr.
void SetLogSink(std::function<void(std::string_view)> sink);

// The line as Log() writes it. `time_us`: microseconds since 1970.
std::string FormatLogLine(LogFormat format, LogLevel level, std::string_view line,
                          long long time_us);

}  // namespace longhaul
