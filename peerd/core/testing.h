// Helpers for tests of the core: they look at actions and build messages.
#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/ids.h"
#include "peerd/core/actions.h"
#include "peerd/core/epoch_record.h"
#include "peerd/core/values.h"
#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

using Actions = std::vector<Action>;

// The actions of one kind, in order.
template <class T>
std::vector<T> Get(const Actions& actions) {
  std::vector<T> found;
  for (const Action& action : actions) {
    if (const T* one = std::get_if<T>(&action)) found.push_back(*one);
  }
  return found;
}

// The messages of one kind to the coordinator, in order.
template <class T>
std::vector<T> Sent(const Actions& actions) {
  std::vector<T> found;
  for (const ToCoordinator& action : Get<ToCoordinator>(actions)) {
    if (const T* one = std::get_if<T>(&action.message)) found.push_back(*one);
  }
  return found;
}

inline const GroupKey kGroup{"run", 0};

struct At {
  uint64_t member;
  uint64_t peer;
  uint64_t joined;
  Epoch background_until = Epoch();
};

// Ranks and ring have the order of `members`.
inline control::PrepareEpoch MakePrepare(uint64_t epoch, uint64_t base, uint64_t boundary,
                                         uint64_t last_freeze, const std::vector<At>& members) {
  control::PrepareEpoch prepare;
  prepare.group = kGroup;
  prepare.epoch = Epoch(epoch);
  prepare.base = Epoch(base);
  prepare.boundary = Epoch(boundary);
  prepare.last_freeze = Epoch(last_freeze);
  prepare.freeze = last_freeze == epoch;
  prepare.token = "token" + std::to_string(epoch);
  prepare.cause = "test";
  prepare.preparation = 1000 + epoch;
  for (const At& at : members) {
    prepare.members.push_back(
        {MemberId(at.member), PeerId(at.peer), Epoch(at.joined), "n", at.background_until});
    bool known = false;
    for (const auto& peer : prepare.peers) known = known || peer.peer == PeerId(at.peer);
    if (!known) prepare.peers.push_back({PeerId(at.peer), {"h:1"}, 0});
  }
  return prepare;
}

inline OpDesc Desc(uint64_t count, DType dtype = DType::kFloat32,
                   OnFault on_fault = OnFault::kRetry) {
  OpDesc desc;
  desc.dtype = dtype;
  desc.count = count;
  desc.on_fault = on_fault;
  return desc;
}

// Larger than a one-shot op, and large enough for a ring.
inline OpDesc Large() { return Desc(32 << 20); }
inline OpDesc Small() { return Desc(4); }

inline std::string PayloadOf(const OpDesc& desc) {
  return IsOneShot(desc) ? std::string(OneShotPayloadBytes(desc), 'x') : "";
}

}  // namespace longhaul::peerd
