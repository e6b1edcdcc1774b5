// Which lanes are sealed (authenticated and encrypted), and for how long one key serves.
#pragma once

#include <cstdint>

namespace longhaul::peerd {

enum class LaneEncryption : uint8_t {
  kOff,      // no lane
  kAuto,     // those that leave the host
  kRequire,  // all
};

// A key of a data lane may seal so many bytes. Then the lane breaks, and the lane that replaces it
// has another key. (With 2^39 blocks the advantage of an attacker on AES-GCM is about 2^-50.)
inline constexpr uint64_t kSealedBytesMax = uint64_t{1} << 43;

}  // namespace longhaul::peerd
