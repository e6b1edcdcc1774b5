// Folds plain values into 64 bits: equal sequences give equal digests. Not for secrets.
#pragma once

#include <cstdint>
#include <string>

#include "base/hash128.h"
#include "base/ids.h"
#include "base/tick.h"

namespace longhaul {

// For other types of value: a function AddTo(const T&, Digester*) beside the type.
class Digester {
 public:
  Digester& Add(uint64_t value) {
    state_ = (state_ ^ value) * 0x9e3779b97f4a7c15u;
    state_ ^= state_ >> 29;
    return *this;
  }
  Digester& Add(const std::string& text) {
    Add(text.size());
    for (unsigned char byte : text) state_ = (state_ ^ byte) * 0x100000001b3u;
    return *this;
  }
  Digester& Add(Tick tick) { return Add(static_cast<uint64_t>(tick.us)); }
  template <class Kind>
  Digester& Add(Id<Kind> id) {
    return Add(id.value());
  }
  Digester& Add(const Hash128& hash) { return Add(hash.high).Add(hash.low); }
  Digester& Add(const GroupKey& key) { return Add(key.run).Add(uint64_t{key.group}); }
  template <class T>
  requires requires(const T& value, Digester* digest) { AddTo(value, digest); }
  Digester& Add(const T& value) {
    AddTo(value, this);
    return *this;
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325u;
};

}  // namespace longhaul
