// The story of a simulated run: always a digest, and text on demand.
//
// Two runs of one seed must tell the same story, word for word. The digest compares them without
// making the text.
#pragma once

#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/tick.h"
#include "peerd/core/values.h"
#include "proto/control/messages.h"
#include "proto/wire/frame.h"

namespace longhaul::sim {

class Story {
 public:
  // kQuiet: only the digest. kKeep: the lines are kept too. kPrint: they are kept and printed.
  enum class Mode { kQuiet, kKeep, kPrint };
  explicit Story(Mode mode) : mode_(mode) {}

  bool told() const { return mode_ != Mode::kQuiet; }

  // Tells one line. The parts follow one another without blanks.
  template <class... Parts>
  void Tell(Tick now, const Parts&... parts) {
    Mix(static_cast<uint64_t>(now.us));
    (MixPart(parts), ...);
    if (!told()) return;
    std::ostringstream line;
    (line << ... << parts);
    Write(now, line.str());
  }
  // Tells a line whose text is costly to make. In the digest `bytes` stand for the text.
  void TellLater(Tick now, std::string_view bytes, const std::function<std::string()>& text) {
    Mix(static_cast<uint64_t>(now.us));
    MixPart(bytes);
    if (told()) Write(now, text());
  }
  void Mix(uint64_t value) {
    digest_ = (digest_ ^ value) * 0x9e3779b97f4a7c15u;
    digest_ ^= digest_ >> 29;
  }

  uint64_t digest() const { return digest_; }
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  template <class T>
  void MixPart(const T& part) {
    if constexpr (std::is_integral_v<T>) {
      Mix(static_cast<uint64_t>(part));
    } else {
      const std::string_view text(part);
      Mix(std::hash<std::string_view>()(text));
    }
  }
  void Write(Tick now, const std::string& text);

  const Mode mode_;
  uint64_t digest_ = 0;
  std::vector<std::string> lines_;
};

std::string Describe(const control::PeerMessage& message);
std::string Describe(const control::CoordinatorMessage& message);
std::string Describe(const FrameHeader& header);
std::string Describe(const Outcome& outcome);

}  // namespace longhaul::sim
