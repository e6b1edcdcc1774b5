// For tests: the lines that are logged while an object of this class lives. Any thread may log.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"

namespace longhaul {

class LogLines {
 public:
  LogLines() {
    SetLogSink([this](std::string_view line) {
      MutexLock lock(&mutex_);
      lines_.emplace_back(line);
    });
  }
  ~LogLines() { SetLogSink(nullptr); }
  LogLines(const LogLines&) = delete;
  LogLines& operator=(const LogLines&) = delete;

  std::vector<std::string> lines() const {
    MutexLock lock(&mutex_);
    return lines_;
  }
  // How many of them have these words.
  int Count(std::string_view words) const {
    const std::vector<std::string> all = lines();
    return static_cast<int>(std::count_if(all.begin(), all.end(), [&](const std::string& line) {
      return line.find(words) != std::string::npos;
    }));
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace longhaul
