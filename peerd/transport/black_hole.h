// Notices a path on which large packets vanish and nothing says so (RFC 2923, section 2.1): tunnels
// and PPPoE with a small MTU behind a firewall that drops ICMP. The handshake and PINGs pass, and
// every lane dies with its first full packet.
//
// Of one link. What tells is a *barren* lane: it was lost with segments (a control lane: frames) on
// the way, none of those that it ever carried was acknowledged, and other lanes were heard. Two of
// these, without a segment that arrives in between: lanes are dialled with small packets from then
// on, for as long as the link stands. If these are barren, too, the link is as good as silent.
//
// Plain state machine: no clock, no thread.
#pragma once

#include <cstdint>

#include "base/tick.h"

namespace longhaul::peerd {

// Payload of a TCP segment that fits any path: of the smallest IPv4 packet that all have to take
// (RFC 879).
inline constexpr uint32_t kSmallSegmentBytes = 536;

class BlackHole {
 public:
  enum class Verdict : uint8_t { kWait, kDialSmall, kBreak };

  // A barren lane was lost, at this end or, as it says, at the other one.
  Verdict OnBarren(bool control, Tick now, uint32_t detect_ms) {
    const int64_t detect = Millis(detect_ms);
    Losses& of_kind = control ? control_ : data_;
    // Losses long apart have nothing to do with each other.
    if (of_kind.count > 0 && now - of_kind.last > 2 * detect) of_kind.count = 0;
    if (of_kind.count++ == 0) of_kind.since = now;
    of_kind.last = now;
    if (of_kind.count < kLossesMax) return Verdict::kWait;
    if (!small_) {
      small_ = true;
      control_.count = data_.count = 0;
      return Verdict::kDialSmall;
    }
    return now - of_kind.since >= 2 * detect ? Verdict::kBreak : Verdict::kWait;
  }
  // A segment has arrived at the other end. Frames say little: the small ones always arrive.
  void OnAcknowledged() { data_.count = 0; }

  // Packets of new lanes are to be small.
  bool small() const { return small_; }

 private:
  static constexpr int kLossesMax = 2;
  struct Losses {
    int count = 0;  // in a row
    Tick since;     // the first of them
    Tick last;
  };

  Losses control_;
  Losses data_;
  bool small_ = false;
};

}  // namespace longhaul::peerd
