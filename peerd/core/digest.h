// Folds plain values into 64 bits: equal sequences give equal digests. Not for secrets.
#pragma once

#include <cstdint>
#include <string>

#include "base/ids.h"
#include "base/tick.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

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
  Digester& Add(const GroupKey& key) { return Add(key.run).Add(uint64_t{key.group}); }
  Digester& Add(const OpDesc& desc) {
    return Add(static_cast<uint64_t>(desc.kind))
        .Add(static_cast<uint64_t>(desc.dtype))
        .Add(static_cast<uint64_t>(desc.reduce))
        .Add(static_cast<uint64_t>(desc.on_fault))
        .Add(uint64_t{desc.quantization})
        .Add(uint64_t{desc.min_world})
        .Add(desc.count);
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325u;
};

}  // namespace longhaul::peerd
