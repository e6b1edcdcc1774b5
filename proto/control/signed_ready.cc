#include "proto/control/signed_ready.h"

#include <array>
#include <string_view>

#include "base/bytes.h"
#include "base/crypto/identity.h"

namespace longhaul::control {

std::string TextToSign(const ReadyName& name, const std::string& digest) {
  constexpr std::string_view kPurpose = "longhaul READY 1";
  std::array<uint8_t, 7 * 8> numbers;
  ByteWriter writer(numbers);
  writer.U64(name.group.group);
  writer.U64(name.attempt.value());
  writer.U64(name.boundary.value());
  writer.U64(name.tag);
  writer.U64(name.set);
  writer.U64(name.index);
  writer.U64(name.group.run.size());
  std::string text(kPurpose);
  text.append(reinterpret_cast<const char*>(numbers.data()), numbers.size());
  return text + name.group.run + digest;
}

bool IsStatementOf(const std::string& public_key, const ReadyName& name,
                   const Statement& statement) {
  return IsSignedBy(public_key, TextToSign(name, statement.digest), statement.signature);
}

}  // namespace longhaul::control
