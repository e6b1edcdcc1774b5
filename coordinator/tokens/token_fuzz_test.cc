// Feeds garbage to the parsers of join tokens and of their stored records. The first byte chooses.
#include <cstdint>
#include <string>
#include <variant>

#include "base/check.h"
#include "base/fields_json.h"
#include "coordinator/tokens/token_desk.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace coordinator = longhaul::coordinator;
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 'r') {
    // An accepted record, written again, must be accepted with the same value.
    coordinator::TokenRecord record, again;
    if (longhaul::FromJson(text, &record).empty() && longhaul::FaultIn(record).empty()) {
      LH_CHECK(longhaul::FromJson(longhaul::ToJson(record, {.secrets = true}), &again).empty() &&
               again == record);
    }
    return 0;
  }
  static const auto& desk = *new coordinator::TokenDesk({}, {});
  if (const auto parts = coordinator::ParseToken(text)) {
    LH_CHECK(parts->id.size() == coordinator::kTokenIdBytes && parts->secret.size() == 32);
  }
  // No token exists, so none is accepted.
  LH_CHECK(std::holds_alternative<coordinator::Denial>(desk.Check(text)));
  return 0;
}
