// Reads and writes little-endian numbers in byte ranges, and never beyond the end of the range.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

#include "base/check.h"

namespace longhaul {

// Reads foreign bytes. A read beyond the end gives zero or an empty span, and sets ok() to false
// for good. So a caller can read all fields first and ask ok() once.
class ByteReader {
 public:
  explicit ByteReader(std::span<const uint8_t> bytes) : rest_(bytes) {}

  uint8_t U8() { return Number<uint8_t>(); }
  uint16_t U16() { return Number<uint16_t>(); }
  uint32_t U32() { return Number<uint32_t>(); }
  uint64_t U64() { return Number<uint64_t>(); }

  std::span<const uint8_t> Bytes(size_t count) {
    if (!ok_ || count > rest_.size()) {
      ok_ = false;
      return {};
    }
    const auto bytes = rest_.first(count);
    rest_ = rest_.subspan(count);
    return bytes;
  }

  // Reads `count` bytes and returns whether all of them are zero. For reserved bytes.
  bool Zeros(size_t count) {
    const auto bytes = Bytes(count);
    uint8_t any = 0;
    for (const uint8_t byte : bytes) any |= byte;
    return ok_ && any == 0;
  }

  bool ok() const { return ok_; }
  size_t remaining() const { return rest_.size(); }

 private:
  template <class T>
  T Number() {
    const auto bytes = Bytes(sizeof(T));
    T value = 0;
    for (size_t i = 0; i < bytes.size(); ++i) value |= static_cast<T>(T{bytes[i]} << (8 * i));
    return value;
  }

  std::span<const uint8_t> rest_;
  bool ok_ = true;
};

// Writes into memory whose size our own code chose. A write beyond the end is our bug and aborts.
class ByteWriter {
 public:
  explicit ByteWriter(std::span<uint8_t> bytes) : rest_(bytes) {}

  void U8(uint8_t value) { Number(value); }
  void U16(uint16_t value) { Number(value); }
  void U32(uint32_t value) { Number(value); }
  void U64(uint64_t value) { Number(value); }

  void Bytes(std::span<const uint8_t> bytes) {
    if (bytes.empty()) return;
    std::memcpy(Take(bytes.size()), bytes.data(), bytes.size());
  }
  void Zeros(size_t count) {
    if (count != 0) std::memset(Take(count), 0, count);
  }

  size_t remaining() const { return rest_.size(); }

 private:
  uint8_t* Take(size_t count) {
    LH_CHECK(count <= rest_.size());
    uint8_t* const place = rest_.data();
    rest_ = rest_.subspan(count);
    return place;
  }
  template <class T>
  void Number(T value) {
    uint8_t* const place = Take(sizeof(T));
    for (size_t i = 0; i < sizeof(T); ++i) place[i] = static_cast<uint8_t>(value >> (8 * i));
  }

  std::span<uint8_t> rest_;
};

}  // namespace longhaul
