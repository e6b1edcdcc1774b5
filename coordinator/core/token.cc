#include "coordinator/core/token.h"

#include "base/check.h"
#include "base/crypto/secrets.h"

namespace longhaul::coordinator {
namespace {

static_assert(kSecretBytes == kSha256Bytes);

void AppendLittle(uint64_t value, size_t count, std::string* out) {
  for (size_t i = 0; i < count; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}

std::string Derive(const std::string& secret, const std::string& data) {
  LH_CHECK(secret.size() == kSecretBytes) << "a secret has " << secret.size() << " bytes";
  return HmacSha256(secret, data);
}

}  // namespace

// Inputs of different meaning are different bytes. The labels differ and end with a zero byte. All
// fields behind a label have a fixed length, except the last one. In PreparationId() two fields
// have none, so the length of the first one stands before them.
std::string RunSecret(const std::string& entropy, uint64_t number, const std::string& run) {
  std::string data("longhaul run secret 1\0", 22);
  AppendLittle(number, 8, &data);
  data += run;
  return Derive(entropy, data);
}

uint64_t PreparationId(const std::string& incarnation, const GroupKey& group, Epoch epoch) {
  std::string data("longhaul preparation 1\0", 23);
  AppendLittle(group.group, 4, &data);
  AppendLittle(epoch.value(), 8, &data);
  AppendLittle(group.run.size(), 8, &data);
  data += group.run + incarnation;
  const std::string hash = Sha256(data);
  uint64_t id = 0;
  for (size_t i = 0; i < 8; ++i) id |= uint64_t{static_cast<uint8_t>(hash[i])} << (8 * i);
  return id == 0 ? 1 : id;
}

std::string EpochToken(const std::string& run_secret, uint32_t group, Epoch epoch) {
  std::string data("longhaul epoch token 1\0", 23);
  AppendLittle(group, 4, &data);
  AppendLittle(epoch.value(), 8, &data);
  return Derive(run_secret, data);
}

}  // namespace longhaul::coordinator
