#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <cctype>
#include <cstdio>
#include <ctime>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace longhaul {
namespace {

std::atomic<LogFormat> log_format{LogFormat::kText};
std::atomic<LogLevel> log_level{LogLevel::kInfo};

struct Sink {
  Mutex mutex;
  std::function<void(std::string_view)> function ABSL_GUARDED_BY(mutex);
};

// Never destroyed: threads may log while the process exits.
Sink& GetSink() {
  static Sink* const sink = new Sink;
  return *sink;
}

const char* Name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "DEBUG";
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      return "ERROR";
  }
  return "?";
}

// Writes characters that may not be shown, and bytes that are not UTF-8, as \xHH.
std::string Escape(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const Character first = FirstCharacter(text);
    if (first.shown) {
      out.append(text.substr(0, first.bytes));
      text.remove_prefix(first.bytes);
      continue;
    }
    char hex[8];
    std::snprintf(hex, sizeof hex, "\\x%02x", static_cast<uint8_t>(text[0]));
    out += hex;
    text.remove_prefix(1);
  }
  return out;
}

std::string JsonString(std::string_view escaped) {
  std::string out = "\"";
  for (const char c : escaped) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

std::string FormatTime(long long time_us) {
  const time_t seconds = static_cast<time_t>(time_us / 1000000);
  struct tm utc {};
  gmtime_r(&seconds, &utc);
  char text[64];
  std::snprintf(text, sizeof text, "%04d-%02d-%02dT%02d:%02d:%02d.%06lldZ", utc.tm_year + 1900,
                utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
                time_us % 1000000);
  return text;
}

// The parts of a line such as `words words key=value key="quoted value"`.
struct Parts {
  std::string words;
  std::vector<std::pair<std::string, std::string>> fields;
};

// Returns the length of the key if the text begins with key=..., else nullopt.
std::optional<size_t> KeyLength(std::string_view text) {
  size_t i = 0;
  while (i < text.size() && (std::isalnum(static_cast<unsigned char>(text[i])) || text[i] == '_')) {
    ++i;
  }
  if (i == 0 || i == text.size() || text[i] != '=') return std::nullopt;
  return i;
}

std::string TakeValue(std::string_view* text) {
  if (text->empty() || text->front() != '"') {
    const size_t end = std::min(text->find(' '), text->size());
    std::string value(text->substr(0, end));
    text->remove_prefix(end);
    return value;
  }
  std::string value;
  text->remove_prefix(1);
  while (!text->empty() && text->front() != '"') {
    if (text->front() == '\\' && text->size() > 1 && ((*text)[1] == '"' || (*text)[1] == '\\')) {
      text->remove_prefix(1);
    }
    value += text->front();
    text->remove_prefix(1);
  }
  if (!text->empty()) text->remove_prefix(1);
  return value;
}

Parts Split(std::string_view line) {
  Parts parts;
  while (!line.empty()) {
    if (line.front() == ' ') {
      line.remove_prefix(1);
      continue;
    }
    if (const auto key = KeyLength(line)) {
      std::string name(line.substr(0, *key));
      line.remove_prefix(*key + 1);
      parts.fields.emplace_back(std::move(name), TakeValue(&line));
      continue;
    }
    // A word without "=". If a field came before it, the word is a part of that field's value.
    const size_t end = std::min(line.find(' '), line.size());
    std::string& text = parts.fields.empty() ? parts.words : parts.fields.back().second;
    if (!text.empty()) text += ' ';
    text.append(line.substr(0, end));
    line.remove_prefix(end);
  }
  return parts;
}

std::string FormatJson(LogLevel level, std::string_view line, long long time_us) {
  std::string name = Name(level);
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const Parts parts = Split(line);
  std::string out = "{\"time\":\"" + FormatTime(time_us) + "\",\"level\":\"" + name +
                    "\",\"message\":" + JsonString(Escape(parts.words));
  for (const auto& [key, value] : parts.fields) {
    // Fields must not replace "time", "level" and "message".
    const bool taken = key == "time" || key == "level" || key == "message";
    out += ",\"" + key + (taken ? "_" : "") + "\":" + JsonString(Escape(value));
  }
  return out + "}";
}

void WriteAll(std::string_view line) {
  while (!line.empty()) {
    const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
    if (written <= 0) return;  // stderr is gone: nothing more can be done
    line.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace

std::string FormatLogLine(LogFormat format, LogLevel level, std::string_view line,
                          long long time_us) {
  if (format == LogFormat::kJson) return FormatJson(level, line, time_us);
  return FormatTime(time_us) + " " + Name(level) + " " + Escape(line);
}

void Log(LogLevel level, std::string_view line) {
  if (level < log_level.load(std::memory_order_relaxed)) return;
  struct timespec now {};
  clock_gettime(CLOCK_REALTIME, &now);
  const long long time_us = static_cast<long long>(now.tv_sec) * 1000000 + now.tv_nsec / 1000;
  std::string text =
      FormatLogLine(log_format.load(std::memory_order_relaxed), level, line, time_us);
  Sink& sink = GetSink();
  MutexLock lock(&sink.mutex);
  if (sink.function) {
    sink.function(text);
    return;
  }
  text += '\n';
  WriteAll(text);
}

void SetLogFormat(LogFormat format) { log_format = format; }
void SetLogLevel(LogLevel level) { log_level = level; }
void SetLogSink(std::function<void(std::string_view)> sink) {
  Sink& holder = GetSink();
  MutexLock lock(&holder.mutex);
  holder.function = std::move(sink);
}

}  // namespace longhaul
