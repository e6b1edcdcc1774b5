#include "coordinator/core/token.h"

#include <bit>

#include "base/check.h"

namespace longhaul::coordinator {
namespace {

uint64_t LoadLittle(const char* bytes, size_t count) {
  uint64_t value = 0;
  for (size_t i = 0; i < count; ++i) {
    value |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
  }
  return value;
}

void AppendLittle(uint64_t value, size_t count, std::string* out) {
  for (size_t i = 0; i < count; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}

struct SipState {
  uint64_t v0, v1, v2, v3;

  void Round() {
    v0 += v1;
    v1 = std::rotl(v1, 13) ^ v0;
    v0 = std::rotl(v0, 32);
    v2 += v3;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 += v3;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 += v1;
    v1 = std::rotl(v1, 17) ^ v2;
    v2 = std::rotl(v2, 32);
  }
  void Absorb(uint64_t word) {
    v3 ^= word;
    Round();
    Round();
    v0 ^= word;
  }
  uint64_t Squeeze() {
    for (int i = 0; i < 4; ++i) Round();
    return v0 ^ v1 ^ v2 ^ v3;
  }
};

std::string Derive(const std::string& secret, std::string_view data) {
  LH_CHECK(secret.size() == kSecretBytes) << "a secret has " << secret.size() << " bytes";
  std::string out;
  for (size_t half = 0; half < 2; ++half) {
    std::array<uint8_t, 16> key;
    for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(secret[half * 16 + i]);
    for (uint8_t byte : SipHash128(key, data)) out.push_back(static_cast<char>(byte));
  }
  return out;
}

}  // namespace

std::array<uint8_t, 16> SipHash128(const std::array<uint8_t, 16>& key, std::string_view data) {
  const char* key_bytes = reinterpret_cast<const char*>(key.data());
  const uint64_t k0 = LoadLittle(key_bytes, 8);
  const uint64_t k1 = LoadLittle(key_bytes + 8, 8);
  SipState state{k0 ^ 0x736f6d6570736575u, k1 ^ 0x646f72616e646f6du ^ 0xee,
                 k0 ^ 0x6c7967656e657261u, k1 ^ 0x7465646279746573u};
  size_t at = 0;
  for (; at + 8 <= data.size(); at += 8) state.Absorb(LoadLittle(data.data() + at, 8));
  state.Absorb(LoadLittle(data.data() + at, data.size() - at) | uint64_t{data.size()} << 56);
  state.v2 ^= 0xee;
  const uint64_t low = state.Squeeze();
  state.v1 ^= 0xdd;
  const uint64_t high = state.Squeeze();

  std::array<uint8_t, 16> out;
  for (size_t i = 0; i < 8; ++i) {
    out[i] = static_cast<uint8_t>(low >> (8 * i));
    out[8 + i] = static_cast<uint8_t>(high >> (8 * i));
  }
  return out;
}

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
  const std::array<uint8_t, 16> hash = SipHash128({}, data);
  uint64_t id = 0;
  for (size_t i = 0; i < 8; ++i) id |= uint64_t{hash[i]} << (8 * i);
  return id == 0 ? 1 : id;
}

std::string EpochToken(const std::string& run_secret, uint32_t group, Epoch epoch) {
  std::string data("longhaul epoch token 1\0", 23);
  AppendLittle(group, 4, &data);
  AppendLittle(epoch.value(), 8, &data);
  return Derive(run_secret, data);
}

}  // namespace longhaul::coordinator
