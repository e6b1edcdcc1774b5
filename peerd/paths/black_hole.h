// Notices a path on which large packets vanish without an error (RFC 2923, section 2.1): a tunnel
// or PPPoE with a small MTU, behind a firewall that drops ICMP. There the handshake and PINGs pass,
// and every lane dies with its first full packet.
//
// A lost lane is *barren* if it had segments (a control lane: frames) in flight, if none that it
// ever carried was acknowledged, and if other lanes were heard meanwhile. After two barren lanes of
// one kind (control or data) the link changes to small packets, and keeps them. A segment that
// arrives in between starts the count of data lanes again. If lanes of small packets are barren
// too, for twice detect_ms, the link breaks.
//
// Plain state machine of one link: no clock, no thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/tick.h"

namespace longhaul::peerd {

// The payload of a TCP segment that fits any path: 576 bytes, which every IPv4 host accepts, less
// two headers (RFC 879).
inline constexpr uint32_t kSmallSegmentBytes = 536;
// So many bytes, sent by one call on an idle connection, make one packet that is no larger than
// such a segment: TCP's options take up to 24 bytes of it.
inline constexpr size_t kSmallSendBytes = 512;

class BlackHole {
 public:
  enum class Verdict : uint8_t { kWait, kDialSmall, kBreak };

  // A barren lane was lost, here or at the peer.
  Verdict OnBarren(bool control, Tick now, uint32_t detect_ms) {
    const int64_t detect = Millis(detect_ms);
    Losses& of_kind = control ? control_ : data_;
    // Losses far apart have different causes.
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
  // A segment has arrived at the peer. Control frames say little, because small ones always arrive.
  void OnAcknowledged() { data_.count = 0; }

  // Whether new lanes must use small packets.
  bool small() const { return small_; }

 private:
  static constexpr int kLossesMax = 2;
  struct Losses {
    int count = 0;  // in a row
    Tick since;     // the first loss of the row
    Tick last;
  };

  Losses control_;
  Losses data_;
  bool small_ = false;
};

}  // namespace longhaul::peerd
