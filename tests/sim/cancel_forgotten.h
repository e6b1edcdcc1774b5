// The planted bug kCancelForgotten: a judge that aborts a cancelled op only where it was cancelled.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <variant>

#include "base/ids.h"
#include "proto/control/messages.h"

namespace longhaul::sim {

class CancelForgotten {
 public:
  // A message from a peer, which may report a cancelled op.
  void Note(uint64_t peer, const control::PeerMessage& message) {
    const auto* const ready = std::get_if<control::EpochReady>(&message);
    if (ready == nullptr) return;
    for (const control::OpReport& op : ready->ops) {
      if (op.cancelled) cancellers_[{ready->group, ready->epoch}].insert(peer);
    }
  }
  // Changes the fates of a peer that has cancelled nothing.
  void Forge(uint64_t peer, control::CommitEpoch* commit) const {
    const auto found = cancellers_.find({commit->group, commit->epoch});
    if (found == cancellers_.end() || found->second.contains(peer)) return;
    commit->missed.clear();
    for (control::OpFate& fate : commit->fates) {
      if (fate.fate == control::Fate::kAbort) fate.fate = control::Fate::kRedo;
    }
  }

 private:
  std::map<std::pair<GroupKey, Epoch>, std::set<uint64_t>> cancellers_;
};

}  // namespace longhaul::sim
