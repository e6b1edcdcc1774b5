// In a group that signs READYs: how many of each name this peer has announced in an attempt. Plain
// value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "base/fields.h"
#include "peerd/core/events.h"
#include "peerd/core/op_state.h"

namespace longhaul::peerd {

class ReadyNumbers {
 public:
  // The number of the next READY of this name (control::ReadyName::index).
  uint64_t Next(const OpKey& key) { return announced_[key]++; }
  // The READY of another peer meets no op here. The next one of its name is the next here, too.
  void Skip(const PeerReady& ready) {
    if (!ready.signature) return;
    uint64_t& announced = announced_[{ready.boundary, ready.tag, ready.set}];
    announced = std::max(announced, ready.signature->index + 1);
  }
  // True once, if so many names are counted that counting has to begin anew.
  bool AsksForNewAttempt() {
    return announced_.size() >= kNamesMax && !std::exchange(asked_, true);
  }
  // A new attempt begins.
  void Clear() { *this = ReadyNumbers(); }

  LH_STATE(ReadyNumbers, LH_FIELD(announced_), LH_FIELD(asked_));

 private:
  static constexpr size_t kNamesMax = 65536;
  std::map<OpKey, uint64_t> announced_;
  bool asked_ = false;
};

}  // namespace longhaul::peerd
