// The values that events and actions of the peer core name: local members, their world, their
// posts.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/hash128.h"
#include "base/ids.h"
#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// One local member from join to end. Chosen by the driver, never reused; doubles as Join.request.
using LocalId = Id<struct LocalIdKind>;

struct World {
  Epoch epoch;
  MemberId member;
  uint32_t rank = 0;
  uint32_t size = 0;
  uint32_t pending = 0;
  bool background = false;  // its input is not in results yet
  friend bool operator==(const World&, const World&) = default;
};

struct OpInfo {
  Epoch epoch;        // whose members took part (those admitted by the op's boundary)
  uint32_t size = 0;  // members whose tensors are in the result
  uint32_t retries = 0;
  int64_t total_us = 0;
  int64_t wait_us = 0;
  Algorithm algorithm = Algorithm::kAuto;  // of the attempt that counted
  friend bool operator==(const OpInfo&, const OpInfo&) = default;
};

// A post of a local member: the driver knows its buffers by this.
struct PostRef {
  LocalId local;
  uint64_t call = 0;
  friend auto operator<=>(const PostRef&, const PostRef&) = default;
};

// What the driver has to know of a post before the core hears of it, to find memory for it.
struct PostView {
  MemberId member;                                     // who posts
  std::vector<std::pair<PostRef, MemberId>> together;  // posts of the same op that wait here
  size_t peers = 0;  // that take part: as long as the op lasts they become fewer only
};

// How a one-shot op has ended at some participant, for those that were kept from it by a fault.
struct OneShotResult {
  Epoch epoch;           // whose members took part
  uint32_t members = 0;  // whose tensors are in it
  std::string bytes;     // of the tensor
  friend bool operator==(const OneShotResult&, const OneShotResult&) = default;
};

// The state that a trainer brings to a sync; hashed by the driver before.
struct SyncRequest {
  control::SyncStrategy strategy = control::SyncStrategy::kPopular;
  uint64_t revision = 0;
  Hash128 manifest;
  Hash128 state;
  // It is what the peer kept of a former member of the name, at the revision that it had then.
  bool kept = false;
  // Some of its tensors may be unequal.
  bool unequal = false;
  // False: the bytes are nobody's, and cannot be elected. The rest says what was brought.
  bool whole = true;
  friend bool operator==(const SyncRequest&, const SyncRequest&) = default;
};

}  // namespace longhaul::peerd
