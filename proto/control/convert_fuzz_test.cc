// Feeds garbage to the parsers of the control stream. The first byte chooses the direction.
#include <cstdint>
#include <string>

#include "base/check.h"
#include "proto/control/convert.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace control = longhaul::control;
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  // An accepted message, serialized again, must be accepted with the same value.
  if (data[0] % 2 == 0) {
    if (const auto message = control::ParsePeerMessage(bytes); message.ok()) {
      LH_CHECK(*control::ParsePeerMessage(control::Serialize(*message)) == *message);
    }
  } else {
    if (const auto message = control::ParseCoordinatorMessage(bytes); message.ok()) {
      LH_CHECK(*control::ParseCoordinatorMessage(control::Serialize(*message)) == *message);
    }
  }
  return 0;
}
