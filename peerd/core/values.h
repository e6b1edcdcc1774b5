// Values that the events and the actions of the peer core share: local members, their world, their
// posts.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "base/hash128.h"
#include "base/ids.h"
#include "proto/control/messages.h"
#include "proto/wire/op_desc.h"

namespace longhaul::peerd {

// Names a local member from its join to its end. Chosen outside the core and never reused. It is
// also the number of the Join message (control::Join::request).
using LocalId = Id<struct LocalIdKind>;

// The group at a member's last step boundary: the same epoch and size at all members that passed
// it, whatever has happened since. A newcomer's first boundary is the one that admitted it.
struct StepWorld {
  Epoch epoch;
  uint32_t rank = 0;
  uint32_t size = 0;
  LH_FIELDS(StepWorld, LH_FIELD(epoch), LH_FIELD(rank), LH_FIELD(size));
};

struct World {
  Epoch epoch;
  MemberId member;
  uint32_t rank = 0;
  uint32_t size = 0;
  uint32_t pending = 0;     // members of the group that wait for admission
  bool background = false;  // the member is in the background
  // EpochRecord::boundary at the member's last step boundary: the same at all members that passed
  // it.
  Epoch boundary;
  StepWorld step;
  friend bool operator==(const World&, const World&) = default;
};

struct OpInfo {
  Epoch epoch;  // the participants are members of this epoch
  // The members whose inputs are in the result, in rank order. The same at all participants.
  std::vector<MemberId> members;
  uint64_t hosts = 0;    // EpochHistory::HostsOf() these members
  uint32_t retries = 0;  // attempts that had every READY and were ended by a freeze
  int64_t total_us = 0;  // from the post to the answer
  int64_t wait_us = 0;   // from the post until every READY was here for the first time
  Algorithm algorithm = Algorithm::kAuto;  // of the last attempt
  // From the end of wait_us until this peer had the result for the last time. Includes attempts
  // that a fault ended. The rest of total_us is the agreement on the result, and its way into the
  // tensors.
  int64_t transfer_us = 0;
  Quantization codec = Quantization::kNone;  // of the last attempt; what was not encoded has none
  LH_FIELDS(OpInfo, LH_FIELD(epoch), LH_FIELD(members), LH_FIELD(hosts), LH_FIELD(retries),
            LH_FIELD(total_us), LH_FIELD(wait_us), LH_FIELD(algorithm), LH_FIELD(transfer_us),
            LH_FIELD(codec));
};

// Names a post of a local member. The driver finds the buffers of the post by this name.
struct PostRef {
  LocalId local;
  uint64_t call = 0;
  friend auto operator<=>(const PostRef&, const PostRef&) = default;
  LH_FIELDS(PostRef, LH_FIELD(local), LH_FIELD(call));
};

// What the driver must know about a post to find memory for it, before it gives the post to the
// core.
struct PostView {
  MemberId member;  // posts the op
  // The posts of other local members for the same op, with their members. They wait for this post.
  std::vector<std::pair<PostRef, MemberId>> together;
  size_t peers = 0;  // peers that take part in the op; as long as it lasts, they only become fewer
  bool crowded = false;  // several members are at one peer
};

// The result of a one-shot op at a participant that has answered its trainers. A participant sends
// it to other participants if a fault kept them from the same result.
struct OneShotResult {
  Epoch epoch;                    // the participants are members of this epoch
  std::vector<MemberId> members;  // as OpInfo::members
  std::string bytes;              // the tensor
  LH_FIELDS(OneShotResult, LH_FIELD(epoch), LH_FIELD(members), LH_FIELD(bytes));
};

// The state that a member brings to a sync. The driver has hashed it.
struct SyncRequest {
  control::SyncStrategy strategy = control::SyncStrategy::kPopular;
  uint64_t revision = 0;
  Hash128 manifest;
  Hash128 state;
  // The state is the peer's kept copy of a former member of the same name, not what the trainer
  // brought. `revision` is that of the copy.
  bool kept = false;
  // Some tensors have allow_unequal.
  bool unequal = false;
  // False: a damaged copy has overwritten some of the bytes, so the state cannot be elected and
  // must be fetched. `revision` is the trainer's.
  bool whole = true;
  friend bool operator==(const SyncRequest&, const SyncRequest&) = default;
};

}  // namespace longhaul::peerd
